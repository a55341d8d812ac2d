"""Rolling resync against real training loops: a state pulled in pieces while it goes on, with losses, late and refused
answers. At every moment all that is known has the trainer's bits; in the end all is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from repair_cases import Training, loss_of, training
from test_optimizer import CONFIGURATIONS, IMPLEMENTATIONS, threads

from reconstruct import arena, asking, repair


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def small(patch: pytest.MonkeyPatch) -> None:
    """Tiles and parts small enough that tiny tensors have many of both."""
    patch.setattr(arena, "TILE", 256)
    patch.setattr(arena, "GRAIN", 128)
    patch.setattr(repair, "CHUNK", 3000)
    patch.setattr(asking, "CLOSE", 40)


def options_of(case: int) -> tuple[str, dict[str, Any]]:
    """Every configuration in every implementation, in turn."""
    name, options = CONFIGURATIONS[case % len(CONFIGURATIONS)]
    chosen = list(IMPLEMENTATIONS)[case // len(CONFIGURATIONS) % len(IMPLEMENTATIONS)]
    if name == "SGD" and chosen == "fused":
        chosen = "foreach"  # undefined in low precision
    return name, {**options, **IMPLEMENTATIONS[chosen]}


class Agents:
    """Answers that come late, in any order, twice, or not at all."""

    def __init__(self, loop: Training, numbers: np.random.Generator) -> None:
        self._loop, self._numbers = loop, numbers
        self.asked: list[Any] = []  # parts not yet seen by an agent
        self.sent: list[tuple[int, Any]] = []  # when each arrives, and the piece
        self.clock = 0
        self.lazy = numbers.choice([0.0, 0.1, 0.4])  # share of parts that are refused, and that are forgotten
        self.latency = int(numbers.integers(1, 9))

    def serve(self) -> None:
        """The end of a trainer's step: agents look at what they were asked for and copy some of it."""
        for part in [part for part in self.asked if self._numbers.random() < 0.7]:
            self.asked.remove(part)
            fate = self._numbers.random()
            if fate < self.lazy / 2:
                self._loop.repair.refused(part.number, "busy")
            elif fate > self.lazy:
                arrives = self.clock + int(self._numbers.integers(0, self.latency))
                self.sent += [(arrives, self._loop.piece(part))] * int(self._numbers.choice([1, 1, 1, 2]))

    def deliver(self) -> None:
        due = [item for item in self.sent if item[0] <= self.clock]
        self.sent = [item for item in self.sent if item[0] > self.clock]
        for i in self._numbers.permutation(len(due)):
            self._loop.answer(due[i][1])


def run(case: int, *, known: bool, rate: float, steps: int = 30) -> tuple[Training, int]:
    """Train for `steps` steps with losses and blank steps, then on until all is known; the loop and its last step."""
    numbers = np.random.default_rng(case)
    name, options = options_of(case)
    loop = training(name, options, seed=case, steps=int(numbers.integers(0, 4)))
    loop.attach(known=known, most_bytes=int(numbers.choice([30_000, 1 << 24])), most_steps=int(numbers.choice([4, 32])))
    sizes = [p.numel() for p in loop.model.parameters() if p.requires_grad]
    agents = Agents(loop, numbers)
    lag, steady = int(numbers.integers(0, 4)), int(numbers.integers(2500, 30_000))
    worst = 0
    for _ in range(steps * 10):
        quiet = loop.done >= steps
        lost = {i: loss_of(n, numbers) for i, n in enumerate(sizes) if not quiet and numbers.random() < rate}
        loop.train(lost, "nothing was seen" if not quiet and numbers.random() < rate / 5 else "")
        agents.serve()
        while len(loop.queue) > (0 if quiet else numbers.integers(0, lag + 1)):
            loop.apply()
            assert loop.wrong() == []
            worst = max(worst, loop.shadow.unknown.elements)
            agents.clock += 1
            agents.deliver()
            assert loop.wrong() == []
            assert loop.shadow.memory_bytes <= loop.shadow.planned_bytes
        agents.asked += loop.repair.ask(steady, scrub=bool(numbers.random() < 0.3))
        loop.repair.expire(agents.clock, 12)
        if quiet and loop.shadow.known_step == loop.shadow.step:
            break
    assert worst > (0 if known else 4000), case
    return loop, worst


@pytest.mark.parametrize("known", [True, False], ids=["losses", "joined late"])
@pytest.mark.parametrize("block", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 60))])
def test_everything_becomes_known_with_the_trainers_bits(
    known: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    for case in range(block * 8, block * 8 + 8):
        loop, _ = run(case, known=known, rate=(0.05, 0.1, 0.3)[case % 3])
        assert loop.shadow.known_step == loop.shadow.step == loop.done, case
        assert loop.shadow.digest() is not None and loop.findings == [], case
        assert loop.repair.differences == 0 < loop.repair.repaired
