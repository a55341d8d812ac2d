"""RoCEv2 frames made by hand, from the IBTA specification and with zlib's CRC: nothing of `mirror` is in them."""

from __future__ import annotations

import ctypes
import socket
import struct
import zlib
from dataclasses import dataclass, field

from tcp_frames import START, block_of

from mirror.messages import MessageRecorder
from mirror.roce import MessageSpans, QueuePairs, RoceReassembler
from mirror.roce_spans import BEGIN, DATA, DUPLICATE, END, HOLE, KIND_NAMES, VOID

(SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_LAST_IMM, SEND_ONLY, SEND_ONLY_IMM, FIRST, MIDDLE, LAST, LAST_IMM, ONLY,
 ONLY_IMM, READ, RESPONSE_FIRST, RESPONSE_MIDDLE, RESPONSE_LAST, RESPONSE_ONLY, ACK) = range(18)
_RETH = (FIRST, ONLY, ONLY_IMM, READ)
_IMM = (SEND_LAST_IMM, SEND_ONLY_IMM, LAST_IMM, ONLY_IMM)
_AETH = (RESPONSE_FIRST, RESPONSE_LAST, RESPONSE_ONLY, ACK)
A, B = "10.0.0.1", "10.0.0.2"


def roce_frame(opcode: int, psn: int, payload: bytes = b"", *, qp: int = 0x11, va: int = 0, rkey: int = 7,
               size: int = 0, imm: int = 0, syndrome: int = 0, src: str = A, dst: str = B, sport: int = 50000,
               flags: int = 0, good: bool = True) -> bytes:
    """Ethernet, IPv4 or IPv6, UDP, BTH, what the opcode has, payload, pad, invariant CRC (wrong if not `good`)."""
    pad = -len(payload) % 4
    transport = struct.pack("!BBHII", opcode, pad << 4 | flags, 0xFFFF, qp, psn & 0xFFFFFF)
    if opcode in _RETH:
        transport += struct.pack("!QII", va, rkey, size)
    if opcode in _IMM:
        transport += struct.pack("!I", imm)
    if opcode in _AETH:
        transport += struct.pack("!I", syndrome << 24 | 1)
    transport += payload + bytes(pad)
    udp = struct.pack("!HHHH", sport, 4791, 8 + len(transport) + 4, 0)
    length = len(udp) + len(transport) + 4
    if ":" in src:
        ip = struct.pack("!IHBB", 6 << 28, length, 17, 64)
        ip += socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst)
        masked = b"\x6f\xff\xff\xff" + ip[4:7] + b"\xff" + ip[8:]
        ethertype = b"\x86\xdd"
    else:
        ip = struct.pack("!BBHHHBBH", 0x45, 2, 20 + length, psn & 0xFFFF, 0x4000, 64, 17, 0)
        ip += socket.inet_aton(src) + socket.inet_aton(dst)
        masked = ip[:1] + b"\xff" + ip[2:8] + b"\xff" + ip[9:10] + b"\xff\xff" + ip[12:]
        ethertype = b"\x08\x00"
    covered = bytes(8 * [0xFF]) + masked + udp[:6] + b"\xff\xff" + transport[:4] + b"\xff" + transport[5:]
    crc = zlib.crc32(covered) ^ (0 if good else 1)
    return bytes(12) + ethertype + ip + udp + transport + struct.pack("<I", crc)


@dataclass
class Packet:
    """One packet of a message, and what it is there for."""

    frame: bytes
    psn: int
    offset: int
    payload: bytes


@dataclass
class Sender:
    """One queue pair's side of a connection: messages in, packets out."""

    mtu: int = 1024
    psn: int = 0
    ends: dict[str, object] = field(default_factory=dict)

    def write(self, data: bytes, *, va: int = 0x7F0000000000, rkey: int = 7, imm: int | None = None) -> list[Packet]:
        return self._cut(data, (FIRST, MIDDLE, LAST if imm is None else LAST_IMM, ONLY if imm is None else ONLY_IMM),
                         va=va, rkey=rkey, size=len(data), imm=imm or 0)

    def send(self, data: bytes, *, imm: int | None = None) -> list[Packet]:
        last, only = (SEND_LAST, SEND_ONLY) if imm is None else (SEND_LAST_IMM, SEND_ONLY_IMM)
        return self._cut(data, (SEND_FIRST, SEND_MIDDLE, last, only), imm=imm or 0)

    def _cut(self, data: bytes, opcodes: tuple[int, int, int, int], **fields: int) -> list[Packet]:
        pieces = [data[i : i + self.mtu] for i in range(0, len(data), self.mtu)] or [b""]
        packets = []
        for i, piece in enumerate(pieces):
            part = 3 if len(pieces) == 1 else 0 if i == 0 else 2 if i == len(pieces) - 1 else 1
            frame = roce_frame(opcodes[part], self.psn, piece, **fields, **self.ends)
            packets.append(Packet(frame, self.psn & 0xFFFFFF, i * self.mtu, piece))
            self.psn += 1
        return packets


def ack(psn: int, *, syndrome: int = 0, qp: int = 0x22, sport: int = 50000) -> bytes:
    """From the other side: everything up to `psn` was received (syndrome 0x60: everything before it)."""
    return roce_frame(ACK, psn, qp=qp, syndrome=syndrome, src=B, dst=A, sport=sport)


class Wire:
    """A reassembler with the rules of MessageSpans checked on everything that comes out, spans as plain tuples, and a
    recorder."""

    def __init__(self, flows: QueuePairs | None = None, **options: int) -> None:
        self.flows = flows or QueuePairs(64)
        self.roce = RoceReassembler(self.flows, **options)
        self.recorder = MessageRecorder(self.roce)
        self.now = START
        self._given: dict[int, list[tuple[int, int]]] = {}
        self._ended: dict[int, int] = {}

    def feed(self, *frames: bytes, after: int = 0, wirelen: list[int] | None = None) -> list[tuple[object, ...]]:
        """Frames of one block, `after` ns behind the block before."""
        self.now += after
        return self.read(self.roce.feed(block_of(frames, self.now, wirelen=wirelen), self.now))

    def expire(self, after: int) -> list[tuple[object, ...]]:
        self.now += after
        return self.read(self.roce.expire(self.now))

    def flush(self) -> list[tuple[object, ...]]:
        return self.read(self.roce.flush(self.now))

    def read(self, spans: MessageSpans) -> list[tuple[object, ...]]:
        """(kind, message or flow, offset, bytes) for data and duplicates, (kind, message or flow, offset, length) for
        the rest."""
        self.recorder.feed(spans)
        result: list[tuple[object, ...]] = []
        for i in range(spans.n):
            flow, kind, slot, offset, length = (
                int(a[i]) for a in (spans.flow, spans.kind, spans.message, spans.offset, spans.length))
            value: object = length
            if kind == BEGIN:
                self._given[slot], self._ended[slot] = [], -1
            elif slot >= 0:
                assert slot in self._given, "a span of a message that did not begin"
            if kind in (DATA, DUPLICATE):
                assert length > 0
                value = ctypes.string_at(int(spans.addr[i]), length)
                inside = any(a <= offset and offset + length <= b for a, b in self._given[slot])
                overlap = any(offset < b and a < offset + length for a, b in self._given[slot])
                assert inside if kind == DUPLICATE else not overlap
                assert kind == DUPLICATE or self._ended[slot] < 1, "data of a message that was complete"
                if kind == DATA:
                    self._given[slot].append((offset, offset + length))
            elif kind == END:
                assert length > self._ended[slot], "an end told twice"
                self._ended[slot] = length
            elif kind == HOLE and slot >= 0:
                assert not any(offset < b and a < offset + length for a, b in self._given[slot])
            elif kind == VOID:
                del self._given[slot]
            result.append((KIND_NAMES[kind], slot if slot >= 0 else ("flow", flow), offset, value))
        return result
