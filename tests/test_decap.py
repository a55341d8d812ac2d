"""Frames inside mirror tunnels: recorded ones by their truths, and captures wrapped by hand against themselves bare."""

from __future__ import annotations

import ctypes
import json
import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_frames import BACK, MS, START, SYN, block_of, tcp_frame
from tunnel_frames import (
    NODE,
    SWITCH,
    WRAPPINGS,
    Reading,
    erspan1,
    erspan2,
    erspan3,
    fragments,
    frames_of,
    gre,
    gre_ethernet,
    ip4,
    ip6,
    mellanox,
    ttag,
    vlan,
    vxlan,
)

from mirror.flows import Flows
from mirror.frames import Datagrams, Segments, parse
from mirror.vantage import Tunnel, Vantage

TUNNELS = {
    "erspan1_vlan_icmp_suricata.pcap": {"erspan1": 42, "vlan_tagged": 42, "other_ip": 42},
    "erspan2_inner_tcp_pair_suricata5437-02.pcap": {"erspan2": 60, "tcp": 60},
    "erspan3_dot1q_icmp_zeek.pcap": {"erspan3": 2, "vlan_tagged": 2, "other_ip": 2},
    "erspan3_ft0_vlan_noseq_tcpdump.pcap": {"erspan3": 9, "vlan_tagged": 9, "other_ip": 9},
    "greteb_inner_tcp_http_suricata2576.pcap": {"gre_ethernet": 15, "tcp": 15},
    "vxlan_inner_http_zeek.pcap": {"vxlan": 12, "tcp": 12},
    "vxlan_overlapping_vni_http_zeek.pcap": {"vxlan": 28, "tcp": 42},
    "gso_ipv4_vxlan_ipv4_tcpdump.pcap": {"vxlan": 1, "tcp": 1},
    "vlan0_priority_tag_http_zeek.pcap": {"vlan_tagged": 14, "tcp": 14},
    "qinq0_http_zeek.pcap": {"vlan_tagged": 14, "tcp": 14},
}
KINDS = ("erspan1", "erspan2", "erspan3", "gre_ethernet", "mellanox", "gre_ip", "vxlan", "ttag")
REFUSED = ("malformed", "cut_header", "fragments", "unknown_tunnel", "too_deep", "tunnel_table_full", "non_ip",
           "truncated", "cut_by_switch")


@pytest.fixture(scope="module")
def captures(shared: Path) -> Path:
    return shared / "captures"


@pytest.mark.parametrize("name", TUNNELS)
@pytest.mark.parametrize("per_block", [1, 1000])
def test_recorded_tunnels(captures: Path, name: str, per_block: int) -> None:
    """Every frame is found in its tunnel, and every stream, in every group, is tshark's to the byte."""
    truth = json.loads((captures / "EXPECTED.json").read_text())["tunnels/" + name]
    reading = Reading(frames_of(captures / "tunnels" / name), per_block=per_block)
    want = dict.fromkeys((*KINDS, *REFUSED, "tcp", "other_ip", "vlan_tagged"), 0) | TUNNELS[name]
    assert {key: reading.counts[key] for key in want} == want
    assert reading.counts["frames"] == truth["packets"]
    for follow in truth.get("follow", []):
        for mine, other, side in (("node0", "node1", "n0"), ("node1", "node0", "n1")):
            found = [s for s in reading.streams if s.complete
                     and (f"{s.source[0]}:{s.source[1]}", f"{s.destination[0]}:{s.destination[1]}")
                     == (follow[mine], follow[other])]
            assert found or follow[side + "_bytes"] == 0
            for stream in found:
                assert (stream.length, stream.sha256[:16]) == (follow[side + "_bytes"], follow[side + "_sha256"])


def test_every_session_is_a_group(captures: Path) -> None:
    """Three carry copies of the same traffic, a fourth one frame. All GRE sequence numbers are 0 and tell nothing."""
    reading = Reading(frames_of(captures / "tunnels" / "erspan2_inner_tcp_pair_suricata5437-02.pcap"))
    seen = reading.vantage.tunnels()
    assert [(one.tunnel.id, one.frames) for one in seen] == [(2, 34), (5, 15), (7, 10), (6, 1)]
    assert len({one.vantage for one in seen}) == 4 and all(one.group is None for one in seen)
    assert {stream.vantage for stream in reading.streams} <= {one.vantage for one in seen}


def test_two_tenants_with_the_same_addresses_stay_apart(captures: Path) -> None:
    """Both VXLAN networks, and the same connection without a tunnel, are three connections, each of them whole."""
    frames = frames_of(captures / "tunnels" / "vxlan_overlapping_vni_http_zeek.pcap")
    reading = Reading(frames)
    assert [one.tunnel.id for one in reading.vantage.tunnels()] == [4711, 4242]
    assert len(reading.streams) == 6 and all(s.complete for s in reading.streams)
    assert len({s.vantage for s in reading.streams}) == 3
    assert reading.counts["duplicate_bytes"] == 0
    merged = Reading(frames, Vantage({"fabric": ["127.0.0.1>127.0.0.1"]}))
    assert len(merged.streams) == 4
    assert merged.counts["duplicate_bytes"] == 136 + 5007
    assert {one.group for one in merged.vantage.tunnels()} == {"fabric"}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", ["gloo/nano.pcap", "tcp/tcp_reorder_client_view_trex.pcap",
                                  "tcp/tcp_minus_1_packet_smb2_suricata.pcap"])
def test_a_wrapped_capture_is_the_bare_one(captures: Path, name: str, wrapping: str) -> None:
    frames = frames_of(captures / name)
    bare = Reading(frames)
    wrap = WRAPPINGS[wrapping]
    wrapped = Reading((ts, wrap(frame)) for ts, frame in frames)
    assert bare.counts["delivered_bytes"] > 10_000
    assert wrapped.content == bare.content
    same = ("tcp", "tcp_payload_bytes", "delivered_bytes", "hole_bytes", "duplicate_bytes", "truncated", "malformed")
    assert {key: wrapped.counts[key] for key in same} == {key: bare.counts[key] for key in same}


def test_one_connection_sprayed_over_two_tunnels(captures: Path) -> None:
    """In one declared group they are one connection; undeclared they are two, each with holes."""
    frames = frames_of(captures / "gloo" / "nano.pcap")
    bare = Reading(frames)
    dice = random.Random(3)
    sprayed = [(ts, dice.choice((lambda f: erspan2(f, 1), lambda f: vxlan(f, 9, src="10.9.0.3")))(frame))
               for ts, frame in frames]
    groups = {"fabric": [f"{SWITCH}>{NODE}#1", "vxlan 10.9.0.3>*#9"]}
    assert Reading(sprayed, Vantage(groups)).content == bare.content
    apart = Reading(sprayed)
    assert len(apart.streams) > len(bare.streams)
    assert len({s.vantage for s in apart.streams}) == 2
    assert any(s.holes for s in apart.streams)
    some = Reading(sprayed, Vantage({"fabric": [f"{SWITCH}>{NODE}#1", "vxlan 10.9.0.3>*#10"]}))
    assert some.content == apart.content, "a declaration that fits one of them only merges nothing"


def test_an_interface_and_a_tunnel_in_one_group() -> None:
    """Every second frame comes bare from an interface: declared, it is one connection."""
    frames = connection(40)
    mixed = [(ts, erspan3(frame) if i % 4 > 1 else frame) for i, (ts, frame) in enumerate(frames)]
    one = Reading(mixed, Vantage({"plane": ["eth1", "10.9.0.1>*"]}), interface="eth1")
    assert one.content == Reading(frames).content
    other = Reading(mixed, Vantage({"plane": ["eth1", "10.9.0.1>*"]}), interface="eth2")
    assert len({s.vantage for s in other.streams}) == 2


def connection(segments: int, size: int = 1000) -> list[tuple[int, bytes]]:
    """A connection with both directions acknowledged, its TCP checksums right."""
    frames = [tcp_frame(seq=99, flags=SYN), tcp_frame(seq=499, ack=100, flags=SYN | 0x10, **BACK)]
    for number in range(segments):
        data = random.Random(number).randbytes(size)
        frames.append(tcp_frame(data, seq=100 + number * size, ack=500))
        frames.append(tcp_frame(seq=500, ack=100 + (number + 1) * size, **BACK))
    return [(START + number * MS, proven(frame)) for number, frame in enumerate(frames)]


def proven(frame: bytes) -> bytes:
    """The frame of `tcp_frame` with its TCP checksum filled in."""
    segment = frame[34:]
    pseudo = frame[26:34] + struct.pack("!HH", 6, len(segment)) + segment + b"\0" * (len(segment) & 1)
    total = sum(struct.unpack(f"!{len(pseudo) // 2}H", pseudo))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return frame[:50] + struct.pack("!H", ~total & 0xFFFF) + frame[52:]


def counts_of(*frames: bytes, vantage: Vantage | None = None, wirelen: list[int] | None = None) -> dict[str, int]:
    """The counters that are not zero after one block, and the rows."""
    segments = Segments(vantage=vantage or Vantage())
    rows = parse(block_of(frames, wirelen=wirelen), Flows(64), segments)
    counts = {key: value for key, value in segments.counts().items() if value}
    assert counts.pop("frames") == len(frames)
    assert counts.get("tcp", 0) == rows
    counts.pop("tcp_payload_bytes", 0)
    return counts


INNER = tcp_frame(b"payload")


def test_tunnels_nest_up_to_the_limit() -> None:
    frame = vxlan(gre_ethernet(erspan2(erspan3(INNER))))
    assert counts_of(frame) == {"vxlan": 1, "gre_ethernet": 1, "erspan2": 1, "erspan3": 1, "tcp": 1}
    assert counts_of(erspan2(frame)) == {"vxlan": 1, "gre_ethernet": 1, "erspan2": 2, "too_deep": 1}
    assert counts_of(frame, vantage=Vantage(depth=0)) == {"too_deep": 1}


def test_a_session_that_mirrors_itself_is_a_group_of_its_own() -> None:
    vantage = Vantage()
    flows, segments = Flows(64), Segments(vantage=vantage)
    parse(block_of([erspan2(INNER), erspan2(erspan2(INNER))]), flows, segments)
    outer, inner = vantage.tunnels()
    assert (outer.tunnel, outer.carrier, outer.frames) == (inner.tunnel, 0, 2)
    assert (inner.carrier, inner.frames) == (outer.vantage, 1)
    assert [flows.vantage(flow) for flow in segments.flow[:2].tolist()] == [outer.vantage, inner.vantage]


def test_erspan_frame_types() -> None:
    assert counts_of(erspan3(INNER[14:], frame_type=2)) == {"erspan3": 1, "tcp": 1}
    assert counts_of(erspan3(tcp_frame(b"x", src="fd00::1", dst="fd00::2")[14:], frame_type=2, subheader=True)) == {
        "erspan3": 1, "tcp": 1}
    assert counts_of(erspan3(INNER, frame_type=3)) == {"unknown_tunnel": 1}


def test_type_one_is_told_by_the_missing_sequence_number() -> None:
    """An ERSPAN II header is no Ethernet header: reading one as the other would shift everything."""
    assert counts_of(erspan1(INNER), gre(INNER, 0x88BE, key=3)) == {"erspan1": 2, "tcp": 2}
    assert counts_of(gre(struct.pack("!HHI", 0x1007, 5, 1) + INNER, 0x88BE)) == {"erspan1": 1, "non_ip": 1}
    set_at_will = gre(struct.pack("!HHI", 0x1007, 5, 1) + INNER, 0x88BE, sequence=0, flags=0x0807)
    assert counts_of(set_at_will) == {"erspan2": 1, "tcp": 1}, "version and reserved bits may hold anything"


def test_mellanox_with_and_without_its_own_header() -> None:
    plain = ip4(INNER[34:], 6, src="10.0.0.1", dst="10.0.0.2")
    assert counts_of(mellanox(plain), gre(plain, 0x8949), mellanox(vlan(plain, 1)), mellanox(INNER)) == {
        "mellanox": 4, "vlan_tagged": 1, "tcp": 4}


@pytest.mark.parametrize("size", [2, 4, 6])
def test_ttag_of_any_length(size: int) -> None:
    """Also where its time looks like an IPv4 header at the place of the shorter tag."""
    whole = ip4(INNER[34:], 6, src="10.0.0.1", dst="10.0.0.2")
    six = tcp_frame(b"x", src="fd00::1", dst="fd00::2")
    frames = [ttag(whole, size), ttag(vlan(whole, 3), size), ttag(six, size), vxlan(ttag(whole, size))]
    counts = counts_of(*frames)
    counts.pop("vlan_tagged", None)                # two bytes and a VLAN tag may as well be one tag of six
    assert counts == {"ttag": 4, "tcp": 4, "vxlan": 1}


def test_ttag_directly_before_ip() -> None:
    frame = ip4(INNER[34:], 6)
    assert counts_of(frame[:12] + b"\x89\x88abcd" + frame[14:]) == {"ttag": 1, "tcp": 1}


def test_what_is_not_read_is_told_by_type() -> None:
    segments = Segments()
    arp = bytes(12) + b"\x08\x06" + bytes(28)
    strange = bytes(12) + b"\x89\x88" + bytes(60)
    frames = [arp, *[erspan2(strange)] * 3, vxlan(arp), *[gre(INNER, 0x880B)] * 2, bytes(12) + b"\0\x26" + bytes(38)]
    parse(block_of(frames), Flows(8), segments)
    assert sorted(segments.unknown()) == sorted([
        ("inner ethertype", 0x8988, 3), ("gre protocol", 0x880B, 2), ("ethertype", 0x0806, 1),
        ("inner ethertype", 0x0806, 1), ("ethertype", 0, 1)])
    assert segments.unknown()[0] == ("inner ethertype", 0x8988, 3)
    flood = [bytes(12) + struct.pack("!H", 0x600 + i) + bytes(40) for i in range(2000)]
    parse(block_of(flood), Flows(8), segments)
    assert len(segments.unknown(100)) == 32
    parse(block_of([erspan2(strange)] * 500), Flows(8), segments)
    assert segments.unknown()[0][:2] == ("inner ethertype", 0x8988), "what is frequent comes through a flood"


def test_tunnels_that_are_not_read() -> None:
    assert counts_of(gre(INNER, 0x6558, flags=0x4000), vxlan(INNER, flags=0), vxlan(INNER, flags=0x0C)) == {
        "unknown_tunnel": 3}
    assert counts_of(vxlan(INNER, port=8472)) == {"other_ip": 1}
    both = Vantage(vxlan_ports=(4789, 8472))
    assert counts_of(vxlan(INNER, port=8472), vxlan(INNER), vantage=both) == {"vxlan": 2, "tcp": 2}


@pytest.mark.parametrize("wrap", [lambda f: f, erspan2, vxlan], ids=["bare", "erspan2", "vxlan"])
def test_cut_by_the_switch_is_not_cut_by_the_snaplen(wrap) -> None:
    """A truncating session cuts the mirrored frame before it wraps it: only the inner IP length tells."""
    frame = tcp_frame(bytes(1000))
    short = wrap(frame[:128])
    vantage = Vantage()
    counts = counts_of(short, vantage=vantage)
    assert (counts["truncated"], counts["cut_by_switch"]) == (1, 1)
    assert [one.cut for one in vantage.tunnels()] == [1] * len(vantage.tunnels())
    whole = wrap(frame)
    counts = counts_of(whole[:300], wirelen=[len(whole)])
    assert (counts["truncated"], counts["cut_by_snaplen"]) == (1, 1) and "cut_by_switch" not in counts
    icmp = wrap(ip4(bytes(600), 1)[:128])
    assert counts_of(icmp)["cut_by_switch"] == 1


def test_every_frame_that_is_not_whole_is_told_once_and_by_who_cut_it() -> None:
    arp, roce = bytes(12) + b"\x08\x06" + bytes(28), bytes(12) + b"\x08\x00" + ip4(bytes(500), 17)[14:]
    whole = [tcp_frame(bytes(500)), ip4(bytes(500), 1), arp, roce, tcp_frame(bytes(500))[:300]]
    short = [frame[:40] for frame in whole]
    counts = counts_of(*short, *whole, wirelen=[len(frame) for frame in (*whole, *whole)])
    # Two frames of the last kind: one that the switch cut, and one that the snaplen cut once more.
    assert (counts["cut_by_snaplen"], counts["cut_by_switch"]) == (4, 2)
    moved_out = block_of([INNER], vlan=0x81000005, wirelen=[len(INNER) + 4])
    segments = Segments()
    parse(moved_out, Flows(4), segments)
    assert segments.counts()["cut_by_snaplen"] == 0, "a tag that the kernel moved out was on the wire"


def test_encapsulations_are_counted_by_name() -> None:
    segments = Segments()
    frames = [INNER, vlan(INNER, 0), vlan(INNER, 5, 6), vlan(erspan2(vlan(INNER, 3)), 4), vxlan(vlan(INNER, 1, 2)),
              gre_ethernet(INNER), ttag(ip4(INNER[34:], 6)), erspan2(erspan3(INNER))]
    parse(block_of(frames), Flows(8), segments)
    assert segments.encapsulations() == {
        "vlan": 2, "qinq": 2, "ttag": 1, "erspan2": 2, "erspan3": 1, "gre-ethernet": 1, "vxlan": 1}
    for tag, name in (((), "vlan"), ((7,), "qinq")):
        segments = Segments()
        parse(block_of([vlan(INNER, *tag)], vlan=0x88A80005), Flows(8), segments)
        assert segments.encapsulations() == {name: 1}, "one of the tags may have been moved out"


@pytest.mark.parametrize("wrap", [erspan1, erspan2, gre_ethernet, vxlan])
def test_what_lies_behind_the_outer_packet_is_no_data(wrap) -> None:
    """A cut frame, and one whose length is that of its frame (0: segmentation offload), end where the tunnel ends."""
    frame = tcp_frame(bytes(range(200)))
    offloaded = frame[:16] + b"\0\0" + frame[18:]
    segments = Segments()
    assert parse(block_of([wrap(frame[:100]) + b"trailer", wrap(offloaded) + b"trailer"]), Flows(8), segments) == 2
    assert segments.numbers[:2, 3:5].tolist() == [[46, 200], [200, 200]]
    assert segments.counts()["cut_by_switch"] == 1


def test_padding_of_the_outer_frame_is_no_data() -> None:
    reading = Reading([(ts, erspan1(frame) + b"trailer") for ts, frame in connection(3)])
    assert reading.content == Reading(connection(3)).content


# --- outer fragments ---


@pytest.mark.parametrize("order", ["in order", "reversed", "shuffled"])
@pytest.mark.parametrize("size", [64, 552, 1000])
def test_fragments_of_tunnel_packets_are_put_together(order: str, size: int) -> None:
    frames, dice = connection(30, 1400), random.Random(1)
    pieces: list[tuple[int, bytes]] = []
    for number, (ts, frame) in enumerate(frames):
        parts = fragments(vxlan(frame), size, number)
        if order == "reversed":
            parts.reverse()
        elif order == "shuffled":
            dice.shuffle(parts)
        pieces += [(ts, part) for part in parts]
    for per_block in (1, 7, 1000):
        reading = Reading(pieces, per_block=per_block)
        assert reading.content == Reading(frames).content
        assert reading.counts["outer_fragments"] == len([p for p in pieces if p[1][20:22] != b"\0\0"])
        assert reading.counts["outer_lost"] == reading.counts["outer_waiting"] == 0


def test_fragments_over_ipv6() -> None:
    frames, pieces = connection(5), []
    for number, (ts, frame) in enumerate(frames):
        payload = vxlan(frame)[34:]
        for at in range(0, len(payload), 400):
            last = at + 400 >= len(payload)
            pieces.append((ts, ip6(struct.pack("!BBHI", 17, 0, at | (not last), number) + payload[at : at + 400], 44)))
    reading = Reading(pieces)
    assert reading.content == Reading(frames).content
    assert str(reading.vantage.tunnels()[0].tunnel) == "vxlan fd09::1>fd09::2#77"


def test_a_lost_fragment_is_a_hole_of_its_frame() -> None:
    frames = connection(20)
    pieces = [(ts, part) for i, (ts, frame) in enumerate(frames)
              for j, part in enumerate(fragments(erspan2(frame), 600, i)) if (i, j) != (12, 1)]
    reading = Reading(pieces)
    assert [(s.holes, s.length) for s in reading.streams if s.length] == [([(5000, 1000)], 20_000)]
    assert reading.counts["outer_waiting"] == 1
    late = Reading([*pieces, *[(ts + 5000 * MS, part) for ts, part in fragments_at(erspan2(frames[12][1]), 12)]])
    assert late.counts["outer_lost"] == 1, "fragments of long ago are of another packet"


def fragments_at(frame: bytes, identification: int) -> list[tuple[int, bytes]]:
    return [(START, part) for part in fragments(frame, 600, identification)]


def test_halves_of_two_packets_do_not_make_one() -> None:
    """All packets have the same identification, as many switches send them; the second half of one and the first of
    the next are lost, and what is left fits."""
    frames = connection(20)
    pieces = []
    for number, (ts, frame) in enumerate(frames):
        first, second = fragments(erspan2(frame), 600) if len(frame) > 600 else (erspan2(frame), None)
        if number != 14:
            pieces.append((ts, first))
        if second and number != 12:
            pieces.append((ts, second))
    reading = Reading(pieces)
    assert reading.counts["outer_unproven"] == 1
    assert [s.holes for s in reading.streams if s.length] == [[(5000, 2000)]]
    whole = Reading(frames)
    for mine, theirs in zip(reading.content, whole.content, strict=True):
        data, right = mine[4], theirs[4]
        assert data[:5000] + data[7000:] == right[:5000] + right[7000:]


@pytest.mark.parametrize("stray", ["first", "last", "middle"])
def test_a_fragment_that_contradicts_begins_anew(stray: str) -> None:
    """Same identification, bytes that differ or another length: what was held goes, the packet that comes is whole."""
    held = {"first": fragments(erspan2(proven(tcp_frame(bytes(700), seq=5))), 600)[0],
            "last": fragments(erspan2(proven(tcp_frame(bytes(1000)))), 600)[1],
            "middle": fragments(erspan2(proven(tcp_frame(bytes(1500)))), 600)[1]}
    first, second = fragments(erspan2(proven(tcp_frame(bytes(700)))), 600)
    order = (first, second) if stray == "first" else (second, first)
    counts = counts_of(held[stray], *order)
    assert counts == {"tcp": 1, "erspan2": 1, "outer_fragments": 3, "outer_joined": 1, "outer_lost": 1}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 9, 200]), st.sampled_from([0.0, 0.05, 0.3]), st.booleans())
def test_fragments_lost_doubled_and_disordered_never_make_wrong_data(seed: int, per_block: int, loss: float,
                                                                     one_id: bool) -> None:
    dice = random.Random(seed)
    frames = connection(25)
    truth = {s.source: s.data for s in Reading(frames).streams}
    pieces = [(ts, part) for i, (ts, frame) in enumerate(frames)
              for part in fragments(gre_ethernet(frame), 264, 0 if one_id else i)
              for _ in range(1 + (dice.random() < 0.1)) if dice.random() >= loss]
    for at in range(len(pieces) - 1):
        if dice.random() < 0.1:
            pieces[at], pieces[at + 1] = pieces[at + 1], pieces[at]
    for stream in Reading(pieces, per_block=per_block).streams:
        right = truth[stream.source]
        start = 0 if stream.from_start else right.find(stream.data[:264])
        assert start >= 0
        edges = [0, *[edge for at, size in stream.holes for edge in (at, at + size)], stream.length]
        for first, last in list(pairwise(edges))[::2]:
            assert stream.data[first:last] == right[start + first : start + last]
        assert not stream.conflicts


def roce_packets(frames: list[bytes]) -> tuple[list[bytes], dict[str, int]]:
    """Every packet to the RoCE port, from its IP header on, and the counters."""
    segments = Segments(datagrams=Datagrams())
    parse(block_of(frames), Flows(64), segments)
    assert segments.datagrams is not None
    rows = segments.datagrams.numbers[: segments.datagrams.n].tolist()
    assert all(udp == ip + 20 for ip, udp, *_ in rows)
    return [ctypes.string_at(ip, min(end, limit) - ip) for ip, _, end, limit, *_ in rows], segments.counts()


def test_roce_packets_in_tunnels_and_in_fragments(captures: Path) -> None:
    """The same packets bare, wrapped and in fragments; there a damaged one is refused, by its own CRC."""
    frames = [frame for _, frame in frames_of(captures / "roce" / "c2_clean_v4_4096.pcap")[:200]]
    bare, counts = roce_packets(frames)
    assert len(bare) == counts["roce"] > 150
    for wrap in WRAPPINGS.values():
        assert roce_packets([wrap(frame) for frame in frames])[0] == bare
    pieces = [fragments(erspan2(frame), 1480) for frame in frames]
    joined, counts = roce_packets([piece for parts in pieces for piece in parts])
    assert joined == bare
    assert (counts["outer_joined"] > 100, counts["outer_unproven"]) == (True, 0)
    large = next(number for number, parts in enumerate(pieces) if len(parts) == 3)
    middle = bytearray(pieces[large][1])
    middle[500] ^= 1
    pieces[large][1] = bytes(middle)
    joined, counts = roce_packets([piece for parts in pieces for piece in parts])
    assert (len(joined), counts["outer_unproven"]) == (len(bare) - 1, 1)


def test_a_flood_of_fragments_is_bounded() -> None:
    """Halves of 20,000 packets, and fragments that contradict each other, cost the others nothing but their own."""
    halves = [fragments(erspan2(INNER + bytes(900)), 600, i)[0] for i in range(20_000)]
    counts = counts_of(*halves)
    assert counts["outer_fragments"] == 20_000
    assert counts["outer_waiting"] <= 256 and counts["outer_waiting"] + counts["outer_lost"] == 20_000
    overlapping = [ip4(bytes([i]) * 64, 47, identification=7, place=0x2000 | i) for i in range(100)]
    assert counts_of(*overlapping)["outer_lost"] > 0
    beyond = ip4(bytes(64), 47, place=0x1FFF)
    odd = ip4(bytes(63), 47, place=0x2000)
    assert counts_of(beyond, odd) == {"outer_fragments": 2}
    scattered = [ip4(bytes(8), 47, identification=7, place=0x2000 | i * 2) for i in range(100)]
    assert counts_of(*scattered)["outer_lost"] > 0


def test_a_cut_fragment_is_not_used() -> None:
    first, second = fragments(erspan2(tcp_frame(bytes(1000))), 600)
    counts = counts_of(first[:400], second)
    assert (counts["outer_fragments"], counts["cut_by_switch"], counts["outer_waiting"]) == (2, 1, 1)


# --- groups ---


def test_tunnels_are_told_apart_by_every_field() -> None:
    vantage = Vantage()
    frames = [erspan2(INNER, 1), erspan2(INNER, 2), erspan3(INNER, 1), erspan1(INNER), gre_ethernet(INNER, 1),
              gre_ethernet(INNER), vxlan(INNER, 1), vxlan(INNER, 1, src="10.9.0.9"), vxlan(INNER, 1, dst="10.9.0.9")]
    flows, segments = Flows(64), Segments(vantage=vantage)
    for number in (0, 7):
        parse(block_of(frames, vantage=number), flows, segments)
    assert flows.count == 18
    assert len({one.vantage for one in vantage.tunnels()}) == 18
    assert {one.carrier for one in vantage.tunnels()} == {0, 7}
    assert {str(one.tunnel) for one in vantage.tunnels()} >= {
        "erspan2 10.9.0.1>10.9.0.2#2", "erspan1 10.9.0.1>10.9.0.2", "vxlan 10.9.0.9>10.9.0.2#1"}
    named = vantage.tunnels()[0]
    assert vantage.name(named.vantage) == str(named.tunnel)


def test_the_first_declaration_that_fits_counts() -> None:
    vantage = Vantage({"a": ["10.9.0.1>*#5"], "b": ["erspan2 *>*", "eth0"]})
    flows, segments = Flows(64), Segments(vantage=vantage)
    parse(block_of([erspan2(INNER, 5), erspan2(INNER, 6), vxlan(INNER, 5), vxlan(INNER, 6)]), flows, segments)
    groups = [vantage.name(flows.vantage(flow)) for flow in segments.flow[:4].tolist()]
    assert groups == ["a", "b", "a", "vxlan 10.9.0.1>10.9.0.2#6"]
    assert vantage.of_interface("eth0") == vantage.declare("b")
    assert vantage.of_interface("eth1") == 0


def test_a_late_declaration_moves_what_was_seen() -> None:
    vantage = Vantage()
    flows, segments = Flows(64), Segments(vantage=vantage)
    parse(block_of([erspan2(INNER, 1), erspan2(INNER, 2)]), flows, segments)
    assert flows.count == 2
    number = vantage.declare("port", tunnels=[Tunnel(SWITCH, NODE)])
    parse(block_of([erspan2(INNER, 1), erspan2(INNER, 2)]), flows, segments)
    assert flows.count == 3
    assert [flows.vantage(flow) for flow in segments.flow[:2].tolist()] == [number, number]


def test_a_full_table_of_tunnels_pushes_out_the_idle_and_never_mixes() -> None:
    vantage = Vantage(tunnels=8)
    flows, segments = Flows(64), Segments(vantage=vantage)

    def see(*networks: int) -> dict[int, int]:
        rows = parse(block_of([vxlan(INNER, n) for n in networks]), flows, segments)
        return dict(zip(networks, [flows.vantage(f) for f in segments.flow[:rows].tolist()], strict=False))

    first = see(*range(1, 9))
    assert len(set(first.values())) == 8
    assert see(1, 2) == {1: first[1], 2: first[2]}
    see(9)                                         # one of 3..8 goes
    again = see(*range(1, 9))
    assert len(set(again.values())) == 8
    moved = {again[n] for n in again if again[n] != first[n]}
    assert moved and not moved & set(first.values()), "a tunnel that was pushed out comes back as a new group"
    assert again[1] == first[1] and again[2] == first[2], "the longest idle go first"
    assert vantage.evicted == 1 + len(moved)
    see(*range(1, 12))                             # more than fit, all of this block
    assert segments.counts()["tunnel_table_full"] == 3


@pytest.mark.parametrize("text", ["10.9.0.1", "a>b", "gretap 10.9.0.1>10.9.0.2", "10.9.0.1>10.9.0.2#x", ">10.9.0.2"])
def test_a_tunnel_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Tunnel.parse(text)


@pytest.mark.parametrize("tunnel", [Tunnel(), Tunnel(SWITCH), Tunnel("fd00::1", NODE, "vxlan", 12),
                                    Tunnel(kind="mellanox"), Tunnel(id=0)])
def test_a_tunnel_is_what_its_text_says(tunnel: Tunnel) -> None:
    assert Tunnel.parse(str(tunnel)) == tunnel


def test_wrong_settings_are_refused() -> None:
    for options in ({"tunnels": 12}, {"tunnels": 4}, {"depth": -1}, {"vxlan_ports": (0,)}, {"vxlan_ports": (65536,)},
                    {"vxlan_ports": (4789, 4791)}):
        with pytest.raises(ValueError):
            Vantage(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eth0 is in group 'a' already"):
        Vantage({"a": ["eth0"], "b": ["eth0"]})
    with pytest.raises(ValueError, match="name"):
        Vantage({"": ["eth0"]})
    with pytest.raises(ValueError, match="more than 256"):
        Vantage({"a": [f"*>*#{i}" for i in range(257)]})
