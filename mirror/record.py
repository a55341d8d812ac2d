"""Write blocks of frames to a pcap file that reads back as the same frames.

The format is pcap with nanoseconds (draft-ietf-opsawg-pcap). A VLAN tag that the kernel moved out of a
frame is put back behind the MAC addresses, where it was on the wire, so a recording of a live capture and a
capture by any other tool agree.
"""

from __future__ import annotations

import os
import struct
from types import TracebackType

import numpy as np
from numba import njit

from flowcheck.errors import FlowcheckError
from mirror.block import Block
from mirror.internal import internal
from mirror.memory import address_of, copy

SNAPLEN = 262144
_MAGIC_NANOSECONDS = 0xA1B23C4D
_BUFFER = 4 << 20
_MACS = 12


@internal()
def _store32(buffer: np.ndarray, at: int, value: int) -> None:
    for i in range(4):
        buffer[at + i] = np.uint8(value >> (8 * i) & 0xFF)


@njit(cache=True, nogil=True)
def pcap_records(
    base: int,
    offset: np.ndarray,
    caplen: np.ndarray,
    wirelen: np.ndarray,
    ts: np.ndarray,
    vlan: np.ndarray,
    first: int,
    buffer: np.ndarray,
    target: int,
    used: int,
) -> tuple[int, int]:
    """Append the records of frames `first`.. to buffer[used:] until one does not fit.

    `base` and `target` are the addresses of the frames' memory and of `buffer`. Returns (the next frame,
    bytes of the buffer used).
    """
    for i in range(first, offset.size):
        tagged = vlan[i] >= 0 and caplen[i] >= _MACS
        length = min(caplen[i] + (4 if tagged else 0), SNAPLEN)
        if used + 16 + length > buffer.size:
            return i, used
        _store32(buffer, used, ts[i] // 1_000_000_000)
        _store32(buffer, used + 4, ts[i] % 1_000_000_000)
        _store32(buffer, used + 8, length)
        _store32(buffer, used + 12, wirelen[i])
        used += 16
        source = base + offset[i]
        if tagged:
            copy(target + used, source, _MACS)
            for k in range(4):  # in network order, unlike pcap's own fields
                buffer[used + _MACS + k] = np.uint8(vlan[i] >> (24 - 8 * k) & 0xFF)
            copy(target + used + _MACS + 4, source + _MACS, length - _MACS - 4)
        else:
            copy(target + used, source, length)
        used += length
    return offset.size, used


def warm_up() -> None:
    """Compile or load the kernel now: a live capture cannot wait for it at the first block."""
    none, buffer = np.empty(0, np.int64), np.empty(1, np.uint8)
    pcap_records(address_of(buffer), none, none, none, none, none, 0, buffer, address_of(buffer), 0)


class PcapRecorder:
    """A pcap file that blocks are written to; its link type is that of the first block.

    Frames longer than 262,144 bytes are cut to that (their wire length is kept). Writes are buffered;
    `close` writes the rest and makes the file durable. Raises FlowcheckError when the file cannot be
    written, or for a block of another link type.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.frames = 0
        self._linktype = -1
        self._used = 0
        self._buffer = np.empty(_BUFFER, np.uint8)
        self._target = address_of(self._buffer)
        warm_up()
        try:
            # Closed by close(); the buffer here is the only one.
            self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failure(error) from None

    def write(self, block: Block) -> None:
        """Append the frames of a block. The block may be released afterwards."""
        if self._linktype < 0:
            self._begin(block.linktype)
        if block.linktype != self._linktype:
            raise FlowcheckError(
                f"{self.path} holds frames of link type {self._linktype}:"
                f" record those of type {block.linktype} into another file"
            )
        frames = len(block)
        first = 0
        while first < frames:
            first, self._used = pcap_records(
                address_of(block.base), block.offset, block.caplen, block.wirelen, block.ts, block.vlan,
                first, self._buffer, self._target, self._used,
            )  # fmt: skip
            if first < frames:
                self._flush()
        self.frames += frames

    def _begin(self, linktype: int) -> None:
        self._linktype = linktype
        header = struct.pack("<IHHiIII", _MAGIC_NANOSECONDS, 2, 4, 0, 0, SNAPLEN, linktype)
        self._buffer[: len(header)] = np.frombuffer(header, np.uint8)
        self._used = len(header)

    def _flush(self) -> None:
        rest = self._buffer[: self._used].data
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failure(error) from None
        self._used = 0

    def _failure(self, error: OSError) -> FlowcheckError:
        return FlowcheckError(f"cannot write {self.path}: {os.strerror(error.errno or 0)}")

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._flush()

    def close(self) -> None:
        """Write the rest, fsync and close; a recording without a block is a valid empty file. Idempotent."""
        if self._file.closed:
            return
        try:
            if self._linktype < 0:
                self._begin(1)
            self._flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failure(error) from None
        finally:
            self._file.close()

    def __enter__(self) -> PcapRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
