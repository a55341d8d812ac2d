"""What runs around every optimizer step, a few microseconds and never a wait: rank 0's step marker after it, and in
every rank, before and after it, a look at whether the daemon has asked for something (`flowcheck.desk`). What is asked
for while a step is computed is given before the optimizer changes the state, not a step later.

A marker says which step is done, c10d's sequence number (the tag of the next collective), the param groups' fields
if they changed, and canaries: single elements of gradients and parameters after the step, read straight from CPU
memory. The daemon takes no value from it; it learns where a step ends, and that its own values are the trainer's.
`reconstruct.markers` defines the form.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from flowcheck.describe import Live
from flowcheck.description import DescriptionError, encode_value
from flowcheck.desk import Desk
from flowcheck.markerlink import MarkerLink
from flowcheck.upload import checksums

USUAL_CANARIES = 2
MANY_CANARIES = 8
TRIES = 3
"""Elements looked at per canary before a zero gradient is taken: a zero says nothing about scaling."""

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's MMIX generator
MASK = (1 << 64) - 1


class _Hook:
    """step: optimizer steps done."""

    def __init__(self, step: int, desk: Desk) -> None:
        self.step = step
        self._desk = desk

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pre-step hook: the state is still as it was at the end of the last step."""
        if self._desk.pending:
            self._desk.give(optimizer, self.step)


class StepCounter(_Hook):
    """Post-step hook of the ranks that send no markers."""

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step += 1
        if self._desk.pending:
            self._desk.serve(optimizer, self.step)


class StepMarker(_Hook):
    """Post-step hook of rank 0's optimizer. `changed_since_attach` is its one-time check before the first step.

    uploaded: whether the state was uploaded just now, so that it must not have changed by the first step.
    """

    def __init__(
        self,
        links: Sequence[MarkerLink],
        step: int,
        sequence: int,
        live: Live,
        optimizer: Any,
        desk: Desk,
        *,
        uploaded: bool = True,
    ) -> None:
        super().__init__(step, desk)
        self.sequence = sequence  # c10d's, after that step
        self.version = 0  # changes of the param groups' fields
        self.problem: str | None = None
        self._links = links
        self._model: DistributedDataParallel = live.model
        self._group: Any = live.model.process_group
        self._usual = -1  # collectives of the last step
        self._told = ""  # canaries of the last step
        self._thread = 0  # that makes steps
        self._fields = _Fields(optimizer)
        # Gradients and parameters of CPU models can be read without a copy or a synchronisation.
        self._sampled = [
            (number, parameter, parameter.numel(), parameter.element_size(), parameter.stride())
            for number, (spec, parameter) in enumerate(zip(live.parameter_specs, live.parameters, strict=True))
            if spec.index is not None and parameter.device.type == "cpu" and parameter.numel()
        ]
        self._reduced = [
            (spec.name, parameter)
            for spec, parameter in zip(live.parameter_specs, live.parameters, strict=True)
            if spec.index is not None
        ]
        self._tensors: dict[str, torch.Tensor] = _state(live.tensors) if uploaded else {}
        self._sums: dict[str, int] | None = checksums(self._tensors)

    @property
    def dropped(self) -> int:
        """Markers that were given up because a daemon was out of reach for long."""
        return sum(link.dropped for link in self._links)

    def changed_since_attach(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pre-step hook for the first step: was anything changed since it was uploaded? Frees what it needed."""
        if self._sums is None:
            return
        now = checksums(self._tensors)
        changed = [key.partition("/")[2] for key, value in self._sums.items() if now[key] != value]
        self._sums, self._tensors = None, {}
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self.report(f"changed between attach and the first step: {', '.join(changed[:3])}{more}; attach after that")
        missing = [name for name, parameter in self._reduced if parameter.grad is None]
        if missing:
            self.report(f"{missing[0]} has no gradient: parameters that a step does not use are not supported")

    def report(self, problem: str) -> None:
        """Something that ends the following of this job; every further marker says so."""
        if self.problem is None:
            self.problem = problem[:1000]

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step += 1
        self._thread = get_ident()
        sequence = self._group._get_sequence_number_for_group()
        collectives, self.sequence = sequence - self.sequence, sequence
        if any(link.open for link in self._links):
            self._tell(optimizer, collectives)
        if self._desk.pending:
            self._desk.serve(optimizer, self.step)

    def _tell(self, optimizer: Any, collectives: int) -> None:
        """The marker of the step that was done, to every daemon."""
        if self._fields.changed(optimizer):
            self.version += 1
            for link in self._links:
                link.unsent = True
        model = self._model
        if model._comm_hooks:
            self.report("a communication hook was registered after attach")
        if model._join_config.enable:
            self.report("DDP's join() is active: uneven inputs are not supported")
        count = USUAL_CANARIES if collectives == self._usual else MANY_CANARIES
        self._usual = collectives
        canaries = self._told = self._canaries(count) if self._sampled else ""
        groups: str | None = None
        if any(link.unsent for link in self._links):
            try:
                groups = self._fields.text()
            except DescriptionError as error:
                self.report(str(error))
        problem = self._fields.problem or self.problem
        start = f'{self.step},"sequence":{self.sequence},"version":'
        end = (
            f',"canaries":[{canaries}],"problem":{"null" if problem is None else json.dumps(problem)},'
            f'"rebuilt":{"true" if model._has_rebuilt_buckets else "false"}}}}}'
        )
        for link in self._links:
            if link.open:
                link.post(start, self.version, groups if link.unsent else None, end)

    def ended(self) -> list[bool]:
        """Training has ended, says the thread that calls this: tell all daemons. For each, whether the state may be
        given to it: it follows the job, this thread is the one that made the steps, so that none can run meanwhile, and
        nothing shows that the state is another one than at the end of the last step."""
        following = [link.detach(self.step) for link in self._links]
        still = self._thread == get_ident() and self.problem is None and self._unchanged()
        return [follows and still for follows in following]

    def give_all(self, optimizer: Any) -> None:
        """After `ended`: give what the daemons have asked for."""
        self._desk.give_all(optimizer, self.step)

    def _unchanged(self) -> bool:
        """Whether the parameters that the last marker told of are still what they were. That is a sample; elements that
        were changed and are known to a daemon show there, as an alarm."""
        parameters = {number: parameter for number, parameter, *_ in self._sampled}
        told = json.loads(f"[{self._told}]")
        return all(_element(parameters[number], element) == value for number, element, _, value in told)

    def farewell(self, linger: float) -> None:
        """Say that the last step was the last one, and close the connections."""
        for link in self._links:
            link.close(self.step, linger)

    def _canaries(self, count: int) -> str:
        """`count` elements of as many parameters: [parameter, element, gradient bits, parameter bits] as JSON."""
        sampled = self._sampled
        count = min(count, len(sampled))
        state = (self.step * MULTIPLIER + INCREMENT) & MASK
        start, apart = (state >> 33) % len(sampled), max(1, len(sampled) // count)
        parts = []
        for k in range(count):
            number, parameter, numel, itemsize, stride = sampled[(start + k * apart) % len(sampled)]
            gradient = parameter.grad
            if gradient is None:
                self.report("a parameter had no gradient in a step: skipped parameters are not supported")
                continue
            # Only where gradient and parameter lie in memory in the same order is an element the same in both.
            base = gradient.data_ptr() if gradient.stride() == stride else 0
            bits = "null"
            for _ in range(TRIES):
                state = (state * MULTIPLIER + INCREMENT) & MASK
                element = (state >> 20) % numel
                if not base:
                    break
                raw = ctypes.string_at(base + element * itemsize, itemsize)
                bits = f'"{raw.hex()}"'
                if any(raw):
                    break
            value = _element(parameter, element)
            parts.append(f'[{number},{element},{bits},"{value}"]')
        return ",".join(parts)


def _element(parameter: torch.Tensor, element: int) -> str:
    """The bytes of one element of a dense CPU tensor, in memory order, hexadecimal."""
    itemsize = parameter.element_size()
    return ctypes.string_at(parameter.data_ptr() + element * itemsize, itemsize).hex()


class _Fields:
    """The param groups' fields as last seen, and their JSON, of which only what changed is written again."""

    def __init__(self, optimizer: Any) -> None:
        self.problem: str | None = None
        self._groups = [_Group(len(group["params"])) for group in optimizer.param_groups]
        self.changed(optimizer)

    def changed(self, optimizer: Any) -> bool:
        """Whether a field differs from the last call."""
        if len(optimizer.param_groups) != len(self._groups):
            self.problem = "param groups were added or removed after attach: attach again"
            return False
        found = False
        for i, (seen, group) in enumerate(zip(self._groups, optimizer.param_groups, strict=True)):
            if len(group["params"]) != seen.size:
                self.problem = f"the parameters of param group {i} changed after attach: attach again"
            if len(group) != len(seen.keys) + 1:
                seen.keys = [key for key in group if key != "params"]
                seen.values = [_NEVER] * len(seen.keys)
                seen.parts = [None] * len(seen.keys)
            values = [group.get(key) for key in seen.keys]
            if [*map(type, values)] != seen.types or values != seen.values:
                seen.take(values)
                found = True
        return found

    def text(self) -> str:
        """Every field of every group as the JSON of a marker. DescriptionError for one that has none."""
        return f"[{','.join([group.text(i) for i, group in enumerate(self._groups)])}]"


_NEVER = object()
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(slots=True)
class _Group:
    """One param group as last seen; `parts` is the JSON of each field, None where it is to be written."""

    size: int
    keys: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    types: list[type] = field(default_factory=list)
    parts: list[str | None] = field(default_factory=list)

    def take(self, values: list[Any]) -> None:
        for j, (old, new) in enumerate(zip(self.values, values, strict=True)):
            if type(old) is not type(new) or old != new:  # a tensor may equal a number
                self.parts[j] = None
        self.types = [*map(type, values)]
        # Lists are copied: one that is changed in place must not compare equal to itself.
        self.values = [list(value) if type(value) is list else value for value in values]

    def text(self, number: int) -> str:
        for j, part in enumerate(self.parts):
            if part is None:
                key = self.keys[j]
                encoded = encode_value(self.values[j], f"param group {number}.{key}")
                self.parts[j] = f"{_json(key)}:{_json(encoded)}"
        return f"{{{','.join([part or '' for part in self.parts])}}}"


def _state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state; buffers may change in every forward pass."""
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("buffer/")}
