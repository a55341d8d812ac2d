"""Faults that are injected into a source: what is asked is what happens, whatever the blocks are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from mirrors import Frame, MemorySource, read

from flowcheck.cli import main
from flowcheck.config import DaemonConfig
from flowcheck.daemon import declared_vantages, open_sources
from flowcheck.errors import UsageError
from flowcheck.report import status_text
from mirror import faulty
from mirror.block import SourceCounters, pack
from mirror.faults import KINDS, Faults, faults_of
from mirror.faulty import HEADERS, FaultSource
from mirror.record import PcapRecorder

STREAM = "mon0"


def some(count: int, seed: int = 0, largest: int = 1500) -> list[Frame]:
    """Frames, each one different, mostly a millisecond apart, some of them out of order in time."""
    rng = np.random.default_rng(seed)
    times = np.arange(count) * 1_000_000 + rng.integers(0, 3_000_000, count)
    return [(int(ts), number.to_bytes(8) + rng.bytes(int(rng.integers(52, largest))))
            for number, ts in enumerate(times)]  # fmt: skip


def passed(frames: list[Frame], spec: str, size: int) -> tuple[list[Frame], dict[str, Any]]:
    memory = MemorySource(frames, size)
    source = FaultSource(memory, {STREAM: (0, Faults.parse(spec))})
    out = read(source)
    assert not memory.held
    assert source.counters() == SourceCounters(len(out), sum(len(data) for _, data in out), 5)
    return out, source.faults()


def expected(frames: list[Frame], faults: Faults) -> list[Frame]:
    """The same one frame after the other: what waits is in a list and looked through at every frame."""
    numbers = np.arange(len(frames))
    hit = {kind: faults.hits(kind, STREAM, numbers) for kind in KINDS}
    lost = hit["drop"] | hit["burst"]
    bit = faults.chance("bit", STREAM, numbers)
    out: list[Frame] = []
    behind: list[tuple[int, Frame]] = []
    late: list[tuple[int, int, Frame]] = []
    newest = 0
    for number, (ts, data) in enumerate(frames):
        newest = max(newest, ts)
        due = sorted(wait for wait in late if wait[0] <= newest)
        late = [wait for wait in late if wait[0] > newest]
        out += [frame for _, _, frame in due]
        if not lost[number]:
            changed = data[: faults.truncate_bytes] if hit["truncate"][number] else data
            if hit["corrupt"][number] and len(changed) > HEADERS:
                place = 8 * HEADERS + int(bit[number] * 8 * (len(changed) - HEADERS))
                bent = bytearray(changed)
                bent[place // 8] ^= 1 << place % 8
                changed = bytes(bent)
            moved = ts + faults.delay_ms * 1_000_000
            if hit["delay"][number]:
                if moved <= newest:
                    out.append((moved, changed))
                else:
                    late.append((moved, number, (moved, changed)))
            elif hit["reorder"][number]:
                behind.append((number + faults.reorder_distance, (ts, changed)))
            else:
                out.append((ts, changed))
            if hit["duplicate"][number]:
                out.append((ts, data))
        out += [frame for after, frame in behind if after == number]
    rest = [(ts, number, frame) for ts, number, frame in late]
    rest += [(frame[0] + 100_000_000, after - faults.reorder_distance, frame)
             for after, frame in behind if after >= len(frames)]  # fmt: skip
    return out + [frame for _, _, frame in sorted(rest)]


ALL = "drop=0.05,burst=0.005:10,duplicate=0.1,reorder=0.1:5,truncate=0.1:90,corrupt=0.1,delay=0.1:3,seed=9"


@pytest.mark.parametrize("spec", [
    "drop=0.1", "burst=0.01:20", "duplicate=0.1", "reorder=0.1:8", "reorder=0.3:64:64", "truncate=0.2:100",
    "corrupt=0.3", "delay=0.1:7", ALL, "drop=1", "duplicate=1", "delay=1:50", "seed=1",
])  # fmt: skip
def test_every_kind_does_what_it_says_however_the_frames_are_cut_into_blocks(spec: str) -> None:
    frames = some(1500)
    wanted = expected(frames, Faults.parse(spec))
    whole, told = passed(frames, spec, 1500)
    assert whole == wanted
    assert (whole == frames) == (spec == "seed=1")
    for size in (1, 7, 64, 1000):
        assert passed(frames, spec, size) == (whole, told)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mixture_is_the_same_in_any_blocks(data: st.DataObject) -> None:
    rate = st.sampled_from([0, 0.01, 0.2, 0.9])
    few = st.integers(1, 12)
    faults = Faults(
        data.draw(rate), data.draw(rate), data.draw(few), data.draw(rate), data.draw(rate), data.draw(few),
        data.draw(few), data.draw(rate), data.draw(st.integers(1, 400)), data.draw(rate), data.draw(rate),
        data.draw(few), data.draw(st.integers(0, 1 << 40)),
    )  # fmt: skip
    frames = some(data.draw(st.integers(1, 120)), data.draw(st.integers(0, 9)), 300)
    out, _ = passed(frames, str(faults) or "seed=0", data.draw(st.integers(1, 130)))
    assert out == expected(frames, faults)


@pytest.mark.parametrize(("spec", "count", "seed"), [
    ("drop=0.2,duplicate=0.9,reorder=0.01:5:7,corrupt=0.2,delay=0.9:1,seed=869888454703", 60, 9),
    ("duplicate=0.2,reorder=0.01:10:7,delay=0.9:1,seed=956628744488", 77, 8),
])  # fmt: skip
def test_an_overdue_frame_stays_before_its_copy(spec: str, count: int, seed: int) -> None:
    """Delayed to a time that others had reached before it came: it has not moved, so its copy is behind it."""
    frames = some(count, seed, 300)
    wanted = expected(frames, Faults.parse(spec))
    for size in (1, 5, 61, count):
        assert passed(frames, spec, size)[0] == wanted


def test_what_was_hit_is_counted_and_known_beforehand() -> None:
    frames = some(20_000)
    out, told = passed(frames, "drop=0.01,burst=0.0005:20,seed=7", 256)
    lost = Faults.parse("drop=0.01,burst=0.0005:20,seed=7").lost(STREAM, np.arange(20_000))
    assert out == [frame for frame, gone in zip(frames, lost, strict=True) if not gone]
    assert told["specs"] == {STREAM: "drop=0.01,burst=0.0005:20,seed=7"}
    hit = told["hit"]
    assert hit.keys() == {"drop", "burst"}
    assert hit["drop"][0] + hit["burst"][0] == lost.sum()
    assert hit["drop"][1] + hit["burst"][1] == sum(len(data) for _, data in frames) - sum(len(d) for _, d in out)
    assert 130 < hit["drop"][0] < 270
    assert 80 < hit["burst"][0] < 400


def test_streams_seeds_and_kinds_are_independent() -> None:
    numbers = np.arange(100_000)
    one, same = Faults(drop=0.1, duplicate=0.1, seed=1), Faults(drop=0.1, seed=1)
    assert (one.hits("drop", "a", numbers) == same.hits("drop", "a", numbers)).all()
    others = [one.hits("drop", "b", numbers), Faults(drop=0.1, seed=2).hits("drop", "a", numbers),
              one.hits("duplicate", "a", numbers)]  # fmt: skip
    for other in others:
        both = (one.hits("drop", "a", numbers) & other).mean()
        assert 0.009 < both < 0.011
        assert 0.095 < other.mean() < 0.105


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "fault '': give one of drop=RATE, burst=RATE:FRAMES"),
        ("loss=0.1", "fault 'loss=0.1': give one of"),
        ("drop", "fault 'drop': give one of"),
        ("drop=", "fault drop=: could not convert"),
        ("drop=1.5", "fault drop=1.5: 1.5 is no rate from 0 to 1"),
        ("drop=nan", "fault drop=nan: nan is no rate"),
        ("drop=-1", "fault drop=-1: -1 is no rate"),
        ("drop=0.1,drop=0.2", "fault drop: given twice"),
        ("burst=0.1", "fault burst=0.1: write burst=RATE:FRAMES"),
        ("burst=0.1:0", "fault burst=0.1:0: 0 is no number of frames from 1"),
        ("burst=0.1:9999999", "no number of frames"),
        ("reorder=0.1:2:3:4", "write reorder=RATE:DISTANCE\\[:RUN\\]"),
        ("delay=0.1:1e3", "fault delay=0.1:1e3: 1e3 is no number of ms"),
        ("truncate=0.1:0", "no number of bytes"),
        ("seed=x", "fault seed=x: x is no number"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused_by_its_field(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Faults.parse(spec)


def test_a_spec_reads_back() -> None:
    for spec in (ALL, "drop=1e-05,seed=9223372036854775807", "delay=0.5:60000"):
        assert Faults.parse(str(Faults.parse(spec))) == Faults.parse(spec)


def test_one_source_is_named_and_wins_over_all() -> None:
    names = ("mon0", "mon01", "dir/a:b=1.pcap")
    found = faults_of(["mon01:drop=0.2", "dir/a:b=1.pcap:drop=0.3", "burst=0.1:20"], names)
    assert found == {"mon0": Faults(burst=0.1, burst_frames=20), "mon01": Faults(drop=0.2),
                     "dir/a:b=1.pcap": Faults(drop=0.3)}  # fmt: skip
    assert faults_of(["mon0:drop=0.2"], names) == {"mon0": Faults(drop=0.2)}
    with pytest.raises(UsageError, match=r"--fault mon2:drop=0\.2: give SPEC or NAME:SPEC, captured here: mon0, mon01"):
        faults_of(["mon2:drop=0.2"], names)


def test_frames_that_wait_come_when_their_time_has_come_on_a_silent_link() -> None:
    now = time.time_ns()
    memory = MemorySource([(now, b"late" + bytes(80)), (now, b"moved" + bytes(80))], 2, live=True)
    source = FaultSource(memory, {STREAM: (0, Faults(delay=1.0, delay_ms=150))})
    assert source.read(0) is None
    assert not source.finished
    while (block := source.read(0)) is None:
        assert time.time_ns() < now + 5_000_000_000
    assert time.time_ns() >= now + 150_000_000
    assert len(block) == 2
    moving = FaultSource(MemorySource([(now, bytes(80))], 1, live=True), {STREAM: (0, Faults(reorder=1.0))})
    while (block := moving.read(0)) is None:
        assert time.time_ns() < now + 5_000_000_000
    assert len(block) == 1


def test_frames_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty, "_MOST_WAITING", 20_000)
    memory = MemorySource([(number, number.to_bytes(8) + bytes(992)) for number in range(200)], 10)
    source = FaultSource(memory, {STREAM: (0, Faults(delay=1.0, delay_ms=1000))})
    most = 0
    out = []
    while not source.finished:
        block = source.read(0)
        assert block is not None
        out += [int.from_bytes(block.base[at : at + 8].tobytes()) for at in block.offset]
        most = max(most, sum(w.table.shape[1] for w in source._waiting.values()))
    assert out == list(range(200))
    assert most == 19
    assert source.faults()["hit"]["early"][0] == 181


def test_files_that_are_read_together_meet_faults_of_their_own(tmp_path: Path) -> None:
    """Two mirrors of the same traffic, merged into one source: each loses frames of its own, and only those asked."""
    frames = some(3000)
    paths = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "mirror.pcap")
        with PcapRecorder(paths[-1]) as recorder:
            recorder.write(pack([name.encode() + data for _, data in frames], [ts for ts, _ in frames]))

    def lost(*faults: str) -> list[set[int]]:
        config = DaemonConfig(files=tuple(paths), observe=True, fault=faults)
        (source,) = open_sources(config, declared_vantages(config))
        seen = read(source)
        source.close()
        numbers = [{int.from_bytes(data[1:9]) for _, data in seen if data[:1] == name} for name in (b"a", b"b", b"c")]
        return [set(range(3000)) - there for there in numbers]

    assert lost() == [set(), set(), set()]
    a, b, c = lost("drop=0.1,seed=5", f"{paths[2]}:drop=0.02")
    assert 240 < len(a) < 360
    assert 240 < len(b) < 360
    assert 30 < len(c) < 100
    assert 10 < len(a & b) < 60
    assert a == set(np.flatnonzero(Faults(drop=0.1, seed=5).lost("mirror.pcap#0", np.arange(3000))).tolist())
    assert lost(f"{paths[1]}:drop=0.1,seed=5") == [set(), b, set()]


def test_the_command_line_is_loud_about_faults(tmp_path: Path) -> None:
    path = tmp_path / "mirror.pcap"
    with PcapRecorder(path) as recorder:
        recorder.write(pack([data for _, data in some(50)], 1))
    result = CliRunner().invoke(main, ["daemon", "--observe", "-r", str(path), "--fault", "drop=0.5,seed=1"])
    assert result.exit_code == 0, result.output
    assert f"flowcheck: FAULTS ARE INJECTED into {path}: drop=0.5,seed=1" in result.output
    assert "FAULTS ARE INJECTED into mirror.pcap#0: drop=0.5,seed=1: this is a rehearsal" in result.output
    for options, message in (
        (["daemon", "--observe", "-r", str(path), "--fault", "drop=7"], "fault drop=7: 7 is no rate"),
        (["lab", "--fault", "drop=7", "--", "train.py"], "fault drop=7: 7 is no rate"),
        (["lab", "--fault", "mon7:drop=0.1", "--", "train.py"], "captured here: mon0"),
    ):
        result = CliRunner().invoke(main, options)
        assert result.exit_code == 2
        assert message in result.output


def test_status_shows_that_this_is_a_rehearsal_and_what_came_damaged() -> None:
    source = FaultSource(MemorySource([], 1), {STREAM: (0, Faults(drop=0.5))})
    status = {"jobs": [], "run": None, "packets": 0, "bytes": 0, "drops": 0, "failure": None,
              "loss": {"likely": "", "checksums": {"tcp": {"refused": 0}, "icrc": {"refused": 3}}},
              "remote": None, "version": "0",
              "sources": [{"faults": source.faults()}, {"faults": {}}]}  # fmt: skip
    text = status_text(json.loads(json.dumps(status)))
    assert "FAULTS ARE INJECTED into mon0: drop=0.5: this is a rehearsal" in text
    assert "refused as damaged: frames with a wrong checksum, 3 by ICRC;" in text
