"""The client's end of the control protocol: one ZeroMQ DEALER, every wait with a deadline. No torch."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from flowcheck import keys, protocol
from flowcheck.errors import FlowcheckError, NoPermission, UsageError

# After these libzmq does not try again by itself.
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_STANDING: dict[int, bool] = {zmq.EVENT_HANDSHAKE_SUCCEEDED: True, zmq.EVENT_DISCONNECTED: False}
AGAIN_S = 5.0
"""How soon a connection that the other side refused is tried again: keys may have been put right."""
HEARTBEAT_MS, HEARTBEAT_TTL_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000, 10000


class Unreachable(FlowcheckError):
    """No daemon answered within the deadline."""


class Connection:
    """Talks to the daemon at `endpoint`. Use it from one thread; `close` it in the end.

    Over tcp it shows the key of this process (`keys.client_key`) where there is one, and then talks only to a daemon
    that proves to have the key that goes with it. Raises UsageError, BadConfig or NoPermission.
    heartbeat: let the daemon notice within seconds when this side can no longer reach it (a libzmq thread sends these).
    """

    def __init__(self, endpoint: str, send_queue: int = 4 * protocol.WINDOW, *, heartbeat: bool = False) -> None:
        scheme, separator, rest = endpoint.partition("://")
        if not separator or scheme not in ("tcp", "ipc") or not rest:
            raise UsageError(f"endpoint {endpoint!r}: use tcp://HOST:PORT or ipc://PATH")
        key = keys.client_key() if scheme == "tcp" else None
        self.endpoint = endpoint
        self._keyed = key is not None
        self._refused: NoPermission | None = None
        self._standing = False
        self._look = 0.0  # when to look for refusals again
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
        if key is not None:
            self._socket.set(zmq.CURVE_PUBLICKEY, key.pair.public)
            self._socket.set(zmq.CURVE_SECRETKEY, key.pair.secret)
            self._socket.set(zmq.CURVE_SERVERKEY, key.server)
        self._refusals = self._socket.get_monitor_socket(_REFUSALS | sum(_STANDING))
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

    def post(self, frame: bytes, data: Any = None) -> bool:
        """Send an encoded header now or not at all; False if the queue is full. data: a binary frame to go with it,
        which must not be written any more: it is not copied."""
        if time.monotonic() > self._look:
            self._try_again()
        try:
            if data is None:
                self._socket.send(frame, zmq.NOBLOCK)
            else:
                self._socket.send_multipart([frame, data], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    @property
    def refusal(self) -> NoPermission | None:
        """Why the daemon did not let this connection in when it was last seen; None if it did, or nothing is known."""
        return self._refused

    def wait(self, timeout: float, descriptor: int, room: bool = False) -> bool:
        """Wait until a message has come, or `descriptor` can be read, or, with `room`, a message can be sent; at most
        `timeout` seconds. Whether a message has come."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if room else 0))
        poller.register(descriptor, zmq.POLLIN)
        return bool(dict(poller.poll(max(0, int(timeout * 1000)))).get(self._socket, 0) & zmq.POLLIN)

    def receive(self, *expected: str, timeout: float) -> tuple[str, dict[str, Any], Any]:
        """The next message, which must be one of `expected`, as (type, fields, data).

        Raises the daemon's error if it sends one, NoPermission once it refuses the connection, Unreachable after
        `timeout` seconds without a message.
        """
        if not self._wait(timeout):
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

    @property
    def standing(self) -> bool:
        """Whether the connection stands now, as far as libzmq knows."""
        self._take_refusals()
        return self._standing

    def close(self, linger: float = 0.0) -> None:
        """Close; messages still queued get at most `linger` seconds."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._refusals.close(0)
        self._socket.close(int(linger * 1000))
        self._context.term()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, timeout: float) -> bool:
        """Whether a message comes in time. Raises NoPermission."""
        deadline = time.monotonic() + timeout
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._refusals, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(max(0, int((deadline - time.monotonic()) * 1000))))
            if not ready or self._socket in ready:
                return bool(ready)
            self._take_refusals()
            if self._refused is not None:
                raise self._refused

    def _take_refusals(self) -> None:
        while self._refusals.poll(0):
            event = recv_monitor_message(self._refusals)
            if event["event"] in _STANDING:
                self._standing = _STANDING[event["event"]]
                continue
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                why = f"this key is not authorized there: put its public file into the daemon's {keys.AUTHORIZED}/"
            elif event["value"] != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                why = "it does not speak flowcheck's protocol: check the address"
            elif self._keyed:
                why = f"it was started without keys: start it with --keys, or unset {keys.KEY}"
            else:
                why = f"it asks for a key: set {keys.KEY} to a client's file that flowcheck keygen made"
            self._refused = NoPermission(f"no connection to the daemon at {self.endpoint}: {why}")

    def _try_again(self) -> None:
        """What a refusal ended is begun anew: for those who only send and wait for nothing."""
        self._look = time.monotonic() + AGAIN_S
        if self._refused is not None:
            self._refused = None
            with suppress(zmq.ZMQError):
                self._socket.disconnect(self.endpoint)  # libzmq ignores a second connect to one that it knows
            self._socket.connect(self.endpoint)
        self._take_refusals()

    def _unreachable(self, timeout: float) -> FlowcheckError:
        self._take_refusals()
        if self._refused is not None:
            return self._refused
        advice = "start the daemon there or check the address"
        if self._keyed:
            advice += f", and whether its key is the one in {keys.KEY}'s file"
        return Unreachable(f"no answer from {self.endpoint} within {max(timeout, 0):.3g} s: {advice}")
