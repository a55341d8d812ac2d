"""Which elements of a job's state are not known, and since which step.

An element is unknown from the step whose gradient of it was lost until its value was taken from a trainer. Keys:
`model/<parameter>` stands for the parameter's elements and all their optimizer state, `buffer/<name>` for a buffer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flowcheck.specs import MAX_NAME, MAX_TENSORS
from flowcheck.values import DescriptionError, integer, sequence, text
from reconstruct.ranges import NOTHING, Ranges, meet

__all__ = ["MAX_RANGES", "Unknown"]

MAX_RANGES = 1 << 16
"""Ranges kept, 24 bytes each. Where more would be added, those that lie nearest to each other are joined: more is
unknown, never less. Ranges of different tensors cannot be joined, so one per tensor may remain."""

_NONE = np.empty((0, 3), np.int64)


class Unknown:
    """Tensor key -> unknown ranges of elements, each with the step since when. Not thread-safe; copies are cheap."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}  # int64[n, 3], never changed in place: sorted lo, hi, since
        self._count = 0

    def add(self, key: str, ranges: Ranges, since: int) -> None:
        """`ranges` of `key` are unknown from step `since` on; those that are unknown already keep their step."""
        held = self._held.get(key, _NONE)
        fresh = (ranges - self.of(key)).array
        if len(fresh):
            both = np.concatenate([held, np.insert(fresh, 2, since, axis=1)])
            self._set(key, _tidy(both[np.argsort(both[:, 0], kind="stable")]))
        if self._count > MAX_RANGES:
            self._join(self._count - MAX_RANGES * 3 // 4)

    def remove(self, key: str, ranges: Ranges) -> None:
        """`ranges` of `key` are known."""
        held = self._held.get(key)
        if held is None or not ranges:
            return
        left, which = meet(held, ranges.complement)
        self._set(key, np.column_stack([left, held[which, 2]]))

    def of(self, key: str) -> Ranges:
        """The unknown elements of a tensor."""
        held = self._held.get(key)
        return NOTHING if held is None else Ranges.of(held[:, :2])

    @property
    def elements(self) -> int:
        """Unknown elements; one of a parameter counts once, whatever its state."""
        return sum(int((held[:, 1] - held[:, 0]).sum()) for held in self._held.values())

    @property
    def oldest(self) -> int | None:
        """The step since when anything has been unknown; None if nothing is."""
        return min((int(held[:, 2].min()) for held in self._held.values()), default=None)

    def items(self) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
        """(key, [(lo, hi, since)]) of every tensor that is not fully known, ranges in order."""
        for key, held in self._held.items():
            yield key, [(lo, hi, since) for lo, hi, since in held.tolist()]

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """`items` as (key, int64[n, 3]); only to be read."""
        yield from self._held.items()

    def copy(self) -> Unknown:
        result = Unknown()
        result._held, result._count = dict(self._held), self._count
        return result

    def __bool__(self) -> bool:
        return bool(self._held)

    def __len__(self) -> int:
        """How many ranges."""
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """{key: [[lo, hi, since], ...]}, at most MAX_RANGES ranges as far as they can be joined."""
        bounded = self.copy()
        bounded._join(self._count - MAX_RANGES)
        return {key: held.tolist() for key, held in bounded._held.items()}

    @classmethod
    def from_json(cls, data: Any, path: str = "unknown") -> Unknown:
        """From `to_json`'s objects; DescriptionError names what does not fit."""
        if not isinstance(data, dict) or len(data) > 2 * MAX_TENSORS:
            raise DescriptionError(f"{path}: expected an object of at most {2 * MAX_TENSORS} tensors")
        result = cls()
        for key, rows in data.items():
            where = f"{path}.{text(key, path, MAX_NAME + 16):.80}"
            held = np.array(sequence(rows, where, MAX_RANGES, _row), np.int64).reshape(-1, 3)
            if not len(held) or (held[1:, 0] < held[:-1, 1]).any():
                raise DescriptionError(f"{where}: the ranges are not in order, or there is none")
            result._set(key, _tidy(held))
        if result._count > max(MAX_RANGES, len(data)):
            raise DescriptionError(f"{path}: {result._count} ranges, at most {MAX_RANGES}")
        return result

    def _set(self, key: str, held: np.ndarray) -> None:
        self._count += len(held) - len(self._held.get(key, _NONE))
        if len(held):
            held.setflags(write=False)
            self._held[key] = held
        else:
            self._held.pop(key, None)

    def _join(self, count: int) -> None:
        """Have `count` ranges less, if there are so many that can be joined, by closing the smallest gaps."""
        gaps = {key: held[1:, 0] - held[:-1, 1] for key, held in self._held.items() if len(held) > 1}
        if count <= 0 or not gaps:
            return
        every = np.concatenate(list(gaps.values()))
        closed = np.zeros(len(every), np.bool_)
        closed[np.argsort(every, kind="stable")[:count]] = True
        at = 0
        for key, of_key in gaps.items():
            starts = np.flatnonzero(np.concatenate([[True], ~closed[at : at + len(of_key)]]))
            at += len(of_key)
            held = self._held[key]
            ends = np.append(starts[1:], len(held)) - 1
            since = np.minimum.reduceat(held[:, 2], starts)
            self._set(key, np.column_stack([held[starts, 0], held[ends, 1], since]))


def _tidy(held: np.ndarray) -> np.ndarray:
    """Neighbours that touch and are unknown since the same step, as one."""
    apart = (held[1:, 0] != held[:-1, 1]) | (held[1:, 2] != held[:-1, 2])
    starts = np.flatnonzero(np.concatenate([[True], apart]))
    ends = np.append(starts[1:], len(held)) - 1
    return np.column_stack([held[starts, 0], held[ends, 1], held[starts, 2]])


def _row(value: Any, path: str) -> tuple[int, int, int]:
    numbers = sequence(value, path, 3, lambda item, where: integer(item, where, 0, (1 << 62) - 1))
    if len(numbers) != 3 or numbers[0] >= numbers[1]:
        raise DescriptionError(f"{path}: {numbers} is no range of elements and a step")
    return numbers[0], numbers[1], numbers[2]
