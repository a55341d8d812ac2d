"""The short cut of RoCE reassembly: packets that simply are the next ones in the middle of known messages.

Nearly all packets of a busy link are. For them `run` does what `mirror.roce_stream.request` would do, on addresses and
in a loop of its own that is small enough for the processor's registers; at the first packet of any other kind it
stops, having changed nothing of that one. All checks are here too: opcode, version, pad, UDP length, flow, packet
number, payload length, presence, the invariant CRC.
"""

from __future__ import annotations

import numpy as np

from mirror.internal import internal
from mirror.memory import load_be16, load_be32, load_u8, load_u64, prefetch, store_u8, store_u32, store_u64
from mirror.reorder import NEXT, SPANS
from mirror.roce_spans import DATA
from mirror.roce_state import (
    COLUMNS,
    CRC_OK,
    CURRENT,
    CURRENT_FIRST,
    CURRENT_LAST,
    ICRC_OK,
    M_COLUMNS,
    M_GOT,
    M_TS,
    MTU,
    PACKETS,
    PAYLOAD,
    REQUESTS,
    SEEN_TS,
    Machine,
)
from mirror.roce_wire import icrc

__all__ = ["MIDDLE", "run"]

MIDDLE = 7                               # opcode of an RDMA WRITE's middle packet
_MASK = 0xFFFFFF
_HEADERS = 20                            # bytes of UDP and BTH
_AHEAD = 8
_KEY = 48                                # bytes of a flow's key and of a row of Datagrams


@internal()
def run(m: Machine, state: int, messages: int, key: int, recent: np.ndarray, rows: int, i: int, n: int,
        clock: int, now: int, check: bool) -> tuple[int, int]:
    """Take rows i..n of Datagrams as far as they are such packets; returns the first that is not, and the clock.

    state, messages, key, rows: addresses of the arrays of that name; recent: flow last found, by the low 8 bits of the
    queue pair's number, -1 if none was; check: whether to verify the CRC.
    """
    first, carried, at = i, 0, m.meta[SPANS]
    stop = min(n, i + m.room - at)
    while i < stop:
        datagram = rows + _KEY * i
        prefetch(load_u64(datagram + _KEY * min(_AHEAD, n - 1 - i)))
        udp = load_u64(datagram + 8)
        end = load_u64(datagram + 16)
        if end - udp < _HEADERS:
            break
        head = load_u64(udp + 8)
        pair = load_be32(udp + 12) & _MASK
        flow = recent[pair & 255]
        if head & 0x3FFF != MIDDLE or flow < 0:  # opcode; pad and version 0
            break
        ip, known, row = load_u64(datagram), key + _KEY * flow, state + 8 * COLUMNS * flow
        if load_u64(known + 32) != load_u64(datagram + 40) << 32 | pair:
            break
        if load_u8(ip) >> 4 == 4:
            if (load_u64(known + 8) != 0xFFFF00000000 | load_be32(ip + 12)
                    or load_u64(known + 24) != 0xFFFF00000000 | load_be32(ip + 16)
                    or load_u64(known) != 0 or load_u64(known + 16) != 0):
                break
        elif (load_u64(known) != load_be32(ip + 8) << 32 | load_be32(ip + 12)
                or load_u64(known + 8) != load_be32(ip + 16) << 32 | load_be32(ip + 20)
                or load_u64(known + 16) != load_be32(ip + 24) << 32 | load_be32(ip + 28)
                or load_u64(known + 24) != load_be32(ip + 32) << 32 | load_be32(ip + 36)):
            break
        slot, number, mtu = load_u64(row + 8 * CURRENT), load_u64(row + 8 * NEXT), load_u64(row + 8 * MTU)
        payload = udp + _HEADERS
        if (slot < 0 or (load_be32(udp + 16) - number) & _MASK or number >= load_u64(row + 8 * CURRENT_LAST)
                or load_be16(udp + 4) != mtu + _HEADERS + 4 or payload + mtu + 4 > load_u64(datagram + 24)
                or payload + mtu + (4 if check else 0) > end):
            break
        if check:
            if icrc(ip, udp, payload + mtu) != 1:
                break
            store_u64(row + 8 * ICRC_OK, load_u64(row + 8 * ICRC_OK) + 1)
        ts = load_u64(datagram + 32)
        if clock < ts <= now:
            clock = ts
        store_u32(m.flow + 4 * at, flow)
        store_u8(m.kind + at, DATA)
        store_u64(m.offset + 8 * at, (number - load_u64(row + 8 * CURRENT_FIRST)) * mtu)
        store_u64(m.addr + 8 * at, payload)
        store_u64(m.length + 8 * at, mtu)
        store_u64(m.ts + 8 * at, ts)
        store_u32(m.message + 4 * at, slot)
        at += 1
        carried += mtu
        store_u64(row + 8 * NEXT, number + 1)
        store_u64(row + 8 * SEEN_TS, ts)
        message = messages + 8 * M_COLUMNS * slot
        store_u64(message + 8 * M_GOT, load_u64(message + 8 * M_GOT) + 1)
        store_u64(message + 8 * M_TS, ts)
        i += 1
    m.meta[SPANS] = at
    m.counters[PACKETS] += i - first
    m.counters[REQUESTS] += i - first
    m.counters[PAYLOAD] += carried
    if check:
        m.counters[CRC_OK] += i - first
    return i, clock
