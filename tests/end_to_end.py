"""A whole job in the lab, and the comparison of what the daemon claimed with what the trainers had, bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flowcheck.client import status
from flowcheck.lab import Lab, LabConfig, Mirror

CASES = str(Path(__file__).with_name("jobs") / "cases.py")
STEPS = 6


def mirrors(*texts: str) -> tuple[Mirror, ...]:
    return tuple(Mirror.parse(text) for text in texts)


class Outcome:
    """What one lab run left: the trainers' own digests, the journal, and the last status of every run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.truth: dict[tuple[str, int], set[str]] = {}
        self.ranks: set[str] = set()
        for path in folder.glob("rank*.jsonl"):
            self.ranks.add(path.stem)
            for line in path.read_text().splitlines():
                note = json.loads(line)
                self.truth.setdefault((note["run"], note["step"]), set()).add(note["digest"])
        journal = folder / "journal.jsonl"
        self.journal: list[dict[str, Any]] = (
            [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        )
        self.statuses: dict[str, dict[str, Any]] = {}

    def steps(self, run: str) -> list[int]:
        return [line["step"] for line in self.journal if line["run"] == run]

    def check(self, runs: Iterable[str], *, confirmed: bool = True) -> None:
        """Every step of every run was followed, and equals every trainer to the bit."""
        for run in runs:
            assert self.steps(run) == list(range(1, STEPS + 1)), (run, self.statuses.get(run))
        self.check_claimed(confirmed=confirmed)

    def check_claimed(self, *, confirmed: bool = True) -> None:
        """What was claimed is right: each journalled digest is that of every trainer at that step."""
        for line in self.journal:
            truth = self.truth[line["run"], line["step"]]
            assert truth == {line["digest"]}, (line, truth)
            assert line["confirmed"] == confirmed, line


def train(tmp_path: Path, cases: tuple[str, ...], *, until_frozen: bool = False, **config: Any) -> Outcome:
    """Train the cases in a lab; until_frozen: keep the daemon until it says why it claims nothing."""
    lab_config = LabConfig(
        command=(CASES, str(tmp_path), *cases),
        journal=str(tmp_path / "journal.jsonl"),
        store=str(tmp_path / "store"),
        **config,
    )
    with Lab(lab_config) as lab:
        lab.train()
        assert lab.wait(240) == 0
        assert lab.endpoint is not None
        answer = status(lab.endpoint, 20)
        deadline = time.monotonic() + 60
        while until_frozen and answer["frozen"] is None and time.monotonic() < deadline:
            time.sleep(0.5)
            answer = status(lab.endpoint, 20)
        lab.finish()
    outcome = Outcome(tmp_path)
    outcome.statuses = {job["run"]: job for job in answer["jobs"]}
    assert len(outcome.ranks) == lab_config.ranks
    return outcome
