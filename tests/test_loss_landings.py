"""Causes of what is missing in landings: exactly the holes, and only what really happened."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gloo_traffic import Follower as GlooFollower
from gloo_traffic import Frame as GlooFrame
from gloo_traffic import Job as GlooJob
from gloo_traffic import port
from nccl_job import NcclWire
from nccl_traffic import Rig, Sender, Sent, group_of, ports_of, seen_at
from tcp_frames import block_of, tcp_frame

from flowcheck.lab.nccl_wire import Call
from flowcheck.lab.nccl_wire_job import Job as NcclJob
from flowcheck.pipeline import Limits, Pipeline
from mirror.block import Block, Loss, pack
from mirror.loss import CAUSES, MIRROR, RING, TRUNCATED, UNKNOWN, Why
from reconstruct.causes import explained
from reconstruct.decoder import RAW, AllReduce, Decoder
from reconstruct.landing import Landing
from reconstruct.steps import Waits

KINDS = (MIRROR, RING, TRUNCATED)
Timed = tuple[int, bytes]


def exactly(decoder: Decoder, group: str, tag: int, landing: Landing | None) -> dict[str, int]:
    """Bytes by cause; the causes must cover the holes of a landing and nothing else, in order."""
    causes = decoder.causes(group, tag)
    if landing is None:
        assert causes == [] and sum(length for _, length, _ in decoder.causes(group, tag, 640)) == 640
        return {}
    missing = np.zeros(landing.size, bool)
    for offset, length in landing.holes():
        missing[offset : offset + length] = True
    shown = np.zeros(landing.size, np.int64)
    sums: dict[str, int] = {}
    reach = 0
    for offset, length, cause in causes:
        assert offset >= reach and length > 0 and cause in CAUSES
        reach = offset + length
        shown[offset:reach] += 1
        sums[cause] = sums.get(cause, 0) + length
    assert (shown == missing).all()
    return sums


class Loser:
    """Loses frames of a capture in known ways, and says to the evidence what a source would."""

    def __init__(self, kinds: tuple[str, ...], rate: float, seed: int) -> None:
        self._kinds, self._rate = kinds, rate
        self.dice = random.Random(seed)
        self.windows: list[tuple[int, int]] = []
        self.gone: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._burst = 0

    def fates(self, times: list[int], sizes: list[int]) -> list[str]:
        """Of each frame: "", or the way in which it is lost. Only long frames are cut: short ones are all headers."""
        fates = []
        for size in sizes:
            fate = RING if self._burst else ""
            self._burst = max(0, self._burst - 1)
            if not fate and self.dice.random() < self._rate:
                fate = self.dice.choice(self._kinds)
                if fate == RING:
                    self._burst = self.dice.randint(0, 20)
                if fate == TRUNCATED and size <= 128:
                    fate = ""
            fates.append(fate)
        fates[:40] = [""] * min(40, len(fates))  # connections must be seen to begin
        last = times[0]
        for k, (time, fate) in enumerate(zip(times, fates, strict=True)):
            if fate == RING:
                if k and fates[k - 1] != RING:
                    last = times[k - 1]
                if k + 1 == len(fates) or fates[k + 1] != RING:
                    after = times[k + 1] if k + 1 < len(times) else time + 1
                    self.windows.append((last, after))
            self.gone[fate] = self.gone.get(fate, 0) + 1
        return fates


def cut_block(frames: list[Timed], cut: list[bool]) -> Block:
    """Frames as captured, some of them cut to 128 bytes by a switch."""
    block = pack([frame for _, frame in frames], [time for time, _ in frames])
    short = np.array(cut, bool)
    block.caplen = np.where(short, np.minimum(block.caplen, 128), block.caplen)
    block.wirelen = block.caplen.copy()
    return block


# gloo


def gloo_run(kinds: tuple[str, ...], rate: float, seed: int, mirrored: list[tuple[int, int]] | None = None) -> Any:
    job = GlooJob(3, mirrored or port(3, 1), seed=seed, gap_ns=1_000_000)
    job.connect()
    for tag in range(0, 16, 2):
        job.allreduce({tag: (200_000, 4), tag + 1: (60_000, 4)})
    for tag in range(16, 20):
        job.allreduce({tag: (64, 4)})
    loser = Loser(kinds, rate, seed)
    fates = loser.fates([f.ts for f in job.frames], [54 + len(f.payload) for f in job.frames])
    follower = GlooFollower(job)
    for low, high in loser.windows:
        follower.decoder.evidence.lost(RING, 0, low, high)
    shown = [(frame, fate) for frame, fate in zip(job.frames, fates, strict=True) if fate not in (MIRROR, RING)]
    now = 0
    for at in range(0, len(shown), 50):
        part = shown[at : at + 50]
        block = job.block([frame for frame, _ in part])
        short = np.array([fate == TRUNCATED for _, fate in part])
        block.caplen = np.where(short, np.minimum(block.caplen, 128), block.caplen)
        block.wirelen = block.caplen.copy()
        now = int(block.ts.max())
        follower.take(follower.tcp.feed(block, now), now)
    follower.finish()
    follower.check()
    return follower, loser


def gloo_causes(follower: GlooFollower, tags: range) -> dict[str, int]:
    sums: dict[str, int] = {}
    for tag in tags:
        for cause, count in exactly(follower.decoder, "g", tag, follower.decoder.landing("g", tag)).items():
            sums[cause] = sums.get(cause, 0) + count
    return sums


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.002, 0.02, 0.1])
def test_gloo_one_kind_of_loss_is_the_only_cause(kind: str, rate: float) -> None:
    lost = 0
    for seed in range(6):
        follower, loser = gloo_run((kind,), rate, seed)
        found = gloo_causes(follower, range(16))
        lost += sum(found.values())
        assert set(found) <= {kind}, (seed, found)
        assert bool(found) <= bool(loser.gone[kind])
    assert lost > 0 or rate < 0.01


def test_gloo_several_kinds_of_loss_each_explain_something() -> None:
    together: dict[str, int] = {}
    for seed in range(8):
        follower, _ = gloo_run(KINDS, 0.02, seed)
        found = gloo_causes(follower, range(16))
        assert set(found) <= set(KINDS), (seed, found)
        for cause, count in found.items():
            together[cause] = together.get(cause, 0) + count
    assert set(together) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_gloo_a_lost_frame_of_final_values_is_that_hole_with_its_cause(kind: str) -> None:
    """The link into rank 0 never shows rank 0's own chunk: nobody lost that."""
    job = GlooJob(3, [(1, 0), (0, 1)], seed=8, gap_ns=1_000_000)
    job.connect()
    job.allreduce({0: (60_000, 4)})
    for tag in range(1, 6):
        job.allreduce({tag: (64, 4)})
    whole = job.truth[0][0].tobytes()
    final = [
        i for i, f in enumerate(job.frames)
        if f.link == (1, 0) and len(f.payload) == job.mss and f.payload in whole
    ]
    gone = final[len(final) // 2]
    at = whole.index(job.frames[gone].payload)
    follower = GlooFollower(job)
    frames = [frame for i, frame in enumerate(job.frames) if i != gone or kind == TRUNCATED]
    if kind == RING:
        follower.decoder.evidence.lost(RING, 0, job.frames[gone - 1].ts, job.frames[gone + 1].ts)
    block = job.block(frames)
    if kind == TRUNCATED:
        block.caplen[gone] = block.wirelen[gone] = 154
    now = int(block.ts.max())
    follower.take(follower.tcp.feed(block, now), now)
    follower.finish()
    landing = follower.decoder.landing("g", 0)
    assert exactly(follower.decoder, "g", 0, landing)
    hole = (at + 100, job.mss - 100) if kind == TRUNCATED else (at, job.mss)
    causes = follower.decoder.causes("g", 0)
    assert (*hole, kind) in causes
    assert {cause for offset, _, cause in causes if offset != hole[0]} == {UNKNOWN}
    assert sum(length for *_, cause in causes if cause == UNKNOWN for length in [_[1]]) == 20_000


def test_gloo_a_whole_message_in_a_gap_has_its_cause() -> None:
    """How many payloads the gap had is known, so the link goes on, and in the end only that one is missing."""
    follower, _ = gloo_run((MIRROR,), 0.002, 26)
    assert set(gloo_causes(follower, range(16))) == {MIRROR}


def test_gloo_whole_collectives_in_an_outage_have_its_cause() -> None:
    """The ring is full for a long time: collectives begin and end in it."""
    job = GlooJob(3, port(3, 1), seed=4, gap_ns=1_000_000)
    job.connect()
    ends = []
    for tag in range(30):
        job.allreduce({tag: (60_000, 4)})
        ends.append(len(job.frames))
    low, high = ends[8] - 40, ends[20] + 40
    follower = GlooFollower(job)
    follower.decoder.evidence.lost(RING, 0, job.frames[low - 1].ts, job.frames[high].ts)
    follower.feed(job.frames[:low] + job.frames[high:])
    follower.finish()
    for tag in range(9, 21):
        assert follower.decoder.causes("g", tag, 60_000) and {
            cause for *_, cause in follower.decoder.causes("g", tag, 60_000)} == {RING}
    assert follower.decoder.causes("g", 3, 60_000) == []


def test_gloo_messages_kept_raw_keep_their_causes() -> None:
    job = GlooJob(3, port(3, 1), seed=11, gap_ns=1_000_000)
    job.connect()
    for tag in range(6):
        job.allreduce({tag: (90_000, 4)})
    kept: list[GlooFrame] = []
    cut: list[bool] = []
    dice = random.Random(3)
    for frame in job.frames:
        kept.append(frame)
        cut.append(len(frame.payload) == job.mss and dice.random() < 0.05)
    follower = GlooFollower(job)
    follower.decoder.planner = lambda request: RAW
    block = job.block(kept)
    block.caplen = np.where(cut, np.minimum(block.caplen, 128), block.caplen)
    block.wirelen = block.caplen.copy()
    follower.take(follower.tcp.feed(block, int(block.ts.max())), int(block.ts.max()))
    follower.finish()
    found = 0
    for tag in range(5):
        landing = follower.decoder.place("g", tag, 90_000, 4)
        assert landing is not None
        sums = exactly(follower.decoder, "g", tag, landing)
        assert set(sums) <= {TRUNCATED}
        found += sum(sums.values())
    assert found > 0


def test_two_links_that_lost_the_same_bytes_give_the_cause_that_is_shown_best() -> None:
    decoder = GlooFollower(GlooJob(3, port(3, 1))).decoder
    decoder.evidence.lost(RING, 0, 100, 200)
    losses = [
        (0, 60, Why(2, 0, 0, 0)), (40, 80, Why(0, 90, 110, 0)), (70, 90, Why(1, 0, 0, 0)), (95, 99, Why(2, 0, 0, 0)),
    ]  # fmt: skip
    behind = [(50, 100, Why(1, 0, 0, 0)), (122, 130, Why(0, 90, 110, 0))]
    assert explained([[10, 45], [60, 40], [120, 5]], losses, [], decoder.evidence) == [
        (10, 30, MIRROR), (40, 15, RING), (60, 10, RING), (70, 20, TRUNCATED), (90, 5, UNKNOWN), (95, 4, MIRROR),
        (99, 1, UNKNOWN), (120, 5, UNKNOWN),
    ]  # fmt: skip
    assert explained([[10, 45], [60, 40], [120, 5]], losses, behind, decoder.evidence) == [
        (10, 30, MIRROR), (40, 15, RING), (60, 10, RING), (70, 25, TRUNCATED), (95, 4, MIRROR), (99, 1, TRUNCATED),
        (120, 2, UNKNOWN), (122, 3, RING),
    ]  # fmt: skip
    assert explained([], losses, behind, decoder.evidence) == []
    assert explained([[3, 4]], [], [], decoder.evidence) == [(3, 4, UNKNOWN)]


# NCCL over RoCE


JOBS = [
    NcclJob(3, version="2.19.4", algorithm="ring", protocol="ll"),
    NcclJob(3, version="2.21.5", algorithm="ring", protocol="simple", mtu=4096),
    NcclJob(3, version="2.28.9", algorithm="ring", protocol="ll128", mtu=4096),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.algorithm}-{job.protocol}")
def test_roce_one_kind_of_loss_is_the_only_cause(job: NcclJob, kind: str) -> None:
    together: dict[str, int] = {}
    for seed in range(4):
        sender = Sender(job, seed=seed)
        count = 30_000
        sent: Sent = [item for _ in range(5) for item in sender.reduce(count)]
        shown = seen_at(job, sent, job.nodes - 1, "in", "out")
        loser = Loser((kind,), 0.02, seed)
        fates = loser.fates([time for time, *_ in shown], [len(frame) for *_, frame in shown])
        rig = Rig(group_of(job), {(4 * count, 4)})
        for low, high in loser.windows:
            rig.decoder.evidence.lost(RING, 0, low, high)
        left = [
            (time, frame[:128] if fate == TRUNCATED else frame)
            for (time, _, frame), fate in zip(shown, fates, strict=True) if fate not in (MIRROR, RING)
        ]
        for at in range(0, len(left), 60):
            part = left[at : at + 60]
            rig.now = part[-1][0]
            rig._take(rig.roce.feed(block_of([frame for _, frame in part], [time for time, _ in part]), rig.now))
        rig.finish()
        assert not rig.wrong(sender.results)
        for tag in range(4):  # behind the last one nothing shows what is missing
            for cause, lost in exactly(rig.decoder, "g", tag, rig.landing(tag)).items():
                together[cause] = together.get(cause, 0) + lost
    assert set(together) == {kind}, together


def test_roce_two_packets_of_a_message_have_each_their_own_cause() -> None:
    """One is lost, the next one cut; every final value that only this message shows."""
    job = NcclJob(3, version="2.21.5", algorithm="ring", protocol="simple", mtu=4096)
    count = 120_000
    sender = Sender(job, seed=1)
    sent: Sent = sender.reduce(count) + sender.reduce(count)
    shown = seen_at(job, sent, job.nodes - 1, "in", "out")
    assert sender.results[0] is not None
    whole = sender.results[0].tobytes()
    data = [at for at, (*_, frame) in enumerate(shown) if len(frame) > 4096 and frame[-4100:-4] in whole]
    found = 0
    for one, other in pairwise(data[::5]):
        at = [whole.index(shown[k][2][-4100:-4]) for k in (one, other)]
        rig = Rig(group_of(job), {(4 * count, 4)})
        left = [(time, frame[:128] if k == other else frame) for k, (time, _, frame) in enumerate(shown) if k != one]
        rig.now = left[-1][0]
        rig._take(rig.roce.feed(block_of([frame for _, frame in left], [time for time, _ in left]), rig.now))
        rig.finish()
        expected = [(at[0], 4096, MIRROR), (at[1], 4096, TRUNCATED)]
        causes = rig.decoder.causes("g", 0)
        assert set(causes) <= set(expected)
        found += len(causes) == 2
    assert found > 3


# NCCL through the pipeline, over RoCE and over TCP sockets


def acknowledged(frames: list[Timed]) -> list[Timed]:
    """TCP frames one way, and what a receiver sends back."""
    reached: dict[tuple[bytes, bytes], int] = {}
    result = []
    for time, frame in frames:
        result.append((time, frame))
        ends, ports = (frame[26:30], frame[30:34]), (frame[34:36], frame[36:38])
        flags, sequence = frame[47], int.from_bytes(frame[38:42], "big")
        reached[ends[0], ports[0]] = sequence + len(frame) - 54 + (flags & 2 > 0)
        back = tcp_frame(seq=9001, ack=reached[ends[0], ports[0]], flags=0x12 if flags & 2 else 0x10)
        result.append((time + 1, back[:26] + ends[1] + ends[0] + ports[1] + ports[0] + back[38:]))
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sockets", [None, 0, 2])
@pytest.mark.parametrize("protocol", ["simple", "ll128"])
def test_nccl_through_the_pipeline(kind: str, sockets: int | None, protocol: str) -> None:
    together: dict[str, int] = {}
    job = NcclJob(3, version="2.19.4", algorithm="ring", protocol=protocol)
    count = 60_000
    for seed in range(4):
        values = np.random.default_rng(seed)
        wire = NcclWire(job, ports_of(job, 2, "in", "out"), sockets)
        for _ in range(5):
            wire.perform(Call("allreduce", [values.random(count, np.float32) for _ in range(3)]))
        frames = [(frame.ts * 3 - wire.frames[0].ts * 2, frame.data) for frame in wire.frames]
        frames = frames if sockets is None else acknowledged(frames)
        loser = Loser((kind,), 0.01, seed)
        fates = loser.fates([time for time, _ in frames], [len(data) for _, data in frames])
        if sockets is not None:  # hellos have 13 bytes: a connection that was not seen to begin is none
            fates = ["" if len(data) == 67 else fate for fate, (_, data) in zip(fates, frames, strict=True)]
        pipeline = Pipeline(Limits(64, 1 << 20, 1 << 26), Waits())
        decoder = pipeline.nccl if sockets is None else pipeline.nccl_tcp
        decoder.planner = lambda request: AllReduce(4 * count, 4)
        decoder.add_group(replace(group_of(job), sockets=sockets is not None), 0)
        left = [(*one, fate) for one, fate in zip(frames, fates, strict=True) if fate not in (MIRROR, RING)]
        windows, now = list(loser.windows), 0
        for at in range(0, len(left), 50):
            part = left[at : at + 50]
            now = max(now, part[-1][0])
            block = cut_block([(time, data) for time, data, _ in part], [fate == TRUNCATED for *_, fate in part])
            block.losses = tuple(Loss(RING, low, high) for low, high in windows if high <= now)
            windows = [window for window in windows if window[1] > now]
            pipeline.feed(block, now)
        pipeline.flush(now)
        for tag in range(4):
            for cause, lost in exactly(decoder, "g", tag, decoder.landing("g", tag)).items():
                together[cause] = together.get(cause, 0) + lost
        holes = pipeline.tcp.counters()["hole_bytes"] + pipeline.roce.counters()["hole_bytes"]
        by_cause = pipeline.losses.bytes()
        assert sum(by_cause.values()) == holes > 0 and by_cause[kind] > 0
    if sockets == 2:  # whose first length is lost shows no message: nobody knows that it is of this communicator
        together.pop(UNKNOWN, None)
    assert set(together) == {kind}, together
