"""One NCCL communicator as plain facts, and the network connections that follow from them.

A connection is one direction between two ranks on one channel. Only connections between nodes are on the network; one
that ring, tree and NVLSTree share is one connection, which carries their collectives one after another (docs/nccl.md,
"Who talks to whom").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from reconstruct.nccl.schedule import (
    BROADCAST,
    DOWN,
    LL,
    LL128,
    NVLSTREE,
    RING,
    SIMPLE,
    TREE,
    UP,
)
from reconstruct.nccl.split import Communicator
from reconstruct.nccl.tree import BALANCED_TREE, SPLIT_TREE, TREE_PATTERN, channel_tree, gateways
from reconstruct.nccl.tree import edges as tree_edges
from reconstruct.nccl.versions import traits

__all__ = ["NOWHERE", "Edge", "NcclGroup", "communicator", "edges", "row_position"]

MOST_CHANNELS = 64
NOWHERE = -1
"""Position of a connection that carries nothing of a collective."""


@dataclass(frozen=True, slots=True)
class NcclGroup:
    """What is known of a communicator. Raises ValueError, which names the field, for what cannot be."""

    name: str
    world_size: int
    version: str
    """NCCL's release in full, as in 2.19.4."""
    addresses: tuple[tuple[str, ...], ...]
    """By rank: addresses of its node's RDMA interfaces; the ranks of a node share them."""
    nodes: tuple[int, ...]
    """By rank: its node. Nodes are counted in the order of their lowest rank."""
    channels: int
    """Channels of the communicator; 0: not known."""
    rings: tuple[tuple[int, ...], ...]
    """By channel: the ranks in ring order, from rank 0 on; (): not known."""
    algorithms: tuple[int, ...]
    """Which ones an all-reduce may use: RING, TREE, NVLSTREE."""
    protocols: tuple[int, ...]
    """Which ones any collective may use: LL, LL128, SIMPLE."""
    tree_pattern: int
    search_channels: int
    """Channels that the topology search of the tree found; 0: not known."""
    chains: tuple[tuple[tuple[int, ...], ...], ...]
    """By node, by search channel: its ranks in chain order, from the one that holds the link to the parent; (): not
    known. The first two ranks of a chain are enough."""
    heads: tuple[tuple[int, ...], ...]
    """By node: the rank of each NVLSTree head; (): none."""
    nvls_channels: int
    simple_threads: int = 512
    qps: int = 1
    """Queue pairs of a connection."""
    split: bool | None = None
    """Whether a message is split over them; None: as the release does by default."""
    sockets: bool = False
    """Whether its connections are NET/Socket's, over TCP, instead of queue pairs."""
    queue_pairs: tuple[tuple[str, int, int, int, int], ...] = ()
    """(receiver's address, its queue pair, channel, sender, receiver) of connections that the set-up traffic named."""

    def __post_init__(self) -> None:
        def need(holds: bool, field: str, why: str) -> None:
            if not holds:
                raise ValueError(f"NCCL group {self.name!r}: {field}: {why}")

        traits(self.version)
        world = self.world_size
        need(world >= 1, "world_size", f"{world} ranks")
        need(len(self.addresses) == world, "addresses", f"{len(self.addresses)} entries for {world} ranks")
        need(len(self.nodes) == world, "nodes", f"{len(self.nodes)} entries for {world} ranks")
        counted = 0
        for rank, node in enumerate(self.nodes):
            need(0 <= node <= counted, f"nodes[{rank}]", f"node {node} before {counted}: nodes count by lowest rank")
            counted = max(counted, node + 1)
        limit = range(MOST_CHANNELS + 1)
        need(self.channels in limit, "channels", f"{self.channels}, not 0 to {MOST_CHANNELS}")
        need(not self.rings or len(self.rings) == self.channels, "rings",
             f"{len(self.rings)} rings for {self.channels} channels")
        for channel, ring in enumerate(self.rings):
            need(sorted(ring) == list(range(world)), f"rings[{channel}]", f"not every rank once: {ring}")
            need(ring[0] == 0, f"rings[{channel}]", f"begins at rank {ring[0]}, not 0")
        need(bool(self.algorithms) and set(self.algorithms) <= {RING, TREE, NVLSTREE}, "algorithms",
             f"{self.algorithms}")
        need(bool(self.protocols) and set(self.protocols) <= {LL, LL128, SIMPLE}, "protocols", f"{self.protocols}")
        need(self.search_channels in limit, "search_channels", f"{self.search_channels}")
        self._check_trees(need, counted)
        need(self.simple_threads in (256, 512), "simple_threads", f"{self.simple_threads}, not 256 or 512")
        need(1 <= self.qps <= 128, "qps", f"{self.qps} queue pairs")
        need(not self.sockets or self.qps == 1, "sockets", f"and {self.qps} queue pairs a connection")

    def _check_trees(self, need: Callable[[bool, str, str], None], nodes: int) -> None:
        need(not self.chains or len(self.chains) == nodes, "chains", f"{len(self.chains)} entries for {nodes} nodes")
        patterns = (TREE_PATTERN, BALANCED_TREE, SPLIT_TREE)
        need(not self.chains or self.tree_pattern in patterns, "tree_pattern", f"{self.tree_pattern}, not 1, 2 or 3")
        for node, chains in enumerate(self.chains):
            need(len(chains) == self.search_channels, f"chains[{node}]",
                 f"{len(chains)} chains for {self.search_channels} search channels")
            for number, chain in enumerate(chains):
                need(bool(chain) and len(set(chain)) == len(chain) and self._on_node(chain, node),
                     f"chains[{node}][{number}]", f"not ranks of node {node}: {chain}")
                need(len(chain) > 1 or self.nodes.count(node) == 1, f"chains[{node}][{number}]",
                     f"only rank {chain[0]} of several on the node")
        need(not self.heads or len(self.heads) == nodes, "heads", f"{len(self.heads)} entries for {nodes} nodes")
        need(0 <= self.nvls_channels <= MOST_CHANNELS, "nvls_channels", f"{self.nvls_channels}")
        need(not self.heads or self.nvls_channels > 0, "nvls_channels", "0, but there are heads")
        for node, heads in enumerate(self.heads):
            need(len(heads) == len(self.heads[0]) > 0, f"heads[{node}]", "as many heads on every node, at least one")
            need(len(set(heads)) == len(heads) and self._on_node(heads, node), f"heads[{node}]",
                 f"not ranks of node {node}: {heads}")

    def _on_node(self, ranks: Iterable[int], node: int) -> bool:
        return all(0 <= rank < self.world_size and self.nodes[rank] == node for rank in ranks)


@dataclass(frozen=True, slots=True)
class Edge:
    """One network connection, and what it is to each algorithm."""

    channel: int
    sender: int
    receiver: int
    ring: bool
    ring_index: int
    """Of the sender; -1: not an edge of the ring."""
    tree: int
    """UP or DOWN; -1: no link of the tree."""
    nvls: int
    """UP or DOWN; -1: no link of the NVLSTree."""
    head: int = -1
    """Which head of its node the sender is; -1: no link of the NVLSTree."""


def communicator(group: NcclGroup) -> Communicator:
    """What schedules need to know of the group. Raises ValueError if the number of channels is not known."""
    if not group.channels:
        raise ValueError(f"NCCL group {group.name!r}: channels: not known, so the split of a collective is not either")
    return Communicator(
        traits(group.version), group.world_size, group.channels, max(group.nodes) + 1,
        simple_threads=group.simple_threads, nvls_channels=group.nvls_channels or 16,
        heads=len(group.heads[0]) if group.heads else 0,
    )  # fmt: skip


def edges(group: NcclGroup) -> list[Edge]:
    """Every network connection that collectives of the group can use, by channel, sender and receiver.

    Rings are listed where `rings` is known, trees and NVLSTrees where they may be used and their shape is known: a
    connection that is missing here is one of which nothing can be claimed.
    """
    ring: dict[tuple[int, int, int], int] = {}
    for channel, order in enumerate(group.rings):
        for index, sender in enumerate(order):
            receiver = order[(index + 1) % len(order)]
            if group.nodes[sender] != group.nodes[receiver]:
                ring[channel, sender, receiver] = index
    tree = _tree_links(group) if TREE in group.algorithms and group.chains and group.channels else {}
    nvls = _nvls_links(group) if NVLSTREE in group.algorithms and group.heads else {}
    result = []
    for key in sorted({*ring, *tree, *nvls}):
        way, head = nvls.get(key, (-1, -1))
        result.append(Edge(*key, key in ring, ring.get(key, -1), tree.get(key, -1), way, head))
    return result


def _tree_links(group: NcclGroup) -> dict[tuple[int, int, int], int]:
    """(channel, sender, receiver) -> UP or DOWN."""
    result = {}
    shapes = [tree_edges(len(group.chains), tree) for tree in (0, 1)]
    for channel in range(group.channels):
        search, tree = channel_tree(TREE, channel, group.search_channels)
        roles = [gateways(group.tree_pattern, chains[search]) for chains in group.chains]
        for child, parent, kind in shapes[tree]:
            below, above = roles[child][0], roles[parent][1 + kind]
            result[channel, below, above] = UP
            result[channel, above, below] = DOWN
    return result


def _nvls_links(group: NcclGroup) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(channel, sender, receiver) -> (UP or DOWN, head)."""
    result = {}
    shapes = [tree_edges(len(group.heads), tree) for tree in (0, 1)]
    for channel in range(group.nvls_channels):
        _, tree = channel_tree(NVLSTREE, channel, 0)
        for child, parent, _ in shapes[tree]:
            for head, (below, above) in enumerate(zip(group.heads[child], group.heads[parent], strict=True)):
                result[channel, below, above] = UP, head
                result[channel, above, below] = DOWN, head
    return result


def row_position(edge: Edge, algorithm: int, kind: int, root: int = 0, ring: Sequence[int] = ()) -> int:
    """The sender's position for `schedule.place`; NOWHERE if the connection carries nothing of it.

    root: rank that broadcasts. ring: the ring order of the edge's channel; needed where the root is not rank 0, which
    begins every ring. Raises ValueError without it.
    """
    if algorithm == TREE:
        return edge.tree
    if algorithm == NVLSTREE:
        return edge.nvls
    if not edge.ring or kind != BROADCAST or root == 0:
        return edge.ring_index
    if root not in ring:
        raise ValueError(f"a broadcast from rank {root}: where on the ring that is takes the order of the ring")
    return (edge.ring_index - ring.index(root)) % len(ring)
