"""Made-up NCCL traffic for a decoder, so that all kernels are compiled before the first real frame comes.

Which functions of the planning of collectives are called, and with what, depends on the traffic; a list of them would
soon be wrong. The frames are the lab's.
"""

from __future__ import annotations

import numpy as np

from flowcheck.lab.addresses import training_address
from flowcheck.lab.nccl_wire import Call, frames_of
from flowcheck.lab.nccl_wire_job import Job
from mirror.block import Block
from reconstruct.decoder import ALLREDUCE, RAW, AllReduce, Plan, Request
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.schedule import LL, LL128, RING, SIMPLE

__all__ = ["ITEMSIZE", "PROTOCOLS", "SIZE", "planner", "rehearsal"]

SIZE, ITEMSIZE = 2400, 4
"""Of the all-reduces, bytes."""
PROTOCOLS = {"ll": LL, "ll128": LL128, "simple": SIMPLE}


def rehearsal(protocol: str) -> tuple[NcclGroup, Block]:
    """A communicator of two ranks, and the frames of a broadcast and three all-reduces."""
    job = Job(2, algorithm="ring", protocol=protocol)
    sums = [np.arange(SIZE // ITEMSIZE, dtype=np.float32)] * job.ranks
    calls = [Call("broadcast", [np.arange(64, dtype=np.uint8)] * job.ranks), *(Call("allreduce", sums),) * 3]
    made = frames_of(job, calls)
    size = np.array([len(frame) for _, _, frame in made], np.int64)
    offset = np.concatenate(([0], np.cumsum(size)[:-1])).astype(np.int64)
    base = np.frombuffer(bytearray(b"".join(frame for _, _, frame in made)), np.uint8)
    times = np.array([time for time, _, _ in made], np.int64)
    return _group(job, protocol), Block(base, offset, size, size, times, np.full(len(made), -1, np.int64))


def _group(job: Job, protocol: str) -> NcclGroup:
    return NcclGroup(
        name=protocol, world_size=job.ranks, version=job.version,
        addresses=tuple((training_address(port, job.ipv6),) for port in job.ports), nodes=job.node_of,
        channels=job.channels, rings=tuple(job.ring(channel) for channel in range(job.channels)), algorithms=(RING,),
        protocols=(PROTOCOLS[protocol],), tree_pattern=job.tree_pattern, search_channels=0, chains=(), heads=(),
        nvls_channels=0,
    )  # fmt: skip


def planner(request: Request) -> Plan:
    """The first all-reduce as one whose size is not known yet."""
    if request.kind != ALLREDUCE:
        return RAW
    return RAW if request.tag == 1 else AllReduce(SIZE, ITEMSIZE)
