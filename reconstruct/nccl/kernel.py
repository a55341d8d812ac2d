"""The NCCL decoder's kernel: spans of RoCE messages in, bytes placed, a log of what happened, a reason to stop.

`run` goes through the spans and stops where only Python can answer: a flow not met yet, a message behind all that is
known on its lane, one that contradicts what is known, a landing out of range nodes, a flow that ended, the log full.
It is called again and goes on: with the same span, or behind it where Python has dealt with it. Nothing here trusts
its input: places come from packet numbers, and lengths are checked against the table of messages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mirror.internal import internal
from mirror.memory import int32s_at, int64s_at, load_u32, load_u64, rows_at, uint8s_at
from mirror.roce_spans import BEGIN, CLOSE, CONFLICT, DATA, DUPLICATE, END, HOLE, OPEN, VOID
from mirror.roce_state import (
    HEADLESS,
    M_FIRST,
    M_FLAGS,
    M_GOT,
    M_IMM,
    M_KIND,
    M_LENGTH,
    M_MTU,
    M_PACKETS,
    M_RKEY,
    M_VA,
)
from mirror.roce_wire import WRITE
from reconstruct.landing import COMPLETED, CONFLICTED, IDENT, SIZE, meta_words, needs_nodes, poison, put_across
from reconstruct.nccl import state as n
from reconstruct.nccl.place import account, assign, dispute, pour, release, word
from reconstruct.nccl.state import State, view

__all__ = ["run"]


@internal(forceinline=True)
def _log(s: State, what: int, a: int, b: int, c: int) -> None:
    at = s.cursor[n.C_LOG]
    s.log[at, 0], s.log[at, 1], s.log[at, 2], s.log[at, 3] = what, a, b, c
    s.cursor[n.C_LOG] = at + 1


@internal()
def _begin(s: State, messages: np.ndarray, flow: int, slot: int, ts: int) -> int:
    """A message begins; END_OF_SPANS or why to stop."""
    status = s.status[flow]
    message = messages[slot]
    first, packets = message[M_FIRST], max(message[M_PACKETS], 1)
    if status == n.UNMET:
        return n.NEW_FLOW
    release(s, slot)
    s.track[flow, 0] = max(s.track[flow, 0], first + packets)
    s.track[flow, 1] = max(s.track[flow, 1], ts)
    if message[M_KIND] != WRITE or status == n.OTHER:
        return n.END_OF_SPANS
    owner = s.owner[flow]
    if status == n.CTS_FLOW:
        if message[M_PACKETS] == 1 and message[M_LENGTH] == s.cts_form[owner, n.F_ENTRY]:
            s.where[slot, n.W_MODE], s.where[slot, n.W_LANE] = n.ENTRY, owner
        return n.END_OF_SPANS
    row = s.lanes[owner]
    if row[n.L_STATE] != n.FOLLOWING:
        return n.END_OF_SPANS
    if ts < row[n.L_ATTACHED]:
        row[n.L_NEXT] = max(row[n.L_NEXT], first + packets)
        return n.END_OF_SPANS
    row[n.L_TS] = max(row[n.L_TS], ts)
    row[n.L_TOP] = max(row[n.L_TOP], first + packets)
    headless = message[M_FLAGS] & HEADLESS
    result = assign(s, owner, slot, first, -1 if headless else message[M_LENGTH], -1 if headless else message[M_VA],
                    message[M_RKEY], message[M_MTU])
    s.cursor[n.C_LANE], s.cursor[n.C_SLOT], s.cursor[n.C_WHY] = owner, slot, result
    if result == n.BEYOND:
        return n.ASK
    return n.END_OF_SPANS if result in (n.FOUND, n.OLD) else n.MISFIT


@internal()
def _end(s: State, message: np.ndarray, slot: int, complete: bool) -> int:
    """No more bytes of a message are expected."""
    w = s.where[slot]
    mode = w[n.W_MODE]
    if mode == n.KEEP:
        _log(s, n.LOG_END, slot, w[n.W_LANE], complete)
    elif mode in (n.PASS, n.PLACE):
        if w[n.W_COUNTED] == 0:
            w[n.W_COUNTED] = 1
            account(s, w[n.W_LANE], message[M_FIRST], message[M_PACKETS] if message[M_PACKETS] >= 0 else message[M_GOT])
        if complete and w[n.W_IMMEDIATE] != n.ANY_IMMEDIATE and message[M_IMM] != w[n.W_IMMEDIATE]:
            s.cursor[n.C_LANE], s.cursor[n.C_SLOT], s.cursor[n.C_WHY] = w[n.W_LANE], slot, n.WRONG_IMMEDIATE
            return n.MISFIT
    return n.END_OF_SPANS


@internal()
def _read_entry(s: State, row: int, source: int) -> None:
    """A CTS entry."""
    form = s.cts_form[row]
    index = load_u64(source + form[n.F_INDEX])
    at = n.CTS_WORDS * (index % n.CTS_KEPT)
    kept = s.cts[row]
    kept[at + n.C_ADDRESS] = load_u64(source + form[n.F_ADDRESS])
    kept[at + n.C_RKEY] = load_u32(source + form[n.F_RKEY])
    kept[at + n.C_TAG] = load_u32(source + form[n.F_TAG])
    kept[at + n.C_INDEX] = index
    kept[at + n.C_ROOM] = load_u32(source + form[n.F_ROOM])


@internal()
def _lost(s: State, messages: np.ndarray, flow: int, slot: int, offset: int, length: int, known: int, since: int,
          ts: int) -> None:
    """A HOLE. Those inside a message are counted when it ends; one of no bytes is between messages."""
    if s.status[flow] != n.LANE:
        return
    lane = s.owner[flow]
    row = s.log[s.cursor[n.C_LOG]]
    row[0], row[1], row[5], row[6], row[7] = n.LOG_HOLE, lane, known, since, ts
    row[2], row[3], row[4] = offset, -1, length
    s.cursor[n.C_LOG] += 1
    if slot >= 0:
        row[2], row[3] = messages[slot, M_FIRST], offset
    elif length > 0:
        if offset + length > s.lanes[lane, n.L_NEXT]:
            s.lanes[lane, n.L_LOST] += 1
        account(s, lane, offset, length)


@internal()
def _disputed(s: State, slot: int, offset: int, length: int) -> None:
    """Copies of bytes of a message differ."""
    w = s.where[slot]
    if w[n.W_META] == 0 or w[n.W_MODE] not in (n.PLACE, n.KEEP):
        return
    if w[n.W_MODE] == n.PLACE:
        dispute(s, slot, offset, length)
    else:
        poison(meta_words(w[n.W_META]), offset, length, w[n.W_SENDER])
    _log(s, n.LOG_CONFLICT, meta_words(w[n.W_META])[IDENT], w[n.W_LANE], 0)


@njit(cache=True, nogil=True)
def run(handle: np.ndarray, messages: np.ndarray, spans: np.ndarray, count: int) -> int:
    """Take spans from cursor[C_SPAN] on; END_OF_SPANS, or why to stop at that one.

    handle: of State; messages: rows of the reassembler; spans: handle of MessageSpans' arrays.
    """
    s = view(handle)
    flow, kind = int32s_at(spans[0], spans[1]), uint8s_at(spans[2], spans[3])
    offset, addr = int64s_at(spans[4], spans[5]), int64s_at(spans[6], spans[7])
    length, ts = int64s_at(spans[8], spans[9]), int64s_at(spans[10], spans[11])
    message, why = int32s_at(spans[12], spans[13]), rows_at(spans[14], spans[15], spans[16])
    cursor = s.cursor
    where, entries, scratch = s.where.ctypes.data, s.entries.ctypes.data, s.scratch.ctypes.data
    placed = 0
    for i in range(cursor[n.C_SPAN], count):
        what, slot = kind[i], message[i]
        reason = n.END_OF_SPANS
        if what == DATA or what == DUPLICATE:  # noqa: SIM109  a tuple is slow here
            w = where + 8 * n.WHERE_WORDS * slot
            mode = word(w, n.W_MODE)
            if mode >= n.PLACE:
                size = length[i]
                if mode == n.ENTRY:
                    if offset[i] == 0 and size == s.cts_form[word(w, n.W_LANE), n.F_ENTRY]:
                        _read_entry(s, word(w, n.W_LANE), addr[i])
                    continue
                landing = word(w, n.W_META)
                if landing == 0:
                    continue
                meta = meta_words(landing)
                if needs_nodes(meta, size):
                    cursor[n.C_ARGUMENT] = meta[IDENT]
                    reason = n.NODES
                else:
                    if mode == n.PLACE:
                        result = pour(w, entries, scratch, offset[i], addr[i], size, ts[i])
                        placed += size
                    else:
                        result = put_across(landing, offset[i], addr[i], max(0, min(size, meta[SIZE] - offset[i])),
                                            word(w, n.W_SENDER), ts[i])
                    if result & CONFLICTED:
                        _log(s, n.LOG_CONFLICT, meta[IDENT], word(w, n.W_LANE), 0)
                    if result & COMPLETED:
                        _log(s, n.LOG_LANDED, meta[IDENT], 0, 0)
        elif what == BEGIN:
            reason = _begin(s, messages, flow[i], slot, ts[i])
        elif what == END:
            reason = _end(s, messages[slot], slot, length[i] == 1)
        elif what == CONFLICT:
            _disputed(s, slot, offset[i], length[i])
        elif what == HOLE:
            _lost(s, messages, flow[i], slot, offset[i], length[i], why[i, 0], why[i, 1], ts[i])
        elif what == VOID:
            if s.where[slot, n.W_MODE] == n.KEEP:
                _log(s, n.LOG_VOID, slot, s.where[slot, n.W_LANE], 0)
            release(s, slot)
        elif what in (CLOSE, OPEN):
            if s.status[flow[i]] != n.UNMET:
                reason = n.CLOSED
            s.track[flow[i], 0] = s.track[flow[i], 1] = -1
        if reason == n.END_OF_SPANS and cursor[n.C_LOG] > n.LOG_ROWS - n.LOG_MARGIN:
            cursor[n.C_SPAN] = i + 1
            cursor[n.C_PLACED] += placed
            return n.DRAIN
        if reason != n.END_OF_SPANS:
            cursor[n.C_SPAN], cursor[n.C_FLOW] = i, flow[i]
            cursor[n.C_PLACED] += placed
            return reason
    cursor[n.C_SPAN] = count
    cursor[n.C_PLACED] += placed
    return n.END_OF_SPANS
