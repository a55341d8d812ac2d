"""Blocks of frames to the figures that `flowcheck.doctor` judges. Sans-IO: blocks and a clock in, `Seen` out.

    block -> one walk -> TCP segments -> streams -> holes, gloo's messages
                      -> RoCE packets -> messages -> holes, NCCL's connections
          -> Observer -> process groups that the rendezvous names
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flowcheck.doctor import kernels as k
from flowcheck.doctor.nccl import NcclSight
from flowcheck.doctor.nccl_chunks import Coverage, coverage
from flowcheck.doctor.seen import Link, Ring, Seen, Strange, by_hosts
from mirror.block import Block, SourceCounters, pack
from mirror.flows import Flows
from mirror.memory import address_of
from mirror.roce import MessageSpans, QueuePairs, RoceReassembler
from mirror.spans import Spans
from mirror.tcp import TcpReassembler
from mirror.vantage import Vantage
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.heads import SETUP, Heads
from reconstruct.nccl.setup import communicators
from reconstruct.nccl.setup_watch import SetupWatcher
from reconstruct.observe.observer import Observer

__all__ = ["Examination"]

_OUTERMOST = {k.ETHERTYPE: "ethertype", k.PROTOCOL: "ip protocol", k.UDP: "udp port", k.TCP: "tcp port"}
_NCCL_SOCKET = 3
_ENOUGH = 2
_MOST_LINKS = 4096


class Examination:
    """One capture under examination.

    flows: most directions of TCP connections known at once; vantages: two tables of the same declared groups, since
    the frames are walked twice; group: the job's communicator, where the user gave it.
    """

    def __init__(
        self, flows: int = 1 << 15, vantages: tuple[Vantage, Vantage] | None = None, group: NcclGroup | None = None
    ) -> None:
        own, other = vantages or (Vantage(), Vantage())
        self.flows = Flows(flows)
        self._tcp = TcpReassembler(self.flows, vantage=own)
        self._roce = RoceReassembler(QueuePairs(flows))
        self._tcp.segments.datagrams = self._roce.datagrams
        self._nccl = NcclSight(self._roce)
        self._heads = Heads(self.flows)
        self._setups = SetupWatcher(self._heads)
        self._group = group
        self._observer = Observer(flows, vantage=other)
        self._streams = np.zeros((flows, k.S_COLUMNS), np.int64)
        self._streams[:, k.S_NEXT] = -1
        self._outermost = k.kinds_table()
        self._recent = np.zeros((k.COPIES, 2), np.int64)
        self._copies = np.zeros(3, np.int64)
        self._parts = np.zeros(6, np.int64)
        self._bytes = self._longest = self._snaplen = 0
        self._first = self._last = -1

    def feed(self, block: Block, now: int) -> None:
        """Take one block of frames; it may be released when this returns."""
        if not len(block):
            return
        base = address_of(block.base)
        k.look(base, block.offset, block.caplen, block.linktype, self._outermost)
        self._bytes += int(block.wirelen.sum())
        self._longest = max(self._longest, int(block.wirelen.max()))
        # A tag that the kernel moved out is in the length on the wire alone.
        snapped = block.caplen[block.caplen + np.where(block.vlan >= 0, 4, 0) < block.wirelen]
        self._snaplen = max(self._snaplen, int(snapped.max(initial=0)))
        self._first = int(block.ts.min()) if self._first < 0 else min(self._first, int(block.ts.min()))
        self._last = max(self._last, int(block.ts.max()))
        spans = self._tcp.feed(block, now)
        segments, datagrams = self._tcp.segments, self._roce.datagrams
        lengths = segments.numbers[: segments.n, 4]
        np.maximum.at(self._streams[:, k.S_LARGEST], segments.flow[: segments.n], lengths)
        np.add.at(self._streams[:, k.S_SEGMENTS], segments.flow[: segments.n], lengths > 0)
        k.copies_tcp(segments.numbers, segments.flow, segments.n, self.flows.table.key, self._recent, self._copies)
        k.copies_roce(datagrams.numbers, datagrams.n, self._recent, self._copies)
        k.parts(datagrams.numbers, datagrams.n, self._parts)
        self._take(spans)
        self._messages(self._roce.take(datagrams, block.base, now))
        self._observer.feed(block, now)

    def expire(self, now: int) -> None:
        """Let gaps that will not be filled any more become holes."""
        self._take(self._tcp.expire(now))
        self._messages(self._roce.expire(now))
        self._observer.expire(now)

    def flush(self, now: int) -> None:
        """The capture has ended."""
        self._take(self._tcp.flush(now))
        self._messages(self._roce.flush(now))
        self._observer.flush(now)

    def warm_up(self) -> None:
        """Compile every kernel before the first frame arrives."""
        other, nothing = Examination(64), np.zeros(0, np.int64)
        other.feed(pack([bytes(60)], 0), 0)
        other.expire(0)
        other.flush(0)
        k.announcements(nothing, nothing, nothing, np.zeros((1, 6), np.int64), np.zeros((0, 6), np.int64))

    def _take(self, spans: Spans) -> None:
        if self._heads.look(spans) & SETUP:
            self._setups.feed(spans)
        arrays = spans.flow, spans.kind, spans.offset, spans.addr, spans.length
        k.streams(spans.n, *arrays, self._streams)
        k.gloo(spans.n, *arrays, self._streams)

    def _messages(self, spans: MessageSpans) -> None:
        self._nccl.feed(spans)

    # What it amounts to

    def seen(self, source: str, *, live: bool, counters: SourceCounters, problems: Iterable[str] = ()) -> Seen:
        """The figures so far."""
        frames, roce = self._tcp.counters(), self._roce.counters()
        segments = self._tcp.segments
        tunnels = segments.vantage.tunnels()
        report = self._observer.report()
        rings, others = self._nccl.rings()
        unknown = self._unknown_rings()
        shown = self._coverage()
        rows = self._streams[: self.flows.count]
        holes = self._with_holes(rows)
        return Seen(
            source, live,
            seconds=max(0, self._last - self._first) / 1e9,
            frames=frames["frames"], bytes=self._bytes, longest=self._longest,
            kernel_drops=counters.drops, interface_drops=counters.interface_drops, problems=tuple(problems),
            tcp=frames["tcp"], roce=roce["packets"], foreign=roce["foreign"],
            unreadable=frames["malformed"] + frames["cut_header"] + frames["fragments"] + frames["unknown_linktype"],
            encapsulations=segments.encapsulations(),
            tunnels=tuple(str(one.tunnel) for one in tunnels),
            declared=bool(tunnels) and all(one.group is not None for one in tunnels),
            too_deep=frames["too_deep"],
            cut_by_switch=frames["cut_by_switch"], cut_by_snaplen=frames["cut_by_snaplen"], snaplen=self._snaplen,
            fragments_lost=frames["outer_lost"] + frames["outer_waiting"] + frames["outer_unproven"],
            strange=tuple(Strange(*one) for one in segments.unknown()), outermost=self._outer(),
            counted=int(self._copies[k.COUNTED]), copies=int(self._copies[k.CERTAIN]),
            alike=int(self._copies[k.ALIKE]),
            tcp_holes=int(holes[:, k.S_HOLES].sum()), tcp_hole_bytes=int(holes[:, k.S_HOLE_BYTES].sum()),
            tcp_bytes=int(holes[:, k.S_DATA].sum()), tcp_long_holes=int(holes[:, k.S_LONG_HOLES].sum()),
            tcp_segments=int(holes[:, k.S_SEGMENTS].sum()),
            tcp_largest=int(holes[:, k.S_LARGEST].max(initial=0)), conflicts=frames["conflicts"],
            roce_lost=roce["lost_packets"], roce_hole_bytes=roce["hole_bytes"],
            roce_tails=int(self._parts[k.P_LAST]), roce_full=int(self._parts[k.P_FULL]),
            roce_acks=int(self._parts[k.P_ACKS]),
            nccl_messages=sum(link.messages for ring in rings for link in ring.links),
            rings=(*self._known_rings(report), *unknown, *rings), other_links=others,
            coverage=tuple(one for told in shown for one in told or ()), unplaced=None in shown,
            strange_rooms=self._nccl.strange_rooms(),
            groups=tuple(f"{group['name']}: {group['world_size']} ranks" for group in report["groups"]),
            unknown_ranks=bool(unknown),
            half_rendezvous=tuple(group["name"] for group in report["incomplete_groups"]),
            tls=report["streams"]["tls"], nccl_sockets=int((rows[:, k.S_NCCL] == _NCCL_SOCKET).sum()),
        )  # fmt: skip

    def _coverage(self) -> list[list[Coverage] | None]:
        """Of the job's communicator, and of those whose set-up was captured."""
        known = [] if self._group is None else [self._group]
        if not known:
            known = communicators(self._setups.setup())
        pairs = self._nccl.pairs()
        return [coverage(group, pairs) for group in known] if pairs else []

    def _with_holes(self, rows: np.ndarray) -> np.ndarray:
        """Streams with holes; those of gloo and NCCL where there are any: a mirror may show others in part."""
        training = (rows[:, k.S_MESSAGES] >= _ENOUGH) | (rows[:, k.S_NCCL] > 0)
        chosen = rows[training] if training.any() else rows
        holes: np.ndarray = chosen[chosen[:, k.S_HOLES] > 0]
        return holes

    def _outer(self) -> tuple[Strange, ...]:
        rows = self._outermost[self._outermost[:, 1] > 0].tolist()
        ordered = sorted(rows, key=lambda row: -row[1])
        return tuple(Strange(_OUTERMOST[code >> 16], code & 0xFFFF, frames) for code, frames in ordered)

    def _known_rings(self, report: dict[str, Any]) -> list[Ring]:
        """Of groups that go on, and of those that are over where no other is seen."""
        live = [group for group in report["groups"] if group["live"]]
        rings = []
        for group in live or report["groups"]:
            links = tuple(
                Link(f"rank {link['sender']}", f"rank {link['receiver']}", link["sender"], bytes=link["bytes"])
                for link in group["links"] if link["ring"] and link["bytes"]
            )  # fmt: skip
            rings.append(Ring("gloo", group["name"], links, group["world_size"]))
        return rings

    def _unknown_rings(self) -> list[Ring]:
        """Gloo streams of no known group that carry all-reduces, by the hosts that they join."""
        groups = (view.group for view in self._observer.groups.values())
        known = {end for group in groups for context in group.contexts for end in context.values()}
        links = []
        rows = self._streams[: self.flows.count]
        for flow in np.flatnonzero(rows[:, k.S_REDUCES])[:_MOST_LINKS].tolist():
            source, destination = self.flows.endpoint_src(flow), self.flows.endpoint_dst(flow)
            if source not in known and destination not in known:
                messages, size = rows[flow, [k.S_REDUCES, k.S_REDUCE_BYTES]].tolist()
                links.append(Link(source[0], destination[0], -1, messages, size))
        return [Ring("gloo", " - ".join(hosts), part) for hosts, part in by_hosts(links)]
