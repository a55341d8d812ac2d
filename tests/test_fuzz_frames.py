"""Injured frames by the million through everything that reads them: no crash, no hang, bounded memory.

What is injured is real: captures and made-up jobs over gloo, NCCL over RoCE and over TCP sockets, and tunnels, so that
the injuries lie behind headers that fit. What was found once stays in `test_the_frames_that_broke_something_once`.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nccl_job
import numpy as np
import pytest
import synthetic_job
import tunnel_frames
from fuzzing import Mutator

from flowcheck.doctor.exam import Examination
from flowcheck.inspect.report import inspect
from flowcheck.pipeline import Limits, Pipeline
from mirror.block import Block, pack
from mirror.capfile import CaptureFileSource
from mirror.record import PcapRecorder
from reconstruct.lr import Predictor
from reconstruct.observe.observer import Observer
from reconstruct.steps import StepLost, StepReady, Waits

CAPTURES = Path(os.environ.get("FLOWCHECK_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "captures"
HARM = (0.002, 0.03, 0.3, 1.0)
LONGEST_BLOCK = 5.0
"""Seconds of this thread that one block may take, kernels compiled: far more than any did, for a slow machine."""
MOST_MEMORY = 1 << 30
"""Bytes by which the process may grow over the whole of a run, with the limits below."""
LIMITS = Limits(flows=1 << 10, reorder=4 << 20, landings=64 << 20)
PER_BLOCK = 512
QUICK, MILLIONS = 8_000, 2_000_000
"""Frames of each corpus; there are five."""

Corpus = tuple[list[bytes], Any]
"""Frames, and the job that they belong to, None if it is not followed."""


def gloo() -> Corpus:
    job = synthetic_job.trained(8)
    block = job.wire.block(job.wire.frames)
    ends = (block.offset + block.caplen).tolist()
    return [block.base[start:end].tobytes() for start, end in zip(block.offset.tolist(), ends, strict=True)], job


def roce() -> Corpus:
    frames: list[bytes] = []
    for options in ({"nccl": {"protocol": protocol}} for protocol in ("ll", "ll128", "simple")):
        job = nccl_job.trained(4, **options)
        frames += [frame.data for frame in job.wire.frames]
    return frames, job


def sockets() -> Corpus:
    job = nccl_job.trained(4, sockets=2)
    return [frame.data for frame in job.wire.frames], job


def tunnels() -> Corpus:
    inner = gloo()[0][:150] + roce()[0][:150]
    wrap: tuple[Callable[[bytes], bytes], ...] = (
        tunnel_frames.erspan1, tunnel_frames.erspan2, tunnel_frames.erspan3, tunnel_frames.gre_ethernet,
        tunnel_frames.mellanox, tunnel_frames.vxlan, lambda frame: tunnel_frames.vlan(frame, 7, 9),
        tunnel_frames.ttag, lambda frame: tunnel_frames.erspan2(tunnel_frames.vxlan(frame)),
    )  # fmt: skip
    frames = [way(frame) for way in wrap for frame in inner]
    for number, frame in enumerate(frames[::7]):
        frames += tunnel_frames.fragments(frame, 256, number)
    return frames, None


def captured() -> Corpus:
    if not CAPTURES.is_dir():
        pytest.skip("no captures here")
    frames: list[bytes] = []
    for path in sorted(CAPTURES.rglob("*.pcap*")):
        source = CaptureFileSource([path])
        while not source.finished and len(frames) < 60_000:
            block = source.read(0)
            if block is None:
                continue
            if block.linktype == 1:
                ends = (block.offset + np.minimum(block.caplen, 9000)).tolist()
                pieces = zip(block.offset.tolist(), ends, strict=True)
                frames += [block.base[start:end].tobytes() for start, end in pieces][:1500]
            source.release(block)
        source.close()
    return frames, None


CORPORA = (gloo, roce, sockets, tunnels, captured)


class Everything:
    """All that reads frames: a pipeline that follows the job again and again, the observer, the doctor."""

    def __init__(self, job: Any, longest: float = LONGEST_BLOCK) -> None:
        self.job, self._longest = job, longest
        # Where a job is followed injuries are to reach its decoders: checksums would refuse most of them.
        self.pipeline = Pipeline(LIMITS, Waits(), checksums=job is None)
        self.observer = Observer(flows=1 << 10, reorder_bytes=4 << 20)
        self.examination = Examination(flows=1 << 10)
        self.slowest = 0.0
        """Seconds that the slowest block took."""
        self._fed = 0
        self._tracker: Any = None
        self._follow()

    def _follow(self) -> None:
        """The job attaches again; most of the time none is followed, which is faster and injures more streams."""
        if self.job is None:
            return
        self.pipeline.remove_job("job")
        if self._fed // 32 % 8:
            return
        self._tracker = self.pipeline.add_job("job", self.job.description, Predictor(self.job.description), None)

    def feed(self, block: Block, now: int) -> None:
        begun = time.thread_time()
        self.pipeline.feed(block, now)
        self.observer.feed(block, now)
        self.examination.feed(block, now)
        self._poll(now)
        self._fed += 1
        if self._fed % 32 == 0:  # the ends of gaps, and a job that attaches again
            self.pipeline.expire(now + 10**9)
            self.observer.expire(now + 10**9)
            self._follow()
            counters = self.pipeline.counters()
            assert counters["memory_bytes"] <= LIMITS.landings + LIMITS.reorder
            assert all(type(count) is int and count >= 0 for count in counters.values()), counters
            self.pipeline.tunnels()
            self.observer.take_finished()
        self.slowest = max(self.slowest, time.thread_time() - begun)
        assert self.slowest < self._longest

    def _poll(self, now: int, final: bool = False) -> None:
        for _, event in self.pipeline.poll(now, final):
            if isinstance(event, StepReady):
                self._tracker.applied(event.step)
            elif isinstance(event, StepLost):
                self._follow()
                return

    def finish(self, now: int) -> None:
        self.pipeline.flush(now)
        self._poll(now, final=True)
        self.observer.flush(now)
        self.examination.flush(now)


def run(corpus: Callable[[], Corpus], count: int, seed: int) -> Everything:
    """Feed `count` injured frames; the reader starts anew a few times, as daemons do."""
    frames, job = corpus()
    warm = Everything(job, longest=float("inf"))  # kernels are compiled here
    for _ in range(4):
        warm.feed(pack(frames[:PER_BLOCK], 1), 1)
    warm.finish(1)
    everything = Everything(job)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for part, harm in enumerate(HARM):
        mutator = Mutator(frames, seed + part)
        for _ in range(count // len(HARM) // PER_BLOCK):
            block = mutator.block(PER_BLOCK, harm)
            everything.feed(block, mutator.now)
        everything.finish(mutator.now)
        slowest, everything = everything.slowest, Everything(job)
        everything.slowest = slowest
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10
    assert grown < MOST_MEMORY, f"{grown >> 20} MiB more than before"
    return everything


@pytest.fixture
def whole_frames_first() -> Iterator[None]:
    """A mutator that does nothing gives the frames as they are: else nothing below shows anything."""
    frames, _ = gloo()
    block = Mutator(frames, 1).block(len(frames), 0.0)
    for at, size, frame in zip(block.offset.tolist(), block.caplen.tolist(), frames, strict=True):
        assert block.base[at : at + size].tobytes() == frame
    yield


@pytest.mark.usefixtures("whole_frames_first")
@pytest.mark.parametrize("corpus", CORPORA)
def test_injured_frames(corpus: Callable[[], Corpus]) -> None:
    run(corpus, QUICK, 1)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("corpus", CORPORA)
def test_millions_of_injured_frames(corpus: Callable[[], Corpus]) -> None:
    everything = run(corpus, MILLIONS, 1000)
    print(f"{corpus.__name__}: {MILLIONS} frames, slowest block {everything.slowest:.2f} s")


def test_a_job_among_injured_frames_is_still_followed() -> None:
    """The injuries reach the decoders: the whole frames among them are followed to steps."""
    frames, job = gloo()
    pipeline = Pipeline(LIMITS, Waits())
    tracker = pipeline.add_job("job", job.description, Predictor(job.description), None)
    before = pipeline.counters()
    mutator = Mutator(frames, 5)
    for _ in range(8):
        pipeline.feed(mutator.block(256, 0.02), mutator.now)
        pipeline.poll(mutator.now)
    after = pipeline.counters()
    assert after["placed_bytes"] > before["placed_bytes"] and tracker.step_bytes > 0


@pytest.mark.parametrize("corpus", [gloo, roce, sockets])
def test_injured_capture_files(corpus: Callable[[], Corpus], tmp_path: Path) -> None:
    """pcap files of injured frames, and files whose own headers are injured, through `inspect`."""
    frames, _ = corpus()
    chance = np.random.default_rng(7)
    path = tmp_path / "injured.pcap"
    for harm in HARM:
        mutator = Mutator(frames, 3)
        with PcapRecorder(path) as recorder:
            for _ in range(4):
                block = mutator.block(256, harm)
                if block.linktype == 1:
                    recorder.write(block)
        with inspect([path]) as report:
            assert sum(1 for _ in report.lines()) >= 1
        data = bytearray(path.read_bytes())
        for _ in range(6):
            hurt = bytearray(data)
            for at in chance.integers(0, min(len(hurt), 4000), 8).tolist():
                hurt[at] = int(chance.integers(0, 256))
            (tmp_path / "hurt.pcap").write_bytes(hurt[: int(chance.integers(0, len(hurt)))])
            read_all(tmp_path / "hurt.pcap")


def read_all(path: Path) -> int:
    """Frames in a capture file, whatever it is; each lies inside of its block."""
    from flowcheck.errors import FlowcheckError

    count = 0
    try:
        source = CaptureFileSource([path])
    except (FlowcheckError, ValueError, OSError):
        return 0
    while not source.finished:
        block = source.read(0)
        if block is not None:
            assert (block.offset >= 0).all() and (block.caplen >= 0).all()
            assert (block.offset + block.caplen <= block.base.size).all()
            count += len(block)
            source.release(block)
    source.close()
    return count


@pytest.mark.parametrize("name", ["le.pcap", "be.pcap", "ns.pcap", "ng.pcapng"])
def test_capture_files_that_lie_about_lengths(name: str, tmp_path: Path) -> None:
    import struct

    order = ">" if name.startswith("be") else "<"
    path = tmp_path / name
    lengths = (0, 1, 15, 16, 60, 65_535, 262_144, 1 << 24, 1 << 31, (1 << 32) - 1)
    for captured_length in lengths:
        for wire in (0, 60, (1 << 32) - 1):
            if name.endswith("ng"):
                section = struct.pack("<IIIHHqI", 0x0A0D0D0A, 28, 0x1A2B3C4D, 1, 0, -1, 28)
                interface = struct.pack("<IIHHII", 1, 20, 1, 0, 0, 20)
                body = struct.pack("<IIIII", 0, 0, 0, captured_length, wire) + bytes(64)
                for size in (12 + len(body), captured_length & ~3, 0, 12, (1 << 32) - 4):
                    path.write_bytes(section + interface + struct.pack("<II", 6, size) + body + struct.pack("<I", size))
                    assert read_all(path) <= 1
            else:
                magic = 0xA1B23C4D if name.startswith("ns") else 0xA1B2C3D4
                head = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262_144, 1)
                path.write_bytes(head + struct.pack(order + "IIII", 1, 2, captured_length, wire) + bytes(80))
                assert read_all(path) <= 8


def test_the_frames_that_broke_something_once() -> None:
    """What the runs above found, as it was found."""
    for path in sorted(Path(__file__).with_name("fuzz_corpus").glob("frames-*.npz")):
        kept = np.load(path)
        block = Block(*(kept[name] for name in ("base", "offset", "caplen", "wirelen", "ts", "vlan")))
        everything = Everything(None)
        everything.feed(block, int(kept["ts"].max()))
        everything.finish(int(kept["ts"].max()))
    assert len(pack([b""], 0)) == 1
