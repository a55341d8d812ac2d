"""Why bytes are missing: what reassembly says of each hole, and the cause that follows from it (docs/loss.md)."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roce_frames import FIRST, MIDDLE, Sender, ack, roce_frame
from roce_frames import Wire as RoceWire
from tcp_frames import BACK, ISN, MS, SECOND, START, Wire, acked, block_of, chosen, data, syn, tcp_frame
from test_tcp_captures import Reading

from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.loss import CAUSES, MIRROR, NIC, RING, SETTLED, TRUNCATED, UNKNOWN, Evidence, Tally, Why
from mirror.roce_spans import MessageSpans
from mirror.spans import CONFLICT, CUT, DUPLICATE, HOLE, PROVEN, Spans
from mirror.streams import StreamRecorder
from mirror.tcp import TcpReassembler
from mirror.vantage import Vantage


def holes(spans: Spans) -> list[tuple[int, int, int]]:
    """(offset, length, what is known) of every HOLE."""
    at = np.flatnonzero(spans.kind[: spans.n] == HOLE)
    assert len(at) == spans.holes
    return list(zip(spans.offset[at].tolist(), spans.length[at].tolist(), spans.why[at, 0].tolist(), strict=True))


# The cause of a hole


@pytest.mark.parametrize(
    ("known", "since", "until", "cause"),
    [
        (0, 10, 20, UNKNOWN), (PROVEN, 10, 20, MIRROR), (PROVEN | CUT, 10, 20, TRUNCATED), (CUT, 120, 140, TRUNCATED),
        (0, 90, 110, RING), (PROVEN, 90, 210, RING), (PROVEN, 100, 200, RING), (PROVEN, 0, 100, MIRROR),
        (PROVEN, 200, 250, MIRROR), (0, 200, 250, UNKNOWN), (0, 290, 310, NIC), (0, 90, 310, RING),
        (PROVEN, 350, 350, NIC), (0, 400, 500, UNKNOWN), (0, 240, 150, RING),
    ],
)  # fmt: skip
def test_the_first_thing_that_is_shown_is_the_cause(known: int, since: int, until: int, cause: str) -> None:
    """The ring lost frames between 100 and 200, the interface between 300 and 400."""
    evidence = Evidence()
    evidence.lost(RING, 0, 100, 200)
    evidence.lost(NIC, 0, 300, 400)
    assert evidence.cause(Why(known, since, until, 0)) == cause
    elsewhere = TRUNCATED if known & CUT else MIRROR if known & PROVEN else UNKNOWN
    assert evidence.cause(Why(known, since, until, 7)) == elsewhere


def test_losses_of_an_interface_count_for_what_its_tunnels_show() -> None:
    vantage = Vantage({"fabric": ["mon0"]})
    mine = vantage.of_interface("mon0")
    rows = vantage.table.rows
    rows[0, [5, 6]], rows[3, [5, 6]] = (mine << 8 | 1, 70_000), (70_000 << 8 | 2, 70_001)
    assert vantage.carriers(70_001) == {70_001, 70_000, mine} and vantage.carriers(0) == {0}
    evidence = Evidence(vantage.carriers)
    evidence.lost(RING, mine, 100, 200)
    assert [evidence.cause(Why(0, 100, 200, group)) for group in (mine, 70_000, 70_001, 0)] == [RING] * 3 + [UNKNOWN]


def test_windows_in_any_order_and_number_are_found_again() -> None:
    dice = np.random.default_rng(5)
    evidence = Evidence()
    starts = dice.integers(0, 1 << 40, 3000)
    for start in starts.tolist():
        evidence.lost(RING, 0, start, start + 1000)
    since = dice.integers(0, 1 << 40, 5000)
    until = since + dice.integers(0, 1 << 30, 5000)
    found = evidence.causes(np.zeros(5000, np.int64), since, until, np.zeros(5000, np.int64))
    overlap = ((starts[None] < until[:, None]) & (starts[None] + 1000 > since[:, None])).any(axis=1)
    assert (found == np.where(overlap, CAUSES.index(RING), CAUSES.index(UNKNOWN))).all()
    for start in range(0, 1 << 40, 1 << 25):  # far more than are kept: the newest are
        evidence.lost(RING, 0, (1 << 41) + start, (1 << 41) + start + 1)
    assert evidence.cause(Why(0, 3 << 40, (3 << 40) + (1 << 26), 0)) == UNKNOWN
    assert evidence.cause(Why(0, (3 << 40) - (1 << 26), 3 << 40, 0)) == RING


# TCP


def test_what_the_receiver_acknowledged_passed() -> None:
    wire = Wire()
    wire.feed(syn(), data(0, bytes(100)), data(200, bytes(100)), tcp_frame(seq=5000, ack=ISN + 1, flags=0x12, **BACK))
    wire.feed(acked(250), after=MS)
    assert holes(wire.tcp.expire(wire.now + 10 * MS)) == []
    assert holes(wire.tcp.expire(wire.now + 30 * MS)) == []
    assert holes(wire.tcp.expire(wire.now + 60 * MS)) == [(100, 100, PROVEN)]
    # At the end of the input a part of what is missing was acknowledged, the rest was not.
    wire.feed(data(500, bytes(10)), acked(400), after=SECOND)
    assert holes(wire.tcp.flush(wire.now)) == [(300, 100, PROVEN), (400, 100, 0)]


def test_a_hole_says_between_which_frames_it_lies() -> None:
    wire = Wire()
    wire.feed(syn())
    wire.feed(data(0, bytes(100)), after=MS)
    wire.feed(data(200, bytes(100)), after=2 * MS)
    wire.feed(data(400, bytes(100)), after=4 * MS)
    spans = wire.tcp.flush(wire.now + SECOND)
    assert holes(spans) == [(100, 100, 0), (300, 100, 0)]
    at = spans.kind[: spans.n] == HOLE
    assert (spans.why[: spans.n, 1][at] - START).tolist() == [MS, 3 * MS]
    assert (spans.ts[: spans.n][at] - START).tolist() == [3 * MS, 7 * MS]


def test_data_the_other_way_close_no_hole() -> None:
    """Both directions are busy, and what goes back acknowledges nothing new: the gap waits for its own bytes."""
    wire = Wire()
    wire.feed(syn(), tcp_frame(seq=5000, ack=ISN + 1, flags=0x12, **BACK), data(0, bytes(100)))
    wire.feed(data(200, bytes(100)))
    for k in range(200):
        spans = wire.feed(data(300 + 100 * k, bytes(100)), acked(100, payload=bytes(100), at=100 * k), after=100 * MS)
        assert not any(kind == "hole" for kind, *_ in spans)
    assert wire.tcp.delivered[0] == 100
    late = wire.feed(data(100, b"x" * 100), after=MS)
    assert late[0][0] == "data" and late[0][2:] == (100, b"x" * 100) and wire.tcp.counters()["holes"] == 0


def test_without_acknowledgments_nobody_knows_whether_it_passed() -> None:
    wire = Wire()
    wire.feed(syn(), data(0, bytes(100)), data(200, bytes(100)))
    assert holes(wire.tcp.expire(wire.now + 2 * SECOND)) == [(100, 100, 0)]


def test_bytes_that_were_cut_off_are_told_from_bytes_that_never_came() -> None:
    wire = Wire()
    whole = [syn(), data(0, bytes(100)), data(100, bytes(100)), data(300, bytes(100)), data(400, bytes(100))]
    cut = [frame[:94] if k in (2, 4) else frame for k, frame in enumerate(whole)]
    wire.take(block_of(cut, START, wirelen=[len(frame) for frame in whole]), START)
    assert holes(wire.tcp.flush(START + SECOND)) == [(140, 60, CUT), (200, 100, 0), (440, 60, CUT)]
    assert wire.tcp.held_bytes == 0
    # What a whole copy brings after all is no hole.
    wire = Wire()
    wire.take(block_of(cut, START, wirelen=[len(frame) for frame in whole]), START)
    wire.feed(whole[2], after=MS)
    assert holes(wire.tcp.flush(START + SECOND)) == [(200, 100, 0), (440, 60, CUT)]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_every_missing_byte_has_what_is_known_of_it(seed: int, with_syn: bool) -> None:
    """Segments lost, cut and out of order, some acknowledged: CUT and PROVEN byte by byte."""
    dice = random.Random(seed)
    size = dice.randint(2, 200) * 50
    edges = sorted({0, size, *(dice.randrange(2, size, 2) for _ in range(dice.randint(1, 40)))})
    frames, present, cut = [], np.zeros(size, bool), np.zeros(size, bool)
    for low, high in pairwise(edges):
        fate = dice.random()
        if fate < 0.2 and low:
            continue
        kept = dice.randint(0 if low else 1, high - low) if fate < 0.5 else high - low
        frame = data(low, bytes(high - low))
        when = low + dice.uniform(0, dice.choice((0, 3000))) if low else -1.0
        frames.append((when, frame[: 54 + kept], len(frame)))
        present[low : low + kept] = True
        cut[low + kept : high] = True
    frames.sort(key=lambda item: item[0])
    known = dice.randint(0, size)
    wire = Wire()
    opening = [syn(), tcp_frame(seq=5000, ack=ISN + 1, flags=0x12, **BACK)] if with_syn else []
    wire.take(block_of(opening, START), START) if opening else None
    now, missing = START, []
    for at in range(0, len(frames), 5):
        part = frames[at : at + 5]
        now += MS // 10
        block = block_of([frame for _, frame, _ in part], now, wirelen=[wirelen for *_, wirelen in part])
        missing += holes(wire.tcp.feed(block, now))
    if with_syn:
        missing += holes(wire.tcp.feed(block_of([acked(known)], now + 1), now + 1))
    missing += holes(wire.tcp.flush(now + 2))
    found = np.full(size, -1)
    for offset, length, bits in missing:
        assert (found[offset : offset + length] == -1).all()
        found[offset : offset + length] = bits
    passed = np.arange(size) < (known if with_syn else 0)
    end = max(np.flatnonzero(present | cut).max() + 1, known if with_syn else 0)
    expected = np.where(present, -1, CUT * cut + PROVEN * passed)[:end]
    assert (found[:end] == expected).all() and (found[end:] == -1).all()
    assert wire.tcp.held_bytes == 0


@pytest.mark.parametrize(
    "name",
    [
        "tcp/tcp_loss_client_view_trex.pcap", "tcp/tcp_minus_1_packet_smb2_suricata.pcap",
        "tcp/tcp_exact_overlap_conflict_suricata.pcap", "tcp/tcp_partial_overlap_suricata.pcap",
        "tcp/tcp_truncated_snaplen_1MB_zeek.pcap", "tcp/tcp_all_packets_duplicated_zeek.pcap",
        "tcp/tcp_ooo_1.7MB_suricata.pcap",
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep", [1.0, 0.97])
def test_complete_is_false_if_and_only_if_there_is_a_hole_or_a_conflict(shared: Path, name: str, keep: float) -> None:
    """Counted here from the spans alone: what was never given, and what was given in two versions."""
    dice = np.random.default_rng(3)
    flows = Flows()
    tcp, recorder = TcpReassembler(flows), StreamRecorder(flows)
    lacking: dict[int, set[int]] = {}
    given_: dict[int, dict[int, int]] = {}
    bad: set[int] = set()

    def take(spans: Spans) -> None:
        recorder.feed(spans)
        for i in range(spans.n):
            flow, kind, low = int(spans.flow[i]), int(spans.kind[i]), int(spans.offset[i])
            span = range(low, low + int(spans.length[i]))
            if kind == HOLE:
                lacking.setdefault(flow, set()).update(span)
            elif kind == CONFLICT:
                bad.add(flow)
            elif kind in (0, DUPLICATE):
                held = given_.setdefault(flow, {})
                raw = (np.ctypeslib.ctypes.c_ubyte * len(span)).from_address(int(spans.addr[i]))
                for at, value in zip(span, raw, strict=True):
                    if held.setdefault(at, value) != value:
                        bad.add(flow)
                lacking.get(flow, set()).difference_update(span)

    source = CaptureFileSource([shared / "captures" / name])
    now = 0
    while not source.finished:
        block = source.read(0.0)
        if block is not None:
            now = max(now, int(block.ts.max()))
            take(tcp.feed(chosen(block, np.flatnonzero(dice.random(len(block)) < keep)), now))
            source.release(block)
    source.close()
    take(tcp.flush(now))
    streams = [stream for stream in recorder.streams if stream.length]
    assert streams and len({stream.flow for stream in streams}) == len(streams)
    for stream in streams:
        assert stream.complete == (not lacking.get(stream.flow) and stream.flow not in bad)
        assert stream.complete == (not stream.holes and not stream.conflicts)
    if keep == 1.0 and name.startswith(("tcp/tcp_minus", "tcp/tcp_exact", "tcp/tcp_trunc")):
        assert not all(stream.complete for stream in streams)


def test_a_hole_is_counted_once_whatever_the_block_size(shared: Path) -> None:
    path = shared / "captures" / "tcp" / "tcp_truncated_snaplen_1MB_zeek.pcap"
    counts = [Reading(path, frames=frames).counters for frames in (None, 7)]
    assert counts[0]["hole_bytes"] == counts[1]["hole_bytes"] > 900_000


# RoCE


def roce_holes(spans: MessageSpans) -> list[tuple[int, int, int, bool]]:
    """(offset, length, what is known, whether the message is known) of every HOLE."""
    at = np.flatnonzero(spans.kind[: spans.n] == HOLE)
    assert len(at) == spans.holes
    return [(*found, bool(spans.message[i] >= 0)) for found, i in zip(holes(spans), at.tolist(), strict=True)]


def test_an_acknowledged_packet_passed_and_a_later_one_proves_nothing() -> None:
    packets = [one.frame for one in Sender().write(bytes(6000))]
    wire = RoceWire()
    wire.feed(packets[0], packets[1], packets[3], packets[4])
    blind = RoceWire()
    blind.feed(*packets[:2], packets[3], packets[4])
    assert roce_holes(blind.roce.expire(blind.now + 2 * SECOND)) == [(2048, 1024, 0, True)]
    wire.feed(ack(3), after=MS)
    wire.roce.expire(wire.now + 30 * MS)
    assert roce_holes(wire.roce.expire(wire.now + 60 * MS)) == [(2048, 1024, PROVEN, True)]


def test_a_nak_proves_what_lies_before_it_and_no_more() -> None:
    packets = [one.frame for one in Sender().write(bytes(6000))]
    wire = RoceWire()
    wire.feed(packets[0], packets[5])
    wire.feed(ack(3, syndrome=0x60), after=MS)
    wire.roce.expire(wire.now + 30 * MS)
    assert roce_holes(wire.roce.expire(wire.now + 60 * MS)) == [(1024, 2048, PROVEN, True)]
    wire.feed(packets[3], packets[4], after=MS)  # the retry that it asked for
    assert roce_holes(wire.roce.flush(wire.now + SECOND)) == []


def test_a_packet_that_was_cut_is_known_by_its_number() -> None:
    packets = [one.frame for one in Sender().write(bytes(8000))]
    wire = RoceWire()
    frames = [packets[0], packets[1], packets[3][:128], packets[5], packets[4][:128], packets[6], packets[7][:128]]
    wire.feed(*frames, wirelen=[128 if len(frame) == 128 else len(frame) for frame in frames])
    found = roce_holes(wire.roce.flush(wire.now + SECOND))
    assert found == [(2048, 1024, 0, True), (3072, 2048, CUT, True), (7168, 832, CUT, True)] or found == [
        (2048, 1024, 0, True), (3072, 1024, CUT, True), (4096, 1024, CUT, True), (7168, 832, CUT, True),
    ]  # fmt: skip
    # A retry that came whole fills the place.
    wire = RoceWire()
    wire.feed(packets[0], packets[1][:128], packets[2])
    wire.feed(packets[1], after=MS)
    assert wire.roce.counters()["hole_bytes"] == 0
    assert all(offset >= 3072 for offset, *_ in roce_holes(wire.roce.flush(wire.now + SECOND)))


def test_thousands_of_cut_packets_are_few_gaps() -> None:
    wire = RoceWire(gaps=256)
    first = roce_frame(FIRST, 0, bytes(1024), size=4000 * 1024)
    wire.feed(first, *(roce_frame(MIDDLE, psn, bytes(1024))[:128] for psn in range(1, 3999)))
    found = roce_holes(wire.roce.flush(wire.now + SECOND))
    assert found[0] == (1024, 3998 * 1024, CUT, True) and wire.roce.counters()["no_room"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_roce_holes_are_what_was_lost_with_what_is_known(seed: int) -> None:
    """Messages of which packets are lost or cut, some acknowledged: CUT and PROVEN packet by packet."""
    dice = random.Random(seed)
    sender, packets, message = Sender(psn=dice.randrange(1 << 24)), [], []
    for number in range(12):
        sent = sender.write(bytes(dice.randint(1, 9) * 1024 + 100), va=number << 20)
        packets += sent
        message += [number] * len(sent)
    fate = [dice.choice(("whole", "whole", "whole", "lost", "cut")) for _ in packets]
    fate[0] = fate[-1] = "whole"
    starts = {message[k]: k for k in reversed(range(len(packets)))}
    for k in starts.values():
        fate[k] = "whole"
    reached = dice.randrange(len(packets))
    wire = RoceWire()
    spans = [wire.feed(
        *(p.frame[:128] if f == "cut" else p.frame for p, f in zip(packets, fate, strict=True) if f != "lost")
    )]
    del spans
    wire.feed(ack(packets[reached].psn), after=MS)
    found: dict[tuple[int, int], int] = {}
    flushed = wire.roce.flush(wire.now + SECOND)
    first = {int(wire.roce.messages[s, 4]) >> 20: s for s in np.unique(flushed.message[: flushed.n]).tolist() if s >= 0}
    slots = {slot: number for number, slot in first.items()}
    for i in np.flatnonzero(flushed.kind[: flushed.n] == HOLE).tolist():
        low, length = int(flushed.offset[i]), int(flushed.length[i])
        for offset in range(low, low + length, 1024):
            key = slots[int(flushed.message[i])], offset
            assert key not in found
            found[key] = int(flushed.why[i, 0])
    expected = {}
    for k, (packet, one) in enumerate(zip(packets, fate, strict=True)):
        if one != "whole":
            expected[message[k], packet.offset] = CUT * (one == "cut") + PROVEN * (k <= reached)
    assert found == expected


# Sums


def test_bytes_by_cause_add_up_to_the_holes() -> None:
    """Seeded: a flow with frames lost by the mirror, in the ring and by cutting; every byte counted once."""
    for seed in range(12):
        dice = random.Random(seed)
        evidence = Evidence()
        wire = Wire()
        tally = Tally(evidence)
        expected = dict.fromkeys(CAUSES, 0)
        wire.feed(syn(), tcp_frame(seq=5000, ack=ISN + 1, flags=0x12, **BACK), data(0, bytes(100)))
        fate, at, now = "whole", 100, START + MS
        for _ in range(300):
            before, fate = fate, dice.choice(("whole",) * 6 + ("mirror", "ring", "truncated"))
            if fate == "ring" and before != "whole":
                fate = "whole"
            size = dice.randint(1, 70) * 20
            frame = data(at, bytes(size))
            at += size
            now += MS
            if fate == "ring":
                evidence.lost(RING, 0, now - MS // 2, now + MS // 2)
                expected[RING] += size
                now += MS
                at += 100  # the frame behind it comes: nothing else is lost beside it
                block = block_of([data(at - 100, bytes(100))], now)
            elif fate == "mirror":
                expected[MIRROR] += size
                continue
            else:
                kept = dice.randint(0, size - 1) if fate == "truncated" else size
                expected[TRUNCATED] += size - kept
                block = block_of([frame[: 54 + kept]], now, wirelen=[len(frame)])
            spans = wire.tcp.feed(block, now)
            tally.take(spans, lambda flow: flow * 0)
        tally.take(wire.tcp.feed(block_of([acked(at)], now + MS), now + MS), lambda flow: flow * 0)
        tally.take(wire.tcp.flush(now + SECOND), lambda flow: flow * 0)
        assert sum(tally.bytes().values()) == wire.tcp.counters()["hole_bytes"] == sum(expected.values())
        assert tally.bytes() == expected
        tally.settle(now + 2 * SETTLED)
        evidence.lost(NIC, 0, 0, 1 << 62)  # too late to change anything
        assert tally.bytes() == expected


def test_an_adapter_that_tells_of_its_drops_late_is_still_heard() -> None:
    evidence = Evidence()
    tally = Tally(evidence)
    wire = Wire()
    wire.feed(syn(), data(0, bytes(100)), tcp_frame(seq=5000, ack=ISN + 1, flags=0x12, **BACK))
    wire.feed(data(200, bytes(100)), acked(300), after=MS)
    tally.take(wire.tcp.flush(wire.now), lambda flow: flow * 0)
    tally.settle(wire.now + SETTLED // 2)
    assert tally.bytes()[MIRROR] == 100
    evidence.lost(NIC, 0, START, wire.now)
    assert tally.bytes() == {**dict.fromkeys(CAUSES, 0), NIC: 100}
    tally.settle(wire.now + 2 * SETTLED)
    evidence.lost(RING, 0, START, wire.now)
    assert tally.bytes()[NIC] == 100
