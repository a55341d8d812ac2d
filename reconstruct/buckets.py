"""DDP's gradient buckets: which parameter lies where in which all-reduce.

A bucket is a flat tensor without padding: the parameters' elements follow one another in bucket order, each in
the memory order of its own strides (docs/gloo.md, "DDP's buckets"). DDP uses one layout for the first backward
pass and rebuilds it once, in the order in which gradients became ready; the rebuilt layout is broadcast by rank 0
as two int32 tensors and is also in `_get_ddp_logging_data()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowcheck.description import JobDescription, TensorSpec


class LayoutError(ValueError):
    """A layout that cannot be one of this job's: not a partition of its parameters, or of mixed dtypes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One all-reduce of a step.

    parameters: DDP's parameter indices in bucket order; offsets: byte offset of each in the bucket.
    """

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets of one backward pass, bucket 0 first."""

    buckets: tuple[Bucket, ...]

    @property
    def indices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(bucket.parameters for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def locate(self, parameter: int) -> tuple[int, int]:
        """(bucket, byte offset in it) of a DDP parameter index. Raises KeyError for an unknown one."""
        for number, bucket in enumerate(self.buckets):
            if parameter in bucket.parameters:
                return number, bucket.offsets[bucket.parameters.index(parameter)]
        raise KeyError(parameter)


def reduced_specs(description: JobDescription) -> list[TensorSpec]:
    """The tensors that DDP reduces, by DDP's parameter index."""
    indexed = {p.index: p.spec for p in description.parameters if p.index is not None}
    return [indexed[i] for i in range(len(indexed))]


def layout(indices: Sequence[Sequence[int]], specs: Sequence[TensorSpec]) -> Layout:
    """Place parameters in buckets.

    indices: DDP parameter indices per bucket; specs: by DDP index.
    Raises LayoutError when `indices` is not a partition of the parameters into buckets of one dtype each.
    """
    if sorted(i for bucket in indices for i in bucket) != list(range(len(specs))):
        raise LayoutError(f"buckets do not hold each of the {len(specs)} parameters exactly once")
    buckets = []
    for number, members in enumerate(indices):
        dtypes = {specs[i].dtype for i in members}
        if len(dtypes) != 1:
            raise LayoutError(f"bucket {number} mixes dtypes {sorted(dtypes)}")
        offsets, end = [], 0
        for i in members:
            offsets.append(end)
            end += specs[i].nbytes
        itemsize = specs[members[0]].itemsize
        buckets.append(Bucket(tuple(members), tuple(offsets), end, itemsize, dtypes.pop()))
    return Layout(tuple(buckets))


def parse_rebuilt(order: np.ndarray, sizes: np.ndarray, count: int) -> tuple[tuple[int, ...], ...]:
    """The rebuilt layout from rank 0's two broadcasts (torch/csrc/distributed/c10d/reducer.cpp).

    order: int32[count + 1], the parameter indices in bucket order, then the number of buckets;
    sizes: int32[buckets], parameters per bucket. Raises LayoutError when they are something else.
    """
    if len(order) != count + 1 or len(sizes) != order[-1] or sizes.sum() != count or (sizes < 1).any():
        raise LayoutError("not a rebuilt bucket layout")
    ends = np.cumsum(sizes)
    parts = np.split(order[:-1], ends[:-1])
    return tuple(tuple(int(i) for i in part) for part in parts)


def looks_like_order(order: np.ndarray, count: int) -> bool:
    """Whether an int32[count + 1] broadcast can be the first of the two layout broadcasts."""
    return (
        len(order) == count + 1
        and 1 <= order[-1] <= count
        and np.array_equal(np.sort(order[:-1]), np.arange(count, dtype=order.dtype))
    )
