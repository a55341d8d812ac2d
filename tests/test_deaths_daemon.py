"""The daemon is killed, stopped and started while a job trains: the job never notices, and the daemon heals."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from lives_lab import Lives, job, row, spread

RUN = "served"
NODES = (0, 1)
PAUSE = 0.05
WAITED = 2.0
"""A step that takes so long (s) has waited for somebody: a daemon needs longer than that to come up again."""
CALM = 100
"""Steps before the first death."""


def known(lives: Lives, behind: int = 3) -> bool:
    """Whether the newest steps are held, whole."""
    held = lives.status(RUN)
    return held is not None and held["known_step"] is not None and held["known_step"] >= held["job_step"] - behind


def compare(lives: Lives) -> tuple[int, list[float]]:
    """End the training; it is the same as one without a daemon, and so is what the daemon holds. Its last step, and
    how long each took."""
    lives.kill(dict.fromkeys(NODES, 0.0))
    lives.ended()
    steps = [lives.steps(node) for node in NODES]
    last = min(max(each) for each in steps)
    lives.settled(RUN)
    restored, digest = lives.restore(RUN)
    took = [note["took"] for note in steps[0].values()]
    lives.begin(job(None, NODES, max(last, restored)))
    assert set(lives.ended(patience=900).values()) == {0}
    alone = lives.steps(0)
    for each in steps:
        assert list(each) == list(range(1, max(each) + 1)), "a step is missing"
        for step in range(1, last + 1):
            assert (each[step]["digest"], each[step]["loss"]) == (
                (alone[step]["digest"], each[step]["loss"] if each is steps[1] else alone[step]["loss"])
            ), f"step {step} is another one than without a daemon"  # fmt: skip
    assert digest == alone[restored]["digest"]
    for line in lives.journal:
        assert line["digest"] is None or line["digest"] == alone[line["step"]]["digest"], line
    return restored - last, took


def kill(folder: Path, deaths: int, seed: int) -> None:
    chance = random.Random(seed)
    start = time.monotonic()
    whole, down = 0, 0.0
    with Lives(folder, ranks=2, trainer_cpus=(0,), daemon_cpus=(1,), daemon_args=("--every-steps", "50")) as lives:
        lives.begin(job(RUN, NODES, 1_000_000, pause=PAUSE))
        lives.until(lambda: len(lives.steps(0)) >= CALM)
        for _ in range(deaths):
            time.sleep(chance.uniform(0, 4))
            whole += known(lives)
            gone = time.monotonic()
            lives.lab.kill_daemon()
            time.sleep(chance.uniform(0, 0.5))
            lives.lab.start_daemon()
            down += time.monotonic() - gone
        since = time.monotonic()
        lives.until(lambda: known(lives))
        healed = time.monotonic() - since
        time.sleep(0.5)
        held = lives.status(RUN)
        assert held is not None
        behind = held["job_step"] - held["known_step"]
        after, took = compare(lives)
        epochs = len({line["epoch"] for line in lives.journal})
    calm, rough = took[10:CALM], took[CALM:]
    row(
        f"{deaths} kills of the daemon, seed {seed}", steps=len(took), whole_when_killed=whole, epochs=epochs,
        down=f"{down:.0f} s", step_before=spread(calm), step_since=spread(rough), healed_s=round(healed, 1),
        behind=behind, restored_minus_last=after, seconds=round(time.monotonic() - start),
    )  # fmt: skip
    assert max(rough) < WAITED
    assert whole > deaths // 4 and epochs > deaths // 4


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_hundred_deaths_of_the_daemon_are_not_noticed(tmp_path: Path) -> None:
    kill(tmp_path, 100, 5)


@pytest.mark.slow
def test_a_daemon_that_is_stopped_for_seconds_is_not_noticed_and_heals(tmp_path: Path) -> None:
    """Of what came meanwhile the ring holds a part, the trainers tell the rest."""
    with Lives(tmp_path, ranks=2, daemon_args=("--ring-mib", "4")) as lives:
        lives.begin(job(RUN, NODES, 1_000_000))
        lives.until(lambda: len(lives.steps(0)) >= CALM)
        before = len(lives.steps(0))
        lives.lab.signal_daemon(signal.SIGSTOP)
        time.sleep(3)
        missed = len(lives.steps(0)) - before
        lives.lab.signal_daemon(signal.SIGCONT)
        woken = time.monotonic()
        lives.until(lambda: (held := lives.status(RUN)) is not None and held["job_step"] > before + missed)
        lives.until(lambda: known(lives, 50))
        healed = time.monotonic() - woken
        held = lives.status(RUN)
        assert held is not None
        after, took = compare(lives)
    row(
        "the daemon stopped for 3 s", steps_meanwhile=missed, healed_s=round(healed, 1), holes=held["holes"],
        repaired=held["repair"]["repaired"], epochs=held["epoch"], step=spread(took), restored_minus_last=after,
    )  # fmt: skip
    assert missed > 10 and max(took) < WAITED and held["epoch"] == 1
