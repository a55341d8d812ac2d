"""NCCL over TCP (NET/Socket): its connections and their messages, in the terms of RDMA's.

With data sockets, how a connection is framed depends on the release. Where neither the user nor the set-up that was
captured before tells it, such a connection is named, and nothing is said of its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from flowcheck.inspect.messages import MessageTable
from flowcheck.inspect.nccl_flows import Connection, Flow
from flowcheck.inspect.streams import endpoint
from mirror.messages import Message
from mirror.spans import Spans
from reconstruct.nccl.heads import Heads
from reconstruct.nccl.socket_state import WHOLE
from reconstruct.nccl.socket_table import SocketConnection
from reconstruct.nccl.sockets import SocketMessages

__all__ = ["SocketSeen", "SocketTraffic"]

_CURRENT = 128
"""`Traits.socket_inline` of current releases."""
_MOST_TOLD = 8
_CLOSED = "closed"

Keep = Callable[[Flow, Message, int, int], None]
"""Is given a flow and a message of it that is over, and when that began and ended, ns."""


@dataclass(slots=True, eq=False)
class SocketSeen:
    """A connection. sure: whether it is known how its release writes; broken: messages with holes."""

    made: SocketConnection
    flow: Flow
    sure: bool
    messages: int = 0
    bytes: int = 0
    broken: int = 0

    @property
    def framed(self) -> bool:
        """Whether its messages are what they seem."""
        return self.sure or not max(self.made.sockets, default=0)

    @property
    def lost(self) -> str:
        """Why nothing is known from a message on, "" if everything is."""
        if self.made.searching:
            return "bytes that hold the length of a message were not captured"
        return "" if self.made.reason == _CLOSED else self.made.reason

    @property
    def cut(self) -> str:
        """As in `Connection`."""
        return f"{self.ends} from number {self.messages} on ({self.lost})" if self.lost else ""

    @property
    def ends(self) -> str:
        return f"{self.made.source} to {endpoint(self.made.listener)}"

    def told(self) -> str:
        """A sentence."""
        sockets = max(self.made.sockets, default=0)
        text = f"NCCL over TCP from {self.ends}: {sockets} data sockets"
        if not self.framed:
            return f"{text}; nothing tells NCCL's release, and so not where its messages begin: give --nccl-version"
        text += f", {self.messages} messages, {self.bytes} bytes"
        if self.broken:
            text += f", {self.broken} of them not whole"
        return text + (f"; from there on unknown: {self.lost}" if self.lost else "")


class SocketTraffic:
    """Feed it every batch of TCP spans in which `heads` has found SOCKET."""

    def __init__(self, heads: Heads, keep: Keep, *, limit: int) -> None:
        """`limit`: the most bytes of messages kept until they are over."""
        self.seen: list[SocketSeen] = []
        """In the order in which they were found."""
        self._sockets = SocketMessages(heads, _CURRENT)
        self._keep = keep
        self.table = MessageTable(self._sockets, self._message, _lost_length, limit=limit)

    def feed(self, spans: Spans, inline: int | None) -> None:
        """Take a batch. inline: `Traits.socket_inline` of connections made by it, None if that is not known."""
        self._sockets.expect(_CURRENT if inline is None else inline)
        made = self._sockets.feed(spans)
        if self._sockets.count > len(self.seen):
            new = [one for one in self._sockets.connections if one.order >= len(self.seen)]
            for one in sorted(new, key=lambda one: one.order):
                key = one.vantage, one.source, one.listener[0], one.order
                self.seen.append(SocketSeen(one, Flow(key, mtu=WHOLE, over_tcp=True), inline is not None))
        self.table.feed(made)

    def finish(self, torn: Collection[tuple[str, str]], late: Collection[tuple[str, str]]) -> None:
        """Nothing more comes. torn: (source address, destination as `streams.endpoint`) of TCP streams with holes,
        or without a start; late: of the latter."""
        self.table.finish()
        for one in self.seen:
            one.flow.finish()
            ends = one.made.source, endpoint(one.made.listener)
            one.flow.timed, one.flow.ordered = ends not in torn, ends not in late

    def connections(self) -> list[Connection]:
        """Those that carry messages, as far as these are known."""
        if self._sockets.refused:
            return []
        carrying = [one for one in self.seen if one.framed and (one.flow.pieces or one.lost)]
        return [Connection([one.flow], -1, set(), set(), one.cut) for one in carrying]

    def statements(self) -> Iterator[str]:
        """A sentence for each connection, those first of which something is not known."""
        for one in sorted(self.seen, key=lambda one: (one.framed and not one.lost, not one.broken))[:_MOST_TOLD]:
            yield one.told()
        if len(self.seen) > _MOST_TOLD:
            yield f"{len(self.seen) - _MOST_TOLD} more connections of NCCL over TCP"
        if self._sockets.refused:
            yield (
                f"NCCL over TCP: {self._sockets.refused} sockets beyond the {self._sockets.capacity} connections that "
                "are followed at once, so no collective is claimed: inspect a shorter capture"
            )

    def _message(self, message: Message, begin: int, end: int) -> None:
        one = self.seen[message.queue_pair]
        one.messages += 1
        one.bytes += message.extent
        one.broken += not message.complete
        if one.framed:
            self._keep(one.flow, message, begin, end)


def _lost_length(flow: int, psn: int, packets: int) -> None:
    """A hole in no message: a length that was not captured. The connection itself says so (`SocketSeen.lost`)."""
