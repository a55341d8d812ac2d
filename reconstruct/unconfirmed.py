"""Steps that were claimed without their marker, until it comes after all or is too old to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconstruct.markers import Marker

MAX_GUESSES = 4096
"""More than the markers that a trainer keeps for a daemon out of reach."""

Fields = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """What a step was claimed with: the tags of its first and last bucket, the fields of its param groups."""

    first: int
    last: int
    groups: Fields


class Guesses:
    """The unconfirmed steps. `doubtful`: the first of those since the last step that a marker has proven."""

    def __init__(self) -> None:
        self.doubtful: int | None = None
        self._held: dict[int, Guess] = {}

    def add(self, step: int, guess: Guess) -> None:
        """`step` was claimed without its marker."""
        self._held[step] = guess
        if self.doubtful is None:
            self.doubtful = step
        if len(self._held) > MAX_GUESSES:
            del self._held[next(iter(self._held))]

    def proven(self) -> None:
        """A marker agreed with what was claimed up to here."""
        self.doubtful = None

    def confirm(self, marker: Marker, end: int, more: bool, groups: Fields, version: int) -> str | None:
        """What the marker of a claimed step says of it: "" it agrees, a text what contradicts, None nothing.

        end: its window's end in tags; more: reductions that no step has claimed lie before it; groups, version: the
        fields in force by the last marker before, and their version.
        """
        guess = self._held.get(marker.step)
        if guess is None:
            return None
        if marker.problem is not None:
            return f"says: {marker.problem}"
        following = self._held.get(marker.step + 1)
        if end <= guess.last or more or (following is not None and following.first < end):
            return "contradicts which all-reduces were its gradient"
        if marker.groups is not None:
            if [dict(group) for group in marker.groups] != [dict(group) for group in guess.groups]:
                return "contradicts its hyper-parameters"
        elif marker.version != version:
            return None  # its fields went with another marker that was lost: it proves nothing
        elif [dict(group) for group in groups] != [dict(group) for group in guess.groups]:
            return "contradicts its hyper-parameters"
        del self._held[marker.step]
        if self.doubtful == marker.step:
            self.doubtful = min((step for step in self._held if step > marker.step), default=None)
        return ""
