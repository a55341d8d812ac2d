"""The trees of a communicator out of every rank's `Trees` lines: search channels, chains, pattern (docs/nccl.md).

The lines tell each rank's neighbours on each channel. Within a node they make a chain; between nodes they must be one
of the two trees that NCCL builds, and the first channel on the second tree tells the number of search channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowcheck.nccl_log import Communicator, Node
from reconstruct.nccl.schedule import TREE
from reconstruct.nccl.tree import BALANCED_TREE, SPLIT_TREE, TREE_PATTERN, channel_tree, parents

__all__ = ["Chains", "tree_facts"]

Chains = tuple[tuple[tuple[int, ...], ...], ...]


def tree_facts(members: Sequence[Communicator], nodes: Sequence[int]) -> tuple[int, int, Chains] | None:
    """(tree pattern, search channels, chains by node and search channel); None if lines are missing.

    members: by rank; nodes: of each rank. Long lines are cut by NCCL: what is not there is taken to go on like the
    rest. Raises ValueError if the lines are no trees of NCCL's.
    """
    channels = min((len(one.trees) for one in members), default=0)
    if not channels or any(set(range(channels)) - one.trees.keys() for one in members):
        return None
    trees, chains = [], []
    for channel in range(channels):
        rows = [one.trees[channel] for one in members]
        if any(row[1] != rank for rank, row in enumerate(rows)):
            raise ValueError(f"channel {channel}: a tree of other ranks")
        chains.append(_chains(rows, nodes, channel))
        trees.append(_tree(rows, nodes, [chain[0] for chain in chains[-1]], channel))
    search = trees.index(1) if 1 in trees else channels
    for channel in range(channels):
        place, tree = channel_tree(TREE, channel, search)
        if tree != trees[channel] or chains[place] != chains[channel]:
            raise ValueError(f"channel {channel}: its tree does not follow from {search} search channels")
    pattern = _pattern(members, nodes, chains, channels)
    count = max(nodes) + 1
    return pattern, search, tuple(tuple(chains[k][node] for k in range(search)) for node in range(count))


def _chains(rows: Sequence[Node], nodes: Sequence[int], channel: int) -> list[tuple[int, ...]]:
    """By node: its ranks from the one at the top down."""
    result = []
    for node in range(max(nodes) + 1):
        mine = [rank for rank, at in enumerate(nodes) if at == node]
        tops = [rank for rank in mine if rows[rank][2] < 0 or nodes[rows[rank][2]] != node]
        chain = tops[:1]
        while chain and len(chain) < len(mine):
            below = [child for child in rows[chain[-1]][0] if child >= 0 and nodes[child] == node]
            if len(below) != 1 or below[0] in chain:
                break
            chain += below
        if len(tops) != 1 or len(chain) != len(mine):
            raise ValueError(f"channel {channel}: the ranks {mine} of one node are no chain")
        result.append(tuple(chain))
    return result


def _tree(rows: Sequence[Node], nodes: Sequence[int], tops: Sequence[int], channel: int) -> int:
    """Which of the two trees connects the nodes."""
    seen = [-1 if rows[top][2] < 0 else nodes[rows[top][2]] for top in tops]
    for tree in (0, 1):
        if seen == parents(len(tops), tree):
            return tree
    raise ValueError(f"channel {channel}: nodes with the parents {seen} are none of NCCL's trees")


def _pattern(
    members: Sequence[Communicator], nodes: Sequence[int], chains: Sequence[list[tuple[int, ...]]], channels: int
) -> int:
    """Which ranks of a node hold its links to children. Where no child tells, any pattern is right."""
    at_top = below = False
    for channel in range(channels):
        for node, chain in enumerate(chains[channel]):
            for place, rank in enumerate(chain):
                far = [c for c in members[rank].trees[channel][0] if c >= 0 and nodes[c] != node]
                if far and place > 1:
                    raise ValueError(f"channel {channel}: rank {rank} has a child on another node")
                at_top, below = at_top or bool(far and place == 0), below or bool(far and place == 1)
    return TREE_PATTERN if not below else BALANCED_TREE if at_top else SPLIT_TREE
