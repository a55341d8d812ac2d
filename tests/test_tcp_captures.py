"""Recorded captures against their ground truth.

`EXPECTED.json` is tshark's reading. It is the truth for byte counts and hashes but for three kinds of files, in which
tshark closes up what was not captured or picks one of two copies; what we assert there is said at each of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tcp_frames import chosen

from mirror.block import Block
from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.streams import Stream, StreamRecorder
from mirror.tcp import TcpReassembler

WHOLE = [
    "tcp/tcp_loss_client_view_trex.pcap", "tcp/tcp_highloss_server_view_trex.pcap",
    "tcp/tcp_reorder_client_view_trex.pcap", "tcp/tcp_noloss_same_payload_trex.pcap",
    "tcp/tcp_complete_smb2_suricata.pcap", "tcp/tcp_seqwrap_base_pcapplusplus.pcap",
    "tcp/tcp_seqwrap_real_pcapplusplus.pcap", "tcp/tcp_all_packets_duplicated_zeek.pcap",
    "tcp/bigtcp_ipv4_80k_len0_tcpdump.pcap", "tcp/tcp_ooo_1.7MB_suricata.pcap",
    "tcp/tcp_one_direction_only_suricata.pcap", "tcp/tcp_midstream_missing_syn_zeek.pcap",
    "tcp/tcp_retrans35_zerowin_arkime.pcap", "tcp/tcp_keepalive_smb_zeek.pcap",
    "tunnels/vlan0_priority_tag_http_zeek.pcap", "tunnels/qinq0_http_zeek.pcap",
    "files/pcapng_many_interfaces_pcapplusplus.pcapng", "files/pcap_nanosec_bigendian_pcapplusplus.pcap",
    "files/tso_iplen0_http_zeek_krb.pcapng",
]
TREX = WHOLE[:4]


class Reading:
    """A capture reassembled to its end, in blocks of `frames` frames, each passed through `change`."""

    def __init__(self, path: Path, *, frames: int | None = None, shuffle: int | None = None) -> None:
        flows = Flows()
        self.tcp = TcpReassembler(flows)
        self.recorder = StreamRecorder(flows)
        source = CaptureFileSource([path])
        now = 0
        dice = np.random.default_rng(shuffle)
        while not source.finished:
            block = source.read(0.0)
            if block is None:
                continue
            now = max(now, int(block.ts.max()))
            order = np.arange(len(block))
            if shuffle is not None:
                order = np.concatenate([dice.permutation(part) for part in np.split(order, order[64::64])])
            for part in np.split(order, order[frames::frames] if frames else []):
                self._take(chosen(block, part), now)
            source.release(block)
        source.close()
        self.recorder.feed(self.tcp.flush(now))
        self.counters = self.tcp.counters()

    def _take(self, block: Block, now: int) -> None:
        self.recorder.feed(self.tcp.feed(block, now))

    @property
    def content(self) -> dict[tuple[object, ...], bytes]:
        return {(s.source, s.destination): s.data for s in self.recorder.streams if s.length}


@pytest.fixture(scope="module")
def expected(shared: Path) -> dict[str, dict[str, object]]:
    return json.loads((shared / "captures" / "EXPECTED.json").read_text())


def endpoint(text: str) -> tuple[str, int]:
    host, port = text.rsplit(":", 1)
    return host.strip("[]"), int(port)


def followed(reading: Reading, entry: dict) -> list[tuple[Stream | None, int, str]]:
    """(our stream, tshark's byte count, first digits of tshark's hash) of every stream and direction."""
    rows = []
    for stream in entry["follow"]:
        ends = endpoint(stream["node0"]), endpoint(stream["node1"])
        for node, (source, destination) in (("n0", ends), ("n1", ends[::-1])):
            try:
                ours = reading.recorder.find(source, destination)
            except KeyError:
                ours = None
            rows.append((ours, stream[node + "_bytes"], stream[node + "_sha256"]))
    return rows


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("frames", [None, 3])
def test_complete_captures(shared: Path, expected: dict, name: str, frames: int | None) -> None:
    """Every stream and direction byte for byte, no hole and no conflict, whatever the block size."""
    reading = Reading(shared / "captures" / name, frames=frames)
    rows = followed(reading, expected[name])
    assert len(reading.recorder.streams) == sum(ours is not None for ours, _, _ in rows)
    for ours, size, digest in rows:
        if ours is None:
            assert size == 0, "only a direction without any frame may be missing"
            continue
        assert (ours.length, ours.sha256[:16], ours.complete) == (size, digest, True)
    assert reading.counters["frames"] == expected[name]["packets"]


@pytest.mark.parametrize("name", ["tcp/tcp_keepalive_smb_zeek.pcap", "tcp/tcp_seqwrap_real_pcapplusplus.pcap"])
def test_keep_alive_probes_are_neither_data_nor_duplicates(shared: Path, expected: dict, name: str) -> None:
    """Their one byte is garbage (zero here) at the place of the last byte delivered."""
    reading = Reading(shared / "captures" / name)
    assert reading.counters["probes"] == expected[name]["tcp_analysis"]["keep_alive"]
    assert all(stream.complete for stream in reading.recorder.streams)


def test_trex_files_carry_one_transfer(shared: Path) -> None:
    for name in TREX:
        server = Reading(shared / "captures" / name).recorder.find(("48.0.0.1", 80), ("16.0.0.1", 1025))
        assert (server.length, server.sha256[:16]) == (32768, "c27831ca622691a9")
        assert (server.from_start, server.closed) == (True, "fin")


def test_sequence_wrap_changes_nothing(shared: Path) -> None:
    wrapped, base = (Reading(shared / "captures" / "tcp" / f"tcp_seqwrap_{kind}_pcapplusplus.pcap")
                     for kind in ("real", "base"))
    assert sorted(wrapped.content.values()) == sorted(base.content.values())


def test_one_missing_packet_is_one_hole(shared: Path) -> None:
    """tshark writes a text into the gap, so its hash says nothing; the complete capture of the same transfer does."""
    ends = ("10.3.1.1", 445), ("10.3.1.2", 56746)
    whole = Reading(shared / "captures" / "tcp" / "tcp_complete_smb2_suricata.pcap").recorder.find(*ends)
    reading = Reading(shared / "captures" / "tcp" / "tcp_minus_1_packet_smb2_suricata.pcap")
    broken = reading.recorder.find(*ends)
    assert broken.holes == [(46205, 2896)]
    assert not broken.complete and not broken.conflicts
    assert broken.length == whole.length
    assert broken.data[:46205] == whole.data[:46205]
    assert broken.data[46205 + 2896 :] == whole.data[46205 + 2896 :]
    assert reading.recorder.find(*ends[::-1]).complete
    assert (reading.counters["holes"], reading.counters["hole_bytes"]) == (1, 2896)


def test_frames_cut_by_snaplen_leave_holes(shared: Path, expected: dict) -> None:
    """tshark joins the captured 30 bytes of each frame; in truth each is followed by 1,418 missing ones."""
    name = "tcp/tcp_truncated_snaplen_1MB_zeek.pcap"
    reading = Reading(shared / "captures" / name)
    (empty, _, _), (ours, size, digest) = followed(reading, expected[name])
    assert empty is not None and empty.length == 0
    assert ours is not None
    assert (ours.length, ours.present, len(ours.holes)) == (1_000_000, size, 691)
    assert ours.holes[:-1] == [(1448 * i + 30, 1418) for i in range(690)]
    assert reading.counters["truncated"] == expected[name]["truncated"]
    joined, at = b"", 0
    for offset, length in ours.holes:
        joined, at = joined + ours.data[at:offset], offset + length
    assert hashlib.sha256(joined + ours.data[at:]).hexdigest()[:16] == digest


def test_a_stream_without_its_syn_starts_where_the_syn_ack_says(shared: Path) -> None:
    """The client's SYN is missing, but the SYN-ACK acknowledges it: its stream has a proven start."""
    reading = Reading(shared / "captures" / "tcp" / "tcp_midstream_missing_syn_zeek.pcap")
    assert [(s.length, s.from_start) for s in reading.recorder.streams] == [(9417, True), (98, True)]


def test_a_stream_without_handshake_starts_at_its_first_byte(shared: Path) -> None:
    (stream,) = Reading(shared / "captures" / "tcp" / "bigtcp_ipv4_80k_len0_tcpdump.pcap").recorder.streams
    assert (stream.length, stream.from_start) == (80_000, False)


@pytest.mark.parametrize("name, conflict", [("exact_overlap_conflict", (0, 4)), ("partial_overlap", (1, 3))])
def test_conflicting_copies_are_a_named_range(shared: Path, expected: dict, name: str,
                                              conflict: tuple[int, int]) -> None:
    """Two copies of the same bytes differ. tshark keeps the first one too, but calls it good."""
    path = f"tcp/tcp_{name}_suricata.pcap"
    (ours, size, digest), _ = followed(Reading(shared / "captures" / path), expected[path])
    assert ours is not None
    assert (ours.length, ours.sha256[:16]) == (size, digest)
    assert ours.conflicts == [conflict]
    assert not ours.complete and not ours.holes


@pytest.mark.parametrize("name", [
    "tcp/tcp_complete_smb2_suricata.pcap", "tcp/tcp_ooo_1.7MB_suricata.pcap",
    "tcp/tcp_one_direction_only_suricata.pcap", "tcp/tcp_all_packets_duplicated_zeek.pcap",
    "tcp/tcp_highloss_server_view_trex.pcap", "tcp/tcp_loss_client_view_trex.pcap",
])
@pytest.mark.parametrize("seed", range(3))
def test_order_within_64_frames_does_not_matter(shared: Path, name: str, seed: int) -> None:
    """As several reader threads or rings deliver it: the handshake may come after data, a FIN before.

    (Not with keep-alive probes: seen before the byte that they repeat, nothing tells them from data.)
    """
    straight = Reading(shared / "captures" / name)
    shuffled = Reading(shared / "captures" / name, shuffle=seed)
    assert shuffled.content == straight.content
    for stream in shuffled.recorder.streams:
        assert stream.complete
