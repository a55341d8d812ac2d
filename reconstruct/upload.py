"""The state that an attach sends: chunks of tensors, written where they belong, until nothing is missing."""

from __future__ import annotations

import numpy as np

from flowcheck.description import JobDescription, TensorSpec
from reconstruct.arena import ShadowError, Version
from reconstruct.digest import canonical_stride
from reconstruct.optimizer import STATE_KEYS, expected_keys


class Upload:
    """Chunks of one job's tensors on their way into `version`, which has the state keys of `described_state`."""

    def __init__(self, description: JobDescription, version: Version) -> None:
        self._version = version
        self._specs = dict(description.tensors())
        self._covered: dict[str, list[tuple[int, int]]] = {
            key: [] if spec.nbytes else [(0, 0)] for key, spec in self._specs.items()
        }
        self._incomplete = {key for key, spec in self._specs.items() if spec.nbytes}
        self._targets = version.tensors()

    def add(self, key: str, offset: int, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Write `data` at byte `offset` of `key`; bytes that are there already must be equal."""
        if key not in self._targets:
            raise ShadowError(f"{key:.200}: the description has no such tensor")
        source = np.frombuffer(data, np.uint8)
        target = self._targets[key][1]
        end = offset + len(source)
        if offset < 0 or end > len(target):
            raise ShadowError(f"{key}: bytes {offset}..{end} of a tensor of {len(target)} bytes")
        position = offset
        for lo, hi in [*self._covered[key], (len(target), len(target))]:
            stop = min(lo, end)
            if position < stop:
                target[position:stop] = source[position - offset : stop - offset]
                position = stop
            stop = min(hi, end)
            if position < stop:
                if not np.array_equal(target[position:stop], source[position - offset : stop - offset]):
                    raise ShadowError(f"{key}: bytes {position}..{stop} came twice and differ")
                position = stop
        self._covered[key] = merged(self._covered[key], offset, end)
        if self._covered[key] == [(0, len(target))]:
            self._incomplete.discard(key)

    def missing(self) -> list[str]:
        """Keys of tensors that are not complete, in the description's order."""
        return [key for key in self._specs if key in self._incomplete]

    def finish(self) -> bool:
        """True once nothing is missing; state is then brought into the form that the shadow works in."""
        if self._incomplete:
            return False
        layout = self._version.layout
        for name, keys in self._version.state_keys.items():
            slot = layout.by_name[name]
            for key in keys:
                if key == "step":
                    counters = self._version.counters(slot)
                    counters[:] = counters[0]
                    continue
                spec = self._specs[f"optimizer/{name}/{key}"]
                if canonical_stride(spec) != canonical_stride(slot.spec):
                    data = self._version.parameter(slot, key)
                    data[:] = reordered(data, spec, slot.spec)
        return True


def merged(ranges: list[tuple[int, int]], lo: int, hi: int) -> list[tuple[int, int]]:
    """`ranges` (sorted, apart) together with [lo, hi)."""
    if lo == hi:
        return ranges
    before = [r for r in ranges if r[1] < lo]
    after = [r for r in ranges if r[0] > hi]
    touching = ranges[len(before) : len(ranges) - len(after)]
    return [*before, (min([lo, *(r[0] for r in touching)]), max([hi, *(r[1] for r in touching)])), *after]


def reordered(data: np.ndarray, source: TensorSpec, target: TensorSpec) -> np.ndarray:
    """The same elements in the memory order of `target`: an optimizer that loaded a checkpoint may keep its
    state in other strides than the parameter."""
    item = np.dtype(f"u{source.itemsize}")
    view = np.lib.stride_tricks.as_strided
    result = np.empty_like(data)
    strides = [tuple(s * source.itemsize for s in spec.stride) for spec in (source, target)]
    view(result.view(item), target.shape, strides[1])[...] = view(data.view(item), source.shape, strides[0])
    return result


def described_state(description: JobDescription) -> dict[str, tuple[str, ...]]:
    """Parameter name -> state keys that it has at the attach. Raises ShadowError, by name, for state that does not fit
    its parameter or optimizer."""
    optimizer = description.optimizer
    specs = {parameter.name: parameter.spec for parameter in description.parameters}
    group_of = {name: group for group in optimizer.groups for name in group.parameters}
    result = {}
    for name, entry in optimizer.state.items():
        unknown = set(entry) - set(STATE_KEYS[optimizer.name])
        lacking = set(expected_keys(optimizer.name, group_of[name].fields)) - set(entry)
        if unknown or (entry and lacking):
            raise ShadowError(f"optimizer state of {name}: {sorted(entry)} is not {optimizer.name}'s")
        for key, spec in entry.items():
            if key == "step":
                fits = spec.shape == () and spec.dtype in ("float32", "float64")
            else:
                fits = spec.shape == specs[name].shape and spec.dtype == specs[name].dtype and spec.dense
            if not fits:
                raise ShadowError(f"optimizer state {name}/{key}: {spec.dtype} {spec.shape} does not fit it")
        if entry:
            result[name] = tuple(key for key in STATE_KEYS[optimizer.name] if key in entry)
    return result
