"""Which release of NCCL a capture is of: by what the user or the job file says, or by the set-up alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flowcheck.errors import UsageError
from flowcheck.inspect.nccl_flows import Connection
from flowcheck.inspect.nccl_setup import cut_alike
from reconstruct.nccl.bootstrap import Member
from reconstruct.nccl.setup import releases, span_text
from reconstruct.nccl.versions import CTS_FORMS, CtsForm, Version, block_versions, traits

__all__ = ["Release", "Word", "inline", "release", "same_layout", "spans_told"]


@dataclass(frozen=True, slots=True)
class Word:
    """What somebody says. source: who."""

    version: Version
    source: str


@dataclass(frozen=True, slots=True)
class Release:
    """name: in full, as in 2.19.4; shown: as the set-up tells it, "" where somebody says it."""

    name: str
    shown: str = ""


def release(
    word: Word | None, blocks: Collection[int], members: Sequence[Member], found: Sequence[Connection]
) -> Release | None:
    """The release, None where it is not known.

    blocks: sizes of set-up blocks seen; members: communicators set up; found: connections. Raises UsageError where the
    word and the traffic contradict each other.
    """
    evidence = [block_versions(size) for size in sorted(blocks)]
    evidence += [list(member.versions) for member in members if member.versions]
    orders = {one.big_endian for one in found} - {None}
    big = orders.pop() if len(orders) == 1 else None
    if word is not None:
        _check(word, evidence, big, found)
        return Release(".".join(map(str, word.version)))
    # Without the job's own word nobody has told of NVLSTree, and none is claimed.
    fitting = [v for v in releases(evidence) if big in (None, traits(v).immediate_big_endian)]
    # Records of the bootstrap alone may be of a communicator that has nothing to do with connections of RDMA.
    if not fitting or not (blocks or any(one.over_tcp for one in found)) or not cut_alike(fitting, False):
        return None
    return Release(".".join(map(str, fitting[0])), span_text(fitting[0], fitting[-1]))


def _check(word: Word, evidence: Sequence[Sequence[tuple[Version, Version]]], big: bool | None,
           found: Sequence[Connection]) -> None:
    name = ".".join(map(str, word.version))
    for spans in evidence:
        if not any(first <= word.version <= last for first, last in spans):
            raise UsageError(
                f"{word.source} says NCCL {name}, the set-up in the capture is that of "
                f"{', '.join(span_text(*span) for span in spans)}: leave it out, or give the right one"
            )
    if big not in (None, traits(word.version).immediate_big_endian):
        order = "big endian, as from 2.29.2 on" if big else "little endian, as up to 2.28"
        raise UsageError(f"{word.source} says NCCL {name}, immediates in the capture are {order}: give the right one")
    form = traits(word.version).cts
    for one in found:
        if one.forms and not any(same_layout(CTS_FORMS[layout], form) for layout in one.forms):
            raise UsageError(
                f"{word.source} says NCCL {name}, whose CTS entries have {form.entry} bytes; those on queue pair "
                f"{one.pairs[0]} are those of NCCL {' or '.join(sorted(one.forms))}: give the right one"
            )


def same_layout(one: CtsForm, other: CtsForm) -> bool:
    """Whether entries of two releases look alike: how many there are in a row does not show in one."""
    return replace(one, slots=0, rkey_count=0) == replace(other, slots=0, rkey_count=0)


def spans_told(blocks: Collection[int]) -> str:
    """What the sizes of set-up blocks say where that is not enough, in words; "" if there were none."""
    spans = sorted({span_text(*span) for size in blocks for span in block_versions(size)})
    return f" (the set-up says one of {', '.join(spans)})" if spans else ""


def inline(word: Word | None, members: Sequence[Member]) -> int | None:
    """`Traits.socket_inline` of connections made now; None where neither the word nor the set-up so far tells it."""
    if word is not None:
        return traits(word.version).socket_inline
    told = {traits(v).socket_inline for one in members if one.versions for v in releases([one.versions])}
    return told.pop() if len(told) == 1 else None
