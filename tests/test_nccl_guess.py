"""Recognition of collectives by their lengths: what is planned fits, what happened is always among the guesses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nccl_plans import VERSIONS
from test_nccl_group import group

from reconstruct.nccl.group import NOWHERE, Edge, NcclGroup, communicator, edges, row_position
from reconstruct.nccl.guess import Guess, Seen, guess
from reconstruct.nccl.plan import plan
from reconstruct.nccl.schedule import (
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    LL,
    LL128,
    NVLSTREE,
    RING,
    SIMPLE,
    TREE,
    places,
    wire_bytes,
)
from reconstruct.nccl.sizes import fit, rows_by_channel
from reconstruct.nccl.split import Collective


def rows(known: NcclGroup, call: Collective, head: int = 0) -> dict[int, np.ndarray]:
    (planned,) = plan(communicator(known), [call], max(0, head))
    return rows_by_channel(planned)


def sent(known: NcclGroup, call: Collective, edge: Edge, root: int = 0) -> list[int]:
    """Wire lengths of a collective on one connection."""
    position = row_position(edge, call.algorithm, call.kind, root, known.rings[0])
    row = rows(known, call, edge.head if call.algorithm == NVLSTREE else 0).get(edge.channel)
    if row is None or position == NOWHERE:
        return []
    return [int(wire_bytes(call.protocol, int(one[5]), 0)) for one in places(row, position)]


def matching(guesses: list[Guess], call: Collective, used: dict[Edge, int]) -> list[Guess]:
    kind = (call.kind, call.algorithm, call.protocol)
    return [g for g in guesses if (g.kind, g.algorithm, g.protocol) == kind and g.used == used]


# ---------------------------------------------------------------------------------------------------- fit


def fits(
    planned: dict[int, np.ndarray], edge: Edge, lengths: list[int], step: int = 0, kind: int = ALLREDUCE, root: int = 0,
    ring: tuple[int, ...] = (),
) -> int | None:
    """Messages that a ring collective takes on a connection in all; None if these lengths are not its."""
    position, row = row_position(edge, RING, kind, root, ring), planned.get(edge.channel)
    if row is None or position == NOWHERE:
        return 0
    taken = int(fit(row, position, np.array(lengths, np.int64), step))
    return taken if taken >= 0 else None


def test_a_planned_collective_fits_its_own_messages_and_no_others() -> None:
    known = group(4, 1, 2)
    call = Collective(ALLREDUCE, RING, LL, 100_000, 4)
    planned = rows(known, call)
    for edge in edges(known):
        whole = sent(known, call, edge)
        for seen in (0, 1, len(whole) - 1, len(whole)):
            assert fits(planned, edge, whole[:seen]) == len(whole)
        assert fits(planned, edge, [*whole, 7]) == len(whole)  # what follows is not looked at
        assert fits(planned, edge, [-1] * len(whole)) == len(whole)
        for wrong in range(len(whole)):
            changed = list(whole)
            changed[wrong] += 16
            assert fits(planned, edge, changed) is None
            changed[wrong] = -1
            assert fits(planned, edge, changed) == len(whole)


def test_what_takes_no_part_takes_no_messages() -> None:
    known = group(2, 1, 4, algorithms=(RING, TREE))
    small = rows(known, Collective(ALLREDUCE, RING, LL, 4, 4))
    by_channel = {e.channel: e for e in edges(known) if e.sender == 0}
    assert fits(small, by_channel[0], [0, 32]) == 2
    assert fits(small, by_channel[3], [123]) == 0
    copy = rows(known, Collective(BROADCAST, RING, LL, 4, 4))
    assert fits(copy, by_channel[0], [32], kind=BROADCAST) == 1
    # Into the root nothing is sent.
    assert fits(copy, by_channel[0], [16], kind=BROADCAST, root=1, ring=(0, 1)) == 0


def test_full_slots_once_in_two_billion_steps() -> None:
    known = group(2, 1, 1)
    planned = rows(known, Collective(ALLREDUCE, RING, LL, 4, 4))
    edge = edges(known)[0]
    assert fits(planned, edge, [65536, 65536], step=0x7FFFFFF8) == 2
    assert fits(planned, edge, [0, 32], step=0x7FFFFFF8) is None
    assert fits(planned, edge, [0, 32], step=0x7FFFFFF0) == 2
    assert fits(planned, edge, [65536, 0], step=0x7FFFFFFE) is None


# -------------------------------------------------------------------------------------------------- guess


def seen_by(known: NcclGroup, calls: list[Collective], open_: bool = True) -> list[Seen]:
    return [Seen(e, tuple(n for call in calls for n in sent(known, call, e)), open_) for e in edges(known)]


def test_ddps_first_messages_one_after_another() -> None:
    """The captures' job: 16 | 64 | 40000 | 15424, 24576 from rank 0 and 16 | 24576, 15424 from rank 1."""
    known = group(2, 1, 1, protocols=(LL,))
    comm = communicator(known)
    out, back = edges(known)
    lines = {out: (16, 64, 40000, 15424, 24576), back: (16, 24576, 15424)}
    first = guess(comm, known, [Seen(e, n, True) for e, n in lines.items()])
    gather = [g for g in first if g.kind == ALLGATHER and g.whole]
    assert [(g.least, g.bytes, g.exact, g.used) for g in gather] == [(1, 8, False, {out: 1, back: 1})]
    after = {out: lines[out][1:], back: lines[back][1:]}
    second = guess(comm, known, [Seen(e, n, True) for e, n in after.items()])
    copies = [g for g in second if g.kind == BROADCAST and g.whole and g.root == 0]
    assert [(g.least, g.bytes, g.used) for g in copies] == [(25, 32, {out: 1, back: 0})]
    last = guess(comm, known, [Seen(out, lines[out][3:], False), Seen(back, lines[back][1:], False)])
    (reduce,) = [g for g in last if g.kind == ALLREDUCE]
    assert (reduce.least, reduce.bytes, reduce.whole) == (19993, 20000, True)
    assert not any(g.kind == ALLGATHER for g in last)  # both directions of one would be equally long


def test_a_barrier_is_one_element() -> None:
    known = group(4, 1, 2, protocols=(LL,))
    call = Collective(ALLREDUCE, RING, LL, 1, 4)
    used = {e: len(sent(known, call, e)) for e in edges(known)}
    (found,) = matching(guess(communicator(known), known, seen_by(known, [call])), call, used)
    assert (found.least, found.bytes, found.whole, found.exact) == (1, 8, True, False)


def test_exact_only_where_every_byte_shows() -> None:
    known = group(2, 1, 1, protocols=(SIMPLE,))
    call = Collective(BROADCAST, RING, SIMPLE, 1_234_567, 1)
    used = {e: len(sent(known, call, e)) for e in edges(known)}
    for found in matching(guess(communicator(known), known, seen_by(known, [call])), call, used):
        assert (found.exact, found.bytes, found.whole) == (True, 1_234_567, True)
    known = group(2, 1, 4, protocols=(SIMPLE,), version="2.26.2")
    call = Collective(BROADCAST, RING, SIMPLE, 1_234_567, 1)
    part = [s for s in seen_by(known, [call]) if s.edge.channel == 0]
    used = {s.edge: len(s.lengths) for s in part}
    found, *_ = matching(guess(communicator(known), known, part), call, used)
    assert not found.exact and found.least < 1_234_567 <= found.bytes < 1_400_000


def test_a_collective_under_way_is_not_whole() -> None:
    known = group(4, 1, 1, protocols=(LL,))
    call = Collective(ALLREDUCE, RING, LL, 4000, 4)
    begun = [Seen(s.edge, s.lengths[:3], True) for s in seen_by(known, [call])]
    guesses = guess(communicator(known), known, begun)
    assert any(g.kind == ALLREDUCE and g.used == {} for g in guesses)
    assert not any(g.kind == ALLREDUCE and g.whole for g in guesses)
    # If nothing more can come, it is none.
    over = guess(communicator(known), known, [Seen(s.edge, s.lengths, False) for s in begun])
    assert not any(g.kind == ALLREDUCE for g in over)


def test_several_readings_are_all_returned() -> None:
    """Two full chunks: one broadcast of two, or two of one."""
    known = group(2, 1, 1, protocols=(LL,))
    out = edges(known)[0]
    guesses = [g for g in guess(communicator(known), known, [Seen(out, (65536, 65536), True)]) if g.kind == BROADCAST]
    assert {(g.least, g.bytes, tuple(g.used.values())) for g in guesses if g.root == -1} == {
        (32761, 32768, (1,)), (65529, 65536, (2,)), (0, 65536, ()),
    }


def test_what_no_collective_sends_is_not_explained() -> None:
    known = group(4, 1, 1, protocols=(LL, LL128))
    out = edges(known)[0]
    assert guess(communicator(known), known, [Seen(out, (17,), True)]) == []
    assert guess(communicator(known), known, [Seen(out, (), True)]) == []
    # A second partial chunk in a loop: the sizes of an all-reduce fall once only.
    guesses = guess(communicator(known), known, [Seen(out, (16, 32, 64, 16, 32, 64), False)])
    assert not any(g.kind == ALLREDUCE for g in guesses)


    # Rank 0 sends chunk 3 first, then chunk 2, which is never the shorter one: no beginning of an all-reduce either.
    begun = guess(communicator(known), known, [Seen(out, (64, 32), True)])
    assert begun and not any(g.kind == ALLREDUCE for g in begun)


def test_a_channel_that_must_take_part_cannot_stand_aside() -> None:
    known = group(2, 1, 2, protocols=(LL,))
    call = Collective(ALLREDUCE, RING, LL, 20_000, 4)
    used = {e: len(sent(known, call, e)) for e in edges(known)}
    lines = seen_by(known, [call])
    assert matching(guess(communicator(known), known, lines), call, used)
    odd = [Seen(s.edge, (17,) if s.edge.channel else s.lengths, True) for s in lines]
    assert not any(g.kind == ALLREDUCE and g.used for g in guess(communicator(known), known, odd))


def test_a_length_that_was_not_captured_is_none() -> None:
    known = group(2, 1, 1, protocols=(LL,))
    call = Collective(ALLREDUCE, RING, LL, 5000, 4)
    lines = [Seen(s.edge, (-1, *s.lengths[1:]), True) for s in seen_by(known, [call])]
    used = {s.edge: 2 for s in lines}
    (found,) = matching(guess(communicator(known), known, lines), call, used)
    assert found.least <= 20000 <= found.bytes and found.whole


CASES = [
    (version, kind, algorithm, protocol)
    for version in VERSIONS
    for kind, algorithm in (
        (ALLREDUCE, RING), (ALLREDUCE, TREE), (ALLREDUCE, NVLSTREE), (BROADCAST, RING), (ALLGATHER, RING)
    )
    for protocol in (LL, LL128, SIMPLE)
    if algorithm != NVLSTREE or protocol == SIMPLE
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_what_happened_is_always_among_the_guesses(version: str) -> None:
    rng = random.Random(f"guess {version}")
    judged = 0
    for _, kind, algorithm, protocol in [case for case in CASES if case[0] == version]:
        nodes, gpus, channels = rng.choice((2, 3, 4, 8)), rng.choice((1, 2)), rng.choice((1, 2, 4))
        known = group(nodes, gpus, channels, version=version, algorithms=(RING, algorithm), protocols=(protocol,))
        call = Collective(kind, algorithm, protocol, rng.choice((1, rng.randint(1, 5000), rng.randint(1, 900_000))),
                          rng.choice((1, 2, 4, 8)))
        root = rng.randrange(nodes * gpus)
        behind = [Collective(ALLREDUCE, RING, protocol, rng.randint(1, 50_000), 4)][: rng.randint(0, 1)]
        node = rng.randrange(nodes)
        lines = []
        for edge in edges(known):
            if node in (known.nodes[edge.sender], known.nodes[edge.receiver]):
                lengths = sent(known, call, edge, root) + [n for other in behind for n in sent(known, other, edge)]
                lines.append(Seen(edge, tuple(lengths), True))
        used = {s.edge: len(sent(known, call, s.edge, root)) for s in lines}
        if not any(used.values()):
            continue
        guesses = guess(communicator(known), known, lines)
        size = call.count * call.itemsize
        right = [g for g in matching(guesses, call, used) if g.whole and g.least <= size <= g.bytes]
        judged += bool(right)
        # Where 2.22's split defeats the search, it says that there may be more.
        assert right or (version == "2.22.3" and matching(guesses, call, {})), (call, nodes, gpus, channels, root)
        for g in guesses:  # and every guess of a size is one whose plan gives what was seen
            if g.used and g.whole:
                other = Collective(g.kind, g.algorithm, g.protocol, g.bytes // g.itemsize, g.itemsize)
                for s in lines:
                    silent = g.used[s.edge] == 0
                    expected = [] if silent else sent(known, other, s.edge, known.rings[0][0])
                    if g.kind != BROADCAST or not silent:
                        assert list(s.lengths[: g.used[s.edge]]) == expected or g.kind == BROADCAST, g
    assert judged >= 8
