"""Group calls over NCCL, which c10d counts as one collective: without canaries they lead to no wrong claim."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from nccl_job import NcclJob
from synthetic_job import PERMUTED, REBUILT, SECOND, SIZES, Buckets, Follower, SyntheticJob
from test_lab_groups import put_group

from reconstruct.counts import Counts, Window, surveyed
from reconstruct.markers import Canary, Marker

BUCKET = sum(SIZES)


def made(
    algorithm: str = "ring", protocol: str = "simple", world: int = 2, channels: int = 1, **options: Any
) -> NcclJob:
    told = {"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol}
    nccl = {"algorithm": algorithm, "protocol": protocol, "channels": channels, "version": "2.28.9"}
    return NcclJob(world, nccl=nccl, told=told, **options)


def attached(**options: Any) -> NcclJob:
    job = made(rebuilt_at_attach=True, **options)
    job.attach()
    return job


@pytest.mark.parametrize("canaries", [0, 3])
def test_a_groups_all_reduce_of_a_buckets_size_is_not_taken_for_the_bucket(canaries: int) -> None:
    """The window of the marker ends before the bucket: of three all-reduces c10d counted two."""
    job = attached(rebuilt=PERMUTED)
    for _ in range(3):
        put_group(job, [BUCKET, BUCKET + 1])
        job.reduction()
        job.optimizer_step(canaries=canaries)
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "xxx"
    assert "ncclGroupStart" in follower.why[1] and "one by one" in follower.why[1]


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
@pytest.mark.parametrize("sizes", [(2482, 2365, 120), (120, 390), (40, 120, 96), (300, 96)])
def test_messages_that_wait_may_be_more_collectives_than_one(sizes: tuple[int, ...], rebuilt: Buckets) -> None:
    """What is at the window's end is not understood yet: the tag was seen, but how many collectives it stands for?"""
    for protocol, channels in (("ll128", 2), ("simple", 1)):
        job = attached(protocol=protocol, channels=channels, rebuilt=rebuilt, seed=5)
        for grouped in (True, False):
            if grouped:
                put_group(job, list(sizes))
            job.reduction()
            job.optimizer_step(canaries=0)
        follower = Follower(job).run(quiet=SECOND)
        follower.verify()
        assert len(follower.story) == 2


def test_a_marker_that_the_capture_has_not_come_to_proves_nothing_of_those_before_it() -> None:
    """Its count would seem to agree with what was shown by then, as the rest is not understood yet."""
    for delay in (1_000_000, 10_000_000, 25_000_000):
        job = made(rebuilt=PERMUTED, seed=5)
        job.attach()
        put_group(job, [1953, 2547, 40, 120])
        job.reduction()
        job.optimizer_step(canaries=0, delay=delay)
        for _ in range(2):
            job.reduction()
            job.optimizer_step(canaries=0, delay=delay)
        follower = Follower(job).run(quiet=SECOND)
        follower.verify()


@pytest.mark.parametrize("canaries", [0, 3])
def test_a_group_between_two_reductions_does_not_hide_the_second(canaries: int) -> None:
    job = attached(rebuilt=PERMUTED)
    job.reduction()
    put_group(job, [1, 1])
    job.reduction()
    job.optimizer_step(canaries=canaries)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "x" and "1 more collectives than c10d had counted" in follower.why[1]


def test_where_canaries_tell_a_group_does_no_harm() -> None:
    job = attached(rebuilt=PERMUTED)
    for canaries in (3, 3, 0):
        job.reduction()
        put_group(job, [1, 1])
        job.optimizer_step(canaries=canaries)
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == "..x" and "ncclGroupStart" in follower.why[3]


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
def test_collectives_that_c10d_counts_one_by_one_need_no_canaries(rebuilt: Buckets) -> None:
    job = made(rebuilt=rebuilt)
    job.attach()
    for step in range(6):
        if step % 2:
            job.barrier()
        if job.truth and not job.has_rebuilt:
            job.rebuild()
        job.reduction()
        job.allreduce(np.ones(1))
        if step % 3 == 0:
            job.allreduce(np.ones(1))
            job.barrier()
        job.optimizer_step(canaries=0)
    Follower(job).run(quiet=SECOND).check(6)


def test_behind_a_blank_step_that_there_is_no_room_for_a_group_proves_nothing() -> None:
    job = attached(rebuilt=REBUILT)
    job.reduction()
    job.optimizer_step(clipped=True)
    for _ in range(2):
        before = job.now
        job.reduction()
        early(job, before)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "xxx"


def early(job: NcclJob, before: int) -> None:
    """A marker that comes before the step's collectives, as from a GPU that is behind its host."""
    job.optimizer_step(canaries=0, delay=before - job.now)


@pytest.mark.parametrize("rebuilt", [REBUILT, PERMUTED])
def test_a_marker_before_its_collectives_where_all_are_buckets(rebuilt: Buckets) -> None:
    job = made(rebuilt=rebuilt)
    job.attach()
    for _ in range(5):
        before = job.now
        if job.truth and not job.has_rebuilt:
            job.rebuild()
        job.reduction()
        early(job, before)
    Follower(job).run(quiet=20 * SECOND).check(5)


@pytest.mark.parametrize(("rebuilt", "others", "steps"), [(REBUILT, 2, 3), (REBUILT, 3, 0), (PERMUTED, 1, 0)])
def test_a_marker_before_its_collectives_leaves_room_for_a_group_or_not(
    rebuilt: Buckets, others: int, steps: int
) -> None:
    """Three calls beside two buckets may be a group and a second reduction."""
    job = attached(rebuilt=rebuilt)
    for _ in range(3):
        before = job.now
        for _ in range(others):
            job.barrier()
        job.reduction()
        early(job, before)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == ("..." if steps else "xxx")
    assert steps or "before the collectives that it counts" in follower.why[1]


def test_a_marker_that_came_before_its_collectives_is_not_waited_with_for_what_later_ones_show() -> None:
    job = attached(rebuilt=PERMUTED)
    for _ in range(3):
        before = job.now
        job.barrier()
        job.reduction()
        early(job, before)
    follower = Follower(job).run(quiet=3 * SECOND, final=False)
    follower.verify()
    assert follower.story == "xxx"
    counts, window = Counts(every=False), Window(2, 1, 1, 0, end=2, arrived=15)
    assert not counts.open(window, {0: 10, 1: 20}, True)
    assert counts.open(window, {0: 10}, False)  # what is not understood yet may have been shown before
    assert counts.open(window, {0: 10, 1: 11, 2: 12}, True)
    assert counts.open(Window(2, 1, 1, 0, end=2, arrived=None), {}, True)


@pytest.mark.parametrize("members", [2, 3])
def test_a_marker_before_its_collectives_with_a_group_between_two_reductions(members: int) -> None:
    job = attached(rebuilt=PERMUTED)
    for _ in range(3):
        before = job.now
        job.reduction()
        put_group(job, [1] * members)
        job.reduction()
        early(job, before)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "xxx"


def test_a_marker_is_not_judged_before_the_capture_has_come_to_it() -> None:
    job = attached(rebuilt=PERMUTED)
    before = job.now
    job.reduction()
    put_group(job, [1, 1])
    job.reduction()
    arrived = job.now + 1_000_000
    marker = Marker(1, job.sequence, 0, None, (), None, True)
    job.words = [(before, lambda tracker: tracker.marker(marker, arrived))]
    job.truth[1] = job.reduced
    follower = Follower(job).run(per_block=1, quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "x" and "1 more collectives" in follower.why[1]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_late_marker_is_told_from_a_group_by_the_next_one(steps: int) -> None:
    job = attached(rebuilt=PERMUTED)
    for step in range(steps):
        job.reduction()
        job.allreduce(np.ones(1))
        job.optimizer_step(canaries=0, delay=1_000_000 if step else 15_000_000)
    if steps == 1:
        job.reduction()
    follower = Follower(job).run()
    follower.verify()
    assert follower.story == (".." if steps == 2 else "x")


def test_a_late_marker_of_nothing_but_buckets_is_believed() -> None:
    job = attached(rebuilt=PERMUTED)
    for _ in range(4):
        job.reduction()
        job.optimizer_step(canaries=0, delay=15_000_000)
    Follower(job).run().check(4)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_step_whose_marker_is_lost_is_not_claimed_from_a_group(grouped: bool) -> None:
    """The next window ends before its own reduction and seems to hold two steps."""
    job = attached(rebuilt=PERMUTED)
    job.dropped = {1}
    if grouped:
        put_group(job, [BUCKET, BUCKET + 1])
    job.reduction()
    job.optimizer_step(canaries=0)
    job.reduction()
    job.optimizer_step(canaries=0)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == ("xx" if grouped else "..")


def test_an_all_reduce_of_a_buckets_size_beside_the_buckets_leaves_room() -> None:
    job = attached(rebuilt=REBUILT)
    before = job.now
    job.reduction()
    job.allreduce(np.ones(SIZES[2] + SIZES[1]))
    early(job, before)
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "x"


def test_canaries_of_zero_do_not_speak() -> None:
    job = attached(rebuilt=PERMUTED)
    rng = np.random.default_rng(3)
    job._inputs = lambda count: [  # type: ignore[method-assign]
        np.append(np.float32(0), rng.standard_normal(count - 1).astype(np.float32)) for _ in range(job.world)
    ]
    put_group(job, [BUCKET, BUCKET + 1])
    job.reduction()
    job.truth[1] = job.reduced
    marker = Marker(1, job.sequence, 0, None, (Canary(PERMUTED[0][0], 0, bytes(4), None),), None, True)
    job.say(lambda tracker: tracker.marker(marker, job.now))
    follower = Follower(job).run(quiet=20 * SECOND)
    follower.verify()
    assert follower.story == "x"


def test_over_gloo_every_collective_has_its_number() -> None:
    """There a coalesced call is one all-reduce; a late marker ends where it says."""
    job = SyntheticJob(rebuilt=PERMUTED, rebuilt_at_attach=True)
    job.attach()
    for _ in range(3):
        job.reduction()
        job.allreduce(np.ones(1))
        job.optimizer_step(canaries=0, delay=15_000_000)
    Follower(job).run().check(3)


def grouped_job(seed: int, group: bool) -> NcclJob:
    """Reductions with groups around them, some all-reduces of a bucket's size, or with single collectives."""
    rng = random.Random(seed)
    algorithm, protocol, world, channels = rng.choice(
        [("ring", "simple", 2, 1), ("ring", "ll", 2, 4), ("ring", "simple", 3, 2), ("tree", "simple", 2, 2)]
    )
    job = made(algorithm, protocol, world, channels, rebuilt=rng.choice([REBUILT, PERMUTED]), seed=seed,
               rebuilt_at_attach=rng.random() < 0.5)  # fmt: skip
    job.attach()

    def others() -> None:
        if group and rng.random() < 0.7:
            put_group(job, [rng.choice([120, 96, 40, 1, 1, rng.randint(1, 3000)]) for _ in range(rng.randint(2, 4))])
        elif rng.random() < 0.5:
            job.barrier()

    for _ in range(4):
        others()
        if job.truth and not job.has_rebuilt:
            job.rebuild()
        if group and rng.random() < 0.3:
            job.reduction()
            others()
        job.reduction()
        others()
        job.optimizer_step(canaries=0, delay=rng.choice([1_000_000, 1_000_000, 15_000_000]))
    return job


def test_many_jobs_with_groups_and_no_canaries() -> None:
    whole = 0
    for seed in range(16):
        follower = Follower(grouped_job(seed, True)).run()
        follower.verify()
        assert len(follower.story) == 4 and follower.lost is None
        whole += follower.story.count(".")
    for seed in range(6):
        follower = Follower(grouped_job(seed, False)).run(quiet=SECOND)
        follower.verify()
        whole += follower.story.count(".")
    assert whole >= 24


WINDOW = Window(calls=4, own=2, buckets=2, others=0, end=4, arrived=100)
SEEN = dict(zip(range(4), (10, 20, 30, 40), strict=True))


@pytest.mark.parametrize(
    ("changes", "seen", "told"),
    [
        ({}, {}, None),
        ({"arrived": 39}, {}, None),
        ({"arrived": 39, "others": 1}, {}, "came before"),
        ({"arrived": 39, "own": 1}, {}, "came before"),
        ({"arrived": 39, "buckets": 1}, {}, "came before"),
        ({"arrived": 39, "buckets": 1, "own": 4}, {}, None),
        ({}, {4: 100}, "1 more collectives"),
        ({}, {4: 101}, None),
        ({"own": 4}, {4: 100}, None),
        ({"arrived": None}, {}, "not all understood"),
    ],
)
def test_reasons_to_believe_a_window(changes: dict[str, Any], seen: dict[int, int], told: str | None) -> None:
    fields = {name: getattr(WINDOW, name) for name in ("calls", "own", "buckets", "others", "end", "arrived")}
    window = Window(**{**fields, **changes})
    problem = Counts(every=False).problem(window, [], SEEN | seen)
    assert problem is None if told is None else told in str(problem)
    assert Counts(every=True).problem(window, [], SEEN | seen) is None


def test_a_boundary_stays_certain_only_where_the_counts_are_known_to_agree() -> None:
    plain = Window(calls=1, own=1, buckets=1, others=0, end=5, arrived=100)
    ahead = SEEN | {4: 50, 5: 60}
    for window, decided, certain in (
        (WINDOW, True, True),
        (WINDOW, False, False),
        (Window(4, 4, 2, 0, 4, 100), True, True),
        (Window(4, 2, 2, 0, 4, 39), True, False),
        (Window(4, 2, 2, 0, 4, 60), True, False),
    ):
        counts = Counts(every=False)
        counts.claimed(window, [], SEEN | ({4: 50} if window.arrived == 60 else {}), decided)
        assert (counts.problem(plain, [], ahead) is None) == certain
    counts = Counts(every=False)
    counts.unmarked(own=True)
    assert counts.problem(plain, [], ahead) is None
    counts.unmarked(own=False)
    assert counts.problem(plain, [], ahead) is not None
    assert counts.problem(plain, [(5, 90)], SEEN | {4: 50, 5: 95}) is None


@pytest.mark.parametrize(
    ("decided", "newest", "waiting", "seen", "known"),
    [
        (4, 3, 0, (0, 1, 2, 3), True),
        (4, 4, 9999, (0, 1, 2, 3, 4), True),
        (4, 4, 9999, (0, 1, 2, 3), False),
        (5, 5, 9999, (0, 1, 2, 3, 4), True),
        (3, 3, 99, (0, 1, 2, 3), True),
        (3, 3, 100, (0, 1, 2, 3), False),
        (2, 2, 99, (0, 1, 2), False),
    ],
)
def test_what_waits_may_be_any_number_of_collectives(
    decided: int, newest: int, waiting: int, seen: tuple[int, ...], known: bool
) -> None:
    class Told:
        def decided(self, group: str) -> int:
            return decided

        def max_tag(self, group: str) -> int:
            return newest

        def waiting(self, group: str) -> int:
            return waiting

    assert surveyed(Told(), "g", 4, 100, dict.fromkeys(seen, 0)) == known  # type: ignore[arg-type]
