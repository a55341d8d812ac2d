"""Groups of NCCL: their network connections, roles and positions; what descriptions are refused; rings by proof."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from reconstruct.nccl import schedule
from reconstruct.nccl.group import NOWHERE, NcclGroup, communicator, edges, row_position
from reconstruct.nccl.plan import plan
from reconstruct.nccl.schedule import ALLREDUCE, BROADCAST, DOWN, LL, LL128, NVLSTREE, RING, SIMPLE, TREE, UP
from reconstruct.nccl.split import Collective
from reconstruct.nccl.versions import UnknownVersion


def group(nodes: int = 2, gpus: int = 1, channels: int = 1, **changes: Any) -> NcclGroup:
    """Rings by rank, one search channel with its chain by rank, every GPU a head."""
    ranks = [tuple(range(v * gpus, (v + 1) * gpus)) for v in range(nodes)]
    world = nodes * gpus
    return NcclGroup(**{
        "name": "job",
        "world_size": world,
        "version": "2.19.4",
        "addresses": tuple((f"10.0.0.{r // gpus + 1}",) for r in range(world)),
        "nodes": tuple(r // gpus for r in range(world)),
        "channels": channels,
        "rings": (tuple(range(world)),) * channels,
        "algorithms": (RING,),
        "protocols": (LL, LL128, SIMPLE),
        "tree_pattern": 1 if gpus > 1 else 3,
        "search_channels": 1,
        "chains": tuple((r,) for r in ranks),
        "heads": tuple(ranks),
        "nvls_channels": 2,
    } | changes)


def test_two_ranks_have_two_connections_on_each_channel() -> None:
    got = edges(group(channels=3))
    assert [(e.channel, e.sender, e.receiver, e.ring_index) for e in got] == [
        (c, s, 1 - s, s) for c in range(3) for s in (0, 1)
    ]
    assert all(e.ring and e.tree == e.nvls == e.head == -1 for e in got)


def test_only_edges_between_nodes_are_on_the_network() -> None:
    ring = (0, 3, 2, 1, 5, 4, 7, 6)
    got = edges(group(2, 4, 1, rings=(ring,)))
    assert [(e.sender, e.receiver, e.ring_index) for e in got] == [(1, 5, 3), (6, 0, 7)]


def test_a_ring_may_begin_inside_its_node() -> None:
    got = edges(group(2, 2, 1, rings=((0, 2, 3, 1),)))
    assert [(e.sender, e.receiver, e.ring_index) for e in got] == [(0, 2, 0), (3, 1, 2)]


def test_connections_that_ring_and_trees_share_are_listed_once() -> None:
    """Two nodes of eight, as public logs of such machines show: ring ... 15 -> 8 -> 0."""
    ring = (0, 1, 2, 3, 4, 5, 6, 7, 15, 14, 13, 12, 11, 10, 9, 8)
    both = group(
        2, 8, 2, rings=(ring, ring), algorithms=(RING, TREE), tree_pattern=3,
        chains=tuple((tuple(range(8 * v, 8 * v + 8)),) for v in (0, 1)),
    )  # fmt: skip
    got = {(e.channel, e.sender, e.receiver): e for e in edges(both)}
    assert set(got) == {(c, *pair) for c in (0, 1) for pair in ((0, 8), (8, 0), (7, 15))}
    # Channel 0 has tree 0 with root node 0, channel 1 tree 1 with root node 1.
    assert (got[0, 8, 0].ring, got[0, 8, 0].ring_index, got[0, 8, 0].tree) == (True, 15, UP)
    assert (got[1, 8, 0].ring, got[1, 8, 0].tree) == (True, DOWN)
    assert (got[0, 0, 8].ring, got[0, 0, 8].tree) == (False, DOWN) and got[0, 7, 15].tree == -1


def test_balanced_tree_uses_a_nodes_second_gpu_for_its_first_child() -> None:
    """4 nodes x 4 GPUs, K = 1: node 1 is child 0 of node 2 in tree 0 and child of node 3 in tree 1."""
    got = edges(group(4, 4, 2, algorithms=(TREE,), rings=()))
    up = {(e.channel, e.sender, e.receiver) for e in got if e.tree == UP}
    assert up == {(0, 4, 9), (0, 8, 0), (0, 12, 8), (1, 0, 4), (1, 8, 5), (1, 4, 12)}
    assert {(e.channel, e.receiver, e.sender) for e in got if e.tree == DOWN} == up


def test_every_head_has_a_tree_of_its_own() -> None:
    got = edges(group(2, 2, 1, algorithms=(NVLSTREE,), rings=(), nvls_channels=3))
    assert {(e.channel, e.sender, e.receiver, e.nvls, e.head) for e in got} == {
        (c, *pair, UP if (pair[0] // 2 == 1) == (c % 2 == 0) else DOWN, pair[0] % 2)
        for c in range(3)
        for pair in ((0, 2), (1, 3), (2, 0), (3, 1))
    }


def test_trees_are_listed_only_where_they_may_be_used_and_are_known() -> None:
    assert edges(group(3, 1, 1)) == edges(group(3, 1, 1, chains=(), algorithms=(RING, TREE)))
    assert edges(group(3, 1, 1, rings=())) == []


def test_positions_of_rows() -> None:
    shared = group(4, 1, 1, algorithms=(RING, TREE, NVLSTREE), rings=((0, 2, 1, 3),))
    by_ends = {(e.sender, e.receiver): e for e in edges(shared) if e.channel == 0}
    edge = by_ends[0, 2]  # of the ring, and down in tree 0
    assert row_position(edge, RING, ALLREDUCE) == 0 == row_position(edge, RING, BROADCAST)
    assert row_position(edge, TREE, ALLREDUCE) == DOWN == row_position(edge, NVLSTREE, ALLREDUCE)
    assert row_position(edge, RING, BROADCAST, root=1, ring=shared.rings[0]) == 2
    assert row_position(by_ends[2, 1], RING, BROADCAST, root=1, ring=shared.rings[0]) == 3  # into the root: nothing
    row = plan(communicator(shared), [Collective(BROADCAST, RING, LL, 9, 4)])[0].rows[0]
    assert schedule.messages(row, 3) == 0 and schedule.messages(row, 2) == 1
    assert row_position(by_ends[2, 3], RING, ALLREDUCE) == NOWHERE  # a link of the tree alone
    assert row_position(by_ends[2, 3], TREE, ALLREDUCE) == DOWN
    with pytest.raises(ValueError, match="order of the ring"):
        row_position(edge, RING, BROADCAST, root=1)


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (3, 1), (4, 2), (5, 3)])
def test_every_node_has_one_way_in_and_out_of_a_ring(nodes: int, gpus: int) -> None:
    got = edges(group(nodes, gpus, 2))
    assert len(got) == 2 * nodes
    for channel, node in itertools.product((0, 1), range(nodes)):
        assert [e.sender // gpus for e in got if e.channel == channel].count(node) == 1
        assert [e.receiver // gpus for e in got if e.channel == channel].count(node) == 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("world_size", {"world_size": 0}),
        ("addresses", {"addresses": (("10.0.0.1",),)}),
        ("nodes", {"nodes": (0,)}),
        ("nodes[0]", {"nodes": (1, 0, 2, 2)}),
        ("nodes[1]", {"nodes": (0, 2, 1, 1)}),
        ("channels", {"channels": 65}),
        ("rings", {"channels": 2}),
        ("rings[0]", {"rings": ((0, 1, 2, 2),)}),
        ("rings[0]", {"rings": ((1, 2, 3, 0),)}),
        ("algorithms", {"algorithms": ()}),
        ("algorithms", {"algorithms": (4,)}),
        ("protocols", {"protocols": (3,)}),
        ("tree_pattern", {"tree_pattern": 4}),
        ("chains", {"chains": (((0, 1),),)}),
        ("chains[0]", {"search_channels": 2}),
        ("chains[1][0]", {"chains": (((0, 1),), ((1, 2),))}),
        ("chains[1][0]", {"chains": (((0, 1),), ((2,),))}),
        ("heads", {"heads": ((0, 1),)}),
        ("heads[1]", {"heads": ((0, 1), (2,))}),
        ("heads[1]", {"heads": ((0,), (1,))}),
        ("nvls_channels", {"nvls_channels": 0}),
        ("simple_threads", {"simple_threads": 128}),
        ("qps", {"qps": 0}),
    ],
)
def test_a_description_that_cannot_be_is_refused_by_field(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"'job': {field}:".replace("[", r"\[").replace("]", r"\]")):
        replace(group(2, 2), **change)


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(UnknownVersion, match=r"2\.17\.1"):
        group(version="2.17.1")


def test_without_channels_nothing_is_scheduled() -> None:
    with pytest.raises(ValueError, match="channels: not known"):
        communicator(group(channels=0))
