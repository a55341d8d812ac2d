"""NCCL over TCP (NET/Socket): who talks, over how many sockets, how many messages; their content is not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mirror.flows import Flows
from mirror.roce_spans import BEGIN, END
from mirror.spans import Spans
from reconstruct.nccl.socket import LOST, SocketConnection, SocketWatcher

__all__ = ["SocketTraffic"]

_INLINE = (0, 128)
"""`Traits.socket_inline` of all releases: up to 2.26, and later."""
_MOST_TOLD = 8
_OVER = ("", "closed")


@dataclass(slots=True)
class _Count:
    messages: int = 0
    bytes: int = 0
    broken: int = 0
    """Messages with holes."""


class _Reading:
    """The framing as some releases do it."""

    def __init__(self, flows: Flows, inline: int) -> None:
        self.watcher = SocketWatcher(flows, inline)
        self.counts: dict[SocketConnection, _Count] = {}

    def unlikely(self, at: int) -> tuple[bool, int]:
        """The less the better: whether framing was lost on a connection, and how few bytes it explains."""
        connection = self.watcher.connections[at]
        return connection.reason not in _OVER, -self.counts.get(connection, _Count()).bytes

    def feed(self, spans: Spans) -> None:
        for connection, piece in self.watcher.feed(spans):
            count = self.counts.setdefault(connection, _Count())
            if piece.kind == BEGIN:
                count.messages += 1
                count.bytes += piece.length
            elif (piece.kind == END and not piece.length) or piece.kind == LOST:
                count.broken += 1


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
        return bool(self._readings[0].watcher.connections)

    def statements(self, inline: int | None) -> Iterator[str]:
        """A sentence for each connection. inline: as the release has it, None if that is not known: then the framing
        that explains more is told."""
        readings = list(self._readings.values()) if inline is None else [self._readings[inline]]
        number = len(self._readings[0].watcher.connections)
        for at in range(min(number, _MOST_TOLD)):
            yield _sentence(min(readings, key=lambda one: one.unlikely(at)), at)
        if number > _MOST_TOLD:
            yield f"{number - _MOST_TOLD} more connections of NCCL over TCP"
        if number:
            yield (
                "NCCL over TCP (NET/Socket): its messages are counted, and no collective is claimed: over RoCE "
                "(NCCL_NET=IB, NCCL_IB_DISABLE=0) it is read; the cost: none where adapters speak RoCE"
            )


def _sentence(reading: _Reading, at: int) -> str:
    one = reading.watcher.connections[at]
    count = reading.counts.get(one, _Count())
    sockets = max(one.flows, default=0)
    ends = f"{one.source} to {one.listener[0]}:{one.listener[1]}"
    text = f"NCCL over TCP from {ends}: {sockets} data sockets, {count.messages} messages, {count.bytes} bytes"
    if count.broken:
        text += f", {count.broken} of them not whole"
    return text + (f"; from there on unknown: {one.reason}" if one.reason not in _OVER else "")
