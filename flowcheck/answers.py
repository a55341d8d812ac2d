"""What agents tell the control server, checked and passed on to the service. Sans-IO; times are seconds."""

from __future__ import annotations

import json
from typing import Any

from flowcheck.description import DescriptionError
from flowcheck.hellos import Hello, Hellos
from flowcheck.protocol import CHUNK
from flowcheck.service import AgentService
from flowcheck.sessions import digest
from flowcheck.specs import MAX_TENSORS

KINDS = frozenset({"agent-hello", "repair-data", "repair-refused", "compare-data"})
MAX_CHECKSUMS = 4 * MAX_TENSORS


class Answers:
    """The agents' side of the control server: who they are (`Hellos`) and what they send."""

    def __init__(self, service: AgentService) -> None:
        self._service = service
        self._hellos = Hellos()
        self._comparing: tuple[bytes, int] | None = None  # the peer and ask whose checksums are on the way
        self._text = bytearray()

    def take(
        self, peer: bytes, descriptor: int, kind: str, fields: dict[str, Any], data: memoryview | None, now: float
    ) -> None:
        """One message of `KINDS`. FlowcheckError if it does not fit."""
        if kind == "agent-hello":
            self._tell(peer, self._hellos.hello(peer, descriptor, fields, now))
            return
        self._hellos.check(peer, kind, fields["run"], fields["epoch"])
        if kind == "repair-refused":
            self._service.repair_refused(peer, **fields)
        elif data is not None and kind == "repair-data":
            self._repair(peer, fields, data)
        elif data is not None:
            self._compare(peer, fields, data)

    def attached(self, run: str, job: str, epoch: int) -> None:
        """An attach was committed: agents that waited for it belong to that epoch now."""
        for peer, hello in self._hellos.attached(run, job, epoch):
            self._tell(peer, hello)

    def ended(self, descriptor: int) -> None:
        """A connection has ended."""
        for peer in self._hellos.ended(descriptor):
            self._service.agent_gone(peer)

    def expire(self, now: float) -> None:
        """Forget the agents that fell silent. Call it when all that arrived has been taken."""
        for peer in self._hellos.silent(now):
            self._service.agent_gone(peer)

    def _tell(self, peer: bytes, hello: Hello) -> None:
        self._service.agent(peer, hello.run, hello.epoch, hello.rank, hello.step)

    def _repair(self, peer: bytes, fields: dict[str, Any], data: memoryview) -> None:
        if digest(data) != fields.pop("digest"):
            raise DescriptionError(f"repair-data: the checksum of part {fields['ask']} differs")
        sections: dict[str, memoryview] = {}
        offset = 0
        for name, nbytes in fields["sections"]:
            sections[name] = data[offset : offset + nbytes]
            offset += nbytes
        if offset != len(data) or len(sections) != len(fields["sections"]):
            raise DescriptionError(f"repair-data: sections of {offset} bytes in {len(data)}, or one named twice")
        fields["sections"] = sections
        self._service.repair_data(peer, **fields)

    def _compare(self, peer: bytes, fields: dict[str, Any], data: memoryview) -> None:
        """The checksums' text comes in chunks, of one agent at a time."""
        if fields["offset"] == 0:
            self._comparing, self._text = (peer, fields["ask"]), bytearray()
        whole = fields["bytes"]
        if self._comparing != (peer, fields["ask"]) or fields["offset"] != len(self._text) or not len(data):
            raise DescriptionError(f"compare-data.offset: {fields['offset']} is out of order")
        if len(data) > min(CHUNK, whole - len(self._text)):
            raise DescriptionError(f"compare-data: more than {whole} bytes")
        self._text += data
        if len(self._text) < whole:
            return
        text, self._text, self._comparing = self._text, bytearray(), None
        if digest(text) != fields["digest"]:
            raise DescriptionError("compare-data: the text's checksum differs")
        ask, step = fields["ask"], fields["step"]
        self._service.compare_data(peer, fields["run"], fields["epoch"], ask, step, _checksums(text))


def _checksums(text: bytearray) -> dict[str, str | None]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DescriptionError("compare-data: the text is not JSON") from None
    if not isinstance(found, dict) or len(found) > MAX_CHECKSUMS:
        raise DescriptionError("compare-data: expected an object of checksums")
    for key, value in found.items():
        if value is not None and not (isinstance(value, str) and len(value) == 32):
            raise DescriptionError(f"compare-data: {key!r:.100} has no checksum but {str(value)[:40]!r}")
    return found
