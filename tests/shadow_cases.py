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


def shadow_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0, **options: Any) -> Shadow:
    """A shadow that is ready: described and filled from a live job."""
    shadow = Shadow(describe(model, optimizer, step), **options)
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


def fill_gradients(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Gradients of widely varying size, so that every rounding of an update gets its turn."""
    for p in model.parameters():
        if p.requires_grad:
            scale = 10 ** (torch.rand(p.shape, generator=generator) * 4 - 4)
            grad = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype)
            p.grad = grad.copy_(torch.randn(p.shape, generator=generator) * scale)
