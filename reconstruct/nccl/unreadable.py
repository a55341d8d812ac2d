"""Packets that show why a job cannot be read: each function names one reason of `reconstruct.nccl.refusals`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from reconstruct.nccl.schedule import LL, LL128, SIMPLE, SLOT_BYTES

__all__ = ["infiniband_frame", "reduce_scatter", "tls_record"]


def infiniband_frame(frame: bytes) -> bool:
    """Whether a captured frame is InfiniBand's own (an LRH with a BTH or GRH behind it) and not Ethernet.

    LRH: bits 0-3 virtual lane, 4-7 version 0, ..., 14-15 next header (2: BTH, 3: GRH with IPv6), then the destination
    LID, 5 zero bits and 11 bits of length in words, the source LID. The length has to be that of the frame.
    """
    if len(frame) < 8 + 12 + 6:
        return False
    following = frame[1] & 3
    words = int.from_bytes(frame[4:6], "big")
    if frame[0] & 15 or following < 2 or frame[1] & 12 or words >> 11 or len(frame) - 4 * words not in (0, 2):
        return False
    return following == 2 or frame[8] >> 4 == 6


def tls_record(data: bytes) -> bool:
    """Whether a TCP stream begins with a TLS handshake (record type 22, version 3.0 to 3.4, a hello)."""
    return (
        len(data) >= 6 and data[0] == 22 and data[1] == 3 and data[2] <= 4
        and 0 < int.from_bytes(data[3:5], "big") <= 1 << 14 and data[5] in (1, 2)
    )  # fmt: skip


def reduce_scatter(ranks: int, protocol: int, lengths: Sequence[int] | np.ndarray) -> bool:
    """Whether whole wire lengths of a ring connection's messages look like reduce-scatters and not like all-reduces.

    A loop of a reduce-scatter is ranks - 1 chunks of one length, and nothing comes back; in an all-reduce of several
    loops there are 2 (ranks - 1), and the last loop's chunk lengths differ by what is left. So: at least two loops,
    all but the last of equal full chunks, the last of equal shorter ones, and a number of messages that is no multiple
    of an all-reduce's. With two ranks both are alike, and nothing is said. An all-gather has the same lengths: values
    tell them apart, lengths do not, so this is a hint for people and no proof.
    """
    slices = 2 if protocol == SIMPLE else 1
    per = (ranks - 1) * slices
    array = np.asarray(lengths, np.int64)
    full = {LL: SLOT_BYTES[LL], LL128: SLOT_BYTES[LL128], SIMPLE: 2 * SLOT_BYTES[SIMPLE]}[protocol]
    if ranks < 3 or array.size < 2 * per or array.size % per or array.size // per % 2 == 0:
        return False
    return bool(_loops_alike(array, per, slices, full))


@njit(cache=True)
def _loops_alike(lengths: np.ndarray, per: int, slices: int, full: int) -> bool:
    """Every loop has chunks of one length; all but the last are full, the last is not."""
    loops = lengths.size // per
    for loop in range(loops):
        for at in range(per):
            one = lengths[loop * per + at]
            if one != lengths[loop * per + at % slices] or (one == full) != (loop < loops - 1):
                return False
    return True
