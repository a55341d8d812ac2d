"""Whole RDMA messages kept in memory: for `inspect` on a few files and for tests; never on the gradient path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numba import njit

from mirror.memory import address_of, load_u8, store_u8
from mirror.roce_spans import BEGIN, DATA, DUPLICATE, END, HOLE, VOID, MessageSpans
from mirror.roce_state import M_FIRST, M_FLOW, M_IMM, M_KIND, M_LENGTH, M_RKEY, M_VA
from mirror.roce_wire import ATOMIC, READ, SEND, WRITE
from mirror.streams import runs, up_to

__all__ = ["Message", "MessageRecorder", "Reassembler"]

_MISSING, _PRESENT, _DIFFERS = 0, 1, 2
_NAMES = {SEND: "SEND", WRITE: "RDMA_WRITE", READ: "RDMA_READ", ATOMIC: "ATOMIC"}


@dataclass(slots=True, eq=False)
class Message:
    """One SEND, RDMA WRITE or RDMA READ. A READ's flow is that of its request, its bytes are those of the response."""

    flow: int
    source: str
    destination: str
    queue_pair: int
    """Destination queue pair number."""
    vantage: int
    first_psn: int
    """64-bit number of the first packet (of a headless message: of the first one that was captured)."""
    kind: int
    """`mirror.roce_wire`: SEND, WRITE, READ, ATOMIC."""
    va: int | None
    """Virtual address at the destination; None for a SEND and for a headless message. `rkey` likewise."""
    rkey: int | None
    length: int | None
    """Bytes of the message; None while unknown (a SEND whose last packet was not captured)."""
    headless: bool
    """The first packet was never captured: where in the message the bytes lie is known only to each other."""
    imm: int | None = None
    """Immediate data, the four bytes read big endian."""
    complete: bool = False
    ended: bool = False
    """The end was told: nothing more is expected."""
    lost: int = 0
    """Bytes that were captured but not kept, because the recorder's limit was reached; they count as holes."""
    _bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    _marks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    _extent: int = 0

    @property
    def opcode(self) -> str:
        """SEND, SEND_WITH_IMM, RDMA_WRITE, RDMA_WRITE_WITH_IMM, RDMA_READ or ATOMIC."""
        return _NAMES[self.kind] + ("_WITH_IMM" if self.imm is not None else "")

    @property
    def extent(self) -> int:
        """Bytes of the message, as far as it is known."""
        return self._extent if self.length is None else self.length

    @property
    def data(self) -> bytes:
        """The message; missing bytes are zero, conflicting ones the first copy."""
        return up_to(self._bytes, self.extent).tobytes()

    @property
    def present(self) -> bytes:
        """The bytes that are not missing, in order."""
        return self._bytes[self._marks != _MISSING].tobytes()

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes that are present, in order."""
        return hashlib.sha256(self.present).hexdigest()

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(offset, length) of every range that is missing, joined and in order."""
        return runs(up_to(self._marks, self.extent) == _MISSING)

    @property
    def conflicts(self) -> list[tuple[int, int]]:
        """(offset, length) of every range of which two copies differ, joined and in order."""
        return runs(self._marks == _DIFFERS)


@njit(cache=True, nogil=True)
def _take(kind: np.ndarray, message: np.ndarray, offset: np.ndarray, addr: np.ndarray, length: np.ndarray, n: int,
          where: np.ndarray) -> None:
    """Put DATA and DUPLICATE into the buffers; `where`: int64[rows, 3], addresses of bytes and marks, size."""
    for i in range(n):
        if kind[i] != DATA and kind[i] != DUPLICATE:
            continue
        content, marks, size = where[message[i], 0], where[message[i], 1], where[message[i], 2]
        for j in range(offset[i], min(offset[i] + length[i], size)):
            value = load_u8(addr[i] + j - offset[i])
            if load_u8(marks + j) == _MISSING:
                store_u8(content + j, value)
                store_u8(marks + j, _PRESENT)
            elif load_u8(content + j) != value:
                store_u8(marks + j, _DIFFERS)


class Ends(Protocol):
    """Who is at the ends of a flow: `mirror.roce.QueuePairs`, or whatever stands for it."""

    def endpoint_src(self, flow: int) -> tuple[str, int]:
        """(address of the sender, whatever)"""

    def endpoint_dst(self, flow: int) -> tuple[str, int]:
        """(address of the receiver, number of the queue pair)"""

    def vantage(self, flow: int) -> int:
        """The vantage group that shows it."""


class Reassembler(Protocol):
    """What makes the spans: `mirror.roce.RoceReassembler`, or whatever stands for it."""

    @property
    def messages(self) -> np.ndarray:
        """int64[rows, M_COLUMNS]: the rows that spans speak of."""

    @property
    def flows(self) -> Ends:
        """The table whose ids the spans carry."""


class MessageRecorder:
    """Keeps every message whole. `messages` lists them in the order in which they began."""

    def __init__(self, roce: Reassembler, *, limit: int = 1 << 30) -> None:
        """`limit`: the most bytes kept, over all messages; what comes later counts as missing."""
        self.messages: list[Message] = []
        self.lost: list[tuple[int, int, int]] = []
        """(flow, 64-bit number, packets) of what is missing and belongs to no known message."""
        self.told: list[tuple[Message, int, int]] = []
        """(message, offset, length) of every HOLE in a message as it was told; a late retry may have filled it."""
        self._roce = roce
        self._rows: dict[int, Message] = {}
        self._where = np.zeros((0, 3), np.int64)
        self._room = limit

    def feed(self, spans: MessageSpans) -> None:
        """Take spans; to be called before the next call of the reassembler."""
        n = spans.n
        kind, row = spans.kind[:n], spans.message[:n]
        rows = self._roce.messages
        if len(self._where) < len(rows):
            self._where = np.concatenate((self._where, np.zeros((len(rows) - len(self._where), 3), np.int64)))
        for i in np.flatnonzero(kind == BEGIN).tolist():
            self._begin(int(row[i]), rows[row[i]], bool(spans.length[i] == 0))
        data = np.flatnonzero((kind == DATA) | (kind == DUPLICATE))
        touched, inverse = np.unique(row[data], return_inverse=True)
        extent = np.zeros(len(touched), np.int64)
        np.maximum.at(extent, inverse, spans.offset[data] + spans.length[data])
        for slot, end in zip(touched.tolist(), extent.tolist(), strict=True):
            self._grow(slot, end)
        new = data[kind[data] == DATA]
        beyond = spans.offset[new] + spans.length[new] - self._where[row[new], 2]
        for i in np.flatnonzero(beyond > 0).tolist():
            self._rows[int(row[new[i]])].lost += int(min(beyond[i], spans.length[new[i]]))
        _take(kind, row, spans.offset, spans.addr, spans.length, n, self._where)
        for i in np.flatnonzero((kind == END) | (kind == VOID) | (kind == HOLE)).tolist():
            self._note(spans, i)
        for slot in np.unique(row[row >= 0]).tolist():
            self._describe(self._rows[slot], rows[slot])

    def _begin(self, slot: int, row: np.ndarray, headless: bool) -> None:
        flows = self._roce.flows
        flow = int(row[M_FLOW])
        source, (destination, pair) = flows.endpoint_src(flow)[0], flows.endpoint_dst(flow)
        addressed = not headless and int(row[M_KIND]) in (WRITE, READ)
        message = Message(flow, source, destination, pair, flows.vantage(flow), int(row[M_FIRST]), int(row[M_KIND]),
                          int(row[M_VA]) & (1 << 64) - 1 if addressed else None,
                          int(row[M_RKEY]) if addressed else None, None, headless)
        self.messages.append(message)
        self._rows[slot] = message
        self._where[slot] = 0

    def _describe(self, message: Message, row: np.ndarray) -> None:
        message.length = int(row[M_LENGTH]) if row[M_LENGTH] >= 0 else None
        message.imm = int(row[M_IMM]) if row[M_IMM] >= 0 else None

    def _note(self, spans: MessageSpans, i: int) -> None:
        slot, kind, length = int(spans.message[i]), int(spans.kind[i]), int(spans.length[i])
        if slot < 0:
            self.lost.append((int(spans.flow[i]), int(spans.offset[i]), length))
            return
        message = self._rows[slot]
        if kind == HOLE:
            self.told.append((message, int(spans.offset[i]), length))
        elif kind == END:
            message.ended = True
            message.complete = message.complete or length == 1
        else:
            self.messages.remove(message)

    def _grow(self, slot: int, end: int) -> None:
        message = self._rows[slot]
        message._extent = max(message._extent, end)
        size = message._bytes.size
        if end > size:
            more = min(max(end, 2 * size) - size, self._room)
            self._room -= more
            message._bytes = np.concatenate((message._bytes, np.zeros(more, np.uint8)))
            message._marks = np.concatenate((message._marks, np.zeros(more, np.uint8)))
        self._where[slot] = address_of(message._bytes), address_of(message._marks), message._bytes.size
