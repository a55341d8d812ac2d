"""Which collective comes next, where lengths alone would allow another: order in time, content, two broadcasts."""

from __future__ import annotations

import numpy as np
import pytest
from nccl_traffic import Rig, Sender, Sent, group_of, seen_at
from test_nccl_decoder import BIG, SIZES, SMALL

from flowcheck.lab.nccl_wire_job import Job
from reconstruct.decoder import BROADCAST
from reconstruct.nccl import schedule
from reconstruct.nccl.split import Collective

HEADS = Job(4, gpus_per_node=2, version="2.19.4", algorithm="nvlstree", protocol="simple", channels=4, rails=2)
"""Rings and trees share no connection."""
LL = Job(2, version="2.19.4", algorithm="ring", protocol="ll")


def test_what_was_sent_before_an_all_reduce_came_before_it() -> None:
    """A broadcast on the ring, then a bucket on the trees: other queue pairs, on which the bucket fits at once."""
    sender = Sender(HEADS)
    order = np.arange(100, dtype=np.int32)
    sent = sender.broadcast(order) + sender.reduce(BIG) + sender.broadcast(order + 7) + sender.reduce(BIG)
    rig = Rig(group_of(HEADS), SIZES)
    rig.feed(seen_at(HEADS, sent, 1, "in", "out"))
    rig.finish()
    assert rig.reduced == [1, 3] and not rig.wrong(sender.results)
    assert [data[:400].view(np.int32).tolist() for _, data in sorted(rig.messages.items())] == [
        order.tolist(), (order + 7).tolist()
    ]


@pytest.mark.parametrize("behind", [0, 1])
def test_an_all_reduce_does_not_take_the_place_of_what_was_sent_before_and_captured_late(behind: int) -> None:
    """A broadcast on the ring, seen after the beginning or all of the bucket that followed it on the trees."""
    sender = Sender(HEADS)
    order = np.arange(100, dtype=np.int32)
    copy, bucket = sender.broadcast(order), sender.reduce(BIG)
    node = 1
    here, there = seen_at(HEADS, copy, node, "in", "out"), seen_at(HEADS, bucket, node, "in", "out")
    at = len(there) if behind else len(there) // 3
    rig = Rig(group_of(HEADS), SIZES)
    rig.feed([*there[:at], *here, *there[at:]])
    rig.feed(seen_at(HEADS, sender.broadcast(order) + sender.reduce(BIG), node, "in", "out"))
    rig.finish()
    assert not rig.wrong(sender.results) and rig.reduced[-1] == 3
    assert any("captured later" in lost.reason for lost in rig.lost)
    assert 0 in rig.messages and rig.messages[0][:400].view(np.int32).tolist() == order.tolist()


def _queue_pair(frame: bytes) -> int:
    return int.from_bytes(frame[47:50], "big")


def test_nothing_of_a_later_collective_comes_before_all_have_given_to_an_all_reduce() -> None:
    """The broadcast's message is seen between the first and the last partial sum of the small bucket that follows it:
    it came before, as no rank is further while a part is missing."""
    sender = Sender(HEADS)
    order = np.arange(100, dtype=np.int32)
    copy, bucket = sender.broadcast(order), sender.reduce(SMALL)
    node = 1
    here, there = seen_at(HEADS, copy, node, "in", "out"), seen_at(HEADS, bucket, node, "in", "out")
    used = {_queue_pair(f) for _, _, f in there if f[42] in (6, 7, 8, 9, 11)}
    assert here and not used & {_queue_pair(f) for _, _, f in here if f[42] in (6, 7, 8, 9, 11)}
    starts = [at for at, (_, _, frame) in enumerate(there) if frame[42] in (6, 11)]
    mixed: Sent = [*there[: starts[1]], *here, *there[starts[1] :]]
    mixed = [(there[0][0] + 100 * at, link, frame) for at, (_, link, frame) in enumerate(mixed)]
    rig = Rig(group_of(HEADS), SIZES)
    rig.feed(mixed[: starts[1]], block=1)
    judge = rig.decoder._groups["g"]._judge
    small = judge.blueprints.reductions(4 * SMALL, 4)
    assert judge.possible(small)
    rig.feed(mixed[starts[1] :], block=1)
    assert not judge.possible(small)
    rig.finish()
    assert 0 not in rig.reduced and not rig.wrong(sender.results)


@pytest.mark.parametrize("ways", [("in", "out"), ("in",)])
def test_flags_tell_the_protocol_of_a_short_broadcast(ways: tuple[str, ...]) -> None:
    """64 bytes may be 32 of LL or 64 of Simple: what is in them says which, with announcements and without."""
    sender = Sender(LL)
    order = np.arange(1, 9, dtype=np.int32)
    sent = sender.reduce(BIG) + sender.broadcast(order) + sender.broadcast(order + 1) + sender.reduce(BIG)
    rig = Rig(group_of(LL, every=True), SIZES)
    rig.feed(seen_at(LL, sent, 0, *ways))
    rig.finish()
    assert not rig.wrong(sender.results)
    data = rig.messages
    assert sorted(data) == [1, 2]
    assert [data[tag].view(np.int32).tolist() for tag in (1, 2)] == [order.tolist(), (order + 1).tolist()]
    assert rig.landing(3) is not None and rig.landing(3).covered > 0


def test_what_is_in_a_message_speaks_against_another_protocol() -> None:
    sender = Sender(LL)
    rig = Rig(group_of(LL, every=True), SIZES)
    rig.feed(sender.reduce(BIG) + sender.broadcast(np.arange(1, 9, dtype=np.int32)))
    minds = rig.decoder._groups["g"]._minds
    sights = minds._sights.look()
    assert sorted(sight.lengths for sight in sights) == [(), (64,)]
    fitting = []
    for protocol, size in ((schedule.LL, 32), (schedule.SIMPLE, 64)):
        made = minds._judge.blueprints.get(Collective(schedule.BROADCAST, schedule.RING, protocol, size, 1), 0)
        assert made is not None
        fitting.append(minds._fits_whole(made, sights, (0,) * len(sights)))
    assert fitting == [True, False]


def test_two_short_broadcasts_in_a_row_are_ddps() -> None:
    """No size is named yet that could show what follows: two in a row are read, one alone is not."""
    for count in (1, 2):
        sender = Sender(LL)
        orders = [np.arange(5 + at, dtype=np.int32) for at in range(count)]
        sent = [item for order in orders for item in sender.broadcast(order)]
        rig = Rig(group_of(LL), ())
        rig.feed(sent)
        rig.finish()
        assert sorted(rig.messages) == ([0, 1] if count == 2 else [])
        assert [r.kind for r in rig.requests].count(BROADCAST) == (2 if count == 2 else 0)


def test_parts_of_an_all_reduce_are_no_broadcasts() -> None:
    """Four ranks, one element: a rank sends parts in turn with what it gets, which broadcasts from rank 0 would not."""
    job = Job(4, version="2.19.4", algorithm="ring", protocol="simple")
    sender = Sender(job)
    sent = sender.reduce(SMALL // 8) + sender.reduce(BIG)
    rig = Rig(group_of(job), {(4 * BIG, 4)})
    rig.feed(seen_at(job, sent, 1, "in", "out"))
    rig.finish()
    assert not rig.messages and not rig.wrong(sender.results)
    assert rig.reduced == [1]


def test_of_two_sizes_that_differ_in_a_channels_last_message_the_times_tell() -> None:
    """Scheme A, tree, LL128: of one of 75,456 bytes the fourth channel has a message, of 75,648 two; the second may be
    the first of what follows, but its sender would not yet have got all of the first."""
    job = Job(2, version="2.20.5", algorithm="tree", protocol="ll128", channels=4, mtu=4096)
    sizes = ((75456, 4), (75648, 4), (288192, 4))
    order = (75456, 75456, 75648, 288192, 75648, 75456, 288192)
    sender = Sender(job)
    sent = [frame for size in order for frame in sender.reduce(size // 4)]
    rig = Rig(group_of(job), sizes)
    rig.feed(seen_at(job, sent, 0, "in", "out"))
    rig.finish()
    assert rig.reduced == list(range(len(order))) and not rig.wrong(sender.results)


@pytest.mark.parametrize("barriers", [1, 2, 3])
def test_barriers_at_the_end_are_no_alarm(barriers: int) -> None:
    """Whether they are barriers only what follows would tell; nobody waits for it."""
    sender, rig = Sender(LL), Rig(group_of(LL), SIZES)
    rig.feed(sender.reduce(BIG) + [frame for _ in range(barriers) for frame in sender.barrier()])
    rig.now += 10 * 10**9
    rig.pass_time()
    assert rig.reduced == [0] and not rig.lost


def test_what_explains_nothing_is_told_in_time() -> None:
    sender, rig = Sender(LL), Rig(group_of(LL), SIZES)
    first, second = sender.reduce(BIG), sender.reduce(9000)
    rig.feed(first + second[len(second) // 2 :])
    rig.now += 10 * 10**9
    rig.pass_time()
    assert rig.reduced == [0] and rig.lost


@pytest.mark.parametrize("count", [SMALL, BIG])
@pytest.mark.parametrize("skew", [-100_000, 100_000])
def test_clocks_of_two_mirrors_need_not_agree(skew: int, count: int) -> None:
    """One direction is stamped 0.1 ms off: all-reduces share connections, whose packet numbers tell the order."""
    job = Job(2, version="2.28.9", algorithm="ring", protocol="simple", channels=2)
    sender = Sender(job)
    sent = [frame for _ in range(6) for frame in sender.reduce(count)]
    rig = Rig(group_of(job), SIZES)
    rig.feed([(time + (skew if frame[26:30] < frame[30:34] else 0), link, frame) for time, link, frame in sent], 4)
    rig.finish()
    assert rig.reduced == list(range(6)) and not rig.lost and not rig.wrong(sender.results)
