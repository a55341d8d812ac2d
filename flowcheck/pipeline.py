"""The data's way from frames to steps: reassembly, decoding and step tracking put together, without any I/O.

`feed` takes one block of frames; jobs are added and removed between blocks; `poll` returns what became known. One
thread uses a `Pipeline`; every wait inside is measured on the time that the caller passes.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowcheck import rehearsal
from flowcheck.description import JobDescription
from flowcheck.groups import completed, gloo_group, nccl_group, with_setup
from flowcheck.loss import Losses
from flowcheck.sight import Sight
from flowcheck.vantages import Vantages
from mirror.block import Block, pack
from mirror.frames import Flows
from mirror.loss import Evidence
from mirror.roce import MessageSpans, QueuePairs, RoceReassembler
from mirror.spans import Spans
from mirror.tcp import TcpReassembler
from reconstruct.decoder import IGNORE, Conflict, Decoder, Event, Plan, Planner, Request
from reconstruct.gloo import schedule
from reconstruct.gloo.decoder import GlooDecoder
from reconstruct.landing import Landing
from reconstruct.lr import Predictor
from reconstruct.nccl.decoder import NcclDecoder
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.setup import Contradiction, agreeing, of_job
from reconstruct.nccl.streams import NcclStreams
from reconstruct.nccl.versions import traits
from reconstruct.steps import StepTracker, TrackerEvent, Waits

_INLINE = 128
"""`Traits.socket_inline` of current releases."""
MAX_PENDING = 3
"""Steps handed out and not yet applied."""
_MOST_ROUNDS = 64  # of searches that one feed would take too long for, when the input has ended
_SETTLED = 200_000_000  # ns without more set-up traffic, after which it is compared with the jobs followed


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory that the pipeline may hold, in bytes, and the number of flows: for TCP and gloo, and again for RoCE and
    NCCL. What is not used is not taken."""

    flows: int = 1 << 16
    reorder: int = 64 << 20
    landings: int = 8 << 30


def _planner(pipeline: Pipeline) -> Planner:
    """`pipeline.plan` for its decoders, which do not hold it: the memory of a pipeline is too much to be kept until
    the collector of cycles comes."""
    found = weakref.ref(pipeline)

    def plan(request: Request) -> Plan:
        asked = found()
        return IGNORE if asked is None else asked.plan(request)

    return plan


class Pipeline:
    """Frames in, steps out, for any number of jobs at once.

    vantages: declared groups of interfaces and tunnels; nccl_version: of jobs whose description lacks it;
    checksums: whether those of TCP and RoCE are verified.
    """

    def __init__(
        self,
        limits: Limits,
        waits: Waits,
        vantages: Vantages | None = None,
        nccl_version: str | None = None,
        checksums: bool = True,
    ) -> None:
        self._vantages = Vantages() if vantages is None else vantages
        self.flows = Flows(limits.flows)
        self.tcp = TcpReassembler(
            self.flows, reorder_bytes=limits.reorder, vantage=self._vantages.table, check_sums=checksums
        )
        self.gloo = GlooDecoder(self.flows, budget_bytes=limits.landings)
        self.pairs = QueuePairs(limits.flows)
        self.roce = RoceReassembler(self.pairs, held_bytes=limits.reorder, check_icrc=checksums)
        self.tcp.segments.datagrams = self.roce.datagrams  # one walk of the frames fills both
        self.nccl = NcclDecoder(self.pairs, self.roce, budget_bytes=limits.landings)
        self._streams = NcclStreams(self.flows, traits(nccl_version).socket_inline if nccl_version else _INLINE)
        self.setups, self.sockets = self._streams.setups, self._streams.sockets
        self.nccl_tcp = NcclDecoder(self.sockets, self.sockets, budget_bytes=limits.landings)
        self.evidence = Evidence(self._vantages.table.carriers)
        self.gloo.evidence = self.nccl.evidence = self.nccl_tcp.evidence = self.evidence
        self.losses = Losses(self.evidence, self.tcp, self.roce)
        self.gloo.planner = self.nccl.planner = self.nccl_tcp.planner = _planner(self)
        self.trackers: dict[str, StepTracker] = {}
        self._facts: dict[str, NcclGroup] = {}
        self._decoders: dict[str, Decoder] = {}
        self._source = ""  # of the block at hand
        self._limits = limits
        self._waits = waits
        self._nccl_version = nccl_version

    def check(self, description: JobDescription) -> None:
        """Raises FlowcheckError or ValueError, as `add_job` does, for a group that cannot be followed here, whatever
        the set-up traffic shows. For any thread."""
        self._vantages.number(description.group.vantage)
        facts = description.group.nccl
        if facts is not None and (facts.version or self._nccl_version):
            nccl_group("", description.group, self._nccl_version)

    def completed(self, description: JobDescription) -> JobDescription:
        """The description with what NCCL's set-up traffic, as far as it was captured, adds to it.

        Raises FlowcheckError or ValueError where they contradict each other, or neither tells what must be known.
        """
        record = description.group
        if record.nccl is None:
            return description
        setup = self.setups.setup(record.nccl.qps)
        return replace(description, group=completed(record.name, record, setup, self._nccl_version))

    def add_job(
        self, key: str, description: JobDescription, predictor: Predictor, attached: int | None = None
    ) -> StepTracker:
        """Follow a job from now on. key: unique among the jobs followed; attached: see `StepTracker`.

        Raises ValueError or FlowcheckError if its process group cannot be one or is followed already.
        """
        record = description.group
        vantage = self._vantages.number(record.vantage)
        decoder: Decoder
        if record.backend == "nccl":
            facts = nccl_group(key, record, self._nccl_version)
            facts = with_setup(facts, self.setups.setup(facts.qps))
            nccl = self.nccl
            if facts.sockets:
                nccl = self.nccl_tcp
                self.sockets.release(traits(facts.version).socket_inline)
            nccl.add_group(facts, record.sequence, attached, vantage)
            self._facts[key] = facts
            decoder = nccl
        else:
            self.gloo.add_group(gloo_group(key, record, vantage))
            decoder = self.gloo
        try:
            tracker = StepTracker(description, key, decoder, predictor, self._waits, attached)
        except ValueError:
            decoder.remove_group(key)
            self._facts.pop(key, None)
            raise
        self.trackers[key], self._decoders[key] = tracker, decoder
        return tracker

    def remove_job(self, key: str) -> None:
        """Forget a job. Gradients of steps that were handed out stay valid as long as somebody holds them."""
        tracker = self.trackers.pop(key, None)
        if tracker is not None:
            tracker.detach()
            self._decoders.pop(key).remove_group(key)
            self._facts.pop(key, None)

    def sight(self, description: JobDescription) -> Sight:
        """What is seen of a job from now on."""
        return Sight(description.group, (self.flows, self.pairs))

    @property
    def full(self) -> bool:
        """Whether steps must be applied before more frames are read: the capture ring has to hold these."""
        return any(
            t.pending >= MAX_PENDING or (t.pending and (t.pending + 2) * t.step_bytes > self._limits.landings)
            for t in self.trackers.values()
        )

    def plan(self, request: Request) -> Plan:
        """What a decoder keeps of a collective: as the job's tracker wants it."""
        tracker = self.trackers.get(request.group)
        return tracker.plan(request) if tracker is not None else IGNORE

    def feed(self, block: Block, now: int, source: str = "") -> None:
        """Take one block of frames. The block may be released when this returns. source: what it was read from."""
        self._source = source
        for loss in block.losses:
            self.evidence.lost(loss.cause, block.vantage, loss.start, loss.end)
        self._bytes(self.tcp.feed(block, now), now)
        datagrams = self.roce.datagrams
        if datagrams.n or self.pairs.count:
            self._packets(self.roce.take(datagrams, block.base, now), now)
        if self.losses.alert:
            self.losses.look(block)

    def expire(self, now: int) -> None:
        """Let gaps that will not be filled any more become holes."""
        self._source = ""
        self._bytes(self.tcp.expire(now), now)
        if self.pairs.count:
            self._packets(self.roce.expire(now), now)

    def flush(self, now: int) -> None:
        """The input has ended: every gap is a hole."""
        self._source = ""
        self._bytes(self.tcp.flush(now), now)
        if self.pairs.count:
            messages = self.roce.flush(now)
            if messages.holes:
                self.losses.rdma(messages)
            events = self.nccl.feed(messages, now)
            rounds = 0
            while events or (self.nccl.unfinished and rounds < _MOST_ROUNDS):
                self._take(events)  # what was told, such as the layout, may decide what lies behind it
                events = self.nccl.feed(self.roce.expire(now), now)
                rounds += 1

    def _bytes(self, spans: Spans, now: int) -> None:
        """Bytes of TCP: gloo's messages, NCCL's set-up, or NCCL's messages."""
        if spans.holes:
            self.losses.tcp(spans)
        self._take(self.gloo.feed(spans, now))
        messages = self._streams.feed(spans)
        if messages is not None:
            self._take(self.nccl_tcp.feed(messages, now))

    def _packets(self, messages: MessageSpans, now: int) -> None:
        """Messages of RDMA."""
        if messages.holes:
            self.losses.rdma(messages)
        self._take(self.nccl.feed(messages, now))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            tracker = self.trackers.get(event.group)
            if tracker is not None:
                tracker.event(replace(event, source=self._source) if isinstance(event, Conflict) else event)

    def poll(self, now: int, final: bool = False) -> list[tuple[str, TrackerEvent]]:
        """What became known since the last call, as (job key, event)."""
        if self._facts and self.setups.changed and (final or now > self.setups.changed + _SETTLED):
            self._compare()
        return [(key, event) for key, t in self.trackers.items() for event in t.poll(now, final)]

    def _compare(self) -> None:
        """Set-up traffic has come: nothing more is claimed of a job that is described otherwise."""
        setup = self.setups.setup()
        for key, facts in self._facts.items():
            try:
                agreeing(facts, of_job(facts.addresses, facts.world_size, setup))
            except Contradiction as error:
                self.trackers[key].contradicted(str(error))

    def counters(self) -> dict[str, int]:
        """Frames by what they were, bytes of holes, messages: everything that was counted since the start."""
        gloo, rdma, tcp = self.gloo.counters, self.nccl.counters, self.nccl_tcp.counters
        nccl = {name: count + tcp[name] for name, count in rdma.items()}
        return {
            **self.tcp.counters(),
            **gloo,
            **{f"roce_{name}": count for name, count in self.roce.counters().items()},
            **{f"nccl_{name}": count for name, count in nccl.items()},
            "nccl_sockets": self.sockets.count,
            "nccl_sockets_lost": self.sockets.lost,
            "memory_bytes": gloo["memory_bytes"] + nccl["memory_bytes"],
        }

    def tunnels(self, most: int = 64) -> list[dict[str, Any]]:
        """The tunnels through which most frames came: {tunnel, group, frames, cut}; group: None if not declared."""
        return [
            {"tunnel": str(seen.tunnel), "group": seen.group, "frames": seen.frames, "cut": seen.cut}
            for seen in self._vantages.table.tunnels()[:most]
        ]

    def warm_up(self) -> None:
        """Compile every kernel before the first frame arrives: a ring fills while a compiler runs."""
        pipeline = Pipeline(Limits(flows=64, reorder=1 << 20, landings=1 << 20), self._waits)
        pipeline.feed(pack([bytes(64)], 0), 0)
        pipeline.sockets.warm_up()
        pipeline.losses.warm_up()
        pipeline.nccl.planner = rehearsal.planner
        for protocol in rehearsal.PROTOCOLS:
            group, block = rehearsal.rehearsal(protocol)
            pipeline.nccl.add_group(group, 0)
            pipeline.feed(block, int(block.ts[-1]))
            pipeline.nccl.place(protocol, 1, rehearsal.SIZE, rehearsal.ITEMSIZE)
            pipeline.expire(int(block.ts[-1]) + 1)
            if pipeline.nccl.landing(protocol, 3) is None:
                raise RuntimeError(f"the rehearsal with {protocol} was not followed")
            pipeline.nccl.remove_group(protocol)
        pipeline.flush(int(block.ts[-1]) + 1)
        for kernel in (schedule.first_length, schedule.total, schedule.lengths):
            kernel(64, 4, 2, 0)
        schedule.ring(64, 4, 2)
        schedule.message(64, 4, 2, 0, 0)
        landing = Landing(64, 4, 2)
        landing.put(0, np.zeros(4, np.uint8), 0, 0)
        landing.holes()
