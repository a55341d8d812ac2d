"""Asking a daemon: its status, and one whole step of a run. Only `load` imports torch, when it is called."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flowcheck.connection import Connection
from flowcheck.description import JobDescription, TensorSpec, check_scheduler
from flowcheck.errors import FlowcheckError, Revoked, UsageError
from flowcheck.protocol import CHUNK, HEADER_KEY, WINDOW
from flowcheck.remote import is_remote
from flowcheck.sessions import digest
from flowcheck.snapshot import Snapshot
from flowcheck.specs import MAX_TENSORS
from flowcheck.storereader import open_store
from flowcheck.values import Reader, decode_value, text
from reconstruct.unknown import Unknown

Progress = Callable[[int, int], None]
"""Called with (bytes received, bytes altogether)."""
TRIES = 5


def status(endpoint: str, timeout: float = 5.0) -> dict[str, Any]:
    """What the daemon at `endpoint` says of itself. Raises FlowcheckError when it does not answer in time."""
    with Connection(endpoint) as connection:
        result: dict[str, Any] = connection.request("status", "status-reply", timeout)["status"]
        return result


def fetch(
    endpoint: str,
    run: str | None = None,
    step: int | Literal["latest"] = "latest",
    progress: Progress | None = None,
    *,
    allow_unknown: bool = False,
    timeout: float = 30.0,
) -> Snapshot:
    """One whole step from the daemon at `endpoint`; every chunk is checked. allow_unknown: take the live step even if
    elements of it are unknown: `Snapshot.unknown`.

    run: None where the daemon follows one run only. timeout: seconds without any progress.
    Where training overtakes the reading, the latest step is asked for anew, `TRIES` times altogether.
    Raises NothingRestorable if the step is not held, Revoked if it is no longer, FlowcheckError if the daemon is silent
    or cuts it.
    """
    if step != "latest" and not isinstance(step, int):
        raise UsageError(f"step {step!r}: give 'latest' or a number")
    for _ in range(TRIES - 1 if step == "latest" else 0):
        with contextlib.suppress(Revoked):
            return _fetch(endpoint, run, step, progress, allow_unknown, timeout)
    return _fetch(endpoint, run, step, progress, allow_unknown, timeout)


def _fetch(
    endpoint: str,
    run: str | None,
    step: int | Literal["latest"],
    progress: Progress | None,
    allow_unknown: bool,
    timeout: float,
) -> Snapshot:
    with Connection(endpoint) as connection:
        asked = {"run": run, "step": step, "allow_unknown": allow_unknown}
        opened = connection.request("fetch-begin", "fetch-open", timeout, **asked)
        session = opened["session"]
        try:
            header = np.empty(opened["bytes"], np.uint8)
            _read(connection, session, [(HEADER_KEY, header)], None, timeout)
            snapshot = _snapshot(header.tobytes())
            wanted = [(key, data) for key, (_, data) in snapshot.tensors.items()]
            _read(connection, session, wanted, progress, timeout)
        finally:
            with contextlib.suppress(FlowcheckError):
                connection.send("fetch-end", timeout=0.1, session=session)
            connection.close(linger=0.5)
    return snapshot


def snapshot(
    source: str,
    run: str | None = None,
    step: int | Literal["latest"] = "latest",
    *,
    progress: Progress | None = None,
    allow_unknown: bool = False,
) -> Snapshot:
    """One whole step from a daemon's endpoint (tcp://HOST:PORT, ipc://PATH), a store folder or its fsspec URL.

    allow_unknown: see `fetch`; what a store holds is known. Raises as `fetch` does, and VerificationFailed for a
    damaged store.
    """
    if "://" in source and not is_remote(source):
        return fetch(source, run, step, progress, allow_unknown=allow_unknown)
    notes: list[str] = []
    store = open_store(source)
    state = store.load(run, step, progress=progress, skipped=lambda line: notes.append(f"passed over: {line}"))
    state.notes += notes
    return state


def load(source: str, step: int | Literal["latest"] = "latest", run: str | None = None) -> dict[str, Any]:
    """The state of a step as `flowcheck restore --format torch` writes it, as live torch tensors.

    source: an endpoint (tcp://HOST:PORT, ipc://PATH), a store folder, or the URL of one (s3://, file://, ...).
    Returns {"model", "optimizer", "step", "epoch", "run", "not_covered"}. Raises as `snapshot` does.
    """
    from flowcheck.formats import to_torch

    state = snapshot(str(source), run, step)
    for note in state.notes:
        warnings.warn(f"flowcheck: {note}", RuntimeWarning, stacklevel=2)
    return to_torch(state, copy=False)  # nobody else holds its arrays


@dataclass(slots=True)
class _Piece:
    key: str
    offset: int
    target: np.ndarray


def _pieces(wanted: list[tuple[str, np.ndarray]]) -> Iterator[_Piece]:
    for key, data in wanted:
        for offset in range(0, data.nbytes, CHUNK):
            yield _Piece(key, offset, data[offset : offset + CHUNK])


def _read(
    connection: Connection,
    session: int,
    wanted: list[tuple[str, np.ndarray]],
    progress: Progress | None,
    timeout: float,
) -> None:
    """Fill uint8 arrays with their tensors' bytes, at most `WINDOW` requests ahead of the answers."""
    total = sum(data.nbytes for _, data in wanted)
    pieces = enumerate(_pieces(wanted))
    waiting: dict[int, _Piece] = {}
    done = 0
    while True:
        while len(waiting) < WINDOW and (item := next(pieces, None)) is not None:
            number, piece = item
            fields = {"key": piece.key, "offset": piece.offset, "length": piece.target.nbytes}
            connection.send("fetch-read", timeout=timeout, session=session, request=number, **fields)
            waiting[number] = piece
        if not waiting:
            return
        _, answer, data = connection.receive("fetch-data", timeout=timeout)
        piece_or_none = waiting.pop(answer["request"], None)
        if piece_or_none is None or len(data) != piece_or_none.target.nbytes:
            raise FlowcheckError(f"the daemon at {connection.endpoint} sent bytes that were not asked for")
        if digest(data) != answer["digest"]:
            raise FlowcheckError(
                f"{piece_or_none.key}: damaged on the way from {connection.endpoint}: try again"
            )
        piece_or_none.target[:] = np.frombuffer(data, np.uint8)
        done += len(data)
        if progress is not None:
            progress(done, total)


def _snapshot(header: bytes) -> Snapshot:
    """The snapshot of a fetch's header, with memory for its tensors."""
    reader = Reader(json.loads(header), "snapshot")
    description = JobDescription.from_json(reader.raw("description"))
    snapshot = Snapshot(
        description=description,
        run=reader.text("run", 64),
        epoch=reader.integer("epoch", 0, 1 << 62),
        step=reader.integer("step", 0, 1 << 62),
        confirmed=reader.boolean("confirmed"),
        exact=reader.boolean("exact"),
        reasons=reader.sequence("reasons", 1024, text),
        not_covered=reader.sequence("not_covered", MAX_TENSORS, text),
        groups=reader.sequence("groups", 1 << 14, decode_value),
        scheduler=check_scheduler(reader.value("scheduler"), "scheduler"),
        notes=reader.sequence("notes", 64, text),
        unknown=Unknown.from_json(reader.raw("unknown"), "snapshot.unknown"),
    )
    table = reader.sequence("tensors", 4 * MAX_TENSORS, _table_entry)
    try:
        snapshot.tensors.update((key, (spec, np.empty(spec.nbytes, np.uint8))) for key, spec in table)
    except MemoryError:
        nbytes = sum(spec.nbytes for _, spec in table)
        raise FlowcheckError(f"the step takes {nbytes >> 20} MiB, more memory than this machine gives") from None
    reader.done()
    return snapshot


def _table_entry(value: Any, path: str) -> tuple[str, TensorSpec]:
    if not isinstance(value, list) or len(value) != 2:
        raise FlowcheckError(f"{path}: expected [key, spec]")
    return text(value[0], path, 4096), TensorSpec.from_json(value[1], path)
