"""What of NCCL's traffic in a capture cannot be read, named, with what to change (reconstruct/nccl/refusals.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from flowcheck.inspect.nccl_flows import Connection, Flow, strange_rooms
from flowcheck.inspect.nccl_line import PROTOCOL, Line
from mirror.block import Block
from reconstruct.nccl.bootstrap import Setup
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.refusals import REFUSALS
from reconstruct.nccl.unreadable import infiniband_frame, reduce_scatter

__all__ = ["infiniband", "of_flows", "of_reading", "of_setup", "said"]

_INFINIBAND_LINK = 247
_LOOKED_AT = 64
_FEW = 8


def said(seen: str, *names: str) -> str:
    """What was seen, and what it is, with the remedy."""
    return f"{seen}: " + "; or ".join(str(REFUSALS[name]) for name in names)


def infiniband(block: Block) -> bool:
    """Whether a block's frames are InfiniBand's own."""
    if block.linktype == _INFINIBAND_LINK:
        return True
    if block.linktype == 1:
        return False
    frames = [
        block.base[at : at + size].tobytes()
        for at, size in zip(block.offset[:_LOOKED_AT].tolist(), block.caplen[:_LOOKED_AT].tolist(), strict=True)
    ]
    return bool(frames) and all(map(infiniband_frame, frames))


def of_flows(flows: Iterable[Flow], found: Sequence[Connection]) -> Iterator[str]:
    """Buffers of other sizes, messages outside of all buffers, immediates that are no sizes, messages of a plugin."""
    everything = list(flows)
    for flow in everything:
        strange = strange_rooms(flow)
        if strange is not None:
            name = "buffer-sizes" if strange[1] else "registered-buffers"
            sizes = ", ".join(map(str, sorted(strange[0])[:_FEW]))
            yield said(f"CTS entries on queue pair 0x{flow.key[3]:x} announce {sizes} bytes", name)
    joined = {flow.key for one in found for flow in one.data}
    for flow in everything:
        if flow.carries_data and _counts_up(flow):
            yield said(f"immediates on queue pair 0x{flow.key[3]:x} count up and tell no sizes", "receiver-matching")
        back = [one for one in everything if one.key[:3] == (flow.key[0], flow.key[2], flow.key[1]) and one.pieces]
        if flow.carries_data and flow.key not in joined and back and not any(map(_announces, back)):
            yield said(
                f"RDMA messages with immediates on queue pair 0x{flow.key[3]:x}, and no CTS entries the other way",
                "net-plugin",
            )


def _announces(flow: Flow) -> bool:
    return not flow.carries_data and any(piece.length in (32, 64) for piece in flow.pieces)


def _counts_up(flow: Flow) -> bool:
    """Whether immediates are consecutive numbers (in either byte order) and not lengths."""
    told = [piece for piece in flow.pieces if piece.imm is not None and piece.complete and piece.length > 0]
    if len(told) < _FEW:
        return False
    for order in ("big", "little"):
        values = [int.from_bytes((piece.imm or 0).to_bytes(4, "big"), order) for piece in told]  # type: ignore[arg-type]
        if any(value == piece.length for value, piece in zip(values, told, strict=True)):
            return False
        if all(b == a + 1 for a, b in pairwise(values)):
            return True
    return False


def of_reading(group: NcclGroup, lines: Sequence[Line]) -> Iterator[str]:
    """What messages that no collective explains look like."""
    for line in lines:
        room = next((p.room for flow in line.connection.data for p in flow.pieces if p.room), 0)
        lengths = np.array(line.ahead(), np.int64)
        protocols = group.protocols if line.connection.over_tcp else [PROTOCOL[room]] if room in PROTOCOL else []
        if line.edge.ring and any(reduce_scatter(group.world_size, protocol, lengths) for protocol in protocols):
            yield said(
                f"messages of rank {line.edge.sender} on channel {line.edge.channel} are as long as those of a "
                "reduce-scatter (or an all-gather)", "reduce-scatter",
            )  # fmt: skip
            return


def of_setup(setup: Setup, strange_blocks: int, rdma: bool, sockets: bool) -> Iterator[str]:
    """A release that is not known; a job that was set up and sends nothing that is seen."""
    if strange_blocks:
        yield said(f"{strange_blocks} NET/IB connections were set up with blocks of no known size", "unknown-version")
    if setup.communicators and not rdma and not sockets and not strange_blocks:
        yield said(
            "an NCCL communicator was set up, and none of its data were captured: mirror the ports that carry them; or "
            "they are on no Ethernet", "nvls", "efa", "net-plugin",
        )  # fmt: skip
