"""What the step tracker is given and what it says: waits, steps ready, lost and confirmed (plain data)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reconstruct.markers import Canary
from reconstruct.ranges import Ranges

__all__ = ["NO_WAITS", "SECOND", "Notice", "StepConfirmed", "StepLost", "StepReady", "TrackerEvent", "Waits"]

SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Waits:
    """How long, in ns of capture time, the tracker waits for what may still come.

    Capture time is the time up to which frames were processed, so a backlog is never taken for a loss.

    marker: for a step's marker after its last byte, once the connection that markers come on is known to be gone (while
    it stands, a reduction without a marker is no step yet); traffic: after a marker, for collectives that no link has
    shown yet and for second copies of values; patience: for the missing bytes of a bucket, or its layout.
    """

    marker: int = 2 * SECOND
    traffic: int = SECOND // 5
    patience: int = 10 * SECOND


NO_WAITS = Waits(-(1 << 62), -(1 << 62), -(1 << 62))
"""The input has ended: nothing more can come, whatever the time."""


@dataclass(frozen=True, slots=True)
class StepReady:
    """Optimizer step `step` is over, and every gradient of it is here, but for what is said to be lost.

    gradients: DDP parameter index -> uint8[n], its elements in memory order, valid until `applied(step)`; where some of
    it is lost a copy, with zeros there. groups: every field of every param group in force; time: ns, kernel time of
    the last byte that was seen of it; nbytes: of all gradients.
    lost: DDP parameter index -> elements whose gradient is not known; holes: (bucket, byte offset, length) of what is
    missing; blank: why nothing is known of this step's gradient, "" if something is: then there are no gradients, and
    `groups` are the last known ones.
    """

    step: int
    confirmed: bool
    gradients: dict[int, np.ndarray]
    groups: tuple[Mapping[str, Any], ...]
    canaries: tuple[Canary, ...]
    time: int
    nbytes: int
    lost: Mapping[int, Ranges] = field(default_factory=dict)
    holes: tuple[tuple[int, int, int], ...] = ()
    blank: str = ""


@dataclass(frozen=True, slots=True)
class StepLost:
    """Nothing is proven from step `step` on, and none follows; if `claimed`, it was handed out and turned out wrong."""

    step: int
    reason: str
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class StepConfirmed:
    """The marker of a step that was claimed without it came after all and agrees."""

    step: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know that does not end the following of the job."""

    text: str


TrackerEvent = StepReady | StepLost | StepConfirmed | Notice
