"""A made-up job over NCCL's TCP sockets through the whole pipeline: the trainers' own gradients, as far as known."""

from __future__ import annotations

import random

import pytest
from nccl_job import trained
from synthetic_job import Follower
from test_nccl_steps import pinned

from flowcheck.lab.addresses import Port


@pytest.mark.parametrize("sockets", [0, 3])
@pytest.mark.parametrize("shape", ["2", "4, 2 channels"])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_every_step_over_rings_has_the_trainers_gradients(protocol: str, shape: str, sockets: int) -> None:
    follower = Follower(trained(4, **pinned("ring", protocol, shape, sockets=sockets))).run()
    follower.check(4)
    assert follower.lost is None and follower.tracker.coverage == 1.0
    assert all(step.confirmed for step in follower.steps.values())
    counters = follower.pipeline.counters()
    assert counters["nccl_collectives"] == 9 and counters["roce_packets"] == 0


@pytest.mark.parametrize("version", ["2.18.6", "2.26.2", "2.27.7", "2.30.7"])
def test_trees_and_releases(version: str) -> None:
    follower = Follower(trained(3, **pinned("tree", "simple", version=version, sockets=0))).run()
    follower.check(3)


@pytest.mark.parametrize("sockets", [0, 2])
@pytest.mark.parametrize("protocol", ["ll", "simple"])
@pytest.mark.parametrize("seed", range(3))
def test_lost_frames_never_give_a_wrong_gradient(protocol: str, seed: int, sockets: int) -> None:
    both = [(Port(1, 0), "in"), (Port(1, 0), "out")]
    job = trained(5, **pinned("ring", protocol, mirrored=both, sockets=sockets))
    rng = random.Random(seed)
    kept = [frame for frame in job.wire.frames if rng.random() > 0.05]
    assert len(kept) < len(job.wire.frames)
    follower = Follower(job).run(kept)
    follower.verify()
    assert len(follower.story) == 5
