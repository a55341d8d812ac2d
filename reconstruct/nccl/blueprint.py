"""Collectives of a communicator, planned: for every connection and queue pair the table of its messages, kept for the
next collective of the same size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flowcheck.errors import FlowcheckError
from reconstruct.nccl.group import NOWHERE, Edge, NcclGroup, communicator, row_position
from reconstruct.nccl.plan import plan
from reconstruct.nccl.schedule import (
    ALLGATHER,
    ALLREDUCE,
    NVLSTREE,
    SIMPLE,
    SLICE_STEPS,
    block_offset,
    messages,
    places,
)
from reconstruct.nccl.script import T_WIRE, rare_steps, script
from reconstruct.nccl.split import Collective

__all__ = ["Blueprint", "Blueprints", "Part"]

_MOST_BYTES = 256 << 20
_MOST_BLUEPRINTS = 4096
SURE_MTU = 256  # no path has a smaller one


@dataclass(frozen=True, eq=False)
class Part:
    """What one connection carries of a collective. places: see `schedule.places`, offsets in the whole tensor."""

    row: np.ndarray
    position: int
    messages: int
    places: np.ndarray
    wires: tuple[int, ...]
    """Bytes of each message on the wire."""

    @cached_property
    def largest(self) -> int:
        """Bytes of the longest one."""
        return max(self.wires)


class Blueprint:
    """One collective of one size."""

    def __init__(self, home: Blueprints, call: Collective, root: int) -> None:
        self.call, self.root = call, root
        self._home = home
        self._parts: dict[Edge, Part | None] = {}
        self._made: dict[tuple[int, int, int], Part | None] = {}
        self._rows: dict[int, dict[int, np.ndarray]] = {}
        self._tables: dict[tuple[object, ...], np.ndarray] = {}

    @property
    def size(self) -> int:
        """Bytes of the whole tensor; of an all-gather, of all ranks' blocks."""
        blocks = self._home.comm.ranks if self.call.kind == ALLGATHER else 1
        return self.call.count * self.call.itemsize * blocks

    def part(self, edge: Edge) -> Part | None:
        """What a connection carries; None if nothing."""
        if edge not in self._parts:
            self._parts[edge] = self._find(edge)
        return self._parts[edge]

    def _find(self, edge: Edge) -> Part | None:
        group, call = self._home.group, self.call
        ring = group.rings[edge.channel] if edge.channel < len(group.rings) else ()
        position = row_position(edge, call.algorithm, call.kind, max(0, self.root), ring)
        head = edge.head if call.algorithm == NVLSTREE else 0
        if position == NOWHERE or head < 0:
            return None
        key = edge.channel, head, position
        if key not in self._made:
            self._made[key] = self._make(edge.channel, head, position)
        return self._made[key]

    def _make(self, channel: int, head: int, position: int) -> Part | None:
        if head not in self._rows:
            (planned,) = plan(self._home.comm, [self.call], head)
            self._rows[head] = dict(zip(planned.channels, planned.rows, strict=True))
        row = self._rows[head].get(channel)
        if row is None or messages(row, position) == 0:
            return None
        where = places(row, position)
        if self.call.kind == ALLGATHER:
            order = np.array(self._home.group.rings[channel], np.int64)
            where[:, 4] += [block_offset(row, order, chunk) for chunk in where[:, 3].tolist()]
        wires = script(where, row, SURE_MTU, False, 1, False, 0, 0, 0)[:-1, T_WIRE]
        return Part(row, position, len(where), where, tuple(wires.tolist()))

    def table(self, part: Part, mtu: int, apart: bool, pairs: int, split: bool, pair: int, number: int,
              base: int) -> np.ndarray:
        """The table of one queue pair (see `script.script`)."""
        rare = rare_steps(part.row, base, part.messages)
        phase = 0 if split else number % pairs
        key = id(part), mtu, apart, pairs, split, pair, phase, base if rare else 0
        if key not in self._tables:
            made = script(part.places, part.row, mtu, apart, pairs, split, pair, phase, base if rare else 0)
            self._home.spend(made.nbytes)
            self._tables[key] = made
        return self._tables[key]

    def steps(self, part: Part) -> int:
        """By how much the connection's step counter advances."""
        return int(part.messages * part.row[SLICE_STEPS])


class Blueprints:
    """All blueprints of one communicator that were wanted lately."""

    def __init__(self, group: NcclGroup) -> None:
        self.group, self.comm = group, communicator(group)
        self._held: dict[tuple[Collective, int], Blueprint | None] = {}
        self._bytes = 0

    def get(self, call: Collective, root: int = -1) -> Blueprint | None:
        """The blueprint of a call; None if NCCL has no such collective here."""
        key = call, root
        if key not in self._held:
            if self._bytes > _MOST_BYTES or len(self._held) > _MOST_BLUEPRINTS:
                self._held.clear()
                self._bytes = 0
            self._held[key] = Blueprint(self, call, root) if self._possible(call) else None
        return self._held[key]

    def _possible(self, call: Collective) -> bool:
        if call.algorithm == NVLSTREE and (call.protocol != SIMPLE or not self.comm.heads):
            return False
        try:
            return bool(plan(self.comm, [call]))
        except (FlowcheckError, ValueError):
            return False

    def reductions(self, size: int, itemsize: int) -> list[Blueprint]:
        """All-reduces of `size` bytes, by every algorithm and protocol that the group may use."""
        if size < 1 or itemsize not in (1, 2, 4, 8) or size % itemsize:
            return []
        calls = [
            Collective(ALLREDUCE, algorithm, protocol, size // itemsize, itemsize)
            for algorithm in self.group.algorithms
            for protocol in self.group.protocols
        ]
        return [made for made in map(self.get, calls) if made is not None]

    def spend(self, count: int) -> None:
        """Tables of `count` bytes were made."""
        self._bytes += count
