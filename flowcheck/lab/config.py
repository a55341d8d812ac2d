"""What a lab is asked to be. Imports nothing heavy: every process of the lab reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowcheck.errors import UsageError
from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire_job import ALGORITHMS, FRAME_HEADERS, PROTOCOLS, Job

MAX_NODES = 200
DIRECTIONS = {"in": ("in",), "out": ("out",), "both": ("in", "out")}
NETWORKS = ("training", "management")
TCP, ROCE, SOCKET = TRANSPORTS = ("tcp", "roce", "socket")
PATH_MTUS = (1024, 4096)
# A unix socket's address holds 108 bytes, the last one is zero.
MAX_IPC_PATH = 107


@dataclass(frozen=True, slots=True)
class Mirror:
    """One mirrored switch port: `in` is what that rank's node sends, `out` is what it receives."""

    rank: int
    direction: str

    @classmethod
    def parse(cls, text: str) -> Mirror:
        """Read `RANK:in|out|both`. Raises UsageError."""
        rank, colon, direction = text.partition(":")
        if not colon or not rank.isascii() or not rank.isdigit() or direction not in DIRECTIONS:
            raise UsageError(
                f"mirror {text!r} is unreadable: write RANK:in, RANK:out or RANK:both, such as 1:both"
            )
        return cls(int(rank), direction)


@dataclass(frozen=True, slots=True)
class LabConfig:
    """One lab.

    `transport` tcp: trainers use what they ask for, gloo over the kernel's TCP. roce: whatever they ask for, the
    lab's own backend reduces as the NCCL release `nccl_version` would, and sends what NCCL would send over RoCEv2;
    socket: the same over the kernel's TCP (NET/Socket).
    `algorithm` and `protocol` None are chosen by size, as NCCL does.
    A node's `rails` interfaces are shared by its ranks: each uses that of its local rank modulo rails.
    `mtu`: of the interfaces (0: 1500); for roce the RDMA path MTU, 1024 or 4096 (0: 1024).
    `command` is what Python runs on every rank: `("train.py", "--lr", "1")` or `("-m", "package.train")`.
    `mirrors` None means both directions of all ports of rank 1's node (rank 0's if it is alone); `()` mirrors nothing.
    `daemon` None runs flowcheck's own; another command gets the same options appended; `()` runs none.
    `trainer_cpus` and `daemon_cpus` pin the processes to those CPUs. `env` overrides what trainers find.
    Times are in seconds: `grace` is how long ranks may go on after the first one failed.
    """

    command: tuple[str, ...] = ()
    ranks: int = 2
    ranks_per_node: int = 1
    mirrors: tuple[Mirror, ...] | None = None
    transport: str = TCP
    nccl_version: str = "2.28.9"
    algorithm: str | None = None
    protocol: str | None = None
    channels: int = 1
    rails: int = 1
    mtu: int = 0
    rendezvous: str = "training"
    ipv6: bool = False
    monitor_offload: bool = True
    store: str | None = None
    listen: str | None = None
    journal: str | None = None
    record: str | None = None
    faults: tuple[str, ...] = ()
    daemon: tuple[str, ...] | None = None
    daemon_args: tuple[str, ...] = ()
    daemon_cpus: tuple[int, ...] | None = None
    trainer_cpus: tuple[int, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 10.0
    daemon_start: float = 600.0
    daemon_stop: float = 300.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise UsageError("a lab needs at least one rank and one rank per node")
        if self.nodes > MAX_NODES:
            raise UsageError(f"{self.nodes} nodes are too many (at most {MAX_NODES}): raise --ranks-per-node")
        self._check_transport()
        smallest = 1280 if self.ipv6 else 576
        if not smallest <= self.interface_mtu <= 65535:
            raise UsageError(f"an MTU of {self.mtu} is not possible here: choose {smallest} to 65535")
        if self.rendezvous not in NETWORKS:
            raise UsageError(f"there is no network {self.rendezvous!r}: rendezvous is training or management")
        for mirror in self.mirrors or ():
            if not 0 <= mirror.rank < self.ranks:
                raise UsageError(
                    f"mirror of rank {mirror.rank}: there is none, ranks are 0 to {self.ranks - 1}"
                )
        if self.listen is not None:
            self._check_endpoint(self.listen)

    def _check_transport(self) -> None:
        if self.transport not in TRANSPORTS:
            raise UsageError(f"there is no transport {self.transport!r}: choose tcp, roce or socket")
        roce = self.transport == ROCE
        if self.mtu == 0:
            object.__setattr__(self, "mtu", PATH_MTUS[0] if roce else 1500)
        if roce and self.mtu not in PATH_MTUS:
            raise UsageError(f"a path MTU of {self.mtu} is not possible here: choose 1024 or 4096")
        if self.transport != TCP:
            for value, known in ((self.algorithm, ALGORITHMS), (self.protocol, PROTOCOLS)):
                if value is not None and value not in known:
                    raise UsageError(f"NCCL has no {value!r}: choose {', '.join(known)}")
            self.job()
        elif self.rails != 1:
            raise UsageError("several rails need --transport roce or socket: gloo uses one interface")

    def job(self) -> Job:
        """The communicator of all ranks. Raises UsageError for what NCCL does not have."""
        return Job(self.ranks, **self.nccl())

    def nccl(self) -> dict[str, Any]:
        """The fields of `Job` that do not depend on a communicator."""
        return {
            "gpus_per_node": self.ranks_per_node,
            "version": self.nccl_version,
            "algorithm": self.algorithm,
            "protocol": self.protocol,
            "channels": self.channels,
            "rails": self.rails,
            "mtu": self.mtu,
            "ipv6": self.ipv6,
        }

    @staticmethod
    def _check_endpoint(endpoint: str) -> None:
        if not endpoint.startswith("ipc://") or len(endpoint) == len("ipc://"):
            raise UsageError(
                f"endpoint {endpoint!r} cannot be reached from outside the lab: give an ipc:// path"
            )
        if len(os.fsencode(os.path.abspath(endpoint[len("ipc://") :]))) > MAX_IPC_PATH:
            raise UsageError(f"the path of {endpoint!r} is over {MAX_IPC_PATH} bytes: choose a shorter one")

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_world_size(self, rank: int) -> int:
        first = self.node_of(rank) * self.ranks_per_node
        return min(self.ranks_per_node, self.ranks - first)

    @property
    def interface_mtu(self) -> int:
        """Of the training interfaces: they must hold whole RoCE packets."""
        return max(1500, self.mtu + FRAME_HEADERS) if self.transport == ROCE else self.mtu

    @property
    def ports(self) -> list[Port]:
        return [Port(node, rail) for node in range(self.nodes) for rail in range(self.rails)]

    def port_of(self, rank: int) -> Port:
        return Port(self.node_of(rank), rank % self.ranks_per_node % self.rails)

    def mirrored_ports(self) -> list[tuple[Port, str]]:
        """(port, "in" | "out") of every mirrored direction, each once: twice would double its frames."""
        if self.mirrors is None:
            node = self.node_of(min(1, self.ranks - 1))
            return [(Port(node, rail), way) for rail in range(self.rails) for way in DIRECTIONS["both"]]
        ports = {(self.port_of(m.rank), direction) for m in self.mirrors for direction in DIRECTIONS[m.direction]}
        return sorted(ports)


def check_command(command: tuple[str, ...]) -> None:
    """Raise UsageError unless `command` is a script that exists, or -m and a module name."""
    if not command:
        raise UsageError("nothing to run: end with -- SCRIPT.py [ARGS...] or -- -m MODULE [ARGS...]")
    if command[0] == "-m":
        if len(command) < 2:
            raise UsageError("-m needs the name of a module to run")
    elif command[0].startswith("-"):
        raise UsageError(f"{command[0]!r} is neither a script nor -m MODULE: lab options go before the --")
    elif not Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]!r} in {os.getcwd()}: check the path")
