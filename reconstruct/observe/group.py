"""What was seen of one process group: links, collectives by kind, sizes, loss. Counts only; `Observer` feeds it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from reconstruct.decoder import ALLREDUCE, KIND_NAMES, LinkLost, Request
from reconstruct.gloo.events import Group
from reconstruct.gloo.watch import SeenMessage
from reconstruct.observe.collective import Collective, Link, Measured

__all__ = ["Finished", "LinkSeen", "ObservedGroup"]

_BEHIND = 16
"""Tags that a context must be ahead of a collective to call it over: as many as the decoder takes."""
_RETIRE_EVERY = 8
_MOST_SIZES = 256
_MOST_TAGS = 1 << 16


@dataclass(frozen=True, slots=True)
class Finished:
    """A collective that is over. passed: its group went on far beyond it; else the capture or the connections ended
    with it, and its list of messages may be cut short."""

    group: str
    world_size: int
    collective: Collective
    measured: Measured
    passed: bool


@dataclass(slots=True)
class LinkSeen:
    """One link's totals: stream bytes, bytes never captured, collectives of which messages were lost, and why."""

    bytes: int = 0
    hole_bytes: int = 0
    lost: int = 0
    reason: str = ""


@dataclass(slots=True)
class _Kind:
    collectives: int = 0
    first_tag: int = -1
    last_tag: int = -1
    messages: int = 0
    payload: int = 0
    missing: int = 0

    def begin(self, tag: int) -> None:
        self.collectives += 1
        self.first_tag = tag if self.first_tag < 0 else min(self.first_tag, tag)
        self.last_tag = max(self.last_tag, tag)


@dataclass(slots=True)
class ObservedGroup:
    """live: the decoder follows the group; when it ends, `coverage` keeps what its links could show."""

    group: Group
    live: bool = True
    coverage: float = 0.0
    links: dict[Link, LinkSeen] = field(default_factory=dict)
    sizes: Counter[int] = field(default_factory=Counter)
    reduced: int = 0
    unsized: int = 0
    final_bytes: int = 0
    shown_bytes: int = 0
    _kinds: dict[int, _Kind] = field(default_factory=dict)
    _open: dict[tuple[int, int], Collective] = field(default_factory=dict)  # (tag, kind)
    _user_tags: set[int] = field(default_factory=set)
    _newest: int = -1
    _retired: int = 0

    # Collectives

    def begin(self, request: Request) -> None:
        """A collective's first payload on a link is about to arrive."""
        self._collective(request.kind, request.tag).part((request.sender, request.receiver))
        self._newest = max(self._newest, request.tag)

    def point_to_point(self, request: Request) -> None:
        """Only that a user's tag was used: its messages are not followed."""
        if request.tag not in self._user_tags and len(self._user_tags) < _MOST_TAGS:
            self._user_tags.add(request.tag)
            self._kinds.setdefault(0, _Kind()).begin(request.tag)

    def add(self, message: SeenMessage) -> None:
        self._collective(message.kind, message.tag).add(message)
        kind = self._kinds[message.kind]
        kind.messages += 1
        kind.payload += message.length
        kind.missing += message.missing

    def lost(self, event: LinkLost) -> None:
        """Messages of these tags are gone from a link."""
        link = (event.sender, event.receiver)
        seen = self.links.setdefault(link, LinkSeen())
        seen.reason = event.reason
        for tag in event.tags:
            for kind in range(1, len(KIND_NAMES)):
                collective = self._open.get((tag, kind))
                if collective is not None and link in collective.parts:
                    collective.parts[link].broken = True
                    seen.lost += 1

    def _collective(self, kind: int, tag: int) -> Collective:
        collective = self._open.get((tag, kind))
        if collective is None:
            collective = self._open[tag, kind] = Collective(kind, tag)
            self._kinds.setdefault(kind, _Kind()).begin(tag)
        return collective

    def retire_below(self) -> int | None:
        """The tag below which the decoder may forget, when it is time to."""
        below = self._floor
        if below - self._retired < _RETIRE_EVERY:
            return None
        self._retired = below
        return below

    @property
    def _floor(self) -> int:
        return self._newest - _BEHIND * max(1, len(self.group.contexts))

    def close_passed(self) -> list[Finished]:
        """Collectives that the group has left far behind."""
        over = sorted(key for key in self._open if key[0] < self._floor)
        return [self._close(key, passed=True) for key in over]

    def close_all(self) -> list[Finished]:
        """Nothing more comes."""
        return [self._close(key, passed=False) for key in sorted(self._open)]

    def _close(self, key: tuple[int, int], *, passed: bool) -> Finished:
        collective = self._open.pop(key)
        measured = collective.measure(self.group.world_size)
        if collective.kind == ALLREDUCE:
            self.reduced += 1
            if measured.size is None:
                self.unsized += 1
            else:
                self.final_bytes += measured.size
                self.shown_bytes += measured.shown
                if measured.size in self.sizes or len(self.sizes) < _MOST_SIZES:
                    self.sizes[measured.size] += 1
        return Finished(self.group.name, self.group.world_size, collective, measured, passed)

    # Report

    def report(self, coverage: float, links: dict[Link, LinkSeen]) -> dict[str, Any]:
        """JSON-ready. coverage: what the links can show of an all-reduce, 0..1; links: with the bytes of now."""
        ring = self.group.world_size
        return {
            "name": self.group.name,
            "world_size": self.group.world_size,
            "contexts": len(self.group.contexts),
            "live": self.live,
            "coverage": coverage,
            "shown": self.shown_bytes / self.final_bytes if self.final_bytes else None,
            "allreduces": {
                "finished": self.reduced,
                "without_size": self.unsized,
                "sizes": sorted(([size, count] for size, count in self.sizes.items()), reverse=True),
            },
            "in_progress": len(self._open),
            "kinds": {
                KIND_NAMES[number]: {
                    "collectives": kind.collectives,
                    "first_tag": kind.first_tag,
                    "last_tag": kind.last_tag,
                    # Messages with a user's tag are not followed.
                    "messages": kind.messages if number else None,
                    "payload_bytes": kind.payload if number else None,
                    "missing_bytes": kind.missing if number else None,
                }
                for number, kind in sorted(self._kinds.items())
            },
            "links": [
                {
                    "sender": sender,
                    "receiver": receiver,
                    "ring": sender >= 0 and receiver == (sender - 1) % ring,
                    "bytes": seen.bytes,
                    "hole_bytes": seen.hole_bytes,
                    "lost": seen.lost,
                    "reason": seen.reason,
                }
                for (sender, receiver), seen in sorted(links.items())
            ],
        }
