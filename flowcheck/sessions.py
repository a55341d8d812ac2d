"""The two conversations that the control server keeps state for: an attach's upload and a client's fetch.

Sans-IO: they take checked messages and a time in seconds, and raise FlowcheckError for what does not fit.
"""

from __future__ import annotations

import json
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import xxhash

from flowcheck.description import DescriptionError, JobDescription, TensorSpec
from flowcheck.errors import FlowcheckError
from flowcheck.protocol import CHUNK, HEADER_KEY, MAX_BLOB, SUM_BYTES, WINDOW
from flowcheck.service import AttachSession, FetchSession, Seeded


def digest(data: Any) -> str:
    """The checksum of one chunk, as messages carry it: XXH3, 64 bits, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


class Upload:
    """One attach: the description's text, then every tensor in `JobDescription.tensors` order, gapless, but for those
    that a checkpoint gave; a late one has no tensors. job: the token that the job's agents say."""

    def __init__(self, number: int, now: float, *, bytes: int, digest: str, job: str, late: bool) -> None:
        self.number = number
        self.active = now
        self.job = job
        self.late = late
        self.session: AttachSession | None = None
        self.committing = False
        self._expected = bytes
        self._digest = digest
        self._text = bytearray()
        self._tensors: list[tuple[str, TensorSpec]] = []
        self._rest: deque[tuple[str, TensorSpec]] = deque()
        self._offset = 0
        self._sums: bytearray | None = bytearray()  # of a checkpoint's tensors; None once it is too late for any
        self._seeding = False

    def text(self, offset: int, data: Any, now: float) -> JobDescription | None:
        """Take a part of the description's text; returns the description once it is whole."""
        if self.session is not None or offset != len(self._text) or offset + len(data) > self._expected:
            raise DescriptionError(f"attach-text.offset: {offset} with {len(data)} bytes is out of order")
        self._text += data
        self.active = now
        if len(self._text) < self._expected:
            return None
        text, self._text = self._text, bytearray()
        if digest(text) != self._digest:
            raise DescriptionError("attach-text: the description's checksum differs")
        description = JobDescription.from_json(text)
        if not self.late:
            self._tensors = list(description.tensors())
            self._rest.extend((key, spec) for key, spec in self._tensors if spec.nbytes)
        return description

    def checksums(self, offset: int, data: Any, now: float) -> bytes | None:
        """Take a part of the checksums that go with a checkpoint; once they are whole, returns them, and `seeded`
        follows."""
        whole = SUM_BYTES * len(self._tensors)
        sums = self._sums
        if self.session is None or sums is None or offset != len(sums) or not 0 < len(data) <= whole - offset:
            raise DescriptionError(f"attach-checkpoint.offset: {offset} with {len(data)} bytes is out of order")
        sums += data
        self.active = now
        if len(sums) < whole:
            return None
        self._sums, self._seeding = None, True
        return bytes(sums)

    def seeded(self, found: Seeded, now: float) -> None:
        """What the checkpoint gave is not expected any more."""
        pairs = zip(self._tensors, found.missing, strict=True)
        self._rest = deque((key, spec) for (key, spec), missing in pairs if missing and spec.nbytes)
        self._seeding = False
        self.active = now

    def chunk(self, key: str, offset: int, checksum: str, data: Any, now: float) -> int:
        """Pass on one chunk; returns its size. A chunk that is out of place or damaged ends the attach."""
        if self.session is None or self.committing or self._seeding or not self._rest:
            raise DescriptionError(f"attach-chunk: {key!r:.200} is not expected now")
        expected, spec = self._rest[0]
        end = offset + len(data)
        if key != expected or offset != self._offset or not len(data) or end > spec.nbytes:
            raise DescriptionError(
                f"attach-chunk: {key!r:.200} at {offset} with {len(data)} bytes, "
                f"expected {expected!r} at {self._offset}"
            )
        if digest(data) != checksum:
            raise DescriptionError(f"attach-chunk: the checksum of {key!r} at {offset} differs")
        self.session.chunk(key, offset, memoryview(data))
        self._sums = None
        self._offset = end
        if end == spec.nbytes:
            self._rest.popleft()
            self._offset = 0
        self.active = now
        return len(data)

    def ready(self) -> AttachSession:
        """The session to commit, once every byte has arrived."""
        if self.session is None or self.committing or self._seeding:
            raise DescriptionError("attach-commit: no upload is open")
        self._sums = None
        if self._rest:
            raise DescriptionError(
                f"attach-commit: {len(self._rest)} tensors are missing, first {self._rest[0][0]}"
            )
        self.committing = True
        return self.session


@dataclass(slots=True)
class Fetch:
    """One client's reading of one step; requests wait in `queue`, at most `WINDOW` of them.

    reading: the `read` that is under way, or waits to be sent; blocked: there was no room for it.
    """

    number: int
    session: FetchSession
    header: bytes
    sizes: dict[str, int]
    started: float
    active: float
    queue: deque[tuple[int, str, int, int]] = field(default_factory=deque)
    reading: Future[tuple[int, memoryview]] | None = None
    blocked: bool = False

    @classmethod
    def open(cls, number: int, session: FetchSession, now: float) -> Fetch:
        header = json.dumps(session.header, separators=(",", ":"), allow_nan=False).encode()
        if len(header) > MAX_BLOB:
            raise FlowcheckError(f"the step's header has {len(header)} bytes, at most {MAX_BLOB} can be sent")
        sizes = {key: TensorSpec.from_json(spec).nbytes for key, spec in session.header["tensors"]}
        return cls(number, session, header, {**sizes, HEADER_KEY: len(header)}, now, now)

    def ask(self, request: int, key: str, offset: int, length: int, now: float) -> None:
        """Queue a read. A client that asks beyond its window breaks the protocol."""
        if len(self.queue) >= WINDOW:
            raise DescriptionError(f"fetch-read: more than {WINDOW} requests at a time")
        if length > CHUNK or offset + length > self.sizes.get(key, -1):
            raise DescriptionError(f"fetch-read: {key!r:.200} has no {length} bytes at {offset}")
        self.queue.append((request, key, offset, length))
        self.active = now

    def read(self) -> tuple[int, memoryview]:
        """(request, data) of the request at the head of the queue, which stays there until it is sent."""
        request, key, offset, length = self.queue[0]
        if key == HEADER_KEY:
            return request, memoryview(self.header)[offset : offset + length]
        return request, self.session.read(key, offset, length)

    def sent(self, now: float) -> None:
        self.queue.popleft()
        self.reading = None
        self.blocked = False
        self.active = now


@dataclass(slots=True)
class Peer:
    """What one connected client has open. `user`: the key that it was opened with, None where none is asked for."""

    upload: Upload | None = None
    fetch: Fetch | None = None
    work: Future[Any] | None = None
    user: str | None = None
