"""The step tracker on made-up wires: a step is claimed with the trainer's own gradients, or it is not claimed."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_job import REBUILT, SECOND, SIZES, Follower, SyntheticJob

from reconstruct.steps import Notice, StepConfirmed, StepLost

Buckets = tuple[tuple[int, ...], ...]
PERMUTED = ((2, 0, 1),)  # the same size as the initial bucket: only its place tells it apart


def trained(steps: int, **options: object) -> SyntheticJob:
    job = SyntheticJob(**options)  # type: ignore[arg-type]
    job.attach()
    for _ in range(steps):
        job.usual_step()
    return job


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_step_has_the_trainers_gradients(world: int) -> None:
    follower = Follower(trained(6, world=world)).run()
    follower.check(6)
    assert all(step.confirmed for step in follower.steps.values())
    assert follower.tracker.coverage == 1.0 and follower.lost is None


def test_steps_are_claimed_without_waiting_for_the_end() -> None:
    Follower(trained(4)).run(final=False).check(4)


def test_attach_in_the_middle_of_training_with_rebuilt_buckets() -> None:
    job = SyntheticJob(rebuilt_at_attach=True, step=41)
    for _ in range(5):
        job.reduction()
    job.attach()
    job.reduction()
    job.optimizer_step()
    job.reduction()
    job.optimizer_step()
    Follower(job).run().check(43)


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
@pytest.mark.parametrize("says", [True, False])
def test_static_graph_keeps_the_first_layout_for_two_reductions(rebuilt: Buckets, says: bool) -> None:
    job = SyntheticJob(static_graph=True, rebuilt=rebuilt)
    job.attach()
    for number in range(5):
        if number == 2:
            job.rebuild()
        job.reduction()
        job.optimizer_step(says_rebuilt=says)
    Follower(job).run().check(5)


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
def test_layout_by_report_alone(rebuilt: Buckets) -> None:
    job = SyntheticJob(rebuilt=rebuilt)
    job.attach()
    for number in range(6):
        if number == 1:
            job.has_rebuilt = True
            job.collective(), job.collective()  # the broadcasts pass by the mirror
        job.reduction()
        job.optimizer_step()
        if number == 2:
            job.report_layout()
    follower = Follower(job).run()
    follower.check(6)


def test_a_first_pass_that_no_step_uses_and_a_layout_by_report() -> None:
    job = SyntheticJob(rebuilt=PERMUTED)
    job.attach()
    job.reduction()  # warm-up
    job.has_rebuilt = True
    job.collective(), job.collective()
    for number in range(4):
        job.reduction()
        job.optimizer_step()
        if number == 1:
            job.report_layout()
    Follower(job).run().check(4)


def test_a_slow_job_waits_for_the_report_of_its_layout() -> None:
    job = SyntheticJob()
    job.attach()
    for number in range(5):
        if number == 1:
            job.has_rebuilt = True
            job.collective(), job.collective()
        job.reduction()
        job.optimizer_step()
        job.wait(30 * SECOND)
        if number == 2:
            job.report_layout()
    Follower(job).run().check(5)


def test_a_layout_that_nobody_tells_is_said_so() -> None:
    job = SyntheticJob()
    job.attach()
    for number in range(8):
        if number == 1:
            job.has_rebuilt = True
            job.collective(), job.collective()
        job.reduction()
        job.optimizer_step()
        job.wait(5 * SECOND)
    follower = Follower(job).run()
    follower.check(1)
    assert follower.lost is not None and "neither on the wire nor reported" in follower.lost.reason


def test_a_report_that_contradicts_the_wire_ends_the_following() -> None:
    job = trained(3)
    wrong = tuple(tuple(bucket) for bucket in (REBUILT[1], REBUILT[0]))
    job.say(lambda tracker: tracker.reported_layout(wrong, (160, 320)))
    job.wait(SECOND)
    for _ in range(2):
        job.usual_step()
    follower = Follower(job).run()
    assert follower.lost is not None and "differs from the one that DDP reports" in follower.lost.reason
    assert list(follower.steps) == [1, 2, 3]


# Other collectives around the buckets


def test_accumulation_takes_the_last_reduction() -> None:
    job = SyntheticJob()
    job.attach()
    for number in range(4):
        for micro in range(4):
            if number == 0 and micro == 1:
                job.rebuild()
            job.reduction()
        job.optimizer_step()
    Follower(job).run().check(4)


def test_slow_accumulation_is_not_taken_for_steps_without_markers() -> None:
    job = SyntheticJob()
    job.attach()
    for number in range(3):
        for micro in range(4):
            if number == 0 and micro == 1:
                job.rebuild()
            job.reduction()
            job.wait(5 * SECOND)  # longer than any wait for a marker
        job.optimizer_step()
    Follower(job).run().check(3)


def test_a_skipped_optimizer_step_is_no_step() -> None:
    job = trained(2)
    job.reduction()
    job.wait(20 * SECOND)
    job.usual_step()
    job.usual_step()
    job.reduction()
    job.last_word()
    Follower(job).run(quiet=20 * SECOND).check(4)


def test_a_reduction_after_the_last_word_is_no_step_even_when_the_connection_is_gone() -> None:
    job = trained(3)
    job.last_word()
    job.unlink()
    job.reduction()
    Follower(job).run(quiet=20 * SECOND).check(3)


@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_a_stranger_of_a_buckets_size_never_passes_for_it(bucket: int, before: bool) -> None:
    job = trained(2)
    stranger = np.arange(sum(SIZES[i] for i in REBUILT[bucket]), dtype=np.float32)
    for number in range(4):
        if before:
            job.allreduce(stranger + number)
        job.reduction()
        if not before:
            job.allreduce(stranger + number)
        job.optimizer_step()
    Follower(job).run().check(6)


def test_a_stranger_without_canaries_is_ambiguous() -> None:
    job = trained(2)
    job.allreduce(np.ones(sum(SIZES[i] for i in REBUILT[0])))
    job.reduction()
    job.optimizer_step(canaries=0)
    follower = Follower(job).run()
    follower.check(2)
    assert follower.lost is not None and "nothing tells" in follower.lost.reason


@pytest.mark.parametrize("world", [2, 4])
def test_a_stranger_that_begins_like_a_bucket_is_no_rival(world: int) -> None:
    """Sizes that differ in the last segment alone have the same first message."""
    job = trained(2, world=world)
    for extra in (-1, 1, -2):
        job.allreduce(np.ones(sum(SIZES[i] for i in REBUILT[0]) + extra))
        job.reduction()
        job.optimizer_step(canaries=0)
    Follower(job).run().check(5)


def test_clipped_gradients_are_not_claimed() -> None:
    job = trained(2)
    job.reduction()
    job.optimizer_step(clipped=True)
    follower = Follower(job).run()
    follower.check(2)
    assert follower.lost is not None and "clipped" in follower.lost.reason


def test_a_repeated_optimizer_step_is_not_claimed() -> None:
    job = trained(2)
    job.optimizer_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.check(2)
    assert follower.lost is not None and "show no bucket of it" in follower.lost.reason


# Where sequence number and tags differ


def test_point_to_point_traffic_before_the_attach() -> None:
    job = SyntheticJob()
    for _ in range(3):
        job.point_to_point()
    job.attach()
    for _ in range(4):
        job.usual_step(canaries=0)
    Follower(job).run().check(4)


@pytest.mark.parametrize("shown", [True, False])
def test_tags_ahead_of_the_sequence_number_at_the_attach(shown: bool) -> None:
    job = SyntheticJob()
    job.tag += 2  # monitored_barrier
    job.sequence += 1
    if shown:
        job.barrier()
    job.attach()
    for _ in range(4):
        job.usual_step(canaries=0)
    follower = Follower(job).run(quiet=20 * SECOND)
    if shown:
        follower.check(4)
    else:
        assert not follower.steps and follower.lost is not None


def test_point_to_point_traffic_before_an_attach_of_unknown_time_claims_nothing() -> None:
    job = SyntheticJob()
    for _ in range(3):
        job.point_to_point()
    job.attach()
    for _ in range(4):
        job.usual_step(canaries=0)
    follower = Follower(job, calibrated=False).run(quiet=20 * SECOND)
    assert not follower.steps and follower.lost is not None


@pytest.mark.parametrize("canaries", [0, 3])
def test_point_to_point_traffic_during_slow_training_is_followed(canaries: int) -> None:
    job = trained(2)
    for _ in range(5):
        job.reduction()
        job.point_to_point()
        job.optimizer_step(canaries=canaries)
        job.wait(SECOND)
    follower = Follower(job).run()
    follower.check(7)
    assert any(isinstance(e, Notice) and "point-to-point" in e.text for e in follower.events)


@pytest.mark.parametrize("pause", [0, SECOND])
@pytest.mark.parametrize("world", [2, 3])
def test_numbers_that_run_apart_during_training_never_give_a_wrong_step(world: int, pause: int) -> None:
    job = trained(2, world=world)
    for number in range(6):
        if number % 2:
            job.tag += 2  # monitored_barrier: two tags, one number
            job.sequence += 1
        else:
            job.point_to_point()
        job.reduction()
        job.optimizer_step()
        job.wait(pause)
    follower = Follower(job).run(quiet=20 * SECOND)
    for step, gradients in follower.gradients.items():
        assert gradients == job.truth[step]


# Lost markers


def test_one_lost_marker_between_others() -> None:
    job = SyntheticJob()
    job.dropped = {3}
    job.attach()
    for _ in range(5):
        job.usual_step()
    follower = Follower(job).run()
    follower.check(5)
    assert [s for s, ready in follower.steps.items() if not ready.confirmed] == [3]


def test_a_lost_marker_is_not_judged_before_the_capture_is_there() -> None:
    """Markers overtake a capture that lags: what the later one bounds has not been read yet."""
    job = SyntheticJob()
    job.dropped = {2}
    job.attach()
    for _ in range(4):
        job.usual_step()
    job.words = [(0, word) for _, word in sorted(job.words, key=lambda w: w[0])]
    follower = Follower(job).run(per_block=1)
    follower.check(4)
    assert [s for s, ready in follower.steps.items() if not ready.confirmed] == [2]


def test_a_lost_marker_with_changed_hyperparameters_ends_the_following() -> None:
    job = trained(2)
    job.dropped = {3}
    job.groups = ({"lr": 0.01, "momentum": 0.0},)
    job.usual_step(changed=True)
    job.usual_step()
    follower = Follower(job).run()
    assert follower.lost is not None and list(follower.steps) in ([1, 2], [1, 2, 3])
    if 3 in follower.steps:
        assert not follower.steps[3].confirmed


def test_a_change_told_by_two_markers_of_which_one_is_lost_puts_the_guess_in_doubt() -> None:
    job = trained(2)
    job.dropped = {3}
    job.groups = ({"lr": 0.01, "momentum": 0.0},)
    job.usual_step(changed=True)
    job.usual_step(changed=True)
    job.usual_step()
    follower = Follower(job).run()
    assert 4 not in follower.steps
    assert follower.lost is not None and (follower.lost.claimed or 3 not in follower.steps)


def test_all_markers_lost_and_the_connection_gone() -> None:
    job = SyntheticJob()
    job.dropped = set(range(1, 10))
    job.attach()
    job.unlink()
    for _ in range(6):
        job.usual_step()
        job.wait(SECOND)
    follower = Follower(job).run(final=False, quiet=3 * SECOND)
    follower.check(6)
    assert not any(ready.confirmed for ready in follower.steps.values())


def test_while_the_connection_stands_a_step_without_marker_is_none() -> None:
    job = SyntheticJob()
    job.dropped = set(range(3, 10))
    job.attach()
    for _ in range(5):
        job.usual_step()
        job.wait(SECOND)
    Follower(job).run(final=False, quiet=30 * SECOND).check(2)


def late(job: SyntheticJob, step: int, by: int) -> None:
    """The marker of `step` comes `by` ns late."""
    at, word = job.words[step - 1]
    job.words[step - 1] = (at + by, word)


def test_a_late_marker_confirms_what_it_agrees_with() -> None:
    job = SyntheticJob()
    job.attach()
    job.unlink()
    for _ in range(3):
        job.usual_step()
    job.words, words = job.words[:1], job.words[1:]
    follower = Follower(job).run(final=False, quiet=5 * SECOND)
    follower.check(3)
    for at, word in words:
        word(follower.tracker)
        follower.take(at)
    assert [e.step for e in follower.events if isinstance(e, StepConfirmed)] == [1, 2, 3]
    assert follower.lost is None


def test_a_late_marker_that_spans_two_reductions_is_a_contradiction() -> None:
    """Accumulation while the connection was gone: the first reduction passed for a step, and that comes out."""
    job = SyntheticJob(rebuilt_at_attach=True)
    job.attach()
    job.unlink()
    for _ in range(4):
        job.reduction()
    job.optimizer_step()
    words, job.words = job.words[1:], job.words[:1]
    follower = Follower(job).run(final=False, quiet=5 * SECOND)
    assert not any(ready.confirmed for ready in follower.steps.values())
    for at, word in words:
        word(follower.tracker)
        follower.take(at)
    assert follower.lost is not None and follower.lost.claimed and follower.lost.step == 1
    assert not [e for e in follower.events if isinstance(e, StepConfirmed)]


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
@pytest.mark.parametrize("static", [False, True])
def test_unmarked_steps_around_the_rebuild_that_are_read_late(rebuilt: Buckets, static: bool) -> None:
    """The first step is judged when the traffic of later ones, with the rebuilt layout, is long there."""
    job = SyntheticJob(rebuilt=rebuilt, static_graph=static)
    job.dropped = set(range(1, 10))
    job.attach()
    job.unlink()
    for number in range(6):
        if number == 1 + static:
            job.rebuild()
        job.reduction()
        job.optimizer_step()
    Follower(job).run().check(6)


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
@pytest.mark.parametrize("dropped", [{1}, {2}, {1, 2}])
def test_lost_markers_around_the_rebuild(rebuilt: Buckets, dropped: set[int]) -> None:
    job = SyntheticJob(rebuilt=rebuilt)
    job.dropped = dropped
    job.attach()
    for _ in range(5):
        job.usual_step()
    follower = Follower(job).run()
    follower.check(5)
    assert {s for s, ready in follower.steps.items() if not ready.confirmed} == dropped


# Loss on the mirror


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


def test_a_second_copy_that_differs_after_the_claim_takes_the_step_back() -> None:
    job = trained(3, world=4, rebuilt=((0, 1, 2),))
    frames = job.wire.frames
    last = [i for i, f in enumerate(frames) if f.link == (1, 0) and len(f.payload) > 100][-1]
    frames[last].payload = frames[last].payload[:-1] + bytes([frames[last].payload[-1] ^ 1])
    late = [f for i, f in enumerate(frames) if i >= last and f.link in ((1, 0), (0, 1))]
    frames[:] = [f for i, f in enumerate(frames) if i < last or f.link not in ((1, 0), (0, 1))]
    for number, frame in enumerate(late):
        frame.ts = frames[-1].ts + 2 * SECOND + number
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
    budget = follower.pipeline.decoder._held.budget
    assert budget._spare and follower.pipeline.decoder.counters["memory_bytes"] < 8 * 4 * sum(SIZES) + 4096


def test_a_flood_of_reductions_without_a_step_is_bounded() -> None:
    job = trained(2)
    ones = np.ones(sum(SIZES[i] for i in REBUILT[1]), np.float32)
    for _ in range(4200):
        job.allreduce(ones)
    follower = Follower(job).run(per_block=512, final=False)
    assert follower.lost is not None and "no optimizer step" in follower.lost.reason
    assert follower.pipeline.decoder.counters["memory_bytes"] < 1 << 20
    assert [type(e) for e in follower.events if isinstance(e, StepLost)] == [StepLost]
