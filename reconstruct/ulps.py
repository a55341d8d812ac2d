"""How far two sets of values are apart: in units in the last place, and relative to the values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Gap", "gap"]

_ORDERED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class Gap:
    """Where and how two tensors differ: `elements` in number, the `first` and the `last` one; over all of them the
    largest distance in `ulps`, the largest `relative` one and the largest `absolute` one (the last two inf beside a NaN
    or infinity that the other has not)."""

    elements: int
    first: int
    last: int
    ulps: int
    relative: float
    absolute: float


def gap(dtype: str, here: np.ndarray, there: np.ndarray) -> Gap | None:
    """The gap between two tensors of `dtype` (torch's name), given as uint8 bytes of the same length; None if they are
    equal to the bit. Of complex numbers the larger of their parts' distances counts; zeros of both signs are 0 apart.
    """
    kind = getattr(torch, dtype)
    size = kind.itemsize
    differs = np.flatnonzero((here.reshape(-1, size) != there.reshape(-1, size)).any(axis=1))
    if not len(differs):
        return None
    sides = [np.ascontiguousarray(side.reshape(-1, size)[differs]).reshape(-1) for side in (here, there)]
    if not (kind.is_floating_point or kind.is_complex):
        whole = [side.view(np.uint8 if dtype == "bool" else dtype) for side in sides]
        return Gap(len(differs), int(differs[0]), int(differs[-1]), _distance(*whole), *_apart(*whole))
    part = size // 2 if kind.is_complex else size
    ulps = _distance(*(_in_order(side, part) for side in sides))
    values = [torch.from_numpy(side).view(kind) for side in sides]
    wide = [(torch.view_as_real(value) if kind.is_complex else value).double().numpy() for value in values]
    return Gap(len(differs), int(differs[0]), int(differs[-1]), ulps, *_apart(*wide))


def _in_order(data: np.ndarray, size: int) -> np.ndarray:
    """The bits of floats as whole numbers that are ordered as the values are."""
    bits = data.view(_ORDERED[size])
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits)


def _distance(here: np.ndarray, there: np.ndarray) -> int:
    # Two int64 may be further apart than an int64 can tell: uint64 holds it.
    high, low = np.maximum(here, there).astype(np.uint64), np.minimum(here, there).astype(np.uint64)
    return int((high - low).max())


def _apart(here: np.ndarray, there: np.ndarray) -> tuple[float, float]:
    """The largest relative and the largest absolute distance."""
    with np.errstate(all="ignore"):
        one, other = here.astype(np.float64), there.astype(np.float64)
        absolute = np.where(here == there, 0.0, np.abs(one - other))
        relative = np.where(here == there, 0.0, absolute / np.maximum(np.abs(one), np.abs(other)))
    return _largest(relative), _largest(absolute)


def _largest(values: np.ndarray) -> float:
    return float(np.where(np.isnan(values), np.inf, values).max())
