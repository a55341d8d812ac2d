"""A made-up job over NCCL: like `synthetic_job`, with the frames of the lab's generator on the mirrored ports.

Every rank has inputs of its own; what NCCL's order of additions makes of them is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from synthetic_job import SIZES, SyntheticJob

from flowcheck.description import GroupRecord
from flowcheck.lab import nccl_log as lab_log
from flowcheck.lab.addresses import Port, training_address
from flowcheck.lab.nccl_wire import DATA, Call, Communicator, Work
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.nccl_facts import record
from flowcheck.nccl_log import parse
from mirror.block import Block

LINE_RATE = 12.5  # bytes per ns


@dataclass(slots=True)
class Frame:
    ts: int
    data: bytes


class NcclWire:
    """The network of one communicator. mirrored: (port, "in" | "out"), None: all ports, both ways."""

    def __init__(self, job: Job, mirrored: Sequence[tuple[Port, str]] | None = None) -> None:
        self.job = job
        self.mirrored = None if mirrored is None else set(mirrored)
        self.frames: list[Frame] = []
        self._now = 1_700_000_000_000_000_000
        self.communicator = Communicator(job)

    def perform(self, call: Call) -> Work:
        """Put a collective on the wire."""
        work = Work(self.job, call)
        clock = float(self._now)
        start = clock
        elapsed = 0.0
        for event in self.communicator.events(work):
            ends = (event.lane.sender, event.lane.receiver)
            source, target = ends if event.kind == DATA else ends[::-1]
            link = (self.job.ports[source], "in"), (self.job.ports[target], "out")
            shown = self.mirrored is None or any(end in self.mirrored for end in link)
            for frame in self.communicator.made(work, event, True):
                elapsed += len(frame) / LINE_RATE
                if shown:
                    self.frames.append(Frame(int(start) + int(elapsed), bytes(frame)))
        self._now = int(start) + int(elapsed) + 1000
        return work

    def block(self, frames: Sequence[Frame]) -> Block:
        size = np.array([len(frame.data) for frame in frames], np.int64)
        offset = np.concatenate(([0], np.cumsum(size)[:-1])).astype(np.int64)
        base = np.frombuffer(bytearray(b"".join(frame.data for frame in frames)), np.uint8)
        ts = np.array([frame.ts for frame in frames], np.int64)
        return Block(base, offset, size, size, ts, np.full(len(frames), -1, np.int64))


class NcclJob(SyntheticJob):
    """See `SyntheticJob`. Keywords of `lab.nccl_wire_job.Job` go to `nccl`."""

    def __init__(
        self, world: int = 2, *, nccl: dict[str, Any] | None = None,
        mirrored: Sequence[tuple[Port, str]] | None = None, told: dict[str, str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.nccl = Job(world, **(nccl or {}))
        self._told = told or {}
        self._values = np.random.default_rng(options.get("seed", 0) + 77)
        super().__init__(world, **options)
        self.wire = NcclWire(self.nccl, mirrored)  # type: ignore[assignment]

    def _group(self) -> GroupRecord:
        return GroupRecord("0", self.world, [], self.sequence, backend="nccl", nccl=record(self._contributions()))

    def _contributions(self) -> list[dict[str, Any]]:
        """What each rank says of itself: its log as the lab writes it."""
        made = []
        for rank in range(self.world):
            connections = self.wire.communicator.of_rank(rank)  # type: ignore[attr-defined]
            log = parse(lab_log.log_lines(self.nccl, rank, connections, {}))
            host = self.nccl.hosts[rank]
            made.append({
                "node": str(host),
                "addresses": [training_address(Port(host, rail), self.nccl.ipv6) for rail in range(self.nccl.rails)],
                "version": log.version,
                "settings": dict(self._told),
                "communicators": [one.to_json() for one in log.of_group(rank, self.world)],
            })  # fmt: skip
        return made

    # On the wire

    def _inputs(self, count: int) -> list[np.ndarray]:
        return [
            (self._values.standard_normal(count) * 10.0 ** self._values.integers(-3, 4, count)).astype(np.float32)
            for _ in range(self.world)
        ]

    def _perform(self, call: Call, lost: bool = False) -> Work:
        frames = self.wire.frames
        before = len(frames)
        work: Work = self.wire.perform(call)  # type: ignore[attr-defined]
        if lost:
            del frames[before:]
        return work

    def barrier(self) -> None:
        self.collective()
        self._perform(Call("allreduce", [np.ones(1, np.float32)] * self.world))

    def broadcast(self, data: bytes) -> None:
        self.collective()
        self._perform(Call("broadcast", [np.frombuffer(data, np.uint8)] * self.world))

    def point_to_point(self) -> None:
        values = np.zeros(5, np.float32)
        self._perform(Call("sendrecv", [values] * self.world, root=0, target=self.world - 1))

    def allreduce(self, values: np.ndarray, *, lost: bool = False) -> int:
        """An all-reduce of as many elements as `values`, with values of its own."""
        self.sums(len(values), lost)
        return self.tag - 1

    def sums(self, count: int, lost: bool = False) -> np.ndarray:
        self.collective()
        result = self._perform(Call("allreduce", self._inputs(count)), lost).result
        assert result is not None
        return result

    def reduction(self, *, lost: Sequence[int] = ()) -> list[int]:
        tags = []
        self.reduced = {}
        for number, bucket in enumerate(self.rebuilt if self.has_rebuilt else self.initial):
            values = self.sums(sum(SIZES[i] for i in bucket), number in lost)
            at = 0
            for index in bucket:
                self.reduced[index] = values[at : at + SIZES[index]].tobytes()
                at += SIZES[index]
            tags.append(self.tag - 1)
        return tags


def trained(steps: int, **options: Any) -> NcclJob:
    """A job that attached before its first step and took some usual ones."""
    job = NcclJob(**options)
    job.attach()
    for _ in range(steps):
        job.usual_step()
    return job
