from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
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
    acked,
    block_of,
    data,
    syn,
    tcp_frame,
)

from mirror.flows import Flows
from mirror.reorder import END, NEXT
from mirror.streams import Stream, StreamRecorder
from mirror.tcp import TcpReassembler


def opened(**options: int) -> Wire:
    wire = Wire(**options)
    assert wire.feed(syn()) == [("open", 0, 0, 1)]
    return wire


def test_in_order_data_points_into_the_block() -> None:
    flows = Flows(8)
    tcp = TcpReassembler(flows)
    block = block_of([syn(), data(0, b"abcd"), data(4, b"efgh")])
    spans = tcp.feed(block, START)
    low = block.base.__array_interface__["data"][0]
    assert spans.kind[:3].tolist() == [3, 0, 0]
    assert [address - low for address in spans.addr[1:3].tolist()] == [54 + 54, 54 + 58 + 54]
    assert spans.ts[:3].tolist() == [START] * 3


def test_out_of_order_data_waits_and_comes_in_order() -> None:
    wire = opened()
    assert wire.feed(data(4, b"efgh"), data(12, b"mnop")) == []
    assert wire.tcp.held_bytes > 0
    assert wire.feed(data(8, b"ijkl")) == []
    assert wire.feed(data(0, b"abcd")) == [("data", 0, 0, b"abcd"), ("data", 0, 4, b"efghijkl"),
                                            ("data", 0, 12, b"mnop")]
    assert wire.tcp.held_bytes == 0
    assert wire.flush() == []


def test_overlaps_are_trimmed_and_duplicates_told() -> None:
    wire = opened()
    assert wire.feed(data(0, b"abcd")) == [("data", 0, 0, b"abcd")]
    assert wire.feed(data(0, b"abcd")) == [("duplicate", 0, 0, b"abcd")]
    assert wire.feed(data(2, b"cdef")) == [("duplicate", 0, 2, b"cd"), ("data", 0, 4, b"ef")]
    assert wire.feed(data(8, b"ij"), data(12, b"mn")) == []
    # One segment over data, gap, held, gap, held and new bytes.
    assert b"".join(v for kind, _, _, v in wire.feed(data(4, b"efghijklmnop")) if kind == "data") == b"ghijklmnop"


def test_differing_copies_of_waiting_bytes_are_a_conflict() -> None:
    wire = opened()
    assert wire.feed(data(2, b"cdefgh"), data(0, b"abcdXfYh")) == [
        ("data", 0, 0, b"ab"), ("data", 0, 2, b"cdefgh"), ("conflict", 0, 4, 3)]
    assert wire.tcp.conflicts == [(0, 4, 3)]
    assert wire.tcp.counters()["conflicts"] == 1


@pytest.mark.parametrize("busy", [False, True])
def test_a_gap_that_was_acknowledged_becomes_a_hole_after_the_grace(busy: bool) -> None:
    """Not at once, and not for data of the other direction: with both directions busy an ACK overtakes the data."""
    wire = opened()
    payload = b"reverse" if busy else b""
    wire.feed(data(0, b"abcd"), tcp_frame(seq=5000, ack=ISN + 1, flags=SYN | ACK, **BACK))
    wire.feed(data(8, b"ijkl"), acked(4, payload=payload))
    assert [row for row in wire.expire(500 * MS) if row[0] == "hole"] == []
    wire.feed(acked(12, payload=payload, at=len(payload)))
    assert wire.expire(10 * MS) == []
    assert wire.expire(11 * MS) == []
    assert wire.expire(20 * MS) == [("hole", 0, 4, 4), ("data", 0, 8, b"ijkl")]
    assert wire.tcp.acked[0] == 12
    # The late bytes of the hole are told as such.
    assert wire.feed(data(4, b"efgh")) == [("duplicate", 0, 4, b"efgh")]


def test_bytes_that_come_within_the_grace_are_no_hole() -> None:
    wire = opened()
    wire.feed(data(4, b"efgh"), acked(8))
    wire.expire(15 * MS)
    assert wire.feed(data(0, b"abcd")) == [("data", 0, 0, b"abcd"), ("data", 0, 4, b"efgh")]


def test_only_what_was_acknowledged_is_given_up() -> None:
    wire = opened()
    wire.feed(data(10, b"klmn"), acked(6))
    for _ in range(3):
        spans = wire.expire(20 * MS)
        if spans:
            break
    assert spans == [("hole", 0, 0, 6)]
    assert wire.feed(data(6, b"ghij")) == [("data", 0, 6, b"ghij"), ("data", 0, 10, b"klmn")]


def test_all_gaps_below_an_old_acknowledgment_go_together() -> None:
    """A lossy mirror: gaps must not queue for a grace each."""
    wire = opened()
    wire.feed(*[data(i, b"ab") for i in range(4, 400, 4)], acked(400))
    wire.expire(20 * MS)
    spans = wire.expire(20 * MS)
    assert sum(kind == "hole" for kind, *_ in spans) == 100
    assert wire.tcp.delivered[0] == 400


def test_a_lost_tail_shows_by_its_acknowledgment() -> None:
    wire = opened()
    wire.feed(data(0, b"abcd"), acked(9))
    assert wire.expire(19 * MS) == []
    assert wire.expire(20 * MS) == [("hole", 0, 4, 5)]
    assert wire.feed(data(9, b"j")) == [("data", 0, 9, b"j")]


def test_without_a_reverse_direction_a_gap_ends_after_a_second() -> None:
    wire = opened()
    wire.feed(data(4, b"efgh"))
    assert wire.expire(990 * MS) == []
    assert wire.expire(20 * MS) == [("hole", 0, 0, 4), ("data", 0, 4, b"efgh")]


def test_with_a_silent_reverse_direction_a_gap_ends_after_half_a_minute() -> None:
    wire = opened()
    wire.feed(data(4, b"efgh"), acked(0))
    assert wire.expire(29 * SECOND) == []
    assert wire.expire(2 * SECOND) == [("hole", 0, 0, 4), ("data", 0, 4, b"efgh")]


def test_time_is_that_of_the_frames_and_never_beyond_now() -> None:
    """A reader that lags behind the ring does not give up what is still in it; a wrong timestamp ages nothing."""
    wire = opened()
    late = START + 3600 * SECOND
    wire.take(block_of([data(4, b"efgh")], START), late)
    wire.take(block_of([data(4, b"efgh")], START + 500 * MS), late)
    assert wire.take(block_of([data(8, b"ijkl")], late), START + SECOND) == []
    assert wire.take(block_of([data(0, b"abcd")], START + 600 * MS), late) == [
        ("data", 0, 0, b"abcd"), ("data", 0, 4, b"efghijkl")]


def test_gaps_end_by_frame_time_without_expire() -> None:
    wire = opened()
    wire.feed(data(4, b"efgh"))
    assert wire.feed(data(8, b"ijkl"), after=900 * MS) == []
    assert wire.feed(data(12, b"mnop"), after=200 * MS)[0] == ("hole", 0, 0, 4)


def test_a_full_arena_gives_up_the_gap_that_waits_longest() -> None:
    wire = Wire(reorder_bytes=64 << 10)
    wire.feed(*[tcp_frame(seq=0, flags=SYN, sport=port) for port in (1, 2)])
    wire.feed(tcp_frame(b"old", seq=11, sport=1))
    spans = []
    for i in range(40):
        spans += wire.feed(tcp_frame(bytes(3000), seq=101 + 5000 * i, sport=2), after=1000)
        assert wire.tcp.held_bytes <= 64 << 10
    holes = [(flow, offset, length) for kind, flow, offset, length in spans if kind == "hole"]
    assert holes[:2] == [(0, 0, 10), (1, 0, 100)]
    counters = wire.tcp.counters()
    assert counters["gaps_forced"] == len(holes) and counters["no_room"] == 0
    wire.flush()
    assert wire.tcp.counters()["hole_bytes"] == 10 + 100 + 39 * 2000


def test_bytes_that_find_no_cell_are_a_hole() -> None:
    """More disorder in one block than the reserve of the arena: known places go missing, nothing slides."""
    wire = opened(reorder_bytes=64 << 10)
    spans = wire.feed(*[data(10 + 20 * i, b"%10d" % i) for i in range(40)])
    spans += wire.flush()
    lost = wire.tcp.counters()["no_room"]
    assert lost > 0
    assert sum(v for kind, _, _, v in spans if kind == "hole") == 400 + lost
    assert all(v == b"%10d" % (offset // 20) for kind, _, offset, v in spans if kind == "data")
    assert wire.feed(data(800, b"after")) == [("data", 0, 800, b"after")]


def test_cut_payload_is_a_gap() -> None:
    wire = opened()
    whole, tail = data(0, b"abcdefgh"), data(8, b"ijkl")
    block = block_of([whole[:-5], tail], wirelen=[len(whole), len(tail)])
    assert wire.take(block, START) == [("data", 0, 0, b"abc")]
    assert wire.flush() == [("hole", 0, 3, 5), ("data", 0, 8, b"ijkl")]
    # Also where nothing follows: the frame itself tells how much it carried.
    last = data(12, b"mnopqrst")
    assert wire.take(block_of([last[:-5]], wirelen=[len(last)]), START) == [("data", 0, 12, b"mno")]
    assert wire.flush() == [("hole", 0, 15, 5)]


def test_keep_alive_probes_are_nothing() -> None:
    wire = opened()
    wire.feed(data(0, b"abcd"), acked(4))
    assert wire.feed(data(3, b"\0"), data(3, b"")) == []
    assert wire.tcp.counters()["probes"] == 1
    # Also while the byte that the probe repeats is missing: its own byte must not fill the gap.
    wire = opened()
    wire.feed(data(5, b""), acked(5))
    assert wire.feed(data(4, b"\0")) == []
    assert wire.flush() == [("hole", 0, 0, 5)]


def test_a_zero_window_probe_is_data() -> None:
    wire = opened()
    assert wire.feed(data(0, b"a")) == [("data", 0, 0, b"a")]
    assert wire.feed(data(1, b"b")) == [("data", 0, 1, b"b")]


def test_empty_segments_never_hide_data() -> None:
    wire = opened()
    assert wire.feed(data(0, b""), data(0, b"abcd"), data(4, b"")) == [("data", 0, 0, b"abcd")]


def test_fin_closes_after_all_data() -> None:
    wire = opened()
    assert wire.feed(data(4, b"efgh", flags=ACK | FIN), acked(9)) == []
    assert wire.feed(data(0, b"abcd")) == [("data", 0, 0, b"abcd"), ("data", 0, 4, b"efgh"), ("close", 0, 8, 0)]
    assert wire.feed(data(8, b"", flags=ACK | FIN), data(9, b"")) == []
    assert wire.feed(data(4, b"efgh")) == [("duplicate", 0, 4, b"efgh")]
    assert wire.flush() == []


def test_fin_behind_a_gap_closes_after_the_hole() -> None:
    wire = opened()
    wire.feed(data(0, b"ab"))
    wire.feed(data(9, b"", flags=ACK | FIN))
    assert wire.flush() == [("hole", 0, 2, 7), ("close", 0, 9, 0)]


def test_fin_after_its_own_acknowledgment_and_later_segments() -> None:
    wire = opened()
    wire.feed(data(0, b"ab"))
    assert wire.feed(acked(3), data(3, b"")) == []
    assert wire.feed(data(2, b"", flags=ACK | FIN)) == [("close", 0, 2, 0)]


def test_a_fin_that_comes_before_everything_else() -> None:
    """A short connection over two planes: its end may be read before its start."""
    wire = Wire()
    fin, payload = data(4, b"", flags=FIN | ACK), data(0, b"abcd")
    for first in ((fin, syn(), payload), (fin, payload, syn())):
        wire = Wire()
        spans = [span for frame in (*first, acked(5)) for span in wire.feed(frame)] + wire.flush()
        assert spans == [("open", 0, 0, 1), ("data", 0, 0, b"abcd"), ("close", 0, 4, 0)]
    wire = Wire()
    wire.feed(data(0, b"", flags=FIN | ACK), syn())
    assert wire.feed(acked(1)) == wire.flush() == [], "the FIN is no byte"


def test_a_fin_alone_is_no_stream() -> None:
    wire = Wire()
    assert wire.feed(data(0, b"", flags=FIN | ACK)) == wire.expire(SECOND) == wire.flush() == []
    assert wire.feed(data(7, b"after")) == []
    assert wire.expire(SECOND) == [("open", 0, 0, 0), ("data", 0, 0, b"after")]
    # One of an older connection does not end what comes after it.
    wire = Wire()
    wire.feed(data(0, b"", flags=FIN | ACK), data(0, b"new"), data(3, b"er"))
    assert wire.expire(SECOND) == [("open", 0, 0, 0), ("data", 0, 0, b"newer")]


def test_rst_closes_and_waits_the_grace_for_what_is_missing() -> None:
    wire = opened()
    wire.feed(data(0, b"ab"))
    assert wire.feed(data(2, b"", flags=RST)) == [("close", 0, 2, 1)]
    wire = opened()
    wire.feed(data(4, b"efgh"), data(8, b"", flags=RST))
    assert wire.expire(10 * MS) == []
    assert wire.expire(11 * MS) == [("hole", 0, 0, 4), ("data", 0, 4, b"efgh"), ("close", 0, 8, 1)]


def test_a_refused_connection_leaves_nothing() -> None:
    wire = opened()
    assert wire.feed(tcp_frame(seq=0, ack=ISN + 1, flags=RST | ACK, **BACK)) == []
    assert wire.flush() == []


def test_a_retransmitted_syn_changes_nothing() -> None:
    wire = opened()
    assert wire.feed(syn(), data(0, b"ab"), syn()) == [("data", 0, 0, b"ab")]


def test_a_syn_may_carry_data() -> None:
    wire = Wire()
    assert wire.feed(tcp_frame(b"early", seq=ISN, flags=SYN)) == [("open", 0, 0, 1), ("data", 0, 0, b"early")]


def test_a_reused_4_tuple_begins_a_new_stream() -> None:
    wire = opened()
    wire.feed(data(0, b"ab"), data(6, b"gh"))
    isn = 77
    assert wire.feed(syn(isn), data(0, b"new", isn=isn)) == [
        ("hole", 0, 2, 4), ("data", 0, 6, b"gh"), ("close", 0, 8, 1), ("open", 0, 0, 1), ("data", 0, 0, b"new")]
    wire.feed(data(3, b"", isn=isn, flags=FIN | ACK))
    assert wire.feed(syn(99), data(0, b"third", isn=99)) == [("open", 0, 0, 1), ("data", 0, 0, b"third")]


def test_a_syn_ack_ends_the_old_stream_of_the_other_side_and_starts_the_new_one() -> None:
    """The client's new SYN was not captured; the SYN-ACK tells its number."""
    wire = opened()
    wire.feed(data(0, b"ab"))
    isn = 123456
    spans = wire.feed(tcp_frame(seq=5000, ack=isn + 1, flags=SYN | ACK, **BACK))
    assert spans == [("open", 1, 0, 1), ("close", 0, 2, 1)]
    assert wire.feed(data(3, b"def", isn=isn)) == [("open", 0, 0, 1)]
    assert wire.feed(data(0, b"abc", isn=isn)) == [("data", 0, 0, b"abc"), ("data", 0, 3, b"def")]


def test_a_syn_ack_of_long_ago_proves_no_start() -> None:
    wire = Wire()
    wire.feed(tcp_frame(seq=5000, ack=ISN + 1, flags=SYN | ACK, **BACK), acked(1 << 21))
    wire.feed(data(1 << 32, b"one round later"))
    assert wire.flush() == [("open", 0 if wire.flows.peer[0] < 0 else 1, 0, 0),
                            ("data", 1, 0, b"one round later")]


def test_a_stream_seen_from_the_middle_starts_at_its_lowest_byte() -> None:
    wire = Wire()
    assert wire.feed(data(1004, b"efgh"), data(1000, b"abcd")) == []
    assert wire.expire(19 * MS) == []
    assert wire.expire(2 * MS) == [("open", 0, 0, 0), ("data", 0, 0, b"abcd"), ("data", 0, 4, b"efgh")]
    assert wire.feed(data(990, b"before....abcd")) == [("duplicate", 0, 0, b"abcd")]
    assert wire.tcp.counters()["before_start"] == 10


def test_a_syn_that_comes_after_data_still_starts_the_stream() -> None:
    wire = Wire()
    assert wire.feed(data(4, b"efgh")) == []
    assert wire.feed(syn()) == [("open", 0, 0, 1)]
    assert wire.feed(data(0, b"abcd")) == [("data", 0, 0, b"abcd"), ("data", 0, 4, b"efgh")]
    # After the grace it is too late, and harmless.
    wire = Wire()
    wire.feed(data(4, b"efgh"))
    assert wire.expire(30 * MS) == [("open", 0, 0, 0), ("data", 0, 0, b"efgh")]
    assert wire.feed(syn()) == []
    assert wire.feed(data(8, b"ijkl")) == [("data", 0, 4, b"ijkl")]


def test_a_busy_stream_seen_from_the_middle_opens_after_a_megabyte() -> None:
    wire = Wire()
    opened_after = 0
    while not wire.feed(data(50_000 * opened_after, bytes(50_000))):
        opened_after += 1
    assert opened_after == 20


def test_a_probe_does_not_open_a_stream() -> None:
    wire = Wire()
    assert wire.feed(data(99, b"\0"), data(100, b"real")) == []
    assert wire.flush() == [("open", 0, 0, 0), ("data", 0, 0, b"real")]


def test_a_stray_segment_does_not_move_a_stream() -> None:
    wire = opened()
    wire.feed(data(0, b"ab"))
    for stray in (1 << 30, 3 << 30, 200 << 20, -(200 << 20)):
        assert wire.feed(data(stray, b"stray")) == []
        assert wire.feed(data(int(wire.tcp.delivered[0]), b"x"))[0][0] == "data"
    assert wire.flush() == []
    assert wire.tcp.counters()["strangers"] == 4


def test_a_long_outage_is_a_hole_of_its_size() -> None:
    wire = opened()
    far = 500 << 20
    assert wire.feed(data(far, b"one"), data(far + 3, b"two")) == []
    assert wire.flush() == [("hole", 0, 0, far + 3), ("data", 0, far + 3, b"two")]


def test_a_stream_elsewhere_is_a_new_one() -> None:
    """Neither SYN nor SYN-ACK of the new connection was captured."""
    wire = opened()
    wire.feed(data(0, b"ab"))
    there = 3 << 30
    assert wire.feed(data(there, b"one"), data(there + 3, b"two")) == [("close", 0, 2, 1)]
    assert wire.flush() == [("open", 0, 0, 0), ("data", 0, 0, b"two")]


def test_an_evicted_flow_is_over() -> None:
    wire = Wire(Flows(2))
    wire.feed(tcp_frame(seq=0, flags=SYN, sport=1), tcp_frame(b"wait", seq=9, sport=1))
    wire.feed(tcp_frame(seq=0, flags=SYN, sport=2))
    wire.feed(tcp_frame(b"b", seq=1, sport=2))
    assert wire.feed(tcp_frame(b"new", seq=1, sport=3)) == [
        ("hole", 0, 0, 8), ("data", 0, 8, b"wait"), ("close", 0, 12, 1)]
    assert wire.flush() == [("open", 0, 0, 0), ("data", 0, 0, b"new")]
    assert wire.flows.endpoint_src(0) == ("10.0.0.1", 3)
    assert wire.tcp.counters()["flows_evicted"] == 1


def test_spans_from_the_arena_live_until_the_next_call() -> None:
    """Cells that were delivered are not reused by later segments of the same call."""
    wire = opened(reorder_bytes=64 << 10)
    frames = []
    for i in range(7):
        frames += [data(200 * i + 100, bytes([i]) * 100), data(200 * i, bytes([100 + i]) * 100)]
    spans = wire.feed(*frames)
    assert b"".join(v for _, _, _, v in spans) == b"".join(
        bytes([100 + i]) * 100 + bytes([i]) * 100 for i in range(7))


def test_seen_end_and_acked_are_stream_offsets_beyond_4_gib() -> None:
    wire = Wire()
    step = 50_000
    wire.feed(syn())
    wire.tcp._state[0, [NEXT, END]] = (5 << 32) + 10  # as if 20 GiB had passed
    wire._next[0] = (5 << 32) + 10
    assert wire.feed(data(10, bytes(step)), acked(10 + step))[0][2] == (5 << 32) + 10
    assert wire.tcp.seen_end[0] == wire.tcp.acked[0] == (5 << 32) + 10 + step


def test_recorder_limits_what_it_keeps() -> None:
    wire = opened()
    recorder = StreamRecorder(wire.flows, limit=0)
    recorder._begin(0, True)
    block = block_of([data(0, b"x" * 10_000)])
    recorder.feed(wire.tcp.feed(block, START))
    (stream,) = recorder.streams
    assert isinstance(stream, Stream)
    assert (stream.length, stream.lost) == (10_000, 10_000 - 4096)
    assert stream.holes == [(4096, 10_000 - 4096)]
    assert not stream.complete


def test_no_python_per_packet() -> None:
    """The number of Python and C calls of a feed is the same for 10 frames as for 1,000, in order and not."""
    calls = {}
    for n in (10, 1000):
        wire = opened()
        order = list(range(n))
        random.Random(1).shuffle(order)
        blocks = [block_of([data(100 * i, bytes(100)) for i in range(n)]),
                  block_of([data(100 * (n + i), bytes(100)) for i in order])]
        wire.tcp.feed(block_of([data(0, b"")] * n), START)          # arrays grown, kernels compiled
        count = 0

        def tick(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tick)
        try:
            for block in blocks:
                wire.tcp.feed(block, START)
        finally:
            sys.setprofile(None)
        assert wire.tcp.delivered[0] == 200 * n
        calls[n] = count
    assert calls[10] == calls[1000] < 100
