"""The persist thread: writes pinned steps to the store while the next steps are applied.

At most one write runs and at most one periodic one waits; what an attach or its end asks for always waits its turn. A
write whose pin the shadow revoked is given up without a trace; the next due step is written instead. A write that fails
(disk full, I/O error) is reported and tried again with the next due step: following the job never depends on the disk,
and a disk that heals is used again by itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from flowcheck.durable import Aborted, replace_file
from flowcheck.errors import FlowcheckError
from flowcheck.job import Job
from flowcheck.manifest import MANIFEST, Manifest
from flowcheck.store import Store
from flowcheck.uploader import Uploader
from reconstruct.shadow import Pin

STALL_SECONDS = 60.0
"""How long the end of the daemon waits for a write that does not move: a disk may hang for ever."""
STILL_SECONDS = 10.0
"""After so long without moving, a status speaks of a write: bringing gigabytes to a slow disk takes its time."""


class Persister(threading.Thread):
    """Writes snapshots on a thread of its own.

    every_steps, every_seconds: when a step is due (None: only on request); report: called with one line per problem;
    uploader: told of every step that is on the disk.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep: int,
        every_steps: int | None,
        every_seconds: float | None,
        report: Callable[[str], None],
        uploader: Uploader | None = None,
    ) -> None:
        super().__init__(name="persist", daemon=True)
        self.store = store
        self._keep = keep
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._report = report
        self._uploader = uploader
        self._last: dict[str, tuple[int, float]] = {}
        self._waiting = threading.Semaphore(1)  # for periodic writes
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writing = threading.Event()
        self._moved = time.monotonic()
        self._stalled = False

    def open_epoch(self, run: str) -> int:
        """The next epoch of a run. A disk that fails costs its folder for now, no epoch; RunTaken as in `Store`."""
        return self.store.open_epoch(run, self._report)

    def begin(self, job: Job) -> None:
        """Write the job file and the state at attach; called before the first step is applied."""
        self._last[job.key] = (job.step, time.monotonic())
        if job.shadow.known_step is None:  # it joined late: there is nothing yet, and its initial state is nowhere
            return
        pin = job.shadow.pin()

        def write() -> None:
            self._write_job(job, pin)
            self.write(job, pin)
            pin.release()

        self._work.put(write)

    def consider(self, job: Job) -> None:
        """Called after every applied step: write it if one is due and no periodic write is waiting.

        While another write runs, the step that is the newest at its end is written: were this one held meanwhile, the
        next step would need the memory of the one that is being written, and on a slow disk none would ever be whole.
        """
        step, when = self._last[job.key]
        steps_due = self._every_steps is not None and job.step - step >= self._every_steps
        time_due = self._every_seconds is not None and time.monotonic() - when >= self._every_seconds
        if (steps_due or time_due) and self._waiting.acquire(blocking=False):
            self._last[job.key] = (job.step, time.monotonic())
            pin = None if self._writing.is_set() or not self._work.empty() else job.shadow.pin()

            def write() -> None:
                self._waiting.release()
                with job.shadow.pin() if pin is None else pin as held:
                    self.write(job, held)

            self._work.put(write)

    def request(self, job: Job) -> None:
        """Write the job's newest step as soon as the disk is free."""

        def write() -> None:
            with job.shadow.pin() as pin:
                self.write(job, pin)

        self._work.put(write)

    def withdraw(self, job: Job, step: int) -> None:
        """Steps of the job from `step` on turned out wrong: nobody must restore them."""
        self._work.put(lambda: self._withdraw(job, step))

    def doubt(self, job: Job, reason: str) -> None:
        """The trainer's values contradict the job's, nobody knows since when: its stored steps say so from now on."""
        self._work.put(lambda: self._doubt(job, reason))

    def start(self) -> None:
        super().start()
        if self._uploader is not None:
            self._uploader.start()

    def run(self) -> None:
        self._act(self.store.sweep)
        while (write := self._work.get()) is not None:
            self._moves()
            self._writing.set()
            self._act(write)
            self._writing.clear()

    def _act(self, act: Callable[[], None]) -> None:
        try:
            act()
        except FlowcheckError as error:
            self._report(str(error))
        except Exception as error:  # a failure that nobody expected must not end all persisting
            self._report(f"a write to the store failed inside: {type(error).__name__}: {error}")

    def _write_job(self, job: Job, pin: Pin) -> None:
        try:
            self.store.write_job(
                job.run, job.epoch, job.description, pin.tensors, should_stop=lambda: self._moves() and pin.revoked
            )
        except FlowcheckError as error:
            self._report(f"{job.key}: no job file, a capture of this job cannot be replayed: {error}")

    def _moves(self) -> bool:
        """A write goes on. True."""
        self._moved = time.monotonic()
        return True

    def write(self, job: Job, pin: Pin) -> bool:
        """Store the pinned step; whether it is on disk now."""
        try:
            self.store.save(
                job.snapshot(pin),
                keep=self._keep,
                should_stop=lambda: self._moves() and (pin.revoked or job.in_doubt(pin.step)),
                copied=pin.release,
            )
        except Aborted:
            return False
        except FlowcheckError as error:
            job.unstored = job.unstored or time.time()
            job.unstored_reason = str(error)
            self._report(f"{job.key}: step {pin.step} is not on disk: {error}")
            return False
        job.persisted, job.persisted_at = pin.step, time.time()
        if job.unstored is not None:
            late = job.persisted_at - job.unstored
            self._report(f"{job.key}: step {pin.step} is on disk, the first for {late:.0f} s")
            job.unstored = job.unstored_reason = None
        if self._uploader is not None:
            self._uploader.offer(job.run, job.epoch, pin.step)
        return True

    def _withdraw(self, job: Job, first: int) -> None:
        if self._uploader is not None:
            self._uploader.withdraw(job.run, job.epoch, first)
        try:
            gone = self.store.withdraw(job.run, job.epoch, first)
        except FlowcheckError as error:
            self._report(f"{job.key}: steps from {first} on are wrong and were not all removed: {error}")
            return
        if gone:
            job.persisted = max((s for s in self.store.steps(job.run, job.epoch)), default=None)
            self._report(f"{job.key}: steps {', '.join(map(str, gone))} were removed from the store: {job.suspect}")

    def _doubt(self, job: Job, reason: str) -> None:
        for step in self.store.steps(job.run, job.epoch):
            path = self.store.step_folder(job.run, job.epoch, step) / MANIFEST
            try:
                if step > job.description.step:
                    replace_file(path, Manifest.read(path).doubted(reason))
            except (FlowcheckError, OSError) as error:
                self._report(f"{job.key}: step {step} may be wrong and its manifest could not be changed: {error}")
        if self._uploader is not None:
            self._uploader.doubt(job.run, job.epoch, job.description.step, reason)

    def remote_status(self) -> dict[str, Any] | None:
        """What is at the URL of `--store-remote`; None without one."""
        return None if self._uploader is None else self._uploader.status()

    @property
    def disk(self) -> list[dict[str, Any]]:
        """What a status says of the disk: an entry as of `LineFile.status` while a write does not move."""
        still = time.monotonic() - self._moved
        if not self._writing.is_set() or still < STILL_SECONDS:
            return []
        problem = f"a write to it has not moved for {still:.0f} s"
        return [{"name": f"the store {self.store.root}", "waiting": 1, "missing": 0, "problem": problem}]

    def finish(self) -> None:
        """Write what waits, then end the thread; a disk that hangs is waited for `STALL_SECONDS`."""
        self._work.put(None)
        self._moved = time.monotonic()
        while self.is_alive() and not self._stalled:
            self.join(0.2)
            self._stalled = self.is_alive() and time.monotonic() - self._moved > STALL_SECONDS
        if self._stalled:
            self._report(f"{self.store.root} does not answer: what waits to be written is given up")

    def finish_upload(self) -> None:
        """Upload the newest steps, as long as that moves."""
        if self._uploader is not None:
            self._uploader.finish()
