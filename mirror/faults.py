"""What can be made to happen to captured frames, for rehearsals: which frame of a stream meets which fault.

A stream is what one interface or file gives. Whether a fault hits is a function of seed, stream and the frame's number
in the stream alone: the same recording meets the same faults however it is cut into blocks, and two mirrors of the same
traffic meet different ones. `mirror.faulty` does to the frames what is decided here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from flowcheck.errors import UsageError

__all__ = ["KINDS", "Faults", "faults_of"]

KINDS = ("drop", "burst", "duplicate", "reorder", "truncate", "corrupt", "delay")
_MOST_FRAMES = 1 << 20
_MOST_MS = 60_000


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one stream; a rate is the share of its frames, 0 to 1, and rates are independent of each other.

    A lost frame meets no other fault. Frames are moved in terms of their numbers, or of capture time for a delay.
    """

    drop: float = 0.0
    """Frames lost one by one."""
    burst: float = 0.0
    """Frames with which a loss of `burst_frames` in a row begins."""
    burst_frames: int = 1
    duplicate: float = 0.0
    """Frames that come twice; the copy in place and untouched, whatever else happens to the first."""
    reorder: float = 0.0
    """Runs of `reorder_run` frames that come behind the frames up to `reorder_distance` later."""
    reorder_distance: int = 1
    reorder_run: int = 1
    truncate: float = 0.0
    """Frames cut to `truncate_bytes`, as a switch cuts its copies: their wire length does not show it."""
    truncate_bytes: int = 1
    corrupt: float = 0.0
    """Frames with one bit flipped behind their headers."""
    delay: float = 0.0
    """Frames that come `delay_ms` later."""
    delay_ms: int = 1
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read `drop=0.001,burst=0.0001:20,seed=7`. Raises UsageError naming the field."""
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in _FIELDS:
                raise UsageError(f"fault {part.strip()!r}: give one of {', '.join(f.form for f in _FIELDS.values())}")
            field = _FIELDS[name]
            if name in values:
                raise UsageError(f"fault {name}: given twice")
            pieces = value.split(":")
            if not field.least <= len(pieces) <= len(field.parts):
                raise UsageError(f"fault {name}={value}: write {field.form}")
            for (key, read), piece in zip(field.parts, pieces, strict=False):
                try:
                    values[key] = read(piece)
                except ValueError as error:
                    raise UsageError(f"fault {name}={value}: {error} (write {field.form})") from None
        return cls(**values)

    def __str__(self) -> str:
        """As it would be written; only what is not the default."""
        told = []
        for name, field in _FIELDS.items():
            if getattr(self, name) != 0:
                told.append(f"{name}={':'.join(str(getattr(self, key)) for key, _ in field.parts)}")
        return ",".join(told)

    def chance(self, kind: str, stream: str, numbers: np.ndarray) -> np.ndarray:
        """float64[n], uniform in [0, 1): what is drawn for frames `numbers` int64[n] of a stream."""
        key = hashlib.blake2b(f"{self.seed} {kind} {stream}".encode(), digest_size=8).digest()
        # splitmix64: a permutation of 64-bit numbers that looks random, so any number's draw is known at once
        z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "little"))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        chance: np.ndarray = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
        return chance

    def hits(self, kind: str, stream: str, numbers: np.ndarray) -> np.ndarray:
        """bool[n]: which of frames `numbers` (int64[n], consecutive) a fault hits; of a burst, all that it takes."""
        rate = getattr(self, kind)
        if rate == 0 or numbers.size == 0:
            return np.zeros(numbers.size, np.bool_)
        if kind == "burst":
            first = max(0, int(numbers[0]) - self.burst_frames + 1)
            seen = np.arange(first, int(numbers[-1]) + 1, dtype=np.int64)
            begun = np.where(self.chance(kind, stream, seen) < rate, seen, -self.burst_frames)
            return (seen - np.maximum.accumulate(begun) < self.burst_frames)[-numbers.size :]
        return self.chance(kind, stream, numbers // self.reorder_run if kind == "reorder" else numbers) < rate

    def lost(self, stream: str, numbers: np.ndarray) -> np.ndarray:
        """bool[n]: which of the frames `numbers` (int64[n], consecutive) never come."""
        return self.hits("drop", stream, numbers) | self.hits("burst", stream, numbers)


def faults_of(texts: Sequence[str], streams: Sequence[str]) -> dict[str, Faults]:
    """The faults of each stream out of `SPEC` (for all of them) and `NAME:SPEC`, which wins. Raises UsageError."""
    found: dict[str, Faults] = {}
    for text in sorted(texts, key=lambda text: _named(text, streams) is not None):
        name = _named(text, streams)
        if name is None and "=" not in text.partition(":")[0]:
            known = ", ".join(streams)
            raise UsageError(f"--fault {text}: give SPEC or NAME:SPEC, captured here: {known}; SPEC: drop=0.001,seed=7")
        faults = Faults.parse(text if name is None else text[len(name) + 1 :])
        found.update({name: faults} if name is not None else dict.fromkeys(streams, faults))
    return found


def _named(text: str, streams: Sequence[str]) -> str | None:
    return max((name for name in streams if text.startswith(f"{name}:")), key=len, default=None)


def _rate(text: str) -> float:
    value = float(text) if text.isascii() else math.nan
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is no rate from 0 to 1")
    return value


def _whole(least: int, most: int, what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise ValueError(f"{text or 'nothing'} is no number of {what} from {least} to {most}")
        return int(text)

    return read


@dataclass(frozen=True, slots=True)
class _Field:
    form: str
    parts: tuple[tuple[str, Callable[[str], Any]], ...]
    least: int


_FRAMES = _whole(1, _MOST_FRAMES, "frames")
_FIELDS: Mapping[str, _Field] = {
    "drop": _Field("drop=RATE", (("drop", _rate),), 1),
    "burst": _Field("burst=RATE:FRAMES", (("burst", _rate), ("burst_frames", _FRAMES)), 2),
    "duplicate": _Field("duplicate=RATE", (("duplicate", _rate),), 1),
    "reorder": _Field("reorder=RATE:DISTANCE[:RUN]",
                      (("reorder", _rate), ("reorder_distance", _FRAMES), ("reorder_run", _FRAMES)), 2),
    "truncate": _Field("truncate=RATE:BYTES",
                       (("truncate", _rate), ("truncate_bytes", _whole(1, 1 << 16, "bytes"))), 2),
    "corrupt": _Field("corrupt=RATE", (("corrupt", _rate),), 1),
    "delay": _Field("delay=RATE:MS", (("delay", _rate), ("delay_ms", _whole(1, _MOST_MS, "ms"))), 2),
    "seed": _Field("seed=N", (("seed", _whole(0, (1 << 63) - 1, "the seed")),), 1),
}  # fmt: skip
assert {key for field in _FIELDS.values() for key, _ in field.parts} == {field.name for field in fields(Faults)}
