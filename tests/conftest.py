from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end import Outcome, mirrors, train, train_plain
from replay import Recording, block_of

from flowcheck.errors import NoPermission
from flowcheck.lab import Lab, LabConfig
from mirror.kernel_cache import VARIABLE
from mirror.record import PcapRecorder

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_KERNELS = (
    "test_attach.py", "test_formats.py", "test_optimizer.py", "test_server.py", "test_store.py", "test_store_crash.py",
    "test_description.py", "test_jobfile.py", "test_links.py", "test_lr.py", "test_plan.py", "test_switchconfig.py",
    "test_lab.py", "test_pins.py", "test_ranges.py", "test_repair.py", "test_resync.py", "test_shadow.py",
    "test_shadow_loss.py", "test_security.py", "test_keys.py",
)  # fmt: skip
COMPILE = """
from flowcheck.doctor.exam import Examination
from flowcheck.pipeline import Limits, Pipeline
from mirror.afpacket import warm_up
from reconstruct.observe.observer import Observer
from reconstruct.steps import Waits
Pipeline(Limits(), Waits()).warm_up()
Observer().warm_up()
Examination().warm_up()
warm_up()
"""


class Compiler:
    """Compiles the kernels in a process of its own, while the tests run that call none of them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", COMPILE], cwd=ROOT)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.path.name not in WITHOUT_KERNELS:
            self._process.wait()

    def pytest_unconfigure(self) -> None:
        self._process.kill()
        self._process.wait()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where no kernel is compiled yet, tests that call none go first."""
    first = [item for item in items if item.path.name in WITHOUT_KERNELS]
    later = [item for item in items if item.path.name not in WITHOUT_KERNELS]
    kernels = os.environ.get(VARIABLE)
    cold = kernels is not None and next(Path(kernels).rglob("*.nbi"), None) is None
    if cold and first and later and not config.option.collectonly:
        items[:] = first + later
        config.pluginmanager.register(Compiler())


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


def _recording(folder: Path) -> Recording:
    """The part of all.pcap that shows the run gpt, which is put into capture.pcap, and the trainers' own digests."""
    recording = Recording.load(folder / "all.pcap", folder / "store" / "gpt" / "e1" / "job.safetensors")
    end = recording.said.words[-1][0]  # the trainers' farewell, behind a barrier
    recording.frames = [frame for frame in recording.frames if frame[0] <= end]
    with PcapRecorder(folder / "capture.pcap") as recorder:
        recorder.write(block_of(recording.frames))
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            if note["run"] == "gpt":
                assert recording.truth.setdefault(note["step"], note["digest"]) == note["digest"], "ranks differ"
    return recording


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One launch of the lab for all tests of plain jobs."""
    return train_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def recorded_job(plain: Outcome) -> Recording:
    """A small GPT on four ranks: most final values pass by the mirror twice."""
    return _recording(plain.folder)


@pytest.fixture(scope="session")
def recorded_pair(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The same on two ranks: every final value passes by the mirror once."""
    folder = tmp_path_factory.mktemp("pair")
    train(folder, ("gpt",), ranks=2, mirrors=mirrors("1:both"), record=str(folder / "all.pcap"))
    return _recording(folder)
