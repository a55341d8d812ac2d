"""Made-up NCCL traffic for a decoder, so that all kernels are compiled before the first real frame comes.

Which functions of the planning of collectives are called, and with what, depends on the traffic; a list of them would
soon be wrong. The frames are the lab's.
"""

from __future__ import annotations

import numpy as np

from flowcheck.lab import nccl_wire_job as lab
from flowcheck.lab.addresses import Port, training_address
from flowcheck.lab.nccl_wire import Call, frames_of
from flowcheck.lab.nccl_wire_job import Job
from mirror.block import Block, pack
from reconstruct.decoder import ALLREDUCE, RAW, AllReduce, Plan, Request
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.schedule import LL, LL128, NVLSTREE, RING, SIMPLE, TREE

__all__ = ["ITEMSIZE", "PROTOCOLS", "SIZE", "group_of", "planner", "rehearsal"]

SIZE, ITEMSIZE = 2400, 4
"""Of the all-reduces, bytes."""
PROTOCOLS = {lab.LL: LL, lab.LL128: LL128, lab.SIMPLE: SIMPLE}
_ALGORITHMS = {lab.RING: RING, lab.TREE: TREE, lab.NVLSTREE: NVLSTREE}


def rehearsal(protocol: str) -> tuple[NcclGroup, Block]:
    """A communicator of two ranks, and the frames of a broadcast and three all-reduces."""
    job = Job(2, algorithm="ring", protocol=protocol)
    sums = [np.arange(SIZE // ITEMSIZE, dtype=np.float32)] * job.ranks
    calls = [Call("broadcast", [np.arange(64, dtype=np.uint8)] * job.ranks), *(Call("allreduce", sums),) * 3]
    made = frames_of(job, calls)
    return group_of(job, protocol), pack([frame for _, _, frame in made], [time for time, _, _ in made])


def group_of(job: Job, name: str) -> NcclGroup:
    """The communicator of a job of the lab, with the facts that its log gives."""
    nvls = job.algorithm == lab.NVLSTREE
    return NcclGroup(
        name, job.ranks, job.version,
        tuple(tuple(training_address(Port(host, rail), job.ipv6) for rail in range(job.rails)) for host in job.hosts),
        job.node_of, job.channels, tuple(job.ring(channel) for channel in range(job.channels)),
        (RING, TREE) if job.algorithm is None else (_ALGORITHMS[job.algorithm],),
        tuple(PROTOCOLS.values()) if job.protocol is None else (PROTOCOLS[job.protocol],),
        job.tree_pattern, job.search_channels,
        tuple(tuple(job.chain(node, k) for k in range(job.search_channels)) for node in range(job.nodes)),
        tuple(ranks[: job.heads] for ranks in job.node_ranks) if nvls else (), job.channels if nvls else 0,
        job.simple_threads, job.qps, job.split,
    )  # fmt: skip


def planner(request: Request) -> Plan:
    """The first all-reduce as one whose size is not known yet."""
    if request.kind != ALLREDUCE:
        return RAW
    return RAW if request.tag == 1 else AllReduce(SIZE, ITEMSIZE)
