"""NCCL over TCP (NET/Socket): from TCP spans to the messages of connections (docs/nccl.md, "Over TCP").

A connection has one control socket and n data sockets, all from one sender to one listener. Each begins with a magic
number, type 3 and its index; index n is the control socket, opened last. Per message the control socket carries an
int32 length and then, if the message is short or n is 0, the message itself; else it is cut into tasks that go without
header over the data sockets in turn. A message has neither address nor tag: its number follows from the lengths since
the start. A connection whose start was not captured tells nothing, and says why. A length that was not captured is
found again by what comes behind it (`socket_search`), or the connection tells nothing from there on.

What comes out looks like RoCE's messages, each of one packet, numbered as the connection's messages are:
`SocketMessages` stands where `mirror.roce.RoceReassembler` and its `QueuePairs` stand for RDMA.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mirror.flows import Flows
from mirror.memory import address_of
from mirror.roce_spans import CLOSE, MessageSpans
from mirror.roce_state import M_FLOW
from mirror.spans import DATA, Spans
from reconstruct.nccl import socket_state as k
from reconstruct.nccl.socket_kernel import HELLO_BYTES, MAGIC, NET_SOCKET, run, take
from reconstruct.nccl.socket_search import Chunk, Search

__all__ = ["SocketConnection", "SocketMessages"]

_HELLO = struct.Struct("<QIB")
_MOST_EARLY = 4 << 20
_MOST = {k.NO_SPANS: 1 << 24, k.NO_ROWS: 1 << 20, k.NO_TASKS: 1 << 20, k.NO_CELLS: 1 << 16}
_MOST_SEARCHED = 16 << 20


def _size(held: Chunk) -> int:
    return held if isinstance(held, int) else held.size


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
    started: bool = False
    searching: bool = False
    """A length was not captured, and is not found again yet."""
    reason: str = ""
    """Why nothing more is told."""


class SocketMessages:
    """The framing of all NET/Socket connections. Connections open before the first span are not found.

    flows: of the spans; inline: longest message that follows its length at once where there are data sockets
    (`Traits.socket_inline`); task: NCCL_SOCKET_MIN_TASKSIZE, bytes; most: connections at once.
    """

    def __init__(self, flows: Flows, inline: int, *, task: int = 65536, most: int = 4096) -> None:
        self.inline = inline
        self.refused = 0
        """Sockets beyond what is kept."""
        self.lost = 0
        """Connections whose framing ended before they did."""
        self.resumed = 0
        """Lengths that were not captured and were found again."""
        self.count = 0
        """Connections found so far."""
        self._tcp, self._task = flows, task
        self._connections: dict[int, SocketConnection] = {}
        self._open: dict[tuple[str, tuple[str, int], int], SocketConnection] = {}
        self._heads: dict[int, bytearray] = {}
        self._early: dict[int, deque[tuple[Chunk, int]]] = {}
        self._searches: dict[int, Search] = {}  # by connection
        self._waiting: dict[int, int] = {}
        self._free_connections = list(range(most))[::-1]
        self._free_sockets = list(range(4 * most))[::-1]
        self._state, self._held = k.fresh(flows.capacity, 4 * most, most)
        self._alive: list[np.ndarray] = []
        self._spans = MessageSpans()
        self.capacity = most

    # What QueuePairs and RoceReassembler are for RDMA

    @property
    def messages(self) -> np.ndarray:
        """int64[rows, M_COLUMNS]: the rows that spans speak of."""
        return self._state.messages

    def endpoint_src(self, number: int) -> tuple[str, int]:
        """(address of the sender, 0)"""
        return self._connections[number].source, 0

    def endpoint_dst(self, number: int) -> tuple[str, int]:
        """(address of the receiver, how many connections were found before this one)"""
        connection = self._connections[number]
        return connection.listener[0], connection.order

    def vantage(self, number: int) -> int:
        """The vantage group that shows a connection."""
        return self._connections[number].vantage

    @property
    def connections(self) -> list[SocketConnection]:
        """Those that are open, or were until the spans of the last call."""
        return list(self._connections.values())

    # Feeding

    def release(self, inline: int) -> None:
        """A job's release has this `Traits.socket_inline`, for connections made from now on. Open ones that were read
        otherwise and that it matters for are given up."""
        if inline == self.inline:
            return
        self.inline = inline
        for connection in self.connections:
            row = self._state.connections[connection.number]
            if connection.started and row[k.C_SOCKETS] and not connection.reason:
                self._lose(connection, "it was read as another release of NCCL writes: give the daemon --nccl-version "
                           "before the job starts", 0)  # fmt: skip

    def feed(self, spans: Spans) -> MessageSpans:
        """Take a batch of TCP spans; the result is good until the next call, as the batch is."""
        self._recycle()
        s = self._state
        s.cursor[[k.AT, k.DONE, k.SPANS]] = 0
        while spans.n:
            s = self._state
            reason = run(s, spans.flow, spans.kind, spans.offset, spans.addr, spans.length, spans.ts, spans.n)
            if reason == k.END_OF_SPANS:
                break
            self._answer(reason, spans)
        s, out = self._state, self._spans
        if out.message is not s.message:
            out = self._spans = MessageSpans(s.flow, s.kind, s.offset, s.addr, s.length, s.ts, 0, s.message)
        out.n = int(s.cursor[k.SPANS])
        return out

    def warm_up(self) -> None:
        """Compile the kernels. For an object that is used for nothing else."""
        spans = Spans()
        spans.reserve(1)
        spans.n, spans.flow[0], spans.kind[0] = 1, 0, CLOSE
        self.feed(spans)
        take(self._state, 0, 0, 0, 0)

    def _recycle(self) -> None:
        """What the last call's spans spoke of may be used again."""
        s = self._state
        for stack, free, spent, count in (
            (s.rows_free, k.ROWS_FREE, s.rows_spent, k.SPENT_ROWS),
            (s.cells_free, k.CELLS_FREE, s.cells_spent, k.SPENT_CELLS),
        ):
            n, used = int(s.cursor[count]), int(s.cursor[free])
            stack[used : used + n] = spent[:n]
            s.cursor[free], s.cursor[count] = used + n, 0
        self._alive.clear()
        for number in [c.number for c in self._connections.values() if c.reason]:
            del self._connections[number]
            self._free_connections.append(number)

    def _answer(self, reason: int, spans: Spans) -> None:
        cursor = self._state.cursor
        at = int(cursor[k.AT])
        flow, ts = int(spans.flow[at]), int(spans.ts[at])
        if reason == k.HELLO:
            self._greet(flow, int(spans.offset[at]), int(spans.addr[at]), int(spans.length[at]))
            if self._state.role[flow] < 0 or spans.kind[at] != DATA:
                cursor[k.AT], cursor[k.DONE] = at + 1, 0
        elif reason == k.CLOSED:
            self._closed(flow, ts)
            cursor[k.AT], cursor[k.DONE] = at + 1, 0
        elif reason == k.EARLY:
            done = int(cursor[k.DONE])
            length = int(spans.length[at]) - done
            held: Chunk = length
            if spans.kind[at] == DATA:
                held = np.frombuffer(ctypes.string_at(int(spans.addr[at]) + done, length), np.uint8)
            self._keep(int(cursor[k.SOCKET]), held, ts)
            cursor[k.AT], cursor[k.DONE] = at + 1, 0
        else:
            self._settle(reason, ts)

    def _settle(self, reason: int, ts: int) -> None:
        """Answer a stop that has to do with no span."""
        number = int(self._state.cursor[k.CONNECTION])
        if reason == k.START:
            self._start(self._connections[number], ts)
        elif reason == k.EXPLAINED:
            self._explain(number)
        elif reason == k.HEADER_LOST:
            self._search(self._connections[number], ts)
        elif reason == k.BAD_LENGTH:
            self._lose(self._connections[number], "what should be the length of a message is none", ts)
        else:
            self._grow(reason, number, ts)

    def _grow(self, what: int, number: int, ts: int) -> None:
        s = self._state
        now = {k.NO_SPANS: s.flow, k.NO_ROWS: s.messages, k.NO_TASKS: s.tasks, k.NO_CELLS: s.cells}[what]
        if len(now) >= _MOST[what]:
            self._lose(self._connections[number], "it has more messages under way at once than are kept", ts)
        else:
            self._state = k.grown(s, what, self._held)

    # Connections

    def _greet(self, flow: int, offset: int, address: int, length: int) -> None:
        """Bytes of what begins like a hello."""
        if offset == 0:
            self._heads[flow] = bytearray()
        head = self._heads[flow]
        if not address or len(head) != offset:
            self._forget(flow)
            return
        head += ctypes.string_at(address, min(HELLO_BYTES - len(head), length))
        if len(head) < HELLO_BYTES:
            self._state.role[flow] = k.COLLECTING
            return
        del self._heads[flow]
        self._state.role[flow] = k.NOBODY
        magic, kind, index = _HELLO.unpack(head)
        if magic == MAGIC and kind == NET_SOCKET and index <= k.MOST_SOCKETS:
            self._meet(flow, index)

    def _meet(self, flow: int, index: int) -> None:
        """A socket of a connection: of the one that is opening between the two ends, or of a new one."""
        key = self._tcp.endpoint_src(flow)[0], self._tcp.endpoint_dst(flow), self._tcp.vantage(flow)
        connection = self._open.get(key)
        if connection is None or connection.started or connection.reason or index in connection.sockets:
            connection = self._make(key)
        if connection is None or not self._free_sockets:
            self.refused += 1
            return
        row = self._free_sockets.pop()
        self._state.sockets[row] = connection.number, index, -1, -1, 0
        self._state.connections[connection.number, k.C_MEMBERS + index] = row
        connection.sockets[index], connection.flows[row] = row, flow
        self._state.role[flow] = row

    def _make(self, key: tuple[str, tuple[str, int], int]) -> SocketConnection | None:
        if not self._free_connections:
            return None
        connection = SocketConnection(self._free_connections.pop(), *key, self.count)
        row = self._state.connections[connection.number]
        row[:] = 0
        row[[k.C_STATE, k.C_ROW, k.C_INLINE, k.C_TASK]] = k.OPENING, -1, self.inline, self._task
        self._state.sizes[connection.number] = 0
        self._connections[connection.number] = self._open[key] = connection
        self.count += 1
        return connection

    def _start(self, connection: SocketConnection, ts: int) -> None:
        """Nothing is sent before all sockets are open: their number is known at the first byte."""
        sockets = max(connection.sockets)
        missing = sorted(set(range(sockets)) - set(connection.sockets))
        if missing:
            self._lose(connection, f"the start of socket {', '.join(map(str, missing))} was not captured", ts)
            return
        connection.started = True
        self._state.connections[connection.number, [k.C_STATE, k.C_SOCKETS]] = k.STARTED, sockets

    def _lose(self, connection: SocketConnection, reason: str, ts: int) -> None:
        self.lost += 1
        self._end(connection, reason, ts)

    def _closed(self, flow: int, ts: int) -> None:
        """A socket is over; with the last one its connection, for the others may still have bytes to bring."""
        row = int(self._state.role[flow])
        self._forget(flow)
        if row >= 0:
            connection = self._connections[int(self._state.sockets[row, k.S_CONNECTION])]
            del connection.flows[row]
            if not connection.flows:
                self._end(connection, "closed", ts)

    def _end(self, connection: SocketConnection, reason: str, ts: int) -> None:
        """Nothing more is told of a connection."""
        s, number = self._state, connection.number
        connection.reason = connection.reason or reason
        s.connections[number, k.C_STATE] = k.DEAD
        for row in np.flatnonzero((s.messages[:, M_FLOW] == number) & (s.messages[:, k.M_TO_COME] > 0)).tolist():
            self._drop(row)
        for flow in connection.flows.values():
            self._forget(flow)
        for row in connection.sockets.values():
            self._release(row)
        connection.flows.clear()
        self._searches.pop(number, None)
        self._tell_close(number, ts)
        key = connection.source, connection.listener, connection.vantage
        if self._open.get(key) is connection:
            del self._open[key]

    def _drop(self, row: int) -> None:
        """A message will never be whole."""
        s = self._state
        message = s.messages[row]
        s.rows_spent[s.cursor[k.SPENT_ROWS]] = row
        s.cursor[k.SPENT_ROWS] += 1
        cell = int(message[k.M_CELLS])
        while cell >= 0:
            s.cells_spent[s.cursor[k.SPENT_CELLS]] = cell
            s.cursor[k.SPENT_CELLS] += 1
            cell = int(s.cells[cell, k.L_NEXT])
        message[[k.M_TO_COME, k.M_CELLS, k.M_CELL_COUNT]] = 0, -1, 0

    def _release(self, row: int) -> None:
        """A socket is over for good."""
        s = self._state
        task = int(s.sockets[row, k.S_HEAD])
        while task >= 0:
            s.tasks_free[s.cursor[k.TASKS_FREE]] = task
            s.cursor[k.TASKS_FREE] += 1
            task = int(s.tasks[task, k.T_NEXT])
        self._early.pop(row, None)
        self._waiting.pop(row, None)
        self._free_sockets.append(row)

    def _forget(self, flow: int) -> None:
        self._heads.pop(flow, None)
        self._state.role[flow] = k.NOBODY

    def _tell_close(self, number: int, ts: int) -> None:
        if int(self._state.cursor[k.SPANS]) == len(self._state.flow):
            self._state = k.grown(self._state, k.NO_SPANS, self._held)
        s = self._state
        at = int(s.cursor[k.SPANS])
        s.flow[at], s.kind[at], s.offset[at], s.addr[at], s.length[at], s.ts[at] = number, CLOSE, 0, 0, 1, ts
        s.message[at] = -1
        s.cursor[k.SPANS] = at + 1

    # Bytes that came before the length which explains them

    def _keep(self, row: int, held: Chunk, ts: int) -> None:
        connection = self._connections[int(self._state.sockets[row, k.S_CONNECTION])]
        search = self._searches.get(connection.number)
        if search is not None and row == connection.sockets[0]:
            search.add(held, ts)
            self._look(connection, search, ts)
            return
        self._waiting[row] = self._waiting.get(row, 0) + _size(held)
        if self._waiting[row] > _MOST_EARLY:
            index = int(self._state.sockets[row, k.S_INDEX])
            self._lose(connection, f"data socket {index} is more than {_MOST_EARLY} bytes ahead of its lengths", ts)
            return
        self._early.setdefault(row, deque()).append((held, ts))
        self._state.sockets[row, k.S_EARLY] = 1

    def _explain(self, number: int) -> None:
        """There are new tasks of a connection: they may be of bytes that came before."""
        connection = self._connections[number]
        for row in [row for row in self._early if self._state.sockets[row, k.S_CONNECTION] == number]:
            self._state.sockets[row, k.S_EARLY] = 0
            self._replay(connection, row, self._early.pop(row))

    def _replay(self, connection: SocketConnection, row: int, waiting: deque[tuple[Chunk, int]]) -> None:
        while waiting and not connection.reason:
            held, ts = waiting.popleft()
            size = _size(held)
            if not isinstance(held, int):
                self._alive.append(held)
            used, reason = take(self._state, row, 0 if isinstance(held, int) else address_of(held), size, ts)
            if row in self._waiting:
                self._waiting[row] -= used
            if used < size:
                waiting.appendleft((size - used if isinstance(held, int) else held[used:], ts))
            if reason == k.EARLY:
                self._keep_again(connection, row, waiting, ts)
                return
            if reason != k.END_OF_SPANS:
                self._settle(reason, ts)

    def _keep_again(
        self, connection: SocketConnection, row: int, waiting: deque[tuple[Chunk, int]], ts: int
    ) -> None:  # fmt: skip
        search = self._searches.get(connection.number)
        if search is None:
            self._early[row] = waiting
            self._state.sockets[row, k.S_EARLY] = 1
            return
        for held, when in waiting:
            search.add(held, when)
        self._look(connection, search, ts)

    # A length that was not captured

    def _search(self, connection: SocketConnection, ts: int) -> None:
        """From here on bytes of the control socket are kept, until they tell the length."""
        row = self._state.connections[connection.number]
        if row[k.C_SOCKETS]:
            self._lose(connection, "bytes that hold the length of a message were not captured", ts)
            return
        row[k.C_STATE], connection.searching = k.SEARCHING, True
        seen = self._state.sizes[connection.number]
        head = int(row[k.C_VALUE]).to_bytes(4, "little")[: row[k.C_GOT]]
        self._searches[connection.number] = Search((seen[seen > 0] - 1).tolist(), head)

    def _look(self, connection: SocketConnection, search: Search, ts: int) -> None:
        """More of what lies behind the length is known."""
        found = search.solve()
        if found is not None:
            del self._searches[connection.number]
            connection.searching = False
            self.resumed += 1
            self._state.connections[connection.number, k.C_STATE] = k.STARTED
            self._replay(connection, connection.sockets[0], deque(found))
        elif search.size > _MOST_SEARCHED:
            self._lose(connection, f"the length of a message was not captured, and {search.size} bytes behind it do "
                       "not tell it", ts)  # fmt: skip
