"""Several mirrors of the same traffic, each with faults of its own, as a daemon reads them: one after the other, or
merged by time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mirror.block import Block, Source, SourceCounters, pack
from mirror.faults import Faults
from mirror.faulty import FaultSource
from reconstruct.landing import Landing

Frame = tuple[int, bytes]
"""Capture time in ns, bytes."""


@dataclass
class MemorySource:
    """Frames in memory as a source, in blocks of `size`; knows which of its blocks were not given back."""

    frames: list[Frame]
    size: int = 64
    live: bool = False
    name: str = "mon0"
    problems: Sequence[str] = ()
    held: set[Block] = field(default_factory=set)
    _at: int = 0

    def read(self, timeout: float) -> Block | None:
        some = self.frames[self._at : self._at + self.size]
        if not some:
            return None
        self._at += len(some)
        self.held.add(block := pack([data for _, data in some], [ts for ts, _ in some]))
        return block

    def release(self, block: Block) -> None:
        self.held.remove(block)

    @property
    def finished(self) -> bool:
        return self._at >= len(self.frames) and not self.live

    def counters(self) -> SourceCounters:
        return SourceCounters(drops=5)

    def close(self) -> None:
        pass


def read(source: Source) -> list[Frame]:
    """Everything that a source gives; checks that its frames lie inside their blocks."""
    out: list[Frame] = []
    while not source.finished:
        block = source.read(0)
        if block is None:
            continue
        assert (block.offset >= 0).all()
        assert (block.offset + block.caplen <= block.base.size).all()
        assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in (block.offset, block.ts))
        out += [
            (int(ts), block.base[at : at + size].tobytes())
            for at, size, ts in zip(block.offset, block.caplen, block.ts, strict=True)
        ]
        source.release(block)
    return out


def injured(frames: list[Frame], spec: str, name: str) -> list[Frame]:
    """What comes out of a mirror called `name` with these faults."""
    return read(FaultSource(MemorySource(frames), {name: (0, Faults.parse(spec))}))


def surviving(frames: list[Frame], specs: Sequence[str]) -> list[Frame]:
    """The frames that not all of the mirrors "0", "1", ... with these faults have lost."""
    numbers = np.arange(len(frames))
    gone = np.ones(len(frames), bool)
    for number, spec in enumerate(specs):
        gone &= Faults.parse(spec).lost(str(number), numbers)
    return [frame for frame, lost in zip(frames, gone, strict=True) if not lost]


def read_in_turn(mirrors: Sequence[list[Frame]], window: int) -> Iterator[list[Frame]]:
    """Blocks of frames: what each mirror has in a window of time (ns), one after the other; 0: mixed by time."""
    if not window:
        mixed = sorted((frame for frames in mirrors for frame in frames), key=lambda frame: frame[0])
        for at in range(0, len(mixed), 64):
            yield mixed[at : at + 64]
        return
    at = [0] * len(mirrors)
    until = min(frames[0][0] for frames in mirrors if frames)
    while any(begin < len(frames) for begin, frames in zip(at, mirrors, strict=True)):
        until += window
        for number, frames in enumerate(mirrors):
            begin = end = at[number]
            while end < len(frames) and frames[end][0] < until:
                end += 1
            if end > begin:
                at[number] = end
                yield frames[begin:end]


def known(landing: Landing | None, size: int) -> np.ndarray:
    """bool[size]: which bytes of an all-reduce count as known."""
    mask = np.zeros(size, bool)
    if landing is None or (landing.poisoned and landing.disputed is None):
        return mask
    for start, end in landing.ranges():
        mask[start:end] = True
    if landing.poisoned:
        disputed = landing.disputed
        assert disputed is not None
        for offset, length in disputed.tolist():
            mask[offset : offset + length] = False
    return mask
