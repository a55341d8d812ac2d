"""What the mirror lost or damaged is never claimed; gradients handed out stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
from gloo_traffic import Frame
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Follower, SyntheticJob, trained

from reconstruct.steps import StepLost


def test_a_bucket_that_the_mirror_lost_is_named() -> None:
    job = trained(3)
    job.reduction(lost=[1])
    job.optimizer_step()
    for _ in range(3):
        job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.check(3)
    assert follower.lost is not None and not follower.lost.claimed


@pytest.mark.parametrize("canaries", [0, 1, 3])
def test_a_stranger_in_the_place_of_a_lost_bucket_is_not_taken_for_it(canaries: int) -> None:
    """Bucket 0 is swallowed whole by a gap, an all-reduce of its size stands right before it."""
    job = trained(3)
    job.allreduce(np.ones(sum(SIZES[i] for i in REBUILT[0])))
    job.reduction(lost=[0])
    job.optimizer_step(canaries=canaries)
    job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.check(3)
    assert follower.lost is not None


def test_unmarked_steps_around_a_lost_reduction_are_not_shifted() -> None:
    """With one bucket per step nothing but the tags tells that a whole step is missing."""
    job = SyntheticJob(rebuilt=PERMUTED)
    job.attach()
    job.usual_step()
    job.usual_step()
    job.dropped = set(range(3, 20))
    job.unlink()
    job.reduction(lost=[0])
    job.optimizer_step()
    for _ in range(4):
        job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.check(2)
    assert follower.lost is not None


def test_an_unmarked_step_with_missing_bytes_is_lost_although_training_goes_on() -> None:
    job = SyntheticJob()
    job.attach()
    job.usual_step()
    job.usual_step()
    job.dropped = set(range(3, 200))
    job.unlink()
    before = len(job.wire.frames)
    job.usual_step()
    middle = (before + len(job.wire.frames)) // 2
    victims = [i for i in range(before, middle) if len(job.wire.frames[i].payload) > 48]
    for _ in range(60):
        job.usual_step()
        job.wait(SECOND // 5)
    frames = [f for i, f in enumerate(job.wire.frames) if i not in victims[-2:]]
    follower = Follower(job).run(frames, final=False)
    assert list(follower.steps) == [1, 2] and follower.lost is not None


def test_no_mirror_and_no_traffic() -> None:
    job = trained(3, mirror=[])
    follower = Follower(job).run(quiet=20 * SECOND)
    assert not follower.steps and follower.lost is not None and "reaches the mirror" in follower.lost.reason
    assert follower.tracker.coverage == 0.0 and follower.tracker.ahead == 3


def test_one_direction_shows_its_share_and_no_step() -> None:
    follower = Follower(trained(3, world=4, mirror=[(1, 0)])).run(quiet=20 * SECOND)
    assert not follower.steps and follower.lost is not None
    assert follower.tracker.coverage == pytest.approx(0.75, abs=0.02)


def test_two_copies_that_differ_are_not_claimed() -> None:
    job = trained(3, world=4, rebuilt=((0, 1, 2),))
    frames = job.wire.frames
    at = [i for i, f in enumerate(frames) if f.link == (1, 0) and len(f.payload) > 100][-1]
    frames[at].payload = frames[at].payload[:-1] + bytes([frames[at].payload[-1] ^ 1])
    follower = Follower(job).run()
    follower.check(2)
    assert follower.lost is not None and "two copies" in follower.lost.reason


def with_a_late_copy_that_differs(delay: int) -> tuple[SyntheticJob, list[Frame]]:
    """A job whose last final value comes a second time, on another link, `delay` ns late and with another bit."""
    job = trained(3, world=4, rebuilt=((0, 1, 2),))
    frames = job.wire.frames
    last = [i for i, f in enumerate(frames) if f.link == (1, 0) and len(f.payload) > 100][-1]
    frames[last].payload = frames[last].payload[:-1] + bytes([frames[last].payload[-1] ^ 1])
    late = [f for i, f in enumerate(frames) if i >= last and f.link in ((1, 0), (0, 1))]
    frames[:] = [f for i, f in enumerate(frames) if i < last or f.link not in ((1, 0), (0, 1))]
    for number, frame in enumerate(late):
        frame.ts = frames[-1].ts + delay + number
    return job, late


def test_a_step_waits_for_its_second_copies_a_little() -> None:
    job, late = with_a_late_copy_that_differs(SECOND // 10)
    follower = Follower(job).run([*job.wire.frames, *late])
    follower.check(2)
    assert follower.lost is not None and "two copies" in follower.lost.reason and not follower.lost.claimed


def test_a_second_copy_that_differs_after_the_claim_takes_the_step_back() -> None:
    job, late = with_a_late_copy_that_differs(2 * SECOND)
    follower = Follower(job)
    follower.apply = False  # the step is claimed and its gradients are still being read
    follower.run(quiet=SECOND, final=False)
    assert list(follower.steps) == [1, 2, 3]
    now = late[-1].ts
    follower.pipeline.feed(job.wire.block(late), now)
    follower.take(now)
    assert follower.lost is not None and follower.lost.claimed and follower.lost.step == 3


# Memory


def test_gradients_handed_out_are_not_reused_while_they_are_read() -> None:
    job = trained(4)
    follower = Follower(job)
    follower.apply = False
    follower.run()
    held = {step: {i: g.tobytes() for i, g in ready.gradients.items()} for step, ready in follower.steps.items()}
    follower.pipeline.remove_job("job")  # the trainers attach again meanwhile
    other = Follower(trained(6, seed=9))
    other.pipeline = follower.pipeline
    other.tracker = follower.pipeline.add_job("other", other.job.description, follower.tracker._predictor)
    other.run()
    for step, ready in follower.steps.items():
        assert {i: g.tobytes() for i, g in ready.gradients.items()} == held[step] == job.truth[step]
    for step in follower.steps:
        follower.tracker.applied(step)  # of a job that is gone: nothing happens
    assert follower.tracker.pending == 0


def test_memory_of_applied_steps_is_used_again() -> None:
    follower = Follower(trained(12))
    follower.run()
    follower.check(12)
    budget = follower.pipeline.gloo._held.budget
    assert budget._spare and follower.pipeline.gloo.counters["memory_bytes"] < 8 * 4 * sum(SIZES) + 4096


def test_a_flood_of_reductions_without_a_step_is_bounded() -> None:
    job = trained(2)
    ones = np.ones(sum(SIZES[i] for i in REBUILT[1]), np.float32)
    for _ in range(4200):
        job.allreduce(ones)
    follower = Follower(job).run(per_block=512, final=False)
    assert follower.lost is not None and "no optimizer step" in follower.lost.reason
    assert follower.pipeline.gloo.counters["memory_bytes"] < 1 << 20
    assert [type(e) for e in follower.events if isinstance(e, StepLost)] == [StepLost]
