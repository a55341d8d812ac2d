"""The gloo decoder on recorded jobs and on synthetic traffic: right values, nothing else, under any loss."""

from __future__ import annotations

import json
import random
import struct
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gloo_traffic import Follower, Frame, Job, Link, port, preamble, ring_messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.memory import address_of
from mirror.tcp import TcpReassembler
from reconstruct import gloo_state as g
from reconstruct import schedule
from reconstruct.framing import MAX_NOTICES, Pending, lost_payloads
from reconstruct.gloo import (
    ALLREDUCE,
    BROADCAST,
    IGNORE,
    KIND_NAMES,
    LENGTHS,
    NOT_THIS_SIZE,
    RAW,
    AllReduce,
    Conflict,
    Event,
    FlowClosed,
    GlooDecoder,
    Group,
    LinkLost,
    Message,
    Plan,
    Reduced,
    Request,
)
from reconstruct.gloo_lanes import LaneTable
from reconstruct.gloo_recovery import after_gap
from reconstruct.tcpstore import StoreWatcher, groups

# Recorded jobs


class Recording:
    """A capture decoded with the listener table that its own rendezvous shows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flows = Flows(1024)
        tcp, watcher = TcpReassembler(flows), StoreWatcher(flows)
        for spans in self._spans(tcp):
            watcher.feed(spans)
        (self.group,) = groups(watcher.records)

    def _spans(self, tcp: TcpReassembler):
        source = CaptureFileSource([self.path])
        while (block := source.read(0.0)) is not None:
            yield tcp.feed(block, int(block.ts[-1]))
            source.release(block)
        yield tcp.flush(1 << 62)
        source.close()

    def decode(self, planner) -> tuple[GlooDecoder, list[Event]]:
        flows = Flows(1024)
        decoder = GlooDecoder(flows)
        decoder.add_group(self.group)
        decoder.planner = planner
        events: list[Event] = []
        for spans in self._spans(TcpReassembler(flows)):
            events += decoder.feed(spans, 0)
        return decoder, events


@pytest.mark.parametrize(("name", "order"), [("nano", ["weight"]), ("scalar3", ["bias", "weight"])])
def test_every_gradient_of_a_recorded_job(shared: Path, name: str, order: list[str]) -> None:
    truth = json.loads((shared / "captures" / "gloo" / f"{name}.json").read_text())
    recording = Recording(shared / "captures" / "gloo" / f"{name}.pcap")
    size = int(truth["ddp_logging"]["bucket_sizes"])

    def planner(request: Request) -> Plan:
        return AllReduce(size, 4) if request.kind == ALLREDUCE else RAW

    decoder, events = recording.decode(planner)
    reduced = [e for e in events if isinstance(e, Reduced)]
    assert [e.tag for e in reduced] == [3, 6, 7, 8, 9, 10]
    assert not [e for e in events if isinstance(e, LinkLost | Conflict)]
    for step, (event, expected) in enumerate(zip(reduced, truth["grad_after_allreduce"], strict=True)):
        # The first bucket has the parameters in index order, the rebuilt one in the order on the wire.
        names = ["weight", "bias"][: len(order)] if step == 0 else order
        values = np.concatenate([np.array([float.fromhex(x) for x in expected[n]], np.float32) for n in names])
        assert event.landing.data.tobytes() == values.tobytes(), step
        assert event.landing.complete and event.landing.holes() == []
        assert event.landing.time > 0
    layout = {e.tag: e.data.view(np.int32).tolist() for e in events if isinstance(e, Message) and e.tag in (4, 5)}
    count = int(truth["ddp_logging"]["num_parameter_tensors"])
    rebuilt = [int(i) for i in truth["ddp_logging"]["rebuilt_per_bucket_param_indices"].split()]
    assert layout == {4: [*rebuilt, 1], 5: [count]}
    assert decoder.coverage(recording.group.name) == 1.0
    assert decoder.max_tag(recording.group.name) == 11
    closed = {(e.sender, e.receiver) for e in events if isinstance(e, FlowClosed)}
    assert closed == decoder.links(recording.group.name)


COLLECTIVES = {
    0: "broadcast", 1: "all-gather", 2: "all-gather", 3: "all-reduce", 4: "reduce", 6: "scatter", 7: "all-to-all",
    8: "barrier", 11: "all-reduce", 13: "all-reduce", 14: "all-reduce", 15: "all-reduce", 16: "all-gather",
    17: "all-reduce", 18: "all-reduce", 19: "all-reduce", 20: "all-reduce", 21: "all-reduce", 22: "all-reduce",
    23: "barrier",
}
SIZES = {3: (100, 4), 11: (4, 4), 13: (8, 8), 14: (400, 4), 15: (3, 1), 17: (120, 4), 18: (120, 4), 19: (20000, 4),
         20: (20004, 4), 21: (20008, 4), 22: (20012, 4)}


def test_all_collectives_are_recognised(shared: Path) -> None:
    recording = Recording(shared / "captures" / "gloo" / "collectives.pcap")
    world = recording.group.world_size
    lengths: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))

    def planner(request: Request) -> Plan:
        return RAW if request.kind == ALLREDUCE else LENGTHS

    decoder, events = recording.decode(planner)
    for event in events:
        if isinstance(event, Message):
            assert event.complete and event.proven
            assert event.index == len(lengths[event.tag, event.kind][event.sender, event.receiver])
            lengths[event.tag, event.kind][event.sender, event.receiver].append(event.length)
        else:
            assert isinstance(event, FlowClosed)
    kinds = {tag: KIND_NAMES[kind] for tag, kind in lengths if kind}
    assert {**kinds, 5: "gather"} == {**COLLECTIVES, 5: "gather"}  # tag 12 reduced nothing
    assert {tag for tag, kind in lengths if kind == 0} == {5, 9, 10}
    # Lengths by their schedules (docs/gloo.md).
    assert lengths[0, BROADCAST] == {link: [404] for link in schedule.broadcast_links(world, 2)}
    assert set(lengths[1, 2]) == {(r, (r + 1) % world) for r in range(world)}
    assert all(sent == [14] * (2 * (world - 1)) for sent in lengths[1, 2].values())
    assert all(sent == [0] for sent in lengths[8, 7].values())
    assert {(b - a) % world for a, b in lengths[8, 7]} == {1, 2, 4}
    for tag, (size, itemsize) in SIZES.items():
        assert set(lengths[tag, ALLREDUCE]) == {(r, (r - 1) % world) for r in range(world)}
        for (sender, _), sent in lengths[tag, ALLREDUCE].items():
            assert schedule.lengths(size, itemsize, world, sender).tolist() == sent
        landing = decoder.place("/0", tag, size, itemsize)
        assert landing is not None and landing.complete  # five links agree on every byte
        assert decoder.place("/0", tag, size + itemsize, itemsize) is None
    values = decoder.landing("/0", 3)
    assert values is not None and np.array_equal(values.data.view(np.float32), 5 * np.arange(25, dtype=np.float32))
    for tag in (14, 17, 18, 19):
        landing = decoder.landing("/0", tag)
        assert landing is not None and np.unique(landing.data.view(np.float32)).tolist() == [5.0]


def test_sizes_that_do_not_fit_are_not_placed(shared: Path) -> None:
    recording = Recording(shared / "captures" / "gloo" / "collectives.pcap")
    decoder, _ = recording.decode(lambda request: RAW if request.kind == ALLREDUCE else IGNORE)
    for tag, (size, itemsize) in SIZES.items():
        for other in {size for size, _ in SIZES.values()} - {size}:
            assert decoder.place("/0", tag, other, itemsize) is None
        assert decoder.landing("/0", tag) is None


def test_two_ranks_per_host(shared: Path) -> None:
    recording = Recording(shared / "captures" / "gloo" / "torchrun_2x2.pcap")
    decoder, events = recording.decode(lambda r: AllReduce(4000, 4) if r.kind == ALLREDUCE else LENGTHS)
    (reduced,) = [e for e in events if isinstance(e, Reduced)]
    assert np.array_equal(reduced.landing.data.view(np.float32), np.full(1000, 10, np.float32))
    assert decoder.links("/default_pg/0") == {(a, b) for a in range(4) for b in range(4) if a // 2 != b // 2}
    assert {(e.sender, e.receiver) for e in events if isinstance(e, Message)} <= decoder.links("/default_pg/0")


# Synthetic traffic, no loss


def _no_dangling_addresses(decoder: GlooDecoder) -> None:
    """Every address that the kernel may write to or read from belongs to memory that is still held."""
    held, state = decoder._held, decoder._lanes.state
    landings = {landing.address for landing in held._all.values()}
    raw = {address_of(m.data) for links in held.raw.values() for link in links.values() for m in link.messages
           if m.data is not None}
    raw |= {address_of(m.data) for m in held.filling.values() if m.data is not None}
    for lane in np.flatnonzero(state.lanes[:, g.FLOW] >= 0):
        row, entries, recent = state.lanes[lane], state.entries[lane], state.recent[lane]
        used = entries[np.isin(entries[:, g.PLAN], (g.REDUCE, g.DONE)) & (entries[:, g.SLOT] >= 0)]
        assert {int(a) for a in used[:, g.META]} <= landings
        assert {int(a) for a in recent[recent[:, g.R_KIND] == g.TO_LANDING, g.R_ADDRESS]} <= landings
        assert {int(a) for a in recent[recent[:, g.R_KIND] == g.TO_MEMORY, g.R_ADDRESS]} <= raw
        if row[g.MODE] == g.PAYLOAD and row[g.DEST_KIND] != g.NOWHERE:
            assert int(row[g.DEST]) in (landings if row[g.DEST_KIND] == g.TO_LANDING else raw)
    sizes = sum(x.size for x in held._all.values())
    sizes += sum(m.length for links in held.raw.values() for link in links.values() for m in link.messages
                 if m.data is not None) + sum(m.length for m in held.filling.values() if m.data is not None)
    assert held.budget.used == sizes


def _whole(follower: Follower) -> None:
    """Every all-reduce of the job is complete, once, and nothing else was reported."""
    assert set(follower.check().values()) == {1.0}
    assert sorted(e.tag for e in follower.events if isinstance(e, Reduced)) == sorted(follower.job.truth)
    assert all(isinstance(e, Reduced | FlowClosed) for e in follower.events)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_one_port_shows_everything(world: int) -> None:
    for rank in {0, 1, world - 1}:
        job = Job(world, port(world, rank), seed=world * 10 + rank)
        job.connect()
        job.allreduce({0: (4, 4), 1: (8, 4), 2: (100, 4)})
        job.allreduce({3: (40000, 4), 4: (333, 1), 5: (200_002, 2)})
        job.close()
        follower = Follower(job)
        follower.feed(job.frames)
        follower.finish()
        _whole(follower)
        assert follower.decoder.coverage("g") == 1.0
        assert all(follower.decoder.settled("g", tag) for tag in job.truth)


@pytest.mark.parametrize(
    ("links", "shown"),
    [([(1, 0)], 0.75), ([(1, 0), (2, 1)], 1.0), ([(3, 2), (1, 0)], 1.0), ([(0, 1), (0, 2), (1, 2)], 0.0)],
)
def test_links_that_show_a_part(links: list[tuple[int, int]], shown: float) -> None:
    job = Job(4, links, seed=3)
    job.connect()
    job.allreduce({0: (80_000, 4), 1: (4_000, 4)})
    follower = Follower(job, blind_timeout_ns=1000)
    follower.feed(job.frames)
    follower.finish()
    assert set(follower.check().values()) == {shown}
    assert follower.decoder.coverage("g") == shown
    assert follower.decoder.links("g") == set(links) - {(0, 2)}  # 0 -> 2 is silent in a ring
    landing = follower.decoder.landing("g", 0)
    if shown == 0.75:  # chunk 0 is what rank 1 never sends to rank 0
        assert landing is not None and landing.holes() == [[0, 20_000]]


def test_in_any_segmentation() -> None:
    job = Job(3, port(3, 1), seed=9)
    job.connect()
    rng = random.Random(2)
    for tag in range(100, 104):
        job.send((1, 0), preamble(2, ALLREDUCE, tag, 40), cut=rng.randint(1, 50))
        job.send((1, 0), preamble(3, ALLREDUCE, tag, 40), cut=rng.randint(1, 50))
    job.allreduce({0: (3000, 4)})
    small = Job(3, port(3, 1), seed=9, mss=7)
    small.connect()
    small.allreduce({0: (3000, 4), 1: (12, 4)})
    for case in (job, small):
        follower = Follower(case)
        follower.feed(case.frames, per_block=rng.randint(1, 30))
        follower.finish()
        assert set(follower.check().values()) == {1.0}


def test_ranks_from_hello_socket_or_address() -> None:
    job = Job(3, [(2, 1)], seed=5)
    job.connect()
    job.allreduce({0: (600, 4)})
    table = job.group().contexts[0]
    for contexts in ([{1: table[1]}], [table]):  # by the hello: rank 2 connects to rank 1; by the address
        asked: list[Request] = []
        follower = Follower(job, group=False)
        follower.decoder.planner = lambda r, asked=asked: asked.append(r) or AllReduce(600, 4)
        follower.decoder.add_group(Group("g", 3, contexts))
        follower.feed(job.frames)
        assert [(r.sender, r.receiver) for r in asked] == [(2, 1)]
    other = Job(3, [(1, 2)], seed=5)  # rank 1 is the listener; the hello travels the other way, unseen
    other.connect()
    other.message((1, 2), 2, 0, bytes(8))
    source, destination = other.ends((1, 2))
    for sockets, expected in (({}, -1), ({("10.0.0.2", source, "10.0.0.3", destination): (1, 2)}, 2)):
        asked = []
        follower = Follower(other, group=False)
        follower.decoder.planner = lambda r, asked=asked: asked.append(r) or IGNORE
        follower.decoder.add_group(Group("g", 3, [{1: table[1]}], sockets))
        follower.feed(other.frames)
        assert [(r.sender, r.receiver) for r in asked] == [(1, expected)]


# Groups


def test_group_added_late() -> None:
    job = Job(3, port(3, 1), seed=4)
    job.connect()
    job.allreduce({0: (5000, 4)})
    middle = len(job.frames)
    job.allreduce({1: (5000, 4)})
    inside = (middle + len(job.frames)) // 2
    job.allreduce({2: (5000, 4), 3: (8, 4)})
    for cut in (0, 1, 3, 5, middle, inside):
        follower = Follower(job, group=False)
        follower.feed(job.frames[:cut], per_block=3)
        follower.decoder.add_group(job.group())
        follower.feed(job.frames[cut:], per_block=3)
        parts = follower.check()
        assert parts[2] == parts[3] == 1.0
        if cut == inside:
            assert parts[1] < 1.0
            lost = [e for e in follower.events if isinstance(e, LinkLost)]
            assert lost and all(e.tags == (1,) and "before the group was known" in e.reason for e in lost)
        else:
            assert parts[1] == (1.0 if cut <= middle else 0.0)


def test_group_removed_and_added_again() -> None:
    job = Job(3, port(3, 1), seed=4)
    job.connect()
    job.allreduce({0: (5000, 4)})
    first = len(job.frames)
    job.allreduce({1: (50_000, 4)})
    second = (first + len(job.frames)) // 2
    job.allreduce({2: (5000, 4)})
    follower = Follower(job)
    follower.feed(job.frames[:second])
    follower.decoder.remove_group("g")
    _no_dangling_addresses(follower.decoder)
    assert follower.decoder.counters["memory_bytes"] <= 60_000
    follower.decoder.remove_group("g")
    follower.decoder.add_group(job.group())
    follower.feed(job.frames[second:])
    parts = follower.check()
    assert parts[0] == 0.0 and parts[2] == 1.0 and parts[1] < 1.0


def test_two_groups_with_the_same_members() -> None:
    one = Job(3, port(3, 1), seed=1)
    two = Job(3, port(3, 1), seed=2, base_port=41000)
    for job in (one, two):
        job.connect()
        job.allreduce({0: (4000, 4), 1: (40, 4)})
    follower = Follower(one, group=False)
    follower.decoder.planner = lambda r: AllReduce(len(one.truth[r.tag][0]), 4)
    follower.decoder.add_group(one.group("one"))
    follower.decoder.add_group(two.group("two"))
    # The second group's connections have other ports; both are captured together.
    for job in (one, two):
        for i in range(0, len(job.frames), 20):
            block = job.block(job.frames[i : i + 20])
            follower.take(follower.tcp.feed(block, int(block.ts[-1])), 0)
    for name, job in (("one", one), ("two", two)):
        for tag, (values, _) in job.truth.items():
            landing = follower.decoder.landing(name, tag)
            assert landing is not None and landing.complete
            assert np.array_equal(landing.data, values)


def test_groups_that_cannot_be() -> None:
    decoder = GlooDecoder(Flows(16))
    decoder.add_group(Group("a", 2, [{0: ("10.0.0.1", 1), 1: ("10.0.0.2", 2)}]))
    for bad in (
        Group("a", 2, []),
        Group("b", 1, []),
        Group("b", 2, [{0: ("::ffff:10.0.0.1", 1)}]),
        Group("b", 2, [{2: ("10.0.0.3", 1)}]),
        Group("b", 2, [{0: ("host", 1)}]),
        Group("b", 2, [{0: ("10.0.0.3", 0)}]),
    ):
        with pytest.raises(ValueError):
            decoder.add_group(bad)


def test_two_contexts() -> None:
    even = Job(3, port(3, 1), seed=1)
    odd = Job(3, port(3, 1), seed=2, base_port=42000)
    even.connect()
    even.allreduce({0: (4000, 4), 2: (40, 4)})
    odd.connect()
    odd.allreduce({1: (400, 4)})
    follower = Follower(even, group=False)
    sizes = {0: 4000, 1: 400, 2: 40}
    requests: list[Request] = []
    follower.decoder.planner = lambda r: requests.append(r) or AllReduce(sizes[r.tag], 4)
    contexts = [even.group().contexts[0], odd.group().contexts[0]]
    follower.decoder.add_group(Group("g", 3, contexts))
    follower.feed(even.frames)
    assert follower.decoder.coverage("g") == 0.5
    for i in range(0, len(odd.frames), 50):
        block = odd.block(odd.frames[i : i + 50])
        follower.take(follower.tcp.feed(block, int(block.ts[-1])), 0)
    assert {(r.tag, r.context) for r in requests} == {(0, 0), (1, 1), (2, 0)}
    assert follower.decoder.coverage("g") == 1.0


# Loss


def _lossy(job: Job, drop: list[bool], **options: int) -> Follower:
    follower = Follower(job, **options)
    follower.feed([f for f, gone in zip(job.frames, drop, strict=True) if not gone])
    follower.finish()
    return follower


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
        follower = _lossy(job, [i < tail and rng.random() < rate for i in range(len(job.frames))])
        parts = follower.check()
        _no_dangling_addresses(follower.decoder)
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
    follower = _lossy(job, [i in gone for i in range(len(job.frames))])
    parts = follower.check()
    assert [parts[tag] for tag in range(12, 34)] == [1.0] * 22


def _disordered(frames: list[Frame], rng: random.Random) -> list[Frame]:
    """Frames shuffled in a window, some twice, some cut in two; only data frames, the rest keep their places."""
    result: list[tuple[float, Frame]] = []
    for i, frame in enumerate(frames):
        parts = [frame]
        if len(frame.payload) > 1 and rng.random() < 0.1:
            at = rng.randrange(1, len(frame.payload))
            parts = [
                replace(frame, payload=frame.payload[:at]),
                replace(frame, payload=frame.payload[at:], sequence=(frame.sequence + at) & 0xFFFFFFFF),
            ]
        if frame.payload and rng.random() < 0.1:
            parts.append(rng.choice(parts))
        result += [(i + (rng.uniform(0, 6) if frame.payload else 0), part) for part in parts]
    return [frame for _, frame in sorted(result, key=lambda pair: pair[0])]


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
    follower.feed(_disordered(job.frames, rng), per_block=rng.randint(1, 64))
    follower.finish()
    _whole(follower)


def test_hole_in_a_final_message_is_exactly_that_hole() -> None:
    job = Job(3, [(1, 0), (0, 1)], seed=8, gap_ns=1_000_000)
    job.connect()
    job.allreduce({0: (60_000, 4)})
    final = [
        i for i, f in enumerate(job.frames) if f.link == (1, 0) and len(f.payload) == job.mss
        and f.payload in job.truth[0][0].tobytes()
    ]
    gone = final[len(final) // 2]
    follower = _lossy(job, [i == gone for i in range(len(job.frames))])
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

    monkeypatch.setattr("reconstruct.gloo_reports.after_gap", spy)
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
        follower = _lossy(job, [i in gone for i in range(len(job.frames))])
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
        follower = _lossy(job, [i in gone for i in range(len(job.frames))])
        parts = follower.check()
        assert parts[11] == 0.5 and parts[10] == 1.0


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
    _whole(follower)


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
        _no_dangling_addresses(follower.decoder)
        follower.finish()
        for tag in range(4):
            follower.decoder.place("g", tag, 30_000, 4)
        _no_dangling_addresses(follower.decoder)
        placed += sum(part == 1.0 for part in follower.check().values())
        for event in follower.events:
            if isinstance(event, Message) and event.tag == 50:
                assert event.kind == BROADCAST and event.length == 10_240 and event.data is not None
                assert not event.complete or event.data.tobytes() == bytes(range(256)) * 40
                broken += not event.complete
    assert placed > 10 and broken > 0


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
            _no_dangling_addresses(follower.decoder)
            follower.decoder.retire("g", 1)
            _no_dangling_addresses(follower.decoder)
            follower.feed(job.frames[cut:], per_block=8)
            _no_dangling_addresses(follower.decoder)
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
    _whole(follower)


# Hostile input


def _stream(payloads: list[bytes]) -> Job:
    job = Job(2, [(1, 0), (0, 1)])
    job.connect()
    for payload in payloads:
        job.send((1, 0), payload)
    return job


@pytest.mark.parametrize(
    "fields",
    [
        (48, 0, ALLREDUCE << 56, 0, 0, 0),
        (48, 4, ALLREDUCE << 56, 0, 0, 0),
        (49, 2, ALLREDUCE << 56, 0, 0, 0),
        (48, 1, ALLREDUCE << 56, 0, 8, 0),
        ((1 << 64) - 1, 1, ALLREDUCE << 56, 0, (1 << 64) - 49, 0),
        (48 + (1 << 50), 1, BROADCAST << 56, 0, 1 << 50, 0),
        (48 + (2 << 20), 1, ALLREDUCE << 56, 0, 2 << 20, 0),
        (48, 2, 9 << 56, 0, 0, 0),
        (48, 2, (1 << 63) | 5, 0, 0, 0),
        (48, 2, ALLREDUCE << 56 | 1 << 8, 0, 0, 0),
        (48, 2, ALLREDUCE << 56, 1, 0, 0),
        (48, 2, ALLREDUCE << 56, 0, 0, 1),
    ],
)
def test_impossible_preambles(fields: tuple[int, ...]) -> None:
    job = _stream([struct.pack("<6Q", *fields), bytes(500), preamble(2, ALLREDUCE, 7, 100)])
    follower = Follower(job)
    follower.feed(job.frames)
    assert follower.decoder.counters["bad_preambles"] == 1
    assert follower.decoder.counters["resynced"] == 1
    assert follower.decoder.counters["placed_bytes"] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda op, kind, tag, n, body: preamble(op, kind, tag, n) + body,
        st.integers(0, 4), st.integers(0, 9), st.integers(0, 40), st.integers(0, 300), st.binary(max_size=300),
    ),
), max_size=30), st.booleans())
def test_any_bytes(payloads: list[bytes], known: bool) -> None:
    job = _stream(payloads)
    for plan in (RAW, LENGTHS, AllReduce(64, 4)):
        follower = Follower(job, group=known)
        follower.decoder.planner = lambda r, plan=plan: plan if r.kind == ALLREDUCE or plan is RAW else IGNORE
        follower.feed(job.frames, per_block=4)
        follower.finish()
        for tag in range(41):
            landing = follower.decoder.landing("g", tag) if known else None
            assert landing is None or not landing.complete or sum(map(len, payloads)) > 64


def test_other_protocols_cost_nothing() -> None:
    job = Job(2, [(1, 0), (0, 1)])
    for link in job.mirrored:
        job._flags(link, 0x02)
    for _ in range(20):
        job.send((1, 0), b"GET / HTTP/1.1\r\n" + bytes(100))
        job.send((0, 1), bytes(1000))
    follower = Follower(job, group=False)
    follower.feed(job.frames)
    assert [follower.decoder.flow_kind(f) for f in range(2)] == ["other", "other"]
    assert follower.decoder.counters["flows"] == 0


def test_encrypted_gloo_is_named() -> None:
    for known in (True, False):
        job = Job(2, [(1, 0), (0, 1)])
        job.connect()
        job.send((1, 0), b"\x16\x03\x01" + bytes(200))
        follower = Follower(job, group=known)
        follower.feed(job.frames)
        if known:
            (lost,) = [e for e in follower.events if isinstance(e, LinkLost)]
            assert "encrypted" in lost.reason
        else:
            assert "tls" in [follower.decoder.flow_kind(f) for f in range(2)]


def test_flow_limit() -> None:
    job = Job(12, port(12, 0), seed=1)
    job.connect()
    job.allreduce({0: (4000, 4)})
    follower = Follower(job)
    follower.decoder = GlooDecoder(follower.flows, max_lanes=4)
    follower.decoder.planner = lambda r: AllReduce(4000, 4)
    follower.decoder.add_group(job.group())
    follower.feed(job.frames)
    assert follower.decoder.counters["flows"] == 4
    assert follower.decoder.counters["flows_refused"] > 0


# The proof after a gap


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


# Cost


def test_python_calls_do_not_grow_with_frames() -> None:
    job = Job(4, [(1, 0), (2, 1), (0, 1), (1, 2)], seed=1)
    job.connect()
    job.allreduce({0: (4000, 4)})
    warm = len(job.frames)
    job.allreduce({1: (8 << 20, 4)})
    follower = Follower(job)
    follower.feed(job.frames[:warm])
    frames = len(job.frames) - warm
    blocks = [job.block(job.frames[i : i + 1000]) for i in range(warm, len(job.frames), 1000)]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for block in blocks:
        spans = follower.tcp.feed(block, int(block.ts[-1]))
        sys.setprofile(count)
        follower.decoder.feed(spans, 0)
        sys.setprofile(None)
    assert follower.check()[1] == 1.0
    assert frames > 15_000
    # A few per block, some hundred for the plans of the collective's links and for its end.
    assert calls < 20 * len(blocks) + 400, calls
    assert calls / (frames / 1000) < 45
