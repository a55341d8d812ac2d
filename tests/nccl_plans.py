"""Plans of single collectives, and what tests ask of their messages."""

from __future__ import annotations

import random
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
    assert schedule.wire_bytes(int(row[schedule.PROTOCOL]), largest, 0) <= schedule.cts_size(row)
    assert (sent[:, 4:6] % row[schedule.ITEMSIZE] == 0).all()


def counts(rng: random.Random, ranks: int) -> list[int]:
    return [1, ranks, rng.randint(2, 5000), rng.randint(5001, 300_000), rng.randint(300_001, 8_000_000)]
