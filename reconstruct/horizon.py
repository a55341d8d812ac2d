"""What lies behind the last step of a job: collectives, markers, and what both say of where steps begin and end.

A process group numbers its collectives; a marker's sequence number is, but for `reconstruct.numbering`, the next tag,
so the collectives of step s have tags in [sequence of s-1, sequence of s): its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowcheck.description import JobDescription
from reconstruct.buckets import Layout, reduced_specs
from reconstruct.counts import Counts, Window, surplus, surveyed
from reconstruct.decoder import (
    ALLREDUCE,
    BROADCAST,
    IGNORE,
    NOT_THIS_SIZE,
    RAW,
    Decoder,
    LinkLost,
    Plan,
    Request,
)
from reconstruct.gradients import Gradients, gather
from reconstruct.layouts import Layouts
from reconstruct.markers import Marker
from reconstruct.numbering import FOREVER, Numbering
from reconstruct.reductions import Reductions
from reconstruct.step_events import NO_WAITS, Waits
from reconstruct.verdicts import Blank, Take

__all__ = ["LAYOUT_STEPS", "ORDINARY", "Horizon"]

ORDINARY = (NOT_THIS_SIZE, "a gap swallowed", "the connection ended", "it began before")
"""How reasons of a `LinkLost` begin that nobody need be told."""
NCCL_PADDING = 1919
"""LL128 sends whole groups of 1920 bytes; what lies behind a tensor's end in the last one is no part of it."""
LAYOUT_STEPS = 4
"""DDP logs a rebuilt layout one step after the first that uses it; a report is not given up before so many steps."""


class Horizon:
    """Of one job. `step`: the last one that is done with; `markers`: of later ones, with when they came; `losses`: why
    links lost all-reduces, by tag; `coverage`: of the newest reduction: final bytes seen / bytes."""

    def __init__(
        self, description: JobDescription, group: str, decoder: Decoder, waits: Waits, attached: int | None
    ) -> None:
        self.description = description
        self.decoder = decoder
        self.group = group
        self.step = description.step
        self.coverage = 0.0
        self.plain = True
        """Every step so far was one reduction."""
        self.apart = False
        """There is traffic that makes c10d's numbers and the tags run apart."""
        self.specs = reduced_specs(description)
        self.layouts = Layouts(
            description.ddp, self.specs, NCCL_PADDING if description.group.backend == "nccl" else 0
        )
        self.table = Reductions(group, decoder)
        self.numbers = Numbering(description.group.sequence, decoder.max_tag(group), attached)
        self.counts = Counts(every=description.group.backend != "nccl")
        self.markers: dict[int, tuple[Marker, int]] = {}
        self.losses: dict[int, str] = {}
        self._waits = waits
        self._gaps: dict[tuple[int, int], int] = decoder.gaps(group)

    @property
    def start(self) -> int:
        """The first tag that no step has used."""
        return self.numbers.start

    @property
    def steps(self) -> int:
        """Since the attach."""
        return self.step - self.description.step

    def plan(self, request: Request) -> Plan:
        """What to do with a collective whose first payload is about to arrive on one link."""
        if not self.numbers.see(request):
            return IGNORE
        self.table.note(request)
        if request.kind == BROADCAST:
            return RAW if self.layouts.wanted(request.length) else IGNORE
        if request.kind != ALLREDUCE:
            return IGNORE
        used = sum(1 for tag in self.table.held if tag < request.tag)
        passes = self.steps + used // len(self.layouts.initial.buckets)  # at most, with the initial layout
        return self.table.plan(request, self.layouts.at(request.tag, passes))

    def link_lost(self, event: LinkLost) -> None:
        """A link cannot show more of some collectives."""
        for tag in event.tags:
            self.losses[tag] = event.reason
            if event.reason.startswith(NOT_THIS_SIZE):
                self.table.exclude(tag)
        while len(self.losses) > 256:
            del self.losses[next(iter(self.losses))]

    def ran_apart(self) -> None:
        """Such traffic was seen."""
        self.apart = True
        self.counts.ran_apart()

    # Where a window ends, and the layout in it

    def bounds(self, marker: Marker, arrived: int) -> tuple[int, int]:
        """(end of the window in tags, time after which nothing that is first seen belongs to it)."""
        if not self.apart:
            return self.numbers.end(marker.sequence), FOREVER  # copies may come long after a marker
        until = arrived + self._waits.traffic
        return self.numbers.bounds(marker.sequence, until, self.table.seen), until

    def reading(self, rebuilt: bool | None, end: int) -> tuple[Layout, int] | None:
        """(layout of the step's reduction, first tag that it can have). rebuilt: what its marker says."""
        behind = self.layouts.first_tag
        more = behind is not None and any(tag >= behind for tag in self.table.within(self.start, end))
        if rebuilt is None and self.layouts.unsure and not more and (behind is None or self.start < behind):
            return None  # a step may have had any number of reductions: nothing but the marker could tell
        reading = self.layouts.of_step(rebuilt, self.steps, more)
        return None if reading is None else (reading[0], max(reading[1], self.start))

    def next_pass(self) -> tuple[Layout, int, int] | None:
        """(layout, first tag, end) of the reduction behind the last step."""
        behind = self.layouts.first_tag
        if behind is not None and any(True for _ in self.table.within(self.start, behind)):
            return self.layouts.initial, self.start, behind
        if behind is None and self.layouts.unsure:
            return None
        reading = self.layouts.of_step(True if behind is not None else None, self.steps, False)
        return None if reading is None else (reading[0], max(reading[1], self.start), FOREVER)

    # What was seen and counted

    def unseen(self, end: int) -> set[int]:
        """Tags up to `end` that may be all-reduces although nothing was seen of them."""
        tags = self.table.unseen(self.start, end)
        if not tags:
            return tags
        contexts, newest = max(1, len(self.description.group.contexts)), self.decoder.newest(self.group)
        sound = {  # of one link each at least that lost nothing and has gone on
            link[0]
            for link, lost in self.decoder.gaps(self.group).items()
            if lost == self._gaps.get(link, 0) and newest[link] >= end
        }
        dropped = self.table.dropped
        return {tag for tag in tags if tag % contexts not in sound or tag < dropped}

    def coming(self, end: int, tags: Iterable[int]) -> bool:
        """Whether the mirror may still show something of collectives up to `end`, or of these tags among them if they
        are buckets: DDP waits for them before anything of the next step begins."""
        return self.decoder.max_tag(self.group) < end - 1 or any(not self.table.settled(tag, end) for tag in tags)

    def cover(self, current: Layout, candidates: Sequence[tuple[int, int]]) -> None:
        """Measure `coverage` of the last reduction among the candidates."""
        held = [self.table.landing(tag) for tag, _ in candidates[-len(current.buckets) :]]
        self.coverage = min(1.0, sum(x.covered for x in held if x is not None) / max(1, current.nbytes))

    def window(self, buckets: int, candidates: int, end: int, arrived: int, now: int, waits: Waits) -> Window:
        """What c10d counted up to a marker, of which one reduction is the step's."""
        own, came = buckets + self.broadcasts(end), self.came(end, arrived, now, waits)
        return Window(end - self.start, own, buckets, candidates - buckets, end, came)

    def came(self, end: int, arrived: int, now: int, waits: Waits) -> int | None:
        """When a marker came, once it is known what the wire had shown by then."""
        if now < arrived and waits is not NO_WAITS:
            return None
        known = surveyed(self.decoder, self.group, end, self.layouts.least, self.table.seen)
        return arrived if known else None

    def broadcasts(self, end: int) -> int:
        """DDP's broadcasts of its layout with tags from the first that no step has used on, up to `end`."""
        behind = self.layouts.first_tag
        return 2 if behind is not None and self.start + 2 <= behind <= end else 0

    def later(self, step: int, now: int, waits: Waits) -> list[tuple[int, int]]:
        """(end, arrived) of the markers behind that of `step` which the capture has come to."""
        later = []
        for number, (marker, arrived) in self.markers.items():
            end = self.numbers.end(marker.sequence)
            if number > step and self.came(end, arrived, now, waits) is not None:
                later.append((end, arrived))
        return later

    def counted(self, window: Window, later: Sequence[tuple[int, int]]) -> bool:
        """Whether it is certain which tags the window has."""
        doubtful = self.apart or self.counts.astray or self.table.dropped > self.start
        return not doubtful and self.counts.agreed(window, later, self.table.seen)

    def missing(self, count: int, end: int, until: int) -> tuple[int, int]:
        """How many all-reduces the window lacks if it holds `count` steps of one reduction each (negative: too many),
        and how many these steps have."""
        parts = self.layouts.of_steps(self.steps, count, self.start)
        if parts is None:
            return -1, 0
        missing = due = 0
        for number, (current, first, steps) in enumerate(parts):
            stop = parts[number + 1][1] or end if number + 1 < len(parts) else end
            found = self.table.candidates(current, max(first, self.start), stop, until)
            due += steps * len(current.buckets)
            missing += steps * len(current.buckets) - len(found)
        return missing, due

    def why(self, end: int, arrived: int, candidates: Sequence[tuple[int, int]], behind: bool, problem: str) -> str:
        """For a person: why a window with this problem tells nothing."""
        if behind:
            problem = f"the mirror has not shown all of collectives {self.start}..{end - 1}; of those shown, {problem}"
        losses = [self.losses[tag] for tag in self.table.within(self.start, end) if tag in self.losses]
        grouped = None if self.counts.every else surplus(self.table.seen, end, arrived)
        if grouped is not None:
            problem = f"{problem}; {grouped}"
        if candidates or grouped is not None:
            return f"{problem} ({losses[0]})" if losses else problem
        if not self.decoder.links(self.group):
            return "no all-reduce traffic of this job reaches the mirror: mirror a port of one of its nodes"
        return (
            f"it was reported but collectives {self.start}..{end - 1} show no bucket of it (accumulation without "
            "reduction, a repeated optimizer step, or point-to-point traffic on DDP's process group)"
        )

    # Steps that are done with

    def gather(self, take: Take) -> Gradients:
        """What is known of the gradients of a step, which is the newest reduction."""
        found = gather(take.layout, [self.table.landing(tag) for tag in take.tags], self.specs)
        self.coverage = 1.0 - sum(gone.total for gone in found.missing) / max(1, take.layout.nbytes)
        return found

    def time(self, take: Take) -> int:
        """When the last byte that was seen of a step's gradient was captured, ns."""
        return max(self.table.time(tag) for tag in take.tags)

    def taken(self, take: Take, sequence: int | None) -> None:
        """What a step's reading says of those after it. sequence: its marker's, None if that did not come."""
        if sequence is None or take.window is None:
            self.numbers.unmarked()
            self.counts.unmarked(take.end - self.start == len(take.tags) + self.broadcasts(take.end))
            return
        self.plain = self.plain and not take.several
        self.numbers.marked(sequence, take.end, self.decoder.max_tag(self.group), take.until)
        decided = self.decoder.decided(self.group) >= take.end
        self.counts.claimed(take.window, take.later, self.table.seen, decided)

    def skipped(self, blank: Blank, sequence: int) -> None:
        """The same of a window that told nothing, up to this marker."""
        self.plain = self.plain and not blank.several
        self.numbers.marked(sequence, blank.end, self.decoder.max_tag(self.group), blank.until)
        self.counts.blank()
        self.layouts.blank()

    def go_on(self, step: int, end: int, rebuilt: bool | None) -> tuple[int, int]:
        """`step` is done with, its window ended at tag `end`; rebuilt: what its marker says. The tags [first, behind)
        that were its own and are to be retired."""
        # Only what was seen is retired: a number that ran ahead of the tags must not hide the next step's collectives.
        own = self.start, min(end, self.decoder.max_tag(self.group) + 1)
        self.step = step
        self.markers.pop(step, None)
        self.numbers.start = end
        self.table.forget(end)
        self.layouts.settled(self.steps, end, rebuilt)
        if self.decoder.max_tag(self.group) < end:  # else what was lost since may be of the next window
            self._gaps = self.decoder.gaps(self.group)
        return own

    def abandon(self, now: int, waits: Waits) -> int:
        """Nothing follows any more: measure coverage of what still comes. The tag below which nothing is needed."""
        due = sorted(s for s, (_, arrived) in self.markers.items() if now - arrived > waits.traffic)
        for step in due[:-1]:  # the newest stays: windows end at it
            marker, _ = self.markers.pop(step)
            current = self.layouts.rebuilt if self.layouts.rebuilt is not None else self.layouts.initial
            end = self.numbers.end(marker.sequence)
            candidates = self.table.candidates(current, self.start, end, FOREVER)
            if candidates:
                self.cover(current, candidates)
            self.numbers.start = max(self.start, end)
        if not due and self.table.held:
            newest, buckets = max(self.table.held), len(self.layouts.initial.buckets)
            self.numbers.start = max(self.start, newest - 4 * buckets - 64)
        self.table.forget(self.start)
        return self.start
