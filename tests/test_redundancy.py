"""Several mirrors of one job: what one lost the other fills in, what differs is an alarm, nothing wrong is known."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import gloo_traffic
import numpy as np
import pytest
from gloo_traffic import Follower
from mirrors import Frame, MemorySource, injured, known, read_in_turn, surviving
from nccl_traffic import Rig, Sender, group_of, seen_at
from tunnel_frames import erspan2

from flowcheck.capture import RING_DELAY, CaptureThread, Reached
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.nccl_wire_payload import storage
from flowcheck.pipeline import Limits, Pipeline
from mirror.block import pack
from mirror.flows import Flows
from mirror.tcp import TcpReassembler
from mirror.vantage import Vantage
from reconstruct.decoder import IGNORE, RAW, AllReduce, Conflict, LinkLost, Plan, Request
from reconstruct.gloo.decoder import GlooDecoder
from reconstruct.steps import Waits

MS = 1_000_000
WINDOWS = [0, MS, 50 * MS]
"""Mixed by time; read in turn, each as often as a ring retires its blocks; by a reader that is late."""


class Gloo:
    """Traffic of `wire` through transport and decoder, as from several mirrors. raw: sizes are told in the end."""

    def __init__(self, wire: gloo_traffic.Job, *, raw: bool = False, vantage: Vantage | None = None,
                 pipeline: Pipeline | None = None) -> None:  # fmt: skip
        self.wire, self.raw = wire, raw
        flows = Flows(256)
        self.tcp = TcpReassembler(flows, vantage=vantage) if pipeline is None else pipeline.tcp
        self.decoder = GlooDecoder(flows) if pipeline is None else pipeline.gloo
        self.decoder.planner = self._plan
        self.decoder.add_group(wire.group())
        self.events: list[object] = []

    def _plan(self, request: Request) -> Plan:
        if request.tag not in self.wire.truth:
            return IGNORE
        data, itemsize = self.wire.truth[request.tag]
        return RAW if self.raw else AllReduce(data.size, itemsize)

    def run(self, mirrors: list[list[Frame]], window: int) -> Gloo:
        reached = [0] * len(mirrors)
        which = {id(frame): number for number, frames in enumerate(mirrors) for frame in frames}
        for some in read_in_turn(mirrors, window):
            block = pack([data for _, data in some], [ts for ts, _ in some])
            if window:
                reached[which[id(some[0])]] = some[-1][0]
            else:
                reached = [some[-1][0]] * len(mirrors)
            self.events += self.decoder.feed(self.tcp.feed(block, min(reached)), min(reached))
        self.events += self.decoder.feed(self.tcp.flush(1 << 62), 1 << 62)
        if self.raw:
            for tag, (data, itemsize) in self.wire.truth.items():
                self.decoder.place("g", tag, data.size, itemsize)
        return self

    def known(self, tag: int) -> np.ndarray:
        """bool[size]: the bytes that are known, which are right."""
        data = self.wire.truth[tag][0]
        landing = self.decoder.landing("g", tag)
        mask = known(landing, data.size)
        assert landing is None or np.array_equal(landing.data[mask], data[mask]), f"all-reduce {tag}: wrong bytes"
        return mask

    @property
    def alarms(self) -> int:
        """Differing copies that were told."""
        return sum(
            isinstance(event, Conflict) or (isinstance(event, LinkLost) and event.reason.startswith("two copies"))
            for event in self.events
        )


def gloo_job(world: int, seed: int = 0, tags: int = 24, mss: int = 1448) -> gloo_traffic.Job:
    """All-reduces two at a time, seen at rank 1's port."""
    wire = gloo_traffic.Job(world, gloo_traffic.port(world, 1), seed=seed, mss=mss)
    wire.connect()
    for tag in range(0, tags, 2):
        wire.allreduce({tag: (60_000, 4), tag + 1: (20_000, 4)})
    return wire


def gloo_frames(wire: gloo_traffic.Job) -> list[Frame]:
    block = wire.block(wire.frames)
    return [(frame.ts, block.base[at : at + size].tobytes())
            for frame, at, size in zip(wire.frames, block.offset, block.caplen, strict=True)]  # fmt: skip


NCCL = [("ring", "simple"), ("ring", "ll"), ("ring", "ll128"), ("tree", "simple"), ("tree", "ll128")]


class Nccl:
    """The same for NCCL over RoCE: five all-reduces, seen at the last node's port."""

    def __init__(self, algorithm: str, protocol: str, seed: int = 0, dtype: str = "float32") -> None:
        job = Job(2 if algorithm == "ring" else 4, version="2.28.9", algorithm=algorithm, protocol=protocol, mtu=4096)
        self.sender = Sender(job, seed=seed)
        sent = [item for _ in range(5) for item in self.sender.reduce(30_000, dtype)]
        self.frames: list[Frame] = [(ts, frame) for ts, _, frame in seen_at(job, sent, job.nodes - 1, "in", "out")]
        self.size, self.itemsize = 30_000 * storage(dtype).itemsize, storage(dtype).itemsize
        self.job = job

    def run(self, mirrors: list[list[Frame]], window: int, *, raw: bool = False, check_icrc: bool = True) -> Rig:
        rig = Rig(group_of(self.job), {(self.size, self.itemsize)}, raw=raw, check_icrc=check_icrc)
        for some in read_in_turn(mirrors, window):
            rig.now = max(rig.now, some[-1][0])
            rig._take(rig.roce.feed(pack([data for _, data in some], [ts for ts, _ in some]), rig.now))
        rig.finish()
        if raw:
            for tag in range(5):
                rig.decoder.place("g", tag, self.size, self.itemsize)
            rig.pass_time()
        return rig

    def known(self, rig: Rig, tag: int) -> np.ndarray:
        data = self.sender.results[tag]
        assert data is not None
        landing = rig.landing(tag)
        mask = known(landing, data.size)
        assert landing is None or np.array_equal(landing.data[mask], data[mask]), f"all-reduce {tag}: wrong bytes"
        return mask


# Lost frames


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("world", "rate", "mirrors", "all_lost"), [
    (2, 0.01, 2, 0), (3, 0.01, 2, 0), (2, 0.1, 3, 1), (4, 0.1, 2, 37)])  # fmt: skip
def test_gloo_knows_all_that_any_mirror_has(world: int, rate: float, mirrors: int, all_lost: int, window: int) -> None:
    """Exactly what one mirror would show that has lost only what all have lost."""
    wire = gloo_job(world, seed=1)
    frames = gloo_frames(wire)
    specs = [f"drop={rate},seed=1"] * mirrors
    both = Gloo(wire).run([injured(frames, spec, str(number)) for number, spec in enumerate(specs)], window)
    left = surviving(frames, specs)
    assert len(left) == len(frames) - all_lost
    one = Gloo(wire).run([left], 0)
    for tag in wire.truth:
        assert np.array_equal(both.known(tag), one.known(tag)), f"all-reduce {tag}"
    assert both.alarms == 0
    if all_lost:
        assert both.tcp.counters()["hole_bytes"] > 0
    else:
        assert all(both.known(tag).all() for tag in wire.truth)
        assert both.tcp.counters()["hole_bytes"] == 0
        alone = Gloo(wire).run([injured(frames, specs[0], "0")], 0)
        assert alone.tcp.counters()["hole_bytes"] > 10_000
        assert not all(alone.known(tag).all() for tag in wire.truth)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("algorithm", "protocol"), NCCL)
def test_nccl_knows_all_that_any_mirror_has(algorithm: str, protocol: str, window: int) -> None:
    traffic = Nccl(algorithm, protocol)
    for rate in (0.01, 0.1):
        specs = [f"drop={rate},seed=3"] * 2
        shown = [injured(traffic.frames, spec, str(number)) for number, spec in enumerate(specs)]
        both = traffic.run(shown, window)
        left = surviving(traffic.frames, specs)
        one = traffic.run([left], 0)
        for tag in range(5):
            assert np.array_equal(traffic.known(both, tag), traffic.known(one, tag)), f"all-reduce {tag}"
        if len(left) == len(traffic.frames):
            assert all(traffic.known(both, tag).all() for tag in range(5))
        assert not both.conflicts
        assert len(shown[0]) < len(traffic.frames) > len(shown[1])


@pytest.mark.parametrize("first", [0, 1])
def test_a_late_reader_of_several_rings_gives_nothing_up_that_the_next_one_holds(first: int) -> None:
    """Blocks of 100 ms and more, while a gap below an acknowledgment ends after 20."""
    wire = gloo_job(2, seed=1)
    frames = gloo_frames(wire)
    shown = [injured(frames, "drop=0.01,seed=1", str(number)) for number in range(2)]
    sources = [MemorySource(shown[number], 1000, name=f"mon{number}") for number in (first, 1 - first)]
    pipeline = Pipeline(Limits(256, 1 << 22, 1 << 28), Waits())
    gloo = Gloo(wire, pipeline=pipeline)
    capture = CaptureThread(pipeline, sources, lambda *_: None, live=False, report=print)
    capture.run()
    assert capture.failure is None
    assert all(gloo.known(tag).all() for tag in wire.truth)
    assert gloo.tcp.counters()["hole_bytes"] == 0
    assert not any(source.held for source in sources)


def test_time_goes_on_with_the_source_that_is_furthest_behind() -> None:
    sources = [MemorySource([], 1, live=True), MemorySource([], 1)]
    live = Reached(sources, True)
    block = pack([b"x", b"x"], [5_000_000_000, 7_000_000_000])
    assert live.now == 0
    live.read(0, block, 1)
    assert live.now == 0
    live.read(1, None, 6_000_000_000)
    assert live.now == 6_000_000_000 - RING_DELAY
    live.read(1, None, 9_000_000_000)
    assert live.now == 7_000_000_000
    live.read(0, pack([], []), 1)
    live.read(0, None, 1)
    assert live.now == 7_000_000_000
    files = Reached(sources, False)
    files.read(0, block, 1)
    assert files.now == 0
    files.read(1, None, 1)
    assert files.now == 7_000_000_000


# Frames that come twice, late, in other clothes


def other_copy(frame: bytes, number: int) -> bytes:
    """The frame as another port shows it: one hop further, and in another VLAN."""
    ip = bytearray(frame[14:])
    if ip[0] >> 4 == 4:
        ip[8] -= 1
    return frame[:12] + b"\x81\x00" + (100 + number % 2).to_bytes(2) + frame[12:14] + bytes(ip)


COPIES = {"same": lambda frame, _: frame, "hop and VLAN": other_copy, "tunnel": lambda frame, _: erspan2(frame, 7)}


@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("far", [0, 1, 40, 1000])
def test_a_frame_that_was_mirrored_twice_does_no_harm(how: str, far: int) -> None:
    """The second copy right behind the first one or `far` frames later: no alarm, no loss, nothing counted twice."""

    def twice(frames: list[Frame]) -> list[Frame]:
        keyed = [(at, 0, frame) for at, frame in enumerate(frames)]
        keyed += [(at + far, 1, (ts, COPIES[how](data, at))) for at, (ts, data) in enumerate(frames)]
        return [frame for _, _, frame in sorted(keyed, key=lambda entry: entry[:2])]

    vantage = Vantage({"fabric": ["mon0", "*>*"]})
    wire = gloo_job(3)
    gloo = Gloo(wire, vantage=vantage)
    for some in read_in_turn([twice(gloo_frames(wire))], 10 * MS):
        block = replace(pack([data for _, data in some], [ts for ts, _ in some]), vantage=vantage.of_interface("mon0"))
        gloo.events += gloo.decoder.feed(gloo.tcp.feed(block, some[-1][0]), some[-1][0])
    gloo.events += gloo.decoder.feed(gloo.tcp.flush(1 << 62), 1 << 62)
    assert all(gloo.known(tag).all() for tag in wire.truth) and gloo.alarms == 0
    counters = gloo.tcp.counters()
    assert counters["hole_bytes"] == counters["conflicts"] == 0
    assert counters["duplicate_bytes"] + counters["overlap_bytes"] + counters["probes"] >= counters["delivered_bytes"]
    if how != "tunnel":
        traffic = Nccl("ring", "ll128")
        rig = traffic.run([twice(traffic.frames)], 0)
        assert all(traffic.known(rig, tag).all() for tag in range(5)) and not rig.conflicts
        assert rig.roce.counters()["lost_packets"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_64_frames_in_any_order_tell_the_same(seed: int) -> None:
    """Readers of one ring that take turns hand whole blocks over in disorder."""
    wire = gloo_job(3, seed=seed)
    frames = gloo_frames(wire)
    spec = f"reorder=0.3:{64 * (1 + seed)}:64,seed={seed}"
    moved = injured(frames, spec, "0")
    assert moved != frames
    assert sorted(moved) == sorted(frames)
    gloo = Gloo(wire).run([moved], 0)
    assert all(gloo.known(tag).all() for tag in wire.truth)
    assert gloo.alarms == 0
    assert gloo.tcp.counters()["hole_bytes"] == 0
    for algorithm, protocol in NCCL:
        traffic = Nccl(algorithm, protocol, seed)
        rig = traffic.run([injured(traffic.frames, spec, "0")], 0)
        assert all(traffic.known(rig, tag).all() for tag in range(5))
        assert not rig.conflicts


# What differs


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("raw", [False, True], ids=["placed", "kept"])
@pytest.mark.parametrize("spec", ["corrupt=0.02", "corrupt=0.02,reorder=0.02:5,duplicate=0.05,delay=0.01:3"])
def test_gloo_with_damaged_copies_tells_them_and_knows_nothing_wrong(spec: str, raw: bool, window: int) -> None:
    """Both mirrors damage frames of their own, and lose none: what only one copy shows nobody can check. `Gloo.known`
    compares all that is known with the truth."""
    for seed in range(4):
        wire = gloo_job(2 + seed % 2, seed=seed)
        frames = gloo_frames(wire)
        shown = [injured(frames, f"{spec},seed={seed}", str(number)) for number in range(2)]
        gloo = Gloo(wire, raw=raw).run(shown, window)
        unknown = sum(int((~gloo.known(tag)).sum()) for tag in wire.truth)
        assert gloo.alarms > 10
        assert unknown > 0
        assert raw or unknown < sum(data.size for data, _ in wire.truth.values())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("raw", [False, True], ids=["placed", "kept"])
@pytest.mark.parametrize(("algorithm", "protocol"), NCCL)
def test_nccl_with_damaged_copies_tells_them_and_knows_nothing_wrong(
    algorithm: str, protocol: str, raw: bool, window: int
) -> None:
    """Where their CRCs do not tell them: else they are refused (tests/test_icrc.py)."""
    for seed in range(3):
        traffic = Nccl(algorithm, protocol, seed)
        spec = f"corrupt=0.02,reorder=0.02:5,duplicate=0.05,seed={seed}" if seed else "corrupt=0.02"
        shown = [injured(traffic.frames, spec, str(number)) for number in range(2)]
        rig = traffic.run(shown, window, raw=raw, check_icrc=False)
        for tag in range(5):
            traffic.known(rig, tag)
        assert rig.conflicts or rig.lost


def test_one_damaged_value_is_one_unknown_range() -> None:
    """A bit of a final value differs in the second copy: an alarm that names its place and link, and only that place
    is in doubt."""
    wire = gloo_job(2, tags=4)
    frames = gloo_frames(wire)
    final = wire.truth[2][0].tobytes()
    at = next(i for i, frame in enumerate(wire.frames) if len(frame.payload) > 1000 and frame.payload in final)
    ts, data = frames[at]
    bad = bytearray(data)
    bad[-100] ^= 4
    place = final.index(wire.frames[at].payload) + len(wire.frames[at].payload) - 100
    for mirrors in ([frames, [(ts, bytes(bad))]], [[*frames[:at], (ts, bytes(bad)), *frames[at + 1 :]], frames]):
        for raw in (False, True):
            gloo = Gloo(wire, raw=raw).run(mirrors, 50 * MS)
            told = {(e.tag, e.offset, e.length, e.sender) for e in gloo.events if isinstance(e, Conflict)}
            sender = wire.frames[at].link[0]
            mask = gloo.known(2)
            assert not mask[place]
            if raw:  # the message's place is not known when they meet, so all of the copy is told
                ((tag, _, length, who),) = told
                assert (tag, length, who) == (2, len(wire.frames[at].payload), sender)
            else:
                assert told == {(2, place, 1, sender)}
                assert mask.sum() == mask.size - 1
    # A copy that comes when a message that was kept is placed: the landing knows.
    gloo = Gloo(wire, raw=True).run([frames[:-1]], 0)
    assert gloo.known(2).all()
    block = pack([bytes(bad)], ts)
    gloo.events += gloo.decoder.feed(gloo.tcp.feed(block, ts), ts)
    assert not gloo.known(2)[place]
    assert isinstance(gloo.events[-1], Conflict)


@pytest.mark.parametrize("window", [0, MS])
def test_a_damaged_start_of_a_message_is_told_by_the_other_copy(window: int) -> None:
    """A flipped bit makes a preamble name another collective: every place that follows from it would be wrong."""
    wrong_alone = 0
    for seed in range(16):
        rng = random.Random(seed)
        wire = gloo_job(2 + seed % 3, seed=seed, tags=12)
        frames = gloo_frames(wire)
        heads = [i for i, f in enumerate(wire.frames) if len(f.payload) >= 48 and f.payload[8:16] == b"\1" + bytes(7)]
        at = rng.choice(heads)
        ts, data = frames[at]
        bad = bytearray(data)
        bad[len(data) - len(wire.frames[at].payload) + 19] ^= 1 << rng.randrange(5)
        damaged = [*frames[:at], (ts, bytes(bad)), *frames[at + 1 :]]
        for mirrors in ([damaged, frames], [frames, damaged]):
            gloo = Gloo(wire).run(mirrors, window)
            for tag in wire.truth:
                gloo.known(tag)
            assert gloo.alarms
            assert any(gloo.decoder.gaps("g").values()), "what the link shows is not gapless any more"
        alone = Gloo(wire).run([damaged], 0)
        try:
            for tag in wire.truth:
                alone.known(tag)
        except AssertionError:
            wrong_alone += 1
    assert wrong_alone > 4, "the damage is of a kind that one copy does not show"


def test_a_retransmission_that_differs_is_an_alarm() -> None:
    wire = gloo_traffic.Job(2, gloo_traffic.port(2, 1))
    wire.connect()
    wire.allreduce({0: (60_000, 4)})
    final = wire.truth[0][0].tobytes()
    at = next(i for i, frame in enumerate(wire.frames) if len(frame.payload) > 1000 and frame.payload in final)
    frame = wire.frames[at]
    again = replace(frame, ts=frame.ts + MS, payload=bytes(1) + frame.payload[1:])
    follower = Follower(wire)
    follower.feed([*wire.frames[: at + 40], again, *wire.frames[at + 40 :]])
    follower.finish()
    assert [type(event) for event in follower.events if isinstance(event, Conflict)] == [Conflict]
    same = Follower(wire)
    same.feed([*wire.frames[: at + 40], replace(frame, ts=frame.ts + MS), *wire.frames[at + 40 :]])
    same.finish()
    assert not any(isinstance(event, Conflict) for event in same.events)


# The law of the ring


def seen_once(wire: gloo_traffic.Job, size: int, links: Iterable[tuple[int, int]]) -> np.ndarray:
    """bool[size]: the bytes of an all-reduce of float32 whose final value passes only one of these links."""
    shown = np.zeros(size, int)
    for sender, receiver in links:
        if receiver == (sender - 1) % wire.world:
            for offset, length, final in gloo_traffic.ring_messages(size, 4, wire.world, sender):
                if final:
                    shown[offset : offset + length] += 1
    return shown == 1


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_loss_in_one_direction_costs_only_what_is_seen_once(world: int, way: str) -> None:
    """One port mirrored both ways, gradients lost in one direction alone. What the port sends is all chunks but one, as
    is what it receives: all but two chunks are seen twice, and each direction alone shows one of these two."""
    wire = gloo_traffic.Job(world, gloo_traffic.port(world, 1), seed=world)
    wire.connect()
    sizes = {0: 240_000, 1: 30_000}
    for tag, size in sizes.items():
        wire.allreduce({tag: (size, 4)})
    sent, received = (1, 0), (2 % world, 1)
    lossy, whole = (sent, received) if way == "in" else (received, sent)
    # Frames without the start of a message, so that framing stands.
    gone = [frame.link == lossy and len(frame.payload) > 0 and not _heads(wire, frame) for frame in wire.frames]
    assert sum(gone) > 20
    gloo = Gloo(wire).run([[f for f, lost in zip(gloo_frames(wire), gone, strict=True) if not lost]], 0)
    for tag, size in sizes.items():
        once = seen_once(wire, size, [sent, received])
        shown = np.zeros(size, bool)
        for offset, length, final in gloo_traffic.ring_messages(size, 4, world, whole[0]):
            shown[offset : offset + length] |= final
        missing = ~gloo.known(tag)
        assert missing.any()
        assert once[missing].all(), "bytes are missing that the other direction shows"
        assert not missing[shown].any()
        parts, _ = gloo_traffic.segments(size, 4, world)
        assert once.sum() <= size * 2 // world + len(parts) * 4
        if size == 240_000:  # most frames hold no start of a message
            assert missing.sum() > 0.5 * (once & ~shown).sum()


def _heads(wire: gloo_traffic.Job, frame: gloo_traffic.Frame) -> bool:
    """Whether a preamble, or a part of one, lies in a frame."""
    begin = (frame.sequence - 1000 * (frame.link[0] + 1) - 1) & 0xFFFFFFFF
    return any(start < begin + len(frame.payload) and begin < start + 48 for start, _, _ in wire.starts[frame.link])
