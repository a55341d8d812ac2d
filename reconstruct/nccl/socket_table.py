"""The NET/Socket connections among all TCP flows: found by their hellos, and which socket is of which."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from dataclasses import dataclass, field

from reconstruct.nccl import socket_state as k
from reconstruct.nccl.heads import MAGIC, NET_SOCKET, SOCKET, Heads
from reconstruct.nccl.socket_kernel import HELLO_BYTES
from reconstruct.nccl.socket_memory import SocketMemory
from reconstruct.nccl.socket_search import Chunk, Search

__all__ = ["SocketConnection", "SocketTable"]

_HELLO = struct.Struct("<QIB")


@dataclass(slots=True, eq=False)
class SocketConnection:
    """One NET/Socket connection: data pass from source to the listener."""

    number: int
    source: str
    listener: tuple[str, int]
    vantage: int
    order: int
    """How many were found before it."""
    sockets: dict[int, int] = field(default_factory=dict)
    """Index of a socket -> its row of `SocketState.sockets`."""
    flows: dict[int, int] = field(default_factory=dict)
    """Row of a socket that is open -> its flow."""
    early: dict[int, deque[tuple[Chunk, int, int]]] = field(default_factory=dict)
    """Row of a data socket -> what came on it, and when, before the length that explains it."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Row of a data socket -> bytes of `early`."""
    search: Search | None = None
    """For a length that was not captured."""
    started: bool = False
    searching: bool = False
    """A length was not captured, and was not found again."""
    reason: str = ""
    """Why nothing more is told."""


class SocketTable:
    """Connections by number, as rows of `SocketState.connections`.

    heads: which flows may be sockets; inline, task: as in `sockets.SocketMessages`; most: connections at once.
    """

    def __init__(self, heads: Heads, memory: SocketMemory, inline: int, task: int, most: int) -> None:
        self.inline = inline
        self.refused = self.lost = self.count = 0
        """Sockets beyond what is kept; connections whose framing ended before they did; those found so far."""
        self.connections: dict[int, SocketConnection] = {}
        self._open: dict[tuple[str, tuple[str, int], int], SocketConnection] = {}
        self._heads, self._flows, self._memory, self._task = heads, heads.flows, memory, task
        self._greetings: dict[int, bytearray] = {}
        self._free = list(range(most))[::-1]

    def recycle(self) -> None:
        """A new call begins: those that had ended are forgotten."""
        for number in [c.number for c in self.connections.values() if c.reason]:
            del self.connections[number]
            self._free.append(number)

    # Flows

    def greet(self, flow: int, offset: int, address: int, length: int) -> bool:
        """Bytes of what begins like a hello, 0: a hole; whether it is one, and is of a connection now."""
        if offset == 0:
            self._greetings[flow] = bytearray()
        head = self._greetings[flow]
        if not address or len(head) != offset:
            self.forget(flow)
            return False
        head += ctypes.string_at(address, min(HELLO_BYTES - len(head), length))
        if len(head) < HELLO_BYTES:
            self._memory.state.role[flow] = k.COLLECTING
            return False
        self.forget(flow)
        magic, kind, index = _HELLO.unpack(head)
        if magic == MAGIC and kind == NET_SOCKET and index <= k.MOST_SOCKETS:
            return self._meet(flow, index)
        return False

    def _meet(self, flow: int, index: int) -> bool:
        """A socket of a connection: of the one that is opening between the two ends, or of a new one."""
        key = self._flows.endpoint_src(flow)[0], self._flows.endpoint_dst(flow), self._flows.vantage(flow)
        connection = self._open.get(key)
        if connection is None or connection.started or connection.reason or index in connection.sockets:
            connection = self._make(key)
        row = -1 if connection is None else self._memory.take_socket(connection.number, index)
        if connection is None or row < 0:
            self.refused += 1
            return False
        connection.sockets[index], connection.flows[row] = row, flow
        self._memory.state.role[flow] = row
        self._heads.marks[flow] |= SOCKET
        return True

    def closed(self, flow: int, ts: int) -> None:
        """A flow is over; with the last socket its connection, for the others may still have bytes to bring."""
        row = int(self._memory.state.role[flow])
        self.forget(flow)
        if row >= 0:
            connection = self.connections[int(self._memory.state.sockets[row, k.S_CONNECTION])]
            del connection.flows[row]
            if not connection.flows:
                self._end(connection, "closed", ts)

    def forget(self, flow: int) -> None:
        """A flow is of no connection, or of none any more."""
        self._greetings.pop(flow, None)
        self._memory.state.role[flow] = k.NOBODY
        self._heads.clear(flow, SOCKET)

    # Connections

    def _make(self, key: tuple[str, tuple[str, int], int]) -> SocketConnection | None:
        if not self._free:
            return None
        connection = SocketConnection(self._free.pop(), *key, self.count)
        state = self._memory.state
        row = state.connections[connection.number]
        row[:] = 0
        row[[k.C_STATE, k.C_ROW, k.C_INLINE, k.C_TASK]] = k.OPENING, -1, self.inline, self._task
        state.sizes[connection.number] = 0
        self.connections[connection.number] = self._open[key] = connection
        self.count += 1
        return connection

    def start(self, connection: SocketConnection, ts: int) -> None:
        """Nothing is sent before all sockets are open: their number is known at the first byte."""
        sockets = max(connection.sockets)
        missing = sorted(set(range(sockets)) - set(connection.sockets))
        if missing:
            self.lose(connection, f"the start of socket {', '.join(map(str, missing))} was not captured", ts)
            return
        connection.started = True
        self._memory.state.connections[connection.number, [k.C_STATE, k.C_SOCKETS]] = k.STARTED, sockets

    def lose(self, connection: SocketConnection, reason: str, ts: int) -> None:
        """The framing ends before the connection does."""
        self.lost += 1
        self._end(connection, reason, ts)

    def _end(self, connection: SocketConnection, reason: str, ts: int) -> None:
        """Nothing more is told of a connection."""
        connection.reason = connection.reason or reason
        for flow in connection.flows.values():
            self.forget(flow)
        for row in connection.sockets.values():
            self._memory.release_socket(row)
        connection.flows.clear()
        connection.early.clear()
        connection.waiting.clear()
        connection.search = None
        self._memory.close(connection.number, ts)
        key = connection.source, connection.listener, connection.vantage
        if self._open.get(key) is connection:
            del self._open[key]
