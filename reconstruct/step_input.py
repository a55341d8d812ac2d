"""What an optimizer step is given, checked against the job before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowcheck.description import JobDescription
from reconstruct.arena import Layout, ShadowError
from reconstruct.ranges import Ranges

__all__ = ["checked_groups", "named_gradients", "named_losses"]


def named_gradients(layout: Layout, gradients: Mapping[int, np.ndarray | None]) -> dict[str, np.ndarray]:
    """Parameter name -> uint8[nbytes] of its gradient, from DDP index -> array; parameters without one are left out."""
    named = {}
    for slot in layout.slots:
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


def named_losses(layout: Layout, lost: Mapping[int, Ranges]) -> dict[str, Ranges]:
    """Tensor key -> elements whose gradient is lost, from DDP index -> elements."""
    by_index = {slot.index: slot for slot in layout.slots if slot.index is not None and slot.group >= 0}
    named = {}
    for index, ranges in lost.items():
        slot = by_index.get(index)
        if slot is None or ranges - slot.elements:
            raise ShadowError(f"lost elements {ranges!r:.80} of parameter {index}, which has no such gradient")
        if ranges:
            named[f"model/{slot.name}"] = ranges
    return named


def checked_groups(description: JobDescription, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the param groups' fields in force in a step."""
    specs = description.optimizer.groups
    if len(groups) != len(specs):
        raise ShadowError(f"{len(groups)} param groups instead of {len(specs)}: attach again")
    for number, (fields, spec) in enumerate(zip(groups, specs, strict=True)):
        lacking = sorted(set(spec.fields) - set(fields))
        if lacking:
            raise ShadowError(f"param group {number} lacks {', '.join(lacking)}")
        if bool(fields.get("fused")) != bool(spec.fields.get("fused")):
            raise ShadowError(f"param group {number} changed its implementation (fused): attach again")
    return copy.deepcopy([{k: v for k, v in fields.items() if k != "params"} for fields in groups])
