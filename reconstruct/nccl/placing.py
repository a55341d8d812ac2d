"""Known collectives on the lanes: which lane is which connection, what was kept put to its place, wrong decisions taken
back.

A message that contradicts a decided collective takes the decision back: what was placed is poisoned, and the search
begins again at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reconstruct.decoder import NOT_THIS_SIZE, RAW, AllReduce
from reconstruct.landing import COMPLETED, CONFLICTED, Landing
from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Connection, Reader
from reconstruct.nccl.blame import forget_losses
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.holdings import Holdings, Kept
from reconstruct.nccl.keeper import Keeper
from reconstruct.nccl.known import Known, Ledger
from reconstruct.nccl.lanes import Entry, Lane, Lanes
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE, SLICE_STEPS, SLOT_BYTES
from reconstruct.nccl.script import T_FIRST, T_WIRE

__all__ = ["Placer"]

_MOST_RETRIES = 3


class Placer:
    """Of one group. taken_back: called when decisions were."""

    def __init__(self, group: NcclGroup, ledger: Ledger, roster: Roster, lanes: Lanes, held: Holdings, keeper: Keeper,
                 reader: Reader, taken_back: Callable[[], None]) -> None:
        self._group, self._ledger, self._roster, self._lanes = group, ledger, roster, lanes
        self._held, self._keeper, self._reader, self._taken_back = held, keeper, reader, taken_back
        self._tries: dict[int, int] = {}

    def leave(self, lane: Lane) -> None:
        """The flow is no connection of this group, or not to be believed."""
        self._keeper.forget(lane)
        self._roster.leave(lane)
        self._lanes.stop(lane)

    def bind(self) -> None:
        """Give lanes their places where the known collectives tell them."""
        groups, strangers = self._roster.loose()
        for lane in strangers:
            self.leave(lane)  # of another communicator, or of send and receive
        for lanes, numbers in groups if self._ledger.log else []:
            connections = {number: self._roster.connections[number] for number in numbers}
            for lane in self._reader.strange(lanes, connections):
                self.leave(lane)
            lanes = [lane for lane in lanes if lane.queue]
            for apart in (False, True) if self._reader.apart is None else (self._reader.apart,):
                match = self._reader.match(lanes, connections, None, apart)
                if match.places and match.matched > 0:
                    for place in match.places:
                        self.extend(self._roster.settle(place))
                    break

    def use(self, connection: Connection, tag: int, blueprint: Blueprint, meta: int) -> None:
        """A collective is the next one on a connection; meta: address of its landing, 0 for none."""
        part = blueprint.part(connection.edge)
        if part is not None:
            connection.learn(self._lanes)
            connection.add(tag, blueprint, part, meta)

    def extend(self, connection: Connection) -> None:
        """Let a connection's lanes know the collectives that they do not know yet, and place what these explain."""
        for pair, lane in list(connection.lanes.items()):
            self._roster.pair_up(connection, lane)
            while self._ledger.lost is None and connection.done[pair] < len(connection.uses):
                use = connection.uses[connection.done[pair]]
                number = use.number + connection.phase
                table = self._reader.table(
                    use.part, use.blueprint, lane, pair, number, use.base, bool(self._reader.apart)
                )
                if table is None:
                    break
                lane.mtu = lane.mtu or self._reader.mtu
                connection.done[pair] += 1
                if len(table) > 1:
                    call = use.blueprint.call
                    self._lanes.append(
                        lane, use.tag, table, protocol=call.protocol, step=use.base, exact=use.exact,
                        steps=use.blueprint.steps(use.part), checked=use.exact and call.kind == ALLREDUCE,
                        meta=use.meta if use.tag in self._ledger.known else 0,
                        number=connection.announced + use.number + 1 if connection.announced >= 0 else 0,
                        unit=int(use.part.row[SLICE_STEPS]),
                    )  # fmt: skip
            reach = int(self._lanes.state.lanes[lane.index, n.L_NEXT])
            while self._ledger.lost is None and lane.queue and lane.queue[0].first < reach:
                self._take(lane, self._keeper.take(lane))
                reach = int(self._lanes.state.lanes[lane.index, n.L_NEXT])

    def _take(self, lane: Lane, kept: Kept) -> None:
        """Place a message that was kept and is known now."""
        entry = self._entry(lane, kept)
        known = self._ledger.known.get(entry.tag) if entry is not None else None
        if known is not None and known.plan is RAW and known.reduction:
            if kept.slot >= 0 and not self._keeper.stored(kept):
                self._keeper.store(lane, kept)  # it has just begun, and was what decided
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
            self._ledger.conflicts(landing)
        if landing is not None and flags & COMPLETED and not was:
            self._ledger.landed(landing)

    def _entry(self, lane: Lane, kept: Kept) -> Entry | None:
        return next((entry for entry in reversed(lane.entries) if entry.start <= kept.first), None)

    def place_kept(self, known: Known, blueprint: Blueprint) -> Landing | None:
        """The size of an all-reduce that was kept whole is known now."""
        itemsize = blueprint.call.itemsize
        landing = self._held.make(self._group.name, known.tag, blueprint.size, itemsize, self._group.world_size)
        if landing is None:
            return None
        known.landing, known.blueprint, known.plan = landing, blueprint, AllReduce(blueprint.size, itemsize)
        for connection in self._roster.watched():
            for use in connection.uses:
                part = blueprint.part(connection.edge) if use.tag == known.tag else None
                if part is not None:
                    use.blueprint, use.part, use.meta = blueprint, part, landing.address
                    for pair, lane in connection.lanes.items():
                        number = use.number + connection.phase
                        table = self._reader.table(
                            part, blueprint, lane, pair, number, use.base, bool(self._reader.apart)
                        )
                        if table is not None:
                            self._lanes.replace(lane, known.tag, table, landing.address)
        stash, known.stash = known.stash, []
        for lane, kept in stash:
            self._take(lane, kept)
        return landing

    def contradicted(self, lane: Lane, kept: Kept, why: int) -> None:
        """A message is not what a decided collective has at its place (`state.WRONG_...`): the decision was wrong."""
        entry = self._entry(lane, kept)
        if entry is None or self._ledger.lost is not None:
            return
        tag, what = entry.tag, self._contradiction(lane, entry, kept, why)
        if self._take_back(tag, what):
            self._keeper.insert(lane, kept)
            if kept.slot >= 0:
                self._keeper.store(lane, kept)

    def out_of_order(self, tag: int) -> None:
        """What is to follow this collective was sent before it: it was captured late, and its place was taken."""
        self._take_back(tag, "another collective was sent before it, and captured later")

    def _take_back(self, tag: int, what: str) -> bool:
        """Take back the decision of a collective and of all behind it, for a reason; False if nothing more is claimed
        now."""
        self._tries[tag] = self._tries.get(tag, 0) + 1
        later = [known for known in self._ledger.known.values() if known.tag >= tag]
        told = any(known.landing is not None and known.landing.complete for known in later if known.tag > tag)
        if tag not in self._ledger.known or self._tries[tag] > _MOST_RETRIES or told:
            self.give_up(f"{NOT_THIS_SIZE}: {what}", tag)
            return False
        for known in later:
            if known.landing is not None:
                known.landing.condemn()
                self._held.forget(self._group.name, known.tag)
                reason = NOT_THIS_SIZE if known.tag == tag else "the collective before it is not of the size it seemed"
                self._ledger.say((known.tag,), f"{reason}: {what}")
        self._ledger.foreign.add(tag)
        self._rewind(tag)
        self._taken_back()
        return True

    def _contradiction(self, lane: Lane, entry: Entry, kept: Kept, why: int) -> str:
        index = int(np.searchsorted(entry.table[:-1, T_FIRST], kept.first - entry.start, "right")) - 1
        wanted = int(entry.table[index, T_WIRE])
        what = {
            n.WRONG_LENGTH: f"message {index} has {kept.length} bytes, not {wanted}",
            n.WRONG_ADDRESS: f"message {index} does not go to the slot of its step",
            n.WRONG_MTU: f"the path MTU is {kept.mtu}, not {lane.mtu}",
            n.WRONG_ANNOUNCEMENT: f"message {index} does not go where the CTS entry of its number says",
            n.WRONG_IMMEDIATE: f"the immediate of message {index} is not its size, {wanted}",
        }[why]
        edge = self._roster.edge(lane)
        return what if edge is None else f"{what} (channel {edge.channel}, rank {edge.sender} to {edge.receiver})"

    def _rewind(self, tag: int) -> None:
        """Take back every decision from `tag` on. Of what was seen since only lengths are left."""
        for connection in self._roster.connections:
            connection.rewind(tag)
        for lane in self._roster.lanes:
            for entry in self._lanes.rewind(lane, tag):
                for k in np.flatnonzero(entry.marks).tolist():
                    first, wire = entry.start + int(entry.table[k, T_FIRST]), int(entry.table[k, T_WIRE])
                    packets = max(1, -(-wire // (lane.mtu or 4096)))
                    ghost = Kept(first, packets, wire, -1, 0, lane.mtu, -1, 0, dropped=True)
                    ghost.announced = 0, SLOT_BYTES[entry.protocol]  # flags and slots have shown the protocol
                    self._keeper.insert(lane, ghost)
        for known in [known for known in self._ledger.known.values() if known.tag >= tag]:
            for lane, kept in known.stash:
                self._keeper.count -= 1
                self._keeper.insert(lane, kept)
        self._ledger.rewind(tag)

    def give_up(self, reason: str, tag: int | None = None) -> None:
        """Nothing that follows is understood: claim nothing more."""
        if self._ledger.lost is not None:
            return
        self._ledger.lost = reason
        first = self._ledger.tag if tag is None else tag
        for known in self._ledger.known.values():
            if known.tag >= first and known.landing is not None:
                known.landing.condemn()
        self._ledger.say(tuple(range(first, max(first, self._ledger.tag) + 1)), reason)
        for lane in list(self._roster.lanes):
            self.leave(lane)

    def retire(self, below: int) -> None:
        """Free everything held of tags below `below`, but for the landings."""
        for lane in self._roster.lanes:
            self._lanes.retire(lane, below)
            forget_losses(lane)
        for tag in [tag for tag in self._ledger.known if tag < below]:
            for lane, kept in self._ledger.known.pop(tag).stash:
                self._keeper.drop(lane, kept)
        for connection in self._roster.watched():
            connection.retire(below)
        self._ledger.foreign = {tag for tag in self._ledger.foreign if tag >= below}
        self._tries = {tag: count for tag, count in self._tries.items() if tag >= below}
