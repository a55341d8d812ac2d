"""The per-frame and per-span loops of `flowcheck.doctor`: what frames are, copies of one frame, gloo's messages, NCCL's
announcements. Counts only; nothing is kept of any payload.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mirror.frames import tally
from mirror.headers import link
from mirror.memory import load_be16, load_be32, load_u8, load_u32, load_u64
from mirror.roce_wire import ACKNOWLEDGE, CLASS, FIRST, HEADERS, LAST, PART, RESPONSE, SEND, WRITE
from mirror.spans import DATA, DUPLICATE, HOLE, OPEN
from reconstruct.gloo.framing import PREAMBLE_BYTES, search, valid

__all__ = [
    "ALIKE", "CERTAIN", "COPIES", "COUNTED", "CTS_BYTES", "NCCL_MAGIC", "announcements", "copies_roce", "copies_tcp",
    "gloo", "kinds_table", "look", "parts", "streams",
]

ETHERTYPE, PROTOCOL, UDP, TCP = range(1, 5)
"""Kinds of `look`, in the bits above 16 of a code."""
_KINDS_KEPT = 64

# Columns of a stream's row.
(S_DATA, S_HOLES, S_HOLE_BYTES, S_LONG_HOLES, S_LARGEST, S_REPEATS, S_NCCL, S_NEXT, S_BUDGET, S_MESSAGES, S_REDUCES,
 S_REDUCE_BYTES, S_SEGMENTS) = range(13)
S_COLUMNS = 13
_LOOK_BYTES = 4 << 20
_ALLREDUCE = 4
NCCL_MAGIC = 0x564AB9F2FC4B9D6C
"""First word of NCCL's TCP connections; the next is their type: 3 NET/Socket, 4 the set-up of NET/IB."""

COPIES = 1 << 16
"""Rows of the table of frames seen lately."""
COUNTED, CERTAIN, ALIKE = range(3)
P_MIDDLE, P_FIRST, P_LAST, P_ONLY, P_ACKS, P_FULL = range(6)
assert (FIRST, LAST) == (P_FIRST, P_LAST)
_COPY_WINDOW = 50_000_000
CTS_BYTES = (32, 64)


def kinds_table() -> np.ndarray:
    """For `look`: int64[n, 2], code and frames."""
    return np.zeros((_KINDS_KEPT, 2), np.int64)


@njit(cache=True, nogil=True)
def look(base: int, offset: np.ndarray, caplen: np.ndarray, linktype: int, table: np.ndarray) -> None:
    """Count the outermost protocol of every frame: ethertype, IP protocol, or UDP or TCP port (TCP: the lower one)."""
    for i in range(offset.size):
        address = base + offset[i]
        end = address + caplen[i]
        ethertype, at = link(address, end, linktype)
        for _ in range(4):
            if ethertype not in (0x8100, 0x88A8, 0x9100, 0x9200) or end - at < 4:
                break
            ethertype = load_be16(at + 2)
            at += 4
        code = ETHERTYPE << 16 | (ethertype if ethertype >= 0x600 else 0)
        protocol = -1
        if ethertype == 0x0800 and end - at >= 20:
            protocol = load_u8(at + 9)
            at += (load_u8(at) & 15) * 4
        elif ethertype == 0x86DD and end - at >= 40:
            protocol = load_u8(at + 6)
            at += 40
        if protocol >= 0:
            code = PROTOCOL << 16 | protocol
            if end - at >= 4:
                if protocol == 17:
                    code = UDP << 16 | load_be16(at + 2)
                elif protocol == 6:
                    code = TCP << 16 | min(load_be16(at), load_be16(at + 2))
        tally(table, code)


@njit(cache=True, nogil=True)
def _fold(h: int, value: int) -> int:
    h = (h ^ value) * -7046029254386353131
    return h ^ ((h >> 29) & 0x7FFFFFFFF)


@njit(cache=True, nogil=True)
def _seen(table: np.ndarray, h: int, ts: int, window: int) -> bool:
    """Whether the same came before, at most `window` ns ago; it is remembered."""
    row = h & (table.shape[0] - 1)
    again = table[row, 0] == h and abs(ts - table[row, 1]) <= window
    table[row, 0], table[row, 1] = h, ts
    return again


@njit(cache=True, nogil=True)
def copies_tcp(numbers: np.ndarray, flow: np.ndarray, n: int, key: np.ndarray, table: np.ndarray,
               counts: np.ndarray) -> None:
    """Count segments with payload, and those of which a frame with the very same IP and TCP header came before.

    A retransmission has another IP identification or another timestamp option; the vantage group does not matter.
    """
    for i in range(n):
        if numbers[i, 4] == 0:
            continue
        counts[COUNTED] += 1
        f = flow[i]
        header = 0
        for size in range(20, 64, 4):
            at = numbers[i, 2] - size
            if (load_u8(at + 12) >> 4) * 4 == size and load_be32(at) == key[f, 4] & 0xFFFFFFFF and (
                    load_be32(at + 4) == numbers[i, 0]):
                header = at
                break
        if header == 0:
            continue
        h = _fold(_fold(_fold(_fold(1, key[f, 0]), key[f, 1]), key[f, 2]), key[f, 3])
        if key[f, 0] == 0 and key[f, 1] >> 32 == 0xFFFF and load_u8(header - 20) == 0x45:
            h = _fold(h, load_be16(header - 16))
        for at in range(header, numbers[i, 2], 4):
            h = _fold(h, load_be32(at))
        if _seen(table, _fold(h, numbers[i, 4]), numbers[i, 5], _COPY_WINDOW):
            counts[CERTAIN] += 1


@njit(cache=True, nogil=True)
def copies_roce(rows: np.ndarray, n: int, table: np.ndarray, counts: np.ndarray) -> None:
    """The same for RoCE packets with data. Over IPv6, and where the IP identification is not used, a retry of the
    sender is equal to the first packet byte for byte: those are only ALIKE."""
    for i in range(n):
        ip, udp, end = rows[i, 0], rows[i, 1], rows[i, 2]
        if end - udp < 20:
            continue
        kind = CLASS[load_u8(udp + 8)] if load_u8(udp + 8) < 32 else -1
        if kind != WRITE and kind != SEND and kind != RESPONSE:
            continue
        counts[COUNTED] += 1
        four = load_u8(ip) >> 4 == 4
        identification = load_be16(ip + 4) if four else 0
        h = _fold(2, identification)
        for at in range(ip + 12 if four else ip + 8, ip + 20 if four else ip + 40, 4):
            h = _fold(h, load_be32(at))
        for at in range(udp + 8, udp + 20, 4):
            h = _fold(h, load_be32(at))
        if _seen(table, _fold(h, load_be16(udp + 4)), rows[i, 4], _COPY_WINDOW):
            counts[CERTAIN if identification else ALIKE] += 1


@njit(cache=True, nogil=True)
def parts(rows: np.ndarray, n: int, counts: np.ndarray) -> None:
    """Count packets of WRITEs and SENDs by part: `counts` int64[6]: middle, first, last, only, acknowledgments, and
    those that fill a path MTU."""
    for i in range(n):
        udp = rows[i, 1]
        if rows[i, 2] - udp < 20:
            continue
        opcode = load_u8(udp + 8)
        kind = CLASS[opcode] if opcode < 32 else -1
        if kind == ACKNOWLEDGE:
            counts[P_ACKS] += 1
        elif kind in (WRITE, SEND):
            part = PART[opcode]
            counts[part] += 1
            length = load_be16(udp + 4) - 12 - HEADERS[opcode] - (load_u8(udp + 9) >> 4 & 3)
            if part & LAST == 0 or length == 1024 or length == 2048 or length == 4096:
                counts[P_FULL] += 1


@njit(cache=True, nogil=True)
def streams(n: int, flow: np.ndarray, kind: np.ndarray, offset: np.ndarray, addr: np.ndarray, length: np.ndarray,
            state: np.ndarray) -> None:
    """Add spans of TCP streams to their rows: bytes, holes, what NCCL's connections begin with."""
    for i in range(n):
        row = state[flow[i]]
        if kind[i] == OPEN:
            row[S_NEXT], row[S_BUDGET] = -1, _LOOK_BYTES
        elif kind[i] == DATA:
            row[S_DATA] += length[i]
            if offset[i] == 0 and length[i] >= 12 and load_u64(addr[i]) == NCCL_MAGIC:
                row[S_NCCL] = load_u32(addr[i] + 8)
        elif kind[i] == DUPLICATE:
            row[S_REPEATS] += length[i]
        elif kind[i] == HOLE:
            row[S_HOLES] += 1
            row[S_HOLE_BYTES] += length[i]
            if length[i] > row[S_LARGEST]:
                row[S_LONG_HOLES] += 1


@njit(cache=True, nogil=True)
def gloo(n: int, flow: np.ndarray, kind: np.ndarray, offset: np.ndarray, addr: np.ndarray, length: np.ndarray,
         state: np.ndarray) -> None:
    """Follow gloo's messages, from wherever a stream was joined, and count those that carry payload.

    After a gap in the framing the next preamble is searched: a few messages may go uncounted.
    """
    for i in range(n):
        row = state[flow[i]]
        if kind[i] == HOLE and row[S_NEXT] >= 0 and offset[i] + length[i] > row[S_NEXT]:
            row[S_NEXT] = -1
        if kind[i] != DATA:
            continue
        at = row[S_NEXT] - offset[i]
        if row[S_NEXT] < 0:
            if row[S_BUDGET] <= 0:
                continue
            at = search(addr[i], length[i])
            row[S_BUDGET] -= length[i]
            if at < 0:
                continue
        while at + PREAMBLE_BYTES <= length[i]:
            head = addr[i] + at
            if not valid(head, False):
                at = -1
                break
            row[S_MESSAGES] += 1
            if load_u64(head + 8) == 1 and load_u64(head + 16) >> 56 & 0xFF == _ALLREDUCE and load_u64(head + 32) > 0:
                row[S_REDUCES] += 1
                row[S_REDUCE_BYTES] += load_u64(head + 32)
            at += load_u64(head)
        # A preamble that straddles two spans is not put together.
        row[S_NEXT] = -1 if at < 0 or 0 < length[i] - at < PREAMBLE_BYTES else offset[i] + at
        if row[S_NEXT] < 0:
            row[S_BUDGET] = _LOOK_BYTES


@njit(cache=True, nogil=True)
def announcements(flow: np.ndarray, addr: np.ndarray, length: np.ndarray, forms: np.ndarray, out: np.ndarray) -> int:
    """Read CTS entries: `out` int64[n, 6]: flow, form, room, sender's rank, rkey, number. Returns how many it read.

    forms: int64[f, 6], by form: bytes, offsets of room, rkey, requests, rank and number. An entry is believed if
    exactly one form of its length makes sense of it.
    """
    found = 0
    for i in range(flow.size):
        fitting, chosen = 0, 0
        for form in range(forms.shape[0]):
            if forms[form, 0] != length[i]:
                continue
            requests = load_u32(addr[i] + forms[form, 3])
            rank = load_u32(addr[i] + forms[form, 4])
            number = load_u64(addr[i] + forms[form, 5])
            room = load_u32(addr[i] + forms[form, 1])
            if 1 <= requests <= 8 and rank < 1 << 20 and 0 < number < 1 << 40 and room > 0:
                fitting, chosen = fitting + 1, form
        if fitting != 1:
            continue
        out[found, 0], out[found, 1] = flow[i], chosen
        out[found, 2] = load_u32(addr[i] + forms[chosen, 1])
        out[found, 3] = load_u32(addr[i] + forms[chosen, 4])
        out[found, 4] = load_u32(addr[i] + forms[chosen, 2])
        out[found, 5] = load_u64(addr[i] + forms[chosen, 5])
        found += 1
    return found
