"""A process group as the gloo decoder must know it (plain data)."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Endpoint", "Group"]

Endpoint = tuple[str, int]


@dataclass(slots=True)
class Group:
    """A process group whose traffic is wanted. Ranks are ranks in this group.

    contexts: one per gloo context: rank -> (ip, listener port). sockets, where known: exact (source ip, source port,
    destination ip, destination port) -> (sender, receiver), either direction of a connection. vantage: the group of
    interfaces and tunnels (`mirror.vantage`) that shows its traffic, None where it may be any.
    Tag t runs on context t mod len(contexts).
    """

    name: str
    world_size: int
    contexts: list[dict[int, Endpoint]]
    sockets: dict[tuple[str, int, str, int], tuple[int, int]] = field(default_factory=dict)
    vantage: int | None = None
