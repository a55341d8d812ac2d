"""The messages between trainers, the daemon and its clients: ZeroMQ frames [JSON header, binary or none].

Every header is {"v": 1, "type": ..., fields of that type}. `decode` checks it against `FIELDS` and names the
field that does not fit; nothing is ever unpickled and every length has a limit, so a hostile peer costs a
counter. Large things (a description, a snapshot's header, tensors) travel in chunks of at most `CHUNK` bytes
under a window, so neither side queues more than `WINDOW` chunks.

    attach-begin, attach-text ... -> attach-open; attach-chunk -> attach-credit; attach-commit -> attach-ack
    between the two, if a checkpoint is named: attach-checkpoint ... -> attach-missing (docs/store.md)
    marker, detach (no reply); layout -> layout-ack
    fetch-begin -> fetch-open; fetch-read -> fetch-data ...; fetch-end
    status -> status-reply; compare -> compare-reply; ping -> pong; any of them -> error

Between the daemon and the agents in the trainers nothing is a reply, either may be gone at any time (docs/repair.md):

    from an agent: agent-hello, repair-data, repair-refused, compare-data
    to an agent: repair-ask, repair-cancel, repair-done, groups-ask, compare-ask, join-ask

A marker's content is checked by `reconstruct.markers`, a layout's by `check_layout`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flowcheck import errors
from flowcheck.errors import FlowcheckError
from flowcheck.values import DescriptionError, Reader, integer, text

VERSION = 1

CHUNK = 4 << 20
WINDOW = 4
MAX_HEADER = 2 << 20
MAX_FRAME = CHUNK + (64 << 10)
MAX_BLOB = 256 << 20
MAX_KEY = 4096
MAX_RANK = (1 << 16) - 1
MAX_PARTS = 256
"""Parts of one `repair-ask`, numbers of one `repair-cancel`."""
MAX_SECTIONS = 16
MAX_PERCENT = 10.0
"""Of a trainer's time that a daemon may ask for."""
MAX_STEP_BYTES = 256 << 20
"""That a daemon may have copied at the end of one step."""
MAX_COMPARE = 16 << 20
"""Of the text with the checksums of all tensors."""
MAX_PATH = 4096
SUM_BYTES = 16
"""Of a tensor's checksum in `attach-checkpoint`: xxh3_128 of its bytes in memory order, of all tensors in the order of
the description."""

HEADER_KEY = "@header"
"""The key under which a fetch reads the snapshot's header, before any tensor."""

_SIZE = (1 << 62) - 1

Check = Callable[[Reader, str], Any]


def _whole(high: int, low: int = 0) -> Check:
    return lambda reader, name: reader.integer(name, low, high)


def _text(limit: int) -> Check:
    return lambda reader, name: reader.text(name, limit)


def _object(reader: Reader, name: str) -> dict[str, Any]:
    value = reader.raw(name)
    if not isinstance(value, dict):
        raise reader.fail(name, "expected an object")
    return value


def _text_or_null(reader: Reader, name: str) -> str | None:
    return None if reader.raw(name) is None else reader.text(name, 4096)


def _run_or_null(reader: Reader, name: str) -> str | None:
    return None if reader.raw(name) is None else reader.text(name, 64)


def _count_or_null(reader: Reader, name: str) -> int | None:
    return None if reader.raw(name) is None else reader.integer(name, 0, _SIZE)


def _object_or_null(reader: Reader, name: str) -> dict[str, Any] | None:
    return None if reader.raw(name) is None else _object(reader, name)


def _step(reader: Reader, name: str) -> int | None:
    """`latest` becomes None."""
    return None if reader.raw(name) == "latest" else reader.integer(name, 0, _SIZE)


def _boolean(reader: Reader, name: str) -> bool:
    return reader.boolean(name)


def _percent(reader: Reader, name: str) -> float:
    value = reader.raw(name)
    if type(value) not in (int, float) or not 0 < value <= MAX_PERCENT:
        raise reader.fail(name, f"{str(value)[:40]} is not within 0..{MAX_PERCENT:g}")
    return float(value)


def _part(value: Any, path: str) -> tuple[int, str, int, int]:
    """(number, key, lo, hi): elements [lo, hi) in memory order."""
    if not isinstance(value, list) or len(value) != 4:
        raise DescriptionError(f"{path}: expected number, key, lo and hi")
    number, key, lo, hi = value
    return _size(number, path), text(key, path, MAX_KEY), _size(lo, path), _size(hi, path)


def _section(value: Any, path: str) -> tuple[str, int]:
    """(name, bytes)."""
    if not isinstance(value, list) or len(value) != 2:
        raise DescriptionError(f"{path}: expected a name and a number of bytes")
    return text(value[0], path, 64), integer(value[1], path, 0, CHUNK)


def _list(limit: int, read: Callable[[Any, str], Any]) -> Check:
    return lambda reader, name: reader.sequence(name, limit, read)


def _counter(reader: Reader, name: str) -> bytes | None:
    """The bytes of a step counter, sent in hexadecimal."""
    if reader.raw(name) is None:
        return None
    try:
        return bytes.fromhex(reader.text(name, 32))
    except ValueError:
        raise reader.fail(name, "not hexadecimal bytes") from None


_RUN = _text(64)
_COUNT = _whole(_SIZE)
_SESSION = _whole(1 << 32)
_DIGEST = _text(32)
_NAMES = _text(MAX_KEY)
_JOB = _text(32)
_EPOCH_OF = {"run": _RUN, "epoch": _COUNT}

FIELDS: dict[str, dict[str, Check]] = {
    "ping": {},
    "pong": {"version": _text(64)},
    "status": {},
    "status-reply": {"status": _object},
    "error": {"kind": _text(64), "message": _text(4096)},
    "attach-begin": {"bytes": _whole(MAX_BLOB, 2), "digest": _DIGEST, "job": _JOB, "late": _boolean},
    "attach-text": {"offset": _COUNT},
    "attach-open": {"session": _SESSION, "run": _RUN},
    "attach-chunk": {"session": _SESSION, "key": _NAMES, "offset": _COUNT, "digest": _DIGEST},
    "attach-credit": {"session": _SESSION, "bytes": _COUNT},
    "attach-checkpoint": {"session": _SESSION, "path": _text(MAX_PATH), "offset": _COUNT},
    "attach-missing": {"session": _SESSION, "problem": _text_or_null},
    "attach-commit": {"session": _SESSION},
    "attach-abort": {"session": _SESSION},
    "attach-ack": {"session": _SESSION, "ack": _object},
    "marker": {"run": _RUN, "epoch": _COUNT, "marker": _object},
    "detach": {"run": _RUN, "epoch": _COUNT, "step": _COUNT},
    "layout": {"run": _RUN, "epoch": _COUNT, "layout": _object},
    "layout-ack": {},
    "fetch-begin": {"run": _run_or_null, "step": _step, "allow_unknown": _boolean},
    "fetch-open": {"session": _SESSION, "bytes": _whole(MAX_BLOB)},
    "fetch-read": {
        "session": _SESSION,
        "request": _COUNT,
        "key": _NAMES,
        "offset": _COUNT,
        "length": _whole(CHUNK, 1),
    },
    "fetch-data": {"session": _SESSION, "request": _COUNT, "digest": _DIGEST},
    "fetch-end": {"session": _SESSION},
    "compare": {"run": _run_or_null, "number": _count_or_null},
    "compare-reply": {"number": _COUNT, "report": _object_or_null},
    "agent-hello": {"run": _RUN, "job": _JOB, "rank": _whole(MAX_RANK), "step": _COUNT},
    "repair-data": {
        **_EPOCH_OF,
        "ask": _COUNT,
        "key": _NAMES,
        "lo": _COUNT,
        "hi": _COUNT,
        "step": _COUNT,
        "sections": _list(MAX_SECTIONS, _section),
        "counter": _counter,
        "digest": _DIGEST,
    },
    "repair-refused": {**_EPOCH_OF, "ask": _COUNT, "reason": _text(1024)},
    "compare-data": {
        **_EPOCH_OF,
        "ask": _COUNT,
        "step": _COUNT,
        "offset": _COUNT,
        "bytes": _whole(MAX_COMPARE, 2),
        "digest": _DIGEST,
    },
    "repair-ask": {
        **_EPOCH_OF,
        "parts": _list(MAX_PARTS, _part),
        "percent": _percent,
        "step_bytes": _whole(MAX_STEP_BYTES, 1),
    },
    "repair-cancel": {"numbers": _list(MAX_PARTS, lambda value, path: _size(value, path))},
    "repair-done": {**_EPOCH_OF, "step": _COUNT},
    "groups-ask": _EPOCH_OF,
    "compare-ask": {**_EPOCH_OF, "ask": _COUNT},
    "join-ask": {"run": _RUN},
    "notice": {"run": _RUN, "text": _text(4096)},
}

BINARY = frozenset(
    {"attach-text", "attach-chunk", "attach-checkpoint", "attach-missing", "fetch-data", "repair-data", "compare-data"}
)
"""The types that carry a binary frame after the header; that of `attach-missing` has one bit per tensor in the order of
the description, lowest first: 1 for those that are still to be sent."""


def encode(kind: str, /, **fields: Any) -> bytes:
    """The header frame of a message of type `kind`."""
    header = {"v": VERSION, "type": kind, **fields}
    return json.dumps(header, separators=(",", ":"), allow_nan=False).encode()


def decode(frame: bytes | memoryview, limit: int = MAX_HEADER) -> tuple[str, dict[str, Any]]:
    """(type, checked fields) of a header frame; DescriptionError names what does not fit."""
    if len(frame) > limit:
        raise DescriptionError(f"message: a header of {len(frame)} bytes, at most {limit}")
    try:
        data = json.loads(bytes(frame))
    except (ValueError, RecursionError):
        raise DescriptionError("message: the header is not JSON") from None
    reader = Reader(data, "message")
    if reader.integer("v", 0, 1 << 30) != VERSION:
        raise reader.fail("v", f"this flowcheck speaks version {VERSION}")
    kind = reader.text("type", 64)
    checks = FIELDS.get(kind)
    if checks is None:
        raise reader.fail("type", f"{kind!r} is unknown")
    reader.path = kind
    fields = {name: check(reader, name) for name, check in checks.items()}
    reader.done()
    return kind, fields


def split(frames: list[Any], limit: int = MAX_HEADER) -> tuple[str, dict[str, Any], Any]:
    """(type, fields, binary frame or None) of a whole message, frames given as buffers."""
    if not 1 <= len(frames) <= 2:
        raise DescriptionError(f"message: {len(frames)} frames, expected 1 or 2")
    kind, fields = decode(frames[0], limit)
    if (kind in BINARY) != (len(frames) == 2):
        raise DescriptionError(f"{kind}: {len(frames)} frames")
    data = frames[1] if len(frames) == 2 else None
    if data is not None and len(data) > CHUNK:
        raise DescriptionError(f"{kind}: {len(data)} bytes of data, at most {CHUNK}")
    return kind, fields, data


def check_layout(layout: dict[str, Any]) -> dict[str, Any]:
    """A bucket layout as the trainer's DDP logged it: {"buckets": tuple of tuples of DDP indices,
    "bucket_bytes"}.
    """
    reader = Reader(layout, "layout")
    result = {
        "buckets": tuple(reader.sequence("buckets", 1 << 18, _indices)),
        "bucket_bytes": tuple(reader.sequence("bucket_bytes", 1 << 18, _size)),
    }
    reader.done()
    if len(result["buckets"]) != len(result["bucket_bytes"]):
        raise reader.fail("bucket_bytes", "not one size per bucket")
    return result


def checkpoint_seconds(nbytes: int) -> float:
    """How long the daemon may read a checkpoint of a job with so many bytes of state before the state is uploaded: the
    upload would hardly be slower than a disk that needs more."""
    return min(30.0 + nbytes / (128 << 20), 1800.0)


def error_fields(error: FlowcheckError) -> dict[str, str]:
    """What an `error` message carries for `error`."""
    return {"kind": type(error).__name__, "message": str(error)[:2000]}


def raise_error(fields: dict[str, Any]) -> None:
    """Raise the FlowcheckError that an `error` message stands for, with its exit status."""
    kind = getattr(errors, fields["kind"], FlowcheckError)
    if not (isinstance(kind, type) and issubclass(kind, FlowcheckError)):
        kind = FlowcheckError
    raise kind(fields["message"])


def _size(value: Any, path: str) -> int:
    return integer(value, path, 0, _SIZE)


def _indices(value: Any, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 1 << 18:
        raise DescriptionError(f"{path}: expected a list of parameter indices")
    return tuple(integer(item, path, 0, 1 << 18) for item in value)
