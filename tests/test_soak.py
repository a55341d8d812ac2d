"""Seeded runs of a job that trains while its mirror loses frames and its ranks repair what is lost."""

from __future__ import annotations

import pytest
from nccl_job import NcclJob
from soak import Soak, Training, ports
from synthetic_job import SyntheticJob
from test_nccl_steps import pinned

from mirror.faults import Faults

WORLD = 3
SIZES = (900, 700, 1500)


def job_over(library: str, seed: int) -> SyntheticJob:
    if library == "gloo":
        links = [(a, b) for a in range(WORLD) for b in range(WORLD) if a != b]
        return SyntheticJob(WORLD, mirror=links, seed=seed, sizes=SIZES)
    return NcclJob(seed=seed, sizes=SIZES, **pinned("ring", library, "4, 2 channels"))


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("library", ["gloo", "simple"])
def test_what_is_called_known_is_the_trainers(library: str, rate: float) -> None:
    """Checked after every change of the state (`Soak.check`). No loss ends the following."""
    for seed in range(2):
        training = Training(job_over(library, seed), ("AdamW", "SGD")[seed])
        for _ in range(12):
            training.step()
        faults = Faults(drop=rate, seed=seed)
        outcome = Soak(training, [ports(training.job, (1, "both"))], [faults], seed=seed, clean=4).run()
        assert outcome.frozen is None and len(outcome.behind) == 12
        assert bool(outcome.hit) == bool(rate) and (rate or not outcome.worst)
        assert rate or (outcome.missing == 0 and set(outcome.behind) == {0})


def test_half_a_lost_broadcast_is_not_taken_for_another_root() -> None:
    """Of the two packets of DDP's first broadcast one link lacks the first: that link did not carry nothing, and what
    lies beyond the gap shows it. Taken for a broadcast of rank 1, all that follows would not fit, for ever."""
    job = NcclJob(seed=1, sizes=(9000, 7000, 15000), **pinned("ring", "ll128", "4, 2 channels"))
    training = Training(job, "Adam")
    for _ in range(4):
        training.step(300)
    outcome = Soak(training, [ports(job, (1, "both"))], [Faults(drop=0.03, seed=1)], seed=1).run()
    assert (outcome.blank, outcome.missing, outcome.frozen) == (0, 0, None)
