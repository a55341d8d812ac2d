"""What is missing in a RoCE flow: when a gap is given up, and what becomes of the packets that waited behind it.

A receiver asks for a lost packet again until it has it. So a gap that the receiver has acknowledged beyond, `grace`
ns of frame time ago, was lost on the way to this capture only, and no retry will fill it: it becomes a HOLE. The grace
is needed because an acknowledgment may overtake data in a mirror. To know an old acknowledgment without remembering all
of them ACKED is sampled, as in `mirror.tcp_stream`. Without acknowledgments a gap ends by age.

A HOLE is a statement about what to expect, not about the bytes: a late packet is placed all the same.

Packets that wait behind a gap lack the start of their message. When the gap is given up they make a headless message:
its bytes are in order and counted from the first packet that is there, its address and rkey are unknown.
"""

from __future__ import annotations

from mirror.internal import internal
from mirror.memory import store_u8
from mirror.reorder import (
    ACKED,
    NEXT,
    OLD_ACK,
    REVIEWED,
    SNAP,
    SNAP_TS,
    USED,
    WAIT_HEAD,
    WAIT_NEXT,
    WAITING,
)
from mirror.roce_pool import at_or_before, begin, deliver, find, finish, hole_in, settle, unlink
from mirror.roce_spans import CLOSE
from mirror.roce_state import (
    ACKS,
    BAD,
    CELL,
    CURRENT,
    CURSOR,
    DISPUTED,
    FORGOT,
    G_AFTER,
    G_END,
    G_FLAGS,
    G_SINCE,
    G_START,
    G_TS,
    GAPS,
    GAPS_LEFT,
    GIVEN,
    H_AFTER,
    H_IMM,
    H_OPCODE,
    H_PSN,
    H_SIZE,
    H_TS,
    HEADLESS,
    HELD,
    HELD_LAST,
    LOST,
    M_FIRST,
    M_FLAGS,
    M_KIND,
    M_LENGTH,
    M_MTU,
    M_NEWER,
    M_PACKETS,
    MISFITS,
    MTU,
    NEWEST,
    NO_ROOM,
    OLDEST,
    PEER,
    QUIET,
    SEEN_TS,
    SHORT,
    STRANGER,
    Machine,
    add_gap,
    clear_gaps,
    drop_gaps,
    forget_gaps,
    open_gap_before,
    release_cell,
    tell,
    tell_hole,
    unwait,
    wait,
)
from mirror.roce_wire import CLASS, LAST, PART, READ
from mirror.spans import CUT, PROVEN, REFUSED

FAR_BACK = 1 << 16                       # packets: no retry reaches further back


@internal()
def watch(m: Machine, flow: int, ts: int) -> None:
    """A gap was opened, or an acknowledgment moved: have the flow looked at."""
    if m.state[flow, WAITING] == 0:
        wait(m, flow, ts)


@internal()
def lose(m: Machine, flow: int, start: int, end: int, ts: int) -> None:
    """Packets start..end, whatever was thought of them, are missing. Two gaps must be free."""
    if start == end:
        return
    clear_gaps(m, m.state, flow, GAPS, start, end)
    add_gap(m, m.state, flow, GAPS, start, end, ts, ts, 0)
    watch(m, flow, ts)


@internal()
def fits(m: Machine, slot: int, psn: int, opcode: int, length: int) -> bool:
    """Whether a middle or last packet with this much payload is possible at this place of the message."""
    row = m.messages[slot]
    index = psn - row[M_FIRST]
    if CLASS[opcode] != row[M_KIND] or (index == 0 and row[M_FLAGS] & HEADLESS == 0):
        return False
    if PART[opcode] != LAST:
        return length == row[M_MTU] and (row[M_PACKETS] < 0 or index < row[M_PACKETS] - 1)
    if row[M_PACKETS] >= 0 and index != row[M_PACKETS] - 1:
        return False
    if row[M_LENGTH] < 0:
        return row[M_MTU] == 0 or 0 < length <= row[M_MTU]
    return length == row[M_LENGTH] - index * row[M_MTU]


@internal()
def drain(m: Machine, flow: int) -> None:
    """Deliver the waiting packets whose place is known now; a headless message begins where a gap was given up."""
    row, cells = m.state[flow], m.cells
    before, cell = -1, row[HELD]
    while cell >= 0:
        psn, opcode, length = cells[cell, H_PSN], cells[cell, H_OPCODE], cells[cell, H_SIZE]
        if opcode & DISPUTED:
            if m.meta[GAPS_LEFT] > 8:
                lose(m, flow, psn, psn + 1, cells[cell, H_TS])
            cell = release_cell(m, flow, before, cell)
            continue
        slot = find(m, flow, psn)
        if slot < 0 and not _awaited(m, flow, before, psn):
            mtu = length if PART[opcode] != LAST else row[MTU]
            slot = begin(m, flow, psn, -1, CLASS[opcode], -1, -1, -1, HEADLESS, mtu, cells[cell, H_TS])
        elif slot < 0:
            before, cell = cell, cells[cell, H_AFTER]
            continue
        if slot >= 0 and fits(m, slot, psn, opcode, length):
            clear_gaps(m, m.state, flow, GAPS, psn, psn + 1)
            deliver(m, flow, slot, psn, m.memory + cell * CELL, length, PART[opcode] == LAST, cells[cell, H_IMM],
                    cells[cell, H_TS])
        else:
            m.counters[MISFITS if slot >= 0 else NO_ROOM] += 1
            if m.meta[GAPS_LEFT] > 8:
                lose(m, flow, psn, psn + 1, cells[cell, H_TS])
        cell = release_cell(m, flow, before, cell)


@internal()
def _awaited(m: Machine, flow: int, before: int, psn: int) -> bool:
    """Whether the packet before `psn` may still come, or waits itself (in cell `before`)."""
    if before >= 0 and m.cells[before, H_PSN] == psn - 1:
        return True
    node = m.state[flow, GAPS]
    while node >= 0 and m.gaps[node, G_START] < psn:
        if m.gaps[node, G_END] == psn:
            return m.gaps[node, G_FLAGS] & GIVEN == 0
        node = m.gaps[node, G_AFTER]
    return False


@internal()
def give_up(m: Machine, flow: int, node: int, ts: int) -> None:
    """Tell what lies in a gap as HOLE, message by message; end what is over by that."""
    row, messages, gaps = m.state[flow], m.messages, m.gaps
    gaps[node, G_FLAGS] |= GIVEN
    start, end, since, noticed = gaps[node, G_START], gaps[node, G_END], gaps[node, G_SINCE], gaps[node, G_TS]
    known = CUT if gaps[node, G_FLAGS] & SHORT else REFUSED if gaps[node, G_FLAGS] & BAD else 0
    if end <= row[ACKED]:
        known |= PROVEN
    if gaps[node, G_FLAGS] & QUIET == 0:
        m.counters[LOST] += end - start
    while start < end:
        slot = at_or_before(m, flow, start)
        newer = row[OLDEST] if slot < 0 else messages[slot, M_NEWER]
        stop = end if newer < 0 else min(end, messages[newer, M_FIRST])
        if slot >= 0 and messages[slot, M_PACKETS] >= 0:
            limit = messages[slot, M_FIRST] + messages[slot, M_PACKETS]
            if start < limit:
                stop = min(stop, limit)
                if messages[slot, M_KIND] != READ:  # the numbers of a response never come on this flow
                    hole_in(m, slot, start, stop, known, since, noticed)
                    settle(m, slot, ts)
                start = stop
                continue
        if gaps[node, G_FLAGS] & QUIET == 0:
            tell_hole(m, flow, -1, start, stop - start, known, since, noticed)
        if slot >= 0 and messages[slot, M_PACKETS] < 0 and messages[slot, M_KIND] != READ:
            finish(m, slot, ts)
        start = stop


@internal()
def give_up_before(m: Machine, flow: int, end: int, ts: int) -> None:
    """Give up what is missing below `end`; acknowledged packets behind the highest one seen count as missing."""
    row, gaps = m.state[flow], m.gaps
    if end > row[NEXT] and m.meta[GAPS_LEFT] > 8:
        add_gap(m, m.state, flow, GAPS, row[NEXT], end, row[SEEN_TS], ts, 0)
        row[NEXT] = end
        row[CURRENT] = -1
    node = open_gap_before(m, flow, end)
    while node >= 0:
        if gaps[node, G_END] > end:
            if m.meta[GAPS_LEFT] <= 8:
                break
            stop = gaps[node, G_END]
            gaps[node, G_END] = end
            add_gap(m, m.state, flow, GAPS, end, stop, gaps[node, G_SINCE], gaps[node, G_TS], gaps[node, G_FLAGS])
        give_up(m, flow, node, ts)
        node = open_gap_before(m, flow, end)
    if row[HELD] >= 0:
        drain(m, flow)


@internal()
def reopen(m: Machine, flow: int, psn: int, ts: int) -> None:
    """Packet `psn` came late into a gap that was given up, and waits for the start of its message: so may that."""
    gaps = m.gaps
    node = m.state[flow, GAPS]
    while node >= 0 and gaps[node, G_END] < psn:
        node = gaps[node, G_AFTER]
    if node < 0 or gaps[node, G_END] != psn or gaps[node, G_FLAGS] & GIVEN == 0:
        return
    if gaps[node, G_START] == psn - 1:
        gaps[node, G_FLAGS], gaps[node, G_TS] = QUIET, ts
    else:
        gaps[node, G_END] = psn - 1
        add_gap(m, m.state, flow, GAPS, psn - 1, psn, ts, ts, QUIET)
    watch(m, flow, ts)


@internal()
def review(m: Machine, clock: int, grace: int, short: int, long: int) -> None:
    """Look at all waiting flows: what can no longer be filled becomes a HOLE."""
    m.meta[REVIEWED] = clock
    following = m.meta[WAIT_HEAD]
    while following >= 0:
        flow = following
        row, gaps = m.state[flow], m.gaps
        following = row[WAIT_NEXT]
        if clock - row[SNAP_TS] >= grace:
            row[OLD_ACK], row[SNAP], row[SNAP_TS] = row[SNAP], row[ACKED], clock
        if row[OLD_ACK] > 0:
            give_up_before(m, flow, row[OLD_ACK], clock)
        peer = row[PEER]
        patience = long if peer >= 0 and m.state[peer, ACKS] else short
        node = open_gap_before(m, flow, row[NEXT])
        aged = -1
        while node >= 0:
            if gaps[node, G_FLAGS] & GIVEN == 0 and (
                    clock - gaps[node, G_TS] >= patience or gaps[node, G_END] <= row[NEXT] - FAR_BACK):
                aged = gaps[node, G_END]
            node = gaps[node, G_AFTER]
        if aged >= 0:
            if row[ACKED] < aged:  # what is acknowledged passed, the rest may not have
                give_up_before(m, flow, row[ACKED], clock)
            give_up_before(m, flow, aged, clock)
        forget_gaps(m, flow, row[NEXT] - FAR_BACK)
        if row[ACKED] <= row[NEXT] and open_gap_before(m, flow, row[NEXT]) < 0:
            unwait(m, flow)


@internal()
def force(m: Machine, ts: int) -> None:
    """Cells or gaps run short: give up gaps of the flow that waits longest."""
    flow = m.meta[WAIT_HEAD]
    cells, gaps = m.cells.shape[0], m.gaps.shape[0]
    while flow >= 0 and (m.meta[USED] > cells - cells // 8 or m.meta[GAPS_LEFT] < gaps // 8):
        after = m.state[flow, WAIT_NEXT]
        give_up_before(m, flow, m.state[flow, NEXT], ts)
        forget_gaps(m, flow, m.state[flow, NEXT])
        m.state[flow, FORGOT] = 1
        if m.state[flow, ACKED] <= m.state[flow, NEXT]:
            unwait(m, flow)
        flow = after


@internal()
def flush_flow(m: Machine, flow: int, ts: int) -> None:
    """Give up everything that is missing, and end every message."""
    row = m.state[flow]
    if row[NEXT] < 0:
        return
    if row[ACKED] > 0:
        give_up_before(m, flow, row[ACKED], ts)
    give_up_before(m, flow, row[NEXT], ts)
    while row[HELD] >= 0 and open_gap_before(m, flow, row[NEXT]) >= 0:
        give_up_before(m, flow, row[NEXT], ts)  # waiting packets that did not fit are missing themselves
    slot = row[OLDEST]
    while slot >= 0:
        finish(m, slot, ts)
        slot = m.messages[slot, M_NEWER]
    if row[WAITING]:
        unwait(m, flow)


@internal()
def abandon(m: Machine, flow: int, ts: int) -> None:
    """Another connection has the flow's place: end what was, and know nothing."""
    row = m.state[flow]
    if row[PEER] >= 0:
        m.state[row[PEER], PEER] = -1
    if row[NEXT] >= 0:
        flush_flow(m, flow, ts)
        while row[OLDEST] >= 0:
            unlink(m, row[OLDEST])
        while row[HELD] >= 0:
            release_cell(m, flow, -1, row[HELD])
        drop_gaps(m, m.state, flow, GAPS)
        tell(m, flow, -1, CLOSE, 0, 0, 1, ts)
        store_u8(m.live + flow, 0)
    reset(m, flow)


@internal()
def reset(m: Machine, flow: int) -> None:
    """A flow of which nothing is known; it is in no list."""
    row = m.state[flow]
    row[:] = 0
    row[NEXT] = row[STRANGER] = row[PEER] = row[CURRENT] = -1
    for column in (GAPS, CURSOR, NEWEST, OLDEST, HELD, HELD_LAST):
        row[column] = -1
