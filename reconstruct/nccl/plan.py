"""From a call to the rows of its channels: the ring's rows, and the one entry for every algorithm.

`plan` takes the collectives of one group (a call issued alone is a group of one) and gives, in the order in which
every connection carries them, a row for each channel that takes part (reconstruct.nccl.schedule says what rows do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reconstruct.nccl.schedule import (
    ALLGATHER,
    ALLREDUCE,
    BASE,
    BLOCK,
    BROADCAST,
    CHUNK,
    END,
    GRAIN,
    LAST,
    LL,
    LOOP,
    LOOPS,
    RING,
    SIMPLE,
    SLOT_BYTES,
    SLOT_DATA,
    START,
    STRIDE,
    begin_row,
)
from reconstruct.nccl.split import Collective, Communicator, Share, alignment, round_up, shares
from reconstruct.nccl.tree import tree_rows

__all__ = ["Planned", "plan"]


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """One collective of a group, planned."""

    call: int
    """Which call of the group it is."""
    channels: tuple[int, ...]
    """The channels that take part, rising. The others carry nothing of it."""
    rows: np.ndarray
    """int64[len(channels), FIELDS]"""


def plan(comm: Communicator, calls: Sequence[Collective], head: int = 0) -> list[Planned]:
    """Rows of every collective of a group, in the order in which connections carry them; empty calls are left out.

    head: NVLSTree only, which head of its node the connection belongs to (each head has rows of its own).
    Raises Unsupported for what is not known, ValueError for what cannot be.
    """
    result = []
    for index, parts in shares(comm, calls):
        call = calls[index]
        if call.algorithm == RING:
            rows = [_ring_row(comm, call, part) for part in parts]
        else:
            rows = tree_rows(comm, call, parts, head)
        result.append(Planned(index, tuple(part.channel for part in parts), np.array(rows)))
    return result


def _ring_row(comm: Communicator, call: Collective, part: Share) -> np.ndarray:
    count, itemsize = call.unit()
    row = begin_row(call.kind, RING, call.protocol, itemsize, comm.ranks)
    chunks = comm.ranks if call.kind == ALLREDUCE else 1
    size = SLOT_DATA[call.protocol]
    if call.protocol == SIMPLE and call.kind != BROADCAST:
        size = 4 * SLOT_BYTES[SIMPLE]
    scheme = comm.traits.scheme
    if scheme == "C":
        size = size // GRAIN[call.protocol] * GRAIN[call.protocol]
    full = size // itemsize
    if call.kind == ALLGATHER:
        row[BLOCK] = count
    if scheme == "A":
        loop = part.shares * chunks * full
        loops = -(-count // loop)
        apart = call.protocol == SIMPLE  # Simple keeps a channel's chunks of a loop together
        row[[START, END, LOOPS, LOOP]] = 0, count, loops, loop
        row[CHUNK] = full
        row[LAST] = _last_of_loop(call, itemsize, part, full, count - (loops - 1) * loop, chunks)
        row[BASE] = part.number * chunks if apart else part.number
        row[STRIDE] = 1 if apart else part.shares
        return row
    loop = chunks * full
    loops = -(-part.count // loop)
    rest = part.count - (loops - 1) * loop
    row[[START, END, LOOPS, LOOP]] = part.first, part.first + part.count, loops, loop
    row[[CHUNK, LAST, STRIDE]] = full, full, 1
    if call.kind == ALLREDUCE and rest < loop:
        row[LAST] = round_up(-(-rest // chunks), alignment(call, part.threads) if scheme == "B" else 16 // itemsize)
    return row


def _last_of_loop(call: Collective, itemsize: int, part: Share, full: int, rest: int, chunks: int) -> int:
    """Scheme A: elements of a chunk in the last loop, of which `rest` elements of the tensor are left."""
    many = part.shares * chunks
    if call.protocol == SIMPLE:
        return round_up(min(full, -(-rest // many)), (part.threads - 32) * 8 // itemsize)
    if call.protocol == LL:
        unit = part.threads * 8 // itemsize
    else:
        unit = part.threads * (60 // itemsize) // (1 if call.kind == BROADCAST else 2)
    return min(full, -(-rest // (many * unit)) * unit)
