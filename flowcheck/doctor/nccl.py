"""NCCL's connections as RoCE messages show them: who sends to whom, what was announced, what came (docs/nccl.md).

A connection carries data one way (WRITEs that end with an immediate) and CTS entries the other way, which announce
each message: its room, the sender's rank, the rkey of the buffer. The rkey joins the two, so a connection of which only
announcements come tells which direction is not mirrored. Counts only: nothing is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flowcheck.doctor.kernels import CTS_BYTES, announcements
from flowcheck.doctor.nccl_chunks import Pair
from flowcheck.doctor.seen import Link, Ring, by_hosts
from flowcheck.inspect.nccl_flows import ROOMS
from mirror.roce import RoceReassembler
from mirror.roce_spans import DATA, END, MessageSpans
from mirror.roce_state import HEADLESS, M_FLAGS, M_FLOW, M_IMM, M_KIND, M_LENGTH, M_RKEY
from mirror.roce_wire import WRITE
from reconstruct.nccl.schedule import P2P_SLOT
from reconstruct.nccl.versions import CTS_FORMS

__all__ = ["NcclSight"]

_MOST = 1 << 14
_ENOUGH = 8
_FORMS = np.array(
    [[f.entry, f.size, f.rkeys, f.requests, f.tag, f.index] for name, f in CTS_FORMS.items() if name != "2.19"],
    np.int64,
)


@dataclass(slots=True)
class _Data:
    """One buffer that data were written to."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Cts:
    """One flow of announcements."""

    announced: int = 0
    rank: int = -1
    rooms: set[int] = field(default_factory=set)
    rkeys: set[int] = field(default_factory=set)


class NcclSight:
    """Takes the spans of one reassembler; `links` and `rings` are what they amount to."""

    def __init__(self, roce: RoceReassembler) -> None:
        self._roce = roce
        self._data: dict[tuple[int, int], _Data] = {}  # (flow, rkey)
        self._flows: set[int] = set()  # that carried an immediate
        self._cts: dict[int, _Cts] = {}

    def feed(self, spans: MessageSpans) -> None:
        """To be called before the next call of the reassembler."""
        n = spans.n
        if not n:
            return
        rows = self._roce.messages
        kind, slot = spans.kind[:n], spans.message[:n]
        over = slot[(kind == END) & (spans.length[:n] == 1)]
        over = over[(rows[over, M_KIND] == WRITE) & (rows[over, M_FLAGS] & HEADLESS == 0)]
        if over.size:
            self._ended(rows[over])
        data = np.flatnonzero((kind == DATA) & np.isin(spans.length[:n], CTS_BYTES) & (spans.offset[:n] == 0))
        entry = rows[slot[data]]
        data = data[(entry[:, M_KIND] == WRITE) & (entry[:, M_LENGTH] == spans.length[data]) & (entry[:, M_IMM] < 0)]
        if data.size:
            self._announced(spans.flow[data].astype(np.int64), spans.addr[data], spans.length[data])

    def _ended(self, rows: np.ndarray) -> None:
        """Whole WRITEs; with adaptive routing the immediate comes alone, with rkey 0."""
        for flow in np.unique(rows[rows[:, M_IMM] >= 0, M_FLOW]).tolist():
            self._flows.add(flow)
        keys, inverse, messages = np.unique(rows[:, [M_FLOW, M_RKEY]], axis=0, return_inverse=True, return_counts=True)
        sizes = np.zeros(len(keys), np.int64)
        np.add.at(sizes, inverse.reshape(-1), np.maximum(rows[:, M_LENGTH], 0))
        for (flow, rkey), number, size in zip(keys.tolist(), messages.tolist(), sizes.tolist(), strict=True):
            held = self._data.get((flow, rkey))
            if held is None and len(self._data) < _MOST:
                held = self._data[flow, rkey] = _Data()
            if held is not None:
                held.messages += number
                held.bytes += size

    def _announced(self, flow: np.ndarray, addr: np.ndarray, length: np.ndarray) -> None:
        out = np.empty((flow.size, 6), np.int64)
        for number, _, room, rank, rkey, _ in out[: announcements(flow, addr, length, _FORMS, out)].tolist():
            cts = self._cts.get(number)
            if cts is None:
                if len(self._cts) >= _MOST:
                    continue
                cts = self._cts[number] = _Cts()
            cts.announced, cts.rank = cts.announced + 1, rank
            cts.rooms.add(room)
            if len(cts.rkeys) < 64:
                cts.rkeys.add(rkey)

    def links(self) -> tuple[list[Link], int]:
        """(links of collectives, number of connections of send/recv)."""
        flows = self._roce.flows
        data: dict[tuple[str, str, int], _Data] = {}  # (sender, receiver, rkey), whatever queue pairs it came over
        for (flow, rkey), held in self._data.items():
            if flow in self._flows and rkey:
                key = flows.endpoint_src(flow)[0], flows.endpoint_dst(flow)[0], rkey
                sums = data.setdefault(key, _Data())
                sums.messages += held.messages
                sums.bytes += held.bytes
        links, others = [], 0
        for flow, cts in self._cts.items():
            receiver, sender = flows.endpoint_src(flow)[0], flows.endpoint_dst(flow)[0]
            found = [data.pop(key) for rkey in cts.rkeys if (key := (sender, receiver, rkey)) in data]
            if cts.rooms == {P2P_SLOT}:
                others += 1
                continue
            messages, size = sum(one.messages for one in found), sum(one.bytes for one in found)
            links.append(Link(sender, receiver, cts.rank, messages, size, silent=not found))
        links += [Link(*key[:2], -1, sums.messages, sums.bytes) for key, sums in data.items()]
        return links, others

    def pairs(self) -> dict[tuple[str, str], Pair]:
        """(sender's address, receiver's address) -> the connections of collectives that were seen between them."""
        flows = self._roce.flows
        announced: dict[tuple[str, str], list[int]] = {}
        carrying: dict[tuple[str, str], int] = {}
        others = set()  # (sender, receiver, rkey) of send and receive
        for flow, cts in self._cts.items():
            ends = flows.endpoint_dst(flow)[0], flows.endpoint_src(flow)[0]
            if cts.rooms == {P2P_SLOT}:
                others |= {(*ends, rkey) for rkey in cts.rkeys}
            else:
                announced.setdefault(ends, []).append(cts.rank)
        rkeys: dict[int, set[int]] = {}
        for flow, rkey in self._data:
            if flow in self._flows:
                rkeys.setdefault(flow, set()).add(rkey)
        for flow, keys in rkeys.items():
            ends = flows.endpoint_src(flow)[0], flows.endpoint_dst(flow)[0]
            if not all((*ends, rkey) in others for rkey in keys - {0}):
                carrying[ends] = carrying.get(ends, 0) + 1
        return {
            ends: Pair(len(ranks := announced.get(ends, [])), carrying.get(ends, 0), frozenset(ranks))
            for ends in announced.keys() | carrying.keys()
        }

    def strange_rooms(self) -> tuple[int, ...]:
        """Announced sizes that are of no buffer of the usual size, of connections whose messages came."""
        flows = self._roce.flows
        carried = {
            (flows.endpoint_src(flow)[0], flows.endpoint_dst(flow)[0], rkey)
            for flow, rkey in self._data if flow in self._flows and rkey
        }  # fmt: skip
        rooms = set()
        for flow, cts in self._cts.items():
            ends = flows.endpoint_dst(flow)[0], flows.endpoint_src(flow)[0]
            if cts.announced >= _ENOUGH and any((*ends, rkey) in carried for rkey in cts.rkeys):
                rooms |= cts.rooms
        return tuple(sorted(rooms - ROOMS))

    def rings(self) -> tuple[list[Ring], int]:
        """(rings by the hosts that they join, number of connections of send/recv)."""
        links, others = self.links()
        return [_ring(hosts, part) for hosts, part in by_hosts(links)], others


def _ring(hosts: list[str], links: tuple[Link, ...]) -> Ring:
    """Two hosts with ranks 0 and 1 are the whole ring; of more hosts a port does not tell how many there are."""
    senders = {(link.sender, link.rank) for link in links}
    two = len(hosts) == 2 and {rank for _, rank in senders} == {0, 1} and len(senders) == 2
    return Ring("nccl", " - ".join(hosts), links, 2 if two else 0)
