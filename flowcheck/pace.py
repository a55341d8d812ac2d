"""How long a job's steps take, and so how long applying one may wait for readers of older ones."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["LEAST", "MOST", "Pace"]

LEAST, MOST = 0.05, 1.0
"""Seconds: a job of tiny steps still lets a small state be read, one of long steps is not held up for seconds."""
_REMEMBERED = 16


class Pace:
    """Measured on the wire: from the last byte of one step to that of the next."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._intervals: deque[float] = deque(maxlen=_REMEMBERED)

    def step(self, time: int) -> None:
        """A step was complete on the wire at `time`, ns."""
        if self._last is not None and time > self._last:
            self._intervals.append((time - self._last) / 1e9)
        self._last = time

    @property
    def usual(self) -> float:
        """Seconds that a step usually takes (the median: an evaluation between two says nothing), 0 if not known."""
        return statistics.median(self._intervals) if self._intervals else 0.0

    @property
    def wait(self) -> float:
        """Seconds: the usual step's, within LEAST..MOST."""
        return min(MOST, max(LEAST, self.usual)) if self._intervals else MOST
