"""Random RoCE traffic against the one thing that must hold: every byte at its place, every missing byte known."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from roce_frames import A, B, Packet, Sender, Wire, ack, roce_frame
from tcp_frames import MS, SECOND

from mirror.messages import Message
from mirror.reorder import FREE, SPENT_HEAD
from mirror.roce import QueuePairs
from mirror.roce_state import G_AFTER, GAP_FREE, GAPS_LEFT, H_AFTER, M_QUEUE, QUEUE_HEAD, ROW_FREE, ROWS_LEFT

PSNS = st.sampled_from([0, 1, 4096, 0xFFFFFF, 0xFFFFF0, 0x800000, 0x7FFFF8])


def traffic(dice: random.Random, start: int, kinds: str = "ws") -> tuple[list[list[Packet]], list[tuple[str, bytes]]]:
    sender = Sender(mtu=256, psn=start)
    packets, sent = [], []
    for i in range(dice.randint(1, 12)):
        size = dice.choice((0, 1, 255, 256, 257, 512, dice.randrange(4000)))
        content, imm = dice.randbytes(size), dice.choice((None, dice.randrange(1 << 32)))
        kind = dice.choice(kinds)
        if kind == "w":
            packets.append(sender.write(content, va=0x10000 * i, imm=imm))
        else:
            packets.append(sender.send(content, imm=imm))
        sent.append((kind, content))
    return packets, sent


def disorder(dice: random.Random, n: int, again: int) -> list[int]:
    """Numbers 0..n-1 in the order of a wire: go-back-N repeats, local reordering, stray duplicates."""
    order: list[int] = []
    at = 0
    while at < n:
        stop = min(n, at + dice.randint(1, 30))
        order += range(at, stop)
        at = max(0, stop - dice.randint(1, 40)) if again > 0 and dice.random() < 0.4 else stop
        again -= at < stop
    reach = dice.choice((0, 0, 3, 20))
    order = [order[i] for i in sorted(range(len(order)), key=lambda i: i + dice.uniform(0, reach))]
    return [i for i in order for _ in range(dice.choice((1, 1, 1, 2)))]


def check_message(message: Message, packets: list[Packet], content: bytes, captured: set[int], kind: str) -> None:
    expected = np.zeros(len(content), bool)
    for packet in packets:
        if packet.psn in captured:
            expected[packet.offset : packet.offset + len(packet.payload)] = True
    assert message.length in (None, len(content))
    holes = np.zeros(len(content), bool)
    for offset, length in message.holes:
        holes[offset : offset + length] = True
    data = np.frombuffer(message.data, np.uint8)
    sure = ~holes[: len(data)]
    assert np.array_equal(data[sure], np.frombuffer(content, np.uint8)[: len(data)][sure])
    all_there = all(packet.psn in captured for packet in packets)
    assert message.complete == all_there
    if kind == "w":
        assert np.array_equal(holes, ~expected)
    assert message.ended and not message.conflicts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), PSNS, st.booleans())
def test_any_disorder_and_loss_gives_every_captured_byte_its_place(seed: int, start: int, lossy: bool) -> None:
    dice = random.Random(seed)
    groups, sent = traffic(dice, start)
    flat = [packet for group in groups for packet in group]
    lost = {i for i in range(len(flat)) if lossy and dice.random() < 0.2}
    order = [i for i in disorder(dice, len(flat), 4) if i not in lost]
    captured = {flat[i].psn for i in order}
    wire = Wire()
    frames = [flat[i].frame for i in order]
    while frames:
        n = dice.randint(1, len(frames))
        wire.feed(*frames[:n])
        del frames[:n]
    wire.flush()
    found = {m.first_psn & 0xFFFFFF: m for m in wire.recorder.messages if not m.headless}
    stored = sum(len(m.present) for m in wire.recorder.messages)
    for (kind, content), group in zip(sent, groups, strict=True):
        if group[0].psn in captured:
            message = found.pop(group[0].psn)
            assert message.opcode.startswith("RDMA_WRITE" if kind == "w" else "SEND")
            check_message(message, group, content, captured, kind)
    assert not found
    by_psn = {packet.psn: packet for packet in flat}
    for message in wire.recorder.messages:
        if message.headless:
            assert not message.complete and not message.holes and message.ended
            psn, rest = message.first_psn, message.data
            while rest:
                payload = by_psn[psn & 0xFFFFFF].payload
                assert rest[: len(payload)] == payload
                psn, rest = psn + 1, rest[len(payload) :]
    # Nothing that was captured is dropped.
    assert stored == sum(len(by_psn[psn].payload) for psn in captured)
    assert wire.roce.held_bytes == 0
    missing = {psn & 0xFFFFFF for _, first, count in wire.recorder.lost for psn in range(first, first + count)}
    assert not missing & captured


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), PSNS)
def test_time_and_acknowledgments_never_move_a_byte(seed: int, start: int) -> None:
    """Gaps are given up at odd moments, and filled after that: bytes may come late, but never to a wrong place."""
    dice = random.Random(seed)
    groups, sent = traffic(dice, start)
    flat = [packet for group in groups for packet in group]
    order = [i for i in disorder(dice, len(flat), 6) if dice.random() > 0.2]
    wire = Wire(blind_timeout_ns=SECOND)
    for i in order:
        wire.feed(flat[i].frame, after=dice.choice((0, MS, 30 * MS, SECOND)))
        if dice.random() < 0.3:
            wire.feed(ack(flat[dice.randrange(i + 1)].psn, syndrome=dice.choice((0, 0, 0x60, 0x20))))
        if dice.random() < 0.1:
            wire.expire(dice.choice((25 * MS, 2 * SECOND)))
    wire.flush()
    captured = {flat[i].psn for i in order}
    content = {group[0].psn: (data, group) for (_, data), group in zip(sent, groups, strict=True)}
    for message in wire.recorder.messages:
        if message.headless:
            group = next(g for g in groups if any(p.psn == message.first_psn & 0xFFFFFF for p in g))
            whole = b"".join(packet.payload for packet in group)
            skip = next(p.offset for p in group if p.psn == message.first_psn & 0xFFFFFF)
            assert message.present == whole[skip : skip + len(message.present)]
            continue
        data, group = content[message.first_psn & 0xFFFFFF]
        got, at = bytearray(message.data), 0
        for offset, length in message.holes:
            assert got[at:offset] == data[at:offset]
            at = offset + length
        assert got[at:] == data[at : len(got)]
        assert not message.complete or (message.data == data and all(p.psn in captured for p in group))
    assert not any(message.conflicts for message in wire.recorder.messages)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_read_responses_in_any_order(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.choice((1, 256, 257, 1000, dice.randrange(1, 5000)))
    content = dice.randbytes(size)
    pieces = [content[i : i + 256] for i in range(0, size, 256)]
    start = dice.choice((0, 0xFFFFFE, 77))
    back = {"qp": 0x22, "src": B, "dst": A}
    lost = {i for i in range(len(pieces)) if dice.random() < 0.2}
    wire = Wire()
    wire.feed(roce_frame(12, start, va=1, size=size))
    for i in disorder(dice, len(pieces), 2):
        if i not in lost:
            opcode = 16 if len(pieces) == 1 else 13 if i == 0 else 15 if i == len(pieces) - 1 else 14
            wire.feed(roce_frame(opcode, start + i, pieces[i], **back))
    wire.flush()
    (message,) = wire.recorder.messages
    if message.length is not None and wire.roce.mtu[1]:
        missing = {i for offset, length in message.holes for i in range(offset // 256, -(-(offset + length) // 256))}
        assert missing == lost or not lost >= {0}
        assert message.complete == (not missing)
    for offset, piece in ((i * 256, pieces[i]) for i in range(len(pieces))):
        if not any(a <= offset < a + n for a, n in message.holes):
            assert message.data[offset : offset + len(piece)] == piece


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_hostile_packets_never_break_the_rules(seed: int) -> None:
    """Random opcodes, numbers, sizes and times over few flows and tiny tables: `Wire` checks every span."""
    dice = random.Random(seed)
    wire = Wire(QueuePairs(4), held_bytes=64 << 10, gaps=256, messages=64)
    base = dice.choice((0, 0xFFFFF0, 1 << 23))
    for _ in range(25):
        frames, lengths = [], []
        for _ in range(dice.randint(1, 40)):
            psn = base + dice.choice((dice.randrange(60), dice.randrange(3000), dice.randrange(1 << 24)))
            payload = bytes(dice.choice((0, 1, 100, 256, 256, 256, 1024)))
            size = dice.choice((len(payload), 300, 256 * dice.randrange(40), dice.randrange(1 << 32)))
            ends = dice.choice(({}, {"src": B, "dst": A}, {"qp": dice.randrange(2, 8)}))
            frame = roce_frame(dice.choice((*range(18), *range(6, 11), dice.randrange(256))), psn, payload, size=size,
                               va=dice.choice((0, 1 << 40)), syndrome=dice.choice((0, 0x20, 0x60)), **ends)
            lengths.append(len(frame))
            frames.append(frame if dice.random() < 0.9 else frame[: dice.randint(14, len(frame))])
        wire.feed(*frames, after=dice.choice((0, MS, 30 * MS, SECOND)), wirelen=lengths)
        if dice.random() < 0.2:
            wire.expire(dice.choice((0, 50 * MS, 40 * SECOND)))
    wire.flush()
    roce = wire.roce
    assert roce.held_bytes == 0, "after a flush nothing waits"

    def chain(table: np.ndarray, head: int, column: int) -> int:
        count = 0
        while head >= 0:
            count, head = count + 1, int(table[head, column])
        return count

    meta = roce._meta
    assert chain(roce._cells, int(meta[FREE]), H_AFTER) + chain(roce._cells, int(meta[SPENT_HEAD]), H_AFTER) == 16
    assert chain(roce._gaps, int(meta[GAP_FREE]), G_AFTER) == meta[GAPS_LEFT]
    rows = roce.messages
    assert chain(rows, int(meta[ROW_FREE]), M_QUEUE) == meta[ROWS_LEFT]
    assert chain(rows, int(meta[QUEUE_HEAD]), M_QUEUE) + meta[ROWS_LEFT] == len(rows), "no row is lost"
