"""The state machine of one direction of a TCP connection.

    NONE     nothing known. A SYN opens the flow at its ISN. A SYN-ACK also tells the ISN of the other direction
             (HINT), so that one opens at its true start even when its own SYN was not captured.
    PENDING  data or a FIN was seen, but no SYN. What comes is held for a short grace, because a SYN or earlier data may
             still come (rings and mirrors reorder); then the stream opens at the lowest byte held.
    ESTABLISHED
             NEXT is the stream offset up to which everything was delivered as DATA or HOLE. A segment at NEXT is
             delivered where it lies; beyond NEXT it is held; before NEXT it is a DUPLICATE.
    CLOSED   NEXT reached FINAL (the place of the FIN, or the end at a RST). A SYN with another ISN, or data beyond
             the end (its SYN was lost), begins a new stream.

Offsets are computed: NEXT (64 bit) plus the signed 32-bit distance of the sequence number, so they cross 2^32 freely.
While PENDING they are counted from BIAS, as bytes before the first one seen may follow.

A flow that lacks bytes at NEXT is on the waiting list. END is the highest offset its segments speak of (payload that
was cut off, empty segments and FIN included), ACKED how much the other side acknowledged. The receiver asks for a
lost byte again only until it has it, so a gap below an acknowledgment that is at least `grace` old can no longer be
filled and becomes a HOLE. The grace is needed: with both directions busy an ACK overtakes the data in many mirrors.
To know an old acknowledgment without remembering all of them, ACKED is sampled: SNAP, once it is `grace` old,
becomes OLD_ACK. Without acknowledgments a gap ends by age (`short`: the reverse direction is not visible, `long`).

A segment FAR away from all that is known is a stranger: believed only when a second one continues it exactly, so
that a stray frame cannot throw a stream off its place.

Sources: RFC 9293 (3.4 sequence numbers, 3.10.7 segment arrival), RFC 7323 (a window is at most 2^30).
"""

from __future__ import annotations

from mirror.internal import internal
from mirror.memory import store_u8
from mirror.reorder import (
    ACKED,
    AFTER,
    AT,
    BAD_FROM,
    BAD_TO,
    BASE,
    CLOSED_FIN,
    CLOSED_RST,
    END,
    FINAL,
    FLAGS,
    FORCED,
    GAP_TS,
    HEAD,
    HINT,
    MIDSTREAM,
    NEXT,
    OLD_ACK,
    OPENED,
    REVIEWED,
    SEEN,
    SNAP,
    SNAP_TS,
    STATE,
    STRANGER,
    USED,
    WAIT_HEAD,
    WAIT_NEXT,
    WAITING,
    Machine,
    discard,
    drain,
    emit,
    peer_of,
    unwait,
    wait,
)
from mirror.spans import CLOSE, OPEN
from mirror.tcp_holes import forget_cuts, give_up, move_cuts

NONE, PENDING, ESTABLISHED, CLOSED = range(4)
RESET, FROM_MIDDLE = 1, 2                # bits of FLAGS

MASK = 0xFFFFFFFF
BIAS = 1 << 40                           # a multiple of 2^32
NEAR_START = 1 << 20                     # data this far behind an ISN is believed to belong to it
FAR = 1 << 26                            # a segment this far from all that is known is a stranger


@internal()
def unwrap(reference: int, base: int, number: int) -> int:
    """Stream offset near `reference` of a 32-bit sequence number."""
    return reference + (((number - base - reference) & MASK) ^ 0x80000000) - 0x80000000


@internal()
def open_stream(m: Machine, flow: int, base: int, from_middle: bool, ts: int) -> None:
    """Begin a stream at sequence number `base`; the flow is not waiting and holds no cells."""
    row = m.state[flow]
    row[STATE], row[BASE] = ESTABLISHED, base
    row[NEXT] = row[END] = row[ACKED] = 0
    row[FINAL] = row[STRANGER] = row[HINT] = -1
    row[FLAGS] = FROM_MIDDLE if from_middle else 0
    row[SEEN] = ts
    emit(m, flow, OPEN, 0, 0, 0 if from_middle else 1, ts)
    m.counters[MIDSTREAM if from_middle else OPENED] += 1


@internal()
def settle(m: Machine, flow: int, ts: int) -> None:
    """After NEXT, END, ACKED or FINAL of an open flow moved: close it, or let it wait or not."""
    row = m.state[flow]
    if row[FINAL] >= 0 and row[NEXT] >= row[FINAL]:
        discard(m, flow)
        forget_cuts(m, flow)
        if row[WAITING]:
            unwait(m, flow)
        row[STATE] = CLOSED
        store_u8(m.live + flow, 0)
        reset = row[FLAGS] & RESET
        emit(m, flow, CLOSE, row[NEXT], 0, reset, ts)
        m.counters[CLOSED_RST if reset else CLOSED_FIN] += 1
    elif row[NEXT] < max(row[END], row[ACKED]):
        if not row[WAITING]:
            wait(m, flow, ts)
    elif row[WAITING]:
        unwait(m, flow)
        forget_cuts(m, flow)


@internal()
def _gap_end(m: Machine, flow: int) -> int:
    """Where the gap at NEXT ends; NEXT or less if there is none."""
    row = m.state[flow]
    end = m.cells[row[HEAD], AT] if row[HEAD] >= 0 else max(row[END], row[ACKED])
    return min(end, row[FINAL]) if row[FINAL] >= 0 else end


@internal()
def lowest(m: Machine, flow: int) -> int:
    """Where a PENDING flow would start."""
    row = m.state[flow]
    return m.cells[row[HEAD], AT] if row[HEAD] >= 0 else row[END]


@internal()
def start_from_middle(m: Machine, flow: int, ts: int) -> None:
    """No SYN came for a PENDING flow. A FIN alone, without a byte, is no stream."""
    row = m.state[flow]
    if row[HEAD] < 0 and row[END] == BIAS:
        unwait(m, flow)
        forget_cuts(m, flow)
        row[STATE] = NONE
    else:
        start_pending(m, flow, lowest(m, flow), True, ts)


@internal()
def start_pending(m: Machine, flow: int, start: int, from_middle: bool, ts: int) -> None:
    """Open a PENDING flow at biased offset `start` (not beyond any cell)."""
    row, cells = m.state[flow], m.cells
    unwait(m, flow)
    end, final, flags = row[END] - start, row[FINAL], row[FLAGS]
    cell = row[HEAD]
    while cell >= 0:
        cells[cell, AT] -= start
        if cells[cell, BAD_TO]:
            cells[cell, BAD_FROM] -= start
            cells[cell, BAD_TO] -= start
        cell = cells[cell, AFTER]
    move_cuts(m, flow, start)
    open_stream(m, flow, (row[BASE] + start) & MASK, from_middle, ts)
    row[END] = end
    row[FINAL] = final - start if final >= 0 else -1
    row[FLAGS] |= flags
    drain(m, flow, ts)
    settle(m, flow, ts)


@internal()
def flush_stream(m: Machine, flow: int, ts: int) -> None:
    """Give up every gap of the flow, that at the tail included."""
    row = m.state[flow]
    if row[STATE] == PENDING:
        start_from_middle(m, flow, ts)
    if row[STATE] != ESTABLISHED:
        return
    end = _gap_end(m, flow)
    while row[NEXT] < end:
        give_up(m, flow, end)
        drain(m, flow, ts)
        end = _gap_end(m, flow)
    settle(m, flow, ts)


@internal()
def abandon(m: Machine, flow: int, ts: int) -> None:
    """The stream is over without FIN or RST: another one has its place."""
    row = m.state[flow]
    flush_stream(m, flow, ts)
    if row[STATE] == ESTABLISHED:
        store_u8(m.live + flow, 0)
        emit(m, flow, CLOSE, row[NEXT], 0, 1, ts)
        m.counters[CLOSED_RST] += 1
    forget_cuts(m, flow)
    row[STATE] = NONE
    row[HINT] = -1


@internal()
def await_start(m: Machine, flow: int, seq: int, ts: int) -> None:
    """PENDING, with `seq` at offset BIAS."""
    row = m.state[flow]
    row[STATE], row[BASE] = PENDING, seq
    row[NEXT], row[END], row[ACKED] = 0, BIAS, 0
    row[FINAL] = row[STRANGER] = -1
    row[FLAGS] = 0
    wait(m, flow, ts)


@internal()
def start_known(m: Machine, flow: int, base: int, ts: int) -> None:
    """The stream of this flow starts at sequence number `base`: a SYN, or the SYN-ACK of the other side, says so."""
    row = m.state[flow]
    if row[STATE] == PENDING:
        start = unwrap(row[END], row[BASE], base)
        if 0 <= lowest(m, flow) - start <= NEAR_START:
            start_pending(m, flow, start, False, ts)
            return
    elif row[STATE] != NONE:
        if row[BASE] == base:
            return
        # A late SYN of a stream that was opened without it: what lies before offset 0 was not captured in time.
        if row[FLAGS] & FROM_MIDDLE and (row[BASE] - base) & MASK <= NEAR_START and row[STATE] == ESTABLISHED:
            return
    abandon(m, flow, ts)
    open_stream(m, flow, base, False, ts)


@internal()
def known_start(m: Machine, flow: int, seq: int) -> int:
    """Sequence number of the flow's first byte as the other side's SYN-ACK told it, or -1."""
    peer = peer_of(m, flow)
    if peer >= 0 and m.state[peer, STATE] == ESTABLISHED:
        hint = m.state[peer, HINT]
        if hint >= 0 and (seq - hint) & MASK <= NEAR_START:
            return hint
    return -1


@internal()
def force(m: Machine, ts: int) -> None:
    """The arena is nearly full: give up gaps, of the flow that waits longest first."""
    limit = m.cells.shape[0] - m.cells.shape[0] // 8
    flow = m.meta[WAIT_HEAD]
    while flow >= 0 and m.meta[USED] > limit:
        row = m.state[flow]
        after = row[WAIT_NEXT]
        if row[STATE] == PENDING:
            start_from_middle(m, flow, ts)
        while row[STATE] == ESTABLISHED and row[HEAD] >= 0 and m.meta[USED] > limit:
            m.counters[FORCED] += 1
            give_up(m, flow, _gap_end(m, flow))
            drain(m, flow, ts)
            settle(m, flow, ts)
        flow = after


@internal()
def review(m: Machine, clock: int, grace: int, short: int, long: int) -> None:
    """Look at all waiting flows: what can no longer be filled becomes a HOLE."""
    m.meta[REVIEWED] = clock
    following = m.meta[WAIT_HEAD]
    while following >= 0:
        flow = following
        row = m.state[flow]
        following = row[WAIT_NEXT]
        if row[STATE] == PENDING:
            if clock - row[GAP_TS] >= grace:
                start_from_middle(m, flow, clock)
            continue
        if clock - row[SNAP_TS] >= grace:
            row[OLD_ACK], row[SNAP], row[SNAP_TS] = row[SNAP], row[ACKED], clock
        patience = grace if row[FLAGS] & RESET else short if peer_of(m, flow) < 0 else long
        end = _gap_end(m, flow)
        while row[NEXT] < end:
            stop = end if clock - row[GAP_TS] >= patience else min(end, row[OLD_ACK])
            if stop <= row[NEXT]:
                break
            give_up(m, flow, stop)
            if stop == end:
                drain(m, flow, clock)
            end = _gap_end(m, flow)
        settle(m, flow, clock)
