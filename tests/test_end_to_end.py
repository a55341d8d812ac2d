"""Whole jobs in the lab: real torch.distributed, namespaces, mirroring and daemon, compared bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from end_to_end import CASES, CUT_OFF, PLAIN, STEPS, Outcome, mirrors, train
from ordinary_user import RUN_AS_USER, as_ordinary_user

from flowcheck.lab import LabConfig
from flowcheck.lab.supervisor import to_json
from mirror.kernel_cache import VARIABLE

AWKWARD = ("accumulate", "accumulate_nosync", "same_size", "skipped", "groups", "manual_lr")


def test_every_model_and_optimizer_equals_the_trainers_at_every_step(plain: Outcome) -> None:
    plain.check(PLAIN)
    for run in PLAIN:
        job = plain.statuses[run]
        assert job["step"] == STEPS and job["exact"] and job["confirmed"] and job["coverage"] == 1.0, (run, job)


def test_what_the_daemon_writes_is_its_users_alone(plain: Outcome) -> None:
    written = [plain.folder / name for name in ("store", "journal.jsonl", "all.pcap")]
    written += (plain.folder / "store").rglob("*")
    assert len(written) > 20
    assert not [path for path in written if path.stat().st_mode & 0o077]


def test_management_link_down_after_attach(plain: Outcome) -> None:
    plain.check((CUT_OFF,))  # no step of it is confirmed


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


@pytest.mark.slow
def test_two_ranks_over_ipv6(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("gpt", "adam"), ranks=2, mirrors=mirrors("1:both"), ipv6=True)
    outcome.check(("gpt", "adam"))


@pytest.mark.slow
def test_two_ranks_on_a_node(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("gpt", "sgd"), ranks=4, ranks_per_node=2, mirrors=mirrors("2:both"))
    outcome.check(("gpt", "sgd"))


@pytest.mark.slow
def test_one_way_mirror_shows_three_quarters_and_claims_no_more(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("gpt",), ranks=4, mirrors=mirrors("1:in"), until_told=True)
    outcome.check_claimed()
    assert outcome.steps("gpt") == list(range(1, STEPS + 1))
    assert all(line["unknown"] > 0 for line in outcome.journal)
    job = outcome.statuses["gpt"]
    assert job["coverage"] == pytest.approx(0.75, abs=0.02)
    assert job["known_step"] == STEPS and not job["unknown"]["elements"]  # the rest was fetched when it had ended


@pytest.mark.slow
def test_without_a_mirror_nothing_is_known_but_what_the_trainers_tell(tmp_path: Path) -> None:
    outcome = train(tmp_path, ("sgd",), ranks=2, mirrors=(), daemon_args=("--every-steps", "1"), until_told=True)
    outcome.check_claimed()
    job = outcome.statuses["sgd"]
    assert job["step"] == STEPS and job["coverage"] == 0.0
    assert job["known_step"] == STEPS and not job["unknown"]["elements"]  # all of it was fetched when they ended
    assert outcome.journal[0]["unknown"] > 0  # what is known later is what a trainer had: `check_claimed`


@pytest.mark.slow
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
