"""What NCCL says about a communicator when asked to (NCCL_DEBUG=INFO), word for word as far as others read it.

Sources: NCCL's src/init.cc, src/graph/rings.cc, src/graph/connect.cc, src/transport/net.cc and net_ib; public logs.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from flowcheck.lab.addresses import training_address
from flowcheck.lab.nccl_wire_job import NVLSTREE, Job
from flowcheck.lab.nccl_wire_link import Connection

_CHANNEL_LINE, _TREES_LINE = 127, 1023
"""NCCL cuts these lines."""
_MTU = {1024: 3, 4096: 5}


def debug_file(environment: Mapping[str, str]) -> Path | None:
    """NCCL_DEBUG_FILE with %h and %p filled in; None where NCCL would log nowhere."""
    name = environment.get("NCCL_DEBUG_FILE")
    if not name or environment.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE"):
        return None
    return Path(name.replace("%h", socket.gethostname().partition(".")[0]).replace("%p", str(os.getpid())))


def log_lines(job: Job, rank: int, connections: list[Connection], environment: Mapping[str, str],
              sockets: bool = False) -> Iterator[str]:
    """What `rank` logs while the communicator comes up, one line each.

    `connections`: those with an end at `rank`, in the order in which they are made. sockets: they are TCP's.
    """
    local = (job.members or tuple(range(job.ranks)))[rank] % job.gpus_per_node
    head = f"{socket.gethostname()}:{os.getpid()}:{threading.get_native_id()} [{local}] NCCL INFO "
    node = job.node_of[rank]
    comm = f"comm 0x{0x55550000 + job.number * 0x1000:x}"
    identity = f"commId 0x{0x1F00D + job.number:x}"
    if rank == 0:
        yield f"NCCL version {job.version}+cuda12.4"
    if sockets:
        yield f"{head}NET/Socket : Using [0]train0:{training_address(job.ports[rank], job.ipv6)}<0>"
        yield f"{head}Using network Socket"
    else:
        yield from _adapters(job, rank, head)
    place = f"rank {rank} nranks {job.ranks} cudaDev {local} nvmlDev {local} busId {(local + 1) << 12:x} {identity}"
    yield f"{head}{comm} {place} - Init START"
    for name in sorted(environment):
        if name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"):
            yield f"{head}{name} set by environment to {environment[name]}."
    yield (
        f"{head}{comm} rank {rank} nRanks {job.ranks} nNodes {job.nodes} localRanks {len(job.node_ranks[node])} "
        f"localRank {job.node_ranks[node].index(rank)} MNNVL 0"
    )
    if job.algorithm == NVLSTREE:
        for index in range(job.heads):
            yield f"{head}NVLS Head {index:2d}: " + " ".join(f"{ranks[index]:2d}" for ranks in job.node_ranks[:20])
    if rank == 0:
        for channel in range(job.channels):
            ranks = "".join(f"{member:4d}" for member in job.ring(channel))
            yield f"{head}{f'Channel {channel:02d}/{job.channels:02d} :{ranks}'[:_CHANNEL_LINE]}"
    for channel in range(job.channels):
        ring = job.ring(channel)
        at = ring.index(rank)
        yield f"{head}Ring {channel:02d} : {ring[at - 1]} -> {rank} -> {ring[(at + 1) % job.ranks]}"
    trees = [_tree(job, channel, rank) for channel in range(job.channels)]
    line = "".join(f" [{channel}] {below}->{rank}->{up}" for channel, (below, up) in enumerate(trees))
    yield f"{head}{f'Trees{line}'[:_TREES_LINE]}"
    yield f"{head}P2P Chunksize set to 131072"
    yield from _connected(job, rank, [c for c in connections if _on_ring(job, c)], head, sockets)
    yield f"{head}Connected all rings"
    yield from _connected(job, rank, [c for c in connections if not _on_ring(job, c)], head, sockets)
    yield f"{head}Connected all trees"
    nvls = job.channels if job.algorithm == NVLSTREE else 0
    yield (
        f"{head}{job.channels} coll channels, 0 collnet channels, {nvls} nvls channels, {job.channels} p2p channels, "
        f"{job.channels} p2p channels per peer"
    )
    yield f"{head}{comm} {place} - Init COMPLETE"


def _adapters(job: Job, rank: int, head: str) -> Iterator[str]:
    devices = " ".join(f"[{rail}]mlx5_{rail}:1/RoCE" for rail in range(job.rails))
    yield f"{head}NET/IB : Using {devices} [RO]; OOB mgmt0:10.78.0.{job.hosts[rank] + 1}<0>"
    yield f"{head}Using network IB"


def _tree(job: Job, channel: int, rank: int) -> tuple[str, int]:
    children = job.tree(channel)[1]
    below = [*children[rank], -1, -1, -1][:3]
    up = next((parent for parent, found in enumerate(children) if rank in found), -1)
    return "/".join(str(child) for child in below), up


def _on_ring(job: Job, connection: Connection) -> bool:
    ring = job.ring(connection.channel)
    return ring[(ring.index(connection.sender) + 1) % job.ranks] == connection.receiver


def _connected(
    job: Job, rank: int, connections: list[Connection], head: str, sockets: bool
) -> Iterator[str]:  # fmt: skip
    members = job.members or tuple(range(job.ranks))
    device = job.ports[rank].rail
    network = "Socket" if sockets else "IB"
    for direction in ("receive", "send"):
        for connection in connections:
            ends = (connection.sender, connection.receiver)
            if rank != ends[direction == "receive"]:
                continue
            a, b = (f"{end}[{members[end] % job.gpus_per_node}]" for end in ends)
            yield f"{head}Channel {connection.channel:02d}/0 : {a} -> {b} [{direction}] via NET/{network}/{device}"
    if sockets:
        return
    address = ipaddress.ip_address(training_address(job.ports[rank], job.ipv6))
    gid = (b"\0" * 10 + b"\xff\xff" + address.packed)[-16:]
    prefix, interface = struct.unpack("<QQ", gid)
    for connection in connections:
        own = connection.forward if rank == connection.receiver else connection.backward
        for flow in own:
            yield (
                f"{head}NET/IB: Dev {device} Port 1 qpn {flow.qp} mtu {_MTU[job.mtu]} GID 3 ({prefix:X}/{interface:X})"
            )
