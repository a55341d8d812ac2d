"""Observing without a job: recorded captures, whole, in part and with losses; synthetic traffic by its truth."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dpkt
import pytest
from gloo_traffic import Job, port
from observe_live import frames_of
from replay import Frame, block_of, chunks

from flowcheck.config import DaemonConfig
from flowcheck.errors import UsageError
from flowcheck.observation import table
from flowcheck.observe import observe as run
from reconstruct.observe.observer import Finished, Observer
from reconstruct.observe.tcpstore import StoreRecord

ROOT = Path(__file__).resolve().parent.parent
STORE_PORT = 29500


def observe(frames: list[Frame], per_block: int = 500) -> tuple[Observer, list[Finished], dict[str, Any]]:
    observer = Observer(1024, 1 << 22)
    now = 0
    for chunk in chunks(frames, per_block):
        now = max(now, max(t for t, _ in chunk))
        observer.feed(block_of(chunk), now)
    observer.flush(now)
    return observer, observer.take_finished(), observer.report()


def recorded(shared: Path, name: str) -> list[Frame]:
    return frames_of(shared / "captures" / "gloo" / f"{name}.pcap")


def ends(frame: Frame) -> tuple[str, int, str, int] | None:
    """(source, port, destination, port) of a TCP frame."""
    ip = dpkt.ethernet.Ethernet(frame[1]).data
    if not isinstance(ip, dpkt.ip.IP) or not isinstance(ip.data, dpkt.tcp.TCP):
        return None
    return ".".join(map(str, ip.src)), ip.data.sport, ".".join(map(str, ip.dst)), ip.data.dport


def only(frames: list[Frame], keep: Callable[[str, str], bool]) -> list[Frame]:
    """The rendezvous, and gloo frames whose source and destination address pass."""
    kept = []
    for frame in frames:
        found = ends(frame)
        if found is not None and (STORE_PORT in found or keep(found[0], found[2])):
            kept.append(frame)
    return kept


def status_of(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "packets": 0, "bytes": 0, "drops": 0, "sources": []}


def kinds(group: dict[str, Any]) -> dict[str, int]:
    return {name: kind["collectives"] for name, kind in group["kinds"].items()}


# Recorded jobs


@pytest.mark.parametrize(("name", "world", "size"), [("nano", 4, 8), ("scalar3", 3, 32)])
@pytest.mark.parametrize("per_block", [7, 10_000])
def test_a_ddp_job(shared: Path, name: str, world: int, size: int, per_block: int) -> None:
    _, finished, report = observe(recorded(shared, name), per_block)
    (group,) = report["groups"]
    assert (group["name"], group["world_size"], group["contexts"]) == ("10.77.0.1:29500/0", world, 1)
    assert kinds(group) == {"all-gather": 1, "all-reduce": 6, "broadcast": 4, "barrier": 1}
    assert group["allreduces"] == {"finished": 6, "without_size": 0, "sizes": [[size, 6]]}
    assert (group["coverage"], group["shown"], group["in_progress"]) == (1.0, 1.0, 0)
    assert [(f.collective.tag, f.measured.size) for f in finished if f.collective.kind == 4] == [
        (tag, size) for tag in (3, 6, 7, 8, 9, 10)
    ]
    assert {(link["sender"], link["receiver"]) for link in group["links"] if link["ring"]} == {(1, 0), (2, 1)}
    assert report["loss"]["hole_bytes"] == 0 and report["strangers"] == report["incomplete_groups"] == []
    assert report["streams"]["rendezvous"] > 0 and report["streams"]["other"] == 0
    # Payload is counted whole: what a link carries in an all-reduce is its schedule.
    assert group["kinds"]["all-reduce"]["messages"] == {4: 36, 3: 60}[world]


def test_every_kind_of_collective(shared: Path) -> None:
    _, finished, report = observe(recorded(shared, "collectives"))
    (group,) = report["groups"]
    assert group["world_size"] == 5
    assert kinds(group) == {
        "point-to-point": 3, "gather": 1, "all-gather": 3, "reduce": 1, "all-reduce": 11, "scatter": 1, "broadcast": 1,
        "barrier": 2, "all-to-all": 1,
    }  # fmt: skip
    assert {f.collective.tag: f.measured.size for f in finished if f.collective.kind == 4} == {
        3: 100, 11: 4, 13: 8, 14: 400, 15: 3, 17: 120, 18: 120, 19: 20000, 20: 20004, 21: 20008, 22: 20012,
    }  # fmt: skip
    assert {f.measured.size for f in finished if f.collective.kind == 6} == {404}
    assert group["shown"] == 1.0 and all(len(f.collective.parts) == 5 for f in finished if f.collective.kind == 4)
    assert {f.collective.tag for f in finished if f.passed} == set(range(7))


def test_one_direction_of_a_port_shows_three_quarters(shared: Path) -> None:
    frames = recorded(shared, "torchrun_2x2")
    for keep, coverage in ((lambda s, d: True, 1.0), (lambda s, d: s == "10.77.0.2", 0.75)):
        _, finished, report = observe(only(frames, keep))
        (group,) = report["groups"]
        assert (group["world_size"], group["coverage"], group["shown"]) == (4, coverage, coverage)
        assert group["allreduces"]["sizes"] == [[4000, 1]]
        assert [f.measured.shown for f in finished if f.collective.kind == 4] == [int(4000 * coverage)]
        assert ("mirror the port's other direction" in table(status_of(report))) == (coverage < 1)
    _, _, report = observe(only(recorded(shared, "nano"), lambda s, d: s == "10.77.0.3"))
    assert [(g["coverage"], g["allreduces"]["sizes"]) for g in report["groups"]] == [(0.75, [[8, 6]])]


def test_without_the_rendezvous_ranks_are_unknown(shared: Path) -> None:
    gloo = [f for f in recorded(shared, "nano") if (found := ends(f)) is not None and STORE_PORT not in found]
    _, finished, report = observe(gloo)
    assert report["groups"] == finished == []
    assert report["streams"]["strangers"] == len(report["strangers"]) == 6
    hellos = {(s["source"].split(":")[0], s["hello"]) for s in report["strangers"] if s["hello"] is not None}
    assert hellos == {("10.77.0.2", 1), ("10.77.0.3", 2), ("10.77.0.4", 3)}
    assert max(s["max_tag"] for s in report["strangers"]) == 11
    text = table(status_of(report))
    assert "6 streams look like gloo" in text and "attach the job" in text

    # Joined in the middle: found by the form of their messages.
    _, _, report = observe(gloo[len(gloo) // 2 :])
    assert report["groups"] == [] and report["strangers"]
    assert all(s["joined"] and s["hello"] is None for s in report["strangers"])


def test_half_a_rendezvous_is_named(shared: Path) -> None:
    frames = [f for f in recorded(shared, "nano") if (found := ends(f)) is not None and found[0] == "10.77.0.2"]
    _, _, report = observe(frames)
    assert report["groups"] == []
    assert report["incomplete_groups"] == [{"name": "10.77.0.1:29500/0", "world_size": 4, "known": (1,)}]
    assert "of 4 ranks only the listeners of 1 were seen" in table(status_of(report))


@pytest.mark.parametrize("seed", range(4))
def test_dropped_frames_are_reported(shared: Path, seed: int) -> None:
    frames = recorded(shared, "collectives")
    rng = random.Random(seed)
    # Every port was mirrored, so each frame is there twice: both copies are dropped.
    chosen = {data for data in sorted({data for _, data in frames}) if rng.random() < 0.01}
    gone, kept = 0, []
    for frame in frames:
        found = ends(frame)
        if found is None or STORE_PORT in found or frame[1] not in chosen:
            kept.append(frame)
        else:
            gone += len(dpkt.ethernet.Ethernet(frame[1]).data.data.data)
    _, finished, report = observe(kept)
    (group,) = report["groups"]
    # Every byte that was dropped and not sent again is a hole.
    assert 0 < report["loss"]["hole_bytes"] <= gone
    assert sum(link["hole_bytes"] for link in group["links"]) == report["loss"]["hole_bytes"]
    assert report["loss"]["framing_lost"] > 0
    assert any(link["lost"] for link in group["links"])
    assert "never captured" in table(status_of(report))
    sizes = {3: 100, 11: 4, 13: 8, 14: 400, 15: 3, 17: 120, 18: 120, 19: 20000, 20: 20004, 21: 20008, 22: 20012}
    known = {f.collective.tag: f.measured for f in finished if f.collective.kind == 4}
    assert all(measured.size in (None, sizes[tag]) for tag, measured in known.items())
    assert sum(measured.size is not None for measured in known.values()) >= 5


def test_other_traffic_is_no_gloo(shared: Path) -> None:
    _, _, report = observe(frames_of(shared / "captures" / "tcp" / "tcp_complete_smb2_suricata.pcap"))
    assert report["groups"] == report["strangers"] == []
    assert report["streams"]["other"] == 2 and report["streams"]["other_bytes"] > 40_000
    text = table(status_of(report))
    assert "no gloo traffic seen" in text and "not gloo: 2 TCP streams" in text


# Synthetic traffic


def watch(job: Job, frames: list[Any] | None = None, per_block: int = 64) -> tuple[list[Finished], dict[str, Any]]:
    observer = Observer(256, 1 << 22)
    observer.add_group(job.group())
    frames = job.frames if frames is None else frames
    for i in range(0, len(frames), per_block):
        block = job.block(frames[i : i + per_block])
        observer.feed(block, int(block.ts.max()))
    observer.flush(1 << 62)
    return observer.take_finished(), observer.report()


def test_large_tensors_and_many_collectives_in_one_block() -> None:
    job = Job(4, port(4, 1), seed=1, mss=60_000)
    job.connect()
    sizes = {tag: (9_999_996 if tag % 50 == 7 else random.Random(tag).choice((4, 40, 4096)), 4) for tag in range(100)}
    for tag, size in sizes.items():
        job.allreduce({tag: size})
    finished, report = watch(job, per_block=1 << 20)
    (group,) = report["groups"]
    assert {f.collective.tag: f.measured.size for f in finished} == {tag: size for tag, (size, _) in sizes.items()}
    assert all(f.measured.shown == f.measured.size for f in finished)
    assert [f.collective.tag for f in finished if not f.passed] == list(range(83, 100))
    assert not any(link["lost"] for link in group["links"])


def test_a_hole_in_a_payload_costs_its_bytes_alone() -> None:
    job = Job(4, [(1, 0), (0, 1)], seed=3, gap_ns=1_000_000)
    job.connect()
    job.allreduce({0: (80_000, 4)})
    truth = job.truth[0][0].tobytes()
    final = [i for i, f in enumerate(job.frames) if len(f.payload) == job.mss and f.payload in truth]
    lost = final[len(final) // 2]
    ((finished,), report) = watch(job, [f for i, f in enumerate(job.frames) if i != lost])
    assert finished.measured.size == 80_000
    assert finished.measured.shown == 60_000 - job.mss
    assert finished.collective.missing == report["loss"]["hole_bytes"] == job.mss
    (group,) = report["groups"]
    assert [(x["sender"], x["hole_bytes"], x["lost"]) for x in group["links"] if x["hole_bytes"]] == [(1, job.mss, 0)]


def test_a_list_cut_short_never_passes_for_another_size() -> None:
    for mirrored in ([(1, 0), (0, 1)], port(4, 1)):
        job = Job(4, mirrored, seed=5, mss=60_000)
        job.connect()
        job.allreduce({0: (16 << 20, 4)})  # segments of 1 MiB, as 8 MiB have
        start = len(job.frames)
        for tag in range(1, 30):
            job.allreduce({tag: (64, 4)})
        of_link = [i for i in range(start) if job.frames[i].link == (1, 0)]
        for cut in (of_link[len(of_link) // 2], of_link[-30]):
            lost = {i for i in of_link if i >= cut}
            finished, report = watch(job, [f for i, f in enumerate(job.frames) if i not in lost])
            collective, measured = finished[0].collective, finished[0].measured
            assert collective.tag == 0 and collective.broken == [(1, 0)]
            # The other link tells the size and shows all chunks but 1, which this one sends in the middle of its list.
            alone = len(mirrored) == 2
            assert measured.size == (None if alone else 16 << 20)
            late = cut != of_link[len(of_link) // 2]
            assert (measured.shown == 16 << 20) == (late and not alone) and (alone or measured.shown >= 12 << 20)
            assert report["groups"][0]["allreduces"]["without_size"] == int(alone)
            assert [f.measured.size for f in finished[1:]] == [64] * 29


def test_tls_is_named() -> None:
    job = Job(2, port(2, 0), seed=1)
    job.connect()
    job.send((1, 0), b"\x16\x03\x01\x02\x00\x01" + bytes(600))
    job.send((0, 1), b"\x16\x03\x03\x00\x7a\x02" + bytes(600))
    for known in (True, False):
        observer = Observer(64, 1 << 20)
        if known:
            observer.add_group(job.group())
        observer.feed(job.block(job.frames), 0)
        observer.flush(1 << 62)
        report = observer.report()
        assert report["streams"]["tls"] >= 1 and report["strangers"] == []
        assert "inside TLS" in table(status_of(report))


def test_a_new_attempt_replaces_the_old_one() -> None:
    first, second = Job(3, port(3, 1), seed=1), Job(3, port(3, 1), seed=2, base_port=40100)
    observer = Observer(256, 1 << 20)
    for number, job in enumerate((first, second)):
        job.connect()
        job.allreduce({0: (6000, 4)})
        records = [StoreRecord("s/0", 0, r, *end, 3) for r, end in job.group().contexts[0].items()]
        # Of the new attempt one record arrives long before the others: no table may mix both.
        for record in records:
            ended, group = observer._rendezvous._add(record)
            assert (ended == "s/0") == (number == 1 and record.rank == 0)
            if ended:
                observer._end_group(ended)
            assert (group is not None) == (record.rank == 2)
            if group is not None:
                observer.add_group(group)
        observer.feed(job.block(job.frames), int(job.frames[-1].ts))
    observer.flush(1 << 62)
    groups = {g["name"]: (g["live"], g["allreduces"]["sizes"], g["coverage"]) for g in observer.report()["groups"]}
    assert groups == {"s/0": (False, [[6000, 1]], 1.0), "s/0 attempt 2": (True, [[6000, 1]], 1.0)}


# The command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flowcheck", "daemon", "--observe", *arguments],
        capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
    )  # fmt: skip


def test_command_on_files(shared: Path, tmp_path: Path) -> None:
    journal, copy = tmp_path / "journal.jsonl", tmp_path / "copy.pcap"
    file = shared / "captures" / "gloo" / "nano.pcap"
    done = command("-r", str(file), "--journal", str(journal), "--record", str(copy))
    assert done.returncode == 0, done.stderr
    assert "group 10.77.0.1:29500/0: 4 ranks" in done.stdout
    assert "can show 100.0 % of an all-reduce" in done.stdout
    assert "all-reduce sizes: 6 x 8 B" in done.stdout and "331 packets" in done.stdout
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    reduced = [line for line in lines if line["event"] == "collective" and line["kind"] == "all-reduce"]
    assert [(x["tag"], x["bytes"], x["coverage"], x["holes"]) for x in reduced] == [
        (tag, 8, 1.0, 0) for tag in (3, 6, 7, 8, 9, 10)
    ]
    assert reduced[0]["links"] == [[1, 0], [2, 1]] and reduced[0]["time"] > 1 << 60
    assert lines[-1]["event"] == "summary" and lines[-1]["packets"] == 331
    assert len(frames_of(copy)) == 331


def test_options_of_a_job_are_refused() -> None:
    with pytest.raises(UsageError, match="--store"):
        run(DaemonConfig(files=(Path("x.pcap"),), observe=True, store=Path("nowhere")))


def test_command_while_capturing(shared: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "observe_live.py"), str(shared / "captures/gloo/nano.pcap"),
         str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if "refused" in result:
        pytest.skip(f"this machine allows no network namespaces: {result['refused']}")
    assert result["first"] == f"listening ipc://{tmp_path}/s\n"
    status = result["status"]
    assert (status["packets"], status["drops"], status["coverage"], status["jobs"]) == (331, 0, 1.0, [])
    assert status["observe"]["groups"][0]["kinds"]["all-reduce"]["collectives"] == 6
    assert "no job is attached" in result["text"]
    assert "only observes" in result["restore"]
    assert result["code"] == 0 and "all-reduce sizes: 6 x 8 B" in result["table"], result
    assert "4 ranks" in result["table"] and "331 packets" in result["table"]
    assert "Traceback" not in result["stderr"]
