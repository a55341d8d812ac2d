"""The daemon's control server: one ZeroMQ ROUTER and one thread for trainers, restoring clients and `status`.

Nothing that a peer or a disk does stalls the loop: sends never wait, a client that does not read is served when it does
and is cut after `fetch_idle` seconds, clients are served one chunk each in turn (`flowcheck.fetching`), and what may
take long in the service runs on other threads: `begin_attach`, `commit` and `open` one call at a time, the reading of
steps one for each client. All other service methods are called on the loop's thread and must return quickly. A
malformed message is answered with an error, counted and forgotten.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from flowcheck import __version__, answers, endpoints, protocol
from flowcheck.access import ZAP_ENDPOINT, Access
from flowcheck.attaching import Attaches
from flowcheck.clients import Clients
from flowcheck.errors import FlowcheckError, NoPermission, NothingRestorable, Revoked, UsageError
from flowcheck.fetching import Fetches
from flowcheck.links import Links
from flowcheck.service import Service
from flowcheck.workers import Workers

_MONITORED = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
MAX_TOLD = 4096
"""Messages to agents that wait for the loop; beyond them they are dropped, as if the agent had not answered."""
ATTACHING = frozenset(
    {"attach-begin", "attach-text", "attach-checkpoint", "attach-chunk", "attach-commit", "attach-abort"}
)
FETCHING = frozenset({"fetch-begin", "fetch-read", "fetch-end"})
HANDSHAKE_MS = 5000
"""How long a new connection may take to say who it is."""
LOOK_S = 0.5
"""How often deadlines are looked at."""
CLOSE_S = 15.0
"""How long the end waits for what other threads are doing."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: an upload or a fetch without progress, and a fetch altogether."""

    attach_idle: float = 30.0
    fetch_idle: float = 30.0
    fetch_total: float = 3600.0


class Server:
    """Serves `service` on `addresses` from `start` to `close`; `endpoints` holds them with their real ports.

    access: who may connect over tcp and what for; None: whoever reaches an endpoint may do everything.
    insecure: allow tcp addresses beyond loopback without `access`. ipc sockets are for this user alone, without keys.
    Raises UsageError, NoPermission or FlowcheckError when an endpoint cannot be listened on.
    """

    def __init__(
        self,
        service: Service,
        addresses: Sequence[str],
        *,
        access: Access | None = None,
        insecure: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        for address in addresses:
            endpoints.check(address, insecure or access is not None)
        self._access = access
        self._service = service
        self._answers = answers.Answers(service)
        self._links = Links(service, self._answers)
        self._told: deque[list[bytes]] = deque()
        self._telling = threading.Lock()
        self._deadlines = deadlines or Deadlines()
        self._stopping = self._released = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context(1)
        self._authenticator = self._context.socket(zmq.REP)
        self._authenticator.bind(ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(
            zmq.ROUTER_MANDATORY, 1
        )  # an error for a full or vanished peer instead of a silent drop
        self._router.set(zmq.LINGER, 200)
        self._router.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME)
        self._router.set(zmq.SNDHWM, 4 * protocol.WINDOW)
        self._router.set(zmq.RCVHWM, 4 * protocol.WINDOW)
        # Who is gone: markers then may be lost. A peer's own heartbeats (flowcheck.connection) end a dead connection.
        self._monitor = self._router.get_monitor_socket(_MONITORED)
        self._clients = Clients(self._router, self._rouse)
        self.counters = self._clients.counters
        self._workers = Workers(1, "flowcheck-service")
        self._attaches = Attaches(service, self._clients, self._workers, self._attached)
        self._fetches = Fetches(service, self._clients, self._workers)
        try:
            self.endpoints = endpoints.bind_all(self._router, addresses, None if access is None else access.pair)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="flowcheck-server", daemon=True)

    def start(self) -> Server:
        self._thread.start()
        return self

    def close(self) -> None:
        """End every session and close the sockets. Returns once the loop's thread has ended."""
        with self._telling:
            self._stopping = True
        if self._thread.is_alive():
            self._rouse()
            self._thread.join()
        elif self._thread.ident is None:
            self._release()

    def tell(self, peer: bytes, kind: str, /, **fields: Any) -> None:
        """Send a message to an agent, from any thread and without waiting. One that cannot be sent is dropped."""
        frames = [peer, protocol.encode(kind, **fields)]
        with self._telling:  # also keeps the descriptor open meanwhile
            if self._stopping or len(self._told) >= MAX_TOLD:
                self.counters["unsent"] += 1
                return
            self._told.append(frames)
            os.eventfd_write(self._wake, 1)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rouse(self) -> None:
        """Have the loop turn, from any thread."""
        with self._telling:
            if not self._released:
                os.eventfd_write(self._wake, 1)

    # The loop

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._authenticator, zmq.POLLIN)
        try:
            while not self._stopping:
                pause = self._fetches.pause
                poller.poll(int(1000 * (LOOK_S if pause is None else pause)))
                self._finish_work()
                self._authenticate()
                self._collect_gone()
                if self._receive():
                    self._links.settle()
                    self._answers.expire(time.monotonic())
                self._fetches.serve()
                self._expire(time.monotonic())
        finally:
            self._workers.close(CLOSE_S)
            self._clients.finish_work()
            for identity in list(self._clients.peers):
                self._attaches.end(identity)
                self._fetches.end(identity)
            self._fetches.close(CLOSE_S)
            self._release()

    def _release(self) -> None:
        with self._telling:
            if self._released:
                return
            self._released = True
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        self._authenticator.close(0)
        self._context.term()
        os.close(self._wake)

    def _finish_work(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        self._clients.finish_work()
        while self._told:
            self._clients.put(self._told.popleft())

    def _receive(self) -> bool:
        """Take what has arrived, a bounded number of messages, so that sends get their turn; whether that was all."""
        for _ in range(64):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self.counters["messages"] += 1
            identity = frames[0].bytes
            self._clients.source = _descriptor(frames[-1])
            try:
                kind, fields, data = protocol.split([frame.buffer for frame in frames[1:]])
            except FlowcheckError as error:
                self.counters["malformed"] += 1
                self._clients.send(identity, "error", **protocol.error_fields(error))
                continue
            self._clients.user = user = None if self._access is None else _user(frames[-1])
            try:
                if self._access is not None and user is not None:
                    self._access.check(user, kind)
            except NoPermission as error:
                self._links.gone(self._clients.source)
                self._clients.fail(identity, kind, error)
                if kind in answers.KINDS:
                    self._clients.send(identity, "error", **protocol.error_fields(error))
                continue
            try:
                self._dispatch(identity, kind, fields, data)
            except (UsageError, NothingRestorable, Revoked) as error:  # well said, and not possible
                self._clients.fail(identity, kind, error)
            except FlowcheckError as error:
                self.counters["malformed"] += 1
                self._clients.fail(identity, kind, error)
            except Exception as error:
                self._clients.fail_inside(identity, kind, error)
        return False

    def _authenticate(self) -> None:
        """Answer libzmq's questions about the keys of new connections."""
        while self._access is not None and self._authenticator.poll(0):
            self._authenticator.send_multipart(self._access.authenticate(self._authenticator.recv_multipart()))

    def _collect_gone(self) -> None:
        for _ in range(1024):
            if not self._monitor.poll(0):
                return
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._links.gone(int(event["value"]))
            else:
                self.counters["bad_handshakes"] += 1

    def _dispatch(self, identity: bytes, kind: str, fields: dict[str, Any], data: Any) -> None:
        if kind == "marker":
            self.counters["markers"] += 1
            self._links.stands(self._clients.source, fields["run"], fields["epoch"])
            self._service.marker(fields["run"], fields["epoch"], fields["marker"])
        elif kind in answers.KINDS:
            self._answers.take(identity, self._clients.source, kind, fields, data, time.monotonic())
        elif kind == "detach":
            self._service.detach(fields["run"], fields["epoch"], fields["step"])
        elif kind in ATTACHING:
            self._attaches.take(identity, kind, fields, data)
        elif kind in FETCHING:
            self._fetches.take(identity, kind, fields)
        elif kind == "status":
            self._clients.send(identity, "status-reply", status={**self._service.status(), "control": self._control()})
        elif kind == "compare":
            self._clients.send(identity, "compare-reply", **self._service.compare(fields["run"], fields["number"]))
        elif kind == "ping":
            self._clients.send(identity, "pong", version=__version__)
        elif kind == "layout":
            self._service.layout(fields["run"], fields["epoch"], fields["layout"])
            self._clients.send(identity, "layout-ack")
        else:
            raise FlowcheckError(f"{kind}: only a server sends this")

    def _control(self) -> dict[str, Any]:
        """What a status says of the server itself: counters, and whose the last refusals were."""
        control: dict[str, Any] = dict(self.counters)
        if self._access is not None:
            control |= {f"refused_{what}": count for what, count in self._access.refused.items()}
            control["last_refused"] = dict(self._access.last)
        return control

    def _attached(self, source: int, job: str, ack: dict[str, Any], sent: bool) -> None:
        """An attach was committed; its trainer is at the other end of `source` if it could be told."""
        if sent:
            self._links.stands(source, ack["run"], ack["epoch"])
        self._answers.attached(ack["run"], job, ack["epoch"])

    def _expire(self, now: float) -> None:
        if self._access is not None and self._access.refresh():
            self._revoke(self._access)
        limits = self._deadlines
        self._attaches.expire(now, limits.attach_idle)
        self._fetches.expire(now, limits.fetch_idle, limits.fetch_total)
        self._clients.forget()

    def _revoke(self, access: Access) -> None:
        """End the sessions of those whose rights have gone. Whatever else they send is refused."""
        for identity, peer in list(self._clients.peers.items()):
            if peer.user is None:
                continue
            if not access.may(peer.user, "attach-chunk"):
                self._attaches.end(identity)
            if not access.may(peer.user, "fetch-read"):
                self._fetches.end(identity)


def _descriptor(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a received frame came on, -1 if libzmq does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def _user(frame: zmq.Frame) -> str | None:
    """The key of the peer that sent a frame; None on a connection without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None
