"""The NCCL decoder's state as arrays: what the kernel and the Python side share, and the names of the columns.

A *lane* is the decoding state of one RoCE flow that carries data of a known communicator: one queue pair of one
connection. Its *entries*, a list in the order of their packet numbers, are the collectives that are known on it: each
says which packet numbers it has and points at the table of its messages (reconstruct.nccl.script). So a packet's
place follows from its number alone. `where` says, for every message that is under way, what to do with its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mirror.internal import internal
from mirror.memory import int32s_at, int64s_at, rows_at, uint8s_at

__all__ = ["LOG_ROWS", "State", "fresh_state", "view"]

# status of a flow
UNMET, OTHER, LANE, CTS_FLOW = range(4)
# state of a lane
FREE, FOLLOWING, DEAD = range(3)
# what is done with a message
NOTHING, PASS, PLACE, KEEP, ENTRY = range(5)

# why the kernel stopped
END_OF_SPANS, NEW_FLOW, ASK, MISFIT, NODES, DRAIN, CLOSED = range(7)
# what the kernel logged
LOG_LANDED, LOG_CONFLICT, LOG_END, LOG_VOID, LOG_HOLE = range(5)
# what `assign` found
FOUND, BEYOND, OLD, WRONG_LENGTH, WRONG_ADDRESS, WRONG_MTU, WRONG_IMMEDIATE, WRONG_ANNOUNCEMENT = range(8)

# columns of `lanes`
(L_FLOW, L_STATE, L_ATTACHED, L_NEXT, L_AT, L_LAST, L_MTU, L_SENDER, L_ENDIAN, L_TOP, L_TS, L_LOST,
 L_CTS) = range(13)
LANE_WORDS = 13
# L_ATTACHED: what begins earlier is not the group's; L_NEXT: number behind the last known collective, -1 unknown;
# L_AT, L_LAST: entry used last, newest entry; L_ENDIAN: how immediates are read; L_LOST: gaps beyond what is known;
# L_CTS: row of `cts` where the entries that announce its messages come, -1 unknown.
LITTLE, BIG, UNREAD = range(3)

# columns of `entries`
(E_START, E_END, E_TABLE, E_COUNT, E_META, E_TAG, E_PROTOCOL, E_STEP, E_EXACT, E_VA, E_LEFT, E_HINT, E_OLDER, E_NEWER,
 E_MARKS, E_MATCHED, E_NUMBER, E_UNIT) = range(18)
ENTRY_WORDS = 18
# E_STEP: step S of its first message, certain if E_EXACT; E_VA: address of slot 0, -1 unknown, -2 not looked at;
# E_LEFT: packets neither seen nor lost; E_MARKS: address of a byte per message; E_NEWER: next free one of a free row;
# E_NUMBER: what the CTS entry of its first message is numbered, 0 unknown; E_UNIT: steps of a message.

# columns of `where`, by message row
(W_MODE, W_LANE, W_ENTRY, W_META, W_OFFSET, W_LENGTH, W_SHIFT, W_PROTOCOL, W_STEP, W_SENDER, W_WIRE, W_IMMEDIATE,
 W_COUNTED) = range(13)
WHERE_WORDS = 16
NO_IMMEDIATE, ANY_IMMEDIATE = -1, -2

# columns of `cts`: the newest entries that a flow brought
C_ADDRESS, C_RKEY, C_TAG, C_INDEX, C_ROOM = range(5)
CTS_WORDS = 5
CTS_KEPT = 16

# words of `cursor`
(C_SPAN, C_LOG, C_FLOW, C_LANE, C_SLOT, C_WHY, C_ARGUMENT, C_PLACED) = range(8)
# words of `cts_form`
F_ENTRY, F_ADDRESS, F_RKEY, F_TAG, F_INDEX, F_ROOM = range(6)

LOG_ROWS = 4096
# of a LOG_HOLE: its lane, first packet, byte offset in the message (-1: they are whole packets), length, and its why
LOG_WORDS = 8
LOG_MARGIN = 16


class State(NamedTuple):
    """All arrays of the decoder. The kernel takes their `mirror.memory.handle`, and gets them by `view`."""

    status: np.ndarray    # uint8[flows]
    owner: np.ndarray     # int32[flows]: lane, or row of `cts`
    track: np.ndarray     # int64[flows, 2]: number behind the newest message, -1 none; when it began
    lanes: np.ndarray     # int64[lanes, LANE_WORDS]
    entries: np.ndarray   # int64[entries, ENTRY_WORDS]
    where: np.ndarray     # int64[message rows + 1, WHERE_WORDS]; the last row is for messages that are over
    cts: np.ndarray       # int64[cts flows, CTS_KEPT * CTS_WORDS]
    cts_form: np.ndarray  # int64[cts flows, 6]
    log: np.ndarray       # int64[LOG_ROWS, LOG_WORDS]
    cursor: np.ndarray    # int64[16]
    scratch: np.ndarray   # uint8: data of one message


def fresh_state(flows: int, lanes: int, entries: int) -> State:
    """State for `flows` flow ids."""
    return State(
        status=np.zeros(flows, np.uint8),
        owner=np.full(flows, -1, np.int32),
        track=np.full((flows, 2), -1, np.int64),
        lanes=np.zeros((lanes, LANE_WORDS), np.int64),
        entries=np.zeros((entries, ENTRY_WORDS), np.int64),
        where=np.zeros((1, WHERE_WORDS), np.int64),
        cts=np.zeros((lanes, CTS_WORDS * CTS_KEPT), np.int64),
        cts_form=np.zeros((lanes, 6), np.int64),
        log=np.zeros((LOG_ROWS, LOG_WORDS), np.int64),
        cursor=np.zeros(16, np.int64),
        scratch=np.empty(1 << 20, np.uint8),
    )


@internal()
def view(h: np.ndarray) -> State:
    """The arrays whose handle is `h`, not owned."""
    return State(
        uint8s_at(h[0], h[1]), int32s_at(h[2], h[3]), rows_at(h[4], h[5], h[6]), rows_at(h[7], h[8], h[9]),
        rows_at(h[10], h[11], h[12]), rows_at(h[13], h[14], h[15]), rows_at(h[16], h[17], h[18]),
        rows_at(h[19], h[20], h[21]), rows_at(h[22], h[23], h[24]), int64s_at(h[25], h[26]), uint8s_at(h[27], h[28]),
    )  # fmt: skip
