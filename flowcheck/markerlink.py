"""One daemon's step markers: sent while it follows the job, held while it is joining.

Everything here but `settle` runs on the training thread and never waits. While a daemon joins late, the markers of the
steps after its description wait for the epoch that it opens; after that they leave, a few per step, before newer ones.
"""

from __future__ import annotations

import json
from collections import deque

from flowcheck.connection import Connection
from flowcheck.protocol import encode

MARKER_QUEUE = 1000
"""Markers held while the daemon is out of reach or joining; beyond them they are dropped, and the daemon notices."""
FLUSH = 16
"""Held markers sent per step."""


class MarkerLink:
    """`unsent`: the next marker carries every field of the param groups. `dropped`: markers that were given up."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.unsent = False
        self.dropped = 0
        self._connection: Connection | None = None
        self._run, self._epoch, self._head = "", 0, ""
        self._base = 0  # changes of the fields before this epoch's description
        self._held: deque[str] | None = None
        self._settled: tuple[Connection, str, int] | None = None
        self._failed = False
        self._ended = False  # the daemon was told which step was the last

    @property
    def open(self) -> bool:
        """Whether markers are of use to anybody."""
        return self._connection is not None or self._held is not None

    def follow(self, connection: Connection, run: str, epoch: int) -> None:
        """The daemon follows the job as (run, epoch); its markers go over `connection`, which is owned from here on."""
        self._connection, self._run, self._epoch = connection, run, epoch
        head = {"v": 1, "type": "marker", "run": run, "epoch": epoch}
        self._head = json.dumps(head)[:-1] + ',"marker":{"step":'

    def hold(self, version: int) -> Connection | None:
        """A description was taken: markers from now on are held. version: field changes so far. Returns the connection
        of the epoch before, which is not used any more."""
        old, self._connection = self._connection, None
        self._held, self._settled, self._failed = deque(), None, False
        self._base, self.unsent = version, False
        return old

    def settle(self, joined: tuple[Connection, str, int] | None) -> None:
        """How the join ended, from another thread: (connection, run, epoch), or None if it failed."""
        if joined is None:
            self._failed = True
        else:
            self._settled = joined

    def post(self, start: str, version: int, groups: str | None, end: str) -> None:
        """Send a marker, or hold it. Its JSON: `start`, the version, the groups' fields if given, `end`."""
        text = f'{start}{version - self._base},"groups":{groups or "null"}{end}'
        if self._held is not None:
            self._hold(text)
            self._advance()
        elif self._connection is not None and not self._connection.post(f"{self._head}{text}".encode()):
            self.dropped += 1
            return
        if groups is not None:
            self.unsent = False

    def detach(self, step: int) -> bool:
        """Say that `step` was the last one: reductions that follow belong to no step. Whether the daemon follows."""
        while self._held is not None and self._advance():
            continue
        if self._connection is None:
            return False
        if not self._ended:
            self._ended = self._connection.post(encode("detach", run=self._run, epoch=self._epoch, step=step))
        return True

    def close(self, step: int, linger: float) -> None:
        """`detach`, and close the connection."""
        if self.detach(step) and self._connection is not None:
            self._connection.close(linger=linger)
            self._connection = None
        if self._settled is not None:  # it joined when it was too late
            self._settled[0].close()
            self._settled = None

    def _hold(self, text: str) -> None:
        assert self._held is not None
        if len(self._held) >= MARKER_QUEUE:
            self._held.popleft()
            self.dropped += 1
            self.unsent = True  # the fields may have been in it
        self._held.append(text)

    def _advance(self) -> bool:
        """After the join: send some of what was held. Whether anything was done."""
        if self._failed:
            self._held, self._failed = None, False
            return True
        if self._settled is not None:
            settled, self._settled = self._settled, None
            self.follow(*settled)
        if self._held is None or self._connection is None:
            return False
        for _ in range(min(FLUSH, len(self._held))):
            if not self._connection.post(f"{self._head}{self._held[0]}".encode()):
                return False
            self._held.popleft()
        if not self._held:
            self._held = None
        return True
