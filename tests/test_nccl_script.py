"""The tables by which the decoder places packets: the whole product of what decides them, from the blueprint of a
collective to the message that a packet number belongs to."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from nccl_plans import PROTOCOLS, VERSIONS, covered, in_order, room
from test_nccl_group import group

from mirror.memory import address_of
from reconstruct.nccl.binding import Connection
from reconstruct.nccl.blueprint import Blueprints
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.schedule import ALLGATHER, ALLREDUCE, BROADCAST, LL, RING, SLICE_STEPS, SLOT_BYTES, TREE
from reconstruct.nccl.script import (
    T_APART,
    T_FINAL,
    T_FIRST,
    T_LENGTH,
    T_OFFSET,
    T_SHIFT,
    T_STEP,
    T_WHOLE,
    T_WIRE,
    find,
)
from reconstruct.nccl.split import Collective

SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (8, 4)]  # nodes, GPUs of each


def tables(
    known: NcclGroup, call: Collective, *, mtu: int, apart: bool, qps: int, split: bool
) -> dict[Edge, list[np.ndarray]]:
    """Every connection that carries the call -> the table of each of its queue pairs."""
    made = Blueprints(known).get(call, 0)
    assert made is not None
    result = {}
    for edge in edges(known):
        part = made.part(edge)
        if part is not None:
            assert max(part.wires) <= room(part.row)
            result[edge] = [made.table(part, mtu, apart, qps, split, pair, 0, 0) for pair in range(qps)]
    return result


def finals(parts: list[np.ndarray]) -> np.ndarray:
    """int64[n, 2]: first byte and end of the final values that the tables of a connection place."""
    every = np.concatenate([table[:-1] for table in parts])
    every = every[(every[:, T_FINAL] > 0) & (every[:, T_LENGTH] > 0)]
    messages = np.unique(every[:, [T_STEP, T_OFFSET, T_LENGTH]], axis=0)
    return np.stack([messages[:, 1], messages[:, 1] + messages[:, 2]], 1)


def ways(rng: random.Random) -> dict[str, int | bool]:
    qps = rng.choice([1, 1, 2, 4])
    return {"mtu": rng.choice([256, 1024, 4096]), "apart": rng.random() < 0.3, "qps": qps,
            "split": qps > 1 and rng.random() < 0.5}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_edges_of_a_ring_and_one_down_link_of_a_tree_place_every_byte_once(version: str, protocol: int) -> None:
    rng = random.Random(f"tables {version} {protocol}")
    for (nodes, gpus), channels in itertools.product(SHAPES, (1, 4)):
        known = group(nodes, gpus, channels, version=version, algorithms=(RING, TREE))
        for algorithm in (RING, TREE):
            count, itemsize = rng.choice([1, rng.randint(2, 5000), rng.randint(5001, 900_000)]), rng.choice([2, 4])
            made = tables(known, Collective(ALLREDUCE, algorithm, protocol, count, itemsize), **ways(rng))  # type: ignore[arg-type]
            tensor = count * itemsize
            shown = {edge: finals(parts) for edge, parts in made.items()}
            for spans in shown.values():
                assert covered([spans])[0] == covered([spans])[1]  # nothing twice
            down: dict[int, set[int]] = {}
            for a in range(nodes):
                # What node a gets and sends on each channel: two edges of its ring, a link or more of its tree.
                here = [edge for edge in made if a in (known.nodes[edge.sender], known.nodes[edge.receiver])]
                if algorithm == RING:
                    assert covered([shown[edge] for edge in here])[0] == tensor
                else:
                    for edge in here:
                        if len(shown[edge]):
                            down.setdefault(edge.channel, set()).add(covered([shown[edge]])[0])
            if algorithm == TREE:
                assert all(len(sizes) == 1 for sizes in down.values())  # every down link of a channel shows the same
                assert sum(sizes.pop() for sizes in down.values()) == tensor


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_packet_is_beyond_its_slot_and_each_is_found(version: str, protocol: int) -> None:
    rng = random.Random(f"packets {version} {protocol}")
    known = group(3, 1, 2, version=version)
    for kind in (ALLREDUCE, BROADCAST, ALLGATHER):
        way = ways(rng)
        mtu, qps = int(way["mtu"]), int(way["qps"])
        call = Collective(kind, RING, protocol, rng.randint(1, 300_000), 4)
        for parts in tables(known, call, **way).values():  # type: ignore[arg-type]
            pieces: dict[int, list[tuple[int, int, int]]] = {}
            for table in parts:
                count = len(table) - 1
                firsts = table[:, T_FIRST]
                for k in range(count):
                    shift, wire, whole = table[k, [T_SHIFT, T_WIRE, T_WHOLE]].tolist()
                    packets = max(1, -(-wire // mtu)) + int(table[k, T_APART])
                    assert firsts[k] + packets == firsts[k + 1]
                    for inside in {0, packets - 1}:
                        for hint in {0, k, max(0, k - 1), count - 1}:
                            assert find(address_of(table), count, hint, int(firsts[k]) + inside) == k
                    pieces.setdefault(int(table[k, T_STEP]), []).append((shift, wire, whole))
            for step, cut in pieces.items():
                whole = cut[0][2]
                assert whole <= SLOT_BYTES[protocol] * 2 and len(cut) == (qps if way["split"] else 1), step
                at = 0
                for shift, wire, each in sorted(cut):
                    assert each == whole and (wire == 0 or shift == at)
                    at += wire
                assert at == whole


def test_collectives_follow_one_another_on_a_connection() -> None:
    """Numbers and steps of `Connection`, which the tables are made with, against counting."""
    rng = random.Random(5)
    known = group(4, 1, 1, version="2.19.4")
    made = Blueprints(known)
    for edge in edges(known):
        line = Connection(edge)
        rows = []
        for tag in range(60):
            call = Collective(rng.choice((ALLREDUCE, ALLGATHER, BROADCAST)), RING, rng.choice(PROTOCOLS),
                              rng.randint(1, 400_000), 4)  # fmt: skip
            blueprint = made.get(call, 0)
            assert blueprint is not None
            part = blueprint.part(edge)
            if part is not None:
                line.add(tag, blueprint, part, 0)
                rows.append((part.row, part.position))
        sent = in_order(rows)
        assert line.number == len(sent)
        at = 0
        for use in line.uses:
            assert use.number == at and use.base == sent[at].step
            table = use.blueprint.table(use.part, 4096, False, 1, False, 0, 0, 0)
            mine = sent[at : at + use.part.messages]
            assert (table[:-1, T_STEP] + use.base).tolist() == [one.step for one in mine]
            assert use.blueprint.steps(use.part) == len(mine) * use.part.row[SLICE_STEPS]
            at += use.part.messages
        assert at == len(sent)


def test_lls_full_slots_are_in_the_table() -> None:
    known = group(2, 1, 1, version="2.19.4")
    blueprint = Blueprints(known).get(Collective(ALLREDUCE, RING, LL, 4, 4))
    assert blueprint is not None
    part = blueprint.part(edges(known)[0])
    assert part is not None
    usual, rare = (blueprint.table(part, 4096, False, 1, False, 0, 0, base)[:-1, T_WHOLE] for base in (8, 0x7FFFFFF8))
    assert usual.tolist() == list(part.wires) and rare.tolist() == [65536] * part.messages
