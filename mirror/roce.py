"""RoCEv2 reassembly of mirrored frames: blocks in, spans of messages out.

Every payload is given on once, at its computed place in its message, as a span that points into the block (or, for the
few packets that came before the start of their message, into a bounded arena). A packet that was never captured is a
HOLE of known place and size. See `mirror.roce_spans` for what comes out, `mirror.roce_stream` for how packets are
placed, `mirror.roce_loss` for when a gap is given up, and docs/roce.md for what is on the wire.

Messages are rows of `messages` (columns `M_FLOW` ... `M_MTU` of `mirror.roce_state`). A row is used again once its
message is over and rows run short; BEGIN tells.

Known limits: a mirror outage longer than 2^20 packets of a queue pair ends its sequence and starts another one. A queue
pair that is made anew with the same number within the long timeout, and begins with the same address, key and length
as the old one, is taken for a repeat.
"""

from __future__ import annotations

import numpy as np

from mirror.block import Block
from mirror.flows import Flows
from mirror.frames import Datagrams, Segments, parse
from mirror.memory import address_of, handle
from mirror.reorder import FREE, SPANS, SPENT_HEAD, SPENT_TAIL, USED, WAIT_HEAD, WAIT_TAIL
from mirror.roce_flows import QueuePairs
from mirror.roce_kernel import expire, feed, flush, make_room
from mirror.roce_spans import MessageSpans
from mirror.roce_state import (
    BEGUN,
    CELL,
    COLUMNS,
    COUNTERS,
    G_AFTER,
    G_COLUMNS,
    GAP_FREE,
    GAPS_LEFT,
    H_AFTER,
    HOLES,
    ICRC_BAD,
    ICRC_OK,
    M_COLUMNS,
    M_QUEUE,
    META,
    MTU,
    PEER,
    QUEUE_HEAD,
    QUEUE_TAIL,
    ROW_FREE,
    ROWS_LEFT,
)

__all__ = ["MessageSpans", "QueuePairs", "RoceReassembler"]

# The most spans that a packet, a waiting packet, a gap or a message can cause in one call, checked by the kernel
# before every write.
_PER_PACKET, _PER_CELL, _PER_GAP, _PER_MESSAGE, _PER_FLOW = 12, 6, 6, 3, 4
_MOST_MESSAGES = 1 << 18
_NEVER = 1 << 62


class RoceReassembler:
    """Reassembles all RoCE flows of `flows`. One thread at a time; calls release the GIL while kernels run."""

    def __init__(self, flows: QueuePairs, *, check_icrc: bool = True, held_bytes: int = 64 << 20, gaps: int = 1 << 16,
                 messages: int = 1 << 16, grace_ns: int = 20_000_000, gap_timeout_ns: int = 30_000_000_000,
                 blind_timeout_ns: int = 1_000_000_000) -> None:
        """`check_icrc`: verify the invariant CRC of every packet (`mirror.crc32` has the cost), see `icrc`.

        `held_bytes`: arena for packets that wait for the start of their message, at least 64 KiB. `gaps`: the most
        gaps known at once, at least 256. `messages`: rows of `messages` to begin with, at least 64; more are made
        when a block brings more messages than that. `grace_ns`, `gap_timeout_ns`, `blind_timeout_ns` (the last where no
        acknowledgments are visible): how long a gap waits for a retry, see `mirror.roce_loss`.
        """
        cells = held_bytes // CELL
        if cells < 16 or gaps < 256 or messages < 64:
            raise ValueError(f"held_bytes must be at least {16 * CELL}, gaps 256, messages 64")
        self.flows = flows
        self.datagrams = Datagrams()
        self._own = Segments(datagrams=self.datagrams)
        self._tcp = Flows(2)  # `parse` wants a table for TCP, which is nobody's business here
        self._check = check_icrc
        self._times = (grace_ns, blind_timeout_ns, gap_timeout_ns)
        self._memory = np.empty(cells * CELL, np.uint8)
        self._spans = MessageSpans()
        self._state = np.zeros((flows.capacity, COLUMNS), np.int64)
        self._cells = _chain(np.zeros((cells, 6), np.int64), H_AFTER)
        self._gaps = _chain(np.zeros((gaps, G_COLUMNS), np.int64), G_AFTER)
        self.messages = _chain(np.zeros((messages, M_COLUMNS), np.int64), M_QUEUE)
        """int64[rows, M_COLUMNS]: see the module. Read it anew after every call: it may have grown."""
        self._meta = np.zeros(META, np.int64)
        self._meta[[SPENT_HEAD, SPENT_TAIL, WAIT_HEAD, WAIT_TAIL, QUEUE_HEAD, QUEUE_TAIL]] = -1
        self._meta[[FREE, GAP_FREE, ROW_FREE]] = 0
        self._meta[GAPS_LEFT], self._meta[ROWS_LEFT] = gaps, messages
        self._counters = np.zeros(len(COUNTERS), np.int64)
        self._machine: np.ndarray | None = None
        self._base: np.ndarray | None = None
        self._holes_seen = 0

    def feed(self, block: Block, now: int) -> MessageSpans:
        """Reassemble one block. `now`: the clock of `block.ts`, ns; time is the frames' own, as in `mirror.tcp`."""
        parse(block, self._tcp, self._own)
        return self.take(self.datagrams, block.base, now)

    def take(self, datagrams: Datagrams, base: np.ndarray, now: int) -> MessageSpans:
        """Like `feed`, for a block whose frames were walked already: give `Segments` a `Datagrams` to fill."""
        self._base = base  # its memory cannot go while spans point into it
        where = self._prepare(datagrams.n)
        feed(where, datagrams.numbers, datagrams.n, now, self._check, *self._times)
        return self._finish()

    def expire(self, now: int) -> MessageSpans:
        """Let time pass: no frame older than `now` (clock of `block.ts`, ns) is still to come."""
        expire(self._prepare(0), now, *self._times)
        return self._finish()

    def flush(self, now: int) -> MessageSpans:
        """End of the input: what is missing becomes HOLE, and every message ends."""
        flush(self._prepare(0), self.flows.count, now)
        return self._finish()

    @property
    def peer(self) -> np.ndarray:
        """int64[capacity], by flow: the flow the other way (it carries the acknowledgments), -1 while unknown. Only
        entries below `flows.count` mean anything."""
        return self._state[:, PEER]

    @property
    def mtu(self) -> np.ndarray:
        """int64[capacity], by flow: path MTU in bytes, 0 while unknown."""
        return self._state[:, MTU]

    @property
    def icrc(self) -> np.ndarray:
        """int64[capacity, 2], by flow: packets whose invariant CRC was right, and wrong; zeros without `check_icrc`.

        A packet with a wrong one is dropped where most of its flow's are right. Where they are not, the CRC means
        nothing at this source, and packets are taken as they come.
        """
        return self._state[:, [ICRC_OK, ICRC_BAD]]

    @property
    def held_bytes(self) -> int:
        """Arena bytes in use by packets that wait for the start of their message, whole cells."""
        return int(self._meta[USED]) * CELL

    def counters(self) -> dict[str, int]:
        """Cumulative counters by name."""
        table = {"flows": self.flows.count, "flows_evicted": self.flows.evicted}
        return table | dict(zip(COUNTERS, self._counters.tolist(), strict=True))

    def _prepare(self, packets: int) -> np.ndarray:
        """Handle of the kernels' arrays, with room for every message and span that this call can give."""
        cells, gaps = len(self._cells), len(self._gaps)
        need = packets + int(self._meta[USED]) + 16
        if 2 * need > len(self.messages):
            self._grow(2 * need)
        rows = len(self.messages)
        bound = (_PER_PACKET * packets + _PER_CELL * cells + _PER_GAP * gaps + _PER_MESSAGE * rows
                 + _PER_FLOW * self.flows.count + 64)
        spans = self._spans
        if self._machine is None or spans.flow.size < bound:
            spans.reserve(bound + bound // 2)
            self._machine = handle(
                self._state, self.messages, self._gaps, self._cells, self._meta, self._counters,
                address_of(self._memory), address_of(self.flows.table.live), spans.flow.size, address_of(spans.flow),
                address_of(spans.kind), address_of(spans.offset), address_of(spans.addr), address_of(spans.length),
                address_of(spans.ts), address_of(spans.message), address_of(spans.why), *self.flows.table,
            )
        if self._meta[ROWS_LEFT] < need:
            grown = rows >= _MOST_MESSAGES
            make_room(self._machine, need, self._times[2] if grown else _NEVER)
            if self._meta[ROWS_LEFT] < need and not grown:
                # All the others are of messages that still wait for bytes.
                self._grow(2 * rows)
                return self._prepare(packets)
        return self._machine

    def _grow(self, rows: int) -> None:
        old = len(self.messages)
        more = _chain(np.zeros((rows - old, M_COLUMNS), np.int64), M_QUEUE)
        more[:-1, M_QUEUE] += old
        more[-1, M_QUEUE] = self._meta[ROW_FREE]
        self.messages = np.concatenate((self.messages, more))
        self._meta[ROW_FREE] = old
        self._meta[ROWS_LEFT] += rows - old
        self._machine = None

    def _finish(self) -> MessageSpans:
        self._meta[BEGUN] = 0
        self._spans.n = int(self._meta[SPANS])
        holes = int(self._counters[HOLES])
        self._spans.holes, self._holes_seen = holes - self._holes_seen, holes
        return self._spans


def _chain(table: np.ndarray, column: int) -> np.ndarray:
    """Link all rows of a new table into one free list."""
    table[:, column] = np.arange(1, len(table) + 1)
    table[-1, column] = -1
    return table
