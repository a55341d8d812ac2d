"""What step tracking asks of a collective library's decoder, and what it is told: the same for gloo and for NCCL.

A decoder follows process groups by name. A collective is known by its tag: the group's own counter, which both ends of
every link count alike. At a collective's first payload on a link the decoder asks its `planner` what to keep of it;
all-reduces of known size land in one `Landing` each, whatever the library, the number of links or their loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from mirror.loss import Evidence
from reconstruct.landing import Landing

__all__ = [
    "ALLREDUCE", "BROADCAST", "IGNORE", "KIND_NAMES", "LENGTHS", "NOT_THIS_SIZE", "POINT_TO_POINT", "RAW", "AllReduce",
    "Conflict", "Decoder", "Event", "FlowClosed", "Keep", "LinkLost", "Message", "Plan", "Planner", "Reduced",
    "Request",
]  # fmt: skip

KIND_NAMES = (
    "point-to-point", "gather", "all-gather", "reduce", "all-reduce", "scatter", "broadcast", "barrier", "all-to-all",
)
POINT_TO_POINT, ALLREDUCE, BROADCAST = 0, 4, 6

NOT_THIS_SIZE = "not this size"
"""How the reason of a `LinkLost` begins when a link proves that an all-reduce is not of the size it was planned with:
its landing is poisoned, the tag is no all-reduce of that size."""


@dataclass(frozen=True, slots=True)
class Request:
    """A collective's first payload on one link is about to arrive: what to do with it?

    context: gloo's context or NCCL's channel; kind: 0..8, see KIND_NAMES; tag: the group's counter (kind 0: the user's
    tag); sender, receiver: ranks, -1 where unknown; length: bytes of that first payload; time: when it was captured,
    ns; proven: whether it is certainly the first one, not the first after a gap.
    """

    group: str
    context: int
    tag: int
    kind: int
    sender: int
    receiver: int
    length: int
    time: int = 0
    proven: bool = True


class Keep(Enum):
    """Plans without parameters."""

    IGNORE = "ignore"    # follow the framing, keep nothing
    RAW = "raw"          # keep the bytes of every message: sizes that are not known yet, broadcasts
    LENGTHS = "lengths"  # report the messages without their bytes


IGNORE, RAW, LENGTHS = Keep.IGNORE, Keep.RAW, Keep.LENGTHS


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Place the final values of an all-reduce of `size` bytes with elements of `itemsize` bytes."""

    size: int
    itemsize: int


Plan = Keep | AllReduce
Planner = Callable[[Request], Plan]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Every byte of an all-reduce is in its landing."""

    group: str
    tag: int
    landing: Landing


@dataclass(frozen=True, slots=True)
class Message:
    """One finished message of a collective planned RAW or LENGTHS.

    index: which message of the collective on this link, from 0; certain only if `proven`, else counted since framing
    was found again. data: uint8[length] if RAW (bytes of holes are garbage), else None. complete: no byte is missing.
    """

    group: str
    tag: int
    kind: int
    sender: int
    receiver: int
    index: int
    length: int
    data: np.ndarray | None
    complete: bool
    proven: bool = True


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two copies of bytes offset..offset+length of an all-reduce differ; its landing is poisoned.

    sender: of the link that showed the further copy; source: what was being read when it was found, "" if nothing.
    """

    group: str
    tag: int
    offset: int
    length: int
    sender: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """What the link still carries of these tags cannot be used; what was placed before stays."""

    group: str
    sender: int
    receiver: int
    tags: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FlowClosed:
    """A link of the group has ended. reset: by RST."""

    group: str
    sender: int
    receiver: int
    reset: bool


Event = Reduced | Message | Conflict | LinkLost | FlowClosed


class Decoder(Protocol):
    """Groups by name; one that was not added raises KeyError, but for `remove_group` and `landing`."""

    planner: Planner
    evidence: Evidence
    """What the sources lost, for `causes`."""

    def remove_group(self, name: str) -> None:
        """Forget a group and everything held for it; unknown names are ignored."""

    def links(self, group: str) -> set[tuple[int, int]]:
        """(sender, receiver) of every link of the group that was seen, also if it has ended since."""

    def coverage(self, group: str) -> float:
        """What part of an all-reduce's final values the links seen so far can show, 0..1."""

    def max_tag(self, group: str) -> int:
        """Highest tag of any collective seen in the group, -1 if none."""

    def decided(self, group: str) -> int:
        """Every collective with a lower tag that was seen is known for what it is. From this tag on messages may wait
        of which not even the number of their collectives is known."""

    def waiting(self, group: str) -> int:
        """Bytes of the messages that wait from `decided` on, at least: what is larger is not among them."""

    def gaps(self, group: str) -> dict[tuple[int, int], int]:
        """(context, sender) of each open link -> how often it lost what numbers its messages.

        The all-reduce with tag t shows on the links of context t mod the group's contexts, NCCL's on those of channel
        0: a link whose number stays the same has shown every one of the time between.
        """

    def newest(self, group: str) -> dict[tuple[int, int], int]:
        """The links of `gaps` -> the highest tag that each has shown: it may stand still while others go on."""

    def can_begin(self, request: Request, size: int, itemsize: int) -> bool:
        """Whether what was first seen of a collective on a link can be an all-reduce of that size."""

    def landing(self, group: str, tag: int) -> Landing | None:
        """The landing of an all-reduce, complete or not; valid until it is retired."""

    def causes(self, group: str, tag: int, size: int = 0) -> list[tuple[int, int, str]]:
        """Why bytes of an all-reduce are missing: (byte offset, length, one of `mirror.loss.CAUSES`), in order, of
        exactly the holes of its landing; of one without a landing of all `size` bytes."""

    def fits(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """Whether `place` with that size would place an all-reduce, or has. Several sizes may fit: NCCL fills up the
        last units of its messages."""

    def may_fit(self, group: str, tag: int, size: int, itemsize: int) -> bool:
        """Whether a collective that was planned RAW, or of which no payload was seen yet, may still prove to be an
        all-reduce of that size: something of it was seen, which does not show that (`fits`), but nothing of which
        speaks against it."""

    def place(self, group: str, tag: int, size: int, itemsize: int) -> Landing | None:
        """Place an all-reduce that was planned RAW, now that its size is known; None if the size does not fit."""

    def settled(self, group: str, tag: int, behind: int) -> bool:
        """Whether no link can bring anything more of an all-reduce. What begins when it is over has a tag from `behind`
        on: a link that has shown that is done with it."""

    def retire(self, group: str, below_tag: int) -> None:
        """Free everything held of collectives with tags below `below_tag`."""

    @property
    def counters(self) -> dict[str, int]:
        """Cumulative counts, and bytes held now (`memory_bytes`)."""
