"""NCCL over TCP (NET/Socket): from TCP spans to the messages of connections (docs/nccl.md, "Over TCP").

A connection has one control socket and n data sockets, all from one sender to one listener. Each begins with a magic
number, type 3 and its index; index n is the control socket, opened last. Per message the control socket carries an
int32 length and then, if the message is short or n is 0, the message itself; else it is cut into tasks that go without
header over the data sockets in turn. A message has neither address nor tag: its number follows from the lengths since
the start. A connection whose start was not captured tells nothing, and says why. A length that was not captured is
found again by what comes behind it (`socket_search`), or the connection tells nothing from there on; a HOLE of no bytes
in no message says that it is lost.

    TCP spans -> kernel (`socket_kernel`) -> spans of messages
                    | stops: `socket_table` (hellos, ends), `socket_stops` (all others)

What comes out looks like RoCE's messages, each of one packet, numbered as the connection's messages are:
`SocketMessages` stands where `mirror.roce.RoceReassembler` and its `QueuePairs` stand for RDMA.
"""

from __future__ import annotations

import ctypes

import numpy as np

from mirror.roce_spans import CLOSE, MessageSpans
from mirror.spans import DATA, Spans
from reconstruct.nccl import socket_state as k
from reconstruct.nccl.heads import Heads
from reconstruct.nccl.socket_kernel import run, take
from reconstruct.nccl.socket_memory import SocketMemory
from reconstruct.nccl.socket_search import Chunk, Missing
from reconstruct.nccl.socket_stops import SocketStops
from reconstruct.nccl.socket_table import SocketConnection, SocketTable

__all__ = ["SocketMessages"]


class SocketMessages:
    """The framing of all NET/Socket connections. Connections open before the first span are not found.

    heads: which flows may be sockets; inline: longest message that follows its length at once where there are data
    sockets (`Traits.socket_inline`); task: NCCL_SOCKET_MIN_TASKSIZE, bytes; most: connections at once.
    """

    def __init__(self, heads: Heads, inline: int, *, task: int = 65536, most: int = 4096) -> None:
        self.capacity = most
        self._memory = SocketMemory(heads.marks, 4 * most, most)
        self._table = SocketTable(heads, self._memory, inline, task, most)
        self._stops = SocketStops(self._memory, self._table)

    # What QueuePairs and RoceReassembler are for RDMA

    @property
    def flows(self) -> SocketMessages:
        """Who is at the ends of a connection."""
        return self

    @property
    def messages(self) -> np.ndarray:
        """int64[rows, M_COLUMNS]: the rows that spans speak of."""
        return self._memory.state.messages

    def endpoint_src(self, number: int) -> tuple[str, int]:
        """(address of the sender, 0)"""
        return self._table.connections[number].source, 0

    def endpoint_dst(self, number: int) -> tuple[str, int]:
        """(address of the receiver, how many connections were found before this one)"""
        connection = self._table.connections[number]
        return connection.listener[0], connection.order

    def vantage(self, number: int) -> int:
        """The vantage group that shows a connection."""
        return self._table.connections[number].vantage

    # What was found

    @property
    def connections(self) -> list[SocketConnection]:
        """Those that are open, or were until the spans of the last call."""
        return list(self._table.connections.values())

    @property
    def count(self) -> int:
        """Connections found so far."""
        return self._table.count

    @property
    def refused(self) -> int:
        """Sockets beyond what is kept."""
        return self._table.refused

    @property
    def lost(self) -> int:
        """Connections whose framing ended before they did."""
        return self._table.lost

    @property
    def resumed(self) -> int:
        """Lengths that were not captured and were found again."""
        return self._stops.resumed

    # Feeding

    def expect(self, inline: int) -> None:
        """Connections made from now on are of a release that has this `Traits.socket_inline`."""
        self._table.inline = inline

    def release(self, inline: int) -> None:
        """A job's release has this `Traits.socket_inline`: `expect` it. Open connections that were read otherwise and
        that it matters for are given up."""
        if inline == self._table.inline:
            return
        self.expect(inline)
        for connection in self.connections:
            row = self._memory.state.connections[connection.number]
            if connection.started and row[k.C_SOCKETS] and not connection.reason:
                self._table.lose(connection, "it was read as another release of NCCL writes: give the daemon "
                                 "--nccl-version before the job starts", 0)  # fmt: skip

    def feed(self, spans: Spans) -> MessageSpans:
        """Take a batch of TCP spans that `heads` has looked at; the result is good until the next call, as the batch
        is. A batch of which it has marked nothing as SOCKET may be left out."""
        self._memory.recycle()
        self._table.recycle()
        while spans.n:
            state = self._memory.state
            reason = run(state, spans.flow, spans.kind, spans.offset, spans.addr, spans.length, spans.ts,
                         spans.why, spans.n)
            if reason == k.END_OF_SPANS:
                break
            self._answer(reason, spans)
        return self._memory.spans()

    def warm_up(self) -> None:
        """Compile the kernels. For an object that is used for nothing else."""
        spans = Spans()
        spans.reserve(1)
        spans.n, spans.flow[0], spans.kind[0] = 1, 0, CLOSE
        self.feed(spans)
        take(self._memory.state, 0, 0, 0, -1, 0)

    def _answer(self, reason: int, spans: Spans) -> None:
        """Answer a stop of the kernel at a span."""
        cursor = self._memory.state.cursor
        at = int(cursor[k.AT])
        flow, ts = int(spans.flow[at]), int(spans.ts[at])
        over = True  # with this span
        if reason == k.HELLO:
            met = self._table.greet(flow, int(spans.offset[at]), int(spans.addr[at]), int(spans.length[at]))
            over = not met or spans.kind[at] != DATA
        elif reason == k.CLOSED:
            self._table.closed(flow, ts)
        elif reason == k.EARLY:
            done = int(cursor[k.DONE])
            length = int(spans.length[at]) - done
            held: Chunk = Missing(length, *spans.why[at].tolist())
            if spans.kind[at] == DATA:
                held = np.frombuffer(ctypes.string_at(int(spans.addr[at]) + done, length), np.uint8)
            self._stops.keep(int(cursor[k.SOCKET]), held, int(spans.offset[at]) + done, ts)
        else:
            over = False
            self._stops.settle(reason, ts)
        if over:
            cursor[k.AT], cursor[k.DONE] = at + 1, 0
