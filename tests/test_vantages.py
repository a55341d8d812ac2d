"""Vantage groups end to end: tenants with the same addresses stay apart, planes of one fabric are one stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic_job import SyntheticJob, right, trained
from tunnel_frames import Frame, block_at, erspan2, vxlan

from flowcheck.config import DaemonConfig
from flowcheck.daemon import declared_vantages
from flowcheck.errors import UsageError
from flowcheck.groups import same_trainers
from flowcheck.observation import table
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.vantages import Vantages, parse
from mirror.capfile import CaptureFileSource
from mirror.record import PcapRecorder
from reconstruct.lr import Predictor
from reconstruct.observe.observer import Observer
from reconstruct.steps import StepLost, StepReady, Waits

Wrap = Callable[[int, bytes], bytes]
A, B = "a=erspan2 10.9.0.1>10.9.0.2#5", "b=erspan2 10.9.0.1>10.9.0.2#6"


def frames_of(job: SyntheticJob, wrap: Wrap = lambda number, frame: frame) -> list[Frame]:
    block = job.wire.block(job.wire.frames)
    return [
        (ts, wrap(number, block.base[at : at + size].tobytes()))
        for number, (at, size, ts) in enumerate(
            zip(block.offset.tolist(), block.caplen.tolist(), block.ts.tolist(), strict=True)
        )
    ]


def session(number: int) -> Wrap:
    return lambda _, frame: erspan2(frame, number)


class Playing:
    """Jobs followed by one pipeline; their steps and gradients, by job."""

    def __init__(self, jobs: dict[str, SyntheticJob], vantages: Vantages, told: dict[str, str | None]) -> None:
        self.pipeline = Pipeline(Limits(256, 1 << 20, 1 << 26), Waits(), vantages)
        self.jobs = jobs
        self.gradients: dict[str, dict[int, dict[int, bytes]]] = {name: {} for name in jobs}
        self.steps: dict[str, dict[int, StepReady]] = {name: {} for name in jobs}
        self.lost: dict[str, StepLost] = {}
        for name, job in jobs.items():
            description = dataclasses.replace(job.description)
            description.group = dataclasses.replace(description.group, vantage=told.get(name))
            self.pipeline.add_job(name, description, Predictor(description), job.attached)

    def run(self, frames: Iterable[Frame], vantage: Callable[[int], int] = lambda number: 0) -> Playing:
        """vantage: of the interface on which the frame with this number came."""
        words = sorted(((at, name, word) for name, job in self.jobs.items() for at, word in job.words),
                       key=lambda one: one[0])
        now = 0
        for number, frame in enumerate(sorted(frames, key=lambda one: one[0])):
            while words and words[0][0] <= frame[0]:
                now, name, word = words.pop(0)
                word(self.pipeline.trackers[name])
                self.take(now)
            now = max(now, frame[0])
            self.pipeline.feed(block_at([frame], vantage(number)), now)
        for at, name, word in words:
            now = max(now, at)
            word(self.pipeline.trackers[name])
        self.pipeline.flush(now)
        self.take(now, True)
        return self

    def take(self, now: int, final: bool = False) -> None:
        for name, event in self.pipeline.poll(now, final):
            if isinstance(event, StepReady):
                self.gradients[name][event.step] = {i: g.tobytes() for i, g in event.gradients.items()}
                self.steps[name][event.step] = event
                self.pipeline.trackers[name].applied(event.step)
            elif isinstance(event, StepLost):
                self.lost[name] = event

    def right(self) -> dict[str, int]:
        """Whole steps by job; what is known of any must be the trainer's own gradients."""
        for name, steps in self.steps.items():
            for step, one in steps.items():
                truth = self.jobs[name].truth[step]
                assert right(one, self.gradients[name][step], truth), f"{name}: step {step} has wrong gradients"
        return {
            name: sum(1 for one in steps.values() if not one.blank and not one.lost)
            for name, steps in self.steps.items()
        }


def tenants() -> dict[str, SyntheticJob]:
    """Two jobs with the same addresses and ports, at the same time."""
    return {"one": trained(5, seed=1), "two": trained(5, seed=2)}


def test_two_tenants_with_the_same_addresses_stay_apart() -> None:
    jobs = tenants()
    frames = frames_of(jobs["one"], session(5)) + frames_of(jobs["two"], session(6))
    playing = Playing(jobs, Vantages((A, B)), {"one": "a", "two": "b"}).run(frames)
    assert playing.right() == {"one": 5, "two": 5} and not playing.lost
    assert [(seen["tunnel"], seen["group"], seen["cut"]) for seen in playing.pipeline.tunnels()] == [
        ("erspan2 10.9.0.1>10.9.0.2#5", "a", 0), ("erspan2 10.9.0.1>10.9.0.2#6", "b", 0),
    ]  # fmt: skip


def test_a_job_that_does_not_name_its_group_claims_nothing_of_two_tenants() -> None:
    jobs = tenants()
    frames = frames_of(jobs["one"], session(5)) + frames_of(jobs["two"], session(6))
    playing = Playing({"one": jobs["one"]}, Vantages((A, B)), {}).run(frames)
    assert playing.right()["one"] < 5 and len(playing.steps["one"]) == 5
    playing = Playing({"one": jobs["one"]}, Vantages((A, B)), {"one": "b"}).run(frames)
    assert playing.right() == {"one": 0}


def test_two_jobs_may_have_the_same_listeners_only_in_named_groups() -> None:
    jobs = tenants()
    for told in ({}, {"one": "a"}, {"two": "a"}, {"one": "a", "two": "a"}):
        with pytest.raises(ValueError, match="belongs to another"):
            Playing(jobs, Vantages((A, B)), told)
    with pytest.raises(UsageError, match="'c', declared here: a, b"):
        Playing(jobs, Vantages((A, B)), {"one": "c"})


@pytest.mark.parametrize("wrapped", [False, True])
def test_packets_sprayed_over_two_planes_of_one_group_are_one_stream(wrapped: bool) -> None:
    job = trained(5, world=3)
    if wrapped:
        planes: Sequence[str] = ("fabric=vxlan *>10.9.0.2#1,vxlan *>10.9.0.2#2",)
        spray: Wrap = lambda number, frame: vxlan(frame, 1 + number % 2)  # noqa: E731
        apart = Vantages()
        declared = Vantages(planes)
        groups = lambda vantages, number: 0  # noqa: E731
    else:
        spray = lambda number, frame: frame  # noqa: E731
        apart = Vantages(("x=mon0", "y=mon1"), ("mon0", "mon1"))
        declared = Vantages(("fabric=mon0,mon1",), ("mon0", "mon1"))
        groups = lambda vantages, number: vantages.of_source(f"mon{number % 2}")  # noqa: E731
    frames = frames_of(job, spray)
    for vantages, steps in ((declared, 5), (apart, 0)):
        playing = Playing({"job": job}, vantages, {}).run(frames, lambda n, v=vantages: groups(v, n))  # type: ignore[misc]
        assert playing.right() == {"job": steps}
    if not wrapped:  # what is not declared is one group
        assert Playing({"job": job}, Vantages((), ("mon0", "mon1")), {}).run(frames).right() == {"job": 5}


def test_one_direction_in_each_of_two_sessions_of_a_port() -> None:
    """What a port sends in one tunnel, what it receives in another: enough for a job, declared or not."""
    job = trained(4)
    links = [frame.link for frame in job.wire.frames]
    frames = frames_of(job, lambda number, frame: erspan2(frame, 5 + links[number][0]))
    both = "port=erspan2 *>*#5,erspan2 *>*#6"
    for vantages in (Vantages(), Vantages((both,))):
        assert Playing({"job": job}, vantages, {}).run(frames).right() == {"job": 4}


@pytest.mark.parametrize("ports", [(4789,), (8472,), (8472, 4789)])
def test_the_port_of_vxlan_is_an_option(ports: tuple[int, ...]) -> None:
    job = trained(3)
    frames = frames_of(job, lambda _, frame: vxlan(frame, port=8472))
    playing = Playing({"job": job}, Vantages(vxlan_ports=ports), {}).run(frames)
    assert playing.right() == {"job": 3 if 8472 in ports else 0}


def test_the_same_trainers_need_the_same_group() -> None:
    one, two = (job.description for job in tenants().values())
    assert same_trainers(one, two)
    one.group.vantage = "a"
    assert same_trainers(one, two)
    two.group.vantage = "b"
    assert not same_trainers(one, two)


# Observing


def test_observed_tenants_are_two_groups(shared: Path) -> None:
    captured: list[Frame] = []
    source = CaptureFileSource([shared / "captures" / "gloo" / "nano.pcap"])
    while not source.finished:
        block = source.read(0)
        if block is not None:
            captured += [
                (ts, block.base[at : at + size].tobytes())
                for at, size, ts in zip(block.offset.tolist(), block.caplen.tolist(), block.ts.tolist(), strict=True)
            ]
            source.release(block)
    source.close()
    both = [frame for ts, data in captured for frame in ((ts, erspan2(data, 5)), (ts, erspan2(data, 6)))]
    names = {}
    for label, texts in (("declared", (A,)), ("not", ())):
        observer = Observer(1024, 1 << 22, Vantages(texts).table)
        for start in range(0, len(both), 200):
            block = block_at(both[start : start + 200])
            observer.feed(block, int(block.ts.max()))
        observer.flush(int(block.ts.max()))
        report: dict[str, Any] = observer.report()
        assert [group["shown"] for group in report["groups"]] == [1.0, 1.0]
        assert [group["allreduces"]["finished"] for group in report["groups"]] == [6, 6]
        names[label] = sorted(group["name"].partition("] ")[0].partition(": ")[2] for group in report["groups"])
        assert "/0" in table({**report, "packets": 0, "bytes": 0, "drops": 0, "sources": []})
    assert names == {
        "declared": ["a", "erspan2 10.9.0.1>10.9.0.2#6"],
        "not": ["erspan2 10.9.0.1>10.9.0.2#5", "erspan2 10.9.0.1>10.9.0.2#6"],
    }


# Options


def test_members_of_groups() -> None:
    texts = ["fabric=mon0, mon1", "t=10.0.0.1>*", "fabric=fd00::1>fd00::2#7"]
    assert parse(texts, ("mon0", "mon1", "mon2")) == {
        "fabric": ["mon0", "mon1", "fd00::1>fd00::2#7"], "t": ["10.0.0.1>*"],
    }  # fmt: skip
    vantages = Vantages(texts, ("mon0", "mon1", "mon2"))
    assert vantages.of_source("mon0") == vantages.of_source("mon1") == vantages.number("fabric") != 0
    assert vantages.of_source("mon2") == 0 and vantages.number(None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mon0", "give NAME=MEMBER"),
        ("=mon0", "give NAME=MEMBER"),
        ("a=mon0,", "give NAME=MEMBER"),
        ("a=mon7", "mon7 is neither captured here \\(mon0\\) nor a tunnel"),
        ("a=gre 1.2.3.4>5.6.7.8", "unknown kind of tunnel 'gre'"),
        ("a=1.2.3>5.6.7.8", "1.2.3"),
    ],
)
def test_what_is_no_group_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Vantages((text,), ("mon0",))
    with pytest.raises(UsageError, match="mon0 is in group 'a' already"):
        Vantages(("a=mon0", "b=mon0"), ("mon0",))


def test_options_reach_the_sources(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        job = SyntheticJob(seed=number)
        paths.append(tmp_path / f"plane{number}.pcap")
        recorder = PcapRecorder(paths[-1])
        recorder.write(job.wire.block(job.wire.frames))
        recorder.close()
    from flowcheck.daemon import open_sources

    config = DaemonConfig(files=tuple(paths), observe=True, vantage=(f"y={paths[1]}",), vxlan_port=(4789, 8472))
    vantages = declared_vantages(config)
    (source,) = open_sources(config, vantages)
    seen = set()
    while not source.finished:
        block = source.read(0)
        if block is not None:
            seen.add(block.vantage)
            source.release(block)
    source.close()
    assert seen == {0, vantages.number("y")}


@pytest.mark.parametrize(
    ("name", "tunnels"),
    [
        ("erspan2_inner_tcp_pair_suricata5437-02", {"erspan2"}),
        ("greteb_inner_tcp_http_suricata2576", {"gre-ethernet"}),
        ("vxlan_inner_http_zeek", {"vxlan"}),
        ("vxlan_overlapping_vni_http_zeek", {"vxlan"}),
        ("qinq0_http_zeek", set()),
    ],
)
def test_recorded_tunnels(shared: Path, name: str, tunnels: set[str]) -> None:
    pipeline = Pipeline(Limits(256, 1 << 20, 1 << 20), Waits())
    source = CaptureFileSource([shared / "captures" / "tunnels" / f"{name}.pcap"])
    now = 0
    while not source.finished:
        block = source.read(0)
        if block is not None:
            now = max(now, int(block.ts.max()))
            pipeline.feed(block, now)
            source.release(block)
    source.close()
    pipeline.flush(now)
    seen = pipeline.tunnels()
    assert {one["tunnel"].partition(" ")[0] for one in seen} == tunnels
    groups = {pipeline.flows.vantage(flow) for flow in range(pipeline.flows.count)}
    assert pipeline.counters()["tcp_payload_bytes"] > 0
    assert len(groups - {0}) == len(seen) and (seen or groups == {0})
