"""`flowcheck inspect` on made-up NCCL traffic of more than two ranks: what it claims is the cluster's own result.

The generator is written from NCCL's source and shares nothing with what is under test.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_job import Frame, NcclJob
from nccl_setup_frames import Wire, streams
from replay import block_of

from flowcheck import jobfile
from flowcheck.description import TensorSpec
from flowcheck.errors import UsageError
from flowcheck.inspect.report import Limits, Report, inspect
from flowcheck.inspect.table import WIDTH, table
from flowcheck.lab.addresses import training_address
from flowcheck.lab.nccl_wire import Call
from flowcheck.lab.nccl_wire_setup import NET_IB
from mirror.record import PcapRecorder

Told = dict[str, Any]
FEW = Limits(flows=1 << 11, reorder=8 << 20)


# The cluster


class Cluster(NcclJob):
    """A job whose all-reduces are `results`, by ordinal; other collectives are None. sockets: as in `NcclWire`."""

    def __init__(self, world: int, sockets: int | None = None, **nccl: Any) -> None:
        super().__init__(world, nccl=nccl, sockets=sockets, rebuilt_at_attach=True)
        self.results: list[np.ndarray | None] = []
        self.attach()

    def reduce(self, *counts: int) -> Cluster:
        for count in counts:
            self.results.append(self.sums(count))
        return self

    def copies(self, size: int) -> Cluster:
        """An all-gather and a broadcast, as DDP begins."""
        self._perform(Call("allgather", [np.arange(2) + rank for rank in range(self.world)]))
        values = np.random.default_rng(3).integers(0, 255, size).astype(np.uint8)
        self._perform(Call("broadcast", [values] * self.world))
        self.results += [None, None]
        return self

    def job_file(self, path: Path, scale: int = 1, **facts: Any) -> Path:
        """The job's file, with parameters `scale` times as large, and with other facts of NCCL."""
        parameters = [
            replace(one, spec=TensorSpec("float32", (one.spec.numel * scale,), (1,)))
            for one in self.description.parameters
        ]
        group = self.description.group
        assert group.nccl is not None
        description = replace(
            self.description, parameters=parameters, group=replace(group, nccl=replace(group.nccl, **facts))
        )
        tensors = {key: (spec, np.zeros(spec.nbytes, np.uint8)) for key, spec in description.tensors()}
        jobfile.write(path, description, tensors)
        return path


def look(frames: Sequence[tuple[int, bytes]], path: Path, **options: Any) -> tuple[Report, list[Told]]:
    recorder = PcapRecorder(path)
    recorder.write(block_of(list(frames)))
    recorder.close()
    with inspect([path], limits=FEW, **options) as report:
        return report, [json.loads(line) for line in report.lines()]


def of_wire(frames: Sequence[Frame]) -> list[tuple[int, bytes]]:
    return [(frame.ts, frame.data) for frame in frames]


def check(found: list[Told], results: Sequence[np.ndarray | None], *, whole: bool = True) -> set[int]:
    """Every final range is the cluster's own; returns the ordinals of all-reduces. whole: together they are all."""
    every = [line for line in found if line["type"] == "collective"]
    told = [line for line in every if line["kind"] == "allreduce"]
    assert all(results[line["ordinal"]] is None for line in every if line["kind"] != "allreduce")
    shown: dict[int, np.ndarray] = {}
    for line in told:
        result = results[line["ordinal"]]
        assert result is not None, "an all-reduce is told where there was none"
        data = result.view(np.uint8)
        assert line["bytes"] in (None, data.size), (line["bytes"], data.size)
        covered = shown.setdefault(line["ordinal"], np.zeros(data.size, bool))
        for first, last, digest in line["final"]:
            assert digest == hashlib.sha256(data[first:last]).hexdigest(), (line["ordinal"], first, last)
            covered[first:last] = True
    assert not whole or all(covered.all() for covered in shown.values())
    return set(shown)


class SetUp(Wire):
    """The set-up of a communicator, as frames of a management network."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.all(streams(cluster.wire.communicator))  # type: ignore[attr-defined]


# Tests


CASES = [
    (4, {"algorithm": "ring", "protocol": "ll", "version": "2.19.4"}),
    (4, {"algorithm": "ring", "protocol": "simple", "version": "2.21.5", "channels": 2}),
    (4, {"algorithm": "ring", "protocol": "ll128", "version": "2.27.7", "gpus_per_node": 2, "channels": 2}),
    (4, {"algorithm": "tree", "protocol": "ll", "version": "2.19.4", "channels": 2}),
    (4, {"algorithm": "tree", "protocol": "simple", "version": "2.23.4", "gpus_per_node": 2, "channels": 2}),
    (4, {"algorithm": "tree", "protocol": "ll128", "version": "2.21.5", "channels": 2}),
    (4, {"algorithm": "ring", "protocol": "simple", "version": "2.28.9", "channels": 2, "qps": 2, "split": False}),
    (4, {"algorithm": "ring", "protocol": "ll", "version": "2.19.4", "qps": 2, "split": True}),
]
COUNTS = {"ll": (5000, 120_000, 30_002), "ll128": (4800, 120_000, 28_800), "simple": (5000, 120_000, 30_001)}
"""Elements that fill the last line of a message: else what the line holds beyond them would be counted in."""


def names(cases: list[tuple[int, dict[str, Any]]]) -> list[str]:
    return ["-".join(map(str, options.values())) for _, options in cases]


@pytest.mark.parametrize(("world", "options"), CASES, ids=names(CASES))
def test_the_set_up_tells_rings_trees_and_queue_pairs(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    cluster = Cluster(world, **options).reduce(*COUNTS[options["protocol"]], 2)
    report, found = look(SetUp(cluster).frames + of_wire(cluster.wire.frames), tmp_path / "a.pcap", dtype="fp32")
    text = table(report)
    assert check(found, cluster.results, whole=options["protocol"] != "ll128") >= {0, 1, 2}, text
    told = {(line["algorithm"], line["protocol"]) for line in found if line["type"] == "collective"}
    assert told == {(options["algorithm"], options["protocol"])}
    assert f"{world} ranks, channels: {options.get('channels', 1)}" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(("world", "options"), CASES, ids=names(CASES))
def test_the_job_file_tells_them(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    cluster = Cluster(world, **options).reduce(*COUNTS[options["protocol"]], 2)
    job = cluster.job_file(tmp_path / "job.safetensors")
    report, found = look(of_wire(cluster.wire.frames), tmp_path / "a.pcap", job=job, dtype="fp32")
    assert check(found, cluster.results, whole=options["protocol"] != "ll128") >= {0, 1, 2}, table(report)


@pytest.mark.parametrize(("world", "options"), [case for case in CASES if case[1]["protocol"] == "ll128"])
def test_the_jobs_sizes_make_ll128_exact(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    """What LL128's last group hides is told by the sizes of the job's buckets."""
    cluster = Cluster(world, **options)
    job = cluster.job_file(tmp_path / "job.safetensors", 501)
    cluster.reduce(80 * 501, 40 * 501, 80 * 501, 500, 2)  # the buckets of the job, and something else
    report, found = look(of_wire(cluster.wire.frames), tmp_path / "a.pcap", job=job)
    assert check([one for one in found if one.get("ordinal", 0) < 3], cluster.results) == {0, 1, 2}, table(report)
    told = {line["ordinal"]: (line["bytes"], line["dtype"]) for line in found if line["type"] == "collective"}
    told.pop(4, None)  # the capture ends with it
    assert told == {0: (160320, "float32"), 1: (80160, "float32"), 2: (160320, "float32"), 3: (None, None)}
    check(found, cluster.results, whole=False)


def test_a_copy_before_the_all_reduces_is_told_and_ordinals_count_on(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring").copies(4096).reduce(5000)
    report, found = look(SetUp(cluster).frames + of_wire(cluster.wire.frames), tmp_path / "a.pcap")
    assert check(found, cluster.results) == {2}, table(report)
    kinds = {line["ordinal"]: (line["kind"], line["bytes"]) for line in found if line["type"] == "collective"}
    assert kinds == {0: ("allgather", 64), 1: ("broadcast", 4096), 2: ("allreduce", 20000)}


# Words against traffic


def lossless(cluster: Cluster, path: Path, **options: Any) -> tuple[Report, list[Told]]:
    return look(of_wire(cluster.wire.frames), path, **options)


def test_a_job_file_against_the_set_up_shows_both(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(5000)
    frames = SetUp(cluster).frames + of_wire(cluster.wire.frames)
    other = cluster.job_file(tmp_path / "ring.safetensors", rings=((0, 2, 1, 3),))
    with pytest.raises(UsageError, match=r"rings\[0\]: described as \(0, 2, 1, 3\).*shows \(0, 1, 2, 3\)"):
        look(frames, tmp_path / "a.pcap", job=other)
    found = look(frames, tmp_path / "a.pcap", job=cluster.job_file(tmp_path / "job.safetensors"))[1]
    assert check(found, cluster.results) == {0}


def test_a_job_file_against_the_traffic_shows_both(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(5000)
    turned = cluster.job_file(tmp_path / "turned.safetensors", rings=((0, 3, 2, 1),), chains=(), search_channels=0)
    with pytest.raises(UsageError, match=r"ranks 0>3, 1>0, 2>1, 3>2 send .* rank 0 sends from 10.77.0.1 to 10.77.0.2"):
        lossless(cluster, tmp_path / "a.pcap", job=turned)


@pytest.mark.parametrize(
    ("version", "said", "shown"),
    [
        ("2.26.2", "2.24.3", "NCCL 2.24.*which does not cut.*2.26 explains all"),
        ("2.26.2", "2.22.3", "CTS entries"),
        ("2.29.2", "2.28.9", "immediates in the capture are big endian"),
    ],
)
def test_a_release_against_the_traffic_shows_both(tmp_path: Path, version: str, said: str, shown: str) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring", channels=2, version=version).reduce(20_000, 30_000, 700)
    job = cluster.job_file(tmp_path / "job.safetensors", version=said)
    with pytest.raises(UsageError, match=shown):
        lossless(cluster, tmp_path / "a.pcap", job=job)


def test_what_several_releases_share_is_claimed_for_none(tmp_path: Path) -> None:
    """Blocks of 2.20 to 2.23, and the records of all ranks are not seen: three ways to cut."""
    cluster = Cluster(4, protocol="ll", algorithm="ring", version="2.22.3").reduce(5000)
    blocks = [one for one in streams(cluster.wire.communicator) if one.there[8] == NET_IB]  # type: ignore[attr-defined]
    report, found = look(Wire().all(blocks).frames + of_wire(cluster.wire.frames), tmp_path / "a.pcap")
    assert not [line for line in found if line["type"] == "collective"]
    assert "NCCL of unknown release (the set-up says one of 2.20 to 2.23)" in table(report)


# Loss


def losing(cluster: Cluster, chosen: Sequence[int]) -> list[tuple[int, bytes]]:
    return [item for at, item in enumerate(of_wire(cluster.wire.frames)) if at not in set(chosen)]


def data_frames(cluster: Cluster, sender: int) -> list[int]:
    """Frames with a rank's messages, by number."""
    job = cluster.nccl
    own = socket.inet_aton(training_address(job.ports[sender], False))
    return [at for at, frame in enumerate(cluster.wire.frames) if frame.data[26:30] == own and 6 <= frame.data[42] <= 11
            and len(frame.data) > 160]


@pytest.mark.parametrize("options", [
    {"protocol": "ll", "algorithm": "ring"}, {"protocol": "simple", "algorithm": "ring", "version": "2.27.7"},
    {"protocol": "ll", "algorithm": "tree", "channels": 2},
    {"protocol": "simple", "algorithm": "ring", "version": "2.27.7", "qps": 2, "split": False},
    {"protocol": "ll", "algorithm": "ring", "qps": 2, "split": True},
], ids=lambda options: "-".join(map(str, options.values())))
def test_reading_goes_on_behind_lost_messages(tmp_path: Path, options: dict[str, Any]) -> None:
    cluster = Cluster(4, **options).reduce(30_000, 50_000, 20_000, 40_000)
    job = cluster.job_file(tmp_path / "job.safetensors")
    sender = 0 if options["algorithm"] == "tree" else 1  # what goes up a tree is never final
    own = data_frames(cluster, sender)
    third = len(own) // 3
    report, found = look(losing(cluster, own[third : third + 70]), tmp_path / "a.pcap", job=job)
    assert check(found, cluster.results, whole=False) == {0, 1, 2, 3}, table(report)
    whole = lossless(cluster, tmp_path / "b.pcap", job=job)[1]
    lost = [line for line in whole if line["type"] == "collective" and line not in found]
    assert lost and {line["sender_rank"] for line in lost} == {sender}


def test_where_nothing_proves_a_place_nothing_more_is_claimed(tmp_path: Path) -> None:
    """The same packets are missing on every connection."""
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(30_000, 50_000, 20_000)
    every = len(cluster.wire.frames)
    report, found = look(losing(cluster, range(every // 2, every * 3 // 4)), tmp_path / "a.pcap",
                         job=cluster.job_file(tmp_path / "job.safetensors"))
    assert check(found, cluster.results, whole=False) <= {0, 1}
    assert "were not captured, and nothing proves what they were: from there on nothing is claimed" in " ".join(
        table(report).split())


@pytest.mark.parametrize("seed", range(6))
def test_random_loss_never_makes_a_wrong_value(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = CASES[seed % len(CASES)][1]
    cluster = Cluster(4, **options).reduce(*COUNTS[options["protocol"]])
    kept = [item for item in of_wire(cluster.wire.frames) if rng.random() > 0.01]
    job = cluster.job_file(tmp_path / "job.safetensors")
    found = look(kept, tmp_path / "a.pcap", job=job, dtype="fp32")[1]
    check(found, cluster.results, whole=False)


@pytest.mark.parametrize("options", [
    {"protocol": "ll", "algorithm": "ring"}, {"protocol": "simple", "algorithm": "tree", "channels": 2},
], ids=lambda options: "-".join(map(str, options.values())))
def test_a_capture_that_ends_anywhere_claims_nothing_wrong(tmp_path: Path, options: dict[str, Any]) -> None:
    cluster = Cluster(4, **options).reduce(4 * 8192 * 4, 4 * 8192)
    job = cluster.job_file(tmp_path / "job.safetensors")
    frames = of_wire(cluster.wire.frames)
    for at in np.linspace(len(frames) // 10, len(frames), 9).astype(int).tolist():
        check(look(frames[:at], tmp_path / "a.pcap", job=job)[1], cluster.results, whole=False)


def test_an_odd_number_of_messages_moves_the_turn_of_queue_pairs(tmp_path: Path) -> None:
    """An all-gather of four ranks is three messages a connection: what follows begins on the second queue pair."""
    cluster = Cluster(4, protocol="ll", algorithm="ring", version="2.27.7", qps=2).copies(4096).reduce(5000, 2)
    job = cluster.job_file(tmp_path / "job.safetensors")
    assert check(lossless(cluster, tmp_path / "a.pcap", job=job)[1], cluster.results) >= {2}


def test_a_small_bucket_names_no_size(tmp_path: Path) -> None:
    """3000 bytes are as long on the wire as the bucket of 3840: they need not be it."""
    cluster = Cluster(4, protocol="ll128", algorithm="ring").reduce(750, 750)
    job = cluster.job_file(tmp_path / "job.safetensors", 12)
    found = lossless(cluster, tmp_path / "a.pcap", job=job)[1]
    assert check(found, cluster.results, whole=False) >= {0}


def test_a_lost_announcement_costs_nothing(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(5000)
    entries = [at for at, frame in enumerate(cluster.wire.frames) if frame.data[42] == 10 and len(frame.data) == 106]
    job = cluster.job_file(tmp_path / "job.safetensors")
    assert len(entries) == 24
    found = look(losing(cluster, entries[4:8]), tmp_path / "a.pcap", job=job)[1]
    assert check(found, cluster.results) == {0}
    assert {line["sender_rank"] for line in found if line["type"] == "collective"} == {0, 1, 2, 3}
