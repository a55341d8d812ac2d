"""From all-reduces and step markers to optimizer steps.

`StepTracker` follows one job (one attach). It tells the decoder what to do with each collective of DDP's process
group (`plan`) and turns the reduced buckets between two markers into `StepReady`. It has no clock and no thread: `now`
is passed in, in ns. Where a step's window lies: `reconstruct.horizon`; what is read in it: `reconstruct.marked`,
`reconstruct.unmarked`; which of its all-reduces are the buckets: `reconstruct.windows`.

Every step becomes one `StepReady`, in order. Bytes that the mirror lost cost their elements (`lost`), as long as it is
proven which all-reduces are the buckets; where it is not, nothing is known of the step's gradient (`blank`). Either way
the following goes on. It ends with a `StepLost` only where nothing is proven any more: the trainer says so, its words
contradict each other, or a step that was handed out proves wrong.

A step whose marker did not come is claimed unconfirmed where nothing is ambiguous: its marker is known to be lost (a
later one came, or the connection that they come on is gone), one reduction per step so far, hyper-parameters known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from flowcheck.description import JobDescription
from reconstruct import marked, unmarked
from reconstruct.decoder import (
    BROADCAST,
    IGNORE,
    POINT_TO_POINT,
    Conflict,
    Decoder,
    Event,
    LinkLost,
    Message,
    Plan,
    Request,
)
from reconstruct.handed import HandedOut
from reconstruct.horizon import ORDINARY, Horizon
from reconstruct.hyper import Fields, HyperParameters
from reconstruct.lr import Predictor
from reconstruct.markers import Canary, Marker
from reconstruct.reductions import MAX_REDUCTIONS
from reconstruct.shortfall import Shortfall
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
from reconstruct.verdicts import Blank, Take

__all__ = [
    "NO_WAITS", "Notice", "StepConfirmed", "StepLost", "StepReady", "StepTracker", "TrackerEvent", "Waits",
]

MAX_MARKERS = 1 << 16
MOST_BLANK = 64  # steps handed out and not yet applied beyond which no further one of a run of blank steps is

_POINT_TO_POINT = (
    "there is point-to-point traffic or monitored_barrier on DDP's process group: use another one, nothing is known of "
    "the gradient of a step whose place it makes uncertain"
)


class StepTracker:
    """Follows one job's process group. Raises nothing on bad traffic: it claims nothing instead.

    decoder: the one that holds the group `group`; predictor: hyper-parameters of steps without a marker;
    attached: when the job attached, ns of capture time, None if not known.
    """

    def __init__(
        self, description: JobDescription, group: str, decoder: Decoder, predictor: Predictor, waits: Waits,
        attached: int | None = None,
    ) -> None:  # fmt: skip
        self.description = description
        self.group = group
        self.ahead = description.step  # the newest step that the job is known to have finished
        self.lost: StepLost | None = None
        self.hole_bytes = 0
        self.shortfall = Shortfall(description)
        self._decoder = decoder
        self._waits = waits
        self._horizon = Horizon(description, group, decoder, waits, attached)
        self._layouts, self._table, self._markers = self._horizon.layouts, self._horizon.table, self._horizon.markers
        self._late: deque[tuple[Marker, int]] = deque()  # of steps that were claimed without them
        self._hyper = HyperParameters(description, predictor)
        self._linked = True  # the connection that markers come on stands
        self._last: int | None = None  # the trainers said that this is the last step ...
        self._over: int | None = None  # ... and since when that is known, ns
        self._silent = False  # markers stopped coming: do not wait for each
        self._guesses = Guesses()
        self._handed = HandedOut()
        self._blank = description.step, "", 0  # steps up to this one are blank, why, and since when that is known
        self._said: set[str] = set()
        self._events: list[TrackerEvent] = []
        self._detached = False

    @property
    def step(self) -> int:
        """The last step handed out."""
        return self._horizon.step

    @property
    def coverage(self) -> float:
        """Of the newest reduction: final bytes seen / bytes."""
        return self._horizon.coverage

    @property
    def needs_groups(self) -> bool:
        """Hyper-parameters changed and no marker that carries them has come: until one does steps are blank."""
        return self._hyper.needed

    # What the decoder asks and reports

    def plan(self, request: Request) -> Plan:
        """What to do with a collective whose first payload is about to arrive on one link."""
        if request.kind == POINT_TO_POINT:
            self._horizon.ran_apart()
            self._say("point-to-point", _POINT_TO_POINT)
            return IGNORE
        if self._last is not None and self.step >= self._last:
            return IGNORE
        return self._horizon.plan(request)

    def event(self, event: Event) -> None:
        """Take one event of the decoder for this group."""
        if isinstance(event, Message):
            if event.kind == BROADCAST and event.data is not None and event.complete:
                self._layouts.broadcast(event.tag, event.data)
        elif isinstance(event, Conflict):
            self._conflict(event)
        elif isinstance(event, LinkLost):
            self._horizon.link_lost(event)
            if not event.reason.startswith(ORDINARY):
                self._say(event.reason[:24], f"link from rank {event.sender} to rank {event.receiver}: {event.reason}")

    def _conflict(self, event: Conflict) -> None:
        end = event.offset + event.length
        link = f"from rank {event.sender}" + (f", found while {event.source} was read" if event.source else "")
        where = f"all-reduce {event.tag}: two copies of bytes {event.offset}..{end} differ ({link})"
        if self._handed.holds(event.tag):
            step = self._handed.contradicted(event)
            if step is not None:
                self._lose(step, f"{where}, seen after it was applied: restore an earlier step")
        else:
            self._say(f"conflict {event.tag}", f"{where}: taken for lost; look for memory or link errors")

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
        self._layouts.settled(self._horizon.steps, self._horizon.start)

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
        self._hyper.hear(marker)
        if marker.step <= max(self.step, self._blank[0]):
            if len(self._late) < MAX_MARKERS:
                self._late.append((marker, now))
        elif len(self._markers) < MAX_MARKERS:
            self._markers[marker.step] = (marker, now)

    def _confirm_late(self, marker: Marker) -> None:
        """A step that is done with without its marker: all that its marker speaks of has been captured by now."""
        end = self._horizon.numbers.end(marker.sequence)
        more = any(True for _ in self._table.within(self._horizon.start, end))
        verdict = self._guesses.confirm(marker, end, more, self._hyper.groups, self._hyper.version)
        if verdict:
            self._lose(marker.step, f"its marker came after it was applied and {verdict}: restore an earlier step")
            return
        self._hyper.take(marker)
        if verdict is not None:
            self._events.append(StepConfirmed(marker.step))

    # Steps

    def poll(self, now: int, final: bool = False) -> list[TrackerEvent]:
        """Every step that can be handed out now. final: nothing more will come, wait for nothing."""
        waits = NO_WAITS if final else self._waiting(now)
        while self._late and self.lost is None and now - self._late[0][1] > waits.traffic:
            self._confirm_late(self._late.popleft()[0])
        while self.lost is None and self._next(now, waits):
            pass
        if self.lost is not None:
            self._late.clear()
            start = self._horizon.abandon(now, waits)
            if not self._handed:
                self._decoder.retire(self.group, start)
        elif self._table.drop():
            self._say("flood", f"over {MAX_REDUCTIONS} all-reduces of a bucket's size and no optimizer step")
            if not self._handed:
                self._decoder.retire(self.group, self._table.dropped)
        events, self._events = self._events, []
        return events

    def _waiting(self, now: int) -> Waits:
        """How long to wait now. Where nothing follows the last step, trainers that end wait for what it lacks: what the
        mirror has not shown a while after their last word is asked of them instead."""
        if self._last is not None and self._over is None:
            self._over = now
        if self._over is None or now - self._over <= self._waits.traffic:
            return self._waits
        return replace(self._waits, patience=self._waits.traffic)

    def _next(self, now: int, waits: Waits) -> bool:
        """Try the next step; True when it was handed out."""
        if self.step < self._blank[0]:
            return len(self._handed) < MOST_BLANK and self._pass_over(self._horizon.start, None)
        held = self._markers.get(self.step + 1)
        if held is not None:
            return self._marked(held[0], held[1], now, waits)
        return self._unmarked(self.step + 1, now, waits)

    def _marked(self, marker: Marker, arrived: int, now: int, waits: Waits) -> bool:
        if marker.problem is not None:
            return self._lose(marker.step, marker.problem)
        verdict = marked.judge(self._horizon, marker, arrived, self.ahead, now, waits)
        if verdict is None:
            return False
        if isinstance(verdict, Blank):
            return self._skip(marker, arrived, verdict)
        groups = self._hyper.of(marker)
        if groups is None:
            self._horizon.taken(verdict, marker.sequence)
            self._blank = marker.step, "a marker with changed hyper-parameters was lost", arrived
            return self._pass_over(verdict.end, marker.rebuilt)
        if not self._hyper.agree(marker.step, groups) and self._guesses.doubtful is not None:
            return self._lose(
                self._guesses.doubtful,
                f"the marker of step {marker.step} shows that its hyper-parameters were not those it was applied with: "
                "restore an earlier step",
            )
        self._hyper.take(marker)
        self._horizon.taken(verdict, marker.sequence)
        self._guesses.proven()
        return self._claim(marker.step, True, verdict, groups, marker.canaries, marker.rebuilt)

    def _unmarked(self, step: int, now: int, waits: Waits) -> bool:
        if self._last is not None and step > self._last:
            return False
        number = min((s for s in self._markers if s > step), default=None)
        if number is None and self._linked and waits is not NO_WAITS:
            return False
        later = None if number is None else self._markers[number]
        verdict = unmarked.judge(self._horizon, later, self.ahead, self._silent, now, waits)
        if verdict is None:
            return False
        marker = None if later is None else later[0]
        fields = self._hyper.unmarked(step, marker) if isinstance(verdict, Take) else None
        reason = verdict.reason if isinstance(verdict, Blank) else self._hyper.missing
        if later is None and fields is None:
            # Whether this was a step is not known either.
            self._say("no marker", f"step {step}: {reason}; nothing follows until a marker comes")
            return False
        if isinstance(verdict, Blank):
            return later is not None and self._skip(*later, verdict)
        self._silent = later is None
        self._horizon.taken(verdict, None)
        if fields is None:
            self._blank = step, reason, self._horizon.time(verdict)
            return self._pass_over(verdict.end, None)
        tags, predicted = verdict.tags, not self._hyper.unchanged(marker)
        self._guesses.add(step, Guess(tags[0], tags[-1], fields, predicted))
        return self._claim(step, False, verdict, fields, (), None)

    def _claim(
        self, step: int, confirmed: bool, take: Take, groups: Fields, canaries: tuple[Canary, ...], rebuilt: bool | None
    ) -> bool:
        """Hand out a step with what is known of its gradient."""
        time, found = self._horizon.time(take), self._horizon.gather(take)
        missing = sum(gone.total for gone in found.missing)
        self.hole_bytes += missing
        if missing:
            causes = partial(self._decoder.causes, self.group)
            self.shortfall.take(step, take.layout, take.tags, found.missing, causes)
        unknown = {tag: gone for tag, gone in zip(take.tags, found.missing, strict=True) if gone}
        self._handed.add(step, self._horizon.go_on(step, take.end, rebuilt), unknown)
        whole = step, confirmed, found.values, groups, canaries, time, take.layout.nbytes
        self._events.append(StepReady(*whole, found.lost, found.holes))
        return True

    def _skip(self, marker: Marker, arrived: int, blank: Blank) -> bool:
        """Nothing tells the gradient of the steps up to this marker's."""
        if marker.problem is not None:
            return self._lose(marker.step, marker.problem)
        self._hyper.take(marker)
        self._horizon.skipped(blank, marker.sequence)
        self._blank = marker.step, blank.reason, arrived
        return self._pass_over(blank.end, marker.rebuilt)

    def _pass_over(self, end: int, rebuilt: bool | None) -> bool:
        """Hand out the next step, of whose gradient nothing is known."""
        step, (_, reason, time) = self.step + 1, self._blank
        self._handed.add(step, self._horizon.go_on(step, end, rebuilt), {})
        self._events.append(StepReady(step, True, {}, self._hyper.groups, (), time, 0, blank=reason))
        return True

    def applied(self, step: int) -> None:
        """The gradients of `step` and of the steps before it are no longer needed."""
        behind = self._handed.applied(step)
        if behind is not None and not self._detached:
            self._decoder.retire(self.group, behind if self._handed else max(behind, self._table.dropped))

    def detach(self) -> None:
        """The decoder no longer holds the group. Gradients that were handed out stay valid."""
        self._detached = True

    @property
    def pending(self) -> int:
        """Steps handed out whose gradients are still held."""
        return len(self._handed)

    @property
    def step_bytes(self) -> int:
        """Gradient bytes of one step."""
        return self._layouts.initial.nbytes

    def _lose(self, step: int, reason: str) -> bool:
        claimed = step <= self.step
        if self.lost is None or (claimed and not self.lost.claimed):
            self.lost = StepLost(step, f"step {step}: {reason}", claimed)
            self._events.append(self.lost)
        return False
