"""What NCCL tells about itself in plain TCP while a job starts: ranks, nodes, rings, trees, queue pairs.

Every connection begins with a u64 magic number and a u32 type. Type 1, with a random number for each communicator, is
the bootstrap: messages of an int32 length and as many bytes. Type 4 sets up one NET/IB connection: a block each way.
Seen only where the network of NCCL_SOCKET_IFNAME is mirrored; what was not seen or does not parse is left out of
`Setup`, nothing is filled in. Offsets beyond those of 2.19 come from NCCL's source (docs/nccl.md, "Set-up").
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from reconstruct.nccl.graph_records import GraphRecord, chains, heads, rings
from reconstruct.nccl.heads import BOOTSTRAP, HELLO, MAGIC, NET_IB
from reconstruct.nccl.tree import node_numbers
from reconstruct.nccl.versions import ConnectionBlock, GraphInfo, Version, block_versions, parse, traits

__all__ = ["Listener", "Member", "NetConnection", "SetUpStream", "Setup", "Span", "may_begin", "read_setup"]

Endpoint = tuple[str, int]
Span = tuple[Version, Version]

_ADDRESS = 28
MOST_MESSAGE = 1 << 20
"""Bytes of a message of the bootstrap."""
_MOST_RANKS = 1 << 16
_MOST_CLAIMED = 1 << 20  # ranks of all communicators together: a few bytes can claim the most of each
_MOST_MESSAGES = 1 << 19  # of all streams together: of four bytes and one each there could be millions
_KINDS = {0: "p2p", 1: "ring", 2: "tree", 4: "nvls"}

_RELEASES = ("2.18.0", "2.19.0", "2.20.0", "2.21.0", "2.22.0", "2.23.0", "2.24.0", "2.25.0", "2.26.0", "2.27.0",
             "2.28.0", "2.29.2", "2.29.7", "2.30.0")
_GRAPHS: dict[int, list[GraphInfo]] = {}
_BLOCKS: list[tuple[int, ConnectionBlock]] = []
for _release in _RELEASES:
    _known = traits(_release)
    _forms = _GRAPHS.setdefault(_known.graph.size, [])
    if _known.graph not in _forms:
        _forms.append(_known.graph)
    # From 2.24 on each end sends a list of its devices before its block.
    _lead = 37 if _known.version >= (2, 30, 0) else 20 if _known.version >= (2, 24, 0) else 0
    if _known.block is not None and (_lead, _known.block) not in _BLOCKS:
        _BLOCKS.append((_lead, _known.block))


@dataclass(slots=True)
class SetUpStream:
    """The first bytes of both directions of a connection, without holes."""

    source: Endpoint
    destination: Endpoint
    forward: bytearray = field(default_factory=bytearray)
    backward: bytearray = field(default_factory=bytearray)
    over: bool = False
    """Whether an end has closed it."""


@dataclass(frozen=True, slots=True)
class NetConnection:
    """One NET/IB connection: data pass from `sender` to `receiver`, "clear to send" entries the other way."""

    versions: tuple[Span, ...]
    """(first, last) release that has blocks of this size."""
    listener: Endpoint
    """Where the receiver accepted it."""
    sender_qps: tuple[int, ...]
    """Destination of CTS entries and ACKs. Number j belongs to number j of `receiver_qps`."""
    receiver_qps: tuple[int, ...]
    """Destination of data."""
    sender_gid: str
    receiver_gid: str
    fifo_address: int
    """Array of CTS entries in the sender's memory."""
    fifo_rkey: int
    kind: str = ""
    """"ring", "tree", "nvls" or "p2p", by the graph that made it; "": not known."""
    channel: int = -1
    sender: int = -1
    receiver: int = -1


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a rank accepts one connection of its network, and which: fields as in `NetConnection`."""

    end: Endpoint
    kind: str
    channel: int
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class Member:
    """One communicator. What was not seen of it is empty or 0."""

    magic: int
    world_size: int
    versions: tuple[Span, ...]
    """Releases that have graph records of this size."""
    addresses: tuple[Endpoint | None, ...] = ()
    """By rank: where it listens for other ranks' messages."""
    nodes: tuple[int, ...] = ()
    """By rank; () unless every rank's host is known."""
    rings: tuple[tuple[int, ...], ...] = ()
    """By search channel of the ring, ranks from rank 0 on: channel c uses ring c mod len(rings)."""
    tree_pattern: int = 0
    search_channels: int = 0
    chains: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """As in NcclGroup, as far as the network's links need it."""
    heads: tuple[tuple[int, ...], ...] = ()
    headless: bool = False
    """Whether the records of all ranks say that there are no NVLS heads."""
    wired: tuple[tuple[int, int, int], ...] = ()
    """(sender, receiver, channels) of every pair whose ring connections were seen being made."""
    listeners: tuple[Listener, ...] = ()
    """Those that were named once, by address."""
    connections: tuple[NetConnection, ...] = ()
    over: bool = False
    """Whether the connections around the ring of ranks, which live as long as the communicator, were closed."""

    @property
    def channels(self) -> int:
        """How many there are: a node is on every ring, so one whose ring connections were all seen being made shows
        it. 0: not known."""
        rings = self.rings or (((0, 1),) if self.world_size == 2 else ())
        nodes = self.nodes or ((0, 1) if self.world_size == 2 else ())
        seen = {(sender, receiver): count for sender, receiver, count in self.wired}
        counts = set()
        for node in set(nodes) if rings else ():
            into = {
                (ring[i - 1], rank) for ring in rings for i, rank in enumerate(ring)
                if nodes[rank] == node != nodes[ring[i - 1]]
            }  # fmt: skip
            if into and into <= seen.keys():
                counts.add(sum(seen[pair] for pair in into))
        return counts.pop() if len(counts) == 1 else 0

    @property
    def least_channels(self) -> int:
        """A lower bound of `channels`; 0: none seen."""
        return max((count for _, _, count in self.wired), default=0)


@dataclass(frozen=True, slots=True)
class Setup:
    communicators: tuple[Member, ...] = ()
    connections: tuple[NetConnection, ...] = ()
    """Those that belong to no communicator whose messages were seen."""


# ------------------------------------------------------------------------------------------- single streams


def _address(data: bytes, at: int = 0) -> Endpoint | None:
    """A C socket address (IPv4 or IPv6), as far as it is one."""
    if len(data) < at + _ADDRESS:
        return None
    family = int.from_bytes(data[at : at + 2], "little")
    port = int.from_bytes(data[at + 2 : at + 4], "big")
    if family == 2:
        return str(ipaddress.IPv4Address(data[at + 4 : at + 8])), port
    if family == 10:
        six = ipaddress.IPv6Address(data[at + 8 : at + 24])
        return str(six.ipv4_mapped or six), port
    return None


def _messages(stream: bytes | bytearray, most: int) -> list[bytes] | None:
    """The first `most` messages after the hello that are complete; None if this is no bootstrap connection."""
    at = HELLO
    found: list[bytes] = []
    while at + 4 <= len(stream) and len(found) < most:
        (size,) = struct.unpack_from("<i", stream, at)
        if not 0 < size <= MOST_MESSAGE:
            return None
        if at + 4 + size > len(stream):
            break
        found.append(bytes(stream[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


def _block(stream: SetUpStream, qps: int) -> NetConnection | None:
    """The connection that a type 4 stream made, once both blocks and the sender's "ready" have passed."""
    for lead, block in _BLOCKS:
        forward, backward = bytes(stream.forward), bytes(stream.backward)
        if len(forward) != HELLO + lead + block.size + 4 or len(backward) != lead + block.size:
            continue
        if forward[-4:] != b"\x01\0\0\0" or (lead and not _device_lists(forward[HELLO:], backward)):
            continue
        ours, theirs = forward[HELLO + lead : -4], backward[lead:]
        (fifo,) = struct.unpack_from("<Q", ours, block.fifo_address)
        (rkey,) = struct.unpack_from("<I", ours, block.fifo_rkey)
        return NetConnection(
            tuple(block_versions(block.size)), stream.destination, _qpns(ours, block, qps), _qpns(theirs, block, qps),
            _gid(ours, block), _gid(theirs, block), fifo, rkey,
        )  # fmt: skip
    return None


def _device_lists(*lists: bytes) -> bool:
    return all(1 <= int.from_bytes(one[:4], "little") <= 32 for one in lists)


def _qpns(data: bytes, block: ConnectionBlock, qps: int) -> tuple[int, ...]:
    return tuple(struct.unpack_from("<I", data, block.qpn + j * block.qpn_pitch)[0] for j in range(qps))


def _gid(data: bytes, block: ConnectionBlock) -> str:
    six = ipaddress.IPv6Address(data[block.gid : block.gid + 16])
    return str(six.ipv4_mapped or six)


# ------------------------------------------------------------------------------------------------ one communicator


class _Gathering:
    """What the messages of one communicator say."""

    def __init__(self, magic: int) -> None:
        self.magic = magic
        self.world = 0
        self.addresses: dict[int, Endpoint] = {}
        self.hosts: dict[int, int] = {}
        self.graphs: dict[int, bytes] = {}
        self.wired: list[tuple[int, Endpoint, int, list[Endpoint]]] = []
        """(sender of the message, its destination, tag, listeners of its receive connections)"""
        self.over = False

    @property
    def size(self) -> int:
        """World size, as far as it was told."""
        return self.world or (max(self.graphs) + 1 if self.graphs else 0)

    def take(self, stream: SetUpStream, most: int) -> int:
        """Read a stream, `most` messages each way; returns how many were read."""
        count = 0
        for data, way in ((stream.forward, stream.destination), (stream.backward, stream.source)):
            begins_here = data is stream.forward
            messages = _messages(data if begins_here else bytes(HELLO) + bytes(data), most) or []
            count += len(messages)
            if not messages:
                continue
            if len(messages[0]) == 64 and begins_here:
                rank, world = struct.unpack_from("<ii", messages[0])
                if 0 <= rank < world <= _MOST_RANKS:
                    self.world = max(self.world, world)
            elif [len(message) for message in messages[:2]] == [4, 4] and len(messages) > 2:
                rank, tag = (int.from_bytes(message, "little", signed=True) for message in messages[:2])
                if begins_here and 0 <= rank < _MOST_RANKS:
                    self.wired.append((rank, way, tag, _listeners(messages[2])))
            elif self._gathered(messages):
                self.over |= stream.over
        return count

    def _gathered(self, messages: list[bytes]) -> bool:
        """All-gathers around the ring of ranks: in every one, message k is of the rank k places before the
        sender. False if these are none."""
        graphs = [k for k, message in enumerate(messages) if len(message) in _GRAPHS]
        count = len(graphs)
        if not count or graphs[-1] - graphs[0] != count - 1 or graphs[0] < 2 * count:
            return False
        infos = messages[graphs[0] - count : graphs[0]]
        ranks = [int.from_bytes(info[:4], "little", signed=True) for info in infos]
        if min(len(info) for info in infos) < 32 or len(set(ranks)) != count or min(ranks) < 0:
            return False
        for rank, info, graph, address in zip(ranks, infos, messages[graphs[0] :], messages, strict=False):
            if rank >= _MOST_RANKS:
                return False
            self.hosts[rank] = int.from_bytes(info[16:24], "little")
            self.graphs[rank] = graph
            listens = _address(address) if len(address) == _ADDRESS else None
            if listens is not None:
                self.addresses[rank] = listens
        return True

    def member(self) -> Member:
        sizes = {len(graph) for graph in self.graphs.values()}
        if len(sizes) > 1:
            return Member(self.magic, self.world, ())
        size = sizes.pop() if sizes else 0
        versions = tuple(_versions(size))
        world = self.size
        full = world > 0 and set(self.graphs) == set(range(world))
        addresses = tuple(self.addresses.get(rank) for rank in range(world))
        seen = Member(
            self.magic, world, versions, addresses, wired=self._pairs(addresses), over=self.over,
        )  # fmt: skip
        if not full or len(_GRAPHS[size]) > 1:
            return seen
        nodes = tuple(node_numbers([str(self.hosts[rank]) for rank in range(world)]))
        records = [GraphRecord(self.graphs[rank], _GRAPHS[size][0]) for rank in range(world)]
        pattern, search, found = chains(records, nodes)
        headless = _GRAPHS[size][0].head_count >= 0 and not any(record.head_count for record in records)
        return replace(
            seen, nodes=nodes, rings=rings(records, nodes), tree_pattern=pattern, search_channels=search,
            chains=found, heads=heads(records, nodes), headless=headless,
        )  # fmt: skip

    def _pairs(self, addresses: tuple[Endpoint | None, ...]) -> tuple[tuple[int, int, int], ...]:
        counts: dict[tuple[int, int], set[int]] = {}
        ranks = _ranks(addresses)
        for receiver, to, tag, listeners in self.wired:
            if tag & 0x7F == 1 and listeners and to in ranks:
                counts.setdefault((ranks[to], receiver), set()).add(len(listeners))
        return tuple((*pair, min(told)) for pair, told in sorted(counts.items()) if len(told) == 1)


def _ranks(addresses: tuple[Endpoint | None, ...]) -> dict[Endpoint, int]:
    """The first rank that listens at each address."""
    return {address: rank for rank, address in reversed(list(enumerate(addresses))) if address is not None}


def _versions(size: int) -> list[Span]:
    """(first, last) of the known releases whose graph record has `size` bytes."""
    fits = [parse(release) for release in _RELEASES if traits(release).graph.size == size]
    return [(fits[0], (*fits[-1][:2], 99))] if fits else []


def _listeners(records: bytes) -> list[Endpoint]:
    """Listening addresses in a message of connect records: those of its receive connections, which come first."""
    for pitch in (128, 256):
        found = []
        for at in range(0, len(records) - pitch + 1, pitch):
            listens = _address(records, at)
            if listens is None or struct.unpack_from("<Q", records, at + 32)[0] != MAGIC:
                break
            found.append(listens)
        # With the wrong pitch the next record is looked for inside the first one.
        if len(records) % pitch == 0 and found and (pitch == 256 or 2 * len(found) * pitch >= len(records)):
            return found
    return []


# --------------------------------------------------------------------------------------------------- together


def read_setup(streams: Iterable[SetUpStream], qps: int = 1) -> Setup:
    """What the streams say, together. qps: QPs of a connection, as the description says; numbers beyond are garbage."""
    members: dict[int, _Gathering] = {}
    made: list[NetConnection] = []
    left = _MOST_MESSAGES
    for stream in streams:
        magic, kind = struct.unpack_from("<QI", stream.forward) if len(stream.forward) >= HELLO else (0, 0)
        if kind == NET_IB and magic == MAGIC:
            connection = _block(stream, qps)
            if connection is not None:
                made.append(connection)
        elif kind == BOOTSTRAP:
            left -= members.setdefault(magic, _Gathering(magic)).take(stream, left // 2)
    claimed = 0
    for gathering in sorted(members.values(), key=lambda one: -len(one.graphs)):
        claimed += gathering.size
        if claimed > _MOST_CLAIMED:
            claimed -= gathering.size
            del members[gathering.magic]
    found = []
    owner: dict[Endpoint, list[tuple[int, Listener]]] = {}
    for number, gathering in enumerate(members.values()):
        member = gathering.member()
        found.append(member)
        ranks = _ranks(member.addresses)
        for rank, to, tag, listeners in gathering.wired:
            peer = ranks.get(to, -1)
            for at, listener in enumerate(listeners):
                role = _KINDS.get(tag & 0x7F, "")
                channel = _channel(member, role, peer, rank, at)
                owner.setdefault(listener, []).append((number, Listener(listener, role, channel, peer, rank)))
    mine: dict[int, list[NetConnection]] = {}
    strangers = []
    for connection in made:
        owners = owner.get(connection.listener, [])
        if len(owners) != 1:  # none, or a port that was used again: whose it is cannot be said
            strangers.append(connection)
            continue
        ((number, told),) = owners
        mine.setdefault(number, []).append(
            replace(connection, kind=told.kind, channel=told.channel, sender=told.sender, receiver=told.receiver)
        )
    named: dict[int, list[Listener]] = {}
    for owners in owner.values():
        if len(owners) == 1:
            named.setdefault(owners[0][0], []).append(owners[0][1])
    return Setup(
        tuple(
            replace(
                member,
                listeners=tuple(sorted(named.get(i, ()), key=lambda one: one.end)),
                connections=tuple(mine.get(i, ())),
            )
            for i, member in enumerate(found)
        ),
        tuple(strangers),
    )


def _channel(member: Member, role: str, sender: int, receiver: int, at: int) -> int:
    """Channel of the receive connection number `at` in a message; -1 where that is not proven.

    A message lists the channels on which the two are neighbours, rising.
    """
    if role != "ring" or sender < 0:
        return -1
    if member.world_size == 2:
        return at
    if not member.rings:
        return -1
    following = [any(ring[i - 1] == sender and ring[i] == receiver for i in range(len(ring))) for ring in member.rings]
    shared = [channel for channel, neighbours in enumerate(following) if neighbours]
    if not shared:
        return -1
    return shared[at % len(shared)] + at // len(shared) * len(member.rings)


def may_begin(head: bytes) -> bool:
    """Whether a connection that begins so can be one of NCCL's set-up; a hello may come in pieces."""
    if len(head) < HELLO:
        return len(head) in (8, 11) or head == MAGIC.to_bytes(8, "little")[: len(head)]
    magic, kind = struct.unpack_from("<QI", head)
    if kind == NET_IB:
        return bool(magic == MAGIC)
    if kind != BOOTSTRAP or magic == 0:
        return False
    return len(head) < HELLO + 4 or 0 < int.from_bytes(head[HELLO : HELLO + 4], "little") <= MOST_MESSAGE
