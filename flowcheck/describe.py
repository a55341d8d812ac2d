"""A job's description from its live torch objects: what `flowcheck.attach` sends, and the tensors to upload.

Everything is read in DDP's own terms (torch/nn/parallel/distributed.py): the reducer's parameters as DDP
collects them, the first bucket layout by the call that DDP itself makes, settings from its attributes.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flowcheck.description import (
    BufferSpec,
    DdpSpec,
    GroupRecord,
    GroupSpec,
    JobDescription,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
    encode_value,
)
from flowcheck.supported import (
    Refused,
    check_distinct,
    check_model,
    check_optimizer,
    check_tensor,
    comm_hook,
    dtype_name,
)

Buckets = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Live:
    """The torch side of a description: `tensors` by key in upload order, `parameters` in its order."""

    model: DistributedDataParallel
    parameters: list[torch.nn.Parameter]
    parameter_specs: list[ParameterSpec]
    buffer_specs: list[BufferSpec]
    optimizer: OptimizerSpec
    ddp: DdpSpec
    tensors: dict[str, torch.Tensor]

    def fingerprint(self) -> str:
        """The same on every rank of a job: names, specs and their order, optimizer and DDP settings."""
        parts = [
            [spec.to_json() for spec in self.parameter_specs],
            self.optimizer.to_json(),
            self.ddp.to_json(),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def description(self, run: str, step: int, group: GroupRecord, scheduler: dict[str, Any] | None) -> JobDescription:
        return JobDescription(
            run=run,
            step=step,
            world_size=group.world_size,
            torch_version=torch.__version__,
            arch=platform.machine(),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            device=self.model.device_type,
            parameters=self.parameter_specs,
            buffers=self.buffer_specs,
            optimizer=self.optimizer,
            ddp=self.ddp,
            group=group,
            scheduler=scheduler,
            threads=torch.get_num_threads(),
        )


def describe(model: Any, optimizer: Any) -> Live:
    """Check that the job can be followed and describe it; Refused (a UsageError) says why it cannot."""
    check_model(model)
    module = model.module
    names = _names(module.named_parameters(remove_duplicate=False))
    parameters = {found[0]: parameter for parameter, found in names}
    for name, parameter in parameters.items():
        check_tensor(f"parameter {name}", parameter, True)
        if not _spec(parameter).dense:
            raise Refused(f"parameter {name} has gaps or overlaps in memory (strides {parameter.stride()})")
    check_distinct(parameters)
    reduced = reduced_parameters(model)
    check_optimizer(optimizer, parameters, reduced)
    index = {id(parameter): i for i, parameter in enumerate(reduced)}
    tensors: dict[str, torch.Tensor] = {f"model/{name}": tensor for name, tensor in parameters.items()}
    parameter_specs = [
        ParameterSpec(found[0], _spec(parameter), index.get(id(parameter)), tuple(found[1:]))
        for parameter, found in names
    ]
    buffer_specs = _buffers(module, tensors)
    _check_state_dict(module, parameter_specs, buffer_specs)
    return Live(
        model,
        list(parameters.values()),
        parameter_specs,
        buffer_specs,
        _optimizer(optimizer, parameters, tensors),
        _ddp(model, reduced),
        tensors,
    )


def reduced_parameters(model: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters in DDP's reducer, in its index order. Refused for sparse gradients."""
    parameters, sparse = model._build_params_for_reducer()
    if any(sparse):
        raise Refused("sparse gradients (Embedding(sparse=True)) are not supported: they are no all-reduce")
    return list(parameters)


def memory_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as a flat view, in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def parse_layout(logged: dict[str, Any]) -> tuple[Buckets, tuple[int, ...]] | None:
    """(buckets, bucket sizes in bytes) of the rebuilt layout that DDP logged, None while it has not."""
    text = logged.get("rebuilt_per_bucket_param_indices")
    if not logged.get("has_rebuilt_buckets") or not text:
        return None
    buckets = tuple(tuple(int(i) for i in part.split()) for part in text.split(","))
    return buckets, _sizes(logged["rebuilt_bucket_sizes"])


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(dtype_name(tensor), tuple(tensor.shape), tuple(tensor.stride()))


def _names(named: Any) -> list[tuple[Any, list[str]]]:
    """Distinct tensors in order of their first name, each with all of its names."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _buffers(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> list[BufferSpec]:
    """The buffers' specs; adds their tensors to `tensors`, an expanded one as a contiguous copy."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    specs = []
    for tensor, found in _names(module.named_buffers(remove_duplicate=False)):
        kept = [name for name in found if name not in transient]
        names = kept or found
        check_tensor(f"buffer {names[0]}", tensor, False)
        stored = tensor if _spec(tensor).dense else tensor.contiguous()
        specs.append(BufferSpec(names[0], _spec(stored), bool(kept), tuple(names[1:])))
        tensors[f"buffer/{names[0]}"] = stored
    return specs


def _check_state_dict(module: torch.nn.Module, parameters: list[ParameterSpec], buffers: list[BufferSpec]) -> None:
    """Refused if the module's state_dict is more or less than its parameters and persistent buffers."""
    known = {name for p in parameters for name in (p.name, *p.aliases)}
    known |= {name for b in buffers if b.persistent for name in (b.name, *b.aliases)}
    differing = sorted(known ^ set(module.state_dict()))
    if differing:
        raise Refused(
            f"the module's state_dict differs from its parameters and buffers ({', '.join(differing[:3])}): "
            "extra state and renamed keys are not supported"
        )


def _optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    tensors: dict[str, torch.Tensor],
) -> OptimizerSpec:
    names = {id(parameter): name for name, parameter in parameters.items()}
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = state_specs({names[id(p)]: optimizer.state.get(p, {}) for p in owned}, tensors)
    groups = [
        GroupSpec(tuple(names[id(p)] for p in group["params"]), group_fields(group, f"param group {i}"))
        for i, group in enumerate(optimizer.param_groups)
    ]
    return OptimizerSpec(type(optimizer).__name__, groups, state)


def state_specs(
    state: dict[str, dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> dict[str, dict[str, TensorSpec]]:
    """The specs of state tensors, by parameter's name and state key; adds the tensors to `tensors`.

    Refused for one that has no plain dense memory.
    """
    specs: dict[str, dict[str, TensorSpec]] = {}
    for name, entry in state.items():
        for key, value in entry.items():
            if value is None:  # SGD without momentum
                continue
            label = f"optimizer state {key} of {name}"
            check_tensor(label, value, True)
            spec = _spec(value)
            if not spec.dense:
                raise Refused(f"{label} has gaps or overlaps in memory (strides {spec.stride})")
            specs.setdefault(name, {})[key] = spec
            tensors[f"optimizer/{name}/{key}"] = value
    return specs


def group_fields(group: dict[str, Any], label: str) -> dict[str, Any]:
    """Every field of a param group but its parameters. DescriptionError for one that is no plain value."""
    fields = {key: value for key, value in group.items() if key != "params"}
    encode_value(fields, label)
    return fields


def _ddp(model: DistributedDataParallel, reduced: list[torch.nn.Parameter]) -> DdpSpec:
    limits = [sys.maxsize]  # without find_unused_parameters DDP starts with one bucket per dtype
    config = getattr(model, "_bucket_config", None)
    if config is not None:
        limits, _ = config.compute_bucket_size_limits(model.static_graph, model.find_unused_parameters)
    tensors: list[torch.Tensor] = list(reduced)
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    initial: Buckets = tuple(tuple(bucket) for bucket in reversed(assigned))
    logged = model._get_ddp_logging_data()
    sizes = tuple(sum(reduced[i].numel() * reduced[i].element_size() for i in bucket) for bucket in initial)
    if sizes != _sizes(logged["bucket_sizes"]):
        raise Refused(
            "DDP's buckets do not hold the parameters that require gradients now: set requires_grad before DDP is built"
        )
    rebuilt = parse_layout(logged)
    if rebuilt is None and model._has_rebuilt_buckets:
        rebuilt = _live_layout(model, reduced)
    return DdpSpec(
        find_unused_parameters=model.find_unused_parameters,
        static_graph=model.static_graph,
        gradient_as_bucket_view=model.gradient_as_bucket_view,
        broadcast_buffers=model.broadcast_buffers,
        bucket_cap_bytes=model.bucket_bytes_cap,
        bucket_cap_default=model.bucket_bytes_cap_default,
        ignored=tuple(sorted(model.parameters_to_ignore)),
        comm_hook=comm_hook(model),
        initial_buckets=initial,
        rebuilt_buckets=None if rebuilt is None else rebuilt[0],
        bucket_bytes=sizes if rebuilt is None else rebuilt[1],
        layout_pending=rebuilt is None and model._lazy_init_ran,
    )


def _live_layout(model: DistributedDataParallel, reduced: list[torch.nn.Parameter]) -> tuple[Buckets, tuple[int, ...]]:
    """The rebuilt layout where DDP has not logged it yet: from zeroed copies of its buckets."""
    index = {id(parameter): i for i, parameter in enumerate(reduced)}
    buckets, sizes = [], []
    for bucket in model.reducer._get_zeros_like_grad_buckets():
        buckets.append(tuple(index[id(parameter)] for parameter in bucket.parameters()))
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return tuple(buckets), tuple(sizes)
