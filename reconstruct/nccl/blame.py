"""What lanes lost, and which bytes of an all-reduce that was: packet numbers tell the place of what never came."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mirror.loss import Why
from reconstruct.causes import Lost
from reconstruct.nccl.lanes import Entry, Lane
from reconstruct.nccl.payload import UNIT_DATA, UNIT_WIRE
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.script import T_FINAL, T_FIRST, T_LENGTH, T_OFFSET, T_SHIFT, T_WIRE

__all__ = ["forget_losses", "lose", "losses"]

_MOST = 1 << 14
_ALL = 1 << 40  # packets


def lose(lane: Lane, rows: np.ndarray) -> None:
    """Keep losses of a lane: int64[n, 6], the columns of a LOG_HOLE from the first packet on. The newest are kept."""
    lane.lost = np.concatenate([lane.lost, rows])[-_MOST:]


def forget_losses(lane: Lane) -> None:
    """Nobody asks any more for what lies before a lane's oldest collective."""
    if len(lane.lost) and lane.entries:
        wide = np.where(lane.lost[:, 1] < 0, lane.lost[:, 2], 1)
        lane.lost = lane.lost[(lane.lost[:, 0] + wide > lane.entries[0].start) | (wide == 0)]


def losses(roster: Roster, tag: int, vantage: Callable[[int], int]) -> tuple[list[Lost], list[Lost]]:
    """Bytes of an all-reduce's landing that lanes lost, and those that were lost behind the length of a message.

    A hole counts for all of the units of the payload format that it touches.
    """
    lost: list[Lost] = []
    behind: list[Lost] = []
    for lane in roster.lanes:
        for entry in lane.entries if len(lane.lost) else ():
            if entry.tag != tag:
                continue
            for first, offset, length, known, since, until in lane.lost.tolist():
                why = Why(known, since, until, vantage(lane.flow))
                found = _places(entry, lane.mtu, first - entry.start, offset, length or _ALL)
                (lost if length else behind).extend((start, end, why) for start, end in found)
    return lost, behind


def _places(entry: Entry, mtu: int, first: int, offset: int, length: int) -> list[tuple[int, int]]:
    """Where the final values lie that a loss took. first: packet, from the entry's first on."""
    table, firsts = entry.table, entry.table[:, T_FIRST]
    low, high = first, first + (length if offset < 0 else 1)
    low, high = max(low, 0), min(high, int(firsts[-1]))
    if low >= high:
        return []
    at = np.arange(np.searchsorted(firsts, low, "right") - 1, np.searchsorted(firsts, high, "left"))
    at = at[table[at, T_FINAL] > 0]
    begin = np.maximum(low - firsts[at], 0) * mtu
    end = np.minimum((high - firsts[at]) * mtu, table[at, T_WIRE])
    if offset >= 0:
        begin, end = begin + offset, np.minimum(begin + offset + length, table[at, T_WIRE])
    wire, data = UNIT_WIRE[entry.protocol], UNIT_DATA[entry.protocol]
    begin, end = begin + table[at, T_SHIFT], end + table[at, T_SHIFT]
    begin = np.minimum(begin // wire * data, table[at, T_LENGTH])
    end = np.minimum(-(-end // wire) * data, table[at, T_LENGTH])
    places = table[at, T_OFFSET]
    return [pair for pair in zip((places + begin).tolist(), (places + end).tolist(), strict=True) if pair[0] < pair[1]]
