"""A rank's live parameters, buffers and optimizer state, read in slices and checksums at the end of a step.

Nothing is remembered of the tensors but what they must look like: optimizers and scripts may put others in their place
at any step, so each is looked up when it is read. A slice counts elements in memory order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from flowcheck.describe import Live, memory_view
from flowcheck.protocol import CHUNK, MAX_SECTIONS
from flowcheck.specs import TensorSpec
from flowcheck.supported import dtype_name

COUNTER = "step"
"""The state key that is no tensor of the parameter's elements but Adam's count of steps."""
STAGING = 64 << 20
"""Bytes copied from a CUDA device at a time for a checksum."""


class Unreadable(Exception):
    """These elements cannot be given; the text says why."""


@dataclass(slots=True)
class Slices:
    """Views of the same elements of a parameter and its state, or of a buffer, still to be copied.

    counter: the optimizer's step count of the parameter, None where it has none.
    """

    sections: list[tuple[str, torch.Tensor]]
    counter: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(view.numel() for _, view in self.sections)

    def copy(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(all sections' bytes one after another, the counter), on their devices. CUDA only queues the copies."""
        data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.sections[0][1].device)
        end = 0
        for _, view in self.sections:
            start, end = end, end + view.numel()
            data[start:end].copy_(view)
        return data, None if self.counter is None else self.counter.detach().clone()


class LiveState:
    """The state of rank `rank` of the process group. Read it on the thread that trains, between two steps."""

    def __init__(self, live: Live, rank: int) -> None:
        self._module = live.model.module
        self._parameters = {
            spec.name: (spec.spec, parameter)
            for spec, parameter in zip(live.parameter_specs, live.parameters, strict=True)
        }
        # Only what the gradients make is the same in all ranks; the rest is what rank 0 would save.
        self._shared = {spec.name for spec in live.parameter_specs if spec.index is not None}
        self._buffers = {spec.name: spec.spec for spec in live.buffer_specs}
        self._rank = rank

    def refusal(self, key: str, lo: int, hi: int) -> str | None:
        """Why elements [lo, hi) of `key` will never be given by this rank; None if they may."""
        kind, _, name = key.partition("/")
        spec = self._parameters[name][0] if name in self._parameters else None
        if kind == "buffer":
            spec = self._buffers.get(name)
        elif kind != "model":
            spec = None
        if spec is None:
            return f"{key:.200} is no parameter or buffer here"
        if not lo < hi <= spec.numel and (lo, hi, spec.numel) != (0, 0, 0):  # one without elements has its counter
            return f"{key:.200} has {spec.numel} elements, no range {lo} to {hi}"
        if (hi - lo) * spec.itemsize > CHUNK:
            return f"{(hi - lo) * spec.itemsize} bytes of {key:.200}, at most {CHUNK} are given at a time"
        if self._rank != 0 and (kind == "buffer" or name not in self._shared):
            return f"{key:.200} may differ between ranks: ask rank 0"
        return None

    def slices(self, optimizer: Any, key: str, lo: int, hi: int) -> Slices:
        """Elements [lo, hi) of a key for which `refusal` found none. Raises Unreadable."""
        kind, _, name = key.partition("/")
        if kind == "buffer":
            return Slices([("buffer", _bytes(self._buffer(name), lo, hi))], None)
        spec, parameter = self._parameters[name]
        _check(key, spec, parameter)
        sections = [("model", _bytes(parameter, lo, hi))]
        counter = None
        for state_key, value in _state(optimizer, parameter):
            if state_key == COUNTER:
                counter = value
            elif not _same_order(parameter, value):
                raise Unreadable(
                    f"optimizer state {state_key} of {name} is {tuple(value.shape)} with strides {value.stride()}, its "
                    f"parameter {tuple(parameter.shape)} with {parameter.stride()}: elements do not lie in one order"
                )
            else:
                sections.append((state_key, _bytes(value, lo, hi)))
        if len(sections) > MAX_SECTIONS or sum(view.numel() for _, view in sections) > CHUNK:
            raise Unreadable(f"{key:.200} from {lo} to {hi} with its state is more than {CHUNK} bytes: ask for less")
        if counter is not None and counter.numel() != 1:
            raise Unreadable(f"the step counter of {name} has {counter.numel()} elements")
        return Slices(sections, counter)

    def checksums(self, optimizer: Any) -> dict[str, str | None]:
        """xxh3_128 of every parameter's and state tensor's bytes in memory order, by tensor key.

        None for a state tensor that lies in another order than its parameter, or for what is not as it was at attach.
        """
        found: dict[str, str | None] = {}
        for name, (spec, parameter) in self._parameters.items():
            found[f"model/{name}"] = state_checksum(parameter) if _fits(spec, parameter) else None
            for key, value in _state(optimizer, parameter):
                same = key == COUNTER or _same_order(parameter, value)
                found[f"optimizer/{name}/{key}"] = state_checksum(value) if same else None
        return found

    def _buffer(self, name: str) -> torch.Tensor:
        try:
            buffer = self._module.get_buffer(name)
        except AttributeError:
            raise Unreadable(f"buffer {name} is no longer there") from None
        spec = self._buffers[name]
        dense = TensorSpec(spec.dtype, tuple(buffer.shape), tuple(buffer.stride())).dense
        stored = buffer if dense else buffer.contiguous()  # as describe uploads it
        _check(f"buffer/{name}", spec, stored)
        return stored


def _state(optimizer: Any, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameter's state tensors as they are now; SGD without momentum keeps a None."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise Unreadable(f"the optimizer keeps {key!s:.64} as {type(value).__name__}")
        yield key, value


def _fits(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return (
        tuple(tensor.shape) == spec.shape and tuple(tensor.stride()) == spec.stride and dtype_name(tensor) == spec.dtype
    )


def _check(key: str, spec: TensorSpec, tensor: torch.Tensor) -> None:
    if not _fits(spec, tensor):
        raise Unreadable(
            f"{key} is {dtype_name(tensor)} {tuple(tensor.shape)} with strides {tuple(tensor.stride())} now, it was "
            f"{spec.dtype} {spec.shape} with {spec.stride} at attach"
        )


def _same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the elements of two tensors, the first of them dense, lie in one order in memory."""
    if one.shape != other.shape:
        return False
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1)


def _bytes(tensor: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """uint8 view of elements [lo, hi) in memory order."""
    return memory_view(tensor)[lo:hi].view(torch.uint8)


def state_checksum(tensor: torch.Tensor) -> str:
    """xxh3_128 of a dense tensor's bytes in memory order, hexadecimal. One from CUDA comes in pieces."""
    flat = memory_view(tensor).view(torch.uint8)
    if flat.device.type == "cpu":
        return xxhash.xxh3_128_hexdigest(flat.numpy().data)
    whole = xxhash.xxh3_128()
    staging = torch.empty(min(STAGING, flat.numel()), dtype=torch.uint8, device="cpu", pin_memory=True)
    for start in range(0, flat.numel(), STAGING):
        part = staging[: min(STAGING, flat.numel() - start)]
        part.copy_(flat[start : start + STAGING])
        whole.update(part.numpy().data)
    return whole.hexdigest()
