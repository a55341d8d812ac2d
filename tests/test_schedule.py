"""The ring schedule against the worked examples of recorded jobs and against an independent enumeration."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gloo_traffic import ring_messages

from reconstruct.gloo import schedule


def test_large_bucket_as_recorded() -> None:
    assert schedule.ring(12_902_440, 4, 4) == (1 << 20, 16, 4, 806_404, 16)
    expected = [806404] * 3 + [806380] + [806404] * 8 + [806404] * 4 + [806404] * 3 + [806380] + [806404] * 4
    assert schedule.lengths(12_902_440, 4, 4, 2).tolist() == expected
    assert schedule.message(12_902_440, 4, 4, 2, 3) == (12_096_060, 806_380, False)
    assert schedule.message(12_902_440, 4, 4, 2, 12) == (8 * 806_404, 806_404, True)
    assert schedule.ring(25 << 20, 4, 4)[1:4] == (28, 7, 936_232)


@pytest.mark.parametrize(
    ("size", "world", "expected"),
    [
        (8, 4, {0: (0, 2), 1: (2, 0), 2: (2, 2), 3: (2, 2)}),
        (32, 3, {0: (2, 4), 1: (2, 2), 2: (4, 2)}),
        (4, 5, {0: (0, 1), 1: (1, 0), 2: (1, 1), 3: (1, 1), 4: (1, 1)}),
    ],
)
def test_tiny_tensors_as_recorded(size: int, world: int, expected: dict[int, tuple[int, int]]) -> None:
    assert {rank: schedule.counts(size, 4, world, rank) for rank in expected} == expected


def test_ends() -> None:
    assert schedule.total(0, 4, 4, 1) == 0
    assert schedule.first_length(0, 4, 4, 1) == -1
    assert schedule.message(8, 4, 4, 0, 2) == (0, -1, False)
    assert schedule.message(8, 4, 4, 0, -1)[1] == -1
    assert schedule.first_length(8, 4, 4, 0) == 4


def _case(rng: random.Random) -> tuple[int, int, int, int]:
    world, itemsize = rng.randint(2, 9), rng.choice((1, 2, 4, 8))
    return itemsize * max(1, int(10 ** rng.uniform(0, 7.3))), itemsize, world, rng.randrange(world)


def test_every_message_agrees_with_the_enumeration() -> None:
    rng = random.Random(1)
    for _ in range(400):
        size, itemsize, world, rank = _case(rng)
        expected = ring_messages(size, itemsize, world, rank)
        assert schedule.total(size, itemsize, world, rank) == len(expected)
        got = [schedule.message(size, itemsize, world, rank, i) for i in range(len(expected))]
        assert got == expected, (size, itemsize, world, rank)


def test_final_chunks_cover_the_tensor() -> None:
    rng = random.Random(2)
    for _ in range(60):
        size, itemsize, world, rank = _case(rng)
        size = size % 100_000 + itemsize - size % 100_000 % itemsize
        seen = np.zeros(size, np.int64)
        for sender in (rank, (rank + 1) % world):
            for offset, length, final in ring_messages(size, itemsize, world, sender):
                seen[offset : offset + length] += final
        assert seen.min() >= 1  # both directions of one port show everything


def test_size_is_inferred_from_one_link() -> None:
    rng = random.Random(3)
    for _ in range(4000):
        size, itemsize, world, rank = _case(rng)
        lengths = schedule.lengths(size, itemsize, world, rank)
        assert schedule.infer_size(lengths, itemsize, world, rank) == size
        if lengths.size > 2 and lengths.max() > itemsize:
            lengths[rng.randrange(lengths.size)] += itemsize
            assert schedule.infer_size(lengths, itemsize, world, rank) != size


def test_what_is_no_schedule() -> None:
    assert schedule.infer_size(np.array([4, 8, 12]), 4, 4, 0) == -1
    assert schedule.infer_size(np.array([0]), 4, 4, 0) == -1
    assert schedule.infer_size(np.empty(0, np.int64), 4, 4, 0) == -1


def test_broadcast_tree() -> None:
    assert schedule.broadcast_links(4, 0) == [(0, 1), (0, 2), (1, 3)]
    assert sorted(schedule.broadcast_links(5, 2)) == sorted([(2, 3), (2, 4), (3, 0), (2, 1)])
    for world in range(2, 20):
        links = schedule.broadcast_links(world, 3 % world)
        assert sorted(b for _, b in links) == sorted(r for r in range(world) if r != 3 % world)
