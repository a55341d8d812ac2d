"""NCCL's collectives of a capture: which they are by the lengths of their messages, and the final values they carry.

Nothing is claimed unless the release is known (from the set-up of the connections, the job file or the user), and every
claim is one that the lengths of all connections seen allow. Where they allow several, that is said and nothing more of
the communicator is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowcheck.errors import UsageError
from flowcheck.inspect import nccl_refused as refused
from flowcheck.inspect.gloo import hashes
from flowcheck.inspect.messages import MessageTable
from flowcheck.inspect.nccl_flows import Connection, Flow, FlowKey, connections
from flowcheck.inspect.nccl_line import Line
from flowcheck.inspect.nccl_read import Reading, Sizes, read
from flowcheck.inspect.nccl_release import Word, inline, release, same_layout, spans_told
from flowcheck.inspect.nccl_setup import assignments, bind, cut_alike, with_sockets
from flowcheck.inspect.nccl_sockets import SocketTraffic
from flowcheck.inspect.nccl_unnamed import ends, hosts, meshes, pair_group
from flowcheck.inspect.streams import StreamSeen
from mirror.flows import Flows
from mirror.messages import Message
from mirror.spans import Spans
from mirror.streams import runs
from reconstruct.nccl.bootstrap import Member
from reconstruct.nccl.group import Edge, NcclGroup
from reconstruct.nccl.heads import HELLO, MAGIC, NET_IB, SETUP, SOCKET, Heads
from reconstruct.nccl.schedule import ALLREDUCE, LL, LL128, NVLSTREE, P2P_SLOT, RING, SIMPLE, TREE
from reconstruct.nccl.setup import Contradiction, agreeing, group_of, releases, same_job, span_text
from reconstruct.nccl.setup_watch import SetupWatcher
from reconstruct.nccl.versions import block_versions, parse, traits

__all__ = ["NcclTraffic"]

ALGORITHMS = {RING: "ring", TREE: "tree", NVLSTREE: "nvlstree"}
PROTOCOLS = {LL: "ll", LL128: "ll128", SIMPLE: "simple"}
KINDS = ("allreduce", "allgather", "broadcast")
_NET_IB_HELLO = MAGIC.to_bytes(8, "little") + NET_IB.to_bytes(4, "little")
_READY = 4
_DEVICES = (0, 20, 37)  # bytes of the device list before the block: up to 2.23, 2.24, 2.30
_REMEDY = "mirror the set-up of the connections (TCP) from before the job starts, or give --nccl-version"
_TRIED = 4  # collectives by which it is decided which connection is which
Dtypes = Callable[[int], tuple[str, int] | None]
Bound = dict[Edge, Connection]


class NcclTraffic:
    """Takes messages and streams as they end; `finish` tells the collectives. `statements`: what is to be said;
    `refusals`: what cannot be read, with the remedy."""

    def __init__(self, told: Callable[[str, dict[str, Any]], None], flows: Flows, *, budget_bytes: int,
                 message_bytes: int, dtypes: Dtypes, buckets: frozenset[int], hint: str | None,
                 group: NcclGroup | None) -> None:
        """`told`: every line, with the name of its communicator; `flows`: of the TCP spans; `budget_bytes`: the most
        bytes of messages kept, `message_bytes`: of those over TCP until they are over; `buckets`: sizes of the job's
        all-reduces; `hint`: the release, as the user says it; `group`: the job's communicator. Raises UnknownVersion.
        """
        self.statements: list[str] = []
        self.refusals: list[str] = []
        self.unkept = 0
        """Messages for which there was no room: their values are not told."""
        self._word = _word(hint, group)
        self._told = told
        self._shown = ""  # the release as the set-up tells it, where nobody else does
        self._room = budget_bytes
        self._dtypes = dtypes
        self._sizes = Sizes(lambda size: known[1] if (known := dtypes(size)) is not None else None, buckets)
        self._group = group
        self._names: set[str] = set()
        self._flows: dict[FlowKey, Flow] = {}
        self._heads = Heads(flows)
        self._setups = SetupWatcher(self._heads)
        self._sockets = SocketTraffic(self._heads, self._keep, limit=message_bytes)
        self._inline: tuple[int, int | None] = -1, None  # what the set-up told, and up to when it was read
        self._blocks: set[int] = set()  # sizes of set-up blocks
        self._strange_blocks = 0
        self._torn: set[tuple[str, str]] = set()  # TCP streams of which something was waited for
        self._late: set[tuple[str, str]] = set()  # those of which it was the start

    @property
    def over_tcp(self) -> MessageTable:
        """The messages of NET/Socket that are not over."""
        return self._sockets.table

    def spans(self, spans: Spans) -> None:
        """A batch of TCP spans."""
        seen = self._heads.look(spans)
        if seen & SETUP:
            self._setups.feed(spans)
        if seen & SOCKET:
            if self._inline[0] != self._setups.changed:
                members = [] if self._word else self._setups.seen().communicators
                self._inline = self._setups.changed, inline(self._word, members)
            self._sockets.feed(spans, self._inline[1])

    def stream(self, stream: StreamSeen) -> None:
        """A TCP stream has ended. What a sender says when it sets a connection up tells the release by its length."""
        head = stream.head
        ends = stream.source.rpartition(":")[0].strip("[]"), stream.destination
        if stream.hole_bytes or not stream.from_start:
            self._torn.add(ends)
        if not stream.from_start:
            self._late.add(ends)
        if head[:12] == _NET_IB_HELLO and not stream.hole_bytes:
            sizes = {stream.length - HELLO - devices - _READY for devices in _DEVICES}
            known = {size for size in sizes if block_versions(size)}
            self._blocks |= known
            self._strange_blocks += not known and stream.length > HELLO

    def message(self, key: FlowKey, message: Message, begin: int, end: int, mtu: int) -> None:
        """An RDMA message is over. mtu: of its path, 0 if not known."""
        flow = self._flows.setdefault(key, Flow(key))
        flow.mtu = max(flow.mtu, mtu)
        self._keep(flow, message, begin, end)

    def _keep(self, flow: Flow, message: Message, begin: int, end: int) -> None:
        keep = message.extent <= self._room
        self.unkept += not keep
        if keep:
            self._room -= message.extent
        flow.add(message, begin, end, keep)

    def gap(self, key: FlowKey, psn: int, packets: int) -> None:
        """Packets from this number on are missing, and so is what they belong to."""
        self._flows.setdefault(key, Flow(key)).gaps.append((psn, packets))

    def finish(self) -> None:
        """Nothing more comes. Raises UsageError where the user's word and the traffic contradict each other."""
        self._sockets.finish(self._torn, self._late)
        flows = list(self._flows.values())
        for flow in flows:
            flow.finish()
        rdma = connections(flows)
        found = [*rdma, *self._sockets.connections()]
        setup = self._setups.setup(1 if self._group is None else self._group.qps)
        members = [with_sockets(member, self._sockets.seen) for member in setup.communicators]
        version = release(self._word, self._blocks, members, found)
        self.statements += self._sockets.statements()
        self.refusals += refused.of_setup(setup, self._strange_blocks, bool(flows), bool(self._sockets.seen))
        self.refusals += refused.of_flows(flows, rdma)
        mute = sum(flow.carries_data for flow in flows) - sum(len(one.data) for one in rdma)
        if mute:
            self.statements.append(
                f"RDMA messages with immediates on {mute} queue pairs, as NCCL's, but not the entries that announce "
                "them: no collective of theirs is claimed: mirror the port's other direction too"
            )
        if not found:
            return
        if version is None:
            told = spans_told(self._blocks)
            self.statements.append(f"NCCL of unknown release{told}: no collective is claimed: {_REMEDY}")
            return
        self._shown = version.shown
        for one in found:
            if one.point_to_point:
                self._sends(one)
        self._collectives([one for one in found if not one.point_to_point], members, version.name)

    # Send and receive

    def _sends(self, one: Connection) -> None:
        """Messages of send and receive: one is over with the first message that does not fill its slot."""
        if len(one.data) > 1:
            return
        name = hosts([one])
        ordinal, at, pieces = 0, 0, []
        flow = one.data[0]
        for piece in flow.pieces:
            if piece.length < 0 or any(number < piece.psn for number, _ in flow.gaps):
                return  # from here on sends cannot be counted
            if piece.data is not None and piece.known is not None:
                pieces += [(at + start, piece.data[start : start + count]) for start, count in runs(piece.known)]
            at += piece.length
            if piece.length < P2P_SLOT:
                line = _line("sendrecv", None, "simple", None, one.sender_rank, ordinal, at, None, hashes(pieces))
                self._told(name, line)
                ordinal, at, pieces = ordinal + 1, 0, []

    # Collectives

    def _collectives(self, found: list[Connection], members: Sequence[Member], version: str) -> None:
        free = list(found)
        if self._group is not None:
            free = self._job(self._group, free, members)
        for member in members:
            named = group_of(member, version, "")
            bound = {} if named is None else bind(named, member, free)
            if named is not None and bound:
                self._read(replace(named, name=self._name(list(bound.values()))), bound)
            free = _without(free, bound)
        if self._group is not None:
            return
        for mesh in meshes([one for one in free if one.over_tcp]):
            self.statements.append(
                f"NCCL {version} over TCP between {', '.join(ends(mesh))}: nothing tells whose ranks' its connections "
                "are, so no collective is claimed: mirror the set-up (TCP) from before the job starts, or give "
                "--job FILE"
            )
        for mesh in meshes([one for one in free if not one.over_tcp]):
            group = pair_group(mesh, version, self._name(mesh))
            if group is None:
                self.statements.append(
                    f"NCCL {version} between {', '.join(ends(mesh))}: ranks and rings are not all seen, so no "
                    "collective is claimed: mirror both directions of the port, or give --job FILE"
                )
            else:
                (bound,) = list(assignments(group, mesh))
                self._read(group, bound, "; as many channels as were seen")

    def _job(self, group: NcclGroup, every: list[Connection], members: Sequence[Member]) -> list[Connection]:
        """Read the job's communicator; returns the connections that are not its."""
        found = [one for one in every if one.over_tcp == group.sockets]
        try:
            agreed = agreeing(group, [one for one in members if same_job(group.addresses, group.world_size, one)])
        except Contradiction as error:
            raise UsageError(str(error)) from None
        bound = [bind(group, member, found) for member in agreed]
        for way in filter(None, bound):
            self._read(group, way)
        if any(bound) or (agreed and not group.sockets):
            return _without(every, *bound)
        ways = list(assignments(group, found))
        likeliest = self._likeliest(group, ways)
        between = [one for one in found if _between(group, one)]
        if not any(ways) and between and not group.sockets:
            one = between[0]
            raise UsageError(
                f"the job file says that ranks {_links(group)} send to each other over the network; in the capture "
                f"rank {one.sender_rank} sends from {one.ends[0]} to {one.ends[1]}: give the job file of these trainers"
            )
        if likeliest is None or (between and not any(ways)):
            self.statements.append(
                f"communicator {group.name}: the capture does not tell which connection is on which channel, so no "
                "collective is claimed: mirror the set-up of the connections (TCP) too"
            )
            return _without(every, *ways)
        if likeliest:
            self._read(group, likeliest)
        return _without(every, likeliest)

    def _likeliest(self, group: NcclGroup, ways: Sequence[Bound]) -> Bound | None:
        """The assignment by which most can be read; None if several are as good."""
        if len(ways) < 2:
            return ways[0] if ways else {}
        tried = []
        for way in ways:
            reading = read(group, self._lines(group, way), self._sizes, _TRIED)
            tried.append((len(reading.collectives), -reading.left))
        best = max(tried)
        return ways[tried.index(best)] if tried.count(best) == 1 else None

    def _lines(self, group: NcclGroup, bound: Mapping[Edge, Connection]) -> list[Line]:
        of = traits(group.version)
        split = of.split_over_qps if group.split is None else group.split
        return [
            Line(edge, one, split and len(one.data) > 1, of.immediate_big_endian and not one.over_tcp)
            for edge, one in sorted(
                bound.items(), key=lambda item: (item[0].channel, item[0].sender, item[0].receiver))
        ]  # fmt: skip

    def _read(self, group: NcclGroup, bound: Mapping[Edge, Connection], remark: str = "") -> None:
        lines = self._lines(group, bound)
        reading = read(group, lines, self._sizes)
        if reading.left:
            self._contradicted(group, bound, len(reading.collectives))
        for ordinal, one in enumerate(reading.collectives):
            known = self._dtypes(one.size) if one.kind == ALLREDUCE and one.size is not None else None
            for edge, final in one.final.items():
                self._told(group.name, _line(
                    KINDS[one.kind], ALGORITHMS[one.algorithm], None if one.protocol is None else
                    PROTOCOLS[one.protocol], edge.channel, edge.sender, ordinal, one.size, known, final,
                ))  # fmt: skip
        unsized = sum(one.size is None for one in reading.collectives)
        if unsized:
            remark += (
                f"; the lengths of {unsized} allow several sizes, so little or nothing of their values is claimed: "
                "--job FILE tells"
            )
        if reading.left:
            self.refusals += refused.of_reading(group, lines)
        self.statements.append(
            f"communicator {group.name}: NCCL {self._shown or group.version}, {group.world_size} ranks, channels: "
            f"{group.channels}, {len(reading.collectives)} collectives read from "
            f"{sum(any(flow.pieces for flow in one.data) for one in bound.values())} connections{remark}"
            f"{_left(reading)}"
        )

    def _contradicted(self, group: NcclGroup, bound: Mapping[Edge, Connection], number: int) -> None:
        """Raise UsageError if another release explains everything; the given one explains `number` collectives."""
        if self._word is None:
            return
        form = traits(group.version).cts
        tried = [parse(group.version)]
        for version in releases([]):
            if not group.sockets and not same_layout(traits(version).cts, form):
                continue
            if any(cut_alike([version, other], True) for other in tried):
                continue
            tried.append(version)
            other = replace(group, version=".".join(map(str, version)))
            if len(read(other, self._lines(other, bound), self._sizes, number + 1).collectives) <= number:
                continue
            reading = read(other, self._lines(other, bound), self._sizes)
            if not reading.left:
                raise UsageError(
                    f"{self._word.source} says NCCL {group.version}, which does not cut collectives into the messages "
                    f"of the capture; NCCL {span_text(version, version)} explains all of them: give the right one"
                )

    def _name(self, found: list[Connection]) -> str:
        """What a communicator is called whose own name is not known: its hosts, with a number from the second on."""
        name = plain = hosts(found)
        number = 1
        while name in self._names:
            number += 1
            name = f"{plain} ({number})"
        self._names.add(name)
        return name


def _left(reading: Reading) -> str:
    return f"; {reading.left} messages are not: {reading.reason}" if reading.left else ""


def _without(found: Sequence[Connection], *bound: Mapping[Edge, Connection]) -> list[Connection]:
    gone = {one for way in bound for one in way.values()}
    return [one for one in found if one not in gone]


def _between(group: NcclGroup, one: Connection) -> bool:
    """Whether a connection joins two nodes of the group."""
    own = {address for addresses in group.addresses for address in addresses}
    return one.ends[0] in own and one.ends[1] in own


def _links(group: NcclGroup) -> str:
    pairs = sorted({(ring[i - 1], rank) for ring in group.rings for i, rank in enumerate(ring)})
    return ", ".join(f"{a}>{b}" for a, b in pairs[:8] if group.nodes[a] != group.nodes[b])


def _line(kind: str, algorithm: str | None, protocol: str | None, channel: int | None, sender: int, ordinal: int,
          size: int | None, known: tuple[str, int] | None, final: list[list[Any]]) -> dict[str, Any]:
    """The collective for scripts."""
    if known is not None and (size is None or size % known[1]):
        known = None
    return {
        "type": "collective",
        "library": "nccl",
        "kind": kind,
        "algorithm": algorithm,
        "protocol": protocol,
        "channel": channel,
        "sender_rank": sender,
        "ordinal": ordinal,
        "bytes": size,
        "elements": None if known is None or size is None else size // known[1],
        "dtype": None if known is None else known[0],
        "final": final,
    }


def _word(hint: str | None, group: NcclGroup | None) -> Word | None:
    """What the user or the job file says of the release."""
    told = hint if hint is not None else group.version if group is not None else None
    if told is None:
        return None
    version = parse(told)
    traits(version)
    return Word(version, "--nccl-version" if hint is not None else "the job file")
