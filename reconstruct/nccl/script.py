"""What one queue pair carries of one collective, as a table: packet number to message, and to place.

A row of reconstruct.nccl.schedule says what a connection sends; how that becomes packets depends on the path MTU, on
whether an immediate comes in a packet of its own (adaptive routing), and on how many queue pairs the connection has:
whole messages one after another over all of them, or pieces of every message on each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mirror.internal import internal
from mirror.memory import load_u64
from reconstruct.nccl.schedule import PROTOCOL, SLICE_STEPS, wire_bytes

__all__ = [
    "AR_THRESHOLD", "SCRIPT_WORDS", "T_APART", "T_FINAL", "T_FIRST", "T_LENGTH", "T_OFFSET", "T_SHIFT", "T_STEP",
    "T_WHOLE", "T_WIRE", "agree", "cell", "find", "rare_steps", "script",
]

# Columns of a table. The last row is the end: its T_FIRST counts all packets.
(T_FIRST, T_WIRE, T_WHOLE, T_SHIFT, T_OFFSET, T_LENGTH, T_STEP, T_FINAL, T_APART) = range(9)
SCRIPT_WORDS = 9
# T_FIRST: packets before it; T_WIRE: bytes of this piece, at T_SHIFT of a message of T_WHOLE bytes; T_OFFSET, T_LENGTH:
# bytes of the tensor that the whole message carries; T_STEP: step, counted from the collective's first; T_FINAL:
# whether they are final values; T_APART: whether the immediate comes in a packet of its own.

AR_THRESHOLD = 8192
"""Messages above it have their immediate apart where adaptive routing is on (NCCL_IB_AR_THRESHOLD)."""


@internal()
def _piece(size: int, parts: int, part: int) -> tuple[int, int]:
    """(begin, bytes) of a piece of a message that is split over queue pairs."""
    each = ((size + parts - 1) // parts + 127) // 128 * 128
    begin = min(part * each, size)
    return part * each, max(0, min(size - begin, each))


@njit(cache=True, nogil=True)
def script(places: np.ndarray, row: np.ndarray, mtu: int, apart: bool, pairs: int, split: bool, pair: int, number: int,
           base: int) -> np.ndarray:
    """int64[messages + 1, SCRIPT_WORDS] of queue pair `pair` of `pairs`.

    places: `schedule.places` (offsets of the tensor); number: of the collective's first message on the
    connection, modulo `pairs` if not split; base: its step where LL's rare whole-slot messages are near, else 0.
    """
    table = np.zeros((len(places) + 1, SCRIPT_WORDS), np.int64)
    n = packets = 0
    for index in range(len(places)):
        if not split and (number + index) % pairs != pair:
            continue
        step = index * row[SLICE_STEPS]
        whole = wire_bytes(row[PROTOCOL], places[index, 5], base + step)
        shift: Any = 0
        wire: Any = whole
        if split:
            shift, wire = _piece(whole, pairs, pair)
        extra = apart and whole > AR_THRESHOLD
        table[n, T_FIRST], table[n, T_WIRE], table[n, T_WHOLE], table[n, T_SHIFT] = packets, wire, whole, shift
        table[n, T_OFFSET], table[n, T_LENGTH], table[n, T_STEP] = places[index, 4], places[index, 5], step
        table[n, T_FINAL], table[n, T_APART] = places[index, 6], extra
        packets += max(1, -(-wire // mtu)) + (1 if extra else 0)
        n += 1
    table[n, T_FIRST] = packets
    return table[: n + 1].copy()


@njit(cache=True, nogil=True)
def rare_steps(row: np.ndarray, base: int, count: int) -> bool:
    """Whether a collective of `count` messages from step `base` on may meet LL's whole-slot messages."""
    return (base & 0x7FFFFFFF) + count * row[SLICE_STEPS] >= 0x7FFFFFF8


@internal(forceinline=True)
def cell(table: int, k: int, column: int) -> int:
    """Entry of the table at an address."""
    return load_u64(table + 8 * (k * SCRIPT_WORDS + column))


@njit(cache=True, nogil=True, forceinline=True)
def find(table: int, count: int, hint: int, packet: int) -> int:
    """The message, of `count`, that packet number `packet` (from the collective's first) belongs to."""
    if cell(table, hint, T_FIRST) <= packet:
        if packet < cell(table, hint + 1, T_FIRST):
            return hint
        if hint + 1 < count and packet < cell(table, hint + 2, T_FIRST):
            return hint + 1
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if cell(table, middle, T_FIRST) <= packet:
            low = middle
        else:
            high = middle
    return low


NO_LENGTH, NO_IMMEDIATE, NOT_SEEN = -1, -1, -2


@internal()
def immediate(size: int, big: bool) -> int:
    """The immediate of a message of `size` bytes, its four bytes read big endian."""
    if big:
        return size
    return (size & 0xFF) << 24 | (size & 0xFF00) << 8 | (size >> 8 & 0xFF00) | size >> 24 & 0xFF


@njit(cache=True, nogil=True)
def agree(table: np.ndarray, start: int, mtu: int, seen: np.ndarray, big: bool,
          read: bool) -> tuple[bool, int, int, int]:
    """Whether messages can be those of a table whose first packet is `start`, and how many speak for it.

    seen: int64[n, 3], (first packet, length or NO_LENGTH, immediate or NO_IMMEDIATE or NOT_SEEN) of messages in any
    order; read: whether immediates tell sizes. Returns (no contradiction, messages of the table that begin as it says
    and have bytes, all that begin as it says, messages behind its end).
    """
    count = len(table) - 1
    matched = met = behind = 0
    for i in range(len(seen)):
        packet, length, imm = seen[i, 0] - start, seen[i, 1], seen[i, 2]
        if packet < 0:
            continue
        if packet >= table[count, T_FIRST]:
            behind += 1
            continue
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            if table[middle, T_FIRST] <= packet:
                low = middle
            else:
                high = middle
        inside = packet - table[low, T_FIRST]
        if length == NO_LENGTH:
            continue
        wire, apart = table[low, T_WIRE], table[low, T_APART] != 0
        tells = immediate(table[low, T_WHOLE], big)
        if inside == 0 and length == wire and not (apart and imm >= 0):
            if not apart and (imm == NO_IMMEDIATE or (read and imm >= 0 and imm != tells)):
                return False, 0, 0, 0
            matched += wire > 0
            met += 1
        elif apart and length == 0 and packet == table[low + 1, T_FIRST] - 1:
            if imm == NO_IMMEDIATE or (read and imm >= 0 and imm != tells):
                return False, 0, 0, 0
        elif apart and inside * mtu < wire and length == min(mtu, wire - inside * mtu) and imm < 0:
            matched += 1
            met += inside == 0
        else:
            return False, 0, 0, 0
    return True, matched, met, behind
