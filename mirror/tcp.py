"""TCP reassembly of mirrored frames: blocks in, spans out.

The bytes of every flow come out as one gapless sequence of DATA and HOLE spans at computed stream offsets. Bytes in
order are not copied, their spans point into the block; bytes beyond a gap wait in a bounded arena. A byte that was
never captured is a HOLE of known place and size, and no later byte ever slides into it.

When a gap is given up (becomes a HOLE):
* the other side has acknowledged beyond it, and `grace_ns` of frame time have passed since;
* it is older than `gap_timeout_ns`, or `blind_timeout_ns` where the reverse direction is not visible;
* seven eighths of the arena are used: the flow that waits longest goes first;
* the connection ended (FIN: as above; RST: after the grace), its 4-tuple was taken by a new one, or `flush`.

Known limits: an outage in which a connection sends more than 2 GiB unseen cannot be measured by 32-bit sequence
numbers; a FIN that was not captured but acknowledged is one missing byte.
"""

from __future__ import annotations

import numpy as np

from mirror.block import Block
from mirror.flows import Flows
from mirror.frames import Segments, parse
from mirror.memory import address_of
from mirror.reorder import (
    ACKED,
    AFTER,
    CELL,
    COLUMNS,
    CONFLICTS,
    COUNTERS,
    CURSOR,
    CUTS,
    CUTS_TAIL,
    END,
    FREE,
    HEAD,
    HINT,
    HOLES,
    NEXT,
    SPANS,
    SPENT_HEAD,
    SPENT_TAIL,
    TAIL,
    USED,
    WAIT_HEAD,
    WAIT_TAIL,
    Machine,
)
from mirror.spans import CLOSE, CONFLICT, DATA, DUPLICATE, HOLE, OPEN, Spans
from mirror.tcp_kernel import expire, feed, flush
from mirror.vantage import Vantage

__all__ = ["CLOSE", "CONFLICT", "DATA", "DUPLICATE", "HOLE", "OPEN", "Spans", "TcpReassembler"]

_MOST_CONFLICTS = 4096
# The most spans that a segment, a cell or a flow can cause in one call (counted over the state machine, and checked
# by the kernel before every write).
_PER_SEGMENT, _PER_CELL, _PER_FLOW = 12, 3, 8


class TcpReassembler:
    """Reassembles all TCP flows of `flows`. One thread at a time; calls release the GIL while kernels run."""

    def __init__(self, flows: Flows, *, reorder_bytes: int = 64 << 20, grace_ns: int = 20_000_000,
                 gap_timeout_ns: int = 30_000_000_000, blind_timeout_ns: int = 1_000_000_000,
                 vantage: Vantage | None = None, check_sums: bool = True) -> None:
        """`reorder_bytes`: size of the arena for bytes beyond gaps, in all flows together; at least 64 KiB.

        `grace_ns`, `gap_timeout_ns`, `blind_timeout_ns`: see the module. The grace must be longer than frames of one
        connection are disordered in time (several rings read in turn: longer than their retire timeout).
        `vantage`: declared groups of interfaces and tunnels; without, every tunnel is a group of its own.
        `check_sums`: verify the checksum of every segment with payload, and refuse damaged ones (`mirror.tcp_sums`).
        """
        cells = reorder_bytes // CELL
        if cells < 16:
            raise ValueError(f"reorder_bytes must be at least {16 * CELL}, not {reorder_bytes}")
        self.flows = flows
        self.segments = Segments(vantage=Vantage() if vantage is None else vantage, check_sums=check_sums)
        self._times = (grace_ns, blind_timeout_ns, gap_timeout_ns)
        self._cells = cells
        self._memory = np.empty(cells * CELL, np.uint8)
        self._spans = Spans()
        self._state = np.zeros((flows.capacity, COLUMNS), np.int64)
        self._state[:, [HEAD, TAIL, CURSOR, HINT, CUTS, CUTS_TAIL]] = -1
        self._cell_table = np.zeros((cells, 7), np.int64)
        self._cell_table[:, AFTER] = np.arange(1, cells + 1)
        self._cell_table[-1, AFTER] = -1
        self._meta = np.zeros(9, np.int64)
        self._meta[[SPENT_HEAD, SPENT_TAIL, WAIT_HEAD, WAIT_TAIL]] = -1
        self._meta[FREE] = 0
        self._counters = np.zeros(len(COUNTERS), np.int64)
        self._conflicts: list[tuple[int, int, int]] = []
        self._conflicts_seen = self._holes_seen = 0
        self._machine: Machine | None = None
        self._base: np.ndarray | None = None

    def feed(self, block: Block, now: int) -> Spans:
        """Reassemble one block. `now`: the clock of `block.ts`, ns.

        Time is the frames' own: the highest timestamp seen that is not beyond `now` (a reader that is behind must
        not give up gaps whose bytes are still in the ring; a wrong timestamp must not age everything).
        """
        self._base = block.base  # its memory cannot go while spans point into it
        n = parse(block, self.flows, self.segments)
        machine = self._prepare(n)
        segments = self.segments
        feed(machine, segments.flow, segments.flags, segments.numbers, n, now, *self._times)
        return self._finish()

    def expire(self, now: int) -> Spans:
        """Let time pass: no frame older than `now` (clock of `block.ts`, ns) is still to come. Cheap: only flows with
        a gap are looked at."""
        expire(self._prepare(0), now, *self._times)
        return self._finish()

    def flush(self, now: int) -> Spans:
        """End of the input: every gap, those at the tails included, becomes a HOLE."""
        flush(self._prepare(0), self.flows.count, now)
        return self._finish()

    @property
    def acked(self) -> np.ndarray:
        """int64[capacity], by flow: how many bytes of the flow the other side is known to have acknowledged."""
        return self._state[:, ACKED]

    @property
    def seen_end(self) -> np.ndarray:
        """int64[capacity], by flow: highest stream offset that the flow's own segments speak of."""
        return self._state[:, END]

    @property
    def delivered(self) -> np.ndarray:
        """int64[capacity], by flow: stream offset up to which DATA and HOLE spans were handed out."""
        return self._state[:, NEXT]

    @property
    def held_bytes(self) -> int:
        """Arena bytes in use by segments that wait behind a gap, whole cells."""
        return int(self._meta[USED]) * CELL

    @property
    def conflicts(self) -> list[tuple[int, int, int]]:
        """(flow, offset, length) of the first CONFLICT spans; the counter has all."""
        return list(self._conflicts)

    def counters(self) -> dict[str, int]:
        """Cumulative counters by name: those of the frames, of the flow table and of the reassembly."""
        table = {"flows": self.flows.count, "flows_evicted": self.flows.evicted}
        reassembly = dict(zip(COUNTERS, self._counters.tolist(), strict=True))
        return self.segments.counts() | table | reassembly

    def _prepare(self, segments: int) -> Machine:
        """The kernels' arrays, with room for every span that this call can give."""
        bound = _PER_SEGMENT * segments + _PER_CELL * self._cells + _PER_FLOW * self.flows.count + 64
        spans = self._spans
        if self._machine is None or spans.flow.size < bound:
            spans.reserve(bound + bound // 2)
            table = self.flows.table
            self._machine = Machine(
                self._state, self._cell_table, self._meta, self._counters, address_of(self._memory),
                address_of(table.peer), address_of(table.live), spans.flow.size, address_of(spans.flow),
                address_of(spans.kind), address_of(spans.offset), address_of(spans.addr), address_of(spans.length),
                address_of(spans.ts), address_of(spans.why),
            )  # fmt: skip
        return self._machine

    def _finish(self) -> Spans:
        spans = self._spans
        spans.n = int(self._meta[SPANS])
        holes = int(self._counters[HOLES])
        spans.holes, self._holes_seen = holes - self._holes_seen, holes
        if self._counters[CONFLICTS] != self._conflicts_seen:
            self._conflicts_seen = int(self._counters[CONFLICTS])
            index = np.flatnonzero(spans.kind[: spans.n] == CONFLICT)[: _MOST_CONFLICTS - len(self._conflicts)]
            rows = np.stack((spans.flow[index], spans.offset[index], spans.length[index]), axis=1)
            self._conflicts += [(row[0], row[1], row[2]) for row in rows.tolist()]
        return spans
