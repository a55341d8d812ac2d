"""A daemon whose disk fails: it follows its job, says since when nothing was stored, and stores again by itself."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_disk import FailingDisk, failing_disk
from synthetic_job import SyntheticJob
from test_daemon import Node, wait_for

from flowcheck import jobfile
from flowcheck.client import snapshot
from flowcheck.durable import Meter
from flowcheck.errors import FlowcheckError
from flowcheck.jobs import Jobs
from flowcheck.report import status_text
from flowcheck.store import Store
from flowcheck.verify import verify


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
        if one.daemon._store is not None:
            one.daemon._store.close()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path_factory.mktemp("failing"), 48) as made:
        if isinstance(made, str):
            pytest.skip(made)
        yield made


def text(jobs: Jobs) -> str:
    return status_text(jobs.status())


@pytest.mark.parametrize("fault", ["eio", "full", "read-only"])
def test_a_disk_that_fails_and_heals(fault: str, disk: FailingDisk, node: Callable[..., Node]) -> None:
    here = node(store=disk.path / f"store-{fault}", every_steps=1)
    job = SyntheticJob()
    held = here.attach(job)
    here.step(job, held)
    wait_for(lambda: held.persisted == 1)
    assert held.unstored is None and "nothing was stored since" not in text(here.jobs)
    filler = disk.path / "filler"
    before = time.time()
    if fault == "eio":
        disk("eio-write")
    elif fault == "full":
        with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)) == 1 << 16:
                pass
    else:
        here.daemon._store.close()  # its locks, which are open for writing
        here.jobs._logs["made-up/e1"].close()
        disk.remount("ro")
    try:
        for number in (2, 3, 4):
            here.step(job, held)
            wait_for(lambda n=number: held.checked == n)
        wait_for(lambda: held.unstored is not None)
        status = here.jobs.status()["jobs"][0]
        assert status["persisted"] == 1 and before <= status["unstored_since"] <= time.time()
        reason = {"eio": "Input/output error", "full": "free space or keep fewer steps", "read-only": "Read-only file"}
        assert reason[fault] in status["unstored_reason"]
        assert re.search(r"nothing was stored since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, step 1 is: ", text(here.jobs))
        with_memory = here.jobs.open(None, None)  # the job is followed and handed out all the same
        assert with_memory.header["step"] == 4
        with_memory.close()
    finally:
        disk("ok")
        if fault == "read-only":
            disk.remount("rw")
        filler.unlink(missing_ok=True)
    here.step(job, held)
    wait_for(lambda: held.persisted == 5)
    wait_for(lambda: any(re.search(r"step [2-5] is on disk, the first for", line) for line in here.lines))
    wait_for(lambda: held.unstored is None)
    assert "nothing was stored" not in text(here.jobs)
    assert here.finish() == []
    assert verify(disk.path / f"store-{fault}").problems == []


def test_an_attach_while_the_disk_is_read_only_is_followed_and_stored_later(
    disk: FailingDisk, node: Callable[..., Node]
) -> None:
    root = disk.path / "store-late"
    with Store(root) as old:
        old.open_epoch("made-up")
    disk.remount("ro")
    try:
        here = node(store=root, every_steps=1)
        job = SyntheticJob()
        held = here.attach(job)
        assert held.epoch == 2
        here.step(job, held)
        wait_for(lambda: held.unstored is not None)
        assert any("Read-only file system" in line for line in here.lines)
        assert re.search(r"nothing was stored since .*, nothing is: ", text(here.jobs))
    finally:
        disk.remount("rw")
    here.step(job, held)
    wait_for(lambda: held.persisted == 2)
    assert here.finish() == []
    found = Store(root).newest("made-up")
    assert (found.epoch, found.step) == (2, 2)


def test_a_disk_slower_than_the_steps_gets_whole_steps_and_delays_none(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write takes as long as many steps; every step is due. None is delayed, and writes end whole, not revoked."""
    advance = Meter.advance

    def slow(meter: Meter, nbytes: int) -> None:
        if threading.current_thread().name == "persist":
            time.sleep(0.1)
        advance(meter, nbytes)

    here = node(store=tmp_path / "store", every_steps=1, keep=3)
    job = SyntheticJob()
    held = here.attach(job)
    wait_for(lambda: held.persisted == 0)
    monkeypatch.setattr(Meter, "advance", slow)
    stored = set()
    begun = time.monotonic()
    for number in range(1, 61):
        here.step(job, held)
        wait_for(lambda n=number: held.checked == n)
        stored.add(held.persisted)
        time.sleep(0.02)
    assert time.monotonic() - begun < 30
    assert len(stored) >= 3, stored  # a write is under way nearly all the time, and ends
    assert held.shadow.revoked_pins == 0
    monkeypatch.undo()
    assert here.finish() == []
    assert Store(tmp_path / "store").newest("made-up").step == 60


def test_a_disk_that_hangs_does_not_hold_the_end_up(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowcheck import persist

    monkeypatch.setattr(persist, "STALL_SECONDS", 0.5)
    gate = threading.Event()
    fsync = os.fsync

    def hanging(descriptor: int) -> None:
        if threading.current_thread().name == "persist":
            gate.wait(60)
        fsync(descriptor)

    here = node(store=tmp_path / "store", every_steps=1)
    job = SyntheticJob()
    held = here.attach(job)
    wait_for(lambda: held.persisted == 0)
    monkeypatch.setattr(os, "fsync", hanging)
    here.step(job, held)
    wait_for(lambda: held.checked == 1)
    begun = time.monotonic()
    assert here.finish() == ["made-up/e1"]
    assert time.monotonic() - begun < 10
    assert any("does not answer" in line for line in here.lines)
    gate.set()


def test_markers_of_a_time_without_room_are_missing_and_said(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node(store=tmp_path / "store", every_steps=1)
    job = SyntheticJob()
    held = here.attach(job)

    def settled() -> bool:
        return not any(file["waiting"] for file in here.jobs.status()["disks"])

    here.step(job, held)
    wait_for(settled)
    write = os.write
    path = tmp_path / "store" / "made-up" / "e1" / "markers.jsonl"

    def full(descriptor: int, data: bytes) -> int:
        if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(path.resolve()):
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    for _ in range(2):
        here.step(job, held)
    wait_for(settled)
    monkeypatch.setattr(os, "write", write)
    here.step(job, held)
    wait_for(lambda: held.checked == 4 and settled())
    assert [m["step"] for m in jobfile.read_markers(path) if "step" in m] == [1, 4]
    assert len([line for line in here.lines if "lines are missing in it from now on: No space" in line]) == 1
    assert any("lines are written again, 2 are missing" in line for line in here.lines)


def test_a_daemon_brings_its_steps_to_a_url(node: Callable[..., Node], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mounted"
    here = node(store=tmp_path / "store", every_steps=1, keep=2, store_remote=url)
    job = SyntheticJob()
    held = here.attach(job)
    for number in (1, 2, 3):
        here.step(job, held)
        wait_for(lambda n=number: held.persisted == n)
    wait_for(lambda: here.jobs.status()["remote"]["step"] == 3)
    assert f"{url}: run made-up step 3" in text(here.jobs)
    held.distrust(3, "made up")
    here.daemon._persister.withdraw(held, 3)
    wait_for(lambda: snapshot(url).step == 2)
    here.daemon._persister.doubt(held, "who knows")
    wait_for(lambda: not snapshot(url).exact)
    here.finish()
    assert snapshot(url, "made-up").step == snapshot(str(tmp_path / "store"), "made-up").step == 2
    assert verify(tmp_path / "mounted").problems == []


def test_a_limit_is_kept_and_said(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(store=tmp_path / "store", every_steps=1, keep=3, store_gib=200_000 / (1 << 30))
    job = SyntheticJob()
    held = here.attach(job)
    for number in range(1, 8):
        here.step(job, held)
        wait_for(lambda n=number: held.checked == n)
    wait_for(lambda: held.persisted == 7 or held.unstored is not None)
    used = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert used <= 200_000
    if held.unstored is not None:
        assert "raise --store-gib or keep fewer steps" in (held.unstored_reason or "")


def test_sweeping_happens_at_the_start(node: Callable[..., Node], tmp_path: Path) -> None:
    leftover = tmp_path / "store" / "long-ago" / "e4" / ".tmp-step-9-1-1"
    leftover.mkdir(parents=True)
    node(store=tmp_path / "store")
    wait_for(lambda: not leftover.exists())


def test_options_that_need_a_store() -> None:
    from flowcheck.config import DaemonConfig

    for options in ({"store_gib": 1.0}, {"store_remote": "memory://x"}):
        with pytest.raises(FlowcheckError, match="needs --store DIR"):
            DaemonConfig(interfaces=("x",), **options)
