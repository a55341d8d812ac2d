"""What the control server needs from the daemon, as types; `flowcheck.server` says which thread calls."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from flowcheck.description import JobDescription, encode_value
from flowcheck.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Seeded:
    """What a checkpoint gave. missing: for every tensor in the description's order, whether it is still to be uploaded;
    problem: why any is."""

    missing: list[bool]
    problem: str | None


class AttachSession(Protocol):
    """One upload: chunks of every tensor of the description, in order and without gaps, then `commit`. What was taken
    from a checkpoint before (`seed`) is left out."""

    def seed(self, path: str, checksums: bytes) -> Future[Seeded]:
        """Read a checkpoint and take the tensors with these checksums (`protocol.SUM_BYTES` each, in the description's
        order) from it. Returns at once; no chunk comes and nothing is committed before the result is there."""

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


class AgentService(Protocol):
    """What comes from the agents in the trainers. `peer` names an agent for `flowcheck.server.Server.tell`; one whose
    connection broke comes back under another name."""

    def agent(self, peer: bytes, run: str, epoch: int | None, rank: int, step: int) -> None:
        """The agent of a rank lives, `step` optimizer steps are done there. Comes every second.

        epoch: None unless this daemon has taken an attach of that very job, same processes: whatever `run` says, its
        state is not that of a job followed here, and only a `join-ask` to rank 0 makes it one.
        """

    def agent_gone(self, peer: bytes) -> None:
        """Its connection ended, or it fell silent."""

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
        sections: Mapping[str, memoryview],
        counter: bytes | None,
    ) -> None:
        """Elements [lo, hi) of `key` as of the end of `step`. The memoryviews may be kept; nobody writes them.

        sections: "model", or "buffer" for a buffer, then the optimizer state keys that the parameter has, but `step`,
        whose bytes are `counter`.
        """

    def repair_refused(self, peer: bytes, run: str, epoch: int, ask: int, reason: str) -> None:
        """Part `ask` will not come from this agent."""

    def compare_data(
        self, peer: bytes, run: str, epoch: int, ask: int, step: int, checksums: Mapping[str, str | None]
    ) -> None:
        """The checksums of every parameter and state tensor as of the end of `step`, by tensor key.

        A checksum is xxh3_128 of the tensor's bytes in memory order, hexadecimal, as in a manifest; None for a state
        tensor whose memory order is not its parameter's.
        """


class Service(AgentService, Protocol):
    """The daemon. A FlowcheckError from any method is told to the peer that caused the call, unless it is a trainer
    that reads no replies."""

    def begin_attach(self, description: JobDescription, late: bool = False) -> AttachSession:
        """late: training goes on meanwhile and nothing is uploaded, `commit` follows at once. The description is as
        of the end of step `description.step`; the markers of the steps after it come after the commit."""

    def marker(self, run: str, epoch: int, marker: dict[str, Any]) -> None: ...

    def layout(self, run: str, epoch: int, layout: dict[str, Any]) -> None: ...

    def detach(self, run: str, epoch: int, step: int) -> None:
        """The trainers go on without the daemon, or end: `step` was the last step that they tell of."""

    def link(self, run: str, epoch: int, alive: bool) -> None:
        """The connection on which a job's markers come stands (again), or is gone."""

    def status(self) -> dict[str, Any]: ...

    def compare(self, run: str | None, number: int | None) -> dict[str, Any]:
        """Start a comparison of a job's state with a trainer's (number None), or ask for the report of that number:
        {"number", "report"}, the report None while there is none (`flowcheck.comparing`)."""

    def open(self, run: str | None, step: int | None, allow_unknown: bool) -> FetchSession:
        """A step for a client; allow_unknown: whether elements of it may be unknown, which the header then names."""


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
        "unknown": snapshot.unknown.to_json(),
        "tensors": [[key, spec.to_json()] for key, (spec, _) in snapshot.tensors.items()],
    }
