"""What the NET/Socket kernel stops for, beyond the flows that begin and end: a start, a length that explains what came
before it or was not captured, memory that must grow."""

from __future__ import annotations

from collections import deque

from mirror.memory import address_of
from reconstruct.nccl import socket_state as k
from reconstruct.nccl.socket_kernel import take
from reconstruct.nccl.socket_memory import SocketMemory
from reconstruct.nccl.socket_search import Chunk, Search
from reconstruct.nccl.socket_table import SocketConnection, SocketTable

__all__ = ["SocketStops"]

_MOST_EARLY = 4 << 20
_MOST_SEARCHED = 16 << 20


def _size(held: Chunk) -> int:
    return int(held) if isinstance(held, int) else held.size


class SocketStops:
    """Answers stops, and keeps bytes that cannot be taken yet with their connection."""

    def __init__(self, memory: SocketMemory, table: SocketTable) -> None:
        self.resumed = 0
        """Lengths that were not captured and were found again."""
        self._memory, self._table = memory, table

    def settle(self, reason: int, ts: int) -> None:
        """Answer a stop that has to do with no span."""
        connection = self._table.connections[int(self._memory.state.cursor[k.CONNECTION])]
        if reason == k.START:
            self._table.start(connection, ts)
        elif reason == k.EXPLAINED:
            self._explain(connection)
        elif reason == k.HEADER_LOST:
            self._search(connection, ts)
        elif reason == k.DISPUTED:
            self._table.lose(connection, "two copies of bytes that hold the length of a message differ", ts)
        elif reason == k.BAD_LENGTH:
            self._table.lose(connection, "what should be the length of a message is none", ts)
        elif not self._memory.grow(reason):
            self._table.lose(connection, "it has more messages under way at once than are kept", ts)

    # Bytes that came before the length which explains them

    def keep(self, row: int, held: Chunk, start: int, ts: int) -> None:
        """What came on a socket, `row` of `SocketState.sockets`, and cannot be taken yet. start: as in `take`."""
        sockets = self._memory.state.sockets
        connection = self._table.connections[int(sockets[row, k.S_CONNECTION])]
        if connection.search is not None and row == connection.sockets[0]:
            connection.search.add(held, ts)
            self._look(connection, connection.search, ts)
            return
        connection.waiting[row] = connection.waiting.get(row, 0) + _size(held)
        if connection.waiting[row] > _MOST_EARLY:
            index = int(sockets[row, k.S_INDEX])
            self._table.lose(
                connection, f"data socket {index} is more than {_MOST_EARLY} bytes ahead of its lengths", ts
            )
            return
        connection.early.setdefault(row, deque()).append((held, start, ts))
        sockets[row, k.S_EARLY] = 1

    def _explain(self, connection: SocketConnection) -> None:
        """There are new tasks of a connection: they may be of bytes that came before."""
        for row in list(connection.early):
            waiting = connection.early.pop(row, None)
            if waiting is not None:  # what came on another one may have explained or ended it
                self._memory.state.sockets[row, k.S_EARLY] = 0
                self._replay(connection, row, waiting)

    def _replay(self, connection: SocketConnection, row: int, waiting: deque[tuple[Chunk, int, int]]) -> None:
        while waiting and not connection.reason:
            held, start, ts = waiting.popleft()
            size = _size(held)
            if not isinstance(held, int):
                self._memory.alive.append(held)
            address = 0
            if isinstance(held, int):
                self._memory.state.cursor[[k.KNOWN, k.SINCE]] = held.known, held.since
            else:
                address = address_of(held)
            used, reason = take(self._memory.state, row, address, size, start, ts)
            if row in connection.waiting:
                connection.waiting[row] -= used
            if used < size:
                rest = held.part(size - used) if isinstance(held, int) else held[used:]
                waiting.appendleft((rest, start + used if start >= 0 else -1, ts))
            if reason == k.EARLY:
                self._keep_again(connection, row, waiting, ts)
                return
            if reason != k.END_OF_SPANS:
                self.settle(reason, ts)

    def _keep_again(
        self, connection: SocketConnection, row: int, waiting: deque[tuple[Chunk, int, int]], ts: int
    ) -> None:  # fmt: skip
        search = connection.search
        if search is None:
            connection.early[row] = waiting
            self._memory.state.sockets[row, k.S_EARLY] = 1
            return
        for held, _, when in waiting:
            search.add(held, when)
        self._look(connection, search, ts)

    # A length that was not captured

    def _search(self, connection: SocketConnection, ts: int) -> None:
        """From here on bytes of the control socket are kept, until they tell the length."""
        state = self._memory.state
        row = state.connections[connection.number]
        if row[k.C_SOCKETS]:
            self._table.lose(connection, "bytes that hold the length of a message were not captured", ts)
            return
        row[k.C_STATE], connection.searching = k.SEARCHING, True
        seen = state.sizes[connection.number]
        head = int(row[k.C_VALUE]).to_bytes(4, "little")[: row[k.C_GOT]]
        connection.search = Search((seen[seen > 0] - 1).tolist(), head)

    def _look(self, connection: SocketConnection, search: Search, ts: int) -> None:
        """More of what lies behind the length is known."""
        found = search.solve()
        if found is not None:
            connection.search, connection.searching = None, False
            self.resumed += 1
            self._memory.state.connections[connection.number, k.C_STATE] = k.STARTED
            self._replay(connection, connection.sockets[0], deque((held, -1, when) for held, when in found))
        elif search.size > _MOST_SEARCHED:
            self._table.lose(connection, f"the length of a message was not captured, and {search.size} bytes behind "
                             "it do not tell it", ts)  # fmt: skip
