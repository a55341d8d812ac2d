"""The messages of one NCCL connection in order, over all its queue pairs, and where in a collective each belongs.

Packets are numbered, so the place of a message follows from the numbers of its packets and the plan of the collective,
also behind messages that were not captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowcheck.inspect.nccl_flags import COMMON
from flowcheck.inspect.nccl_flows import Connection, Flow, Piece
from reconstruct.nccl.blueprint import Part
from reconstruct.nccl.group import Edge
from reconstruct.nccl.payload import flag
from reconstruct.nccl.schedule import LL, LL128, SIMPLE, SLICE_STEPS, SLOT_BYTES, STEPS, base_step
from reconstruct.nccl.script import (
    NO_IMMEDIATE,
    NOT_SEEN,
    SCRIPT_WORDS,
    T_FIRST,
    T_SHIFT,
    T_STEP,
    T_WHOLE,
    T_WIRE,
    agree,
    rare_steps,
    script,
)

__all__ = ["PROTOCOL", "Fit", "Line", "Whole"]

PROTOCOL = {room: protocol for protocol, room in enumerate(SLOT_BYTES)} | {2 * SLOT_BYTES[SIMPLE]: SIMPLE}
"""By the room of a CTS entry."""
_AHEAD = 4096  # messages of a connection that one guess looks at
_LARGEST_MTU = 4096


@dataclass(slots=True, eq=False)
class Whole:
    """One message of NCCL's, as far as it was captured."""

    data: np.ndarray
    known: np.ndarray


@dataclass(frozen=True, slots=True)
class Fit:
    """How messages agree with a collective. whole: its last message began, or something behind it; cut: not so, but
    nothing is known of the connection where they might have; seen: messages of it that were captured; arrived: when the
    last byte of them came, 0 if that is not known; later: when the first message behind them began, -1 if none did;
    doubtful: their data look like another protocol's."""

    tables: list[np.ndarray]
    whole: bool
    cut: bool
    seen: int
    arrived: int
    later: int
    doubtful: bool


@dataclass(slots=True, eq=False)
class _Lane:
    """One queue pair. next: number of the packet that comes next; rows: as `nccl.script.agree` wants them."""

    flow: Flow
    next: int
    numbers: list[int]
    rows: np.ndarray

    def between(self, start: int, end: int) -> slice:
        return slice(bisect_left(self.numbers, start), bisect_left(self.numbers, end))


def _lane(flow: Flow) -> _Lane:
    rows = [
        (piece.psn, piece.length,
         piece.imm if piece.imm is not None else NO_IMMEDIATE if piece.complete else NOT_SEEN)
        for piece in flow.pieces
    ]  # fmt: skip
    start = flow.pieces[0].psn if flow.pieces else 0
    return _Lane(flow, start, [piece.psn for piece in flow.pieces], np.array(rows, np.int64).reshape(-1, 3))


class Line:
    """One connection; with a flow that shows nothing, one that is known to be idle. split: whether every message is cut
    over all queue pairs; big: byte order of immediates.

    `step`: of the next message, None while unknown: connections that were seen from their first packet on begin with 0.
    """

    def __init__(self, edge: Edge, connection: Connection, split: bool, big: bool) -> None:
        self.edge = edge
        self.connection = connection
        self.doubt = False
        """Whether there is more behind `ahead`, which only a plan can place."""
        self._lanes = [_lane(flow) for flow in connection.data]
        born = all(lane.next & 0xFFFFFF == 0 for lane in self._lanes)
        self.step: int | None = 0 if born else None
        self._split, self._big = split, big
        self._tcp, self._cut = connection.over_tcp, bool(connection.cut)
        pieces = [piece for flow in connection.data for piece in flow.pieces]
        self._apart = any(piece.imm is None and piece.complete for piece in pieces)
        self._sure_mtu = max(flow.mtu for flow in connection.data)
        if self._apart and not self._sure_mtu:  # every packet is a WRITE of its own
            self._sure_mtu = max(piece.length for piece in pieces)
        self._mtu = self._sure_mtu or _LARGEST_MTU
        self._number = 0 if born else _first(self._lanes)
        self._queue: deque[int] = deque()
        self._coming = self._messages()

    # What comes, as far as nothing is missing

    def ahead(self) -> tuple[int, ...]:
        """Lengths of the next messages, up to the first that may be another one than it seems."""
        for length in self._coming:
            self._queue.append(length)
            if len(self._queue) >= _AHEAD:
                break
        return tuple(self._queue)

    @property
    def open(self) -> bool:
        """Whether more may come behind `ahead`."""
        return self.doubt or len(self._queue) >= _AHEAD

    @property
    def timed(self) -> bool:
        """Whether it is known when its messages came."""
        return all(lane.flow.timed for lane in self._lanes)

    @property
    def left(self) -> int:
        """RDMA messages that belong to nothing yet."""
        return sum(len(lane.numbers) - bisect_left(lane.numbers, lane.next) for lane in self._lanes)

    def _messages(self) -> Iterator[int]:
        """Lengths of messages from here on, until one is missing on a queue pair whose turn it is."""
        ways = [self._along(lane) for lane in self._lanes]
        turn = self._number
        while True:
            if self._split:
                parts = [next(way, -1) for way in ways]
            else:
                parts = [next(ways[turn % len(ways)], -1)]
                turn += 1
            if min(parts) < 0:
                break
            yield sum(parts)
        self.doubt = self._remain()

    def _remain(self) -> bool:
        """Whether messages were captured behind those in the queue, or may have come there."""
        if self._cut:
            return True
        ends = sum(
            piece.imm is not None or not self._apart
            for lane in self._lanes for piece in lane.flow.pieces[bisect_left(lane.numbers, lane.next) :]
        )  # fmt: skip
        return ends > len(self._queue) * (len(self._lanes) if self._split else 1)

    def _along(self, lane: _Lane) -> Iterator[int]:
        """Lengths of a queue pair's messages; each ends with its immediate."""
        number, total = lane.next, 0
        for piece in lane.flow.pieces[bisect_left(lane.numbers, number) :]:
            if piece.psn != number or piece.length < 0 or (self._apart and not piece.complete):
                return
            number += max(1, -(-piece.length // self._mtu))
            total += piece.length
            if piece.imm is not None or not self._apart:
                yield total
                total = 0

    # Against a plan

    def fit(self, part: Part | None, protocol: int) -> Fit | None:
        """How what was captured agrees with a collective; None if it does not."""
        seen = 0
        whole = True
        arrived, later, tables = 0, -1, []
        slots: set[int] = set()
        doubtful = False
        for number, lane in enumerate(self._lanes):
            table = self._table(part, number)
            tables.append(table)
            count, start = len(table) - 1, lane.next
            end = start + int(table[count, T_FIRST])
            at = lane.between(start, end)
            if count and (not lane.numbers or lane.numbers[-1] < start + int(table[count - 1, T_FIRST])):
                whole = False
            fine, _, met, _ = agree(table, start, self._mtu, lane.rows[at], self._big, True)
            if not fine:
                return None
            seen += met
            pieces = lane.flow.pieces
            if lane.flow.timed:
                arrived = max([arrived, *(piece.end for piece in pieces[at] if piece.complete)])
            if at.stop < len(pieces):
                later = pieces[at.stop].begin if later < 0 else min(later, pieces[at.stop].begin)
            for piece in pieces[at]:
                if piece.va < 0 or not piece.length:
                    continue
                if piece.room and PROTOCOL.get(piece.room) != protocol:
                    return None
                row = table[_row(table, piece.psn - start)]
                if piece.psn - start == row[T_FIRST]:
                    slot = piece.va - int(row[T_SHIFT]) - int(row[T_STEP]) * SLOT_BYTES[protocol]
                    slots.add(slot % (STEPS * SLOT_BYTES[protocol]))
            if self._tcp and part is not None:
                marks = self._marked(part, protocol, table, pieces[at])
                if marks is None:
                    return None
                doubtful = bool(marks)
        # Where nothing is known of what comes, the last message seen need not be the last one that there was.
        cut = self._cut and later < 0
        return Fit(tables, whole and not cut, cut, seen, arrived, later, doubtful) if len(slots) <= 1 else None

    def _marked(self, part: Part, protocol: int, table: np.ndarray, pieces: Sequence[Piece]) -> set[int] | None:
        """What looks like flags of another protocol inside messages, of which no announcement tells the protocol over
        TCP; None if they cannot be of this one."""
        marks: set[int] = set()
        step, start = self.step or 0, self._lanes[0].next
        first = int(base_step(part.row, step))
        for piece in pieces:
            packet = piece.psn - start
            if not piece.length:
                continue
            if protocol != SIMPLE:
                told = piece.flags(protocol)
                due = flag(protocol, first + int(table[_row(table, packet), T_STEP]))
                if told is None or (told.lines and told.flag != due):
                    return None
                continue
            for other in (LL, LL128):
                told = piece.flags(other)
                if told is not None and told.looks(flag(other, step + packet)):
                    marks.add(told.flag)
        return None if len(marks) > 1 or max(marks, default=0) >= COMMON else marks

    def _table(self, part: Part | None, pair: int) -> np.ndarray:
        if part is None:
            return np.zeros((1, SCRIPT_WORDS), np.int64)
        base = self.step or 0
        rare = base if rare_steps(part.row, base, part.messages) else 0
        count = len(self._lanes)
        return script(
            part.places, part.row, self._mtu, self._apart, count, self._split, pair, self._number % count, rare
        )

    def announced(self, fit: Fit) -> bool:
        """Whether an announcement told the protocol of at least one message; over TCP there is none."""
        return self._tcp or any(
            piece.room > 0
            for lane, table in zip(self._lanes, fit.tables, strict=True)
            for piece in lane.flow.pieces[lane.between(lane.next, lane.next + int(table[-1, T_FIRST]))]
        )

    def take(self, part: Part, fit: Fit) -> list[Whole | None]:
        """The messages of a collective, None for one of which nothing was kept; the next one begins behind them."""
        result: list[Whole | None] = [None] * part.messages
        for lane, table in zip(self._lanes, fit.tables, strict=True):
            count, start = len(table) - 1, lane.next
            end = start + int(table[count, T_FIRST])
            steps = int(part.row[SLICE_STEPS])
            for piece in lane.flow.pieces[lane.between(start, end)]:
                row = table[_row(table, piece.psn - start)]
                self._put(result, int(row[T_STEP]) // steps, row, piece, piece.psn - start - int(row[T_FIRST]))
            lane.next = end
        self._number += part.messages
        if len(self._queue) >= part.messages:
            for _ in range(part.messages):
                self._queue.popleft()
        else:
            self._queue.clear()
            self.doubt = False
            self._coming = self._messages()
        return result

    def _put(self, result: list[Whole | None], index: int, row: np.ndarray, piece: Piece, packets: int) -> None:
        """Bytes of a message where they belong. packets: of the message before the piece's first one."""
        if piece.data is None or piece.known is None or (packets and not self._sure_mtu):
            return
        whole = result[index]
        if whole is None:
            whole = result[index] = Whole(np.zeros(row[T_WHOLE], np.uint8), np.zeros(row[T_WHOLE], bool))
        begin = packets * self._mtu
        room = int(row[T_WIRE]) - begin
        first = int(row[T_SHIFT]) + begin
        size = max(0, min(room, piece.data.size))
        whole.data[first : first + size] = piece.data[:size]
        whole.known[first : first + size] = piece.known[:size]

    def gap(self) -> str:
        """What is missing where `ahead` ends, in words."""
        if self._cut:
            return f"messages from {self.connection.cut}"
        for lane in self._lanes:
            for number, packets in lane.flow.gaps:
                if number + packets > lane.next:
                    pair = lane.flow.key[3]
                    from_ = f"from PSN {number & 0xFFFFFF} on"
                    return f"{packets} packets of queue pair 0x{pair:x} {from_} were not captured"
        return f"messages on queue pair 0x{self._lanes[0].flow.key[3]:x} were not captured whole"


def _first(lanes: list[_Lane]) -> int:
    """The queue pair whose first message came first."""
    return min(
        (number for number, lane in enumerate(lanes) if lane.numbers), key=lambda at: lanes[at].flow.pieces[0].begin,
    )  # fmt: skip


def _row(table: np.ndarray, packet: int) -> int:
    """The message that a packet belongs to."""
    return int(np.searchsorted(table[:-1, T_FIRST], packet, side="right")) - 1
