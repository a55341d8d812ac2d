"""`flowcheck daemon --observe`: look at a mirror without a job. Nothing is applied, nothing is kept.

Groups are learned from the rendezvous on the wire, so it has to be mirrored. At the end, or on SIGTERM or SIGINT, a
table goes to stdout; while capturing, one line every few seconds to stderr. `--journal FILE` gets one JSON line per
finished collective and one at the end:

    {"event": "collective", "group", "tag", "kind", "bytes", "coverage", "passed", "messages", "payload_bytes",
     "holes", "links": [[sender, receiver], ...], "broken": [links that lost messages], "time"}
    {"event": "summary", ...}: what `flowcheck.observation` shows; see `reconstruct.observe.observer.Observer.report`

bytes: size of the tensor (all-reduce, broadcast), null if unknown; coverage: the part of it whose final values were
captured, at least, null where bytes is; passed: the group went on far beyond it, else the capture or its connections
ended with it and it may be cut short; holes: payload bytes never captured; time: capture time of its last message, ns.
With `--listen`, `flowcheck status ENDPOINT --json` has the summary under `observe`.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, NoReturn

from flowcheck import __version__, kernels
from flowcheck.capture import DRAIN_SECONDS, EXPIRE_EVERY, QUIET_SECONDS, RING_DELAY, Reached
from flowcheck.config import DaemonConfig
from flowcheck.daemon import account_of, declared_vantages, log, open_journal, open_recorder, open_server, open_sources
from flowcheck.description import JobDescription
from flowcheck.errors import NothingRestorable, UsageError
from flowcheck.observation import line, table
from flowcheck.privileges import drop
from mirror.block import Source
from mirror.faulty import injected
from reconstruct.decoder import KIND_NAMES
from reconstruct.observe.observer import Finished, Observer

_LINE_SECONDS = 5.0
_STATUS_SECONDS = 0.5


def observe(config: DaemonConfig) -> int:
    """Watch until the recording ends or a signal comes; the exit status. Raises UsageError for options of a job."""
    if config.store is not None or config.every_steps is not None or config.every_seconds is not None:
        raise UsageError("--observe keeps no snapshots: leave out --store, --every-steps and --every-seconds")
    return _Watch(config).run()


class _Status:
    """The control server's service here: it answers `status` and nothing else. `latest` is replaced, never changed."""

    def __init__(self, latest: dict[str, Any]) -> None:
        self.latest = latest

    def status(self) -> dict[str, Any]:
        return self.latest

    def begin_attach(self, description: JobDescription, late: bool = False) -> NoReturn:
        raise UsageError("this daemon only observes: attach to one that was started without --observe")

    def marker(self, run: str, epoch: int, marker: dict[str, Any]) -> None:
        """No job is followed here."""

    def layout(self, run: str, epoch: int, layout: dict[str, Any]) -> None:
        """No job is followed here."""

    def detach(self, run: str, epoch: int, step: int) -> None:
        """No job is followed here."""

    def link(self, run: str, epoch: int, alive: bool) -> None:
        """No job is followed here."""

    def agent(self, peer: bytes, run: str, epoch: int | None, rank: int, step: int) -> None:
        """No job is followed here."""

    def agent_gone(self, peer: bytes) -> None:
        """No job is followed here."""

    def repair_data(self, *data: Any) -> None:
        """Nothing was asked for."""

    def repair_refused(self, peer: bytes, run: str, epoch: int, ask: int, reason: str) -> None:
        """Nothing was asked for."""

    def compare_data(self, *data: Any) -> None:
        """Nothing was asked for."""

    def compare(self, run: str | None, number: int | None) -> NoReturn:
        raise UsageError("this daemon only observes and has no state to compare: start one without --observe")

    def open(self, run: str | None, step: int | None, allow_unknown: bool) -> NoReturn:
        raise NothingRestorable("this daemon only observes and holds no step: start one without --observe")


class _Watch:
    """One observation: everything but the control server runs on the calling thread."""

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._account = account_of(config)
        self._live = bool(config.interfaces)
        self._stop = threading.Event()
        vantages = declared_vantages(config)
        self._observer = Observer(vantage=vantages.table)
        kernels.announce(log)
        self._observer.warm_up()
        self._sources = open_sources(config, vantages)
        self._recorder = open_recorder(config, self._account)
        self._journal = open_journal(config, self._account)
        self._service = _Status(self._status(self._report()))
        self._reached = Reached(self._sources, self._live)
        self._now = 0
        self._expired = 0
        self._shown = self._published = time.monotonic()

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        config = self._config
        server = open_server(config, self._service, config.listen, self._account) if config.listen else None
        drop(self._account)
        try:
            if server is not None:
                server.start()
                for endpoint in server.endpoints:
                    print(f"listening {endpoint}", flush=True)
            self._watch()
            self._finish()
            if server is not None and not self._live:
                self._stop.wait()
        finally:
            if server is not None:
                server.close()
            for source in self._sources:
                source.close()
        return 0

    def _watch(self) -> None:
        while not self._stop.is_set():
            if not self._round() and not self._live and all(source.finished for source in self._sources):
                return
            self._tell()
        if self._live:  # what the ring still holds
            deadline = time.monotonic() + DRAIN_SECONDS
            quiet = time.monotonic() + QUIET_SECONDS
            while time.monotonic() < min(deadline, quiet):
                if self._round():
                    quiet = time.monotonic() + QUIET_SECONDS

    def _round(self) -> bool:
        """Read each source once; whether any had a block."""
        found = False
        for number, source in enumerate(self._sources):
            asked = time.time_ns()
            block = source.read(0 if found else 0.05 / len(self._sources))
            self._reached.read(number, block, asked)
            if block is None:
                continue
            found = True
            try:
                if len(block.ts):
                    self._now = max(self._now, int(block.ts[-1]))
                if self._recorder is not None:
                    self._recorder.write(block)
                self._observer.feed(block, min(self._now, self._reached.now))
            finally:
                source.release(block)
        if not found and self._live:
            self._now = max(self._now, time.time_ns() - RING_DELAY)
            if self._now - self._expired > EXPIRE_EVERY:
                self._expired = self._now
                self._observer.expire(min(self._now, self._reached.now))
        for finished in self._observer.take_finished():
            self._write(finished)
        return found

    def _tell(self) -> None:
        at = time.monotonic()
        publish = self._config.listen and at - self._published > _STATUS_SECONDS
        show = self._live and at - self._shown > _LINE_SECONDS
        if not publish and not show:
            return
        report = self._report()
        self._service.latest, self._published = self._status(report), at
        if show:
            log(line(report))
            self._shown = at

    def _finish(self) -> None:
        self._observer.flush(self._now)
        for finished in self._observer.take_finished():
            self._write(finished)
        report = self._report()
        self._service.latest = self._status(report)
        if self._recorder is not None:
            self._recorder.close()
        if self._journal is not None:
            self._journal.say(event="summary", **report)
            self._journal.close()
        print(table(report), flush=True)

    def _write(self, finished: Finished) -> None:
        if self._journal is None:
            return
        collective, measured = finished.collective, finished.measured
        self._journal.say(
            event="collective",
            group=finished.group,
            tag=collective.tag,
            kind=KIND_NAMES[collective.kind],
            bytes=measured.size,
            coverage=measured.shown / measured.size if measured.size else None,
            passed=finished.passed,
            messages=collective.messages,
            payload_bytes=collective.payload,
            holes=collective.missing,
            links=sorted(collective.parts),
            broken=collective.broken,
            time=collective.time,
        )

    def _report(self) -> dict[str, Any]:
        sources = [_source(source) for source in self._sources]
        sums = {name: sum(source[name] for source in sources) for name in ("packets", "bytes", "drops")}
        return {**self._observer.report(), **sums, "sources": sources}

    def _status(self, report: dict[str, Any]) -> dict[str, Any]:
        """What `flowcheck status` shows of a daemon without a job, and the report."""
        return {
            "version": __version__, "run": None, "epoch": None, "step": None, "confirmed": None, "exact": None,
            "reasons": [], "job_step": None, "frozen": None, "unseen": None, "lag_ms": None, "copies": 0,
            "memory_bytes": 0,
            "coverage": min((group["coverage"] for group in report["groups"] if group["live"]), default=0.0),
            "holes": report["loss"]["hole_bytes"], "packets": report["packets"], "bytes": report["bytes"],
            "drops": report["drops"], "sources": report["sources"], "jobs": [], "failure": None, "observe": report,
        }  # fmt: skip


def _source(source: Source) -> dict[str, Any]:
    counters = source.counters()
    return {
        "name": source.name,
        "packets": counters.packets,
        "bytes": counters.bytes,
        "drops": counters.drops,
        "interface_drops": counters.interface_drops,
        "problems": list(source.problems)[-8:],
        "faults": injected(source),
    }
