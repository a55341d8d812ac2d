"""A daemon that only asks: takes attaches, throws everything away and keeps the trainers' agents busy.

The run's name says with what, see `ASKS`. It stands for a checkpoint node of its own: nothing of it runs on the
trainers' cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from flowcheck.description import JobDescription
from flowcheck.protocol import CHUNK
from flowcheck.server import Server

ASKS = {"agent-idle": 0.0, "repair": 1.0, "scrub": 0.1}
"""Run -> percent of a step's time that copies may take."""
AHEAD = 16
"""Parts that an agent owes at any time."""
STEP_BYTES = 64 << 20


class Asker:
    """Implements `flowcheck.service.Service`. given: run -> (pieces, their bytes) so far."""

    def __init__(self, address: str) -> None:
        self.given = dict.fromkeys(ASKS, (0, 0))
        self._epochs = itertools.count(1)
        self._numbers = itertools.count(1)
        self._owed: dict[bytes, set[int]] = {}
        self._over: set[int] = set()  # epochs whose jobs have ended
        self._parts: dict[str, Any] = {}
        self.server = Server(self, [address])  # type: ignore[arg-type]

    def begin_attach(self, description: JobDescription, late: bool = False) -> _Attach:
        sections = 1 + max((len(state) - 1 for state in description.optimizer.state.values()), default=2)
        parts = []
        for parameter in description.parameters:
            size = CHUNK // sections // parameter.spec.itemsize
            end = parameter.spec.numel
            parts += [[f"model/{parameter.name}", lo, min(lo + size, end)] for lo in range(0, end, size)]
        self._parts[description.run] = itertools.cycle(parts)
        return _Attach(description.run, next(self._epochs))

    def agent(self, peer: bytes, run: str, epoch: int | None, rank: int, step: int) -> None:
        if epoch is not None and epoch not in self._over:
            self._ask(peer, run, epoch)

    def agent_gone(self, peer: bytes) -> None:
        self._owed.pop(peer, None)

    def repair_data(
        self, peer: bytes, run: str, epoch: int, ask: int, *rest: Any, sections: Mapping[str, memoryview], **more: Any
    ) -> None:
        pieces, nbytes = self.given[run]
        self.given[run] = pieces + 1, nbytes + sum(map(len, sections.values()))
        self._owed[peer].discard(ask)
        if epoch not in self._over:
            self._ask(peer, run, epoch)

    def detach(self, run: str, epoch: int, step: int) -> None:
        """The job ends: nothing more is asked, so that it waits for nobody."""
        self._over.add(epoch)
        for peer in list(self._owed):
            self.server.tell(peer, "repair-done", run=run, epoch=epoch, step=step)

    def repair_refused(self, peer: bytes, run: str, epoch: int, ask: int, reason: str) -> None:
        self._owed[peer].discard(ask)

    def _ask(self, peer: bytes, run: str, epoch: int) -> None:
        owed = self._owed.setdefault(peer, set())
        if not ASKS[run] or len(owed) > AHEAD // 2:
            return
        numbers = list(itertools.islice(self._numbers, AHEAD - len(owed)))
        owed.update(numbers)
        parts = [[number, *next(self._parts[run])] for number in numbers]
        self.server.tell(
            peer, "repair-ask", run=run, epoch=epoch, parts=parts, percent=ASKS[run], step_bytes=STEP_BYTES
        )

    def _nothing(self, *_: Any) -> None:
        """Told of what is of no use here."""

    marker = layout = link = compare_data = _nothing


class _Attach:
    def __init__(self, run: str, epoch: int) -> None:
        self._ack = {"run": run, "epoch": epoch}

    def chunk(self, key: str, offset: int, data: memoryview) -> None:
        """Thrown away."""

    def commit(self) -> dict[str, Any]:
        return self._ack

    def abort(self) -> None:
        """Nothing is held."""
