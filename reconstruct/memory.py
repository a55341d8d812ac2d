"""Memory of a gloo decoder: landings under a budget, used buffers taken again, messages kept raw."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from mirror.loss import Why
from reconstruct.gloo import schedule
from reconstruct.landing import Landing

__all__ = ["Budget", "RawLink", "RawMessage"]

_MOST_SPARE = 8  # buffers of one size
_STALE = 512     # landings made since a size was last wanted: its buffers are given back


class Budget:
    """Hands out landings and message buffers while their bytes stay within `limit`.

    Landings are numbered (`Landing.ident`) and found by their numbers until they are freed: kernels name them so.

    Buffers of freed landings are kept for the next landing of that size: fresh pages cost more than the copy into
    them. A buffer that somebody still refers to is left to him.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0  # bytes handed out
        self._spare: dict[int, list[np.ndarray]] = {}
        self._spare_bytes = 0
        self._wanted: dict[int, int] = {}  # size -> number of the last landing made of it
        self._made = 0
        self._landings: dict[int, Landing] = {}

    @property
    def held(self) -> int:
        """Bytes handed out and bytes kept for reuse."""
        return self.used + self._spare_bytes

    def landing(self, size: int, itemsize: int, world_size: int, segment: int) -> Landing | None:
        """A landing with a number of its own, None if the budget does not allow it."""
        self._made += 1
        self._wanted[size] = self._made
        spare = self._spare.get(size)
        if not spare and not self._fits(size):
            return None
        buffer = spare.pop() if spare else None
        if buffer is not None:
            self._spare_bytes -= size
        self.used += size
        landing = Landing(size, itemsize, world_size, segment, ident=self._made, buffer=buffer)
        self._landings[landing.ident] = landing
        return landing

    def of(self, ident: int) -> Landing:
        """The landing with a number."""
        return self._landings[ident]

    def find(self, ident: int) -> Landing | None:
        """The same, None if it was freed."""
        return self._landings.get(ident)

    def free(self, landing: Landing) -> None:
        """Take a landing back; its `data` is empty from now on."""
        del self._landings[landing.ident]
        size = landing.size
        self.used -= size
        buffer, owner = landing.data, landing.data.base
        landing.data = np.empty(0, np.uint8)
        # Referred to by `buffer` and `owner` here, nothing else: no view of it is left anywhere.
        if sys.getrefcount(buffer) == 2 and sys.getrefcount(owner) == 3:
            kept = self._spare.setdefault(size, [])
            if len(kept) < _MOST_SPARE:
                kept.append(buffer)
                self._spare_bytes += size
        for stale in [s for s, made in self._wanted.items() if self._made - made > _STALE]:
            del self._wanted[stale]
            self._spare_bytes -= stale * len(self._spare.pop(stale, ()))

    def bytes(self, length: int) -> np.ndarray | None:
        """uint8[length], None if the budget does not allow it."""
        if not self._fits(length):
            return None
        self.used += length
        return np.empty(length, np.uint8)

    def free_bytes(self, length: int) -> None:
        """`length` bytes of `bytes` are not needed any more."""
        self.used -= length

    def _fits(self, length: int) -> bool:
        if self.held + length > self.limit:
            self._spare.clear()
            self._spare_bytes = 0
        return self.used + length <= self.limit


@dataclass(slots=True)
class RawMessage:
    """A message kept raw: stream offset of its payload, its bytes, (offset, length, why) of what is missing."""

    start: int
    length: int
    data: np.ndarray | None
    holes: list[tuple[int, int, Why]] = field(default_factory=list)
    doubtful: bool = False
    time: int = 0

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of the bytes that are present and undisputed."""
        if self.data is None or self.doubtful:
            return []
        result, at = [], 0
        for offset, length, _ in sorted(self.holes):
            if offset > at:
                result.append((at, offset))
            at = max(at, offset + length)
        if at < self.length:
            result.append((at, self.length))
        return result


@dataclass(slots=True)
class RawLink:
    """The messages of one collective that one link has carried, in order, from the first one seen.

    certain: how many of them have a certain position whatever follows; None: all, also those still to come.
    frozen: messages were lost, so nothing is added any more.
    """

    sender: int
    receiver: int
    certain: int | None
    messages: list[RawMessage] = field(default_factory=list)
    frozen: bool = False
    placed: int = 0  # messages already put into a landing

    @property
    def untouched(self) -> bool:
        """Whether no message border was lost: all its messages are here once the collective is over."""
        return self.certain is None and not self.frozen

    def contradicts(self, size: int, itemsize: int, world: int) -> bool:
        """Whether messages at certain positions have other lengths than an all-reduce of `size`."""
        return not self._agrees(size, itemsize, world, self.certain)

    def whole(self, size: int, itemsize: int, world: int) -> bool:
        """Whether the lengths are the whole schedule of `size`."""
        return (
            not self.frozen
            and len(self.messages) == schedule.total(size, itemsize, world, self.sender)
            and self._agrees(size, itemsize, world, None)
        )

    def _agrees(self, size: int, itemsize: int, world: int, count: int | None) -> bool:
        return all(
            schedule.message(size, itemsize, world, self.sender, i)[1] == message.length
            for i, message in enumerate(self.messages[:count])
        )

    def put(self, landing: Landing, everything: bool) -> None:
        """Place the messages not placed yet whose positions are certain, or all (then their lengths agree)."""
        stop = len(self.messages) if everything or self.certain is None else self.certain
        while self.placed < stop:
            message = self.messages[self.placed]
            offset, length, final = schedule.message(
                landing.size, landing.itemsize, landing.world_size, self.sender, self.placed
            )
            if final and length == message.length and message.data is not None:
                for start, end in message.ranges():
                    landing.put(offset + start, message.data[start:end], self.sender, message.time)
                for start, size, why in message.holes:
                    landing.lose(offset + start, size, why)
            self.placed += 1
