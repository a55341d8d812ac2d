"""The flags inside NCCL's messages: over TCP nothing else tells by which protocol a message was sent.

Every line of LL and LL128 ends in the number of its step (docs/nccl.md, "Payloads"). Data of Simple may look so, with a
small number; they do not count on from message to message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reconstruct.nccl.schedule import LL

__all__ = ["COMMON", "Flags", "flags"]

_SURE = 8
"""Lines from which on flags are no accident."""
COMMON = 256
"""Below it are numbers that data are full of."""
_LIKELY = 1 << 24
"""Steps that a connection may well come to. As floats these numbers are next to 0."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What all lines of a message that were captured whole say. lines: how many; flag: 0 if there are none; varied:
    whether their data hold anything but the flag's own number."""

    flag: int = 0
    lines: int = 0
    varied: bool = False

    def looks(self, due: int) -> bool:
        """Whether data of Simple hardly look so: with the flag that is due, or one that some step has, should the one
        that is due be wrong. Numbers below COMMON prove little."""
        return self.lines >= _SURE and self.varied and (self.flag == due or 0 < self.flag < _LIKELY)


def flags(protocol: int, data: np.ndarray, known: np.ndarray) -> Flags | None:
    """Of a message by LL or LL128, wire bytes and which of them were captured; None: it is none of that protocol."""
    size, word, places = (16, np.dtype("<u4"), (1, 3)) if protocol == LL else (128, np.dtype("<u8"), (15,))
    if data.size % size:
        return None
    whole = known.reshape(-1, size).all(1)
    lines = data.view(word).reshape(-1, size // word.itemsize)[whole]
    if not len(lines):
        return Flags()
    flag = lines[0, places[0]]
    if (lines[:, places] != flag).any():
        return None
    return Flags(int(flag), len(lines), bool((np.delete(lines, places, 1) != flag).any()))
