"""Short chunks look like short copies: LL128 sends whole groups of 1920 bytes, and DDP tells its layout in as few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nccl_job import NcclJob, trained
from synthetic_job import Follower

from flowcheck.lab.addresses import Port
from reconstruct.nccl.evidence import _orders


def pinned(algorithm: str, protocol: str, **nccl: Any) -> dict[str, Any]:
    told = {"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol}
    return {"nccl": {"algorithm": algorithm, "protocol": protocol, **nccl}, "told": told}


@pytest.mark.parametrize("version", ["2.19.4", "2.21.5", "2.22.3", "2.28.9"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_layout_is_not_taken_for_the_beginning_of_a_bucket(world: int, version: str) -> None:
    for protocol, per_block in (("ll128", 1), ("ll128", 16), ("ll", 16), ("simple", 16)):
        follower = Follower(trained(4, world=world, **pinned("ring", protocol, version=version)))
        follower.run(per_block=per_block).check(4)


def test_buckets_larger_than_65536_bytes_of_short_chunks() -> None:
    """32 ranks, 4 channels: 171,264 bytes in chunks of 1344, 2048 on the wire as the layout's."""
    job = NcclJob(
        32, sizes=(28_368, 14_448), initial=((0, 1),),
        mirrored=[(Port(0, rail), way) for rail in (0, 1) for way in ("in", "out")],
        rebuilt=((0,), (1,)),
        **pinned("ring", "ll128", version="2.22.3", channels=4, gpus_per_node=4, rails=2, mtu=4096),
    )  # fmt: skip
    job.attach()
    for _ in range(3):
        job.usual_step(canaries=2)
    follower = Follower(job).run()
    follower.check(3)
    assert follower.pipeline.counters()["nccl_collectives"] == 7


def test_what_a_broadcast_of_the_order_can_tell() -> None:
    garbage = [7, -1, 1 << 20]
    for told, found in (([2, 0, 1, 2], [(3, 2)]), ([0, 1], [(1, 1)]), ([1, 0, 2, 2], [(2, 2), (3, 2)])):
        assert _orders(np.array([*told, *garbage], np.int32)) == found
    gradients = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    for values in (gradients, np.zeros(500, np.float32), np.full(500, 1e-45, np.float32)):
        assert _orders(values.view(np.int32)) == []
