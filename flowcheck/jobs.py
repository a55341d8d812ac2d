"""What the daemon does for those who connect: attach a job, take its markers, report, hand out state.

Called on the server's threads. Whatever touches the pipeline is posted to the capture thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowcheck import __version__
from flowcheck.capture import CaptureThread
from flowcheck.description import JobDescription
from flowcheck.errors import FlowcheckError, NothingRestorable, UsageError
from flowcheck.job import Job
from flowcheck.jobfile import MarkerLog
from flowcheck.persist import Persister
from flowcheck.protocol import check_layout
from flowcheck.service import Revoked, snapshot_header
from flowcheck.snapshot import Snapshot
from flowcheck.store import Store
from mirror.block import Source
from reconstruct.exactness import exactness
from reconstruct.lr import Predictor
from reconstruct.markers import parse_marker
from reconstruct.shadow import Pin, Shadow

COMMIT_SECONDS = 10.0
MAX_ENDED = 16
"""Ended epochs whose newest step is still held in memory; beyond this the store has them."""


class Jobs:
    """The jobs of one daemon. Implements `flowcheck.service.Service`.

    store, persister: None without `--store`. apply_wait: seconds that applying waits for readers of older steps;
    memory_limit: bytes that the state of all jobs may take.
    """

    def __init__(
        self,
        capture: CaptureThread,
        sources: Sequence[Source],
        store: Store | None,
        persister: Persister | None,
        log: Callable[[str], None],
        *,
        apply_wait: float,
        memory_limit: int,
    ) -> None:
        self.jobs: dict[str, Job] = {}  # by key, oldest first; one per run
        self._capture = capture
        self._sources = sources
        self._store = store
        self._persister = persister
        self._log = log
        self._apply_wait = apply_wait
        self._memory_limit = memory_limit
        self._lock = threading.Lock()
        self._ahead: dict[str, int] = {}  # newest step per run of jobs that this daemon does not follow
        self._marker_logs: dict[str, MarkerLog] = {}
        self._epochs: dict[str, int] = {}

    # attach

    def begin_attach(self, description: JobDescription) -> Attach:
        """Allocate the shadow of a job that wants to attach. Raises UsageError when it does not fit in memory."""
        need = 2 * sum(spec.nbytes for _, spec in description.tensors())
        with self._lock:
            ended = [key for key, job in self.jobs.items() if job.ended]
            while ended and (len(ended) > MAX_ENDED or self._used() + need > self._memory_limit):
                del self.jobs[ended.pop(0)]
            used = self._used()
        if used + need > self._memory_limit:
            raise UsageError(
                f"the job's state needs up to {need >> 20} MiB and {(self._memory_limit - used) >> 20} MiB are left "
                "on the checkpoint node: use a larger one"
            )
        return Attach(self, description, Shadow(description, apply_wait=self._apply_wait))

    def _used(self) -> int:
        return sum(job.shadow.memory_bytes for job in self.jobs.values())

    def commit(self, description: JobDescription, shadow: Shadow) -> dict[str, Any]:
        """Open an epoch and follow the job from its next collective on."""
        exact, reasons = exactness(description)
        with self._lock:
            epoch = self._open_epoch(description.run)
            job = Job(
                description.run, epoch, description, shadow, Predictor(description), Predictor(description), exact, reasons
            )
            job.job_step = description.step
            for other in list(self.jobs.values()):
                if not other.ended and (other.run == job.run or _shares_group(other.description, description)):
                    self._retire(other, job)
                if other.run == job.run:
                    del self.jobs[other.key]
            self._follow(job)
            self.jobs[job.key] = job
        if self._store is not None and self._persister is not None:
            self._marker_logs[job.key] = MarkerLog(self._store.markers_file(job.run, epoch))
            self._persister.begin(job)
        self._log(
            f"{job.key}: attached at step {description.step}, {len(description.parameters)} parameters, "
            f"{description.world_size} ranks" + ("" if exact else f"; not bit-exact: {'; '.join(reasons)}")
        )
        return {"run": job.run, "epoch": epoch, "exact": exact, "reasons": list(reasons), "version": __version__}

    def _open_epoch(self, run: str) -> int:
        if self._store is not None:
            return self._store.open_epoch(run)
        self._epochs[run] = self._epochs.get(run, 0) + 1
        return self._epochs[run]

    def _follow(self, job: Job) -> None:
        done = threading.Event()
        failed: list[Exception] = []

        def add() -> None:
            try:
                job.tracker = self._capture.pipeline.add_job(job.key, job.description, job.predictor)
            except Exception as error:
                failed.append(error)
            done.set()

        self._capture.call(add)
        if not done.wait(COMMIT_SECONDS):
            raise FlowcheckError("the capture thread did not answer: the checkpoint node is overloaded")
        if failed:
            raise FlowcheckError(f"the job cannot be followed: {failed[0]}")

    def _retire(self, job: Job, successor: Job) -> None:
        """The trainers attached again: the old epoch gets no further step, its newest one stays restorable."""
        job.ended = True
        job.frozen = f"the trainers attached again, as {successor.key}"
        self._capture.call(lambda: self._capture.pipeline.remove_job(job.key))
        if self._persister is not None and job.suspect is None and job.persisted != job.step:
            self._persister.request(job)
        log = self._marker_logs.pop(job.key, None)
        if log is not None:
            log.close()

    # markers and layouts

    def marker(self, run: str, epoch: int, marker: Mapping[str, Any]) -> None:
        """A step marker of a job. Raises DescriptionError when it is malformed."""
        parsed = parse_marker(marker)
        arrived = time.time_ns()
        job = self.jobs.get(f"{run}/e{epoch}")
        if job is None:
            self._ahead[run] = max(parsed.step, self._ahead.get(run, 0))
            return
        job.job_step = max(job.job_step, parsed.step)
        log = self._marker_logs.get(job.key)
        if log is not None:
            try:
                log.append({"time": arrived, **marker})
            except FlowcheckError as error:
                self._log(str(error))
                del self._marker_logs[job.key]
        tracker = job.tracker
        assert tracker is not None
        self._capture.call(lambda: tracker.marker(parsed, arrived))

    def layout(self, run: str, epoch: int, layout: dict[str, Any]) -> None:
        """The rebuilt bucket layout that rank 0 read from DDP. Raises DescriptionError when it is malformed."""
        checked = check_layout(layout)
        job = self.jobs.get(f"{run}/e{epoch}")
        if job is not None and job.tracker is not None:
            tracker = job.tracker
            self._capture.call(lambda: tracker.reported_layout(checked["buckets"], checked["bucket_bytes"]))

    # reading

    def status(self) -> dict[str, Any]:
        """What `flowcheck status` shows: the newest job's fields, counters of the capture, and every job."""
        counters = [source.counters() for source in self._sources]
        common: dict[str, Any] = {
            "version": __version__,
            "packets": sum(c.packets for c in counters),
            "bytes": sum(c.bytes for c in counters),
            "drops": sum(c.drops for c in counters),
            "sources": [
                {
                    "name": source.name,
                    "packets": c.packets,
                    "bytes": c.bytes,
                    "drops": c.drops,
                    "interface_drops": c.interface_drops,
                    "problems": list(source.problems)[-8:],
                }
                for source, c in zip(self._sources, counters, strict=True)
            ],
            "capture": self._capture.pipeline.counters(),
            "failure": None if self._capture.failure is None else str(self._capture.failure),
        }
        jobs = [job.status() for job in list(self.jobs.values())]
        if jobs:
            return {**jobs[-1], **common, "jobs": jobs}
        return {**self._stored_status(), **common, "jobs": []}

    def _stored_status(self) -> dict[str, Any]:
        """Without a job: the newest snapshot on disk, which this daemon serves."""
        nothing: dict[str, Any] = {
            "run": None, "epoch": None, "step": None, "confirmed": None, "exact": None, "reasons": [], "coverage": 0.0,
            "lag_ms": None, "job_step": None, "frozen": None, "holes": 0, "memory_bytes": 0, "copies": 0,
        }  # fmt: skip
        if self._store is None:
            return nothing
        try:
            found = self._store.newest()
        except NothingRestorable:
            return nothing
        ahead = self._ahead.get(found.run, found.step)
        where = ", job is ahead" if ahead > found.step else ""
        return {
            **nothing,
            "run": found.run,
            "epoch": found.epoch,
            "step": found.step,
            "job_step": max(ahead, found.step),
            "frozen": f"frozen at {found.step}{where}: no job is attached to this daemon; attach again",
        }

    def open(self, run: str | None, step: int | None) -> LiveFetch | StoredFetch:
        """A whole step for a client: the live one when it is asked for, else from the store.

        Raises NothingRestorable when there is none, UsageError when several runs live and none was named.
        """
        with self._lock:
            jobs = [job for job in self.jobs.values() if (not job.ended if run is None else job.run == run)]
        if len(jobs) > 1:
            raise UsageError(f"several runs are followed here, name one: {', '.join(sorted(j.run for j in jobs))}")
        if jobs and jobs[0].suspect is None:
            pin = jobs[0].shadow.pin()
            if step is None or pin.step == step:
                return LiveFetch(jobs[0], pin)
            pin.release()
        if self._store is None:
            live = f"step {jobs[0].step} is" if jobs else "nothing is"
            raise NothingRestorable(f"{live} held here and the daemon has no store for other steps")
        name = run if run is not None or not jobs else jobs[0].run
        return StoredFetch(self._store.load(name, "latest" if step is None else step))


def _shares_group(one: JobDescription, other: JobDescription) -> bool:
    """Whether two jobs name the same listeners: the same process group, so the same trainers."""
    addresses = {address for context in one.group.contexts for address in context.values()}
    return any(address in addresses for context in other.group.contexts for address in context.values())


class Attach:
    """The upload of one job's description and initial state."""

    def __init__(self, jobs: Jobs, description: JobDescription, shadow: Shadow) -> None:
        self._jobs = jobs
        self._description = description
        self._shadow = shadow

    def chunk(self, key: str, offset: int, data: memoryview) -> None:
        self._shadow.load(key, offset, data)

    def commit(self) -> dict[str, Any]:
        missing = self._shadow.missing()
        if missing:
            raise UsageError(f"the upload lacks {len(missing)} tensors, the first is {missing[0]}")
        return self._jobs.commit(self._description, self._shadow)

    def abort(self) -> None:
        """Nothing to undo: the shadow goes with the session."""


class LiveFetch:
    """A client's view of the shadow's step, pinned."""

    def __init__(self, job: Job, pin: Pin) -> None:
        self._pin = pin
        self._snapshot = job.snapshot(pin)
        self.header = snapshot_header(self._snapshot)

    def read(self, key: str, offset: int, length: int) -> memoryview:
        """Bytes of a tensor, copied before the pin is checked. Raises Revoked once the pin is revoked."""
        data = self._snapshot.tensors[key][1][offset : offset + length].tobytes()
        if self._pin.revoked:
            raise Revoked("reading took longer than a step and the state moved on: ask again")
        return memoryview(data)

    def close(self) -> None:
        self._pin.release()


class StoredFetch:
    """A client's view of a snapshot on disk."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.header = snapshot_header(snapshot)

    def read(self, key: str, offset: int, length: int) -> memoryview:
        return memoryview(self._snapshot.tensors[key][1])[offset : offset + length]

    def close(self) -> None:
        """The mapped files go with the session."""
