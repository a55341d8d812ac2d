"""Gloo's collectives of a capture, one line for each and each sender: what it is, and the final values that were seen.

Everything is `observe.observer`'s, but that the messages' bytes are kept until their collective is over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mirror.block import Block
from mirror.flows import Flows
from mirror.frames import Datagrams
from mirror.spans import Spans
from reconstruct.decoder import ALLREDUCE, BROADCAST, KIND_NAMES, LENGTHS, POINT_TO_POINT, RAW, Plan, Request
from reconstruct.gloo import schedule
from reconstruct.gloo.events import Group
from reconstruct.gloo.lanes import split
from reconstruct.gloo.watch import WatchedDecoder
from reconstruct.memory import RawLink
from reconstruct.observe.observer import Finished, Observer

__all__ = ["KINDS", "GlooTraffic", "hashes"]

ALLGATHER = KIND_NAMES.index("all-gather")
KINDS = {name: name.replace("-", "") for name in KIND_NAMES} | {"point-to-point": "sendrecv"}
"""Names of kinds in lines for scripts."""
_ALGORITHMS = {ALLREDUCE: "ring", ALLGATHER: "ring", BROADCAST: "tree"}
_ITEM_SIZES = (4, 2, 8, 1)
_MOST_SENDS = 1 << 16

Piece = tuple[int, np.ndarray]
"""Offset and bytes."""


def hashes(pieces: list[Piece]) -> list[list[Any]]:
    """[first byte, last exclusive, sha256] of the runs that the pieces make; what comes twice counts once."""
    result: list[list[Any]] = []
    current: Any = None
    for offset, data in sorted(pieces, key=lambda piece: piece[0]):
        if not result or offset > result[-1][1]:
            current = hashlib.sha256()
            result.append([offset, offset, current])
        new = data[result[-1][1] - offset :]
        current.update(new)
        result[-1][1] += new.size
    return [[first, last, digest.hexdigest()] for first, last, digest in result]


class _KeepingDecoder(WatchedDecoder):
    """Hands over what was kept raw of each collective when it is forgotten."""

    def __init__(self, flows: Flows, budget_bytes: int) -> None:
        super().__init__(flows)
        self._held.budget.limit = budget_bytes
        self._passed: dict[tuple[str, int], list[tuple[int, RawLink]]] = {}

    def retire(self, group: str, below_tag: int) -> None:
        for name, tag in list(self._held.raw):
            if name == group and tag < below_tag:
                self._passed[name, tag] = self._links(name, tag)
        super().retire(group, below_tag)

    def take(self, group: str, tag: int, kind: int) -> list[RawLink]:
        """What each link showed of a collective that is over."""
        links = self._passed.pop((group, tag), None) or self._links(group, tag)
        return [link for kind_, link in links if kind_ == kind]

    def _links(self, group: str, tag: int) -> list[tuple[int, RawLink]]:
        return [(split(slot)[0], link) for (_, slot), link in self._held.raw.get((group, tag), {}).items()]


class GlooTraffic(Observer):
    """An `Observer` that tells each collective with the hashes of its final values, and lets others see the spans."""

    def __init__(self, spans: Callable[[Spans], None], told: Callable[[str, dict[str, Any]], None], *,
                 flows: int, reorder_bytes: int, budget_bytes: int,
                 dtypes: Callable[[int], tuple[str, int] | None]) -> None:
        """`spans`: is given every batch; `told`: every collective, with the name of its group; `budget_bytes`: the
        most bytes of messages kept; `dtypes`: (name, bytes of an element) of an all-reduce of so many bytes, where
        known."""
        super().__init__(flows, reorder_bytes)
        self.datagrams = Datagrams()
        self.segments = self._tcp.segments
        self.segments.datagrams = self.datagrams
        self.unkept = 0
        """Messages for which there was no room: their values are not told."""
        self._keeping = _KeepingDecoder(self.flows, budget_bytes)
        self._keeping.planner = self._plan
        self._decoder = self._keeping
        self._spans = spans
        self._told = told
        self._dtypes = dtypes
        self._sends: set[tuple[str, int, int]] = set()
        self._named: Group | None = None

    def name(self, group: Group) -> None:
        """Follow a group whose facts are known from elsewhere; the same one's rendezvous then changes nothing."""
        self.add_group(group)
        self._named = group

    def add_group(self, group: Group) -> None:
        if self._named is None or group.contexts != self._named.contexts:
            super().add_group(group)

    def counters(self) -> dict[str, int]:
        """Of frames and TCP reassembly."""
        return self._tcp.counters()

    def feed(self, block: Block, now: int) -> None:
        self._take(self._tcp.feed(block, now), now)

    def flush(self, now: int) -> None:
        super().flush(now)
        self._tell()

    def _take(self, spans: Spans, now: int) -> None:
        self._spans(spans)
        super()._take(spans, now)
        self._tell()

    def _plan(self, request: Request) -> Plan:
        plan = super()._plan(request)
        if request.kind == POINT_TO_POINT and request.sender >= 0:
            key = request.group, request.tag, request.sender
            if key not in self._sends and len(self._sends) < _MOST_SENDS:
                # A user's tag is used any number of times; that it was used is all that is told.
                self._sends.add(key)
                self._told(request.group, _line(request.kind, request.context, request.sender, request.tag))
        return RAW if plan is LENGTHS and request.kind in _ALGORITHMS else plan

    def _tell(self) -> None:
        for finished in self.take_finished():
            for line in self._lines(finished):
                self._told(finished.group, line)

    def _lines(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """One line for each rank that was seen to send something of the collective."""
        collective, size = finished.collective, finished.measured.size
        world = finished.world_size
        links = self._keeping.take(finished.group, collective.tag, collective.kind)
        self.unkept += sum(message.data is None for link in links for message in link.messages)
        if collective.kind == ALLGATHER:
            size = _gathered(links, world)
        known = self._dtypes(size) if collective.kind == ALLREDUCE and size is not None else None
        if known is not None and not _fits(links, size or 0, known[1], world):
            known = None
        itemsize = known[1] if known is not None else _itemsize(links, size, world)
        group = self.groups[finished.group].group
        for sender in sorted({sender for sender, _ in collective.parts}):
            pieces: list[Piece] = []
            for link in links:
                if link.sender == sender and size is not None:
                    pieces += _final(collective.kind, link, size, itemsize, world)
            line = _line(collective.kind, collective.tag % max(1, len(group.contexts)), sender, collective.tag)
            line["bytes"], line["final"] = size, hashes(pieces)
            if known is not None and size is not None:
                line["elements"], line["dtype"] = size // known[1], known[0]
            yield line


def _line(kind: int, context: int, sender: int, tag: int) -> dict[str, Any]:
    """The collective for scripts, with nothing known of its values."""
    return {
        "type": "collective",
        "library": "gloo",
        "kind": KINDS[KIND_NAMES[kind]],
        "algorithm": _ALGORITHMS.get(kind),
        "protocol": None,
        "channel": context,
        "sender_rank": sender if sender >= 0 else None,
        "ordinal": tag,
        "bytes": None,
        "elements": None,
        "dtype": None,
        "final": [],
    }


def _fits(links: list[RawLink], size: int, itemsize: int, world: int) -> bool:
    """Whether an all-reduce of `size` bytes with such elements sends what the links showed."""
    return size % itemsize == 0 and not any(link.contradicts(size, itemsize, world) for link in links)


def _itemsize(links: list[RawLink], size: int | None, world: int) -> int:
    """An element size that fits: several may, and then they put every message at the same place."""
    return next((one for one in _ITEM_SIZES if size is not None and _fits(links, size, one, world)), 1)


def _gathered(links: list[RawLink], world: int) -> int | None:
    """Bytes of an all-gather of equal blocks: each link carries N-1 of them, in two halves each; None if it is none."""
    sizes = set()
    for link in links:
        lengths = [message.length for message in link.messages]
        if link.untouched and len(lengths) == 2 * (world - 1):
            block = sum(lengths[:2])
            sizes.add(block * world if lengths == [block // 2, block - block // 2] * (world - 1) else -1)
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 0 else None


def _final(kind: int, link: RawLink, size: int, itemsize: int, world: int) -> Iterator[Piece]:
    """Final values that a link showed, where their place is proven."""
    if kind == ALLREDUCE and (link.contradicts(size, itemsize, world) or link.receiver != (link.sender - 1) % world):
        return
    whole = link.certain is None or (kind == ALLREDUCE and link.whole(size, itemsize, world))
    for index, message in enumerate(link.messages if whole else link.messages[: link.certain]):
        offset, length, final = 0, size, True
        if kind == ALLREDUCE:
            offset, length, final = schedule.message(size, itemsize, world, link.sender, index)
        elif kind == ALLGATHER:
            block, half = size // world, index % 2
            offset = (link.sender - index // 2) % world * block + half * (block // 2)
            length = block - block // 2 if half else block // 2
        if final and length == message.length and message.data is not None:
            for start, end in message.ranges():
                yield offset + start, message.data[start:end]
