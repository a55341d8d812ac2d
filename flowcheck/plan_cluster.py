"""The question that `plan` answers: a model, its parallel layout, the network and the checkpoint nodes.

Ranks are counted tp, shard, replicate, pp from the inside, as Megatron and torch's device meshes do. Sizes are in
bytes, speeds in bit/s, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowcheck.errors import UsageError

ITEMSIZE = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "amsgrad": 3}
"""fp32 values that the optimizer keeps per parameter."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What was asked: the model, how it is laid out, the network and the checkpoint nodes."""

    params: float
    dtype: str
    reduce_dtype: str
    optimizer: str
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    shard: int
    replicate: int
    rails: int
    link: float
    monitor: float
    mirror_sessions: int
    step_seconds: float
    nodes_per_leaf: int
    monitor_ports: int = 2
    node_memory: float = 1024 * 2**30
    node_cores: int = 32
    restore_link: float = 100e9
    storage_rate: float = 10e9
    node_cost: float = 0.1
    mtbf_seconds: float | None = None

    def __post_init__(self) -> None:
        parts, gpus = self.tp * self.pp * self.shard * self.replicate, self.gpus
        if parts != gpus:
            raise UsageError(
                f"tp x pp x shard x replicate = {self.tp} x {self.pp} x {self.shard} x {self.replicate} = {parts}, "
                f"but nodes x gpus-per-node = {self.nodes} x {self.gpus_per_node} = {gpus}: they must be equal"
            )
        inner, size = self.tp * self.shard, self.gpus_per_node
        if size % inner and inner % size:
            raise UsageError(
                f"tp x shard = {inner} ranks neither fill nor divide a node of {size} GPUs: no plan for such layouts"
            )
        if inner < size < inner * self.replicate and self.replicate % (size // inner):
            raise UsageError(
                f"replicate {self.replicate} does not fill nodes of {size // inner} replicas: pipeline stages would "
                "share nodes, no plan for such layouts"
            )
        if size % self.rails and self.rails % size:
            raise UsageError(f"{self.rails} rails cannot be shared evenly by {size} GPUs of a node")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def members(self) -> int:
        """Ranks of one reduce group on one node (ranks are counted tp, shard, replicate, pp from the inside)."""
        return max(1, self.gpus_per_node // (self.tp * self.shard))

    @property
    def blocks(self) -> int:
        """Nodes that one replica of one pipeline stage takes."""
        return max(1, self.tp * self.shard // self.gpus_per_node)

    @property
    def ring_nodes(self) -> int:
        """Nodes of one reduce group's ring; 0 or 1: the ring never leaves a node."""
        return self.replicate // self.members

    @property
    def slices(self) -> int:
        """Sets of nodes that hold the same part of the model."""
        return self.pp * self.blocks

    @property
    def state_bytes_per_param(self) -> int:
        master = 4 if ITEMSIZE[self.dtype] < 4 else 0
        return ITEMSIZE[self.dtype] + master + 4 * SLOTS[self.optimizer]
