"""A lab in which a job is killed and started again many times (jobs/lives.py), seen from outside."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import flowcheck
from flowcheck.client import fetch, status
from flowcheck.lab import Lab, LabConfig
from reconstruct.digest import state_digest

SCRIPT = str(Path(__file__).with_name("jobs") / "lives.py")
PATIENCE = 60.0
QUIET = 0.4
"""Without a change for so long (s), what was captured before has been applied ..."""
PATIENT = 3.0
"""... also where the newest step that was reported is not held."""
PHASES = {
    "i": "start", "a": "attach", "f": "forward", "r": "all-reduce", "s": "optimizer step", "n": "between steps",
    "e": "end",
}  # fmt: skip


def job(run: str | None, nodes: Sequence[int], steps: int, *, port: int = 29600, resume: Path | None = None,
        pause: float = 0.0, hold: Path | None = None,
        gate: tuple[int, bool, Path] | None = None) -> dict[str, Any]:  # fmt: skip
    """One job of a life: rank k on node nodes[k]; run: None for one that attaches to no daemon."""
    return {
        "run": run, "nodes": list(nodes), "steps": steps, "port": port, "pause": pause,
        "resume": None if resume is None else str(resume), "hold": None if hold is None else str(hold),
        "gate": None if gate is None else [*gate[:2], str(gate[2])],
    }  # fmt: skip


class Lives:
    """The lab and what it was told; a context manager. Further arguments are those of LabConfig."""

    def __init__(self, folder: Path, *, ranks: int, **config: Any) -> None:
        self.folder = folder
        self.lab = Lab(
            LabConfig(
                command=(SCRIPT, str(folder)),
                ranks=ranks,
                store=str(folder / "store"),
                journal=str(folder / "journal.jsonl"),
                **config,
            )
        )
        self.lives: list[list[dict[str, Any]]] = []

    def __enter__(self) -> Lives:
        self.lab.__enter__()
        self.lab.train()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        (self.folder / "end").touch()
        if kind is None:
            assert self.lab.wait(PATIENCE) == 0
        self.lab.__exit__(kind, error, trace)

    @property
    def endpoint(self) -> str:
        return str(self.lab.endpoint)

    # Lives

    def begin(self, *jobs: dict[str, Any]) -> int:
        """Start a life; its number."""
        number = len(self.lives)
        self.lives.append(list(jobs))
        self._put(f"life-{number}.json", jobs)
        return number

    def kill(self, at: Mapping[int, float], life: int = -1) -> None:
        """Kill the trainers of a life, by node at these times."""
        number = range(len(self.lives))[life]
        self._put(f"kill-{number}.json", at)

    def _put(self, name: str, content: Any) -> None:
        part = self.folder / f".{name}"
        part.write_text(json.dumps(content))
        part.rename(self.folder / name)

    def nodes(self, life: int = -1) -> list[int]:
        return [node for each in self.lives[life] for node in each["nodes"]]

    def ended(self, life: int = -1, patience: float = PATIENCE) -> dict[int, int]:
        """Wait until every trainer of a life has ended; the exit statuses by node."""
        number = range(len(self.lives))[life]
        files = {node: self.folder / f"{number}-{node}.ended" for node in self.nodes(life)}
        self.until(lambda: all(path.exists() for path in files.values()), patience)
        return {node: int(path.read_text()) for node, path in files.items()}

    def notes(self, node: int, life: int = -1) -> list[dict[str, Any]]:
        """What the trainer on a node said of its attach and of each step."""
        path = self.folder / f"{range(len(self.lives))[life]}-{node}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def steps(self, node: int, life: int = -1) -> dict[int, dict[str, Any]]:
        return {note["step"]: note for note in self.notes(node, life) if "step" in note}

    def phase(self, node: int, life: int = -1) -> str:
        path = self.folder / f"{range(len(self.lives))[life]}-{node}.phase"
        return PHASES[path.read_text()] if path.exists() else "start"

    def until(self, condition: Any, patience: float = PATIENCE) -> Any:
        """The first value of `condition()` that is true, while the lab runs."""
        end = time.monotonic() + patience
        while not (value := condition()):
            assert time.monotonic() < end, "it did not come true in time"
            with suppress(TimeoutError):
                self.lab.wait(0.01)
                raise AssertionError(f"the lab's ranks have ended: {self.lab.statuses}")
        return value

    # The daemon

    def status(self, run: str) -> dict[str, Any] | None:
        """The newest epoch of a run that is followed."""
        return next((each for each in status(self.endpoint, 20)["jobs"] if each["run"] == run), None)

    def settled(self, run: str) -> dict[str, Any]:
        """The run's status once nothing changes any more."""
        held, since = self.until(lambda: self.status(run)), time.monotonic()
        # A step whose marker has come, and which is not held, is waited for.
        while time.monotonic() - since < (QUIET if held["step"] >= held["job_step"] else PATIENT):
            time.sleep(0.05)
            if _state(now := self.status(run)) != _state(held):
                held, since = now, time.monotonic()
        return dict(held)

    def restore(self, run: str, out: Path | None = None) -> tuple[int, str]:
        """The newest fully known step and its digest; out: a file from which a life resumes."""
        snapshot = fetch(self.endpoint, run, timeout=30)
        if out is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is not fully known is older by a step
                state = flowcheck.load(self.endpoint, run=run)
            assert state["step"] == snapshot.step
            torch.save(state, out)
        return snapshot.step, state_digest(snapshot.tensors)

    @property
    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]


def _state(job: Any) -> tuple[Any, ...]:
    return job["epoch"], job["step"], job["known_step"], job["unknown"]["elements"]


def row(title: str, **fields: Any) -> None:
    """A line of the table that the slow tests print (pytest -s shows it)."""
    print(f"\n| {title} | " + ", ".join(f"{name} {value}" for name, value in fields.items()) + " |", flush=True)


def spread(values: Sequence[float]) -> str:
    """Median, 99th percentile and largest, in ms."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{1e3 * statistics.median(ordered):.1f}/{1e3 * high:.1f}/{1e3 * ordered[-1]:.1f} ms"
