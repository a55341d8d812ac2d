"""Who is who, read from the rendezvous: torch's TCPStore traffic, parsed passively.

Every rank writes one record per gloo context into the store and reads those of the others, so one mirrored port shows
the table listener address -> (process group, context, rank). Key: `<group>//cpu//<context>/<rank>`; value: host name,
socket address of the listener, one identifier per rank (docs/gloo.md, "The rendezvous").

    client:  00 magic | 0d nonce | 01 key value | 03 key | 04 key i64 | 06 n keys | ...   (u64 lengths, little endian)
    server:             nonce       -             value    i64          byte              in the order of the requests

Anything that does not parse ends the reading of that connection: nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numba import carray, njit

from mirror.flows import Flows
from mirror.spans import DATA, HOLE, OPEN, Spans
from reconstruct.gloo.events import Group
from reconstruct.landing import pointer

__all__ = ["Conversation", "StoreRecord", "StoreWatcher", "groups", "parse_record"]

HELLO = b"\x00" + struct.pack("<I", 0x3C85F7CE)
_MAX_TEXT = 1 << 16
_MAX_KEYS = 1 << 16
_MAX_BUFFER = 1 << 22
_KEY = re.compile(rb"(.*)//cpu//(\d{1,6})/(\d{1,9})$", re.DOTALL)

# What each request carries and what answers it; see torch/csrc/distributed/c10d/TCPStoreBackend.hpp.
_SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _NUM_KEYS, _DELETE, _APPEND, _MULTI_GET, _MULTI_SET, _CANCEL, _PING = (
    range(1, 14)
)
_REQUESTS = {
    0: "4", _SET: "tt", _COMPARE_SET: "ttt", _GET: "t", _ADD: "t8", _CHECK: "T", _WAIT: "T", _NUM_KEYS: "",
    _DELETE: "t", _APPEND: "tt", _MULTI_GET: "T", _MULTI_SET: "P", _CANCEL: "", _PING: "4",
}
_REPLIES = {
    _COMPARE_SET: "t", _GET: "t", _ADD: "8", _CHECK: "1", _WAIT: "1", _NUM_KEYS: "8", _DELETE: "8", _PING: "4",
    _CANCEL: "1",
}


class _Unreadable(Exception):
    """The bytes are not what the protocol allows."""


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The listener of one rank of one context of one process group. world_size is None where the record lacks it."""

    group: str
    context: int
    rank: int
    ip: str
    port: int
    world_size: int | None
    vantage: int | None = None
    """The vantage group in which it was seen, where that is kept apart."""


def parse_record(key: bytes, value: bytes) -> StoreRecord | None:
    """The record under a store key; None if key or value are of another kind."""
    match = _KEY.match(key)
    if match is None or len(value) < 8:
        return None
    host = int.from_bytes(value[:8], "little")
    start = 16 + host
    if host > _MAX_TEXT or len(value) < start + 136 or int.from_bytes(value[8 + host : start], "little") != 136:
        return None
    address = value[start : start + 128]
    family = int.from_bytes(address[:2], "little")
    if family == 2:
        ip = str(ipaddress.IPv4Address(address[4:8]))
    elif family == 10:
        six = ipaddress.IPv6Address(address[8:24])
        ip = str(six.ipv4_mapped or six)
    else:
        return None
    identifiers, rest = divmod(len(value) - start - 136, 8)
    if rest:
        return None
    port = int.from_bytes(address[2:4], "big")
    group = match[1].decode("utf-8", "replace")
    return StoreRecord(group, int(match[2]), int(match[3]), ip, port, identifiers or None)


class _Reader:
    """Takes fields from the front of a buffer; None where more bytes are needed."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.at = 0

    def fields(self, layout: str) -> list[bytes] | None:
        """The fields of `layout` (1, 4, 8 bytes; t text; T n texts; P n pairs) in one flat list."""
        found: list[bytes] = []
        at = self.at
        for what in layout:
            count = 1
            if what in "TP":
                size, at = self._number(at)
                if size is None:
                    return None
                if size > _MAX_KEYS:
                    raise _Unreadable
                count = size * (2 if what == "P" else 1)
            for _ in range(count):
                length: int | None = int(what) if what.isdigit() else None
                if length is None:
                    length, at = self._number(at)
                if length is None or at + length > len(self.buffer):
                    return None
                if length > _MAX_TEXT:
                    raise _Unreadable
                found.append(bytes(self.buffer[at : at + length]))
                at += length
        self.at = at
        return found

    def _number(self, at: int) -> tuple[int | None, int]:
        if at + 8 > len(self.buffer):
            return None, at
        number = int.from_bytes(self.buffer[at : at + 8], "little")
        if number > _MAX_BUFFER:
            raise _Unreadable
        return number, at + 8

    def drop_read(self) -> None:
        del self.buffer[: self.at]
        self.at = 0


@dataclass(slots=True)
class Conversation:
    """One connection to a store: what the client asked and what the server answered.

    Records come from SET (value in the request) and from GET and MULTI_GET (value in the reply).
    """

    records: list[StoreRecord] = field(default_factory=list)
    readable: bool = True
    _client: _Reader = field(default_factory=_Reader)
    _server: _Reader = field(default_factory=_Reader)
    _waiting: deque[tuple[int, bytes]] = field(default_factory=deque)  # (request, key) that an answer must come for
    _cancelled: bool = False  # the answer to a wait was that it is cancelled

    def feed(self, data: bytes, *, from_client: bool) -> list[StoreRecord]:
        """Take the next bytes of one direction; returns the records that they complete."""
        if not self.readable:
            return []
        before = len(self.records)
        try:
            (self._client if from_client else self._server).buffer += data
            self._requests()
            self._replies()
            if max(len(self._client.buffer), len(self._server.buffer), len(self._waiting)) > _MAX_BUFFER:
                raise _Unreadable
        except _Unreadable:
            self.stop()
        return self.records[before:]

    def stop(self) -> None:
        """Bytes are missing: nothing after them can be told."""
        self.readable = False
        self._client, self._server = _Reader(), _Reader()
        self._waiting.clear()

    def _requests(self) -> None:
        reader = self._client
        while reader.at < len(reader.buffer):
            kind = reader.buffer[reader.at]
            if kind not in _REQUESTS:
                raise _Unreadable
            reader.at += 1
            found = reader.fields(_REQUESTS[kind])
            if found is None:
                reader.at -= 1
                break
            if kind == _SET:
                self._keep(found[0], found[1])
            elif kind == _MULTI_SET:
                for key, value in zip(found[::2], found[1::2], strict=True):
                    self._keep(key, value)
            elif kind == _MULTI_GET:
                self._waiting.extend((_GET, key) for key in found)
            elif kind in _REPLIES:
                self._waiting.append((kind, found[0] if found else b""))
        reader.drop_read()

    def _replies(self) -> None:
        reader = self._server
        while self._waiting:
            kind, key = self._waiting[0]
            if kind == _CANCEL and self._cancelled:
                self._waiting.popleft()  # one byte answers both the wait and its cancelling
                self._cancelled = False
                continue
            found = reader.fields(_REPLIES[kind])
            if found is None:
                break
            self._waiting.popleft()
            if kind == _GET:
                self._keep(key, found[0])
            elif kind == _WAIT:
                self._cancelled = found[0] != b"\x00"
        reader.drop_read()

    def _keep(self, key: bytes, value: bytes) -> None:
        record = parse_record(key, value)
        if record is not None:
            self.records.append(record)


class StoreWatcher:
    """Finds store connections among all flows and reads their records.

    flows: the table of the spans' flow ids. Feed it every batch of spans. Costs Python time per store segment and per
    connection begun, nothing for other data.
    """

    def __init__(self, flows: Flows) -> None:
        self.records: dict[tuple[str, int, int], StoreRecord] = {}  # (group, context, rank)
        self._flows = flows
        self._watched = np.zeros(flows.capacity, bool)
        self._conversations: dict[int, Conversation] = {}  # client's flow
        self._expected: dict[int, int] = {}  # flow -> next stream offset

    def feed(self, spans: Spans) -> list[StoreRecord]:
        """Take a batch; returns the records found in it."""
        n = spans.n
        flow, kind, offset = spans.flow[:n], spans.kind[:n], spans.offset[:n]
        for i in np.flatnonzero((kind == DATA) & (offset == 0) & (spans.length[:n] >= len(HELLO))).tolist():
            if _bytes(int(spans.addr[i]), len(HELLO)).tobytes() == HELLO:
                self._watch(int(flow[i]))
        found: list[StoreRecord] = []
        for i in np.flatnonzero(self._watched[flow]).tolist():
            found += self._take(int(flow[i]), int(kind[i]), int(offset[i]), int(spans.addr[i]), int(spans.length[i]))
        for record in found:
            self.records[record.group, record.context, record.rank] = record
        return found

    def _watch(self, client: int) -> None:
        self._watched[client] = True
        self._conversations[client] = Conversation()
        self._expected[client] = 0
        server = int(self._flows.peer[client])
        if server >= 0:
            self._watched[server] = True
            self._expected.setdefault(server, 0)

    def _take(self, flow: int, kind: int, offset: int, address: int, length: int) -> list[StoreRecord]:
        from_client = flow in self._conversations
        conversation = self._conversations.get(flow if from_client else int(self._flows.peer[flow]))
        if kind == OPEN and offset == 0 and self._expected.get(flow):
            self._forget(flow)
            return []
        if conversation is None:
            return []
        if kind == HOLE:
            conversation.stop()
        elif kind == DATA:
            if self._expected.get(flow, 0) != offset:
                conversation.stop()
            self._expected[flow] = offset + length
            return conversation.feed(_bytes(address, length).tobytes(), from_client=from_client)
        return []

    def _forget(self, flow: int) -> None:
        """The flow id begins another stream."""
        self._watched[flow] = False
        self._conversations.pop(flow, None)
        self._expected.pop(flow, None)


@njit(cache=True)
def _bytes(address: int, count: int) -> np.ndarray:
    """A copy of `count` bytes at an address."""
    return carray(pointer(address), (count,), np.uint8).copy()


def groups(records: dict[tuple[str, int, int], StoreRecord]) -> list[Group]:
    """The process groups whose tables are complete: every rank of every context seen is known."""
    tables: dict[str, dict[int, dict[int, StoreRecord]]] = {}
    for (group, context, rank), record in records.items():
        tables.setdefault(group, {}).setdefault(context, {})[rank] = record
    result = []
    for name, contexts in tables.items():
        sizes = {r.world_size for ranks in contexts.values() for r in ranks.values() if r.world_size is not None}
        if len(sizes) != 1:
            continue
        world = sizes.pop()
        if world > 1 and all(set(ranks) == set(range(world)) for ranks in contexts.values()):
            listeners = [
                {rank: (r.ip, r.port) for rank, r in sorted(contexts[c].items())} for c in sorted(contexts)
            ]
            (seen,) = {r.vantage for ranks in contexts.values() for r in ranks.values()}
            result.append(Group(name, world, listeners, vantage=seen))
    return result
