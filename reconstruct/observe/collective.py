"""One collective as its links showed it, without its bytes: how much of it, how large it was, what is missing.

The size of an all-reduce is not on the wire; the whole list of message lengths of one link determines it
(docs/gloo.md, "All-reduce"). Once it is known, each message has a place, and what the links showed of the final values
can be added up without counting a byte twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reconstruct.decoder import ALLREDUCE, BROADCAST
from reconstruct.gloo import schedule
from reconstruct.gloo.watch import SeenMessage

__all__ = ["Collective", "Link", "Measured", "Part"]

_ITEM_SIZES = (4, 2, 8, 1)
Link = tuple[int, int]


@dataclass(slots=True)
class Part:
    """What one link showed: length and missing bytes of each message, in order.

    broken: messages are gone from the list, whatever follows is not in it. proven: nothing can be missing before or
    in the list.
    """

    lengths: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    broken: bool = False
    proven: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a collective in the end.

    size: bytes of the tensor (all-reduce, broadcast), None if it cannot be told or if links contradict each other.
    shown: at least so many of its bytes were captured with their final values.
    """

    size: int | None
    shown: int


_UNKNOWN = Measured(None, 0)


@dataclass(slots=True)
class Collective:
    """A collective of kind `kind` (see `decoder.KIND_NAMES`) with tag `tag`.

    longest: bytes of its longest message; best: most bytes captured of one message; time: of its newest message, ns.
    """

    kind: int
    tag: int
    parts: dict[Link, Part] = field(default_factory=dict)
    messages: int = 0
    payload: int = 0
    missing: int = 0
    longest: int = 0
    best: int = 0
    time: int = 0

    def part(self, link: Link) -> Part:
        return self.parts.setdefault(link, Part())

    def add(self, message: SeenMessage) -> None:
        part = self.part((message.sender, message.receiver))
        part.proven &= message.proven
        if self.kind == ALLREDUCE:
            part.lengths.append(message.length)
            part.missing.append(message.missing)
        self.messages += 1
        self.payload += message.length
        self.missing += message.missing
        self.longest = max(self.longest, message.length)
        self.best = max(self.best, message.length - message.missing)
        self.time = max(self.time, message.time)

    @property
    def broken(self) -> list[Link]:
        """Links that lost count of their messages."""
        return sorted(link for link, part in self.parts.items() if part.broken)

    def measure(self, world: int) -> Measured:
        """The tensor's size and how much of it was shown; the list of messages is taken to be over."""
        if self.kind == BROADCAST and self.messages:
            return Measured(self.longest, self.best)
        if self.kind != ALLREDUCE:
            return _UNKNOWN
        ring = {link: part for link, part in self.parts.items() if link[0] >= 0 and link[1] == (link[0] - 1) % world}
        whole = {link: part for link, part in ring.items() if part.lengths and not part.broken}
        # A list without a gap before it is the better witness: one with a gap may lack its beginning.
        witnesses = {link: part for link, part in whole.items() if part.proven} or whole
        found = _size(witnesses, world)
        if found is None:
            return _UNKNOWN
        size, itemsize = found
        shown: dict[int, int] = {}
        for (sender, _), part in ring.items():
            places = [schedule.message(size, itemsize, world, sender, i) for i in range(len(part.lengths))]
            fits = all(place[1] == length for place, length in zip(places, part.lengths, strict=True))
            if not part.broken:
                fits = fits and len(places) == schedule.total(size, itemsize, world, sender)
            if part.proven and not fits:
                return _UNKNOWN
            if fits and (part.proven or not part.broken):
                for (offset, length, final), missing in zip(places, part.missing, strict=True):
                    if final:
                        shown[offset] = max(shown.get(offset, 0), length - missing)
        return Measured(size, sum(shown.values()))


def _size(parts: dict[Link, Part], world: int) -> tuple[int, int] | None:
    """(bytes, an element size that fits) if all lists say the same whatever the element size, else None."""
    found: dict[int, int] = {}
    for itemsize in _ITEM_SIZES:
        sizes = {
            schedule.infer_size(np.array(part.lengths, np.int64), itemsize, world, sender)
            for (sender, _), part in parts.items()
        }
        if len(sizes) == 1:
            found[itemsize] = sizes.pop()
    fits = [(size, itemsize) for itemsize, size in found.items() if size >= 0]
    if len({size for size, _ in fits}) != 1 or -2 in found.values():
        return None
    return fits[0]
