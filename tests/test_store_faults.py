"""Disks that fail: what is stored stays whole, what cannot be stored is said, and a disk that heals is used again."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_disk import FailingDisk, failing_disk
from stored_states import flip, plain, same, small, unfinished

from flowcheck import jobfile, stepfolder, tensorfile
from flowcheck.errors import FlowcheckError, NoPermission, NothingRestorable, VerificationFailed
from flowcheck.jobfile import MarkerLog
from flowcheck.store import Store, StoreFull, read_latest
from flowcheck.tensorfile import DamagedFile, RawFile
from flowcheck.verify import verify

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path_factory.mktemp("failing"), 64) as made:
        if isinstance(made, str):
            pytest.skip(made)
        yield made


@pytest.fixture
def there(disk: FailingDisk, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store on the disk that fails, with step 1 in it."""
    disk("ok")
    with Store(disk.path / request.node.name[:40]) as opened:
        opened.save(plain(1, MIB, epoch=opened.open_epoch("run")))
        yield opened
        disk("ok")


def intact(store: Store, step: int, nbytes: int = MIB) -> None:
    """The newest step is this one and every byte of all that is stored is right."""
    assert unfinished(store.root) == []
    report = verify(store.root)
    assert report.problems == []
    found = store.newest("run")
    assert (found.step, found.skipped) == (step, ())
    assert read_latest(store.run_folder("run") / "latest") == (found.epoch, step)
    same(store.load("run"), plain(step, nbytes))


# a loop device whose disk fails


def test_eio_while_writing_costs_the_step_alone_and_the_disk_is_used_again(disk: FailingDisk, there: Store) -> None:
    disk("eio-write")
    with pytest.raises(FlowcheckError, match=r"cannot write step 2 of run run.*Input/output error.*check the disk"):
        there.save(plain(2, MIB))
    disk("ok")
    there.save(plain(3, MIB))
    there.close()
    there.sweep()
    intact(there, 3)


def test_eio_while_reading_is_a_damaged_file_and_no_end_of_the_process(disk: FailingDisk, there: Store) -> None:
    state = there.open("run")
    disk.forget()
    disk("eio-read")
    model = there.step_folder("run", 1, 1) / "model.safetensors"
    with pytest.raises(VerificationFailed, match=r"model.safetensors: Input/output error"):
        state.read("model/layer0", 0, 4096)
    manifest = model.with_name("manifest.json")
    assert f"{manifest}: Input/output error" in verify(there.root).problems
    lines: list[str] = []
    with pytest.raises(NothingRestorable, match="Input/output error"):
        there.load("run", skipped=lines.append)
    assert lines == [f"{manifest}: Input/output error"]
    disk("ok")
    assert state.read("model/layer0", 8, 16) == plain(1, MIB).tensors["model/layer0"][1][8:24].tobytes()
    state.close()
    intact(there, 1)


def test_eio_in_the_newest_step_alone_gives_the_one_before_it(disk: FailingDisk, there: Store) -> None:
    there.save(plain(2, MIB))
    there.load("run", 1)  # now in the page cache, which hides the disk
    victim = os.open(there.step_folder("run", 1, 2) / "model.safetensors", os.O_RDONLY)
    os.posix_fadvise(victim, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(victim)
    disk("eio-read")
    lines: list[str] = []
    assert there.load("run", skipped=lines.append).step == 1
    assert len(lines) == 1 and "step-2/model.safetensors: Input/output error" in lines[0]
    with pytest.raises(VerificationFailed, match="Input/output error"):
        there.load("run", 2)


def test_a_full_disk_is_known_before_and_what_others_take_meanwhile_is_noticed(
    disk: FailingDisk, there: Store
) -> None:
    with pytest.raises(StoreFull, match=r"step 2 of run run needs 1\d\d.\d MiB, .* has \d\d.\d MiB free: free space"):
        there.save(plain(2, 100 * MIB))
    filler = disk.path / "filler"

    def fill() -> bool:
        with open(filler, "wb") as file:
            try:
                while True:
                    file.write(bytes(MIB))
                    file.flush()
            except OSError:
                return False

    with pytest.raises(FlowcheckError, match="No space left on device; nothing of it is left, free space"):
        there.save(plain(3, 20 * MIB), should_stop=lambda: not filler.exists() and fill())
    filler.unlink()
    intact(there, 1)
    there.save(plain(4, 20 * MIB))
    intact(there, 4, 20 * MIB)


def test_a_disk_without_inodes(disk: FailingDisk, there: Store) -> None:
    folder = disk.path / "many"
    folder.mkdir()
    made = 0
    try:
        for made in range(10000):
            (folder / str(made)).touch()
    except OSError as error:
        assert error.errno == errno.ENOSPC
    with pytest.raises(FlowcheckError, match="No space left on device"):
        there.save(plain(2, MIB))
    for number in range(made):
        (folder / str(number)).unlink()
    there.save(plain(3, MIB))
    intact(there, 3)


def test_a_disk_that_becomes_read_only_and_writable_again(disk: FailingDisk, there: Store) -> None:
    there.close()  # a file that is open for writing, as the lock is, forbids it; a kernel that does it asks nobody
    disk.remount("ro")
    try:
        with pytest.raises(NoPermission, match="Read-only file system; make the folder writable"):
            there.save(plain(2, MIB))
        assert there.newest("run").step == 1
        report: list[str] = []
        assert there.open_epoch("run", report.append) == 2 and "Read-only file system" in report[0]
        with pytest.raises(NoPermission):
            there.save(plain(3, MIB, epoch=2))
    finally:
        disk.remount("rw")
    there.save(plain(3, MIB, epoch=2))  # the epoch's folder is made now
    assert there.newest("run").epoch == 2 and unfinished(there.root) == []
    assert verify(there.root).problems == []


def test_a_slow_disk_only_takes_longer(disk: FailingDisk, there: Store) -> None:
    disk("slow 0.02")
    begun = time.monotonic()
    there.save(plain(2, 4 * MIB))
    assert time.monotonic() - begun > 0.3
    disk("ok")
    intact(there, 2, 4 * MIB)


def test_a_disk_that_goes_away_and_comes_back_empty(store: Store, tmp_path: Path) -> None:
    epoch = store.open_epoch("run")
    store.save(plain(1, MIB, epoch=epoch))
    store.root.rename(tmp_path / "gone")
    store.save(plain(2, MIB, epoch=epoch))
    intact(store, 2)


# each call to the disk, failing in turn


class Failing:
    """os.open, write, rename and so on, of which the call number `at` fails."""

    CALLS = ("open", "mkdir", "rename", "fsync", "unlink", "replace")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, number: int) -> None:
        self.at = -1
        self.done = 0
        self._number = number
        self._root = str(root)
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            if call.__name__ == "fsync" or (args and str(args[0]).startswith(self._root)):
                self.done += 1
                if self.done == self.at:
                    raise OSError(self._number, os.strerror(self._number))
            return call(*args, **kwargs)

        failing.__name__ = call.__name__
        return failing


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_whichever_call_fails_the_stored_steps_are_whole(
    number: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = store.open_epoch("run")
    store.save(plain(0, 4096, epoch=epoch))
    step, stored, saw = 0, 0, 0
    with monkeypatch.context() as patch:
        failing = Failing(patch, store.root, number)
        while True:
            step += 1
            failing.done, failing.at = 0, saw + 1
            try:
                store.save(plain(step, 4096, epoch=epoch), keep=2)
            except FlowcheckError as error:
                assert os.strerror(number) in str(error)
            else:
                stored = step
            if failing.done < failing.at:
                break  # no call of this number: all were tried
            saw += 1
            failing.at = -1
            newest = store.newest("run")
            assert newest.step in (stored, step) and not newest.skipped  # a step may be whole though its name failed
            assert read_latest(store.run_folder("run") / "latest") in [(epoch, s) for s in store.steps("run", epoch)]
            assert verify(store.step_folder("run", epoch, newest.step)).problems == []
            stored = newest.step
    assert saw > 12
    store.close()
    store.sweep()
    intact(store, step, 4096)


def test_a_limit_on_the_size_of_files(store: Store) -> None:
    """EFBIG, as RLIMIT_FSIZE or an old file system gives it."""
    epoch = store.open_epoch("run")
    store.save(plain(1, MIB, epoch=epoch))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, before[1]))
    try:
        with pytest.raises(FlowcheckError, match="File too large; nothing of it is left, free space"):
            store.save(plain(2, 4 * MIB, epoch=epoch))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    intact(store, 1)


# what is torn, missing, flipped, or something else


def test_a_file_that_is_cut_while_it_is_read(store: Store) -> None:
    """A mapped file would end the process here."""
    store.save(plain(1, MIB, epoch=store.open_epoch("run")))
    path = store.step_folder("run", 1, 1) / "model.safetensors"
    with store.open("run") as state:
        os.truncate(path, 5000)
        with pytest.raises(VerificationFailed, match="cut short, it ends at byte 5000"):
            state.read("model/layer0", 0, 8192)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", ["missing", "empty", "torn", "longer", "folder", "pipe", "zeros", "link to itself"])
def test_every_file_in_every_state_is_named_and_passed_over(name: str, kind: str, store: Store) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    path = store.step_folder("run", epoch, 2) / name
    data = path.read_bytes()
    path.unlink()
    if kind in ("empty", "torn", "longer", "zeros"):
        path.write_bytes({"empty": b"", "torn": data[:-7], "longer": data + b" \0", "zeros": bytes(len(data))}[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    lines: list[str] = []
    same(store.load(skipped=lines.append), small(1))
    assert len(lines) == 1 and str(path) in lines[0]
    assert any(str(path) in line for line in verify(store.root).problems)
    with pytest.raises(VerificationFailed, match=name):
        store.load("run", 2)
    store.save(small(3, epoch=epoch), keep=2)
    if kind != "zeros":  # which only its checksum tells
        assert store.steps("run", epoch) == [1, 2, 3]  # a damaged step is none of the two


def test_random_flips_and_cuts_never_give_other_bytes(store: Store) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    chance = random.Random(3)
    files = sorted(store.step_folder("run", epoch, 2).iterdir())
    whole = {path: path.read_bytes() for path in files}
    for _ in range(60):
        path = chance.choice(files)
        if chance.random() < 0.7:
            flip(path, chance.randrange(len(whole[path]) - 2))
        else:
            os.truncate(path, chance.randrange(len(whole[path]) - 1))
        state = store.load("run")
        same(state, small(state.step))
        path.write_bytes(whole[path])
    assert store.load("run").step == 2


@pytest.mark.parametrize("content", [None, "", "e1/step-7\n", "e9/step-1\n", "../../etc/passwd\n", "\0" * 40, "e1"])
def test_a_latest_that_is_lost_or_wrong_misleads_nobody_and_is_mended(content: str | None, store: Store) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    latest = store.run_folder("run") / "latest"
    latest.unlink()
    if content is not None:
        latest.write_text(content)
    assert store.newest("run").step == 2
    same(store.load("run"), small(2))
    store.save(small(3, epoch=epoch))
    assert read_latest(latest) == (epoch, 3)


def test_an_epoch_that_cannot_be_listed_does_not_hide_the_one_before(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        store.save(small(step, epoch=store.open_epoch("run")))
    listed = Path.iterdir

    def failing(path: Path) -> Iterator[Path]:
        if path.name == "e2":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", failing)
    lines: list[str] = []
    assert store.load("run", skipped=lines.append).epoch == 1
    assert lines == [f"cannot read {store.epoch_folder('run', 2)}: Input/output error"]


def test_reading_something_that_always_fails() -> None:
    with RawFile(Path("/proc/self/mem")) as file, pytest.raises(DamagedFile, match="mem: Input/output error"):
        file.read(0, 8)


def test_a_checksum_holds_for_the_bytes_that_are_given_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives other bytes the second time: there is no second time."""
    store.save(small(1, epoch=store.open_epoch("run")))
    reads: dict[int, int] = {}
    preadv = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int, *rest: Any) -> int:
        got = preadv(descriptor, buffers, offset, *rest)
        for place in range(offset, offset + got):
            key = os.fstat(descriptor).st_ino << 32 | place
            reads[key] = reads.get(key, 0) + 1
        return got

    monkeypatch.setattr(os, "preadv", counting)
    with stepfolder.OpenStep(store.step_folder("run", 1, 1)) as step:
        reads.clear()
        for key in step.specs:
            step.load(key)
    assert set(reads.values()) == {1}


# markers


def test_markers_survive_a_full_disk_and_a_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "e1" / "markers.jsonl"

    def append(log: MarkerLog, step: int) -> None:
        log.append({"step": step})
        while log.status()["waiting"]:
            time.sleep(0.001)

    log = MarkerLog(path, said.append)
    append(log, 1)  # the epoch's folder is not there: so is the disk
    assert said == [f"the markers file {path}: lines are missing in it from now on: No such file or directory"]
    assert log.status() == {
        "name": f"the markers file {path}", "waiting": 0, "missing": 1, "problem": "No such file or directory"
    }  # fmt: skip
    path.parent.mkdir()
    append(log, 2)
    assert said[1:] == [f"the markers file {path}: lines are written again, 1 are missing"]
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:4]))
    append(log, 3)
    append(log, 4)
    monkeypatch.setattr(os, "write", write)
    append(log, 5)
    assert len(said) == 4 and said[3].endswith("2 are missing")
    assert log.status() == {"name": f"the markers file {path}", "waiting": 0, "missing": 3, "problem": None}
    log.close()
    assert [marker["step"] for marker in jobfile.read_markers(path)] == [2, 5]
    with open(path, "ab") as file:
        file.write(b'{"step": 6, "torn by a ki')
    log = MarkerLog(path, said.append)
    for step in range(7, 500):
        log.append({"step": step})
    log.close()  # waits for all of them
    log.append({"step": 500})
    assert [marker["step"] for marker in jobfile.read_markers(path)] == [2, 5, *range(7, 500)]


def test_headers_that_lie_about_lengths(tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    for data in (
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}x",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (len(deep := b'{"a":' + b"[" * 50000)).to_bytes(8, "little") + deep,
        *(
            len(text).to_bytes(8, "little") + text + bytes(8)
            for text in (
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}',
                b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
                b'{"a":{"dtype":"Q9","shape":[2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":[1]}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":1}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"8" * 5000 + b"]}}",
            )
        ),
    ):
        path.write_bytes(data)
        with pytest.raises(DamagedFile, match=r"hostile\.safetensors"):
            tensorfile.read_header(path)
