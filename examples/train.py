"""A job that flowcheck follows. `torchrun --nproc-per-node 2 train.py` as ever, or `flowcheck lab -- train.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowcheck

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

done = 0
if os.path.exists("resume.pt"):  # written by `flowcheck restore`
    state = torch.load("resume.pt")
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]

job = flowcheck.attach(model, optimizer, step=done)  # the one line; the daemon is where FLOWCHECK_ENDPOINT says

for step in range(done + 1, done + 21):
    numbers = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
    inputs = torch.randn(64, 32, generator=numbers)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
job.close()
dist.destroy_process_group()
