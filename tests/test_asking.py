"""What trainers are asked for, in which order, and what becomes of parts that do not come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from repair_cases import Training, ask_one, attached, go, lossy, training
from shadow_cases import describe
from test_optimizer import threads

from reconstruct import asking, repair
from reconstruct.arena import widened
from reconstruct.ranges import NOTHING, Ranges
from reconstruct.repair import Repair
from reconstruct.shadow import Shadow


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture(params=["AdamW", "SGD"])
def loop(request: pytest.FixtureRequest) -> Training:
    """A loop that has lost two ranges of `vector` in step 3, of 1500 elements."""
    return lossy(request.param)


# What is asked for


def test_oldest_come_first_then_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "CLOSE", 50)
    loop = attached()
    go(loop, lost={0: Ranges.of([(1000, 1010)])})
    go(loop, lost={0: Ranges.of([(0, 10), (500, 700), (740, 800)]), 1: Ranges.of([(200, 300)])})
    places = [(part.key, part.lo, part.hi) for part in loop.repair.ask(1 << 20, scrub=False)]
    assert places == [
        ("model/vector", 960, 1024),
        ("model/vector", 448, 832),
        ("model/matrix", 192, 320),
        ("model/vector", 0, 64),
    ]


def test_parts_are_cut_to_what_may_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "CHUNK", 5000)
    loop = attached(known=False)
    seen: dict[str, Ranges] = {}
    total, numbers = 0, set()
    while parts := loop.repair.ask(12_000, scrub=False):
        assert sum(part.nbytes for part in parts) <= 12_000
        for part in parts:
            slot = loop.shadow.live.layout.by_name.get(part.key.partition("/")[2])
            assert part.nbytes <= 5000 and part.number not in numbers
            assert slot is None or widened(slot.tiles, part.lo, part.hi) == (part.lo, part.hi)
            ranges = Ranges.of([(part.lo, part.hi)])
            assert not seen.get(part.key, NOTHING) & ranges
            seen[part.key] = seen.get(part.key, NOTHING) | ranges
            numbers.add(part.number)
            total += part.nbytes
    for slot in loop.shadow.live.layout.slots:
        assert seen.get(f"model/{slot.name}", NOTHING) == slot.elements
    assert total == sum(part.nbytes for part in loop.repair.outstanding) > 30_000
    assert loop.repair.ask(100, scrub=False) == [] == loop.repair.ask(0)


def test_nothing_is_asked_while_the_upload_runs() -> None:
    loop = training()
    shadow = Shadow(describe(loop.model, loop.optimizer))
    engine = Repair(shadow, most_bytes=1 << 20, most_steps=9)
    assert engine.ask(1 << 20) == [] == engine.outstanding


def test_tensors_that_are_wanted_come_before_all_others(loop: Training) -> None:
    loop.repair.want(["model/brain", "buffer/mask", "model/empty"])
    parts = loop.repair.ask(1 << 20, scrub=False)
    assert [part.key for part in parts] == ["model/brain", "buffer/mask", "model/vector"]
    assert loop.repair.ask(1 << 20, scrub=False) == []
    loop.repair.refused(parts[0].number, "busy")
    loop.repair.refused(parts[1].number, "busy")
    again = loop.repair.ask(1 << 20, scrub=False)
    assert [(part.key, part.lo, part.hi) for part in again] == [("model/brain", 0, 1301), ("buffer/mask", 0, 25)]
    for part in (*again, parts[2]):
        loop.answer(loop.piece(part))
    assert loop.repair.compared == 1301 + 25 + 896 - 31 and loop.repair.ask(1 << 20, scrub=False) == []


# What does not come


def test_refused_and_overdue_parts_are_asked_for_again(loop: Training) -> None:
    part = ask_one(loop)
    loop.repair.refused(part.number, "too busy")
    loop.repair.refused(part.number, "twice")
    assert loop.repair.refusal == "too busy" and loop.repair.given_up == 1
    second = ask_one(loop)
    assert second[1:] == part[1:] and second.number != part.number
    assert loop.repair.expire(100, 10) == [part.number]
    assert loop.repair.expire(109, 10) == [] and loop.repair.outstanding == [second]
    assert loop.repair.expire(110, 10) == [second.number] and loop.repair.outstanding == []
    assert loop.repair.expire(111, 10) == []
    piece = loop.piece(second)
    loop.answer(piece)  # too late: nobody kept its gradients
    assert loop.shadow.unknown.elements == 31 and loop.findings == []
    third = ask_one(loop)
    loop.answer(loop.piece(third))
    loop.answer(loop.piece(third))
    assert loop.shadow.known_step == 3 and loop.repair.repaired == 31


def test_part_that_waits_too_many_steps_is_given_up() -> None:
    loop = lossy("SGD", most_steps=3)
    part = ask_one(loop)
    go(loop, 2)
    assert loop.repair.outstanding == [part]
    go(loop)
    assert loop.repair.outstanding == [] and loop.repair.expire(0, 1) == [part.number]
    part = ask_one(loop)
    loop.train()
    loop.answer((part.number, 1 << 40, *loop.piece(part)[2:]))  # of a step that never comes: not held for ever
    loop.apply()
    assert loop.repair.outstanding == [part]
    go(loop, 2)
    assert loop.repair.outstanding == []


def test_memory_for_gradients_is_bounded_and_the_first_parts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "CHUNK", 2048)
    loop = attached("SGD", {"lr": 0.1, "momentum": 0.9}, known=False, most_bytes=30_000)
    parts = loop.repair.ask(1 << 20)
    assert len(parts) > 5 and sum(part.nbytes for part in parts) <= 30_000 / 2
    counts = []
    for _ in range(9):
        go(loop)
        counts.append(len(loop.repair.outstanding))
        held = sum(asked.nbytes for asked in loop.repair._asked.values())
        assert held <= 30_000 and loop.repair.outstanding == parts[: counts[-1]]
    assert counts[0] == counts[1] == len(parts) and 0 < counts[-1] < len(parts) / 2
    assert loop.repair.expire(0, 1) == [part.number for part in reversed(parts[counts[-1] :])]
    for asked in loop.repair.outstanding:
        loop.repair.refused(asked.number, "never")
    fresh = loop.repair.ask(1 << 20)  # answers take long: fewer are asked for at a time
    assert 0 < len(fresh) < len(parts) / 2
    for _ in range(40):
        loop.answer(loop.piece(loop.repair.outstanding[0]))
        loop.repair.ask(1 << 20)
        assert loop.wrong() == []
    assert len(loop.repair.outstanding) > len(fresh)  # and more where they do not
    go(loop)
    assert sum(asked.kept_bytes for asked in loop.repair._asked.values()) > 0
    go(loop, blank="nothing was seen")  # what was kept until here serves no piece any more
    assert sum(asked.kept_bytes for asked in loop.repair._asked.values()) == 0
