"""Memory of the NET/Socket framing, in the form that kernels take.

A connection is a control socket and n data sockets. A message that is under way is a row of `messages`, in the columns
of RoCE's (`mirror.roce_state.M_...`), so that who reads messages need not know which network brought them. What is left
of it on a data socket is a task, in a list per socket. A unit of UNIT bytes of a message whose bytes come in several
pieces is put together in a cell: payload formats are decoded in whole units, and TCP cuts anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mirror.memory import address_of
from mirror.roce_state import M_COLUMNS

__all__ = ["MOST_SOCKETS", "UNIT", "WHOLE", "SocketState", "fresh", "grown"]

UNIT = 1024
SIZES = 1024
WHOLE = 1 << 30
"""Path MTU, as it were: no message is longer, so each is one packet."""
MOST_SOCKETS = 64

NOBODY, COLLECTING = -1, -2
"""Of `role`: not of a connection; its hello comes in several pieces."""

# Columns of `sockets`.
S_CONNECTION, S_INDEX, S_HEAD, S_TAIL, S_EARLY, S_NEWEST = range(6)
SOCKET_WORDS = 6
# S_HEAD, S_TAIL: first and last task, -1: none; S_EARLY: bytes are kept that came before their header; S_NEWEST: of its
# `taken`.

# Columns of `taken`: where bytes of a socket's stream went lately, so that further copies of them can be compared. From
# byte P_START of the stream on, P_LENGTH of them, to byte P_OFFSET of message number P_NUMBER, in row P_ROW.
P_START, P_LENGTH, P_ROW, P_OFFSET, P_NUMBER = range(5)
TAKEN = 64

# Columns of `connections`; from C_MEMBERS on the rows of its sockets, by index.
C_STATE, C_SOCKETS, C_TURN, C_COUNT, C_GOT, C_VALUE, C_ROW, C_OFFSET, C_LEFT, C_INLINE, C_TASK = range(11)
C_MEMBERS = 11
CONNECTION_WORDS = C_MEMBERS + MOST_SOCKETS + 1
# C_SOCKETS: data sockets; C_TURN: tasks so far; C_COUNT: headers read; C_GOT, C_VALUE: bytes of a header and what they
# say; C_ROW, C_OFFSET, C_LEFT: the message that the control socket itself carries; C_INLINE: longest message that does
# so though there are data sockets; C_TASK: least bytes of a task.

FREE, OPENING, STARTED, SEARCHING, DEAD = range(5)
"""Of C_STATE."""

# Columns of `tasks` and of `cells`.
T_ROW, T_OFFSET, T_LEFT, T_NEXT = range(4)
L_UNIT, L_FILLED, L_ADDRESS, L_NEXT, L_RUNS, L_RUN = range(6)
MOST_RUNS = 4
CELL_WORDS = L_RUN + 2 * MOST_RUNS
# L_FILLED: bytes there; L_RUNS, L_RUN: of so many contiguous runs begin and end, in the unit.

# Columns of a message's row beyond those for consumers: bytes to come, whether there are holes, its first cell and how
# many it has.
M_TO_COME, M_HOLED, M_CELLS, M_CELL_COUNT = 9, 10, 11, 12

# `cursor`: where the kernel stands, what it stopped for, and how much is in use.
(AT, DONE, FLOW, SOCKET, CONNECTION, SPANS, ROWS_FREE, TASKS_FREE, CELLS_FREE, SPENT_ROWS, SPENT_CELLS, KNOWN,
 SINCE) = range(13)
CURSOR = 13
# KNOWN, SINCE: why of the HOLE at hand

# Why the kernel stops.
(END_OF_SPANS, HELLO, CLOSED, START, EARLY, EXPLAINED, NO_SPANS, NO_ROWS, NO_TASKS, NO_CELLS, HEADER_LOST,
 BAD_LENGTH, DISPUTED) = range(13)


class SocketState(NamedTuple):
    """All memory, in the form that kernels take."""

    marks: np.ndarray
    """uint8[flows]: `heads.Heads.marks`."""
    role: np.ndarray
    """int32[flows]: row of `sockets`, NOBODY or COLLECTING."""
    sockets: np.ndarray
    taken: np.ndarray
    """int64[sockets, TAKEN, 5]: a ring in the order of the stream, from S_NEWEST back."""
    connections: np.ndarray
    messages: np.ndarray
    """int64[rows, M_COLUMNS]"""
    sizes: np.ndarray
    """int32[connections, SIZES]: lengths that a connection has shown, plus 1, by their hash; 0: none."""
    tasks: np.ndarray
    cells: np.ndarray
    rows_free: np.ndarray
    """int64: free rows, as a stack of cursor[ROWS_FREE]; so are tasks and cells."""
    tasks_free: np.ndarray
    cells_free: np.ndarray
    rows_spent: np.ndarray
    """int64: rows that are over, but that spans of this call still speak of; so are cells."""
    cells_spent: np.ndarray
    cursor: np.ndarray
    flow: np.ndarray
    """Spans made by this call, fields as in `MessageSpans`; cursor[SPANS] of them."""
    kind: np.ndarray
    offset: np.ndarray
    addr: np.ndarray
    length: np.ndarray
    ts: np.ndarray
    why: np.ndarray
    message: np.ndarray


def fresh(marks: np.ndarray, sockets: int, connections: int) -> tuple[SocketState, list[np.ndarray]]:
    """Empty memory for the flows that have `marks`, and what keeps the cells' bytes alive."""
    none = np.zeros(0, np.int64)
    state = SocketState(
        marks, np.full(len(marks), NOBODY, np.int32), np.zeros((sockets, SOCKET_WORDS), np.int64),
        np.zeros((sockets, TAKEN, 5), np.int64),
        np.zeros((connections, CONNECTION_WORDS), np.int64), np.zeros((0, M_COLUMNS), np.int64),
        np.zeros((connections, SIZES), np.int32),
        np.zeros((0, 4), np.int64), np.zeros((0, CELL_WORDS), np.int64), none, none, none, none, none,
        np.zeros(CURSOR, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int8), none, none, none, none,
        np.zeros((0, 2), np.int64), np.zeros(0, np.int32),
    )  # fmt: skip
    held: list[np.ndarray] = []
    for what in (NO_SPANS, NO_ROWS, NO_TASKS, NO_CELLS):
        state = grown(state, what, held)
    return state, held


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    longer = np.zeros((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _more_free(stack: np.ndarray, used: int, old: int, new: int) -> np.ndarray:
    """A stack of `used` free numbers, and old..new on top."""
    longer = np.zeros(new, np.int64)
    longer[:used] = stack[:used]
    longer[used : used + new - old] = np.arange(new - 1, old - 1, -1)
    return longer


def grown(s: SocketState, what: int, held: list[np.ndarray]) -> SocketState:
    """Twice the memory of the kind that the kernel stopped for; new cells' bytes are appended to `held`."""
    c = s.cursor
    if what == NO_SPANS:
        names = ("flow", "kind", "offset", "addr", "length", "ts", "why", "message")
        size = max(1024, 2 * len(s.flow))
        return s._replace(**{name: _longer(getattr(s, name), size) for name in names})
    if what == NO_ROWS:
        old, new = len(s.messages), max(1024, 2 * len(s.messages))
        free = _more_free(s.rows_free, int(c[ROWS_FREE]), old, new)
        c[ROWS_FREE] += new - old
        return s._replace(messages=_longer(s.messages, new), rows_free=free, rows_spent=_longer(s.rows_spent, new))
    if what == NO_TASKS:
        old, new = len(s.tasks), max(1024, 2 * len(s.tasks))
        free = _more_free(s.tasks_free, int(c[TASKS_FREE]), old, new)
        c[TASKS_FREE] += new - old
        return s._replace(tasks=_longer(s.tasks, new), tasks_free=free)
    old, new = len(s.cells), max(256, 2 * len(s.cells))
    free = _more_free(s.cells_free, int(c[CELLS_FREE]), old, new)
    c[CELLS_FREE] += new - old
    cells = _longer(s.cells, new)
    held.append(np.zeros(UNIT * (new - old), np.uint8))
    cells[old:, L_ADDRESS] = address_of(held[-1]) + UNIT * np.arange(new - old)
    return s._replace(cells=cells, cells_free=free, cells_spent=_longer(s.cells_spent, new))
