"""What the reading of a step's window comes to: its gradient is these all-reduces, or nothing tells. None: wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reconstruct.buckets import Layout
from reconstruct.counts import Window

__all__ = ["Blank", "Take", "Verdict"]


@dataclass(frozen=True, slots=True)
class Take:
    """tags[b] carries bucket b of `layout`, whatever of it is missing. end: the tag behind the step's window; until:
    what is first seen after this (ns) belongs to a later step; several: there was more than one reduction; window,
    later: what was counted, see `reconstruct.counts`, if there is a marker."""

    layout: Layout
    tags: tuple[int, ...]
    end: int
    until: int
    several: bool = False
    window: Window | None = None
    later: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Blank:
    """Nothing tells which all-reduces are the step's, and nothing that may still come will. The rest as in `Take`."""

    reason: str
    end: int
    until: int
    several: bool = False


Verdict = Take | Blank | None
