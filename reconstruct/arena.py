"""Memory of the shadow: where every tensor of a job lies, and one whole version of the state.

A version is a few flat byte sections: `model` (all parameters), `buffer`, `step` (counters) and one section
per optimizer state key (`exp_avg`, `momentum_buffer`, ...). A parameter has the same offset in the model
section and in every state section, so one table of offsets serves them all, and a whole version is copied
with one memcpy per section. All offsets are multiples of 64 bytes.

The optimizer works on *tiles*: element ranges of a parameter that stay in cache through all passes of a step.
Where a range may end is not free. For float32 and float64 with torch's single-tensor and foreach
implementations the bits depend on neither tiles nor threads. In float16 and bfloat16 the scalar code that
torch runs on the last elements of a range rounds differently from its vector code, so a tile must end where
the trainer's own range ended, or at a multiple of the vector loop's length (64 elements). `tile_ranges`
follows those rules; tests/test_optimizer.py compares them with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowcheck.description import JobDescription, TensorSpec
from flowcheck.errors import FlowcheckError

ALIGN = 64
TILE = 262_144
"""Elements of a tile: parameter, gradient, state and temporaries of float32 AdamW stay within 6 MiB, and
calling torch's step costs little beside the work."""
GRAIN = 32_768
"""torch's at::internal::GRAIN_SIZE: an element-wise operation on at most so many elements uses one thread."""
COUNTER_BYTES = 8

FLOATS = ("float64", "float32", "float16", "bfloat16")
LOW_PRECISION = ("float16", "bfloat16")


class ShadowError(FlowcheckError):
    """The shadow was given something that does not fit its job; the state it holds is unharmed unless the
    message says otherwise."""


def aligned(nbytes: int) -> np.ndarray:
    """uint8[nbytes], uninitialised, at an address that is a multiple of 64."""
    raw = np.empty(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def tile_ranges(numel: int, dtype: str, fused: bool, threads: int) -> tuple[tuple[int, int], ...]:
    """Element ranges [lo, hi) that an optimizer may process one by one with the bits of the whole tensor.

    `threads` is the trainer's intra-op thread count. torch cuts an element-wise operation on more than
    `GRAIN` elements into equal ranges, one per thread (ATen/ParallelOpenMP.h), and in low precision each
    range's tail rounds its own way, so those cuts are kept. Tiles of low precision hold at most `GRAIN`
    elements: this process's own threads then never cut them. The fused kernels cut at cache lines, where
    no tail arises.
    """
    if numel == 0:
        return ((0, 0),)
    chunk, tile = numel, TILE
    if dtype in LOW_PRECISION and not fused:
        tile = GRAIN
        if numel >= GRAIN and threads > 1:
            chunk = -(-numel // min(threads, -(-numel // GRAIN)))
    return tuple(
        (lo, min(lo + tile, first + chunk, numel))
        for first in range(0, numel, chunk)
        for lo in range(first, min(first + chunk, numel), tile)
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: `offset` bytes into the model section and every state section."""

    name: str
    spec: TensorSpec
    offset: int
    index: int | None
    """DDP's index, None for a parameter that is not reduced."""
    group: int
    """Number of the param group, -1 for a parameter that the optimizer does not own."""
    tiles: tuple[tuple[int, int], ...]
    first_tile: int
    """Number of this parameter's first tile among all tiles: its place in the step section."""
    step_dtype: str


class Layout:
    """Offsets of all tensors of a job. Raises ShadowError for what the shadow cannot hold."""

    def __init__(self, description: JobDescription) -> None:
        groups = description.optimizer.groups
        group_of = {name: number for number, group in enumerate(groups) for name in group.parameters}
        fused = [bool(group.fields.get("fused")) for group in groups]
        # The optimizer's parameters come first, so that state sections need no room for frozen ones.
        order = sorted(description.parameters, key=lambda p: group_of.get(p.name, len(groups)))
        self.slots: list[Slot] = []
        self.state_bytes = 0
        self.tiles = 0
        offset = 0
        for parameter in order:
            spec, number = parameter.spec, group_of.get(parameter.name, -1)
            if not spec.dense:
                raise ShadowError(f"parameter {parameter.name}: strides {spec.stride} leave gaps in memory")
            tiles: tuple[tuple[int, int], ...] = ()
            if number >= 0:
                if spec.dtype not in FLOATS:
                    raise ShadowError(f"parameter {parameter.name}: optimizing {spec.dtype} is not supported")
                tiles = tile_ranges(spec.numel, spec.dtype, fused[number], description.threads or 1)
            counter = description.optimizer.state.get(parameter.name, {}).get("step")
            slot = Slot(
                parameter.name, spec, offset, parameter.index, number, tiles, self.tiles,
                counter.dtype if counter else "float32",
            )  # fmt: skip
            self.slots.append(slot)
            self.tiles += len(tiles)
            offset += -(-spec.nbytes // ALIGN) * ALIGN
            if number >= 0:
                self.state_bytes = offset
        self.model_bytes = offset
        self.by_name = {slot.name: slot for slot in self.slots}
        self.buffers: dict[str, tuple[TensorSpec, int]] = {}
        offset = 0
        for buffer in description.buffers:
            self.buffers[buffer.name] = (buffer.spec, offset)
            offset += -(-buffer.spec.nbytes // ALIGN) * ALIGN
        self.buffer_bytes = offset

    def section_bytes(self, section: str) -> int:
        """Size of a section by name; every name but model, buffer and step is an optimizer state key."""
        sizes = {"model": self.model_bytes, "buffer": self.buffer_bytes, "step": self.tiles * COUNTER_BYTES}
        return sizes.get(section, self.state_bytes)


class Version:
    """The state after one step: sections, which parameters have which state, and the groups in force."""

    def __init__(self, layout: Layout, step: int, groups: list[dict[str, Any]]) -> None:
        self.layout = layout
        self.step = step
        self.groups = groups
        self.sections: dict[str, np.ndarray] = {}
        self.state_keys: dict[str, tuple[str, ...]] = {}
        """Parameter name -> state keys that it has; a parameter that never had a gradient is not in it."""
        self._tensors: dict[str, tuple[TensorSpec, np.ndarray]] | None = None

    def section(self, name: str) -> np.ndarray:
        """The section's bytes; allocated when first asked for."""
        if name not in self.sections:
            self.sections[name] = aligned(self.layout.section_bytes(name))
        return self.sections[name]

    def parameter(self, slot: Slot, section: str = "model") -> np.ndarray:
        """uint8[nbytes] of a parameter, or of its state in another section (not `step`)."""
        return self.section(section)[slot.offset : slot.offset + slot.spec.nbytes]

    def buffer(self, name: str) -> tuple[TensorSpec, np.ndarray]:
        spec, offset = self.layout.buffers[name]
        return spec, self.section("buffer")[offset : offset + spec.nbytes]

    def counter(self, slot: Slot, tile: int = 0) -> tuple[TensorSpec, np.ndarray]:
        """The step counter of a parameter's tile; all tiles of a parameter count alike."""
        spec = TensorSpec(slot.step_dtype, (), ())
        start = (slot.first_tile + tile) * COUNTER_BYTES
        return spec, self.section("step")[start : start + spec.nbytes]

    def state(self, slot: Slot, key: str) -> tuple[TensorSpec, np.ndarray]:
        """Spec and bytes of one state tensor; all but the counter have the parameter's own memory order."""
        return self.counter(slot) if key == "step" else (slot.spec, self.parameter(slot, key))

    def set_state_keys(self, name: str, keys: tuple[str, ...]) -> None:
        self.state_keys[name] = keys
        self._tensors = None

    def replace_state_keys(self, state_keys: dict[str, tuple[str, ...]]) -> None:
        self.state_keys = dict(state_keys)
        self._tensors = None

    def tensors(self) -> dict[str, tuple[TensorSpec, np.ndarray]]:
        """Key -> (spec, bytes) of every tensor, as views."""
        if self._tensors is None:
            self._tensors = dict(self._walk())
        return self._tensors

    def _walk(self) -> Iterator[tuple[str, tuple[TensorSpec, np.ndarray]]]:
        for slot in self.layout.slots:
            yield f"model/{slot.name}", (slot.spec, self.parameter(slot))
        for name in self.layout.buffers:
            yield f"buffer/{name}", self.buffer(name)
        for slot in self.layout.slots:
            for key in self.state_keys.get(slot.name, ()):
                yield f"optimizer/{slot.name}/{key}", self.state(slot, key)

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(section.nbytes for section in self.sections.values())
