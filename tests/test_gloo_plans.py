"""The gloo decoder: copies that differ, wrong and late sizes, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gloo_traffic import (
    Follower,
    Job,
    Link,
    all_complete,
    no_dangling_addresses,
    port,
    preamble,
    ring_messages,
)

from reconstruct.decoder import ALLREDUCE, NOT_THIS_SIZE, RAW, AllReduce, Conflict, LinkLost, Message, Reduced

# Conflicts


def test_copies_that_differ() -> None:
    job = Job(4, port(4, 1), seed=6)
    job.connect()
    job.allreduce({0: (60_000, 4)})
    job.allreduce({1: (60_000, 4)})
    whole = job.truth[0][0].tobytes()
    at = next(i for i, f in enumerate(job.frames) if len(f.payload) == job.mss and f.payload in whole)
    frame = job.frames[at]
    bad = bytearray(frame.payload)
    bad[100] ^= 4
    again = replace(frame, ts=frame.ts + 1, payload=bytes(bad))
    offset = whole.index(frame.payload) + 100
    # As a retransmission after the first copy was placed, and as the link's only copy against the other link's.
    before, after = job.frames[:at], job.frames[at + 1 :]
    for frames in ([*before, frame, again, *after], [*before, again, *after]):
        follower = Follower(job)
        follower.feed(frames, per_block=1)
        follower.finish()
        conflicts = [e for e in follower.events if isinstance(e, Conflict)]
        landing = follower.decoder.landing("g", 0)
        assert landing is not None
        if not conflicts:  # a chunk that only this link shows: nothing to compare with
            assert frames[at] is again
            continue
        assert [(e.tag, e.offset, e.length) for e in conflicts] == [(0, offset, 1)]
        assert not landing.complete and landing.conflicts[0][:2] == [offset, 1]
        assert [e.tag for e in follower.events if isinstance(e, Reduced)] == [1]
    follower = Follower(job)
    follower.feed([*before, frame, frame, *after], per_block=1)
    follower.finish()
    all_complete(follower)


def test_conflict_while_waiting_for_a_gap() -> None:
    job = Job(3, port(3, 1), seed=6)
    job.connect()
    job.allreduce({0: (60_000, 4)})
    whole = job.truth[0][0].tobytes()
    at = next(i for i, f in enumerate(job.frames)
              if len(f.payload) == job.mss and f.payload in whole and job.frames[i + 1].payload in whole)
    first, second = job.frames[at], job.frames[at + 1]
    bad = replace(second, payload=second.payload[:-1] + b"?")
    follower = Follower(job)
    follower.feed([*job.frames[:at], second, bad, first, *job.frames[at + 2 :]], per_block=8)
    follower.finish()
    (conflict,) = [e for e in follower.events if isinstance(e, Conflict)]
    assert conflict.offset == whole.index(second.payload) + len(second.payload) - 1
    landing = follower.decoder.landing("g", 0)
    assert landing is not None and not landing.complete
    assert not [e for e in follower.events if isinstance(e, Reduced)]


# Plans


@pytest.mark.parametrize(("planned", "real"), [(40_000, 80_000), (80_000, 40_000), (8, 12), (12, 8), (40_000, 39_996)])
def test_wrong_size_is_never_complete(planned: int, real: int) -> None:
    job = Job(4, port(4, 1), seed=3)
    job.connect()
    job.allreduce({0: (real, 4)})
    job.allreduce({1: (400, 4)})
    follower = Follower(job)
    follower.decoder.planner = lambda r: AllReduce(planned if r.tag == 0 else 400, 4)
    follower.feed(job.frames)
    follower.finish()
    landing = follower.decoder.landing("g", 0)
    assert landing is not None and not landing.complete
    lost = [e for e in follower.events if isinstance(e, LinkLost)]
    assert landing.poisoned == any(e.reason.startswith(NOT_THIS_SIZE) for e in lost)
    assert landing.poisoned or landing.covered < landing.size
    assert follower.decoder.landing("g", 1).complete


def test_size_known_afterwards() -> None:
    job = Job(4, port(4, 1), seed=3)
    job.connect()
    job.allreduce({0: (40_000, 4), 1: (8, 4)})
    for cut in (len(job.frames), len(job.frames) * 3 // 4):
        follower = Follower(job)
        follower.decoder.planner = lambda r: RAW
        follower.feed(job.frames[:cut], per_block=8)
        assert follower.decoder.landing("g", 0) is None
        if cut < len(job.frames):
            assert follower.decoder.place("g", 0, 39_996, 4) is None
        follower.feed(job.frames[cut:], per_block=8)
        assert follower.decoder.place("g", 0, 40_004, 4) is None
        assert follower.decoder.place("g", 1, 12, 4) is None
        for tag, size in ((0, 40_000), (1, 8)):
            landing = follower.decoder.place("g", tag, size, 4)
            assert landing is not None and landing.complete
            assert follower.decoder.place("g", tag, size, 4) is landing
        follower.finish()
        assert sorted(e.tag for e in follower.events if isinstance(e, Reduced)) == [0, 1]
        assert set(follower.check().values()) == {1.0}


def test_size_tried_too_early() -> None:
    """12 bytes begin on the wire like 8: a size is taken only once every link has shown all of it."""
    job = Job(4, port(4, 1), seed=3)
    job.connect()
    job.allreduce({0: (12, 4)})
    taken = 0
    for cut in range(len(job.frames)):
        follower = Follower(job)
        follower.decoder.planner = lambda r: RAW
        follower.feed(job.frames[:cut])
        early = follower.decoder.place("g", 0, 8, 4)
        taken += early is not None
        follower.feed(job.frames[cut:])
        follower.finish()
        assert early is None or early.poisoned
        landing = follower.decoder.place("g", 0, 12, 4)
        assert (landing is None) == (early is not None)
        assert early is not None or landing.complete
    assert taken <= 1


def _tiny(extra: list[tuple[Link, bytes]]) -> tuple[Job, Follower]:
    """Rank 1's two messages of an all-reduce of 8 bytes over 4 ranks, kept raw; then `extra` writes."""
    job = Job(4, port(4, 1), seed=3)
    job.connect()
    for _ in range(2):
        job.message((1, 0), ALLREDUCE, 0, bytes(4))
    for link, data in extra:
        job.send(link, data)
    follower = Follower(job)
    follower.decoder.planner = lambda r: RAW
    follower.feed(job.frames)
    return job, follower


def test_size_is_not_taken_while_more_is_announced() -> None:
    _, follower = _tiny([])
    assert follower.decoder.place("g", 0, 8, 4) is not None
    for link, opcode in (((1, 0), 2), ((0, 1), 3)):
        _, follower = _tiny([(link, preamble(opcode, ALLREDUCE, 0, 4))])
        assert follower.decoder.place("g", 0, 8, 4) is None


@pytest.mark.parametrize("link", [(1, 0), (2, 1)])
def test_size_that_later_messages_disprove(link: Link) -> None:
    job, follower = _tiny([])
    landing = follower.decoder.place("g", 0, 8, 4)
    assert landing is not None and not landing.poisoned
    before = len(job.frames)
    job.message(link, ALLREDUCE, 0, bytes(6))
    follower.feed(job.frames[before:])
    assert landing.poisoned and not landing.complete
    (lost,) = [e for e in follower.events if isinstance(e, LinkLost)]
    assert lost.reason.startswith(NOT_THIS_SIZE) and (lost.sender, lost.tags) == (link[0], (0,))


def test_links_that_contradict_each_other() -> None:
    job = Job(4, port(4, 1), seed=3)
    job.connect()
    for link, size in (((1, 0), 8), ((2, 1), 12)):
        for _, length, _ in ring_messages(size, 4, 4, link[0]):
            job.message(link, ALLREDUCE, 0, bytes(length))
    follower = Follower(job)
    follower.decoder.planner = lambda r: RAW
    follower.feed(job.frames)
    assert follower.decoder.place("g", 0, 8, 4) is None
    assert follower.decoder.place("g", 0, 12, 4) is None


def test_budget() -> None:
    job = Job(3, port(3, 1), seed=3)
    job.connect()
    job.allreduce({0: (4000, 4)})
    job.allreduce({1: (100_000, 4)})
    job.allreduce({2: (4000, 4)})
    follower = Follower(job, budget=50_000)
    follower.feed(job.frames)
    parts = follower.check()
    assert parts[0] == parts[2] == 1.0 and follower.decoder.landing("g", 1) is None
    assert {e.tags for e in follower.events if isinstance(e, LinkLost)} == {(1,)}
    assert follower.decoder.counters["memory_bytes"] <= 50_000
    raw = Follower(job, budget=50_000)
    raw.decoder.planner = lambda r: RAW
    raw.feed(job.frames)
    assert raw.decoder.counters["memory_bytes"] <= 50_000
    assert any(isinstance(e, Message) and e.data is None and not e.complete for e in raw.events)


def test_retired_memory_is_used_again_and_views_stay_valid() -> None:
    job = Job(3, port(3, 1), seed=3)
    job.connect()
    for tag in range(6):
        job.allreduce({tag: (40_000, 4)})
    follower = Follower(job)
    kept: dict[int, np.ndarray] = {}
    for i in range(0, len(job.frames), 16):
        seen = len(follower.events)
        follower.feed(job.frames[i : i + 16])
        for event in follower.events[seen:]:
            assert isinstance(event, Reduced)
            if event.tag == 2:
                kept[2] = event.landing.data[100:200]
            assert np.array_equal(event.landing.data, job.truth[event.tag][0])
            follower.decoder.retire("g", event.tag + 1)
            assert event.landing.data.size == 0 and follower.decoder.landing("g", event.tag) is None
    assert len([e for e in follower.events if isinstance(e, Reduced)]) == 6
    assert np.array_equal(kept[2], job.truth[2][0][100:200])
    assert follower.decoder.counters["memory_bytes"] <= 3 * 40_000
    assert follower.decoder.max_tag("g") == 5


def test_retiring_in_the_middle() -> None:
    job = Job(3, port(3, 1), seed=3)
    job.connect()
    job.allreduce({0: (40_000, 4), 1: (40_000, 4)})
    job.allreduce({2: (40_000, 4)})
    for cut in range(20, len(job.frames), 37):
        for plan in (None, RAW):
            follower = Follower(job)
            if plan is not None:
                follower.decoder.planner = lambda r, plan=plan: plan
            follower.feed(job.frames[:cut], per_block=8)
            no_dangling_addresses(follower.decoder)
            follower.decoder.retire("g", 1)
            no_dangling_addresses(follower.decoder)
            follower.feed(job.frames[cut:], per_block=8)
            no_dangling_addresses(follower.decoder)
            assert follower.decoder.landing("g", 0) is None
            if plan is None:
                assert follower.check()[2] == 1.0


def test_more_collectives_than_remembered() -> None:
    job = Job(2, port(2, 0), seed=3)
    job.connect()
    for tag in range(0, 200, 2):
        job.allreduce({tag: (64, 4), tag + 1: (8, 4)})
    follower = Follower(job)
    follower.feed(job.frames)
    follower.finish()
    all_complete(follower)
