"""NCCL's payload formats LL, LL128 and Simple: wire bytes to data bytes, flags checked (docs/nccl.md, "Payloads").

LL and LL128 mix flags into the data: every flag of a message is S + 1, S being the message's step. Both come in units
that decode on their own:

    LL       16 wire bytes   8 data bytes
    LL128  1024 wire bytes 960 data bytes     (half of a permuted group of 2048)
    Simple    1 wire byte    1 data byte

so any part of a message that begins and ends on unit borders (each packet of at least 1 KiB does, unless messages are
cut over queue pairs) has one contiguous place, and a hole costs the units that it touches. One pass: a unit's flags are
checked, then its data are written. Of a unit of LL128 of which not all is in one packet each line stands for itself.
"""

from __future__ import annotations

from numba import njit

from mirror.internal import internal
from mirror.memory import copy, load_u32, load_u64, store_u64
from reconstruct.nccl.schedule import LL, LL128, SIMPLE

__all__ = ["LINE", "UNIT_DATA", "UNIT_WIRE", "decode", "flag", "formats", "inner", "line_places", "read_flag"]

LINE = 128
"""Bytes of a line of LL128 on the wire."""
UNIT_WIRE = (16, 1024, 1)
UNIT_DATA = (8, 960, 1)
"""Bytes of a unit, by protocol."""


@njit(cache=True, nogil=True)
def flag(protocol: int, step: int) -> int:
    """The flag of messages at step S: 32 bits in LL, 64 in LL128; 0 for Simple, which has none."""
    if protocol == LL:
        return (step + 1) & 0xFFFFFFFF
    return step + 1 if protocol == LL128 else 0


@njit(cache=True, nogil=True)
def inner(protocol: int, begin: int, end: int) -> tuple[int, int]:
    """The whole units inside wire bytes begin..end of a message."""
    unit = UNIT_WIRE[protocol]
    first = -(-begin // unit) * unit
    return first, max(first, end // unit * unit)


@njit(cache=True, nogil=True)
def decode(protocol: int, source: int, begin: int, end: int, destination: int, length: int, expected: int) -> int:
    """Decode wire bytes begin..end of a message, which lie at address `source`; returns the wire bytes accepted.

    begin, end: unit borders (`inner`); destination: address of the message's first data byte; length: its data
    bytes, nothing is written beyond them; expected: `flag`. Fewer bytes than end - begin are accepted when a flag is
    wrong: the unit at which it stopped and all behind it were not written.
    """
    if protocol == LL:
        return _decode_ll(source, begin, end, destination, length, expected)
    if protocol == LL128:
        return _decode_ll128(source, begin, end, destination, length, expected)
    count = min(end, length) - begin
    if count > 0:
        copy(destination + begin, source, count)
    return end - begin


@internal()
def _decode_ll(source: int, begin: int, end: int, destination: int, length: int, expected: int) -> int:
    lines = (end - begin) // 16
    to = destination + begin // 2
    whole = max(0, min(lines, length // 8 - begin // 16))   # lines with eight bytes of data
    mark = expected << 32
    done = 0
    while done + 4 <= whole:
        # Four lines at a time: one branch for eight flags.
        at = source + 16 * done
        a, b, c, d = load_u64(at), load_u64(at + 8), load_u64(at + 16), load_u64(at + 24)
        e, f, g, h = load_u64(at + 32), load_u64(at + 40), load_u64(at + 48), load_u64(at + 56)
        wrong = (a ^ mark) | (b ^ mark) | (c ^ mark) | (d ^ mark) | (e ^ mark) | (f ^ mark) | (g ^ mark) | (h ^ mark)
        if wrong >> 32 != 0:
            break
        at = to + 8 * done
        store_u64(at, (a & 0xFFFFFFFF) | (b << 32))
        store_u64(at + 8, (c & 0xFFFFFFFF) | (d << 32))
        store_u64(at + 16, (e & 0xFFFFFFFF) | (f << 32))
        store_u64(at + 24, (g & 0xFFFFFFFF) | (h << 32))
        done += 4
    # What is left: a line with a wrong flag among the four, the line in which the data end, and lines behind it.
    while done < lines:
        at = source + 16 * done
        if load_u32(at + 4) != expected or load_u32(at + 12) != expected:
            break
        left = min(8, length - begin // 2 - 8 * done)
        if left == 8:
            store_u64(to + 8 * done, load_u32(at) | load_u32(at + 8) << 32)
        elif left > 0:
            copy(to + 8 * done, at, min(4, left))
            if left > 4:
                copy(to + 8 * done + 4, at + 8, left - 4)
        done += 1
    return 16 * done


@internal()
def _decode_ll128(source: int, begin: int, end: int, destination: int, length: int, expected: int) -> int:
    done = begin
    while done + 1024 <= end:
        at = source + done - begin
        wrong = 0
        for line in range(8):
            wrong |= load_u64(at + 128 * line + 120) ^ expected
        if wrong:
            break
        first = done // 1024 * 960
        to = destination + first
        if first + 960 <= length:
            for q in range(4):
                even, odd = at + 128 * q, at + 512 + 128 * q
                copy(to + 128 * q, even, 120)
                store_u64(to + 128 * q + 120, load_u64(odd + 112))
                copy(to + 512 + 112 * q, odd, 112)
        else:
            _last_ll128(at, to, length - first)
        done += 1024
    return done - begin


@internal()
def _last_ll128(at: int, to: int, left: int) -> None:
    """A unit of which only the first `left` data bytes (perhaps none) belong to the message."""
    for q in range(4):
        even, odd = at + 128 * q, at + 512 + 128 * q
        count = min(120, left - 128 * q)
        if count > 0:
            copy(to + 128 * q, even, count)
        count = min(8, left - 128 * q - 120)
        if count > 0:
            copy(to + 128 * q + 120, odd + 112, count)
        count = min(112, left - 512 - 112 * q)
        if count > 0:
            copy(to + 512 + 112 * q, odd, count)


@njit(cache=True, nogil=True)
def line_places(line: int) -> tuple[int, int, int, int]:
    """(first, bytes, second, bytes) of line `line`, 0..7, of a unit of LL128: where in the unit's data the line's first
    bytes belong, and where the bytes behind them (0 where there are none), as far as the line's flag."""
    if line < 4:
        return 128 * line, 120, 0, 0
    return 512 + 112 * (line - 4), 112, 128 * (line - 4) + 120, 8


@njit(cache=True, nogil=True)
def read_flag(protocol: int, source: int) -> int:
    """The first flag of a message, or of any whole line of one, at address `source`; 0 for Simple."""
    if protocol == LL:
        return load_u32(source + 4)
    return load_u64(source + 120) if protocol == LL128 else 0


@njit(cache=True, nogil=True)
def formats(source: int, size: int, piece: bool) -> int:
    """Which protocols the content of a whole message of `size` bytes allows: 1 << LL | 1 << LL128 | 1 << SIMPLE.

    piece: it is what one of several queue pairs carries of a message. Anything may be Simple. An empty message tells
    nothing.
    """
    result = 1 << SIMPLE
    if size <= 0:
        return result | 1 << LL | 1 << LL128
    if size % 16 == 0 and size <= 65536:
        same = load_u32(source + 4) != 0
        for at in range(0, size, 16):
            same = same and load_u32(source + at + 4) == load_u32(source + 4) == load_u32(source + at + 12)
        result |= int(same) << LL
    if size % (LINE if piece else 2048) == 0 and size <= 614400:
        same = load_u64(source + 120) > 0
        for at in range(0, size, 128):
            same = same and load_u64(source + at + 120) == load_u64(source + 120)
        result |= int(same) << LL128
    return result
