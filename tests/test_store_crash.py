"""What a revoked pin, a full disk and SIGKILL leave of a step that is being written."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from stored_states import plain, same, small, unfinished

from flowcheck import tensorfile
from flowcheck.durable import Aborted
from flowcheck.store import Store
from flowcheck.verify import verify

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store") as opened:
        yield opened


def test_a_revoked_pin_leaves_nothing_even_after_the_last_byte(store: Store) -> None:
    epoch = store.open_epoch("run")
    store.save(small(1, epoch=epoch))
    calls = 0

    def stops_at(limit: int):
        nonlocal calls
        calls = 0

        def should_stop() -> bool:
            nonlocal calls
            calls += 1
            return calls >= limit

        return should_stop

    with pytest.raises(Aborted):
        store.save(small(2, epoch=epoch), should_stop=stops_at(1))
    store.save(small(2, epoch=epoch), should_stop=stops_at(1 << 30))
    total = calls
    with pytest.raises(Aborted):
        store.save(small(3, epoch=epoch), should_stop=stops_at(total))  # the look after the last byte
    assert store.steps("run", epoch) == [1, 2] and unfinished(store.root) == []


def test_the_arrays_are_not_read_after_copied(store: Store) -> None:
    epoch = store.open_epoch("run")
    state, kept = small(2, epoch=epoch), small(2, epoch=epoch)

    def overwrite() -> None:
        for _, data in state.tensors.values():
            data[...] = 0xFF

    store.save(state, copied=overwrite)
    same(store.load(), kept)
    assert not verify(store.root).problems


def test_progress_counts_every_byte(store: Store) -> None:
    epoch = store.open_epoch("run")
    seen: list[tuple[int, int]] = []
    store.save(plain(1, 40 << 20, epoch=epoch, tensors=2), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (40 << 20, 40 << 20)
    steps = [b - a for (a, _), (b, _) in pairwise(seen)]
    assert max(steps) <= tensorfile.CHUNK and len(seen) >= 5


FULL_DISK = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from stored_states import plain, same
from flowcheck.errors import FlowcheckError
from flowcheck.store import Store
from flowcheck.verify import verify
store = Store(Path(sys.argv[1]) / "store")
epoch = store.open_epoch("run")
store.save(plain(1, 3 << 20, epoch=epoch))
try:
    store.save(plain(2, 9 << 20, epoch=epoch))
except FlowcheckError as error:
    print(error)
else:
    raise SystemExit("a full disk was not noticed")
assert not list(store.root.rglob(".tmp-*")), "a temporary is left"
assert store.steps("run", epoch) == [1]
same(store.load(), plain(1, 3 << 20))
store.save(plain(3, 3 << 20, epoch=epoch))
assert not verify(store.root).problems and store.newest().step == 3
"""


def test_a_full_disk_is_said_and_costs_no_older_step(tmp_path: Path) -> None:
    """A real file system without room: a 10 MiB tmpfs in a mount namespace."""
    script = tmp_path / "full.py"
    script.write_text(FULL_DISK.format(root=str(ROOT), tests=str(ROOT / "tests")))
    mount = tmp_path / "mount"
    mount.mkdir()
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        probe = subprocess.run([*enter, f"mount -t tmpfs -o size=10m none {mount}"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if probe.returncode:
        pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")
    command = f"mount -t tmpfs -o size=10m none {mount} && exec {sys.executable} {script} {mount}"
    done = subprocess.run([*enter, command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2 of run run needs 9." in done.stdout and "free: free space or keep fewer steps" in done.stdout


WRITER = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from stored_states import plain
from flowcheck.store import Store
store = Store(sys.argv[1])
nbytes = int(sys.argv[2])
epoch = store.open_epoch("run")
states = [plain(n, nbytes, epoch=epoch) for n in (0, 1)]
print("ready", epoch, flush=True)
for step in range(1 << 30):
    state = states[step % 2]
    state.step = step
    print("begin", step, flush=True)
    store.save(state, keep=2)
    print("saved", step, flush=True)
"""


def killed_writers(tmp_path: Path, nbytes: int, kills: int, span: float) -> int:
    """SIGKILL a persisting process `kills` times at random moments; how many hit a write of a step.

    After every kill: what is left verifies, the newest step is whole, equal to what was written, and not older
    than the last one that the writer reported as saved.
    """
    script = tmp_path / "writer.py"
    script.write_text(WRITER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    root = tmp_path / "store"
    chance = random.Random(11)
    inside = 0
    expected = [plain(n, nbytes) for n in (0, 1)]
    for _ in range(kills):
        command = [sys.executable, str(script), str(root), str(nbytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            epoch = int(writer.stdout.readline().split()[1])
            time.sleep(chance.uniform(0.0, span))
            writer.send_signal(signal.SIGKILL)
            lines = writer.stdout.read().split("\n")
        saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
        inside += any(path.name.startswith(".tmp-step") for path in unfinished(root))
        store = Store(root)
        if not saved and not any(store.steps("run", old) for old in store.epochs("run")):
            continue
        report = verify(root)
        assert not report.problems, report.problems
        found = store.newest("run")
        assert not found.skipped
        if saved:
            assert found.epoch == epoch and found.step >= saved[-1]
        state = store.load("run")
        for key, (_, data) in expected[state.step % 2].tensors.items():
            assert np.array_equal(state.tensors[key][1], data), (state.step, key)
        for old in store.epochs("run")[:-1]:  # or every kill would leave two steps more on the disk to verify
            if old != found.epoch:
                shutil.rmtree(store.epoch_folder("run", old))
    with Store(root) as opened:
        opened.open_epoch("run")
    assert unfinished(root) == []
    return inside


def test_a_killed_writer_leaves_whole_steps_only(tmp_path: Path) -> None:
    assert killed_writers(tmp_path, 24 << 20, kills=5, span=0.3) >= 1


@pytest.mark.slow
def test_twenty_kills_while_200_megabytes_are_written(tmp_path: Path) -> None:
    assert killed_writers(tmp_path, 208 << 20, kills=24, span=1.2) >= 15
