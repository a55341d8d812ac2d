"""The upload thread: copies steps that are on the local disk to an fsspec URL.

A step's files go first, each compared with its checksum while it is read, then its manifest, last `latest`: whoever
reads the URL sees whole steps only. What fails is tried again with growing pauses, for as long as it takes; meanwhile
only the newest step of each run waits, so a remote that is slow or gone costs neither memory nor time here. When it
starts, the last steps that an earlier daemon could not bring there follow, newest first, while nothing newer waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from flowcheck.catchup import CLAIMED, Place, foreign, forget_wrong, lacking, note_wrong
from flowcheck.durable import Aborted
from flowcheck.errors import FlowcheckError, VerificationFailed
from flowcheck.manifest import MANIFEST, Manifest
from flowcheck.remote import RemotePath, connect
from flowcheck.store import Store
from flowcheck.storereader import LATEST, StoreReader, read_latest
from flowcheck.tensorfile import CHUNK, DamagedFile, RawFile

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds between a failure and the next try; doubled from one to the next."""
STALL_SECONDS = 60.0
"""How long the end of the daemon waits for an upload that does not move."""
MAX_WORK = 256
"""Epochs that something is to be done for; beyond this the oldest is given up."""


class Conflict(FlowcheckError):
    """The URL holds epochs of this run that another store wrote."""


@dataclass(slots=True)
class _Work:
    """What is to be done for one epoch."""

    step: int | None = None  # to upload
    wrong_from: int | None = None  # steps from this one on must go
    doubt: tuple[int, str] | None = None  # steps after this one may be wrong, and why

    @property
    def idle(self) -> bool:
        return self.step is None and self.wrong_from is None and self.doubt is None


class Uploader(threading.Thread):
    """Keeps a URL's copy of a store. Raises UsageError for a URL that cannot be used.

    keep: steps of an epoch that stay there; report: called with one line per problem, and when it has passed.
    """

    def __init__(self, store: Store, url: str, *, keep: int, report: Callable[[str], None]) -> None:
        super().__init__(name="upload", daemon=True)
        self._root = connect(url)
        self._remote = StoreReader(self._root)
        self._store = store
        self._keep = keep
        self._report = report
        self._changed = threading.Condition()
        self._work: dict[tuple[str, int], _Work] = {}
        self._backlog: list[Place] = []  # of earlier daemons
        self._ending = False
        self._known = False  # whether the epochs at the URL were listed
        self._claimed: set[tuple[str, int]] = set()
        self._moved = time.monotonic()
        self._done: tuple[str, int, int, float | None] | None = None  # run, epoch, step, when it came there if here
        self._problem: tuple[float, str] | None = None  # since when, what

    # called on any thread

    def offer(self, run: str, epoch: int, step: int) -> None:
        """A step is on the local disk: the newest one of a run is uploaded, older ones that still wait are not."""
        with self._changed:
            for (name, number), work in self._work.items():
                if name == run and number <= epoch:
                    work.step = None
            self._of(run, epoch).step = step

    def withdraw(self, run: str, epoch: int, first: int) -> None:
        """Steps of an epoch from `first` on are wrong: they must go from the URL too."""
        with self._changed:
            work = self._of(run, epoch)
            work.wrong_from = first if work.wrong_from is None else min(first, work.wrong_from)
            if work.step is not None and work.step >= first:
                work.step = None
            self._backlog = [place for place in self._backlog if place[:2] != (run, epoch) or place[2] < first]
            wrong_from = work.wrong_from
        note_wrong(self._store.epoch_folder(run, epoch), wrong_from)

    def doubt(self, run: str, epoch: int, after: int, reason: str) -> None:
        """Steps of an epoch after `after` may be wrong: their manifests must say so."""
        with self._changed:
            self._of(run, epoch).doubt = after, reason

    def _of(self, run: str, epoch: int) -> _Work:
        self._changed.notify_all()
        if (run, epoch) not in self._work and len(self._work) >= MAX_WORK:
            (old, number), _ = next(iter(self._work.items()))
            del self._work[old, number]
            self._report(f"{self._root}: too much waits, epoch {number} of run {old} is not brought up to date there")
        return self._work.setdefault((run, epoch), _Work())

    def status(self) -> dict[str, Any]:
        """What is at the URL and what is not."""
        with self._changed:
            done, problem = self._done, self._problem
            waiting = [f"{run}/e{epoch}" for (run, epoch), work in self._work.items() if not work.idle]
            waiting += [f"{run}/e{epoch}/step-{step}" for run, epoch, step in self._backlog]
        return {
            "url": str(self._root),
            "run": None if done is None else done[0],
            "epoch": None if done is None else done[1],
            "step": None if done is None else done[2],
            "uploaded_at": None if done is None else done[3],
            "waiting": waiting[:8],
            "failing_since": None if problem is None else problem[0],
            "problem": None if problem is None else problem[1],
        }

    def finish(self) -> None:
        """Upload what waits, as long as that moves, then end."""
        with self._changed:
            self._ending = True
            self._backlog.clear()  # the next daemon finds it again
            self._moved = time.monotonic()
            self._changed.notify_all()
        while self.is_alive() and time.monotonic() - self._moved < STALL_SECONDS:
            self.join(0.2)
        waiting = self.status()["waiting"]
        if waiting:
            self._report(f"{self._root}: the newest steps of {', '.join(waiting)} are not there")

    # the thread

    def run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                while self._known and not self._ending and not self._backlog and self._next() is None:
                    self._changed.wait()
                key = self._next()
                if key is None and self._ending:
                    return
            try:
                if not self._known:
                    self._list()
                with self._changed:
                    key, late = self._next(), next(iter(self._backlog), None)
                if key is not None:
                    self._do(*key)
                elif late is not None:
                    key = late[:2]
                    self._resume(*late)
            except Conflict as error:  # trying again would not help
                self._report(f"{self._root}: {error}")
                with self._changed:
                    self._work = {other: work for other, work in self._work.items() if other != key}
                    self._backlog = [place for place in self._backlog if place[:2] != key]
            except Aborted:
                continue
            except Exception as error:  # whatever a cloud's package raises
                self._failed(error)
                with self._changed:
                    if self._ending and pause > FIRST_PAUSE:
                        return
                    self._changed.wait_for(lambda: self._ending, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                pause = FIRST_PAUSE
                self._passed()

    def _next(self) -> tuple[str, int] | None:
        """The epoch for which something is to be done first."""
        return next((key for key, work in self._work.items() if not work.idle), None)

    def _failed(self, error: Exception) -> None:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        with self._changed:
            first = self._problem is None
            self._problem = time.time() if self._problem is None else self._problem[0], text
        if first:
            self._report(f"{self._root}: cannot be brought up to date, is tried again: {text}")

    def _passed(self) -> None:
        with self._changed:
            over, self._problem = self._problem is not None, None
        if over:
            self._report(f"{self._root}: is brought up to date again")

    def _list(self) -> None:
        """The epochs that are at the URL already: those of a store that was lost must not be mixed with new ones."""
        for run in self._remote.runs():
            self._store.reserve(run, max(self._remote.epochs(run)))
        found = lacking(self._store, self._remote, self._keep)
        with self._changed:
            self._backlog = [] if self._ending else found.steps
            for (run, epoch), first in found.wrong.items():
                work = self._of(run, epoch)
                work.wrong_from = first if work.wrong_from is None else min(first, work.wrong_from)
            if self._done is None and found.there is not None:
                self._done = *found.there, None
        self._known = True

    def _resume(self, run: str, epoch: int, step: int) -> None:
        """Bring a step of an earlier daemon there, unless enough newer ones of its epoch are there by now."""
        newer = [stored for stored in self._remote.steps(run, epoch) if stored > step]
        if sum(self._is_step(run, epoch, stored) for stored in newer) < self._keep:
            self._claim(run, epoch)
            self._upload_right(run, epoch, step)
        with self._changed:
            self._backlog = [place for place in self._backlog if place != (run, epoch, step)]

    def _upload_right(self, run: str, epoch: int, step: int) -> None:
        try:
            self._upload(run, epoch, step)
        except VerificationFailed as error:  # the local copy is damaged: a newer step will take its place
            self._report(f"{self._root}: {error}; step {step} is not uploaded")

    def _do(self, run: str, epoch: int) -> None:
        """All that is to be done for an epoch. What is done is taken off, unless it has changed meanwhile."""
        with self._changed:
            work = self._work[run, epoch]
            step, wrong_from, doubt = work.step, work.wrong_from, work.doubt
        self._claim(run, epoch)
        if wrong_from is not None:
            steps = self._remote.steps(run, epoch)
            self._drop(run, epoch, [stored for stored in steps if stored >= wrong_from])
        if step is not None:
            self._upload_right(run, epoch, step)
        if doubt is not None:
            self._say_doubt(run, epoch, *doubt)
        with self._changed:
            if work.step == step:
                work.step = None
            if work.wrong_from == wrong_from:
                work.wrong_from = None
                if wrong_from is not None:
                    forget_wrong(self._store.epoch_folder(run, epoch))
            if work.doubt == doubt:
                work.doubt = None
            if work.idle:
                self._work.pop((run, epoch), None)

    def _claim(self, run: str, epoch: int) -> None:
        """Make sure that the epoch's folder at the URL is this store's, and sweep what it left half uploaded."""
        if (run, epoch) in self._claimed:
            return
        mark = self._store.epoch_folder(run, epoch) / CLAIMED
        there = self._remote.epochs(run)
        others = foreign(self._store, run, there)
        if not mark.exists() and others >= epoch:
            self._store.reserve(run, there[-1])
            raise Conflict(
                f"holds epoch {others} of run {run}, which another store wrote; epoch {epoch} is not uploaded: "
                "attach again, or use another URL or run name"
            )
        for old in there:
            if (self._store.epoch_folder(run, old) / CLAIMED).exists():
                self._drop(run, old, [s for s in self._remote.steps(run, old) if not self._is_step(run, old, s)])
        with contextlib.suppress(OSError):  # a full disk: what a kill leaves there then stays there
            mark.touch()
        self._claimed.add((run, epoch))

    def _is_step(self, run: str, epoch: int, step: int) -> bool:
        return (self._remote.step_folder(run, epoch, step) / MANIFEST).exists()

    def _upload(self, run: str, epoch: int, step: int) -> None:
        local = self._store.step_folder(run, epoch, step)
        target = self._remote.step_folder(run, epoch, step)
        with contextlib.ExitStack() as stack:
            try:
                with RawFile(local / MANIFEST) as said:
                    text = said.read(0, said.size)
                manifest = Manifest.read(local / MANIFEST)
                files = {name: stack.enter_context(RawFile(local / name)) for name in manifest.files}
            except DamagedFile:
                if not local.exists():  # no longer kept: a newer one comes
                    return
                raise
            if self._is_step(run, epoch, step):
                if (target / MANIFEST).read_at(0, len(text) + 1) == text:
                    return self._point(run, epoch, step)
                if self._only_said(target / MANIFEST, manifest):
                    (target / MANIFEST).replace(text)
                    return self._point(run, epoch, step)
                (target / MANIFEST).remove()
            for name, file in files.items():
                checksum = xxhash.xxh3_128()
                (target / name).write(self._chunks(run, epoch, step, file, checksum))
                if (file.size, checksum.hexdigest()) != (manifest.files[name].size, manifest.files[name].checksum):
                    target.remove()
                    raise VerificationFailed(f"{file.path} differs from its checksum")
                if (target / name).stat().st_size != file.size:
                    raise FlowcheckError(f"{target / name}: not all bytes arrived")
            (target / MANIFEST).replace(text)
        self._point(run, epoch, step)
        with self._changed:
            if self._done is None or self._done[0] != run or self._done[1:3] < (epoch, step):
                self._done = run, epoch, step, time.time()
        steps = self._remote.steps(run, epoch)
        kept = [s for s in steps if self._is_step(run, epoch, s)][-max(1, self._keep) :]
        self._drop(run, epoch, [s for s in steps if s < kept[-1] and s not in kept])

    @staticmethod
    def _only_said(there: RemotePath, manifest: Manifest) -> bool:
        """Whether the step that is there differs in what is said of it alone, as one that was doubted here since."""
        try:
            return Manifest.read(there).files == manifest.files
        except DamagedFile:
            return False

    def _chunks(self, run: str, epoch: int, step: int, file: RawFile, checksum: Any) -> Iterator[bytes]:
        """The bytes of a file, into its checksum too. Aborted once the step is known to be wrong."""
        for start in range(0, file.size, CHUNK):
            data = file.read(start, min(CHUNK, file.size - start))
            checksum.update(data)
            self._moved = time.monotonic()
            self._check_right(run, epoch, step)
            yield data

    def _check_right(self, run: str, epoch: int, step: int) -> None:
        with self._changed:
            work = self._work.get((run, epoch))
            if work is not None and work.wrong_from is not None and step >= work.wrong_from:
                raise Aborted(f"step {step} of run {run} turned out wrong while it was uploaded")

    def _point(self, run: str, epoch: int, step: int) -> None:
        self._check_right(run, epoch, step)
        path = self._root / run / LATEST
        named = self._named(path)
        if named is None or named <= (epoch, step) or not self._is_step(run, *named):
            path.replace(f"e{epoch}/step-{step}\n".encode())

    def _named(self, path: RemotePath) -> tuple[int, int] | None:
        return read_latest(path) if path.exists() else None

    def _drop(self, run: str, epoch: int, steps: list[int]) -> None:
        """Remove steps: `latest` goes back first, then each manifest, so that no reader meets half of a step."""
        named = self._named(path := self._root / run / LATEST)
        if named is not None and named[0] == epoch and named[1] in steps:
            left = [
                (stored, step)
                for stored in self._remote.epochs(run)
                for step in self._remote.steps(run, stored)
                if (stored != epoch or step not in steps) and self._is_step(run, stored, step)
            ]
            if left:
                path.replace("e{}/step-{}\n".format(*left[-1]).encode())
            else:
                path.remove()
        for step in steps:
            folder = self._remote.step_folder(run, epoch, step)
            (folder / MANIFEST).remove()
            folder.remove()
            self._moved = time.monotonic()

    def _say_doubt(self, run: str, epoch: int, after: int, reason: str) -> None:
        for step in self._remote.steps(run, epoch):
            path = self._remote.step_folder(run, epoch, step) / MANIFEST
            if step <= after or not path.exists():
                continue
            try:
                path.replace(Manifest.read(path).doubted(reason))
            except DamagedFile as error:
                path.stat()  # out of reach: this says so, and it is tried again
                self._report(f"{self._root}: step {step} may be wrong and cannot say so: {error}")
