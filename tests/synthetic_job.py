"""A made-up job on a made-up wire: DDP's collectives, whatever else a script does, and rank 0's markers, in any order.

Frames come from `gloo_traffic`, so the whole real path runs: reassembly, gloo decoding, step tracking. The job keeps
the truth: the gradients of every step.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gloo_traffic
import numpy as np
import torch

from flowcheck.description import (
    DdpSpec,
    GroupRecord,
    GroupSpec,
    JobDescription,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
)
from flowcheck.pipeline import Limits, Pipeline
from reconstruct.lr import Predictor
from reconstruct.markers import Canary, Marker
from reconstruct.steps import StepLost, StepReady, StepTracker, TrackerEvent, Waits

SIZES = (40, 24, 56)  # elements of the parameters, by DDP index
INITIAL = ((0, 1, 2),)
REBUILT = ((2, 1), (0,))
PERMUTED = ((2, 0, 1),)  # the same size as the initial bucket: only its place tells it apart
SECOND = 1_000_000_000
Buckets = tuple[tuple[int, ...], ...]
Word = Callable[[StepTracker], None]


class SyntheticJob:
    """`mirror`: links that are captured, None: both directions of rank 1's port."""

    def __init__(
        self,
        world: int = 2,
        *,
        mirror: list[tuple[int, int]] | None = None,
        static_graph: bool = False,
        rebuilt_at_attach: bool = False,
        step: int = 0,
        seed: int = 0,
        mss: int = 1448,
        base_port: int = 40000,
        initial: Sequence[Sequence[int]] = INITIAL,
        rebuilt: Sequence[Sequence[int]] = REBUILT,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.wire = gloo_traffic.Job(world, gloo_traffic.port(world, 1) if mirror is None else mirror, seed, mss)
        self.wire.base_port = base_port
        self.world = world
        self.initial, self.rebuilt = initial, rebuilt
        self.sizes = SIZES if sizes is None else tuple(sizes)
        self.has_rebuilt = rebuilt_at_attach
        self.step = step
        self.tag = 0  # gloo's next tag
        self.sequence = 0  # c10d's number
        self.words: list[tuple[int, Word]] = []
        self.truth: dict[int, dict[int, bytes]] = {}  # step -> DDP index -> gradient
        self.laid: dict[int, Buckets] = {}  # step -> layout of its reduction
        self.reduced: dict[int, bytes] = {}  # of the newest reduction
        self.groups: tuple[dict[str, Any], ...] = ({"lr": 0.1, "momentum": 0.0},)
        self.version = 0
        self.attached: int | None = None
        self.dropped: set[int] = set()  # steps whose markers are lost
        self._static = static_graph
        self._random = np.random.default_rng(seed)
        self._described: JobDescription | None = None
        self.wire.connect()

    @property
    def now(self) -> int:
        return self.wire._now

    def wait(self, ns: int) -> None:
        self.wire._now += ns

    def collective(self) -> int:
        """The tag of the next collective, taken."""
        self.tag += 1
        self.sequence += 1
        return self.tag - 1

    def attach(self) -> None:
        """The job attaches here."""
        self.wait(SECOND)
        specs = [TensorSpec("float32", (n,), (1,)) for n in self.sizes]
        names = [f"p{i}" for i in range(len(self.sizes))]
        ddp = DdpSpec(
            False, self._static, False, True, 25 << 20, True, (), None, tuple(map(tuple, self.initial)),
            tuple(map(tuple, self.rebuilt)) if self.has_rebuilt else None, (),
        )  # fmt: skip
        self._described = JobDescription(
            "made-up", self.step, self.world, torch.__version__, platform.machine(),
            torch.backends.cpu.get_cpu_capability(), "cpu",
            [ParameterSpec(n, s, i, ()) for i, (n, s) in enumerate(zip(names, specs, strict=True))], [],
            OptimizerSpec("SGD", [GroupSpec(tuple(names), dict(self.groups[0]))], {}), ddp,
            self._group(),
        )  # fmt: skip
        self.attached = self.now
        self.wait(SECOND // 10)

    def _group(self) -> GroupRecord:
        listeners = {r: (f"10.0.0.{r + 1}", self.wire.base_port + r) for r in range(self.world)}
        return GroupRecord("0", self.world, [listeners], self.sequence)

    @property
    def description(self) -> JobDescription:
        assert self._described is not None
        return self._described

    # On the wire

    def barrier(self) -> None:
        tag, distance = self.collective(), 1
        while distance < self.world:
            for rank in range(self.world):
                self._message((rank, (rank + distance) % self.world), 7, tag, b"")
            distance *= 2

    def _message(self, link: tuple[int, int], kind: int, tag: int, body: bytes) -> None:
        if link in self.wire.mirrored or link[::-1] in self.wire.mirrored:
            self.wire.message(link, kind, tag, body)

    def broadcast(self, data: bytes) -> None:
        tag = self.collective()
        for rank in range(1, self.world):
            self._message((0, rank), 6, tag, data)

    def point_to_point(self) -> None:
        self._message((0, 1), 0, 77, b"hello")
        self.sequence += 1

    def allreduce(self, values: np.ndarray, *, lost: bool = False) -> int:
        """Any all-reduce of float32 `values`. lost: the mirror shows nothing of it. Returns its tag."""
        tag, data = self.collective(), values.astype(np.float32).view(np.uint8)
        frames = self.wire.frames
        before = len(frames)
        self.wire.allreduce({tag: (data.size, 4)}, values={tag: data})
        if lost:
            del frames[before:]
        return tag

    def rebuild(self) -> None:
        """DDP's two broadcasts of the rebuilt layout."""
        order = [i for bucket in self.rebuilt for i in bucket]
        self.broadcast(np.array([*order, len(self.rebuilt)], np.int32).tobytes())
        self.broadcast(np.array([len(bucket) for bucket in self.rebuilt], np.int32).tobytes())
        self.has_rebuilt = True

    def reduction(self, *, lost: Sequence[int] = ()) -> list[int]:
        """One backward pass: the buckets of the layout in force, with new gradients. Returns the tags."""
        gradients = {i: self._random.standard_normal(n).astype(np.float32) for i, n in enumerate(self.sizes)}
        tags = []
        for number, bucket in enumerate(self.rebuilt if self.has_rebuilt else self.initial):
            values = np.concatenate([gradients[i] for i in bucket])
            tags.append(self.allreduce(values, lost=number in lost))
        self.reduced = {i: g.tobytes() for i, g in gradients.items()}
        return tags

    # Rank 0's words

    def say(self, word: Word, delay: int = 0) -> None:
        self.words.append((self.now + delay, word))

    def report_layout(self, delay: int = 0) -> None:
        indices = tuple(tuple(bucket) for bucket in self.rebuilt)
        sizes = tuple(4 * sum(self.sizes[i] for i in bucket) for bucket in indices)
        self.say(lambda tracker: tracker.reported_layout(indices, sizes), delay)

    def optimizer_step(
        self,
        *,
        canaries: int = 3,
        delay: int = 1_000_000,
        changed: bool = False,
        asked: bool = False,
        clipped: bool = False,
        says_rebuilt: bool = True,
    ) -> None:
        """An optimizer step with the newest reduction, and its marker after `delay` ns.

        canaries: parameters of which an element is told; asked: the fields of the param groups go with the marker as
        the daemon asked for them; says_rebuilt: as newer trainers do.
        """
        self.step += 1
        self.truth[self.step] = self.reduced
        self.laid[self.step] = tuple(map(tuple, self.rebuilt if self.has_rebuilt else self.initial))
        told = []
        for index in range(canaries):
            at = int(self._random.integers(self.sizes[index]))
            bits = self.reduced[index][4 * at : 4 * at + 4]
            told.append(Canary(index, at, b"\1\2\3\4" if clipped else bits, None))
        self.version += changed
        marker = Marker(
            self.step, self.sequence, self.version, self.groups if changed or asked else None, tuple(told), None,
            self.has_rebuilt if says_rebuilt else None,
        )  # fmt: skip
        if self.step not in self.dropped:
            at = self.now + delay
            self.words.append((at, lambda tracker: tracker.marker(marker, at)))
        self.wait(10_000_000)

    def usual_step(self, **options: Any) -> None:
        """Forward, backward, optimizer; the second one of a model rebuilds its layout first."""
        if self.truth and not self.has_rebuilt:
            self.rebuild()
        self.reduction()
        self.optimizer_step(**options)

    def last_word(self) -> None:
        last = self.step
        self.say(lambda tracker: tracker.ends(last))

    def unlink(self) -> None:
        """The connection that markers come on breaks, and it is noticed."""
        self.say(lambda tracker: tracker.linked(False))


def trained(steps: int, **options: Any) -> SyntheticJob:
    """A job that attached and took some usual steps."""
    job = SyntheticJob(**options)
    job.attach()
    for _ in range(steps):
        job.usual_step()
    return job


def blocks(frames: list[gloo_traffic.Frame], most: int) -> Iterator[list[gloo_traffic.Frame]]:
    """Frames as a ring hands them over: at most `most`, and never across a pause."""
    some: list[gloo_traffic.Frame] = []
    for frame in frames:
        if some and (len(some) == most or frame.ts - some[-1].ts > 4_000_000):
            yield some
            some = []
        some.append(frame)
    if some:
        yield some


def right(one: StepReady, gradients: dict[int, bytes], truth: dict[int, bytes]) -> bool:
    """Whether what is known of a step's gradients (float32) is the truth, and what is lost of them zero."""
    if one.blank:
        return not gradients and not one.lost and not one.holes
    for index, whole in truth.items():
        wanted = np.frombuffer(whole, np.uint32).copy()
        for low, high in one.lost.get(index, ()):
            wanted[low:high] = 0
        if wanted.tobytes() != gradients[index]:
            return False
    return len(gradients) == len(truth)


class Follower:
    """The real pipeline following a made-up job; `steps` are those claimed, with their gradients."""

    def __init__(self, job: SyntheticJob, *, calibrated: bool = True, waits: Waits | None = None) -> None:
        self.job = job
        self.pipeline = Pipeline(Limits(64, 1 << 20, 1 << 26), waits or Waits())
        attached = job.attached if calibrated else None
        self.tracker = self.pipeline.add_job("job", job.description, Predictor(job.description), attached)
        self.events: list[TrackerEvent] = []
        self.steps: dict[int, StepReady] = {}
        self.gradients: dict[int, dict[int, bytes]] = {}
        self.apply = True

    def run(
        self,
        frames: list[gloo_traffic.Frame] | None = None,
        *,
        per_block: int = 16,
        quiet: int = 0,
        final: bool = True,
        idle: bool = True,
    ) -> Follower:
        """Feed the frames, say the words at their times.

        quiet: ns that pass after the last of both; idle: whether time goes on in long pauses, as on a live ring.
        """
        words = sorted(self.job.words, key=lambda word: word[0])
        frames = self.job.wire.frames if frames is None else frames
        now = 0
        for some in blocks(frames, per_block):
            while words and words[0][0] <= some[0].ts:
                at, word = words.pop(0)
                now = max(now, at)
                word(self.tracker)
                self.take(now)
            if idle and now and some[0].ts - now > SECOND // 5:
                now = some[0].ts - SECOND // 20
                self.pipeline.expire(now)
                self.take(now)
            now = max(now, some[-1].ts)
            self.pipeline.feed(self.job.wire.block(some), now)
            self.take(now)
        for at, word in words:
            now = max(now, at)
            word(self.tracker)
            self.take(now)
        end = now + quiet
        while now < end:
            now += SECOND // 10
            self.pipeline.expire(now)
            self.take(now)
        if final:
            self.pipeline.flush(now)
            self.take(now, final=True)
        return self

    def take(self, now: int, final: bool = False) -> None:
        for _, event in self.pipeline.poll(now, final):
            self.events.append(event)
            if isinstance(event, StepReady):
                self.steps[event.step] = event
                self.gradients[event.step] = {i: g.tobytes() for i, g in event.gradients.items()}
                if self.apply:
                    event.gradients.clear()
                    self.tracker.applied(event.step)

    @property
    def lost(self) -> StepLost | None:
        return self.tracker.lost

    @property
    def story(self) -> str:
        """One sign per step that was handed out: "." whole, "-" parts of its gradient lost, "x" nothing known."""
        return "".join("x" if one.blank else "-" if one.lost else "." for one in self.steps.values())

    def check(self, steps: int) -> None:
        """Exactly the steps up to `steps` were handed out, each whole and with the trainer's own gradients."""
        self.verify()
        assert (self.story, self.lost) == ("." * (steps - self.job.description.step), None), self.why

    @property
    def why(self) -> dict[int, str]:
        """Step -> why nothing is known of it."""
        return {step: one.blank for step, one in self.steps.items() if one.blank}

    def verify(self) -> None:
        """Every step was handed out once, in order; what is known of a gradient is the trainer's own, what is not is
        zero, and lost are the elements with a missing byte, and no other."""
        first = self.job.description.step + 1
        assert list(self.steps) == list(range(first, first + len(self.steps)))
        for step, one in self.steps.items():
            if one.blank:
                assert right(one, self.gradients[step], {})
                continue
            layout = self.job.laid[step]
            gone = [np.zeros(sum(SIZES[i] for i in bucket) * 4, bool) for bucket in layout]
            for bucket, offset, length in one.holes:
                assert length > 0 and not gone[bucket][offset : offset + length].any()
                gone[bucket][offset : offset + length] = True
            for bucket, mask in zip(layout, gone, strict=True):
                at = 0
                for index in bucket:
                    lost = mask[at : at + 4 * SIZES[index]].reshape(-1, 4).any(axis=1)
                    at += 4 * SIZES[index]
                    told = np.zeros(SIZES[index], bool)
                    for low, high in one.lost.get(index, ()):
                        told[low:high] = True
                    assert np.array_equal(told, lost), (step, index)
            assert right(one, self.gradients[step], self.job.truth[step]), f"step {step} has wrong gradients"
