"""What NCCL's NET/Socket writes on the sockets of a connection, for one message after another.

A sender opens its data sockets and then the control socket to one listener, and greets on each. Every message is
announced by its length on the control socket; its bytes follow there where there are no data sockets or it is short,
else they go in turn over the data sockets. Own reading of NCCL's source (src/transport/net_socket.cc); shares nothing
with `reconstruct`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

MAGIC = 0x564AB9F2FC4B9D6C
_TYPE_SOCKET = 3
_LEAST_TASK = 1 << 16
_SHORT = 128
_MOST_THREADS, _MOST_SOCKETS = 16, 64


def data_sockets(environment: Mapping[str, str]) -> int:
    """How many data sockets a connection has, by the settings of its receiver."""
    threads = min(_MOST_THREADS, int(environment.get("NCCL_SOCKET_NTHREADS", "0")))
    return min(_MOST_SOCKETS, threads * int(environment.get("NCCL_NSOCKS_PERTHREAD", "1")))


class Writer:
    """The sender's side of one connection. release: of NCCL; sockets: data sockets."""

    def __init__(self, release: tuple[int, ...], sockets: int) -> None:
        self.sockets = sockets
        self._short = _SHORT if release >= (2, 27) else 0
        self._turn = 0

    def greetings(self) -> Iterator[tuple[int, bytes]]:
        """(socket, bytes) in the order of opening; the last one is the control socket."""
        for index in range(self.sockets + 1):
            yield index, struct.pack("<QIB", MAGIC, _TYPE_SOCKET, index)

    def message(self, payload: bytes) -> Iterator[tuple[int, bytes]]:
        """(socket, bytes) of one message."""
        length = struct.pack("<i", len(payload))
        if self.sockets == 0 or len(payload) <= self._short:
            yield self.sockets, length + payload
            return
        yield self.sockets, length
        task = max(_LEAST_TASK, (len(payload) + self.sockets - 1) // self.sockets)
        for first in range(0, len(payload), task):
            yield self._turn % self.sockets, payload[first : first + task]
            self._turn += 1
