"""What an NCCL decoder holds: the landings of collectives, and messages kept until it is known what they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reconstruct.landing import SEGMENT_BYTES, Landing
from reconstruct.memory import Budget
from reconstruct.nccl.script import NOT_SEEN

__all__ = ["Holdings", "Kept"]

HEADLESS_BYTES = 1 << 20  # no message is longer


@dataclass(slots=True, eq=False)
class Kept:
    """A message behind the last known collective of its lane.

    first: its first packet that was captured; length: -1 if its start was not; slot: its row in the reassembler while
    more may come, else -1; imm: its immediate read big endian, -1 if it has none, NOT_SEEN while unknown.
    """

    first: int
    packets: int
    length: int
    address: int
    rkey: int
    mtu: int
    slot: int
    time: int
    imm: int = NOT_SEEN
    row: int = -1
    """`slot`, also when no more is expected: further copies of its bytes are compared with what is kept."""
    store: Landing | None = None
    announced: tuple[int, int] = (-1, -1)
    """Sender's rank and room, from the CTS entry that announced it, once that was found."""
    looked: int = -1
    """Version of the entries (`Notices.version`) that it was looked for among last."""
    dropped: bool = False
    """Its bytes were seen and not kept."""
    numbers: dict[int, np.ndarray] = field(default_factory=dict)
    """By protocol: the data that it carries as int32, once somebody wanted them whole."""


class Holdings:
    """Every landing that the kernel may know is found here by its number, so it outlives the kernel's use of it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget = Budget(budget_bytes)
        self.landings: dict[tuple[str, int], Landing] = {}
        self.names: dict[int, tuple[str, int]] = {}

    def landing(self, ident: int) -> Landing:
        """Any landing by its number."""
        return self.budget.of(ident)

    def make(self, group: str, tag: int, size: int, itemsize: int, world: int) -> Landing | None:
        """The landing of a collective; None if the budget does not allow it."""
        landing = self.budget.landing(size, itemsize, world, SEGMENT_BYTES)
        if landing is not None:
            self.landings[group, tag] = landing
            self.names[landing.ident] = (group, tag)
        return landing

    def keep(self, message: Kept) -> Landing | None:
        """Memory for the bytes of a message; None if the budget does not allow it."""
        if message.store is None:
            size = message.length if message.length > 0 else HEADLESS_BYTES
            message.store = self.budget.landing(size, 1, 2, SEGMENT_BYTES)
            message.dropped = message.store is None
        return message.store

    def discard(self, message: Kept) -> None:
        """The bytes of a message are not needed any more; the kernel must not know them."""
        if message.store is not None:
            self.budget.free(message.store)
            message.store = None

    def drop(self, group: str, below: int | None) -> None:
        """Forget the landings of tags below `below` (None: all); the kernel must not know them."""
        for key in [k for k in self.landings if k[0] == group and (below is None or k[1] < below)]:
            landing = self.landings.pop(key)
            del self.names[landing.ident]
            self.budget.free(landing)

    def forget(self, group: str, tag: int) -> None:
        """The landing of a collective that proved to be another one; the kernel must not know it any more."""
        landing = self.landings.pop((group, tag), None)
        if landing is not None:
            del self.names[landing.ident]
            self.budget.free(landing)
