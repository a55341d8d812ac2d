"""The daemon's process: sources, threads and signals around the pipeline.

    capture thread   ring or file -> pipeline -> finished steps          (flowcheck.capture)
    apply thread     optimizer step on the shadow, journal, when to persist
    persist thread   pinned steps to disk                                (flowcheck.persist)
    server thread    attach, markers, status, restore                    (flowcheck.server, flowcheck.service)
    main thread      waits for SIGTERM, then drains, persists and ends
"""

from __future__ import annotations

import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

import torch

from flowcheck import jobfile, trainer_log
from flowcheck.capture import CaptureThread
from flowcheck.config import DaemonConfig
from flowcheck.errors import FlowcheckError
from flowcheck.job import Job
from flowcheck.jobs import Jobs
from flowcheck.journal import Journal
from flowcheck.persist import Persister
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.server import Server
from flowcheck.store import Store
from flowcheck.vantages import Vantages
from mirror.afpacket import AfPacketSource
from mirror.block import Source
from mirror.capfile import CaptureFileSource
from mirror.record import PcapRecorder
from reconstruct.steps import Notice, StepConfirmed, StepLost, StepReady, TrackerEvent, Waits

LOOPBACK_ANY = "tcp://127.0.0.1:0"


def log(text: str) -> None:
    """One line for people, on stderr: stdout carries only what scripts read."""
    print(f"flowcheck: {text}", file=sys.stderr, flush=True)


def run(config: DaemonConfig) -> int:
    """Run the daemon until SIGTERM, SIGINT or the end of the recording; the exit status."""
    if config.observe:
        from flowcheck.observe import observe

        return observe(config)
    return Daemon(config).run()


def declared_vantages(config: DaemonConfig) -> Vantages:
    """The vantage groups that the options declare. Raises UsageError."""
    return Vantages(config.vantage, config.interfaces or tuple(map(str, config.files)), config.vxlan_port)


def open_sources(config: DaemonConfig, vantages: Vantages) -> list[Source]:
    """The capture sources that the options name."""
    if config.files:
        return [CaptureFileSource(config.files, vantage=[vantages.of_source(str(path)) for path in config.files])]
    blocks = max(2, (config.ring_mib << 10) // config.block_kib)
    return [
        AfPacketSource(name, block_size=config.block_kib << 10, blocks=blocks, vantage=vantages.of_source(name))
        for name in config.interfaces
    ]


def available_memory() -> int:
    """Bytes that this machine can still give, the page cache's included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _warm_up_optimizer() -> None:
    """torch loads more than a second's worth of modules in a process's first optimizer step: not in the job's."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


class Daemon:
    """One daemon process."""

    def __init__(self, config: DaemonConfig) -> None:
        self.config = config
        # Half of the cores: a tile is too small for threads that must first be given a core.
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // 2))
        _warm_up_optimizer()
        self._live = bool(config.interfaces)
        limits = Limits(landings=int(config.landing_gib * (1 << 30)))
        vantages = declared_vantages(config)
        pipeline = Pipeline(limits, Waits(), vantages, config.nccl_version)
        pipeline.warm_up()
        sources = open_sources(config, vantages)
        recorder = None if config.record is None else PcapRecorder(config.record)
        self._ready: queue.SimpleQueue[tuple[Job, StepReady | None] | None] = queue.SimpleQueue()
        self._capture = CaptureThread(
            pipeline, sources, self._deliver, live=self._live, report=log, recorder=recorder
        )
        self._recorder = recorder
        self._sources = sources
        self._journal = None if config.journal is None else Journal(config.journal)
        self._journal_missing = 0
        self._store = None if config.store is None else Store(config.store)
        self._persister: Persister | None = None
        if self._store is not None:
            self._persister = Persister(
                self._store,
                keep=config.keep,
                every_steps=config.every_steps,
                every_seconds=config.every_seconds,
                report=log,
            )
        self._lags: deque[float] = deque(maxlen=1024)
        self._jobs = Jobs(
            self._capture,
            sources,
            self._store,
            self._persister,
            log,
            lambda job: self._ready.put((job, None)),
            memory_limit=available_memory(),
            gradient_limit=limits.landings,
        )
        self._apply_thread = threading.Thread(target=self._apply_steps, name="apply", daemon=True)
        self._stop = threading.Event()

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        endpoints = list(self.config.listen)
        if not endpoints and not self.config.files:
            endpoints = [LOOPBACK_ANY]
        server = Server(self._jobs, endpoints, insecure=self.config.insecure) if endpoints else None
        if self._persister is not None:
            self._persister.start()
        self._apply_thread.start()
        if self.config.job is not None:
            self._replay(self.config.job)
        self._capture.start()
        if server is not None:
            server.start()
            for endpoint in server.endpoints:
                print(f"listening {endpoint}", flush=True)
        try:
            self._wait(server is not None)
            unstored = self._finish()
            if self.config.files and server is not None and not self._stop.is_set():
                self._stop.wait()
        finally:
            if server is not None:
                server.close()
            for source in self._sources:
                source.close()
        failure = self._capture.failure
        if failure is not None:
            raise failure if isinstance(failure, FlowcheckError) else FlowcheckError(
                f"the capture failed inside: {type(failure).__name__}: {failure}"
            ) from failure
        if unstored:
            raise FlowcheckError(f"the newest step of {', '.join(unstored)} is not in the store: see above")
        return 0

    def _replay(self, path: Path) -> None:
        """Follow a recorded job: its job file is the attach, what its trainers said is said again at its time."""
        description, tensors = jobfile.read(path)
        said = trainer_log.read(path.with_name(jobfile.MARKERS_FILE))
        session = self._jobs.begin_attach(description)
        for key, (_, data) in tensors.items():
            session.chunk(key, 0, data.data)
        session.commit(said.attached)
        (job,) = self._jobs.jobs.values()
        tracker = job.tracker
        assert tracker is not None
        for time_, word in said.words:
            self._capture.call(partial(word, tracker), at=time_)

    def _wait(self, serving: bool) -> None:
        """Until a signal comes or the recording has ended. A daemon whose capture fails still serves what it holds."""
        while not self._stop.wait(0.1):
            if self._capture.is_alive():
                continue
            failure = self._capture.failure
            if failure is None or not self._live or not serving:
                return
            for job in list(self._jobs.jobs.values()):
                job.frozen = job.frozen or f"the capture failed: {failure}"
            log(f"the capture failed, no further step is followed: {type(failure).__name__}: {failure}")
            self._stop.wait()
            return

    def _finish(self) -> list[str]:
        """Drain the ring, apply what is whole, write the newest steps; the jobs whose newest step is not on disk."""
        self._capture.stop()
        self._capture.join()
        self._ready.put(None)
        self._apply_thread.join()
        unstored = []
        jobs = list(self._jobs.jobs.values())
        if self._persister is not None:
            self._persister.finish()
            for job in jobs:
                if not job.in_doubt(job.step) and job.persisted != job.step:
                    with job.shadow.pin() as pin:
                        if not self._persister.write(job, pin):
                            unstored.append(job.key)
        self._jobs.close()
        if self._recorder is not None:
            try:
                self._recorder.close()
            except FlowcheckError as error:
                log(str(error))
        if self._journal is not None:
            self._journal.close()
        for job in jobs:
            frozen = job.status()["frozen"]
            log(f"{job.key}: holds step {job.step}" + (f"; {frozen}" if frozen else ""))
        if self._lags:
            log(f"median lag {statistics.median(self._lags):.1f} ms over the last {len(self._lags)} steps")
        return unstored

    # events of the capture thread

    def _deliver(self, key: str, event: TrackerEvent) -> None:
        job = self._jobs.followed.get(key)
        if job is None:
            return
        if isinstance(event, StepReady):
            self._ready.put((job, event))
        elif isinstance(event, StepConfirmed):
            job.unconfirmed.discard(event.step)
        elif isinstance(event, StepLost):
            if event.claimed:
                self._distrust(job, event.step, event.reason)
            job.frozen = event.reason
            log(f"{key}: frozen at {event.step - 1}: {event.reason}")
        elif isinstance(event, Notice):
            log(f"{key}: {event.text}")

    def _distrust(self, job: Job, step: int, reason: str) -> None:
        job.distrust(step, reason)
        if self._persister is not None:
            self._persister.withdraw(job, step)

    # the apply thread

    def _apply_steps(self) -> None:
        while (item := self._ready.get()) is not None:
            job, ready = item
            if ready is None:
                if self._persister is not None and not job.in_doubt(job.step):
                    self._persister.request(job)
                continue
            try:
                self._apply(job, ready)
            except Exception as error:
                job.halted = True
                reason = f"step {ready.step} could not be applied: {error}"
                if not job.shadow.ready:  # torn half way; otherwise the step before it is whole
                    job.distrust(job.step, reason)
                job.frozen = reason
                log(f"{job.key}: frozen at {job.step}: {reason}")
            ready.gradients.clear()  # nothing refers to them any more: their memory can be taken again
            if job.tracker is not None:
                self._capture.call(partial(job.tracker.applied, ready.step))

    def _apply(self, job: Job, ready: StepReady) -> None:
        if job.halted or job.suspect is not None:
            return
        job.note_applied(ready.step, ready.confirmed)
        job.pace.step(ready.time)
        job.shadow.apply_wait = job.pace.wait
        job.shadow.apply(ready.step, ready.gradients, [dict(group) for group in ready.groups])
        if self._live:
            job.lag_ms = (time.time_ns() - ready.time) / 1e6
            self._lags.append(job.lag_ms)
        contradiction = job.contradiction(ready.canaries)
        if contradiction is not None:
            job.halted = True
            job.distrust(ready.step, contradiction)
            job.frozen = contradiction
            if self._persister is not None:
                self._persister.doubt(job, contradiction)
            log(f"{job.key}: {contradiction}")
        job.checked = ready.step
        if job.suspect is not None:
            return
        if self._journal is not None:
            self._write_line(job, ready, self._journal)
        if self._persister is not None:
            self._persister.consider(job)

    def _write_line(self, job: Job, ready: StepReady, journal: Journal) -> None:
        written = journal.write(
            run=job.run,
            epoch=job.epoch,
            step=ready.step,
            confirmed=ready.confirmed,
            lag_ms=job.lag_ms,
            bytes=ready.nbytes,
            holes=0 if job.tracker is None else job.tracker.hole_bytes,
            digest=job.shadow.digest(),
        )
        if not written and self._journal_missing == 0 and journal.problem is not None:
            log(journal.problem)
        self._journal_missing = journal.missing if not written else 0
