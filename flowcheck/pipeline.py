"""The data's way from frames to steps: reassembly, decoding and step tracking put together, without any I/O.

`feed` takes one block of frames; jobs are added and removed between blocks; `poll` returns what became known. One
thread uses a `Pipeline`; every wait inside is measured on the time that the caller passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowcheck.description import GroupRecord, JobDescription
from mirror.block import Block
from mirror.frames import Flows
from mirror.tcp import Spans, TcpReassembler
from reconstruct import schedule
from reconstruct.gloo import IGNORE, GlooDecoder, Group, Plan, Request
from reconstruct.landing import Landing
from reconstruct.lr import Predictor
from reconstruct.steps import StepTracker, TrackerEvent, Waits

MAX_PENDING = 3
"""Steps handed out and not yet applied."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory that the pipeline may hold, in bytes, and the number of flows."""

    flows: int = 1 << 16
    reorder: int = 64 << 20
    landings: int = 8 << 30


def connections(record: GroupRecord) -> dict[tuple[str, int, str, int], tuple[int, int]]:
    """(source ip, source port, destination ip, destination port) -> (sender, receiver), both ways of each connection.

    A connection is known when both of its ends reported it, or when one end did and the other is a listener.
    """
    owner = {(ip, port): rank for context in record.contexts for rank, (ip, port) in context.items()}
    owner |= {(ip, port): rank for rank, ip, port, _, _ in record.sockets}
    known = {}
    for rank, ip, port, peer_ip, peer_port in record.sockets:
        peer = owner.get((peer_ip, peer_port))
        if peer is not None:
            known[ip, port, peer_ip, peer_port] = (rank, peer)
            known[peer_ip, peer_port, ip, port] = (peer, rank)
    return known


class Pipeline:
    """Frames in, steps out, for any number of jobs at once."""

    def __init__(self, limits: Limits, waits: Waits) -> None:
        self.flows = Flows(limits.flows)
        self.tcp = TcpReassembler(self.flows, reorder_bytes=limits.reorder)
        self.decoder = GlooDecoder(self.flows, budget_bytes=limits.landings)
        self.decoder.planner = self._plan
        self.trackers: dict[str, StepTracker] = {}
        self._limits = limits
        self._waits = waits

    def add_job(
        self, key: str, description: JobDescription, predictor: Predictor, attached: int | None = None
    ) -> StepTracker:
        """Follow a job from now on. key: unique among the jobs followed; attached: see `StepTracker`.

        Raises ValueError if its process group cannot be one or is followed already.
        """
        record = description.group
        self.decoder.add_group(Group(key, record.world_size, record.contexts, connections(record)))
        try:
            tracker = StepTracker(description, key, self.decoder, predictor, self._waits, attached)
        except ValueError:
            self.decoder.remove_group(key)
            raise
        self.trackers[key] = tracker
        return tracker

    def remove_job(self, key: str) -> None:
        """Forget a job. Gradients of steps that were handed out stay valid as long as somebody holds them."""
        tracker = self.trackers.pop(key, None)
        if tracker is not None:
            tracker.detach()
            self.decoder.remove_group(key)

    @property
    def full(self) -> bool:
        """Whether steps must be applied before more frames are read: the capture ring has to hold these."""
        return any(
            t.pending >= MAX_PENDING or (t.pending and (t.pending + 2) * t.step_bytes > self._limits.landings)
            for t in self.trackers.values()
        )

    def _plan(self, request: Request) -> Plan:
        tracker = self.trackers.get(request.group)
        return tracker.plan(request) if tracker is not None else IGNORE

    def feed(self, block: Block, now: int) -> None:
        """Take one block of frames. The block may be released when this returns."""
        self._decode(self.tcp.feed(block, now), now)

    def expire(self, now: int) -> None:
        """Let gaps that will not be filled any more become holes."""
        self._decode(self.tcp.expire(now), now)

    def flush(self, now: int) -> None:
        """The input has ended: every gap is a hole."""
        self._decode(self.tcp.flush(now), now)

    def _decode(self, spans: Spans, now: int) -> None:
        for event in self.decoder.feed(spans, now):
            tracker = self.trackers.get(event.group)
            if tracker is not None:
                tracker.event(event)

    def poll(self, now: int, final: bool = False) -> list[tuple[str, TrackerEvent]]:
        """What became known since the last call, as (job key, event)."""
        return [(key, event) for key, t in self.trackers.items() for event in t.poll(now, final)]

    def counters(self) -> dict[str, int]:
        """Frames by what they were, bytes of holes, messages: everything that was counted since the start."""
        return {**self.tcp.counters(), **self.decoder.counters}

    def warm_up(self) -> None:
        """Compile every kernel before the first frame arrives: a ring fills while a compiler runs."""
        zero, size = np.zeros(1, np.int64), np.full(1, 64)
        pipeline = Pipeline(Limits(flows=64, reorder=1 << 20, landings=1 << 20), self._waits)
        pipeline.feed(Block(np.zeros(64, np.uint8), zero, size, size, zero, zero - 1), 0)
        pipeline.expire(0)
        pipeline.flush(0)
        for kernel in (schedule.first_length, schedule.total, schedule.lengths):
            kernel(64, 4, 2, 0)
        schedule.message(64, 4, 2, 0, 0)
        landing = Landing(64, 4, 2)
        landing.put(0, np.zeros(4, np.uint8), 0, 0)
        landing.holes()
