"""Plans of single collectives, and what tests ask of their messages."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconstruct.nccl import schedule
from reconstruct.nccl.plan import Planned, plan
from reconstruct.nccl.schedule import LL, LL128, SIMPLE
from reconstruct.nccl.split import Collective, Communicator
from reconstruct.nccl.versions import traits

VERSIONS = ["2.18.6", "2.19.4", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.26.2", "2.28.9", "2.29.2", "2.30.7"]
PROTOCOLS = [LL, LL128, SIMPLE]


def plan_one(version: str, ranks: int, channels: int, call: Collective, head: int = 0, **more: Any) -> Planned:
    comm = Communicator(traits(version), ranks, channels, more.pop("nodes", ranks), **more)
    (planned,) = plan(comm, [call], head)
    return planned


def floats(planned: Planned, position: int) -> dict[int, list[tuple[int, int, int, bool]]]:
    """Channel -> (first float, floats, wire bytes, final) of each message."""
    return {
        channel: [
            (o // 4, n // 4, int(schedule.wire_bytes(row[schedule.PROTOCOL], n, 0)), bool(final))
            for *_, o, n, final in schedule.places(row, position).tolist()
        ]
        for channel, row in zip(planned.channels, planned.rows, strict=True)
    }


def shown(row: np.ndarray, position: int) -> np.ndarray:
    """int64[n, 2]: (first byte, end) of final values, in the order in which they pass, without empty messages."""
    sent = schedule.places(row, position)
    sent = sent[(sent[:, 6] > 0) & (sent[:, 5] > 0)]
    return np.stack([sent[:, 4], sent[:, 4] + sent[:, 5]], 1)


def room(row: np.ndarray) -> int:
    """What a CTS entry of this collective announces: bytes of a message's slots."""
    return int(schedule.SLOT_BYTES[row[schedule.PROTOCOL]] * row[schedule.SLICE_STEPS])


def unknown(protocol: int, begin: int, end: int, length: int) -> slice:
    """The data bytes, of `length`, that nobody knows if wire bytes begin..end are missing, by whole units."""
    wire, data = {LL: (16, 8), LL128: (1024, 960), SIMPLE: (1, 1)}[protocol]
    return slice(min(begin // wire * data, length), min(-(-end // wire) * data, length))


@dataclass(frozen=True)
class Sent:
    """One message of a connection. at: which collective; index: which message of it; step: counted from the start."""

    at: int
    index: int
    step: int
    row: np.ndarray
    position: int


def in_order(rows: Iterable[tuple[np.ndarray, int]]) -> list[Sent]:
    """All messages of a connection that carries these (row, position) one after another, counted one by one."""
    result: list[Sent] = []
    step = 0
    for at, (row, position) in enumerate(rows):
        slices, each = int(row[schedule.SLICES]), int(row[schedule.SLICE_STEPS])
        while step % (slices * each):
            step += 1
        for index in range(schedule.messages(row, position)):
            result.append(Sent(at, index, step, row, position))
            step += each
    return result


def covered(pieces: list[np.ndarray]) -> tuple[int, int]:
    """(bytes covered, bytes in all pieces): equal if no two pieces overlap."""
    spans = np.concatenate(pieces) if pieces else np.empty((0, 2), np.int64)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    total = int((spans[:, 1] - spans[:, 0]).sum())
    if not len(spans):
        return 0, 0
    reach = np.maximum.accumulate(spans[:, 1])
    start = np.maximum(spans[:, 0], np.concatenate([[0], reach[:-1]]))
    return int(np.maximum(reach - start, 0).sum()), total


def check_fit(row: np.ndarray, sent: np.ndarray, tensor: int) -> None:
    assert (sent[:, 5] >= 0).all() and (sent[:, 4] >= 0).all()
    full = sent[sent[:, 5] > 0]
    assert (full[:, 4] + full[:, 5] <= tensor).all()
    largest = int(sent[:, 5].max(initial=0))
    assert schedule.wire_bytes(int(row[schedule.PROTOCOL]), largest, 0) <= room(row)
    assert (sent[:, 4:6] % row[schedule.ITEMSIZE] == 0).all()


def counts(rng: random.Random, ranks: int) -> list[int]:
    return [1, ranks, rng.randint(2, 5000), rng.randint(5001, 300_000), rng.randint(300_001, 8_000_000)]
