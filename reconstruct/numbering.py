"""c10d's sequence numbers and gloo's tags: where a step's collectives begin and end.

Both count the collectives of a process group and would be equal, but point-to-point messages advance the sequence
number alone and monitored_barrier takes two tags for one number (docs/gloo.md, "Slots and tags"). How far they are
apart is read from the wire: at the attach, when no collective is under way, and wherever a collective is first seen
long after a marker, so that it must belong to a later step whatever the numbers say.
"""

from __future__ import annotations

from collections.abc import Mapping

from reconstruct.decoder import Request

FOREVER = 1 << 62


class Numbering:
    """`start`: the first tag that no claimed step has used.

    number: c10d's at the attach, of the next collective; seen: highest tag seen so far, -1 if none; attached: when the
    job attached, ns of capture time, None if not known (then the two are taken to be equal).
    """

    def __init__(self, number: int, seen: int, attached: int | None) -> None:
        self.start = number
        self._number = number
        self._offset = 0  # sequence numbers minus tags
        self._before = seen  # highest tag seen before the attach
        self._attached = attached
        self._top = -1  # at the last marker: highest tag seen
        self._until = FOREVER  # what is first seen after this belongs to a step after the last marker's

    def see(self, request: Request) -> bool:
        """Take a collective's first payload; whether it belongs to a step that is not claimed yet."""
        self._calibrate(request)
        if request.tag >= self.start:
            return True
        if request.tag <= self._top or request.time <= self._until:
            return False
        self._offset += self.start - request.tag
        self.start = request.tag
        return True

    def _calibrate(self, request: Request) -> None:
        """The next tag lies behind the highest seen before the attach, and is at most the first seen after it."""
        if self._attached is None:
            return
        if request.time < self._attached:
            self._before = max(self._before, request.tag)
            return
        self.start = self._before + 1 if self._before >= self._number else min(self._number, request.tag)
        self._offset = self._number - self.start
        self._attached = None

    def end(self, sequence: int) -> int:
        """The tag behind the window of a marker with this sequence number."""
        return sequence - self._offset

    def bounds(self, sequence: int, until: int, seen: Mapping[int, int]) -> int:
        """As `end`, but not beyond what was first seen after `until`. seen: tag -> when it was first seen, ns."""
        end = self.end(sequence)
        return min((tag for tag, time in seen.items() if self.start <= tag < end and time > until), default=end)

    def marked(self, sequence: int, end: int, top: int, until: int) -> None:
        """A step with this marker is claimed; its window ended at tag `end`, `top` is the highest tag seen by now."""
        self._offset = sequence - end
        self._top, self._until = top, until

    def unmarked(self) -> None:
        """A step without a marker is claimed: nothing tells when it ended."""
        self._top, self._until = FOREVER, FOREVER
