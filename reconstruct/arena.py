"""Memory of the shadow: where every tensor of a job lies, and one whole version of the state.

A version is a few flat byte sections: `model` (all parameters), `buffer`, `step` (counters) and one section
per optimizer state key (`exp_avg`, `momentum_buffer`, ...). A parameter has the same offset in the model
section and in every state section, so one table of offsets serves them all, and a whole version is copied
with one memcpy per section. All offsets are multiples of 64 bytes.

The optimizer works on *tiles*: element ranges of a parameter that stay in cache through all passes of a step.
Where a range may end is not free. For float32 and float64 with torch's single-tensor and foreach
implementations the bits depend on neither tiles nor threads. In float16 and bfloat16 the scalar code that
torch runs on the last elements of a range rounds differently from its vector code, so a tile must end where
the trainer's own range ended, or at a multiple of the vector loop's length (64 elements) from where it began.
The fused kernels, too, have a tail of their own. `tile_ranges` follows those rules, `widened` for parts of a
tensor; tests/test_optimizer.py and tests/test_pieces.py compare them with torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowcheck.description import JobDescription, TensorSpec
from flowcheck.errors import FlowcheckError
from reconstruct.ranges import Ranges
from reconstruct.unknown import Unknown

ALIGN = 64
TILE = 262_144
"""Elements of a tile: parameter, gradient, state and temporaries of float32 AdamW stay within 6 MiB, and
calling torch's step costs little beside the work."""
GRAIN = 32_768
"""torch's at::internal::GRAIN_SIZE: an element-wise operation on at most so many elements uses one thread."""
VECTOR = 64
"""Elements that the vector loops of torch's kernels take at once, at most."""
COUNTER_BYTES = 8

FLOATS = ("float64", "float32", "float16", "bfloat16")
LOW_PRECISION = ("float16", "bfloat16")


class ShadowError(FlowcheckError):
    """The shadow was given something that does not fit its job; the state it holds is unharmed unless the
    message says otherwise."""


def aligned(nbytes: int) -> np.ndarray:
    """uint8[nbytes], zeros, at an address that is a multiple of 64.

    Zeros because unknown elements may be read, and must not show what the process held there before.
    """
    raw = np.zeros(nbytes + ALIGN, np.uint8)
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


def bits(itemsize: int) -> np.dtype[Any]:
    """A dtype of that size whose elements are compared bit by bit."""
    return np.dtype(f"u{itemsize}") if itemsize <= 8 else np.dtype((np.void, itemsize))


def widened(tiles: tuple[tuple[int, int], ...], lo: int, hi: int) -> tuple[int, int]:
    """The smallest range around the elements [lo, hi) that an optimizer may process by itself with the bits of the
    whole tensor. tiles: the tensor's `tile_ranges`, () for one that no optimizer processes."""
    if not tiles or lo >= hi:
        return lo, hi
    first = tiles[bisect_right(tiles, lo, key=lambda tile: tile[0]) - 1]
    last = tiles[bisect_right(tiles, hi - 1, key=lambda tile: tile[0]) - 1]
    return lo - (lo - first[0]) % VECTOR, min(hi + (last[0] - hi) % VECTOR, last[1])


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

    @property
    def stepped(self) -> bool:
        """Whether optimizer steps change it: DDP reduces its gradient and the optimizer owns it."""
        return self.index is not None and self.group >= 0

    @property
    def elements(self) -> Ranges:
        return Ranges.of([(0, self.spec.numel)])


class Layout:
    """Offsets of all tensors of a job, or of a part of one tensor."""

    def __init__(self, slots: list[Slot], buffers: dict[str, tuple[TensorSpec, int]]) -> None:
        """buffers: name -> spec and offset into the buffer section."""
        self.slots = slots
        self.buffers = buffers
        self.by_name = {slot.name: slot for slot in slots}
        self.tiles = sum(len(slot.tiles) for slot in slots)
        self.model_bytes = max((_end(slot.offset, slot.spec) for slot in slots), default=0)
        self.state_bytes = max((_end(slot.offset, slot.spec) for slot in slots if slot.group >= 0), default=0)
        self.buffer_bytes = max((_end(offset, spec) for spec, offset in buffers.values()), default=0)

    @classmethod
    def of(cls, description: JobDescription) -> Layout:
        """A whole job's. Raises ShadowError for what the shadow cannot hold."""
        groups = description.optimizer.groups
        group_of = {name: number for number, group in enumerate(groups) for name in group.parameters}
        fused = [bool(group.fields.get("fused")) for group in groups]
        slots: list[Slot] = []
        offset = first_tile = 0
        # The optimizer's parameters come first, so that state sections need no room for frozen ones.
        for parameter in sorted(description.parameters, key=lambda p: group_of.get(p.name, len(groups))):
            spec, number = parameter.spec, group_of.get(parameter.name, -1)
            if not spec.dense:
                raise ShadowError(f"parameter {parameter.name}: strides {spec.stride} leave gaps in memory")
            tiles: tuple[tuple[int, int], ...] = ()
            if number >= 0:
                if spec.dtype not in FLOATS:
                    raise ShadowError(f"parameter {parameter.name}: optimizing {spec.dtype} is not supported")
                tiles = tile_ranges(spec.numel, spec.dtype, fused[number], description.threads or 1)
            counter = description.optimizer.state.get(parameter.name, {}).get("step")
            step_dtype = counter.dtype if counter else "float32"
            slots.append(Slot(parameter.name, spec, offset, parameter.index, number, tiles, first_tile, step_dtype))
            first_tile += len(tiles)
            offset = _end(offset, spec)
        buffers: dict[str, tuple[TensorSpec, int]] = {}
        offset = 0
        for buffer in description.buffers:
            buffers[buffer.name] = (buffer.spec, offset)
            offset = _end(offset, buffer.spec)
        return cls(slots, buffers)

    @classmethod
    def part(cls, slot: Slot, lo: int, hi: int) -> Layout:
        """Elements [lo, hi) of one parameter (as `widened` gives them), as a job of their own with one param group."""
        tiles = tuple((max(lo, a) - lo, min(hi, b) - lo) for a, b in slot.tiles if lo < b and a < hi) or ((0, 0),)
        spec = slot.spec if slot.spec.shape == () else TensorSpec(slot.spec.dtype, (hi - lo,), (1,))
        return cls([replace(slot, spec=spec, offset=0, group=min(slot.group, 0), tiles=tiles, first_tile=0)], {})

    def section_bytes(self, section: str) -> int:
        """Size of a section by name; every name but model, buffer and step is an optimizer state key."""
        sizes = {"model": self.model_bytes, "buffer": self.buffer_bytes, "step": self.tiles * COUNTER_BYTES}
        return sizes.get(section, self.state_bytes)


def _end(offset: int, spec: TensorSpec) -> int:
    """The offset of what follows a tensor at `offset`."""
    return offset + -(-spec.nbytes // ALIGN) * ALIGN


class Version:
    """The state after one step: sections, which parameters have which state, and the groups in force."""

    def __init__(self, layout: Layout, step: int, groups: list[dict[str, Any]]) -> None:
        self.layout = layout
        self.step = step
        self.groups = groups
        self.sections: dict[str, np.ndarray] = {}
        self.state_keys: dict[str, tuple[str, ...]] = {}
        """Parameter name -> state keys that it has; a parameter that never had a gradient is not in it."""
        self.unknown = Unknown()
        self.uncounted: frozenset[str] = frozenset()
        """Parameters whose step counter is not known. None of their elements is."""
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

    @property
    def known(self) -> bool:
        """Whether all of it is known. A parameter without elements may still have a counter that is not."""
        return not self.unknown and not self.uncounted

    def counters(self, slot: Slot) -> np.ndarray:
        """The step counters of all tiles of a parameter, float32 or float64, to be written."""
        dtype = np.dtype(slot.step_dtype)
        first, count = slot.first_tile * COUNTER_BYTES, len(slot.tiles) * COUNTER_BYTES
        return self.section("step")[first : first + count].view(dtype)[:: COUNTER_BYTES // dtype.itemsize]

    def lose_all(self) -> None:
        """Nothing of the version is known."""
        for slot in self.layout.slots:
            self._lose(slot)
        for name, (spec, _) in self.layout.buffers.items():
            self.unknown.add(f"buffer/{name}", Ranges.of([(0, spec.numel)]), self.step)

    def _lose(self, slot: Slot) -> None:
        self.unknown.add(f"model/{slot.name}", slot.elements, self.step)
        if "step" in self.state_keys.get(slot.name, ()):
            self.uncounted |= {slot.name}

    def places(self, key: str) -> dict[str, np.ndarray]:
        """Section -> all elements of what the key stands for, as unsigned numbers of their size, to be written.

        Sections are "model" and the parameter's state keys but `step`; of a buffer "model" alone.
        """
        kind, _, name = key.partition("/")
        if kind == "buffer":
            spec, data = self.buffer(name)
            return {"model": data.view(bits(spec.itemsize))}
        slot = self.layout.by_name[name]
        sections = ["model", *(state for state in self.state_keys.get(name, ()) if state != "step")]
        return {section: self.parameter(slot, section).view(bits(slot.spec.itemsize)) for section in sections}

    def put(
        self, key: str, ranges: Ranges, sections: Mapping[str, np.ndarray], start: int, counter: bytes | None
    ) -> None:
        """Take over elements `ranges` as known, see `reconstruct.shadow.Shadow.patch`."""
        places = self.places(key)
        name = key.partition("/")[2]
        if sections.keys() != places.keys() or (name in self.uncounted and counter is None):
            raise ShadowError(f"{key}: sections {sorted(sections)} instead of {sorted(places)}, counter {counter!r}")
        given = {section: data.view(places[section].dtype) for section, data in sections.items()}
        for section, data in given.items():
            if ranges - Ranges.of([(start, start + len(data))]):
                raise ShadowError(f"{key}: {len(data)} elements of {section} from {start} on are not {ranges!r:.80}")
        for section, data in given.items():
            place = places[section][start : start + len(data)]
            np.copyto(place, data, where=ranges.mask(start, start + len(data)))
        self.unknown.remove(key, ranges)
        if name in self.uncounted and counter is not None:
            self.set_counter(self.layout.by_name[name], counter)

    def set_counter(self, slot: Slot, counter: bytes) -> None:
        """All tiles of a parameter count from here on."""
        counters = self.counters(slot)
        counters[:] = np.frombuffer(counter, counters.dtype)[0]
        self.uncounted -= {slot.name}

    def reform(self, name: str, keys: tuple[str, ...], counter: bytes | None) -> None:
        """The parameter has these state keys and this counter, and nothing else of it is known."""
        slot = self.layout.by_name[name]
        self.set_state_keys(name, keys)
        self._lose(slot)
        if counter is not None:
            self.set_counter(slot, counter)

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
