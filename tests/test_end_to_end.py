"""Whole jobs in the lab: real torch.distributed, namespaces, mirroring and daemon, compared bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ordinary_user import RUN_AS_USER, as_ordinary_user

from flowcheck.client import status
from flowcheck.lab import Lab, LabConfig, Mirror
from flowcheck.lab.supervisor import to_json
from mirror.kernel_cache import VARIABLE

CASES = str(Path(__file__).with_name("jobs") / "cases.py")
STEPS = 6
PLAIN = ("sgd", "adam", "gpt", "conv", "mixed", "static")
AWKWARD = ("accumulate", "accumulate_nosync", "same_size", "skipped", "groups", "manual_lr")


def mirrors(*texts: str) -> tuple[Mirror, ...]:
    return tuple(Mirror.parse(text) for text in texts)


class Outcome:
    """What one lab run left: the trainers' own digests, the journal, and the last status of every run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.truth: dict[tuple[str, int], set[str]] = {}
        self.ranks: set[str] = set()
        for path in folder.glob("rank*.jsonl"):
            self.ranks.add(path.stem)
            for line in path.read_text().splitlines():
                note = json.loads(line)
                self.truth.setdefault((note["run"], note["step"]), set()).add(note["digest"])
        journal = folder / "journal.jsonl"
        self.journal: list[dict[str, Any]] = (
            [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        )
        self.statuses: dict[str, dict[str, Any]] = {}

    def steps(self, run: str) -> list[int]:
        return [line["step"] for line in self.journal if line["run"] == run]

    def check(self, runs: Iterable[str], *, confirmed: bool = True) -> None:
        """Every step of every run was followed, and equals every trainer to the bit."""
        for run in runs:
            assert self.steps(run) == list(range(1, STEPS + 1)), (run, self.statuses.get(run))
        self.check_claimed(confirmed=confirmed)

    def check_claimed(self, *, confirmed: bool = True) -> None:
        """What was claimed is right: each journalled digest is that of every trainer at that step."""
        for line in self.journal:
            truth = self.truth[line["run"], line["step"]]
            assert truth == {line["digest"]}, (line, truth)
            assert line["confirmed"] == confirmed, line


def train(tmp_path: Path, cases: tuple[str, ...], *, until_frozen: bool = False, **config: Any) -> Outcome:
    """Train the cases in a lab; until_frozen: keep the daemon until it says why it claims nothing."""
    lab_config = LabConfig(
        command=(CASES, str(tmp_path), *cases),
        journal=str(tmp_path / "journal.jsonl"),
        store=str(tmp_path / "store"),
        **config,
    )
    with Lab(lab_config) as lab:
        lab.train()
        assert lab.wait(240) == 0
        assert lab.endpoint is not None
        answer = status(lab.endpoint, 20)
        deadline = time.monotonic() + 60
        while until_frozen and answer["frozen"] is None and time.monotonic() < deadline:
            time.sleep(0.5)
            answer = status(lab.endpoint, 20)
        lab.finish()
    outcome = Outcome(tmp_path)
    outcome.statuses = {job["run"]: job for job in answer["jobs"]}
    assert len(outcome.ranks) == lab_config.ranks
    return outcome


def test_every_model_and_optimizer_equals_the_trainers_at_every_step(tmp_path: Path) -> None:
    outcome = train(tmp_path, PLAIN, ranks=4, mirrors=mirrors("1:both"))
    outcome.check(PLAIN)
    for run, job in outcome.statuses.items():
        assert job["step"] == STEPS and job["exact"] and job["confirmed"] and job["coverage"] == 1.0, (run, job)


def test_collectives_around_the_buckets_never_pass_for_a_step(tmp_path: Path) -> None:
    outcome = train(tmp_path, AWKWARD, ranks=3, mirrors=mirrors("0:both"), rendezvous="management")
    outcome.check_claimed()
    outcome.check(("accumulate", "accumulate_nosync", "skipped", "groups", "manual_lr"))
    # An all-reduce of exactly a bucket's size before and after the backward pass: followed right, or not claimed.
    assert outcome.steps("same_size") in (list(range(1, n + 1)) for n in range(STEPS + 1))


def test_two_one_way_mirrors_of_different_links(tmp_path: Path) -> None:
    # These links carry no broadcast: the rebuilt layout must come from the report.
    outcome = train(tmp_path, ("gpt", "sgd"), ranks=4, mirrors=mirrors("2:in", "3:in"), rendezvous="management")
    outcome.check(("gpt", "sgd"))


def test_two_ranks_over_ipv6(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("gpt", "adam"), ranks=2, mirrors=mirrors("1:both"), ipv6=True)
    outcome.check(("gpt", "adam"))


def test_two_ranks_on_a_node(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("gpt", "sgd"), ranks=4, ranks_per_node=2, mirrors=mirrors("2:both"))
    outcome.check(("gpt", "sgd"))


def test_one_way_mirror_shows_three_quarters_and_claims_nothing(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("gpt",), ranks=4, mirrors=mirrors("1:in"), until_frozen=True)
    assert outcome.journal == []
    job = outcome.statuses["gpt"]
    assert job["step"] == 0 and job["job_step"] == STEPS
    assert job["coverage"] == pytest.approx(0.75, abs=0.02)
    assert job["frozen"] is not None


def test_without_a_mirror_it_stays_at_step_zero_and_says_so(tmp_path: Path) -> None:
    outcome = train(
        tmp_path, ("sgd",), ranks=2, mirrors=(), daemon_args=("--every-steps", "1"), until_frozen=True
    )
    assert outcome.journal == []
    job = outcome.statuses["sgd"]
    assert job["step"] == 0 and job["coverage"] == 0.0
    assert "frozen at 0, job is ahead" in job["frozen"] and "mirror" in job["frozen"]


def test_as_an_ordinary_user(tmp_path: Path) -> None:
    kernels = os.environ.get(VARIABLE)
    if kernels and Path(kernels).is_dir():  # else they are compiled once more
        shutil.copytree(kernels, tmp_path / ".cache" / "flowcheck" / Path(kernels).name)
    config = LabConfig(
        command=(CASES, str(tmp_path), "gpt"),
        ranks=2,
        journal=str(tmp_path / "journal.jsonl"),
        store=str(tmp_path / "store"),
    )
    done = as_ordinary_user(RUN_AS_USER, json.dumps(to_json(config)), folder=tmp_path)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    Outcome(tmp_path).check(("gpt",))


def test_management_link_down_after_attach(tmp_path: Path) -> None:
    attached, go_on = tmp_path / "attached", tmp_path / "go-on"
    config = LabConfig(
        command=(CASES, str(tmp_path), "gpt"),
        ranks=3,
        mirrors=mirrors("1:both"),
        journal=str(tmp_path / "journal.jsonl"),
        env={"AFTER_ATTACH": str(attached), "GO_ON": str(go_on)},
    )
    with Lab(config) as lab:
        lab.train()
        while not attached.exists():
            with suppress(TimeoutError):
                lab.wait(0.1)
        lab.set_management(False)
        go_on.touch()
        assert lab.wait(240) == 0
        lab.finish()
    outcome = Outcome(tmp_path)
    outcome.check(("gpt",), confirmed=False)
