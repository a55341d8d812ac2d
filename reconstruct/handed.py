"""Steps that were handed out and are not applied yet: their landings are being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from reconstruct.decoder import Conflict
from reconstruct.ranges import NOTHING, Ranges

__all__ = ["HandedOut"]


@dataclass(frozen=True, slots=True)
class _Step:
    """Its collectives have tags in [first, behind); unknown: by tag, bytes that were handed out as lost."""

    step: int
    first: int
    behind: int
    unknown: Mapping[int, Ranges]


class HandedOut:
    """In their order."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, tags: tuple[int, int], unknown: Mapping[int, Ranges]) -> None:
        """A step with collectives from tags[0] up to tags[1]."""
        self._steps.append(_Step(step, *tags, unknown))

    def holds(self, tag: int) -> bool:
        """Whether a collective is of one of these steps."""
        return any(one.first <= tag < one.behind for one in self._steps)

    def contradicted(self, event: Conflict) -> int | None:
        """The step of which a copy that differs shows that what was handed out may be wrong."""
        for one in self._steps:
            if one.first <= event.tag < one.behind:
                differs = Ranges.of([(event.offset, event.offset + event.length)])
                return one.step if not differs or differs - one.unknown.get(event.tag, NOTHING) else None
        return None

    def applied(self, step: int) -> int | None:
        """The steps up to this one are applied; the tag behind them, if there were any."""
        behind = None
        while self._steps and self._steps[0].step <= step:
            behind = self._steps.popleft().behind
        return behind
