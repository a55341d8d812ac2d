"""What NCCL's set-up traffic tells of the connections of a capture: release, communicators, which queue pair is what.

Where the set-up was not captured, the connections of a job's communicator are found by trying: queue pairs of two
ranks rise in the order of their channels, and the lengths of messages tell the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, combinations, islice, permutations, product

from flowcheck.errors import UsageError
from flowcheck.inspect.nccl_flows import Connection, Flow
from reconstruct.nccl.bootstrap import Member, NetConnection
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.schedule import LL, LL128, RING, SIMPLE, TREE
from reconstruct.nccl.versions import UnknownVersion, Version, traits

__all__ = ["Span", "assignments", "bind", "cut_alike", "member_group", "releases", "same_job", "span_text"]

Span = tuple[Version, Version]
_MINORS, _PATCHES = range(18, 31), (0, 2, 7)
_MOST_ASSIGNMENTS = 48


def releases(evidence: Collection[Sequence[Span]]) -> list[Version]:
    """The known releases that lie, for each piece of evidence, in one of its spans."""
    result = []
    for version in ((2, minor, patch) for minor in _MINORS for patch in _PATCHES):
        try:
            traits(version)
        except UnknownVersion:
            continue
        if all(any(first <= version <= last for first, last in spans) for spans in evidence):
            result.append(version)
    return result


def cut_alike(versions: Sequence[Version]) -> bool:
    """Whether all of them cut collectives into messages alike."""
    facts = set()
    for version in versions:
        of = traits(version)
        facts.add((of.scheme, of.minimum_traffic, of.cell_rule, of.ll_traffic, of.nvls_chunk, of.nvls_chunk_4))
    return len(facts) == 1


def span_text(first: Version, last: Version) -> str:
    """2.19, 2.20 to 2.23"""
    names = [f"{v[0]}.{v[1]}" if v[2] in (0, 99) or v[:2] != (2, 29) else ".".join(map(str, v)) for v in (first, last)]
    return names[0] if names[0] == names[1] else f"{names[0]} to {names[1]}"


# Communicators


def member_group(member: Member, version: str, name: str) -> NcclGroup | None:
    """The communicator as the set-up shows it; None where that does not tell its rings and channels.

    A node is on every ring, so a node whose ring connections were seen shows how many channels there are.
    """
    two = member.world_size == 2
    rings = member.rings or (((0, 1),) if two else ())
    nodes = member.nodes or ((0, 1) if two else ())
    seen: dict[int, set[int]] = {}
    for one in member.connections:
        if one.kind == "ring" and one.channel >= 0:
            for rank in (one.sender, one.receiver):
                seen.setdefault(nodes[rank] if nodes else -1, set()).add(one.channel)
    counts = {len(channels) for channels in seen.values()}
    if not rings or not nodes or len(counts) != 1 or any(max(c) + 1 != len(c) for c in seen.values()):
        return None
    (channels,) = counts
    addresses: list[dict[str, None]] = [{} for _ in range(max(nodes) + 1)]
    for one in member.connections:
        for rank, gid in ((one.sender, one.sender_gid), (one.receiver, one.receiver_gid)):
            if rank >= 0:
                addresses[nodes[rank]][gid] = None
    # Between two ranks a tree's sums look like copies; NCCL has no reason to use one there.
    trees = bool(member.chains) and member.world_size > 2
    return NcclGroup(
        name=name, world_size=member.world_size, version=version,
        addresses=tuple(tuple(addresses[node]) for node in nodes), nodes=nodes, channels=channels,
        rings=tuple(rings[channel % len(rings)] for channel in range(channels)),
        algorithms=(RING, TREE) if trees else (RING,), protocols=(LL, LL128, SIMPLE),
        tree_pattern=member.tree_pattern, search_channels=member.search_channels, chains=member.chains, heads=(),
        nvls_channels=0,
    )  # fmt: skip


def same_job(group: NcclGroup, member: Member) -> bool:
    """Whether a communicator of the capture runs between the described one's interfaces, rank by rank."""
    ends = [(one.sender, one.sender_gid) for one in member.connections]
    ends += [(one.receiver, one.receiver_gid) for one in member.connections]
    known = [(rank, gid) for rank, gid in ends if rank >= 0]
    return bool(known) and all(rank < group.world_size and gid in group.addresses[rank] for rank, gid in known)


def bind(group: NcclGroup, member: Member, found: Sequence[Connection]) -> dict[Edge, Connection]:
    """The connections of a communicator, by the queue pairs that its set-up named.

    Raises UsageError where the set-up and the entries on the wire name different senders.
    """
    by_place = {(edge.channel, edge.sender, edge.receiver): edge for edge in edges(group)}
    named: dict[Edge, NetConnection] = {}
    trees: dict[tuple[int, int], list[NetConnection]] = {}
    for one in member.connections:
        edge = by_place.get((one.channel, one.sender, one.receiver))
        if one.kind == "ring" and edge is not None:
            named[edge] = one
        elif one.kind == "tree":
            trees.setdefault((one.sender, one.receiver), []).append(one)
    for ends, made in trees.items():
        # A tree makes connections only where the ring has none, one after another by rising channel.
        own = [edge for edge in by_place.values() if (edge.sender, edge.receiver) == ends and not edge.ring]
        if len(own) == len(made):
            own.sort(key=lambda edge: edge.channel)
            named |= dict(zip(own, sorted(made, key=lambda one: one.receiver_qps), strict=True))
    result = {}
    for edge, told in named.items():
        for seen in found:
            if told.receiver_qps[0] in seen.pairs and seen.ends == (told.sender_gid, told.receiver_gid):
                if seen.sender_rank != edge.sender:
                    raise UsageError(
                        f"queue pair 0x{told.receiver_qps[0]:x}: the set-up in the capture says that rank "
                        f"{edge.sender} sends to it, the CTS entries say rank {seen.sender_rank}: the capture mixes "
                        "several jobs; inspect them one by one"
                    )
                result[edge] = seen
    shown = {one.ends for one in result.values()}
    for edge, told in named.items():
        hosts = told.sender_gid, told.receiver_gid
        if edge not in result and hosts in shown:
            result[edge] = _idle(edge, hosts, told.receiver_qps)
    return result


def _idle(edge: Edge, ends: tuple[str, str], pairs: Sequence[int] = (0,)) -> Connection:
    """A connection that carries nothing, between ports of which everything is mirrored."""
    return Connection([Flow((0, *ends, pair)) for pair in pairs], edge.sender, set(), set())


def assignments(group: NcclGroup, found: Sequence[Connection]) -> Iterator[dict[Edge, Connection]]:
    """Ways in which connections can be the communicator's: senders by their entries, receivers by their addresses,
    channels rising with queue pairs. What is between other addresses belongs to none."""
    links: dict[tuple[int, int], list[Edge]] = {}
    for edge in edges(group):
        links.setdefault((edge.sender, group.nodes[edge.receiver]), []).append(edge)
    choices: list[list[list[tuple[Edge, Connection]]]] = []
    for (sender, node), candidates in links.items():
        there = group.addresses[group.nodes.index(node)]
        mine = sorted(
            (
                one for one in found
                if one.sender_rank == sender and one.ends[0] in group.addresses[sender] and one.ends[1] in there
            ),
            key=lambda one: one.pairs,
        )  # fmt: skip
        if 0 < len(mine) <= len(candidates):
            ways = islice(_orders(candidates, len(mine)), _MOST_ASSIGNMENTS)
            choices.append([list(zip(way, mine, strict=True)) for way in ways])
    for way in islice(product(*choices), _MOST_ASSIGNMENTS):
        bound = dict(chain.from_iterable(way))
        shown = {one.ends for one in bound.values()}
        for edge in edges(group):
            own, far = group.addresses[edge.sender], group.addresses[edge.receiver]
            if edge not in bound and len(own) == len(far) == 1 and (own[0], far[0]) in shown:
                bound[edge] = _idle(edge, (own[0], far[0]))
        yield bound


def _orders(candidates: Sequence[Edge], number: int) -> Iterator[tuple[Edge, ...]]:
    """Ways to choose `number` connections in the order in which they can have been made: between two ranks by rising
    channel, or the ring's first and then those that only trees use."""
    told: set[tuple[Edge, ...]] = set()
    for key in (lambda edge: (False, edge.channel), lambda edge: (not edge.ring, edge.channel)):
        ordered = sorted(candidates, key=key)
        if len({edge.receiver for edge in candidates}) == 1:
            ways: Iterator[tuple[Edge, ...]] = combinations(ordered, number)
        else:
            ways = (
                way for way in permutations(ordered, number)
                if all(
                    ordered.index(a) < ordered.index(b)
                    for a, b in combinations(way, 2) if a.receiver == b.receiver
                )
            )  # fmt: skip
        for way in ways:
            if way not in told:
                told.add(way)
                yield way
