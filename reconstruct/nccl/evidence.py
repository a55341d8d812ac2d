"""What a message itself says: its protocol by the room it was announced with and the flags in its bytes, and whether
it tells DDP's bucket layout."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mirror.memory import address_of
from reconstruct.nccl import state as n
from reconstruct.nccl.binding import Connection, Reader
from reconstruct.nccl.blueprint import Blueprint
from reconstruct.nccl.holdings import Kept
from reconstruct.nccl.lanes import Lane, Lanes
from reconstruct.nccl.payload import UNIT_DATA, UNIT_WIRE, decode, formats, inner, read_flag
from reconstruct.nccl.roster import Roster
from reconstruct.nccl.schedule import ALLREDUCE, LL, LL128, SIMPLE, SLOT_BYTES

__all__ = ["Evidence"]

_ROOM = {SLOT_BYTES[LL]: LL, SLOT_BYTES[LL128]: LL128, SLOT_BYTES[SIMPLE]: SIMPLE, 2 * SLOT_BYTES[SIMPLE]: SIMPLE}
_LONGEST_LAYOUT = 16384  # bytes on the wire of a message that is looked into for DDP's layout
_MANY_FLAGS = 256  # bytes from which on equal words where flags would be are flags, whatever their value


class Evidence:
    """Asks kept messages whether they can be of a protocol."""

    def __init__(self, roster: Roster, reader: Reader, lanes: Lanes) -> None:
        self._roster, self._reader, self._lanes = roster, reader, lanes
        self._orders: list[tuple[int, int]] = []  # what the newest broadcast of an order can mean: parameters, buckets

    def begins_as(self, lane: Lane, connection: Connection, pair: int, blueprint: Blueprint) -> bool:
        """Whether the first message of a lane behind the boundary can be one of a collective's protocol and kind."""
        boundary = int(self._lanes.state.lanes[lane.index, n.L_NEXT])
        if connection.done[pair] < len(connection.uses) or not lane.queue or lane.queue[0].first != boundary:
            return True
        index = 0 if self._reader.split else (pair - connection.phase - connection.number) % self._reader.pairs
        part = blueprint.part(connection.edge)
        if part is None or index >= part.messages:
            return True
        protocol = blueprint.call.protocol
        if not self.allows(lane, lane.queue[0], protocol, index, connection):
            return False
        return blueprint.call.kind != ALLREDUCE or not self._tells_layout(lane.queue[0], protocol)

    def loose_begin_as(self, lanes: list[Lane], connections: Collection[Connection], blueprint: Blueprint) -> bool:
        """The same of lanes without a place, where all that they can be of carry nothing before it."""
        if any(c.uses or c.lanes or blueprint.part(c.edge) is None for c in connections):
            return True
        if len(lanes) > len(connections) * self._reader.pairs:
            return True
        protocol, reduces = blueprint.call.protocol, blueprint.call.kind == ALLREDUCE
        return all(
            self.allows(lane, lane.queue[0], protocol, 0, None)
            and not (reduces and self._tells_layout(lane.queue[0], protocol))
            for lane in lanes
        )

    def _tells_layout(self, kept: Kept, protocol: int) -> bool:
        """Whether the data of a message are those of one of the two broadcasts by which DDP tells its rebuilt layout:
        every parameter's number once and the number of buckets, then the parameters of each bucket.

        Where a chunk of a bucket is as short, only this tells them from the beginning of its all-reduce.
        """
        store = kept.store
        if not 0 < kept.length <= _LONGEST_LAYOUT or store is None or not store.covered == kept.length == store.size:
            return False
        if protocol not in kept.numbers:
            source, end = address_of(store.data), inner(protocol, 0, kept.length)[1]
            data = np.zeros(end // UNIT_WIRE[protocol] * UNIT_DATA[protocol] // 4 * 4, np.uint8)
            decode(protocol, source, 0, end, address_of(data), data.size, read_flag(protocol, source))
            kept.numbers[protocol] = data.view(np.int32)
        numbers = kept.numbers[protocol]
        orders = _orders(numbers)
        if orders:
            self._orders = orders
            return True
        return any(
            len(numbers) >= buckets and numbers[0] > 0 and numbers[:buckets].min() > 0
            and int(numbers[:buckets].sum()) == parameters
            for parameters, buckets in self._orders
        )

    def allows(self, lane: Lane, kept: Kept, protocol: int, index: int, connection: Connection | None) -> bool:
        """Whether announcement and content of a message allow a protocol. connection: None if not certain."""
        room = self._roster.announced(lane, kept)[1]
        if room in _ROOM:
            return _ROOM[room] == protocol
        store = kept.store
        if kept.length <= 0 or store is None or store.covered != kept.length or kept.length != store.size:
            return True
        allowed = int(formats(address_of(store.data), kept.length, self._reader.split))
        exact = connection is not None and connection.exact
        for flagged in (LL, LL128):
            if allowed >> flagged & 1 and connection is not None and exact:
                wanted = connection.step + index + 1
                found = int(read_flag(flagged, address_of(store.data)))
                if found != (wanted & 0xFFFFFFFF if flagged == LL else wanted):
                    allowed &= ~(1 << flagged)
        if allowed != 1 << SIMPLE and (exact or kept.length >= _MANY_FLAGS):
            allowed &= ~(1 << SIMPLE)  # flags where flags would be
        return bool(allowed >> protocol & 1)


def _orders(numbers: np.ndarray) -> list[tuple[int, int]]:
    """(parameters, buckets) that the first numbers can tell, whatever lies behind them: all below n once, then at most
    n."""
    found = []
    seen: set[int] = set()
    top = -1
    for number in map(int, numbers):
        if seen and top == len(seen) - 1 and 1 <= number <= len(seen):
            found.append((len(seen), number))
        if number in seen or not 0 <= number < len(numbers):
            break
        seen.add(number)
        top = max(top, number)
    return found
