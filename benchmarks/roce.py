"""How fast one core turns RoCEv2 frames of NCCL into gradients.

    python benchmarks/roce.py [--quick] [--json]

Frames of ring all-reduces, made by the lab's generator and held in memory, go through flowcheck's transport (frame
parsing, reassembly by packet number); what comes out goes

* through NCCL's payload formats into one destination: every payload byte is read, its flags are checked, its data are
  written once ("values");
* through the NCCL decoder into landings: final values are placed or compared, partial sums stepped over ("decoder").

In the same process and in turn with them, the same payload is copied by one memcpy, and packet by packet.
docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from measure import load, machine, options, show, spread, table
from numba import njit
from roce_traffic import PROTOCOLS, Traffic, make

from flowcheck.errors import FlowcheckError
from mirror.block import Block
from mirror.flows import Flows
from mirror.frames import Datagrams, Segments, parse
from mirror.memory import address_of, copy
from mirror.roce import MessageSpans, QueuePairs, RoceReassembler
from mirror.roce_spans import BEGIN, DATA
from mirror.roce_state import M_FLOW, M_LENGTH
from reconstruct.decoder import IGNORE, AllReduce, Plan, Reduced, Request
from reconstruct.nccl.decoder import NcclDecoder
from reconstruct.nccl.payload import UNIT_DATA, UNIT_WIRE, decode, flag

MTUS = (1024, 4096)
FLOATS = 25 << 18
"""Elements of the tensor: 25 MiB, DDP's default bucket."""
QUICK_FLOATS = 1 << 18
_CTS = 64                                # bytes: messages of data are longer
AT, LENGTH, FLAG = range(3)


@dataclass(frozen=True, slots=True)
class Measured:
    """One protocol and MTU. Times in seconds, one per repeat; the lists of a repeat belong together."""

    protocol: str
    mtu: int
    frames: int
    packets: int
    payload: int
    placed: int
    parse: list[float]
    transport: list[float]
    values: list[float]
    decoder: list[float]
    memcpy: list[float]
    copy_packets: list[float]

    def beyond(self, mine: list[float], other: list[float]) -> float:
        """Nanoseconds per data packet beyond another list, median of the repeats."""
        return statistics.median((a - b) / self.packets * 1e9 for a, b in zip(mine, other, strict=True))

    def speed(self, mine: list[float], other: list[float]) -> list[float]:
        """Speed in that of another list, repeat by repeat."""
        return [b / a for a, b in zip(mine, other, strict=True)]


@njit(cache=True, nogil=True)
def copy_each(target: int, payloads: np.ndarray) -> None:
    """Copy every payload (address, bytes) to `target`, one behind the other."""
    at = 0
    for i in range(len(payloads)):
        copy(target + at, payloads[i, 0], payloads[i, 1])
        at += payloads[i, 1]


@njit(cache=True, nogil=True)
def place(protocol: int, kind: np.ndarray, slot: np.ndarray, offset: np.ndarray, addr: np.ndarray, length: np.ndarray,
          n: int, number: np.ndarray, begun: int, known: np.ndarray, target: int) -> tuple[int, int]:
    """Decode the DATA of `n` spans of messages that `known` lists; returns the bytes accepted, and messages begun.

    number: int64[rows], the message (in the order in which they began) that a row of the reassembler stands for.
    """
    accepted = 0
    for i in range(n):
        if kind[i] == DATA:
            row = known[number[slot[i]]]
            if row[LENGTH] > 0:
                accepted += decode(protocol, addr[i], offset[i], offset[i] + length[i], target + row[AT], row[LENGTH],
                                   row[FLAG])
        elif kind[i] == BEGIN:
            number[slot[i]] = begun
            begun += 1
    return accepted, begun


class Values:
    """Transport and payload formats. The first one made of some traffic, without `known`, finds out its messages."""

    def __init__(self, traffic: Traffic, target: np.ndarray, known: np.ndarray) -> None:
        self.roce = RoceReassembler(QueuePairs(1 << 10))
        self._traffic, self._known, self._target = traffic, known, address_of(target)
        self._number = np.zeros(len(self.roce.messages), np.int64)
        self._begun = 0
        self.accepted = 0

    def feed(self, block: Block) -> None:
        spans = self.roce.feed(block, int(block.ts[-1]))
        more = len(self.roce.messages) - len(self._number)
        if more:
            self._number = np.concatenate((self._number, np.zeros(more, np.int64)))
        accepted, self._begun = place(self._traffic.protocol, spans.kind, spans.message, spans.offset, spans.addr,
                                      spans.length, spans.n, self._number, self._begun, self._known, self._target)
        self.accepted += accepted


class Decoded:
    """Transport and decoder, with a planner that knows the size."""

    def __init__(self, traffic: Traffic) -> None:
        pairs = QueuePairs(1 << 10)
        self.roce = RoceReassembler(pairs)
        self.decoder = NcclDecoder(pairs, self.roce)
        self.decoder.planner = self._plan
        self.decoder.add_group(traffic.group, 0)
        self._traffic = traffic
        self.reduced: list[int] = []

    def _plan(self, request: Request) -> Plan:
        size = self._traffic.size
        return AllReduce(size, 4) if self.decoder.can_begin(request, size, 4) else IGNORE

    def feed(self, block: Block, check: bool = False) -> None:
        now = int(block.ts[-1])
        for event in self.decoder.feed(self.roce.feed(block, now), now):
            if isinstance(event, Reduced):
                if check:
                    landing = self.decoder.landing(event.group, event.tag)
                    if landing is None or not np.array_equal(landing.data, self._traffic.results[event.tag]):
                        raise FlowcheckError("what was decoded is not what the cluster had: these figures would "
                                             "measure nothing")
                self.reduced.append(event.tag)
                self.decoder.retire(event.group, event.tag)

    @property
    def placed(self) -> int:
        return self.decoder.counters["placed_bytes"]


def messages_of(traffic: Traffic) -> tuple[np.ndarray, np.ndarray]:
    """Of the timed part: int64[n, 3] of all messages in the order in which they begin (place of the data, their bytes,
    flag; 0 bytes: none of data), and int64[n, 2] address and bytes of every data packet's payload.

    Raises FlowcheckError if a packet of them is missing."""
    roce = RoceReassembler(QueuePairs(1 << 10))
    known, payloads, ordinal, at = [], [], {}, 0
    for part, blocks in enumerate((traffic.warm, traffic.timed)):
        for block in blocks:
            spans: MessageSpans = roce.feed(block, int(block.ts[-1]))
            kind, slot = spans.kind[: spans.n], spans.message[: spans.n]
            for row in roce.messages[slot[kind == BEGIN]].tolist():
                length = row[M_LENGTH] if row[M_LENGTH] > _CTS else 0
                step = ordinal.get(row[M_FLOW], 0)
                unit = -(-length // UNIT_WIRE[traffic.protocol])
                data = unit * UNIT_DATA[traffic.protocol] if part else 0
                known.append((at, data, flag(traffic.protocol, step)))
                at += data
                ordinal[row[M_FLOW]] = step + bool(length)
            rows = np.flatnonzero((kind == DATA) & (roce.messages[slot, M_LENGTH] > _CTS))
            if part:
                payloads.append(np.stack((spans.addr[rows], spans.length[rows]), axis=1))
    roce.flush(0)
    counts = roce.counters()
    if counts["completed"] != counts["messages"] or counts["lost_packets"]:
        raise FlowcheckError("the traffic to measure lacks packets")
    return np.array(known, np.int64), np.concatenate(payloads)


def transport(roce: RoceReassembler, blocks: list[Block]) -> None:
    """Frames to spans alone."""
    for block in blocks:
        roce.feed(block, int(block.ts[-1]))


def walk(flows: Flows, segments: Segments, blocks: list[Block]) -> None:
    """Frames to datagrams alone."""
    for block in blocks:
        parse(block, flows, segments)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def each(feed: Callable[[Block], None], blocks: list[Block]) -> None:
    for block in blocks:
        feed(block)


def measure(name: str, mtu: int, floats: int, repeats: int) -> Measured:
    traffic = make(name, mtu, floats)
    known, payloads = messages_of(traffic)
    payload = int(payloads[:, 1].sum())
    target = np.ones(payload, np.uint8)
    source = np.ones(payload, np.uint8)
    decoded = Decoded(traffic)
    each(partial(decoded.feed, check=True), traffic.warm + traffic.timed)
    if decoded.reduced != list(range(len(traffic.results))):
        raise FlowcheckError(f"the decoder gave the collectives {decoded.reduced} of {len(traffic.results)}")
    times: dict[str, list[float]] = {
        name: [] for name in ("values", "decoder", "memcpy", "copy_packets", "transport", "parse")
    }
    placed = 0
    flows, segments = Flows(2), Segments(datagrams=Datagrams())
    for repeat in range(repeats + 1):
        values, decoded, roce = Values(traffic, target, known), Decoded(traffic), RoceReassembler(QueuePairs(1 << 10))
        each(values.feed, traffic.warm)
        each(decoded.feed, traffic.warm)
        transport(roce, traffic.warm)
        before, values.accepted = decoded.placed, 0
        found = {
            "values": timed(partial(each, values.feed, traffic.timed)),
            "decoder": timed(partial(each, decoded.feed, traffic.timed)),
            "memcpy": timed(partial(np.copyto, target, source)),
            "copy_packets": timed(partial(copy_each, address_of(target), payloads)),
            "transport": timed(partial(transport, roce, traffic.timed)),
            "parse": timed(partial(walk, flows, segments, traffic.timed)),
        }
        placed = decoded.placed - before
        if values.accepted != payload or len(decoded.reduced) != len(traffic.results):
            raise FlowcheckError(f"{values.accepted} of {payload} bytes had the right flags")
        if repeat:  # the first one warms up
            for key, seconds in found.items():
                times[key].append(seconds)
    frames = sum(len(block) for block in traffic.timed)
    return Measured(name, mtu, frames, len(payloads), payload, placed, **times)


def report(results: list[Measured]) -> str:
    def ns(r: Measured, seconds: list[float]) -> str:
        return f"{statistics.median(seconds) / r.packets * 1e9:.0f}"

    def speed(r: Measured, seconds: float) -> str:
        return f"{r.payload * 8 / seconds / 1e9:.1f}"

    speeds = [
        [
            f"{r.protocol} {r.mtu}", f"{r.packets:,}", f"{r.payload / 1e6:.0f}", ns(r, r.parse), ns(r, r.transport),
            ns(r, r.values), speed(r, min(r.values)), speed(r, statistics.median(r.values)),
            ns(r, r.decoder), speed(r, min(r.decoder)), speed(r, statistics.median(r.decoder)),
            speed(r, statistics.median(r.memcpy)),
        ]
        for r in results
    ]  # fmt: skip
    ratios = [
        [
            f"{r.protocol} {r.mtu}", spread(r.speed(r.values, r.memcpy)), spread(r.speed(r.decoder, r.memcpy)),
            *(f"{r.beyond(a, r.memcpy):.0f} / {r.beyond(a, r.copy_packets):.0f}" for a in (r.values, r.decoder)),
        ]
        for r in results
    ]  # fmt: skip
    head = [
        "", "packets", "payload MB", "ns/packet: frames", "transport", "values", "Gbit/s best", "median",
        "decoder", "Gbit/s best", "median", "memcpy Gbit/s",
    ]  # fmt: skip
    against = [
        "", "values, of one memcpy", "decoder, of one memcpy", "values, ns/packet beyond memcpy / packet copies",
        "decoder, the same",
    ]  # fmt: skip
    return (
        f"RoCEv2 to gradients on one core, {len(results[0].values)} repeats\n{table(head, speeds)}\n\n"
        "Speed in that of one memcpy of the same payload, median (least to greatest of the repeats), and time beyond\n"
        f"{table(against, ratios)}"
    )


def main() -> None:
    parser = options(__doc__, "little traffic, few repeats")
    parser.add_argument("--repeats", type=int, help="timed repeats [default: 15, quick 3]")
    args = parser.parse_args()
    repeats = args.repeats or (3 if args.quick else 15)
    here, busy = machine(), load()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    try:
        floats = QUICK_FLOATS if args.quick else FLOATS
        results = [measure(name, mtu, floats, repeats) for name in PROTOCOLS for mtu in MTUS]
    except FlowcheckError as error:
        sys.exit(f"roce.py: {error}")
    show(args.json, here, busy, results, report(results))


if __name__ == "__main__":
    main()
