"""NCCL over TCP (NET/Socket): who talks, over how many sockets, how many messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mirror.flows import Flows
from mirror.roce_spans import BEGIN, END
from mirror.roce_state import M_LENGTH
from mirror.spans import Spans
from reconstruct.nccl.sockets import SocketConnection, SocketMessages

__all__ = ["SocketTraffic"]

_INLINE = (0, 128)
"""`Traits.socket_inline` of all releases: up to 2.26, and later."""
_MOST_TOLD = 8
_MOST_COUNTED = 4096
_OVER = ("", "closed")


@dataclass(slots=True)
class _Count:
    connection: SocketConnection
    messages: int = 0
    bytes: int = 0
    broken: int = 0
    """Messages with holes."""


class _Reading:
    """The framing as some releases do it."""

    def __init__(self, flows: Flows, inline: int) -> None:
        self.messages = SocketMessages(flows, inline)
        self.counts: dict[int, _Count] = {}
        """By the order of the connections."""

    def unlikely(self, at: int) -> tuple[bool, int]:
        """The less the better: whether framing was lost on a connection, and how few bytes it explains."""
        count = self.counts[at]
        one = count.connection
        return one.searching or one.reason not in _OVER, -count.bytes

    def feed(self, spans: Spans) -> None:
        made = self.messages.feed(spans)
        open_now = {connection.number: connection for connection in self.messages.connections}
        for connection in open_now.values():
            if connection.order not in self.counts and len(self.counts) < _MOST_COUNTED:
                self.counts[connection.order] = _Count(connection)
        flow, kind, length = made.flow[: made.n], made.kind[: made.n], made.length[: made.n]
        sizes = self.messages.messages[made.message[: made.n], M_LENGTH]
        for number in np.unique(flow).tolist():
            count = self.counts.get(open_now[number].order)
            if count is not None:
                begun = (flow == number) & (kind == BEGIN)
                count.messages += int(begun.sum())
                count.bytes += int(sizes[begun].sum())
                count.broken += int(((flow == number) & (kind == END) & (length == 0)).sum())


class SocketTraffic:
    """Feed it every batch of spans of TCP reassembly."""

    def __init__(self, flows: Flows) -> None:
        self._readings = {inline: _Reading(flows, inline) for inline in _INLINE}

    def feed(self, spans: Spans) -> None:
        for reading in self._readings.values():
            reading.feed(spans)

    @property
    def seen(self) -> bool:
        """Whether there is a connection of NCCL's."""
        return bool(self._readings[0].counts)

    def statements(self, inline: int | None) -> Iterator[str]:
        """A sentence for each connection. inline: as the release has it, None if that is not known: then the framing
        that explains more is told."""
        readings = list(self._readings.values()) if inline is None else [self._readings[inline]]
        number = len(self._readings[0].counts)
        for at in range(min(number, _MOST_TOLD)):
            yield _sentence(min(readings, key=lambda one: one.unlikely(at)).counts[at])
        if number > _MOST_TOLD:
            yield f"{number - _MOST_TOLD} more connections of NCCL over TCP"
        if number:
            yield (
                "NCCL over TCP (NET/Socket): its messages are counted, its collectives are not told apart here: a "
                "daemon that a job attaches to follows them"
            )


def _sentence(count: _Count) -> str:
    one = count.connection
    sockets = max(one.sockets, default=0)
    ends = f"{one.source} to {one.listener[0]}:{one.listener[1]}"
    text = f"NCCL over TCP from {ends}: {sockets} data sockets, {count.messages} messages, {count.bytes} bytes"
    if count.broken:
        text += f", {count.broken} of them not whole"
    if one.searching:
        return f"{text}; from there on unknown: bytes that hold the length of a message were not captured"
    return text + (f"; from there on unknown: {one.reason}" if one.reason not in _OVER else "")
