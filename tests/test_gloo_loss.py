"""The gloo decoder under loss and disorder: only right values, and positions that recover."""

from __future__ import annotations

import random

import pytest
from gloo_traffic import (
    Follower,
    Job,
    all_complete,
    disordered,
    lossy,
    no_dangling_addresses,
    port,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reconstruct.decoder import ALLREDUCE, BROADCAST, NOT_THIS_SIZE, RAW, LinkLost, Message, Reduced
from reconstruct.gloo import state as g
from reconstruct.gloo.framing import MAX_NOTICES, Pending, lost_payloads
from reconstruct.gloo.lanes import LaneTable
from reconstruct.gloo.recovery import after_gap


def _job_with_a_tail(seed: int, world: int, rank: int) -> tuple[Job, int]:
    """Traffic of 20 collectives, then 20 more; where the second part begins."""
    rng = random.Random(seed)
    job = Job(world, port(world, rank), seed=seed, gap_ns=1_000_000)
    job.connect()
    begin = 0
    for tag in range(0, 40, 2):
        if tag == 20:
            begin = len(job.frames)
        sizes = rng.choice((8, 32, 4000, 60_000, 200_000)), rng.choice((4, 60_000, 1000))
        job.allreduce({tag: (sizes[0], 4), tag + 1: (sizes[1], 4)})
    return job, begin


@pytest.mark.parametrize("rate", [0.001, 0.005, 0.02, 0.05])
def test_dropped_frames(rate: float) -> None:
    """Every placed byte is right, holes are holes, and later collectives are complete again."""
    placed = whole = resynced = 0.0
    for seed in range(12):
        rng = random.Random(seed * 1000 + int(rate * 1e4))
        world = rng.choice((2, 3, 4))
        job, tail = _job_with_a_tail(seed, world, rng.randrange(world))
        follower = lossy(job, [i < tail and rng.random() < rate for i in range(len(job.frames))])
        parts = follower.check()
        no_dangling_addresses(follower.decoder)
        assert [parts[tag] for tag in range(28, 40)] == [1.0] * 12
        placed += sum(parts[tag] * len(job.truth[tag][0]) for tag in range(20))
        whole += sum(len(job.truth[tag][0]) for tag in range(20))
        resynced += follower.decoder.counters["resynced"]
        for event in follower.events:
            assert isinstance(event, Reduced | LinkLost)
            if isinstance(event, LinkLost):
                assert not event.reason.startswith(NOT_THIS_SIZE)
    assert resynced > 0
    assert placed / whole > {0.001: 0.98, 0.005: 0.95, 0.02: 0.85, 0.05: 0.6}[rate]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_frames_dropped(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 4))
    job = Job(world, port(world, data.draw(st.integers(0, world - 1))), seed=data.draw(st.integers(0, 9)), mss=200,
              gap_ns=1_000_000)
    job.connect()
    start = len(job.frames)
    sizes = st.sampled_from((4, 8, 24, 100, 1600, 6000))
    for tag in range(0, 6, 2):
        job.allreduce({tag: (data.draw(sizes), 4), tag + 1: (data.draw(sizes), 4)})
    end = len(job.frames)
    gone = {
        i
        for first, length in data.draw(
            st.lists(st.tuples(st.integers(start, end - 1), st.integers(1, 12)), min_size=1, max_size=5)
        )
        for i in range(first, min(end, first + length))
    }
    for tag in range(6, 34):
        job.allreduce({tag: (64, 4)})
    follower = lossy(job, [i in gone for i in range(len(job.frames))])
    parts = follower.check()
    assert [parts[tag] for tag in range(12, 34)] == [1.0] * 22




@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30))
def test_disorder_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.choice((2, 3, 4))
    job = Job(world, port(world, rng.randrange(world)), seed=seed, mss=rng.choice((100, 1448)))
    job.connect()
    job.allreduce({0: (rng.choice((8, 6000)), 4), 1: (20_000, 4)})
    job.allreduce({2: (100, 4)})
    follower = Follower(job)
    follower.feed(disordered(job.frames, rng), per_block=rng.randint(1, 64))
    follower.finish()
    all_complete(follower)


def test_hole_in_a_final_message_is_exactly_that_hole() -> None:
    job = Job(3, [(1, 0), (0, 1)], seed=8, gap_ns=1_000_000)
    job.connect()
    job.allreduce({0: (60_000, 4)})
    final = [
        i for i, f in enumerate(job.frames) if f.link == (1, 0) and len(f.payload) == job.mss
        and f.payload in job.truth[0][0].tobytes()
    ]
    gone = final[len(final) // 2]
    follower = lossy(job, [i == gone for i in range(len(job.frames))])
    follower.check()
    landing = follower.decoder.landing("g", 0)
    assert landing is not None
    at = job.truth[0][0].tobytes().index(job.frames[gone].payload)
    assert [at, job.mss] in landing.holes()
    assert follower.decoder.counters["framing_lost"] == 0


def test_values_flow_straight_again_after_enough_whole_collectives() -> None:
    job = Job(3, port(3, 1), seed=8, gap_ns=1_000_000)
    job.connect()
    for tag in range(40):
        job.allreduce({tag: (4000, 4)})
    lost = next(i for i, f in enumerate(job.frames) if f.link == (1, 0) and i > 100 and f.payload[8:9] == b"\x01")
    follower = Follower(job)
    follower.feed([f for i, f in enumerate(job.frames) if i != lost])
    follower.finish()
    parts = follower.check()
    incomplete = [tag for tag, part in parts.items() if part < 1.0]
    assert incomplete == [e.tags[0] for e in follower.events if isinstance(e, LinkLost)]
    assert len(incomplete) <= 1
    counters = follower.decoder.counters
    assert counters["resynced"] == counters["framing_lost"] == 1


def test_connection_seen_from_the_middle() -> None:
    job = Job(4, port(4, 1), seed=21, gap_ns=1_000_000)
    job.connect()
    for tag in range(24):
        job.allreduce({tag: (20_000, 4)})
    for start in (len(job.frames) // 7, len(job.frames) // 5):
        follower = Follower(job)
        follower.feed(job.frames[start:])
        follower.finish()
        parts = follower.check()
        assert [parts[tag] for tag in range(12, 24)] == [1.0] * 12
        assert follower.decoder.counters["resynced"] > 0


def test_payloads_in_a_gap_are_counted_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number of payloads that a gap swallowed is called known, it is the true one."""
    settled: list[tuple[int, int, int, list]] = []

    def spy(lanes: LaneTable, lane: int) -> list:
        row = lanes.state.lanes[lane].copy()
        result = after_gap(lanes, lane)
        if row[g.GAP_KNOWN]:
            settled.append((int(row[g.FLOW]), int(row[g.GAP_START]), int(row[g.POSITION]) - 48, result))
        return result

    monkeypatch.setattr("reconstruct.gloo.reports.after_gap", spy)
    known = unknown = swallowed = 0
    for seed in range(40):
        rng = random.Random(seed)
        world = rng.choice((2, 3))
        job = Job(world, port(world, 1), seed=seed, gap_ns=1_000_000)
        job.connect()
        start = len(job.frames)
        for tag in range(0, 40, 2):
            job.allreduce({tag: (rng.choice((600, 30_000, 90_000)), 4), tag + 1: (rng.choice((4000, 50_000)), 4)})
        gone = {i for i in range(start, len(job.frames)) if rng.random() < 0.003}
        for i in list(gone):
            gone |= set(range(i, min(len(job.frames), i + rng.choice((1, 1, 1, 2, 12)))))
        settled.clear()
        follower = lossy(job, [i in gone for i in range(len(job.frames))])
        follower.check()
        for flow, first, end, slots in settled:
            source, destination = follower.flows.endpoint_src(flow), follower.flows.endpoint_dst(flow)
            link = (int(source[0].split(".")[3]) - 1, int(destination[0].split(".")[3]) - 1)
            assert any(offset == first for offset, _, _ in job.starts[link])
            for slot in slots:
                inside = [(code, s) for o, code, s in job.starts[link] if first <= o < end]
                assert slot.lost in (None, inside.count((1, slot.slot)))
                known += slot.lost is not None
                unknown += slot.lost is None
                swallowed += bool(slot.lost)
    assert known > 100 and swallowed > 10, (known, unknown, swallowed)


def test_collective_hidden_in_a_gap_stays_hidden() -> None:
    """Tag 11 sends its first message in the gap; tags that are whole afterwards do not make the rest of it certain."""
    for whole in (1, 2):
        job = Job(2, port(2, 0), seed=3, gap_ns=1_000_000)
        job.connect()
        hidden = job.queues({11: (8000, 4)})
        queue = next(q for q in hidden if q[0][0] == (1, 0))
        first = len(job.frames)
        link, tag, body = queue.pop(0)
        job.message(link, ALLREDUCE, tag, body)
        gone = range(first, len(job.frames))
        for number in range(whole):
            job.allreduce({10 - number: (80, 4)})
        for rest in hidden:
            for link, tag, body in rest:
                job.message(link, ALLREDUCE, tag, body)
        follower = lossy(job, [i in gone for i in range(len(job.frames))])
        parts = follower.check()
        assert parts[11] == 0.5 and parts[10] == 1.0


def test_raw_messages_under_loss() -> None:
    """Placed afterwards, too, only what is certain; and a broadcast with a hole says so."""
    placed, broken = 0, 0
    for seed in range(25):
        rng = random.Random(seed)
        job = Job(3, port(3, 1), seed=seed, gap_ns=1_000_000)
        job.connect()
        job.message((0, 1), BROADCAST, 50, bytes(range(256)) * 40)
        for tag in range(4):
            job.allreduce({tag: (30_000, 4)})
        follower = Follower(job)
        follower.decoder.planner = lambda r: RAW
        follower.feed([f for f in job.frames if not f.payload or len(f.payload) < 10 or rng.random() > 0.02])
        no_dangling_addresses(follower.decoder)
        follower.finish()
        for tag in range(4):
            follower.decoder.place("g", tag, 30_000, 4)
        no_dangling_addresses(follower.decoder)
        placed += sum(part == 1.0 for part in follower.check().values())
        for event in follower.events:
            if isinstance(event, Message) and event.tag == 50:
                assert event.kind == BROADCAST and event.length == 10_240 and event.data is not None
                assert not event.complete or event.data.tobytes() == bytes(range(256)) * 40
                broken += not event.complete
    assert placed > 10 and broken > 0


def test_gap_decomposition() -> None:
    big, other = 806_404, 500_000
    closed = [Pending([big, big]), Pending([other])]
    assert lost_payloads(48 + big, closed, True) == [1, 0]
    assert lost_payloads(48 + big + 96, closed, True) == [1, 0]
    assert lost_payloads(2 * (48 + big) + 48, closed, True) == [2, 0]
    assert lost_payloads(48 + other, closed, True) == [0, 1]
    assert lost_payloads(2 * 48 + other + big, closed, True) == [1, 1]
    assert lost_payloads(48 * 3, closed, True) == [0, 0]
    assert lost_payloads(48 * (MAX_NOTICES + 1), closed, True) == [None, None]  # no decomposition at all
    assert lost_payloads(49, closed, True) == [None, None]
    assert lost_payloads(48 + big, [Pending([big]), Pending([big])], True) == [None, None]
    assert lost_payloads(48 * 4, [Pending([96])], True) == [None]  # payload or notifications
    assert lost_payloads(48 + big, closed, False) == [None, None]
    assert lost_payloads(1448, closed, False) == [0, 0]
    assert lost_payloads(1448, [Pending([])], False) == [None]
    assert lost_payloads(48 + big, [Pending([big] * 20)], True) == [None]
