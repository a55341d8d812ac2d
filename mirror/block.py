"""The unit of capture: a block of frames, and what every source of blocks can do.

A block is one base buffer plus arrays that say where each frame lies in it. The decoding kernels know nothing
else, so a source may be a kernel ring, a mapped file or a helper's shared memory without touching them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Loss(NamedTuple):
    """A source lost frames: cause "ring" or "nic" (`mirror.loss`), after `start` and before `end`, ns as in `ts`."""

    cause: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Block:
    """One batch of `n` frames, in order of arrival, all of one link type and one vantage group.

    The arrays may be views of memory that the source reuses: they and the frames are valid until
    `Source.release` is called with this block.
    """

    base: np.ndarray
    """uint8, one-dimensional: the memory that holds the frames (a ring block, the mapping of a file)."""
    offset: np.ndarray
    """int64[n]: offset in `base` of the first byte of each frame's link-layer header."""
    caplen: np.ndarray
    """int64[n]: bytes of the frame present in `base`; offset + caplen never exceeds base.size."""
    wirelen: np.ndarray
    """int64[n]: bytes of the frame on the wire; a VLAN tag that the kernel moved out counts."""
    ts: np.ndarray
    """int64[n]: time of capture, nanoseconds since the epoch."""
    vlan: np.ndarray
    """int64[n]: `tpid << 16 | tci` of a VLAN tag that the kernel moved out of the frame, else -1."""
    vantage: int = 0
    """Vantage group: flows seen from different groups never mix."""
    linktype: int = 1
    """pcap LINKTYPE: 1 Ethernet, 0 null/loopback, 101 raw IP, 113 SLL, 276 SLL2."""
    losses: tuple[Loss, ...] = ()
    """What the source became aware of since the block before: when it lost frames."""

    def __len__(self) -> int:
        return len(self.offset)


def pack(frames: Sequence[bytes], ts: int | Sequence[int]) -> Block:
    """Frames that come from no source, one behind the other in memory of their own; ts: of each or of all, ns."""
    size = np.array([len(frame) for frame in frames], np.int64)
    base = np.frombuffer(bytearray(b"".join(frames)) or bytearray(1), np.uint8)
    times = np.full(len(frames), ts, np.int64)
    return Block(base, np.cumsum(size) - size, size, size, times, np.full(len(frames), -1, np.int64))


@dataclass(frozen=True, slots=True)
class SourceCounters:
    """What a source has seen since it was opened; cumulative, never reset.

    `packets` and `bytes` (wire lengths) count frames handed out in blocks, `drops` the frames that the
    kernel says it could not store in the ring, `freezes` how often the ring was full. `interface_drops`
    counts what the interface itself reports as dropped or missed since the source was opened: frames lost
    there appear in no other figure, and frames lost inside a switch appear in none at all.
    """

    packets: int = 0
    bytes: int = 0
    drops: int = 0
    freezes: int = 0
    interface_drops: int = 0


class Source(Protocol):
    """Where blocks come from. One thread at a time; blocks are released in any order."""

    name: str

    @property
    def problems(self) -> Sequence[str]:
        """One line per thing that went wrong with the interface or a file, newest last; old ones may be dropped."""

    def read(self, timeout: float) -> Block | None:
        """The next block; None when none came within `timeout` seconds, or ever will (`finished`)."""

    def release(self, block: Block) -> None:
        """Give the block's memory back; the block must not be used afterwards."""

    @property
    def finished(self) -> bool:
        """Whether no block will ever come again."""

    def counters(self) -> SourceCounters:
        """Cumulative counters."""

    def close(self) -> None:
        """Free everything; blocks still held become invalid. Calling it again does nothing."""
