"""A rank's NET/Socket connections: real TCP on the training network, for what NCCL would write there.

The bytes are for the mirror; a thread of the receiver takes them from its sockets and throws them away.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from typing import Any

from flowcheck.lab.addresses import training_address
from flowcheck.lab.nccl_wire import DATA, Communicator, Event, Work
from flowcheck.lab.nccl_wire_link import Connection
from flowcheck.lab.nccl_wire_sockets import Writer, data_sockets

_BACKLOG = 128


class SocketCard:
    """The connections of one communicator that end at `rank`. store: of the group."""

    def __init__(self, comm: Communicator, rank: int, store: Any, seconds: float) -> None:
        self._rank, self._seconds = rank, seconds
        self._address = training_address(comm.job.ports[rank], comm.job.ipv6)
        self._writers: dict[int, tuple[Writer, list[socket.socket]]] = {}
        self._taken: list[socket.socket] = []
        own = comm.of_rank(rank)
        sockets = data_sockets(os.environ)
        listeners = {one.ordinal: self._listen() for one in own if one.receiver == rank}
        for ordinal, listener in listeners.items():
            store.set(f"socket/{ordinal}", json.dumps([*listener.getsockname()[:2], sockets]))
        self._drain = threading.Thread(target=self._take, args=(list(listeners.values()), sockets), daemon=True)
        self._drain.start()
        for one in own:
            if one.sender == rank:
                self._connect(comm.job.release, one, json.loads(store.get(f"socket/{one.ordinal}")))

    def put(self, comm: Communicator, work: Work, event: Event, mine: bool) -> None:
        """An event has come; what this rank has to write for it."""
        if event.kind != DATA or event.connection is None or not mine:
            return
        step = event.base + event.index * work.layout.steps
        writer, links = self._writers[event.connection.ordinal]
        for index, data in writer.message(work.payload(event.lane, event.lane.pieces[event.index], step).tobytes()):
            links[index].sendall(data)

    def close(self) -> None:
        for _, links in self._writers.values():
            for link in links:
                link.close()
        self._drain.join(self._seconds)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        return socket.create_server((self._address, 0), family=family, backlog=_BACKLOG)

    def _connect(self, release: tuple[int, ...], one: Connection, told: list[Any]) -> None:
        host, port, sockets = told
        writer, links = Writer(release, sockets), []
        for _, greeting in writer.greetings():
            link = socket.create_connection((host, port), self._seconds)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(greeting)
            links.append(link)
        self._writers[one.ordinal] = writer, links

    def _take(self, listeners: list[socket.socket], sockets: int) -> None:
        """Until every sender has closed."""
        with selectors.DefaultSelector() as selector:
            left = dict.fromkeys(listeners, sockets + 1)
            for listener in listeners:
                selector.register(listener, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    one: Any = key.fileobj
                    if one in left:
                        selector.register(one.accept()[0], selectors.EVENT_READ)
                        left[one] -= 1
                        if left[one]:
                            continue
                    elif one.recv(1 << 18):
                        continue
                    selector.unregister(one)
                    one.close()
