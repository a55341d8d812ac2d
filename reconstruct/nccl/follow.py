"""Follows the collectives of one communicator: which one comes next, and on which queue pairs.

All connections of a communicator carry the same collectives in the same order. So there is one list of known
collectives (`known`); behind it, messages are kept until exactly one collective explains them on every connection:

    a size that the planner names (`judge`)   decided on sight where only it fits, and every later message is checked;
                                              a small one only when it was seen whole
    anything else (`recognise`)               decided when it was seen whole and no other reading is left

`placing` puts what is decided on the lanes, and takes it back where a message contradicts it.
"""

from __future__ import annotations

import weakref

import numpy as np

from reconstruct.decoder import (
    ALLREDUCE,
    BROADCAST,
    IGNORE,
    LENGTHS,
    NOT_THIS_SIZE,
    RAW,
    AllReduce,
    Message,
    Plan,
    Planner,
    Request,
)
from reconstruct.landing import Landing
from reconstruct.nccl import state as n
from reconstruct.nccl.allowance import Allowance
from reconstruct.nccl.binding import Reader, first_of
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.evidence import Evidence
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.holdings import Holdings, Kept
from reconstruct.nccl.judge import Judge
from reconstruct.nccl.keeper import Keeper, kept_of
from reconstruct.nccl.known import KINDS, Ledger
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.placing import Placer
from reconstruct.nccl.recognise import Recogniser
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE as REDUCTION
from reconstruct.nccl.schedule import P2P_SLOT
from reconstruct.nccl.sights import Sights
from reconstruct.nccl.socket_state import WHOLE
from reconstruct.nccl.versions import traits

__all__ = ["Follower"]

_PAUSE = 50_000_000     # ns without a message after which a long search is made even where little was seen
_LONG = 1_000_000_000   # ns without a message after which it is said that what was seen is not understood
_EAGER = 64            # kept messages up to which each one is looked at as it comes
_MOST_KEPT = 1 << 16
_MOST_LOOSE = 4096     # messages of a queue pair that belongs to no connection
_LATE_START = 64       # packets that may be lost before the first one seen of a new queue pair
_MOST_NAMED = 1024      # sizes of all-reduces that are looked for behind others
_LATE = (
    "first seen in the middle of its life, after {} packets (queue pair {} at {}): where a collective begins on it is "
    "not known, and nothing of it is used; now that it is seen, attach again"
)
_CROWDED = (
    "more than {} queue pairs from one node to another, and what they are is not known: more are not followed; if "
    "other jobs use these addresses, mirror their ports elsewhere, and attach again"
)
_FULL = (
    "{} queue pairs are followed, as many as there is room for: more are not; if they are of other jobs, mirror these "
    "elsewhere, and attach again"
)
_UNTOLD = (
    "which queue pair is which channel cannot be told from one direction: mirror the other one, too (what a receiver "
    "announces names the sender), or have the mirror on when the job starts"
)
_UNEXPLAINED = (
    "its messages are those of no single collective: several calls in one group (ncclGroupStart, a coalescing "
    "manager), registered buffers, a tuner plugin or other buffer sizes; issue collectives one by one without these, "
    "and attach again"
)
_GONE = "whole collectives were lost on every mirrored link, and which ones is not known: attach again"


class Follower:
    """One group."""

    def __init__(self, group: NcclGroup, sequence: int, lanes: Lanes, held: Holdings, planner: Planner,
                 allowance: Allowance) -> None:
        self.group, self.planner, self._allowance = group, planner, allowance
        self.dirty = False
        """`advance` may find something new."""
        release = traits(group.version)
        self.form = release.cts
        self.endian = n.BIG if release.immediate_big_endian else n.LITTLE
        if release.immediate_may_be_id:
            self.endian = n.UNREAD
        if group.sockets:
            self.endian = n.LITTLE
        split = release.split_over_qps if group.split is None else group.split
        self.roster = Roster(group, lanes)
        self.ledger = Ledger(group, sequence, self.roster, lanes, held)
        self._lanes, self._held = lanes, held
        self._reader = Reader(lanes, group.qps, split and group.qps > 1, self.endian, allowance)
        if group.sockets:
            self._reader.mtu, self._reader.apart = WHOLE, False
        self._keeper = Keeper(lanes, held, self._reader)
        follower = weakref.proxy(self)  # else the two keep each other until the collector of cycles comes
        self.placer = Placer(
            group, self.ledger, self.roster, lanes, held, self._keeper, self._reader, lambda: follower._look_again()
        )
        evidence = Evidence(self.roster, self._reader, lanes)
        sights = Sights(self.roster, self._reader, lanes)
        self._judge = Judge(group, self.roster, self._reader, evidence, sights)
        self._minds = Recogniser(group, self._judge, evidence, sights, self._reader, self.roster, allowance)
        self._plan: Plan | None = None
        self._look_at = 0      # messages kept from which on a long search is made again
        self._looked = self._newest = self._now = 0  # when: the last long search, the newest message, now; ns
        self._news = False
        self._told: set[int] = set()  # the tag of which `_tell` has said something
        self._crowds: set[tuple[int, int]] = set()  # nodes between which flows were refused

    def _look_again(self) -> None:
        """Decisions were taken back: the search begins again."""
        self._plan, self._look_at, self.dirty = None, 0, True

    # Flows and their messages

    def opened(self, lane: Lane) -> None:
        """A flow between two nodes of the group."""
        for connection in self.roster.open(lane):
            for tag, blueprint, meta in self.ledger.log:
                self.placer.use(connection, tag, blueprint, meta)

    def refuse(self, ends: tuple[int, int], announces: bool) -> bool:
        """Whether one more flow between two nodes is not looked at, as too many are there; this is said once."""
        if not self.roster.crowded(ends, announces):
            return False
        self._tell_crowd(ends, _CROWDED.format(self.roster.most(ends)))
        return True

    def full(self, most: int) -> None:
        """A flow of the group is not looked at, as `most` are followed; this is said once."""
        self._tell_crowd((-1, -1), _FULL.format(most))

    def _tell_crowd(self, ends: tuple[int, int], reason: str) -> None:
        if ends not in self._crowds:
            self._crowds.add(ends)
            edge = self.roster.first(ends)
            link = (-1, -1) if edge is None else (edge.sender, edge.receiver)
            self.ledger.say((self.ledger.tag,), reason, link)

    def closed(self, lane: Lane) -> tuple[int, int] | None:
        """A flow has ended; its (sender, receiver) if it was a connection of the group."""
        self._keeper.forget(lane)
        edge = self.roster.close(lane)
        return None if edge is None else (edge.sender, edge.receiver)

    @property
    def pending(self) -> bool:
        """Whether something of the next collective was seen."""
        return any(lane.queue for lane in self.roster.lanes)

    def ask(self, lane: Lane, slot: int, message: np.ndarray, time: int) -> None:
        """A message begins behind everything that is known on its lane."""
        kept = kept_of(message, slot, time)
        if self.ledger.lost is not None or not self._anchored(lane, kept):
            return
        self._keeper.insert(lane, kept)
        self._news, self._newest = True, max(self._newest, time)
        if lane.place is None:
            lane.loose += 1
            if lane.loose > _MOST_LOOSE:
                self.placer.leave(lane)
                return
        if self._keeper.count <= _EAGER and not self._allowance.short:
            self.advance()
        else:
            self.dirty = True
        if kept in lane.queue and not self._keeper.stored(kept):
            self._keeper.store(lane, kept)
        if self._keeper.count > _MOST_KEPT:
            self.placer.give_up(f"more than {_MOST_KEPT} messages that nothing explains")

    def _anchored(self, lane: Lane, kept: Kept) -> bool:
        """Whether it is certain where the group's messages begin on this lane: packets are numbered from 0 when a queue
        pair is made. Where the group has had collectives before it was followed, lost ones may have been of these."""
        row = self._lanes.state.lanes[lane.index]
        if row[n.L_NEXT] < 0:
            number = kept.first & 0xFFFFFF
            if number > (_LATE_START if self.ledger.first == 0 else 0):
                self.roster.touch()
                edge = self.roster.edge(lane)
                if edge is not None and self.roster.lacks(lane) and self.roster.announced(lane, kept)[1] != P2P_SLOT:
                    what = _LATE.format(number, lane.pair, lane.destination)
                    self.ledger.say((self.ledger.tag,), what, (edge.sender, edge.receiver))
                self.placer.leave(lane)
                return False
            row[n.L_NEXT] = kept.first - number
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
        waits = self.dirty or self._plan is RAW  # for an answer of the planner's
        late = self.ledger.lost is None and self.pending and self._now > self._newest + _LONG
        if late and not waits and self.ledger.tag not in self._told and not self._minds.over:
            self._tell(_UNTOLD if self.roster.loose()[0] else _UNEXPLAINED)

    def _tell(self, reason: str) -> None:
        """Say, once of a collective, why it is not decided."""
        if self.ledger.tag not in self._told:
            self._told = {self.ledger.tag}
            self.ledger.say((self.ledger.tag,), reason)

    @property
    def _quiet(self) -> bool:
        """Whether nothing new has come for long, but something since the last long search."""
        return self._news and self.pending and self._now > max(self._looked, self._newest) + _PAUSE

    def advance(self) -> None:
        """Decide what can be decided."""
        self.dirty = False
        while self.ledger.lost is None and self._decide():
            pass
        self.dirty = self.dirty or self._allowance.short

    def _decide(self) -> bool:
        self.roster.touch()
        self.placer.bind()
        self.roster.touch()
        if self._allowance.short:
            return False  # it is not known yet which flow is what
        if any(isinstance(event, Message) for event in self.ledger.events):
            self.dirty = True  # what it says may decide how the planner answers
            return False
        front = self._front()
        if not front or self.roster.unsettled():
            if front and self._quiet:
                self._tell(_UNTOLD)
            return False
        if self._plan is None:
            self._plan = self.planner(self._request(front, ALLREDUCE, front[0].queue[0].length))
        if self._plan is not IGNORE and self._plan is not LENGTHS and self.ledger.tag not in self.ledger.foreign:
            wanted = self._minds.named
            if isinstance(self._plan, AllReduce):
                wanted = {(self._plan.size, self._plan.itemsize)}
                self._name(self._plan.size, self._plan.itemsize)
            sizes = [made for size in sorted(wanted) for made in self._judge.blueprints.reductions(*size)]
            chosen, possible = self._judge.choose(sizes)
            if chosen:
                blueprint, apart = chosen[-1]
                told = AllReduce(blueprint.size, blueprint.call.itemsize)
                self._install(blueprint, apart, told if len(chosen) == 1 else self._plan)
                return True
            if possible:
                return self._minds.gone and self._decide_unseen(self._quiet)
            if isinstance(self._plan, AllReduce):
                self.ledger.foreign.add(self.ledger.tag)
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
        return Request(self.group.name, channel, self.ledger.tag, kind, sender, receiver, max(0, length), time, proven)

    def _decide_foreign(self, front: list[Lane]) -> bool:
        """Whatever no size of the planner's explains."""
        last = self.ledger.known.get(self.ledger.tag - 1)
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
            return self._decide_unseen(quiet)
        kind, blueprint = reading.kind, reading.blueprint
        if kind != REDUCTION and not reading.copied:
            plan = self.planner(self._request(front, KINDS[kind], reading.least))
        tag, planned = self.ledger.tag, self._plan
        if plan is None or isinstance(plan, AllReduce) or (kind == REDUCTION and tag in self.ledger.foreign):
            plan = IGNORE
        if isinstance(planned, AllReduce):
            size = planned.size
            self.ledger.say((tag,), f"{NOT_THIS_SIZE}: its messages are not those of an all-reduce of {size} bytes")
        self._minds.remember(blueprint)
        self._install(blueprint, reading.apart, plan)
        if plan is LENGTHS and tag in self.ledger.known:
            link = self.ledger.known[tag].link
            self.ledger.events.append(Message(self.group.name, tag, KINDS[kind], *link, 0, blueprint.size, None, True))
        return True

    def _decide_unseen(self, quiet: bool) -> bool:
        """Nothing explains what was seen: was a whole collective lost? If nothing ever will, say so."""
        gone = self._minds.gone
        certain = gone and all(self._lanes.broken(lane) for lane in self.roster.lanes if lane.queue)
        reading = self._minds.vanished() if certain else None
        if reading is not None:
            self.ledger.say((self.ledger.tag,), "nothing of it was captured on any mirrored link")
            self._install(reading.blueprint, reading.apart, IGNORE)
            return True
        if self._minds.hopeless:
            self.placer.give_up(_UNEXPLAINED)
        elif gone and quiet:
            self.placer.give_up(_GONE)
        return False

    def _install(self, blueprint: Blueprint, apart: bool, plan: Plan) -> None:
        """The next collective is this one."""
        call, tag = blueprint.call, self.ledger.tag
        first, since = self._times(blueprint, apart)
        # On connections that both use packet numbers tell the order, and clocks need not agree.
        late = [
            known.tag
            for known in self.ledger.known.values()
            if 0 < first < known.since and not self._share(known.blueprint, blueprint)
        ]
        if late:
            self.placer.out_of_order(min(late))
            return
        if self._reader.apart is None and self._judge.long(blueprint):
            self._reader.apart = apart
        landing = None
        if isinstance(plan, AllReduce) or (plan is RAW and call.kind != REDUCTION):
            itemsize = call.itemsize if isinstance(plan, AllReduce) else 1
            landing = self._held.make(self.group.name, tag, blueprint.size, itemsize, self.group.world_size)
            if landing is None:
                limit = self._held.budget.limit
                self.ledger.say((tag,), f"{blueprint.size} bytes more are over the memory budget of {limit}: raise it")
        known = self.ledger.add(blueprint, plan, landing)
        known.since = since if call.kind == REDUCTION else 0
        meta = landing.address if landing is not None else 0
        self._plan, self._look_at = None, 0
        watched = self.roster.watched()
        for connection in watched:
            self.placer.use(connection, tag, blueprint, meta)
            if connection.lanes and blueprint.part(connection.edge) is not None:
                known.link = connection.edge.sender, connection.edge.receiver
        for connection in watched:
            self.placer.extend(connection)

    def _times(self, blueprint: Blueprint, apart: bool) -> tuple[int, int]:
        """When the first message that is kept of a collective began, and the last that all ranks must have sent before
        anything of a later one is sent; 0: none is."""
        fits = [
            self._reader.fit(lane, connection, pair, connection.phase, blueprint, apart)
            for connection in self.roster.watched()
            if blueprint.part(connection.edge) is not None
            for pair, lane in connection.lanes.items()
        ]
        found = [fit for fit in fits if fit is not None]
        loose = (lane.queue[0].time for lanes, _ in self.roster.loose()[0] for lane in lanes)
        first = first_of([*(fit.began for fit in found), *loose])
        return first, max([first, *(fit.given for fit in found)])

    def _share(self, one: Blueprint, other: Blueprint) -> bool:
        """Whether a connection that is watched carries both."""
        edges = (connection.edge for connection in self.roster.watched() if connection.lanes)
        return any(one.part(edge) is not None and other.part(edge) is not None for edge in edges)

    # Sizes that come later

    def can_begin(self, size: int, itemsize: int) -> bool:
        """Whether what follows the boundary can be an all-reduce of that size."""
        self._name(size, itemsize)
        return self._judge.possible(self._judge.blueprints.reductions(size, itemsize))

    def _name(self, size: int, itemsize: int) -> None:
        if len(self._minds.named) < _MOST_NAMED:
            self._minds.named.add((size, itemsize))

    def _undecided(self, tag: int) -> bool:
        """Whether it is the next collective, and of a size that `place` may tell."""
        ledger = self.ledger
        return tag == ledger.tag and self._plan is RAW and tag not in ledger.foreign and ledger.lost is None

    def fits(self, tag: int, size: int, itemsize: int) -> bool:
        """See `NcclDecoder.fits`."""
        self._name(size, itemsize)
        self.roster.touch()
        known = self.ledger.known.get(tag)
        if known is not None and known.plan is not RAW:
            return known.reduction and known.blueprint.size == size
        sizes = self._judge.blueprints.reductions(size, itemsize)
        if known is not None:
            return known.reduction and any(self._judge.same_messages(b, known.blueprint) for b in sizes)
        return self._undecided(tag) and bool(self._judge.choose(sizes, whole=True)[0])

    def place(self, tag: int, size: int, itemsize: int) -> Landing | None:
        """See `NcclDecoder.place`."""
        self._name(size, itemsize)
        self.roster.touch()
        known = self.ledger.known.get(tag)
        sizes = self._judge.blueprints.reductions(size, itemsize)
        if known is None:
            if not self._undecided(tag):
                return None
            chosen, _ = self._judge.choose(sizes, whole=True)
            if len(chosen) != 1:
                return None
            self._install(*chosen[0], AllReduce(size, itemsize))
            self.roster.touch()
            self.placer.bind()
            self.dirty = True
            return self.ledger.known[tag].landing if tag in self.ledger.known else None
        if known.plan is RAW and known.reduction:
            same = [b for b in sizes if self._judge.same_messages(b, known.blueprint)]
            return self.placer.place_kept(known, same[0]) if same else None
        return known.landing if known.reduction and known.blueprint.size == size else None
