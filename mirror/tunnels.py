"""Tunnels in the frame kernel: from an outer packet to the frame inside, and to the group that it belongs to.

See `mirror.vantage` for what the groups mean, `mirror.decap` for the headers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from mirror.flows import mix
from mirror.internal import internal
from mirror.memory import int64s_at, rows_at

__all__ = ["TUNNEL_TABLE", "TunnelTable", "add_tunnel", "declared", "find_tunnel", "is_vxlan", "tunnel_table"]

WAYS = 8
FIRST_OWN = 1 << 16              # groups below are interfaces' and declared ones
_LAST_OWN = (1 << 31) - 1        # a flow's key has 31 bits for the group

# Columns of a tunnel's row.
_A, _B, _C, _D, ID, WHERE, GROUP, FRAMES_IN, CUT_FRAMES, TOUCHED = range(10)
COLUMNS = 10
# Columns of a rule; FIELDS says which others count.
FIELDS, KIND, NUMBER, RULE_GROUP, RULE_A = range(5)
SOURCE, DESTINATION, OF_KIND, NUMBERED = 1, 2, 4, 8
TUNNEL_SEED, SERIAL, RULES, EVICTED = range(4)


class TunnelTable(NamedTuple):
    """The arrays behind `Vantage`, in the form that kernels take."""

    # int64[sets * ways, 10]: a tunnel; a free row has group 0 and where 0
    rows: np.ndarray
    # int64[256, 8]: declared tunnels, first match wins
    rules: np.ndarray
    # int64[4]: seed, next group of a tunnel's own, rules, tunnels evicted
    meta: np.ndarray
    # int64[n]: UDP destination ports of VXLAN
    ports: np.ndarray


TUNNEL_TABLE = 10
"""Numbers that a TunnelTable takes in a handle."""


@internal()
def tunnel_table(where: np.ndarray, at: int) -> TunnelTable:
    """The table whose part of a handle (`mirror.memory.handle`) begins at `at`."""
    h = where[at:]
    return TunnelTable(rows_at(h[0], h[1], h[2]), rows_at(h[3], h[4], h[5]), int64s_at(h[6], h[7]),
                       int64s_at(h[8], h[9]))


@internal()
def is_vxlan(ports: np.ndarray, port: int) -> bool:
    """Whether `port` is one of `ports`."""
    found = False
    for known in ports:
        found = found or port == known
    return found


@njit(cache=True, nogil=True)
def declared(table: TunnelTable, a: int, b: int, c: int, d: int, kind: int, identifier: int) -> int:
    """The group of the first rule that fits, or 0."""
    for index in range(table.meta[RULES]):
        rule = table.rules[index]
        fields = rule[FIELDS]
        if fields & SOURCE and not (rule[RULE_A] == a and rule[RULE_A + 1] == b):
            continue
        if fields & DESTINATION and not (rule[RULE_A + 2] == c and rule[RULE_A + 3] == d):
            continue
        if fields & OF_KIND and rule[KIND] != kind:
            continue
        if fields & NUMBERED and rule[NUMBER] != identifier:
            continue
        return int(rule[RULE_GROUP])
    return 0


@internal()
def _set_of(seed: int, sets: int, a: int, b: int, c: int, d: int, identifier: int, where: int) -> int:
    """First of the rows in which a tunnel may be."""
    return int((mix(seed, a, b, c, d, where * 0x9E3779B1 + identifier) & (sets - 1)) * WAYS)


@internal()
def find_tunnel(rows: np.ndarray, seed: int, a: int, b: int, c: int, d: int, kind: int, identifier: int,
                carrier: int) -> int:
    """Row of a tunnel, or -1. Outer source and destination in a..d; `carrier`: group that the outer packet is in."""
    where = carrier << 8 | kind
    first = _set_of(seed, rows.shape[0] // WAYS, a, b, c, d, identifier, where)
    for row in range(first, first + WAYS):
        if (rows[row, _B] == b and rows[row, _D] == d and rows[row, ID] == identifier and rows[row, WHERE] == where
                and rows[row, _A] == a and rows[row, _C] == c):
            return row
    return -1


@internal()
def add_tunnel(table: TunnelTable, a: int, b: int, c: int, d: int, kind: int, identifier: int, carrier: int,
               epoch: int) -> int:
    """Row for a tunnel that `find_tunnel` does not know, that of the longest idle one if need be; -1 if all that might
    go had frames in this block (`epoch`)."""
    rows, meta = table.rows, table.meta
    where = carrier << 8 | kind
    first = _set_of(meta[TUNNEL_SEED], rows.shape[0] // WAYS, a, b, c, d, identifier, where)
    row = first
    for other in range(first + 1, first + WAYS):
        if rows[other, TOUCHED] < rows[row, TOUCHED]:
            row = other
    entry = rows[row]
    group = declared(table, a, b, c, d, kind, identifier)
    if entry[TOUCHED] == epoch or (group == 0 and meta[SERIAL] > _LAST_OWN):
        return -1
    if entry[GROUP] != 0:
        meta[EVICTED] += 1
    if group == 0:
        group = meta[SERIAL]
        meta[SERIAL] += 1
    entry[_A], entry[_B], entry[_C], entry[_D], entry[ID], entry[WHERE] = a, b, c, d, identifier, where
    entry[GROUP], entry[FRAMES_IN], entry[CUT_FRAMES] = group, 0, 0
    return row
