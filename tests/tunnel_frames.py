"""What a mirror session does to a frame, made by hand: one function for each kind of tunnel."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from mirror.block import Block, pack
from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.streams import Stream, StreamRecorder
from mirror.tcp import TcpReassembler
from mirror.vantage import Vantage

Frame = tuple[int, bytes]

SWITCH, NODE = "10.9.0.1", "10.9.0.2"


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def ip4(payload: bytes, protocol: int, *, src: str = SWITCH, dst: str = NODE, identification: int = 0, place: int = 0,
        total: int | None = None) -> bytes:
    """Ethernet and IPv4; `place`: flags and fragment offset; `total`: a length that is not the right one."""
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload) if total is None else total, identification, place,
                         64, protocol, 0) + socket.inet_aton(src) + socket.inet_aton(dst)
    header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
    return bytes(12) + b"\x08\x00" + header + payload


def ip6(payload: bytes, header: int, *, src: str = "fd09::1", dst: str = "fd09::2") -> bytes:
    return (bytes(12) + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(payload), header, 64)
            + socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst) + payload)


def gre(frame: bytes, protocol: int, *, key: int | None = None, sequence: int | None = None,
        with_checksum: bool = False, flags: int = 0, **outer: str) -> bytes:
    header, options = flags, b""
    if with_checksum:
        header |= 0x8000
        options += struct.pack("!HH", 0x1234, 0)
    if key is not None:
        header |= 0x2000
        options += struct.pack("!I", key)
    if sequence is not None:
        header |= 0x1000
        options += struct.pack("!I", sequence)
    return ip4(struct.pack("!HH", header, protocol) + options + frame, 47, **outer)


def erspan1(frame: bytes, **outer: str) -> bytes:
    return gre(frame, 0x88BE, **outer)


def erspan2(frame: bytes, session: int = 5, sequence: int = 0, **outer: str) -> bytes:
    return gre(struct.pack("!HHI", 0x1007, session, 1) + frame, 0x88BE, sequence=sequence, **outer)


def erspan3(frame: bytes, session: int = 5, *, subheader: bool = False, frame_type: int = 0, **outer: str) -> bytes:
    tail = frame_type << 10 | 0x6 | subheader
    header = struct.pack("!HHIHH", 0x2007, session, 0x01020304, 0, tail) + (b"\x0c" * 8 if subheader else b"")
    return gre(header + frame, 0x22EB, sequence=9, **outer)


def gre_ethernet(frame: bytes, key: int | None = None, **outer: str) -> bytes:
    return gre(frame, 0x6558, key=key, **outer)


def mellanox(frame: bytes, **outer: str) -> bytes:
    return gre(b"\x01" * 22 + frame, 0x8949, **outer)


def gre_ip(frame: bytes, **outer: str) -> bytes:
    return gre(frame[14:], int.from_bytes(frame[12:14], "big"), **outer)


def vxlan(frame: bytes, network: int = 77, *, port: int = 4789, flags: int = 8, **outer: str) -> bytes:
    header = struct.pack("!HHHHII", 50000, port, 16 + len(frame), 0, flags << 24, network << 8)
    return ip4(header + frame, 17, **outer)


def vlan(frame: bytes, *tags: int) -> bytes:
    return frame[:12] + b"".join(struct.pack("!HH", 0x8100, tag) for tag in tags) + frame[12:]


def ttag(frame: bytes, size: int = 6, value: int = 0x0800_0045_0123) -> bytes:
    return frame[:12] + b"\x89\x88" + value.to_bytes(6, "big")[:size] + frame[12:]


def fragments(frame: bytes, size: int, identification: int = 0) -> list[bytes]:
    """The frame's IPv4 packet in fragments of `size` (a multiple of 8) bytes of payload."""
    payload, header = frame[34:], frame[14:34]
    src, dst = socket.inet_ntoa(header[12:16]), socket.inet_ntoa(header[16:20])
    return [ip4(payload[at : at + size], header[9], src=src, dst=dst, identification=identification,
                place=at // 8 | (0x2000 if at + size < len(payload) else 0)) for at in range(0, len(payload), size)]


WRAPPINGS: dict[str, Callable[[bytes], bytes]] = {
    "vlan 0": lambda frame: vlan(frame, 0),
    "QinQ": lambda frame: vlan(frame, 9, 7),
    "erspan1": erspan1,
    "erspan2": erspan2,
    "erspan3": erspan3,
    "erspan3 with subheader": lambda frame: erspan3(frame, subheader=True),
    "gre-ethernet": gre_ethernet,
    "gre-ethernet with options": lambda frame: gre(frame, 0x6558, key=7, sequence=1, with_checksum=True),
    "mellanox": mellanox,
    "gre-ip": gre_ip,
    "vxlan": vxlan,
    "vlan in erspan2 in vlan": lambda frame: vlan(erspan2(vlan(frame, 3)), 4),
    "ttag in erspan2": lambda frame: erspan2(ttag(frame)),
    "erspan3 in vxlan": lambda frame: vxlan(erspan3(frame)),
}


def frames_of(path: Path, *, cut: bool = False) -> list[Frame]:
    """(time, bytes) of every frame of a capture, none of which the snaplen may have cut, unless `cut` is set."""
    frames: list[Frame] = []
    source = CaptureFileSource([path])
    while not source.finished:
        block = source.read(0)
        if block is not None:
            assert block.linktype == 1 and (cut or (block.caplen == block.wirelen).all())
            frames += [(ts, block.base[at : at + size].tobytes()) for at, size, ts in
                       zip(block.offset.tolist(), block.caplen.tolist(), block.ts.tolist(), strict=True)]
            source.release(block)
    source.close()
    return frames


def block_at(frames: list[Frame], vantage: int = 0) -> Block:
    return replace(pack([data for _, data in frames], [time for time, _ in frames]), vantage=vantage)


class Reading:
    """Frames reassembled to the end, in blocks of `per_block`."""

    def __init__(self, frames: Iterable[Frame], vantage: Vantage | None = None, *, per_block: int = 64,
                 interface: str = "") -> None:
        flows = Flows()
        self.tcp = TcpReassembler(flows, vantage=vantage)
        self.vantage = self.tcp.segments.vantage
        recorder = StreamRecorder(flows)
        listed, now = list(frames), 0
        for start in range(0, len(listed), per_block):
            block = block_at(listed[start : start + per_block], self.vantage.of_interface(interface))
            now = max(now, int(block.ts.max()))
            recorder.feed(self.tcp.feed(block, now))
        recorder.feed(self.tcp.flush(now))
        self.streams: list[Stream] = recorder.streams
        self.counts = self.tcp.counters()

    @property
    def content(self) -> list[tuple[object, ...]]:
        """What the streams are, without where they were seen, sorted."""
        return sorted((s.source, s.destination, s.from_start, str(s.closed), s.data, tuple(s.holes))
                      for s in self.streams)
