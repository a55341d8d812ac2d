"""Where one all-reduce's final values land: one buffer, any number of links, every byte written once.

    empty --deposit--> partly covered --deposit--> complete (covered == size)
      any state --two copies differ, or the size proves wrong--> poisoned: never complete again

The tensor is cut into segments of equal size, each with a list of covered ranges, sorted, disjoint and not touching.
In order and without loss it is one range that grows; a lost packet leaves a gap that another link may fill. Bytes that
are covered already are compared, never written again, so two mirrors of the same value check each other. Segments keep
the lists short: what arrives as one piece (a message, a chunk) should touch few of them.

The kernels reach a landing by the address of its `meta` words, so `Landing` objects must outlive every kernel state
that holds that address (the decoder sees to it). Range nodes are bounded: at the bound a piece that would need
another node is dropped, that is, stays missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from mirror.internal import internal
from mirror.loss import Why
from mirror.memory import address_of, copy, equal, load_u8, load_u32, load_u64, store_u32, store_u64

__all__ = [
    "ALIGNMENT", "COMPLETED", "CONFLICTED", "DROPPED", "META_WORDS", "SEGMENT_BYTES", "Landing", "condemn", "continues",
    "deposit", "extend", "meta_words", "needs_node", "needs_nodes", "pointer", "poison", "put_across", "vacant",
]

SEGMENT_BYTES = 65536
"""Segments of a landing whose pieces have no borders of their own."""

ALIGNMENT = 64
MAX_CONFLICTS = 64
_MAX_LOSSES = 1 << 14
COMPLETED, CONFLICTED, DROPPED = 1, 2, 4

# Words of `meta`.
(DATA, SIZE, SEGMENT, HEADS, NODES, CAPACITY, FREE, FREE_COUNT, COVERED, TIME, POISONED, CONFLICTS, LOG, IDENT, FIXED,
 LOST_PIECES) = range(16)
META_WORDS = 16

_DIFFERENT, _CONDEMNED = 1, 2  # bits of POISONED: what the log tells of, and everything
_SPARE = 24         # ranges beside those at segment borders that one packet may begin: lines of LL128
_NONE = 0xFFFFFFFF                       # a list's end, -1, as `load_u32` reads it


def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


pointer: Any = intrinsic(_pointer)
"""(address) -> void pointer, for `numba.carray` in kernels."""


@njit(inline="always")
def meta_words(address: int) -> np.ndarray:
    """int64[META_WORDS] at `address`."""
    return carray(pointer(address), (META_WORDS,), np.int64)


@njit(inline="always")
def _ints(address: int, count: int) -> np.ndarray:
    return carray(pointer(address), (count,), np.int32)


@njit(inline="always")
def needs_node(meta: np.ndarray) -> bool:
    """Whether the next deposit might need a node that does not exist yet but could be made (`Landing.grow`)."""
    return meta[FREE_COUNT] == 0 and meta[FIXED] == 0


@njit(inline="always")
def needs_nodes(meta: np.ndarray, count: int) -> bool:
    """The same for `put_across` with `count` bytes, where segments have SEGMENT_BYTES."""
    return meta[FREE_COUNT] <= count // SEGMENT_BYTES + _SPARE and meta[FIXED] == 0


@internal()
def _compare(meta: np.ndarray, offset: int, source: int, count: int, sender: int) -> bool:
    """Compare covered bytes with another copy; a difference poisons the landing. True if they are the same."""
    held = meta[DATA] + offset
    if equal(held, source, count):
        return True
    first = 0
    while load_u8(held + first) == load_u8(source + first):
        first += 1
    last = count - 1
    while load_u8(held + last) == load_u8(source + last):
        last -= 1
    poison(meta, offset + first, last - first + 1, sender)
    return False


@njit(cache=True, nogil=True)
def poison(meta: np.ndarray, offset: int, count: int, sender: int) -> None:
    """Record that bytes offset..offset+count cannot be trusted: the landing is never complete again."""
    log = carray(pointer(meta[LOG]), (MAX_CONFLICTS, 3), np.int64)
    number = meta[CONFLICTS]
    if number < MAX_CONFLICTS:
        log[number, 0], log[number, 1], log[number, 2] = offset, count, sender
    meta[CONFLICTS] = number + 1
    meta[POISONED] |= _DIFFERENT


@internal()
def condemn(address: int) -> None:
    """Mark the landing whose meta words are at `address` as one of a wrong size."""
    meta_words(address)[POISONED] |= _CONDEMNED


@internal()
def _insert(meta: np.ndarray, number: int, base: int, low: int, source: int, count: int, sender: int, ts: int) -> int:
    """`deposit` at byte `low` of segment `number`, which begins at byte `base`."""
    heads = _ints(meta[HEADS], number + 1)
    nodes = _ints(meta[NODES], 4 * meta[CAPACITY])
    high = low + count
    data = meta[DATA] + base
    before: Any = -1
    node: Any = np.int64(heads[number])
    while node >= 0 and nodes[4 * node + 1] < low:
        before, node = node, np.int64(nodes[4 * node + 2])
    result = 0
    added: Any = 0
    if node < 0 or nodes[4 * node] > high:
        if meta[FREE_COUNT] == 0:
            meta[LOST_PIECES] += 1
            return DROPPED
        fresh = meta[FREE]
        meta[FREE] = nodes[4 * fresh + 2]
        meta[FREE_COUNT] -= 1
        nodes[4 * fresh], nodes[4 * fresh + 1], nodes[4 * fresh + 2] = low, high, node
        if before < 0:
            heads[number] = fresh
        else:
            nodes[4 * before + 2] = fresh
        if source:
            copy(data + low, source, count)
        added = count
    else:
        # `node` touches the piece: it grows over the piece and swallows every later range that it reaches.
        at: Any = low
        start: Any = min(low, np.int64(nodes[4 * node]))
        end: Any = high
        current = node
        while current >= 0 and nodes[4 * current] <= high:
            left, right = np.int64(nodes[4 * current]), np.int64(nodes[4 * current + 1])
            if at < left:
                if source:
                    copy(data + at, source + at - low, left - at)
                added += left - at
                at = left
            stop = min(right, high)
            if stop > at:
                if source and not _compare(meta, base + at, source + at - low, stop - at, sender):
                    result |= CONFLICTED
                at = stop
            end = max(end, right)
            after = np.int64(nodes[4 * current + 2])
            if current != node:
                nodes[4 * current + 2] = meta[FREE]
                meta[FREE] = current
                meta[FREE_COUNT] += 1
            current = after
        if at < high:
            if source:
                copy(data + at, source + at - low, high - at)
            added += high - at
        nodes[4 * node], nodes[4 * node + 1], nodes[4 * node + 2] = start, end, current
    if added:
        meta[COVERED] += added
        meta[TIME] = max(meta[TIME], ts)
        if meta[COVERED] == meta[SIZE]:
            result |= COMPLETED
    return result


@internal()
def deposit(address: int, offset: int, source: int, count: int, sender: int, ts: int) -> int:
    """Put `count` bytes from address `source` at byte `offset`; they must lie inside one segment.

    address: of the landing's meta words; ts: capture time, ns. Bytes that are covered are compared instead. source 0:
    the bytes are in place already (the range was `vacant` before they were written there).
    Returns a combination of COMPLETED (this was the last byte missing), CONFLICTED, DROPPED (no node left).
    """
    meta = meta_words(address)
    segment = meta[SEGMENT]
    number = offset // segment
    return _insert(meta, number, number * segment, offset - number * segment, source, count, sender, ts)


@njit(cache=True, nogil=True)
def put_across(address: int, offset: int, source: int, count: int, sender: int, ts: int) -> int:
    """`deposit` of a piece that may lie across segment borders."""
    meta = meta_words(address)
    segment = meta[SEGMENT]
    if segment == SEGMENT_BYTES:
        low = offset % SEGMENT_BYTES  # no division, as the divisor is known
        if low + count <= SEGMENT_BYTES:
            return _insert(meta, offset // SEGMENT_BYTES, offset - low, low, source, count, sender, ts)
    result = 0
    done = 0
    while done < count:
        take = min(count - done, segment - (offset + done) % segment)
        result |= deposit(address, offset + done, source + done if source else 0, take, sender, ts)
        done += take
    return result


@njit(cache=True, nogil=True, forceinline=True)
def continues(address: int, offset: int, count: int) -> int:
    """Address of the covered range that offset..offset+count begins right behind, if `extend` by it is all that
    `deposit` would do: the bytes are vacant, in one segment, and reach no other range. Else 0."""
    low = offset % SEGMENT_BYTES
    if load_u64(address + 8 * SEGMENT) != SEGMENT_BYTES or low + count > SEGMENT_BYTES:
        return 0
    nodes = load_u64(address + 8 * NODES)
    number: Any = load_u32(load_u64(address + 8 * HEADS) + 4 * (offset // SEGMENT_BYTES))
    while number != _NONE and load_u32(nodes + 16 * number + 4) < low:
        number = load_u32(nodes + 16 * number + 8)
    if number == _NONE or load_u32(nodes + 16 * number + 4) != low:
        return 0
    after = load_u32(nodes + 16 * number + 8)
    if after != _NONE and load_u32(nodes + 16 * after) <= low + count:
        return 0
    return nodes + 16 * number


@njit(cache=True, nogil=True, forceinline=True)
def extend(address: int, node: int, count: int, ts: int) -> int:
    """Have a range found by `continues` cover `count` bytes more, which are in place; the flags of `deposit`."""
    store_u32(node + 4, load_u32(node + 4) + count)
    covered = load_u64(address + 8 * COVERED) + count
    store_u64(address + 8 * COVERED, covered)
    store_u64(address + 8 * TIME, max(load_u64(address + 8 * TIME), ts))
    return COMPLETED if covered == load_u64(address + 8 * SIZE) else 0


@internal()
def vacant(address: int, offset: int, count: int) -> bool:
    """Whether no byte of offset..offset+count is covered."""
    meta = meta_words(address)
    segment = meta[SEGMENT]
    nodes = _ints(meta[NODES], 4 * meta[CAPACITY])
    for number in range(offset // segment, (offset + count - 1) // segment + 1):
        base = number * segment
        node = np.int64(_ints(meta[HEADS], number + 1)[number])
        while node >= 0 and nodes[4 * node + 1] <= offset - base:
            node = np.int64(nodes[4 * node + 2])
        if node >= 0 and nodes[4 * node] < offset + count - base:
            return False
    return True


@njit(cache=True, nogil=True)
def _covered(address: int) -> np.ndarray:
    """int64[n, 2]: (offset, end) of the covered ranges, none of them across a segment border, in order."""
    meta = meta_words(address)
    segment = meta[SEGMENT]
    count = -(-meta[SIZE] // segment)
    heads = _ints(meta[HEADS], count)
    nodes = _ints(meta[NODES], 4 * meta[CAPACITY])
    result = np.empty((meta[CAPACITY] - meta[FREE_COUNT], 2), np.int64)
    n = 0
    for number in range(count):
        node = np.int64(heads[number])
        while node >= 0:
            result[n, 0] = number * segment + nodes[4 * node]
            result[n, 1] = number * segment + nodes[4 * node + 1]
            n += 1
            node = np.int64(nodes[4 * node + 2])
    return result[:n]


def _aligned(size: int) -> np.ndarray:
    whole = np.empty(size + ALIGNMENT, np.uint8)
    start = -address_of(whole) % ALIGNMENT
    return whole[start : start + size]


class Landing:
    """One all-reduce's final values: `size` bytes, elements of `itemsize` bytes, `world_size` ranks.

    segment: bytes of a segment. `ident` is any number that the owner wants to find it by; `buffer`, if given, is used
    memory of the right size.
    """

    def __init__(
        self, size: int, itemsize: int, world_size: int, segment: int = SEGMENT_BYTES, *, ident: int = -1,
        buffer: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        if itemsize < 1 or size < 1 or size % itemsize or world_size < 2 or segment < 1:
            raise ValueError(
                f"no all-reduce of {size} bytes with {itemsize}-byte elements over {world_size} ranks exists"
            )
        self.size, self.itemsize, self.world_size = size, itemsize, world_size
        self.data = _aligned(size) if buffer is None else buffer
        """uint8[size], 64-byte aligned. Only covered bytes mean anything; valid until the decoder retires the tag."""
        count = -(-size // segment)
        self._heads = np.full(count, -1, np.int32)
        self._log = np.zeros((MAX_CONFLICTS, 3), np.int64)
        self._told = 0  # conflicts
        self.losses: list[tuple[int, int, Why]] = []
        """(start, end, why) of bytes that links lost; others may have shown them since."""
        self._limit = count + 64 + size // 256
        self._meta = np.zeros(META_WORDS, np.int64)
        self._meta[[DATA, SIZE, SEGMENT, IDENT]] = address_of(self.data), size, segment, ident
        self._meta[[HEADS, LOG]] = address_of(self._heads), address_of(self._log)
        self._meta[FREE] = -1
        self._nodes = np.empty((0, 4), np.int32)
        self.grow(min(self._limit, count + 64))

    @property
    def address(self) -> int:
        """Of the meta words, for `deposit`."""
        return address_of(self._meta)

    @property
    def ident(self) -> int:
        """The owner's number."""
        return int(self._meta[IDENT])

    @property
    def covered(self) -> int:
        """Bytes whose final value is present."""
        return int(self._meta[COVERED])

    @property
    def complete(self) -> bool:
        """Every byte is present and nothing contradicts any of them."""
        return self.covered == self.size and not self.poisoned

    @property
    def poisoned(self) -> bool:
        """Two copies of a value differed, or a link showed that the all-reduce has another size."""
        return bool(self._meta[POISONED])

    @property
    def time(self) -> int:
        """Capture time of the newest byte placed, ns; of the last needed one when complete."""
        return int(self._meta[TIME])

    @property
    def conflicts(self) -> list[list[int]]:
        """[offset, length, sender] of ranges with differing copies; the first 64 are kept."""
        return self._log[: min(MAX_CONFLICTS, int(self._meta[CONFLICTS]))].tolist()

    @property
    def disputed(self) -> np.ndarray | None:
        """int64[n, 2], (offset, length) of what cannot be trusted because copies differ, in the order in which it was
        found; None: nothing can, as the size is wrong or there were more conflicts than are kept."""
        count = int(self._meta[CONFLICTS])
        log = self._log[:count, :2].copy()
        whole = self._meta[POISONED] & _CONDEMNED or count > MAX_CONFLICTS or (log[:, 1] < 1).any()
        return None if whole else log

    def untold_conflicts(self) -> list[list[int]]:
        """Those of `conflicts` that were not asked for by this before."""
        conflicts = self.conflicts
        told, self._told = self._told, len(conflicts)
        return conflicts[told:]

    def holes(self) -> list[list[int]]:
        """[offset, length] of every range without a final value, in order."""
        result: list[list[int]] = []
        at = 0
        for start, end in self.ranges():
            if start > at:
                result.append([at, start - at])
            at = end
        if at < self.size:
            result.append([at, self.size - at])
        return result

    def ranges(self) -> list[list[int]]:
        """[start, end] of every covered range, cut at segment borders, in order."""
        return _covered(self.address).tolist()

    def lose(self, offset: int, length: int, why: Why) -> None:
        """Bytes that a link would have shown were lost on it. The first 16384 are kept."""
        if len(self.losses) < _MAX_LOSSES:
            self.losses.append((offset, offset + length, why))

    def put(self, offset: int, data: np.ndarray, sender: int, ts: int) -> int:
        """`put_across` of uint8[n] from Python, making nodes as needed."""
        if not 0 <= offset <= offset + data.size <= self.size:
            raise ValueError(f"bytes {offset}..{offset + data.size} lie outside {self.size}")
        self.reserve(data.size)
        return int(put_across(self.address, offset, address_of(data), data.size, sender, ts)) if data.size else 0

    def reserve(self, count: int) -> None:
        """Make nodes, up to the bound, for a piece of `count` bytes."""
        while self._meta[FREE_COUNT] <= count // self._meta[SEGMENT] + _SPARE and self._meta[FIXED] == 0:
            self.grow()

    def merge(self, other: Landing, sender: int) -> int:
        """Take over every covered byte of `other` (same size); returns the flags of `deposit` together."""
        self.losses += other.losses[: _MAX_LOSSES - len(self.losses)]
        result = 0
        for start, end in other.ranges():
            result |= self.put(start, other.data[start:end], sender, other.time)
        if other.poisoned:
            for offset, length, who in other.conflicts:
                self.poison(offset, length, who)
            if other.disputed is None:
                self.condemn()
            result |= CONFLICTED
        return result

    def poison(self, offset: int, length: int, sender: int) -> None:
        """Record that bytes offset..offset+length cannot be trusted; the landing is never complete again."""
        poison(self._meta, offset, length, sender)

    def condemn(self) -> None:
        """Record that the all-reduce is not of this size: the landing is never complete again."""
        self._meta[POISONED] |= _CONDEMNED

    def grow(self, capacity: int = 0) -> None:
        """Make more range nodes (twice as many, up to the bound) for `deposit`."""
        old = len(self._nodes)
        capacity = min(self._limit, capacity or 2 * old)
        if capacity > old:
            nodes = np.zeros((capacity, 4), np.int32)
            nodes[:old] = self._nodes
            nodes[old:, 2] = np.arange(old + 1, capacity + 1)
            nodes[-1, 2] = self._meta[FREE]
            self._nodes = nodes
            self._meta[NODES], self._meta[CAPACITY] = address_of(nodes), capacity
            self._meta[FREE] = old
            self._meta[FREE_COUNT] += capacity - old
        self._meta[FIXED] = int(capacity >= self._limit)
