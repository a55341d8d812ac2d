"""What the store removes and what it never removes: budgets, retention, withdrawn steps, leftovers, `latest`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from stored_states import flip, plain, same, small, unfinished

from flowcheck import stepfolder
from flowcheck.errors import FlowcheckError
from flowcheck.store import RunTaken, Store, StoreFull, read_latest
from flowcheck.verify import verify

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


def limited(tmp_path: Path, mebibytes: float, said: list[str] | None = None) -> Store:
    return Store(tmp_path / "store", limit=int(mebibytes * MIB), report=None if said is None else said.append)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# the budget


def test_the_plan_is_never_less_than_what_is_written_and_hardly_more(store: Store) -> None:
    epoch = store.open_epoch("run")
    for step, state in enumerate([small(0), plain(1, 8 * MIB), plain(2, MIB, tensors=800)]):
        state.epoch, state.step = epoch, step
        written = on_disk(store.save(state))
        planned = stepfolder.planned_bytes(state)
        tensors = len(state.tensors)
        assert written <= planned <= written + (1 << 17) + 2048 * tensors, (step, written, planned)


def test_a_step_beyond_the_limit_is_refused_before_a_byte_of_it_is_written(tmp_path: Path) -> None:
    store = limited(tmp_path, 5)
    epoch = store.open_epoch("run")
    store.save(plain(1, 3 * MIB, epoch=epoch), keep=3)
    read: list[int] = []
    refusal = r"step 2 of run run needs 3\.\d MiB, the store takes 3\.0 MiB of its 5\.0 MiB: raise --store-gib or keep"
    with pytest.raises(StoreFull, match=refusal):
        store.save(plain(2, 3 * MIB, epoch=epoch), keep=3, progress=lambda done, _: read.append(done))
    assert read == [] and store.steps("run", epoch) == [1] and unfinished(store.root) == []
    store.save(plain(3, MIB, epoch=epoch), keep=3)
    assert store.steps("run", epoch) == [1, 3]


def test_what_the_write_would_let_go_anyway_makes_room_for_it(tmp_path: Path) -> None:
    store = limited(tmp_path, 7.5)
    epoch = store.open_epoch("run")
    for step in range(1, 6):
        store.save(plain(step, 2 * MIB, epoch=epoch), keep=3)
    assert store.steps("run", epoch) == [3, 4, 5]  # at most three, also while the fourth was written


def test_the_last_good_step_is_never_what_makes_room(tmp_path: Path) -> None:
    store = limited(tmp_path, 5)
    epoch = store.open_epoch("run")
    store.save(plain(1, 3 * MIB, epoch=epoch), keep=1)
    with pytest.raises(StoreFull):
        store.save(plain(2, 3 * MIB, epoch=epoch), keep=1)
    assert store.steps("run", epoch) == [1]
    same(store.load("run"), plain(1, 3 * MIB))


def test_a_damaged_step_is_nothing_to_fall_back_on_when_room_is_made(tmp_path: Path) -> None:
    with limited(tmp_path, 100) as store:
        epoch = store.open_epoch("run")
        for step in (1, 2):
            store.save(plain(step, 3 * MIB, epoch=epoch))
    flip(store.step_folder("run", epoch, 2) / "model.safetensors", -5)  # its size fits: only every byte read tells
    with limited(tmp_path, 7) as store:
        with pytest.raises(StoreFull):
            store.save(plain(3, 3 * MIB, epoch=epoch), keep=2)
        assert store.steps("run", epoch) == [1, 2]
        lines: list[str] = []
        assert store.load("run", skipped=lines.append).step == 1 and len(lines) == 1


def test_old_epochs_make_room_where_a_limit_is_set_and_say_so(tmp_path: Path) -> None:
    said: list[str] = []
    store = limited(tmp_path, 9, said)
    for attach in range(1, 6):  # a job that is restarted again and again
        epoch = store.open_epoch("run")
        assert epoch == attach
        state = plain(attach, 2 * MIB, epoch=epoch)
        store.write_job("run", epoch, state.description, state.tensors)
        store.save(state, keep=1)
        assert store.newest("run").epoch == epoch and verify(store.root).problems == []
        assert on_disk(store.root) <= 9 * MIB
    assert store.epochs("run") == [4, 5]
    assert said[0] == f"epoch 1 of run run was removed from {store.root} to make room for the job file of run run"


def test_an_old_epoch_stays_while_no_later_one_has_a_good_step(tmp_path: Path) -> None:
    with limited(tmp_path, 100) as store:
        store.save(plain(1, 3 * MIB, epoch=store.open_epoch("run")))
        store.save(plain(2, 3 * MIB, epoch=store.open_epoch("run")))
        flip(store.step_folder("run", 2, 2) / "model.safetensors", -5)
    with limited(tmp_path, 7) as store:
        with pytest.raises(StoreFull):
            store.save(plain(3, 3 * MIB, epoch=store.open_epoch("run")))
        assert store.epochs("run") == [1, 2, 3]


def test_other_runs_are_never_touched(tmp_path: Path) -> None:
    store = limited(tmp_path, 5)
    store.save(plain(1, 3 * MIB, run="other", epoch=store.open_epoch("other")))
    with pytest.raises(StoreFull):
        store.save(plain(2, 3 * MIB, epoch=store.open_epoch("run")), keep=1)
    assert store.newest("other").step == 1


def test_free_space_is_asked_of_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = store.open_epoch("run")
    left = SimpleNamespace(f_bavail=100, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: left)
    with pytest.raises(StoreFull, match=r"needs 1\.0 MiB, .* has 0\.4 MiB free: free space or keep fewer steps"):
        store.save(plain(1, MIB, epoch=epoch))
    left.f_bavail = 400
    store.save(plain(1, MIB, epoch=epoch))


# withdrawn steps, damaged steps, latest


def test_latest_goes_back_before_a_withdrawn_step_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2, 3):
        store.save(small(step, epoch=epoch))
    latest = store.run_folder("run") / "latest"
    dangling = []
    rename = os.rename

    def looking(source: Path, target: Path) -> None:
        rename(source, target)
        named = read_latest(latest)
        assert named is not None
        dangling.append(not store.step_folder("run", *named).is_dir())

    monkeypatch.setattr(os, "rename", looking)
    assert store.withdraw("run", epoch, 2) == [2, 3]
    assert not any(dangling) and read_latest(latest) == (epoch, 1) and store.steps("run", epoch) == [1]
    store.save(small(1, epoch=epoch))
    monkeypatch.undo()
    assert store.withdraw("run", epoch, 0) == [1]
    assert not latest.exists() and verify_empty(store)


def verify_empty(store: Store) -> bool:
    return not store.steps("run", 1) and unfinished(store.root) == []


def test_latest_never_dangles_while_a_damaged_step_is_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    os.truncate(store.step_folder("run", epoch, 2) / "model.safetensors", 9)
    latest = store.run_folder("run") / "latest"
    rename = os.rename

    def looking(source: Path, target: Path) -> None:
        rename(source, target)
        named = read_latest(latest)
        assert named is not None and store.step_folder("run", *named).is_dir()

    monkeypatch.setattr(os, "rename", looking)
    store.save(small(2, epoch=epoch))
    assert read_latest(latest) == (epoch, 2)
    same(store.load("run"), small(2))


def test_a_withdrawn_step_leaves_the_timeline_before_as_the_newest(store: Store) -> None:
    store.save(small(5, epoch=store.open_epoch("run")))
    epoch = store.open_epoch("run")
    store.save(small(1, epoch=epoch))
    store.withdraw("run", epoch, 1)
    assert read_latest(store.run_folder("run") / "latest") == (1, 5)


# starting


def test_a_sweep_at_start_takes_what_dead_writers_left_in_every_run(store: Store) -> None:
    for run in ("one", "two", "three"):
        epoch = store.open_epoch(run)
        store.save(small(1, run=run, epoch=epoch))
        shutil.copytree(store.step_folder(run, epoch, 1), store.epoch_folder(run, epoch) / ".tmp-step-2-99999-0")
        (store.run_folder(run) / ".tmp-latest-99999-1").write_text("e9")
    store.close()
    (store.run_folder("three") / "latest").write_text("e1/step-9\n")
    with Store(store.root) as alive:
        alive._lock("two")
        kept = store.epoch_folder("two", 1) / ".tmp-step-2-99999-0"
        shutil.copytree(store.step_folder("two", 1, 1), kept)
        with Store(store.root) as starting:
            starting.sweep()
        assert unfinished(store.root) == [kept]  # a living writer's are its own
    assert read_latest(store.run_folder("three") / "latest") == (1, 1)
    with Store(store.root) as other:
        assert other.open_epoch("one") == 2  # the sweep holds no lock afterwards


def test_a_sweep_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    Store(tmp_path / "nowhere").sweep()
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_is_just_being_swept_is_waited_for(store: Store) -> None:
    store.open_epoch("run")
    threading.Timer(0.3, store.close).start()
    with Store(store.root) as other:
        assert other.open_epoch("run") == 2


def test_two_daemons_at_once_get_epochs_of_their_own(store: Store) -> None:
    assert store.open_epoch("run") == 1
    with Store(store.root) as other, pytest.raises(RunTaken):
        other.open_epoch("run", pytest.fail)


def test_epochs_lie_above_those_that_are_elsewhere(store: Store) -> None:
    store.reserve("run", 7)
    store.reserve("run", 3)
    assert store.open_epoch("run") == 8
    assert store.open_epoch("run") == 9
    assert store.open_epoch("other") == 1


def test_a_disk_that_cannot_be_listed_gives_epochs_by_the_clock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(small(1, epoch=store.open_epoch("run")))
    listed = Path.iterdir

    def failing(path: Path) -> Iterator[Path]:
        if path == store.run_folder("run"):
            raise OSError(5, "Input/output error")
        return listed(path)

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", failing)
        with pytest.raises(FlowcheckError, match="Input/output error"):
            store.open_epoch("run")
        before = int(time.time())
        first, second = store.open_epoch("run", said.append), store.open_epoch("run", said.append)
    assert before <= first < second
    store.save(small(2, epoch=second))
    assert store.newest("run").epoch == second and store.open_epoch("run") == second + 1


def test_an_epoch_of_an_earlier_time_is_never_written_into(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock went back, and what could not be listed when the epoch got its number holds that very one."""
    store.root.mkdir()
    monkeypatch.setattr(time, "time", lambda: 7.0)
    listed = Path.iterdir
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        patch.setattr(os, "mkdir", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert store.open_epoch("run", said.append) == 7 and len(said) == 1
    assert Path.iterdir is listed
    with Store(store.root) as before:
        before.reserve("run", 6)
        before.save(small(1, epoch=before.open_epoch("run")))
    with pytest.raises(FlowcheckError, match="e7 is of an earlier time, when this one could not be listed: attach"):
        store.save(small(2, epoch=7))
    same(store.load("run"), small(1, epoch=7))


# kills


WRITER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from stored_states import plain
from flowcheck.store import Store
store = Store(sys.argv[1])
epoch = store.open_epoch("run")
print("ready", flush=True)
for step in range(1 << 30):
    store.save(plain(step, 1 << 20, epoch=epoch), keep=2)
    if step % 3 == 2:
        store.withdraw("run", epoch, step)
    print("saved", step, flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_latest_names_a_whole_step_after_a_kill_at_any_moment(kills: int, tmp_path: Path) -> None:
    """Saves, retention and withdrawals: `latest` is looked at as an outsider would, without a sweep before."""
    script = tmp_path / "writer.py"
    script.write_text(WRITER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    root = tmp_path / "store"
    chance = random.Random(kills)
    for _ in range(kills):
        with subprocess.Popen([sys.executable, script, root], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(3):
                writer.stdout.readline()
            time.sleep(chance.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
        store = Store(root)
        named = read_latest(store.run_folder("run") / "latest")
        assert named is not None and stepfolder.damage(store.step_folder("run", *named)) == []
        found = store.newest("run")
        assert not found.skipped and (found.epoch, found.step) >= named
