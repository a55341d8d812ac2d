"""What a mirror shall do, in words that no vendor owns."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from flowcheck.errors import UsageError

DIRECTIONS = ("in", "out", "both")
"""As the switch sees it: `in` is what the host behind the port sends, `out` is what that host receives."""


@dataclass(frozen=True, slots=True)
class Source:
    """One mirrored port."""

    port: str
    direction: str

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read `PORT[:in|out|both]`; without a direction it is both. Only a known direction is cut off: ports may
        have a colon in their name."""
        port, colon, direction = text.rpartition(":")
        if colon and direction in DIRECTIONS:
            return cls(port, direction)
        return cls(text, "both")


@dataclass(frozen=True, slots=True)
class Tunnel:
    """Outer IPv4 addresses of an encapsulated mirror: the switch's and the checkpoint node's."""

    source: str
    destination: str

    @classmethod
    def parse(cls, source: str, destination: str) -> Tunnel:
        """Raises UsageError for anything but two different IPv4 host addresses."""
        for text in (source, destination):
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                raise UsageError(f"--erspan {text}: not an IP address") from None
            if address.version != 4:
                raise UsageError(f"--erspan {text}: switches encapsulate mirrors in IPv4 only, give IPv4 addresses")
            if address.is_multicast or address.is_unspecified or address.is_loopback:
                raise UsageError(f"--erspan {text}: not the address of a host on the network")
        if source == destination:
            raise UsageError(f"--erspan {source} twice: give the switch's address, then the checkpoint node's")
        return cls(source, destination)


@dataclass(frozen=True, slots=True)
class MirrorRequest:
    """Ports to copy and where the copies go. `session` is the first session, group or name number to use."""

    sources: tuple[Source, ...]
    monitor: str | None = None
    tunnel: Tunnel | None = None
    session: int = 1

    @property
    def directions(self) -> int:
        """Mirrored directions: each can fill the line rate of its port."""
        return sum(2 if source.direction == "both" else 1 for source in self.sources)

    def ports(self, *directions: str) -> list[str]:
        """Ports that are mirrored in one of these directions, as written."""
        return [source.port for source in self.sources if source.direction in directions]

    def by_direction(self) -> list[tuple[str, list[str]]]:
        """(direction, ports) for the directions that occur: both, in, out."""
        return [(way, self.ports(way)) for way in ("both", "in", "out") if self.ports(way)]


def merged(sources: Iterable[Source]) -> tuple[Source, ...]:
    """The same port named twice becomes one source; in and out make both."""
    ways: dict[str, str] = {}
    for source in sources:
        known = ways.get(source.port, source.direction)
        ways[source.port] = source.direction if known == source.direction else "both"
    return tuple(Source(port, way) for port, way in ways.items())
