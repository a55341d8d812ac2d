"""From all-reduces and step markers to optimizer steps.

`StepTracker` follows one job (one attach). It tells the decoder what to do with each collective of DDP's process
group (`plan`) and turns the reduced buckets between two markers into `StepReady`. It has no clock and no thread: `now`
is passed in, in ns.

Tags: a process group numbers its collectives; a marker's sequence number is, but for `reconstruct.numbering`, the
next tag, so the collectives of step s have tags in [sequence of s-1, sequence of s). Which of them are the buckets:
`reconstruct.windows`.

A step becomes `StepReady` when every bucket is complete. If one cannot be completed any more the tracker emits one
`StepLost` and claims nothing after it: without that step's gradient no later state follows. A step whose marker did
not come is claimed unconfirmed where nothing is ambiguous: its marker is known to be lost (a later one came, or the
connection that they come on is gone), one reduction per step so far, hyper-parameters known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from flowcheck.description import JobDescription
from reconstruct.buckets import Layout, reduced_specs
from reconstruct.counts import Counts, Window, surplus, surveyed
from reconstruct.decoder import (
    ALLREDUCE,
    BROADCAST,
    IGNORE,
    NOT_THIS_SIZE,
    POINT_TO_POINT,
    RAW,
    Conflict,
    Decoder,
    Event,
    LinkLost,
    Message,
    Plan,
    Request,
)
from reconstruct.layouts import Layouts
from reconstruct.lr import Predictor
from reconstruct.markers import Canary, Marker
from reconstruct.numbering import FOREVER, Numbering
from reconstruct.reductions import MAX_REDUCTIONS, Reductions
from reconstruct.step_events import (
    NO_WAITS,
    Notice,
    StepConfirmed,
    StepLost,
    StepReady,
    TrackerEvent,
    Waits,
)
from reconstruct.unconfirmed import Guess, Guesses
from reconstruct.windows import choose, probes_of

__all__ = [
    "NO_WAITS", "Notice", "StepConfirmed", "StepLost", "StepReady", "StepTracker", "TrackerEvent", "Waits",
]

MAX_MARKERS = 1 << 16
NCCL_PADDING = 1919
"""LL128 sends whole groups of 1920 bytes; what lies behind a tensor's end in the last one is no part of it."""
LAYOUT_STEPS = 4
"""DDP logs a rebuilt layout one step after the first that uses it; a report is not given up before so many steps."""

_POINT_TO_POINT = (
    "there is point-to-point traffic or monitored_barrier on DDP's process group: use another one, a step whose "
    "place it makes uncertain is not claimed"
)
_ORDINARY = (NOT_THIS_SIZE, "a gap swallowed", "the connection ended", "it began before")
Fields = tuple[Mapping[str, Any], ...]


class StepTracker:
    """Follows one job's process group. Raises nothing on bad traffic: it claims nothing instead.

    decoder: the one that holds the group `group`; predictor: hyper-parameters of steps without a marker;
    attached: when the job attached, ns of capture time, None if not known.
    """

    def __init__(
        self,
        description: JobDescription,
        group: str,
        decoder: Decoder,
        predictor: Predictor,
        waits: Waits,
        attached: int | None = None,
    ) -> None:
        self.description = description
        self.group = group
        self.step = description.step  # the last step claimed
        self.ahead = description.step  # the newest step that the job is known to have finished
        self.lost: StepLost | None = None
        self.coverage = 0.0  # of the newest reduction: final bytes seen / bytes
        self.confirmed = 0  # steps claimed with their marker
        self.hole_bytes = 0
        self._decoder = decoder
        self._predictor = predictor
        self._waits = waits
        self._specs = reduced_specs(description)
        padding = NCCL_PADDING if description.group.backend == "nccl" else 0
        self._layouts = Layouts(description.ddp, self._specs, padding)
        self._table = Reductions(group, decoder)
        self._numbers = Numbering(description.group.sequence, decoder.max_tag(group), attached)
        self._counts = Counts(every=description.group.backend != "nccl")
        self._gaps: dict[tuple[int, int], int] = decoder.gaps(group)
        self._markers: dict[int, tuple[Marker, int]] = {}
        self._late: deque[tuple[Marker, int]] = deque()  # of steps that were claimed without them
        self._groups: Fields = tuple(g.fields for g in description.optimizer.groups)
        self._version = 0
        self._linked = True  # the connection that markers come on stands
        self._last: int | None = None  # the trainers said that this is the last step
        self._silent = False  # markers stopped coming: do not wait for each
        self._plain = True  # every step so far was one reduction
        self._guesses = Guesses()
        self._pending: deque[tuple[int, int, int]] = deque()  # claimed, not yet applied: step and its tags [start, end)
        self._said: set[str] = set()
        self._link_losses: dict[int, str] = {}
        self._events: list[TrackerEvent] = []
        self._detached = False

    # What the decoder asks and reports

    def plan(self, request: Request) -> Plan:
        """What to do with a collective whose first payload is about to arrive on one link."""
        if request.kind == POINT_TO_POINT:
            self._say("point-to-point", _POINT_TO_POINT)
            return IGNORE
        if not self._numbers.see(request) or (self._last is not None and self.step >= self._last):
            return IGNORE
        self._table.note(request)
        if request.kind == BROADCAST:
            return RAW if self._layouts.wanted(request.length) else IGNORE
        if request.kind != ALLREDUCE:
            return IGNORE
        return self._table.plan(request, self._layouts.at(request.tag, self._passes(request.tag)))

    def _passes(self, tag: int) -> int:
        """How many reductions with the initial layout may be over before `tag`: an upper bound."""
        used = sum(1 for t in self._table.held if t < tag)
        return self.step - self.description.step + used // len(self._layouts.initial.buckets)

    def event(self, event: Event) -> None:
        """Take one event of the decoder for this group."""
        if isinstance(event, Message):
            if event.kind == BROADCAST and event.data is not None and event.complete:
                self._layouts.broadcast(event.tag, event.data)
        elif isinstance(event, Conflict):
            self._conflict(event)
        elif isinstance(event, LinkLost):
            for tag in event.tags:
                self._link_losses[tag] = event.reason
                if event.reason.startswith(NOT_THIS_SIZE):
                    self._table.exclude(tag)
            while len(self._link_losses) > 256:
                del self._link_losses[next(iter(self._link_losses))]
            if not event.reason.startswith(_ORDINARY):
                self._say(event.reason[:24], f"link from rank {event.sender} to rank {event.receiver}: {event.reason}")

    def _conflict(self, event: Conflict) -> None:
        end = event.offset + event.length
        where = f"all-reduce {event.tag}: two copies of bytes {event.offset}..{end} differ (from rank {event.sender})"
        for step, first, behind in self._pending:
            if first <= event.tag < behind:
                self._lose(step, f"{where}, seen after it was applied: restore an earlier step")
                return
        self._say(f"conflict {event.tag}", f"{where}: its step is not claimed; look for memory or link errors")

    def _say(self, key: str, text: str) -> None:
        """Notice something once."""
        if key not in self._said and len(self._said) < 256:
            self._said.add(key)
            self._events.append(Notice(text))

    # What the trainer says

    def reported_layout(self, indices: Sequence[Sequence[int]], nbytes: Sequence[int]) -> None:
        """Take the rebuilt layout that rank 0 read from DDP's logging data: parameter indices and bytes per bucket.

        Where the wire showed one already the two must agree; a disagreement ends the following of the job.
        """
        problem = self._layouts.report(indices, nbytes)
        if problem is not None:
            self._lose(self.step + 1, problem)
        self._layouts.settled(self.step - self.description.step, self._start)

    def contradicted(self, reason: str) -> None:
        """The job is not what its description says: no step of it is to be believed, whenever it was claimed."""
        self._lose(self.description.step + 1, reason)

    def linked(self, alive: bool) -> None:
        """The connection that markers come on stands, or is gone and markers may be lost."""
        self._linked = alive

    def ends(self, step: int) -> None:
        """The trainers say that `step` was the last step: reductions after it belong to none."""
        self._last = step

    def marker(self, marker: Marker, now: int) -> None:
        """Take a step marker. Markers of steps already claimed confirm them or contradict them."""
        if self._detached:
            return
        self.ahead = max(self.ahead, marker.step)
        if marker.step <= self.description.step or marker.step in self._markers:
            return
        self._silent = False
        if marker.step <= self.step:
            if len(self._late) < MAX_MARKERS:
                self._late.append((marker, now))
        elif len(self._markers) < MAX_MARKERS:
            self._markers[marker.step] = (marker, now)

    def _confirm_late(self, marker: Marker) -> None:
        """A step that was claimed without its marker: all that its marker speaks of has been captured by now."""
        end = self._numbers.end(marker.sequence)
        more = any(True for _ in self._table.within(self._start, end))
        verdict = self._guesses.confirm(marker, end, more, self._groups, self._version)
        if verdict is None:
            return
        if verdict:
            self._lose(marker.step, f"its marker came after it was applied and {verdict}: restore an earlier step")
            return
        if marker.groups is not None and marker.version >= self._version:
            self._groups, self._version = marker.groups, marker.version
        self.confirmed += 1
        self._events.append(StepConfirmed(marker.step))

    # Claiming steps

    def poll(self, now: int, final: bool = False) -> list[TrackerEvent]:
        """Every step that can be claimed now. final: nothing more will come, wait for nothing."""
        waits = NO_WAITS if final else self._waits
        while self._late and self.lost is None and now - self._late[0][1] > waits.traffic:
            self._confirm_late(self._late.popleft()[0])
        while self.lost is None and self._next(now, waits):
            pass
        if self.lost is None and len(self._table.held) > MAX_REDUCTIONS:
            self._lose(self.step + 1, f"over {MAX_REDUCTIONS} all-reduces of a bucket's size and no optimizer step")
        if self.lost is not None:
            self._late.clear()
            self._forget(now, waits)
        events, self._events = self._events, []
        return events

    def _next(self, now: int, waits: Waits) -> bool:
        """Try the next step; True when it was claimed."""
        step = self.step + 1
        held = self._markers.get(step)
        if held is not None:
            return self._marked(held[0], held[1], now, waits)
        return self._unmarked(step, now, waits)

    def _marked(self, marker: Marker, arrived: int, now: int, waits: Waits) -> bool:
        if marker.problem is not None:
            return self._lose(marker.step, marker.problem)
        if marker.groups is None and marker.version != self._version:
            return self._lose(marker.step, "a marker with changed hyper-parameters was lost")
        groups = self._groups if marker.groups is None else marker.groups
        waited = now - arrived
        end, until = self._bounds(marker, arrived)
        reading = self._reading(marker.rebuilt, end)
        if reading is None:
            if waited > waits.patience and (self.ahead >= marker.step + LAYOUT_STEPS or waits is NO_WAITS):
                return self._lose(marker.step, "the rebuilt bucket layout was neither on the wire nor reported")
            return False
        current, first = reading
        candidates = self._table.candidates(current, first, end, until)
        probes = probes_of(self.description, current, marker.canaries)
        undecided = self._table.undecided(current, first, end, until)
        # The mirror has not shown all of the window yet: nothing would contradict an earlier reduction taken for the
        # step's.
        behind = bool(undecided) or self._decoder.max_tag(self.group) < end - 1
        blind = not probes and (behind or end < self._numbers.end(marker.sequence))
        if blind and waited <= waits.patience:
            return False
        if self._waits_for(current, candidates, behind, waited, waits):
            return False
        self._cover(current, candidates)
        unseen = self._unseen(end) | undecided
        if blind:
            return self._lose(
                marker.step, "its last collectives were not seen and no element of the gradient was reported to check"
            )
        choice = choose(current, candidates, self._table.landing, probes, unseen)
        if choice.problem is not None:
            if (unseen or behind) and waited <= waits.patience:
                return False  # the mirror is late: what it has not shown yet may be the step's reduction
            return self._lose(marker.step, self._why(marker, arrived, candidates, behind, choice.problem))
        if not all(self._table.complete(tag) for tag in choice.tags):
            return self._lose_incomplete(marker.step, current, choice.tags)
        window = self._window(current, len(candidates), end, arrived, now, waits)
        later = self._later(marker.step, now, waits)
        if not any(any(probe.bits) for probe in probes):
            problem = self._counts.problem(window, later, self._table.seen)
            if problem is not None:
                # The capture may not have come to the marker yet, and a later marker may show that this one was late.
                return False if waited <= waits.patience else self._lose(marker.step, problem)
        if not self._predictor.observe(marker.step, [dict(g) for g in groups]) and self._guesses.doubtful is not None:
            return self._lose(
                self._guesses.doubtful,
                f"the marker of step {marker.step} shows that its hyper-parameters were not those it was applied with: "
                "restore an earlier step",
            )
        self._plain = self._plain and len(candidates) == len(current.buckets)
        self._groups, self._version = groups, marker.version
        self._numbers.marked(marker.sequence, end, self._decoder.max_tag(self.group), until)
        self._counts.claimed(window, later, self._table.seen, self._decoder.decided(self.group) >= end)
        self._guesses.proven()
        self.confirmed += 1
        return self._claim(marker.step, True, current, choice.tags, groups, marker.canaries, end)

    def _bounds(self, marker: Marker, arrived: int) -> tuple[int, int]:
        """(end of the window in tags, time after which nothing that is first seen belongs to it)."""
        if "point-to-point" not in self._said:
            return self._numbers.end(marker.sequence), FOREVER  # copies may come long after a marker
        until = arrived + self._waits.traffic
        return self._numbers.bounds(marker.sequence, until, self._table.seen), until

    def _reading(self, rebuilt: bool | None, end: int) -> tuple[Layout, int] | None:
        """(layout of the step's reduction, first tag that it can have)."""
        behind = self._layouts.first_tag
        more = behind is not None and any(tag >= behind for tag in self._table.within(self._start, end))
        reading = self._layouts.of_step(rebuilt, self.step - self.description.step, more)
        return None if reading is None else (reading[0], max(reading[1], self._start))

    def _next_pass(self) -> tuple[Layout, int, int] | None:
        """(layout, first tag, end) of the reduction behind the last claimed step."""
        behind = self._layouts.first_tag
        if behind is not None and any(True for _ in self._table.within(self._start, behind)):
            return self._layouts.initial, self._start, behind
        reading = self._layouts.of_step(True if behind is not None else None, self.step - self.description.step, False)
        return None if reading is None else (reading[0], max(reading[1], self._start), FOREVER)

    def _waits_for(
        self, current: Layout, candidates: Sequence[tuple[int, int]], behind: bool, waited: int, waits: Waits
    ) -> bool:
        """Whether something of a marker's window may still come and is worth waiting for."""
        if behind and waited <= waits.traffic:
            return True
        open_ = [tag for tag, _ in candidates if not self._table.settled(tag)]
        if open_ and waited <= waits.traffic:
            return True  # a second copy may still contradict the first
        short = len(candidates) < len(current.buckets) or not all(self._table.complete(tag) for tag in open_)
        return short and waited <= waits.patience

    def _window(self, current: Layout, candidates: int, end: int, arrived: int, now: int, waits: Waits) -> Window:
        """What c10d counted up to a marker, of which one reduction is the step's."""
        buckets = len(current.buckets)
        own = buckets + self._broadcasts(end)
        came = self._came(end, arrived, now, waits)
        return Window(end - self._start, own, buckets, candidates - buckets, end, came)

    def _came(self, end: int, arrived: int, now: int, waits: Waits) -> int | None:
        """When a marker came, once it is known what the wire had shown by then."""
        if now < arrived and waits is not NO_WAITS:
            return None
        known = surveyed(self._decoder, self.group, end, self._layouts.least, self._table.seen)
        return arrived if known else None

    def _broadcasts(self, end: int) -> int:
        """DDP's broadcasts of its layout with tags from the first that no claimed step has used on, up to `end`."""
        behind = self._layouts.first_tag
        return 2 if behind is not None and self._start + 2 <= behind <= end else 0

    def _later(self, step: int, now: int, waits: Waits) -> list[tuple[int, int]]:
        """(end, arrived) of the markers behind that of `step` which the capture has come to."""
        later = []
        for number, (marker, arrived) in self._markers.items():
            end = self._numbers.end(marker.sequence)
            if number > step and self._came(end, arrived, now, waits) is not None:
                later.append((end, arrived))
        return later

    def _why(
        self, marker: Marker, arrived: int, candidates: Sequence[tuple[int, int]], behind: bool, problem: str
    ) -> str:
        end = self._numbers.end(marker.sequence)
        if behind:
            problem = f"the mirror has not shown all of collectives {self._start}..{end - 1}; of those shown, {problem}"
        losses = [self._link_losses[t] for t in self._table.within(self._start, end) if t in self._link_losses]
        grouped = None if self._counts.every else surplus(self._table.seen, end, arrived)
        if grouped is not None:
            problem = f"{problem}; {grouped}"
        if candidates or grouped is not None:
            return f"{problem} ({losses[0]})" if losses else problem
        if not self._decoder.links(self.group):
            return "no all-reduce traffic of this job reaches the mirror: mirror a port of one of its nodes"
        return (
            f"it was reported but collectives {self._start}..{end - 1} show no bucket of it (accumulation without "
            "reduction, a repeated optimizer step, or point-to-point traffic on DDP's process group)"
        )

    def _unmarked(self, step: int, now: int, waits: Waits) -> bool:
        if self._last is not None and step > self._last:
            return False
        later = min((s for s in self._markers if s > step), default=None)
        if later is None and self._linked and waits is not NO_WAITS:
            return False
        end = until = FOREVER
        patient = False
        if later is not None:
            marker, arrived = self._markers[later]
            end, until = self._bounds(marker, arrived)
            if self._decoder.max_tag(self.group) < end - 1 and now - arrived <= waits.traffic:
                return False
            patient = now - arrived <= waits.patience
        reading = self._next_pass()
        if reading is None:
            oldest = min((reduction.time for reduction in self._table.held.values()), default=now)
            if self._table.held and now - oldest > 3 * waits.patience:
                self._lose(step, "its marker and the rebuilt bucket layout are missing")
            return False
        current, first, stop = reading
        candidates = self._table.candidates(current, first, min(end, stop), until)
        mine = candidates[: len(current.buckets)]
        tags = tuple(tag for tag, _ in mine)
        if not mine or (later is None and len(mine) < len(current.buckets)):
            return False
        since = now - max(self._table.time(tag) for tag in tags)
        open_ = [tag for tag in tags if not self._table.settled(tag)]
        if len(mine) < len(current.buckets) or not all(self._table.complete(tag) for tag in tags):
            waiting = patient if later is not None else since <= waits.marker or bool(open_)
            # At the end of the input a job that died in the middle of a step has lost nothing.
            if not waiting and (later is not None or waits is not NO_WAITS or len(candidates) > len(mine)):
                self._cover(current, mine)
                self._lose_incomplete(step, current, tags)
            return False
        if later is None and not self._silent and since <= waits.marker:
            return False
        if open_ and since <= waits.traffic:
            return False
        missing, window = 0, None
        if later is not None:
            missing, due = self._missing(later - step + 1, end, until)
            came = self._came(end, arrived, now, waits)
            window = Window(end - self._start, due + self._broadcasts(end), 0, 0, end, came)
        if missing > 0 and patient:
            return False
        cut = later is not None and end < self._numbers.end(self._markers[later][0].sequence)
        if (
            not self._plain
            or cut
            or [size for _, size in mine] != [bucket.nbytes for bucket in current.buckets]
            or missing
            or self._unseen(tags[-1])
        ):
            return self._lose(step, "its marker is missing and its all-reduces do not tell the step's end")
        if window is not None and later is not None:
            problem = self._counts.problem(window, self._later(later, now, waits), self._table.seen)
            if problem is not None:
                return False if patient else self._lose(step, f"its marker is missing: {problem}")
        fields = self._predictor.fields(step)
        if fields is None:
            return self._lose(step, "its marker is missing and its hyper-parameters cannot be known without it")
        self._silent = later is None
        self._numbers.unmarked()
        self._counts.unmarked(tags[-1] + 1 - self._start == len(tags) + self._broadcasts(tags[-1] + 1))
        self._guesses.add(step, Guess(tags[0], tags[-1], tuple(fields)))
        return self._claim(step, False, current, tags, tuple(fields), (), tags[-1] + 1)

    # Pieces

    @property
    def _start(self) -> int:
        return self._numbers.start

    def _missing(self, count: int, end: int, until: int) -> tuple[int, int]:
        """How many all-reduces the window lacks if it holds `count` steps of one reduction each (negative: too many),
        and how many these steps have."""
        parts = self._layouts.of_steps(self.step - self.description.step, count, self._start)
        if parts is None:
            return -1, 0
        missing = due = 0
        for number, (current, first, steps) in enumerate(parts):
            stop = parts[number + 1][1] or end if number + 1 < len(parts) else end
            found = self._table.candidates(current, max(first, self._start), stop, until)
            due += steps * len(current.buckets)
            missing += steps * len(current.buckets) - len(found)
        return missing, due

    def _unseen(self, end: int) -> set[int]:
        """Tags of the window that may be all-reduces although nothing was seen of them."""
        tags = self._table.unseen(self._start, end)
        if not tags:
            return tags
        gaps, contexts = self._decoder.gaps(self.group), max(1, len(self.description.group.contexts))
        sound = {context for (context, sender), n in gaps.items() if n == self._gaps.get((context, sender), 0)}
        newest = self._decoder.max_tag(self.group)  # a link that lost nothing vouches for no more than it has shown
        return {tag for tag in tags if tag > newest or tag % contexts not in sound}

    def _cover(self, current: Layout, candidates: Sequence[tuple[int, int]]) -> None:
        held = [self._table.landing(tag) for tag, _ in candidates[-len(current.buckets) :]]
        self.coverage = min(1.0, sum(x.covered for x in held if x is not None) / max(1, current.nbytes))

    def _claim(
        self,
        step: int,
        confirmed: bool,
        current: Layout,
        tags: tuple[int, ...],
        groups: Fields,
        canaries: tuple[Canary, ...],
        end: int,
    ) -> bool:
        gradients = self._table.gradients(current, tags, self._specs)
        self.coverage = 1.0
        time = max(self._table.time(tag) for tag in tags)
        self.step = step
        self._markers.pop(step, None)
        # Only what was seen is retired: a number that ran ahead of the tags must not hide the next step's collectives.
        self._pending.append((step, self._start, min(end, self._decoder.max_tag(self.group) + 1)))
        self._numbers.start = end
        self._table.forget(end)
        self._layouts.settled(step - self.description.step, end)
        self._gaps = self._decoder.gaps(self.group)
        self._events.append(StepReady(step, confirmed, gradients, groups, canaries, time, current.nbytes))
        return True

    def applied(self, step: int) -> None:
        """The gradients of `step` and of the steps before it are no longer needed."""
        while self._pending and self._pending[0][0] <= step:
            _, _, end = self._pending.popleft()
            if not self._detached:
                self._decoder.retire(self.group, end)

    def detach(self) -> None:
        """The decoder no longer holds the group. Gradients that were handed out stay valid."""
        self._detached = True

    @property
    def pending(self) -> int:
        """Steps claimed whose gradients are still held."""
        return len(self._pending)

    @property
    def step_bytes(self) -> int:
        """Gradient bytes of one step."""
        return self._layouts.initial.nbytes

    def _lose_incomplete(self, step: int, current: Layout, tags: tuple[int, ...]) -> bool:
        for number, tag in enumerate(tags):
            held = self._table.landing(tag)
            if held is not None and held.poisoned:
                what = "came in two copies that differ" if held.conflicts else "proved to have another size"
                return self._lose(step, f"bucket {number} (all-reduce {tag}) {what}")
        holes = self._table.holes(current, tags)
        lost = sum(length for _, _, length in holes)
        self.hole_bytes += lost
        told = next((self._link_losses[tag] for tag in tags if tag in self._link_losses), None)
        why = "" if told is None else f" ({told})"
        return self._lose(
            step, f"{lost} of {current.nbytes} gradient bytes were on no mirrored link{why}", tuple(holes)
        )

    def _lose(self, step: int, reason: str, holes: tuple[tuple[int, int, int], ...] = ()) -> bool:
        claimed = step <= self.step
        if self.lost is None or (claimed and not self.lost.claimed):
            self.lost = StepLost(step, f"step {step}: {reason}", holes, claimed)
            self._events.append(self.lost)
        return False

    def _forget(self, now: int, waits: Waits) -> None:
        """After a loss: measure coverage of what still comes and free it."""
        due = sorted(s for s, (_, arrived) in self._markers.items() if now - arrived > waits.traffic)
        for step in due[:-1]:  # the newest stays: windows end at it
            marker, _ = self._markers.pop(step)
            current = self._layouts.rebuilt if self._layouts.rebuilt is not None else self._layouts.initial
            end = self._numbers.end(marker.sequence)
            candidates = self._table.candidates(current, self._start, end, FOREVER)
            if candidates:
                self._cover(current, candidates)
            self._numbers.start = max(self._start, end)
        if not due and self._table.held:
            newest, buckets = max(self._table.held), len(self._layouts.initial.buckets)
            self._numbers.start = max(self._start, newest - 4 * buckets - 64)
        self._table.forget(self._start)
        if not self._pending:
            self._decoder.retire(self.group, self._start)
