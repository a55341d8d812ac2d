"""Gloo message framing: what a preamble is, how to find one again after a gap, what a gap can have swallowed.

A message is a 48-byte preamble of six little-endian u64 (nbytes, opcode, slot, offset, length, roffset) and, for
opcode 1, `length` bytes of payload (docs/gloo.md, "Messages"). Nothing else marks a message's begin, so after a gap
that swallowed a preamble the next one is searched by its redundancy, and what lies between is decomposed into whole
messages where only one decomposition exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba import njit

from mirror.internal import internal
from mirror.memory import load_u64
from reconstruct.gloo.schedule import MAX_SEGMENT

__all__ = ["MAX_PAYLOAD", "PREAMBLE_BYTES", "Pending", "lost_payloads", "search", "valid"]

PREAMBLE_BYTES = 48
MAX_PAYLOAD = 1 << 37
"""Longest payload believed, bytes: whole tensors travel in one message in broadcasts."""
MAX_NOTICES = 64
"""Most notifications that one gap is taken to have swallowed: two collectives of two segments in flight each way
give a handful."""
MAX_PENDING = 16
"""Most payloads in doubt: with more of them the bound on notifications would not hold."""
_MAX_TRIES = 4096
_ALLREDUCE = 4


@njit(cache=True, nogil=True)
def valid(address: int, strict: bool) -> bool:
    """Whether a preamble can stand at `address` (48 bytes readable).

    strict: for searching, where chance hits count: only slots as torch makes them.
    """
    opcode = load_u64(address + 8)
    if opcode < 1 or opcode > 3 or load_u64(address + 24) != 0 or load_u64(address + 40) != 0:
        return False
    length = load_u64(address + 32)
    if length < 0 or length > MAX_PAYLOAD:
        return False
    if load_u64(address) != PREAMBLE_BYTES + (length if opcode == 1 else 0):
        return False
    slot = load_u64(address + 16)
    kind = (slot >> 56) & 0xFF
    if slot < 0 or kind > 8:
        return False
    if kind == 0:
        # Point to point: the slot is the user's tag.
        return not strict or slot >> 32 == 0
    if (slot >> 8) & 0xFFFF != 0:
        return False
    if strict and slot & 0xFF != 0:
        return False
    return not (kind == _ALLREDUCE and length > MAX_SEGMENT)


@internal()
def search(address: int, count: int) -> int:
    """First position p in 0..count-48 with a preamble at address + p, or -1."""
    for position in range(count - PREAMBLE_BYTES + 1):
        opcode = load_u64(address + position + 8)
        if 1 <= opcode <= 3 and valid(address + position, True):
            return position
    return -1


@dataclass(frozen=True, slots=True)
class Pending:
    """A slot that may have payloads in a gap: the lengths of its next payloads, in order."""

    lengths: Sequence[int]


def lost_payloads(gap: int, slots: Sequence[Pending], closed: bool) -> list[int | None]:
    """How many payload messages of each slot lie in a gap of `gap` bytes that starts and ends at message borders.

    closed: `slots` are all the slots and `lengths` all their payloads that can have been sent in the gap. Otherwise
    a slot's number is known only if not even its next message fits. None: cannot be told.

    Any number of notifications up to MAX_NOTICES may lie in the gap too, so short payloads are hardly ever told
    apart from them; that is an answer of None, never a guess.
    """
    if not closed:
        return [0 if s.lengths and s.lengths[0] + PREAMBLE_BYTES > gap else None for s in slots]
    tries = 1
    for slot in slots:
        tries *= len(slot.lengths) + 1
    if tries > _MAX_TRIES or sum(len(slot.lengths) for slot in slots) > MAX_PENDING:
        return [None] * len(slots)
    solutions: list[list[int]] = []

    def extend(chosen: list[int], rest: int) -> None:
        if len(chosen) == len(slots):
            if rest % PREAMBLE_BYTES == 0 and rest <= MAX_NOTICES * PREAMBLE_BYTES:
                solutions.append(chosen)
            return
        extend([*chosen, 0], rest)
        for number, length in enumerate(slots[len(chosen)].lengths, 1):
            rest -= PREAMBLE_BYTES + length
            if rest < 0:
                break
            extend([*chosen, number], rest)

    extend([], gap)
    answer: list[int | None] = []
    for i in range(len(slots)):
        found = {solution[i] for solution in solutions}
        answer.append(found.pop() if len(found) == 1 else None)
    return answer
