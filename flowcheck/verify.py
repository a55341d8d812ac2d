"""`flowcheck verify`: read every stored byte again and compare it with the checksums taken at writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flowcheck import jobfile, stepfolder
from flowcheck.durable import TEMPORARY, Meter
from flowcheck.errors import FlowcheckError, NothingRestorable, UsageError, VerificationFailed
from flowcheck.manifest import MANIFEST, OutputManifest, output_manifest_path
from flowcheck.storereader import EPOCH, LATEST, STEP, read_latest, unfinished
from flowcheck.tensorfile import DamagedFile, Place, RawFile

Item = tuple[Place, Callable[[Any, Meter], list[str]]]


@dataclass(slots=True)
class Report:
    """What `verify` read: whole states and restored outputs, bytes, and one line per thing that is wrong."""

    path: Place
    checked: list[Place] = field(default_factory=list)
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line for a person."""
        found = f"{len(self.problems)} problems" if self.problems else "all as written"
        return f"{self.path}: {len(self.checked)} items, {self.nbytes} bytes read, {found}"

    def require(self) -> None:
        """VerificationFailed with the first problem and the count of the others, if there is any."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise VerificationFailed(f"{self.problems[0]}{more}")


def verify(path: Place, progress: Callable[[int, int], None] | None = None) -> Report:
    """Check a store, run, epoch or step folder, on a disk or at a URL, a job file, or what `flowcheck restore` wrote.

    Problems are collected, not raised. UsageError if `path` does not exist or is nothing that carries
    checksums, NothingRestorable for a folder without any snapshot.
    """
    try:
        return _verify(path, progress)
    except OSError as error:  # a folder that cannot be listed
        raise FlowcheckError(f"{path}: {error.strerror}") from None


def _verify(path: Place, progress: Callable[[int, int], None] | None) -> Report:
    report = Report(path)
    items = list(_items(path, report))
    if not items and not report.problems:
        raise NothingRestorable(f"{path} holds no flowcheck snapshot")
    total = sum(_size(item) for item, _ in items)
    meter = Meter(total, progress)
    for item, check in items:
        end = meter.done + _size(item)
        report.problems += check(item, meter)
        report.checked.append(item)
        meter.advance(end - meter.done)  # headers, manifests and what damage made unreadable
    report.nbytes = total
    return report


def _items(path: Place, report: Report) -> Iterator[Item]:
    """Everything at or below `path` that has checksums; what should have them and has not is a problem."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if output_manifest_path(path).is_file():
        yield path, _output_damage
    elif path.is_file():
        if path.suffix != ".safetensors":
            missing = output_manifest_path(path).name
            raise UsageError(f"{path}: nothing to compare it with, {missing} is missing")
        if path.name in (stepfolder.MODEL_FILE, stepfolder.OPTIMIZER_FILE):
            raise UsageError(f"{path}: verify its folder, {path.parent}")
        yield path, jobfile.damage
    elif (path / MANIFEST).is_file() or STEP.fullmatch(path.name):
        yield path, stepfolder.damage
    else:
        if (path / LATEST).is_file():
            named = read_latest(path / LATEST)
            if named is None or not (path / f"e{named[0]}" / f"step-{named[1]}").is_dir():
                report.problems.append(f"{path / LATEST}: does not name a stored step")
        children: list[Place] = list(path.iterdir())
        for child in sorted(children, key=lambda child: child.name):
            if child.name.startswith(TEMPORARY) or (STEP.fullmatch(child.name) and unfinished(child)):
                continue
            if child.name == jobfile.JOB_FILE:
                yield child, jobfile.damage
            elif child.is_dir() and (STEP.fullmatch(child.name) or _holds_epochs(child) or _is_epoch(child)):
                yield from _items(child, report)


def _is_epoch(folder: Place) -> bool:
    return EPOCH.fullmatch(folder.name) is not None


def _holds_epochs(folder: Place) -> bool:
    return any(_is_epoch(child) for child in folder.iterdir())


def _output_damage(path: Place, meter: Meter) -> list[str]:
    try:
        manifest = OutputManifest.read(output_manifest_path(path))
    except DamagedFile as error:
        return [str(error)]
    problems = []
    for name, record in manifest.files.items():
        try:
            with RawFile(path / name if path.is_dir() else path.with_name(name)) as file:
                if file.size != record.size:
                    problems.append(f"{file.path}: {file.size} bytes, its manifest says {record.size}")
                elif file.checksum(0, file.size, meter) != record.checksum:
                    problems.append(f"{file.path}: differs from its checksum")
        except DamagedFile as error:
            problems.append(str(error))
    return problems


def _size(path: Place) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
