"""What a message holds: NCCL's sums in NCCL's order, and the three ways to write data into a slot.

Own reading of NCCL's source (src/device/prims_*.h, reduce_kernel.h); shares nothing with `reconstruct`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import numpy as np

from flowcheck.lab.nccl_wire_job import LL, LL128, NVLSTREE, RING, Job

SLOT_BYTES = {LL: 65536, LL128: 614400, "simple": 524288}
_STALE = 0xA5
"""Bytes behind a chunk's end: whatever was in the buffer, so nothing that could pass for zero."""

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


def storage(dtype: str) -> np.dtype:
    """How values of `dtype` lie in a numpy array; bfloat16 as uint16."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def _bfloat16_to_float(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _float_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def combiner(dtype: str, op: str) -> Combine:
    """How two values become one: every addition rounds to the tensor's own dtype, as on the GPU."""
    plain: Combine = {"sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    if dtype != "bfloat16":
        return plain

    def combine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return _float_to_bfloat16(plain(_bfloat16_to_float(left), _bfloat16_to_float(right)))

    return combine


def prepared(values: np.ndarray, dtype: str, op: str, ranks: int) -> np.ndarray:
    """A rank's input as it enters the sum: an average of floats scales first (premultiplied sum)."""
    if op != "avg":
        return values
    if dtype == "bfloat16":
        factor = _float_to_bfloat16(np.array([1 / ranks], np.float32))
        return _float_to_bfloat16(_bfloat16_to_float(values) * _bfloat16_to_float(factor))
    if values.dtype.kind != "f":
        return values
    return values * values.dtype.type(1 / ranks)


def finished(values: np.ndarray, dtype: str, op: str, ranks: int) -> np.ndarray:
    """A whole sum as everybody gets it: an average of integers divides at the end."""
    if op != "avg" or dtype == "bfloat16" or values.dtype.kind == "f":
        return values
    return (np.trunc(values / ranks)).astype(values.dtype)


class Sums:
    """The sums of one all-reduce or reduce-scatter, partial and whole, from every rank's (prepared) input."""

    def __init__(self, job: Job, algorithm: str, inputs: list[np.ndarray], dtype: str, op: str) -> None:
        self._job = job
        self._algorithm = algorithm
        self._inputs = inputs
        self._dtype = dtype
        self._op = op
        self._combine = combiner(dtype, op)

    def along(self, ranks: Iterable[int], first: int, length: int) -> np.ndarray:
        """Ring: each rank adds its own to what comes in."""
        parts = (self._inputs[rank][first : first + length] for rank in ranks)
        return reduce(self._combine, parts)

    def below(self, channel: int, rank: int, head: int, first: int, length: int) -> np.ndarray:
        """Tree: what `rank` sends up: its own, then what its children sent, in their order."""
        job = self._job
        if self._algorithm != NVLSTREE:
            return self._below(job.tree(channel)[1], rank, lambda at: self._inputs[at][first : first + length])
        return self._below(
            job.head_tree(channel)[1],
            job.node_of[rank],
            lambda node: self.along(job.node_ranks[node], first, length),
        )

    def _below(
        self, children: tuple[tuple[int, ...], ...], at: int, own: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        return reduce(self._combine, (self._below(children, child, own) for child in children[at]), own(at))

    def whole(self, channel: int, index: int, first: int, length: int) -> np.ndarray:
        """The result; `index`: ring index of the chunk, or the head."""
        job = self._job
        if self._algorithm == RING:
            ring = job.ring(channel)
            total = self.along((ring[(index + 1 + k) % job.ranks] for k in range(job.ranks)), first, length)
        elif self._algorithm == NVLSTREE:
            root = job.node_ranks[job.head_tree(channel)[0]][index]
            total = self.below(channel, root, index, first, length)
        else:
            total = self.below(channel, job.tree(channel)[0], 0, first, length)
        return finished(total, self._dtype, self._op, job.ranks)


def encode(protocol: str, data: np.ndarray, step: int) -> np.ndarray:
    """uint8[wire bytes] of one message: `data` (uint8, contiguous) in the slot of step `step`."""
    if protocol == LL:
        return _ll(data, step)
    return _ll128(data, step) if protocol == LL128 else data


def _padded(data: np.ndarray, unit: int) -> np.ndarray:
    count = -(-data.size // unit) * unit
    if count == data.size:
        return data
    return np.concatenate([data, np.full(count - data.size, _STALE, np.uint8)])


def _ll(data: np.ndarray, step: int) -> np.ndarray:
    flag = (step + 1) & 0xFFFFFFFF
    if step & 0x7FFFFFF8 == 0x7FFFFFF8:  # the flag is about to start again: whole slots clear the old ones
        whole = np.zeros(32768, np.uint8)
        whole[: data.size] = data
        data = whole
    words = _padded(data, 8).view("<u4").reshape(-1, 2)
    lines = np.empty((len(words), 4), "<u4")
    lines[:, 0::2] = words
    lines[:, 1::2] = flag
    return lines.view(np.uint8).reshape(-1)


def _ll128(data: np.ndarray, step: int) -> np.ndarray:
    """Groups of 16 lines; of each half, four lines hold 120 bytes each, four 112 and the 8 that the flags displaced."""
    halves = _padded(data, 1920).reshape(-1, 960)
    lines = np.empty((len(halves), 8, 128), np.uint8)
    quarters = halves[:, :512].reshape(-1, 4, 128)
    lines[:, :4, :120] = quarters[:, :, :120]
    lines[:, 4:, :112] = halves[:, 512:].reshape(-1, 4, 112)
    lines[:, 4:, 112:120] = quarters[:, :, 120:]
    lines[:, :, 120:] = np.array([step + 1], "<u8").view(np.uint8)
    return lines.reshape(-1)
