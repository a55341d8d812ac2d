"""One whole step of training state, as it passes from the shadow to the store, the server and the CLI.

Tensor keys (the same in memory, in the job file and on the wire):

* ``model/<parameter name>``
* ``buffer/<buffer name>``
* ``optimizer/<parameter name>/<state key>`` with the state keys ``step``, ``exp_avg``, ``exp_avg_sq``,
  ``max_exp_avg_sq`` and ``momentum_buffer``

This module imports neither torch nor numba: ``status`` and ``verify`` use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowcheck.description import JobDescription, TensorSpec
from reconstruct.unknown import Unknown


@dataclass
class Snapshot:
    """The state after optimizer step ``step``, whole: never a mix of two steps."""

    description: JobDescription
    run: str
    epoch: int
    step: int
    confirmed: bool
    exact: bool
    reasons: list[str] = field(default_factory=list)
    """Why ``exact`` is false; empty when it is true."""
    not_covered: list[str] = field(default_factory=list)
    """Names of buffers whose bytes are not proven to be those of this step."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Every field of every parameter group, as at the end of the step's iteration: with `scheduler`, the values for
    the next step; without one, those that were in force in this step."""
    tensors: dict[str, tuple[TensorSpec, np.ndarray]] = field(default_factory=dict)
    """Key -> spec and uint8[nbytes], the tensor's bytes in memory order. May be a view of the shadow's
    arena: then it is valid only while the shadow's pin is held."""
    scheduler: dict[str, Any] | None = None
    """{"class", "state"} of the learning-rate scheduler as it stands for the next step; None if not known."""
    notes: list[str] = field(default_factory=list)
    """What a person should know who gets this step instead of a newer one; not stored."""
    unknown: Unknown = field(default_factory=Unknown)
    """Elements whose bytes are not those of this step, handed out on demand alone; such a step is never stored."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(int(data.nbytes) for _, data in self.tensors.values())
