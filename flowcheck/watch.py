"""Says that no rank of a job sits behind a mirrored port: in the reply to its attach, where that is certain by then,
and again once a step is done (`flowcheck.sight`). Never because frames are late or the daemon has just begun to look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from flowcheck.capture import CaptureThread
from flowcheck.job import Job
from flowcheck.sight import Sight

__all__ = ["Watch"]

DELAY = 300_000_000
"""How late frames may come, ns: mirrors and tunnels lag, and ring blocks fill."""
WAIT_S = 2.0
"""Most that an attach waits for a look, where the capture is behind."""
EVERY = 1_000_000_000
"""How long after a marker (ns) frames of its job must have been seen, and how often that is looked at."""


class Watch:
    """interfaces: the names of the sources; log: called with a line for a person; notice: with a job and a line for its
    trainers."""

    def __init__(
        self,
        capture: CaptureThread,
        interfaces: Sequence[str],
        log: Callable[[str], None],
        notice: Callable[[Job, str], None],
    ) -> None:
        self._capture = capture
        self._interfaces = interfaces
        self._log = log
        self._notice = notice

    def attached(self, job: Job) -> dict[str, Any] | None:
        """For rank 0, where nothing was seen of a job whose ranks have met: {"text", "watched"}, what to do and for how
        long this daemon has watched (s). Whether they met since then only the trainers know. Waits only then."""
        sight = job.sight
        if sight is None or job.description.group.sequence == 0 or self._capture.watched is None:
            return None
        if self._shown(sight, None) or self._shown(sight, time.time_ns() + DELAY):
            return None
        watched = self._capture.watched
        return None if watched is None else {"text": sight.text(self._interfaces), "watched": watched}

    def _shown(self, sight: Sight, at: int | None) -> bool:
        """Whether something was seen, or may have been: as of a capture time, or now."""
        found: list[bool] = []
        looked = threading.Event()

        def look() -> None:
            found.append(sight.ever() or not sight.whole)
            looked.set()

        self._capture.call(look, at)
        return not looked.wait(WAIT_S) or found[0]

    def marked(self, job: Job, arrived: int) -> None:
        """A marker of a job came at that time, ns."""
        sight = job.sight
        if sight is not None and not sight.seen and job.looks < arrived:
            job.looks = arrived + EVERY
            self._capture.call(lambda: self._look(job, sight), job.looks)

    def _look(self, job: Job, sight: Sight) -> None:
        """On the capture thread: by now frames of the step that was marked must have been seen."""
        seen, before = sight.look(), job.unseen
        job.unseen = None if seen else sight.text(self._interfaces)
        if seen and before is not None:
            self._log(f"{job.key}: frames of its ranks come in now")
        elif job.unseen is not None and before is None:
            self._log(f"{job.key}: {job.unseen}")
            self._notice(job, job.unseen)
