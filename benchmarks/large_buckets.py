"""The training script whose traffic is recorded: a stack of linear layers, so that a step is nearly all reduction.

Usage: large_buckets.py OUT STEPS WIDTH LAYERS. Rank 0 writes OUT: a JSON list of its state's digest after each step.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowcheck


def main() -> None:
    out = Path(sys.argv[1])
    steps, width, layers = (int(text) for text in sys.argv[2:])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flowcheck.attach(model, optimizer, strict=True)
    digests = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, width, generator=generator)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            digests.append(flowcheck.digest(model, optimizer))
    dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(digests))
    # A model that outlives the group keeps torch's threads, which sometimes abort the interpreter's end.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
