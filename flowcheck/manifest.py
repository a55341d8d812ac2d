"""The manifests that make a folder or file of tensors trustworthy: what it holds, sizes and checksums.

Every manifest is one JSON object with a checksum over its own other fields, so a flipped digit of a
learning rate is found like a flipped bit of a weight. All checksums are xxh3_128, hexadecimal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from flowcheck.description import (
    DescriptionError,
    JobDescription,
    TensorSpec,
    check_scheduler,
    decode_value,
    encode_value,
)
from flowcheck.remote import RemotePath
from flowcheck.specs import MAX_GROUPS, MAX_TENSORS
from flowcheck.tensorfile import DamagedFile, Place, RawFile
from flowcheck.values import Reader, text
from reconstruct.unknown import Unknown

Where = TypeVar("Where", Path, RemotePath, Path | RemotePath)

MANIFEST = "manifest.json"
SNAPSHOT_FORMAT = "flowcheck.snapshot"
OUTPUT_FORMAT = "flowcheck.output"
VERSION = 1

MAX_MANIFEST = 1 << 28
_CHECKSUM = "xxh3_128"


@dataclass(frozen=True, slots=True)
class FileRecord:
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where one tensor of a snapshot lies; `spec` has the trainer's strides, the file is row-major."""

    file: str
    name: str
    spec: TensorSpec
    checksum: str


@dataclass(slots=True)
class Manifest:
    """What a step folder holds; written last, so a folder without one is not a snapshot."""

    run: str
    epoch: int
    step: int
    confirmed: bool
    exact: bool
    reasons: list[str]
    not_covered: list[str]
    written_ns: int
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    aliases: dict[str, str]
    """Second names of tied tensors -> the name under which the tensor is stored."""
    tensors: dict[str, TensorRecord]
    """By tensor key (`model/...`, `buffer/...`, `optimizer/...`)."""
    files: dict[str, FileRecord]
    description: JobDescription

    def encode(self) -> bytes:
        tensors = {
            key: {
                "file": record.file,
                "name": record.name,
                **record.spec.to_json(),
                "nbytes": record.spec.nbytes,
                _CHECKSUM: record.checksum,
            }
            for key, record in self.tensors.items()
        }
        return seal(
            {
                "format": SNAPSHOT_FORMAT,
                "version": VERSION,
                "run": self.run,
                "epoch": self.epoch,
                "step": self.step,
                "confirmed": self.confirmed,
                "exact": self.exact,
                "reasons": self.reasons,
                "not_covered": self.not_covered,
                "written_ns": self.written_ns,
                "groups": [encode_value(group, "groups") for group in self.groups],
                "scheduler": encode_value(self.scheduler, "scheduler"),
                "aliases": self.aliases,
                "tensors": tensors,
                "files": _files_to_json(self.files),
                "description": self.description.to_json(),
            }
        )

    def doubted(self, reason: str) -> bytes:
        """The encoded manifest of the same step once somebody knows a reason why it may be wrong."""
        said = f"may be wrong: {reason}"
        reasons = self.reasons if said in self.reasons else [*self.reasons, said]
        return replace(self, exact=False, reasons=reasons).encode()

    @classmethod
    def read(cls, path: Place) -> Manifest:
        """The manifest at `path`; `DamagedFile` names the file and the field that does not fit."""
        data = unseal(path, SNAPSHOT_FORMAT)
        try:
            reader = Reader(data, "manifest")
            result = cls(
                run=reader.text("run"),
                epoch=reader.integer("epoch", 0, 1 << 62),
                step=reader.integer("step", 0, 1 << 62),
                confirmed=reader.boolean("confirmed"),
                exact=reader.boolean("exact"),
                reasons=reader.sequence("reasons", MAX_TENSORS, text),
                not_covered=reader.sequence("not_covered", MAX_TENSORS, text),
                written_ns=reader.integer("written_ns", 0, 1 << 63),
                groups=reader.sequence("groups", MAX_GROUPS, _group),
                scheduler=check_scheduler(reader.value("scheduler"), "scheduler"),
                aliases={name: text(kept, "aliases") for name, kept in _object(reader, "aliases").items()},
                tensors={key: _tensor(item, key) for key, item in _object(reader, "tensors").items()},
                files=_files_from_json(_object(reader, "files")),
                description=JobDescription.from_json(reader.raw("description")),
            )
        except DescriptionError as error:
            raise DamagedFile(f"{path}: {error}") from None
        return result


@dataclass(slots=True)
class OutputManifest:
    """What `flowcheck restore` wrote beside (or, for a folder, inside) its output, for `flowcheck verify`."""

    kind: str
    """`torch` or `dcp`."""
    run: str
    epoch: int
    step: int
    confirmed: bool
    exact: bool
    not_covered: list[str] = field(default_factory=list)
    unknown: Unknown = field(default_factory=Unknown)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def encode(self) -> bytes:
        return seal(
            {
                "format": OUTPUT_FORMAT,
                "version": VERSION,
                "kind": self.kind,
                "run": self.run,
                "epoch": self.epoch,
                "step": self.step,
                "confirmed": self.confirmed,
                "exact": self.exact,
                "not_covered": self.not_covered,
                "unknown": self.unknown.to_json(),
                "files": _files_to_json(self.files),
            }
        )

    @classmethod
    def read(cls, path: Place) -> OutputManifest:
        try:
            body = unseal(path, OUTPUT_FORMAT)
            reader = Reader({"unknown": {}, **body}, "manifest")  # outputs of before have none
            return cls(
                kind=reader.text("kind"),
                run=reader.text("run"),
                epoch=reader.integer("epoch", 0, 1 << 62),
                step=reader.integer("step", 0, 1 << 62),
                confirmed=reader.boolean("confirmed"),
                exact=reader.boolean("exact"),
                not_covered=reader.sequence("not_covered", MAX_TENSORS, text),
                unknown=Unknown.from_json(reader.raw("unknown"), "manifest.unknown"),
                files=_files_from_json(_object(reader, "files")),
            )
        except DescriptionError as error:
            raise DamagedFile(f"{path}: {error}") from None


def output_manifest_path(output: Where) -> Where:
    """Where the manifest of a restored file or folder lies."""
    return output / "flowcheck.json" if output.is_dir() else output.with_name(output.name + ".flowcheck.json")


def seal(body: dict[str, Any]) -> bytes:
    """`body` as JSON text with its own checksum as the last field."""
    return json.dumps({**body, _CHECKSUM: _body_checksum(body)}, indent=1, allow_nan=False).encode() + b"\n"


def unseal(path: Place, kind: str) -> dict[str, Any]:
    """The checked object of a sealed JSON file; `DamagedFile` if missing, damaged or of another kind."""
    with RawFile(path) as file:
        if file.size > MAX_MANIFEST:
            raise DamagedFile(f"{path}: larger than any manifest")
        data = file.read(0, file.size)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedFile(f"{path}: cut short or not JSON") from None
    if not isinstance(body, dict) or body.pop(_CHECKSUM, None) != _body_checksum(body):
        raise DamagedFile(f"{path}: its own checksum does not fit, a field was changed or damaged")
    if body.get("format") != kind or body.get("version") != VERSION:
        found = f"{body.get('format')} version {body.get('version')}"
        raise DamagedFile(f"{path}: {found:.100}, this flowcheck reads {kind} version {VERSION}")
    return body


def _body_checksum(body: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _files_to_json(files: dict[str, FileRecord]) -> dict[str, Any]:
    return {name: {"size": record.size, _CHECKSUM: record.checksum} for name, record in files.items()}


def _files_from_json(data: dict[str, Any]) -> dict[str, FileRecord]:
    files = {}
    for name, item in data.items():
        # a manifest may come from anywhere: it must not send a reader out of its own folder
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise DescriptionError(f"files: {name!r:.80} is not a plain file name")
        reader = Reader(item, f"files.{name:.80}")
        files[name] = FileRecord(reader.integer("size", 0, 1 << 62), reader.text(_CHECKSUM, 32))
    return files


def _tensor(item: Any, key: str) -> TensorRecord:
    reader = Reader(item, f"tensors.{key:.100}")
    fields = {name: reader.raw(name) for name in ("dtype", "shape", "stride")}
    spec = TensorSpec.from_json(fields, reader.path)
    reader.integer("nbytes", spec.nbytes, spec.nbytes)
    return TensorRecord(reader.text("file"), reader.text("name", 4096), spec, reader.text(_CHECKSUM, 32))


def _group(item: Any, path: str) -> dict[str, Any]:
    group = decode_value(item, path)
    if not isinstance(group, dict) or not all(isinstance(key, str) for key in group):
        raise DescriptionError(f"{path}: expected an object of named values")
    return group


def _object(reader: Reader, name: str) -> dict[str, Any]:
    value = reader.raw(name)
    if not isinstance(value, dict) or len(value) > 8 * MAX_TENSORS:
        raise reader.fail(name, "expected an object of bounded size")
    return value
