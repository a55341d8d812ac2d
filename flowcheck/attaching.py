"""The control server's part of attaches: uploads of descriptions and initial state, one per client at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from flowcheck.clients import Clients
from flowcheck.errors import FlowcheckError
from flowcheck.service import Seeded, Service
from flowcheck.sessions import Upload
from flowcheck.workers import Workers

MAX_UPLOADS = 8


class Attaches:
    """attached: called with the descriptor of the trainer's connection, the job's token, and the ack, once the
    ack is on its way (`sent`) or could not be sent."""

    def __init__(
        self,
        service: Service,
        clients: Clients,
        workers: Workers,
        attached: Callable[[int, str, dict[str, Any], bool], None],
    ) -> None:
        self._service = service
        self._clients = clients
        self._workers = workers
        self._attached = attached
        clients.ends["attach"] = self.end

    def take(self, identity: bytes, kind: str, fields: dict[str, Any], data: Any) -> None:
        """A message of this conversation, one of the kinds attach-*."""
        if kind == "attach-chunk":
            upload = self._upload(identity, fields["session"])
            size = upload.chunk(fields["key"], fields["offset"], fields["digest"], data, time.monotonic())
            self._clients.send(identity, "attach-credit", session=upload.number, bytes=size)
        elif kind == "attach-begin":
            self._begin(identity, fields)
        elif kind == "attach-text":
            self._text(identity, fields["offset"], data)
        elif kind == "attach-checkpoint":
            self._checkpoint(identity, fields, data)
        elif kind == "attach-commit":
            self._commit(identity, fields["session"])
        else:
            self.end(identity)

    def _begin(self, identity: bytes, fields: dict[str, Any]) -> None:
        self.end(identity)
        if sum(peer.upload is not None for peer in self._clients.peers.values()) >= MAX_UPLOADS:
            raise FlowcheckError(f"{MAX_UPLOADS} other jobs are attaching: try again in a minute")
        peer = self._clients.peer(identity)
        peer.upload = Upload(self._clients.number(), time.monotonic(), **fields)
        peer.user = self._clients.user

    def _text(self, identity: bytes, offset: int, data: Any) -> None:
        upload = self._upload(identity, None)
        description = upload.text(offset, data, time.monotonic())
        if description is None:
            return

        def opened(session: Any) -> None:
            if self._clients.peer(identity).upload is not upload:
                session.abort()
                return
            upload.session, upload.active = session, time.monotonic()
            self._clients.send(identity, "attach-open", session=upload.number, run=description.run)

        def begin() -> Future[Any]:
            return self._workers.submit(lambda: self._service.begin_attach(description, upload.late))

        self._clients.later(identity, "attach-begin", begin, opened)

    def _checkpoint(self, identity: bytes, fields: dict[str, Any], data: Any) -> None:
        upload = self._upload(identity, fields["session"])
        sums = upload.checksums(fields["offset"], data, time.monotonic())
        session = upload.session
        if sums is None or session is None:
            return

        def seeded(found: Seeded) -> None:
            if self._clients.peer(identity).upload is upload:
                upload.seeded(found, time.monotonic())
                bits = np.packbits(np.array(found.missing), bitorder="little").tobytes()
                problem = None if found.problem is None else found.problem[:1000]
                self._clients.send(identity, "attach-missing", bits, session=upload.number, problem=problem)

        self._clients.later(identity, "attach-checkpoint", lambda: session.seed(fields["path"], sums), seeded)

    def _commit(self, identity: bytes, number: int) -> None:
        upload = self._upload(identity, number)
        session = upload.ready()
        upload.session = None  # from here on the other thread owns it
        source = self._clients.source

        def commit() -> dict[str, Any]:
            try:
                return session.commit()
            except BaseException:
                session.abort()
                raise

        def committed(ack: dict[str, Any]) -> None:
            if self._clients.peer(identity).upload is upload:
                self._clients.peer(identity).upload = None
            sent = self._clients.send(identity, "attach-ack", session=number, ack=ack)
            self._attached(source, upload.job, ack, sent)

        self._clients.later(identity, "attach-commit", lambda: self._workers.submit(commit), committed)

    def _upload(self, identity: bytes, number: int | None) -> Upload:
        peer = self._clients.peers.get(identity)
        if peer is None or peer.upload is None or number not in (None, peer.upload.number):
            raise FlowcheckError("no attach is open here (it may have been given up after a pause): attach again")
        return peer.upload

    def end(self, identity: bytes) -> None:
        """Give up a client's attach, if there is one."""
        peer = self._clients.peers.get(identity)
        if peer is None or peer.upload is None:
            return
        upload, peer.upload = peer.upload, None
        if upload.session is not None:
            upload.session.abort()

    def expire(self, now: float, idle: float) -> None:
        """Cut the attaches that were `idle` seconds without progress."""
        for identity, peer in list(self._clients.peers.items()):
            if peer.upload is not None and peer.work is None and now - peer.upload.active > idle:
                self._clients.cut(identity, "attach", f"nothing arrived for {idle:g} s")
