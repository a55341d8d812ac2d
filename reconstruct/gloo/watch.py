"""A gloo decoder that is only looked at: what its lanes know of each flow, and every message with its loss.

For observing without a job. Nothing is placed, so a message's place in its list and the number of its missing bytes
are what there is to learn; the kernel logs both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mirror.flows import Flows
from reconstruct.gloo import state as g
from reconstruct.gloo.decoder import GlooDecoder
from reconstruct.gloo.lanes import split
from reconstruct.gloo.reports import Reports

__all__ = ["GLOO", "OTHER", "RENDEZVOUS", "TLS", "UNKNOWN", "GlooFlow", "SeenMessage", "WatchedDecoder"]

GLOO, TLS, OTHER = g.LANE, g.TLS, g.OTHER
RENDEZVOUS = (g.STORE_CLIENT, g.STORE_SERVER)
UNKNOWN = (g.UNMET, g.BEGUN, g.MIDSTREAM, g.HEAD)


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """A message planned LENGTHS has ended. missing: its bytes that were never captured; see `Message` for the rest."""

    group: str
    context: int
    kind: int
    tag: int
    sender: int
    receiver: int
    length: int
    missing: int
    proven: bool
    time: int


@dataclass(frozen=True, slots=True)
class GlooFlow:
    """What is known of one direction of a gloo connection. group: None if no known group has it (then ranks are -1).

    hello: the rank that its sender gave on connecting, None if it sent none or it was not seen. framed: whether its
    messages are followed at the moment.
    """

    group: str | None
    sender: int
    receiver: int
    hello: int | None
    messages: int
    max_tag: int
    framed: bool


class _WatchedReports(Reports):
    """Keeps the log's message rows, before the lanes they are of can be freed."""

    def drain(self) -> None:
        state = self._lanes.state
        rows = state.log[: int(state.cursor[g.C_LOG])]
        for _, lane, slot, _, length, missing, time, _ in rows[rows[:, 0] == g.LOG_MESSAGE].tolist():
            member, entry = self._lanes.member(lane), self._lanes.entry(lane, slot)
            if member is not None and entry is not None:
                kind, tag = split(slot)
                self.seen.append(SeenMessage(
                    member.group.name, int(state.lanes[lane, g.CONTEXT]), kind, tag, *self._lanes.ranks(lane, kind),
                    length, missing, not entry[g.PRIVATE], time,
                ))  # fmt: skip
        super().drain()

    seen: list[SeenMessage]


class WatchedDecoder(GlooDecoder):
    """`GlooDecoder` with a view of its flows and `messages`."""

    def __init__(self, flows: Flows) -> None:
        super().__init__(flows, budget_bytes=0)
        self._watched = _WatchedReports(self._lanes, self._held)
        self._watched.seen = []
        self._reports = self._watched

    def messages(self) -> list[SeenMessage]:
        """The messages that ended since the last call."""
        seen, self._watched.seen = self._watched.seen, []
        return seen

    @property
    def status(self) -> np.ndarray:
        """int8, by flow: GLOO, TLS, OTHER, one of RENDEZVOUS or of UNKNOWN, or that it has ended."""
        return self._lanes.state.status

    def gloo_flow(self, flow: int) -> GlooFlow | None:
        """What is known of a flow of status GLOO, None for others."""
        lane = int(self._lanes.state.lane[flow])
        if lane < 0:
            return None
        row, member = self._lanes.state.lanes[lane], self._lanes.member(lane)
        sender, receiver = self._lanes.ranks(lane)
        hello = int(row[g.HELLO_VALUE])
        return GlooFlow(
            None if member is None else member.group.name, sender, receiver, hello if hello >= 0 else None,
            max(0, int(row[g.MESSAGES])), int(row[g.MAX_TAG]), int(row[g.MODE]) in (g.HELLO, g.PREAMBLE, g.PAYLOAD),
        )  # fmt: skip
