"""The apply thread: all that changes the state of jobs happens here, one thing after another.

Steps from the capture thread, pieces of state from agents, comparisons, and a tick for what is overdue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from flowcheck.capture import CaptureThread
from flowcheck.job import Job
from flowcheck.journal import Journal
from flowcheck.persist import Persister
from flowcheck.repairing import tick
from reconstruct.step_events import StepReady

__all__ = ["ApplyThread"]

TICK_S = 0.1

Command = Callable[[], None]


class ApplyThread(threading.Thread):
    """jobs: those held here; persister, journal: None without; live: whether the time of a step's last byte can be
    compared with this machine's clock; report: called with one line for a person."""

    def __init__(
        self,
        capture: CaptureThread,
        jobs: Callable[[], Iterable[Job]],
        persister: Persister | None,
        journal: Journal | None,
        *,
        live: bool,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(name="apply", daemon=True)
        self.lags: deque[float] = deque(maxlen=1024)
        self._capture = capture
        self._jobs = jobs
        self._persister = persister
        self.journal = journal
        self._live = live
        self._report = report
        self._work: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def step(self, job: Job, ready: StepReady) -> None:
        """Apply a step of a job. From any thread, as the others."""
        self._work.put(partial(self._step, job, ready))

    def retired(self, job: Job) -> None:
        """A job gets no further step: its newest one is to be kept."""
        self._work.put(partial(self._keep, job))

    def call(self, job: Job, command: Command) -> None:
        """Run something that changes a job's state, once what was handed in before is done."""
        self._work.put(partial(self._run, job, command))

    def finish(self) -> None:
        """Do what was handed in, then end the thread."""
        self._work.put(None)
        self.join()

    def run(self) -> None:
        ticked = time.monotonic()
        while True:
            try:
                command = self._work.get(timeout=TICK_S)
            except queue.Empty:
                pass
            else:
                if command is None:
                    return
                command()
            if time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                for job in self._jobs():
                    self._run(job, partial(tick, job))

    def _run(self, job: Job, command: Command) -> None:
        if job.over:
            return
        try:
            command()
        except Exception as error:
            self._halt(job, f"step {job.step} could not be repaired: {type(error).__name__}: {error}")
            return
        if not job.kept and job.shadow.known_step is not None:
            self._keep(job)

    def _keep(self, job: Job) -> None:
        job.kept = True
        step = job.shadow.known_step
        if self._persister is not None and step is not None and not job.in_doubt(step):
            self._persister.request(job)

    def _halt(self, job: Job, reason: str) -> None:
        job.halted = True
        if not job.shadow.ready:  # torn half way; otherwise the step before it is whole
            job.distrust(job.step, reason)
        job.frozen = reason
        self._report(f"{job.key}: frozen at {job.step}: {reason}")

    def _step(self, job: Job, ready: StepReady) -> None:
        try:
            self._apply(job, ready)
        except Exception as error:
            self._halt(job, f"step {ready.step} could not be applied: {error}")
        ready.gradients.clear()  # nothing refers to them any more: their memory can be taken again
        if job.tracker is not None:
            self._capture.call(partial(job.tracker.applied, ready.step))

    def _apply(self, job: Job, ready: StepReady) -> None:
        if job.halted or job.suspect is not None:
            return
        job.note_applied(ready.step, ready.confirmed)
        job.pace.step(ready.time)
        job.shadow.apply_wait = job.pace.wait
        groups = [dict(group) for group in ready.groups]
        if ready.blank:
            job.shadow.skip(ready.step, groups)
        else:
            job.shadow.apply(ready.step, ready.gradients, groups, ready.lost)
        if self._live:
            job.lag_ms = (time.time_ns() - ready.time) / 1e6
            self.lags.append(job.lag_ms)
        contradiction = job.contradiction(ready.canaries)
        if contradiction is not None:
            job.halted = True
            job.distrust(ready.step, contradiction)
            job.frozen = contradiction
            if self._persister is not None:
                self._persister.doubt(job, contradiction)
            self._report(f"{job.key}: {contradiction}")
        job.checked = ready.step
        if job.suspect is not None:
            return
        job.resync.applied(ready, time.monotonic_ns())
        if self.journal is not None:
            self._write_line(job, ready, self.journal)
        if self._persister is not None and job.shadow.known_step is not None:
            self._persister.consider(job)

    def _write_line(self, job: Job, ready: StepReady, journal: Journal) -> None:
        journal.say(
            run=job.run,
            epoch=job.epoch,
            step=ready.step,
            confirmed=ready.confirmed,
            lag_ms=job.lag_ms,
            bytes=ready.nbytes,
            holes=0 if job.tracker is None else job.tracker.hole_bytes,
            unknown=job.shadow.unknown.elements,
            known_step=job.shadow.known_step,
            digest=job.shadow.digest(),
        )
