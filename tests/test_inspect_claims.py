"""What docs/inspect.md says of `flowcheck inspect` and no other test shows."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tunnel_frames
from nccl_setup_frames import Wire, streams
from test_inspect import command, of, report_of, write
from test_inspect_nccl_lab import FEW, Cluster, SetUp, check, look, of_wire

from flowcheck.errors import UsageError
from flowcheck.inspect.report import Limits, inspect
from flowcheck.inspect.table import WIDTH, table
from flowcheck.lab.nccl_wire import Call

NVLSTREE: dict[str, Any] = {
    "algorithm": "nvlstree", "protocol": "simple", "gpus_per_node": 2, "rails": 2, "channels": 2, "mtu": 4096,
}


# Files


def test_several_files_are_merged_by_time_and_read_once(shared: Path, tmp_path: Path) -> None:
    path = shared / "captures" / "gloo" / "nano.pcap"
    frames = tunnel_frames.frames_of(path)
    parts = [write(frames[start::3], tmp_path / f"{start}.pcap") for start in (1, 0, 2)]
    with inspect(parts, limits=FEW) as report:
        merged = [json.loads(line) for line in report.lines()]
    whole = report_of(path)[1]
    assert [line for line in merged if line["type"] != "summary"] == [x for x in whole if x["type"] != "summary"]
    assert merged[0]["packets"] == whole[0]["packets"] == len(frames)


def test_a_file_that_ends_inside_a_record_is_read_up_to_there(shared: Path, tmp_path: Path) -> None:
    data = (shared / "captures" / "gloo" / "nano.pcap").read_bytes()
    cut = tmp_path / "cut.pcap"
    cut.write_bytes(data[:-37])
    done = command("--json", str(cut))
    assert done.returncode == 0
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[0]["packets"] == len(tunnel_frames.frames_of(shared / "captures" / "gloo" / "nano.pcap")) - 1
    (note,) = done.stderr.splitlines()
    assert str(cut) in note and "inside" in note


# Lines


def test_sends_have_no_address_and_headless_messages_no_length(shared: Path, tmp_path: Path) -> None:
    mixed = of("message", report_of(shared / "captures" / "roce" / "c10_mixed_ops_1024.pcap")[1])
    sends = [one for one in mixed if one["opcode"].startswith("SEND")]
    assert sends and all(one["va"] is None and one["rkey"] is None for one in sends)
    frames = tunnel_frames.frames_of(shared / "captures" / "roce" / "c1_clean_v4_1024.pcap")
    first = [at for at, (_, data) in enumerate(frames) if len(data) > 42 and data[42] == 6][9]
    found = of("message", report_of(write(frames[:first] + frames[first + 1 :], tmp_path / "headless.pcap"))[1])
    (headless,) = [one for one in found if one["length"] is None]
    assert headless["va"] is None and not headless["complete"]


def test_final_values_beyond_the_limit_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(5000, 120_000)
    job, path = cluster.job_file(tmp_path / "job.safetensors"), tmp_path / "a.pcap"
    write(of_wire(cluster.wire.frames), path)
    limits = Limits(flows=1 << 11, reorder=8 << 20, collectives=1 << 17)
    with inspect([path], limits=limits, job=job, dtype="fp32") as report:
        found = [json.loads(line) for line in report.lines()]
    assert check(found, cluster.results, whole=False) == {0, 1}
    last = [line["final"] for line in found if line["type"] == "collective" and line["ordinal"] == 1]
    assert last and not any(last)
    assert "their final values are left out" in " ".join(report.notes)


def test_refusals_and_limits_go_to_stderr_with_json(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring")
    path = write(SetUp(cluster).frames, tmp_path / "a.pcap")
    done = command("--json", str(path))
    assert done.returncode == 0 and all(json.loads(line) for line in done.stdout.splitlines())
    assert "none of its data were captured" in done.stderr and "; the cost: " in done.stderr


# Collectives


@pytest.mark.parametrize("version", ["2.19.4", "2.21.5", "2.28.9"])
def test_nvlstree_is_read_with_the_job_file(tmp_path: Path, version: str) -> None:
    cluster = Cluster(8, **{**NVLSTREE, "version": version}).reduce(60_000, 120_000, 30_001)
    job = cluster.job_file(tmp_path / "job.safetensors")
    frames = of_wire(cluster.wire.frames)
    report, found = look(frames, tmp_path / "a.pcap", job=job, dtype="fp32")
    assert check(found, cluster.results) == {0, 1, 2}, table(report)
    told = [line for line in found if line["type"] == "collective"]
    assert {(line["algorithm"], line["protocol"]) for line in told} == {("nvlstree", "simple")}
    assert {line["channel"] for line in told} == {0, 1}
    assert max(map(len, table(report).splitlines())) <= WIDTH


def test_nvlstree_without_the_job_file_is_not_claimed(tmp_path: Path) -> None:
    """The set-up names heads, but not the number of NVLS channels."""
    cluster = Cluster(8, **{**NVLSTREE, "version": "2.23.4"}).reduce(60_000)
    report, found = look(SetUp(cluster).frames + of_wire(cluster.wire.frames), tmp_path / "a.pcap", dtype="fp32")
    assert not of("collective", found), table(report)


def test_an_nvlstree_value_with_a_lost_frame_is_never_wrong(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    cluster = Cluster(8, **{**NVLSTREE, "version": "2.28.9"}).reduce(60_000, 30_000)
    kept = [item for item in of_wire(cluster.wire.frames) if rng.random() > 0.02]
    found = look(kept, tmp_path / "a.pcap", job=cluster.job_file(tmp_path / "job.safetensors"), dtype="fp32")[1]
    check(found, cluster.results, whole=False)


def test_sends_over_several_queue_pairs_are_not_told(tmp_path: Path) -> None:
    told = {}
    for qps in (1, 2):
        cluster = Cluster(2, protocol="ll", algorithm="ring", version="2.19.4", qps=qps, split=True).reduce(5000)
        values = np.arange(40_000, dtype=np.float32)
        cluster._perform(Call("sendrecv", [values] * 2, root=0, target=1))
        job = cluster.job_file(tmp_path / f"{qps}.safetensors")
        found = look(of_wire(cluster.wire.frames), tmp_path / f"{qps}.pcap", job=job, dtype="fp32")[1]
        told[qps] = [(line["kind"], line["bytes"]) for line in of("collective", found) if line["kind"] == "sendrecv"]
    assert told == {1: [("sendrecv", 160_000)], 2: []}


def test_two_ranks_need_neither_set_up_nor_job_file(tmp_path: Path) -> None:
    """Two ranks with a closed ring, on as many channels as were seen; four need one of the two."""
    two = Cluster(2, protocol="ll", algorithm="ring", channels=2).reduce(5000, 120_000)
    report, found = look(of_wire(two.wire.frames), tmp_path / "a.pcap", version="2.19.4", dtype="fp32")
    assert check(found, two.results) == {0, 1} and "as many channels as were seen" in " ".join(table(report).split())
    four = Cluster(4, protocol="ll", algorithm="ring").reduce(5000)
    report, found = look(of_wire(four.wire.frames), tmp_path / "b.pcap", version="2.19.4", dtype="fp32")
    assert not of("collective", found) and "ranks and rings are not all seen" in " ".join(table(report).split())


# Words against traffic


def test_nodes_of_the_job_file_against_the_set_up(tmp_path: Path) -> None:
    cluster = Cluster(4, protocol="ll", algorithm="ring", gpus_per_node=2, rails=2).reduce(5000)
    facts = cluster.description.group.nccl
    assert facts is not None
    everywhere = tuple(dict.fromkeys(address for rank in facts.addresses for address in rank))
    job = cluster.job_file(
        tmp_path / "job.safetensors", nodes=(0, 1, 0, 1), addresses=(everywhere,) * 4, rings=((0, 2, 1, 3),),
        chains=(), search_channels=0, tree_pattern=0, algorithms=(1,),
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"nodes: described as \(0, 1, 0, 1\).*shows \(0, 0, 1, 1\)"):
        look(SetUp(cluster).frames + of_wire(cluster.wire.frames), tmp_path / "a.pcap", job=job)


def test_senders_of_the_set_up_against_the_announcements(tmp_path: Path) -> None:
    """The set-up of one job, the messages of another one on the same queue pairs."""
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(5000)
    frames = []
    for frame in cluster.wire.frames:
        data = frame.data
        if data[42] == 10 and len(data) == 106:  # an entry: its sender's rank, for the checksum nobody looks at
            at = 70 + 20
            data = data[:at] + struct.pack("<I", 3 - struct.unpack_from("<I", data, at)[0]) + data[at + 4 :]
        frames.append((frame.ts, data))
    with pytest.raises(UsageError, match=r"says that rank \d sends to it, the CTS entries say rank \d"):
        look(Wire().all(streams(cluster.wire.communicator)).frames + frames, tmp_path / "a.pcap")


def test_a_job_file_of_another_size_is_not_the_captures_job(tmp_path: Path) -> None:
    """Sub-communicators have the interfaces of a larger one: their set-up contradicts nothing."""
    cluster = Cluster(4, protocol="ll", algorithm="ring").reduce(5000)
    other = Cluster(2, protocol="ll", algorithm="ring")
    frames = Wire().all(streams(other.wire.communicator, magic=9)).frames + of_wire(cluster.wire.frames)
    found = look(frames, tmp_path / "a.pcap", job=cluster.job_file(tmp_path / "job.safetensors"))[1]
    assert check(found, cluster.results) == {0}
