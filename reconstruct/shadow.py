"""The shadow: a job's parameters, buffers and optimizer state, current after every step.

It is built from the job's description alone, filled by the attach (`load`), moved forward by the reduced
gradients (`apply`) and read through pins. No sockets, no files; one thread applies, any number read.

A pin holds one whole version. While nobody pins the live version, a step is applied in place (a `pin()` that
comes meanwhile waits for its end). While somebody does, the step is made in a second set of memory and the
two change places, so readers see the old step and the job's next one is not late. There are never more than
these two: when both are pinned, `apply` waits up to `apply_wait` seconds and then revokes the pins of the
older one. Revocation happens before the first byte is overwritten, so a reader that asks `pin.revoked` after
it copied a chunk, and before it uses the chunk, can never take torn bytes for good ones.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowcheck.description import JobDescription, TensorSpec
from reconstruct.arena import Layout, ShadowError, Version
from reconstruct.digest import state_digest
from reconstruct.optimizer import TileOptimizer, copy_version, expected_keys
from reconstruct.upload import Upload

IDLE_STEPS = 16
"""Steps after which a second set of memory that nobody needed is given back."""

PIN_TIMEOUT = 60.0


@dataclass(slots=True, eq=False)
class _Copy:
    """One set of memory with the optimizer that works in it, and who reads it."""

    version: Version
    optimizer: TileOptimizer
    pins: set[Pin] = field(default_factory=set)


class PinRevoked(ShadowError):
    """The reader was too slow: the memory of its step was needed for a newer one."""


class Pin:
    """One whole step, held for reading. `tensors`: key -> (spec, uint8 view of memory-order bytes)."""

    def __init__(self, shadow: Shadow, held: _Copy) -> None:
        version = held.version
        self._shadow = shadow
        self._held = held
        self._revoked = False
        self.step = version.step
        self.groups = version.groups
        self.tensors: dict[str, tuple[TensorSpec, np.ndarray]] = version.tensors()

    @property
    def revoked(self) -> bool:
        """Whether the bytes may have changed. Ask after copying a chunk and before using it."""
        return self._revoked

    def check(self) -> None:
        """PinRevoked if what was copied so far may not be of this step."""
        if self._revoked:
            raise PinRevoked(f"step {self.step} was read too slowly and is gone, ask again for a newer one")

    def digest(self) -> str:
        """`reconstruct.digest.state_digest` of the step; PinRevoked if it was overwritten meanwhile."""
        result = state_digest(self.tensors)
        self.check()
        return result

    def release(self) -> None:
        """Let the memory go; the views must not be read any more. Calling it again does nothing."""
        self._shadow._release(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Shadow:
    """See the module text. `apply_wait`: seconds that `apply` waits for readers when both copies are pinned."""

    def __init__(self, description: JobDescription, *, apply_wait: float = 1.0) -> None:
        self.description = description
        self.apply_wait = apply_wait
        self.revoked_pins = 0
        self._layout = Layout(description)
        self._changed = threading.Condition()
        groups = [dict(group.fields) for group in description.optimizer.groups]
        self._live = self._new_copy(description.step, copy.deepcopy(groups))
        self._upload: Upload | None = Upload(description, self._live.version)
        self._spare: _Copy | None = None
        self._idle = 0
        self._writing = False
        self._failed = ""
        self._finish_upload()

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
        """Whether the whole state of the attach is there, so that steps can be applied and read."""
        return self._upload is None and not self._failed

    @property
    def step(self) -> int:
        """The live step: that many optimizer steps are done."""
        return self._live.version.step

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

    def pin(self, timeout: float = PIN_TIMEOUT) -> Pin:
        """Hold the live step. Waits while a step is being applied in place, at most `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._writing, timeout):
                raise ShadowError(f"no whole step within {timeout:g} s: a step is still being applied")
            self._check_usable()
            pin = Pin(self, self._live)
            self._live.pins.add(pin)
            return pin

    def element(self, key: str, index: int) -> bytes:
        """The bytes of one element of the live step's tensor `key`; `index` counts in memory order."""
        with self.pin() as pin:
            spec, data = pin.tensors[key]
            return data[index * spec.itemsize : (index + 1) * spec.itemsize].tobytes()

    def digest(self) -> str:
        """Digest of the live step, see `reconstruct.digest`."""
        with self.pin() as pin:
            return pin.digest()

    def apply(self, step: int, gradients: Mapping[int, np.ndarray | None], groups: list[dict[str, Any]]) -> None:
        """Make optimizer step `step`, which must be the live step + 1.

        `gradients`: DDP index -> the reduced gradient, a contiguous array of the parameter's bytes in memory
        order (uint8 or typed), for every parameter that the optimizer owns; None says that the trainer's grad
        was None. `groups`: every field of every param group as in force in this step. ShadowError leaves the
        live step as it was, except when torch itself fails in the middle of a step in place: then the shadow
        refuses all reads, because what it holds is no step.
        """
        self._check_usable()
        if step != self.step + 1:
            raise ShadowError(f"step {step} cannot follow step {self.step}")
        named = self._named_gradients(gradients)
        in_force = self._checked_groups(groups)
        with self._changed:
            target = self._writable()
            in_place = self._writing = target is self._live
        try:
            if not in_place:
                copy_version(self._live.version, target.version)
            target.optimizer.step(named, in_force)
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
            target.version.step, target.version.groups = step, in_force
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

    def _writable(self) -> _Copy:
        end = time.monotonic() + self.apply_wait
        while self._live.pins:
            if self._spare is None:
                self._spare = self._new_copy(self.step, self._live.version.groups)
            if not self._spare.pins:
                return self._spare
            remaining = end - time.monotonic()
            if remaining <= 0:
                for pin in self._spare.pins:
                    pin._revoked = True
                self.revoked_pins += len(self._spare.pins)
                self._spare.pins.clear()
                return self._spare
            self._changed.wait(remaining)
        return self._live

    def _age_spare(self) -> None:
        if self._spare is None or self._spare.pins:
            self._idle = 0
            return
        self._idle += 1
        if self._idle >= IDLE_STEPS:
            self._spare, self._idle = None, 0

    def _release(self, pin: Pin) -> None:
        with self._changed:
            pin._held.pins.discard(pin)
            self._changed.notify_all()

    def _named_gradients(self, gradients: Mapping[int, np.ndarray | None]) -> dict[str, np.ndarray]:
        named = {}
        for slot in self._layout.slots:
            if slot.index is None or slot.group < 0:
                continue
            if slot.index not in gradients:
                raise ShadowError(f"no gradient for parameter {slot.name} (index {slot.index})")
            gradient = gradients[slot.index]
            if gradient is None:
                continue
            if not gradient.flags.c_contiguous or gradient.nbytes != slot.spec.nbytes:
                raise ShadowError(f"gradient of {slot.name}: not {slot.spec.nbytes} contiguous bytes")
            data = gradient.reshape(-1).view(np.uint8)
            if data.ctypes.data % slot.spec.itemsize:
                raise ShadowError(f"gradient of {slot.name}: not aligned to {slot.spec.itemsize} bytes")
            # torch warns about read-only memory; it is not written, but a copy is the only way to say so.
            named[slot.name] = data if data.flags.writeable else data.copy()
        return named

    def _checked_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        specs = self.description.optimizer.groups
        if len(groups) != len(specs):
            raise ShadowError(f"{len(groups)} param groups instead of {len(specs)}: attach again")
        for number, (fields, spec) in enumerate(zip(groups, specs, strict=True)):
            lacking = sorted(set(spec.fields) - set(fields))
            if lacking:
                raise ShadowError(f"param group {number} lacks {', '.join(lacking)}")
            if bool(fields.get("fused")) != bool(spec.fields.get("fused")):
                raise ShadowError(f"param group {number} changed its implementation (fused): attach again")
        return copy.deepcopy([{k: v for k, v in fields.items() if k != "params"} for fields in groups])
