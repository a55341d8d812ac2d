"""Losses that took the start of a message on a link, and with it the places of what came behind: whatever that link
would have shown of the all-reduces under way may be missing for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from mirror.loss import Why
from reconstruct.decoder import ALLREDUCE
from reconstruct.gloo import state as g
from reconstruct.gloo.lanes import LaneTable, slot_of, split

__all__ = ["Blame"]

_MOST = 4096
_RECENT = 16  # tags behind the newest whose collectives may still be under way
_OPEN = (g.NONE, g.REDUCE, g.KEPT, g.COUNTED)


class Blame:
    """Losses of framing, by group."""

    def __init__(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        # number of the group -> (lane's uid, context, sender's rank, lowest tag that may lack messages, why)
        self._gaps: dict[int, deque[tuple[int, int, int, int, Why]]] = {}

    def gap(self, lane: int, why: Why) -> None:
        """Framing was lost on a lane: the collectives under way there, and any later one, may lack messages."""
        row, entries = self._lanes.state.lanes[lane], self._lanes.state.entries[lane]
        if row[g.GROUP] < 0:
            return
        newest = int(row[g.MAX_TAG])
        slots = map(split, entries[np.isin(entries[:, g.PLAN], _OPEN), g.SLOT].tolist())
        lowest = min((tag for kind, tag in slots if kind == ALLREDUCE and tag > newest - _RECENT), default=newest)
        sender = self._lanes.ranks(lane, ALLREDUCE)[0]
        gaps = self._gaps.setdefault(int(row[g.GROUP]), deque(maxlen=_MOST))
        gaps.append((int(row[g.UID]), int(row[g.CONTEXT]), sender, lowest, why))

    def newest(self, lane: int) -> Why | None:
        """Of the newest loss on a lane."""
        row = self._lanes.state.lanes[lane]
        gaps = reversed(self._gaps.get(int(row[g.GROUP]), ()))
        return next((why for uid, *_, why in gaps if uid == row[g.UID]), None)

    def of(self, number: int, context: int, tag: int) -> Iterator[tuple[int, Why]]:
        """(sender's rank, why) of the newest such loss on each link that has not shown all of an all-reduce since."""
        told = set()
        for uid, at, sender, lowest, why in reversed(self._gaps.get(number, ())):
            if at != context or lowest > tag or uid in told:
                continue
            told.add(uid)
            lane = self._lanes.with_uid(uid)
            entry = self._lanes.entry(lane, slot_of(ALLREDUCE, tag)) if lane >= 0 else None
            if entry is None or entry[g.PLAN] != g.DONE:
                yield sender, why

    def forget(self, number: int) -> None:
        """The group is followed no more."""
        self._gaps.pop(number, None)
