"""What is in a capture: streams, RDMA messages, collectives, and what is missing of them (docs/inspect.md).

    files -> frames -> TCP spans  -> StreamTable  -> stream lines
                                  -> GlooTraffic  -> collective lines of gloo
                    -> RoCE spans -> MessageTable -> message lines
                                  -> NcclTraffic  -> collective lines of NCCL

One pass over the files; lines go to temporary files as they are known, so memory does not grow with the capture. What
is kept has limits, and whether one was reached is said in `Report.notes`.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowcheck import jobfile
from flowcheck.description import ITEMSIZE, JobDescription
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.groups import gloo_group, nccl_group
from flowcheck.inspect.gloo import GlooTraffic
from flowcheck.inspect.messages import MessageTable, message_line
from flowcheck.inspect.nccl import NcclTraffic
from flowcheck.inspect.nccl_refused import infiniband, said
from flowcheck.inspect.streams import StreamSeen, StreamTable
from mirror.block import SourceCounters
from mirror.capfile import CaptureFileSource
from mirror.messages import Message
from mirror.roce import QueuePairs, RoceReassembler
from mirror.spans import Spans
from reconstruct.buckets import layout, reduced_specs
from reconstruct.nccl.group import NcclGroup
from reconstruct.nccl.unreadable import tls_record

__all__ = ["Inspection", "Limits", "PairSeen", "Reduced", "Report", "inspect", "open_files"]

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_SPOOL = 16 << 20
_MOST_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory in bytes: of kept streams, of kept RDMA messages, of messages of collectives; and the number of flows."""

    streams: int = 512 << 20
    messages: int = 512 << 20
    collectives: int = 1 << 30
    flows: int = 1 << 16
    reorder: int = 64 << 20


@dataclass(slots=True)
class PairSeen:
    """One direction of a queue pair. lost: packets in gaps in which no message is known."""

    source: str
    destination: str
    queue_pair: int
    vantage: int
    messages: int = 0
    bytes: int = 0
    hole_bytes: int = 0
    incomplete: int = 0
    entries: int = 0
    """Messages as long as NCCL's announcements (CTS), without an immediate."""
    lost: int = 0
    sized: int = 0
    """Messages that belong to an immediate which tells their length, as NCCL's does."""
    unanswered: bool = True
    """No acknowledgment of it was seen."""
    tunnel: str | None = None
    _since: list[int] = field(default_factory=lambda: [0, 0])  # messages and bytes since the last immediate

    def add(self, message: Message) -> None:
        missing = sum(length for _, length in message.holes)
        self.messages += 1
        self.bytes += message.extent - missing
        self.hole_bytes += missing
        self.incomplete += not message.complete
        self.entries += message.imm is None and message.va is not None and message.length in (32, 64)
        self._since[0] += 1
        self._since[1] += message.extent
        if message.imm is not None:
            told = message.imm.to_bytes(4, "big")
            if self._since[1] in (int.from_bytes(told, "big"), int.from_bytes(told, "little")):
                self.sized += self._since[0]
            self._since = [0, 0]


@dataclass(slots=True)
class Reduced:
    """The collectives of one kind in one group: how many, their ordinals, their sizes in bytes where known."""

    library: str
    group: str
    kind: str
    algorithm: str | None
    protocol: str | None
    number: int = 0
    first: int = 0
    last: int = 0
    channels: set[int] = field(default_factory=set)
    senders: set[int] = field(default_factory=set)
    sizes: Counter[int] = field(default_factory=Counter)
    unsized: int = 0


@dataclass(slots=True)
class Report:
    """What was found, for the table. `lines` gives everything for scripts. To be closed: `with` does it."""

    files: list[str]
    counters: SourceCounters
    seconds: float
    summary: dict[str, Any]
    streams: list[StreamSeen]
    more_streams: int
    pairs: list[PairSeen]
    collectives: list[Reduced]
    gloo: dict[str, Any]
    tcp: dict[str, int]
    roce: dict[str, int]
    unknown: list[tuple[str, int, int]]
    """`Segments.unknown`: types that were not read."""
    buckets: int
    """All-reduces of a step, 0 if not known."""
    statements: list[str]
    """What is to be said of NCCL's traffic."""
    refusals: list[str]
    """What cannot be read, with the remedy."""
    notes: list[str]
    problems: list[str]
    _spools: list[_Spool]

    def lines(self) -> Iterator[str]:
        """JSON, one object a line: summary, streams, messages, collectives."""
        yield json.dumps(self.summary)
        for spool in self._spools:
            yield from spool.lines()

    def close(self) -> None:
        """Remove the temporary files; there are no `lines` any more."""
        for spool in self._spools:
            spool.close()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Spool:
    """Lines that wait for their turn, on disk when they are many."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_SPOOL, mode="w+", encoding="ascii")  # noqa: SIM115

    def add(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def lines(self) -> Iterator[str]:
        self._file.seek(0)
        for line in self._file:
            yield line.rstrip("\n")

    def close(self) -> None:
        self._file.close()


def open_files(files: Sequence[Path]) -> CaptureFileSource:
    """The frames of the files, merged by time. Raises UsageError that names the one that cannot be read."""
    try:
        return CaptureFileSource(files)
    except FlowcheckError as error:
        raise UsageError(str(error)) from None


def inspect(files: Sequence[Path], *, job: Path | None = None, dtype: str | None = None,
            version: str | None = None, limits: Limits | None = None) -> Report:
    """Read the files to their end.

    Raises UsageError for files and options that cannot be used, BadConfig for a job file that cannot.
    """
    description = None if job is None else jobfile.describe(job)
    communicator = None
    if description is not None and description.group.nccl is not None:
        communicator = nccl_group(description.group.name, description.group, version)
    inspection = Inspection(_Types(dtype, description), limits or Limits(), version, communicator)
    source = None
    try:
        if description is not None:
            inspection.name(description)
        source = open_files(files)
        inspection.read(source)
        return inspection.report(files, source)
    except BaseException:
        inspection.close()
        raise
    finally:
        if source is not None:
            source.close()


class _Types:
    """Element types of all-reduces: by the user's word, else by the size of the job's buckets."""

    def __init__(self, dtype: str | None, description: JobDescription | None) -> None:
        name = DTYPES.get(dtype or "", dtype)
        if name is not None and name not in ITEMSIZE:
            raise UsageError(f"--dtype {dtype}: one of {', '.join([*DTYPES, *ITEMSIZE])}")
        self._given = None if name is None else (name, ITEMSIZE[name])
        self._buckets: dict[int, set[tuple[str, int]]] = {}
        self.sizes: frozenset[int] = frozenset()
        """Bytes of the job's all-reduces, if it knew all of them: before DDP rebuilds its buckets there are others."""
        self.buckets = 0
        """All-reduces of a step, if the job tells."""
        for indices in () if description is None else (description.ddp.initial_buckets,
                                                       description.ddp.rebuilt_buckets or ()):
            if description is not None and indices:
                placed = layout(indices, reduced_specs(description)).buckets
                self.buckets = len(placed)
                for bucket in placed:
                    self._buckets.setdefault(bucket.nbytes, set()).add((bucket.dtype, bucket.itemsize))

        if description is not None and description.ddp.rebuilt_buckets is not None:
            self.sizes = frozenset(self._buckets)

    def of(self, size: int) -> tuple[str, int] | None:
        """(name, bytes) of the elements of an all-reduce of `size` bytes, None if not known."""
        found = self._buckets.get(size, set())
        return self._given or (next(iter(found)) if len(found) == 1 else None)


class Inspection:
    """One reading. Feed it with `read`, then ask for the `report`."""

    def __init__(self, types: _Types, limits: Limits, version: str | None, communicator: NcclGroup | None) -> None:
        self._types = types
        self._limits = limits
        self._spools = [_Spool() for _ in range(3)]
        self._stream_lines, self._message_lines, self._collective_lines = self._spools
        self._streams: list[StreamSeen] = []
        self._more_streams = 0
        self._pairs: dict[int, PairSeen] = {}
        self._collectives: dict[tuple[Any, ...], Reduced] = {}
        self._newest: dict[tuple[Any, ...], int] = {}
        self._tunnels: dict[int, str | None] = {0: None}
        self._first: int | None = None
        self._now = 0
        self._gloo = GlooTraffic(
            self._spans, self._collective, flows=limits.flows, reorder_bytes=limits.reorder,
            budget_bytes=limits.collectives, dtypes=types.of,
        )  # fmt: skip
        self._table = StreamTable(self._gloo.flows, self._tunnel, self._stream, limit=limits.streams)
        self._roce = RoceReassembler(QueuePairs(limits.flows), check_icrc=True)
        self._messages = MessageTable(self._roce, self._message, self._gap, limit=limits.messages)
        self._nccl = NcclTraffic(
            self._collective, self._gloo.flows, budget_bytes=limits.collectives, message_bytes=limits.messages,
            dtypes=types.of, buckets=types.sizes, hint=version, group=communicator,
        )  # fmt: skip
        self._infiniband = 0

    def name(self, description: JobDescription) -> None:
        """Follow the process group of a job."""
        if description.group.contexts:
            self._gloo.name(gloo_group(description.group.name, description.group, None))

    def read(self, source: CaptureFileSource) -> None:
        """Take every frame."""
        while not source.finished:
            block = source.read()
            if block is None:
                break
            if self._first is None and len(block.ts):
                self._first = int(block.ts[0])
            self._now = max(self._now, int(block.ts.max()))
            if infiniband(block):
                self._infiniband += len(block.ts)
            self._gloo.feed(block, self._now)
            self._messages.feed(self._roce.take(self._gloo.datagrams, block.base, self._now))
            source.release(block)
        self._gloo.flush(self._now)
        self._table.finish()
        self._messages.feed(self._roce.flush(self._now))
        self._messages.finish()
        self._nccl.finish()

    def report(self, files: Sequence[Path], source: CaptureFileSource) -> Report:
        counters, tcp, roce = source.counters(), self._gloo.counters(), self._roce.counters()
        for flow, pair in self._pairs.items():
            pair.unanswered = bool(self._roce.peer[flow] < 0)
            pair.tunnel = self._tunnel(pair.vantage)
        summary = {
            "type": "summary",
            "packets": counters.packets,
            "bytes": counters.bytes,
            "truncated": tcp["cut_by_snaplen"] + tcp["cut_by_switch"],
            "foreign": roce["foreign"],
            "icrc_bad": roce["icrc_bad"],
            "encapsulations": self._gloo.segments.encapsulations(),
        }
        return Report(
            [str(file) for file in files], counters, (self._now - (self._first or 0)) / 1e9, summary, self._streams,
            self._more_streams, list(self._pairs.values()), list(self._collectives.values()), self._gloo.report(), tcp,
            roce, self._gloo.segments.unknown(), self._types.buckets, self._nccl.statements, self._refusals(),
            self._notes(), list(source.problems), self._spools,
        )  # fmt: skip

    def close(self) -> None:
        """Remove the temporary files, where there will be no report."""
        for spool in self._spools:
            spool.close()

    def _refusals(self) -> list[str]:
        found = list(self._nccl.refusals)
        if self._infiniband:
            found.append(said(f"{self._infiniband} frames of InfiniBand's own", "infiniband"))
        secret = sum(tls_record(stream.head) for stream in self._streams)
        if secret and not self._collectives:
            found.append(said(f"{secret} streams begin with a TLS handshake, should they be the job's", "tls"))
        return found

    def _notes(self) -> list[str]:
        """Which limits were reached, and what that means."""
        notes = []
        unchecked = sum(stream.unchecked for stream in self._streams)
        if unchecked:
            notes.append(
                f"{unchecked} bytes came again after more than {self._limits.streams >> 20} MiB of other stream bytes: "
                "they were neither compared with the first copy nor put into holes"
            )
        dropped = self._messages.dropped + self._nccl.over_tcp.dropped
        if dropped:
            notes.append(
                f"{dropped} bytes of messages found no room in {self._limits.messages >> 20} MiB "
                "and count as holes: inspect a shorter capture"
            )
        elif self._messages.hurried:
            notes.append(
                f"more than {self._limits.messages >> 21} MiB of RDMA messages had holes: retries that came later are "
                "left out"
            )
        unkept = self._gloo.unkept + self._nccl.unkept
        if unkept:
            notes.append(
                f"{unkept} messages of collectives found no room in {self._limits.collectives >> 20} MiB: "
                "their final values are left out"
            )
        return notes

    def _spans(self, spans: Spans) -> None:
        self._table.feed(spans)
        self._nccl.spans(spans)

    def _tunnel(self, vantage: int) -> str | None:
        if vantage not in self._tunnels:
            self._tunnels[vantage] = self._gloo.segments.vantage.name(vantage) or None
        return self._tunnels[vantage]

    def _stream(self, stream: StreamSeen) -> None:
        self._stream_lines.add(stream.line())
        self._nccl.stream(stream)
        if len(self._streams) < _MOST_ROWS:
            self._streams.append(stream.told())
        else:
            self._more_streams += 1

    def _pair(self, flow: int) -> PairSeen:
        flows = self._roce.flows
        source, (destination, number) = flows.endpoint_src(flow)[0], flows.endpoint_dst(flow)
        known = self._pairs.get(flow)
        if known is None or (known.source, known.destination, known.queue_pair) != (source, destination, number):
            known = self._pairs[flow] = PairSeen(source, destination, number, flows.vantage(flow))
        return known

    def _message(self, message: Message, begin: int, end: int) -> None:
        self._message_lines.add(message_line(message))
        self._pair(message.flow).add(message)
        self._nccl.message(_key(message), message, begin, end, int(self._roce.mtu[message.flow]))

    def _gap(self, flow: int, psn: int, packets: int) -> None:
        pair = self._pair(flow)
        pair.lost += packets
        self._nccl.gap((pair.vantage, pair.source, pair.destination, pair.queue_pair), psn, packets)

    def _collective(self, group: str, line: dict[str, Any]) -> None:
        self._collective_lines.add(line)
        key = line["library"], group, line["kind"], line["algorithm"], line["protocol"]
        seen = self._collectives.setdefault(key, Reduced(*key))
        ordinal = line["ordinal"]
        if not seen.number or ordinal != self._newest.get(key):
            seen.first = min(seen.first, ordinal) if seen.number else ordinal
            seen.last = max(seen.last, ordinal)
            seen.number += 1
            self._newest[key] = ordinal
            if line["bytes"] is None:
                seen.unsized += 1
            else:
                seen.sizes[line["bytes"]] += 1
        for numbers, number in ((seen.channels, line["channel"]), (seen.senders, line["sender_rank"])):
            if number is not None:
                numbers.add(number)


def _key(message: Message) -> tuple[int, str, str, int]:
    return message.vantage, message.source, message.destination, message.queue_pair
