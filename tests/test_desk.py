"""What is copied at a step's end, within which budget: the desk alone, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowcheck import desk as module
from flowcheck.desk import LOOKS, MOST_PARTS, MOST_UNSENT, REST, Ask, Desk, Piece
from flowcheck.livestate import Slices, Unreadable

MS = 1e-3


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class State:
    """Stands in for `LiveState`: a key names the ms that copying it takes, a part has `hi` bytes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def refusal(self, key: str, lo: int, hi: int) -> str | None:
        return None

    def slices(self, optimizer: Any, key: str, lo: int, hi: int) -> Slices:
        if key == "broken":
            raise Unreadable("broken on purpose")
        if key == "bug":
            raise ZeroDivisionError("a bug")
        self.clock.now += float(key.removeprefix("buffer/")) * MS
        return Slices([("model", torch.zeros(hi, dtype=torch.uint8))], None)

    def checksums(self, optimizer: Any) -> dict[str, str | None]:
        self.clock.now += 1.0
        return {"model/x": "0" * 32}


class Taker:
    def __init__(self) -> None:
        self.unsent = 0
        self.pieces: list[Piece] = []
        self.declined: list[tuple[int, int, str]] = []
        self.compared: list[tuple[int, int, int]] = []

    def deliver(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def decline(self, epoch: int, ask: int, reason: str) -> None:
        self.declined.append((epoch, ask, reason))

    def checksums(self, epoch: int, ask: int, step: int, found: dict[str, str | None]) -> None:
        self.compared.append((epoch, ask, step))


class Training:
    """A job of steps of `step` ms; agents look every second."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.desk = Desk(State(clock))  # type: ignore[arg-type]
        self.taker = Taker()
        self.step = 0
        self.spent = 0.0
        self._looked = 0.0

    def run(self, steps: int, ms: float = 10) -> None:
        for _ in range(steps):
            self.clock.now += ms * MS
            self.step += 1
            if self.clock.now - self._looked >= 1:
                self._looked = self.clock.now
                self.desk.look(self.step, self.clock.now)
            before = self.clock.now
            if self.desk.pending:
                self.desk.serve(None, self.step)
            self.spent += self.clock.now - before

    def ask(self, number: int, ms: float, nbytes: int = 100, percent: float = 1, step_bytes: int = 1 << 20) -> bool:
        return self.desk.ask(Ask(self.taker, 3, number, str(ms), 0, nbytes, percent, step_bytes))

    @property
    def numbers(self) -> list[int]:
        return [piece.ask.number for piece in self.taker.pieces]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    yield Training(clock)


def test_nothing_is_copied_before_the_time_of_a_step_is_known(training: Training) -> None:
    training.ask(1, 0.01)
    training.run(100)
    assert training.numbers == []
    training.run(200)
    assert training.numbers == [1]
    assert not training.desk.pending


@pytest.mark.parametrize("percent", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("copy", [0.05, 3.0, 40.0])
def test_the_share_of_the_time_is_kept_on_average(training: Training, percent: float, copy: float) -> None:
    """Also where one part takes longer than a whole step: what it took is paid back before the next."""
    training.run(400)
    number = 0
    started, spent = training.clock.now, training.spent
    for _ in range(500 if copy < 1 else 5000):
        while len(training.desk._parts) < 50:
            training.ask(number, copy, percent=percent)
            number += 1
        training.run(1)
    share = (training.spent - spent) / (training.clock.now - started) * 100
    assert share < percent * 1.05 + copy / 500  # one part may be ahead of what was earned
    assert share > 0.5 * percent or len(training.numbers) <= 1 + 50 * percent / copy
    assert training.numbers == sorted(training.numbers)


def test_one_part_is_given_however_small_the_budget(training: Training) -> None:
    training.run(400)
    training.ask(1, 5.0, percent=0.01, step_bytes=1, nbytes=4096)
    training.run(1)
    assert training.numbers == [1]


def test_no_more_bytes_per_step_than_allowed(training: Training) -> None:
    training.run(400)
    for number in range(6):
        training.ask(number, 0.001, nbytes=400, percent=10, step_bytes=1000)
    training.run(1)
    assert training.numbers == [0, 1]
    training.run(2)
    assert training.numbers == list(range(6))
    training.ask(6, 0.001, nbytes=5000, percent=10, step_bytes=1000)  # larger than that by itself: alone in its step
    training.ask(7, 0.001, nbytes=1, percent=10, step_bytes=1000)
    training.run(1)
    assert training.numbers == list(range(7))


def test_what_is_asked_during_a_step_is_given_before_the_state_changes(training: Training) -> None:
    """As of the step before. Buffers, which the forward pass has changed, wait for the end of the step."""
    training.run(400)
    training.desk.ask(Ask(training.taker, 3, 0, "buffer/0.01", 0, 8, 1, 1000))
    training.ask(1, 0.01)
    training.desk.give(None, training.step)
    assert [(piece.ask.number, piece.step) for piece in training.taker.pieces] == [(1, 400)]
    assert training.desk.pending
    training.run(1)
    assert [(piece.ask.number, piece.step) for piece in training.taker.pieces] == [(1, 400), (0, 401)]
    assert not training.desk.pending


def test_both_looks_at_a_step_share_its_budget(training: Training) -> None:
    training.run(400)
    for number in range(6):
        training.ask(number, 0.001, nbytes=400, percent=10, step_bytes=1000)
    training.run(1)
    training.desk.give(None, training.step)
    assert training.numbers == [0, 1]
    training.run(1)
    for number in range(6, 10):
        training.ask(number, 3.0, percent=1)  # 0.1 ms of a step of 10 ms
    training.desk.give(None, training.step)
    training.desk.give(None, training.step)
    assert training.numbers == [0, 1, 2, 3]


def test_a_pause_of_the_training_is_no_long_step(training: Training) -> None:
    training.run(400)
    training.clock.now += 600
    for number in range(100):
        training.ask(number, 0.05, percent=1)
    training.run(1)
    assert len(training.numbers) <= 3  # 0.1 ms were earned
    assert LOOKS > 1


def test_set_up_before_the_first_step_is_no_step(training: Training) -> None:
    training.desk.look(0, training.clock.now)
    training.clock.now += 60  # data is loaded, kernels are compiled
    training.ask(1, 0.001)
    training.run(1)
    assert training.numbers == []


def test_nothing_is_copied_for_an_agent_that_does_not_get_rid_of_it(training: Training) -> None:
    training.run(400)
    training.taker.unsent = MOST_UNSENT + 1
    training.ask(1, 0.01)
    training.run(100)
    assert (training.numbers, training.desk.pending) == ([], True)
    training.taker.unsent = 0
    training.run(1)
    assert training.numbers == [1]


def test_what_cannot_be_read_is_declined_and_training_goes_on(training: Training) -> None:
    training.run(400)
    for number, key in enumerate(("broken", "bug", "0.001")):
        training.desk.ask(Ask(training.taker, 3, number, key, 0, 1, 1.0, 1 << 20))
    training.desk.later(lambda optimizer: 1 / 0)
    training.run(3)
    assert training.taker.declined == [(3, 0, "broken on purpose"), (3, 1, "ZeroDivisionError: a bug")]
    assert training.numbers == [2]
    assert training.desk.failed == 3


def test_the_queue_has_an_end(training: Training) -> None:
    assert all(training.ask(number, 0.01) for number in range(MOST_PARTS))
    assert not training.ask(MOST_PARTS, 0.01)
    calls = [training.desk.later(lambda optimizer: None) for _ in range(20)]
    assert (calls[0], calls[-1]) == (True, False)


def test_cancelled_parts_are_not_copied(training: Training) -> None:
    training.run(400)
    other = Taker()
    for number in range(4):
        training.ask(number, 0.001)
        training.desk.ask(Ask(other, 3, number, "0.001", 0, 1, 1.0, 1 << 20))
    training.desk.cancel(training.taker, {0, 2, 77})
    training.run(2)
    assert training.numbers == [1, 3]
    assert [piece.ask.number for piece in other.pieces] == [0, 1, 2, 3]
    training.ask(9, 0.001)
    training.desk.cancel(training.taker)
    training.run(2)
    assert training.numbers == [1, 3]


def test_checksums_are_taken_once_and_not_again_soon(training: Training) -> None:
    """They take a second here, a hundred steps."""
    training.run(400)
    training.desk.compare(training.taker, 3, 1)
    training.desk.compare(training.taker, 3, 2)  # replaces the first, which nobody has seen yet
    training.run(1)
    assert training.taker.compared == [(3, 2, training.step)]
    training.desk.compare(training.taker, 3, 3)
    training.run(1)
    assert len(training.taker.compared) == 1
    assert [(ask, "again in 20 s" in reason) for _, ask, reason in training.taker.declined] == [(3, True)]
    training.run(REST * 100)
    training.desk.compare(training.taker, 3, 4)
    training.run(1)
    assert training.taker.compared[1][:2] == (3, 4)
