"""Sets of ranges against plain sets of numbers, and the ledger of unknown elements against an array of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.values import DescriptionError
from reconstruct import unknown as unknown_module
from reconstruct.ranges import NOTHING, Ranges, meet
from reconstruct.unknown import Unknown

LENGTH = 24
pair = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: (min(ends), max(ends)))
pairs = st.lists(pair, max_size=8)


def numbers(ranges: Ranges) -> set[int]:
    return {i for lo, hi in ranges for i in range(lo, hi)}


def check_form(ranges: Ranges) -> None:
    flat = ranges.array.reshape(-1)
    assert ranges.array.dtype == np.int64 and (np.diff(flat) > 0).all()
    assert not ranges.array.flags.writeable


@settings(deadline=None)
@given(pairs, pairs)
def test_operators_are_those_of_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = Ranges.of(one), Ranges.of(np.array(other, np.int64).reshape(-1, 2))
    mine, theirs = ({i for lo, hi in given for i in range(lo, hi)} for given in (one, other))
    for result, expected in ((a, mine), (a | b, mine | theirs), (a & b, mine & theirs), (a - b, mine - theirs)):
        check_form(result)
        assert numbers(result) == expected
        assert (result.total, bool(result)) == (len(expected), bool(expected))
        assert result == Ranges.of([(i, i + 1) for i in expected]) and len(result) == len(result.array)
        assert hash(result) == hash(Ranges.of(list(result)))
    assert (a == b) is (mine == theirs) and a != "a"
    assert numbers(a.complement & Ranges.of([(-3, LENGTH + 3)])) == set(range(-3, LENGTH + 3)) - mine


@settings(deadline=None)
@given(pairs, pair)
def test_masks(one: list[tuple[int, int]], window: tuple[int, int]) -> None:
    ranges = Ranges.of(one)
    mask = ranges.mask(*window)
    assert mask.dtype == np.bool_ and [i + window[0] for i in np.flatnonzero(mask)] == sorted(
        numbers(ranges) & set(range(*window))
    )
    back = Ranges.of_mask(mask, window[0])
    check_form(back)
    assert back == ranges & Ranges.of([window])


def test_what_lies_where() -> None:
    """`meet` also takes neighbours that touch, and tells them apart."""
    found, which = meet(np.array([[0, 4, 7], [4, 6, 8], [9, 12, 9]]), Ranges.of([(1, 5), (10, 11)]))
    assert found.tolist() == [[1, 4], [4, 5], [10, 11]] and which.tolist() == [0, 1, 2]


def test_edges() -> None:
    assert not NOTHING and list(NOTHING) == [] and NOTHING.total == 0 and Ranges.of([(3, 3)]) == NOTHING
    assert repr(Ranges.of([(1, 2), (2, 5)])) == "Ranges.of([(1, 5)])"
    with pytest.raises(ValueError, match="ends before it begins"):
        Ranges.of([(3, 2)])
    with pytest.raises(ValueError, match="read-only"):
        Ranges.of([(1, 2)]).array[0, 0] = 0
    given_array = np.array([[1, 2], [5, 6]])
    held = Ranges.of(given_array)
    given_array[0, 0] = 0  # the caller's own memory
    assert list(held) == [(1, 2), (5, 6)]


# Unknown

operation = st.tuples(st.sampled_from(["add", "remove"]), st.sampled_from(["model/a", "buffer/b"]), pairs)


@settings(max_examples=100, deadline=None)
@given(st.lists(operation, max_size=12), st.sampled_from([1, 3, 1 << 16]))
def test_unknown_is_an_array_of_steps(operations: list[tuple[str, str, list[tuple[int, int]]]], limit: int) -> None:
    model = {key: np.full(LENGTH, -1) for key in ("model/a", "buffer/b")}
    unknown = Unknown()
    before = unknown.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unknown_module, "MAX_RANGES", limit)
        for step, (kind, key, given_pairs) in enumerate(operations):
            again = Unknown.from_json(unknown.to_json())
            assert again == unknown if limit > 3 else again.elements >= unknown.elements
            ranges = Ranges.of(given_pairs)
            mask = ranges.mask(0, LENGTH)
            if kind == "add":
                model[key][mask & (model[key] < 0)] = step
                unknown.add(key, ranges, step)
            else:
                model[key][mask] = -1
                unknown.remove(key, ranges)
            since = {name: np.full(LENGTH, -1) for name in model}
            count = 0
            for name, rows in unknown.items():
                assert rows and [lo for lo, _, _ in rows[1:]] >= [hi for _, hi, _ in rows[:-1]]
                for lo, hi, when in rows:
                    since[name][lo:hi] = when
                    count += 1
            if limit == 1 << 16:
                assert all(np.array_equal(since[name], model[name]) for name in model)
            elif kind == "add":
                assert count <= max(limit, 2)
            for name, steps in model.items():  # more may be unknown, and since earlier, but never less
                lost = steps >= 0
                assert (since[name][lost] >= 0).all() and (since[name][lost] <= steps[lost]).all()
                assert np.array_equal(unknown.of(name).mask(0, LENGTH), since[name] >= 0)
                check_form(unknown.of(name))
                model[name] = since[name]
            every = np.concatenate(list(since.values()))
            assert unknown.elements == (every >= 0).sum() and bool(unknown) == (every >= 0).any()
            assert unknown.oldest == (every[every >= 0].min() if (every >= 0).any() else None)
            assert len(unknown) == count == sum(len(rows) for _, rows in unknown.arrays())
    assert not before  # copies are their own


def test_too_many_ranges_are_joined_where_they_lie_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_module, "MAX_RANGES", 4)
    unknown = Unknown()
    unknown.add("model/a", Ranges.of([(0, 1), (3, 4), (100, 101)]), 9)
    unknown.add("model/b", Ranges.of([(7, 8)]), 5)
    assert len(unknown) == 4
    unknown.add("model/a", Ranges.of([(200, 201), (5, 6)]), 12)
    assert dict(unknown.items()) == {"model/a": [(0, 101, 9), (200, 201, 12)], "model/b": [(7, 8, 5)]}
    for i in range(10):
        unknown.add(f"model/{i}", Ranges.of([(0, 5)]), 13)
    assert len(unknown) == 12 and unknown.of("model/a") == Ranges.of([(0, 201)])


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"model/a": []},
        {"model/a": [[1, 2]]},
        {"model/a": [[2, 2, 0]]},
        {"model/a": [[0, 2, -1]]},
        {"model/a": [[0, 2.0, 1]]},
        {"model/a": [[5, 6, 1], [1, 2, 1]]},
        {"model/a": [[1, 4, 1], [3, 6, 2]]},
        {"model/a": [[0, 1 << 62, 1]]},
        {"x" * 2000: [[0, 1, 1]]},
    ],
    ids=str,
)
def test_json_of_unknown_is_checked(data: object) -> None:
    with pytest.raises(DescriptionError, match="unknown"):
        Unknown.from_json(data)


def test_json_of_unknown_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_module, "MAX_RANGES", 3)
    rows = [[2 * i, 2 * i + 1, 1] for i in range(3)]
    assert len(Unknown.from_json({"model/a": rows})) == 3
    with pytest.raises(DescriptionError, match="4 ranges, at most 3"):
        Unknown.from_json({"model/a": rows, "model/b": rows[:1]})
