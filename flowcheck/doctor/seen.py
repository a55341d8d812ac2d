"""What `flowcheck.doctor` judges: plain figures of a capture, and the law of which link shows what.

A ring all-reduce cuts the tensor into as many chunks as there are ranks. Gloo's link r -> r-1 shows the final values of
all of them but r-1 (docs/gloo.md), NCCL's edge out of ring index i of all but i+1 (docs/nccl.md): any two links of a
ring show everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flowcheck.doctor.nccl_chunks import Coverage
from reconstruct.nccl.schedule import missing_chunk

__all__ = ["Link", "Ring", "Seen", "Strange", "by_hosts", "chunk_counts", "gloo_missing"]


def gloo_missing(ranks: int, sender: int) -> int:
    """The chunk that gloo's link out of `sender` never shows: its receiver's, which makes that one itself."""
    return (sender - 1) % ranks


def chunk_counts(ranks: int, missing: Sequence[int]) -> list[int]:
    """By chunk: how many links show its final values; `missing`: for every link, the chunk it does not show."""
    return [sum(lacks != chunk for lacks in missing) for chunk in range(ranks)]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks. rank: the sender's, -1 if unknown; silent: announced, but no data came."""

    sender: str
    receiver: str
    rank: int = -1
    messages: int = 0
    bytes: int = 0
    silent: bool = False


def by_hosts(links: Iterable[Link]) -> list[tuple[list[str], tuple[Link, ...]]]:
    """(hosts, links) of each set of hosts that links join."""
    parts: list[tuple[set[str], list[Link]]] = []
    for link in links:
        hosts, joined, rest = {link.sender, link.receiver}, [], []
        for part in parts:
            if part[0] & hosts:
                joined += part[1]
                hosts |= part[0]
            else:
                rest.append(part)
        parts = [*rest, (hosts, [*joined, link])]
    return [(sorted(hosts), tuple(chosen)) for hosts, chosen in parts]


@dataclass(frozen=True, slots=True)
class Ring:
    """The links of one ring, or of rings between the same hosts. ranks: 0 if unknown."""

    library: str
    name: str
    links: tuple[Link, ...]
    ranks: int = 0

    @property
    def carrying(self) -> list[Link]:
        """The links whose data came."""
        return [link for link in self.links if not link.silent]

    @property
    def chunks(self) -> list[int]:
        """By chunk: how many links show it; [] if ranks or positions are not known."""
        places = {link.rank for link in self.carrying}
        if not self.ranks or -1 in places:
            return []
        law = gloo_missing if self.library == "gloo" else missing_chunk
        return chunk_counts(self.ranks, [int(law(self.ranks, place)) for place in sorted(places)])

    @property
    def whole(self) -> bool:
        """Whether every chunk passes. Without ranks: as many links into a host as out of it, two of each ring."""
        counts = self.chunks
        if counts:
            return min(counts) > 0
        out, into = self.directions
        return out == into > 0

    @property
    def tree_like(self) -> bool:
        """Whether the links are those of a tree, of which one direction is mirrored: between any two hosts that talk,
        each sends to the other. On a ring of three hosts or more nobody gets an answer from whom it sends to."""
        ways = {(link.sender, link.receiver) for link in self.links}
        hosts = {end for way in ways for end in way}
        return len(hosts) > 2 and all(way[::-1] in ways for way in ways)

    @property
    def directions(self) -> tuple[int, int]:
        """(out, in): links that carry data, away from and into the host that most of them have in common."""
        links = self.carrying
        ends = [link.sender for link in links] + [link.receiver for link in links]
        if not ends:
            return 0, 0
        host = max(sorted(set(ends)), key=ends.count)
        return sum(link.sender == host for link in links), sum(link.receiver == host for link in links)


@dataclass(frozen=True, slots=True)
class Strange:
    """A type of frame: where ("ethertype", "ip protocol", "udp port", "tcp port", "gre protocol", "inner ethertype"),
    its number, and how many frames."""

    place: str
    number: int
    frames: int


@dataclass(slots=True)
class Seen:
    """Figures of one capture. Counts are of frames unless their name says otherwise; times are in seconds."""

    source: str
    live: bool
    seconds: float = 0.0
    frames: int = 0
    bytes: int = 0
    longest: int = 0
    """Bytes of the longest frame on the wire."""
    kernel_drops: int = 0
    interface_drops: int = 0
    problems: tuple[str, ...] = ()
    """Of the source, as it tells them."""

    tcp: int = 0
    roce: int = 0
    foreign: int = 0
    """Packets on the RoCE port that are no reliable connection's."""
    unreadable: int = 0
    """Damaged, fragmented, or of a link type that is not known."""
    encapsulations: dict[str, int] = field(default_factory=dict)
    tunnels: tuple[str, ...] = ()
    declared: bool = False
    """Whether all tunnels are in declared vantage groups."""
    too_deep: int = 0
    cut_by_switch: int = 0
    cut_by_snaplen: int = 0
    snaplen: int = 0
    """Longest frame, as captured, of those that the snaplen cut."""
    fragments_lost: int = 0
    strange: tuple[Strange, ...] = ()
    """Types of frames and tunnels that were not read."""
    outermost: tuple[Strange, ...] = ()
    """What the frames are, by their outermost protocol, most first."""

    counted: int = 0
    """Frames with payload that were looked at for copies."""
    copies: int = 0
    alike: int = 0
    """Copies that may be the sender's retries."""

    tcp_holes: int = 0
    tcp_hole_bytes: int = 0
    tcp_bytes: int = 0
    """Payload captured of the streams that have holes."""
    tcp_long_holes: int = 0
    """Holes longer than the longest segment that was captured of their stream."""
    tcp_segments: int = 0
    """Segments with payload, of the streams that have holes."""
    tcp_largest: int = 0
    """Longest segment of the streams that have holes, bytes."""
    conflicts: int = 0
    roce_lost: int = 0
    """Packets."""
    roce_hole_bytes: int = 0
    roce_acks: int = 0
    roce_tails: int = 0
    """Last packets of messages of several packets."""
    roce_full: int = 0
    """Packets with data that fill a path MTU; all but the last of every message do."""

    nccl_messages: int = 0
    """Messages with data that came on NCCL's connections."""
    rings: tuple[Ring, ...] = ()
    other_links: int = 0
    """NCCL connections of send/recv."""
    coverage: tuple[Coverage, ...] = ()
    """What passes of NCCL communicators whose rings and trees are known."""
    strange_rooms: tuple[int, ...] = ()
    """Bytes that NCCL's receivers announce and that no known buffer has."""
    unplaced: bool = False
    """A communicator is known, and the links seen do not tell which of its connections they are."""
    groups: tuple[str, ...] = ()
    """Process groups by name, with their ranks."""
    unknown_ranks: bool = False
    """Gloo streams whose group is not known, because the rendezvous was not seen."""
    half_rendezvous: tuple[str, ...] = ()
    tls: int = 0
    nccl_sockets: int = 0

    @property
    def training(self) -> bool:
        """Whether there is anything of a collective library."""
        return bool(self.rings or self.groups or self.tls or self.nccl_sockets or self.other_links)
