"""`flowcheck inspect` on made-up NCCL traffic over TCP: the collectives are named as over RoCE, with the cluster's own
values, or not at all."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_setup_frames import Wire, streams
from tcp_frames import SYN, tcp_frame
from test_inspect_nccl_lab import COUNTS, Cluster, Told, check, look, names, of_wire

from flowcheck.errors import UsageError
from flowcheck.inspect.nccl_flags import Flags, flags
from flowcheck.inspect.table import WIDTH, table
from flowcheck.lab.nccl_wire import Call
from flowcheck.lab.nccl_wire_setup import NET_IB
from reconstruct.nccl.schedule import LL, LL128

Frames = list[tuple[int, bytes]]


def set_up(cluster: Cluster) -> Frames:
    """The communicator's set-up: NET/Socket connections are made in no other way than NET/IB's, but without blocks."""
    wire: Any = cluster.wire
    made = streams(wire.communicator, accepts=lambda one: wire.listener(one.channel, one.sender, one.receiver))
    return Wire().all([one for one in made if one.there[8] != NET_IB]).frames


def words(report: Any) -> str:
    text = table(report)
    assert text.isascii() and max(map(len, text.splitlines())) <= WIDTH
    return " ".join(text.split())


def collectives(found: list[Told]) -> list[Told]:
    return [line for line in found if line["type"] == "collective"]


CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"algorithm": "ring", "protocol": "ll", "version": "2.23.4"}),
    (4, {"algorithm": "ring", "protocol": "ll", "version": "2.23.4", "sockets": 2}),
    (4, {"algorithm": "ring", "protocol": "simple", "version": "2.21.5", "channels": 2}),
    (4, {"algorithm": "ring", "protocol": "simple", "version": "2.27.7", "channels": 2, "sockets": 3}),
    (4, {"algorithm": "ring", "protocol": "ll128", "version": "2.27.7", "gpus_per_node": 2, "channels": 2}),
    (4, {"algorithm": "tree", "protocol": "ll", "version": "2.23.4", "channels": 2}),
    (4, {"algorithm": "tree", "protocol": "simple", "version": "2.27.7", "channels": 2, "sockets": 1}),
    (4, {"algorithm": "tree", "protocol": "ll128", "version": "2.21.5", "channels": 2}),
]


def cluster_of(world: int, options: dict[str, Any]) -> Cluster:
    return Cluster(world, **{"sockets": 0, **options})


@pytest.mark.parametrize(("world", "options"), CASES, ids=names(CASES))
def test_the_set_up_alone_tells_everything(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    protocol = options["protocol"]
    cluster = cluster_of(world, options).reduce(*COUNTS[protocol], *COUNTS[protocol])
    report, found = look(set_up(cluster) + of_wire(cluster.wire.frames), tmp_path / "a.pcap", dtype="fp32")
    text = words(report)
    assert check(found, cluster.results, whole=protocol != "ll128") >= {0, 1, 2, 3, 4}, text
    told = {(line["library"], line["kind"], line["algorithm"], line["protocol"]) for line in collectives(found)}
    assert told == {("nccl", "allreduce", options["algorithm"], protocol)}
    assert {line["channel"] for line in collectives(found)} == set(range(options.get("channels", 1)))
    if protocol != "ll128":
        sizes = {line["ordinal"]: (line["bytes"], line["elements"], line["dtype"]) for line in collectives(found)}
        assert all(sizes[at] == (4 * n, n, "float32") for at, n in enumerate(COUNTS[protocol]))
    release = ".".join(options["version"].split(".")[:2])
    assert f"{world} ranks, channels: {options.get('channels', 1)}" in text and f"NCCL {release}" in text
    assert f"{options.get('sockets', 0)} data sockets" in text


@pytest.mark.parametrize(("world", "options"), CASES, ids=names(CASES))
def test_the_job_file_tells_it_without_the_set_up(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    protocol = options["protocol"]
    cluster = cluster_of(world, options).reduce(*COUNTS[protocol], *COUNTS[protocol])
    job = cluster.job_file(tmp_path / "job.safetensors")
    report, found = look(of_wire(cluster.wire.frames), tmp_path / "a.pcap", job=job, dtype="fp32")
    assert check(found, cluster.results, whole=protocol != "ll128") >= {0, 1, 2, 3, 4}, words(report)
    whole = look(set_up(cluster) + of_wire(cluster.wire.frames), tmp_path / "b.pcap", job=job, dtype="fp32")[1]
    assert collectives(whole) == collectives(found)


@pytest.mark.parametrize("sockets", [0, 2])
def test_the_same_lines_as_over_roce(tmp_path: Path, sockets: int) -> None:
    options: dict[str, Any] = {"algorithm": "ring", "protocol": "ll", "version": "2.27.7", "channels": 2}
    tcp, roce = Cluster(4, sockets=sockets, **options), Cluster(4, **options)
    told = []
    for cluster in (tcp, roce):
        cluster.copies(80_000).reduce(*COUNTS["ll"])
        job = cluster.job_file(tmp_path / "job.safetensors")
        told.append(collectives(look(of_wire(cluster.wire.frames), tmp_path / "a.pcap", job=job, dtype="fp32")[1]))
    assert told[0] == told[1] and {line["kind"] for line in told[0]} == {"allgather", "broadcast", "allreduce"}


# Protocols


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_flags_inside_the_messages_tell_the_protocol(tmp_path: Path, protocol: str) -> None:
    """The set-up names none, and there are no announcements. The copy is of several messages."""
    cluster = Cluster(4, 0, algorithm="ring", protocol=protocol, version="2.23.4")
    cluster.copies(1_300_000 if protocol == "ll128" else 80_000).reduce(*COUNTS[protocol])
    found = look(set_up(cluster) + of_wire(cluster.wire.frames), tmp_path / "a.pcap")[1]
    assert check(found, cluster.results, whole=protocol != "ll128") == {2, 3, 4}
    assert {line["protocol"] for line in collectives(found)} == {protocol}


def test_a_small_copy_may_be_of_two_protocols_and_the_next_collective_is_read(tmp_path: Path) -> None:
    cluster = Cluster(2, 0, algorithm="ring", protocol="ll", version="2.23.4")
    cluster._perform(Call("broadcast", [np.arange(6, dtype=np.int32)] * 2))
    cluster.results.append(None)
    cluster.reduce(5000, 120_000)
    found = look(set_up(cluster) + of_wire(cluster.wire.frames), tmp_path / "a.pcap")[1]
    assert check(found, cluster.results) == {1, 2}
    (line,) = [line for line in collectives(found) if line["ordinal"] == 0]
    assert (line["kind"], line["protocol"], line["bytes"], line["final"]) == ("broadcast", None, None, [])


@pytest.mark.parametrize("protocol", ["simple", "ll"])
def test_data_that_look_like_flags_are_claimed_as_nothing(tmp_path: Path, protocol: str) -> None:
    """Simple's data, in which every other word is the number of the step that LL would be at; and LL's, just so."""
    cluster = Cluster(2, 0, algorithm="ring", protocol=protocol, version="2.23.4")
    values = np.stack([np.arange(64), np.ones(64)], 1).astype(np.int32).ravel()
    cluster._perform(Call("broadcast", [values] * 2))
    cluster.results.append(None)
    cluster.reduce(120_000, 5000)
    found = look(set_up(cluster) + of_wire(cluster.wire.frames), tmp_path / "a.pcap")[1]
    assert check(found, cluster.results) == {1, 2}
    (line,) = [line for line in collectives(found) if line["ordinal"] == 0]
    assert (line["kind"], line["protocol"], line["bytes"], line["final"]) == ("broadcast", None, None, [])


def test_lines_of_flags() -> None:
    def of(values: list[int], protocol: int, kind: str = "<u4", lost: slice = slice(0)) -> Flags | None:
        data = np.frombuffer(np.array(values, kind).tobytes(), np.uint8)
        known = np.ones(data.size, bool)
        known[lost] = False
        return flags(protocol, data, known)

    lines = [word for line in range(8) for word in (line, 7, 2 * line, 7)]
    assert of(lines, LL) == Flags(7, 8, True) and of([*lines[:-1], 8], LL) is None and of(lines[:-1], LL) is None
    assert of([*lines[:-1], 8], LL, lost=slice(127, 128)) == Flags(7, 7, True)
    assert of([7] * 32, LL) == Flags(7, 8, False) and of([], LL) == Flags()
    wide = [word for line in range(16) for word in (*range(15), 9)]
    assert of(wide, LL128, "<u8") == Flags(9, 16, True) and of([*wide[:-1], 8], LL128, "<u8") is None
    told = Flags(7, 8, True)
    assert told.looks(7) and told.looks(3) and not Flags(7, 7, True).looks(7) and not Flags(7, 8, False).looks(7)
    assert Flags(0x3F800000, 8, True).looks(0x3F800000) and not Flags(0x3F800000, 8, True).looks(9)


# Loss


def data_frames(frames: Frames, source: str) -> list[int]:
    """Full segments that a host sends, by number."""
    own = bytes(map(int, source.split(".")))
    return [at for at, (_, frame) in enumerate(frames) if frame[26:30] == own and len(frame) > 1400]


@pytest.mark.parametrize("protocol", ["ll", "simple"])
@pytest.mark.parametrize("sockets", [0, 2])
def test_a_lost_span_is_a_hole_in_its_values_alone(tmp_path: Path, protocol: str, sockets: int) -> None:
    cluster = Cluster(4, sockets, algorithm="ring", protocol=protocol, version="2.27.7").reduce(30_000, 50_000, 20_000)
    frames = of_wire(cluster.wire.frames)
    job = cluster.job_file(tmp_path / "job.safetensors")
    whole = collectives(look(frames, tmp_path / "b.pcap", job=job)[1])
    own = data_frames(frames, "10.77.0.2")
    changed = 0
    for at in own[3 :: len(own) // 6]:
        report, found = look(frames[:at] + frames[at + 1 :], tmp_path / "a.pcap", job=job)
        told = check(found, cluster.results, whole=False)
        text = words(report)
        assert told == {0, 1, 2} or "nothing proves what they were" in text or "the capture ends in" in text, text
        assert "missing, and why" in text
        changed += [line for line in whole if line not in found] != []
    assert changed


def test_a_lost_handshake_makes_times_late_and_no_wrong_reading(tmp_path: Path) -> None:
    """What comes before a stream is known to begin is told late, though it has no hole, and its connection is found
    late: only the set-up tells its channel then."""
    cluster = Cluster(4, 0, **CASES[2][1]).reduce(*COUNTS["simple"], 5000)
    frames = of_wire(cluster.wire.frames)
    job = cluster.job_file(tmp_path / "job.safetensors")
    opening = [at for at, (_, frame) in enumerate(frames) if frame[47] & SYN]
    assert len(opening) == 8
    for at in opening:
        left = frames[:at] + frames[at + 1 :]
        report, found = look(left, tmp_path / "a.pcap", job=job, dtype="fp32")
        assert not collectives(found) and "does not tell which connection is on which channel" in words(report)
        found = look(set_up(cluster) + left, tmp_path / "b.pcap", job=job, dtype="fp32")[1]
        assert check(found, cluster.results, whole=False) >= {0, 1, 2}


def test_behind_a_lost_length_the_other_connections_go_on(tmp_path: Path) -> None:
    """With data sockets a lost length ends the framing of its connection; the ring's others show the collectives."""
    cluster = Cluster(4, 2, algorithm="ring", protocol="ll", version="2.27.7").reduce(30_000, 50_000, 20_000, 40_000)
    frames = of_wire(cluster.wire.frames)
    job = cluster.job_file(tmp_path / "job.safetensors")
    lengths = [at for at, (_, frame) in enumerate(frames) if frame[26:30] == bytes((10, 77, 0, 2)) and len(frame) == 58]
    lost = lengths[len(lengths) // 2]
    report, found = look(frames[:lost] + frames[lost + 1 :], tmp_path / "a.pcap", job=job)
    text = words(report)
    assert check(found, cluster.results, whole=False) == {0, 1, 2, 3}, text
    last = {line["sender_rank"]: line["final"] for line in collectives(found) if line["ordinal"] == 3}
    assert set(last) == {0, 1, 2, 3} and last[1] == [] and last[0] and last[2] and last[3]
    assert "from there on unknown: bytes that hold the length of a message were not captured" in text


def test_where_all_connections_end_nothing_more_is_claimed(tmp_path: Path) -> None:
    cluster = Cluster(2, 2, algorithm="ring", protocol="ll", version="2.27.7").reduce(*[100_000] * 4)
    frames = of_wire(cluster.wire.frames)
    job = cluster.job_file(tmp_path / "job.safetensors")
    lengths = [at for at, (_, frame) in enumerate(frames) if len(frame) == 58]
    gone = set(lengths[len(lengths) // 2 + 6 : len(lengths) // 2 + 10])
    report, found = look([item for at, item in enumerate(frames) if at not in gone], tmp_path / "a.pcap", job=job)
    assert check(found, cluster.results, whole=False) <= {0, 1, 2}
    assert "and nothing proves what they were: from there on nothing is claimed" in words(report)


@pytest.mark.parametrize("seed", range(8))
def test_random_loss_never_makes_a_wrong_value(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world, options = CASES[seed % len(CASES)]
    cluster = cluster_of(world, options).reduce(*COUNTS[options["protocol"]])
    frames = set_up(cluster) + of_wire(cluster.wire.frames)
    kept = [item for item in frames if rng.random() > 0.01]
    job = cluster.job_file(tmp_path / "job.safetensors")
    for more in ({"job": job}, {"version": options["version"]}):
        check(look(kept, tmp_path / "a.pcap", dtype="fp32", **more)[1], cluster.results, whole=False)


@pytest.mark.parametrize("options", [CASES[0][1], CASES[6][1]], ids=["ring", "tree"])
def test_a_capture_that_ends_anywhere_claims_nothing_wrong(tmp_path: Path, options: dict[str, Any]) -> None:
    cluster = cluster_of(4, options).reduce(4 * 8192 * 4, 4 * 8192)
    job = cluster.job_file(tmp_path / "job.safetensors")
    frames = of_wire(cluster.wire.frames)
    for at in np.linspace(len(frames) // 10, len(frames), 5).astype(int).tolist():
        check(look(frames[:at], tmp_path / "a.pcap", job=job)[1], cluster.results, whole=False)


def test_a_capture_that_begins_late_claims_nothing(tmp_path: Path) -> None:
    """Connections are known by their first bytes."""
    cluster = Cluster(4, 0, algorithm="ring", protocol="ll").reduce(5000, 5000)
    frames = of_wire(cluster.wire.frames)
    job = cluster.job_file(tmp_path / "job.safetensors")
    assert not collectives(look(frames[40:], tmp_path / "a.pcap", job=job)[1])


# What is not known


def test_without_set_up_and_job_file_it_is_said_what_to_do(tmp_path: Path) -> None:
    cluster = Cluster(2, 0, algorithm="ring", protocol="ll", version="2.23.4").reduce(5000)
    frames = of_wire(cluster.wire.frames)
    report, found = look(frames, tmp_path / "a.pcap")
    text = words(report)
    assert not collectives(found) and "NCCL of unknown release: no collective is claimed" in text
    report, found = look(frames, tmp_path / "a.pcap", version="2.23.4")
    assert not collectives(found) and "nothing tells whose ranks' its connections are" in words(report)


def test_data_sockets_of_an_unknown_release_are_named_and_not_counted(tmp_path: Path) -> None:
    cluster = Cluster(2, 2, algorithm="ring", protocol="ll", version="2.23.4").reduce(5000)
    report, _ = look(of_wire(cluster.wire.frames), tmp_path / "a.pcap")
    text = words(report)
    assert "2 data sockets; nothing tells NCCL's release" in text and " messages, " not in text


@pytest.mark.parametrize("said", ["2.22.3", "2.19.4"])
def test_a_release_against_the_traffic_shows_both(tmp_path: Path, said: str) -> None:
    cluster = Cluster(4, 0, algorithm="ring", protocol="ll", channels=2, version="2.26.2").reduce(20_000, 30_000, 700)
    job = cluster.job_file(tmp_path / "job.safetensors", version=said)
    with pytest.raises(UsageError, match=f"the job file says NCCL {said}, .*2.26"):
        look(of_wire(cluster.wire.frames), tmp_path / "a.pcap", job=job)


def test_hostile_lengths_and_flags_are_no_crash(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    frames = []
    for number in range(6):
        ends = {"sport": 1000 + number, "dport": 2000}
        body = struct.pack("<QIB", 0x564AB9F2FC4B9D6C, 3, 0)
        for size in rng.integers(0, 300, 20).tolist():
            body += struct.pack("<i", size) + rng.bytes(size)
        frames += [tcp_frame(flags=SYN, seq=99, **ends), tcp_frame(body + rng.bytes(500), seq=100, **ends)]
    cluster = Cluster(2, 0, algorithm="ring", protocol="ll")
    job = cluster.job_file(tmp_path / "job.safetensors")
    assert not collectives(look([(10**9 + at, f) for at, f in enumerate(frames)], tmp_path / "a.pcap", job=job)[1])
