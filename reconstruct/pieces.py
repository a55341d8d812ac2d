"""A trainer's piece of the state: one range of a tensor as of the end of a step, and its way forward from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconstruct.arena import Layout, Slot, Version, bits
from reconstruct.optimizer import STATE_KEYS, TileOptimizer
from reconstruct.ranges import NOTHING, Ranges
from reconstruct.step_events import StepReady

__all__ = ["Forward", "Piece", "Unfit"]


class Unfit(Exception):
    """A piece that cannot be one of the tensor that was asked for; the text completes "a piece that ..."."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What a step did to a range of a parameter: the gradient's bytes there, None if the trainer's grad was None, the
    fields of its param group, and elements (of the whole tensor) whose gradient is lost. blank: nothing is known."""

    gradient: np.ndarray | None
    fields: Mapping[str, Any]
    lost: Ranges
    blank: bool = False

    @classmethod
    def of(cls, ready: StepReady, slot: Slot, lo: int, hi: int) -> Forward:
        """What `ready` did to elements [lo, hi) of a stepped parameter; the gradient is a copy."""
        fields = ready.groups[slot.group]
        if ready.blank:
            return cls(None, fields, Ranges.of([(lo, hi)]), True)
        index = -1 if slot.index is None else slot.index
        gradient = ready.gradients[index]
        if gradient is not None:
            itemsize = slot.spec.itemsize
            gradient = gradient.reshape(-1).view(np.uint8)[lo * itemsize : hi * itemsize].copy()
        lost = ready.lost.get(index, NOTHING)
        return cls(gradient, fields, lost & Ranges.of([(lo, hi)]) if lost else NOTHING)

    @property
    def nbytes(self) -> int:
        return 0 if self.gradient is None else self.gradient.nbytes


class Piece:
    """Elements [lo, hi) of a tensor as of the end of step `step`, in memory of its own.

    slot: the parameter, with `stepped` false for what no optimizer steps. optimizer, device: as in the description.
    sections, counter: see `reconstruct.repair.Repair.arrived`. Raises Unfit.
    """

    def __init__(
        self,
        slot: Slot,
        lo: int,
        hi: int,
        step: int,
        sections: Mapping[str, Any],
        counter: bytes | None,
        optimizer: str,
        device: str,
    ) -> None:
        self.lost = NOTHING  # elements of the whole tensor that are not known any more
        self.blank = False  # nothing of it is, its step counter included
        self._name = slot.name
        self._optimizer: TileOptimizer | None = None
        self._kind, self._device = optimizer, device
        self._version = Version(Layout.part(slot, lo, hi), step, [])
        self._slot = self._version.layout.slots[0]
        keys = _state_keys(self._slot, optimizer, sections, counter)
        for section, given in sections.items():
            data = np.frombuffer(given, np.uint8)
            if len(data) != self._slot.spec.nbytes:
                raise Unfit(f"brings {len(data)} bytes of {section} instead of {self._slot.spec.nbytes}")
            self._version.parameter(self._slot, section)[:] = data
        if keys:
            self._version.set_state_keys(slot.name, keys)
        if counter is not None:
            self._version.set_counter(self._slot, counter)

    @property
    def step(self) -> int:
        return self._version.step

    @property
    def keys(self) -> tuple[str, ...]:
        """The state keys that the parameter has, `step` included."""
        return self._version.state_keys.get(self._name, ())

    @property
    def counter(self) -> bytes | None:
        """The bytes of the parameter's step counter."""
        return self._version.counter(self._slot)[1].tobytes() if "step" in self.keys else None

    def sections(self) -> dict[str, np.ndarray]:
        """The elements by section, as in `Version.places`."""
        sections = ["model", *(key for key in self.keys if key != "step")]
        dtype = bits(self._slot.spec.itemsize)
        return {section: self._version.parameter(self._slot, section).view(dtype) for section in sections}

    def forward(self, step: Forward | None) -> None:
        """Go on by one step. None: one that did not concern this tensor."""
        if step is not None:
            self.lost |= step.lost
            self.blank |= step.blank
            if step.gradient is not None:
                if self._optimizer is None:
                    self._optimizer = TileOptimizer(self._version, self._kind, 1, self._device)
                self._optimizer.step({self._name: step.gradient}, [dict(step.fields)])
        self._version.step += 1


def _state_keys(slot: Slot, optimizer: str, sections: Mapping[str, Any], counter: bytes | None) -> tuple[str, ...]:
    """The parameter's state keys, as a piece with these sections shows them."""
    every = STATE_KEYS[optimizer] if slot.group >= 0 else ()
    given = {*sections, "step"} if counter is not None else set(sections)
    keys = tuple(key for key in every if key in given)
    # Adam has amsgrad's maximum or not, the rest of a state comes whole or not at all.
    whole = not keys or set(every) - {"max_exp_avg_sq"} <= set(keys)
    if given != {"model", *keys} or not whole:
        raise Unfit(f"brings {', '.join(sorted(given))}, which is no state of {optimizer}")
    if counter is not None and len(counter) != np.dtype(slot.step_dtype).itemsize:
        raise Unfit(f"has a step counter of {len(counter)} bytes where {slot.step_dtype} was described")
    return keys
