"""Rank 0's side of an attach: the description and every tensor to the daemon, in bounded chunks, but for those that the
daemon finds in a checkpoint.

At most `WINDOW` chunks are on the way; the daemon's credits open the window again. CUDA tensors are copied chunk by
chunk, so an upload needs no second copy of the model on either side.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flowcheck.connection import Connection
from flowcheck.describe import memory_view
from flowcheck.description import JobDescription
from flowcheck.errors import FlowcheckError
from flowcheck.livestate import state_checksum
from flowcheck.protocol import CHUNK, WINDOW, checkpoint_seconds
from flowcheck.sessions import digest

log = logging.getLogger(__name__)

STALL_S = 30.0
"""Without any answer for so long, an upload is given up."""
COMMIT_S = 120.0
"""How long the daemon may take to open an epoch: it may write the job file first."""


def upload(
    connection: Connection,
    description: JobDescription,
    job: str,
    tensors: dict[str, torch.Tensor],
    limit_s: float,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Attach: returns the daemon's ack {"run", "epoch", "exact", "reasons", ...}.

    job: the token by which the job's agents are known; tensors: by key, in the order of `description.tensors()`;
    checkpoint: a path as the daemon sees it, from which it takes those that have the trainer's checksums.
    Raises the daemon's refusal, or Unreachable when it falls silent, or FlowcheckError after `limit_s` seconds
    altogether.
    """
    deadline = time.monotonic() + limit_s
    sums = b"" if checkpoint is None else _sums(description, tensors)
    session = _open(connection, description, job, late=False)
    if checkpoint is not None:
        tensors = _missing(connection, session, checkpoint, sums, tensors)
    waiting = 0
    for key, offset, data in _chunks(tensors):
        if time.monotonic() > deadline:
            raise FlowcheckError(f"the upload took more than {limit_s:g} s: is the network to the daemon slow?")
        if waiting == WINDOW:
            connection.receive("attach-credit", timeout=STALL_S)
            waiting -= 1
        checksum = digest(data)
        connection.send("attach-chunk", data, STALL_S, session=session, key=key, offset=offset, digest=checksum)
        waiting += 1
    for _ in range(waiting):
        connection.receive("attach-credit", timeout=STALL_S)
    return _commit(connection, session)


def join(connection: Connection, description: JobDescription, job: str) -> dict[str, Any]:
    """Attach to a daemon that joins late: the description alone. Returns and raises as `upload`."""
    return _commit(connection, _open(connection, description, job, late=True))


def _open(connection: Connection, description: JobDescription, job: str, late: bool) -> int:
    """Send the description; the number of the session that the daemon opened for it."""
    text = json.dumps(description.to_json(), separators=(",", ":"), allow_nan=False).encode()
    connection.send("attach-begin", bytes=len(text), digest=digest(text), job=job, late=late)
    for offset in range(0, len(text), CHUNK):
        connection.send("attach-text", text[offset : offset + CHUNK], offset=offset)
    session: int = connection.receive("attach-open", timeout=COMMIT_S)[1]["session"]
    return session


def _sums(description: JobDescription, tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes.fromhex(state_checksum(tensors[key])) for key, _ in description.tensors())


def _missing(
    connection: Connection, session: int, checkpoint: str, sums: bytes, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Have the daemon take what it can from a checkpoint; the tensors that are still to be sent."""
    for offset in range(0, len(sums), CHUNK):
        part = sums[offset : offset + CHUNK]
        connection.send("attach-checkpoint", part, STALL_S, session=session, path=checkpoint, offset=offset)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    _, found, bits = connection.receive("attach-missing", timeout=checkpoint_seconds(nbytes) + STALL_S)
    if len(bits) != -(-len(tensors) // 8):
        raise FlowcheckError(f"the daemon at {connection.endpoint} told of {8 * len(bits)} tensors, not {len(tensors)}")
    missing = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").tolist()
    left = {key: tensor for (key, tensor), bit in zip(tensors.items(), missing, strict=False) if bit}
    if left:
        text = "flowcheck: %d of %d tensors are uploaded that the daemon did not find in %s: %s"
        log.warning(text, len(left), len(tensors), checkpoint, found["problem"])
    else:
        log.info("flowcheck: the daemon took all %d tensors from %s", len(tensors), checkpoint)
    return left


def _commit(connection: Connection, session: int) -> dict[str, Any]:
    connection.send("attach-commit", session=session)
    ack: dict[str, Any] = connection.receive("attach-ack", timeout=COMMIT_S)[1]["ack"]
    return ack


def _chunks(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, int, np.ndarray]]:
    """(key, byte offset, bytes) of every tensor, in memory order."""
    for key, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        flat = memory_view(tensor).view(torch.uint8)
        for offset in range(0, flat.numel(), CHUNK):
            yield key, offset, flat[offset : offset + CHUNK].cpu().numpy()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a dense tensor's bytes in words of 8 where they are aligned, int64 on the tensor's device."""
    flat = memory_view(tensor).view(torch.uint8)
    whole = flat.numel() & ~7 if flat.storage_offset() % 8 == 0 else 0
    words = flat[:whole].view(torch.int64).sum()
    return words + flat[whole:].sum(dtype=torch.int64)


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """`checksum` of every tensor, with one synchronisation per device."""
    sums = {key: checksum(tensor) for key, tensor in tensors.items()}
    if not sums:
        return {}
    by_device: dict[torch.device, list[str]] = {}
    for key, value in sums.items():
        by_device.setdefault(value.device, []).append(key)
    result: dict[str, int] = {}
    for keys in by_device.values():
        result.update(zip(keys, torch.stack([sums[key] for key in keys]).tolist(), strict=True))
    return result
