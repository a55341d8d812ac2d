"""Distances between values: in units in the last place, and relative."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from reconstruct.ulps import gap


def raw(*values: float, dtype: torch.dtype = torch.float32) -> np.ndarray:
    return torch.tensor(values, dtype=dtype).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_neighbours_are_one_apart(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    up = torch.nextafter(torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)).item()
    found = gap(name, raw(3, 1, -1, 3, dtype=dtype), raw(3, up, -up, 3, dtype=dtype))
    assert found is not None and (found.elements, found.first, found.last, found.ulps) == (2, 1, 2, 1)
    assert found.relative == pytest.approx((up - 1) / up)
    assert gap(name, raw(1, 2, dtype=dtype), raw(1, 2, dtype=dtype)) is None


def test_signs_and_what_is_no_number() -> None:
    smallest = 2.0**-149
    across = gap("float32", raw(-smallest), raw(smallest))
    assert across is not None and across.ulps == 2 and across.relative == 2.0
    zeros = gap("float32", raw(0.0), raw(-0.0))
    assert zeros is not None and (zeros.elements, zeros.ulps, zeros.relative) == (1, 0, 0.0)
    lost = gap("float32", raw(1.0, 1.0), raw(math.nan, 1.0))
    assert lost is not None and lost.relative == math.inf and lost.elements == 1
    ends = gap("float64", raw(-1.7e308, dtype=torch.float64), raw(1.7e308, dtype=torch.float64))
    assert ends is not None and ends.ulps > 1 << 63


@pytest.mark.parametrize(("dtype", "one", "other", "apart"), [
    ("int64", -(2**62), 2**62, 2**63), ("uint8", 3, 250, 247), ("bool", 0, 1, 1), ("int32", -1, 1, 2),
])  # fmt: skip
def test_whole_numbers(dtype: str, one: int, other: int, apart: int) -> None:
    kind = getattr(torch, dtype)
    found = gap(dtype, raw(one, dtype=kind), raw(other, dtype=kind))
    assert found is not None and found.ulps == apart


def test_of_complex_numbers_the_larger_part_counts() -> None:
    here, there = raw(1 + 1j, dtype=torch.complex64), raw(1 + 1.5j, dtype=torch.complex64)
    found = gap("complex64", here, there)
    assert found is not None and found.elements == 1 and found.relative == pytest.approx(1 / 3)
