"""Vantage groups: which interfaces and tunnels see the same fabric.

Flows of different groups never mix, so two tenants with the same inner addresses stay apart. Every tunnel (outer
source and destination, kind, and ERSPAN session, GRE key or VXLAN network) is a group of its own, separately for each
group in which its outer packets were seen, unless it is declared to belong to a named one. Interfaces without a
declared group share group 0.

What belongs together must be declared: the rx and the tx session of one port, the switches of a dual-homed node, the
planes of one network adapter. Their frames are then one stream of frames, merged before reassembly, where a packet
that came twice is a duplicate and not a second connection.

The table of tunnels is bounded. A tunnel that is pushed out by newer ones comes back as a new group: its connections
start over, but they never mix with another's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mirror.decap import KINDS
from mirror.flows import address_text, address_words
from mirror.tunnels import (
    COLUMNS,
    CUT_FRAMES,
    DESTINATION,
    EVICTED,
    FIELDS,
    FIRST_OWN,
    FRAMES_IN,
    GROUP,
    ID,
    KIND,
    NUMBER,
    NUMBERED,
    OF_KIND,
    RULE_A,
    RULE_GROUP,
    RULES,
    SERIAL,
    SOURCE,
    TUNNEL_SEED,
    WAYS,
    WHERE,
    TunnelTable,
    declared,
)

__all__ = ["Tunnel", "TunnelSeen", "Vantage"]

_MOST_RULES = 256


@dataclass(frozen=True, slots=True)
class Tunnel:
    """A tunnel, or where fields are None, all that have the others. `str` gives the form that `parse` takes."""

    source: str | None = None
    """Outer source address."""
    destination: str | None = None
    """Outer destination address."""
    kind: str | None = None
    """A name of `mirror.decap.KINDS`."""
    id: int | None = None
    """ERSPAN session, GRE key or VXLAN network; -1: a tunnel that carries none."""

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS[1:]:
            raise ValueError(f"unknown kind of tunnel {self.kind!r}: one of {', '.join(KINDS[1:])}")
        for address in (self.source, self.destination):
            if address is not None:
                address_words(address)

    @classmethod
    def parse(cls, text: str) -> Tunnel:
        """`[KIND ]SOURCE>DESTINATION[#ID]`, each `*` for any; raises ValueError with what is wrong."""
        head, _, kind = text.strip().rpartition(" ")[::-1]
        ends, _, number = head.partition("#")
        source, arrow, destination = ends.partition(">")
        if not arrow or not source or not destination:
            raise ValueError(f"{text!r} is no tunnel: [KIND ]SOURCE>DESTINATION[#ID], * for any")
        given = [None if part in ("", "*") else part for part in (source, destination, kind.strip(), number)]
        if given[3] is not None and not given[3].lstrip("-").isdigit():
            raise ValueError(f"{number!r} in {text!r} is no session, key or network number")
        return cls(given[0], given[1], given[2], None if given[3] is None else int(given[3]))

    def __str__(self) -> str:
        number = "" if self.id is None or self.id == -1 else f"#{self.id}"
        return f"{self.kind or '*'} {self.source or '*'}>{self.destination or '*'}{number}"


@dataclass(frozen=True, slots=True)
class TunnelSeen:
    """A tunnel through which frames came."""

    tunnel: Tunnel
    vantage: int
    """Its group, as `Flows.vantage` tells it."""
    group: str | None
    """The declared group's name, None if it is its own."""
    carrier: int
    """The group in which its outer packets were seen."""
    frames: int
    cut: int
    """Frames that were cut before or in the tunnel: the inner packet is longer than what the outer one carries."""


class Vantage:
    """Groups of interfaces and tunnels: declared by name, and the tunnels seen. Used by one reader of frames."""

    def __init__(self, groups: Mapping[str, Iterable[str]] | None = None, *, depth: int = 4, tunnels: int = 1024,
                 vxlan_ports: Iterable[int] = (4789,)) -> None:
        """`groups`: name -> members, each the name of an interface or, with a `>`, a tunnel (`Tunnel.parse`).

        `depth`: the most tunnels inside each other; `tunnels`: the most that are known at once, a power of two from 8;
        `vxlan_ports`: UDP destination ports. Raises ValueError.
        """
        ports = np.array(sorted(set(vxlan_ports)), np.int64)
        if tunnels < WAYS or tunnels & (tunnels - 1):
            raise ValueError(f"the number of tunnels must be a power of two from {WAYS}, not {tunnels}")
        if 4791 in ports:
            raise ValueError("port 4791 is RoCEv2's: it cannot be one of VXLAN")
        if depth < 0 or ports.size > 16 or bool(((ports < 1) | (ports > 0xFFFF)).any()):
            raise ValueError("a depth of 0 or more, and at most 16 VXLAN ports from 1 to 65535")
        self.depth = depth
        self.table = TunnelTable(np.zeros((tunnels, COLUMNS), np.int64), np.zeros((_MOST_RULES, 8), np.int64),
                                 np.zeros(4, np.int64), ports)
        self.table.meta[TUNNEL_SEED] = int.from_bytes(os.urandom(8), "little", signed=True)
        self.table.meta[SERIAL] = FIRST_OWN
        self._names: list[str] = [""]
        self._interfaces: dict[str, int] = {}
        for name, members in (groups or {}).items():
            listed = list(members)
            self.declare(name, interfaces=[one for one in listed if ">" not in one],
                         tunnels=[Tunnel.parse(one) for one in listed if ">" in one])

    def declare(self, group: str, *, interfaces: Iterable[str] = (), tunnels: Iterable[Tunnel] = ()) -> int:
        """Add interfaces and tunnels to a group; returns its number. The first rule that fits a tunnel counts.

        Tunnels seen before change their group as well: their connections start over in it. Raises ValueError for an
        interface that is in another group, and when there are too many rules.
        """
        if not group or (group not in self._names and len(self._names) == FIRST_OWN):
            raise ValueError(f"no group {group!r}: a name is needed, and there may be {FIRST_OWN - 1} groups")
        if group not in self._names:
            self._names.append(group)
        number = self._names.index(group)
        for name in interfaces:
            if self._interfaces.setdefault(name, number) != number:
                raise ValueError(f"{name} is in group {self._names[self._interfaces[name]]!r} already")
        for tunnel in tunnels:
            self._rule(tunnel, number)
        return number

    def of_interface(self, name: str) -> int:
        """The group's number for `Block.vantage` of an interface's or a file's frames; 0 if none was declared."""
        return self._interfaces.get(name, 0)

    def carriers(self, group: int) -> frozenset[int]:
        """The groups whose frames can show a flow of `group`: itself, and those in which its tunnels were seen."""
        rows = self.table.rows
        found, ahead = {group}, [group]
        while ahead:
            below = set((rows[rows[:, GROUP] == ahead.pop(), WHERE] >> 8).tolist()) - found
            found |= below
            ahead += below
        return frozenset(found)

    @property
    def evicted(self) -> int:
        """How often a tunnel was pushed out of the table by a newer one."""
        return int(self.table.meta[EVICTED])

    def tunnels(self) -> list[TunnelSeen]:
        """The tunnels seen, by number of frames, most first, then in order of appearance."""
        rows = self.table.rows
        seen = []
        for row in rows[rows[:, GROUP] != 0].tolist():
            source, destination = address_text(*row[:2]), address_text(*row[2:4])
            tunnel = Tunnel(source, destination, KINDS[row[WHERE] & 0xFF], row[ID])
            group = self._names[row[GROUP]] if row[GROUP] < FIRST_OWN else None
            seen.append(TunnelSeen(tunnel, row[GROUP], group, row[WHERE] >> 8, row[FRAMES_IN], row[CUT_FRAMES]))
        return sorted(seen, key=lambda one: (-one.frames, one.vantage))

    def name(self, vantage: int) -> str:
        """What a group is called: its declared name, its tunnel, or nothing for undeclared interfaces."""
        if vantage < len(self._names):
            return self._names[vantage]
        return next((str(one.tunnel) for one in self.tunnels() if one.vantage == vantage), f"group {vantage}")

    def _rule(self, tunnel: Tunnel, number: int) -> None:
        table = self.table
        count = int(table.meta[RULES])
        if count == _MOST_RULES:
            raise ValueError(f"more than {_MOST_RULES} declared tunnels: use * for what they have in common")
        rule = table.rules[count]
        rule[:] = 0
        rule[RULE_GROUP] = number
        if tunnel.source is not None:
            rule[FIELDS] |= SOURCE
            rule[RULE_A : RULE_A + 2] = address_words(tunnel.source)
        if tunnel.destination is not None:
            rule[FIELDS] |= DESTINATION
            rule[RULE_A + 2 : RULE_A + 4] = address_words(tunnel.destination)
        if tunnel.kind is not None:
            rule[FIELDS] |= OF_KIND
            rule[KIND] = KINDS.index(tunnel.kind)
        if tunnel.id is not None:
            rule[FIELDS] |= NUMBERED
            rule[NUMBER] = tunnel.id
        table.meta[RULES] = count + 1
        for index in np.flatnonzero(table.rows[:, GROUP]).tolist():
            row = table.rows[index].tolist()
            group = declared(table, row[0], row[1], row[2], row[3], row[WHERE] & 0xFF, row[ID])
            if group:
                table.rows[index, GROUP] = group
