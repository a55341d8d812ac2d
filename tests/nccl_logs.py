"""NCCL's log lines, written by hand after its source: what each rank of a made-up communicator says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowcheck import nccl_log


@dataclass
class Cluster:
    """`nodes` hosts of `gpus` GPUs; ring and trees as NCCL's documentation of its search has them.

    channels: by channel, the order of GPUs in a node; the first half uses tree 0, the second tree 1 of two nodes.
    """

    nodes: int = 2
    gpus: int = 2
    orders: Sequence[Sequence[int]] = ((0, 1), (1, 0), (0, 1), (1, 0))
    version: str = "2.19.4+cuda12.1"
    prefix: str = "node{node}:{pid}:{pid} [{gpu}] NCCL INFO "
    heads: int = 0
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def ring(self, channel: int) -> list[int]:
        order = [node * self.gpus + gpu for node in range(self.nodes) for gpu in self.orders[channel]]
        start = order.index(0)
        return order[start:] + order[:start]

    def tree(self, channel: int, rank: int) -> str:
        """`d0/d1/d2->rank->up` for two nodes: node 0 is the root of the first half's trees, node 1 of the others."""
        order = self.orders[channel]
        root = 0 if channel < len(self.orders) // 2 else 1
        node, gpu = divmod(rank, self.gpus)
        place = list(order).index(gpu)
        down = [node * self.gpus + order[place + 1]] if place + 1 < self.gpus else []
        up = node * self.gpus + order[place - 1] if place else -1 if node == root else root * self.gpus + order[0]
        if place == 0 and node == root:
            down.append((1 - root) * self.gpus + order[0])
        children = (*down, -1, -1, -1)[:3]
        return f"[{channel}] {'/'.join(map(str, children))}->{rank}->{up}"

    def lines(self, rank: int, *, only: str = "", without: str = "") -> list[str]:
        node, gpu = divmod(rank, self.gpus)
        head = self.prefix.format(node=node, pid=900 + rank, gpu=gpu)
        said = [f"comm 0x55aa rank {rank} nranks {self.world} cudaDev {gpu} busId 1000 commId 0x77 - Init START"]
        count = len(self.orders)
        if rank == 0:
            said += [f"Channel {channel:02d}/{count:02d} : {' '.join(f'{r:3d}' for r in self.ring(channel))}"
                     for channel in range(count)]
        said.append("Trees " + " ".join(self.tree(channel, rank) for channel in range(count)))
        for channel in range(count):
            ring = self.ring(channel)
            at = ring.index(rank)
            said.append(f"Ring {channel:02d} : {ring[at - 1]} -> {rank} -> {ring[(at + 1) % len(ring)]}")
        said += [f"NVLS Head {h:2d}: " + " ".join(f"{n * self.gpus + h:2d}" for n in range(self.nodes))
                 for h in range(self.heads)]
        said += ["Channel 00/0 : 3[1] -> 0[0] [send] via NET/IB/0/GDRDMA", "Connected all rings"]
        nvls = 16 if self.heads else 0
        said.append(f"{count} coll channels, 0 collnet channels, {nvls} nvls channels, 4 p2p channels")
        said.append(f"comm 0x55aa rank {rank} nranks {self.world} cudaDev {gpu} busId 1000 commId 0x77 - Init COMPLETE")
        lines = [head + text for text in said if only in text and (not without or without not in text)]
        return [f"NCCL version {self.version}", *lines] if rank == 0 else lines

    def contributions(self, **changes: Any) -> list[dict[str, Any]]:
        """As `flowcheck.nccl_facts.contribution` makes them; keywords: of `lines`."""
        made = []
        for rank in range(self.world):
            log = nccl_log.parse(self.lines(rank, **changes))
            made.append({
                "node": f"host{rank // self.gpus}",
                "addresses": ["172.17.0.1", f"10.0.0.{rank // self.gpus + 1}"],
                "version": log.version,
                "settings": dict(self.settings),
                "networks": sorted(log.networks),
                "communicators": [one.to_json() for one in log.of_group(rank, self.world)],
            })  # fmt: skip
        return made
