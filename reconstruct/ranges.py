"""Sets of elements as ranges: which elements of a tensor are lost, unknown or asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

__all__ = ["NOTHING", "Ranges", "meet"]


class Ranges:
    """A set of whole numbers as half-open ranges [lo, hi), immutable.

    `array`: int64[n, 2], read-only, sorted; ranges neither overlap nor touch, so equal sets have equal arrays.
    Operators cost numpy calls, not Python per range.
    """

    __slots__ = ("array",)

    array: np.ndarray

    def __init__(self, array: np.ndarray) -> None:
        """`array` must have the form described above: use `of` where that is not known."""
        array.setflags(write=False)
        self.array = array

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]] | np.ndarray) -> Ranges:
        """From (lo, hi) in any order, overlapping or empty. ValueError for one that ends before it begins."""
        given = pairs if isinstance(pairs, np.ndarray) else np.array(list(pairs), np.int64)
        given = given.astype(np.int64).reshape(-1, 2)
        if (given[:, 0] > given[:, 1]).any():
            raise ValueError("a range ends before it begins")
        return cls(_joined(given[given[:, 0] < given[:, 1]]))

    @classmethod
    def of_mask(cls, mask: np.ndarray, start: int) -> Ranges:
        """The numbers `start + i` for which `mask[i]`, bool[n], is set."""
        edges = np.flatnonzero(np.diff(mask.view(np.int8), prepend=0, append=0))
        return cls(edges.reshape(-1, 2).astype(np.int64) + start)

    @property
    def total(self) -> int:
        """Numbers in the set."""
        return int((self.array[:, 1] - self.array[:, 0]).sum())

    def __or__(self, other: Ranges) -> Ranges:
        if not other or not self:
            return self or other
        return Ranges(_joined(np.concatenate([self.array, other.array])))

    def __and__(self, other: Ranges) -> Ranges:
        return Ranges(meet(self.array, other)[0]) if self and other else NOTHING

    def __sub__(self, other: Ranges) -> Ranges:
        return self & other.complement if self and other else self

    @property
    def complement(self) -> Ranges:
        """Every other number of int64, but for its largest."""
        result = np.empty((len(self.array) + 1, 2), np.int64)
        result[0, 0], result[1:, 0] = np.iinfo(np.int64).min, self.array[:, 1]
        result[-1, 1], result[:-1, 1] = np.iinfo(np.int64).max, self.array[:, 0]
        return Ranges(result)

    def mask(self, lo: int, hi: int) -> np.ndarray:
        """bool[hi - lo]: which of the numbers from `lo` to `hi` are in the set."""
        steps = np.zeros(hi - lo + 1, np.int8)
        if not self:
            return steps[:-1].view(np.bool_)
        inside = meet(self.array, Ranges.of([(lo, hi)]))[0] - lo
        steps[inside[:, 0]] += 1
        steps[inside[:, 1]] -= 1
        return np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)

    def shifted(self, distance: int) -> Ranges:
        """Every number plus `distance`."""
        return Ranges(self.array + distance)

    def __bool__(self) -> bool:
        return len(self.array) > 0

    def __len__(self) -> int:
        """How many ranges."""
        return len(self.array)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((lo, hi) for lo, hi in self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"Ranges.of({list(self)})"


NOTHING = Ranges(np.empty((0, 2), np.int64))


def meet(mine: np.ndarray, theirs: Ranges) -> tuple[np.ndarray, np.ndarray]:
    """What `mine` and `theirs` share: int64[n, 2], and for each range of it which range of `mine` it lies in.

    `mine`: int64[m, 2 or more], sorted and not overlapping; further columns are not looked at.
    """
    other = theirs.array
    # Those of `theirs` that meet range i of `mine` are first[i] .. last[i] - 1.
    first = np.searchsorted(other[:, 1], mine[:, 0], "right")
    counts = np.maximum(np.searchsorted(other[:, 0], mine[:, 1], "left") - first, 0)
    which = np.repeat(np.arange(len(mine)), counts)
    others = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
    result = np.empty((len(which), 2), np.int64)
    np.maximum(mine[which, 0], other[others, 0], out=result[:, 0])
    np.minimum(mine[which, 1], other[others, 1], out=result[:, 1])
    return result, which


def _joined(pairs: np.ndarray) -> np.ndarray:
    """Pairs that are not empty, in any order, as sorted ranges apart from each other."""
    if len(pairs) < 2:
        return pairs.copy()
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(pairs[:, 1])
    starts = np.flatnonzero(np.concatenate([[True], pairs[1:, 0] > reach[:-1]]))
    ends = np.append(starts[1:], len(pairs)) - 1
    return np.stack([pairs[starts, 0], reach[ends]], axis=1)
