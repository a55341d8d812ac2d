"""The NCCL decoder under loss: no byte that is not the cluster's own, holes where packets are missing and nowhere else,
and nothing missing that any link showed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nccl_traffic import Rig, Sender, Sent, disordered, group_of, lossy, seen_at
from test_nccl_decoder import _data_frames, _queue_pairs, name

from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.nccl_wire_payload import storage

JOBS = [
    (Job(2, version="2.19.4", algorithm="ring", protocol="ll", channels=2), "float32"),
    (Job(3, version="2.21.5", algorithm="ring", protocol="simple", channels=2, mtu=4096), "bfloat16"),
    (Job(2, version="2.28.9", algorithm="ring", protocol="ll128", channels=4, mtu=4096), "float32"),
    (Job(4, version="2.23.4", algorithm="tree", protocol="ll128", channels=2), "float16"),
    (Job(4, version="2.30.7", algorithm="tree", protocol="simple", channels=2), "float32"),
    (Job(6, gpus_per_node=2, version="2.28.9", algorithm="nvlstree", protocol="simple", channels=2, rails=2, mtu=4096),
     "bfloat16"),
    (Job(3, version="2.19.4", algorithm="ring", protocol="ll", qps=2), "float32"),
]  # fmt: skip


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05])
@pytest.mark.parametrize(("job", "dtype"), JOBS, ids=lambda value: name(value) if isinstance(value, Job) else value)
def test_nothing_wrong_is_ever_placed(job: Job, dtype: str, rate: float) -> None:
    """Buckets with a barrier and a broadcast between, one node mirrored both ways, packets lost and out of order."""
    rng = random.Random(f"{name(job)} {rate}")
    sender = Sender(job)
    big, item = 30_000, storage(dtype).itemsize
    sent = sender.reduce(big, dtype) + sender.barrier() + sender.reduce(big, dtype) + sender.reduce(big // 3, dtype)
    sent += sender.broadcast(np.arange(40, dtype=np.int32)) + sender.reduce(big, dtype)
    shown = disordered(rng, lossy(rng, seen_at(job, sent, job.nodes - 1, "in", "out"), rate), 0.01)
    rig = Rig(group_of(job), {(big * item, item), (big // 3 * item, item)})
    rig.feed(shown, 61)
    rig.finish()
    assert not rig.wrong(sender.results) and not rig.conflicts
    first = rig.landing(0)
    assert first is not None and first.covered > (1 - 4 * rate) * first.size - 8192


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_holes_are_what_the_lost_packets_carried(protocol: str) -> None:
    """Packet by packet: what is lost on one link is missing exactly if no other packet shows it."""
    job = Job(2, version="2.19.4", algorithm="ring", protocol=protocol)
    rng = random.Random(protocol)
    count = 9_000
    sender = Sender(job)
    sent = sender.reduce(count) + sender.reduce(count)
    frames = [at for qp in _queue_pairs(sent)[:2] for at in _data_frames(sent, qp)]
    parts = [_alone(job, sent, at, count) for at in frames]
    lost = set(rng.sample(range(len(frames)), 7))
    gone = {frames[k] for k in lost}
    rig = Rig(group_of(job), {(4 * count, 4)})
    rig.feed([item for at, item in enumerate(sent) if at not in gone])
    rig.finish()
    assert not rig.wrong(sender.results)
    for tag in (0, 1):
        expected = np.zeros(4 * count, bool)
        for k, part in enumerate(parts):
            if k not in lost:
                expected |= part[tag]
        landing = rig.landing(tag)
        assert landing is not None
        known = np.ones(4 * count, bool)
        for offset, length in landing.holes():
            known[offset : offset + length] = False
        assert (known == expected).all(), tag


def _alone(job: Job, sent: Sent, number: int, count: int) -> list[np.ndarray]:
    """By tag: the bytes that are known less when a frame is missing."""
    rig = Rig(group_of(job), {(4 * count, 4)})
    rig.feed(sent[:number] + sent[number + 1 :], 1000)
    rig.finish()
    found = []
    for tag in (0, 1):
        missing = np.zeros(4 * count, bool)
        landing = rig.landing(tag)
        assert landing is not None
        for offset, length in landing.holes():
            missing[offset : offset + length] = True
        found.append(missing)
    return found


def test_two_links_repair_each_other() -> None:
    """On a ring of four nodes, two edges show the middle chunks twice."""
    job = Job(4, version="2.28.9", algorithm="ring", protocol="simple", mtu=4096)
    count = 60_000
    sender = Sender(job)
    sent = sender.reduce(count)
    rng = random.Random(5)
    here = seen_at(job, sent, 1, "in", "out")
    shown = lossy(rng, here, 0.03)
    both, one, other = (Rig(group_of(job), {(4 * count, 4)}) for _ in range(3))
    both.feed(shown)
    kept = {item[0] for item in shown}
    one.feed([item for item in seen_at(job, sent, 1, "in") if item[0] in kept])
    other.feed([item for item in seen_at(job, sent, 1, "out") if item[0] in kept])
    known = []
    for rig in (both, one, other):
        rig.finish()
        landing = rig.landing(0)
        assert landing is not None and not rig.wrong(sender.results)
        mask = np.ones(4 * count, bool)
        for offset, length in landing.holes():
            mask[offset : offset + length] = False
        known.append(mask)
    assert (known[0] == (known[1] | known[2])).all()
    assert known[0].sum() > max(known[1].sum(), known[2].sum())


def test_a_lost_barrier_is_known_from_the_other_link() -> None:
    job = Job(2, version="2.19.4", algorithm="ring", protocol="ll")
    sender = Sender(job)
    start = sender.reduce(20_000)
    barrier = sender.barrier()
    sent = start + [item for item in barrier if item[1][0].node == 1] + sender.reduce(20_000)
    rig = Rig(group_of(job), {(80_000, 4)})
    rig.feed(sent)
    rig.finish()
    assert rig.reduced == [0, 2] and not rig.wrong(sender.results)
