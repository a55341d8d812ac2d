"""A training script that runs several small jobs in turn, each under its own run name, and notes a digest per step.

Usage: cases.py OUT CASE [CASE ...]. Rank r appends {"run", "step", "digest"} lines to OUT/rank<r>.jsonl: the digest of
its own parameters and optimizer state after each optimizer step, the truth that the daemon's journal is compared with.
A job that the daemon does not follow bit for bit is not trained: {"run", "refused"} says why.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import flowcheck

STEPS = int(os.environ.get("STEPS", "6"))


class TinyGPT(nn.Module):
    """Tied embeddings and parameters of very different sizes."""

    def __init__(self, width: int = 48, vocabulary: int = 301, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mixed(nn.Module):
    """A float64 and a bfloat16 part around a float32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 40)
        self.wide = nn.Linear(40, 40).double()
        self.narrow = nn.Linear(40, 24).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.wide(x.double()))
        return self.narrow(x.bfloat16()).float()


class Job:
    """One case: model, optimizer and what happens around its steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.options: dict[str, object] = {"bucket_cap_mb": 0.05}
        self.net: nn.Module = nn.Sequential(
            nn.Linear(16, 130), nn.Tanh(), nn.Linear(130, 50), nn.Tanh(), nn.Linear(50, 24)
        )
        self.make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
        self.schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
        self.micro = 1
        self.synchronised = True

    def inputs(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        if self.name.startswith("gpt"):
            return torch.randint(301, (12, 4), generator=generator)
        if self.name.startswith("conv"):
            return torch.randn(4, 3, 12, 12, generator=generator)
        return torch.randn(8, 16, generator=generator)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        out = model(self.inputs(step))
        if self.name.startswith("gpt"):
            return functional.cross_entropy(out.flatten(0, 1), self.inputs(step + 1).flatten())
        return (out.float() ** 2).mean() + out.float().mean()


def prepare(name: str) -> Job:
    job = Job(name)
    if name == "sgd":
        job.make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    elif name == "adam":
        job.make = lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.01)
        job.options = {"gradient_as_bucket_view": True}
    elif name.startswith("gpt"):
        job.net = TinyGPT(vocabulary=1501 if name == "gpt_tall" else 301, blocks=1 if name == "gpt_short" else 2)
        if name == "gpt_short":
            job.options = {"bucket_cap_mb": 0.1}
        job.make = lambda p: torch.optim.AdamW(
            [
                {"params": [x for x in p if x.ndim > 1], "weight_decay": 0.1},
                {"params": [x for x in p if x.ndim < 2], "lr": 3e-3},
            ],
            lr=1e-2, weight_decay=0.0,
        )  # fmt: skip
        job.schedule = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS)
    elif name == "conv":
        job.net = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 8, 3), nn.Flatten(), nn.Linear(512, 10))
        job.net = job.net.to(memory_format=torch.channels_last)
    elif name == "wide":
        job.net = nn.Sequential(nn.Linear(16, 20_000), nn.Tanh(), nn.Linear(20_000, 60))
        job.options = {"bucket_cap_mb": 2}
    elif name == "mixed":
        job.net = Mixed()
        job.make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    elif name == "static":
        job.options = {"static_graph": True, "bucket_cap_mb": 0.02}
    elif name in ("accumulate", "accumulate_nosync"):
        job.micro = 4
        job.synchronised = name == "accumulate"
    return job


def run(case: str, shout: Callable[[str], None], name: str | None = None) -> bool:
    """Train a case under `name`, default its own; False if the daemon does not follow it."""
    job = prepare(case)
    model = DistributedDataParallel(job.net, **job.options)
    optimizer = job.make(list(model.parameters()))
    scheduler = job.schedule(optimizer) if job.schedule is not None else None
    handle = flowcheck.attach(model, optimizer, scheduler=scheduler, run=name or case)
    if not handle.covered or not handle.exact:
        shout(json.dumps({"run": name or case, "refused": handle.reason or handle.reasons}))
        handle.close()
        return False
    if case == os.environ.get("HELD"):  # until somebody makes GO_ON
        if job.rank == 0:
            Path(os.environ["AFTER_ATTACH"]).touch()
        while not Path(os.environ["GO_ON"]).exists():
            time.sleep(0.01)
    bucket = sum(p.numel() for p in model.parameters())
    second = dist.new_group(list(range(job.world))) if case == "groups" else None
    pause = float(os.environ.get("STEP_PAUSE", "0"))

    def backward(step: int) -> None:
        for micro in range(job.micro):
            if not job.synchronised and micro < job.micro - 1:
                with model.no_sync():
                    job.loss(model, step * 10 + micro).backward()
            else:
                job.loss(model, step * 10 + micro).backward()

    done = 0
    attempt = 0
    while done < STEPS:
        attempt += 1
        optimizer.zero_grad()
        if case == "same_size":
            dist.all_reduce(torch.full((bucket,), float(attempt)))
        if case == "coalesced":
            with _coalescing_manager():
                for count in (9000, 500, bucket):
                    dist.all_reduce(torch.full((count,), float(attempt)))
        backward(attempt)
        if case == "same_size":
            dist.all_reduce(torch.full((bucket,), 0.5 * attempt))
        if case == "skipped" and attempt in (2, 5):
            continue
        if case == "groups":
            for _ in range(2):
                dist.all_reduce(torch.ones(bucket), group=second)
            dist.barrier()
        if case == "manual_lr" and attempt % 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        done += 1
        shout(json.dumps({"run": name or case, "step": done, "digest": flowcheck.digest(model, optimizer)}))
        if pause:
            time.sleep(pause)
    dist.barrier()
    handle.close()
    return True


@contextmanager
def noting(out: Path) -> Iterator[Callable[[str], None]]:
    """What appends a line to this rank's file."""
    with (out / f"rank{os.environ['RANK']}.jsonl").open("a") as notes:

        def shout(line: str) -> None:
            notes.write(line + "\n")
            notes.flush()

        yield shout


def leave() -> None:
    """End the group with everything in it."""
    dist.barrier()
    gc.collect()  # a model that outlives the group keeps torch's threads, which sometimes abort the interpreter's end
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("gloo")
    with noting(Path(sys.argv[1])) as shout:
        for name in sys.argv[2:]:
            if not run(name, shout):
                raise SystemExit(f"{name}: not followed bit for bit")
    leave()


if __name__ == "__main__":
    main()
