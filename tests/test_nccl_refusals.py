"""What cannot be read is named with its remedy; packets, settings and log lines that show it, and those that do not."""

from __future__ import annotations

import pytest
from tcp_frames import tcp_frame
from test_nccl_group import group
from test_nccl_guess import sent

from reconstruct.nccl.group import edges
from reconstruct.nccl.refusals import NAMES, REFUSALS, from_choice, from_log, from_network, from_settings
from reconstruct.nccl.schedule import ALLREDUCE, BROADCAST, LL, LL128, RING, SIMPLE
from reconstruct.nccl.split import Collective
from reconstruct.nccl.unreadable import infiniband_frame, reduce_scatter, tls_record


def test_every_refusal_says_what_to_do_and_what_it_costs() -> None:
    asked = {"reduce-scatter", "nvls", "collnet", "pat", "tls", "infiniband", "efa", "registered-buffers", "net-plugin",
             "adaptive-routing", "unknown-version", "rings", "trees", "networks"}  # fmt: skip
    assert asked <= set(REFUSALS)
    for name, refusal in REFUSALS.items():
        assert refusal.name == name and all((refusal.title, refusal.seen, refusal.why, refusal.remedy, refusal.cost))
        assert refusal.remedy in str(refusal) and refusal.cost in str(refusal) and "\n" not in str(refusal)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"NCCL_COLLNET_ENABLE": "1"}, "collnet"),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, "net-plugin"),
        ({"NCCL_NET": "AWS Libfabric"}, "net-plugin"),
        ({"NCCL_TUNER_PLUGIN": "libnccl-tuner.so"}, "tuner"),
        ({"NCCL_IB_OOO_RQ": "1"}, "receiver-matching"),
        ({"NCCL_BUFFSIZE": "8388608"}, "buffer-sizes"),
        ({"NCCL_NTHREADS": "256"}, "buffer-sizes"),
        ({"NCCL_LL128_NTHREADS": "320"}, "buffer-sizes"),
        ({"NCCL_NVLS_CHUNKSIZE": "65536"}, "buffer-sizes"),
    ],
)
def test_settings_that_make_a_job_unreadable(settings: dict[str, str], name: str) -> None:
    ((given, refusal),) = from_settings(settings | {"NCCL_DEBUG": "INFO"})
    assert refusal is REFUSALS[name] and given == "=".join(*settings.items())
    assert set(settings) <= set(NAMES)


def test_settings_that_do_not() -> None:
    assert from_settings({}) == [] == from_settings({"NCCL_NET": "Socket"})
    assert from_settings({"NCCL_COLLNET_ENABLE": "0", "NCCL_NET_PLUGIN": "none", "NCCL_TUNER_PLUGIN": "",
                          "NCCL_IB_OOO_RQ": "0", "NCCL_NTHREADS": "512", "NCCL_BUFFSIZE": "4194304",
                          "NCCL_NET": "IB", "NCCL_ALGO": "Ring"}) == []  # fmt: skip


def test_what_the_log_shows_of_the_network_counts_more_than_settings() -> None:
    settings = {"NCCL_NET_PLUGIN": "aws-ofi", "NCCL_BUFFSIZE": "1"}
    assert [given for given, _ in from_settings(settings, frozenset({"IB"}))] == ["NCCL_BUFFSIZE=1"]
    assert len(from_settings(settings)) == 2


@pytest.mark.parametrize(
    ("network", "name"),
    [("IB", None), ("Socket", None), ("AWS Libfabric", "efa"), ("OFI", "efa"), ("IBext_v8", "net-plugin")],
)
def test_networks(network: str, name: str | None) -> None:
    assert from_network(network) is (None if name is None else REFUSALS[name])


def test_algorithms_that_cannot_be_read() -> None:
    assert from_choice("nvls") is REFUSALS["nvls"] and from_choice("pat") is REFUSALS["pat"]
    assert from_choice("collnetdirect") is from_choice("collnetchain") is REFUSALS["collnet"]
    assert from_choice("ring") is None and from_choice("no such thing") is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>", "infiniband"),
        ("n1:7:9 [0] NCCL INFO TUNER/Plugin: Using tuner plugin nccl_ofi_tuner", "tuner"),
        ("n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>", None),
        ("n1:7:9 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so", None),
        ("n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>", None),
        ("n1:7:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA", None),
        ("n1:7:9 [0] NCCL INFO Using network IB", None),
        ("n1:7:9 [0] NCCL INFO Using network Socket", None),
    ],
)
def test_lines_of_the_log(line: str, name: str | None) -> None:
    assert from_log(line) is (None if name is None else REFUSALS[name])


def lrh(words: int, following: int = 2, rest: bytes = b"") -> bytes:
    return bytes([0x00, 0x20 | following, 0, 4, words >> 8, words & 255, 0, 9]) + rest


def test_an_infiniband_frame_is_no_ethernet_frame() -> None:
    body = bytes(12) + b"x" * 256 + bytes(4)
    assert infiniband_frame(lrh((8 + len(body)) // 4, 2, body + bytes(2)))
    assert infiniband_frame(lrh((48 + len(body)) // 4, 3, b"\x60" + bytes(39) + body + bytes(2)))
    assert not infiniband_frame(lrh((48 + len(body)) // 4, 3, b"\x40" + bytes(39) + body + bytes(2)))
    assert not infiniband_frame(lrh((8 + len(body)) // 4 + 5, 2, body + bytes(2)))
    assert not infiniband_frame(b"") and not infiniband_frame(bytes(8))
    for payload in (b"", b"x" * 100, b"x" * 1400):
        assert not infiniband_frame(tcp_frame(payload))
    assert not infiniband_frame(bytes.fromhex("0002c9a1b2c3e41d2d0102030800") + tcp_frame(b"y" * 64)[14:])


def test_tls_begins_with_a_hello() -> None:
    assert tls_record(bytes([22, 3, 1, 2, 0, 1]) + bytes(40)) and tls_record(bytes([22, 3, 3, 0, 90, 2]))
    for other in (b"", b"\x16\x03\x01", bytes([22, 3, 1, 0, 0, 1]), bytes([23, 3, 3, 0, 90, 1]), b"GET / HTTP/1.1",
                  bytes([22, 3, 9, 2, 0, 1]), bytes([22, 3, 1, 255, 255, 1])):  # fmt: skip
        assert not tls_record(other)


FULL = {LL: [65536], LL128: [614400], SIMPLE: [1048576, 1048576]}
REST = {LL: [1600], LL128: [4096], SIMPLE: [40000, 0]}


@pytest.mark.parametrize("protocol", [LL, LL128, SIMPLE])
def test_reduce_scatters_have_half_the_messages(protocol: int) -> None:
    for ranks in (3, 4, 8):
        loops = (FULL[protocol] * (ranks - 1)) * 2 + REST[protocol] * (ranks - 1)
        assert reduce_scatter(ranks, protocol, loops)
        assert not reduce_scatter(ranks, protocol, loops[:-1])
        assert not reduce_scatter(ranks, protocol, loops + REST[protocol] * (ranks - 1))
        assert not reduce_scatter(ranks, protocol, [])
    assert not reduce_scatter(2, protocol, FULL[protocol] * 2 + REST[protocol])


@pytest.mark.parametrize("protocol", [LL, LL128, SIMPLE])
@pytest.mark.parametrize("count", [1, 5000, 100_000, 3_000_000])
def test_all_reduces_and_broadcasts_are_not_taken_for_them(protocol: int, count: int) -> None:
    for ranks in (3, 4, 5):
        known = group(ranks, 1, 1)
        for edge in edges(known):
            for kind in (ALLREDUCE, BROADCAST):
                lengths = sent(known, Collective(kind, RING, protocol, count, 4), edge)
                assert not reduce_scatter(ranks, protocol, lengths)
