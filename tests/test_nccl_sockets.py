"""NCCL over TCP: streams made as the specification says, cut anywhere, with holes; the messages come back."""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_frames import FIN, SYN, block_of, tcp_frame

from mirror.flows import Flows
from mirror.roce_spans import BEGIN, CLOSE, CONFLICT, DATA, DUPLICATE, END, HOLE, MessageSpans
from mirror.roce_state import M_COLUMNS, M_FIRST, M_IMM, M_KIND, M_LENGTH, M_PACKETS, M_VA
from mirror.roce_wire import WRITE
from mirror.spans import Spans
from mirror.tcp import TcpReassembler
from reconstruct.nccl.heads import SOCKET, Heads
from reconstruct.nccl.sockets import SocketMessages

UNIT = 1024
SIZES = [16, 0, 128, 129, 65536, 100_000, 500_032, 0, 70_000, 1_048_576, 5]


def streams(messages: list[bytes], sockets: int, inline: int, task: int = 65536) -> list[bytes]:
    """Bytes of every socket after the hello, control last."""
    out = [b""] * (sockets + 1)
    turn = 0
    for data in messages:
        out[sockets] += len(data).to_bytes(4, "little")
        if len(data) <= inline or sockets == 0:
            out[sockets] += data
            continue
        piece = max(task, -(-len(data) // sockets))
        for begin in range(0, len(data), piece):
            out[turn % sockets] += data[begin : begin + piece]
            turn += 1
    return out


def hello(index: int, kind: int = 3) -> bytes:
    return struct.pack("<QIB", 0x564AB9F2FC4B9D6C, kind, index)


def frames_of(
    parts: list[bytes], first_port: int = 40_000, order: random.Random | None = None, size: int = 1400,
    end: bool = False,
) -> list[bytes]:  # fmt: skip
    """Frames of every socket: handshake, hello in two pieces, then the bytes; sockets take turns."""
    opening, rest = [], []
    for index, part in enumerate(parts):
        port, begin = first_port + index, hello(index)
        opening.append(tcp_frame(seq=0, flags=SYN, sport=port, dport=7000))
        for at, piece in ((0, begin[:8]), (8, begin[8:])):
            opening.append(tcp_frame(piece, seq=1 + at, sport=port, dport=7000))
        rest.append([
            tcp_frame(part[at : at + size], seq=1 + len(begin) + at, sport=port, dport=7000)
            for at in range(0, len(part), size)
        ])
        if end:
            rest[-1].append(tcp_frame(seq=1 + len(begin) + len(part), flags=FIN, sport=port, dport=7000))
    while any(rest):
        queue = (order or random).choice([queue for queue in rest if queue])
        opening.append(queue.pop(0))
    return opening


@dataclass
class Seen:
    """Messages of one connection, put together from spans."""

    data: list[bytearray] = field(default_factory=list)
    known: list[np.ndarray] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    whole_units: bool = True


class Reader:
    """Feeds frames, checks every span, and keeps what they say."""

    def __init__(self, inline: int = 128, **options: int) -> None:
        self.flows = Flows(256)
        self.tcp = TcpReassembler(self.flows, reorder_bytes=8 << 20)
        self.heads = Heads(self.flows)
        self.messages = SocketMessages(self.heads, inline, **options)
        self.seen: dict[int, Seen] = {}
        self.reasons: dict[int, str] = {}
        self._at: dict[int, tuple[int, int]] = {}

    def run(self, frames: list[bytes], batch: int = 7) -> dict[int, Seen]:
        for at in range(0, len(frames), batch):
            self.look(self.tcp.feed(block_of(frames[at : at + batch], 10**9 + at), 1 << 40))
        self.look(self.tcp.flush(1 << 41))
        return self.seen

    def look(self, spans: Spans) -> None:
        if self.heads.look(spans) & SOCKET:
            self.take(self.messages.feed(spans))

    def take(self, spans: MessageSpans) -> None:
        orders = {c.number: c.order for c in self.messages.connections}
        self.reasons |= {c.order: c.reason for c in self.messages.connections}
        rows = self.messages.messages
        assert rows.shape[1] == M_COLUMNS
        for i in range(spans.n):
            seen = self.seen.setdefault(orders[int(spans.flow[i])], Seen())
            kind, offset, length = int(spans.kind[i]), int(spans.offset[i]), int(spans.length[i])
            row = int(spans.message[i])
            assert not seen.closed
            if kind == CLOSE:
                seen.closed = True
                continue
            if kind == BEGIN:
                number, size = int(rows[row, M_FIRST]), int(rows[row, M_LENGTH])
                assert number == len(seen.data)
                assert rows[row, [M_KIND, M_PACKETS, M_VA]].tolist() == [WRITE, 1, -1]
                assert rows[row, M_IMM] == int.from_bytes(size.to_bytes(4, "little"), "big")
                self._at[row] = orders[int(spans.flow[i])], number
                seen.data.append(bytearray(size))
                seen.known.append(np.zeros(size, np.int8))
                continue
            if row < 0:
                assert kind == HOLE and length == 0  # the length of a message is lost, and with it what it was
                continue
            order, number = self._at[row]
            assert order == orders[int(spans.flow[i])] and number not in seen.ends
            data, known = seen.data[number], seen.known[number]
            if kind == END:
                assert (known != 0).all() and length == (known == 1).all()
                seen.ends[number] = length
                continue
            assert kind in (DATA, HOLE)
            at = slice(offset, offset + length)
            assert length > 0 and not known[at].any() and at.stop <= len(data)
            known[at] = 1 if kind == DATA else 2
            if kind == DATA:
                data[at] = ctypes.string_at(int(spans.addr[i]), length)
                seen.whole_units &= offset % UNIT == 0 and (at.stop % UNIT == 0 or at.stop == len(data))


def contents(rng: random.Random, sizes: list[int]) -> list[bytes]:
    return [rng.randbytes(size) for size in sizes]


@pytest.mark.parametrize("inline", [0, 128])
@pytest.mark.parametrize("sockets", [0, 1, 4, 16])
def test_messages_come_back_in_whole_units_in_any_order_of_sockets(sockets: int, inline: int) -> None:
    rng = random.Random(sockets + inline)
    for batch in (1, 7, 4000):
        messages = contents(rng, SIZES)
        frames = frames_of(streams(messages, sockets, inline), order=rng, size=rng.choice((536, 1400, 1448, 9000)))
        (seen,) = Reader(inline).run(frames, batch).values()
        assert [bytes(data) for data in seen.data] == messages and seen.whole_units
        assert seen.ends == dict.fromkeys(range(len(messages)), 1)


def test_tasks_as_in_the_specification() -> None:
    """Four sockets: 500032 bytes are four tasks of 125008, 100000 are 65536 and 34464; the next begins at x + 2."""
    messages = contents(random.Random(2), [500_032, 100_000, 70_000])
    parts = streams(messages, 4, 128)
    assert [len(part) for part in parts] == [125_008 + 65_536, 125_008 + 34_464, 125_008 + 65_536, 125_008 + 4_464, 12]
    (seen,) = Reader().run(frames_of(parts)).values()
    assert [bytes(data) for data in seen.data] == messages


def test_many_messages_in_one_batch() -> None:
    """More than the first sizes of every table."""
    messages = contents(random.Random(3), [8] * 5000 + [70_000] * 40)
    (seen,) = Reader(0).run(frames_of(streams(messages, 3, 0), size=8000), 100_000).values()
    assert [bytes(data) for data in seen.data] == messages
    (seen,) = Reader(0).run(frames_of(streams(messages, 0, 0), size=8000), 100_000).values()
    assert [bytes(data) for data in seen.data] == messages


def check(seen: Seen, messages: list[bytes]) -> int:
    """What is given is right, and in its message; how many bytes are holes."""
    for number, (data, known) in enumerate(zip(seen.data, seen.known, strict=True)):
        truth = np.frombuffer(messages[number], np.uint8)
        assert len(data) == truth.size
        assert (np.frombuffer(data, np.uint8) == truth)[known == 1].all()
    return sum(int((known == 2).sum()) for known in seen.known)


def lossy(frames: list[bytes], rng: random.Random, opening: int, gone: int) -> list[bytes]:
    """Without `gone` of the frames that carry data."""
    data = [number for number in range(opening, len(frames)) if len(frames[number]) > 54]
    lost = set(rng.sample(data, gone))
    return [frame for number, frame in enumerate(frames) if number not in lost]


def test_with_data_sockets_a_lost_length_ends_the_framing() -> None:
    whole = 0
    for seed in range(60):
        rng = random.Random(seed)
        messages = contents(rng, [rng.choice((64, 1_000, 70_000, 200_000)) for _ in range(6)])
        frames = frames_of(streams(messages, 3, 128), order=rng, size=rng.choice((700, 1400)), end=True)
        gone = min(len(frames) // 3, rng.choice((1, 3, 100)))
        reader = Reader()
        reader.run(lossy(frames, rng, 12, gone), rng.choice((5, 400)))
        lost = check(reader.seen[0], messages)
        if reader.reasons[0] == "closed":
            whole += 1
            assert len(reader.seen[0].ends) == len(messages) and 0 < lost <= 1400 * gone
        else:
            assert reader.reasons[0] == "bytes that hold the length of a message were not captured"
    assert 10 < whole < 60  # both happen


@pytest.mark.parametrize("words", [False, True])
def test_without_data_sockets_a_lost_length_is_found_again(words: bool) -> None:
    """words: the data are full of numbers that were lengths, and of zeros."""
    resumed = framed = 0
    for seed in range(25):
        rng = random.Random(seed)
        step = [rng.choice((0, 700, 3_000, 8_192, 16_384, 40_000, 65_536)) for _ in range(8)]
        messages = contents(rng, step * 12)
        if words:
            numbers = [0, 1, *step]
            messages = [
                b"".join(rng.choice(numbers).to_bytes(4, "little") for _ in range(-(-len(m) // 4)))[: len(m)]
                for m in messages
            ]
        frames = frames_of(streams(messages, 0, 0), size=1400, end=True)
        reader = Reader()
        reader.run(lossy(frames, rng, 3, len(frames) // 100 or 1), rng.choice((5, 400)))
        check(reader.seen[0], messages)
        resumed += reader.messages.resumed
        framed += len(reader.seen[0].data) / len(messages) / 25
    assert framed > (0.5 if words else 0.8)
    assert words or resumed > 5


def test_a_hole_keeps_only_its_own_bytes() -> None:
    message = random.Random(8).randbytes(200_000)
    frames = frames_of(streams([message], 0, 0))
    (seen,) = Reader().run([frame for number, frame in enumerate(frames) if number != 30]).values()
    assert seen.ends == {0: 0} and int((seen.known[0] == 2).sum()) == 1400


def test_data_and_holes_before_their_header_wait_for_it() -> None:
    message = random.Random(3).randbytes(200_000)
    frames = frames_of(streams([message], 2, 0))
    opening, rest = frames[:9], frames[9:]
    control = [frame for frame in rest if len(frame) < 200]
    data = [frame for frame in rest if len(frame) >= 200]
    del data[20]
    reader = Reader()
    reader.run([*opening, *data, *control], 50)
    assert reader.seen == {} or reader.seen[0].ends == {0: 0}
    seen = reader.seen[0]
    assert (seen.known[0] == 2).sum() == 1400
    assert (np.frombuffer(seen.data[0], np.uint8) == np.frombuffer(message, np.uint8))[seen.known[0] == 1].all()


def test_a_data_socket_far_ahead_of_its_lengths_is_given_up() -> None:
    messages = contents(random.Random(4), [5 << 20])
    frames = frames_of(streams(messages, 1, 0), size=60_000)
    control = [frame for frame in frames[6:] if len(frame) < 200]
    data = [frame for frame in frames[6:] if len(frame) >= 200]
    reader = Reader()
    reader.run([*frames[:6], *data, *control])
    assert "is more than 4194304 bytes ahead of its lengths" in reader.reasons[0]
    assert reader.seen[0].closed and not reader.seen[0].data and reader.messages.lost == 1


def test_what_is_no_length_ends_the_framing() -> None:
    for word in (b"\xff\xff\xff\xff", b"GET "):
        reader = Reader()
        reader.run(frames_of([word + bytes(10)]))
        assert reader.reasons == {0: "what should be the length of a message is none"} and not reader.seen[0].data


def test_a_socket_whose_start_is_missing_ends_the_claim() -> None:
    frames = frames_of(streams(contents(random.Random(7), [200_000]), 2, 128))
    reader = Reader()
    reader.run([frame for number, frame in enumerate(frames) if number not in (3, 4, 5)])
    assert reader.reasons[0] == "the start of socket 1 was not captured" and not reader.seen[0].data


@pytest.mark.parametrize("end", [False, True])
def test_a_connection_made_again_on_the_same_port_is_another_one(end: bool) -> None:
    one = frames_of(streams([b"a" * 500], 1, 128), end=end)
    two = frames_of(streams([b"b" * 700], 1, 128), 41_000, end=end)
    seen = Reader().run([*one, *two])
    assert {order: bytes(s.data[0]) for order, s in seen.items()} == {0: b"a" * 500, 1: b"b" * 700}
    assert [s.closed for s in seen.values()] == [end, end]


def test_sockets_of_ended_connections_are_used_again() -> None:
    reader = Reader(most=2)
    for turn in range(20):
        reader.run(frames_of(streams([bytes([turn]) * 70_000], 3, 128), 20_000 + 10 * turn, end=True))
    assert len(reader.seen) == 20 and not reader.messages.refused
    assert all(bytes(s.data[0]) == bytes([turn]) * 70_000 for turn, s in reader.seen.items())
    crowd = [frame for turn in range(4) for frame in frames_of([b""], 30_000 + turn)]
    reader.run(crowd)
    assert reader.messages.refused == 2


def test_others_are_left_alone() -> None:
    other = [tcp_frame(b"GET / HTTP/1.1\r\n" * 9, seq=1, sport=50_000, dport=7000)]
    bootstrap = [tcp_frame(hello(0, kind)[:12] + bytes(40), seq=1, sport=50_001 + kind, dport=7000) for kind in (1, 4)]
    prefix = [
        tcp_frame(hello(0)[:5], seq=1, sport=50_009, dport=7000), tcp_frame(b"x" * 9, seq=6, sport=50_009, dport=7000)
    ]  # fmt: skip
    begin = [tcp_frame(seq=0, flags=SYN, sport=port, dport=7000) for port in (50_000, 50_002, 50_005, 50_009)]
    reader = Reader()
    assert reader.run([*begin, *other, *bootstrap, *prefix]) == {} and reader.messages.count == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=64)), max_size=12), st.integers(0, 2**32))
def test_hostile_bytes_are_never_a_crash(parts: list[tuple[int, bytes]], seed: int) -> None:
    joined = [b"".join(part for socket, part in parts if socket == index) for index in range(3)]
    rng = random.Random(seed)
    frames = frames_of(joined, order=rng, size=rng.choice((7, 64)))
    Reader().run([frame for frame in frames if rng.random() > 0.1], 3)


class Twice(Reader):
    """Looks at further copies alone: (message, offset, bytes) of each that was told, (message, offset, length) of what
    differs."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.again: list[tuple[int, int, bytes]] = []
        self.differ: list[tuple[int, int, int]] = []
        self.number: dict[int, int] = {}

    def take(self, spans: MessageSpans) -> None:
        self.reasons |= {c.order: c.reason for c in self.messages.connections}
        for i in range(spans.n):
            row, offset, length = int(spans.message[i]), int(spans.offset[i]), int(spans.length[i])
            if spans.kind[i] == BEGIN:
                self.number[row] = int(self.messages.messages[row, M_FIRST])
            elif spans.kind[i] == DUPLICATE:
                self.again.append((self.number[row], offset, ctypes.string_at(int(spans.addr[i]), length)))
            elif spans.kind[i] == CONFLICT:
                self.differ.append((self.number[row], offset, length))


@pytest.mark.parametrize("lag", [1, 30, 300])
@pytest.mark.parametrize("sockets", [0, 3])
def test_further_copies_are_told_of_the_messages_that_they_belong_to(sockets: int, lag: int) -> None:
    """Every frame twice, the second one `lag` frames later: all of it but lengths is told at its place, so that it can
    be compared; of messages that are over as well."""
    rng = random.Random(lag)
    messages = [rng.randbytes(size) for size in SIZES]
    frames = frames_of(streams(messages, sockets, 128), order=rng)
    first = 3 * (sockets + 1)
    keyed = [(at, 0, frame) for at, frame in enumerate(frames)]
    keyed += [(at + lag, 1, frame) for at, frame in enumerate(frames) if at >= first]
    reader = Twice()
    reader.run([frame for _, _, frame in sorted(keyed, key=lambda entry: entry[:2])])
    assert not reader.differ
    covered = [np.zeros(len(data), int) for data in messages]
    for number, offset, piece in reader.again:
        assert messages[number][offset : offset + len(piece)] == piece
        covered[number][offset : offset + len(piece)] += 1
    told = sum(int((count == 1).sum()) for count in covered)
    assert not any((count > 1).any() for count in covered)
    # A copy of bytes that themselves still wait for their length is not compared.
    assert sum(map(len, messages)) - told <= (3 * 1400 if sockets and lag == 1 else 0)


def test_copies_that_wait_and_differ_are_told_and_a_length_in_doubt_ends_the_connection() -> None:
    messages = [random.Random(1).randbytes(50_000)]
    frames = frames_of(streams(messages, 0, 128))
    data = frames[3:]

    def bent(frame: bytes, at: int) -> bytes:
        changed = bytearray(frame)
        changed[54 + at] ^= 1
        return bytes(changed)

    # A gap before it: the copies meet where they wait.
    reader = Twice()
    reader.run([*frames[:3], data[0], data[2], bent(data[2], 700), data[1], *data[3:]])
    assert reader.differ == [(0, 2 * 1400 + 700 - 4, 1)]
    assert set(reader.reasons.values()) == {""}
    reader = Twice()
    reader.run([*frames[:2], data[0], bent(data[0], 2), frames[2], *data[1:]])
    assert any("two copies of bytes that hold the length" in reason for reason in reader.reasons.values())
