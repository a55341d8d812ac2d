"""One lane's messages, in the kernel: slots, preambles, the begin and end of payloads, the search for a preamble.

Everything here works on one lane of `State`; `reconstruct.gloo.kernel` drives it span by span. Functions return GO_ON
or the reason why the kernel must stop and ask Python; they are called again with the same bytes then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mirror.internal import internal
from mirror.memory import copy, load_u8, load_u64
from reconstruct.gloo import state as g
from reconstruct.gloo.framing import PREAMBLE_BYTES, search, valid
from reconstruct.gloo.schedule import message
from reconstruct.gloo.state import State
from reconstruct.landing import COMPLETED, CONFLICTED, DROPPED, IDENT, condemn, deposit, meta_words

__all__ = ["GO_ON", "act_on_preamble", "end_payload", "lose_framing", "note", "note_hole", "place", "scan"]

GO_ON = -1
_MAX_BAD = 1000


@internal()
def note(state: State, what: int, lane: int, a: int, b: int, c: int, d: int, e: int) -> None:
    number = state.cursor[g.C_LOG]
    row = state.log[number]
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = what, lane, a, b, c, d, e
    state.cursor[g.C_LOG] = number + 1


@internal()
def note_hole(state: State, what: int, lane: int, ident: int, offset: int, length: int) -> None:
    """Log a loss together with what the HOLE at hand says of it. ident: of the landing; of LOG_GAP: 0 no HOLE took
    the border, 1 one did, 2 framing was lost before and more is missing."""
    number, cursor = state.cursor[g.C_LOG], state.cursor
    row = state.log[number]
    row[0], row[1], row[2], row[3], row[4] = what, lane, ident, offset, length
    row[5], row[6], row[7] = cursor[g.C_KNOWN], cursor[g.C_SINCE], cursor[g.C_UNTIL]
    cursor[g.C_LOG] = number + 1


@internal()
def _after(tag: int, than: int) -> bool:
    """Whether `tag` comes after `than` in a counter of 32 bits; -1 comes before all."""
    return than < 0 or 0 < ((tag - than) & 0xFFFFFFFF) < 0x80000000


@internal()
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


@internal()
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
            note(state, g.LOG_EVICTED, lane, old, 0, 0, 0, 0)
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


@internal()
def place(state: State, lane: int, meta: int, offset: int, source: int, count: int, sender: int,
                   ts: int) -> None:
    done = deposit(meta, offset, source, count, sender, ts)
    if done & CONFLICTED:
        note(state, g.LOG_CONFLICT, lane, meta_words(meta)[IDENT], 0, 0, 0, 0)
    if done & COMPLETED:
        note(state, g.LOG_LANDED, lane, meta_words(meta)[IDENT], 0, 0, 0, 0)
    if done & DROPPED:
        state.cursor[g.C_DROPPED] += count
    else:
        state.cursor[g.C_PLACED] += count


@internal()
def _keep_head(state: State, lane: int, start: int, bad: int) -> None:
    """Remember the preamble in `pre`, whose first byte is byte `start` of the stream."""
    at = (state.lanes[lane, g.HEADS] + 1) % g.RECENT_HEADS
    state.lanes[lane, g.HEADS] = at
    copy(state.heads.ctypes.data + (lane * g.RECENT_HEADS + at) * PREAMBLE_BYTES,
         state.pre.ctypes.data + lane * g.PRE_BYTES, PREAMBLE_BYTES)
    state.heads_at[lane, at, g.H_START], state.heads_at[lane, at, g.H_BAD] = start, bad


@internal()
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
    kind: Any = g.NOWHERE
    offset: Any = np.int64(0)
    if plan == g.REDUCE or plan == g.DONE:
        expected: Any = np.int64(-1)
        final = False
        if plan == g.REDUCE:
            offset, expected, final = message(
                entry[g.SIZE], entry[g.ITEM], entry[g.WORLD], entry[g.SENDER_RANK], index)
        if expected != length:
            # Certain positions and another length: the all-reduce itself is not of this size.
            entry[g.PLAN] = g.LOST
            if not entry[g.PRIVATE] and entry[g.META]:
                condemn(entry[g.META])
            note(state, g.LOG_MISFIT, lane, slot, index, length, expected, entry[g.PRIVATE])
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
    _keep_head(state, lane, row[g.START] - PREAMBLE_BYTES, 0)
    row[g.MODE] = g.PAYLOAD
    row[g.HAVE] = 0
    newest = (row[g.NEWEST] + 1) % g.RECENT
    row[g.NEWEST] = newest
    recent = state.recent[lane, newest]
    recent[g.R_START], recent[g.R_LENGTH], recent[g.R_KIND] = row[g.START], length, kind
    recent[g.R_ADDRESS], recent[g.R_OFFSET], recent[g.R_SENDER] = row[g.DEST], offset, row[g.SENDER]
    return GO_ON


@internal()
def end_payload(state: State, lane: int, ts: int) -> None:
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
        note(state, g.LOG_MESSAGE, lane, entry[g.SLOT], row[g.INDEX], row[g.LENGTH], row[g.MISSING], ts)
    elif plan == g.REDUCE and entry[g.COUNT] == entry[g.TOTAL]:
        entry[g.PLAN] = g.DONE
        note(state, g.LOG_DONE, lane, entry[g.SLOT], 0, 0, 0, 0)


@internal()
def lose_framing(state: State, lane: int, known: int) -> None:
    """The next message border is not known. known: the last one is, at POSITION - HAVE, and a HOLE took the next."""
    row = state.lanes[lane]
    row[g.GAP_START], row[g.GAP_KNOWN] = row[g.POSITION] - row[g.HAVE], known
    row[g.MODE] = g.SCAN if row[g.GROUP] >= 0 else g.DEAD
    note_hole(state, g.LOG_GAP, lane, known, 0, 0)


@internal()
def act_on_preamble(state: State, lane: int) -> int:
    """Act on the 48 bytes in `pre`."""
    row = state.lanes[lane]
    address = state.pre.ctypes.data + lane * g.PRE_BYTES
    if not valid(address, False):
        row[g.BAD] += 1
        if row[g.MESSAGES] == 0 and load_u8(address) == 0x16 and load_u8(address + 1) == 3:
            row[g.MODE] = g.DEAD
            note(state, g.LOG_TLS, lane, 0, 0, 0, 0, 0)
            return GO_ON
        _keep_head(state, lane, row[g.POSITION] - PREAMBLE_BYTES, 1)
        lose_framing(state, lane, 0)
        if row[g.BAD] > _MAX_BAD:
            row[g.MODE] = g.DEAD
        note(state, g.LOG_BAD, lane, 1 if row[g.MODE] == g.DEAD else 0, 0, 0, 0, 0)
        pre = state.pre[lane]
        for i in range(PREAMBLE_BYTES - 1):
            pre[i] = pre[i + 1]
        row[g.HAVE] = PREAMBLE_BYTES - 1
        return GO_ON
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
    _keep_head(state, lane, row[g.POSITION] - PREAMBLE_BYTES, 0)
    return GO_ON


@internal()
def scan(state: State, lane: int, address: int, count: int) -> int:
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
