"""The training script of overhead.py: trains in blocks, each in the mode that the benchmark asks for.

Usage: switching_job.py FOLDER WIDTH LAYERS BATCH. Block k is asked for by FOLDER/ask-<k>.json, {"mode", "warm",
"steps"}; mode "stop" ends the script. Rank 0 answers with FOLDER/answer-<k>.json: seconds per timed iteration; CPU
seconds of all ranks per timed iteration; seconds of flowcheck's hook in each, as (wall clock, CPU of the thread);
optimizer steps done; the state's digest at the end. In mode "hook" nothing is trained: `steps` calls of the hook, each
on an otherwise idle core.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from asker import ASKS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.connection import Connection
from flowcheck.describe import describe
from flowcheck.desk import Desk
from flowcheck.livestate import LiveState
from flowcheck.markerlink import MarkerLink
from flowcheck.stephook import StepMarker
from flowcheck.trainer import Handle

POLL = 0.02


class Job:
    """Model, optimizer and one iteration of training, which is the same in every mode."""

    def __init__(self, folder: Path, width: int, layers: int, batch: int) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        # async_save talks about its plans in the background: on DDP's own group that would tangle with training.
        self.checkpoints = dist.new_group(backend="gloo")
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(self.rank))
        self.done = 0
        self.pending: Any = None
        self.sink = f"ipc://{folder.parent / 'sink'}"

    def iteration(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.done += 1

    def save(self) -> None:
        """What rank 0 of a plain DDP script does; the others go on to the next iteration's first reduction."""
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "step": self.done}, self.folder / f"checkpoint-{self.done % 2}.pt")

    def async_save(self) -> None:
        """The documented form: one save at a time, the state staged to memory, written by a thread."""
        self.wait()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self.pending = dcp.async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=self.folder / f"dcp-{self.done % 2}",
            process_group=self.checkpoints,
        )

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def timed(hook: Callable[..., None], into: list[tuple[float, float]]) -> Callable[..., None]:
    """The hook, with its seconds noted at every call: wall clock and CPU of the thread."""

    def call(*args: Any) -> None:
        cpu, start = time.thread_time(), time.perf_counter()
        hook(*args)
        wall = time.perf_counter() - start
        into.append((wall, time.thread_time() - cpu))

    return call


def marker_of(job: Job, connection: Connection) -> StepMarker:
    """The hook that attach would register, sending to the benchmark's own socket."""
    link = MarkerLink(connection.endpoint)
    link.follow(connection, "hook", 1)
    live = describe(job.model, job.optimizer)
    return StepMarker([link], job.done, 0, live, job.optimizer, Desk(LiveState(live, job.rank)))


def hook_alone(job: Job, calls: int, into: list[tuple[float, float]]) -> None:
    """Rank 0: call the hook every 2 ms with nothing else to do."""
    if job.rank == 0:
        with Connection(job.sink) as connection:
            call = timed(marker_of(job, connection), into)
            for _ in range(calls):
                call(job.optimizer, (), {})
                time.sleep(0.002)


def block(job: Job, mode: str, warm: int, steps: int) -> dict[str, Any]:
    """Train warm + steps iterations in one mode and time the last `steps`."""
    hook: list[tuple[float, float]] = []
    with ExitStack() as stack:
        if mode == "flowcheck":
            handle = flowcheck.attach(job.model, job.optimizer, step=job.done, run="overhead", strict=True)
            stack.callback(handle.close)
            # Where it is, in the training itself. The newest hook is the one just attached.
            hooks = job.optimizer._optimizer_step_post_hooks
            key = list(hooks)[-1]
            hooks[key] = timed(hooks[key], hook)
        elif mode in ASKS:
            asker = f"ipc://{job.folder.parent / 'asker'}"
            handle = flowcheck.attach(job.model, job.optimizer, step=job.done, run=mode, endpoint=asker, strict=True)
            stack.callback(handle.close)
            until_it_gives(job, handle, ASKS[mode])
        elif mode == "hook only" and job.rank == 0:
            connection = stack.enter_context(Connection(job.sink))
            stack.callback(job.optimizer.register_step_post_hook(marker_of(job, connection)).remove)
        return train(job, mode, warm, steps, hook)


def until_it_gives(job: Job, handle: Handle, percent: float) -> None:
    """Train until every rank's agent knows the time of a step and has given something, if it is asked to."""
    giving = torch.zeros(1)
    while percent and not giving:
        job.iteration()
        giving = torch.tensor([float(all(counters["sent"] for counters in handle.repair.values()))])
        dist.all_reduce(giving, dist.ReduceOp.MIN)


def train(job: Job, mode: str, warm: int, steps: int, hook: list[tuple[float, float]]) -> dict[str, Any]:
    extra: Callable[[], None] | None = {"torch.save": job.save, "async_save": job.async_save}.get(mode)
    times = []
    dist.barrier()
    if mode == "hook":
        hook_alone(job, steps, hook)
        warm = steps = 0
    cpu = 0.0
    for number in range(warm + steps):
        if number == warm:
            cpu = time.process_time()
        start = time.perf_counter()
        job.iteration()
        if extra is not None:
            extra()
        times.append(time.perf_counter() - start)
    job.wait()
    used = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(used)
    return {
        "times": times[warm:], "cpu": used.item() / max(1, steps), "hook": hook[warm:], "step": job.done,
        "digest": flowcheck.digest(job.model, job.optimizer),
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    job = Job(folder, *(int(text) for text in sys.argv[2:5]))
    for number in range(1 << 30):
        ask = folder / f"ask-{number}.json"
        while not ask.exists():
            time.sleep(POLL)
        asked = json.loads(ask.read_text())
        if asked["mode"] == "stop":
            break
        answer = block(job, asked["mode"], asked["warm"], asked["steps"])
        if job.rank == 0:
            (folder / "answer").write_text(json.dumps(answer))
            os.replace(folder / "answer", folder / f"answer-{number}.json")
    dist.barrier()
    del job
    gc.collect()  # a model that outlives the group keeps torch's threads, which sometimes abort the interpreter's end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
