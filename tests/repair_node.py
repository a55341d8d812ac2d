"""A daemon's jobs and apply thread with real shadows, and trainers whose agents answer as told; nothing is captured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from shadow_cases import Job as Training
from shadow_cases import describe, uploads
from xxhash import xxh3_128_hexdigest

from flowcheck.applying import ApplyThread
from flowcheck.checkpoints import Roots
from flowcheck.job import Job
from flowcheck.jobs import Jobs
from flowcheck.persist import Persister
from flowcheck.resync import Budget
from flowcheck.store import Store
from reconstruct.ranges import Ranges
from reconstruct.step_events import StepReady

PATIENCE = 30.0


def wait_for(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.002)
    return value


class Wire:
    """Stands for the capture thread and its pipeline."""

    ident = 1
    over = False
    failure = None
    loss = SimpleNamespace(status={})  # as before the first look

    def __init__(self) -> None:
        self.pipeline = SimpleNamespace(
            check=lambda description: None,
            completed=lambda description: description,
            add_job=lambda *a, **options: self.tracker,
            counters=lambda: {"memory_bytes": 0},
            tunnels=lambda: [],
            sight=lambda description: None,
        )
        self.tracker = SimpleNamespace(
            applied=lambda step: None, coverage=1.0, hole_bytes=0, needs_groups=False, marker=lambda *a: None,
            linked=lambda alive: None, ends=lambda step: None,
            shortfall=SimpleNamespace(status=lambda: {"bytes": {}, "newest": []}),
        )

    def call(self, command: Callable[[], None], at: int | None = None) -> bool:
        command()
        return True

    def remove_job(self, key: str) -> None: ...


@dataclass
class Rank:
    """One trainer's agent: what it was told, and whether it answers."""

    node: Node
    number: int
    parts: list[tuple[int, str, int, int]] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    silent: bool = False

    @property
    def peer(self) -> bytes:
        return b"rank %d" % self.number

    def hears(self, kind: str, fields: dict[str, Any]) -> None:
        self.told.append((kind, fields))
        if kind == "repair-ask":
            self.parts += [tuple(part) for part in fields["parts"]]
        elif kind == "repair-cancel":
            self.parts = [part for part in self.parts if part[0] not in fields["numbers"]]
        elif kind == "compare-ask":
            self.sums.append(fields["ask"])

    def answer(self, most: int | None = None) -> None:
        """As of the end of the trainer's newest step, what was asked for."""
        if self.silent:
            return
        training, held = self.node.training, self.node.job
        state = uploads(training.model, training.optimizer)
        parts, self.parts = self.parts[:most], self.parts[most:] if most is not None else []
        for number, key, lo, hi in parts:
            sections, counter = pieces(state, key, lo, hi)
            self.node.jobs.repair_data(
                self.peer, held.run, held.epoch, number, key, lo, hi, training.done,
                {name: memoryview(data.tobytes()) for name, data in sections.items()}, counter,
            )  # fmt: skip
        asked, self.sums = self.sums, []
        for number in asked:
            self.node.jobs.compare_data(self.peer, held.run, held.epoch, number, training.done, checksums(state))


def checksums(state: dict[str, np.ndarray]) -> dict[str, str]:
    """As an agent makes them of the whole state."""
    return {key: xxh3_128_hexdigest(data.tobytes()) for key, data in state.items() if not key.startswith("buffer/")}


def pieces(state: dict[str, np.ndarray], key: str, lo: int, hi: int) -> tuple[dict[str, np.ndarray], bytes | None]:
    """The sections and the counter of a part."""
    kind, _, name = key.partition("/")
    found = {"buffer" if kind == "buffer" else "model": state[key]}
    found |= {
        each.rpartition("/")[2]: data
        for each, data in state.items()
        if kind == "model" and each.startswith("optimizer/") and each[len("optimizer/") :].rpartition("/")[0] == name
    }
    counter = found.pop("step", None)
    size = NUMEL[key]
    cut = {each: data.reshape(size, -1)[lo:hi].reshape(-1) for each, data in found.items()}
    return cut, None if counter is None else counter.tobytes()


NUMEL: dict[str, int] = {}
"""Elements of every tensor of the newest node's model."""


class Node:
    """Trains by `step`; `job` is what the daemon holds of it."""

    def __init__(
        self, folder: Path | None = None, *, ranks: int = 2, late: bool = False, before: int = 0,
        budget: Budget | None = None, every_steps: int | None = None, roots: Roots | None = None, **training: Any,
    ) -> None:  # fmt: skip
        self.lines: list[str] = []
        self.wire = Wire()
        self.store = None if folder is None else Store(folder)
        self.persister = None
        if self.store is not None:
            self.persister = Persister(
                self.store, keep=100, every_steps=every_steps, every_seconds=None, report=self.lines.append
            )
            self.persister.start()
        self.apply = ApplyThread(
            self.wire, lambda: list(self.jobs.jobs.values()), self.persister, None, live=False,
            report=self.lines.append,
        )  # type: ignore[arg-type]  # fmt: skip
        self.jobs = Jobs(
            self.wire, [], self.store, self.persister, self.lines.append, self.apply, budget or Budget(),
            memory_limit=1 << 34, gradient_limit=1 << 34, roots=roots,
        )  # type: ignore[arg-type]  # fmt: skip
        self.ranks = [Rank(self, number) for number in range(ranks)]
        self.jobs.tell = self.tell
        self.training = Training(**training)
        for _ in range(before):
            self.training.train()
        NUMEL.clear()
        NUMEL.update({f"model/{name}": p.numel() for name, p in self.training.model.named_parameters()})
        NUMEL.update({f"buffer/{name}": b.numel() for name, b in self.training.model.named_buffers()})
        self.digests = {self.training.done: self.training.digest()}
        self.apply.start()
        self.job = self.attach(late)
        self.hello()

    def attach(self, late: bool) -> Job:
        description = describe(self.training.model, self.training.optimizer, self.training.done)
        session = self.jobs.begin_attach(description, late)
        if not late:
            for key, data in uploads(self.training.model, self.training.optimizer).items():
                session.chunk(key, 0, data.data)
        ack = session.commit()
        return self.jobs.jobs[f"{ack['run']}/e{ack['epoch']}"]

    def hello(self) -> None:
        for rank in self.ranks:
            self.jobs.agent(rank.peer, self.job.run, self.job.epoch, rank.number, self.training.done)

    def tell(self, peer: bytes, kind: str, /, **fields: Any) -> None:
        self.ranks[int(peer.split()[1])].hears(kind, fields)

    def train(self, lost: dict[int, Sequence[tuple[int, int]]] | None = None, blank: str = "") -> StepReady:
        """The trainers make a step; what is captured of it."""
        step, gradients, fields = self.training.train()
        self.digests[step] = self.training.digest()
        ranges = {index: Ranges.of(pairs) for index, pairs in (lost or {}).items()}
        for index, held in ranges.items():
            data = gradients[index]
            assert data is not None
            size = self.training_parameters[index].element_size()
            data.reshape(-1, size)[held.mask(0, data.size // size)] = 0
        kept = {} if blank else {index: data for index, data in gradients.items() if data is not None}
        return StepReady(step, True, kept, tuple(fields), (), time.time_ns(), 0, {} if blank else ranges, (), blank)

    @property
    def training_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.training.model.parameters() if p.requires_grad]

    def step(self, *, answers: bool = True, **captured: Any) -> None:
        """A step that is applied, before which the agents answer if they are to."""
        ready = self.train(**captured)
        if answers:
            for rank in self.ranks:
                rank.answer()
        self.apply.step(self.job, ready)
        self.settle()

    def settle(self) -> None:
        """Until the apply thread has done all that it was given."""
        done = threading.Event()
        self.apply._work.put(done.set)
        assert done.wait(PATIENCE)

    def tick(self, seconds: float = 0.0) -> None:
        """As if so much time had passed."""
        now = time.monotonic_ns() + int(seconds * 1e9)
        self.apply.call(self.job, lambda: self.job.resync.tick(now, 0, self.wire.tracker.needs_groups))
        self.settle()

    def digest(self) -> str | None:
        return self.job.shadow.digest()

    def finish(self) -> None:
        self.apply.finish()
        if self.persister is not None:
            self.persister.finish()
        self.jobs.close()


__all__ = ["NUMEL", "Node", "Rank", "checksums", "pieces", "wait_for"]
