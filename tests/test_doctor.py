"""`flowcheck doctor` on recorded and made traffic: one test for each sentence, and for when it must not be said."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gloo_traffic import Job, port
from test_observe import ends, only, recorded
from tunnel_frames import Frame, block_at, erspan2, erspan3, frames_of, gre, ip4, vlan, vxlan

from flowcheck.doctor.diagnose import diagnose
from flowcheck.doctor.exam import Examination
from flowcheck.doctor.finding import OK, PROBLEM, WARNING, Finding, as_text, healthy
from flowcheck.doctor.seen import Link, Ring, Seen, chunk_counts, gloo_missing
from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire import Call, mirrored
from flowcheck.lab.nccl_wire import frames_of as nccl_frames
from flowcheck.lab.nccl_wire_job import Job as NcclJob
from mirror.block import Block, SourceCounters
from mirror.vantage import Vantage

ROOT = Path(__file__).resolve().parent.parent
NO_COUNTERS = SourceCounters()


def examine(
    frames: list[Frame],
    *,
    change: Callable[[Block], None] = lambda block: None,
    groups: dict[str, list[str]] | None = None,
) -> Seen:
    exam = Examination(1024, (Vantage(groups), Vantage(groups)))
    now = 0
    for start in range(0, len(frames), 500):
        block = block_at(frames[start : start + 500])
        change(block)
        now = max(now, int(block.ts.max()))
        exam.feed(block, now)
    exam.flush(now)
    return exam.seen("FILE", live=False, counters=NO_COUNTERS)


def found(seen: Seen) -> dict[str, Finding]:
    """The last finding of each name."""
    return {finding.name: finding for finding in diagnose(seen)}


def severities(seen: Seen, but: tuple[str, ...] = ()) -> dict[str, str]:
    """What is not OK."""
    return {name: one.severity for name, one in found(seen).items() if one.severity != OK and name not in but}


def gloo_job(world: int = 4, rank: int = 1, **options: int) -> Job:
    """A job joined in the middle: its rendezvous and its connections' beginnings were not seen."""
    job = Job(world, port(world, rank), seed=3, **options)
    job.connect()
    job.frames.clear()
    for tag in range(6):
        job.allreduce({tag: (400_000, 4)})
    return job


def of_job(job: Job, keep: Callable[[object], bool] = lambda frame: True) -> list[Frame]:
    result = []
    for frame in job.frames:
        if keep(frame):
            block = job.block([frame])
            result.append((frame.ts, block.base.tobytes()))
    return result


def nccl(job: NcclJob, ports: list[tuple[Port, str]], size: int = 20_000, calls: int = 3) -> list[Frame]:
    inputs = [np.random.default_rng(rank).random(size, np.float32) for rank in range(job.ranks)]
    made = nccl_frames(job, [Call("allreduce", inputs) for _ in range(calls)])
    return [(ts, data) for ts, _, data in mirrored(made, ports)]


# Healthy


@pytest.mark.parametrize("name", ["nano", "scalar3", "torchrun_2x2"])
def test_a_mirrored_port_of_a_gloo_job_is_healthy(shared: Path, name: str) -> None:
    seen = examine(recorded(shared, name))
    assert severities(seen) == {}
    told = found(seen)
    assert "gloo over TCP" in told["traffic"].sentence and told["loss"].sentence == "No byte is missing."
    chunks = {
        "nano": "of the 4 chunks of an all-reduce, chunks 0, 1 once; chunks 2, 3 more than once",
        "scalar3": "of the 3 chunks of an all-reduce, chunks 0, 1 once; chunk 2 more than once",
        "torchrun_2x2": "of the 4 chunks of an all-reduce, chunks 1, 3 once; chunks 0, 2 more than once",
    }
    assert chunks[name] in told["chunks"].sentence
    assert ("rank 1 -> rank 0, rank 2 -> rank 1" in told["ranks"].sentence) == (name != "torchrun_2x2")
    assert as_text("FILE", diagnose(seen)).startswith("HEALTHY: FILE\n")


def test_a_mirrored_port_of_an_nccl_job_is_healthy(shared: Path) -> None:
    seen = examine(frames_of(shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng"))
    assert severities(seen) == {}
    (ring,) = seen.rings
    assert (ring.library, ring.ranks, ring.chunks, seen.other_links) == ("nccl", 2, [1, 1], 1)
    assert [(link.rank, link.messages, link.bytes) for link in ring.links] == [(0, 45, 840112), (1, 41, 800016)]
    assert "chunks 0, 1 once" in found(seen)["chunks"].sentence
    assert "(from rank 0)" in found(seen)["ranks"].sentence


def test_two_channels_and_adaptive_routing_are_connections_of_their_own(shared: Path) -> None:
    for name in ("allreduce+p2p", "rdma32"):
        seen = examine(frames_of(shared / "captures" / "nccl" / f"{name}.pcapng"))
        assert [sorted(link.bytes for link in ring.links) for ring in seen.rings] == [[16384, 16384, 23616, 23616]]
        assert "2 connections" in found(seen)["ranks"].sentence and severities(seen) == {}


def test_ranks_unknown_both_directions_are_enough() -> None:
    seen = examine(of_job(gloo_job()))
    assert severities(seen) == {}
    (ring,) = seen.rings
    assert (ring.ranks, ring.chunks) == (0, []) and len(ring.links) == 2
    assert "every chunk of a ring passes at least once" in found(seen)["chunks"].sentence
    assert "Ranks of gloo streams are not known" in found(seen)["unknown-ranks"].sentence


@pytest.mark.parametrize(
    ("algorithm", "protocol"), [("ring", "ll"), ("ring", "simple"), ("tree", "ll128"), ("nvlstree", "simple")]
)
@pytest.mark.parametrize(("ranks", "gpus", "version"), [(4, 1, "2.19.4"), (6, 2, "2.28.9"), (4, 1, "2.30.7")])
def test_one_port_of_a_larger_nccl_job(algorithm: str, protocol: str, ranks: int, gpus: int, version: str) -> None:
    job = NcclJob(ranks, gpus, version, algorithm, protocol, channels=2, mtu=4096)
    seen = examine(nccl(job, [(Port(1, 0), "in"), (Port(1, 0), "out")]))
    assert severities(seen) == {}
    assert len(seen.rings) == 1 and not any(link.silent for link in seen.rings[0].links)
    assert "every chunk of a ring passes" in found(seen)["chunks"].sentence
    assert {link.rank for link in seen.rings[0].links} <= set(range(ranks))


# Which chunks pass


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_any_two_links_of_a_ring_show_every_chunk_and_one_lacks_one(world: int) -> None:
    for first in range(world):
        assert sorted(chunk_counts(world, [gloo_missing(world, first)])) == [0] + [1] * (world - 1)
        one = Ring("gloo", "g", (Link("a", "b", first),), world)
        assert not one.whole and one.chunks[(first - 1) % world] == 0
        other = Ring("nccl", "g", (Link("a", "b", first),), world)
        assert not other.whole and other.chunks[(first + 1) % world] == 0
        for second in range(world):
            for library in ("gloo", "nccl"):
                ring = Ring(library, "g", (Link("a", "b", first), Link("b", "c", second)), world)
                assert ring.whole == (first != second)


def test_one_direction_of_a_gloo_port_lacks_a_chunk(shared: Path) -> None:
    seen = examine(only(recorded(shared, "nano"), lambda s, d: s == "10.77.0.3"))
    assert severities(seen) == {"chunks": PROBLEM, "one-direction": PROBLEM}
    told = found(seen)
    assert "chunk 1 never; chunks 0, 2, 3 once" in told["chunks"].sentence
    assert "rank 2 sends to rank 1" in told["one-direction"].sentence
    assert "flowcheck switch-config VENDOR --source PORT:both" in told["one-direction"].remedy


def test_one_direction_without_ranks() -> None:
    seen = examine(of_job(gloo_job(), lambda frame: frame.link[0] == 1))
    assert severities(seen) == {"chunks": PROBLEM, "one-direction": PROBLEM}
    assert "10.0.0.2 sends to 10.0.0.1" in found(seen)["one-direction"].sentence
    assert "one chunk of each loop never passes" in found(seen)["chunks"].sentence


def test_one_direction_of_an_nccl_port_tells_what_was_announced(shared: Path) -> None:
    seen = examine(frames_of(shared / "captures" / "nccl" / "iter_40000_p2p_iter10.pcapng"))
    assert severities(seen) == {"chunks": PROBLEM, "one-direction": PROBLEM}
    sentence = found(seen)["one-direction"].sentence
    here, there = "fe80::e42:a1ff:fe9f:58f8", "fe80::ac0:ebff:fe8c:282d"
    assert f"{here} sends to {there}" in sentence
    assert f"data from {there} to {here} are announced and never come" in sentence


def test_one_direction_of_a_ring_of_four_is_not_enough() -> None:
    seen = examine(nccl(NcclJob(4, algorithm="ring", protocol="ll", channels=2), [(Port(1, 0), "out")]))
    assert severities(seen) == {"chunks": PROBLEM, "one-direction": PROBLEM}


@pytest.mark.parametrize("algorithm", ["tree", "nvlstree"])
def test_one_direction_of_a_tree_may_be_enough(algorithm: str) -> None:
    job = NcclJob(5, algorithm=algorithm, protocol="simple", channels=2, version="2.20.5")
    seen = examine(nccl(job, [(Port(2, 0), "out")]))
    assert severities(seen) == {"chunks": WARNING}
    assert "looks like a tree" in found(seen)["chunks"].sentence


def test_two_groups_one_of_them_half_mirrored(shared: Path) -> None:
    job = gloo_job()
    half = Job(3, [(0, 2)], seed=9, base_port=46000)
    half.connect()
    half.frames.clear()
    half.allreduce({0: (40_000, 4)})
    there = [(ts, data[:26] + b"\x0a\x01" + data[28:30] + b"\x0a\x01" + data[32:]) for ts, data in of_job(half)]
    seen = examine(of_job(job) + there)
    assert sorted(ring.whole for ring in seen.rings) == [False, True]
    assert severities(seen) == {"chunks": PROBLEM, "one-direction": PROBLEM}


def test_a_group_elsewhere_is_a_problem_only_where_it_is_the_only_one() -> None:
    elsewhere = Ring("gloo", "h", (), 4)
    here = Ring("gloo", "g", (Link("rank 1", "rank 0", 1), Link("rank 0", "rank 1", 0)), 2)
    assert severities(Seen("FILE", False, frames=1, rings=(here, elsewhere))) == {"chunks": WARNING}
    assert severities(Seen("FILE", False, frames=1, rings=(elsewhere,))) == {"chunks": PROBLEM}


# Not the training network


def test_the_wrong_interface_says_what_comes_instead(shared: Path) -> None:
    seen = examine(frames_of(shared / "captures" / "tcp" / "tcp_complete_smb2_suricata.pcap"))
    assert severities(seen) == {"wrong-interface": PROBLEM}
    sentence = found(seen)["wrong-interface"].sentence
    assert "767 x SMB" in sentence and "8 x ARP" in sentence
    assert "ip -br link" in found(seen)["wrong-interface"].remedy


def test_no_frame_at_all() -> None:
    assert severities(Seen("eth9", live=True)) == {"no-frames": PROBLEM}
    assert "No frame arrived on eth9" in found(Seen("eth9", live=True))["no-frames"].sentence


def test_acknowledgments_alone_are_no_training_traffic(shared: Path) -> None:
    frames = [f for f in frames_of(shared / "captures" / "roce" / "c1_clean_v4_1024.pcap")
              if f[1][36:38] == b"\x12\xb7" and f[1][42] == 17]
    seen = examine(frames)
    assert severities(seen) == {"no-collectives": PROBLEM}
    assert f"of {len(frames)} packets {len(frames)} are acknowledgments" in found(seen)["no-collectives"].sentence


def test_tls_is_named() -> None:
    job = Job(2, port(2, 0), seed=1)
    job.connect()
    job.send((1, 0), b"\x16\x03\x01\x02\x00\x01" + bytes(600))
    job.send((0, 1), b"\x16\x03\x03\x00\x7a\x02" + bytes(600))
    seen = examine(of_job(job))
    assert severities(seen) == {"tls": PROBLEM}
    assert "GLOO_DEVICE_TRANSPORT" in found(seen)["tls"].remedy


def test_nccl_over_sockets_is_named() -> None:
    job = Job(2, port(2, 0), seed=1)
    job._flags((1, 0), 0x02)
    job.send((1, 0), struct.pack("<QI", 0x564AB9F2FC4B9D6C, 3) + b"\0")
    seen = examine(of_job(job))
    assert seen.nccl_sockets == 1 and "NCCL over TCP sockets" in found(seen)["traffic"].sentence


# Wrapped, cut, copied


@pytest.mark.parametrize(
    ("wrap", "name", "words"),
    [
        (lambda f: vlan(f, 7), "vlan", "331 of 331 frames carry a VLAN tag"),
        (lambda f: vlan(f, 7, 9), "qinq", "several VLAN tags"),
        (erspan2, "encapsulation", "331 of 331 frames come in a tunnel of kind erspan2"),
        (erspan3, "encapsulation", "kind erspan3"),
        (vxlan, "encapsulation", "kind vxlan"),
    ],
)
def test_tags_and_tunnels_are_named(shared: Path, wrap: Callable[[bytes], bytes], name: str, words: str) -> None:
    seen = examine([(ts, wrap(frame)) for ts, frame in recorded(shared, "nano")])
    assert severities(seen) == {}
    assert words in found(seen)[name].sentence
    assert "of the 4 chunks" in found(seen)["chunks"].sentence


def test_two_tunnels_must_be_declared(shared: Path) -> None:
    frames = []
    for ts, frame in recorded(shared, "nano"):
        way = ends((ts, frame))
        frames.append((ts, erspan2(frame, 1 if way is None or way[0] == "10.77.0.2" else 2)))
    told = found(examine(frames))
    assert told["tunnels"].severity == WARNING
    assert "--vantage 'fabric=erspan2 10.9.0.1>10.9.0.2#" in told["tunnels"].remedy
    seen = examine(frames, groups={"fabric": ["erspan2 10.9.0.1>10.9.0.2"]})
    assert severities(seen) == {} and "chunks 0, 1 once" in found(seen)["chunks"].sentence


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda f: gre(f, 0x1234), "gre protocol 0x1234"),
        (lambda f: f[:12] + b"\x89\x15" + f[14:], "ethertype 0x8915 (RoCE v1, without IP)"),
        (lambda f: vxlan(f, port=6081), "udp port 6081 (GENEVE)"),
        (lambda f: vxlan(f, port=8472), "udp port 8472 (VXLAN on port 8472)"),
        (lambda f: erspan2(f[:12] + b"\x88\x47" + f[12:]), "inner ethertype 0x8847 (MPLS)"),
    ],
)
def test_an_encapsulation_that_is_not_read_is_named(shared: Path, wrap: Callable[[bytes], bytes], words: str) -> None:
    frames = recorded(shared, "nano")
    odd = [(ts, wrap(frame)) for ts, frame in frames]
    assert words in found(examine(odd))["unknown-encapsulation"].sentence
    # Half of the traffic hidden in it, the rest plain; and a handful of strange frames, which are nothing to tell.
    assert words in found(examine(frames + odd[:100]))["unknown-encapsulation"].sentence
    assert "unknown-encapsulation" not in found(examine(frames + odd[:5]))


def test_harmless_frames_of_every_network_are_not_told(shared: Path) -> None:
    noise = [(ts, bytes(12) + kind + bytes(46)) for ts, _ in recorded(shared, "nano")[:60]
             for kind in (b"\x08\x06", b"\x88\xcc", b"\x00\x26", b"\x88\xf7")]
    assert severities(examine(recorded(shared, "nano") + noise)) == {}


def test_a_session_that_mirrors_its_own_copies(shared: Path) -> None:
    deep = [(ts, erspan2(erspan2(erspan2(erspan2(erspan2(frame)))))) for ts, frame in recorded(shared, "nano")[:20]]
    assert found(examine(recorded(shared, "nano") + deep))["too-deep"].severity == PROBLEM


def test_a_snapshot_length_is_told(shared: Path) -> None:
    def snap(block: Block) -> None:
        block.caplen = np.minimum(block.caplen, 96)

    seen = examine(recorded(shared, "nano"), change=snap)
    assert severities(seen)["truncated-by-capture"] == PROBLEM
    assert "it kept 96 bytes at most" in found(seen)["truncated-by-capture"].sentence
    assert "tcpdump -s 0" in found(seen)["truncated-by-capture"].remedy
    assert "truncated-by-switch" not in found(seen) and "loss" not in found(seen)


def test_a_switch_that_cuts_is_told(shared: Path) -> None:
    frames = [(ts, frame[:90]) for ts, frame in recorded(shared, "nano")]
    for changed in (frames, [(ts, erspan2(frame)) for ts, frame in frames]):
        seen = examine(changed)
        assert severities(seen)["truncated-by-switch"] == PROBLEM
        assert "truncated-by-capture" not in found(seen)
        assert "truncate_size 0" in found(seen)["truncated-by-switch"].remedy


def test_cut_roce_is_not_called_the_wrong_interface(shared: Path) -> None:
    frames = frames_of(shared / "captures" / "nccl" / "iter_40000_p2p.pcapng")
    seen = examine([(ts, frame[:100]) for ts, frame in frames])
    assert severities(seen) == {"truncated-by-switch": PROBLEM, "traffic": WARNING}


def test_every_packet_twice_is_told(shared: Path) -> None:
    for name in ("nano", "torchrun_2x2"):
        frames = recorded(shared, name)
        # The second copy has passed a router: another tag and time to live, and so another checksum.
        again = [(ts + 20_000, vlan(f[:22] + bytes([f[22] - 1]) + f[23:24] + b"\0\0" + f[26:], 7)) for ts, f in frames
                 if ends((ts, f))]
        seen = examine(sorted(frames + again))
        assert severities(seen) == {"duplicates": WARNING}
        assert f"{seen.counted // 2} of {seen.counted} frames with data came twice" in as_text("", diagnose(seen))
        assert healthy(diagnose(seen))


def test_recorded_at_every_port_each_packet_comes_twice(shared: Path) -> None:
    seen = examine(recorded(shared, "collectives"))
    assert severities(seen) == {"duplicates": WARNING} and seen.copies * 2 == seen.counted


def test_twice_mirrored_roce(shared: Path) -> None:
    frames = frames_of(shared / "captures" / "nccl" / "iter_40000_p2p_iter10.pcapng")
    seen = examine(sorted(frames + [(ts + 5_000, frame) for ts, frame in frames]))
    assert severities(seen, but=("chunks", "one-direction")) == {"duplicates": WARNING}
    assert (seen.copies, seen.alike * 2) == (0, seen.counted)  # over IPv6 a retry would look the same


@pytest.mark.parametrize("name", ["c4b_loss_after_tap_1024", "c8d_nccl_ar_va0_1024_loss", "c9_rnr_1024"])
def test_retries_of_a_sender_are_no_copies(shared: Path, name: str) -> None:
    seen = examine(frames_of(shared / "captures" / "roce" / f"{name}.pcap"))
    assert "duplicates" not in found(seen) and seen.roce > 1000


def test_retransmissions_are_no_copies(shared: Path) -> None:
    seen = examine(frames_of(shared / "captures" / "tcp" / "tcp_highloss_server_view_trex.pcap"))
    assert "duplicates" not in found(seen) and seen.counted > 20


# Missing


def test_full_sized_tcp_frames_missing_is_the_mtu() -> None:
    for mss, limit in ((8948, 1514), (1448, 1400)):
        frames = [f for f in of_job(gloo_job(mss=mss)) if len(f[1]) <= limit]
        seen = examine(frames)
        assert severities(seen) == {"mtu": PROBLEM}
        assert f"the longest frame here has {seen.longest} bytes" in found(seen)["mtu"].sentence
        assert seen.longest <= limit and "mtu 9216" in found(seen)["mtu"].remedy


@pytest.mark.parametrize("limit", [1514, 3000])
def test_full_sized_roce_packets_missing_is_the_mtu(shared: Path, limit: int) -> None:
    whole = frames_of(shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng")
    seen = examine([frame for frame in whole if len(frame[1]) <= limit])
    assert severities(seen, but=("chunks", "one-direction")) == {"mtu": PROBLEM}
    assert seen.longest <= limit


def test_tails_of_roce_messages_alone_are_the_mtu(shared: Path) -> None:
    whole = frames_of(shared / "captures" / "roce" / "c2_clean_v4_4096.pcap")
    seen = examine([frame for frame in whole if len(frame[1]) <= 4000])
    assert severities(seen, but=("no-collectives",)).pop("mtu") == PROBLEM
    assert "RoCE messages show their last packet and none of those before" in found(seen)["mtu"].sentence


def test_lost_small_roce_messages_are_not_called_an_mtu() -> None:
    frames = nccl(NcclJob(2, protocol="ll", algorithm="ring"), [(Port(0, 0), "in"), (Port(0, 0), "out")], 40, 300)
    rng = random.Random(5)
    seen = examine([frame for frame in frames if rng.random() > 0.05])
    assert seen.roce_full == 0 and seen.roce_lost > 20
    assert severities(seen) == {"loss": PROBLEM}


def test_random_loss_is_not_called_an_mtu() -> None:
    for seed in range(4):
        rng = random.Random(seed)
        frames = of_job(gloo_job(mss=1448))
        seen = examine([frame for frame in frames if rng.random() > 0.02])
        assert severities(seen) == {"loss": PROBLEM}
        assert "ethtool -S" in found(seen)["loss"].remedy and seen.tcp_hole_bytes > 0
        # In bursts, too: holes of several segments are longer than any segment.
        start = rng.randrange(100, 300)
        seen = examine(frames[:start] + frames[start + 60 : start + 300] + frames[start + 360 :])
        assert severities(seen) == {"loss": PROBLEM}


@pytest.mark.parametrize(
    ("other", "name"),
    [({}, "mtu"), ({"tcp_holes": 2, "tcp_long_holes": 2}, "loss"), ({"tcp_long_holes": 5}, "loss"),
     ({"tcp_hole_bytes": 30_000}, "loss"), ({"tcp_segments": 11}, "loss")],
)  # fmt: skip
def test_each_sign_of_an_mtu_is_needed(other: dict[str, int], name: str) -> None:
    figures = {"tcp_holes": 10, "tcp_long_holes": 10, "tcp_hole_bytes": 90_000, "tcp_bytes": 40_000,
               "tcp_segments": 100, "tcp_largest": 816}  # fmt: skip
    assert severities(Seen("FILE", False, frames=500, tls=1, **{**figures, **other}), ("tls",)) == {name: PROBLEM}


def test_lost_roce_packets_are_counted(shared: Path) -> None:
    seen = examine(frames_of(shared / "captures" / "nccl" / "iter_80000.pcapng"))
    assert severities(seen) == {"loss": PROBLEM}
    assert "RoCE: 17 packets, 28.8 kB" in found(seen)["loss"].sentence


def test_losses_before_the_tap_are_none(shared: Path) -> None:
    for name in ("c4b_loss_after_tap_1024", "c4c_loss_before_tap_4096", "c9_rnr_1024"):
        assert found(examine(frames_of(shared / "captures" / "roce" / f"{name}.pcap")))["loss"].severity == OK


def test_holes_in_the_streams_of_others_do_not_count(shared: Path) -> None:
    lossy = frames_of(shared / "captures" / "tcp" / "tcp_minus_1_packet_smb2_suricata.pcap")
    assert found(examine(lossy))["loss"].severity == PROBLEM
    assert severities(examine(recorded(shared, "nano") + lossy)) == {}


def test_missing_links_are_not_called_one_direction_where_both_pass() -> None:
    links = (Link("a", "b"), Link("a", "b"), Link("b", "a"))
    assert severities(Seen("FILE", False, frames=1, rings=(Ring("nccl", "a - b", links),))) == {"chunks": PROBLEM}


def test_links_cannot_be_judged_while_full_sized_frames_are_missing() -> None:
    ring = Ring("nccl", "a - b", (Link("a", "b", 0, silent=True), Link("b", "a", 1, silent=True)), 2)
    assert severities(Seen("FILE", False, frames=1, rings=(ring,), roce_tails=9)) == {"mtu": PROBLEM, "chunks": WARNING}
    assert severities(Seen("FILE", False, frames=1, rings=(ring,))) == {"chunks": PROBLEM}


def test_a_sampling_session_is_told() -> None:
    job = gloo_job(mss=1448)
    seen = examine([frame for number, frame in enumerate(of_job(job)) if number % 20 == 0])
    assert severities(seen, but=("chunks", "one-direction", "wrong-interface")) == {"sampling": PROBLEM}
    assert "sample_rate 0" in found(seen)["sampling"].remedy


def test_drops_of_kernel_and_interface_are_told_apart(shared: Path) -> None:
    seen = examine(recorded(shared, "nano"))
    seen.live, seen.kernel_drops, seen.interface_drops = True, 7, 9
    told = found(seen)
    assert "no room for 7 frames" in told["kernel-drops"].sentence and "--ring-mib" in told["kernel-drops"].remedy
    assert "dropped 9 frames" in told["interface-drops"].sentence and "ethtool -G" in told["interface-drops"].remedy


def test_fragments_of_copies_that_lack_their_other_half_are_told(shared: Path) -> None:
    odd = [(ts, ip4(bytes(1000), 47, place=0x2000, identification=n)) for n, (ts, _) in
           enumerate(recorded(shared, "nano")[:30])]
    assert found(examine(recorded(shared, "nano") + odd))["fragments"].severity == PROBLEM


def test_merged_frames_are_told() -> None:
    seen = examine(of_job(gloo_job(mss=60_000)))
    assert severities(seen) == {"merged-frames": WARNING}
    assert "gro off lro off" in found(seen)["merged-frames"].remedy


# The command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from flowcheck.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, "doctor", *arguments], capture_output=True, text=True,
                          timeout=240, cwd=ROOT, check=False)


def test_command_on_files(shared: Path) -> None:
    good, bad = shared / "captures/gloo/nano.pcap", shared / "captures/nccl/iter_80000.pcapng"
    done = command("-r", str(good))
    assert done.returncode == 0 and done.stdout.startswith(f"HEALTHY: {good}"), done.stderr
    done = command("-r", str(bad), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["healthy"] is False and report["source"] == str(bad)
    loss = next(one for one in report["findings"] if one["name"] == "loss")
    assert loss["severity"] == PROBLEM and loss["remedy"] and "17 packets" in loss["sentence"]
    assert report["figures"]["roce_lost"] == 17 and report["figures"]["interface"] is None


def test_command_without_or_with_both_sources_is_refused() -> None:
    for arguments in ((), ("-i", "lo", "-r", "x.pcap")):
        done = command(*arguments)
        assert done.returncode == 2 and "give either -i IFACE" in done.stderr
