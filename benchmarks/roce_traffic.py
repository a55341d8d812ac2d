"""RoCEv2 frames of NCCL ring all-reduces as the port of one rank shows them, made by the lab's generator, in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowcheck.lab.addresses import Port
from flowcheck.lab.nccl_wire import Call, Communicator, Work, frames_of, mirrored
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.rehearsal import group_of
from mirror.block import Block
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.schedule import LL, LL128, SIMPLE

VERSION = "2.26.2"
RANKS = 4
WARM, TIMED = 2, 2
"""Collectives before the clock starts (after them memory is reused) and after."""
RING_BLOCK = 1 << 20
"""Bytes of frames in a block, as in a capture ring of the daemon's default."""
PROTOCOLS = {"LL": LL, "LL128": LL128, "Simple": SIMPLE}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Both directions of rank 1's port: blocks of the collectives that warm up, and of those that are timed."""

    name: str
    mtu: int
    size: int
    """Bytes of the tensor."""
    warm: list[Block]
    timed: list[Block]
    results: list[np.ndarray]
    """uint8, of each collective: the reduced tensor."""
    group: NcclGroup

    @property
    def protocol(self) -> int:
        return PROTOCOLS[self.name]


def make(name: str, mtu: int, floats: int) -> Traffic:
    """All-reduces of `floats` random float32 by one protocol."""
    job = Job(ranks=RANKS, version=VERSION, algorithm="ring", protocol=name.lower(), mtu=mtu)
    communicator = Communicator(job)
    dice = np.random.default_rng(1)
    port = [(Port(1, 0), way) for way in ("in", "out")]
    clock, results = 1_700_000_000_000_000_000, []
    blocks: tuple[list[Block], list[Block]] = ([], [])
    for number in range(WARM + TIMED):
        call = Call("allreduce", [dice.standard_normal(floats, np.float32) for _ in range(RANKS)])
        sent = mirrored(frames_of(job, [call], start=clock, communicator=communicator), port)
        clock = sent[-1][0] + 1000
        result = Work(job, call).result
        assert result is not None
        results.append(result.view(np.uint8))
        blocks[number >= WARM].extend(_blocks([(time, frame) for time, _, frame in sent]))
    return Traffic(name, mtu, 4 * floats, *blocks, results, group_of(job, "bench"))


def _blocks(frames: list[tuple[int, bytes]]) -> list[Block]:
    """Frames at multiples of 16 in one piece of memory, as in a ring."""
    size = np.array([len(frame) for _, frame in frames], np.int64)
    room = (size + 15) & ~15
    offset = np.cumsum(room) - room
    memory = np.zeros(int(room.sum()), np.uint8)
    for at, (_, frame) in zip(offset.tolist(), frames, strict=True):
        memory[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
    times = np.array([time for time, _ in frames], np.int64)
    cuts = np.unique(np.searchsorted(offset, np.arange(0, len(memory) + RING_BLOCK, RING_BLOCK))).tolist()
    return [
        Block(memory, offset[a:b], size[a:b], size[a:b], times[a:b], np.full(b - a, -1, np.int64))
        for a, b in zip(cuts, [*cuts[1:], len(offset)], strict=True)
        if b > a
    ]
