"""Memory of RoCE reassembly: flows, messages, gaps, and packets that wait for the start of their message.

One flow is one row of int64, so a packet in the middle of its message touches one cache line and the flow's key.

Gaps. A flow's packets are numbered; NEXT is the number behind the highest one seen, and below it everything was seen
but what lies in a gap. Gaps are nodes of a list, sorted, never overlapping. A gap that was given up stays for a while,
so that late packets are known to be new. A QUIET gap is not told as HOLE when it is given up: what lies before the
first packet ever seen may not be missing at all, and what was told once is not told again. Of a SHORT one a packet
came without all of its payload, of a BAD one with a wrong checksum. A gap's packets were lost between two frames of the
flow: after G_SINCE, before G_TS.

Messages. One row each, in a list per flow sorted by first packet, and in one queue in order of creation: when rows run
short the oldest that are over are taken. Until then they tell repeats apart and where late packets belong.

Waiting packets. A middle or last packet whose message is unknown is copied to a cell of CELL bytes and waits, sorted
by number, for the start of its message. Cells that were delivered stay readable until the next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mirror import reorder
from mirror.internal import internal
from mirror.memory import copy, equal, int64s_at, rows_at, store_u32, store_u64
from mirror.reorder import (
    ACKED,
    FREE,
    GAP_TS,
    NEXT,
    OLD_ACK,
    SNAP,
    SNAP_TS,
    SPANS,
    SPENT_HEAD,
    SPENT_TAIL,
    STRANGER,
    USED,
    WAIT_NEXT,
    WAIT_PREV,
    WAITING,
)
from mirror.spans import HOLE

CELL = 4096                              # the largest path MTU

# Columns of a flow's row; ACKED, WAITING, GAP_TS, SNAP, SNAP_TS, OLD_ACK, STRANGER, WAIT_NEXT and WAIT_PREV (4, 5, 10
# to 13 and 16 to 18) are those of mirror.reorder, whose waiting list is used here too. The first eight are all that a
# packet in the middle of its message needs.
CURRENT, CURRENT_FIRST, CURRENT_LAST, MTU, SEEN_TS = 0, 1, 3, 6, 7
GAPS, CURSOR, NEWEST, OLDEST, HELD, HELD_LAST = 8, 9, 14, 15, 19, 20
PEER, PORT, TRIES, CANDIDATE, VOTES, MISFIT_ACKS, ACKS, ICRC_OK, ICRC_BAD, FORGOT, BEFORE_TS = range(21, 32)
COLUMNS = 32
assert (NEXT, ACKED, WAITING, GAP_TS, SNAP, SNAP_TS, OLD_ACK, STRANGER, WAIT_NEXT, WAIT_PREV) == (
    2, 4, 5, 10, 11, 12, 13, 16, 17, 18)

# Columns of a message's row; the first nine are for consumers.
(M_FLOW, M_FIRST, M_PACKETS, M_KIND, M_VA, M_RKEY, M_LENGTH, M_IMM, M_MTU,
 M_GOT, M_FLAGS, M_TS, M_OLDER, M_NEWER, M_QUEUE, M_SEEN, M_GAPS) = range(17)
M_COLUMNS = 24
HEADLESS, COMPLETE, ENDED, DEAD = 1, 2, 4, 8              # bits of M_FLAGS

# Columns of a gap, and bits of G_FLAGS.
G_START, G_END, G_AFTER, G_TS, G_FLAGS, G_SINCE = range(6)
G_COLUMNS = 6
QUIET, GIVEN, SHORT, BAD = 1, 2, 4, 8

# Columns of a cell.
H_PSN, H_SIZE, H_OPCODE, H_IMM, H_TS, H_AFTER = range(6)
DISPUTED = 0x100                         # of H_OPCODE: another copy of the packet differs, none is believed

# Columns of Machine.meta beyond those of mirror.reorder.
GAP_FREE, GAPS_LEFT, ROW_FREE, ROWS_LEFT, QUEUE_HEAD, QUEUE_TAIL, BEGUN = range(9, 16)
META = 16

COUNTERS = (
    "packets", "requests", "payload_bytes", "acks", "naks", "rnr_naks", "responses", "duplicates", "duplicate_bytes",
    "old", "out_of_order", "late", "holes", "hole_bytes", "lost_packets", "messages", "completed", "incomplete",
    "headless", "voided", "misfits", "strangers", "restarts", "waited", "no_room", "truncated", "flow_table_full",
    "icrc_ok", "icrc_bad", "icrc_unchecked", "icrc_refused", "pairs", "foreign", "foreign_cnp", "foreign_ud",
    "foreign_uc", "foreign_other", "conflicts",
)
(PACKETS, REQUESTS, PAYLOAD, ACK_PACKETS, NAKS, RNR_NAKS, RESPONSES, DUPLICATES, DUPLICATE_BYTES, OLD, OUT_OF_ORDER,
 LATE, HOLES, HOLE_BYTES, LOST, MESSAGES, COMPLETED, INCOMPLETE, HEADLESS_MESSAGES, VOIDED, MISFITS, STRANGERS,
 RESTARTS, WAITED, NO_ROOM, TRUNCATED, TABLE_FULL, CRC_OK, CRC_BAD, CRC_UNCHECKED, CRC_REFUSED, PAIRS, FOREIGN,
 FOREIGN_CNP, FOREIGN_UD, FOREIGN_UC, FOREIGN_OTHER, CONFLICTS) = range(len(COUNTERS))


# They take any machine with the fields that they use.
_emit: Any = reorder.emit
wait: Any = reorder.wait
unwait: Any = reorder.unwait


class Machine(NamedTuple):
    """All memory of a reassembler, in the form that kernels take (see mirror.reorder.Machine)."""

    state: np.ndarray      # int64[flows, COLUMNS]
    messages: np.ndarray   # int64[rows, M_COLUMNS]
    gaps: np.ndarray       # int64[gaps, G_COLUMNS]
    cells: np.ndarray      # int64[cells, 6]
    meta: np.ndarray       # int64[META]
    counters: np.ndarray   # int64, named by COUNTERS
    memory: int            # address of the cells' bytes, CELL for each
    live: int              # address of `live` (uint8) of the flow table
    room: int              # entries of each array of MessageSpans, and the addresses of these
    flow: int
    kind: int
    offset: int
    addr: int
    length: int
    ts: int
    message: int
    why: int


MACHINE = 27
"""Numbers that a Machine takes in a handle."""


@internal()
def machine(where: np.ndarray, at: int) -> Machine:
    """The machine whose part of a handle (`mirror.memory.handle`) begins at `at`.

    Its arrays are not owned. Every call of a helper copies some sixty words of `Machine`; were its arrays counted as
    references, with atomic operations, that would be far more work than most helpers do.
    """
    h = where[at:]
    return Machine(rows_at(h[0], h[1], h[2]), rows_at(h[3], h[4], h[5]), rows_at(h[6], h[7], h[8]),
                   rows_at(h[9], h[10], h[11]), int64s_at(h[12], h[13]), int64s_at(h[14], h[15]), h[16], h[17], h[18],
                   h[19], h[20], h[21], h[22], h[23], h[24], h[25], h[26])


@internal(forceinline=True)
def tell(m: Machine, flow: int, slot: int, kind: int, offset: int, addr: int, length: int, ts: int) -> None:
    """Append a span."""
    at = m.meta[SPANS]
    _emit(m, flow, kind, offset, addr, length, ts)
    store_u32(m.message + 4 * at, slot)


@internal()
def tell_hole(m: Machine, flow: int, slot: int, offset: int, length: int, known: int, since: int, ts: int) -> None:
    """Append a HOLE; known: its bits, see `mirror.spans.Spans`."""
    why = m.why + 16 * m.meta[SPANS]
    tell(m, flow, slot, HOLE, offset, 0, length, ts)
    store_u64(why, known)
    store_u64(why + 8, since)
    m.counters[HOLES] += 1


@internal()
def _free_gap(m: Machine, node: int) -> None:
    m.gaps[node, G_AFTER] = m.meta[GAP_FREE]
    m.meta[GAP_FREE] = node
    m.meta[GAPS_LEFT] += 1


@internal(forceinline=True)
def add_gap(m: Machine, rows: np.ndarray, row: int, column: int, start: int, end: int, since: int, ts: int,
            flags: int) -> None:
    """Put start..end, which overlaps no gap, into the list whose head is rows[row, column]. A node must be free."""
    gaps, meta = m.gaps, m.meta
    node = meta[GAP_FREE]
    meta[GAP_FREE] = gaps[node, G_AFTER]
    meta[GAPS_LEFT] -= 1
    gaps[node, G_START], gaps[node, G_END], gaps[node, G_FLAGS] = start, end, flags
    gaps[node, G_SINCE], gaps[node, G_TS] = since, ts
    before, after = -1, rows[row, column]
    while after >= 0 and gaps[after, G_START] < start:
        before, after = after, gaps[after, G_AFTER]
    gaps[node, G_AFTER] = after
    if before < 0:
        rows[row, column] = node
    else:
        gaps[before, G_AFTER] = node


@internal(forceinline=True)
def gap_at(m: Machine, head: int, number: int) -> int:
    """The gap of the list that holds `number`, or -1."""
    gaps = m.gaps
    node = head
    while node >= 0 and gaps[node, G_END] <= number:
        node = gaps[node, G_AFTER]
    return node if node >= 0 and gaps[node, G_START] <= number else -1


@internal()
def clear_gaps(m: Machine, rows: np.ndarray, row: int, column: int, start: int, end: int) -> None:
    """start..end was seen. A gap may be split: a node must be free."""
    gaps = m.gaps
    before, node = -1, rows[row, column]
    while node >= 0 and gaps[node, G_START] < end:
        after = gaps[node, G_AFTER]
        low, high = gaps[node, G_START], gaps[node, G_END]
        if high <= start:
            before = node
        elif start <= low and high <= end:
            if before < 0:
                rows[row, column] = after
            else:
                gaps[before, G_AFTER] = after
            _free_gap(m, node)
        elif low < start:
            gaps[node, G_END] = start
            before = node
            if end < high:
                add_gap(m, rows, row, column, end, high, gaps[node, G_SINCE], gaps[node, G_TS], gaps[node, G_FLAGS])
                return
        else:
            gaps[node, G_START] = end
            return
        node = after


@internal()
def drop_gaps(m: Machine, rows: np.ndarray, row: int, column: int) -> None:
    """Free the whole list."""
    node = rows[row, column]
    while node >= 0:
        after = m.gaps[node, G_AFTER]
        _free_gap(m, node)
        node = after
    rows[row, column] = -1


@internal()
def forget_gaps(m: Machine, flow: int, before: int) -> None:
    """Free the oldest gaps that were given up and end at or before `before`."""
    row, gaps = m.state[flow], m.gaps
    node = row[GAPS]
    while node >= 0 and gaps[node, G_END] <= before and gaps[node, G_FLAGS] & GIVEN:
        row[GAPS] = gaps[node, G_AFTER]
        _free_gap(m, node)
        node = row[GAPS]


@internal()
def open_gap_before(m: Machine, flow: int, end: int) -> int:
    """The first gap of the flow that begins before `end` and is not given up, or -1."""
    node = m.state[flow, GAPS]
    while node >= 0 and m.gaps[node, G_START] < end:
        if m.gaps[node, G_FLAGS] & GIVEN == 0:
            return node
        node = m.gaps[node, G_AFTER]
    return -1


@internal()
def hold(m: Machine, flow: int, psn: int, opcode: int, imm: int, addr: int, length: int, ts: int) -> bool:
    """Copy a packet to a cell of the flow; False if none is free or the packet is held already."""
    row, cells, meta = m.state[flow], m.cells, m.meta
    cell = meta[FREE]
    if cell < 0 or length > CELL:
        return False
    before, after = row[HELD_LAST], -1
    if before >= 0 and cells[before, H_PSN] >= psn:
        before, after = -1, row[HELD]
        while cells[after, H_PSN] < psn:
            before, after = after, cells[after, H_AFTER]
        if cells[after, H_PSN] == psn:
            return False
    meta[FREE] = cells[cell, H_AFTER]
    meta[USED] += 1
    copy(m.memory + cell * CELL, addr, length)
    cells[cell, H_PSN], cells[cell, H_SIZE], cells[cell, H_OPCODE] = psn, length, opcode
    cells[cell, H_IMM], cells[cell, H_TS], cells[cell, H_AFTER] = imm, ts, after
    if before < 0:
        row[HELD] = cell
    else:
        cells[before, H_AFTER] = cell
    if after < 0:
        row[HELD_LAST] = cell
    m.counters[WAITED] += 1
    return True


@internal()
def compare_held(m: Machine, flow: int, psn: int, opcode: int, imm: int, addr: int, length: int) -> None:
    """Another copy of a packet that may be waiting."""
    cells = m.cells
    cell = m.state[flow, HELD]
    while cell >= 0 and cells[cell, H_PSN] < psn:
        cell = cells[cell, H_AFTER]
    if cell >= 0 and cells[cell, H_PSN] == psn and cells[cell, H_OPCODE] & DISPUTED == 0 and not (
            cells[cell, H_OPCODE] == opcode and cells[cell, H_IMM] == imm and cells[cell, H_SIZE] == length
            and equal(m.memory + cell * CELL, addr, length)):
        cells[cell, H_OPCODE] |= DISPUTED
        m.counters[CONFLICTS] += 1


@internal()
def release_cell(m: Machine, flow: int, before: int, cell: int) -> int:
    """Take `cell`, which follows `before` (-1: is the first), off the flow's list; returns the one after it.

    Its bytes stay readable until the next call.
    """
    row, cells, meta = m.state[flow], m.cells, m.meta
    after = cells[cell, H_AFTER]
    if before < 0:
        row[HELD] = after
    else:
        cells[before, H_AFTER] = after
    if after < 0:
        row[HELD_LAST] = before
    cells[cell, H_AFTER] = -1
    if meta[SPENT_HEAD] < 0:
        meta[SPENT_HEAD] = cell
    else:
        cells[meta[SPENT_TAIL], H_AFTER] = cell
    meta[SPENT_TAIL] = cell
    meta[USED] -= 1
    return after


@internal()
def begin_call(m: Machine) -> None:
    """No spans yet, and the cells that the last call delivered are free. Done once a call, by whoever comes first."""
    meta = m.meta
    if meta[BEGUN]:
        return
    meta[BEGUN] = 1
    meta[SPANS] = 0
    if meta[SPENT_HEAD] >= 0:
        m.cells[meta[SPENT_TAIL], H_AFTER] = meta[FREE]
        meta[FREE] = meta[SPENT_HEAD]
        meta[SPENT_HEAD] = meta[SPENT_TAIL] = -1
