"""A job recorded in the lab, and its replay from memory through flowcheck's own pipeline."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowcheck import jobfile, trainer_log
from flowcheck.description import JobDescription
from flowcheck.errors import FlowcheckError
from flowcheck.lab import Lab, LabConfig, Mirror
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.trainer_log import TrainerLog
from mirror.block import Block
from mirror.capfile import CaptureFileSource
from reconstruct.lr import Predictor
from reconstruct.steps import StepLost, StepReady, Waits

SCRIPT = Path(__file__).with_name("large_buckets.py")
RING_BLOCK = 1 << 20
"""Bytes of frames in a block, as in a capture ring of the daemon's default."""
TRIES = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """What to record: frames of a network with this MTU, cut to it or as large as the sender's kernel makes them."""

    name: str
    mtu: int
    offload: bool
    ranks: int = 4
    steps: int = 5
    width: int = 1024
    layers: int = 8

    @property
    def folder(self) -> str:
        cut = "whole" if self.offload else "cut"
        return f"mtu{self.mtu}-{cut}-ranks{self.ranks}-steps{self.steps}-{self.layers}x{self.width}"


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A recording in memory. `said`: what the trainers told the daemon; `digests`: rank 0's own, after each step."""

    blocks: list[Block]
    description: JobDescription
    tensors: jobfile.Tensors
    said: TrainerLog
    digests: list[str]

    @property
    def memory(self) -> np.ndarray:
        """The bytes of the capture file, in which all blocks lie."""
        return self.blocks[0].base


def record(shape: Shape, root: Path) -> RecordedJob:
    """The recording of this shape under `root`, made in the lab if it is not there yet. Raises FlowcheckError."""
    folder = root / shape.folder
    problem = ""
    for _ in range(TRIES):
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _run_lab(shape, folder)
        try:
            job = _load(folder)
            replay = Replay(job)
            if replay.run(job.blocks) == shape.steps:
                (folder / "whole").touch()
                return job
            problem = replay.lost
        except FlowcheckError as error:
            problem = str(error)
        # Frames were dropped while a busy machine recorded, or it was recorded by another version: once more.
        (folder / "whole").unlink(missing_ok=True)
    raise FlowcheckError(f"{TRIES} recordings in a row cannot be used: {problem}; try again on an idle machine")


def _run_lab(shape: Shape, folder: Path) -> None:
    config = LabConfig(
        command=(str(SCRIPT), str(folder / "digests.json"), str(shape.steps), str(shape.width), str(shape.layers)),
        ranks=shape.ranks,
        mirrors=(Mirror(1, "both"),),
        mtu=shape.mtu,
        monitor_offload=shape.offload,
        record=str(folder / "frames.pcap"),
        store=str(folder / "store"),
        daemon_args=("--ring-mib", "1024"),
    )
    with open(folder / "output", "wb") as output, Lab(config, stdout=output.fileno(), stderr=output.fileno()) as lab:
        lab.train()
        status = lab.wait(300)
        lab.finish()
    if status:
        raise FlowcheckError(f"the job to record ended with status {status}: see {folder / 'output'}")


def _load(folder: Path) -> RecordedJob:
    capture = folder / "frames.pcap"
    source = CaptureFileSource([capture])
    parts = []
    while not source.finished:
        block = source.read()
        if block is not None:
            parts.append((block.offset, block.caplen, block.wirelen, block.ts, block.vlan))
            source.release(block)
    source.close()
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    description, tensors = jobfile.read(folder / "store/default/e1" / jobfile.JOB_FILE)
    said = trainer_log.read(folder / "store/default/e1" / jobfile.MARKERS_FILE)
    digests = json.loads((folder / "digests.json").read_text())
    return RecordedJob(list(cut(np.fromfile(capture, np.uint8), columns)), description, tensors, said, digests)


def cut(base: np.ndarray, columns: list[np.ndarray], size: int = RING_BLOCK) -> Iterator[Block]:
    """Blocks of about `size` bytes of frames. columns: offset, caplen, wirelen, ts, vlan, in the order of Block."""
    room = np.cumsum(columns[1]) // size
    edges = [0, *(np.flatnonzero(np.diff(room)) + 1).tolist(), len(room)]
    for first, last in itertools.pairwise(edges):
        offset, caplen, wirelen, ts, vlan = (column[first:last] for column in columns)
        yield Block(base, offset, caplen, wirelen, ts, vlan)


class Replay:
    """Feeds a recorded job's blocks to its own pipeline, what the trainers said by its time; steps are forgotten."""

    def __init__(self, job: RecordedJob, take: Callable[[StepReady], None] = lambda ready: None) -> None:
        self.pipeline = Pipeline(Limits(landings=2 << 30), Waits(marker=1 << 62))
        self.lost = "no step was lost"
        self._tracker = self.pipeline.add_job("job", job.description, Predictor(job.description), job.said.attached)
        self._words = deque(job.said.words)
        self._take = take
        self._now = 0

    @property
    def step(self) -> int:
        """The last step whose gradients are whole."""
        return self._tracker.step

    def feed(self, block: Block) -> None:
        self._now = max(self._now, int(block.ts[-1]))
        self.pipeline.feed(block, self._now)
        self._poll(self._now, False)

    def finish(self) -> None:
        """The recording is over."""
        self.pipeline.flush(self._now)
        self._poll(1 << 62, True)

    def run(self, blocks: list[Block]) -> int:
        """Feed all of it; the last step whose gradients are whole."""
        for block in blocks:
            self.feed(block)
        self.finish()
        return self.step

    def _poll(self, until: int, final: bool) -> None:
        while self._words and self._words[0][0] <= until:
            self._words.popleft()[1](self._tracker)
        for _, event in self.pipeline.poll(self._now, final):
            if isinstance(event, StepReady):
                if event.blank or event.lost:
                    raise FlowcheckError(f"step {event.step} was not recorded whole: record the job again")
                self._take(event)
                self._tracker.applied(event.step)
            elif isinstance(event, StepLost):
                self.lost = event.reason
