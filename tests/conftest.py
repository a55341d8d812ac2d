from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from replay import Recording

from flowcheck.errors import NoPermission
from flowcheck.lab import Lab, LabConfig, Mirror

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded captures and their ground truth; tests that need it skip without it."""
    path = Path(os.environ.get("FLOWCHECK_SHARED", ROOT.parent / "shared"))
    if not (path / "captures").is_dir():
        pytest.skip(f"no captures at {path}: set FLOWCHECK_SHARED to the folder that holds captures/")
    return path


@pytest.fixture(scope="session")
def allowed() -> None:
    """Where the system forbids namespaces the lab says so; tests that need them skip."""
    try:
        with Lab(LabConfig(daemon=())):
            pass
    except NoPermission as error:
        pytest.skip(str(error))


def _record(folder: Path, ranks: int, case: str) -> Recording:
    """One small job in the lab, recorded on rank 1's port, with what every trainer says of every step."""
    config = LabConfig(
        command=(str(ROOT / "tests" / "jobs" / "cases.py"), str(folder), case),
        ranks=ranks,
        mirrors=(Mirror.parse("1:both"),),
        journal=str(folder / "journal.jsonl"),
        store=str(folder / "store"),
        record=str(folder / "capture.pcap"),
    )
    with Lab(config) as lab:
        lab.train()
        assert lab.wait(240) == 0
        lab.finish()
    recording = Recording.load(folder / "capture.pcap", folder / "store" / case / "e1" / "job.safetensors")
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            assert recording.truth.setdefault(note["step"], note["digest"]) == note["digest"], "ranks differ"
    return recording


@pytest.fixture(scope="session")
def recorded_job(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A small GPT on four ranks: most final values pass by the mirror twice."""
    return _record(tmp_path_factory.mktemp("recorded4"), 4, "gpt")


@pytest.fixture(scope="session")
def recorded_pair(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The same on two ranks: every final value passes by the mirror once."""
    return _record(tmp_path_factory.mktemp("recorded2"), 2, "gpt")
