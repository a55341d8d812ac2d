"""The persist thread: writes pinned steps to the store while the next steps are applied.

At most one write runs and at most one waits. A write whose pin the shadow revoked is given up without a trace; the
next due step is written instead. A write that fails (disk full, I/O error) is reported and tried again with the next
due step: following the job never depends on the disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from flowcheck import jobfile
from flowcheck.durable import Aborted
from flowcheck.errors import FlowcheckError
from flowcheck.job import Job
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
        self._work: queue.Queue[tuple[Job, Pin, bool] | None] = queue.Queue(maxsize=2)

    def begin(self, job: Job) -> None:
        """Write the job file and the state at attach; called before the first step is applied."""
        self._last[job.key] = (job.step, time.monotonic())
        self._put(job, first=True)

    def consider(self, job: Job) -> None:
        """Called after every applied step: write it if one is due and no write is waiting."""
        step, when = self._last[job.key]
        steps_due = self._every_steps is not None and job.step - step >= self._every_steps
        time_due = self._every_seconds is not None and time.monotonic() - when >= self._every_seconds
        if (steps_due or time_due) and self._work.empty():
            self._last[job.key] = (job.step, time.monotonic())
            self._put(job, first=False)

    def request(self, job: Job) -> None:
        """Write the job's newest step as soon as the disk is free."""
        self._put(job, first=False)

    def _put(self, job: Job, *, first: bool) -> None:
        pin = job.shadow.pin()
        try:
            self._work.put_nowait((job, pin, first))
        except queue.Full:
            pin.release()

    def run(self) -> None:
        while (item := self._work.get()) is not None:
            job, pin, first = item
            try:
                if first:
                    self._write_job(job, pin)
                self.write(job, pin)
            finally:
                pin.release()

    def _write_job(self, job: Job, pin: Pin) -> None:
        path = self.store.job_file(job.run, job.epoch)
        try:
            jobfile.write(path, job.description, pin.tensors, should_stop=lambda: pin.revoked)
        except FlowcheckError as error:
            self._report(f"{job.key}: no job file: {error}")

    def write(self, job: Job, pin: Pin) -> bool:
        """Store the pinned step; whether it is on disk now."""
        try:
            self.store.save(
                job.snapshot(pin), keep=self._keep, should_stop=lambda: pin.revoked, copied=pin.release
            )
        except Aborted:
            return False
        except FlowcheckError as error:
            self._report(f"{job.key}: step {pin.step} is not on disk: {error}")
            return False
        job.persisted = pin.step
        return True

    def finish(self) -> None:
        """Write what waits, then end the thread."""
        self._work.put(None)
        self.join()
