"""The flow table: one entry per direction of a TCP connection, found by the kernels and read from Python.

A flow is (vantage group, source address, source port, destination address, destination port); IPv4 addresses
are held as IPv4-mapped IPv6 (RFC 4291, 2.5.5.2). The reverse direction is another flow, its `peer`. VLAN tags are
no part of the key: the same connection may be mirrored with and without them.

The table is bounded. When it is full, an idle flow gives up its id: the best of a small sample that a hand
walking round the table looks at (so the cost per new flow is bounded), flows that never carried data or have ended
first, then the longest idle. Never taken are flows of the current block (their segments are still to be read) and
pinned flows (those of a known process group, which may be silent for hours and still be alive).
"""

from __future__ import annotations

import ipaddress
import os
from typing import NamedTuple

import numpy as np
from numba import njit

from mirror.internal import internal
from mirror.memory import int32s_at, int64s_at, rows_at, uint8s_at

__all__ = ["FLOW_TABLE", "FlowTable", "Flows", "add", "address_text", "address_words", "find", "flow_table", "mix"]

_SAMPLE = 64
_V4_PREFIX = 0xFFFF << 32
USED, HAND, EPOCH, SEED, EVICTED, FULL = range(6)


class FlowTable(NamedTuple):
    """The arrays behind `Flows`, in the form that kernels take."""

    # int32[power of two]: open addressing, linear probing; flow id or -1
    slots: np.ndarray
    # int64[capacity, 6]: source high and low, destination high and low, vantage<<32|sport<<16|dport, hash
    key: np.ndarray
    # int32[capacity]: id of the reverse flow, or -1
    peer: np.ndarray
    # int64[capacity]: number of the last block that had a frame of the flow
    touched: np.ndarray
    # uint8[capacity]: 1 while the flow has carried data and is not closed (kept by mirror.tcp)
    live: np.ndarray
    # uint8[capacity]: 1 = never give this id away (set by consumers)
    pinned: np.ndarray
    # int64[6]: USED, HAND, EPOCH, SEED, EVICTED, FULL
    meta: np.ndarray


FLOW_TABLE = 15
"""Numbers that a FlowTable takes in a handle."""


@internal()
def flow_table(where: np.ndarray, at: int) -> FlowTable:
    """The table whose part of a handle (`mirror.memory.handle`) begins at `at`."""
    h = where[at:]
    return FlowTable(int32s_at(h[0], h[1]), rows_at(h[2], h[3], h[4]), int32s_at(h[5], h[6]), int64s_at(h[7], h[8]),
                     uint8s_at(h[9], h[10]), uint8s_at(h[11], h[12]), int64s_at(h[13], h[14]))


@njit(cache=True, nogil=True)
def mix(seed: int, a: int, b: int, c: int, d: int, e: int) -> int:
    h = seed ^ (a * -7046029254386353131) ^ (b * -4417276706812531889)
    h = (h ^ ((h >> 29) & 0x7FFFFFFFF)) * 1609587929392839161
    h ^= (c * 8650415921358664919) ^ (d * 2870177450012600261) ^ (e * -3335678366873096957)
    h = (h ^ ((h >> 32) & 0xFFFFFFFF)) * -7046029254386353131
    return (h >> 20) & 0xFFFFFFFFFFF


@internal()
def _reverse_ports(word: int) -> int:
    return (word & ~0xFFFFFFFF) | ((word & 0xFFFF) << 16) | ((word >> 16) & 0xFFFF)


@njit(cache=True, nogil=True)
def find(slots: np.ndarray, key: np.ndarray, h: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Slot that holds the flow with this key and hash, or the free slot where it would go."""
    mask = slots.size - 1
    slot = h & mask
    while True:
        flow = slots[slot]
        # The low source word and the ports differ for nearly every other flow: compare them first.
        if flow < 0 or (key[flow, 1] == b and key[flow, 4] == e and key[flow, 3] == d
                        and key[flow, 0] == a and key[flow, 2] == c):
            return slot
        slot = (slot + 1) & mask


@internal()
def _remove(table: FlowTable, flow: int) -> None:
    """Take `flow` out of the slots; later entries of its probe run move up, so no tombstones pile up."""
    slots, key = table.slots, table.key
    mask = slots.size - 1
    hole = key[flow, 5] & mask
    while slots[hole] != flow:
        hole = (hole + 1) & mask
    probe = hole
    while True:
        probe = (probe + 1) & mask
        moved = slots[probe]
        if moved < 0:
            break
        home = key[moved, 5] & mask
        if (probe - home) & mask >= (probe - hole) & mask:
            slots[hole] = moved
            hole = probe
    slots[hole] = -1
    peer = table.peer[flow]
    if peer >= 0:
        table.peer[peer] = -1
    table.peer[flow] = -1


@internal()
def _victim(table: FlowTable) -> int:
    """Id of a flow to give away, or -1."""
    capacity = table.peer.size
    hand, epoch = table.meta[HAND], table.meta[EPOCH]
    best, best_age = -1, np.int64(-1)
    for _ in range(min(_SAMPLE, capacity)):
        flow = hand
        hand = hand + 1 if hand + 1 < capacity else 0
        if table.pinned[flow] or table.touched[flow] == epoch:
            continue
        age = epoch - table.touched[flow]
        if not table.live[flow]:
            age += 1 << 62
        if age > best_age:
            best, best_age = flow, age
    table.meta[HAND] = hand
    return best


@njit(cache=True, nogil=True)
def add(table: FlowTable, h: int, a: int, b: int, c: int, d: int, e: int) -> tuple[int, bool]:
    """Id of a new flow with this key (see `FlowTable.key`) and hash; -1 if the table is full.

    The flag is True when the id was taken from another flow: what is known of the id is then void.
    """
    meta, slots, key = table.meta, table.slots, table.key
    recycled = False
    if meta[USED] < table.peer.size:
        flow = meta[USED]
        meta[USED] += 1
    else:
        flow = _victim(table)
        if flow < 0:
            meta[FULL] += 1
            return -1, False
        _remove(table, flow)
        meta[EVICTED] += 1
        recycled = True
    slots[find(slots, key, h, a, b, c, d, e)] = flow
    key[flow, 0], key[flow, 1], key[flow, 2], key[flow, 3], key[flow, 4], key[flow, 5] = a, b, c, d, e, h
    table.touched[flow] = meta[EPOCH]
    table.live[flow] = 0
    table.pinned[flow] = 0
    back = _reverse_ports(e)
    peer = slots[find(slots, key, mix(meta[SEED], c, d, a, b, back), c, d, a, b, back)]
    if peer != flow:
        table.peer[flow] = peer
        if peer >= 0:
            table.peer[peer] = flow
    return flow, recycled


def address_words(address: str) -> tuple[int, int]:
    """Two signed 64-bit words of an address; IPv4 as IPv4-mapped IPv6. Raises ValueError for what is none."""
    ip = ipaddress.ip_address(address)
    number = int(ip) if ip.version == 6 else _V4_PREFIX | int(ip)
    return _signed(number >> 64), _signed(number & (1 << 64) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def address_text(high: int, low: int) -> str:
    """The address of two words, IPv4-mapped ones as IPv4."""
    if high == 0 and low >> 32 == 0xFFFF:
        return str(ipaddress.IPv4Address(low & 0xFFFFFFFF))
    return str(ipaddress.IPv6Address((high & (1 << 64) - 1) << 64 | (low & (1 << 64) - 1)))


class Flows:
    """Bounded table of flows with dense ids 0..count-1; ids are given away when it is full (see above)."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        """`capacity`: the most flows (directions of connections) known at once; at least 2."""
        if capacity < 2:
            raise ValueError(f"a flow table needs room for 2 flows or more, not {capacity}")
        self.capacity = capacity
        self.table = FlowTable(
            slots=np.full(1 << (2 * capacity - 1).bit_length(), -1, np.int32),
            key=np.zeros((capacity, 6), np.int64),
            peer=np.full(capacity, -1, np.int32),
            touched=np.zeros(capacity, np.int64),
            live=np.zeros(capacity, np.uint8),
            pinned=np.zeros(capacity, np.uint8),
            meta=np.zeros(6, np.int64),
        )
        # A seed nobody knows: frames cannot be crafted to fall into one probe run.
        self.table.meta[SEED] = int.from_bytes(os.urandom(8), "little", signed=True)

    @property
    def count(self) -> int:
        """Ids handed out so far: valid ids are 0..count-1."""
        return int(self.table.meta[USED])

    @property
    def evicted(self) -> int:
        """How often a flow lost its id to a new one."""
        return int(self.table.meta[EVICTED])

    @property
    def peer(self) -> np.ndarray:
        """int32[capacity]: id of the reverse flow, -1 if it was never seen."""
        return self.table.peer

    @property
    def pinned(self) -> np.ndarray:
        """uint8[capacity]: set to 1 for flows whose id must not be given away; cleared on reuse."""
        return self.table.pinned

    def endpoint_src(self, flow: int) -> tuple[str, int]:
        """(address, port) that sends on this flow."""
        row = self.table.key[flow]
        return address_text(int(row[0]), int(row[1])), int(row[4]) >> 16 & 0xFFFF

    def endpoint_dst(self, flow: int) -> tuple[str, int]:
        """(address, port) that receives on this flow."""
        row = self.table.key[flow]
        return address_text(int(row[2]), int(row[3])), int(row[4]) & 0xFFFF

    def vantage(self, flow: int) -> int:
        """Vantage group in which the flow was seen."""
        return int(self.table.key[flow, 4]) >> 32

    def lookup(self, vantage: int, src_ip: str, sport: int, dst_ip: str, dport: int) -> int:
        """Id of a flow, or -1 if it is not in the table. Raises ValueError for text that is no address."""
        a, b = address_words(src_ip)
        c, d = address_words(dst_ip)
        e = vantage << 32 | sport << 16 | dport
        seed = int(self.table.meta[SEED])
        slots = self.table.slots
        return int(slots[find(slots, self.table.key, mix(seed, a, b, c, d, e), a, b, c, d, e)])
