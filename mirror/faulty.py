"""A source whose frames meet faults on their way: a rehearsal of what mirrors, switches and rings do.

Where nothing has to be moved or changed, blocks are handed on with fewer or repeated rows of the same memory. Else the
frames are copied, those that wait for later ones with them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from mirror.block import Block, Loss, Source, SourceCounters
from mirror.faults import KINDS, Faults
from mirror.memory import address_of
from mirror.record import SNAPLEN, pcap_records

__all__ = ["FaultSource", "injected"]

HEADERS = 80
"""Bytes of a frame that are never corrupted: Ethernet, IP and TCP with time stamps, or IPv6, UDP, BTH and RETH."""
_RECORD = 16  # bytes before every frame in the memory that frames are copied to
_MOST_WAITING = 64 << 20
_PATIENCE = 100_000_000  # ns for which a moved frame waits for others to overtake it, on a link that fell silent
_NEVER = np.iinfo(np.int64).max

# Rows of the table of one block's frames, one column for each frame.
_OFFSET, _CAPLEN, _WIRELEN, _TS, _VLAN, _STREAM, _BEHIND, _DUE = range(8)


class _Waiting:
    """Frames of one vantage group and link type that come later: their memory and their table (int64[8, n])."""

    def __init__(self) -> None:
        self.base = np.empty(0, np.uint8)
        self.table = np.empty((8, 0), np.int64)
        self.newest = 0  # capture time reached, ns


class FaultSource:
    """`source` with faults in its streams.

    streams: name -> (where the stream's frames begin in `Block.base`, its faults); with one stream, where is 0. The
    name decides, with the seed, which frames are hit. Counters tell what is handed out: a frame that was dropped here
    appears in `faults` alone, as one lost inside a switch would appear nowhere. At most 64 MiB of frames wait; beyond
    that the oldest come at once ("early"). Frames that are copied are cut to 262,144 bytes.
    """

    def __init__(self, source: Source, streams: Mapping[str, tuple[int, Faults]]) -> None:
        self.name = source.name
        self._source = source
        ordered = sorted(streams.items(), key=lambda item: item[1][0])
        self._names = [name for name, _ in ordered]
        self._starts = np.array([start for _, (start, _) in ordered], np.int64)
        self._faults = [faults for _, (_, faults) in ordered]
        self._frames = [0] * len(ordered)
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._lent: dict[Block, Block] = {}
        self._losses: tuple[Loss, ...] = ()  # of the source, to go with the next block
        self._packets = 0
        self._bytes = 0
        self._hit = {kind: [0, 0] for kind in (*KINDS, "early")}

    @property
    def problems(self) -> Sequence[str]:
        return self._source.problems

    @property
    def finished(self) -> bool:
        return self._source.finished and not any(w.table.shape[1] for w in self._waiting.values())

    def counters(self) -> SourceCounters:
        below = self._source.counters()
        return SourceCounters(self._packets, self._bytes, below.drops, below.freezes, below.interface_drops)

    def faults(self) -> dict[str, object]:
        """What is injected, and by kind [frames, bytes on the wire] that were hit; {} if nothing can be."""
        specs = {name: str(faults) for name, faults in zip(self._names, self._faults, strict=True) if str(faults)}
        hit = {kind: list(count) for kind, count in self._hit.items() if count[0]}
        return {"specs": specs, "hit": hit} if specs else {}

    def read(self, timeout: float) -> Block | None:
        deadline = time.monotonic() + timeout
        while True:
            block = self._source.read(max(0.0, deadline - time.monotonic()))
            self._losses += () if block is None else block.losses
            out = self._late() if block is None else self._pass(block)
            if out is not None:
                out.losses, self._losses = self._losses, ()
                self._packets += len(out)
                self._bytes += int(out.wirelen.sum())
                return out
            if block is None:
                return None

    def release(self, block: Block) -> None:
        below = self._lent.pop(block, None)
        if below is not None:
            self._source.release(below)

    def close(self) -> None:
        self._waiting.clear()
        self._lent.clear()
        self._source.close()

    def _pass(self, block: Block) -> Block | None:
        """What comes out of a block, and of those that wait, in order."""
        n = len(block)
        waiting = self._waiting.setdefault((block.vantage, block.linktype), _Waiting())
        table = np.empty((8, n), np.int64)
        table[:5] = block.offset, block.caplen, block.wirelen, block.ts, block.vlan
        table[_STREAM] = np.searchsorted(self._starts, block.offset, "right") - 1 if len(self._starts) > 1 else 0
        table[_BEHIND], table[_DUE] = -1, 0
        reached = np.maximum.accumulate(np.maximum(block.ts, waiting.newest)) if n else block.ts
        kept = np.ones(n, np.bool_)
        copied = np.zeros(n, np.bool_)
        flip = np.full(n, -1, np.int64)
        at = [np.flatnonzero(table[_STREAM] == s) for s in range(len(self._faults))]
        number = list(self._frames)
        for s, rows in enumerate(at):
            self._decide(s, rows, table, kept, copied, flip)
            self._frames[s] += rows.size
        again = table[:, copied]
        again[1:5] = np.array([block.caplen, block.wirelen, block.ts, block.vlan])[:, copied]
        again[_BEHIND], again[_DUE] = -1, 0
        # Where each frame comes out: 3 p in its place p; behind p: 3 p + 1; before p: 3 p - 1.
        rows = np.arange(n, dtype=np.int64)
        early = waiting.table.shape[1]
        place = np.concatenate([np.full(early, -1), 3 * rows[kept], 3 * rows[copied]])
        every = np.concatenate([waiting.table, table[:, kept], again], 1)
        for s, rows in enumerate(at):
            moved = np.flatnonzero((every[_STREAM] == s) & (every[_BEHIND] >= 0))
            index = every[_BEHIND, moved] - number[s]
            there = index < rows.size
            place[moved] = _NEVER
            place[moved[there]] = 3 * rows[index[there]] + 1
        moved = np.flatnonzero(every[_DUE] > 0)
        index = np.searchsorted(reached, every[_DUE, moved])
        every[_DUE, moved[3 * index <= place[moved]]] = 0  # overdue: it stays in place, before its copy
        place[moved] = np.where(index < n, np.maximum(3 * index - 1, place[moved]), _NEVER)
        if n:
            waiting.newest = int(reached[-1])
        later = np.flatnonzero(place == _NEVER)
        heavy = np.cumsum((every[_CAPLEN, later] + _RECORD)[::-1])[::-1] > _MOST_WAITING
        self._count("early", every[_WIRELEN, later[heavy]])
        place[later[heavy]], later = _NEVER - 1, later[~heavy]
        order = np.lexsort((every[_DUE], place))[: place.size - later.size]
        flips = np.concatenate([np.full(early, -1), flip[kept], np.full(again.shape[1], -1)])
        if early or later.size or bool((flips >= 0).any()):
            every[_CAPLEN] = np.minimum(every[_CAPLEN], SNAPLEN)
            base = _copy(waiting.base, every[:, :early], block.base, every[:, early:], every[_OFFSET])
            hit = np.flatnonzero(flips >= 0)
            base[every[_OFFSET, hit] + (flips[hit] >> 3)] ^= (1 << (flips[hit] & 7)).astype(np.uint8)
            waiting.table = every[:, later]
            waiting.base = base if later.size else np.empty(0, np.uint8)
            self._source.release(block)
            return _block(base, every[:, order], block.vantage, block.linktype) if order.size else None
        if not order.size:
            self._source.release(block)
            return None
        out = _block(block.base, every[:, order], block.vantage, block.linktype)
        self._lent[out] = block
        return out

    def _decide(self, s: int, rows: np.ndarray, table: np.ndarray, kept: np.ndarray, copied: np.ndarray,
                flip: np.ndarray) -> None:
        """Draw for frames `rows` of a block, which are the next ones of stream `s`, and note what is to happen."""
        faults, name = self._faults[s], self._names[s]
        numbers = np.arange(self._frames[s], self._frames[s] + rows.size, dtype=np.int64)
        wire = table[_WIRELEN, rows]
        dropped = faults.hits("drop", name, numbers)
        lost = dropped | faults.hits("burst", name, numbers)
        self._count("drop", wire[dropped])
        self._count("burst", wire[lost & ~dropped])
        kept[rows] = ~lost
        hit = {kind: np.flatnonzero(faults.hits(kind, name, numbers) & ~lost) for kind in KINDS[2:]}
        self._count("duplicate", wire[hit["duplicate"]])
        copied[rows[hit["duplicate"]]] = True
        cut = hit["truncate"]
        cut = cut[table[_CAPLEN, rows[cut]] > faults.truncate_bytes]
        self._count("truncate", wire[cut])
        table[_CAPLEN, rows[cut]] = table[_WIRELEN, rows[cut]] = faults.truncate_bytes
        bad = hit["corrupt"]
        bad = bad[table[_CAPLEN, rows[bad]] > HEADERS]
        self._count("corrupt", wire[bad])
        room = np.minimum(table[_CAPLEN, rows[bad]], SNAPLEN) - HEADERS
        flip[rows[bad]] = 8 * HEADERS + (faults.chance("bit", name, numbers[bad]) * 8 * room).astype(np.int64)
        late = hit["delay"]
        self._count("delay", wire[late])
        table[_DUE, rows[late]] = table[_TS, rows[late]] + faults.delay_ms * 1_000_000
        table[_TS, rows[late]] = table[_DUE, rows[late]]
        moved = np.setdiff1d(hit["reorder"], late)
        self._count("reorder", wire[moved])
        table[_BEHIND, rows[moved]] = numbers[moved] + faults.reorder_distance

    def _count(self, kind: str, wire: np.ndarray) -> None:
        self._hit[kind][0] += wire.size
        self._hit[kind][1] += int(wire.sum())

    def _late(self) -> Block | None:
        """Of frames that wait, those whose time has come, when no others do."""
        over = self._source.finished
        now = time.time_ns()
        for (vantage, linktype), waiting in self._waiting.items():
            table = waiting.table
            due = np.where(table[_DUE] > 0, table[_DUE], table[_TS] + _PATIENCE)
            out = np.ones(due.size, np.bool_) if over else due <= now
            if out.any():
                rows = np.flatnonzero(out)
                waiting.table = table[:, ~out]
                return _block(waiting.base, table[:, rows[np.argsort(due[rows], kind="stable")]], vantage, linktype)
        return None


def _copy(old: np.ndarray, first: np.ndarray, new: np.ndarray, rest: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Frames of two memories in one of their own, one behind the other; `offset` int64[n] becomes theirs there."""
    sizes = np.concatenate([first[_CAPLEN], rest[_CAPLEN]])
    ends = np.cumsum(sizes + _RECORD)
    target = np.empty(int(ends[-1]) if ends.size else 0, np.uint8)
    used = 0
    for base, part in ((old, first), (new, rest)):
        untagged = np.full(part.shape[1], -1, np.int64)
        none = np.zeros(part.shape[1], np.int64)
        _, used = pcap_records(
            address_of(base), np.ascontiguousarray(part[_OFFSET]), np.ascontiguousarray(part[_CAPLEN]), none, none,
            untagged, 0, target, address_of(target), used,
        )  # fmt: skip
    offset[:] = ends - sizes
    return target


def _block(base: np.ndarray, table: np.ndarray, vantage: int, linktype: int) -> Block:
    offset, caplen, wirelen, ts, vlan = np.ascontiguousarray(table[:5])
    return Block(base, offset, caplen, wirelen, ts, vlan, vantage, linktype)


def injected(source: Source) -> dict[str, object]:
    """What is injected into a source: see `FaultSource.faults`; {} for one that is as it is."""
    return source.faults() if isinstance(source, FaultSource) else {}
