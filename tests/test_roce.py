from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from roce_frames import (
    FIRST,
    LAST,
    MIDDLE,
    ONLY,
    READ,
    RESPONSE_FIRST,
    RESPONSE_LAST,
    RESPONSE_MIDDLE,
    A,
    B,
    Sender,
    Wire,
    ack,
    roce_frame,
)
from tcp_frames import MS, SECOND, START, block_of

from mirror.flows import Flows
from mirror.frames import Datagrams, Segments, parse
from mirror.roce import QueuePairs, RoceReassembler

DATA = random.Random(1).randbytes(8000)


def frames_of(sender: Sender, data: bytes = DATA, **options: Any) -> list[bytes]:
    return [packet.frame for packet in sender.write(data, **options)]


def test_a_write_comes_out_where_it_lies_and_ends_once() -> None:
    wire = Wire()
    block = block_of(frames_of(Sender(psn=5), imm=0x403C0000))
    spans = wire.read(wire.roce.feed(block, START))
    assert [span[0] for span in spans] == ["open", "begin", *["data"] * 8, "end"]
    assert spans[-1] == ("end", 0, 0, 1)
    (message,) = wire.recorder.messages
    assert (message.source, message.destination, message.queue_pair) == (A, B, 0x11)
    assert (message.opcode, message.va, message.rkey, message.length) == (
        "RDMA_WRITE_WITH_IMM", 0x7F0000000000, 7, 8000)
    assert message.imm == 0x403C0000 and message.first_psn & 0xFFFFFF == 5
    assert message.data == DATA and message.complete and not message.holes
    low = wire.roce._spans.addr[2:10] - block.base.__array_interface__["data"][0]
    assert ((low >= 0) & (low < block.base.size)).all(), "in order, nothing is copied"


@pytest.mark.parametrize("size", [0, 1, 3, 1023, 1024, 1025, 2048])
@pytest.mark.parametrize("kind", ["write", "send"])
def test_every_size_and_pad(size: int, kind: str) -> None:
    wire = Wire()
    sender = Sender(psn=0xFFFFFE)
    for imm in (None, 9):
        packets = sender.write(DATA[:size], imm=imm) if kind == "write" else sender.send(DATA[:size], imm=imm)
        wire.feed(*[packet.frame for packet in packets])
    wire.flush()
    first, second = wire.recorder.messages
    assert first.data == second.data == DATA[:size] and first.length == size
    assert first.complete and second.complete
    assert first.imm is None and second.imm == 9
    assert second.first_psn - first.first_psn == max(1, -(-size // 1024)), "numbers go on across the wrap"


def test_ipv6_and_two_groups_with_the_same_addresses() -> None:
    wire = Wire()
    sender = Sender(ends={"src": "fe80::1", "dst": "fe80::2"})
    frames = frames_of(sender)
    wire.read(wire.roce.feed(block_of(frames, vantage=1), START))
    wire.read(wire.roce.feed(block_of(frames, vantage=2), START))
    assert [message.vantage for message in wire.recorder.messages] == [1, 2]
    assert all(message.data == DATA for message in wire.recorder.messages)
    assert wire.flows.find_pair(2, "fe80::1", "fe80::2", 0x11) == 1
    assert wire.flows.endpoint_dst(1) == ("fe80::2", 0x11)


def test_both_directions_may_use_the_same_queue_pair_number() -> None:
    wire = Wire()
    wire.feed(*frames_of(Sender()), *frames_of(Sender(ends={"src": B, "dst": A}), DATA[::-1]))
    assert [(m.source, m.data) for m in wire.recorder.messages] == [(A, DATA), (B, DATA[::-1])]


def test_go_back_n_gives_every_byte_once_and_repeats_as_duplicates() -> None:
    wire = Wire()
    sender = Sender()
    first, second = frames_of(sender), frames_of(sender, DATA[::-1], imm=3)
    new = wire.feed(*first, *second[:5])
    again = wire.feed(*first[6:], *second)
    assert sum(span[0] == "data" for span in new + again) == 16
    assert sum(span[0] == "duplicate" for span in again) == 2 + 5
    assert sum(span[0] == "end" for span in new + again) == 2
    assert wire.feed(second[-1]) == [("duplicate", 1, 7168, DATA[::-1][7168:])], "no second completion"
    assert all(m.complete and not m.conflicts for m in wire.recorder.messages)


def test_a_repeat_with_other_bytes_is_a_conflict() -> None:
    wire = Wire()
    sender = Sender()
    wire.feed(*frames_of(sender))
    wire.feed(roce_frame(MIDDLE, 3, b"x" + DATA[3073:4096]))
    assert wire.recorder.messages[0].conflicts == [(3072, 1)]
    assert wire.recorder.messages[0].data == DATA


def test_a_middle_before_its_first_waits_for_it() -> None:
    wire = Wire()
    frames = frames_of(Sender(psn=4096))
    assert [span[0] for span in wire.feed(*frames[1:4])] == ["open"]
    assert wire.roce.held_bytes == 3 * 4096
    spans = wire.feed(frames[0], *frames[4:])
    assert [span[0] for span in spans] == ["begin", *["data"] * 8, "end"]
    assert wire.recorder.messages[0].data == DATA
    assert wire.roce.held_bytes == 0


@pytest.mark.parametrize("first", [True, False])
def test_copies_that_wait_and_differ_are_both_thrown_away(first: bool) -> None:
    """Of a packet that waits for the start of its message: nobody knows which is right, a third one may tell."""
    wire = Wire()
    frames = frames_of(Sender(psn=4096))
    bad = roce_frame(MIDDLE, 4098, b"x" + DATA[2049:3072])
    copies = [bad, frames[2]] if first else [frames[2], bad]
    wire.feed(frames[1], copies[0], frames[3], frames[3], copies[1], copies[1])
    assert wire.roce.counters()["conflicts"] == 1
    wire.feed(frames[0], *frames[4:])
    assert wire.roce.counters()["completed"] == 0 and wire.roce.held_bytes == 0
    spans = wire.feed(frames[2])
    assert [span[0] for span in spans] == ["data", "end"]
    assert wire.recorder.messages[0].data == DATA and wire.recorder.messages[0].complete


def test_copies_that_wait_and_differ_are_a_hole_if_none_comes() -> None:
    wire = Wire()
    frames = frames_of(Sender(psn=4096))
    wire.feed(frames[1], frames[2], roce_frame(MIDDLE, 4098, b"x" + DATA[2049:3072]), *frames[3:])
    wire.feed(frames[0])
    wire.flush()
    (message,) = wire.recorder.messages
    assert message.holes == [(2048, 1024)] and not message.complete


def test_writes_that_each_carry_their_address() -> None:
    """NIC adaptive routing: every packet is a WRITE ONLY; they may come in any order."""
    wire = Wire()
    frames = [roce_frame(ONLY, psn, DATA[psn * 1024 :][:1024], va=0x1000 + psn * 1024, size=1024) for psn in range(7)]
    wire.feed(*(frames[psn] for psn in (3, 0, 1, 2, 6, 4, 5)), roce_frame(11, 7, va=0, rkey=0, imm=0x00400000))
    messages = sorted(wire.recorder.messages, key=lambda message: message.first_psn)
    assert b"".join(message.data for message in messages) == DATA[: 7 * 1024]
    assert [message.va for message in messages] == [0x1000 + psn * 1024 for psn in range(7)] + [0]
    assert all(message.complete for message in messages) and messages[-1].imm == 0x00400000


def test_a_lost_packet_is_a_hole_once_the_receiver_has_it() -> None:
    wire = Wire()
    frames = frames_of(Sender())
    wire.feed(*frames[:3], *frames[4:6])
    assert wire.feed(ack(5), after=MS) == [], "an acknowledgment may overtake the data: not yet"
    assert wire.expire(10 * MS) == []
    assert wire.expire(25 * MS) == []
    assert wire.expire(25 * MS) == [("hole", 0, 3072, 1024)]
    assert wire.feed(*frames[6:])[-1] == ("end", 0, 0, 0)
    assert not wire.recorder.messages[0].complete and wire.recorder.messages[0].holes == [(3072, 1024)]
    # It should not come any more; if it does, it is placed all the same.
    assert wire.feed(frames[3]) == [("data", 0, 3072, DATA[3072:4096]), ("end", 0, 0, 1)]
    assert wire.roce.counters()["late"] == 1
    assert wire.recorder.messages[0].data == DATA


def test_a_negative_acknowledgment_speaks_only_for_what_is_before_it() -> None:
    wire = Wire()
    frames = frames_of(Sender())
    wire.feed(*frames[:3], *frames[4:])
    wire.feed(ack(3, syndrome=0x60), after=MS)
    assert wire.expire(900 * MS) == [], "the retry of packet 3 is still to come"
    assert wire.feed(*frames[3:])[0] == ("data", 0, 3072, DATA[3072:4096])
    assert wire.recorder.messages[0].complete


def test_without_acknowledgments_a_gap_ends_by_age_and_with_them_much_later() -> None:
    for seen in (False, True):
        wire = Wire()
        frames = frames_of(Sender())
        wire.feed(*frames[:3], *([ack(0)] if seen else []))
        wire.feed(*frames[4:])
        assert wire.expire(900 * MS) == []
        spans = wire.expire(SECOND)
        assert spans == ([] if seen else [("hole", 0, 3072, 1024), ("end", 0, 0, 0)])
        assert bool(wire.expire(30 * SECOND)) == seen


def test_the_tail_of_a_message_is_missing_when_it_was_acknowledged_or_the_input_ends() -> None:
    wire = Wire()
    frames = frames_of(Sender())
    wire.feed(*frames[:5], ack(2))
    assert wire.expire(100 * SECOND) == [], "the sender may just be slow"
    wire.feed(ack(6))
    assert wire.expire(10 * MS) == []
    assert wire.expire(15 * MS) == [("hole", 0, 5120, 2048)]
    assert wire.flush() == [("hole", 0, 7168, 832), ("end", 0, 0, 0)]
    assert wire.recorder.messages[0].holes == [(5120, 2880)]
    assert wire.flush() == []


def test_a_message_that_was_lost_whole_is_a_hole_of_numbers() -> None:
    wire = Wire()
    sender = Sender(psn=100)
    wire.feed(*frames_of(sender))
    lost = frames_of(sender)
    wire.feed(*frames_of(sender))
    spans = wire.flush()
    assert [(span[0], span[2], span[3]) for span in spans] == [("hole", (1 << 24) + 108, len(lost))]
    assert wire.recorder.lost == [(0, (1 << 24) + 108, 8)]
    assert [message.complete for message in wire.recorder.messages] == [True, True]


def test_a_lost_first_packet_leaves_a_headless_message() -> None:
    wire = Wire()
    sender = Sender()
    wire.feed(*frames_of(sender))
    wire.feed(*frames_of(sender, DATA[::-1], imm=4)[1:], *frames_of(sender))
    assert wire.expire(2 * SECOND)[0] == ("hole", ("flow", 0), (1 << 24) + 8, 1)
    wire.flush()
    headless = [message for message in wire.recorder.messages if message.headless]
    assert [(m.data, m.va, m.first_psn, m.imm, m.complete) for m in headless] == [
        (DATA[::-1][1024:], None, (1 << 24) + 9, 4, False)]
    assert sum(m.complete and m.data == DATA for m in wire.recorder.messages) == 2


def test_a_first_packet_that_comes_after_all_voids_the_headless_message() -> None:
    wire = Wire()
    frames = frames_of(Sender())
    wire.feed(*frames[1:5])
    wire.expire(2 * SECOND)
    assert wire.recorder.messages[0].headless
    spans = wire.feed(*frames)  # the retry, long after
    assert spans[0][0] == "void"
    (message,) = wire.recorder.messages
    assert message.data == DATA and message.complete and not message.headless


def test_the_middle_of_a_send_is_placed_only_without_a_gap_before_it() -> None:
    """A SEND does not tell its length: behind a gap another one may have begun."""
    wire = Wire()
    frames = [packet.frame for packet in Sender().send(DATA)]
    wire.feed(*frames[:2], *frames[3:])
    assert wire.recorder.messages[0].data == DATA[:2048]
    wire.feed(frames[2])
    assert wire.recorder.messages[0].data == DATA and wire.recorder.messages[0].complete


def test_receiver_not_ready_repeats_the_same_packet() -> None:
    wire = Wire()
    frames = frames_of(Sender(psn=4096), DATA[:64], imm=1)
    for _ in range(3):
        wire.feed(*frames, ack(4096, syndrome=0x2C), ack(4096, syndrome=0x60))
    wire.feed(*frames, ack(4096))
    assert wire.roce.counters()["rnr_naks"] == 3 and wire.roce.counters()["naks"] == 3
    assert [message.complete for message in wire.recorder.messages] == [True]


def read_of(size: int, psn: int = 50, va: int = 0x1000) -> bytes:
    return roce_frame(READ, psn, va=va, size=size, src=A, dst=B, qp=0x11)


def responses(psn: int, data: bytes, mtu: int = 1024) -> list[bytes]:
    pieces = [data[i : i + mtu] for i in range(0, len(data), mtu)]
    back = {"qp": 0x22, "src": B, "dst": A}
    return [roce_frame(RESPONSE_FIRST if i == 0 else RESPONSE_LAST if i == len(pieces) - 1 else RESPONSE_MIDDLE,
                       psn + i, piece, **back) for i, piece in enumerate(pieces)]


def test_read_and_its_response() -> None:
    wire = Wire()
    wire.feed(read_of(8000), *responses(50, DATA), roce_frame(ONLY, 58, DATA[:10], size=10), ack(58))
    read, write = wire.recorder.messages
    assert (read.opcode, read.va, read.length, read.data, read.complete) == ("RDMA_READ", 0x1000, 8000, DATA, True)
    assert write.first_psn == read.first_psn + 8 and write.complete
    wire.flush()
    assert wire.roce.counters()["holes"] == 0, "the numbers of the response are no gap in the requests"


def test_a_read_that_is_asked_again_from_where_it_broke_off() -> None:
    wire = Wire()
    sent = responses(50, DATA)
    wire.feed(read_of(8000), *sent[:3], *sent[5:])
    wire.feed(read_of(8000 - 3072, 53, 0x1000 + 3072), *responses(53, DATA[3072:]))
    (read,) = wire.recorder.messages
    assert read.data == DATA and read.complete and not read.conflicts
    wire = Wire()
    wire.feed(read_of(8000), *sent[:3], *sent[5:7])
    wire.flush()
    assert wire.recorder.messages[0].holes == [(3072, 2048), (7168, 832)]
    assert sorted(wire.recorder.told, key=lambda t: t[1])[0][1:] == (3072, 2048)


def test_foreign_packets_make_no_flow_and_no_gap() -> None:
    wire = Wire()
    frames = [
        roce_frame(0x81, 0, bytes(16)), roce_frame(0x64, 9, bytes(64), qp=1), roce_frame(0x2A, 9, bytes(64)),
        roce_frame(0xAA, 0x30001, bytes(98), qp=0xBBBBBB, good=False), roce_frame(ONLY, 9, flags=1),
        roce_frame(21, 3), roce_frame(ONLY, 3, qp=1), roce_frame(FIRST, 3)[:50], b"\0" * 12 + b"\x08\x06" + bytes(40),
    ]
    wire.feed(*frames)
    counters = wire.roce.counters()
    assert counters["flows"] == 0 and counters["packets"] == 0
    assert counters["foreign"] == 8
    assert (counters["foreign_cnp"], counters["foreign_ud"], counters["foreign_uc"]) == (1, 1, 1)


def test_the_icrc_is_counted_per_flow_and_a_bad_packet_of_a_good_flow_is_refused() -> None:
    wire = Wire(check_icrc=True)
    frames = frames_of(Sender())
    bad = roce_frame(MIDDLE, 3, bytes(1024), good=False)
    wire.feed(*frames[:3], bad, *frames[4:])
    assert wire.roce.icrc[0].tolist() == [7, 1] and wire.roce.counters()["icrc_refused"] == 1
    wire.flush()
    assert wire.recorder.messages[0].holes == [(3072, 1024)]
    # A source that writes no CRC at all is told, not dropped.
    wire = Wire(check_icrc=True)
    wire.feed(*(frame[:-4] + bytes(4) for frame in frames))
    assert wire.roce.icrc[0].tolist() == [0, 8]
    assert wire.recorder.messages[0].data == DATA


def test_a_payload_that_the_mirror_cut_off_is_missing() -> None:
    wire = Wire()
    frames = frames_of(Sender())
    cut = [frame[:200] for frame in frames]
    wire.feed(*cut[:1], *frames[1:4], cut[4], *frames[5:], wirelen=[len(frame) for frame in frames])
    assert wire.roce.counters()["truncated"] == 2
    wire.flush()
    (message,) = wire.recorder.messages
    assert message.length == 8000 and message.holes == [(0, 1024), (4096, 1024)]
    assert not message.complete
    wire.feed(frames[0], frames[4])
    assert message.data == DATA and message.complete


def test_what_contradicts_its_message_is_never_placed() -> None:
    wire = Wire()
    frames = frames_of(Sender())
    wrong = [
        roce_frame(MIDDLE, 2, bytes(512)), roce_frame(LAST, 2, bytes(1024)), roce_frame(MIDDLE, 7, bytes(1024)),
        roce_frame(LAST, 7, bytes(100)), roce_frame(1, 2, bytes(1024)), roce_frame(ONLY, 2, bytes(8), size=8),
        roce_frame(FIRST, 20, bytes(512), size=4096), roce_frame(ONLY, 20, bytes(8), size=9),
        roce_frame(FIRST, 20, bytes(1024), size=1000),
    ]
    wire.feed(*frames[:2])
    assert wire.feed(*wrong) == []
    assert wire.roce.counters()["misfits"] == len(wrong)
    wire.feed(*frames[2:])
    assert [message.data for message in wire.recorder.messages] == [DATA]


def test_a_queue_pair_that_is_made_anew_starts_over() -> None:
    wire = Wire()
    wire.feed(*frames_of(Sender()))
    spans = wire.feed(*frames_of(Sender(), DATA[::-1], va=0x5000))
    assert [span[0] for span in spans[:3]] == ["close", "open", "begin"]
    old, new = wire.recorder.messages
    assert new.data == DATA[::-1] and new.complete and new.first_psn == 2 << 24
    assert old.data == DATA and not old.conflicts


def test_one_stray_number_does_not_move_the_flow_and_two_do() -> None:
    wire = Wire()
    sender = Sender(psn=1000)
    wire.feed(*frames_of(sender))
    assert wire.feed(roce_frame(MIDDLE, 5_000_000, bytes(1024))) == []
    wire.feed(*frames_of(sender))
    assert wire.roce.counters()["strangers"] == 1 and wire.roce.counters()["restarts"] == 0
    far = Sender(psn=5_000_000)
    wire.feed(*frames_of(far), *frames_of(far, DATA[::-1]))
    assert wire.roce.counters()["restarts"] == 1
    assert wire.recorder.messages[-1].data == DATA[::-1] and wire.recorder.messages[-1].complete


def test_the_other_direction_is_found_by_port_or_by_numbers() -> None:
    ports = {0x30: 50001, 0x31: 50002}
    for same in (True, False):
        wire = Wire()
        for psn in range(40):
            for i, qp in enumerate(ports):
                number = psn + (0 if same else 1000 * i)
                wire.feed(roce_frame(ONLY, number, b"data", size=4, qp=qp, sport=ports[qp]))
                wire.feed(ack(number, qp=qp + 0x100, sport=ports[qp] + (0 if same else 7)))
        for qp in ports:
            there, back = wire.flows.find_pair(0, A, B, qp), wire.flows.find_pair(0, B, A, qp + 0x100)
            assert wire.roce.peer[there] == back and wire.roce.peer[back] == there
    # Alike in everything: nothing is claimed.
    wire = Wire()
    for psn in range(20):
        for qp in ports:
            wire.feed(roce_frame(ONLY, psn, b"data", size=4, qp=qp))
        for qp in ports:
            wire.feed(ack(psn, qp=qp + 0x100))
    assert (wire.roce.peer[: wire.flows.count] == -1).all()


def test_bounded_memory_gives_gaps_up_and_never_breaks() -> None:
    wire = Wire(held_bytes=64 << 10, gaps=256, messages=64)
    sender = Sender(mtu=256)
    for _ in range(40):
        packets = sender.write(DATA)
        wire.feed(*(packet.frame for packet in packets[1::2]))
    assert wire.roce.held_bytes <= 64 << 10
    assert wire.roce.counters()["no_room"] + wire.roce.counters()["headless"] > 0
    wire.flush()
    assert wire.roce.held_bytes == 0


def test_an_evicted_flow_is_closed_and_its_id_begins_anew() -> None:
    wire = Wire(QueuePairs(2))
    for qp in range(0x20, 0x26):
        wire.feed(*frames_of(Sender(ends={"qp": qp}))[:4])
    wire.flush()
    assert wire.roce.counters()["flows_evicted"] > 0
    for message in wire.recorder.messages:
        assert message.data[:4096] == DATA[:4096] and message.holes == [(4096, 8000 - 4096)]


def test_a_busy_flow_is_not_the_one_that_gives_way() -> None:
    """Also the flow with id 0, whose packets all take the short cut."""
    wire = Wire(QueuePairs(2))
    busy = frames_of(Sender(mtu=256))
    wire.feed(*busy[:3])
    for number in range(6):
        other = frames_of(Sender(ends={"qp": 0x20 + number}))
        wire.feed(*busy[3 + 4 * number : 7 + 4 * number], *other)
    assert wire.flows.evicted == 5 and wire.flows.find_pair(0, A, B, 0x11) == 0
    assert wire.recorder.messages[0].present == DATA[: 27 * 256]


def unsigned(frame: bytes) -> bytes:
    """Another source port: the CRC is wrong now, which a reassembler believes of a source that has no right ones."""
    at = 34 if frame[12:14] == b"\x08\x00" else 54
    return frame[:at] + b"\x01\x02" + frame[at + 2 :]


def resized(frame: bytes, udp_length: int) -> bytes:
    return frame[:38] + udp_length.to_bytes(2, "big") + frame[40:]


STRANGE = {
    "the next one": roce_frame(MIDDLE, 2, b"x" * 1024),
    "of another sender": roce_frame(MIDDLE, 2, b"x" * 1024, src="10.0.0.7"),
    "to another receiver": roce_frame(MIDDLE, 2, b"x" * 1024, dst="10.0.0.7"),
    "over IPv6": roce_frame(MIDDLE, 2, b"x" * 1024, src="fd00::1", dst="fd00::2"),
    "to another queue pair": roce_frame(MIDDLE, 2, b"x" * 1024, qp=0x12),
    "to a queue pair with the same low bits": roce_frame(MIDDLE, 2, b"x" * 1024, qp=0x111),
    "repeated": roce_frame(MIDDLE, 1, DATA[1024:2048]),
    "ahead": roce_frame(MIDDLE, 3, DATA[3072:4096]),
    "at the place of the last": roce_frame(MIDDLE, 7, b"x" * 1024),
    "shorter": roce_frame(MIDDLE, 2, b"x" * 512),
    "longer": roce_frame(MIDDLE, 2, b"x" * 2048),
    "padded": roce_frame(MIDDLE, 2, b"x" * 1023),
    "of another version": roce_frame(MIDDLE, 2, b"x" * 1024, flags=1),
    "of another service": roce_frame(MIDDLE | 0x20, 2, b"x" * 1024),
    "of a SEND": roce_frame(1, 2, b"x" * 1024),
    "cut off": roce_frame(MIDDLE, 2, b"x" * 1024)[:900],
    "without its CRC": roce_frame(MIDDLE, 2, b"x" * 1024)[:-4],
    "with a UDP length of 0": resized(roce_frame(MIDDLE, 2, b"x" * 1024), 0),
    "with a UDP length too large": resized(roce_frame(MIDDLE, 2, b"x" * 1024), 2000),
    "with a UDP length too small": resized(roce_frame(MIDDLE, 2, b"x" * 1024), 1000),
    "headers only": roce_frame(MIDDLE, 2, b"x" * 1024)[:58],
}


def compare(frames: list[bytes], wirelen: list[int] | None = None, vantage: int = 0) -> int:
    """Frames in one block, where the short cut may be taken, and each in a block of its own, where it never is: the
    same spans and counters, with right and with wrong CRCs, looked at or not. Returns the number of spans."""
    lengths = wirelen or [len(frame) for frame in frames]
    counts = set()
    for check, some in ((False, frames), (True, frames), (True, [unsigned(frame) for frame in frames])):
        short, long = Wire(check_icrc=check), Wire(check_icrc=check)
        seen = []
        for a, b, group in ((0, 2, 0), (2, len(some), vantage)):
            block = block_of(some[a:b], vantage=group, wirelen=lengths[a:b])
            seen += short.read(short.roce.feed(block, START))
        spans = []
        for i, frame in enumerate(some):
            block = block_of([frame], vantage=vantage if i >= 2 else 0, wirelen=[lengths[i]])
            spans += long.read(long.roce.feed(block, START))
        seen += short.flush()
        assert spans + long.flush() == seen
        assert short.roce.counters() == long.roce.counters()
        assert (short.roce.icrc == long.roce.icrc).all()
        counts.add(len(seen))
    return min(counts)


@pytest.mark.parametrize("name", STRANGE)
def test_the_short_cut_takes_only_what_simply_is_the_next_packet(name: str) -> None:
    frames = frames_of(Sender())
    strange = STRANGE[name]
    full = max(len(strange), len(frames[2]))
    for rest in (frames[2:], frames[3:]):
        block = [frames[0], frames[1], strange, *rest]
        assert compare(block) > 8
        assert compare(block, [len(f) if f is not strange else full for f in block]) > 8


def test_the_short_cut_keeps_groups_apart_and_ends_with_the_message() -> None:
    frames = frames_of(Sender())
    assert compare([*frames[:7], roce_frame(MIDDLE, 7, bytes(1024)), *frames[7:]]) == compare(frames)
    assert compare(frames, vantage=3) > compare(frames)


def test_the_short_cut_stops_where_spans_would_not_fit() -> None:
    """It never writes beyond the arrays, whatever the bound; the other way says so."""
    wire = Wire()
    frames = frames_of(Sender())
    wire.feed(*frames[:2])
    where = wire.roce._prepare(8)
    where[18] = 3                        # entries of the span arrays, see mirror.roce_state.machine
    wire.roce._machine = where
    with pytest.raises(IndexError, match="more spans"):
        wire.roce._prepare = lambda packets: where  # type: ignore[method-assign]
        wire.roce.feed(block_of(frames[2:]), START)


def test_rows_are_used_again_and_repeats_of_forgotten_messages_do_no_harm() -> None:
    wire = Wire(messages=64)
    sender = Sender()
    old = frames_of(sender)
    wire.feed(*old)
    for _ in range(200):
        wire.feed(*frames_of(sender))
    assert len(wire.roce.messages) == 64
    assert wire.feed(*old) == [] and wire.roce.counters()["old"] == 8
    assert all(message.complete for message in wire.recorder.messages) and len(wire.recorder.messages) == 201


def test_one_walk_serves_tcp_and_roce() -> None:
    segments = Segments(datagrams=Datagrams())
    block = block_of(frames_of(Sender()))
    assert parse(block, Flows(4), segments) == 0
    roce = RoceReassembler(QueuePairs(4))
    assert segments.datagrams is not None
    spans = roce.take(segments.datagrams, block.base, START)
    assert spans.n == 11 and segments.counts()["roce"] == 8 and segments.counts()["other_ip"] == 0
    segments.datagrams = None
    parse(block, Flows(4), segments)
    assert segments.counts()["other_ip"] == 8


def test_no_python_per_packet() -> None:
    calls = {}
    for n in (10, 1000):
        sender = Sender(mtu=256)
        blocks = [block_of(frames_of(sender, bytes(256 * n))) for _ in range(3)]
        roce = RoceReassembler(QueuePairs(8))
        roce.feed(blocks[0], START)
        count = 0

        def tick(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tick)
        try:
            for block in blocks[1:]:
                roce.feed(block, START)
        finally:
            sys.setprofile(None)
        assert roce.counters()["payload_bytes"] == 3 * 256 * n
        calls[n] = count
    assert calls[10] == calls[1000] < 100


def test_refused_sizes() -> None:
    with pytest.raises(ValueError, match="at least"):
        RoceReassembler(QueuePairs(2), gaps=10)
