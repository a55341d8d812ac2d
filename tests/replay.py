"""Replaying a recorded job through the pipeline, in memory, with frames changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowcheck import jobfile, trainer_log
from flowcheck.description import JobDescription
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.trainer_log import TrainerLog
from mirror.block import Block, pack
from mirror.capfile import CaptureFileSource
from reconstruct.lr import Predictor
from reconstruct.ranges import Ranges
from reconstruct.shadow import Shadow
from reconstruct.steps import Notice, StepConfirmed, StepLost, StepReady, StepTracker, Waits

Frame = tuple[int, bytes]


@dataclass(repr=False)
class Recording:
    """A recorded job: its frames by time, its job file, what its trainers said, its trainers' own digests by step."""

    frames: list[Frame]
    job: Path
    said: TrainerLog
    truth: dict[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<recording of {len(self.frames)} frames>"

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
        return cls(frames, job, trainer_log.read(job.with_name(jobfile.MARKERS_FILE)))


@dataclass(repr=False)
class Result:
    """What a replay gave.

    digests: by step, as long as all is known; part, blank: of steps, what of their gradient is lost, or why all of it;
    landed, times: by tag, the bytes of every all-reduce that was whole, and when the last came, ns; partly: by tag,
    (covered mask, bytes) of the last sight of it.
    """

    digests: dict[int, str] = field(default_factory=dict)
    lost: StepLost | None = None
    notices: list[str] = field(default_factory=list)
    gradients: dict[int, dict[int, bytes]] = field(default_factory=dict)
    landed: dict[int, bytes] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    partly: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)
    tracker: StepTracker | None = None
    part: dict[int, Mapping[int, Ranges]] = field(default_factory=dict)
    blank: dict[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<steps {list(self.digests)}, part of {list(self.part)}, nothing of {self.blank}, lost: {self.lost}>"


def block_of(frames: list[Frame]) -> Block:
    return pack([data for _, data in frames], [time for time, _ in frames])


class Player:
    """A pipeline and a shadow that follow one job; frames and what the trainers say are given one after the other."""

    def __init__(self, job: Path, attached: int | None, waits: Waits | None = None) -> None:
        self.description, tensors = jobfile.read(job)
        self.shadow = Shadow(self.description)
        for key, (_, data) in tensors.items():
            self.shadow.load(key, 0, data)
        self.pipeline = Pipeline(Limits(flows=1 << 10, reorder=16 << 20, landings=1 << 30), waits or Waits())
        self.tracker = self.pipeline.add_job("job", self.description, Predictor(self.description), attached)
        self.result = Result(tracker=self.tracker)
        self.now = 0

    def feed(self, frames: list[Frame]) -> None:
        self.now = max(self.now, max(t for t, _ in frames))
        self.pipeline.feed(block_of(frames), self.now)

    def poll(self, final: bool = False) -> None:
        result = self.result
        self._look()
        events = self.pipeline.poll(self.now, final)
        self._look()  # also at what was kept raw until now
        for _, event in events:
            if isinstance(event, StepReady):
                result.gradients[event.step] = {i: g.tobytes() for i, g in event.gradients.items()}
                groups = [dict(group) for group in event.groups]
                if event.blank:
                    result.blank[event.step] = event.blank
                    self.shadow.skip(event.step, groups)
                else:
                    if event.lost:
                        result.part[event.step] = event.lost
                    self.shadow.apply(event.step, event.gradients, groups, event.lost)
                digest = self.shadow.digest()
                if digest is not None:
                    result.digests[event.step] = digest
                if event.confirmed:
                    result.confirmed.add(event.step)
                self.tracker.applied(event.step)
            elif isinstance(event, StepConfirmed):
                result.confirmed.add(event.step)
            elif isinstance(event, StepLost):
                result.lost = event
            elif isinstance(event, Notice):
                result.notices.append(event.text)

    def _look(self) -> None:
        for (_, tag), landing in self.pipeline.gloo._held.landings.items():
            if landing.complete:
                self.result.landed.setdefault(tag, landing.data.tobytes())
                self.result.times.setdefault(tag, landing.time)
            mask = np.ones(landing.size, bool)
            for offset, length in landing.holes():
                mask[offset : offset + length] = False
            self.result.partly[tag] = (mask, landing.data.copy())

    def finish(self) -> Result:
        self.pipeline.flush(self.now)
        self.poll(final=True)
        self.result.counters = self.pipeline.counters()
        return self.result


def replay(
    recording: Recording,
    change: Callable[[list[Frame]], list[Frame]] = lambda frames: frames,
    *,
    per_block: int = 64,
    said: TrainerLog | None = None,
    waits: Waits | None = None,
) -> Result:
    """Run the recording through a fresh pipeline and shadow; `change` sees all frames at once."""
    said = recording.said if said is None else said
    player = Player(recording.job, said.attached, waits)
    words = list(said.words)
    for chunk in chunks(change(list(recording.frames)), per_block):
        player.feed(chunk)
        while words and words[0][0] <= player.now:
            words.pop(0)[1](player.tracker)
        player.poll()
    for time, word in words:
        player.now = max(player.now, time)
        word(player.tracker)
    return player.finish()


def described(recording: Recording) -> JobDescription:
    return jobfile.describe(recording.job)


def chunks(frames: list[Frame], size: int) -> Iterable[list[Frame]]:
    for start in range(0, len(frames), size):
        yield frames[start : start + size]
