"""The fields of the param groups in force: from the markers that carry them, else by proof that they did not change, or
by prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowcheck.description import JobDescription
from reconstruct.lr import MAX_ANSWERS, Predictor
from reconstruct.markers import Marker

__all__ = ["Fields", "HyperParameters"]

_MISSING = "its marker is missing and its hyper-parameters cannot be known without it"
Fields = tuple[Mapping[str, Any], ...]


class HyperParameters:
    """`groups`: every field of every param group by the newest marker that was taken; `version`: its version."""

    def __init__(self, description: JobDescription, predictor: Predictor) -> None:
        self.groups: Fields = tuple(group.fields for group in description.optimizer.groups)
        self.version = 0
        self._predictor = predictor
        self._heard = self._told = 0  # newest version of all markers, and of those that carry fields

    def hear(self, marker: Marker) -> None:
        """A marker has come."""
        self._heard = max(self._heard, marker.version)
        if marker.groups is not None:
            self._told = max(self._told, marker.version)

    @property
    def needed(self) -> bool:
        """Whether fields have changed and no marker that carries them has come since."""
        return self._heard > self._told

    def of(self, marker: Marker) -> Fields | None:
        """In force in the marker's step; None: they changed, and what they are went with another marker."""
        if marker.groups is None and marker.version != self.version:
            return None
        return self.groups if marker.groups is None else marker.groups

    def take(self, marker: Marker) -> None:
        """The steps up to the marker's are done with."""
        if marker.groups is not None and marker.version >= self.version:
            self.groups, self.version = marker.groups, marker.version

    def unchanged(self, later: Marker | None) -> bool:
        """Whether those by the newest marker are in force up to the step of this one."""
        return later is not None and later.version == self.version

    def unmarked(self, step: int, later: Marker | None) -> Fields | None:
        """In force in a step whose marker did not come; None: nobody knows. later: the first one that did after it."""
        if self.unchanged(later):
            return self.groups
        predicted = self._predictor.fields(step)
        if predicted is None or (later is not None and not self._agrees(step, later)):
            return None
        return tuple(predicted)

    @property
    def missing(self) -> str:
        """Why `unmarked` does not know them."""
        return f"{_MISSING} ({self._predictor.refused})" if self._predictor.refused else _MISSING

    def _agrees(self, step: int, later: Marker) -> bool:
        """Whether a marker shows what is predicted for its step; up to there the predictor has to be asked in order."""
        if later.groups is None or later.step - step >= MAX_ANSWERS:
            return False
        for number in range(step + 1, later.step):
            self._predictor.fields(number)
        return self.agree(later.step, later.groups)

    def agree(self, step: int, groups: Fields) -> bool:
        """Whether the fields in force in a step are those predicted; if not nothing is predicted any more."""
        return self._predictor.observe(step, [dict(group) for group in groups])
