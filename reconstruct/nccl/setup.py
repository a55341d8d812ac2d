"""What a communicator's set-up traffic says against what is described of it, and what it adds.

A communicator of the traffic is the described one if it joins the same interfaces, rank by rank. Where several do, the
description has to agree with one; what it lacks is filled in only if all that agree say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from flowcheck.errors import FlowcheckError
from reconstruct.nccl.bootstrap import Member, NetConnection, Setup, Span
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.refusals import REFUSALS
from reconstruct.nccl.schedule import LL, LL128, NVLSTREE, RING, SIMPLE, TREE
from reconstruct.nccl.versions import UnknownVersion, Version, parse, traits

__all__ = [
    "Contradiction", "Untold", "agreeing", "check", "communicators", "filled", "group_of", "named", "of_job",
    "queue_pairs", "release", "releases", "same_job", "span_text",
]

Addresses = Sequence[Sequence[str]]
_MINORS, _PATCHES = range(18, 31), (0, 2, 7)


class Contradiction(FlowcheckError):
    """What was said of a job and what its traffic shows cannot both be."""


class Untold(FlowcheckError):
    """Neither the description nor the traffic tells what has to be known; the message says what to do."""


# Releases


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


def release(members: Iterable[Member]) -> str | None:
    """The release that communicators were set up by; None if it is not told, or several remain that differ in
    anything but their set-up."""
    spans = {span for one in members for span in (one.versions, *(made.versions for made in one.connections)) if span}
    fitting = releases(spans) if spans else []
    alike = {
        replace(traits(one), version=(0, 0, 0), block=None, graph=traits((2, 18, 0)).graph, socket_inline=0)
        for one in fitting
    }
    return ".".join(map(str, fitting[0])) if len(alike) == 1 else None


def span_text(first: Version, last: Version) -> str:
    """2.19, 2.20 to 2.23"""
    names = [f"{v[0]}.{v[1]}" if v[2] in (0, 99) or v[:2] != (2, 29) else ".".join(map(str, v)) for v in (first, last)]
    return names[0] if names[0] == names[1] else f"{names[0]} to {names[1]}"


# Which communicator is which


def same_job(addresses: Addresses, world_size: int, member: Member) -> bool:
    """Whether a communicator runs between these interfaces (by rank), all its ranks where they should be.

    Its queue pairs' interfaces tell; where none of them was seen, the addresses on which its ranks listen.
    """
    if member.world_size != world_size:
        return False
    ends = [(one.sender, one.sender_gid) for one in member.connections]
    ends += [(one.receiver, one.receiver_gid) for one in member.connections]
    known = [(rank, gid) for rank, gid in ends if rank >= 0]
    if not known:
        known = [(rank, end[0]) for rank, end in enumerate(member.addresses) if end is not None]
    return bool(known) and all(rank < world_size and address in addresses[rank] for rank, address in known)


def of_job(addresses: Addresses, world_size: int, setup: Setup) -> list[Member]:
    """The communicators between these interfaces that have not ended."""
    return [one for one in setup.communicators if not one.over and same_job(addresses, world_size, one)]


def agreeing(group: NcclGroup, members: Iterable[Member]) -> list[Member]:
    """Those that are as described. Raises Contradiction if there are some and none of them is."""
    agreed, errors = [], []
    for member in members:
        try:
            check(group, member)
            agreed.append(member)
        except Contradiction as error:
            errors.append(error)
    if errors and not agreed:
        raise errors[0]
    return agreed


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
    if group.channels and member.channels not in (0, group.channels):
        raise both("channels", group.channels, member.channels)
    if group.channels and member.least_channels > group.channels:
        raise both("channels", group.channels, f"at least {member.least_channels}")
    if group.heads and member.heads and group.heads != member.heads:
        raise both("heads", group.heads, member.heads)
    if group.chains and member.chains:
        _check_trees(group, member, both)


def _check_trees(group: NcclGroup, member: Member, both: Callable[[str, object, object], Contradiction]) -> None:
    """Trees are compared by their links: a log does not tell what makes no difference to them."""
    shown = replace(
        group, algorithms=(TREE,), tree_pattern=member.tree_pattern, search_channels=member.search_channels,
        chains=member.chains,
    )  # fmt: skip
    if edges(replace(group, algorithms=(TREE,))) == edges(shown):
        return
    for field, said, seen in (
        ("search_channels", group.search_channels, member.search_channels),
        ("tree_pattern", group.tree_pattern, member.tree_pattern),
    ):
        if said != seen:
            raise both(field, said, seen)
    for node, (said_, seen_) in enumerate(zip(group.chains, member.chains, strict=True)):
        for number, (one, other) in enumerate(zip(said_, seen_, strict=True)):
            if one[:2] != other[:2]:
                raise both(f"chains[{node}][{number}]", one, other)


def _span(span: Span) -> str:
    low, high = (".".join(str(part) for part in one if part != 99) for one in span)
    return low if low == high else f"{low} to {high}"


# What the traffic adds


def filled(group: NcclGroup, members: Sequence[Member]) -> NcclGroup:
    """The group with the rings, trees and channels that its communicators' set-up shows; as it is if it has rings.

    members: those that agree with it. Raises Untold where they do not tell everything, or differ.
    """
    if group.rings:
        return group
    made = [_with(group, member) for member in members if member.channels]
    if not made:
        raise Untold(str(REFUSALS["rings"]))
    if any(other != made[0] for other in made):
        raise Untold(
            f"{len(made)} communicators of these ranks were set up, with different rings or channels, and nothing "
            f"tells which is the job's. {REFUSALS['rings']}"
        )
    return made[0]


def _with(group: NcclGroup, member: Member) -> NcclGroup:
    rings, nodes = member.rings or ((0, 1),), member.nodes or (0, 1)
    algorithms = group.algorithms
    if NVLSTREE in algorithms:
        if not member.headless:
            raise Untold(str(REFUSALS["nvls-channels"]))
        algorithms = tuple(one for one in algorithms if one != NVLSTREE)
    if TREE in algorithms and not member.chains:
        raise Untold(str(REFUSALS["trees"]))
    trees = TREE in algorithms
    return replace(
        group, nodes=nodes, channels=member.channels, algorithms=algorithms or (RING,),
        rings=tuple(rings[channel % len(rings)] for channel in range(member.channels)),
        tree_pattern=member.tree_pattern if trees else 0, search_channels=member.search_channels if trees else 0,
        chains=member.chains if trees else (),
    )  # fmt: skip


def group_of(member: Member, version: str, name: str) -> NcclGroup | None:
    """The communicator as its set-up alone shows it; None where that does not tell its rings and channels."""
    two = member.world_size == 2
    rings = member.rings or (((0, 1),) if two else ())
    nodes = member.nodes or ((0, 1) if two else ())
    if not member.channels:
        return None
    addresses: list[dict[str, None]] = [{} for _ in range(max(nodes) + 1)]
    for one in member.connections:
        for rank, gid in ((one.sender, one.sender_gid), (one.receiver, one.receiver_gid)):
            if rank >= 0:
                addresses[nodes[rank]][gid] = None
    # Between two ranks a tree's sums look like copies; NCCL has no reason to use one there.
    trees = bool(member.chains) and member.world_size > 2
    return NcclGroup(
        name=name, world_size=member.world_size, version=version,
        addresses=tuple(tuple(addresses[node]) for node in nodes), nodes=nodes, channels=member.channels,
        rings=tuple(rings[channel % len(rings)] for channel in range(member.channels)),
        algorithms=(RING, TREE) if trees else (RING,), protocols=(LL, LL128, SIMPLE),
        tree_pattern=member.tree_pattern, search_channels=member.search_channels, chains=member.chains, heads=(),
        nvls_channels=0,
    )  # fmt: skip


def communicators(setup: Setup) -> list[NcclGroup]:
    """Those whose set-up tells rings and channels, without those that have ended if others have not. Under one of the
    releases that it may be of: for what does not depend on the release."""
    found = []
    live = [member for member in setup.communicators if not member.over]
    for number, member in enumerate(live or setup.communicators):
        fitting = releases([span for span in (member.versions, *(c.versions for c in member.connections)) if span])
        group = group_of(member, ".".join(map(str, fitting[0])), str(number)) if fitting else None
        if group is not None:
            found.append(group)
    return found


# Queue pairs


def named(group: NcclGroup, member: Member) -> dict[Edge, NetConnection]:
    """The connections of a communicator whose set-up was seen."""
    by_place = {(edge.channel, edge.sender, edge.receiver): edge for edge in edges(group)}
    found: dict[Edge, NetConnection] = {}
    trees: dict[tuple[int, int], list[NetConnection]] = {}
    for one in member.connections:
        edge = by_place.get((one.channel, one.sender, one.receiver))
        if one.kind == "ring" and edge is not None:
            found[edge] = one
        elif one.kind == "tree":
            trees.setdefault((one.sender, one.receiver), []).append(one)
    for ends, made in trees.items():
        # A tree makes connections only where the ring has none, one after another by rising channel.
        own = [edge for edge in by_place.values() if (edge.sender, edge.receiver) == ends and not edge.ring]
        if len(own) == len(made):
            own.sort(key=lambda edge: edge.channel)
            found |= dict(zip(own, sorted(made, key=lambda one: one.receiver_qps), strict=True))
    return found


def queue_pairs(group: NcclGroup, members: Sequence[Member]) -> tuple[tuple[str, int, int, int, int], ...]:
    """As in `NcclGroup.queue_pairs`. Two communicators of the same ranks name none: whose is the group's?"""
    if len(members) != 1:
        return ()
    return tuple(
        (told.receiver_gid, number, edge.channel, edge.sender, edge.receiver)
        for edge, told in named(group, members[0]).items() for number in told.receiver_qps
    )  # fmt: skip
