"""The gloo decoder's state as arrays: what the kernel and the Python side share, and the names of the columns.

A *lane* is the decoding state of one gloo flow (one direction of a connection). Lanes are made for gloo flows only;
every other flow costs a status byte and a small head. A lane's *entries* are the slots (collectives) it has seen
lately, its *recent* rows the payload messages it has seen lately, its *heads* their preambles: a second copy of these
bytes is compared with the first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["ENTRIES", "HEAD_BYTES", "LOG_ROWS", "RECENT", "State", "fresh_state", "grow_lanes"]

# status of a flow
(UNMET, BEGUN, MIDSTREAM, HEAD, LANE, OTHER, STORE_CLIENT, STORE_SERVER, TLS, CLOSED) = range(10)
STATUS_NAMES = (
    "unmet", "begun", "mid-stream", "unclassified", "gloo", "other", "store client", "store server", "tls", "closed",
)
# mode of a lane
HELLO, PREAMBLE, PAYLOAD, SCAN, DEAD = range(5)
# plan of an entry
NONE, IGNORED, REDUCE, KEPT, COUNTED, LOST, DONE = range(7)
# dirt of a lane: all new slots unproven; only those up to CLEAN_ABOVE; none
CLEAN, UNPROVEN, UNPROVEN_BELOW = 0, 1, 2
# kind of a recent message's destination
NOWHERE, TO_LANDING, TO_MEMORY = range(3)

# why the kernel stopped
(END, NEW_FLOW, FOUND, ASK, ALLOCATE, RESYNC, NODES, DRAIN) = range(8)
# what the kernel logged
(LOG_LANDED, LOG_CONFLICT, LOG_DONE, LOG_MESSAGE, LOG_RAW_HOLE, LOG_MISFIT, LOG_EVICTED, LOG_BAD, LOG_TLS, LOG_CLOSED,
 LOG_DOUBT, LOG_GAP, LOG_HOLE) = range(13)

# columns of `lanes`
(FLOW, GROUP, CONTEXT, ROLE, RANK, MODE, POSITION, HAVE, HELLO_VALUE, PEER, REMAIN, LENGTH, ENTRY, INDEX, DEST_KIND,
 DEST, DEST_OFFSET, START, MISSING, READY, SENDER, GAP_START, GAP_KNOWN, DIRT, CLEAN_ABOVE, PROVEN, PROVEN_TAG, GAPS,
 FLOOR, MAX_TAG, LAST_TS, SERIAL, HOT, NEWEST, MESSAGES, BAD, CURRENT, TRUSTED, FAR, UID, HEADS) = range(41)
LANE_WORDS = 41
# columns of `entries`
(SLOT, PLAN, COUNT, TOTAL, SENT, WANTED, SHORTEST, LONGEST, USED, SIZE, ITEM, WORLD, SENDER_RANK, META, PRIVATE,
 BORN) = range(16)
ENTRY_WORDS = 16
# columns of `recent`
R_START, R_LENGTH, R_KIND, R_ADDRESS, R_OFFSET, R_SENDER = range(6)
RECENT_WORDS = 6
# columns of `heads_at`; H_BAD: it was no valid preamble
H_START, H_BAD = range(2)
# words of `cursor`
(C_SPAN, C_AT, C_LOG, C_LANE, C_ARGUMENT, C_HOLE_BYTES, C_PLACED, C_DROPPED, C_KNOWN, C_SINCE, C_UNTIL) = range(11)
# C_KNOWN, C_SINCE, C_UNTIL: why and ts of the HOLE at hand
CURSOR_WORDS = 11

ENTRIES = 32
RECENT = 64
RECENT_HEADS = 3 * RECENT  # a payload is announced twice
NO_HEAD = -48  # its 48 bytes end before any stream begins
LOG_ROWS = 4096
LOG_WORDS = 8
HEAD_BYTES = 64
PRE_BYTES = 128


class State(NamedTuple):
    """All arrays of the decoder, in the form that the kernel takes."""

    status: np.ndarray   # int8[flows]
    lane: np.ndarray     # int32[flows]: lane of the flow or -1
    have: np.ndarray     # int64[flows]: bytes in `head`
    head: np.ndarray     # uint8[flows, HEAD_BYTES]: first bytes of a flow that is not classified yet
    peer: np.ndarray     # int32[flows]: the flow table's own array
    lanes: np.ndarray    # int64[lanes, LANE_WORDS]
    pre: np.ndarray      # uint8[lanes, PRE_BYTES]: a preamble being collected, or the tail of a scan
    entries: np.ndarray  # int64[lanes, ENTRIES, ENTRY_WORDS]
    recent: np.ndarray   # int64[lanes, RECENT, RECENT_WORDS]: a ring, in the order of the stream, from NEWEST back
    heads: np.ndarray    # uint8[lanes, RECENT_HEADS, 48]: a ring as well, HEADS is the newest
    heads_at: np.ndarray  # int64[lanes, RECENT_HEADS, 2]
    log: np.ndarray      # int64[LOG_ROWS, LOG_WORDS]
    cursor: np.ndarray   # int64[CURSOR_WORDS]


def fresh_state(flows: int, peer: np.ndarray, lanes: int) -> State:
    """State for `flows` flow ids with room for `lanes` gloo flows."""
    return State(
        status=np.zeros(flows, np.int8),
        lane=np.full(flows, -1, np.int32),
        have=np.zeros(flows, np.int64),
        head=np.zeros((flows, HEAD_BYTES), np.uint8),
        peer=peer,
        lanes=np.full((lanes, LANE_WORDS), -1, np.int64),
        pre=np.zeros((lanes, PRE_BYTES), np.uint8),
        entries=np.full((lanes, ENTRIES, ENTRY_WORDS), -1, np.int64),
        recent=np.zeros((lanes, RECENT, RECENT_WORDS), np.int64),
        heads=np.zeros((lanes, RECENT_HEADS, 48), np.uint8),
        heads_at=np.full((lanes, RECENT_HEADS, 2), NO_HEAD, np.int64),
        log=np.zeros((LOG_ROWS, LOG_WORDS), np.int64),
        cursor=np.zeros(CURSOR_WORDS, np.int64),
    )


def grow_lanes(state: State, lanes: int) -> State:
    """The same state with room for `lanes` lanes."""
    more = lanes - len(state.lanes)

    def longer(array: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([array, np.full((more, *array.shape[1:]), fill, array.dtype)])

    return state._replace(
        lanes=longer(state.lanes, -1),
        pre=longer(state.pre, 0),
        entries=longer(state.entries, -1),
        recent=longer(state.recent, 0),
        heads=longer(state.heads, 0),
        heads_at=longer(state.heads_at, NO_HEAD),
    )


def clear_lane(state: State, lane: int) -> None:
    """Make `lane` that of a new stream: everything about the stream is unknown or zero."""
    row = state.lanes[lane]
    row[:] = -1
    for column in (POSITION, HAVE, REMAIN, MISSING, READY, GAP_KNOWN, DIRT, PROVEN, GAPS, LAST_TS, SERIAL, HOT,
                   NEWEST, MESSAGES, BAD, HEADS):
        row[column] = 0
    row[DEST_KIND] = NOWHERE
    state.entries[lane] = -1
    state.recent[lane] = 0
    state.heads_at[lane] = NO_HEAD
