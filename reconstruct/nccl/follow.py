"""Follows the collectives of one communicator: which one comes next, and on which queue pairs.

All connections of a communicator carry the same collectives in the same order. So there is one list of known
collectives; behind it, messages are kept until exactly one collective explains them on every connection:

    a size that the planner names       decided on sight where only it fits, and every later message is checked;
                                        a small one only when it was seen whole
    anything else (`guess`)        decided when it was seen whole and no other reading is left

A message that contradicts a decided collective takes the decision back: what was placed is poisoned, and the search
begins again at the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mirror.roce_state import M_FIRST
from reconstruct.decoder import (
    ALLREDUCE,
    BROADCAST,
    IGNORE,
    LENGTHS,
    NOT_THIS_SIZE,
    RAW,
    AllReduce,
    Conflict,
    Event,
    LinkLost,
    Message,
    Plan,
    Planner,
    Reduced,
    Request,
)
from reconstruct.landing import COMPLETED, CONFLICTED, Landing
from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Connection, Reader
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.holdings import Holdings, Kept
from reconstruct.nccl.keeper import Keeper, kept_of
from reconstruct.nccl.lanes import Entry, Lane, Lanes
from reconstruct.nccl.recognise import Recogniser
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLGATHER, SLOT_BYTES
from reconstruct.nccl.schedule import ALLREDUCE as REDUCTION
from reconstruct.nccl.schedule import BROADCAST as COPY
from reconstruct.nccl.script import T_FIRST, T_WIRE
from reconstruct.nccl.versions import traits

__all__ = ["Follower", "Known"]

_PAUSE = 50_000_000     # ns without a message after which a long search is made even where little was seen
_EAGER = 64            # kept messages up to which each one is looked at as it comes
_MOST_KEPT = 1 << 16
_MOST_LOOSE = 4096     # messages of a queue pair that belongs to no connection
_LATE_START = 64       # packets that may be lost before the first one seen of a new queue pair
_MOST_RETRIES = 3
_MOST_NAMED = 1024      # sizes of all-reduces that are looked for behind others
_FAR = 16              # collectives that a lane must be ahead of one whose end it never showed
_ALLGATHER = 2
_KINDS = {REDUCTION: ALLREDUCE, COPY: BROADCAST, ALLGATHER: _ALLGATHER}


@dataclass(slots=True, eq=False)
class Known:
    """A decided collective. link: sender and receiver of a connection that shows it."""

    tag: int
    blueprint: Blueprint
    plan: Plan
    landing: Landing | None
    stash: list[tuple[Lane, Kept]] = field(default_factory=list)
    """An all-reduce planned RAW: its messages, until the size is known."""
    link: tuple[int, int] = (-1, -1)

    @property
    def reduction(self) -> bool:
        """Whether it is an all-reduce."""
        return self.blueprint.call.kind == REDUCTION


class Follower:
    """One group. `events` are for the decoder to take."""

    def __init__(self, group: NcclGroup, sequence: int, lanes: Lanes, held: Holdings, planner: Planner) -> None:
        self.group, self.planner = group, planner
        self.events: list[Event] = []
        self.first = self.tag = sequence
        """Of the first collective; of the next one that is not known yet."""
        self.known: dict[int, Known] = {}
        self.lost: str | None = None
        """Why nothing is claimed any more."""
        self._largest: Blueprint | None = None  # of all all-reduces
        self.dirty = False
        """`advance` may find something new."""
        release = traits(group.version)
        self.form = release.cts
        self.endian = n.BIG if release.immediate_big_endian else n.LITTLE
        if release.immediate_may_be_id:
            self.endian = n.UNREAD
        split = release.split_over_qps if group.split is None else group.split
        self.roster = Roster(group, lanes)
        self._lanes, self._held = lanes, held
        self._reader = Reader(lanes, group.qps, split and group.qps > 1, self.endian)
        self._keeper = Keeper(lanes, held, self._reader)
        self._minds = Recogniser(group, self.roster, self._reader, lanes)
        self._log: list[tuple[int, Blueprint, int]] = []
        self._plan: Plan | None = None
        self._foreign: set[int] = set()
        self._tries: dict[int, int] = {}
        self._look_at = 0      # messages kept from which on a long search is made again
        self._looked = self._newest = self._now = 0  # when: the last long search, the newest message, now; ns
        self._news = False

    # Flows and their messages

    def opened(self, lane: Lane) -> None:
        """A flow between two nodes of the group."""
        for connection in self.roster.open(lane):
            for tag, blueprint, meta in self._log:
                self._use(connection, tag, blueprint, meta)

    def closed(self, lane: Lane) -> tuple[int, int] | None:
        """A flow has ended; its (sender, receiver) if it was a connection of the group."""
        self._keeper.forget(lane)
        edge = self.roster.close(lane)
        return None if edge is None else (edge.sender, edge.receiver)

    def _leave(self, lane: Lane) -> None:
        """The flow is no connection of this group, or not to be believed."""
        self._keeper.forget(lane)
        self._lanes.stop(lane)

    @property
    def pending(self) -> bool:
        """Whether something of the next collective was seen."""
        return any(lane.queue for lane in self.roster.lanes)

    def ask(self, lane: Lane, slot: int, message: np.ndarray, time: int) -> None:
        """A message begins behind everything that is known on its lane."""
        if self.lost is not None or not self._anchored(lane, int(message[M_FIRST])):
            return
        kept = kept_of(message, slot, time)
        self._keeper.insert(lane, kept)
        self._news, self._newest = True, max(self._newest, time)
        if lane.place is None:
            lane.loose += 1
            if lane.loose > _MOST_LOOSE:
                self._leave(lane)
                return
        if self._keeper.count <= _EAGER:
            self.advance()
        else:
            self.dirty = True
        if kept in lane.queue and not self._keeper.stored(kept):
            self._keeper.store(lane, kept)
        if self._keeper.count > _MOST_KEPT:
            self.give_up(f"more than {_MOST_KEPT} messages that nothing explains")

    def _anchored(self, lane: Lane, first: int) -> bool:
        """Whether it is certain where the group's messages begin on this lane."""
        row = self._lanes.state.lanes[lane.index]
        if row[n.L_NEXT] < 0:
            number = first & 0xFFFFFF
            if number > _LATE_START:
                self._leave(lane)
                return False
            row[n.L_NEXT] = first - number
        return True

    def ended(self, lane: Lane, slot: int, message: np.ndarray, complete: bool) -> None:
        """No more bytes of a kept message are expected."""
        self._keeper.ended(lane, slot, message, complete)
        self._news = self.dirty = True

    def voided(self, lane: Lane, slot: int) -> None:
        """A kept message was none."""
        self._keeper.voided(lane, slot)

    # Which collective is next

    def look(self, now: int) -> None:
        """Time has come to `now`, ns: decide what can be decided."""
        self._now = max(self._now, now)
        if self.dirty or self._quiet:
            self.advance()

    @property
    def _quiet(self) -> bool:
        """Whether nothing new has come for long, but something since the last long search."""
        return self._news and self.pending and self._now > max(self._looked, self._newest) + _PAUSE

    def advance(self) -> None:
        """Decide what can be decided."""
        self.dirty = False
        while self.lost is None and self._decide():
            pass

    def _decide(self) -> bool:
        self.roster.touch()
        self._bind()
        self.roster.touch()
        if any(isinstance(event, Message) for event in self.events):
            self.dirty = True  # what it says may decide how the planner answers
            return False
        front = self._front()
        if not front or self.roster.unsettled():
            return False
        if self._plan is None:
            self._plan = self.planner(self._request(front, ALLREDUCE, front[0].queue[0].length))
        if self._plan is not IGNORE and self._plan is not LENGTHS and self.tag not in self._foreign:
            wanted = self._minds.named
            if isinstance(self._plan, AllReduce):
                wanted = {(self._plan.size, self._plan.itemsize)}
                self._name(self._plan.size, self._plan.itemsize)
            sizes = [made for size in sorted(wanted) for made in self._minds.blueprints.reductions(*size)]
            chosen, possible = self._minds.choose(sizes)
            if chosen:
                blueprint, apart = chosen[-1]
                told = AllReduce(blueprint.size, blueprint.call.itemsize)
                self._install(blueprint, apart, told if len(chosen) == 1 else self._plan)
                return True
            if possible:
                return False
            if isinstance(self._plan, AllReduce):
                self._foreign.add(self.tag)
        return self._decide_foreign(front)

    def _front(self) -> list[Lane]:
        """Lanes that show messages behind all that is known; those with a connection, and a whole start, first."""
        state = self._lanes.state.lanes
        waiting = [lane for lane in self.roster.lanes if lane.queue]
        waiting.sort(key=lambda lane: (lane.place is None, lane.queue[0].first != state[lane.index, n.L_NEXT]))
        return waiting

    def _request(self, front: list[Lane], kind: int, length: int) -> Request:
        lane = front[0]
        edge = self.roster.edge(lane)
        proven = bool(lane.queue[0].first == self._lanes.state.lanes[lane.index, n.L_NEXT])
        time = min(other.queue[0].time for other in front)
        channel, sender, receiver = (0, -1, -1) if edge is None else (edge.channel, edge.sender, edge.receiver)
        return Request(self.group.name, channel, self.tag, kind, sender, receiver, max(0, length), time, proven)

    def _decide_foreign(self, front: list[Lane]) -> bool:
        """Whatever no size of the planner's explains."""
        last = self.known.get(self.tag - 1)
        copied = last is not None and last.plan is RAW and not last.reduction
        grown, quiet = self._keeper.count >= self._look_at, self._quiet
        reading, plan = self._minds.reading(grown, quiet, 1 if copied else 2), self._plan
        if reading is not None and reading.copied:
            plan = self.planner(self._request(front, BROADCAST, reading.least))
            if plan is not RAW:
                reading = self._minds.reading(grown, quiet, 0)
        if self._minds.searched:
            self._minds.searched = self._news = False
            self._look_at, self._looked = self._keeper.count + 1 + self._keeper.count // 2, self._now
        if reading is None:
            return False
        kind, blueprint = reading.kind, reading.blueprint
        if kind != REDUCTION and not reading.copied:
            plan = self.planner(self._request(front, _KINDS[kind], reading.least))
        if plan is None or isinstance(plan, AllReduce) or (kind == REDUCTION and self.tag in self._foreign):
            plan = IGNORE
        tag, planned = self.tag, self._plan
        if isinstance(planned, AllReduce):
            self._say((tag,), f"{NOT_THIS_SIZE}: its messages are not those of an all-reduce of {planned.size} bytes")
        self._minds.remember(blueprint)
        self._install(blueprint, reading.apart, plan)
        if plan is LENGTHS and tag in self.known:
            link = self.known[tag].link
            self.events.append(Message(self.group.name, tag, _KINDS[kind], *link, 0, blueprint.size, None, True))
        return True

    def _install(self, blueprint: Blueprint, apart: bool, plan: Plan) -> None:
        """The next collective is this one."""
        call, tag = blueprint.call, self.tag
        if self._reader.apart is None and self._minds.long(blueprint):
            self._reader.apart = apart
        landing = None
        if isinstance(plan, AllReduce) or (plan is RAW and call.kind != REDUCTION):
            itemsize = call.itemsize if isinstance(plan, AllReduce) else 1
            landing = self._held.make(self.group.name, tag, blueprint.size, itemsize, self.group.world_size)
            if landing is None:
                limit = self._held.budget.limit
                self._say((tag,), f"{blueprint.size} bytes more are over the memory budget of {limit}: raise it")
        if call.kind == REDUCTION and (self._largest is None or self._largest.size < blueprint.size):
            self._largest = blueprint
        known = self.known[tag] = Known(tag, blueprint, plan, landing)
        meta = landing.address if landing is not None else 0
        self._log.append((tag, blueprint, meta))
        self.tag, self._plan, self._look_at = tag + 1, None, 0
        watched = self.roster.watched()
        for connection in watched:
            self._use(connection, tag, blueprint, meta)
            if connection.lanes and blueprint.part(connection.edge) is not None:
                known.link = connection.edge.sender, connection.edge.receiver
        for connection in watched:
            self._extend(connection)

    # Lanes and what is known

    def _bind(self) -> None:
        """Give lanes their places where the known collectives tell them."""
        groups, strangers = self.roster.loose()
        for lane in strangers:
            self._leave(lane)  # of another communicator, or of send and receive
        for lanes, numbers in groups if self._log else []:
            connections = {number: self.roster.connections[number] for number in numbers}
            for lane in lanes:
                if self._reader.strange(lane, connections.values()):
                    self._leave(lane)
            lanes = [lane for lane in lanes if lane.queue]
            for apart in (False, True) if self._reader.apart is None else (self._reader.apart,):
                match = self._reader.match(lanes, connections, None, apart)
                if match.places and match.matched > 0:
                    for place in match.places:
                        self._extend(self.roster.settle(place))
                    break

    def _use(self, connection: Connection, tag: int, blueprint: Blueprint, meta: int) -> None:
        part = blueprint.part(connection.edge)
        if part is not None:
            connection.learn(self._lanes)
            connection.add(tag, blueprint, part, meta)

    def _extend(self, connection: Connection) -> None:
        """Let a connection's lanes know the collectives that they do not know yet, and place what these explain."""
        for pair, lane in list(connection.lanes.items()):
            while self.lost is None and connection.done[pair] < len(connection.uses):
                use = connection.uses[connection.done[pair]]
                number = use.number + connection.phase
                table, waiting = self._reader.table(
                    use.part, use.blueprint, lane, pair, number, use.base, bool(self._reader.apart)
                )
                if table is None:
                    if lane.mtu or self._reader.mtu or not waiting:
                        self.give_up("its packets hold parts of LL128 lines: set NCCL_IB_SPLIT_DATA_ON_QPS=0")
                    break
                lane.mtu = lane.mtu or self._reader.mtu
                connection.done[pair] += 1
                if len(table) > 1:
                    call = use.blueprint.call
                    self._lanes.append(
                        lane, use.tag, table, protocol=call.protocol, step=use.base, exact=use.exact,
                        steps=use.blueprint.steps(use.part), checked=use.exact and call.kind == REDUCTION,
                        meta=use.meta if use.tag in self.known else 0,
                    )  # fmt: skip
            reach = int(self._lanes.state.lanes[lane.index, n.L_NEXT])
            while self.lost is None and lane.queue and lane.queue[0].first < reach:
                self._take(lane, lane.queue.pop(0))
                reach = int(self._lanes.state.lanes[lane.index, n.L_NEXT])

    def _take(self, lane: Lane, kept: Kept) -> None:
        """Place a message that was kept and is known now."""
        entry = self._entry(lane, kept)
        known = self.known.get(entry.tag) if entry is not None else None
        if known is not None and known.plan is RAW and known.reduction:
            known.stash.append((lane, kept))
            return
        landing = known.landing if known is not None else None
        was = landing is not None and landing.complete
        found, flags = self._lanes.take(lane, kept, landing)
        if found in (n.FOUND, n.OLD):
            self._keeper.done(lane, kept)
        else:
            self._keeper.count -= 1
            self.contradicted(lane, kept, found)
        if landing is not None and flags & CONFLICTED:
            self.conflicts(landing)
        if landing is not None and flags & COMPLETED and not was:
            self.landed(landing)

    def _entry(self, lane: Lane, kept: Kept) -> Entry | None:
        return next((entry for entry in reversed(lane.entries) if entry.start <= kept.first), None)

    # Sizes that come later

    def can_begin(self, size: int, itemsize: int) -> bool:
        """Whether what follows the boundary can be an all-reduce of that size."""
        self._name(size, itemsize)
        return self._minds.possible(self._minds.blueprints.reductions(size, itemsize))

    def _name(self, size: int, itemsize: int) -> None:
        if len(self._minds.named) < _MOST_NAMED:
            self._minds.named.add((size, itemsize))

    def _undecided(self, tag: int) -> bool:
        """Whether it is the next collective, and of a size that `place` may tell."""
        return tag == self.tag and self._plan is RAW and tag not in self._foreign and self.lost is None

    def fits(self, tag: int, size: int, itemsize: int) -> bool:
        """See `NcclDecoder.fits`."""
        self._name(size, itemsize)
        self.roster.touch()
        known = self.known.get(tag)
        if known is not None and known.plan is not RAW:
            return known.reduction and known.blueprint.size == size
        sizes = self._minds.blueprints.reductions(size, itemsize)
        if known is not None:
            return known.reduction and any(self._minds.same_messages(b, known.blueprint) for b in sizes)
        return self._undecided(tag) and bool(self._minds.choose(sizes, whole=True)[0])

    def place(self, tag: int, size: int, itemsize: int) -> Landing | None:
        """See `NcclDecoder.place`."""
        self._name(size, itemsize)
        self.roster.touch()
        known = self.known.get(tag)
        sizes = self._minds.blueprints.reductions(size, itemsize)
        if known is None:
            if not self._undecided(tag):
                return None
            chosen, _ = self._minds.choose(sizes, whole=True)
            if len(chosen) != 1:
                return None
            self._install(*chosen[0], AllReduce(size, itemsize))
            self.roster.touch()
            self._bind()
            self.dirty = True
            return self.known[tag].landing if tag in self.known else None
        if known.plan is RAW and known.reduction:
            same = [b for b in sizes if self._minds.same_messages(b, known.blueprint)]
            return self._place_stash(known, same[0]) if same else None
        return known.landing if known.reduction and known.blueprint.size == size else None

    def _place_stash(self, known: Known, blueprint: Blueprint) -> Landing | None:
        """The size of an all-reduce that was kept whole is known now."""
        itemsize = blueprint.call.itemsize
        landing = self._held.make(self.group.name, known.tag, blueprint.size, itemsize, self.group.world_size)
        if landing is None:
            return None
        known.landing, known.blueprint, known.plan = landing, blueprint, AllReduce(blueprint.size, itemsize)
        for connection in self.roster.watched():
            for use in connection.uses:
                part = blueprint.part(connection.edge) if use.tag == known.tag else None
                if part is not None:
                    use.blueprint, use.part, use.meta = blueprint, part, landing.address
                    for pair, lane in connection.lanes.items():
                        number = use.number + connection.phase
                        table, _ = self._reader.table(
                            part, blueprint, lane, pair, number, use.base, bool(self._reader.apart)
                        )
                        if table is not None:
                            self._lanes.replace(lane, known.tag, table, landing.address)
        stash, known.stash = known.stash, []
        for lane, kept in stash:
            self._take(lane, kept)
        return landing

    # What went wrong

    def contradicted(self, lane: Lane, kept: Kept, why: int) -> None:
        """A message is not what a decided collective has at its place: the decision was wrong."""
        entry = self._entry(lane, kept)
        if entry is None or self.lost is not None:
            return
        tag, what = entry.tag, self._contradiction(lane, entry, kept, why)
        self._tries[tag] = self._tries.get(tag, 0) + 1
        later = [known for known in self.known.values() if known.tag >= tag]
        told = any(known.landing is not None and known.landing.complete for known in later if known.tag > tag)
        if tag not in self.known or self._tries[tag] > _MOST_RETRIES or told:
            self.give_up(f"{NOT_THIS_SIZE}: {what}", tag)
            return
        for known in later:
            if known.landing is not None:
                known.landing.condemn()
                self._held.forget(self.group.name, known.tag)
                reason = NOT_THIS_SIZE if known.tag == tag else "the collective before it is not of the size it seemed"
                self._say((known.tag,), f"{reason}: {what}")
        self._foreign.add(tag)
        self._rewind(tag)
        self._keeper.insert(lane, kept)
        if kept.slot >= 0:
            self._keeper.store(lane, kept)
        self.dirty = True

    def _contradiction(self, lane: Lane, entry: Entry, kept: Kept, why: int) -> str:
        index = int(np.searchsorted(entry.table[:-1, T_FIRST], kept.first - entry.start, "right")) - 1
        wanted = int(entry.table[index, T_WIRE])
        what = {
            n.WRONG_LENGTH: f"message {index} has {kept.length} bytes, not {wanted}",
            n.WRONG_ADDRESS: f"message {index} does not go to the slot of its step",
            n.WRONG_MTU: f"the path MTU is {kept.mtu}, not {lane.mtu}",
            n.WRONG_IMMEDIATE: f"the immediate of message {index} is not its size, {wanted}",
        }[why]
        edge = self.roster.edge(lane)
        return what if edge is None else f"{what} (channel {edge.channel}, rank {edge.sender} to {edge.receiver})"

    def _rewind(self, tag: int) -> None:
        """Take back every decision from `tag` on. Of what was seen since only lengths are left."""
        for connection in self.roster.connections:
            connection.rewind(tag)
        for lane in self.roster.lanes:
            for entry in self._lanes.rewind(lane, tag):
                for k in np.flatnonzero(entry.marks).tolist():
                    first, wire = entry.start + int(entry.table[k, T_FIRST]), int(entry.table[k, T_WIRE])
                    packets = max(1, -(-wire // (lane.mtu or 4096)))
                    ghost = Kept(first, packets, wire, -1, 0, lane.mtu, -1, 0, dropped=True)
                    ghost.announced = 0, SLOT_BYTES[entry.protocol]  # flags and slots have shown the protocol
                    self._keeper.insert(lane, ghost)
        for known in [known for known in self.known.values() if known.tag >= tag]:
            for lane, kept in known.stash:
                self._keeper.count -= 1
                self._keeper.insert(lane, kept)
            del self.known[known.tag]
        self._log = [item for item in self._log if item[0] < tag]
        self.tag, self._plan, self._look_at = tag, None, 0

    def give_up(self, reason: str, tag: int | None = None) -> None:
        """Nothing that follows is understood: claim nothing more."""
        if self.lost is not None:
            return
        self.lost = reason
        first = self.tag if tag is None else tag
        for known in self.known.values():
            if known.tag >= first and known.landing is not None:
                known.landing.condemn()
        self._say(tuple(range(first, max(first, self.tag) + 1)), reason)
        for lane in self.roster.lanes:
            self._leave(lane)

    def _say(self, tags: tuple[int, ...], reason: str) -> None:
        links = sorted(self.roster.links) or [(-1, -1)]
        self.events += [LinkLost(self.group.name, *link, tags, reason) for link in links]

    # Results

    def landed(self, landing: Landing) -> None:
        """Every byte of a landing is there."""
        name = self._held.names.get(landing.ident)
        known = self.known.get(name[1]) if name is not None else None
        if name is None or known is None or not landing.complete:
            return
        if known.reduction:
            self.events.append(Reduced(*name, landing))
        else:
            kind = _KINDS[known.blueprint.call.kind]
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
        parts = [self._largest.part(self.roster.connections[number].edge) for number in self.roster.showed]
        spans = [part.places[part.places[:, 6] > 0][:, 4:6] for part in parts if part is not None]
        pieces = np.concatenate([np.empty((0, 2), np.int64), *spans])
        pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
        ends = pieces[:, 0] + pieces[:, 1]
        reach = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
        return float(np.maximum(ends - np.maximum(pieces[:, 0], reach), 0).sum()) / self._largest.size

    def settled(self, tag: int) -> bool:
        """Whether no lane can bring anything more of a collective."""
        if tag >= self.tag or self.lost is not None:
            return self.lost is not None
        entries = self._lanes.state.entries
        for connection in self.roster.watched():
            for pair, lane in connection.lanes.items():
                if any(use.tag <= tag for use in connection.uses[connection.done[pair] :]):
                    return False
                top = int(self._lanes.state.lanes[lane.index, n.L_TOP])
                for entry in lane.entries:
                    if entry.tag == tag and entries[entry.row, n.E_LEFT] > 0:
                        reached = max((e.tag for e in lane.entries if e.start < top), default=tag)
                        if reached - tag < _FAR:
                            return False
        known = self.known.get(tag)
        if known is None or known.landing is None or known.landing.complete or self.tag - tag >= _FAR:
            return True
        return not any(  # a connection may be new: what it brings of its first collective may come last
            number not in self.roster.showed and known.blueprint.part(connection.edge) is not None
            for number, connection in enumerate(self.roster.connections)
        )

    def retire(self, below: int) -> None:
        """Free everything held of tags below `below`, but for the landings."""
        for lane in self.roster.lanes:
            self._lanes.retire(lane, below)
        for tag in [tag for tag in self.known if tag < below]:
            for lane, kept in self.known.pop(tag).stash:
                self._keeper.drop(lane, kept)
        for connection in self.roster.watched():
            connection.retire(below)
        self._foreign = {tag for tag in self._foreign if tag >= below}
        self._tries = {tag: count for tag, count in self._tries.items() if tag >= below}
