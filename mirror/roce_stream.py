"""One RoCE packet after the other: where it belongs, and what it tells about the flow.

A packet's number says whether it is new (beyond everything seen, or in a gap) or a repeat. Its message is the one it
begins, or the known one whose range of numbers holds it; its place is (number - number of the first) x path MTU. So a
packet is given on at once, in whatever order packets come, and a retry that starts in the middle of a message needs no
special case. What contradicts the message (opcode, length, another address for the same number) is never placed.

Path MTU: the payload of every first and middle packet of a queue pair, so the first such packet teaches it.

A number far from all that is known is a stranger: believed only when a second one continues it. The flow then starts
over (CLOSE, OPEN), as it does when a first packet comes again with another address, or when a queue pair that was
silent for long goes back: the queue pair was made anew. Numbers are 64 bit, the low 24 those of the wire; a flow that
starts over goes to the next multiple of 2^24, so they never repeat.

READ: the request takes as many numbers as its response has packets. The responses come on the flow the other way,
numbered like that; its message is listed with the request's flow. A retry is a new request from where the first one
stopped, inside the range of the first.

Sources: IBTA specification volume 1, 9.7 (reliable service); docs/roce.md.
"""

from __future__ import annotations

from mirror.internal import internal
from mirror.memory import load_be32
from mirror.reorder import NEXT, STRANGER
from mirror.roce_loss import FAR_BACK, abandon, drain, fits, force, lose, reopen, watch
from mirror.roce_pool import at_or_before, begin, deliver, find, make_current, settle, unlink
from mirror.roce_spans import DUPLICATE, OPEN, VOID
from mirror.roce_state import (
    BAD,
    BEFORE_TS,
    COMPLETE,
    DUPLICATE_BYTES,
    DUPLICATES,
    FORGOT,
    G_AFTER,
    G_END,
    G_FLAGS,
    G_SINCE,
    G_TS,
    GAPS,
    GAPS_LEFT,
    GIVEN,
    HEADLESS,
    HELD,
    ICRC_BAD,
    ICRC_OK,
    LATE,
    M_FIRST,
    M_FLAGS,
    M_GAPS,
    M_GOT,
    M_KIND,
    M_LENGTH,
    M_MTU,
    M_NEWER,
    M_PACKETS,
    M_RKEY,
    M_SEEN,
    M_TS,
    M_VA,
    MISFITS,
    MTU,
    NO_ROOM,
    OLD,
    OUT_OF_ORDER,
    PEER,
    PORT,
    QUIET,
    RESPONSES,
    RESTARTS,
    SEEN_TS,
    SHORT,
    STRANGERS,
    TRUNCATED,
    VOIDED,
    Machine,
    add_gap,
    clear_gaps,
    compare_held,
    gap_at,
    hold,
    tell,
)
from mirror.roce_wire import ATOMIC, CLASS, FIRST, IMMEDIATE, LAST, PART, READ, SEND, WRITE

MASK = 0xFFFFFF
FAR_AHEAD = 1 << 20                      # packets: a longer outage is believed only on a second packet
_NEW, _FILL, _REPEAT = range(3)
_TOGETHER = 1_000_000                    # ns within which packets that were cut make one gap


@internal()
def unwrap(reference: int, psn: int) -> int:
    """The 64-bit number near `reference` whose low 24 bits are `psn`."""
    return reference + (((psn - reference) & MASK) ^ 0x800000) - 0x800000


@internal()
def _is_mtu(length: int) -> bool:
    return length in (256, 512, 1024, 2048, 4096)


@internal()
def _possible(last: bool, length: int, mtu: int) -> bool:
    """Whether a middle or last packet of an unknown message may carry this much; `mtu` 0: unknown."""
    if last:
        return 0 < length <= (mtu if mtu else 4096)
    return _is_mtu(length) and mtu in (0, length)


@internal()
def _start(m: Machine, flow: int, psn: int, first: bool, ts: int) -> None:
    """The first packet of a flow. Earlier ones may follow by reordering or retry, so QUIET gaps lie before it."""
    row = m.state[flow]
    row[NEXT] = psn
    tell(m, flow, -1, OPEN, 0, 0, 0, ts)
    if m.meta[GAPS_LEFT] > 8:
        add_gap(m, m.state, flow, GAPS, psn - FAR_BACK, psn if first else psn - 1, 0, ts, QUIET | GIVEN)
        if not first:
            add_gap(m, m.state, flow, GAPS, psn - 1, psn, 0, ts, QUIET)
            watch(m, flow, ts)


@internal()
def _restart(m: Machine, flow: int, psn: int, first: bool, ts: int) -> int:
    """The queue pair was made anew; returns the 64-bit number of its packet `psn`."""
    row = m.state[flow]
    peer, port, good, bad = row[PEER], row[PORT], row[ICRC_OK], row[ICRC_BAD]
    number = ((row[NEXT] >> 24) + 1 << 24) + (psn & MASK)
    abandon(m, flow, ts)
    row[PEER], row[PORT], row[ICRC_OK], row[ICRC_BAD] = peer, port, good, bad
    if peer >= 0:
        m.state[peer, PEER] = flow
    m.counters[RESTARTS] += 1
    _start(m, flow, number, first, ts)
    return number


@internal(forceinline=True)
def _seen(m: Machine, flow: int, psn: int, count: int, ts: int) -> None:
    """Packets psn..psn+count are here (or, of a READ, never come on this flow)."""
    row = m.state[flow]
    if psn < row[NEXT]:
        clear_gaps(m, m.state, flow, GAPS, psn, psn + count)
    elif psn > row[NEXT]:
        m.counters[OUT_OF_ORDER] += 1
        add_gap(m, m.state, flow, GAPS, row[NEXT], psn, row[BEFORE_TS], ts, 0)
        watch(m, flow, ts)
    row[NEXT] = max(row[NEXT], psn + count)


@internal()
def _cut(m: Machine, flow: int, psn: int, ts: int) -> None:
    """Packet `psn` passed, but its payload was cut off by the capture: it is missing."""
    m.counters[TRUNCATED] += 1
    if psn > m.state[flow, NEXT]:
        add_gap(m, m.state, flow, GAPS, m.state[flow, NEXT], psn, m.state[flow, BEFORE_TS], ts, 0)
        m.state[flow, NEXT] = psn
    _missing(m, flow, psn, SHORT, m.state[flow, BEFORE_TS], ts)


@internal()
def refused(m: Machine, flow: int, wire_psn: int, ts: int) -> None:
    """A packet of a message came with a wrong checksum: nothing in it is believed, so neither is its number, unless it
    is the next one or that of a packet which is missing anyway. Then why it is missing is known."""
    row = m.state[flow]
    if row[NEXT] >= 0 and m.meta[GAPS_LEFT] > 16:
        psn = unwrap(row[NEXT], wire_psn)
        if psn <= row[NEXT]:
            _missing(m, flow, psn, BAD, row[SEEN_TS], ts)


@internal()
def _missing(m: Machine, flow: int, psn: int, kind: int, since: int, ts: int) -> None:
    """Packet `psn`, at most the next one, passed without bytes that can be taken: SHORT or BAD."""
    row, gaps = m.state[flow], m.gaps
    known = kind
    if psn < row[NEXT]:
        node = gap_at(m, row[GAPS], psn)
        if node < 0 or gaps[node, G_FLAGS] & (GIVEN | kind):
            return
        since, ts, known = gaps[node, G_SINCE], gaps[node, G_TS], gaps[node, G_FLAGS] | kind
        clear_gaps(m, m.state, flow, GAPS, psn, psn + 1)
    else:
        row[NEXT] = psn + 1
        watch(m, flow, ts)
        node = row[GAPS]
        while node >= 0 and gaps[node, G_END] < psn:
            node = gaps[node, G_AFTER]
        if (node >= 0 and gaps[node, G_END] == psn and gaps[node, G_FLAGS] == kind
                and ts - gaps[node, G_TS] < _TOGETHER):
            gaps[node, G_END] = psn + 1  # a switch that cuts one cuts all: else a list of thousands
            return
    add_gap(m, m.state, flow, GAPS, psn, psn + 1, since, ts, known)


@internal(forceinline=True)
def _repeat(m: Machine, flow: int, slot: int, psn: int, addr: int, length: int, whole: bool, ts: int) -> None:
    m.counters[DUPLICATES] += 1
    if m.state[flow, FORGOT] and m.messages[slot, M_FLAGS] & COMPLETE == 0:
        m.counters[OLD] += 1  # gaps were forgotten for want of room: it may never have been given
    elif whole and length > 0:
        offset = (psn - m.messages[slot, M_FIRST]) * m.messages[slot, M_MTU]
        tell(m, flow, slot, DUPLICATE, offset, addr, length, ts)
        m.counters[DUPLICATE_BYTES] += length


@internal(forceinline=True)
def _make_way(m: Machine, flow: int, first: int, packets: int, ts: int) -> bool:
    """Whether a message of known size may begin at `first`: headless ones in its range are made void."""
    messages = m.messages
    while True:
        before = at_or_before(m, flow, first + packets - 1)
        if before < 0 or messages[before, M_FIRST] < first:
            return True
        row = messages[before]
        if row[M_FLAGS] & HEADLESS == 0 or m.meta[GAPS_LEFT] < 8:
            return False
        start, count = row[M_FIRST], row[M_GOT]
        unlink(m, before)
        tell(m, flow, before, VOID, 0, 0, 0, ts)
        m.counters[VOIDED] += 1
        lose(m, flow, start, start + count, ts)


@internal(forceinline=True)
def _first(m: Machine, flow: int, novelty: int, psn: int, opcode: int, headers: int, addr: int, length: int,
           whole: bool, ts: int) -> None:
    """A packet that begins a message (and may be all of it). `headers`: address behind the BTH."""
    row, messages = m.state[flow], m.messages
    kind, only = CLASS[opcode], PART[opcode] & LAST != 0
    va, rkey, size, mtu, packets = 0, 0, length, row[MTU], 1
    if kind in (WRITE, READ):
        va = load_be32(headers) << 32 | load_be32(headers + 4)
        rkey = load_be32(headers + 8)
        size = load_be32(headers + 12)
    possible = mtu == 0 or length <= mtu
    if kind == READ:
        possible = length == 0
        if mtu == 0 and row[PEER] >= 0:
            mtu = m.state[row[PEER], MTU]
        packets = 1 if size <= 256 else (size + mtu - 1) // mtu if mtu else -1
        packets = max(packets, 1) if packets >= 0 else packets
    elif kind == ATOMIC:
        possible, size = True, 0
    elif only:
        possible = possible and size == length
    else:
        possible = _is_mtu(length) and (mtu == 0 or mtu == length) and (kind == SEND or size > length)
        mtu = max(length, 1)
        packets = -1 if kind == SEND else (size + mtu - 1) // mtu
        if kind == SEND:
            size = -1
    if not possible or packets > 1 << 23:
        m.counters[MISFITS] += 1
        return

    slot = at_or_before(m, flow, psn)
    if slot >= 0 and messages[slot, M_PACKETS] >= 0 and psn - messages[slot, M_FIRST] >= messages[slot, M_PACKETS]:
        slot = -1
    same = slot >= 0 and messages[slot, M_FIRST] == psn and messages[slot, M_FLAGS] & HEADLESS == 0
    if same:
        known = messages[slot]
        if known[M_KIND] != kind or known[M_VA] != va or known[M_RKEY] != rkey or (
                size >= 0 and known[M_LENGTH] >= 0 and known[M_LENGTH] != size) or (
                kind != READ and only != (known[M_PACKETS] == 1)):
            psn = _restart(m, flow, psn, True, ts)
            novelty, same = _NEW, False
        elif novelty == _REPEAT:
            _repeat(m, flow, slot, psn, addr, length, whole, ts)
            return
    elif novelty == _REPEAT:
        if kind == READ and slot >= 0 and messages[slot, M_KIND] == READ:
            m.counters[DUPLICATES] += 1  # a READ goes on from where its response broke off
        else:
            m.counters[OLD] += 1
        return
    elif slot >= 0 and messages[slot, M_PACKETS] >= 0:
        m.counters[MISFITS] += 1         # inside another message
        return
    if not same:
        if not _make_way(m, flow, psn, max(packets, 1), ts):
            m.counters[MISFITS] += 1
            return
        slot = begin(m, flow, psn, packets, kind, va, rkey, size, 0, mtu, ts)
        if slot < 0:
            m.counters[NO_ROOM] += 1
            return
        if novelty == _FILL and packets > 1 and kind == WRITE:
            # What lies in its range waits, or was of no message that is known: in this one it is missing.
            end = min(psn + packets, row[NEXT])
            lose(m, flow, psn + 1, max(end, psn + 1), ts)
    if not only:
        row[MTU] = mtu
    if not whole:
        _cut(m, flow, psn, ts)
        return
    _seen(m, flow, psn, max(packets, 1) if kind == READ else 1, ts)
    make_current(m, flow, slot)
    if kind != READ:
        imm = load_be32(addr - 4) if IMMEDIATE[opcode] else -1
        deliver(m, flow, slot, psn, addr, length, only, imm, ts)
    if row[HELD] >= 0:
        drain(m, flow)


@internal(forceinline=True)
def _later(m: Machine, flow: int, novelty: int, psn: int, opcode: int, addr: int, length: int, whole: bool,
           ts: int) -> None:
    """A middle or last packet."""
    row = m.state[flow]
    last = PART[opcode] == LAST
    slot = find(m, flow, psn)
    imm = load_be32(addr - 4) if IMMEDIATE[opcode] else -1
    if slot < 0:
        if novelty == _REPEAT:
            m.counters[OLD] += 1         # it waits already, or its message is long over
            if whole and row[HELD] >= 0:
                compare_held(m, flow, psn, opcode, imm, addr, length)
        elif not _possible(last, length, row[MTU]):
            m.counters[MISFITS] += 1
        elif not whole:
            _cut(m, flow, psn, ts)
        elif hold(m, flow, psn, opcode, imm, addr, length, ts):
            if not last:
                row[MTU] = length
            _seen(m, flow, psn, 1, ts)
            reopen(m, flow, psn, ts)
            drain(m, flow)
        else:
            m.counters[NO_ROOM] += 1
            force(m, ts)
        return
    if not fits(m, slot, psn, opcode, length):
        m.counters[MISFITS] += 1
    elif novelty == _REPEAT:
        _repeat(m, flow, slot, psn, addr, length, whole, ts)
    elif not whole:
        _cut(m, flow, psn, ts)
    else:
        _seen(m, flow, psn, 1, ts)
        if not last and novelty == _NEW:
            make_current(m, flow, slot)
        deliver(m, flow, slot, psn, addr, length, last, imm, ts)
        if novelty == _FILL:
            settle(m, slot, ts)
        if row[HELD] >= 0:
            drain(m, flow)


@internal(forceinline=True)
def request(m: Machine, flow: int, opcode: int, wire_psn: int, headers: int, addr: int, length: int, whole: bool,
            ts: int, long: int) -> None:
    """A packet of a SEND, WRITE, READ request or atomic operation that is not simply the next of its message."""
    row = m.state[flow]
    first = PART[opcode] & FIRST != 0
    if m.meta[GAPS_LEFT] <= 16:
        force(m, ts)
        if m.meta[GAPS_LEFT] <= 16:
            m.counters[NO_ROOM] += 1
            return
    if row[NEXT] < 0:
        _start(m, flow, (1 << 24) + wire_psn, first, ts)
    psn = unwrap(row[NEXT], wire_psn)
    if not row[NEXT] - FAR_BACK <= psn < row[NEXT] + FAR_AHEAD:
        if row[STRANGER] != wire_psn:
            m.counters[STRANGERS] += 1
            row[STRANGER] = (wire_psn + 1) & MASK
            return
        psn = _restart(m, flow, wire_psn, first, ts)
    novelty = _NEW
    if psn < row[NEXT]:
        gap = gap_at(m, row[GAPS], psn)
        novelty = _FILL if gap >= 0 else _REPEAT
        if gap >= 0 and m.gaps[gap, G_FLAGS] & GIVEN:
            m.counters[LATE] += 1
        elif gap < 0 and ts - row[SEEN_TS] > long:  # no retry comes after so long a silence
            psn, novelty = _restart(m, flow, wire_psn, first, ts), _NEW
    row[BEFORE_TS], row[SEEN_TS] = row[SEEN_TS], ts
    if first:
        _first(m, flow, novelty, psn, opcode, headers, addr, length, whole, ts)
    else:
        _later(m, flow, novelty, psn, opcode, addr, length, whole, ts)


@internal()
def response(m: Machine, flow: int, opcode: int, wire_psn: int, addr: int, length: int, whole: bool, ts: int) -> None:
    """A READ response on `flow`; its message is the READ on the flow the other way, if that is known."""
    m.counters[RESPONSES] += 1
    row = m.state[flow]
    peer = row[PEER]
    if peer < 0 or m.state[peer, NEXT] < 0:
        m.counters[OLD] += 1
        return
    psn = unwrap(m.state[peer, NEXT], wire_psn)
    slot = at_or_before(m, peer, psn)
    if slot < 0 or m.messages[slot, M_KIND] != READ:
        m.counters[OLD] += 1
        return
    message = m.messages[slot]
    index = psn - message[M_FIRST]
    if message[M_PACKETS] < 0 and PART[opcode] & LAST == 0 and _is_mtu(length):
        _size_read(m, peer, slot, length, ts)
    size = message[M_LENGTH] - index * message[M_MTU]
    if message[M_PACKETS] >= 0 and (index >= message[M_PACKETS] or length != min(size, max(message[M_MTU], 256))):
        m.counters[MISFITS] += 1
        return
    if message[M_PACKETS] < 0 or not whole or m.meta[GAPS_LEFT] <= 16:
        m.counters[TRUNCATED if not whole else NO_ROOM] += 1
        return
    if index < message[M_SEEN]:
        if gap_at(m, message[M_GAPS], index) < 0:
            _repeat(m, peer, slot, psn, addr, length, whole, ts)
            return
        clear_gaps(m, m.messages, slot, M_GAPS, index, index + 1)
    else:
        if index > message[M_SEEN]:
            add_gap(m, m.messages, slot, M_GAPS, message[M_SEEN], index, message[M_TS], ts, GIVEN | QUIET)
        message[M_SEEN] = index + 1
    if PART[opcode] & LAST == 0:
        row[MTU] = message[M_MTU]
    deliver(m, peer, slot, psn, addr, length, False, -1, ts)


@internal()
def _size_read(m: Machine, flow: int, slot: int, mtu: int, ts: int) -> None:
    """The path MTU of a READ became known: so does how many packet numbers it takes."""
    row, message = m.state[flow], m.messages[slot]
    packets = (message[M_LENGTH] + mtu - 1) // mtu
    newer = message[M_NEWER]
    first = message[M_FIRST]
    if newer >= 0 and m.messages[newer, M_FIRST] < first + packets:
        m.counters[MISFITS] += 1
        return
    message[M_MTU], message[M_PACKETS] = mtu, packets
    clear_gaps(m, m.state, flow, GAPS, first, min(first + packets, row[NEXT]))
    row[NEXT] = max(row[NEXT], first + packets)
    if row[MTU] == 0:
        row[MTU] = mtu
