"""What the trainers' agents say, on its way to the jobs: hellos, pieces of state, checksums; and the late join.

Methods are called on the server's loop and return quickly; what changes a job's state is handed to the apply thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flowcheck.comparing import FIRST_COMPARISON
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.resync import Tell

if TYPE_CHECKING:
    from flowcheck.applying import ApplyThread
    from flowcheck.job import Job

__all__ = ["Repairing", "tick"]

JOIN_EVERY_S = 5.0
"""How often the trainers of a job that is not followed here are asked to describe it."""
MAX_JOINS = 1024


def tick(job: Job) -> None:
    """Time has passed: ask for what is overdue. On the apply thread."""
    needs_groups = job.tracker is not None and job.tracker.needs_groups
    job.resync.tick(time.monotonic_ns(), int(job.pace.usual * 1e9), needs_groups)


class Repairing:
    """The agents' side of the daemon's service; `Jobs` is the rest of it.

    jobs: by key; apply: the apply thread; tell: sends a message to an agent, set once there is a server.
    """

    def __init__(self, jobs: Mapping[str, Job], apply: ApplyThread, ended: Callable[[], bool]) -> None:
        self.tell: Tell = _nobody
        self._held = jobs
        self._apply = apply
        self._ended = ended
        self._joins: dict[str, float] = {}
        self._numbers = itertools.count(2 * FIRST_COMPARISON)

    def agent(self, peer: bytes, run: str, epoch: int | None, rank: int, step: int) -> None:
        """An agent lives. epoch None: this daemon does not follow its job."""
        job = self._held.get(f"{run}/e{epoch}")
        if job is not None:
            job.job_step = max(job.job_step, step)
            job.resync.agents.hello(peer, rank, step)
        elif rank == 0:
            self._join(peer, run)

    def _join(self, peer: bytes, run: str) -> None:
        """Ask for a description of a job, unless one of the same name is followed and its trainers live."""
        now = time.monotonic()
        if self._ended() or any(
            job.run == run and not job.ended and len(job.resync.agents) for job in list(self._held.values())
        ):
            return
        if now - self._joins.get(run, -JOIN_EVERY_S) < JOIN_EVERY_S:
            return
        self._joins.pop(run, None)
        self._joins[run] = now
        while len(self._joins) > MAX_JOINS:
            del self._joins[next(iter(self._joins))]
        self.tell(peer, "join-ask", run=run)

    def agent_gone(self, peer: bytes) -> None:
        """An agent's connection has ended, or it fell silent."""
        for job in list(self._held.values()):
            owed = job.resync.agents.gone(peer)
            if owed:
                self._apply.call(job, partial(job.resync.gone, owed, time.monotonic_ns()))

    def repair_data(
        self,
        peer: bytes,
        run: str,
        epoch: int,
        ask: int,
        key: str,
        lo: int,
        hi: int,
        step: int,
        sections: Mapping[str, memoryview],
        counter: bytes | None,
    ) -> None:
        """A part of the state, as of the end of `step`. One that was not asked of this peer is dropped."""
        job = self._held.get(f"{run}/e{epoch}")
        if job is not None and job.resync.takes(peer, ask, key, lo, hi, sum(map(len, sections.values()))):
            data = {"model" if name == "buffer" else name: view for name, view in sections.items()}
            self._apply.call(job, lambda: job.resync.arrived(ask, step, data, counter, time.monotonic_ns()))

    def repair_refused(self, peer: bytes, run: str, epoch: int, ask: int, reason: str) -> None:
        """A part, or the checksums of a comparison, will not come."""
        job = self._held.get(f"{run}/e{epoch}")
        if job is None:
            return
        if job.resync.agents.answered(peer, ask) is not None:
            self._apply.call(job, lambda: job.resync.refused(peer, ask, reason, time.monotonic_ns()))
        elif ask >= FIRST_COMPARISON:
            self._apply.call(job, lambda: job.resync.comparing.refused(ask, reason))

    def compare_data(
        self, peer: bytes, run: str, epoch: int, ask: int, step: int, checksums: Mapping[str, str | None]
    ) -> None:
        """A trainer's checksums as of the end of `step`."""
        job = self._held.get(f"{run}/e{epoch}")
        if job is not None:
            now = time.monotonic_ns()
            self._apply.call(job, lambda: job.resync.comparing.answered(ask, step, checksums, now))

    def compare(self, run: str | None, number: int | None) -> dict[str, Any]:
        """Start a comparison (number None) or ask for its report: {"number", "report": None while it is under way}.

        Raises UsageError where it is not clear which run is meant, FlowcheckError if none is followed here.
        """
        jobs = [job for job in list(self._held.values()) if not job.ended and run in (None, job.run)]
        if len(jobs) > 1:
            raise UsageError(f"several runs are followed here, name one: {', '.join(sorted(j.run for j in jobs))}")
        if not jobs:
            raise FlowcheckError("no such job is followed here: only one that trains can be compared with its trainers")
        job = jobs[0]
        if number is None:
            number = next(self._numbers)
            self._apply.call(job, partial(job.resync.comparing.start, number, time.monotonic_ns()))
        report = job.resync.comparing.report(number)
        if report is None and job.over:
            raise FlowcheckError(f"{job.key} is not followed any more: {job.suspect or job.frozen}")
        return {"number": number, "report": report}


def _nobody(peer: bytes, kind: str, /, **fields: Any) -> None:
    """There is no server: a recording is read."""
