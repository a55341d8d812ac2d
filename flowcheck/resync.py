"""Repair of one job by its trainers: which agent is asked for what, when another is asked, what came of it.

What is unknown, which part of it comes next and what a piece that arrives means is `reconstruct.repair`'s business;
here are the agents, the deadlines and the budget. On the apply thread, but for `agents`, which any thread may use.

A part that is overdue, refused, or owed by an agent that went away is free again and is asked of another agent under a
new number. While nothing is unknown one agent is asked for known parts in turn (the scrub), at its own smaller share of
the trainers' time: a difference is an alarm, and the trainers' bytes are taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowcheck.agents import Agent, Agents
from flowcheck.comparing import FIRST_COMPARISON, Comparing
from flowcheck.protocol import CHUNK, MAX_PARTS
from flowcheck.report import places
from reconstruct.repair import Difference, Finding, Part, Repair
from reconstruct.shadow import Shadow
from reconstruct.step_events import SECOND, StepReady

__all__ = ["Budget", "Resync", "Tell"]

DEADLINE = 10 * SECOND
"""How long an agent may take for a part at least."""
DEADLINE_STEPS = 4
"""The same in usual steps of the job: an agent copies at the end of a step."""
MOST_PATIENCE = 600 * SECOND
MOST_PARTS = 64
"""Parts that one agent may owe before it is asked for more: a model of small tensors is many parts."""
KEPT_BYTES = 256 << 20
"""Pieces that wait, and gradients kept for parts on their way, per job."""
KEPT_STEPS = 256
ASK_EVERY = SECOND
"""How often rank 0 is asked for what its markers should have told, and anybody for what was refused."""
TOLD_EVERY = 10 * SECOND
"""A job that loses frames at every step is a line now and then, not one per step."""


class Tell(Protocol):
    """Sends a message to an agent: `flowcheck.server.Server.tell`."""

    def __call__(self, peer: bytes, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """What repair may cost a trainer: percent of its step time and bytes copied per step; scrub_percent: the scrub's
    own share, 0 for no scrub; compare_every: steps from one comparison to the next, None for none."""

    percent: float = 1.0
    step_bytes: int = 64 << 20
    scrub_percent: float = 0.1
    compare_every: int | None = None


class Resync:
    """names: the job's run and epoch in messages; tell: sends a message to an agent; report: called with one line for a
    person; doubt: called with the reason why steps that were taken for known may be wrong."""

    def __init__(
        self,
        names: Mapping[str, Any],
        shadow: Shadow,
        budget: Budget,
        tell: Tell,
        report: Callable[[str], None],
        doubt: Callable[[str], None],
    ) -> None:
        self.agents = Agents()
        self.comparing = Comparing(shadow, self.agents, self._ask_sums, self._look, self._compared)
        self.compared: dict[str, Any] | None = None  # the newest comparison
        self._names = names
        self._shadow = shadow
        # Gradients keep these the same in all ranks; of anything else rank 0 has what a checkpoint would hold.
        self._shared = {f"model/{p.name}" for p in shadow.description.parameters if p.index is not None}
        self._budget = budget
        self._tell = tell
        self._report = report
        self._doubt = doubt
        self._repair = Repair(shadow, most_bytes=KEPT_BYTES, most_steps=KEPT_STEPS)
        self._patience = DEADLINE
        self._scrubbed: set[int] = set()  # parts that the scrub asked for last
        self._told_unknown = False
        self._told = -TOLD_EVERY
        self._blank = ""  # why nothing is known of a step's gradient, where that was so
        self._differences = 0  # elements of parameters and their state that a trainer had other bytes for
        self._alarm = ""  # the first that was not told yet ...
        self._alarms = 0  # ... of so many
        self._alarmed = -TOLD_EVERY
        self._not_before = 0  # when to ask next, after an answer that did not fit
        self._asked_groups = -ASK_EVERY
        self._last: int | None = None  # the trainers have ended with this step, and rank 0 waits for `done`
        self._scheduled = itertools.count(FIRST_COMPARISON)  # numbers of comparisons that nobody waits for

    # Events

    def applied(self, ready: StepReady, now: int) -> None:
        """The shadow has taken a step."""
        self._blank = f"step {ready.step}: {ready.blank}" if ready.blank else self._blank
        self._found(self._repair.applied(ready), now)
        self.comparing.applied(now)
        every = self._budget.compare_every
        if every and ready.step % every == 0 and len(self.agents) and not self.comparing.busy:
            self.comparing.start(next(self._scheduled), now)
        self._go_on(now)

    def arrived(self, number: int, step: int, sections: Mapping[str, Any], counter: bytes | None, now: int) -> None:
        """A part has come, as of the end of `step`."""
        self._patience = DEADLINE
        self._found(self._repair.arrived(number, step, sections, counter), now)
        self._go_on(now)

    def refused(self, peer: bytes, number: int, reason: str, now: int) -> None:
        """A part will not come from the agent that was asked."""
        self._repair.refused(number, reason)
        self.agents.rest(peer, now + ASK_EVERY)
        self._go_on(now)

    def gone(self, numbers: Sequence[int], now: int) -> None:
        """The agent that owed these parts has gone."""
        for number in numbers:
            self._repair.refused(number, "its agent is gone")
        self._go_on(now)

    def tick(self, now: int, usual: int, needs_groups: bool) -> None:
        """Time has passed. usual: how long a step of the job usually takes, ns; needs_groups: whether the param groups
        in force are not known, as the marker that told them was lost."""
        first = self.agents.first() if needs_groups and now - self._asked_groups >= ASK_EVERY else None
        if first is not None:
            self._asked_groups = now
            self._tell(first.peer, "groups-ask", **self._names)
        late = self._repair.expire(now, max(self._patience, DEADLINE_STEPS * usual))
        owed = self.agents.drop(late, missed=True)
        self._cancel(owed)
        if owed:
            self._patience = min(2 * self._patience, MOST_PATIENCE)  # steps may be longer than it seemed
        self.comparing.tick(now)
        self._go_on(now)

    def ends(self, step: int) -> None:
        """The trainers say that `step` was their last: rank 0 still gives what is asked for, until it hears `done`."""
        self._last = step
        self._finish()

    def done(self, step: int) -> bool:
        """Tell rank 0 that nothing more is asked of the state after `step`, its last one. From any thread; whether it
        is there."""
        first = self.agents.first()
        if first is not None:
            self._tell(first.peer, "repair-done", **self._names, step=step)
        return first is not None

    def _finish(self) -> None:
        shadow = self._shadow
        if self._last is not None and shadow.step >= self._last and shadow.live.known and self.done(self._last):
            self._last = None

    def takes(self, peer: bytes, number: int, key: str, lo: int, hi: int, nbytes: int) -> bool:
        """Whether this is a part that this peer was asked for. From any thread."""
        part = self.agents.answered(peer, number)
        return part is not None and (part.key, part.lo, part.hi) == (key, lo, hi) and nbytes <= part.nbytes

    # Asking

    def _go_on(self, now: int) -> None:
        if not self._repair.wanting:
            self.comparing.looked()
        if now >= self._not_before:
            self._ask(now)
        self._finish()
        self._say(now)

    def _ask(self, now: int) -> None:
        """Spread the next parts over the agents, unknown ones first; the scrub has one part on its way at a time."""
        unknown = bool(self._shadow.live.unknown) or self._repair.wanting
        if unknown and self._scrubbed:
            self._stop_scrub()
        agents = free = self.agents.ready(now)
        while free:
            free = [agent for agent in free if self._spread(agent, self._next(agent), self._budget.percent, now)]
        if agents and self._budget.scrub_percent and not unknown and not self._repair.outstanding:
            parts = self._repair.ask(CHUNK)
            self._scrubbed = {part.number for part in parts}
            self._spread(agents[0], parts, self._budget.scrub_percent, now)

    def _stop_scrub(self) -> None:
        """Parts that the scrub waits for must not come at its pace, nor before others, once there is more to do."""
        self._cancel(self.agents.drop(self._scrubbed))
        for number in self._scrubbed:
            self._repair.refused(number, "unknown parts go first")
        self._scrubbed = set()

    def _cancel(self, owed: Sequence[tuple[bytes, int]]) -> None:
        for peer in {peer for peer, _ in owed}:
            numbers = [number for who, number in owed if who == peer]
            for start in range(0, len(numbers), MAX_PARTS):
                self._tell(peer, "repair-cancel", numbers=numbers[start : start + MAX_PARTS])

    def _next(self, agent: Agent) -> list[Part]:
        room = 2 * self._budget.step_bytes - agent.owed_bytes
        if len(agent.owed) >= MOST_PARTS or room <= 0:
            return []
        return self._repair.ask(min(room, CHUNK), scrub=False)

    def _spread(self, agent: Agent, parts: Sequence[Part], percent: float, now: int) -> bool:
        """Ask this agent, and rank 0's for what may differ between ranks. Parts that nobody can be asked for are given
        up in time, as if they did not come."""
        own = [part for part in parts if agent.rank == 0 or part.key in self._shared]
        self._send(agent, own, percent)
        first = self.agents.first(now) if len(own) < len(parts) else None
        if first is not None:
            self._send(first, [part for part in parts if part.key not in self._shared], percent)
        return bool(parts)

    def _send(self, agent: Agent, parts: Sequence[Part], percent: float) -> None:
        self.agents.owe(agent, parts)
        limits = {"percent": percent, "step_bytes": self._budget.step_bytes}
        for start in range(0, len(parts), MAX_PARTS):
            asked = [[part.number, part.key, part.lo, part.hi] for part in parts[start : start + MAX_PARTS]]
            self._tell(agent.peer, "repair-ask", **self._names, parts=asked, **limits)

    # Comparing

    def _ask_sums(self, peer: bytes, number: int) -> None:
        self._tell(peer, "compare-ask", **self._names, ask=number)

    def _look(self, keys: Sequence[str]) -> None:
        self._repair.want(keys)

    def _compared(self, report: dict[str, Any]) -> None:
        self.compared = report
        differing = len(report["differing"]) + report["more"]
        if differing:
            names = ", ".join(entry["tensor"] for entry in report["differing"][:2])
            self._raise(f"step {report['step']}: {differing} tensors differ from the trainer's: {names}")
        elif report["problem"]:
            self._report(f"not compared with the trainers: {report['problem']}")

    def _found(self, findings: Sequence[Finding], now: int) -> None:
        self.comparing.found(findings)
        for finding in findings:
            if isinstance(finding, Difference):
                self._differences += finding.elements
            else:
                self._not_before = now + ASK_EVERY
            if not isinstance(finding, Difference) or finding.alarm:
                self._raise(finding.text)

    def _raise(self, alarm: str) -> None:
        self._alarm = self._alarm or alarm
        self._alarms += 1

    # Telling

    def status(self) -> dict[str, Any]:
        """Counters for `flowcheck status`."""
        repair = self._repair
        return {
            "asked": repair.asked,
            "bytes": repair.bytes,
            "outstanding": len(repair.outstanding),
            "repaired": repair.repaired,
            "compared": repair.compared,
            "differences": self._differences,
            "given_up": repair.given_up,
            "refusal": repair.refusal,
            "scrubbed": repair.scrubbed,
        }

    def _say(self, now: int) -> None:
        """Tell a person what went wrong, what is unknown, or that all is known again, but not at every step."""
        if self._alarms and now - self._alarmed >= TOLD_EVERY:
            more = f" (and {self._alarms - 1} more)" if self._alarms > 1 else ""
            self._report(f"ALARM: {self._alarm}{more}")
            self._doubt(self._alarm)
            self._alarm, self._alarms, self._alarmed = "", 0, now
        unknown = self._shadow.unknown
        if bool(unknown) == self._told_unknown or now - self._told < TOLD_EVERY:
            return
        self._told_unknown, self._told = bool(unknown), now
        if not unknown:
            self._report(f"every element is known again at step {self._shadow.step}")
            return
        agents = len(self.agents)
        then = f"asked of {agents} ranks" if agents else "no rank answers, they stay unknown until one does"
        why = f" ({self._blank})" if self._blank else ""
        where = "; ".join(places(unknown, 2))
        self._report(f"{unknown.elements} elements are unknown since step {unknown.oldest}{why}: {where}; {then}")
        self._blank = ""
