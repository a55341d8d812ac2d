"""Connections first seen in the middle of their life, collectives lost whole, calls in one group: followed where the
wire proves it, else named, and never wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nccl_traffic import Rig, Sender, Sent, group_of, seen_at
from test_nccl_decoder import BIG, SIZES, SMALL, _data_frames, _queue_pairs

from flowcheck.lab.nccl_wire import Call, frames_of
from flowcheck.lab.nccl_wire_job import Job
from reconstruct.decoder import Reduced

LL = Job(2, version="2.19.4", algorithm="ring", protocol="ll")


def later(rig: Rig) -> None:
    """The input goes on, without a packet, for a second and more."""
    rig.finish()
    rig.events += rig.decoder.feed(rig.roce.flush(rig.now), rig.now + 2 * 10**9)


def of_pairs(sent: Sent, pairs: set[int]) -> set[int]:
    return {at for qp in pairs for at in _data_frames(sent, qp)}


@pytest.mark.parametrize("job", [LL, Job(2, version="2.28.9", algorithm="ring", protocol="simple"),
                                 Job(2, version="2.28.9", algorithm="ring", protocol="ll128", mtu=4096)],
                         ids=lambda job: job.protocol)  # fmt: skip
def test_the_mirror_came_late_and_attaching_again_helps(job: Job) -> None:
    sender = Sender(job)
    sender.reduce(BIG)
    first, second = sender.reduce(BIG), sender.reduce(SMALL) + sender.reduce(BIG)
    rig = Rig(group_of(job), SIZES, sequence=1)
    rig.feed(first)
    assert not rig.reduced and rig.landing(1) is None and rig.decoder.max_tag("g") == -1
    assert {(e.sender, e.receiver) for e in rig.lost} == {(0, 1), (1, 0)} and len(rig.lost) == 2
    assert all("middle of its life" in e.reason and "attach again" in e.reason and e.tags == (1,) for e in rig.lost)
    rig.decoder.remove_group("g")
    rig.decoder.add_group(group_of(job), 2, second[0][0])
    rig.feed(second)
    rig.finish()
    assert rig.reduced == [2, 3] and not rig.wrong(sender.results[2:], 2)


def test_a_few_packets_before_the_group_are_not_taken_for_its_first() -> None:
    """Two small all-reduces passed before the mirror was on: the first packet seen has a low number all the same."""
    sender = Sender(LL)
    sender.barrier()
    sender.barrier()
    sent = sender.reduce(BIG) + sender.reduce(BIG)
    rig = Rig(group_of(LL), SIZES, sequence=2)
    rig.feed(sent)
    rig.finish()
    assert not rig.reduced and not rig.wrong(sender.results[2:], 2)
    assert any("after 4 packets" in e.reason for e in rig.lost)


def test_one_channel_seen_late_is_missing_and_named() -> None:
    job = Job(2, version="2.28.9", algorithm="ring", protocol="simple", channels=2, mtu=4096)
    sender = Sender(job)
    before, after = sender.reduce(BIG), sender.reduce(BIG) + sender.reduce(BIG)
    late = set(_queue_pairs(before)[1:2])
    rig = Rig(group_of(job, name="old"), SIZES)
    rig.feed([item for at, item in enumerate(before) if at not in of_pairs(before, late)])
    rig.decoder.remove_group("old")
    rig.name = "g"
    rig.decoder.add_group(group_of(job), 5, after[0][0])
    rig.events.clear()
    rig.feed(after)
    rig.finish()
    assert not rig.reduced and not rig.wrong(sender.results[1:], 5)
    assert any("middle of its life" in e.reason for e in rig.lost)
    assert rig.landing(5) is not None and rig.landing(5).holes()


@pytest.mark.parametrize("count", [1, 2])
def test_barriers_lost_on_every_link_are_known_by_their_packets(count: int) -> None:
    sender = Sender(LL)
    sent = sender.reduce(BIG)
    for _ in range(count):
        sender.barrier()
    sent += sender.reduce(SMALL) + sender.reduce(BIG)
    rig = Rig(group_of(LL), SIZES)
    rig.feed(sent)
    later(rig)
    assert not rig.wrong(sender.results)
    if count == 1:
        assert rig.reduced == [0, 2, 3] and {e.tags for e in rig.lost} == {(1,)}
    else:
        assert rig.reduced == [0] and any("lost on every" in e.reason for e in rig.lost)


def test_a_bucket_lost_on_every_link_is_stepped_over() -> None:
    """What it was does not matter: only that it has just the packets that are missing, and no two others have."""
    sender = Sender(LL)
    sent = sender.reduce(BIG)
    sender.reduce(SMALL)
    sent += sender.reduce(BIG)
    rig = Rig(group_of(LL), SIZES)
    for size in SIZES:
        rig.decoder.fits("g", 0, *size)
    rig.feed(sent)
    later(rig)
    assert rig.reduced == [0, 2] and not rig.wrong(sender.results) and rig.landing(1) is None


def test_several_calls_in_one_group_are_refused_by_name() -> None:
    job = Job(2, version="2.28.9", algorithm="ring", protocol="simple", channels=4, mtu=4096)
    sender = Sender(job)
    sent = sender.reduce(BIG)
    rng = np.random.default_rng(3)
    calls = [Call("allreduce", [rng.standard_normal(n).astype(np.float32) for _ in range(2)]) for n in (90_000, 50_000)]
    made = frames_of(job, [calls], communicator=sender.communicator)
    sent += [(sender.clock + 100 * at, link, frame) for at, (_, link, frame) in enumerate(made)]
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    later(rig)
    assert rig.reduced == [0] and not rig.wrong(sender.results)
    assert any("one group" in e.reason and "one by one" in e.reason for e in rig.lost)


@pytest.mark.parametrize("even", [False, True])
def test_two_gpus_of_a_node_in_one_direction(even: bool) -> None:
    """Without announcements nobody names the sender: sizes may, and where they do not it is said."""
    job = Job(4, gpus_per_node=2, version="2.28.9", algorithm="ring", protocol="simple", channels=4, rails=2,
              mtu=4096)
    assert job.ring(0) != job.ring(1)  # channels leave the node at different GPUs
    sender = Sender(job)
    count = 262_144 if even else 17_500  # 70,000 bytes take two channels, with unequal parts
    sent = sender.reduce(count) + sender.reduce(count)
    rig = Rig(group_of(job), {(4 * count, 4)})
    rig.feed(seen_at(job, sent, 0, "in"))
    later(rig)
    assert not rig.wrong(sender.results)
    if even:
        assert any("cannot be told" in e.reason for e in rig.lost)
    else:
        assert len(rig.decoder.links("g")) == 2 and rig.landing(1) is not None and rig.landing(1).covered > 0
    both = Rig(group_of(job), {(4 * count, 4)})
    both.feed(seen_at(job, sent, 0, "in", "out"))
    both.finish()
    assert [e.tag for e in both.of(Reduced) if isinstance(e, Reduced)] == [0, 1] and not both.wrong(sender.results)


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_a_blackout_of_any_length_gives_no_wrong_value(protocol: str) -> None:
    """Nothing is captured for a while, on any link: what is claimed afterwards is right, under its own tag."""
    job = Job(2, version="2.28.9", algorithm="ring", protocol=protocol, channels=2, mtu=4096)
    rng = random.Random(protocol)
    resumed = 0
    for _ in range(5):
        sender = Sender(job)
        sizes = [BIG, SMALL, 16_384]
        parts = [sender.barrier() if rng.random() < 0.3 else sender.reduce(rng.choice(sizes)) for _ in range(9)]
        sent = [item for part in parts for item in part]
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        low = rng.choice([rng.randrange(len(sent)), rng.choice(starts[:-1])])
        high = rng.choice([low + rng.randrange(1, len(sent) // 3), next((s for s in starts if s > low), len(sent))])
        rig = Rig(group_of(job), {(4 * size, 4) for size in sizes})
        for size in sizes:
            rig.decoder.fits("g", 0, 4 * size, 4)
        rig.feed(sent[:low] + sent[high:])
        later(rig)
        assert not rig.wrong(sender.results)
        missed = next(tag for tag in range(9) if starts[tag + 1] > low)
        resumed += any(tag > missed for tag in rig.reduced)
    assert resumed > 0
