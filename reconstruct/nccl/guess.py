"""Which collectives explain the messages that follow a boundary, from their lengths on the wire alone.

For collectives of which nobody has named the size (a user's own all-reduce, a barrier, broadcasts, all-gathers): for
every kind, algorithm and protocol that the communicator may use, the sizes whose plan gives the lengths seen on every
connection. It inverts the plan and does not repeat it: the loops seen bound the channel's share, the share bounds the
tensor, and what is left is planned and compared.

Lengths often allow several readings. All are returned; to claim one of several is for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reconstruct.nccl.group import NOWHERE, Edge, NcclGroup, row_position
from reconstruct.nccl.schedule import ALLGATHER, ALLREDUCE, BROADCAST, LL, LL128, NVLSTREE, RING, SIMPLE, messages
from reconstruct.nccl.sizes import Line, Search
from reconstruct.nccl.split import Collective, Communicator

__all__ = ["Guess", "Seen", "guess"]

_MOST_PLANS = 20_000  # plans that one call may make: a few milliseconds per hundred
_MOST_OF_ONE = 2500   # the same for one kind, algorithm, protocol, root and element size


@dataclass(frozen=True, slots=True)
class Seen:
    """The messages of one connection since the boundary, in order."""

    edge: Edge
    lengths: tuple[int, ...]
    """Whole lengths on the wire; -1: not captured, and length not known."""
    open_: bool
    """Whether more messages may come."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One reading of the messages after a boundary."""

    kind: int
    algorithm: int
    protocol: int
    bytes: int
    """Most bytes that the tensor can have (an all-gather: what each rank gives)."""
    least: int
    """Fewest bytes that it can have."""
    itemsize: int
    """An element size with which `bytes` bytes give these messages: not necessarily the tensor's."""
    whole: bool
    """Whether all its messages are among those seen."""
    used: dict[Edge, int]
    """Messages that it takes in all, by connection; {}: its end has not been seen, or was one of too many."""
    root: int = -1
    """Broadcast: the rank that sends; -1: not told by these connections (the one into the root carries nothing)."""

    @property
    def exact(self) -> bool:
        """Whether `bytes` is the tensor's size to the byte."""
        return self.least == self.bytes


def guess(
    comm: Communicator, group: NcclGroup, seen: Sequence[Seen], *, most: int = _MOST_PLANS,
    made: Callable[[int], None] = lambda count: None,
) -> list[Guess]:
    """Every collective of unknown size that the communicator's next messages can be; [] if nothing explains them.

    seen: connections of the group from `group.edges`, all at the same boundary, each with all messages since.
    Collectives issued alone, one at a time, are looked for; a group of several is not. A guess whose `used` is {} says
    that the messages can be the beginning of more than was seen, or of too many things to try.
    most: plans that may be made; made: told how many were.
    """
    left = most
    result: dict[tuple[object, ...], Guess] = {}
    for protocol in group.protocols:
        for kind, algorithm in [*((ALLREDUCE, a) for a in group.algorithms), (BROADCAST, RING), (ALLGATHER, RING)]:
            if algorithm == NVLSTREE and (protocol != SIMPLE or not comm.heads):
                continue
            for root, lines, silent in _roles(kind, algorithm, seen):
                for itemsize in _itemsizes(kind, algorithm, protocol):
                    call = Collective(kind, algorithm, protocol, 1, itemsize)
                    search = Search(comm, call, lines(), min(left, _MOST_OF_ONE))
                    if search.possible():
                        left += search.solve()
                        _report(search, silent, root, result)
    made(most - left)
    return list(result.values())


def _itemsizes(kind: int, algorithm: int, protocol: int) -> tuple[int, ...]:
    """Element sizes that differ in their messages: copies are cut by bytes, most all-reduces by units of bytes."""
    if kind != ALLREDUCE or protocol == LL or algorithm == NVLSTREE:
        return (1,)
    if protocol == LL128:
        return (1, 8)
    return (4, 2, 8, 1) if algorithm == RING else (1,)


def _roles(
    kind: int, algorithm: int, seen: Sequence[Seen]
) -> Iterator[tuple[int, Callable[[], list[Line]], list[Edge]]]:
    """(root, lines, connections that carry nothing), for every root that makes a difference."""
    active = [s for s in seen if row_position(s.edge, algorithm, kind) != NOWHERE]
    if not active or not any(s.lengths for s in active):
        return
    others = [s.edge for s in seen if s not in active]
    roots = [-1]
    if kind == BROADCAST:
        roots += sorted({s.edge.receiver for s in active})
    for root in roots:
        into = [s for s in active if kind == BROADCAST and s.edge.receiver == root]
        carry = [s for s in active if s not in into]
        if not any(s.lengths for s in carry):
            continue

        def lines(carry: list[Seen] = carry) -> list[Line]:
            return [
                # In a broadcast all senders but the last send the same: one position stands for all.
                Line(s.edge, 0 if kind == BROADCAST else row_position(s.edge, algorithm, kind),
                      np.array(s.lengths, np.int64), s.open_)
                for s in carry
            ]

        yield root, lines, others + [s.edge for s in into]


def _report(search: Search, silent: list[Edge], root: int, result: dict[tuple[object, ...], Guess]) -> None:
    call = search.call
    name = (call.kind, call.algorithm, call.protocol, root)

    def add(low: int, high: int, whole: bool, used: dict[Edge, int]) -> None:
        key = (*name, whole, tuple(sorted((edge.channel, edge.sender, edge.receiver, n) for edge, n in used.items())))
        old = result.get(key)
        itemsize = call.itemsize
        if old is not None:
            itemsize = itemsize if high > old.bytes else old.itemsize
            low, high = min(low, old.least), max(high, old.bytes)
        result[key] = Guess(call.kind, call.algorithm, call.protocol, high, low, itemsize, whole, used, root)

    for first, last in search.found:
        used = dict.fromkeys(silent, 0)
        whole, over = True, False
        for line in search.lines:
            row = search.rows_of(first)[line.share]
            taken = 0 if row is None else int(messages(row, line.position))
            used[line.edge] = taken
            whole = whole and line.lengths.size >= taken
            over = over or 0 < taken <= line.lengths.size
        if over:  # else it is one of all that the messages can be the beginning of
            add(first * call.itemsize, last * call.itemsize, whole, used)
    going = [line for line in search.carriers if line.goes_on]
    if search.cut or any(line.lengths.size for line in going):
        shown = max((most for line in search.carriers for _, most in line.ends.values()), default=0)
        add(0, shown, False, {})
