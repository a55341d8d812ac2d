"""Which connection does a queue pair belong to? From packets to (sender, receiver, channel).

A queue pair's addresses give the two nodes, the CTS entries that announce its messages the sender's rank where a node
has several. What is left are the channels: connections of the same two ranks are made in the order of their channels,
so rising queue pair numbers are rising channels (docs/nccl.md). That is believed only if as many queue pairs show
messages as connections must have some, and every message seen fits; else one waits for more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reconstruct.nccl import state as n
from reconstruct.nccl.allowance import Allowance
from reconstruct.nccl.blueprint import SURE_MTU, Blueprint, Part
from reconstruct.nccl.group import Edge
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.schedule import base_step
from reconstruct.nccl.script import T_FINAL, T_FIRST, agree

__all__ = ["Bound", "Connection", "Fit", "Match", "Reader", "Use", "first_of"]

_MOST_WAYS = 2000
_MOST_FITS = 1024
_MOST_SLOTS = 256  # rows of places that are told apart before all of them are forgotten


@dataclass(slots=True, eq=False)
class Use:
    """One collective on one connection. number: messages before it since the group was added; base: its first step,
    certain only if `exact`."""

    tag: int
    blueprint: Blueprint
    part: Part
    meta: int
    number: int
    base: int
    exact: bool


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of the group. lanes: by queue pair; phase: queue pair of its first message; number, step: of the
    next message, the step certain only if `exact`."""

    edge: Edge
    uses: list[Use] = field(default_factory=list)
    lanes: dict[int, Lane] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    """By queue pair: uses that its lane has already."""
    phase: int = 0
    number: int = 0
    step: int = 0
    exact: bool = False
    announced: int = -1
    """Messages before the group's first, by the numbers of CTS entries; -1: not known."""

    def add(self, tag: int, blueprint: Blueprint, part: Part, meta: int) -> None:
        """The next collective."""
        base = int(base_step(part.row, self.step))
        self.uses.append(Use(tag, blueprint, part, meta, self.number, base, self.exact))
        self.number += part.messages
        self.step = base + blueprint.steps(part)

    def reached(self, pair: int) -> int:
        """Number of the first message behind the collectives that a queue pair's lane knows."""
        done = self.done.get(pair, 0)
        return self.uses[done].number if done < len(self.uses) else self.number

    def learn(self, lanes: Lanes) -> None:
        """Take over what flags have told of the newest collective's step."""
        if self.exact or not self.uses:
            return
        use = self.uses[-1]
        for lane in self.lanes.values():
            for entry in lane.entries:
                row = lanes.state.entries[entry.row]
                if entry.tag == use.tag and row[n.E_EXACT]:
                    self.exact = True
                    self.step = int(row[n.E_STEP]) + entry.steps
                    return

    def rewind(self, tag: int) -> None:
        """Forget the collectives from `tag` on."""
        for at, use in enumerate(self.uses):
            if use.tag >= tag:
                self.number, self.step, self.exact = use.number, use.base, use.exact
                del self.uses[at:]
                self.done = {pair: min(count, at) for pair, count in self.done.items()}
                return

    def retire(self, below: int) -> None:
        """Forget the collectives below `below` that every lane knows; the newest stays, for its step counter."""
        least = min(self.done.values(), default=0)
        gone = 0
        while gone < least - 1 and self.uses[gone].tag < below:
            gone += 1
        del self.uses[:gone]
        self.done = {pair: count - gone for pair, count in self.done.items()}


@dataclass(frozen=True, slots=True)
class Fit:
    """How the messages of a lane agree with a connection. matched: messages that speak for it; whole: all of the last
    collective's, or something behind them, were seen; began, later: when the first message of these collectives and
    the first behind them began, ns, 0 if none did; waiting: something needed is not known yet."""

    matched: int
    whole: bool
    began: int = 0
    later: int = 0
    given: int = 0
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """How lanes without a place agree with connections without lanes. places: [] while they are not certain; matched:
    how much speaks for the collectives; against: something speaks against them; fine: every lane can be of some
    connection; began, later, given, waiting: as in `Fit`, later for lanes that can be of none, too."""

    places: list[Bound]
    matched: int
    against: bool
    fine: bool
    began: int
    later: int
    given: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class Bound:
    """A lane's place."""

    lane: Lane
    connection: int
    pair: int
    phase: int


class _Row(NamedTuple):
    """How one lane agrees with places: by place (fit, phase), the fit of most messages, whether any waits; any: whether
    it agrees with one at all, also if the set-up named another."""

    fits: dict[int, tuple[Fit, int]]
    best: Fit | None
    waiting: bool
    any: bool


def first_of(times: Iterable[int]) -> int:
    """The earliest of times, of which 0 is none; 0 if all are none."""
    return min((time for time in times if time > 0), default=0)


def _given(seen: np.ndarray, table: np.ndarray, start: int) -> int:
    """Which of the messages seen is the last partial sum of a collective that begins at packet `start`; -1: none."""
    firsts = table[:, T_FIRST]
    low, high = np.searchsorted(seen[:, 0], (start, start + int(firsts[-1])))
    which = np.searchsorted(firsts[:-1], seen[low:high, 0] - start, "right") - 1
    partial = np.flatnonzero(table[which, T_FINAL] == 0)
    return int(low + partial[-1]) if len(partial) else -1


def _only_way(lanes: list[int], ends: list[tuple[int, int]], fits: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """The only way to give each place a lane, as (lane, place): between the same two ranks rising lanes have rising
    places, which are in order; [] if there are several ways or none, or too many to try.

    ends: (sender, receiver) of each place; fits: (lane, place) that agree.
    """
    found: list[list[tuple[int, int]]] = []
    tries = 0

    def extend(chosen: list[tuple[int, int]]) -> None:
        nonlocal tries
        tries += 1
        place = len(chosen)
        if place == len(ends):
            found.append(chosen)
            return
        used = {lane for lane, _ in chosen}
        low = max((lane for lane, at in chosen if ends[at] == ends[place]), default=-1)
        for lane in lanes:
            if lane > low and lane not in used and (lane, place) in fits and len(found) < 2 and tries < _MOST_WAYS:
                extend([*chosen, (lane, place)])

    extend([])
    return found[0] if len(found) == 1 and tries < _MOST_WAYS else []


class Reader:
    """Compares the kept messages of lanes with collectives."""

    def __init__(self, lanes: Lanes, pairs: int, split: bool, endian: int, allowance: Allowance) -> None:
        self.lanes, self.pairs, self.split, self.endian = lanes, pairs, split, endian
        self._allowance = allowance
        self._slots: dict[object, int] = {}
        self._numbered = 0
        self.apart: bool | None = None
        """Whether long messages have their immediate in a packet of its own; None while unknown."""
        self.mtu = 0
        """Path MTU of the group's queue pairs, 0 while unknown."""
        self.longest = 0
        """The longest message that was seen in one packet."""

    def table(self, use_part: Part, blueprint: Blueprint, lane: Lane, pair: int, number: int, base: int,
              apart: bool) -> np.ndarray | None:
        """Messages of a collective on a lane; None as long as the path MTU must be known first."""
        mtu = lane.mtu or self.mtu
        if not mtu:
            if use_part.largest > max(SURE_MTU, self.longest):
                return None
            mtu = 4096
        return blueprint.table(use_part, mtu, apart, self.pairs, self.split, pair, number, base)

    def seen(self, lane: Lane) -> np.ndarray:
        """int64[n, 3] as `script.agree` wants it, in the order of their packets."""
        found: np.ndarray | None = lane.fits.get(None)
        if found is None:
            rows = [(kept.first, kept.length, kept.imm) for kept in lane.queue]
            found = lane.fits[None] = np.array(rows, np.int64).reshape(len(rows), 3)
        return found

    def fit(self, lane: Lane, connection: Connection, pair: int, phase: int, extra: Blueprint | None,
            apart: bool) -> Fit | None:
        """How a lane agrees with a connection's collectives that it has not got yet, and `extra` behind them; None if
        it contradicts them."""
        start = int(self.lanes.state.lanes[lane.index, n.L_NEXT])
        left = tuple((use, use.blueprint) for use in connection.uses[connection.done.get(pair, 0) :])
        key = (
            start, left, connection, connection.number, connection.step, pair, phase, extra, apart, lane.mtu, self.mtu,
            self.longest,
        )  # fmt: skip
        if key not in lane.fits:
            self._make_room(lane)
            lane.fits[key] = self._fit(lane, connection, pair, phase, extra, apart)
        found: Fit | None = lane.fits[key]
        return found

    def _make_room(self, lane: Lane) -> None:
        if len(lane.fits) > _MOST_FITS:
            lane.fits.clear()

    def _fit(self, lane: Lane, connection: Connection, pair: int, phase: int, extra: Blueprint | None,
             apart: bool) -> Fit | None:
        seen = self.seen(lane)
        start = int(self.lanes.state.lanes[lane.index, n.L_NEXT])
        uses = [
            (use.part, use.blueprint, use.number, use.base) for use in connection.uses[connection.done.get(pair, 0) :]
        ]
        if extra is not None:
            part = extra.part(connection.edge)
            if part is not None:
                base = int(base_step(part.row, connection.step))
                uses.append((part, extra, connection.number, base))
        matched = given = 0
        whole = True
        for part, blueprint, number, base in uses:
            table = self.table(part, blueprint, lane, pair, number + phase, base, apart)
            if table is None:
                return Fit(matched, False, waiting=True)
            count = len(table) - 1
            if count == 0:
                continue
            mtu = lane.mtu or self.mtu or 4096
            fine, strong, met, behind = agree(
                table, start, mtu, seen, self.endian == n.BIG, self.endian != n.UNREAD
            )
            if not fine:
                return None
            matched += strong
            whole = met == count or behind > 0
            last = _given(seen, table, start) if blueprint is extra else -1
            given = lane.queue[last].time if last >= 0 else 0
            start += int(table[count, T_FIRST])
        at = bisect_left(lane.queue, start, key=lambda kept: kept.first)
        later = lane.queue[at].time if at < len(lane.queue) else 0
        return Fit(matched, whole, lane.queue[0].time if at else 0, later, given)

    def match(
        self, lanes: list[Lane], connections: dict[int, Connection], extra: Blueprint | None, apart: bool
    ) -> Match:
        """Where lanes that have no place belong, all between the same nodes, and from the same rank where that is
        known. connections: those without all their lanes, by number."""
        slots = [
            (number, pair)
            for number, connection in connections.items()
            for pair in range(self.pairs)
            if pair not in connection.lanes and self._sends(connection, pair, extra)
        ]
        lanes = sorted(lanes, key=lambda lane: lane.pair)
        rows = self._rows(lanes, slots, connections, extra, apart)
        if rows is None:
            return Match([], 0, False, True, 0, 0, 0, True)
        able = [at for at, row in enumerate(rows) if row.fits]
        fine = len(able) == len(lanes)
        if len(able) > len(slots):  # collectives follow one another: the others have carried something of a later one
            able = sorted(sorted(able, key=lambda at: lanes[at].queue[0].time)[: len(slots)])
        best = [fit for at in able if (fit := rows[at].best) is not None]
        waiting = any(row.waiting for row in rows)
        ranks = {self._ends(connections[number]) for number, _ in slots}
        places: list[Bound] = []
        if able and len(able) == len(slots) and not waiting:
            chosen = [(at, place) for place, at in enumerate(able)]
            if len(ranks) > 1:
                fits = {(at, place) for at in able for place in rows[at].fits}
                chosen = _only_way(able, [self._ends(connections[number]) for number, _ in slots], fits)
            if chosen and all(place in rows[at].fits and rows[at].fits[place][1] >= 0 for at, place in chosen):
                places = [Bound(lanes[at], *slots[place], rows[at].fits[place][1]) for at, place in chosen]
        others = set(range(len(lanes))).difference(able)
        return Match(
            places,
            sum(fit.matched for fit in best),
            len(able) < len(slots) <= len(lanes),  # every lane that there should be shows something, but not this
            fine,
            first_of(fit.began for fit in best),
            first_of([*(fit.later for fit in best), *(lanes[at].queue[0].time for at in others)]),
            max((fit.given for fit in best), default=0),
            waiting,
        )

    def _rows(self, lanes: list[Lane], slots: list[tuple[int, int]], connections: dict[int, Connection],
              extra: Blueprint | None, apart: bool) -> list[_Row] | None:
        """How each lane agrees with places (number of the connection, queue pair); None: not all can be told now.

        A row is made again only where the lane or one of the connections has changed.
        """
        state = tuple(
            (number, pair, c.phase, c.number, c.step, bool(c.lanes),
             tuple((use, use.blueprint) for use in c.uses[c.done.get(pair, 0) :]))
            for number, pair in slots
            for c in (connections[number],)
        )  # fmt: skip
        if state not in self._slots:
            if len(self._slots) > _MOST_SLOTS:
                self._slots.clear()
            self._slots[state] = self._numbered = self._numbered + 1
        rows: list[_Row] = []
        for lane in lanes:
            start = int(self.lanes.state.lanes[lane.index, n.L_NEXT])
            key = self._slots[state], extra, apart, start, lane.mtu, self.mtu, self.longest, lane.named
            row: _Row | None = lane.fits.get(key)
            if row is None:
                if not self._allowance.compare(len(slots)):
                    return None
                self._make_room(lane)
                row = lane.fits[key] = self._row(lane, slots, connections, extra, apart)
            rows.append(row)
        return rows

    def _row(self, lane: Lane, slots: list[tuple[int, int]], connections: dict[int, Connection],
             extra: Blueprint | None, apart: bool) -> _Row:
        found = {
            place: fit
            for place, (number, pair) in enumerate(slots)
            if (fit := self._phases(lane, connections[number], pair, extra, apart)) is not None
        }
        fits = {place: fit for place, fit in found.items() if lane.named in (-1, slots[place][0])}
        best = max((fit for fit, _ in fits.values()), key=lambda fit: fit.matched, default=None)
        return _Row(fits, best, any(fit.waiting for fit, _ in fits.values()), bool(found))

    @staticmethod
    def _ends(connection: Connection) -> tuple[int, int]:
        return connection.edge.sender, connection.edge.receiver

    def strange(self, lanes: list[Lane], connections: dict[int, Connection]) -> list[Lane]:
        """Lanes that contradict all connections that they could be of, each of which has carried something."""
        if not all(connection.uses for connection in connections.values()):
            return []
        slots = [(number, pair) for number, c in connections.items() for pair in range(self.pairs)
                 if pair not in c.lanes]  # fmt: skip
        for apart in (False, True) if self.apart is None else (self.apart,):
            rows = self._rows(lanes, slots, connections, None, apart)
            if rows is None:
                return []
            lanes = [lane for lane, row in zip(lanes, rows, strict=True) if not row.any]
        return lanes

    def _phases(self, lane: Lane, connection: Connection, pair: int, extra: Blueprint | None,
                apart: bool) -> tuple[Fit, int] | None:
        """(fit, phase); phase -1: several are possible."""
        known = bool(connection.lanes) or self.split or self.pairs == 1 or self._from_start(lane)
        phases = [connection.phase] if known else list(range(self.pairs))
        found = [(fit, p) for p in phases if (fit := self._fit(lane, connection, pair, p, extra, apart)) is not None]
        if not found:
            return None
        return found[0] if len(found) == 1 else (found[0][0], -1)

    def _from_start(self, lane: Lane) -> bool:
        return int(self.lanes.state.lanes[lane.index, n.L_NEXT]) & 0xFFFFFF == 0

    def _sends(self, connection: Connection, pair: int, extra: Blueprint | None) -> bool:
        """Whether a queue pair of a connection must have shown something by now."""
        count = sum(use.part.messages for use in connection.uses)
        part = extra.part(connection.edge) if extra is not None else None
        count += part.messages if part is not None else 0
        first = 0 if self.split else (pair - connection.phase) % self.pairs
        return count > first
