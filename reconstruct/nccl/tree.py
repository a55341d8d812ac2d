"""NCCL's trees over nodes, and the messages of Tree and NVLSTree all-reduces (docs/nccl.md, "Trees").

A tree connects nodes (hosts), numbered by the lowest rank on each. Up links (child to parent) carry sums of a subtree,
down links (parent to child) final values; the k-th message of every link of a channel, up or down, covers the same
elements. Inside a node nothing of it is on the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reconstruct.nccl.schedule import (
    BASE,
    CHUNK,
    END,
    GRAIN,
    LAST,
    LL,
    LL128,
    LOOP,
    LOOPS,
    NVLSTREE,
    SIMPLE,
    SLOT_DATA,
    START,
    begin_row,
)
from reconstruct.nccl.split import Collective, Communicator, Share, Unsupported, round_up

__all__ = [
    "BALANCED_TREE", "SPLIT_TREE", "TREE_PATTERN", "channel_tree", "edges", "gateways", "node_numbers", "parents",
    "tree_rows",
]

BALANCED_TREE, SPLIT_TREE, TREE_PATTERN = 1, 2, 3
"""How a node's GPUs share the network links of a tree; a node with one GPU always has TREE_PATTERN."""


def node_numbers(hosts: Sequence[str]) -> list[int]:
    """Node number of each rank, given the host of each rank: hosts count in the order of their lowest rank."""
    order: dict[str, int] = {}
    return [order.setdefault(host, len(order)) for host in hosts]


def _plain(nodes: int, node: int) -> tuple[int, int]:
    """(parent, which child of it) in the plain tree; (-1, -1) for its root, node 0."""
    if node == 0:
        return -1, -1
    bit = node & -node
    parent = node ^ bit | 2 * bit
    if parent >= nodes:
        parent = node ^ bit
    return parent, int(node > parent)


def _place(nodes: int, tree: int, node: int) -> int:
    """Which node of the plain tree `node` plays: tree 1 is its mirror image, or with odd `nodes` shifted by one."""
    if tree == 0:
        return node
    return nodes - 1 - node if nodes % 2 == 0 else (node - 1) % nodes


def edges(nodes: int, tree: int) -> list[tuple[int, int, int]]:
    """(child node, parent node, 0 or 1: which child it is) of tree 0 or 1, by rising child."""
    played = [_place(nodes, tree, node) for node in range(nodes)]
    who = {role: node for node, role in enumerate(played)}
    result = []
    for node, role in enumerate(played):
        parent, kind = _plain(nodes, role)
        if parent >= 0:
            result.append((node, who[parent], kind))
    return result


def parents(nodes: int, tree: int) -> list[int]:
    """Parent of each node in tree 0 or 1; -1 for the root."""
    result = [-1] * nodes
    for child, parent, _ in edges(nodes, tree):
        result[child] = parent
    return result


def channel_tree(algorithm: int, channel: int, search_channels: int) -> tuple[int, int]:
    """(search channel, tree) of a channel; NVLSTree has no search channels, its trees alternate.

    search_channels: those that the topology search of the tree found, before they were copied.
    """
    if algorithm == NVLSTREE:
        return 0, channel % 2
    place = channel % (2 * search_channels)
    return place % search_channels, place // search_channels


def gateways(pattern: int, chain: Sequence[int]) -> tuple[int, int, int]:
    """Ranks of a node that hold the links to (parent, child 0, child 1), given its ranks in the order of the chain."""
    if pattern == TREE_PATTERN or len(chain) == 1:
        return chain[0], chain[0], chain[0]
    if pattern == BALANCED_TREE:
        return chain[0], chain[1], chain[0]
    if pattern == SPLIT_TREE:
        return chain[0], chain[1], chain[1]
    raise Unsupported(f"tree pattern {pattern} is not known")


def tree_rows(comm: Communicator, call: Collective, parts: Sequence[Share], head: int = 0) -> list[np.ndarray]:
    """The row of each share of an all-reduce on Tree or NVLSTree; `head`: which head of its node (NVLSTree)."""
    make = _nvls_row if call.algorithm == NVLSTREE else _tree_row
    return [make(comm, call, part, head) for part in parts]


def _log2(value: int) -> int:
    return value.bit_length() - 1


def _halved(size: int, chunk: int, limits: Sequence[tuple[float, int]]) -> int:
    """Halve `chunk` while it goes fewer than `often` whole times into `size` and is above `least`, rule by rule."""
    for often, least in limits:
        while size // chunk < often and chunk > least:
            chunk //= 2
    return chunk


def _tree_chunk(comm: Communicator, call: Collective, size: int, channels: int) -> int:
    """Bytes of a chunk: smaller where the tree is deep and the tensor is not large enough to fill the pipeline."""
    scheme = comm.traits.scheme
    chunk = SLOT_DATA[call.protocol]
    if call.protocol == SIMPLE and scheme == "A":
        depth = comm.ranks // comm.nodes - 1 + _log2(comm.nodes)
        rules = [(8 * depth, 131072), (4 * depth, 65536), (depth, 32768)]
        return _halved(size, chunk * channels, [(often, least * channels) for often, least in rules]) // channels
    if call.protocol == LL128:
        per_node = np.float32(comm.ranks) / np.float32(comm.nodes)
        deep = np.float32(1 + _log2(comm.nodes) + 0.1 * float(per_node))
        rules128 = [(float(deep * np.float32(64) / per_node), 131072), (float(deep * np.float32(16) / per_node), 32768)]
        wire = scheme == "A"  # the older rule counts flags as data
        chunk = chunk // 15 * 16 if wire else chunk
        limits = [(often, least * channels) for often, least in rules128]
        chunk = _halved(size, chunk * channels, limits) // channels
        chunk = chunk // 16 * 15 if wire else chunk
    return chunk // GRAIN[call.protocol] * GRAIN[call.protocol] if scheme == "C" else chunk


def _tree_row(comm: Communicator, call: Collective, part: Share, head: int) -> np.ndarray:
    row = begin_row(call.kind, call.algorithm, call.protocol, call.itemsize, comm.ranks)
    count, itemsize = call.count, call.itemsize
    scheme = comm.traits.scheme
    size = (part.count if scheme == "C" else count) * itemsize
    chunk = _tree_chunk(comm, call, size, 1 if scheme == "C" else part.shares) // itemsize
    if scheme == "A":
        loop = part.shares * chunk
        row[[START, END, LOOPS, LOOP, BASE]] = 0, count, -(-count // loop), loop, part.number
        if loop > count:
            unit = _tree_unit(call.protocol, itemsize, part.threads)
            chunk = round_up(-(-count // part.shares), unit)
    else:
        row[[START, END]] = part.first, part.first + part.count
        row[[LOOPS, LOOP]] = -(-part.count // chunk), chunk
    row[[CHUNK, LAST]] = chunk
    return row


def _tree_unit(protocol: int, itemsize: int, threads: int) -> int:
    """Scheme A: elements to which the only chunk of a small all-reduce is rounded up."""
    if protocol == SIMPLE:
        return (threads - 64) * 8 * (8 // itemsize)
    return threads * (8 // itemsize) if protocol == LL else threads * (60 // itemsize) // 8


def _nvls_row(comm: Communicator, call: Collective, part: Share, head: int) -> np.ndarray:
    if not 0 <= head < comm.heads:
        raise ValueError(f"head {head} of {comm.heads}")
    row = begin_row(call.kind, call.algorithm, call.protocol, call.itemsize, comm.ranks)
    count, itemsize, heads = call.count, call.itemsize, comm.heads
    traits = comm.traits
    many = (1 if traits.scheme == "C" else comm.nvls_channels) * heads
    size = (part.count if traits.scheme == "C" else count) * itemsize
    bytes_ = min(traits.nvls_chunk, traits.nvls_chunk_4) if comm.nodes >= 4 else traits.nvls_chunk
    for often, less in ((32, 262144), (16, 131072), (4, 65536), (1, 32768)):
        if size < often * many * bytes_ and bytes_ > less:
            bytes_ = less
    chunk = bytes_ // itemsize
    if traits.scheme == "A":
        loop = part.shares * heads * chunk
        row[[START, END, LOOPS, LOOP, BASE]] = 0, count, -(-count // loop), loop, part.number * heads + head
        row[[CHUNK, LAST]] = chunk
        return row
    loop = heads * chunk
    loops = -(-part.count // loop)
    rest = part.count - (loops - 1) * loop
    unit = (4096 if traits.scheme == "B" else 16) // itemsize
    row[[START, END, LOOPS, LOOP, BASE]] = part.first, part.first + part.count, loops, loop, head
    row[[CHUNK, LAST]] = chunk, chunk if rest >= loop else round_up(-(-rest // heads), unit)
    return row
