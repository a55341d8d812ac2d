"""What the steps of a job lacked, by cause and place: bucket, parameter, elements."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from synthetic_job import Follower, SyntheticJob, trained
from test_steps_loss import final_bytes

from mirror.block import Block, Loss
from mirror.loss import CAUSES, MIRROR, RING, UNKNOWN
from reconstruct.shortfall import CONFLICT

_PLACE = re.compile(r"step (\d+), bucket (\d+), (\S+)\[(\d+):(\d+)\]: (\w+)")


def lossy(job: SyntheticJob, gone: set[int], windows: tuple[Loss, ...] = ()) -> Follower:
    """Run a job whose frames of these numbers do not come."""
    follower = Follower(job)
    feed, left = follower.pipeline.feed, list(windows)

    def told(block: Block, now: int, source: str = "") -> None:
        block.losses = tuple(one for one in left if one.end <= now)
        left[:] = [one for one in left if one.end > now]
        feed(block, now, source)

    follower.pipeline.feed = told  # type: ignore[method-assign]
    return follower.run([frame for number, frame in enumerate(job.wire.frames) if number not in gone])


@pytest.mark.parametrize("kind", [MIRROR, RING])
def test_a_lost_frame_is_named_by_bucket_parameter_and_elements(kind: str) -> None:
    for parameter in range(3):
        job = trained(6, mss=51, seed=parameter)
        held = final_bytes(job, 3, job.wire.frames)
        victim = next(number for number, (index, *_) in held.items() if index == parameter)
        index, low, high = held[victim]
        around = job.wire.frames[victim - 1].ts, job.wire.frames[victim + 1].ts
        follower = lossy(job, {victim}, (Loss(RING, *around),) if kind == RING else ())
        follower.verify()
        tracker = follower.tracker
        assert tracker.shortfall.bytes == {**dict.fromkeys((*CAUSES, CONFLICT), 0), kind: high - low}
        assert tracker.hole_bytes == high - low
        places = [_PLACE.fullmatch(text) for text in tracker.shortfall.newest]
        name = next(p.name for p in job.description.parameters if p.index == index)
        (bucket, _, _) = follower.steps[3].holes[0]
        assert [place and place.groups() for place in places] == [
            ("3", str(bucket), name, str(low // 4), str(-(-high // 4)), kind)
        ]


@pytest.mark.parametrize("rate", [0.002, 0.02, 0.1])
def test_bytes_by_cause_add_up_to_all_that_steps_lacked(rate: float) -> None:
    lacking = 0
    for seed in range(8):
        dice = random.Random(f"{seed} {rate}")
        job = trained(8, mss=64, seed=seed)
        gone = {number for number in range(60, len(job.wire.frames)) if dice.random() < rate}
        follower = lossy(job, gone)
        follower.verify()
        tracker = follower.tracker
        assert sum(tracker.shortfall.bytes.values()) == tracker.hole_bytes
        assert sum(length for step in follower.steps.values() for *_, length in step.holes) == tracker.hole_bytes
        assert not tracker.shortfall.bytes[RING] and not tracker.shortfall.bytes[CONFLICT]
        assert len(tracker.shortfall.newest) <= 8
        lacking += tracker.shortfall.bytes[MIRROR] + tracker.shortfall.bytes[UNKNOWN]
    assert lacking > 0 or rate < 0.01


def test_copies_that_differ_are_no_hole() -> None:
    job = trained(6, mss=51)
    held = final_bytes(job, 3, job.wire.frames)
    number, (_, low, high) = next(iter(held.items()))
    frame = job.wire.frames[number]
    other = replace(frame, payload=bytes([frame.payload[0] ^ 1]) + frame.payload[1:])
    job.wire.frames.insert(number + 1, other)
    follower = lossy(job, set())
    follower.verify()
    tracker = follower.tracker
    assert tracker.shortfall.bytes == {**dict.fromkeys((*CAUSES, CONFLICT), 0), CONFLICT: tracker.hole_bytes}
    assert 0 < tracker.hole_bytes <= high - low
