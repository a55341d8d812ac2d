"""Which collective explains the messages behind the boundary, on every connection of a communicator at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from mirror.memory import address_of
from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Connection, Reader, first_of
from reconstruct.nccl.blueprint import Blueprint, Blueprints
from reconstruct.nccl.group import Edge, NcclGroup
from reconstruct.nccl.guess import Guess, Seen, guess
from reconstruct.nccl.holdings import Kept
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.payload import formats, read_flag
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE, BROADCAST, LL, LL128, RING, SIMPLE, SLOT_BYTES
from reconstruct.nccl.script import AR_THRESHOLD, NO_IMMEDIATE, T_WIRE
from reconstruct.nccl.split import Collective

__all__ = ["Reading", "Recogniser"]

SMALL = 65536
"""Bytes up to which an all-reduce is only believed when it was seen whole: many small things begin alike."""
_ROOM = {SLOT_BYTES[LL]: LL, SLOT_BYTES[LL128]: LL128, SLOT_BYTES[SIMPLE]: SIMPLE, 2 * SLOT_BYTES[SIMPLE]: SIMPLE}
_GRAIN = {LL: (16, 8), LL128: (2048, 1920), SIMPLE: (1, 1)}  # bytes on the wire come in such units, of so much data
_LOOK = 512       # messages of a connection that are looked at
_MOST_USUAL = 8   # collectives that are tried before others because they were there before
_MOST_AHEAD = 3   # collectives without a name that are looked beyond
_MOST_GUESSES = 2  # calls of `guess` for what comes behind a collective
_MANY_FLAGS = 256  # bytes from which on equal words where flags would be are flags, whatever their value
_OWN_WORDS = 4    # messages of a connection whose content is looked at


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A collective of unknown size. least: fewest bytes that it can have (the blueprint has the most); apart: whether
    long messages have their immediates apart."""

    kind: int
    least: int
    blueprint: Blueprint
    apart: bool
    copied: bool = False
    """It was taken for one of the two broadcasts of DDP's layout, for no other reason."""


@dataclass(slots=True, eq=False)
class _Sight:
    """What a connection shows behind the boundary: whole messages in order; the kept ones that they begin with."""

    edge: Edge
    lengths: tuple[int, ...]
    starts: list[tuple[Lane, Kept] | None]
    connection: Connection


def least_bytes(blueprint: Blueprint) -> int:
    """Fewest bytes of a copy of one message: its last unit may be filled."""
    size, unit = blueprint.size, _GRAIN[blueprint.call.protocol][1]
    return size if blueprint.call.kind != BROADCAST else max(1, size - unit + 1)


class Recogniser:
    """Judges collectives by the kept messages of all lanes."""

    def __init__(self, group: NcclGroup, roster: Roster, reader: Reader, lanes: Lanes) -> None:
        self.blueprints = Blueprints(group)
        self.named: set[tuple[int, int]] = set()
        """(bytes, itemsize) of all-reduces that the planner has asked for."""
        self.searched = False
        """Whether `reading` has made a long search."""
        self._history: list[Blueprint] = []
        self._guesses_left = 0
        self._group, self._roster, self._reader, self._lanes = group, roster, reader, lanes

    @property
    def _aparts(self) -> tuple[bool, ...]:
        return (False, True) if self._reader.apart is None else (self._reader.apart,)

    # Known sizes

    def choose(self, blueprints: Iterable[Blueprint], whole: bool = False) -> tuple[list[tuple[Blueprint, bool]], bool]:
        """(what the next collective is, with whether immediates come apart; whether anything may still fit). Several
        only where they look the same and all of it was seen; [] while it is not certain. whole: it must have been
        seen whole."""
        found: list[tuple[Blueprint, bool]] = []
        waiting = False
        for blueprint in blueprints:
            for apart in self._aparts:
                verdict = self.judge(blueprint, apart, whole)
                if verdict:
                    found.append((blueprint, apart))
                elif verdict is not None:
                    waiting = True
        if len(found) > 1 and not any(self.long(blueprint) for blueprint, _ in found):
            found = [one for one in found if one[1] == found[0][1]]  # no message is long enough for the difference
        if waiting or not found:
            return [], waiting
        first, apart = found[0]
        if len(found) == 1 or (
            all(other == apart and self.same_messages(first, blueprint) for blueprint, other in found[1:])
            and self._over(first, apart)
        ):
            return found, True
        return [], True

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
        return any(self.judge(blueprint, apart) is not None for blueprint in blueprints for apart in self._aparts)

    def long(self, blueprint: Blueprint) -> bool:
        """Whether it has messages whose immediate may come apart."""
        parts = [blueprint.part(connection.edge) for connection in self._roster.watched()]
        return any(part is not None and part.largest > AR_THRESHOLD for part in parts)

    def judge(self, blueprint: Blueprint, apart: bool, seen_whole: bool = False) -> bool | None:
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
                if carries and not self._begins_as(lane, connection, pair, blueprint):
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
            if match.against or not self._loose_begin_as(lanes, connections.values(), blueprint):
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
        small = seen_whole or blueprint.size <= SMALL
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
                if tables[0] is None or tables[1] is None:
                    return False
                if not np.array_equal(tables[0][:, T_WIRE], tables[1][:, T_WIRE]):
                    return False
        return True

    # Unknown sizes

    def reading(self, grown: bool, quiet: bool, copies: int) -> Reading | None:
        """The one collective of unknown size that explains what follows the boundary, if it was seen whole. Searching
        long is worth it if there is much more than at the last search, and no usual one has just begun (grown), or
        if nothing more has come for long (quiet). copies: how many short broadcasts in a row are
        believed, DDP's two or the second of them; 0: none.

        Either no other is possible, or it is the one that leads to an all-reduce of a named size soonest: whatever is
        read wrongly shifts connections against each other, and no bucket fits behind it.
        """
        sights = self._sights()
        if not any(sight.lengths for sight in sights):
            return None
        start = (0,) * len(sights)
        self._guesses_left = 0
        options = self._whole(sights, start)
        if options:
            chosen = self._leading(options, sights, start, _MOST_AHEAD)
            if chosen is not None:
                return chosen
            chosen = self._copied(options, sights, copies) if copies else None
            if chosen is not None:
                return chosen
            if any(self._takes(option, sights) == tuple(len(s.lengths) for s in sights) for option in options):
                return None  # what follows will tell
        if not (quiet or (grown and not self._begun(sights, start))):
            return None
        self.searched = True
        guesses = guess(self.blueprints.comm, self._group, [Seen(s.edge, s.lengths[:_LOOK], True) for s in sights])
        options, open_ = [], False
        for one in guesses:
            if not one.used or not one.whole:
                open_ = True
            elif self._content(one.protocol, one.used, sights):
                found = self._blueprint(one, sights)
                if found is not None and self._in_order(found.blueprint, sights):
                    options.append(found)
        options.sort(key=lambda option: (option.kind != BROADCAST, option.kind != ALLREDUCE))
        if options and not open_ and len({self._takes(option, sights) for option in options}) == 1:
            return options[0]
        self._guesses_left = _MOST_GUESSES
        return self._leading(options, sights, start, 2)

    def remember(self, blueprint: Blueprint) -> None:
        """A collective of no named size was recognised: it may come again."""
        if blueprint not in self._history:
            self._history = [blueprint, *self._history[: _MOST_USUAL - 1]]

    def _usual(self, sights: list[_Sight], start: tuple[int, ...]) -> list[Blueprint]:
        """Barriers, short broadcasts from rank 0, and what was there before."""
        calls = [
            Collective(ALLREDUCE, algorithm, protocol, 1, 4)
            for algorithm in self._group.algorithms
            for protocol in self._group.protocols
        ]
        known = [made for made in map(self.blueprints.get, calls) if made is not None]
        known += self._copies(sights, start)
        return [*known, *(made for made in self._history if made not in known)]

    def _whole(self, sights: list[_Sight], start: tuple[int, ...]) -> list[Reading]:
        """The usual ones that fit whole."""
        return [
            Reading(made.call.kind, least_bytes(made), made, bool(self._reader.apart))
            for made in self._usual(sights, start)
            if self._fits_whole(made, sights, start)
        ]

    def _begun(self, sights: list[_Sight], start: tuple[int, ...]) -> bool:
        """Whether everything seen can be the beginning of a usual one, and more of it must come."""
        for made in self._usual(sights, start):
            parts = [(made.part(sight.edge), sight.lengths) for sight in sights]
            if any(part is None and lengths for part, lengths in parts):
                continue
            pairs = [(part.wires, lengths) for part, lengths in parts if part is not None]
            if all(a in (-1, b) for wires, lengths in pairs for a, b in zip(lengths, wires, strict=False)):
                return any(len(lengths) < len(wires) for wires, lengths in pairs)
        return False

    def _copied(self, options: list[Reading], sights: list[_Sight], count: int) -> Reading | None:
        """The first of `count` short broadcasts in a row, as DDP makes them, if that is the only way to read them."""
        found: dict[tuple[object, ...], Reading] = {}
        for first in options:
            row, reach = [first.blueprint], self._takes(first, sights)
            while len(row) < count:
                behind = [one for one in self._whole(sights, reach) if one.kind == BROADCAST]
                if len(behind) != 1:
                    break
                row.append(behind[0].blueprint)
                reach = tuple(a + b for a, b in zip(reach, self._takes(behind[0], sights), strict=True))
            if len(row) == count and all(one.call.kind == BROADCAST for one in row) and self._after(sights, reach):
                key = first.blueprint.call.protocol, self._takes(first, sights)
                found[key] = Reading(first.kind, first.least, first.blueprint, first.apart, True)
        return next(iter(found.values())) if len(found) == 1 else None

    def _after(self, sights: list[_Sight], reach: tuple[int, ...]) -> bool:
        """Whether what lies beyond `reach` was sent after its sender had got what lies before: of one all-reduce that
        is read as several broadcasts the ranks send parts to each other, in turn."""
        got: dict[int, int] = {}
        for sight, at in zip(sights, reach, strict=True):
            times = [start[1].time for start in sight.starts[:at] if start is not None]
            if not all(times):
                return False  # its messages were seen before, when they were taken for something else
            got[sight.edge.receiver] = max([got.get(sight.edge.receiver, 0), *times])
        for sight, at in zip(sights, reach, strict=True):
            start = sight.starts[at] if at < len(sight.starts) else None
            if start is not None and start[1].time < got.get(sight.edge.sender, 0):
                return False
        return True

    def _copies(self, sights: list[_Sight], start: tuple[int, ...]) -> list[Blueprint]:
        """Broadcasts from rank 0 of one message that is not full, as DDP's are, by the messages from `start` on."""
        firsts = {
            sight.lengths[at]
            for sight, at in zip(sights, start, strict=True)
            if sight.edge.ring and sight.edge.receiver != 0 and at < len(sight.lengths)
        }
        calls = [
            Collective(BROADCAST, RING, protocol, wire // _GRAIN[protocol][0] * _GRAIN[protocol][1], 1)
            for wire in sorted(firsts)
            for protocol in self._group.protocols
            if 0 < wire < SLOT_BYTES[protocol] and wire % _GRAIN[protocol][0] == 0
        ]
        return [made for call in calls if (made := self.blueprints.get(call, 0)) is not None]

    def _fits_whole(self, blueprint: Blueprint, sights: list[_Sight], start: tuple[int, ...]) -> bool:
        """Whether all messages of a collective are behind `start`. Lost ones are not missed where it is certain, by
        packet numbers, that others follow."""
        used = {}
        for sight, at in zip(sights, start, strict=True):
            part = blueprint.part(sight.edge)
            if part is None:
                continue
            lengths = sight.lengths[at : at + part.messages]
            if any(a not in (-1, b) for a, b in zip(lengths, part.wires, strict=False)):
                return False
            if len(lengths) == part.messages:
                used[sight.edge] = part.messages
            elif any(start) or not self._passed(sight.connection, blueprint):
                return False
        if not used or any(start):
            return bool(used)
        return self._in_order(blueprint, sights) and self._content(blueprint.call.protocol, used, sights)

    def _passed(self, connection: Connection, blueprint: Blueprint) -> bool:
        """Whether all lanes of a connection, of which messages are missing, are beyond a collective."""
        fits = [
            self._reader.fit(lane, connection, pair, connection.phase, blueprint, bool(self._reader.apart))
            for pair, lane in connection.lanes.items()
        ]
        return bool(fits) and all(fit is not None and fit.later for fit in fits)

    def _takes(self, option: Reading, sights: list[_Sight]) -> tuple[int, ...]:
        parts = [option.blueprint.part(sight.edge) for sight in sights]
        return tuple(0 if part is None else part.messages for part in parts)

    def _leading(
        self, options: list[Reading], sights: list[_Sight], start: tuple[int, ...], depth: int
    ) -> Reading | None:
        """The only option behind which a named size comes soonest; None if several do, or none."""
        if not self.named:
            return None
        best: dict[int, dict[tuple[object, ...], Reading]] = {}
        for option in options:
            takes = self._takes(option, sights)
            far = self._distance(sights, tuple(a + b for a, b in zip(start, takes, strict=True)), depth)
            if far is not None:
                best.setdefault(far, {}).setdefault((option.blueprint.call.protocol, takes), option)
        nearest = best[min(best)] if best else {}
        return next(iter(nearest.values())) if len(nearest) == 1 else None

    def _distance(self, sights: list[_Sight], start: tuple[int, ...], depth: int) -> int | None:
        """Collectives between `start` and an all-reduce of a named size; None if more than `depth`."""
        sizes = [made for size in self.named for made in self.blueprints.reductions(*size)]
        if any(self._begins(blueprint, sights, start) for blueprint in sizes):
            return 0
        if depth == 0:
            return None
        ways = [self._takes(option, sights) for option in self._whole(sights, start)]
        if self._guesses_left > 0:
            self._guesses_left -= 1
            rest = [Seen(s.edge, s.lengths[at : at + _LOOK], True) for s, at in zip(sights, start, strict=True)]
            ways += [
                tuple(one.used.get(sight.edge, 0) for sight in sights)
                for one in guess(self.blueprints.comm, self._group, rest)
                if one.used and one.whole
            ]
        found = []
        for takes in dict.fromkeys(ways):
            far = self._distance(sights, tuple(a + b for a, b in zip(start, takes, strict=True)), depth - 1)
            found += [] if far is None else [far + 1]
        return min(found, default=None)

    def _begins(self, blueprint: Blueprint, sights: list[_Sight], start: tuple[int, ...]) -> bool:
        """Whether an all-reduce fits from `start` on, and something speaks for it; nothing else may begin before."""
        began: list[int] = []
        later: list[int] = []
        speaks = False
        for sight, at in zip(sights, start, strict=True):
            part = blueprint.part(sight.edge)
            for a, b in zip(sight.lengths[at:], part.wires if part is not None else (), strict=False):
                if a not in (-1, b):
                    return False
                speaks = speaks or a > 0
            first = sight.starts[at] if at < len(sight.starts) else None
            if first is not None:
                (later if part is None else began).append(first[1].time)
        return speaks and not 0 < first_of(later) < first_of(began)

    def _blueprint(self, one: Guess, sights: list[_Sight]) -> Reading | None:
        """A collective that has the messages of a guess."""
        call = Collective(one.kind, one.algorithm, one.protocol, -(-one.bytes // one.itemsize), one.itemsize)
        roots = range(self._group.world_size) if one.kind == BROADCAST and one.root < 0 else [one.root]
        wanted = tuple(one.used.get(sight.edge, 0) for sight in sights)
        for root in roots:
            blueprint = self.blueprints.get(call, root)
            for apart in self._aparts if blueprint is not None else ():
                assert blueprint is not None
                found = Reading(one.kind, one.least, blueprint, apart)
                if self._takes(found, sights) == wanted and self.judge(blueprint, apart) is not None:
                    return found
        return None

    def _in_order(self, blueprint: Blueprint, sights: list[_Sight]) -> bool:
        """Whether no rank sends something of a later collective before it got what it needs of this one, and none
        before all have given their part of an all-reduce."""
        got: dict[int, int] = {}
        given = 0
        next_: list[tuple[int, int]] = []
        for sight in sights:
            part = blueprint.part(sight.edge)
            used = 0 if part is None else part.messages
            times = [0 if start is None else start[1].time for start in sight.starts[: used + 1]]
            if 0 < used <= len(times):
                got[sight.edge.receiver] = max(got.get(sight.edge.receiver, 0), times[used - 1])
            if used < len(times):
                next_.append((times[used], sight.edge.sender))
            if part is not None and blueprint.call.kind == ALLREDUCE:
                final = part.places[:, 6]
                given = max([given, *(time for k, time in enumerate(times[:used]) if not final[k])])
        return not any(0 < time < max(given, got.get(sender, 0)) for time, sender in next_)

    def _content(self, protocol: int, takes: dict[Edge, int], sights: list[_Sight]) -> bool:
        """Whether announcements and flags allow the protocol."""
        for sight in sights:
            count = min(takes.get(sight.edge, 0), _OWN_WORDS)
            for index in range(min(count, len(sight.starts))):
                start = sight.starts[index]
                if start is not None and not self._allows(*start, protocol, index, sight.connection):
                    return False
        return True

    def _begins_as(self, lane: Lane, connection: Connection, pair: int, blueprint: Blueprint) -> bool:
        """Whether the first message of a lane behind the boundary can be one of a collective's protocol."""
        boundary = int(self._lanes.state.lanes[lane.index, n.L_NEXT])
        if connection.done[pair] < len(connection.uses) or not lane.queue or lane.queue[0].first != boundary:
            return True
        index = 0 if self._reader.split else (pair - connection.phase - connection.number) % self._reader.pairs
        part = blueprint.part(connection.edge)
        if part is None or index >= part.messages:
            return True
        return self._allows(lane, lane.queue[0], blueprint.call.protocol, index, connection)

    def _loose_begin_as(self, lanes: list[Lane], connections: Collection[Connection], blueprint: Blueprint) -> bool:
        """The same of lanes without a place, where all that they can be of carry nothing before it."""
        if any(c.uses or c.lanes or blueprint.part(c.edge) is None for c in connections):
            return True
        if len(lanes) > len(connections) * self._reader.pairs:
            return True
        protocol = blueprint.call.protocol
        return all(self._allows(lane, lane.queue[0], protocol, 0, None) for lane in lanes)

    def _allows(self, lane: Lane, kept: Kept, protocol: int, index: int, connection: Connection | None) -> bool:
        """Whether announcement and content of a message allow a protocol. connection: None if not certain."""
        room = self._roster.announced(lane, kept)[1]
        if room in _ROOM:
            return _ROOM[room] == protocol
        store = kept.store
        if kept.length <= 0 or store is None or store.covered != kept.length or kept.length != store.size:
            return True
        allowed = int(formats(address_of(store.data), kept.length))
        exact = connection is not None and connection.exact
        for flagged in (LL, LL128):
            if allowed >> flagged & 1 and connection is not None and exact:
                wanted = connection.step + index + 1
                found = int(read_flag(flagged, address_of(store.data)))
                if found != (wanted & 0xFFFFFFFF if flagged == LL else wanted):
                    allowed &= ~(1 << flagged)
        if allowed != 1 << SIMPLE and (exact or kept.length >= _MANY_FLAGS):
            allowed &= ~(1 << SIMPLE)  # flags where flags would be
        return bool(allowed >> protocol & 1)

    def _sights(self) -> list[_Sight]:
        """The whole messages behind the boundary, of every connection that is watched."""
        result = []
        pairs = self._group.qps
        for connection in self._roster.watched():
            if connection.lanes and all(connection.done[pair] == len(connection.uses) for pair in connection.lanes):
                lanes = [connection.lanes.get(pair) for pair in range(pairs)]
                if None in lanes:
                    self._complete(connection, lanes)
                result.append(self._sight(connection, lanes, (connection.phase + connection.number) % pairs))
        for loose, numbers in self._roster.loose()[0]:
            if len(loose) <= len(numbers) * pairs:
                ordered = sorted(loose, key=lambda lane: lane.pair)
                for at, number in enumerate(numbers[: -(-len(loose) // pairs)]):
                    connection = self._roster.connections[number]
                    if not connection.lanes and not connection.uses:
                        mine: list[Lane | None] = [*ordered[at * pairs : (at + 1) * pairs]]
                        result.append(self._sight(connection, mine + [None] * (pairs - len(mine)), 0))
        return result

    def _complete(self, connection: Connection, lanes: list[Lane | None]) -> None:
        """Fill in the queue pairs of a connection that have no place yet, where no other connection can have them."""
        for loose, numbers in self._roster.loose()[0]:
            mine = [self._roster.connections[number] for number in numbers]
            missing = [pair for pair, lane in enumerate(lanes) if lane is None]
            others = [c for c in mine if c is not connection and (c.lanes or c.uses)]
            if connection in mine and not others and len(loose) <= len(missing):
                for pair, lane in zip(missing, sorted(loose, key=lambda lane: lane.pair), strict=False):
                    lanes[pair] = lane

    def _sight(self, connection: Connection, lanes: list[Lane | None], phase: int) -> _Sight:
        """The messages of a connection, as far as no more than single packets are missing."""
        each = [self._messages(lane) if lane is not None else [] for lane in lanes]
        found = each[0]
        if len(each) > 1 and self._reader.split:
            found = [
                (-1 if min(size for size, _ in pieces) < 0 else sum(size for size, _ in pieces), pieces[0][1])
                for pieces in zip(*each, strict=False)
            ]
        elif len(each) > 1:
            found, at = [], [0] * len(each)
            while at[phase] < len(each[phase]):
                found.append(each[phase][at[phase]])
                at[phase] += 1
                phase = (phase + 1) % len(each)
        return _Sight(connection.edge, tuple(size for size, _ in found), [start for _, start in found], connection)

    def _messages(self, lane: Lane) -> list[tuple[int, tuple[Lane, Kept] | None]]:
        """(wire length, first kept message) of the messages of a lane; -1, None for one that is missing."""
        result: list[tuple[int, tuple[Lane, Kept] | None]] = []
        expected = int(self._lanes.state.lanes[lane.index, n.L_NEXT])
        parts = -1  # bytes of a message that comes in packets of their own
        begun: Kept | None = None
        for kept in lane.queue:
            if kept.first == expected + 1 and parts < 0:
                result.append((-1, None))
            elif kept.first != expected:
                break
            if kept.length < 0:
                break
            expected = kept.first + kept.packets
            lone = kept.packets == 1 and kept.imm == NO_IMMEDIATE
            if parts >= 0 and (lone or kept.length == 0):
                parts += kept.length
                if not lone:
                    result.append((parts, None if begun is None else (lane, begun)))
                    parts = -1
            elif lone or (self._reader.apart and kept.length > AR_THRESHOLD):
                parts, begun = kept.length, kept
            else:
                result.append((kept.length, (lane, kept)))
        return result
