"""The lanes of a gloo decoder: made for flows, claimed by groups, freed again; and who is at their ends."""

from __future__ import annotations

import numpy as np

from mirror.flows import Flows
from reconstruct.decoder import ALLREDUCE
from reconstruct.gloo import state as g
from reconstruct.gloo.framing import PREAMBLE_BYTES
from reconstruct.groups import Claim, Claims, Membership

__all__ = ["LaneTable", "slot_of", "split"]

_FIRST_LANES = 64


def slot_of(kind: int, tag: int) -> int:
    """The slot of a collective (docs/gloo.md, "Slots and tags")."""
    return kind << 56 | tag << 24 if kind else tag


def split(slot: int) -> tuple[int, int]:
    """(kind, tag) of a slot."""
    kind = slot >> 56
    return (kind, slot >> 24 & 0xFFFFFFFF) if kind else (0, slot)


class LaneTable:
    """State arrays plus what Python knows about each lane."""

    def __init__(self, flows: Flows, claims: Claims, max_lanes: int) -> None:
        self.state = g.fresh_state(flows.capacity, flows.peer, min(_FIRST_LANES, max_lanes))
        self.refused = 0  # gloo flows that found no lane
        self._flows = flows
        self._claims = claims
        self._max = max_lanes
        self._uid = 0
        self._free = list(range(len(self.state.lanes) - 1, -1, -1))

    # Making and freeing

    def meet(self, flow: int) -> None:
        """First bytes of a flow: it gets a lane if a group claims it, else it waits for classification."""
        status = self.state.status
        begun = status[flow] == g.BEGUN
        status[flow] = g.HEAD if begun else g.OTHER
        claim = self._claim_of(flow)
        if claim is None:
            return
        lane = self._make(flow)
        if lane < 0:
            return
        self._take(lane, claim)
        row = self.state.lanes[lane]
        if begun:
            row[g.MODE] = g.HELLO if claim.to_listener else g.PREAMBLE
            row[g.TRUSTED] = 3
        else:
            row[g.POSITION] = -1
            self._unframed(lane)

    def found(self, flow: int) -> None:
        """The head of a flow that no group claims is gloo's: follow its framing."""
        lane = self._make(flow)
        if lane < 0:
            self.state.status[flow] = g.OTHER
        else:
            self._replay(lane, flow, with_hello=int(self.state.have[flow]) > PREAMBLE_BYTES)

    def claim_all(self) -> None:
        """Look at every flow again: a group was added."""
        ports = np.array(sorted(self._claims.ports()), np.int64)
        words = self._flows.table.key[: self._flows.count, 4]
        near = np.isin(words >> 16 & 0xFFFF, ports) | np.isin(words & 0xFFFF, ports)
        for flow in np.flatnonzero(near).tolist():
            status = int(self.state.status[flow])
            claim = self._claim_of(flow, before=True) if status in (g.HEAD, g.LANE, g.OTHER) else None
            if claim is not None:
                self._claim_late(flow, status, claim)

    def _claim_late(self, flow: int, status: int, claim: Claim) -> None:
        lane = int(self.state.lane[flow])
        if lane >= 0:
            if self.state.lanes[lane, g.GROUP] < 0:
                self._take(lane, claim)
                if self.state.lanes[lane, g.MODE] == g.DEAD:
                    self._unframed(lane)
            return
        lane = self._make(flow)
        if lane < 0:
            return
        self._take(lane, claim)
        if status == g.HEAD:
            self._replay(lane, flow, with_hello=claim.to_listener)
        else:
            self.state.lanes[lane, g.POSITION] = -1
            self._unframed(lane)

    def release_group(self, number: int) -> list[int]:
        """Take the group's lanes away from it; returns them. They keep their framing, but no slot keeps its plan."""
        lanes = self.of_group(number)
        for lane in lanes:
            row, entries = self.state.lanes[lane], self.state.entries[lane]
            row[g.GROUP] = row[g.FAR] = -1
            row[g.DEST_KIND] = g.NOWHERE
            self._flows.pinned[row[g.FLOW]] = 0
            entries[entries[:, g.COUNT] > 0, g.PLAN] = g.LOST
            self.state.recent[lane, :, g.R_KIND] = g.NOWHERE
        return lanes

    def retire(self, number: int, below: int, addresses: list[int]) -> list[int]:
        """Drop the slots of tags below `below` in a group's lanes, and every reference to `addresses`.

        Returns the lanes that are in the middle of a message of such a slot.
        """
        busy = []
        for lane in self.of_group(number):
            row, entries, recent = self.state.lanes[lane], self.state.entries[lane], self.state.recent[lane]
            slots = entries[:, g.SLOT]
            old = (slots >> 56 > 0) & ((slots >> 24 & 0xFFFFFFFF) < below)
            entries[old] = -1
            row[g.FLOOR] = max(int(row[g.FLOOR]), below - 1)
            recent[np.isin(recent[:, g.R_ADDRESS], addresses), g.R_KIND] = g.NOWHERE
            kind, tag = split(int(row[g.CURRENT])) if row[g.MODE] == g.PAYLOAD else (0, 0)
            if kind and tag < below:
                row[g.DEST_KIND] = recent[row[g.NEWEST], g.R_KIND] = g.NOWHERE
                busy.append(lane)
        return busy

    def free(self, lane: int) -> None:
        """The lane's flow has ended."""
        row = self.state.lanes[lane]
        flow = int(row[g.FLOW])
        if row[g.GROUP] >= 0:
            self._flows.pinned[flow] = 0
            member = self._claims.of(int(row[g.GROUP]))
            member.max_tag = max(member.max_tag, int(row[g.MAX_TAG]))
        if row[g.PEER] >= 0:
            self.state.lanes[row[g.PEER], g.PEER] = -1
        if self.state.lane[flow] == lane:
            self.state.lane[flow] = -1
        g.clear_lane(self.state, lane)
        self._free.append(lane)

    def _make(self, flow: int) -> int:
        if not self._free and not self._more():
            self.refused += 1
            return -1
        lane = self._free.pop()
        state = self.state
        g.clear_lane(state, lane)
        row = state.lanes[lane]
        self._uid += 1
        row[g.FLOW], row[g.UID] = flow, self._uid
        state.lane[flow] = lane
        state.status[flow] = g.LANE
        peer = int(state.peer[flow])
        back = int(state.lane[peer]) if peer >= 0 else -1
        row[g.PEER] = back
        if back >= 0:
            state.lanes[back, g.PEER] = lane
        return lane

    def _more(self) -> bool:
        old = len(self.state.lanes)
        new = min(self._max, 2 * old)
        if new > old:
            self.state = g.grow_lanes(self.state, new)
            self._free = list(range(new - 1, old - 1, -1))
            return True
        # The longest silent flow that nobody claims gives way.
        rows = self.state.lanes
        idle = np.flatnonzero((rows[:, g.FLOW] >= 0) & (rows[:, g.GROUP] < 0))
        if not idle.size:
            return False
        victim = int(idle[np.argmin(rows[idle, g.LAST_TS])])
        self.state.status[rows[victim, g.FLOW]] = g.OTHER
        self.free(victim)
        return True

    def _take(self, lane: int, claim: Claim) -> None:
        row = self.state.lanes[lane]
        row[g.GROUP], row[g.CONTEXT], row[g.RANK] = claim.group, claim.context, claim.listener
        row[g.ROLE], row[g.FAR] = int(claim.to_listener), claim.other
        self._flows.pinned[row[g.FLOW]] = 1
        self.ranks(lane)

    def _unframed(self, lane: int) -> None:
        row = self.state.lanes[lane]
        row[g.MODE], row[g.GAP_KNOWN], row[g.HAVE] = g.SCAN, 0, 0

    def _replay(self, lane: int, flow: int, *, with_hello: bool) -> None:
        """Give the lane the bytes that the flow's head has swallowed: at most a hello and one preamble."""
        state, row = self.state, self.state.lanes[lane]
        have = int(state.have[flow])
        head = state.head[flow, :have]
        row[g.POSITION], row[g.TRUSTED] = have, 3
        row[g.MODE] = g.PREAMBLE
        if with_hello:
            if have < 8:
                row[g.MODE] = g.HELLO
            else:
                row[g.HELLO_VALUE] = int(head[:8].view(np.int64)[0])
                head = head[8:]
        if head.size > PREAMBLE_BYTES:
            # More than one preamble waited for a hello that this side does not send: it is no message.
            self._unframed(lane)
            return
        state.pre[lane, : head.size] = head
        row[g.HAVE] = head.size

    def _claim_of(self, flow: int, *, before: bool = False) -> Claim | None:
        source, destination = self._flows.endpoint_src(flow), self._flows.endpoint_dst(flow)
        return self._claims.find(source, destination, self._flows.vantage(flow), before=before)

    def dismiss(self, lane: int) -> None:
        """Stop following a flow that nobody claims and that turned out to be no gloo."""
        self.state.status[self.state.lanes[lane, g.FLOW]] = g.OTHER
        self.free(lane)

    # Looking

    def vantage(self, lane: int) -> int:
        """The vantage group that shows a lane's flow."""
        return self._flows.vantage(int(self.state.lanes[lane, g.FLOW]))

    @property
    def members(self) -> dict[str, Membership]:
        """The known groups."""
        return self._claims.members

    def with_uid(self, uid: int) -> int:
        """The lane of a stream by the number that no other stream has; -1 if the stream has ended."""
        at = np.flatnonzero(self.state.lanes[:, g.UID] == uid)
        return int(at[0]) if at.size else -1

    def of_group(self, number: int) -> list[int]:
        """Lanes of a group, also those whose flow has gone but that are not freed yet."""
        return np.flatnonzero(self.state.lanes[:, g.GROUP] == number).tolist()

    def member(self, lane: int) -> Membership | None:
        """The group of a lane."""
        number = int(self.state.lanes[lane, g.GROUP])
        return self._claims.of(number) if number >= 0 else None

    def ranks(self, lane: int, kind: int = -1) -> tuple[int, int]:
        """(sender, receiver) in the group, -1 where unknown. kind: of a collective that the lane carries."""
        member = self.member(lane)
        if member is None:
            return -1, -1
        row = self.state.lanes[lane]
        world, near = member.group.world_size, int(row[g.RANK])
        far = int(row[g.FAR])
        if far < 0:
            greeting = lane if row[g.ROLE] else int(row[g.PEER])
            hello = int(self.state.lanes[greeting, g.HELLO_VALUE]) if greeting >= 0 else -1
            if 0 <= hello < world and hello != near:
                far = row[g.FAR] = hello
        if far < 0 and kind == ALLREDUCE:
            far = (near + 1) % world if row[g.ROLE] else (near - 1) % world
        pair = (far, near) if row[g.ROLE] else (near, far)
        if far >= 0:
            member.seen.add((int(row[g.CONTEXT]), *pair))
        return pair

    def entry(self, lane: int, slot: int) -> np.ndarray | None:
        """The lane's entry for a slot, a view."""
        at = np.flatnonzero(self.state.entries[lane, :, g.SLOT] == slot)
        return self.state.entries[lane, at[0]] if at.size else None

    def ring_lanes(self, member: Membership, context: int) -> list[int]:
        """Lanes of one context that go from a rank to the one before it."""
        world = member.group.world_size
        found = []
        for lane in self.of_group(member.number):
            sender, receiver = self.ranks(lane)
            if self.state.lanes[lane, g.CONTEXT] == context and sender >= 0 and receiver == (sender - 1) % world:
                found.append(lane)
        return found
