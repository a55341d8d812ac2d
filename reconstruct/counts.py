"""Whether c10d's count of a group's collectives and the wire's agree where a step's window ends.

c10d counts the calls of one group (ncclGroupStart, a coalescing manager, all_reduce_coalesced) as one collective; over
NCCL the wire shows each of them. Behind such calls a marker's number points too early, and a window that ends there may
lack the reduction that the step used, or hold another all-reduce of its size. Canaries tell. Without them the
all-reduces of a window are only believed for one of these reasons:

    all calls are DDP's own   as many as the step's buckets and layout broadcasts, from a boundary that is certain:
                              nothing was grouped
    the counts agree          when the marker came the wire had shown just the collectives that it counts
    there is no room          the marker came before its collectives did, as it may from a GPU; but the window's other
                              calls are too few for a second reduction and a group, and none is of a bucket's size.
                              Only for several buckets: what has all their sizes in order is taken for a reduction

Groups only ever add to the wire. So where a later marker's count agrees those before did, too, and a marker that the
wire had left behind was only late.

Behind a step that was not understood nobody knows whether the next window begins where c10d's number says, over gloo
neither: from there on canaries tell, until the counts agree once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reconstruct.decoder import Decoder

AGREE, AHEAD, BEHIND = 0, 1, 2
_GROUPED = (
    "calls in one group (ncclGroupStart, a coalescing manager, all_reduce_coalesced), which c10d counts as one: issue "
    "them one by one, or on another process group than DDP's, and attach again"
)


@dataclass(frozen=True, slots=True)
class Window:
    """What a marker bounds. calls: as c10d counted them; own: how many of them are DDP's; buckets: of one reduction;
    (0: it holds several); others: all-reduces of a bucket's size that are not the step's; end: the tag behind it;
    arrived: when the marker came, ns, None while it is not known what the wire had shown by then."""

    calls: int
    own: int
    buckets: int
    others: int
    end: int
    arrived: int | None


def surveyed(decoder: Decoder, group: str, end: int, least: int, seen: Mapping[int, int]) -> bool:
    """Whether it is known how many collectives those with tags up to `end` are which were seen so far.

    Of the last one it need not be known what it is, where what was seen of it is less than `least` bytes, the size of
    the smallest bucket: it is none. seen: tag -> when it was first seen, ns.
    """
    decided = decoder.decided(group)
    if decided < end:
        return decided == end - 1 and decoder.waiting(group) < least
    return end in seen or decoder.max_tag(group) != end


def _more(seen: Mapping[int, int], end: int, arrived: int) -> int:
    """Collectives behind a marker's window that the wire had shown when it came."""
    return sum(1 for tag, time in seen.items() if tag >= end and time <= arrived)


def shown(seen: Mapping[int, int], end: int, arrived: int) -> int:
    """How the wire's count stood to a marker's when it came: AGREE, AHEAD or BEHIND. seen: tag -> when it was first
    seen, ns; end: the tag behind the marker's window; arrived: ns."""
    if _more(seen, end, arrived):
        return AHEAD
    return AGREE if seen.get(end - 1, arrived + 1) <= arrived else BEHIND


def surplus(seen: Mapping[int, int], end: int, arrived: int) -> str | None:
    """What is to be said of a window that ends before what the wire had shown when its marker came, if it does."""
    more = _more(seen, end, arrived)
    if not more:
        return None
    return (
        f"when its marker came the wire had shown {more} more collectives than c10d had counted: either it was late, "
        f"or there are {_GROUPED}"
    )


class Counts:
    """The windows of one job, one after another.

    every: whether c10d counts every collective that has a tag, as over gloo: then there is nothing to ask.
    """

    def __init__(self, every: bool) -> None:
        self.every = every
        self.astray = False
        """The last steps were not understood: only canaries tell, or counts that agree."""
        self._certain = True  # the last window ended where c10d's number says
        self._apart = False  # c10d's numbers were seen to run apart from the tags

    def problem(self, window: Window, later: Iterable[tuple[int, int]], seen: Mapping[int, int]) -> str | None:
        """Why nothing but canaries can tell which of a window's all-reduces are the step's; None if the counts do.

        later: (end, arrived) of later markers; seen: tag -> when it was first seen, ns.
        """
        if self.agreed(window, later, seen):
            return None
        if self.astray:
            return (
                "no element of the gradient was reported to check, and as steps before it were not understood, nothing "
                "tells where its collectives begin"
            )
        if window.arrived is None:
            return (
                "no element of the gradient was reported to check, and what the wire had shown when its marker came is "
                f"not all understood, so that nothing rules out {_GROUPED}"
            )
        text = surplus(seen, window.end, window.arrived)
        if text is not None:
            return f"no element of the gradient was reported to check, and {text}"
        if window.buckets > 1 and window.calls - window.own <= window.buckets and not window.others:
            return None
        return (
            "no element of the gradient was reported to check, and its marker came before the collectives that it "
            f"counts, so that nothing rules out {_GROUPED}"
        )

    def claimed(
        self, window: Window, later: Iterable[tuple[int, int]], seen: Mapping[int, int], decided: bool
    ) -> None:
        """The step of this window is claimed. decided: every collective of it is known for what it is."""
        self._certain = self.agreed(window, later, seen) and (self.every or decided)
        self.astray = self.astray and not self._certain

    def agreed(self, window: Window, later: Iterable[tuple[int, int]], seen: Mapping[int, int]) -> bool:
        """Whether the window is known to end where c10d's number says."""
        if (self.every and not self.astray) or (self._certain and window.calls == window.own):
            return True
        if window.arrived is None or self._apart:
            return False
        state = shown(seen, window.end, window.arrived)
        return state == AGREE or (state == AHEAD and any(shown(seen, *one) == AGREE for one in later))

    def open(self, window: Window, seen: Mapping[int, int], decided: bool) -> bool:
        """Whether what is still to come may show that a window ends where c10d's number says. decided: every collective
        of it is known for what it is."""
        return not decided or window.arrived is None or shown(seen, window.end, window.arrived) == AHEAD

    def unmarked(self, own: bool) -> None:
        """A step was claimed without its marker. own: nothing but DDP's collectives lay in front of its end."""
        self._certain = self.every or (self._certain and own)

    def blank(self) -> None:
        """The step of a window was not understood."""
        self._certain, self.astray = False, True

    def ran_apart(self) -> None:
        """c10d's numbers and the tags were seen to run apart: that they agree once proves nothing."""
        self._apart = True
