"""A daemon joins a job that trains already: how long until it holds everything, and what that costs the trainers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lives_lab import Lives, job, row, spread

RUN = "joined"
NODES = (0, 1)
PERCENT = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("step", "within"), [(5, False), (50, False), (20, True)], ids=["at 5", "at 50", "within 20"])
def test_a_late_join_stays_in_its_budget(step: int, within: bool, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    environment = {"WIDTH": "20000", "FLOWCHECK_ATTACH_TIMEOUT": "0.3"}
    with Lives(tmp_path, ranks=2, env=environment, daemon_args=("--scrub", "0")) as lives:
        lives.lab.kill_daemon()
        lives.begin(job(RUN, NODES, 1_000_000, pause=0.05, gate=(step, within, go_on)))
        lives.until(lambda: len(lives.steps(0)) == step - 1)
        lives.lab.start_daemon()
        time.sleep(1.5)  # the agents find it
        go_on.touch()
        begun = time.monotonic()
        held = lives.until(lambda: (found := lives.status(RUN)) is not None and found["known_step"] and found)
        ended = time.monotonic()
        joined = min(line["step"] for line in lives.journal)
        time.sleep(0.5)
        lives.kill(dict.fromkeys(NODES, 0.0))
        lives.ended()
        lives.settled(RUN)
        restored, digest = lives.restore(RUN)
        notes = [lives.steps(node) for node in NODES]
    assert all(digest == each[restored]["digest"] for each in notes if restored in each)
    assert any(restored in each for each in notes)
    share = []
    for each in notes:
        window = [note for note in each.values() if begun < note["at"] < ended]
        share.append(100 * sum(note["copying"] for note in window) / (ended - begun))
    state = 12 * sum(n for n in (16 * 20_000, 20_000, 24 * 20_000, 24))
    row(
        f"late join {'in the middle of' if within else 'before'} step {step}", first_step_followed=joined,
        whole_after=f"{ended - begun:.1f} s", at_step=held["known_step"], state=f"{state / 1e6:.1f} MB",
        asked=f"{held['repair']['bytes'] / 1e6:.1f} MB", copying=" and ".join(f"{part:.2f} %" for part in share),
        step_time=spread([note["took"] for note in notes[0].values()]),
    )  # fmt: skip
    assert max(share) < 2 * PERCENT  # one part may take more than its step's share, and is paid back later
