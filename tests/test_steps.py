"""The step tracker on made-up wires: a step has the trainer's own gradients, or it is said that they are not known."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Buckets, Follower, SyntheticJob, trained

from reconstruct.steps import Notice


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
    follower.verify()
    assert follower.story == ".xxxxxxx" and "neither on the wire nor reported" in follower.why[2]


@pytest.mark.parametrize("says", [True, False])
def test_a_layout_that_is_told_late_ends_the_blank_steps(says: bool) -> None:
    """Not before a marker says that it is in force: how many reductions the blank steps had is not known."""
    job = SyntheticJob(static_graph=True, rebuilt=PERMUTED)
    job.attach()
    for number in range(10):
        if number == 2:
            job.has_rebuilt = True
            job.collective(), job.collective()
        job.reduction()
        job.optimizer_step(says_rebuilt=says)
        job.wait(5 * SECOND)
        if number == 7:
            job.report_layout()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == ("..xx......" if says else "..xxxxxxxx")


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


def test_behind_a_blank_step_no_bucket_is_thought_to_be_of_the_first_layout() -> None:
    """It had two reductions, so that DDP rebuilt its buckets; how many it had is not known here."""
    job = SyntheticJob(static_graph=True, rebuilt=REBUILT)
    job.attach()
    job.reduction()
    job.reduction()
    job.optimizer_step(clipped=True)
    job.has_rebuilt = True
    job.collective(), job.collective()
    for number in range(3):
        job.reduction()
        job.optimizer_step()
        if number == 1:
            job.report_layout()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "x..."


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


@pytest.mark.parametrize("canaries", [3, 0])
def test_a_mirror_far_behind_the_markers_hides_no_reduction(canaries: int) -> None:
    """The step's own reduction is shown long after its marker, the skipped one before it.

    It must not pass for a later step's: the skipped gradient would be the only one left, and where no canary
    contradicts it, it would be applied.
    """
    job = trained(2)
    job.reduction()
    job.wait(SECOND)
    job.reduction()
    job.optimizer_step(canaries=canaries, delay=-9 * SECOND // 10)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    # Without a canary the two reductions cannot be told apart, so neither is taken.
    assert follower.story == ("..." if canaries else "..x")


@pytest.mark.parametrize("seen", [True, False])
def test_a_reduction_after_the_last_step_is_none_even_when_the_connection_is_gone(seen: bool) -> None:
    job = trained(3)
    if not seen:
        job.last_word()
    job.unlink()
    job.reduction()
    if seen:
        job.last_word()
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
    job.usual_step()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "..x." and "nothing tells" in follower.why[3]


@pytest.mark.parametrize("world", [2, 4])
def test_a_stranger_that_begins_like_a_bucket_is_no_rival(world: int) -> None:
    """Sizes that differ in the last segment alone have the same first message."""
    job = trained(2, world=world)
    for extra in (-1, 1, -2):
        job.allreduce(np.ones(sum(SIZES[i] for i in REBUILT[0]) + extra))
        job.reduction()
        job.optimizer_step(canaries=0)
    Follower(job).run().check(5)


def test_of_a_step_with_clipped_gradients_nothing_is_known() -> None:
    job = trained(2)
    job.reduction()
    job.optimizer_step(clipped=True)
    job.usual_step()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "..x." and "clipped" in follower.why[3]


def test_of_a_repeated_optimizer_step_nothing_is_known() -> None:
    job = trained(2)
    job.optimizer_step()
    job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "..x." and "show no bucket of it" in follower.why[3]


# Behind a step that was not understood


def test_behind_a_blank_step_the_next_one_is_known_by_its_canaries_or_by_the_count() -> None:
    """Its marker came when the wire had shown just the collectives that it counts; from then on all is certain."""
    soon, late = 1_000_000, 15_000_000
    for canaries, delays, story in (
        (3, (late, late, late), ".x..."),
        (0, (soon, late, late), ".x..."),
        (0, (late, late, late), ".xxxx"),
    ):
        job = trained(1)
        job.reduction()
        job.optimizer_step(clipped=True)
        for delay in delays:
            job.barrier()
            job.usual_step(canaries=canaries, delay=delay)
        job.reduction()
        job.last_word()
        follower = Follower(job).run()
        follower.verify()
        assert follower.story == story, (canaries, delays, follower.why)


def test_behind_a_blank_step_a_count_proves_nothing_where_numbers_run_apart() -> None:
    job = SyntheticJob(rebuilt=PERMUTED, rebuilt_at_attach=True)
    job.attach()
    job.reduction()
    job.point_to_point()
    job.optimizer_step(canaries=0)  # its number counts the next reduction, too
    job.reduction()
    job.optimizer_step(canaries=0)
    job.reduction()
    job.optimizer_step(canaries=0, delay=11_000_000)  # comes when just as many were shown as it counts
    job.reduction()
    job.optimizer_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert "." not in follower.story[:3] and len(follower.story) == 4


def test_behind_a_blank_step_none_without_a_marker_is_claimed() -> None:
    job = trained(2)
    job.reduction()
    job.optimizer_step(clipped=True)
    job.dropped = {4}
    for _ in range(3):
        job.usual_step(delay=15_000_000)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "..xxx." and "do not tell the step's end" in follower.why[4]


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
    follower.verify()
    assert follower.story == ("...." if shown else "xxxx")


def test_point_to_point_traffic_before_an_attach_of_unknown_time_claims_nothing() -> None:
    job = SyntheticJob()
    for _ in range(3):
        job.point_to_point()
    job.attach()
    for _ in range(4):
        job.usual_step(canaries=0)
    follower = Follower(job, calibrated=False).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "xxxx"


@pytest.mark.parametrize("canaries", [0, 3])
@pytest.mark.parametrize("idle", [True, False])
def test_point_to_point_traffic_during_slow_training_is_followed(canaries: int, idle: bool) -> None:
    """By the gradient's own elements. Without any, a mirror that lags behind the markers would look the same."""
    job = trained(2)
    for _ in range(5):
        job.reduction()
        job.point_to_point()
        job.optimizer_step(canaries=canaries)
        job.wait(SECOND)
    follower = Follower(job).run(idle=idle)
    follower.verify()
    assert follower.story == ("......." if canaries else "..xxxxx")
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
    follower.verify()
    assert len(follower.story) == 8
