"""The example of the README: it trains in the lab, is restored from the store, and goes on from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train.py"


def python(folder: Path, *arguments: str, **environment: str) -> str:
    """What a program says; it must end with status 0."""
    base = {**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env={**base, **environment}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.usefixtures("allowed")
def test_the_example_trains_is_restored_and_goes_on(tmp_path: Path) -> None:
    """It takes its time: a lab, and a script that is started again, as a new user does it."""
    said = python(tmp_path, "-m", "flowcheck", "lab", "--store", "store", "--", str(EXAMPLE))
    assert "step 20: loss" in said and "default/e1: holds step 20" in said
    python(tmp_path, "-m", "flowcheck", "restore", "store", "--out", "resume.pt")
    assert torch.load(tmp_path / "resume.pt")["step"] == 20
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    said = python(tmp_path, str(EXAMPLE), **alone)
    assert "training goes on uncovered" in said and "step 21: loss" in said and "step 20: loss" not in said
