"""One step on disk: a folder of `model.safetensors`, `optimizer.safetensors` and `manifest.json`.

The two tensor files load with plain safetensors; the manifest, written last, adds what they cannot say.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowcheck.durable import Meter, replace_file, sync_file
from flowcheck.errors import FlowcheckError, VerificationFailed
from flowcheck.manifest import MANIFEST, FileRecord, Manifest, TensorRecord
from flowcheck.snapshot import Snapshot
from flowcheck.tensorfile import (
    DTYPES,
    DamagedFile,
    Entry,
    Named,
    Place,
    TensorFile,
    is_row_major,
    to_memory_order,
    write_tensors,
)

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


def write(snapshot: Snapshot, folder: Path, meter: Meter, copied: Callable[[], None] | None = None) -> None:
    """Create `folder` with the snapshot in it, everything fsynced, the manifest last.

    The meter is asked after every chunk and once more after the last byte was read; then `copied` is called:
    the snapshot's arrays are not needed any more. FlowcheckError for a snapshot that is not whole or cannot
    be stored, `durable.Aborted` from the meter, OSError from the disk; the caller removes the folder then.
    """
    check_whole(snapshot)
    aliases = tied_names(snapshot)
    parts = _split(snapshot)
    folder.mkdir()
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for name, (keys, named) in parts.items():
        metadata = {"format": "pt", "flowcheck.step": str(snapshot.step)}
        if name == MODEL_FILE:
            metadata |= aliases
        with open(folder / name, "xb", buffering=1 << 20) as file:
            written = write_tensors(file, named, metadata, meter)
        files[name] = FileRecord(written.size, written.checksum)
        for key, (stored, spec, _) in zip(keys, named, strict=True):
            tensors[key] = TensorRecord(name, stored, spec, written.tensors[stored])
    meter.advance(0)
    if copied is not None:
        copied()
    for name in parts:
        sync_file(folder / name)
    manifest = Manifest(
        run=snapshot.run,
        epoch=snapshot.epoch,
        step=snapshot.step,
        confirmed=snapshot.confirmed,
        exact=snapshot.exact,
        reasons=list(snapshot.reasons),
        not_covered=list(snapshot.not_covered),
        written_ns=time.time_ns(),
        groups=snapshot.groups,
        scheduler=snapshot.scheduler,
        aliases=aliases,
        tensors=tensors,
        files=files,
        description=snapshot.description,
    )
    replace_file(folder / MANIFEST, manifest.encode())


def planned_bytes(snapshot: Snapshot) -> int:
    """Bytes that a step folder of the snapshot takes at most: its tensors, and what headers and manifest say."""
    words = json.dumps(snapshot.description.to_json(), separators=(",", ":"))
    texts = len(words) + len(str(snapshot.groups)) + len(str(snapshot.scheduler)) + sum(map(len, snapshot.reasons))
    names = sum(map(len, (*snapshot.tensors, *tied_names(snapshot), *snapshot.not_covered)))
    # each of a text's words stands on a line of its own, indented; each tensor is in a header and in the manifest
    return snapshot.nbytes + (1 << 14) + 8 * texts + 1024 * len(snapshot.tensors) + 8 * names


def check(folder: Place) -> Manifest:
    """The manifest of a step folder whose files have the sizes it names, else DamagedFile with the reason."""
    manifest = Manifest.read(folder / MANIFEST)
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise DamagedFile(f"{folder / name}: missing") from None
        except OSError as error:
            raise DamagedFile(f"{folder / name}: {error.strerror}") from None
        if size != record.size:
            raise DamagedFile(f"{folder / name}: {size} bytes, its manifest says {record.size}")
    return manifest


def is_whole(folder: Path) -> bool:
    """Whether `check` has nothing to say."""
    try:
        check(folder)
    except VerificationFailed:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of an open step."""

    record: TensorRecord
    file: TensorFile
    entry: Entry


class OpenStep:
    """A step folder whose files are open: what is removed meanwhile stays readable, what fails is DamagedFile."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.manifest = check(folder)
        self._tensors: dict[str, _Stored] = {}
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(TensorFile(folder / name)) for name in self.manifest.files}
            for key, record in self.manifest.tensors.items():
                spec = record.spec
                entry = files[record.file].header.entries.get(record.name) if record.file in files else None
                if entry is None or (entry.dtype, entry.shape) != (DTYPES.get(spec.dtype), spec.shape):
                    where = folder / record.file
                    raise DamagedFile(f"{where}: tensor {record.name} is missing or not of {spec.dtype} {spec.shape}")
                self._tensors[key] = _Stored(record, files[record.file], entry)
            self._files = stack.pop_all()
        self.specs = {key: record.spec for key, record in self.manifest.tensors.items()}

    def load(self, key: str, meter: Meter | None = None, *, verify: bool = True) -> np.ndarray:
        """uint8[nbytes] of one tensor in memory order; VerificationFailed if it differs from its checksum."""
        stored = self._tensors[key]
        data, checksum = stored.file.load(stored.entry.start, stored.entry.stop, meter)
        if verify and checksum != stored.record.checksum:
            raise self._differs(stored)
        return to_memory_order(stored.record.spec, data)

    def check(self, key: str) -> None:
        """VerificationFailed if one tensor differs from its checksum; nothing of it is kept."""
        stored = self._tensors[key]
        if stored.file.checksum(stored.entry.start, stored.entry.stop) != stored.record.checksum:
            raise self._differs(stored)

    def read(self, key: str, offset: int, length: int) -> bytes | None:
        """`length` bytes of a tensor at `offset` in memory order; None for one that is stored in another order."""
        stored = self._tensors[key]
        if not is_row_major(stored.record.spec):
            return None
        return stored.file.read(stored.entry.start + offset, length)

    def _differs(self, stored: _Stored) -> VerificationFailed:
        return VerificationFailed(f"{stored.file.path}: tensor {stored.record.name} differs from its checksum")

    def snapshot(self, tensors: dict[str, np.ndarray]) -> Snapshot:
        """The step as the manifest tells it, with these bytes for its tensors."""
        manifest = self.manifest
        return Snapshot(
            description=manifest.description,
            run=manifest.run,
            epoch=manifest.epoch,
            step=manifest.step,
            confirmed=manifest.confirmed,
            exact=manifest.exact,
            reasons=manifest.reasons,
            not_covered=manifest.not_covered,
            groups=manifest.groups,
            scheduler=manifest.scheduler,
            tensors={key: (self.specs[key], data) for key, data in tensors.items()},
        )

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> OpenStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(folder: Place, *, verify: bool = True, progress: Callable[[int, int], None] | None = None) -> Snapshot:
    """The snapshot in a step folder, in memory.

    VerificationFailed names the file and tensor that is missing or, with `verify`, differs from its checksum.
    """
    with OpenStep(folder) as step:
        meter = Meter(sum(spec.nbytes for spec in step.specs.values()), progress)
        return step.snapshot({key: step.load(key, meter, verify=verify) for key in step.specs})


def damage(folder: Place, meter: Meter | None = None) -> list[str]:
    """What is wrong with a step folder, one line each; every byte of it is read."""
    try:
        manifest = Manifest.read(folder / MANIFEST)
    except DamagedFile as error:
        return [str(error)]
    problems = []
    for name, record in manifest.files.items():
        path = folder / name
        try:
            with TensorFile(path) as file:
                torn = []
                for tensor in (t for t in manifest.tensors.values() if t.file == name):
                    entry = file.header.entries.get(tensor.name)
                    if entry is None:
                        torn.append(f"{path}: tensor {tensor.name} is missing")
                    elif (entry.dtype, entry.shape) != (DTYPES.get(tensor.spec.dtype), tensor.spec.shape):
                        torn.append(f"{path}: tensor {tensor.name} is not {tensor.spec.dtype} {tensor.spec.shape}")
                    elif file.checksum(entry.start, entry.stop, meter) != tensor.checksum:
                        torn.append(f"{path}: tensor {tensor.name} differs from its checksum")
                if not torn and (file.size, file.checksum(0, file.size)) != (record.size, record.checksum):
                    torn.append(f"{path}: differs from its checksum outside of the tensors, in the header")
        except DamagedFile as error:
            torn = [str(error)]
        problems += torn
    problems += [
        f"{folder / MANIFEST}: tensor {key} is in {tensor.file}, which it does not name"
        for key, tensor in manifest.tensors.items()
        if tensor.file not in manifest.files
    ]
    return problems


def check_whole(snapshot: Snapshot) -> None:
    """FlowcheckError unless every parameter, persistent buffer and param group of the job is there."""
    description = snapshot.description
    where = f"step {snapshot.step} of run {snapshot.run}"
    needed = {f"model/{p.name}": p.spec for p in description.parameters}
    needed |= {f"buffer/{b.name}": b.spec for b in description.buffers if b.persistent}
    for key, spec in needed.items():
        if key not in snapshot.tensors or snapshot.tensors[key][0] != spec:
            raise FlowcheckError(f"{where}: {key} is missing or of another shape")
    if len(snapshot.groups) != len(description.optimizer.groups):
        count = len(description.optimizer.groups)
        raise FlowcheckError(f"{where}: {len(snapshot.groups)} param groups, the job has {count}")


def tied_names(snapshot: Snapshot) -> dict[str, str]:
    """Second name in the state_dict -> the name that the tensor is kept under."""
    description = snapshot.description
    names = {alias: parameter.name for parameter in description.parameters for alias in parameter.aliases}
    for buffer in description.buffers:
        if buffer.persistent:
            names.update(dict.fromkeys(buffer.aliases, buffer.name))
    return names


def _split(snapshot: Snapshot) -> dict[str, tuple[list[str], list[Named]]]:
    """File -> (tensor keys, tensors under the names that they get in the file)."""
    model: tuple[list[str], list[Named]] = ([], [])
    optimizer: tuple[list[str], list[Named]] = ([], [])
    transient = {buffer.name for buffer in snapshot.description.buffers if not buffer.persistent}
    for key, (spec, data) in snapshot.tensors.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            parameter, _, state = name.rpartition("/")
            part, stored = optimizer, f"optimizer.state.{parameter}.{state}"
        elif kind == "buffer" and name in transient:
            continue
        else:
            part, stored = model, name
        part[0].append(key)
        part[1].append((stored, spec, data))
    return {MODEL_FILE: model, OPTIMIZER_FILE: optimizer}
