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
from flowcheck.inspect.nccl_flows import Connection, Flow, FlowKey, connections
from flowcheck.inspect.nccl_line import Line
from flowcheck.inspect.nccl_read import Reading, Sizes, read
from flowcheck.inspect.nccl_setup import assignments, bind, cut_alike
from flowcheck.inspect.nccl_sockets import SocketTraffic
from flowcheck.inspect.streams import StreamSeen
from mirror.flows import Flows
from mirror.messages import Message
from mirror.spans import Spans
from mirror.streams import runs
from reconstruct.nccl.bootstrap import Setup
from reconstruct.nccl.group import Edge, NcclGroup
from reconstruct.nccl.schedule import ALLREDUCE, LL, LL128, NVLSTREE, P2P_SLOT, RING, SIMPLE, TREE
from reconstruct.nccl.setup import Contradiction, agreeing, group_of, releases, same_job, span_text
from reconstruct.nccl.setup_watch import SetupWatcher
from reconstruct.nccl.versions import CTS_FORMS, CtsForm, Version, block_versions, parse, traits

__all__ = ["NcclTraffic"]

ALGORITHMS = {RING: "ring", TREE: "tree", NVLSTREE: "nvlstree"}
PROTOCOLS = {LL: "ll", LL128: "ll128", SIMPLE: "simple"}
KINDS = ("allreduce", "allgather", "broadcast")
_MAGIC = bytes.fromhex("6c9d4bfcf2b94a56")
_HELLO, _READY = 12, 4
_DEVICES = (0, 20, 37)  # bytes of the device list before the block: up to 2.23, 2.24, 2.30
_REMEDY = "mirror the set-up of the connections (TCP) from before the job starts, or give --nccl-version"
_TRIED = 4  # collectives by which it is decided which connection is which
Dtypes = Callable[[int], tuple[str, int] | None]
Bound = dict[Edge, Connection]


class NcclTraffic:
    """Takes messages and streams as they end; `finish` tells the collectives. `statements`: what is to be said;
    `refusals`: what cannot be read, with the remedy."""

    def __init__(self, told: Callable[[str, dict[str, Any]], None], flows: Flows, *, budget_bytes: int, dtypes: Dtypes,
                 buckets: frozenset[int], hint: str | None, group: NcclGroup | None) -> None:
        """`told`: every line, with the name of its communicator; `flows`: of the TCP spans; `budget_bytes`: the most
        bytes of messages kept; `buckets`: sizes of the job's all-reduces; `hint`: the release, as the user says it;
        `group`: the job's communicator. Raises UnknownVersion."""
        self.statements: list[str] = []
        self.refusals: list[str] = []
        self.unkept = 0
        """Messages for which there was no room: their values are not told."""
        self._hint = None if hint is None else _release(hint)
        self._told = told
        self._shown = ""  # the release as the set-up tells it, where nobody else does
        self._room = budget_bytes
        self._dtypes = dtypes
        self._sizes = Sizes(lambda size: known[1] if (known := dtypes(size)) is not None else None, buckets)
        self._group = group
        self._names: set[str] = set()
        self._flows: dict[FlowKey, Flow] = {}
        self._setups = SetupWatcher(flows)
        self._sockets = SocketTraffic(flows)
        self._blocks: set[int] = set()  # sizes of set-up blocks
        self._strange_blocks = 0

    def spans(self, spans: Spans) -> None:
        """A batch of TCP spans."""
        self._setups.feed(spans)
        self._sockets.feed(spans)

    def stream(self, stream: StreamSeen) -> None:
        """A TCP stream has ended. What a sender says when it sets a connection up tells the release by its length."""
        head = stream.head
        if head[:8] == _MAGIC and head[8:12] == (4).to_bytes(4, "little") and not stream.hole_bytes:
            sizes = {stream.length - _HELLO - devices - _READY for devices in _DEVICES}
            known = {size for size in sizes if block_versions(size)}
            self._blocks |= known
            self._strange_blocks += not known and stream.length > _HELLO

    def message(self, key: FlowKey, message: Message, begin: int, end: int, mtu: int) -> None:
        """An RDMA message is over. mtu: of its path, 0 if not known."""
        flow = self._flows.setdefault(key, Flow(key))
        keep = message.extent <= self._room
        self.unkept += not keep
        if keep:
            self._room -= message.extent
        flow.add(message, begin, end, keep)
        flow.mtu = max(flow.mtu, mtu)

    def gap(self, key: FlowKey, psn: int, packets: int) -> None:
        """Packets from this number on are missing, and so is what they belong to."""
        self._flows.setdefault(key, Flow(key)).gaps.append((psn, packets))

    def finish(self) -> None:
        """Nothing more comes. Raises UsageError where the user's word and the traffic contradict each other."""
        flows = list(self._flows.values())
        for flow in flows:
            flow.finish()
        found = connections(flows)
        setup = self._setups.setup(1 if self._group is None else self._group.qps)
        version = self._version(found, setup)
        known = None if version is None else traits(version)
        self.statements += self._sockets.statements(None if known is None else known.socket_inline)
        self.refusals += refused.of_setup(setup, self._strange_blocks, bool(flows), self._sockets.seen)
        self.refusals += refused.of_flows(flows, found)
        mute = sum(flow.carries_data for flow in flows) - sum(len(one.data) for one in found)
        if mute:
            self.statements.append(
                f"RDMA messages with immediates on {mute} queue pairs, as NCCL's, but not the entries that announce "
                "them: no collective of theirs is claimed: mirror the port's other direction too"
            )
        if not found:
            return
        if known is None or version is None:
            self.statements.append(f"NCCL of unknown release{self._told_spans()}: no collective is claimed: {_REMEDY}")
            return
        for one in found:
            if one.point_to_point:
                self._sends(one)
        self._collectives([one for one in found if not one.point_to_point], setup, version)

    # The release

    def _told_spans(self) -> str:
        spans = sorted({span_text(*span) for size in self._blocks for span in block_versions(size)})
        return f" (the set-up says one of {', '.join(spans)})" if spans else ""

    def _version(self, found: list[Connection], setup: Setup) -> str | None:
        """The release, None where it is not known."""
        evidence = [block_versions(size) for size in sorted(self._blocks)]
        evidence += [list(member.versions) for member in setup.communicators if member.versions]
        orders = {one.big_endian for one in found} - {None}
        big = orders.pop() if len(orders) == 1 else None
        told = self._group.version if self._group is not None else None
        word = self._hint or (None if told is None else parse(told))
        if word is None:
            fitting = [v for v in releases(evidence) if big in (None, traits(v).immediate_big_endian)]
            fitting = fitting if self._blocks else []
            if not fitting or not cut_alike(fitting):
                return None
            self._shown = span_text(fitting[0], fitting[-1])
            return ".".join(map(str, fitting[0]))
        name = ".".join(map(str, word))
        for spans in evidence:
            if not any(first <= word <= last for first, last in spans):
                raise UsageError(
                    f"{self._source} says NCCL {name}, the set-up in the capture is that of "
                    f"{', '.join(span_text(*span) for span in spans)}: leave it out, or give the right one"
                )
        if big not in (None, traits(word).immediate_big_endian):
            order = "big endian, as from 2.29.2 on" if big else "little endian, as up to 2.28"
            raise UsageError(
                f"{self._source} says NCCL {name}, immediates in the capture are {order}: give the right one"
            )
        form = traits(word).cts
        for one in found:
            if not any(_same_layout(CTS_FORMS[layout], form) for layout in one.forms):
                raise UsageError(
                    f"{self._source} says NCCL {name}, whose CTS entries have {form.entry} bytes; those on queue pair "
                    f"{one.pairs[0]} are those of NCCL {' or '.join(sorted(one.forms))}: give the right one"
                )
        return name

    @property
    def _source(self) -> str:
        """Who says which release it is."""
        return "--nccl-version" if self._hint is not None else "the job file"

    # Send and receive

    def _sends(self, one: Connection) -> None:
        """Messages of send and receive: one is over with the first message that does not fill its slot."""
        if len(one.data) > 1:
            return
        name = _hosts([one])
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

    def _collectives(self, found: list[Connection], setup: Setup, version: str) -> None:
        free = list(found)
        if self._group is not None:
            free = self._job(self._group, free, setup)
        for member in setup.communicators:
            named = group_of(member, version, "")
            bound = {} if named is None else bind(named, member, free)
            if named is not None and bound:
                self._read(replace(named, name=self._name(list(bound.values()))), bound)
            free = _without(free, bound)
        if self._group is not None:
            return
        for mesh in _meshes(free):
            group = _pair_group(mesh, version, self._name(mesh))
            if group is None:
                self.statements.append(
                    f"NCCL {version} between {', '.join(_ends(mesh))}: ranks and rings are not all seen, so no "
                    "collective is claimed: mirror both directions of the port, or give --job FILE"
                )
            else:
                (bound,) = list(assignments(group, mesh))
                self._read(group, bound, "; as many channels as were seen")

    def _job(self, group: NcclGroup, found: list[Connection], setup: Setup) -> list[Connection]:
        """Read the job's communicator; returns the connections that are not its."""
        members = [one for one in setup.communicators if same_job(group.addresses, group.world_size, one)]
        try:
            agreed = agreeing(group, members)
        except Contradiction as error:
            raise UsageError(str(error)) from None
        for member in agreed:
            bound = bind(group, member, found)
            if bound:
                self._read(group, bound)
                found = _without(found, bound)
        if agreed:
            return found
        ways = list(assignments(group, found))
        likeliest = self._likeliest(group, ways)
        between = [one for one in found if _between(group, one)]
        if not any(ways) and between:
            one = between[0]
            raise UsageError(
                f"the job file says that ranks {_links(group)} send to each other over the network; in the capture "
                f"rank {one.sender_rank} sends from {one.ends[0]} to {one.ends[1]}: give the job file of these trainers"
            )
        if likeliest is None:
            self.statements.append(
                f"communicator {group.name}: the capture does not tell which connection is on which channel, so no "
                "collective is claimed: mirror the set-up of the connections (TCP) too"
            )
            return _without(found, *ways)
        if likeliest:
            self._read(group, likeliest)
        return _without(found, likeliest)

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
            Line(edge, one, split and len(one.data) > 1, of.immediate_big_endian) for edge, one in sorted(
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
                    KINDS[one.kind], ALGORITHMS[one.algorithm], PROTOCOLS[one.protocol], edge.channel, edge.sender,
                    ordinal, one.size, known, final,
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
        if self._shown:
            return
        form = traits(group.version).cts
        tried = [parse(group.version)]
        for version in releases([]):
            if not _same_layout(traits(version).cts, form) or any(cut_alike([version, other]) for other in tried):
                continue
            tried.append(version)
            other = replace(group, version=".".join(map(str, version)))
            if len(read(other, self._lines(other, bound), self._sizes, number + 1).collectives) <= number:
                continue
            reading = read(other, self._lines(other, bound), self._sizes)
            if not reading.left:
                raise UsageError(
                    f"{self._source} says NCCL {group.version}, which does not cut collectives into the messages of "
                    f"the capture; NCCL {span_text(version, version)} explains all of them: give the right one"
                )

    def _name(self, found: list[Connection]) -> str:
        """What a communicator is called whose own name is not known: its hosts, with a number from the second on."""
        name = plain = _hosts(found)
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


def _line(kind: str, algorithm: str | None, protocol: str, channel: int | None, sender: int, ordinal: int,
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


def _release(text: str) -> Version:
    """The release that the user named."""
    version = parse(text)
    traits(version)
    return version


def _same_layout(one: CtsForm, other: CtsForm) -> bool:
    """Whether entries of two releases look alike: how many there are in a row does not show in one."""
    return replace(one, slots=0, rkey_count=0) == replace(other, slots=0, rkey_count=0)


def _ends(found: Sequence[Connection]) -> list[str]:
    return sorted({end for one in found for end in one.ends})


def _hosts(found: Sequence[Connection]) -> str:
    return " - ".join(_ends(found))


def _meshes(found: list[Connection]) -> list[list[Connection]]:
    """Connections by the hosts that they join, directly or over others."""
    meshes: list[tuple[set[str], list[Connection]]] = []
    for one in found:
        hosts, members = set(one.ends), [one]
        apart = []
        for others, theirs in meshes:
            if others & hosts:
                hosts |= others
                members = [*theirs, *members]
            else:
                apart.append((others, theirs))
        meshes = [*apart, (hosts, members)]
    return [members for _, members in meshes]


def _pair_group(mesh: list[Connection], version: str, name: str) -> NcclGroup | None:
    """The communicator of two ranks whose rings are all seen: rank 0 to rank 1 and back on every channel."""
    ways: list[list[Connection]] = [[], []]
    hosts: list[set[str]] = [set(), set()]
    for one in mesh:
        if one.sender_rank not in (0, 1):
            return None
        ways[one.sender_rank].append(one)
        hosts[one.sender_rank].add(one.ends[0])
        hosts[1 - one.sender_rank].add(one.ends[1])
    channels = len(ways[0])
    if channels != len(ways[1]) or not channels or hosts[0] & hosts[1]:
        return None
    return NcclGroup(
        name=name, world_size=2, version=version,
        addresses=tuple(tuple(sorted(side)) for side in hosts), nodes=(0, 1), channels=channels,
        rings=((0, 1),) * channels, algorithms=(RING,), protocols=(LL, LL128, SIMPLE), tree_pattern=0,
        search_channels=0, chains=(), heads=(), nvls_channels=0,
    )  # fmt: skip
