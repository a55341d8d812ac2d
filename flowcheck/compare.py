"""`flowcheck compare`: a job's state against the trainer's own, or a step against a checkpoint file, by tensor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowcheck.connection import Connection
from flowcheck.errors import FlowcheckError, NothingRestorable, UsageError
from flowcheck.restore import Step, read
from flowcheck.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

__all__ = ["against_file", "against_trainer", "lines"]

ASK_EVERY_S = 0.2


def against_trainer(endpoint: str, run: str | None, timeout: float) -> dict[str, Any]:
    """The report of a comparison that the daemon at `endpoint` makes now: see `flowcheck.comparing.Comparing.report`.

    timeout: seconds; a trainer answers at the end of its next step. FlowcheckError without an answer by then, or where
    the job is not followed.
    """
    deadline = time.monotonic() + timeout
    with Connection(endpoint) as connection:
        number = None
        while True:
            left = max(0.1, deadline - time.monotonic())
            reply = connection.request("compare", "compare-reply", min(left, 30.0), run=run, number=number)
            report: dict[str, Any] | None = reply["report"]
            if report is not None:
                return report
            number = reply["number"]
            if time.monotonic() > deadline:
                raise FlowcheckError(f"no comparison within {timeout:g} s: are steps being made?")
            time.sleep(ASK_EVERY_S)


def against_file(source: str, checkpoint: Path, run: str | None, step: Step | None) -> dict[str, Any]:
    """Step `step` from a daemon or a store against a checkpoint: a file of torch.save in the form of `flowcheck
    restore`, or a folder of torch.distributed.checkpoint. Returns a report as `against_trainer` does.

    step: None for the checkpoint's own, where it tells one. Raises what `flowcheck.restore.read` does, and UsageError
    for a checkpoint that cannot be read.
    """
    if checkpoint.is_dir():
        return _report(*_distributed(source, checkpoint, run, step))
    content = _load(checkpoint)
    if step is None:
        step = content["step"] if isinstance(content.get("step"), int) else "latest"
    snapshot = read(source, step, run)
    from flowcheck.formats import to_torch

    own, theirs = (_named(side, snapshot) for side in (to_torch(snapshot, copy=False), content))
    return _report(snapshot, own, theirs)


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise NothingRestorable(f"{path}: no such file") from None
    except Exception as error:
        raise UsageError(f"{path} is no checkpoint that torch.load reads: {str(error).splitlines()[0]:.200}") from None
    if not isinstance(content, dict) or "model" not in content:
        raise UsageError(f"{path} has no entry 'model': save {{'model': ..., 'optimizer': ...}} as restore does")
    return content


def _distributed(
    source: str, folder: Path, run: str | None, step: Step | None
) -> tuple[Snapshot, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    from flowcheck.formats import to_dcp

    reader = checkpoint.FileSystemReader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
        theirs: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if step is None and isinstance(entries.get("step"), BytesStorageMetadata):
            theirs["step"] = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as no_dist asks for
            checkpoint.load(theirs, storage_reader=reader, no_dist=True)
    except Exception as error:
        raise UsageError(f"{folder} is no checkpoint of torch.distributed: {str(error).splitlines()[0]:.200}") from None
    told = theirs.pop("step", None)
    if step is None:
        step = told if isinstance(told, int) else "latest"
    snapshot = read(source, step, run)
    flat, _ = flatten_state_dict(to_dcp(snapshot, copy=False))
    return snapshot, {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}, theirs


def _named(content: Mapping[str, Any], snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """The tensors of a state in the form of `flowcheck restore`, under the keys of a snapshot as far as it has them."""
    named = {f"model/{name}": tensor for name, tensor in _tensors(content["model"])}
    names = [name for group in snapshot.description.optimizer.groups for name in group.parameters]
    optimizer = content.get("optimizer")
    state = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    for number, entry in state.items() if isinstance(state, Mapping) else ():
        known = isinstance(number, int) and 0 <= number < len(names)
        name = names[number] if known else str(number)
        named.update({f"optimizer/{name}/{key}": tensor for key, tensor in _tensors(entry)})
    return named


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested dictionary with its place, such as optimizer.state.0.exp_avg."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}" if path else str(key))


def _report(
    snapshot: Snapshot, own: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    differing = []
    for name in sorted({*own, *theirs}):
        found = _difference(name, own.get(name), theirs.get(name))
        if found is not None:
            differing.append(found)
    tensors = len(own.keys() & theirs.keys())
    return {
        "step": snapshot.step, "rank": None, "tensors": tensors, "unknown": [], "differing": differing, "more": 0,
        "problem": None,
    }  # fmt: skip


def _difference(name: str, own: torch.Tensor | None, theirs: torch.Tensor | None) -> dict[str, Any] | None:
    from reconstruct.ulps import gap

    entry = {"tensor": name, "elements": None, "ulps": None, "relative": None, "note": None}
    if own is None or theirs is None:
        return {**entry, "note": f"only {'the checkpoint' if own is None else 'the step'} has it"}
    if own.shape != theirs.shape or own.dtype != theirs.dtype:
        return {**entry, "note": f"{own.dtype} {tuple(own.shape)} and {theirs.dtype} {tuple(theirs.shape)}"}
    found = gap(str(own.dtype).removeprefix("torch."), _bytes(own), _bytes(theirs))
    if found is None:
        return None
    return {**entry, "elements": found.elements, "ulps": found.ulps, "relative": found.relative}


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return np.asarray(flat.view(torch.uint8).numpy())


def lines(report: Mapping[str, Any], source: str, other: str) -> list[str]:
    """A report for people. FlowcheckError if nothing was compared."""
    if report["problem"]:
        raise FlowcheckError(f"nothing was compared: {report['problem']}")
    found = []
    for entry in report["differing"]:
        how = entry["note"] or "differs"
        if entry["elements"] is not None:
            far = f"{entry['ulps']} ulp, {entry['relative']:.3g} relative"
            how = f"{entry['elements']} elements differ, by {far} at most"
        found.append(f"{entry['tensor']}: {how}")
    if report["more"]:
        found.append(f"and {report['more']} more")
    if report["unknown"]:
        found.append(f"not compared, as elements are unknown: {', '.join(report['unknown'])}")
    count = len(report["differing"]) + report["more"]
    verdict = f"{count} tensors differ" if count else "equal to the bit"
    return [*found, f"step {report['step']}, {report['tensors']} tensors of {source} and {other}: {verdict}"]
