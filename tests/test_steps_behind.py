"""Markers that overtake a capture that lags: a step is claimed from its own reduction, whenever that is shown.

Each marker comes in the middle of what it speaks of. What was shown of the step's last reduction by then may be some
messages, the announcement of one, or too little to tell what it is; it must not be left out of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from nccl_job import NcclJob
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Buckets, Follower, SyntheticJob

from flowcheck.lab.addresses import Port
from reconstruct.markers import Canary, Marker
from reconstruct.steps import StepTracker

Make = Callable[..., SyntheticJob]


def nccl(algorithm: str, protocol: str, world: int = 2, **more: Any) -> Make:
    told = {"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol}
    made = {"algorithm": algorithm, "protocol": protocol, "version": "2.18.6", **more}
    mirrored = [(Port(1, 0), "in"), (Port(1, 0), "out")]
    return lambda **options: NcclJob(world, nccl=made, told=told, mirrored=mirrored, **options)


LIBRARIES: dict[str, Make] = {
    "gloo": SyntheticJob,
    "gloo, 4 ranks": lambda **options: SyntheticJob(4, **options),
    "ring ll": nccl("ring", "ll"),
    "ring simple, 2 channels": nccl("ring", "simple", channels=2),
    "ring ll128, 4 ranks": nccl("ring", "ll128", 4),
    "tree simple": nccl("tree", "simple"),
}


def reporting(buckets: Buckets) -> Callable[[StepTracker], None]:
    """Rank 0's report of the rebuilt layout."""
    sizes = [4 * sum(SIZES[i] for i in bucket) for bucket in buckets]
    return lambda tracker: tracker.reported_layout(buckets, sizes)


def interrupted(job: SyntheticJob, first: int) -> Iterator[int]:
    """The job's only marker comes before each of its frames from `first` on, in turn; when, ns."""
    ((_, marker),) = job.words
    for frame in job.wire.frames[first:]:
        job.words = [(frame.ts, marker)]
        yield frame.ts


@pytest.mark.parametrize(
    ("library", "rebuilt"),
    [
        ("gloo", REBUILT),
        ("gloo, 4 ranks", PERMUTED),
        ("ring ll", REBUILT),
        ("ring simple, 2 channels", PERMUTED),
        ("ring ll128, 4 ranks", PERMUTED),
        ("tree simple", REBUILT),
    ],
)
def test_the_last_of_several_reductions_is_taken_however_little_of_it_was_seen(library: str, rebuilt: Buckets) -> None:
    job = LIBRARIES[library](rebuilt=rebuilt)
    job.attach()
    job.reduction()
    first = len(job.wire.frames)
    job.rebuild()
    job.reduction()
    job.optimizer_step()
    for _ in interrupted(job, first):
        Follower(job).run(per_block=1, quiet=SECOND).check(1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_canaries_the_first_of_two_reductions_is_never_taken_for_the_step(library: str) -> None:
    """The other one is not shown whole yet: nothing else would contradict the first."""
    job = LIBRARIES[library](rebuilt=PERMUTED, rebuilt_at_attach=True)
    job.attach()
    job.reduction()
    first = len(job.wire.frames)
    job.reduction()
    job.optimizer_step(canaries=0)
    for _ in interrupted(job, first):
        follower = Follower(job).run(per_block=1, quiet=20 * SECOND)
        follower.verify()
        assert follower.story == "x" and "nothing tells" in follower.why[1]


@pytest.mark.parametrize("canaries", [3, 0])
@pytest.mark.parametrize("library", ["gloo", "ring simple, 2 channels"])
def test_a_layout_that_is_reported_before_it_is_seen_on_the_wire(library: str, canaries: int) -> None:
    """What follows is kept without a size until the step is claimed."""
    job = LIBRARIES[library](rebuilt=PERMUTED)
    job.attach()
    job.reduction()
    first = len(job.wire.frames)
    job.rebuild()
    job.reduction()
    job.optimizer_step(canaries=canaries)

    claimed = set()
    for at in interrupted(job, first):
        job.words.insert(0, (min(at, job.wire.frames[first].ts), reporting(PERMUTED)))
        follower = Follower(job).run(per_block=1, quiet=20 * SECOND)
        follower.verify()
        claimed.add(follower.story)
    assert claimed == {"." if canaries else "x"}


@pytest.mark.parametrize("elements", [7, sum(SIZES) - 1])
def test_an_all_reduce_of_another_size_is_no_rival_while_the_layout_is_only_reported(elements: int) -> None:
    job = SyntheticJob(rebuilt=REBUILT)
    job.attach()
    job.reduction()
    job.say(reporting(REBUILT))
    job.rebuild()
    job.allreduce(np.ones(elements))
    job.reduction()
    job.optimizer_step(canaries=0)
    Follower(job).run(per_block=1).check(1)


def test_sizes_that_look_alike_are_not_told_apart_before_the_last_bucket_is_known() -> None:
    """LL128 fills a group with each of three all-reduces: without the last one, their order would tell wrong sizes."""
    job = nccl("ring", "ll128")(rebuilt=REBUILT, rebuilt_at_attach=True)
    job.attach()
    first = len(job.wire.frames)
    job.allreduce(np.ones(7))
    job.reduction()
    job.optimizer_step()
    for _ in interrupted(job, first):
        follower = Follower(job).run(per_block=1, quiet=20 * SECOND)
        follower.verify()
        assert follower.story == "x" and "no 2 all-reduces with the sizes" in follower.why[1]


def both_begin_with(value: float) -> tuple[SyntheticJob, int]:
    """Two different reductions with the same first element, the step's only canary; frames before the second."""
    job = SyntheticJob(rebuilt=PERMUTED, rebuilt_at_attach=True)
    job.attach()
    values = np.random.default_rng(5).standard_normal((2, sum(SIZES))).astype(np.float32)
    values[:, 0] = value
    job.allreduce(values[0])
    first = len(job.wire.frames)
    job.allreduce(values[1])
    canary = Canary(PERMUTED[0][0], 0, np.float32(value).tobytes(), None)
    marker = Marker(1, job.sequence, 0, None, (canary,), None, True)
    job.say(lambda tracker: tracker.marker(marker, job.now))
    return job, first


def test_a_canary_that_agrees_with_an_earlier_reduction_too_does_not_hurry_the_choice() -> None:
    job, first = both_begin_with(1.0)
    for _ in interrupted(job, first):
        follower = Follower(job).run(per_block=1, quiet=SECOND)
        follower.verify()
        assert follower.story == "x" and "nothing tells" in follower.why[1]


def test_a_canary_of_zero_does_not_speak_for_the_reductions_that_were_shown() -> None:
    """The mirror ends before or in the step's own reduction."""
    job, first = both_begin_with(0.0)
    for shown in range(first, len(job.wire.frames) + 1):
        follower = Follower(job).run(job.wire.frames[:shown], per_block=1, quiet=20 * SECOND)
        follower.verify()
        assert follower.story == "x"
