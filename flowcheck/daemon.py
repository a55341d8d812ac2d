"""The daemon's process: sources, threads and signals around the pipeline.

    capture thread   ring or file -> pipeline -> finished steps          (flowcheck.capture)
    apply thread     optimizer step on the shadow, journal, when to persist
    persist thread   pinned steps to disk                                (flowcheck.persist)
    server thread    attach, markers, status, restore                    (flowcheck.server, flowcheck.service)
    main thread      waits for SIGTERM, then drains, persists and ends
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from flowcheck import jobfile, kernels, trainer_log
from flowcheck.access import Access
from flowcheck.applying import ApplyThread
from flowcheck.capture import CaptureThread
from flowcheck.checkpoints import Roots
from flowcheck.config import DaemonConfig
from flowcheck.errors import FlowcheckError
from flowcheck.job import Job
from flowcheck.jobs import Jobs
from flowcheck.journal import Journal
from flowcheck.persist import Persister
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.privileges import Account, account, acting_as, drop, hand_over, make_folder
from flowcheck.resync import Budget
from flowcheck.server import Server
from flowcheck.service import Service
from flowcheck.store import Store
from flowcheck.uploader import Uploader
from flowcheck.vantages import Vantages
from mirror import record
from mirror.afpacket import AfPacketSource
from mirror.block import Source
from mirror.capfile import CaptureFileSource
from mirror.faults import Faults, faults_of
from mirror.faulty import FaultSource
from mirror.record import PcapRecorder
from reconstruct.steps import Notice, StepConfirmed, StepLost, StepReady, TrackerEvent, Waits

LOOPBACK_ANY = "tcp://127.0.0.1:0"


def log(text: str) -> None:
    """One line for people, on stderr: stdout carries only what scripts read."""
    print(f"flowcheck: {text}", file=sys.stderr, flush=True)


def run(config: DaemonConfig) -> int:
    """Run the daemon until SIGTERM, SIGINT or the end of the recording; the exit status."""
    declared_faults(config)  # before anything that takes long
    umask = os.umask(0o077)  # whatever it writes is for its user alone
    try:
        if config.observe:
            from flowcheck.observe import observe

            return observe(config)
        return Daemon(config).run()
    finally:
        os.umask(umask)


def declared_vantages(config: DaemonConfig) -> Vantages:
    """The vantage groups that the options declare. Raises UsageError."""
    return Vantages(config.vantage, _names(config), config.vxlan_port)


def declared_faults(config: DaemonConfig) -> dict[str, Faults]:
    """The faults to inject, by interface or file. Raises UsageError."""
    return faults_of(config.fault, _names(config))


def _names(config: DaemonConfig) -> tuple[str, ...]:
    return config.interfaces or tuple(map(str, config.files))


def open_sources(config: DaemonConfig, vantages: Vantages) -> list[Source]:
    """The capture sources that the options name, with the faults that are to be injected."""
    names, faults = _names(config), declared_faults(config)
    # A name of its own for each: the same faults hit other frames there, wherever its folder lies.
    streams = [(f"{Path(name).name}#{number}", faults.get(name, Faults())) for number, name in enumerate(names)]
    for name, (_, spec) in zip(names, streams, strict=True):
        if str(spec):
            log(f"FAULTS ARE INJECTED into {name}: {spec}")
    if config.files:
        files = CaptureFileSource(config.files, vantage=[vantages.of_source(name) for name in names])
        if not faults:
            return [files]
        return [FaultSource(files, {name: (at, spec) for (name, spec), at in zip(streams, files.starts, strict=True)})]
    blocks = max(2, (config.ring_mib << 10) // config.block_kib)
    rings = [
        AfPacketSource(name, block_size=config.block_kib << 10, blocks=blocks, vantage=vantages.of_source(name))
        for name in names
    ]
    if not faults:
        return list(rings)
    return [FaultSource(ring, {name: (0, spec)}) for ring, (name, spec) in zip(rings, streams, strict=True)]


def account_of(config: DaemonConfig) -> Account | None:
    """Whom this process is to become. Raises UsageError or NoPermission."""
    return None if config.user is None else account(config.user)


def open_recorder(config: DaemonConfig, who: Account | None) -> PcapRecorder | None:
    """The recording that the options ask for."""
    if config.record is None:
        return None
    record.warm_up()  # as root, who alone may write to root's folder of compiled kernels
    with acting_as(who):
        return PcapRecorder(config.record)


def open_journal(config: DaemonConfig, who: Account | None) -> Journal | None:
    """The journal that the options ask for."""
    with acting_as(who):
        return None if config.journal is None else Journal(config.journal, log, patient=not config.interfaces)


def open_server(config: DaemonConfig, service: Service, addresses: Sequence[str], who: Account | None) -> Server:
    """The control server, bound, its unix sockets in the hands of whom this process becomes."""
    with acting_as(who):
        access = None if config.keys is None else Access(config.keys)
    server = Server(service, addresses, access=access, insecure=config.insecure)
    for endpoint in server.endpoints:
        if endpoint.startswith("ipc://"):
            hand_over(Path(endpoint.removeprefix("ipc://")), who)
    return server


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
        self._account = account_of(config)
        # Half of the cores: a tile is too small for threads that must first be given a core.
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // 2))
        _warm_up_optimizer()
        self._live = bool(config.interfaces)
        limits = Limits(landings=int(config.landing_gib * (1 << 30)))
        vantages = declared_vantages(config)
        pipeline = Pipeline(limits, Waits(), vantages, config.nccl_version, config.checksums)
        kernels.announce(log)
        pipeline.warm_up()
        sources = open_sources(config, vantages)
        recorder = open_recorder(config, self._account)
        self._capture = CaptureThread(
            pipeline, sources, self._deliver, live=self._live, report=log, recorder=recorder
        )
        self._recorder = recorder
        self._sources = sources
        self._journal = open_journal(config, self._account)
        if config.store is not None:
            make_folder(config.store, self._account)
        limit = None if config.store_gib is None else int(config.store_gib * (1 << 30))
        self._store = None if config.store is None else Store(config.store, limit=limit, report=log)
        self._persister: Persister | None = None
        if self._store is not None:
            uploader = None
            if config.store_remote is not None:
                uploader = Uploader(self._store, config.store_remote, keep=config.keep, report=log)
            self._persister = Persister(
                self._store,
                keep=config.keep,
                every_steps=config.every_steps,
                every_seconds=config.every_seconds,
                report=log,
                uploader=uploader,
            )
        self._apply = ApplyThread(
            self._capture,
            lambda: list(self._jobs.jobs.values()),
            self._persister,
            self._journal,
            live=self._live,
            report=log,
        )
        self._jobs = Jobs(
            self._capture,
            sources,
            self._store,
            self._persister,
            log,
            self._apply,
            Budget(config.repair_percent, config.repair_mib << 20, config.scrub, config.compare_every),
            memory_limit=available_memory(),
            gradient_limit=limits.landings,
            roots=Roots(config.checkpoint_root),
        )
        self._stop = threading.Event()

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        endpoints = list(self.config.listen)
        if not endpoints and not self.config.files:
            endpoints = [LOOPBACK_ANY]
        server = open_server(self.config, self._jobs, endpoints, self._account) if endpoints else None
        if server is not None:
            self._jobs.tell = server.tell
        drop(self._account)  # nothing from here on needs root
        if self._persister is not None:
            self._persister.start()
        self._apply.start()
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
        self._apply.finish()
        unstored: list[str] = []
        jobs = list(self._jobs.jobs.values())
        if self._persister is not None:
            newest = [(job, step) for job in jobs if (step := job.shadow.known_step) is not None]
            for job, step in newest:
                if not job.in_doubt(step) and job.persisted != step:
                    self._persister.request(job)
            self._persister.finish()
            unstored = [job.key for job, step in newest if not job.in_doubt(step) and job.persisted != step]
            self._persister.finish_upload()
        self._jobs.close()
        if self._recorder is not None:
            try:
                self._recorder.close()
            except FlowcheckError as error:
                log(str(error))
        if self._journal is not None:
            self._journal.close()
        for job in jobs:
            status = job.status()
            unknown = status["unknown"]["elements"]
            more = [f"{unknown} elements of it are unknown"] if unknown else []
            log("; ".join([f"{job.key}: holds step {job.step}", *more, *filter(None, [status["frozen"]])]))
        if self._apply.lags:
            log(f"median lag {statistics.median(self._apply.lags):.1f} ms over the last {len(self._apply.lags)} steps")
        return unstored

    # events of the capture thread

    def _deliver(self, key: str, event: TrackerEvent) -> None:
        job = self._jobs.followed.get(key)
        if job is None:
            return
        if isinstance(event, StepReady):
            self._apply.step(job, event)
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
