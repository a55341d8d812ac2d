"""Gloo's segmented ring all-reduce as arithmetic (docs/gloo.md, "All-reduce: which message holds which bytes").

A tensor of `size` bytes is cut into segments of `s` bytes, `k` per rank; chunk c is the k segments that rank c owns in
the end. Rank r sends only to r-1: first partial sums (chunks r+1, r+2, ..., r+N-1), then final values (chunks r, r+1,
..., r+N-2). A segment beyond the end of the tensor is empty and not sent. So the m-th payload message of an all-reduce
on one link has one known place, length and meaning; nothing of that is on the wire.

All functions take the element size in bytes as `itemsize`, the world size N as `world` (2 or more) and the sender's
rank in the group as `rank`. They are numba functions: called from the kernels and from Python alike.
Source: gloo/allreduce.cc (ring) and the wire.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mirror.internal import internal

__all__ = [
    "MAX_SEGMENT", "broadcast_links", "counts", "first_length", "infer_size", "lengths", "message", "own_chunk", "ring",
    "total",
]

MAX_SEGMENT = 1 << 20
"""No segment is longer, in bytes (for item sizes up to 1 MiB)."""


@njit(cache=True, nogil=True)
def ring(size: int, itemsize: int, world: int) -> tuple[int, int, int, int, int]:
    """(M, G, k, s, T): largest segment, segments, segments per rank, segment bytes, segments that are not empty."""
    largest = itemsize * max(1, MAX_SEGMENT // itemsize)
    segments = max(-(-size // largest), 2 * world)
    segments = -(-segments // world) * world
    segment = -(-size // segments)
    segment = -(-segment // itemsize) * itemsize
    return largest, segments, segments // world, segment, (-(-size // segment) if segment else 0)


@internal()
def _phase(first: int, span: int, segments: int, filled: int) -> tuple[int, int]:
    """Non-empty segments among first, first+1, ... (`span` of them, mod `segments`): before the wrap and after it."""
    end = first + span
    before = max(0, min(filled, end, segments) - first)
    return before, max(0, min(filled, end - segments))


@njit(cache=True, nogil=True)
def counts(size: int, itemsize: int, world: int, rank: int) -> tuple[int, int]:
    """Payload messages that `rank` sends in one all-reduce: (partial sums, final values)."""
    _, segments, k, _, filled = ring(size, itemsize, world)
    span = (world - 1) * k
    a, b = _phase((rank + 1) * k % segments, span, segments, filled)
    c, d = _phase(rank * k % segments, span, segments, filled)
    return a + b, c + d


@njit(cache=True, nogil=True)
def total(size: int, itemsize: int, world: int, rank: int) -> int:
    """Payload messages that `rank` sends in one all-reduce."""
    partial, final = counts(size, itemsize, world, rank)
    return partial + final


@njit(cache=True, nogil=True)
def message(size: int, itemsize: int, world: int, rank: int, index: int) -> tuple[int, int, bool]:
    """(byte offset in the tensor, length, final) of the index-th payload message; (0, -1, False) if there is none."""
    _, segments, k, segment, filled = ring(size, itemsize, world)
    span = (world - 1) * k
    first = (rank + 1) * k % segments
    before, after = _phase(first, span, segments, filled)
    final = index >= before + after
    if final:
        index -= before + after
        first = rank * k % segments
        before, after = _phase(first, span, segments, filled)
    if index < 0 or index >= before + after:
        return 0, -1, False
    # Before the wrap the non-empty segments run from `first`; after it from 0.
    number = first + index if index < before else index - before
    offset = number * segment
    return offset, min(segment, size - offset), final


def own_chunk(size: int, itemsize: int, world: int, rank: int) -> tuple[int, int]:
    """(first byte, end) of the chunk that `rank` makes itself: the link into it never shows its final values."""
    _, _, k, segment, _ = ring(size, itemsize, world)
    return min(size, rank * k * segment), min(size, (rank + 1) * k * segment)


@njit(cache=True, nogil=True)
def first_length(size: int, itemsize: int, world: int, rank: int) -> int:
    """Length of the first payload message that `rank` sends; -1 if it sends none (size 0)."""
    return message(size, itemsize, world, rank, 0)[1]


@njit(cache=True, nogil=True)
def lengths(size: int, itemsize: int, world: int, rank: int) -> np.ndarray:
    """int64[total]: the lengths of all payload messages that `rank` sends, in order."""
    result = np.empty(total(size, itemsize, world, rank), np.int64)
    for index in range(result.size):
        result[index] = message(size, itemsize, world, rank, index)[1]
    return result


@njit(cache=True, nogil=True)
def infer_size(observed: np.ndarray, itemsize: int, world: int, rank: int) -> int:
    """Tensor bytes whose schedule for this sender is exactly `observed` (int64[n], all messages of one all-reduce).

    -1 if there is none, -2 if there are several. Only for whole lists: a beginning fits many sizes.
    """
    n = observed.size
    if n == 0 or observed.min() <= 0:
        return -1
    segment, last = observed.max(), observed.min()
    found = -1
    # Every segment is sent once or twice on every link.
    for filled in range(max(1, n // 2), n + 1):
        size = (filled - 1) * segment + last
        if ring(size, itemsize, world)[3] != segment or total(size, itemsize, world, rank) != n:
            continue
        same = True
        for index in range(n):
            if message(size, itemsize, world, rank, index)[1] != observed[index]:
                same = False
                break
        if same:
            if found >= 0:
                return -2
            found = size
    return found


def broadcast_links(world: int, root: int) -> list[tuple[int, int]]:
    """(sender, receiver) of every message of a broadcast from `root`: a binomial tree, whole tensor in one message."""
    links = []
    reached = 1
    while reached < world:
        links += [(v, v + reached) for v in range(min(reached, world - reached))]
        reached *= 2
    return [((a + root) % world, (b + root) % world) for a, b in links]
