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

import numpy as np
from numba import njit

from mirror.memory import copy, equal, load_u8, load_u32, load_u64
from mirror.spans import CLOSE, CONFLICT, DATA, DUPLICATE, HOLE, OPEN
from reconstruct import gloo_state as g
from reconstruct.framing import PREAMBLE_BYTES, search, valid
from reconstruct.gloo_state import State
from reconstruct.landing import COMPLETED, CONFLICTED, DROPPED, IDENT, condemn, deposit, meta_words, needs_node, poison
from reconstruct.schedule import message

__all__ = ["run"]

_STORE_HELLO = 0x3C85F7CE
_MAX_HELLO = 1 << 24
_MAX_BAD = 1000
_GO_ON = -1
_LOG_MARGIN = 16


@njit(cache=True, nogil=True)
def _note(state: State, what: int, lane: int, a: int, b: int, c: int, d: int, e: int) -> None:
    number = state.cursor[g.C_LOG]
    row = state.log[number]
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = what, lane, a, b, c, d, e
    state.cursor[g.C_LOG] = number + 1


@njit(cache=True, nogil=True)
def _after(tag: int, than: int) -> bool:
    """Whether `tag` comes after `than` in a counter of 32 bits; -1 comes before all."""
    return than < 0 or 0 < ((tag - than) & 0xFFFFFFFF) < 0x80000000


@njit(cache=True, nogil=True)
def _entry(state: State, lane: int, slot: int) -> int:
    """Index of the lane's entry for `slot`, made if need be."""
    row, entries = state.lanes[lane], state.entries[lane]
    row[g.SERIAL] += 1
    hot = row[g.HOT]
    if entries[hot, g.SLOT] != slot:
        hot = -1
        for i in range(g.ENTRIES):
            if entries[i, g.SLOT] == slot:
                hot = i
                break
        if hot < 0:
            hot = _make_entry(state, lane, slot)
        row[g.HOT] = hot
    entries[hot, g.USED] = row[g.SERIAL]
    return hot


@njit(cache=True, nogil=True)
def _make_entry(state: State, lane: int, slot: int) -> int:
    """Take the emptiest, then the longest unused entry. A tag that was given up is never taken for a new one."""
    row, entries = state.lanes[lane], state.entries[lane]
    best, best_rank, best_used = 0, 4, np.int64(0)
    for i in range(g.ENTRIES):
        plan = entries[i, g.PLAN]
        if entries[i, g.SLOT] < 0:
            rank = 0
        elif plan == g.IGNORED or plan == g.LOST or plan == g.DONE:
            rank = 1
        elif plan == g.NONE:
            rank = 2
        else:
            rank = 3
        if rank < best_rank or (rank == best_rank and entries[i, g.USED] < best_used):
            best, best_rank, best_used = i, rank, entries[i, g.USED]
    entry = entries[best]
    old = entry[g.SLOT]
    if old >= 0:
        if best_rank == 3:
            _note(state, g.LOG_EVICTED, lane, old, 0, 0, 0, 0)
        tag = (old >> 24) & 0xFFFFFFFF
        if old >> 56 != 0 and _after(tag, row[g.FLOOR]):
            row[g.FLOOR] = tag
    tag = (slot >> 24) & 0xFFFFFFFF
    entry[:] = 0
    entry[g.SLOT] = slot
    entry[g.PLAN] = g.NONE
    if slot >> 56 != 0 and not _after(tag, row[g.FLOOR]):
        entry[g.PLAN] = g.LOST
    entry[g.SHORTEST], entry[g.LONGEST] = 1 << 62, -1
    entry[g.BORN] = row[g.GAPS]
    unproven = row[g.DIRT] == g.UNPROVEN
    if row[g.DIRT] == g.UNPROVEN_BELOW:
        unproven = not _after(tag, row[g.CLEAN_ABOVE])
    entry[g.PRIVATE] = 1 if unproven else 0
    return best


@njit(cache=True, nogil=True)
def _noted_deposit(state: State, lane: int, meta: int, offset: int, source: int, count: int, sender: int,
                   ts: int) -> None:
    done = deposit(meta, offset, source, count, sender, ts)
    if done & CONFLICTED:
        _note(state, g.LOG_CONFLICT, lane, meta_words(meta)[IDENT], 0, 0, 0, 0)
    if done & COMPLETED:
        _note(state, g.LOG_LANDED, lane, meta_words(meta)[IDENT], 0, 0, 0, 0)
    if done & DROPPED:
        state.cursor[g.C_DROPPED] += count
    else:
        state.cursor[g.C_PLACED] += count


@njit(cache=True, nogil=True)
def _begin_payload(state: State, lane: int, number: int, slot: int, length: int) -> int:
    """Start the payload announced by the preamble at hand, or say what Python must answer first."""
    row, entry = state.lanes[lane], state.entries[lane, number]
    plan = entry[g.PLAN]
    row[g.ENTRY] = number
    if plan == g.NONE and row[g.GROUP] >= 0:
        return g.ASK
    if plan == g.KEPT and not row[g.READY]:
        return g.ALLOCATE
    index = entry[g.COUNT]
    kind, offset = g.NOWHERE, np.int64(0)
    if plan == g.REDUCE or plan == g.DONE:
        expected, final = np.int64(-1), False
        if plan == g.REDUCE:
            offset, expected, final = message(
                entry[g.SIZE], entry[g.ITEM], entry[g.WORLD], entry[g.SENDER_RANK], index)
        if expected != length:
            # Certain positions and another length: the all-reduce itself is not of this size.
            entry[g.PLAN] = g.LOST
            if not entry[g.PRIVATE] and entry[g.META]:
                condemn(entry[g.META])
            _note(state, g.LOG_MISFIT, lane, slot, index, length, expected, entry[g.PRIVATE])
        elif final:
            kind = g.TO_LANDING
            row[g.DEST] = entry[g.META]
            row[g.SENDER] = entry[g.SENDER_RANK]
    elif plan == g.KEPT:
        kind = row[g.DEST_KIND]
        row[g.READY] = 0
    entry[g.COUNT] = index + 1
    row[g.DEST_KIND], row[g.DEST_OFFSET] = kind, offset
    row[g.INDEX], row[g.LENGTH], row[g.REMAIN], row[g.START] = index, length, length, row[g.POSITION]
    row[g.CURRENT], row[g.MISSING] = slot, 0
    row[g.MODE] = g.PAYLOAD
    row[g.HAVE] = 0
    newest = (row[g.NEWEST] + 1) % g.RECENT
    row[g.NEWEST] = newest
    recent = state.recent[lane, newest]
    recent[g.R_START], recent[g.R_LENGTH], recent[g.R_KIND] = row[g.START], length, kind
    recent[g.R_ADDRESS], recent[g.R_OFFSET], recent[g.R_SENDER] = row[g.DEST], offset, row[g.SENDER]
    return _GO_ON


@njit(cache=True, nogil=True)
def _end_payload(state: State, lane: int, ts: int) -> None:
    row = state.lanes[lane]
    row[g.MODE] = g.PREAMBLE
    row[g.HAVE] = 0
    row[g.MESSAGES] += 1
    if row[g.DEST_KIND] == g.TO_MEMORY and row[g.MISSING]:
        # Its memory has gaps of garbage, so a second copy must not be compared with it.
        state.recent[lane, row[g.NEWEST], g.R_KIND] = g.NOWHERE
    entry = state.entries[lane, row[g.ENTRY]]
    if entry[g.SLOT] != row[g.CURRENT]:
        return
    plan = entry[g.PLAN]
    if plan == g.KEPT or plan == g.COUNTED:
        _note(state, g.LOG_MESSAGE, lane, entry[g.SLOT], row[g.INDEX], row[g.LENGTH], row[g.MISSING], ts)
    elif plan == g.REDUCE and entry[g.COUNT] == entry[g.TOTAL]:
        entry[g.PLAN] = g.DONE
        _note(state, g.LOG_DONE, lane, entry[g.SLOT], 0, 0, 0, 0)


@njit(cache=True, nogil=True)
def _lose_framing(state: State, lane: int, known: int) -> None:
    """The next message border is not known. known: the last one is, at POSITION - HAVE."""
    row = state.lanes[lane]
    row[g.GAP_START], row[g.GAP_KNOWN] = row[g.POSITION] - row[g.HAVE], known
    row[g.MODE] = g.SCAN if row[g.GROUP] >= 0 else g.DEAD
    _note(state, g.LOG_GAP, lane, 0, 0, 0, 0, 0)


@njit(cache=True, nogil=True)
def _preamble(state: State, lane: int) -> int:
    """Act on the 48 bytes in `pre`."""
    row = state.lanes[lane]
    address = state.pre.ctypes.data + lane * g.PRE_BYTES
    if not valid(address, False):
        row[g.BAD] += 1
        if row[g.MESSAGES] == 0 and load_u8(address) == 0x16 and load_u8(address + 1) == 3:
            row[g.MODE] = g.DEAD
            _note(state, g.LOG_TLS, lane, 0, 0, 0, 0, 0)
            return _GO_ON
        _lose_framing(state, lane, 0)
        if row[g.BAD] > _MAX_BAD:
            row[g.MODE] = g.DEAD
        _note(state, g.LOG_BAD, lane, 1 if row[g.MODE] == g.DEAD else 0, 0, 0, 0, 0)
        pre = state.pre[lane]
        for i in range(PREAMBLE_BYTES - 1):
            pre[i] = pre[i + 1]
        row[g.HAVE] = PREAMBLE_BYTES - 1
        return _GO_ON
    opcode, slot, length = load_u64(address + 8), load_u64(address + 16), load_u64(address + 32)
    number = _entry(state, lane, slot)
    tag = (slot >> 24) & 0xFFFFFFFF
    row[g.TRUSTED] += 1
    if slot >> 56 != 0 and row[g.TRUSTED] >= 3 and _after(tag, row[g.MAX_TAG]):
        row[g.MAX_TAG] = tag
    if opcode == 1:
        return _begin_payload(state, lane, number, slot, length)
    entry = state.entries[lane, number]
    if opcode == 2:
        entry[g.SENT] += 1
    else:
        # The sender of this flow waits for `length` bytes: what the reverse lane may carry of this slot.
        entry[g.WANTED] += 1
        entry[g.SHORTEST] = min(entry[g.SHORTEST], length)
        entry[g.LONGEST] = max(entry[g.LONGEST], length)
    row[g.HAVE] = 0
    row[g.MESSAGES] += 1
    return _GO_ON


@njit(cache=True, nogil=True)
def _scan(state: State, lane: int, address: int, count: int) -> int:
    """Look for a preamble in `count` new bytes and in the up to 47 kept before them; returns bytes used."""
    row = state.lanes[lane]
    pre = state.pre.ctypes.data + lane * g.PRE_BYTES
    keep = PREAMBLE_BYTES - 1
    have = row[g.HAVE]
    if have:
        extra = min(keep, count)
        copy(pre + have, address, extra)
        found = search(pre, have + extra)
        bytes_ = state.pre[lane]
        if found >= 0:
            for i in range(PREAMBLE_BYTES):
                bytes_[i] = bytes_[found + i]
            row[g.HAVE] = PREAMBLE_BYTES
            row[g.MODE] = g.PREAMBLE
            row[g.TRUSTED] = 0
            used = found + PREAMBLE_BYTES - have
            row[g.POSITION] += used
            return used
        if extra == count:
            drop = max(0, have + extra - keep)
            for i in range(have + extra - drop):
                bytes_[i] = bytes_[i + drop]
            row[g.HAVE] = have + extra - drop
            row[g.POSITION] += count
            return count
    found = search(address, count)
    if found >= 0:
        copy(pre, address + found, PREAMBLE_BYTES)
        row[g.HAVE] = PREAMBLE_BYTES
        row[g.MODE] = g.PREAMBLE
        row[g.TRUSTED] = 0
        row[g.POSITION] += found + PREAMBLE_BYTES
        return found + PREAMBLE_BYTES
    tail = min(keep, count)
    copy(pre, address + count - tail, tail)
    row[g.HAVE] = tail
    row[g.POSITION] += count
    return count


@njit(cache=True, nogil=True)
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
        _lose_framing(state, lane, 0)
    while True:
        if cursor[g.C_LOG] > g.LOG_ROWS - _LOG_MARGIN:
            return g.DRAIN
        mode = row[g.MODE]
        at = cursor[g.C_AT]
        if mode == g.PAYLOAD:
            remain = row[g.REMAIN]
            if remain == 0:
                _end_payload(state, lane, ts)
                continue
            if at == count:
                return _GO_ON
            take = min(remain, count - at)
            done = row[g.LENGTH] - remain
            if row[g.DEST_KIND] == g.TO_LANDING:
                meta = meta_words(row[g.DEST])
                if needs_node(meta):
                    cursor[g.C_ARGUMENT] = meta[IDENT]
                    return g.NODES
                _noted_deposit(state, lane, row[g.DEST], row[g.DEST_OFFSET] + done, address + at, take,
                               row[g.SENDER], ts)
            elif row[g.DEST_KIND] == g.TO_MEMORY:
                copy(row[g.DEST] + done, address + at, take)
            row[g.REMAIN] = remain - take
            row[g.POSITION] += take
            cursor[g.C_AT] = at + take
        elif mode == g.PREAMBLE:
            have = row[g.HAVE]
            if have == PREAMBLE_BYTES:
                reason = _preamble(state, lane)
                if reason != _GO_ON:
                    return reason
                continue
            if at == count:
                return _GO_ON
            take = min(PREAMBLE_BYTES - have, count - at)
            copy(state.pre.ctypes.data + lane * g.PRE_BYTES + have, address + at, take)
            row[g.HAVE] = have + take
            row[g.POSITION] += take
            cursor[g.C_AT] = at + take
        elif at == count:
            return _GO_ON
        elif mode == g.SCAN:
            cursor[g.C_AT] = at + _scan(state, lane, address + at, count - at)
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


@njit(cache=True, nogil=True)
def _hole(state: State, lane: int, length: int, ts: int) -> None:
    """`length` bytes of the stream are missing: skipped where a payload is known, else framing is lost."""
    row = state.lanes[lane]
    if row[g.POSITION] < 0:
        row[g.POSITION] = 0
    state.cursor[g.C_HOLE_BYTES] += length
    rest = length
    while True:
        mode = row[g.MODE]
        if mode == g.PAYLOAD:
            take = min(row[g.REMAIN], rest)
            if take and row[g.DEST_KIND] == g.TO_MEMORY:
                _note(state, g.LOG_RAW_HOLE, lane, row[g.LENGTH] - row[g.REMAIN], take, 0, 0, 0)
            row[g.MISSING] += take
            row[g.REMAIN] -= take
            row[g.POSITION] += take
            rest -= take
            if row[g.REMAIN] == 0:
                _end_payload(state, lane, ts)
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
            _lose_framing(state, lane, 1)
            row[g.HAVE] = 0
        else:
            row[g.HAVE] = 0
            row[g.POSITION] += rest
            return


@njit(cache=True, nogil=True)
def _again(state: State, lane: int, offset: int, address: int, count: int, ts: int) -> int:
    """A second copy of delivered bytes: compared where the first is held, late bytes of a hole are placed."""
    for number in range(g.RECENT):
        recent = state.recent[lane, number]
        low, high = max(offset, recent[g.R_START]), min(offset + count, recent[g.R_START] + recent[g.R_LENGTH])
        if low >= high:
            continue
        if recent[g.R_KIND] == g.TO_LANDING:
            meta = meta_words(recent[g.R_ADDRESS])
            if needs_node(meta):
                state.cursor[g.C_ARGUMENT] = meta[IDENT]
                return g.NODES
            _noted_deposit(state, lane, recent[g.R_ADDRESS], recent[g.R_OFFSET] + low - recent[g.R_START],
                           address + low - offset, high - low, recent[g.R_SENDER], ts)
        elif recent[g.R_KIND] == g.TO_MEMORY:
            row = state.lanes[lane]
            if row[g.MODE] == g.PAYLOAD and row[g.NEWEST] == number and (
                    row[g.MISSING] or high - recent[g.R_START] > row[g.LENGTH] - row[g.REMAIN]):
                continue
            if not equal(recent[g.R_ADDRESS] + low - recent[g.R_START], address + low - offset, high - low):
                _note(state, g.LOG_DOUBT, lane, low, high, 1, 0, 0)
    return _GO_ON


@njit(cache=True, nogil=True)
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
            _note(state, g.LOG_CONFLICT, lane, meta[IDENT], 0, 0, 0, 0)
        elif recent[g.R_KIND] == g.TO_MEMORY:
            _note(state, g.LOG_DOUBT, lane, low, high, 1, 0, 0)
    if known < count:
        # A preamble is in doubt, and with it where payloads went.
        _note(state, g.LOG_DOUBT, lane, offset, offset + count, 0, 0, 0)


@njit(cache=True, nogil=True)
def _head(state: State, flow: int, address: int, count: int) -> int:
    """Classify a flow by its first bytes; FOUND when it is gloo, with a whole preamble as the last bytes of head."""
    peer = state.peer[flow]
    if peer >= 0 and state.status[peer] == g.STORE_CLIENT:
        state.status[flow] = g.STORE_SERVER
        return _GO_ON
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
            return _GO_ON
        hello = have >= 8 and 0 <= load_u64(head) < _MAX_HELLO
        if hello and have >= 10 and load_u8(head + 8) == 0x16 and load_u8(head + 9) == 3:
            state.status[flow] = g.TLS
            return _GO_ON
        if have == PREAMBLE_BYTES and valid(head, False):
            return g.FOUND
        if have == PREAMBLE_BYTES + 8:
            if hello and valid(head + 8, False):
                return g.FOUND
            state.status[flow] = g.OTHER
            return _GO_ON
    return _GO_ON


@njit(cache=True, nogil=True)
def run(state: State, n: int, flows: np.ndarray, kinds: np.ndarray, offsets: np.ndarray, addresses: np.ndarray,
        counts: np.ndarray, times: np.ndarray) -> int:
    """Take spans cursor[C_SPAN]..n; returns why it stopped (END: all taken). See mirror.spans for the arrays.

    cursor[C_LANE] is the lane (NEW_FLOW, FOUND: the flow) that the reason is about.
    """
    cursor = state.cursor
    while cursor[g.C_SPAN] < n:
        if cursor[g.C_LOG] > g.LOG_ROWS - 2 * g.RECENT - _LOG_MARGIN:
            return g.DRAIN
        i = cursor[g.C_SPAN]
        flow, kind = np.int64(flows[i]), kinds[i]
        lane = np.int64(state.lane[flow])
        if kind == OPEN:
            if lane >= 0:
                _note(state, g.LOG_CLOSED, lane, 2, flow, 0, 0, 0)
                state.lane[flow] = -1
            state.status[flow] = g.BEGUN if counts[i] == 1 else g.MIDSTREAM
            state.have[flow] = 0
        elif kind == CLOSE:
            if lane >= 0:
                _note(state, g.LOG_CLOSED, lane, counts[i], flow, 0, 0, 0)
                state.lane[flow] = -1
            state.status[flow] = g.CLOSED
        elif lane >= 0:
            cursor[g.C_LANE] = lane
            reason = _GO_ON
            if kind == DATA:
                reason = _data(state, lane, offsets[i], addresses[i], counts[i], times[i])
            elif kind == HOLE:
                _hole(state, lane, counts[i], times[i])
            elif kind == DUPLICATE:
                reason = _again(state, lane, offsets[i], addresses[i], counts[i], times[i])
            elif kind == CONFLICT:
                _disputed(state, lane, offsets[i], counts[i])
            if reason != _GO_ON:
                return reason
        elif kind == DATA or kind == HOLE:
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
