"""The gloo decoder's kernel: spans in, bytes placed, a log of what happened, a reason to stop.

A lane's mode (one lane per direction of a connection):

    HELLO ---8 bytes---> PREAMBLE <--payload ends--- PAYLOAD
                          |  ^ |                        ^
                          |  | +------- opcode 1 -------+
             bad or lost  |  | found by its signature (RESYNC)
                          v  |
                          SCAN          DEAD: given up, bytes are skipped

`run` goes through the spans and stops where only Python can answer: a flow not met yet, a gloo flow found, the plan
of a collective, memory for a message kept raw, framing found again, a landing out of range nodes, the log full. It
is called again and goes on at the same byte: a preamble stays in `pre` until it can be acted upon.
Nothing here trusts its input: every length is checked before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mirror.internal import internal
from mirror.memory import copy, equal, load_u8, load_u32, load_u64
from mirror.spans import CLOSE, CONFLICT, DATA, DUPLICATE, HOLE, OPEN
from reconstruct.gloo import state as g
from reconstruct.gloo.framing import PREAMBLE_BYTES, valid
from reconstruct.gloo.messages import (
    GO_ON,
    act_on_preamble,
    end_payload,
    lose_framing,
    note,
    note_hole,
    place,
    scan,
)
from reconstruct.gloo.state import State
from reconstruct.landing import IDENT, meta_words, needs_node, poison

__all__ = ["run"]

_STORE_HELLO = 0x3C85F7CE
_MAX_HELLO = 1 << 24
_LOG_MARGIN = 16


@internal()
def _data(state: State, lane: int, offset: int, address: int, count: int, ts: int) -> int:
    """Bytes of a lane's stream; cursor[C_AT] of them are used already."""
    row = state.lanes[lane]
    cursor = state.cursor
    row[g.LAST_TS] = max(row[g.LAST_TS], ts)
    if row[g.POSITION] < 0:
        row[g.POSITION] = offset
    if row[g.POSITION] != offset + cursor[g.C_AT]:
        # Spans are gapless by contract; should they ever not be, nothing is assumed.
        row[g.HAVE] = 0
        row[g.POSITION] = offset + cursor[g.C_AT]
        lose_framing(state, lane, 0)
    while True:
        if cursor[g.C_LOG] > g.LOG_ROWS - _LOG_MARGIN:
            return g.DRAIN
        mode = row[g.MODE]
        at = cursor[g.C_AT]
        if mode == g.PAYLOAD:
            remain = row[g.REMAIN]
            if remain == 0:
                end_payload(state, lane, ts)
                continue
            if at == count:
                return GO_ON
            take = min(remain, count - at)
            done = row[g.LENGTH] - remain
            if row[g.DEST_KIND] == g.TO_LANDING:
                meta = meta_words(row[g.DEST])
                if needs_node(meta):
                    cursor[g.C_ARGUMENT] = meta[IDENT]
                    return g.NODES
                place(state, lane, row[g.DEST], row[g.DEST_OFFSET] + done, address + at, take,
                               row[g.SENDER], ts)
            elif row[g.DEST_KIND] == g.TO_MEMORY:
                copy(row[g.DEST] + done, address + at, take)
            row[g.REMAIN] = remain - take
            row[g.POSITION] += take
            cursor[g.C_AT] = at + take
        elif mode == g.PREAMBLE:
            have = row[g.HAVE]
            if have == PREAMBLE_BYTES:
                reason = act_on_preamble(state, lane)
                if reason != GO_ON:
                    return reason
                continue
            if at == count:
                return GO_ON
            take = min(PREAMBLE_BYTES - have, count - at)
            copy(state.pre.ctypes.data + lane * g.PRE_BYTES + have, address + at, take)
            row[g.HAVE] = have + take
            row[g.POSITION] += take
            cursor[g.C_AT] = at + take
        elif at == count:
            return GO_ON
        elif mode == g.SCAN:
            cursor[g.C_AT] = at + scan(state, lane, address + at, count - at)
            if row[g.MODE] == g.PREAMBLE:
                return g.RESYNC
        elif mode == g.HELLO:
            have = row[g.HAVE]
            take = min(8 - have, count - at)
            pre = state.pre.ctypes.data + lane * g.PRE_BYTES
            copy(pre + have, address + at, take)
            have += take
            row[g.POSITION] += take
            cursor[g.C_AT] = at + take
            row[g.HAVE] = have
            if have == 8:
                if row[g.HELLO_VALUE] != -2:
                    row[g.HELLO_VALUE] = load_u64(pre)
                row[g.HAVE] = 0
                row[g.MODE] = g.PREAMBLE
        else:
            row[g.POSITION] += count - at
            cursor[g.C_AT] = count


@internal()
def _hole(state: State, lane: int, length: int, known: int, since: int, ts: int) -> None:
    """`length` bytes of the stream are missing: skipped where a payload is known, else framing is lost."""
    row = state.lanes[lane]
    if row[g.POSITION] < 0:
        row[g.POSITION] = 0
    cursor = state.cursor
    cursor[g.C_HOLE_BYTES] += length
    cursor[g.C_KNOWN], cursor[g.C_SINCE], cursor[g.C_UNTIL] = known, since, ts
    rest = length
    while True:
        mode = row[g.MODE]
        if mode == g.PAYLOAD:
            take = min(row[g.REMAIN], rest)
            if take and row[g.DEST_KIND] == g.TO_MEMORY:
                note_hole(state, g.LOG_RAW_HOLE, lane, 0, row[g.LENGTH] - row[g.REMAIN], take)
            elif take and row[g.DEST_KIND] == g.TO_LANDING:
                offset = row[g.DEST_OFFSET] + row[g.LENGTH] - row[g.REMAIN]
                note_hole(state, g.LOG_HOLE, lane, meta_words(row[g.DEST])[IDENT], offset, take)
            row[g.MISSING] += take
            row[g.REMAIN] -= take
            row[g.POSITION] += take
            rest -= take
            if row[g.REMAIN] == 0:
                end_payload(state, lane, ts)
                continue
            return
        if rest == 0:
            return
        if mode == g.HELLO:
            take = min(8 - row[g.HAVE], rest)
            row[g.HAVE] += take
            row[g.POSITION] += take
            rest -= take
            row[g.HELLO_VALUE] = -2
            if row[g.HAVE] == 8:
                row[g.HAVE] = 0
                row[g.MODE] = g.PREAMBLE
        elif mode == g.PREAMBLE:
            lose_framing(state, lane, 1)
            row[g.HAVE] = 0
            row[g.POSITION] += rest
            return
        else:
            if mode == g.SCAN:
                note_hole(state, g.LOG_GAP, lane, 2, 0, 0)
            row[g.HAVE] = 0
            row[g.POSITION] += rest
            return


@internal()
def _heads_again(state: State, lane: int, offset: int, address: int, count: int) -> None:
    """A second copy of delivered bytes: compared with the starts of messages that are remembered.

    Where they differ and one of them is no valid preamble the other one is right: nothing that was done is in doubt.
    """
    at = state.lanes[lane, g.HEADS]
    for _ in range(g.RECENT_HEADS):
        start, bad = state.heads_at[lane, at, g.H_START], state.heads_at[lane, at, g.H_BAD]
        if start + PREAMBLE_BYTES <= offset:
            return
        low, high = max(offset, start), min(offset + count, start + PREAMBLE_BYTES)
        head = state.heads.ctypes.data + (lane * g.RECENT_HEADS + at) * PREAMBLE_BYTES
        if low < high and not equal(head + low - start, address + low - offset, high - low):
            whole = high - low == PREAMBLE_BYTES
            plain = bad == 0 and not (whole and not valid(address + start - offset, False))
            note(state, g.LOG_DOUBT, lane, low, high, 0 if plain else 2, 0, 0)
        at = (at - 1) % g.RECENT_HEADS


@internal()
def _again(state: State, lane: int, offset: int, address: int, count: int, ts: int) -> int:
    """A second copy of delivered bytes: compared where the first is held, late bytes of a hole are placed."""
    number = state.lanes[lane, g.NEWEST]
    for _ in range(g.RECENT):
        recent = state.recent[lane, number]
        low, high = max(offset, recent[g.R_START]), min(offset + count, recent[g.R_START] + recent[g.R_LENGTH])
        if recent[g.R_START] + recent[g.R_LENGTH] <= offset:
            break
        if low < high and recent[g.R_KIND] == g.TO_LANDING:
            meta = meta_words(recent[g.R_ADDRESS])
            if needs_node(meta):
                state.cursor[g.C_ARGUMENT] = meta[IDENT]
                return g.NODES
            place(state, lane, recent[g.R_ADDRESS], recent[g.R_OFFSET] + low - recent[g.R_START],
                           address + low - offset, high - low, recent[g.R_SENDER], ts)
        elif low < high and recent[g.R_KIND] == g.TO_MEMORY:
            row = state.lanes[lane]
            going_on = row[g.MODE] == g.PAYLOAD and row[g.NEWEST] == number and (
                    row[g.MISSING] or high - recent[g.R_START] > row[g.LENGTH] - row[g.REMAIN])
            if not going_on and not equal(recent[g.R_ADDRESS] + low - recent[g.R_START], address + low - offset,
                                          high - low):
                note(state, g.LOG_DOUBT, lane, low, high, 1, 0, 0)
        number = (number - 1) % g.RECENT
    _heads_again(state, lane, offset, address, count)
    return GO_ON


@internal()
def _disputed(state: State, lane: int, offset: int, count: int) -> None:
    """Two copies of delivered bytes differ and which is right is not known."""
    known = np.int64(0)
    for number in range(g.RECENT):
        recent = state.recent[lane, number]
        low, high = max(offset, recent[g.R_START]), min(offset + count, recent[g.R_START] + recent[g.R_LENGTH])
        if low >= high:
            continue
        known += high - low
        if recent[g.R_KIND] == g.TO_LANDING:
            meta = meta_words(recent[g.R_ADDRESS])
            poison(meta, recent[g.R_OFFSET] + low - recent[g.R_START], high - low, recent[g.R_SENDER])
            note(state, g.LOG_CONFLICT, lane, meta[IDENT], 0, 0, 0, 0)
        elif recent[g.R_KIND] == g.TO_MEMORY:
            note(state, g.LOG_DOUBT, lane, low, high, 1, 0, 0)
    if known < count:
        # A preamble is in doubt, and with it where payloads went.
        note(state, g.LOG_DOUBT, lane, offset, offset + count, 0, 0, 0)


@internal()
def _head(state: State, flow: int, address: int, count: int) -> int:
    """Classify a flow by its first bytes; FOUND when it is gloo, with a whole preamble as the last bytes of head."""
    peer = state.peer[flow]
    if peer >= 0 and state.status[peer] == g.STORE_CLIENT:
        state.status[flow] = g.STORE_SERVER
        return GO_ON
    head = state.head.ctypes.data + flow * g.HEAD_BYTES
    while state.cursor[g.C_AT] < count:
        at, have = state.cursor[g.C_AT], state.have[flow]
        goal = PREAMBLE_BYTES if have < PREAMBLE_BYTES else PREAMBLE_BYTES + 8
        take = min(goal - have, count - at)
        copy(head + have, address + at, take)
        have += take
        state.have[flow] = have
        state.cursor[g.C_AT] = at + take
        if have >= 5 and load_u8(head) == 0 and load_u32(head + 1) == _STORE_HELLO:
            state.status[flow] = g.STORE_CLIENT
            return GO_ON
        hello = have >= 8 and 0 <= load_u64(head) < _MAX_HELLO
        if hello and have >= 10 and load_u8(head + 8) == 0x16 and load_u8(head + 9) == 3:
            state.status[flow] = g.TLS
            return GO_ON
        if have == PREAMBLE_BYTES and valid(head, False):
            return g.FOUND
        if have == PREAMBLE_BYTES + 8:
            if hello and valid(head + 8, False):
                return g.FOUND
            state.status[flow] = g.OTHER
            return GO_ON
    return GO_ON


@njit(cache=True, nogil=True)
def run(state: State, n: int, flows: np.ndarray, kinds: np.ndarray, offsets: np.ndarray, addresses: np.ndarray,
        counts: np.ndarray, times: np.ndarray, whys: np.ndarray) -> int:
    """Take spans cursor[C_SPAN]..n; returns why it stopped (END: all taken). See mirror.spans for the arrays.

    cursor[C_LANE] is the lane (NEW_FLOW, FOUND: the flow) that the reason is about.
    """
    cursor = state.cursor
    lanes, lane_of = state.lanes, state.lane
    while cursor[g.C_SPAN] < n:
        # Most spans lie inside a payload: no views of rows here, each would cost atomic reference counts.
        i = cursor[g.C_SPAN]
        at = lane_of[flows[i]]
        if kinds[i] == DATA and at >= 0 and cursor[g.C_AT] == 0 and lanes[at, g.MODE] == g.PAYLOAD:
            taken = counts[i]
            if lanes[at, g.REMAIN] > taken and lanes[at, g.POSITION] == offsets[i]:
                ready = True
                if lanes[at, g.DEST_KIND] == g.TO_LANDING:
                    words = meta_words(lanes[at, g.DEST])
                    ready = not needs_node(words) and cursor[g.C_LOG] <= g.LOG_ROWS - _LOG_MARGIN
                    if ready:
                        place(state, at, lanes[at, g.DEST],
                              lanes[at, g.DEST_OFFSET] + lanes[at, g.LENGTH] - lanes[at, g.REMAIN],
                              addresses[i], taken, lanes[at, g.SENDER], times[i])
                elif lanes[at, g.DEST_KIND] == g.TO_MEMORY:
                    ready = False
                if ready:
                    lanes[at, g.LAST_TS] = max(lanes[at, g.LAST_TS], times[i])
                    lanes[at, g.REMAIN] -= taken
                    lanes[at, g.POSITION] += taken
                    cursor[g.C_SPAN] = i + 1
                    continue
        if cursor[g.C_LOG] > g.LOG_ROWS - 2 * g.RECENT - g.RECENT_HEADS - _LOG_MARGIN:
            return g.DRAIN
        i = cursor[g.C_SPAN]
        flow: Any = np.int64(flows[i])
        lane: Any = np.int64(state.lane[flow])
        kind = kinds[i]
        if kind == OPEN:
            if lane >= 0:
                note(state, g.LOG_CLOSED, lane, 2, flow, 0, 0, 0)
                state.lane[flow] = -1
            state.status[flow] = g.BEGUN if counts[i] == 1 else g.MIDSTREAM
            state.have[flow] = 0
        elif kind == CLOSE:
            if lane >= 0:
                note(state, g.LOG_CLOSED, lane, counts[i], flow, 0, 0, 0)
                state.lane[flow] = -1
            if state.status[flow] not in (g.STORE_CLIENT, g.STORE_SERVER):
                state.status[flow] = g.CLOSED
        elif lane >= 0:
            cursor[g.C_LANE] = lane
            reason = GO_ON
            if kind == DATA:
                reason = _data(state, lane, offsets[i], addresses[i], counts[i], times[i])
            elif kind == HOLE:
                _hole(state, lane, counts[i], whys[i, 0], whys[i, 1], times[i])
            elif kind == DUPLICATE:
                reason = _again(state, lane, offsets[i], addresses[i], counts[i], times[i])
            elif kind == CONFLICT:
                _disputed(state, lane, offsets[i], counts[i])
            if reason != GO_ON:
                return reason
        elif kind in (DATA, HOLE):
            status = state.status[flow]
            if status <= g.MIDSTREAM:
                cursor[g.C_LANE] = flow
                return g.NEW_FLOW
            if status == g.HEAD:
                if kind == HOLE:
                    state.status[flow] = g.OTHER
                elif _head(state, flow, addresses[i], counts[i]) == g.FOUND:
                    cursor[g.C_LANE] = flow
                    return g.FOUND
        cursor[g.C_SPAN] = i + 1
        cursor[g.C_AT] = 0
    return g.END
