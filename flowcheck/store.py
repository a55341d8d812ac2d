"""The store, `DIR/<run>/e<epoch>/step-<N>/`: a kill at any moment leaves whole snapshots only.

A step is written under a `.tmp-` name, every file fsynced, the manifest last; then the folder is renamed and
its parent fsynced, and `DIR/<run>/latest` is replaced. One process at a time writes a run (an flock on
`DIR/<run>/.lock`); any number read. docs/store.md describes the files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from flowcheck import jobfile, stepfolder
from flowcheck.description import JobDescription
from flowcheck.durable import (
    TEMPORARY,
    Meter,
    make_folder,
    remove,
    replace_file,
    sync_folder,
    temporary,
    write_failure,
)
from flowcheck.errors import FlowcheckError
from flowcheck.jobfile import Progress
from flowcheck.snapshot import Snapshot
from flowcheck.storereader import LATEST, Found, StoreReader, read_latest

__all__ = ["LATEST", "Found", "RunTaken", "Store", "StoreFull", "read_latest"]

LOCK_SECONDS = 2.0  # how long a run's lock is waited for: another daemon that starts sweeps it


class RunTaken(FlowcheckError):
    """Another process writes this run."""


class StoreFull(FlowcheckError):
    """What is to be written does not fit; nothing of it was begun."""


class Store(StoreReader[Path]):
    """The snapshots below one folder of this machine.

    limit: bytes that everything in the folder may take together; then the oldest epochs of a run make room for its
    newest steps. None: as much as the disk has, and only `keep` removes anything.
    report: called with a line about what was removed to make room.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        limit: int | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(Path(root))
        self._limit = limit
        self._report = report
        self._locks: dict[str, int] = {}
        self._guard = threading.RLock()
        self._given: dict[tuple[str, int], bool] = {}  # epochs that were opened here -> whether they have been on disk
        self._above: dict[str, int] = {}  # newest epoch of a run that is known to be elsewhere
        self._proven: dict[str, tuple[int, int]] = {}  # a step of each run that was written here, or read whole

    def close(self) -> None:
        """Give up the write locks."""
        with self._guard:
            for descriptor in self._locks.values():
                os.close(descriptor)
            self._locks.clear()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # epochs

    def open_epoch(self, run: str, report: Callable[[str], None] | None = None) -> int:
        """Create the next free epoch of `run` (the first is 1) and return its number.

        Takes the run's write lock and removes what dead writers left unfinished. RunTaken if another process writes
        this run. A disk that fails is NoPermission or FlowcheckError; with `report` it costs a line there and no
        epoch: the first write that succeeds creates its folder.
        """
        try:
            epoch = max(*self.epochs(run), 0, self._above.get(run, 0), *self._given_to(run)) + 1
        except FlowcheckError:
            if report is None:
                raise
            # the epochs before it cannot be listed: the clock is beyond all that were counted
            epoch = max(int(time.time()), 1 + max(self._given_to(run), default=0))
        self._given[run, epoch] = False
        try:
            self._ensure(run, epoch)
        except RunTaken:
            raise
        except FlowcheckError as error:
            if report is None:
                raise
            report(str(error))
        return epoch

    def reserve(self, run: str, epoch: int) -> None:
        """Epochs of `run` up to this one are elsewhere: the next one that is opened here lies above."""
        self._above[run] = max(epoch, self._above.get(run, 0))

    def _given_to(self, run: str) -> list[int]:
        return [epoch for name, epoch in self._given if name == run]

    def _ensure(self, run: str, epoch: int) -> None:
        """Take the run's lock; create the epoch's folder if it was opened here and is not there (yet, or any more)."""
        self._lock(run)
        folder = self.epoch_folder(run, epoch)
        if (run, epoch) not in self._given:
            if not folder.is_dir():
                raise FlowcheckError(f"{folder} does not exist: open an epoch of run {run} first")
            return
        try:
            make_folder(folder.parent)
            try:
                folder.mkdir()
                sync_folder(folder.parent)
            except FileExistsError:
                if not self._given[run, epoch]:
                    problem = f"{folder} is of an earlier time, when this one could not be listed"
                    raise FlowcheckError(f"{problem}: attach again") from None
        except OSError as error:
            raise write_failure(f"a new epoch of run {run}", self.root, error) from None
        self._given[run, epoch] = True

    # writing

    def write_job(
        self,
        run: str,
        epoch: int,
        description: JobDescription,
        tensors: jobfile.Tensors,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Write an epoch's job file, if it fits. Errors as in `save` and `jobfile.write`."""
        self._ensure(run, epoch)
        nbytes = sum(data.nbytes for _, data in tensors.values())
        text = len(str(description.to_json()))
        self._make_room(run, epoch, nbytes + 2 * text + 256 * len(tensors) + (1 << 14), f"the job file of run {run}")
        jobfile.write(self.job_file(run, epoch), description, tensors, should_stop=should_stop)

    def save(
        self,
        snapshot: Snapshot,
        *,
        keep: int | None = None,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
        copied: Callable[[], None] | None = None,
    ) -> Path:
        """Write a snapshot as a step of its epoch, then keep only that epoch's last `keep` steps.

        Returns the step's folder. The tensors are streamed from the snapshot's arrays. `should_stop` is asked
        after every chunk and once more after the last byte was read: whoever revokes the arrays makes it true
        first, then nothing of the step is stored (`durable.Aborted`). `copied` is called when the arrays are
        no longer needed, before the slow fsync. A step that is already stored whole is left as it is.
        StoreFull if it does not fit: nothing was begun. FlowcheckError on a full or failing disk: the temporary
        folder is gone, older steps are untouched.
        """
        run, epoch, step = snapshot.run, snapshot.epoch, snapshot.step
        folder = self.step_folder(run, epoch, step)
        self._ensure(run, epoch)
        if stepfolder.is_whole(folder):
            if copied is not None:
                copied()
            self._point(run, epoch, step)
            return folder
        self._make_room(run, epoch, stepfolder.planned_bytes(snapshot), f"step {step} of run {run}", keep)
        aside = temporary(folder)
        meter = Meter(snapshot.nbytes, progress, should_stop)
        try:
            stepfolder.write(snapshot, aside, meter, copied)
            if os.path.lexists(folder):  # a damaged step of the same number makes room for the whole one
                self._discard(run, epoch, [step])
            os.rename(aside, folder)
            sync_folder(folder.parent)
        except OSError as error:
            remove(aside)
            raise write_failure(f"step {step} of run {run}", folder, error) from None
        except BaseException:
            remove(aside)
            raise
        self._proven[run] = epoch, step
        self._point(run, epoch, step)
        if keep is not None:
            self._retain(run, epoch, max(1, keep))
        return folder

    def withdraw(self, run: str, epoch: int, first: int) -> list[int]:
        """Remove the steps of an epoch from `first` on: they are wrong, nobody may restore them. Returns which.

        FlowcheckError if one could not be removed; the others are.
        """
        wrong = [step for step in self.steps(run, epoch) if step >= first]
        try:
            self._discard(run, epoch, wrong)
        except OSError as error:
            raise write_failure(f"the removal of steps from {first} on", self.epoch_folder(run, epoch), error) from None
        return wrong

    def _discard(self, run: str, epoch: int, steps: list[int]) -> None:
        """Remove steps; `latest` goes back first, so that it names a step that is there at every moment."""
        self._leave(run, lambda stored, step: stored == epoch and step in steps)
        failure: OSError | None = None
        for step in steps:
            folder = self.step_folder(run, epoch, step)
            doomed = temporary(folder)
            try:
                os.rename(folder, doomed)
            except OSError as error:
                failure = error
                continue
            remove(doomed)
        if failure is not None:
            raise failure

    def _leave(self, run: str, goes: Callable[[int, int], bool]) -> None:
        """Let `latest` name the newest whole step that stays, if the one that it names goes; none: no `latest`."""
        named = read_latest(path := self.run_folder(run) / LATEST)
        if named is None or not goes(*named):
            return
        for epoch in reversed(self.epochs(run)):
            for step in reversed(self.steps(run, epoch)):
                if not goes(epoch, step) and stepfolder.is_whole(self.step_folder(run, epoch, step)):
                    replace_file(path, _pointer(epoch, step))
                    return
        path.unlink(missing_ok=True)
        sync_folder(path.parent)

    def _point(self, run: str, epoch: int, step: int) -> None:
        named = read_latest(path := self.run_folder(run) / LATEST)
        if named is not None and named >= (epoch, step) and self.step_folder(run, *named).is_dir():
            return
        try:
            replace_file(path, _pointer(epoch, step))
        except OSError as error:
            raise write_failure(f"the name of the newest step of run {run}", path, error) from None

    # room

    def _make_room(self, run: str, epoch: int, need: int, what: str, keep: int | None = None) -> None:
        """StoreFull unless `need` bytes fit. What the write would let go anyway goes before it, if that helps."""
        if self._lack(need) and keep is not None:
            self._retain(run, epoch, max(1, keep - 1))
        older = self.epochs(run) if self._limit is not None else []
        for number in older:
            if not self._lack(need):
                break
            if number < epoch and self._good_after(run, number):
                self._remove_epoch(run, number, what)
        problem = self._lack(need)
        if problem:
            raise StoreFull(f"{what} needs {_size(need)}, {problem}; nothing of it was written")

    def _lack(self, need: int) -> str:
        """Why `need` more bytes do not fit, and what to do; "" if they do."""
        try:
            disk = os.statvfs(self.root)
        except OSError:
            return ""  # the write itself will say what is wrong
        free = disk.f_bavail * disk.f_frsize
        if need > free:
            return f"{self.root} has {_size(free)} free: free space or keep fewer steps"
        if self._limit is not None:
            used = _folder_bytes(self.root)
            if need > self._limit - used:
                limit = f"the store takes {_size(used)} of its {_size(self._limit)}"
                return f"{limit}: raise --store-gib or keep fewer steps"
        return ""

    def _good(self, run: str, epoch: int, step: int) -> bool:
        """Whether a step was written here, or every byte of it was read and fits: something to fall back on."""
        folder = self.step_folder(run, epoch, step)
        if self._proven.get(run) == (epoch, step):
            return stepfolder.is_whole(folder)
        if stepfolder.damage(folder):
            return False
        self._proven[run] = epoch, step
        return True

    def _good_after(self, run: str, epoch: int) -> bool:
        later = [number for number in reversed(self.epochs(run)) if number > epoch]
        return any(self._good(run, number, step) for number in later for step in reversed(self.steps(run, number)))

    def _remove_epoch(self, run: str, epoch: int, what: str) -> None:
        folder = self.epoch_folder(run, epoch)
        doomed = temporary(folder)
        try:
            self._leave(run, lambda stored, _: stored == epoch)
            os.rename(folder, doomed)
        except OSError as error:
            raise write_failure(f"the removal of epoch {epoch}", folder, error) from None
        remove(doomed)
        if self._report is not None:
            self._report(f"epoch {epoch} of run {run} was removed from {self.root} to make room for {what}")

    def _retain(self, run: str, epoch: int, keep: int) -> None:
        """Remove the steps of this epoch below its last `keep` whole ones, unless nothing good would be left."""
        kept: list[int] = []
        doomed: list[int] = []
        for step in reversed(self.steps(run, epoch)):
            if len(kept) >= keep:
                doomed.append(step)
            elif stepfolder.is_whole(self.step_folder(run, epoch, step)):
                kept.append(step)
        if doomed and any(self._good(run, epoch, step) for step in kept):
            try:
                self._discard(run, epoch, doomed)
            except OSError as error:
                raise write_failure("the removal of old steps", self.epoch_folder(run, epoch), error) from None

    # what dead writers left

    def sweep(self) -> None:
        """Remove the unfinished files of runs that nobody writes; `latest` names a step that is there, or goes."""
        for run in self.runs():
            self.may_write(run)

    def may_write(self, run: str) -> bool:
        """Whether no other process writes this run; what such a one left is swept. Raises as `open_epoch`."""
        with self._guard:
            if run not in self._locks:
                try:
                    self._lock(run, patience=0)
                except RunTaken:
                    return False
                os.close(self._locks.pop(run))
            return True

    def _lock(self, run: str, patience: float = LOCK_SECONDS) -> None:
        with self._guard:
            if run in self._locks:
                return
            folder = self.run_folder(run)
            try:
                make_folder(folder)
                descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise write_failure(f"run {run}", self.root, error) from None
            try:
                self._wait_for_lock(run, descriptor, time.monotonic() + patience)
                # no other writer lives while the lock is held: every unfinished name is a dead one's
                for path in (folder, *(self.epoch_folder(run, epoch) for epoch in self.epochs(run))):
                    for child in path.iterdir():
                        if child.name.startswith(TEMPORARY):
                            remove(child)
                self._leave(run, lambda epoch, step: not self.step_folder(run, epoch, step).is_dir())
            except BaseException as error:
                os.close(descriptor)
                if isinstance(error, OSError):
                    raise write_failure(f"run {run}", self.root, error) from None
                raise
            self._locks[run] = descriptor

    def _wait_for_lock(self, run: str, descriptor: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise
            if time.monotonic() >= deadline:
                problem = f"another flowcheck writes run {run} in {self.root}"
                raise RunTaken(f"{problem}: stop it, or use another run or store")
            time.sleep(0.05)


def _pointer(epoch: int, step: int) -> bytes:
    return f"e{epoch}/step-{step}\n".encode()


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; what goes meanwhile does not count."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
