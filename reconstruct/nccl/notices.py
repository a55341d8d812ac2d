"""What receivers have announced to senders, between two nodes in one direction: the newest CTS entries, by the memory
that they name."""

from __future__ import annotations

import numpy as np

from reconstruct.nccl import state as n
from reconstruct.nccl.holdings import Kept
from reconstruct.nccl.state import State

__all__ = ["Notices"]


class Notices:
    """flows: those that bring the entries. version: another number whenever the entries are others than before."""

    def __init__(self) -> None:
        self.flows: list[int] = []
        self.version = 0
        self._rows = np.empty((0, n.CTS_WORDS), np.int64)
        self._sorted: np.ndarray | None = None

    def look(self, state: State) -> None:
        """Take what the flows have brought since."""
        rows = state.cts[state.owner[np.array(self.flows, np.int64)]].reshape(-1, n.CTS_WORDS)
        if not np.array_equal(rows, self._rows):
            self._rows, self._sorted = rows, None
            self.version += 1

    def find(self, message: Kept) -> tuple[int, int] | None:
        """(sender's rank, room) of the entry whose slot a message goes to; None if there is none."""
        if self._sorted is None:
            told = self._rows[self._rows[:, n.C_ROOM] > 0]
            self._sorted = told[np.lexsort((told[:, n.C_ADDRESS], told[:, n.C_RKEY]))]
        rows = self._sorted
        low, high = np.searchsorted(rows[:, n.C_RKEY], [message.rkey, message.rkey + 1])
        starts = rows[low:high, n.C_ADDRESS]
        at = int(np.searchsorted(starts, message.address, "right")) - 1
        if at < 0:
            return None
        first = rows[low + np.searchsorted(starts, starts[at])]
        inside = message.address - int(first[n.C_ADDRESS])  # a piece of a split message lies behind the start
        return (int(first[n.C_TAG]), int(first[n.C_ROOM])) if inside < first[n.C_ROOM] else None
