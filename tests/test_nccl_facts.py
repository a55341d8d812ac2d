"""What trainers tell of NCCL: its log's lines, the facts out of every rank's part, and what is refused by name."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
from nccl_logs import Cluster

from flowcheck import nccl_facts, nccl_log
from flowcheck.description import DescriptionError, GroupRecord
from flowcheck.errors import UsageError
from flowcheck.groups import nccl_group
from flowcheck.nccl_facts import rdma_addresses, record
from flowcheck.nccl_log import Communicator, ring_of
from flowcheck.nccl_record import NcclRecord
from flowcheck.nccl_trees import tree_facts
from flowcheck.supported import Refused
from reconstruct.nccl.group import edges
from reconstruct.nccl.tree import BALANCED_TREE, TREE_PATTERN
from reconstruct.nccl.tree import edges as tree_edges
from reconstruct.nccl.versions import UnknownVersion

RING_ONLY = {"NCCL_ALGO": "Ring"}

# Log lines


def test_the_lines_of_a_log() -> None:
    log = nccl_log.parse(
        [
            "NCCL version 2.21.5+cuda12.4",
            "h:1:7 [0] NCCL INFO NCCL_BUFFSIZE set by environment to 4194304.",
            "h:1:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
            "[2024-11-02 10:00:00] h:1:9 [0] NCCL INFO ncclCommInitRankConfig comm 0xab rank 1 nranks 2 cudaDev 0 "
            "nvmlDev 0 busId 1b000 commId 0xcd - Init START",
            "[2024-11-02 10:00:00] h:1:9 [0] NCCL INFO Channel 00/02 :    0   1",
            "h:1:9 [0] NCCL INFO Channel 01/02 :    0   1",
            "h:1:9 [0] NCCL INFO Ring 00 : 0 -> 1 -> 0",
            "h:1:9 [0] NCCL INFO Trees [0] -1/-1/-1->1->0 [1] 0/-1/-1->1->-1",
            "h:1:9 [0] NCCL INFO NVLS Head  0:  0  1",
            "h:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/IB/0",
            "h:1:9 [0] NCCL INFO 2 coll channels, 0 collnet channels, 16 nvls channels, 2 p2p channels, 2 p2p ...",
            "h:1:9 [0] NCCL INFO ncclCommInitRankConfig comm 0xab rank 1 nranks 2 cudaDev 0 - Init COMPLETE",
            "not NCCL's: Ring 00 : 5 -> 6 -> 7",
        ]
    )
    assert (log.version, log.networks, log.settings) == ("2.21.5+cuda12.4", {"IB"}, {"NCCL_BUFFSIZE": "4194304"})
    (one,) = log.communicators
    assert (one.rank, one.world_size, one.channels, one.nvls_channels) == (1, 2, 2, 16)
    assert (one.orders, one.neighbours, one.heads) == ({0: (0, 1), 1: (0, 1)}, {0: (0, 0)}, {0: (0, 1)})
    assert one.trees == {0: ((-1, -1, -1), 1, 0), 1: ((0, -1, -1), 1, -1)}
    assert Communicator.from_json(one.to_json()) == one
    assert log.of_group(1, 2) == [one] and not log.of_group(0, 2) and not log.of_group(1, 3)


def test_communicators_made_at_the_same_time_are_kept_apart() -> None:
    a, b = Cluster().lines(1), Cluster(nodes=1, gpus=2, orders=((1, 0),), prefix="h:1:77 [1] NCCL INFO ").lines(1)
    mixed = [line for pair in zip(a, b, strict=False) for line in pair] + a[len(b) :]
    found = nccl_log.parse(mixed).communicators
    assert sorted(one.world_size for one in found) == [2, 4]
    (wide,) = nccl_log.parse(mixed).of_group(1, 4)
    assert wide.neighbours == {0: (0, 2), 1: (2, 0), 2: (0, 2), 3: (2, 0)}


def test_a_log_without_init_lines_is_of_one_communicator() -> None:
    lines = [line for line in Cluster().lines(2) if "Init" not in line]
    (one,) = nccl_log.parse(lines).of_group(2, 4)
    assert one.rank == 2 and len(one.neighbours) == 4


def test_a_ring_from_neighbours_where_the_order_was_cut() -> None:
    members = [nccl_log.parse(Cluster().lines(rank)).communicators[0] for rank in range(4)]
    assert [ring_of(channel, members) for channel in (0, 1)] == [(0, 1, 2, 3), (0, 3, 2, 1)]
    members[0].orders = {0: (0, 1)}
    assert ring_of(0, members) == (0, 1, 2, 3)
    members[0].orders = {0: (0, 2, 1, 3)}
    with pytest.raises(ValueError, match="two ring orders"):
        ring_of(0, members)
    del members[3].neighbours[0]
    assert ring_of(0, members) == (0, 2, 1, 3)
    members[0].orders = {}
    assert ring_of(0, members) is None
    members[3].neighbours[0] = (2, 1)
    with pytest.raises(ValueError, match="no ring"):
        ring_of(0, members)


# Trees


def spoken(nodes: int, chains: list[list[list[int]]], pattern: int, channels: int) -> list[Communicator]:
    """Every rank's `Trees` lines as NCCL would print them. chains: by search channel, by node."""
    world = sum(len(chain) for chain in chains[0])
    members = [Communicator() for _ in range(world)]
    home = {rank: node for node, chain in enumerate(chains[0]) for rank in chain}
    for channel in range(channels):
        search, tree = channel % len(chains), channel // len(chains) % 2
        up = dict.fromkeys(range(world), -1)
        down: dict[int, list[int]] = {rank: [] for rank in range(world)}
        for chain in chains[search]:
            for above, below in itertools.pairwise(chain):
                up[below] = above
                down[above].append(below)
        for child, parent, kind in tree_edges(nodes, tree):
            chain = chains[search][parent]
            place = {1: 1 - kind, 2: 1, 3: 0}[pattern] if len(chain) > 1 else 0
            up[chains[search][child][0]] = chain[place]
            down[chain[place]].append(chains[search][child][0])
        for rank in home:
            members[rank].trees[channel] = ((*down[rank], -1, -1, -1)[:3], rank, up[rank])
    return members


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("pattern", [1, 2, 3])
def test_search_channels_chains_and_pattern_from_every_ranks_lines(nodes: int, pattern: int) -> None:
    chains = [[[2 * n, 2 * n + 1] for n in range(nodes)], [[2 * n + 1, 2 * n] for n in range(nodes)]]
    where = [rank // 2 for rank in range(2 * nodes)]
    facts = tree_facts(spoken(nodes, chains, pattern, 8), where)
    assert facts is not None
    found, search, by_node = facts
    assert search == 2 and by_node == tuple(tuple(tuple(chains[k][n]) for k in range(2)) for n in range(nodes))
    # With two nodes, no node has the other as its first child: balanced shows nothing that the plain tree does not.
    assert found == (TREE_PATTERN if nodes == 2 and pattern == BALANCED_TREE else pattern)


def test_one_gpu_a_node_and_lines_that_are_no_tree() -> None:
    members = spoken(4, [[[rank] for rank in range(4)]] * 3, 3, 12)
    facts = tree_facts(members, [0, 1, 2, 3])
    assert facts is not None and facts[:2] == (TREE_PATTERN, 3)
    members[3].trees[5] = ((-1, -1, -1), 3, 1)
    with pytest.raises(ValueError, match="channel 5"):
        tree_facts(members, [0, 1, 2, 3])
    members[3].trees.clear()
    assert tree_facts(members, [0, 1, 2, 3]) is None


# Facts


def test_facts_of_a_communicator() -> None:
    facts = record(Cluster(heads=2).contributions())
    assert facts.version == "2.19.4+cuda12.1" and facts.nodes == (0, 0, 1, 1) and facts.channels == 4
    assert facts.addresses == (("10.0.0.1",), ("10.0.0.1",), ("10.0.0.2",), ("10.0.0.2",))  # docker0 is on both
    assert facts.rings == ((0, 1, 2, 3), (0, 3, 2, 1), (0, 1, 2, 3), (0, 3, 2, 1))
    assert (facts.algorithms, facts.protocols) == ((0, 1, 5), (0, 1, 2))
    assert (facts.tree_pattern, facts.search_channels) == (3, 2)
    assert facts.chains == (((0, 1), (1, 0)), ((2, 3), (3, 2)))
    assert (facts.heads, facts.nvls_channels, facts.qps, facts.split) == (((0, 1), (2, 3)), 16, 1, None)
    assert NcclRecord.from_json(facts.to_json(), "nccl", 4) == facts
    group = nccl_group("job", GroupRecord("0", 4, [], 3, backend="nccl", nccl=facts))
    assert {(e.sender, e.receiver) for e in edges(group) if e.ring} == {(1, 2), (3, 0), (0, 3), (2, 1)}


def test_settings_decide_algorithms_protocols_and_queue_pairs() -> None:
    settings = {
        "NCCL_ALGO": "broadcast:tree;allreduce:ring",
        "NCCL_PROTO": "^LL128",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_IB_SPLIT_DATA_ON_QPS": "0",
        "NCCL_BUFFSIZE": "4194304",
    }
    facts = record(Cluster(settings=settings).contributions(without="Trees"))
    assert (facts.algorithms, facts.protocols, facts.qps, facts.split) == ((1,), (0, 2), 4, False)
    assert facts.chains == () and facts.search_channels == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NCCL_BUFFSIZE": "1048576"}, "NCCL_BUFFSIZE=1048576: other buffer sizes.*Use no NCCL_BUFFSIZE"),
        ({"NCCL_ALGO": "NVLS"}, "NCCL_ALGO=NVLS: NVLS across nodes.*NCCL_NVLS_ENABLE=0; the cost"),
        ({"NCCL_ALGO": "CollnetDirect,Ring"}, "CollNet and SHARP"),
        ({"NCCL_ALGO": "^ring,tree"}, "leaves nothing"),
        ({"NCCL_COLLNET_ENABLE": "1"}, "NCCL_COLLNET_ENABLE=1: CollNet.*Use NCCL_COLLNET_ENABLE=0"),
        ({"NCCL_TUNER_PLUGIN": "ofi"}, "NCCL_TUNER_PLUGIN=ofi: a tuner plugin"),
        ({"NCCL_NTHREADS": "128"}, "NCCL_NTHREADS=128: other buffer sizes"),
        ({"NCCL_IB_OOO_RQ": "1"}, "NCCL_IB_OOO_RQ=1: request numbers"),
        ({"NCCL_IB_QPS_PER_CONNECTION": "many"}, "no number"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(settings: dict[str, str], words: str) -> None:
    with pytest.raises(Refused, match=words):
        record(Cluster(settings={**RING_ONLY, **settings}).contributions())


@pytest.mark.parametrize(
    ("cluster", "changes", "words"),
    [
        (Cluster(version="2.17.1"), {}, "NCCL 2.17.1 is not known"),
        (Cluster(), {"only": "Channel"}, "rings of rank 0 and not those of rank 1.*NCCL_DEBUG_FILE"),
        (Cluster(), {"without": "Trees"}, "does not tell the trees of all ranks.*NCCL_DEBUG_FILE.*allreduce:ring"),
        (Cluster(nodes=1), {}, "all ranks are on one node"),
    ],
)
def test_what_is_not_known_is_refused_with_the_remedy(cluster: Cluster, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        record(cluster.contributions(**changes))


def test_without_a_log_rings_and_trees_are_left_out() -> None:
    """The daemon may have seen the set-up traffic; that there is no NVLSTree only a log tells."""
    facts = record(Cluster().contributions(only="none"))
    assert (facts.channels, facts.rings, facts.search_channels, facts.chains, facts.heads) == (0, (), 0, (), ())
    assert facts.nodes == (0, 0, 1, 1) and facts.algorithms == (0, 1, 5)
    assert record(Cluster(settings={"NCCL_NVLS_ENABLE": "0"}).contributions(only="none")).algorithms == (0, 1)
    assert NcclRecord.from_json(facts.to_json(), "nccl", 4) == facts


def test_one_rank_without_a_log_is_refused() -> None:
    parts = Cluster(settings=RING_ONLY).contributions()
    parts[0]["communicators"] = []
    with pytest.raises(Refused, match=r"rings of rank 1 and not those of rank 0.*NCCL_DEBUG_FILE"):
        record(parts)


def test_ranks_must_agree() -> None:
    parts = Cluster(settings=RING_ONLY).contributions()
    parts[2]["settings"] = {"NCCL_ALGO": "Tree"}
    with pytest.raises(Refused, match="NCCL_ALGO is Tree on rank 2 and Ring on rank 0"):
        record(parts)
    parts = Cluster(settings=RING_ONLY).contributions()
    parts[3]["version"] = "2.20.5"
    with pytest.raises(Refused, match=r"rank 3 has NCCL 2\.20\.5, another one 2\.19\.4"):
        record(parts)
    parts = Cluster(settings=RING_ONLY).contributions()
    for part in parts:
        part["addresses"] = ["172.17.0.1"]
    with pytest.raises(Refused, match="ranks 0, 1 have no network address of their own"):
        record(parts)
    parts = Cluster(settings=RING_ONLY).contributions()
    parts[1]["communicators"].append({**parts[1]["communicators"][0], "channels": 9})
    with pytest.raises(Refused, match="several communicators"):
        record(parts)


# One rank's part


def test_a_ranks_contribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"nccl.{os.uname().nodename.partition('.')[0]}.{os.getpid()}%"
    path.write_text("\n".join(Cluster().lines(0)))
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.%h.%p%%"))
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    part = nccl_facts.contribution(0, 4)
    assert part["version"] == "2.19.4+cuda12.1" and part["settings"] == {"NCCL_ALGO": "Ring"}
    assert len(part["communicators"]) == 1 and "127.0.0.1" not in part["addresses"]
    monkeypatch.setenv("NCCL_HOSTID", "rack 7")
    assert part["node"] and nccl_facts.contribution(0, 4)["node"] == "rack 7" != part["node"]
    for network in ("AWS Libfabric", "IBext_v8"):
        path.write_text(f"h:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{network}/0/GDRDMA")
        with pytest.raises(Refused, match=f"NET/{network} in NCCL's log: .*; the cost: "):
            nccl_facts.contribution(0, 4)
    path.write_text("h:1:1 [0] NCCL INFO TUNER/Plugin: Using tuner plugin nccl_ofi_tuner")
    with pytest.raises(Refused, match=r"NCCL's log says 'TUNER/Plugin: Using tuner.*NCCL_TUNER_PLUGIN=none"):
        nccl_facts.contribution(0, 4)


def test_addresses_of_rdma_ports(tmp_path: Path) -> None:
    def port(device: str, layer: str, *gids: str) -> None:
        folder = tmp_path / device / "ports" / "1"
        (folder / "gids").mkdir(parents=True)
        (folder / "link_layer").write_text(layer + "\n")
        for number, gid in enumerate(gids):
            (folder / "gids" / str(number)).write_text(gid + "\n")

    zero = ":".join(["0000"] * 8)
    port("mlx5_0", "InfiniBand", "fe80:0000:0000:0000:0002:c903:0000:0001")
    with pytest.raises(Refused, match="InfiniBand"):
        rdma_addresses(tmp_path)
    mapped, plain = "0000:0000:0000:0000:0000:ffff:0a00:0003", "fd00:0000:0000:0000:0000:0000:0000:0007"
    port("mlx5_1", "Ethernet", mapped, zero, plain)
    assert rdma_addresses(tmp_path) == ["10.0.0.3", "fd00::7"]


# In the description


def group(**changes: Any) -> GroupRecord:
    return GroupRecord("0", 4, [], 3, backend="nccl", nccl=record(Cluster(**changes).contributions()))


def test_the_record_travels_in_the_description() -> None:
    described = group()
    assert GroupRecord.from_json(described.to_json()) == described
    described.vantage = "fabric"
    assert GroupRecord.from_json(described.to_json()).vantage == "fabric"


@pytest.mark.parametrize(
    ("field", "value"),
    [("rings", [[0, 1, 2, 9]]), ("nodes", [0, 0, 1]), ("addresses", [["x" * 65]] * 4), ("channels", 65), ("split", 1),
     ("version", 2), ("more", 0)],
)  # fmt: skip
def test_a_field_that_does_not_fit_is_named(field: str, value: Any) -> None:
    data = group().to_json()
    data["nccl"][field] = value
    with pytest.raises(DescriptionError, match=rf"group\.nccl\.{field}"):
        GroupRecord.from_json(data)


def test_backend_and_record_go_together() -> None:
    data = group().to_json()
    with pytest.raises(DescriptionError, match=r"group\.nccl: given for backend gloo"):
        GroupRecord.from_json({**data, "backend": "gloo"})
    with pytest.raises(DescriptionError, match=r"group\.nccl: missing"):
        GroupRecord.from_json({**data, "nccl": None})
    with pytest.raises(DescriptionError, match="'mpi' is not one of gloo, nccl"):
        GroupRecord.from_json({**data, "backend": "mpi"})


def test_the_version_that_the_daemon_was_told() -> None:
    told, silent = group(), group(version="x")
    assert silent.nccl is not None and silent.nccl.version is None
    assert nccl_group("job", told).version == "2.19.4+cuda12.1"
    for hint in ("2.19.4", "2.19"):
        assert nccl_group("job", told, hint).version == "2.19.4+cuda12.1"
        assert nccl_group("job", silent, hint).version == hint
    for hint in ("2.19.3", "2.20"):
        with pytest.raises(UsageError, match=rf"NCCL 2\.19\.4\+cuda12\.1, --nccl-version says {re.escape(hint)}"):
            nccl_group("job", told, hint)
    with pytest.raises(UsageError, match="--nccl-version"):
        nccl_group("job", silent)
    with pytest.raises(UnknownVersion):
        nccl_group("job", silent, "2.99.1")


def test_a_job_over_tcp_sockets() -> None:
    sockets = [part | {"networks": ["Socket"]} for part in Cluster().contributions()]
    assert record(sockets).sockets and record(sockets).qps == 1
    told = [part | {"networks": [], "settings": {"NCCL_NET": "Socket"}} for part in Cluster().contributions()]
    without = [part | {"networks": [], "settings": {"NCCL_IB_DISABLE": "1"}} for part in Cluster().contributions()]
    assert record(told).sockets and record(without).sockets
    overruled = [part | {"settings": {"NCCL_IB_DISABLE": "1"}} for part in Cluster().contributions()]
    assert not record(overruled).sockets  # the log shows NET/IB
    sockets[0]["networks"] = ["IB"]
    with pytest.raises(Refused, match="over RDMA and over TCP at once"):
        record(sockets)
