"""Step markers: what the trainer's rank 0 says right after each optimizer step.

A marker names the step, the c10d sequence number of DDP's process group at that moment (the tag that its next
collective will take), the hyper-parameters when they changed, and a few canaries: single elements of a gradient and
of the parameter after the step, as raw bits. The wire is the source of every value; a marker only bounds which
collectives can belong to the step and lets the canaries contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowcheck.values import DescriptionError, Reader, decode_value

MAX_CANARIES = 64
MAX_GROUPS = 1 << 14
MAX_STEP = 1 << 62


@dataclass(frozen=True, slots=True)
class Canary:
    """One element: `parameter` indexes `JobDescription.parameters`, `element` counts in memory order.

    gradient, value: the element's bytes in memory, or None where the trainer did not read it.
    """

    parameter: int
    element: int
    gradient: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Marker:
    """`step` optimizer steps are done and `sequence` is the group's next collective.

    version: counts the changes of hyper-parameters since attach; groups: every field of every param group when this
    marker carries them (always when `version` grew); problem: why the trainer itself says that it cannot be followed.
    rebuilt: whether DDP had rebuilt its buckets by then, None if the marker does not say.
    """

    step: int
    sequence: int
    version: int
    groups: tuple[Mapping[str, Any], ...] | None
    canaries: tuple[Canary, ...]
    problem: str | None
    rebuilt: bool | None = None


def _bits(data: Any, path: str) -> bytes | None:
    if data is None:
        return None
    try:
        if isinstance(data, str) and len(data) <= 32:
            return bytes.fromhex(data)
    except ValueError:
        pass
    raise DescriptionError(f"{path}: not the hexadecimal bytes of one element")


def _canary(data: Any, path: str) -> Canary:
    if not isinstance(data, list) or len(data) != 4:
        raise DescriptionError(f"{path}: not [parameter, element, gradient, value]")
    parameter, element, gradient, value = data
    for number in (parameter, element):
        if type(number) is not int or not 0 <= number < MAX_STEP:
            raise DescriptionError(f"{path}: {str(number)[:40]!r} is not an index")
    return Canary(parameter, element, _bits(gradient, path), _bits(value, path))


def _group(data: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(data, dict) or len(data) > 256:
        raise DescriptionError(f"{path}: not the fields of a param group")
    return {str(name): decode_value(value) for name, value in data.items()}


def parse_marker(data: Any) -> Marker:
    """A marker from its JSON form. Raises DescriptionError naming the field that does not fit."""
    reader = Reader(data, "marker")
    groups = None
    if reader.raw("groups") is not None:
        groups = tuple(reader.sequence("groups", MAX_GROUPS, _group))
    problem = None if reader.raw("problem") is None else reader.text("problem", 1024)
    rebuilt = reader.boolean("rebuilt") if "rebuilt" in reader.data else None
    marker = Marker(
        reader.integer("step", 0, MAX_STEP),
        reader.integer("sequence", 0, MAX_STEP),
        reader.integer("version", 0, MAX_STEP),
        groups,
        tuple(reader.sequence("canaries", MAX_CANARIES, _canary)),
        problem,
        rebuilt,
    )
    reader.done()
    return marker
