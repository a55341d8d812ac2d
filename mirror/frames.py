"""Frames to TCP segments: one kernel over a whole block.

Every frame is walked from its link header to its TCP header, and what the frame says is written to `Segments`, one
row per TCP segment; all else is counted by reason.

The checksum of every TCP segment with payload is verified here, if that is wanted, and what it came to goes with the
segment (SUM_RIGHT, SUM_WRONG). What a wrong one means is for `mirror.tcp_sums`, which knows the flow: a mirror of a
port with checksum offload shows wrong ones in perfectly good frames. There is nothing to verify, and neither is set,
where
* the payload is not all here, or its length is not told (segmentation offload, BIG TCP);
* the field waits for an adapter to fill it in (`mirror.checksum.OFFLOADED`): what a host sends itself, with checksum
  offload, and what its kernel merged out of segments that it had verified (GRO);
* the IP header has options or extension headers: a source route changes what the checksum is taken over.

Rules where frames lie or are cut:
* The length of a payload comes from the IP header, so trailing Ethernet padding is no data, and a frame cut by the
  capture's snaplen or by the switch (which then shows in no pcap length) still tells how many bytes it carried:
  `length` is what was on the wire, `present` what is here.
* IPv4 total length 0, or IPv6 payload length 0 without a jumbogram option (RFC 2675), means segmentation offload or
  BIG TCP: the frame's own length counts.
* What a switch cut off is told by an IP length beyond the frame, or beyond the tunnel packet around it: the wire length
  of the frame shows nothing. It is counted apart from what the snaplen cut off: every frame that is not whole is one of
  "cut_by_snaplen" and "cut_by_switch". "truncated" are the TCP segments among them that lack payload.
* IP fragments of TCP are refused: their bytes become a hole where the stream misses them. Those of tunnel packets are
  put together (`mirror.fragments`); what comes of it is believed if the inner packet's TCP checksum or ICRC is right.

The walk is a loop: a tunnel header (`mirror.decap`) moves the address on, sets the next ethertype and the ends of
what is present and of what was on the wire, and changes the vantage group (`mirror.vantage`).

Sources: RFC 791, 8200, 9293; IEEE 802.1Q; docs/encapsulation.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from mirror.block import Block
from mirror.checksum import RIGHT, WRONG, tcp_checksum
from mirror.decap import IPV4, IPV6, KINDS, MAX_TAGS, NO_TUNNEL, NOT_HERE, TTAG, gre, ttag, vxlan
from mirror.flows import EPOCH, FLOW_TABLE, SEED, Flows, add, find, flow_table, mix
from mirror.fragments import FRAGMENT_TABLE, Fragments, fragment_table, icrc_fits, renew, take
from mirror.headers import ETHERNET, LINKTYPES, ipv6_transport, link, plain_udp
from mirror.internal import internal
from mirror.memory import (
    address_of,
    handle,
    int32s_at,
    int64s_at,
    load_be16,
    load_be32,
    load_u8,
    prefetch,
    rows_at,
)
from mirror.tunnels import (
    CUT_FRAMES,
    FRAMES_IN,
    GROUP,
    TOUCHED,
    TUNNEL_SEED,
    TUNNEL_TABLE,
    add_tunnel,
    find_tunnel,
    is_vxlan,
    tunnel_table,
)
from mirror.vantage import Vantage

__all__ = ["COUNTERS", "Datagrams", "Flows", "Segments", "parse", "tally"]

COUNTERS = (
    "frames", "tcp", "tcp_payload_bytes", "truncated", "vlan_tagged", "other_ip", "non_ip", "fragments",
    "malformed", "cut_header", "flow_table_full", "unknown_linktype", "roce",
    "cut_by_switch", "cut_by_snaplen", "outer_fragments", "outer_unproven", "unknown_tunnel", "too_deep",
    "tunnel_table_full", "qinq", "ttag",
    *(kind.replace("-", "_") for kind in KINDS[1:]),
)
(FRAMES, TCP, PAYLOAD, TRUNCATED, TAGGED, OTHER_IP, NON_IP, FRAGMENTS, MALFORMED, CUT, TABLE_FULL, LINKTYPE, ROCE,
 CUT_BY_SWITCH, CUT_BY_SNAPLEN, OUTER_FRAGMENTS, UNPROVEN, STRANGE_TUNNEL, TOO_DEEP, TUNNELS_FULL, QINQ,
 TTAGGED) = range(len(COUNTERS) - len(KINDS) + 1)

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
# Not on the wire. RECYCLED: the flow id was taken from another flow, what is known of it is void; and what the checksum
# came to, of segments with payload.
RECYCLED, SUM_RIGHT, SUM_WRONG = 0x1000, 0x2000, 0x4000

_TCP, _UDP, _GRE = 6, 17, 47
_ROCE_PORT = 4791  # destination port of RoCEv2 (IBTA annex A17); the source port is arbitrary
_NO_DATAGRAMS = np.empty((0, 6), np.int64)
_NO_HANDLE = np.empty(0, np.int64)
_AHEAD = 8
_STRANGE = 32
_PLAIN, _JOINED = -1, -2
_PLACES = ("ethertype", "inner ethertype", "gre protocol")


@dataclass(slots=True, eq=False)
class Datagrams:
    """The UDP datagrams to the RoCEv2 port of one block, `n` rows in frame order; reused by the next `parse`.

    Nothing of them is judged here but their frame: what they are is for `mirror.roce`.
    """

    n: int = 0
    numbers: np.ndarray = field(default_factory=lambda: np.empty((0, 6), np.int64))
    """int64[n, 6]: address of the IP header, of the UDP header, of the end of what is present, of the end of the
    packet on the wire; capture time in ns; vantage group."""


@dataclass(slots=True, eq=False)
class Segments:
    """The TCP segments of one block, `n` rows in frame order; arrays are reused by the next `parse`."""

    capacity: int = 0
    n: int = 0
    flow: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: id in the flow table."""
    flags: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: TCP flags, plus RECYCLED, SUM_RIGHT or SUM_WRONG."""
    numbers: np.ndarray = field(default_factory=lambda: np.empty((0, 6), np.int64))
    """int64[n, 6]: sequence number, acknowledgment number, address of the payload, bytes present, bytes on the
    wire, capture time in ns."""
    counters: np.ndarray = field(default_factory=lambda: np.zeros(len(COUNTERS), np.int64))
    """int64: cumulative, named by COUNTERS."""
    datagrams: Datagrams | None = None
    """Filled by the same walk where it is given; without it RoCE counts as "other_ip"."""

    check_sums: bool = False
    """Whether to verify the checksums of TCP."""
    vantage: Vantage = field(default_factory=Vantage)
    """Groups of interfaces and tunnels, and the tunnels seen."""
    fragments: Fragments = field(default_factory=Fragments)
    """Fragments of tunnel packets; the memory of those that were put together is reused by the next `parse`."""
    strange: np.ndarray = field(default_factory=lambda: np.zeros((_STRANGE, 2), np.int64))
    """int64[n, 2]: code (see `unknown`) and count of types that were not read."""

    _base: tuple[np.ndarray, int] = field(init=False, repr=False, default=(_NO_HANDLE, 0))
    _kernel: tuple[tuple[object, ...], np.ndarray] = field(init=False, repr=False, default=((), _NO_HANDLE))

    def handle(self, flows: Flows) -> np.ndarray:
        """All that the kernel writes to, as `mirror.memory.handle`: made anew when one of the arrays is a new one."""
        out = _NO_DATAGRAMS if self.datagrams is None else self.datagrams.numbers
        parts = flows.table, self.vantage.table, self.fragments.table, self.vantage.depth, self.numbers, out
        if len(self._kernel[0]) != len(parts) or any(a is not b for a, b in zip(self._kernel[0], parts, strict=True)):
            self._kernel = parts, handle(
                *flows.table, *self.vantage.table, *self.fragments.table, self.strange, self.counters,
                self.vantage.depth, self.flow, self.flags, self.numbers, out)
        return self._kernel[1]

    def counts(self) -> dict[str, int]:
        """The counters by name."""
        counts = dict(zip(COUNTERS, self.counters.tolist(), strict=True))
        return counts | self.fragments.counts() | {"tunnels_evicted": self.vantage.evicted}

    def encapsulations(self) -> dict[str, int]:
        """Frames by what was taken off: "vlan" (one tag), "qinq" (more in a row), "ttag", and the kinds of tunnels.

        A frame counts once for every header, so also for several kinds. Only what was seen is listed.
        """
        counts = dict(zip(COUNTERS, self.counters.tolist(), strict=True))
        found = {"vlan": counts["vlan_tagged"] - counts["qinq"], "qinq": counts["qinq"], "ttag": counts["ttag"]}
        found |= {kind: counts[kind.replace("-", "_")] for kind in KINDS[1:]}
        return {name: count for name, count in found.items() if count}

    def unknown(self, most: int = 8) -> list[tuple[str, int, int]]:
        """(place, type, frames) of the types most often not read, most first: half of the traffic may hide there.

        Place: "ethertype", "inner ethertype" (in a tunnel), "gre protocol". Type 0 is no type: a frame with a length
        in its place. Rare types give way to new ones, which take over their count: counts are upper bounds.
        """
        rows = sorted(self.strange[self.strange[:, 1] > 0].tolist(), key=lambda row: -row[1])
        return [(_PLACES[code >> 16], code & 0xFFFF, count) for code, count in rows[:most]]


@internal()
def tally(strange: np.ndarray, code: int) -> None:
    """Count a code in int64[n, 2], (code, count); the rarest one gives way when the table is full."""
    rarest = 0
    for row in range(strange.shape[0]):
        if strange[row, 1] == 0 or strange[row, 0] == code:
            rarest = row
            break
        if strange[row, 1] < strange[rarest, 1]:
            rarest = row
    strange[rarest, 0] = code
    strange[rarest, 1] += 1


@njit(cache=True, nogil=True)
def _parse(base: int, size: int, offset: np.ndarray, caplen: np.ndarray, wirelen: np.ndarray, ts: np.ndarray,
           vlan: np.ndarray, vantage: int, linktype: int, check: bool, where: np.ndarray) -> tuple[int, int]:
    table, tunnels = flow_table(where, 0), tunnel_table(where, FLOW_TABLE)
    fragments = fragment_table(where, FLOW_TABLE + TUNNEL_TABLE)
    rest = where[FLOW_TABLE + TUNNEL_TABLE + FRAGMENT_TABLE :]
    strange, counters, most = rows_at(rest[0], rest[1], rest[2]), int64s_at(rest[3], rest[4]), rest[5]
    flow_out, flags_out = int32s_at(rest[6], rest[7]), int32s_at(rest[8], rest[9])
    numbers, datagrams = rows_at(rest[10], rest[11], rest[12]), rows_at(rest[13], rest[14], rest[15])
    table.meta[EPOCH] += 1
    epoch, seed = table.meta[EPOCH], table.meta[SEED]
    slots, key, touched = table.slots, table.key, table.touched
    known, ports, tunnel_seed = tunnels.rows, tunnels.ports, tunnels.meta[TUNNEL_SEED]
    renew(fragments)
    rows = roce = carried = quick = 0
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
        if linktype == ETHERNET and vlan[i] < 0 and wire_end == end and datagrams.shape[0]:
            # Most frames of a port that carries RoCE; the walk would come to the same.
            header, limit = plain_udp(address, end, _ROCE_PORT)
            if header:
                datagrams[roce, 0] = address + 14
                datagrams[roce, 1] = address + 14 + header
                datagrams[roce, 2] = end
                datagrams[roce, 3] = limit
                datagrams[roce, 4] = ts[i]
                datagrams[roce, 5] = vantage
                roce += 1
                quick += 1
                continue
        snapped, cut = wire_end > end, False
        ethertype, position = link(address, end, linktype)
        tagged, stacked, tags = vlan[i] >= 0, False, 1 if vlan[i] >= 0 else 0
        group, tunnel, depth = vantage, -1, 0
        reason = _PLAIN              # or _JOINED, or why there is no row: a counter
        while True:
            if ethertype != IPV4 and ethertype != IPV6:
                for _ in range(MAX_TAGS):
                    if ethertype in (0x8100, 0x88A8, 0x9100, 0x9200):
                        tagged = True
                        tags += 1
                        stacked = stacked or tags > 1
                        if end - position < 4:
                            ethertype = -1
                            break
                        ethertype = load_be16(position + 2)
                        position += 4
                    elif ethertype == TTAG:
                        ethertype, position = ttag(position, end, wire_end)
                        if ethertype == TTAG:
                            break
                        counters[TTAGGED] += 1
                    else:
                        break
            start = -1               # of a fragment in its datagram
            if ethertype == IPV4:
                if end - position < 20:
                    reason = CUT
                    break
                first = load_u8(position)
                header = (first & 15) * 4
                total = load_be16(position + 2)
                if first >> 4 != 4 or header < 20 or (total != 0 and total < header):
                    reason = MALFORMED
                    break
                limit = wire_end if total == 0 else position + total
                cut = cut or limit > wire_end
                protocol = load_u8(position + 9)
                a = 0
                b = 0xFFFF00000000 | load_be32(position + 12)
                c = 0
                d = 0xFFFF00000000 | load_be32(position + 16)
                transport = position + header
                place = load_be16(position + 6)
                if place & 0x3FFF:
                    start, more, identification = (place & 0x1FFF) * 8, place & 0x2000 != 0, load_be16(position + 4)
            elif ethertype == IPV6:
                if end - position < 40:
                    reason = CUT
                    break
                total = load_be16(position + 4)
                if load_u8(position) >> 4 != 6:
                    reason = MALFORMED
                    break
                limit = wire_end if total == 0 else position + 40 + total
                protocol, transport, limit = ipv6_transport(position, end, limit)
                cut = cut or limit > wire_end
                a = load_be32(position + 8) << 32 | load_be32(position + 12)
                b = load_be32(position + 16) << 32 | load_be32(position + 20)
                c = load_be32(position + 24) << 32 | load_be32(position + 28)
                d = load_be32(position + 32) << 32 | load_be32(position + 36)
                if protocol == -2:
                    place = load_be16(transport + 2)
                    start, more, identification = place & 0xFFF8, place & 1 != 0, load_be32(transport + 4)
                    protocol = load_u8(transport)
                    transport += 8
                elif protocol < 0:
                    reason = CUT if protocol == -1 else MALFORMED
                    break
            else:
                reason = CUT if ethertype == -1 else NON_IP
                if reason == NON_IP:
                    tally(strange, (depth > 0) << 16 | (ethertype if ethertype >= 0x600 else 0))
                break

            if start >= 0:
                if protocol != _GRE and protocol != _UDP:
                    reason = FRAGMENTS
                    break
                length = limit - transport
                target = 0
                if end - transport >= length:
                    target, length = take(fragments, a, b, c, d, group << 8 | protocol, identification, start, length,
                                          more, transport, ts[i])
                if target == 0:
                    reason = OUTER_FRAGMENTS
                    break
                counters[OUTER_FRAGMENTS] += 1
                reason = _JOINED
                transport = target
                end = wire_end = limit = target + length
            if protocol == _TCP:
                break
            if protocol == _GRE:
                kind, inner, payload, identifier = gre(transport, min(end, limit), wire_end)
            elif protocol == _UDP and end - transport >= 4 and is_vxlan(ports, load_be16(transport + 2)):
                kind, inner, payload, identifier = vxlan(transport, min(end, limit))
            else:
                break
            if kind <= NO_TUNNEL:
                reason = STRANGE_TUNNEL
                if kind == NOT_HERE:
                    reason = CUT if limit > end else MALFORMED
                elif protocol == _GRE:
                    tally(strange, 2 << 16 | inner)
                break
            if depth == most:
                reason = TOO_DEEP
                break
            tunnel = find_tunnel(known, tunnel_seed, a, b, c, d, kind, identifier, group)
            if tunnel < 0:
                tunnel = add_tunnel(tunnels, a, b, c, d, kind, identifier, group, epoch)
                if tunnel < 0:
                    reason = TUNNELS_FULL
                    break
            known[tunnel, FRAMES_IN] += 1
            known[tunnel, TOUCHED] = epoch
            counters[TTAGGED + kind] += 1
            depth += 1
            tags = 0
            group = known[tunnel, GROUP]
            ethertype, position = inner, payload
            end, wire_end = min(end, limit), min(wire_end, limit)
        if cut:
            counters[CUT_BY_SWITCH] += 1
            if tunnel >= 0:
                known[tunnel, CUT_FRAMES] += 1
        elif snapped:
            counters[CUT_BY_SNAPLEN] += 1
        if tagged:
            counters[TAGGED] += 1
            counters[QINQ] += stacked
        if reason != _PLAIN:
            if reason == _JOINED and protocol == _TCP and (
                    end < limit or limit - transport < 20
                    or tcp_checksum(a, b, c, d, transport, limit - transport) != RIGHT):
                reason = UNPROVEN
            if reason >= 0:
                counters[reason] += 1
                continue
        if protocol == _UDP and datagrams.shape[0] and end - transport >= 8 and (
                load_be16(transport + 2) == _ROCE_PORT):
            if reason == _JOINED and not icrc_fits(position, transport, min(end, limit)):
                counters[UNPROVEN] += 1
                continue
            counters[ROCE] += 1
            datagrams[roce, 0] = position
            datagrams[roce, 1] = transport
            datagrams[roce, 2] = end
            datagrams[roce, 3] = limit
            datagrams[roce, 4] = ts[i]
            datagrams[roce, 5] = group
            roce += 1
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
        e = group << 32 | load_be32(transport)
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
        carried += length
        if present < length:
            counters[TRUNCATED] += 1
        summed = 0
        if check and 0 < length == present and total and transport - position == (20 if ethertype == IPV4 else 40):
            verdict = tcp_checksum(a, b, c, d, transport, limit - transport)
            summed = SUM_RIGHT if verdict == RIGHT else SUM_WRONG if verdict == WRONG else 0
        flow_out[rows] = flow
        flags_out[rows] = load_u8(transport + 13) | (RECYCLED if recycled else 0) | summed
        numbers[rows, 0] = load_be32(transport + 4)
        numbers[rows, 1] = load_be32(transport + 8)
        numbers[rows, 2] = payload
        numbers[rows, 3] = present
        numbers[rows, 4] = length
        numbers[rows, 5] = ts[i]
        rows += 1
    counters[ROCE] += quick
    counters[TCP] += rows
    counters[PAYLOAD] += carried
    return rows, roce


def parse(block: Block, flows: Flows, segments: Segments) -> int:
    """Parse every frame of `block` into `segments` (arrays grown as needed); returns and sets the row count.

    Unknown link types are counted frame by frame under "unknown_linktype" and give no rows.
    """
    n = len(block.offset)
    datagrams = segments.datagrams
    if n > segments.capacity:
        segments.capacity = max(n, 2 * segments.capacity)
        segments.flow = np.empty(segments.capacity, np.int32)
        segments.flags = np.empty(segments.capacity, np.int32)
        segments.numbers = np.empty((segments.capacity, 6), np.int64)
    if datagrams is not None:
        datagrams.n = 0
        if n > datagrams.numbers.shape[0]:
            datagrams.numbers = np.empty((segments.capacity, 6), np.int64)
    segments.counters[FRAMES] += n
    segments.n = 0
    if block.linktype not in LINKTYPES:
        segments.counters[LINKTYPE] += n
    elif n:
        if segments._base[0] is not block.base:
            segments._base = block.base, address_of(block.base)
        segments.n, roce = _parse(segments._base[1], block.base.size, block.offset, block.caplen, block.wirelen,
                                  block.ts, block.vlan, block.vantage, block.linktype, segments.check_sums,
                                  segments.handle(flows))
        if datagrams is not None:
            datagrams.n = roce
    return segments.n
