"""What was lost on the way to this machine and on it: bytes by cause, and for each cause what is likely behind it and
what to do (docs/loss.md). The sentences are `flowcheck.doctor`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flowcheck.doctor import kernels as k
from flowcheck.doctor.finding import Finding
from flowcheck.doctor.frames import drops, missing, truncation
from flowcheck.doctor.seen import Seen
from flowcheck.observation import size_text
from mirror.block import Block, SourceCounters
from mirror.loss import CAUSES, DAMAGED, MIRROR, NIC, RING, TRUNCATED, Evidence, Tally
from mirror.roce import MessageSpans, RoceReassembler
from mirror.spans import HOLE, Spans
from mirror.tcp import TcpReassembler

__all__ = ["LossReport", "Losses"]

_ALERT = 64
_L_LARGEST, _L_SEGMENTS, _L_BYTES, _L_HOLES, _L_HOLE_BYTES, _L_LONG = range(6)
_BLIND = (
    "No acknowledgment of these bytes was seen, so it is not known whether they passed.",
    "mirror both directions of the port: what the receiver acknowledges was lost by the mirror",
)
_REFUSED = (
    "Frames came damaged, and were refused: their checksums are wrong, others of the same connections are right. What "
    "the trainers received was right, or they would have asked for it again.",
    "check the mirror's way to this machine: clean or replace optics and cable, compare the error counters of the "
    "monitor port and of ethtool -S, try another port or adapter",
)
_JUDGED = ("ok", "bad", "refused", "unchecked")


class Losses:
    """Of one pipeline. While bytes are missing (`alert`) the frames that do come are looked at more closely, as which
    ones come tells why others do not; else nothing is done per frame."""

    def __init__(self, evidence: Evidence, tcp: TcpReassembler, roce: RoceReassembler) -> None:
        self.streams, self.messages, self.packets = Tally(evidence), Tally(evidence), Tally(evidence)
        """Bytes of TCP streams and of RDMA messages, and packets of RDMA messages of which nothing is known."""
        self.alert = 0
        """Blocks that are still to be looked at."""
        self.longest = self.snaplen = self.lost_packets = self.blocks = 0
        self.parts = np.zeros(6, np.int64)
        self.rows = np.zeros((tcp.flows.capacity, 6), np.int64)
        self._tcp, self._roce = tcp, roce

    def tcp(self, spans: Spans) -> None:
        """Spans of TCP with holes among them."""
        flows = self._tcp.flows
        self.streams.take(spans, lambda flow: flows.table.key[flow, 4] >> 32)
        if self.alert:  # else what came beside them was not looked at
            at = np.flatnonzero(spans.kind[: spans.n] == HOLE)
            flow, length, rows = spans.flow[at], spans.length[at], self.rows
            np.add.at(rows[:, _L_HOLES], flow, 1)
            np.add.at(rows[:, _L_HOLE_BYTES], flow, length)
            np.add.at(rows[:, _L_LONG], flow, length > rows[flow, _L_LARGEST])
        self.alert = _ALERT

    def rdma(self, spans: MessageSpans) -> None:
        """Spans of RDMA messages with holes among them."""
        flows, known = self._roce.flows, spans.message[: spans.n] >= 0
        length = spans.length[: spans.n]
        for tally, mine in ((self.messages, known), (self.packets, ~known)):
            tally.take(spans, lambda flow: flows.table.key[flow, 4] >> 32, np.where(mine, length, 0))
        if self.alert:
            holes = spans.kind[: spans.n] == HOLE
            mtu = np.maximum(self._roce.mtu[spans.flow[: spans.n]], 1)
            self.lost_packets += int(np.where(known, -(-length // mtu), length)[holes].sum())
        self.alert = _ALERT

    def look(self, block: Block) -> None:
        """The block whose frames were just taken: which ones come while others are missing?"""
        self.alert -= 1
        self.blocks += 1
        if len(block):
            self.longest = max(self.longest, int(block.wirelen.max()))
            cut = block.caplen + np.where(block.vlan >= 0, 4, 0) < block.wirelen
            self.snaplen = max(self.snaplen, int(block.caplen[cut].max(initial=0)))
        segments, datagrams, rows = self._tcp.segments, self._roce.datagrams, self.rows
        flow, length = segments.flow[: segments.n], segments.numbers[: segments.n, 4]
        np.maximum.at(rows[:, _L_LARGEST], flow, length)
        np.add.at(rows[:, _L_SEGMENTS], flow, length > 0)
        np.add.at(rows[:, _L_BYTES], flow, length)
        k.parts(datagrams.numbers, datagrams.n, self.parts)

    def warm_up(self) -> None:
        """Compile the kernels."""
        k.parts(np.zeros((1, 6), np.int64), 0, self.parts)

    def settle(self, now: int) -> None:
        """Nothing more is learned of what was lost well before `now`, ns of capture time."""
        for tally in (self.streams, self.messages, self.packets):
            tally.settle(now)

    def seen(self, sources: Iterable[SourceCounters], name: str, live: bool) -> Seen:
        """The figures for `flowcheck.doctor`'s sentences."""
        frames, counters = self._tcp.counters(), list(sources)
        holes = self.rows[self.rows[:, _L_HOLES] > 0]
        return Seen(
            name, live,
            frames=frames["frames"], longest=self.longest,
            kernel_drops=sum(c.drops for c in counters), interface_drops=sum(c.interface_drops for c in counters),
            cut_by_switch=frames["cut_by_switch"], cut_by_snaplen=frames["cut_by_snaplen"], snaplen=self.snaplen,
            tcp_holes=int(holes[:, _L_HOLES].sum()), tcp_hole_bytes=int(holes[:, _L_HOLE_BYTES].sum()),
            tcp_bytes=int(holes[:, _L_BYTES].sum()), tcp_long_holes=int(holes[:, _L_LONG].sum()),
            tcp_segments=int(holes[:, _L_SEGMENTS].sum()), tcp_largest=int(holes[:, _L_LARGEST].max(initial=0)),
            roce=int(self.parts.sum() - self.parts[k.P_FULL]), roce_lost=self.lost_packets,
            roce_hole_bytes=sum(self.messages.bytes().values()),
            roce_tails=int(self.parts[k.P_LAST]), roce_full=int(self.parts[k.P_FULL]),
            nccl_messages=int(self.parts[k.P_FIRST] + self.parts[k.P_ONLY]),
        )  # fmt: skip

    def bytes(self) -> dict[str, int]:
        """Bytes of holes by cause, of all streams and messages; all causes are named."""
        streams, messages = self.streams.bytes(), self.messages.bytes()
        return {cause: streams[cause] + messages[cause] for cause in CAUSES}


class LossReport:
    """What `flowcheck status` shows and the log says. `status` may be read by any thread."""

    def __init__(self, losses: Losses, *, live: bool) -> None:
        self.status: dict[str, Any] = {}
        self._losses, self._live = losses, live
        self._said: set[tuple[str, str]] = set()

    def update(self, sources: Mapping[str, SourceCounters], counters: Mapping[str, int], now: int) -> list[str]:
        """Look again, on the capture thread; returns one line for each kind of loss that was not there before.

        sources: what each has counted, by name; counters: of the pipeline; now: capture time, ns.
        """
        losses = self._losses
        losses.settle(now)
        by_cause = losses.bytes()
        packets = {cause: count for cause, count in losses.packets.bytes().items() if count}
        seen = losses.seen(sources.values(), next(iter(sources), "the capture"), self._live)
        here = next(iter(sources), "IFACE") if self._live else "IFACE"
        kinds: list[dict[str, Any]] = []
        news = []
        for cause in CAUSES:
            if not by_cause[cause] and not packets.get(cause):
                continue
            for name, likely, remedy in _reasons(cause, seen, here):
                kinds.append({"cause": cause, "bytes": by_cause[cause], "likely": likely, "remedy": remedy})
                if (cause, name) not in self._said:
                    self._said.add((cause, name))
                    news.append(f"loss ({cause}, {size_text(by_cause[cause])} so far): {likely} Do: {remedy}")
        refused = counters["checksum_refused"] + counters["roce_icrc_refused"]
        if refused and (DAMAGED, "damaged") not in self._said:  # another copy of all of them came
            self._said.add((DAMAGED, "damaged"))
            news.append(f"{refused} frames refused so far, nothing lost by it: {_REFUSED[0]} Do: {_REFUSED[1]}")
        kinds.sort(key=lambda kind: -kind["bytes"])
        self.status = {
            "bytes": by_cause,
            "total": sum(by_cause.values()),
            "packets": packets,
            "frames": {
                "received": counters["frames"],
                "ring": seen.kernel_drops,
                "nic": seen.interface_drops,
                "truncated": counters["cut_by_switch"] + counters["cut_by_snaplen"],
            },
            "checksums": {
                "tcp": {name: counters[f"checksum_{name}"] for name in _JUDGED},
                "icrc": {name: counters[f"roce_icrc_{name}"] for name in _JUDGED},
            },
            "duplicate_bytes": sum(
                counters[name] for name in ("duplicate_bytes", "overlap_bytes", "roce_duplicate_bytes")
            ),
            "likely": kinds[0]["likely"] if kinds else "",
            "remedy": kinds[0]["remedy"] if kinds else "",
            "kinds": kinds,
        }
        return news


def _reasons(cause: str, seen: Seen, here: str) -> list[tuple[str, str, str]]:
    """(name, what is likely, what to do) of a cause."""
    findings: list[Finding] = []
    if cause == TRUNCATED:
        findings = truncation(seen, here)
    elif cause == DAMAGED:
        return [("damaged", *_REFUSED)]
    elif cause in (RING, NIC):
        findings = [one for one in drops(seen, here) if (one.name == "kernel-drops") == (cause == RING)]
    elif cause == MIRROR:
        findings = [missing(seen, here)]
    if findings:
        return [(one.name, one.sentence, one.remedy) for one in findings]
    return [("blind", *_BLIND)]
