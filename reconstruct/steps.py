"""From all-reduces and step markers to optimizer steps.

`StepTracker` follows one job (one attach). It tells the gloo decoder what to do with each collective of DDP's process
group (`plan`), learns the rebuilt bucket layout from rank 0's two broadcasts or from a report, and turns the reduced
buckets between two markers into `StepReady`. It has no clock and no thread: `now` is passed in, in ns.

Tags: a process group numbers its collectives from 0; a marker's sequence number is the next tag, so the collectives of
step s have tags in [sequence of step s-1, sequence of step s). Which of them are the buckets: `reconstruct.windows`.

A step becomes `StepReady` when every bucket is complete. If one cannot be completed any more the tracker emits one
`StepLost` and claims nothing after it: without that step's gradient no later state follows. A step whose marker did
not come is claimed unconfirmed where nothing is ambiguous: one reduction per step so far, hyper-parameters known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowcheck.description import JobDescription
from reconstruct import schedule
from reconstruct.buckets import (
    Layout,
    LayoutError,
    layout,
    looks_like_order,
    parse_rebuilt,
    reduced_specs,
)
from reconstruct.gloo import IGNORE, RAW, AllReduce, Conflict, Event, GlooDecoder, Message, Plan, Request
from reconstruct.landing import Landing
from reconstruct.lr import Predictor
from reconstruct.markers import Canary, Marker
from reconstruct.windows import Probe, choose

ALLREDUCE, BROADCAST = 4, 6
SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Waits:
    """How long, in ns of capture time, the tracker waits for what may still come.

    Capture time is the time up to which frames were processed, so a backlog is never taken for a loss.

    marker: for a step's marker after its last bucket; traffic: for collectives of a marker's window that no link has
    shown yet; patience: for the missing bytes of a bucket. Negative at the end of the input: nothing more can come.
    """

    marker: int = 2 * SECOND
    traffic: int = SECOND // 5
    patience: int = 10 * SECOND


@dataclass(frozen=True, slots=True)
class StepReady:
    """Every gradient of optimizer step `step`.

    gradients: DDP parameter index -> uint8 view of its elements in memory order, valid until `applied(step)`;
    groups: every field of every param group in force; time: ns, kernel time of the last needed byte.
    """

    step: int
    confirmed: bool
    gradients: Mapping[int, np.ndarray]
    groups: tuple[Mapping[str, Any], ...]
    canaries: tuple[Canary, ...]
    time: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepLost:
    """Step `step` cannot be rebuilt, or, if `claimed`, was handed out and turned out wrong.

    holes: (bucket, byte offset, length) of what is missing of it, where known.
    """

    step: int
    reason: str
    holes: tuple[tuple[int, int, int], ...] = ()
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class StepConfirmed:
    """The marker of a step that was claimed without it came after all and agrees."""

    step: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know that does not end the following of the job."""

    text: str


TrackerEvent = StepReady | StepLost | StepConfirmed | Notice


@dataclass(slots=True)
class _Reduction:
    """One all-reduce seen in the group: `size` is a bucket's byte size, None while it is not known."""

    size: int | None = None
    itemsize: int = 0
    raw: bool = False
    foreign: bool = False
    first: dict[int, int] = field(default_factory=dict)  # sender -> length of its first message


class StepTracker:
    """Follows one job's process group. Raises nothing on bad traffic: it claims nothing instead.

    decoder: the gloo decoder that holds the group `group`; predictor: hyper-parameters of steps without a marker.
    """

    def __init__(
        self, description: JobDescription, group: str, decoder: GlooDecoder, predictor: Predictor, waits: Waits
    ) -> None:
        self.description = description
        self.group = group
        self.step = description.step  # the last step claimed
        self.lost: StepLost | None = None
        self.coverage = 0.0  # of the newest reduction: final bytes seen / bytes
        self.confirmed = 0  # steps claimed with their marker
        self.hole_bytes = 0
        self._decoder = decoder
        self._predictor = predictor
        self._waits = waits
        self._specs = reduced_specs(description)
        self._world = description.group.world_size
        ddp = description.ddp
        rebuilt = ddp.rebuilt_buckets
        self._initial = layout(rebuilt or ddp.initial_buckets, self._specs)
        self._rebuilt = self._initial if rebuilt else None
        self._rebuilt_from = 0 if rebuilt else None  # first tag that the rebuilt layout applies to
        self._first_reductions = 2 if ddp.static_graph else 1  # reductions made with the initial layout
        self._order: tuple[int, np.ndarray] | None = None  # tag and content of the first layout broadcast
        self._start = description.group.sequence  # first tag that no claimed step has used
        self._reductions: dict[int, _Reduction] = {}
        self._markers: dict[int, tuple[Marker, int]] = {}
        self._groups: tuple[Mapping[str, Any], ...] = tuple(g.fields for g in description.optimizer.groups)
        self._version = 0
        self._silent = False  # markers stopped coming: do not wait for each
        self._plain = True  # every step so far was one reduction
        self._unconfirmed: dict[int, tuple[int, tuple[Mapping[str, Any], ...]]] = {}
        self._pending: deque[tuple[int, int]] = deque()  # claimed steps with their end tags, not yet applied
        self._events: list[TrackerEvent] = []

    # What the decoder asks and reports

    def plan(self, request: Request) -> Plan:
        """What to do with a collective whose first payload is about to arrive on one link."""
        if request.tag < self._start:
            return IGNORE
        if request.kind == BROADCAST:
            return RAW if request.length <= 4 * (len(self._specs) + 1) and self._rebuilt is None else IGNORE
        if request.kind != ALLREDUCE:
            return IGNORE
        reduction = self._reductions.setdefault(request.tag, _Reduction())
        reduction.first[request.sender] = request.length
        if reduction.foreign:
            return IGNORE
        if reduction.raw:
            return RAW
        if reduction.size is None:
            self._size(request.tag, reduction, request)
        if reduction.foreign:
            return IGNORE
        return RAW if reduction.size is None else AllReduce(reduction.size, reduction.itemsize)

    def _size(self, tag: int, reduction: _Reduction, request: Request) -> None:
        """Decide the size from the first message's length where only one bucket size can have it."""
        current = self._layout_at(tag)
        if current is None:
            reduction.raw = True
            return
        fits = {
            schedule.ring(b.nbytes, b.itemsize, self._world): (b.nbytes, b.itemsize)
            for b in current.buckets
            if schedule.first_length(b.nbytes, b.itemsize, self._world, request.sender) == request.length
        }
        sizes = set(fits.values())
        if not sizes:
            reduction.foreign = True
        elif len({size for size, _ in sizes}) == 1:
            reduction.size, reduction.itemsize = next(iter(sizes))
        else:
            reduction.raw = True

    def _layout_at(self, tag: int) -> Layout | None:
        """The layout that a reduction at `tag` uses; None while that cannot be known."""
        if self._rebuilt is not None and self._rebuilt_from is not None:
            return self._rebuilt if tag >= self._rebuilt_from else self._initial
        if self._passes(tag) < self._first_reductions:
            return self._initial
        return None

    def _passes(self, tag: int) -> int:
        """How many reductions with the initial layout may be over before `tag`: an upper bound."""
        used = sum(1 for t, r in self._reductions.items() if t < tag and not r.foreign)
        return self.step - self.description.step + used // len(self._initial.buckets)

    def event(self, event: Event) -> None:
        """Take one event of the decoder for this group."""
        if isinstance(event, Message) and event.kind == BROADCAST and event.data is not None and event.complete:
            self._broadcast(event)
        elif isinstance(event, Conflict):
            self._events.append(
                Notice(
                    f"all-reduce {event.tag}: two copies of bytes {event.offset}..{event.offset + event.length} differ "
                    f"on the link of rank {event.sender}: its step is not claimed; look for memory or link errors"
                )
            )

    def _broadcast(self, message: Message) -> None:
        if self._rebuilt is not None or len(message.data) % 4:
            return
        values = np.frombuffer(message.data, np.int32)
        if looks_like_order(values, len(self._specs)):
            if self._order is None or self._order[0] != message.tag:
                self._order = (message.tag, values.copy())
        elif self._order is not None and message.tag == self._order[0] + 1:
            try:
                indices = parse_rebuilt(self._order[1], values, len(self._specs))
                self._set_rebuilt(layout(indices, self._specs), message.tag + 1)
            except LayoutError:
                self._order = None

    def reported_layout(self, indices: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...]) -> None:
        """Take the rebuilt layout that rank 0 read from DDP's logging data: parameter indices and bytes per bucket.

        Where the wire showed one already the two must agree; a disagreement ends the following of the job.
        """
        try:
            reported = layout(indices, self._specs)
            if tuple(bucket.nbytes for bucket in reported.buckets) != nbytes:
                raise LayoutError(f"its buckets have {nbytes} bytes")
        except LayoutError as error:
            self._lose(self.step + 1, f"the reported bucket layout does not fit the job: {error}")
            return
        if self._rebuilt is None:
            self._set_rebuilt(reported, None)
        elif self._rebuilt.indices != reported.indices:
            self._lose(self.step + 1, "the bucket layout on the wire differs from the one that DDP reports")

    def _set_rebuilt(self, rebuilt: Layout, first_tag: int | None) -> None:
        self._rebuilt = rebuilt
        self._rebuilt_from = first_tag
        self._order = None
        self._find_switch()

    def _find_switch(self) -> None:
        """Where only a report told the rebuilt layout, it applies once the first reductions are over."""
        if self._rebuilt is not None and self._rebuilt_from is None and not self._early:
            self._rebuilt_from = self._start

    @property
    def _early(self) -> bool:
        """Whether the next step may still be one that DDP reduces with the initial layout."""
        return self.step - self.description.step < self._first_reductions

    def marker(self, marker: Marker, now: int) -> None:
        """Take a step marker. Markers of steps already claimed confirm them or contradict them."""
        if marker.step <= self.description.step or marker.step in self._markers:
            return
        if marker.step <= self.step:
            self._confirm_late(marker)
            return
        self._silent = False
        self._markers[marker.step] = (marker, now)

    @property
    def ahead(self) -> int:
        """The newest step that the job is known to have finished."""
        return max(self._markers, default=self.step)

    # Claiming steps

    def poll(self, now: int, final: bool = False) -> list[TrackerEvent]:
        """Every step that can be claimed now. final: nothing more will come, wait for nothing."""
        waits = Waits(-1, -1, -1) if final else self._waits
        while self.lost is None and self._next(now, waits):
            pass
        if self.lost is not None:
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
        if marker.groups is not None:
            self._groups, self._version = marker.groups, marker.version
        if marker.version != self._version:
            return self._lose(marker.step, "a marker with changed hyper-parameters was lost")
        current = self._window_layout(self._start, marker.sequence)
        waited = now - arrived
        if current is None:
            if waited > waits.patience:
                return self._lose(marker.step, "the rebuilt bucket layout was neither on the wire nor reported")
            return False
        candidates = self._candidates(current, self._start, marker.sequence)
        seen = self._decoder.max_tag(self.group) >= marker.sequence - 1
        if not seen and waited <= waits.traffic:
            return False
        complete = [tag for tag, _ in candidates if self._complete(tag)]
        if len(complete) < len(candidates) or len(candidates) < len(current.buckets):
            pending = [t for t, _ in candidates if not self._complete(t) and not self._settled(t)]
            enough = len(candidates) >= len(current.buckets)
            if (pending or not enough) and waited <= waits.patience:
                return False
        self._cover(current, candidates)
        choice = choose(current, candidates, self._landing, self._probes(current, marker))
        if choice.problem is not None:
            return self._lose(marker.step, self._why(marker, candidates, choice.problem))
        if not all(self._complete(tag) for tag in choice.tags):
            return self._lose_incomplete(marker.step, current, choice.tags)
        if len(candidates) != len(current.buckets):
            self._plain = False
        self._predictor.observe(marker.step, [dict(g) for g in self._groups])
        self.confirmed += 1
        return self._claim(marker.step, True, current, choice.tags, self._groups, marker.canaries, marker.sequence)

    def _why(self, marker: Marker, candidates: list[tuple[int, int]], problem: str) -> str:
        if candidates:
            return problem
        links = self._decoder.links(self.group)
        if not links:
            return "no all-reduce traffic of this job reaches the mirror: mirror a port of one of its nodes"
        return (
            f"step {marker.step} was reported but collectives {self._start}..{marker.sequence - 1} show no bucket of it"
            " (accumulation without reduction, a repeated optimizer step, or point-to-point traffic on DDP's group)"
        )

    def _unmarked(self, step: int, now: int, waits: Waits) -> bool:
        later = [s for s in self._markers if s > step]
        current = self._window_layout(self._start, None)
        if current is None:
            return False
        end = self._markers[min(later)][0].sequence if later else 1 << 62
        candidates = self._candidates(current, self._start, end)
        count = len(current.buckets)
        tags = tuple(tag for tag, _ in candidates[:count])
        if len(tags) < count or not all(self._complete(tag) for tag in tags):
            self._give_up(step, current, candidates, now, waits)
            return False
        time = max(self._time(tag) for tag in tags)
        if not later and not self._silent and now - time <= waits.marker:
            return False
        expected = (min(later) - step + 1) * count if later else None
        sizes = [size for _, size in candidates[:count]]
        if (
            not self._plain
            or sizes != [b.nbytes for b in current.buckets]
            or (expected is not None and len(candidates) != expected)
        ):
            return self._lose(step, "its marker is missing and its all-reduces do not tell the step's end")
        fields = self._predictor.fields(step)
        if fields is None:
            return self._lose(step, "its marker is missing and its hyper-parameters cannot be known without it")
        self._silent = not later
        self._unconfirmed[step] = (tags[-1], tuple(fields))
        return self._claim(step, False, current, tags, tuple(fields), (), tags[-1] + 1)

    def _give_up(
        self, step: int, current: Layout, candidates: list[tuple[int, int]], now: int, waits: Waits
    ) -> None:
        """An unmarked step with a bucket that cannot be completed is lost once the traffic has moved on."""
        if not candidates:
            return
        newest = max((self._time(t) for t in self._reductions if t >= self._start), default=0)
        stuck = [t for t, _ in candidates[: len(current.buckets)] if not self._complete(t)]
        if stuck and all(self._settled(t) for t in stuck) and now - newest > waits.patience:
            self._cover(current, candidates[: len(current.buckets)])
            self._lose_incomplete(step, current, tuple(t for t, _ in candidates[: len(current.buckets)]))

    def _confirm_late(self, marker: Marker) -> None:
        claimed = self._unconfirmed.pop(marker.step, None)
        if claimed is None or self.lost is not None:
            return
        last_tag, fields = claimed
        groups = marker.groups if marker.groups is not None else self._groups
        if marker.sequence <= last_tag or tuple(map(dict, groups)) != tuple(map(dict, fields)) or marker.problem:
            self._lose(
                marker.step, "its marker came after it was applied and contradicts it: restore an earlier step"
            )
            return
        self._groups, self._version = tuple(groups), marker.version
        self.confirmed += 1
        self._events.append(StepConfirmed(marker.step))

    # Pieces

    def _window_layout(self, start: int, end: int | None) -> Layout | None:
        """The layout of the last reduction in tags [start, end)."""
        if self._rebuilt is None:
            if not self._early:
                return None
            used = sum(1 for t, r in self._reductions.items() if not r.foreign and (end is None or t < end))
            return self._initial if used <= self._first_reductions * len(self._initial.buckets) else None
        if self._rebuilt_from is None:
            return self._initial
        inside = any(
            t >= self._rebuilt_from and (end is None or t < end) and not r.foreign
            for t, r in self._reductions.items()
        )
        if self._early and not (end is not None and inside):
            return self._initial if start < self._rebuilt_from else self._rebuilt
        return self._rebuilt

    def _candidates(self, current: Layout, start: int, end: int) -> list[tuple[int, int]]:
        """(tag, size) of the all-reduces in [start, end) that may be buckets of `current`, by rising tag."""
        if current is self._rebuilt and self._rebuilt_from is not None:
            start = max(start, self._rebuilt_from)
        sizes = {bucket.nbytes: bucket.itemsize for bucket in current.buckets}
        found = []
        for tag in sorted(self._reductions):
            if not start <= tag < end:
                continue
            reduction = self._reductions[tag]
            if reduction.raw and reduction.size is None:
                self._place(tag, reduction, sizes)
            if not reduction.foreign and reduction.size in sizes:
                found.append((tag, reduction.size))
        return found

    def _place(self, tag: int, reduction: _Reduction, sizes: Mapping[int, int]) -> None:
        """Find the size of an all-reduce that was kept raw: the one whose schedule its messages follow."""
        for size, itemsize in sizes.items():
            if self._decoder.place(self.group, tag, size, itemsize) is not None:
                reduction.size, reduction.itemsize = size, itemsize
                return

    def _landing(self, tag: int) -> Landing | None:
        return self._decoder.landing(self.group, tag)

    def _complete(self, tag: int) -> bool:
        held = self._landing(tag)
        return held is not None and held.complete

    def _settled(self, tag: int) -> bool:
        return self._decoder.settled(self.group, tag)

    def _time(self, tag: int) -> int:
        held = self._landing(tag)
        return held.time if held is not None else 0

    def _probes(self, current: Layout, marker: Marker) -> list[Probe]:
        probes = []
        for canary in marker.canaries:
            if canary.gradient is None or canary.parameter >= len(self.description.parameters):
                continue
            parameter = self.description.parameters[canary.parameter]
            if parameter.index is None or canary.element >= parameter.spec.numel:
                continue
            bucket, offset = current.locate(parameter.index)
            probes.append(Probe(bucket, offset + canary.element * parameter.spec.itemsize, canary.gradient))
        return probes

    def _cover(self, current: Layout, candidates: list[tuple[int, int]]) -> None:
        held = [self._landing(tag) for tag, _ in candidates[-len(current.buckets) :]]
        self.coverage = min(1.0, sum(x.covered for x in held if x is not None) / max(1, current.nbytes))

    def _claim(
        self,
        step: int,
        confirmed: bool,
        current: Layout,
        tags: tuple[int, ...],
        groups: tuple[Mapping[str, Any], ...],
        canaries: tuple[Canary, ...],
        end: int,
    ) -> bool:
        gradients: dict[int, np.ndarray] = {}
        for bucket, tag in zip(current.buckets, tags, strict=True):
            held = self._landing(tag)
            assert held is not None
            for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                gradients[index] = held.data[offset : offset + self._specs[index].nbytes]
        self.coverage = 1.0
        time = max(self._time(tag) for tag in tags)
        self.step = step
        self._start = end
        self._markers.pop(step, None)
        self._reductions = {t: r for t, r in self._reductions.items() if t >= end}
        self._find_switch()
        self._pending.append((step, end))
        self._events.append(StepReady(step, confirmed, gradients, groups, canaries, time, current.nbytes))
        return True

    def applied(self, step: int) -> None:
        """The gradients of `step` and of the steps before it are no longer needed."""
        while self._pending and self._pending[0][0] <= step:
            _, end = self._pending.popleft()
            self._decoder.retire(self.group, end)

    @property
    def pending(self) -> int:
        """Steps claimed whose gradients are still held."""
        return len(self._pending)

    def _lose_incomplete(self, step: int, current: Layout, tags: tuple[int, ...]) -> bool:
        holes = []
        for number, (bucket, tag) in enumerate(zip(current.buckets, tags, strict=False)):
            held = self._landing(tag)
            missing = held.holes() if held is not None else [[0, bucket.nbytes]]
            holes += [(number, int(offset), int(length)) for offset, length in missing]
            if held is not None and held.conflicts:
                return self._lose(step, f"bucket {number} (all-reduce {tag}) came in two copies that differ")
        lost = sum(length for _, _, length in holes)
        self.hole_bytes += lost
        return self._lose(
            step, f"{lost} of {current.nbytes} gradient bytes were on no mirrored link", tuple(holes)
        )

    def _lose(self, step: int, reason: str, holes: tuple[tuple[int, int, int], ...] = ()) -> bool:
        if self.lost is None:
            self.lost = StepLost(step, f"step {step}: {reason}", holes, step <= self.step)
            self._events.append(self.lost)
        return False

    def _forget(self, now: int, waits: Waits) -> None:
        """After a loss: measure coverage of what still comes and free it."""
        due = sorted(s for s, (_, arrived) in self._markers.items() if now - arrived > waits.traffic)
        for step in due[:-1]:  # the newest stays: it says how far ahead the job is
            marker, _ = self._markers.pop(step)
            current = self._rebuilt if self._rebuilt is not None else self._initial
            candidates = self._candidates(current, self._start, marker.sequence)
            if candidates:
                self._cover(current, candidates)
            self._start = max(self._start, marker.sequence)
        if not due and self._reductions:
            self._start = max(self._start, max(self._reductions) - 4 * len(self._initial.buckets) - 64)
        self._reductions = {t: r for t, r in self._reductions.items() if t >= self._start}
        if not self._pending:
            self._decoder.retire(self.group, self._start)
