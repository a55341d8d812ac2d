"""Which chunks of NCCL's all-reduces over four hosts `flowcheck doctor` says pass, on generated frames.

What passes is counted here from what the generator sent; the sentences come from the decoder's schedule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from nccl_job import NcclJob as MadeJob
from nccl_setup_frames import Wire, streams
from nccl_traffic import group_of
from test_doctor import NO_COUNTERS, found, severities
from tunnel_frames import Frame, block_at

from flowcheck import jobfile
from flowcheck.doctor.diagnose import diagnose
from flowcheck.doctor.exam import Examination
from flowcheck.doctor.finding import OK, PROBLEM
from flowcheck.doctor.nccl_chunks import Coverage, Pair, coverage
from flowcheck.doctor.seen import Seen
from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire import Call, Communicator, frames_of, mirrored
from flowcheck.lab.nccl_wire_job import Job
from mirror.capfile import CaptureFileSource
from mirror.record import PcapRecorder
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.refusals import REFUSALS

IN, OUT = "in", "out"
Ports = list[tuple[Port, str]]


def both(node: int, rails: int = 1) -> Ports:
    return [(Port(node, rail), way) for rail in range(rails) for way in (IN, OUT)]


def traffic(job: Job, ports: Ports, size: int = 400_000) -> list[Frame]:
    inputs = [np.random.default_rng(rank).random(size, np.float32) for rank in range(job.ranks)]
    return [(ts, data) for ts, _, data in mirrored(frames_of(job, [Call("allreduce", inputs)] * 2), ports)]


def examine(frames: Sequence[Frame], group: NcclGroup | None) -> Seen:
    exam = Examination(1024, group=group)
    now = 0
    for start in range(0, len(frames), 500):
        block = block_at(list(frames[start : start + 500]))
        now = max(now, int(block.ts.max()))
        exam.feed(block, now)
    exam.flush(now)
    return exam.seen("FILE", live=False, counters=NO_COUNTERS)


def told(seen: Seen) -> list[tuple[str, str]]:
    return [(one.severity, one.sentence.split(": ", 1)[1]) for one in diagnose(seen) if one.name == "chunks"]


RING = Job(4, algorithm="ring", protocol="ll", channels=2)
TREE = Job(4, algorithm="tree", protocol="ll", channels=2, version="2.23.4")
NVLS = Job(8, 2, "2.28.9", "nvlstree", "simple", channels=2, rails=2, mtu=4096)
ALONE = " What passes once cannot be had again when its frame is lost."


# One test for each sentence


@pytest.mark.parametrize(
    ("ports", "severity", "sentence"),
    [
        # Rank 1 sends all but chunk 2, rank 0 all but chunk 1; the others come twice.
        (both(1), OK, "of the 4 chunks of an all-reduce, chunks 1, 2 once; chunks 0, 3 more than once." + ALONE),
        ([(Port(1, 0), OUT)], PROBLEM, "of the 4 chunks of an all-reduce, chunk 1 never; chunks 0, 2, 3 once."),
        ([*both(1), *both(3)], OK, "of the 4 chunks of an all-reduce, chunks 0, 1, 2, 3 more than once."),
    ],
)
def test_chunks_of_a_ring(ports: Ports, severity: str, sentence: str) -> None:
    seen = examine(traffic(RING, ports), group_of(RING))
    assert told(seen) == [(severity, sentence)]
    assert found(seen)["chunks"].sentence.startswith("NCCL ring between 10.77.0.")
    assert ", channels 0, 1: " in found(seen)["chunks"].sentence
    assert ("flowcheck plan" in found(seen)["chunks"].remedy) == (severity == PROBLEM)


@pytest.mark.parametrize(
    ("ports", "sentences"),
    [
        # Tree 0 (channel 0): 0 - 2, 2 - 1, 2 - 3; tree 1 (channel 1): 3 - 1, 1 - 0, 1 - 2; the first of each is the
        # root. "out" of the switch is what a node receives.
        ([(Port(1, 0), OUT)], [(OK, "channels 0, 1: every slice of the final values passes once." + ALONE)]),
        (both(1), [
            (OK, "channel 0: every slice of the final values passes once." + ALONE),
            (OK, "channel 1: every slice of the final values passes more than once."),
        ]),
        ([(Port(0, 0), OUT)], [
            (PROBLEM, "channel 0: no slice of the final values passes. What passes are sums on their way up, which are "
                      "not final."),
            (OK, "channel 1: every slice of the final values passes once." + ALONE),
        ]),
        ([(Port(3, 0), IN)], [
            (PROBLEM, "channel 0: no slice of the final values passes. What passes are sums on their way up, which are "
                      "not final."),
            (OK, "channel 1: every slice of the final values passes once." + ALONE),
        ]),
    ],
)  # fmt: skip
def test_slices_of_trees(ports: Ports, sentences: list[tuple[str, str]]) -> None:
    seen = examine(traffic(TREE, ports), group_of(TREE))
    full = [(one.severity, one.sentence.split(", channel", 1)) for one in diagnose(seen) if one.name == "chunks"]
    assert [(severity, "channel" + tail) for severity, (_, tail) in full] == sentences
    assert all(head.startswith("NCCL tree between 10.77.0.") for _, (head, _) in full)


def test_heads_of_an_nvlstree() -> None:
    seen = examine(traffic(NVLS, both(1, 2)), group_of(NVLS))
    assert {severity for severity, _ in told(seen)} == {OK}
    assert "of the 2 heads of an all-reduce, heads 0, 1 " in told(seen)[0][1]
    seen = examine(traffic(NVLS, both(1)), group_of(NVLS))
    assert {severity for severity, _ in told(seen)} == {PROBLEM}
    assert "head 1 never" in told(seen)[0][1] and "every head's rail" in found(seen)["chunks"].remedy


def test_what_is_counted_is_what_was_sent() -> None:
    """The schedule's counts against those of the generator's own pieces."""
    for job, ports in ((RING, both(2)), (TREE, both(2)), (TREE, [(Port(0, 0), OUT)])):
        comm = Communicator(job)
        from flowcheck.lab.nccl_wire import Work

        inputs = [np.zeros(400_000, np.float32)] * job.ranks
        work = Work(job, Call("allreduce", inputs))
        counts: dict[int, dict[int, int]] = {}
        for lane in work.layout.lanes:
            link = (job.ports[lane.sender], IN), (job.ports[lane.receiver], OUT)
            shown = any(end in ports for end in link)
            for piece in lane.pieces:
                if piece.final and piece.length:
                    at = counts.setdefault(lane.channel, {})
                    at[piece.first] = at.get(piece.first, 0) + shown
        seen = examine(traffic(job, ports), group_of(job))
        for one in seen.coverage:
            for channel in one.channels:
                own = list(counts[channel].values())
                assert bool(one.never) == (min(own) == 0) and bool(one.once) == (1 in own), (job, ports, one)
        assert {c for one in seen.coverage for c in one.channels} == set(range(comm.job.channels))


# When it must not be said


def test_idle_channels_leave_it_open_which_connections_are_seen() -> None:
    """A small all-reduce uses one channel of two."""
    seen = examine(traffic(RING, both(1), size=2000), group_of(RING))
    assert seen.unplaced and not seen.coverage
    assert "run this longer" in found(seen)["unplaced"].remedy
    assert "as many links one way as the other" in found(seen)["chunks"].sentence
    assert severities(seen) == {}


def test_without_job_file_and_set_up_no_chunk_is_named() -> None:
    seen = examine(traffic(RING, both(1)), None)
    assert not seen.coverage and not seen.unplaced and "chunks 1" not in found(seen)["chunks"].sentence


def test_another_jobs_file_says_nothing_of_this_one() -> None:
    other = group_of(Job(4, algorithm="ring", members=(8, 9, 10, 11)))
    seen = examine(traffic(RING, both(1)), other)
    assert not seen.coverage and not seen.unplaced


def test_links_that_fit_two_algorithms_differently_are_left_open() -> None:
    group = group_of(Job(4, channels=1), every=True)
    assert coverage(group, {("10.77.0.1", "10.77.0.2"): Pair(1, 1)}) is not None
    assert coverage(group, {("10.77.0.1", "10.77.0.2"): Pair(3, 1)}) is None
    assert coverage(group, {("10.77.0.1", "10.77.0.2"): Pair(0, 2)}) is None
    assert coverage(group, {("10.9.0.1", "10.9.0.2"): Pair(1, 1)}) == []


def test_queue_pairs_of_a_connection_count_once() -> None:
    job = Job(4, algorithm="ring", protocol="ll", channels=2, qps=2, split=True)
    assert told(examine(traffic(job, both(1)), group_of(job))) == told(examine(traffic(RING, both(1)), group_of(RING)))


def test_buffers_of_another_size_are_named_with_the_remedy() -> None:
    frames = traffic(RING, both(1))
    assert not examine(frames, None).strange_rooms
    changed = []
    for ts, data in frames:
        if data[42] == 10 and len(data) == 106:  # an entry: its room lies behind the address
            data = data[:78] + (131_000).to_bytes(4, "little") + data[82:]
        changed.append((ts, data))
    finding = found(examine(changed, None))["buffer-sizes"]
    assert finding.severity == PROBLEM and "rooms of 131000 bytes" in finding.sentence
    assert REFUSALS["buffer-sizes"].remedy in finding.remedy and REFUSALS["buffer-sizes"].cost in finding.remedy
    # Entries alone, of which no message came, are not believed.
    alone = [(ts, data) for ts, data in changed if data[42] == 10]
    assert not examine(alone, None).strange_rooms


# Where the facts come from


def test_the_set_up_in_the_capture_tells_rings() -> None:
    job = Job(4, algorithm="ring", protocol="ll", channels=2, version="2.23.4")
    frames = Wire().all(streams(Communicator(job))).frames + traffic(job, both(1))
    seen = examine(frames, None)
    assert "chunks 1, 2 once; chunks 0, 3 more than once" in found(seen)["chunks"].sentence


def test_the_job_file_tells_them(tmp_path: Path) -> None:
    job = MadeJob(4, nccl={"algorithm": "ring", "protocol": "ll", "version": "2.23.4"},
                  told={"NCCL_ALGO": "allreduce:ring"})  # fmt: skip
    job.attach()
    tensors = {key: (spec, np.zeros(spec.nbytes, np.uint8)) for key, spec in job.description.tensors()}
    jobfile.write(tmp_path / "job.safetensors", job.description, tensors)
    recorder = PcapRecorder(tmp_path / "a.pcap")
    recorder.write(block_at(traffic(job.nccl, both(1))))
    recorder.close()
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "flowcheck", "doctor", "-r", str(tmp_path / "a.pcap"), "--job",
         str(tmp_path / "job.safetensors"), "--json"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (sentence,) = [one["sentence"] for one in answer["findings"] if one["name"] == "chunks"]
    assert "channel 0: of the 4 chunks of an all-reduce, chunks 1, 2 once; chunks 0, 3 more than once" in sentence
    assert answer["figures"]["coverage"][0]["once"] == [1, 2]


def test_recorded_traffic_of_two_hosts(shared: Path) -> None:
    source = CaptureFileSource([shared / "captures" / "nccl" / "allreduce+p2p.pcapng"])
    exam = Examination(1024)
    while (block := source.read(0.0)) is not None:
        exam.feed(block, int(block.ts.max()))
        source.release(block)
    exam.flush(1 << 62)
    source.close()
    seen = exam.seen("FILE", live=False, counters=NO_COUNTERS)
    assert severities(seen) == {}
    assert all(isinstance(one, Coverage) and one.parts == 2 for one in seen.coverage)
