"""Tree and NVLSTree: the shape of the trees, worked examples, the product of everything that decides the messages."""

from __future__ import annotations

import itertools
import random

import pytest
from nccl_plans import PROTOCOLS, VERSIONS, check_fit, counts, covered, floats, plan_one, shown

from reconstruct.nccl import schedule
from reconstruct.nccl import tree as nccl_tree
from reconstruct.nccl.schedule import ALLREDUCE, DOWN, LL, LL128, NVLSTREE, SIMPLE, TREE, UP
from reconstruct.nccl.split import Collective, Unsupported

BUCKET = 6_553_600


@pytest.mark.parametrize(
    ("version", "protocol", "channel", "count", "first", "last"),
    [
        ("2.19.4", SIMPLE, 3, 50, [(49152, 16384, 65536), (180224, 16384, 65536)], (49 * 131072 + 49152, 16384, 65536)),
        ("2.20.5", SIMPLE, 3, 7, [(2457600, 131072, 524288)], (2457600 + 6 * 131072, 32768, 131072)),
        ("2.30.7", SIMPLE, 0, 7, [(0, 131072, 524288)], (6 * 131072, 32768, 131072)),
        ("2.19.4", LL128, 0, 46, [(0, 18000, 77824), (144000, 18000, 77824)], (45 * 144000, 18000, 77824)),
        ("2.19.4", LL128, 4, 46, [(72000, 18000, 77824)], (45 * 144000 + 72000, 1600, 8192)),
        ("2.19.4", LL128, 5, 46, [(90000, 18000, 77824)], (BUCKET, 0, 0)),
        ("2.20.5", LL128, 0, 46, [(0, 18000, 77824)], (810000, 10800, 47104)),
        ("2.20.5", LL128, 7, 45, [(5745600, 18000, 77824)], (5745600 + 44 * 18000, 16000, 69632)),
        ("2.22.3", LL128, 1, 47, [(819200, 17760, 75776)], (819200 + 46 * 17760, 2240, 10240)),
    ],
)
def test_bucket_on_a_tree_of_four_nodes(
    version: str, protocol: int, channel: int, count: int, first: list[tuple[int, int, int]], last: tuple[int, int, int]
) -> None:
    planned = plan_one(version, 32, 8, Collective(ALLREDUCE, TREE, protocol, BUCKET, 4), nodes=4)
    got = [m[:3] for m in floats(planned, DOWN)[channel]]
    assert len(planned.channels) == 8 and len(got) == count
    assert got[: len(first)] == first and got[-1] == last


@pytest.mark.parametrize(
    ("versions", "border"),
    [
        (("2.18.6", "2.21.5", "2.29.7", "2.30.7"), 3072),
        (("2.22.3",), 2500),
        (("2.23.4", "2.25.1"), 4096),
        (("2.26.2", "2.28.9"), 2560),
    ],
)
def test_small_ll_tree_by_release(versions: tuple[str, ...], border: int) -> None:
    for version in versions:
        got = floats(plan_one(version, 3, 2, Collective(ALLREDUCE, TREE, LL, 5000, 4)), DOWN)
        assert got == {0: [(0, border, 8 * border, True)], 1: [(border, 5000 - border, 40000 - 8 * border, True)]}


def test_bucket_on_nvls_trees() -> None:
    call = Collective(ALLREDUCE, NVLSTREE, SIMPLE, BUCKET, 4)
    for version, firsts in (("2.18.6", [131072, 2228224]), ("2.19.4", [131072, 2228224]), ("2.30.7", [409600, 540672])):
        planned = plan_one(version, 32, 16, call, nodes=4, heads=8)
        sent = floats(planned, DOWN)[1]
        assert [m[:2] for m in sent[:2]] == [(first, 16384) for first in firsts] and len(sent) == 4
    assert sent[-1][1:3] == (2048, 8192)


@pytest.mark.parametrize(
    ("nodes", "tree0", "tree1"),
    [
        (2, [-1, 0], [1, -1]),
        (3, [-1, 2, 0], [1, -1, 0]),
        (4, [-1, 2, 0, 2], [1, 3, 1, -1]),
        (5, [-1, 2, 4, 2, 0], [1, -1, 3, 0, 3]),
        (8, [-1, 2, 4, 2, 0, 6, 4, 6], [1, 3, 1, 7, 5, 3, 5, -1]),
    ],
)
def test_trees_as_listed(nodes: int, tree0: list[int], tree1: list[int]) -> None:
    assert [nccl_tree.parents(nodes, tree) for tree in (0, 1)] == [tree0, tree1]


def test_tree_roles() -> None:
    assert nccl_tree.node_numbers(["b", "a", "b", "a", "c"]) == [0, 1, 0, 1, 2]
    assert nccl_tree.gateways(nccl_tree.BALANCED_TREE, [2, 3, 4]) == (2, 3, 2)
    assert nccl_tree.gateways(nccl_tree.BALANCED_TREE, [2]) == (2, 2, 2)
    assert nccl_tree.gateways(nccl_tree.TREE_PATTERN, [2, 3]) == (2, 2, 2)
    assert [nccl_tree.channel_tree(TREE, c, 4) for c in (0, 3, 4, 7, 8)] == [(0, 0), (3, 0), (0, 1), (3, 1), (0, 0)]
    assert [nccl_tree.channel_tree(NVLSTREE, c, 0)[1] for c in range(4)] == [0, 1, 0, 1]
    # Rank level, 4 nodes x 8 GPUs, channel 3 of 8 search channels with GPUs 3 and 2 as gateways of a balanced tree:
    # the links of tree 0 are 3 -> 19, 18 -> 11, 19 -> 27 from the parent to the child.
    chains = [[8 * node + 3, 8 * node + 2] for node in range(4)]
    doors = [nccl_tree.gateways(nccl_tree.BALANCED_TREE, chain) for chain in chains]
    links = {(doors[parent][1 + kind], doors[child][0]) for child, parent, kind in nccl_tree.edges(4, 0)}
    assert links == {(3, 19), (18, 11), (19, 27)}
    with pytest.raises(Unsupported):
        nccl_tree.gateways(9, [0, 1])


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 64, 100, 139])
def test_trees_are_trees(nodes: int) -> None:
    roots = (0, nodes - 1 if nodes % 2 == 0 else 1)
    for tree in (0, 1):
        parents = nccl_tree.parents(nodes, tree)
        assert [node for node in range(nodes) if parents[node] < 0] == [roots[tree]]
        kinds: set[tuple[int, int]] = set()
        for _, parent, kind in nccl_tree.edges(nodes, tree):
            assert (parent, kind) not in kinds
            kinds.add((parent, kind))
        for node in range(nodes):
            depth = 0
            while parents[node] >= 0:
                node, depth = parents[node], depth + 1
            assert node == roots[tree] and depth <= nodes.bit_length()
    # One down link of each tree shows everything: "in" at every node that is the root of neither.
    children = [{child for child, _, _ in nccl_tree.edges(nodes, tree)} for tree in (0, 1)]
    assert children[0] & children[1] == set(range(nodes)) - set(roots)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tree_all_reduce_over_everything(version: str, protocol: int) -> None:
    rng = random.Random(f"tree {version} {protocol}")
    shapes = [(2, 2), (3, 3), (4, 4), (16, 2), (32, 4), (24, 3), (64, 64), (20, 3)]
    for (ranks, nodes), channels, itemsize in itertools.product(shapes, (1, 2, 8, 16), (4, 2)):
        for count in counts(rng, ranks):
            call = Collective(ALLREDUCE, TREE, protocol, count, itemsize)
            planned = plan_one(version, ranks, channels, call, nodes=nodes)
            down = [schedule.places(row, DOWN) for row in planned.rows]
            for row, sent in zip(planned.rows, down, strict=True):
                check_fit(row, sent, count * itemsize)
                up = schedule.places(row, UP)
                assert (up[:, :6] == sent[:, :6]).all() and not up[:, 6].any() and sent[:, 6].all()
            spans = [shown(row, DOWN) for row in planned.rows]
            assert covered(spans) == (count * itemsize, count * itemsize)  # one down link of each channel: all, once


@pytest.mark.parametrize("version", VERSIONS)
def test_nvls_tree_all_reduce_over_everything(version: str) -> None:
    rng = random.Random(f"nvls {version}")
    for nodes, heads, channels, itemsize in itertools.product((2, 3, 4, 16), (1, 4, 8), (6, 16), (4, 2)):
        for count in counts(rng, nodes):
            call = Collective(ALLREDUCE, NVLSTREE, SIMPLE, count, itemsize)
            more = {"nodes": nodes, "nvls_channels": channels, "heads": heads}
            spans = []
            lengths = set()
            for head in range(heads):
                planned = plan_one(version, 8 * nodes, 16, call, head, **more)
                lengths.add(tuple(schedule.messages(row, DOWN) for row in planned.rows))
                for row in planned.rows:
                    check_fit(row, schedule.places(row, DOWN), count * itemsize)
                    spans.append(shown(row, DOWN))
            assert covered(spans) == (count * itemsize, count * itemsize)
            assert len(lengths) == 1  # all heads send the same number of messages


def _first_bytes(version: str, algorithm: int, protocol: int, size: int, ranks: int, nodes: int, **more: int) -> int:
    planned = plan_one(version, ranks, 1, Collective(ALLREDUCE, algorithm, protocol, size // 4, 4), nodes=nodes, **more)
    return int(schedule.place(planned.rows[0], DOWN, 0)[5])


@pytest.mark.parametrize(
    ("version", "algorithm", "protocol", "size", "nodes", "expected"),
    [
        # LL128, 8 GPUs a node: halved below 64 * 3.8 / 8 = 30.4 chunks, again below 7.6
        ("2.30.7", TREE, LL128, 28 * 576_000, 4, 288_000),
        ("2.30.7", TREE, LL128, 31 * 576_000, 4, 576_000),
        ("2.30.7", TREE, LL128, 16 * 576_000, 4, 288_000),
        ("2.30.7", TREE, LL128, 15 * 576_000, 4, 144_000),
        ("2.30.7", TREE, LL128, 4 * 144_000, 4, 71_040),
        ("2.21.5", TREE, LL128, 4 * 144_000, 4, 72_000),
        # Simple up to 2.19, depth 9: below 72 chunks down to 128 KiB, below 36 to 64 KiB, below 9 to 32 KiB
        ("2.19.4", TREE, SIMPLE, 30 * 524_288, 4, 131_072),
        ("2.19.4", TREE, SIMPLE, 72 * 524_288, 4, 524_288),
        ("2.19.4", TREE, SIMPLE, 35 * 131_072, 4, 65_536),
        ("2.19.4", TREE, SIMPLE, 8 * 65_536, 4, 32_768),
        ("2.20.5", TREE, SIMPLE, 30 * 524_288, 4, 524_288),
        # NVLSTree: the largest chunk by release and number of nodes
        ("2.18.6", NVLSTREE, SIMPLE, 1 << 32, 4, 524_288),
        ("2.19.4", NVLSTREE, SIMPLE, 1 << 32, 3, 524_288),
        ("2.19.4", NVLSTREE, SIMPLE, 1 << 32, 4, 65_536),
        ("2.20.5", NVLSTREE, SIMPLE, 1 << 32, 2, 524_288),
        ("2.21.5", NVLSTREE, SIMPLE, 1 << 32, 2, 131_072),
        ("2.30.7", NVLSTREE, SIMPLE, 1 << 32, 3, 131_072),
        ("2.30.7", NVLSTREE, SIMPLE, 1 << 32, 4, 65_536),
    ],
)
def test_chunks(version: str, algorithm: int, protocol: int, size: int, nodes: int, expected: int) -> None:
    more = {"heads": 8} if algorithm == NVLSTREE else {}
    assert _first_bytes(version, algorithm, protocol, size, 8 * nodes, nodes, **more) == expected
