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

from flowcheck.errors import FlowcheckError
from flowcheck.loss import LossReport
from flowcheck.pipeline import Pipeline
from mirror.block import Block, Source
from mirror.record import PcapRecorder
from reconstruct.steps import TrackerEvent

# Frames reach a reader when the kernel retires their ring block, so an idle ring proves nothing newer than this.
RING_DELAY = 50_000_000
DRAIN_SECONDS = 10.0
QUIET_SECONDS = 0.3
EXPIRE_EVERY = 10_000_000
PROBLEMS_EVERY = 1.0
FOREVER = 1 << 62

Command = Callable[[], None]


class Reached:
    """Up to when every one of several sources was read, in capture time (ns): `now`.

    What one mirror lost another one may still hold in its ring, so gaps must not age by the clock of the one that was
    read last: a reader that is late gets some hundred ms of one source in a block before it comes to the next.
    """

    def __init__(self, sources: Sequence[Source], live: bool) -> None:
        self._sources = sources
        self._live = live
        self._times = [0] * len(sources)

    @property
    def now(self) -> int:
        return min(self._times)

    def read(self, number: int, block: Block | None, asked: int) -> None:
        """Source `number` was asked at `asked` (the clock of its frames) and gave `block`."""
        if block is not None:
            if len(block.ts):
                self._times[number] = max(self._times[number], int(block.ts[-1]))
        elif self._live:
            self._times[number] = max(self._times[number], asked - RING_DELAY)
        elif self._sources[number].finished:
            self._times[number] = FOREVER


class CaptureThread(threading.Thread):
    """Runs the pipeline over `sources` until they end or `stop` is called, then drains what is left.

    deliver: called on this thread with every (job key, event); live: whether an idle source means that time goes on
    (a capture) or that nothing more comes (files); report: called with one line for a person.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sources: Sequence[Source],
        deliver: Callable[[str, TrackerEvent], None],
        *,
        live: bool,
        report: Callable[[str], None],
        recorder: PcapRecorder | None = None,
    ) -> None:
        super().__init__(name="capture", daemon=True)
        self.pipeline = pipeline
        self.sources = list(sources)
        self.failure: BaseException | None = None
        self.over = False  # nothing will be captured any more
        self.now = 0  # capture time: everything up to here was processed, ns
        self.loss = LossReport(pipeline.losses, live=live)
        self.loss.update({}, pipeline.counters(), 0)
        self._deliver = deliver
        self._live = live
        self._report = report
        self._recorder = recorder
        self._commands: queue.SimpleQueue[tuple[int | None, Command]] = queue.SimpleQueue()
        self._reached = Reached(self.sources, live)
        self._timed: list[tuple[int, int, Command]] = []
        self._order = itertools.count()
        self._stopping = threading.Event()
        self._stop_at = 0
        self._expired = 0
        self._told: list[list[str]] = [[] for _ in self.sources]
        self._asked = 0.0
        self._since = time.monotonic()

    @property
    def watched(self) -> float | None:
        """For how long everything that came in was captured, in seconds; None for files, or once frames were lost."""
        if not self._live or any(source.counters().drops for source in self.sources):
            return None
        return time.monotonic() - self._since

    def call(self, command: Command, at: int | None = None) -> bool:
        """Run `command` on the capture thread before the next block; at: not before this capture time (ns).

        False if the capture is over and nothing will run any more. Before the thread is started there is nobody to
        disturb: a command without a time runs at once.
        """
        if self.over:
            return False
        if self.ident is None and at is None:
            command()
        else:
            self._commands.put((at, command))
        return True

    def stop(self) -> None:
        """Process what the sources hold by now, then end."""
        if not self._stop_at:
            self._stop_at = time.time_ns()
        self._stopping.set()

    def remove_job(self, key: str) -> None:
        """On this thread: hand out what is known of a job and forget it."""
        self._poll()
        self.pipeline.remove_job(key)

    def run(self) -> None:
        try:
            self._capture()
            if self._stopping.is_set() and self._live:
                self._drain()
            self._finish()
        except BaseException as error:
            self.failure = error
        finally:
            self.over = True

    def _capture(self) -> None:
        while not self._stopping.is_set():
            self._run_commands()
            self._tell_problems()
            if self.pipeline.full:
                time.sleep(0.001)
                continue
            asked = time.time_ns()
            if not self._round(0.01):
                if not self._live and all(source.finished for source in self.sources):
                    return
                if self._live:
                    self._idle(asked)

    def _drain(self) -> None:
        """Everything that was in the ring when the stop came; a job that trains on does not hold it up."""
        start = time.monotonic()
        deadline, least = start + DRAIN_SECONDS, start + QUIET_SECONDS  # markers may still be on their way
        while time.monotonic() < (deadline if self.now < self._stop_at + RING_DELAY else least):
            self._run_commands()
            if self.pipeline.full:
                time.sleep(0.001)
                continue
            asked = time.time_ns()
            if not self._round(0.01):
                self._idle(asked)

    def _round(self, timeout: float) -> bool:
        """Read each source once; whether any had a block."""
        found = False
        for number, source in enumerate(self.sources):
            asked = time.time_ns()
            block = source.read(0 if found else timeout / len(self.sources))
            self._reached.read(number, block, asked)
            if block is None:
                continue
            found = True
            try:
                if len(block.ts):
                    self.now = max(self.now, int(block.ts[-1]))
                self._record(block)
                self.pipeline.feed(block, min(self.now, self._reached.now), source.name)
            finally:
                source.release(block)
            self._poll()
        return found

    def _record(self, block: Block) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.write(block)
        except FlowcheckError as error:  # following the job matters more than its recording
            self._recorder = None
            self._report(f"the recording ends here: {error}")

    def _idle(self, asked: int) -> None:
        """No source had a block when it was asked: what was captured well before that has been processed."""
        self.now = max(self.now, asked - RING_DELAY)
        if self.now - self._expired > EXPIRE_EVERY:
            self._expired = self.now
            self.pipeline.expire(min(self.now, self._reached.now))
            self._poll()

    def _finish(self) -> None:
        self._run_commands()
        if self._timed:  # what was to happen after the last frame
            self.now = max(self.now, max(at for at, _, _ in self._timed))
            self._run_commands()
        self.pipeline.flush(self.now)
        while True:
            self._poll(final=True)
            if not any(tracker.pending for tracker in self.pipeline.trackers.values()):
                break
            self._run_commands()
            time.sleep(0.001)
        self._asked = 0.0
        self._tell_problems()

    def _poll(self, final: bool = False) -> None:
        for key, event in self.pipeline.poll(self.now, final):
            self._deliver(key, event)

    def _run_commands(self) -> None:
        ran = False
        while True:
            try:
                at, command = self._commands.get_nowait()
            except queue.Empty:
                break
            if at is None:
                command()
                ran = True
            else:
                heapq.heappush(self._timed, (at, next(self._order), command))
        while self._timed and self._timed[0][0] <= self.now:
            heapq.heappop(self._timed)[2]()
            ran = True
        if ran:
            self._poll()  # a marker may complete a step whose traffic is long there

    def _tell_problems(self) -> None:
        """What went wrong with the sources since it was last asked."""
        if time.monotonic() - self._asked < PROBLEMS_EVERY:
            return
        self._asked = time.monotonic()
        for number, source in enumerate(self.sources):
            problems = list(source.problems)
            for line in fresh(self._told[number], problems):
                self._report(line)
            self._told[number] = problems
        counted = {source.name: source.counters() for source in self.sources}
        for line in self.loss.update(counted, self.pipeline.counters(), self.now):
            self._report(line)


def fresh(old: Sequence[str], new: Sequence[str]) -> Sequence[str]:
    """The lines of `new` that were appended since `old`; both are the newest lines of one growing list."""
    for dropped in range(len(old) + 1):
        kept = len(old) - dropped
        if list(new[:kept]) == list(old[dropped:]):
            return new[kept:]
    return new
