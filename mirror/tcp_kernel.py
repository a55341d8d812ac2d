"""The kernels of TCP reassembly: a block of segments into spans. The state machine is described in
`mirror.tcp_stream`, the waiting bytes in `mirror.reorder`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mirror.frames import ACK, FIN, RECYCLED, RST, SUM_RIGHT, SUM_WRONG, SYN
from mirror.internal import internal
from mirror.memory import store_u8
from mirror.reorder import (
    ACKED,
    AT,
    BASE,
    BEFORE_START,
    CLOCK,
    DELIVERED,
    DUPLICATES,
    END,
    FINAL,
    FLAGS,
    HEAD,
    HINT,
    LONGEST,
    NEXT,
    OUT_OF_ORDER,
    PROBES,
    REPOSITIONED,
    REVIEWED,
    SEEN,
    STATE,
    STRANGER,
    STRANGERS,
    SUM_OK,
    SUM_UNCHECKED,
    TRUST,
    USED,
    WAITING,
    Machine,
    deliver,
    drain,
    emit,
    hold,
    peer_of,
    recover,
    wait,
)
from mirror.spans import CUT, DATA, DUPLICATE
from mirror.tcp_holes import note
from mirror.tcp_stream import (
    BIAS,
    CLOSED,
    ESTABLISHED,
    FAR,
    FROM_MIDDLE,
    MASK,
    NEAR_START,
    NONE,
    PENDING,
    RESET,
    abandon,
    await_start,
    flush_stream,
    force,
    known_start,
    lowest,
    open_stream,
    review,
    settle,
    start_known,
    start_pending,
    unwrap,
)
from mirror.tcp_sums import refuse

WINDOW = 1 << 30
REVIEW_EVERY = 1_000_000                 # ns of frame time between two looks at the waiting list


@internal()
def _duplicate(m: Machine, flow: int, offset: int, present: int, length: int, addr: int, ts: int) -> None:
    """The part before NEXT of a segment was delivered before."""
    next_offset = m.state[flow, NEXT]
    if length == 1 and offset == next_offset - 1:
        m.counters[PROBES] += 1  # keep-alive: its byte is no data
        return
    start, end = max(offset, 0), min(offset + present, next_offset)
    if offset < 0:
        m.counters[BEFORE_START] += min(-offset, length)
    if start < end:
        emit(m, flow, DUPLICATE, start, addr + start - offset, end - start, ts)
        m.counters[DUPLICATES] += end - start


@internal()
def _place(m: Machine, flow: int, offset: int, present: int, length: int, addr: int, ts: int) -> None:
    """A segment of an open flow that is not simply the next one."""
    row = m.state[flow]
    if row[FINAL] >= 0:
        if row[FLAGS] & RESET:
            row[FINAL] = max(row[FINAL], offset + length)  # sent before the RST, seen after it
        else:
            length = min(length, row[FINAL] - offset)      # nothing lies behind a FIN
            present = min(present, length)
    # One byte at the end of all that is acknowledged is a keep-alive probe, also while that byte is missing.
    if length == 1 and offset + 1 == row[END] and row[ACKED] >= row[END] and offset >= row[NEXT]:
        m.counters[PROBES] += 1
        return
    row[END] = max(row[END], offset + length)
    if present < length:
        note(m, flow, offset + present, offset + length, CUT)
    if offset < row[NEXT]:
        _duplicate(m, flow, offset, present, length, addr, ts)
    start, end = max(offset, row[NEXT]), offset + present
    if start >= end:
        return
    addr += start - offset
    if start > row[NEXT]:
        m.counters[OUT_OF_ORDER] += 1
        hold(m, flow, start, end, addr, ts)
        return
    stop = end if row[HEAD] < 0 else min(end, m.cells[row[HEAD], AT])
    if stop < end:
        hold(m, flow, stop, end, addr + stop - start, ts)
    deliver(m, flow, addr, stop - start, ts)
    drain(m, flow, ts)


@internal()
def _place_pending(m: Machine, flow: int, offset: int, present: int, length: int, addr: int, ts: int) -> None:
    row = m.state[flow]
    if length == 1 and (offset < lowest(m, flow) or offset + 1 == row[END]):
        m.counters[PROBES] += 1
        return
    if present > 0:
        hold(m, flow, offset, offset + present, addr, ts)
    if present < length:
        note(m, flow, offset + present, offset + length, CUT)
    if row[FINAL] >= 0 and offset + length > row[FINAL]:
        row[FINAL] = -1  # the FIN was of an older connection
    row[END] = max(row[END], offset + length)


@internal()
def _segment(m: Machine, flow: int, flags: int, seq: int, ack: int, addr: int, present: int, length: int,
             ts: int) -> None:
    """Everything that is not the next segment of an open flow in order."""
    row = m.state[flow]
    if m.meta[USED] > m.cells.shape[0] - m.cells.shape[0] // 8:
        force(m, ts)
    if flags & RECYCLED:
        abandon(m, flow, ts)
    if flags & SYN:
        seq = (seq + 1) & MASK
        start_known(m, flow, seq, ts)
        peer = peer_of(m, flow)
        if flags & ACK:
            row[HINT] = ack
            if peer >= 0 and m.state[peer, STATE] == PENDING:
                start_known(m, peer, ack, ts)
            elif peer >= 0 and m.state[peer, STATE] == ESTABLISHED and m.state[peer, BASE] != ack and not (
                    m.state[peer, FLAGS] & FROM_MIDDLE and (m.state[peer, BASE] - ack) & MASK <= NEAR_START):
                abandon(m, peer, ts)

    if row[STATE] == CLOSED and length > 0:
        offset = unwrap(row[NEXT], row[BASE], seq)
        if row[NEXT] - FAR <= offset and offset + length <= row[NEXT]:
            _duplicate(m, flow, offset, present, length, addr, ts)
            return
        row[STATE] = NONE
    if row[STATE] == NONE and (length > 0 or flags & FIN):
        start = known_start(m, flow, seq)
        if start >= 0:
            open_stream(m, flow, start, False, ts)
        elif length == 1:
            m.counters[PROBES] += 1  # a single byte of an unknown stream may be a keep-alive probe
            return
        else:
            await_start(m, flow, seq, ts)
    if row[STATE] == NONE or row[STATE] == CLOSED:
        return

    offset = unwrap(row[END] if row[STATE] == PENDING else row[NEXT], row[BASE], seq)
    low = lowest(m, flow) if row[STATE] == PENDING else row[NEXT]
    if offset < low - FAR or offset > row[END] + FAR:
        if length == 0 or row[STRANGER] != seq:
            m.counters[STRANGERS] += 1
            if length > 0:
                row[STRANGER] = (seq + length) & MASK
            return
        row[STRANGER] = -1
        if row[STATE] == PENDING or not 0 < offset - row[NEXT] <= WINDOW:
            m.counters[REPOSITIONED] += 1
            abandon(m, flow, ts)
            await_start(m, flow, seq, ts)
            offset = BIAS

    if row[STATE] == PENDING:
        if length > 0:
            _place_pending(m, flow, offset, present, length, addr, ts)
    elif length > 0:
        _place(m, flow, offset, present, length, addr, ts)
    else:
        row[END] = max(row[END], offset)  # an empty segment tells how much was sent before it
    # What comes after a FIN is numbered as if the FIN were a byte; so is its acknowledgment.
    if flags & FIN and (row[FINAL] < 0 or row[FLAGS] & RESET) and offset + length + 1 >= row[END]:
        row[FINAL] = row[END] = offset + length
        row[ACKED] = min(row[ACKED], row[FINAL])
        row[FLAGS] &= ~RESET
    if flags & RST and row[FINAL] < 0:
        row[FINAL] = row[END]
        row[FLAGS] |= RESET
    if row[STATE] == ESTABLISHED:
        settle(m, flow, ts)
    elif row[END] - lowest(m, flow) > NEAR_START:
        start_pending(m, flow, lowest(m, flow), True, ts)


@njit(cache=True, nogil=True)
def feed(m: Machine, flows: np.ndarray, flags: np.ndarray, numbers: np.ndarray, n: int, now: int, grace: int,
         short: int, long: int) -> None:
    """Take `n` rows of Segments; spans of all that is settled by them."""
    recover(m)
    state, meta, counters = m.state, m.meta, m.counters
    clock = meta[CLOCK]
    right = unchecked = 0
    for i in range(n):
        flow = flows[i]
        flag = flags[i]
        seq, ack, length, ts = numbers[i, 0], numbers[i, 1], numbers[i, 4], numbers[i, 5]
        row = state[flow]
        if clock < ts <= now:
            clock = ts
        if flag & RECYCLED:
            row[TRUST] = row[LONGEST] = 0
        if length > 0:
            if flag & SUM_RIGHT:
                right += 1
                row[TRUST] += 1
                row[LONGEST] = max(row[LONGEST], length)
            elif flag & SUM_WRONG == 0:
                unchecked += 1
            elif refuse(m, flow, seq, length):
                continue
        plain = row[STATE] == ESTABLISHED and flag & (SYN | FIN | RST | RECYCLED) == 0 and row[WAITING] == 0
        if plain and (seq - row[BASE] - row[NEXT]) & MASK == 0 and numbers[i, 3] == length:
            if length > 0:
                # `deliver`, written out: most segments go this way.
                at = row[NEXT]
                if at == 0:
                    store_u8(m.live + flow, 1)
                emit(m, flow, DATA, at, numbers[i, 2], length, ts)
                counters[DELIVERED] += length
                row[NEXT] = row[END] = at + length
                row[SEEN] = ts
        elif not (plain and length == 0 and (row[BASE] + row[NEXT] - seq) & MASK < WINDOW):
            _segment(m, flow, flag, seq, ack, numbers[i, 2], numbers[i, 3], length, ts)
        if flag & ACK:
            peer = peer_of(m, flow)
            if peer >= 0 and state[peer, STATE] == ESTABLISHED:
                other = state[peer]
                reached = unwrap(other[NEXT], other[BASE], ack)
                if other[ACKED] < reached <= other[END] + FAR:
                    if other[FINAL] >= 0:
                        reached = min(reached, other[FINAL])
                    other[ACKED] = reached
                    if reached > other[NEXT] and other[WAITING] == 0:
                        wait(m, peer, ts)
            elif row[HINT] >= 0 and (ack - row[HINT]) & MASK > NEAR_START:
                row[HINT] = -1  # the other side is far beyond its start: the number may come round again
    counters[SUM_OK] += right
    counters[SUM_UNCHECKED] += unchecked
    meta[CLOCK] = clock
    if clock - meta[REVIEWED] >= REVIEW_EVERY:
        review(m, clock, grace, short, long)


@njit(cache=True, nogil=True)
def expire(m: Machine, now: int, grace: int, short: int, long: int) -> None:
    """Let time pass without frames."""
    recover(m)
    m.meta[CLOCK] = max(m.meta[CLOCK], now)
    review(m, m.meta[CLOCK], grace, short, long)


@njit(cache=True, nogil=True)
def flush(m: Machine, flows: int, now: int) -> None:
    """The end of the input: every gap of flows 0..flows-1 becomes a HOLE."""
    recover(m)
    m.meta[CLOCK] = max(m.meta[CLOCK], now)
    for flow in range(flows):
        flush_stream(m, flow, now)
