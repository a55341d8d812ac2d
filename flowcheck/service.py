"""What the control server needs from the daemon, as types; `flowcheck.server` says which thread calls."""

from __future__ import annotations

from typing import Any, Protocol

from flowcheck.description import JobDescription, encode_value
from flowcheck.snapshot import Snapshot


class AttachSession(Protocol):
    """One upload: chunks of every tensor of the description, in order and without gaps, then `commit`."""

    def chunk(self, key: str, offset: int, data: memoryview) -> None:
        """Take bytes [offset, offset + len(data)) of tensor `key`. `data` is valid during the call only."""

    def commit(self) -> dict[str, Any]:
        """Everything has arrived: follow the job. Returns {"run", "epoch", "exact", "reasons", ...}."""

    def abort(self) -> None:
        """The upload ended early: free what it holds. May follow a failed `commit`."""


class FetchSession(Protocol):
    """One whole step, held for one client."""

    @property
    def header(self) -> dict[str, Any]:
        """What `snapshot_header` makes of the step."""

    def read(self, key: str, offset: int, length: int) -> memoryview:
        """Bytes of a tensor, valid until the next call. Raises Revoked once the step is no longer held."""

    def close(self) -> None:
        """The client is done or was cut."""


class Service(Protocol):
    """The daemon. A FlowcheckError from any method is told to the peer that caused the call."""

    def begin_attach(self, description: JobDescription) -> AttachSession: ...

    def marker(self, run: str, epoch: int, marker: dict[str, Any]) -> None: ...

    def layout(self, run: str, epoch: int, layout: dict[str, Any]) -> None: ...

    def detach(self, run: str, epoch: int, step: int) -> None:
        """The trainers go on without the daemon, or end: `step` was the last step that they tell of."""

    def link(self, run: str, epoch: int, alive: bool) -> None:
        """The connection on which a job's markers come stands (again), or is gone."""

    def status(self) -> dict[str, Any]: ...

    def open(self, run: str | None, step: int | None) -> FetchSession: ...


def snapshot_header(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot without its tensors' bytes, JSON-ready; `flowcheck.client` turns it back."""
    return {
        "description": snapshot.description.to_json(),
        "run": snapshot.run,
        "epoch": snapshot.epoch,
        "step": snapshot.step,
        "confirmed": snapshot.confirmed,
        "exact": snapshot.exact,
        "reasons": list(snapshot.reasons),
        "not_covered": list(snapshot.not_covered),
        "groups": [encode_value(group, f"groups[{i}]") for i, group in enumerate(snapshot.groups)],
        "scheduler": encode_value(snapshot.scheduler, "scheduler"),
        "notes": list(snapshot.notes),
        "tensors": [[key, spec.to_json()] for key, (spec, _) in snapshot.tensors.items()],
    }
