"""kill -9 of the daemon while it writes a large state: what is left verifies and restores."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from shadow_cases import describe, spec_of, uploads

from flowcheck import jobfile
from flowcheck.config import DaemonConfig
from flowcheck.daemon import run
from flowcheck.errors import NothingRestorable
from flowcheck.lab.launcher import child_environment
from flowcheck.store import Store
from flowcheck.verify import verify
from mirror.block import pack
from mirror.record import PcapRecorder


def big_job(folder: Path, width: int) -> tuple[Path, Path, int]:
    """(recording, job file, bytes of state): a job at step 1 with AdamW state, and a recording without its traffic."""
    model = torch.nn.Linear(4096, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    description = describe(model, optimizer, 1)
    live = {f"model/{name}": p for name, p in model.named_parameters()}
    live |= {
        f"optimizer/{name}/{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    tensors = {key: (spec_of(live[key]), data) for key, data in uploads(model, optimizer).items()}
    job, capture = folder / "big" / "job.safetensors", folder / "quiet.pcap"
    jobfile.write(job, description, tensors)
    with PcapRecorder(capture) as recorder:
        recorder.write(pack([bytes(60)], 1))
    return capture, job, sum(data.nbytes for _, data in tensors.values())


def writing(store: Path) -> bool:
    return any(path.name.startswith(".tmp-") for path in store.glob("*/e*/*"))


def run_to_its_end(config: DaemonConfig) -> None:
    """The daemon in this process, whose own signal handlers come back afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run(config) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def kill_while_writing(folder: Path, capture: Path, job: Path, kills: int, longest: float) -> int:
    """Start the daemon `kills` times on a store that has one whole step, kill it; how often it was inside a write."""
    store = folder / "store"
    command = [
        sys.executable,
        "-m",
        "flowcheck",
        "daemon",
        "-r",
        str(capture),
        "--job",
        str(job),
        "--store",
        str(store),
    ]
    subprocess.run(command, env=child_environment(), check=True, timeout=120, capture_output=True)
    assert Store(store).newest("test").step == 1
    moments = random.Random(7)
    inside = 0
    for _ in range(kills):
        with subprocess.Popen(
            command, env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as daemon:
            deadline = time.monotonic() + 60
            while not writing(store) and daemon.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, longest))
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        inside += writing(store)
        report = verify(store)
        assert report.problems == []
        state = Store(store).load("test")
        assert state.step == 1
        epochs = Store(store).epochs("test")
        for epoch in epochs[1:-1]:  # room on the disk; the oldest whole one and the newest stay
            shutil.rmtree(Store(store).epoch_folder("test", epoch))
    # The next start sweeps what the killed ones left.
    run_to_its_end(DaemonConfig(files=(capture,), job=job, store=store))
    assert not writing(store) and verify(store).problems == []
    return inside


def test_killed_while_writing(tmp_path: Path) -> None:
    capture, job, _ = big_job(tmp_path, 1024)
    assert kill_while_writing(tmp_path, capture, job, 3, 0.05) >= 1


@pytest.mark.slow
def test_killed_twenty_times_inside_the_write_of_a_large_state(tmp_path: Path) -> None:
    capture, job, nbytes = big_job(tmp_path, 4400)
    assert nbytes >= 200 << 20
    assert kill_while_writing(tmp_path, capture, job, 20, 0.25) >= 15


def test_a_store_without_a_whole_step_restores_nothing(tmp_path: Path) -> None:
    (tmp_path / "run" / "e1" / ".tmp-step-3-1-0").mkdir(parents=True)
    with pytest.raises(NothingRestorable):
        Store(tmp_path).load("run")
