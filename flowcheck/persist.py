"""The persist thread: writes pinned steps to the store while the next steps are applied.

At most one write runs and at most one periodic one waits; what an attach or its end asks for always waits its turn. A
write whose pin the shadow revoked is given up without a trace; the next due step is written instead. A write that fails
(disk full, I/O error) is reported and tried again with the next due step: following the job never depends on the disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from flowcheck import jobfile
from flowcheck.durable import Aborted, remove, replace_file, temporary
from flowcheck.errors import FlowcheckError
from flowcheck.job import Job
from flowcheck.manifest import MANIFEST, Manifest
from flowcheck.store import Store
from reconstruct.shadow import Pin


class Persister(threading.Thread):
    """Writes snapshots on a thread of its own.

    every_steps, every_seconds: when a step is due (None: only on request); report: called with one line per problem.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep: int,
        every_steps: int | None,
        every_seconds: float | None,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(name="persist", daemon=True)
        self.store = store
        self._keep = keep
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._report = report
        self._last: dict[str, tuple[int, float]] = {}
        self._waiting = threading.Semaphore(1)  # for periodic writes
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def begin(self, job: Job) -> None:
        """Write the job file and the state at attach; called before the first step is applied."""
        self._last[job.key] = (job.step, time.monotonic())
        pin = job.shadow.pin()

        def write() -> None:
            self._write_job(job, pin)
            self.write(job, pin)
            pin.release()

        self._work.put(write)

    def consider(self, job: Job) -> None:
        """Called after every applied step: write it if one is due and no periodic write is waiting."""
        step, when = self._last[job.key]
        steps_due = self._every_steps is not None and job.step - step >= self._every_steps
        time_due = self._every_seconds is not None and time.monotonic() - when >= self._every_seconds
        if (steps_due or time_due) and self._waiting.acquire(blocking=False):
            self._last[job.key] = (job.step, time.monotonic())
            pin = job.shadow.pin()

            def write() -> None:
                self._waiting.release()
                self.write(job, pin)
                pin.release()

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

    def run(self) -> None:
        while (write := self._work.get()) is not None:
            try:
                write()
            except Exception as error:  # a failure that nobody expected must not end all persisting
                self._report(f"a write to the store failed inside: {type(error).__name__}: {error}")

    def _write_job(self, job: Job, pin: Pin) -> None:
        path = self.store.job_file(job.run, job.epoch)
        try:
            jobfile.write(path, job.description, pin.tensors, should_stop=lambda: pin.revoked)
        except FlowcheckError as error:
            self._report(f"{job.key}: no job file, a capture of this job cannot be replayed: {error}")

    def write(self, job: Job, pin: Pin) -> bool:
        """Store the pinned step; whether it is on disk now."""
        try:
            self.store.save(
                job.snapshot(pin),
                keep=self._keep,
                should_stop=lambda: pin.revoked or job.in_doubt(pin.step),
                copied=pin.release,
            )
        except Aborted:
            return False
        except FlowcheckError as error:
            self._report(f"{job.key}: step {pin.step} is not on disk: {error}")
            return False
        job.persisted = pin.step
        return True

    def _withdraw(self, job: Job, first: int) -> None:
        gone = []
        for step in self.store.steps(job.run, job.epoch):
            if step >= first:
                folder = self.store.step_folder(job.run, job.epoch, step)
                aside = temporary(folder)
                try:
                    folder.rename(aside)
                except OSError as error:
                    self._report(f"{job.key}: step {step} is wrong and could not be removed from {folder}: {error}")
                    continue
                remove(aside)
                gone.append(step)
        if gone:
            job.persisted = max((s for s in self.store.steps(job.run, job.epoch)), default=None)
            self._report(f"{job.key}: steps {', '.join(map(str, gone))} were removed from the store: {job.suspect}")

    def _doubt(self, job: Job, reason: str) -> None:
        for step in self.store.steps(job.run, job.epoch):
            path = self.store.step_folder(job.run, job.epoch, step) / MANIFEST
            try:
                manifest = Manifest.read(path)
                if step > job.description.step:
                    manifest.exact = False
                    manifest.reasons = [*manifest.reasons, f"may be wrong: {reason}"]
                    replace_file(path, manifest.encode())
            except (FlowcheckError, OSError) as error:
                self._report(f"{job.key}: step {step} may be wrong and its manifest could not be changed: {error}")

    def finish(self) -> None:
        """Write what waits, then end the thread."""
        self._work.put(None)
        self.join()
