"""A disk that hangs: steps go on being applied, a status is answered, and what it does not take is said."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failing_disk import FailingDisk, failing_disk
from synthetic_job import SyntheticJob
from test_daemon import Node, expected, node, read, wait_for
from test_server import LOOPBACK

from flowcheck import client, jobfile, linefile, persist
from flowcheck.journal import Journal
from flowcheck.report import status_text
from flowcheck.server import Server
from flowcheck.store import Store

__all__ = ["node"]

HANGS = "slow 2"
"""Every access to the disk takes two seconds."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path_factory.mktemp("hanging"), 64) as made:
        if isinstance(made, str):
            pytest.skip(made)
        made.remount("sync")  # a write is one to the disk, as on one whose memory for writes is used up
        yield made
        made("ok")


def quickly(act: Callable[[], object]) -> object:
    """The result of what must not wait for the disk."""
    begun = time.monotonic()
    result = act()
    assert time.monotonic() - begun < 1.0
    return result


def test_steps_and_status_go_on_while_the_disk_hangs_and_it_catches_up(
    node: Callable[..., Node], disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linefile, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(linefile, "MOST_LINES", 4)
    monkeypatch.setattr(persist, "STILL_SECONDS", 0.2)
    here = node(store=disk.path / "store", journal=disk.path / "journal", every_steps=1)
    job = SyntheticJob()
    held = here.attach(job)
    here.step(job, held)
    wait_for(lambda: held.checked == 1 and held.persisted == 1)
    with Server(here.jobs, [LOOPBACK]) as server:
        disk(HANGS)
        for number in range(2, 9):
            quickly(lambda: here.step(job, held))  # its marker is said here, on the server's thread in life
            wait_for(lambda n=number: held.checked == n, 2.0)
            status = quickly(lambda: client.status(server.endpoints[0]))
            assert isinstance(status, dict) and status["step"] == number
        time.sleep(0.3)
        status = client.status(server.endpoints[0])
        fetch = here.jobs.open(None, None)
        assert (read(fetch) == expected(job, 8)).all()
        fetch.close()
    journal, markers, stored = status["disks"]
    assert journal["name"] == f"the journal {disk.path / 'journal'}"
    assert markers["name"] == f"the markers file {held_markers(disk)}"
    assert stored["name"] == f"the store {disk.path / 'store'}"
    for lines in (journal, markers):
        assert lines["problem"].startswith("the disk does not answer for ")
        assert lines["waiting"] == 4 and lines["missing"] == 3  # of seven
    assert "a write to it has not moved" in stored["problem"]
    said = f"{journal['name']}: {journal['problem']}, 3 lines are missing: check the disk"
    assert said in status_text(status).splitlines()
    disk("ok")
    wait_for(lambda: all(file["waiting"] == 0 for file in here.jobs.status()["disks"]))
    here.step(job, held)
    wait_for(lambda: held.persisted == 9)
    wait_for(lambda: all(file["problem"] is None for file in here.jobs.status()["disks"]))
    assert here.finish() == []
    for name in ("the journal", "the markers file"):
        said = [line for line in here.lines if line.startswith(name)]
        assert [line.partition(": ")[2] for line in said] == [
            "lines are missing in it from now on: the disk does not answer",
            "lines are written again, 3 are missing",
        ]
    steps = [json.loads(line)["step"] for line in (disk.path / "journal").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 9]
    assert [marker["step"] for marker in jobfile.read_markers(held_markers(disk)) if "step" in marker] == steps


def held_markers(disk: FailingDisk) -> Path:
    return disk.path / "store" / "made-up" / "e1" / "markers.jsonl"


def test_the_end_of_a_job_and_of_the_daemon_wait_for_lines_as_long_as_the_disk_moves(
    disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    disk("slow 0.01")
    journal = Journal(disk.path / "slow", said.append)
    for step in range(20):
        journal.say(step=step)
    quickly(journal.finish)
    journal.close()
    assert len((disk.path / "slow").read_text().splitlines()) == 20 and said == []
    journal = Journal(disk.path / "hangs", said.append)
    monkeypatch.setattr(linefile, "STALL_SECONDS", 0.2)
    disk(HANGS)
    for step in range(20):
        journal.say(step=step)
    quickly(journal.close)
    disk("ok")
    assert said == [f"the journal {disk.path / 'hangs'}: 20 lines are given up, the disk does not answer"]


def test_a_recording_waits_for_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has time, and a journal of a replay lacks nothing."""
    monkeypatch.setattr(linefile, "MOST_LINES", 2)
    journal = Journal(tmp_path / "journal", pytest.fail, patient=True)
    for step in range(2000):
        journal.say(step=step)
    journal.close()
    assert len((tmp_path / "journal").read_text().splitlines()) == 2000


def test_a_status_without_a_job_does_not_wait_for_the_store(
    node: Callable[..., Node], disk: FailingDisk, tmp_path: Path
) -> None:
    here = node(store=disk.path / "first")
    job = SyntheticJob()
    held = here.attach(job)
    wait_for(lambda: held.persisted == 0)
    here.finish()
    here = node(store=disk.path / "first")
    assert here.jobs.status()["step"] == 0
    disk.forget()
    disk(HANGS)
    with Server(here.jobs, [LOOPBACK]) as server:
        status = quickly(lambda: client.status(server.endpoints[0]))
        assert isinstance(status, dict) and status["step"] == 0  # as it was seen last
        (stored,) = status["disks"]
        assert stored["name"] == f"the store {disk.path / 'first'}" and "does not answer" in stored["problem"]
        assert stored["name"] in status_text(status)
        disk("ok")
        wait_for(lambda: client.status(server.endpoints[0])["disks"] == [])
    assert Store(disk.path / "first").newest().step == 0
