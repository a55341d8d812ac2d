"""Training loops in one process, and the description of such a job: what the shadow's tests compare with."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from flowcheck.description import (
    BufferSpec,
    DdpSpec,
    GroupRecord,
    GroupSpec,
    JobDescription,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
)
from reconstruct.digest import digest_of
from reconstruct.shadow import Shadow


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


def raw(tensor: torch.Tensor) -> np.ndarray:
    """uint8 copy of the memory that a dense tensor covers."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.clone().view(torch.uint8).numpy()


def fields_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def describe(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0, scheduler: Any = None
) -> JobDescription:
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    aliases: dict[str, list[str]] = {name: [] for name in names.values()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name != names[id(p)]:
            aliases[names[id(p)]].append(name)
    return JobDescription(
        run="test",
        step=step,
        world_size=2,
        torch_version=torch.__version__,
        arch=platform.machine(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        device="cpu",
        parameters=[
            ParameterSpec(name, spec_of(p), trained.index(name) if p.requires_grad else None, tuple(aliases[name]))
            for name, p in model.named_parameters()
        ],
        buffers=[BufferSpec(name, spec_of(b), True) for name, b in model.named_buffers()],
        optimizer=OptimizerSpec(
            type(optimizer).__name__,
            [
                GroupSpec(tuple(names[id(p)] for p in group["params"]), fields)
                for group, fields in zip(optimizer.param_groups, fields_of(optimizer), strict=True)
            ],
            {
                names[id(p)]: {key: spec_of(value) for key, value in state.items()}
                for p, state in optimizer.state.items()
            },
        ),
        ddp=DdpSpec(False, False, False, True, 25 << 20, True, (), None, (tuple(range(len(trained))),), None, (0,)),
        group=GroupRecord("default", 2, [], 0),
        scheduler=scheduler,
    )


def uploads(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    names = {id(p): name for name, p in model.named_parameters()}
    result = {f"model/{name}": raw(p) for name, p in model.named_parameters()}
    result |= {f"buffer/{name}": raw(b) for name, b in model.named_buffers()}
    for p, state in optimizer.state.items():
        result |= {f"optimizer/{names[id(p)]}/{key}": raw(value) for key, value in state.items()}
    return result


def shadow_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0, *, threads: int = 1, **options: Any
) -> Shadow:
    """A shadow that is ready: described and filled from a live job whose trainers use `threads` threads."""
    description = describe(model, optimizer, step)
    description.threads = threads
    shadow = Shadow(description, **options)
    for key, data in uploads(model, optimizer).items():
        shadow.load(key, 0, data)
    return shadow


def gradients_of(model: torch.nn.Module) -> dict[int, np.ndarray | None]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return {i: None if p.grad is None else raw(p.grad) for i, p in enumerate(trained)}


def differences(shadow: Shadow, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Keys whose bytes differ, plus keys that only one side has; buffers are not compared."""
    expected = {k: v for k, v in uploads(model, optimizer).items() if not k.startswith("buffer/")}
    with shadow.pin() as pin:
        held = {k: v[1] for k, v in pin.tensors.items() if not k.startswith("buffer/")}
        odd = set(expected) ^ set(held)
        return sorted(odd | {k for k in set(expected) & set(held) if not np.array_equal(expected[k], held[k])})


def wrong(shadow: Shadow, expected: dict[str, np.ndarray]) -> list[str]:
    """What the shadow says is known and is not as in `expected` (see `uploads`): keys, and what is known too little.

    Compared are all elements that are not in `shadow.unknown`, their state and the counters; buffers are not.
    """
    version, found = shadow.live, []
    for slot in version.layout.slots:
        key = f"model/{slot.name}"
        unknown = version.unknown.of(key)
        known = ~unknown.mask(0, slot.spec.numel) if unknown else slice(None)
        for section, place in version.places(key).items():
            name = key if section == "model" else f"optimizer/{slot.name}/{section}"
            theirs = expected.get(name)
            if theirs is None or not np.array_equal(place[known], theirs.view(place.dtype)[known]):
                found.append(name)
        if "step" in version.state_keys.get(slot.name, ()) and slot.name not in version.uncounted:
            counters, name = version.counters(slot), f"optimizer/{slot.name}/step"
            if name not in expected or not (counters.view(np.uint32) == expected[name].view(np.uint32)).all():
                found.append(name)
    held = {key for key in shadow.live.tensors() if not key.startswith("buffer/")}
    return found + sorted({key for key in expected if not key.startswith("buffer/")} - held)


def fill_gradients(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Gradients of widely varying size, so that every rounding of an update gets its turn."""
    for p in model.parameters():
        if p.requires_grad:
            scale = 10 ** (torch.rand(p.shape, generator=generator) * 4 - 4)
            grad = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype)
            p.grad = grad.copy_(torch.randn(p.shape, generator=generator) * scale)


class TinyLanguageModel(torch.nn.Module):
    """Tied embeddings, a frozen parameter, LayerNorm, a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24)
        self.position = torch.nn.Parameter(torch.randn(8, 24), requires_grad=False)
        self.norm = torch.nn.LayerNorm(24)
        self.hidden = torch.nn.Linear(24, 24)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mask @ (self.embedding(tokens) + self.position)
        return self.head(torch.tanh(self.hidden(self.norm(x))))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, 50, (4, 8), generator=generator)
        return torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


class ConvNet(torch.nn.Module):
    """Channels-last convolutions, one of them depthwise, BatchNorm, and a part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 8, 3, groups=8)
        ).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(8, 5).to(torch.bfloat16)

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        images = torch.randn(4, 3, 9, 9, generator=generator).to(memory_format=torch.channels_last)
        return self.head(self.stem(images).mean((2, 3)).to(torch.bfloat16)).float().square().mean()


MODELS = {"language model": TinyLanguageModel, "convolutions": ConvNet}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 3e-3}),
    "AdamW foreach amsgrad": ("AdamW", {"lr": 3e-3, "foreach": True, "amsgrad": True}),
    "Adam fused": ("Adam", {"lr": 3e-3, "fused": True, "weight_decay": 0.01}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


class Job:
    """A training loop whose gradients and hyper-parameters go to a shadow, as they would from the wire."""

    def __init__(self, model: str = "language model", optimizer: str = "AdamW", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.model = MODELS[model]()
        name, options = OPTIMIZERS[optimizer]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}]
        self.optimizer = getattr(torch.optim, name)(groups, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.done = 0

    def train(self) -> tuple[int, dict[int, np.ndarray | None], list[dict[str, Any]]]:
        """One step; what the shadow must be told about it."""
        self.optimizer.zero_grad()
        self.model.loss(self.generator).backward()
        gradients, fields = gradients_of(self.model), fields_of(self.optimizer)
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        return self.done, gradients, fields

    def digest(self) -> str:
        return digest_of(self.model, self.optimizer)
