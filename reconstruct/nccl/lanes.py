"""Lanes of the NCCL decoder, as Python sees them: flows of known communicators, and what is known on each.

`Lanes` owns the arrays of `state.State`, gives lanes and entries out and takes them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mirror.memory import address_of, handle
from reconstruct.landing import CONFLICTED, Landing
from reconstruct.nccl import state as n
from reconstruct.nccl.holdings import Kept
from reconstruct.nccl.place import account, assign, dispute, pour_into
from reconstruct.nccl.script import NOT_SEEN, T_FIRST

__all__ = ["Connections", "Entry", "Lane", "Lanes"]


@dataclass(slots=True, eq=False)
class Entry:
    """One collective on one lane: the kernel's row, and what keeps its memory alive."""

    row: int
    tag: int
    table: np.ndarray
    marks: np.ndarray
    """uint8 per message of the table: whether its start was seen."""
    start: int
    protocol: int
    steps: int
    """By how much the connection's step counter advances, from the entry's base on."""


@dataclass(slots=True, eq=False)
class Lane:
    """One queue pair of a connection of a group: `ends` are the node numbers of sender and receiver."""

    index: int
    flow: int
    source: str
    destination: str
    pair: int
    ends: tuple[int, int]
    queue: list[Kept] = field(default_factory=list)
    """Messages behind the last known collective, by packet number."""
    entries: list[Entry] = field(default_factory=list)
    place: tuple[int, int] | None = None
    """(number of the connection, which of its queue pairs), once that is known."""
    mtu: int = 0
    sender: int = -1
    told: int = -1
    """The connection that the set-up traffic named its queue pair as, by number."""
    named: int = -1
    """The same, as long as its announcements do not say otherwise."""
    seen: bool = False
    """Something of it was seen since the group was added."""
    loose: int = 0
    """Messages of it kept so far without its connection being known."""
    gaps: int = 0
    """L_LOST when its last known collective began to be known."""
    lost: np.ndarray = field(default_factory=lambda: np.empty((0, 6), np.int64))
    """See `blame.lose`."""
    fits: dict[object, Any] = field(default_factory=dict)
    """What `binding.Reader` has found out about these messages: forgotten where `queue` or a message in it changes."""


class Connections(Protocol):
    """Who is at the ends of a flow: `mirror.roce.QueuePairs`, or `reconstruct.nccl.sockets.SocketMessages`."""

    @property
    def capacity(self) -> int:
        """Flows at once."""

    def endpoint_src(self, flow: int) -> tuple[str, int]:
        """(address of the sender, whatever)"""

    def endpoint_dst(self, flow: int) -> tuple[str, int]:
        """(address of the receiver, a number: the higher, the later the flow was made)"""

    def vantage(self, flow: int) -> int:
        """The vantage group that shows it."""


class Lanes:
    """All lanes of a decoder."""

    def __init__(self, flows: Connections, most: int) -> None:
        self.flows = flows
        self.state = n.fresh_state(flows.capacity, most, 4 * most)
        self.lanes: dict[int, Lane] = {}
        self.by_slot: dict[tuple[int, int], Kept] = {}
        """(lane, row of the reassembler) -> message kept that may still get bytes."""
        self._free_lanes = list(range(most))[::-1]
        self._free_entries = list(range(4 * most))[::-1]
        self._free_cts = list(range(most))[::-1]
        self.handle = handle(*self.state)

    def _replace(self, **arrays: np.ndarray) -> None:
        self.state = self.state._replace(**arrays)
        self.handle = handle(*self.state)

    def fit_rows(self, rows: int) -> None:
        """Make `where` as long as the reassembler's table of messages, and one row more."""
        where = self.state.where
        if len(where) != rows + 1:
            longer = np.zeros((rows + 1, n.WHERE_WORDS), np.int64)
            longer[: len(where) - 1] = where[:-1]
            self._replace(where=longer)

    @property
    def spare(self) -> int:
        """The row of `where` for messages that are over."""
        return len(self.state.where) - 1

    # Flows

    def open(self, flow: int, ends: tuple[int, int], attached: int, endian: int) -> Lane | None:
        """A lane for a flow; None if there is no room."""
        if not self._free_lanes:
            return None
        index = self._free_lanes.pop()
        row = self.state.lanes[index]
        row[:] = 0
        row[[n.L_FLOW, n.L_STATE, n.L_ATTACHED, n.L_ENDIAN]] = flow, n.FOLLOWING, attached, endian
        row[n.L_NEXT] = self.state.track[flow, 0]
        row[n.L_AT] = row[n.L_LAST] = row[n.L_TOP] = row[n.L_CTS] = -1
        source, (destination, pair) = self.flows.endpoint_src(flow)[0], self.flows.endpoint_dst(flow)
        lane = Lane(index, flow, source, destination, pair, ends)
        self.lanes[index] = lane
        self.state.status[flow], self.state.owner[flow] = n.LANE, index
        return lane

    def close(self, lane: Lane, status: int) -> None:
        """The flow is followed no more; its kept messages must have been discarded."""
        self.stop(lane)
        self.state.status[lane.flow], self.state.owner[lane.flow] = status, -1
        self.state.lanes[lane.index, n.L_STATE] = n.FREE
        del self.lanes[lane.index]
        self._free_lanes.append(lane.index)

    def stop(self, lane: Lane) -> None:
        """Nothing of this lane is believed any more."""
        self.state.lanes[lane.index, n.L_STATE] = n.DEAD
        where = self.state.where
        where[where[:, n.W_LANE] == lane.index, n.W_MODE] = n.NOTHING
        self._free_entries += [entry.row for entry in lane.entries]
        lane.entries.clear()
        row = self.state.lanes[lane.index]
        row[n.L_AT] = row[n.L_LAST] = -1

    def read_cts(self, flow: int, form: tuple[int, ...]) -> bool:
        """A flow carries CTS entries of this form: `state.F_...`."""
        if not self._free_cts:
            return False
        row = self._free_cts.pop()
        self.state.cts[row], self.state.cts_form[row] = -1, form
        self.state.status[flow], self.state.owner[flow] = n.CTS_FLOW, row
        return True

    def forget_cts(self, flow: int, status: int) -> None:
        """A flow of CTS entries is over."""
        row = int(self.state.owner[flow])
        lanes = self.state.lanes
        lanes[lanes[:, n.L_CTS] == row, n.L_CTS] = -1
        self._free_cts.append(row)
        self.state.status[flow], self.state.owner[flow] = status, -1

    def announced_by(self, flows: list[int], message: Kept) -> np.ndarray:
        """int64[n, 3], (place in `flows`, tag, number) of the CTS entries, of those that `flows` brought last, whose
        slot a message goes to: tag is the sender's rank, number that of the message on the connection, from 1."""
        kept = self.state.cts[self.state.owner[flows]].reshape(-1, n.CTS_WORDS)
        inside = message.address - kept[:, n.C_ADDRESS]  # a piece of a split message lies behind the start
        found = np.flatnonzero((inside >= 0) & (inside < kept[:, n.C_ROOM]) & (kept[:, n.C_RKEY] == message.rkey))
        return np.stack([found // n.CTS_KEPT, kept[found, n.C_TAG], kept[found, n.C_INDEX]], 1)

    # Entries

    def append(self, lane: Lane, tag: int, table: np.ndarray, *, protocol: int, step: int, exact: bool, steps: int,
               checked: bool, meta: int, number: int, unit: int) -> None:
        """The next collective on a lane. table: its messages there (not none); step: of the collective's first
        message; checked: whether addresses tell slots; meta: of the landing, 0 for none; number: of the first
        message's CTS entry, 0 unknown; unit: steps of a message."""
        if not self._free_entries:
            entries = self.state.entries
            self._free_entries = list(range(2 * len(entries) - 1, len(entries) - 1, -1))
            self._replace(entries=np.concatenate([entries, np.zeros_like(entries)]))
        at = self._free_entries.pop()
        lanes, row, e = self.state.lanes, self.state.lanes[lane.index], self.state.entries[at]
        count = len(table) - 1
        marks = np.zeros(count, np.uint8)
        start = int(row[n.L_NEXT])
        packets = int(table[count, T_FIRST])
        last = int(row[n.L_LAST])
        e[:] = 0
        e[[n.E_START, n.E_END, n.E_LEFT]] = start, start + packets, packets
        e[[n.E_TABLE, n.E_MARKS, n.E_COUNT, n.E_META, n.E_TAG]] = address_of(table), address_of(marks), count, meta, tag
        e[[n.E_PROTOCOL, n.E_STEP, n.E_EXACT, n.E_VA]] = protocol, step, exact, -1 if checked else -2
        e[[n.E_OLDER, n.E_NEWER, n.E_NUMBER, n.E_UNIT]] = last, -1, number, unit
        if last >= 0:
            self.state.entries[last, n.E_NEWER] = at
        else:
            row[n.L_AT] = at
        if row[n.L_AT] < 0:
            row[n.L_AT] = at
        lanes[lane.index, n.L_LAST] = at
        row[n.L_NEXT] = start + packets
        row[n.L_MTU] = lane.mtu
        lane.gaps = int(row[n.L_LOST])
        lane.entries.append(Entry(at, tag, table, marks, start, protocol, steps))

    def broken(self, lane: Lane) -> bool:
        """Whether packets behind the last known collective of a lane are known to be lost."""
        return int(self.state.lanes[lane.index, n.L_LOST]) > lane.gaps

    def retire(self, lane: Lane, below: int) -> None:
        """Forget a lane's entries of tags below `below`."""
        old = [entry for entry in lane.entries if entry.tag < below]
        if old:
            self._drop(lane, old)

    def rewind(self, lane: Lane, tag: int) -> list[Entry]:
        """Forget a lane's entries from `tag` on, as if they had not been known; returns them."""
        wrong = [entry for entry in lane.entries if entry.tag >= tag]
        if wrong:
            self._drop(lane, wrong)
            self.state.lanes[lane.index, n.L_NEXT] = wrong[0].start
        return wrong

    def _drop(self, lane: Lane, gone: list[Entry]) -> None:
        rows = [entry.row for entry in gone]
        lane.entries = [entry for entry in lane.entries if entry not in gone]
        entries, row, where = self.state.entries, self.state.lanes[lane.index], self.state.where
        where[np.isin(where[:, n.W_ENTRY], rows), n.W_MODE] = n.NOTHING
        where[np.isin(where[:, n.W_ENTRY], rows), n.W_ENTRY] = -1
        self._free_entries += rows
        left = [entry.row for entry in lane.entries]
        for older, newer in zip([-1, *left], [*left, -1], strict=True):
            if older >= 0:
                entries[older, n.E_NEWER] = newer
            if newer >= 0:
                entries[newer, n.E_OLDER] = older
        row[n.L_LAST] = left[-1] if left else -1
        if int(row[n.L_AT]) not in left:
            row[n.L_AT] = left[-1] if left else -1

    def replace(self, lane: Lane, tag: int, table: np.ndarray, meta: int) -> None:
        """A collective's messages lie elsewhere in the tensor than was thought: a table with the same packets."""
        for entry in lane.entries:
            if entry.tag == tag:
                entry.table = table
                self.state.entries[entry.row, [n.E_TABLE, n.E_META]] = address_of(table), meta

    # Messages that are kept

    def compared(self, lane: Lane, kept: Kept) -> bool:
        """Whether the kernel still compares further copies of a message that is over with what is kept of it."""
        if kept.row < 0 or kept.store is None:
            return False
        w = self.state.where[kept.row]
        return bool(w[n.W_MODE] == n.KEEP and w[n.W_LANE] == lane.index and w[n.W_META] == kept.store.address)

    def take(self, lane: Lane, kept: Kept, landing: Landing | None) -> tuple[int, int]:
        """Have a kept message placed, in `landing` if there is one: what `assign` found, flags of `landing.deposit`."""
        slot = kept.slot
        if slot < 0:
            slot = kept.row if self.compared(lane, kept) else self.spare
        found = int(assign(self.state, lane.index, slot, kept.first, kept.length, kept.address, kept.rkey,
                           kept.mtu))
        if found != n.FOUND:
            return found, 0
        w = self.state.where[slot]
        if kept.slot < 0:
            w[n.W_COUNTED] = 1
            account(self.state, lane.index, kept.first, kept.packets)
            if kept.imm != NOT_SEEN and w[n.W_IMMEDIATE] not in (n.ANY_IMMEDIATE, kept.imm):
                return n.WRONG_IMMEDIATE, 0
        flags = 0
        if kept.store is not None and landing is not None and w[n.W_MODE] == n.PLACE:
            data = address_of(kept.store.data)
            for start, end in kept.store.ranges():
                landing.reserve(end - start)
                flags |= int(pour_into(self.state, slot, start, data + start, end - start, kept.store.time))
            if kept.store.poisoned:
                ranges = kept.store.disputed
                for low, count in [(0, int(w[n.W_WIRE]))] if ranges is None else ranges.tolist():
                    dispute(self.state, slot, low, count)
                flags |= CONFLICTED
        return found, flags
