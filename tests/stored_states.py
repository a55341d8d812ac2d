"""Snapshots for the tests of the store and of the restored formats: made by hand, or of a live torch job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
from flowcheck.snapshot import Snapshot

FIELDS: dict[str, Any] = {"lr": 1e-3 / 3, "betas": (0.9, 0.95), "eps": 1e-8, "fused": None, "maximize": False}


def row_major(dtype: str, *shape: int) -> TensorSpec:
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return TensorSpec(dtype, shape, tuple(stride))


def pattern(spec: TensorSpec, step: int, salt: int) -> np.ndarray:
    """Bytes that differ for every step and tensor, cheap to make for hundreds of megabytes."""
    words = -(-spec.nbytes // 8)
    data = np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(step << 20 | salt)
    return data.view(np.uint8)[: spec.nbytes].copy()


def description(
    parameters: list[ParameterSpec],
    *,
    run: str = "run",
    step: int = 0,
    buffers: list[BufferSpec] | None = None,
    optimizer: OptimizerSpec | None = None,
) -> JobDescription:
    indices = tuple(p.index for p in parameters if p.index is not None)
    owned = tuple(p.name for p in parameters if p.index is not None)
    return JobDescription(
        run=run,
        step=step,
        world_size=2,
        torch_version="2.13.0",
        arch="x86_64",
        cpu_capability="AVX2",
        device="cpu",
        parameters=parameters,
        buffers=buffers or [],
        optimizer=optimizer or OptimizerSpec("AdamW", [GroupSpec(owned, dict(FIELDS))]),
        ddp=DdpSpec(False, False, False, True, 25 << 20, True, (), None, (indices,), None, (0,)),
        group=GroupRecord("0", 2, [{0: ("10.0.0.1", 1000), 1: ("10.0.0.2", 1001)}], 5),
    )


def small(step: int, *, run: str = "run", epoch: int = 1, first: int = 0) -> Snapshot:
    """A few tensors of every kind: dtypes, 0-dim, empty, permuted strides, tied, frozen, non-persistent."""
    channels_last = TensorSpec("float32", (5, 3, 4, 2), (24, 1, 6, 3))
    parameters = [
        ParameterSpec("wte.weight", row_major("float32", 17, 9), 0, ("head.weight",)),
        ParameterSpec("conv.weight", channels_last, 1),
        ParameterSpec("half", row_major("float16", 7), 2),
        ParameterSpec("brain", row_major("bfloat16", 3, 5), 3),
        ParameterSpec("wide", row_major("float64", 2, 2), 4),
        ParameterSpec("scale", row_major("float32"), 5),
        ParameterSpec("empty", row_major("float32", 0, 3), 6),
        ParameterSpec("frozen", row_major("float32", 4), None),
    ]
    buffers = [
        BufferSpec("bn.running_mean", row_major("float32", 3), True),
        BufferSpec("bn.num_batches_tracked", row_major("int64"), True),
        BufferSpec("mask", row_major("bool", 6), False),
    ]
    job = description(parameters, run=run, step=first, buffers=buffers)
    tensors: dict[str, TensorSpec] = dict(job.tensors())
    for parameter in parameters:
        if parameter.index is not None:
            tensors[f"optimizer/{parameter.name}/step"] = row_major("float32")
            tensors[f"optimizer/{parameter.name}/exp_avg"] = parameter.spec
            tensors[f"optimizer/{parameter.name}/exp_avg_sq"] = parameter.spec
    return Snapshot(
        description=job,
        run=run,
        epoch=epoch,
        step=step,
        confirmed=step % 2 == 0,
        exact=False,
        reasons=["the trainer runs AVX512 kernels, this node AVX2"],
        not_covered=["bn.running_mean"],
        groups=[{**FIELDS, "lr": 0.1 / (step + 3)}],
        tensors={key: (spec, pattern(spec, step, n)) for n, (key, spec) in enumerate(tensors.items())},
    )


def plain(step: int, nbytes: int, *, run: str = "run", epoch: int = 1, tensors: int = 4) -> Snapshot:
    """`nbytes` of float32 in a few equal tensors and nothing else, for timing and kills."""
    spec = row_major("float32", nbytes // 4 // tensors)
    parameters = [ParameterSpec(f"layer{n}", spec, n) for n in range(tensors)]
    job = description(parameters, run=run)
    data = {f"model/layer{n}": (spec, pattern(spec, step, n)) for n in range(tensors)}
    return Snapshot(job, run, epoch, step, True, True, groups=[dict(FIELDS)], tensors=data)


def same(a: Snapshot, b: Snapshot, *, transient: bool = False) -> None:
    """Assert that two snapshots are the same in every field and byte; `a` may lack non-persistent buffers."""
    skip = set() if transient else {f"buffer/{x.name}" for x in b.description.buffers if not x.persistent}
    assert a.tensors.keys() == b.tensors.keys() - skip
    for key, (spec, data) in a.tensors.items():
        assert spec == b.tensors[key][0], key
        assert data.tobytes() == b.tensors[key][1].tobytes(), key
    for name in ("description", "run", "epoch", "step", "confirmed", "exact", "reasons", "not_covered", "groups"):
        assert getattr(a, name) == getattr(b, name), name


def of_torch(model: Any, optimizer: Any, step: int, *, run: str = "run", epoch: int = 1) -> Snapshot:
    """The snapshot that a shadow equal to this live torch job would hand out."""
    import torch

    def spec_of(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())

    def raw(tensor: torch.Tensor) -> tuple[TensorSpec, np.ndarray]:
        flat = tensor.detach().clone().as_strided((tensor.numel(),), (1,))
        return spec_of(tensor), flat.view(torch.uint8).numpy().copy()

    def second_names(named: Any, tensor: torch.Tensor, first: str) -> tuple[str, ...]:
        return tuple(name for name, other in named(remove_duplicate=False) if other is tensor and name != first)

    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    tensors, parameters, buffers, names = {}, [], [], {}
    for name, tensor in model.named_parameters():
        index = sum(p.index is not None for p in parameters) if tensor.requires_grad else None
        aliases = second_names(model.named_parameters, tensor, name)
        parameters.append(ParameterSpec(name, spec_of(tensor), index, aliases))
        tensors[f"model/{name}"] = raw(tensor)
        names[tensor] = name
    for name, tensor in model.named_buffers():
        buffers.append(BufferSpec(name, spec_of(tensor), name not in transient))
        tensors[f"buffer/{name}"] = raw(tensor)
    fields = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    groups = [
        GroupSpec(tuple(names[p] for p in group["params"]), dict(values))
        for group, values in zip(optimizer.param_groups, fields, strict=True)
    ]
    for tensor, entry in optimizer.state.items():
        for key, value in entry.items():
            tensors[f"optimizer/{names[tensor]}/{key}"] = raw(value)
    spec = OptimizerSpec(type(optimizer).__name__, groups)
    job = description(parameters, run=run, buffers=buffers, optimizer=spec)
    return Snapshot(job, run, epoch, step, True, True, groups=fields, tensors=tensors)


def flip(path: Path, offset: int) -> None:
    """One bit; negative offsets count from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def unfinished(root: Path) -> list[Path]:
    return list(root.rglob(".tmp-*"))
