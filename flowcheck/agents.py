"""The agents of one job, as the daemon knows them: who is there and what each still owes.

An agent is the background thread of `flowcheck.attach` in one rank. What it was asked for (`reconstruct.repair.Part`)
counts as owed until it arrives, is refused, or is given up. For any thread: the server's hears hellos and takes no data
that is not owed, the apply thread asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from reconstruct.repair import Part

__all__ = ["Agent", "Agents"]

MISSES = 8
"""An agent that missed so many deadlines is asked no less than one that missed more."""


@dataclass(slots=True, eq=False)
class Agent:
    """One rank's agent. `owed`: the parts that it was asked for, by number."""

    peer: bytes
    rank: int
    step: int
    owed: dict[int, Part] = field(default_factory=dict)
    missed: int = 0  # of late, parts that did not come
    rests: int = 0  # it is asked for nothing before this time, ns

    @property
    def owed_bytes(self) -> int:
        return sum(part.nbytes for part in self.owed.values())


class Agents:
    """Peers by their ZeroMQ identity, from their hello until they are gone."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Agent] = {}
        self._lock = threading.Lock()

    def hello(self, peer: bytes, rank: int, step: int) -> None:
        """An agent says that it lives; its rank has done `step` optimizer steps."""
        with self._lock:
            agent = self._by_peer.setdefault(peer, Agent(peer, rank, step))
            agent.rank, agent.step = rank, step

    def gone(self, peer: bytes) -> list[int]:
        """The agent's connection has ended: the numbers that it owed, now free for others."""
        with self._lock:
            agent = self._by_peer.pop(peer, None)
        return [] if agent is None else list(agent.owed)

    def ready(self, now: int | None = None) -> list[Agent]:
        """All of them that do not rest, the likeliest to answer soon first."""
        with self._lock:
            agents = [agent for agent in self._by_peer.values() if now is None or agent.rests <= now]
            return sorted(agents, key=lambda agent: (agent.missed, agent.owed_bytes, agent.rank))

    def rest(self, peer: bytes, until: int) -> None:
        """An agent refused a part: it is asked for no other before `until`, ns."""
        with self._lock:
            agent = self._by_peer.get(peer)
            if agent is not None:
                agent.rests = until

    def first(self, now: int | None = None) -> Agent | None:
        """Rank 0's, which sends the markers, unless it rests."""
        return next((agent for agent in self.ready(now) if agent.rank == 0), None)

    def __len__(self) -> int:
        return len(self._by_peer)

    def owe(self, agent: Agent, parts: Iterable[Part]) -> None:
        """The agent is asked for these."""
        with self._lock:
            agent.owed.update({part.number: part for part in parts})

    def answered(self, peer: bytes, number: int) -> Part | None:
        """The part of this number, if this peer owed it; now it does not."""
        with self._lock:
            agent = self._by_peer.get(peer)
            part = None if agent is None else agent.owed.pop(number, None)
            if agent is not None and part is not None:
                agent.missed = 0
            return part

    def drop(self, numbers: Iterable[int], *, missed: bool = False) -> list[tuple[bytes, int]]:
        """These were given up: (peer, number) of those that somebody owed. missed: because they did not come."""
        unwanted = set(numbers)
        found = []
        with self._lock:
            for agent in self._by_peer.values():
                late = unwanted & agent.owed.keys()
                for number in late:
                    del agent.owed[number]
                if late and missed:
                    agent.missed = min(MISSES, agent.missed + 1)
                found += [(agent.peer, number) for number in late]
        return found
