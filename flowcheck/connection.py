"""The client's end of the control protocol: one ZeroMQ DEALER, every wait with a deadline. No torch."""

from __future__ import annotations

import time
from typing import Any

import zmq

from flowcheck import protocol
from flowcheck.errors import FlowcheckError, UsageError

HEARTBEAT_MS, HEARTBEAT_TTL_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000, 10000


class Unreachable(FlowcheckError):
    """No daemon answered within the deadline."""


class Connection:
    """Talks to the daemon at `endpoint`. Use it from one thread; `close` it in the end.

    heartbeat: let the daemon notice within seconds when this side can no longer reach it (a libzmq thread sends these).
    """

    def __init__(self, endpoint: str, send_queue: int = 4 * protocol.WINDOW, *, heartbeat: bool = False) -> None:
        scheme, separator, rest = endpoint.partition("://")
        if not separator or scheme not in ("tcp", "ipc") or not rest:
            raise UsageError(f"endpoint {endpoint!r}: use tcp://HOST:PORT or ipc://PATH")
        self.endpoint = endpoint
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME)
        self._socket.set(zmq.SNDHWM, send_queue)
        self._socket.set(zmq.RCVHWM, 4 * protocol.WINDOW)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 2000)
        if heartbeat:
            self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"endpoint {endpoint!r} cannot be used: {error}") from None

    def send(self, kind: str, data: Any = None, timeout: float = 10.0, **fields: Any) -> None:
        """Send one message, waiting at most `timeout` seconds for room in the queue. Raises Unreachable."""
        frames = [protocol.encode(kind, **fields)]
        if data is not None:
            frames.append(data)
        if not self._socket.poll(int(timeout * 1000), zmq.POLLOUT):
            raise self._unreachable(timeout)
        self._socket.send_multipart(frames)

    def post(self, frame: bytes) -> bool:
        """Send an encoded header now or not at all; False if the queue is full."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, *expected: str, timeout: float) -> tuple[str, dict[str, Any], Any]:
        """The next message, which must be one of `expected`, as (type, fields, data).

        Raises the daemon's error if it sends one, Unreachable after `timeout` seconds without a message.
        """
        if not self._socket.poll(max(0, int(timeout * 1000))):
            raise self._unreachable(timeout)
        frames = self._socket.recv_multipart(copy=False)
        kind, fields, data = protocol.split([frame.buffer for frame in frames])
        if kind == "error":
            protocol.raise_error(fields)
        if kind not in expected:
            raise FlowcheckError(f"the daemon at {self.endpoint} answered {kind} instead of {expected[0]}")
        return kind, fields, data

    def request(self, kind: str, reply: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """Send one message and return the fields of its reply, within `timeout` seconds altogether."""
        deadline = time.monotonic() + timeout
        self.send(kind, timeout=timeout, **fields)
        return self.receive(reply, timeout=deadline - time.monotonic())[1]

    def close(self, linger: float = 0.0) -> None:
        """Close; messages still queued get at most `linger` seconds."""
        self._socket.close(int(linger * 1000))
        self._context.term()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unreachable(self, timeout: float) -> Unreachable:
        waited = f"{max(timeout, 0):.3g} s"
        return Unreachable(
            f"no answer from {self.endpoint} within {waited}: start the daemon there or check the address"
        )
