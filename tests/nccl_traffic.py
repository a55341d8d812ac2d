"""Made-up NCCL traffic of the lab's generator through transport and decoder, with a planner like that of step tracking.

The generator was written from NCCL's source and shares nothing with the schedule under test.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tcp_frames import block_of

from flowcheck import rehearsal
from flowcheck.lab import nccl_wire_job as lab
from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire import Call, Communicator, Link, Work, frames_of, mirrored
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.nccl_wire_payload import storage
from mirror.roce import QueuePairs, RoceReassembler
from reconstruct.decoder import (
    ALLREDUCE,
    IGNORE,
    RAW,
    AllReduce,
    Conflict,
    Event,
    LinkLost,
    Message,
    Plan,
    Reduced,
    Request,
)
from reconstruct.landing import Landing
from reconstruct.nccl.decoder import NcclDecoder
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.schedule import LL, LL128, NVLSTREE, RING, SIMPLE, TREE

Sent = list[tuple[int, Link, bytes]]
_FRAME_NS, _PAUSE_NS = 100, 20_000
START = 1_700_000_000_000_000_000


def group_of(job: Job, *, name: str = "g", version: str | None = None, every: bool = False) -> NcclGroup:
    """The facts of a job as its log gives them. every: all algorithms and protocols are possible."""
    group = rehearsal.group_of(job, name)
    if every:
        heads = tuple(ranks[: job.heads] for ranks in job.node_ranks)
        group = replace(
            group, algorithms=(NVLSTREE,) if job.algorithm == lab.NVLSTREE else (RING, TREE),
            protocols=(LL, LL128, SIMPLE), heads=heads, nvls_channels=job.channels if heads else 0,
        )  # fmt: skip
    return group if version is None else replace(group, version=version)


def gradients(rng: np.random.Generator, ranks: int, count: int, dtype: str = "float32") -> list[np.ndarray]:
    """Inputs of an all-reduce, by rank."""
    kind = storage(dtype)
    if dtype == "bfloat16":
        wide = [rng.standard_normal(count).astype(np.float32) for _ in range(ranks)]
        return [(values.view(np.uint32) >> 16).astype(kind) for values in wide]
    return [rng.standard_normal(count).astype(kind) for _ in range(ranks)]


@dataclass
class Sender:
    """The cluster: collectives in, frames out, results kept."""

    job: Job
    seed: int = 0
    results: list[np.ndarray | None] = field(default_factory=list)
    clock: int = START

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.communicator = Communicator(self.job)

    def call(self, call: Call) -> Sent:
        made = frames_of(self.job, [call], communicator=self.communicator)
        made = [(self.clock + _FRAME_NS * at, link, frame) for at, (_, link, frame) in enumerate(made)]
        self.clock += _FRAME_NS * len(made) + _PAUSE_NS
        result = None
        if call.kind == "allreduce":
            found = Work(self.job, call).result
            result = None if found is None else found.view(np.uint8)
        elif call.kind == "broadcast":
            result = call.inputs[call.root].view(np.uint8)
        self.results.append(result)
        return made

    def reduce(self, count: int, dtype: str = "float32") -> Sent:
        return self.call(Call("allreduce", gradients(self.rng, self.job.ranks, count, dtype), dtype))

    def barrier(self) -> Sent:
        return self.call(Call("allreduce", [np.ones(1, np.float32)] * self.job.ranks))

    def broadcast(self, values: np.ndarray, root: int = 0) -> Sent:
        return self.call(Call("broadcast", [values] * self.job.ranks, root=root))

    def gather(self, count: int) -> Sent:
        values = [self.rng.integers(0, 1 << 30, count) for _ in range(self.job.ranks)]
        return self.call(Call("allgather", values))


class Rig:
    """Transport and decoder. sizes: (bytes, itemsize) of the buckets that the planner knows."""

    def __init__(self, group: NcclGroup, sizes: Iterable[tuple[int, int]], *, sequence: int = 0,
                 attached: int | None = None, budget: int = 1 << 30, raw: bool = False,
                 check_icrc: bool = False) -> None:
        self.sizes = sorted(set(sizes))
        self.raw = raw
        pairs = QueuePairs(1024)
        self.roce = RoceReassembler(pairs, check_icrc=check_icrc)
        self.decoder = NcclDecoder(pairs, self.roce, budget_bytes=budget)
        self.decoder.planner = self.plan
        self.decoder.add_group(group, sequence, attached)
        self.name = group.name
        self.events: list[Event] = []
        self.requests: list[Request] = []
        self.excluded: set[int] = set()
        self.now = 0

    def plan(self, request: Request) -> Plan:
        self.requests.append(request)
        if request.kind != ALLREDUCE:
            return RAW
        if self.raw:
            return RAW
        fitting = {s for s in self.sizes if self.decoder.can_begin(request, *s)}
        if len({size for size, _ in fitting}) > 1:
            return RAW
        return AllReduce(*min(fitting)) if fitting else IGNORE

    def feed(self, sent: Sent, block: int = 97) -> None:
        for at in range(0, len(sent), block):
            part = sent[at : at + block]
            times = [time for time, _, _ in part]
            self.now = max(self.now, max(times))
            self._take(self.roce.feed(block_of([frame for _, _, frame in part], times), self.now))

    def _take(self, spans: object) -> None:
        self.events += self.decoder.feed(spans, self.now)  # type: ignore[arg-type]

    def pass_time(self) -> None:
        """Nothing more has come until `now`."""
        self._take(self.roce.feed(block_of([], []), self.now))

    def finish(self) -> None:
        """The input ends."""
        self._take(self.roce.flush(self.now))

    def landing(self, tag: int) -> Landing | None:
        return self.decoder.landing(self.name, tag)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def reduced(self) -> list[int]:
        return [event.tag for event in self.events if isinstance(event, Reduced)]

    @property
    def lost(self) -> list[LinkLost]:
        return [event for event in self.events if isinstance(event, LinkLost)]

    @property
    def conflicts(self) -> list[Conflict]:
        return [event for event in self.events if isinstance(event, Conflict)]

    @property
    def messages(self) -> dict[int, np.ndarray | None]:
        return {event.tag: event.data for event in self.events if isinstance(event, Message)}

    def wrong(self, results: Sequence[np.ndarray | None], first: int = 0) -> list[int]:
        """Tags of landings in which a covered byte is not the cluster's own result."""
        bad = []
        for tag, result in enumerate(results, first):
            landing = self.landing(tag)
            if landing is None or landing.poisoned:
                continue
            if result is None or landing.size != result.size:
                bad.append(tag)
                continue
            shown = np.zeros(result.size, bool)
            for start, end in landing.ranges():
                shown[start:end] = True
            if (landing.data[shown] != result[shown]).any():
                bad.append(tag)
        return bad


def ports_of(job: Job, node: int, *ways: str) -> list[tuple[Port, str]]:
    """All ports of a node, mirrored these ways: "in" is what the node sends."""
    return [(Port(node, rail), way) for rail in range(job.rails) for way in ways]


def seen_at(job: Job, sent: Sent, node: int, *ways: str) -> Sent:
    return mirrored(sent, ports_of(job, node, *ways))


def lossy(rng: random.Random, sent: Sent, rate: float) -> Sent:
    return [item for item in sent if rng.random() >= rate]


def disordered(rng: random.Random, sent: Sent, rate: float) -> Sent:
    """Some frames a few places later, some twice."""
    keyed = []
    for at, item in enumerate(sent):
        keyed.append((at + (rng.randint(2, 9) if rng.random() < rate else 0), at, item))
        if rng.random() < rate:
            keyed.append((at + rng.randint(1, 30), at, item))
    keyed.sort(key=lambda entry: entry[:2])
    clock, result = 0, []
    for _, _, (time, link, frame) in keyed:
        clock = max(clock, time)
        result.append((clock, link, frame))
    return result
