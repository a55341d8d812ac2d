"""Whether a job is seen at all: what counts for it, and that nothing is said too early."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gloo_traffic import Job, port

from flowcheck.agent import Agent
from flowcheck.description import GroupRecord
from flowcheck.sight import Sight
from flowcheck.trainer import _unseen
from flowcheck.watch import Watch
from mirror.flows import Flows
from mirror.tcp import TcpReassembler

WORLD = 3


class Wire:
    """A job's frames into a flow table, and in the place of the capture thread, whose time is that of `at`."""

    def __init__(self, capacity: int = 64) -> None:
        self.flows = Flows(capacity)
        self.job = Job(WORLD, port(WORLD, 1))
        self.watched: float | None = 10.0
        self.later: Callable[[], None] = lambda: None  # happens before the second look
        self.asked: list[int | None] = []
        self._tcp = TcpReassembler(self.flows)

    def feed(self) -> None:
        """What the job put on the wire."""
        frames, self.job.frames = self.job.frames, []
        if frames:
            self._tcp.feed(self.job.block(frames), frames[-1].ts)

    def record(self, base_port: int = 40000, sequence: int = 3) -> GroupRecord:
        listeners = {rank: (f"10.0.0.{rank + 1}", base_port + rank) for rank in range(WORLD)}
        return GroupRecord("0", WORLD, [listeners], sequence)

    def call(self, command: Callable[[], None], at: int | None = None) -> bool:
        self.asked.append(at)
        if at is not None:
            self.later()
        command()
        return True


def test_only_the_jobs_own_connections_count() -> None:
    wire = Wire()
    wire.job.connect()
    wire.feed()
    own, other = (Sight(wire.record(base), [wire.flows]) for base in (40000, 41000))
    assert (own.ever(), own.look()) == (True, False)  # not since then
    assert not other.ever()
    wire.job.send((0, 1), b"again")
    wire.feed()
    assert own.look() and not other.look() and not other.ever()


def test_nobodys_frames_are_not_the_jobs() -> None:
    wire = Wire()
    away = wire.record()
    away.contexts = [{rank: (f"10.0.9.{rank + 1}", 40000 + rank) for rank in range(WORLD)}]
    wire.job.connect()
    wire.feed()
    sight = Sight(away, [wire.flows])
    assert not sight.ever() and sight.whole
    text = sight.text(["eth1", "eth2"])
    assert "10.0.9.1, 10.0.9.2, 10.0.9.3" in text and "flowcheck doctor -i eth1 && flowcheck doctor -i eth2" in text


def watched(wire: Wire, **record: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """What an attach is told, and the log."""
    lines: list[str] = []
    group = wire.record(**record)
    job = SimpleNamespace(
        key="run/e1", sight=Sight(group, [wire.flows]), description=SimpleNamespace(group=group), looks=0, unseen=None
    )
    watch = Watch(wire, ["eth1"], lines.append, lambda job, text: lines.append(f"to rank 0: {text}"))  # type: ignore[arg-type]
    told = watch.attached(job)  # type: ignore[arg-type]
    watch.marked(job, 1)  # type: ignore[arg-type]
    return told, lines


def test_a_job_that_is_not_seen_is_told_and_again_after_a_step() -> None:
    wire = Wire()
    told, lines = watched(wire)
    assert told is not None and told["watched"] == 10.0 and "flowcheck doctor -i eth1" in told["text"]
    assert lines == [f"run/e1: {told['text']}", f"to rank 0: {told['text']}"]
    assert len(wire.asked) == 3 and wire.asked[0] is None


@pytest.mark.parametrize("case", ["seen", "late", "nothing was sent", "frames were lost", "flows were forgotten"])
def test_nothing_is_said_where_the_mirror_may_be_good(case: str) -> None:
    wire = Wire(6 if case == "flows were forgotten" else 64)
    wire.job.connect()
    if case == "seen":
        wire.feed()
    if case == "late":
        wire.later = wire.feed
    if case == "frames were lost":
        wire.watched = None
    if case == "flows were forgotten":
        wire.feed()
        for base in (42000, 43000, 44000):
            wire.job = Job(WORLD, port(WORLD, 1), base_port=base)
            wire.job.connect()
            wire.feed()
    told, _ = watched(wire, sequence=0 if case == "nothing was sent" else 3)
    assert told is None


def test_a_trainer_older_than_the_watch_is_told_nothing() -> None:
    assert _unseen({"unseen": {"text": "told", "watched": 1e9}}) == "told"
    assert _unseen({"unseen": {"text": "told", "watched": 0.0}}) is None
    assert _unseen({"unseen": None}) is None and _unseen({}) is None


def test_a_trainer_logs_what_the_daemon_has_to_say(caplog: pytest.LogCaptureFixture) -> None:
    said = SimpleNamespace(receive=lambda *kinds, timeout: ("notice", {"run": "run", "text": "look here"}, None))
    desk = SimpleNamespace(cancel=lambda taker: None)
    agent = Agent("tcp://10.0.0.9:7070", "run", "job", 0, desk, lambda: 0)  # type: ignore[arg-type]
    agent._receive(said)  # type: ignore[arg-type]
    assert caplog.messages == ["flowcheck: the daemon at tcp://10.0.0.9:7070: look here"]
    assert agent.counters.absurd == 0
