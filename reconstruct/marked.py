"""The window of a step whose marker came: what its gradient is, or that nothing tells."""

from __future__ import annotations

from collections.abc import Sequence

from reconstruct.buckets import Layout
from reconstruct.horizon import LAYOUT_STEPS, Horizon
from reconstruct.markers import Marker
from reconstruct.step_events import NO_WAITS, Waits
from reconstruct.verdicts import Blank, Take, Verdict
from reconstruct.windows import choose, probes_of

__all__ = ["judge"]

_NO_LAYOUT = "the rebuilt bucket layout was neither on the wire nor reported"
_BLIND = "its last collectives were not seen and no element of the gradient was reported to check"


def judge(horizon: Horizon, marker: Marker, arrived: int, newest: int, now: int, waits: Waits) -> Verdict:
    """Read the window of the step behind the horizon. newest: the newest step that a marker came of."""
    table, waited = horizon.table, now - arrived
    end, until = horizon.bounds(marker, arrived)
    reading = horizon.reading(marker.rebuilt, end)
    if reading is None:
        over = waited > waits.patience and (newest >= marker.step + LAYOUT_STEPS or waits is NO_WAITS)
        return Blank(_NO_LAYOUT, end, until, several=True) if over else None
    current, first = reading
    candidates = table.candidates(current, first, end, until)
    probes = probes_of(horizon.description, current, marker.canaries)
    undecided = table.undecided(current, first, end, until)
    # The mirror has not shown all of the window yet: nothing would contradict an earlier reduction taken for the
    # step's.
    behind = horizon.coming(end, undecided)
    blind = not probes and (behind or end < horizon.numbers.end(marker.sequence))
    if blind and waited <= waits.patience:
        return None
    unseen = horizon.unseen(end) | undecided
    coming = behind or horizon.coming(end, unseen)
    if _waits_for(horizon, current, candidates, end, behind, coming, waited, waits):
        return None
    horizon.cover(current, candidates)
    several = len(candidates) > len(current.buckets)
    if blind:
        return Blank(_BLIND, end, until, several)
    window = horizon.window(len(current.buckets), len(candidates), end, arrived, now, waits)
    later = horizon.later(marker.step, now, waits)
    counted = len(candidates) < len(current.buckets) and horizon.counted(window, later)
    choice = choose(current, candidates, table.landing, probes, unseen, counted)
    if choice.problem is not None:
        if (unseen or behind) and waited <= (waits.patience if coming else waits.traffic):
            return None  # the mirror is late: what it has not shown yet may be the step's reduction
        return Blank(horizon.why(end, arrived, candidates, behind, choice.problem), end, until, several)
    problem = None if choice.checked else horizon.counts.problem(window, later, table.seen)
    if problem is not None:
        # The capture may not have come to the marker yet, and a later marker may show that this one was late.
        decided = horizon.decoder.decided(horizon.group) >= end
        patience = waits.patience if horizon.counts.open(window, table.seen, decided) else waits.traffic
        return None if waited <= patience else Blank(problem, end, until, several)
    return Take(current, choice.tags, end, until, several, window, later)


def _waits_for(
    horizon: Horizon, current: Layout, candidates: Sequence[tuple[int, int]], end: int, behind: bool, coming: bool,
    waited: int, waits: Waits,
) -> bool:  # fmt: skip
    """Whether something of a marker's window may still come and is worth waiting for."""
    table = horizon.table
    if behind and waited <= waits.traffic:
        return True
    open_ = [tag for tag, _ in candidates if not table.settled(tag, end)]
    if open_ and waited <= waits.traffic:
        return True  # a second copy may still contradict the first
    short = coming and len(candidates) < len(current.buckets)
    return (short or not all(table.complete(tag) for tag in open_)) and waited <= waits.patience
