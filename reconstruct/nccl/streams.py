"""NCCL's own TCP streams among all others: the set-up of communicators, and messages of NET/Socket."""

from __future__ import annotations

from mirror.flows import Flows
from mirror.roce_spans import MessageSpans
from mirror.spans import Spans
from reconstruct.nccl.heads import SETUP, SOCKET, Heads
from reconstruct.nccl.setup_watch import SetupWatcher
from reconstruct.nccl.sockets import SocketMessages

__all__ = ["NcclStreams"]


class NcclStreams:
    """`setups` and `sockets`, fed with what is theirs: a batch without any costs one look.

    flows: of the spans; inline: see `SocketMessages`.
    """

    def __init__(self, flows: Flows, inline: int) -> None:
        self._heads = Heads(flows)
        self.setups = SetupWatcher(self._heads)
        self.sockets = SocketMessages(self._heads, inline)
        self._nothing = Spans()

    def feed(self, spans: Spans) -> MessageSpans | None:
        """Take a batch of spans; what comes of NET/Socket connections, None as long as none was found. Good until the
        next call, as the batch is."""
        seen = self._heads.look(spans)
        if seen & SETUP:
            self.setups.feed(spans)
        if seen & SOCKET:
            return self.sockets.feed(spans)
        return self.sockets.feed(self._nothing) if self.sockets.count else None
