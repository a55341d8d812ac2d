"""One step on disk: a folder of `model.safetensors`, `optimizer.safetensors` and `manifest.json`.

The two tensor files load with plain safetensors; the manifest, written last, adds what they cannot say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flowcheck.durable import Meter, replace_file, sync_file
from flowcheck.errors import FlowcheckError, VerificationFailed
from flowcheck.manifest import MANIFEST, FileRecord, Manifest, TensorRecord
from flowcheck.snapshot import Snapshot
from flowcheck.tensorfile import (
    DTYPES,
    DamagedFile,
    Named,
    checksum_of,
    map_file,
    read_header,
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


def check(folder: Path) -> Manifest:
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


def read(folder: Path, *, verify: bool = True, progress: Callable[[int, int], None] | None = None) -> Snapshot:
    """The snapshot in a step folder: private maps of its files, copies of what is not row-major.

    VerificationFailed names the file and tensor that is missing or, with `verify`, differs from its checksum.
    """
    manifest = check(folder)
    mapped = {name: map_file(folder / name) for name in manifest.files}
    headers = {name: read_header(folder / name) for name in manifest.files}
    meter = Meter(sum(record.spec.nbytes for record in manifest.tensors.values()), progress)
    tensors = {}
    for key, record in manifest.tensors.items():
        path, spec = folder / record.file, record.spec
        entry = headers[record.file].entries.get(record.name) if record.file in headers else None
        if entry is None or (entry.dtype, entry.shape) != (DTYPES.get(spec.dtype), spec.shape):
            raise DamagedFile(f"{path}: tensor {record.name} is missing or not of {spec.dtype} {spec.shape}")
        data = np.asarray(mapped[record.file][entry.start : entry.stop])
        if verify and checksum_of(data, meter) != record.checksum:
            raise VerificationFailed(f"{path}: tensor {record.name} differs from its checksum")
        tensors[key] = (spec, to_memory_order(spec, data))
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
        tensors=tensors,
    )


def damage(folder: Path, meter: Meter | None = None) -> list[str]:
    """What is wrong with a step folder, one line each; every byte of it is read."""
    try:
        manifest = Manifest.read(folder / MANIFEST)
    except DamagedFile as error:
        return [str(error)]
    problems = []
    for name, record in manifest.files.items():
        path = folder / name
        try:
            header = read_header(path)
            mapped = map_file(path)
        except DamagedFile as error:
            problems.append(str(error))
            continue
        torn = []
        for tensor in (t for t in manifest.tensors.values() if t.file == name):
            entry = header.entries.get(tensor.name)
            if entry is None:
                torn.append(f"{path}: tensor {tensor.name} is missing")
            elif (entry.dtype, entry.shape) != (DTYPES.get(tensor.spec.dtype), tensor.spec.shape):
                torn.append(f"{path}: tensor {tensor.name} is not {tensor.spec.dtype} {tensor.spec.shape}")
            elif checksum_of(mapped[entry.start : entry.stop], meter) != tensor.checksum:
                torn.append(f"{path}: tensor {tensor.name} differs from its checksum")
        if not torn and (mapped.nbytes, checksum_of(mapped)) != (record.size, record.checksum):
            torn.append(f"{path}: differs from its checksum outside of the tensors, in the header")
        problems += torn
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
