"""Whether a collective whose messages are planned explains what the lanes show behind the boundary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reconstruct.nccl.binding import Reader, first_of
from reconstruct.nccl.blueprint import Blueprint, Blueprints
from reconstruct.nccl.evidence import Evidence
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE
from reconstruct.nccl.script import AR_THRESHOLD, T_WIRE
from reconstruct.nccl.sights import Sights, in_order

__all__ = ["Judge"]

_SMALL = 65536  # bytes up to which an all-reduce is only believed when it was seen whole: many small things begin alike
_SHORT = 16384  # the same by its longest message: so long are copies, such as those of DDP's layout, too


class Judge:
    """Compares planned collectives with the kept messages of all lanes."""

    def __init__(
        self, group: NcclGroup, roster: Roster, reader: Reader, evidence: Evidence, sights: Sights
    ) -> None:
        self.blueprints = Blueprints(group)
        self._roster, self._reader, self._evidence, self._sights = roster, reader, evidence, sights

    @property
    def aparts(self) -> tuple[bool, ...]:
        """Whether long messages have their immediates apart: all that is possible."""
        return (False, True) if self._reader.apart is None else (self._reader.apart,)

    def choose(self, blueprints: Iterable[Blueprint], whole: bool = False) -> tuple[list[tuple[Blueprint, bool]], bool]:
        """(what the next collective is, with whether immediates come apart; whether anything may still fit). Several
        only where they look the same and all of it was seen; [] while it is not certain. whole: it must have been
        seen whole."""
        found: list[tuple[Blueprint, bool]] = []
        waiting = False
        for blueprint in blueprints:
            for apart in self.aparts:
                verdict = self.verdict(blueprint, apart, whole)
                if verdict:
                    found.append((blueprint, apart))
                elif verdict is not None:
                    waiting = True
        if len(found) > 1 and not any(self.long(blueprint) for blueprint, _ in found):
            found = [one for one in found if one[1] == found[0][1]]  # no message is long enough for the difference
        if waiting or not found:
            return [], waiting
        if len(found) > 1 and not self._alike(found):
            # What one takes for its end, the other for the beginning of the next: when it was sent tells.
            sights = self._sights.look()
            found = [one for one in found if in_order(one[0], sights)]
        if len(found) == 1 or (found and self._alike(found) and self._over(*found[0])):
            return found, True
        return [], True

    def _alike(self, found: list[tuple[Blueprint, bool]]) -> bool:
        """Whether all of them look the same."""
        first, apart = found[0]
        return all(other == apart and self.same_messages(first, blueprint) for blueprint, other in found[1:])

    def _over(self, blueprint: Blueprint, apart: bool) -> bool:
        """Whether every connection has shown all its messages of a collective, as far as they were captured."""
        where = [
            (lane, connection, pair, connection.phase)
            for connection in self._roster.watched()
            for pair, lane in connection.lanes.items()
        ]
        for lanes, numbers in self._roster.loose()[0]:
            connections = {number: self._roster.connections[number] for number in numbers}
            places = self._reader.match(lanes, connections, blueprint, apart).places
            if not places and any(blueprint.part(connection.edge) for connection in connections.values()):
                return False
            where += [(at.lane, connections[at.connection], at.pair, at.phase) for at in places]
        fits = [self._reader.fit(*place, blueprint, apart) for place in where]
        return all(fit is not None and fit.whole for fit in fits)

    def possible(self, blueprints: Iterable[Blueprint]) -> bool:
        """Whether any of them may be the next collective."""
        return any(self.verdict(blueprint, apart) is not None for blueprint in blueprints for apart in self.aparts)

    def long(self, blueprint: Blueprint) -> bool:
        """Whether it has messages whose immediate may come apart."""
        return self._longest(blueprint) > AR_THRESHOLD

    def _longest(self, blueprint: Blueprint) -> int:
        """Bytes on the wire of its longest message."""
        parts = [blueprint.part(connection.edge) for connection in self._roster.watched()]
        return max((part.largest for part in parts if part is not None), default=0)

    def verdict(self, blueprint: Blueprint, apart: bool, seen_whole: bool = False) -> bool | None:
        """Whether a collective explains what follows the boundary: None no, False not yet certain, True. seen_whole:
        it must have been seen whole, as all small ones must.

        No rank sends anything of a later collective before all have given their part of an all-reduce.
        """
        matched = 0
        whole = waiting = False
        all_shown = placed = True
        strange = False
        given = 0
        began: list[int] = []
        later: list[int] = []
        for connection in self._roster.watched():
            carries = blueprint.part(connection.edge) is not None
            for pair, lane in connection.lanes.items():
                fit = self._reader.fit(lane, connection, pair, connection.phase, blueprint, apart)
                if fit is None:
                    return None
                later.append(fit.later)
                if carries and not self._evidence.begins_as(lane, connection, pair, blueprint):
                    return None
                if carries:
                    matched += fit.matched
                    began.append(fit.began)
                    given = max(given, fit.given)
                    waiting = waiting or (fit.waiting and bool(lane.queue))
                    shown = bool(lane.queue) and not fit.waiting
                    whole = whole or (shown and fit.whole and fit.matched > 0)
                    all_shown = all_shown and shown
        for lanes, numbers in self._roster.loose()[0]:
            connections = {number: self._roster.connections[number] for number in numbers}
            match = self._reader.match(lanes, connections, blueprint, apart)
            if match.against or not self._evidence.loose_begin_as(lanes, connections.values(), blueprint):
                return None
            matched += match.matched
            began.append(match.began)
            given = max(given, match.given)
            later.append(match.later)
            waiting = waiting or match.waiting
            placed = placed and (match.fine or bool(match.places))
            strange = strange or not match.fine
            for place in match.places:
                connection = connections[place.connection]
                fit = self._reader.fit(place.lane, connection, place.pair, place.phase, blueprint, apart)
                whole = whole or (fit is not None and fit.whole and fit.matched > 0)
        if waiting or not matched:
            return None if strange and not waiting else False
        if blueprint.call.kind == ALLREDUCE and 0 < first_of(later) < max(given, first_of(began)):
            return None
        small = seen_whole or blueprint.size <= _SMALL or self._longest(blueprint) <= _SHORT
        return not small or (whole and all_shown and placed)

    def same_messages(self, one: Blueprint, other: Blueprint) -> bool:
        """Whether two collectives look the same on all connections that are watched."""
        if one.call.algorithm != other.call.algorithm or one.call.protocol != other.call.protocol:
            return False
        for connection in self._roster.watched():
            a, b = one.part(connection.edge), other.part(connection.edge)
            if (a is None) != (b is None):
                return False
            if a is not None and b is not None:
                tables = [x.table(y, 4096, False, 1, False, 0, 0, 0) for x, y in ((one, a), (other, b))]
                if not np.array_equal(tables[0][:, T_WIRE], tables[1][:, T_WIRE]):
                    return False
        return True
