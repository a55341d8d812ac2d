"""A script whose processes stay and fork a trainer for every life of a job: new processes, ports and connections in a
fraction of a second, on any of the lab's nodes, killed at a given moment.

Usage: lives.py FOLDER. What is to be done comes as files in FOLDER, each of which appears whole:

    life-N.json   [{"run", "nodes", "port", "resume", "steps", "pause", "hold", "gate"}, ..]: jobs whose rank k runs on
                  node nodes[k]; run: null for one that attaches to no daemon; port: of their c10d store; resume: a
                  file of `flowcheck.load`'s dictionary, or null; hold: a file without which it does not attach, or
                  null; gate: [step, whether in the middle of it, a file without which it goes no further], or null
    kill-N.json   {node: time of CLOCK_MONOTONIC}: SIGKILL for the trainers on these nodes then
    end           leave

A trainer appends to FOLDER/N-<node>.jsonl: {"attach": outcome}, then {"step", "digest", "loss", "at", "took",
"copying"} after each step; FOLDER/N-<node>.phase holds what it was about when it ended, as in lives_lab.PHASES;
FOLDER/N-<node>.ended its exit status. A node belongs to one job of a life at most.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.desk import Desk
from flowcheck.lab.addresses import Port, training_address

POLL = 0.002


class Noted:
    """What a life leaves behind."""

    def __init__(self, folder: Path, life: int, node: int) -> None:
        stem = f"{life}-{node}"
        self._notes = (folder / f"{stem}.jsonl").open("a")
        phase = folder / f"{stem}.phase"
        phase.write_bytes(b"i")
        with phase.open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)

    def phase(self, which: bytes) -> None:
        self._phase[:] = which

    def line(self, **fields: Any) -> None:
        self._notes.write(json.dumps(fields) + "\n")
        self._notes.flush()


@dataclass(frozen=True, slots=True)
class _Gate:
    step: int
    within: bool
    file: str

    def reached(self, step: int, within: bool) -> None:
        while (step, within) == (self.step, self.within) and self.step and not Path(self.file).exists():
            time.sleep(POLL)


def attach(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, done: int, run: str, noted: Noted) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = flowcheck.attach(model, optimizer, step=done, run=run)
    noted.line(
        attach={"covered": handle.covered, "reason": handle.reason, "epoch": handle.epoch, "step": done},
        said=[str(warning.message) for warning in said],
    )
    return handle


def train(job: dict[str, Any], rank: int, noted: Noted) -> None:
    world = len(job["nodes"])
    master = training_address(Port(job["nodes"][0], 0), False)
    dist.init_process_group("gloo", init_method=f"tcp://{master}:{job['port']}",
                            rank=rank, world_size=world, timeout=timedelta(seconds=30))  # fmt: skip
    torch.manual_seed(1)
    width = int(os.environ.get("WIDTH", "2000"))
    net = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 24))
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if job["resume"] is not None:
        state = torch.load(job["resume"])
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    copying = [0.0, 0.0]
    serve = Desk.serve

    def timed(self: Desk, *arguments: Any) -> None:
        start = time.perf_counter()
        serve(self, *arguments)
        copying[0] += time.perf_counter() - start

    Desk.serve = timed  # type: ignore[method-assign]
    noted.phase(b"a")
    while job["hold"] is not None and not Path(job["hold"]).exists():
        time.sleep(POLL)
    handle = None if job["run"] is None else attach(model, optimizer, done, job["run"], noted)

    def loss_of(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        out = model(torch.randn(8, 16, generator=generator))
        return (out**2).mean() + out.mean()

    gate = _Gate(*job["gate"]) if job["gate"] is not None else _Gate(0, False, "")
    # The gradient that comes last: buckets before it are reduced by then.
    net[0].weight.register_hook(lambda _: gate.reached(step, True))
    step = 0
    loss_of(0).backward()  # DDP regroups its buckets behind it: a resumed job then sums in the same order
    for step in range(done + 1, done + job["steps"] + 1):
        gate.reached(step, False)
        start = time.monotonic()
        noted.phase(b"f")
        optimizer.zero_grad()
        loss = loss_of(step)
        noted.phase(b"r")
        loss.backward()
        noted.phase(b"s")
        optimizer.step()
        took = time.monotonic() - start
        noted.phase(b"n")
        noted.line(
            step=step, digest=flowcheck.digest(model, optimizer), loss=loss.item(), at=time.monotonic(), took=took,
            copying=copying[0] - copying[1],
        )  # fmt: skip
        copying[1] = copying[0]
        if job["pause"]:
            time.sleep(job["pause"])
    noted.phase(b"e")
    if handle is not None:
        handle.close()
    dist.barrier()
    dist.destroy_process_group()


def fork(job: dict[str, Any], rank: int, folder: Path, life: int, node: int) -> int:
    """The process of a trainer that was started."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        train(job, rank, Noted(folder, life, node))
        status = 0
    except Exception as error:
        print(f"life {life}, node {node}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def put(path: Path, text: str) -> None:
    """A file that appears whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    os.replace(part, path)


def load() -> None:
    """What torch and flowcheck load when they are first used, once for all lives."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
    for name in ("flowcheck.trainer", "reconstruct.digest", "reconstruct.lr"):
        importlib.import_module(name)


def main() -> None:
    load()
    folder, node = Path(sys.argv[1]), int(os.environ["RANK"])
    ports = os.environ.get("PORT_RANGE")
    if ports is not None:  # of this node's own network: so few that every life has ports of the one before
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(ports)
        Path("/proc/sys/net/ipv4/tcp_tw_reuse").write_text("1")  # or those of the dead are taken for a minute
    life = 0
    while not (folder / "end").exists():
        plan = folder / f"life-{life}.json"
        if not plan.exists():
            time.sleep(POLL)
            continue
        children: set[int] = set()
        for job in json.loads(plan.read_text()):
            if node in job["nodes"]:
                children.add(fork(job, job["nodes"].index(node), folder, life, node))
        kill = folder / f"kill-{life}.json"
        told = False
        while children:
            if not told and kill.exists():
                told = True
                order = json.loads(kill.read_text())
                time.sleep(max(0.0, order[str(node)] - time.monotonic()))
                for child in children:
                    os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended:
                children.discard(ended)
                put(folder / f"{life}-{node}.ended", str(os.waitstatus_to_exitcode(status)))
            else:
                time.sleep(POLL)
        life += 1


if __name__ == "__main__":
    main()
