"""The copy of a store at an fsspec URL: what is there is whole, whatever fails on the way, and is restored alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stored_states import flip, plain, same, small

from flowcheck import remote, uploader
from flowcheck.client import snapshot
from flowcheck.errors import NothingRestorable, UsageError, VerificationFailed
from flowcheck.remote import connect, is_remote, shown
from flowcheck.store import Store
from flowcheck.storereader import open_store, read_latest
from flowcheck.uploader import Uploader
from flowcheck.verify import verify

PATIENCE = 20.0


class Cloud(MemoryFileSystem):
    """An object store in memory that fails when it is told to: `broken` is asked before each operation."""

    protocol = "cloud"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    broken: Callable[[str, str], None] | None = None
    told: list[tuple[str, str]] = []  # noqa: RUF012

    @classmethod
    def ask(cls, operation: str, path: str) -> None:
        cls.told.append((operation, path))
        if cls.broken is not None:
            cls.broken(operation, path)

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.ask("ls", path)
        return super().ls(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self.ask("info", path)
        return super().info(path, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.ask("read", path)
        return super().cat_file(path, *args, **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.ask("write" if "w" in mode else "open", path)
        return super().open(path, mode, **kwargs)

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        self.ask("rm", path)
        super().rm(path, *args, **kwargs)

    def mv(self, path1: str, path2: str, *args: Any, **kwargs: Any) -> None:
        self.ask("mv", path2)
        super().mv(path1, path2, *args, **kwargs)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("cloud", Cloud, clobber=True)
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(uploader, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(uploader, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(uploader, "STALL_SECONDS", 2.0)
    yield
    Cloud.broken = None
    Cloud.store.clear()
    Cloud.pseudo_dirs[:] = [""]
    Cloud.told.clear()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


class Copy:
    """An uploader that runs, and what it said."""

    def __init__(self, store: Store, url: str, keep: int = 3) -> None:
        self.store = store
        self.url = url
        self.said: list[str] = []
        self.thread = Uploader(store, url, keep=keep, report=self.said.append)
        self.thread.start()

    def save(self, step: int, epoch: int = 1, run: str = "run", **options: Any) -> None:
        self.store.save(small(step, run=run, epoch=epoch), **options)
        self.thread.offer(run, epoch, step)

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, (self.thread.status(), self.said)
            time.sleep(0.005)

    def idle(self) -> None:
        self.until(lambda: not self.thread.status()["waiting"])

    def steps(self, epoch: int = 1, run: str = "run") -> list[int]:
        return open_store(self.url).steps(run, epoch)

    def latest(self, run: str = "run") -> tuple[int, int] | None:
        return read_latest(connect(self.url) / run / "latest")


@pytest.fixture
def copies(store: Store) -> Iterator[Callable[..., Copy]]:
    made: list[Copy] = []

    def make(url: str = "cloud://bucket/deep/store", **options: Any) -> Copy:
        made.append(Copy(options.pop("store", store), url, **options))
        return made[-1]

    yield make
    for copy in made:
        copy.thread.finish()


@pytest.mark.parametrize("scheme", ["cloud", "memory", "file"])
def test_a_step_at_a_url_comes_back_in_every_field_and_byte(
    scheme: str, store: Store, copies: Callable[..., Copy], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/mounted/here" if scheme == "file" else f"{scheme}://bucket/{tmp_path.name}"
    copy = copies(url)
    store.open_epoch("run")
    for step in (1, 2):
        copy.save(step)
        copy.idle()
    same(snapshot(url, "run"), small(2))
    same(snapshot(url, "run", 1), small(1))
    same(snapshot(url), small(2))
    assert copy.latest() == (1, 2)
    report = verify(connect(url))
    assert len(report.checked) == 2 and report.problems == [] and report.nbytes > 0
    status = copy.thread.status()
    assert (status["run"], status["epoch"], status["step"], status["problem"]) == ("run", 1, 2, None)
    assert copy.said == []
    with pytest.raises(NothingRestorable, match="no step 9; stored are 2 steps, 1 to 2"):
        snapshot(url, "run", 9)


def test_the_pointer_is_written_last_and_the_manifest_after_the_tensors(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1)
    copy.idle()
    order = [
        path.rpartition("/")[2]
        for operation, path in Cloud.told
        if operation == "mv" or (operation == "write" and ".tmp-" not in path)
    ]
    assert order == ["model.safetensors", "optimizer.safetensors", "manifest.json", "latest"]


def test_whatever_fails_whenever_no_reader_meets_half_a_step_and_the_upload_goes_on(
    store: Store, copies: Callable[..., Copy]
) -> None:
    """Every operation fails once, each in turn, with every kind of error; after each, the URL is read as it is."""
    copy = copies(keep=2)
    store.open_epoch("run")
    copy.save(1)
    copy.idle()
    errors = [OSError(104, "Connection reset by peer"), TimeoutError(), RuntimeError("503 Slow Down"), KeyError("etag")]
    step, failures = 1, 0
    while True:
        step += 1
        count = 0
        fails_at = failures + 1
        seen: list[int] = []

        def broken(operation: str, path: str) -> None:
            nonlocal count
            if operation not in ("write", "rm", "mv"):  # looks are tried again at once, in their own test
                return
            count += 1
            if count == fails_at:  # noqa: B023
                raise errors[count % len(errors)]

        Cloud.broken = broken
        copy.save(step, keep=2)
        copy.idle()
        Cloud.broken = None
        if count < fails_at:
            break
        failures += 1
        assert copy.thread.status()["problem"] is None
        seen.append(snapshot(copy.url, "run").step)
        assert seen == [step] and copy.latest() == (1, step)
        assert verify(connect(copy.url)).problems == []
    assert failures >= 8
    assert [line for line in copy.said if "cannot be brought up to date" in line]
    assert len([line for line in copy.said if "is brought up to date again" in line]) == failures
    assert copy.steps() == [step - 1, step]


def test_what_a_reader_meets_at_every_moment_of_an_upload_is_whole(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies(keep=1)
    store.open_epoch("run")
    copy.save(1)
    copy.idle()
    met: list[int] = []
    looking = threading.local()

    def look(operation: str, path: str) -> None:
        if operation in ("write", "rm", "mv") and not getattr(looking, "now", False):
            looking.now = True
            lines: list[str] = []
            state = open_store(copy.url).load("run", skipped=lines.append)
            same(state, small(state.step))
            assert lines == []
            met.append(state.step)
            looking.now = False

    for step in (2, 3):
        Cloud.broken = look
        copy.save(step, keep=1)
        copy.idle()
        Cloud.broken = None
    assert copy.said == [] and len(met) > 10 and met == sorted(met) and set(met) == {1, 2, 3}


def test_a_step_that_goes_loses_its_manifest_first(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies(keep=1)
    store.open_epoch("run")
    for step in (1, 2):
        copy.save(step)
        copy.idle()
    gone = [path.partition("/e1/")[2] for operation, path in Cloud.told if operation == "rm" and ".tmp-" not in path]
    assert gone == ["step-1/manifest.json", "step-1"]


def test_a_step_that_is_uploaded_again_is_nobodys_meanwhile(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1)
    copy.save(2)
    copy.idle()
    other = small(2)
    other.tensors = small(4).tensors
    store.withdraw("run", 1, 2)
    store.save(other)
    met: list[int] = []

    def look(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("safetensors"):
            Cloud.broken = None
            lines: list[str] = []
            met.append(open_store(copy.url).load("run", skipped=lines.append).step)
            assert lines == []
            Cloud.broken = look

    Cloud.broken = look
    copy.thread.offer("run", 1, 2)
    copy.idle()
    Cloud.broken = None
    assert met == [1, 1]
    same(snapshot(copy.url), other)


def test_of_steps_that_wait_only_the_newest_is_uploaded(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    gate = threading.Event()
    Cloud.broken = lambda operation, path: operation != "write" or gate.wait(PATIENCE) or None
    store.open_epoch("run")
    copy.save(1)
    copy.until(lambda: any(operation == "write" for operation, _ in Cloud.told))
    for step in range(2, 30):
        copy.save(step, keep=2)
    assert copy.thread.status()["waiting"] == ["run/e1"]
    gate.set()
    copy.idle()
    assert copy.steps() == [1, 29] and copy.latest() == (1, 29)  # 1 was under way and is gone here: it was open


def test_a_remote_that_is_away_for_long_costs_one_line_and_is_caught_up_with(
    store: Store, copies: Callable[..., Copy]
) -> None:
    def away(operation: str, path: str) -> None:
        raise OSError("Could not connect to the endpoint URL")

    Cloud.broken = away
    copy = copies()
    store.open_epoch("run")
    for step in range(1, 6):
        copy.save(step)
        time.sleep(0.05)
    copy.until(lambda: copy.thread.status()["problem"])
    status = copy.thread.status()
    assert status["failing_since"] <= time.time() and "Could not connect" in status["problem"]
    Cloud.broken = None
    copy.idle()
    copy.until(lambda: copy.thread.status()["problem"] is None)
    assert len(copy.said) == 2 and "is tried again" in copy.said[0] and "up to date again" in copy.said[1]
    assert copy.latest() == (1, 5)


def test_a_remote_that_hangs_does_not_hold_the_end_of_the_daemon_up(store: Store) -> None:
    gate = threading.Event()
    Cloud.broken = lambda operation, path: operation != "write" or gate.wait(60) or None
    copy = Copy(store, "cloud://bucket/hangs")
    store.open_epoch("run")
    copy.save(1)
    copy.until(lambda: any(operation == "write" for operation, _ in Cloud.told))
    begun = time.monotonic()
    copy.thread.finish()
    assert time.monotonic() - begun < 10
    assert copy.said == ["cloud://bucket/hangs: the newest steps of run/e1 are not there"]
    gate.set()


def test_a_look_that_fails_for_a_moment_does_not_give_an_older_step(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies()
    store.open_epoch("run")
    for step in (1, 2):
        copy.save(step)
        copy.idle()
    calls = 0

    def now_and_then(operation: str, path: str) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OSError("Connection reset")

    Cloud.broken = now_and_then
    state = snapshot(copy.url, "run")
    Cloud.broken = None
    assert state.step == 2 and state.notes == [] and calls > 20


@pytest.mark.parametrize("kind", ["flip", "cut", "missing", "manifest"])
def test_a_damaged_step_at_the_url_is_named_and_passed_over(
    kind: str, store: Store, copies: Callable[..., Copy], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/mounted"
    copy = copies(url)
    store.open_epoch("run")
    for step in (1, 2):
        copy.save(step)
        copy.idle()
    folder = tmp_path / "mounted" / "run" / "e1" / "step-2"
    model = folder / "model.safetensors"
    if kind == "flip":
        flip(model, -3)
    elif kind == "cut":
        model.write_bytes(model.read_bytes()[:-3])
    elif kind == "missing":
        model.unlink()
    else:
        flip(folder / "manifest.json", 40)
    name = "manifest.json" if kind == "manifest" else "model.safetensors"
    state = snapshot(url, "run")
    same(state, small(1))
    assert len(state.notes) == 1 and f"{url}/run/e1/step-2/{name}" in state.notes[0]
    with pytest.raises(VerificationFailed, match=name):
        snapshot(url, "run", 2)
    assert any(name in problem for problem in verify(connect(url)).problems)


def test_what_is_damaged_here_is_not_uploaded(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1)
    copy.idle()
    store.save(small(2))
    model = store.step_folder("run", 1, 2) / "model.safetensors"
    flip(model, -3)
    copy.thread.offer("run", 1, 2)
    copy.until(lambda: copy.said)
    copy.idle()
    assert copy.said == [f"{copy.url}: {model} differs from its checksum; step 2 is not uploaded"]
    assert copy.steps() == [1] and copy.latest() == (1, 1)
    copy.save(3)
    copy.idle()
    assert copy.steps() == [1, 3]


def test_a_wrong_step_goes_from_the_url_too(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    store.open_epoch("run")
    for step in (1, 2, 3):
        copy.save(step)
        copy.idle()
    copy.thread.withdraw("run", 1, 2)
    copy.idle()
    assert copy.steps() == [1] and copy.latest() == (1, 1)
    copy.thread.withdraw("run", 1, 0)
    copy.idle()
    assert copy.steps() == [] and copy.latest() is None


def test_a_step_that_turns_out_wrong_while_it_is_uploaded_never_appears(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1)
    copy.idle()

    def withdrawn(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("step-2/optimizer.safetensors"):
            Cloud.broken = None
            copy.thread.withdraw("run", 1, 2)

    Cloud.broken = withdrawn
    copy.save(2)
    copy.idle()
    assert copy.steps() == [1] and copy.latest() == (1, 1) and copy.said == []


def test_a_step_that_turns_out_wrong_as_its_manifest_arrives_is_never_the_newest(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1)
    copy.idle()
    named = []

    def withdrawn(operation: str, path: str) -> None:
        if operation == "mv" and path.endswith("step-2/manifest.json"):
            copy.thread.withdraw("run", 1, 2)
        if operation == "mv" and path.endswith("latest"):
            named.append(path)

    Cloud.broken = withdrawn
    copy.save(2)
    copy.idle()
    Cloud.broken = None
    assert copy.steps() == [1] and copy.latest() == (1, 1) and named == []


def test_doubt_reaches_the_manifests_at_the_url(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    store.open_epoch("run")
    for step in (1, 2):
        copy.save(step)
        copy.idle()
    copy.thread.doubt("run", 1, 1, "the trainer says otherwise")
    copy.thread.doubt("run", 1, 1, "the trainer says otherwise")
    copy.idle()
    assert snapshot(copy.url, "run", 1).reasons == small(1).reasons
    said = snapshot(copy.url, "run", 2)
    assert not said.exact and said.reasons == [*small(2).reasons, "may be wrong: the trainer says otherwise"]


def test_a_half_upload_is_nobodys_step_and_swept_by_the_next_epoch(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1)
    copy.idle()

    def dead(operation: str, path: str) -> None:
        if operation in ("write", "mv", "rm") and not path.endswith("model.safetensors"):
            raise OSError("gone")

    Cloud.broken = dead
    copy.save(2)
    copy.until(lambda: copy.thread.status()["problem"])
    Cloud.broken = None
    copy.thread.finish()
    half = connect(copy.url) / "run" / "e1" / "step-7"
    (half / "model.safetensors").write([b"a part"])
    state = snapshot(copy.url, "run")
    assert state.step in (1, 2) and state.notes == []
    assert verify(connect(copy.url)).problems == []
    with pytest.raises(NothingRestorable):
        snapshot(copy.url, "run", 7)
    again = copies()
    again.save(3, store.open_epoch("run"))
    again.idle()
    assert 7 not in again.steps(1) and again.steps(2) == [3] and again.latest() == (2, 3)


def test_a_store_that_was_lost_goes_on_above_what_is_at_the_url(
    store: Store, copies: Callable[..., Copy], tmp_path: Path
) -> None:
    copy = copies()
    for _ in range(3):
        epoch = store.open_epoch("run")
    copy.save(40, epoch)
    copy.idle()
    with Store(tmp_path / "another disk") as empty:
        other = copies(store=empty)
        other.until(lambda: other.thread._known)
        assert empty.open_epoch("run") == 4
        other.save(5, 4)
        other.idle()
    assert snapshot(copy.url, "run").step == 5 and copy.latest() == (4, 5)


def test_two_stores_never_mix_in_one_epoch(store: Store, copies: Callable[..., Copy], tmp_path: Path) -> None:
    copy = copies()
    with Store(tmp_path / "another") as second:
        other = copies(store=second)
        other.until(lambda: other.thread._known)
        assert store.open_epoch("run") == second.open_epoch("run") == 1  # both before the other was seen
        copy.save(1)
        copy.idle()
        other.save(2)
        other.until(lambda: other.said)
        problem = "holds epoch 1 of run run, which another store wrote; epoch 1 is not uploaded: attach again"
        assert problem in other.said[0]
        assert copy.steps() == [1]
        other.save(3, second.open_epoch("run"))
        other.idle()
        assert copy.steps(1) == [1] and copy.steps(2) == [3]


def test_names_that_are_no_runs_or_steps_are_left_alone(store: Store, copies: Callable[..., Copy]) -> None:
    root = connect("cloud://bucket/deep/store")
    for name in ("readme.txt", "run/e1/notes", "run/e01/step-1/manifest.json", ".hidden/e1/step-1/manifest.json"):
        place = root
        for part in name.split("/"):
            place = place / part
        place.write([b"mine"])
    copy = copies()
    copy.save(1, store.open_epoch("run"))
    copy.idle()
    assert open_store(copy.url).runs() == ["run"]
    assert (root / "readme.txt").read_at(0, 10) == b"mine"


def test_large_files_go_through_in_pieces(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    state = plain(1, 40 << 20, epoch=store.open_epoch("run"), tensors=2)
    store.save(state)
    copy.thread.offer("run", 1, 1)
    copy.idle()
    same(snapshot(copy.url, "run"), state)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/x", r"nosuch://bucket/x: Protocol not known"),
        ("hdfs9://user:secret@host/x?token=1", r"^hdfs9://host/x: Protocol not known"),
    ],
)
def test_a_url_that_cannot_be_used_is_said_at_the_start(url: str, message: str, store: Store) -> None:
    with pytest.raises(UsageError, match=message):
        Uploader(store, url, keep=1, report=pytest.fail)
    with pytest.raises(UsageError):
        snapshot(url)


def test_endpoints_are_no_urls_and_secrets_are_not_shown() -> None:
    assert not is_remote("tcp://127.0.0.1:7070") and not is_remote("ipc:///run/x") and not is_remote("/var/lib/x")
    assert is_remote("s3://bucket/x") and is_remote("file:///mnt/x")
    assert shown("sftp://me:secret@host:22/path?key=1#x") == "sftp://host:22/path"
    assert str(connect("memory://me:secret@host/path")).startswith("memory://host/path")
