"""The store, `DIR/<run>/e<epoch>/step-<N>/`: a kill at any moment leaves whole snapshots only.

A step is written under a `.tmp-` name, every file fsynced, the manifest last; then the folder is renamed and
its parent fsynced, and `DIR/<run>/latest` is replaced. One process at a time writes a run (an flock on
`DIR/<run>/.lock`); any number read. docs/store.md describes the files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from flowcheck import jobfile, stepfolder
from flowcheck.description import DescriptionError, check_run_name
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
from flowcheck.errors import BadConfig, FlowcheckError, NothingRestorable, VerificationFailed
from flowcheck.jobfile import Progress
from flowcheck.snapshot import Snapshot
from flowcheck.tensorfile import DamagedFile

LATEST = "latest"

RESCANS = 16  # times that a reader lists a run again because the writer removed what it was about to read

_EPOCH = re.compile(r"e(0|[1-9][0-9]{0,17})")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class Found:
    """A stored state that passed the cheap check: its manifest parses and its files have their sizes."""

    run: str
    epoch: int
    step: int
    path: Path
    """The step folder, or the job file when no later step of its epoch is stored."""
    written_ns: int
    skipped: tuple[str, ...] = ()
    """Newer states that were passed over, one line each: what is wrong with which file."""


class Store:
    """The snapshots below one folder. Only `open_epoch` and `save` lock and write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._locks: dict[str, int] = {}
        self._guard = threading.Lock()

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

    # names

    def run_folder(self, run: str) -> Path:
        return self.root / check_run_name(run)

    def epoch_folder(self, run: str, epoch: int) -> Path:
        return self.run_folder(run) / f"e{epoch}"

    def step_folder(self, run: str, epoch: int, step: int) -> Path:
        return self.epoch_folder(run, epoch) / f"step-{step}"

    def job_file(self, run: str, epoch: int) -> Path:
        """Where `jobfile.write` puts the description and initial state of an epoch."""
        return self.epoch_folder(run, epoch) / jobfile.JOB_FILE

    def markers_file(self, run: str, epoch: int) -> Path:
        return self.epoch_folder(run, epoch) / jobfile.MARKERS_FILE

    def runs(self) -> list[str]:
        """Names of the runs, sorted; [] if the folder does not exist."""
        names: list[str] = []
        for path in _children(self.root):
            with contextlib.suppress(DescriptionError):
                names += [check_run_name(path.name)] if any(_numbers(path, _EPOCH)) else []
        return sorted(names)

    def epochs(self, run: str) -> list[int]:
        return sorted(_numbers(self.run_folder(run), _EPOCH))

    def steps(self, run: str, epoch: int) -> list[int]:
        """Steps that have a folder, ascending; whether they are whole is not looked at."""
        return sorted(_numbers(self.epoch_folder(run, epoch), _STEP))

    # writing

    def open_epoch(self, run: str) -> int:
        """Create the next free epoch of `run` (the first is 1) and return its number.

        Takes the run's write lock and removes what dead writers left unfinished. FlowcheckError if another
        process writes this run, NoPermission or FlowcheckError if the folder cannot be written.
        """
        self._lock(run)
        try:
            epoch = max(self.epochs(run), default=0) + 1
            self.epoch_folder(run, epoch).mkdir()
            sync_folder(self.run_folder(run))
        except OSError as error:
            raise write_failure(f"a new epoch of run {run}", self.root, error) from None
        return epoch

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
        FlowcheckError on a full or failing disk: the temporary folder is gone, older steps are untouched.
        """
        run, epoch, step = snapshot.run, snapshot.epoch, snapshot.step
        folder = self.step_folder(run, epoch, step)
        if not folder.parent.is_dir():
            raise FlowcheckError(f"{folder.parent} does not exist: open an epoch of run {run} first")
        self._lock(run)
        if not stepfolder.is_whole(folder):
            aside = temporary(folder)
            meter = Meter(sum(spec.nbytes for spec, _ in snapshot.tensors.values()), progress, should_stop)
            try:
                stepfolder.write(snapshot, aside, meter, copied)
                _publish(aside, folder)
            except OSError as error:
                remove(aside)
                raise write_failure(f"step {step} of run {run}", folder, error) from None
            except BaseException:
                remove(aside)
                raise
        elif copied is not None:
            copied()
        self._point(run, epoch, step)
        if keep is not None:
            self._retain(run, epoch, max(1, keep))
        return folder

    def _point(self, run: str, epoch: int, step: int) -> None:
        named = read_latest(path := self.run_folder(run) / LATEST)
        if named is not None and named >= (epoch, step) and self.step_folder(run, *named).is_dir():
            return
        try:
            replace_file(path, f"e{epoch}/step-{step}\n".encode())
        except OSError as error:
            raise write_failure(f"the name of the newest step of run {run}", path, error) from None

    def _retain(self, run: str, epoch: int, keep: int) -> None:
        """Remove the steps of this epoch below its last `keep` whole ones, never the one `latest` names."""
        whole = 0
        named = read_latest(self.run_folder(run) / LATEST)
        for step in reversed(self.steps(run, epoch)):
            folder = self.step_folder(run, epoch, step)
            if whole < keep:
                whole += stepfolder.is_whole(folder)
            elif named != (epoch, step):
                doomed = temporary(folder)
                try:
                    os.rename(folder, doomed)
                except OSError as error:
                    raise write_failure(f"the removal of step {step}", folder, error) from None
                remove(doomed)

    def _lock(self, run: str) -> None:
        with self._guard:
            if run in self._locks:
                return
            folder = self.run_folder(run)
            try:
                make_folder(folder)
                descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise write_failure(f"run {run}", self.root, error) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # no other writer lives while the lock is held: every unfinished name is a dead one's
                for path in (folder, *(self.epoch_folder(run, epoch) for epoch in self.epochs(run))):
                    for child in path.iterdir():
                        if child.name.startswith(TEMPORARY):
                            remove(child)
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EWOULDBLOCK:
                    raise write_failure(f"run {run}", self.root, error) from None
                problem = f"another flowcheck writes run {run} in {self.root}"
                raise FlowcheckError(f"{problem}: stop it, or use another run or store") from None
            self._locks[run] = descriptor

    # reading

    def newest(self, run: str | None = None, epoch: int | None = None) -> Found:
        """The newest whole state of `run`: highest epoch, then highest step, walking back over damaged ones.

        Without `run`, of the run that was written last. The state at attach (the job file) counts as the
        first step of its epoch. `Found.skipped` names what was passed over. NothingRestorable if no state is
        whole.
        """
        found: Found | None = None
        problems: list[str] = []
        for name in [run] if run is not None else self.runs():
            passed: list[str] = []
            for candidate in self._states(name, epoch):
                if isinstance(candidate, Found):
                    if found is None or candidate.written_ns > found.written_ns:
                        found = replace(candidate, skipped=tuple(passed))
                    break
                passed.append(candidate)
            else:
                problems += passed
        if found is None:
            raise self._nothing(run, problems)
        return found

    def find(self, run: str | None = None, step: int | str = "latest", epoch: int | None = None) -> Found:
        """The newest state, or that of a given step, of the highest epoch that has it unless `epoch` is set.

        A given step that is damaged is VerificationFailed, never another timeline's step of the same number.
        """
        if step == "latest":
            return self.newest(run, epoch)
        if run is None:
            run = self.newest().run
        for number, stored, path in self._candidates(run, epoch):
            if stored is not None and stored != step:
                continue
            try:
                found = self._check(run, number, stored, path)
            except VerificationFailed as error:
                if stored is None:  # a job file that cannot say its step: it proves nothing about this one
                    continue
                raise VerificationFailed(f"step {step} of run {run}, epoch {number}: {error}") from None
            if found.step == step:
                return found
        steps = {n for e in self.epochs(run) for n in self.steps(run, e)}
        there = f"stored are {len(steps)} steps, {min(steps)} to {max(steps)}" if steps else "no step is stored"
        raise NothingRestorable(f"{self.root}: run {run} has no step {step}; {there}")

    def load(
        self,
        run: str | None = None,
        step: int | str = "latest",
        epoch: int | None = None,
        *,
        verify: bool = True,
        progress: Progress | None = None,
        skipped: Callable[[str], None] | None = None,
    ) -> Snapshot:
        """A stored state; its arrays are private maps of the files (those that are not row-major, copies).

        With `verify`, every tensor is compared with its checksum first. For `latest`, damaged states are
        passed over, those found by checksum too, and `skipped` is called with a line about each.
        NothingRestorable if there is no such state, VerificationFailed if the given step is damaged.
        """
        if step != "latest":
            return read_state(self.find(run, step, epoch), verify=verify, progress=progress)
        if run is None:
            run = self.newest().run
        passed: list[str] = []
        for candidate in self._states(run, epoch):
            problem = candidate
            if isinstance(candidate, Found):
                try:
                    return read_state(candidate, verify=verify, progress=progress)
                except VerificationFailed as error:
                    if not candidate.path.exists():
                        continue
                    problem = str(error)
            passed.append(str(problem))
            if skipped is not None:
                skipped(str(problem))
        raise self._nothing(run, passed)

    def _states(self, run: str, epoch: int | None) -> Iterator[Found | str]:
        """The run's states from the newest on; for a damaged one, the line that says what is wrong.

        A writer may remove old steps meanwhile, all that were listed if the reader is slow: then newer ones
        are there, and the list is made again.
        """
        told: set[Path] = set()
        for _ in range(RESCANS):
            vanished = False
            for number, step, path in self._candidates(run, epoch):
                if path in told:
                    continue
                try:
                    yield self._check(run, number, step, path)
                except VerificationFailed as error:
                    if path.exists():
                        told.add(path)
                        yield str(error)
                vanished = vanished or not path.exists()
            if not vanished:
                return

    def _candidates(self, run: str, epoch: int | None) -> Iterator[tuple[int, int | None, Path]]:
        """(epoch, step, path), newest first; step None: the epoch's job file."""
        for number in reversed(self.epochs(run) if epoch is None else [epoch]):
            for step in reversed(self.steps(run, number)):
                yield number, step, self.step_folder(run, number, step)
            job = self.job_file(run, number)
            if job.exists():
                yield number, None, job

    def _check(self, run: str, epoch: int, step: int | None, path: Path) -> Found:
        if step is None:
            try:
                description = jobfile.describe(path)
            except BadConfig as error:
                raise DamagedFile(str(error)) from None
            return Found(run, epoch, description.step, path, path.stat().st_mtime_ns)
        manifest = stepfolder.check(path)
        if (manifest.run, manifest.epoch, manifest.step) != (run, epoch, step):
            holds = f"step {manifest.step} of run {manifest.run}, epoch {manifest.epoch}"
            raise DamagedFile(f"{path}: its manifest says {holds}; the folder was moved")
        return Found(run, epoch, step, path, manifest.written_ns)

    def _nothing(self, run: str | None, problems: list[str]) -> NothingRestorable:
        where = self.root if run is None else f"{self.root}: run {run}"
        if not problems and run is not None and self.runs():
            problems = [f"runs there: {', '.join(self.runs()[:8])}"]
        return NothingRestorable("; ".join([f"{where} holds no whole flowcheck snapshot", *problems[:8]]))


def read_state(found: Found, *, verify: bool = True, progress: Progress | None = None) -> Snapshot:
    """The snapshot at `found.path`; VerificationFailed names the tensor that differs from its checksum."""
    if found.path.is_file():
        return jobfile.snapshot(found.path, found.epoch, verify=verify)
    return stepfolder.read(found.path, verify=verify, progress=progress)


def read_latest(path: Path) -> tuple[int, int] | None:
    """(epoch, step) of a `latest` file; None if there is none or it cannot be read."""
    try:
        epoch, _, step = path.read_text("ascii")[:64].strip().partition("/")
    except (OSError, ValueError):
        return None
    if not _EPOCH.fullmatch(epoch) or not _STEP.fullmatch(step):
        return None
    return int(epoch[1:]), int(step[5:])


def _publish(aside: Path, folder: Path) -> None:
    if folder.exists():  # a damaged step of the same number makes room for the whole one
        damaged = temporary(folder)
        os.rename(folder, damaged)
        remove(damaged)
    os.rename(aside, folder)
    sync_folder(folder.parent)


def _children(folder: Path) -> list[Path]:
    try:
        # what the names are is not asked: an entry that goes meanwhile must be met as gone, not overlooked
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FlowcheckError(f"cannot read {folder}: {error.strerror}") from None


def _numbers(folder: Path, pattern: re.Pattern[str]) -> Iterator[int]:
    for path in _children(folder):
        match = pattern.fullmatch(path.name)
        if match:
            yield int(match.group(1))
