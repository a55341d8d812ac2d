"""Replaying a recorded job through the pipeline, in memory, with frames changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowcheck import jobfile
from flowcheck.pipeline import Limits, Pipeline
from mirror.block import Block
from mirror.capfile import CaptureFileSource
from reconstruct.lr import Predictor
from reconstruct.markers import parse_marker
from reconstruct.shadow import Shadow
from reconstruct.steps import StepLost, StepReady, Waits

Frame = tuple[int, bytes]


@dataclass
class Recording:
    """A recorded job: its frames by time, its job file, its markers with their times of arrival."""

    frames: list[Frame]
    job: Path
    markers: list[tuple[int, dict[str, object]]] = field(default_factory=list)

    @classmethod
    def load(cls, capture: Path, job: Path) -> Recording:
        frames: list[Frame] = []
        source = CaptureFileSource([capture])
        while not source.finished:
            block = source.read(0)
            if block is None:
                continue
            for at, size, ts in zip(block.offset.tolist(), block.caplen.tolist(), block.ts.tolist(), strict=True):
                frames.append((ts, block.base[at : at + size].tobytes()))
            source.release(block)
        source.close()
        markers = []
        for record in jobfile.read_markers(job.with_name(jobfile.MARKERS_FILE)):
            arrived = record.pop("time")
            markers.append((arrived, record))
        return cls(frames, job, markers)


@dataclass
class Result:
    """What a replay gave: digest per step, the loss if there was one, and the landed gradients' bytes by step."""

    digests: dict[int, str] = field(default_factory=dict)
    lost: StepLost | None = None
    gradients: dict[int, dict[int, bytes]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)


def block_of(frames: list[Frame]) -> Block:
    sizes = np.array([len(data) for _, data in frames], np.int64)
    offset = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    base = np.frombuffer(b"".join(data for _, data in frames) or b"\0", np.uint8)
    ts = np.array([t for t, _ in frames], np.int64)
    return Block(base, offset, sizes, sizes, ts, np.full(len(frames), -1, np.int64))


def replay(
    recording: Recording,
    change: Callable[[list[Frame]], list[Frame]] = lambda frames: frames,
    *,
    per_block: int = 64,
    with_markers: bool = True,
    watch: Callable[[Pipeline], None] = lambda pipeline: None,
) -> Result:
    """Run the recording through a fresh pipeline and shadow; `change` sees all frames at once."""
    description, tensors = jobfile.read(recording.job)
    shadow = Shadow(description)
    for key, (_, data) in tensors.items():
        shadow.load(key, 0, data)
    pipeline = Pipeline(Limits(flows=1 << 10, reorder=16 << 20, landings=1 << 30), Waits(marker=1 << 62))
    tracker = pipeline.add_job("job", description, Predictor(description))
    result = Result()
    markers = list(recording.markers) if with_markers else []

    def take(now: int, final: bool = False) -> None:
        while markers and (markers[0][0] <= now or final):
            arrived, record = markers.pop(0)
            tracker.marker(parse_marker(record), arrived)
        for _, event in pipeline.poll(now, final):
            if isinstance(event, StepReady):
                result.gradients[event.step] = {i: g.tobytes() for i, g in event.gradients.items()}
                shadow.apply(event.step, event.gradients, [dict(group) for group in event.groups])
                result.digests[event.step] = shadow.digest()
                if event.confirmed:
                    result.confirmed.add(event.step)
                tracker.applied(event.step)
            elif isinstance(event, StepLost):
                result.lost = event

    now = 0
    for chunk in chunks(change(list(recording.frames)), per_block):
        now = max(now, max(t for t, _ in chunk))
        pipeline.feed(block_of(chunk), now)
        take(now)
        watch(pipeline)
    pipeline.flush(now)
    take(now, final=True)
    watch(pipeline)
    result.counters = pipeline.counters()
    return result


def chunks(frames: list[Frame], size: int) -> Iterable[list[Frame]]:
    for start in range(0, len(frames), size):
        yield frames[start : start + size]
