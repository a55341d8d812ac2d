"""The control server's part of fetches: a whole step each, one chunk for every client in turn.

Chunks are read on other threads, one at a time for each client: a stored step lies on a disk, and that may hang.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from flowcheck.clients import Clients
from flowcheck.errors import FlowcheckError, Revoked
from flowcheck.service import Service
from flowcheck.sessions import Fetch, digest
from flowcheck.workers import Workers

MAX_FETCHES = 64
RETRY_S = 0.01
"""How soon a client whose queue was full is tried again."""


class Fetches:
    """openers: for opening steps, one at a time; the reading has threads of its own."""

    def __init__(self, service: Service, clients: Clients, openers: Workers) -> None:
        self._service = service
        self._clients = clients
        self._openers = openers
        self._readers = Workers(MAX_FETCHES, "flowcheck-read")
        self._turn: list[bytes] = []
        clients.ends["fetch"] = self.end

    def take(self, identity: bytes, kind: str, fields: dict[str, Any]) -> None:
        """A message of this conversation, one of the kinds fetch-*."""
        if kind == "fetch-read":
            fetch = self._fetch(identity, fields["session"])
            fetch.ask(fields["request"], fields["key"], fields["offset"], fields["length"], time.monotonic())
        elif kind == "fetch-begin":
            self._begin(identity, fields["run"], fields["step"], fields["allow_unknown"])
        else:
            self.end(identity)

    def _begin(self, identity: bytes, run: str | None, step: int | None, allow_unknown: bool) -> None:
        self.end(identity)
        peer = self._clients.peer(identity)
        if peer.work is not None:
            raise FlowcheckError("fetch-begin: an earlier request of this client is still being answered")
        if sum(other.fetch is not None for other in self._clients.peers.values()) >= MAX_FETCHES:
            raise FlowcheckError(f"{MAX_FETCHES} clients are being served: try again later")
        peer.user = self._clients.user

        def opened(session: Any) -> None:
            try:
                fetch = Fetch.open(self._clients.number(), session, time.monotonic())
            except BaseException:
                session.close()
                raise
            self._clients.peer(identity).fetch = fetch
            self._turn.append(identity)
            if not self._clients.send(identity, "fetch-open", session=fetch.number, bytes=len(fetch.header)):
                self.end(identity)

        def begin() -> Future[Any]:
            return self._openers.submit(lambda: self._service.open(run, step, allow_unknown))

        self._clients.later(identity, "fetch-begin", begin, opened)

    def _fetch(self, identity: bytes, number: int) -> Fetch:
        peer = self._clients.peers.get(identity)
        if peer is None or peer.fetch is None or peer.fetch.number != number:
            raise Revoked("this fetch has ended, it was too slow or its step is no longer held: ask again")
        return peer.fetch

    def end(self, identity: bytes) -> None:
        """End a client's fetch, if there is one; what is being read for it is read to its end first."""
        peer = self._clients.peers.get(identity)
        if peer is None or peer.fetch is None:
            return
        fetch, peer.fetch = peer.fetch, None
        self._turn.remove(identity)
        if fetch.reading is None or fetch.reading.done():
            fetch.session.close()
        else:
            fetch.reading.add_done_callback(lambda _: fetch.session.close())

    def serve(self) -> None:
        """Send one chunk to every client for whom one has been read, and have the next ones read; the order rotates."""
        for identity in list(self._turn):
            fetch = self._clients.peers[identity].fetch
            if fetch is not None and fetch.reading is not None and fetch.reading.done():
                self._send(identity, fetch, fetch.reading)
            fetch = self._clients.peers[identity].fetch  # it may have ended
            if fetch is not None and fetch.reading is None and fetch.queue:
                fetch.reading = self._readers.submit(fetch.read)
                self._clients.when_done(fetch.reading, lambda: None)
        if self._turn:
            self._turn.append(self._turn.pop(0))

    def _send(self, identity: bytes, fetch: Fetch, read: Future[tuple[int, memoryview]]) -> None:
        try:
            request, data = read.result()
            header = {"session": fetch.number, "request": request, "digest": digest(data)}
            fetch.blocked = not self._clients.send(identity, "fetch-data", data, **header)
            if not fetch.blocked:
                fetch.sent(time.monotonic())
        except FlowcheckError as error:
            self._clients.fail(identity, "fetch-read", error)
        except Exception as error:
            self._clients.fail_inside(identity, "fetch-read", error)

    @property
    def pause(self) -> float | None:
        """Seconds after which `serve` is to be called though nothing happens; None: never."""
        held = [self._clients.peers[identity].fetch for identity in self._turn]
        return RETRY_S if any(fetch is not None and fetch.blocked for fetch in held) else None

    def expire(self, now: float, idle: float, total: float) -> None:
        """Cut the fetches that were `idle` seconds without progress, or take more than `total`."""
        for identity in list(self._turn):
            fetch = self._clients.peers[identity].fetch
            if fetch is None:
                continue
            if now - fetch.active > idle:
                self._clients.cut(identity, "fetch", f"nothing was read for {idle:g} s")
            elif now - fetch.started > total:
                self._clients.cut(identity, "fetch", f"it took more than {total:g} s")

    def close(self, patience: float) -> None:
        self._readers.close(patience)
