"""What the mirror lost or damaged is lost to the element, and no more; gradients handed out stay what they are."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from gloo_traffic import Frame
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Follower, SyntheticJob, trained

from reconstruct.decoder import Conflict
from reconstruct.handed import HandedOut
from reconstruct.lr import Predictor
from reconstruct.ranges import Ranges
from reconstruct.steps import Notice, StepReady


def final_bytes(job: SyntheticJob, step: int, frames: list[Frame]) -> dict[int, tuple[int, int, int]]:
    """Frames with nothing but final values of a step: number -> DDP index, bytes of its gradient [low, high)."""
    found = {}
    for number, frame in enumerate(frames):
        for index, whole in job.truth[step].items():
            at = whole.find(frame.payload)
            if len(frame.payload) >= 16 and at >= 0:
                found[number] = index, at, at + len(frame.payload)
    return found


@pytest.mark.parametrize("canaries", [3, 0])
def test_an_element_with_a_missing_byte_is_lost_and_no_other(canaries: int) -> None:
    """Segments that end within an element; in a ring of two each final value is on one link."""
    for seed in range(10):
        job = SyntheticJob(mss=51, seed=seed)
        job.attach()
        for _ in range(2):
            job.usual_step(canaries=canaries)
        job.report_layout()
        before = len(job.wire.frames)
        job.usual_step(canaries=canaries)
        held = final_bytes(job, 3, job.wire.frames)
        for _ in range(2):
            job.usual_step(canaries=canaries)
        victims = random.Random(seed).sample([n for n in held if n >= before], 2)
        follower = Follower(job).run([f for n, f in enumerate(job.wire.frames) if n not in victims])
        follower.verify()
        assert follower.story == "..-..", (seed, follower.why)
        wanted: dict[int, Ranges] = {}
        for index, low, high in (held[n] for n in victims):
            wanted[index] = wanted.get(index, Ranges.of([])) | Ranges.of([(low // 4, -(-high // 4))])
        assert dict(follower.steps[3].lost) == wanted
        lost = sum(high - low for _, low, high in (held[n] for n in victims))
        assert sum(length for _, _, length in follower.steps[3].holes) == lost == follower.tracker.hole_bytes
        assert follower.steps[3].nbytes == 480


@pytest.mark.parametrize("link", [(0, 1), (1, 0)])
def test_a_step_with_a_hole_is_handed_out_as_soon_as_later_traffic_proves_it(link: tuple[int, int]) -> None:
    """An acknowledgment from beyond the gap, seen twice with 20 ms between: no wait of the tracker's is added."""
    job = trained(2, mss=64)
    before = len(job.wire.frames)
    job.usual_step()
    done = job.now
    held = final_bytes(job, 3, job.wire.frames)
    victim = next(n for n in held if n >= before and job.wire.frames[n].link == link)
    for _ in range(8):
        job.usual_step()
    frames = [f for n, f in enumerate(job.wire.frames) if n != victim]
    follower = Follower(job)
    when: dict[int, int] = {}
    take = follower.take

    def timed(now: int, final: bool = False) -> None:
        take(now, final)
        for step in follower.steps:
            when.setdefault(step, now)

    follower.take = timed  # type: ignore[method-assign]
    follower.run(frames, quiet=SECOND)
    follower.verify()
    assert follower.story == "..-........" and when[3] < done + 70_000_000


def test_what_is_lost_is_told_by_what_it_is_handed_out_as() -> None:
    """Known values are views of the landing, others copies with zeros that late frames do not write to."""
    job = trained(2, mss=64)
    before = len(job.wire.frames)
    job.usual_step()
    held = final_bytes(job, 3, job.wire.frames)
    victim = next(n for n in held if n >= before)
    index, low, high = held[victim]
    late = job.wire.frames[victim]
    job.usual_step()
    follower = Follower(job)
    follower.apply = False
    follower.run([f for n, f in enumerate(job.wire.frames) if n != victim], final=False, quiet=SECOND)
    step = follower.steps[3]
    assert follower.story == "..-." and list(step.lost) == [index]
    assert not step.gradients[index][low:high].any()
    now = job.now + 2 * SECOND
    follower.pipeline.feed(job.wire.block([replace(late, ts=now)]), now)
    follower.take(now)
    assert not step.gradients[index][low:high].any() and follower.lost is None


def test_a_bucket_that_was_never_seen_is_lost_whole() -> None:
    """The window has no other collectives than the buckets, so that it is known which one is missing."""
    for canaries in (3, 0):
        job = trained(3)
        job.reduction(lost=[1])
        job.optimizer_step(canaries=canaries)
        for _ in range(3):
            job.usual_step(canaries=canaries)
        follower = Follower(job).run(final=False, quiet=SECOND)
        follower.verify()
        assert follower.story == "...-..."
        assert follower.steps[4].holes == ((1, 0, 160),)
        assert dict(follower.steps[4].lost) == {0: Ranges.of([(0, 40)])}


@pytest.mark.parametrize("apart", [True, False])
def test_where_the_window_is_in_doubt_a_bucket_that_was_never_seen_is_not_told_by_its_place(apart: bool) -> None:
    job = trained(3)
    if apart:
        job.point_to_point()
        job.sequence -= 1
    else:
        job.reduction()
        job.optimizer_step(clipped=True)
    job.reduction(lost=[0])
    job.optimizer_step()
    job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == ("...x." if apart else "...xx.")


def test_what_a_link_lost_before_the_last_step_was_handed_out_may_be_of_the_next_one() -> None:
    """Markers come a second late: the gap in the second window was seen before the first step was known to be over."""
    job = SyntheticJob(rebuilt=PERMUTED, rebuilt_at_attach=True)
    job.attach()
    job.usual_step(canaries=0, delay=SECOND)
    job.reduction()
    job.reduction(lost=[0])
    job.optimizer_step(canaries=0, delay=SECOND)
    for _ in range(10):
        job.usual_step(canaries=0, delay=SECOND)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story[:2] == ".x" and "were lost around" in follower.why[2]


def test_where_a_bucket_that_was_never_seen_may_be_another_collective_nothing_is_known() -> None:
    job = trained(3)
    job.allreduce(np.ones(7), lost=True)
    job.reduction(lost=[1])
    job.optimizer_step()
    job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "...x." and follower.why[4].startswith("no 2 all-reduces")


@pytest.mark.parametrize("canaries", [0, 1, 3])
def test_a_stranger_in_the_place_of_a_lost_bucket_is_not_taken_for_it(canaries: int) -> None:
    """Bucket 0 is swallowed whole by a gap, an all-reduce of its size stands right before it."""
    job = trained(3)
    job.allreduce(np.ones(sum(SIZES[i] for i in REBUILT[0])))
    job.reduction(lost=[0])
    job.optimizer_step(canaries=canaries)
    job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "...x."


@pytest.mark.parametrize("other", [True, False])
def test_a_link_that_stands_still_at_a_gap_does_not_vouch_for_what_others_have_shown(other: bool) -> None:
    """The second of two reductions is in a gap of both links, which is proven on one of them only."""
    job = SyntheticJob(rebuilt=PERMUTED, rebuilt_at_attach=True)
    job.attach()
    job.usual_step(canaries=0)
    job.reduction()
    before = len(job.wire.frames)
    job.reduction(lost=[0])
    job.optimizer_step(canaries=0)
    for _ in range(8):
        job.usual_step(canaries=0)
    silent = (0, 1) if other else (1, 0)
    frames = job.wire.frames[:before]
    # One side acknowledges nothing any more, so that the other's gap stays open.
    held = next(f.ack for f in frames[::-1] if f.link == silent)
    frames += [replace(f, ack=held) if f.link == silent else f for f in job.wire.frames[before:]]
    follower = Follower(job).run(frames, final=False)
    follower.verify()
    assert follower.story == "."
    now = frames[-1].ts + 31 * SECOND
    follower.pipeline.expire(now)
    follower.take(now)
    follower.verify()
    assert follower.story[:2] == ".x" and len(follower.story) == 10


def test_a_step_whose_reported_elements_were_all_lost_is_not_known_to_be_the_trainers() -> None:
    """It may have clipped its gradients."""
    for count in (1, 2):
        job = trained(2, mss=64)
        before = len(job.wire.frames)
        job.reduction()
        job.optimizer_step(canaries=count, clipped=True)
        job.usual_step()
        held = final_bytes(job, 3, job.wire.frames)
        victims = [n for n, (index, _, _) in held.items() if n >= before and index < count]
        # What shares a frame with a message's start is lost with it: whole parameters.
        follower = Follower(job).run([f for n, f in enumerate(job.wire.frames) if n not in victims])
        follower.verify()
        assert follower.story[2] == "x"


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
    assert any(isinstance(e, Notice) and "nothing follows until a marker comes" in e.text for e in follower.events)


def test_behind_a_lost_reduction_and_lost_markers_the_next_marker_begins_anew() -> None:
    job = SyntheticJob(rebuilt=PERMUTED)
    job.attach()
    job.usual_step()
    job.usual_step()
    job.dropped = {3, 4, 5}
    job.usual_step()
    job.reduction(lost=[0])
    job.optimizer_step()
    for _ in range(4):
        job.usual_step()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "..xxxx.." and "do not tell the step's end" in follower.why[3]


def test_a_run_of_blank_steps_is_handed_out_as_it_is_taken() -> None:
    job = SyntheticJob(rebuilt=PERMUTED)
    job.attach()
    job.usual_step()
    job.reduction(lost=[0])
    job.dropped = set(range(2, 300))
    for _ in range(298):
        job.step += 1
    job.usual_step()
    job.usual_step()
    follower = Follower(job)
    follower.apply = False
    follower.run(quiet=20 * SECOND)
    assert follower.story == "." + "x" * 63
    for step in range(1, 302):
        follower.tracker.applied(step)
        follower.take(job.now + 30 * SECOND, final=True)
    assert follower.story == "." + "x" * 299 + "."


@pytest.mark.parametrize("part", [0.5, 0.8, 0.95])
def test_what_a_job_died_in_the_middle_of_is_no_step(part: float) -> None:
    """Its connections end, and that of its markers."""
    job = trained(3)
    before = len(job.wire.frames)
    job.reduction()
    del job.wire.frames[before + int(part * (len(job.wire.frames) - before)) :]
    job.wire.close()
    job.unlink()
    for final in (True, False):
        Follower(job).run(quiet=20 * SECOND, final=final).check(3)


def test_an_unmarked_step_with_missing_bytes_is_taken_for_one_when_training_goes_on() -> None:
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
    follower.verify()
    assert follower.story.startswith("..-....") and set(follower.story[3:]) == {"."}
    assert not follower.steps[3].confirmed


def test_no_mirror_and_no_traffic() -> None:
    job = trained(3, mirror=[])
    follower = Follower(job).run(quiet=20 * SECOND)
    assert follower.story == "xxx" and "reaches the mirror" in follower.why[1]
    assert follower.tracker.coverage == 0.0 and follower.tracker.ahead == 3


def test_one_direction_shows_its_share() -> None:
    job = trained(3, world=4, mirror=[(1, 0)])
    job.report_layout()
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "---"
    assert follower.tracker.coverage == pytest.approx(0.75, abs=0.02)


def test_of_two_copies_that_differ_neither_is_taken() -> None:
    job = trained(3, world=4, rebuilt=((0, 1, 2),))
    frames = job.wire.frames
    at = [i for i, f in enumerate(frames) if f.link == (1, 0) and len(f.payload) > 100][-1]
    frames[at].payload = frames[at].payload[:-1] + bytes([frames[at].payload[-1] ^ 1])
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "..-" and sum(part.total for part in follower.steps[3].lost.values()) == 1
    assert any(isinstance(e, Notice) and "two copies" in e.text for e in follower.events)


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
    follower.verify()
    assert follower.story == "..-" and follower.lost is None


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


def test_a_copy_that_differs_where_all_is_lost_takes_nothing_back() -> None:
    handed = HandedOut()
    handed.add(3, (5, 7), {5: Ranges.of([(8, 16)])})
    for tag, offset, length, step in (
        (5, 8, 8, None), (5, 8, 9, 3), (5, 7, 2, 3), (5, 9, 0, 3), (6, 8, 8, 3), (7, 8, 8, None),
    ):  # fmt: skip
        assert handed.contradicted(Conflict("job", tag, offset, length, 0)) == step
    assert handed.holds(6) and not handed.holds(7)
    assert handed.applied(2) is None and handed.applied(3) == 7 and not handed


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
    other.tracker = follower.pipeline.add_job("other", other.job.description, Predictor(other.job.description))
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


@pytest.mark.parametrize("canaries", [3, 0])
def test_a_flood_of_reductions_without_a_step_is_bounded(canaries: int) -> None:
    """What was forgotten of them may be the step's bucket: canaries of all buckets rule that out."""
    job = trained(2)
    ones = np.ones(sum(SIZES[i] for i in REBUILT[1]), np.float32)
    for _ in range(4200):
        job.allreduce(ones)
    job.reduction()
    job.optimizer_step(canaries=canaries)
    job.usual_step()
    follower = Follower(job).run(per_block=512, final=False, quiet=11 * SECOND)
    follower.verify()
    assert follower.story == (".." + ("." if canaries else "x") + ".")
    assert [e.text for e in follower.events if isinstance(e, Notice)] == [
        "over 4096 all-reduces of a bucket's size and no optimizer step"
    ]
    assert follower.pipeline.gloo.counters["memory_bytes"] < 1 << 20
    assert not any(isinstance(e, StepReady) and e.step == 2 and e.blank for e in follower.events)


@pytest.mark.parametrize(
    ("over", "quiet", "story"), [(True, SECOND, "..x"), (False, SECOND, ".."), (False, 20 * SECOND, "..x")]
)
def test_once_the_training_is_over_what_is_missing_is_not_waited_for_long(over: bool, quiet: int, story: str) -> None:
    """Nothing of the last step is seen. Trainers that end wait a moment for a daemon that asks them for it."""
    job = trained(2)
    job.reduction(lost=[0, 1])
    job.optimizer_step()
    if over:
        job.last_word()
    follower = Follower(job).run(quiet=quiet, final=False)
    follower.verify()
    assert follower.story == story
