"""One attached job on the checkpoint node: its description, its shadow state and how far it is proven."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from flowcheck.description import JobDescription
from flowcheck.pace import Pace
from flowcheck.report import places
from flowcheck.resync import Resync
from flowcheck.sight import Sight
from flowcheck.snapshot import Snapshot
from reconstruct.lr import Predictor
from reconstruct.markers import Canary
from reconstruct.shadow import Pin, Shadow
from reconstruct.steps import StepTracker

RECENT_STEPS = 64


@dataclass(slots=True)
class Job:
    """A run's epoch: everything between one attach and the next.

    The capture thread owns `tracker`, the apply thread writes the rest; readers take single fields or a pin.
    """

    run: str
    epoch: int
    description: JobDescription
    shadow: Shadow
    predictor: Predictor  # of the capture thread
    schedule: Predictor  # for snapshots, under `scheduler_lock`
    exact: bool
    reasons: list[str]
    resync: Resync
    tracker: StepTracker | None = None
    sight: Sight | None = None  # of the capture thread; None for a recording
    looks: int = 0  # when it is looked at next, ns
    unseen: str | None = None  # what to do if steps are done and no frame of the job was seen
    unconfirmed: set[int] = field(default_factory=set)  # steps applied without their marker, of the newest ones
    frozen: str | None = None  # why no further step will be applied
    halted: bool = False  # a step could not be applied: none after it can
    ended: bool = False  # the trainers attached again
    kept: bool = False  # the first step that was fully known was given to the store
    suspect: str | None = None  # why steps from `suspect_from` on must not be handed out
    suspect_from: int = 0
    checked: int = 0  # newest step whose values were compared with the trainer's
    job_step: int = 0  # newest step that the trainer is known to have done
    lag_ms: float | None = None
    persisted: int | None = None  # newest step on the disk
    persisted_at: float | None = None  # when it was written, seconds since 1970
    unstored: float | None = None  # when a write failed that was to be newer, and why; None if none did
    unstored_reason: str | None = None
    pace: Pace = field(default_factory=Pace)
    scheduler_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> str:
        return f"{self.run}/e{self.epoch}"

    @property
    def step(self) -> int:
        return self.shadow.step

    @property
    def over(self) -> bool:
        """Whether the state will not go on, so that nothing can be repaired."""
        return self.halted or self.ended or self.frozen is not None or self.suspect is not None

    def distrust(self, step: int, reason: str) -> None:
        """Steps from `step` on are wrong, or may be."""
        if self.suspect is None or step < self.suspect_from:
            self.suspect_from, self.suspect = step, reason

    def in_doubt(self, step: int) -> bool:
        """Whether `step` must not be handed out."""
        return self.suspect is not None and step >= self.suspect_from

    def note_applied(self, step: int, confirmed: bool) -> None:
        """`step` is about to be applied. Only the newest steps can still be pinned by somebody."""
        if not confirmed:
            self.unconfirmed.add(step)
        for old in [known for known in self.unconfirmed if known < step - RECENT_STEPS]:
            self.unconfirmed.discard(old)

    def snapshot(self, pin: Pin) -> Snapshot:
        """The pinned step as a Snapshot; its tensors are valid while the pin is held."""
        # Forward passes change buffers and gradients do not tell how, so only those of the attach are proven.
        first = pin.step == self.description.step
        groups, scheduler = self._after(pin)
        return Snapshot(
            self.description,
            self.run,
            self.epoch,
            pin.step,
            pin.step not in self.unconfirmed,
            self.exact,
            list(self.reasons),
            [] if first else [buffer.name for buffer in self.description.buffers],
            groups,
            pin.tensors,
            scheduler,
            unknown=pin.unknown,
        )

    def _after(self, pin: Pin) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Param group fields and scheduler as a checkpoint at the end of the pinned step's iteration has them.

        Once the scheduler has stepped the groups hold the next step's rate. Where no scheduler was described, or a
        marker showed that it is stepped in another rhythm, they are those that were in force in the step.
        """
        if not self.predictor.reason:
            with self.scheduler_lock:
                scheduler = self.schedule.scheduler(pin.step)
                fields = self.schedule.fields(pin.step + 1)
            if scheduler is not None and fields is not None:
                return fields, scheduler
        return [dict(group) for group in pin.groups], None

    def contradiction(self, canaries: tuple[Canary, ...]) -> str | None:
        """What the trainer's own parameter values say against the shadow's, after the same step.

        Only an exact job must agree to the bit; elsewhere the kernels are known to differ in the last places.
        """
        if not self.exact:
            return None
        for canary in canaries:
            if canary.value is None or canary.parameter >= len(self.description.parameters):
                continue
            parameter = self.description.parameters[canary.parameter]
            if canary.element >= parameter.spec.numel:
                continue
            held = self.shadow.element(f"model/{parameter.name}", canary.element)
            if held is not None and held != canary.value:
                return (
                    f"element {canary.element} of {parameter.name} is {canary.value.hex()} in the trainer and "
                    f"{held.hex()} here after step {self.step}: parameters changed outside the optimizer; attach again"
                )
        return None

    def status(self) -> dict[str, Any]:
        """This job's part of `flowcheck status`."""
        tracker = self.tracker
        reason = self.suspect or self.frozen
        ahead = self.job_step
        unknown = self.shadow.unknown
        return {
            "run": self.run,
            "epoch": self.epoch,
            "step": self.step,
            "confirmed": self.step not in self.unconfirmed,
            "exact": self.exact,
            "reasons": self.reasons,
            "coverage": round(tracker.coverage, 6) if tracker is not None else 0.0,
            "lag_ms": self.lag_ms,
            "job_step": max(ahead, self.step),
            "frozen": None if reason is None else _frozen(self.step, ahead, reason),
            "unseen": self.unseen,
            "holes": tracker.hole_bytes if tracker is not None else 0,
            "loss": tracker.shortfall.status() if tracker is not None else {"bytes": {}, "newest": []},
            "known_step": self.shadow.known_step,
            "unknown": {"elements": unknown.elements, "since": unknown.oldest, "where": places(unknown)},
            "agents": len(self.resync.agents),
            "repair": self.resync.status(),
            "compared": self.resync.compared,
            "memory_bytes": self.shadow.memory_bytes,
            "copies": self.shadow.copies,
            "persisted": self.persisted,
            "persisted_at": self.persisted_at,
            "unstored_since": self.unstored,
            "unstored_reason": self.unstored_reason,
            "world_size": self.description.world_size,
        }


def _frozen(step: int, ahead: int, reason: str) -> str:
    where = f"frozen at {step}, job is ahead" if ahead > step else f"frozen at {step}"
    return f"{where}: {reason}"
