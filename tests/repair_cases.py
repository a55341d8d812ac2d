"""A training loop whose gradients reach a shadow late and with holes, and whose agents answer what repair asks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from shadow_cases import describe, fields_of, fill_gradients, gradients_of, raw, uploads, wrong

from reconstruct.ranges import Ranges
from reconstruct.repair import Finding, Part, Repair
from reconstruct.shadow import Shadow
from reconstruct.step_events import StepReady

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Mixture(torch.nn.Module):
    """One parameter of every kind: dtypes, memory orders, no dimension, no element, frozen; and buffers."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.vector = torch.nn.Parameter(make(1500))
        self.matrix = torch.nn.Parameter(make(13, 29).t())
        self.conv = torch.nn.Parameter(make(4, 5, 3, 3).to(memory_format=torch.channels_last))
        self.sixteen = torch.nn.Parameter(make(777, dtype=torch.float16))
        self.brain = torch.nn.Parameter(make(1301, dtype=torch.bfloat16))
        self.wide = torch.nn.Parameter(make(70, dtype=torch.float64))
        self.scalar = torch.nn.Parameter(make())
        self.empty = torch.nn.Parameter(make(0, 3))
        self.frozen = torch.nn.Parameter(make(40), requires_grad=False)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.register_buffer("turns", torch.polar(make(9).abs(), make(9)).to(torch.complex128))


def loss_of(numel: int, numbers: np.random.Generator) -> Ranges:
    """Some ranges, as packets that are lost would leave them."""
    starts = numbers.integers(0, max(numel, 1), numbers.integers(1, 4))
    return Ranges.of([(int(lo), min(numel, int(lo + numbers.choice([1, 7, 64, 362])))) for lo in starts])


@dataclass
class Training:
    """`train` makes a step and queues its StepReady, `apply` gives the oldest queued one to shadow and repair."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    scheduler: Any = None
    done: int = 0
    shadow: Shadow = field(init=False)
    repair: Repair = field(init=False)
    queue: deque[StepReady] = field(default_factory=deque)
    states: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # by step, the trainers' own
    findings: list[Finding] = field(default_factory=list)

    def attach(self, *, known: bool = True, most_bytes: int = 1 << 24, most_steps: int = 32, **changes: Any) -> None:
        description = describe(self.model, self.optimizer, self.done)
        description.threads = 1
        for name, value in changes.items():
            setattr(description, name, value)
        self.shadow = Shadow(description, known=known)
        self.states[self.done] = uploads(self.model, self.optimizer)
        if known:
            for key, data in self.states[self.done].items():
                if len(data):
                    self.shadow.load(key, 0, data)
        self.repair = Repair(self.shadow, most_bytes=most_bytes, most_steps=most_steps)

    def train(self, lost: dict[int, Ranges] | None = None, blank: str = "", without: tuple[int, ...] = ()) -> None:
        """without: DDP indices of parameters whose grad is None in this step."""
        fill_gradients(self.model, self.generator)
        for index in without:
            [p for p in self.model.parameters() if p.requires_grad][index].grad = None
        gradients: dict[int, Any] = gradients_of(self.model)
        fields = fields_of(self.optimizer)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.done += 1
        self.states[self.done] = uploads(self.model, self.optimizer)
        lost = {index: ranges for index, ranges in (lost or {}).items() if gradients[index] is not None}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for index, ranges in lost.items():
            size = trained[index].element_size()
            gradients[index].reshape(-1, size)[ranges.mask(0, len(gradients[index]) // size)] = 0
        ready = StepReady(self.done, True, {} if blank else gradients, tuple(fields), (), 0, 0, lost, (), blank)
        self.queue.append(ready)

    def apply(self) -> None:
        ready = self.queue.popleft()
        groups = [dict(group) for group in ready.groups]
        if ready.blank:
            self.shadow.skip(ready.step, groups)
        else:
            self.shadow.apply(ready.step, ready.gradients, groups, ready.lost)
        self.findings += self.repair.applied(ready)
        for gradient in ready.gradients.values():  # the landing's memory is used again
            if gradient is not None:
                gradient.fill(0xA5)

    def piece(self, part: Part) -> tuple[int, int, dict[str, bytes], bytes | None]:
        """What an agent sends for a part now: the arguments of `Repair.arrived`."""
        kind, _, name = part.key.partition("/")
        counter = None
        if kind == "buffer":
            tensors = {"buffer": dict(self.model.named_buffers())[name]}
        else:
            parameter = dict(self.model.named_parameters())[name]
            state = self.optimizer.state.get(parameter, {})
            tensors = {"model": parameter} | {k: v for k, v in state.items() if k != "step" and v is not None}
            if "step" in state:
                counter = raw(state["step"]).tobytes()
        sections = {}
        for section, tensor in tensors.items():
            size = tensor.element_size()
            sections[section] = raw(tensor)[part.lo * size : part.hi * size].tobytes()
        assert sum(map(len, sections.values())) <= part.nbytes
        return part.number, self.done, sections, counter

    def answer(self, piece: tuple[int, int, dict[str, bytes], bytes | None]) -> None:
        self.findings += self.repair.arrived(*piece)

    def wrong(self) -> list[str]:
        """What the shadow takes for known and is not the trainer's at the shadow's step, to the bit."""
        found = wrong(self.shadow, self.states[self.shadow.step])
        step = self.shadow.known_step
        if step is not None:
            with self.shadow.pin() as pin:
                assert pin.step == step and pin.whole and not pin.unknown
                for key, (_, data) in pin.tensors.items():
                    if not np.array_equal(data, self.states[step][key]):
                        found.append(f"{key} of the known step")
        return found


def training(
    name: str = "AdamW",
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    steps: int = 0,
    model: torch.nn.Module | None = None,
) -> Training:
    """A loop with two param groups and a learning rate that changes, `steps` steps done."""
    generator = torch.Generator().manual_seed(seed)
    model = model if model is not None else Mixture(generator)
    trained = [p for p in model.parameters() if p.requires_grad]
    half = len(trained) // 2
    groups: list[dict[str, Any]] = [{"params": trained[:half]}, {"params": trained[half:], "weight_decay": 0.1}]
    optimizer = getattr(torch.optim, name)([group for group in groups if group["params"]], **(options or {"lr": 1e-2}))
    loop = Training(model, optimizer, generator, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30))
    for _ in range(steps):
        loop.train()
    loop.queue.clear()
    return loop


def attached(name: str = "AdamW", options: dict[str, Any] | None = None, **given: Any) -> Training:
    loop = training(name, options, steps=2)
    loop.attach(**given)
    return loop


def go(loop: Training, count: int = 1, **given: Any) -> None:
    for _ in range(count):
        loop.train(**given)
        loop.apply()
        assert loop.wrong() == []


VECTOR_INDEX = 0  # of the parameter `vector`
LOST = {VECTOR_INDEX: Ranges.of([(100, 130), (900, 901)])}


def lossy(name: str, **given: Any) -> Training:
    options = {"lr": 1e-2} if name == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    loop = attached(name, options, **given)
    go(loop, lost=LOST)
    assert dict(loop.shadow.unknown.items()) == {"model/vector": [(100, 130, 3), (900, 901, 3)]}
    return loop


def ask_one(loop: Training, nbytes: int = 1 << 20) -> Part:
    (part,) = loop.repair.ask(nbytes, scrub=False)
    return part
