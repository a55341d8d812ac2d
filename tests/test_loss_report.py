"""What status and log say of losses: bytes by cause, counters beside, likely cause and remedy."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gloo_traffic import Frame, Job
from tcp_frames import MS, block_of
from test_doctor import gloo_job, nccl
from tunnel_frames import frames_of

from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire_job import Job as NcclJob
from flowcheck.loss import LossReport
from flowcheck.pipeline import Limits, Pipeline
from mirror.block import Block, Loss, SourceCounters
from mirror.faults import Faults
from mirror.faulty import FaultSource
from mirror.loss import CAUSES, MIRROR, NIC, RING, TRUNCATED, UNKNOWN
from reconstruct.steps import Waits

ROOT = Path(__file__).resolve().parent.parent


class Watch:
    """A pipeline with its report, as the capture thread has them."""

    def __init__(self, *, live: bool = True) -> None:
        self.pipeline = Pipeline(Limits(256, 1 << 24, 1 << 20), Waits())
        self.report = LossReport(self.pipeline.losses, live=live)
        self.counters = SourceCounters()
        self.said: list[str] = []
        self.now = 0

    def feed(self, block: Block) -> None:
        self.now = max(self.now, int(block.ts.max()))
        self.pipeline.feed(block, self.now)

    def told(self) -> dict[str, Any]:
        """The status, after everything has come."""
        self.pipeline.flush(self.now)
        self.look()
        by_cause = self.report.status["bytes"]
        holes = self.pipeline.tcp.counters()["hole_bytes"] + self.pipeline.roce.counters()["hole_bytes"]
        assert sum(by_cause.values()) == self.report.status["total"] == holes and set(by_cause) == set(CAUSES)
        return self.report.status

    def look(self) -> None:
        self.said += self.report.update({"mon0": self.counters}, self.pipeline.counters(), self.now)

    def job(self, job: Job, frames: list[Frame], cut: int = 0) -> dict[str, Any]:
        for at in range(0, len(frames), 50):
            block = job.block(frames[at : at + 50])
            if cut:
                block.caplen = np.minimum(block.caplen, cut)
                block.wirelen = block.caplen.copy()
            self.feed(block)
            if at % 500 == 0:
                self.look()
        return self.told()


def causes(status: dict[str, Any]) -> set[str]:
    return {cause for cause, count in status["bytes"].items() if count}


def test_nothing_is_said_where_nothing_is_missing() -> None:
    job, watch = gloo_job(), Watch()
    status = watch.job(job, job.frames)
    assert status["total"] == 0 and status["likely"] == status["remedy"] == "" and not watch.said
    assert status["frames"] == {"received": len(job.frames), "ring": 0, "nic": 0, "truncated": 0}
    assert watch.pipeline.losses.blocks == 0


def test_every_packet_twice_is_no_loss() -> None:
    job, watch = gloo_job(), Watch()
    status = watch.job(job, [frame for frame in job.frames for _ in range(2)])
    assert status["total"] == 0 and not watch.said
    assert status["duplicate_bytes"] == sum(len(frame.payload) for frame in job.frames)


@pytest.mark.parametrize(("mss", "limit"), [(8948, 1514), (1448, 1400)])
def test_full_sized_frames_missing_is_the_mtu_of_the_mirrors_way(mss: int, limit: int) -> None:
    job, watch = gloo_job(mss=mss, gap_ns=MS), Watch()
    status = watch.job(job, [frame for frame in job.frames if 54 + len(frame.payload) <= limit])
    assert causes(status) <= {MIRROR, UNKNOWN} and status["bytes"][MIRROR] > 0.9 * status["total"]
    assert "Full-sized frames are missing while small ones pass" in status["likely"]
    assert "ip link set dev mon0 mtu 9216" in status["remedy"]
    assert any("Full-sized frames" in line and line.startswith("loss (mirror, ") for line in watch.said)


def test_full_sized_frames_missing_from_a_recording_of_roce(shared: Path) -> None:
    whole = frames_of(shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng")
    kept = [frame for frame in whole if len(frame[1]) <= 1514]
    watch = Watch(live=False)
    for at in range(0, len(kept), 50):
        part = kept[at : at + 50]
        watch.feed(block_of([data for _, data in part], [time for time, _ in part]))
    status = watch.told()
    assert "Full-sized frames are missing" in status["likely"] and "mtu 9216" in status["remedy"]
    assert any("Full-sized frames" in line for line in watch.said)


def test_cut_frames_and_sampled_ones_are_told_apart() -> None:
    job = gloo_job(mss=1448, gap_ns=MS)
    watch = Watch()
    cut = watch.job(job, job.frames, cut=128)
    assert causes(cut) == {TRUNCATED} and "cut" in cut["likely"] and "truncate_size 0" in cut["remedy"]
    assert cut["frames"]["truncated"] == sum(54 + len(frame.payload) > 128 for frame in job.frames)
    long = Job(4, job.mirrored, seed=3, gap_ns=MS)
    long.connect()
    for tag in range(40):
        long.allreduce({tag: (400_000, 4)})
    watch = Watch()
    sampled = watch.job(long, long.frames[:: 20])
    assert TRUNCATED not in causes(sampled)
    told = [line for line in watch.said if "samples" in line]
    assert told and "turn sampling off" in told[0] and told[0] not in cut["likely"]


def test_random_loss_in_the_mirror_is_just_that() -> None:
    job = gloo_job(mss=1448, gap_ns=MS)
    dice = random.Random(1)
    watch = Watch()
    status = watch.job(job, [frame for frame in job.frames if dice.random() > 0.02])
    assert causes(status) <= {MIRROR, UNKNOWN} and "Frames were lost on the way to the mirror" in status["likely"]
    assert len([line for line in watch.said if "(mirror," in line]) == 1  # said once, however often it is looked


def test_drops_of_this_machine_come_with_their_remedy_and_in_one_line_each() -> None:
    """A window in which the ring, then one in which the interface says that it lost frames."""
    job = gloo_job(mss=1448, gap_ns=MS)
    watch, gone = Watch(), (range(400, 430), range(900, 930))
    low = [job.frames[part.start - 1].ts for part in gone]
    high = [job.frames[part.stop].ts for part in gone]
    kept = [frame for at, frame in enumerate(job.frames) if not any(at in part for part in gone)]
    for at in range(0, len(kept), 50):
        block = job.block(kept[at : at + 50])
        if at == 500:
            block.losses = (Loss(RING, low[0], high[0]),)
            watch.counters = SourceCounters(drops=30)
        if at == 1000:
            block.losses = (Loss(NIC, low[1], high[1]),)
            watch.counters = SourceCounters(drops=30, interface_drops=30)
        watch.feed(block)
    status = watch.told()
    sizes = [sum(len(job.frames[at].payload) for at in part) for part in gone]
    assert status["bytes"] == {**dict.fromkeys(CAUSES, 0), RING: sizes[0], NIC: sizes[1]}
    assert status["frames"]["ring"] == status["frames"]["nic"] == 30
    assert len(watch.said) == 2
    assert any("--ring-mib" in line and line.startswith("loss (ring, ") for line in watch.said)
    assert any("ethtool -G mon0" in line and line.startswith("loss (nic, ") for line in watch.said)


def test_one_direction_alone_proves_nothing_and_says_what_to_mirror() -> None:
    job = Job(2, [(1, 0)], seed=3, gap_ns=MS)
    job.connect()
    for tag in range(6):
        job.allreduce({tag: (400_000, 4)})
    watch = Watch()
    dice = random.Random(1)
    status = watch.job(job, [frame for frame in job.frames if dice.random() > 0.02])
    assert causes(status) == {UNKNOWN} and "mirror both directions" in status["remedy"]


def test_lost_roce_packets_of_unknown_messages_are_counted_beside() -> None:
    frames = nccl(NcclJob(2, protocol="ll", algorithm="ring"), [(Port(0, 0), "in"), (Port(0, 0), "out")], 40, 300)
    dice, watch = random.Random(5), Watch()
    kept = [frame for frame in frames if dice.random() > 0.05]
    for at in range(0, len(kept), 50):
        part = kept[at : at + 50]
        watch.feed(block_of([data for _, data in part], [time for time, _ in part]))
    status = watch.told()
    counted = watch.pipeline.roce.counters()
    known = counted["hole_bytes"] > 0
    assert sum(status["packets"].values()) > 0 and (sum(status["packets"].values()) == counted["lost_packets"]) != known
    assert status["kinds"] and "Full-sized" not in status["likely"]


@pytest.fixture(scope="module")
def stopped() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "loss_live.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    if "refused" in result:
        pytest.skip(f"this machine allows no network namespaces: {result['refused']}")
    return result


def test_a_reader_stopped_under_load_reports_exactly_the_holes_found(stopped: dict[str, Any]) -> None:
    assert stopped["failure"] is None
    assert stopped["drops"] > 500 and stopped["packets"] + stopped["drops"] == stopped["sent"]
    assert stopped["hole_bytes"] == stopped["drops"] * stopped["payload"]
    assert stopped["status"]["bytes"] == {**dict.fromkeys(CAUSES, 0), RING: stopped["hole_bytes"]}
    assert stopped["status"]["frames"]["ring"] == stopped["drops"]
    assert [line for line in stopped["said"] if "--ring-mib" in line] == stopped["said"]


def test_a_rise_of_the_interfaces_drop_counter_is_told_with_its_time(stopped: dict[str, Any]) -> None:
    assert stopped["nic"] == [[], [], [["nic", True]], []]


class _Source:
    """Blocks of one frame, each with a loss of its own."""

    name, problems = "mon0", ()

    def __init__(self, count: int) -> None:
        self.left = [replace(block_of([bytes(60)], at), losses=(Loss(RING, at, at + 1),)) for at in range(count)]

    @property
    def finished(self) -> bool:
        return not self.left

    def read(self, timeout: float) -> Block | None:
        return self.left.pop(0) if self.left else None

    def release(self, block: Block) -> None:
        pass

    def counters(self) -> SourceCounters:
        return SourceCounters()

    def close(self) -> None:
        pass


def test_injected_faults_hide_no_loss_of_the_source() -> None:
    source = FaultSource(_Source(200), {"mon0#0": (0, Faults.parse("drop=0.5,seed=3"))})
    blocks = []
    while (block := source.read(0.0)) is not None:
        blocks.append(block)
    assert 50 < len(blocks) < 150
    told = [loss for block in blocks for loss in block.losses]
    assert told == [Loss(RING, at, at + 1) for at in range(len(told))] and len(told) > 190
