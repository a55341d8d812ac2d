"""The shadow: a job's parameters, buffers and optimizer state, current after every step.

It is built from the job's description alone, filled by the attach (`load`) or piece by piece (`patch`), moved forward
by the reduced gradients (`apply`, `skip`) and read through pins. No sockets, no files; one thread applies, any number
read.

A pin holds one version. While nobody pins the live version, a step is applied in place (a `pin()` that comes
meanwhile waits for its end). While somebody does, the step is made in a second set of memory and the two change places,
so readers see the old step and the job's next one is not late. There are never more than these two: when both are
pinned, `apply` waits up to `apply_wait` seconds and then revokes the pins of the older one. Revocation happens before
the first byte is overwritten, so a reader that asks `pin.revoked` after it copied a chunk, and before it uses the
chunk, can never take torn bytes for good ones.

Elements whose gradient was lost are unknown from that step on. All operations of an optimizer step are element-wise, so
what an unknown element holds changes no known one. A step that would turn a fully known version into one that is not is
made in the second set of memory; the old version stays there, the newest that is fully known, until the live one is
again. Until then steps are applied in place, and slow readers of the live version lose their pins.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from flowcheck.description import JobDescription
from reconstruct.arena import Layout, ShadowError, Version
from reconstruct.optimizer import TileOptimizer, blank_step, copy_version, expected_keys
from reconstruct.pins import NothingKnown, Pin, PinRevoked
from reconstruct.ranges import Ranges
from reconstruct.step_input import checked_groups, named_gradients, named_losses
from reconstruct.unknown import Unknown
from reconstruct.upload import Upload, described_state

__all__ = ["IDLE_STEPS", "PIN_TIMEOUT", "NothingKnown", "Pin", "PinRevoked", "Shadow", "ShadowError"]

IDLE_STEPS = 16
"""Steps after which a second set of memory that nobody needed is given back."""

PIN_TIMEOUT = 60.0

_NO_LOSS: Mapping[int, Ranges] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Copy:
    """One set of memory with the optimizer that works in it, and who reads it."""

    version: Version
    optimizer: TileOptimizer
    pins: set[Pin] = field(default_factory=set)


class Shadow:
    """See the module text.

    known: whether the attach's state will be loaded; if not, all of it is unknown from the description's step on.
    apply_wait: seconds that `apply` waits for readers before it revokes their pins.
    """

    def __init__(self, description: JobDescription, *, known: bool = True, apply_wait: float = 1.0) -> None:
        self.description = description
        self.apply_wait = apply_wait
        self.revoked_pins = 0
        self._layout = Layout.of(description)
        self._changed = threading.Condition()
        groups = [dict(group.fields) for group in description.optimizer.groups]
        self._live = self._new_copy(description.step, copy.deepcopy(groups))
        self._live.version.replace_state_keys(described_state(description))
        self._upload: Upload | None = None
        self._spare: _Copy | None = None
        self._idle = 0
        self._writing = False
        self._failed = ""
        if known:
            self._upload = Upload(description, self._live.version)
            self._finish_upload()
        else:
            self._live.version.lose_all()

    def load(self, key: str, offset: int, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Take a chunk of the attach's state: `data` at byte `offset` of tensor `key`, in memory order.

        Chunks may come in any order and again with equal bytes. ShadowError: unknown key, bytes outside the
        tensor, other bytes than a chunk before, or a job that is complete already.
        """
        with self._changed:
            if self._upload is None:
                raise ShadowError(f"{key}: the state of run {self.description.run} is complete, attach again")
            self._upload.add(key, offset, data)
            self._finish_upload()

    def missing(self) -> list[str]:
        """Keys of tensors that are not complete yet."""
        upload = self._upload
        return [] if upload is None else upload.missing()

    @property
    def ready(self) -> bool:
        """Whether steps can be applied: the whole state of the attach is there, or none is expected."""
        return self._upload is None and not self._failed

    @property
    def step(self) -> int:
        """The live step: that many optimizer steps are done."""
        return self._live.version.step

    @property
    def known_step(self) -> int | None:
        """The newest step that is held and fully known; None if there is none."""
        with self._changed:
            held = None if self._failed or self._upload is not None else self._newest_known()
            return None if held is None else held.version.step

    @property
    def unknown(self) -> Unknown:
        """What is not known of the live step."""
        with self._changed:
            return self._live.version.unknown.copy()

    @property
    def live(self) -> Version:
        """The live version. Only for the thread that applies: for others it changes at any moment."""
        return self._live.version

    @property
    def read(self) -> bool:
        """Whether somebody pins the live version."""
        return bool(self._live.pins)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Every field of every param group in force at the live step; at the attach's step, its own."""
        return copy.deepcopy(self._live.version.groups)

    @property
    def memory_bytes(self) -> int:
        """Bytes of state memory, the second copy included."""
        with self._changed:
            return self._live.version.nbytes + (self._spare.version.nbytes if self._spare else 0)

    @property
    def planned_bytes(self) -> int:
        """Most that `memory_bytes` comes to: two copies, every optimized parameter with all its state."""
        spec = self.description.optimizer
        sections = {"model", "buffer", *self._live.version.sections}
        sections |= {key for group in spec.groups for key in expected_keys(spec.name, group.fields)}
        return 2 * sum(self._layout.section_bytes(section) for section in sections)

    @property
    def copies(self) -> int:
        """Copies of the state beside the live one: 0 or 1."""
        return 0 if self._spare is None else 1

    def pin(self, timeout: float = PIN_TIMEOUT, *, whole: bool = True) -> Pin:
        """Hold the newest fully known step; if not `whole`, the live one, whatever is known of it.

        Waits while a step is being applied in place, at most `timeout` seconds. Raises NothingKnown.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._writing or (whole and self._keeps_known()), timeout):
                raise ShadowError(f"no whole step within {timeout:g} s: a step is still being applied")
            self._check_usable()
            held = self._newest_known() if whole else self._live
            if held is None:
                elements = self._live.version.unknown.elements
                raise NothingKnown(f"{elements} elements of step {self.step} are not known, and no older step is held")
            pin = Pin(held.version, self._release)
            held.pins.add(pin)
            return pin

    def element(self, key: str, index: int) -> bytes | None:
        """The bytes of one element of the live step's tensor `key`, which counts in memory order; None: unknown."""
        with self.pin(whole=False) as pin:
            if pin.unknown.of(key) & Ranges.of([(index, index + 1)]):
                return None
            spec, data = pin.tensors[key]
            return data[index * spec.itemsize : (index + 1) * spec.itemsize].tobytes()

    def digest(self) -> str | None:
        """Digest of the live step, see `reconstruct.digest`; None if it is not fully known."""
        with self.pin(whole=False) as pin:
            return pin.digest() if pin.whole else None

    def apply(
        self,
        step: int,
        gradients: Mapping[int, np.ndarray | None],
        groups: list[dict[str, Any]],
        lost: Mapping[int, Ranges] = _NO_LOSS,
    ) -> None:
        """Make optimizer step `step`, which must be the live step + 1.

        gradients: DDP index -> the reduced gradient, a contiguous array of the parameter's bytes in memory order
        (uint8 or typed), for every parameter that the optimizer owns; None says that the trainer's grad was None.
        groups: every field of every param group as in force in this step. lost: DDP index -> elements whose gradient
        is not known, whatever the array holds there: they are unknown from this step on.

        ShadowError leaves the live step as it was, except when torch itself fails in the middle of a step in place:
        then the shadow refuses all reads, because what it holds is no step.
        """
        in_force = self._checked(step, groups)
        named = named_gradients(self._layout, gradients)
        unknown = named_losses(self._layout, lost) if lost else {}
        self._move(step, in_force, unknown, lambda target: target.optimizer.step(named, in_force))

    def skip(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Step `step`, of whose gradients nothing is known: what it changed is unknown from this step on.

        Step counters go on and parameters without state get it, as in torch. `groups` and errors: as in `apply`.
        """
        in_force = self._checked(step, groups)
        unknown = {f"model/{slot.name}": slot.elements for slot in self._layout.slots if slot.stepped}
        name = self.description.optimizer.name
        self._move(step, in_force, unknown, lambda target: blank_step(target.version, name, in_force))

    def patch(
        self, key: str, ranges: Ranges, sections: Mapping[str, np.ndarray], start: int, counter: bytes | None = None
    ) -> None:
        """Take over elements `ranges` of the live step from outside: they are known from now on.

        sections: bytes of the elements from `start` on, by section as in `Version.places`; counter: the bytes of the
        parameter's `step`, needed where it is not known.

        Readers of the live version see unknown elements change; their pins say that these are unknown. If known ones
        get other values, the pins are revoked: what they show was wrong.
        """
        version = self._live.version
        with self._changed:
            if ranges - version.unknown.of(key):
                self._revoke(self._live)
            version.put(key, ranges, sections, start, counter)
            self._changed.notify_all()

    def doubt(self, key: str, ranges: Ranges) -> None:
        """A trainer shows that known elements are wrong, nobody knows since when: they are unknown in all versions, and
        whoever reads one that has them for known loses his pin."""
        with self._changed:
            for held in (self._live, self._spare):
                if held is not None and ranges - held.version.unknown.of(key):
                    self._revoke(held)
                    held.version.unknown.add(key, ranges, held.version.step)
            self._changed.notify_all()

    def reform(self, name: str, keys: tuple[str, ...], counter: bytes | None) -> None:
        """A trainer shows that parameter `name` has the state `keys` and this step counter, not those that are held.

        Everything of the parameter was computed wrongly, then, nobody knows since when: it is unknown in all versions,
        and whoever reads them loses his pin.
        """
        with self._changed:
            for held in (self._live, self._spare):
                if held is not None:
                    self._revoke(held)
                    held.version.reform(name, keys, counter)
            self._changed.notify_all()

    def _move(
        self, step: int, groups: list[dict[str, Any]], unknown: dict[str, Ranges], work: Callable[[_Copy], object]
    ) -> None:
        """Do `work`, which makes `step` out of the step before, in the right set of memory."""
        with self._changed:
            target = self._writable(keep=self._live.version.known and any(unknown.values()))
            in_place = self._writing = target is self._live
        try:
            if not in_place:
                copy_version(self._live.version, target.version)
            work(target)
        except BaseException as error:
            with self._changed:
                self._writing = False
                if in_place:
                    self._failed = f"step {step} failed half way ({error}): restore an older step"
                else:
                    self._spare = None
                self._changed.notify_all()
            raise
        with self._changed:
            target.version.step, target.version.groups = step, groups
            for key, ranges in unknown.items():
                target.version.unknown.add(key, ranges, step)
            self._writing = False
            if in_place:
                self._age_spare()
            else:
                self._live, self._spare, self._idle = target, self._live, 0
            self._changed.notify_all()

    def _new_copy(self, step: int, groups: list[dict[str, Any]]) -> _Copy:
        version, spec = Version(self._layout, step, groups), self.description.optimizer
        return _Copy(version, TileOptimizer(version, spec.name, len(spec.groups), self.description.device))

    def _finish_upload(self) -> None:
        if self._upload is not None and self._upload.finish():
            self._upload = None

    def _check_usable(self) -> None:
        if self._failed:
            raise ShadowError(self._failed)
        if self._upload is not None:
            keys = self._upload.missing()
            raise ShadowError(f"{len(keys)} tensors of the attach are not complete, the first is {keys[0]}")

    def _checked(self, step: int, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._check_usable()
        if step != self.step + 1:
            raise ShadowError(f"step {step} cannot follow step {self.step}")
        return checked_groups(self.description, groups)

    def _keeps_known(self) -> bool:
        """Whether the second set of memory holds the newest fully known version, which must stay."""
        return self._spare is not None and self._spare.version.known and not self._live.version.known

    def _newest_known(self) -> _Copy | None:
        if self._live.version.known:
            return self._live
        return self._spare if self._keeps_known() else None

    def _writable(self, keep: bool) -> _Copy:
        """Where the next step is made. keep: not in the live version's memory, whoever reads it or not."""
        end = time.monotonic() + self.apply_wait
        while keep or self._live.pins:
            if self._keeps_known():
                needed = self._live
            else:
                if self._spare is None:
                    self._spare = self._new_copy(self.step, self._live.version.groups)
                needed = self._spare
            if not needed.pins:
                return needed
            remaining = end - time.monotonic()
            if remaining <= 0:
                self._revoke(needed)
                return needed
            self._changed.wait(remaining)
        return self._live

    def _revoke(self, held: _Copy) -> None:
        for pin in held.pins:
            pin.revoke()
        self.revoked_pins += len(held.pins)
        held.pins.clear()

    def _age_spare(self) -> None:
        if self._spare is None or self._spare.pins or self._keeps_known():
            self._idle = 0
            return
        self._idle += 1
        if self._idle >= IDLE_STEPS:
            self._spare, self._idle = None, 0

    def _release(self, pin: Pin) -> None:
        with self._changed:
            for held in (self._live, self._spare):
                if held is not None:
                    held.pins.discard(pin)
            self._changed.notify_all()
