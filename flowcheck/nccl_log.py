"""What NCCL's own log says of its communicators: the lines of `NCCL_DEBUG=INFO NCCL_DEBUG_FILE=...`, one file per rank.

    NCCL version 2.19.4+cuda12.1                                        the release (rank 0)
    Channel 00/04 :    0   1   2   3                                    ring order of a channel, cut when long (rank 0)
    Ring 00 : 3 -> 0 -> 1                                               this rank's neighbours on a ring
    Trees [0] 1/8/-1->0->-1 [1] ...                                     its children and its parent on each channel
    4 coll channels, 0 collnet channels, 16 nvls channels, ...          numbers of channels
    NVLS Head  0:  0  8                                                 a head's rank on each node, cut when long
    Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/2                     what a connection runs over
    NCCL_BUFFSIZE set by environment to 4194304.                        also for what a configuration file sets

Source: NCCL's `src/init.cc`, `src/graph/rings.cc`, `src/graph/connect.cc`, `src/transport/net.cc`. No files here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from reconstruct.nccl.refusals import Refusal, from_log, from_network

__all__ = ["Communicator", "Log", "Node", "parse", "ring_of"]

Node = tuple[tuple[int, ...], int, int]
"""A rank on a channel's tree: children, the rank itself, its parent; -1 where there is none."""

_LINE = re.compile(r"(?:^|\s)\S+?:\d+:(\d+) \[[^\]]*\] NCCL INFO (.*)$")
_BARE = re.compile(r"NCCL INFO (.*)$")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?\S*)")
_INIT = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) nranks (\d+)\b.* Init (START|COMPLETE)")
_ORDER = re.compile(r"Channel (\d+)/(\d+)\s*:((?:\s+\d+)+)\s*$")
_RING = re.compile(r"Ring (\d+) : (-?\d+) -> (\d+) -> (-?\d+)")
_TREE = re.compile(r"\[(\d+)\] (-?\d+(?:/-?\d+){2})->(\d+)->(-?\d+)(?=\s|$)")
_NUMBERS = re.compile(r"(\d+) coll channels,.*?(\d+) nvls channels")
_HEAD = re.compile(r"NVLS Head\s+(\d+)\s*:((?:\s+\d+)+)\s*$")
_VIA = re.compile(r"Channel \d+/\d+ : \d+\[\w+\] -> \d+\[\w+\] \[(?:send|receive)\] via NET/([\w ]+?)/\d")
_SET = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")


@dataclass(slots=True)
class Communicator:
    """One communicator as one rank's log shows it. rank, world_size: -1 where no line tells them."""

    rank: int = -1
    world_size: int = -1
    channels: int = 0
    nvls_channels: int = 0
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By channel: the ring from rank 0 on, as far as the line goes."""
    neighbours: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By channel: (previous, next) rank on the ring."""
    trees: dict[int, Node] = field(default_factory=dict)
    heads: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For the rank that gathers them; `from_json` takes it back."""
        return {
            "rank": self.rank, "world_size": self.world_size, "channels": self.channels,
            "nvls_channels": self.nvls_channels, "orders": list(self.orders.items()),
            "neighbours": list(self.neighbours.items()), "trees": list(self.trees.items()),
            "heads": list(self.heads.items()),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Communicator:
        return cls(
            data["rank"], data["world_size"], data["channels"], data["nvls_channels"],
            {channel: tuple(order) for channel, order in data["orders"]},
            {channel: (before, after) for channel, (before, after) in data["neighbours"]},
            {channel: (tuple(children), rank, parent) for channel, (children, rank, parent) in data["trees"]},
            {head: tuple(ranks) for head, ranks in data["heads"]},
        )  # fmt: skip


@dataclass(slots=True)
class Log:
    """One process's log. networks: what connections to other nodes run over, as in IB or Socket; settings: NCCL_*
    variables and their values; lines: those that show that the job cannot be read."""

    version: str | None = None
    communicators: list[Communicator] = field(default_factory=list)
    networks: set[str] = field(default_factory=set)
    settings: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def refused(self) -> list[tuple[str, Refusal]]:
        """(what shows it, why) for everything in the log that cannot be read."""
        found = [(f"NET/{name} in NCCL's log", from_network(name)) for name in sorted(self.networks)]
        found += [(f"NCCL's log says {line!r}", from_log(line)) for line in self.lines]
        return [(seen, refusal) for seen, refusal in found if refusal is not None]

    def of_group(self, rank: int, world_size: int) -> list[Communicator]:
        """The communicators that may be those of a group of this size in which this process has this rank."""
        return [
            one
            for one in self.communicators
            if one.world_size in (-1, world_size) and one.rank in (-1, rank) and (one.neighbours or one.orders)
        ]


def parse(lines: Iterable[str]) -> Log:
    """Read a log. Lines that say nothing here are passed over.

    A communicator's lines are those of the thread that makes it, from `Init START` to `Init COMPLETE`; a log without
    such lines is that of one communicator.
    """
    log = Log()
    threads: dict[str, Communicator] = {}
    for line in lines:
        version = _VERSION.search(line)
        if version is not None and log.version is None:
            log.version = version[1]
        found = _LINE.search(line)
        bare = _BARE.search(line) if found is None else None
        if found is None and bare is None:
            continue
        thread, text = (found[1], found[2]) if found is not None else ("", bare[1] if bare is not None else "")
        begun = _INIT.search(text)
        if begun is not None:
            if begun[4] == "START":
                threads[thread] = Communicator(int(begun[2]), int(begun[3]))
                log.communicators.append(threads[thread])
            else:
                threads.pop(thread, None)
            continue
        via, setting = _VIA.search(text), _SET.search(text)
        if from_log(text) is not None:
            log.lines.append(text.strip())
        if via is not None:
            log.networks.add(via[1])
        elif setting is not None:
            log.settings[setting[1]] = setting[2]
        elif _says(text):
            if thread not in threads:
                threads[thread] = Communicator()
                log.communicators.append(threads[thread])
            _take(threads[thread], text)
    return log


def _says(text: str) -> bool:
    return bool(
        text.startswith("Trees ")
        or _ORDER.search(text)
        or _RING.search(text)
        or _NUMBERS.search(text)
        or _HEAD.search(text)
    )


def _take(communicator: Communicator, text: str) -> None:
    if text.startswith("Trees "):
        for channel, children, rank, parent in _TREE.findall(text):
            node = (tuple(int(child) for child in children.split("/")), int(rank), int(parent))
            communicator.trees[int(channel)] = node
            communicator.rank = int(rank)
    elif order := _ORDER.search(text):
        communicator.orders[int(order[1])] = tuple(int(rank) for rank in order[3].split())
        communicator.channels = max(communicator.channels, int(order[2]))
    elif ring := _RING.search(text):
        communicator.neighbours[int(ring[1])] = (int(ring[2]), int(ring[4]))
        communicator.rank = int(ring[3])
    elif numbers := _NUMBERS.search(text):
        communicator.channels, communicator.nvls_channels = int(numbers[1]), int(numbers[2])
    elif head := _HEAD.search(text):
        communicator.heads[int(head[1])] = tuple(int(rank) for rank in head[2].split())


def ring_of(channel: int, members: list[Communicator]) -> tuple[int, ...] | None:
    """A channel's ring from rank 0 on, out of every rank's log, by rank; None if the logs do not tell it.

    Raises ValueError if they contradict each other.
    """
    told = {one.orders[channel] for one in members if len(one.orders.get(channel, ())) == len(members)}
    follows = {rank: one.neighbours[channel][1] for rank, one in enumerate(members) if channel in one.neighbours}
    if len(follows) == len(members):
        order, at = [0], follows[0]
        while at != 0 and len(order) < len(members):
            order.append(at)
            at = follows.get(at, 0)
        if at != 0:
            raise ValueError(f"channel {channel}: the ranks' neighbours close no ring of {len(members)} ranks")
        told.add(tuple(order))
    for order_ in told:
        if sorted(order_) != list(range(len(members))):
            raise ValueError(f"channel {channel}: {order_} is no ring of {len(members)} ranks")
    if len(told) > 1:
        raise ValueError(f"channel {channel}: two ring orders, {' and '.join(map(str, sorted(told)))}")
    return told.pop() if told else None
