"""The capture thread: reads blocks from the sources, drives the pipeline, hands finished steps to the apply thread.

Everything that touches the pipeline happens on this thread; others hand in closures that run between two blocks.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence

from flowcheck.pipeline import Pipeline
from mirror.block import Source
from mirror.record import PcapRecorder
from reconstruct.steps import TrackerEvent

# Frames reach a reader when the kernel retires their ring block, so an idle ring proves nothing newer than this.
RING_DELAY = 50_000_000
# Steps claimed but not yet applied: beyond this the ring has to hold the traffic.
MAX_PENDING = 3
DRAIN_SECONDS = 10.0
QUIET_SECONDS = 0.3
EXPIRE_EVERY = 10_000_000


class CaptureThread(threading.Thread):
    """Runs the pipeline over `sources` until they end or `stop` is called, then drains what is left.

    deliver: called on this thread with every (job key, event); live: whether an idle source means that time goes on
    (a capture) or that nothing more comes (files).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sources: Sequence[Source],
        deliver: Callable[[str, TrackerEvent], None],
        *,
        live: bool,
        recorder: PcapRecorder | None = None,
    ) -> None:
        super().__init__(name="capture", daemon=True)
        self.pipeline = pipeline
        self.sources = list(sources)
        self.failure: BaseException | None = None
        self.now = 0  # capture time: everything up to here was processed, ns
        self._deliver = deliver
        self._live = live
        self._recorder = recorder
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._expired = 0
        self._timed: list[tuple[int, int, Callable[[], None]]] = []  # filled before the start only
        self._order = itertools.count()

    def call(self, command: Callable[[], None], at: int | None = None) -> None:
        """Run `command` on the capture thread before the next block; at: not before this capture time (ns).

        Before the thread is started there is nobody to disturb: the command runs at once.
        """
        if at is not None:
            heapq.heappush(self._timed, (at, next(self._order), command))
        elif self.ident is None:
            command()
        else:
            self._commands.put(command)

    def stop(self) -> None:
        """Process what the sources still hold, then end."""
        self._stopping.set()

    def run(self) -> None:
        try:
            self._capture()
            if self._stopping.is_set() and self._live:
                self._drain()
            self._finish()
        except BaseException as error:
            self.failure = error

    def _capture(self) -> None:
        while not self._stopping.is_set():
            self._run_commands()
            if self._full():
                time.sleep(0.001)
                continue
            if not self._round(0.01):
                if not self._live and all(source.finished for source in self.sources):
                    return
                if self._live:
                    self._idle()

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        quiet = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < min(deadline, quiet):
            self._run_commands()
            if self._full():
                time.sleep(0.001)
            elif self._round(0.01):
                quiet = time.monotonic() + QUIET_SECONDS

    def _full(self) -> bool:
        return any(tracker.pending >= MAX_PENDING for tracker in self.pipeline.trackers.values())

    def _round(self, timeout: float) -> bool:
        """Read each source once; whether any had a block."""
        found = False
        for source in self.sources:
            block = source.read(0 if found else timeout / len(self.sources))
            if block is None:
                continue
            found = True
            try:
                if len(block.ts):
                    self.now = max(self.now, int(block.ts[-1]))
                if self._recorder is not None:
                    self._recorder.write(block)
                self.pipeline.feed(block, self.now)
            finally:
                source.release(block)
            self._poll()
        return found

    def _idle(self) -> None:
        self.now = max(self.now, time.time_ns() - RING_DELAY)
        if self.now - self._expired > EXPIRE_EVERY:
            self._expired = self.now
            self.pipeline.expire(self.now)
            self._poll()

    def _finish(self) -> None:
        if self._timed:
            self.now = max(self.now, max(at for at, _, _ in self._timed))
        self._run_commands()
        self.pipeline.flush(self.now)
        while True:
            self._poll(final=True)
            if not any(tracker.pending for tracker in self.pipeline.trackers.values()):
                return
            self._run_commands()
            time.sleep(0.001)

    def _poll(self, final: bool = False) -> None:
        for key, event in self.pipeline.poll(self.now, final):
            self._deliver(key, event)

    def _run_commands(self) -> None:
        while self._timed and self._timed[0][0] <= self.now:
            heapq.heappop(self._timed)[2]()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()
