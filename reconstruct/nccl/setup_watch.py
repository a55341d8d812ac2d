"""Keeps NCCL's set-up connections among all TCP flows, until somebody asks what they say."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from mirror.spans import CLOSE, DATA, HOLE, OPEN, Spans
from reconstruct.nccl.bootstrap import HELLO, MOST_MESSAGE, NET_IB, Setup, SetUpStream, may_begin, read_setup
from reconstruct.nccl.heads import SETUP, Heads

__all__ = ["SetupWatcher"]

_MOST_STREAM = 4 << 20
_MOST_BLOCK = 1 << 14
_MOST_STREAMS = 1 << 16


@dataclass(slots=True, eq=False)
class _Way:
    """One direction of a kept connection. expected: bytes taken; boundary: where the next message's length stands."""

    stream: SetUpStream
    forward: bool
    expected: int = 0
    boundary: int = 0

    @property
    def part(self) -> bytearray:
        return self.stream.forward if self.forward else self.stream.backward


class SetupWatcher:
    """Costs Python time for set-up connections, and for the first bytes of others; a connection whose messages do not
    follow one another as the bootstrap's do is let go at once.

    heads: which streams may be such; most_bytes: kept at once. Beyond that the oldest are forgotten, those that were
    closed first. Feed it every batch of spans in which `heads` has found SETUP; `setup` reads what has been kept.
    """

    def __init__(self, heads: Heads, most_bytes: int = 32 << 20) -> None:
        self.changed = 0
        """When the newest bytes since `setup` was last called came, ns; 0 if none did."""
        self.dropped = 0
        """Connections that are kept no more: with holes, too long, the oldest, or of communicators that have ended."""
        self.bytes = 0
        self._heads, self._flows, self._most_bytes = heads, heads.flows, most_bytes
        self._ways: dict[int, _Way] = {}
        self._numbers: dict[int, list[int]] = {}  # id of a stream -> its flows
        self._kept: OrderedDict[int, SetUpStream] = OrderedDict()  # by id, those to forget first at the front

    def feed(self, spans: Spans) -> None:
        """Take a batch of spans that `heads` has looked at."""
        n = spans.n
        flow, kind, offset, length = spans.flow[:n], spans.kind[:n], spans.offset[:n], spans.length[:n]
        marks = self._heads.marks
        answers = self._flows.peer[flow[(marks[flow] & SETUP != 0) & (kind == DATA) & (offset == 0)]]
        marks[answers[answers >= 0]] |= SETUP
        for i in np.flatnonzero(marks[flow] & SETUP).tolist():
            number, what, at, size = int(flow[i]), int(kind[i]), int(offset[i]), int(length[i])
            if what == OPEN:
                self._forget(number)
            elif what == DATA and at == 0 and number not in self._ways:
                self._begin(number, ctypes.string_at(int(spans.addr[i]), min(size, HELLO + 4)))
            way = self._ways.get(number)
            if way is None:
                self._heads.clear(number, SETUP)
                continue
            if what == HOLE or (what == DATA and way.expected != at):
                self._drop(way.stream)
            elif what == DATA:
                self._take(way, ctypes.string_at(int(spans.addr[i]), size))
                self.changed = max(1, int(spans.ts[i]))
            elif what == CLOSE:
                self._close(way.stream)

    def seen(self, qps: int = 1) -> Setup:
        """Everything that is kept; it stays. qps: queue pairs of a connection."""
        return read_setup(self._kept.values(), qps)

    def setup(self, qps: int = 1) -> Setup:
        """Everything that is kept. What is of communicators that have ended is told this once, and then forgotten.

        qps: queue pairs of a connection.
        """
        self.changed = 0
        found = self.seen(qps)
        ended = [member for member in found.communicators if member.over]
        magics = {member.magic.to_bytes(8, "little") for member in ended}
        listeners = {one.listener for member in ended for one in member.connections}
        for stream in list(self._kept.values()):
            if bytes(stream.forward[:8]) in magics or stream.destination in listeners:
                self._drop(stream)
        return found

    def _begin(self, number: int, head: bytes) -> None:
        if not may_begin(head):
            self._heads.clear(number, SETUP)
            return
        stream = SetUpStream(self._flows.endpoint_src(number), self._flows.endpoint_dst(number))
        self._kept[id(stream)] = stream
        self._ways[number] = _Way(stream, True, boundary=HELLO)
        self._numbers[id(stream)] = [number]
        self._heads.marks[number] |= SETUP
        peer = int(self._flows.peer[number])
        if peer >= 0:
            self._release(peer)
            self._ways[peer] = _Way(stream, False)
            self._numbers[id(stream)].append(peer)
            self._heads.marks[peer] |= SETUP
        if len(self._kept) > _MOST_STREAMS:
            self._drop(next(iter(self._kept.values())))

    def _take(self, way: _Way, data: bytes) -> None:
        part = way.part
        part += data
        way.expected += len(data)
        self.bytes += len(data)
        if not self._sound(way):
            self._drop(way.stream)
        while self.bytes > self._most_bytes:
            self._drop(next(iter(self._kept.values())))

    def _sound(self, way: _Way) -> bool:
        """Whether a direction can still be that of a set-up connection."""
        begun, part = way.stream.forward, way.part
        if not may_begin(bytes(begun[: HELLO + 4])):
            return False
        if len(begun) < HELLO or begun[8] == NET_IB:
            return len(part) <= _MOST_BLOCK
        while len(part) >= way.boundary + 4:
            size = int.from_bytes(part[way.boundary : way.boundary + 4], "little", signed=True)
            if not 0 < size <= MOST_MESSAGE:
                return False
            way.boundary += 4 + size
        return len(part) <= _MOST_STREAM

    def _close(self, stream: SetUpStream) -> None:
        stream.over = True
        self._kept.move_to_end(id(stream), last=False)

    def _drop(self, stream: SetUpStream) -> None:
        """Bytes are missing, there is no room, it is no set-up connection, or it is over and told."""
        self.dropped += 1
        del self._kept[id(stream)]
        self.bytes -= len(stream.forward) + len(stream.backward)
        for number in list(self._numbers.pop(id(stream))):
            self._release(number)

    def _forget(self, number: int) -> None:
        """The flow id begins another stream; what was kept of the one before stays."""
        if number in self._ways:
            self._close(self._ways[number].stream)
        self._release(number)

    def _release(self, number: int) -> None:
        way = self._ways.pop(number, None)
        if way is not None and id(way.stream) in self._numbers:
            self._numbers[id(way.stream)].remove(number)
        self._heads.clear(number, SETUP)
