"""What NCCL says in plain TCP while a communicator comes up: the bootstrap's rings of ranks, connect messages, and the
blocks by which NET/IB connections are made.

Own reading of NCCL's source (src/bootstrap.cc, src/init.cc, src/transport.cc, src/transport/net_ib*); shares nothing
with `reconstruct`, so that one mistake cannot hide in both.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowcheck.lab.addresses import training_address
from flowcheck.lab.nccl_wire_job import BALANCED, NVLSTREE, Job
from flowcheck.lab.nccl_wire_link import Connection

SOCKET_MAGIC = 0x564AB9F2FC4B9D6C
BOOTSTRAP, NET_IB = 1, 4
RING_TAG, TREE_TAG, NVLS_TAG = 1, 2, 4
_READY = struct.pack("<i", 1)
_GARBAGE = b"\xee"
"""What nobody has written: queue pair numbers beyond those that a connection has."""
_MTU = {1024: 3, 4096: 5}

Endpoint = tuple[str, int]


@dataclass(frozen=True)
class Listeners:
    """Where a rank listens: for the rank before it on the ring, for the root's answer, for other ranks' messages."""

    ring: Endpoint
    root: Endpoint
    peers: Endpoint


@dataclass(frozen=True)
class Stream:
    """One TCP connection: rank `client` opens it to rank `server`, at `to`, and says `there`; the server answers `back`
    before the last `tail` bytes of `there`. kept: it stays open as long as the communicator."""

    client: int
    server: int
    to: Endpoint
    there: bytes
    back: bytes = b""
    tail: int = 0
    kept: bool = False


# ------------------------------------------------------------------------------------------------------- bootstrap


def bootstrap(job: Job, magic: int, root: Endpoint, listeners: Mapping[int, Listeners]) -> list[Stream]:
    """How the ranks find each other and tell each other everything. root: where the first rank's root listens."""
    hello = struct.pack("<QI", magic, BOOTSTRAP)
    streams = []
    for rank in range(job.ranks):
        own = _address(listeners[rank].ring) + _address(listeners[rank].root)
        streams.append(Stream(rank, 0, root, hello + _message(struct.pack("<ii", rank, job.ranks) + own)))
    for rank in range(job.ranks):
        answer = _message(_address(listeners[(rank + 1) % job.ranks].ring))
        streams.append(Stream(0, rank, listeners[rank].root, hello + answer))
    both = job.release >= (2, 28)
    forward = -(-(job.ranks - 1) // 2) if both else job.ranks - 1
    for rank in range(job.ranks):
        after = (rank + 1) % job.ranks
        there = _gathered(job, listeners, [(rank - k) % job.ranks for k in range(forward)])
        back = _gathered(job, listeners, [(after + k) % job.ranks for k in range(job.ranks - 1 - forward)])
        streams.append(Stream(rank, after, listeners[after].ring, hello + there, back, kept=True))
    return streams


def _gathered(job: Job, listeners: Mapping[int, Listeners], ranks: Sequence[int]) -> bytes:
    """What one rank passes on in the all-gathers, round by round."""
    parts = [_address(listeners[rank].peers) for rank in ranks]
    parts += [_address((listeners[rank].peers[0], listeners[rank].peers[1] + 1)) for rank in ranks]
    parts += [_peer(job, rank) for rank in ranks]
    parts += [graph_record(job, rank) for rank in ranks]
    return b"".join(map(_message, parts))


def _peer(job: Job, rank: int) -> bytes:
    """ncclPeerInfo: rank, device, ..., host hash, process hash."""
    local = job.node_ranks[job.node_of[rank]].index(rank)
    return struct.pack("<iiiiQQ", rank, local, local, 1, 0x77AA00 + job.hosts[rank], 0x990000 + rank).ljust(64, b"\0")


def graph_record(job: Job, rank: int) -> bytes:
    """What a rank's topology search found: per algorithm some words, then by channel the places on rings and trees."""
    release = job.release
    algorithms, words = (7 if release >= (2, 23) else 6), (8 if release >= (2, 21) else 7)
    channels = 64 if release >= (2, 25) else 32
    node, search = job.node_of[rank], job.search_channels
    infos = b""
    for algorithm in range(algorithms):
        pattern = {0: job.tree_pattern, 1: 4}.get(algorithm, 0)
        info = struct.pack("<iiiffii", pattern, search if algorithm < 2 else 0, 1, 12.0, 12.0, 3, 5)
        infos += info.ljust(4 * words, b"\0")  # from 2.21 on: crossNic
    arrays = [[-1] * channels for _ in range(8)]
    for number in range(search):
        chain = job.chain(node, number)
        at = chain.index(rank)
        second = chain[1] if len(chain) > 1 else chain[0]
        places = (
            chain[0], chain[-1], chain[at - 1] if at else -1, chain[at + 1] if at + 1 < len(chain) else -1,
            chain[0], second if job.tree_pattern == BALANCED else chain[0], chain[0],
        )  # fmt: skip
        for array, value in zip(arrays, places, strict=False):
            array[number] = value
    heads = job.heads if job.algorithm == NVLSTREE else 0
    arrays[7][:heads] = job.node_ranks[node][:heads]
    before = 1 if release >= (2, 28) else 0  # crossNicRing
    behind = next(count for first, count in _WORDS_BEHIND if release >= first)
    tail = [heads, *[0] * (behind - 1)] if behind else []
    numbers = [0] * before + [value for array in arrays for value in array] + tail
    return infos + struct.pack(f"<{len(numbers)}i", *numbers)


_WORDS_BEHIND = (
    ((2, 30), 11), ((2, 29, 7), 6), ((2, 27), 4), ((2, 22), 3), ((2, 20), 1), ((0,), 0),
)  # fmt: skip
"""Words behind the arrays, the number of NVLS heads first; by the first release."""


# ------------------------------------------------------------------------------------------------ connect messages


def wiring(
    job: Job, magic: int, connections: Iterable[Connection], listeners: Mapping[int, Listeners],
    accepts: Callable[[Connection], Endpoint],
) -> list[Stream]:
    """How the connections between nodes are made. accepts: where a connection's receiver listens for it."""
    groups: dict[tuple[int, int, int], list[Connection]] = {}
    for one in sorted(connections, key=lambda c: c.channel):
        groups.setdefault((_kind(job, one), one.sender, one.receiver), []).append(one)
    hello = struct.pack("<QI", magic, BOOTSTRAP)
    size = 256 if job.release >= (2, 23) else 128
    streams: list[Stream] = []
    for tag in (RING_TAG, TREE_TAG, NVLS_TAG):
        told = [(key, made) for key, made in sorted(groups.items()) if key[0] == tag]
        for (_, sender, receiver), made in told:
            records = [_record(accepts(one), size) for one in made]
            distance = (receiver - sender) % job.ranks
            if 2 * distance == job.ranks:  # both are each other's peer: what the receiver sends to comes behind
                records += [bytes(size)] * len(groups.get((tag, receiver, sender), ()))
            parts = struct.pack("<i", receiver), struct.pack("<i", distance << 8 | tag), b"".join(records)
            streams.append(Stream(receiver, sender, listeners[sender].peers, hello + b"".join(map(_message, parts))))
        for _, made in told:
            streams += [stream for one in made for stream in _net_ib(job, one, accepts(one))]
    return streams


def _kind(job: Job, one: Connection) -> int:
    """For which algorithm a connection is made first."""
    ring = job.ring(one.channel)
    if ring[(ring.index(one.sender) + 1) % job.ranks] == one.receiver:
        return RING_TAG
    children = job.tree(one.channel)[1]
    return TREE_TAG if one.receiver in children[one.sender] or one.sender in children[one.receiver] else NVLS_TAG


def _record(listens: Endpoint, size: int) -> bytes:
    return (_address(listens) + bytes(4) + struct.pack("<Q", SOCKET_MAGIC)).ljust(size, b"\0")


def _net_ib(job: Job, one: Connection, to: Endpoint) -> list[Stream]:
    """Both ends' blocks; none for 2.29.7, whose block nobody has computed."""
    if (2, 29, 7) <= job.release < (2, 30):
        return []
    devices = b""
    if job.release >= (2, 24):
        devices = struct.pack("<5i", 1, 0, 0, 0, 0).ljust(37 if job.release >= (2, 30) else 20, b"\0")
    ours = _block(job, [flow.qp for flow in one.backward], one.sender, *one.fifo)
    theirs = _block(job, [flow.qp for flow in one.forward], one.receiver, 0, 0)
    hello = struct.pack("<QI", SOCKET_MAGIC, NET_IB)
    return [Stream(one.sender, one.receiver, to, hello + devices + ours + _READY, devices + theirs, len(_READY), True)]


def _block(job: Job, pairs: Sequence[int], rank: int, fifo: int, rkey: int) -> bytes:
    """Queue pair numbers, GID, path MTU, and where announcements go."""
    release = job.release
    if release < (2, 20):
        size, first, pitch, gid, mtu, key, array = (
            (552, 8, 4, 520, 536, 540, 544) if release < (2, 19) else (2600, 8, 4, 2568, 2584, 2588, 2592)
        )
    else:
        base = 3456 if release >= (2, 30) else 3072
        size, array = next((s, a) for limit, s, a in _NEW_BLOCKS if release >= limit)
        first, pitch, gid, mtu, key = 0, 24, base + 16, base + 8, base + 32
    data = bytearray(_GARBAGE * size)
    for number, pair in enumerate(pairs):
        struct.pack_into("<I", data, first + number * pitch, pair)
    address = ipaddress.ip_address(training_address(job.ports[rank], job.ipv6)).packed
    data[gid : gid + 16] = (b"\0" * 10 + b"\xff\xff" + address)[-16:]
    struct.pack_into("<I", data, mtu, _MTU[job.mtu])
    struct.pack_into("<I", data, key, rkey)
    struct.pack_into("<Q", data, array, fifo)
    return bytes(data)


_NEW_BLOCKS = (
    ((2, 30), 4576, 4552), ((2, 27), 3648, 3624), ((2, 26), 3584, 3560), ((2, 24), 3576, 3560), ((2, 20), 3336, 3320),
)  # fmt: skip
"""(first release, size, where the array of announcements stands)."""


def _message(data: bytes) -> bytes:
    return struct.pack("<i", len(data)) + data


def _address(end: Endpoint) -> bytes:
    """A C socket address in 28 bytes."""
    if ":" in end[0]:
        packed = socket.inet_pton(socket.AF_INET6, end[0])
        return struct.pack("<H", 10) + struct.pack(">HI", end[1], 0) + packed + bytes(4)
    return (struct.pack("<H", 2) + struct.pack(">H", end[1]) + socket.inet_aton(end[0])).ljust(28, b"\0")
