"""The collectives of one communicator that are known, in their order, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reconstruct.decoder import (
    ALLREDUCE,
    BROADCAST,
    Conflict,
    Event,
    LinkLost,
    Message,
    Plan,
    Reduced,
)
from reconstruct.landing import Landing
from reconstruct.nccl import state as n
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.holdings import Holdings, Kept
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLGATHER
from reconstruct.nccl.schedule import ALLREDUCE as REDUCTION
from reconstruct.nccl.schedule import BROADCAST as COPY

__all__ = ["FAR", "KINDS", "Known", "Ledger"]

KINDS = {REDUCTION: ALLREDUCE, COPY: BROADCAST, ALLGATHER: 2}
"""The schedule's kinds -> those of `reconstruct.decoder.Request`."""
FAR = 16
"""Collectives that a lane must be ahead of one whose end it never showed; after so many a connection that showed
nothing is taken for one that the mirrors do not have."""


@dataclass(slots=True, eq=False)
class Known:
    """A decided collective. link: sender and receiver of a connection that shows it; since: an all-reduce: nothing of a
    later collective can have been sent before (ns)."""

    tag: int
    blueprint: Blueprint
    plan: Plan
    landing: Landing | None
    stash: list[tuple[Lane, Kept]] = field(default_factory=list)
    """An all-reduce planned RAW: its messages, until the size is known."""
    link: tuple[int, int] = (-1, -1)
    since: int = 0

    @property
    def reduction(self) -> bool:
        """Whether it is an all-reduce."""
        return self.blueprint.call.kind == REDUCTION


class Ledger:
    """Of one group. `events` are for the decoder to take."""

    def __init__(self, group: NcclGroup, sequence: int, roster: Roster, lanes: Lanes, held: Holdings) -> None:
        self.events: list[Event] = []
        self.first = self.tag = sequence
        """Of the first collective; of the next one that is not known yet."""
        self.known: dict[int, Known] = {}
        self.log: list[tuple[int, Blueprint, int]] = []
        """(tag, blueprint, address of its landing or 0) of everything since the group was added, for flows to come."""
        self.foreign: set[int] = set()
        """Tags that have proved to be no all-reduce of the planner's sizes."""
        self.lost: str | None = None
        """Why nothing is claimed any more."""
        self._largest: Blueprint | None = None  # of all all-reduces
        self._name, self._roster, self._lanes, self._held = group.name, roster, lanes, held

    def add(self, blueprint: Blueprint, plan: Plan, landing: Landing | None) -> Known:
        """The next collective."""
        known = self.known[self.tag] = Known(self.tag, blueprint, plan, landing)
        if known.reduction and (self._largest is None or self._largest.size < blueprint.size):
            self._largest = blueprint
        self.log.append((self.tag, blueprint, landing.address if landing is not None else 0))
        self.tag += 1
        return known

    def rewind(self, tag: int) -> None:
        """Forget everything from `tag` on."""
        self.known = {at: known for at, known in self.known.items() if at < tag}
        self.log = [item for item in self.log if item[0] < tag]
        self.tag = tag

    def say(self, tags: tuple[int, ...], reason: str, link: tuple[int, int] | None = None) -> None:
        """Report that what is seen of these tags cannot be used. link: where; None: anywhere."""
        links = [link] if link is not None else sorted(self._roster.links) or [(-1, -1)]
        self.events += [LinkLost(self._name, *one, tags, reason) for one in links]

    def landed(self, landing: Landing) -> None:
        """Every byte of a landing is there."""
        name = self._held.names.get(landing.ident)
        known = self.known.get(name[1]) if name is not None else None
        if name is None or known is None or not landing.complete:
            return
        if known.reduction:
            self.events.append(Reduced(*name, landing))
        else:
            kind = KINDS[known.blueprint.call.kind]
            self.events.append(Message(*name, kind, *known.link, 0, landing.size, landing.data, True))

    def conflicts(self, landing: Landing) -> None:
        """Two copies in a landing differ, or a flag was wrong."""
        name = self._held.names.get(landing.ident)
        if name is not None:
            for offset, length, sender in landing.untold_conflicts():
                self.events.append(Conflict(*name, offset, length, sender))

    def coverage(self) -> float:
        """What part of the largest all-reduce so far the connections seen so far show."""
        if self._largest is None:
            return 0.0
        parts = [self._largest.part(self._roster.connections[number].edge) for number in self._roster.showed]
        spans = [part.places[part.places[:, 6] > 0][:, 4:6] for part in parts if part is not None]
        pieces = np.concatenate([np.empty((0, 2), np.int64), *spans])
        pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
        ends = pieces[:, 0] + pieces[:, 1]
        reach = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
        return float(np.maximum(ends - np.maximum(pieces[:, 0], reach), 0).sum()) / self._largest.size

    def settled(self, tag: int, behind: int) -> bool:
        """Whether no lane can bring anything more of a collective; none does that has shown one from `behind` on."""
        if tag >= self.tag or self.lost is not None:
            return self.lost is not None
        entries = self._lanes.state.entries
        for connection in self._roster.watched():
            for pair, lane in connection.lanes.items():
                if any(use.tag <= tag for use in connection.uses[connection.done[pair] :]):
                    return False
                top = int(self._lanes.state.lanes[lane.index, n.L_TOP])
                for entry in lane.entries:
                    if entry.tag == tag and entries[entry.row, n.E_LEFT] > 0:
                        reached = max((e.tag for e in lane.entries if e.start < top), default=tag)
                        if reached < behind:
                            return False
        known = self.known.get(tag)
        if known is None or known.landing is None or known.landing.complete:
            return True
        if self.tag > behind or self.tag - self.first > FAR:
            return True
        return not any(  # at the start a connection may be new: what it brings of its first collective may come last
            number not in self._roster.showed and known.blueprint.part(connection.edge) is not None
            for number, connection in enumerate(self._roster.connections)
        )
