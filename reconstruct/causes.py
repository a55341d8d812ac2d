"""Why bytes of a landing are missing: what its links lost, laid over its holes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mirror.loss import CAUSES, UNKNOWN, Evidence, Why

__all__ = ["Cause", "Lost", "explained"]

Cause = tuple[int, int, str]
"""(byte offset, length, one of `mirror.loss.CAUSES`)"""
Lost = tuple[int, int, Why]
"""(first byte, end, why) of what a link would have shown."""


def explained(
    holes: Sequence[Sequence[int]], losses: Sequence[Lost], behind: Sequence[Lost], evidence: Evidence
) -> list[Cause]:
    """The cause of every byte of `holes` ([offset, length], in order), parts of a hole with one cause joined.

    losses: bytes that were lost themselves; where several links lost one, the cause that is shown best counts. behind:
    bytes that were lost because others were, and their places with them: they count where nothing else does.
    """
    if not holes:
        return []
    inside = np.array(holes, np.int64)
    inside[:, 1] += inside[:, 0]
    rows = [np.array([(start, end, *why) for start, end, why in part], np.int64).reshape(-1, 6)
            for part in (behind, losses)]  # fmt: skip
    cuts = np.unique(np.concatenate([inside, *(part[:, :2] for part in rows)]))
    missing = _covered(cuts, inside)
    best = np.full(cuts.size, CAUSES.index(UNKNOWN))
    for part in rows:
        causes = evidence.causes(*np.ascontiguousarray(part[:, 2:].T))
        for cause in range(len(CAUSES) - 1, -1, -1):
            best[_covered(cuts, part[causes == cause, :2])] = cause
    starts = set(inside[:, 0].tolist())
    result: list[list[int]] = []
    for at in np.flatnonzero(missing).tolist():
        start, end, cause = int(cuts[at]), int(cuts[at + 1]), int(best[at])
        if result and result[-1][1:] == [start, cause] and start not in starts:
            result[-1][1] = end
        else:
            result.append([start, end, cause])
    return [(start, end - start, CAUSES[cause]) for start, end, cause in result]


def _covered(cuts: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """bool by cut: whether the bytes behind it, up to the next one, lie in one of `ranges`; all their ends are cuts."""
    depth = np.zeros(cuts.size, np.int64)
    np.add.at(depth, np.searchsorted(cuts, ranges[:, 0]), 1)
    np.add.at(depth, np.searchsorted(cuts, ranges[:, 1]), -1)
    found: np.ndarray = np.cumsum(depth) > 0
    return found
