"""Which chunks of NCCL's all-reduces the mirrored links show, by the decoder's own schedule, for any number of hosts.

The facts of the communicator come from the job file or from set-up traffic in the capture. A link between two hosts is
taken to be the communicator's connections there if as many were seen as these are; else nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reconstruct.groups import normal
from reconstruct.nccl.blueprint import Blueprints
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.schedule import ALLREDUCE, LL, NVLSTREE, RING, SIMPLE, SLOT_DATA, TREE
from reconstruct.nccl.split import Collective

__all__ = ["Coverage", "Pair", "coverage"]

_NAMES = {RING: "ring", TREE: "tree", NVLSTREE: "NVLSTree"}
_ROLE: dict[int, Callable[[Edge], bool]] = {
    RING: lambda edge: edge.ring, TREE: lambda edge: edge.tree >= 0, NVLSTREE: lambda edge: edge.nvls >= 0,
}  # fmt: skip
_USED = ((RING,), (TREE,), (NVLSTREE,), (RING, TREE), (RING, NVLSTREE), (RING, TREE, NVLSTREE))
_ITEM = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """What was seen of the connections from one host to another. announced: connections whose CTS entries came, and
    ranks: the senders that these name; carrying: queue pairs whose data came."""

    announced: int
    carrying: int
    ranks: frozenset[int] = frozenset()

    def __add__(self, other: Pair) -> Pair:
        named = self.ranks and other.ranks  # where one is without entries, any rank of the host may be the sender
        return Pair(
            self.announced + other.announced, self.carrying + other.carrying,
            self.ranks | other.ranks if named else frozenset(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Coverage:
    """What passes of the all-reduces of one algorithm on some channels, which are alike.

    parts: chunks of a ring, heads of an NVLSTree; a tree has one part: every slice. never, once: those of which some
    final value passes never, or once at the least.
    """

    hosts: tuple[str, ...]
    algorithm: str
    channels: tuple[int, ...]
    parts: int
    never: tuple[int, ...]
    once: tuple[int, ...]


def coverage(group: NcclGroup, pairs: Mapping[tuple[str, str], Pair]) -> list[Coverage] | None:
    """By algorithm and channels. pairs: by (sender's, receiver's) address; None: the links do not tell what is seen,
    as while small collectives leave channels idle; [] if none of them is the group's."""
    node = {normal(address): group.nodes[rank] for rank, own in enumerate(group.addresses) for address in own}
    seen: dict[tuple[int, int], Pair] = {}
    hosts = set()
    for ends, pair in pairs.items():
        a, b = (node.get(normal(end), -1) for end in ends)
        if min(a, b) < 0 or a == b:
            continue
        seen[a, b] = seen[a, b] + pair if (a, b) in seen else pair
        hosts |= set(ends)
    if not seen:
        return []
    every = edges(group)
    fitting = []
    for used in _USED:
        shown = _shown(group, [edge for edge in every if any(_ROLE[one](edge) for one in used)], seen)
        if shown is not None:
            fitting.append((used, shown))
    if not fitting or any(shown != fitting[0][1] for _, shown in fitting):
        return None
    used, shown = fitting[0]
    found = []
    for algorithm in sorted(set(group.algorithms) & set(used)):
        found += _of_algorithm(group, algorithm, every, shown, tuple(sorted(hosts)))
    return found


def _shown(group: NcclGroup, own: Sequence[Edge], seen: Mapping[tuple[int, int], Pair]) -> set[Edge] | None:
    """The connections of which data came, if those seen are all of `own` between their hosts; else None."""
    shown: set[Edge] = set()
    for (a, b), pair in seen.items():
        here = [
            edge for edge in own
            if (group.nodes[edge.sender], group.nodes[edge.receiver]) == (a, b)
            and (not pair.ranks or edge.sender in pair.ranks)
        ]  # fmt: skip
        if pair.carrying % group.qps or max(pair.announced, pair.carrying // group.qps) != len(here):
            return None
        if pair.carrying not in (0, len(here) * group.qps):
            return None
        shown |= set(here) if pair.carrying else set()
    return shown


def _of_algorithm(
    group: NcclGroup, algorithm: int, every: Sequence[Edge], shown: Collection[Edge], hosts: tuple[str, ...]
) -> list[Coverage]:
    """By channel, and channels that are alike together."""
    protocol = SIMPLE if algorithm == NVLSTREE else LL if LL in group.protocols else group.protocols[0]
    channels = group.nvls_channels if algorithm == NVLSTREE else group.channels
    # Large enough for every channel, and for two loops of full chunks.
    count = 4 * max(channels, 1) * group.world_size * SLOT_DATA[protocol] // _ITEM
    made = Blueprints(group).get(Collective(ALLREDUCE, algorithm, protocol, count, _ITEM))
    if made is None:
        return []
    result: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for channel in range(channels):
        counts: dict[int, dict[int, int]] = {}  # part -> offset -> how many links show it
        for edge in every:
            piece = made.part(edge) if edge.channel == channel and _ROLE[algorithm](edge) else None
            if piece is None:
                continue
            rows = piece.places[(piece.places[:, 6] > 0) & (piece.places[:, 5] > 0)]
            parts = rows[:, 3] if algorithm == RING else np.full(len(rows), max(0, edge.head))
            for part, offset in zip(parts.tolist(), rows[:, 4].tolist(), strict=True):
                at = counts.setdefault(part, {})
                at[offset] = at.get(offset, 0) + (edge in shown)
        least = {part: min(at.values()) for part, at in counts.items()}
        never, once = (tuple(sorted(p for p, n in least.items() if n == wanted)) for wanted in (0, 1))
        result.setdefault((len(least), never, once), []).append(channel)
    return [Coverage(hosts, _NAMES[algorithm], tuple(on), *facts) for facts, on in result.items()]
