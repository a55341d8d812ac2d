"""A rank's part in setting a communicator up over TCP, on the training network: for a mirror that shows it too.

Real connections, opened and kept as NCCL does; nobody acts on what they say. NCCL's own variable decides where they
run: only with NCCL_SOCKET_IFNAME naming a training interface do they pass a mirrored port.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

from flowcheck.errors import FlowcheckError
from flowcheck.lab.addresses import Port, training_address, training_interface
from flowcheck.lab.nccl_wire import Communicator
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.nccl_wire_setup import Endpoint, Listeners, Stream, bootstrap, wiring

_BACKLOG = 256


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether NCCL would set communicators up over the training network."""
    return environment.get("NCCL_SOCKET_IFNAME", "").lstrip("=") == training_interface(0)


class SetUp:
    """Goes through the set-up at once. store: of the group; the kept connections are open until `close`."""

    def __init__(self, comm: Communicator, rank: int, store: Any, seconds: float) -> None:
        job = comm.job
        self._rank, self._seconds = rank, seconds
        self._address = training_address(Port(job.hosts[rank], 0), job.ipv6)
        self._open: list[socket.socket] = []
        own = {name: self._listen() for name in ("ring", "root", "peers", "first")}
        receiving = {c.ordinal: self._listen() for c in comm.of_rank(rank) if c.receiver == rank}
        told = {name: _end(one) for name, one in own.items()}
        accepting = {str(ordinal): _end(one) for ordinal, one in receiving.items()}
        store.set(f"set-up/{rank}", json.dumps(
            {"magic": secrets.randbits(63) | 1, "listens": told, "accepts": accepting}
        ))
        said = [json.loads(store.get(f"set-up/{other}")) for other in range(job.ranks)]
        listeners = {
            other: Listeners(*(_endpoint(one["listens"][name]) for name in ("ring", "root", "peers")))
            for other, one in enumerate(said)
        }
        streams = _streams(comm, job, said, listeners)
        drained = {_end(own[name]) for name in ("peers", "first")}
        by_end = {_end(one): one for one in (*own.values(), *receiving.values())}
        threads = [threading.Thread(target=self._drain, args=(by_end[end], count), daemon=True) for end, count in (
            (end, sum(stream.server == rank and stream.to == end for stream in streams)) for end in sorted(drained)
        )]  # fmt: skip
        for thread in threads:
            thread.start()
        for stream in streams:
            if stream.client == rank:
                self._say(stream)
            elif stream.server == rank and stream.to not in drained:
                self._answer(stream, by_end[stream.to])
        for thread in threads:
            thread.join(seconds)
        for one in by_end.values():
            one.close()

    def close(self) -> None:
        for one in self._open:
            one.close()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, 0), family=family, backlog=_BACKLOG)
        listener.settimeout(self._seconds)
        return listener

    def _say(self, stream: Stream) -> None:
        link = socket.create_connection(stream.to, self._seconds)
        cut = len(stream.there) - stream.tail
        link.sendall(stream.there[:cut])
        _read(link, len(stream.back))
        link.sendall(stream.there[cut:])
        self._keep(link, stream)

    def _answer(self, stream: Stream, listener: socket.socket) -> None:
        link, _ = listener.accept()
        link.settimeout(self._seconds)
        _read(link, len(stream.there) - stream.tail)
        link.sendall(stream.back)
        _read(link, stream.tail)
        self._keep(link, stream)

    def _keep(self, link: socket.socket, stream: Stream) -> None:
        if stream.kept:
            self._open.append(link)
        else:
            link.close()

    def _drain(self, listener: socket.socket, count: int) -> None:
        """Messages that come in any order; nothing is answered."""
        for _ in range(count):
            link, _ = listener.accept()
            link.settimeout(self._seconds)
            while link.recv(65536):
                pass
            link.close()


def _streams(comm: Communicator, job: Job, said: list[Any], listeners: Mapping[int, Listeners]) -> list[Stream]:
    """All connections of the set-up, in an order that all ranks share."""
    magic = said[0]["magic"]
    accepts = {int(o): _endpoint(end) for one in said for o, end in one["accepts"].items()}
    every = {c.ordinal: c for rank in range(job.ranks) for c in comm.of_rank(rank)}
    first = _endpoint(said[0]["listens"]["first"])
    return [
        *bootstrap(job, magic, first, listeners),
        *wiring(job, magic, every.values(), listeners, lambda one: accepts[one.ordinal]),
    ]


def _end(listener: socket.socket) -> Endpoint:
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def _endpoint(told: Any) -> Endpoint:
    return str(told[0]), int(told[1])


def _read(link: socket.socket, size: int) -> None:
    while size:
        data = link.recv(min(size, 65536))
        if not data:
            raise FlowcheckError("a rank of the group ended while the communicator was set up")
        size -= len(data)
