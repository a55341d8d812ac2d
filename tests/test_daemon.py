"""The daemon's threads around the pipeline: attaches, failures, what is handed out, what is written, how it ends.

Frames come from a made-up job (`synthetic_job`) through a source that stands for the ring; all behind it is real.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_traffic import Frame
from synthetic_job import SIZES, SyntheticJob, blocks

from flowcheck import daemon as daemon_module
from flowcheck.capture import fresh
from flowcheck.config import DaemonConfig
from flowcheck.daemon import Daemon
from flowcheck.errors import FlowcheckError, NothingRestorable, Revoked, UsageError
from flowcheck.job import Job
from flowcheck.store import Store
from mirror.block import Block, SourceCounters
from reconstruct.arena import ShadowError

PATIENCE = 20.0


class Ring:
    """A capture source whose frames the test hands in."""

    name = "ring"
    finished = False

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.failure: Exception | None = None
        self.packets = 0
        self._blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()

    def put(self, block: Block) -> None:
        self._blocks.put(block)

    def read(self, timeout: float) -> Block | None:
        if self.failure is not None:
            raise self.failure
        try:
            block = self._blocks.get(timeout=timeout) if timeout > 0 else self._blocks.get_nowait()
        except queue.Empty:
            return None
        self.packets += len(block)
        return block

    def release(self, block: Block) -> None: ...

    def counters(self) -> SourceCounters:
        return SourceCounters(packets=self.packets)

    def close(self) -> None: ...


class Node:
    """A daemon without its signals and its server; the tests call what the server would call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.ring = Ring()
        self.lines: list[str] = []
        monkeypatch.setattr(daemon_module, "open_sources", lambda *_: [self.ring])
        monkeypatch.setattr(daemon_module, "log", self.lines.append)
        self.daemon = Daemon(DaemonConfig(interfaces=("ring",), **config))
        self.jobs = self.daemon._jobs
        self.over = False
        if self.daemon._persister is not None:
            self.daemon._persister.start()
        self.daemon._apply.start()
        self.daemon._capture.start()

    def attach(self, job: SyntheticJob, run: str = "made-up") -> Job:
        job.wire._now = max(job.wire._now, time.time_ns())
        job.attach()
        job.wire._now = time.time_ns()
        description = job.description
        description.run = run
        session = self.jobs.begin_attach(description)
        for key, spec in description.tensors():
            session.chunk(key, 0, memoryview(bytes(spec.nbytes)))
        ack = session.commit()
        return self.jobs.jobs[f"{ack['run']}/e{ack['epoch']}"]

    def send(self, job: SyntheticJob) -> None:
        """What the job has put on the wire since the last time, as if it happened now."""
        frames: list[Frame] = list(job.wire.frames)
        job.wire.frames.clear()
        now = time.time_ns()
        for number, frame in enumerate(frames):
            frame.ts = now + number
        for some in blocks(frames, 64):
            self.ring.put(job.wire.block(some))

    def step(self, job: SyntheticJob, held: Job, *, value: bytes | None = None, **fields: Any) -> None:
        """One usual step and its marker. value: what the marker says of the first element of p0 after the step."""
        if job.truth and not job.has_rebuilt:
            job.rebuild()
        job.reduction()
        self.send(job)
        job.step += 1
        job.truth[job.step] = job.reduced
        canary = [0, 0, None, None if value is None else value.hex()]
        marker = {
            "step": job.step, "sequence": job.sequence, "version": 0, "groups": None, "canaries": [canary],
            "problem": None, "rebuilt": job.has_rebuilt, **fields,
        }  # fmt: skip
        self.jobs.marker(held.run, held.epoch, marker)

    def finish(self) -> list[str]:
        self.over = True
        return self.daemon._finish()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(**config: Any) -> Node:
        made.append(Node(monkeypatch, **config))
        return made[-1]

    yield make
    for one in made:
        if not one.over:
            one.finish()


def wait_for(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)
    return value


def expected(job: SyntheticJob, step: int) -> np.ndarray:
    """p0 after `step` steps of plain SGD with lr 0.1 from zeros."""
    value = torch.zeros(SIZES[0])
    for number in range(1, step + 1):
        value.add_(torch.frombuffer(bytearray(job.truth[number][0]), dtype=torch.float32), alpha=-0.1)
    return value.numpy()


def read(fetch: Any) -> np.ndarray:
    return np.frombuffer(bytes(fetch.read("model/p0", 0, 4 * SIZES[0])), np.float32)


def test_steps_are_applied_journalled_persisted_and_handed_out(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(store=tmp_path / "store", journal=tmp_path / "journal", every_steps=2, keep=2)
    job = SyntheticJob()
    held = here.attach(job)
    for number in range(1, 6):
        here.step(job, held)
        wait_for(lambda n=number: held.checked == n)
        wait_for(lambda n=number: here.jobs.status()["persisted"] == n // 2 * 2)  # a slow disk may pass over steps
    fetch = here.jobs.open(None, None)
    assert np.array_equal(read(fetch), expected(job, 5)) and fetch.header["notes"] == []
    fetch.close()
    status = here.jobs.status()
    assert (status["step"], status["confirmed"], status["coverage"], status["frozen"]) == (5, True, 1.0, None)
    assert held.shadow.apply_wait == held.pace.wait < 1.0
    wait_for(lambda: here.daemon._capture.pipeline.gloo._held.budget._spare)  # gradients' memory is taken again
    assert here.finish() == []
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["digest"] == held.shadow.digest()
    store = Store(tmp_path / "store")
    assert store.steps("made-up", 1) == [4, 5] and store.newest().step == 5
    with pytest.raises(FlowcheckError, match="ended its capture"):
        here.attach(SyntheticJob())


def test_a_second_attach_of_the_same_group_does_not_wait_for_steps_being_applied(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node(store=tmp_path / "store")
    job = SyntheticJob(rebuilt_at_attach=True)
    first = here.attach(job)
    gate, apply = threading.Event(), first.shadow.apply
    monkeypatch.setattr(first.shadow, "apply", lambda *a: (gate.wait(PATIENCE), apply(*a)))
    for _ in range(2):
        here.step(job, first)
    wait_for(lambda: first.tracker is not None and first.tracker.pending == 2)
    truth = dict(job.truth)
    again = here.attach(job, run="other")  # the same listeners: the same process group
    assert first.ended and first.step == 0 and again.key == "other/e1"
    for _ in range(2):
        here.step(job, again)  # its gradients must not land in memory that is still read
    gate.set()
    wait_for(lambda: first.checked == 2 and again.checked == 4)
    job.truth = truth
    assert np.array_equal(read(here.jobs.open("made-up", None)), expected(job, 2))
    here.finish()
    assert Store(tmp_path / "store").newest("made-up").step == 2


def test_a_step_that_is_complete_at_the_next_attach_is_not_lost(node: Callable[..., Node]) -> None:
    """The capture may be behind: what the wire carried before the attach belongs to the old epoch."""
    here = node()
    job = SyntheticJob(rebuilt_at_attach=True)
    first = here.attach(job)
    for _ in range(3):
        here.step(job, first)
    second = here.attach(job)
    wait_for(lambda: first.checked == 3)
    here.step(job, second)
    wait_for(lambda: second.checked == 4 or second.frozen is not None, 5)


def test_a_failing_step_freezes_its_job_alone(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    here = node()
    job, other = SyntheticJob(), SyntheticJob(seed=3, base_port=41000)
    bad, good = here.attach(job, "bad"), here.attach(other, "good")

    def fail(*_: Any) -> None:
        raise ShadowError("out of memory")

    monkeypatch.setattr(bad.shadow, "apply", fail)
    for number in range(1, 6):
        here.step(job, bad)
        here.step(other, good)
        wait_for(lambda n=number: good.checked == n)
    assert bad.step == 0 and "could not be applied: out of memory" in here.jobs.status()["jobs"][0]["frozen"]
    assert read(here.jobs.open("bad", None)).any() == np.False_  # the step before is whole and restorable
    started = time.monotonic()
    here.finish()
    assert time.monotonic() - started < 10


def test_a_state_that_the_trainer_contradicts_is_not_handed_out(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(store=tmp_path / "store", every_steps=1)
    job = SyntheticJob()
    held = here.attach(job)
    here.step(job, held)
    wait_for(lambda: held.checked == 1 and held.persisted == 1)
    assert np.array_equal(read(here.jobs.open(None, None)), expected(job, 1))
    early = here.jobs.open(None, None)
    here.step(job, held, value=b"\1\2\3\4")
    wait_for(lambda: held.suspect)
    assert read(early) is not None  # step 1 was not contradicted
    fetch = here.jobs.open(None, None)
    assert fetch.header["step"] == 1 and any("step 2 is not handed out" in note for note in fetch.header["notes"])
    wait_for(lambda: not here.jobs.open(None, None).header["exact"])
    assert "changed outside the optimizer" in here.jobs.status()["frozen"]
    here.step(job, held)
    here.finish()
    assert held.step == 2 and Store(tmp_path / "store").newest().step == 1


def test_a_contradicted_state_without_a_store_is_nothing_restorable(node: Callable[..., Node]) -> None:
    here = node()
    job = SyntheticJob()
    held = here.attach(job)
    here.step(job, held, value=b"\1\2\3\4")
    wait_for(lambda: held.suspect)
    with pytest.raises(NothingRestorable, match="not handed out"):
        here.jobs.open(None, None)


def test_a_reader_waits_until_the_newest_step_is_checked(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node()
    job = SyntheticJob()
    held = here.attach(job)
    checking, gate = threading.Event(), threading.Event()

    def contradiction(_: Any) -> str:
        checking.set()
        gate.wait(PATIENCE)
        return "it is wrong"

    monkeypatch.setattr(Job, "contradiction", lambda self, canaries: contradiction(canaries))
    here.step(job, held)
    assert checking.wait(PATIENCE) and held.step == 1
    outcome: list[Any] = []

    def fetch() -> None:
        try:
            outcome.append(here.jobs.open(None, None))
        except FlowcheckError as error:
            outcome.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    time.sleep(0.05)
    assert not outcome
    gate.set()
    thread.join(PATIENCE)
    assert isinstance(outcome[0], NothingRestorable)


def test_a_late_contradiction_takes_steps_back_from_memory_and_disk(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(store=tmp_path / "store", every_steps=1, keep=10)
    job = SyntheticJob(rebuilt_at_attach=True)
    held = here.attach(job)
    here.step(job, held)
    wait_for(lambda: held.persisted == 1)
    here.jobs.link(held.run, held.epoch, False)
    job.reduction()  # a step that the trainers made with two reductions
    here.send(job)
    wait_for(lambda: held.persisted == 2)
    assert not here.jobs.status()["confirmed"]
    fetch = here.jobs.open(None, None)
    assert not fetch.header["confirmed"]
    here.step(job, held)
    wait_for(lambda: held.suspect is not None)
    with pytest.raises(Revoked):
        read(fetch)
    store = Store(tmp_path / "store")
    wait_for(lambda: store.steps("made-up", 1)[-1] == 1)
    assert here.jobs.open(None, None).header["step"] == 1
    here.finish()
    assert store.newest().step == 1


def test_an_attach_that_the_capture_cannot_take_leaves_nothing_behind(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowcheck.jobs.SWITCH_SECONDS", 0.2)
    here = node()
    job = SyntheticJob()
    gate = threading.Event()
    here.daemon._capture.call(lambda: gate.wait(PATIENCE))
    with pytest.raises(FlowcheckError, match="too far behind"):
        here.attach(job)
    gate.set()
    monkeypatch.setattr("flowcheck.jobs.SWITCH_SECONDS", 10.0)
    held = here.attach(job)
    here.step(job, held)
    wait_for(lambda: held.checked == 1)
    assert list(here.daemon._capture.pipeline.trackers) == [held.key]


def test_stop_while_a_job_attaches(node: Callable[..., Node]) -> None:
    here = node()
    job = SyntheticJob()
    outcome: list[Any] = []

    def attach() -> None:
        for _ in range(50):
            try:
                outcome.append(here.attach(job))
            except FlowcheckError as error:
                outcome.append(error)

    thread = threading.Thread(target=attach)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    here.finish()
    thread.join(2 * PATIENCE)
    assert not thread.is_alive() and time.monotonic() - started < PATIENCE
    assert isinstance(outcome[-1], FlowcheckError)


def test_a_daemon_that_restarts_serves_its_store_and_takes_a_new_attach(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    here = node(store=tmp_path / "store")
    job = SyntheticJob()
    held = here.attach(job)
    for number in range(1, 4):
        here.step(job, held)
        wait_for(lambda n=number: held.checked == n)
    here.finish()
    assert here.daemon._store is not None
    here.daemon._store.close()

    there = node(store=tmp_path / "store")
    status = there.jobs.status()
    assert (status["run"], status["epoch"], status["step"], status["exact"]) == ("made-up", 1, 3, True)
    assert status["frozen"].startswith("frozen at 3: ") and status["confirmed"]
    marker = {"step": 7, "sequence": 9, "version": 0, "groups": None, "canaries": [], "problem": None}
    there.jobs.marker("made-up", 1, marker)
    assert there.jobs.status()["frozen"].startswith("frozen at 3, job is ahead: ")
    fetch = there.jobs.open(None, None)
    assert fetch.header["step"] == 3 and any("job is ahead" in note for note in fetch.header["notes"])
    assert np.array_equal(read(fetch), expected(job, 3))
    resumed = there.attach(SyntheticJob(seed=5, step=3))
    assert resumed.epoch == 2 and there.jobs.status()["frozen"] is None
    assert there.jobs.open("made-up", 3).header["epoch"] == 2  # the state of the attach


def test_a_damaged_newest_snapshot_is_passed_over_and_said_so(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(store=tmp_path / "store", every_steps=1)
    job = SyntheticJob()
    held = here.attach(job)
    for number in (1, 2):
        here.step(job, held)
        wait_for(lambda n=number: held.persisted == n)
    here.finish()
    assert here.daemon._store is not None
    here.daemon._store.close()
    victim = tmp_path / "store" / "made-up" / "e1" / "step-2" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    fetch = node(store=tmp_path / "store").jobs.open(None, None)
    assert fetch.header["step"] == 1 and any("step-2" in note for note in fetch.header["notes"])


def test_a_full_disk_costs_snapshots_and_journal_lines_only(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(store=tmp_path / "store", every_steps=1, journal=Path("/dev/full"))
    job = SyntheticJob()
    held = here.attach(job)
    wait_for(lambda: held.persisted == 0)
    persister = here.daemon._persister
    assert persister is not None
    save = persister.store.save

    def full(*_: Any, **__: Any) -> Path:
        raise FlowcheckError("no space left: make room")

    persister.store.save = full  # type: ignore[method-assign]
    for number in (1, 2, 3):
        here.step(job, held)
        wait_for(lambda n=number: held.checked == n)
    wait_for(lambda: any("step 3 is not on disk" in line for line in here.lines))
    persister.store.save = save  # type: ignore[method-assign]
    here.step(job, held)
    wait_for(lambda: held.persisted == 4)
    assert len([line for line in here.lines if "journal" in line]) == 1
    persister.store.save = full  # type: ignore[method-assign]
    here.step(job, held)
    wait_for(lambda: held.checked == 5)
    assert here.finish() == ["made-up/e1"]  # the daemon's exit status says so


def test_requests_to_persist_are_never_dropped(node: Callable[..., Node], tmp_path: Path) -> None:
    """Several jobs in a row while the disk is slow: each has its job file, and its newest step at its end."""
    here = node(store=tmp_path / "store")
    persister = here.daemon._persister
    assert persister is not None
    gate = threading.Event()
    persister._work.put(lambda: gate.wait(PATIENCE))
    jobs = []
    for number in range(6):
        job = SyntheticJob(rebuilt_at_attach=True, seed=number, base_port=40000 + 10 * number)
        held = here.attach(job, f"run{number}")
        here.step(job, held)
        wait_for(lambda held=held: held.checked == 1)
        jobs.append(held)
    gate.set()
    here.finish()
    store = Store(tmp_path / "store")
    for held in jobs:
        assert store.job_file(held.run, 1).exists() and store.newest(held.run).step == 1


def test_a_capture_that_fails_leaves_the_daemon_serving(node: Callable[..., Node]) -> None:
    here = node()
    job = SyntheticJob()
    held = here.attach(job)
    here.step(job, held)
    wait_for(lambda: held.checked == 1)
    here.ring.failure = OSError("the interface is gone")
    wait_for(lambda: not here.daemon._capture.is_alive())
    waiting = threading.Thread(target=here.daemon._wait, args=(True,))
    waiting.start()
    wait_for(lambda: held.frozen)
    assert waiting.is_alive() and "the interface is gone" in here.jobs.status()["failure"]
    assert "the capture failed" in here.jobs.status()["frozen"]
    assert np.array_equal(read(here.jobs.open(None, None)), expected(job, 1))
    here.daemon._stop.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_markers_after_the_end_of_a_job_are_not_kept(node: Callable[..., Node]) -> None:
    here = node()
    job = SyntheticJob(rebuilt_at_attach=True)
    first = here.attach(job)
    tracker = first.tracker
    here.attach(job, "other")
    for number in range(5):
        marker = {"step": 9 + number, "sequence": 99, "version": 0, "groups": None, "canaries": [], "problem": None}
        here.jobs.marker("made-up", 1, marker)
        here.jobs.marker(f"stranger{number}", 1, marker)
    time.sleep(0.1)
    assert tracker is not None and not tracker._markers
    assert here.jobs.status()["jobs"][0]["frozen"].startswith("frozen at 0, job is ahead")


def test_a_job_that_does_not_fit_is_refused_before_it_is_followed(node: Callable[..., Node]) -> None:
    here = node(landing_gib=0.0000005)
    with pytest.raises(UsageError, match="--landing-gib"):
        here.attach(SyntheticJob())
    assert here.jobs.jobs == {} and here.jobs._uploading == {}


def test_problems_of_sources_are_said_once(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowcheck.capture.PROBLEMS_EVERY", 0.01)
    here = node()
    here.ring.problems.append("it went down")
    wait_for(lambda: "it went down" in here.lines)
    here.ring.problems.append("it went down")
    wait_for(lambda: here.lines.count("it went down") == 2)
    time.sleep(0.1)
    assert here.lines.count("it went down") == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([], ["a"], ["a"]),
        (["a"], ["a"], []),
        (["a", "a"], ["a", "a", "a"], ["a"]),
        (["a", "b", "c"], ["b", "c", "d"], ["d"]),
        (["a", "b"], ["x", "y"], ["x", "y"]),
    ],
)
def test_fresh_lines_of_a_bounded_list(old: list[str], new: list[str], said: list[str]) -> None:
    assert fresh(old, new) == said
