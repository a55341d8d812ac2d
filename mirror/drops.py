"""When frames were lost on this machine: between the adapter and the capture ring, or for want of room in the ring."""

from __future__ import annotations

import time

from mirror.block import Loss
from mirror.loss import NIC, RING

__all__ = ["InterfaceDrops", "RingDrops", "interface_drops"]

_LOOK_EVERY = 0.05  # at the interface's counters, s
_LATE = 1_000_000_000
"""ns: adapters refresh their drop counters up to a second late."""


def interface_drops(interface: str) -> int:
    """Received frames that the interface dropped or missed, as /proc/net/dev counts them; 0 if unknown."""
    try:
        with open("/proc/thread-self/net/dev") as file:
            for line in file:
                name, _, figures = line.rpartition(":")
                if name.strip() == interface:
                    return int(figures.split()[3])
    except (OSError, IndexError, ValueError):
        pass
    return 0


class InterfaceDrops:
    """What an interface drops from now on. `lost`: frames so far."""

    def __init__(self, interface: str) -> None:
        self.lost = 0
        self._interface = interface
        self._counted = interface_drops(interface)
        self._told = 0
        self._looked, self._when = time.monotonic(), time.time_ns()

    def count(self) -> int:
        """Frames so far, counted anew."""
        dropped = interface_drops(self._interface)
        # A smaller figure than before: the interface was made anew and counts from 0.
        self.lost += dropped - self._counted if dropped >= self._counted else dropped
        self._counted = dropped
        return self.lost

    @property
    def due(self) -> bool:
        """Whether it is time to `look`."""
        return time.monotonic() - self._looked >= _LOOK_EVERY

    def look(self) -> list[Loss]:
        """What was lost since the last look, if anything was."""
        lost, since = self.count(), self._when
        self._looked, self._when = time.monotonic(), time.time_ns()
        risen, self._told = lost > self._told, lost
        return [Loss(NIC, since - _LATE, self._when)] if risen else []


class RingDrops:
    """What a capture ring had no room for. The kernel drops between two ring blocks and marks the later one, unless its
    statistics were read in between."""

    def __init__(self) -> None:
        self._newest = time.time_ns()  # capture time of the newest frame, ns
        self._until = 0  # wall clock, ns: frames were dropped up to here, and the next block may not be marked

    def read(self, drops: int) -> None:
        """The statistics were read, `drops` of them new: what follows is marked only for further ones."""
        if drops:
            self._until = time.time_ns()

    def block(self, marked: bool, first: int, last: int) -> list[Loss]:
        """A ring block comes whose frames are from `first` to `last`, ns; what was lost before it, if anything was."""
        if not marked and self._until and last >= self._until:
            marked, self._until = True, 0
        before, self._newest = self._newest, last
        return [Loss(RING, before, first)] if marked else []
