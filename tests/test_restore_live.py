"""Restores while training runs: whole steps, each equal to the trainers' state of that step."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.cli import main
from flowcheck.client import fetch, status
from flowcheck.errors import FlowcheckError
from flowcheck.lab import Lab, LabConfig
from flowcheck.lab.launcher import child_environment
from flowcheck.store import Store
from reconstruct.digest import state_digest

CASES = str(Path(__file__).with_name("jobs") / "cases.py")
STEPS = 80
READERS = 4
READS = 25


def digest_of_file(path: Path) -> tuple[int, str]:
    """(step, digest) of a restored torch file, computed from live torch objects alone."""
    sys.path.insert(0, str(Path(CASES).parent))
    try:
        from cases import TinyGPT
    finally:
        sys.path.pop(0)
    state = torch.load(path, weights_only=True)
    model = TinyGPT()
    model.load_state_dict(state["model"], strict=True)
    assert model.head.weight is model.embed.weight
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.ndim > 1]}, {"params": [p for p in parameters if p.ndim < 2]}]
    )
    optimizer.load_state_dict(state["optimizer"])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    return state["step"], flowcheck.digest(model, optimizer)


@pytest.mark.slow
def test_a_hundred_restores_under_load(tmp_path: Path) -> None:
    config = LabConfig(
        command=(CASES, str(tmp_path), "gpt"),
        ranks=2,
        store=str(tmp_path / "store"),
        daemon_args=("--every-steps", "5", "--keep", "2"),
        env={"STEPS": str(STEPS), "STEP_PAUSE": "0.05"},
    )
    got: list[tuple[int, str]] = []
    problems: list[str] = []

    def read(endpoint: str) -> None:
        for _ in range(READS):
            try:
                snapshot = fetch(endpoint, "gpt", "latest", timeout=30)
                got.append((snapshot.step, state_digest(snapshot.tensors)))
            except FlowcheckError as error:
                problems.append(str(error))

    def restore(source: str, out: Path, *options: str) -> tuple[object, str]:
        """The command's exit status and what it said."""
        with redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as end:
            main(["restore", source, "--run", "gpt", "--out", str(out), *options])
        return end.value.code, said.getvalue()

    with Lab(config) as lab:
        endpoint = lab.endpoint
        assert endpoint is not None
        lab.train()
        while True:
            jobs = status(endpoint, 10)["jobs"]
            if jobs and jobs[0]["step"] > 2:
                break
            try:
                lab.wait(0.1)
            except TimeoutError:
                continue
            raise AssertionError("the job ended before it was followed")
        readers = [threading.Thread(target=read, args=(endpoint,)) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        by_command = [restore(endpoint, tmp_path / f"live-{n}.pt") for n in range(3)]
        for reader in readers:
            reader.join()
        memory: dict[str, Any] = status(endpoint, 10)["jobs"][0]
        assert lab.wait(240) == 0
        lab.finish()

    truth = {}
    for line in (tmp_path / "rank0.jsonl").read_text().splitlines():
        note = json.loads(line)
        truth[note["step"]] = note["digest"]
    assert problems == []
    assert len(got) == READERS * READS
    assert all(truth.get(step, "attach") == digest for step, digest in got if step)
    assert len({step for step, _ in got}) > 5  # training went on meanwhile
    assert memory["copies"] in (0, 1)
    for n, (code, said) in enumerate(by_command):
        assert code == 0
        step, digest = digest_of_file(tmp_path / f"live-{n}.pt")
        assert truth[step] == digest and f"step {step} " in said

    # What the store kept: the last step, whole; and the same through the command line.
    newest = Store(tmp_path / "store").load("gpt")
    assert newest.step == STEPS and state_digest(newest.tensors) == truth[STEPS]
    done = subprocess.run(
        [sys.executable, "-m", "flowcheck", "restore", str(tmp_path / "store"), "--out", str(tmp_path / "last.pt")],
        env=child_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert digest_of_file(tmp_path / "last.pt") == (STEPS, truth[STEPS])
    assert flowcheck.load(str(tmp_path / "store"), run="gpt")["step"] == STEPS
    assert restore(str(tmp_path / "store"), tmp_path / "x.pt", "--step", "1")[0] == 3
    assert not (tmp_path / "x.pt").exists()
    checked = subprocess.run(
        [sys.executable, "-m", "flowcheck", "verify", str(tmp_path / "store")],
        env=child_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
