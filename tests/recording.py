"""A control service that keeps everything it is given: the daemon's place in tests of the server and the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowcheck.checkpoints import Roots
from flowcheck.description import JobDescription
from flowcheck.errors import NothingRestorable, Revoked, UsageError
from flowcheck.seeding import Seeding
from flowcheck.service import Seeded, snapshot_header
from flowcheck.snapshot import Snapshot


class Upload:
    def __init__(self, service: Recording, description: JobDescription, late: bool) -> None:
        self.description = description
        self.late = late
        self.tensors = {key: bytearray(spec.nbytes) for key, spec in description.tensors()}
        self.uploaded: set[str] = set()
        self.largest = 0
        self.aborted = False
        self._service = service

    def seed(self, path: str, checksums: bytes) -> Future[Seeded]:
        def load(key: str, offset: int, data: np.ndarray) -> None:
            self.tensors[key][offset : offset + data.nbytes] = data.tobytes()

        lines, roots = self._service.lines, self._service.roots
        self.seeding = Seeding(path, checksums, self.description, load, roots, threading.Lock(), lines.append).start()
        return self.seeding.found

    def chunk(self, key: str, offset: int, data: memoryview) -> None:
        self.largest = max(self.largest, len(data))
        self.uploaded.add(key)
        self.tensors[key][offset : offset + len(data)] = data

    def commit(self) -> dict[str, Any]:
        run = self.description.run
        if run == "fail-commit":
            raise UsageError("the disk is full: free some space")
        epoch = sum(1 for upload in self._service.committed if upload.description.run == run) + 1
        self._service.committed.append(self)
        return {"run": run, "epoch": epoch, "exact": run != "inexact", "reasons": []}

    def abort(self) -> None:
        self.aborted = True


class Reading:
    def __init__(self, service: Recording, snapshot: Snapshot) -> None:
        self.header = snapshot_header(snapshot)
        self.closed = False
        self._service = service
        self._snapshot = snapshot

    def read(self, key: str, offset: int, length: int) -> memoryview:
        if self._service.revoked:
            raise Revoked("the step was needed: ask again")
        if key == "buffer/broken":
            raise ZeroDivisionError("a bug in the service")
        return memoryview(self._snapshot.tensors[key][1])[offset : offset + length]

    def close(self) -> None:
        self.closed = True


class Agent(NamedTuple):
    peer: bytes
    run: str
    epoch: int | None
    rank: int
    step: int


class Piece(NamedTuple):
    rank: int
    run: str
    epoch: int
    number: int
    key: str
    lo: int
    hi: int
    step: int
    sections: dict[str, memoryview]
    counter: bytes | None
    arrived: float


class Refusal(NamedTuple):
    rank: int
    number: int
    reason: str


class Recording:
    """Implements flowcheck.service.Service."""

    def __init__(self, *roots: Path) -> None:
        self.roots = Roots(roots)
        self.lines: list[str] = []
        self.uploads: list[Upload] = []
        self.committed: list[Upload] = []
        self.markers: list[tuple[str, int, dict[str, Any]]] = []
        self.layouts: list[tuple[str, int, dict[str, Any]]] = []
        self.detached: list[tuple[str, int, int]] = []
        self.links: list[tuple[str, int, bool]] = []
        self.readings: list[Reading] = []
        self.snapshot: Snapshot | None = None
        self.revoked = False
        self.threads: set[str] = set()
        self.before_open: Callable[[], None] | None = None
        self.agents: dict[bytes, Agent] = {}  # those that are there
        self.gone: list[bytes] = []
        self.pieces: list[Piece] = []
        self.refusals: list[Refusal] = []
        self.compared: list[tuple[int, int, dict[str, str | None]]] = []  # rank, step, checksums
        self.tell: Callable[..., None] | None = None
        self.at_end: dict[str, list[tuple[int, str, int, int]]] = {}  # by run: parts to ask for after its last step

    def begin_attach(self, description: JobDescription, late: bool = False) -> Upload:
        if description.run == "refuse-me":
            raise UsageError("this run is refused: choose another name")
        self.uploads.append(Upload(self, description, late))
        return self.uploads[-1]

    def marker(self, run: str, epoch: int, marker: dict[str, Any]) -> None:
        self.threads.add(threading.current_thread().name)
        self.markers.append((run, epoch, marker))

    def layout(self, run: str, epoch: int, layout: dict[str, Any]) -> None:
        self.layouts.append((run, epoch, layout))

    def detach(self, run: str, epoch: int, step: int) -> None:
        self.detached.append((run, epoch, step))
        agent, names = self.agent_of(run, 0), {"run": run, "epoch": epoch}
        if self.tell is None or agent is None:
            return
        if run not in self.at_end:
            self.tell(agent.peer, "repair-done", **names, step=step)
        elif self.at_end[run]:
            self.tell(agent.peer, "repair-ask", **names, parts=self.at_end[run], percent=1e-3, step_bytes=1)

    def link(self, run: str, epoch: int, alive: bool) -> None:
        self.links.append((run, epoch, alive))

    def status(self) -> dict[str, Any]:
        return {"markers": len(self.markers)}

    def compare(self, run: str | None, number: int | None) -> dict[str, Any]:
        return {"number": number or 1, "report": None if number is None else {"run": run}}

    def open(self, run: str | None, step: int | None, allow_unknown: bool) -> Reading:
        if self.before_open is not None:
            self.before_open()
        if self.snapshot is None or step not in (None, self.snapshot.step):
            raise NothingRestorable(f"step {step} is not held: ask for latest")
        self.readings.append(Reading(self, self.snapshot))
        return self.readings[-1]

    def agent(self, peer: bytes, run: str, epoch: int | None, rank: int, step: int) -> None:
        self.agents[peer] = Agent(peer, run, epoch, rank, step)

    def agent_gone(self, peer: bytes) -> None:
        del self.agents[peer]
        self.gone.append(peer)

    def repair_data(
        self,
        peer: bytes,
        run: str,
        epoch: int,
        ask: int,
        key: str,
        lo: int,
        hi: int,
        step: int,
        sections: dict[str, memoryview],
        counter: bytes | None,
    ) -> None:
        rank = self.agents[peer].rank
        self.pieces.append(Piece(rank, run, epoch, ask, key, lo, hi, step, dict(sections), counter, time.monotonic()))
        if self.tell is not None and self.at_end.get(run, [(-1,)])[-1][0] == ask:
            self.tell(peer, "repair-done", run=run, epoch=epoch, step=step)

    def repair_refused(self, peer: bytes, run: str, epoch: int, ask: int, reason: str) -> None:
        self.refusals.append(Refusal(self.agents[peer].rank, ask, reason))

    def compare_data(
        self, peer: bytes, run: str, epoch: int, ask: int, step: int, checksums: dict[str, str | None]
    ) -> None:
        self.compared.append((self.agents[peer].rank, step, checksums))

    def agent_of(self, run: str, rank: int) -> Agent | None:
        """The agent of a rank, once it is known to belong to an attached job."""
        found = [a for a in list(self.agents.values()) if (a.run, a.rank) == (run, rank) and a.epoch is not None]
        return found[-1] if found else None

    def of(self, run: str) -> Upload:
        """The newest finished upload of a run."""
        return [upload for upload in self.committed if upload.description.run == run][-1]

    def markers_of(self, run: str, epoch: int = 1) -> list[dict[str, Any]]:
        return [marker for r, e, marker in self.markers if (r, e) == (run, epoch)]


def wait_for(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
    """The first true value of `condition`, or a failure."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "the expected condition did not come true in time"
        time.sleep(0.01)
    return value


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
