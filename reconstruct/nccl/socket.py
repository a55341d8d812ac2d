"""NCCL over TCP (NET/Socket): from TCP spans to the messages of a connection (docs/nccl.md, "Over TCP").

A connection has one control socket and n data sockets, all from one sender to one listener. Each begins with a magic
number, type 3 and its index; index n is the control socket, opened last. Per message the control socket carries an
int32 length and then, if the message is short or n is 0, the message itself; else it is cut into tasks that go without
header over the data sockets in turn. A message has neither address nor tag: its ordinal is counted from the start, so a
connection whose start, or one of whose headers, was not captured tells nothing from there on, and says why.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mirror.flows import Flows
from mirror.memory import address_of
from mirror.roce_spans import BEGIN, DATA, END, HOLE
from mirror.spans import CLOSE, OPEN, Spans

__all__ = ["LOST", "Framer", "Piece", "SocketConnection", "SocketWatcher"]

LOST = 9
"""Kind of a piece: framing of the connection has ended, `SocketConnection.reason` says why."""

_HELLO = struct.Struct("<QIB")
_MAGIC = 0x564AB9F2FC4B9D6C
_TYPE = 3
_MOST_SOCKETS = 64
_MOST_MESSAGE = 64 << 20
_MOST_WAITING = 4 << 20
_MOST_CONNECTIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a message. Kinds as in `mirror.roce_spans.MessageSpans`, and LOST.

    BEGIN: length is the message's. DATA: length bytes at address, valid as long as the span that brought them.
    HOLE: never captured. END: length 1 if every byte was given, else 0.
    """

    kind: int
    message: int
    """Ordinal on the connection, from 0."""
    offset: int
    length: int
    address: int = 0
    ts: int = 0
    held: np.ndarray | None = None
    """Bytes that came before their header were copied: this keeps them."""


@dataclass(slots=True)
class _Lane:
    """What a data socket still has to carry, and bytes that came before the header which explains them."""

    tasks: deque[list[int]] = field(default_factory=deque)
    """[message, offset, bytes left], in order"""
    early: deque[tuple[np.ndarray | int, int]] = field(default_factory=deque)
    """(bytes, or the length of a hole; time)"""
    waiting: int = 0


class Framer:
    """The framing of one connection. sockets: data sockets. inline: longest message that follows its header at once.

    task: NCCL_SOCKET_MIN_TASKSIZE. `take` bytes of each socket in order, without its hello.
    """

    def __init__(self, sockets: int, inline: int, task: int = 65536) -> None:
        self.sockets, self.inline, self.task = sockets, inline, task
        self.messages = 0
        """Headers read."""
        self.reason = ""
        self._lanes = [_Lane() for _ in range(sockets)]
        self._next = 0
        self._header = bytearray()
        self._left: dict[int, list[int]] = {}
        self._here = [0, 0, 0]
        """[message, offset, bytes left] of the control socket's own message"""

    def take(self, socket: int, address: int, length: int, ts: int = 0) -> list[Piece]:
        """The next `length` bytes of a socket (index `sockets`: control), at `address`; 0: they are a hole."""
        pieces: list[Piece] = []
        if self.reason or length <= 0:
            return pieces
        if socket == self.sockets:
            self._control(address, length, ts, pieces)
        else:
            self._data(socket, address, length, ts, pieces)
        return pieces

    def _control(self, address: int, length: int, ts: int, pieces: list[Piece]) -> None:
        while length > 0 and not self.reason:
            if self._here[2]:
                used = self._give(self._here, address, length, ts, pieces)
            elif not address:
                self._lose("bytes that hold the length of a message were not captured", ts, pieces)
                return
            else:
                used = min(4 - len(self._header), length)
                self._header += ctypes.string_at(address, used)
                if len(self._header) == 4:
                    (size,) = struct.unpack("<i", self._header)
                    self._header.clear()
                    self._begin(size, ts, pieces)
            address, length = address and address + used, length - used

    def _begin(self, size: int, ts: int, pieces: list[Piece]) -> None:
        if not 0 <= size <= _MOST_MESSAGE:
            self._lose(f"{size} is no length of a message", ts, pieces)
            return
        message = self.messages
        self.messages += 1
        pieces.append(Piece(BEGIN, message, 0, size, 0, ts))
        self._left[message] = [size, 0]
        if size == 0:
            self._end(message, ts, pieces)
        elif not self.sockets or size <= self.inline:
            self._here = [message, 0, size]
        else:
            each = max(self.task, -(-size // self.sockets))
            for offset in range(0, size, each):
                number = self._next % self.sockets
                self._next += 1
                self._lanes[number].tasks.append([message, offset, min(each, size - offset)])
                self._explain(self._lanes[number], pieces)

    def _data(self, socket: int, address: int, length: int, ts: int, pieces: list[Piece]) -> None:
        lane = self._lanes[socket]
        while length > 0 and lane.tasks:
            used = self._give(lane.tasks[0], address, length, ts, pieces)
            if not lane.tasks[0][2]:
                lane.tasks.popleft()
            address, length = address and address + used, length - used
        if length > 0:
            lane.waiting += length
            if lane.waiting > _MOST_WAITING:
                self._lose(f"data socket {socket} is more than {_MOST_WAITING} bytes ahead of its lengths", ts, pieces)
            elif address:
                lane.early.append((np.frombuffer(ctypes.string_at(address, length), np.uint8), ts))
            else:
                lane.early.append((length, ts))

    def _explain(self, lane: _Lane, pieces: list[Piece]) -> None:
        """A task is known now whose bytes may have come before."""
        task = lane.tasks[-1]
        while lane.early and task[2]:
            held, ts = lane.early.popleft()
            size = held if isinstance(held, int) else held.size
            if isinstance(held, int):
                used = self._give(task, 0, size, ts, pieces)
            else:
                used = self._give(task, address_of(held), size, ts, pieces, held)
            lane.waiting -= used
            if used < size:
                lane.early.appendleft((size - used if isinstance(held, int) else held[used:], ts))
        if not task[2]:
            lane.tasks.pop()

    def _give(
        self, task: list[int], address: int, length: int, ts: int, pieces: list[Piece], held: np.ndarray | None = None
    ) -> int:
        """Bytes of a message, or a hole of it; returns how many of `length` belong to the task."""
        used = min(task[2], length)
        pieces.append(Piece(DATA if address else HOLE, task[0], task[1], used, address, ts, held))
        task[1] += used
        task[2] -= used
        left = self._left[task[0]]
        left[0] -= used
        left[1] |= not address
        if not left[0]:
            self._end(task[0], ts, pieces)
        return used

    def _end(self, message: int, ts: int, pieces: list[Piece]) -> None:
        _, holes = self._left.pop(message)
        pieces.append(Piece(END, message, 0, int(not holes), 0, ts))

    def _lose(self, reason: str, ts: int, pieces: list[Piece]) -> None:
        self.reason = reason
        self._left.clear()
        pieces.append(Piece(LOST, self.messages, 0, 0, 0, ts))


@dataclass(slots=True, eq=False)
class SocketConnection:
    """One NET/Socket connection: data pass from source to the listener."""

    source: str
    listener: tuple[str, int]
    number: int
    flows: dict[int, int] = field(default_factory=dict)
    """Index of a socket -> its flow."""
    framer: Framer | None = None
    """None until the first message, when the number of sockets is known."""
    reason: str = ""
    """Why nothing more is told."""


class SocketWatcher:
    """Finds NET/Socket connections among TCP flows. inline: `Traits.socket_inline` of the release.

    Feed it every batch of spans; it gives (connection, piece) in the order of the spans. Connections that were open
    before the first span are not found: their messages could not be counted.
    """

    def __init__(self, flows: Flows, inline: int, task: int = 65536) -> None:
        self.connections: list[SocketConnection] = []
        self.refused = 0
        """Sockets beyond what is kept."""
        self._flows, self._inline, self._task = flows, inline, task
        self._watched = np.zeros(flows.capacity, bool)
        self._heads: dict[int, bytearray] = {}
        self._socket: dict[int, tuple[SocketConnection, int]] = {}
        self._open: dict[tuple[str, tuple[str, int]], SocketConnection] = {}

    def feed(self, spans: Spans) -> list[tuple[SocketConnection, Piece]]:
        """Take a batch of spans of TCP reassembly."""
        n = spans.n
        flow, kind, offset, length = spans.flow[:n], spans.kind[:n], spans.offset[:n], spans.length[:n]
        start = _MAGIC.to_bytes(8, "little")
        for i in np.flatnonzero((kind == DATA) & (offset == 0)).tolist():
            head = ctypes.string_at(int(spans.addr[i]), min(int(length[i]), _HELLO.size))
            if head[:8] == start[: len(head)] and (len(head) < 12 or head[8:12] == b"\x03\0\0\0"):
                self._watched[flow[i]] = True
        found: list[tuple[SocketConnection, Piece]] = []
        for i in np.flatnonzero(self._watched[flow]).tolist():
            number, what = int(flow[i]), int(kind[i])
            if what == OPEN:
                self._forget(number)
            elif what in (DATA, HOLE):
                self._take(number, int(offset[i]), int(spans.addr[i]) if what == DATA else 0, int(length[i]),
                           int(spans.ts[i]), found)
            elif what == CLOSE and number in self._socket:
                self._over(number)
        return found

    def _take(
        self, number: int, offset: int, address: int, length: int, ts: int,
        found: list[tuple[SocketConnection, Piece]],
    ) -> None:  # fmt: skip
        if offset == 0:
            self._heads[number] = bytearray()
            self._watched[number] = True
        head = self._heads.get(number)
        if head is None:
            return
        missing = _HELLO.size - len(head)
        if missing > 0:
            if not address:
                self._forget(number)
                return
            used = min(missing, length)
            head += ctypes.string_at(address, used)
            address, length = address + used, length - used
            if len(head) == _HELLO.size:
                self._meet(number, head)
        if length > 0 and number in self._socket:
            connection, socket = self._socket[number]
            if connection.reason:
                return
            if connection.framer is None:
                self._start(connection)
            if connection.framer is None:
                found.append((connection, Piece(LOST, 0, 0, 0, 0, ts)))
                return
            found += [(connection, piece) for piece in connection.framer.take(socket, address, length, ts)]
            connection.reason = connection.framer.reason

    def _meet(self, number: int, head: bytearray) -> None:
        magic, kind, index = _HELLO.unpack(head)
        if magic != _MAGIC or kind != _TYPE or index > _MOST_SOCKETS:
            self._forget(number)
            return
        key = self._flows.endpoint_src(number)[0], self._flows.endpoint_dst(number)
        connection = self._open.get(key)
        if connection is None or connection.framer is not None or index in connection.flows:
            if len(self.connections) >= _MOST_CONNECTIONS:
                self.refused += 1
                self._forget(number)
                return
            connection = SocketConnection(*key, len(self.connections))
            self.connections.append(connection)
            self._open[key] = connection
        connection.flows[index] = number
        self._socket[number] = connection, index

    def _start(self, connection: SocketConnection) -> None:
        """Nothing is sent before all sockets are open: their number is known at the first byte."""
        sockets = max(connection.flows)
        if set(connection.flows) != set(range(sockets + 1)):
            lost = sorted(set(range(sockets + 1)) - set(connection.flows))
            connection.reason = f"the start of socket {', '.join(map(str, lost))} was not captured"
            return
        connection.framer = Framer(sockets, self._inline, self._task)

    def _over(self, number: int) -> None:
        connection, _ = self._socket[number]
        connection.reason = connection.reason or "closed"
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._socket.pop(number, None)
        self._heads.pop(number, None)
        self._watched[number] = False
