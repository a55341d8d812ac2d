"""Kernels that find the frames in a mapped pcap or pcapng file, a bounded batch at a time.

They fill a table of int64[5, n] with the rows offset, caplen, wirelen, ts (ns) and linktype, go on from any
record, and never read outside [position, end): whatever a file says of its lengths is checked against the
file's end. Formats: draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mirror.internal import internal

# Why an index kernel stopped, with the position of the record that it stopped at.
FULL, END, SECTION, INTERFACE = 0, 1, 2, 3
CUT_SHORT, BAD_LENGTH, BAD_TRAILER, BAD_TIME, NO_INTERFACE = 4, 5, 6, 7, 8

REASONS = {
    CUT_SHORT: "runs past the end of the file",
    BAD_LENGTH: "has an impossible length",
    BAD_TRAILER: "has two lengths that differ",
    BAD_TIME: "has an impossible time",
    NO_INTERFACE: "names an interface that the file does not describe",
}

# The largest frame believed: the largest superpacket of Linux is 512 KiB.
MAX_FRAME = 16 << 20
# 2116-02-20 in ns; an offset as large can be added without overflow.
MAX_TIME = 1 << 62

# Columns of the interface table of a pcapng section, int64[n, 6]: a time of `units` is
# units * MULTIPLY // DIVIDE ns, or units / 2**SHIFT seconds where SHIFT >= 0; then + OFFSET ns.
LINKTYPE, MULTIPLY, DIVIDE, SHIFT, OFFSET, SNAPLEN = 0, 1, 2, 3, 4, 5


@internal()
def _u16(base: np.ndarray, at: int, big: bool) -> Any:
    first, second = np.int64(base[at]), np.int64(base[at + 1])
    return first << 8 | second if big else second << 8 | first


@internal()
def _u32(base: np.ndarray, at: int, big: bool) -> Any:
    first, second = _u16(base, at, big), _u16(base, at + 2, big)
    return first << 16 | second if big else second << 16 | first


@njit(cache=True, nogil=True)
def index_pcap(
    base: np.ndarray,
    position: int,
    limit: int,
    end: int,
    big: bool,
    unit: int,
    linktype: int,
    table: np.ndarray,
) -> tuple[int, int, int]:
    """Index records of a pcap file that begin in base[position:limit]; `unit` is 1000 (us) or 1 (ns).

    Returns (frames, position of the next record, why it stopped).
    """
    count = 0
    while count < table.shape[1] and position < limit:
        if position == end:
            return count, position, END
        if end - position < 16:
            return count, position, CUT_SHORT
        caplen = _u32(base, position + 8, big)
        wirelen = _u32(base, position + 12, big)
        if caplen > MAX_FRAME or wirelen > MAX_FRAME:
            return count, position, BAD_LENGTH
        if caplen > end - position - 16:
            return count, position, CUT_SHORT
        table[0, count] = position + 16
        table[1, count] = caplen
        # Some writers leave out what a driver added: never less than what is there.
        table[2, count] = max(wirelen, caplen)
        table[3, count] = _u32(base, position, big) * 1_000_000_000 + _u32(base, position + 4, big) * unit
        table[4, count] = linktype
        count += 1
        position += 16 + caplen
    return count, position, FULL


@internal()
def _nanoseconds(high: int, low: int, interface: np.ndarray) -> int:
    """A pcapng time in ns since the epoch, -1 when it is out of range."""
    if high >= 1 << 31:
        return -1
    units = high << 32 | low
    shift = interface[SHIFT]
    if shift >= 0:
        seconds = units >> shift
        if seconds > MAX_TIME // 1_000_000_000 - 1:
            return -1
        fraction = units & ((np.int64(1) << shift) - 1)
        if shift > 33:
            # 33 bits of the fraction resolve 0.12 ns, and times 10**9 they still fit 63 bits.
            fraction >>= shift - 33
            shift = np.int64(33)
        time = seconds * 1_000_000_000 + (fraction * 1_000_000_000 >> shift)
    else:
        if units > MAX_TIME // interface[MULTIPLY]:
            return -1
        time = units * interface[MULTIPLY] // interface[DIVIDE]
    time += interface[OFFSET]
    return time if 0 <= time <= MAX_TIME else -1


@njit(cache=True, nogil=True)
def index_pcapng(
    base: np.ndarray,
    position: int,
    limit: int,
    end: int,
    big: bool,
    interfaces: np.ndarray,
    time: int,
    count: int,
    table: np.ndarray,
) -> tuple[int, int, int, int]:
    """Index packet blocks (enhanced, simple, obsolete) that begin in base[position:limit].

    They go into the table from column `count` on. `interfaces` int64[n, 6] describes the section's
    interfaces so far, `time` is that of the frame before (a simple packet block has none of its own). It
    stops at a section header or interface description, which the caller reads; all other blocks are passed
    over. Returns (frames, position of the next block, why it stopped, time).
    """
    while count < table.shape[1] and position < limit:
        if position == end:
            return count, position, END, time
        if end - position < 12:
            return count, position, CUT_SHORT, time
        kind = _u32(base, position, big)
        if kind == 0x0A0D0D0A:
            return count, position, SECTION, time
        total = _u32(base, position + 4, big)
        if total < 12 or total % 4:
            return count, position, BAD_LENGTH, time
        if total > end - position:
            return count, position, CUT_SHORT, time
        if _u32(base, position + total - 4, big) != total:
            return count, position, BAD_TRAILER, time
        if kind == 1:
            return count, position, INTERFACE, time
        if kind == 6 or kind == 2 or kind == 3:
            body = 12 if kind == 3 else 28
            if total < body + 4:
                return count, position, BAD_LENGTH, time
            index = 0
            if kind == 6:
                index = _u32(base, position + 8, big)
            elif kind == 2:
                index = _u16(base, position + 8, big)
            if index >= interfaces.shape[0]:
                return count, position, NO_INTERFACE, time
            room = total - body - 4
            if kind == 3:
                wirelen = _u32(base, position + 8, big)
                # What was captured is not told but follows from the snap length; the room has padding in it.
                caplen = min(wirelen, interfaces[index, SNAPLEN])
            else:
                caplen = _u32(base, position + 20, big)
                wirelen = _u32(base, position + 24, big)
                time = _nanoseconds(
                    _u32(base, position + 12, big), _u32(base, position + 16, big), interfaces[index]
                )
                if time < 0:
                    return count, position, BAD_TIME, time
            if caplen > room or caplen > MAX_FRAME or wirelen > MAX_FRAME:
                return count, position, BAD_LENGTH, time
            table[0, count] = position + body
            table[1, count] = caplen
            table[2, count] = max(wirelen, caplen)
            table[3, count] = time
            table[4, count] = interfaces[index, LINKTYPE]
            count += 1
        position += total
    return count, position, FULL, time


@njit(cache=True, nogil=True)
def merge(
    tables: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    ended: np.ndarray,
    vantage: np.ndarray,
    most_bytes: int,
    out: np.ndarray,
) -> tuple[int, int, int, int]:
    """Merge the frames of k indexed files by time into `out` int64[4, n] (offset, caplen, wirelen, ts).

    tables int64[k, 5, m]; frames start[f] to count[f] of file f are still to come (start is moved),
    ended[f] says that no more will follow them. Equal times keep the order of the files, and each file
    keeps its own order. It stops when `out` is full, `most_bytes` are reached, a file needs more frames, or
    the link type or vantage group changes. Returns (frames, their wire bytes, link type, vantage group).
    """
    frames = 0
    total = 0
    linktype = -1
    group = -1
    while frames < out.shape[1] and total < most_bytes:
        best = -1
        best_time = 0
        for f in range(tables.shape[0]):
            if start[f] < count[f]:
                time = tables[f, 3, start[f]]
                if best < 0 or time < best_time:
                    best = f
                    best_time = time
            elif not ended[f]:
                return frames, total, linktype, group
        if best < 0:
            break
        at = start[best]
        if frames == 0:
            linktype = tables[best, 4, at]
            group = vantage[best]
        elif linktype != tables[best, 4, at] or group != vantage[best]:
            break
        for row in range(4):
            out[row, frames] = tables[best, row, at]
        total += tables[best, 2, at]
        start[best] = at + 1
        frames += 1
    return frames, total, linktype, group
