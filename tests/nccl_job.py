"""A made-up job over NCCL: like `synthetic_job`, with the frames of the lab's generator on the mirrored ports.

Every rank has inputs of its own; what NCCL's order of additions makes of them is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from synthetic_job import SyntheticJob
from tcp_frames import ACK, SYN, tcp_frame

from flowcheck.description import GroupRecord
from flowcheck.lab import nccl_log as lab_log
from flowcheck.lab.addresses import Port, training_address
from flowcheck.lab.nccl_wire import DATA, Call, Communicator, Event, Work
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.nccl_wire_sockets import Writer
from flowcheck.nccl_facts import record
from flowcheck.nccl_log import parse
from mirror.block import Block, pack

LINE_RATE = 12.5  # bytes per ns


@dataclass(slots=True)
class Frame:
    """ends: the two ports, each with a direction, that it passed."""

    ts: int
    data: bytes
    ends: tuple[tuple[Port, str], ...] = ()


class TcpWriter:
    """One NET/Socket connection as TCP frames."""

    def __init__(self, release: tuple[int, ...], sockets: int, ends: tuple[str, str], port: int) -> None:
        self._writer = Writer(release, sockets)
        self._ends, self.port = ends, port
        self._sent = [0] * (sockets + 1)

    def open(self) -> list[bytes]:
        frames = []
        for index, greeting in self._writer.greetings():
            frames += [self._frame(index, b"", SYN), *self._segments(index, greeting)]
        return frames

    def write(self, payload: bytes) -> list[bytes]:
        return [frame for index, data in self._writer.message(payload) for frame in self._segments(index, data)]

    def _frame(self, index: int, data: bytes, flags: int = ACK) -> bytes:
        source, target = self._ends
        seq = 0 if flags == SYN else 1 + self._sent[index]
        self._sent[index] += len(data)
        return tcp_frame(data, seq=seq, flags=flags, src=source, dst=target, sport=self.port + 1 + index,
                         dport=self.port)

    def _segments(self, index: int, data: bytes) -> list[bytes]:
        return [self._frame(index, data[at : at + 1448]) for at in range(0, len(data), 1448)]


class NcclWire:
    """The network of one communicator. mirrored: (port, "in" | "out"), None: all ports, both ways.

    sockets: data sockets of a connection over TCP, None: over RoCE.
    """

    def __init__(
        self, job: Job, mirrored: Sequence[tuple[Port, str]] | None = None, sockets: int | None = None
    ) -> None:
        self.job = job
        self.sockets = sockets
        self._writers: dict[tuple[int, int, int], TcpWriter] = {}
        self.mirrored = None if mirrored is None else set(mirrored)
        self.frames: list[Frame] = []
        self._now = 1_700_000_000_000_000_000
        self.communicator = Communicator(job)

    def perform(self, call: Call) -> Work:
        """Put a collective on the wire."""
        return self.put(Work(self.job, call))

    def put(self, work: Work) -> Work:
        """Put what is made already on the wire, such as a part of a group call."""
        clock = float(self._now)
        start = clock
        elapsed = 0.0
        for event in self.communicator.events(work):
            ends = (event.lane.sender, event.lane.receiver)
            source, target = ends if event.kind == DATA else ends[::-1]
            link = (self.job.ports[source], "in"), (self.job.ports[target], "out")
            shown = self.mirrored is None or any(end in self.mirrored for end in link)
            for frame in self._made(work, event):
                elapsed += len(frame) / LINE_RATE
                if shown:
                    self.frames.append(Frame(int(start) + int(elapsed), bytes(frame), link))
        self._now = int(start) + int(elapsed) + 1000
        return work

    def _made(self, work: Work, event: Event) -> Sequence[bytes]:
        if self.sockets is None:
            return self.communicator.made(work, event, True)
        lane = event.lane
        if event.connection is None or event.kind != DATA:
            return ()
        key = lane.channel, lane.sender, lane.receiver
        frames = self._open(key) if key not in self._writers else []
        step = event.base + event.index * work.layout.steps
        return [*frames, *self._writers[key].write(work.payload(lane, lane.pieces[event.index], step).tobytes())]

    def listener(self, channel: int, sender: int, receiver: int) -> tuple[str, int]:
        """Where a connection over TCP was accepted; port 1 if it was never made."""
        writer = self._writers.get((channel, sender, receiver))
        return training_address(self.job.ports[receiver], self.job.ipv6), 1 if writer is None else writer.port

    def _open(self, key: tuple[int, int, int]) -> list[bytes]:
        """A connection; one of a channel is made before it is needed, after those of the channels before."""
        frames = []
        for channel in range(key[0] + 1):
            each = channel, key[1], key[2]
            if each not in self._writers:
                source, target = (training_address(self.job.ports[rank], self.job.ipv6) for rank in key[1:])
                port = 20_000 + 80 * len(self._writers)
                self._writers[each] = TcpWriter(self.job.release, self.sockets or 0, (source, target), port)
                frames += self._writers[each].open()
        return frames

    def block(self, frames: Sequence[Frame]) -> Block:
        return pack([frame.data for frame in frames], [frame.ts for frame in frames])


class NcclJob(SyntheticJob):
    """See `SyntheticJob`. Keywords of `lab.nccl_wire_job.Job` go to `nccl`."""

    def __init__(
        self, world: int = 2, *, nccl: dict[str, Any] | None = None,
        mirrored: Sequence[tuple[Port, str]] | None = None, told: dict[str, str] | None = None,
        sockets: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.nccl = Job(world, **(nccl or {}))
        self._told = told or {}
        self._values = np.random.default_rng(options.get("seed", 0) + 77)
        super().__init__(world, **options)
        self.wire = NcclWire(self.nccl, mirrored, sockets)  # type: ignore[assignment]

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
                "networks": sorted(log.networks) if self.wire.sockets is None else ["Socket"],  # type: ignore[attr-defined]
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
            values = self.sums(sum(self.sizes[i] for i in bucket), number in lost)
            at = 0
            for index in bucket:
                self.reduced[index] = values[at : at + self.sizes[index]].tobytes()
                at += self.sizes[index]
            tags.append(self.tag - 1)
        return tags


def trained(steps: int, **options: Any) -> NcclJob:
    """A job that attached before its first step and took some usual ones."""
    job = NcclJob(**options)
    job.attach()
    for _ in range(steps):
        job.usual_step()
    return job
