"""Scenarios of the trainers' agents in a real two-rank gloo job; run by tests/test_agent.py, as attach_job.py is.

Every scenario trains until the test leaves a file of its name, and keeps what the state was after each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import attach_job
import torch
import torch.distributed as dist
from attach_job import FOLDER, RANK, Tied, group, small, state_of
from torch.nn.parallel import DistributedDataParallel

import flowcheck

ENDPOINTS = sys.argv[4].split("+")  # the daemon's, a second one's, one where nobody listens yet


def train(
    name: str,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], None],
    after: Callable[[int], None] = lambda number: None,
) -> list[float]:
    """Steps until there is a file `name`; the state after each in `name-rank.pt`. Seconds that each step() took."""
    states: dict[int, dict[str, torch.Tensor]] = {}
    times = []
    number = 0
    ended = torch.zeros(1)
    while not ended:
        number += 1
        optimizer.zero_grad()
        backward()
        started = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - started)
        states[number] = state_of(model, optimizer)
        after(number)
        time.sleep(0.005)
        ended = torch.tensor([float(RANK == 0 and (FOLDER / name).exists())])
        dist.broadcast(ended, 0)
    torch.save(states, FOLDER / f"{name}-{RANK}.pt")
    return times


def repair() -> dict[str, Any]:
    """All kinds of strides, buffers and state; the optimizer's tensors are replaced, later one gets other strides."""
    model = DistributedDataParallel(Tied(), broadcast_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    handle = flowcheck.attach(model, optimizer, run="repair", endpoint=ENDPOINTS[0], strict=True)
    torch.manual_seed(RANK)

    def backward() -> None:
        model(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()

    def after(number: int) -> None:
        if number % 7 == 0:
            for parameter, entry in optimizer.state.items():
                optimizer.state[parameter] = {key: value.clone() for key, value in entry.items()}
        if (FOLDER / "other-strides").exists():
            entry = optimizer.state[model.module.conv.weight]
            entry["exp_avg"] = entry["exp_avg"].contiguous()

    train("repair", model, optimizer, backward, after)
    seen = handle.repair
    handle.close()
    return {"counters": seen}


def plain() -> dict[str, Any]:
    """No optimizer state at all."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = flowcheck.attach(model, optimizer, run="plain", endpoint=ENDPOINTS[0], strict=True)
    train("plain", model, optimizer, lambda: model(torch.ones(4, 6)).sum().backward())
    handle.close()
    return {}


def joined() -> dict[str, Any]:
    """A second endpoint joins, and the first one's daemon is started again; the rate changes at every step."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    both = ",".join(ENDPOINTS[:2])
    handle = flowcheck.attach(model, optimizer, run="joined", endpoint=both, scheduler=scheduler, strict=True)
    facts: dict[int, Any] = {}

    def after(number: int) -> None:
        rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        sequence = model.process_group._get_sequence_number_for_group()
        facts[number] = {"sequence": sequence, "rate": rate, "epoch": scheduler.last_epoch}

    times = train("joined", model, optimizer, lambda: model(torch.ones(4, 6)).sum().backward(), after)
    handle.close()
    logged = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return {"facts": facts, "slowest": max(times[5:]), "dropped": handle.dropped, "rebuilt": logged}


def unreachable() -> dict[str, Any]:
    """Nobody listens at attach: a warning; the daemon comes up later."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    os.environ["FLOWCHECK_ATTACH_TIMEOUT"] = "0.3"
    handle = attach_job.outcome_of(lambda: flowcheck.attach(model, optimizer, run="unreachable", endpoint=ENDPOINTS[2]))
    (FOLDER / "warned").touch()
    train("unreachable", model, optimizer, lambda: model(torch.ones(4, 6)).sum().backward())
    handle["handle"].close()
    del handle["handle"]
    hooks = len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)
    return {**handle, "hooks": hooks}


def main() -> None:
    torch.set_num_threads(1)
    with group(sys.argv[3]):
        results = {}
        for name in sys.argv[6:]:
            torch.manual_seed(7)
            results[name] = globals()[name]()
            dist.barrier()
        (FOLDER / f"rank{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
