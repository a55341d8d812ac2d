"""Messages behind the last known collective of their lane, kept until it is known what they are."""

from __future__ import annotations

import numpy as np

from mirror.roce_state import COMPLETE, HEADLESS, M_FIRST, M_FLAGS, M_IMM, M_LENGTH, M_MTU, M_PACKETS, M_RKEY, M_VA
from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Reader
from reconstruct.nccl.holdings import Holdings, Kept
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.script import AR_THRESHOLD, NO_IMMEDIATE, NOT_SEEN

__all__ = ["Keeper", "kept_of"]


def kept_of(message: np.ndarray, slot: int, time: int) -> Kept:
    """What a row of the reassembler says of a message."""
    headless = bool(message[M_FLAGS] & HEADLESS)
    return Kept(
        int(message[M_FIRST]), max(1, int(message[M_PACKETS])), -1 if headless else int(message[M_LENGTH]),
        -1 if headless else int(message[M_VA]), int(message[M_RKEY]), int(message[M_MTU]), slot, time,
        int(message[M_IMM]) if message[M_FLAGS] & COMPLETE else NOT_SEEN,
    )  # fmt: skip


class Keeper:
    """Puts messages into the queues of lanes and takes them out. `count`: how many there are."""

    def __init__(self, lanes: Lanes, held: Holdings, reader: Reader) -> None:
        self.count = 0
        self._lanes, self._held, self._reader = lanes, held, reader

    def insert(self, lane: Lane, kept: Kept) -> None:
        """One more message of a lane."""
        at = len(lane.queue)
        while at and lane.queue[at - 1].first > kept.first:
            at -= 1
        lane.queue.insert(at, kept)
        lane.fits.clear()
        self.count += 1
        if kept.slot >= 0:
            self._lanes.by_slot[lane.index, kept.slot] = kept
        self._learn(lane, kept)

    def store(self, lane: Lane, kept: Kept) -> None:
        """Have the kernel keep the bytes of a message that is under way, if the budget allows it."""
        memory = self._held.keep(kept) if kept.length != 0 and not kept.dropped else None
        w = self._lanes.state.where[kept.slot]
        w[:] = 0
        w[[n.W_MODE, n.W_LANE, n.W_ENTRY, n.W_SENDER]] = n.KEEP, lane.index, -1, -1
        w[n.W_META] = 0 if memory is None else memory.address

    def stored(self, kept: Kept) -> bool:
        """Whether the kernel knows a message as kept."""
        return bool(self._lanes.state.where[kept.slot, n.W_MODE] == n.KEEP)

    def take(self, lane: Lane) -> Kept:
        """Take the first message of a lane out of its queue."""
        lane.fits.clear()
        return lane.queue.pop(0)

    def done(self, lane: Lane, kept: Kept) -> None:
        """A message that was taken out of its queue is placed."""
        if kept.slot >= 0:
            self._lanes.by_slot.pop((lane.index, kept.slot), None)
        if self._lanes.compared(lane, kept):
            self._lanes.state.where[kept.row, n.W_MODE] = n.NOTHING
        self._held.discard(kept)
        self.count -= 1

    def drop(self, lane: Lane, kept: Kept) -> None:
        """A message that was taken out of its queue is not wanted any more."""
        if kept.slot >= 0:
            w = self._lanes.state.where[kept.slot]
            if w[n.W_MODE] == n.KEEP and w[n.W_LANE] == lane.index:
                w[n.W_MODE] = n.NOTHING
        self.done(lane, kept)

    def forget(self, lane: Lane) -> None:
        """Drop all messages of a lane."""
        queue, lane.queue = lane.queue, []
        lane.fits.clear()
        for kept in queue:
            self.drop(lane, kept)

    def ended(self, lane: Lane, slot: int, message: np.ndarray, complete: bool) -> None:
        """No more bytes of a message are expected."""
        kept = self._lanes.by_slot.pop((lane.index, slot), None)
        if kept is None:
            return
        if complete:
            kept.imm = int(message[M_IMM])
        if message[M_PACKETS] >= 0:
            kept.packets = int(message[M_PACKETS])
        kept.slot, kept.row = -1, slot
        lane.fits.clear()
        self._learn(lane, kept)

    def voided(self, lane: Lane, slot: int) -> None:
        """A message was none: its packets come again."""
        kept = self._lanes.by_slot.get((lane.index, slot))
        if kept is not None and kept in lane.queue:
            lane.queue.remove(kept)
            lane.fits.clear()
            self.drop(lane, kept)

    def _learn(self, lane: Lane, kept: Kept) -> None:
        """Path MTU, and whether immediates come apart."""
        reader = self._reader
        if kept.mtu and kept.packets > 1:
            lane.mtu = reader.mtu = kept.mtu
        elif kept.length > reader.longest:
            reader.longest = kept.length
        if reader.apart is None and kept.imm != NOT_SEEN and kept.length > 0:
            if kept.imm == NO_IMMEDIATE:
                reader.apart = True
            elif kept.length > AR_THRESHOLD:
                reader.apart = False
