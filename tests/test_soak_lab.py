"""Seeded runs of real jobs in the lab whose mirrors meet faults: what is claimed to be known is the trainers' at every
step, and the last step is fully known by the time the trainers have gone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end import CASES, Outcome, mirrors
from test_redundancy_lab import NETWORKS

from flowcheck.client import fetch, status
from flowcheck.lab import Lab, LabConfig
from reconstruct.digest import state_digest

pytestmark = pytest.mark.slow

STEPS = 40
PAUSE = 0.1
FAULTS = (
    "drop=0.0005", "drop=0.01", "burst=0.0005:20", "duplicate=0.1", "reorder=0.05:8", "truncate=0.005:120",
    "delay=0.02:5", "drop=0.003,reorder=0.02:4,duplicate=0.05,delay=0.01:3",
)  # fmt: skip


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    rows: list[tuple[Any, ...]] = []
    yield rows
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        form = "{:8} {:50} {:>7} {:>6} {:>8} {:>12} {:>11}"
        head = "network", "fault", "mirrors", "hit", "unknown", "steps lossy", "asked bytes"
        reporter.write_line("\n" + "\n".join(form.format(*row) for row in (head, *rows)))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_job_whose_mirror_meets_faults(
    network: str, fault: str, tmp_path: Path, allowed: None, table: list[tuple[Any, ...]]
) -> None:
    rng = random.Random(f"{network} {fault}")
    ports = rng.choice([("1:both",), ("0:both", "1:both")])
    config = LabConfig(
        command=(CASES, str(tmp_path), "gpt"),
        mirrors=mirrors(*ports),
        journal=str(tmp_path / "journal.jsonl"),
        faults=(f"{fault},seed={rng.randrange(1000)}",),
        env={"STEPS": str(STEPS), "STEP_PAUSE": str(PAUSE)},
        **NETWORKS[network],
    )
    with Lab(config) as lab:
        lab.train()
        assert lab.wait(240) == 0
        deadline = time.monotonic() + 30
        while True:
            answer = status(str(lab.endpoint), 20)
            (job,) = answer["jobs"]
            if job["step"] == STEPS or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        last = fetch(str(lab.endpoint), "gpt", timeout=30)
        lab.finish()
    outcome = Outcome(tmp_path, STEPS)
    outcome.check_claimed()
    assert outcome.steps("gpt") == list(range(1, STEPS + 1))
    (digest,) = set(outcome.truth["gpt", STEPS].values())
    hit = sum(frames for kind in answer["sources"][0]["faults"]["hit"].values() for frames in kind[:1])
    lossy = [line for line in outcome.journal if line["unknown"]]
    worst = max((line["unknown"] for line in outcome.journal), default=0)
    table.append((network, fault, len(ports), hit, worst, len(lossy), job["repair"]["bytes"]))
    assert (job["step"], job["known_step"], job["unknown"]["elements"]) == (STEPS, STEPS, 0), job
    assert (last.step, state_digest(last.tensors)) == (STEPS, digest)
