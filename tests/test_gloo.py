"""The gloo decoder on recorded jobs and on whole synthetic traffic; groups; what it costs."""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gloo_traffic import (
    Follower,
    Job,
    all_complete,
    no_dangling_addresses,
    port,
    preamble,
)

from mirror.block import Block
from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.tcp import TcpReassembler
from reconstruct.decoder import (
    ALLREDUCE,
    BROADCAST,
    IGNORE,
    KIND_NAMES,
    LENGTHS,
    RAW,
    AllReduce,
    Conflict,
    Event,
    FlowClosed,
    LinkLost,
    Message,
    Plan,
    Reduced,
    Request,
)
from reconstruct.gloo import schedule
from reconstruct.gloo.decoder import GlooDecoder
from reconstruct.gloo.events import Group
from reconstruct.observe.tcpstore import StoreWatcher, groups


class Recording:
    """A capture decoded with the listener table that its own rendezvous shows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flows = Flows(1024)
        tcp, watcher = TcpReassembler(flows), StoreWatcher(flows)
        for spans in self._spans(tcp):
            watcher.feed(spans)
        (self.group,) = groups(watcher.records)

    def _spans(self, tcp: TcpReassembler, drop: tuple[float, int] | None = None):
        source = CaptureFileSource([self.path])
        while (block := source.read(0.0)) is not None:
            now = int(block.ts[-1])
            if drop:
                kept = np.array([self._kept(block, i, *drop) for i in range(len(block))])
                columns = ("offset", "caplen", "wirelen", "ts", "vlan")
                block = replace(block, **{name: getattr(block, name)[kept] for name in columns})
            yield tcp.feed(block, now)
            source.release(block)
        yield tcp.flush(1 << 62)
        source.close()

    @staticmethod
    def _kept(block: Block, i: int, rate: float, seed: int) -> bool:
        """Both copies of a frame (the capture has most of them twice) share their fate."""
        frame = block.base[block.offset[i] : block.offset[i] + block.caplen[i]].tobytes()
        here = bytes((10, 77, 0, 2)) in (frame[26:30], frame[30:34])
        return here and zlib.crc32(frame, seed) >= rate * 2**32

    def decode(self, planner, drop: tuple[float, int] | None = None) -> tuple[GlooDecoder, list[Event]]:
        """drop: (part of the frames that are lost, seed); only what passes the port of rank 1 is kept then."""
        flows = Flows(1024)
        decoder = GlooDecoder(flows)
        decoder.add_group(self.group)
        decoder.planner = planner
        events: list[Event] = []
        for spans in self._spans(TcpReassembler(flows), drop):
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


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05])
def test_recorded_collectives_with_dropped_frames(shared: Path, rate: float) -> None:
    recording = Recording(shared / "captures" / "gloo" / "collectives.pcap")

    def planner(request: Request) -> Plan:
        return AllReduce(*SIZES[request.tag]) if request.kind == ALLREDUCE else IGNORE

    truth, _ = recording.decode(planner)
    incomplete = 0
    for seed in range(6):
        decoder, events = recording.decode(planner, drop=(rate, seed + 1))
        complete = {e.tag for e in events if isinstance(e, Reduced)}
        for tag, (size, _) in SIZES.items():
            landing, right = decoder.landing("/0", tag), truth.landing("/0", tag)
            assert right is not None and right.complete
            if landing is None:
                continue
            seen = np.ones(size, bool)
            for offset, length in landing.holes():
                seen[offset : offset + length] = False
            assert np.array_equal(landing.data[seen], right.data[seen]), (seed, tag)
            assert landing.complete == bool(seen.all()) == (tag in complete)
            incomplete += not landing.complete
        no_dangling_addresses(decoder)
    assert incomplete > 0 or rate == 0.001


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
        all_complete(follower)
        assert follower.decoder.coverage("g") == 1.0
        assert all(follower.decoder.settled("g", tag, 1 << 62) for tag in job.truth)


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
    no_dangling_addresses(follower.decoder)
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
