"""Ring schedules: worked examples, the product of everything that decides the messages, groups."""

from __future__ import annotations

import itertools
import random
import re
import struct

import numpy as np
import pytest
from nccl_plans import PROTOCOLS, VERSIONS, check_fit, counts, covered, floats, plan_one, shown

from reconstruct.nccl import schedule
from reconstruct.nccl.plan import plan
from reconstruct.nccl.schedule import (
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    LL,
    NVLSTREE,
    RING,
    SIMPLE,
    TREE,
)
from reconstruct.nccl.split import Collective, Communicator, Unsupported
from reconstruct.nccl.versions import UnknownVersion, block_versions, parse, traits

# ------------------------------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize("version", ["2.18.6", "2.19.4", "2.20.5", "2.21.5"])
def test_small_ll_ring_of_two(version: str) -> None:
    planned = plan_one(version, 2, 1, Collective(ALLREDUCE, RING, LL, 5000, 4))
    assert floats(planned, 0) == {0: [(3072, 1928, 15424, False), (0, 3072, 24576, True)]}
    assert floats(planned, 1) == {0: [(0, 3072, 24576, False), (3072, 1928, 15424, True)]}


@pytest.mark.parametrize("version", ["2.22.3", "2.23.4", "2.30.7"])
def test_the_same_call_in_newer_releases(version: str) -> None:
    planned = plan_one(version, 2, 1, Collective(ALLREDUCE, RING, LL, 5000, 4))
    assert floats(planned, 0) == {0: [(2500, 2500, 20000, False), (0, 2500, 20000, True)]}


def test_simple_ring_of_four() -> None:
    for version, chunk, last in (("2.30.7", 250000, 250000), ("2.19.4", 250880, 247360)):
        (got,) = floats(plan_one(version, 4, 1, Collective(ALLREDUCE, RING, SIMPLE, 1_000_000, 4)), 2).values()
        assert len(got) == 12
        for s, c in enumerate([1, 0, 3, 2, 1, 0]):
            size = last if c == 3 else chunk
            first, second = got[2 * s], got[2 * s + 1]
            assert (first[0], first[1] + second[1], second[0]) == (c * chunk, size, c * chunk + first[1])
            assert first[3] == second[3] == (s >= 3)
        assert [wire for _, _, wire, _ in got[2:4]] == [500032, 499968] if version == "2.30.7" else [501760, 501760]


@pytest.mark.parametrize("version", VERSIONS)
def test_large_simple_ring_is_the_same_in_all_releases(version: str) -> None:
    got = floats(plan_one(version, 16, 4, Collective(ALLREDUCE, RING, SIMPLE, 6_553_600, 4)), 5)
    for channel, sent in got.items():
        assert {length for _, length, _, _ in sent} == {51200} and len(sent) == 60
        assert min(first for first, *_ in sent) == channel * 1_638_400


def test_small_chunk_has_an_empty_second_slice() -> None:
    got = floats(plan_one("2.30.7", 2, 1, Collective(ALLREDUCE, RING, SIMPLE, 10_000, 4)), 0)[0]
    assert [(wire, final) for _, _, wire, final in got] == [(20000, False), (0, False), (20000, True), (0, True)]


# ------------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize(
    ("version", "kind", "protocol", "ranks", "channels", "size", "parts"),
    [
        # 640 threads x 60 bytes in a broadcast, half of that in an all-gather
        ("2.19.4", BROADCAST, schedule.LL128, 2, 2, 1_000_000, [537_600, 462_400]),
        ("2.19.4", ALLGATHER, schedule.LL128, 2, 2, 1_000_000, [518_400, 481_600]),
        # 512 threads x 8 bytes
        ("2.19.4", BROADCAST, LL, 2, 2, 20_000, [12_288, 7_712]),
        ("2.19.4", ALLGATHER, SIMPLE, 2, 2, 1_000_001, [503_808, 496_193]),
        ("2.20.5", ALLGATHER, SIMPLE, 3, 2, 1_000_000, [503_808, 496_192]),
        # cells of 8192 bytes: an all-gather counts as often as there are ranks, LL four times
        ("2.30.7", ALLGATHER, SIMPLE, 4, 4, 1_000_000, [253_952, 253_952, 253_952, 238_144]),
        ("2.30.7", BROADCAST, LL, 2, 4, 100_000, [32_768, 32_768, 32_768, 1_696]),
        ("2.23.4", BROADCAST, LL, 2, 4, 100_000, [32_768, 32_768, 32_768, 1_696]),
    ],
)
def test_copies_over_channels(
    version: str, kind: int, protocol: int, ranks: int, channels: int, size: int, parts: list[int]
) -> None:
    planned = plan_one(version, ranks, channels, Collective(kind, RING, protocol, size, 1))
    got = [shown(row, 0) for row in planned.rows]
    share = [int((s[:, 1] - s[:, 0]).sum()) // (ranks - 1 if kind == ALLGATHER else 1) for s in got]
    assert share == parts and [int(s[0, 0]) for s in got] == [sum(parts[:j]) for j in range(len(parts))]


RINGS = [(2, 2), (3, 3), (4, 4), (8, 8), (8, 2), (32, 4)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ring_all_reduce_over_everything(version: str, protocol: int) -> None:
    rng = random.Random(f"{version} {protocol}")
    for (ranks, nodes), channels, itemsize in itertools.product(RINGS, (1, 2, 5, 16), (4, 2)):
        for count in counts(rng, ranks):
            call = Collective(ALLREDUCE, RING, protocol, count, itemsize)
            planned = plan_one(version, ranks, channels, call, nodes=nodes)
            tensor = count * itemsize
            assert list(planned.channels) == sorted(set(planned.channels)) and max(planned.channels) < channels
            positions = range(ranks) if ranks <= 4 else rng.sample(range(ranks), 3)
            owned, own, edges = [], {}, {}
            for position in range(ranks):
                if ranks > 8 and position not in positions:
                    continue
                sent = [schedule.places(row, position) for row in planned.rows]
                own[position] = sum(int(list_[list_[:, 1] == ranks - 1][:, 5].sum()) for list_ in sent)
                edges[position] = [shown(row, position) for row in planned.rows]
                for row, list_ in zip(planned.rows, sent, strict=True):
                    check_fit(row, list_, tensor)
                    first_final = list_[list_[:, 1] == ranks - 1]
                    owned.append(np.stack([first_final[:, 4], first_final[:, 4] + first_final[:, 5]], 1))
            once, total = covered(owned)
            assert once == total  # no byte has two owners
            if len(edges) == ranks:
                assert once == tensor  # every byte has one
            for position, (got, pieces) in {at: covered(spans) for at, spans in edges.items()}.items():
                assert got == pieces  # an edge shows nothing twice
                after = (position + 1) % ranks
                assert after not in own or got == tensor - own[after]  # and lacks exactly what its receiver makes
            for a, b in itertools.combinations(edges, 2):
                assert covered(edges[a] + edges[b])[0] == tensor  # any two edges show everything


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_rank_sends_on_is_what_it_received(version: str, protocol: int) -> None:
    rng = random.Random(f"forward {version} {protocol}")
    for ranks, channels, itemsize in itertools.product((2, 3, 7), (1, 3), (4, 2)):
        count = rng.choice([rng.randint(1, 20_000), rng.randint(1, 6_000_000)])
        planned = plan_one(version, ranks, channels, Collective(ALLREDUCE, RING, protocol, count, itemsize))
        for row in planned.rows:
            sent = [schedule.places(row, position) for position in range(ranks)]
            for position in range(ranks):
                mine, before = sent[position], sent[position - 1]
                assert len(mine) == len(before)
                for s in range(1, 2 * ranks - 2):
                    assert (mine[mine[:, 1] == s][:, 3:6] == before[before[:, 1] == s - 1][:, 3:6]).all()
                # So the sum in a final message has every rank's part: n-1 hops before it.
                assert (mine[mine[:, 6] == 1][:, 1] >= ranks - 1).all()
                chunks = {(int(loop), int(chunk)) for loop, _, _, chunk, *_, final in mine if final}
                missing = {(loop, schedule.missing_chunk(ranks, position)) for loop in range(row[schedule.LOOPS])}
                assert not chunks & missing and len(chunks) == row[schedule.LOOPS] * (ranks - 1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_broadcasts_and_all_gathers(version: str, protocol: int) -> None:
    rng = random.Random(f"copy {version} {protocol}")
    for ranks, channels, itemsize in itertools.product((2, 3, 8), (1, 2, 5), (4, 8)):
        for count in counts(rng, ranks)[:4]:
            size = count * itemsize
            planned = plan_one(version, ranks, channels, Collective(BROADCAST, RING, protocol, count, itemsize))
            for position in range(ranks):
                spans = [shown(row, position) for row in planned.rows]
                assert covered(spans) == ((size, size) if position < ranks - 1 else (0, 0))
                for row in planned.rows:
                    check_fit(row, schedule.places(row, position), size)
            planned = plan_one(version, ranks, channels, Collective(ALLGATHER, RING, protocol, count, itemsize))
            order = np.array(rng.sample(range(ranks), ranks))
            for position in range(ranks):
                spans = []
                for row in planned.rows:
                    sent = schedule.places(row, position)
                    check_fit(row, sent, size)
                    at = sent[:, 4] + [schedule.block_offset(row, order, int(chunk)) for chunk in sent[:, 3]]
                    spans.append(np.stack([at, at + sent[:, 5]], 1))
                assert covered(spans) == (size * (ranks - 1), size * (ranks - 1))
                absent = order[(position + 1) % ranks] * size
                merged = np.concatenate(spans)
                assert not ((merged[:, 0] < absent + size) & (merged[:, 1] > absent)).any()


# ----------------------------------------------------------------------------------------- groups, steps, refusals


@pytest.mark.parametrize("version", ["2.22.3", "2.23.4", "2.26.2", "2.30.7"])
def test_grouped_all_reduces(version: str) -> None:
    rng = random.Random(f"group {version}")
    for _ in range(200):
        ranks, channels, protocol = rng.choice((2, 4, 8)), rng.randint(1, 12), rng.choice(PROTOCOLS)
        comm = Communicator(traits(version), ranks, channels, ranks)
        calls = [
            Collective(ALLREDUCE, RING, protocol, rng.choice((0, rng.randint(1, 10_000), rng.randint(1, 3_000_000))), 4)
            for _ in range(rng.randint(1, 9))
        ]
        planned = plan(comm, calls)
        assert sorted(p.call for p in planned) == [i for i, call in enumerate(calls) if call.count]
        sizes = [calls[p.call].count for p in planned]
        assert all(a <= 1.5 * b + 1024 for a, b in itertools.pairwise(sizes))  # smallest first, in classes of size
        last = 0
        for p in planned:
            assert p.channels == tuple(range(p.channels[0], p.channels[0] + len(p.channels)))
            assert last <= p.channels[0] and p.channels[-1] < channels
            last = p.channels[-1]
            spans = [shown(row, position) for row in p.rows for position in (0, 1)]
            assert covered(spans)[0] == 4 * calls[p.call].count


def test_group_lies_over_the_channels_one_after_another() -> None:
    comm = Communicator(traits("2.30.7"), 2, 4, 2)
    calls = [Collective(ALLREDUCE, RING, SIMPLE, 65536, 4) for _ in range(4)]
    assert [(p.call, p.channels) for p in plan(comm, calls)] == [(0, (0,)), (1, (1,)), (2, (2,)), (3, (3,))]
    calls = [Collective(ALLREDUCE, RING, SIMPLE, 98304, 4), Collective(ALLREDUCE, RING, SIMPLE, 32768, 4)]
    comm = Communicator(traits("2.30.7"), 2, 2, 2)
    # The smaller first; the larger has what is left of channel 0.
    assert [(p.call, p.channels) for p in plan(comm, calls)] == [(1, (0,)), (0, (0, 1))]


def test_steps_and_sizes() -> None:
    simple = plan_one("2.30.7", 4, 1, Collective(ALLREDUCE, RING, SIMPLE, 1_000_000, 4)).rows[0]
    tree = plan_one("2.30.7", 4, 1, Collective(ALLREDUCE, TREE, SIMPLE, 1_000_000, 4)).rows[0]
    assert schedule.base_step(simple, 13) == 16 and schedule.base_step(tree, 13) == 13
    assert [schedule.step_of(simple, 16, index) % 8 for index in range(5)] == [0, 2, 4, 6, 0]
    assert schedule.wire_bytes(LL, 8, 2**31 - 8) == schedule.wire_bytes(LL, 0, 2**31 - 1) == 65536
    assert schedule.wire_bytes(LL, 8, 2**31 - 9) == schedule.wire_bytes(LL, 8, 2**31) == 16
    assert schedule.place(simple, 0, 12)[5] == schedule.place(simple, 0, -1)[5] == -1


def test_nothing_is_claimed_of_what_is_not_known() -> None:
    for text in ("2.17.1", "2.31.1", "3.0.0", "2.29.0", "2.29.1", "2.29", "", "new", "2.x.1", "1", "2.20.5.1"):
        with pytest.raises(UnknownVersion):
            traits(text)
    assert parse("2.19.4") == parse("v2.19.4-1") == parse(21904) == parse("21904") == parse((2, 19, 4)) == (2, 19, 4)
    assert parse("2.26.2+cuda12.2") == (2, 26, 2) and parse("2.22") == (2, 22, 0)
    assert traits("2.29.7").block is None
    assert block_versions(2600) == [((2, 19, 0), (2, 19, 99))] and block_versions(2601) == []
    old = Communicator(traits("2.19.4"), 2, 2, 2)
    calls = [Collective(ALLREDUCE, RING, LL, 100, 4)] * 2
    with pytest.raises(Unsupported):
        plan(old, calls)
    with pytest.raises(Unsupported):
        plan(old, [Collective(BROADCAST, TREE, LL, 100, 4)])
    new = Communicator(traits("2.30.7"), 2, 2, 2)
    with pytest.raises(Unsupported):
        plan(new, [calls[0], Collective(ALLREDUCE, RING, SIMPLE, 100, 4)])
    assert plan(new, []) == plan(new, [Collective(ALLREDUCE, RING, LL, 0, 4)]) == []
    assert plan(Communicator(traits("2.30.7"), 1, 2, 1), calls) == []
    for wrong in (Collective(ALLREDUCE, RING, LL, 5, 3), Collective(ALLREDUCE, NVLSTREE, SIMPLE, 5, 4)):
        with pytest.raises(ValueError):
            plan(new, [wrong])


@pytest.mark.parametrize(
    ("first", "last", "layout"),
    [
        ("2.18.6", "2.19.4", "@QIIIIQ"),
        ("2.20.5", "2.23.4", "@QI2IIIQ24x"),
        ("2.24.3", "2.29.7", "@QQ4IIIQ16x"),
        ("2.30.7", "2.30.7", "@QQ8IIIQ"),
    ],
)
def test_cts_entries_are_laid_out_as_c_structures(first: str, last: str, layout: str) -> None:
    """Offsets as the C compiler gives them to a structure of these members."""
    members = ("address", "size", "rkeys", "requests", "tag", "index")
    sizes = re.findall(r"\d*[QI]", layout)
    offsets = [struct.calcsize(f"@{''.join(sizes[:at])}0{sizes[at][-1]}") for at in range(len(sizes))]
    for version in (first, last):
        form = traits(version).cts
        assert form.entry == struct.calcsize(layout) and form.pitch == 8 * form.entry
        assert [getattr(form, name) for name in members] == offsets
        assert form.size_bytes == (8 if sizes[1] == "Q" else 4) and form.rkey_count == int(sizes[2][:-1] or 1)
        assert form.slots == (64 if version == "2.18.6" else 256)


def test_offsets_of_set_up_records() -> None:
    for version in VERSIONS:
        traits_ = traits(version)
        graph, block = traits_.graph, traits_.block
        assert graph.ring_receive + 16 * graph.channels == graph.tree_parent
        assert graph.tree_child1 + 8 * graph.channels <= max(graph.size, graph.head_count)
        if block is not None:
            assert block.fifo_address + 8 <= block.size
            assert block.gid + (block.devices - 1) * block.device_pitch + 16 <= block.size
    assert (traits("2.28.9").immediate_big_endian, traits("2.29.2").immediate_big_endian) == (False, True)
    assert (traits("2.19.4").split_over_qps, traits("2.20.5").split_over_qps) == (True, False)
    assert (traits("2.26.2").socket_inline, traits("2.27.7").socket_inline) == (0, 128)
