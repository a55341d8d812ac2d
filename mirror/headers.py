"""Link-layer headers, and the extension headers of IPv6.

Sources: www.tcpdump.org/linktypes.html; RFC 8200, 2675.
"""

from __future__ import annotations

from mirror.decap import IPV4, IPV6, ip_type
from mirror.internal import internal
from mirror.memory import load_be16, load_be32, load_u8

__all__ = ["ETHERNET", "LINKTYPES", "ipv6_transport", "link", "plain_udp"]

ETHERNET, _NULL, _RAW, _SLL, _SLL2 = LINKTYPES = 1, 0, 101, 113, 276
_MAX_EXTENSIONS = 8


@internal()
def link(address: int, end: int, linktype: int) -> tuple[int, int]:
    """(ethertype, address after the link header); ethertype -1: cut, 0: not Ethernet-like IP."""
    if linktype == ETHERNET:
        if end - address < 14:
            return -1, address
        return load_be16(address + 12), address + 14
    if linktype == _SLL:
        if end - address < 16:
            return -1, address
        return load_be16(address + 14), address + 16
    if linktype == _SLL2:
        if end - address < 20:
            return -1, address
        return load_be16(address), address + 20
    if linktype == _NULL:
        # An address family in the byte order of the capturing machine; AF_INET6 differs by system.
        if end - address < 4:
            return -1, address
        address += 4
    return ip_type(address, end), address


@internal()
def ipv6_transport(address: int, end: int, limit: int) -> tuple[int, int, int]:
    """Walk the extension headers: (next header, its address, end of the packet on the wire).

    `limit` is that end as the fixed header tells it. Next header: -1 cut, -2 fragment (the address is that of its
    fragment header), -3 malformed.
    """
    header = load_u8(address + 6)
    position = address + 40
    jumbo = load_be16(address + 4) == 0
    for _ in range(_MAX_EXTENSIONS):
        if header in (0, 43, 60, 135, 139, 140):
            if end - position < 2:
                return -1, position, limit
            size = (load_u8(position + 1) + 1) * 8
            if header == 0 and jumbo:
                # A jumbogram option (type 194, length 4) of a hop-by-hop header: 32 bits of payload length.
                option = position + 2
                last = min(position + size, end)
                while option < last:
                    kind = load_u8(option)
                    if kind == 0:
                        option += 1
                        continue
                    if option + 2 > last:
                        break
                    if kind == 194 and load_u8(option + 1) == 4 and option + 6 <= last:
                        limit = address + 40 + load_be32(option + 2)
                        break
                    option += 2 + load_u8(option + 1)
        elif header == 51:
            if end - position < 2:
                return -1, position, limit
            size = (load_u8(position + 1) + 2) * 4
        elif header == 44:
            if end - position < 8:
                return -1, position, limit
            if load_be16(position + 2) & 0xFFF9:
                return -2, position, limit
            size = 8
        else:
            return header, position, limit
        header = load_u8(position)
        position += size
        if position > limit:
            return -3, position, limit
    return -3, position, limit


@internal()
def plain_udp(address: int, end: int, port: int) -> tuple[int, int]:
    """Of an Ethernet frame that is IP and UDP to `port` and nothing else: (bytes of the IP header, end of the packet).

    (0, 0) for every other one: with a tag, options, an extension header, a length of 0, a fragment, or cut off.
    """
    if end - address < 62:
        return 0, 0
    ip = address + 14
    ethertype = load_be16(address + 12)
    if ethertype == IPV4:
        limit = ip + load_be16(ip + 2)
        if (load_u8(ip) == 0x45 and load_u8(ip + 9) == 17 and load_be16(ip + 6) & 0x3FFF == 0
                and load_be16(ip + 22) == port and ip + 28 <= limit <= end):
            return 20, limit
    elif ethertype == IPV6:
        limit = ip + 40 + load_be16(ip + 4)
        if load_u8(ip) >> 4 == 6 and load_u8(ip + 6) == 17 and load_be16(ip + 42) == port and ip + 48 <= limit <= end:
            return 40, limit
    return 0, 0
