"""The headers that a mirror session puts before the mirrored frame, read one at a time.

Each function looks at one header and says what lies behind it; `mirror.frames` loops over them. All that is decided by
looking at more than a type field (Cisco's tag and Mellanox' header have no length field that says how long they are)
is decided by what must follow: an IP header that proves itself.

Sources: RFC 2784, 2890 (GRE), RFC 7637 (0x6558), RFC 7348 (VXLAN), draft-foschiano-erspan-03; docs/encapsulation.md.
"""

from __future__ import annotations

from mirror.internal import internal
from mirror.memory import load_be16, load_be32, load_u8

__all__ = ["KINDS", "gre", "ip_type", "ttag", "vxlan"]

IPV4, IPV6, TTAG = 0x0800, 0x86DD, 0x8988
MAX_TAGS = 4

KINDS = ("", "erspan1", "erspan2", "erspan3", "gre-ethernet", "mellanox", "gre-ip", "vxlan")
"""Names of the kinds of tunnels, by number; 0 is none."""
ERSPAN1, ERSPAN2, ERSPAN3, GRE_ETHERNET, MELLANOX, GRE_IP, VXLAN = range(1, len(KINDS))
NO_TUNNEL, NOT_HERE, NOT_READ = 0, -1, -2

_MELLANOX_HEADER = 22


@internal()
def ip_type(address: int, end: int) -> int:
    """Ethertype of a bare IP packet, told by its version; -1 cut, 0 neither version."""
    if end - address < 1:
        return -1
    version = load_u8(address) >> 4
    return IPV4 if version == 4 else IPV6 if version == 6 else 0


@internal()
def _proves_ip(ethertype: int, address: int, end: int, wire_end: int) -> bool:
    """Whether an IP header of this ethertype, behind VLAN tags or not, really lies at `address`."""
    for _ in range(MAX_TAGS):
        if ethertype not in (0x8100, 0x88A8, 0x9100, 0x9200) or end - address < 4:
            break
        ethertype = load_be16(address + 2)
        address += 4
    if ethertype == IPV4:
        if end - address < 20:
            return False
        first = load_u8(address)
        header = (first & 15) * 4
        if first >> 4 != 4 or header < 20 or end - address < header:
            return False
        if load_be16(address + 10) == 0:
            return header <= load_be16(address + 2) <= wire_end - address
        total = 0
        for word in range(0, header, 2):
            total += load_be16(address + word)
        return (total & 0xFFFF) + (total >> 16) in (0xFFFF, 0x1FFFE)
    if ethertype == IPV6 and end - address >= 40:
        return load_u8(address) >> 4 == 6 and load_u8(address + 6) in (0, 6, 17, 43, 44, 47, 58, 60)
    return False


@internal()
def ttag(address: int, end: int, wire_end: int) -> tuple[int, int]:
    """Behind ethertype 0x8988, at `address`: (ethertype, address of what it tells); (0x8988, address) if unclear.

    Cisco's tag is a time of 6 bytes and the next ethertype; tags of 2 and 4 bytes before it, and 4 bytes directly
    before IP, are taken as well. What is right is told by the IP header that follows.
    """
    for size in (6, 2, 4):
        if end - address >= size + 2:
            ethertype = load_be16(address + size)
            if _proves_ip(ethertype, address + size + 2, end, wire_end):
                return ethertype, address + size + 2
    ethertype = ip_type(address + 4, end)
    if ethertype > 0 and _proves_ip(ethertype, address + 4, end, wire_end):
        return ethertype, address + 4
    return TTAG, address


@internal()
def _ethernet(kind: int, address: int, end: int, identifier: int) -> tuple[int, int, int, int]:
    if end - address < 14:
        return NOT_HERE, 0, address, identifier
    return kind, load_be16(address + 12), address + 14, identifier


@internal()
def gre(address: int, end: int, wire_end: int) -> tuple[int, int, int, int]:
    """The GRE header at `address`: (kind, ethertype of the payload, its address, identifier).

    Kind: see KINDS; NOT_HERE if a header does not lie before `end`, NOT_READ if the protocol (then in place of the
    ethertype) is none that we read. Identifier: session of ERSPAN II and III, else the key; -1 if there is none.
    """
    if end - address < 4:
        return NOT_HERE, 0, address, -1
    flags, protocol = load_be16(address), load_be16(address + 2)
    position = address + (8 if flags & 0x8000 else 4)
    key = -1
    if flags & 0x2000:
        if end - position < 4:
            return NOT_HERE, 0, position, -1
        key = load_be32(position)
        position += 4
    numbered = flags & 0x1000 != 0
    if numbered:
        position += 4
    # A source route (long abolished, of variable length) is not read. The version is not looked at: switches let the
    # first 16 bits be set at will, and the protocols that we read have only ever been carried by version 0.
    if flags & 0x4000:
        return NOT_READ, protocol, position, key

    if protocol == 0x88BE:
        # Types I and II share the protocol number; only the sequence number tells them apart.
        if not numbered:
            return _ethernet(ERSPAN1, position, end, key)
        if end - position < 8:
            return NOT_HERE, 0, position, -1
        return _ethernet(ERSPAN2, position + 8, end, load_be16(position + 2) & 0x3FF)
    if protocol == 0x22EB:
        if end - position < 12:
            return NOT_HERE, 0, position, -1
        session, tail = load_be16(position + 2) & 0x3FF, load_be16(position + 10)
        position += 20 if tail & 1 else 12  # the O bit: a platform subheader follows
        frame_type = tail >> 10 & 31
        if frame_type == 0:
            return _ethernet(ERSPAN3, position, end, session)
        if frame_type == 2:
            ethertype = ip_type(position, end)
            return NOT_HERE if ethertype < 0 else ERSPAN3, ethertype, position, session
        return NOT_READ, protocol, position, session
    if protocol == 0x6558:
        return _ethernet(GRE_ETHERNET, position, end, key)
    if protocol == 0x8949:
        # Mellanox switches put 22 bytes of their own first; the number can be set on other switches too, which do not.
        for start in (position, position + _MELLANOX_HEADER):
            if end - start >= 14 and _proves_ip(load_be16(start + 12), start + 14, end, wire_end):
                return _ethernet(MELLANOX, start, end, key)
        return _ethernet(MELLANOX, position + _MELLANOX_HEADER, end, key)
    if protocol in (IPV4, IPV6):
        return GRE_IP, protocol, position, key
    return NOT_READ, protocol, position, key


@internal()
def vxlan(address: int, end: int) -> tuple[int, int, int, int]:
    """The UDP and VXLAN headers at `address`, as `gre`; the identifier is the network's (VNI)."""
    if end - address < 16:
        return NOT_HERE, 0, address, -1
    flags = load_u8(address + 8)
    # Without the I flag the VNI means nothing; with the P flag (VXLAN-GPE) the payload may be anything.
    if flags & 0x0C != 0x08:
        return NOT_READ, flags, address, -1
    return _ethernet(VXLAN, address + 16, end, load_be32(address + 12) >> 8)
