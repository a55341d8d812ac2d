"""The kernel of the NET/Socket framing: TCP spans in, spans of messages out, a reason to stop.

`run` goes through TCP spans and stops where only Python can answer: a hello, an end, a header whose tasks explain bytes
that came before it, memory that must grow. It is called again and goes on where it stopped. Lengths come from the wire
and are checked; nothing else there is believed.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from mirror.memory import copy, load_u8
from mirror.roce_spans import BEGIN, CONFLICT, DATA, END
from mirror.roce_state import M_FIRST, M_FLOW, M_IMM, M_KIND, M_LENGTH, M_MTU, M_PACKETS, M_RKEY, M_VA
from mirror.roce_wire import WRITE
from mirror.spans import CLOSE, HOLE, OPEN
from reconstruct.nccl import socket_state as k
from reconstruct.nccl.heads import SOCKET
from reconstruct.nccl.script import immediate
from reconstruct.nccl.socket_state import SocketState

__all__ = ["HELLO_BYTES", "MOST_MESSAGE", "run", "take"]

HELLO_BYTES = 13
MOST_MESSAGE = 64 << 20
_MARGIN = 16  # spans that one step of `take` makes at most, but for unfilled units, and cells that it uses


@njit(cache=True, nogil=True)
def _emit(s: SocketState, kind: int, row: int, offset: int, addr: int, length: int, ts: int) -> None:
    at = s.cursor[k.SPANS]
    s.flow[at], s.kind[at], s.message[at] = s.messages[row, M_FLOW], kind, row
    s.offset[at], s.addr[at], s.length[at], s.ts[at] = offset, addr, length, ts
    s.cursor[k.SPANS] = at + 1


@njit(cache=True, nogil=True)
def _piece(s: SocketState, row: int, unit: int, begin: int, addr: int, size: int, whole: int, ts: int) -> None:
    """`size` bytes, from `begin` on, of a unit of `whole` bytes that does not come in one piece."""
    message = s.messages[row]
    cell = message[k.M_CELLS]
    before: Any = -1
    while cell >= 0 and s.cells[cell, k.L_UNIT] != unit:
        before, cell = cell, s.cells[cell, k.L_NEXT]
    if cell < 0:
        if s.cursor[k.CELLS_FREE] == 0:
            _emit(s, DATA, row, unit * k.UNIT + begin, addr, size, ts)
            return
        s.cursor[k.CELLS_FREE] -= 1
        cell = s.cells_free[s.cursor[k.CELLS_FREE]]
        fresh = s.cells[cell]
        fresh[k.L_UNIT], fresh[k.L_FILLED], fresh[k.L_RUNS], fresh[k.L_NEXT] = unit, 0, 0, message[k.M_CELLS]
        message[k.M_CELLS], before = cell, -1
        message[k.M_CELL_COUNT] += 1
    c = s.cells[cell]
    for i in range(c[k.L_RUNS]):
        if c[k.L_RUN + 2 * i + 1] == begin:
            c[k.L_RUN + 2 * i + 1] = begin + size
            break
    else:
        if c[k.L_RUNS] == k.MOST_RUNS:
            _emit(s, DATA, row, unit * k.UNIT + begin, addr, size, ts)
            return
        at = k.L_RUN + 2 * c[k.L_RUNS]
        c[at], c[at + 1] = begin, begin + size
        c[k.L_RUNS] += 1
    copy(c[k.L_ADDRESS] + begin, addr, size)
    c[k.L_FILLED] += size
    if c[k.L_FILLED] == whole:
        _emit(s, DATA, row, unit * k.UNIT, c[k.L_ADDRESS], whole, ts)
        if before < 0:
            message[k.M_CELLS] = c[k.L_NEXT]
        else:
            s.cells[before, k.L_NEXT] = c[k.L_NEXT]
        message[k.M_CELL_COUNT] -= 1
        _spend(s, cell)


@njit(cache=True, nogil=True)
def _spend(s: SocketState, cell: int) -> None:
    """A cell is over; its bytes stay until the next call."""
    s.cells_spent[s.cursor[k.SPENT_CELLS]] = cell
    s.cursor[k.SPENT_CELLS] += 1


@njit(cache=True, nogil=True)
def _flush(s: SocketState, row: int, ts: int) -> None:
    """Nothing more comes of a message: its units that were not filled."""
    cell = s.messages[row, k.M_CELLS]
    while cell >= 0:
        c = s.cells[cell]
        for i in range(c[k.L_RUNS]):
            begin, end = c[k.L_RUN + 2 * i], c[k.L_RUN + 2 * i + 1]
            _emit(s, DATA, row, c[k.L_UNIT] * k.UNIT + begin, c[k.L_ADDRESS] + begin, end - begin, ts)
        _spend(s, cell)
        cell = c[k.L_NEXT]
    s.messages[row, k.M_CELLS], s.messages[row, k.M_CELL_COUNT] = -1, 0


@njit(cache=True, nogil=True)
def _why(s: SocketState) -> None:
    """The next span is a HOLE."""
    why = s.why[s.cursor[k.SPANS]]
    why[0], why[1] = s.cursor[k.KNOWN], s.cursor[k.SINCE]


@njit(cache=True, nogil=True)
def _bytes(s: SocketState, row: int, offset: int, addr: int, count: int, ts: int) -> None:
    """Bytes of a message, or with address 0 a hole."""
    message = s.messages[row]
    size, end = message[M_LENGTH], offset + count
    message[k.M_TO_COME] -= count
    if addr == 0:
        _why(s)
        _emit(s, HOLE, row, offset, 0, count, ts)
        message[k.M_HOLED] = 1
    while addr != 0 and offset < end:
        unit = offset // k.UNIT
        low = unit * k.UNIT
        high = min(low + k.UNIT, size)
        part: Any = 0
        if offset == low and end >= high:
            part = (end if end == size else end // k.UNIT * k.UNIT) - offset
            _emit(s, DATA, row, offset, addr, part, ts)
        else:
            part = min(high, end) - offset
            _piece(s, row, unit, offset - low, addr, part, high - low, ts)
        offset, addr = offset + part, addr + part


@njit(cache=True, nogil=True)
def _finish(s: SocketState, row: int, ts: int) -> None:
    """If all of a message was given or is a hole, it is over."""
    message = s.messages[row]
    if message[k.M_TO_COME] == 0:
        _emit(s, END, row, 0, 0, 1 - message[k.M_HOLED], ts)
        s.rows_spent[s.cursor[k.SPENT_ROWS]] = row
        s.cursor[k.SPENT_ROWS] += 1


@njit(cache=True, nogil=True)
def _remember(sizes: Any, size: int) -> None:
    first = size * 2654435761 >> 12
    for i in range(8):
        at = (first + i) % k.SIZES
        if sizes[at] == size + 1:
            return
        if sizes[at] == 0:
            sizes[at] = size + 1
            return
    sizes[first % k.SIZES] = size + 1


@njit(cache=True, nogil=True)
def _begin(s: SocketState, connection: int, size: int, ts: int) -> bool:
    """A message begins; whether bytes of it may have come before."""
    c = s.connections[connection]
    s.cursor[k.ROWS_FREE] -= 1
    row = s.rows_free[s.cursor[k.ROWS_FREE]]
    m = s.messages[row]
    m[M_FLOW], m[M_FIRST], m[M_PACKETS], m[M_KIND], m[M_LENGTH] = connection, c[k.C_COUNT], 1, WRITE, size
    m[M_VA], m[M_RKEY], m[M_IMM], m[M_MTU] = -1, 0, immediate(size, False), 0
    m[k.M_TO_COME], m[k.M_HOLED], m[k.M_CELLS], m[k.M_CELL_COUNT] = size, 0, -1, 0
    c[k.C_COUNT] += 1
    _remember(s.sizes[connection], size)
    _emit(s, BEGIN, row, 0, 0, 1, ts)
    early = False
    if size == 0:
        _finish(s, row, ts)
    elif c[k.C_SOCKETS] == 0 or size <= c[k.C_INLINE]:
        c[k.C_ROW], c[k.C_OFFSET], c[k.C_LEFT] = row, 0, size
    else:
        each = max(c[k.C_TASK], -(-size // c[k.C_SOCKETS]))
        for offset in range(0, size, each):
            socket = s.sockets[c[k.C_MEMBERS + c[k.C_TURN] % c[k.C_SOCKETS]]]
            c[k.C_TURN] += 1
            s.cursor[k.TASKS_FREE] -= 1
            task = s.tasks_free[s.cursor[k.TASKS_FREE]]
            t = s.tasks[task]
            t[k.T_ROW], t[k.T_OFFSET], t[k.T_LEFT], t[k.T_NEXT] = row, offset, min(each, size - offset), -1
            if socket[k.S_HEAD] < 0:
                socket[k.S_HEAD] = task
            else:
                s.tasks[socket[k.S_TAIL], k.T_NEXT] = task
            socket[k.S_TAIL] = task
            early |= socket[k.S_EARLY] != 0
    return early


@njit(cache=True, nogil=True)
def _control(s: SocketState, connection: int, addr: int, count: int, ts: int) -> tuple[int, int]:
    """(bytes taken, END_OF_SPANS or why to stop)"""
    c = s.connections[connection]
    if c[k.C_LEFT] > 0:
        used = min(c[k.C_LEFT], count)
        row = c[k.C_ROW]
        _bytes(s, row, c[k.C_OFFSET], addr, used, ts)
        c[k.C_OFFSET] += used
        c[k.C_LEFT] -= used
        if c[k.C_LEFT] == 0:
            _flush(s, row, ts)
        _finish(s, row, ts)
        return used, k.END_OF_SPANS
    if addr == 0:
        at = s.cursor[k.SPANS]
        _why(s)
        s.flow[at], s.kind[at], s.message[at], s.offset[at] = connection, HOLE, -1, c[k.C_COUNT]
        s.addr[at], s.length[at], s.ts[at] = 0, 0, ts
        s.cursor[k.SPANS] = at + 1
        return 0, k.HEADER_LOST
    used = min(4 - c[k.C_GOT], count)
    for i in range(used):
        c[k.C_VALUE] |= load_u8(addr + i) << 8 * (c[k.C_GOT] + i)
    c[k.C_GOT] += used
    if c[k.C_GOT] == 4:
        size = c[k.C_VALUE]
        c[k.C_GOT] = c[k.C_VALUE] = 0
        if size > MOST_MESSAGE:
            return used, k.BAD_LENGTH
        if _begin(s, connection, size, ts):
            return used, k.EXPLAINED
    return used, k.END_OF_SPANS


@njit(cache=True, nogil=True)
def _taken(s: SocketState, socket: int, start: int, count: int, row: int, offset: int) -> None:
    """`count` bytes of a socket's stream from byte `start` on (-1: not known) went to byte `offset` of a message."""
    if start < 0 or count == 0:
        return
    own, number = s.sockets[socket], s.messages[row, M_FIRST]
    last = s.taken[socket, own[k.S_NEWEST]]
    if (last[k.P_START] + last[k.P_LENGTH] == start and last[k.P_ROW] == row and last[k.P_NUMBER] == number
            and last[k.P_OFFSET] + last[k.P_LENGTH] == offset and last[k.P_LENGTH] > 0):
        last[k.P_LENGTH] += count
        return
    own[k.S_NEWEST] = (own[k.S_NEWEST] + 1) % k.TAKEN
    fresh = s.taken[socket, own[k.S_NEWEST]]
    fresh[k.P_START], fresh[k.P_LENGTH], fresh[k.P_ROW], fresh[k.P_OFFSET], fresh[k.P_NUMBER] = (
        start, count, row, offset, number)


@njit(cache=True, nogil=True)
def _again(s: SocketState, socket: int, kind: int, start: int, addr: int, count: int, ts: int) -> int:
    """Another copy of bytes of a stream came (DUPLICATE) or differs from the first (CONFLICT): told of the messages
    that they went to, as long as these are known. END_OF_SPANS or why to stop."""
    own = s.sockets[socket]
    connection = own[k.S_CONNECTION]
    if s.connections[connection, k.C_STATE] == k.DEAD:
        return k.END_OF_SPANS
    if s.cursor[k.SPANS] + k.TAKEN > len(s.flow):
        return k.NO_SPANS
    told: Any = 0
    at = own[k.S_NEWEST]
    for _ in range(k.TAKEN):
        piece = s.taken[socket, at]
        low = max(start, piece[k.P_START])
        high = min(start + count, piece[k.P_START] + piece[k.P_LENGTH])
        if piece[k.P_START] + piece[k.P_LENGTH] <= start:
            break
        if low < high:
            told += high - low
            message = s.messages[piece[k.P_ROW]]
            if message[M_FLOW] == connection and message[M_FIRST] == piece[k.P_NUMBER]:
                _emit(s, kind, piece[k.P_ROW], piece[k.P_OFFSET] + low - piece[k.P_START], addr + low - start,
                      high - low, ts)
        at = (at - 1) % k.TAKEN
    if kind == CONFLICT and told < count:
        s.cursor[k.SOCKET], s.cursor[k.CONNECTION] = socket, connection
        return k.DISPUTED
    return k.END_OF_SPANS


@njit(cache=True, nogil=True)
def take(s: SocketState, socket: int, addr: int, count: int, start: int, ts: int) -> tuple[int, int]:
    """The next `count` bytes of a socket, its hello not counted; addr 0: they are a hole, as KNOWN and SINCE tell.
    start: where they lie in the socket's stream, -1: not known.

    Returns (how many of them were taken, END_OF_SPANS or why to stop).
    """
    own = s.sockets[socket]
    connection = own[k.S_CONNECTION]
    c = s.connections[connection]
    used: Any = 0
    s.cursor[k.SOCKET], s.cursor[k.CONNECTION] = socket, connection
    while used < count:
        if c[k.C_STATE] == k.DEAD:
            return count, k.END_OF_SPANS
        if c[k.C_STATE] == k.OPENING:
            return used, k.START
        control = own[k.S_INDEX] == c[k.C_SOCKETS]
        task = own[k.S_HEAD]
        row: Any = -1
        if control and c[k.C_LEFT] > 0:
            row = c[k.C_ROW]
        elif not control and task >= 0:
            row = s.tasks[task, k.T_ROW]
        flushed = k.MOST_RUNS * s.messages[row, k.M_CELL_COUNT] if row >= 0 else 0
        if s.cursor[k.SPANS] + _MARGIN + flushed > len(s.flow):
            return used, k.NO_SPANS
        if s.cursor[k.ROWS_FREE] == 0:
            return used, k.NO_ROWS
        if s.cursor[k.TASKS_FREE] <= k.MOST_SOCKETS:
            return used, k.NO_TASKS
        if s.cursor[k.CELLS_FREE] < _MARGIN:
            return used, k.NO_CELLS
        here: Any = addr + used if addr else 0
        left = count - used
        if control:
            if c[k.C_STATE] == k.SEARCHING:
                return used, k.EARLY
            place = c[k.C_OFFSET]
            took, reason = _control(s, connection, here, left, ts)
            if row >= 0:
                _taken(s, socket, start + used if start >= 0 else -1, took, row, place)
            used += took
            if reason != k.END_OF_SPANS:
                return used, reason
            continue
        if task < 0 or own[k.S_EARLY]:
            return used, k.EARLY
        t = s.tasks[task]
        took = min(t[k.T_LEFT], left)
        _taken(s, socket, start + used if start >= 0 else -1, took, row, t[k.T_OFFSET])
        _bytes(s, row, t[k.T_OFFSET], here, took, ts)
        t[k.T_OFFSET] += took
        t[k.T_LEFT] -= took
        used += took
        if t[k.T_LEFT] == 0:
            own[k.S_HEAD] = t[k.T_NEXT]
            s.tasks_free[s.cursor[k.TASKS_FREE]] = task
            s.cursor[k.TASKS_FREE] += 1
        if s.messages[row, k.M_TO_COME] == 0:
            _flush(s, row, ts)
        _finish(s, row, ts)
    return used, k.END_OF_SPANS


@njit(cache=True, nogil=True)
def run(
    s: SocketState, flow: Any, kind: Any, offset: Any, addr: Any, length: Any, ts: Any, why: Any, count: int
) -> int:  # fmt: skip
    """Take the TCP spans from cursor[AT] on, and of that one from byte cursor[DONE] on; END_OF_SPANS or why to stop.

    flow .. why: the arrays of `mirror.spans.Spans`, `count` of them.
    """
    cursor = s.cursor
    for i in range(cursor[k.AT], count):
        socket, what = s.role[flow[i]], kind[i]
        reason: Any = k.END_OF_SPANS
        if what == DATA or what == HOLE:  # noqa: SIM109  a tuple is slow here
            if socket >= 0:
                done = cursor[k.DONE] if i == cursor[k.AT] else 0
                done = max(done, HELLO_BYTES - offset[i])
                if done < length[i]:
                    if what == HOLE:
                        cursor[k.KNOWN], cursor[k.SINCE] = why[i, 0], why[i, 1]
                    took, reason = take(s, socket, addr[i] + done if what == DATA else 0, length[i] - done,
                                        offset[i] + done, ts[i])
                    cursor[k.DONE] = done + took
            elif socket == k.COLLECTING or (offset[i] == 0 and what == DATA and s.marks[flow[i]] & SOCKET):
                reason = k.HELLO
        elif (what == OPEN or what == CLOSE) and socket != k.NOBODY:  # noqa: SIM109
            reason = k.CLOSED
        elif socket >= 0:
            reason = _again(s, socket, what, offset[i], addr[i], length[i], ts[i])
        if reason != k.END_OF_SPANS:
            cursor[k.AT], cursor[k.FLOW] = i, flow[i]
            return reason
        cursor[k.DONE] = 0
    cursor[k.AT] = count
    return k.END_OF_SPANS
