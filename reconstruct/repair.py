"""Repair of unknown ranges with pieces of the state that trainers send, and the scrub of known ones.

A piece is the bytes of one range of a parameter, with its optimizer state, as of the end of some step. It becomes known
at that step: it is held until the shadow gets there, or, where the shadow is past it, brought forward by torch's own
optimizer with the gradients since, which are kept for every part that was asked for. Elements that are known already
are compared with it. Used on the apply thread only; no sockets, no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flowcheck.protocol import CHUNK
from reconstruct.arena import Slot
from reconstruct.asking import Scrub, Stretch, Stretches
from reconstruct.exactness import exactness
from reconstruct.findings import Difference, Finding, Misfit
from reconstruct.pieces import Forward, Piece, Unfit
from reconstruct.ranges import NOTHING, Ranges
from reconstruct.shadow import Shadow
from reconstruct.step_events import StepReady
from reconstruct.ulps import gap

__all__ = ["Difference", "Finding", "Misfit", "Part", "Repair"]

MOST_PARTS = 256
"""Parts that one call of `ask` returns at most."""


class Part(NamedTuple):
    """What to ask a trainer for: elements [lo, hi) of `model/<parameter>`, with all their optimizer state, or of
    `buffer/<name>`, in memory order. number: names the part in answers, never used twice; nbytes: most that its
    sections come to."""

    number: int
    key: str
    lo: int
    hi: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Asked:
    """A part that was asked for when the shadow was at step `since`; `first`: it goes before others."""

    part: Part
    slot: Slot
    since: int
    first: bool
    reserved: int
    seen: int | None = None  # when `expire` first saw it
    kept: dict[int, Forward | None] = field(default_factory=dict)  # what each step after `since` did to it
    kept_bytes: int = 0
    piece: Piece | None = None  # arrived, and not settled yet

    @property
    def ranges(self) -> Ranges:
        return Ranges.of([(self.part.lo, self.part.hi)])

    @property
    def nbytes(self) -> int:
        """Bytes of the piece, here or under way, and of what is kept for it."""
        return self.part.nbytes + self.kept_bytes

    def keep(self, ready: StepReady) -> None:
        forward = self.forward(ready)
        if forward is not None and forward.blank:  # a piece of an older step is worth nothing any more
            self.kept, self.kept_bytes = dict.fromkeys(self.kept, forward), 0
        self.kept[ready.step] = forward
        self.kept_bytes += 0 if forward is None else forward.nbytes

    def forward(self, ready: StepReady) -> Forward | None:
        return Forward.of(ready, self.slot, self.part.lo, self.part.hi) if self.slot.stepped else None


class Repair:
    """Parts asked for and what became of them.

    most_bytes: pieces that are under way or held and gradients kept for them, together; most_steps: steps that may be
    applied before a part is settled. Parts beyond that are given up and asked for again later.
    """

    def __init__(self, shadow: Shadow, *, most_bytes: int, most_steps: int) -> None:
        self.asked = 0  # parts asked for so far
        self.bytes = 0  # of the pieces that came
        self.repaired = 0  # elements that became known by a piece
        self.compared = 0  # known elements compared with a trainer's
        self.differences = 0  # elements among them that were not equal
        self.given_up = 0  # parts that were refused, came too late or to nothing
        self.refusal = ""  # why the last refused part was
        self._shadow = shadow
        self._most_bytes = most_bytes
        self._most_steps = most_steps
        self._exact = exactness(shadow.description)[0]
        self._stretches = Stretches(shadow.live, shadow.description.optimizer.name)
        self._scrub = Scrub(self._stretches)
        self._asked: dict[int, _Asked] = {}
        self._covered: dict[str, Ranges] = {}  # by tensor key, what they are about
        self._first: dict[str, Ranges] = {}
        self._reserved = 0  # bytes that they come to, as far as can be told
        self._latency = 2.0  # steps that are applied until a part is settled, of late
        self._dropped: list[int] = []

    @property
    def scrubbed(self) -> int:
        """How often the scrub went through the whole state."""
        return self._scrub.rounds

    @property
    def outstanding(self) -> list[Part]:
        """Parts that were asked for and are not settled: they have not come, or are held until the shadow is there."""
        return [asked.part for asked in self._asked.values()]

    @property
    def wanting(self) -> bool:
        """Whether anything that `want` named is still to be asked for or to come."""
        return bool(self._first) or any(asked.first for asked in self._asked.values())

    # Asking

    def ask(self, nbytes: int, *, scrub: bool = True) -> list[Part]:
        """The next parts to ask for, of at most `nbytes` bytes together, each of at most `protocol.CHUNK`.

        Unknown ranges come first: the oldest, then the largest. Where none is left, the scrub's next parts, if `scrub`,
        once around the state at most. Ranges that lie close together are one part; the elements between are compared.
        Where less than 64 elements with their state fit into `nbytes`, there may be no part.
        """
        parts: list[Part] = []
        if not self._shadow.ready:
            return parts
        for stretches in (
            self._stretches.among(dict(self._first), self._covered),
            self._stretches.unknown(self._shadow.live, self._covered),
        ):
            fresh = len(parts)
            whole = all(self._take(stretch, nbytes, parts)[1] for stretch in stretches)
            self._cover(parts[fresh:])
            if not whole:
                return parts
        fresh, rounds = len(parts), self._scrub.rounds
        while scrub and self._scrub.rounds == rounds and (known := self._scrub.next()) is not None:
            hi, whole = self._take(known, nbytes, parts)
            self._scrub.went(known, hi)
            if not whole:
                break
        self._cover(parts[fresh:])
        return parts

    def want(self, keys: Iterable[str]) -> None:
        """Ask for these tensors (`model/<parameter>`, `buffer/<name>`) before all others, also where they are known."""
        for key in keys:
            _put(self._first, key, self._stretches.slots[key].elements)

    def _take(self, stretch: Stretch, nbytes: int, parts: list[Part]) -> tuple[int, bool]:
        """Cut parts off a stretch while there is room; up to which element that went, and whether it was all."""
        key, lo, hi = stretch
        slot, version = self._stretches.slots[key], self._shadow.live
        size = self._stretches.element_bytes(key, version)
        ahead = slot.spec.itemsize * math.ceil(self._latency) if slot.stepped else 0
        left = nbytes - sum(part.nbytes for part in parts)
        while len(parts) < MOST_PARTS:
            free = max(0, self._most_bytes - self._reserved)
            end = self._stretches.cut(stretch, lo, min(min(left, CHUNK) // size, free // (size + ahead)))
            if end == lo < hi:
                break
            self.asked += 1
            part = Part(self.asked, key, lo, end, (end - lo) * size)
            first = key in self._first and bool(self._first[key] & Ranges.of([(lo, end)]))
            asked = _Asked(part, slot, self._shadow.step, first, (end - lo) * (size + ahead))
            self._asked[part.number] = asked
            self._reserved += asked.reserved
            if first:
                _put(self._first, key, self._first[key] - asked.ranges)
            parts.append(part)
            left -= part.nbytes
            lo = end
            if lo == hi:
                return hi, True
        return lo, False

    def _cover(self, parts: Iterable[Part]) -> None:
        """These are asked for from now on."""
        fresh: dict[str, list[tuple[int, int]]] = {}
        for part in parts:
            fresh.setdefault(part.key, []).append((part.lo, part.hi))
        for key, pairs in fresh.items():
            self._covered[key] = self._covered.get(key, NOTHING) | Ranges.of(pairs)

    # What comes

    def applied(self, ready: StepReady) -> list[Finding]:
        """`ready` was just given to `shadow.apply` or `shadow.skip`: keep what outstanding parts need of it."""
        findings: list[Finding] = []
        for asked in list(self._asked.values()):
            piece = asked.piece
            if piece is None:
                asked.keep(ready)
                if asked.nbytes > asked.reserved:
                    self._reserved += asked.nbytes - asked.reserved
                    asked.reserved = asked.nbytes
            elif piece.step == ready.step - 1:  # it waits for readers to go
                piece.forward(asked.forward(ready))
            if piece is not None and piece.step == ready.step:
                findings += self._settle(asked, piece)
        for asked in list(self._asked.values()):
            if ready.step - asked.since >= self._most_steps:
                self._give_up(asked)
        held = sum(asked.nbytes for asked in self._asked.values())
        for asked in reversed(list(self._asked.values())):  # those that were asked for first are likely to come first
            if held <= self._most_bytes:
                break
            held -= asked.nbytes
            self._give_up(asked)
        return findings

    def arrived(self, number: int, step: int, sections: Mapping[str, Any], counter: bytes | None) -> list[Finding]:
        """Part `number` as of the end of `step`. One that is not outstanding is left alone.

        sections: "model" and the parameter's optimizer state keys but `step`, of a buffer one of any name: bytes of the
        elements in the tensor's own memory order; counter: the bytes of its `step`, None where it has none.
        """
        asked = self._asked.get(number)
        if asked is None or asked.piece is not None:
            return []
        part = asked.part
        if part.key.startswith("buffer/") and len(sections) == 1:
            sections = {"model": next(iter(sections.values()))}
        self.bytes += sum(memoryview(data).nbytes for data in sections.values())
        self._latency = max(self._shadow.step - asked.since, 0.9 * self._latency)
        spec = self._shadow.description.optimizer
        try:
            if step < asked.since:
                raise Unfit(f"is older than step {asked.since}, when it was asked for")
            piece = Piece(
                asked.slot, part.lo, part.hi, step, sections, counter, spec.name, self._shadow.description.device
            )
        except Unfit as error:
            self._give_up(asked)
            return [Misfit(part.key, step, str(error))]
        since = range(step + 1, self._shadow.step + 1)
        if any(after not in asked.kept for after in since):  # `applied` was not told of a step
            self._give_up(asked)
            return []
        for after in since:
            piece.forward(asked.kept[after])
        asked.kept, asked.kept_bytes, asked.piece = {}, 0, piece
        return self._settle(asked, piece) if piece.step == self._shadow.step else []

    def refused(self, number: int, reason: str) -> None:
        """Part `number` will not come, `reason` says why: it is free to be asked for again."""
        asked = self._asked.get(number)
        if asked is not None and asked.piece is None:
            self.refusal = reason
            self._give_up(asked)

    def expire(self, now: int, after: int) -> list[int]:
        """Give up parts that are outstanding for `after` or longer, in the units of `now`.

        A part's time runs from the first call after it was asked for. Returns the numbers of all parts given up since
        the last call, also those given up for bytes or steps: nobody needs to answer them any more.
        """
        for asked in list(self._asked.values()):
            if asked.seen is None:
                asked.seen = now
            elif now - asked.seen >= after:
                self._give_up(asked)
        dropped, self._dropped = self._dropped, []
        return dropped

    # Taking over

    def _settle(self, asked: _Asked, piece: Piece) -> list[Finding]:
        """Put a piece of the live step into the shadow, unless somebody reads what it would change in passing."""
        part, shadow = asked.part, self._shadow
        usable = asked.ranges - piece.lost
        if piece.blank or (asked.ranges and not usable):
            self._give_up(asked)
            return []
        findings = self._form(part, piece)
        unknown = shadow.live.unknown.of(part.key)
        known = usable - unknown
        differing, differences = self._compare(asked, piece, known)
        alarm = self._exact and part.key.startswith("model/")
        if differing and not alarm and shadow.read:
            return findings
        if alarm and differing:
            shadow.doubt(part.key, differing)
        fresh = usable & unknown
        if fresh or differing or not asked.ranges:
            shadow.patch(part.key, fresh | differing, piece.sections(), part.lo, piece.counter)
        self._remove(asked)
        self.repaired += fresh.total
        self.compared += known.total
        self.differences += differing.total
        return [*findings, *differences]

    def _form(self, part: Part, piece: Piece) -> list[Finding]:
        """Whether the parameter has the state that the piece shows; if not, it is made so, and unknown."""
        kind, _, name = part.key.partition("/")
        version, slot = self._shadow.live, self._stretches.slots[part.key]
        if kind == "buffer":
            return []
        keys, counter = version.state_keys.get(name, ()), None
        if "step" in keys and name not in version.uncounted:
            counter = version.counter(slot)[1].tobytes()
        if keys == piece.keys and (counter is None or counter == piece.counter):
            return []
        self._shadow.reform(name, piece.keys, piece.counter)
        shown, held = _state(piece.keys, piece.counter, slot), _state(keys, counter, slot)
        reason = f"shows {shown} where {held} was held: the parameter is unknown but for this piece"
        return [Misfit(part.key, piece.step, reason)]

    def _compare(self, asked: _Asked, piece: Piece, known: Ranges) -> tuple[Ranges, list[Finding]]:
        """Which of the `known` elements the trainer has other bytes for, and by how much."""
        differing = NOTHING
        findings: list[Finding] = []
        part = asked.part
        if not known:
            return differing, findings
        mask = known.mask(part.lo, part.hi)
        places = self._shadow.live.places(part.key)
        for section, theirs in piece.sections().items():
            ours = places[section][part.lo : part.hi]
            differs = (ours != theirs) & mask
            if not differs.any():
                continue
            differing |= Ranges.of_mask(differs, part.lo)
            if part.key.startswith("buffer/"):
                continue  # forward passes change buffers, and no gradient tells how
            known_theirs = np.where(differs, theirs, ours).view(np.uint8)
            found = gap(asked.slot.spec.dtype, ours.view(np.uint8), known_theirs)
            assert found is not None
            findings.append(Difference(
                part.key, section, piece.step, part.lo + found.first, part.lo + found.last + 1, found.elements,
                found.absolute, found.relative, found.ulps, self._exact,
            ))  # fmt: skip
        return differing, findings

    # Bookkeeping

    def _remove(self, asked: _Asked) -> None:
        del self._asked[asked.part.number]
        self._reserved -= asked.reserved
        # Where parts overlap, what the others still cover may be asked for once more: it costs bytes, no more.
        _put(self._covered, asked.part.key, self._covered.get(asked.part.key, NOTHING) - asked.ranges)

    def _give_up(self, asked: _Asked) -> None:
        """Not to be waited for any longer; its elements may be asked for again."""
        self._remove(asked)
        self.given_up += 1
        self._dropped.append(asked.part.number)
        self._latency = max(self._latency, self._shadow.step - asked.since + 1)
        if asked.first:
            _put(self._first, asked.part.key, self._first.get(asked.part.key, NOTHING) | asked.ranges)


def _put(held: dict[str, Ranges], key: str, ranges: Ranges) -> None:
    if ranges:
        held[key] = ranges
    else:
        held.pop(key, None)


def _state(keys: tuple[str, ...], counter: bytes | None, slot: Slot) -> str:
    """What a person should read of the form of a parameter's state."""
    count = "" if counter is None else f" {np.frombuffer(counter, slot.step_dtype)[0]:g}"
    return ", ".join(key + (count if key == "step" else "") for key in keys) or "no state"
