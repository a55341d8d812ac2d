"""The reduction of a step whose marker did not come: it is the step's where nothing is ambiguous, else nothing tells.

Where a later marker came, the steps up to it must be one reduction each, with nothing left over. Without one, that a
step ends with its reduction is assumed as long as every step so far was one; a reduction that is not whole may be one
that the trainers did not live to end, until the next one is seen.
"""

from __future__ import annotations

from reconstruct.counts import Window
from reconstruct.horizon import LAYOUT_STEPS, Horizon
from reconstruct.markers import Marker
from reconstruct.numbering import FOREVER
from reconstruct.step_events import NO_WAITS, Waits
from reconstruct.verdicts import Blank, Take, Verdict

__all__ = ["judge"]

_NO_LAYOUT = "its marker and the rebuilt bucket layout are missing"
_NO_END = "its marker is missing and its all-reduces do not tell the step's end"


def judge(
    horizon: Horizon, later: tuple[Marker, int] | None, newest: int, silent: bool, now: int, waits: Waits
) -> Verdict:
    """Read the reduction behind the horizon. later: the first marker that came of the steps after it, and when; newest:
    the newest step that a marker came of; silent: markers stopped coming, do not wait for this one."""
    table, start = horizon.table, horizon.start
    end = until = FOREVER
    waited = 0
    if later is not None:
        marker, arrived = later
        waited = now - arrived
        end, until = horizon.bounds(marker, arrived)
        if horizon.coming(end, ()) and waited <= waits.traffic:
            return None
    patient = later is not None and waited <= waits.patience
    reading = horizon.next_pass()
    if reading is None:
        known_by = newest if later is None else later[0].step + LAYOUT_STEPS
        hopeless = later is not None and not patient and (newest >= known_by or waits is NO_WAITS)
        return Blank(_NO_LAYOUT, end, until, several=True) if hopeless else None
    current, first, stop = reading
    count = len(current.buckets)
    candidates = table.candidates(current, first, min(end, stop), until)
    mine = candidates[:count]
    tags = tuple(tag for tag, _ in mine)
    behind = end if len(candidates) <= count else candidates[count][0]
    open_ = [tag for tag in tags if not table.settled(tag, behind)]
    # Of these nobody knows what they are: they may be reductions, and all-reduces that were seen none.
    hidden = horizon.unseen(end if later is not None else max(tags, default=-1) + 1)
    if later is not None:
        for layout in {current, horizon.layouts.rebuilt or current}:
            hidden |= table.undecided(layout, start, end, until)
    coming = later is not None and horizon.coming(end, hidden)
    whole = len(mine) == count and all(table.complete(tag) for tag in tags)
    since = now - max((table.time(tag) for tag in tags), default=now)
    if later is not None:
        if not whole and patient and (open_ or coming or waited <= waits.traffic):
            return None
    else:
        # What a job died in the middle of was no step.
        if len(mine) < count or not (whole or len(candidates) > count):
            return None
        if (open_ and not whole) or (since <= waits.marker and not (silent and whole)):
            return None
    if open_ and since <= waits.traffic:
        return None
    missing, window = 0, None
    if later is not None:
        missing, due = horizon.missing(later[0].step - horizon.step, end, until)
        came = horizon.came(end, arrived, now, waits)
        window = Window(end - start, due + horizon.broadcasts(end), 0, 0, end, came)
    if (missing > 0 or hidden) and patient and coming:
        return None
    told = (
        horizon.plain
        and not horizon.counts.astray
        and (later is None or end >= horizon.numbers.end(later[0].sequence))
        and [size for _, size in mine] == [bucket.nbytes for bucket in current.buckets]
        and not missing
        and not hidden
    )
    several = missing < 0
    if not told:
        if not whole:
            horizon.cover(current, mine)
        return Blank(_NO_END, end, until, several)
    if window is not None and later is not None:
        problem = horizon.counts.problem(window, horizon.later(later[0].step, now, waits), table.seen)
        if problem is not None:
            return None if patient else Blank(f"its marker is missing: {problem}", end, until, several)
    return Take(current, tags, tags[-1] + 1, FOREVER)
