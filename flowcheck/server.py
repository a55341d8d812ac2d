"""The daemon's control server: one ZeroMQ ROUTER and one thread for trainers, restoring clients and `status`.

Nothing that a peer does stalls the loop: sends never wait, a client that does not read is served when it
does and is cut after `fetch_idle` seconds, clients are served one chunk each in turn, and what may take long
in the service (`begin_attach`, `commit`, `open`) runs on a second thread, one call at a time. All other
service methods are called on the loop's thread and must return quickly. A malformed message is answered with
an error, counted and forgotten.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from flowcheck import __version__, answers, endpoints, protocol
from flowcheck.access import ZAP_ENDPOINT, Access
from flowcheck.errors import FlowcheckError, NoPermission, Revoked
from flowcheck.service import Service
from flowcheck.sessions import Fetch, Peer, Upload, digest

log = logging.getLogger(__name__)

MAX_FETCHES = 64
MAX_UPLOADS = 8
_MONITORED = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
MAX_TOLD = 4096
"""Messages to agents that wait for the loop; beyond them they are dropped, as if the agent had not answered."""
HANDSHAKE_MS = 5000
"""How long a new connection may take to say who it is."""
RETRY_S = 0.01
"""How soon a client whose queue was full is tried again."""


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
        self.counters = {"messages": 0, "malformed": 0, "markers": 0, "cut": 0, "unsent": 0, "bad_handshakes": 0}
        self._access = access
        self._service = service
        self._answers = answers.Answers(service)
        self._told: deque[list[bytes]] = deque()
        self._telling = threading.Lock()
        self._deadlines = deadlines or Deadlines()
        self._peers: dict[bytes, Peer] = {}
        self._turn: list[bytes] = []
        self._numbers = 0
        self._stopping = False
        self._worker = ThreadPoolExecutor(1, "flowcheck-service")
        self._done: list[Callable[[], None]] = []
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
        # Of the message being handled: the descriptor of its connection, and its sender's key where keys are asked for.
        self._source = -1
        self._user: str | None = None
        self._links: dict[int, tuple[str, int]] = {}  # descriptor -> (run, epoch) whose markers come on it
        self._gone: list[int] = []
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
            os.eventfd_write(self._wake, 1)
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

    # The loop

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._authenticator, zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(self._timeout())
                self._finish_work()
                self._authenticate()
                self._collect_gone()
                if self._receive():
                    self._end_links()
                    self._answers.expire(time.monotonic())
                self._serve_fetches()
                self._expire(time.monotonic())
        finally:
            self._worker.shutdown(wait=True)
            self._finish_work()
            for identity in list(self._peers):
                self._end_upload(identity)
                self._end_fetch(identity)
            self._release()

    def _release(self) -> None:
        if not self._router.closed:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close()
            self._authenticator.close(0)
            self._context.term()
            os.close(self._wake)

    def _timeout(self) -> int:
        waiting = [peer.fetch for peer in self._peers.values() if peer.fetch is not None and peer.fetch.queue]
        if any(not fetch.blocked for fetch in waiting):
            return 0
        return int(RETRY_S * 1000) if waiting else 500

    def _receive(self) -> bool:
        """Take what has arrived, a bounded number of messages, so that sends get their turn; whether that was all."""
        for _ in range(64):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self.counters["messages"] += 1
            identity = frames[0].bytes
            self._source = _descriptor(frames[-1])
            try:
                kind, fields, data = protocol.split([frame.buffer for frame in frames[1:]])
            except FlowcheckError as error:
                self._malformed(identity, error)
                continue
            self._user = None if self._access is None else _user(frames[-1])
            try:
                if self._access is not None and self._user is not None:
                    self._access.check(self._user, kind)
            except NoPermission as error:
                self._gone.append(self._source)  # no trainer or agent of ours is at its other end
                self._fail(identity, kind, error)
                if kind in answers.KINDS:
                    self._send(identity, "error", **protocol.error_fields(error))
                continue
            try:
                self._dispatch(identity, kind, fields, data)
            except FlowcheckError as error:
                self.counters["malformed"] += 1
                self._fail(identity, kind, error)
            except Exception as error:
                log.exception("%s from a peer failed", kind)
                self._fail(identity, kind, FlowcheckError(f"internal error in {kind}: {error}"))

        return False

    def _authenticate(self) -> None:
        """Answer libzmq's questions about the keys of new connections."""
        while self._access is not None and self._authenticator.poll(0):
            self._authenticator.send_multipart(self._access.authenticate(self._authenticator.recv_multipart()))

    def _revoke(self) -> None:
        """End the sessions of those whose rights have gone. Whatever else they send is refused."""
        access = self._access
        for identity, peer in list(self._peers.items()):
            if access is None or peer.user is None:
                continue
            if not access.may(peer.user, "attach-chunk"):
                self._end_upload(identity)
            if not access.may(peer.user, "fetch-read"):
                self._end_fetch(identity)

    def _malformed(self, identity: bytes, error: FlowcheckError) -> None:
        self.counters["malformed"] += 1
        self._send(identity, "error", **protocol.error_fields(error))

    def _fail(self, identity: bytes, kind: str, error: FlowcheckError) -> None:
        """Tell the peer, and end the conversation that the failed message belonged to."""
        if kind.startswith("attach"):
            self._end_upload(identity)
        elif kind.startswith("fetch"):
            self._end_fetch(identity)
        if kind not in ("marker", "detach") and kind not in answers.KINDS:  # a trainer reads no replies to these
            self._send(identity, "error", **protocol.error_fields(error))

    def _dispatch(self, identity: bytes, kind: str, fields: dict[str, Any], data: Any) -> None:
        if kind == "marker":
            self.counters["markers"] += 1
            self._link(self._source, fields["run"], fields["epoch"])
            self._service.marker(fields["run"], fields["epoch"], fields["marker"])
        elif kind in answers.KINDS:
            self._answers.take(identity, self._source, kind, fields, data, time.monotonic())
        elif kind == "detach":
            self._service.detach(fields["run"], fields["epoch"], fields["step"])
        elif kind == "fetch-read":
            self._fetch(identity, fields["session"]).ask(
                fields["request"], fields["key"], fields["offset"], fields["length"], time.monotonic()
            )
        elif kind == "attach-chunk":
            upload = self._upload(identity, fields["session"])
            size = upload.chunk(fields["key"], fields["offset"], fields["digest"], data, time.monotonic())
            self._send(identity, "attach-credit", session=upload.number, bytes=size)
        elif kind == "status":
            refused = {} if self._access is None else self._access.refused
            control = {**self.counters, **{f"refused_{what}": count for what, count in refused.items()}}
            self._send(identity, "status-reply", status={**self._service.status(), "control": control})
        elif kind == "compare":
            self._send(identity, "compare-reply", **self._service.compare(fields["run"], fields["number"]))
        elif kind == "ping":
            self._send(identity, "pong", version=__version__)
        elif kind == "layout":
            self._service.layout(fields["run"], fields["epoch"], fields["layout"])
            self._send(identity, "layout-ack")
        elif kind == "attach-begin":
            self._attach_begin(identity, fields)
        elif kind == "attach-text":
            self._attach_text(identity, fields["offset"], data)
        elif kind == "attach-commit":
            self._attach_commit(identity, fields["session"])
        elif kind == "attach-abort":
            self._end_upload(identity)
        elif kind == "fetch-begin":
            self._fetch_begin(identity, fields["run"], fields["step"], fields["allow_unknown"])
        elif kind == "fetch-end":
            self._end_fetch(identity)
        else:
            raise FlowcheckError(f"{kind}: only a server sends this")

    # Attach

    def _attach_begin(self, identity: bytes, fields: dict[str, Any]) -> None:
        self._end_upload(identity)
        if sum(peer.upload is not None for peer in self._peers.values()) >= MAX_UPLOADS:
            raise FlowcheckError(f"{MAX_UPLOADS} other jobs are attaching: try again in a minute")
        upload = Upload(self._number(), time.monotonic(), **fields)
        self._peer(identity).upload = upload
        self._peer(identity).user = self._user

    def _attach_text(self, identity: bytes, offset: int, data: Any) -> None:
        upload = self._upload(identity, None)
        description = upload.text(offset, data, time.monotonic())
        if description is None:
            return

        def opened(session: Any) -> None:
            if self._peer(identity).upload is not upload:
                session.abort()
                return
            upload.session, upload.active = session, time.monotonic()
            self._send(identity, "attach-open", session=upload.number, run=description.run)

        self._later(identity, "attach-begin", lambda: self._service.begin_attach(description, upload.late), opened)

    def _attach_commit(self, identity: bytes, number: int) -> None:
        upload = self._upload(identity, number)
        session = upload.ready()
        upload.session = None  # from here on the second thread owns it
        source = self._source

        def commit() -> dict[str, Any]:
            try:
                return session.commit()
            except BaseException:
                session.abort()
                raise

        def committed(ack: dict[str, Any]) -> None:
            if self._peer(identity).upload is upload:
                self._peer(identity).upload = None
            if self._send(identity, "attach-ack", session=number, ack=ack):
                self._link(source, ack["run"], ack["epoch"])
            self._answers.attached(ack["run"], upload.job, ack["epoch"])

        self._later(identity, "attach-commit", commit, committed)

    def _upload(self, identity: bytes, number: int | None) -> Upload:
        peer = self._peers.get(identity)
        if peer is None or peer.upload is None or number not in (None, peer.upload.number):
            raise FlowcheckError(
                "no attach is open here (it may have been given up after a pause): attach again"
            )
        return peer.upload

    def _end_upload(self, identity: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is None or peer.upload is None:
            return
        upload, peer.upload = peer.upload, None
        if upload.session is not None:
            upload.session.abort()

    # Connections that markers come on

    def _link(self, descriptor: int, run: str, epoch: int) -> None:
        """The trainer of (run, epoch) is at the other end of a connection."""
        if descriptor >= 0 and self._links.get(descriptor) != (run, epoch):
            self._links = {fd: job for fd, job in self._links.items() if job != (run, epoch)}
            self._links[descriptor] = (run, epoch)
            self._service.link(run, epoch, True)

    def _collect_gone(self) -> None:
        for _ in range(1024):
            if not self._monitor.poll(0):
                return
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._gone.append(int(event["value"]))
            else:
                self.counters["bad_handshakes"] += 1

    def _end_links(self) -> None:
        """What ended connections carried has all been taken: now their trainers count as gone."""
        gone, self._gone = self._gone, []
        for descriptor in gone:
            job = self._links.pop(descriptor, None)
            if job is not None:
                self._service.link(*job, False)
            self._answers.ended(descriptor)

    # Fetch

    def _fetch_begin(self, identity: bytes, run: str | None, step: int | None, allow_unknown: bool) -> None:
        self._end_fetch(identity)
        if self._peer(identity).work is not None:
            raise FlowcheckError("fetch-begin: an earlier request of this client is still being answered")
        if sum(peer.fetch is not None for peer in self._peers.values()) >= MAX_FETCHES:
            raise FlowcheckError(f"{MAX_FETCHES} clients are being served: try again later")
        self._peer(identity).user = self._user

        def opened(session: Any) -> None:
            try:
                fetch = Fetch.open(self._number(), session, time.monotonic())
            except BaseException:
                session.close()
                raise
            self._peer(identity).fetch = fetch
            self._turn.append(identity)
            if not self._send(identity, "fetch-open", session=fetch.number, bytes=len(fetch.header)):
                self._end_fetch(identity)

        self._later(identity, "fetch-begin", lambda: self._service.open(run, step, allow_unknown), opened)

    def _fetch(self, identity: bytes, number: int) -> Fetch:
        peer = self._peers.get(identity)
        if peer is None or peer.fetch is None or peer.fetch.number != number:
            raise Revoked("this fetch has ended, it was too slow or its step is no longer held: ask again")
        return peer.fetch

    def _end_fetch(self, identity: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is None or peer.fetch is None:
            return
        fetch, peer.fetch = peer.fetch, None
        self._turn.remove(identity)
        fetch.session.close()

    def _serve_fetches(self) -> None:
        """One chunk for every client that asked for one; the order rotates."""
        for identity in list(self._turn):
            fetch = self._peers[identity].fetch
            if fetch is None or not fetch.queue:
                continue
            try:
                request, data = fetch.read()
                header = {"session": fetch.number, "request": request, "digest": digest(data)}
                if self._send(identity, "fetch-data", data, **header):
                    fetch.sent(time.monotonic())
                else:
                    fetch.blocked = True
            except FlowcheckError as error:
                self._fail(identity, "fetch-read", error)
            except Exception as error:
                log.exception("reading a step failed")
                self._fail(identity, "fetch-read", FlowcheckError(f"internal error in fetch-read: {error}"))
        if self._turn:
            self._turn.append(self._turn.pop(0))

    # Deadlines, work on the second thread, sending

    def _expire(self, now: float) -> None:
        if self._access is not None and self._access.refresh():
            self._revoke()
        limits = self._deadlines
        for identity, peer in list(self._peers.items()):
            upload, fetch = peer.upload, peer.fetch
            if upload is not None and peer.work is None and now - upload.active > limits.attach_idle:
                self._cut(identity, "attach", f"nothing arrived for {limits.attach_idle:g} s")
            if fetch is not None and now - fetch.active > limits.fetch_idle:
                self._cut(identity, "fetch", f"nothing was read for {limits.fetch_idle:g} s")
            elif fetch is not None and now - fetch.started > limits.fetch_total:
                self._cut(identity, "fetch", f"it took more than {limits.fetch_total:g} s")
            if peer.upload is None and peer.fetch is None and peer.work is None:
                del self._peers[identity]

    def _cut(self, identity: bytes, kind: str, why: str) -> None:
        self.counters["cut"] += 1
        self._fail(identity, kind, FlowcheckError(f"the {kind} was cut: {why}"))

    def _later(
        self, identity: bytes, kind: str, call: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        """Run `call` on the second thread, then `then(result)` on the loop's; errors go to the peer."""
        peer = self._peer(identity)
        if peer.work is not None:
            raise FlowcheckError(f"{kind}: an earlier request of this client is still being answered")
        work = self._worker.submit(call)
        peer.work = work

        def finish() -> None:
            peer.work = None
            try:
                then(work.result())
            except FlowcheckError as error:
                self._fail(identity, kind, error)
            except Exception as error:
                log.exception("%s failed", kind)
                self._fail(identity, kind, FlowcheckError(f"internal error in {kind}: {error}"))

        def wake(_: Future[Any]) -> None:
            self._done.append(finish)
            os.eventfd_write(self._wake, 1)

        work.add_done_callback(wake)

    def _finish_work(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._done:
            self._done.pop(0)()
        while self._told:
            self._put(self._told.popleft())

    def _send(self, identity: bytes, kind: str, data: Any = None, /, **fields: Any) -> bool:
        """Send without waiting. False if the peer's queue is full; a vanished peer loses its sessions."""
        return self._put([identity, protocol.encode(kind, **fields), *([] if data is None else [data])])

    def _put(self, frames: list[Any]) -> bool:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.counters["unsent"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._end_upload(frames[0])
            self._end_fetch(frames[0])
            return False
        return True

    def _peer(self, identity: bytes) -> Peer:
        return self._peers.setdefault(identity, Peer())

    def _number(self) -> int:
        self._numbers = self._numbers % (1 << 31) + 1
        return self._numbers


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
