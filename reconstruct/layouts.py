"""Which bucket layout DDP used for a reduction: the first one, or the one that it rebuilt after the first pass.

The rebuilt layout comes from rank 0's two broadcasts on the wire or from a report of rank 0; where both tell it they
must agree. Which one a step used is told by its marker (whether DDP had rebuilt its buckets by then), else by the place
of the broadcasts, else by the number of reductions so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowcheck.description import DdpSpec, TensorSpec
from reconstruct.buckets import Layout, LayoutError, layout, looks_like_order, parse_rebuilt


class Layouts:
    """The layouts of one DDP model. `first_tag`: the first collective that the rebuilt layout applies to, if known.

    padding: bytes by which a broadcast may seem longer than its tensor: what fills the last line of NCCL's protocols.
    """

    def __init__(self, ddp: DdpSpec, specs: Sequence[TensorSpec], padding: int = 0) -> None:
        self.initial = layout(ddp.rebuilt_buckets or ddp.initial_buckets, specs)
        self.rebuilt: Layout | None = self.initial if ddp.rebuilt_buckets else None
        self.first_tag: int | None = 0 if ddp.rebuilt_buckets else None
        self.first_passes = 2 if ddp.static_graph else 1  # reductions that DDP makes with the initial layout
        self.unsure = False
        """It is not known how many reductions there were so far: only a marker tells which layout is in force."""
        self._pending = ddp.layout_pending  # the initial layout need not apply to the first pass after the attach
        self._over = False  # a marker said that DDP has rebuilt its buckets
        self._specs = specs
        self._padding = padding
        self._order: tuple[int, np.ndarray] | None = None  # tag and content of the first layout broadcast

    @property
    def least(self) -> int:
        """Bytes of the smallest bucket of any layout that is known."""
        known = [one for one in (self.initial, self.rebuilt) if one is not None]
        return min(bucket.nbytes for one in known for bucket in one.buckets)

    def wanted(self, length: int) -> bool:
        """Whether a broadcast of `length` bytes may be one of the two that tell the rebuilt layout."""
        return self.rebuilt is None and length <= 4 * (len(self._specs) + 1) + self._padding

    def broadcast(self, tag: int, data: np.ndarray) -> bool:
        """Take a broadcast's bytes; True if the rebuilt layout is known now and was not before."""
        count = len(self._specs)
        order = self._integers(data, count + 1)
        if self.rebuilt is not None:
            return False
        if order is not None and looks_like_order(order, count):
            if self._order is None or self._order[0] != tag:
                self._order = (tag, order)
        elif self._order is not None and tag == self._order[0] + 1:
            sizes = self._integers(data, int(self._order[1][-1]))
            if sizes is None:
                return False
            try:
                self.rebuilt = layout(parse_rebuilt(self._order[1], sizes, count), self._specs)
            except LayoutError:
                self._order = None
                return False
            self.first_tag = tag + 1
            return True
        return False

    def _integers(self, data: np.ndarray, count: int) -> np.ndarray | None:
        """int32[count], if the bytes of a broadcast are that many."""
        if not 4 * count <= len(data) <= 4 * count + self._padding:
            return None
        return np.frombuffer(data[: 4 * count].tobytes(), np.int32)

    def report(self, indices: Sequence[Sequence[int]], nbytes: Sequence[int]) -> str | None:
        """Take the layout that rank 0 read from DDP's logging data; a reason if it cannot be right."""
        try:
            reported = layout(indices, self._specs)
            sizes = tuple(bucket.nbytes for bucket in reported.buckets)
            if sizes != tuple(nbytes):
                raise LayoutError(f"its buckets have {sizes} bytes by the parameters and {tuple(nbytes)} by DDP")
        except LayoutError as error:
            return f"the reported bucket layout does not fit the job: {error}"
        if self.rebuilt is None:
            self.rebuilt = reported
        elif self.rebuilt.indices != reported.indices:
            return "the bucket layout on the wire differs from the one that DDP reports"
        return None

    def at(self, tag: int, passes: int) -> Layout | None:
        """The layout of a reduction with `tag` after at most `passes` whole ones; None while not certain."""
        if self.rebuilt is not None and self.first_tag is not None:
            return self.rebuilt if tag >= self.first_tag else self.initial
        return self.initial if passes < self.first_passes and not (self._pending or self.unsure) else None

    def of_step(self, rebuilt: bool | None, steps: int, more: bool) -> tuple[Layout, int] | None:
        """(layout of a step's reduction, first tag that it can have), None while it is not known.

        rebuilt: what the step's marker says, None without one; steps: steps claimed since the attach; more: whether
        the step's own window holds reductions behind the layout broadcasts.
        """
        if rebuilt is None:
            early = steps < self.first_passes
            if self.first_tag is not None:
                rebuilt = more or not early
            elif early and self._pending:
                return None
            else:
                rebuilt = not early
        if not rebuilt:
            return self.initial, 0
        return None if self.rebuilt is None else (self.rebuilt, self.first_tag or 0)

    def of_steps(self, steps: int, count: int, start: int) -> list[tuple[Layout, int, int]] | None:
        """The layouts of `count` steps after the first `steps`, if each is one reduction: (layout, first tag, steps).

        start: first tag that no earlier step has used. None while they are not known.
        """
        first = 0 if self.first_tag is not None and start >= self.first_tag else max(0, self.first_passes - steps)
        parts = [(self.initial, 0, min(count, first))]
        if count > first:
            if self.rebuilt is None:
                return None
            parts.append((self.rebuilt, self.first_tag or 0, count - first))
        return [part for part in parts if part[2]]

    def settled(self, steps: int, start: int, rebuilt: bool | None = None) -> None:
        """`steps` steps are over since the attach, and `start` is the first collective after them. rebuilt: what the
        last one's marker says."""
        self._over = self._over or bool(rebuilt)
        over = self._over or (steps >= self.first_passes and not self.unsure)
        if self.rebuilt is not None and self.first_tag is None and over:
            self.first_tag = start

    def blank(self) -> None:
        """Of a step it is not known which reductions it had."""
        self.unsure = self.unsure or self.first_tag is None
