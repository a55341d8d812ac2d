"""Messages of a capture: each is told once it is whole, or once nothing more can come of it, and then let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mirror.messages import Message, MessageRecorder, Reassembler
from mirror.roce_spans import BEGIN, END, VOID, MessageSpans

__all__ = ["MessageTable", "message_line"]


def message_line(message: Message) -> dict[str, Any]:
    """The message for scripts. va, rkey: null where there is none (SEND) or the first packet was not captured; length:
    null where the first packet, or of a SEND the last, was not."""
    return {
        "type": "message",
        "transport": "roce",
        "src": message.source,
        "dst": message.destination,
        "qp": message.queue_pair,
        "first_psn": message.first_psn & 0xFFFFFF,
        "opcode": message.opcode,
        "va": message.va,
        "rkey": message.rkey,
        "length": None if message.headless else message.length,
        "imm": None if message.imm is None else f"0x{message.imm:08x}",
        "complete": message.complete,
        "sha256": message.sha256,
        "holes": [list(hole) for hole in message.holes],
    }


class MessageTable(MessageRecorder):
    """Keeps messages until they are over; `ended` is called with each one, while its bytes are there.

    A whole message is over. One with holes may still be completed by a late retry, so it is kept to the end, unless
    its row of the reassembler is taken again, or more than half of `limit` is in use.
    """

    def __init__(self, roce: Reassembler, ended: Callable[[Message, int, int], None],
                 gap: Callable[[int, int, int], None], *, limit: int) -> None:
        """`ended`: is given a message and the capture times (ns) of its first packet and its end; `gap`: (flow, 64-bit
        number, packets) of what is missing and belongs to no known message; `limit`: the most message bytes kept."""
        super().__init__(roce, limit=limit)
        self.hurried = False
        """Whether the limit was reached: retries that came later than that are not in what was told."""
        self.dropped = 0
        """Bytes that were captured but found no room; they are told as holes."""
        self._ended = ended
        self._gap = gap
        self._limit = limit
        self._times: dict[int, tuple[int, int]] = {}
        self._over: set[int] = set()  # ids of messages in rows that nothing is kept of any more

    def feed(self, spans: MessageSpans) -> None:
        """Take spans; to be called before the next call of the reassembler."""
        kind = spans.kind[: spans.n]
        for i in np.flatnonzero(kind == BEGIN).tolist():
            slot, time = int(spans.message[i]), int(spans.ts[i])
            if slot in self._rows:
                self._tell(slot)
            self._times[slot] = time, time
        for i in np.flatnonzero(kind == END).tolist():
            slot = int(spans.message[i])
            self._times[slot] = self._times[slot][0], int(spans.ts[i])
        super().feed(spans)
        for flow, psn, packets in self.lost:
            self._gap(flow, psn, packets)
        self.lost.clear()
        self.told.clear()
        ends = spans.message[: spans.n][kind == END]
        for slot in np.unique(ends).tolist():
            if self._rows[slot].complete:
                self._tell(slot)
        if self._room < self._limit // 2:
            self.hurried = True
            for slot, message in list(self._rows.items()):
                if message.ended:
                    self._tell(slot)

    def finish(self) -> None:
        """Nothing more comes. Messages that never ended are told as they are."""
        for slot in sorted(self._rows, key=lambda slot: (self._rows[slot].flow, self._rows[slot].first_psn)):
            self._tell(slot)

    def _tell(self, slot: int) -> None:
        message = self._rows[slot]
        if id(message) in self._over:
            return
        self._ended(message, *self._times[slot])
        self.dropped += message.lost
        self._release(slot)

    def _release(self, slot: int) -> None:
        message = self._rows[slot]
        self._over.add(id(message))
        self._room += message._bytes.size
        message._bytes = message._marks = np.zeros(0, np.uint8)
        self._where[slot] = 0

    def _begin(self, slot: int, row: np.ndarray, headless: bool) -> None:
        if slot in self._rows:
            self._over.discard(id(self._rows[slot]))
        super()._begin(slot, row, headless)

    def _grow(self, slot: int, end: int) -> None:
        if id(self._rows[slot]) not in self._over:
            super()._grow(slot, end)

    def _note(self, spans: MessageSpans, i: int) -> None:
        slot = int(spans.message[i])
        if spans.kind[i] == VOID:
            # Its first packet came after all, and with it every byte comes again.
            self._release(slot)
        else:
            super()._note(spans, i)
