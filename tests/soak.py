"""A made-up job that really trains, mirrors whose frames meet faults, and agents that answer: one run of the soak.

Everything from the frames to the repaired shadow is the product's own code; time is the capture's. After every change
of the shadow each element that it calls known is compared with the trainer's at that step, and at a random moment of
every step it is noted how far the newest fully known one is behind the trainers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from nccl_job import NcclJob
from synthetic_job import SyntheticJob

from flowcheck.description import GroupSpec, OptimizerSpec
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.resync import Budget, Resync
from mirror.block import Block, SourceCounters
from mirror.faults import Faults
from mirror.faulty import FaultSource
from reconstruct.lr import Predictor
from reconstruct.shadow import Shadow
from reconstruct.steps import StepLost, StepReady, Waits

MS = 1_000_000
PEERS = (b"a", b"b", b"c")
FACTORY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


class Training:
    """What a made-up job (`SyntheticJob`, `NcclJob`) trains with its own gradients.

    states: step -> tensor key -> bytes; ends: when the optimizer ended the step, ns.
    """

    def __init__(self, job: SyntheticJob, optimizer: str) -> None:
        rng = np.random.default_rng(len(job.sizes))
        self.job = job
        self.parameters = [torch.from_numpy(rng.standard_normal(n).astype(np.float32)) for n in job.sizes]
        self.names = [f"p{i}" for i in range(len(job.sizes))]
        self.optimizer = FACTORY[optimizer](self.parameters)
        fields = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        job.groups = (fields,)
        job.attach()
        spec = OptimizerSpec(optimizer, [GroupSpec(tuple(self.names), fields)], {})
        job._described = replace(job.description, optimizer=spec)
        self.states: dict[int, dict[str, np.ndarray]] = {job.step: self._state()}
        self.ends: dict[int, int] = {}
        self.looks: list[tuple[int, int]] = []  # (when, newest step done): hooks before and after the optimizer

    def step(self, pause: int = 0, **options: Any) -> None:
        """One usual step of the job, and the optimizer's, and `pause` ms of computing; DDP's layout is reported as
        trainers do."""
        pending = not self.job.has_rebuilt
        self.job.usual_step(**options)
        if pending and self.job.has_rebuilt:
            self.job.report_layout(100 * MS)
        for number, parameter in enumerate(self.parameters):
            parameter.grad = torch.from_numpy(np.frombuffer(self.job.reduced[number], np.float32).copy())
        self.optimizer.step()
        self.states[self.job.step] = self._state()
        self.job.wait(pause * MS)
        end = self.ends[self.job.step] = self.job.now - pause * MS - 9 * MS  # usual_step waits 10 ms behind it
        self.looks += [(end - MS // 2, self.job.step - 1), (end, self.job.step)]

    def _state(self) -> dict[str, np.ndarray]:
        state = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            state[f"model/{name}"] = parameter.numpy().copy().view(np.uint8)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizer/{name}/{key}"] = value.numpy().copy().reshape(-1).view(np.uint8)
        return state


class Memory:
    """A source of frames that were captured before."""

    def __init__(self, name: str, blocks: Sequence[Block]) -> None:
        self.name = name
        self.problems: list[str] = []
        self._blocks = list(reversed(blocks))

    @property
    def finished(self) -> bool:
        return not self._blocks

    def read(self, timeout: float) -> Block | None:
        return self._blocks.pop() if self._blocks else None

    def release(self, block: Block) -> None: ...

    def counters(self) -> SourceCounters:
        return SourceCounters()

    def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    frames, hit: of all mirrors, and those that met a fault; worst: elements unknown at once; asked: bytes that trainers
    sent; behind: when each step was applied, by how many steps the newest fully known one was older; lags: at a random
    moment of each step, by how many it was older than the trainers' newest; mending: steps from a loss to the whole
    state; holes: bytes of gradients; missing, wrong: elements unknown at the end, and known but wrong (`corrupt` only).
    """

    frames: int = 0
    hit: int = 0
    worst: int = 0
    asked: int = 0
    behind: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    mending: list[int] = field(default_factory=list)
    blank: int = 0
    holes: int = 0
    alarms: list[str] = field(default_factory=list)
    frozen: StepLost | None = None
    missing: int = 0
    wrong: int = 0
    ever_wrong: int = 0


class Soak:
    """One run.

    mirrors: of each, which frames of the job it shows; faults: of each; repair: whether agents answer, of which one in
    twenty asks is refused; scrub: whether they are asked for known parts, too; clean: the last steps, whose frames meet
    no fault; damaged: whether values may be damaged where nothing on the wire shows it.
    """

    def __init__(
        self, training: Training, mirrors: Sequence[Callable[[Any], bool]], faults: Sequence[Faults], *, seed: int,
        repair: bool = True, scrub: bool = False, clean: int = 0, step_bytes: int = 1 << 20, per_block: int = 32,
        damaged: bool = False,
    ) -> None:  # fmt: skip
        self.training, self.job = training, training.job
        self.outcome = Outcome()
        self._rng = np.random.default_rng(seed)
        self._repair, self._step_bytes, self._damaged = repair, step_bytes, damaged
        description = self.job.description
        self.shadow = Shadow(description)
        for key, data in training.states[description.step].items():
            self.shadow.load(key, 0, data)
        self.pipeline = Pipeline(Limits(256, 1 << 22, 1 << 26), Waits())
        self.tracker = self.pipeline.add_job("job", description, Predictor(description), self.job.attached)
        budget = Budget(step_bytes=step_bytes, scrub_percent=0.1 * scrub)
        names = {"run": "soak", "epoch": 1}
        self.resync = Resync(names, self.shadow, budget, self._tell, lambda line: None, self.outcome.alarms.append)
        if repair:
            for rank, peer in enumerate(PEERS[: self.job.world]):
                self.resync.agents.hello(peer, rank, description.step)
        self._served: dict[int, int] = {}  # look -> bytes copied by the trainers
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lost_at: int | None = None
        self.now = 0
        for at, word in self.job.words:
            self._at(at, lambda word=word: word(self.tracker))  # type: ignore[misc]
        if self.job.step not in self.job.dropped:
            self._at(self.job.now + 2 * MS, partial(self.tracker.ends, self.job.step))
        done = list(training.ends.items())
        for (step, end), (_, following) in itertools.pairwise(done):
            self._at(end + int(self._rng.integers(1, following - end)), partial(self._sample, step))
        last = self.job.step - clean
        self._clean_from = self.training.ends.get(last, 0)
        self._sources = [
            self._source(f"mirror{i}", shows, spec, per_block, i) for i, (shows, spec) in
            enumerate(zip(mirrors, faults, strict=True))
        ]  # fmt: skip

    def _source(self, name: str, shows: Callable[[Any], bool], faults: Faults, per_block: int, number: int) -> Any:
        frames = [frame for frame in self.job.wire.frames if shows(frame)]
        self.outcome.frames += len(frames)
        early = [frame for frame in frames if frame.ts < self._clean_from]
        setup = [frame for frame in early if frame.ts <= (self.job.attached or 0)]
        parts = (setup, early[len(setup) :], frames[len(early) :])
        before, hit, behind = ([self._block(some, number) for some in cut(part, per_block)] for part in parts)
        faulty = FaultSource(Memory(name, hit), {name: (0, faults)})
        return itertools.chain(before, drawn(faulty, self.outcome), behind)

    def _block(self, frames: list[Any], number: int) -> Block:
        block = self.job.wire.block(frames)
        block.ts += number * 200  # no two mirrors have the same clock
        return block

    def _sample(self, done: int) -> None:
        known = self.shadow.known_step
        self.outcome.lags.append(done - (known if known is not None else -1))

    def _at(self, time: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), call))

    # The trainers' agents

    def _tell(self, peer: bytes, kind: str, /, **fields: Any) -> None:
        if kind != "repair-ask":
            return
        for number, key, lo, hi in fields["parts"]:
            if self._rng.random() < 0.05:
                self._at(self.now + MS, partial(self._refuse, peer, number))
            else:
                self._serve(peer, number, key, lo, hi)

    def _refuse(self, peer: bytes, number: int) -> None:
        if self.resync.agents.answered(peer, number) is not None:
            self.resync.refused(peer, number, "not now", self.now)

    def _serve(self, peer: bytes, number: int, key: str, lo: int, hi: int) -> None:
        """An agent copies the part when the training thread next looks and has room for it, and sends it; behind the
        last step, while training ends, it waits for none."""
        reached = self.now + int(self._rng.integers(100_000, 3 * MS))
        for look, step in (*self.training.looks, (reached + 1, self.job.step)):
            if look <= reached:
                continue
            sections, counter = self._copied(step, key, lo, hi)
            size = sum(data.nbytes for data in sections.values())
            used = self._served.get(look, 0)
            if not used or used + size <= self._step_bytes:
                self._served[look] = used + size
                self.outcome.asked += size
                arrives = look + int(self._rng.integers(50_000, 5 * MS))
                self._at(arrives, partial(self._arrive, peer, (number, key, lo, hi), step, sections, counter))
                return

    def _copied(self, step: int, key: str, lo: int, hi: int) -> tuple[dict[str, np.ndarray], bytes | None]:
        state, name = self.training.states[step], key.partition("/")[2]
        held = {"model": state[key]}
        held |= {k.rpartition("/")[2]: v for k, v in state.items() if k.startswith(f"optimizer/{name}/")}
        counter = held.pop("step", None)
        sections = {section: data[4 * lo : 4 * hi].copy() for section, data in held.items()}
        return sections, None if counter is None else counter.tobytes()

    def _arrive(
        self, peer: bytes, part: tuple[int, str, int, int], step: int, sections: dict[str, np.ndarray],
        counter: bytes | None,
    ) -> None:  # fmt: skip
        if self.resync.takes(peer, *part, sum(data.nbytes for data in sections.values())):
            self.resync.arrived(part[0], step, sections, counter, self.now)
            self.check()

    # The run

    def run(self) -> Outcome:
        blocks = [(block, source) for source in self._sources if (block := next(source, None)) is not None]
        heads = [(int(block.ts[-1]), next(self._order), block, source) for block, source in blocks]
        heapq.heapify(heads)
        while heads:
            at, _, block, source = heapq.heappop(heads)
            self._until(at)
            self.now = max(self.now, at)
            self.pipeline.feed(block, self.now)
            self._take()
            if (following := next(source, None)) is not None:
                heapq.heappush(heads, (int(following.ts[-1]), next(self._order), following, source))
        self._until(self.now + 30_000 * MS)
        self.pipeline.flush(self.now)
        self._take(final=True)
        while self._events:
            self._until(self._events[0][0])
        self.outcome.frozen = self.tracker.lost
        self.outcome.missing = self.shadow.unknown.elements
        self.outcome.wrong = self.check()
        return self.outcome

    def _until(self, time: int) -> None:
        """Let time go on: what trainers say and send, and silence."""
        while self.now < time:
            event = self._events[0][0] if self._events else time
            pause = self.now + 20 * MS if self.now else time
            self.now = max(self.now, min(event, time, pause))
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
                self._take()
            if self.now < time:
                self.pipeline.expire(self.now)
                self._take()
                self.resync.tick(self.now, 10 * MS, self.tracker.needs_groups)

    def _take(self, final: bool = False) -> None:
        for _, event in self.pipeline.poll(self.now, final):
            if isinstance(event, StepReady):
                self._apply(event)
        tracker = self.tracker  # every hole has one cause
        assert self.outcome.holes == tracker.hole_bytes == sum(tracker.shortfall.bytes.values())

    def _apply(self, ready: StepReady) -> None:
        groups = [dict(group) for group in ready.groups]
        if ready.blank:
            self.outcome.blank += 1
            self.shadow.skip(ready.step, groups)
        else:
            self.shadow.apply(ready.step, ready.gradients, groups, ready.lost)
        self.outcome.holes += sum(length for _, _, length in ready.holes)
        assert bool(ready.holes) == bool(ready.lost) and not (ready.blank and ready.lost), ready.step
        self.resync.applied(ready, self.now)
        ready.gradients.clear()
        self.tracker.applied(ready.step)
        self.check()
        known = self.shadow.known_step
        self.outcome.behind.append(ready.step - (known if known is not None else -1))

    def check(self) -> int:
        """Every element that the shadow calls known is the trainer's, bit for bit. Where frames were damaged: how many
        are not."""
        found = 0
        with self.shadow.pin(whole=False) as pin:
            truth, unknown = self.training.states[pin.step], pin.unknown
            missing = unknown.elements
            for key, (_, data) in pin.tensors.items():
                kind, name = key.split("/")[:2]
                if key.endswith("/step"):
                    continue
                ranges = unknown.of(f"model/{name}")
                wrong = (data.view(np.uint32) != truth[key].view(np.uint32)) & ~ranges.mask(0, data.nbytes // 4)
                found += int(wrong.sum())
                assert self._damaged or not found, (
                    f"step {pin.step}: {int(wrong.sum())} elements of {key} are called known and are wrong, "
                    f"the first is {int(np.flatnonzero(wrong)[0])} ({kind})"
                )
        self.outcome.ever_wrong = max(self.outcome.ever_wrong, found)
        if (step := self.shadow.known_step) is not None and not self._damaged:
            with self.shadow.pin() as whole:
                assert whole.step == step and not whole.unknown
                for key, (_, data) in whole.tensors.items():
                    assert data.tobytes() == self.training.states[step][key].tobytes(), (step, key)
        self.outcome.worst = max(self.outcome.worst, missing)
        if missing and self._lost_at is None:
            self._lost_at = self.shadow.step
        elif not missing and self._lost_at is not None:
            self.outcome.mending.append(self.shadow.step - self._lost_at)
            self._lost_at = None
        return found


def cut(frames: list[Any], most: int) -> Iterator[list[Any]]:
    """Frames as a ring hands them over: at most `most`, and never across a pause."""
    some: list[Any] = []
    for frame in frames:
        if some and (len(some) == most or frame.ts - some[-1].ts > 4 * MS):
            yield some
            some = []
        some.append(frame)
    if some:
        yield some


def drawn(source: FaultSource, outcome: Outcome) -> Iterator[Block]:
    """The blocks that come out of a source with faults."""
    while not source.finished:
        block = source.read(0.0)
        if block is not None:
            yield block
    hit: Any = source.faults().get("hit", {})
    outcome.hit += sum(frames for frames, _ in hit.values())


def ports(job: SyntheticJob, *places: tuple[int, str]) -> Callable[[Any], bool]:
    """What mirrors of (rank, "in" | "out" | "both") show of a job's frames."""
    if isinstance(job, NcclJob):
        every = {(job.nccl.ports[rank], way) for rank, how in places for way in ways(how)}
        return lambda frame: any(end in every for end in frame.ends)

    def shown(frame: Any) -> bool:
        source, target = frame.link
        return any((rank == source and "in" in ways(how)) or (rank == target and "out" in ways(how))
                   for rank, how in places)  # fmt: skip

    return shown


def ways(how: str) -> tuple[str, ...]:
    return ("in", "out") if how == "both" else (how,)
