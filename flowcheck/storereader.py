"""Reading a store, on a disk or at a URL: which states are there, which of them are whole, and the newest of those.

Any number of processes read while one writes. docs/store.md describes the files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from flowcheck import jobfile, stepfolder
from flowcheck.description import DescriptionError, check_run_name
from flowcheck.errors import BadConfig, FlowcheckError, NothingRestorable, VerificationFailed
from flowcheck.jobfile import OpenJob, Progress
from flowcheck.manifest import MANIFEST
from flowcheck.remote import RemotePath, connect, is_remote
from flowcheck.snapshot import Snapshot
from flowcheck.stepfolder import OpenStep
from flowcheck.tensorfile import DamagedFile, Place, RawFile

LATEST = "latest"

RESCANS = 16  # times that a reader lists a run again because the writer removed what it was about to read

EPOCH = re.compile(r"e(0|[1-9][0-9]{0,17})")
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")

Where = TypeVar("Where", Path, RemotePath)
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Found:
    """A stored state that passed the cheap check: its manifest parses and its files have their sizes."""

    run: str
    epoch: int
    step: int
    path: Place
    """The step folder, or the job file when no later step of its epoch is stored."""
    written_ns: int
    skipped: tuple[str, ...] = ()
    """Newer states that were passed over, one line each: what is wrong with which file."""


class StoreReader(Generic[Where]):
    """The snapshots below one folder. No method locks or writes."""

    def __init__(self, root: Where) -> None:
        self.root: Where = root

    # names

    def run_folder(self, run: str) -> Where:
        return self.root / check_run_name(run)

    def epoch_folder(self, run: str, epoch: int) -> Where:
        return self.run_folder(run) / f"e{epoch}"

    def step_folder(self, run: str, epoch: int, step: int) -> Where:
        return self.epoch_folder(run, epoch) / f"step-{step}"

    def job_file(self, run: str, epoch: int) -> Where:
        """Where `jobfile.write` puts the description and initial state of an epoch."""
        return self.epoch_folder(run, epoch) / jobfile.JOB_FILE

    def markers_file(self, run: str, epoch: int) -> Where:
        return self.epoch_folder(run, epoch) / jobfile.MARKERS_FILE

    def runs(self) -> list[str]:
        """Names of the runs, sorted; [] if the folder does not exist."""
        names: list[str] = []
        for path in _children(self.root):
            with contextlib.suppress(DescriptionError):
                names += [check_run_name(path.name)] if any(numbers(path, EPOCH)) else []
        return sorted(names)

    def epochs(self, run: str) -> list[int]:
        return sorted(numbers(self.run_folder(run), EPOCH))

    def steps(self, run: str, epoch: int) -> list[int]:
        """Steps that have a folder, ascending; whether they are whole is not looked at."""
        return sorted(numbers(self.epoch_folder(run, epoch), STEP))

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
        for number in reversed(self.epochs(run) if epoch is None else [epoch]):
            for stored, path in self._candidates(run, number):
                if stored is not None and stored != step:
                    continue
                try:
                    found = self._check(run, number, stored, path)
                except VerificationFailed as error:
                    if stored is None or unfinished(path):  # a job file that cannot say its step proves nothing
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
        """A stored state, in memory.

        With `verify`, every tensor is compared with its checksum. For `latest`, damaged states are
        passed over, those found by checksum too, and `skipped` is called with a line about each.
        NothingRestorable if there is no such state, VerificationFailed if the given step is damaged.
        """
        return self._take(lambda found: _read(found, verify, progress), run, step, epoch, skipped)

    def open(
        self, run: str | None = None, step: int | str = "latest", *, skipped: Callable[[str], None] | None = None
    ) -> OpenState:
        """A stored state whose bytes stay on the disk: every tensor compared once, then read piece by piece.

        States are passed over, and errors raised, as in `load`.
        """
        return self._take(OpenState, run, step, None, skipped)

    def _take(
        self,
        take: Callable[[Found], State],
        run: str | None,
        step: int | str,
        epoch: int | None,
        skipped: Callable[[str], None] | None,
    ) -> State:
        """What `take` makes of the state asked for; of the newest one of which it raises no VerificationFailed."""
        if step != "latest":
            return take(self.find(run, step, epoch))
        if run is None:
            run = self.newest().run
        passed: list[str] = []
        for candidate in self._states(run, epoch):
            problem = candidate
            if isinstance(candidate, Found):
                try:
                    return take(candidate)
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
        told: set[Place] = set()
        for _ in range(RESCANS):
            vanished = False
            for number in reversed(self.epochs(run) if epoch is None else [epoch]):
                folder = self.epoch_folder(run, number)
                try:
                    candidates = list(self._candidates(run, number))
                except FlowcheckError as error:  # a folder that cannot be listed: older ones may be whole
                    if folder not in told:
                        told.add(folder)
                        yield str(error)
                    continue
                for step, path in candidates:
                    if path in told:
                        continue
                    try:
                        yield self._check(run, number, step, path)
                    except VerificationFailed as error:
                        if _there(path) and not unfinished(path):
                            told.add(path)
                            yield str(error)
                    vanished = vanished or not _there(path)
            if not vanished:
                return

    def _candidates(self, run: str, epoch: int) -> Iterator[tuple[int | None, Where]]:
        """(step, path) of an epoch, newest first; step None: its job file."""
        for step in reversed(self.steps(run, epoch)):
            yield step, self.step_folder(run, epoch, step)
        job = self.job_file(run, epoch)
        if _there(job):
            yield None, job

    def _check(self, run: str, epoch: int, step: int | None, path: Where) -> Found:
        if step is None:
            try:
                description = jobfile.describe(path)
                written = path.stat().st_mtime_ns
            except BadConfig as error:
                raise DamagedFile(str(error)) from None
            except OSError as error:
                raise DamagedFile(f"{path}: {error.strerror}") from None
            if description.run != run:
                raise DamagedFile(f"{path}: it says run {description.run}; the file was moved")
            return Found(run, epoch, description.step, path, written)
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


class OpenState:
    """A stored state that was found whole and stays open: its bytes are read when they are asked for.

    VerificationFailed names what differs from its checksum, now or (a disk that fails) later.
    """

    def __init__(self, found: Found) -> None:
        self._state: OpenStep | OpenJob
        if found.path.is_file():
            self._state = job = jobfile.open_state(found.path)
            self._hollow = lambda tensors: job.snapshot(found.epoch, tensors)
        else:
            self._state = step = OpenStep(found.path)
            self._hollow = step.snapshot
        self._turned: dict[str, np.ndarray] = {}  # those that the files hold in another order
        try:
            for key in self._state.specs:
                if self._state.read(key, 0, 0) is None:
                    self._turned[key] = self._state.load(key)
                else:
                    self._state.check(key)
        except BaseException:
            self.close()
            raise

    def header(self) -> Snapshot:
        """The state without its tensors' bytes: their arrays are empty."""
        nothing = np.empty(0, np.uint8)
        return self._hollow(dict.fromkeys(self._state.specs, nothing))

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Bytes of a tensor in memory order."""
        data = self._state.read(key, offset, length)
        return self._turned[key][offset : offset + length].tobytes() if data is None else data

    def close(self) -> None:
        self._state.close()

    def __enter__(self) -> OpenState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(source: str) -> StoreReader[Path] | StoreReader[RemotePath]:
    """The store in a folder or at an fsspec URL, for reading. UsageError for a URL that cannot be used."""
    return StoreReader(connect(source)) if is_remote(source) else StoreReader(Path(source))


def _read(found: Found, verify: bool, progress: Progress | None) -> Snapshot:
    if found.path.is_file():
        return jobfile.snapshot(found.path, found.epoch, verify=verify)
    return stepfolder.read(found.path, verify=verify, progress=progress)


def read_latest(path: Place) -> tuple[int, int] | None:
    """(epoch, step) of a `latest` file; None if there is none or it cannot be read."""
    try:
        with RawFile(path) as file:
            text = file.read(0, min(64, file.size)).decode("ascii")
    except (DamagedFile, ValueError):
        return None
    epoch, _, step = text.strip().partition("/")
    if not EPOCH.fullmatch(epoch) or not STEP.fullmatch(step):
        return None
    return int(epoch[1:]), int(step[5:])


def unfinished(path: Place) -> bool:
    """Whether this is a step that is on its way to a URL, where nothing can be renamed into place."""
    return isinstance(path, RemotePath) and path.name != jobfile.JOB_FILE and not (path / MANIFEST).exists()


def _there(path: Place) -> bool:
    try:
        return path.exists()
    except OSError:  # there is something, and it cannot be read
        return True


def _children(folder: Place) -> list[Place]:
    try:
        # what the names are is not asked: an entry that goes meanwhile must be met as gone, not overlooked
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FlowcheckError(f"cannot read {folder}: {error.strerror}") from None


def numbers(folder: Place, pattern: re.Pattern[str]) -> Iterator[int]:
    for path in _children(folder):
        match = pattern.fullmatch(path.name)
        if match:
            yield int(match.group(1))
