"""What `flowcheck inspect` refuses by name, with the remedy, and NCCL over TCP, which it counts."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from replay import block_of
from tcp_frames import SYN, tcp_frame
from test_inspect_nccl_lab import Cluster, SetUp, look, of_wire
from test_nccl_sockets import streams

from flowcheck.inspect.nccl_flows import Flow, Piece, connections
from flowcheck.inspect.nccl_refused import infiniband, of_flows
from flowcheck.inspect.table import table
from flowcheck.lab.nccl_wire import Call
from flowcheck.lab.nccl_wire_setup import Stream
from reconstruct.nccl.heads import MAGIC
from reconstruct.nccl.refusals import REFUSALS
from reconstruct.nccl.schedule import P2P_SLOT


def entries(room: int, places: int, number: int = 24) -> Flow:
    """CTS entries of 2.19 that announce `places` addresses in turn."""
    flow = Flow((0, "b", "a", 2))
    for index in range(number):
        data = np.frombuffer(struct.pack("<QIIIIQ", 0x1000 + index % places * room, room, 7, 1, 0, index + 1), np.uint8)
        flow.pieces.append(Piece(index, 32, 64 * index, 9, None, index, index, data, np.ones(32, bool)))
    return flow


def messages(immediates: list[int], length: int = 512) -> Flow:
    flow = Flow((0, "a", "b", 1))
    flow.pieces = [
        Piece(n, length, 0x1000, 7, imm, n, n, None, None, room=P2P_SLOT) for n, imm in enumerate(immediates)
    ]
    return flow


@pytest.mark.parametrize(("flows", "name"), [
    ([entries(131_000, 8)], "buffer-sizes"),
    ([entries(131_000, 24)], "registered-buffers"),
    ([messages(list(range(20)))], "receiver-matching"),
    ([messages([512] * 20), Flow((0, "b", "a", 2), [Piece(0, 900, 0, 1, None, 0, 0, None, None)])], "net-plugin"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_flows_that_are_refused(flows: list[Flow], name: str) -> None:
    (said,) = of_flows(flows, [])
    assert str(REFUSALS[name]) in said


def test_entries_announce_only_with_numbers_that_rise() -> None:
    data, announced = messages([512] * 20), entries(65536, 8)
    for at, piece in enumerate(data.pieces):
        piece.va = 0x1000 + at % 8 * 65536
    (one,) = connections([data, announced])
    assert (one.sender_rank, one.pairs, one.rooms) == (0, [1], {65536})
    announced.pieces.append(announced.pieces[-1])
    assert not connections([data, announced])


def test_usual_flows_are_not_refused() -> None:
    assert not list(of_flows([entries(65536, 8), messages([512] * 20)], []))


def test_a_reduce_scatter_is_named_with_the_remedy(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(20_000)
    inputs = [np.ones(4 * 40_000, np.float32)] * 4
    cluster._perform(Call("reducescatter", inputs))
    report, _ = look(of_wire(cluster.wire.frames), tmp_path / "a.pcap",
                     job=cluster.job_file(tmp_path / "job.safetensors"))
    text = " ".join(table(report).split())
    assert "1 collectives read" in text and "reduce-scatter" in text
    assert REFUSALS["reduce-scatter"].remedy in text


def test_a_job_whose_data_are_not_in_the_capture(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring")
    report, _ = look(SetUp(cluster).frames, tmp_path / "a.pcap")
    text = " ".join(table(report).split())
    assert "none of its data were captured" in text and REFUSALS["nvls"].remedy in text and "EFA" in text


def test_blocks_of_an_unknown_release(tmp_path: Path) -> None:
    setup = SetUp(Cluster(2, protocol="ll"))
    setup.frames.clear()
    setup.stream(Stream(0, 1, ("192.168.0.2", 9), struct.pack("<QI", MAGIC, 4) + bytes(5000), bytes(4996)))
    report, _ = look(setup.frames, tmp_path / "a.pcap")
    assert "blocks of no known size" in table(report)


def test_tls_and_infiniband(tmp_path: Path) -> None:
    hello = b"\x16\x03\x01\x00\x20\x01" + bytes(31)
    frames = [(1000, tcp_frame(flags=SYN, seq=9)), (2000, tcp_frame(hello, seq=10))]
    assert "encrypted connections" in table(look(frames, tmp_path / "a.pcap")[0])
    block = block_of([(1, bytes(60))])
    assert not infiniband(block)
    block.linktype = 247
    assert infiniband(block)


# NCCL over TCP


def socket_frames(payloads: list[bytes], sockets: int, inline: int, lose: int = -1) -> list[tuple[int, bytes]]:
    """A connection of `sockets` data sockets and the control socket, opened one after another."""
    frames: list[bytes] = []
    ends = [{"sport": 1000 + index, "dport": 2000} for index in range(sockets + 1)]
    for index, end in enumerate(ends):
        hello = struct.pack("<QIB", MAGIC, 3, index)
        frames += [tcp_frame(flags=SYN, seq=99, **end), tcp_frame(hello, seq=100, **end)]
    bodies = streams(payloads, sockets, inline)
    for end, body in zip(ends, bodies, strict=True):
        frames += [tcp_frame(body[at : at + 1400], seq=113 + at, **end) for at in range(0, len(body), 1400)]
    return [(1000 * at, frame) for at, frame in enumerate(frames) if at != lose]


@pytest.mark.parametrize("inline", [0, 128])
def test_nccl_over_tcp_is_counted_and_named(tmp_path: Path, inline: int) -> None:
    payloads = [b"\x11" * size for size in (100, 70_000, 40, 3000)]
    version = "2.27.7" if inline else "2.26.2"
    report, found = look(socket_frames(payloads, 2, inline), tmp_path / "a.pcap", version=version)
    text = " ".join(table(report).split())
    assert "NCCL over TCP from 10.0.0.1 to 10.0.0.2:2000: 2 data sockets, 4 messages, 73140 bytes" in text
    assert "of them not whole" not in text and "nothing tells whose ranks' its connections are" in text
    assert not [line for line in found if line["type"] == "collective"]


def test_a_lost_length_ends_the_count_and_says_why(tmp_path: Path) -> None:
    payloads = [bytes(3000)] * 4
    frames = socket_frames(payloads, 0, 0)
    report, _ = look(frames[:2] + frames[3:], tmp_path / "a.pcap")
    assert "from there on unknown: bytes that hold the length" in " ".join(table(report).split())
