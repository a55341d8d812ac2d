"""How fast one core turns recorded frames into placed gradients.

    python benchmarks/pipeline.py [--quick] [--json]

Frames of a real gloo job, recorded in the lab and held in memory, go through flowcheck's pipeline: frame parsing, TCP
reassembly, gloo decoding, placement, step tracking with its markers. In the same process and in turn with it, the same
payload is copied by one memcpy, and frame by frame; scapy and dpkt only dissect a sample of the same frames.
docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from measure import load, machine, options, show, spread, table
from numba import njit
from recorded_job import RecordedJob, Replay, Shape, record

from flowcheck.errors import FlowcheckError
from mirror.block import Block
from mirror.flows import Flows
from mirror.frames import Segments, parse
from mirror.memory import address_of, copy
from reconstruct.shadow import Shadow
from reconstruct.steps import StepReady

SHAPES = (Shape("1,514 B", 1500, False), Shape("9,014 B", 9000, False), Shape("64 KiB", 1500, True))
QUICK = (Shape("1,514 B", 1500, False, ranks=2, steps=4, layers=4),)
WARM_STEPS = 2
"""Steps before the clock starts: the second is the first one with DDP's final buckets, whose memory is then reused."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One frame size. Times in seconds, one per repeat; the lists of a repeat belong together."""

    frames_of: str
    frames: int
    frame_bytes: float
    payload: int
    placed: int
    pipeline: list[float]
    memcpy: list[float]
    memcpy_placed: list[float]
    copy_frames: list[float]
    dissect: dict[str, float | None]
    calls_per_1000_frames: float
    calls_per_block: float

    def ratios(self, other: list[float]) -> list[float]:
        """The pipeline's time in those of another list, repeat by repeat."""
        return [mine / its for mine, its in zip(self.pipeline, other, strict=True)]

    @property
    def frame_ns(self) -> float:
        return statistics.median(self.pipeline) / self.frames * 1e9


@njit(cache=True, nogil=True)
def copy_each(target: int, numbers: np.ndarray) -> int:
    """Copy every payload of `numbers` (address, bytes) to `target`, one behind the other; returns the bytes."""
    at = 0
    for i in range(len(numbers)):
        copy(target + at, numbers[i, 0], numbers[i, 1])
        at += numbers[i, 1]
    return at


def payloads(blocks: list[Block]) -> np.ndarray:
    """int64[n, 2]: address and bytes of every TCP payload, in the order of the frames."""
    flows, segments, found = Flows(1 << 10), Segments(), []
    for block in blocks:
        n = parse(block, flows, segments)
        found.append(segments.numbers[:n, 2:4].copy())
    rows = np.concatenate(found)
    return np.ascontiguousarray(rows[rows[:, 1] > 0])


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def prove(job: RecordedJob) -> int:
    """Replay with the optimizer: every step must be rank 0's to the bit. Returns the block that the clock starts at."""
    shadow = Shadow(job.description)
    for key, (_, data) in job.tensors.items():
        shadow.load(key, 0, data)
    digests = []

    def apply(ready: StepReady) -> None:
        shadow.apply(ready.step, ready.gradients, [dict(group) for group in ready.groups])
        digests.append(shadow.digest())

    replay = Replay(job, apply)
    start = 0
    for number, block in enumerate(job.blocks, 1):
        replay.feed(block)
        if replay.step < WARM_STEPS:
            start = number + 1
    replay.finish()
    if digests != job.digests:
        raise FlowcheckError("the replay differs from what the trainer had: these figures would measure nothing")
    return start


def warmed(job: RecordedJob, start: int) -> Replay:
    """A replay that has come to block `start`."""
    replay = Replay(job)
    for block in job.blocks[:start]:
        replay.feed(block)
    return replay


def count_calls(job: RecordedJob, start: int) -> int:
    """Python and C functions that Python calls from block `start` on."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    replay = warmed(job, start)
    sys.setprofile(count)
    try:
        for block in job.blocks[start:]:
            replay.feed(block)
        replay.finish()
    finally:
        sys.setprofile(None)
    return calls


def dissect(blocks: list[Block], sample: int) -> dict[str, float | None]:
    """Seconds per frame that scapy and dpkt take for `sample` frames spread over the recording; None: not installed."""
    rows = [(block, i) for block in blocks for i in range(len(block)) if block.caplen[i] > 1000]
    chosen = rows[:: max(1, len(rows) // sample)][:sample]
    frames = [b.base[b.offset[i] : b.offset[i] + b.caplen[i]].tobytes() for b, i in chosen]
    logging.getLogger("scapy").setLevel(logging.ERROR)
    from scapy.layers.inet import TCP
    from scapy.layers.l2 import Ether

    def each(dissector: Callable[[bytes], object]) -> float:
        return min(timed(lambda: [dissector(frame) for frame in frames]) for _ in range(3)) / len(frames)

    assert TCP in Ether(frames[0])
    found: dict[str, float | None] = {"scapy": each(Ether), "dpkt": None}
    try:
        from dpkt.ethernet import Ethernet
    except ImportError:
        return found
    found["dpkt"] = each(Ethernet)
    return found


def measure(shape: Shape, root: Path, repeats: int, sample: int) -> Measured:
    job = record(shape, root)
    start = prove(job)
    blocks = job.blocks[start:]
    rows = payloads(blocks)
    payload = int(rows[:, 1].sum())
    target = np.ones(payload, np.uint8)
    source = job.memory[:payload]
    calls = count_calls(job, start)
    frames = sum(len(block) for block in blocks)
    times: dict[str, list[float]] = {"pipeline": [], "memcpy": [], "memcpy_placed": [], "copy_frames": []}

    def follow() -> None:
        for block in blocks:
            replay.feed(block)
        replay.finish()

    for repeat in range(repeats + 1):
        replay = warmed(job, start)
        before = replay.pipeline.counters()["placed_bytes"]
        found = {"pipeline": timed(follow)}
        placed = replay.pipeline.counters()["placed_bytes"] - before
        to, of = target[:placed], source[:placed]
        if replay.step != shape.steps:
            raise FlowcheckError(f"a replay ended at step {replay.step}: {replay.lost}")
        found["memcpy"] = timed(partial(np.copyto, target, source))
        found["memcpy_placed"] = timed(partial(np.copyto, to, of))
        found["copy_frames"] = timed(partial(copy_each, address_of(target), rows))
        if repeat:  # the first one warms up
            for name, seconds in found.items():
                times[name].append(seconds)
    return Measured(
        shape.name, frames, sum(int(block.caplen.sum()) for block in blocks) / frames, payload, placed,
        times["pipeline"], times["memcpy"], times["memcpy_placed"], times["copy_frames"], dissect(blocks, sample),
        calls / frames * 1000, calls / len(blocks),
    )  # fmt: skip


def report(results: list[Measured]) -> str:
    def speed(payload: int, seconds: float) -> str:
        return f"{payload * 8 / seconds / 1e9:.1f}"

    speeds = [
        [
            r.frames_of, f"{r.frames:,}", f"{r.frame_bytes:,.0f}", f"{r.payload / 1e6:.0f}", f"{r.placed / 1e6:.0f}",
            f"{min(r.pipeline) / r.frames * 1e9:.0f}", f"{r.frame_ns:.0f}",
            speed(r.payload, min(r.pipeline)), speed(r.payload, statistics.median(r.pipeline)),
            speed(r.payload, statistics.median(r.memcpy)), f"{r.calls_per_1000_frames:.0f}",
        ]
        for r in results
    ]  # fmt: skip
    ratios = [
        [
            r.frames_of, spread(r.ratios(r.memcpy)), spread(r.ratios(r.memcpy_placed)), spread(r.ratios(r.copy_frames)),
            *(
                "not installed" if seconds is None else f"{seconds * 1e6:.1f} us = {seconds * 1e9 / r.frame_ns:.0f} x"
                for seconds in (r.dissect["scapy"], r.dissect["dpkt"])
            ),
        ]
        for r in results
    ]  # fmt: skip
    head = [
        "frames of", "frames", "mean bytes", "payload MB", "placed MB", "ns/frame best", "median",
        "Gbit/s best", "median", "memcpy Gbit/s", "calls/1,000 frames",
    ]  # fmt: skip
    against = ["frames of", "one memcpy", "memcpy of what was placed", "copy frame by frame", "scapy", "dpkt"]
    return (
        f"Pipeline on one core, {len(results[0].pipeline)} repeats\n{table(head, speeds)}\n\n"
        "The pipeline's time in those of copies of the same payload, median (least to greatest of the repeats);\n"
        f"dissecting alone, per frame, and in times of the whole pipeline\n{table(against, ratios)}"
    )


def main() -> None:
    parser = options(__doc__, "a small recording of one frame size, few repeats")
    parser.add_argument("--repeats", type=int, help="timed repeats [default: 15, quick 3]")
    parser.add_argument("--recordings", type=Path, help="where recordings are kept [default: a temporary folder]")
    args = parser.parse_args()
    # So that a terminated benchmark takes its labs and its temporary files with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = args.recordings or Path(tempfile.gettempdir()) / f"flowcheck-recordings-{os.getuid()}"
    repeats = args.repeats or (3 if args.quick else 15)
    here, busy = machine(), load()
    try:
        shapes = QUICK if args.quick else SHAPES
        # The lab needs all cores, so everything is recorded before this process keeps to one.
        for shape in shapes:
            record(shape, root)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        results = [measure(shape, root, repeats, 50 if args.quick else 500) for shape in shapes]
    except FlowcheckError as error:
        sys.exit(f"pipeline.py: {error}")
    show(args.json, here, busy, results, report(results))


if __name__ == "__main__":
    main()
