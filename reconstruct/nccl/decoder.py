"""From the messages of RDMA queue pairs to reduced tensors: the NCCL decoder.

    MessageSpans --feed--> kernel (`kernel`) --stops, log--> this module --> events, landings
                               ^                                    |
                               +---- lanes, entries, landings ------+  Follower: which collective comes next

Per packet and message everything happens in the kernel; Python is entered once per flow, once per collective, and for
messages behind what is known. A message's place follows from its packet number and the collective's schedule
(docs/nccl.md); length, address, immediate and flags are checked against it. Tags: a collective's tag is its number on
the communicator, which is c10d's sequence number.

What is proven and what is not: a collective is known by the sizes of its messages. Where other collectives would give
the same messages (one of twice the size whose loops are all full), the planner's size is believed, and step markers
must tell. A connection first seen in the middle of its life is not followed, and named.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np

from mirror.loss import Evidence, Why
from mirror.roce_spans import MessageSpans
from mirror.roce_state import M_COLUMNS, M_IMM, M_KIND, M_LENGTH, M_PACKETS
from mirror.roce_wire import WRITE
from reconstruct.causes import Cause, explained
from reconstruct.decoder import ALLREDUCE, IGNORE, Event, FlowClosed, Plan, Planner, Request
from reconstruct.groups import normal
from reconstruct.landing import Landing
from reconstruct.nccl import state as n
from reconstruct.nccl.allowance import Allowance
from reconstruct.nccl.blame import lose, losses
from reconstruct.nccl.follow import Follower
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.holdings import HEADLESS_BYTES, Holdings
from reconstruct.nccl.keeper import kept_of
from reconstruct.nccl.kernel import run
from reconstruct.nccl.known import FAR
from reconstruct.nccl.lanes import Connections, Lanes

__all__ = ["NcclDecoder"]

_FORM_FIELDS = ("entry", "address", "rkeys", "tag", "index", "size")


def _ignore(request: Request) -> Plan:
    return IGNORE


class Messages(Protocol):
    """What makes the spans: `mirror.roce.RoceReassembler` or `reconstruct.nccl.sockets.SocketMessages`."""

    @property
    def messages(self) -> np.ndarray:
        """int64[rows, M_COLUMNS]: the rows that spans speak of."""


class NcclDecoder:
    """Decodes the NCCL traffic of the groups it knows.

    flows: the table whose ids the spans carry; roce: the reassembler that makes them; budget_bytes: most bytes of
    landings and kept messages held at once; max_lanes: most queue pairs of groups followed at once. Set `planner`: it
    decides what is kept of each collective.
    """

    def __init__(
        self, flows: Connections, roce: Messages, *, budget_bytes: int = 8 << 30, max_lanes: int = 4096
    ) -> None:
        self.planner: Planner = _ignore
        self.evidence = Evidence()
        self._flows, self._roce = flows, roce
        self._held = Holdings(budget_bytes)
        self._lanes = Lanes(flows, max_lanes)
        self._allowance = Allowance()
        self._groups: dict[str, Follower] = {}
        self._nodes: dict[str, dict[str, int]] = {}  # group -> address -> node
        self._attached: dict[str, int] = {}
        self._vantage: dict[str, int | None] = {}
        self._owner: dict[int, Follower] = {}  # lane -> group
        self._newest: dict[str, Why] = {}  # group -> of the newest loss on any of its lanes
        self._refused = self._collectives = self._lost = 0

    # Groups

    def add_group(
        self, group: NcclGroup, sequence: int, attached: int | None = None, vantage: int | None = None
    ) -> None:
        """Follow a group from now on, on queue pairs made before too.

        sequence: tag of the first collective that begins at or after `attached` (ns of capture time; None: from now
        on); none may be under way then. vantage: the vantage group that shows it, None for any.
        Raises ValueError if the name is known already or an address makes no sense, UnknownVersion.
        """
        if group.name in self._groups:
            raise ValueError(f"group {group.name!r} is followed already")
        nodes: dict[str, int] = {}
        for rank, addresses in enumerate(group.addresses):
            for address in addresses:
                nodes[normal(address)] = group.nodes[rank]
        decoder = weakref.proxy(self)  # else the two keep each other until the collector of cycles comes
        follower = Follower(
            group, sequence, self._lanes, self._held, lambda request: decoder.planner(request), self._allowance
        )
        self._groups[group.name], self._nodes[group.name] = follower, nodes
        self._attached[group.name] = 0 if attached is None else attached
        self._vantage[group.name] = vantage
        status = self._lanes.state.status
        status[status == n.OTHER] = n.UNMET  # at its next message each is looked at again

    def remove_group(self, name: str) -> None:
        """Forget a group and everything held for it; its landings' memory is void. Unknown names are ignored."""
        follower = self._groups.pop(name, None)
        if follower is None:
            return
        for flow in follower.roster.cts_flows():
            self._lanes.forget_cts(flow, n.UNMET)
        for lane in [*follower.roster.lanes, *follower.roster.left]:
            follower.closed(lane)
            self._lanes.close(lane, n.UNMET)
            del self._owner[lane.index]
        follower.placer.retire(1 << 62)
        self._held.drop(name, None)
        del self._nodes[name], self._attached[name], self._vantage[name]
        self._newest.pop(name, None)

    def links(self, group: str) -> set[tuple[int, int]]:
        """(sender, receiver) of every connection of the group that was seen, also if it has ended since."""
        return set(self._groups[group].roster.links)

    def coverage(self, group: str) -> float:
        """What part of an all-reduce's final values the connections seen so far can show, 0..1: of the largest one
        so far; before the first, of nothing."""
        return self._groups[group].ledger.coverage()

    def max_tag(self, group: str) -> int:
        """Highest tag of any collective seen in the group, -1 if none."""
        follower = self._groups[group]
        newest = follower.ledger.tag if follower.pending else follower.ledger.tag - 1
        return newest if newest >= follower.ledger.first else -1

    def decided(self, group: str) -> int:
        """The tag of the next collective: of messages behind it, it is not known how many collectives they are."""
        return self._groups[group].ledger.tag

    def waiting(self, group: str) -> int:
        """Bytes on the wire of the messages that no collective explains yet, counting what was lost among them as the
        longest there are."""
        lanes = [lane for lane in self._groups[group].roster.lanes if lane.queue]
        lost = sum(HEADLESS_BYTES for lane in lanes if self._lanes.broken(lane))
        return lost + sum(
            kept.length if kept.length >= 0 else HEADLESS_BYTES for lane in lanes for kept in lane.queue
        )

    def gaps(self, group: str) -> dict[tuple[int, int], int]:
        """(channel, sender) of each open connection -> how often packets were lost on it where no collective was
        known, so that one may have gone unnoticed."""
        follower = self._groups[group]
        found: dict[tuple[int, int], int] = {}
        for connection in follower.roster.connections:
            for lane in connection.lanes.values():
                key = connection.edge.channel, connection.edge.sender
                found[key] = found.get(key, 0) + int(self._lanes.state.lanes[lane.index, n.L_LOST])
        return found

    def newest(self, group: str) -> dict[tuple[int, int], int]:
        """The same connections -> the highest tag of any: what is known of a collective is known of all of them."""
        return dict.fromkeys(self.gaps(group), self.max_tag(group))

    # Results

    def can_begin(self, request: Request, size: int, itemsize: int) -> bool:
        """Whether what was seen so far of a collective can be an all-reduce of that size."""
        follower = self._groups[request.group]
        if request.kind != ALLREDUCE:
            return False
        known = follower.ledger.known.get(request.tag)
        if known is not None:
            return known.blueprint.size == size
        return request.tag == follower.ledger.tag and follower.can_begin(size, itemsize)

    def landing(self, group: str, tag: int) -> Landing | None:
        """The landing of an all-reduce, complete or not; valid until it is retired."""
        follower = self._groups.get(group)
        known = follower.ledger.known.get(tag) if follower is not None else None
        if known is None or not known.reduction:
            return None
        return self._held.landings.get((group, tag))

    def causes(self, group: str, tag: int, size: int = 0) -> list[Cause]:
        """See `Decoder.causes`."""
        follower, landing = self._groups[group], self.landing(group, tag)
        newest = self._newest.get(group)
        if landing is None:  # whole collectives were lost, or none is believed any more
            behind = [(0, size, newest)] if newest is not None else []
            return explained([(0, size)] if size else [], [], behind, self.evidence)
        lost, behind = losses(follower.roster, tag, self._flows.vantage)
        for connection in follower.roster.gone():
            part = follower.ledger.known[tag].blueprint.part(connection.edge)
            for offset, length in part.places[part.places[:, 6] > 0, 4:6].tolist() if part is not None else ():
                behind += [(offset, offset + length, newest)] if newest is not None else []
        return explained(landing.holes(), lost, behind, self.evidence)

    def fits(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """Whether `place` with that size would place an all-reduce, or has."""
        return self._groups[group].fits(tag, size, itemsize)

    def may_fit(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """Whether the next collective, which is not known yet, may prove to be an all-reduce of that size."""
        follower = self._groups[group]
        return tag == follower.ledger.tag and follower.pending and follower.can_begin(size, itemsize)

    def place(self, group: str, tag: int, size: int, itemsize: int) -> Landing | None:
        """Place an all-reduce that was planned RAW, now that its size is known.

        Done only if the size fits: some connection has shown all its messages, and none shows anything else. What
        follows it is looked at with the next `feed`, and so come the events that this causes.
        """
        return self._groups[group].place(tag, size, itemsize)

    def settled(self, group: str, tag: int, behind: int) -> bool:
        """Whether no seen connection can bring anything more of an all-reduce: each has finished it, ended, or gone on
        to what begins when it is over, a tag from `behind` on, or far beyond it."""
        return self._groups[group].ledger.settled(tag, min(behind, tag + FAR))

    def retire(self, group: str, below_tag: int) -> None:
        """Free everything held of collectives with tags below `below_tag`; their landings' data becomes empty."""
        self._groups[group].placer.retire(below_tag)
        self._held.drop(group, below_tag)

    @property
    def counters(self) -> dict[str, int]:
        """Cumulative counts, and bytes held now (`memory_bytes`)."""
        return {
            "flows": len(self._owner),
            "flows_refused": self._refused,
            "collectives": sum(f.ledger.tag - f.ledger.first for f in self._groups.values()),
            "groups_lost": sum(f.ledger.lost is not None for f in self._groups.values()),
            "placed_bytes": int(self._lanes.state.cursor[n.C_PLACED]),
            "memory_bytes": self._held.budget.held,
        }

    @property
    def unfinished(self) -> bool:
        """Whether the last feed has put something off until the next one."""
        return self._allowance.short

    # Feeding

    def feed(self, spans: MessageSpans, now: int) -> list[Event]:
        """Take a batch of spans; `now` is the capture time reached, ns. Returns what happened, in order."""
        lanes, messages = self._lanes, self._roce.messages
        self._allowance.renew()
        lanes.fit_rows(len(messages))
        cursor = lanes.state.cursor
        cursor[n.C_SPAN] = cursor[n.C_LOG] = 0
        while spans.n:
            reason = run(lanes.handle, messages, spans.handle, spans.n)
            if cursor[n.C_LOG]:
                self._drain(messages)
            if reason == n.END_OF_SPANS:
                break
            self._answer(reason, spans, messages)
        events: list[Event] = []
        for follower in self._groups.values():
            follower.look(now)
            events += follower.ledger.events
            follower.ledger.events = []
        return events

    def _answer(self, reason: int, spans: MessageSpans, messages: np.ndarray) -> None:
        """Give the kernel what it stopped for."""
        cursor = self._lanes.state.cursor
        at = int(cursor[n.C_SPAN])
        flow = int(cursor[n.C_FLOW])
        if reason == n.NEW_FLOW:
            self._meet(flow, messages[int(spans.message[at])])
        elif reason == n.NODES:
            self._held.landing(int(cursor[n.C_ARGUMENT])).reserve(int(spans.length[at]))
        elif reason == n.CLOSED:
            self._close(flow)
            cursor[n.C_SPAN] = at + 1
        elif reason in (n.ASK, n.MISFIT):
            lane, slot = self._lanes.lanes[int(cursor[n.C_LANE])], int(cursor[n.C_SLOT])
            follower, row = self._owner[lane.index], messages[slot]
            cursor[n.C_SPAN] = at + 1
            if reason == n.ASK:
                follower.ask(lane, slot, row, int(spans.ts[at]))
            else:
                kept = kept_of(row, slot, int(spans.ts[at]))
                follower.placer.contradicted(lane, kept, int(cursor[n.C_WHY]))

    def _meet(self, flow: int, message: np.ndarray) -> None:
        """The first message of a flow: is it of a group?"""
        status = self._lanes.state.status
        status[flow] = n.OTHER
        if message[M_KIND] != WRITE or len(message) != M_COLUMNS:
            return
        source, destination = self._flows.endpoint_src(flow)[0], self._flows.endpoint_dst(flow)[0]
        for name, follower in self._groups.items():
            nodes = self._nodes[name]
            ends = nodes.get(normal(source), -1), nodes.get(normal(destination), -1)
            if min(ends) < 0 or ends[0] == ends[1] or self._vantage[name] not in (None, self._flows.vantage(flow)):
                continue
            form = tuple(getattr(follower.form, field) for field in _FORM_FIELDS)
            announces = message[M_PACKETS] == 1 and message[M_LENGTH] == form[0] and message[M_IMM] < 0
            if follower.refuse(ends, bool(announces)):
                self._refused += 1
                return
            if announces:
                if self._lanes.read_cts(flow, form):
                    follower.roster.announces(flow, ends)
                else:
                    self._refused += 1
                    follower.full(len(self._lanes.state.lanes))
                return
            late = self._lanes.state.track[flow, 1] >= self._attached[name] > 0
            lane = None if late else self._lanes.open(flow, ends, self._attached[name], follower.endian)
            if lane is None:
                self._refused += 1
                if not late:
                    follower.full(len(self._lanes.state.lanes))
                return
            self._owner[lane.index] = follower
            follower.opened(lane)
            return

    def _close(self, flow: int) -> None:
        """The queue pair is over, or another one has its place."""
        state = self._lanes.state
        if state.status[flow] == n.LANE:
            lane = self._lanes.lanes[int(state.owner[flow])]
            follower = self._owner.pop(lane.index)
            ends = follower.closed(lane)
            self._lanes.close(lane, n.UNMET)
            if ends is not None:
                follower.ledger.events.append(FlowClosed(follower.group.name, *ends, True))
        elif state.status[flow] == n.CTS_FLOW:
            for follower in self._groups.values():
                follower.roster.silent(flow)
            self._lanes.forget_cts(flow, n.UNMET)
        state.status[flow] = n.UNMET

    def _drain(self, messages: np.ndarray) -> None:
        """Take everything that the kernel has logged."""
        state = self._lanes.state
        count = int(state.cursor[n.C_LOG])
        state.cursor[n.C_LOG] = 0
        log = state.log[:count]
        holes = log[:, 0] == n.LOG_HOLE
        if holes.any():
            self._lost_on_lanes(log[holes])
            log = log[~holes]
        for what, a, b, c in log[:, :4].tolist():
            if what in (n.LOG_LANDED, n.LOG_CONFLICT):
                name = self._held.names.get(a)
                if name is not None:
                    landing = self._held.landing(a)
                    ledger = self._groups[name[0]].ledger
                    if what == n.LOG_LANDED:
                        ledger.landed(landing)
                    else:
                        ledger.conflicts(landing)
            elif b in self._lanes.lanes:
                lane = self._lanes.lanes[b]
                if what == n.LOG_END:
                    self._owner[b].ended(lane, a, messages[a], bool(c))
                else:
                    self._owner[b].voided(lane, a)

    def _lost_on_lanes(self, holes: np.ndarray) -> None:
        """Rows of the log that tell what never came."""
        for index in np.unique(holes[:, 1]).tolist():
            lane = self._lanes.lanes.get(index)
            if lane is not None:
                rows = holes[holes[:, 1] == index, 2:].copy()
                lose(lane, rows)
                known, since, until = rows[-1, 3:].tolist()
                why = Why(known, since, until, self._flows.vantage(lane.flow))
                self._newest[self._owner[index].group.name] = why
