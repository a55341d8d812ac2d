"""Recorded pcap and pcapng files as a source, several of them merged by time into one stream of blocks.

All files have their places side by side in one range of addresses, so that frames of different files can lie in one
block and interleaving them costs no Python per frame. Only a bounded part of each is read ahead, and memory that no
block needs any more is given back, so a file may be far larger than memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowcheck.errors import FlowcheckError, UsageError
from mirror import capindex
from mirror.block import Block, SourceCounters
from mirror.capread import CaptureFile

_BLOCK_FRAMES = 8192
_BLOCK_BYTES = 8 << 20
# Read and indexed ahead, over all files.
_LOOKAHEAD_FRAMES = 65536
_LOOKAHEAD_BYTES = 32 << 20
_MOST_BYTES = 2 << 20
_LEAST_BYTES = 64 << 10
_MOST_FILES = 4096
# Memory is taken in large pages, which costs a tenth of the time, where few files leave few of them half used.
_LARGE_PAGE = 2 << 20
_FEW_FILES = 16
_MAP_NORESERVE = 0x4000


class CaptureFileSource:
    """The frames of pcap and pcapng files (any byte order and time precision), merged by their timestamps.

    `vantage` is the vantage group of all files or one per file. Frames of different groups or link types
    come in different blocks. Frames of one file keep their order even where its times run backwards. Blocks
    need not be released before the next read, but memory is given back only up to the oldest one that is not.

    A file that turns out to be damaged, ends inside a record or cannot be read any further (a disk that fails) is
    used up to there; `problems` then has one line that names the file and the byte. Raises FlowcheckError for a file
    that cannot be opened or is no capture file (compressed ones are named as such), UsageError when there is no file.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, vantage: int | Sequence[int] = 0) -> None:
        if not 0 < len(paths) <= _MOST_FILES:
            raise UsageError(f"{len(paths)} capture files: give 1 to {_MOST_FILES}")
        groups = [vantage] * len(paths) if isinstance(vantage, int) else list(vantage)
        if len(groups) != len(paths):
            raise UsageError(
                f"{len(groups)} vantage groups for {len(paths)} capture files: give one for each"
            )
        self.name = ", ".join(os.fspath(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
        self.problems: list[str] = []
        self._packets = 0
        self._bytes = 0
        self._closed = False
        self._memory, self._base, self._files = _open([Path(path) for path in paths])
        k = len(self._files)
        self._vantage = np.array(groups, np.int64)
        self._tables = np.empty((k, 5, min(_BLOCK_FRAMES, max(256, _LOOKAHEAD_FRAMES // k))), np.int64)
        self._most_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, _LOOKAHEAD_BYTES // k))
        self._start = np.zeros(k, np.int64)
        self._count = np.zeros(k, np.int64)
        self._ended = np.zeros(k, np.bool_)
        self._position = np.array(self.starts, np.int64)  # up to where each file is indexed
        self._kept = self._position.copy()  # from where on its memory is held
        self._lent: dict[Block, np.ndarray] = {}  # blocks in use, oldest first -> what each file must keep for them
        # No file holds a tag that was moved out of its frame.
        self._no_vlan = np.full(_BLOCK_FRAMES, -1, np.int64)

    def read(self, timeout: float = 0.0) -> Block | None:
        """The next block; None only at the end. Never waits for frames, whatever `timeout` is."""
        while not self.finished:
            self._refill()
            reached = self._reached()
            self._give_back(next(iter(self._lent.values()), reached))
            out = np.empty((4, _BLOCK_FRAMES), np.int64)
            frames, total, linktype, group = capindex.merge(
                self._tables, self._start, self._count, self._ended, self._vantage, _BLOCK_BYTES, out
            )
            if frames:
                self._packets += frames
                self._bytes += total
                offset, caplen, wirelen, ts = out[:, :frames]
                block = Block(self._base, offset, caplen, wirelen, ts, self._no_vlan[:frames], group, linktype)
                self._lent[block] = reached
                return block
        return None

    def _refill(self) -> None:
        for f, file in enumerate(self._files):
            if self._start[f] < self._count[f] or self._ended[f]:
                continue
            self._start[f] = 0
            self._count[f] = file.index(self._tables[f], self._most_bytes)
            self._position[f] = file.position
            self._ended[f] = file.ended
            if file.problem:
                self.problems.append(f"{file.path}: {file.problem}: stopped after {file.frames} frames")

    def _reached(self) -> np.ndarray:
        """int64[k]: where in `base` what is still to come of each file begins."""
        pending = self._start < self._count
        first = self._tables[np.arange(len(self._files)), 0, np.where(pending, self._start, 0)]
        return np.where(pending, first, self._position)

    def _give_back(self, needed: np.ndarray) -> None:
        """Free the memory of what lies before `needed` int64[k], in portions."""
        portion = max(self._most_bytes, _LARGE_PAGE if len(self._files) <= _FEW_FILES else 0)
        passed = needed // mmap.PAGESIZE * mmap.PAGESIZE
        for f in np.flatnonzero(passed - self._kept >= portion).tolist():
            self._memory.madvise(mmap.MADV_DONTNEED, int(self._kept[f]), int(passed[f] - self._kept[f]))
            self._kept[f] = passed[f]

    @property
    def starts(self) -> list[int]:
        """Where the bytes of each file begin in `Block.base`, in the order in which the files were given."""
        return [file.start for file in self._files]

    def release(self, block: Block) -> None:
        self._lent.pop(block, None)

    @property
    def finished(self) -> bool:
        return self._closed or bool((self._ended & (self._start >= self._count)).all())

    def counters(self) -> SourceCounters:
        return SourceCounters(self._packets, self._bytes)

    def close(self) -> None:
        """Drop the files. The memory goes when the last block that is still referenced goes."""
        self._closed = True
        for file in self._files:
            file.close()
        self._files = []
        self._lent.clear()
        if hasattr(self, "_memory"):
            del self._memory, self._base


def _open(paths: list[Path]) -> tuple[mmap.mmap, np.ndarray, list[CaptureFile]]:
    """Memory with a place for every file, each from a page boundary on. Raises FlowcheckError naming the file."""
    with contextlib.ExitStack() as opened:
        found: list[tuple[Path, int, int]] = []
        for path in paths:
            try:
                # Non-blocking, so that a named pipe is refused below and not waited for here.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                opened.callback(os.close, descriptor)
                status = os.fstat(descriptor)
            except OSError as error:
                raise FlowcheckError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from None
            if not stat.S_ISREG(status.st_mode):
                raise FlowcheckError(f"{path} is not a regular file: give a pcap or pcapng file")
            if status.st_size == 0:
                raise FlowcheckError(f"{path} is empty: give a pcap or pcapng file")
            found.append((path, descriptor, status.st_size))
        # Writable also because kernels are compiled for writable arrays, like a ring's. Only what is read takes memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        room = sum(_round_up(size) for _, _, size in found)
        try:
            memory = mmap.mmap(-1, room, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise FlowcheckError(f"no room for files of {room >> 20} MiB: {os.strerror(error.errno or 0)}") from None
        if len(paths) <= _FEW_FILES:
            with contextlib.suppress(OSError):  # a kernel without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        base = np.frombuffer(memory, np.uint8)
        files = []
        start = 0
        for path, descriptor, size in found:
            files.append(CaptureFile(path, descriptor, base, start, size))
            start += _round_up(size)
        opened.pop_all()
        return memory, base, files


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
