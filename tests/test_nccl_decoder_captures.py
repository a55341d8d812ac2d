"""The NCCL decoder on recorded traffic of NCCL 2.19, from frames to tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from nccl_frames import Flow, Message, frames, messages
from nccl_traffic import Rig
from tcp_frames import block_of

from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.schedule import LL, LL128, RING, SIMPLE

RANK0 = "fe80::e42:a1ff:fe9f:58f8"
RANK1, RANK1B = "fe80::ac0:ebff:fe8c:282d", "fe80::ac0:ebff:fe8c:282c"
BUCKET = (20_000, 4)


def _group(channels: int = 1) -> NcclGroup:
    rings = tuple((0, 1) for _ in range(channels))
    return NcclGroup("g", 2, "2.19.4", ((RANK0,), (RANK1, RANK1B)), (0, 1), channels, rings, (RING,),
                     (LL, LL128, SIMPLE), 3, 1, (), (), 0)  # fmt: skip


def _run(path: Path, rig: Rig, wanted: Callable[[bytes], bool] = lambda frame: True) -> Rig:
    part: list[tuple[int, bytes]] = []
    for time, frame in [*frames(path), (-1, b"")]:
        if time >= 0 and wanted(frame):
            part.append((time, frame))
        if part and (len(part) == 64 or time < 0):
            rig.now = max(rig.now, max(t for t, _ in part))
            rig._take(rig.roce.feed(block_of([f for _, f in part], [t for t, _ in part]), rig.now))
            part = []
    rig.finish()
    return rig


def _from(address: str) -> Callable[[bytes], bool]:
    from ipaddress import ip_address

    return lambda frame: frame[12:14] == b"\x86\xdd" and frame[22:38] == ip_address(address).packed


@pytest.fixture(scope="module")
def job(shared: Path) -> tuple[Path, dict[Flow, list[Message]], int]:
    """(file, its messages, time at which DDP's start-up is over)."""
    path = shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng"
    flows = messages(path)
    (out,) = [sent for flow, sent in flows.items() if flow[2] == 0x453]
    return path, flows, out[2].time + 1


def test_both_directions_give_all_twenty(job: tuple[Path, dict[Flow, list[Message]], int]) -> None:
    path, flows, attached = job
    rig = _run(path, Rig(_group(), {BUCKET}, sequence=3, attached=attached))
    assert rig.reduced == [3, *range(6, 25)] and not rig.lost and not rig.conflicts
    (sends,) = [sent for flow, sent in flows.items() if flow[2] == 0x456]
    for tag, send in zip(rig.reduced, sends, strict=True):
        landing = rig.landing(tag)
        assert landing is not None and landing.data[4 * 3072 :].tobytes() == bytes(send.data)
    # DDP's rebuilt layout: parameter 0 in the first of 1 bucket; one parameter in it.
    assert sorted(rig.messages) == [4, 5]
    assert rig.messages[4].view(np.int32).tolist() == [0, 1] and rig.messages[5].view(np.int32)[0] == 1
    # The job's own sends are on a connection of their own, which is left alone.
    assert rig.decoder.links("g") == {(0, 1), (1, 0)} and rig.decoder.coverage("g") == 1.0


@pytest.mark.parametrize(("address", "hole", "tags"), [
    (RANK0, [12288, 7712], [3, *range(6, 25)]),
    (RANK1, [0, 12288], list(range(3, 23))),  # DDP's broadcasts do not pass here
])  # fmt: skip
def test_one_direction_gives_its_chunk(
    job: tuple[Path, dict[Flow, list[Message]], int], address: str, hole: list[int], tags: list[int]
) -> None:
    path, _, attached = job
    full = _run(path, Rig(_group(), {BUCKET}, sequence=3, attached=attached))
    rig = _run(path, Rig(_group(), {BUCKET}, sequence=3, attached=attached), _from(address))
    assert not rig.reduced and not rig.conflicts
    for tag, same in zip(tags, full.reduced, strict=True):
        landing, whole = rig.landing(tag), full.landing(same)
        assert landing is not None and whole is not None and landing.holes() == [hole]
        (piece,) = landing.ranges()
        assert (landing.data[slice(*piece)] == whole.data[slice(*piece)]).all()


@pytest.mark.parametrize("name", ["allreduce+p2p", "allreduce+partial_p2p_new", "rdma32"])
def test_two_channels_and_adaptive_routing(shared: Path, name: str) -> None:
    rig = _run(shared / "captures" / "nccl" / f"{name}.pcapng", Rig(_group(4), {BUCKET}))
    assert rig.reduced == [0] and not rig.conflicts and not rig.lost
    landing = rig.landing(0)
    assert landing is not None
    assert (landing.data.view(np.int32) == 2 * (np.arange(5000) % 10)).all()


def test_a_hole_of_the_recording(shared: Path) -> None:
    path = shared / "captures" / "nccl" / "iter_80000.pcapng"
    flows = messages(path)
    (out,) = [sent for flow, sent in flows.items() if flow[2] == 1300]
    rig = _run(path, Rig(_group(), {(40_000, 4)}, sequence=3, attached=out[3].time + 1))
    assert not rig.reduced and not rig.conflicts
    landing = rig.landing(3)
    assert landing is not None
    # Rank 1's final message is chunk 1, floats 5120..10000. Its packets 62..76 are missing: fifteen times 512 bytes.
    back = flows[next(flow for flow in flows if flow[2] == 0xC99)][2]
    lost = 20480 + (62 - back.first_psn) * 512
    assert [lost, 15 * 512] in landing.holes()
    assert all(end <= lost or start >= lost + 15 * 512 for start, end in landing.ranges())
    assert landing.covered > 0
