"""Whole streams kept in memory: for `inspect` on a few files and for tests; never on the gradient path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numba import njit

from mirror.flows import Flows
from mirror.memory import load_u8
from mirror.spans import CLOSE, CONFLICT, DATA, DUPLICATE, HOLE, OPEN, Spans

__all__ = ["Stream", "StreamRecorder", "runs", "up_to"]

_MISSING, _PRESENT, _DIFFERS = 0, 1, 2


@dataclass(slots=True, eq=False)
class Stream:
    """One direction of one connection, from its OPEN on."""

    flow: int
    source: tuple[str, int]
    destination: tuple[str, int]
    from_start: bool
    """Whether the start of the connection was seen; if not, offset 0 is the first byte seen."""
    vantage: int = 0
    closed: str | None = None
    """None, "fin" or "rst"."""
    length: int = 0
    """Stream offset up to which the stream is known."""
    lost: int = 0
    """Bytes that were captured but not kept, because the recorder's limit was reached; they count as holes."""
    _bytes: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.uint8))
    _marks: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.uint8))

    @property
    def data(self) -> bytes:
        """The stream; missing bytes are zero, conflicting ones the first copy."""
        return up_to(self._bytes, self.length).tobytes()

    @property
    def present(self) -> int:
        """Bytes that are not missing."""
        return int(np.count_nonzero(self._marks[: self.length]))

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(offset, length) of every range that is missing, joined and in order."""
        return runs(up_to(self._marks, self.length) == _MISSING)

    @property
    def conflicts(self) -> list[tuple[int, int]]:
        """(offset, length) of every range of which two copies differ, joined and in order."""
        return runs(up_to(self._marks, self.length) == _DIFFERS)

    @property
    def complete(self) -> bool:
        """Nothing is missing and nothing is in conflict between the first and the last byte known."""
        return bool((up_to(self._marks, self.length) == _PRESENT).all())

    @property
    def sha256(self) -> str:
        """SHA-256 of `data`. It speaks for the stream only where `complete` is true."""
        return hashlib.sha256(self.data).hexdigest()


@njit(cache=True, nogil=True)
def _take(kind: np.ndarray, offset: np.ndarray, addr: np.ndarray, length: np.ndarray, first: int, last: int,
          flow_of: np.ndarray, flow: int, content: np.ndarray, marks: np.ndarray) -> None:
    """Put the spans first..last-1 of `flow` into its stream; whatever lies beyond the arrays is left out."""
    for i in range(first, last):
        if flow_of[i] != flow or kind[i] not in (DATA, DUPLICATE, CONFLICT):
            continue
        for j in range(offset[i], min(offset[i] + length[i], content.size)):
            if kind[i] == CONFLICT:
                marks[j] = _DIFFERS
                continue
            value = load_u8(addr[i] + j - offset[i])
            if marks[j] == _MISSING:
                content[j] = value
                marks[j] = _PRESENT
            elif content[j] != value:
                marks[j] = _DIFFERS


def up_to(array: np.ndarray, length: int) -> np.ndarray:
    """The first `length` entries, zero beyond what is kept."""
    return array[:length] if length <= array.size else np.pad(array, (0, length - array.size))


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of every run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.view(np.int8), [0]))))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


class StreamRecorder:
    """Keeps every stream whole. `streams` lists them in the order in which they opened."""

    def __init__(self, flows: Flows, *, limit: int = 1 << 30) -> None:
        """`limit`: the most stream bytes kept, over all streams; what comes later counts as missing."""
        self.streams: list[Stream] = []
        self._flows = flows
        self._open: dict[int, Stream] = {}
        self._room = limit

    def feed(self, spans: Spans) -> None:
        """Take spans; to be called before the next call of the reassembler."""
        n = spans.n
        kind = spans.kind[:n]
        for flow in np.unique(spans.flow[:n]).tolist():
            # A flow id may stand for several streams in one batch: cut at each OPEN.
            mine = spans.flow[:n] == flow
            cuts = np.flatnonzero(mine & (kind == OPEN)).tolist()
            bounds = [0, *cuts, n] if 0 not in cuts else [*cuts, n]
            for first, last in pairwise(bounds):
                if first in cuts:
                    self._begin(flow, bool(spans.length[first]))
                stream = self._open.get(flow)
                if stream is not None:
                    self._extend(stream, spans, mine, first, last)

    def find(self, source: tuple[str, int], destination: tuple[str, int]) -> Stream:
        """The newest stream between two endpoints. Raises KeyError if there is none."""
        for stream in reversed(self.streams):
            if stream.source == source and stream.destination == destination:
                return stream
        raise KeyError(f"no stream from {source} to {destination}")

    def _begin(self, flow: int, from_start: bool) -> None:
        flows = self._flows
        stream = Stream(flow, flows.endpoint_src(flow), flows.endpoint_dst(flow), from_start, flows.vantage(flow))
        self.streams.append(stream)
        self._open[flow] = stream

    def _extend(self, stream: Stream, spans: Spans, mine: np.ndarray, first: int, last: int) -> None:
        index = first + np.flatnonzero(mine[first:last])
        kind, offset, length = spans.kind[index], spans.offset[index], spans.length[index]
        for reset in length[kind == CLOSE].tolist():
            stream.closed = "rst" if reset else "fin"
        delivered = (kind == DATA) | (kind == HOLE)
        if delivered.any():
            stream.length = int((offset + length)[delivered].max())
        self._grow(stream)
        size = stream._bytes.size
        data = kind == DATA
        stream.lost += int(np.minimum(length, np.maximum(0, offset + length - size))[data].sum())
        _take(spans.kind, spans.offset, spans.addr, spans.length, first, last, spans.flow, stream.flow,
              stream._bytes, stream._marks)

    def _grow(self, stream: Stream) -> None:
        size = stream._bytes.size
        if stream.length <= size:
            return
        more = min(max(stream.length, 2 * size) - size, self._room)
        self._room -= more
        stream._bytes = np.concatenate((stream._bytes, np.zeros(more, np.uint8)))
        stream._marks = np.concatenate((stream._marks, np.zeros(more, np.uint8)))
