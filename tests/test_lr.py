"""Predicted hyper-parameters against torch's schedulers in a real loop: equal bits, or an honest "unknown"."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shadow_cases import describe, fields_of
from torch.optim import lr_scheduler as schedulers

from flowcheck.description import JobDescription, decode_value, encode_value
from reconstruct.lr import MAX_AHEAD, SCHEDULERS, Predictor, scheduler_state, state_dict

Make = Callable[[torch.optim.Optimizer], Any]
STEPS = 120


def warm_restart_after_warmup(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, 0.1, total_iters=10),
            schedulers.MultiStepLR(optimizer, [7, 20, 20], gamma=0.3),
            schedulers.CosineAnnealingWarmRestarts(optimizer, 9, 2),
        ],
        [10, 50],
    )


REPLAYED: dict[str, Make] = {
    "StepLR": lambda o: schedulers.StepLR(o, 7, gamma=0.7),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 30, 30, 71], gamma=0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, total_iters=20),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=40),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.97),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 45, eta_min=1e-4),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 60, power=1.7),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [0.3, 0.1], total_steps=140, three_phase=True),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 10, 2),
    "SequentialLR": warm_restart_after_warmup,
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.2, total_iters=15), schedulers.ExponentialLR(o, 0.99)]
    ),
}


def job(make: Make | None, optimizer: str = "AdamW") -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(3, 2)
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
    result = getattr(torch.optim, optimizer)(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.013}], lr=0.1, **options
    )
    return model, result, None if make is None else make(result)


def train(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[dict[str, Any]]:
    """One step; the fields that were in force in it."""
    fields = fields_of(optimizer)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return fields


def bits(fields: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    assert fields is not None

    def exact(value: Any) -> Any:
        if isinstance(value, float):
            return value.hex()
        return tuple(map(exact, value)) if isinstance(value, tuple) else value

    return [{key: exact(value) for key, value in group.items()} for group in fields]


def described(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> JobDescription:
    """The description as it arrives: through JSON."""
    description = describe(model, optimizer, step, None)
    description.scheduler = decode_value(json.loads(json.dumps(encode_value(scheduler_state(scheduler)))))
    return description


def test_every_known_scheduler_is_tried() -> None:
    assert set(REPLAYED) == set(SCHEDULERS)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("done", [0, 1, 13])
@pytest.mark.parametrize("name", REPLAYED)
def test_prediction_has_the_bits_of_the_scheduler(name: str, done: int, optimizer: str) -> None:
    model, real, scheduler = job(REPLAYED[name], optimizer)
    for _ in range(done):
        train(real, scheduler)
    predictor = Predictor(described(model, real, scheduler, 500 + done))
    seen = set()
    for step in range(500 + done + 1, 500 + done + STEPS + 1):
        expected = train(real, scheduler)
        assert bits(predictor.fields(step)) == bits(expected)
        seen.add(expected[0]["lr"])
        if step % 5 == 0:
            assert predictor.observe(step, expected)
    assert len(seen) > 1


@pytest.mark.parametrize("name", ["OneCycleLR", "SequentialLR", "CosineAnnealingLR"])
def test_steps_may_be_asked_in_any_order(name: str) -> None:
    model, real, scheduler = job(REPLAYED[name])
    predictor = Predictor(described(model, real, scheduler, 0))
    truth = {step: bits(train(real, scheduler)) for step in range(1, STEPS)}
    for step in (50, 3, 3, 119, 1, 60):
        assert bits(predictor.fields(step)) == truth[step]
    assert predictor.fields(0) is None and predictor.fields(-3) is None
    assert predictor.fields(10**12) is None
    assert bits(predictor.fields(61)) == truth[61]


def test_late_marker_does_not_replay_from_the_start() -> None:
    model, real, scheduler = job(REPLAYED["ExponentialLR"])
    predictor = Predictor(described(model, real, scheduler, 0))
    truth = {step: train(real, scheduler) for step in range(1, 1000)}
    calls = 0
    original = predictor._scheduler.step

    def counted() -> None:
        nonlocal calls
        calls += 1
        original()

    predictor._scheduler.step = counted
    for step in range(1, 1000):
        assert predictor.fields(step) is not None
        assert predictor.observe(max(1, step - 5), truth[max(1, step - 5)])
    assert calls == 998 and len(predictor._answers) <= 256


def counted(predictor: Predictor) -> list[int]:
    """Calls of the scheduler from now on."""
    calls = [0]
    after = predictor._keep

    def kept() -> None:
        calls[0] += 1
        after()

    predictor._keep = kept  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("name", ["CosineAnnealingWarmRestarts", "SequentialLR", "ChainedScheduler"])
def test_a_step_far_ahead_is_refused_and_costs_nothing(name: str) -> None:
    """An absurd marker neither calls the scheduler for ever nor changes what is said of other steps."""
    model, real, scheduler = job(REPLAYED[name])
    predictor = Predictor(described(model, real, scheduler, 0))
    calls = counted(predictor)
    truth = {step: bits(train(real, scheduler)) for step in range(1, 40)}
    assert bits(predictor.fields(20)) == truth[20] and calls == [19]
    for far in (20 + MAX_AHEAD + 1, 1_000_000, 10**12):
        assert predictor.fields(far) is None and f"step {far} lies" in predictor.refused
        assert predictor.observe(far, fields_of(real)) and predictor.scheduler(far) is None
    assert calls == [19] and not predictor.reason
    assert bits(predictor.fields(21)) == truth[21] and not predictor.refused and calls == [20]
    assert predictor.fields(21 + MAX_AHEAD) is not None and calls == [20 + MAX_AHEAD]
    assert bits(predictor.fields(30)) == truth[30] and calls[0] <= 20 + MAX_AHEAD + 30


def test_a_long_job_goes_on_whatever_is_asked_of_its_past() -> None:
    """Old steps are asked for again far from the attach: states that are kept give the scheduler's own bits."""
    model, real, scheduler = job(REPLAYED["SequentialLR"])
    predictor = Predictor(described(model, real, scheduler, 0))
    calls = counted(predictor)
    truth: dict[int, list[dict[str, Any]]] = {}
    last = 2 * MAX_AHEAD + MAX_AHEAD // 2
    for step in range(1, last + 1):
        fields = train(real, scheduler)
        if step % 777 == 0 or step > last - 2000:
            truth[step] = bits(fields)
        if step % 300 == 0:
            assert predictor.fields(step) is not None
    assert calls[0] < last
    for step in (last - 1500, last, 777, last - 900, last - 1):
        before = calls[0]
        assert bits(predictor.fields(step)) == truth[step]
        assert calls[0] - before <= MAX_AHEAD
    assert len(predictor._kept) == 4


def test_without_a_scheduler_any_step_is_known() -> None:
    model, real, _ = job(None)
    predictor = Predictor(describe(model, real, 10))
    assert bits(predictor.fields(10**9)) == bits(fields_of(real))


def test_state_is_json_as_it_stands() -> None:
    for make in REPLAYED.values():
        state = scheduler_state(job(make)[2])
        assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_schedulers_that_cannot_be_replayed_are_not_described() -> None:
    class Mine(schedulers.StepLR):
        def get_lr(self) -> list[float]:
            return [0.5, 0.5]

    for make in (
        lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
        lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
        lambda o: schedulers.ReduceLROnPlateau(o),
        lambda o: Mine(o, 3),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LambdaLR(o, lambda step: 1.0), schedulers.ExponentialLR(o, 0.9)], [5]
        ),
    ):
        assert scheduler_state(job(make)[2]) is None
    assert scheduler_state(None) is None
    scheduler = job(REPLAYED["StepLR"])[2]
    scheduler.base_lrs = [torch.tensor(0.1), 0.2]
    assert scheduler_state(scheduler) is None


def test_without_a_scheduler_values_are_constant_until_a_marker_changes_them() -> None:
    model, real, _ = job(None)
    predictor = Predictor(describe(model, real, 10))
    truth = fields_of(real)
    for step in (11, 12, 40):
        assert bits(predictor.fields(step)) == bits(truth)
    assert predictor.observe(41, truth)
    changed = [truth[0], {**truth[1], "weight_decay": math.nextafter(truth[1]["weight_decay"], 1)}]
    assert not predictor.observe(42, changed)
    assert predictor.fields(43) is None and predictor.fields(12) is None
    assert predictor.reason.startswith("step 42: weight_decay of param group 1")
    assert not predictor.observe(43, truth)


def test_scheduler_called_once_per_epoch_is_found_out() -> None:
    """The assumption of one call per step fails: after the first marker that says so nothing is predicted."""
    model, real, scheduler = job(REPLAYED["CosineAnnealingLR"])
    predictor = Predictor(described(model, real, scheduler, 0))
    assert predictor.observe(1, train(real, None))
    assert not predictor.observe(2, train(real, None))
    assert predictor.fields(3) is None


def test_lr_changed_by_hand_is_found_out() -> None:
    model, real, scheduler = job(REPLAYED["StepLR"])
    predictor = Predictor(described(model, real, scheduler, 0))
    for step in (1, 2, 3):
        assert predictor.observe(step, train(real, scheduler))
    real.param_groups[1]["lr"] *= 0.5
    assert not predictor.observe(4, train(real, scheduler))
    assert predictor.fields(5) is None


def test_new_group_or_field_is_a_contradiction() -> None:
    for change in (
        lambda fields: fields[:1],
        lambda fields: [{**fields[0], "clip": 1.0}, fields[1]],
        lambda fields: [{k: v for k, v in fields[0].items() if k != "eps"}, fields[1]],
    ):
        model, real, _ = job(None)
        predictor = Predictor(describe(model, real))
        assert not predictor.observe(1, change(fields_of(real)))
        assert predictor.fields(2) is None


def test_scheduler_at_its_end_is_unknown_not_wrong() -> None:
    model, real, scheduler = job(lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=5))
    predictor = Predictor(described(model, real, scheduler, 0))
    assert predictor.fields(5) is not None
    assert predictor.fields(7) is None and "cannot go on" in predictor.reason


@pytest.mark.parametrize(
    "hostile",
    [
        {"class": "LambdaLR", "state": {}},
        {"class": "Optimizer", "state": {}},
        {"class": "StepLR", "state": {"get_lr": 1}},
        {"class": "StepLR", "state": {"optimizer": 1}},
        {"class": "StepLR", "state": {}},
        {"class": "StepLR", "state": {"last_epoch": "x", "_step_count": 3}},
        {"class": "MultiStepLR", "state": {"milestones": 7}},
        {"class": "MultiStepLR", "state": {"last_epoch": 1}},
        {"class": "SequentialLR", "state": {"_schedulers": [{}]}},
    ],
)
def test_state_that_fits_no_scheduler_predicts_nothing(hostile: dict[str, Any]) -> None:
    model, real, _ = job(None)
    predictor = Predictor(describe(model, real, 0, hostile))
    assert predictor.fields(3) is None
    assert predictor.reason


@pytest.mark.parametrize("name", sorted(REPLAYED))
def test_a_restored_scheduler_goes_on_as_the_real_one(name: str) -> None:
    model, optimizer, real = job(REPLAYED[name])
    predictor = Predictor(described(model, optimizer, real, 0))
    for step in range(1, 31):
        optimizer.step()
        real.step()
        if step in (1, 5, 8, 13, 30):
            _, other, restored = job(REPLAYED[name])
            restored.load_state_dict(state_dict(predictor.scheduler(step)))
            assert restored.state_dict() == real.state_dict()
            # The optimizer's own state hands out the rate that was in force; the scheduler knows the next one.
            for group, rate in zip(other.param_groups, restored.get_last_lr(), strict=True):
                group["lr"] = rate
            assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
