"""safetensors files, written as a stream and read piece by piece, without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header of
name -> {dtype, shape, data_offsets} plus `__metadata__` (text -> text), then the tensors' bytes, row-major
and without gaps. Tensors whose strides are not row-major are turned while they are written, a chunk at a
time, so a state is never copied as a whole.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash

from flowcheck.description import TensorSpec
from flowcheck.durable import Meter
from flowcheck.errors import FlowcheckError, VerificationFailed
from flowcheck.remote import RemotePath

CHUNK = 8 << 20
"""Bytes between two looks at the meter, and the most that one turned piece of a tensor takes."""

MAX_HEADER = 100_000_000
"""The format's own limit, which its other readers enforce."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

_WORDS: dict[int, np.dtype[Any]] = {
    size: np.dtype(code) for size, code in {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}.items()
}

Place = Path | RemotePath
"""Where a stored file or folder lies."""

Named = tuple[str, TensorSpec, np.ndarray]
"""Name in the file, spec, uint8[nbytes] in memory order."""


class DamagedFile(VerificationFailed):
    """A file that is not what was written: cut short, missing, or with a header that does not fit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `start` and `stop` count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, str]
    entries: dict[str, Entry]


def is_row_major(spec: TensorSpec) -> bool:
    """Whether memory order is row-major order; dimensions of size 1 may have any stride."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected and spec.numel:
            return False
        expected *= size
    return True


def strided(spec: TensorSpec, data: np.ndarray) -> np.ndarray:
    """The tensor over `data` (uint8[nbytes], memory order) as words of its item size, in its own shape."""
    if not spec.dense or data.nbytes != spec.nbytes:
        raise FlowcheckError(f"{data.nbytes} bytes do not hold a dense {spec.dtype} tensor of {spec.shape}")
    words = data.view(_WORDS[spec.itemsize])
    strides = tuple(step * spec.itemsize for step in spec.stride)
    return np.lib.stride_tricks.as_strided(words, spec.shape, strides, writeable=data.flags.writeable)


def to_memory_order(spec: TensorSpec, data: np.ndarray) -> np.ndarray:
    """uint8[nbytes] in memory order from row-major bytes; `data` itself where both orders are the same."""
    if is_row_major(spec):
        return data
    turned = np.empty(spec.nbytes, np.uint8)
    strided(spec, turned)[...] = data.view(_WORDS[spec.itemsize]).reshape(spec.shape)
    return turned


def row_major_chunks(spec: TensorSpec, data: np.ndarray) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, at most CHUNK bytes at a time."""
    if is_row_major(spec):
        for start in range(0, spec.nbytes, CHUNK):
            yield data[start : start + CHUNK].data
        return
    yield from _turned(strided(spec, data))


def _turned(view: np.ndarray) -> Iterator[memoryview]:
    if view.nbytes <= CHUNK:
        yield np.ascontiguousarray(view).reshape(-1).view(np.uint8).data
        return
    rows = CHUNK // (view.nbytes // view.shape[0])
    if rows == 0:
        for row in view:
            yield from _turned(row)
        return
    for start in range(0, view.shape[0], rows):
        yield np.ascontiguousarray(view[start : start + rows]).reshape(-1).view(np.uint8).data


def ordered(tensors: Sequence[Named]) -> list[Named]:
    """Widest items first, as other writers of the format do, so that every tensor is aligned in the map."""
    return sorted(tensors, key=lambda item: (-item[1].itemsize, item[0]))


def encode_header(tensors: Sequence[Named], metadata: dict[str, str]) -> bytes:
    """The header for `tensors` in this order; padded with spaces so that the data starts 64-byte aligned.

    FlowcheckError for a dtype or a name that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, spec, _ in tensors:
        if spec.dtype not in DTYPES:
            raise FlowcheckError(f"tensor {name}: safetensors has no dtype {spec.dtype}")
        if name in header:
            raise FlowcheckError(f"tensor {name}: safetensors cannot hold this name a second time")
        header[name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    if len(text) > MAX_HEADER:
        raise FlowcheckError(f"{len(tensors)} tensors: {len(text)} bytes of header, over the format's limit")
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True)
class Written:
    """What went into one file: its size, xxh3_128 of the whole and of each tensor's stored bytes."""

    size: int
    checksum: str
    tensors: dict[str, str]


def write_tensors(file: BinaryIO, tensors: Sequence[Named], metadata: dict[str, str], meter: Meter) -> Written:
    """Stream `tensors` to `file` (opened for binary writing); checksums are taken of the bytes as they go.

    The caller flushes and fsyncs. `Aborted` when the meter says so, OSError from the disk.
    """
    tensors = ordered(tensors)
    header = encode_header(tensors, metadata)
    whole = xxhash.xxh3_128(header)
    file.write(header)
    size = len(header)
    checksums: dict[str, str] = {}
    for name, spec, data in tensors:
        checksum = xxhash.xxh3_128()
        for chunk in row_major_chunks(spec, data):
            checksum.update(chunk)
            whole.update(chunk)
            file.write(chunk)
            meter.advance(chunk.nbytes)
        size += spec.nbytes
        checksums[name] = checksum.hexdigest()
    return Written(size, whole.hexdigest(), checksums)


class RawFile:
    """An open file whose bytes are read, never mapped: where a disk fails, that is an error and not the end of the
    process. Any thread may read. DamagedFile names the file for whatever is wrong with it.

    opened: called with the descriptor of a local file before anything is read; what it raises ends the opening.
    """

    def __init__(self, path: Place, opened: Callable[[int], None] | None = None) -> None:
        self.path = path
        self._descriptor = -1
        try:
            if isinstance(path, RemotePath):
                self.size = path.stat().st_size
            else:
                # a pipe in the place of a file must not be waited for
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                if opened is not None:
                    opened(self._descriptor)
                self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            self.close()
            raise self._damaged(error) from None
        except BaseException:
            self.close()
            raise

    def read(self, start: int, length: int) -> bytes:
        """Exactly `length` bytes from byte `start` on."""
        data = bytearray(length)
        self.fill(start, memoryview(data))
        return bytes(data)

    def fill(self, start: int, target: memoryview) -> None:
        """Fill `target` (bytes) from byte `start` on."""
        done = 0
        while done < len(target):
            try:
                if isinstance(self.path, RemotePath):
                    piece = self.path.read_at(start + done, min(CHUNK, len(target) - done))
                    target[done : done + len(piece)] = piece
                    got = len(piece)
                else:
                    got = os.preadv(self._descriptor, [target[done : done + CHUNK]], start + done)
            except OSError as error:
                raise self._damaged(error) from None
            if got == 0:
                raise DamagedFile(f"{self.path}: cut short, it ends at byte {start + done}")
            done += got

    def checksum(self, start: int, stop: int, meter: Meter | None = None) -> str:
        """xxh3_128 of the bytes [start, stop), hexadecimal, read in chunks."""
        state = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(CHUNK, stop - start)))
        for at in range(start, stop, CHUNK):
            chunk = buffer[: min(CHUNK, stop - at)]
            self.fill(at, chunk)
            state.update(chunk)
            if meter is not None:
                meter.advance(len(chunk))
        return state.hexdigest()

    def load(self, start: int, stop: int, meter: Meter | None = None) -> tuple[np.ndarray, str]:
        """uint8[stop - start] and the checksum of exactly these bytes."""
        data = np.empty(stop - start, np.uint8)
        state = xxhash.xxh3_128()
        for at in range(0, data.nbytes, CHUNK):
            chunk = data[at : at + CHUNK].data
            self.fill(start + at, chunk)
            state.update(chunk)
            if meter is not None:
                meter.advance(chunk.nbytes)
        return data, state.hexdigest()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _damaged(self, error: OSError) -> DamagedFile:
        reason = "missing" if isinstance(error, FileNotFoundError) else error.strerror
        return DamagedFile(f"{self.path}: {reason}")


class TensorFile(RawFile):
    """An open safetensors file and its checked header: its tensors fill it without gap or overlap."""

    def __init__(self, path: Place, opened: Callable[[int], None] | None = None) -> None:
        super().__init__(path, opened)
        try:
            self.header = self._header()
        except BaseException:
            self.close()
            raise

    def _header(self) -> Header:
        path, size = self.path, self.size
        length = struct.unpack("<Q", self.read(0, 8))[0] if size >= 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise DamagedFile(f"{path}: cut short or not a safetensors file ({size} bytes)")
        text = self.read(8, length)
        try:
            raw = json.loads(text)
            metadata = raw.pop("__metadata__", {})
            entries = {name: _entry(item, 8 + length) for name, item in raw.items()}
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("metadata that is not text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(f"{path}: its header cannot be read ({error!s:.200})") from None
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != end:
                raise DamagedFile(f"{path}: tensor {name:.100} does not start where the one before it ends")
            end = entry.stop
        if end != size:
            raise DamagedFile(f"{path}: {size} bytes, its header says {end}")
        return Header(metadata, entries)


def read_header(path: Place) -> Header:
    """The checked header of a file; DamagedFile unless its tensors fill the file without gap or overlap."""
    with TensorFile(path) as file:
        return file.header


def _entry(item: dict[str, Any], base: int) -> Entry:
    dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError("a size that is not a whole number")
    if stop - start != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"{dtype} of {list(shape)} in {stop - start} bytes")
    return Entry(dtype, shape, base + start, base + stop)


def checksum_of(data: np.ndarray) -> str:
    """xxh3_128 of uint8 bytes in memory, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data.data)
