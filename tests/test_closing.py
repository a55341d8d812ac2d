"""A job whose daemon lacks elements of the last step: when the trainers have closed their handles, it lacks none.

What the trainer does is in tests/test_attach.py, what the daemon does is here, and the whole path in the lab: nothing
less shows that the last step is complete on the wire before the agents leave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end import CASES, STEPS, mirrors
from repair_node import Node

from flowcheck.client import fetch, status
from flowcheck.lab import Lab, LabConfig
from reconstruct.digest import state_digest

RUNS = ("adam", "conv")
LOST = {0: [(3, 40)], 3: [(0, 24)]}


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(before=1)
    yield made
    made.finish()


def told(node: Node, rank: int = 0) -> list[dict[str, Any]]:
    """The steps after which nothing more was said to be asked."""
    return [fields for kind, fields in node.ranks[rank].told if kind == "repair-done"]


def detach(node: Node, step: int) -> None:
    node.jobs.detach(node.job.run, node.job.epoch, step)
    node.settle()


def test_the_daemon_says_when_it_has_all_of_the_last_step(node: Node) -> None:
    node.step()
    ready = node.train(lost=LOST)
    detach(node, 3)
    assert not told(node)  # the last step is still on its way
    node.apply.step(node.job, ready)
    node.settle()
    assert node.job.shadow.unknown.elements == 61 and not told(node)
    node.jobs.agent_gone(node.ranks[1].peer)  # other ranks' agents do not stay
    node.settle()
    node.ranks[0].answer(1)
    node.settle()
    assert not told(node)
    node.tick()
    node.ranks[0].answer()
    node.settle()
    assert node.digest() == node.digests[3] and node.job.shadow.known_step == 3
    assert told(node) == [{"run": "test", "epoch": 1, "step": 3}]
    node.tick()
    assert len(told(node)) == 1 and not told(node, 1)


def test_nothing_is_waited_for_where_nothing_is_unknown_or_can_become_known(node: Node) -> None:
    node.step()
    detach(node, 2)
    assert [fields["step"] for fields in told(node)] == [2]
    node.job.frozen = "the capture failed"
    detach(node, 3)
    assert [fields["step"] for fields in told(node)] == [2, 3]


def test_rank_0_may_be_known_a_moment_later(node: Node) -> None:
    node.step()
    for rank in node.ranks:
        node.jobs.agent_gone(rank.peer)
    detach(node, 2)
    assert not told(node)
    node.hello()
    node.tick()
    assert len(told(node)) == 1


def test_the_last_step_is_fully_known_after_the_job(tmp_path: Path) -> None:
    """The mirror shows a part of every gradient, so each step loses elements, the last one too."""
    config = LabConfig(
        command=(CASES, str(tmp_path), *RUNS), ranks=3, mirrors=mirrors("1:in"), daemon_args=("--scrub", "0")
    )  # fmt: skip
    with Lab(config) as lab:
        lab.train()
        assert lab.wait(120) == 0
        endpoint = str(lab.endpoint)
        jobs = {job["run"]: job for job in status(endpoint, 20)["jobs"]}
        held = {run: fetch(endpoint, run, timeout=30) for run in RUNS}
        lab.finish()
    truth = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    for run in RUNS:
        assert 0 < jobs[run]["coverage"] < 1, jobs[run]  # of the last step
        assert jobs[run]["known_step"] == STEPS and jobs[run]["unknown"]["elements"] == 0, jobs[run]
        (digest,) = [note["digest"] for note in truth if (note["run"], note["step"]) == (run, STEPS)]
        assert (held[run].step, state_digest(held[run].tensors)) == (STEPS, digest)
