"""torch's own optimizer, run on tiles of a version's memory.

The class is the trainer's (`torch.optim.SGD`, `Adam`, `AdamW`) and every field of its param groups is taken
as it is, `foreach`, `fused`, `maximize` and the like included, so the arithmetic is torch's to the bit. What
differs is only the granularity: the optimizer's "parameters" are views of at most 262,144 elements, and
`step()` is called on a batch of them at a time, so that all passes of the update stay in cache
(see `reconstruct.arena` for why this leaves the bits alone).

State that torch creates on the first step with a gradient (momentum_buffer, exp_avg, ...) is moved into the
version's sections right after, so that it lies where a version is copied and read; a parameter that never
had a gradient gets no state, as in the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reconstruct.arena import COUNTER_BYTES, TILE, ShadowError, Slot, Version

STATE_KEYS = {
    "SGD": ("momentum_buffer",),
    "Adam": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
BATCH_TILES = 32
"""Tiles per call where each tile is finished before the next begins; also bounds torch's first-step state."""


@dataclass(slots=True, eq=False)
class _Tile:
    slot: Slot
    number: int
    lo: int
    hi: int
    tensor: torch.Tensor


def expected_keys(name: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """State keys that torch gives a parameter at its first step under these param group fields."""
    if name == "SGD":
        return STATE_KEYS[name] if fields.get("momentum") else ()
    return STATE_KEYS[name] if fields.get("amsgrad") else STATE_KEYS[name][:3]


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def as_tensor(data: np.ndarray, dtype: str) -> torch.Tensor:
    """A flat tensor over uint8 bytes, without a copy."""
    if not len(data):  # numpy may give it a stride that torch cannot view as another dtype
        return torch.empty(0, dtype=torch_dtype(dtype))
    return torch.from_numpy(data).view(torch_dtype(dtype))


def implementation(fields: dict[str, Any], device: str) -> dict[str, Any]:
    """The param group fields with which this process takes the trainer's code path on CPU.

    torch decides by the parameters' device where neither `foreach` nor `fused` is given: on CUDA it takes
    foreach, on CPU the single-tensor loop. `capturable` exists on accelerators alone.
    """
    group = dict(fields)
    if device != "cpu":
        if group.get("foreach") is None and group.get("fused") is None:
            group["foreach"] = not group.get("differentiable", False)
        group["capturable"] = False
    return group


def writes_gradients(name: str, group: dict[str, Any]) -> bool:
    """Whether torch's step changes the gradients themselves: foreach SGD with nesterov adds the momentum to
    them in place unless weight_decay or maximize made a copy before."""
    return bool(
        name == "SGD"
        and group["foreach"]
        and group["nesterov"]
        and group["momentum"] != 0
        and group["weight_decay"] == 0
        and not group["maximize"]
    )


class TileOptimizer:
    """One version's optimizer. Not thread-safe: only the applying thread uses it."""

    def __init__(self, version: Version, name: str, group_count: int, device: str) -> None:
        self.version = version
        self._name = name
        self._device = device
        self._optimizer = getattr(torch.optim, name)([torch.zeros(1)], lr=1e-3)
        self._optimizer.state.clear()
        self._groups: list[list[_Tile]] = [[] for _ in range(group_count)]
        self._tiles: dict[str, list[_Tile]] = {}
        self._bound: dict[str, tuple[str, ...]] = {}
        for slot in version.layout.slots:
            if slot.group < 0:
                continue
            flat = as_tensor(version.parameter(slot), slot.spec.dtype)
            tiles = [_Tile(slot, i, lo, hi, _part(flat, slot, lo, hi)) for i, (lo, hi) in enumerate(slot.tiles)]
            self._tiles[slot.name] = tiles
            self._groups[slot.group].extend(tiles)

    def bind(self) -> None:
        """Make torch's state of every tile a view of the version's sections, where that is not so yet."""
        for name, keys in self.version.state_keys.items():
            if self._bound.get(name) == keys:
                continue
            for tile in self._tiles[name]:
                self._optimizer.state[tile.tensor] = {key: self._view(tile, key) for key in keys}
            self._bound[name] = keys

    def step(self, gradients: dict[str, np.ndarray], groups: list[dict[str, Any]]) -> None:
        """Apply one optimizer step in place.

        `gradients`: parameter name -> uint8[nbytes] in the parameter's memory order; a parameter that is not
        in it is left alone, as torch leaves one whose grad is None. `groups`: all fields of all param groups.
        Gradients are only read.
        """
        self.bind()
        flat = {name: as_tensor(data, self.version.layout.by_name[name].spec.dtype) for name, data in gradients.items()}
        for tiles, fields in zip(self._groups, groups, strict=True):
            group = {**self._optimizer.defaults, **implementation(fields, self._device)}
            active = [tile for tile in tiles if tile.slot.name in flat]
            copy = writes_gradients(self._name, group)
            for batch in _batches(active, bool(group["foreach"])):
                for tile in batch:
                    part = _part(flat[tile.slot.name], tile.slot, tile.lo, tile.hi)
                    tile.tensor.grad = part.clone() if copy else part
                group["params"] = [tile.tensor for tile in batch]
                self._optimizer.param_groups = [group]
                try:
                    self._optimizer.step()
                finally:
                    for tile in batch:
                        tile.tensor.grad = None
                    self._optimizer.param_groups = []
                for tile in batch:
                    self._adopt(tile)

    def _adopt(self, tile: _Tile) -> None:
        state = self._optimizer.state.get(tile.tensor)
        if not state or len(state) == len(self._bound.get(tile.slot.name, ())):
            return
        keys = tuple(key for key in STATE_KEYS[self._name] if state.get(key) is not None)
        unknown = set(state) - set(STATE_KEYS[self._name])
        if unknown:
            raise ShadowError(f"{self._name} keeps the unknown state {sorted(unknown)} in this torch")
        views = {key: self._view(tile, key) for key in keys}
        for key in keys:
            views[key].copy_(state[key])
        self._optimizer.state[tile.tensor] = views
        if tile.number == len(tile.slot.tiles) - 1:
            self.version.set_state_keys(tile.slot.name, keys)
            self._bound[tile.slot.name] = keys

    def _view(self, tile: _Tile, key: str) -> torch.Tensor:
        slot = tile.slot
        if key == "step":
            start = (slot.first_tile + tile.number) * COUNTER_BYTES
            size = torch_dtype(slot.step_dtype).itemsize
            return as_tensor(self.version.section("step")[start : start + size], slot.step_dtype).reshape(())
        flat = as_tensor(self.version.parameter(slot, key), slot.spec.dtype)
        return _part(flat, slot, tile.lo, tile.hi)


def copy_version(source: Version, target: Version) -> None:
    """Make `target` equal to `source`: one copy per section, with torch's threads and without the GIL."""
    for name, section in source.sections.items():
        torch.from_numpy(target.section(name)).copy_(torch.from_numpy(section))
    if target.state_keys != source.state_keys:
        target.replace_state_keys(source.state_keys)
    target.step, target.groups = source.step, source.groups
    target.unknown, target.uncounted = source.unknown.copy(), source.uncounted


def blank_step(version: Version, name: str, groups: list[dict[str, Any]]) -> None:
    """Count a step of optimizer `name` whose gradients nobody knows.

    Every parameter that DDP reduces had a gradient; one without state got it, with whatever values.
    """
    for slot in version.layout.slots:
        if not slot.stepped:
            continue
        keys = version.state_keys.get(slot.name)
        if not keys:
            keys = expected_keys(name, groups[slot.group])
            version.set_state_keys(slot.name, keys)
            version.counters(slot)[:] = 0
        if "step" in keys:
            version.counters(slot)[:] += 1


def _part(flat: torch.Tensor, slot: Slot, lo: int, hi: int) -> torch.Tensor:
    # A 0-dim parameter stays 0-dim: torch treats such operands as scalars in some kernels.
    return flat.reshape(()) if slot.spec.shape == () else flat[lo:hi]


def _batches(tiles: list[_Tile], foreach: bool) -> list[list[_Tile]]:
    # foreach makes every pass over its whole list before the next pass, so its list must fit in cache;
    # the other implementations finish one tile before they touch the next.
    if not foreach:
        return [tiles[i : i + BATCH_TILES] for i in range(0, len(tiles), BATCH_TILES)]
    batches: list[list[_Tile]] = []
    room = 0
    for tile in tiles:
        size = tile.hi - tile.lo
        if size > room or not batches:
            batches.append([])
            room = TILE
        batches[-1].append(tile)
        room -= size
    return batches
