"""Choosing a step's buckets among all-reduces: one reading, or none."""

from __future__ import annotations

import numpy as np
import pytest

from flowcheck.description import TensorSpec
from reconstruct.buckets import Layout, LayoutError, layout, looks_like_order, parse_rebuilt
from reconstruct.landing import Landing
from reconstruct.windows import Probe, choose, tell_apart

FLOAT = 4


def specs(*sizes: int) -> list[TensorSpec]:
    return [TensorSpec("float32", (n,), (1,)) for n in sizes]


def filled(values: np.ndarray, *, whole: bool = True) -> Landing:
    data = values.astype(np.float32).view(np.uint8)
    landing = Landing(data.size, FLOAT, 2)
    segment = -(-data.size // FLOAT // 4) * FLOAT
    for start in range(0, data.size if whole else data.size - segment, segment):
        part = data[start : start + segment]
        landing.put(start, part, 0, 7)
    return landing


def two_buckets() -> Layout:
    return layout([[1], [0]], specs(40, 24))


def pick(
    lay: Layout, held: dict[int, Landing], probes: list[Probe] | None = None
) -> tuple[tuple[int, ...], str | None]:
    candidates = [(tag, landing.size) for tag, landing in sorted(held.items())]
    choice = choose(lay, candidates, held.get, probes or [])
    return choice.tags, choice.problem


def values(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count)


def test_one_reduction_is_the_step() -> None:
    held = {3: filled(values(1, 24)), 5: filled(values(2, 40))}
    assert pick(two_buckets(), held) == ((3, 5), None)


def test_missing_bucket_or_wrong_order_is_no_step() -> None:
    assert pick(two_buckets(), {3: filled(values(1, 24))})[1] is not None
    assert pick(two_buckets(), {3: filled(values(1, 40)), 4: filled(values(1, 24))})[1] is not None


def accumulated() -> dict[int, Landing]:
    return {t: filled(values(t, 24 if t % 2 == 0 else 40)) for t in range(8)}


def test_several_reductions_need_a_canary() -> None:
    held = accumulated()
    tags, problem = pick(two_buckets(), held)
    assert tags == () and problem is not None and "nothing tells" in problem
    last = held[6].data.view(np.float32)[5:6].tobytes()
    assert pick(two_buckets(), held, [Probe(0, 20, last)]) == ((6, 7), None)


def test_canary_of_no_reduction_claims_nothing() -> None:
    tags, problem = pick(two_buckets(), accumulated(), [Probe(1, 8, b"\x01\x02\x03\x04")])
    assert tags == () and problem is not None and "clipped" in problem
    held = {3: filled(values(1, 24)), 5: filled(values(2, 40))}
    assert pick(two_buckets(), held, [Probe(1, 8, b"\x01\x02\x03\x04")])[0] == ()


def test_rivals_with_equal_bytes_are_no_rivals() -> None:
    held = {0: filled(values(9, 24)), 1: filled(values(8, 40)), 2: filled(values(9, 24)), 3: filled(values(8, 40))}
    assert pick(two_buckets(), held)[1] is None


@pytest.mark.parametrize("element", [0, 20])
def test_an_incomplete_rival_is_ruled_out_by_what_is_known_of_it(element: int) -> None:
    held = accumulated()
    held[6] = filled(values(6, 24), whole=False)  # without its elements from 18 on
    told = held[0].data.view(np.float32)[element : element + 1].tobytes()
    tags, problem = pick(two_buckets(), held, [Probe(0, 4 * element, told)])
    assert (tags, problem) == ((0, 1), None) if element == 0 else tags == () and problem is not None


def test_a_canary_rules_out_what_copies_disagree_about_no_more_than_what_was_lost() -> None:
    held = accumulated()
    told = held[0].data.view(np.float32)[5:6].tobytes()
    held[6].poison(16, 4, 0)
    assert pick(two_buckets(), held, [Probe(0, 20, told)]) == ((0, 1), None)
    held[6].poison(20, 1, 0)
    assert pick(two_buckets(), held, [Probe(0, 20, told)])[0] == ()


@pytest.mark.parametrize("condemned", [True, False])
def test_a_landing_that_cannot_be_trusted_is_no_choice_that_could_be_checked(condemned: bool) -> None:
    held = {3: filled(values(1, 24)), 5: filled(values(2, 40))}
    told = [Probe(0, 4, held[3].data[4:8].tobytes())]
    lay = two_buckets()
    assert choose(lay, [(3, 96), (5, 160)], held.get, told).checked
    if condemned:
        held[3].condemn()
    else:
        for _ in range(65):
            held[3].poison(40, 4, 0)
    choice = choose(lay, [(3, 96), (5, 160)], held.get, told)
    assert choice.tags == () and choice.problem is not None and "among what was lost" in choice.problem
    assert choose(lay, [(3, 96), (5, 160)], held.get, []).tags == (3, 5)
    told.append(Probe(1, 8, held[5].data[8:12].tobytes()))
    assert choose(lay, [(3, 96), (5, 160)], held.get, told).checked


def test_a_bucket_that_was_never_seen_is_the_one_that_is_left() -> None:
    lay = layout([[2], [1], [0]], specs(40, 24, 32))
    held = {3: filled(values(1, 32)), 5: filled(values(3, 40))}
    some = [(3, 128), (5, 160)]

    def pick_with(candidates: list[tuple[int, int]], unseen: set[int], counted: bool = True) -> tuple[int, ...]:
        return choose(lay, candidates, held.get, [], unseen, counted).tags

    assert pick_with(some, {4}) == (3, 4, 5)
    assert pick_with(some, {4}, False) == ()
    for other in ({2}, {6}, {4, 6}, set()):
        assert pick_with(some, other) == ()
    assert pick_with([(3, 128)], {4, 5}) == (3, 4, 5)
    assert pick_with([(5, 160)], {3, 4}) == (3, 4, 5)
    assert pick_with([], {3, 4, 5}) == ()  # nothing shows that there was a reduction
    wrong = [Probe(0, 4, b"\1\2\3\4")]
    assert choose(lay, some, held.get, wrong, {4}, True).tags == ()


@pytest.mark.parametrize("stranger", [2, 4, 6])
def test_a_stranger_of_bucket_size_among_three_buckets(stranger: int) -> None:
    lay = layout([[2], [1], [0]], specs(40, 24, 32))
    held = {3: filled(values(1, 32)), 5: filled(values(2, 24)), 7: filled(values(3, 40))}
    held[stranger] = filled(values(4, 24))
    probes = [Probe(1, 4, held[5].data[4:8].tobytes())]
    assert pick(lay, held, probes) == ((3, 5, 7), None)
    if stranger in (4, 6):  # between the neighbours of bucket 1 it could be bucket 1
        assert pick(lay, held)[0] == ()


def test_layout_places_parameters_and_refuses_what_is_none() -> None:
    lay = layout([[2, 0], [1]], specs(10, 20, 30))
    assert lay.buckets[0].offsets == (0, 120) and lay.buckets[0].nbytes == 160
    assert lay.locate(0) == (0, 120)
    for wrong in ([[0, 1]], [[0, 1, 1], [2]], [[0, 1, 3]]):
        with pytest.raises(LayoutError):
            layout(wrong, specs(10, 20, 30))
    with pytest.raises(LayoutError, match="mixes"):
        layout([[0, 1]], [*specs(1), TensorSpec("float64", (1,), (1,))])


def test_rebuilt_layout_from_its_two_broadcasts() -> None:
    order, sizes = np.array([3, 1, 0, 2, 2], np.int32), np.array([1, 3], np.int32)
    assert looks_like_order(order, 4)
    assert parse_rebuilt(order, sizes, 4) == ((3,), (1, 0, 2))
    assert not looks_like_order(np.array([3, 1, 1, 2, 2], np.int32), 4)
    for wrong in ([1, 2], [4], [0, 4], [1, 3, 0]):
        with pytest.raises(LayoutError):
            parse_rebuilt(order, np.array(wrong, np.int32), 4)


def test_sizes_that_look_alike_are_told_by_their_order_or_not_at_all() -> None:
    both = {96, 160}  # of buckets 0 and 1
    assert tell_apart(two_buckets(), [(3, both), (5, both)], False) == {3: 96, 5: 160}
    twice = [(3, both), (4, both), (6, both), (9, both)]
    assert tell_apart(two_buckets(), twice, False) == {3: 96, 4: 160, 6: 96, 9: 160}
    assert tell_apart(two_buckets(), [(3, both), (4, both), (6, both)], False) is None
    assert tell_apart(two_buckets(), [(3, both), (4, both), (6, both)], True) == {3: 96, 4: 160, 6: 96}
    assert tell_apart(two_buckets(), [(3, both)], False) is None
