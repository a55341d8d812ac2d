"""Which of the control server's peers are agents, and of which job. Sans-IO; times are seconds.

An agent names its job by the token that its ranks agreed on at attach, not by an epoch: only rank 0 learns epochs, and
a forgotten job of the same run must never be taken for the one that is followed. The token of an attach that was
committed here tells the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowcheck.errors import FlowcheckError

SILENT_S = 5.0
"""Without a hello for so long an agent counts as gone."""
MAX_AGENTS = 1 << 16
MAX_JOBS = 1024
"""Attached jobs whose token is remembered; the oldest goes first."""


@dataclass(slots=True)
class Hello:
    """An agent's last word. descriptor: its connection's, -1 if unknown; epoch: None for a job that is not attached."""

    run: str
    job: str
    rank: int
    step: int
    descriptor: int
    heard: float
    epoch: int | None = None


class Hellos:
    """Peers by their ZeroMQ identity."""

    def __init__(self) -> None:
        self._agents: dict[bytes, Hello] = {}
        self._epochs: dict[tuple[str, str], int] = {}  # (run, token) -> epoch

    def hello(self, peer: bytes, descriptor: int, fields: dict[str, Any], now: float) -> Hello:
        """An agent-hello. FlowcheckError when there are too many agents."""
        if peer not in self._agents and len(self._agents) >= MAX_AGENTS:
            raise FlowcheckError(f"agent-hello: {MAX_AGENTS} agents are known already")
        run, job = fields["run"], fields["job"]
        hello = Hello(run, job, fields["rank"], fields["step"], descriptor, now, self._epochs.get((run, job)))
        self._agents[peer] = hello
        return hello

    def attached(self, run: str, job: str, epoch: int) -> list[tuple[bytes, Hello]]:
        """An attach was committed: the agents of that job that are known already, now with their epoch."""
        self._epochs.pop((run, job), None)
        self._epochs[run, job] = epoch
        if len(self._epochs) > MAX_JOBS:
            del self._epochs[next(iter(self._epochs))]
        found = [(peer, hello) for peer, hello in self._agents.items() if (hello.run, hello.job) == (run, job)]
        for _, hello in found:
            hello.epoch = epoch
        return found

    def check(self, peer: bytes, kind: str, run: str, epoch: int) -> None:
        """FlowcheckError unless the peer is an agent of that very epoch."""
        hello = self._agents.get(peer)
        if hello is None or (hello.run, hello.epoch) != (run, epoch):
            raise FlowcheckError(f"{kind}: from a peer that is no agent of {run}/e{epoch}")

    def ended(self, descriptor: int) -> list[bytes]:
        """A connection has ended: the agents that were on it, now forgotten."""
        return self._forget([peer for peer, hello in self._agents.items() if hello.descriptor == descriptor])

    def silent(self, now: float) -> list[bytes]:
        """Agents that said nothing for long, now forgotten."""
        return self._forget([peer for peer, hello in self._agents.items() if now - hello.heard > SILENT_S])

    def _forget(self, peers: list[bytes]) -> list[bytes]:
        for peer in peers:
            del self._agents[peer]
        return peers
