"""The collectives of one communicator, one after another, from the messages of its connections.

Several readings of the next messages are possible more often than not. They are held against what else is known: the
protocol that each message was announced for, the numbers of all packets captured, and time (a rank begins a collective
when it has received all of the one before). Of those that pass, the one that explains most is taken, if no other
explains as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowcheck.inspect.gloo import hashes
from flowcheck.inspect.nccl_line import Fit, Line, Whole
from mirror.memory import address_of
from mirror.streams import runs
from reconstruct.nccl.blueprint import Blueprint, Blueprints, Part
from reconstruct.nccl.group import Edge, NcclGroup
from reconstruct.nccl.guess import Guess, Seen, guess
from reconstruct.nccl.payload import decode, flag, inner, read_flag
from reconstruct.nccl.schedule import ALLGATHER, ALLREDUCE, BROADCAST, SIMPLE, SLICE_STEPS, TREE, base_step, wire_bytes
from reconstruct.nccl.split import Collective

_SMALL = 65536
"""Bytes up to which a size near that of a bucket says nothing: a job has many small things."""
_CLOSE = 8
"""Bytes of an LL line: what is that close to the largest size that fits is told as that size."""
__all__ = ["Found", "Reading", "Sizes", "read"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known of all-reduces beforehand. itemsize: bytes -> bytes of an element, or None; buckets: the sizes of
    the job's, bytes."""

    itemsize: Callable[[int], int | None] = lambda size: None
    buckets: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Found:
    """One collective. size: bytes of the tensor, at most (what its last line or group holds more cannot be told); None
    if what was seen does not tell it."""

    kind: int
    algorithm: int
    protocol: int | None
    """None: a small message over TCP may be of several."""
    size: int | None
    root: int
    final: dict[Edge, list[list[Any]]]


@dataclass(slots=True)
class Reading:
    """What was read; left: RDMA messages that nothing explains, and why."""

    collectives: list[Found] = field(default_factory=list)
    left: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    guess: Guess
    blueprint: Blueprint
    size: int
    certain: bool
    """Whether that is the size: named by the job, or told but for what LL's last line may hide."""
    fits: dict[Edge, Fit]

    @property
    def whole(self) -> bool:
        """Whether it was over before the capture was. Of a connection whose end is not known another one on its channel
        shows it."""
        shown = {edge.channel for edge, fit in self.fits.items() if fit.whole and fit.seen}
        return all(fit.whole or (fit.cut and edge.channel in shown) for edge, fit in self.fits.items())

    @property
    def doubtful(self) -> bool:
        """Whether it may be of another protocol than the guess says."""
        return any(fit.doubtful for fit in self.fits.values())

    @property
    def name(self) -> tuple[int, int, int, int]:
        """What makes two readings different; a size that a last line leaves open does not."""
        return self.guess.kind, self.guess.algorithm, self.guess.root, self.blueprint.call.protocol

    @property
    def explained(self) -> tuple[int, int]:
        """(connections, messages) that were seen of it."""
        return sum(fit.seen > 0 for fit in self.fits.values()), sum(fit.seen for fit in self.fits.values())

    def advance(self, line: Line) -> tuple[int, int]:
        """(messages, steps) by which it moves a connection on."""
        part = self.blueprint.part(line.edge)
        if part is None:
            return 0, 0
        step = line.step or 0
        return part.messages, int(base_step(part.row, step)) - step + self.blueprint.steps(part)

    def timely(self, lines: Sequence[Line]) -> bool:
        """Whether no rank sends something of the next collective before it has received all of this one."""
        arrived: dict[int, int] = {}
        for line in lines:
            rank = line.edge.receiver
            arrived[rank] = max(arrived.get(rank, 0), self.fits[line.edge].arrived)
        return all(
            self.fits[line.edge].later < 0 or self.fits[line.edge].later >= arrived.get(line.edge.sender, 0)
            for line in lines
        )


class Contradiction(Exception):
    """A flag is not that of its message: the reading is wrong, or the data are."""


def read(group: NcclGroup, lines: Sequence[Line], sizes: Sizes, most: int | None = None) -> Reading:
    """Read collectives, at most `most`, until no message is left or none can be told."""
    reading = Reading()
    blueprints = Blueprints(group)
    while any(line.left for line in lines) and (most is None or len(reading.collectives) < most):
        choices, reading.reason = _next(blueprints, group, lines, sizes)
        if not choices:
            gaps = [line.gap() for line in lines if line.doubt]
            if gaps:
                reading.reason = f"{gaps[0]}, and nothing proves what they were: from there on nothing is claimed"
            break
        try:
            only = len(choices) == 1 and (len(group.protocols) == 1 or not choices[0].doubtful)
            reading.collectives.append(_take(choices[0], blueprints, lines, only))
        except Contradiction as error:
            reading.reason = str(error)
            break
    reading.left = sum(line.left for line in lines)
    return reading


def _next(blueprints: Blueprints, group: NcclGroup, lines: Sequence[Line],
          sizes: Sizes) -> tuple[list[_Candidate], str]:
    """The reading of the next messages, or why there is none; several that differ in nothing but their protocol."""
    # Without times nothing but its messages tells that a connection carried no more of a collective, and the capture's
    # end may hide some.
    timed = all(line.timed for line in lines)
    seen = [Seen(line.edge, line.ahead(), line.open or not timed) for line in lines]
    everyone = {line.edge.receiver for line in lines} == set(range(group.world_size))
    found = []
    for one in guess(blueprints.comm, group, seen):
        if any(one.used.values()) and not (one.kind == BROADCAST and one.root < 0 and everyone):
            candidate = _candidate(blueprints, one, lines, sizes)
            if candidate is not None:
                found.append(candidate)
    if not found:
        return [], "their lengths are those of no collective: another release, or the capture ends in one"
    found = [one for one in found if one.timely(lines)]
    if not found:
        return [], "their lengths allow several collectives, none of which goes with their times"
    most = max(one.explained for one in found)
    best = [one for one in found if one.explained == most]
    if len({one.name for one in best}) > 1:
        known = [one for one in best if one.guess.kind == ALLREDUCE and one.size in sizes.buckets]
        best = known or (best if _alike(best, lines) else [])
    blind = not timed or any(line.doubt for line in lines)
    choices = {(*one.name, one.size if blind else 0): one for one in reversed(best)}
    if not choices or (len(choices) > 1 and (blind or not _alike(best, lines))):
        return [], "their lengths allow several collectives: give --job FILE"
    if not all(one.whole for one in choices.values()):
        return [], "the capture ends in a collective"
    if not all(_certain(one, blueprints, group, lines, sizes) for one in choices.values()):
        return [], "their lengths may be those of broadcasts or of an all-reduce"
    return list(choices.values()), ""


def _alike(choices: Sequence[_Candidate], lines: Sequence[Line]) -> bool:
    """Whether what follows is the same behind all of them: they differ in their protocol alone."""
    return len({(*one.name[:3], *(one.advance(line) for line in lines)) for one in choices}) == 1


def _candidate(blueprints: Blueprints, one: Guess, lines: Sequence[Line], sizes: Sizes) -> _Candidate | None:
    """A guess with the plan of its collective, if everything that was captured agrees with it."""
    wanted = sizes.itemsize(one.bytes) if one.kind == ALLREDUCE else None
    close = one.bytes - one.least < _CLOSE
    choices = [(one.bytes, one.itemsize, close)]
    if wanted is not None and one.bytes // wanted * wanted >= one.least:
        choices.insert(0, (one.bytes // wanted * wanted, wanted, close))
    if one.kind == ALLREDUCE:
        known = [size for size in sizes.buckets if one.least <= size <= one.bytes]
        if len(known) == 1 and (known[0] > _SMALL or close):
            choices.insert(0, (known[0], sizes.itemsize(known[0]) or 1, True))
    for size, itemsize, certain in choices:
        blueprint = blueprints.get(
            Collective(one.kind, one.algorithm, one.protocol, size // itemsize, itemsize), one.root
        )
        fits: dict[Edge, Fit] = {}
        told = False
        for line in lines if blueprint is not None else ():
            assert blueprint is not None
            part = blueprint.part(line.edge)
            fit = line.fit(part, one.protocol)
            if fit is None or (part.messages if part is not None else 0) != one.used.get(line.edge, 0):
                break
            fits[line.edge] = fit
            told = told or line.announced(fit)
        if blueprint is not None and len(fits) == len(lines) and told:
            return _Candidate(one, blueprint, blueprint.size, certain, fits)
    return None


def _one_place(one: _Candidate, blueprints: Blueprints, lines: Sequence[Line]) -> bool:
    """Whether all sizes that the guess allows put the messages seen at the same places."""
    call = replace(one.blueprint.call, count=max(1, -(-one.guess.least // one.blueprint.call.itemsize)))
    least = blueprints.get(call, one.guess.root)
    for line in lines:
        part = one.blueprint.part(line.edge)
        other = None if least is None else least.part(line.edge)
        if part is None:
            continue
        if other is None or other.messages != part.messages:
            return False
        full = (part.places[:, 5] > 0) & (other.places[:, 5] > 0)
        if (part.places[:, 4] != other.places[:, 4])[full].any():
            return False
    return True


def _certain(one: _Candidate, blueprints: Blueprints, group: NcclGroup, lines: Sequence[Line], sizes: Sizes) -> bool:
    """Whether a collective can be nothing else: what looks like a broadcast no tree's sums on their way up, and nothing
    the beginning of a collective whose end was not captured."""
    if one.guess.kind == BROADCAST and one.guess.root > 0 and TREE not in group.algorithms:
        return False
    copy = one.guess.kind != ALLREDUCE
    if copy and any(fit.cut for fit in one.fits.values()):
        return False  # what is not known of that connection may be the rest of an all-reduce
    ends = any(one.fits[line.edge].later < 0 for line in lines if one.fits[line.edge].seen)
    # Channels of an all-reduce begin together: one of which nothing was seen is idle.
    more = copy or not all(line.timed for line in lines)
    seen = [Seen(line.edge, line.ahead(), line.open or more or one.fits[line.edge].seen > 0) for line in lines]
    for other in guess(blueprints.comm, group, seen):
        if other.kind != ALLREDUCE or other.protocol != one.guess.protocol:
            continue
        longer = _candidate(blueprints, other, lines, sizes) if other.used else None
        if copy and (ends or not other.used):
            return False
        if longer is not None and not longer.whole and longer.explained >= one.explained:
            return False
    return True


def _take(one: _Candidate, blueprints: Blueprints, lines: Sequence[Line], only: bool) -> Found:
    """Decode a collective's final values, as far as all sizes that it can have agree on them, and go behind it.
    only: whether it can be of no other protocol."""
    protocol = one.guess.protocol
    told = one.size if one.certain and only else None
    limit = one.size
    if told is None:
        blocks = blueprints.comm.ranks if one.guess.kind == ALLGATHER else 1
        limit = one.guess.least if blocks == 1 and _one_place(one, blueprints, lines) else 0
    result = Found(one.guess.kind, one.guess.algorithm, protocol if only else None, told, one.guess.root, {})
    for line in lines:
        part = one.blueprint.part(line.edge)
        if part is None:
            continue
        pieces = line.take(part, one.fits[line.edge])
        base = _base(line, part, protocol, pieces)
        result.final[line.edge] = _final(part, protocol, base, pieces, limit) if only else []
        line.step = None if base is None else base + one.blueprint.steps(part)
    return result


def _base(line: Line, part: Part, protocol: int, pieces: Sequence[Whole | None]) -> int | None:
    """Step of the collective's first message; None if nothing tells it."""
    if line.step is not None:
        return int(base_step(part.row, line.step))
    for index, piece in enumerate(pieces):
        if protocol != SIMPLE and piece is not None and piece.data.size:
            unit = inner(protocol, 0, piece.data.size)[1]
            if unit and piece.known[:1024].all():
                told = read_flag(protocol, address_of(piece.data))
                return int(told) - 1 - index * int(part.row[SLICE_STEPS])
    return None


def _final(part: Part, protocol: int, base: int | None, pieces: Sequence[Whole | None],
           limit: int) -> list[list[Any]]:
    """[first byte, last exclusive, sha256] of the final values that the messages show, up to byte `limit`."""
    result: list[tuple[int, np.ndarray]] = []
    for index, piece in enumerate(pieces):
        offset, length, final = (int(part.places[index, column]) for column in (4, 5, 6))
        if not final or not length or piece is None:
            continue
        if base is None and protocol != SIMPLE:
            continue
        step = (base or 0) + index * int(part.row[SLICE_STEPS])
        if piece.data.size != wire_bytes(protocol, length, step):
            raise Contradiction("a message is not as long as its place in the collective says")
        out = np.zeros(length, np.uint8)
        for start, count in runs(piece.known):
            begin, end = inner(protocol, start, start + count)
            if end == begin:
                continue
            taken = decode(protocol, address_of(piece.data) + begin, begin, end, address_of(out), length,
                           flag(protocol, step))
            if taken != end - begin:
                raise Contradiction(f"a flag is not that of step {step}")
            first, last = (int(at) for at in _data(protocol, begin, end, length))
            last = min(last, limit - offset)
            if last > first:
                result.append((offset + first, out[first:last]))
    return hashes(result)


def _data(protocol: int, begin: int, end: int, length: int) -> tuple[int, int]:
    """Data bytes in wire bytes begin..end, which are unit borders."""
    wire, data = ((16, 8), (1024, 960), (1, 1))[protocol]
    return min(begin // wire * data, length), min(end // wire * data, length)
