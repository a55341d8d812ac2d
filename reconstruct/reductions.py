"""The all-reduces of one process group that may be gradient buckets, from the first sight of them on.

A bucket's size follows from the length of its first message where only one bucket can begin so; otherwise the messages
are kept until the layout is known or the list of their lengths tells the size. What cannot be a bucket is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reconstruct.buckets import Layout
from reconstruct.decoder import IGNORE, RAW, AllReduce, Decoder, Plan, Request
from reconstruct.landing import Landing
from reconstruct.numbering import FOREVER
from reconstruct.windows import tell_apart

MAX_REDUCTIONS = 4096
_KEPT = 1024  # of so many, once there are more
_MAX_SEEN = 1 << 16


@dataclass(slots=True)
class Reduction:
    """time: when its first payload was captured, ns; size: bytes of the bucket it can be, None while not known."""

    time: int
    size: int | None = None
    itemsize: int = 0
    raw: bool = False  # messages of some link are kept until the size is known


class Reductions:
    """What is known of a group's collectives with tags from `forget` on."""

    def __init__(self, group: str, decoder: Decoder) -> None:
        self.held: dict[int, Reduction] = {}
        self.seen: dict[int, int] = {}  # tag of any collective -> when its first payload was captured
        self.dropped = 0
        """Tags below this were forgotten although no step had used them: nobody knows any more what they were."""
        self._foreign: set[int] = set()
        self._group = group
        self._decoder = decoder

    def note(self, request: Request) -> None:
        """Any collective of the group was seen."""
        self.seen[request.tag] = min(request.time, self.seen.get(request.tag, request.time))
        if len(self.seen) > _MAX_SEEN:
            for tag in list(self.seen)[: _MAX_SEEN // 2]:
                del self.seen[tag]
            self._foreign &= self.seen.keys()

    def plan(self, request: Request, current: Layout | None) -> Plan:
        """What to do with an all-reduce on one link. current: its layout if that is certain."""
        tag = request.tag
        if tag in self._foreign:
            return IGNORE
        reduction = self.held.setdefault(tag, Reduction(request.time))
        reduction.time = min(reduction.time, request.time)
        if reduction.size is None and current is not None:
            sizes = {
                (b.nbytes, b.itemsize)
                for b in current.buckets
                if self._decoder.can_begin(request, b.nbytes, b.itemsize)
            }
            if not sizes:
                self.exclude(tag)
                return IGNORE
            if len({size for size, _ in sizes}) == 1:
                reduction.size, reduction.itemsize = min(sizes)
        if reduction.size is not None:
            return AllReduce(reduction.size, reduction.itemsize)
        reduction.raw = True
        return RAW

    def exclude(self, tag: int) -> None:
        """The all-reduce is proven to be no bucket."""
        self.held.pop(tag, None)
        self._foreign.add(tag)

    def candidates(self, layout: Layout, start: int, end: int, until: int) -> list[tuple[int, int]]:
        """(tag, size) of the all-reduces with tags in [start, end), first seen up to `until` (ns), that may be buckets
        of `layout`, by rising tag."""
        sizes = sorted({(bucket.nbytes, bucket.itemsize) for bucket in layout.buckets})
        able: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        for tag in self.within(start, end):
            reduction = self.held[tag]
            if reduction.time > until:
                continue
            if reduction.size is not None:
                if reduction.raw and not self.complete(tag):
                    self._decoder.place(self._group, tag, reduction.size, reduction.itemsize)
                fitting = tuple(one for one in sizes if one[0] == reduction.size)[:1]
            else:
                fitting = tuple(one for one in sizes if self._decoder.fits(self._group, tag, *one))
                if len(fitting) == 1:
                    self._place(tag, *fitting[0])
            if fitting:
                able.append((tag, fitting))
        if any(len(fitting) > 1 for _, fitting in able):
            shown = self._decoder.max_tag(self._group) >= end - 1 and not self.undecided(layout, start, end, until)
            return self._told(layout, able, shown, end == FOREVER)
        return [(tag, fitting[0][0]) for tag, fitting in able if self.held[tag].size is not None]

    def _told(
        self, layout: Layout, able: list[tuple[int, tuple[tuple[int, int], ...]]], shown: bool, plain: bool
    ) -> list[tuple[int, int]]:
        """The same where sizes look alike: their order tells them, once nothing more of the window can come. Until
        then, and if it does not, every size is 0: none is a bucket's."""
        told = None
        if shown or plain:
            told = tell_apart(layout, [(tag, {size for size, _ in sizes}) for tag, sizes in able], plain)
        if told is None:
            return [(tag, 0) for tag, _ in able]
        for tag, sizes in able:
            for size, itemsize in sizes:
                if self.held[tag].size is None and told.get(tag) == size:
                    self._place(tag, size, itemsize)
        return [(tag, self.held[tag].size or 0) for tag, _ in able]

    def _place(self, tag: int, size: int, itemsize: int) -> None:
        """Place what was kept raw, as an all-reduce of that size."""
        if self._decoder.place(self._group, tag, size, itemsize) is not None:
            self.held[tag].size, self.held[tag].itemsize = size, itemsize

    def within(self, start: int, end: int) -> Iterator[int]:
        """Tags in [start, end) that may be buckets, rising."""
        return iter(sorted(tag for tag in self.held if start <= tag < end))

    def unseen(self, start: int, end: int) -> set[int]:
        """Tags in [start, end) of which nothing at all was seen: nobody knows what they are. One stands for all that
        were `dropped`."""
        first = max(start, self.dropped - 1)
        return {tag for tag in range(first, min(end, first + _MAX_SEEN)) if tag not in self.seen}

    def undecided(self, layout: Layout, start: int, end: int, until: int) -> set[int]:
        """Tags in [start, end), first seen up to `until` (ns), of which too little was seen to tell whether they are
        buckets of `layout`."""
        sizes = {(bucket.nbytes, bucket.itemsize) for bucket in layout.buckets}
        open_ = [tag for tag in self.within(start, end) if self.held[tag].size is None and self.held[tag].time <= until]
        begun = self.unseen(start, min(end, self._decoder.max_tag(self._group) + 1))
        return {
            tag for tag in (*open_, *begun) if any(self._decoder.may_fit(self._group, tag, *one) for one in sizes)
        }

    def forget(self, below: int) -> None:
        """Tags below `below` are done with."""
        self.held = {tag: r for tag, r in self.held.items() if tag >= below}
        self.seen = {tag: time for tag, time in self.seen.items() if tag >= below}
        self._foreign = {tag for tag in self._foreign if tag >= below}

    def drop(self) -> bool:
        """Forget the oldest if there are too many, as when no step ever uses them; whether there were."""
        if len(self.held) <= MAX_REDUCTIONS:
            return False
        self.dropped = sorted(self.held)[-_KEPT]
        self.forget(self.dropped)
        return True

    def landing(self, tag: int) -> Landing | None:
        return self._decoder.landing(self._group, tag)

    def complete(self, tag: int) -> bool:
        held = self.landing(tag)
        return held is not None and held.complete

    def settled(self, tag: int, behind: int) -> bool:
        """Whether no link brings anything more of it; what begins when it is over has a tag from `behind` on."""
        return self._decoder.settled(self._group, tag, behind)

    def time(self, tag: int) -> int:
        """When its newest byte was captured, ns."""
        held = self.landing(tag)
        return held.time if held is not None else self.held[tag].time if tag in self.held else 0
