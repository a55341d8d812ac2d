"""Which TCP streams are NCCL's own: one look at every batch of spans, for whoever reads such streams.

A stream is told by its first bytes: a u64 magic number and a u32 type (docs/nccl.md, "Set-up"). What is marked here is
looked at by its reader, which knows better and may take the mark off again; what is not costs nothing more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mirror.flows import Flows
from mirror.memory import load_u8, load_u32, load_u64
from mirror.spans import DATA, Spans

__all__ = ["BOOTSTRAP", "HELLO", "MAGIC", "NET_IB", "NET_SOCKET", "SETUP", "SOCKET", "Heads"]

MAGIC = 0x564AB9F2FC4B9D6C
"""Of connections that are not the bootstrap's; NCCL_SOCKET_MAGIC changes it from 2.30.7 on."""
BOOTSTRAP, NET_SOCKET, NET_IB = 1, 3, 4
"""Types of connections."""
HELLO = 12
"""Bytes with which a connection begins: magic and type."""
SETUP, SOCKET = 1, 2
"""Marks of a flow: it may be of the set-up, in either direction; it may be a socket of a NET/Socket connection."""


@njit(cache=True, nogil=True)
def _marks(addr: int, length: int) -> int:
    """What a stream may be that begins with these bytes, of which there may be too few to tell."""
    if length >= HELLO:
        kind = load_u32(addr + 8)
        if kind == BOOTSTRAP:
            return SETUP
        if load_u64(addr) != MAGIC:
            return 0
        return SETUP if kind == NET_IB else SOCKET if kind == NET_SOCKET else 0
    for i in range(min(length, 8)):
        if load_u8(addr + i) != MAGIC >> 8 * i & 0xFF:
            return SETUP if length >= 8 else 0
    return SETUP | SOCKET


@njit(cache=True, nogil=True)
def _look(marks: Any, flow: Any, kind: Any, offset: Any, addr: Any, length: Any, count: int) -> int:
    found: Any = 0
    for i in range(count):
        if offset[i] == 0 and kind[i] == DATA:
            marks[flow[i]] |= _marks(addr[i], length[i])
        found |= marks[flow[i]]
    return found


class Heads:
    """The marks of all flows of a table."""

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        self.marks = np.zeros(flows.capacity, np.uint8)
        """SETUP, SOCKET or both, by flow."""

    def look(self, spans: Spans) -> int:
        """The marks of all flows that the batch speaks of, in one; to be called once for every batch."""
        return int(_look(self.marks, spans.flow, spans.kind, spans.offset, spans.addr, spans.length, spans.n))

    def clear(self, flow: int, mark: int) -> None:
        """A flow is not what it was marked as, or is that no more."""
        self.marks[flow] &= 0xFF ^ mark
