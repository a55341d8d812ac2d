"""What the connections of a communicator show behind the boundary, message by message."""

from __future__ import annotations

from dataclasses import dataclass

from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Connection, Reader
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.group import Edge
from reconstruct.nccl.holdings import Kept
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE, base_step
from reconstruct.nccl.script import AR_THRESHOLD, NO_IMMEDIATE, T_FIRST

__all__ = ["Sight", "Sights", "in_order"]


@dataclass(slots=True, eq=False)
class Sight:
    """What a connection shows behind the boundary: whole messages in order; the kept ones that they begin with."""

    edge: Edge
    lengths: tuple[int, ...]
    starts: list[tuple[Lane, Kept] | None]
    connection: Connection


def in_order(blueprint: Blueprint, sights: list[Sight]) -> bool:
    """Whether no rank sends something of a later collective before it got what it needs of this one, and none before
    all have given their part of an all-reduce."""
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


class Sights:
    """Puts the kept messages of a connection's queue pairs into their order."""

    def __init__(self, roster: Roster, reader: Reader, lanes: Lanes) -> None:
        self._roster, self._reader, self._lanes = roster, reader, lanes

    def look(self, behind: Blueprint | None = None) -> list[Sight]:
        """The whole messages behind the boundary, of every connection that is watched. behind: a collective to come
        first, of which nothing was seen."""
        result = []
        pairs = self._reader.pairs
        for connection in self._roster.watched():
            if connection.lanes and all(connection.done[pair] == len(connection.uses) for pair in connection.lanes):
                lanes = [connection.lanes.get(pair) for pair in range(pairs)]
                if None in lanes:
                    self._complete(connection, lanes)
                part = behind.part(connection.edge) if behind is not None else None
                number = connection.number + (part.messages if part is not None else 0)
                starts = [self.start(connection, pair, behind) for pair in range(pairs)]
                result.append(self._sight(connection, lanes, starts, (connection.phase + number) % pairs))
        for loose, numbers in self._roster.loose()[0]:
            if len(loose) <= len(numbers) * pairs:
                ordered = sorted(loose, key=lambda lane: lane.pair)
                for at, number in enumerate(numbers[: -(-len(loose) // pairs)]):
                    connection = self._roster.connections[number]
                    if not connection.lanes and not connection.uses:
                        mine: list[Lane | None] = [*ordered[at * pairs : (at + 1) * pairs]]
                        mine += [None] * (pairs - len(mine))
                        starts = [self._boundary(lane) for lane in mine]
                        result.append(self._sight(connection, mine, starts, 0))
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

    def _boundary(self, lane: Lane | None) -> int:
        return -1 if lane is None else int(self._lanes.state.lanes[lane.index, n.L_NEXT])

    def start(self, connection: Connection, pair: int, behind: Blueprint | None) -> int:
        """Packet number of the first message on a queue pair, behind the boundary and a collective of which nothing was
        seen; -1 where that is not known."""
        lane = connection.lanes.get(pair)
        part = behind.part(connection.edge) if behind is not None else None
        if lane is None or behind is None or part is None:
            return self._boundary(lane)
        base = int(base_step(part.row, connection.step))
        table = self._reader.table(
            part, behind, lane, pair, connection.number + connection.phase, base, bool(self._reader.apart)
        )
        return -1 if table is None else self._boundary(lane) + int(table[-1, T_FIRST])

    def _sight(self, connection: Connection, lanes: list[Lane | None], starts: list[int], phase: int) -> Sight:
        """The messages of a connection, as far as no more than single packets are missing."""
        each = [self._messages(lane, at) if lane is not None else [] for lane, at in zip(lanes, starts, strict=True)]
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
        return Sight(connection.edge, tuple(size for size, _ in found), [start for _, start in found], connection)

    def _messages(self, lane: Lane, expected: int) -> list[tuple[int, tuple[Lane, Kept] | None]]:
        """(wire length, first kept message) of the messages of a lane from packet `expected` on; -1, None for one that
        is missing."""
        result: list[tuple[int, tuple[Lane, Kept] | None]] = []
        parts = -1  # bytes of a message that comes in packets of their own
        begun: Kept | None = None
        for kept in lane.queue:
            if kept.first == expected + 1 and parts < 0:
                result.append((-1, None))
            elif kept.first != expected:
                break
            if kept.length < 0 and (kept.first == expected or kept.slot >= 0):
                break  # whatever was lost of it is not one message, or more of it may come
            expected = kept.first + kept.packets
            if kept.length < 0:
                continue  # what is missing before it is its first packet
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
