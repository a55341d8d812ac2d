"""One recorded pcap or pcapng file: its bytes are read in portions to their place in memory, its frames indexed there.

Read, never mapped: a disk that fails, or a file that is cut meanwhile, would end the process (SIGBUS). Formats:
draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flowcheck.errors import FlowcheckError
from mirror import capindex

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

_MOST_INTERFACES = 1 << 16
# Of a pcapng block: a frame and its options. Longer ones are passed over unread if they may hold anything.
_MOST_BLOCK = 2 * capindex.MAX_FRAME
_PACKETS_AND_INTERFACES = (1, 2, 3, 6)


class CaptureFile:
    """One capture file, and how far it is read and indexed; its byte n has its place at `base[start + n]`.

    `descriptor` is open for reading and closed by `close`. `position`: where the next record begins in `base`; what
    lies before it is not looked at again. Raises FlowcheckError for a file that cannot be read or is no capture file.
    """

    def __init__(self, path: Path, descriptor: int, base: np.ndarray, start: int, size: int) -> None:
        self.path = path
        self.start = start
        self.position = start
        self.frames = 0
        self.ended = False
        self.problem = ""
        self._descriptor = descriptor
        self._base = base
        self._end = start + size
        self._filled = start  # from `position` to here the bytes are in memory
        self._broken = ""  # why nothing behind that can be read
        self._big = False
        self._time = 0
        self._unit = 0
        self._linktype = 0
        self._interfaces = np.empty((4, 6), np.int64)
        self._known = 0
        self._read(start + 24)
        if self._broken:
            raise FlowcheckError(f"cannot read {path}: {self._broken}")
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

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self, upto: int) -> None:
        """Read on to `upto`, or to the end of the file; what stops it before that is in `_broken`."""
        upto = min(upto, self._end)
        while self._filled < upto and not self._broken:
            at = self._filled - self.start
            try:
                got = os.preadv(self._descriptor, [self._base[self._filled : upto].data], at)
            except OSError as error:
                self._broken = f"byte {at} cannot be read, check its disk: {os.strerror(error.errno or 0)}"
                return
            if got == 0:
                self._broken = f"it became shorter while it was read and ends at byte {at} now"
            self._filled += got

    def index(self, table: np.ndarray, most_bytes: int) -> int:
        """Fill `table` int64[5, n] with the next frames, of about `most_bytes` of the file.

        Returns how many; 0 at the end, and where a part of the file holds none.
        """
        begun = self.position
        self._read(begun + most_bytes)
        count, why = 0, capindex.SECTION
        while why in (capindex.SECTION, capindex.INTERFACE) and not self.ended:
            whole = self._filled == self._end
            # the last record is at the file's end, which the kernel has to see; there may be none behind the edge of
            # what was read
            limit = begun + most_bytes if whole else min(begun + most_bytes, self._filled)
            count, why = self._frames(table, count, limit)
            if why == capindex.SECTION:
                self._section()
            elif why == capindex.INTERFACE:
                self._interface()
            elif why == capindex.END:
                self.ended = True
            elif why in capindex.REASONS and not (why == capindex.CUT_SHORT and not whole):
                self._stop(f"the record at byte {self.position - self.start} {capindex.REASONS[why]}")
        if self.position == begun and not self.ended:
            self._further()
        self.frames += count
        return count

    def _frames(self, table: np.ndarray, count: int, limit: int) -> tuple[int, int]:
        """Index what begins before `limit` into the table from column `count` on: (frames in it, why it stopped)."""
        if self._unit:
            count, self.position, why = capindex.index_pcap(
                self._base, self.position, limit, self._filled, self._big, self._unit, self._linktype, table
            )
            return count, why
        count, self.position, why, self._time = capindex.index_pcapng(
            self._base,
            self.position,
            limit,
            self._filled,
            self._big,
            self._interfaces[: self._known],
            self._time,
            count,
            table,
        )
        return count, why

    def _further(self) -> None:
        """The next record goes on behind what was read: read its rest, or pass over it."""
        at = self.position
        place = f"the record at byte {at - self.start}"
        if self._broken:
            return self._stop(self._broken)
        if self._unit:
            return self._read(at + 16 + self._number(at + 8, 4))  # which the kernel has found possible
        kind, total = self._number(at, 4), self._number(at + 4, 4)
        if total <= _MOST_BLOCK:
            return self._read(at + total)
        if kind in _PACKETS_AND_INTERFACES:
            return self._stop(f"{place} {capindex.REASONS[capindex.BAD_LENGTH]}")
        if total > self._end - at:
            return self._stop(f"{place} {capindex.REASONS[capindex.CUT_SHORT]}")
        self._filled = at + total - 4
        self._read(at + total)
        if self._broken:
            return self._stop(self._broken)
        if self._number(at + total - 4, 4) != total:
            return self._stop(f"{place} {capindex.REASONS[capindex.BAD_TRAILER]}")
        self.position = at + total

    def _section(self) -> None:
        """Read a section header block: byte order and version; interfaces count from 0 again."""
        at = self.position
        if self._end - at < 28:
            return self._stop(f"the section header at byte {at - self.start} runs past the end of the file")
        self._read(at + 28)
        if self._filled < at + 28:
            return self._stop(self._broken)
        order = self._base[at + 8 : at + 12].tobytes()
        if order not in (b"\x1a\x2b\x3c\x4d", b"\x4d\x3c\x2b\x1a"):
            return self._stop(f"the section header at byte {at - self.start} has no byte order mark")
        self._big = order[0] == 0x1A
        total, major = self._number(at + 4, 4), self._number(at + 12, 2)
        possible = 28 <= total <= min(_MOST_BLOCK, self._end - at) and not total % 4
        if possible:
            self._read(at + total)
            if self._filled < at + total:
                return self._stop(self._broken)
        if not possible or self._number(at + total - 4, 4) != total:
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
