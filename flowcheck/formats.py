"""A snapshot in the forms that PyTorch loads: one `torch.load` file, or a distributed-checkpoint folder.

torch is imported when a function is called, so that commands that need none of this start without it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import xxhash

from flowcheck.description import TensorSpec
from flowcheck.durable import (
    Meter,
    make_folder,
    remove,
    replace_file,
    staged,
    sync_folder,
    temporary,
    write_failure,
)
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.manifest import FileRecord, OutputManifest, output_manifest_path
from flowcheck.snapshot import Snapshot
from flowcheck.stepfolder import check_whole
from flowcheck.tensorfile import CHUNK, DamagedFile, RawFile

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]


def to_torch(snapshot: Snapshot, *, copy: bool = True) -> dict[str, Any]:
    """The snapshot as `torch.load(out)` gives it back: only tensors, plain values, dicts, lists and tuples.

    `model`: the unwrapped module's state_dict, frozen parameters, persistent buffers and second names of tied
    tensors (sharing storage) included, every tensor with the trainer's strides. `optimizer`: what the
    trainer's `optimizer.state_dict()` was, integers in the order of the groups; parameters without state are
    absent. `scheduler`: the learning-rate scheduler's state_dict as it stands after the step, None where it was
    not given to `attach` or cannot be known. Then `step`, `epoch`, `run`, `confirmed`, `exact`, `not_covered`, and
    `unknown`: tensor key -> [[first element, end, unknown since step], ...], in memory order, {} of a whole step.

    With `copy=False` tensors share memory with the snapshot's arrays where these are writable.
    """
    check_whole(snapshot)
    state = _optimizer_state(snapshot, copy)
    numbers: dict[str, int] = {}
    groups = []
    for names, fields in _groups(snapshot):
        for name in names:
            numbers[name] = len(numbers)
        groups.append({**fields, "params": [numbers[name] for name in names]})
    return {
        "model": _model(snapshot, copy),
        "optimizer": {
            "state": {numbers[name]: entry for name, entry in state.items()},
            "param_groups": groups,
        },
        "scheduler": _scheduler(snapshot),
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "run": snapshot.run,
        "confirmed": snapshot.confirmed,
        "exact": snapshot.exact,
        "not_covered": list(snapshot.not_covered),
        "unknown": snapshot.unknown.to_json(),
    }


def to_dcp(snapshot: Snapshot, *, copy: bool = True) -> dict[str, Any]:
    """The snapshot named as `get_state_dict` names it: {"model", "optimizer", "step"}, by parameter names.

    A loader's `get_state_dict` asks for state of every trainable parameter, also of those that have none
    yet. Where zeros are exactly what the optimizer would start from, they are written; where they are not
    (SGD with dampening), the state stays absent and loading says which key is missing.
    """
    check_whole(snapshot)
    state = _optimizer_state(snapshot, copy)
    groups = []
    for names, fields in _groups(snapshot):
        for name in names:
            if name not in state:
                fresh = _fresh_state(snapshot, name, fields)
                if fresh:
                    state[name] = fresh
        groups.append({**fields, "params": list(names)})
    return {
        "model": _model(snapshot, copy),
        "optimizer": {"state": state, "param_groups": groups},
        "step": snapshot.step,
    }


def write_torch(snapshot: Snapshot, path: Path, progress: Progress | None = None) -> None:
    """`to_torch` as one file for `torch.load(path, weights_only=True)`, with a manifest for `verify`.

    Written aside, fsynced and renamed. UsageError if `path` exists and is not an earlier output of flowcheck,
    FlowcheckError or NoPermission if it cannot be written.
    """
    import torch

    _check_target(path, "torch")
    content = to_torch(snapshot, copy=False)
    try:
        make_folder(path.parent)
        with staged(path, folder=False) as aside:
            with open(aside, "wb") as file:
                sink = _Sink(file, Meter(snapshot.nbytes, progress))
                try:
                    torch.save(content, cast("BinaryIO", sink))
                except Exception as error:
                    # torch wraps or hides what the file object raised
                    raise sink.error or error from None
                file.flush()
                os.fsync(file.fileno())
            remove(output_manifest_path(path))
            os.rename(aside, path)
        sync_folder(path.parent)
        manifest = _output(snapshot, "torch")
        manifest.files[path.name] = FileRecord(sink.size, sink.checksum.hexdigest())
        replace_file(output_manifest_path(path), manifest.encode())
    except OSError as error:
        raise write_failure("the restored state", path, error) from None


def write_dcp(snapshot: Snapshot, path: Path, progress: Progress | None = None) -> None:
    """`to_dcp` as a folder for `torch.distributed.checkpoint.load`, for any world size and for FSDP2.

    Written aside and renamed, with a manifest for `flowcheck verify` inside. Errors as in `write_torch`.
    """
    _check_target(path, "dcp")
    content = to_dcp(snapshot, copy=False)
    try:
        make_folder(path.parent)
        with staged(path, folder=True) as aside:
            _save_dcp(content, aside, Meter(_nbytes(content), progress))
            manifest = _output(snapshot, "dcp")
            for file in sorted(aside.iterdir()):
                with RawFile(file) as data:
                    manifest.files[file.name] = FileRecord(data.size, data.checksum(0, data.size))
            replace_file(output_manifest_path(aside), manifest.encode())
            _exchange(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_failure("the restored state", path, error) from None


def _save_dcp(content: dict[str, Any], folder: Path, meter: Meter) -> None:
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            if isinstance(data, torch.Tensor):
                meter.advance(data.nbytes)
            return data

    writer = checkpoint.FileSystemWriter(folder, sync_files=True)
    try:
        with warnings.catch_warnings():
            # torch warns that it saves in a single process, which is what no_dist asks for
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            checkpoint.save(content, storage_writer=writer, planner=Planner(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        disk: BaseException | None = cause
        while disk is not None:  # torch's own errors about the half-written archive hide the one of the disk
            if isinstance(disk, (OSError, FlowcheckError)):
                raise disk from None
            disk = disk.__cause__ or disk.__context__
        raise FlowcheckError(f"cannot write the distributed checkpoint: {cause}") from None


class _Sink:
    """The file object that `torch.save` writes to: passes bytes on, hashes them, counts them."""

    def __init__(self, file: BinaryIO, meter: Meter) -> None:
        self.size = 0
        self.checksum = xxhash.xxh3_128()
        self.error: Exception | None = None
        self._file = file
        self._meter = meter

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                self._file.write(chunk)
                self.checksum.update(chunk)
                self._meter.advance(len(chunk))
        except Exception as error:
            self.error = error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def _check_target(path: Path, kind: str) -> None:
    """UsageError unless `path` is free, or holds what an earlier restore of the same format wrote."""
    if not path.name:
        raise UsageError(f"{path} is not a name for an output")
    if not os.path.lexists(path) or (kind == "dcp" and path.is_dir() and not any(path.iterdir())):
        return
    try:
        if OutputManifest.read(output_manifest_path(path)).kind == kind and not path.is_symlink():
            return
    except DamagedFile:
        pass
    earlier = f"an earlier output of flowcheck restore --format {kind}"
    raise UsageError(f"{path} exists and is not {earlier}: remove it or choose another name")


def _exchange(aside: Path, path: Path) -> None:
    if not path.is_dir():
        os.rename(aside, path)
        return
    old = temporary(path)
    os.rename(path, old)
    try:
        os.rename(aside, path)
    except OSError:
        os.rename(old, path)
        raise
    remove(old)


def _output(snapshot: Snapshot, kind: str) -> OutputManifest:
    return OutputManifest(
        kind=kind,
        run=snapshot.run,
        epoch=snapshot.epoch,
        step=snapshot.step,
        confirmed=snapshot.confirmed,
        exact=snapshot.exact,
        not_covered=list(snapshot.not_covered),
        unknown=snapshot.unknown,
    )


def _tensor(spec: TensorSpec, data: np.ndarray, copy: bool) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    if spec.numel == 0:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype)
    if copy or not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).as_strided(spec.shape, spec.stride)


def _scheduler(snapshot: Snapshot) -> dict[str, Any] | None:
    from reconstruct.lr import state_dict

    return None if snapshot.scheduler is None else state_dict(snapshot.scheduler)


def _model(snapshot: Snapshot, copy: bool) -> dict[str, torch.Tensor]:
    model = {}
    for parameter in snapshot.description.parameters:
        tensor = _tensor(*snapshot.tensors[f"model/{parameter.name}"], copy)
        for name in (parameter.name, *parameter.aliases):
            model[name] = tensor
    for buffer in snapshot.description.buffers:
        if buffer.persistent:
            tensor = _tensor(*snapshot.tensors[f"buffer/{buffer.name}"], copy)
            for name in (buffer.name, *buffer.aliases):
                model[name] = tensor
    return model


def _groups(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for group, fields in zip(snapshot.description.optimizer.groups, snapshot.groups, strict=True):
        yield group.parameters, fields


def _optimizer_state(snapshot: Snapshot, copy: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter name -> state key -> tensor, in the order of the groups."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for names, _ in _groups(snapshot):
        state.update({name: {} for name in names})
    for key, (spec, data) in snapshot.tensors.items():
        kind, _, rest = key.partition("/")
        if kind != "optimizer":
            continue
        name, _, part = rest.rpartition("/")
        if name not in state:
            raise FlowcheckError(f"step {snapshot.step} of run {snapshot.run}: {key} is in no param group")
        state[name][part] = _tensor(spec, data, copy)
    return {name: entry for name, entry in state.items() if entry}


def _fresh_state(snapshot: Snapshot, name: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state that the optimizer would make for a parameter at its first step, {} if zeros are not that."""
    import torch

    spec = snapshot.tensors[f"model/{name}"][0]
    if snapshot.description.optimizer.name == "SGD":
        keys = ["momentum_buffer"] if fields.get("momentum") and not fields.get("dampening") else []
    else:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if fields.get("amsgrad") else [])]
    zeros = {key: _tensor(spec, np.zeros(spec.nbytes, np.uint8), copy=False) for key in keys}
    if "exp_avg" in zeros:
        return {"step": torch.tensor(0.0, dtype=torch.float32), **zeros}
    return zeros


def _nbytes(value: Any) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(item) for item in value.values())
    return 0
