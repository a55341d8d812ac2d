"""The short way into a landing, `continues` and `extend`: taken exactly where it does what `put_across` would do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mirror.memory import address_of
from reconstruct.landing import COMPLETED, SEGMENT_BYTES, Landing, continues, extend, put_across


def goes_on(landing: Landing, offset: int, count: int) -> bool:
    """Whether offset..offset+count lies right behind a covered range, in its segment, and reaches no other."""
    ranges = landing.ranges()
    same = offset // SEGMENT_BYTES == (offset + count - 1) // SEGMENT_BYTES
    starts = offset % SEGMENT_BYTES != 0 and any(end == offset for _, end in ranges)
    free = all(end <= offset or start > offset + count for start, end in ranges) or any(
        start == offset + count and start % SEGMENT_BYTES == 0 for start, _ in ranges
    )
    touches = any(start == offset + count and start % SEGMENT_BYTES for start, _ in ranges)
    return same and starts and free and not touches


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_leave_the_same(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([3 * SEGMENT_BYTES, 2 * SEGMENT_BYTES + 4096, 20_000])
    values = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    short, plain = Landing(size, 1, 2), Landing(size, 1, 2)
    grain = 512
    marks = list(range(0, size, grain))
    went = 0
    for _ in range(400):
        # Mostly what follows a piece already there, as packets do, else anywhere; a few lie across a border.
        ends = [end for _, end in short.ranges() if end < size]
        offset = rng.choice(ends) if ends and rng.random() < 0.7 else rng.choice(marks)
        count = min(size - offset, grain * rng.choice([1, 1, 2, 5]) - rng.choice([0, 0, 0, 100]))
        ts = rng.randint(1, 1000)
        node = int(continues(short.address, offset, count))
        assert (node != 0) == goes_on(short, offset, count), (offset, count, short.ranges())
        source = address_of(values) + offset
        for landing in (short, plain):
            landing.reserve(count)
        wanted = int(put_across(plain.address, offset, source, count, 0, ts))
        if node:
            went += 1
            short.data[offset : offset + count] = values[offset : offset + count]
            assert int(extend(short.address, node, count, ts)) == wanted
        else:
            assert int(put_across(short.address, offset, source, count, 0, ts)) == wanted
        assert short.ranges() == plain.ranges() and short.covered == plain.covered and short.time == plain.time
    assert went > 10 and not short.poisoned
    shown = np.zeros(size, bool)
    for start, end in short.ranges():
        shown[start:end] = True
    assert (short.data[shown] == values[shown]).all()


def test_the_last_piece_completes() -> None:
    landing = Landing(3000, 4, 2)
    data = np.arange(3000, dtype=np.int64).astype(np.uint8)
    assert landing.put(0, data[:2000], 0, 5) == 0
    node = int(continues(landing.address, 2000, 1000))
    assert node and int(extend(landing.address, int(continues(landing.address, 2000, 400)), 400, 3)) == 0
    assert landing.time == 5 and landing.holes() == [[2400, 600]]
    node = int(continues(landing.address, 2400, 600))
    assert int(extend(landing.address, node, 600, 9)) == COMPLETED and landing.time == 9 and landing.complete
