"""What a wrong TCP checksum means: damage on the way here, or nothing at all.

Checksums are no proof by themselves: frames that were captured before an adapter finished them, or that it merged out
of several, have wrong ones and right bytes. What a flow has shown so far tells:

* A segment with a wrong checksum is refused, as if it had never come, where more of the flow's were right than wrong. A
  single right one is much: of an unfinished checksum it comes by chance in one case of 65,535. It is the rule of the
  invariant CRC of RoCE (`mirror.roce_kernel`).
* A segment longer than every one of the flow with a right checksum is not judged, and its wrong checksum counts neither
  way: adapters that merge segments (LRO) leave the first one's checksum, and what they merge is longer than what came
  alone. So damage passes in the first segment of a connection, and in the first one of a new greatest length; of those
  there are a handful in a connection, as data soon fill segments.
* Wrong ones before the first right one do not count against the flow, so damage at its start does not make it
  distrusted; damage later costs one right segment each. The count has no ceiling: a link that worked for long and then
  fails in most frames is still refused what is wrong.
* Who can put frames between these can have checks dropped by as many wrong ones as there were right ones. They could
  as well have sent wrong bytes with right checksums.
* The count goes with the addresses and ports, over connections that follow one another; it ends with the flow's id.

A refused segment is believed in nothing: neither its acknowledgment nor its flags count. What it says of its place is
only noted, for the cause of a hole that turns out to be there.

Sources: RFC 9293, 3.1; docs/faults.md.
"""

from __future__ import annotations

from mirror.internal import internal
from mirror.reorder import BASE, END, LONGEST, NEXT, STATE, SUM_BAD, SUM_REFUSED, TRUST, USED, Machine
from mirror.spans import REFUSED
from mirror.tcp_holes import note
from mirror.tcp_stream import ESTABLISHED, FAR, unwrap

__all__ = ["refuse"]


@internal()
def refuse(m: Machine, flow: int, seq: int, length: int) -> bool:
    """A segment with a wrong checksum: whether it must not be believed."""
    row = m.state[flow]
    m.counters[SUM_BAD] += 1
    if length > row[LONGEST]:
        return False
    row[TRUST] -= 1
    if row[TRUST] <= 0:
        return False
    m.counters[SUM_REFUSED] += 1
    # Nothing of it is proven, so these notes take no more than half of the cells: what waits needs them more.
    if row[STATE] == ESTABLISHED and m.meta[USED] < m.cells.shape[0] // 2:
        offset = unwrap(row[NEXT], row[BASE], seq)
        if row[NEXT] < offset + length <= row[END] + FAR:
            note(m, flow, max(offset, row[NEXT]), offset + length, REFUSED)
    return True
