"""What the daemon does for those who connect: attach a job, take its markers, report, hand out state.

Called on the server's threads. Whatever touches the pipeline is posted to the capture thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from flowcheck import __version__
from flowcheck.applying import ApplyThread
from flowcheck.capture import CaptureThread
from flowcheck.checkpoints import Roots
from flowcheck.description import JobDescription
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.glance import Glance
from flowcheck.groups import same_trainers
from flowcheck.handout import LiveFetch, StoredFetch, hand_out
from flowcheck.job import Job
from flowcheck.jobfile import MarkerLog
from flowcheck.linefile import LineFile
from flowcheck.persist import Persister
from flowcheck.protocol import check_layout
from flowcheck.repairing import Repairing
from flowcheck.resync import Budget, Resync
from flowcheck.seeding import Seeding
from flowcheck.service import Seeded
from flowcheck.store import Store
from flowcheck.watch import Watch
from mirror.block import Source
from mirror.faulty import injected
from reconstruct.exactness import exactness
from reconstruct.lr import Predictor
from reconstruct.markers import parse_marker
from reconstruct.shadow import Shadow
from reconstruct.steps import StepTracker

MIRROR_LAG = 150_000_000
"""How late frames may come (ns): what the ranks sent before the attach must not count as sent after it. The trainers
wait meanwhile."""
SWITCH_SECONDS = 10.0
"""How long an attach waits until the capture has processed everything from before it."""
MAX_ENDED = 16
"""Ended epochs whose newest step is still held in memory; beyond this the store has them."""
MAX_STRANGERS = 1024
"""Runs that are not followed here and whose newest step is remembered."""
_LONGEST_JOB = 1_000_000
"""Steps between two snapshots for which a scheduler is called again: they were taken, no marker only claims so."""
_ENDED = "this daemon has ended its capture and follows no job any more: start a new one"


class Jobs(Repairing):
    """The jobs of one daemon. Implements `flowcheck.service.Service`.

    store, persister: None without `--store`. budget: what repair may cost the trainers. memory_limit: bytes that the
    state of all jobs may take; gradient_limit: bytes of gradients in flight; roots: where checkpoints may be read.
    """

    def __init__(
        self,
        capture: CaptureThread,
        sources: Sequence[Source],
        store: Store | None,
        persister: Persister | None,
        log: Callable[[str], None],
        apply: ApplyThread,
        budget: Budget,
        *,
        memory_limit: int,
        gradient_limit: int,
        roots: Roots | None = None,
    ) -> None:
        self.jobs: dict[str, Job] = {}  # by key, oldest first; one per run
        super().__init__(self.jobs, apply, lambda: capture.over)
        self.followed: dict[str, Job] = {}  # those in the pipeline; of the capture thread
        self._capture = capture
        self._sources = sources
        self._store = store
        self._persister = persister
        self._log = log
        self._budget = budget
        self._memory_limit = memory_limit
        self._gradient_limit = gradient_limit
        self._roots = Roots() if roots is None else roots
        self._reading = threading.Lock()  # held while a checkpoint is read
        self._watch = Watch(capture, [source.name for source in sources], log, self._notice)
        self._lock = threading.Lock()
        self._uploading: dict[Attach, int] = {}  # bytes that their jobs will need
        self._ahead: dict[str, int] = {}  # newest step per run of jobs that this daemon does not follow
        self._logs: dict[str, MarkerLog] = {}
        self._logs_lock = threading.Lock()
        self._glance = Glance(store)
        self._epochs: dict[str, int] = {}

    # attach

    def begin_attach(self, description: JobDescription, late: bool = False) -> Attach:
        """Allocate the shadow of a job that wants to attach. late: training goes on meanwhile, and the state is fetched
        afterwards, by repair. Raises UsageError when it does not fit in memory or its process group cannot be followed
        here."""
        try:
            self._capture.pipeline.check(description)
        except ValueError as error:
            raise UsageError(f"the job cannot be followed: {error}") from error
        gradients = 2 * sum(p.spec.nbytes for p in description.parameters if p.index is not None)
        if gradients > self._gradient_limit:
            raise UsageError(
                f"two steps of gradients take {gradients >> 20} MiB, the daemon may hold {self._gradient_limit >> 20}: "
                "start it with a larger --landing-gib"
            )
        shadow = Shadow(description, known=not late)
        with self._lock:
            ended = [key for key, job in self.jobs.items() if job.ended]
            while ended and (len(ended) > MAX_ENDED or self._used() + shadow.planned_bytes > self._memory_limit):
                del self.jobs[ended.pop(0)]
            left = self._memory_limit - self._used()
            if shadow.planned_bytes > left:
                raise UsageError(
                    f"the job's state needs up to {shadow.planned_bytes >> 20} MiB and {left >> 20} MiB are left "
                    "on the checkpoint node: use a larger one"
                )
            attach = Attach(self, description, shadow, late)
            self._uploading[attach] = shadow.planned_bytes
        return attach

    def _used(self) -> int:
        held = sum(j.shadow.memory_bytes if j.ended else j.shadow.planned_bytes for j in self.jobs.values())
        return held + sum(self._uploading.values())

    def seeding(self, path: str, checksums: bytes, description: JobDescription, shadow: Shadow) -> Seeding:
        """Begin to read a checkpoint for an attach."""

        def report(text: str) -> None:
            self._log(f"{description.run}: {text}")

        return Seeding(path, checksums, description, shadow.load, self._roots, self._reading, report).start()

    def release(self, attach: Attach) -> None:
        """An attach has ended, one way or the other."""
        with self._lock:
            self._uploading.pop(attach, None)

    def commit(
        self, description: JobDescription, shadow: Shadow, late: bool, replayed: int | None = None
    ) -> dict[str, Any]:
        """Open an epoch and follow the job from its next collective on, or, if it joins late, from the step after
        that of the description. replayed: when a recorded job attached, ns."""
        replaying = self._capture.ident is None  # the recording's attach lies before its frames
        attached = replayed if replaying else None if late else time.time_ns() + MIRROR_LAG
        exact, reasons = exactness(description)
        with self._lock:
            if self._capture.over:
                raise FlowcheckError(_ENDED)
            epoch = self._open_epoch(description.run)
            predictors = Predictor(description), Predictor(description, _LONGEST_JOB)
            resync = self._resync(description.run, epoch, shadow)
            job = Job(description.run, epoch, description, shadow, *predictors, exact, reasons, resync, kept=not late)
            job.job_step = job.checked = description.step
            others = [
                other
                for other in self.jobs.values()
                if not other.ended and (other.run == job.run or same_trainers(other.description, description))
            ]
            self._switch(job, others, attached, None if replaying else attached)
            for other in others:
                self._end(other, job)
            for other in [held for held in self.jobs.values() if held.run == job.run]:
                del self.jobs[other.key]
            self.jobs[job.key] = job
        if self._store is not None and self._persister is not None:
            if not late:  # without the initial state nothing can be replayed
                with self._logs_lock:
                    self._logs[job.key] = MarkerLog(self._store.markers_file(job.run, epoch), self._log)
                self._write_down(job, {"time": attached, "attached": True})
            self._persister.begin(job)
        unseen = None if late or replaying else self._watch.attached(job)
        self._log(
            f"{job.key}: {'joined late' if late else 'attached'} at step {description.step}, "
            f"{len(description.parameters)} parameters, "
            f"{description.world_size} ranks" + ("" if exact else f"; not bit-exact: {'; '.join(reasons)}")
        )
        return {
            "run": job.run,
            "epoch": epoch,
            "exact": exact,
            "reasons": list(reasons),
            "version": __version__,
            "unseen": unseen,
        }

    def _notice(self, job: Job, text: str) -> None:
        """A line for the log of a job's rank 0."""
        first = job.resync.agents.first()
        if first is not None:
            self.tell(first.peer, "notice", run=job.run, text=text)

    def _resync(self, run: str, epoch: int, shadow: Shadow) -> Resync:
        key = f"{run}/e{epoch}"

        def doubt(reason: str) -> None:
            if self._persister is not None:
                self._persister.doubt(self.jobs[key], reason)

        def tell(peer: bytes, kind: str, /, **fields: Any) -> None:
            self.tell(peer, kind, **fields)

        names = {"run": run, "epoch": epoch}
        return Resync(names, shadow, self._budget, tell, lambda text: self._log(f"{key}: {text}"), doubt)

    def _open_epoch(self, run: str) -> int:
        if self._persister is not None:
            return self._persister.open_epoch(run)
        self._epochs[run] = self._epochs.get(run, 0) + 1
        return self._epochs[run]

    def _switch(self, job: Job, others: Sequence[Job], attached: int | None, at: int | None) -> None:
        """Let the capture thread follow `job` instead of `others`, once it has processed all that came before.

        The trainers wait in the attach, so nothing of the new epoch can come earlier; those of a job that joins late do
        not, and what was captured of their steps by then is not known.
        """
        done, given_up, turn = threading.Event(), threading.Event(), threading.Lock()
        failed: list[Exception] = []

        def switch() -> None:
            with turn:
                if given_up.is_set():
                    return
                for other in others:
                    self._capture.remove_job(other.key)
                    self.followed.pop(other.key, None)
                    self._apply.retired(other)
                try:
                    job.description = self._capture.pipeline.completed(job.description)
                    job.tracker = self._capture.pipeline.add_job(job.key, job.description, job.predictor, attached)
                    self.followed[job.key] = job
                    job.sight = self._capture.pipeline.sight(job.description)
                except Exception as error:
                    failed.append(error)
                done.set()

        self._capture.call(switch, at)
        deadline = time.monotonic() + SWITCH_SECONDS
        while not done.wait(0.1):
            over = self._capture.over
            if over or time.monotonic() > deadline:
                with turn:
                    if done.is_set():
                        break
                    given_up.set()
                raise FlowcheckError(_ENDED if over else "the capture is too far behind: attach again later")
        if failed:
            for other in others:
                self._end(other, job)
            raise FlowcheckError(f"the job cannot be followed: {failed[0]}")

    def _end(self, job: Job, successor: Job) -> None:
        """The trainers attached again: the old epoch gets no further step, its newest one stays restorable."""
        job.ended = True
        job.frozen = f"the trainers attached again, as {successor.key}"
        with self._logs_lock:
            log = self._logs.pop(job.key, None)
            if log is not None:
                log.finish()

    def close(self) -> None:
        """Nothing is written down any more."""
        with self._logs_lock:
            logs = list(self._logs.values())
            self._logs.clear()
        for log in logs:
            log.finish()
        for log in logs:
            log.close()

    # what trainers say later

    def marker(self, run: str, epoch: int, marker: Mapping[str, Any]) -> None:
        """A step marker of a job. Raises DescriptionError when it is malformed."""
        parsed = parse_marker(marker)
        arrived = time.time_ns()
        job = self.jobs.get(f"{run}/e{epoch}")
        if job is None:
            if run in self._ahead or len(self._ahead) < MAX_STRANGERS:
                self._ahead[run] = max(parsed.step, self._ahead.get(run, 0))
            return
        job.job_step = max(job.job_step, parsed.step)
        if not job.ended:
            self._write_down(job, {"time": arrived, **marker})
            self._tell(job, lambda tracker: tracker.marker(parsed, arrived))
            self._watch.marked(job, arrived)

    def layout(self, run: str, epoch: int, layout: dict[str, Any]) -> None:
        """The rebuilt bucket layout that rank 0 read from DDP. Raises DescriptionError when it is malformed."""
        checked = check_layout(layout)
        job = self.jobs.get(f"{run}/e{epoch}")
        if job is not None and not job.ended:
            self._write_down(job, {"time": time.time_ns(), "layout": layout})
            self._tell(job, lambda tracker: tracker.reported_layout(checked["buckets"], checked["bucket_bytes"]))

    def detach(self, run: str, epoch: int, step: int) -> None:
        """The trainers closed their handle after `step`: what the wire carries from then on is no step."""
        job = self.jobs.get(f"{run}/e{epoch}")
        if job is not None and not job.ended:
            self._write_down(job, {"time": time.time_ns(), "last": step})
            self._tell(job, lambda tracker: tracker.ends(step))
            if job.over:
                job.resync.done(step)
            else:
                self._apply.call(job, lambda: job.resync.ends(step))

    def link(self, run: str, epoch: int, alive: bool) -> None:
        """The connection on which a job's markers come stands again, or is gone."""
        job = self.jobs.get(f"{run}/e{epoch}")
        if job is not None and not job.ended:
            self._write_down(job, {"time": time.time_ns(), "link": alive})
            self._tell(job, lambda tracker: tracker.linked(alive))

    def _tell(self, job: Job, word: Callable[[StepTracker], None]) -> None:
        tracker = job.tracker
        if tracker is not None:
            self._capture.call(lambda: word(tracker))

    def _write_down(self, job: Job, record: Mapping[str, Any]) -> None:
        with self._logs_lock:
            log = self._logs.get(job.key)
            if log is None:
                return
            try:
                log.append(record)
            except FlowcheckError as error:
                self._log(f"{job.key}: markers are not recorded any more: {error}")
                del self._logs[job.key]
                log.finish()

    # reading

    def status(self) -> dict[str, Any]:
        """What `flowcheck status` shows: the newest job's fields, counters of the capture, and every job."""
        counters = [source.counters() for source in self._sources]
        pipeline = self._capture.pipeline.counters()
        held = list(self.jobs.values())
        common: dict[str, Any] = {
            "version": __version__,
            "packets": sum(c.packets for c in counters),
            "bytes": sum(c.bytes for c in counters),
            "drops": sum(c.drops for c in counters),
            "memory_bytes": sum(job.shadow.memory_bytes for job in held) + pipeline["memory_bytes"],
            "sources": [
                {
                    "name": source.name,
                    "packets": c.packets,
                    "bytes": c.bytes,
                    "drops": c.drops,
                    "interface_drops": c.interface_drops,
                    "problems": list(source.problems)[-8:],
                    "faults": injected(source),
                }
                for source, c in zip(self._sources, counters, strict=True)
            ],
            "capture": pipeline,
            "loss": self._capture.loss.status,
            "tunnels": self._capture.pipeline.tunnels(),
            "failure": None if self._capture.failure is None else str(self._capture.failure),
            "disks": self._disks(),
            "remote": None if self._persister is None else self._persister.remote_status(),
        }
        jobs = [job.status() for job in held]
        if jobs:
            return {**jobs[-1], **common, "jobs": jobs}
        stored = self._glance.status(self._ahead)
        return {**stored, **common, "disks": common["disks"] + self._glance.disk, "jobs": []}

    def _disks(self) -> list[dict[str, Any]]:
        """What is written behind: an entry as of `LineFile.status` of each."""
        with self._logs_lock:
            lines: list[LineFile] = list(self._logs.values())
        if self._apply.journal is not None:
            lines.insert(0, self._apply.journal)
        return [file.status() for file in lines] + ([] if self._persister is None else self._persister.disk)

    def open(self, run: str | None, step: int | None, allow_unknown: bool = False) -> LiveFetch | StoredFetch:
        """A whole step for a client: the live one when it is asked for, else from the store. allow_unknown: the live
        one even if elements of it are unknown. Raises as `hand_out`."""
        with self._lock:
            jobs = [job for job in self.jobs.values() if (not job.ended if run is None else job.run == run)]
        ahead = {**self._ahead, **{job.run: job.job_step for job in jobs}}
        return hand_out(jobs, self._store, run, step, ahead, allow_unknown)


class Attach:
    """The upload of one job's description and, unless it joins late, initial state."""

    def __init__(self, jobs: Jobs, description: JobDescription, shadow: Shadow, late: bool) -> None:
        self._jobs = jobs
        self._description = description
        self._shadow = shadow
        self._late = late
        self._seeding: Seeding | None = None

    def seed(self, path: str, checksums: bytes) -> Future[Seeded]:
        self._seeding = self._jobs.seeding(path, checksums, self._description, self._shadow)
        return self._seeding.found

    def chunk(self, key: str, offset: int, data: memoryview) -> None:
        self._shadow.load(key, offset, data)

    def commit(self, attached: int | None = None) -> dict[str, Any]:
        """attached: when the trainers attached, ns since the epoch, for one that is replayed."""
        missing = self._shadow.missing()
        if missing:
            raise UsageError(f"the upload lacks {len(missing)} tensors, the first is {missing[0]}")
        try:
            return self._jobs.commit(self._description, self._shadow, self._late, attached)
        finally:
            self._jobs.release(self)

    def abort(self) -> None:
        if self._seeding is not None:
            self._seeding.stop("the attach was given up")
        self._jobs.release(self)
