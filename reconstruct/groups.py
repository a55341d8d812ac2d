"""Whose connection is this? From the two ends of a flow to process group, context and ranks.

Every gloo context of every process has a listening socket of its own, so one end of each connection is a listener of
the group and names group, context and that rank. The rank at the other end: an exact socket record, the hello that
the initiator sends, or its address if no other rank of the group has it. An all-reduce tells it too, since rank r
sends only to r-1 (docs/gloo.md, "Who is at the ends of a connection").

A group that names its vantage group owns only what is seen there, so groups of two tenants may have the same addresses.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from reconstruct.gloo.events import Endpoint, Group

__all__ = ["Claim", "Claims", "Membership", "normal"]


def normal(address: str) -> str:
    """One spelling per address: IPv4-mapped IPv6 as IPv4, no zone. Raises ValueError for text that is no address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


@dataclass(frozen=True, slots=True)
class Claim:
    """A flow of group number `group`. to_listener: the flow's receiver is the listener (rank `listener`).

    other: rank at the other end if the addresses tell it, else -1.
    """

    group: int
    context: int
    to_listener: bool
    listener: int
    other: int


@dataclass(slots=True)
class Membership:
    """A known group and what was seen of it: (context, sender, receiver) of its links, its highest tag."""

    group: Group
    number: int
    seen: set[tuple[int, int, int]] = field(default_factory=set)
    max_tag: int = -1


class Claims:
    """Listeners and sockets of the known groups."""

    def __init__(self) -> None:
        self.members: dict[str, Membership] = {}
        self._numbers: dict[int, Membership] = {}
        self._next = 0
        # By vantage group first, None for any.
        self._listeners: dict[tuple[int | None, Endpoint], tuple[int, int, int]] = {}
        self._sockets: dict[tuple[int | None, str, int, str, int], tuple[int, int, int]] = {}
        self._alone: dict[tuple[int, int, str], int] = {}
        self._listed: set[int] = set()  # groups whose ranks have all named their connections

    def add(self, group: Group) -> Membership:
        """Know a group. Raises ValueError if it cannot be one, or if its name or a listener is taken."""
        if group.name in self.members:
            raise ValueError(f"group {group.name!r} is known already: remove it first")
        if group.world_size < 2:
            raise ValueError(f"group {group.name!r} has {group.world_size} rank(s): it has no traffic")
        place = group.vantage
        listeners: dict[tuple[int | None, Endpoint], tuple[int, int, int]] = {}
        taken = {end for vantage, end in self._listeners if place is None or vantage in (None, place)}
        alone: dict[tuple[int, int, str], int] = {}
        number = self._next
        for context, ranks in enumerate(group.contexts):
            addresses: dict[str, list[int]] = {}
            for rank, (ip, port) in ranks.items():
                if not (0 <= rank < group.world_size and 0 < port < 65536):
                    raise ValueError(
                        f"group {group.name!r}: rank {rank} at {ip}:{port} is not one of {group.world_size} ranks"
                    )
                end = (normal(ip), port)
                if (place, end) in listeners or end in taken:
                    raise ValueError(f"group {group.name!r}: listener {ip}:{port} belongs to another rank or group")
                listeners[place, end] = (number, context, rank)
                addresses.setdefault(end[0], []).append(rank)
            if len(ranks) == group.world_size:
                alone.update({(number, context, ip): held[0] for ip, held in addresses.items() if len(held) == 1})
        member = Membership(group, number)
        self._next += 1
        self.members[group.name] = self._numbers[number] = member
        self._listeners.update(listeners)
        self._alone.update(alone)
        for (a, b, c, d), (sender, receiver) in group.sockets.items():
            a, c = normal(a), normal(c)
            self._sockets[place, a, b, c, d] = (number, sender, receiver)
            self._sockets[place, c, d, a, b] = (number, receiver, sender)
        if {rank for pair in group.sockets.values() for rank in pair} == set(range(group.world_size)):
            self._listed.add(number)
        return member

    def remove(self, name: str) -> Membership | None:
        """Forget a group; None if it is not known."""
        member = self.members.pop(name, None)
        if member is not None:
            number = member.number
            del self._numbers[number]
            self._listeners = {end: v for end, v in self._listeners.items() if v[0] != number}
            self._sockets = {ends: v for ends, v in self._sockets.items() if v[0] != number}
            self._alone = {key: v for key, v in self._alone.items() if key[0] != number}
            self._listed.discard(number)
        return member

    def of(self, number: int) -> Membership:
        """The group with this number."""
        return self._numbers[number]

    def ports(self) -> set[int]:
        """Every listener port: a flow that touches none of them is nobody's."""
        return {port for _, (_, port) in self._listeners}

    def find(
        self, source: Endpoint, destination: Endpoint, vantage: int, *, before: bool = False
    ) -> Claim | None:
        """The claim on the flow from `source` to `destination`, None if no known group has it.

        before: the flow was seen before the group was known. It may be of an earlier group, which had a listener at
        the same port: where the ranks have named their connections, it must be one of these.
        """
        for place in (vantage, None):
            claim = self._find(place, source, destination, before)
            if claim is not None:
                return claim
        return None

    def _find(self, place: int | None, source: Endpoint, destination: Endpoint, before: bool) -> Claim | None:
        exact = self._sockets.get((place, *source, *destination))
        for to_listener, end, far in ((True, destination, source), (False, source, destination)):
            held = self._listeners.get((place, end))
            if held is None:
                continue
            number, context, rank = held
            if before and number in self._listed and (exact is None or exact[0] != number):
                continue
            other = -1
            if exact is not None and exact[0] == number:
                other = exact[1] if to_listener else exact[2]
            if other in (-1, rank):
                other = self._alone.get((number, context, far[0]), -1)
            return Claim(number, context, to_listener, rank, -1 if other == rank else other)
        return None
