"""Frames that nothing explains: made-up queue pairs and injured messages are bounded work for the decoder, and told.

Work is counted, not timed: comparisons of queue pairs with connections, planned collectives, looks at announcements.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzzing import Mutator
from nccl_traffic import START, Rig, Sender, group_of
from tcp_frames import block_of

from flowcheck.lab.nccl_wire_job import Job
from mirror.roce import QueuePairs, RoceReassembler
from reconstruct.nccl import allowance, recognise
from reconstruct.nccl.allowance import Allowance
from reconstruct.nccl.binding import Reader
from reconstruct.nccl.decoder import NcclDecoder
from reconstruct.nccl.guess import Guess, Seen
from reconstruct.nccl.notices import Notices
from reconstruct.nccl.recognise import Recogniser

JOB = Job(8, gpus_per_node=2, rails=2, channels=4, protocol="simple", algorithm="ring", version="2.28.9", mtu=4096)
FOUR = Job(2, channels=4, protocol="simple", algorithm="ring", version="2.28.9", mtu=4096)
COUNTS = (3000, 50_000)
SIZES = {(4 * count, 4) for count in COUNTS}
BTH = 14 + 20 + 8  # where it begins in these frames


class Work:
    """What the decoder does from now on, of all groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fits = self.plans = self.finds = 0
        fit, planned, find = Reader._fit, Allowance.planned, Notices.find

        def counted_fit(*arguments: object) -> object:
            self.fits += 1
            return fit(*arguments)  # type: ignore[arg-type]

        def counted_plans(of: Allowance, count: int) -> None:
            self.plans += count
            planned(of, count)

        def counted_find(*arguments: object) -> object:
            self.finds += 1
            return find(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Reader, "_fit", counted_fit)
        monkeypatch.setattr(Allowance, "planned", counted_plans)
        monkeypatch.setattr(Notices, "find", counted_find)

    def since(self) -> tuple[int, int, int]:
        """(comparisons, plans, looks) since the last call."""
        told = self.fits, self.plans, self.finds
        self.fits = self.plans = self.finds = 0
        return told


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def honest(counts: tuple[int, ...] = COUNTS) -> list[bytes]:
    sender = Sender(JOB)
    return [frame for count in counts for _, _, frame in sender.reduce(count)]


def copies(frames: list[bytes], count: int) -> Iterator[bytes]:
    """Each frame on `count` other queue pairs."""
    for frame in frames:
        pair = int.from_bytes(frame[BTH + 5 : BTH + 8])
        for number in range(count):
            other = (pair * 4096 + 7919 * number + 13) % (1 << 24)
            yield frame[: BTH + 5] + other.to_bytes(3) + frame[BTH + 8 :]


def blocks(frames: Iterator[bytes], size: int, begin: int = START) -> Iterator[tuple[list[bytes], list[int]]]:
    some: list[bytes] = []
    at = begin
    for frame in frames:
        some.append(frame)
        if len(some) == size:
            yield some, [at + 100 * number for number in range(size)]
            at += 100 * size
            some = []


def test_made_up_queue_pairs_are_refused_beyond_a_bound_and_told(work: Work) -> None:
    frames = honest()
    rig = Rig(group_of(JOB), SIZES)
    follower = rig.decoder._groups["g"]
    most = 0
    for count, (some, times) in enumerate(blocks(copies(frames, 256), 512)):
        rig.now = times[-1]
        rig._take(rig.roce.feed(block_of(some, times), rig.now))
        fits, plans, _ = work.since()
        rows = 2 * 16 * JOB.channels  # places of the queue pair at hand when the allowance ends, with both phases
        assert fits <= allowance._FITS + rows
        assert plans <= allowance._PLANS + recognise._MOST_PLANS[0] + 2 * recognise._MOST_PLANS[1]
        loose = [lane for lane in follower.roster.lanes if lane.place is None]
        for ends in {lane.ends for lane in loose}:
            assert sum(lane.ends == ends for lane in loose) <= follower.roster.most(ends)
        most = max(most, len(loose))
        if count == 24:
            break
    assert most > 64 and rig.decoder.counters["flows_refused"] > 0
    told = [event.reason for event in rig.lost if "more than" in event.reason and "queue pairs" in event.reason]
    assert told and len(told) == len(follower._crowds)
    assert not rig.reduced


def test_an_honest_job_is_followed_once_they_are_gone() -> None:
    """Whoever was refused is looked at again when the job attaches again."""
    sender = Sender(FOUR)
    sent = [item for count in COUNTS for item in sender.reduce(count)]
    rig = Rig(group_of(FOUR), SIZES)
    for some, times in blocks(copies([frame for _, _, frame in sent], 64), 512):
        rig.now = times[-1]
        rig._take(rig.roce.feed(block_of(some, times), rig.now))
    assert rig.decoder.counters["flows_refused"] > 0 and not rig.reduced
    rig.decoder.remove_group("g")
    rig.decoder.add_group(group_of(FOUR), 0, rig.now + 1)
    rig.events.clear()
    later = rig.now + 1_000_000
    rig.feed([(time - sent[0][0] + later, link, frame) for time, link, frame in sent])
    rig.finish()
    assert rig.reduced == [0, 1] and not rig.wrong(sender.results)


def test_no_room_for_more_queue_pairs_is_told_once() -> None:
    sender = Sender(FOUR)
    frames = [frame for _, _, frame in sender.reduce(COUNTS[0])]
    rig = Rig(group_of(FOUR), SIZES)
    pairs = QueuePairs(1024)
    rig.roce = RoceReassembler(pairs)
    rig.decoder = NcclDecoder(pairs, rig.roce, max_lanes=4)
    rig.decoder.add_group(group_of(FOUR), 0)
    for some, times in blocks(copies(frames, 8), 256):
        rig.now = times[-1]
        rig._take(rig.roce.feed(block_of(some, times), rig.now))
    assert rig.decoder.counters["flows"] == 4 and rig.decoder.counters["flows_refused"] > 4
    told = [event.reason for event in rig.lost if "room for" in event.reason]
    assert len(told) == 1 and told[0].startswith("4 queue pairs are followed")


def elsewhere(frame: bytes) -> bytes:
    """A write to memory that nobody has announced."""
    at = BTH + 12 + 8  # the key of its address
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :] if frame[BTH] in (6, 10, 11) else frame


def test_nothing_is_tried_again_while_nothing_changes(work: Work) -> None:
    rig = Rig(group_of(JOB), SIZES)
    (some, times) = next(blocks((elsewhere(frame) for frame in copies(honest(COUNTS[:1]), 8)), 512))
    rig.now = times[-1]
    rig._take(rig.roce.feed(block_of(some, times), rig.now))
    follower = rig.decoder._groups["g"]
    fits, _, finds = work.since()
    assert fits > 0 and finds > 0 and any(lane.place is None and lane.queue for lane in follower.roster.lanes)
    for _ in range(3):
        follower.dirty = True
        rig.pass_time()
    work.since()
    for _ in range(5):
        follower.dirty = True
        rig.pass_time()
        assert work.since() == (0, 0, 0)


def test_a_search_by_lengths_waits_for_the_next_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages of one block ask for it."""
    monkeypatch.setattr(allowance, "_PLANS", 1)
    searches = [0]
    search = Recogniser._guess

    def counted(of: Recogniser, seen: list[Seen], most: int) -> list[Guess]:
        searches[0] += most == recognise._MOST_PLANS[0]
        return search(of, seen, most)

    monkeypatch.setattr(Recogniser, "_guess", counted)
    sender = Sender(FOUR)
    frames = [frame for count in (*COUNTS, 777, *COUNTS) for _, _, frame in sender.reduce(count)]
    most = 0
    for harm in (0.03, 0.3):
        rig = Rig(group_of(FOUR), {(48, 4)})  # of no size that comes
        mutator = Mutator(frames, 4)
        for _ in range(12):
            searches[0] = 0
            rig.now = mutator.now
            rig._take(rig.roce.feed(mutator.block(512, harm), rig.now))
            most = max(most, searches[0])
    assert most == 1


def test_injured_messages_are_bounded_work(work: Work) -> None:
    frames = honest()
    for harm in (0.03, 0.3, 1.0):
        rig = Rig(group_of(JOB), SIZES)
        mutator = Mutator(frames, 4)
        for _ in range(12):
            block = mutator.block(512, harm)
            rig.now = mutator.now
            rig._take(rig.roce.feed(block, rig.now))
            fits, plans, finds = work.since()
            assert fits <= 2 * allowance._FITS
            assert plans <= allowance._PLANS + recognise._MOST_PLANS[0] + 2 * recognise._MOST_PLANS[1]
            assert finds <= 64 * 512


def test_what_one_feed_puts_off_the_next_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an allowance that is far too small everything is found all the same, a few feeds later."""
    monkeypatch.setattr(allowance, "_FITS", 1)
    sender = Sender(FOUR)
    sent = [item for count in (*COUNTS, *COUNTS) for item in sender.reduce(count)]
    rig = Rig(group_of(FOUR), SIZES)
    rig.feed(sent)
    put_off = 0
    for _ in range(4000):
        rig.pass_time()
        put_off += rig.decoder.unfinished
        if not rig.decoder.unfinished:
            break
    rig.finish()
    assert put_off > 0 and not rig.decoder.unfinished
    assert rig.reduced == [0, 1, 2, 3] and not rig.wrong(sender.results)
