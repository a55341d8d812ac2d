"""Trainers are killed at random moments and started again from what the daemon gives: what a death costs."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from lives_lab import Lives, job, row

RUN = "mortal"
NODES = (0, 1)


def die(lives: Lives, chance: random.Random, resume: Path | None, port: int, step_s: float) -> tuple[str, str]:
    """One life of RUN, killed at a random moment; what was killed and the phase in which it was."""
    lives.begin(job(RUN, NODES, 10_000, resume=resume, port=port))
    alone = chance.random() < 0.4
    victim = chance.choice(NODES)
    if chance.random() < 0.15:  # about the attach
        lives.until(lambda: lives.phase(victim) != "start")
        at = time.monotonic() + chance.uniform(0, 0.08)
    else:
        steps = chance.randrange(1, 12)
        lives.until(lambda: len(lives.steps(victim)) >= steps)
        at = time.monotonic() + 0.01 + chance.uniform(0, 2 * step_s)
    survivors = at + 1.0 if alone else at  # it may wait for the dead one in the store, where nobody tells it
    lives.kill({node: at if node == victim else survivors for node in NODES})
    lives.ended()
    return "one" if alone else "all", lives.phase(victim)


def kill(folder: Path, deaths: int, seed: int) -> None:
    """Kill `deaths` times, resume each time, and compare everything with a job that was never killed."""
    chance = random.Random(seed)
    lost, unreported, ahead, killed, about, epochs = Counter(), Counter(), 0, Counter(), Counter(), set()
    start = time.monotonic()
    with Lives(folder, ranks=2, daemon_args=("--every-steps", "50"), env={"PORT_RANGE": "41000 41063"}) as lives:
        lives.begin(job(None, NODES, 30 * deaths + 100))
        assert set(lives.ended(patience=600).values()) == {0}
        truth = {step: note["digest"] for step, note in lives.steps(0).items()}
        took = sorted(note["took"] for note in lives.steps(0).values())
        resume, at = None, 0
        for number in range(deaths):
            how, phase = die(lives, chance, resume, 29600 + number % 2, took[len(took) // 2])
            killed[how] += 1
            about[phase] += 1
            attached = [note["attach"] for note in lives.notes(0) if "attach" in note]
            assert all(attach["covered"] for attach in attached), attached
            if not attached and resume is None:
                continue
            held = lives.settled(RUN)
            epochs.add(held["epoch"])
            finished = max([at, *(step for node in NODES for step in lives.steps(node))])
            for node in NODES:
                for step, note in lives.steps(node).items():
                    assert note["digest"] == truth[step], f"life {number}: step {step} is another one than ever"
            resume = folder / "resume.pt"
            restored, digest = lives.restore(RUN, resume)
            assert restored == 0 or digest == truth[restored], f"death {number}: step {restored} is wrong"
            assert restored >= at, f"death {number}: step {at} was restored before, now {restored}"
            # A step whose all-reduce passed the wire may be held although no trainer lived to note it.
            lost[max(0, finished - restored)] += 1
            unreported[max(0, finished - max(at, held["job_step"]))] += 1
            ahead += restored > finished
            at = restored
        lines = [line for line in lives.journal if line["run"] == RUN]
    assert all(line["digest"] == truth[line["step"]] for line in lines if line["digest"] is not None)
    seen: dict[int, list[int]] = {}
    for line in lines:
        seen.setdefault(line["epoch"], []).append(line["step"])
    for epoch, steps in seen.items():
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"epoch {epoch} has steps {steps}"
    row(
        f"{deaths} kills of real trainers, seed {seed}", killed=dict(killed), about=dict(about),
        steps_lost=dict(sorted(lost.items())), marker_died_too=dict(sorted(unreported.items())),
        held_before_noted=ahead, epochs=len(epochs), reached=at,
        seconds=round(time.monotonic() - start),
    )  # fmt: skip
    assert about["all-reduce"], "no kill was in an all-reduce"
    # On a busy machine markers die with their trainer, of as many steps as a tenth of a second has.
    assert sum(count for steps, count in lost.items() if steps > 1) <= deaths // 50, lost


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_deaths_cost_no_finished_step(tmp_path: Path) -> None:
    kill(tmp_path, 200, 7)
