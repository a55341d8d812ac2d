"""Group calls over NCCL: what the lab's generator makes of several all-reduces, and what the decoder makes of that."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from nccl_job import NcclJob
from synthetic_job import Follower
from test_nccl_wire import ALGORITHM, KIND, NUMBER, inputs

from flowcheck.lab.nccl_wire import Call, frames_of, grouped
from flowcheck.lab.nccl_wire_job import ALGORITHMS, PROTOCOLS, Job
from flowcheck.lab.nccl_wire_split import traffic_class
from reconstruct.nccl import schedule
from reconstruct.nccl.plan import plan
from reconstruct.nccl.split import Collective
from reconstruct.nccl.split import Communicator as Planner
from reconstruct.nccl.versions import traits

VERSIONS = ("2.22.3", "2.23.4", "2.26.2", "2.28.9", "2.29.2", "2.30.7")


def carried(job: Job, sizes: list[int]) -> list[tuple[int, dict[int, tuple[int, int]]]]:
    """Of a group of float32 all-reduces, in order: which, and by channel (first element, elements)."""
    found = []
    for index, work in grouped(job, [Call("allreduce", [np.zeros(size, np.float32)] * job.ranks) for size in sizes]):
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for channel, _, (first, length) in work.layout.results:
            if length:
                parts[channel].append((first, length))
        found.append((index, {c: (min(p)[0], sum(n for _, n in p)) for c, p in parts.items()}))
    return found


def test_the_smallest_come_first_in_classes_of_a_quarter_of_a_power_of_two() -> None:
    assert [traffic_class(kib << 10) for kib in (0, 1, 3, 4, 5, 7, 8, 9, 10, 1 << 20, 1 << 22)] == [
        0, 1, 3, 4, 5, 7, 8, 8, 9, 76, 76]  # fmt: skip
    job = Job(2, version="2.28.9", algorithm="ring", protocol="simple", channels=2)
    # 8 and 9 KiB of traffic are one class, so they stay in order; 4 KiB come before them.
    assert [index for index, _ in carried(job, [9 << 7, 4 << 7, 8 << 7])] == [1, 0, 2]


def test_a_group_fills_one_channel_after_another() -> None:
    """Three tensors of 1 MiB over two channels with 3 MiB of traffic each: cells of 8 KiB, the second one is split."""
    job = Job(2, version="2.28.9", algorithm="ring", protocol="simple", channels=2)
    mib = 1 << 18
    assert carried(job, [mib] * 3) == [
        (0, {0: (0, mib)}), (1, {0: (0, mib // 2), 1: (mib // 2, mib // 2)}), (2, {1: (0, mib)})]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_decoder_and_generator_lay_a_group_alike(seed: int) -> None:
    rng = random.Random(seed)
    several = 0
    for _ in range(25):
        per_node, nodes = rng.choice([1, 2, 4]), rng.choice([2, 3, 4, 8])
        algorithm = rng.choice(ALGORITHMS)
        protocol = "simple" if algorithm == "nvlstree" else rng.choice(PROTOCOLS)
        channels = rng.choice([1, 2, 3, 4, 8])
        rails = rng.choice([r for r in (1, 2, 4) if r <= per_node])
        job = Job(nodes * per_node, per_node, rng.choice(VERSIONS), algorithm, protocol, channels, rails)
        comm = Planner(traits(job.version), job.ranks, channels, nodes, nvls_channels=channels, heads=job.heads)
        sizes = [rng.choice([rng.randint(1, 5000), rng.randint(5001, 300_000)]) for _ in range(rng.randint(2, 6))]
        calls = [
            Collective(KIND["allreduce"], ALGORITHM[algorithm], NUMBER[protocol], size, 4) for size in sizes
        ]  # fmt: skip
        plans = [plan(comm, calls, head) for head in range(job.heads if algorithm == "nvlstree" else 1)]
        made = grouped(job, [Call("allreduce", [np.zeros(size, np.float32)] * job.ranks) for size in sizes])
        assert [index for index, _ in made] == [planned.call for planned in plans[0]], (job, sizes)
        for place, (_, work) in enumerate(made):
            rows = [dict(zip(p[place].channels, p[place].rows, strict=True)) for p in plans]
            assert {lane.channel for lane in work.layout.lanes} == set(rows[0]), (job, sizes)
            several += len(rows[0]) > 1
            for lane in work.layout.lanes:
                row, ring = rows[lane.head][lane.channel], job.ring(lane.channel)
                up = schedule.UP if lane.up else schedule.DOWN
                position = ring.index(lane.sender) if algorithm == "ring" else up
                theirs = [tuple(at[-3:]) for at in schedule.places(row, position).tolist()]
                ours = [(piece.first * 4, piece.length * 4, piece.final) for piece in lane.pieces]
                assert [o[1:] for o in ours] == [t[1:] for t in theirs], (job, sizes)
                assert [o for o in ours if o[1]] == [t for t in theirs if t[1]], (job, sizes)
    assert several > 20


def test_every_tensor_of_a_group_is_reduced() -> None:
    job = Job(3, version="2.30.7", algorithm="ring", protocol="ll", channels=2)
    tensors = [inputs(3, count, seed) for seed, count in enumerate((70_000, 300, 9000))]
    for index, work in grouped(job, [Call("allreduce", values) for values in tensors]):
        assert work.result is not None
        np.testing.assert_allclose(work.result, np.sum(np.float64(tensors[index]), 0), rtol=1e-4, atol=1e-3)


def test_groups_before_2_22_are_refused() -> None:
    job = Job(2, version="2.21.5", algorithm="ring", protocol="ll")
    with pytest.raises(NotImplementedError, match=r"2\.21\.5.*2\.22"):
        frames_of(job, [[Call("allreduce", inputs(2, 100))] * 2])


def put_group(job: NcclJob, sizes: list[int]) -> None:
    """All-reduces in one group call, which c10d counts as one collective."""
    job.collective()
    for _, work in grouped(job.nccl, [Call("allreduce", job._inputs(size)) for size in sizes]):
        job.wire.put(work)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("algorithm", "protocol", "world", "nccl"),
    [
        ("ring", "ll", 2, {"channels": 4, "version": "2.28.9"}),
        ("ring", "simple", 3, {"channels": 2, "version": "2.22.3"}),
        ("tree", "ll128", 4, {"channels": 2, "gpus_per_node": 2, "version": "2.30.7"}),
    ],
)
def test_steps_with_groups_around_their_buckets_are_right_or_not_claimed(
    algorithm: str, protocol: str, world: int, nccl: dict[str, Any]
) -> None:
    for seed in (1, 2):
        rng = random.Random(seed)
        job = NcclJob(
            world, nccl={"algorithm": algorithm, "protocol": protocol, **nccl}, seed=seed,
            told={"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol},
        )  # fmt: skip
        job.attach()
        for _ in range(3):
            if job.truth and not job.has_rebuilt:
                job.rebuild()
            # Of a bucket's size (SIZES) first, behind the others, or not at all.
            sizes = [rng.choice([120, 96, 40, rng.randint(1, 50_000)]) for _ in range(rng.randint(2, 4))]
            before = rng.random() < 0.5
            if before:
                put_group(job, sizes)
            job.reduction()
            if not before:
                put_group(job, sizes)
            job.optimizer_step()
        follower = Follower(job).run()
        follower.verify()
        assert len(follower.story) == 3 and follower.lost is None
