"""After a gap in a lane's framing: what is still certain about each slot.

Positions come from the number of payloads that a slot has sent before. A gap that swallowed a preamble may have
swallowed whole payloads. Nothing is assumed about them: where the gap's bytes have only one decomposition into
messages the number is known; otherwise the slots open at the gap are lost on this link. All that follows on the link
is unproven until a collective's list of messages is complete, which leaves no room for one in the gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reconstruct.gloo import schedule
from reconstruct.gloo import state as g
from reconstruct.gloo.framing import PREAMBLE_BYTES, Pending, lost_payloads
from reconstruct.gloo.lanes import LaneTable, split

__all__ = ["CLEAN_AFTER", "OpenSlot", "after_gap", "slot_completed", "unproven"]

CLEAN_AFTER = 8
"""Complete collectives after a gap that prove later ones clean. Gloo starts collectives in the order of their tags, and
at most two per context at a time (worker threads of torch's group), so this leaves a wide margin: a later one that had
sent something in the gap would have had to be under way beside all of these."""
_IN_FLIGHT_TAGS = 16


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A planned slot that was open at the gap. lost: payloads in the gap; None: not known, the slot is lost too."""

    slot: int
    plan: int
    lost: int | None


def after_gap(lanes: LaneTable, lane: int) -> list[OpenSlot]:
    """Framing was found again: settle the lane's slots, correct their counts; returns the planned ones.

    Those that go on belong into a private landing from now on, until their list is complete.
    """
    row, entries = lanes.state.lanes[lane], lanes.state.entries[lane]
    known = bool(row[g.GAP_KNOWN])
    gap = int(row[g.POSITION]) - PREAMBLE_BYTES - int(row[g.GAP_START])
    unproven(row)
    open_ = [i for i in range(g.ENTRIES) if entries[i, g.SLOT] >= 0 and entries[i, g.PLAN] != g.DONE]
    recent = [i for i in open_ if not _past(row, entries[i])]
    open_ = recent + [i for i in open_ if i not in recent]
    numbers: list[int | None] = [None] * len(open_)
    if known:
        numbers[: len(recent)] = _decompose(lanes, lane, recent, gap)
    result = []
    for i, number in zip(open_, numbers, strict=True):
        entry = entries[i]
        slot, plan = int(entry[g.SLOT]), int(entry[g.PLAN])
        entry[g.PRIVATE] = 1
        if number:
            entry[g.COUNT] += number
        if plan in (g.REDUCE, g.KEPT, g.COUNTED):
            if number is None:
                entry[g.PLAN] = g.LOST
            result.append(OpenSlot(slot, plan, number))
        elif plan == g.NONE and number is None and entry[g.COUNT] > 0:
            entry[g.PLAN] = g.LOST
    return result


def unproven(row: np.ndarray) -> None:
    """Positions on this lane are not certain any more."""
    row[g.DIRT], row[g.PROVEN], row[g.PROVEN_TAG] = g.UNPROVEN, 0, -1
    row[g.GAPS] += 1


def _past(row: np.ndarray, entry: np.ndarray) -> bool:
    """Whether the slot's collective is too old to be still sending."""
    kind, tag = split(int(entry[g.SLOT]))
    return kind != 0 and int(row[g.MAX_TAG]) - tag > _IN_FLIGHT_TAGS


def _decompose(lanes: LaneTable, lane: int, open_: list[int], gap: int) -> list[int | None]:
    """Payloads of each open slot in the gap."""
    state = lanes.state
    row, entries = state.lanes[lane], state.entries[lane]
    back = int(row[g.PEER])
    # The reverse lane announces every payload before it is sent. It may be believed if it lacks nothing and has been
    # followed up to the capture time of the first byte after the gap.
    closed = (
        back >= 0
        and state.lanes[back, g.MODE] in (g.PREAMBLE, g.PAYLOAD)
        and state.lanes[back, g.DIRT] != g.UNPROVEN
        and state.lanes[back, g.LAST_TS] >= row[g.LAST_TS]
    )
    if closed and state.lanes[back, g.DIRT] == g.UNPROVEN_BELOW:
        # It had a gap itself, but not since the collectives above a certain tag began.
        tags = [split(int(entries[i, g.SLOT]))[1] for i in open_]
        closed = min(tags, default=1 << 32) > state.lanes[back, g.CLEAN_ABOVE]
    unfinished = entries[(entries[:, g.SLOT] >= 0) & (entries[:, g.PLAN] != g.DONE)]
    closed = closed and not any(_past(row, entry) and _pending(lanes, back, entry) > 0 for entry in unfinished)
    slots = []
    for i in open_:
        lengths = _next_lengths(lanes, back if closed else -1, entries[i])
        closed = closed and lengths is not None
        slots.append(Pending(lengths if lengths is not None else []))
    if closed:
        # Slots that this lane has not shown at all but that the other side waits for.
        mine = set(entries[:, g.SLOT].tolist())
        for entry in state.entries[back]:
            wanted = int(entry[g.WANTED])
            if entry[g.SLOT] < 0 or wanted <= 0 or int(entry[g.SLOT]) in mine or _past(row, entry):
                continue
            if entry[g.SHORTEST] != entry[g.LONGEST]:
                closed = False
                break
            slots.append(Pending([int(entry[g.LONGEST])] * wanted))
    if not closed:
        slots = [Pending(_scheduled(entries[i], 1)) for i in open_]
    return lost_payloads(gap, slots, closed)[: len(open_)]


def _pending(lanes: LaneTable, back: int, entry: np.ndarray) -> int:
    """Payloads of a slot that the reverse lane has asked for and this lane has not shown."""
    asked = lanes.entry(back, int(entry[g.SLOT]))
    return (int(asked[g.WANTED]) if asked is not None else 0) - int(entry[g.COUNT])


def _next_lengths(lanes: LaneTable, back: int, entry: np.ndarray) -> list[int] | None:
    """Lengths of the payloads that the slot may have sent since; None if they are not known."""
    if back < 0:
        return None
    number = _pending(lanes, back, entry)
    if number < 0:
        return None
    announced = lanes.entry(back, int(entry[g.SLOT]))
    if entry[g.PLAN] == g.REDUCE:
        lengths = _scheduled(entry, number)
        return lengths if len(lengths) == number else None
    if number and (announced is None or announced[g.SHORTEST] != announced[g.LONGEST]):
        return None
    return [int(announced[g.LONGEST])] * number if announced is not None else []


def _scheduled(entry: np.ndarray, number: int) -> list[int]:
    """Lengths of the next payloads of a planned all-reduce, at most `number`."""
    if entry[g.PLAN] != g.REDUCE:
        return []
    size, item, world = int(entry[g.SIZE]), int(entry[g.ITEM]), int(entry[g.WORLD])
    first = int(entry[g.COUNT])
    last = min(first + number, int(entry[g.TOTAL]))
    return [
        schedule.message(size, item, world, int(entry[g.SENDER_RANK]), i)[1] for i in range(first, last)
    ]


def slot_completed(row: np.ndarray, entry: np.ndarray) -> None:
    """Every message of a slot was seen on a lane, payloads or requests: after enough of them later slots need no
    proof any more. A slot counts once, and only if it was not seen before the lane's last gap."""
    if row[g.DIRT] != g.UNPROVEN or entry[g.BORN] != row[g.GAPS]:
        return
    entry[g.BORN] = -1
    row[g.PROVEN] += 1
    row[g.PROVEN_TAG] = max(int(row[g.PROVEN_TAG]), split(int(entry[g.SLOT]))[1])
    if row[g.PROVEN] >= CLEAN_AFTER:
        row[g.DIRT], row[g.CLEAN_ABOVE] = g.UNPROVEN_BELOW, row[g.PROVEN_TAG]
