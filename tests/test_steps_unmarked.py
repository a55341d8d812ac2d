"""Steps whose markers are lost or late: claimed unconfirmed where nothing is ambiguous, taken back if contradicted."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Buckets, Follower, SyntheticJob, trained

from reconstruct.steps import StepConfirmed


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


@pytest.mark.parametrize("canaries", [3, 0])
def test_hyperparameters_that_went_with_a_lost_marker_are_asked_for(canaries: int) -> None:
    """Until a marker carries them nothing can be said of the steps; where each begins stays certain."""
    job = trained(2)
    job.dropped = {3}
    job.groups = ({"lr": 0.01, "momentum": 0.0},)
    job.usual_step(changed=True)
    needed = []
    for asked in (False, False, True, False):
        job.say(lambda tracker: needed.append(tracker.needs_groups))
        job.usual_step(canaries=canaries, asked=asked, delay=15_000_000 * (not canaries))
    job.say(lambda tracker: needed.append(tracker.needs_groups), delay=SECOND)
    job.reduction()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "..xxx.." and follower.lost is None
    assert "hyper-parameters" in follower.why[3] and "hyper-parameters" in follower.why[4]
    assert needed[0] is False and any(needed) and needed[-1] is False
    assert [step.groups[0]["lr"] for step in follower.steps.values()] == [0.1] * 5 + [0.01] * 2


def test_fields_that_came_with_a_blank_step_are_in_force_behind_it() -> None:
    job = trained(2)
    job.groups = ({"lr": 0.01, "momentum": 0.0},)
    job.usual_step(changed=True, clipped=True)
    job.usual_step()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "..x." and not follower.tracker.needs_groups
    assert [step.groups[0]["lr"] for step in follower.steps.values()] == [0.1, 0.1, 0.01, 0.01]


@pytest.mark.parametrize("groups", [0.1, 0.01])
def test_a_marker_that_is_lost_beside_one_that_tells_of_a_change(groups: float) -> None:
    """The next marker shows other fields than those predicted: when they changed is not known."""
    job = trained(2)
    job.dropped = {3}
    job.groups = ({"lr": groups, "momentum": 0.0},)
    job.usual_step(changed=True)
    job.usual_step(changed=True)
    job.usual_step()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == ("....." if groups == 0.1 else "..x..") and follower.lost is None
    assert follower.steps[4].groups[0]["lr"] == groups


def test_fields_that_did_not_change_around_a_lost_marker_need_no_prediction() -> None:
    job = SyntheticJob()
    job.groups = ({"lr": 0.01, "momentum": 0.0},)
    job.attach()
    job.groups = ({"lr": 0.05, "momentum": 0.0},)
    job.usual_step(changed=True)  # from here on nothing is predicted any more
    job.usual_step()
    job.dropped = {3}
    job.usual_step()
    job.usual_step()
    follower = Follower(job).run()
    follower.check(4)
    assert [step.groups[0]["lr"] for step in follower.steps.values()] == [0.05] * 4
    assert not follower.steps[3].confirmed


def test_a_count_of_all_reduces_proves_nothing_where_one_was_lost() -> None:
    """Two steps up to the next marker, two all-reduces of a bucket's size: one is none, and a reduction is missing."""
    job = SyntheticJob(rebuilt=PERMUTED)
    job.dropped = {3}
    job.attach()
    job.usual_step()
    job.usual_step()
    job.allreduce(np.ones(sum(SIZES)))
    job.reduction()
    job.optimizer_step()
    job.reduction(lost=[0])
    job.optimizer_step()
    for _ in range(3):
        job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "..xx..."


def test_a_step_is_not_given_up_for_what_the_mirror_has_yet_to_show() -> None:
    """The next marker overtakes the capture, which has shown both reductions, but not the collective behind them."""
    job = SyntheticJob(rebuilt=PERMUTED)
    job.dropped = {2}
    job.attach()
    job.usual_step()
    job.usual_step()
    job.wait(SECOND)
    job.reduction()
    job.allreduce(np.ones(7))
    job.optimizer_step(delay=-SECOND)
    Follower(job).run(per_block=1, quiet=SECOND).check(3)


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
        follower.take(at + 10 * SECOND)
    assert [e.step for e in follower.events if isinstance(e, StepConfirmed)] == [1, 2, 3]
    assert follower.lost is None


def test_a_late_marker_is_not_judged_before_the_capture_is_there() -> None:
    job = SyntheticJob(rebuilt_at_attach=True)
    job.attach()
    job.unlink()
    job.reduction()
    job.wait(5 * SECOND)
    here = len(job.wire.frames)
    job.reduction()
    job.optimizer_step()
    words, job.words = job.words[1:], job.words[:1]
    follower = Follower(job).run(job.wire.frames[:here], final=False, quiet=4 * SECOND)
    assert list(follower.steps) == [1]
    for at, word in words:  # it overtakes the frames of the second reduction
        word(follower.tracker)
        follower.take(at)
    job.words.clear()
    follower.run(job.wire.frames[here:], final=False, quiet=SECOND)
    assert follower.lost is not None and follower.lost.claimed and follower.lost.step == 1
    assert not [e for e in follower.events if isinstance(e, StepConfirmed)]


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
        follower.take(at + 10 * SECOND)
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


def test_a_late_marker_that_spans_an_unfinished_reduction_is_a_contradiction() -> None:
    job = SyntheticJob(rebuilt_at_attach=True)
    job.attach()
    job.unlink()
    job.reduction()
    job.wait(5 * SECOND)
    job.reduction()
    missing = [i for i, f in enumerate(job.wire.frames) if len(f.payload) > 48][-1]
    job.optimizer_step()
    words, job.words = job.words[1:], job.words[:1]
    frames = [f for i, f in enumerate(job.wire.frames) if i != missing]
    follower = Follower(job).run(frames, final=False)
    assert list(follower.steps) == [1]
    for at, word in words:
        word(follower.tracker)
        follower.take(at + 10 * SECOND)
    assert follower.lost is not None and follower.lost.claimed and follower.lost.step == 1


def test_a_late_marker_whose_fields_went_with_another_one_proves_nothing() -> None:
    job = SyntheticJob(rebuilt_at_attach=True)
    job.attach()
    job.unlink()
    for _ in range(2):
        job.usual_step()
    job.version = 1  # changed in step 1, whose marker is lost
    job.usual_step()
    words, job.words = job.words[3:], job.words[:1]
    follower = Follower(job).run(final=False, quiet=5 * SECOND)
    follower.check(3)
    for at, word in words:
        word(follower.tracker)
        follower.take(at + 10 * SECOND)
    assert follower.lost is None and not [e for e in follower.events if isinstance(e, StepConfirmed)]
