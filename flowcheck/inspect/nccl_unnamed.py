"""Connections of which neither a set-up nor a job file tells what they are."""

from __future__ import annotations

from collections.abc import Sequence

from flowcheck.inspect.nccl_flows import Connection
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.schedule import LL, LL128, RING, SIMPLE

__all__ = ["ends", "hosts", "meshes", "pair_group"]


def ends(found: Sequence[Connection]) -> list[str]:
    """The hosts that connections join."""
    return sorted({end for one in found for end in one.ends})


def hosts(found: Sequence[Connection]) -> str:
    """The same in words."""
    return " - ".join(ends(found))


def meshes(found: list[Connection]) -> list[list[Connection]]:
    """Connections by the hosts that they join, directly or over others."""
    joined: list[tuple[set[str], list[Connection]]] = []
    for one in found:
        own, members = set(one.ends), [one]
        apart = []
        for others, theirs in joined:
            if others & own:
                own |= others
                members = [*theirs, *members]
            else:
                apart.append((others, theirs))
        joined = [*apart, (own, members)]
    return [members for _, members in joined]


def pair_group(mesh: list[Connection], version: str, name: str) -> NcclGroup | None:
    """The communicator of two ranks whose rings are all seen: rank 0 to rank 1 and back on every channel."""
    ways: list[list[Connection]] = [[], []]
    sides: list[set[str]] = [set(), set()]
    for one in mesh:
        if one.sender_rank not in (0, 1):
            return None
        ways[one.sender_rank].append(one)
        sides[one.sender_rank].add(one.ends[0])
        sides[1 - one.sender_rank].add(one.ends[1])
    channels = len(ways[0])
    if channels != len(ways[1]) or not channels or sides[0] & sides[1]:
        return None
    return NcclGroup(
        name=name, world_size=2, version=version,
        addresses=tuple(tuple(sorted(side)) for side in sides), nodes=(0, 1), channels=channels,
        rings=((0, 1),) * channels, algorithms=(RING,), protocols=(LL, LL128, SIMPLE), tree_pattern=0,
        search_channels=0, chains=(), heads=(), nvls_channels=0,
    )  # fmt: skip
