"""Scenarios of `flowcheck.attach` in a real two-rank gloo job; each rank writes what it saw to a JSON file.

Run by tests/test_attach.py: python attach_job.py RANK WORLD_SIZE PORT ENDPOINT FOLDER SCENARIO...
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.trainer import Handle

warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about broadcast_buffers

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
ENDPOINT = sys.argv[4]
FOLDER = Path(sys.argv[5])


class Tied(nn.Module):
    """Channels-last convolution, tied embedding, buffers of all kinds, a frozen and an ignored parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.register_buffer("mask", torch.ones(1, 5).expand(3, 5), persistent=False)
        self.register_buffer("empty", torch.empty(0, 3))
        self._ddp_params_and_buffers_to_ignore = ["mask"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.head(self.frozen(x) + self.embed.weight[:4].sum(0))


class Mixed(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 3).double())
        self.b = nn.Parameter(torch.randn(3, 9).t().bfloat16())
        self.c = nn.Parameter(torch.randn(4).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * (self.a.sum() + self.b.float().sum() + self.c.float().sum())


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 6, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.randn(4, width)) * scale).square().sum().backward()
    optimizer.step()


def outcome(call: Callable[[], Handle]) -> dict[str, Any]:
    """What an attach did: its error, or its reason and warnings; its handle is closed."""
    found = outcome_of(call)
    if "handle" in found:
        found.pop("handle").close()
    return found


def outcome_of(call: Callable[[], Handle]) -> dict[str, Any]:
    """What an attach did: its error, or its handle, reason and warnings."""
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            handle = call()
        except flowcheck.errors.FlowcheckError as error:  # type: ignore[attr-defined]
            kind = type(error).__name__
            return {"error": str(error), "kind": kind, "seconds": time.monotonic() - started}
    texts = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    return {"handle": handle, "reason": handle.reason, "warnings": texts, "seconds": time.monotonic() - started}


def attach(model: Any, optimizer: Any, run: str, **options: Any) -> Handle:
    return flowcheck.attach(model, optimizer, run=run, strict=True, **options)


def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
    if RANK == 0:
        torch.save(tensors, FOLDER / f"{name}.pt")


def state_of(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the job under its key, cloned with its strides."""
    names = {id(p): name for name, p in model.module.named_parameters()}
    tensors = {f"model/{name}": p for name, p in model.module.named_parameters()}
    tensors |= {f"buffer/{name}": b for name, b in model.module.named_buffers()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer/{names[id(p)]}/{key}"] = value
    return {key: value.detach().clone(memory_format=torch.preserve_format) for key, value in tensors.items()}


# Scenarios


def described() -> dict[str, Any]:
    """Attach in the middle of training: every kind of tensor, state, rebuilt layout, scheduler."""
    model = DistributedDataParallel(Tied(), broadcast_buffers=True, gradient_as_bucket_view=True)
    decayed = [p for n, p in model.module.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.module.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
        optimizer.step()
        scheduler.step()
    save("described", state_of(model, optimizer))
    handle = attach(model, optimizer, "described", step=4, scheduler=scheduler)
    logged = model._get_ddp_logging_data()
    result = {
        "sequence": model.process_group._get_sequence_number_for_group(),
        "rebuilt": logged["rebuilt_per_bucket_param_indices"],
        "sizes": logged["rebuilt_bucket_sizes"],
        "lr": optimizer.param_groups[0]["lr"],
        "handle": [handle.covered, handle.run, handle.epoch, handle.exact, handle.step],
        "version": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    handle.close()
    return result


def mixed() -> dict[str, Any]:
    """Three dtypes, SGD with momentum, attached fresh."""
    model = DistributedDataParallel(Mixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    save("mixed", state_of(model, optimizer))
    handle = attach(model, optimizer, "mixed")
    handle.close()
    order = {id(p): i for i, p in enumerate(model.module.parameters())}
    buckets = [[order[id(p)] for p in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()]
    return {"buckets": buckets}


def seeded() -> dict[str, Any]:
    """Attached right after a checkpoint was written: a file of torch.save, and a folder with every tensor in shards."""
    model = DistributedDataParallel(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3, 5, 5)).sum().backward()
        optimizer.step()
    save("seeded", state_of(model, optimizer))
    file, folder = FOLDER / "checkpoint.pt", FOLDER / "checkpoint"
    if RANK == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))

    def shards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shards(item) for key, item in value.items()}
        whole = not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() == 0
        return value if whole else distribute_tensor(value, mesh, [Shard(value.dim() - 1)])

    checkpoint.save(shards(both), checkpoint_id=folder)
    dist.barrier()
    for run, path in (("seeded-file", file), ("seeded-sharded", folder)):
        attach(model, optimizer, run, step=2, checkpoint=path).close()
    return {}


def markers() -> dict[str, Any]:
    """Twelve steps with a schedule: every marker against what the trainer had, and the rebuilt layout."""
    torch.manual_seed(RANK)
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(
        [{"params": model.module[0].parameters()}, {"params": model.module[2].parameters()}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    handle = attach(model, optimizer, "markers", scheduler=scheduler)
    steps = []
    for number in range(12):
        step(model, optimizer, scale=0.01)
        parameters = list(model.module.parameters())
        steps.append(
            {
                "sequence": model.process_group._get_sequence_number_for_group(),
                "values": [p.detach().numpy().tobytes().hex() for p in parameters],
                "gradients": [p.grad.numpy().tobytes().hex() for p in parameters if p.grad is not None],
                "lr": [group["lr"] for group in optimizer.param_groups],
                "handle": handle.step,
            }
        )
        scheduler.step()
        if number == 5:
            optimizer.param_groups[1]["momentum"] = 0.5
            time.sleep(0.3)  # time for the layout thread, which looks ten times a second
    logged = model._get_ddp_logging_data()
    handle.close()
    sent = handle.dropped
    return {"steps": steps, "rebuilt": logged["rebuilt_per_bucket_param_indices"], "dropped": sent}


def pending() -> dict[str, Any]:
    """Attach between the first forward pass and the rebuild, and right after the rebuild."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    attach(model, optimizer, "pending-1", step=1).close()
    step(model, optimizer)
    logged = model._get_ddp_logging_data().get("has_rebuilt_buckets")
    attach(model, optimizer, "pending-2", step=2).close()
    step(model, optimizer)
    return {"logged": logged, "rebuilt": model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]}


def accumulation() -> dict[str, Any]:
    """Two reductions in one step, a skipped step, a barrier: markers say so with many canaries."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(model, optimizer, "accumulation")
    sequences = []
    for kind in ("plain", "plain", "plain", "plain", "twice", "plain", "plain", "skipped", "plain", "plain"):
        optimizer.zero_grad()
        for _ in range(2 if kind == "twice" else 1):
            model(torch.randn(4, 6)).sum().backward()
        if kind != "skipped":
            optimizer.step()
            sequences.append(model.process_group._get_sequence_number_for_group())
    handle.close()
    return {"sequences": sequences}


def again() -> dict[str, Any]:
    """Several attaches of one optimizer, and of a second model."""
    model, other = DistributedDataParallel(small()), DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(model, optimizer, "again")
    step(model, optimizer)
    second = attach(model, optimizer, "again", step=1)
    hooks = len(optimizer._optimizer_step_post_hooks)
    step(model, optimizer)
    third = attach(other, torch.optim.SGD(other.parameters(), lr=0.1), "other")
    result = {
        "epochs": [first.epoch, second.epoch, third.epoch],
        "covered": [first.covered, second.covered, third.covered],
        "steps": [first.step, second.step],
        "hooks": hooks,
    }
    second.close()
    second.close()
    third.close()
    step(model, optimizer)
    return {**result, "left": len(optimizer._optimizer_step_post_hooks)}


def problems() -> dict[str, Any]:
    """What ends the following of a job after attach, each as its own run."""

    def fresh(run: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Handle]:
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, attach(model, optimizer, run)

    model, optimizer, handle = fresh("parameter-changed")
    with torch.no_grad():
        model.module[2].bias[1] += 1
    step(model, optimizer)
    handle.close()

    model, optimizer, handle = fresh("group-added")
    step(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    step(model, optimizer)
    handle.close()

    model, optimizer, handle = fresh("optimizer-loaded")
    step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer)
    handle.close()

    model, optimizer, handle = fresh("model-loaded")
    step(model, optimizer)
    model.module.load_state_dict(model.module.state_dict())
    step(model, optimizer)
    handle.close()

    model, optimizer, handle = fresh("hook-registered")
    step(model, optimizer)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)
    step(model, optimizer)
    handle.close()

    model, optimizer, handle = fresh("gradient-skipped")
    step(model, optimizer)
    optimizer.zero_grad()
    model(torch.randn(4, 6)).sum().backward()
    for parameter in model.module.parameters():
        parameter.grad = None
    optimizer.step()
    handle.close()

    model, optimizer, handle = fresh("tensor-lr")
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    step(model, optimizer)
    handle.close()
    return {}


def closing() -> dict[str, Any]:
    """Seconds that close() takes, by what the daemon does about it (tests/test_attach.py) and what the trainer did."""
    seconds = {}
    for case in ("answered", "asked", "silent", "changed", "elsewhere", "no-wait", "still"):
        run = f"closing-{case}"
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        handle = attach(model, optimizer, run)
        for _ in range(0 if case == "still" else 3):
            step(model, optimizer, scale=0.01)
        time.sleep(0.3)  # the agents are known by then
        save(run, state_of(model, optimizer))
        if case == "changed":  # as a script does that goes on with an average
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        closer = threading.Thread(target=handle.close, args=(1.0,))
        started = time.monotonic()
        if case == "elsewhere":
            closer.start()
            closer.join()
        else:
            handle.close(wait=0 if case == "no-wait" else 1.0)
        seconds[run] = time.monotonic() - started
        handle.close()
    return seconds


def refusals() -> dict[str, Any]:
    """Every job that cannot be followed, by name."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def ddp(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module or small(), **options)

    def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, **options)

    class Mine(torch.optim.AdamW):
        pass

    class Extra(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            pass

    plain = small()
    alone = [dist.new_group([rank]) for rank in range(WORLD_SIZE)][RANK]
    single = ddp(process_group=alone)
    unused = ddp(find_unused_parameters=True)
    hooked = ddp()
    hooked.register_comm_hook(None, fp16_compress_hook)
    builtin = ddp()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    sparse = ddp(nn.Embedding(5, 3, sparse=True))
    model = ddp()
    outside = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    partial = torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)
    late = ddp()
    late.module[0].weight.requires_grad_(False)
    module = small()
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    ignored = ddp(module)
    views = small()
    views[2].bias = nn.Parameter(views[2].weight.data.flatten()[:3])
    shared = ddp(views)
    joined = ddp()
    stateful = sgd(model, momentum=0.9)
    stateful.state[next(model.parameters())]["extra"] = 1
    cases: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
        "not DDP": lambda: (plain, sgd(plain), {}),
        "world size 1": lambda: (single, sgd(single), {}),
        "find_unused_parameters": lambda: (unused, sgd(unused), {}),
        "comm hook": lambda: (hooked, sgd(hooked), {}),
        "builtin hook": lambda: (builtin, sgd(builtin), {}),
        "sparse": lambda: (sparse, sgd(sparse), {}),
        "optimizer outside DDP": lambda: (model, outside, {}),
        "DDP outside optimizer": lambda: (model, partial, {}),
        "frozen after DDP": lambda: (late, sgd(late), {}),
        "ignored by DDP": lambda: (ignored, sgd(ignored), {}),
        "shared memory": lambda: (shared, sgd(shared), {}),
        "other optimizer": lambda: (model, torch.optim.RMSprop(model.parameters()), {}),
        "subclass": lambda: (model, Mine(model.parameters()), {}),
        "no optimizer": lambda: (model, None, {}),
        "tensor lr": lambda: (model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)), {}),
        "capturable": lambda: (model, torch.optim.Adam(model.parameters(), capturable=True), {}),
        "differentiable": lambda: (model, sgd(model, differentiable=True), {}),
        "foreign state": lambda: (model, stateful, {}),
        "extra state": lambda: ((m := ddp(Extra(3, 3))), sgd(m), {}),
        "complex": lambda: ((m := ddp(nn.Linear(2, 2, dtype=torch.complex64))), sgd(m), {}),
        "mixed precision": lambda: ((m := ddp(mixed_precision=precision())), sgd(m), {}),
        "run name": lambda: (model, sgd(model), {"run": "../x"}),
        "negative step": lambda: (model, sgd(model), {"step": -1}),
        "no endpoint": lambda: (model, sgd(model), {"endpoint": ""}),
        "bad endpoint": lambda: (model, sgd(model), {"endpoint": "127.0.0.1:1"}),
        "refused by the daemon": lambda: (model, sgd(model), {"run": "refuse-me"}),
        "failed commit": lambda: (model, sgd(model), {"run": "fail-commit"}),
        "rank 1 differs": lambda: (model, torch.optim.SGD(model.parameters(), lr=0.1 + RANK), {}),
        "rank 1 refuses": lambda: (model, sgd(model, differentiable=RANK == 1), {}),
    }
    results: dict[str, Any] = {}
    for name, build in cases.items():
        built, optimizer, options = build()
        options = {"run": "refusals", "endpoint": ENDPOINT, **options}
        if not options["endpoint"]:
            del os.environ["FLOWCHECK_ENDPOINT"]
        strict = outcome(lambda b=built, o=optimizer, k=options: flowcheck.attach(b, o, strict=True, **k))
        soft = outcome(lambda b=built, o=optimizer, k=options: flowcheck.attach(b, o, **k))
        results[name] = [strict, soft]
        os.environ["FLOWCHECK_ENDPOINT"] = ENDPOINT
    with joined.join():
        results["join"] = [outcome(lambda: attach(joined, sgd(joined), "refusals", endpoint=ENDPOINT))]
        model_step = sgd(joined)
        step(joined, model_step)
    return results


def precision() -> Any:
    from torch.nn.parallel.distributed import _MixedPrecision

    return _MixedPrecision(param_dtype=torch.bfloat16)


def unreachable() -> dict[str, Any]:
    """No daemon: one warning on rank 0, or an error on every rank; training goes on."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    os.environ["FLOWCHECK_ATTACH_TIMEOUT"] = "0.4"
    nowhere = "tcp://127.0.0.1:9"
    soft = outcome(lambda: flowcheck.attach(model, optimizer, endpoint=nowhere))
    strict = outcome(lambda: flowcheck.attach(model, optimizer, endpoint=nowhere, strict=True))
    os.environ["FLOWCHECK_ATTACH_TIMEOUT"] = "soon"
    wrong = outcome(lambda: flowcheck.attach(model, optimizer, endpoint=nowhere, strict=True))
    del os.environ["FLOWCHECK_ATTACH_TIMEOUT"]
    step(model, optimizer)
    hooks = len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)
    return {"soft": soft, "strict": strict, "wrong": wrong, "hooks": hooks}


def cost() -> dict[str, Any]:
    """Microseconds of the marker's hook, for 2 groups and 100 parameters, usual and with a changing rate."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(50)]))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:60]}, {"params": parameters[60:]}], lr=0.1)
    handle = attach(model, optimizer, "cost")
    step(model, optimizer, width=32, scale=1e-3)
    result: dict[str, Any] = {"parameters": len(parameters)}
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})
        calls = 3000

        def scheduled(hook: Any = hook) -> None:
            optimizer.param_groups[0]["lr"] *= 0.999
            hook(optimizer, (), {})

        result["usual"] = min(timeit.repeat(lambda h=hook: h(optimizer, (), {}), number=calls, repeat=3)) / calls
        result["scheduled"] = min(timeit.repeat(scheduled, number=calls, repeat=3)) / calls
    result["dropped"] = handle.dropped
    handle.close()
    return result


def left_open() -> dict[str, Any]:
    """Handles that nobody closes: one whose optimizer is gone early, one that lives to the interpreter's end."""
    for run in ("left-early", "left-late"):
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(model, optimizer, run)
        for _ in range(20):
            step(model, optimizer, scale=1e-3)
    kept.extend([model, optimizer])
    return {}


kept: list[Any] = []


def no_daemon_later() -> dict[str, Any]:
    """The daemon goes away after attach: markers are dropped and counted, nothing waits."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(model, optimizer, "stop-me")
    deadline = time.monotonic() + 20
    while RANK == 0 and not (FOLDER / "stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    slowest = 0.0
    optimizer.zero_grad()
    model(torch.randn(4, 6)).sum().backward()
    for _ in range(1500):
        for group in optimizer.param_groups:
            group["lr"] *= 0.999
        started = time.perf_counter()
        optimizer.step()
        slowest = max(slowest, time.perf_counter() - started)
    dropped = handle.dropped
    started = time.monotonic()
    handle.close()
    return {"dropped": dropped, "slowest": slowest, "close": time.monotonic() - started, "step": handle.step}


@contextlib.contextmanager
def group(port: str) -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(RANK), WORLD_SIZE=str(WORLD_SIZE))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    yield
    dist.barrier()
    gc.collect()  # a model that outlives the group keeps torch's threads, which sometimes abort the interpreter's end
    dist.destroy_process_group()


def main() -> None:
    os.environ["FLOWCHECK_ENDPOINT"] = ENDPOINT
    torch.set_num_threads(1)
    with group(sys.argv[3]):
        results = {}
        for name in sys.argv[6:]:
            torch.manual_seed(7)
            results[name] = globals()[name]()
            dist.barrier()
        (FOLDER / f"rank{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    import flowcheck.errors

    main()
