"""What flowcheck can follow, checked on live objects before anything is sent: each refusal says why.

A job that is followed wrongly is worse than one that is not followed, so whatever would change gradients,
skip parameters or update state outside the wire and the optimizer's own rule is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flowcheck.description import BACKENDS
from flowcheck.errors import UsageError
from flowcheck.specs import ITEMSIZE

OPTIMIZERS: dict[type, frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Adam: frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
}
"""Exact classes (a subclass may override the update) and the state keys that they keep per parameter."""

TRAINABLE = frozenset({"float32", "float64", "float16", "bfloat16"})


class Refused(UsageError):
    """This job cannot be followed; the message says what to change."""


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_model(model: Any) -> None:
    """Refused if `model` is not a DDP module that reduces plain gradients over several ranks."""
    if not isinstance(model, DistributedDataParallel):
        raise Refused(f"the model is a {type(model).__name__}, not DistributedDataParallel: wrap it first")
    if model.process_group.size() == 1:
        raise Refused("world size 1: a single rank sends no gradients over the network")
    checks = {
        "find_unused_parameters=True is not supported: some gradients would be no part of the step": (
            model.find_unused_parameters
        ),
        "DDP mixed_precision is not supported: parameters are kept in two precisions": (
            model.mixed_precision is not None
        ),
        "delay_all_reduce_named_params is not supported: those gradients go outside the buckets": bool(
            getattr(model, "_delay_all_reduce_params", None)
        ),
        "skip_all_reduce_unused_params=True is not supported": getattr(
            model, "skip_all_reduce_unused_params", False
        ),
        "DDP's python reducer (optimize_ddp) is not supported": getattr(model, "_use_python_reducer", False),
        "a model over several devices per rank is not supported": model.is_multi_device_module,
        "DDP's join() is active: attach outside it, uneven inputs are not supported": bool(
            model._join_config.enable
        ),
    }
    for reason, found in checks.items():
        if found:
            raise Refused(reason)
    hook = comm_hook(model)
    if hook is not None:
        raise Refused(f"the communication hook {hook} is not supported: it changes what is on the wire")
    backend = backend_of(model)
    if backend not in BACKENDS:
        raise Refused(f"the process group's backend {backend} is not followed, only {' and '.join(BACKENDS)} are")


def backend_of(model: DistributedDataParallel) -> str:
    """The name of the backend that reduces the model's gradients, as in gloo or nccl."""
    group = model.process_group
    name = str(group._get_backend(torch.device(model.device_type)).name())
    return name if name in BACKENDS else str(dist.get_backend(group))


def comm_hook(model: DistributedDataParallel) -> str | None:
    """The name of the communication hook that was registered on the model."""
    return model._get_ddp_logging_data().get("comm_hook") or (
        getattr(model._comm_hooks[0][0], "__qualname__", "given") if model._comm_hooks else None
    )


def check_tensor(name: str, tensor: torch.Tensor, parameter: bool) -> None:
    """Refused if the tensor has no plain memory of a known dtype."""
    if hasattr(tensor, "device_mesh") or tensor.layout != torch.strided or tensor.is_quantized:
        raise Refused(f"{name} is no plain dense tensor ({type(tensor).__name__}, {tensor.layout})")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Refused(f"{name} is on device {tensor.device.type}, only cpu and cuda are supported")
    known = TRAINABLE if parameter else frozenset(ITEMSIZE)
    if dtype_name(tensor) not in known:
        raise Refused(f"{name} has dtype {dtype_name(tensor)}, supported: {', '.join(sorted(known))}")


def check_distinct(parameters: dict[str, torch.Tensor]) -> None:
    """Refused if two parameters share memory: an update of one would change the other."""
    ranges = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n) for n, p in parameters.items()
    )
    end, owner = 0, ""
    for start, stop, name in ranges:
        if start < end and stop > start:
            raise Refused(
                f"parameters {owner} and {name} share memory: views of one tensor are not supported"
            )
        if stop > end:
            end, owner = stop, name


def check_optimizer(
    optimizer: Any, parameters: dict[str, torch.nn.Parameter], reduced: list[torch.nn.Parameter]
) -> None:
    """Refused unless a plain SGD, Adam or AdamW updates exactly the parameters that DDP reduces.

    parameters: the module's parameters by name; reduced: those in DDP's reducer.
    """
    keys = OPTIMIZERS.get(type(optimizer))
    if keys is None:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in OPTIMIZERS)
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise Refused(f"the optimizer {kind} is not supported, only {names} themselves are")
    names_of = {id(parameter): name for name, parameter in parameters.items()}
    in_ddp = {id(parameter) for parameter in reduced}
    owned: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names_of.get(id(parameter))
            if name is None:
                shape = tuple(parameter.shape)
                raise Refused(
                    f"param group {number} holds a parameter {shape} that is not part of the DDP model"
                )
            if id(parameter) not in in_ddp and (parameter.requires_grad or parameter.grad is not None):
                raise Refused(f"{name} is optimized but DDP does not reduce its gradient")
            if getattr(parameter, "_in_backward_optimizers", None):
                raise Refused(f"{name} is optimized inside backward: only optimizer.step() is supported")
            owned.add(id(parameter))
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise Refused(f"param group {number} has {flag}=True, which is not supported")
        for field, value in group.items():
            if isinstance(value, torch.Tensor):
                raise Refused(f"param group {number} has a tensor as {field}: use a number")
    for parameter in reduced:
        if id(parameter) not in owned:
            raise Refused(
                f"{names_of[id(parameter)]} is reduced by DDP but in no param group of the optimizer"
            )
    for parameter, state in optimizer.state.items():
        name = names_of.get(id(parameter), "a parameter outside the model")
        for key, value in state.items():
            if value is not None and (key not in keys or not isinstance(value, torch.Tensor)):
                raise Refused(f"the optimizer keeps {key} ({type(value).__name__}) for {name}: not supported")
