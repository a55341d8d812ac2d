"""A whole job whose mirror loses frames and whose daemon is killed while it trains: what is known is right at every
step, what is lost is repaired by the trainers, and a restore never hands out anything else."""

from __future__ import annotations

import io
import json
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end import CASES

from flowcheck.cli import main
from flowcheck.client import fetch, status
from flowcheck.lab import Lab, LabConfig
from flowcheck.manifest import OutputManifest, output_manifest_path
from reconstruct.digest import state_digest

RUN = "gpt"
STEPS = 240
PAUSE = 0.05
PATIENCE = 60.0


@dataclass
class Story:
    """What happened to one job, and what was read of it meanwhile."""

    folder: Path
    lab: Lab
    fetched: list[tuple[int, str]] = field(default_factory=list)
    codes: dict[str, tuple[int, str]] = field(default_factory=dict)
    late: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def status(self) -> dict[str, Any]:
        jobs = status(str(self.lab.endpoint), 20)["jobs"]
        return dict(jobs[-1]) if jobs else {"step": 0, "known_step": None, "unknown": {"elements": 0}, "epoch": 0}

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status of which that is true, while the job trains."""
        end = time.monotonic() + PATIENCE
        while not condition(found := self.status()):
            assert self.lab.running and time.monotonic() < end, found
            with suppress(TimeoutError):
                self.lab.wait(0.05)
        return found

    def halt(self) -> dict[str, Any]:
        """Stop the trainers, agents and all, at a moment at which something is unknown."""
        while True:
            self.until(lambda job: job["unknown"]["elements"] > 0)
            self.lab.kill(number=signal.SIGSTOP)
            time.sleep(0.5)  # what was on its way comes
            job = self.status()
            if job["unknown"]["elements"]:
                return job
            self.lab.kill(number=signal.SIGCONT)

    def fetch(self) -> None:
        snapshot = fetch(str(self.lab.endpoint), RUN, timeout=30)
        self.fetched.append((snapshot.step, state_digest(snapshot.tensors)))

    def command(self, name: str, *arguments: str) -> None:
        """Run a command of flowcheck, note its exit status and what it said."""
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as end:
            main(list(arguments))
        self.codes[name] = int(str(end.value.code or 0)), said.getvalue()

    @property
    def truth(self) -> dict[int, str]:
        lines = (self.folder / "rank0.jsonl").read_text().splitlines()
        return {note["step"]: note["digest"] for note in map(json.loads, lines)}

    @property
    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("rough")
    config = LabConfig(
        command=(CASES, str(folder), RUN),
        ranks=2,
        journal=str(folder / "journal.jsonl"),
        store=str(folder / "store"),
        faults=("drop=0.003,seed=11",),
        daemon_args=("--every-steps", "10", "--repair-percent", "5"),
        env={"STEPS": str(STEPS), "STEP_PAUSE": str(PAUSE)},
    )
    with Lab(config) as lab:
        told = Story(folder, lab)
        endpoint = str(lab.endpoint)
        lab.train()
        told.until(lambda job: job["step"] > 5 and job["repair"]["repaired"] > 0)
        told.fetch()
        told.command("compare", "compare", endpoint)
        told.command("stored", "restore", str(folder / "store"), "--out", str(folder / "stored.pt"))
        told.command("checkpoint", "compare", str(folder / "store"), str(folder / "stored.pt"))

        degraded = told.halt()
        told.command("latest", "restore", endpoint, "--run", RUN, "--out", str(folder / "latest.pt"))
        told.command(
            "exact", "restore", endpoint, "--run", RUN, "--out", str(folder / "x.pt"), "--step", str(degraded["step"])
        )
        told.command(
            "unknown", "restore", endpoint, "--run", RUN, "--out", str(folder / "unknown.pt"), "--allow-unknown"
        )
        lab.kill(number=signal.SIGCONT)
        told.until(lambda job: job["known_step"] is not None and job["known_step"] > degraded["step"])
        told.fetch()

        before = told.status()
        lab.kill_daemon()
        time.sleep(10 * PAUSE)  # steps that nobody sees
        lab.kill(number=signal.SIGSTOP)  # the start of a daemon may take longer than the rest of the job
        lab.start_daemon()
        lab.kill(number=signal.SIGCONT)
        told.late = told.until(lambda job: job["epoch"] > before["epoch"] and job["known_step"] is not None)
        told.fetch()
        assert lab.wait(240) == 0
        told.last = told.status()
        lab.finish()
    return told


def test_every_step_that_was_claimed_to_be_known_is_the_trainers(story: Story) -> None:
    truth = story.truth
    assert len(truth) == STEPS
    claimed = [line for line in story.journal if line["digest"] is not None]
    assert claimed and all(line["digest"] == truth[line["step"]] for line in claimed)
    assert all((line["digest"] is None) == (line["unknown"] > 0) for line in story.journal)
    assert all(truth[step] == digest for step, digest in story.fetched)


def test_frames_were_lost_and_what_they_cost_was_repaired_while_training_ran(story: Story) -> None:
    first = [line for line in story.journal if line["epoch"] == 1]
    assert [line["step"] for line in first] == list(range(1, first[-1]["step"] + 1))
    unknown = [line["step"] for line in first if line["unknown"]]
    assert unknown and first[-1]["holes"] > 0
    again = [line["step"] for line in first if not line["unknown"] and line["step"] > unknown[0]]
    assert again, "nothing became known again"


def test_a_daemon_that_was_killed_joins_again_and_fetches_what_it_missed(story: Story) -> None:
    late = [line for line in story.journal if line["epoch"] == story.late["epoch"]]
    assert late[0]["unknown"] > 0 and late[0]["known_step"] is None
    assert story.late["known_step"] >= late[0]["step"]
    assert story.last["job_step"] == STEPS and story.last["known_step"] > story.late["known_step"]


def test_restore_falls_back_to_the_newest_known_step_and_says_so(story: Story) -> None:
    code, said = story.codes["latest"]
    state = torch.load(story.folder / "latest.pt", weights_only=True)
    assert code == 0 and "is not fully known" in said and state["unknown"] == {}
    code, said = story.codes["exact"]
    assert code == 3 and "--allow-unknown" in said and not (story.folder / "x.pt").exists()
    code, said = story.codes["unknown"]
    marked = torch.load(story.folder / "unknown.pt", weights_only=True)
    assert code == 0 and "NOT KNOWN" in said and marked["unknown"] and marked["step"] > state["step"]
    manifest = OutputManifest.read(output_manifest_path(story.folder / "unknown.pt"))
    assert manifest.unknown.to_json() == marked["unknown"]


def test_compare_finds_no_difference(story: Story) -> None:
    for name in ("compare", "stored", "checkpoint"):
        code, said = story.codes[name]
        assert code == 0, said
    assert "equal to the bit" in story.codes["compare"][1]


