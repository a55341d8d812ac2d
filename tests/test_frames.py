from __future__ import annotations

import ctypes
import mmap
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP, UDP, IPOption_Timestamp
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    Jumbo,
)
from scapy.layers.l2 import ARP, CookedLinux, CookedLinuxV2, Dot1AD, Dot1Q, Ether, Loopback
from scapy.packet import Raw
from tcp_frames import START, block_of, tcp_frame

from mirror.block import Block
from mirror.flows import EPOCH, SEED, Flows, add, find, mix
from mirror.flows import address_words as words_of
from mirror.frames import Datagrams, Segments, parse

PAYLOAD = bytes(range(256)) * 2
V4 = IP(src="10.0.0.1", dst="10.0.0.2")
V6 = IPv6(src="fd00::1", dst="fd00::2")
SEGMENT = TCP(sport=1234, dport=80, seq=0xFFFFFFF0, ack=7, flags="PA", options=[("Timestamp", (1, 2))])
ETHER = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")

SWITCH = IP(src="10.9.0.1", dst="10.9.0.2", proto=47)
ERSPAN1 = bytes.fromhex("000088be")
ERSPAN2 = bytes.fromhex("b00088be 12340000 00000007 00000001 10070005 00000001")
ERSPAN3 = bytes.fromhex("100022eb 00000001 20070005 01020304 00000007 0c00000001020304")
ERSPAN3_IP = bytes.fromhex("000022eb 20070005 01020304 00000806")
VXLAN = IP(src="10.8.0.1", dst="10.8.0.2", proto=17) / Raw(bytes.fromhex("c35012b5 00000000 08000000 00004d00"))


def parsed(block: Block) -> tuple[list[tuple[int, int, int, bytes, int, int]], Segments, Flows]:
    """Rows as (flow, seq, ack, bytes present, length on the wire, flags)."""
    flows, segments = Flows(64), Segments()
    rows = []
    for i in range(parse(block, flows, segments)):
        seq, ack, addr, present, length, ts = segments.numbers[i].tolist()
        assert ts == START
        rows.append((int(segments.flow[i]), seq, ack, ctypes.string_at(addr, present), length,
                     int(segments.flags[i])))
    return rows, segments, flows


STACKS = {
    "ipv4": (1, ETHER / V4),
    "ipv4 options": (1, ETHER / IP(src="10.0.0.1", dst="10.0.0.2", options=[IPOption_Timestamp(flg=0)])),
    "ipv6": (1, ETHER / V6),
    "ipv6 extension headers": (1, ETHER / V6 / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrRouting()),
    "ipv6 atomic fragment": (1, ETHER / V6 / IPv6ExtHdrFragment(offset=0, m=0)),
    "priority tag": (1, ETHER / Dot1Q(vlan=0, prio=5) / V4),
    "802.1Q": (1, ETHER / Dot1Q(vlan=42) / V6),
    "QinQ 0x8100": (1, ETHER / Dot1Q(vlan=0) / Dot1Q(vlan=7) / V4),
    "QinQ 802.1ad": (1, ETHER / Dot1AD(vlan=9) / Dot1Q(vlan=7) / V4),
    "null": (0, Loopback(type=2) / V4),
    "null ipv6 of another system": (0, Raw(struct.pack("<I", 30)) / V6),
    "null big-endian": (0, Raw(struct.pack(">I", 2)) / V4),
    "raw ipv4": (101, V4),
    "raw ipv6": (101, V6),
    "erspan 1": (1, ETHER / SWITCH / Raw(ERSPAN1) / ETHER / V4),
    "erspan 2 over ipv6 with a key and a checksum": (1, ETHER / IPv6(nh=47) / Raw(ERSPAN2) / ETHER / V6),
    "erspan 3 with subheader, 802.1Q": (1, ETHER / SWITCH / Raw(ERSPAN3) / ETHER / Dot1Q(vlan=0) / V4),
    "erspan 3 of an ip packet": (1, ETHER / SWITCH / Raw(ERSPAN3_IP) / V6),
    "gre-teb": (1, ETHER / SWITCH / Raw(b"\0\0\x65\x58") / ETHER / V4),
    "gre": (1, ETHER / SWITCH / Raw(b"\0\0\x86\xdd") / V6),
    "mellanox": (1, ETHER / SWITCH / Raw(b"\0\0\x89\x49" + bytes(22)) / ETHER / V4),
    "vxlan in erspan 1": (1, ETHER / SWITCH / Raw(ERSPAN1) / ETHER / VXLAN / ETHER / V6),
    "cisco time": (1, ETHER / SWITCH / Raw(ERSPAN1) / Raw(bytes(12) + b"\x89\x88" + bytes(6) + b"\x08\0") / V4),
    "SLL": (113, CookedLinux() / V4),
    "SLL2": (276, CookedLinuxV2() / V6),
}


@pytest.mark.parametrize("name", STACKS)
def test_every_encapsulation_gives_the_same_segment(name: str) -> None:
    linktype, below = STACKS[name]
    frame = bytes(below / SEGMENT / Raw(PAYLOAD))
    rows, segments, flows = parsed(block_of([frame], linktype=linktype))
    assert rows == [(0, 0xFFFFFFF0, 7, PAYLOAD, len(PAYLOAD), 0x18)]
    v6 = "fd00" in below.summary()
    assert flows.endpoint_src(0) == ("fd00::1" if v6 else "10.0.0.1", 1234)
    assert flows.endpoint_dst(0) == ("fd00::2" if v6 else "10.0.0.2", 80)
    assert segments.counts()["vlan_tagged"] == int("Q" in name or "tag" in name)


def test_a_tag_that_the_kernel_moved_out_changes_nothing() -> None:
    frame = bytes(ETHER / V4 / SEGMENT / Raw(PAYLOAD))
    rows, segments, _ = parsed(block_of([frame], vlan=0x8100 << 16 | 5, wirelen=[len(frame) + 4]))
    assert rows == parsed(block_of([frame]))[0]
    assert segments.counts()["vlan_tagged"] == 1


def test_moved_out_tag_is_no_payload_where_the_frame_length_counts() -> None:
    frame = bytearray(tcp_frame(PAYLOAD))
    frame[16:18] = bytes(2)
    rows, segments, _ = parsed(block_of([bytes(frame)], vlan=0x8100 << 16, wirelen=[len(frame) + 4]))
    assert [row[3:5] for row in rows] == [(PAYLOAD, len(PAYLOAD))]
    assert segments.counts()["truncated"] == 0


@pytest.mark.parametrize("src, dst", [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")])
def test_trailing_padding_is_no_data(src: str, dst: str) -> None:
    frames = [tcp_frame(data, src=src, dst=dst) + bytes(range(1, 20)) for data in (b"", b"ab")]
    assert [row[3:5] for row in parsed(block_of(frames))[0]] == [(b"", 0), (b"ab", 2)]


def test_superpackets_take_the_frame_length() -> None:
    big = bytes(100_000)
    v4 = bytearray(tcp_frame(b""))
    v4[16:18] = bytes(2)                                 # total length 0: segmentation offload, BIG TCP
    v6 = bytearray(tcp_frame(b"", src="fd00::1", dst="fd00::2"))
    v6[18:20] = bytes(2)
    jumbo = bytes(ETHER / IPv6(src="fd00::1", dst="fd00::2", plen=0)
                  / IPv6ExtHdrHopByHop(options=[Jumbo(jumboplen=8 + 32 + len(big))]) / SEGMENT / Raw(big))
    padded = jumbo + b"pad"                              # with the option, the length is the option's
    rows, _, _ = parsed(block_of([bytes(v4) + big, bytes(v6) + big, jumbo, padded]))
    assert [(row[3] == big, row[4]) for row in rows] == [(True, len(big))] * 4


@pytest.mark.parametrize("cut_by", ["snaplen", "switch"])
def test_cut_frames_keep_their_length(cut_by: str) -> None:
    """A switch that truncates mirrored frames leaves no trace in the pcap lengths, only in the IP length."""
    whole = [tcp_frame(PAYLOAD), tcp_frame(PAYLOAD, src="fd00::1", dst="fd00::2")]
    cut = [frame[:100] for frame in whole]
    wire = [len(frame) for frame in (whole if cut_by == "snaplen" else cut)]
    rows, segments, _ = parsed(block_of(cut, wirelen=wire))
    assert [row[3:5] for row in rows] == [(PAYLOAD[:46], 512), (PAYLOAD[:26], 512)]
    assert segments.counts()["truncated"] == 2


def test_a_superpacket_cut_by_snaplen_keeps_its_length() -> None:
    frame = bytearray(tcp_frame(PAYLOAD))
    frame[16:18] = bytes(2)
    rows, _, _ = parsed(block_of([bytes(frame[:80])], wirelen=[len(frame)]))
    assert rows[0][3:5] == (PAYLOAD[:26], 512)


def test_what_is_refused_is_counted_by_reason() -> None:
    frames = {
        "fragments": [bytes(ETHER / IP(src="1.1.1.1", dst="2.2.2.2", flags="MF") / SEGMENT / Raw(PAYLOAD)),
                      bytes(ETHER / IP(src="1.1.1.1", dst="2.2.2.2", frag=64, proto=6) / Raw(PAYLOAD)),
                      bytes(ETHER / V6 / IPv6ExtHdrFragment(offset=0, m=1) / SEGMENT / Raw(PAYLOAD)),
                      bytes(ETHER / V6 / IPv6ExtHdrFragment(offset=5, m=0, nh=6) / Raw(PAYLOAD))],
        "other_ip": [bytes(ETHER / V4 / UDP() / Raw(PAYLOAD)), bytes(ETHER / V6 / UDP() / Raw(PAYLOAD))],
        "non_ip": [bytes(ETHER / ARP()), bytes(12) + struct.pack("!H", 46) + bytes(46)],
        "malformed": [bytes(ETHER / IP(src="1.1.1.1", dst="2.2.2.2", len=30) / SEGMENT / Raw(PAYLOAD)),
                      bytes(ETHER / V4 / TCP(dataofs=3) / Raw(PAYLOAD)),
                      bytes(12) + b"\x08\x00" + b"\x65" + tcp_frame(PAYLOAD)[15:]],
        "cut_header": [tcp_frame(PAYLOAD)[:n] for n in (3, 20, 40)],
    }
    everything = [frame for group in frames.values() for frame in group]
    rows, segments, _ = parsed(block_of(everything, wirelen=[600] * len(everything)))
    counts = segments.counts()
    assert rows == []
    assert {name: counts[name] for name in frames} == {name: len(group) for name, group in frames.items()}
    assert counts["frames"] == len(everything)


def test_an_unknown_link_type_is_counted() -> None:
    rows, segments, _ = parsed(block_of([tcp_frame(b"x")], linktype=195))
    assert rows == []
    assert segments.counts()["unknown_linktype"] == 1


class Guarded:
    """Memory whose end is followed by a page that faults: a read beyond it ends the process."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self._map = mmap.mmap(-1, 2 * page)
        self.memory = np.frombuffer(self._map, np.uint8)[:page]
        address = self.memory.__array_interface__["data"][0]
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + page), page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def block(self, frame: bytes, linktype: int) -> Block:
        start = self.memory.size - len(frame)
        self.memory[start:] = np.frombuffer(frame, np.uint8)
        one = np.array([len(frame)], np.int64)
        return Block(self.memory, np.array([start], np.int64), one, np.array([1500], np.int64),
                     np.array([START], np.int64), np.array([-1], np.int64), 0, linktype)


GUARDED = Guarded()
ACCOUNTED = ("tcp", "other_ip", "non_ip", "fragments", "malformed", "cut_header", "flow_table_full", "outer_fragments",
             "outer_unproven", "unknown_tunnel", "too_deep", "tunnel_table_full")


def check_guarded(frame: bytes, linktype: int) -> Segments:
    _, segments, _ = parsed(GUARDED.block(frame, linktype))
    counts = segments.counts()
    assert sum(counts[name] for name in ACCOUNTED) == 1, "every frame is counted under exactly one reason"
    return segments


FRAGMENTS = {
    "last ipv4 fragment": (1, ETHER / IP(src="1.1.1.1", dst="2.2.2.2", frag=2, proto=47) / Raw(ERSPAN1)),
    "first ipv6 fragment": (1, ETHER / V6 / IPv6ExtHdrFragment(offset=0, m=1, nh=17) / Raw(bytes(13))),
}
HOSTILE = STACKS | FRAGMENTS


@pytest.mark.parametrize("name", HOSTILE)
def test_every_prefix_of_a_frame_is_read_within_its_bounds(name: str) -> None:
    linktype, below = HOSTILE[name]
    frame = bytes(below / SEGMENT / Raw(b"payload"))
    for size in range(len(frame) + 1):
        check_guarded(frame[:size], linktype)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(HOSTILE)), st.integers(0, 1 << 32), st.integers(1, 6))
def test_damaged_frames_are_read_within_their_bounds(name: str, seed: int, damages: int) -> None:
    linktype, below = HOSTILE[name]
    frame = bytearray(bytes(below / SEGMENT / Raw(b"payload")))
    dice = random.Random(seed)
    for _ in range(damages):
        frame[dice.randrange(len(frame))] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
    segments = check_guarded(bytes(frame[: dice.randint(1, len(frame))]), linktype)
    for row in segments.numbers[: segments.n].tolist():
        assert 0 <= row[3] <= row[4]


PLAIN = {
    "ipv4": ETHER / V4 / UDP(sport=69, dport=4791) / Raw(PAYLOAD),
    "ipv4 with options": ETHER / IP(options=[IPOption_Timestamp(flg=0)]) / UDP(dport=4791) / Raw(PAYLOAD),
    "ipv4 fragment": ETHER / IP(src="10.0.0.1", flags="MF") / UDP(dport=4791) / Raw(PAYLOAD),
    "ipv6": ETHER / V6 / UDP(sport=69, dport=4791) / Raw(PAYLOAD),
    "ipv6 with an extension": ETHER / V6 / IPv6ExtHdrDestOpt() / UDP(dport=4791) / Raw(PAYLOAD),
    "tagged": ETHER / Dot1Q(vlan=0) / V4 / UDP(dport=4791) / Raw(PAYLOAD),
    "another port": ETHER / V4 / UDP(sport=4791, dport=4790) / Raw(PAYLOAD),
    "tcp": ETHER / V4 / TCP(dport=4791) / Raw(PAYLOAD),
}


def datagrams_of(frame: bytes, wirelen: int, moved_out: bool) -> tuple[list[list[int]], dict[str, int]]:
    """Rows (addresses from the frame on) and counters; no frame with a tag moved out goes the short way."""
    segments = Segments(datagrams=Datagrams())
    block = block_of([frame], vlan=0x81000007 if moved_out else -1, wirelen=[wirelen + 4 * moved_out], vantage=9)
    parse(block, Flows(4), segments)
    start = block.base.__array_interface__["data"][0]
    assert segments.datagrams is not None
    rows = segments.datagrams.numbers[: segments.datagrams.n] - [start, start, start, start, 0, 0]
    counts = segments.counts()
    assert counts.pop("vlan_tagged") >= moved_out
    counts.pop("qinq")
    return rows.tolist(), counts


@pytest.mark.parametrize("name", PLAIN)
def test_the_short_way_of_roce_frames_comes_to_the_same(name: str) -> None:
    frame = bytes(PLAIN[name])
    for cut in (len(frame), 61, 62, 45, 100, len(frame) - 1):
        for wirelen in {cut, len(frame)}:
            assert datagrams_of(frame[:cut], wirelen, False) == datagrams_of(frame[:cut], wirelen, True)
    for at in range(12, 60):
        for value in (0, 1, 0x45, 0x46, 0x60, 0xFF):
            damaged = frame[:at] + bytes([value]) + frame[at + 1 :]
            assert datagrams_of(damaged, len(damaged), False) == datagrams_of(damaged, len(damaged), True), (at, value)
    trailer = frame + bytes(7)
    assert datagrams_of(trailer, len(trailer), False) == datagrams_of(trailer, len(trailer), True)
    rows, _ = datagrams_of(frame, len(frame), False)
    assert bool(rows) == (name not in ("ipv4 fragment", "another port", "tcp"))


def test_frames_outside_the_buffer_are_refused() -> None:
    block = block_of([tcp_frame(b"abc")] * 3)
    block.offset[0] = -1
    block.caplen[1] = -5
    block.offset[2] += 1
    rows, segments, _ = parsed(block)
    assert rows == []
    assert segments.counts()["malformed"] == 3


def test_flows_of_different_vantages_do_not_mix() -> None:
    flows, segments = Flows(8), Segments()
    for vantage in (0, 1):
        parse(block_of([tcp_frame(b"x")], vantage=vantage), flows, segments)
    assert flows.count == 2
    assert [flows.vantage(flow) for flow in (0, 1)] == [0, 1]
    assert flows.lookup(1, "10.0.0.1", 1000, "10.0.0.2", 2000) == 1
    assert flows.lookup(2, "10.0.0.1", 1000, "10.0.0.2", 2000) == -1
    assert flows.peer[:2].tolist() == [-1, -1]


def test_both_directions_find_each_other() -> None:
    flows, segments = Flows(8), Segments()
    back = {"src": "10.0.0.2", "dst": "10.0.0.1", "sport": 2000, "dport": 1000}
    parse(block_of([tcp_frame(b"x"), tcp_frame(b"x", sport=9), tcp_frame(b"y", **back)]), flows, segments)
    assert flows.peer[:3].tolist() == [2, -1, 0]
    assert segments.flow[:3].tolist() == [0, 1, 2]


def test_a_full_table_gives_away_idle_flows_and_never_pinned_or_current_ones() -> None:
    flows, segments = Flows(4), Segments()

    def see(*ports: int) -> None:
        parse(block_of([tcp_frame(b"x", sport=port) for port in ports]), flows, segments)

    def known() -> set[int]:
        return {port for port in range(1, 20) if flows.lookup(0, "10.0.0.1", port, "10.0.0.2", 2000) >= 0}

    see(1)
    flows.pinned[0] = 1
    see(2)
    see(3, 4)
    assert known() == {1, 2, 3, 4}
    see(5)                                   # the oldest but for the pinned one goes
    assert known() == {1, 3, 4, 5}
    flows.table.live[[1, 2, 3]] = (1, 1, 0)  # a flow that carried no data goes before older ones that did
    see(6)
    assert known() == {1, 3, 5, 6}
    assert flows.evicted == 2
    see(3, 5, 6, 7)                          # all but the pinned one are in use by this very block
    assert known() == {1, 3, 5, 6}
    assert segments.counts()["flow_table_full"] == 1
    assert segments.n == 3


def test_the_table_against_a_model() -> None:
    """20,000 steps on a small table: what it knows is what a dictionary knows, through every eviction."""
    flows, dice = Flows(50), random.Random(5)
    table = flows.table
    model: dict[tuple[int, str, int], int] = {}
    for step in range(20_000):
        table.meta[EPOCH] += 1
        key = (dice.randrange(2), f"10.0.{dice.randrange(3)}.{dice.randrange(10)}", dice.randrange(10))
        words = (*words_of(key[1]), *words_of("fd00::1"), key[0] << 32 | key[2] << 16 | 5)
        h = mix(int(table.meta[SEED]), *words)
        flow = int(table.slots[find(table.slots, table.key, h, *words)])
        assert flow == model.get(key, -1)
        if flow < 0:
            flow, recycled = add(table, h, *words)
            assert recycled == (len(model) == 50)
            model = {other: at for other, at in model.items() if at != flow}
            model[key] = flow
        else:
            table.touched[flow] = step
        assert int((table.slots >= 0).sum()) == len(model)
    for key, flow in model.items():
        assert flows.lookup(key[0], key[1], key[2], "fd00::1", 5) == flow
