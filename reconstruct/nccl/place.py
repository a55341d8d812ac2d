"""Where a message of a known collective belongs, and its bytes put there: numba functions for kernel and Python.

`assign` finds a message by its packet number and checks everything that its first packet tells: length, address,
path MTU. `pour` takes bytes of it: final values are decoded straight into the landing where it is still empty, and
compared where it is not. A wrong flag poisons the landing; no value comes from it.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from mirror.internal import internal
from mirror.memory import copy, load_u64, store_u8, store_u64
from reconstruct.landing import CONFLICTED, DATA, DROPPED, continues, extend, meta_words, poison, put_across, vacant
from reconstruct.nccl import state as n
from reconstruct.nccl.payload import LINE, UNIT_DATA, UNIT_WIRE, decode, line_places, read_flag
from reconstruct.nccl.schedule import LL, LL128, SIMPLE, SLOT_BYTES, STEPS
from reconstruct.nccl.script import (
    T_APART,
    T_FINAL,
    T_FIRST,
    T_LENGTH,
    T_OFFSET,
    T_SHIFT,
    T_STEP,
    T_WHOLE,
    T_WIRE,
    cell,
    find,
    immediate,
)
from reconstruct.nccl.state import State

__all__ = ["account", "assign", "dispute", "pour", "pour_into", "release", "word"]


@internal()
def release(s: State, target: int) -> None:
    """Whatever message row `target` stood for is over."""
    s.where[target, n.W_MODE] = n.NOTHING
    s.where[target, n.W_ENTRY] = -1


@internal()
def _entry_of(s: State, lane: int, number: int) -> int:
    """The known collective of the lane that has packet `number`, or -1."""
    row, entries = s.lanes[lane], s.entries
    entry = row[n.L_AT]
    while entry >= 0 and number < entries[entry, n.E_START]:
        entry = entries[entry, n.E_OLDER]
    while entry >= 0 and number >= entries[entry, n.E_END]:
        entry = entries[entry, n.E_NEWER]
    if entry >= 0:
        if number < entries[entry, n.E_START]:
            return -1
        row[n.L_AT] = entry
    return entry


@njit(cache=True, nogil=True)
def assign(s: State, lane: int, target: int, first: int, length: int, address: int, rkey: int, mtu: int) -> int:
    """Have `where[target]` say what to do with the message whose first captured packet is `first`.

    length: its bytes, or -1; address: its virtual address, -1 if unknown (without a length: `first` is not its first
    packet); rkey: of that address; mtu: path MTU, 0 unknown. Returns FOUND, or why not: BEYOND what is known, OLD (its
    collective is over), WRONG_...: the collective has no such message here.
    """
    release(s, target)
    row, w = s.lanes[lane], s.where[target]
    w[n.W_LANE] = lane
    if first >= row[n.L_NEXT]:
        return n.BEYOND
    entry = _entry_of(s, lane, first)
    if entry < 0:
        return n.OLD
    e = s.entries[entry]
    table = e[n.E_TABLE]
    packet = first - e[n.E_START]
    k = find(table, e[n.E_COUNT], e[n.E_HINT], packet)
    e[n.E_HINT] = k
    inside = packet - cell(table, k, T_FIRST)
    wire, apart = cell(table, k, T_WIRE), cell(table, k, T_APART) != 0
    shift = cell(table, k, T_SHIFT) + inside * row[n.L_MTU]
    tells = n.ANY_IMMEDIATE
    headless = address == -1 and length < 0
    if not headless:
        if mtu and length > mtu and mtu != row[n.L_MTU]:
            return n.WRONG_MTU
        tells = immediate(cell(table, k, T_WHOLE), row[n.L_ENDIAN] == n.BIG)
        tail = apart and length == 0 and packet == cell(table, k + 1, T_FIRST) - 1
        if inside == 0 and length == wire:
            tells = n.NO_IMMEDIATE if apart else tells
        elif apart and inside * row[n.L_MTU] < wire and length == min(row[n.L_MTU], wire - inside * row[n.L_MTU]):
            tells = n.NO_IMMEDIATE
        elif not tail:
            return n.WRONG_LENGTH
        if length > 0 and address != -1 and e[n.E_VA] != -2:
            slot = (e[n.E_STEP] + cell(table, k, T_STEP)) % STEPS
            origin = address - slot * SLOT_BYTES[e[n.E_PROTOCOL]] - shift
            if e[n.E_VA] == -1:
                e[n.E_VA] = origin
            elif e[n.E_VA] != origin:
                return n.WRONG_ADDRESS
        if length > 0 and address != -1 and row[n.L_CTS] >= 0 and e[n.E_NUMBER] > 0:
            number = e[n.E_NUMBER] + cell(table, k, T_STEP) // e[n.E_UNIT]
            entry_of = s.cts[row[n.L_CTS]]
            at = n.CTS_WORDS * (number % n.CTS_KEPT)
            if entry_of[at + n.C_INDEX] == number and (
                entry_of[at + n.C_ADDRESS] + shift != address or entry_of[at + n.C_RKEY] != rkey
            ):
                return n.WRONG_ANNOUNCEMENT
        if inside == 0:
            store_u8(e[n.E_MARKS] + k, 1)
            e[n.E_MATCHED] += wire > 0
    w[n.W_ENTRY] = entry
    w[n.W_COUNTED] = 0
    w[n.W_IMMEDIATE] = n.ANY_IMMEDIATE if row[n.L_ENDIAN] == n.UNREAD and tells >= 0 else tells
    w[n.W_MODE] = n.PASS
    if e[n.E_META] and cell(table, k, T_FINAL):
        w[n.W_MODE], w[n.W_META], w[n.W_PROTOCOL] = n.PLACE, e[n.E_META], e[n.E_PROTOCOL]
        w[n.W_OFFSET], w[n.W_LENGTH] = cell(table, k, T_OFFSET), cell(table, k, T_LENGTH)
        w[n.W_SHIFT], w[n.W_STEP] = shift, cell(table, k, T_STEP)
        w[n.W_WIRE], w[n.W_SENDER] = cell(table, k, T_SHIFT) + wire, row[n.L_SENDER]
    return n.FOUND


@internal(forceinline=True)
def word(row: int, column: int) -> int:
    """A column of the row of int64 at an address."""
    return load_u64(row + 8 * column)


@internal()
def _expected(w: int, entries: int, source: int) -> int:
    """The flag of a message, LL or LL128; where the connection's step is not known yet, this unit tells it."""
    e = entries + 8 * n.ENTRY_WORDS * word(w, n.W_ENTRY)
    protocol = word(w, n.W_PROTOCOL)
    if not word(e, n.E_EXACT):
        found = read_flag(protocol, source)
        step = found - 1 - word(w, n.W_STEP)
        if step < 0:
            return found + 1
        if word(e, n.E_VA) != -2:
            store_u64(e + 8 * n.E_VA, -1)  # it was reckoned with another slot
        store_u64(e + 8 * n.E_STEP, step)
        store_u64(e + 8 * n.E_EXACT, 1)
    flag = word(e, n.E_STEP) + word(w, n.W_STEP) + 1
    return flag & 0xFFFFFFFF if protocol == LL else flag


@internal()
def _pour_lines(w: int, source: int, begin: int, end: int, flag: int, ts: int) -> int:
    """LL128: lines of units that are not all here, wire bytes begin..end of a message, which lie at `source`."""
    landing, length, place, sender = word(w, n.W_META), word(w, n.W_LENGTH), word(w, n.W_OFFSET), word(w, n.W_SENDER)
    result = 0
    for at in range(begin, end, LINE):
        unit = (at >> 10) * UNIT_DATA[LL128]
        first, count, second, rest = line_places(at >> 7 & 7)
        line = source + at - begin
        if read_flag(LL128, line) != flag:
            low = max(0, min(unit + first, length - 1))
            poison(meta_words(landing), place + low, min(count, length - low), sender)
            return result | CONFLICTED
        count, rest = min(count, length - unit - first), min(rest, length - unit - second)
        if count > 0:
            result |= put_across(landing, place + unit + first, line, count, sender, ts)
        if rest > 0:
            result |= put_across(landing, place + unit + second, line + 112, rest, sender, ts)
    return result


@internal()
def _pour_units(w: int, entries: int, scratch: int, offset: int, source: int, count: int, ts: int) -> int:
    """LL and LL128."""
    protocol, landing = word(w, n.W_PROTOCOL), word(w, n.W_META)
    # payload.inner, without its divisions: a unit's wire bytes are a power of two.
    bits, data = (4, UNIT_DATA[LL]) if protocol == LL else (10, UNIT_DATA[LL128])
    low = word(w, n.W_SHIFT) + offset
    high = min(low + count, word(w, n.W_WIRE))
    unit, behind = -(-low >> bits), high >> bits
    if protocol == LL128 and (low & 1023 or high & 1023):
        head, tail = -(-low >> 7) << 7, high >> 7 << 7
        if tail <= head:
            return DROPPED
        flag = _expected(w, entries, source + head - low)
        if behind <= unit:
            return _pour_lines(w, source + head - low, head, tail, flag, ts)
        result = _pour_lines(w, source + head - low, head, unit << 10, flag, ts)
        result |= _pour_lines(w, source + (behind << 10) - low, behind << 10, tail, flag, ts)
    else:
        if behind <= unit:
            return DROPPED
        flag = _expected(w, entries, source + (unit << bits) - low)
        result = 0
    begin, end = unit << bits, behind << bits
    source += begin - low
    length, place = word(w, n.W_LENGTH), word(w, n.W_OFFSET)
    while begin < end:
        first, stop = min((begin >> bits) * data, length), min(behind * data, length)
        node: Any = continues(landing, place + first, stop - first) if stop > first else 0
        direct = node != 0 or stop <= first or vacant(landing, place + first, stop - first)
        to: Any = load_u64(landing + 8 * DATA) + place if direct else scratch - first
        taken = decode(protocol, source, begin, end, to, length, flag)
        if node != 0 and taken == end - begin:
            return result | extend(landing, node, stop - first, ts)
        sender = word(w, n.W_SENDER)
        good = min(length, (begin + taken >> bits) * data)
        if good > first:
            result |= put_across(landing, place + first, 0 if direct else to + first, good - first, sender, ts)
        if taken == end - begin:
            break
        # A wrong flag: its unit tells nothing, the ones behind it speak for themselves.
        at = min(good, length - 1) if length else 0
        poison(meta_words(landing), place + at, max(0, min(data, length - at)), sender)
        result |= CONFLICTED
        begin += taken + (1 << bits)
        source += taken + (1 << bits)
    return result


@internal(forceinline=True)
def pour(w: int, entries: int, scratch: int, offset: int, source: int, count: int, ts: int) -> int:
    """Put `count` bytes, which lie at address `source` and begin `offset` bytes into a message, to their place.

    w, entries, scratch: addresses of the message's row of `where`, of `entries`, and of memory for a message's data.
    Returns the flags of `landing.deposit`. (Addresses, as every call with all arrays of State costs as much as a copy.)
    """
    if word(w, n.W_PROTOCOL) != SIMPLE:
        return _pour_units(w, entries, scratch, offset, source, count, ts)
    low = word(w, n.W_SHIFT) + offset
    take = min(count, word(w, n.W_WIRE) - low)
    if take <= 0:
        return DROPPED
    landing, at = word(w, n.W_META), word(w, n.W_OFFSET) + low
    node = continues(landing, at, take)
    if node == 0:
        return put_across(landing, at, source, take, word(w, n.W_SENDER), ts)
    copy(load_u64(landing + 8 * DATA) + at, source, take)
    return extend(landing, node, take, ts)


@njit(cache=True, nogil=True)
def pour_into(s: State, target: int, offset: int, source: int, count: int, ts: int) -> int:
    """`pour` for Python: into the message of `where[target]`."""
    w = s.where.ctypes.data + 8 * n.WHERE_WORDS * target
    return pour(w, s.entries.ctypes.data, s.scratch.ctypes.data, offset, source, count, ts)


@njit(cache=True, nogil=True)
def dispute(s: State, target: int, offset: int, count: int) -> None:
    """Copies of `count` bytes, from `offset` on, of the message of `where[target]` differ: poison what they carry."""
    w = s.where[target]
    unit, data = UNIT_WIRE[w[n.W_PROTOCOL]], UNIT_DATA[w[n.W_PROTOCOL]]
    low = w[n.W_SHIFT] + offset
    first = low // unit * data
    stop = min(-(-(low + count) // unit) * data, w[n.W_LENGTH])
    if first < stop:
        poison(meta_words(w[n.W_META]), w[n.W_OFFSET] + first, stop - first, w[n.W_SENDER])


@njit(cache=True, nogil=True)
def account(s: State, lane: int, first: int, packets: int) -> None:
    """Packets first..first+packets of the lane were seen or lost for good."""
    entry = _entry_of(s, lane, first)
    while entry >= 0 and packets > 0:
        e = s.entries[entry]
        take = min(packets, e[n.E_END] - first)
        e[n.E_LEFT] -= take
        first, packets, entry = first + take, packets - take, e[n.E_NEWER]
