"""A job's NCCL communicator as plain data: part of its description. Imports neither torch nor numba.

The fields are those of `reconstruct.nccl.group.NcclGroup`, which says what they mean and checks that they go together;
here only their form and size are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowcheck.values import Item, Reader, integer, sequence, text

__all__ = ["NcclRecord"]

MAX_RANKS = 1 << 16
MAX_CHANNELS = 64
MAX_ADDRESSES = 64


@dataclass(frozen=True, slots=True)
class NcclRecord:
    """`version` is None, and `channels`, `rings` and trees empty, where the trainers could not tell: then the daemon
    must be told, or have seen the set-up traffic."""

    version: str | None
    addresses: tuple[tuple[str, ...], ...]
    nodes: tuple[int, ...]
    channels: int
    rings: tuple[tuple[int, ...], ...]
    algorithms: tuple[int, ...]
    protocols: tuple[int, ...]
    tree_pattern: int = 0
    search_channels: int = 0
    chains: tuple[tuple[tuple[int, ...], ...], ...] = ()
    heads: tuple[tuple[int, ...], ...] = ()
    nvls_channels: int = 0
    simple_threads: int = 512
    qps: int = 1
    split: bool | None = None
    sockets: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "addresses": [list(node) for node in self.addresses],
            "nodes": list(self.nodes),
            "channels": self.channels,
            "rings": [list(ring) for ring in self.rings],
            "algorithms": list(self.algorithms),
            "protocols": list(self.protocols),
            "tree_pattern": self.tree_pattern,
            "search_channels": self.search_channels,
            "chains": [[list(chain) for chain in node] for node in self.chains],
            "heads": [list(node) for node in self.heads],
            "nvls_channels": self.nvls_channels,
            "simple_threads": self.simple_threads,
            "qps": self.qps,
            "split": self.split,
            "sockets": self.sockets,
        }

    @classmethod
    def from_json(cls, data: Any, path: str, world_size: int) -> NcclRecord:
        reader = Reader(data, path)

        def rank(value: Any, where: str) -> int:
            return integer(value, where, 0, world_size - 1)

        ranks = _tuple_of(rank, world_size)
        addresses = tuple(reader.sequence("addresses", MAX_RANKS, _tuple_of(_address, MAX_ADDRESSES)))
        nodes = tuple(reader.sequence("nodes", MAX_RANKS, rank))
        for name, given in (("addresses", len(addresses)), ("nodes", len(nodes))):
            if given != world_size:
                raise reader.fail(name, f"{given} entries for {world_size} ranks")
        split = reader.raw("split")
        result = cls(
            version=None if reader.raw("version") is None else reader.text("version", 64),
            addresses=addresses,
            nodes=nodes,
            channels=reader.integer("channels", 0, MAX_CHANNELS),
            rings=tuple(reader.sequence("rings", MAX_CHANNELS, ranks)),
            algorithms=tuple(reader.sequence("algorithms", 16, _small)),
            protocols=tuple(reader.sequence("protocols", 16, _small)),
            tree_pattern=reader.integer("tree_pattern", 0, 15),
            search_channels=reader.integer("search_channels", 0, MAX_CHANNELS),
            chains=tuple(reader.sequence("chains", world_size, _tuple_of(ranks, MAX_CHANNELS))),
            heads=tuple(reader.sequence("heads", world_size, ranks)),
            nvls_channels=reader.integer("nvls_channels", 0, MAX_CHANNELS),
            simple_threads=reader.integer("simple_threads", 32, 1024),
            qps=reader.integer("qps", 1, 128),
            split=None if split is None else reader.boolean("split"),
            sockets=reader.boolean("sockets"),
        )
        reader.done()
        return result


def _tuple_of(read: Callable[[Any, str], Item], limit: int) -> Callable[[Any, str], tuple[Item, ...]]:
    return lambda value, path: tuple(sequence(value, path, limit, read))


def _address(value: Any, path: str) -> str:
    return text(value, path, 64)


def _small(value: Any, path: str) -> int:
    return integer(value, path, 0, 15)
