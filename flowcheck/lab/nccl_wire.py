"""The packets that NCCL would put on the wire for a job's collectives, with the values that it would reduce.

`frames_of(Job(ranks=4), [Call("allreduce", inputs)])` gives all frames of a cluster, without a network;
`Communicator.events` gives the same in steps that processes of a real job go through together. Made from NCCL's source
alone, sharing nothing with the decoder, so that one mistake cannot hide in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from flowcheck.errors import UsageError
from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire_frames import Frame
from flowcheck.lab.nccl_wire_job import LL, LL128, NVLSTREE, RING, SIMPLE, TREE, Job
from flowcheck.lab.nccl_wire_lanes import Lane, Layout, Piece, connections, layout
from flowcheck.lab.nccl_wire_link import P2P, P2P_BYTES, Connection, QueuePairs, wire_bytes
from flowcheck.lab.nccl_wire_payload import Sums, encode, finished, prepared, storage
from flowcheck.lab.nccl_wire_split import (
    ALLREDUCE,
    BROADCAST,
    REDUCESCATTER,
    Cut,
    Share,
    channels_used,
    group_shares,
    traffic_class,
    traffic_weight,
)

SENDRECV = "sendrecv"
_LINE_RATE = 12.5
"""Bytes per ns of the made-up clock: 100 Gbit/s, all ports together."""
_NVLS_TYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: `inputs` by rank, flat arrays of one length (of `storage(dtype)`; a broadcast reads the root's).

    allreduce, broadcast (from `root`), allgather, reducescatter (inputs hold a block per rank), sendrecv (from `root`
    to `target`). op: sum, avg, product, min, max.
    """

    kind: str
    inputs: Sequence[np.ndarray]
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    target: int = 0


def chosen(job: Job, call: Call, size: int) -> tuple[str, str]:
    """(algorithm, protocol) of a collective, as the job pins them or NCCL would choose for `size` bytes."""
    if call.kind != ALLREDUCE:
        return RING, job.protocol or LL
    algorithm, protocol = job.algorithm, job.protocol
    if algorithm == NVLSTREE and (call.op != "sum" or call.dtype not in _NVLS_TYPES):
        algorithm = TREE
    several = job.ranks > job.nodes
    if algorithm is None:
        most = 16 << 20 if several else 32 << 10
        algorithm = TREE if size < most and (several or job.nodes > 2) else RING
    if algorithm == NVLSTREE:
        return algorithm, SIMPLE
    if protocol is None:
        small, large = (200_000, LL128) if several else (512 << 10, SIMPLE)
        protocol = LL if size < small else large
    return algorithm, protocol


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a collective on one lane. GRANT: the receiver announces a slot; DATA: the sender fills it; TAKEN: the
    receiver has it. `connection` is None inside a node: nothing goes on the wire, but the others wait for it."""

    kind: str
    lane: Lane
    index: int
    connection: Connection | None
    base: int


GRANT, DATA, TAKEN = "grant", "data", "taken"
Placed = tuple[str, str, Sequence[Share]]


class Work:
    """One collective on its way: who sends what, and the values. `rank`: only the lanes that end there.

    placed: (algorithm, protocol, what every channel carries), where a group decides about them.
    """

    def __init__(self, job: Job, call: Call, rank: int | None = None, placed: Placed | None = None) -> None:
        self.call = call
        choice = chosen(job, call, call.inputs[0].nbytes)
        self.algorithm, self.protocol, parts = (*choice, None) if placed is None else placed
        self._job = job
        self._arrays = [np.ascontiguousarray(values) for values in call.inputs]
        reducing = call.kind in (ALLREDUCE, REDUCESCATTER)
        if reducing and any(a.dtype != storage(call.dtype) or a.ndim != 1 for a in self._arrays):
            raise UsageError(f"inputs of {call.dtype} must be flat arrays of {storage(call.dtype)}")
        self._sums: Sums | None = None
        self.itemsize = 1
        if call.kind == SENDRECV:
            self.protocol = P2P
            self._flat = self._arrays[call.root].view(np.uint8).reshape(-1)
            self.layout = _transfer(call, self._flat.size)
            return
        count = self._arrays[call.root if call.kind == BROADCAST else 0].size
        if reducing:
            self.itemsize = storage(call.dtype).itemsize
            scaled = [prepared(a, call.dtype, call.op, job.ranks) for a in self._arrays]
            self._sums = Sums(job, self.algorithm, scaled, call.dtype, call.op)
            count = count // job.ranks if call.kind == REDUCESCATTER else count
        else:
            kind = self._arrays[0].dtype.itemsize
            count *= kind
            pieces = [self._arrays[call.root]] if call.kind == BROADCAST else self._arrays
            self._flat = np.concatenate([a.view(np.uint8).reshape(-1) for a in pieces])
        self.result: np.ndarray | None = None
        cut = Cut(call.kind, self.algorithm, self.protocol, count, self.itemsize)
        self.layout = layout(job, cut, call.root, rank, parts)
        if call.kind == ALLREDUCE:
            self.result = np.empty(count, storage(call.dtype))
            for channel, index, (first, length) in self.layout.results:
                if length:
                    self.result[first : first + length] = self._reduced(channel, index, first, length)

    def _reduced(self, channel: int, index: int, first: int, length: int) -> np.ndarray:
        assert self._sums is not None
        return self._sums.whole(channel, index, first, length)

    def block(self, rank: int) -> np.ndarray:
        """Reduce-scatter: what `rank` ends with; summed as on channel 0's ring."""
        assert self._sums is not None
        ring = self._job.ring(0)
        count = self._arrays[0].size // self._job.ranks
        after = ring.index(rank) + 1
        order = [ring[(after + k) % self._job.ranks] for k in range(self._job.ranks)]
        total = self._sums.along(order, rank * count, count)
        return finished(total, self.call.dtype, self.call.op, self._job.ranks)

    def data(self, lane: Lane, piece: Piece) -> np.ndarray:
        """uint8: what the message carries, before it is written into its slot."""
        first, length = piece.first, piece.length
        if self._sums is None or length == 0:
            return self._flat[first : first + length] if self._sums is None else np.empty(0, np.uint8)
        if piece.final:
            assert self.result is not None
            values = self.result[first : first + length]
        elif piece.terms is not None:
            values = self._sums.along(piece.terms, first, length)
        else:
            values = self._sums.below(lane.channel, lane.sender, lane.head, first, length)
        return np.ascontiguousarray(values).view(np.uint8)

    def size(self, piece: Piece, step: int) -> int:
        return wire_bytes(self.protocol, piece.length * self.itemsize, step)

    def payload(self, lane: Lane, piece: Piece, step: int) -> np.ndarray:
        return encode(self.protocol, self.data(lane, piece), step)


def _transfer(call: Call, size: int) -> Layout:
    firsts = range(0, max(size, 1), P2P_BYTES)
    pieces = [Piece(k, first, min(P2P_BYTES, size - first), True) for k, first in enumerate(firsts)]
    return Layout([Lane(0, call.root, call.target, pieces=pieces)], [], 1, 1, P2P_BYTES)


def grouped(job: Job, calls: Sequence[Call], rank: int | None = None) -> list[tuple[int, Work]]:
    """The all-reduces of one group call as NCCL does them, from 2.22 on: (which call, its work), one after another.

    All have one type and operation, and elements. Those within a factor of four of the smallest are tuned as one.
    """
    if len(calls) < 2:
        return [(index, Work(job, call, rank)) for index, call in enumerate(calls)]
    sizes = [call.inputs[0].nbytes for call in calls]
    weight = traffic_weight(job, ALLREDUCE)
    order = sorted(range(len(calls)), key=lambda index: traffic_class(weight * sizes[index]))
    choices: list[tuple[str, str]] = []
    cuts: list[Cut] = []
    used: list[int] = []
    for batch in _batches(order, sizes):
        total = sum(sizes[index] for index in batch)
        choice = chosen(job, calls[batch[0]], total)
        itemsize = calls[batch[0]].inputs[0].itemsize
        choices += [choice] * len(batch)
        cuts += [Cut(ALLREDUCE, *choice, sizes[index] // itemsize, itemsize) for index in batch]
        used += [channels_used(job, Cut(ALLREDUCE, *choice, total // itemsize, itemsize))] * len(batch)
    parts = group_shares(job, cuts, used)
    return [
        (index, Work(job, calls[index], rank, (*choice, part)))
        for index, choice, part in zip(order, choices, parts, strict=True)
    ]


def _batches(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Neighbours in the order whose sizes stay below four times that of the first of them."""
    found: list[list[int]] = []
    for index in order:
        if found and sizes[index] < 4 * sizes[found[-1][0]]:
            found[-1].append(index)
        else:
            found.append([index])
    return found


class Communicator:
    """The connections of one job and how far they are."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._pairs = QueuePairs(job)
        self._connections = {key: self._pairs.connect(*key) for key in connections(job)}
        self._transfers: dict[tuple[int, int], Connection] = {}

    def of_rank(self, rank: int) -> list[Connection]:
        """The connections of rings and trees that end at `rank`, in the order in which they were made."""
        return [c for (_, sender, receiver), c in self._connections.items() if rank in (sender, receiver)]

    def _connection(self, work: Work, lane: Lane) -> Connection | None:
        if self.job.hosts[lane.sender] == self.job.hosts[lane.receiver]:
            return None
        if work.call.kind != SENDRECV:
            return self._connections[lane.channel, lane.sender, lane.receiver]
        ends = (lane.sender, lane.receiver)
        if ends not in self._transfers:
            self._transfers[ends] = self._pairs.connect(0, *ends)
        return self._transfers[ends]

    def events(self, work: Work) -> Iterator[Event]:
        """Everything that happens on the work's lanes, each after what it waits for. Take each to its frames with
        `made` before the next."""
        plan = work.layout
        window = 8 // plan.steps
        lanes = plan.lanes
        bases: dict[int, tuple[Connection | None, int]] = {}
        order = []
        for number, lane in enumerate(lanes):
            connection = self._connection(work, lane)
            base = connection.begin(plan.align, len(lane.pieces) * plan.steps) if connection is not None else 0
            bases[number] = connection, base
            order += [(piece.stage, number, index) for index, piece in enumerate(lane.pieces)]
            for index in range(min(window, len(lane.pieces))):
                yield Event(GRANT, lane, index, connection, base)
        order.sort()
        for _, stage in groupby(order, key=lambda item: item[0]):
            steps = list(stage)
            for _, number, index in steps:
                yield Event(DATA, lanes[number], index, *bases[number])
            for _, number, index in steps:
                yield Event(TAKEN, lanes[number], index, *bases[number])
                if index + window < len(lanes[number].pieces):
                    yield Event(GRANT, lanes[number], index + window, *bases[number])

    def made(self, work: Work, event: Event, make: bool) -> list[Frame]:
        """The frames of an event, none unless `make`; it has happened then."""
        connection = event.connection
        if connection is None:
            return []
        piece = event.lane.pieces[event.index]
        step = event.base + event.index * work.layout.steps
        if event.kind == GRANT:
            return connection.grant(work.protocol, step, work.layout.room, make)
        if event.kind == DATA:
            size = work.size(piece, step)
            if not make:
                return connection.send(work.protocol, step, size, None)
            head = connection.acknowledge_grant()
            return [head, *connection.send(work.protocol, step, size, work.payload(event.lane, piece, step))]
        return connection.acknowledge_send() if make else []


Link = tuple[Port, Port]
"""(port that the frame comes from, port that it goes to): mirrored as "in" of the first, "out" of the second."""


def frames_of(
    job: Job,
    calls: Iterable[Call | Sequence[Call]],
    *,
    start: int = 1_700_000_000_000_000_000,
    communicator: Communicator | None = None,
) -> list[tuple[int, Link, bytes]]:
    """(time in ns, link, frame) of everything a cluster sends for these collectives, in the order of sending.

    Several in one place are a group call. Pass the same `communicator` again to go on where an earlier call ended.
    """
    comm = Communicator(job) if communicator is None else communicator
    made: list[tuple[int, Link, bytes]] = []
    elapsed = 0.0  # apart from `start`: a float of today's nanoseconds has steps of 256
    groups = (grouped(job, [call] if isinstance(call, Call) else call) for call in calls)
    for work in (work for group in groups for _, work in group):
        for event in comm.events(work):
            for frame in comm.made(work, event, True):
                elapsed += len(frame) / _LINE_RATE
                ends = (event.lane.sender, event.lane.receiver)
                source, target = ends if event.kind == DATA else ends[::-1]
                made.append((start + int(elapsed), (job.ports[source], job.ports[target]), bytes(frame)))
    return made


def mirrored(
    made: Iterable[tuple[int, Link, bytes]], ports: Iterable[tuple[Port, str]]
) -> list[tuple[int, Link, bytes]]:
    """What a mirror of these (port, "in" | "out") shows: in is what the port's node sends, out what it gets."""
    wanted = set(ports)
    return [item for item in made if (item[1][0], "in") in wanted or (item[1][1], "out") in wanted]
