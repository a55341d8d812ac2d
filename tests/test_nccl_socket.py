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
from tcp_frames import SYN, block_of, tcp_frame

from mirror.flows import Flows
from mirror.memory import address_of
from mirror.roce_spans import BEGIN, DATA, END, HOLE
from mirror.tcp import TcpReassembler
from reconstruct.nccl.socket import LOST, Framer, Piece, SocketWatcher


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


@dataclass
class Seen:
    """Messages put together from pieces."""

    data: list[bytearray] = field(default_factory=list)
    known: list[np.ndarray] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    lost: bool = False

    def take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            assert not self.lost
            if piece.kind == BEGIN:
                assert piece.message == len(self.data)
                self.data.append(bytearray(piece.length))
                self.known.append(np.zeros(piece.length, np.int8))
            elif piece.kind in (DATA, HOLE):
                at = slice(piece.offset, piece.offset + piece.length)
                assert not self.known[piece.message][at].any() and at.stop <= len(self.data[piece.message])
                self.known[piece.message][at] = 1 if piece.kind == DATA else 2
                if piece.kind == DATA:
                    self.data[piece.message][at] = ctypes.string_at(piece.address, piece.length)
            elif piece.kind == END:
                assert piece.message not in self.ends and self.known[piece.message].all()
                self.ends[piece.message] = piece.length
            else:
                assert piece.kind == LOST
                self.lost = True


def contents(rng: random.Random, sizes: list[int]) -> list[bytes]:
    return [rng.randbytes(size) for size in sizes]


SIZES = [16, 0, 128, 129, 65536, 100_000, 500_032, 0, 70_000, 1_048_576, 5]


@pytest.mark.parametrize("inline", [0, 128])
@pytest.mark.parametrize("sockets", [0, 1, 4, 16])
def test_messages_come_back_in_any_order_of_sockets(sockets: int, inline: int) -> None:
    rng = random.Random(sockets + inline)
    for _ in range(4):
        messages = contents(rng, SIZES)
        parts = [np.frombuffer(part, np.uint8) for part in streams(messages, sockets, inline)]
        framer, seen, at = Framer(sockets, inline), Seen(), [0] * (sockets + 1)
        while any(a < p.size for a, p in zip(at, parts, strict=True)):
            socket = rng.choice([i for i in range(sockets + 1) if at[i] < parts[i].size])
            size = min(rng.choice((1, 3, 1448, 60_000)), parts[socket].size - at[socket])
            seen.take(framer.take(socket, address_of(parts[socket]) + at[socket], size))
            at[socket] += size
        assert [bytes(data) for data in seen.data] == messages and not framer.reason
        assert seen.ends == dict.fromkeys(range(len(messages)), 1)


def test_tasks_as_in_the_specification() -> None:
    """Four sockets: 500032 bytes are four tasks of 125008, 100000 are 65536 and 34464; the next begins at x + 2."""
    assert [len(part) for part in streams([bytes(500_032), bytes(100_000), bytes(70_000)], 4, 128)] == [
        125_008 + 65_536, 125_008 + 34_464, 125_008 + 65_536, 125_008 + 4_464, 12,
    ]  # fmt: skip
    framer = Framer(4, 128)
    header = np.frombuffer(struct.pack("<iii", 500_032, 100_000, 70_000), np.uint8)
    assert [p.length for p in framer.take(4, address_of(header), 12)] == [500_032, 100_000, 70_000]
    data = np.zeros(300_000, np.uint8)
    got = [(p.message, p.offset, p.length) for p in framer.take(2, address_of(data), 125_008 + 65_536)]
    assert got == [(0, 250_016, 125_008), (2, 0, 65_536)]


def test_a_hole_in_data_is_a_hole_in_its_message() -> None:
    messages = contents(random.Random(1), [200_000, 300_000, 64])
    parts = [np.frombuffer(part, np.uint8) for part in streams(messages, 2, 0)]
    framer, seen = Framer(2, 0), Seen()
    for socket in (2, 1):
        seen.take(framer.take(socket, address_of(parts[socket]), parts[socket].size))
    seen.take(framer.take(0, address_of(parts[0]), 90_000))
    seen.take(framer.take(0, 0, 20_000))  # the last 10,000 of one task and the first of the next
    seen.take(framer.take(0, address_of(parts[0]) + 110_000, parts[0].size - 110_000))
    assert not framer.reason and seen.ends == {0: 0, 1: 0, 2: 1}
    assert [int((known == 2).sum()) for known in seen.known] == [10_000, 10_000, 0]
    assert (seen.known[0][90_000:100_000] == 2).all() and (seen.known[1][:10_000] == 2).all()
    for data, known, message in zip(seen.data, seen.known, messages, strict=True):
        assert (np.frombuffer(data, np.uint8) == np.frombuffer(message, np.uint8))[known == 1].all()


def test_a_hole_before_its_header_waits_for_it() -> None:
    message = random.Random(3).randbytes(200_000)
    parts = [np.frombuffer(part, np.uint8) for part in streams([message], 2, 0)]
    framer, seen = Framer(2, 0), Seen()
    seen.take(framer.take(0, address_of(parts[0]), 5))
    seen.take(framer.take(0, 0, 7))
    seen.take(framer.take(0, address_of(parts[0]) + 12, 99_988))
    for socket in (2, 1):
        seen.take(framer.take(socket, address_of(parts[socket]), parts[socket].size))
    assert seen.ends == {0: 0} and (seen.known[0][5:12] == 2).all() and (seen.known[0] == 2).sum() == 7


@pytest.mark.parametrize("length", [1, 3, 4, 90])
def test_a_lost_header_ends_the_framing(length: int) -> None:
    part = np.frombuffer(streams([bytes(100), bytes(100)], 0, 0)[0], np.uint8)
    framer, seen = Framer(0, 0), Seen()
    seen.take(framer.take(0, address_of(part), 100))
    seen.take(framer.take(0, 0, 4 + length))
    assert seen.lost and "not captured" in framer.reason and seen.ends == {0: 0}
    assert framer.take(0, address_of(part), 50) == []


def test_what_is_no_length_ends_the_framing() -> None:
    for word in (b"\xff\xff\xff\xff", b"GET "):
        part = np.frombuffer(word + bytes(10), np.uint8)
        framer = Framer(0, 0)
        (piece,) = framer.take(0, address_of(part), part.size)
        assert piece.kind == LOST and "no length" in framer.reason


def test_a_data_socket_far_ahead_of_its_lengths_is_given_up() -> None:
    framer, data = Framer(1, 0), np.zeros(1 << 20, np.uint8)
    got = [framer.take(0, address_of(data), data.size) for _ in range(5)]
    assert got[:4] == [[]] * 4 and got[4][0].kind == LOST and "ahead" in framer.reason


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(st.integers(1, 200_000), st.binary(min_size=1, max_size=64)))))
def test_hostile_bytes_are_never_a_crash(parts: list[tuple[int, int | bytes]]) -> None:
    framer, seen = Framer(2, 128), Seen()
    for socket, part in parts:
        held = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else None
        size = part if isinstance(part, int) else len(part)
        seen.take(framer.take(socket, 0 if held is None else address_of(held), size))


# ------------------------------------------------------------------------------------------- from frames


def hello(index: int, kind: int = 3) -> bytes:
    return struct.pack("<QIB", 0x564AB9F2FC4B9D6C, kind, index)


def frames_of(parts: list[bytes], first_port: int = 40_000, order: random.Random | None = None) -> list[bytes]:
    """Frames of every socket: handshake, hello in two pieces, then the bytes; sockets take turns."""
    opening, rest = [], []
    for index, part in enumerate(parts):
        port, begin = first_port + index, hello(index)
        opening.append(tcp_frame(seq=0, flags=SYN, sport=port, dport=7000))
        for at, piece in ((0, begin[:8]), (8, begin[8:])):
            opening.append(tcp_frame(piece, seq=1 + at, sport=port, dport=7000))
        rest.append([
            tcp_frame(part[at : at + 1400], seq=1 + len(begin) + at, sport=port, dport=7000)
            for at in range(0, len(part), 1400)
        ])
    while any(rest):
        queue = (order or random).choice([queue for queue in rest if queue])
        opening.append(queue.pop(0))
    return opening


def run(frames: list[bytes], inline: int = 128) -> tuple[SocketWatcher, dict[int, Seen]]:
    flows = Flows(256)
    tcp, watcher, seen = TcpReassembler(flows, reorder_bytes=1 << 20), SocketWatcher(flows, inline), {}
    for at in range(0, len(frames), 7):
        block = block_of(frames[at : at + 7], 1_000_000_000 + at)
        for connection, piece in watcher.feed(tcp.feed(block, 1 << 40)):
            seen.setdefault(connection.number, Seen()).take([piece])
    for connection, piece in watcher.feed(tcp.flush(1 << 41)):
        seen.setdefault(connection.number, Seen()).take([piece])
    return watcher, seen


@pytest.mark.parametrize("sockets", [0, 3])
def test_connections_are_found_among_frames(sockets: int) -> None:
    rng = random.Random(sockets)
    messages = contents(rng, SIZES[:8])
    other = frames_of([b"GET / HTTP/1.1\r\n" * 9], 50_000)
    frames = frames_of(streams(messages, sockets, 128), order=rng)
    watcher, seen = run([*frames[:20], *[f for f in other if b"GET" in f], *frames[20:]])
    (connection,) = watcher.connections
    assert (connection.source, connection.listener) == ("10.0.0.1", ("10.0.0.2", 7000))
    assert connection.framer is not None and connection.framer.sockets == sockets
    assert [bytes(data) for data in seen[0].data] == messages and set(seen[0].ends.values()) == {1}


def test_a_frame_that_was_not_captured_is_a_hole_or_the_end() -> None:
    rng = random.Random(5)
    messages = contents(rng, [200_000, 1_000, 90_000])
    frames = frames_of(streams(messages, 0, 128), order=rng)
    _, seen = run([frame for number, frame in enumerate(frames) if number != 30])
    assert seen[0].ends[0] == 0 and seen[0].ends[1] == 1 == seen[0].ends[2]
    assert 0 < int((seen[0].known[0] == 2).sum()) <= 1400
    first = next(n for n, frame in enumerate(frames) if messages[1][:40] in frame)
    watcher, seen = run([frame for number, frame in enumerate(frames) if number != first])
    assert seen[0].lost and len(seen[0].data) == 1
    assert "not captured" in watcher.connections[0].reason


def test_a_socket_whose_start_is_missing_ends_the_claim() -> None:
    messages = contents(random.Random(7), [200_000])
    frames = frames_of(streams(messages, 2, 128))
    watcher, seen = run([frame for number, frame in enumerate(frames) if number not in (3, 4, 5)])
    assert watcher.connections[0].reason == "the start of socket 1 was not captured"
    assert seen[0].lost and not seen[0].data


def test_a_connection_made_again_on_the_same_port_is_another_one() -> None:
    one = frames_of(streams([b"a" * 500], 1, 128))
    two = frames_of(streams([b"b" * 700], 1, 128), 41_000)
    watcher, seen = run([*one, *two])
    assert len(watcher.connections) == 2
    assert [bytes(s.data[0]) for s in seen.values()] == [b"a" * 500, b"b" * 700]
