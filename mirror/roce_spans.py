"""Spans of RoCE reassembly: what `mirror.spans` is for TCP, with the message that the bytes belong to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mirror.memory import handle
from mirror.spans import CLOSE, CONFLICT, DATA, DUPLICATE, HOLE, OPEN, Spans

__all__ = [
    "BEGIN", "CLOSE", "CONFLICT", "DATA", "DUPLICATE", "END", "HOLE", "KIND_NAMES", "OPEN", "VOID", "MessageSpans",
]

BEGIN, END, VOID = range(6, 9)
KIND_NAMES = ("data", "hole", "duplicate", "open", "close", "conflict", "begin", "end", "void")


@dataclass(slots=True, eq=False)
class MessageSpans(Spans):
    """`n` spans in the order in which they must be taken; entries beyond `n` are garbage.

    The arrays are reused: they, the rows of `RoceReassembler.messages` as they stand, and the bytes that `addr` points
    at are valid until the next call of the reassembler and while the block that was fed is not released.

    A place is `offset` bytes from the start of message `message`, a row of `RoceReassembler.messages`: it was computed
    from the packet's sequence number, so the order in which packets come does not matter, and spans of one message may
    come in any order.

    OPEN: the flow id begins a new sequence of messages; whatever was known of the id before is over.
    BEGIN: row `message` now describes a message of the flow that no span spoke of before; whatever the row stood
        for is over. length: 1, or 0 if the message is headless (its first packet was never captured).
    DATA: bytes, at addr, that no earlier DATA of the message gave. They may lie in a HOLE told before: a late retry.
    DUPLICATE: bytes, at addr, of a range that was given before: for comparison by who still has the first copy.
    CONFLICT: a range of which two differing copies were captured, one of which was given; which is right is not known.
    HOLE: bytes that were not captured, and that no retry is expected to bring any more. With `message` -1 the
        packets of unknown messages are missing: offset is then the 64-bit PSN of the first, length counts packets.
        why, ts: as in `mirror.spans`. A later packet number proves nothing: a retry may have been on its way.
    END: length 1: every packet of the message was given, told once. 0: what is still missing was told as HOLE; should
        a late retry bring it all the same, END with length 1 follows.
    VOID: a headless message was begun, and now its first packet came: forget it; its bytes come again by the retry.
    CLOSE: the flow's place was taken by another connection; offset 0, length 1.
    """

    message: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: row of `RoceReassembler.messages`, or -1."""
    _handle: np.ndarray | None = field(init=False, repr=False, default=None)

    @property
    def handle(self) -> np.ndarray:
        """For kernels (`mirror.memory.handle`): flow, kind, offset, addr, length, ts, message, why. Good until
        `reserve`, which the reassembler may call in each of its calls."""
        if self._handle is None:
            self._handle = handle(
                self.flow, self.kind, self.offset, self.addr, self.length, self.ts, self.message, self.why
            )  # fmt: skip
        return self._handle

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` spans; what the arrays held is lost."""
        if capacity > self.flow.size:
            Spans.reserve(self, capacity)
            self.message = np.empty(capacity, np.int32)
            self._handle = None
