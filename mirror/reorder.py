"""Where TCP segments wait that came too early: the per-flow state, and a bounded arena of cells.

One flow is one row of int64 (`State`), so a segment in order touches one or two cache lines. Bytes that lie beyond
a gap are copied to cells of CELL bytes; the cells of a flow form a list sorted by stream offset, never overlapping,
all beyond NEXT. A byte that is captured twice is compared with the copy that is held: the first one stays, and where
they differ the range is remembered on the cell and told (CONFLICT) when the cell is delivered.

Cells that were delivered stay readable until the next call: they go to a chain of their own and are free only then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mirror.internal import internal
from mirror.memory import copy, equal, load_u8, load_u32, store_u8, store_u32, store_u64
from mirror.spans import CONFLICT, DATA

CELL = 4096

# Columns of a flow's row. Offsets are stream offsets (64 bit); while PENDING they are biased, see mirror.tcp_kernel.
(STATE, BASE, NEXT, END, ACKED, WAITING, SEEN, FINAL,       # the first cache line: all that a segment in order needs
 TAIL, CURSOR, GAP_TS, SNAP, SNAP_TS, OLD_ACK, HINT, FLAGS,
 STRANGER, WAIT_NEXT, WAIT_PREV, HEAD, CUTS, CUTS_TAIL,
 TRUST, LONGEST) = range(24)                                # of checksums, see mirror.tcp_sums
COLUMNS = 24                                                # whole cache lines

# Columns of a cell.
AT, SIZE, AFTER, BEFORE, TIME, BAD_FROM, BAD_TO = range(7)

# Columns of Machine.meta.
SPANS, CLOCK, REVIEWED, FREE, USED, SPENT_HEAD, SPENT_TAIL, WAIT_HEAD, WAIT_TAIL = range(9)

COUNTERS = (
    "delivered_bytes", "duplicate_bytes", "out_of_order", "overlap_bytes", "holes", "hole_bytes", "conflicts",
    "probes", "opened", "opened_midstream", "closed", "reset", "before_start", "strangers", "repositioned",
    "no_room", "gaps_forced", "checksum_ok", "checksum_bad", "checksum_unchecked", "checksum_refused",
)
(DELIVERED, DUPLICATES, OUT_OF_ORDER, OVERLAP, HOLES, HOLE_BYTES, CONFLICTS, PROBES, OPENED, MIDSTREAM, CLOSED_FIN,
 CLOSED_RST, BEFORE_START, STRANGERS, REPOSITIONED, NO_ROOM, FORCED, SUM_OK, SUM_BAD, SUM_UNCHECKED,
 SUM_REFUSED) = range(len(COUNTERS))


class Machine(NamedTuple):
    """All memory of a reassembler, in the form that kernels take.

    Passed by value, an array is seven words or more and an address one, and these calls are made once per segment
    that is out of order: hence few arrays.
    """

    state: np.ndarray      # int64[flows, COLUMNS]
    cells: np.ndarray      # int64[cells, 7]
    meta: np.ndarray       # int64[9]
    counters: np.ndarray   # int64, named by COUNTERS
    memory: int            # address of the cells' bytes, CELL for each
    peer: int              # addresses of `peer` (int32) and `live` (uint8) of the flow table
    live: int
    room: int              # entries of each array of Spans, and the addresses of these
    flow: int
    kind: int
    offset: int
    addr: int
    length: int
    ts: int
    why: int


@internal()
def peer_of(m: Machine, flow: int) -> int:
    """The reverse flow, or -1."""
    return int(np.int32(load_u32(m.peer + 4 * flow)))


@internal()
def emit(m: Machine, flow: int, kind: int, offset: int, addr: int, length: int, ts: int) -> None:
    """Append a span. The arrays have room by construction (see TcpReassembler); never write beyond them."""
    n = m.meta[SPANS]
    if n >= m.room:
        raise IndexError("more spans than the bound allows")
    store_u32(m.flow + 4 * n, flow)
    store_u8(m.kind + n, kind)
    store_u64(m.offset + 8 * n, offset)
    store_u64(m.addr + 8 * n, addr)
    store_u64(m.length + 8 * n, length)
    store_u64(m.ts + 8 * n, ts)
    m.meta[SPANS] = n + 1


@internal()
def deliver(m: Machine, flow: int, addr: int, length: int, ts: int) -> None:
    """DATA at NEXT."""
    row = m.state[flow]
    if row[NEXT] == 0:
        store_u8(m.live + flow, 1)
    emit(m, flow, DATA, row[NEXT], addr, length, ts)
    m.counters[DELIVERED] += length
    row[NEXT] += length
    row[SEEN] = ts


@internal()
def _compare(m: Machine, flow: int, cell: int, start: int, end: int, addr: int) -> None:
    """Bytes of `cell` in stream range start..end against those at `addr`."""
    cells = m.cells
    m.counters[OVERLAP] += end - start
    held = m.memory + cell * CELL + start - cells[cell, AT]
    if equal(held, addr, end - start):
        return
    first, last = np.int64(0), end - start - 1
    while load_u8(held + first) == load_u8(addr + first):
        first += 1
    while load_u8(held + last) == load_u8(addr + last):
        last -= 1
    first += start
    last += start
    if cells[cell, BAD_TO] == 0:
        cells[cell, BAD_FROM], cells[cell, BAD_TO] = first, last + 1
    else:
        cells[cell, BAD_FROM] = min(cells[cell, BAD_FROM], first)
        cells[cell, BAD_TO] = max(cells[cell, BAD_TO], last + 1)


@internal()
def _fill(m: Machine, flow: int, before: int, start: int, end: int, addr: int, ts: int) -> int:
    """Copy start..end to cells behind cell `before` (-1: at the head); returns the last cell of the range.

    Where no cell is free the rest is left out and counted: a hole of known place, like a frame never captured.
    """
    row, cells = m.state[flow], m.cells
    if before >= 0 and cells[before, AT] + cells[before, SIZE] == start:
        take = min(end - start, CELL - cells[before, SIZE])
        if take > 0:
            copy(m.memory + before * CELL + cells[before, SIZE], addr, take)
            cells[before, SIZE] += take
            cells[before, TIME] = max(cells[before, TIME], ts)
            start += take
            addr += take
    while start < end:
        cell = m.meta[FREE]
        if cell < 0:
            m.counters[NO_ROOM] += end - start
            break
        m.meta[FREE] = cells[cell, AFTER]
        m.meta[USED] += 1
        take = min(end - start, CELL)
        copy(m.memory + cell * CELL, addr, take)
        after = row[HEAD] if before < 0 else cells[before, AFTER]
        cells[cell, AT], cells[cell, SIZE], cells[cell, TIME] = start, take, ts
        cells[cell, BAD_FROM], cells[cell, BAD_TO] = 0, 0
        cells[cell, BEFORE], cells[cell, AFTER] = before, after
        if before < 0:
            row[HEAD] = cell
        else:
            cells[before, AFTER] = cell
        if after < 0:
            row[TAIL] = cell
        else:
            cells[after, BEFORE] = cell
        before = cell
        start += take
        addr += take
    return before


@internal()
def hold(m: Machine, flow: int, start: int, end: int, addr: int, ts: int) -> None:
    """Keep stream range start..end (beyond NEXT) until the gap before it is settled; compare what is held."""
    row, cells = m.state[flow], m.cells
    # The last cell that starts at or before `start`; mostly the tail, or near where the last segment went.
    at = row[TAIL]
    if at >= 0 and cells[at, AT] > start:
        at = row[HEAD]
        if cells[at, AT] > start:
            at = -1
        else:
            at = row[CURSOR]
            while cells[at, AT] > start:
                at = cells[at, BEFORE]
            while cells[at, AFTER] >= 0 and cells[cells[at, AFTER], AT] <= start:
                at = cells[at, AFTER]
    position = start
    if at >= 0:
        stop = min(end, cells[at, AT] + cells[at, SIZE])
        if stop > position:
            _compare(m, flow, at, position, stop, addr)
            position = stop
    while position < end:
        after = row[HEAD] if at < 0 else cells[at, AFTER]
        stop = end if after < 0 else min(end, cells[after, AT])
        if stop > position:
            at = _fill(m, flow, at, position, stop, addr + position - start, ts)
            position = stop
        if after >= 0 and position < end:
            stop = min(end, cells[after, AT] + cells[after, SIZE])
            _compare(m, flow, after, position, stop, addr + position - start)
            position = stop
            at = after
    row[CURSOR] = at if at >= 0 else row[HEAD]


@internal()
def _spend_head(m: Machine, flow: int) -> None:
    """Take the first cell off the flow's list; its bytes stay readable until the next call."""
    row, cells, meta = m.state[flow], m.cells, m.meta
    cell = row[HEAD]
    after = cells[cell, AFTER]
    row[HEAD] = after
    if after < 0:
        row[TAIL] = row[CURSOR] = -1
    else:
        cells[after, BEFORE] = -1
        if row[CURSOR] == cell:
            row[CURSOR] = after
    cells[cell, AFTER] = -1
    if meta[SPENT_HEAD] < 0:
        meta[SPENT_HEAD] = cell
    else:
        cells[meta[SPENT_TAIL], AFTER] = cell
    meta[SPENT_TAIL] = cell
    meta[USED] -= 1


@internal()
def drain(m: Machine, flow: int, ts: int) -> None:
    """Deliver the cells that are in order now, and date the gap that follows."""
    row, cells = m.state[flow], m.cells
    while row[HEAD] >= 0 and cells[row[HEAD], AT] == row[NEXT]:
        cell = row[HEAD]
        deliver(m, flow, m.memory + cell * CELL, cells[cell, SIZE], cells[cell, TIME])
        if cells[cell, BAD_TO]:
            start, length = cells[cell, BAD_FROM], cells[cell, BAD_TO] - cells[cell, BAD_FROM]
            emit(m, flow, CONFLICT, start, 0, length, cells[cell, TIME])
            m.counters[CONFLICTS] += 1
        _spend_head(m, flow)
    row[GAP_TS] = cells[row[HEAD], TIME] if row[HEAD] >= 0 else ts


@internal()
def discard(m: Machine, flow: int) -> None:
    """Drop all cells of a flow undelivered."""
    while m.state[flow, HEAD] >= 0:
        _spend_head(m, flow)


@internal()
def recover(m: Machine) -> None:
    """Begin a call: no spans yet, and the cells that the last call delivered are free."""
    meta = m.meta
    meta[SPANS] = 0
    if meta[SPENT_HEAD] >= 0:
        m.cells[meta[SPENT_TAIL], AFTER] = meta[FREE]
        meta[FREE] = meta[SPENT_HEAD]
        meta[SPENT_HEAD] = meta[SPENT_TAIL] = -1


@internal()
def wait(m: Machine, flow: int, ts: int) -> None:
    """Put a flow that has an open gap at the end of the waiting list."""
    row, meta = m.state[flow], m.meta
    row[WAITING] = 1
    row[GAP_TS] = row[SNAP_TS] = ts
    row[SNAP] = row[ACKED]
    row[OLD_ACK] = 0
    row[WAIT_NEXT], row[WAIT_PREV] = -1, meta[WAIT_TAIL]
    if meta[WAIT_TAIL] < 0:
        meta[WAIT_HEAD] = flow
    else:
        m.state[meta[WAIT_TAIL], WAIT_NEXT] = flow
    meta[WAIT_TAIL] = flow


@internal()
def unwait(m: Machine, flow: int) -> None:
    """Take a flow off the waiting list."""
    row, meta = m.state[flow], m.meta
    row[WAITING] = 0
    before, after = row[WAIT_PREV], row[WAIT_NEXT]
    if before < 0:
        meta[WAIT_HEAD] = after
    else:
        m.state[before, WAIT_NEXT] = after
    if after < 0:
        meta[WAIT_TAIL] = before
    else:
        m.state[after, WAIT_PREV] = before
