"""Comparisons of a job's state with a trainer's, tensor by tensor, after the same step.

An agent hashes its parameters and optimizer state at the end of its next step. Which step that will be nobody knows
before, so from the ask until the answer the daemon hashes its own state after every step. Tensors that differ are then
asked for as pieces, which tells where and by how much (`reconstruct.repair`). On the apply thread; `report` from any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_hexdigest

from flowcheck.agents import Agents
from reconstruct.repair import Difference, Finding
from reconstruct.shadow import Shadow
from reconstruct.step_events import SECOND

__all__ = ["FIRST_COMPARISON", "Comparing"]

FIRST_COMPARISON = 1 << 40
"""Numbers from here on are comparisons, those below are parts: a trainer refuses both in the same words."""
PATIENCE = 60 * SECOND
"""How long a comparison waits for the agent's answer, and again for the pieces of what differs."""
MOST_HASHED = 64
"""Steps of the daemon's own whose checksums are kept until the answer comes."""
MOST_REPORTS = 16
MOST_NAMED = 64


@dataclass(slots=True)
class _Running:
    number: int
    rank: int
    deadline: int
    own: dict[int, dict[str, str | None]] = field(default_factory=dict)
    theirs: tuple[int, Mapping[str, str | None]] | None = None
    report: dict[str, Any] = field(default_factory=dict)
    looking: dict[str, dict[str, Any]] = field(default_factory=dict)  # by tensor key: what differs, not yet seen where


class Comparing:
    """The comparisons of one job, one at a time.

    ask: sends `compare-ask` with a number to a peer; look: has pieces of tensors asked for; done: called with the
    report of every comparison that came to an end.
    """

    def __init__(
        self,
        shadow: Shadow,
        agents: Agents,
        ask: Callable[[bytes, int], None],
        look: Callable[[Sequence[str]], None],
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        self._shadow = shadow
        self._agents = agents
        self._ask = ask
        self._look = look
        self._done = done
        self._running: _Running | None = None
        self._reports: dict[int, dict[str, Any]] = {}

    def report(self, number: int) -> dict[str, Any] | None:
        """The report of a comparison that has ended, of the newest ones.

        {"step", "rank", "tensors": how many were compared, "unknown": names of parameters that were not, as elements of
        them are unknown here, "differing": [{"tensor", "elements", "ulps", "relative", "note"}], the three numbers None
        where no piece came, note: why nothing can be compared of this tensor, "more": how many further ones differ,
        "problem": why nothing was compared at all, or None}.
        """
        return self._reports.get(number)

    def start(self, number: int, now: int) -> None:
        """Compare with the end of a trainer's next step; the report will have this number."""
        if self._running is not None:
            self._end(number, {**_nothing(), "problem": "another comparison is under way: try again"})
            return
        agents = self._agents.ready()
        if not agents:
            self._end(number, {**_nothing(), "problem": "no rank answers: the job has ended, or is cut off from here"})
            return
        self._running = _Running(number, agents[0].rank, now + PATIENCE)
        self._ask(agents[0].peer, number)

    @property
    def busy(self) -> bool:
        return self._running is not None

    def applied(self, now: int) -> None:
        """The shadow has taken a step."""
        running = self._running
        if running is None or running.report:
            return
        if running.theirs is None or running.theirs[0] == self._shadow.step:
            running.own[self._shadow.step] = self._hashed()
            while len(running.own) > MOST_HASHED:
                del running.own[next(iter(running.own))]
        self._compare(running, now)

    def answered(self, number: int, step: int, checksums: Mapping[str, str | None], now: int) -> None:
        """A trainer's checksums as of the end of `step`."""
        running = self._running
        if running is not None and running.number == number and running.theirs is None:
            running.theirs = step, checksums
            self._compare(running, now)

    def refused(self, number: int, reason: str) -> None:
        """A trainer says that its checksums will not come."""
        if self._running is not None and self._running.number == number and not self._running.report:
            self._end(number, {**_nothing(), "problem": f"rank {self._running.rank} says: {reason}"})

    def found(self, findings: Sequence[Finding]) -> None:
        """What pieces showed."""
        running = self._running
        if running is None or not running.looking:
            return
        for finding in findings:
            if isinstance(finding, Difference):
                entry = running.looking.get(_tensor(finding))
                if entry is not None:
                    entry["elements"] = (entry["elements"] or 0) + finding.elements
                    entry["ulps"] = max(entry["ulps"] or 0, finding.ulps)
                    entry["relative"] = max(entry["relative"] or 0.0, finding.relative)

    def looked(self) -> None:
        """Every piece that was asked for by `look` has come."""
        if self._running is not None and self._running.looking:
            self._end(self._running.number, self._running.report)

    def tick(self, now: int) -> None:
        """Time has passed: give up what does not come."""
        running = self._running
        if running is None or now < running.deadline:
            return
        report = running.report
        if not report:
            seconds = PATIENCE // SECOND
            answer = "rank %d did not answer" if running.theirs is None else "the step of rank %d's answer did not come"
            report = {**_nothing(), "problem": f"{answer % running.rank} within {seconds} s"}
        self._end(running.number, report)

    def _hashed(self) -> dict[str, str | None]:
        """Checksums of the live state, None of tensors with unknown elements."""
        with self._shadow.pin(whole=False) as pin:
            unknown = {key.partition("/")[2] for key, _ in pin.unknown.items()}
            return {
                key: None if _parameter(key) in unknown else xxh3_128_hexdigest(data.data)
                for key, (_, data) in pin.tensors.items()
                if not key.startswith("buffer/")  # forward passes change them
            }

    def _compare(self, running: _Running, now: int) -> None:
        if running.theirs is None:
            return
        step, theirs = running.theirs
        own = running.own.get(step)
        if own is None and step == self._shadow.step:
            own = self._hashed()
        if own is None:
            if step < self._shadow.step:
                problem = f"rank {running.rank} was too far behind its own markers at step {step}: try again"
                self._end(running.number, {**_nothing(), "problem": problem})
            return
        running.own.clear()
        known = {key: value for key, value in own.items() if value is not None}
        both = [key for key in known if theirs.get(key) is not None]
        lacking = {key: "the trainer does not have it" for key in known if key not in theirs}
        lacking |= {key: "the daemon does not have it" for key in theirs if key not in own}
        differing = [key for key in both if theirs[key] != known[key]]
        running.report = {
            **_nothing(),
            "step": step,
            "rank": running.rank,
            "tensors": len(both),
            "unknown": sorted({_parameter(key) for key in own if own[key] is None})[:MOST_NAMED],
            "differing": [_difference(key, lacking.get(key)) for key in [*lacking, *differing][:MOST_NAMED]],
            "more": max(0, len(lacking) + len(differing) - MOST_NAMED),
        }
        running.looking = {
            entry["tensor"]: entry for entry in running.report["differing"] if entry["tensor"] not in lacking
        }
        if not running.looking:
            self._end(running.number, running.report)
            return
        running.deadline = now + PATIENCE
        self._look(sorted({f"model/{_parameter(key)}" for key in running.looking}))

    def _end(self, number: int, report: dict[str, Any]) -> None:
        if self._running is not None and self._running.number == number:
            self._running = None
        self._reports[number] = report
        while len(self._reports) > MOST_REPORTS:
            del self._reports[next(iter(self._reports))]
        self._done(report)


def _nothing() -> dict[str, Any]:
    return {
        "step": None, "rank": None, "tensors": 0, "unknown": [], "differing": [], "more": 0, "problem": None,
    }  # fmt: skip


def _difference(key: str, note: str | None) -> dict[str, Any]:
    return {"tensor": key, "elements": None, "ulps": None, "relative": None, "note": note}


def _parameter(key: str) -> str:
    """The parameter that a tensor key belongs to."""
    kind, _, rest = key.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def _tensor(found: Difference) -> str:
    """The tensor key that a difference was found in."""
    return found.key if found.section == "model" else f"optimizer/{_parameter(found.key)}/{found.section}"
