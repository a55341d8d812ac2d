"""Frames and blocks made by hand, for the tests of frames, TCP and what is built on them."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mirror.block import Block, pack
from mirror.flows import Flows
from mirror.spans import CLOSE, DATA, DUPLICATE, HOLE, KIND_NAMES, OPEN, Spans
from mirror.tcp import TcpReassembler

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
SECOND = 1_000_000_000
MS = 1_000_000
START = 1_700_000_000 * SECOND

# A connection from 10.0.0.1:1000 to 10.0.0.2:2000 whose numbers wrap soon, and what its frames back differ in.
ISN = 0xFFFFFF00
BACK = {"src": "10.0.0.2", "dst": "10.0.0.1", "sport": 2000, "dport": 1000}


def tcp_frame(payload: bytes = b"", *, seq: int = 0, ack: int = 0, flags: int = ACK, src: str = "10.0.0.1",
              dst: str = "10.0.0.2", sport: int = 1000, dport: int = 2000) -> bytes:
    """Ethernet, IPv4 or IPv6, TCP without options."""
    tcp = struct.pack("!HHIIBBHHH", sport, dport, seq & 0xFFFFFFFF, ack & 0xFFFFFFFF, 0x50, flags, 65535, 0, 0)
    if ":" in src:
        ip = struct.pack("!IHBB", 6 << 28, len(tcp) + len(payload), 6, 64)
        ip += socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst)
        return bytes(12) + b"\x86\xdd" + ip + tcp + payload
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp) + len(payload), 1, 0x4000, 64, 6, 0)
    return bytes(12) + b"\x08\x00" + ip + socket.inet_aton(src) + socket.inet_aton(dst) + tcp + payload


def summed(frame: bytes, *, offloaded: bool = False) -> bytes:
    """An Ethernet frame of IPv4 or IPv6 without options and of TCP, with its checksum right; `offloaded`: as a host
    leaves it for its adapter. From RFC 9293, one word after the other."""
    addresses, start = ((26, 34), 34) if frame[12:14] == b"\x08\x00" else ((22, 54), 54)
    tcp = frame[start : start + 16] + b"\0\0" + frame[start + 18 :]
    pseudo = frame[slice(*addresses)] + struct.pack("!II", len(tcp), 6)
    whole = pseudo if offloaded else pseudo + tcp + bytes(len(tcp) & 1)
    total = sum(word for (word,) in struct.iter_unpack("!H", whole))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    field = total if offloaded else 0xFFFF - total
    return frame[: start + 16] + struct.pack("!H", field) + frame[start + 18 :]


def flipped(frame: bytes, bit: int) -> bytes:
    """With one bit changed; a negative one counts from the end."""
    whole = bytearray(frame)
    bit %= 8 * len(frame)
    whole[bit // 8] ^= 1 << bit % 8
    return bytes(whole)


def block_of(frames: Sequence[bytes], ts: int | Sequence[int] = START, *, wirelen: Sequence[int] | None = None,
             vlan: int = -1, linktype: int = 1, vantage: int = 0) -> Block:
    """One block of frames; `ts` for all of them or one each."""
    block = pack(frames, ts)
    wire = block.caplen.copy() if wirelen is None else np.array(wirelen, np.int64)
    return replace(block, wirelen=wire, vlan=np.full(len(frames), vlan, np.int64), vantage=vantage, linktype=linktype)


def chosen(block: Block, index: Iterable[int] | np.ndarray) -> Block:
    """The frames of `block` at `index`, in that order."""
    keep = np.fromiter(index, np.int64) if not isinstance(index, np.ndarray) else index
    return Block(block.base, block.offset[keep], block.caplen[keep], block.wirelen[keep], block.ts[keep],
                 block.vlan[keep], block.vantage, block.linktype)


def syn(isn: int = ISN) -> bytes:
    return tcp_frame(seq=isn, flags=SYN)


def data(offset: int, payload: bytes, *, isn: int = ISN, flags: int = ACK) -> bytes:
    return tcp_frame(payload, seq=isn + 1 + offset, flags=flags)


def acked(offset: int, *, isn: int = ISN, payload: bytes = b"", at: int = 0) -> bytes:
    """From the other side: everything before `offset` was received."""
    return tcp_frame(payload, seq=5001 + at, ack=isn + 1 + offset, **BACK)


class Wire:
    """A reassembler with the rules of Spans checked on everything that comes out, and spans as plain tuples."""

    def __init__(self, flows: Flows | None = None, **options: int) -> None:
        self.flows = flows or Flows(64)
        self.tcp = TcpReassembler(self.flows, **options)
        self.now = START
        self._next: dict[int, int | None] = {}

    def feed(self, *frames: bytes, after: int = 0) -> list[tuple[object, ...]]:
        """Frames of one block, `after` ns behind the block before."""
        self.now += after
        return self.take(block_of(frames, self.now), self.now)

    def take(self, block: Block, now: int) -> list[tuple[object, ...]]:
        return self.read(self.tcp.feed(block, now))

    def expire(self, after: int) -> list[tuple[object, ...]]:
        self.now += after
        return self.read(self.tcp.expire(self.now))

    def flush(self) -> list[tuple[object, ...]]:
        return self.read(self.tcp.flush(self.now))

    def read(self, spans: Spans) -> list[tuple[object, ...]]:
        """(kind, flow, offset, bytes) for data and duplicates, (kind, flow, offset, length) for the rest."""
        result: list[tuple[object, ...]] = []
        for i in range(spans.n):
            flow, kind, offset, length = (int(a[i]) for a in (spans.flow, spans.kind, spans.offset, spans.length))
            value: object = length
            if kind in (DATA, DUPLICATE):
                assert length > 0
                value = ctypes.string_at(int(spans.addr[i]), length)
            if kind == OPEN:
                assert offset == 0
                self._next[flow] = 0
            elif kind in (DATA, HOLE):
                assert length > 0
                assert offset == self._next[flow], "in-order spans of a flow must be gapless"
                self._next[flow] = offset + length
            elif kind == CLOSE:
                assert offset == self._next[flow]
            else:
                end = self._next[flow]
                assert end is not None
                assert offset >= 0 and offset + length <= end
            result.append((KIND_NAMES[kind], flow, offset, value))
        return result
