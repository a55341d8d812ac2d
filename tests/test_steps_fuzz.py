"""Seeded random losses on made-up jobs: what is called known is the trainer's own, and every hole is told.

`Follower.verify` compares every element that is not said to be lost: one that was lost and is not said to be would be
whatever the memory held before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from nccl_job import NcclJob
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Follower, SyntheticJob

from flowcheck.lab.addresses import Port


def train(job: SyntheticJob, rng: random.Random, steps: int, canaries: int, others: bool) -> tuple[int, int]:
    """Steps as scripts make them; a clean beginning and end. Returns the frames between which some may be lost."""
    job.attach()
    for _ in range(2):
        job.usual_step(canaries=canaries)
    before = len(job.wire.frames)
    for _ in range(steps):
        for _ in range(rng.choice([0, 0, 1, 2]) if others else 0):
            count = rng.choice([1, 7, SIZES[0], sum(SIZES), SIZES[1] + SIZES[2]])
            job.allreduce(np.random.default_rng(rng.randrange(99)).standard_normal(count))
        if others and rng.random() < 0.2:
            job.reduction()  # of another micro-batch
        job.usual_step(canaries=canaries, delay=rng.choice([1_000_000, 1_000_000, 12_000_000]))
        if rng.random() < 0.1:
            job.wait(SECOND)
    after = len(job.wire.frames)
    for _ in range(12):
        job.usual_step(canaries=3)
    return before, after


def thinned(frames: Sequence[Any], rng: random.Random, between: tuple[int, int], bursts: Sequence[int]) -> list[Any]:
    """Without some of the frames between two: single ones, or bursts."""
    rate, burst = rng.choice([0.001, 0.01, 0.05, 0.2]), rng.choice(bursts)
    kept, gone = list(frames[: between[0]]), 0
    for frame in frames[between[0] : between[1]]:
        if rng.random() < rate / burst:
            gone = burst
        if gone:
            gone -= 1
        else:
            kept.append(frame)
    return kept + list(frames[between[1] :])


def gloo_case(seed: int) -> tuple[Follower, int]:
    """A job over gloo with losses, followed; the number of its steps."""
    rng = random.Random(seed)
    world = rng.choice([2, 2, 3, 4])
    mirror = rng.choice([None, None, None, [(1, 0)], [(1, 0), (2, 1)]]) if world > 2 else None
    job = SyntheticJob(world, seed=seed, mss=rng.choice([60, 200, 1448]), mirror=mirror,
                       rebuilt=rng.choice([REBUILT, PERMUTED]), rebuilt_at_attach=mirror is not None)  # fmt: skip
    job.dropped = set(rng.sample(range(3, 9), rng.choice([0, 0, 1, 2])))
    between = train(job, rng, 8, rng.choice([0, 1, 3, 3]), rng.random() < 0.5)
    frames = thinned(job.wire.frames, rng, between, [1, 1, 3, 40])
    return Follower(job).run(frames, per_block=rng.choice([1, 8, 32]), quiet=rng.choice([1, 15]) * SECOND), job.step


def nccl_case(seed: int) -> tuple[Follower, int]:
    """The same over NCCL."""
    rng = random.Random(seed)
    algorithm, protocol, world, channels = rng.choice(
        [("ring", "simple", 2, 1), ("ring", "ll", 2, 2), ("ring", "ll128", 3, 2), ("tree", "simple", 2, 2)]
    )
    job = NcclJob(
        world, nccl={"algorithm": algorithm, "protocol": protocol, "channels": channels, "version": "2.21.5"},
        told={"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol}, seed=seed,
        mirrored=rng.choice([None, [(Port(1, 0), "in"), (Port(1, 0), "out")]]),
        rebuilt=rng.choice([REBUILT, PERMUTED]), rebuilt_at_attach=rng.random() < 0.5,
    )  # fmt: skip
    job.dropped = set(rng.sample(range(3, 7), rng.choice([0, 0, 1])))
    between = train(job, rng, 5, rng.choice([0, 3, 3]), False)
    frames = thinned(job.wire.frames, rng, between, [1])  # a bucket is a few frames
    return Follower(job).run(frames, per_block=rng.choice([8, 32]), quiet=15 * SECOND), job.step


def test_losses_over_gloo() -> None:
    signs = ""
    for seed in range(60):
        follower, steps = gloo_case(seed)
        follower.verify()
        assert follower.lost is None and len(follower.story) == steps, (seed, follower.story, follower.why)
        sign = "-" if follower.job.wire.mirrored in ([(1, 0)], [(1, 0), (2, 1)]) else "."
        assert set(follower.story[-3:]) <= {".", sign}, (seed, follower.story, follower.why)
        signs += follower.story
    assert min(signs.count(sign) for sign in ".-x") > 30, {sign: signs.count(sign) for sign in ".-x"}


def test_losses_over_nccl() -> None:
    signs = ""
    for seed in range(24):
        follower, steps = nccl_case(seed)
        follower.verify()
        assert follower.lost is None and len(follower.story) == steps, (seed, follower.story, follower.why)
        signs += follower.story
    assert min(signs.count(sign) for sign in ".-x") > 3, {sign: signs.count(sign) for sign in ".-x"}
