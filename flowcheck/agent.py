"""The trainer's agent: a thread in every rank that tells one daemon that the rank lives, and answers what it asks.

It only carries: what may be asked is checked here, the bytes are copied by the training thread at the end of a step
(`flowcheck.desk`), and this thread makes messages of them. The daemon may be gone, slow or hostile: nothing is waited
for, every queue has a limit, what does not fit is counted and dropped. ZeroMQ connects again for ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flowcheck.connection import Connection
from flowcheck.describe import memory_view
from flowcheck.desk import Ask, Desk, Piece
from flowcheck.errors import FlowcheckError, NoPermission
from flowcheck.keys import KEY
from flowcheck.latejoin import LateJoin
from flowcheck.protocol import CHUNK, MAX_COMPARE, WINDOW, encode
from flowcheck.sessions import digest

log = logging.getLogger(__name__)

ASKS = ("repair-ask", "repair-cancel", "repair-done", "groups-ask", "compare-ask", "join-ask", "notice")
HELLO_S = 1.0
FIRST_LOOK_S = 0.1
"""How often the steps are looked at until their time is known."""
MOST_ANSWERS = 2048
"""Answers that wait to be sent; beyond them refusals are dropped."""
STUCK_S = 10.0
"""After so long without room for a message, everything that waits is dropped: the daemon asks others."""
MESSAGES = 64
"""Taken at a time, so that answers and hellos get their turn."""


@dataclass(frozen=True, slots=True)
class _Message:
    """nbytes: of the state in it, which count as unsent until it has left."""

    frame: bytes
    data: Any = None
    nbytes: int = 0


@dataclass(slots=True)
class AgentCounters:
    """asked: parts; sent: answers; sent_bytes: of the state; refused: parts, on sight; absurd: messages not for this
    job or not understood; dropped: answers that could not be sent."""

    asked: int = 0
    sent: int = 0
    sent_bytes: int = 0
    refused: int = 0
    absurd: int = 0
    dropped: int = 0


def _nothing() -> None:
    """What is woken when there is no agent."""


class Agent:
    """The agent of `rank` (of the process group) for the daemon at `endpoint`. Implements `flowcheck.desk.Taker`.

    job: the token that all ranks agreed on at attach; steps: optimizer steps done; late: this daemon's markers and its
    joins, in rank 0.
    """

    def __init__(
        self,
        endpoint: str,
        run: str,
        job: str,
        rank: int,
        desk: Desk,
        steps: Callable[[], int],
        late: LateJoin | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.counters = AgentCounters()
        self.done = -1
        """The last step, once the daemon has said that it asks nothing more of its state."""
        self.turns = 0
        """How often the thread has looked whether the daemon is there ..."""
        self.reachable = False
        """... and whether it was."""
        self._run_name, self._job, self._rank = run, job, rank
        self._desk = desk
        self._steps = steps
        self._late = late
        self._answers: deque[tuple[Callable[[], list[_Message]], int]] = deque()  # made into messages by this thread
        self._messages: deque[_Message] = deque()
        self._delivered = 0  # bytes of pieces, written by the training thread alone
        self._left = 0  # of these sent or dropped, written by this thread alone
        self._stopped = False
        self._told = False  # that the daemon refuses what this rank says
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next_hello = 0.0
        self._stuck_since: float | None = None
        self._stream: Any = None  # for copies from CUDA, so that they do not wait for the training's kernels
        self._thread = threading.Thread(target=self._run, name="flowcheck-agent", daemon=True)
        if late is not None:
            late.wake = self._rouse

    def start(self) -> Agent:
        self._thread.start()
        return self

    def halt(self) -> None:
        """Have the thread end; `join` waits for it. Called by the thread that trains, or when that is over."""
        self._stopped = True
        self._rouse()
        self._desk.cancel(self)

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for what is under way to end."""
        if self._late is not None:
            self._late.stop(timeout)
            self._late.wake = _nothing
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            return
        self._thread.join(timeout)
        if not self._thread.is_alive() and self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)

    # The training thread

    @property
    def unsent(self) -> int:
        return self._delivered - self._left

    def deliver(self, piece: Piece) -> None:
        self._delivered += piece.data.numel()
        self._put(lambda: self._piece(piece), piece.data.numel())

    def decline(self, epoch: int, ask: int, reason: str) -> None:
        if len(self._answers) < MOST_ANSWERS:
            self._put(lambda: [_Message(self._encode("repair-refused", epoch, ask, reason=reason[:1000]))])

    def checksums(self, epoch: int, ask: int, step: int, found: dict[str, str | None]) -> None:
        self._put(lambda: self._comparison(epoch, ask, step, found))

    def look(self) -> bool:
        """Have the thread look for messages now; whether it lives."""
        self._rouse()
        return self._thread.is_alive()

    def _put(self, answer: Callable[[], list[_Message]], nbytes: int = 0) -> None:
        self._answers.append((answer, nbytes))
        self._rouse()

    def _rouse(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # The agent's thread

    def _run(self) -> None:
        try:
            with Connection(self.endpoint, send_queue=WINDOW, heartbeat=True) as connection:
                while not self._stopped:
                    self._turn(connection)
        except Exception as error:  # training goes on, and other ranks have agents too
            log.warning("flowcheck: the agent of rank %d for %s has ended: %s", self._rank, self.endpoint, error)
            self._desk.cancel(self)

    def _turn(self, connection: Connection) -> None:
        now = time.monotonic()
        known = self._desk.look(self._steps(), now)
        if now >= self._next_hello:
            connection.post(
                encode("agent-hello", run=self._run_name, job=self._job, rank=self._rank, step=self._steps())
            )
            self._next_hello = now + HELLO_S
            self._refused(connection.refusal)
        pause = self._next_hello - now
        connection.wait(pause if known else min(pause, FIRST_LOOK_S), self._wake, room=bool(self._messages))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(MESSAGES):
            if not connection.wait(0, self._wake):
                break
            self._receive(connection)
        self.reachable = connection.standing
        self.turns += 1
        if self._late is not None:
            self._late.advance()
        self._send(connection, now)

    def _receive(self, connection: Connection) -> None:
        try:
            kind, fields, _ = connection.receive(*ASKS, timeout=0)
        except FlowcheckError as error:  # also the daemon's: it says them about messages that need no answer
            self.counters.absurd += 1
            self._refused(error if isinstance(error, NoPermission) else None)
            return
        if fields.get("run", self._run_name) != self._run_name:
            self.counters.absurd += 1
        elif kind == "repair-ask":
            self._ask(fields)
        elif kind == "repair-cancel":
            self._desk.cancel(self, set(fields["numbers"]))
        elif kind == "repair-done":
            self.done = fields["step"]
        elif kind == "compare-ask":
            self._desk.compare(self, fields["epoch"], fields["ask"])
        elif kind == "notice":
            log.warning("flowcheck: the daemon at %s: %s", self.endpoint, fields["text"])
        elif self._late is None:
            self.counters.absurd += 1
        elif kind == "groups-ask":
            self._late.repeat_groups()
        else:
            self._late.ask()

    def _refused(self, error: NoPermission | None) -> None:
        """Say once that the daemon does not listen to this rank."""
        if error is not None and not self._told:
            self._told = True
            log.warning(
                "flowcheck: the daemon at %s does not let rank %d repair anything: %s (%s names the key's file)",
                self.endpoint, self._rank, error, KEY,
            )  # fmt: skip

    def _ask(self, fields: dict[str, Any]) -> None:
        for number, key, lo, hi in fields["parts"]:
            self.counters.asked += 1
            reason = self._desk.refusal(key, lo, hi)
            ask = Ask(self, fields["epoch"], number, key, lo, hi, fields["percent"], fields["step_bytes"])
            if reason is None and not self._desk.ask(ask):
                reason = "too many parts wait for this rank's next steps already"
            if reason is not None:
                self.counters.refused += 1
                self.decline(ask.epoch, number, reason)

    def _send(self, connection: Connection, now: float) -> None:
        while self._messages or self._answers:
            if not self._messages:
                self._messages.extend(self._made(*self._answers.popleft()))
                continue
            message = self._messages[0]
            if not connection.post(message.frame, message.data):
                self._stuck(now)
                return
            self._stuck_since = None
            self._messages.popleft()
            self._left += message.nbytes
            self.counters.sent += 1
            self.counters.sent_bytes += message.nbytes

    def _stuck(self, now: float) -> None:
        """There is no room for a message: the daemon does not read, or is gone."""
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since < STUCK_S:
            return
        self._stuck_since = None
        while self._messages or self._answers:
            if self._answers:
                self._left += self._answers.popleft()[1]
            else:
                self._left += self._messages.popleft().nbytes
            self.counters.dropped += 1

    def _made(self, answer: Callable[[], list[_Message]], nbytes: int) -> list[_Message]:
        try:
            return answer()
        except Exception:
            log.exception("flowcheck: an answer to the daemon could not be made")
            self._left += nbytes
            self.counters.dropped += 1
            return []

    # Messages

    def _piece(self, piece: Piece) -> list[_Message]:
        ask, data, counter = piece.ask, piece.data, piece.counter
        if data.device.type == "cuda":
            piece.copied.synchronize()
            if self._stream is None:
                self._stream = torch.cuda.Stream(data.device)
            with torch.cuda.stream(self._stream):
                data = data.cpu()
                counter = None if counter is None else counter.cpu()
        held = data.numpy()
        frame = self._encode(
            "repair-data",
            ask.epoch,
            ask.number,
            key=ask.key,
            lo=ask.lo,
            hi=ask.hi,
            step=piece.step,
            sections=piece.sections,
            counter=None if counter is None else memory_view(counter).view(torch.uint8).numpy().tobytes().hex(),
            digest=digest(held),
        )
        return [_Message(frame, held, held.nbytes)]

    def _comparison(self, epoch: int, ask: int, step: int, found: dict[str, str | None]) -> list[_Message]:
        text = json.dumps(found, separators=(",", ":")).encode()
        if len(text) > MAX_COMPARE:
            reason = f"the checksums of {len(found)} tensors take more than {MAX_COMPARE} bytes"
            return [_Message(self._encode("repair-refused", epoch, ask, reason=reason))]
        whole = {"step": step, "bytes": len(text), "digest": digest(text)}
        return [
            _Message(self._encode("compare-data", epoch, ask, **whole, offset=at), text[at : at + CHUNK])
            for at in range(0, len(text), CHUNK)
        ]

    def _encode(self, kind: str, epoch: int, ask: int, **fields: Any) -> bytes:
        return encode(kind, run=self._run_name, epoch=epoch, ask=ask, **fields)
