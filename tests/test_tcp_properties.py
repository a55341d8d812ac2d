"""Random traffic against the one thing that must hold: every byte at its place, every missing byte known."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_frames import (
    ACK,
    BACK,
    FIN,
    ISN,
    MS,
    RST,
    SECOND,
    START,
    SYN,
    Wire,
    block_of,
    chosen,
    data,
    syn,
    tcp_frame,
)

from mirror.flows import Flows
from mirror.reorder import AFTER, FREE, SPENT_HEAD
from mirror.spans import Spans
from mirror.streams import StreamRecorder


def cut(dice: random.Random, size: int, grain: int) -> list[tuple[int, int]]:
    """(offset, length) of a complete cover of 0..size in random pieces of multiples of `grain`."""
    edges = sorted({0, size, *(dice.randrange(0, size, grain) for _ in range(dice.randint(0, 30)))})
    return [(a, b - a) for a, b in pairwise(edges)]


def traffic(dice: random.Random, content: bytes, isn: int, grain: int = 1) -> list[bytes]:
    """The content cut differently several times over, so duplicated, split and overlapped, in disorder."""
    pieces = [piece for _ in range(dice.randint(1, 3)) for piece in cut(dice, len(content), grain)]
    reach = dice.choice((0, 3, 1000))
    order = sorted(range(len(pieces)), key=lambda i: i + dice.uniform(0, reach))
    return [data(pieces[i][0], content[pieces[i][0] : sum(pieces[i])], isn=isn) for i in order]


def record(wire: Wire, recorder: StreamRecorder, spans: Spans) -> None:
    recorder.feed(spans)
    wire.read(spans)


ISNS = st.sampled_from([0, ISN, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFF0, 123456789])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), ISNS, st.integers(2, 20_000), st.booleans())
def test_any_disorder_gives_the_stream(seed: int, isn: int, size: int, with_syn: bool) -> None:
    dice = random.Random(seed)
    # Without a SYN a first segment of one byte counts as a keep-alive probe: so none there.
    content = dice.randbytes(size if with_syn else size // 2 * 2)
    frames = [syn(isn), *traffic(dice, content, isn)] if with_syn else traffic(dice, content, isn, 2)
    wire = Wire()
    recorder = StreamRecorder(wire.flows)
    while frames:
        n = dice.randint(1, len(frames))
        record(wire, recorder, wire.tcp.feed(block_of(frames[:n], START), START))
        del frames[:n]
    record(wire, recorder, wire.tcp.flush(START))
    (stream,) = recorder.streams
    assert stream.data == content
    assert stream.complete


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), ISNS, st.integers(2, 20_000), st.booleans())
def test_lost_frames_leave_holes_of_their_place_and_size(seed: int, isn: int, size: int, in_time: bool) -> None:
    """Every frame may be lost, or cut. Present is exactly what was captured, and every byte is at its place."""
    dice = random.Random(seed)
    content = dice.randbytes(size)
    frames = [frame for frame in traffic(dice, content, isn) if dice.random() > 0.3]
    captured = [len(frame) if dice.random() < 0.9 else dice.randint(54, len(frame)) for frame in frames]
    expected = np.zeros(size, np.uint8)
    for frame, present in zip(frames, captured, strict=True):
        start = (int.from_bytes(frame[38:42], "big") - isn - 1) & 0xFFFFFFFF
        expected[start : start + present - 54] = 1
    end = data(size, b"", isn=isn, flags=ACK | FIN)
    cut_frames = [frame[:present] for frame, present in zip(frames, captured, strict=True)]
    block = block_of([syn(isn), *cut_frames, end], wirelen=[54, *(len(frame) for frame in frames), 54])
    wire = Wire()
    recorder = StreamRecorder(wire.flows)
    now, at = START, 0
    while at < len(block):
        n = dice.randint(1, len(block) - at)
        part = chosen(block, range(at, at + n))
        if in_time:
            now += dice.choice((0, MS, SECOND))
        part.ts[:] = now
        record(wire, recorder, wire.tcp.feed(part, now))
        if in_time and dice.random() < 0.3:
            now += dice.choice((MS, 2 * SECOND))
            record(wire, recorder, wire.tcp.expire(now))
        at += n
    record(wire, recorder, wire.tcp.flush(now))
    (stream,) = recorder.streams
    assert stream.length == size and stream.closed == "fin" and not stream.conflicts
    missing = np.zeros(size, bool)
    for offset, length in stream.holes:
        missing[offset : offset + length] = True
    if in_time and not np.array_equal(missing, expected == 0):
        # A single late byte right behind a hole that was given up cannot be told from a keep-alive probe.
        assert (missing | (expected == 1)).all() and wire.tcp.counters()["probes"] > 0
    else:
        assert np.array_equal(missing, expected == 0)
    found = np.frombuffer(stream.data, np.uint8)
    assert np.array_equal(found[~missing], np.frombuffer(content, np.uint8)[~missing])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_hostile_segments_never_break_the_rules(seed: int) -> None:
    """Random flags, numbers, sizes and times over few flows and a tiny table and arena: `Wire` checks every span."""
    dice = random.Random(seed)
    wire = Wire(Flows(4), reorder_bytes=64 << 10)
    base = dice.choice((0, 0xFFFFFFF0, 1 << 31))
    for _ in range(30):
        frames = []
        for _ in range(dice.randint(1, 30)):
            number = base + dice.choice((dice.randrange(200), dice.randrange(60_000), dice.randrange(1 << 32)))
            acknowledged = base + dice.choice((dice.randrange(60_000), dice.randrange(1 << 32)))
            flags = dice.choice((ACK, ACK, ACK, ACK, SYN, SYN | ACK, FIN | ACK, RST, dice.randrange(256)))
            ends = dice.choice(({}, BACK, {"sport": dice.randrange(6)}))
            frames.append(tcp_frame(dice.randbytes(dice.choice((0, 1, 2, 100, 5000))), seq=number,
                                    ack=acknowledged, flags=flags, **ends))
        wire.feed(*frames, after=dice.choice((0, MS, 30 * MS, SECOND, -SECOND)))
        if dice.random() < 0.2:
            wire.expire(dice.choice((0, 50 * MS, 40 * SECOND)))
    wire.flush()
    assert wire.tcp.held_bytes == 0, "after a flush nothing waits"
    meta, cells = wire.tcp._meta, wire.tcp._cell_table
    free, spent = 0, 0
    for head, count in ((int(meta[FREE]), "free"), (int(meta[SPENT_HEAD]), "spent")):
        while head >= 0:
            free, spent = free + (count == "free"), spent + (count == "spent")
            head = int(cells[head, AFTER])
    assert free + spent == len(cells), "no cell is lost"
