"""The memory of the NET/Socket framing as its Python side sees it: it grows, and parts of it are used again."""

from __future__ import annotations

import numpy as np

from mirror.roce_spans import CLOSE, MessageSpans
from mirror.roce_state import M_FLOW
from reconstruct.nccl import socket_state as k

__all__ = ["SocketMemory"]

_MOST = {k.NO_SPANS: 1 << 24, k.NO_ROWS: 1 << 20, k.NO_TASKS: 1 << 20, k.NO_CELLS: 1 << 16}


class SocketMemory:
    """`state` is what kernels take now: it is another one once something has grown.

    marks: as in `SocketState`; sockets, connections: at once.
    """

    def __init__(self, marks: np.ndarray, sockets: int, connections: int) -> None:
        self.state, self._held = k.fresh(marks, sockets, connections)
        self.alive: list[np.ndarray] = []
        """Bytes that spans of this call point at."""
        self._free_sockets = list(range(sockets))[::-1]
        self._spans = MessageSpans()

    def grow(self, what: int) -> bool:
        """Twice the memory of the kind that the kernel stopped for; False if that would be too much."""
        s = self.state
        now = {k.NO_SPANS: s.flow, k.NO_ROWS: s.messages, k.NO_TASKS: s.tasks, k.NO_CELLS: s.cells}[what]
        if len(now) >= _MOST[what]:
            return False
        self.state = k.grown(s, what, self._held)
        return True

    def recycle(self) -> None:
        """A new call begins: what the last one's spans spoke of may be used again."""
        s = self.state
        n, used = int(s.cursor[k.SPENT_CELLS]), int(s.cursor[k.CELLS_FREE])
        s.cells_free[used : used + n] = s.cells_spent[:n]
        s.cursor[k.CELLS_FREE], s.cursor[k.SPENT_CELLS] = used + n, 0
        # Rows go to the bottom: as long as one is not used again copies of its message can be compared.
        n, used = int(s.cursor[k.SPENT_ROWS]), int(s.cursor[k.ROWS_FREE])
        s.rows_free[n : used + n] = s.rows_free[:used].copy()
        s.rows_free[:n] = s.rows_spent[:n]
        s.cursor[k.ROWS_FREE], s.cursor[k.SPENT_ROWS] = used + n, 0
        s.cursor[[k.AT, k.DONE, k.SPANS]] = 0
        self.alive.clear()

    def spans(self) -> MessageSpans:
        """The spans of this call."""
        s, out = self.state, self._spans
        if out.message is not s.message:
            out = self._spans = MessageSpans(
                s.flow, s.kind, s.offset, s.addr, s.length, s.ts, s.why, message=s.message
            )  # fmt: skip
        out.n = int(s.cursor[k.SPANS])
        return out

    # Sockets

    def take_socket(self, connection: int, index: int) -> int:
        """A row of `SocketState.sockets` for a socket of a connection; -1: there is no room."""
        if not self._free_sockets:
            return -1
        row = self._free_sockets.pop()
        self.state.sockets[row] = connection, index, -1, -1, 0, 0
        self.state.taken[row] = 0
        self.state.connections[connection, k.C_MEMBERS + index] = row
        return row

    def release_socket(self, row: int) -> None:
        """A socket is over for good."""
        s = self.state
        task = int(s.sockets[row, k.S_HEAD])
        while task >= 0:
            s.tasks_free[s.cursor[k.TASKS_FREE]] = task
            s.cursor[k.TASKS_FREE] += 1
            task = int(s.tasks[task, k.T_NEXT])
        self._free_sockets.append(row)

    # The end of a connection

    def close(self, connection: int, ts: int) -> None:
        """Nothing more is told of a connection: its messages will never be whole."""
        s = self.state
        s.connections[connection, k.C_STATE] = k.DEAD
        for row in np.flatnonzero((s.messages[:, M_FLOW] == connection) & (s.messages[:, k.M_TO_COME] > 0)).tolist():
            self._drop(row)
        if int(s.cursor[k.SPANS]) == len(s.flow):
            s = self.state = k.grown(s, k.NO_SPANS, self._held)
        at = int(s.cursor[k.SPANS])
        s.flow[at], s.kind[at], s.offset[at], s.addr[at], s.length[at], s.ts[at] = connection, CLOSE, 0, 0, 1, ts
        s.message[at] = -1
        s.cursor[k.SPANS] = at + 1

    def _drop(self, row: int) -> None:
        s = self.state
        message = s.messages[row]
        s.rows_spent[s.cursor[k.SPENT_ROWS]] = row
        s.cursor[k.SPENT_ROWS] += 1
        cell = int(message[k.M_CELLS])
        while cell >= 0:
            s.cells_spent[s.cursor[k.SPENT_CELLS]] = cell
            s.cursor[k.SPENT_CELLS] += 1
            cell = int(s.cells[cell, k.L_NEXT])
        message[[k.M_TO_COME, k.M_CELLS, k.M_CELL_COUNT]] = 0, -1, 0
