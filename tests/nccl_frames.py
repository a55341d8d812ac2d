"""RoCEv2 frames to messages, the plain way: a second reading beside the transport, for tests of what lies above it."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from mirror.capfile import CaptureFileSource

Flow = tuple[str, str, int]
"""(source address, destination address, destination QP)"""


@dataclass
class Message:
    va: int
    rkey: int
    first_psn: int
    data: bytearray = field(default_factory=bytearray)
    immediate: bytes | None = None
    whole: bool = True
    time: int = 0
    """Capture time of the last packet, ns."""


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """(time in ns, bytes) of every Ethernet frame of a capture file."""
    source = CaptureFileSource([path])
    while (block := source.read(0.0)) is not None:
        for at, size, time in zip(block.offset.tolist(), block.caplen.tolist(), block.ts.tolist(), strict=True):
            yield time, block.base[at : at + size].tobytes()
        source.release(block)
    source.close()


def packets(path: Path) -> Iterator[tuple[int, Flow, int, int, bytes]]:
    """(time, flow, opcode, PSN, headers after BTH and payload) of the reliable-connection packets of a capture."""
    for time, frame in frames(path):
        at, kind = 14, frame[12:14]
        while kind in (b"\x81\x00", b"\x88\xa8"):
            kind, at = frame[at + 2 : at + 4], at + 4
        if kind == b"\x08\x00" and frame[at + 9] == 17:
            ip = frame[at : at + struct.unpack_from(">H", frame, at + 2)[0]]
            ends, udp = (ip[12:16], ip[16:20]), ip[(ip[0] & 15) * 4 :]
        elif kind == b"\x86\xdd" and frame[at + 6] == 17:
            ip = frame[at : at + 40 + struct.unpack_from(">H", frame, at + 4)[0]]
            ends, udp = (ip[8:24], ip[24:40]), ip[40:]
        else:
            continue
        if struct.unpack_from(">H", udp, 2)[0] != 4791:
            continue
        bth = udp[8:]
        if bth[0] >= 32:
            continue
        pad = bth[1] >> 4 & 3
        flow = (str(ip_address(ends[0])), str(ip_address(ends[1])), int.from_bytes(bth[5:8], "big"))
        yield time, flow, bth[0], int.from_bytes(bth[9:12], "big"), bth[12 : len(bth) - 4 - pad]


def messages(path: Path) -> dict[Flow, list[Message]]:
    """The RDMA WRITEs of every flow in PSN order (repeats dropped, a gap marks the message it is in as not whole).

    Where immediates are used, a message is everything up to one: adaptive routing makes every packet a WRITE of its
    own and sends the immediate in an empty one.
    """
    seen: dict[Flow, dict[int, tuple[int, int, bytes]]] = defaultdict(dict)
    for time, flow, opcode, psn, rest in packets(path):
        if 6 <= opcode <= 11:
            seen[flow].setdefault(psn, (time, opcode, rest))
    return {flow: _joined(by_psn) for flow, by_psn in seen.items()}


def _joined(by_psn: dict[int, tuple[int, int, bytes]]) -> list[Message]:
    until = (9, 11) if any(opcode in (9, 11) for _, opcode, _ in by_psn.values()) else (8, 10)
    done: list[Message] = []
    current: Message | None = None
    following = -1
    for psn in sorted(by_psn):
        time, opcode, rest = by_psn[psn]
        if current is not None and psn != following:
            current.whole = False
        following = psn + 1
        if opcode in (6, 10, 11):
            va, rkey, _ = struct.unpack_from(">QII", rest)
            rest = rest[16:]
            if current is None:
                current = Message(va, rkey, psn)
            elif va and va != current.va + len(current.data):
                current.whole = False
        elif current is None:
            current = Message(0, 0, psn, whole=False)
        if opcode in (9, 11):
            current.immediate, rest = rest[:4], rest[4:]
        current.data += rest
        current.time = time
        if opcode in until:
            done.append(current)
            current = None
    return done if current is None else [*done, current]


def tcp_streams(path: Path) -> dict[tuple[str, int, str, int], bytes]:
    """The bytes of every direction of every IPv4 TCP connection, by sequence number (no wrap, no loss)."""
    parts: dict[tuple[str, int, str, int], dict[int, bytes]] = defaultdict(dict)
    for _, frame in frames(path):
        if frame[12:14] != b"\x08\x00" or frame[23] != 6:
            continue
        ip = frame[14 : 14 + struct.unpack_from(">H", frame, 16)[0]]
        tcp = ip[(ip[0] & 15) * 4 :]
        source, destination, number = struct.unpack_from(">HHI", tcp)
        data = tcp[(tcp[12] >> 4) * 4 :]
        if data:
            ends = str(ip_address(ip[12:16])), source, str(ip_address(ip[16:20])), destination
            parts[ends].setdefault(number, data)
    return {ends: b"".join(held[at] for at in sorted(held)) for ends, held in parts.items()}
