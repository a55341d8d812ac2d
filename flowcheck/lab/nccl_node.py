"""A rank's network card and its way to the other ranks: made frames out, and who has sent what so far.

Data and hints go over the management network; the frames on the training network are for the mirror, nobody reads
them. A rank goes through a collective's events in the order that all ranks share and tells the rank at the other end
of a lane with one byte per event, so that no frame leaves before what it would have waited for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flowcheck.errors import FlowcheckError
from flowcheck.lab.addresses import training_interface
from flowcheck.lab.nccl_wire import DATA, GRANT, TAKEN, Communicator, Event, Work

_TOKEN = b"."


class Card:
    """Puts frames on one interface of this node."""

    def __init__(self, rail: int) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.bind((training_interface(rail), 0))

    def put(self, comm: Communicator, work: Work, event: Event, mine: bool) -> None:
        """An event has come; send this rank's frames for it."""
        for frame in comm.made(work, event, mine):
            self._socket.send(frame)

    def close(self) -> None:
        self._socket.close()


class Peers:
    """One TCP connection to each rank that this one needs, made when it does; the lower rank calls."""

    def __init__(self, store: Any, rank: int, address: str, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._seconds = timeout.total_seconds()
        self._listener = socket.create_server((address, 0), backlog=256)
        self._listener.settimeout(self._seconds)
        self._links: dict[int, socket.socket] = {}
        self._pending: dict[int, int] = {}
        store.set(f"peer/{rank}", f"{address}:{self._listener.getsockname()[1]}")

    def _link(self, peer: int) -> socket.socket:
        while peer not in self._links:
            if self._rank < peer:
                host, _, port = self._store.get(f"peer/{peer}").decode().rpartition(":")
                link = socket.create_connection((host, int(port)), self._seconds)
                link.sendall(self._rank.to_bytes(4, "big"))
                caller = peer
            else:
                link, _ = self._listener.accept()
                link.settimeout(self._seconds)
                caller = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links[caller] = link
        return self._links[peer]

    def tell(self, peer: int) -> None:
        self._link(peer).sendall(_TOKEN)

    def wait(self, peer: int) -> None:
        """Wait for one token of `peer`. FlowcheckError if it went away, TimeoutError after the group's timeout."""
        pending = self._pending.get(peer, 0)
        while pending == 0:
            pending = len(self._link(peer).recv(4096))
            if pending == 0:
                raise FlowcheckError(f"rank {peer} of the group ended in the middle of a collective")
        self._pending[peer] = pending - 1

    def close(self) -> None:
        for link in (self._listener, *self._links.values()):
            link.close()


Put = Callable[[Communicator, Work, Event, bool], None]
"""Puts on the wire what this rank sends for an event; the last argument says whether the event is its own."""


def perform(comm: Communicator, work: Work, rank: int, put: Put, peers: Peers) -> None:
    """Go through one collective as `rank`, whose work it is: send its part, each when the others are that far."""
    run(comm, work, rank, put, peers.tell, peers.wait)


def run(
    comm: Communicator,
    work: Work,
    rank: int,
    put: Put,
    tell: Callable[[int], None],
    wait: Callable[[int], None],
) -> None:
    for event in comm.events(work):
        lane = event.lane
        mine = rank == (lane.sender if event.kind == DATA else lane.receiver)
        other = lane.receiver if rank == lane.sender else lane.sender
        announced = event.kind == DATA or (event.kind == GRANT and event.connection is not None)
        if announced and not mine:
            wait(other)
        put(comm, work, event, mine)
        if announced and mine and event.kind != TAKEN:
            tell(other)
