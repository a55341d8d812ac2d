"""What is missing in a TCP stream, and what is known of why.

A gap that will not be filled becomes HOLE spans. A segment of which the end was cut off, by the switch or by the
capture's snaplen, or that was refused for its checksum, tells where bytes are missing that did pass: until NEXT is
beyond them such ranges are kept as cells without bytes, in a list of their own for each flow, sorted by stream offset.
Where no cell is free for one it is not known.
"""

from __future__ import annotations

from mirror.internal import internal
from mirror.memory import store_u8, store_u64
from mirror.reorder import (
    ACKED,
    AFTER,
    AT,
    BEFORE,
    CUTS,
    CUTS_TAIL,
    END,
    FREE,
    GAP_TS,
    HOLE_BYTES,
    HOLES,
    NEXT,
    SEEN,
    SIZE,
    SPANS,
    TIME,
    USED,
    Machine,
    emit,
)
from mirror.spans import HOLE, PROVEN, REFUSED

_KIND = TIME  # column of such a cell: CUT or REFUSED of mirror.spans


@internal()
def note(m: Machine, flow: int, start: int, end: int, kind: int) -> None:
    """A segment came without its bytes start..end (kind CUT), or was refused with them (REFUSED)."""
    row, cells, meta = m.state[flow], m.cells, m.meta
    _forget(m, flow, row[NEXT])
    if end <= row[NEXT]:
        return
    before = row[CUTS_TAIL]
    while before >= 0 and cells[before, AT] > start:
        before = cells[before, BEFORE]
    if kind == REFUSED:
        after = row[CUTS] if before < 0 else cells[before, AFTER]
        if after >= 0:
            end = min(end, cells[after, AT])
    if before >= 0 and cells[before, AT] + cells[before, SIZE] >= start:
        if cells[before, _KIND] == kind:
            cells[before, SIZE] = max(cells[before, SIZE], end - cells[before, AT])
            return
        start = cells[before, AT] + cells[before, SIZE]  # what was said first stays
        if start >= end:
            return
        while cells[before, AFTER] >= 0 and cells[cells[before, AFTER], AT] <= start:
            before = cells[before, AFTER]
    cell = meta[FREE]
    if cell < 0:
        return
    meta[FREE] = cells[cell, AFTER]
    meta[USED] += 1
    after = row[CUTS] if before < 0 else cells[before, AFTER]
    cells[cell, AT], cells[cell, SIZE], cells[cell, BEFORE], cells[cell, AFTER] = start, end - start, before, after
    cells[cell, _KIND] = kind
    if before < 0:
        row[CUTS] = cell
    else:
        cells[before, AFTER] = cell
    if after < 0:
        row[CUTS_TAIL] = cell
    else:
        cells[after, BEFORE] = cell


@internal()
def _forget(m: Machine, flow: int, offset: int) -> None:
    """Free the cut ranges that end at or before a stream offset."""
    row, cells, meta = m.state[flow], m.cells, m.meta
    cell = row[CUTS]
    while cell >= 0 and cells[cell, AT] + cells[cell, SIZE] <= offset:
        after = cells[cell, AFTER]
        cells[cell, AFTER] = meta[FREE]
        meta[FREE] = cell
        meta[USED] -= 1
        cell = after
    row[CUTS] = cell
    if cell < 0:
        row[CUTS_TAIL] = -1
    else:
        cells[cell, BEFORE] = -1


@internal()
def forget_cuts(m: Machine, flow: int) -> None:
    """The flow has no gap any more, or is over."""
    if m.state[flow, CUTS] >= 0:
        _forget(m, flow, 1 << 62)


@internal()
def move_cuts(m: Machine, flow: int, by: int) -> None:
    """All stream offsets of the flow are less by `by` from now on."""
    cell = m.state[flow, CUTS]
    while cell >= 0:
        m.cells[cell, AT] -= by
        cell = m.cells[cell, AFTER]


@internal()
def give_up(m: Machine, flow: int, end: int) -> None:
    """HOLE from NEXT to `end`, told apart where what is known of the bytes differs."""
    row, cells = m.state[flow], m.cells
    if row[NEXT] == 0:
        store_u8(m.live + flow, 1)
    while row[NEXT] < end:
        start, stop, known = row[NEXT], end, 0
        if row[CUTS] >= 0:
            _forget(m, flow, start)
            cut = row[CUTS]
            if cut >= 0 and cells[cut, AT] <= start:
                stop, known = min(stop, cells[cut, AT] + cells[cut, SIZE]), cells[cut, _KIND]
            elif cut >= 0:
                stop = min(stop, cells[cut, AT])
        if start < row[ACKED]:
            stop, known = min(stop, row[ACKED]), known | PROVEN
        at = m.meta[SPANS]
        emit(m, flow, HOLE, start, 0, stop - start, row[GAP_TS])
        store_u64(m.why + 16 * at, known)
        store_u64(m.why + 16 * at + 8, row[SEEN])
        m.counters[HOLES] += 1
        m.counters[HOLE_BYTES] += stop - start
        row[NEXT] = stop
    row[END] = max(row[END], end)
