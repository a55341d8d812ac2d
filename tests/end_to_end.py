"""A whole job in the lab, and the comparison of what the daemon claimed with what the trainers had, bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowcheck.client import status
from flowcheck.lab import Lab, LabConfig, Mirror
from flowcheck.lab.nccl_wire_lanes import connections

CASES = str(Path(__file__).with_name("jobs") / "cases.py")
MANY = str(Path(__file__).with_name("jobs") / "many.py")
STEPS = 6
PLAIN = ("gpt", "sgd", "adam", "conv", "mixed", "static")
CUT_OFF = "gpt_cut_off"


def mirrors(*texts: str) -> tuple[Mirror, ...]:
    return tuple(Mirror.parse(text) for text in texts)


class Outcome:
    """What one lab run left: the trainers' own digests, the journal, and the last status of every run.

    unconfirmed: runs whose markers did not reach the daemon.
    """

    def __init__(self, folder: Path, steps: int = STEPS, unconfirmed: Collection[str] = ()) -> None:
        self.folder = folder
        self.to_do = steps
        self.unconfirmed = unconfirmed
        self.truth: dict[tuple[str, int], dict[str, str]] = {}
        self.refused: dict[str, Any] = {}
        self.ranks: set[str] = set()
        for path in folder.glob("rank*.jsonl"):
            self.ranks.add(path.stem)
            for line in path.read_text().splitlines():
                note = json.loads(line)
                if "refused" in note:
                    self.refused[note["run"]] = note["refused"]
                    continue
                self.truth.setdefault((note["run"], note["step"]), {})[path.stem] = note["digest"]
        journal = folder / "journal.jsonl"
        self.journal: list[dict[str, Any]] = (
            [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        )
        self.statuses: dict[str, dict[str, Any]] = {}

    def steps(self, run: str) -> list[int]:
        return [line["step"] for line in self.journal if line["run"] == run]

    def check(self, runs: Iterable[str]) -> None:
        """Every step of every run was followed, and equals every trainer to the bit."""
        problems = [problem for run in runs for problem in self.problems(run)]
        assert not problems, "\n".join(problems)
        self.check_claimed()

    def problems(self, run: str) -> list[str]:
        """Why this run was not followed at every step and bit for bit, empty if it was."""
        found = []
        if run in self.refused:
            found.append(f"{run}: refused: {self.refused[run]}")
        steps = range(1, self.to_do + 1)
        trained = [step for step in steps if self.truth.get((run, step), {}).keys() == self.ranks]
        if len(trained) != self.to_do:
            found.append(f"{run}: all ranks trained steps {trained} alone")
        if self.steps(run) != list(steps):
            found.append(f"{run}: the journal has steps {self.steps(run)}: {self.statuses.get(run)}")
        lines = [line for line in self.journal if line["run"] == run]
        found += [f"{line}: it is not fully known" for line in lines if line["digest"] is None]
        return found + [problem for line in lines for problem in self._wrong(line)]

    def check_claimed(self) -> None:
        """What was claimed is right: the digest of each fully known step is that of every trainer at that step."""
        problems = [problem for line in self.journal for problem in self._wrong(line)]
        assert not problems, "\n".join(problems)

    def _wrong(self, line: dict[str, Any]) -> list[str]:
        if line["digest"] is None:
            return [] if line["unknown"] else [f"{line}: nothing of it is unknown, and it has no digest"]
        confirmed = line["run"] not in self.unconfirmed
        truth = set(self.truth.get((line["run"], line["step"]), {}).values())
        found = [] if truth == {line["digest"]} else [f"{line}: the trainers have {truth}"]
        return found if line["confirmed"] == confirmed else [*found, f"{line}: confirmed is not {confirmed}"]


def train_plain(folder: Path) -> Outcome:
    """PLAIN on four ranks, recorded, and after them one more job, whose management link goes down when it has attached.
    """
    attached, go_on = folder / "attached", folder / "go-on"
    config = LabConfig(
        command=(CASES, str(folder), *PLAIN, CUT_OFF),
        ranks=4,
        mirrors=mirrors("1:both"),
        journal=str(folder / "journal.jsonl"),
        store=str(folder / "store"),
        record=str(folder / "all.pcap"),
        env={"HELD": CUT_OFF, "AFTER_ATTACH": str(attached), "GO_ON": str(go_on)},
    )
    with Lab(config) as lab:
        lab.train()
        while not attached.exists() and lab.running:
            with suppress(TimeoutError):
                lab.wait(0.1)
        lab.set_management(False)
        go_on.touch()
        assert lab.wait(240) == 0
        assert lab.endpoint is not None
        answer = status(lab.endpoint, 20)
        lab.finish()
    outcome = Outcome(folder, unconfirmed={CUT_OFF})
    outcome.statuses = {job["run"]: job for job in answer["jobs"]}
    assert len(outcome.ranks) == 4
    return outcome


def train(tmp_path: Path, cases: tuple[str, ...], *, until_told: bool = False, **config: Any) -> Outcome:
    """Train the cases in a lab; until_told: keep the daemon until it has followed every step, or says why it does not.
    """
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
        while until_told and not all(map(_told, answer["jobs"])) and time.monotonic() < deadline:
            time.sleep(0.5)
            answer = status(lab.endpoint, 20)
        lab.finish()
    outcome = Outcome(tmp_path)
    outcome.statuses = {job["run"]: job for job in answer["jobs"]}
    assert len(outcome.ranks) == lab_config.ranks
    return outcome


def _told(job: dict[str, Any]) -> bool:
    return job["step"] == STEPS or job["frozen"] is not None


Job = tuple[str, str, dict[str, Any]]
"""Run name, case, and the lab that it would have been trained in, as fields of LabConfig."""


def train_many(tmp_path: Path, jobs: list[Job], *, steps: int, **config: Any) -> list[str]:
    """Train jobs one after another in one lab; what is wrong with any of them, empty if nothing is."""
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    lab_config = LabConfig(
        command=(MANY, str(tmp_path), str(tmp_path / "jobs.json")),
        journal=str(tmp_path / "journal.jsonl"),
        env={"STEPS": str(steps)},
        **config,
    )
    problems = []
    answers: dict[str, dict[str, Any]] = {}
    flows = 0
    with Lab(lab_config) as lab:
        assert lab.endpoint is not None
        lab.train()
        while lab.running:
            with suppress(TimeoutError):
                lab.wait(1)
            answer = status(lab.endpoint, 20)
            answers |= {job["run"]: job for job in answer["jobs"]}  # it forgets those that ended long ago
            flows = max(flows, answer["capture"]["nccl_flows"])
        if any(lab.statuses.values()):
            problems.append(f"the trainers ended with {lab.statuses}")
        if lab.finish():
            problems.append("the daemon failed")
    most = max(_connections(LabConfig(**fields), lab_config) for _, _, fields in jobs)
    if not 0 < flows <= 2 * most:
        problems.append(f"{flows} queue pairs were followed at once, a job has {2 * most} at most: it forgot none")
    outcome = Outcome(tmp_path, steps)
    outcome.statuses = answers
    assert len(outcome.ranks) == lab_config.ranks
    for run, _, _ in jobs:
        problems += outcome.problems(run)
        if not answers.get(run, {}).get("exact"):
            problems.append(f"{run}: not said to be exact: {answers.get(run)}")
    if problems and answer["drops"]:
        problems.append(f"the daemon lost {answer['drops']} packets")
    return problems


def _connections(config: LabConfig, lab_config: LabConfig) -> int:
    """How many connections of a job pass by the lab's mirrors."""
    mirrored, ports = {port for port, _ in lab_config.mirrored_ports()}, config.job().ports
    return sum(not mirrored.isdisjoint((ports[a], ports[b])) for _, a, b in connections(config.job()))
