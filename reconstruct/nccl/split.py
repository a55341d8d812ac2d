"""How NCCL cuts a collective over the channels of a communicator (docs/nccl.md, "Channels").

`shares` gives, for the collectives of one group call in the order in which every connection carries them, the channels
that take part and the elements each of them moves. A collective issued alone is a group of one.

    scheme A (2.18, 2.19)   every channel has a part in each loop over the whole tensor
    scheme B (2.20, 2.21)   each channel one contiguous part, all equal but the last
    scheme C (2.22 on)      contiguous parts of whole cells: a first, equal middle ones, a last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowcheck.errors import FlowcheckError
from reconstruct.nccl.schedule import ALLGATHER, ALLREDUCE, LL, LL128, NVLSTREE, RING, SIMPLE, TREE
from reconstruct.nccl.versions import Traits

__all__ = ["Collective", "Communicator", "Share", "Unsupported", "channel_use", "round_up", "shares"]


class Unsupported(FlowcheckError):
    """A combination whose traffic is not understood: nothing of it may be claimed."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """What a schedule needs to know of one communicator."""

    traits: Traits
    ranks: int
    channels: int
    """All channels of the communicator, also those that a small collective leaves idle."""
    nodes: int
    simple_threads: int = 512
    """Threads of the Simple ring: 256 where the ring is no faster than PCI (one 100 GbE NIC), else 512."""
    nvls_channels: int = 16
    heads: int = 0
    """GPUs per node that NVLSTree uses on the network."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call. count: elements of the tensor; of an all-gather, elements that each rank gives."""

    kind: int
    algorithm: int
    protocol: int
    count: int
    itemsize: int

    def unit(self) -> tuple[int, int]:
        """(count, itemsize) as scheduled: what is only copied is cut by bytes."""
        return (self.count, self.itemsize) if self.kind == ALLREDUCE else (self.count * self.itemsize, 1)


@dataclass(frozen=True, slots=True)
class Share:
    """One channel's part of a collective, in units of `Collective.unit`."""

    channel: int
    first: int
    count: int
    number: int
    """Which share of the collective it is, from 0."""
    shares: int
    threads: int
    """Threads per channel; they decide rounding up to 2.21."""


def round_up(value: int, unit: int) -> int:
    """The multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def channel_use(comm: Communicator, call: Collective, total_bytes: int = -1) -> tuple[int, int]:
    """(channels, threads per channel) for a call; `total_bytes`: of all calls tuned together, if more than this one.

    A small collective uses fewer channels, then fewer threads. NVLSTree always uses all of its channels.
    """
    if call.algorithm == NVLSTREE:
        return comm.nvls_channels, 512
    size = call.count * call.itemsize * (comm.ranks if call.kind == ALLGATHER else 1)
    size = max(size, total_bytes)
    tree = call.algorithm == TREE
    threads = {LL: 512, LL128: 640, SIMPLE: 512 if tree else comm.simple_threads}[call.protocol]
    each = {LL: 8 if tree else 8 * comm.ranks, LL128: 8, SIMPLE: 64}[call.protocol]
    channels = comm.channels
    while size < channels * threads * each:
        if channels > 1:
            channels -= 1
        elif threads % 128 == 0:
            threads //= 2
        else:
            break
    if call.protocol == SIMPLE:
        threads += 128 if tree else 32
    return channels, max(threads, 96)


def shares(comm: Communicator, calls: Sequence[Collective]) -> list[tuple[int, list[Share]]]:
    """(index of the call, its shares by channel) of a group, in the order in which connections carry them.

    Calls of nothing send nothing. Raises Unsupported for several calls in one group before 2.22 and ValueError for
    what is no collective.
    """
    for call in calls:
        _check(comm, call)
    busy = [index for index, call in enumerate(calls) if call.count]
    if not busy or comm.ranks < 2:
        return []
    if comm.traits.scheme == "C":
        return _cells(comm, calls, busy)
    if len(busy) > 1:
        raise Unsupported(
            f"{len(busy)} collectives in one group under NCCL {'.'.join(map(str, comm.traits.version))}: how it lays "
            "them over the channels is not known; use NCCL 2.22 or newer, or issue them one by one"
        )
    call = calls[busy[0]]
    channels, threads = channel_use(comm, call)
    count, itemsize = call.unit()
    if comm.traits.scheme == "A":
        return [(busy[0], [Share(b, 0, count, b, channels, threads) for b in range(channels)])]
    most = round_up(-(-count * itemsize // channels), 16)
    parts = []
    first = 0
    while first < count:
        left = count - first
        part = min(round_up(-(-min(most, left * itemsize) // itemsize), alignment(call, threads)), left)
        parts.append((first, part))
        first += part
    return [(busy[0], [Share(c, f, n, c, len(parts), threads) for c, (f, n) in enumerate(parts)])]


def _check(comm: Communicator, call: Collective) -> None:
    if call.count < 0 or call.itemsize not in (1, 2, 4, 8) or call.protocol not in (LL, LL128, SIMPLE):
        raise ValueError(f"no such collective: {call}")
    if call.kind != ALLREDUCE and call.algorithm != RING:
        raise Unsupported("only all-reduces are known on trees: broadcasts and all-gathers run on the ring")
    if call.algorithm == NVLSTREE and (call.protocol != SIMPLE or not comm.heads):
        raise ValueError("NVLSTree has the Simple protocol and at least one head per node")
    if not 1 <= comm.nodes <= comm.ranks or comm.channels < 1:
        raise ValueError(f"no such communicator: {comm}")


def alignment(call: Collective, threads: int) -> int:
    """Scheme B: elements to which parts and last chunks are rounded up."""
    itemsize = call.unit()[1]
    if call.protocol == LL:
        return 8 // itemsize * threads
    if call.protocol == LL128:
        return 480 // itemsize * (threads // 32)
    return 4096 // itemsize


def _traffic(comm: Communicator, call: Collective) -> int:
    """Bytes that a byte of this call counts in the split of scheme C."""
    factor = {ALLREDUCE: 2, ALLGATHER: comm.ranks}.get(call.kind, 1)
    return factor * (comm.traits.ll_traffic if call.protocol == LL else 1)


def _size_class(comm: Communicator, call: Collective) -> int:
    """By which calls of a group are ordered: a logarithm of the traffic in KiB with two bits of mantissa."""
    factor = {ALLREDUCE: 2, ALLGATHER: comm.ranks}.get(call.kind, 1)
    size = min(1 << 30, call.count * call.itemsize * factor) >> 10
    log = max(0, size.bit_length() - 1)
    return ((log - 1) << 2 if log >= 2 else 0) | (size >> max(0, log - 2) & 3)


def _cells(comm: Communicator, calls: Sequence[Collective], busy: list[int]) -> list[tuple[int, list[Share]]]:
    """Scheme C: the calls one after another over the channels, each channel up to a budget of traffic."""
    traits = comm.traits
    if len({(calls[i].kind, calls[i].algorithm, calls[i].protocol, calls[i].itemsize) for i in busy}) > 1:
        raise Unsupported("a group of collectives of different kinds, types or algorithms: its order is not known")
    order = sorted(busy, key=lambda index: _size_class(comm, calls[index]))
    limit = comm.nvls_channels if calls[order[0]].algorithm == NVLSTREE else comm.channels
    oldest = traits.cell_rule == "2.22"
    floor = 0 if oldest else traits.minimum_traffic
    traffic = sum(max(floor, _traffic(comm, calls[i]) * calls[i].count * calls[i].itemsize) for i in order)
    use = _uses(comm, calls, order)
    budget = traffic // min(limit, sum(channels for channels, _ in use))
    budget = round_up(budget, 16) if traits.cell_rule == "2.29" else max(traits.minimum_traffic, budget)
    result = []
    channel = spent = 0
    for index, (_, threads) in zip(order, use, strict=True):
        call = calls[index]
        count, itemsize = call.unit()
        weight = _traffic(comm, call)
        cell = 16 if oldest else round_up(-(-traits.minimum_traffic // weight), 16)
        cells = -(-count * itemsize // cell)
        room = budget - spent
        room = room // (cell * weight) if oldest else -(-room // (cell * weight))
        low = cells if channel + 1 == limit else min(cells, room)
        each = min(cells, -(-budget // (cell * weight)))
        middle, high = divmod(cells - low, each)
        if channel + (low > 0) + middle + (high > 0) > limit:
            middle = limit - channel - 2
            each, rest = divmod(cells - low, middle + 1)
            high = each + rest
        if high == 0 and middle:
            high, middle = each, middle - 1
        if low == 0:
            channel += 1
            low, high, middle = (each, high, middle - 1) if middle else (high, 0, 0)
        sizes = [low, *[each] * middle, *([high] if high else [])]
        counts = [number * (cell // itemsize) for number in sizes]
        counts[-1] -= cells * (cell // itemsize) - count
        result.append((index, [
            Share(channel + j, sum(counts[:j]), counts[j], j, len(counts), threads) for j in range(len(counts))
        ]))
        last = counts[-1] if oldest else sizes[-1] * (cell // itemsize)
        if high:
            channel += len(counts) - 1
            spent = last * itemsize * weight
        elif middle:
            channel += len(counts)
            spent = 0
        else:
            spent += last * itemsize * weight
        if spent >= budget and channel + 1 != limit:
            channel, spent = channel + 1, 0
    return result


def _uses(comm: Communicator, calls: Sequence[Collective], order: list[int]) -> list[tuple[int, int]]:
    """`channel_use` of each call in order; neighbours within a factor of four of the smallest are tuned as one."""
    result: list[tuple[int, int]] = []
    while len(result) < len(order):
        batch = [order[len(result)]]
        for index in order[len(result) + 1 :]:
            if calls[index].count >= 4 * calls[batch[0]].count:
                break
            batch.append(index)
        ranks = comm.ranks if calls[batch[0]].kind == ALLGATHER else 1
        total = sum(calls[index].count * calls[index].itemsize for index in batch) * ranks
        result += [channel_use(comm, calls[batch[0]], total)] * len(batch)
    return result
