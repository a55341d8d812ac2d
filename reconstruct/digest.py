"""One hash for a training state, the same on the trainer and on the checkpoint node.

The digest is xxh3_128 over, for every parameter in the order of its name: the parameter, then its optimizer
state tensors in the order of their keys. Each tensor contributes a header and its bytes. The header is the
UTF-8 text `name NUL key NUL dtype NUL shape NUL stride NUL bytes NUL`: `key` is empty for the parameter
itself, dtype is torch's name without `torch.`, shape and stride are decimal numbers joined by commas, and
`bytes` is the count that follows. A dimension of size 1 has no say in where elements lie, so its stride
counts as 0, as do all strides of an empty tensor. The bytes are in memory order: those of the storage that
the tensor covers. Optimizer state is taken in its parameter's memory order. Buffers and param group fields
are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from flowcheck.description import TensorSpec

if TYPE_CHECKING:
    import torch


def canonical_stride(spec: TensorSpec) -> tuple[int, ...]:
    """The strides, with 0 where they mean nothing: in dimensions of size 1 and in empty tensors."""
    if spec.numel == 0:
        return (0,) * len(spec.shape)
    return tuple(0 if size == 1 else step for size, step in zip(spec.shape, spec.stride, strict=True))


def state_digest(tensors: Mapping[str, tuple[TensorSpec, Any]]) -> str:
    """Digest of tensors by key (see `flowcheck.snapshot`); buffers are left out.

    Values are (spec, a buffer of the tensor's bytes in memory order). Returns 32 hexadecimal digits.
    """
    ordered = []
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind == "model":
            ordered.append((rest, "", key))
        elif kind == "optimizer":
            name, _, state = rest.rpartition("/")
            ordered.append((name, state, key))
    hasher = xxhash.xxh3_128()
    for name, state, key in sorted(ordered):
        spec, data = tensors[key]
        shape, stride = (",".join(map(str, part)) for part in (spec.shape, canonical_stride(spec)))
        header = (name, state, spec.dtype, shape, stride, str(spec.nbytes), "")
        hasher.update("\0".join(header).encode())
        hasher.update(data)
    return hasher.hexdigest()


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest of a live model, wrapped in DistributedDataParallel or not, and its optimizer.

    Names are those of the unwrapped module, the first one for tied parameters. Raises ValueError for a
    parameter whose memory has gaps and for optimizer state of a parameter that the model does not have.
    """
    from torch.nn.parallel import DistributedDataParallel

    module = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    tensors = {f"model/{name}": _raw(name, parameter) for name, parameter in parameters.items()}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in names:
            raise ValueError("the optimizer has state of a parameter that is not in the model")
        name = names[id(parameter)]
        for key, value in state.items():
            if value is None:
                continue
            if key != "step" and value.stride() != parameter.stride():
                value = _in_order_of(parameter, value)
            tensors[f"optimizer/{name}/{key}"] = _raw(f"{name}/{key}", value)
    return state_digest(tensors)


digest = digest_of
"""The name under which the package offers it: `flowcheck.digest(model, optimizer)`."""


def _in_order_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    import torch

    ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device="cpu")
    return ordered.copy_(value)


def _raw(name: str, tensor: torch.Tensor) -> tuple[TensorSpec, Any]:
    import torch

    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    spec = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())
    if not spec.dense:
        raise ValueError(f"{name}: strides {spec.stride} leave gaps in memory")
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return spec, flat.view(torch.uint8).numpy()
