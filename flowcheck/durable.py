"""Files that are either whole or absent after a crash: write aside, fsync, rename, fsync the folder."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowcheck.errors import FlowcheckError, NoPermission

TEMPORARY = ".tmp-"
"""What every unfinished file and folder is called at first: a crash leaves only names that start so."""

_counter = itertools.count()


class Aborted(FlowcheckError):
    """A write that its caller gave up: nothing is left of it."""


class Meter:
    """Progress of one long write, and its way out: `advance` raises `Aborted` once `should_stop()` is true.

    `progress(done, total)` is called with byte counts.
    """

    def __init__(
        self,
        total: int,
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._should_stop = should_stop

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self._should_stop is not None and self._should_stop():
            raise Aborted(f"writing stopped on request after {self.done} of {self.total} bytes")
        if self._progress is not None:
            self._progress(min(self.done, self.total), self.total)


def temporary(path: Path) -> Path:
    """A name beside `path` that no other process and no other call uses."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{next(_counter)}")


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; every new name is durable."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`: readers and crashes see the old content or the new one, never a part."""
    aside = temporary(path)
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    except BaseException:
        remove(aside)
        raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or folder if it is there; what cannot be removed is left for the next sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def write_failure(what: str, path: Path, error: OSError) -> FlowcheckError:
    """The one line for an OSError while writing: what failed, why, and what to do about it."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NoPermission(f"cannot write {what} to {path}: {reason}; make the folder writable")
    advice = "check the disk"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free space or keep fewer steps"
    return FlowcheckError(f"cannot write {what} to {path}: {reason}; nothing of it is left, {advice}")


@contextmanager
def staged(path: Path, *, folder: bool) -> Iterator[Path]:
    """A temporary file or folder beside `path` for an output; removed on any error, renamed by the caller.

    It is locked while its writer lives, so that what a killed writer of the same output left is swept here.
    """
    for stale in path.parent.glob(f"{TEMPORARY}{glob.escape(path.name)}-*"):
        descriptor = os.open(stale, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(stale)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    aside = temporary(path)
    if folder:
        aside.mkdir()
    else:
        aside.touch(exist_ok=False)
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield aside
    except BaseException:
        remove(aside)
        raise
    finally:
        os.close(descriptor)
