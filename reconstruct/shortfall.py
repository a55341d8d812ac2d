"""What the gradients of a job's steps lacked: bytes by cause, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from flowcheck.description import JobDescription
from mirror.loss import CAUSES
from reconstruct.buckets import Bucket, Layout
from reconstruct.causes import Cause
from reconstruct.ranges import Ranges

__all__ = ["CONFLICT", "Shortfall"]

CONFLICT = "conflict"
"""Beside `mirror.loss.CAUSES`: copies of the bytes differ, or their all-reduce proved to have another size."""
_NEWEST = 8


class Shortfall:
    """Of one job. bytes: by cause, of all that are missing; newest: places, as texts, newest last."""

    def __init__(self, description: JobDescription) -> None:
        self.bytes = dict.fromkeys((*CAUSES, CONFLICT), 0)
        self.newest: deque[str] = deque(maxlen=_NEWEST)
        self._names = {p.index: p.name for p in description.parameters if p.index is not None}

    def take(
        self, step: int, layout: Layout, tags: Sequence[int], missing: Sequence[Ranges],
        causes: Callable[[int, int], list[Cause]],
    ) -> None:  # fmt: skip
        """A step is handed out. tags[b] carries bucket b, of which the bytes missing[b] are not known; causes: of a tag
        and its size, see `Decoder.causes`."""
        for number, (bucket, tag, gone) in enumerate(zip(layout.buckets, tags, missing, strict=True)):
            left = gone
            for offset, length, cause in causes(tag, bucket.nbytes) if gone else ():
                mine = left & Ranges.of([(offset, offset + length)])
                left = left - mine
                self._count(step, number, bucket, mine, cause)
            self._count(step, number, bucket, left, CONFLICT)

    def status(self) -> dict[str, Any]:
        """For `flowcheck status`."""
        return {"bytes": dict(self.bytes), "newest": list(self.newest)}

    def _count(self, step: int, number: int, bucket: Bucket, gone: Ranges, cause: str) -> None:
        self.bytes[cause] += gone.total
        ends = (*bucket.offsets[1:], bucket.nbytes)
        for low, high in list(gone)[:_NEWEST]:
            for index, start, end in zip(bucket.parameters, bucket.offsets, ends, strict=True):
                if low < end and start < high:
                    first, last = max(low, start) - start, min(high, end) - start
                    elements = f"{first // bucket.itemsize}:{-(-last // bucket.itemsize)}"
                    self.newest.append(f"step {step}, bucket {number}, {self._names[index]}[{elements}]: {cause}")
