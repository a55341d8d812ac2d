"""Steps that were claimed without their marker, until it comes after all or is too old to come."""

from __future__ import annotations

from dataclasses import dataclass

from reconstruct.hyper import Fields
from reconstruct.markers import Marker

MAX_GUESSES = 4096
"""More than the markers that a trainer keeps for a daemon out of reach."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What a step was claimed with: the tags of its first and last bucket, the fields of its param groups, which were
    predicted or are proven."""

    first: int
    last: int
    groups: Fields
    predicted: bool


class Guesses:
    """The unconfirmed steps. `doubtful`: the first one with predicted fields since a marker has proven any."""

    def __init__(self) -> None:
        self.doubtful: int | None = None
        self._held: dict[int, Guess] = {}

    def add(self, step: int, guess: Guess) -> None:
        """`step` was claimed without its marker."""
        self._held[step] = guess
        if self.doubtful is None and guess.predicted:
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
            after = (step for step, guess in self._held.items() if step > marker.step and guess.predicted)
            self.doubtful = min(after, default=None)
        return ""
