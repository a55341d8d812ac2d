"""The NCCL decoder on made-up traffic: every algorithm, foreign collectives between, what contradicts, what is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nccl_traffic import Rig, Sender, Sent, disordered, group_of, seen_at

from flowcheck.lab.nccl_wire_job import Job
from reconstruct.decoder import ALLREDUCE, BROADCAST, NOT_THIS_SIZE, LinkLost, Message, Reduced
from reconstruct.nccl.known import FAR

BIG, SMALL = 40_000, 5_714
SIZES = {(4 * BIG, 4), (4 * SMALL, 4)}
JOBS = [
    Job(2, version="2.19.4", algorithm="ring", protocol="ll"),
    Job(2, version="2.18.6", algorithm="ring", protocol="simple"),
    Job(2, version="2.19.4", algorithm="ring", protocol="ll128", channels=2, mtu=4096),
    Job(4, version="2.21.5", algorithm="ring", protocol="simple", channels=2, mtu=4096),
    Job(4, version="2.23.4", algorithm="ring", protocol="ll", channels=4),
    Job(4, version="2.28.9", algorithm="tree", protocol="simple", channels=2),
    Job(4, version="2.30.7", algorithm="tree", protocol="ll128", channels=2),
    Job(8, gpus_per_node=4, version="2.28.9", algorithm="ring", protocol="simple", channels=2, mtu=4096),
    Job(8, gpus_per_node=4, version="2.28.9", algorithm="nvlstree", protocol="simple", channels=2, rails=4, mtu=4096),
    Job(8, gpus_per_node=4, version="2.23.4", algorithm="tree", protocol="ll", channels=4, ipv6=True),
    Job(3, version="2.19.4", algorithm="ring", protocol="ll", qps=2, split=True),
    Job(3, version="2.28.9", algorithm="ring", protocol="simple", channels=2, qps=2, split=False),
]


def name(job: Job) -> str:
    return f"{job.version}-{job.algorithm}-{job.protocol}-{job.ranks}x{job.channels}-q{job.qps}"


def traffic(job: Job) -> tuple[Sender, Sent]:
    """A bucket, a barrier, a smaller bucket, the first one again."""
    sender = Sender(job)
    return sender, sender.reduce(BIG) + sender.barrier() + sender.reduce(SMALL) + sender.reduce(BIG)


@pytest.mark.parametrize("job", JOBS, ids=name)
def test_everything_is_rebuilt(job: Job) -> None:
    sender, sent = traffic(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    rig.finish()
    assert rig.reduced == [0, 2, 3]
    assert not rig.wrong(sender.results) and not rig.conflicts
    # The barrier may begin as a bucket would; that it is none is said.
    assert all(event.tags == (1,) and event.reason.startswith(NOT_THIS_SIZE) for event in rig.lost)
    assert all(rig.landing(tag).complete and rig.decoder.settled("g", tag, 1 << 62) for tag in (0, 2, 3))
    assert rig.decoder.max_tag("g") == 3 and rig.decoder.coverage("g") == 1.0
    assert rig.landing(1) is None
    nodes = job.node_of
    assert rig.decoder.links("g") and all(nodes[a] != nodes[b] for a, b in rig.decoder.links("g"))
    assert set(rig.decoder.gaps("g").values()) == {0}


@pytest.mark.parametrize("job", [JOBS[0], JOBS[3], JOBS[10], JOBS[11]], ids=name)
def test_disorder_and_repeats_change_nothing(job: Job) -> None:
    sender, sent = traffic(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(disordered(random.Random(1), sent, 0.05), 13)
    rig.finish()
    assert rig.reduced == [0, 2, 3] and not rig.wrong(sender.results) and not rig.conflicts


@pytest.mark.parametrize("job", [JOBS[4], JOBS[8]], ids=name)
def test_algorithm_and_protocol_are_found(job: Job) -> None:
    """The facts allow every protocol, and both rings and trees."""
    sender, sent = traffic(job)
    rig = Rig(group_of(job, every=True), SIZES)
    rig.feed(sent)
    rig.finish()
    assert rig.reduced[:1] == [0] and not rig.wrong(sender.results) and not rig.conflicts


def test_one_direction_leaves_its_chunk_out() -> None:
    job = JOBS[0]
    sender, sent = traffic(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(seen_at(job, sent, 0, "in"))
    rig.finish()
    assert not rig.reduced and not rig.wrong(sender.results)
    # Scheme A, two ranks: loops of two chunks of 8192 floats; rank 0 shows the first, the last loop has 3616 of 7232.
    assert rig.landing(0).holes()[:2] == [[32768, 32768], [98304, 32768]]
    assert rig.decoder.coverage("g") == pytest.approx(rig.landing(0).covered / rig.landing(0).size)
    assert rig.decoder.links("g") == {(0, 1)}


def test_foreign_collectives_count_and_broadcasts_are_delivered() -> None:
    job = Job(2, version="2.19.4", algorithm="ring", protocol="ll")
    sender = Sender(job)
    order = np.arange(31, dtype=np.int32)
    sent = sender.reduce(BIG) + sender.broadcast(order) + sender.reduce(BIG) + sender.barrier() + sender.reduce(BIG)
    rig = Rig(group_of(job), SIZES, sequence=7)
    rig.feed(sent)
    rig.finish()
    assert rig.reduced == [7, 9, 11] and not rig.wrong(sender.results, 7)
    (message,) = rig.of(Message)
    assert isinstance(message, Message) and (message.tag, message.kind) == (8, BROADCAST)
    # LL rounds to eight bytes: what lies behind the end is whatever was in the buffer.
    assert message.length == 128 and message.data is not None and message.complete
    assert message.data[:124].view(np.int32).tolist() == order.tolist()
    assert [r.tag for r in rig.requests if r.kind == BROADCAST] == [8]


@pytest.mark.parametrize("version", ["2.28.9", "2.21.5"])
def test_a_wrong_version_claims_nothing(version: str) -> None:
    job = Job(4, version="2.19.4", algorithm="ring", protocol="ll", channels=2)
    _, sent = traffic(job)
    rig = Rig(group_of(job, version=version), SIZES)
    rig.feed(sent)
    rig.finish()
    assert not rig.reduced
    assert all(rig.landing(tag) is None or rig.landing(tag).poisoned for tag in range(5))


def test_an_all_reduce_that_begins_like_a_bucket() -> None:
    job = JOBS[0]
    sender = Sender(job)
    sent = sender.reduce(BIG) + sender.reduce(45_000) + sender.reduce(BIG)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    rig.finish()
    assert rig.reduced == [0, 2] and not rig.wrong(sender.results)
    assert rig.lost and all(isinstance(e, LinkLost) and e.reason.startswith(NOT_THIS_SIZE) for e in rig.lost)
    assert {tag for event in rig.lost for tag in event.tags} == {1}


def _data_frames(sent: Sent, qp: int) -> list[int]:
    """Numbers of the frames that carry data to a queue pair: WRITE opcodes, not the 32-byte CTS entries."""
    return [
        at
        for at, (_, _, frame) in enumerate(sent)
        if frame[42] in (6, 7, 8, 9, 11) and int.from_bytes(frame[47:50], "big") == qp
    ]


def _queue_pairs(sent: Sent) -> list[int]:
    found = {int.from_bytes(f[47:50], "big") for _, _, f in sent if f[42] in (7, 9)}
    return sorted(found)


def test_a_wrong_flag_is_no_value() -> None:
    job = JOBS[0]
    sender = Sender(job)
    sent = sender.reduce(BIG)
    number = _data_frames(sent, _queue_pairs(sent)[0])[100]  # of the second message, which is final
    time, link, frame = sent[number]
    broken = bytearray(frame)
    assert frame[42] == 7  # a middle packet: payload behind 54 bytes of headers
    broken[54 + 160 + 4] ^= 1
    sent[number] = time, link, bytes(broken)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    rig.finish()
    assert not rig.reduced and len(rig.conflicts) == 1
    landing = rig.landing(0)
    assert landing.poisoned
    ((offset, length),) = landing.holes()
    assert offset % 512 == 80
    assert length == 8, "what lies behind the unit with the wrong flag has flags of its own"
    assert all((landing.data[a:b] == sender.results[0][a:b]).all() for a, b in landing.ranges())


def test_a_lost_packet_is_a_hole_of_its_place() -> None:
    job = JOBS[0]
    sender = Sender(job)
    sent = sender.reduce(BIG) + sender.reduce(BIG)
    data = _data_frames(sent, _queue_pairs(sent)[0])
    # Message 1 (final, from byte 0 on) has the packets 64..127: those of rank 0's second message.
    gone = {data[64], data[70], data[127]}
    rig = Rig(group_of(job), SIZES)
    rig.feed([item for at, item in enumerate(sent) if at not in gone])
    rig.finish()
    assert rig.reduced == [1] and not rig.wrong(sender.results)
    assert rig.landing(0).holes() == [[0, 512], [6 * 512, 512], [63 * 512, 512]]
    assert rig.decoder.settled("g", 0, 1 << 62)


def test_kept_until_the_size_is_known() -> None:
    job = JOBS[4]
    sender, sent = traffic(job)
    rig = Rig(group_of(job), (), raw=True)
    rig.feed(sent)
    assert not rig.reduced and rig.decoder.max_tag("g") == 0
    assert rig.decoder.place("g", 0, 4 * SMALL, 4) is None
    assert rig.decoder.place("g", 0, 4 * BIG + 4096, 4) is None
    landing = rig.decoder.place("g", 0, 4 * BIG, 4)
    assert landing is not None and landing.complete and (landing.data == sender.results[0]).all()
    rig.finish()
    # The sizes that were asked for are known now: what follows needs no asking.
    assert rig.reduced == [0, 2, 3] and not rig.wrong(sender.results)


def test_sizes_that_look_alike_are_kept_until_one_is_chosen() -> None:
    """LL128 fills up groups of 1920 bytes; whole buckets are followed all the same."""
    job = Job(4, version="2.28.9", algorithm="ring", protocol="ll128", channels=2, mtu=4096)
    one, other = 18_864, 18_912
    sender = Sender(job)
    sent = sender.reduce(one) + sender.reduce(other) + sender.reduce(BIG)
    rig = Rig(group_of(job), {(4 * one, 4), (4 * other, 4), (4 * BIG, 4)})
    rig.feed(sent)
    assert rig.reduced == [2]
    decoder = rig.decoder
    assert all(decoder.fits("g", tag, 4 * size, 4) for tag in (0, 1) for size in (one, other))
    assert not decoder.fits("g", 0, 4 * BIG, 4) and not decoder.fits("g", 2, 4 * one, 4)
    for tag, size in ((0, one), (1, other)):
        landing = decoder.place("g", tag, 4 * size, 4)
        assert landing is not None and landing.complete and (landing.data == sender.results[tag]).all()
        assert not decoder.fits("g", tag, 4 * (one + other - size), 4)


def test_a_connection_that_showed_nothing_yet_may_bring_more() -> None:
    job = JOBS[0]
    sender = Sender(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(seen_at(job, sender.reduce(BIG), 0, "in"))
    assert not rig.landing(0).complete and not rig.decoder.settled("g", 0, 1 << 62)


def test_a_connection_that_never_shows_anything_is_not_waited_for() -> None:
    """What begins when an all-reduce is over shows that; and that far into a job there are just no mirrors of it."""
    job = JOBS[0]
    sender = Sender(job)
    rig = Rig(group_of(job), SIZES)
    for tag in range(2 * FAR):
        rig.feed(seen_at(job, sender.reduce(BIG), 0, "in"))
        assert not rig.landing(tag).complete
        assert rig.decoder.settled("g", tag, 1 << 62) == (tag >= FAR)
        assert tag == 0 or rig.decoder.settled("g", tag - 1, tag)


def test_attached_in_the_middle_of_a_job() -> None:
    job = JOBS[3]
    sender = Sender(job)
    before = sender.reduce(BIG) + sender.barrier()
    after = sender.reduce(SMALL) + sender.reduce(BIG)
    rig = Rig(group_of(job, name="old"), SIZES)
    rig.feed(before)
    rig.decoder.remove_group("old")
    assert rig.decoder.counters["memory_bytes"] >= 0
    rig.name = "g"
    rig.decoder.add_group(group_of(job), 40, after[0][0])
    rig.feed(after)
    rig.finish()
    assert [e.tag for e in rig.of(Reduced) if isinstance(e, Reduced) and e.group == "g"] == [40, 41]
    assert not rig.wrong(sender.results[2:], 40)


def test_a_connection_first_seen_in_its_middle_is_not_followed() -> None:
    job = JOBS[0]
    sender = Sender(job)
    sender.reduce(BIG)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sender.reduce(BIG))
    rig.finish()
    assert not rig.reduced and rig.decoder.max_tag("g") == -1


def test_retired_collectives_are_freed() -> None:
    job = JOBS[7]
    sender = Sender(job)
    rig = Rig(group_of(job), SIZES)
    for step in range(6):
        rig.feed(sender.reduce(BIG) + sender.barrier())
        held = rig.landing(2 * step)
        assert held is not None and held.complete
        rig.decoder.retire("g", 2 * step + 2)
        assert rig.landing(2 * step) is None and held.data.size == 0
    rig.finish()
    assert rig.reduced == [0, 2, 4, 6, 8, 10]
    assert rig.decoder.counters["memory_bytes"] < 3 * 4 * BIG  # of six steps: spare buffers, too


def test_over_the_memory_budget_nothing_is_claimed() -> None:
    job = JOBS[0]
    sender = Sender(job)
    rig = Rig(group_of(job), SIZES, budget=4 * BIG - 1)
    rig.feed(sender.reduce(BIG))
    rig.finish()
    assert not rig.reduced and any("budget" in event.reason for event in rig.lost)


def test_what_can_begin() -> None:
    job = JOBS[0]
    sender = Sender(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sender.reduce(SMALL))
    first = next(r for r in rig.requests if r.kind == ALLREDUCE)
    assert (first.tag, first.proven, first.context) == (0, True, 0)
    assert rig.decoder.can_begin(first, 4 * SMALL, 4) and not rig.decoder.can_begin(first, 4 * BIG, 4)


def test_a_message_in_the_wrong_slot_contradicts() -> None:
    job = JOBS[0]
    sender = Sender(job)
    sent = sender.reduce(BIG) + sender.reduce(BIG)
    starts = [at for at in _data_frames(sent, _queue_pairs(sent)[0]) if sent[at][2][42] == 6]
    time, link, frame = sent[starts[8]]
    moved = bytearray(frame)
    moved[54 + 5] ^= 1  # the address, one slot of 65536 bytes on or back
    sent[starts[8]] = time, link, bytes(moved)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    rig.finish()
    assert rig.reduced == [0] and any("slot of its step" in event.reason for event in rig.lost)
    assert rig.landing(1) is None


@pytest.mark.parametrize("job", [
    Job(4, gpus_per_node=2, version="2.28.9", algorithm="tree", protocol="simple", channels=2),
    Job(4, gpus_per_node=2, version="2.19.4", algorithm="nvlstree", protocol="simple", channels=4, rails=2),
    Job(6, gpus_per_node=2, version="2.23.4", algorithm="nvlstree", protocol="simple", channels=2, rails=2, mtu=4096),
], ids=name)  # fmt: skip
@pytest.mark.parametrize("node", [0, 1])
def test_ring_and_tree_collectives_keep_their_order(job: Job, node: int) -> None:
    """All-reduces on trees, broadcasts on the ring: other queue pairs, and nothing but time says which came first."""
    sender = Sender(job)
    sent = sender.reduce(BIG) + sender.broadcast(np.arange(100, dtype=np.int32)) + sender.barrier()
    sent += sender.reduce(BIG) + sender.reduce(BIG)
    rig = Rig(group_of(job), SIZES)
    rig.feed(seen_at(job, sent, node, "in", "out"))
    rig.finish()
    assert not rig.wrong(sender.results) and not rig.conflicts
    assert rig.reduced == [0, 3, 4]
