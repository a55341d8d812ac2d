"""Recorded pcap and pcapng files as a source, several of them merged by time into one stream of blocks.

All files are mapped side by side into one range of addresses, so that frames of different files can lie in
one block and interleaving them costs no Python per frame. Only a bounded number of frames is indexed ahead,
and pages that were passed are given back, so a file may be far larger than memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowcheck.errors import FlowcheckError, UsageError
from mirror import capindex
from mirror.block import Block, SourceCounters

# pcap magic as the first four bytes -> (big-endian, nanoseconds per unit of the fraction)
_PCAP = {
    b"\xd4\xc3\xb2\xa1": (False, 1000),
    b"\xa1\xb2\xc3\xd4": (True, 1000),
    b"\x4d\x3c\xb2\xa1": (False, 1),
    b"\xa1\xb2\x3c\x4d": (True, 1),
}
_PCAPNG = b"\x0a\x0d\x0d\x0a"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
}
# Numbers that stand for bare IP packets (BSD's raw, IPv4 only, IPv6 only), and OpenBSD's loopback.
_SAME_LINKTYPE = {12: 101, 14: 101, 228: 101, 229: 101, 108: 0}

_BLOCK_FRAMES = 8192
_BLOCK_BYTES = 8 << 20
# Indexed ahead, over all files: frames, and bytes (indexing touches pages of all of them).
_LOOKAHEAD_FRAMES = 65536
_LOOKAHEAD_BYTES = 32 << 20
_MOST_FILES = 4096
_MOST_INTERFACES = 1 << 16
# Pages are given back in such portions, and as much behind the newest block is left for those in use.
_PORTION = 16 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
# Private and writable, though nothing writes: kernels are compiled for writable arrays, like a ring's.
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class _File:
    """One capture file at its place in the mapping, and how far it is indexed."""

    def __init__(self, path: Path, base: np.ndarray, start: int, size: int) -> None:
        self.path = path
        self.start = start
        self.end = start + size
        self.position = start
        self.kept_from = start
        self.frames = 0
        self.ended = False
        self.problem = ""
        self._base = base
        self._identity = _identity(path)
        self._big = False
        self._time = 0
        self._unit = 0
        self._linktype = 0
        self._interfaces = np.empty((4, 6), np.int64)
        self._known = 0
        magic = base[start : start + 4].tobytes()
        for prefix, name in _COMPRESSED.items():
            if base[start : start + len(prefix)].tobytes() == prefix:
                raise FlowcheckError(f"{path} is compressed with {name}: decompress it first")
        if magic in _PCAP:
            self._big, self._unit = _PCAP[magic]
            if size < 24:
                raise FlowcheckError(f"{path} is cut short: it ends inside its own header, record it again")
            if (major := self._number(start + 4, 2)) != 2:
                raise FlowcheckError(f"{path} is a pcap file of version {major}: convert it to version 2")
            self._linktype = _linktype(self._number(start + 20, 4))
            self.position = start + 24
        elif magic != _PCAPNG:
            raise FlowcheckError(f"{path} is no capture file: give a pcap or pcapng file")

    def _number(self, at: int, size: int, *, signed: bool = False) -> int:
        order = "big" if self._big else "little"
        return int.from_bytes(self._base[at : at + size].tobytes(), order, signed=signed)  # type: ignore[arg-type]

    def index(self, table: np.ndarray, most_bytes: int) -> int:
        """Fill `table` int64[5, n] with the next frames, up to about `most_bytes` of the file.

        Returns how many; 0 only at the end.
        """
        device, inode, size = _identity(self.path)
        if (device, inode) == self._identity[:2] and size < self.end - self.start:
            # Reading the lost pages would end the process (SIGBUS).
            self._stop("became shorter while it was read")
            return 0
        if self._unit:
            limit = self.position + most_bytes
            count, self.position, why = capindex.index_pcap(
                self._base, self.position, limit, self.end, self._big, self._unit, self._linktype, table
            )
        else:
            count, why = self._index_pcapng(table, most_bytes)
        self.frames += count
        if why == capindex.END:
            self.ended = True
        elif why in capindex.REASONS:
            self._stop(f"the record at byte {self.position - self.start} {capindex.REASONS[why]}")
        return count

    def _index_pcapng(self, table: np.ndarray, most_bytes: int) -> tuple[int, int]:
        count = 0
        while not self.ended:
            count, self.position, why, self._time = capindex.index_pcapng(
                self._base,
                self.position,
                self.position + most_bytes,
                self.end,
                self._big,
                self._interfaces[: self._known],
                self._time,
                count,
                table,
            )
            if why == capindex.SECTION:
                self._section()
            elif why == capindex.INTERFACE:
                self._interface()
            elif count or why != capindex.FULL:
                return count, why
        return count, capindex.FULL

    def _section(self) -> None:
        """Read a section header block: byte order and version; interfaces count from 0 again."""
        at = self.position
        if self.end - at < 28:
            return self._stop(f"the section header at byte {at - self.start} runs past the end of the file")
        order = self._base[at + 8 : at + 12].tobytes()
        if order not in (b"\x1a\x2b\x3c\x4d", b"\x4d\x3c\x2b\x1a"):
            return self._stop(f"the section header at byte {at - self.start} has no byte order mark")
        self._big = order[0] == 0x1A
        total, major = self._number(at + 4, 4), self._number(at + 12, 2)
        if total < 28 or total % 4 or total > self.end - at or self._number(at + total - 4, 4) != total:
            return self._stop(f"the section header at byte {at - self.start} has an impossible length")
        if major != 1:
            return self._stop(f"the section at byte {at - self.start} is of version {major}, only 1 is known")
        self._known = 0
        self.position = at + total

    def _interface(self) -> None:
        """Read an interface description block; its length was checked by the kernel."""
        at = self.position
        total = self._number(at + 4, 4)
        place = f"the interface description at byte {at - self.start}"
        if total < 20:
            return self._stop(f"{place} has an impossible length")
        if self._known == _MOST_INTERFACES:
            return self._stop(f"{place} is one of more than {_MOST_INTERFACES}")
        resolution, offset = 6, 0
        option, end = at + 16, at + total - 4
        while end - option >= 4:
            code, length = self._number(option, 2), self._number(option + 2, 2)
            value = option + 4
            if code == 0:
                break
            if length > end - value:
                return self._stop(f"{place} has an option longer than itself")
            if code == 9 and length == 1:
                resolution = self._number(value, 1)
            elif code == 14 and length == 8:
                offset = self._number(value, 8, signed=True) * 1_000_000_000
            option = value + (length + 3) // 4 * 4
        digits = resolution & 0x7F
        binary = resolution >= 0x80
        if digits > (62 if binary else 18) or abs(offset) > capindex.MAX_TIME:
            return self._stop(f"{place} has an impossible resolution or offset of time")
        if self._known == len(self._interfaces):
            self._interfaces = np.concatenate([self._interfaces, np.empty_like(self._interfaces)])
        self._interfaces[self._known] = (
            _linktype(self._number(at + 8, 2)),
            1 if binary else 10 ** max(0, 9 - digits),
            1 if binary else 10 ** max(0, digits - 9),
            digits if binary else -1,
            offset,
            self._number(at + 12, 4) or capindex.MAX_FRAME,
        )
        self._known += 1
        self.position = at + total

    def _stop(self, problem: str) -> None:
        self.ended = True
        self.problem = problem


def _linktype(field: int) -> int:
    """The link type of a file's field (the upper half tells of frame check sequences)."""
    number = field & 0xFFFF
    return _SAME_LINKTYPE.get(number, number)


def _identity(path: Path) -> tuple[int, int, int]:
    """Device, inode and size of what the path names now."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_dev, status.st_ino, status.st_size


class CaptureFileSource:
    """The frames of pcap and pcapng files (any byte order and time precision), merged by their timestamps.

    `vantage` is the vantage group of all files or one per file. Frames of different groups or link types
    come in different blocks. Frames of one file keep their order even where its times run backwards. Blocks
    need not be released before the next read.

    A file that turns out to be damaged, or ends inside a record, is used up to there; `problems` then has one
    line that names the file and the byte. Raises FlowcheckError for a file that cannot be opened or is no
    capture file (compressed ones are named as such), UsageError when there is no file.
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
        self._map, self._files = _map_files([Path(path) for path in paths])
        k = len(self._files)
        self._vantage = np.array(groups, np.int64)
        self._tables = np.empty((k, 5, min(_BLOCK_FRAMES, max(256, _LOOKAHEAD_FRAMES // k))), np.int64)
        self._most_bytes = max(1 << 20, _LOOKAHEAD_BYTES // k)
        self._start = np.zeros(k, np.int64)
        self._count = np.zeros(k, np.int64)
        self._ended = np.zeros(k, np.bool_)
        # No file holds a tag that was moved out of its frame.
        self._no_vlan = np.full(_BLOCK_FRAMES, -1, np.int64)

    def read(self, timeout: float = 0.0) -> Block | None:
        """The next block; None only at the end. Never waits, whatever `timeout` is."""
        while not self.finished:
            self._refill()
            self._give_back_pages()
            out = np.empty((4, _BLOCK_FRAMES), np.int64)
            frames, total, linktype, group = capindex.merge(
                self._tables, self._start, self._count, self._ended, self._vantage, _BLOCK_BYTES, out
            )
            if frames:
                self._packets += frames
                self._bytes += total
                offset, caplen, wirelen, ts = out[:, :frames]
                base = self._files[0]._base
                return Block(base, offset, caplen, wirelen, ts, self._no_vlan[:frames], group, linktype)
        return None

    def _refill(self) -> None:
        for f, file in enumerate(self._files):
            if self._start[f] < self._count[f] or self._ended[f]:
                continue
            self._start[f] = 0
            self._count[f] = file.index(self._tables[f], self._most_bytes)
            self._ended[f] = file.ended
            if file.problem:
                self.problems.append(f"{file.path}: {file.problem}: stopped after {file.frames} frames")

    def _give_back_pages(self) -> None:
        """Unmap what lies well behind the newest block; a block still in use there would be read again."""
        for f, file in enumerate(self._files):
            pending = self._start[f] < self._count[f]
            reached = int(self._tables[f, 0, self._start[f]]) if pending else file.position
            passed = (reached - _PORTION) // mmap.PAGESIZE * mmap.PAGESIZE
            if passed - file.kept_from >= _PORTION:
                self._map.madvise(mmap.MADV_DONTNEED, file.kept_from, passed - file.kept_from)
                file.kept_from = passed

    @property
    def starts(self) -> list[int]:
        """Where the bytes of each file begin in `Block.base`, in the order in which the files were given."""
        return [file.start for file in self._files]

    def release(self, block: Block) -> None:
        """Nothing to give back: a block's arrays are its own, and the mapping stays."""

    @property
    def finished(self) -> bool:
        return self._closed or bool((self._ended & (self._start >= self._count)).all())

    def counters(self) -> SourceCounters:
        return SourceCounters(self._packets, self._bytes)

    def close(self) -> None:
        """Drop the files. The mapping goes when the last block that is still referenced goes."""
        self._closed = True
        self._files = []
        if hasattr(self, "_map"):
            del self._map


def _map_files(paths: list[Path]) -> tuple[mmap.mmap, list[_File]]:
    """Map the files side by side, each from a page boundary on. Raises FlowcheckError naming the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    opened: list[tuple[int, int]] = []
    path = paths[0]
    try:
        for path in paths:
            # Non-blocking, so that a named pipe is refused below and not waited for here.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(descriptor)
            opened.append((descriptor, status.st_size))
            if not stat.S_ISREG(status.st_mode):
                raise FlowcheckError(f"{path} is not a regular file: give a pcap or pcapng file")
            if status.st_size == 0:
                raise FlowcheckError(f"{path} is empty: give a pcap or pcapng file")
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        room = sum(_round_up(size) for _, size in opened)
        region = mmap.mmap(-1, room, flags | mmap.MAP_ANONYMOUS, _PROTECTION)
        base = np.frombuffer(region, np.uint8)
        files = []
        start = 0
        for path, (descriptor, size) in zip(paths, opened, strict=True):
            address = libc.mmap(
                base.ctypes.data + start, size, _PROTECTION, flags | _MAP_FIXED, descriptor, 0
            )
            if address != base.ctypes.data + start:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            files.append(_File(path, base, start, size))
            start += _round_up(size)
        return region, files
    except OSError as error:
        raise FlowcheckError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from None
    finally:
        for descriptor, _ in opened:
            os.close(descriptor)
