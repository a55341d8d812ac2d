"""From the landings of a step to its gradients: an element with a byte that is not known is lost, and no other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flowcheck.description import TensorSpec
from reconstruct.buckets import layout
from reconstruct.gradients import gather, missing
from reconstruct.landing import Landing
from reconstruct.ranges import Ranges

LONG = TensorSpec("float64", (5,), (1,))
SPECS = [TensorSpec("float32", (n,), (1,)) for n in (40, 24, 1)] + [LONG]
LAYOUT = layout([[2, 0], [3], [1]], SPECS)


def whole(size: int, item: int) -> Landing:
    landing = Landing(size, item, 2)
    landing.put(0, np.random.default_rng(size).integers(1, 255, size, np.uint8), 0, 1)
    return landing


@pytest.mark.parametrize("seed", range(20))
def test_random_holes_and_conflicts(seed: int) -> None:
    rng = random.Random(seed)
    landings, known = [], []
    for bucket in LAYOUT.buckets:
        size = bucket.nbytes
        landing, mask = Landing(size, bucket.itemsize, 2, 24), np.zeros(size, bool)
        for _ in range(rng.choice([0, 1, 3, 8])):
            low = rng.randrange(size)
            high = rng.randint(low, size)
            landing.put(low, np.full(high - low, 7, np.uint8), 0, 1)
            mask[low:high] = True
        for _ in range(rng.choice([0, 0, 1, 2])):
            low = rng.randrange(size)
            landing.poison(low, 1, 0)
            mask[low] = False
        if 2 * mask.sum() < landing.covered:
            mask[:] = False
        landings.append(landing)
        known.append(mask)
    found = gather(LAYOUT, landings, SPECS)
    for number, (bucket, mask) in enumerate(zip(LAYOUT.buckets, known, strict=True)):
        gone = np.zeros(bucket.nbytes, bool)
        for at, offset, length in found.holes:
            if at == number:
                gone[offset : offset + length] = True
        assert np.array_equal(gone, ~mask)
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            mine = mask[offset : offset + SPECS[index].nbytes].reshape(-1, bucket.itemsize).all(axis=1)
            lost = found.lost.get(index, Ranges.of([])).mask(0, len(mine))
            assert np.array_equal(lost, ~mine) and (index in found.lost) == (not mine.all())
            values = found.values[index].reshape(-1, bucket.itemsize)
            assert (values[mine] == 7).all() and not values[~mine].any()
    assert list(found.holes) == sorted(found.holes)


def test_what_is_whole_is_not_copied_and_what_is_not_is() -> None:
    landings: list[Landing | None] = [whole(164, 4), whole(40, 8), None]
    found = gather(LAYOUT, landings, SPECS)
    assert not found.lost.keys() - {1} and dict(found.lost) == {1: Ranges.of([(0, 24)])}
    assert np.shares_memory(found.values[0], landings[0].data) and not found.values[1].any()  # type: ignore[union-attr]
    landings[0].poison(8, 1, 0)  # type: ignore[union-attr]
    found = gather(LAYOUT, landings, SPECS)
    assert not np.shares_memory(found.values[0], landings[0].data)  # type: ignore[union-attr]
    assert np.shares_memory(found.values[2], landings[0].data)  # type: ignore[union-attr]
    assert dict(found.lost) == {0: Ranges.of([(1, 2)]), 1: Ranges.of([(0, 24)])}


@pytest.mark.parametrize("how", ["size", "many", "nothing", "most", "merged"])
def test_a_landing_of_which_it_is_not_known_what_is_right_is_lost_whole(how: str) -> None:
    landing = whole(164, 4)
    if how == "size":
        landing.poison(8, 4, 0)
        landing.condemn()
    elif how == "many":
        for _ in range(64):
            landing.poison(8, 4, 0)
        assert missing(landing, 164) == Ranges.of([(8, 12)])
        landing.poison(8, 4, 0)
    elif how == "most":
        landing.poison(0, 82, 0)
        assert missing(landing, 164) == Ranges.of([(0, 82)])
        landing.poison(82, 1, 0)
    elif how == "nothing":
        landing.poison(8, 0, 0)
    else:
        other = whole(164, 4)
        other.condemn()
        landing.merge(other, 0)
    assert missing(landing, 164) == Ranges.of([(0, 164)])


def test_conflicts_of_a_landing_that_is_merged_are_taken_over() -> None:
    landing, other = whole(164, 4), whole(164, 4)
    other.poison(8, 4, 0)
    landing.merge(other, 0)
    assert missing(landing, 164) == Ranges.of([(8, 12)])
