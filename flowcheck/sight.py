"""Whether the mirrors show a job at all: frames that one of its ranks sent another.

A job whose ranks sit behind no mirrored port looks like one that is silent. What tells them apart: by the attach its
ranks have reduced or broadcast something (c10d counts it), so a daemon that was capturing all that time, without loss,
must have seen frames of it; and once a marker says that a step is done, any daemon must have. On the capture thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from flowcheck.description import GroupRecord
from mirror.flows import EPOCH, Flows, address_text, address_words

__all__ = ["Sight"]

MOST_NAMED = 8


class Sight:
    """What was seen of a process group since this was made, at its job's attach.

    tables: the flows of TCP and of RoCE. For gloo only connections count that have an end at one of the group's own
    listeners, so that an earlier job's on the same nodes are not taken for it.
    """

    def __init__(self, record: GroupRecord, tables: Sequence[Flows]) -> None:
        self.seen = False  # since the attach
        self._listeners = {address for context in record.contexts for address in context.values()}
        named = {ip for ip, _ in self._listeners}
        if record.nccl is not None:
            named = {ip for rank in record.nccl.addresses for ip in rank}
        self.addresses = sorted(named)
        self._words = {address_words(ip) for ip in named}
        self._low = np.array(sorted({low for _, low in self._words}), np.int64)
        self._tables = tables
        self._since = [int(table.table.meta[EPOCH]) for table in tables]

    def ever(self) -> bool:
        """Whether the tables hold anything of the group, from before the attach too."""
        return any(self._find(table, -1) for table in self._tables)

    def look(self) -> bool:
        """Look again, unless something was seen already."""
        self.seen = self.seen or any(
            self._find(table, since) for table, since in zip(self._tables, self._since, strict=True)
        )
        return self.seen

    @property
    def whole(self) -> bool:
        """Whether no flow had to be forgotten to make room for another."""
        return not any(table.evicted for table in self._tables)

    def _find(self, table: Flows, since: int) -> bool:
        """Whether a flow between two of the addresses was touched in a block after number `since`."""
        key = table.table.key[: table.count]
        among = np.isin(key[:, 1], self._low) & np.isin(key[:, 3], self._low)
        found = np.flatnonzero(among & (table.table.touched[: table.count] > since))
        if self._listeners and found.size:
            ports = np.array(sorted({port for _, port in self._listeners}), np.int64)
            ends = key[found, 4]
            found = found[np.isin(ends >> 16 & 0xFFFF, ports) | np.isin(ends & 0xFFFF, ports)]
        return any(self._between(table, int(flow)) for flow in found)

    def _between(self, table: Flows, flow: int) -> bool:
        a, b, c, d = (int(word) for word in table.table.key[flow, :4])
        if (a, b) == (c, d) or (a, b) not in self._words or (c, d) not in self._words:
            return False
        if not self._listeners:
            return True
        ends = int(table.table.key[flow, 4])
        source, target = (address_text(a, b), ends >> 16 & 0xFFFF), (address_text(c, d), ends & 0xFFFF)
        return source in self._listeners or target in self._listeners

    def text(self, interfaces: Sequence[str]) -> str:
        """What to tell a person when nothing is seen."""
        ranks = ", ".join(itertools.islice(self.addresses, MOST_NAMED))
        more = len(self.addresses) - MOST_NAMED
        doctor = " && ".join(f"flowcheck doctor -i {interface}" for interface in interfaces)
        return (
            f"no rank of this job sits behind a mirrored port: nothing that {ranks}"
            + (f" and {more} more" if more > 0 else "")
            + f" sent each other came in on {', '.join(interfaces)}, so no step can be followed; mirror a port of one "
            f"of these nodes, or look at what comes in, on the checkpoint node: {doctor}"
        )
