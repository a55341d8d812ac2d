"""The control server's clients: what each has open, messages to them, and answers that other threads work on.

All of it belongs to the server's loop; only what finishes work comes from elsewhere, through `wake`.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from flowcheck import answers, protocol
from flowcheck.errors import FlowcheckError
from flowcheck.sessions import Peer

log = logging.getLogger(__name__)


class Clients:
    """router: the server's socket; wake: makes the loop call `finish_work` soon, from any thread.

    `user`, `source`: of the message that is being handled, its sender's key where keys are asked for, and its
    connection's descriptor. `ends`: how a client's conversation is ended, by the first word of its messages.
    """

    def __init__(self, router: zmq.Socket[bytes], wake: Callable[[], None]) -> None:
        self.counters = {"messages": 0, "malformed": 0, "markers": 0, "cut": 0, "unsent": 0, "bad_handshakes": 0}
        self.user: str | None = None
        self.source = -1
        self.peers: dict[bytes, Peer] = {}
        self.ends: dict[str, Callable[[bytes], None]] = {}
        self._router = router
        self._wake = wake
        self._done: deque[Callable[[], None]] = deque()
        self._numbers = 0

    def peer(self, identity: bytes) -> Peer:
        return self.peers.setdefault(identity, Peer())

    def number(self) -> int:
        """For a new session."""
        self._numbers = self._numbers % (1 << 31) + 1
        return self._numbers

    def forget(self) -> None:
        """Those that have nothing open."""
        for identity, peer in list(self.peers.items()):
            if peer.upload is None and peer.fetch is None and peer.work is None:
                del self.peers[identity]

    # Messages

    def send(self, identity: bytes, kind: str, data: Any = None, /, **fields: Any) -> bool:
        """Send without waiting. False if the peer's queue is full; a vanished peer loses its sessions."""
        return self.put([identity, protocol.encode(kind, **fields), *([] if data is None else [data])])

    def put(self, frames: list[Any]) -> bool:
        """`send` of an encoded message, the peer's identity before it."""
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.counters["unsent"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            for end in self.ends.values():
                end(frames[0])
            return False
        return True

    def fail(self, identity: bytes, kind: str, error: FlowcheckError) -> None:
        """Tell the peer, and end the conversation that the failed message belonged to."""
        for first, end in self.ends.items():
            if kind.startswith(first):
                end(identity)
        if kind not in ("marker", "detach") and kind not in answers.KINDS:  # a trainer reads no replies to these
            self.send(identity, "error", **protocol.error_fields(error))

    def fail_inside(self, identity: bytes, kind: str, error: Exception) -> None:
        """`fail` for what is no fault of the peer's."""
        log.error("%s failed", kind, exc_info=error)
        self.fail(identity, kind, FlowcheckError(f"internal error in {kind}: {error}"))

    def cut(self, identity: bytes, kind: str, why: str) -> None:
        self.counters["cut"] += 1
        self.fail(identity, kind, FlowcheckError(f"the {kind} was cut: {why}"))

    # Work of other threads

    def later(
        self, identity: bytes, kind: str, begin: Callable[[], Future[Any]], then: Callable[[Any], None]
    ) -> None:
        """Begin work of another thread, then `then(result)` on the loop's; errors go to the peer. One at a time."""
        peer = self.peer(identity)
        if peer.work is not None:
            raise FlowcheckError(f"{kind}: an earlier request of this client is still being answered")
        peer.work = work = begin()

        def finish() -> None:
            peer.work = None
            try:
                then(work.result())
            except FlowcheckError as error:
                self.fail(identity, kind, error)
            except Exception as error:
                self.fail_inside(identity, kind, error)

        self.when_done(work, finish)

    def when_done(self, work: Future[Any], finish: Callable[[], None]) -> None:
        """Call `finish` on the loop's thread once `work` has come to its end."""

        def done(_: Future[Any]) -> None:
            self._done.append(finish)
            self._wake()

        work.add_done_callback(done)

    def finish_work(self) -> None:
        while self._done:
            self._done.popleft()()
