"""A communicator as its traffic shows it: release, ranks on nodes and rails, rings, trees, heads.

Which GPU follows which is found by NCCL's search of the machine; here it is what that search finds on a node whose GPUs
are all alike: search channel k visits a node's ranks from local rank k on. Own reading of NCCL's source
(src/graph/connect.cc, src/graph/trees.cc, src/enqueue.cc); shares nothing with `reconstruct`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from flowcheck.errors import UsageError
from flowcheck.lab.addresses import Port

RING, TREE, NVLSTREE = "ring", "tree", "nvlstree"
ALGORITHMS = (RING, TREE, NVLSTREE)
LL, LL128, SIMPLE = "ll", "ll128", "simple"
PROTOCOLS = (LL, LL128, SIMPLE)
BALANCED, PLAIN = 1, 3
"""Tree patterns: child 0 of a node hangs at its second GPU, or everything at the first."""
MAX_CHANNELS = 32
FRAME_HEADERS = 40 + 8 + 12 + 16 + 4 + 4
"""Most that an IP packet has beside its payload: IPv6, UDP, BTH, RETH, immediate, CRC."""
KNOWN = ((2, 18), (2, 30))


@dataclass(frozen=True)
class Job:
    """One communicator.

    ranks: world size; members: each rank's place among all ranks of the cluster (default 0, 1, ..), of which
    `gpus_per_node` share a node; rails: interfaces per node, of which a rank uses that of its local index mod rails.
    algorithm and protocol: of all-reduces, None to choose by size; a protocol holds for ring copies, too.
    qps, split: queue pairs per connection, and whether one message is cut over them (None: the release's default).
    mtu: RoCE path MTU. number: of the communicator; keeps queue pairs and memory of several apart.
    """

    ranks: int
    gpus_per_node: int = 1
    version: str = "2.19.4"
    algorithm: str | None = None
    protocol: str | None = None
    channels: int = 1
    rails: int = 1
    mtu: int = 1024
    ipv6: bool = False
    qps: int = 1
    split: bool | None = None
    simple_threads: int = 512
    pattern: int | None = None
    members: tuple[int, ...] | None = None
    number: int = 0

    def __post_init__(self) -> None:
        if not KNOWN[0] <= self.release[:2] <= KNOWN[1]:
            raise UsageError(f"NCCL {self.version} is not known: give a release from 2.18 to 2.30, such as 2.19.4")
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise UsageError(f"{self.channels} channels are not possible: choose 1 to {MAX_CHANNELS}")
        if not 1 <= self.rails <= self.gpus_per_node:
            raise UsageError(f"{self.rails} rails: a node with {self.gpus_per_node} GPUs uses 1 to that many")
        if self.algorithm == NVLSTREE and self.protocol not in (None, SIMPLE):
            raise UsageError(f"NVLSTree knows no {self.protocol}: choose --protocol simple")
        if self.members is not None and (len(self.members) != self.ranks or len(set(self.members)) != self.ranks):
            raise UsageError(f"{self.ranks} ranks need as many different members, not {self.members}")

    @cached_property
    def release(self) -> tuple[int, ...]:
        parts = self.version.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise UsageError(f"NCCL version {self.version!r} is unreadable: give three numbers, such as 2.19.4")
        return tuple(int(part) for part in parts)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """By rank: the cluster's node it runs on."""
        return tuple(member // self.gpus_per_node for member in self.members or range(self.ranks))

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        """By rank: the switch port it uses."""
        local = (member % self.gpus_per_node for member in self.members or range(self.ranks))
        return tuple(Port(host, index % self.rails) for host, index in zip(self.hosts, local, strict=True))

    @cached_property
    def node_ranks(self) -> tuple[tuple[int, ...], ...]:
        """By node of the communicator: its ranks, ascending. Nodes count by their lowest rank."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @property
    def nodes(self) -> int:
        return len(self.node_ranks)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        where = {rank: node for node, ranks in enumerate(self.node_ranks) for rank in ranks}
        return tuple(where[rank] for rank in range(self.ranks))

    @property
    def search_channels(self) -> int:
        """What the graph search found: the other half of the channels are copies of these."""
        return max(1, min(self.channels // 2, self.ranks // self.nodes))

    @property
    def tree_pattern(self) -> int:
        if self.ranks == self.nodes:
            return PLAIN
        return BALANCED if self.pattern is None else self.pattern

    def chain(self, node: int, search: int) -> tuple[int, ...]:
        """The ranks of a node in the order in which search channel `search` visits them."""
        ranks = self.node_ranks[node]
        start = search % len(ranks)
        return ranks[start:] + ranks[:start]

    def ring(self, channel: int) -> tuple[int, ...]:
        """The ranks in ring order, from rank 0 on."""
        return self._rings[channel]

    def tree(self, channel: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """(root rank, by rank its children in the order in which they are added)."""
        return self._trees[channel]

    def head_tree(self, channel: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """NVLSTree: (root node, by node its children); the same nodes for every head."""
        return self._head_trees[channel % 2]

    @cached_property
    def _rings(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._ring(channel) for channel in range(self.channels))

    @cached_property
    def _trees(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        return tuple(self._tree(channel) for channel in range(self.channels))

    @cached_property
    def _head_trees(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        return tuple(self._head_tree(shape) for shape in range(2))

    def _ring(self, channel: int) -> tuple[int, ...]:
        search = channel % self.search_channels
        order = tuple(rank for node in range(self.nodes) for rank in self.chain(node, search))
        start = order.index(0)
        return order[start:] + order[:start]

    def _tree(self, channel: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        search, shape = channel % self.search_channels, channel % (2 * self.search_channels) // self.search_channels
        parents = node_parents(self.nodes, shape)
        below = node_children(self.nodes, shape)
        children: list[list[int]] = [[] for _ in range(self.ranks)]
        for node in range(self.nodes):
            chain = self.chain(node, search)
            for upper, lower in pairwise(chain):
                children[upper].append(lower)
        for node in range(self.nodes):
            chain = self.chain(node, search)
            for which, child in enumerate(below[node]):
                holder = chain[1] if which == 0 and self.tree_pattern == BALANCED and len(chain) > 1 else chain[0]
                if child >= 0:
                    children[holder].append(self.chain(child, search)[0])
        return self.chain(parents.index(-1), search)[0], tuple(tuple(found) for found in children)

    @property
    def heads(self) -> int:
        """NVLSTree: ranks per node that have a network interface for themselves."""
        return min(self.rails, *(len(ranks) for ranks in self.node_ranks))

    def _head_tree(self, shape: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        below = tuple(tuple(child for child in pair if child >= 0) for pair in node_children(self.nodes, shape))
        return node_parents(self.nodes, shape).index(-1), below


def _plain(nodes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Parents and the two children (-1: none) in the plain tree."""
    parents, children = [-1], [(-1, 1 << (nodes - 1).bit_length() - 1 if nodes > 1 else -1)]
    for node in range(1, nodes):
        bit = node & -node
        up = (node ^ bit) | bit << 1
        parents.append(up if up < nodes else node ^ bit)
        half = bit >> 1
        low = node - half if half else -1
        while half and node + half >= nodes:
            half >>= 1
        children.append((low, node + half if half else -1))
    return parents, children


def _image(nodes: int, shape: int, node: int) -> int:
    """Tree 1 is the plain tree seen from the other end, or moved up by one where the number of nodes is odd."""
    if shape == 0:
        return node
    return nodes - 1 - node if nodes % 2 == 0 else (node + 1) % nodes


def node_parents(nodes: int, shape: int) -> tuple[int, ...]:
    """Tree `shape` (0 or 1): every node's parent, -1 for the root."""
    parents = [-1] * nodes
    for node, parent in enumerate(_plain(nodes)[0]):
        parents[_image(nodes, shape, node)] = -1 if parent < 0 else _image(nodes, shape, parent)
    return tuple(parents)


def node_children(nodes: int, shape: int) -> tuple[tuple[int, int], ...]:
    """Tree `shape`: every node's child 0 and child 1, -1 for none."""
    children = [(-1, -1)] * nodes
    for node, (low, high) in enumerate(_plain(nodes)[1]):
        children[_image(nodes, shape, node)] = (
            -1 if low < 0 else _image(nodes, shape, low),
            -1 if high < 0 else _image(nodes, shape, high),
        )
    return tuple(children)
