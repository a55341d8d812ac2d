"""Handing out whole steps: the newest fully known one of a job, pinned, or one from the store. Says when it is not the
newest. What is unknown is handed out on demand alone, and marked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowcheck import stepfolder
from flowcheck.errors import NothingRestorable, Revoked, UsageError, VerificationFailed
from flowcheck.job import Job
from flowcheck.report import places
from flowcheck.service import snapshot_header
from flowcheck.snapshot import Snapshot
from flowcheck.store import Store
from flowcheck.storereader import OpenState
from reconstruct.shadow import NothingKnown, Pin

CHECK_SECONDS = 10.0


class LiveFetch:
    """A client's view of a step of the shadow, pinned."""

    def __init__(self, job: Job, pin: Pin, notes: Sequence[str]) -> None:
        self._job = job
        self._pin = pin
        self._snapshot = job.snapshot(pin)
        frozen = job.status()["frozen"]
        self._snapshot.notes += [note[:1000] for note in [*notes, *([frozen] if frozen is not None else [])]]
        self.header = snapshot_header(self._snapshot)

    def read(self, key: str, offset: int, length: int) -> memoryview:
        """Bytes of a tensor, copied before the pin is checked. Raises Revoked once the pin is revoked."""
        data = self._snapshot.tensors[key][1][offset : offset + length].tobytes()
        if self._pin.revoked:
            raise Revoked("reading took longer than a step and the state moved on: ask again")
        if self._job.in_doubt(self._pin.step):
            raise Revoked(f"step {self._pin.step} turned out wrong while it was read: ask again")
        return memoryview(data)

    def close(self) -> None:
        self._pin.release()


class StoredFetch:
    """A client's view of a snapshot on disk, which is read when the client asks."""

    def __init__(self, state: OpenState, snapshot: Snapshot) -> None:
        self._state = state
        self.header = snapshot_header(snapshot)

    def read(self, key: str, offset: int, length: int) -> memoryview:
        """Bytes of a tensor. Raises VerificationFailed once the disk fails."""
        return memoryview(self._state.read(key, offset, length))

    def close(self) -> None:
        self._state.close()


def hand_out(
    jobs: Sequence[Job],
    store: Store | None,
    run: str | None,
    step: int | None,
    ahead: Mapping[str, int],
    allow_unknown: bool = False,
) -> LiveFetch | StoredFetch:
    """A step for a client: the newest fully known one of a job where that is the one asked for, else from the store.

    jobs: those that the request may mean; step: None for the newest; ahead: the newest step that each run is known to
    have done; allow_unknown: take the live step if it is asked for, whatever is known of it. Raises NothingRestorable
    when there is none, UsageError when several runs live and none was named.
    """
    if len(jobs) > 1:
        raise UsageError(f"several runs are followed here, name one: {', '.join(sorted(j.run for j in jobs))}")
    notes: list[str] = []
    if jobs:
        live = _live(jobs[0], step, allow_unknown, notes)
        if live is not None:
            return live
    if store is None:
        here = f"step {jobs[0].step} of run {jobs[0].run} is" if jobs else "nothing is"
        raise NothingRestorable("; ".join([f"{here} held here and the daemon has no store for other steps", *notes]))
    name = run if run is not None or not jobs else jobs[0].run
    state = store.open(
        name, "latest" if step is None else step, skipped=lambda line: notes.append(f"passed over: {line}")
    )
    snapshot = state.header()
    if step is None and ahead.get(snapshot.run, 0) > snapshot.step:
        notes.append(f"the job is ahead: it has done step {ahead[snapshot.run]}")
    snapshot.notes += [note[:1000] for note in notes[:32]]
    return StoredFetch(state, snapshot)


def _live(job: Job, step: int | None, allow_unknown: bool, notes: list[str]) -> LiveFetch | None:
    """The step from memory, or None with what there is to say about that in `notes`.

    Raises NothingRestorable if the step asked for is the live one and elements of it are unknown: no stored step of
    that number can be it.
    """
    unknown = job.shadow.unknown
    if unknown:
        lacks = f"step {job.step} is not fully known: {unknown.elements} elements since step {unknown.oldest}"
        lacks += f", the first {places(unknown, 1)[0]}"
        if not allow_unknown and step == job.step:
            raise NothingRestorable(f"{lacks}; wait for its repair, or take it as it is with --allow-unknown")
        notes.append(lacks)
    whole = not (allow_unknown and step in (None, job.step))
    try:
        pin = job.shadow.pin(whole=whole)
    except NothingKnown:
        return None
    try:
        if step in (None, pin.step):
            if _trusted(job, pin.step):
                return LiveFetch(job, pin, notes)
            notes.append(f"step {pin.step} is not handed out: {job.suspect}")
    except BaseException:
        pin.release()
        raise
    pin.release()
    return None


def _trusted(job: Job, step: int) -> bool:
    """Whether the step was compared with what the trainer said of it, and agrees. It follows within moments."""
    deadline = time.monotonic() + CHECK_SECONDS
    while job.checked < step and not job.in_doubt(step):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return not job.in_doubt(step)


def stored_status(store: Store | None, ahead: Mapping[str, int]) -> dict[str, Any]:
    """The job's part of a status where no job is attached: the newest snapshot on disk, which the daemon serves."""
    nothing: dict[str, Any] = {
        "run": None, "epoch": None, "step": None, "confirmed": None, "exact": None, "reasons": [], "coverage": 0.0,
        "lag_ms": None, "job_step": None, "frozen": None, "unseen": None, "holes": 0, "memory_bytes": 0, "copies": 0,
        "known_step": None, "unknown": {"elements": 0, "since": None, "where": []}, "agents": 0, "repair": None,
        "compared": None,
    }  # fmt: skip
    if store is None:
        return nothing
    try:
        found = store.newest()
        manifest = stepfolder.check(found.path) if found.path.is_dir() else None
    except (NothingRestorable, VerificationFailed):
        return nothing
    step = max(ahead.get(found.run, 0), found.step)
    where = ", job is ahead" if step > found.step else ""
    return {
        **nothing,
        "run": found.run,
        "epoch": found.epoch,
        "step": found.step,
        "known_step": found.step,
        "confirmed": manifest is None or manifest.confirmed,
        "exact": manifest is None or manifest.exact,
        "reasons": [] if manifest is None else manifest.reasons,
        "job_step": step,
        "frozen": f"frozen at {found.step}{where}: no job is followed here yet; trainers that run join soon",
    }
