"""Which collective of unknown size explains the messages behind the boundary, on every connection at once."""

from __future__ import annotations

from dataclasses import dataclass

from reconstruct.nccl.allowance import Allowance
from reconstruct.nccl.binding import Connection, Fit, Reader, first_of
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.evidence import Evidence
from reconstruct.nccl.group import Edge, NcclGroup
from reconstruct.nccl.guess import Guess, Seen, guess
from reconstruct.nccl.judge import Judge
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE, BROADCAST, LL, LL128, RING, SIMPLE, SLOT_BYTES
from reconstruct.nccl.sights import Sight, Sights, in_order
from reconstruct.nccl.split import Collective

__all__ = ["Reading", "Recogniser"]

_GRAIN = {LL: (16, 8), LL128: (2048, 1920), SIMPLE: (1, 1)}  # bytes on the wire come in such units, of so much data
_LOOK = 512       # messages of a connection that are looked at
_MOST_USUAL = 8   # collectives that are tried before others because they were there before
_MOST_AHEAD = 3   # collectives without a name that are looked beyond
_MOST_GUESSES = 2  # calls of `guess` for what comes behind a collective
_MOST_PLANS = 3000, 1000  # that `guess` may make: for what is next, and for what comes behind
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


def _least_bytes(blueprint: Blueprint) -> int:
    """Fewest bytes of a copy of one message: its last unit may be filled."""
    size, unit = blueprint.size, _GRAIN[blueprint.call.protocol][1]
    return size if blueprint.call.kind != BROADCAST else max(1, size - unit + 1)


def _lengths(sights: list[Sight]) -> tuple[int, ...]:
    """How many messages each connection shows."""
    return tuple(len(sight.lengths) for sight in sights)


class Recogniser:
    """Reads collectives of which nobody has named the size."""

    def __init__(self, group: NcclGroup, judge: Judge, evidence: Evidence, sights: Sights, reader: Reader,
                 roster: Roster, allowance: Allowance) -> None:
        self.named: set[tuple[int, int]] = set()
        """(bytes, itemsize) of all-reduces that the planner has asked for."""
        self.searched = False
        """Whether `reading` has made a long search."""
        self.hopeless = False
        """Whether that search has shown that no single collective begins like what was seen."""
        self._history: list[Blueprint] = []
        self._guesses_left = 0
        self._group, self._judge, self._evidence = group, judge, evidence
        self._sights, self._reader, self._roster, self._allowance = sights, reader, roster, allowance

    def reading(self, grown: bool, quiet: bool, copies: int) -> Reading | None:
        """The one collective of unknown size that explains what follows the boundary, if it was seen whole. Searching
        long is worth it if there is much more than at the last search, and no usual one has just begun (grown), or
        if nothing more has come for long (quiet). copies: how many short broadcasts in a row are
        believed, DDP's two or the second of them; 0: none.

        Either no other is possible, or it is the one that leads to an all-reduce of a named size soonest: whatever is
        read wrongly shifts connections against each other, and no bucket fits behind it.
        """
        sights = self._sights.look()
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
            if any(self._takes(option, sights) == _lengths(sights) for option in options):
                return None  # what follows will tell
        if not (quiet or (grown and not self._begun(sights, start))) or not self._allowance.search():
            return None
        self.searched = True
        seen = [Seen(sight.edge, sight.lengths[:_LOOK], True) for sight in sights]
        guesses = self._guess(seen, _MOST_PLANS[0])
        self.hopeless = not guesses and not self._roster.loose()[0]
        options, open_ = [], False
        for one in guesses:
            if not one.used or not one.whole:
                open_ = True
            elif self._content(one.protocol, one.used, sights):
                found = self._blueprint(one, sights)
                if found is not None and in_order(found.blueprint, sights):
                    options.append(found)
        options.sort(key=lambda option: (option.kind != BROADCAST, option.kind != ALLREDUCE))
        if options and not open_ and len({self._takes(option, sights) for option in options}) == 1:
            return options[0]
        self._guesses_left = _MOST_GUESSES
        return self._leading(options, sights, start, 2)

    def _guess(self, seen: list[Seen], most: int) -> list[Guess]:
        return guess(self._judge.blueprints.comm, self._group, seen, most=most, made=self._allowance.planned)

    @property
    def over(self) -> bool:
        """Whether all that was seen may be a few usual collectives, and only what follows can tell."""
        sights = self._sights.look()
        return any(s.lengths for s in sights) and self._row(sights, (0,) * len(sights), _MOST_AHEAD)

    @property
    def gone(self) -> bool:
        """Whether no connection shows how what comes next begins: more than a message is lost on each."""
        lanes = [lane for lane in self._roster.lanes if lane.queue]
        return bool(lanes) and not self._roster.loose()[0] and not any(s.lengths for s in self._sights.look())

    def vanished(self) -> Reading | None:
        """A usual collective, or one of a named size, of which nothing was captured: the one that has just the packets
        that every connection lacks, if an all-reduce of a named size begins behind it.

        What it was does not matter, only that no other has these packets, and no two have them together.
        """
        shown = [
            (connection, pair, lane)
            for connection in self._roster.watched()
            for pair, lane in connection.lanes.items()
            if lane.queue
        ]
        sights = self._sights.look()
        start = (0,) * len(sights)
        named = [made for size in sorted(self.named) for made in self._judge.blueprints.reductions(*size)]
        missing = tuple(lane.queue[0].first - self._sights.start(c, pair, None) for c, pair, lane in shown)
        packets: dict[tuple[int, ...], list[Blueprint]] = {}
        for made in dict.fromkeys([*self._usual(sights, start), *named]):
            each = tuple(self._sights.start(c, pair, made) - self._sights.start(c, pair, None) for c, pair, _ in shown)
            packets.setdefault(each, []).append(made)
        if any(tuple(a + b for a, b in zip(one, two, strict=True)) == missing for one in packets for two in packets):
            return None
        found = packets.get(missing, [])
        if len({tuple(self._used(made)) for made in found}) != 1:
            return None
        behind = self._sights.look(found[0])
        if not any(self._begins(blueprint, behind, start, True) for blueprint in named):
            return None
        return Reading(found[0].call.kind, _least_bytes(found[0]), found[0], bool(self._reader.apart))

    def _used(self, blueprint: Blueprint) -> list[int]:
        """Messages of a collective on each connection."""
        parts = [blueprint.part(connection.edge) for connection in self._roster.watched()]
        return [0 if part is None else part.messages for part in parts]

    def remember(self, blueprint: Blueprint) -> None:
        """A collective of no named size was recognised: it may come again."""
        if blueprint not in self._history:
            self._history = [blueprint, *self._history[: _MOST_USUAL - 1]]

    def _usual(self, sights: list[Sight], start: tuple[int, ...]) -> list[Blueprint]:
        """Barriers, short broadcasts from rank 0, and what was there before."""
        calls = [
            Collective(ALLREDUCE, algorithm, protocol, 1, 4)
            for algorithm in self._group.algorithms
            for protocol in self._group.protocols
        ]
        known = [made for made in map(self._judge.blueprints.get, calls) if made is not None]
        known += self._copies(sights, start)
        return [*known, *(made for made in self._history if made not in known)]

    def _whole(self, sights: list[Sight], start: tuple[int, ...]) -> list[Reading]:
        """The usual ones that fit whole."""
        return [
            Reading(made.call.kind, _least_bytes(made), made, bool(self._reader.apart))
            for made in self._usual(sights, start)
            if self._fits_whole(made, sights, start)
        ]

    def _row(self, sights: list[Sight], start: tuple[int, ...], most: int) -> bool:
        """Whether a few usual ones in a row end where what was seen ends."""
        if start == _lengths(sights):
            return True
        rows = [self._takes(option, sights) for option in self._whole(sights, start)] if most else []
        return any(self._row(sights, tuple(a + b for a, b in zip(start, row, strict=True)), most - 1) for row in rows)

    def _begun(self, sights: list[Sight], start: tuple[int, ...]) -> bool:
        """Whether everything seen can be the beginning of a usual one, and more of it must come."""
        for made in self._usual(sights, start):
            parts = [(made.part(sight.edge), sight.lengths) for sight in sights]
            if any(part is None and lengths for part, lengths in parts):
                continue
            pairs = [(part.wires, lengths) for part, lengths in parts if part is not None]
            if all(a in (-1, b) for wires, lengths in pairs for a, b in zip(lengths, wires, strict=False)):
                return any(len(lengths) < len(wires) for wires, lengths in pairs)
        return False

    def _copied(self, options: list[Reading], sights: list[Sight], count: int) -> Reading | None:
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

    def _after(self, sights: list[Sight], reach: tuple[int, ...]) -> bool:
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

    def _copies(self, sights: list[Sight], start: tuple[int, ...]) -> list[Blueprint]:
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
        return [made for call in calls if (made := self._judge.blueprints.get(call, 0)) is not None]

    def _fits_whole(self, blueprint: Blueprint, sights: list[Sight], start: tuple[int, ...]) -> bool:
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
        return in_order(blueprint, sights) and self._content(blueprint.call.protocol, used, sights)

    def _passed(self, connection: Connection, blueprint: Blueprint) -> bool:
        """Whether all lanes of a connection, of which messages are missing, are beyond a collective."""
        fits = self._lane_fits(connection, blueprint)
        return bool(fits) and all(fit is not None and fit.later for fit in fits)

    def _allowed(self, connection: Connection, blueprint: Blueprint) -> bool:
        """Whether no lane of a connection contradicts that a collective comes next."""
        return all(fit is not None for fit in self._lane_fits(connection, blueprint))

    def _lane_fits(self, connection: Connection, blueprint: Blueprint) -> list[Fit | None]:
        return [
            self._reader.fit(lane, connection, pair, connection.phase, blueprint, bool(self._reader.apart))
            for pair, lane in connection.lanes.items()
        ]

    def _takes(self, option: Reading, sights: list[Sight]) -> tuple[int, ...]:
        parts = [option.blueprint.part(sight.edge) for sight in sights]
        return tuple(0 if part is None else part.messages for part in parts)

    def _leading(
        self, options: list[Reading], sights: list[Sight], start: tuple[int, ...], depth: int
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

    def _distance(self, sights: list[Sight], start: tuple[int, ...], depth: int) -> int | None:
        """Collectives between `start` and an all-reduce of a named size; None if more than `depth`."""
        sizes = [made for size in self.named for made in self._judge.blueprints.reductions(*size)]
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
                for one in self._guess(rest, _MOST_PLANS[1])
                if one.used and one.whole
            ]
        found = []
        for takes in dict.fromkeys(ways):
            far = self._distance(sights, tuple(a + b for a, b in zip(start, takes, strict=True)), depth - 1)
            found += [] if far is None else [far + 1]
        return min(found, default=None)

    def _begins(
        self, blueprint: Blueprint, sights: list[Sight], start: tuple[int, ...], unseen: bool = False
    ) -> bool:
        """Whether an all-reduce fits from `start` on, and something speaks for it; nothing else may begin before.
        unseen: the sights begin behind a collective of which nothing was seen."""
        began: list[int] = []
        later: list[int] = []
        speaks = False
        for sight, at in zip(sights, start, strict=True):
            part = blueprint.part(sight.edge)
            for a, b in zip(sight.lengths[at:], part.wires if part is not None else (), strict=False):
                if a not in (-1, b):
                    return False
                speaks = speaks or a > 0
            if at == 0 and not unseen and not self._allowed(sight.connection, blueprint):
                return False  # also by what lies beyond a gap
            first = sight.starts[at] if at < len(sight.starts) else None
            if first is not None:
                (later if part is None else began).append(first[1].time)
        return speaks and not 0 < first_of(later) < first_of(began)

    def _blueprint(self, one: Guess, sights: list[Sight]) -> Reading | None:
        """A collective that has the messages of a guess."""
        call = Collective(one.kind, one.algorithm, one.protocol, -(-one.bytes // one.itemsize), one.itemsize)
        roots = range(self._group.world_size) if one.kind == BROADCAST and one.root < 0 else [one.root]
        wanted = tuple(one.used.get(sight.edge, 0) for sight in sights)
        for root in roots:
            blueprint = self._judge.blueprints.get(call, root)
            for apart in self._judge.aparts if blueprint is not None else ():
                assert blueprint is not None
                found = Reading(one.kind, one.least, blueprint, apart)
                if self._takes(found, sights) == wanted and self._judge.verdict(blueprint, apart) is not None:
                    return found
        return None

    def _content(self, protocol: int, takes: dict[Edge, int], sights: list[Sight]) -> bool:
        """Whether announcements and flags allow the protocol."""
        for sight in sights:
            count = min(takes.get(sight.edge, 0), _OWN_WORDS)
            for index in range(min(count, len(sight.starts))):
                start = sight.starts[index]
                if start is not None and not self._evidence.allows(*start, protocol, index, sight.connection):
                    return False
        return True
