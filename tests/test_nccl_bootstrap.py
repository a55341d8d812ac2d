"""NCCL's set-up traffic: the captures' TCP, made-up records of other releases, hostile bytes, contradictions."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_nccl_group import group

from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.spans import HOLE
from mirror.tcp import TcpReassembler
from reconstruct.nccl.bootstrap import Member, NetConnection, Setup, SetUpStream, read_setup
from reconstruct.nccl.heads import MAGIC
from reconstruct.nccl.setup import Contradiction, check
from reconstruct.nccl.setup_watch import SetupWatcher
from reconstruct.nccl.streams import NcclStreams
from reconstruct.nccl.versions import ConnectionBlock, traits

ONE, TWO = ("10.0.0.1", 5001), ("10.0.0.2", 5002)


def watch(path: Path, lose: int = -1) -> SetupWatcher:
    """The set-up of a capture; `lose`: a span of data, by number, that becomes a hole."""
    source = CaptureFileSource([path])
    flows = Flows(4096)
    tcp, streams = TcpReassembler(flows), NcclStreams(flows, 0)
    seen = 0
    while (block := source.read(0.0)) is not None:
        spans = tcp.feed(block, int(block.ts.max(initial=0)))
        if 0 <= lose - seen < spans.n:
            spans.kind[lose - seen] = HOLE
        seen += spans.n
        streams.feed(spans)
        source.release(block)
    streams.feed(tcp.flush(1 << 62))
    source.close()
    return streams.setups


@pytest.fixture(scope="module")
def job(shared: Path) -> Setup:
    return watch(shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng").setup()


def test_captured_set_up_names_ranks_rings_and_queue_pairs(job: Setup) -> None:
    assert job.connections == () and len(job.communicators) == 2
    first, second = job.communicators
    for member in (first, second):
        assert (member.world_size, member.nodes, member.rings) == (2, (0, 1), ((0, 1),))
        assert (member.tree_pattern, member.search_channels, member.chains) == (3, 1, (((0,),), ((1,),)))
        assert member.versions == (((2, 18, 0), (2, 19, 99)),) and member.channels == 1
        assert all(c.versions == (((2, 19, 0), (2, 19, 99)),) for c in member.connections)
    # Data arrive at the receiver's queue pair, CTS entries at the sender's; the frames say so, too.
    assert {(c.sender, c.receiver): (c.sender_qps, c.receiver_qps) for c in first.connections} == {
        (0, 1): ((0x12E2,), (0x453,)), (1, 0): ((0x452,), (0x12E3,)),
    }  # fmt: skip
    ring = [c for c in second.connections if c.kind == "ring"]
    assert {(c.channel, c.sender, c.receiver) for c in ring} == {(0, 0, 1), (0, 1, 0)}
    (p2p,) = [c for c in second.connections if c.kind == "p2p"]
    assert (p2p.channel, p2p.sender, p2p.receiver_qps) == (-1, 0, (0x456,))
    assert p2p.sender_gid == "fe80::e42:a1ff:fe9f:58f8"


def test_four_channels_are_told_apart(shared: Path) -> None:
    member, _ = watch(shared / "captures" / "nccl" / "allreduce+p2p.pcapng").setup().communicators
    by_channel = {(c.channel, c.sender): c.receiver_qps[0] for c in member.connections if c.kind == "ring"}
    assert by_channel == {
        (0, 0): 0x836, (1, 0): 0x838, (2, 0): 0x83A, (3, 0): 0x83C,
        (0, 1): 0x71D, (1, 1): 0x720, (2, 1): 0x723, (3, 1): 0x726,
    }  # fmt: skip
    assert member.channels == 4


def test_the_job_described_as_it_is_passes(job: Setup) -> None:
    for member in job.communicators:
        check(group(2, 1, 1), member)


@pytest.mark.parametrize(
    ("field", "change", "shown"),
    [
        ("version", {"version": "2.20.5"}, ("2.20.5", "2.18.0 to 2.19")),
        ("version", {"version": "2.18.6"}, ("2.18.6", "2.19.0 to 2.19")),
    ],
)
def test_a_contradiction_shows_both(job: Setup, field: str, change: dict[str, object], shown: tuple[str, str]) -> None:
    with pytest.raises(Contradiction, match=f"{field}: described as {shown[0]}.*shows {shown[1]}"):
        check(replace(group(2, 1, 1), **change), job.communicators[0])


def test_trees_are_compared_by_their_links(job: Setup) -> None:
    """A log does not tell how many search channels there were where all channels use the first tree, nor a pattern
    that makes no difference."""
    (seen, _) = job.communicators
    two = {"search_channels": 2, "chains": (((0,), (0,)), ((1,), (1,)))}
    check(replace(group(2, 1, 1), **two), seen)
    seen = replace(seen, wired=())
    with pytest.raises(Contradiction, match=r"search_channels: described as 2.*shows 1"):
        check(replace(group(2, 1, 2), **two), seen)
    described = group(3, 2, 2)
    balanced = replace(
        seen, world_size=6, nodes=described.nodes, rings=(), tree_pattern=1, search_channels=1,
        chains=described.chains,
    )  # fmt: skip
    check(described, balanced)
    with pytest.raises(Contradiction, match=r"tree_pattern: described as 3.*shows 1"):
        check(replace(described, tree_pattern=3), balanced)
    turned = tuple(tuple(chain[::-1] for chain in node) for node in described.chains)
    with pytest.raises(Contradiction, match=r"chains\[0\]\[0\]: described as \(0, 1\).*shows \(1, 0\)"):
        check(described, replace(balanced, chains=turned))


def test_rings_and_sizes_that_differ_are_contradictions() -> None:
    seen = Member(1, 4, (), nodes=(0, 1, 2, 3), rings=((0, 2, 1, 3),))
    with pytest.raises(Contradiction, match=r"rings\[1\].*\(0, 1, 2, 3\).*\(0, 2, 1, 3\)"):
        check(group(4, 1, 2, rings=((0, 2, 1, 3), (0, 1, 2, 3))), seen)
    with pytest.raises(Contradiction, match=r"world_size: described as 2.*shows 4"):
        check(group(2, 1, 1), seen)
    with pytest.raises(Contradiction, match="nodes"):
        check(group(2, 2, 1), seen)
    with pytest.raises(Contradiction, match=r"channels: described as 1.*shows 2"):
        check(group(4, 1, 1, rings=((0, 2, 1, 3),)), replace(seen, wired=((0, 2, 2),)))
    with pytest.raises(Contradiction, match=r"channels: described as 3.*shows 2"):
        check(group(4, 1, 3, rings=((0, 2, 1, 3),) * 3), replace(seen, wired=((0, 2, 2),)))
    with pytest.raises(Contradiction, match=r"channels: described as 1.*at least 2"):
        check(group(4, 1, 1, rings=((0, 2, 1, 3),)), replace(seen, rings=(), nodes=(), wired=((0, 2, 2),)))
    check(group(4, 1, 2, rings=((0, 2, 1, 3),) * 2), replace(seen, wired=((0, 2, 2),)))


def test_a_hole_leaves_out_what_it_touches(shared: Path) -> None:
    path = shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng"
    whole = watch(path).setup()
    lost = 0
    for number in range(0, 120, 7):
        watcher = watch(path, number)
        got = watcher.setup()
        lost += watcher.dropped > 0
        known = {c for m in whole.communicators for c in m.connections}
        for c in [*got.connections, *(c for m in got.communicators for c in m.connections)]:
            bare = {replace(k, kind=c.kind, channel=c.channel, sender=c.sender, receiver=c.receiver) for k in known}
            assert c in known or c in bare  # never another queue pair; names may be missing
    assert lost > 5


# ------------------------------------------------------------------------------------------- made-up traffic


def message(data: bytes) -> bytes:
    return struct.pack("<i", len(data)) + data


def address(end: tuple[str, int]) -> bytes:
    return (struct.pack("<H", 2) + struct.pack(">H", end[1]) + socket.inet_aton(end[0])).ljust(28, b"\0")


def blocks(block: ConnectionBlock, lead: bytes) -> SetUpStream:
    both = []
    for side in (1, 2):
        data = bytearray(b"\xee" * block.size)
        for j in range(2):
            struct.pack_into("<I", data, block.qpn + j * block.qpn_pitch, 0x100 * side + j)
        data[block.gid : block.gid + 16] = socket.inet_pton(socket.AF_INET6, f"::ffff:10.1.0.{side}")
        struct.pack_into("<Q", data, block.fifo_address, 0x7000_0000 + side)
        struct.pack_into("<I", data, block.fifo_rkey, 0x900 + side)
        both.append(lead + bytes(data))
    hello = struct.pack("<QI", MAGIC, 4)
    return SetUpStream(ONE, TWO, bytearray(hello + both[0] + b"\x01\0\0\0"), bytearray(both[1]))


@pytest.mark.parametrize(
    ("version", "lead"),
    [("2.18.6", b""), ("2.19.4", b""), ("2.23.4", b""), ("2.24.3", bytes([1]).ljust(20, b"\0")),
     ("2.26.2", bytes([1]).ljust(20, b"\0")), ("2.28.9", bytes([2]).ljust(20, b"\0")),
     ("2.30.7", bytes([1]).ljust(37, b"\0"))],
)  # fmt: skip
def test_blocks_of_every_release(version: str, lead: bytes) -> None:
    block = traits(version).block
    assert block is not None
    stream = blocks(block, lead)
    (found,) = read_setup([stream], qps=2).connections
    assert (found.sender_qps, found.receiver_qps) == ((0x100, 0x101), (0x200, 0x201))
    assert (found.sender_gid, found.receiver_gid) == ("10.1.0.1", "10.1.0.2")
    assert (found.fifo_address, found.fifo_rkey, found.listener) == (0x7000_0001, 0x901, TWO)
    low, high = found.versions[0]
    assert low <= traits(version).version <= high
    for part in ("forward", "backward"):  # not before the last byte
        half = SetUpStream(ONE, TWO, bytearray(stream.forward), bytearray(stream.backward))
        del getattr(half, part)[-1:]
        assert read_setup([half]).connections == ()


def graph(version: str, rank: int, gpus: int, rings: list[list[int]], cross: int = 0) -> bytes:
    """A record of a node of `gpus` consecutive ranks, which every ring passes in the order of the list."""
    form = traits(version).graph
    data = bytearray(b"\xff" * form.size)
    if form.ring_channels == 36:
        struct.pack_into("<i", data, 60, cross)
    if form.ring_receive == 228:
        struct.pack_into("<i", data, 224, cross)
    node = rank // gpus
    for at, value in ((form.tree_pattern, 1), (form.tree_channels, len(rings)), (form.ring_channels, len(rings))):
        struct.pack_into("<i", data, at, value)
    if form.head_count >= 0:
        struct.pack_into("<i", data, form.head_count, gpus)
        for head in range(gpus):
            struct.pack_into("<i", data, form.heads + 4 * head, node * gpus + head)
    for channel, ring in enumerate(rings):
        here = [r for r in ring if r // gpus == node]
        at = here.index(rank)
        values = (here[0], here[-1], here[at - 1] if at else -1, here[at + 1] if at + 1 < gpus else -1)
        for array, value in enumerate(values):
            struct.pack_into("<i", data, form.ring_receive + 4 * (array * form.channels + channel), value)
        struct.pack_into("<i", data, form.tree_parent + 4 * channel, here[0])
        struct.pack_into("<i", data, form.tree_child0 + 4 * channel, here[1])
        struct.pack_into("<i", data, form.tree_child1 + 4 * channel, here[0])
    return bytes(data)


def gathered(version: str, rings: list[list[int]], gpus: int = 2, sender: int = 1, seen: bool = True,
             cross: int = 0) -> SetUpStream:
    """What rank `sender` passes on around the ring of ranks: records of all other ranks, its own first, and one more
    round so that those of the next rank are there, too."""
    world = len(rings[0])
    order = [(sender - k) % world for k in range(world if seen else world - 1)]
    listens = [address((f"10.0.0.{r}", 6000 + r)) for r in order]
    infos = [struct.pack("<iiiiQQ", r, 0, 0, 1, 77 + r // gpus, r).ljust(64, b"\0") for r in order]
    parts = [*listens, *listens, *infos, *(graph(version, r, gpus, rings, cross) for r in order)]
    hello = struct.pack("<QI", 0xABCDEF, 1)
    return SetUpStream(ONE, TWO, bytearray(hello + b"".join(message(p) for p in parts)))


@pytest.mark.parametrize("version", ["2.21.5", "2.22.3", "2.23.4", "2.25.1", "2.27.7", "2.28.9", "2.29.7", "2.30.7"])
def test_graph_records_give_rings_trees_and_heads(version: str) -> None:
    rings = [[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]]
    (member,) = read_setup([gathered(version, rings)]).communicators
    assert any(low <= traits(version).version <= high for low, high in member.versions)
    assert member.world_size == 6 and member.nodes == (0, 0, 1, 1, 2, 2)
    assert member.rings == ((0, 1, 2, 3, 4, 5), (0, 3, 2, 5, 4, 1))
    assert (member.tree_pattern, member.search_channels) == (1, 2)
    assert member.chains == (((0, 1), (1, 0)), ((2, 3), (3, 2)), ((4, 5), (5, 4)))
    assert member.heads == ((0, 1), (2, 3), (4, 5)) and not member.headless
    assert member.addresses[3] == ("10.0.0.3", 6003)


@pytest.mark.parametrize(("version", "cross"), [("2.19.4", 0), ("2.23.4", 2), ("2.28.9", 1)])
def test_channels_that_nodes_may_exchange_give_no_ring(version: str, cross: int) -> None:
    """Where adapters of several rails talk to each other every other node exchanges neighbouring channels."""
    rings = [[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]]
    (member,) = read_setup([gathered(version, rings, cross=cross)]).communicators
    assert member.rings == () and member.search_channels == 2 and member.nodes == (0, 0, 1, 1, 2, 2)
    alike = [rings[0], rings[0]]
    for one in (alike, rings[:1], [*rings, rings[0]]):  # alike both ways, or an odd number of channels
        (member,) = read_setup([gathered(version, one, cross=cross)]).communicators
        assert len(member.rings) == len(one)


def test_records_that_are_no_ring_give_none() -> None:
    stream = gathered("2.19.4", [[0, 1, 2, 3, 4, 5]])
    at = bytes(stream.forward).index(graph("2.19.4", 3, 2, [[0, 1, 2, 3, 4, 5]]))
    struct.pack_into("<i", stream.forward, at + traits("2.19.4").graph.ring_receive + 3 * 128, 3)
    (member,) = read_setup([stream]).communicators
    assert member.nodes and member.rings in ((), ((0, 1, 2, 3, 4, 5),))
    node1 = bytes(stream.forward).index(graph("2.19.4", 2, 2, [[0, 1, 2, 3, 4, 5]]))
    struct.pack_into("<i", stream.forward, node1 + traits("2.19.4").graph.ring_receive, 5)
    (member,) = read_setup([stream]).communicators
    assert member.nodes and member.rings == ()


def test_a_missing_rank_gives_no_ring() -> None:
    (member,) = read_setup([gathered("2.19.4", [[0, 1, 2, 3, 4, 5]], seen=False)]).communicators
    assert member.rings == () == member.nodes and member.world_size == 6


def test_two_listeners_on_one_port_name_no_channel() -> None:
    """A port that was used again: whose connection it is cannot be said."""
    record = (address(TWO) + bytes(4) + struct.pack("<Q", MAGIC)).ljust(128, b"\0")
    wires = [
        SetUpStream(ONE, ("10.0.0.9", 9), bytearray(
            struct.pack("<QI", magic, 1)
            + b"".join(map(message, (bytes(4), struct.pack("<i", 0x101), record + bytes(128))))
        )) for magic in (7, 8)
    ]  # fmt: skip
    block = traits("2.19.4").block
    assert block is not None
    both = read_setup([*wires, blocks(block, b"")])
    assert len(both.connections) == 1 and both.connections[0].channel == -1
    one = read_setup([wires[0], blocks(block, b"")])
    (connection,) = one.communicators[0].connections
    assert isinstance(connection, NetConnection) and connection.kind == "ring" and connection.receiver == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_hostile_bytes_are_bounded_and_never_a_crash(data: st.DataObject) -> None:
    stream = gathered("2.19.4", [[0, 1, 2, 3]]) if data.draw(st.booleans()) else None
    if stream is None:
        kind = data.draw(st.sampled_from([1, 2, 4, 5]))
        body = data.draw(st.lists(st.one_of(
            st.binary(max_size=80), st.sampled_from([4, 28, 64, 128, 1192, 2600]).map(lambda n: message(bytes(n))),
        ), max_size=8))  # fmt: skip
        stream = SetUpStream(ONE, TWO, bytearray(struct.pack("<QI", MAGIC, kind) + b"".join(body)))
        stream.backward = bytearray(data.draw(st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(stream.forward) - 1))
        stream.forward[at] = data.draw(st.integers(0, 255))
    found = read_setup([stream, SetUpStream(TWO, ONE, bytearray(stream.backward), bytearray(stream.forward))], qps=8)
    for member in found.communicators:
        for ring in member.rings:
            assert sorted(ring) == list(range(member.world_size))


def connects(rank: int, to: tuple[str, int], ports: list[int]) -> SetUpStream:
    """Rank `rank` tells the rank that listens at `to` where it will accept ring connections from it."""
    records = [(address(("10.0.1.1", p)) + bytes(4) + struct.pack("<Q", MAGIC)).ljust(128, b"\0") for p in ports]
    body = b"".join(map(message, (struct.pack("<i", rank), struct.pack("<i", 0x101), b"".join(records) + bytes(128))))
    return SetUpStream(ONE, to, bytearray(struct.pack("<QI", 0xABCDEF, 1) + body))


def accepted(port: int) -> SetUpStream:
    block = traits("2.19.4").block
    assert block is not None
    made = blocks(block, b"")
    return SetUpStream(ONE, ("10.0.1.1", port), made.forward, made.backward)


def test_channels_are_those_on_which_two_ranks_are_neighbours() -> None:
    """Rings 0-1-2-3-4-5 and 0-3-2-5-4-1, each copied once: 2 -> 3 only on channels 0 and 2, 0 -> 3 on 1 and 3."""
    rings = [[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]]
    streams = [
        gathered("2.23.4", rings), connects(3, ("10.0.0.0", 6000), [71, 72]), connects(3, ("10.0.0.1", 6001), [73]),
        *(accepted(port) for port in (71, 72, 73)),
    ]  # fmt: skip
    (member,) = read_setup(streams).communicators
    assert {(c.listener[1], c.channel, c.sender, c.receiver) for c in member.connections} == {
        (71, 1, 0, 3), (72, 3, 0, 3), (73, -1, 1, 3),  # 1 and 3 are no neighbours: not claimed
    }  # fmt: skip


def test_two_ranks_have_every_channel_between_them() -> None:
    """Even where the rings' records were not seen."""
    start = struct.pack("<QI", 0xABCDEF, 1)
    first = SetUpStream(TWO, ONE, bytearray(start + message(struct.pack("<ii", 1, 2).ljust(64))))
    listens = SetUpStream(TWO, ONE, bytearray(start))
    infos = [message(address(ONE)), message(address(ONE)), message(bytes(64)), message(graph("2.19.4", 0, 2, [[0, 1]]))]
    listens.forward += b"".join(infos)
    (member,) = read_setup([first, listens, connects(1, ONE, [81, 82]), accepted(81), accepted(82)]).communicators
    assert member.rings == () and member.world_size == 2
    assert {(c.listener[1], c.channel, c.sender) for c in member.connections} == {(81, 0, 0), (82, 1, 0)}
