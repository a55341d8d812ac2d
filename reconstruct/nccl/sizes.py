"""From wire lengths to the sizes of collectives: the inverse of `plan.plan`, by bounding and comparing.

What each connection says by itself: after which loops a collective can be over, and how many bytes its channel's share
then has. A share bounds the tensor; sizes in between are planned and compared with every connection. The plan changes
with the size in long runs: `_frame` stays the same while only the last share grows, `_layout` while only its end moves.
Inside a layout more elements mean more bytes, so a few comparisons find all sizes that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numba import njit

from reconstruct.nccl.group import Edge
from reconstruct.nccl.plan import Planned, plan
from reconstruct.nccl.schedule import (
    ALLGATHER,
    ALLREDUCE,
    BLOCK,
    BROADCAST,
    CHUNKS,
    END,
    GRAIN,
    LL,
    LL128,
    LOOP,
    LOOPS,
    NVLSTREE,
    PROTOCOL,
    RING,
    SIMPLE,
    SLICE_STEPS,
    SLICES,
    SLOT_BYTES,
    SLOT_DATA,
    START,
    base_step,
    begin_row,
    messages,
    place,
    step_of,
    wire_bytes,
)
from reconstruct.nccl.split import Collective, Communicator, channel_use

__all__ = ["Line", "Search"]

_MOST_ENDS = 32  # ends to try where loop after loop is full
_UNIT_WIRE = (16, 2048, 1)
_UNIT_DATA = (8, 1920, 1)


def rows_by_channel(planned: Planned) -> dict[int, np.ndarray]:
    """Row of each channel that takes part."""
    return dict(zip(planned.channels, planned.rows, strict=True))


@njit(cache=True, nogil=True)
def fit(row: np.ndarray, position: int, lengths: np.ndarray, step: int) -> int:
    """Messages of the row; -1 if `lengths` contradict it."""
    total = messages(row, position)
    base = base_step(row, step)
    for index in range(min(total, lengths.size)):
        if lengths[index] >= 0:
            length = place(row, position, index)[5]
            if wire_bytes(row[PROTOCOL], length, step_of(row, base, index)) != lengths[index]:
                return -1
    return total


@njit(cache=True, nogil=True)
def _wire_sum(row: np.ndarray, position: int, end: int, lengths: np.ndarray) -> int:
    """Wire bytes of the row's messages, were `end` its end, as far as `lengths` knows their lengths."""
    other = row.copy()
    other[END] = end
    total = 0
    for index in range(min(messages(other, position), lengths.size)):
        if lengths[index] >= 0:
            total += wire_bytes(row[PROTOCOL], place(other, position, index)[5], 0)
    return total


@njit(cache=True, nogil=True)
def _loop_can_be(chunks: int, position: int, slices: int, loop: np.ndarray) -> bool:
    """Whether these can be the messages of a loop, or its first ones.

    By rising chunk come equal lengths, at most one shorter one, empty ones; a chunk that passes twice has the same
    length both times; a second slice is not longer than the first. chunks: 1 where every message is one of its own.
    """
    known = np.full(chunks, -1, np.int64)
    for step in range(loop.size // slices):
        first = loop[step * slices]
        last = loop[step * slices + slices - 1]
        if first < 0 or last < 0:
            continue
        if last > first:
            return False
        size = first + last if slices == 2 else first
        chunk = (position - 1 - step) % chunks
        if chunks > 1 and known[chunk] >= 0 and known[chunk] != size:
            return False
        known[chunk] = size
    most = known.max()
    short = False
    for chunk in range(chunks):
        if known[chunk] > 0 and short:
            return False
        short = short or 0 <= known[chunk] < most
    return True


@dataclass(slots=True, eq=False)
class Line:
    """A connection that carries the collective in question."""

    edge: Edge
    position: int
    lengths: np.ndarray
    open: bool
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Loops after which it can be over -> (fewest, most) bytes of the channel's share."""
    goes_on: bool = False
    """Whether everything seen can be the beginning of more."""
    share: int = 0
    """Which of the search's shares it carries."""
    idle: bool = False
    """Whether the channel can only be one that takes no part."""


class Search:
    """All sizes of one kind, algorithm, protocol and element size that explain what was seen."""

    def __init__(self, comm: Communicator, call: Collective, lines: Sequence[Line], work: int) -> None:
        self.comm, self.call, self.lines, self.work = comm, call, lines, work
        self.found: list[tuple[int, int]] = []
        """(fewest, most) elements: runs of sizes with the same messages."""
        self.cut = False
        self._rows: dict[int, list[np.ndarray | None]] = {}
        by_head = call.algorithm == NVLSTREE
        shares = sorted({(line.edge.channel, line.edge.head if by_head else 0) for line in lines})
        self._shares = shares
        """(channel, head) of each row that the lines carry."""
        self.carriers: list[Line] = []
        for line in lines:
            line.share = shares.index((line.edge.channel, line.edge.head if by_head else 0))

    # What each connection says by itself

    def possible(self) -> bool:
        """Whether the messages of every connection can begin such a collective; finds where they can end."""
        call = self.call
        row = begin_row(call.kind, call.algorithm, call.protocol, call.unit()[1], self.comm.ranks)
        row[LOOPS] = 1
        for line in self.lines:
            self._ends(line, row)
        for number, (channel, _) in enumerate(self._shares):
            lines = [line for line in self.lines if line.share == number]
            if not self._agree(lines):
                if channel == 0 and self.comm.traits.cell_rule != "2.22":
                    return False  # the first channel is the one that always takes part
                for line in lines:
                    line.idle = True
        self.carriers = [line for line in self.lines if not line.idle]
        return any(line.lengths.size for line in self.carriers)
    def _span(self, before: int, low: int, high: int) -> tuple[int, int]:
        """(fewest, most) bytes of a share: loops with `before` bytes shown, then a last one with low..high shown."""
        if self.call.algorithm != NVLSTREE:
            return before + low, before + high
        heads = self.comm.heads  # a head shows its piece of each loop; those of others differ in the last loop only
        unit = 16 if self.comm.traits.scheme == "C" else SLOT_DATA[SIMPLE] if self.comm.traits.scheme == "A" else 4096
        return heads * before + low, heads * (before + high + heads * unit)

    def _chunks(self) -> dict[int, int]:
        """Wire bytes of a message -> its data, for messages of every loop but the last."""
        call, scheme = self.call, self.comm.traits.scheme
        if call.algorithm == RING:
            slot = SLOT_DATA[call.protocol] * (2 if call.protocol == SIMPLE and call.kind != BROADCAST else 1)
            return {int(wire_bytes(call.protocol, slot, 0)): slot}
        sizes = [SLOT_DATA[call.protocol] >> halved for halved in range(6)]
        if scheme == "C":
            sizes = [size // GRAIN[call.protocol] * GRAIN[call.protocol] for size in sizes]
        return {int(wire_bytes(call.protocol, size, 0)): size for size in sizes}

    def _agree(self, lines: list[Line]) -> bool:
        """Whether connections that carry the same share can end it together; leaves the ends that they allow."""
        if not all(line.ends or line.goes_on for line in lines):
            return False
        over = [line.ends for line in lines if not line.goes_on]
        common = {}
        for loops in {loops for line in lines for loops in line.ends}:
            spans = [ends[loops] for ends in over if loops in ends]
            spans += [line.ends[loops] for line in lines if line.goes_on and loops in line.ends]
            low, high = max(low for low, _ in spans), min(high for _, high in spans)
            if low <= high and all(loops in ends for ends in over):
                common[loops] = low, high
        for line in lines:
            line.ends = {loops: span for loops, span in common.items() if loops in line.ends}
        return all(line.ends or line.goes_on for line in lines)

    def _ends(self, line: Line, row: np.ndarray) -> None:
        ring, protocol, lengths = self.call.algorithm == RING, self.call.protocol, line.lengths
        per = int(messages(row, line.position))
        slices, chunks = int(row[SLICES]), int(row[CHUNKS])
        apart = slices * (chunks if ring else 1)  # messages of a loop that show its bytes once
        largest = SLOT_BYTES[protocol] * int(row[SLICE_STEPS])
        full = largest if ring else int(lengths[0]) if lengths.size else 0
        low, high = _data(protocol, lengths, largest)
        whole = apart * self._chunks().get(full, 0)  # bytes of a loop that is not the last
        most = loop = 0
        while True:
            part = lengths[loop * per : (loop + 1) * per]
            fine = (part < 0) | (part <= largest) & (part % _UNIT_WIRE[protocol] == 0)
            if not fine.all() or not _loop_can_be(chunks, line.position, slices, part):
                return
            if part.size < per:
                line.goes_on = line.open
                return
            at = slice(loop * per, loop * per + apart)
            loop += 1
            line.ends[loop] = self._span(most, int(low[at].sum()), int(high[at].sum()))
            if len(line.ends) > _MOST_ENDS:
                del line.ends[min(line.ends)]
                self.cut = True
            if not whole or not ((part == full) | (part < 0)).all():
                return
            most += whole

    # Sizes

    def solve(self) -> int:
        """Find every size with which all connections agree; returns the plans made, as a number below 0."""
        before = self.work
        for line in sorted(self.carriers, key=lambda line: -line.lengths.size):
            for low, high in reversed(line.ends.values()):  # the end that is not a full loop first
                for first, last in self._pieces(high):
                    channels = self._channels(first)
                    slack = self._slack(channels)
                    size = self.call.itemsize
                    begin = max(first, channels * (low - slack) // size)
                    end = min(last, channels * (high + slack) // size + 1)
                    if begin <= end:
                        self._walk(begin, end, line, low, high)
            if self.found or self.work <= 0 or (line.ends and not line.goes_on):
                break
        self.found = sorted(set(self.found))
        # 2.22 puts a tail of less than a cell on a channel of its own, at every 16 bytes anew: sizes may be missed.
        self.cut = self.cut or self.work <= 0 or self.comm.traits.cell_rule == "2.22"
        return self.work - before

    def _slack(self, channels: int) -> int:
        """By how many bytes a channel's share can differ from an equal one."""
        call, traits = self.call, self.comm.traits
        if traits.scheme == "A":
            if call.algorithm != RING:
                return max(1, self.comm.heads) * SLOT_DATA[call.protocol]
            chunks = self.comm.ranks if call.kind == ALLREDUCE else 1
            return channels * chunks * (38400 if call.protocol == LL128 else 4096)
        if traits.scheme == "B":
            return channels * ((9600 if call.protocol == LL128 else 4096) + 16)
        weight = {ALLREDUCE: 2, ALLGATHER: self.comm.ranks}.get(call.kind, 1)
        weight *= traits.ll_traffic if call.protocol == LL else 1
        return (channels + 1) * (-(-traits.minimum_traffic // weight) + 48)

    def _channels(self, count: int) -> int:
        return channel_use(self.comm, replace(self.call, count=count))[0]

    def _pieces(self, most_share: int) -> Iterator[tuple[int, int]]:
        """(first, last) element count of each run of sizes that use the same number of channels."""
        limit = max(self.comm.channels, self.comm.nvls_channels)
        top = limit * (most_share + self._slack(limit)) // self.call.itemsize + 1
        first = 1
        while first <= top:
            channels = self._channels(first)
            last = _last(first, top, lambda count, channels=channels: self._channels(count) == channels)  # type: ignore[misc]
            yield first, last
            first = last + 1

    def rows_of(self, count: int) -> list[np.ndarray | None]:
        """The row of each share; None where the channel carries nothing."""
        rows = self._rows.get(count)
        if rows is None:
            self.work -= 1
            by_head: dict[int, dict[int, np.ndarray]] = {}
            rows = []
            for channel, head in self._shares:
                if head not in by_head:
                    (planned,) = plan(self.comm, [replace(self.call, count=count)], head)
                    by_head[head] = rows_by_channel(planned)
                rows.append(by_head[head].get(channel))
            self._rows[count] = rows
        return rows

    def _ends_here(self, row: np.ndarray, count: int) -> bool:
        """Whether the row ends with the tensor: its messages change with every element."""
        return bool(row[END] == count)

    def _frame(self, count: int) -> tuple[object, ...]:
        """What stays the same over long runs of sizes: shares that do not end the tensor, and where the last begins."""
        return tuple(
            None if row is None else (row[START], row[LOOP]) if self._ends_here(row, count) else row[:BLOCK].tobytes()
            for row in self.rows_of(count)
        )

    def _layout(self, count: int) -> tuple[object, ...]:
        """Everything but the tensor's end."""
        return tuple(
            None if row is None else (*row[:END], *row[END + 1 : BLOCK], self._ends_here(row, count) or row[END])
            for row in self.rows_of(count)
        )

    def _walk(self, low: int, high: int, anchor: Line, least: int, most: int) -> None:
        """Sizes low..high use the same number of channels; the anchor's share has least..most bytes."""
        at = max(1, low)
        # With common loops all channels end together, and on a ring the loop's size depends on nothing else.
        together = self.comm.traits.scheme == "A" and self.call.algorithm == RING
        while at <= high and self.work > 0:
            until = at
            passed = self._compared(at, anchor, least, most)
            if passed < 0:
                until = _last(at, high, lambda count: self._compared(count, anchor, least, most) < 0)
            elif passed == 0:
                frame = self._frame(at)
                until = high
                if not together:
                    until = _last(at, high, lambda count, frame=frame: self._frame(count) == frame)  # type: ignore[misc]
                self._walk_frame(at, until)
            elif self.rows_of(high)[anchor.share] is not None:
                return
            at = until + 1

    def _compared(self, count: int, anchor: Line, least: int, most: int) -> int:
        """Whether the anchor's share is too small (-1) or too large (1); 0 as well if it ends the tensor."""
        row = self.rows_of(count)[anchor.share]
        if row is None or self._ends_here(row, count):
            return 0
        share = int(row[END] - row[START]) * self.call.itemsize
        return -1 if share < least else int(share > most)

    def _walk_frame(self, low: int, high: int) -> None:
        rows = self.rows_of(low)
        ending = [
            line for line in self.carriers if (row := rows[line.share]) is not None and self._ends_here(row, low)
        ]
        if all(self._agrees(line, rows[line.share]) for line in self.lines if line not in ending):
            if ending:
                self._walk_end(low, high, ending)
            else:
                self.found.append((low, high))

    def _agrees(self, line: Line, row: np.ndarray | None) -> bool:
        if line.idle:
            return row is None
        taken = 0 if row is None else int(fit(row, line.position, line.lengths, 0))
        return taken >= 0 and (line.open or line.lengths.size >= taken)

    def _walk_end(self, low: int, high: int, ending: list[Line]) -> None:
        """Sizes low..high have the same frame: those with which the lines that end with the tensor agree."""
        first = min(ending, key=lambda line: line.goes_on)
        row = self.rows_of(low)[first.share]
        assert row is not None
        start, loop = int(row[START]), int(row[LOOP])
        loops: Sequence[int] = list(first.ends)
        if first.goes_on:
            loops = [*loops, *range(max(loops, default=0) + 1, -(-(high - start) // loop) + 1)][: 2 * _MOST_ENDS]
        for number in loops:
            begin, end = max(low, start + (number - 1) * loop + 1), min(high, start + number * loop)
            if number in first.ends and self.comm.traits.scheme != "A" and self.call.algorithm != NVLSTREE:
                least, most = first.ends[number]  # of this share, which lies in one piece
                size = self.call.itemsize
                begin, end = max(begin, start + -(-least // size)), min(end, start + most // size)
            if begin <= end:
                self._walk_layouts(begin, end, ending)

    def _walk_layouts(self, low: int, high: int, ending: list[Line]) -> None:
        """The same, with a fixed number of loops: the more elements the more bytes, but for some rounding."""
        wanted = self._seen_bytes(low, ending)
        blur = self._blur(ending)
        low = _last(low, high, lambda count: self._bytes(count, ending) < wanted - blur)
        high = _last(low, high, lambda count: self._bytes(count, ending) <= wanted + blur)
        # The plan has as many messages for all of these sizes: the first and the last that fit say everything.
        bottom = self._scan(low, high, ending, wanted, up=True)
        if bottom is not None:
            top = self._scan(bottom[1] + 1, high, ending, wanted, up=False) or bottom
            self.found.append((bottom[0], top[1]))

    def _scan(self, low: int, high: int, ending: list[Line], wanted: int, up: bool) -> tuple[int, int] | None:
        """The lowest (or highest) run of sizes in low..high with which every connection agrees."""
        while low <= high and self.work > 0:
            at = low if up else high
            layout = self._layout(at)
            first, last = low, high
            if up:
                last = _last(low, high, lambda count, layout=layout: self._layout(count) == layout)  # type: ignore[misc]
                low = last + 1
            else:
                first = high - _last(0, high - low, lambda down, high=high, layout=layout: self._layout(high - down) == layout)  # type: ignore[misc]  # noqa: E501
                high = first - 1
            known = [(row, line) for line in ending if (row := self.rows_of(at)[line.share]) is not None]

            def size(count: int, known: list[tuple[np.ndarray, Line]] = known) -> int:
                return sum(int(_wire_sum(row, line.position, count, line.lengths)) for row, line in known)

            if size(first) <= wanted <= size(last):
                begin = first if size(first) == wanted else _last(first, last, lambda count: size(count) < wanted) + 1
                end = _last(begin, last, lambda count: size(count) == wanted)
                if all(self._agrees(line, self.rows_of(begin)[line.share]) for line in self.lines):
                    return begin, end
        return None

    def _bytes(self, count: int, ending: list[Line]) -> int:
        """Bytes on the wire, of the messages of the plan whose length was seen."""
        total = 0
        for line in ending:
            row = self.rows_of(count)[line.share]
            if row is not None:
                total += int(_wire_sum(row, line.position, int(row[END]), line.lengths))
        return total

    def _seen_bytes(self, count: int, ending: list[Line]) -> int:
        """Bytes that were seen of the messages of the plan."""
        total = 0
        for line in ending:
            row = self.rows_of(count)[line.share]
            if row is not None:
                lengths = line.lengths[: int(messages(row, line.position))]
                total += int(lengths[lengths > 0].sum())
        return total

    def _blur(self, ending: list[Line]) -> int:
        """By how much more bytes on the wire may come with fewer elements, twice over."""
        call, comm = self.call, self.comm
        chunks = comm.ranks if call.algorithm == RING and call.kind == ALLREDUCE else max(1, comm.heads)
        unit = 16
        if comm.traits.scheme == "A":
            chunks *= max(comm.channels, comm.nvls_channels)
        if comm.traits.scheme != "C":
            unit = 38400 if call.protocol == LL128 else 32768
        return len(ending) * 8 * chunks * (unit + _UNIT_WIRE[call.protocol])


def _data(protocol: int, lengths: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """(fewest, most) bytes of data of messages, by their lengths on the wire."""
    wire, data = _UNIT_WIRE[protocol], _UNIT_DATA[protocol]
    most = np.where(lengths < 0, largest, lengths) // wire * data
    return np.where(lengths <= 0, 0, most - data + 1), most


def _last(first: int, last: int, holds: Callable[[int], bool]) -> int:
    """The last number of first..last up to which `holds` is true, as it is at `first` (which is not asked)."""
    step = 1
    at = first
    while at + step <= last and holds(at + step):
        at += step
        step *= 2
    low, high = at, min(last, at + step - 1) if at + step <= last else last
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
