"""What the daemon asked of this rank: taken by the agents' threads, served by the training thread between two steps.

The optimizer's hooks look at `pending`, one attribute, and call `serve` when it is true at the end of a step, `give`
before the optimizer begins the next: parameters and their state are the same, and what was asked for meanwhile need not
wait another step. Buffers change with every forward pass and are given at the end of a step only. Copies are made while
the share of the trainer's time that the ask allows lasts; what a copy took beyond it is paid back by later steps. The
time of a step is measured by the agents' threads, from how many steps are done between two looks.

Between that thread and the others there are only deques and single attributes, never a lock: training must not wait
for a thread that holds one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flowcheck.livestate import LiveState, Unreadable

log = logging.getLogger(__name__)

MOST_PARTS = 1024
"""Parts that wait here, of all agents."""
MOST_CALLS = 16
MOST_UNSENT = 32 << 20
"""Bytes copied and not sent yet: beyond them nothing more is copied for that agent."""
REST = 20
"""Checksums of everything are refused until so many times their time has passed: at most 5 % of the training's."""
LOOKS = 5
"""Measured step times of which the shortest counts: a pause of the training is no step."""
SHORTEST_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the state as of the end of `step`: bytes of all sections, and what names them."""

    ask: Ask
    step: int
    sections: list[tuple[str, int]]
    data: torch.Tensor
    counter: torch.Tensor | None
    copied: Any = None  # the CUDA event after which `data` is whole


class Taker(Protocol):
    """Where answers go: called on the training thread, must not wait."""

    @property
    def unsent(self) -> int:
        """Bytes delivered and not sent yet."""

    def deliver(self, piece: Piece) -> None: ...

    def decline(self, epoch: int, ask: int, reason: str) -> None: ...

    def checksums(self, epoch: int, ask: int, step: int, found: dict[str, str | None]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Elements [lo, hi) of `key` for `taker`; the daemon's epoch and number go back with the answer."""

    taker: Taker
    epoch: int
    number: int
    key: str
    lo: int
    hi: int
    percent: float
    step_bytes: int


class Desk:
    """One per rank, whatever the number of daemons. `pending`: whether `serve` has something to do."""

    def __init__(self, state: LiveState) -> None:
        self.pending = False
        self.failed = 0  # asks that could not be served, with a reason
        self._state = state
        self._parts: deque[Ask] = deque()
        self._calls: deque[Callable[[Any], None]] = deque()
        self._compares: deque[tuple[Taker, int, int]] = deque()
        self._pace = _Pace()
        self._credit = 0.0  # seconds that may be spent, or that are owed
        self._served = -1  # the step at which the credit was reckoned last
        self._copied = 0  # bytes given since then
        self._rested = 0.0

    # The agents' threads

    def refusal(self, key: str, lo: int, hi: int) -> str | None:
        """Why a part will never be given here."""
        return self._state.refusal(key, lo, hi)

    def ask(self, ask: Ask) -> bool:
        """Queue a part; False if too many wait."""
        if len(self._parts) >= MOST_PARTS:
            return False
        self._parts.append(ask)
        self.pending = True
        return True

    def cancel(self, taker: Taker, numbers: set[int] | None = None) -> None:
        """Forget parts of a taker, those of `numbers` or all."""
        for ask in list(self._parts):
            if ask.taker is taker and (numbers is None or ask.number in numbers):
                try:
                    self._parts.remove(ask)
                except ValueError:  # it is being served
                    continue

    def compare(self, taker: Taker, epoch: int, ask: int) -> None:
        """Have checksums of everything taken after the next step; an earlier request of the same taker that still waits
        is replaced."""
        for waiting in list(self._compares):
            if waiting[0] is taker:
                try:
                    self._compares.remove(waiting)
                except ValueError:
                    continue
        self._compares.append((taker, epoch, ask))
        self.pending = True

    def later(self, call: Callable[[Any], None]) -> bool:
        """Have `call(optimizer)` run on the training thread after the next step; False if too many wait."""
        if len(self._calls) >= MOST_CALLS:
            return False
        self._calls.append(call)
        self.pending = True
        return True

    def look(self, step: int, now: float) -> bool:
        """`step` steps are done at `now`, in seconds: measures their time. Whether it is known."""
        self._pace.look(step, now)
        return self._pace.seconds is not None

    # The training thread

    def serve(self, optimizer: Any, step: int) -> None:
        """Step `step` is done: give what waits, within its budget. Never raises."""
        try:
            for _ in range(len(self._calls)):  # one that is added meanwhile is for the next step
                self._calls.popleft()(optimizer)
            if self._compares:
                self._take_checksums(optimizer, step)
            if self._parts:
                self._copy(optimizer, step)
        except Exception:  # whatever it is, it must not end the training
            self._fail()
        self.pending = False
        if self._calls or self._compares or self._parts:  # also one that came just before that line
            self.pending = True

    def give(self, optimizer: Any, step: int) -> None:
        """The step after `step` is about to change parameters and state: give what waits of them. Never raises."""
        try:
            if self._parts:
                self._copy(optimizer, step, buffers=False)
        except Exception:
            self._fail()

    def give_all(self, optimizer: Any, step: int) -> None:
        """Training has ended with `step`: give all parts that wait, whatever time that takes. Never raises."""
        try:
            while (ask := self._next()) is not None:
                if ask.taker.unsent > MOST_UNSENT:
                    self._parts.appendleft(ask)
                    break
                self._copied = 0
                self._answer(optimizer, ask, step)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        log.exception("what the daemon asked for could not be served")
        self.failed += 1

    def _copy(self, optimizer: Any, step: int, *, buffers: bool = True) -> None:
        seconds = self._pace.seconds
        if seconds is None:
            return  # without a measured step there is no budget
        kept: list[Ask] = []
        ask = self._next()
        while ask is not None:
            if step > self._served:
                share = seconds * ask.percent / 100
                self._credit = min(share, self._credit + share * (step - self._served))
                self._served, self._copied = step, 0
            if not buffers and ask.key.startswith("buffer/"):
                kept.append(ask)
                ask = self._next()
                continue
            if self._credit <= 0 or ask.taker.unsent > MOST_UNSENT:
                break
            started = time.perf_counter()
            nbytes = self._answer(optimizer, ask, step)
            self._credit -= time.perf_counter() - started
            if nbytes < 0:
                break
            self._copied += max(1, nbytes)
            ask = self._next()
        if ask is not None:
            kept.append(ask)
        self._parts.extendleft(reversed(kept))

    def _next(self) -> Ask | None:
        try:
            return self._parts.popleft()
        except IndexError:
            return None

    def _answer(self, optimizer: Any, ask: Ask, step: int) -> int:
        """Bytes copied for a part, -1 if it has to wait as its share of this step's bytes is used."""
        try:
            slices = self._state.slices(optimizer, ask.key, ask.lo, ask.hi)
            if self._copied and self._copied + slices.nbytes > ask.step_bytes:
                return -1
            data, counter = slices.copy()
            copied = None
            if data.device.type == "cuda":
                copied = torch.cuda.Event()
                copied.record(torch.cuda.current_stream(data.device))
        except Exception as error:
            self.failed += 1
            reason = str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
            ask.taker.decline(ask.epoch, ask.number, reason)
            return 0
        sections = [(name, view.numel()) for name, view in slices.sections]
        ask.taker.deliver(Piece(ask, step, sections, data, counter, copied))
        return slices.nbytes

    def _take_checksums(self, optimizer: Any, step: int) -> None:
        try:
            taker, epoch, ask = self._compares.popleft()
        except IndexError:
            return
        started = time.perf_counter()
        if started < self._rested:
            rest = f"{self._rested - started:.0f} s"
            taker.decline(epoch, ask, f"checksums were taken a moment ago and hold training up: ask again in {rest}")
            return
        try:
            taker.checksums(epoch, ask, step, self._state.checksums(optimizer))
        except Exception as error:
            self.failed += 1
            taker.decline(epoch, ask, f"no checksums: {error}")
        ended = time.perf_counter()
        self._rested = ended + REST * (ended - started)


class _Pace:
    """The time of a step: the shortest of the last few measured, so that a pause in the training does not count."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._measured: deque[float] = deque(maxlen=LOOKS)
        self._step = -1
        self._since: float | None = None  # none before the first step that is seen: what came before it is set-up
        self._lock = threading.Lock()  # between the agents' threads

    def look(self, step: int, now: float) -> None:
        with self._lock:
            if step <= self._step or (self._since is not None and now - self._since < SHORTEST_LOOK_S):
                return
            if self._since is not None:
                self._measured.append((now - self._since) / (step - self._step))
                self.seconds = min(self._measured)
            self._since = now if self._step >= 0 else None
            self._step = step
