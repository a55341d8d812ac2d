"""Which all-reduces of a step are its gradient buckets.

Between two step markers a process group runs any number of collectives: DDP's buckets, but also reductions of other
micro-batches, of metrics, of anything. DDP issues bucket 0, 1, ... in that order, so the step's gradient is an
increasing choice of one all-reduce per bucket with the bucket's size. One such choice: nothing to decide. Several: the
canaries (single gradient elements that the trainer reported) must leave exactly one, or all that are left must hold
the same bytes. Otherwise the step is not claimed.

Bytes that were lost contradict nothing and prove nothing: a canary among them is as if it had not been reported, but
one at least of those that can speak must be there and agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flowcheck.description import JobDescription
from reconstruct.buckets import Layout
from reconstruct.gradients import missing
from reconstruct.landing import Landing
from reconstruct.markers import Canary
from reconstruct.ranges import Ranges

MAX_CHOICES = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """A canary placed in the layout: `bits` at byte `offset` of bucket `bucket`."""

    bucket: int
    offset: int
    bits: bytes

    @property
    def speaks(self) -> bool:
        """Zeros agree with too much to prove anything."""
        return any(self.bits)


@dataclass(frozen=True, slots=True)
class Choice:
    """tags[b] carries bucket b. `problem` says why no choice can be trusted (tags is then empty).

    checked: an element that speaks is there and agrees, so this is the gradient that the optimizer used.
    """

    tags: tuple[int, ...]
    problem: str | None = None
    checked: bool = False


def probes_of(description: JobDescription, layout: Layout, canaries: Iterable[Canary]) -> list[Probe]:
    """The canaries of gradients that DDP reduces, placed in the layout."""
    probes = []
    for canary in canaries:
        if canary.gradient is None or canary.parameter >= len(description.parameters):
            continue
        parameter = description.parameters[canary.parameter]
        if parameter.index is None or canary.element >= parameter.spec.numel:
            continue
        bucket, offset = layout.locate(parameter.index)
        probes.append(Probe(bucket, offset + canary.element * parameter.spec.itemsize, canary.gradient))
    return probes


def choose(
    layout: Layout,
    candidates: Sequence[tuple[int, int]],
    landing: Callable[[int], Landing | None],
    probes: Iterable[Probe],
    unseen: Collection[int] = (),
    counted: bool = False,
) -> Choice:
    """Choose one all-reduce per bucket.

    candidates: (tag, byte size) of every all-reduce of the window whose size is a bucket's, by rising tag; landing:
    its values, None or incomplete where they are not all known (it is then a rival that cannot be ruled out, but by a
    canary at what is known of it, so a choice is made only if no other choice is left); probes: the canaries; unseen:
    tags that may be all-reduces which the mirror lost altogether. One that could be a bucket in place of the chosen
    all-reduce is a rival too, unless a canary speaks for the chosen one. counted: it is certain which tags the window
    has: then one that was lost altogether is the bucket that there is no other all-reduce for.
    """
    sizes = [bucket.nbytes for bucket in layout.buckets]
    by_bucket: dict[int, list[Probe]] = {}
    for probe in probes:
        by_bucket.setdefault(probe.bucket, []).append(probe)
    gone: dict[int, Ranges] = {}

    def known(tag: int, probe: Probe) -> bool:
        if tag not in gone:
            gone[tag] = missing(landing(tag), sizes[probe.bucket])
        return not gone[tag] & Ranges.of([(probe.offset, probe.offset + len(probe.bits))])

    def agrees(bucket: int, tag: int) -> bool:
        """Whether it cannot be ruled out."""
        held = landing(tag)
        return held is None or all(
            held.data[p.offset : p.offset + len(p.bits)].tobytes() == p.bits
            for p in by_bucket.get(bucket, ())
            if known(tag, p)
        )

    found = _choices(sizes, [(tag, (size,)) for tag, size in candidates])
    if not found and counted:
        found = _only(sizes, dict(candidates), unseen)
    if not found:
        return Choice((), f"no {len(sizes)} all-reduces with the sizes of the buckets in their order")
    if len(found) > MAX_CHOICES:
        return Choice((), f"{len(candidates)} all-reduces have bucket sizes: too many to tell which are the step's")
    kept = [tags for tags in found if all(agrees(b, tag) for b, tag in enumerate(tags))]
    if not kept:
        return Choice(
            (),
            "the trainer's gradient differs from the reduced one: clipped, scaled or changed after the all-reduce",
        )
    first = kept[0]
    for other in kept[1:]:
        if any(not _same(landing(a), landing(b)) for a, b in zip(first, other, strict=True) if a != b):
            return Choice(
                (),
                f"{len(candidates)} all-reduces have bucket sizes and nothing tells which {len(sizes)} are the step's",
            )
    spoken_for = {b for b, tag in enumerate(first) for p in by_bucket.get(b, ()) if p.speaks and known(tag, p)}
    rivals = set(unseen) - set(first)
    for number, tag in enumerate(first):
        after = first[number - 1] if number else -1
        before = first[number + 1] if number + 1 < len(first) else max(rivals, default=-1) + 1
        if number not in spoken_for and any(after < other < before for other in rivals):
            return Choice((), f"collectives were lost around all-reduce {tag}: one of them may be bucket {number}")
    if not spoken_for and any(p.speaks for some in by_bucket.values() for p in some):
        return Choice((), "every element of the gradient that was reported to check is among what was lost")
    return Choice(first, checked=bool(spoken_for))


def tell_apart(
    layout: Layout, candidates: Sequence[tuple[int, Collection[int]]], plain: bool
) -> dict[int, int] | None:
    """The size of each all-reduce of which several sizes of buckets would look the same, by its place among the others.

    candidates: (tag, every size in bytes that it can have) of the window, by rising tag. Every choice of one all-reduce
    per bucket must give it the same size, else None: nothing tells. plain: take the window for nothing but buckets, of
    whole reductions and perhaps the beginning of another, if it can be that.
    """
    sizes = [bucket.nbytes for bucket in layout.buckets]
    if plain and all(sizes[i % len(sizes)] in able for i, (_, able) in enumerate(candidates)):
        return {tag: sizes[i % len(sizes)] for i, (tag, _) in enumerate(candidates)}
    found = _choices(sizes, candidates)
    if not found or len(found) > MAX_CHOICES:
        return None
    told: dict[int, int] = {}
    for tags in found:
        for size, tag in zip(sizes, tags, strict=True):
            if told.setdefault(tag, size) != size:
                return None
    return told


def _same(a: Landing | None, b: Landing | None) -> bool:
    return a is not None and b is not None and a.complete and b.complete and np.array_equal(a.data, b.data)


def _only(sizes: Sequence[int], seen: dict[int, int], unseen: Collection[int]) -> list[tuple[int, ...]]:
    """The choice of a window with just as many all-reduces as there are buckets, where not all of them were seen: DDP's
    order tells which is which. seen: tag -> size; one at least, else nothing shows that there was a reduction."""
    tags = tuple(sorted({*seen, *unseen}))
    whole = bool(seen) and len(tags) == len(sizes)
    return [tags] if whole and all(seen.get(tag, size) == size for tag, size in zip(tags, sizes, strict=True)) else []


def _choices(
    sizes: Sequence[int], candidates: Sequence[tuple[int, Collection[int]]]
) -> list[tuple[int, ...]]:
    """Every increasing choice of tags that can have the given sizes, at most MAX_CHOICES + 1.

    Where the window is a plain repetition of whole reductions, only whole reductions count: DDP finishes one backward
    pass before the next starts, so buckets of two passes never mix.
    """
    count = len(sizes)
    if len(candidates) % count == 0 and all(
        sizes[i % count] in able for i, (_, able) in enumerate(candidates)
    ):
        tags = [tag for tag, _ in candidates]
        return [tuple(tags[i : i + count]) for i in range(0, len(tags), count)]

    # The last place at which each bucket can still be taken: up to there every branch ends in a choice.
    latest, i = [0] * count, len(candidates)
    for bucket in range(count - 1, -1, -1):
        i -= 1
        while i >= 0 and sizes[bucket] not in candidates[i][1]:
            i -= 1
        if i < 0:
            return []
        latest[bucket] = i
    found: list[tuple[int, ...]] = []

    def extend(chosen: tuple[int, ...], start: int) -> None:
        if len(chosen) == count:
            found.append(chosen)
            return
        for i in range(start, latest[len(chosen)] + 1):
            if sizes[len(chosen)] in candidates[i][1] and len(found) <= MAX_CHOICES:
                extend((*chosen, candidates[i][0]), i + 1)

    extend((), 0)
    return found
