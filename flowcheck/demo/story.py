"""The demo's plot: an uninterrupted run for reference, a run that is killed, its restore, and the comparison."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from flowcheck.errors import FlowcheckError
from flowcheck.lab import Lab, LabConfig, Mirror
from flowcheck.lab.launcher import child_environment

RANKS = 4
TRAIN = ("-m", "flowcheck.demo.train")
DEADLINE = 180.0


def say(text: str = "", *, strong: bool = False) -> None:
    click.secho(text, bold=strong)


def run(steps: int, seed: int | None) -> int:
    """Tell the whole story; 0 if every claim held, else 1. The last line printed is one JSON object."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    victim = random.Random(seed).randrange(steps // 4, steps - steps // 4)
    with tempfile.TemporaryDirectory(prefix="flowcheck-demo-") as name:
        folder = Path(name)
        say("flowcheck demo: four ranks, a switch that mirrors one port, a checkpoint node", strong=True)
        say("Everything is real: processes, network namespaces, the kernel's port mirroring, SIGKILL.\n")

        say(f"1. The reference: {steps} steps without interruption and without flowcheck", strong=True)
        _train(folder, "reference", steps, "--no-flowcheck", mirrors=())
        say()

        say("2. The same training, its all-reduce traffic copied from rank 1's switch port", strong=True)
        killed_at = _train_and_kill(folder, steps, victim)
        lags = [line["lag_ms"] for line in _journal(folder / "killed.jsonl")]
        median = statistics.median(lags) if lags else float("nan")
        say(f"   all four trainers got SIGKILL; the last step that any of them finished: {killed_at}")
        say(f"   the checkpoint node followed {len(lags)} steps, a median of {median:.1f} ms behind the wire\n")

        say("3. flowcheck restore", strong=True)
        resume = folder / "resume.pt"
        _restore(folder / "store", resume)
        restored = _step_of(resume)
        say()

        say(f"4. Training goes on from step {restored}, covered again", strong=True)
        _train(folder, "resumed", steps, "--resume", str(resume), mirrors=None)
        say()

        say("5. Every tensor of the two results, bit for bit", strong=True)
        differing, compared = _compare(folder / "reference.pt", folder / "resumed.pt")
        for key in differing[:10]:
            say(f"   differs: {key}")
        say(f"   {compared - len(differing)} of {compared} tensors and values are identical\n")

        result = {
            "bit_exact": not differing and compared > 0,
            "steps": steps,
            "killed_at": killed_at,
            "restored_step": restored,
            "steps_lost": max(0, killed_at - restored),
            "median_lag_ms": round(median, 3),
            "seed": seed,
        }
        good = result["bit_exact"] and result["steps_lost"] == 0
        if good:
            say(f"Nothing was lost: killed at {killed_at}, restored at {restored}.", strong=True)
        else:
            say("The run was not what flowcheck claims. Please report this output.", strong=True)
        say(json.dumps(result))
        return 0 if good else 1


def _config(folder: Path, name: str, mirrors: tuple[Mirror, ...] | None) -> LabConfig:
    covered = mirrors != ()
    return LabConfig(
        ranks=RANKS,
        mirrors=mirrors,
        store=str(folder / "store") if covered else None,
        journal=str(folder / f"{name}.jsonl") if covered else None,
        daemon=None if covered else (),
    )


def _train(folder: Path, name: str, steps: int, *options: str, mirrors: tuple[Mirror, ...] | None) -> None:
    started = time.monotonic()
    progress = folder / f"{name}-progress"
    progress.mkdir()
    command = (*TRAIN, "--steps", str(steps), "--final", str(folder / f"{name}.pt"), *options)
    with Lab(_config(folder, name, mirrors)) as lab:
        lab.train((*command, "--progress", str(progress)))
        if lab.wait(DEADLINE) != 0:
            raise FlowcheckError(f"the {name} training failed with status {lab.wait()}: its output is above")
    step, loss = _progress(progress)[0]
    say(f"   step {step}, loss {loss:.4f}, {time.monotonic() - started:.0f} s")


def _train_and_kill(folder: Path, steps: int, victim: int) -> int:
    """Train until a rank has finished step `victim`, kill every rank, return the last step that any finished."""
    progress = folder / "killed-progress"
    progress.mkdir()
    with Lab(_config(folder, "killed", None)) as lab:
        lab.train((*TRAIN, "--steps", str(steps), "--progress", str(progress)))
        deadline = time.monotonic() + DEADLINE
        while not any(step >= victim for step, _ in _progress(progress).values()):
            with suppress(TimeoutError):
                lab.wait(0.01)
            if time.monotonic() > deadline or not lab.running:
                raise FlowcheckError(f"the training did not reach step {victim}: its output is above")
        lab.kill()
        lab.wait(DEADLINE)
    return max(step for step, _ in _progress(progress).values())


def _progress(folder: Path) -> dict[int, tuple[int, float]]:
    """Rank -> (last finished step, loss there), from the notes that the trainers leave."""
    notes = {}
    for path in folder.glob("rank*"):
        step, loss = path.read_text().split()
        notes[int(path.name[4:])] = (int(step), float(loss))
    return notes


def _journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _restore(store: Path, out: Path) -> None:
    command = [sys.executable, "-P", "-m", "flowcheck", "restore", str(store), "--out", str(out)]
    say(f"   $ flowcheck restore {store} --out {out}")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=child_environment()
    )
    if done.returncode != 0:
        raise FlowcheckError(f"restore ended with status {done.returncode}: {done.stderr.strip()}")
    say(f"   {done.stdout.strip()}")


def _step_of(path: Path) -> int:
    import torch

    step: int = torch.load(path)["step"]
    return step


def _compare(first: Path, second: Path) -> tuple[list[str], int]:
    """Keys of all leaves that differ between two saved states, and how many leaves there are."""
    import torch

    a, b = (dict(_leaves(torch.load(path), "")) for path in (first, second))
    differing = sorted(a.keys() ^ b.keys())
    for key in sorted(a.keys() & b.keys()):
        x, y = a[key], b[key]
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            same = x.dtype == y.dtype and x.shape == y.shape and _bits(x) == _bits(y)
        else:
            same = type(x) is type(y) and x == y
        if not same:
            differing.append(key)
    return differing, len(a.keys() | b.keys())


def _bits(tensor: Any) -> bytes:
    data: bytes = tensor.contiguous().view(-1).numpy().tobytes()
    return data


def _leaves(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]")
    else:
        yield key, value
