"""Which rank sends what to which, message by message: lanes of one collective.

A lane is one direction between two ranks on one channel for the time of a collective. Lanes inside a node are there
too: they put nothing on the wire, but what is sent on the wire waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowcheck.lab.nccl_wire_job import NVLSTREE, RING, SIMPLE, TREE, Job
from flowcheck.lab.nccl_wire_split import ALLGATHER, ALLREDUCE, BROADCAST, REDUCESCATTER, Chunk, Cut, Share, shares


class Piece(NamedTuple):
    """One message: `stage` orders it after whatever it waits for, over all lanes of the collective.

    first, length: elements of the whole buffer. terms: the ranks whose values are in it in the order of their
    addition, or None where it is the result; trees say by `Lane.sender` what is in it.
    """

    stage: int
    first: int
    length: int
    final: bool
    terms: tuple[int, ...] | None = None


@dataclass(slots=True)
class Lane:
    channel: int
    sender: int
    receiver: int
    up: bool = False
    head: int = 0
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Layout:
    """A collective's lanes. A message takes `steps` slots; a collective starts at a multiple of `align` of them."""

    lanes: list[Lane]
    results: list[tuple[int, int, Chunk]]
    """(channel, ring index or head, chunk) of everything that is reduced."""
    steps: int
    align: int
    room: int
    """Bytes that the receiver announces for a message of protocol Simple."""


def layout(
    job: Job, cut: Cut, root: int = 0, rank: int | None = None, parts: Sequence[Share] | None = None
) -> Layout:
    """The lanes of one collective that end at `rank`, None for all; `root` is a broadcast's.

    parts: what every channel carries, where it shares them with others of a group.
    """
    two_slices = cut.protocol == SIMPLE and cut.algorithm == RING and cut.kind != BROADCAST
    steps, align, room = (2, 4, 1 << 20) if two_slices else (1, 1, 1 << 19)
    lanes: list[Lane] = []
    results: list[tuple[int, int, Chunk]] = []
    for channel, loops in shares(job, cut) if parts is None else parts:
        if cut.algorithm == RING:
            lanes += _ring_lanes(job, cut, channel, loops, root, two_slices, rank)
            if cut.kind == ALLREDUCE:
                results += [(channel, c, chunk) for chunks in loops for c, chunk in enumerate(chunks)]
        elif cut.algorithm == TREE:
            top, children = job.tree(channel)
            lanes += _tree_lanes(channel, [chunks[0] for chunks in loops], top, children, range(job.ranks), 0, rank)
            results += [(channel, 0, chunks[0]) for chunks in loops]
        else:
            top, children = job.head_tree(channel)
            for head in range(job.heads):
                ranks = [found[head] for found in job.node_ranks]
                lanes += _tree_lanes(channel, [c[head] for c in loops], top, children, ranks, head, rank)
                results += [(channel, head, chunks[head]) for chunks in loops]
    return Layout(lanes, results, steps, align, room)


def _slices(cut: Cut, chunk: Chunk, two: bool) -> list[Chunk]:
    first, length = chunk
    if not two:
        return [chunk]
    size = max(16 * math.ceil(length / 32), 524288 // cut.itemsize * 2 // 32)
    one = min(size, length)
    return [(first, one), (first + one, min(size, length - one))]


def _ring_lanes(
    job: Job, cut: Cut, channel: int, loops: list[list[Chunk]], root: int, two: bool, rank: int | None
) -> list[Lane]:
    ring, n = job.ring(channel), job.ranks
    lanes = []
    steps = {ALLREDUCE: 2 * (n - 1), ALLGATHER: n - 1, REDUCESCATTER: n - 1, BROADCAST: 1}[cut.kind]
    for i, sender in enumerate(ring):
        receiver = ring[(i + 1) % n]
        if rank not in (None, sender, receiver) or (cut.kind == BROADCAST and receiver == root):
            continue
        lane = Lane(channel, sender, receiver)
        behind_root = (i - ring.index(root)) % n
        for number, chunks in enumerate(loops):
            for s in range(steps):
                final, terms = True, None
                if cut.kind == BROADCAST:
                    parts, stage = chunks, number + behind_root
                elif cut.kind == ALLGATHER:
                    parts, stage = [(chunks[0][0] + ring[(i - s) % n] * cut.count, chunks[0][1])], number * steps + s
                else:
                    c = (i - 1 - s) % n
                    final = s >= n - 1
                    terms = None if final else tuple(ring[(c + 1 + k) % n] for k in range(s + 1))
                    stage = number * steps + s
                    block = ring[c] * cut.count if cut.kind == REDUCESCATTER else 0
                    chunk = chunks[0 if cut.kind == REDUCESCATTER else c]
                    parts = [(chunk[0] + block, chunk[1])]
                for k, (first, length) in enumerate(_slices(cut, parts[0], two)):
                    lane.pieces.append(Piece(2 * stage + k if two else stage, first, length, final, terms))
        lanes.append(lane)
    return lanes


def _tree_lanes(
    channel: int,
    chunks: list[Chunk],
    root: int,
    children: tuple[tuple[int, ...], ...],
    ranks: Sequence[int],
    head: int,
    rank: int | None,
) -> list[Lane]:
    """Both directions of every link of a tree whose places are numbered as in `children`; `ranks`: who is at each."""
    heights: dict[int, int] = {}
    depths: dict[int, int] = {}

    def visit(node: int, depth: int) -> int:
        depths[node] = depth
        heights[node] = max((visit(child, depth + 1) + 1 for child in children[node]), default=0)
        return heights[node]

    top = visit(root, 0)
    lanes = []
    for parent in depths:
        for child in children[parent]:
            if rank not in (None, ranks[child], ranks[parent]):
                continue
            rising = [Piece(k + heights[child], *chunk, False) for k, chunk in enumerate(chunks)]
            falling = [Piece(k + top + depths[parent], *chunk, True) for k, chunk in enumerate(chunks)]
            lanes.append(Lane(channel, ranks[child], ranks[parent], True, head, rising))
            lanes.append(Lane(channel, ranks[parent], ranks[child], False, head, falling))
    return lanes


def connections(job: Job) -> list[tuple[int, int, int]]:
    """(channel, sender, receiver) of every network connection that rings and trees of the job may use, sorted."""
    found: set[tuple[int, int, int]] = set()
    for channel in range(job.channels):
        ring = job.ring(channel)
        found |= {(channel, ring[i], ring[(i + 1) % job.ranks]) for i in range(job.ranks)}
        links = [(rank, child) for rank, below in enumerate(job.tree(channel)[1]) for child in below]
        if job.algorithm == NVLSTREE:
            heads = range(job.heads)
            links += [
                (job.node_ranks[node][head], job.node_ranks[child][head])
                for node, below in enumerate(job.head_tree(channel)[1])
                for child in below
                for head in heads
            ]
        for upper, lower in links:
            found |= {(channel, upper, lower), (channel, lower, upper)}
    return sorted(c for c in found if job.hosts[c[1]] != job.hosts[c[2]])
