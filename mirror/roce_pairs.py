"""Which flow runs the other way, and what its acknowledgments say.

A packet names only the queue pair it goes to, so the two directions of a connection are matched by what passes: an
acknowledgment (or READ response) on a flow bears the number of a packet that the other one just sent. Among the flows
the other way that fit, the one with the same UDP source port wins (network adapters use one port for both directions
of a queue pair); without one, the only flow that fits three times running. Where several fit, nothing is claimed until
their numbers part. A match that stops to fit is dropped.

An acknowledgment only says how long to wait for missing packets (`mirror.roce_loss`); no byte is placed by it. READ
responses are placed by the match, and checked against the request's range and size.
"""

from __future__ import annotations

from mirror.flows import FlowTable
from mirror.internal import internal
from mirror.memory import load_u8
from mirror.reorder import ACKED, NEXT
from mirror.roce_loss import open_gap_before, watch
from mirror.roce_state import (
    ACK_PACKETS,
    ACKS,
    CANDIDATE,
    MISFIT_ACKS,
    NAKS,
    PAIRS,
    PEER,
    PORT,
    RNR_NAKS,
    TRIES,
    VOTES,
    Machine,
)
from mirror.roce_stream import FAR_AHEAD, unwrap

_RECENT = 4096                           # packets
_NEEDED = 3
_MOST_MISFITS = 8


@internal()
def match(m: Machine, table: FlowTable, flows: int, flow: int, wire_psn: int) -> None:
    """Look for the flow that runs the other way of `flow`, which carries an answer to packet `wire_psn`."""
    row = m.state[flow]
    row[TRIES] += 1
    if row[TRIES] & (row[TRIES] - 1) and row[TRIES] & 63:
        return  # ever more seldom, so that a flow without a match costs little
    key = table.key
    same_port, alike, fitting, only = 0, -1, 0, -1
    for other in range(flows):
        if (key[other, 0] != key[flow, 2] or key[other, 1] != key[flow, 3] or key[other, 2] != key[flow, 0]
                or key[other, 3] != key[flow, 1] or key[other, 4] >> 32 != key[flow, 4] >> 32):
            continue
        state = m.state[other]
        if state[NEXT] < 0 or state[PEER] >= 0:
            continue
        if not 0 < state[NEXT] - unwrap(state[NEXT], wire_psn) <= _RECENT:
            continue
        fitting, only = fitting + 1, other
        if state[PORT] == row[PORT]:
            same_port, alike = same_port + 1, other
    found = alike if same_port == 1 else -1
    if same_port == 0 and fitting == 1:
        row[VOTES] = row[VOTES] + 1 if row[CANDIDATE] == only + 1 else 1
        row[CANDIDATE] = only + 1
        if row[VOTES] >= _NEEDED:
            found = only
    if found >= 0:
        row[PEER], m.state[found, PEER] = found, flow
        row[MISFIT_ACKS] = m.state[found, MISFIT_ACKS] = 0
        m.counters[PAIRS] += 1


@internal()
def acknowledge(m: Machine, table: FlowTable, flows: int, flow: int, wire_psn: int, aeth: int, ts: int) -> None:
    """An ACK or NAK on `flow`. `aeth`: address of its syndrome byte."""
    syndrome = load_u8(aeth) >> 5
    m.counters[ACK_PACKETS if syndrome == 0 else RNR_NAKS if syndrome == 1 else NAKS] += 1
    row = m.state[flow]
    row[ACKS] = 1
    if row[PEER] < 0:
        match(m, table, flows, flow, wire_psn)
    peer = row[PEER]
    if peer < 0 or m.state[peer, NEXT] < 0:
        return
    other = m.state[peer]
    # A positive one speaks for its packet, a negative one for all before it.
    reached = unwrap(other[NEXT], wire_psn) + (1 if syndrome == 0 else 0)
    if reached > other[NEXT] + _RECENT or reached < other[NEXT] - FAR_AHEAD:
        row[MISFIT_ACKS] += 1
        if row[MISFIT_ACKS] >= _MOST_MISFITS:
            row[PEER] = other[PEER] = -1
            row[TRIES] = row[VOTES] = row[MISFIT_ACKS] = 0
        if reached > other[NEXT] + FAR_AHEAD or reached < other[NEXT]:
            return
    else:
        row[MISFIT_ACKS] = 0
    if reached > other[ACKED]:
        other[ACKED] = reached
        if reached > other[NEXT] or open_gap_before(m, peer, reached) >= 0:
            watch(m, peer, ts)
