"""NCCL's connections from RDMA messages: data one way, CTS entries the other way, joined by the buffers they name.

A CTS entry is written by the receiver into the sender's memory and announces one message: where it may be written, how
much room there is, the sender's rank, the message's number (docs/nccl.md, "CTS entries").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flowcheck.inspect.nccl_flags import Flags, flags
from mirror.messages import Message
from reconstruct.nccl.schedule import P2P_SLOT, SIMPLE, SLOT_BYTES
from reconstruct.nccl.versions import CTS_FORMS, CtsForm

__all__ = ["ROOMS", "Connection", "Flow", "FlowKey", "Piece", "connections", "strange_rooms"]

FlowKey = tuple[int, str, str, int]
"""Vantage group, source address, destination address, destination queue pair."""
ROOMS = {*SLOT_BYTES, 2 * SLOT_BYTES[SIMPLE], P2P_SLOT}
_ENTRY_BYTES = {form.entry for form in CTS_FORMS.values()}
_MOST_REQUESTS = 8
_MOST_ROOM = 1 << 30
_SLOTS = 8


@dataclass(slots=True, eq=False)
class Piece:
    """One RDMA WRITE. length, va: -1 if its first packet was not captured; then `data` begin with packet `psn`.

    data, known: its bytes and which of them were captured; None: not kept. begin, end: capture times, ns.
    """

    psn: int
    length: int
    va: int
    rkey: int
    imm: int | None
    begin: int
    end: int
    data: np.ndarray | None
    known: np.ndarray | None
    complete: bool = True
    room: int = 0
    """As announced; 0: not known."""
    _flags: dict[int, Flags | None] = field(default_factory=dict)

    def flags(self, protocol: int) -> Flags | None:
        """The flags that it has if it was sent by LL or LL128; None: it was not."""
        if protocol not in self._flags:
            nothing = self.data is None or self.known is None
            self._flags[protocol] = Flags() if nothing else flags(protocol, self.data, self.known)  # type: ignore[arg-type]
        return self._flags[protocol]


@dataclass(slots=True, eq=False)
class Flow:
    """One direction of a queue pair; or a NET/Socket connection, whose messages have no address and are a packet each.
    gaps: (number, packets) of what was not captured and belongs to nothing known."""

    key: FlowKey
    pieces: list[Piece] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    mtu: int = 0
    """Path MTU; 0: no message was longer than a packet."""
    over_tcp: bool = False
    timed: bool = True
    """Whether messages ended when they say: over TCP what lies behind a hole, or a start that was not captured, is
    told late."""
    ordered: bool = True
    """Whether it was made before those with a higher number: over TCP one without its start is found late."""

    def add(self, message: Message, begin: int, end: int, keep: bool) -> None:
        """Take a message that is over."""
        headless = message.length is None or message.va is None
        va = -1 if message.va is None or self.over_tcp else message.va
        data = known = None
        if keep:
            data = np.frombuffer(message.data, np.uint8)
            known = np.ones(message.extent, bool)
            for offset, length in message.holes:
                known[offset : offset + length] = False
        self.pieces.append(
            Piece(
                message.first_psn, -1 if headless else message.extent, va,
                message.rkey or 0, message.imm, begin, end, data, known, message.complete,
            )
        )  # fmt: skip

    @property
    def carries_data(self) -> bool:
        """Whether a message has an immediate: entries have none."""
        return any(piece.imm is not None for piece in self.pieces)

    def finish(self) -> None:
        """Nothing more comes: put everything in order."""
        self.pieces.sort(key=lambda piece: piece.psn)
        self.gaps.sort()


@dataclass(slots=True, eq=False)
class Connection:
    """data: its queue pairs that carry messages, rising; sender_rank, rooms: as the entries say, -1 and none over TCP,
    which has none; forms: names of the entry layouts that all of them fit; cut: why nothing is known of it from some
    message on, "" if everything is."""

    data: list[Flow]
    sender_rank: int
    rooms: set[int]
    forms: set[str]
    cut: str = ""

    @property
    def over_tcp(self) -> bool:
        return self.data[0].over_tcp

    @property
    def point_to_point(self) -> bool:
        return self.rooms == {P2P_SLOT}

    @property
    def big_endian(self) -> bool | None:
        """Byte order in which immediates are the lengths of their messages; None if that does not show."""
        for flow in () if self.over_tcp else self.data:
            for piece in flow.pieces:
                if piece.complete and piece.length > 0 and piece.imm is not None:
                    other = int.from_bytes(piece.imm.to_bytes(4, "big"), "little")
                    if piece.length in (piece.imm, other) and piece.imm != other:
                        return piece.imm == piece.length
        return None

    @property
    def ends(self) -> tuple[str, str]:
        return self.data[0].key[1], self.data[0].key[2]

    @property
    def pairs(self) -> list[int]:
        """Numbers of the queue pairs."""
        return [flow.key[3] for flow in self.data]


class _Announced:
    """What a flow of entries announces."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.rooms: set[int] = set()
        self.places: dict[tuple[int, int], int] = {}
        """(rkey, address) of a slot -> its room"""
        self._sorted: list[tuple[int, int]] = []

    def room(self, va: int, rkey: int) -> int:
        """Room of the slot that holds an address; 0 if none was announced that does."""
        if len(self._sorted) != len(self.places):
            self._sorted = sorted(self.places)
        at = bisect_right(self._sorted, (rkey, va)) - 1
        if at < 0 or self._sorted[at][0] != rkey:
            return 0
        room = self.places[self._sorted[at]]
        return room if va < self._sorted[at][1] + room else 0


def _announced(flow: Flow, form: CtsForm, usual: bool = True) -> _Announced | None:
    """What a flow announces, if all its messages are entries of this form whose numbers rise. usual: with the rooms of
    NCCL's own buffer sizes."""
    found = _Announced()
    before = 0
    for piece in flow.pieces:
        if piece.imm is not None or piece.length not in (form.entry, -1):
            return None
        if piece.length < 0 or piece.data is None or piece.known is None or not piece.known.all():
            continue  # an entry that was not captured: what it announced is not known, no more

        def number(at: int, size: int, data: bytes = piece.data.tobytes()) -> int:
            return int.from_bytes(data[at : at + size], "little")

        index, room, requests = number(form.index, 8), number(form.size, form.size_bytes), number(form.requests, 4)
        if not 1 <= requests <= _MOST_REQUESTS or index <= before or not 0 < room <= _MOST_ROOM:
            return None
        if usual and room not in ROOMS:
            return None
        before = index
        found.places[number(form.rkeys, 4), number(form.address, 8)] = room
        found.ranks.add(number(form.tag, 4))
        found.rooms.add(room)
    return found if found.places and len(found.ranks) == 1 else None


def connections(flows: Iterable[Flow]) -> list[Connection]:
    """The connections of which both the messages and their announcements were captured.

    A data flow belongs to the entries that name the buffers it writes to: all of them, for an entry comes before its
    message, but for entries that were not captured.
    """
    entries: list[tuple[Flow, str, _Announced]] = []
    data: list[Flow] = []
    for flow in flows:
        if flow.carries_data:
            data.append(flow)
        elif flow.pieces and any(piece.length in _ENTRY_BYTES for piece in flow.pieces):
            entries += [
                (flow, name, found)
                for name, form in CTS_FORMS.items()
                if (found := _announced(flow, form)) is not None
            ]
    joined: dict[FlowKey, tuple[list[Flow], _Announced, set[str]]] = {}
    for flow in data:
        named = [one for one in entries if _writes_to(flow, one[0], one[2])]
        if len({one[0].key for one in named}) == 1:
            source, _, found = named[0]
            for piece in flow.pieces:
                piece.room = found.room(piece.va, piece.rkey)
            joined.setdefault(source.key, ([], found, {name for _, name, _ in named}))[0].append(flow)
    result = []
    for pairs, found, forms in joined.values():
        (rank,) = found.ranks
        result.append(Connection(sorted(pairs, key=lambda flow: flow.key[3]), rank, found.rooms, forms))
    return sorted(result, key=lambda one: (one.sender_rank, one.data[0].key))


def _writes_to(flow: Flow, entries: Flow, found: _Announced) -> bool:
    """Whether a flow's messages go where the entries say."""
    if (entries.key[0], entries.key[2], entries.key[1]) != flow.key[:3]:
        return False
    placed = [piece for piece in flow.pieces if piece.va >= 0]
    rooms = [found.room(piece.va, piece.rkey) for piece in placed if piece.length] or [
        found.room(piece.va, piece.rkey) for piece in placed
    ]
    return any(rooms) and 2 * sum(room > 0 for room in rooms) >= len(rooms)


def strange_rooms(flow: Flow) -> tuple[set[int], bool] | None:
    """(rooms, whether they are of slots used again and again) of entries that announce what is no buffer of usual
    size; None for anything else."""
    if flow.carries_data or not flow.pieces:
        return None
    for form in CTS_FORMS.values():
        found = _announced(flow, form, usual=False)
        if found is not None and not found.rooms <= ROOMS:
            entries = sum(piece.length >= 0 for piece in flow.pieces)
            return found.rooms - ROOMS, entries > len(found.places) and len(found.places) <= _SLOTS * len(found.rooms)
    return None
