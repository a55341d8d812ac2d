"""What to ask trainers for next: ranges of the state, in the order in which they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from reconstruct.arena import Slot, Version, widened
from reconstruct.optimizer import expected_keys
from reconstruct.ranges import NOTHING, Ranges, meet

__all__ = ["Scrub", "Stretch", "Stretches"]

CLOSE = 2048
"""Known elements that may lie between two unknown ranges of one part. For the trainer copying so many costs less than
serving one part more."""

Stretch = tuple[str, int, int]
"""Key and elements [lo, hi)."""


class Stretches:
    """Ranges of one job's tensors. `slots`: by tensor key, for parameters and buffers alike."""

    def __init__(self, version: Version, optimizer: str) -> None:
        self.slots: dict[str, Slot] = {f"model/{slot.name}": slot for slot in version.layout.slots}
        for name, (spec, _) in version.layout.buffers.items():
            self.slots[f"buffer/{name}"] = Slot(name, spec, 0, None, -1, (), 0, "float32")
        self._optimizer = optimizer

    def element_bytes(self, key: str, version: Version) -> int:
        """Bytes of an element with all the state that it has now or may have at the end of the next step."""
        slot = self.slots[key]
        state: set[str] = set()
        if slot.group >= 0:
            fields = version.groups[slot.group]
            state = {*version.state_keys.get(slot.name, ()), *expected_keys(self._optimizer, fields)} - {"step"}
        return slot.spec.itemsize * (1 + len(state))

    def among(self, wanted: Mapping[str, Ranges], asked: Mapping[str, Ranges]) -> Iterator[Stretch]:
        """What is `wanted` by tensor key, and not `asked` for already."""
        for key, ranges in wanted.items():
            for lo, hi in ranges - asked.get(key, NOTHING):
                yield key, *widened(self.slots[key].tiles, lo, hi)

    def unknown(self, version: Version, asked: Mapping[str, Ranges]) -> Iterator[Stretch]:
        """What is not known and not `asked` for already, the oldest first, then the largest."""
        for name in sorted(version.uncounted):
            # A counter that is not known comes with any element; of a parameter that has none it is all there is.
            key = f"model/{name}"
            if not self.slots[key].spec.numel and key not in asked:
                yield key, 0, 0
        keys, rows = [], []
        for key, held in version.unknown.arrays():
            if key in asked:
                left, which = meet(held, asked[key].complement)
                held = np.column_stack([left, held[which, 2]])
            joined = _joined(held)
            keys += [key] * len(joined)
            rows.append(joined)
        table = np.concatenate(rows) if rows else np.empty((0, 3), np.int64)
        for i in np.lexsort([table[:, 0] - table[:, 1], table[:, 2]]):
            lo, hi, _ = table[i].tolist()
            yield keys[i], *widened(self.slots[keys[i]].tiles, lo, hi)

    def cut(self, stretch: Stretch, lo: int, most: int) -> int:
        """Where a part of a stretch ends that begins at `lo` and holds at most `most` elements; `lo` if none can."""
        key, _, hi = stretch
        if hi - lo <= most:
            return hi
        return max(lo, widened(self.slots[key].tiles, lo + most, lo + most + 1)[0])


class Scrub:
    """Goes through the whole state in turn."""

    def __init__(self, stretches: Stretches) -> None:
        self._order = [(key, slot.spec.numel) for key, slot in stretches.slots.items() if slot.spec.numel]
        self._tensor = self._element = 0
        self.rounds = 0

    def next(self) -> Stretch | None:
        """What comes next, to the end of its tensor; None if there is no state at all."""
        if not self._order:
            return None
        key, numel = self._order[self._tensor]
        return key, self._element, numel

    def went(self, stretch: Stretch, hi: int) -> None:
        """The stretch was asked for up to `hi`."""
        self._element = hi
        if hi == stretch[2]:
            self._tensor, self._element = self._tensor + 1, 0
        if self._tensor == len(self._order):
            self._tensor = 0
            self.rounds += 1


def _joined(held: np.ndarray) -> np.ndarray:
    """int64[n, 3] of lo, hi and since: ranges of one tensor that lie close together as one, with its oldest step."""
    if len(held) < 2:
        return held
    starts = np.flatnonzero(np.concatenate([[True], held[1:, 0] - held[:-1, 1] > CLOSE]))
    ends = np.append(starts[1:], len(held)) - 1
    return np.column_stack([held[starts, 0], held[ends, 1], np.minimum.reduceat(held[:, 2], starts)])
