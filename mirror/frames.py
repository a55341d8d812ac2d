"""Frames to TCP segments: one kernel over a whole block.

Every frame is walked from its link header to its TCP header, and what the frame says is written to `Segments`, one
row per TCP segment; all else is counted by reason. The payload is not touched, and checksums are not verified:
a mirror of a port with checksum offload shows wrong ones in perfectly good frames.

Rules where frames lie or are cut:
* The length of a payload comes from the IP header, so trailing Ethernet padding is no data, and a frame cut by the
  capture's snaplen or by the switch (which then shows in no pcap length) still tells how many bytes it carried:
  `length` is what was on the wire, `present` what is here.
* IPv4 total length 0, or IPv6 payload length 0 without a jumbogram option (RFC 2675), means segmentation offload or
  BIG TCP: the frame's own length counts.
* IP fragments are refused: their bytes become a hole where the stream misses them.

The walk is a loop over (address, ethertype), so a tunnel header is one more case that moves the address on, sets the
next ethertype and may change the vantage group.

Sources: RFC 791, 8200, 9293; IEEE 802.1Q; www.tcpdump.org/linktypes.html.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from mirror.block import Block
from mirror.flows import EPOCH, SEED, Flows, FlowTable, add, find, mix
from mirror.memory import address_of, load_be16, load_be32, load_u8, prefetch

__all__ = ["COUNTERS", "Flows", "Segments", "parse"]

COUNTERS = (
    "frames", "tcp", "tcp_payload_bytes", "truncated", "vlan_tagged", "other_ip", "non_ip", "fragments",
    "malformed", "cut_header", "flow_table_full", "unknown_linktype",
)
(FRAMES, TCP, PAYLOAD, TRUNCATED, TAGGED, OTHER_IP, NON_IP, FRAGMENTS, MALFORMED, CUT, TABLE_FULL,
 LINKTYPE) = range(len(COUNTERS))

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
RECYCLED = 0x1000  # not on the wire: the flow id was taken from another flow; what is known of it is void

_ETHERNET, _NULL, _RAW, _SLL, _SLL2 = 1, 0, 101, 113, 276
_IPV4, _IPV6 = 0x0800, 0x86DD
_TCP = 6
_MAX_TAGS, _MAX_EXTENSIONS = 4, 8
_AHEAD = 8


@dataclass(slots=True, eq=False)
class Segments:
    """The TCP segments of one block, `n` rows in frame order; arrays are reused by the next `parse`."""

    capacity: int = 0
    n: int = 0
    flow: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: id in the flow table."""
    flags: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: TCP flags, plus RECYCLED."""
    numbers: np.ndarray = field(default_factory=lambda: np.empty((0, 6), np.int64))
    """int64[n, 6]: sequence number, acknowledgment number, address of the payload, bytes present, bytes on the
    wire, capture time in ns."""
    counters: np.ndarray = field(default_factory=lambda: np.zeros(len(COUNTERS), np.int64))
    """int64: cumulative, named by COUNTERS."""

    def counts(self) -> dict[str, int]:
        """The counters by name."""
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))


@njit(cache=True, nogil=True)
def _link(address: int, end: int, linktype: int) -> tuple[int, int]:
    """(ethertype, address after the link header); ethertype -1: cut, 0: not Ethernet-like IP."""
    if linktype == _ETHERNET:
        if end - address < 14:
            return -1, address
        return load_be16(address + 12), address + 14
    if linktype == _SLL:
        if end - address < 16:
            return -1, address
        return load_be16(address + 14), address + 16
    if linktype == _SLL2:
        if end - address < 20:
            return -1, address
        return load_be16(address), address + 20
    if linktype == _NULL:
        # An address family in the byte order of the capturing machine; AF_INET6 differs by system.
        if end - address < 4:
            return -1, address
        address += 4
    if end - address < 1:
        return -1, address
    version = load_u8(address) >> 4
    if version == 4:
        return _IPV4, address
    if version == 6:
        return _IPV6, address
    return 0, address


@njit(cache=True, nogil=True)
def _ipv6_transport(address: int, end: int, limit: int) -> tuple[int, int, int]:
    """Walk the extension headers: (next header, its address, end of the packet on the wire).

    `limit` is that end as the fixed header tells it. Next header: -1 cut, -2 fragment, -3 malformed.
    """
    header = load_u8(address + 6)
    position = address + 40
    jumbo = load_be16(address + 4) == 0
    for _ in range(_MAX_EXTENSIONS):
        if header in (0, 43, 60, 135, 139, 140):
            if end - position < 2:
                return -1, position, limit
            size = (load_u8(position + 1) + 1) * 8
            if header == 0 and jumbo:
                # A jumbogram option (type 194, length 4) of a hop-by-hop header: 32 bits of payload length.
                option = position + 2
                last = min(position + size, end)
                while option < last:
                    kind = load_u8(option)
                    if kind == 0:
                        option += 1
                        continue
                    if option + 2 > last:
                        break
                    if kind == 194 and load_u8(option + 1) == 4 and option + 6 <= last:
                        limit = address + 40 + load_be32(option + 2)
                        break
                    option += 2 + load_u8(option + 1)
        elif header == 51:
            if end - position < 2:
                return -1, position, limit
            size = (load_u8(position + 1) + 2) * 4
        elif header == 44:
            if end - position < 8:
                return -1, position, limit
            if load_be16(position + 2) & 0xFFF9:
                return -2, position, limit
            size = 8
        else:
            return header, position, limit
        header = load_u8(position)
        position += size
        if position > limit:
            return -3, position, limit
    return -3, position, limit


@njit(cache=True, nogil=True)
def _parse(base: int, size: int, offset: np.ndarray, caplen: np.ndarray, wirelen: np.ndarray, ts: np.ndarray,
           vlan: np.ndarray, vantage: int, linktype: int, table: FlowTable, flow_out: np.ndarray,
           flags_out: np.ndarray, numbers: np.ndarray, counters: np.ndarray) -> int:
    table.meta[EPOCH] += 1
    epoch, seed = table.meta[EPOCH], table.meta[SEED]
    slots, key, touched = table.slots, table.key, table.touched
    rows = 0
    for i in range(offset.size):
        if i + _AHEAD < offset.size:
            # Headers lie a whole frame apart, where no hardware prefetcher looks for them.
            ahead = base + offset[i + _AHEAD]
            prefetch(ahead)
            prefetch(ahead + 64)
        if offset[i] < 0 or caplen[i] < 0 or offset[i] + caplen[i] > size:
            counters[MALFORMED] += 1
            continue
        address = base + offset[i]
        end = address + caplen[i]
        # The frame's end on the wire, in terms of addresses here: a tag that was moved out takes no room.
        wire_end = address + max(wirelen[i] - (4 if vlan[i] >= 0 else 0), caplen[i])
        ethertype, position = _link(address, end, linktype)
        tagged = vlan[i] >= 0
        for _ in range(_MAX_TAGS):
            if ethertype not in (0x8100, 0x88A8, 0x9100, 0x9200):
                break
            tagged = True
            if end - position < 4:
                ethertype = -1
                break
            ethertype = load_be16(position + 2)
            position += 4
        if tagged:
            counters[TAGGED] += 1

        if ethertype == _IPV4:
            if end - position < 20:
                counters[CUT] += 1
                continue
            first = load_u8(position)
            header = (first & 15) * 4
            total = load_be16(position + 2)
            if first >> 4 != 4 or header < 20 or (total != 0 and total < header):
                counters[MALFORMED] += 1
                continue
            if load_be16(position + 6) & 0x3FFF:
                counters[FRAGMENTS] += 1
                continue
            limit = wire_end if total == 0 else position + total
            protocol = load_u8(position + 9)
            a = 0
            b = 0xFFFF00000000 | load_be32(position + 12)
            c = 0
            d = 0xFFFF00000000 | load_be32(position + 16)
            transport = position + header
        elif ethertype == _IPV6:
            if end - position < 40:
                counters[CUT] += 1
                continue
            total = load_be16(position + 4)
            if load_u8(position) >> 4 != 6:
                counters[MALFORMED] += 1
                continue
            limit = wire_end if total == 0 else position + 40 + total
            protocol, transport, limit = _ipv6_transport(position, end, limit)
            if protocol < 0:
                counters[CUT if protocol == -1 else FRAGMENTS if protocol == -2 else MALFORMED] += 1
                continue
            a = load_be32(position + 8) << 32 | load_be32(position + 12)
            b = load_be32(position + 16) << 32 | load_be32(position + 20)
            c = load_be32(position + 24) << 32 | load_be32(position + 28)
            d = load_be32(position + 32) << 32 | load_be32(position + 36)
        else:
            counters[CUT if ethertype == -1 else NON_IP] += 1
            continue

        if protocol != _TCP:
            counters[OTHER_IP] += 1
            continue
        # The flags are the last field that is needed; options may be cut off.
        if end - transport < 14:
            counters[CUT if limit - transport >= 20 else MALFORMED] += 1
            continue
        header = (load_u8(transport + 12) >> 4) * 4
        payload = transport + header
        length = limit - payload
        if header < 20 or length < 0:
            counters[MALFORMED] += 1
            continue
        e = vantage << 32 | load_be32(transport)
        h = mix(seed, a, b, c, d, e)
        flow = slots[find(slots, key, h, a, b, c, d, e)]
        recycled = False
        if flow >= 0:
            touched[flow] = epoch
        else:
            flow, recycled = add(table, h, a, b, c, d, e)
            if flow < 0:
                counters[TABLE_FULL] += 1
                continue
        present = min(max(end - payload, 0), length)
        counters[TCP] += 1
        counters[PAYLOAD] += length
        if present < length:
            counters[TRUNCATED] += 1
        flow_out[rows] = flow
        flags_out[rows] = load_u8(transport + 13) | (RECYCLED if recycled else 0)
        numbers[rows, 0] = load_be32(transport + 4)
        numbers[rows, 1] = load_be32(transport + 8)
        numbers[rows, 2] = payload
        numbers[rows, 3] = present
        numbers[rows, 4] = length
        numbers[rows, 5] = ts[i]
        rows += 1
    return rows


def parse(block: Block, flows: Flows, segments: Segments) -> int:
    """Parse every frame of `block` into `segments` (arrays grown as needed); returns and sets the row count.

    Unknown link types are counted frame by frame under "unknown_linktype" and give no rows.
    """
    n = len(block.offset)
    if n > segments.capacity:
        segments.capacity = max(n, 2 * segments.capacity)
        segments.flow = np.empty(segments.capacity, np.int32)
        segments.flags = np.empty(segments.capacity, np.int32)
        segments.numbers = np.empty((segments.capacity, 6), np.int64)
    segments.counters[FRAMES] += n
    segments.n = 0
    if block.linktype not in (_ETHERNET, _NULL, _RAW, _SLL, _SLL2):
        segments.counters[LINKTYPE] += n
    elif n:
        segments.n = _parse(address_of(block.base), block.base.size, block.offset, block.caplen, block.wirelen,
                            block.ts, block.vlan, block.vantage, block.linktype, flows.table, segments.flow,
                            segments.flags, segments.numbers, segments.counters)
    return segments.n
