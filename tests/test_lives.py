"""Jobs that begin, end and begin again on nodes behind mirrored ports and elsewhere: one lab for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from lives_lab import Lives, job, row

from flowcheck.client import status
from flowcheck.lab import Mirror
from flowcheck.report import status_text
from flowcheck.store import Store

SEEN = (0, 1)
ELSEWHERE = (0, 2)
STEPS = 6


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Four nodes, of which the ports of 1 and 3 are mirrored; every frame comes 100 ms late."""
    folder = tmp_path_factory.mktemp("lives")
    mirrors = (Mirror(1, "both"), Mirror(3, "both"))
    with Lives(folder, ranks=4, mirrors=mirrors, faults=("delay=1:100,seed=1",)) as lab:
        yield lab


def test_a_job_behind_no_mirrored_port_is_told_so_before_its_first_step(lives: Lives) -> None:
    lives.begin(job("elsewhere", ELSEWHERE, STEPS, pause=0.3))
    assert set(lives.ended().values()) == {0}
    (said,) = lives.notes(0)[0]["said"]
    for part in ("no rank of this job sits behind a mirrored port", "10.77.0.1, 10.77.0.3", "mon0",
                 "flowcheck doctor -i mon0"):  # fmt: skip
        assert part in said
    assert lives.notes(2)[0]["said"] == []  # rank 0 alone
    held = lives.status("elsewhere")
    assert held is not None and held["unseen"] == said.removeprefix("flowcheck: ")
    assert held["unseen"] in status_text(status(lives.endpoint, 20))


def test_a_job_behind_a_mirrored_port_is_told_nothing(lives: Lives) -> None:
    """Also after one at other ports, and where frames lag."""
    lives.begin(job("seen", SEEN, STEPS, pause=0.3))
    assert set(lives.ended().values()) == {0}
    assert [note["said"] for node in SEEN for note in lives.notes(node) if "said" in note] == [[], []]
    held = lives.settled("seen")
    assert (held["unseen"], held["step"], held["known_step"]) == (None, STEPS, STEPS)
    assert lives.restore("seen") == (STEPS, lives.steps(0)[STEPS]["digest"])


def test_two_jobs_on_one_checkpoint_node_are_two_runs_and_two_stores(lives: Lives) -> None:
    lives.begin(job("left", (0, 1), STEPS), job("right", (3, 2), STEPS + 2, port=29601))
    assert set(lives.ended().values()) == {0}
    for run, node, last in (("left", 0, STEPS), ("right", 3, STEPS + 2)):
        held = lives.settled(run)
        truth = {step: note["digest"] for step, note in lives.steps(node).items()}
        assert (held["epoch"], held["step"], held["unseen"]) == (1, last, None)
        assert lives.restore(run) == (last, truth[last])
        lines = [line for line in lives.journal if line["run"] == run]
        assert {line["step"]: line["digest"] for line in lines} == truth
        assert Store(lives.folder / "store").epochs(run) == [1]


def live_and_die(lives: Lives, run: str, nodes: Sequence[int], resume: Path | None, out: Path, chance: Random) -> int:
    """One life of a run, killed at a random moment, all at once or one rank before the others; what is held then is the
    last whole step of a new epoch, which began where it was resumed. The step that is restored into `out`."""
    before = 0 if resume is None else torch.load(resume)["step"]
    lives.begin(job(run, nodes, 10_000, resume=resume))
    lives.until(lambda: len(lives.steps(nodes[0])) >= 3)
    at, first = time.monotonic() + chance.uniform(0.01, 0.05), chance.choice([None, *nodes])
    lives.kill({node: at + (0.3 if first not in (None, node) else 0.0) for node in nodes})
    lives.ended()
    held = lives.settled(run)
    step, digest = lives.restore(run, out)
    truth = {step: note["digest"] for node in nodes for step, note in lives.steps(node).items()}
    assert (held["world_size"], held["unseen"]) == (len(nodes), None)
    assert max(truth) - 1 <= step <= max(truth) + 1 and truth.get(step, digest) == digest
    lines = [line for line in lives.journal if (line["run"], line["epoch"]) == (run, held["epoch"])]
    assert [line["step"] for line in lines] == list(range(before + 1, held["step"] + 1))
    assert all(line["digest"] in (None, truth.get(line["step"], line["digest"])) for line in lines)
    return step


def test_a_restart_on_other_nodes_and_in_another_size_is_a_new_epoch(lives: Lives, tmp_path: Path) -> None:
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    begun = live_and_die(lives, "restarted", (0, 1), None, first, Random(1))
    assert live_and_die(lives, "restarted", (3, 1, 2), first, second, Random(2)) > begun
    held = lives.status("restarted")
    assert held is not None and held["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [SEEN, ELSEWHERE], ids=["seen", "elsewhere"])
def test_a_daemon_that_has_just_started_waits_for_a_step(lives: Lives, nodes: Sequence[int], tmp_path: Path) -> None:
    """It has not seen what the ranks sent each other before, whoever's port is mirrored."""
    attach, run = tmp_path / "attach", f"young-{nodes[1]}"
    lives.begin(job(run, nodes, STEPS, pause=0.5, hold=attach))
    lives.until(lambda: all(lives.phase(node) == "attach" for node in nodes))
    lives.lab.kill_daemon()
    lives.lab.start_daemon()
    attach.touch()
    assert set(lives.ended().values()) == {0}
    assert [note["said"] for node in nodes for note in lives.notes(node) if "said" in note] == [[], []]
    held = lives.settled(run)
    assert (held["unseen"] is None) == (nodes == SEEN)


@pytest.mark.slow
def test_ten_restarts_in_other_sizes_and_orders_are_epochs_of_one_run(tmp_path: Path) -> None:
    """Each resumes from what was held of the one before. Every node has 64 ports, so that listeners and connections
    come at the same ones again and again, with fewer ranks and with more."""
    plans = (
        (0, 1), (3, 1, 2), (2, 3), (0, 1, 2, 3), (1, 0), (3, 2, 1, 0), (1, 2), (2, 3, 0), (0, 3), (1, 3, 0, 2), (3, 1),
    )  # fmt: skip
    mirrors = (Mirror(1, "both"), Mirror(3, "both"))
    start = time.monotonic()
    with Lives(tmp_path, ranks=4, mirrors=mirrors, env={"PORT_RANGE": "41000 41063"}) as lives:
        resume, reached, chance = None, [], Random(11)
        for number, nodes in enumerate(plans):
            out = tmp_path / f"resume-{number}.pt"
            reached.append(live_and_die(lives, "moving", nodes, resume, out, chance))
            resume = out
        epochs = {line["epoch"] for line in lives.journal}
    assert epochs == set(range(1, len(plans) + 1)) and reached == sorted(reached)
    row(
        "10 restarts", ranks=[len(nodes) for nodes in plans], held_after_each=reached, epochs=len(epochs),
        seconds=round(time.monotonic() - start),
    )  # fmt: skip
