"""The kernel of RoCE reassembly: a block of datagrams into spans. Packets that simply are the next ones of their
messages take the short cut of `mirror.roce_run`; what happens to others is in `mirror.roce_stream`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mirror.flows import EPOCH, SEED, FlowTable, add, find, flow_table, mix
from mirror.internal import internal
from mirror.memory import load_be16, load_be32, load_u8
from mirror.reorder import CLOCK, REVIEWED, USED
from mirror.roce_loss import abandon, flush_flow, force, reset, review
from mirror.roce_pairs import acknowledge, match
from mirror.roce_pool import retire
from mirror.roce_run import MIDDLE, run
from mirror.roce_state import (
    CRC_BAD,
    CRC_OK,
    CRC_REFUSED,
    CRC_UNCHECKED,
    FOREIGN,
    FOREIGN_CNP,
    FOREIGN_OTHER,
    FOREIGN_UC,
    FOREIGN_UD,
    ICRC_BAD,
    ICRC_OK,
    MACHINE,
    PACKETS,
    PEER,
    PORT,
    REQUESTS,
    TABLE_FULL,
    Machine,
    begin_call,
    machine,
)
from mirror.roce_stream import MASK, refused, request, response
from mirror.roce_wire import ACKNOWLEDGE, CLASS, HEADERS, RESPONSE, SEND, WRITE, icrc

REVIEW_EVERY = 1_000_000                 # ns of frame time between two looks at the waiting list
_CNP = 0x81


@internal()
def _foreign(m: Machine, opcode: int) -> None:
    m.counters[FOREIGN] += 1
    service = opcode >> 5
    m.counters[FOREIGN_CNP if opcode == _CNP else FOREIGN_UD if service == 3 else FOREIGN_UC if service == 1
               else FOREIGN_OTHER] += 1


@internal()
def _add(m: Machine, table: FlowTable, h: int, a: int, b: int, c: int, d: int, e: int, port: int, ts: int) -> int:
    """A new flow with this key; -1 if the table is full."""
    flow, recycled = add(table, h, a, b, c, d, e)
    if flow < 0:
        m.counters[TABLE_FULL] += 1
        return -1
    if recycled:
        abandon(m, flow, ts)
    reset(m, flow)
    m.state[flow, PORT] = port
    return flow


@internal()
def _checked(m: Machine, flow: int, ip: int, udp: int, stop: int, end: int) -> bool:
    """Check the invariant CRC, whose bytes are the last four before `stop`; False: refuse the packet.

    A bad one is refused where most of the flow's are good. Some sources write none that is: that is for the counters.
    """
    result = icrc(ip, udp, stop - 4) if stop <= end else -1
    row = m.state[flow]
    if result < 0:
        m.counters[CRC_UNCHECKED] += 1
    elif result:
        row[ICRC_OK] += 1
        m.counters[CRC_OK] += 1
    else:
        row[ICRC_BAD] += 1
        m.counters[CRC_BAD] += 1
        if row[ICRC_OK] > row[ICRC_BAD]:
            m.counters[CRC_REFUSED] += 1
            return False
    return True


@njit(cache=True, nogil=True)
def feed(where: np.ndarray, datagrams: np.ndarray, n: int, now: int, check: bool, grace: int, short: int,
         long: int) -> None:
    """Take `n` rows of Datagrams; spans of all that they settle. `where`: handle of a Machine and a FlowTable."""
    m, table = machine(where, 0), flow_table(where, MACHINE)
    begin_call(m)
    state, meta, counters, messages = m.state, m.meta, m.counters, m.messages
    table.meta[EPOCH] += 1
    epoch, seed = table.meta[EPOCH], table.meta[SEED]
    slots, key, touched = table.slots, table.key, table.touched
    recent = np.full(256, -1)            # by queue pair number: the flow last found; saves the hash
    clock = meta[CLOCK]
    cells = m.cells.shape[0]
    rows, following = datagrams.ctypes.data, 0
    while following < n:
        if load_u8(datagrams[following, 1] + 8) == MIDDLE:
            following, clock = run(m, state.ctypes.data, messages.ctypes.data, key.ctypes.data, recent, rows,
                                   following, n, clock, now, check)
            if following == n:
                break
        i = following
        following += 1
        ip, udp, end, limit = datagrams[i, 0], datagrams[i, 1], datagrams[i, 2], datagrams[i, 3]
        ts = datagrams[i, 4]
        if clock < ts <= now:
            clock = ts
        if end - udp < 20:
            counters[FOREIGN] += 1
            counters[FOREIGN_OTHER] += 1
            continue
        # The UDP length is the better end, if it can be: the IP header may not tell one.
        size = load_be16(udp + 4)
        stop = udp + size if 24 <= size <= limit - udp else limit
        bth = udp + 8
        opcode = load_u8(bth)
        flags = load_u8(bth + 1)
        if opcode > 31 or flags & 15 or CLASS[opcode & 31] < 0:
            _foreign(m, opcode)
            continue
        pair = load_be32(bth + 4) & MASK
        psn = load_be32(bth + 8) & MASK
        kind = CLASS[opcode]
        payload = bth + HEADERS[opcode]
        length = stop - payload - 4 - (flags >> 4 & 3)
        if length < 0 or pair < 2 or payload > end:
            counters[FOREIGN] += 1
            counters[FOREIGN_OTHER] += 1
            continue
        # Helpers that take all of `m` cost more than what is done here, so the usual way calls none.
        if load_u8(ip) >> 4 == 4:
            a, b = 0, 0xFFFF00000000 | load_be32(ip + 12)
            c, d = 0, 0xFFFF00000000 | load_be32(ip + 16)
        else:
            a = load_be32(ip + 8) << 32 | load_be32(ip + 12)
            b = load_be32(ip + 16) << 32 | load_be32(ip + 20)
            c = load_be32(ip + 24) << 32 | load_be32(ip + 28)
            d = load_be32(ip + 32) << 32 | load_be32(ip + 36)
        e = datagrams[i, 5] << 32 | pair
        flow = recent[pair & 255]
        if flow < 0 or (key[flow, 4] != e or key[flow, 3] != d or key[flow, 1] != b or key[flow, 0] != a
                        or key[flow, 2] != c):
            h = mix(seed, a, b, c, d, e)
            flow = slots[find(slots, key, h, a, b, c, d, e)]
            if flow >= 0:
                touched[flow] = epoch
                recent[pair & 255] = flow
            else:
                flow = _add(m, table, h, a, b, c, d, e, load_be16(udp), ts)
        if flow < 0:
            continue
        if check and not _checked(m, flow, ip, udp, stop, end):
            if kind in (SEND, WRITE):
                refused(m, flow, psn, ts)
            continue
        counters[PACKETS] += 1
        whole = end - payload >= length
        if kind == ACKNOWLEDGE:
            acknowledge(m, table, table.meta[0], flow, psn, bth + 12, ts)
        elif kind == RESPONSE:
            if state[flow, PEER] < 0:
                match(m, table, table.meta[0], flow, psn)
            response(m, flow, opcode, psn, payload, length, whole, ts)
        else:
            counters[REQUESTS] += 1
            request(m, flow, opcode, psn, bth + 12, payload, length, whole, ts, long)
            if meta[USED] > cells - cells // 8:
                force(m, ts)
    meta[CLOCK] = clock
    if clock - meta[REVIEWED] >= REVIEW_EVERY:
        review(m, clock, grace, short, long)


@njit(cache=True, nogil=True)
def make_room(where: np.ndarray, need: int, patience: int) -> None:
    """Before a call that may begin more messages than there are free rows (see `retire`)."""
    m = machine(where, 0)
    begin_call(m)
    retire(m, need, m.meta[CLOCK], patience)


@njit(cache=True, nogil=True)
def expire(where: np.ndarray, now: int, grace: int, short: int, long: int) -> None:
    """Let time pass without frames."""
    m = machine(where, 0)
    begin_call(m)
    m.meta[CLOCK] = max(m.meta[CLOCK], now)
    review(m, m.meta[CLOCK], grace, short, long)


@njit(cache=True, nogil=True)
def flush(where: np.ndarray, flows: int, now: int) -> None:
    """The end of the input: what is missing in flows 0..flows-1 becomes a HOLE, every message ends."""
    m = machine(where, 0)
    begin_call(m)
    m.meta[CLOCK] = max(m.meta[CLOCK], now)
    for flow in range(flows):
        flush_flow(m, flow, now)
