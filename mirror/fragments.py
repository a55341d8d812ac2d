"""Fragments of outer IP packets, put together again.

A mirror copy is its frame and 40 to 60 bytes of tunnel headers: where the path's MTU was not raised, routers cut every
full frame in two. Fragments are kept in a bounded table until their datagram is whole; it is then moved to memory that
stays as it is until the next block, because spans will point into it.

A datagram put together wrongly would be silently wrong data: switches send all tunnel packets with the same IP
identification, so that the halves of two datagrams fit when one half of each was lost. Hence
* what overlaps in another way than as an equal copy voids what was collected;
* what is collected is void after MAX_AGE;
* the caller proves the inner packet (TCP checksum, `icrc_fits`) before it believes it.

Sources: RFC 791, 815, 4963, 5722, 6864, 8200.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from mirror.flows import mix
from mirror.internal import internal
from mirror.memory import address_of, copy, equal, int64s_at, load_be16, rows_at
from mirror.roce_wire import icrc

__all__ = [
    "FRAGMENT_TABLE", "FragmentTable", "Fragments", "fragment_table", "icrc_fits", "renew", "take",
]

MAX_AGE = 1_000_000_000  # ns of frame time
_SETS, _WAYS = 64, 4
_RUNS = 24
_DATAGRAM = 1 << 16
_WHOLE = 16 << 20

# Columns of a row; the runs of bytes present follow as pairs of start and end.
_A, _B, _C, _D, _WHERE, _ID, _USED, _TOTAL, _TIME, _COUNT, _FIRST = range(11)
_SEED, _FILLED, _LOST, _JOINED = range(4)


class FragmentTable(NamedTuple):
    """The arrays behind `Fragments`, in the form that kernels take."""

    # int64[sets * ways, columns]: one datagram that is not yet whole
    rows: np.ndarray
    # int64[4]: seed, bytes used of `whole`, datagrams lost, datagrams joined
    meta: np.ndarray
    # addresses: one slot of 64 KiB for each row; the datagrams that became whole in this block
    slots: int
    whole: int


FRAGMENT_TABLE = 7
"""Numbers that a FragmentTable takes in a handle."""


@internal()
def fragment_table(where: np.ndarray, at: int) -> FragmentTable:
    """The table whose part of a handle (`mirror.memory.handle`) begins at `at`."""
    h = where[at:]
    return FragmentTable(rows_at(h[0], h[1], h[2]), int64s_at(h[3], h[4]), h[5], h[6])


class Fragments:
    """Bounded memory for fragments: 256 datagrams at once, and 16 MiB of whole ones per block; touched when needed."""

    def __init__(self) -> None:
        self._slots = np.empty(_SETS * _WAYS * _DATAGRAM, np.uint8)
        self._whole = np.empty(_WHOLE, np.uint8)
        self.table = FragmentTable(
            rows=np.zeros((_SETS * _WAYS, _FIRST + 2 * _RUNS), np.int64),
            meta=np.zeros(4, np.int64),
            slots=address_of(self._slots),
            whole=address_of(self._whole),
        )
        self.table.meta[_SEED] = int.from_bytes(os.urandom(8), "little", signed=True)

    def counts(self) -> dict[str, int]:
        """Datagrams made whole, given up (contradicting, too old, no room), and still waiting for fragments."""
        rows, meta = self.table.rows, self.table.meta
        return {"outer_joined": int(meta[_JOINED]), "outer_lost": int(meta[_LOST]),
                "outer_waiting": int(np.count_nonzero(rows[:, _USED]))}


@internal()
def renew(table: FragmentTable) -> None:
    """A new block: the datagrams that became whole in the last one are no longer needed."""
    table.meta[_FILLED] = 0


@internal()
def _row_of(table: FragmentTable, a: int, b: int, c: int, d: int, where: int, identification: int, ts: int) -> int:
    """The datagram's row, an emptied one if it had none."""
    rows, meta = table.rows, table.meta
    first = (mix(meta[_SEED], a, b, c, d, where * 31 + identification) & (_SETS - 1)) * _WAYS
    row = first
    for candidate in range(first, first + _WAYS):
        entry = rows[candidate]
        if entry[_USED] and (entry[_A] == a and entry[_B] == b and entry[_C] == c and entry[_D] == d
                             and entry[_WHERE] == where and entry[_ID] == identification):
            if ts - entry[_TIME] <= MAX_AGE:
                return candidate
            row = candidate
            break
        if rows[row, _USED] and (not entry[_USED] or entry[_TIME] < rows[row, _TIME]):
            row = candidate
    meta[_LOST] += rows[row, _USED]
    _begin(rows, row, ts)
    rows[row, _A], rows[row, _B], rows[row, _C], rows[row, _D] = a, b, c, d
    rows[row, _WHERE], rows[row, _ID] = where, identification
    return row


@internal()
def _begin(rows: np.ndarray, row: int, ts: int) -> None:
    rows[row, _USED], rows[row, _TOTAL], rows[row, _TIME], rows[row, _COUNT] = 1, -1, ts, 0


@internal()
def _fit(entry: np.ndarray, start: int, end: int, last: bool, held: int, address: int) -> int:
    """1: new bytes, 0: bytes that are held already, -1: contradicts what is held."""
    fit = 1
    for run in range(_FIRST, _FIRST + 2 * entry[_COUNT], 2):
        if last and entry[run + 1] > end:
            return -1
        if start < entry[run + 1] and entry[run] < end:
            if start < entry[run] or end > entry[run + 1] or not equal(held + start, address, end - start):
                return -1
            fit = 0
    return fit


@internal()
def _join(entry: np.ndarray, start: int, end: int) -> bool:
    """Enter a run that touches or overlaps none; False if there are too many."""
    left, right = -1, -1
    last = _FIRST + 2 * entry[_COUNT] - 2
    for run in range(_FIRST, last + 2, 2):
        if entry[run + 1] == start:
            left = run
        elif entry[run] == end:
            right = run
    if left >= 0 and right >= 0:
        entry[left + 1] = entry[right + 1]
        entry[right], entry[right + 1] = entry[last], entry[last + 1]
        entry[_COUNT] -= 1
    elif left >= 0:
        entry[left + 1] = end
    elif right >= 0:
        entry[right] = start
    elif entry[_COUNT] < _RUNS:
        entry[last + 2], entry[last + 3] = start, end
        entry[_COUNT] += 1
    else:
        return False
    return True


@internal()
def take(table: FragmentTable, a: int, b: int, c: int, d: int, where: int, identification: int, start: int,
         length: int, more: bool, address: int, ts: int) -> tuple[int, int]:
    """One fragment, all `length` bytes of it at `address`: (address, length) of the datagram if it is whole now.

    a..d: source and destination; `where`: vantage group and protocol. Else (0, 0).
    """
    end = start + length
    if length <= 0 or end >= _DATAGRAM or (more and length & 7):
        return 0, 0
    row = _row_of(table, a, b, c, d, where, identification, ts)
    entry, meta = table.rows[row], table.meta
    held = table.slots + row * _DATAGRAM
    fit = _fit(entry, start, end, not more, held, address)
    if fit < 0:
        meta[_LOST] += 1
        _begin(table.rows, row, ts)
    if not more:
        entry[_TOTAL] = end
    if fit != 0:
        copy(held + start, address, length)
        if not _join(entry, start, end):
            meta[_LOST] += 1
            entry[_USED] = 0
            return 0, 0
    total = entry[_TOTAL]
    if total < 0 or entry[_COUNT] != 1 or entry[_FIRST] != 0 or entry[_FIRST + 1] != total:
        return 0, 0
    entry[_USED] = 0
    if meta[_FILLED] + total > _WHOLE:
        meta[_LOST] += 1
        return 0, 0
    target = table.whole + meta[_FILLED]
    copy(target, held, total)
    meta[_FILLED] += (total + 63) & ~63
    meta[_JOINED] += 1
    return target, total


@internal()
def icrc_fits(ip: int, udp: int, end: int) -> bool:
    """Whether the RoCE packet with these headers, present up to `end`, ends in its invariant CRC."""
    stop = udp + load_be16(udp + 4)
    return stop <= end and stop - udp >= 24 and icrc(ip, udp, stop - 4) == 1
