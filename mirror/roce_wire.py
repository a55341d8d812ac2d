"""RoCEv2 packets: opcodes, header sizes, and the invariant CRC.

Base transport header, 12 bytes, big endian: opcode, flags (solicited, migration, two bits of pad count, four of
version), partition key, destination queue pair (24 bits behind a byte with the congestion bits), acknowledge request,
packet sequence number (24 bits). Extended headers follow by opcode, then the payload, the pad, and four bytes of CRC.

Sources: IBTA specification volume 1 (9.2 to 9.4, table of opcodes), annex A17 (RoCEv2); docs/roce.md.
"""

from __future__ import annotations

import numpy as np

from mirror.internal import internal
from mirror.memory import load_be16, load_u8, load_u32

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


def _tables() -> np.ndarray:
    """uint32[8, 256]: CRC-32 (reflected 0xEDB88320) of a byte followed by 0..7 zero bytes."""
    table = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        table[0, byte] = value
    for row in range(1, 8):
        table[row] = table[row - 1] >> 8 ^ table[0, table[row - 1] & 0xFF]
    return table


_TABLES = _tables().astype(np.int64)
_ONES = 0xFFFFFFFF


@internal()
def _byte(crc: int, value: int) -> int:
    return (crc >> 8) ^ _TABLES[0, (crc ^ value) & 0xFF]


@internal()
def _bytes(crc: int, address: int, count: int) -> int:
    """CRC of `count` bytes, eight at a time (M. Kounavis, F. Berry: slicing by eight)."""
    end = address + count
    while end - address >= 8:
        low = crc ^ load_u32(address)
        high = load_u32(address + 4)
        crc = (_TABLES[7, low & 0xFF] ^ _TABLES[6, low >> 8 & 0xFF] ^ _TABLES[5, low >> 16 & 0xFF]
               ^ _TABLES[4, low >> 24] ^ _TABLES[3, high & 0xFF] ^ _TABLES[2, high >> 8 & 0xFF]
               ^ _TABLES[1, high >> 16 & 0xFF] ^ _TABLES[0, high >> 24])
        address += 8
    while address < end:
        crc = _byte(crc, load_u8(address))
        address += 1
    return crc


@internal()
def icrc(ip: int, udp: int, end: int) -> int:
    """1 if the four bytes at `end` are the invariant CRC of the packet, 0 if not, -1 if it cannot be told.

    `ip`, `udp`: addresses of the headers, `end` of the byte behind payload and pad; all must be present.
    What a router may change counts as ones: IPv4 service, time to live, checksum; IPv6 class, label, hop limit; the
    UDP checksum; byte 4 of the BTH. It is not known how options and extension headers count: those are not told.
    """
    crc = _ONES
    for _ in range(8):
        crc = _byte(crc, 0xFF)
    version = load_u8(ip) >> 4
    if version == 4 and udp - ip == 20:
        for i in range(20):
            crc = _byte(crc, 0xFF if i == 1 or i == 8 or i == 10 or i == 11 else load_u8(ip + i))
    elif version == 6 and udp - ip == 40 and load_be16(ip + 4):
        crc = _byte(crc, load_u8(ip) | 0x0F)
        for i in range(1, 40):
            crc = _byte(crc, 0xFF if i < 4 or i == 7 else load_u8(ip + i))
    else:
        return -1
    for i in range(20):
        crc = _byte(crc, 0xFF if i == 6 or i == 7 or i == 12 else load_u8(udp + i))
    crc = _bytes(crc, udp + 20, end - udp - 20)
    return 1 if (crc ^ _ONES) == load_u32(end) else 0
