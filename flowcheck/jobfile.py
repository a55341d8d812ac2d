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
from typing import Any, BinaryIO

import numpy as np
import xxhash

from flowcheck.description import DescriptionError, JobDescription, TensorSpec
from flowcheck.durable import Meter, make_folder, remove, sync_folder, temporary, write_failure
from flowcheck.errors import BadConfig, FlowcheckError, VerificationFailed
from flowcheck.linefile import MAX_LINE, LineFile
from flowcheck.snapshot import Snapshot
from flowcheck.tensorfile import (
    CHUNK,
    DamagedFile,
    Named,
    Place,
    TensorFile,
    encode_header,
    ordered,
)

JOB_FILE = "job.safetensors"
MARKERS_FILE = "markers.jsonl"
MAX_MARKER = MAX_LINE

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


class OpenJob:
    """A job file that is open: its description, and its tensors as a stored state, the one at attach.

    BadConfig names the file and the field that does not fit.
    """

    def __init__(self, path: Place) -> None:
        try:
            self._file = TensorFile(path)
        except DamagedFile as error:
            raise BadConfig(str(error)) from None
        try:
            self.description, self._checksums = _description(self._file)
        except BaseException:
            self._file.close()
            raise
        self.specs = dict(self.description.tensors())

    def load(self, key: str, *, verify: bool = True) -> np.ndarray:
        """uint8[nbytes] of one tensor in memory order. DamagedFile if it differs from its checksum."""
        entry = self._file.header.entries[key]
        data, checksum = self._file.load(entry.start, entry.stop)
        if verify and checksum != self._checksums[key]:
            raise self._differs(key)
        return data

    def check(self, key: str, meter: Meter | None = None) -> None:
        """DamagedFile if one tensor differs from its checksum; nothing of it is kept."""
        entry = self._file.header.entries[key]
        if self._file.checksum(entry.start, entry.stop, meter) != self._checksums[key]:
            raise self._differs(key)

    def read(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes of a tensor at `offset` in memory order."""
        return self._file.read(self._file.header.entries[key].start + offset, length)

    def _differs(self, key: str) -> DamagedFile:
        return DamagedFile(f"{self._file.path}: tensor {key} differs from its checksum; take another copy")

    def snapshot(self, epoch: int, tensors: Mapping[str, np.ndarray]) -> Snapshot:
        """The state that the trainer had at attach, as a snapshot of the step it attached at, with these bytes."""
        description = self.description
        return Snapshot(
            description=description,
            run=description.run,
            epoch=epoch,
            step=description.step,
            confirmed=True,
            exact=True,
            groups=[dict(group.fields) for group in description.optimizer.groups],
            scheduler=description.scheduler,
            tensors={key: (self.specs[key], data) for key, data in tensors.items()},
        )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> OpenJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Place, *, verify: bool = True) -> tuple[JobDescription, dict[str, tuple[TensorSpec, np.ndarray]]]:
    """Description and tensors of a job file, in memory and in memory order.

    BadConfig names the file and the field or tensor that does not fit; with `verify`, every tensor's
    checksum is compared.
    """
    with OpenJob(path) as job:
        try:
            tensors = {key: (spec, job.load(key, verify=verify)) for key, spec in job.specs.items()}
        except DamagedFile as error:
            raise BadConfig(str(error)) from None
    return job.description, tensors


def describe(path: Place) -> JobDescription:
    """The description in a job file whose size and header fit; the tensors' bytes are not read."""
    with OpenJob(path) as job:
        return job.description


def open_state(path: Place) -> OpenJob:
    """The job file as a stored state. VerificationFailed instead of BadConfig: it is a stored state like any other."""
    try:
        return OpenJob(path)
    except BadConfig as error:
        raise VerificationFailed(str(error)) from None


def snapshot(path: Place, epoch: int, *, verify: bool = True) -> Snapshot:
    """The state that the trainer had at attach, in memory. VerificationFailed names what is damaged."""
    with open_state(path) as job:
        return job.snapshot(epoch, {key: job.load(key, verify=verify) for key in job.specs})


def damage(path: Place, meter: Meter | None = None) -> list[str]:
    """What is wrong with a job file, one line each; every byte of it is read."""
    try:
        job = OpenJob(path)
    except BadConfig as error:
        return [str(error)]
    problems = []
    with job:
        for key in job.specs:
            try:
                job.check(key, meter)
            except DamagedFile as error:
                problems.append(str(error))
    return problems


def _description(file: TensorFile) -> tuple[JobDescription, dict[str, str]]:
    """The checked description and the checksums of the tensors. BadConfig as `OpenJob`."""
    path, header = file.path, file.header
    missing = [name for name in ("flowcheck", "tensors", "xxh3_128") if name not in header.metadata]
    if missing:
        raise BadConfig(f"{path}: not a job file, its metadata has no {missing[0]}")
    if _seal(header.metadata) != header.metadata["xxh3_128"]:
        raise BadConfig(f"{path}: its description is damaged, the checksum does not fit; take another copy")
    try:
        description = JobDescription.from_json(header.metadata["flowcheck"])
        checksums = json.loads(header.metadata["tensors"])
    except (DescriptionError, ValueError, RecursionError) as error:
        raise BadConfig(f"{path}: {error}") from None
    specs = dict(description.tensors())
    for key in sorted(specs.keys() ^ header.entries.keys()):
        raise BadConfig(f"{path}: tensor {key} is {'missing' if key in specs else 'not in the description'}")
    for key, spec in specs.items():
        entry = header.entries[key]
        if entry.dtype != "U8" or entry.stop - entry.start != spec.nbytes:
            raise BadConfig(f"{path}: tensor {key} has {entry.stop - entry.start} bytes, not {spec.nbytes}")
    if not isinstance(checksums, dict) or not checksums.keys() >= specs.keys():
        raise BadConfig(f"{path}: its tensors have no checksums")
    return description, checksums


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


class MarkerLog(LineFile):
    """Appends to `markers.jsonl`, one JSON object a line; `flowcheck.linefile` says what the disk may do meanwhile.

    The file is made by the first line, in the epoch's folder: that this is not there yet is the disk's failure too.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__(path, "the markers file", report)

    def append(self, marker: Mapping[str, Any]) -> None:
        """`marker`: JSON-ready objects. FlowcheckError if it is over MAX_MARKER bytes."""
        line = json.dumps(marker, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if len(line) > MAX_MARKER:
            raise FlowcheckError(f"{self.path}: a marker of {len(line)} bytes, at most {MAX_MARKER}")
        self.write(line)


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
