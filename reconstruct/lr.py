"""Hyper-parameters of a step whose marker never came.

The learning rate is on no wire. The step marker carries what changed; where a marker is lost, torch's own
schedulers can be run again here, on stand-in param groups, if the attach described the scheduler: they are
pure functions of their state. A prediction assumes that the job calls `scheduler.step()` once after every
optimizer step. Every marker that does come is compared with it, and the first contradiction ends all
predicting: from then on the answer is "unknown", never a guess.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

from flowcheck.description import JobDescription
from flowcheck.specs import NESTED, SCHEDULERS

MAX_AHEAD = 10_000
"""Steps that one question may lie ahead of what is known: each costs a call of the scheduler, about 10 us."""

_EVERY = MAX_AHEAD // 2  # steps between the states that are kept, so that what is asked again is not far ahead of all
_MOST_KEPT = 4

MAX_ANSWERS = 256
"""Answers kept, so that a marker that comes late does not start the replay again."""


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """{"class", "state"} of a torch scheduler as JSON-able values, or None when it cannot be replayed.

    Only the very classes of `SCHEDULERS` count: a subclass may compute anything, and so may LambdaLR.
    """
    import torch

    name = type(scheduler).__name__
    if name not in SCHEDULERS or type(scheduler) is not getattr(torch.optim.lr_scheduler, name):
        return None
    state: dict[str, Any] = {}
    for key, value in vars(scheduler).items():
        if key == "optimizer":
            continue
        if key == NESTED:
            nested = [scheduler_state(inner) for inner in value]
            if None in nested:
                return None
            state[key] = nested
        elif isinstance(value, Counter):
            state[key] = sorted([item, count] for item, count in value.items())
        else:
            try:
                state[key] = _plain(value)
            except TypeError:
                return None
    return {"class": name, "state": state}


def state_dict(described: dict[str, Any]) -> dict[str, Any]:
    """What `scheduler.state_dict()` gives for a scheduler described by `scheduler_state`."""
    result: dict[str, Any] = _rebuilt(described, _stand_in([])).state_dict()
    return result


class Predictor:
    """Hyper-parameters in force at each step after the attach, as far as they follow from the description.

    ahead: steps that one question may lie ahead; markers can claim any step, so only who asks for steps that were
    taken may allow more than MAX_AHEAD.
    """

    def __init__(self, description: JobDescription, ahead: int = MAX_AHEAD) -> None:
        self.reason = ""
        """Why nothing is predicted any more; empty while predictions are made."""
        self.refused = ""
        """Why the last question was not answered, if another may be; else empty."""
        self._ahead = ahead
        self._first = description.step + 1
        self._start = [dict(group.fields) for group in description.optimizer.groups]
        self._described = description.scheduler
        self._answers: dict[int, list[dict[str, Any]]] = {}
        # (step, its groups, the scheduler then): at the attach, and lately.
        self._kept = [(self._first, self._start, self._described)]
        self._return(self._first)

    def fields(self, step: int) -> list[dict[str, Any]] | None:
        """Every field of every param group in force in optimizer step `step`, or None: unknown."""
        self.refused = ""
        if self.reason or step < self._first:
            return None
        if step in self._answers:
            return copy.deepcopy(self._answers[step])
        if self._scheduler is None:
            return copy.deepcopy(self._groups)
        nearest = max([kept for kept, _, _ in self._kept if kept <= step] + [self._step] * (self._step <= step))
        if step - nearest > self._ahead:
            self.refused = (
                f"step {step} lies {step - nearest} steps beyond step {nearest}, the last one before it of which they "
                f"are known: {self._ahead} is the most that is predicted"
            )
            return None
        if nearest != self._step:
            self._return(nearest)
        while not self.reason and self._step < step:
            try:
                self._scheduler.step()
            except Exception as error:
                # A scheduler at its end (OneCycleLR) or a state that does not fit its class.
                self._stop(f"step {self._step + 1}: the scheduler cannot go on: {error}")
                return None
            self._step += 1
            self._keep()
        if self.reason:
            return None
        self._answers[step] = copy.deepcopy(self._groups)
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return copy.deepcopy(self._groups)

    def scheduler(self, step: int) -> dict[str, Any] | None:
        """The scheduler as it stands once step `step` and its own step after it are done, as `scheduler_state`.

        None: there is no scheduler, or it cannot be known any more.
        """
        if self.reason or self._described is None or step + 1 < self._first:
            return None
        if self._step != step + 1:
            self._answers.pop(step + 1, None)
            self.fields(step + 1)
        return scheduler_state(self._scheduler) if self._step == step + 1 and not self.reason else None

    def observe(self, step: int, fields: list[dict[str, Any]]) -> bool:
        """Compare with a marker's truth: all fields of all groups in force in step `step`.

        False when they contradict the prediction: then nothing is predicted any more, and steps that were
        predicted since the last agreeing marker are in doubt.
        """
        expected = self.fields(step)
        if expected is None:
            return not self.reason
        if len(expected) != len(fields):
            self._stop(f"step {step}: {len(fields)} param groups instead of {len(expected)}")
            return False
        for number, (mine, theirs) in enumerate(zip(expected, fields, strict=True)):
            for key in sorted({*mine, *theirs} - {"params"}):
                if key not in mine or key not in theirs or not _same(mine[key], theirs[key]):
                    shown = f"{theirs.get(key)!r:.40}, predicted {mine.get(key)!r:.40}"
                    self._stop(f"step {step}: {key} of param group {number} is {shown}")
                    return False
        return True

    def _stop(self, reason: str) -> None:
        self.reason = reason

    def _keep(self) -> None:
        """Keep how things stand, if that was long ago."""
        described = scheduler_state(self._scheduler) if self._step - self._kept[-1][0] >= _EVERY else None
        if described is not None:
            self._kept.append((self._step, copy.deepcopy(self._groups), described))
            del self._kept[1 : 1 - _MOST_KEPT]

    def _return(self, step: int) -> None:
        """Go back to one of the steps that are kept."""
        self._step = step
        groups, described = next((groups, described) for kept, groups, described in self._kept if kept == step)
        self._groups = copy.deepcopy(groups)
        self._scheduler = None
        if described is not None:
            try:
                self._scheduler = _rebuilt(described, _stand_in(self._groups))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                self._stop(f"the described scheduler cannot be rebuilt: {error}")


def _stand_in(groups: list[dict[str, Any]]) -> Any:
    """What schedulers use of an optimizer: its param groups, and the marks that say step() was called."""

    def step() -> None:
        raise AssertionError("the stand-in optimizer is never stepped")

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return SimpleNamespace(param_groups=groups, step=step, _opt_called=True)


def _rebuilt(described: dict[str, Any], optimizer: Any) -> Any:
    import torch

    name = described["class"]
    if name not in SCHEDULERS:
        raise ValueError(f"{name!r:.60} is not a known scheduler")
    kind = getattr(torch.optim.lr_scheduler, name)
    state = copy.deepcopy(described["state"])
    for key in state:
        if key == "optimizer" or callable(getattr(kind, key, None)):
            raise ValueError(f"{name} has no attribute {key!r:.60}")
    if name == "MultiStepLR":
        state["milestones"] = Counter(dict(state["milestones"]))
    if NESTED in state:
        state[NESTED] = [_rebuilt(inner, optimizer) for inner in state[NESTED]]
    scheduler = kind.__new__(kind)  # __init__ would take the first step again
    vars(scheduler).update(state, optimizer=optimizer)
    return scheduler


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
