"""Tensors, parameters, buffers and optimizers as plain data: the parts of a `flowcheck.description`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from flowcheck.values import DescriptionError, Reader, encode_value, integer, text

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

MAX_NAME = 1024
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 1 << 44
MAX_GROUPS = 1 << 14

OPTIMIZERS = ("SGD", "Adam", "AdamW")
"""The classes of torch.optim that may be named: no other name is ever looked up."""

SCHEDULERS = (
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "CosineAnnealingLR",
    "PolynomialLR",
    "OneCycleLR",
    "CosineAnnealingWarmRestarts",
    "SequentialLR",
    "ChainedScheduler",
)
"""The classes of torch.optim.lr_scheduler that may be named: their next value follows from their own attributes and
the param groups alone."""

NESTED = "_schedulers"
"""The attribute of a scheduler that holds others."""
MAX_SCHEDULERS = 64
MAX_NESTED = 4

FLAGS = ("nesterov", "maximize", "foreach", "fused", "differentiable", "capturable", "amsgrad",
         "decoupled_weight_decay")  # fmt: skip
NUMBERS = ("lr", "initial_lr", "momentum", "dampening", "weight_decay", "eps")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype, shape and stride (elements) of a tensor that fills its memory without gaps or overlaps."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def dense(self) -> bool:
        """Whether the strides cover `numel` elements of memory exactly once, in some order of dimensions."""
        if self.numel == 0:
            return True
        expected = 1
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.stride, strict=True) if n > 1):
            if stride != expected:
                return False
            expected *= size
        return True

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape), "stride": list(self.stride)}

    @classmethod
    def from_json(cls, data: Any, path: str = "tensor") -> TensorSpec:
        reader = Reader(data, path)
        dtype = reader.text("dtype", 32)
        if dtype not in ITEMSIZE:
            raise reader.fail("dtype", f"{dtype!r} is not a known dtype")
        shape = tuple(reader.sequence("shape", MAX_DIMENSIONS, read_size))
        stride = tuple(reader.sequence("stride", MAX_DIMENSIONS, read_size))
        reader.done()
        if len(shape) != len(stride):
            raise reader.fail("stride", f"{len(stride)} strides for {len(shape)} dimensions")
        spec = cls(dtype, shape, stride)
        if spec.nbytes > MAX_TENSOR_BYTES:
            raise reader.fail("shape", f"{spec.nbytes} bytes, at most {MAX_TENSOR_BYTES}")
        if not spec.dense:
            raise reader.fail("stride", f"{stride} does not fill memory for shape {shape}")
        return spec


@dataclass(slots=True)
class ParameterSpec:
    """A parameter of the unwrapped module; `index` is its place in DDP's reducer, None if it is not
    reduced.
    """

    name: str
    spec: TensorSpec
    index: int | None
    aliases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "spec": self.spec.to_json(),
            "index": self.index,
            "aliases": list(self.aliases),
        }

    @classmethod
    def from_json(cls, data: Any, path: str = "parameter") -> ParameterSpec:
        reader = Reader(data, path)
        index = None if reader.raw("index") is None else reader.integer("index", 0, MAX_TENSORS)
        spec = TensorSpec.from_json(reader.raw("spec"), f"{path}.spec")
        aliases = tuple(reader.sequence("aliases", 1024, text))
        result = cls(reader.text("name", MAX_NAME), spec, index, aliases)
        reader.done()
        return result


@dataclass(slots=True)
class BufferSpec:
    """A buffer of the unwrapped module; a buffer that is not persistent is no part of its state_dict."""

    name: str
    spec: TensorSpec
    persistent: bool
    aliases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "spec": self.spec.to_json(),
            "persistent": self.persistent,
            "aliases": list(self.aliases),
        }

    @classmethod
    def from_json(cls, data: Any, path: str = "buffer") -> BufferSpec:
        reader = Reader(data, path)
        spec = TensorSpec.from_json(reader.raw("spec"), f"{path}.spec")
        aliases = tuple(reader.sequence("aliases", 1024, text))
        result = cls(reader.text("name", MAX_NAME), spec, reader.boolean("persistent"), aliases)
        reader.done()
        return result


@dataclass(slots=True)
class GroupSpec:
    """One param group: parameter names in the optimizer's order, and every other field as of the attach."""

    parameters: tuple[str, ...]
    fields: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"parameters": list(self.parameters), "fields": encode_value(self.fields, "fields")}

    @classmethod
    def from_json(cls, data: Any, path: str = "group") -> GroupSpec:
        reader = Reader(data, path)
        parameters = tuple(reader.sequence("parameters", MAX_TENSORS, read_name))
        fields = reader.value("fields")
        reader.done()
        if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
            raise reader.fail("fields", "expected an object of named values")
        check_fields(fields, f"{path}.fields")
        return cls(parameters, fields)


@dataclass(slots=True)
class OptimizerSpec:
    """The optimizer's class, its groups, and the state at attach: parameter -> state key -> spec, {} if
    fresh.
    """

    name: str
    groups: list[GroupSpec]
    state: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "groups": [group.to_json() for group in self.groups],
            "state": {
                name: {key: spec.to_json() for key, spec in entry.items()}
                for name, entry in self.state.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any, path: str = "optimizer") -> OptimizerSpec:
        reader = Reader(data, path)
        name = reader.text("name", 64)
        if name not in OPTIMIZERS:
            raise reader.fail("name", f"{name!r} is not one of {', '.join(OPTIMIZERS)}")
        groups = reader.sequence("groups", MAX_GROUPS, GroupSpec.from_json)
        raw = Reader(reader.raw("state"), f"{path}.state")
        if len(raw.data) > MAX_TENSORS:
            raise reader.fail("state", f"{len(raw.data)} parameters, at most {MAX_TENSORS}")
        state: dict[str, dict[str, TensorSpec]] = {}
        for parameter in raw.data:
            entry = Reader(raw.raw(parameter), f"{path}.state.{parameter:.100}")
            if len(entry.data) > 16:
                raise raw.fail(parameter, f"{len(entry.data)} state tensors, at most 16")
            state[parameter] = {
                text(key, entry.path, 64): TensorSpec.from_json(entry.raw(key), f"{entry.path}.{key:.64}")
                for key in entry.data
            }
        reader.done()
        return cls(name, groups, state)


def check_fields(fields: dict[str, Any], path: str) -> None:
    """DescriptionError unless a param group's fields are of the kinds that torch's optimizers take; what they do not
    know is the user's own."""
    for name in NUMBERS:
        if name in fields:
            _number(fields[name], f"{path}.{name}", least=-math.inf if name == "dampening" else 0.0)
    for name in FLAGS:
        if fields.get(name) is not None and not isinstance(fields[name], bool):
            raise DescriptionError(f"{path}.{name}: expected true, false or null")
    if "betas" in fields:
        betas = fields["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise DescriptionError(f"{path}.betas: expected two numbers")
        for beta in betas:
            _number(beta, f"{path}.betas", least=0.0)


def _number(value: Any, path: str, least: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or value < least:
        expected = "a number" if least < 0 else f"a number from {least:g} on"
        raise DescriptionError(f"{path}: {str(value)[:40]} is not {expected}")


def check_scheduler(value: Any, path: str, depth: int = 0) -> dict[str, Any] | None:
    """`value` if it is None or {"class", "state"} of a scheduler that may be named, as
    `reconstruct.lr.scheduler_state` makes it, else DescriptionError."""
    if value is None and depth == 0:
        return None
    if not isinstance(value, dict) or set(value) != {"class", "state"}:
        raise DescriptionError(f"{path}: expected an object of class and state" + (" or null" if depth == 0 else ""))
    if value["class"] not in SCHEDULERS:
        raise DescriptionError(f"{path}.class: {str(value['class'])[:60]!r} is not one of {', '.join(SCHEDULERS)}")
    state = value["state"]
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise DescriptionError(f"{path}.state: expected an object of named values")
    if NESTED in state:
        inner = state[NESTED]
        if depth >= MAX_NESTED or not isinstance(inner, list) or len(inner) > MAX_SCHEDULERS:
            limits = f"at most {MAX_SCHEDULERS} schedulers, nested {MAX_NESTED} deep"
            raise DescriptionError(f"{path}.state.{NESTED}: expected a list of {limits}")
        for number, one in enumerate(inner):
            check_scheduler(one, f"{path}.state.{NESTED}[{number}]", depth + 1)
    return value


def read_size(value: Any, path: str) -> int:
    return integer(value, path, 0, 1 << 62)


def read_name(value: Any, path: str) -> str:
    return text(value, path, MAX_NAME)
