"""A job's process group, as its description gives it, in the decoders' own terms."""

from __future__ import annotations

from dataclasses import replace

from flowcheck.description import GroupRecord, JobDescription
from flowcheck.errors import UsageError
from reconstruct.gloo.events import Group
from reconstruct.nccl.bootstrap import Setup
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.setup import agreeing, filled, of_job, queue_pairs, release
from reconstruct.nccl.versions import parse

__all__ = ["completed", "connections", "gloo_group", "nccl_group", "same_trainers", "with_setup"]


def connections(record: GroupRecord) -> dict[tuple[str, int, str, int], tuple[int, int]]:
    """(source ip, source port, destination ip, destination port) -> (sender, receiver), both ways of each connection.

    A connection is known when both of its ends reported it, or when one end did and the other is a listener.
    """
    owner = {(ip, port): rank for context in record.contexts for rank, (ip, port) in context.items()}
    owner |= {(ip, port): rank for rank, ip, port, _, _ in record.sockets}
    known = {}
    for rank, ip, port, peer_ip, peer_port in record.sockets:
        peer = owner.get((peer_ip, peer_port))
        if peer is not None:
            known[ip, port, peer_ip, peer_port] = (rank, peer)
            known[peer_ip, peer_port, ip, port] = (peer, rank)
    return known


def gloo_group(name: str, record: GroupRecord, vantage: int | None) -> Group:
    """The group under `name`, seen in one vantage group or in any."""
    return Group(name, record.world_size, record.contexts, connections(record), vantage)


def nccl_group(name: str, record: GroupRecord, hint: str | None = None) -> NcclGroup:
    """The communicator under `name`. hint: NCCL's version by the daemon's own options.

    Raises UsageError where description and hint contradict each other or neither tells the version, UnknownVersion
    for a release that is not known here, ValueError for facts that do not go together.
    """
    facts = record.nccl
    if facts is None:
        raise ValueError(f"group {record.name!r} is no NCCL communicator")
    if facts.version is None and hint is None:
        raise UsageError("the trainers could not tell NCCL's version: give the daemon --nccl-version, as in 2.19.4")
    if facts.version is not None and hint is not None and not _same_release(facts.version, hint):
        raise UsageError(
            f"the trainers use NCCL {facts.version}, --nccl-version says {hint}: leave it out, or give the right one"
        )
    return NcclGroup(
        name=name,
        world_size=record.world_size,
        version=facts.version or hint or "",
        addresses=facts.addresses,
        nodes=facts.nodes,
        channels=facts.channels,
        rings=facts.rings,
        algorithms=facts.algorithms,
        protocols=facts.protocols,
        tree_pattern=facts.tree_pattern,
        search_channels=facts.search_channels,
        chains=facts.chains,
        heads=facts.heads,
        nvls_channels=facts.nvls_channels,
        simple_threads=facts.simple_threads,
        qps=facts.qps,
        split=facts.split,
        sockets=facts.sockets,
    )


def completed(name: str, record: GroupRecord, setup: Setup, hint: str | None) -> GroupRecord:
    """A communicator's record with what the set-up traffic adds to it: release, rings, trees, channels.

    Raises as `nccl_group` does, Contradiction where they differ, Untold where neither tells.
    """
    facts = record.nccl
    if facts is None:
        return record
    members = of_job(facts.addresses, record.world_size, setup)
    if facts.version is None and hint is None:
        facts = replace(facts, version=release(members))
    group = nccl_group(name, replace(record, nccl=facts), hint)
    group = filled(group, agreeing(group, members))
    known = replace(
        facts, channels=group.channels, rings=group.rings, algorithms=group.algorithms,
        tree_pattern=group.tree_pattern, search_channels=group.search_channels, chains=group.chains,
    )  # fmt: skip
    return replace(record, nccl=known)


def with_setup(group: NcclGroup, setup: Setup) -> NcclGroup:
    """The communicator with the queue pairs that the set-up traffic names. Raises Contradiction where they differ."""
    members = of_job(group.addresses, group.world_size, setup)
    return replace(group, queue_pairs=queue_pairs(group, agreeing(group, members)))


def _same_release(told: str, hint: str) -> bool:
    """Whether a hint, which may leave out the patch, is the release told."""
    if hint.strip().count(".") == 1:
        return parse(told)[:2] == parse(f"{hint.strip()}.0")[:2]
    return parse(told) == parse(hint)


def same_trainers(one: JobDescription, other: JobDescription) -> bool:
    """Whether two jobs name the same process group, so that they are the same trainers.

    gloo: a common listener. NCCL has none: the same interfaces, rank by rank.
    """
    a, b = one.group, other.group
    if a.backend != b.backend or (a.vantage != b.vantage and None not in (a.vantage, b.vantage)):
        return False
    if a.nccl is not None and b.nccl is not None:
        return a.nccl.addresses == b.nccl.addresses
    addresses = {address for context in a.contexts for address in context.values()}
    return any(address in addresses for context in b.contexts for address in context.values())
