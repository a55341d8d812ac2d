"""The set-up traffic of a job that is followed: what it adds to a description, and what it contradicts.

The traffic is the lab generator's, which shares nothing with what is under test.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_job import NcclJob
from nccl_setup_frames import Wire, parsed, streams
from nccl_traffic import Rig, Sender, group_of
from replay import block_of
from synthetic_job import Follower
from tcp_frames import tcp_frame

from flowcheck.description import JobDescription
from flowcheck.errors import UsageError
from flowcheck.lab.nccl_wire import Communicator
from flowcheck.lab.nccl_wire_job import NVLSTREE, Job
from flowcheck.lab.nccl_wire_setup import NET_IB, Stream
from flowcheck.pipeline import Limits, Pipeline
from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.tcp import TcpReassembler
from reconstruct.lr import Predictor
from reconstruct.nccl.bootstrap import Member, read_setup
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.heads import MAGIC, SETUP, Heads
from reconstruct.nccl.setup import Contradiction, Untold, filled, named, queue_pairs, release
from reconstruct.nccl.setup_watch import SetupWatcher
from reconstruct.nccl.versions import UnknownVersion, traits
from reconstruct.steps import Waits

RING_ONLY = {"NCCL_ALGO": "allreduce:ring", "NCCL_PROTO": "ll"}
Frames = Sequence[tuple[int, bytes]]


# What the generator says is what is read

JOBS = [
    Job(2, version="2.18.6"),
    Job(4, version="2.19.4", channels=2),
    Job(6, 2, "2.21.5", channels=4, rails=2),
    Job(4, version="2.22.3", channels=3),
    Job(8, 4, "2.23.4", channels=8, rails=2),
    Job(5, version="2.25.1", channels=2),
    Job(6, 2, "2.26.2", channels=4, pattern=3),
    Job(4, 2, "2.27.7", NVLSTREE, channels=2, rails=2),
    Job(4, version="2.28.9", channels=2, qps=2),
    Job(7, version="2.29.2", channels=1),
    Job(4, version="2.30.7", channels=4, ipv6=True),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.version}-{job.ranks}-{job.gpus_per_node}-{job.channels}")
def test_ranks_rings_trees_channels_and_queue_pairs(job: Job) -> None:
    comm = Communicator(job)
    (member,) = read_setup(parsed(streams(comm)), job.qps).communicators
    assert (member.magic, member.world_size, member.nodes) == (0xABCDEF, job.ranks, job.node_of)
    assert any(low <= traits(job.version).version <= high for low, high in member.versions)
    assert member.rings == tuple(job.ring(channel) for channel in range(job.search_channels))
    assert (member.tree_pattern, member.search_channels) == (job.tree_pattern, job.search_channels)
    assert [[chain[:2] for chain in node] for node in member.chains] == [
        [job.chain(node, search)[:2] for search in range(job.search_channels)] for node in range(job.nodes)
    ]
    nvls = job.algorithm == NVLSTREE
    assert member.heads == (tuple(ranks[: job.heads] for ranks in job.node_ranks) if nvls else ())
    assert member.headless == (not nvls and job.release >= (2, 20))
    assert member.channels == job.channels and not member.over
    group = NcclGroup(
        "job", job.ranks, job.version, (("10.9.9.9",),) * job.ranks, member.nodes, job.channels,
        tuple(job.ring(channel) for channel in range(job.channels)), (0, 1), (0, 1, 2), member.tree_pattern,
        member.search_channels, member.chains, (), 0,
    )  # fmt: skip
    made = {(one.channel, one.sender, one.receiver): one for rank in range(job.ranks) for one in comm.of_rank(rank)}
    told = {(edge.channel, edge.sender, edge.receiver): one for edge, one in named(group, member).items()}
    assert len(told) == len(edges(group))
    for place, one in told.items():
        assert one.receiver_qps == tuple(flow.qp for flow in made[place].forward), place
        assert one.sender_qps == tuple(flow.qp for flow in made[place].backward), place
        assert (one.fifo_address, one.fifo_rkey) == made[place].fifo


def test_an_unsettled_release_shows_no_block() -> None:
    (member,) = read_setup(parsed(streams(Communicator(Job(4, version="2.29.7"))))).communicators
    assert member.connections == () and member.channels == 1 and member.rings == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("version", "told"),
    [("2.18.6", "2.18.0"), ("2.19.4", "2.19.0"), ("2.20.5", "2.20.0"), ("2.22.3", "2.22.0"), ("2.26.2", "2.26.0"),
     ("2.28.9", None), ("2.30.7", "2.30.0")],
)  # fmt: skip
def test_the_release_is_told_where_only_one_kind_fits(version: str, told: str | None) -> None:
    setup = read_setup(parsed(streams(Communicator(Job(4, version=version)))))
    assert release(setup.communicators) == told
    assert release(replace(one, versions=(), connections=()) for one in setup.communicators) is None


def test_one_node_suffices_and_half_of_it_does_not() -> None:
    """What passes one node's port tells all ranks' records and, by its own connections, the number of channels."""
    job = Job(4, version="2.23.4", channels=3)
    made = streams(Communicator(job))
    (member,) = read_setup(parsed([one for one in made if 2 in (one.client, one.server)])).communicators
    assert member.rings == ((0, 1, 2, 3),) and member.channels == 3 == member.least_channels
    (member,) = read_setup(parsed([one for one in made if one.client == 2])).communicators
    assert member.rings == () and member.channels == 0


def test_rings_without_all_connections_of_a_node_tell_no_channels() -> None:
    """Two rings that enter a node at different ranks: both have to be seen."""
    job = Job(6, 2, "2.23.4", channels=4)
    made = streams(Communicator(job))
    assert read_setup(parsed(made)).communicators[0].channels == 4
    told = [at for at, one in enumerate(made) if one.there[12:16] == struct.pack("<i", 4) and one.there[8] == 1]
    ring = [at for at in told if made[at].there[24] & 0x7F == 1]
    assert len(ring) == 6
    for lost in ring:
        left = [one for at, one in enumerate(made) if at != lost]
        assert read_setup(parsed(left)).communicators[0].channels == 4  # another node shows it
    left = [one for at, one in enumerate(made) if at not in ring[::2]]
    member = read_setup(parsed(left)).communicators[0]
    assert member.channels in (0, 4) and member.least_channels == 2


# The watcher


def watched(frames: Frames, *, at_once: int = 8, most_bytes: int = 32 << 20) -> SetupWatcher:
    flows = Flows(4096)
    heads = Heads(flows)
    tcp, watcher = TcpReassembler(flows), SetupWatcher(heads, most_bytes)
    for start in range(0, len(frames), at_once):
        block = block_of([(ts, data) for ts, data in frames[start : start + at_once]])
        spans = tcp.feed(block, int(block.ts[-1]))
        if heads.look(spans) & SETUP:
            watcher.feed(spans)
    return watcher


def test_frames_of_a_set_up_and_the_end_of_its_communicator() -> None:
    job = Job(4, version="2.23.4", channels=2)
    made = streams(Communicator(job))
    wire = Wire().all(made)
    watcher = watched(wire.frames)
    (member,) = watcher.setup().communicators
    assert member == read_setup(parsed(made)).communicators[0] and watcher.dropped == 0 and watcher.bytes > 5000
    ring = next(at for at, one in enumerate(made) if one.kept and one.there[8] == 1)
    wire.close(made[ring], ("192.168.0.1", 40001 + ring))
    watcher = watched(wire.frames)
    (member,) = watcher.setup().communicators
    assert member.over and len(member.connections) == len([one for one in made if one.there[8] == NET_IB])
    assert watcher.setup().communicators == () == watcher.setup().connections and watcher.bytes == 0


def test_real_communicators_keep_their_ring_open_to_the_end(shared: Path) -> None:
    """So a closed one has ended: recorded set-up of NCCL 2.19, whose job ends within the capture."""
    source = CaptureFileSource([shared / "captures" / "nccl" / "allreduce+p2p.pcapng"])
    flows = Flows(4096)
    heads = Heads(flows)
    tcp, watcher = TcpReassembler(flows), SetupWatcher(heads)
    block = source.read(0.0)
    assert block is not None
    rows = np.flatnonzero(block.ts <= block.ts[0] + 8_490_000_000)  # up to the end of the collectives
    spans = tcp.feed(replace_rows(block, rows), int(block.ts[rows[-1]]))
    assert heads.look(spans) & SETUP
    watcher.feed(spans)
    before = watcher.setup()
    assert [one.over for one in before.communicators] == [False, False]
    spans = tcp.feed(replace_rows(block, np.arange(rows[-1] + 1, len(block.ts))), int(block.ts[-1]))
    assert heads.look(spans) & SETUP
    watcher.feed(spans)
    assert [one.over for one in watcher.setup().communicators] == [True, True]
    source.release(block)
    source.close()


def replace_rows(block: Any, rows: np.ndarray) -> Any:
    from mirror.block import Block

    return Block(block.base, block.offset[rows], block.caplen[rows], block.wirelen[rows], block.ts[rows],
                 block.vlan[rows], linktype=block.linktype)  # fmt: skip


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    wire = Wire()
    for number in range(1, 9):
        wire.network = f"192.168.{number}."
        made = streams(Communicator(Job(4, version="2.23.4")), magic=number, network=wire.network)
        wire.all([one for one in made if one.kept])
    watcher = watched(wire.frames, most_bytes=60_000)
    assert watcher.bytes <= 60_000 and watcher.dropped > 0
    kept = {one.magic for one in watcher.setup().communicators}
    assert kept and 8 in kept and 1 not in kept


def test_what_only_begins_like_a_set_up_is_let_go() -> None:
    hello = struct.pack("<QI", 77, 1)
    bad = Stream(0, 1, ("192.168.0.2", 9), hello + struct.pack("<i", 8) + b"x" * 8 + struct.pack("<i", -1) + b"y" * 999)
    long = Stream(0, 1, ("192.168.0.2", 10), struct.pack("<QI", MAGIC, NET_IB) + b"z" * 40_000)
    watcher = watched(Wire().stream(bad).stream(long).frames)
    assert watcher.bytes == 0 and watcher.dropped == 2
    watcher = watched([(1, tcp_frame(hello[:8], seq=100)), (2, tcp_frame(b"no hello at all", seq=108))])
    assert watcher.bytes == 0


# Filling in


class Silent(NcclJob):
    """A job whose ranks have no NCCL log."""

    def _contributions(self) -> list[dict[str, Any]]:
        return [{**one, "communicators": [], "version": None} for one in super()._contributions()]


class Watching(Follower):
    """A pipeline that has seen some frames before the job attaches, and so completes its description."""

    def __init__(self, job: NcclJob, before: Frames, hint: str | None = None) -> None:
        self.job = job
        self.pipeline = Pipeline(Limits(1024, 1 << 20, 1 << 26), Waits(), nccl_version=hint)
        for start in range(0, len(before), 16):
            block = block_of([(ts, data) for ts, data in before[start : start + 16]])
            self.pipeline.feed(block, int(block.ts[-1]))
        self.pipeline.check(job.description)
        self.description: JobDescription = self.pipeline.completed(job.description)
        self.tracker = self.pipeline.add_job("job", self.description, Predictor(job.description), job.attached)
        self.events, self.steps, self.gradients, self.apply = [], {}, {}, True


def set_up(job: NcclJob, **options: Any) -> list[tuple[int, bytes]]:
    return Wire().all(streams(job.wire.communicator, **options)).frames  # type: ignore[attr-defined]


def silent(world: int, steps: int, told: dict[str, str], **nccl: Any) -> Silent:
    job = Silent(world, nccl=nccl, told=told)
    job.attach()
    for _ in range(steps):
        job.usual_step()
    return job


TREES = {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "simple"}


@pytest.mark.parametrize(
    ("world", "told", "nccl"),
    [
        (4, RING_ONLY, {"version": "2.19.4", "channels": 2, "algorithm": "ring", "protocol": "ll"}),
        (4, TREES, {"version": "2.22.3", "channels": 2, "algorithm": "tree", "protocol": "simple"}),
        (6, RING_ONLY, {"version": "2.26.2", "channels": 4, "gpus_per_node": 2, "rails": 2, "algorithm": "ring",
                        "protocol": "ll"}),
    ],
)
def test_a_job_without_a_log_is_followed_by_its_set_up(world: int, told: dict[str, str], nccl: dict[str, Any]) -> None:
    job = silent(world, 3, told, **nccl)
    facts = job.description.group.nccl
    assert facts is not None and facts.rings == () and facts.version is None
    follower = Watching(job, set_up(job)).run()
    follower.check(3)
    known = follower.description.group.nccl
    assert known is not None and len(known.rings) == known.channels == nccl["channels"] and known.version is not None
    assert follower.lost is None and follower.tracker.coverage == 1.0
    assert job.description.group.nccl is facts  # what the trainers said stays as it is


def test_without_log_and_set_up_a_job_is_refused() -> None:
    job = silent(4, 1, RING_ONLY, version="2.19.4", algorithm="ring", protocol="ll")
    with pytest.raises(UsageError, match="--nccl-version"):
        Watching(job, [])
    with pytest.raises(Untold, match=r"rings and channels that are not known.*NCCL_DEBUG_FILE.*NCCL_SOCKET_IFNAME"):
        Watching(job, [], "2.19.4")
    # Another job's set-up is none of this one's.
    other = NcclJob(4, nccl={"version": "2.19.4", "members": (4, 5, 6, 7)})
    with pytest.raises(Untold):
        Watching(job, set_up(other), "2.19.4")


def test_what_the_set_up_does_not_tell_is_refused_by_name() -> None:
    job = silent(4, 1, {}, version="2.19.4")
    with pytest.raises(Untold, match=r"NVLSTree whose number of channels is not known.*NCCL_NVLS_ENABLE=0"):
        Watching(job, set_up(job))
    job = silent(4, 1, {"NCCL_NVLS_ENABLE": "0"}, version="2.19.4")
    assert Watching(job, set_up(job)).description.group.nccl.algorithms == (0, 1)  # type: ignore[union-attr]
    # From 2.20 on the records say that there are no heads.
    later = Job(4, version="2.23.4")
    assert filled(bare(later, algorithms=(0, 1, 5)), [member_of(later)]).algorithms == (0, 1)
    with pytest.raises(Untold, match="NVLSTree"):
        filled(bare(later, algorithms=(0, 1, 5)), [member_of(Job(4, 2, "2.23.4", NVLSTREE, channels=2, rails=2))])


def member_of(job: Job, **changes: Any) -> Member:
    (member,) = read_setup(parsed(streams(Communicator(job)))).communicators
    return replace(member, **changes)


def bare(job: Job, **changes: Any) -> NcclGroup:
    """A group of which nothing but ranks and interfaces is known."""
    addresses = tuple((f"10.77.0.{host + 1}",) for host in job.hosts)
    return replace(
        NcclGroup("job", job.ranks, job.version, addresses, job.node_of, 0, (), (0, 1), (0, 1, 2), 0, 0, (), (), 0),
        **changes,
    )


def test_two_communicators_of_the_same_ranks() -> None:
    job = Job(4, version="2.23.4", channels=2)
    one, alike = member_of(job), member_of(job, magic=5)
    group = filled(bare(job), [one, alike])
    assert group.channels == 2 and queue_pairs(group, [one, alike]) == ()
    assert {pair[2:] for pair in queue_pairs(group, [one])} == {(e.channel, e.sender, e.receiver) for e in edges(group)}
    with pytest.raises(Untold, match="2 communicators of these ranks were set up, with different rings"):
        filled(bare(job), [one, replace(alike, rings=((0, 2, 1, 3),), wired=((0, 2, 2),))])
    with pytest.raises(Untold, match="trees that are not known"):
        filled(bare(job), [replace(one, chains=())])
    assert filled(bare(job, algorithms=(1,)), [replace(one, chains=())]).chains == ()


# Contradictions


def test_a_description_against_the_set_up_refuses_the_job() -> None:
    job = NcclJob(4, nccl={"version": "2.23.4", "algorithm": "ring"}, told=RING_ONLY)
    job.attach()
    group = job.description.group
    assert group.nccl is not None
    for change, words in (
        ({"rings": ((0, 2, 1, 3),)}, r"rings\[0\]: described as \(0, 2, 1, 3\), but .* shows \(0, 1, 2, 3\)"),
        ({"channels": 2, "rings": ((0, 1, 2, 3),) * 2}, "channels: described as 2, but .* shows 1"),
        ({"version": "2.19.4"}, r"version: described as 2\.19\.4, but .* shows 2\.23"),
    ):
        job.description.group = replace(group, nccl=replace(group.nccl, **change))
        with pytest.raises(Contradiction, match=words):
            Watching(job, set_up(job))
    job.description.group = group
    assert Watching(job, set_up(job)).description == job.description


def test_a_contradiction_that_comes_later_freezes_the_job() -> None:
    """Set-up traffic behind the attach (a communicator that connects at its first call): the job is lost, and what it
    has claimed is taken back."""
    job = NcclJob(4, nccl={"version": "2.23.4", "algorithm": "ring", "protocol": "ll"}, told=RING_ONLY)
    job.attach()
    for _ in range(3):
        job.usual_step()
    follower = Watching(job, []).run(final=False)
    follower.check(3)
    other = Communicator(Job(4, version="2.23.4", algorithm="ring", channels=2))
    wire = Wire(start=job.wire.frames[-1].ts + 1_000_000).all(streams(other))
    block = block_of(wire.frames)
    now = wire.frames[-1][0]
    follower.pipeline.feed(block, now)
    follower.take(now)
    assert follower.lost is None  # more may come
    follower.pipeline.expire(now + 300_000_000)
    follower.take(now + 300_000_000)
    assert follower.lost is not None and follower.lost.claimed and follower.lost.step == 1
    assert "channels: described as 1, but the job's own set-up traffic shows 2" in follower.lost.reason


def test_an_ended_communicator_contradicts_nothing() -> None:
    """A job that ended before on the same machines, with other rings."""
    job = NcclJob(4, nccl={"version": "2.23.4", "algorithm": "ring", "protocol": "ll"}, told=RING_ONLY)
    job.attach()
    job.usual_step()
    made = streams(Communicator(Job(4, version="2.23.4", channels=3)), magic=3)
    wire = Wire().all(made)
    with pytest.raises(Contradiction):
        Watching(job, wire.frames)
    ring = next(at for at, one in enumerate(made) if one.kept and one.there[8] == 1)
    wire.close(made[ring], ("192.168.0.1", 40001 + ring))
    Watching(job, wire.frames).run().check(1)


# Queue pairs


def test_names_of_queue_pairs_count_more_than_their_order() -> None:
    """Without names, rising queue pairs are rising channels; names that say otherwise leave nothing to claim."""
    job = Job(2, version="2.23.4", algorithm="ring", protocol="ll", channels=2)
    sender = Sender(job)
    sent = sender.reduce(40_000) + sender.reduce(40_000)
    (member,) = read_setup(parsed(streams(sender.communicator))).communicators
    group = group_of(job)
    right = queue_pairs(group, [member])
    turned = tuple((address, number, 1 - channel, *ends) for address, number, channel, *ends in right)
    for names, links in (((), {(0, 1), (1, 0)}), (right, {(0, 1), (1, 0)}), (turned, set())):
        rig = Rig(replace(group, queue_pairs=names), {(160_000, 4)})
        rig.feed(sent)
        rig.finish()
        assert rig.decoder.links("g") == links and rig.reduced == ([0, 1] if links else [])
        assert not rig.wrong(sender.results)


def test_a_queue_pair_named_otherwise_than_its_announcements_is_not_believed() -> None:
    """Names of another job's set-up on the same queue pair numbers: the announcements' sender counts."""
    job = NcclJob(4, nccl={"version": "2.23.4", "algorithm": "ring", "protocol": "ll", "gpus_per_node": 2},
                  told=RING_ONLY)  # fmt: skip
    job.attach()
    for _ in range(2):
        job.usual_step()
    follower = Watching(job, set_up(job))
    follower.pipeline.remove_job("job")
    facts = follower.pipeline.completed(job.description)
    from flowcheck.groups import nccl_group

    plain = nccl_group("job", facts.group)
    place: Edge = edges(plain)[0]
    (number,) = {
        flow.qp for one in job.wire.communicator.of_rank(place.receiver)  # type: ignore[attr-defined]
        if (one.sender, one.receiver) == (place.sender, place.receiver) for flow in one.forward
    }  # fmt: skip
    other = edges(plain)[1]
    wrong = replace(plain, queue_pairs=((plain.addresses[place.receiver][0], number, 0, other.sender, other.receiver),))
    follower.pipeline.nccl.add_group(wrong, job.description.group.sequence, job.attached)
    from reconstruct.steps import StepTracker

    follower.tracker = StepTracker(
        facts, "job", follower.pipeline.nccl, Predictor(job.description), Waits(), job.attached
    )
    follower.pipeline.trackers["job"] = follower.tracker
    follower.run().check(2)


def test_a_release_that_is_not_known_claims_nothing() -> None:
    job = silent(4, 1, RING_ONLY, version="2.23.4")
    with pytest.raises(UnknownVersion, match=r"2\.99\.1"):
        Watching(job, set_up(job), "2.99.1")
