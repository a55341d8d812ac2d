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

from flowcheck import jobfile
from flowcheck.capture import CaptureThread
from flowcheck.config import DaemonConfig
from flowcheck.errors import BadConfig, FlowcheckError
from flowcheck.job import Job
from flowcheck.jobs import Jobs
from flowcheck.journal import Journal
from flowcheck.persist import Persister
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.server import Server
from flowcheck.store import Store
from mirror.afpacket import AfPacketSource
from mirror.block import Source
from mirror.capfile import CaptureFileSource
from mirror.record import PcapRecorder
from reconstruct.markers import parse_marker
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


def open_sources(config: DaemonConfig) -> list[Source]:
    """The capture sources that the options name."""
    if config.files:
        return [CaptureFileSource(list(config.files))]
    blocks = max(2, (config.ring_mib << 10) // config.block_kib)
    return [AfPacketSource(name, block_size=config.block_kib << 10, blocks=blocks) for name in config.interfaces]


def available_memory() -> int:
    """Bytes that this machine can still give."""
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
        live = bool(config.interfaces)
        limits = Limits(landings=int(config.landing_gib * (1 << 30)))
        pipeline = Pipeline(limits, Waits() if live else Waits(marker=1 << 62))
        pipeline.warm_up()
        sources = open_sources(config)
        recorder = None if config.record is None else PcapRecorder(config.record)
        self._ready: queue.SimpleQueue[tuple[Job, StepReady] | None] = queue.SimpleQueue()
        self._capture = CaptureThread(pipeline, sources, self._deliver, live=live, recorder=recorder)
        self._recorder = recorder
        self._sources = sources
        self._journal = None if config.journal is None else Journal(config.journal)
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
            apply_wait=1.0,
            memory_limit=available_memory(),
        )
        self._apply_thread = threading.Thread(target=self._apply_steps, name="apply", daemon=True)
        self._failure: BaseException | None = None
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
            self._wait()
            self._finish()
            if self.config.files and server is not None and not self._stop.is_set():
                self._stop.wait()
        finally:
            if server is not None:
                server.close()
            for source in self._sources:
                source.close()
        failure = self._capture.failure or self._failure
        if failure is not None:
            raise failure if isinstance(failure, FlowcheckError) else FlowcheckError(
                f"the daemon failed inside: {type(failure).__name__}: {failure}"
            ) from failure
        return 0

    def _replay(self, path: Path) -> None:
        """Follow a recorded job: its job file is the attach, the markers beside it are delivered by their time."""
        description, tensors = jobfile.read(path)
        session = self._jobs.begin_attach(description)
        for key, (_, data) in tensors.items():
            session.chunk(key, 0, memoryview(data))
        session.commit()
        (job,) = self._jobs.jobs.values()
        markers = path.with_name(jobfile.MARKERS_FILE)
        for record in jobfile.read_markers(markers):
            arrived = record.pop("time", None)
            if type(arrived) is not int:
                raise BadConfig(f"{markers}: a marker without its time of arrival")
            self._capture.call(partial(job.tracker.marker, parse_marker(record), arrived), at=arrived)

    def _wait(self) -> None:
        while not self._stop.wait(0.1):
            if not self._capture.is_alive() or not self._apply_thread.is_alive():
                return

    def _finish(self) -> None:
        """Drain the ring, apply what is whole, write the newest steps."""
        self._capture.stop()
        self._capture.join()
        self._ready.put(None)
        self._apply_thread.join()
        if self._persister is not None:
            self._persister.finish()
            for job in self._jobs.jobs.values():
                if job.suspect is None and job.persisted != job.step:
                    pin = job.shadow.pin()
                    self._persister.write(job, pin)
                    pin.release()
        if self._recorder is not None:
            self._recorder.close()
        if self._journal is not None:
            self._journal.close()
        for job in self._jobs.jobs.values():
            log(f"{job.key}: holds step {job.step}" + (f"; {job.status()['frozen']}" if job.frozen else ""))
        if self._lags:
            log(f"median lag {statistics.median(self._lags):.1f} ms over the last {len(self._lags)} steps")

    # events of the capture thread

    def _deliver(self, key: str, event: TrackerEvent) -> None:
        job = self._jobs.jobs.get(key)
        if job is None:
            return
        if isinstance(event, StepReady):
            self._ready.put((job, event))
        elif isinstance(event, StepConfirmed):
            job.unconfirmed.discard(event.step)
        elif isinstance(event, StepLost):
            if event.claimed:
                job.suspect = event.reason
            job.frozen = event.reason
            log(f"{key}: frozen at {job.step}: {event.reason}")
        elif isinstance(event, Notice):
            log(f"{key}: {event.text}")

    # the apply thread

    def _apply_steps(self) -> None:
        try:
            while (item := self._ready.get()) is not None:
                self._apply(*item)
        except BaseException as error:
            self._failure = error
            self._capture.stop()

    def _apply(self, job: Job, ready: StepReady) -> None:
        if job.suspect is None:
            if not ready.confirmed:
                job.unconfirmed.add(ready.step)
            job.shadow.apply(ready.step, ready.gradients, [dict(group) for group in ready.groups])
            if self.config.interfaces:
                job.lag_ms = (time.time_ns() - ready.time) / 1e6
                self._lags.append(job.lag_ms)
            job.suspect = job.contradiction(ready.canaries)
            if job.suspect is not None:
                log(f"{job.key}: {job.suspect}")
        tracker = job.tracker
        if tracker is not None:
            self._capture.call(lambda: tracker.applied(ready.step))
        if job.suspect is not None:
            return
        if self._journal is not None:
            self._journal.write(
                run=job.run,
                epoch=job.epoch,
                step=ready.step,
                confirmed=ready.confirmed,
                lag_ms=job.lag_ms,
                bytes=ready.nbytes,
                holes=tracker.hole_bytes if tracker is not None else 0,
                digest=job.shadow.digest(),
            )
        if self._persister is not None:
            self._persister.consider(job)
