"""TCP streams of a capture: their bytes hashed in order, where some are missing, where two copies differ.

Bytes are kept while there is room, because a late copy may still fill a hole or contradict what came first. When the
limit is reached, the older part of every stream is hashed and let go: what was found in it stands, and copies of it
that come later are only counted (`unchecked`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

from mirror.flows import Flows
from mirror.memory import address_of, copy, load_u8
from mirror.spans import CONFLICT, DATA, DUPLICATE, HOLE, OPEN, Spans
from mirror.streams import runs

__all__ = ["HEAD", "StreamSeen", "StreamTable", "endpoint"]

_MISSING, _PRESENT, _DIFFERS = 0, 1, 2
_LEAST = 4096
_MOST_KEPT = 1 << 20
HEAD = 64
"""Enough to tell what most streams are."""


def endpoint(end: tuple[str, int]) -> str:
    """`ip:port`, the address of IPv6 in brackets."""
    host, port = end
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(slots=True, eq=False)
class StreamSeen:
    """One direction of one connection. length: bytes from its start (or the first byte seen) to the last one known."""

    flow: int
    source: str
    destination: str
    tunnel: str | None
    from_start: bool
    length: int = 0
    present: int = 0
    hole_bytes: int = 0
    conflict_bytes: int = 0
    unchecked: int = 0
    head: bytes = b""
    """The first bytes of the stream, up to HEAD, if none of them is missing."""
    _hash: Any = field(default_factory=hashlib.sha256)
    _base: int = 0
    _content: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    _marks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    _holes: list[np.ndarray] = field(default_factory=list)
    _conflicts: list[np.ndarray] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """The stream for scripts; only after it was settled to its end."""
        return {
            "type": "stream",
            "transport": "tcp",
            "src": self.source,
            "dst": self.destination,
            "tunnel": self.tunnel,
            "bytes": self.present,
            "sha256": self._hash.hexdigest(),
            "holes": _joined(self._holes),
            "conflicts": _joined(self._conflicts),
        }

    def told(self) -> StreamSeen:
        """Itself, without what only the line needs: a capture may have many holes."""
        self._holes, self._conflicts = [], []
        return self

    @property
    def room(self) -> int:
        """Bytes of memory in use."""
        return 2 * self._content.size

    def reserve(self, end: int) -> None:
        """Make room for the stream up to offset `end`."""
        need = end - self._base
        if need > self._content.size:
            more = max(need, 2 * self._content.size, _LEAST) - self._content.size
            self._content = np.concatenate((self._content, np.zeros(more, np.uint8)))
            self._marks = np.concatenate((self._marks, np.zeros(more, np.uint8)))

    def settle(self, keep: int) -> None:
        """Hash all but the last `keep` bytes and let them go."""
        if not self._base and self._marks[: min(HEAD, self.length)].all():
            self.head = self._content[: min(HEAD, self.length)].tobytes()
        count = max(0, self.length - self._base - keep)
        marks = self._marks[:count]
        present = self._content[:count]
        if not marks.all():
            present = present[marks != _MISSING]
        self._hash.update(present)
        self.present += present.size
        for mark, found in ((_MISSING, self._holes), (_DIFFERS, self._conflicts)):
            ranges = np.array(runs(marks == mark), np.int64).reshape(-1, 2)
            if len(ranges):
                ranges[:, 0] += self._base
                found.append(ranges)
        self.hole_bytes += int(np.count_nonzero(marks == _MISSING))
        self.conflict_bytes += int(np.count_nonzero(marks == _DIFFERS))
        self._content = self._content[count : count + keep].copy()
        self._marks = self._marks[count : count + keep].copy()
        self._base += count


def _joined(parts: list[np.ndarray]) -> list[list[int]]:
    """[offset, length] of all ranges, those that touch as one."""
    result: list[list[int]] = []
    for offset, length in (pair for part in parts for pair in part.tolist()):
        if result and sum(result[-1]) == offset:
            result[-1][1] += length
        else:
            result.append([offset, length])
    return result


@njit(cache=True, nogil=True)
def _take(rows: np.ndarray, kind: np.ndarray, offset: np.ndarray, addr: np.ndarray, length: np.ndarray, base: int,
          content: int, marks: np.ndarray) -> int:
    """Put the spans `rows` of one stream into its arrays, which begin at offset `base`.

    Returns how many bytes came again of what was let go already.
    """
    unchecked = np.int64(0)
    for i in rows:
        first, last = offset[i], offset[i] + length[i]
        if kind[i] == DATA:
            copy(content + first - base, addr[i], length[i])
            marks[first - base : last - base] = _PRESENT
        elif kind[i] == CONFLICT:
            marks[max(first - base, 0) : max(last - base, 0)] = _DIFFERS
        elif kind[i] == DUPLICATE:
            unchecked += max(0, min(last, base) - first)
            for at in range(max(first, base), min(last, base + marks.size)):
                value = load_u8(addr[i] + at - first)
                place = content + at - base
                if marks[at - base] == _MISSING:
                    copy(place, addr[i] + at - first, 1)
                    marks[at - base] = _PRESENT
                elif load_u8(place) != value:
                    marks[at - base] = _DIFFERS
    return int(unchecked)


class StreamTable:
    """Every stream seen; `ended` is called with each one once nothing more can come of it."""

    def __init__(self, flows: Flows, tunnel: Callable[[int], str | None], ended: Callable[[StreamSeen], None], *,
                 limit: int) -> None:
        """`tunnel`: the name of a vantage group. `limit`: the most bytes of memory that kept streams may take."""
        self.settled = False
        """Whether the limit was reached."""
        self._flows = flows
        self._tunnel = tunnel
        self._ended = ended
        self._limit = limit
        self._used = 0
        self._open: dict[int, StreamSeen] = {}

    def feed(self, spans: Spans) -> None:
        """Take spans; to be called before the next call of the reassembler."""
        flow, kind = spans.flow[: spans.n], spans.kind[: spans.n]
        order = np.argsort(flow, kind="stable")
        starts = np.flatnonzero(np.diff(flow[order], prepend=-1))
        for rows in np.split(order, starts[1:]):
            opens = np.flatnonzero(kind[rows] == OPEN)
            for part in np.split(rows, opens):
                if part.size:
                    self._part(spans, part)
        if self._used > self._limit:
            self.settled = True
            keep = min(_MOST_KEPT, self._limit // (4 * len(self._open)))
            for stream in self._open.values():
                stream.settle(keep)
            self._used = sum(stream.room for stream in self._open.values())

    def finish(self) -> None:
        """Nothing more comes."""
        for stream in self._open.values():
            stream.settle(0)
            self._ended(stream)
        self._open.clear()

    def _part(self, spans: Spans, rows: np.ndarray) -> None:
        """Spans of one stream, in order; the first may open it."""
        first = int(rows[0])
        flow = int(spans.flow[first])
        if spans.kind[first] == OPEN:
            before = self._open.pop(flow, None)
            if before is not None:
                self._used -= before.room
                before.settle(0)
                self._ended(before)
            flows = self._flows
            self._open[flow] = StreamSeen(
                flow, endpoint(flows.endpoint_src(flow)), endpoint(flows.endpoint_dst(flow)),
                self._tunnel(flows.vantage(flow)), bool(spans.length[first]),
            )  # fmt: skip
        stream = self._open[flow]
        kind = spans.kind[rows]
        delivered = rows[(kind == DATA) | (kind == HOLE)]
        before_room = stream.room
        if delivered.size:
            stream.length = int((spans.offset[delivered] + spans.length[delivered]).max())
            stream.reserve(stream.length)
        stream.unchecked += _take(rows, spans.kind, spans.offset, spans.addr, spans.length, stream._base,
                                  address_of(stream._content), stream._marks)
        self._used += stream.room - before_room
