"""Messages whose packets hold parts of LL128's units: a small path MTU, or messages cut over queue pairs."""

from __future__ import annotations

import random

import pytest
from nccl_traffic import Rig, Sender, disordered, group_of, lossy, seen_at
from test_nccl_decoder import BIG, SIZES, _data_frames, _queue_pairs, traffic

from flowcheck.lab.nccl_wire_job import Job

JOBS = [
    Job(2, version="2.19.4", algorithm="ring", protocol="ll128", mtu=512),
    Job(2, version="2.28.9", algorithm="ring", protocol="ll128", mtu=256),
    Job(4, version="2.28.9", algorithm="tree", protocol="ll128", channels=2, mtu=512),
    Job(3, version="2.19.4", algorithm="ring", protocol="ll128", qps=2, split=True),
    Job(2, version="2.28.9", algorithm="ring", protocol="ll128", channels=2, qps=4, split=True, mtu=4096),
    Job(2, version="2.21.5", algorithm="ring", protocol="ll128", qps=3, split=True, mtu=512),
]


def name(job: Job) -> str:
    return f"{job.version}-{job.algorithm}-q{job.qps}-mtu{job.mtu}"


@pytest.mark.parametrize("job", JOBS, ids=name)
def test_every_value_comes_from_parts_of_units(job: Job) -> None:
    sender, sent = traffic(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    rig.finish()
    assert rig.reduced == [0, 2, 3] and not rig.wrong(sender.results) and not rig.conflicts
    assert all(rig.landing(tag).complete for tag in (0, 2, 3))


@pytest.mark.parametrize("job", JOBS, ids=name)
def test_loss_and_disorder_give_no_wrong_value(job: Job) -> None:
    rng = random.Random(name(job))
    sender, sent = traffic(job)
    rig = Rig(group_of(job), SIZES)
    rig.feed(disordered(rng, lossy(rng, seen_at(job, sent, 0, "in", "out"), 0.01), 0.01), 61)
    rig.finish()
    assert not rig.wrong(sender.results) and not rig.conflicts
    assert rig.landing(0) is not None and rig.landing(0).covered > 0.9 * rig.landing(0).size


@pytest.mark.parametrize(("number", "places"), [
    (160, [(0, 120), (128, 120), (256, 120), (384, 120)]),                      # the first four lines of a unit
    (161, [(120, 8), (248, 8), (376, 8), (504, 456)]),                          # the other four: 112 bytes each, and 8
])  # fmt: skip
def test_a_lost_packet_is_a_hole_of_its_lines(number: int, places: list[tuple[int, int]]) -> None:
    job = JOBS[0]
    sender = Sender(job)
    sent = sender.reduce(BIG)
    data = _data_frames(sent, _queue_pairs(sent)[0])
    rig = Rig(group_of(job), SIZES)
    first = next(at for at, k in enumerate(data) if sent[k][2][42] == 6 and at > 0)  # of message 1, which is final
    rig.feed([item for at, item in enumerate(sent) if at != data[first + number]])
    rig.finish()
    assert not rig.wrong(sender.results)
    unit = number // 2 * 960
    assert rig.landing(0).holes() == [[unit + offset, length] for offset, length in places]


def test_a_wrong_flag_in_a_part_of_a_unit_is_no_value() -> None:
    job = JOBS[0]
    sender = Sender(job)
    sent = sender.reduce(BIG)
    data = _data_frames(sent, _queue_pairs(sent)[0])
    first = next(at for at, k in enumerate(data) if sent[k][2][42] == 6 and at > 0)
    time, link, frame = sent[data[first + 7]]
    broken = bytearray(frame)
    broken[54 + 2 * 128 + 121] ^= 4
    sent[data[first + 7]] = time, link, bytes(broken)
    rig = Rig(group_of(job), SIZES)
    rig.feed(sent)
    rig.finish()
    assert not rig.reduced and rig.landing(0).poisoned and rig.conflicts
    landing = rig.landing(0)
    assert all((landing.data[a:b] == sender.results[0][a:b]).all() for a, b in landing.ranges())
