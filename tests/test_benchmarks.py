"""The benchmarks run and print what they claim to measure; and no Python happens per packet on the whole way."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # each measures for a minute

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import overhead  # noqa: E402
import pipeline  # noqa: E402
import recorded_job  # noqa: E402


def run(script: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--json", *options]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def quick(recordings: Path) -> dict[str, Any]:
    return run("pipeline.py", "--recordings", str(recordings))


def test_the_pipeline_benchmark_measures_the_whole_payload(quick: dict[str, Any]) -> None:
    (shape,) = pipeline.QUICK
    (result,) = quick["results"]
    reduced = 4 * shape.layers * (shape.width + 1) * shape.width * (shape.steps - pipeline.WARM_STEPS)
    # Two ranks: half of the payload is partial sums. Bytes that TCP sent again count twice; those that came before the
    # marker of the last step without a clock do not count.
    assert 0.6 < result["placed"] / reduced < 1.1
    assert 0.9 < result["payload"] / (2 * result["placed"]) < 1.1
    assert 1400 < result["frame_bytes"] <= 1514
    assert result["frames"] > 20_000
    assert result["dissect"]["scapy"] > min(result["pipeline"]) / result["frames"]
    times = ("pipeline", "memcpy", "memcpy_placed", "copy_frames")
    assert all(len(result[name]) == 3 and min(result[name]) > 0 for name in times)
    text = pipeline.report([pipeline.Measured(**result)])
    assert "1,514 B" in text and "dpkt" in text


def test_no_python_per_packet_from_frames_to_steps(quick: dict[str, Any], recordings: Path) -> None:
    """Calls of a replay grow with its blocks and collectives, not with its frames."""
    job = recorded_job.record(pipeline.QUICK[0], recordings)
    names = ("offset", "caplen", "wirelen", "ts", "vlan")
    columns = [np.concatenate([getattr(block, name) for block in job.blocks]) for name in names]
    calls, blocks, frames = {}, {}, 0
    for size in (1 << 18, 1 << 20, 1 << 22):
        again = dataclasses.replace(job, blocks=list(recorded_job.cut(job.memory, columns, size)))
        start = pipeline.prove(again)
        calls[size] = pipeline.count_calls(again, start)
        blocks[size] = len(again.blocks) - start
        frames = sum(len(block) for block in again.blocks[start:])
    each = (calls[1 << 18] - calls[1 << 22]) / (blocks[1 << 18] - blocks[1 << 22])
    rest = calls[1 << 22] - each * blocks[1 << 22]
    assert frames > 20_000
    assert each < 200, f"{each:.0f} calls per block"
    assert rest < 0.1 * frames, f"{rest:.0f} calls beyond those per block for {frames} frames"
    assert calls[1 << 20] / frames * 1000 < 400


def test_a_recording_that_lacks_frames_is_not_measured(quick: dict[str, Any], recordings: Path) -> None:
    job = recorded_job.record(pipeline.QUICK[0], recordings)
    middle = len(job.blocks) // 2
    replay = recorded_job.Replay(job)
    assert replay.run(job.blocks[:middle] + job.blocks[middle + 1 :]) < pipeline.QUICK[0].steps
    assert "no step" not in replay.lost


def test_the_overhead_benchmark_runs_every_mode() -> None:
    found = run("overhead.py")
    assert set(found["modes"]) == set(overhead.MODES)
    for mode in found["modes"].values():
        assert len(mode["times"]) == 3 and min(mode["times"]) > 0
    assert len(found["hook"]) == 3
    assert min(wall for wall, _ in found["hook_alone"]) < 1e-3
    assert all(pieces > 0 for pieces, _ in found["given"].values())
    text = overhead.report(*(found[name] for name in ("rounds", "cpu", "hook", "hook_alone", "given")))
    assert all(mode in text for mode in overhead.MODES)
