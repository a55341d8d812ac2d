"""A rank's record in the bootstrap's graph all-gather: rings, trees and heads out of the records of all ranks.

The offsets are those of `reconstruct.nccl.versions.GraphInfo` (docs/nccl.md, "Set-up").
"""

from __future__ import annotations

import numpy as np

from reconstruct.nccl.versions import GraphInfo

__all__ = ["GraphRecord", "chains", "heads", "rings"]

Rings = tuple[tuple[int, ...], ...]


class GraphRecord:
    """One rank's record, int32 values."""

    def __init__(self, data: bytes, form: GraphInfo) -> None:
        self.form = form
        self.values = np.frombuffer(data, "<i4")
        self.tree_pattern = int(self.values[form.tree_pattern // 4])
        self.tree_channels = int(self.values[form.tree_channels // 4])
        self.ring_channels = int(self.values[form.ring_channels // 4])
        self.head_count = int(self.values[form.head_count // 4]) if form.head_count >= 0 else 0
        # Eight words an algorithm from 2.21 on, crossNic the last; from 2.28 on it stands before the arrays, too.
        words = [form.ring_channels // 4 + 6] if form.ring_channels == 36 else []
        words += [form.ring_receive // 4 - 1] if form.ring_receive % 32 == 4 else []
        self.straight = bool(words) and not self.values[words].any()
        """Whether rings surely go through the same rail everywhere."""

    def at(self, offset: int, channel: int, array: int = 0) -> int:
        return int(self.values[offset // 4 + array * self.form.channels + channel])


def _firsts(nodes: tuple[int, ...]) -> list[int]:
    """The lowest rank of each node: any rank's record speaks for its node."""
    return [nodes.index(node) for node in range(max(nodes) + 1)]


def _search_channels(records: list[GraphRecord]) -> int:
    """Channels that all ranks found; 0 if the records cannot be such."""
    count = min(min(record.tree_channels, record.ring_channels) for record in records)
    return count if 0 < count <= records[0].form.channels else 0


def rings(records: list[GraphRecord], nodes: tuple[int, ...]) -> Rings:
    """The ring of each search channel; () if one of them is no ring over all ranks, or cannot be told.

    Where adapters of different rails talk to each other, NCCL exchanges neighbouring channels on every other node
    (`connect.cc`, crossNic). Records before 2.21 do not say whether it does.
    """
    count = _search_channels(records)
    straight = _walks(records, nodes, count, 0)
    crossed = count % 2 == 0 and not all(record.straight for record in records)
    return straight if not crossed or _walks(records, nodes, count, 1) == straight else ()


def _walks(records: list[GraphRecord], nodes: tuple[int, ...], count: int, exchanged: int) -> Rings:
    """exchanged: 1 to take the neighbouring channel's place on nodes with odd numbers."""
    found = []
    form, firsts = records[0].form, [records[rank] for rank in _firsts(nodes)]
    for channel in range(count):
        at = [channel ^ (exchanged & node) for node in range(max(nodes) + 1)]
        into = [record.at(form.ring_receive, at[node], 0) for node, record in enumerate(firsts)]
        out = [record.at(form.ring_receive, at[node], 1) for node, record in enumerate(firsts)]
        # Inside a node along ringNext; from a node's last GPU to the first one of the next node.
        after = {rank: record.at(form.ring_receive, at[nodes[rank]], 3) for rank, record in enumerate(records)}
        after |= {rank: into[(node + 1) % len(into)] for node, rank in enumerate(out)}
        ring = [0]
        while len(ring) < len(nodes) and after[ring[-1]] in after:
            ring.append(after[ring[-1]])
        if sorted(ring) != list(range(len(nodes))) or after[ring[-1]] != 0:
            return ()
        found.append(tuple(ring))
    return tuple(found)


def chains(records: list[GraphRecord], nodes: tuple[int, ...]) -> tuple[int, int, tuple[Rings, ...]]:
    """(pattern, search channels, chains); (0, 0, ()) if the records are no trees."""
    nothing: tuple[int, int, tuple[Rings, ...]] = (0, 0, ())
    count = _search_channels(records)
    patterns = {record.tree_pattern for record, node in zip(records, nodes, strict=True) if nodes.count(node) > 1}
    if not count or len(patterns) > 1 or not patterns <= {1, 2, 3}:
        return nothing
    result = []
    for node, first in enumerate(_firsts(nodes)):
        form, here = records[first].form, [rank for rank in range(len(nodes)) if nodes[rank] == node]
        own = []
        for channel in range(count):
            up = records[first].at(form.tree_parent, channel)
            down = records[first].at(form.tree_child0, channel)
            if up not in here or down not in here:
                return nothing
            rest = [rank for rank in here if rank not in (up, down)]
            own.append((up, down) if down != up else (up, *rest[:1]))
        result.append(tuple(own))
    return patterns.pop() if patterns else 3, count, tuple(result)


def heads(records: list[GraphRecord], nodes: tuple[int, ...]) -> Rings:
    """By node: the rank of each NVLS head; () if there are none, or they are not ranks of their nodes."""
    count = min(record.head_count for record in records)
    if not 0 < count <= records[0].form.channels:
        return ()
    found = [tuple(records[r].at(records[r].form.heads, h) for h in range(count)) for r in _firsts(nodes)]
    right = all(0 <= rank < len(nodes) and nodes[rank] == node for node, on in enumerate(found) for rank in on)
    return tuple(found) if right and all(len(set(on)) == count for on in found) else ()
