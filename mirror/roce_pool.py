"""Messages of RoCE flows: found by packet number, begun, given their bytes, ended, and their rows taken again."""

from __future__ import annotations

from mirror.internal import internal
from mirror.memory import store_u8
from mirror.reorder import ACKED, NEXT
from mirror.roce_spans import BEGIN, DATA, END
from mirror.roce_state import (
    COMPLETE,
    COMPLETED,
    CURRENT,
    CURRENT_FIRST,
    CURRENT_LAST,
    CURSOR,
    DEAD,
    ENDED,
    G_AFTER,
    G_END,
    G_FLAGS,
    G_SINCE,
    G_START,
    G_TS,
    GAPS,
    GIVEN,
    HEADLESS,
    HEADLESS_MESSAGES,
    HOLE_BYTES,
    INCOMPLETE,
    M_FIRST,
    M_FLAGS,
    M_FLOW,
    M_GAPS,
    M_GOT,
    M_IMM,
    M_KIND,
    M_LENGTH,
    M_MTU,
    M_NEWER,
    M_OLDER,
    M_PACKETS,
    M_QUEUE,
    M_RKEY,
    M_SEEN,
    M_TS,
    M_VA,
    MESSAGES,
    NEWEST,
    OLDEST,
    PAYLOAD,
    QUEUE_HEAD,
    QUEUE_TAIL,
    ROW_FREE,
    ROWS_LEFT,
    Machine,
    drop_gaps,
    tell,
    tell_hole,
)
from mirror.roce_wire import READ, WRITE
from mirror.spans import PROVEN


@internal(forceinline=True)
def at_or_before(m: Machine, flow: int, psn: int) -> int:
    """The last message of the flow whose first packet is `psn` or one before it, or -1."""
    row, messages = m.state[flow], m.messages
    slot = row[CURSOR] if row[CURSOR] >= 0 else row[NEWEST]
    while slot >= 0 and messages[slot, M_FIRST] > psn:
        slot = messages[slot, M_OLDER]
    if slot < 0:
        return -1
    newer = messages[slot, M_NEWER]
    while newer >= 0 and messages[newer, M_FIRST] <= psn:
        slot, newer = newer, messages[newer, M_NEWER]
    row[CURSOR] = slot
    return slot


@internal(forceinline=True)
def find(m: Machine, flow: int, psn: int) -> int:
    """The message that packet `psn` belongs to, or -1 if none is known.

    Where the number of a message's packets is not known, only the packet right behind those present belongs to it for
    certain: a gap may hold its end, and the start of another one.
    """
    slot = at_or_before(m, flow, psn)
    if slot < 0:
        return -1
    packets = m.messages[slot, M_PACKETS]
    if packets < 0:
        packets = m.messages[slot, M_GOT] + 1
    return slot if psn - m.messages[slot, M_FIRST] < packets else -1


@internal(forceinline=True)
def begin(m: Machine, flow: int, first: int, packets: int, kind: int, va: int, rkey: int, length: int, flags: int,
          mtu: int, ts: int) -> int:
    """A new message; returns its row, or -1 if none is free. Unknown numbers are -1."""
    state, messages, meta = m.state[flow], m.messages, m.meta
    slot = meta[ROW_FREE]
    if slot < 0:
        return -1
    meta[ROW_FREE] = messages[slot, M_QUEUE]
    meta[ROWS_LEFT] -= 1
    older = at_or_before(m, flow, first)
    newer = state[OLDEST] if older < 0 else messages[older, M_NEWER]
    row = messages[slot]
    row[M_FLOW], row[M_FIRST], row[M_PACKETS], row[M_KIND] = flow, first, packets, kind
    row[M_VA], row[M_RKEY], row[M_LENGTH], row[M_IMM], row[M_MTU] = va, rkey, length, -1, mtu
    row[M_GOT], row[M_FLAGS], row[M_TS], row[M_SEEN], row[M_GAPS] = 0, flags, ts, 0, -1
    row[M_OLDER], row[M_NEWER], row[M_QUEUE] = older, newer, -1
    if older < 0:
        state[OLDEST] = slot
    else:
        messages[older, M_NEWER] = slot
    if newer < 0:
        state[NEWEST] = slot
    else:
        messages[newer, M_OLDER] = slot
    if meta[QUEUE_TAIL] < 0:
        meta[QUEUE_HEAD] = slot
    else:
        messages[meta[QUEUE_TAIL], M_QUEUE] = slot
    meta[QUEUE_TAIL] = slot
    store_u8(m.live + flow, 1)
    tell(m, flow, slot, BEGIN, 0, 0, 0 if flags & HEADLESS else 1, ts)
    m.counters[HEADLESS_MESSAGES if flags & HEADLESS else MESSAGES] += 1
    return slot


@internal()
def unlink(m: Machine, slot: int) -> None:
    """Take a message off its flow's list; its row stays in the queue until `retire` takes it."""
    row = m.messages[slot]
    state = m.state[row[M_FLOW]]
    older, newer = row[M_OLDER], row[M_NEWER]
    if older < 0:
        state[OLDEST] = newer
    else:
        m.messages[older, M_NEWER] = newer
    if newer < 0:
        state[NEWEST] = older
    else:
        m.messages[newer, M_OLDER] = older
    if state[CURSOR] == slot:
        state[CURSOR] = older
    if state[CURRENT] == slot:
        state[CURRENT] = -1
    drop_gaps(m, m.messages, slot, M_GAPS)
    row[M_FLAGS] |= DEAD


@internal()
def retire(m: Machine, need: int, clock: int, patience: int) -> None:
    """Free the rows of the oldest messages that are over, until `need` rows are free.

    One that got nothing for `patience` ns is ended; its row is then free for a later call.
    """
    messages, meta = m.messages, m.meta
    for _ in range(messages.shape[0] - meta[ROWS_LEFT]):
        if meta[ROWS_LEFT] >= need:
            return
        slot = meta[QUEUE_HEAD]
        row = messages[slot]
        meta[QUEUE_HEAD] = row[M_QUEUE]
        if row[M_QUEUE] < 0:
            meta[QUEUE_TAIL] = -1
        if row[M_FLAGS] & (COMPLETE | ENDED | DEAD):
            if row[M_FLAGS] & DEAD == 0:
                unlink(m, slot)
            row[M_QUEUE] = meta[ROW_FREE]
            meta[ROW_FREE] = slot
            meta[ROWS_LEFT] += 1
            continue
        if clock - row[M_TS] > patience:
            finish(m, slot, clock)
        row[M_QUEUE] = -1
        if meta[QUEUE_TAIL] < 0:
            meta[QUEUE_HEAD] = slot
        else:
            messages[meta[QUEUE_TAIL], M_QUEUE] = slot
        meta[QUEUE_TAIL] = slot


@internal()
def hole_in(m: Machine, slot: int, start: int, end: int, known: int, since: int, ts: int) -> None:
    """Packets start..end of a message of known size are missing; known, since, ts: see `tell_hole`."""
    row = m.messages[slot]
    offset = (start - row[M_FIRST]) * row[M_MTU]
    stop = (end - row[M_FIRST]) * row[M_MTU]
    if end - row[M_FIRST] >= row[M_PACKETS] and row[M_LENGTH] >= 0:
        stop = row[M_LENGTH]
    if stop > offset:
        tell_hole(m, row[M_FLOW], slot, offset, stop - offset, known, since, ts)
        m.counters[HOLE_BYTES] += stop - offset


@internal()
def _end(m: Machine, slot: int, ts: int) -> None:
    row = m.messages[slot]
    row[M_FLAGS] |= ENDED
    tell(m, row[M_FLOW], slot, END, 0, 0, 0, ts)
    m.counters[INCOMPLETE] += 1


@internal()
def finish(m: Machine, slot: int, ts: int) -> None:
    """Nothing more will come: what is missing behind the highest packet seen (of a READ: anywhere) is a HOLE."""
    row = m.messages[slot]
    if row[M_FLAGS] & (COMPLETE | ENDED | DEAD):
        return
    packets = row[M_PACKETS]
    if packets >= 0 and row[M_KIND] == READ:
        node = row[M_GAPS]
        while node >= 0:
            hole_in(m, slot, row[M_FIRST] + m.gaps[node, G_START], row[M_FIRST] + m.gaps[node, G_END], 0,
                    m.gaps[node, G_SINCE], m.gaps[node, G_TS])
            node = m.gaps[node, G_AFTER]
        hole_in(m, slot, row[M_FIRST] + row[M_SEEN], row[M_FIRST] + packets, 0, row[M_TS], ts)
    elif packets >= 0:
        state, limit = m.state[row[M_FLOW]], row[M_FIRST] + packets
        known = PROVEN if limit <= state[ACKED] else 0
        hole_in(m, slot, max(state[NEXT], row[M_FIRST]), limit, known, row[M_TS], ts)
    _end(m, slot, ts)


@internal(forceinline=True)
def settle(m: Machine, slot: int, ts: int) -> None:
    """After a packet came, or a gap was given up: the message may be over."""
    row = m.messages[slot]
    packets = row[M_PACKETS]
    if packets < 0 or row[M_FLAGS] & COMPLETE:
        return
    if row[M_GOT] == packets and row[M_FLAGS] & HEADLESS == 0:
        row[M_FLAGS] |= COMPLETE
        tell(m, row[M_FLOW], slot, END, 0, 0, 1, ts)
        m.counters[COMPLETED] += 1
        return
    state = m.state[row[M_FLOW]]
    first, limit = row[M_FIRST], row[M_FIRST] + packets
    if row[M_FLAGS] & ENDED or row[M_KIND] == READ or state[NEXT] < limit:
        return
    node = state[GAPS]
    while node >= 0 and m.gaps[node, G_START] < limit:
        if m.gaps[node, G_END] > first and m.gaps[node, G_FLAGS] & GIVEN == 0:
            return
        node = m.gaps[node, G_AFTER]
    _end(m, slot, ts)


@internal(forceinline=True)
def deliver(m: Machine, flow: int, slot: int, psn: int, addr: int, length: int, last: bool, imm: int, ts: int) -> None:
    """Packet `psn` of the message, never given before; `last`: it is the message's last one."""
    row = m.messages[slot]
    index = psn - row[M_FIRST]
    if length > 0:
        tell(m, flow, slot, DATA, index * row[M_MTU], addr, length, ts)
        m.counters[PAYLOAD] += length
    row[M_GOT] += 1
    row[M_TS] = ts
    if last:
        if imm >= 0:
            row[M_IMM] = imm
        if row[M_PACKETS] < 0:
            row[M_PACKETS] = index + 1
            row[M_LENGTH] = index * row[M_MTU] + length
        settle(m, slot, ts)
    elif row[M_GOT] == row[M_PACKETS]:
        settle(m, slot, ts)


@internal(forceinline=True)
def make_current(m: Machine, flow: int, slot: int) -> None:
    """The packets that follow are likely of this message: let the kernel's short cut know it."""
    state, row = m.state[flow], m.messages[slot]
    if row[M_KIND] == WRITE and row[M_PACKETS] > 1 and row[M_FLAGS] & HEADLESS == 0:
        state[CURRENT], state[CURRENT_FIRST] = slot, row[M_FIRST]
        state[CURRENT_LAST] = row[M_FIRST] + row[M_PACKETS] - 1
    else:
        state[CURRENT] = -1
