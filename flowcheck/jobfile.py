"""The job file: one attach's description and initial state, so that recorded traffic can be replayed later.

One safetensors file. Its tensors lie under the tensor keys as one-dimensional U8, in memory order, so the
trainer's strides survive exactly; `__metadata__` holds the description (`flowcheck`), a checksum per tensor
(`tensors`) and a checksum of those two texts (`xxh3_128`). Beside it lies `markers.jsonl`, one JSON line
per step marker in the order of arrival.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import xxhash

from flowcheck.description import DescriptionError, JobDescription, TensorSpec
from flowcheck.durable import Meter, make_folder, remove, sync_folder, temporary, write_failure
from flowcheck.errors import BadConfig, FlowcheckError, VerificationFailed
from flowcheck.snapshot import Snapshot
from flowcheck.tensorfile import (
    CHUNK,
    DamagedFile,
    Header,
    Named,
    checksum_of,
    encode_header,
    map_file,
    ordered,
    read_header,
)

JOB_FILE = "job.safetensors"
MARKERS_FILE = "markers.jsonl"
MAX_MARKER = 16 << 20

Tensors = Mapping[str, tuple[TensorSpec, np.ndarray]]
Progress = Callable[[int, int], None]


def write(
    path: Path,
    description: JobDescription,
    tensors: Tensors,
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Write a job file: whole at `path` or, after an error, not at all.

    `tensors`: key -> (spec, uint8[nbytes] in memory order) for exactly the keys of `description.tensors()`.
    FlowcheckError if they do not fit or the disk fails, `durable.Aborted` once `should_stop()` is true.
    """
    specs = dict(description.tensors())
    for key in sorted(specs.keys() ^ tensors.keys()):
        problem = "missing" if key in specs else "not in the description"
        raise BadConfig(f"job file: tensor {key} is {problem}")
    for key, spec in specs.items():
        if tensors[key][0] != spec or tensors[key][1].nbytes != spec.nbytes:
            raise BadConfig(f"job file: tensor {key} differs from its description")
    # widest items first: every tensor is aligned when the file is mapped
    raw = [(key, _raw(spec), tensors[key][1]) for key, spec, _ in ordered(_named(specs))]
    text = json.dumps(description.to_json(), separators=(",", ":"), allow_nan=False)
    checksums = dict.fromkeys((key for key, _, _ in raw), "0" * 32)
    meter = Meter(sum(spec.nbytes for spec in specs.values()), progress, should_stop)
    aside = temporary(path)
    try:
        make_folder(path.parent)
        with open(aside, "xb") as file:
            # the checksums are known after the data has passed: their place is kept and filled in then
            file.write(encode_header(raw, _metadata(text, checksums)))
            for key, _, data in raw:
                checksums[key] = _stream(file, data, meter)
            file.seek(0)
            file.write(encode_header(raw, _metadata(text, checksums)))
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        remove(aside)
        raise write_failure("the job file", path, error) from None
    except BaseException:
        remove(aside)
        raise


def read(path: Path, *, verify: bool = True) -> tuple[JobDescription, dict[str, tuple[TensorSpec, np.ndarray]]]:
    """Description and tensors of a job file; the arrays are views of the mapped file, in memory order.

    BadConfig names the file and the field or tensor that does not fit; with `verify`, every tensor's
    checksum is compared first.
    """
    description, header, checksums = _open(path)
    try:
        mapped = map_file(path)
    except DamagedFile as error:
        raise BadConfig(str(error)) from None
    tensors = {}
    for key, spec in description.tensors():
        entry = header.entries[key]
        data = np.asarray(mapped[entry.start : entry.stop])
        if verify and checksum_of(data) != checksums[key]:
            raise BadConfig(f"{path}: tensor {key} is damaged, its checksum does not fit; take another copy")
        tensors[key] = (spec, data)
    return description, tensors


def describe(path: Path) -> JobDescription:
    """The description in a job file whose size and header fit; the tensors' bytes are not read."""
    return _open(path)[0]


def snapshot(path: Path, epoch: int, *, verify: bool = True) -> Snapshot:
    """The state that the trainer had at attach, as a snapshot of the step it attached at.

    VerificationFailed instead of BadConfig, because here the file is a stored state like any other.
    """
    try:
        description, tensors = read(path, verify=verify)
    except BadConfig as error:
        raise VerificationFailed(str(error)) from None
    return Snapshot(
        description=description,
        run=description.run,
        epoch=epoch,
        step=description.step,
        confirmed=True,
        exact=True,
        groups=[dict(group.fields) for group in description.optimizer.groups],
        scheduler=description.scheduler,
        tensors=tensors,
    )


def damage(path: Path, meter: Meter | None = None) -> list[str]:
    """What is wrong with a job file, one line each; every byte of it is read."""
    try:
        description, header, checksums = _open(path)
        mapped = map_file(path)
    except (BadConfig, DamagedFile) as error:
        return [str(error)]
    problems = []
    for key, _ in description.tensors():
        entry = header.entries[key]
        if checksum_of(mapped[entry.start : entry.stop], meter) != checksums[key]:
            problems.append(f"{path}: tensor {key} differs from its checksum")
    return problems


def _open(path: Path) -> tuple[JobDescription, Header, dict[str, str]]:
    try:
        header = read_header(path)
    except DamagedFile as error:
        raise BadConfig(str(error)) from None
    missing = [name for name in ("flowcheck", "tensors", "xxh3_128") if name not in header.metadata]
    if missing:
        raise BadConfig(f"{path}: not a job file, its metadata has no {missing[0]}")
    if _seal(header.metadata) != header.metadata["xxh3_128"]:
        raise BadConfig(f"{path}: its description is damaged, the checksum does not fit; take another copy")
    try:
        description = JobDescription.from_json(header.metadata["flowcheck"])
        checksums = json.loads(header.metadata["tensors"])
    except (DescriptionError, ValueError) as error:
        raise BadConfig(f"{path}: {error}") from None
    specs = dict(description.tensors())
    for key in sorted(specs.keys() ^ header.entries.keys()):
        raise BadConfig(f"{path}: tensor {key} is {'missing' if key in specs else 'not in the description'}")
    for key, spec in specs.items():
        entry = header.entries[key]
        if entry.dtype != "U8" or entry.stop - entry.start != spec.nbytes:
            raise BadConfig(f"{path}: tensor {key} has {entry.stop - entry.start} bytes, not {spec.nbytes}")
        if key not in checksums:
            raise BadConfig(f"{path}: tensor {key} has no checksum")
    return description, header, checksums


def _raw(spec: TensorSpec) -> TensorSpec:
    return TensorSpec("uint8", (spec.nbytes,), (1,))


def _named(specs: Mapping[str, TensorSpec]) -> list[Named]:
    nothing = np.empty(0, np.uint8)
    return [(key, spec, nothing) for key, spec in specs.items()]


def _metadata(text: str, checksums: dict[str, str]) -> dict[str, str]:
    metadata = {"flowcheck": text, "tensors": json.dumps(checksums, separators=(",", ":"))}
    return {**metadata, "xxh3_128": _seal(metadata)}


def _seal(metadata: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest((metadata["flowcheck"] + "\n" + metadata["tensors"]).encode())


def _stream(file: BinaryIO, data: np.ndarray, meter: Meter) -> str:
    checksum = xxhash.xxh3_128()
    for start in range(0, data.nbytes, CHUNK):
        chunk = data[start : start + CHUNK].data
        checksum.update(chunk)
        file.write(chunk)
        meter.advance(chunk.nbytes)
    return checksum.hexdigest()


class MarkerLog:
    """Appends markers to `markers.jsonl`, one JSON object a line, each flushed to the kernel at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_folder(path.parent)
            self._file = path.open("ab")
        except OSError as error:
            raise write_failure("step markers", path, error) from None

    def append(self, marker: Mapping[str, Any]) -> None:
        """`marker`: JSON-ready objects. FlowcheckError if it is over MAX_MARKER bytes or the disk fails."""
        line = json.dumps(marker, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if len(line) > MAX_MARKER:
            raise FlowcheckError(f"{self.path}: a marker of {len(line)} bytes, at most {MAX_MARKER}")
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise write_failure("step markers", self.path, error) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MarkerLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_markers(path: Path) -> list[dict[str, Any]]:
    """The markers of a `markers.jsonl`, in order; [] if there is none.

    A last line without its end (the daemon died in it) is left out; any other line that is not a JSON
    object is BadConfig with file and line number.
    """
    markers = []
    try:
        with open(path, "rb") as file:
            for number in range(1, 1 << 62):
                line = file.readline(MAX_MARKER)
                if not line.endswith(b"\n"):
                    if len(line) == MAX_MARKER:
                        raise BadConfig(f"{path}:{number}: a line longer than {MAX_MARKER} bytes")
                    break
                markers.append(_marker(line, f"{path}:{number}"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    return markers


def _marker(line: bytes, where: str) -> dict[str, Any]:
    try:
        marker = json.loads(line)
    except (ValueError, RecursionError):
        raise BadConfig(f"{where}: not a JSON line; remove it or take another copy") from None
    if not isinstance(marker, dict):
        raise BadConfig(f"{where}: a marker is a JSON object")
    return marker
