"""Pieces that come before, at and after their step, losses in between, and pieces that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from repair_cases import LOST, VECTOR_INDEX, Training, ask_one, attached, go, lossy, training
from shadow_cases import raw
from test_optimizer import CONFIGURATIONS, threads

from reconstruct import repair
from reconstruct.ranges import Ranges
from reconstruct.repair import Misfit


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture(params=["AdamW", "SGD"])
def loop(request: pytest.FixtureRequest) -> Training:
    """A loop that has lost two ranges of `vector` in step 3, of 1500 elements."""
    return lossy(request.param)


# One part, and its steps


def test_piece_of_the_live_step_is_known_at_once(loop: Training) -> None:
    part = ask_one(loop)
    assert (part.key, part.lo, part.hi) == ("model/vector", 64, 960)  # close ranges are one part
    assert loop.repair.outstanding == [part] and loop.repair.ask(1 << 20, scrub=False) == []
    loop.answer(loop.piece(part))
    assert loop.shadow.known_step == 3 and loop.wrong() == [] and loop.repair.outstanding == []
    assert (loop.repair.repaired, loop.repair.compared) == (31, 896 - 31)
    go(loop)


def test_piece_of_a_later_step_is_held_until_then(loop: Training) -> None:
    part = ask_one(loop)
    for _ in range(3):
        loop.train()
    loop.answer(loop.piece(part))  # as of step 6
    size = loop.repair.bytes
    loop.answer(loop.piece(part))  # twice
    assert 0 < size == loop.repair.bytes <= part.nbytes
    for step in (4, 5, 6):
        assert loop.shadow.unknown.elements == 31 and loop.repair.outstanding == [part]
        loop.apply()
        assert loop.wrong() == [] and loop.shadow.step == step
    assert loop.shadow.known_step == 6 and loop.repair.outstanding == []
    go(loop)


def test_piece_of_an_earlier_step_is_brought_forward(loop: Training) -> None:
    part = ask_one(loop)
    piece = loop.piece(part)  # as of step 3
    go(loop)
    go(loop, without=(VECTOR_INDEX,))
    go(loop, 3)
    loop.answer(piece)
    assert loop.shadow.known_step == 8 and loop.wrong() == [] and loop.findings == []
    go(loop)


def test_what_is_lost_on_the_way_stays_unknown(loop: Training) -> None:
    part = ask_one(loop)
    piece = loop.piece(part)
    go(loop)
    go(loop, lost={VECTOR_INDEX: Ranges.of([(120, 140), (1400, 1410)])})
    go(loop)
    loop.answer(piece)
    assert dict(loop.shadow.unknown.items()) == {"model/vector": [(120, 130, 3), (130, 140, 5), (1400, 1410, 5)]}
    assert loop.wrong() == [] and loop.repair.given_up == 0
    part = ask_one(loop)
    assert (part.lo, part.hi) == (64, 1472)
    loop.answer(loop.piece(part))
    assert loop.shadow.known_step == 6


def test_an_older_piece_does_not_undo_a_newer_one(loop: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements whose gradient was lost on the way are known by another piece meanwhile, and better."""
    old = loop.piece(ask_one(loop))
    go(loop, lost={VECTOR_INDEX: Ranges.of([(10, 20), (110, 140), (1000, 1010)])})
    monkeypatch.setattr(repair, "CHUNK", 6144)
    newer, last = loop.repair.ask(1 << 20, scrub=False)  # the first part lies between, so close are the ranges
    assert newer.lo == 0 and 140 < newer.hi < 900 < last.hi == 1024
    loop.answer(loop.piece(newer))
    loop.answer(old)
    assert loop.shadow.unknown.of("model/vector") == Ranges.of([(1000, 1010)]) and loop.wrong() == []
    loop.answer(loop.piece(last))
    assert loop.shadow.known_step == 4 and loop.wrong() == [] and loop.findings == []


def test_loss_before_the_pieces_step_does_not_matter(loop: Training) -> None:
    part = ask_one(loop)
    loop.train(lost=LOST)
    loop.train(blank="nothing was seen")
    piece = loop.piece(part)  # as of step 5
    loop.apply()
    loop.apply()
    go(loop)
    loop.answer(piece)
    assert loop.shadow.unknown.of("model/vector") == Ranges.of([(0, 64), (960, 1500)])
    assert loop.wrong() == []


def test_piece_from_before_a_blank_step_is_worth_nothing(loop: Training) -> None:
    part = ask_one(loop)
    piece = loop.piece(part)
    go(loop)
    go(loop, blank="nothing was seen")
    go(loop)
    loop.answer(piece)
    assert loop.shadow.unknown.of("model/vector").total == 1500 and loop.wrong() == []
    assert loop.repair.given_up == 1 and loop.repair.outstanding == [] and loop.findings == []


def test_counter_from_before_a_blank_step_is_worth_nothing() -> None:
    """A parameter without elements has no other state. Whether the blank step counted for it, nobody knows."""
    loop = attached(known=False)
    (part,) = [part for part in loop.repair.ask(1 << 24, scrub=False) if part.key == "model/empty"]
    piece = loop.piece(part)
    go(loop)
    go(loop, blank="nothing was seen")
    loop.answer(piece)
    assert loop.findings == [] and loop.repair.given_up == 1 and "empty" in loop.shadow.live.uncounted
    (part,) = [part for part in loop.repair.ask(1 << 24, scrub=False) if part.key == "model/empty"]
    loop.answer(loop.piece(part))
    assert loop.findings == [] and "empty" not in loop.shadow.live.uncounted and loop.wrong() == []


def untold(loop: Training) -> None:
    """A step that the shadow takes and repair does not hear of."""
    if not loop.queue:
        loop.train()
    ready = loop.queue.popleft()
    loop.shadow.apply(ready.step, ready.gradients, [dict(group) for group in ready.groups])


def test_a_step_that_repair_was_not_told_of_makes_its_parts_worthless(loop: Training) -> None:
    """Steps are told apart by their numbers, not by how many there were."""
    piece = loop.piece(ask_one(loop))
    untold(loop)
    go(loop)
    loop.answer(piece)
    assert loop.repair.given_up == 1 and loop.shadow.unknown.elements == 31 and loop.wrong() == []
    loop.train()
    later = loop.piece(ask_one(loop))
    loop.answer(later)  # held until then
    untold(loop)
    untold(loop)
    go(loop, 2)
    assert loop.shadow.unknown.elements == 31 and loop.wrong() == []
    assert loop.repair.expire(0, 1) and len(loop.repair.expire(9, 1)) == 1
    loop.answer(loop.piece(ask_one(loop)))
    assert loop.shadow.known_step == loop.done


def test_whole_piece_lost_on_the_way(loop: Training) -> None:
    piece = loop.piece(ask_one(loop))
    go(loop, lost={VECTOR_INDEX: Ranges.of([(0, 1500)])})
    loop.answer(piece)
    assert loop.repair.given_up == 1 and loop.shadow.unknown.elements == 1500 and loop.findings == []


@pytest.mark.parametrize("name, options", CONFIGURATIONS, ids=lambda value: str(value)[:60])
def test_state_that_is_made_on_the_way(name: str, options: dict[str, Any]) -> None:
    """A piece from before the first step: torch makes its state while it is brought forward."""
    loop = training(name, options)
    loop.attach(known=False)
    parts = loop.repair.ask(1 << 24)
    pieces = [loop.piece(part) for part in parts]
    go(loop, 3)
    for piece in pieces:
        loop.answer(piece)
    assert loop.shadow.known_step == 3 and loop.wrong() == [] and loop.findings == []


def test_hyper_parameters_change_on_the_way() -> None:
    loop = attached("SGD", {"lr": 0.1})
    go(loop, lost=LOST)
    piece = loop.piece(ask_one(loop))
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1, "dampening": 0.2}, {"maximize": True}, {"momentum": 0.0}):
        loop.optimizer.param_groups[0].update(change)
        go(loop)
    loop.answer(piece)
    assert loop.shadow.known_step == 7 and loop.wrong() == [] and loop.findings == []
    go(loop)


# The whole state


@pytest.mark.parametrize("name, options", CONFIGURATIONS, ids=lambda value: str(value)[:60])
def test_nothing_is_missing_after_a_late_join(name: str, options: dict[str, Any]) -> None:
    """Frozen parameters, buffers of every dtype, the counter of a parameter that has no element."""
    loop = training(name, options, steps=3)
    loop.attach(known=False)
    assert loop.shadow.known_step is None
    parts = loop.repair.ask(1 << 24, scrub=False)
    names = {part.key for part in parts}
    trained = {f"model/{name}" for name, _ in loop.model.named_parameters()}
    assert names | {"model/empty"} == trained | {"buffer/mask", "buffer/turns"}
    assert ("model/empty" in names) is (name != "SGD")
    for part in parts[1:]:
        loop.answer(loop.piece(part))
        assert loop.shadow.known_step is None and loop.wrong() == []
    loop.answer(loop.piece(parts[0]))
    assert loop.shadow.known_step == 3 and loop.wrong() == []
    with loop.shadow.pin() as pin:
        buffers = {key: data.tobytes() for key, (_, data) in pin.tensors.items() if key.startswith("buffer/")}
    assert buffers == {f"buffer/{n}": raw(b).tobytes() for n, b in loop.model.named_buffers()}


# Pieces that do not fit


def test_pieces_that_do_not_fit_change_nothing(loop: Training) -> None:
    adam = isinstance(loop.optimizer, torch.optim.AdamW)
    state = "exp_avg" if adam else "momentum_buffer"
    before = loop.shadow.unknown
    cases: list[tuple[str, Any]] = [
        ("brings 3580 bytes of model instead of 3584", lambda p: p[2].update(model=p[2]["model"][4:])),
        (f"brings 3588 bytes of {state} instead of 3584", lambda p: p[2].update({state: p[2][state] + b"1234"})),
        ("which is no state of", lambda p: p[2].update(other=p[2]["model"])),
        ("which is no state of", lambda p: p[2].pop("model")),
        ("is older than step 3", lambda p: p.__setitem__(1, 2)),
        ("which is no state of", lambda p: p.__setitem__(3, None) if adam else p.__setitem__(3, b"1234")),
    ]
    if adam:
        cases.append(("which is no state of", lambda p: p[2].pop(state)))
        cases.append(("step counter of 8 bytes where float32", lambda p: p.__setitem__(3, bytes(8))))
    for count, (reason, spoil) in enumerate(cases, 1):
        piece: Any = list(loop.piece(ask_one(loop)))
        spoil(piece)
        (finding,) = loop.repair.arrived(*piece)
        assert isinstance(finding, Misfit) and reason in finding.text and finding.text.startswith("vector: ")
        assert loop.shadow.unknown == before and loop.wrong() == []
        assert loop.repair.given_up == count and loop.repair.outstanding == []
    loop.answer(loop.piece(ask_one(loop)))
    assert loop.shadow.known_step == 3


@pytest.mark.parametrize("late", [0, 2])
def test_another_step_counter_makes_the_parameter_unknown(late: int) -> None:
    """The trainer's counter holds; what was computed with the other one is wrong, nobody knows since when."""
    loop = lossy("AdamW")
    part = ask_one(loop)
    number, step, sections, _ = loop.piece(part)
    go(loop, late)
    with loop.shadow.pin(whole=False) as live, loop.shadow.pin() as known:
        (finding,) = loop.repair.arrived(number, step, sections, np.float32(17).tobytes())
        assert live.revoked and known.revoked
    assert isinstance(finding, Misfit)
    assert f"shows step {17 + late}, exp_avg, exp_avg_sq where step {3 + late}, exp_avg, exp_avg_sq" in finding.reason
    assert loop.shadow.unknown.of("model/vector") == Ranges.of([(0, 64), (960, 1500)]) and not loop.shadow.known_step
    assert loop.shadow.live.counters(loop.shadow.live.layout.by_name["vector"]).tolist() == [17 + late]
    for state in (loop.optimizer.state[loop.model.vector],):
        state["step"] += 14
    loop.states[loop.done]["optimizer/vector/step"] = np.frombuffer(np.float32(17 + late).tobytes(), np.uint8)
    for part in loop.repair.ask(1 << 20, scrub=False):
        loop.answer(loop.piece(part))
    assert loop.shadow.known_step == loop.done


def test_other_state_keys_make_the_parameter_unknown() -> None:
    """amsgrad in the trainer, not here, as a lost message about a param group would have it."""
    loop = lossy("AdamW")
    part = ask_one(loop)
    number, step, sections, counter = loop.piece(part)
    sections["max_exp_avg_sq"] = sections["exp_avg_sq"]
    (finding,) = loop.repair.arrived(number, step, sections, counter)
    assert isinstance(finding, Misfit) and "exp_avg_sq, max_exp_avg_sq where step 3" in finding.reason
    assert loop.shadow.unknown.of("model/vector").total == 1500 - 896
    with loop.shadow.pin(whole=False) as pin:
        key = "optimizer/vector/max_exp_avg_sq"
        assert pin.tensors[key][1][4 * 64 : 4 * 960].tobytes() == sections["max_exp_avg_sq"]
