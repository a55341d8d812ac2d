"""From the all-reduces of a step to its gradients, and what of them is not known.

A byte of an all-reduce is known once it was captured and no two copies of it differ. An element with one byte that is
not known is lost whole; no other is. Where copies differ in more than half of what was captured they are not of one
all-reduce, and nothing of it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowcheck.description import TensorSpec
from reconstruct.buckets import Layout
from reconstruct.landing import Landing
from reconstruct.ranges import NOTHING, Ranges

__all__ = ["Gradients", "gather", "missing"]


@dataclass(frozen=True, slots=True)
class Gradients:
    """By DDP index: `values`, uint8[n] of each parameter's elements in memory order, and the elements that are `lost`.

    Where nothing is lost a value is a view of its landing, which is valid as long as that; else a copy, as late frames
    may still be placed, with zeros in place of what is lost. missing: by bucket, its bytes that are not known.
    """

    values: dict[int, np.ndarray]
    lost: dict[int, Ranges]
    missing: tuple[Ranges, ...]

    @property
    def holes(self) -> tuple[tuple[int, int, int], ...]:
        """(bucket, byte offset, length) of what is missing."""
        return tuple((number, lo, hi - lo) for number, gone in enumerate(self.missing) for lo, hi in gone)


def missing(landing: Landing | None, size: int) -> Ranges:
    """Bytes of an all-reduce of `size` bytes that are not known. landing: None where nothing of it was kept."""
    whole = Ranges.of([(0, size)])
    if landing is None:
        return whole
    if landing.complete:
        return NOTHING
    disputed = landing.disputed
    if disputed is None:
        return whole
    covered = Ranges.of(np.array(landing.ranges(), np.int64).reshape(-1, 2))
    known = covered - Ranges.of(np.stack([disputed[:, 0], disputed.sum(axis=1)], axis=1))
    return whole if 2 * known.total < covered.total else whole - known


def gather(layout: Layout, landings: Sequence[Landing | None], specs: Sequence[TensorSpec]) -> Gradients:
    """The gradients of a step. landings: of the all-reduce of each bucket; specs: by DDP index."""
    values: dict[int, np.ndarray] = {}
    lost: dict[int, Ranges] = {}
    parts = []
    for bucket, landing in zip(layout.buckets, landings, strict=True):
        gone, item = missing(landing, bucket.nbytes), bucket.itemsize
        elements = Ranges.of(np.stack([gone.array[:, 0] // item, -(-gone.array[:, 1] // item)], axis=1))
        parts.append(gone)
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            nbytes, first = specs[index].nbytes, offset // item
            mine = elements & Ranges.of([(first, first + nbytes // item)]) if gone else NOTHING
            if mine:
                lost[index] = mine.shifted(-first)
            if landing is None:
                values[index] = np.zeros(nbytes, np.uint8)
            elif mine:
                values[index] = landing.data[offset : offset + nbytes].copy()
                values[index].reshape(-1, item)[lost[index].mask(0, nbytes // item)] = 0
            else:
                values[index] = landing.data[offset : offset + nbytes]
    return Gradients(values, lost, tuple(parts))
