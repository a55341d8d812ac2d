"""Why bytes are missing: what a HOLE says, held against what the sources say that they lost, and when.

Every hole has one cause, the first of these that is shown (docs/loss.md):

    truncated   a frame that carried the bytes came, and they were cut off
    damaged     a frame that carried the bytes came, and was refused because its checksum was wrong
    ring        the kernel found no room in the capture ring between the frames on both sides of the hole
    nic         the drop counters of the interface rose in that time
    mirror      the receiver acknowledged the bytes, so they passed, and nothing was lost on this machine
    unknown     none of these is shown
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mirror.spans import CUT, HOLE, PROVEN, REFUSED, Spans

__all__ = [
    "CAUSES", "DAMAGED", "MIRROR", "NIC", "NOTHING_KNOWN", "RING", "TRUNCATED", "UNKNOWN", "Evidence", "Tally", "Why",
]  # fmt: skip

CAUSES = ("truncated", "damaged", "ring", "nic", "mirror", "unknown")
"""The first one that is shown is the cause."""
TRUNCATED, DAMAGED, RING, NIC, MIRROR, UNKNOWN = CAUSES

_MOST_WINDOWS = 1 << 12
_JOIN = 1_000_000
"""ns: losses of a source that are no further apart are one, where there are very many."""
SETTLED = 2_000_000_000
"""ns after which nothing more is learned of why a byte is missing: adapters tell of drops up to a second late."""
_MOST_OPEN = 1 << 16


class Why(NamedTuple):
    """What is known of a hole: bits of `mirror.spans.Spans`, between which capture times (ns) it came about, and the
    vantage group of its flow."""

    known: int
    since: int
    until: int
    vantage: int


NOTHING_KNOWN = Why(0, -1, -1, -1)


class _Windows:
    """Times at which a source lost frames: int64[n, 2], (start, end), by start."""

    def __init__(self) -> None:
        self._rows = np.empty((0, 2), np.int64)
        self._reach = np.empty(0, np.int64)

    def add(self, start: int, end: int) -> None:
        rows = self._rows
        if len(rows) and start <= rows[-1, 1] and start >= rows[-1, 0]:
            rows[-1, 1] = max(int(rows[-1, 1]), end)
        else:
            at = int(np.searchsorted(rows[:, 0], start, "right"))
            rows = np.insert(rows, at, (start, end), axis=0)
        if len(rows) > _MOST_WINDOWS:
            rows = _joined(rows)[-_MOST_WINDOWS // 2 :]
        self._rows, self._reach = rows, np.maximum.accumulate(rows[:, 1])

    def overlap(self, since: np.ndarray, until: np.ndarray) -> np.ndarray:
        """bool[n]: whether something was lost after `since` and before `until`."""
        if not len(self._rows):
            return np.zeros(since.size, np.bool_)
        before = np.searchsorted(self._rows[:, 0], until, "left")
        return (before > 0) & (self._reach[np.maximum(before, 1) - 1] > since)


def _joined(rows: np.ndarray) -> np.ndarray:
    apart = np.flatnonzero(rows[1:, 0] > np.maximum.accumulate(rows[:, 1])[:-1] + _JOIN) + 1
    first = np.concatenate([[0], apart])
    return np.stack([rows[first, 0], np.maximum.reduceat(rows[:, 1], first)], axis=1)


class Evidence:
    """What sources lost, by the vantage group of their frames, and the cause of a hole by it.

    carriers: the groups of sources whose frames can show a flow of a group; itself where there are no tunnels.
    """

    def __init__(self, carriers: Callable[[int], frozenset[int]] = lambda group: frozenset((group,))) -> None:
        self._carriers = carriers
        self._windows: dict[tuple[str, int], _Windows] = {}

    def lost(self, cause: str, vantage: int, start: int, end: int) -> None:
        """A source (RING or NIC) lost frames after `start` and before `end`, ns of capture time."""
        self._windows.setdefault((cause, vantage), _Windows()).add(start, max(end, start + 1))

    def causes(self, known: np.ndarray, since: np.ndarray, until: np.ndarray, vantage: np.ndarray) -> np.ndarray:
        """int64[n]: index in CAUSES of each hole, by the columns of `Why`."""
        found = np.full(known.size, CAUSES.index(UNKNOWN))
        found[known & PROVEN != 0] = CAUSES.index(MIRROR)
        low, high = np.minimum(since, until), until
        for cause in (NIC, RING):
            if not any(at[0] == cause for at in self._windows):
                continue
            for group in np.unique(vantage).tolist():
                for carrier in self._carriers(group) if group >= 0 else ():
                    windows = self._windows.get((cause, carrier))
                    if windows is not None:
                        found[(vantage == group) & windows.overlap(low, high)] = CAUSES.index(cause)
        found[known & REFUSED != 0] = CAUSES.index(DAMAGED)
        found[known & CUT != 0] = CAUSES.index(TRUNCATED)
        return found

    def cause(self, why: Why) -> str:
        """Of one hole."""
        columns = np.array(why, np.int64)[:, None]
        return CAUSES[int(self.causes(*columns)[0])]


class Tally:
    """Bytes of holes by cause. A cause is final only when nothing more can be learned of it."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._sums = np.zeros(len(CAUSES), np.int64)
        self._open: list[np.ndarray] = []  # int64[n, 5]: known, since, until, vantage, bytes
        self._count = 0

    def take(self, spans: Spans, vantage: Callable[[np.ndarray], np.ndarray], size: np.ndarray | None = None) -> None:
        """Count the holes of a batch. vantage: (flows) -> their groups; size: bytes of every span, their lengths if
        not given."""
        at = np.flatnonzero(spans.kind[: spans.n] == HOLE)
        if at.size == 0:
            return
        length = spans.length[at] if size is None else size[at]
        flows = spans.flow[at]
        self._open.append(np.column_stack((spans.why[at], spans.ts[at], vantage(flows), length)))
        self._count += at.size

    def settle(self, now: int) -> None:
        """Nothing more is learned of holes that came about well before `now`, ns of capture time."""
        if not self._open:
            return
        rows = np.concatenate(self._open)
        old = rows[:, 2] < now - SETTLED
        if self._count > _MOST_OPEN:
            old[:] = True
        self._sums += self._by_cause(rows[old])
        self._open, self._count = [rows[~old]], int((~old).sum())

    def _by_cause(self, rows: np.ndarray) -> np.ndarray:
        causes = self._evidence.causes(*np.ascontiguousarray(rows[:, :4].T))
        return np.bincount(causes, rows[:, 4], len(CAUSES)).astype(np.int64)

    def bytes(self) -> dict[str, int]:
        """By cause, as far as it is known now; all causes are named."""
        sums = self._sums.copy()
        for rows in list(self._open):
            sums += self._by_cause(rows)
        return dict(zip(CAUSES, sums.tolist(), strict=True))
