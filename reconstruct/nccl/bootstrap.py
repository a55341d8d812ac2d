"""What NCCL tells about itself in plain TCP while a job starts: ranks, nodes, rings, trees, queue pairs.

Every connection begins with a u64 magic number and a u32 type. Type 1, with a random number for each communicator, is
the bootstrap: messages of an int32 length and as many bytes. Type 4 sets up one NET/IB connection: a block each way.
Seen only where the network of NCCL_SOCKET_IFNAME is mirrored; what was not seen or does not parse is left out of
`Setup`, nothing is filled in. Offsets beyond those of 2.19 come from NCCL's source (docs/nccl.md, "Set-up").
"""

from __future__ import annotations

import ctypes
import ipaddress
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from flowcheck.errors import FlowcheckError
from mirror.flows import Flows
from mirror.spans import DATA, HOLE, OPEN, Spans
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.tree import node_numbers
from reconstruct.nccl.versions import ConnectionBlock, GraphInfo, Version, block_versions, parse, traits

__all__ = [
    "Contradiction", "Member", "NetConnection", "SetUpStream", "Setup", "SetupWatcher", "check", "read_setup",
]

Endpoint = tuple[str, int]
Span = tuple[Version, Version]

MAGIC = 0x564AB9F2FC4B9D6C
"""Of connections that are not the bootstrap's; NCCL_SOCKET_MAGIC changes it from 2.30.7 on."""
BOOTSTRAP, NET_IB = 1, 4
_HELLO = 12
_ADDRESS = 28
_MOST_MESSAGE = 1 << 20
_MOST_STREAM = 4 << 20
_MOST_BYTES = 64 << 20
_MOST_STREAMS = 1 << 16
_MOST_RANKS = 1 << 16
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


class Contradiction(FlowcheckError):
    """What was said of a job and what its traffic shows cannot both be."""


@dataclass(slots=True)
class SetUpStream:
    """The first bytes of both directions of a connection, without holes."""

    source: Endpoint
    destination: Endpoint
    forward: bytearray = field(default_factory=bytearray)
    backward: bytearray = field(default_factory=bytearray)


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
    channels: int = 0
    """Most receive connections of one ring message: a lower bound; 0: none seen."""
    connections: tuple[NetConnection, ...] = ()


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


def _messages(stream: bytes | bytearray) -> list[bytes] | None:
    """The messages after the hello that are complete; None if this is no bootstrap connection."""
    at, found = _HELLO, []
    while at + 4 <= len(stream):
        (size,) = struct.unpack_from("<i", stream, at)
        if not 0 < size <= _MOST_MESSAGE:
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
        if len(forward) != _HELLO + lead + block.size + 4 or len(backward) != lead + block.size:
            continue
        if forward[-4:] != b"\x01\0\0\0" or (lead and not _device_lists(forward[_HELLO:], backward)):
            continue
        ours, theirs = forward[_HELLO + lead : -4], backward[lead:]
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

    def take(self, stream: SetUpStream) -> None:
        for data, way in ((stream.forward, stream.destination), (stream.backward, stream.source)):
            begins_here = data is stream.forward
            messages = _messages(data if begins_here else bytes(_HELLO) + bytes(data)) or []
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
            else:
                self._gathered(messages)

    def _gathered(self, messages: list[bytes]) -> None:
        """All-gathers around the ring of ranks: in every one, message k is of the rank k places before the sender."""
        graphs = [k for k, message in enumerate(messages) if len(message) in _GRAPHS]
        count = len(graphs)
        if not count or graphs[-1] - graphs[0] != count - 1 or graphs[0] < 2 * count:
            return
        infos = messages[graphs[0] - count : graphs[0]]
        ranks = [int.from_bytes(info[:4], "little", signed=True) for info in infos]
        if min(len(info) for info in infos) < 32 or len(set(ranks)) != count or min(ranks) < 0:
            return
        for rank, info, graph, address in zip(ranks, infos, messages[graphs[0] :], messages, strict=False):
            if rank >= _MOST_RANKS:
                return
            self.hosts[rank] = int.from_bytes(info[16:24], "little")
            self.graphs[rank] = graph
            listens = _address(address) if len(address) == _ADDRESS else None
            if listens is not None:
                self.addresses[rank] = listens

    def member(self) -> Member:
        sizes = {len(graph) for graph in self.graphs.values()}
        if len(sizes) > 1:
            return Member(self.magic, self.world, ())
        size = sizes.pop() if sizes else 0
        versions = tuple(_versions(size))
        world = self.world or (max(self.graphs) + 1 if self.graphs else 0)
        full = world > 0 and set(self.graphs) == set(range(world))
        addresses = tuple(self.addresses.get(rank) for rank in range(world))
        channels = max((len(found) for _, _, tag, found in self.wired if tag & 0x7F == 1), default=0)
        if not full or len(_GRAPHS[size]) > 1:
            return Member(self.magic, world, versions, addresses, channels=channels)
        nodes = tuple(node_numbers([str(self.hosts[rank]) for rank in range(world)]))
        records = [_Graph(self.graphs[rank], _GRAPHS[size][0]) for rank in range(world)]
        pattern, search, chains = _chains(records, nodes)
        return Member(
            self.magic, world, versions, addresses, nodes, _rings(records, nodes), pattern, search, chains,
            _heads(records, nodes), channels,
        )  # fmt: skip


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


class _Graph:
    """One rank's record."""

    def __init__(self, data: bytes, form: GraphInfo) -> None:
        self.form = form
        self.values = np.frombuffer(data, "<i4")
        self.tree_pattern = int(self.values[form.tree_pattern // 4])
        self.tree_channels = int(self.values[form.tree_channels // 4])
        self.ring_channels = int(self.values[form.ring_channels // 4])
        self.head_count = int(self.values[form.head_count // 4]) if form.head_count >= 0 else 0

    def at(self, offset: int, channel: int, array: int = 0) -> int:
        return int(self.values[offset // 4 + array * self.form.channels + channel])


def _firsts(nodes: tuple[int, ...]) -> list[int]:
    """The lowest rank of each node: any rank's record speaks for its node."""
    return [nodes.index(node) for node in range(max(nodes) + 1)]


def _rings(records: list[_Graph], nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ring of each search channel; () if one of them is no ring over all ranks."""
    count = min(record.ring_channels for record in records)
    rings = []
    for channel in range(count if 0 < count <= records[0].form.channels else 0):
        firsts = [records[rank] for rank in _firsts(nodes)]
        form = records[0].form
        into = [record.at(form.ring_receive, channel, 0) for record in firsts]
        out = [record.at(form.ring_receive, channel, 1) for record in firsts]
        # Inside a node along ringNext; from a node's last GPU to the first one of the next node.
        after = {rank: record.at(form.ring_receive, channel, 3) for rank, record in enumerate(records)}
        after |= {rank: into[(node + 1) % len(into)] for node, rank in enumerate(out)}
        ring = [0]
        while len(ring) < len(nodes) and after[ring[-1]] in after:
            ring.append(after[ring[-1]])
        if sorted(ring) != list(range(len(nodes))) or after[ring[-1]] != 0:
            return ()
        rings.append(tuple(ring))
    return tuple(rings)


def _chains(
    records: list[_Graph], nodes: tuple[int, ...]
) -> tuple[int, int, tuple[tuple[tuple[int, ...], ...], ...]]:
    """(pattern, search channels, chains); (0, 0, ()) if the records are no trees."""
    nothing: tuple[int, int, tuple[tuple[tuple[int, ...], ...], ...]] = (0, 0, ())
    count = min(min(record.tree_channels, record.ring_channels) for record in records)
    patterns = {record.tree_pattern for record, node in zip(records, nodes, strict=True) if nodes.count(node) > 1}
    if not 0 < count <= records[0].form.channels or len(patterns) > 1 or not patterns <= {1, 2, 3}:
        return nothing
    result = []
    for node, first in enumerate(_firsts(nodes)):
        form, here = records[first].form, [rank for rank in range(len(nodes)) if nodes[rank] == node]
        chains = []
        for channel in range(count):
            up = records[first].at(form.tree_parent, channel)
            down = records[first].at(form.tree_child0, channel)
            if up not in here or down not in here:
                return nothing
            rest = [rank for rank in here if rank not in (up, down)]
            chains.append((up, down) if down != up else (up, *rest[:1]))
        result.append(tuple(chains))
    return patterns.pop() if patterns else 3, count, tuple(result)


def _heads(records: list[_Graph], nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    count = min(record.head_count for record in records)
    if not 0 < count <= records[0].form.channels:
        return ()
    heads = [tuple(records[r].at(records[r].form.heads, h) for h in range(count)) for r in _firsts(nodes)]
    right = all(0 <= rank < len(nodes) and nodes[rank] == node for node, on in enumerate(heads) for rank in on)
    return tuple(heads) if right and all(len(set(on)) == count for on in heads) else ()


# --------------------------------------------------------------------------------------------------- together


def read_setup(streams: Iterable[SetUpStream], qps: int = 1) -> Setup:
    """What the streams say, together. qps: QPs of a connection, as the description says; numbers beyond are garbage."""
    members: dict[int, _Gathering] = {}
    made: list[NetConnection] = []
    for stream in streams:
        magic, kind = struct.unpack_from("<QI", stream.forward) if len(stream.forward) >= _HELLO else (0, 0)
        if kind == NET_IB and magic == MAGIC:
            connection = _block(stream, qps)
            if connection is not None:
                made.append(connection)
        elif kind == BOOTSTRAP:
            members.setdefault(magic, _Gathering(magic)).take(stream)
    found = []
    owner: dict[Endpoint, list[tuple[int, str, int, int, int]]] = {}
    for number, gathering in enumerate(members.values()):
        member = gathering.member()
        found.append(member)
        for rank, to, tag, listeners in gathering.wired:
            peer = member.addresses.index(to) if to in member.addresses else -1
            for at, listener in enumerate(listeners):
                role = _KINDS.get(tag & 0x7F, "")
                channel = _channel(member, role, peer, rank, at)
                owner.setdefault(listener, []).append((number, role, channel, peer, rank))
    mine: dict[int, list[NetConnection]] = {}
    strangers = []
    for connection in made:
        owners = owner.get(connection.listener, [])
        if len(owners) != 1:  # none, or a port that was used again: whose it is cannot be said
            strangers.append(connection)
            continue
        ((number, role, channel, sender, receiver),) = owners
        mine.setdefault(number, []).append(
            replace(connection, kind=role, channel=channel, sender=sender, receiver=receiver)
        )
    return Setup(
        tuple(replace(member, connections=tuple(mine.get(i, ()))) for i, member in enumerate(found)), tuple(strangers)
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


def check(group: NcclGroup, member: Member) -> None:
    """Raise Contradiction, which shows both, where the description of a group and its own traffic differ."""

    def both(what: str, said: object, seen: object) -> Contradiction:
        return Contradiction(
            f"NCCL group {group.name!r}: {what}: described as {said}, but the job's own set-up traffic shows {seen}; "
            "correct the description, or attach again"
        )

    if member.world_size and member.world_size != group.world_size:
        raise both("world_size", group.world_size, member.world_size)
    version = parse(group.version)
    for spans in [member.versions, *(connection.versions for connection in member.connections)]:
        if spans and not any(low <= version <= high for low, high in spans):
            raise both("version", group.version, " or ".join(_span(span) for span in spans))
    if member.nodes and member.nodes != group.nodes:
        raise both("nodes", group.nodes, member.nodes)
    for channel, ring in enumerate(group.rings if member.rings else ()):
        seen = member.rings[channel % len(member.rings)]
        if ring != seen:
            raise both(f"rings[{channel}]", ring, seen)
    for field_, said, seen_ in (
        ("tree_pattern", group.tree_pattern, member.tree_pattern),
        ("search_channels", group.search_channels, member.search_channels),
        ("heads", group.heads, member.heads),
    ):
        if said and seen_ and said != seen_:
            raise both(field_, said, seen_)
    for node, chains in enumerate(group.chains if member.chains else ()):
        for number, chain in enumerate(chains):
            if (chain[:2] != member.chains[node][number][:2] and group.tree_pattern != 3) or chain[0] != (
                member.chains[node][number][0]
            ):
                raise both(f"chains[{node}][{number}]", chain, member.chains[node][number])
    if group.channels and member.channels > group.channels:
        raise both("channels", group.channels, f"at least {member.channels}")


def _span(span: Span) -> str:
    low, high = (".".join(str(part) for part in one if part != 99) for one in span)
    return low if low == high else f"{low} to {high}"


class SetupWatcher:
    """Keeps the set-up connections among all flows. Costs Python time for them and for the first bytes of others.

    flows: the table of the spans' flow ids. Feed it every batch of spans; `setup` reads what has been kept.
    """

    def __init__(self, flows: Flows, qps: int = 1) -> None:
        self.changed = False
        """Whether bytes have come since `setup` was last called."""
        self.dropped = 0
        """Connections left out: more at once, or longer, than are kept."""
        self._flows, self._qps = flows, qps
        self._watched = np.zeros(flows.capacity, bool)
        self._streams: dict[int, tuple[SetUpStream, bool]] = {}
        self._expected: dict[int, int] = {}
        self._kept: list[SetUpStream] = []
        self._bytes = 0

    def feed(self, spans: Spans) -> None:
        """Take a batch of spans."""
        n = spans.n
        flow, kind, offset, length = spans.flow[:n], spans.kind[:n], spans.offset[:n], spans.length[:n]
        begin = (kind == DATA) & (offset == 0) & (length > 0)
        for i in np.flatnonzero(begin).tolist():
            if _may_begin(ctypes.string_at(int(spans.addr[i]), min(int(length[i]), _HELLO + 4))):
                self._watched[[flow[i], max(0, self._flows.peer[flow[i]])]] = True
        for i in np.flatnonzero((kind == OPEN) | self._watched[flow]).tolist():
            number, what, at, size = int(flow[i]), int(kind[i]), int(offset[i]), int(length[i])
            if what == OPEN:
                self._forget(number)
            elif what == DATA and at == 0 and number not in self._streams:
                self._begin(number, ctypes.string_at(int(spans.addr[i]), min(size, _HELLO + 4)))
            if number not in self._streams:
                continue
            if what == HOLE or (what == DATA and self._expected[number] != at):
                self._drop(number)
            elif what == DATA:
                self._take(number, ctypes.string_at(int(spans.addr[i]), size))

    def setup(self) -> Setup:
        """Everything that has been seen so far."""
        self.changed = False
        return read_setup(self._kept, self._qps)

    def _begin(self, number: int, head: bytes) -> None:
        if not _may_begin(head):
            return
        if len(self._kept) >= _MOST_STREAMS:
            self.dropped += 1
            return
        stream = SetUpStream(self._flows.endpoint_src(number), self._flows.endpoint_dst(number))
        self._kept.append(stream)
        peer = int(self._flows.peer[number])
        for one, forward in ((number, True), (peer, False)):
            if one >= 0:
                self._streams[one] = stream, forward
                self._expected[one] = 0
                self._watched[one] = True

    def _take(self, number: int, data: bytes) -> None:
        stream, forward = self._streams[number]
        part = stream.forward if forward else stream.backward
        part += data
        self._expected[number] += len(data)
        self._bytes += len(data)
        self.changed = True
        if len(part) > _MOST_STREAM or self._bytes > _MOST_BYTES or (forward and not _may_begin(bytes(part[:16]))):
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Bytes are missing, or it is no set-up connection: what it said so far cannot be completed."""
        stream, _ = self._streams[number]
        self.dropped += 1
        self._kept.remove(stream)
        self._bytes -= len(stream.forward) + len(stream.backward)
        for one in [one for one, (other, _) in self._streams.items() if other is stream]:
            self._forget(one)

    def _forget(self, number: int) -> None:
        """The flow id begins another stream; what was kept of the one before stays."""
        self._streams.pop(number, None)
        self._expected.pop(number, None)
        self._watched[number] = False


def _may_begin(head: bytes) -> bool:
    """Whether a connection that begins so can be one of NCCL's set-up; a hello may come in pieces."""
    if len(head) < _HELLO:
        return len(head) in (8, 11) or head == MAGIC.to_bytes(8, "little")[: len(head)]
    magic, kind = struct.unpack_from("<QI", head)
    if kind == NET_IB:
        return bool(magic == MAGIC)
    if kind != BOOTSTRAP or magic == 0:
        return False
    return len(head) < _HELLO + 4 or 0 < int.from_bytes(head[_HELLO : _HELLO + 4], "little") <= _MOST_MESSAGE
