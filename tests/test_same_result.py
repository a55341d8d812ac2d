"""In tunnels, or over several interfaces of one group: however packets come to a capture, they tell the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tunnel_frames import NODE, WRAPPINGS, Frame, block_at, erspan2, frames_of, vxlan

from mirror.flows import Flows
from mirror.frames import Datagrams
from mirror.messages import MessageRecorder
from mirror.roce import QueuePairs, RoceReassembler
from mirror.streams import StreamRecorder
from mirror.tcp import TcpReassembler
from mirror.vantage import Vantage

CAPTURES = [
    *(f"roce/{name}.pcap" for name in (
        "c1_clean_v4_1024", "c2_clean_v4_4096", "c3a_clean_v6ll_1024", "c4b_loss_after_tap_1024",
        "c4c_loss_before_tap_4096", "c5a_reorder_dup_1024", "c6b_psnwrap_loss_1024", "c8a_nccl_ar_4096",
        "c8d_nccl_ar_va0_1024_loss", "c9_rnr_1024", "c10_mixed_ops_1024")),
    *(f"nccl/{name}.pcapng" for name in (
        "allreduce+p2p", "allreduce+partial_p2p_new", "iter_40000_p2p", "iter_40000_p2p_iter10",
        "iter_40000_p2p_iter10_2", "iter_80000", "rdma32")),
    *(f"gloo/{name}.pcap" for name in ("collectives", "nano", "scalar3", "torchrun_2x2")),
    *(f"tcp/tcp_{name}.pcap" for name in (
        "all_packets_duplicated_zeek", "complete_smb2_suricata", "exact_overlap_conflict_suricata",
        "highloss_server_view_trex", "keepalive_smb_zeek", "loss_client_view_trex", "midstream_missing_syn_zeek",
        "minus_1_packet_smb2_suricata", "noloss_same_payload_trex", "one_direction_only_suricata",
        "ooo_1.7MB_suricata", "partial_overlap_suricata", "reorder_client_view_trex", "retrans35_zerowin_arkime",
        "seqwrap_base_pcapplusplus", "seqwrap_real_pcapplusplus", "truncated_snaplen_1MB_zeek")),
]
WRAPS = ("vlan 0", "QinQ", "erspan2", "erspan3", "erspan3 with subheader", "vxlan")
MS = 1_000_000
PLANES = ("eth1", "eth2")

Piece = tuple[str, list[Frame]]
"""Frames of one block, and the interface that they came from."""


def whole_frames(path: Path) -> list[Frame]:
    """Frames as a switch passes them on: what a snaplen cut off is cut off in the frame."""
    return frames_of(path, cut=True)


class Both:
    """Frames through one walk and both transports, to the end."""

    def __init__(self, pieces: Iterable[Piece], vantage: Vantage | None = None) -> None:
        flows = Flows()
        tcp = TcpReassembler(flows, vantage=vantage)
        tcp.segments.datagrams = Datagrams()
        roce = RoceReassembler(QueuePairs(256), check_icrc=True)
        streams, messages = StreamRecorder(flows), MessageRecorder(roce)
        now = 0
        for interface, frames in pieces:
            block = block_at(frames, tcp.segments.vantage.of_interface(interface))
            now = max(now, int(block.ts.max()))
            streams.feed(tcp.feed(block, now))
            messages.feed(roce.take(tcp.segments.datagrams, block.base, now))
        streams.feed(tcp.flush(now))
        messages.feed(roce.flush(now))
        self.streams = sorted((s.source, s.destination, s.from_start, str(s.closed), s.data, tuple(s.holes),
                               tuple(s.conflicts)) for s in streams.streams if s.length)
        self.messages = Counter(
            (m.source, m.destination, m.queue_pair, m.first_psn & 0xFFFFFF, m.opcode, m.va, m.rkey, m.length, m.imm,
             m.headless, m.complete, m.data, tuple(m.holes), tuple(m.conflicts)) for m in messages.messages)
        self.lost = sorted((*roce.flows.endpoint_dst(flow), first & 0xFFFFFF, n) for flow, first, n in messages.lost)
        self.counts = tcp.counters()
        self.roce = roce.counters()
        self.vantages = {roce.flows.vantage(flow) for flow in range(roce.flows.count)}
        self.vantages |= {stream.vantage for stream in streams.streams}

    @property
    def told(self) -> tuple[object, ...]:
        """All that was sent, and all that is missing."""
        return self.streams, self.messages, self.lost


def one_plane(frames: list[Frame], wrap: Callable[[bytes], bytes] = bytes, per_block: int = 64) -> list[Piece]:
    return [("", [(ts, wrap(frame)) for ts, frame in frames[at : at + per_block]])
            for at in range(0, len(frames), per_block)]


@pytest.fixture(scope="module", params=CAPTURES)
def capture(request: pytest.FixtureRequest, shared: Path) -> tuple[list[Frame], Both]:
    frames = whole_frames(shared / "captures" / request.param)
    return frames, Both(one_plane(frames))


@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapped_capture_tells_the_same_as_the_bare_one(capture: tuple[list[Frame], Both], name: str) -> None:
    frames, bare = capture
    assert bare.streams or bare.messages
    wrapped = Both(one_plane(frames, WRAPPINGS[name]))
    assert wrapped.told == bare.told
    assert wrapped.roce == bare.roce
    same = ("tcp", "roce", "other_ip", "non_ip", "malformed", "delivered_bytes", "hole_bytes", "duplicate_bytes",
            "truncated", "cut_by_switch")
    assert {key: wrapped.counts[key] for key in same} == {key: bare.counts[key] for key in same}


def sprayed(frames: list[Frame], seed: int, wraps: dict[str, Callable[[bytes], bytes]] | None = None) -> list[Piece]:
    """Every frame comes over one of two planes: each keeps its own order, has a clock of its own, and is read in turn
    with the other, so that of two frames less than a millisecond apart either may come first."""
    dice = random.Random(seed)
    apart = dice.randrange(MS)
    clocks = {"eth1": dice.randrange(-MS, MS), "eth2": dice.randrange(-MS, MS)}
    pieces: list[Piece] = []
    window: dict[str, list[Frame]] = {plane: [] for plane in PLANES}
    begin = 0

    def read() -> None:
        for plane in dice.sample(PLANES, 2):
            if window[plane]:
                pieces.append((plane, window[plane]))
            window[plane] = []

    for ts, frame in frames:
        if ts - begin >= apart:
            read()
            begin = ts
        plane = dice.choice(PLANES)
        wrap = bytes if wraps is None else wraps[plane]
        window[plane].append((ts + clocks[plane], wrap(frame)))
    read()
    return pieces


@pytest.mark.parametrize("seed", range(3))
def test_packets_sprayed_over_two_planes_tell_the_same_as_one(capture: tuple[list[Frame], Both], seed: int) -> None:
    frames, bare = capture
    vantage = Vantage({"fabric": PLANES})
    pieces = sprayed(frames, seed)
    both = Both(pieces, vantage)
    assert len({plane for plane, _ in pieces}) == 2 or len(frames) < 8
    assert both.vantages == {vantage.declare("fabric")}
    assert both.told == bare.told
    assert both.roce["restarts"] == bare.roce["restarts"]


def test_planes_that_are_tunnels(shared: Path) -> None:
    frames = whole_frames(shared / "captures" / "roce" / "c4b_loss_after_tap_1024.pcap")
    bare = Both(one_plane(frames))
    wraps: dict[str, Callable[[bytes], bytes]] = {
        "eth1": lambda frame: erspan2(frame, 3), "eth2": lambda frame: vxlan(frame, 9, src="10.9.0.3")}
    pieces = [("", block) for _, block in sprayed(frames, 1, wraps)]
    merged = Both(pieces, Vantage({"fabric": [f"*>{NODE}#3", "vxlan 10.9.0.3>*#9"]}))
    assert merged.told == bare.told and len(merged.vantages) == 1
    apart = Both(pieces)
    assert len(apart.vantages) == 2, "each tunnel is a group of its own"
    assert apart.told != bare.told and apart.roce["flows"] == 2 * bare.roce["flows"]
    assert not all(message[10] for message in apart.messages), "half of the packets make no whole message"


@pytest.mark.parametrize("name", ["roce/c5a_reorder_dup_1024.pcap", "roce/c10_mixed_ops_1024.pcap", "gloo/nano.pcap"])
def test_both_planes_show_everything(shared: Path, name: str) -> None:
    """Both sessions of a port, each with every packet: in one group the second copy is a repeat; in two groups there
    are two tenants with the same addresses, and nothing of the one fills a hole of the other."""
    frames = whole_frames(shared / "captures" / name)
    bare = Both(one_plane(frames))
    twice = [(plane, block) for _, block in one_plane(frames) for plane in PLANES]
    merged = Both(twice, Vantage({"fabric": PLANES}))
    assert merged.told == bare.told
    apart = Both(twice, Vantage({"a": ["eth1"], "b": ["eth2"]}))
    assert apart.messages == Counter({message: 2 * n for message, n in bare.messages.items()})
    assert apart.streams == sorted(2 * bare.streams) and len(apart.vantages) == 2
    # Every packet is missing in one of the two: one fabric has it all, two tenants have not.
    dice = random.Random(5)
    half = [(plane, [frame for frame in block if dice.random() < 0.5] or block[:1]) for plane, block in twice]
    other = Both(half, Vantage({"a": ["eth1"], "b": ["eth2"]}))
    assert sum(len(holes) for *_, holes, _ in other.messages) or any(stream[5] for stream in other.streams)
