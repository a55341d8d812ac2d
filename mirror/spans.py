"""Spans: what TCP reassembly hands on, a struct of arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "CLOSE", "CONFLICT", "CUT", "DATA", "DUPLICATE", "HOLE", "KIND_NAMES", "OPEN", "PROVEN", "REFUSED", "Spans",
]  # fmt: skip

DATA, HOLE, DUPLICATE, OPEN, CLOSE, CONFLICT = range(6)
KIND_NAMES = ("data", "hole", "duplicate", "open", "close", "conflict")

# What is known of a HOLE, bits of its `why`.
CUT, PROVEN, REFUSED = 1, 2, 4


@dataclass(slots=True, eq=False)
class Spans:
    """`n` spans in the order in which they must be taken; entries beyond `n` are garbage.

    The arrays are reused: they, and the bytes that `addr` points at, are valid until the next feed, flush or
    expire call of the reassembler and while the block that was fed is not released.

    DATA: the range offset, length of the stream, in order and gapless (offset is the end of the flow's DATA or
        HOLE before it); its bytes are at addr.
    HOLE: the next range of the stream, bytes that were never captured. `why` says what is known of all of them. CUT:
        a frame that carried them came, and they were cut off. REFUSED: one came, and was not believed because its
        checksum was wrong. PROVEN: the receiver acknowledged them, so they passed.
    DUPLICATE: bytes, at addr, of a range before the end of what was delivered: for comparison by a consumer that
        still has the first copy. Where it had a HOLE they are late bytes of that hole.
    OPEN: the flow id begins a new stream at offset 0, and whatever was known of the id before is over.
        length 1: the start of the connection is known; 0: it is not, offset 0 is the first byte seen.
    CLOSE: offset is the end of the stream, nothing but DUPLICATE follows.
        length 0: FIN; 1: RST, or the flow's place was taken by a new connection.
    CONFLICT: a range inside the DATA just delivered of which two differing copies were captured; the first one was
        delivered, which of them is right is not known.
    """

    flow: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: flow id, see `mirror.flows.Flows`."""
    kind: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    """int8: DATA, HOLE, DUPLICATE, OPEN, CLOSE, CONFLICT."""
    offset: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64: offset in the stream; 0 is the first byte after SYN, or the first byte seen."""
    addr: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64: absolute address of the bytes of DATA and DUPLICATE, else 0."""
    length: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64: bytes, or the flag of OPEN and CLOSE."""
    ts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64: capture time of the frame that carried the bytes, ns since the epoch; of HOLE: of the first frame that
    showed that they are missing."""
    why: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """int64[n, 2], of HOLE alone: bits, and the capture time of the last frame before it, 0 if there was none."""
    n: int = 0
    holes: int = 0
    """How many of them are HOLE."""

    def __len__(self) -> int:
        return self.n

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` spans; what the arrays held is lost."""
        if capacity <= self.flow.size:
            return
        for name in ("flow", "kind", "offset", "addr", "length", "ts", "why"):
            old = getattr(self, name)
            setattr(self, name, np.empty((capacity, *old.shape[1:]), old.dtype))
