"""What goes into the gloo decoder and what comes out: groups, plans, events (plain data)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from reconstruct.landing import Landing

__all__ = [
    "ALLREDUCE",
    "BROADCAST",
    "IGNORE",
    "KIND_NAMES",
    "LENGTHS",
    "NOT_THIS_SIZE",
    "RAW",
    "AllReduce",
    "Conflict",
    "Event",
    "FlowClosed",
    "Group",
    "Keep",
    "LinkLost",
    "Message",
    "Plan",
    "Reduced",
    "Request",
]

KIND_NAMES = (
    "point-to-point", "gather", "all-gather", "reduce", "all-reduce", "scatter", "broadcast", "barrier", "all-to-all",
)
ALLREDUCE, BROADCAST = 4, 6

NOT_THIS_SIZE = "not this size"
"""How the reason of a `LinkLost` begins when a link proves that an all-reduce is not of the size it was planned with:
its landing is poisoned, the tag is no all-reduce of that size."""

Endpoint = tuple[str, int]


@dataclass(slots=True)
class Group:
    """A process group whose traffic is wanted. Ranks are ranks in this group.

    contexts: one per gloo context: rank -> (ip, listener port). sockets, where known: exact (source ip, source port,
    destination ip, destination port) -> (sender, receiver), either direction of a connection.
    Tag t runs on context t mod len(contexts).
    """

    name: str
    world_size: int
    contexts: list[dict[int, Endpoint]]
    sockets: dict[tuple[str, int, str, int], tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A collective's first payload on one link is about to arrive: what to do with it?

    kind: 0..8, see KIND_NAMES; tag: the group's counter (kind 0: the user's tag); sender, receiver: ranks, -1 where
    unknown; length: bytes of that first payload; time: when it was captured, ns; proven: whether it is certainly the
    first one, not the first after a gap.
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
    """Two copies of bytes offset..offset+length of an all-reduce differ; its landing is poisoned."""

    group: str
    tag: int
    offset: int
    length: int
    sender: int


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
