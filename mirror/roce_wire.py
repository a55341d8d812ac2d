"""RoCEv2 packets: opcodes, header sizes, and the invariant CRC.

Base transport header, 12 bytes, big endian: opcode, flags (solicited, migration, two bits of pad count, four of
version), partition key, destination queue pair (24 bits behind a byte with the congestion bits), acknowledge request,
packet sequence number (24 bits). Extended headers follow by opcode, then the payload, the pad, and four bytes of CRC.

Sources: IBTA specification volume 1 (9.2 to 9.4, table of opcodes), annex A17 (RoCEv2); docs/roce.md.
"""

from __future__ import annotations

import numpy as np

from mirror.crc32 import ONES, crc_bytes, crc_word
from mirror.internal import internal
from mirror.memory import load_be16, load_u8, load_u32, load_u64

__all__ = [
    "ATOMIC", "CLASS", "FIRST", "HEADERS", "IMMEDIATE", "LAST", "PART", "READ", "RESPONSE", "SEND", "WRITE", "icrc",
]

# What an opcode of the reliable connection service (0..31) belongs to; -1 is none.
SEND, WRITE, READ, ATOMIC, RESPONSE, ACKNOWLEDGE = range(6)
FIRST, LAST = 1, 2                       # bits of PART; both: the only packet of its message
_OPCODES = (
    # class, part, immediate, bytes of headers from the BTH on
    (SEND, FIRST, 0, 12), (SEND, 0, 0, 12), (SEND, LAST, 0, 12), (SEND, LAST, 1, 16), (SEND, 3, 0, 12),
    (SEND, 3, 1, 16), (WRITE, FIRST, 0, 28), (WRITE, 0, 0, 12), (WRITE, LAST, 0, 12), (WRITE, LAST, 1, 16),
    (WRITE, 3, 0, 28), (WRITE, 3, 1, 32), (READ, 3, 0, 28), (RESPONSE, FIRST, 0, 16), (RESPONSE, 0, 0, 12),
    (RESPONSE, LAST, 0, 16), (RESPONSE, 3, 0, 16), (ACKNOWLEDGE, 3, 0, 16), (ACKNOWLEDGE, 3, 0, 24),
    (ATOMIC, 3, 0, 40), (ATOMIC, 3, 0, 40), (-1, 0, 0, 12), (SEND, LAST, 0, 16), (SEND, 3, 0, 16),
    *((-1, 0, 0, 12) for _ in range(8)),
)
CLASS, PART, IMMEDIATE, HEADERS = (np.array(column, np.int64) for column in zip(*_OPCODES, strict=True))


# What a router may change counts as ones: bits of the first words of a packet, from the IP header up to the BTH.
_FIRST4, _SECOND4, _FOURTH4, _FIFTH4 = 0xFF00, 0xFFFF00FF, 0xFFFF0000, 0xFF
_FIRST6, _SIXTH6, _SEVENTH6 = -(1 << 56) | 0xFFFFFF0F, -(1 << 48), 0xFF << 32


@internal()
def icrc(ip: int, udp: int, end: int) -> int:
    """1 if the four bytes at `end` are the invariant CRC of the packet, 0 if not, -1 if it cannot be told.

    `ip`, `udp`: addresses of the headers, `end` of the byte behind payload and pad; all must be present.
    What a router may change counts as ones: IPv4 service, time to live, checksum; IPv6 class, label, hop limit; the
    UDP checksum; byte 4 of the BTH. It is not known how options and extension headers count: those are not told.
    """
    version = load_u8(ip) >> 4
    crc = crc_word(ONES, -1)
    if version == 4 and udp - ip == 20:
        crc = crc_word(crc, load_u64(ip) | _FIRST4)
        crc = crc_word(crc, load_u64(ip + 8) | _SECOND4)
        crc = crc_word(crc, load_u64(ip + 16))
        crc = crc_word(crc, load_u64(ip + 24) | _FOURTH4)
        crc = crc_word(crc, load_u64(ip + 32) | _FIFTH4)
        position = ip + 40
    elif version == 6 and udp - ip == 40 and load_be16(ip + 4):
        crc = crc_word(crc, load_u64(ip) | _FIRST6)
        for offset in range(8, 40, 8):
            crc = crc_word(crc, load_u64(ip + offset))
        crc = crc_word(crc, load_u64(ip + 40) | _SIXTH6)
        crc = crc_word(crc, load_u64(ip + 48) | _SEVENTH6)
        position = ip + 56
    else:
        return -1
    return 1 if (crc_bytes(crc, position, end - position) ^ ONES) == load_u32(end) else 0
