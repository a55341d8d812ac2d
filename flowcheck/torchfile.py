"""Tensors of a file that torch.save wrote, read where they lie: without torch, and without unpickling anything.

Such a file is an uncompressed zip archive: `data.pkl` names tensors with dtype, shape, strides and the record of their
storage, `data/<record>` are the bytes (https://docs.pytorch.org/docs/stable/notes/serialization.html). The pickle is
read by `flowcheck.inertpickle`; what is no tensor, dictionary, list or plain value stays inert and hurts nobody.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

from flowcheck import inertpickle
from flowcheck.specs import ITEMSIZE, MAX_DIMENSIONS, TensorSpec
from flowcheck.tensorfile import DamagedFile, RawFile

__all__ = ["StoredTensor", "TorchArchive"]

MAX_DIRECTORY = 64 << 20
"""Bytes of an archive's directory, and of one read of it."""
LOCAL_HEADER = 30
"""Bytes of a record's header before its name (APPNOTE.TXT 4.3.7)."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of the file: its elements begin `offset` elements into record `record`."""

    record: str
    offset: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    record: str
    dtype: str | None  # None: the tensor says it


class TorchArchive:
    """`content`: what was saved, with a StoredTensor for every tensor. DamagedFile if it cannot be read.

    file: an open file, of which the archive is the bytes [start, stop), all of it by default; most: bytes of pickle
    that are read.
    """

    def __init__(self, file: RawFile, most: int, start: int = 0, stop: int | None = None) -> None:
        self._file = file
        self._start = start
        self._stop = file.size if stop is None else stop
        self._records: dict[str, zipfile.ZipInfo] = {}
        try:
            with zipfile.ZipFile(_Window(file, start, self._stop)) as archive:
                self._records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            pickle = self._records["data.pkl"]
            if pickle.file_size > most:
                raise DamagedFile(f"{file.path}: {pickle.file_size} bytes of names and values, at most {most} are read")
            at = self._place(pickle)
            self.content = inertpickle.read(file.read(at, pickle.file_size), _made)
        except inertpickle.NotRead as error:
            raise DamagedFile(f"{file.path}: its pickle cannot be read: {error}") from None
        except (zipfile.BadZipFile, KeyError, ValueError, struct.error, NotImplementedError) as error:
            raise DamagedFile(f"{file.path}: no file of torch.save ({error!s:.100})") from None

    def place(self, tensor: StoredTensor) -> int:
        """Where in the file a tensor's elements begin. DamagedFile if its record does not hold them all."""
        record = self._records.get(f"data/{tensor.record}")
        first = tensor.offset * tensor.spec.itemsize
        if record is None or first + tensor.spec.nbytes > record.file_size:
            raise DamagedFile(f"{self._file.path}: record data/{tensor.record:.40} is missing or too short")
        return self._place(record) + first

    def _place(self, record: zipfile.ZipInfo) -> int:
        if record.compress_type != zipfile.ZIP_STORED:
            raise DamagedFile(f"{self._file.path}: record {record.filename:.100} is compressed, torch.save's are not")
        at = self._start + record.header_offset
        magic, name, extra = struct.unpack("<4s22xHH", self._file.read(at, LOCAL_HEADER))
        first = at + LOCAL_HEADER + name + extra
        if magic != b"PK\x03\x04" or first + record.file_size > self._stop:
            raise DamagedFile(f"{self._file.path}: record {record.filename:.100} is cut short")
        return int(first)


class _Window(io.RawIOBase):
    """Bytes [start, stop) of an open file, as zipfile reads them."""

    def __init__(self, file: RawFile, start: int, stop: int) -> None:
        self._file, self._start, self._size = file, start, stop - start
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("a place before the file's first byte")  # zipfile expects this of a file
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size < 0 else min(size, left)
        if wanted > MAX_DIRECTORY:
            raise DamagedFile(f"{self._file.path}: {wanted} bytes of directory, at most {MAX_DIRECTORY} are read")
        data = self._file.read(self._start + self._at, wanted)
        self._at += wanted
        return data


def _made(name: str, args: tuple[Any, ...]) -> Any:
    """What torch's own functions would make of these arguments, as far as it is needed here."""
    if name == "persistent":
        return _storage(args[0])
    if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
        return _tensor(name.endswith("v3"), args)
    if name == "torch._utils._rebuild_parameter":
        return args[0]
    if name == "torch.Size":
        return args[0]
    return inertpickle.Inert(name, args)


def _storage(number: Any) -> Any:
    """("storage", class, record, device, elements)."""
    if isinstance(number, tuple) and len(number) == 5 and isinstance(number[1], inertpickle.Inert):
        kind = number[1].name.rpartition(".")[2]
        if isinstance(number[2], str) and (kind in _STORAGES or kind == "UntypedStorage"):
            return _Storage(number[2], _STORAGES.get(kind))
    return inertpickle.Inert("persistent", (number,))


def _tensor(untyped: bool, args: tuple[Any, ...]) -> Any:
    """(storage, offset, shape, strides, requires grad, hooks, ...), of v3 with the dtype next."""
    storage, offset, shape, stride = args[:4]
    if not isinstance(storage, _Storage):
        return inertpickle.Inert("tensor", args)
    dtype = storage.dtype
    if untyped:
        dtype = args[6].name.removeprefix("torch.") if isinstance(args[6], inertpickle.Inert) else None
    sizes = (*shape, *stride)
    if dtype not in ITEMSIZE or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        return inertpickle.Inert("tensor", args)
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (offset, *sizes)):
        return inertpickle.Inert("tensor", args)
    return StoredTensor(storage.record, offset, TensorSpec(dtype, tuple(shape), tuple(stride)))
