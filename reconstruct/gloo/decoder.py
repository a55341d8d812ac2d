"""From the bytes of TCP streams to reduced tensors: the gloo decoder.

    Spans --feed--> kernel (reconstruct.gloo.kernel) --stops, log--> this module --> events, landings
                       ^                                 |
                       +------ plans, memory, lanes -----+

The kernel does everything that happens per packet or per message. Python is entered once per flow, once per collective
and link (its plan), once per message kept raw and once per loss. No threads, no clock, no sockets.

What is proven and what is not: the place of a payload follows from the number of payloads of its slot before it on
that link. That number is certain while no preamble was lost. After such a loss values go into a landing private to
the link and reach the shared one only when the link's list of messages is complete; see reconstruct.gloo.recovery.
The wire format is in docs/gloo.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mirror.flows import Flows
from mirror.loss import Evidence
from mirror.memory import address_of
from mirror.spans import Spans
from reconstruct.causes import Cause, explained
from reconstruct.decoder import ALLREDUCE, IGNORE, KIND_NAMES, RAW, AllReduce, Event, Plan, Planner, Request
from reconstruct.gloo import schedule
from reconstruct.gloo import state as g
from reconstruct.gloo.events import Group
from reconstruct.gloo.holdings import Holdings
from reconstruct.gloo.kernel import run
from reconstruct.gloo.lanes import LaneTable, slot_of, split
from reconstruct.gloo.reports import Reports
from reconstruct.groups import Claims
from reconstruct.landing import Landing
from reconstruct.memory import RawLink

__all__ = ["GlooDecoder"]

_PASSED = 16  # tags that a link must be ahead of a collective that it never showed


def _ignore(request: Request) -> Plan:
    return IGNORE


class GlooDecoder:
    """Decodes the gloo traffic of the groups it knows and follows the framing of every other gloo flow.

    flows: the table whose ids the spans carry; budget_bytes: most bytes of landings and raw messages held at once;
    max_lanes: most gloo flows followed at once. Set `planner`: it decides what is kept of each collective.
    """

    def __init__(self, flows: Flows, *, budget_bytes: int = 8 << 30, max_lanes: int = 8192) -> None:
        self.planner: Planner = _ignore
        self.evidence = Evidence()
        self._claims = Claims()
        self._lanes = LaneTable(flows, self._claims, max_lanes)
        self._held = Holdings(budget_bytes)
        self._reports = Reports(self._lanes, self._held)
        self._time = 0  # of the span that the kernel stopped at

    # Groups

    def add_group(self, group: Group) -> None:
        """Follow a group from now on, on connections opened before too.

        Raises ValueError if the name or a listener is known already, or if a rank or address makes no sense.
        """
        self._claims.add(group)
        self._lanes.claim_all()

    def remove_group(self, name: str) -> None:
        """Forget a group and everything held for it; its landings' memory is void. Unknown names are ignored."""
        member = self._claims.members.get(name)
        if member is None:
            return
        for lane in self._lanes.release_group(member.number):
            self._held.discard(self._held.end_raw(lane))
            for owner, slot in [key for key in self._held.private if key[0] == lane]:
                self._held.drop_private(owner, slot)
        self._held.drop(name, None)
        self._reports.blame.forget(member.number)
        self._claims.remove(name)

    def links(self, group: str) -> set[tuple[int, int]]:
        """(sender, receiver) of every link of the group that was seen, also if it has ended since."""
        return {(sender, receiver) for _, sender, receiver in self._seen(group)}

    def coverage(self, group: str) -> float:
        """What part of an all-reduce's final values the links seen so far can show, 0..1.

        The link r -> r-1 shows all chunks but r-1 (docs/gloo.md). With several contexts, their mean.
        """
        contexts = self._claims.members[group].group.contexts
        world = self._claims.members[group].group.world_size
        shown = 0
        for context in range(len(contexts)):
            receivers = {b for c, a, b in self._seen(group) if c == context and b == (a - 1) % world}
            shown += 0 if not receivers else world - 1 if len(receivers) == 1 else world
        return shown / (world * max(1, len(contexts)))

    def max_tag(self, group: str) -> int:
        """Highest tag of any collective seen in the group, -1 if none."""
        member = self._claims.members[group]
        lanes = self._lanes.of_group(member.number)
        return max([member.max_tag, *self._lanes.state.lanes[lanes, g.MAX_TAG].tolist()])

    def decided(self, group: str) -> int:
        """The tag behind the highest seen: every message names its own."""
        return self.max_tag(group) + 1

    def waiting(self, group: str) -> int:
        """Nothing waits."""
        return 0

    def gaps(self, group: str) -> dict[tuple[int, int], int]:
        """(context, sender) of each ring link that is open -> how often the start of a message was lost on it.

        A link whose number stays the same has shown every all-reduce of the time between.
        """
        return {link: int(row[g.GAPS]) + int(row[g.MODE] in (g.SCAN, g.DEAD)) for link, row in self._ring(group)}

    def newest(self, group: str) -> dict[tuple[int, int], int]:
        """The same links -> the highest tag that each has shown."""
        return {link: int(row[g.MAX_TAG]) for link, row in self._ring(group)}

    def _ring(self, group: str) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """(context, sender) and row of each ring link that is open."""
        member = self._claims.members[group]
        for context in range(len(member.group.contexts)):
            for lane in self._lanes.ring_lanes(member, context):
                yield (context, self._lanes.ranks(lane)[0]), self._lanes.state.lanes[lane]

    def _seen(self, group: str) -> set[tuple[int, int, int]]:
        member = self._claims.members[group]
        for lane in self._lanes.of_group(member.number):
            self._lanes.ranks(lane)
        return member.seen

    # Results

    def can_begin(self, request: Request, size: int, itemsize: int) -> bool:
        """Whether the first message that was seen on a link can be one of such an all-reduce's. After a gap it may be
        any of them."""
        world = self._claims.members[request.group].group.world_size
        if request.proven:
            return bool(schedule.first_length(size, itemsize, world, request.sender) == request.length)
        segment = schedule.ring(size, itemsize, world)[3]
        return request.length in (segment, size % segment or segment)

    def landing(self, group: str, tag: int) -> Landing | None:
        """The landing of an all-reduce, complete or not; valid until it is retired."""
        return self._held.landings.get((group, tag))

    def causes(self, group: str, tag: int, size: int = 0) -> list[Cause]:
        """See `Decoder.causes`."""
        member = self._claims.members[group]
        world = member.group.world_size
        gaps = self._reports.blame.of(member.number, tag % max(1, len(member.group.contexts)), tag)
        landing = self._held.landings.get((group, tag))
        if landing is None:
            return explained([(0, size)] if size else [], [], [(0, size, why) for _, why in gaps], self.evidence)
        behind = []
        for sender, why in gaps:
            never, after = schedule.own_chunk(landing.size, landing.itemsize, world, (sender - 1) % world)
            behind += [(0, never, why), (after, landing.size, why)]
        return explained(landing.holes(), landing.losses, behind, self.evidence)

    def fits(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """Whether `place` with that size would place an all-reduce, or has."""
        if (group, tag) in self._held.placed:
            return self._held.placed[group, tag] == (size, itemsize)
        return self._reports.fits_raw(group, tag, size, itemsize)

    def may_fit(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """Whether an all-reduce that was announced or planned RAW may still prove to be of that size."""
        return (group, tag) not in self._held.placed and self._reports.may_fit_raw(group, tag, size, itemsize)

    def place(self, group: str, tag: int, size: int, itemsize: int) -> Landing | None:
        """Place an all-reduce that was planned RAW, now that its size is known.

        Done only if the size fits: every link that lost no message border has shown exactly the messages of such an
        all-reduce and no sign of more, at least one link has, and none shows anything else at a certain position;
        otherwise None. Then every link's messages at certain positions are placed, those still to come as well; one
        that the size does not have poisons the landing. Events that this causes come with the next `feed`.
        """
        landing = self._held.landings.get((group, tag))
        if (group, tag) in self._held.placed:
            return landing if self._held.placed[group, tag] == (size, itemsize) else None
        return self._reports.place_raw(group, tag, size, itemsize)

    def settled(self, group: str, tag: int, behind: int) -> bool:
        """Whether no seen ring link can bring anything more of an all-reduce: each has finished it, lost it, ended,
        or gone on to what begins when it is over, a tag from `behind` on, or far beyond it."""
        member = self._claims.members[group]
        contexts = len(member.group.contexts)
        slot = slot_of(ALLREDUCE, tag)
        for lane in self._lanes.ring_lanes(member, tag % contexts if contexts else 0):
            row, entry = self._lanes.state.lanes[lane], self._lanes.entry(lane, slot)
            newest = int(row[g.MAX_TAG])
            passed = row[g.MODE] == g.DEAD or max(int(row[g.FLOOR]), newest - _PASSED) >= tag or newest >= behind
            if not passed and (entry is None or entry[g.PLAN] not in (g.DONE, g.LOST, g.IGNORED)):
                return False
        return True

    def retire(self, group: str, below_tag: int) -> None:
        """Free everything held of collectives with tags below `below_tag`; their landings' data becomes empty.

        Views of a landing's data that are still referred to stay valid; the memory of others is used again.
        """
        member = self._claims.members[group]
        for lane, slot in list(self._held.private):
            if self._lanes.member(lane) is member and split(slot)[1] < below_tag:
                self._reports.drop_private(lane, slot)
        addresses = self._held.drop(group, below_tag)
        for lane in self._lanes.retire(member.number, below_tag, addresses):
            self._held.discard(self._held.end_raw(lane))

    @property
    def counters(self) -> dict[str, int]:
        """Cumulative counts, and bytes held now (`memory_bytes`)."""
        cursor, rows = self._lanes.state.cursor, self._lanes.state.lanes
        return {
            **self._reports.counts,
            "flows_refused": self._lanes.refused,
            "flows": int((rows[:, g.FLOW] >= 0).sum()),
            "hole_bytes": int(cursor[g.C_HOLE_BYTES]),
            "placed_bytes": int(cursor[g.C_PLACED]),
            "dropped_bytes": int(cursor[g.C_DROPPED]),
            "memory_bytes": self._held.budget.held,
        }

    def flow_kind(self, flow: int) -> str:
        """What a flow was taken for, see `state.STATUS_NAMES`: "gloo", "store client", "other", ..."""
        return g.STATUS_NAMES[self._lanes.state.status[flow]]

    # Feeding

    def feed(self, spans: Spans, now: int) -> list[Event]:
        """Take a batch of spans; `now` is the capture time reached, ns. Returns what happened, in order."""
        self._lanes.state.cursor[[g.C_SPAN, g.C_AT, g.C_LOG]] = 0
        while True:
            state = self._lanes.state
            reason = run(state, spans.n, spans.flow, spans.kind, spans.offset, spans.addr, spans.length, spans.ts,
                         spans.why)
            self._reports.drain()
            if reason == g.END:
                break
            self._time = int(spans.ts[state.cursor[g.C_SPAN]])
            self._answer(reason, int(state.cursor[g.C_LANE]))
        events, self._reports.events = self._reports.events, []
        return events

    def _answer(self, reason: int, lane: int) -> None:
        """Give the kernel what it stopped for. lane: the flow, where there is no lane yet."""
        if reason == g.NEW_FLOW:
            self._lanes.meet(lane)
        elif reason == g.FOUND:
            self._lanes.found(lane)
        elif reason == g.ASK:
            self._ask(lane)
        elif reason == g.ALLOCATE:
            self._allocate(lane)
        elif reason == g.RESYNC:
            self._reports.resync(lane)
        elif reason == g.NODES:
            self._held.landing(int(self._lanes.state.cursor[g.C_ARGUMENT])).grow()

    def _ask(self, lane: int) -> None:
        """The first payload of a slot on a link: have it planned."""
        state, member = self._lanes.state, self._lanes.member(lane)
        assert member is not None
        row = state.lanes[lane]
        entry = state.entries[lane, row[g.ENTRY]]
        slot = int(entry[g.SLOT])
        kind, tag = split(slot)
        sender, receiver = self._lanes.ranks(lane, kind)
        length = int(state.pre[lane, 32:40].view(np.int64)[0])
        group = member.group.name
        self._reports.counts["collectives"] += 1
        context, proven = int(row[g.CONTEXT]), not entry[g.PRIVATE] and entry[g.COUNT] <= 0
        plan = self.planner(Request(group, context, tag, kind, sender, receiver, length, self._time, proven))
        if plan is IGNORE:
            entry[g.PLAN] = g.IGNORED
        elif entry[g.COUNT] > 0:
            entry[g.PLAN] = g.LOST
            self._reports.lose(lane, (tag,), "it began before the group was known or in a gap")
        elif isinstance(plan, AllReduce):
            self._plan_reduction(lane, entry, plan)
        elif plan is RAW:
            entry[g.PLAN] = g.KEPT
            link = RawLink(sender, receiver, 0 if entry[g.PRIVATE] else None)
            self._held.raw.setdefault((group, tag), {}).setdefault((int(row[g.UID]), slot), link)
        else:
            entry[g.PLAN] = g.COUNTED

    def _plan_reduction(self, lane: int, entry: np.ndarray, plan: AllReduce) -> None:
        member = self._lanes.member(lane)
        assert member is not None
        world = member.group.world_size
        kind, tag = split(int(entry[g.SLOT]))
        if kind != ALLREDUCE:
            raise ValueError(f"collective {tag} is of kind {KIND_NAMES[kind]} and cannot be planned as an all-reduce")
        sender, receiver = self._lanes.ranks(lane, kind)
        entry[g.PLAN] = g.LOST
        if receiver != (sender - 1) % world:
            self._reports.lose(lane, (tag,), f"rank {sender} sends to rank {receiver}: no link of the ring")
            return
        landing = self._held.shared(member.group.name, tag, plan.size, plan.itemsize, world)
        if landing is None:
            self._reports.lose(lane, (tag,), self._reports.over_budget(plan.size))
            return
        if (landing.size, landing.itemsize) != (plan.size, plan.itemsize):
            self._reports.lose(lane, (tag,), f"it was planned with {landing.size} bytes before")
            return
        entry[g.SIZE], entry[g.ITEM], entry[g.WORLD] = plan.size, plan.itemsize, world
        entry[g.SENDER_RANK] = sender
        entry[g.TOTAL] = schedule.total(plan.size, plan.itemsize, world, sender)
        entry[g.META] = landing.address
        entry[g.PLAN] = g.REDUCE
        if entry[g.PRIVATE]:
            self._reports.make_private(lane, entry)

    def _allocate(self, lane: int) -> None:
        """Memory for the message kept raw that begins on this lane."""
        state = self._lanes.state
        row = state.lanes[lane]
        length = int(state.pre[lane, 32:40].view(np.int64)[0])
        message = self._held.begin_raw(lane, int(row[g.POSITION]), length)
        row[g.READY] = 1
        row[g.DEST_KIND] = g.NOWHERE if message.data is None else g.TO_MEMORY
        row[g.DEST] = 0 if message.data is None else address_of(message.data)
