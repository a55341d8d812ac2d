"""A small GPT trained with DistributedDataParallel on the bundled text: the training script of the demo.

It is an ordinary script: nothing in it knows about the lab, and `flowcheck.attach` is the one line added to it.
Batches depend on (step, rank) alone, so a resumed job reads what the uninterrupted one would have read.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import flowcheck

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
TEXT = Path(__file__).with_name("sonnets.txt")


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters in, logits of the next character out; the output layer shares the embedding's weight."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--resume", type=Path, help="a file that `flowcheck restore` wrote")
    options.add_argument("--final", type=Path, help="where rank 0 saves the end result")
    options.add_argument("--progress", type=Path, help="folder in which every rank notes its last finished step")
    options.add_argument("--no-flowcheck", action="store_true", help="train without it, for comparison")
    args = options.parse_args()
    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # a model that outlives the group keeps torch's threads, which sometimes abort the interpreter's end
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    text = TEXT.read_text(encoding="utf-8")
    symbols = sorted(set(text))
    data = torch.tensor([symbols.index(c) for c in text])

    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(len(symbols)), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    done = 0
    if args.resume is not None:
        state = torch.load(args.resume)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["scheduler"])
        done = state["step"]
    if not args.no_flowcheck:
        flowcheck.attach(model, optimizer, step=done, scheduler=schedule)  # the one line

    def loss_of(step: int) -> torch.Tensor:
        batch = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        starts = torch.randint(len(data) - CONTEXT - 1, (8,), generator=batch)
        windows = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
        return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    # DDP regroups its buckets after the first backward pass of a process, and the order of summation follows the
    # buckets. One pass that no step uses gives a resumed job the same order, and so the same bits, from its first step.
    loss_of(0).backward()

    for step in range(done + 1, args.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        schedule.step()
        if args.progress is not None:
            note = args.progress / f".{rank}"
            note.write_text(f"{step} {loss.item():.4f}")
            os.replace(note, args.progress / f"rank{rank}")

    if rank == 0 and args.final is not None:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, args.final)
    dist.barrier()


if __name__ == "__main__":
    main()
