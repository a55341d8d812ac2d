"""A length on a NET/Socket connection was not captured: which length explains what comes behind it?

The next length lies as many bytes behind this one as it says, so each length that the connection has shown before is
tried: right is the one from which a chain of lengths goes on, all of which were seen before too. Three that fit by
chance are as good as impossible: a word of data is one of at most MOST_SIZES numbers out of 2^32. Where two explain it,
or none does, nothing is believed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["MOST_SIZES", "Chunk", "Missing", "Search"]

MOST_SIZES = 1024
_NEEDED = 3      # lengths in a row that must be as expected
_MOST_LOST = 2   # lengths on the way that were not captured
_MOST_EMPTY = 3  # messages of no bytes on the way: zeros are found anywhere
_WORD = 4



class Missing(int):
    """How many bytes were not captured; known, since: the why of their HOLE, see `mirror.spans.Spans`."""

    known: int
    since: int

    def __new__(cls, size: int, known: int = 0, since: int = 0) -> Missing:
        made = super().__new__(cls, size)
        made.known, made.since = known, since
        return made

    def part(self, size: int) -> Missing:
        """So many of them."""
        return Missing(size, self.known, self.since)


Chunk = np.ndarray | Missing
"""Bytes, or how many were not captured."""


@dataclass(frozen=True, slots=True)
class _Path:
    at: int
    """Where the next length lies."""
    lengths: tuple[tuple[int, int], ...]
    """(place, length) of those that were not captured."""
    right: int = 0
    empty: int = 0


class Search:
    """The control stream of a connection without data sockets, from a length on that is not whole.

    sizes: lengths seen before; head: the bytes of the length that were captured before the hole.
    """

    def __init__(self, sizes: Iterable[int], head: bytes) -> None:
        self._sizes = frozenset(sizes)
        self._chunks: list[tuple[Chunk, int]] = []
        self._starts: list[int] = []
        self.size = 0
        """Bytes, holes included."""
        self._tried = 0
        self._skip = len(head)
        if head:
            self.add(np.frombuffer(head, np.uint8), 0)

    def add(self, chunk: Chunk, ts: int) -> None:
        """What comes next, captured at `ts`."""
        self._chunks.append((chunk, ts))
        self._starts.append(self.size)
        self.size += int(chunk) if isinstance(chunk, int) else chunk.size

    def solve(self) -> list[tuple[Chunk, int]] | None:
        """All that was added, the lost lengths filled in; None: not certain (yet)."""
        if self.size < self._tried * 5 // 4:
            return None
        self._tried = self.size
        found: list[_Path] = []
        for path in self._walk():
            if path is None:
                return None
            found.append(path)
            if len(found) > 1:
                return None
        return list(self._filled(found[0].lengths)) if found else None

    def _walk(self) -> Iterator[_Path | None]:
        """Every chain of lengths that explains the bytes; None: one may, with more bytes."""
        paths = [_Path(0, ())]
        while paths:
            path = paths.pop()
            if path.right == _NEEDED:
                yield path
            elif path.at + _WORD > self.size:
                yield None
            else:
                paths += self._next(path)

    def _next(self, path: _Path) -> Iterator[_Path]:
        word = [self._byte(path.at + i) for i in range(_WORD)]
        lost = None in word
        if lost and len(path.lengths) > _MOST_LOST:
            return
        for size in self._sizes if lost else (int.from_bytes(bytes(b or 0 for b in word), "little"),):
            if size not in self._sizes or (size == 0 and path.empty == _MOST_EMPTY):
                continue
            if any(known not in (None, true) for known, true in zip(word, size.to_bytes(_WORD, "little"), strict=True)):
                continue
            yield _Path(
                path.at + _WORD + size,
                (*path.lengths, (path.at, size)) if lost else path.lengths,
                path.right + (not lost and size > 0),
                path.empty + (size == 0),
            )

    def _byte(self, at: int) -> int | None:
        """The byte at a place, None if it was not captured."""
        number = bisect_right(self._starts, at) - 1
        chunk = self._chunks[number][0]
        return None if isinstance(chunk, int) else int(chunk[at - self._starts[number]])

    def _filled(self, lengths: tuple[tuple[int, int], ...]) -> Iterator[tuple[Chunk, int]]:
        known = {at + i: byte for at, size in lengths for i, byte in enumerate(size.to_bytes(_WORD, "little"))}
        for start, (chunk, ts) in zip(self._starts, self._chunks, strict=True):
            if not isinstance(chunk, int):
                if start >= self._skip:
                    yield chunk, ts
                continue
            at, end = start, start + chunk
            for place in sorted(place for place in known if start <= place < end):
                if place > at:
                    yield chunk.part(place - at), ts
                yield np.array([known[place]], np.uint8), ts
                at = place + 1
            if end > at:
                yield chunk.part(end - at), ts
