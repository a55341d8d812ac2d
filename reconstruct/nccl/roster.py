"""The connections of one communicator, and the flows that were seen between its nodes."""

from __future__ import annotations

from reconstruct.groups import normal
from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Bound, Connection
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.holdings import Kept
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.notices import Notices
from reconstruct.nccl.schedule import P2P_SLOT

__all__ = ["Roster"]

Loose = tuple[list[tuple[list[Lane], list[int]]], list[Lane]]
_ANNOUNCED = 16  # messages of a lane that are looked for among CTS entries
_OTHERS = 64     # queue pairs from one node to another that may be unknown, beside four for each that is needed


class Roster:
    """Which lane is of which connection, as far as that is known."""

    def __init__(self, group: NcclGroup, lanes: Lanes) -> None:
        self.group = group
        self.lanes: list[Lane] = []
        """Those that may show something."""
        self.left: set[Lane] = set()
        """Those of which nothing is believed any more."""
        self.connections = [Connection(edge) for edge in edges(group)]
        self.links: set[tuple[int, int]] = set()
        """(sender, receiver) of every connection that was seen."""
        self.showed: set[int] = set()
        """Connections that were seen, by number."""
        self._lanes = lanes
        self._between: dict[tuple[int, int], list[int]] = {}
        self._senders: dict[tuple[int, int], set[int]] = {}
        for number, connection in enumerate(self.connections):
            ends = group.nodes[connection.edge.sender], group.nodes[connection.edge.receiver]
            self._between.setdefault(ends, []).append(number)
            self._senders.setdefault(ends, set()).add(connection.edge.sender)
        places = {(c.edge.channel, c.edge.sender, c.edge.receiver): k for k, c in enumerate(self.connections)}
        self._named = {
            (normal(address), pair): places[channel, sender, receiver]
            for address, pair, channel, sender, receiver in group.queue_pairs
            if (channel, sender, receiver) in places
        }
        self._followed: set[tuple[int, int]] = set()
        self._notices: dict[tuple[int, int], Notices] = {}
        self._undecided: dict[tuple[int, int], int] = {}
        self._stale = True
        self._loose: Loose | None = None

    def open(self, lane: Lane) -> list[Connection]:
        """A flow between two nodes; returns the connections that are watched from now on."""
        self.lanes.append(lane)
        self._undecided[lane.ends] = self._undecided.get(lane.ends, 0) + 1
        lane.told = self._named.get((normal(lane.destination), lane.pair), -1)
        if lane.told not in self._between.get(lane.ends, ()):
            lane.told = -1
        fresh = []
        for ends in (lane.ends, lane.ends[::-1]):
            if ends not in self._followed:
                self._followed.add(ends)
                fresh += [self.connections[number] for number in self._between.get(ends, ())]
        return fresh

    def close(self, lane: Lane) -> Edge | None:
        """A flow has ended; the connection that it was of."""
        self.leave(lane)
        self.left.remove(lane)
        if lane.place is None:
            return None
        connection = self.connections[lane.place[0]]
        del connection.lanes[lane.place[1]]
        return connection.edge

    def leave(self, lane: Lane) -> None:
        """Nothing of a lane is believed any more."""
        if lane not in self.left:
            self.lanes.remove(lane)
            self.left.add(lane)
            self._undecided[lane.ends] -= lane.place is None

    def most(self, ends: tuple[int, int]) -> int:
        """Queue pairs from one node to another of which it may be unknown what they are; as many may announce."""
        both = (*self._between.get(ends, ()), *self._between.get(ends[::-1], ()))
        return _OTHERS + 4 * self.group.qps * len(both)

    def crowded(self, ends: tuple[int, int], announces: bool) -> bool:
        """Whether one more queue pair is too many: each may have to be compared with every connection."""
        if announces:
            return ends in self._notices and len(self._notices[ends].flows) >= self.most(ends)
        return self._undecided.get(ends, 0) >= self.most(ends)

    def announces(self, flow: int, ends: tuple[int, int]) -> None:
        """A flow that brings CTS entries from node ends[0] to node ends[1]."""
        self._notices.setdefault(ends, Notices()).flows.append(flow)

    def silent(self, flow: int) -> None:
        """A flow of CTS entries is over."""
        for notices in self._notices.values():
            if flow in notices.flows:
                notices.flows.remove(flow)
        self._stale = True

    def cts_flows(self) -> list[int]:
        """All flows that bring CTS entries."""
        return [flow for notices in self._notices.values() for flow in notices.flows]

    def edge(self, lane: Lane) -> Edge | None:
        """The connection of a lane; where it is not known yet, the first one between its nodes."""
        if lane.place is not None:
            return self.connections[lane.place[0]].edge
        return self.first(lane.ends)

    def first(self, ends: tuple[int, int]) -> Edge | None:
        """The first connection from one node to another."""
        numbers = self._between.get(ends, [])
        return self.connections[numbers[0]].edge if numbers else None

    def lacks(self, lane: Lane) -> bool:
        """Whether a connection between the nodes of a lane has not all its lanes."""
        return any(len(self.connections[at].lanes) < self.group.qps for at in self._between.get(lane.ends, ()))

    def watched(self) -> list[Connection]:
        """All connections between nodes between which something was seen, either way."""
        return [self.connections[number] for ends in self._followed for number in self._between.get(ends, ())]

    def gone(self) -> list[Connection]:
        """Connections of which something was seen and nothing is followed: they ended, or lost their beginning."""
        loose = {lane.ends for lanes in (self.lanes, self.left) for lane in lanes if lane.place is None}
        return [
            self.connections[number]
            for ends, numbers in self._between.items()
            for number in numbers
            if not self.connections[number].lanes and (number in self.showed or ends in loose)
        ]

    def announced(self, lane: Lane, kept: Kept) -> tuple[int, int]:
        """(sender's rank, room) that a CTS entry gave for a message of a lane; (-1, -1) if none was seen."""
        self._look()
        notices = self._notices.get(lane.ends[::-1])
        if kept.announced[0] < 0 and kept.length >= 0 and notices is not None and kept.looked != notices.version:
            kept.looked = notices.version
            kept.announced = notices.find(kept) or kept.announced
        return kept.announced

    def _look(self) -> None:
        """Take what has been announced."""
        if self._stale:
            self._stale = False
            for notices in self._notices.values():
                notices.look(self._lanes.state)

    def pair_up(self, connection: Connection, lane: Lane) -> None:
        """Find out where the CTS entries of a connection come, and how they are numbered, by kept messages of its lane.

        Memory keys of several machines may be alike: only one flow, between the same two interfaces, may fit.
        """
        row = self._lanes.state.lanes[lane.index]
        notices = self._notices.get(lane.ends[::-1])
        if row[n.L_CTS] >= 0 or notices is None or not lane.queue:
            return
        flows = [
            flow
            for flow in notices.flows
            if self._lanes.flows.endpoint_src(flow)[0] == lane.destination
            and self._lanes.flows.endpoint_dst(flow)[0] == lane.source
        ]
        for kept in lane.queue[:2] if flows else ():
            found = self._lanes.announced_by(flows, kept)
            if kept.length > 0 and len(found) and (found[:, :2] == (found[0, 0], connection.edge.sender)).all():
                row[n.L_CTS] = self._lanes.state.owner[flows[found[0, 0]]]
                if connection.announced < 0 and self.group.qps == 1 and kept.first == row[n.L_NEXT]:
                    connection.announced = int(found[:, 2].max()) - 1 - connection.reached(0)
                return

    def sender(self, lane: Lane) -> int:
        """Rank that sends on a lane, if its announcements tell it; else -1."""
        for kept in lane.queue[:_ANNOUNCED]:
            if lane.sender < 0:
                lane.sender = self.announced(lane, kept)[0]
        return lane.sender

    def touch(self) -> None:
        """Lanes have changed, or time has passed: `loose` and `announced` must look again."""
        self._loose, self._stale = None, True

    def loose(self) -> Loose:
        """(lanes without a place that show something with the connections that they can be of, by sender; lanes that
        can be of none, all of their ranks' connections having theirs)."""
        if self._loose is None:
            self._loose = self._sort_loose()
        return self._loose

    def _sort_loose(self) -> Loose:
        groups: dict[tuple[tuple[int, int], int], list[Lane]] = {}
        strangers = []
        for lane in self.lanes:
            if lane.place is None and lane.queue and self.announced(lane, lane.queue[0])[1] == P2P_SLOT:
                strangers.append(lane)  # send and receive
            elif lane.place is None and lane.queue:
                senders = self._senders.get(lane.ends, set())
                sender = next(iter(senders)) if len(senders) == 1 else self.sender(lane)
                lane.named = lane.told
                if lane.told >= 0 and sender not in (-1, self.connections[lane.told].edge.sender):
                    lane.named = -1
                groups.setdefault((lane.ends, sender), []).append(lane)
        result = []
        for (ends, sender), lanes in groups.items():
            numbers = [
                number
                for number in self._between.get(ends, ())
                if sender < 0 or self.connections[number].edge.sender == sender
            ]
            free = [number for number in numbers if len(self.connections[number].lanes) < self.group.qps]
            if free:
                result.append((lanes, free))
            else:
                strangers += lanes
        return result, strangers

    def unsettled(self) -> bool:
        """Whether lanes without a place show something while connections that they can be of lack their lanes: then
        it is not known how far each connection is."""
        return any(
            self.connections[number].uses and not self.connections[number].lanes
            for _, numbers in self.loose()[0]
            for number in numbers
        )

    def settle(self, place: Bound) -> Connection:
        """A lane is queue pair `place.pair` of a connection."""
        lane, connection = place.lane, self.connections[place.connection]
        row = self._lanes.state.lanes[lane.index]
        if not connection.lanes:
            connection.phase = place.phase
            if int(row[n.L_NEXT]) & 0xFFFFFF == 0:  # seen from its first packet on: steps count from 0
                connection.exact, connection.announced = True, 0
                for use in connection.uses:
                    use.exact = True
        connection.lanes[place.pair] = lane
        connection.done.setdefault(place.pair, 0)
        lane.place = place.connection, place.pair
        self._undecided[lane.ends] -= 1
        self.touch()
        edge = connection.edge
        row[n.L_SENDER] = edge.sender
        self.links.add((edge.sender, edge.receiver))
        self.showed.add(place.connection)
        return connection
