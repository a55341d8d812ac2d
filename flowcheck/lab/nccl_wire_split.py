"""How a collective is cut: which channels take part, and the elements of every chunk of theirs.

Three ways by release: A (2.18, 2.19) lets the channels walk over the tensor together, B (2.20, 2.21) gives each one
contiguous part, C (2.22 on) makes parts of cells. Own reading of NCCL's source (src/enqueue.cc, src/device/); shares
nothing with `reconstruct`. Lengths are in elements unless they say bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowcheck.lab.nccl_wire_job import LL, LL128, NVLSTREE, RING, SIMPLE, TREE, Job

ALLREDUCE, BROADCAST, ALLGATHER, REDUCESCATTER = "allreduce", "broadcast", "allgather", "reducescatter"
_FULL_BYTES = {LL: 32768, LL128: 576000, SIMPLE: 524288}
_GRAIN_BYTES = {LL: 16, LL128: 1920, SIMPLE: 512}

Chunk = tuple[int, int]
"""(first element, elements)"""


@dataclass(frozen=True, slots=True)
class Cut:
    """What is cut: `count` elements (of one rank's block in all-gather and reduce-scatter) of `itemsize` bytes.

    Broadcasts and all-gathers are moved as bytes: itemsize 1.
    """

    kind: str
    algorithm: str
    protocol: str
    count: int
    itemsize: int

    def bytes_in_all(self, ranks: int) -> int:
        blocks = ranks if self.kind in (ALLGATHER, REDUCESCATTER) else 1
        return self.count * self.itemsize * blocks


Share = tuple[int, list[list[Chunk]]]
"""(channel, its loops: the chunks of each). All-reduce rings: a chunk per ring index; else one chunk per loop;
NVLSTree: one per head."""


def shares(job: Job, cut: Cut) -> list[Share]:
    """Every channel that takes part, in order."""
    used, threads = _channels(job, cut)
    if job.release < (2, 20):
        return _walk_together(job, cut, used, threads)
    if job.release >= (2, 22):
        return group_shares(job, [cut], [used])[0]
    parts = _contiguous(job, cut, used, threads)
    return [(channel, _part(job, cut, first, length, used, threads)) for channel, first, length in parts]


def channels_used(job: Job, cut: Cut) -> int:
    """How many channels NCCL gives a collective, or several of a group as if they were one of all their elements."""
    return _channels(job, cut)[0]


def _channels(job: Job, cut: Cut) -> tuple[int, int]:
    """(channels that may be used, threads): few bytes leave channels idle, then threads."""
    used = job.channels
    total = cut.bytes_in_all(job.ranks)
    if cut.algorithm == NVLSTREE:
        return used, 0
    tree = cut.algorithm == TREE
    threads = {LL: 512, LL128: 640, SIMPLE: 512 if tree else job.simple_threads}[cut.protocol]
    threshold = {LL: 8 if tree else 8 * job.ranks, LL128: 8, SIMPLE: 64}[cut.protocol]
    while total < used * threads * threshold:
        if used >= 2:
            used -= 1
        elif threads % 128 == 0:
            threads //= 2
        else:
            break
    if cut.protocol == SIMPLE:
        threads += 128 if tree else 32
    return used, max(threads, 96)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _full(job: Job, cut: Cut) -> int:
    """Elements of a whole chunk; Simple rings that reduce or gather have four slots in one."""
    slots = 4 if cut.protocol == SIMPLE and cut.algorithm == RING and cut.kind != BROADCAST else 1
    return _FULL_BYTES[cut.protocol] * slots // cut.itemsize


# -- A: 2.18, 2.19 -------------------------------------------------------------------------------------------------


def _walk_together(job: Job, cut: Cut, used: int, threads: int) -> list[Share]:
    if cut.algorithm == RING:
        return _rings_together(job, cut, used, threads)
    if cut.algorithm == TREE:
        chunk = _tree_chunk_before_2_20(job, cut, used) // cut.itemsize
        loop = used * chunk
        loops = math.ceil(cut.count / loop) if cut.count >= loop else 1
        if loop > cut.count:
            unit = {
                SIMPLE: (threads - 64) * 8 * (8 // cut.itemsize),
                LL: threads * (8 // cut.itemsize),
                LL128: threads * (60 // cut.itemsize) // 8,
            }[cut.protocol]
            chunk = math.ceil(cut.count / (used * unit)) * unit
        return [
            (b, [[_clamp(cut.count, k * loop + b * chunk, chunk)] for k in range(loops)]) for b in range(used)
        ]
    heads = job.heads
    chunk = _nvls_chunk(job, cut.count * cut.itemsize, used) // cut.itemsize
    loop = used * heads * chunk
    return [
        (
            c,
            [
                [_clamp(cut.count, k * loop + (c * heads + h) * chunk, chunk) for h in range(heads)]
                for k in range(math.ceil(cut.count / loop))
            ],
        )
        for c in range(used)
    ]


def _clamp(count: int, first: int, length: int) -> Chunk:
    return first, max(0, min(length, count - first))


def _rings_together(job: Job, cut: Cut, used: int, threads: int) -> list[Share]:
    chunks = job.ranks if cut.kind in (ALLREDUCE,) else 1
    full = _full(job, cut)
    loop = used * chunks * full
    found: list[list[list[Chunk]]] = [[] for _ in range(used)]
    for start in range(0, cut.count, loop):
        rest = cut.count - start
        if cut.protocol == SIMPLE:
            size = _up(min(full, math.ceil(rest / (used * chunks))), (threads - 32) * 8 // cut.itemsize)
        else:
            unit = threads * 8 // cut.itemsize
            if cut.protocol == LL128:
                unit = threads * (60 // cut.itemsize)
                if cut.kind != BROADCAST:
                    unit //= 2
            size = min(full, math.ceil(rest / (used * chunks * unit)) * unit)
        for b in range(used):
            places = range(chunks)
            if cut.protocol == SIMPLE:
                firsts = [start + (b * chunks + c) * size for c in places]
            else:
                firsts = [start + (c * used + b) * size for c in places]
            found[b].append([_clamp(cut.count, first, size) for first in firsts])
    return list(enumerate(found))


def _tree_chunk_before_2_20(job: Job, cut: Cut, used: int) -> int:
    """Bytes."""
    total = cut.count * cut.itemsize
    if cut.protocol == LL:
        return 32768
    if cut.protocol == LL128:
        return _halved_ll128(job, 614400, total, used) * 15 // 16
    chunk = 524288
    depth = job.ranks // job.nodes - 1 + int(math.log2(job.nodes))
    for factor, least in ((8, 131072), (4, 65536), (1, 32768)):
        while total // (used * chunk) < factor * depth and chunk > least:
            chunk //= 2
    return chunk


def _halved_ll128(job: Job, chunk: int, total: int, used: int) -> int:
    per_node = np.float32(job.ranks) / np.float32(job.nodes)
    depth = np.float32(1 + int(math.log2(job.nodes))) + np.float32(0.1) * per_node
    for factor, least in ((64, 131072), (16, 32768)):
        while np.float32(total // (used * chunk)) < depth * np.float32(factor) / per_node and chunk > least:
            chunk //= 2
    return chunk


# -- B and C: contiguous parts -------------------------------------------------------------------------------------


def _unit(cut: Cut, threads: int) -> int:
    """B: what chunks and parts are rounded up to."""
    return {
        LL: 8 * threads // cut.itemsize,
        LL128: 480 // cut.itemsize * (threads // 32),
        SIMPLE: 4096 // cut.itemsize,
    }[cut.protocol]


def _contiguous(job: Job, cut: Cut, used: int, threads: int) -> list[tuple[int, int, int]]:
    """B: (channel, first, length) of each part."""
    unit = _unit(cut, threads)
    per = _up(math.ceil(cut.count * cut.itemsize / used), 16)
    first, parts = 0, []
    for channel in range(used):
        left = cut.count - first
        if left <= 0:
            break
        length = min(_up(math.ceil(min(per, left * cut.itemsize) / cut.itemsize), unit), left)
        parts.append((channel, first, length))
        first += length
    return parts


def group_shares(job: Job, cuts: Sequence[Cut], used: Sequence[int]) -> list[list[Share]]:
    """C: shares of the collectives of one group, in the order in which the channels take them.

    They lie over the channels one after another, every channel up to the same traffic. `used`: channels that each may
    use. All are of one kind and type.
    """
    if job.release < (2, 22):
        raise NotImplementedError(f"groups of NCCL {job.version} are not known to the lab: choose 2.22 or later")
    return [
        [(channel, _part(job, cut, first, length, among, 0)) for channel, first, length in parts]
        for cut, among, parts in zip(cuts, used, _cells(job, cuts, used), strict=True)
    ]


def traffic_class(traffic: int) -> int:
    """C: by which a group is sorted, least traffic first: four classes per power of two of KiB.

    The calls of a class stay in order.
    """
    size = min(traffic, 1 << 30) >> 10
    exponent = max(size.bit_length() - 1, 0)
    if exponent < 2:
        return size
    return (exponent - 1) * 4 + (size >> exponent - 2 & 3)


def traffic_weight(job: Job, kind: str, protocol: str | None = None) -> int:
    """C: bytes of traffic that a byte counts; `protocol` None: for the order of a group."""
    weight = {ALLREDUCE: 2, BROADCAST: 1}.get(kind, job.ranks)
    return weight * 4 if protocol == LL and job.release >= (2, 26) else weight


def _cells(job: Job, cuts: Sequence[Cut], used: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """C: (channel, first, length) of each collective's parts; cells are numbered through all parts of one."""
    release = job.release
    least = 512 if release < (2, 23) else 16384 if release < (2, 29) else 32768
    traffic = 0
    for cut in cuts:
        own = traffic_weight(job, cut.kind, cut.protocol) * cut.count * cut.itemsize
        traffic += own if release < (2, 23) else max(own, least)
    traffic //= min(job.channels, sum(used))
    traffic = _up(traffic, 16) if release >= (2, 29) else max(least, traffic)
    channel = filled = 0
    found = []
    for cut in cuts:
        weight = traffic_weight(job, cut.kind, cut.protocol)
        cell = 16 if release < (2, 23) else _up(math.ceil(least / weight), 16)
        cells = math.ceil(cut.count * cut.itemsize / cell)
        per = min(cells, math.ceil(traffic / (cell * weight)))
        if channel + 1 == job.channels:
            low = cells
        elif release < (2, 23):
            low = min(cells, (traffic - filled) // (cell * weight))
        else:
            low = min(cells, math.ceil((traffic - filled) / (cell * weight)))
        middle, high = divmod(cells - low, per)
        if channel + (low > 0) + middle + (high > 0) > job.channels:
            middle = job.channels - channel - 2
            per = (cells - low) // (middle + 1)
            high = per + (cells - low) % (middle + 1)
        if high == 0 and middle > 0:
            high, middle = per, middle - 1
        if low == 0:
            channel += 1
            if middle == 0:
                low, high = high, 0
            else:
                low, middle = per, middle - 1
        in_cells = [size for size in (low, *[per] * middle, high) if size]
        sizes = [size * cell // cut.itemsize for size in in_cells]
        sizes[-1] -= sum(sizes) - cut.count
        firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        found.append([(channel + i, first, size) for i, (first, size) in enumerate(zip(firsts, sizes, strict=True))])
        last = weight * (sizes[-1] * cut.itemsize if release < (2, 23) else in_cells[-1] * cell)
        if high:
            channel, filled = channel + len(sizes) - 1, last
        elif middle:
            channel, filled = channel + len(sizes), 0
        else:
            filled += last
        if filled >= traffic and channel + 1 != job.channels:
            channel, filled = channel + 1, 0
    return found


def _part(job: Job, cut: Cut, first: int, length: int, used: int, threads: int) -> list[list[Chunk]]:
    """The loops of one channel's part."""
    if cut.algorithm == NVLSTREE:
        return _nvls_part(job, cut, first, length, used)
    chunk = _full(job, cut)
    if cut.algorithm == TREE and cut.protocol == LL128:
        data = 576000
        if job.release < (2, 22):
            chunk = _halved_ll128(job, data, cut.count * cut.itemsize, used) // cut.itemsize
        else:
            chunk = _halved_ll128(job, data, length * cut.itemsize, 1) // 1920 * 1920 // cut.itemsize
    elif job.release >= (2, 22):
        grain = _GRAIN_BYTES[cut.protocol] // cut.itemsize
        chunk = chunk // grain * grain
    if cut.algorithm == TREE or cut.kind != ALLREDUCE:
        return [[(first + e, min(chunk, length - e))] for e in range(0, length, chunk)]
    loops = []
    ranks = job.ranks
    for e in range(0, length, ranks * chunk):
        rest = length - e
        size = chunk
        if rest < ranks * chunk:
            unit = _unit(cut, threads) if job.release < (2, 22) else 16 // cut.itemsize
            size = _up(math.ceil(rest / ranks), unit)
        loops.append(
            [(first + e + c * size, max(0, min(size, rest - c * size))) for c in range(ranks)]
        )
    return loops


# -- NVLSTree ------------------------------------------------------------------------------------------------------


def _nvls_chunk(job: Job, total: int, used: int) -> int:
    """Bytes of a chunk for `total` bytes over `used` channels."""
    release, wide = job.release, job.nodes >= 4
    if release < (2, 19):
        chunk = 524288
    elif release < (2, 20):
        chunk = 65536 if wide else 524288
    else:
        chunk = 524288 if release < (2, 21) else 131072
        if wide:
            chunk = min(chunk, 65536)
    for factor, smaller in ((32, 262144), (16, 131072), (4, 65536), (1, 32768)):
        if total < factor * used * job.heads * chunk and chunk > smaller:
            chunk = smaller
    return chunk if release < (2, 22) else chunk // 512 * 512


def _nvls_part(job: Job, cut: Cut, first: int, length: int, used: int) -> list[list[Chunk]]:
    heads = job.heads
    if job.release < (2, 22):
        chunk = _nvls_chunk(job, cut.count * cut.itemsize, used) // cut.itemsize
        unit = 4096 // cut.itemsize
    else:
        chunk = _nvls_chunk(job, length * cut.itemsize, 1) // cut.itemsize
        unit = 16 // cut.itemsize
    loops = []
    for e in range(0, length, heads * chunk):
        rest = length - e
        size = chunk if rest >= heads * chunk else _up(math.ceil(rest / heads), unit)
        loops.append([(first + e + h * size, max(0, min(size, rest - h * size))) for h in range(heads)])
    return loops
