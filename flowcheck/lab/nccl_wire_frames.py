"""RoCEv2 frames of one queue pair's messages, as a network card makes them (docs/roce.md; IBTA volume 1, annex A17).

Packets in the middle of a message differ only in PSN, IP identification and payload: they are made by whole arrays.
"""

from __future__ import annotations

import socket
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flowcheck.lab.addresses import Port, training_address, training_mac

_FIRST, _MIDDLE, _LAST, _LAST_IMMEDIATE, _ONLY, _ONLY_IMMEDIATE, _ACKNOWLEDGE = 6, 7, 8, 9, 10, 11, 17
_UDP_PORT = 4791
_ACK_REQUEST = 1 << 31
# A CRC over eight bytes of ones stands before every packet.
_START = zlib.crc32(b"\xff" * 8)

Frame = bytes | memoryview


@dataclass(frozen=True)
class Path:
    """The way from one port to another, for one queue pair's packets."""

    source: Port
    target: Port
    ipv6: bool
    udp_source: int

    @cached_property
    def ethernet(self) -> bytes:
        return training_mac(self.target) + training_mac(self.source) + (b"\x86\xdd" if self.ipv6 else b"\x08\x00")

    @cached_property
    def addresses(self) -> bytes:
        family = socket.AF_INET6 if self.ipv6 else socket.AF_INET
        ends = (self.source, self.target)
        return b"".join(socket.inet_pton(family, training_address(end, self.ipv6)) for end in ends)

    @cached_property
    def _words(self) -> int:
        return sum(struct.unpack(f">{len(self.addresses) // 2}H", self.addresses))

    def ip(self, udp_length: int, ident: int) -> tuple[bytes, bytes]:
        """(IP header, the same with ones where routers may write)."""
        if self.ipv6:
            rest = struct.pack(">HB", udp_length, 17)
            tail = self.addresses
            return b"\x60\x20\x00\x00" + rest + b"\x40" + tail, b"\x6f\xff\xff\xff" + rest + b"\xff" + tail
        total, ident = 20 + udp_length, ident & 0xFFFF
        checksum = 0x4502 + total + ident + 0x4000 + 0x4011 + self._words
        checksum = (checksum & 0xFFFF) + (checksum >> 16)
        checksum = ~((checksum & 0xFFFF) + (checksum >> 16)) & 0xFFFF
        fixed = struct.pack(">HHH", total, ident, 0x4000)
        return (
            b"\x45\x02" + fixed + b"\x40\x11" + checksum.to_bytes(2, "big") + self.addresses,
            b"\x45\xff" + fixed + b"\xff\x11\xff\xff" + self.addresses,
        )


def packet(path: Path, opcode: int, qp: int, psn: int, ident: int, rest: bytes, *, request: bool) -> bytes:
    """One frame; `rest` is everything behind the BTH, `request` asks for an acknowledge."""
    pad = -len(rest) % 4
    bth = struct.pack(">BBHII", opcode, pad << 4, 0xFFFF, qp, psn & 0xFFFFFF | (_ACK_REQUEST if request else 0))
    udp = struct.pack(">HHHH", path.udp_source, _UDP_PORT, 8 + 12 + len(rest) + pad + 4, 0)
    body = rest + bytes(pad)
    real, masked = path.ip(8 + 12 + len(body) + 4, ident)
    crc = zlib.crc32(masked + udp[:6] + b"\xff\xff" + bth[:4] + b"\xff" + bth[5:], _START)
    crc = zlib.crc32(body, crc)
    return b"".join((path.ethernet, real, udp, bth, body, crc.to_bytes(4, "little")))


def write(
    path: Path, qp: int, psn: int, ident: int, va: int, rkey: int, data: np.ndarray, immediate: bytes | None, mtu: int
) -> list[Frame]:
    """The frames of an RDMA WRITE of `data` (uint8), with an immediate if there is one."""
    size = data.size
    reth = struct.pack(">QII", va, rkey, size)
    if size <= mtu:
        opcode = _ONLY if immediate is None else _ONLY_IMMEDIATE
        rest = reth + (immediate or b"") + data.tobytes()
        return [packet(path, opcode, qp, psn, ident, rest, request=True)]
    count = -(-size // mtu)
    frames: list[Frame] = [packet(path, _FIRST, qp, psn, ident, reth + data[:mtu].tobytes(), request=False)]
    if count > 2:
        frames += _middle(path, qp, psn + 1, ident + 1, data[mtu : (count - 1) * mtu].reshape(-1, mtu))
    opcode = _LAST if immediate is None else _LAST_IMMEDIATE
    rest = (immediate or b"") + data[(count - 1) * mtu :].tobytes()
    frames.append(packet(path, opcode, qp, psn + count - 1, ident + count - 1, rest, request=True))
    return frames


def _middle(path: Path, qp: int, psn: int, ident: int, payload: np.ndarray) -> list[Frame]:
    count, mtu = payload.shape
    real, masked = path.ip(8 + 12 + mtu + 4, 0)
    udp = struct.pack(">HHHH", path.udp_source, _UDP_PORT, 8 + 12 + mtu + 4, 0)
    bth = struct.pack(">BBHI", _MIDDLE, 0, 0xFFFF, qp)
    head = path.ethernet + real + udp + bth
    covered = path.ethernet + masked + udp[:6] + b"\xff\xff" + bth[:4] + b"\xff" + bth[5:]
    at = len(head)
    frames = np.empty((count, at + 4 + mtu + 4), np.uint8)
    frames[:, :at] = np.frombuffer(covered, np.uint8)
    numbers = np.arange(psn, psn + count, dtype=np.int64) & 0xFFFFFF
    frames[:, at : at + 4] = numbers.astype(">u4").view(np.uint8).reshape(-1, 4)
    frames[:, at + 4 : -4] = payload
    idents = np.arange(ident, ident + count, dtype=np.int64) & 0xFFFF
    if not path.ipv6:
        frames[:, 18:20] = idents.astype(">u2").view(np.uint8).reshape(-1, 2)
    view = frames.reshape(-1).data
    width = frames.shape[1]
    crcs = [zlib.crc32(view[start + 14 : start + width - 4], _START) for start in range(0, count * width, width)]
    frames[:, -4:] = np.array(crcs, "<u4").view(np.uint8).reshape(-1, 4)
    frames[:, 14:at] = np.frombuffer(head, np.uint8)[14:]
    if not path.ipv6:
        frames[:, 18:20] = idents.astype(">u2").view(np.uint8).reshape(-1, 2)
        # The header's checksum at identification 0, with the identification added (RFC 1624).
        left = 0xFFFF - int.from_bytes(real[10:12], "big") + idents
        sums = 0xFFFF - ((left & 0xFFFF) + (left >> 16))
        frames[:, 24:26] = sums.astype(">u2").view(np.uint8).reshape(-1, 2)
    return [view[start : start + width] for start in range(0, count * width, width)]


def acknowledge(path: Path, qp: int, psn: int, ident: int, done: int) -> bytes:
    """An ACK of everything up to `psn`; `done` counts the messages that were taken in so far."""
    return packet(path, _ACKNOWLEDGE, qp, psn, ident, struct.pack(">I", 0x1F << 24 | done & 0xFFFFFF), request=False)
