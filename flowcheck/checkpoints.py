"""The checkpoint that a job was started from, as the daemon reads it, below folders that its operator named.

Three forms, by what lies at the path: a file of torch.save, a folder with `.metadata` (torch.distributed.checkpoint), a
step folder of flowcheck's own (`model.safetensors`, `optimizer.safetensors`). Nothing in them is believed: a tensor is
handed on with the bytes found under its name, and only a checksum from the trainer makes it state. Nothing is unpickled
(`flowcheck.inertpickle`), nothing is mapped, and no more is read than the job's description has room for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowcheck import inertpickle
from flowcheck.description import JobDescription, TensorSpec
from flowcheck.durable import Meter
from flowcheck.errors import UsageError
from flowcheck.stepfolder import MODEL_FILE, OPTIMIZER_FILE
from flowcheck.tensorfile import DTYPES, DamagedFile, RawFile, TensorFile, strided, to_memory_order
from flowcheck.torchfile import StoredTensor, TorchArchive

__all__ = ["Checkpoint", "Roots", "opened"]

PICKLE_BYTES, PICKLE_BYTES_PER_TENSOR = 8 << 20, 1 << 10
"""Most that the names and values of a checkpoint may take."""
MODELS = ("model", "model_state_dict", "state_dict")
OPTIMIZERS = ("optimizer", "optimizer_state_dict")
"""Entries of a saved dictionary that hold the state_dicts."""
WRAPPED = "module."
"""What DistributedDataParallel puts before the names of its own state_dict."""
METADATA = ".metadata"


class Checkpoint(Protocol):
    """An open checkpoint."""

    def load(self, key: str, spec: TensorSpec, meter: Meter) -> np.ndarray | None:
        """uint8[spec.nbytes] of the tensor of this key (`flowcheck.snapshot`), in the memory order of `spec`; None
        where there is none of its dtype and shape. DamagedFile if it cannot be read, whatever `meter` raises."""


class Roots:
    """The folders below which checkpoints may be read."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def resolve(self, path: Path) -> Path:
        """`path` without symbolic links. UsageError if that does not lie below one of the folders."""
        if not self._folders:
            raise UsageError("this daemon reads no checkpoints: start it with --checkpoint-root DIR")
        real = Path(os.path.realpath(path))
        if not path.is_absolute() or not any(real.is_relative_to(folder) for folder in self._folders):
            raise UsageError(f"{path} does not lie below a folder of --checkpoint-root")
        return real

    def file(self, path: Path) -> RawFile:
        """A file below the folders, opened. Raises UsageError or DamagedFile."""
        real = self.resolve(path)
        return RawFile(real, self._check(path, real))

    def tensors(self, path: Path) -> TensorFile:
        """The same for a safetensors file."""
        real = self.resolve(path)
        return TensorFile(real, self._check(path, real))

    def _check(self, path: Path, real: Path) -> Callable[[int], None]:
        def check(descriptor: int) -> None:
            """Before anything is read: is this the file that was looked up, or was a folder on its way exchanged?"""
            if os.readlink(f"/proc/self/fd/{descriptor}") != str(real):
                raise UsageError(f"{path} changed while it was opened")

        return check


@contextlib.contextmanager
def opened(path: Path, roots: Roots, description: JobDescription) -> Iterator[Checkpoint]:
    """The checkpoint at `path` for a job of this description. Raises UsageError where it may not be read, DamagedFile
    where it cannot."""
    real = roots.resolve(path)
    most = PICKLE_BYTES + PICKLE_BYTES_PER_TENSOR * sum(1 for _ in description.tensors())
    with contextlib.ExitStack() as files:
        if not real.is_dir():
            file = files.enter_context(roots.file(real))
            yield _Saved(file, TorchArchive(file, most), _Names(description))
        elif (real / METADATA).exists():
            metadata = files.enter_context(roots.file(real / METADATA))
            yield _Distributed(real, roots, metadata, most)
        else:
            model = files.enter_context(roots.tensors(real / MODEL_FILE))
            optimizer = files.enter_context(roots.tensors(real / OPTIMIZER_FILE))
            yield _StepFolder(model, optimizer)


class _Names:
    """Under which names a state_dict has the tensors of a job: numbers in the order of the groups for the optimizer."""

    def __init__(self, description: JobDescription) -> None:
        names = [name for group in description.optimizer.groups for name in group.parameters]
        self._numbers = {name: number for number, name in enumerate(names)}

    def of(self, parameter: str) -> tuple[int | str, ...]:
        number = self._numbers.get(parameter)
        return (parameter, WRAPPED + parameter) if number is None else (number, parameter, WRAPPED + parameter)


class _Saved:
    """A file of torch.save: {"model": state_dict, "optimizer": state_dict, ...}, or a model's state_dict alone."""

    def __init__(self, file: RawFile, archive: TorchArchive, names: _Names) -> None:
        if not isinstance(archive.content, dict):
            raise DamagedFile(f"{file.path}: holds no dictionary: save {{'model': ..., 'optimizer': ...}}")
        content: dict[Any, Any] = archive.content
        self._file, self._archive, self._names = file, archive, names
        self._model = _first(content, MODELS) or content
        self._state = _first(_first(content, OPTIMIZERS) or {}, ("state",)) or {}

    def load(self, key: str, spec: TensorSpec, meter: Meter) -> np.ndarray | None:
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            name, _, state = name.rpartition("/")
            entry = next((self._state[each] for each in self._names.of(name) if each in self._state), None)
            found = entry.get(state) if isinstance(entry, dict) else None
        else:
            found = self._model.get(name, self._model.get(WRAPPED + name))
        return _tensor(self._file, self._archive, found, spec, meter)


class _StepFolder:
    """What `flowcheck.stepfolder` writes. Its manifest is not needed: the trainer's checksums say more."""

    def __init__(self, model: TensorFile, optimizer: TensorFile) -> None:
        self._model, self._optimizer = model, optimizer

    def load(self, key: str, spec: TensorSpec, meter: Meter) -> np.ndarray | None:
        kind, _, name = key.partition("/")
        file = self._model
        if kind == "optimizer":
            parameter, _, state = name.rpartition("/")
            file, name = self._optimizer, f"optimizer.state.{parameter}.{state}"
        entry = file.header.entries.get(name)
        if entry is None or (entry.dtype, entry.shape) != (DTYPES.get(spec.dtype), spec.shape):
            return None
        return to_memory_order(spec, file.load(entry.start, entry.stop, meter)[0])


class _Distributed:
    """A folder of torch.distributed.checkpoint: `model.<name>` and `optimizer.state.<name>.<key>`, each in chunks that
    are archives of their own, at places in the ranks' files that `.metadata` tells."""

    def __init__(self, folder: Path, roots: Roots, metadata: RawFile, most: int) -> None:
        self._folder, self._roots, self._most = folder, roots, most
        if metadata.size > most:
            raise DamagedFile(f"{metadata.path}: {metadata.size} bytes, at most {most} are read")
        try:
            content = inertpickle.read(metadata.read(0, metadata.size))
            places = content.state["storage_data"]
            self._chunks: dict[str, list[tuple[tuple[int, ...], dict[str, Any]]]] = {}
            for index, place in places.items():
                at = index.state.get("offset")  # of the chunk in its tensor; None for what is no tensor
                if at is not None:
                    self._chunks.setdefault(index.state["fqn"], []).append((tuple(at.args[0]), place.state))
        except (inertpickle.NotRead, AttributeError, KeyError, TypeError, IndexError) as error:
            raise DamagedFile(f"{metadata.path}: is not torch.distributed.checkpoint's ({error!s:.100})") from None

    def load(self, key: str, spec: TensorSpec, meter: Meter) -> np.ndarray | None:
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            parameter, _, state = name.rpartition("/")
            name = f"{parameter}.{state}"
        chunks = self._chunks.get(f"{'optimizer.state' if kind == 'optimizer' else 'model'}.{name}")
        if chunks is None:
            return None
        whole = np.empty(spec.nbytes, np.uint8)
        target = strided(spec, whole)
        left = spec.numel
        for at, place in chunks:
            meter.advance(0)
            with self._roots.file(self._folder / str(place["relative_path"])) as file:
                start = int(place["offset"])
                archive = TorchArchive(file, self._most, start, start + int(place["length"]))
                stored = archive.content
                if not isinstance(stored, StoredTensor):
                    return None
                ends = tuple(lo + size for lo, size in zip(at, stored.spec.shape, strict=True))
                if len(at) != len(spec.shape) or any(hi > size for hi, size in zip(ends, spec.shape, strict=True)):
                    return None
                part = TensorSpec(spec.dtype, stored.spec.shape, _row_major(stored.spec.shape))
                data = _tensor(file, archive, stored, part, meter)
            if data is None:
                return None
            target[tuple(map(slice, at, ends))] = strided(part, data)
            left -= part.numel
        return whole if left == 0 else None


def _tensor(file: RawFile, archive: TorchArchive, stored: Any, spec: TensorSpec, meter: Meter) -> np.ndarray | None:
    """The bytes of a stored tensor in the memory order of `spec`, None if it is no such tensor."""
    if not isinstance(stored, StoredTensor) or not stored.spec.dense:
        return None
    if (stored.spec.dtype, stored.spec.shape) != (spec.dtype, spec.shape):
        return None
    start = archive.place(stored)
    data, _ = file.load(start, start + spec.nbytes, meter)
    if spec.numel == 0 or stored.spec.stride == spec.stride:
        return data
    turned = np.empty(spec.nbytes, np.uint8)
    strided(spec, turned)[...] = strided(stored.spec, data)
    return turned


def _first(content: Mapping[Any, Any], names: Sequence[str]) -> dict[Any, Any] | None:
    """The first of these entries that is a dictionary."""
    return next((content[name] for name in names if isinstance(content.get(name), dict)), None)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
