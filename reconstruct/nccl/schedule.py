"""NCCL's collectives as arithmetic: which message of a connection carries which bytes (docs/nccl.md, "Schedules").

A collective is cut over channels; each channel's share is a *row*, int64[FIELDS]. A row together with the sender's
position answers everything about every message, with no table: `place` for one message, `places` for all of them.

    position   ring all-reduce, all-gather: ring index of the sender (0 is rank 0)
               broadcast: steps along the ring from the root; tree: UP or DOWN
    index      number of the message within the collective, on one connection
    step S     number of the buffer slot since the connection was made; base = S of the collective's first message

All functions on rows are numba functions, called from kernels and from Python alike. Offsets and lengths are bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mirror.internal import internal

__all__ = [
    "ALLGATHER", "ALLREDUCE", "BROADCAST", "DOWN", "FIELDS", "GRAIN", "LL", "LL128", "NVLSTREE", "P2P_SLOT", "RING",
    "SIMPLE", "SLOT_BYTES", "SLOT_DATA", "STEPS", "TREE", "UP", "base_step", "begin_row", "block_offset",
    "chunk_steps", "messages", "missing_chunk", "place", "places", "step_of", "wire_bytes",
]

LL, LL128, SIMPLE = 0, 1, 2                 # protocols, by NCCL's own numbers
TREE, RING, NVLSTREE = 0, 1, 5              # algorithms, likewise
ALLREDUCE, ALLGATHER, BROADCAST = 0, 1, 2   # kinds
DOWN, UP = 0, 1                             # positions on a tree

STEPS = 8
SLOT_BYTES = (65536, 614400, 524288)
"""Bytes of a slot on the wire, by protocol."""
SLOT_DATA = (32768, 576000, 524288)
"""Bytes of data that a slot holds, by protocol."""
GRAIN = (16, 1920, 512)
"""Chunks are multiples of that from 2.22 on, bytes, by protocol."""
P2P_SLOT = 131072
"""Slot of the shared pool for send/recv: no message of theirs is longer."""

# Columns of a row.
(PATTERN, RANKS, CHUNKS, PROTOCOL, ITEMSIZE, START, END, LOOPS, LOOP, CHUNK, LAST, BASE, STRIDE, SLICES, SLICE_STEPS,
 BLOCK) = range(16)
FIELDS = 16
# PATTERN: who sends what. RANKS: ranks of the ring. CHUNKS: chunks going round in a loop (1: not a ring all-reduce).
# START, END: elements of the share; what lies beyond END is clipped. LOOPS: their number; LOOP: elements between them.
# CHUNK, LAST: elements of a chunk, in all loops but the last and in the last. BASE, STRIDE: the loop's chunk c starts
# BASE + c * STRIDE chunks into the loop. BLOCK: all-gather, elements of one rank's block.
_AROUND_TWICE, _AROUND_ONCE, _CHAIN, _TREE = 0, 1, 2, 3


def begin_row(kind: int, algorithm: int, protocol: int, itemsize: int, ranks: int) -> np.ndarray:
    """A row with everything that does not depend on the size; the share's columns are still 0."""
    row = np.zeros(FIELDS, np.int64)
    ring = algorithm == RING
    row[PATTERN] = {ALLREDUCE: _AROUND_TWICE, ALLGATHER: _AROUND_ONCE, BROADCAST: _CHAIN}[kind] if ring else _TREE
    sliced = ring and protocol == SIMPLE and kind != BROADCAST
    row[[RANKS, CHUNKS, PROTOCOL, ITEMSIZE]] = ranks, ranks if ring and kind == ALLREDUCE else 1, protocol, itemsize
    row[[SLICES, SLICE_STEPS]] = (2, 2) if sliced else (1, 1)
    return row


@internal()
def _ring_steps(row: np.ndarray, position: int) -> int:
    """Ring steps of a loop in which the sender at `position` sends."""
    if row[PATTERN] == _AROUND_TWICE:
        return 2 * (row[RANKS] - 1)
    if row[PATTERN] == _AROUND_ONCE:
        return row[RANKS] - 1
    if row[PATTERN] == _CHAIN:
        return 1 if 0 <= position < row[RANKS] - 1 else 0
    return 1


@njit(cache=True, nogil=True)
def messages(row: np.ndarray, position: int) -> int:
    """Messages that the sender at `position` sends, empty ones included."""
    return row[LOOPS] * _ring_steps(row, position) * row[SLICES]


@njit(cache=True, nogil=True)
def place(row: np.ndarray, position: int, index: int) -> tuple[int, int, int, int, int, int, bool]:
    """(loop, ring step, slice, chunk, offset, length, final) of a message.

    offset, length: bytes of the tensor; in an all-gather bytes of the block of ring index `chunk` (`block_offset`).
    length is -1 if there is no such message, 0 for an empty one (which is sent all the same).
    """
    steps = _ring_steps(row, position)
    if index < 0 or index >= row[LOOPS] * steps * row[SLICES]:
        return 0, 0, 0, 0, 0, -1, False
    part = index % row[SLICES]
    whole = index // row[SLICES]
    loop = whole // steps
    step = whole % steps
    n = row[RANKS]
    shift: Any = np.int64(0)
    final = True
    chunk: Any = np.int64(0)
    if row[PATTERN] == _AROUND_TWICE:
        chunk = (position - 1 - step) % n
        final = step >= n - 1
        shift = chunk * row[STRIDE]
    elif row[PATTERN] == _AROUND_ONCE:
        chunk = (position - step) % n
    elif row[PATTERN] == _TREE:
        final = position == DOWN
    size = row[LAST] if loop == row[LOOPS] - 1 else row[CHUNK]
    first = row[START] + loop * row[LOOP] + (row[BASE] + shift) * size
    first = min(first, row[END])  # an empty message lies at the end
    count = min(size, row[END] - first)
    if row[SLICES] == 2:
        slot = row[SLICE_STEPS] * (SLOT_BYTES[SIMPLE] // row[ITEMSIZE])
        half = min(count, max(16 * (-(-count // 32)), slot // 32))
        if part == 0:
            count = half
        else:
            first += half
            count -= half
    return loop, step, part, chunk, first * row[ITEMSIZE], count * row[ITEMSIZE], final


@njit(cache=True, nogil=True)
def places(row: np.ndarray, position: int) -> np.ndarray:
    """int64[messages, 7]: `place` of every message of the sender at `position`, in order."""
    result = np.empty((messages(row, position), 7), np.int64)
    for index in range(len(result)):
        loop, step, part, chunk, offset, length, final = place(row, position, index)
        result[index, 0], result[index, 1], result[index, 2], result[index, 3] = loop, step, part, chunk
        result[index, 4], result[index, 5], result[index, 6] = offset, length, final
    return result


@njit(cache=True, nogil=True)
def block_offset(row: np.ndarray, order: np.ndarray, chunk: int) -> int:
    """All-gather: byte where the block of ring index `chunk` starts; 0 for anything else.

    order: int64[ranks], rank of each ring index on this channel.
    """
    return order[chunk] * row[BLOCK] * row[ITEMSIZE] if row[PATTERN] == _AROUND_ONCE else 0


@njit(cache=True, nogil=True)
def wire_bytes(protocol: int, length: int, step: int) -> int:
    """Bytes on the wire of a message with `length` bytes of data at step S.

    Once in 2^31 steps LL sends eight whole slots, to keep its flags from meeting old ones.
    """
    if protocol == LL:
        return SLOT_BYTES[LL] if step & 0x7FFFFFF8 == 0x7FFFFFF8 else -(-length // 8) * 16
    if protocol == LL128:
        return -(-length // 1920) * 2048
    return length


@internal()
def chunk_steps(row: np.ndarray) -> int:
    """Steps of one chunk: the base of a collective is a multiple of that."""
    return row[SLICES] * row[SLICE_STEPS]


@njit(cache=True, nogil=True)
def base_step(row: np.ndarray, step: int) -> int:
    """Step of the collective's first message on a connection whose step counter stands at `step`."""
    unit = chunk_steps(row)
    return -(-step // unit) * unit


@njit(cache=True, nogil=True)
def step_of(row: np.ndarray, base: int, index: int) -> int:
    """Step S of a message; its slot is S mod 8, its LL or LL128 flag S + 1."""
    return base + index * row[SLICE_STEPS]


@njit(cache=True, nogil=True)
def missing_chunk(ranks: int, position: int) -> int:
    """The one chunk whose final value the ring edge out of `position` does not show, in every loop."""
    return (position + 1) % ranks
