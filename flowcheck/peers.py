"""Who is who on the network: gloo's own address records and this process's connections to its peers.

ProcessGroupGloo writes one record per rank and context to its group's store under `cpu//<context>/<rank>`
(docs/gloo.md): u64 length and host name, u64 136, sockaddr_storage, i64 sequence, then pair identifiers. The
listeners in them name both ends of every connection, also where the mirror never saw the rendezvous.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

from flowcheck.description import MAX_CONTEXTS
from flowcheck.errors import FlowcheckError

Address = tuple[str, int]
Socket = tuple[str, int, str, int]

ESTABLISHED = "01"  # include/net/tcp_states.h, as /proc/net/tcp prints it
MAX_SOCKETS_PER_RANK = 1 << 14


def parse_record(data: bytes) -> Address:
    """(ip, port) of the listener in one store record. FlowcheckError if it is not gloo's tcp transport's."""
    try:
        (host_length,) = struct.unpack_from("<Q", data)
        (size,) = struct.unpack_from("<Q", data, 8 + host_length)
        address = data[16 + host_length :][:size]
        (family,) = struct.unpack_from("=H", address)
        (port,) = struct.unpack_from(">H", address, 2)
        if size == 136 and family == socket.AF_INET:
            return socket.inet_ntop(family, address[4:8]), port
        if size == 136 and family == socket.AF_INET6:
            return _plain(socket.inet_ntop(family, address[8:24])), port
    except (struct.error, ValueError, OSError):
        pass
    raise FlowcheckError(f"the group's store holds an address record that is not gloo's: {data[:64].hex()}")


def listeners(store: Any, device: str, world_size: int) -> list[dict[int, Address]]:
    """Per gloo context: rank -> listener, from the group's own store; empty for another transport."""
    prefix = next((f"{name}//" for name in (device, "cpu") if store.check([f"{name}//0/0"])), None)
    contexts: list[dict[int, Address]] = []
    while prefix is not None and len(contexts) < MAX_CONTEXTS and store.check([f"{prefix}{len(contexts)}/0"]):
        records: dict[int, Address] = {}
        for rank in range(world_size):
            key = f"{prefix}{len(contexts)}/{rank}"
            if store.check([key]):
                records[rank] = parse_record(store.get(key))
        contexts.append(records)
    return contexts


def own_sockets() -> list[Socket]:
    """(local ip, local port, remote ip, remote port) of every established TCP connection of this process."""
    inodes = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:  # closed since the listing
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found: list[Socket] = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == ESTABLISHED and fields[9] in inodes:
                found.append((*_address(fields[1]), *_address(fields[2])))
    return found[:MAX_SOCKETS_PER_RANK]


def among(sockets: list[Socket], contexts: list[dict[int, Address]]) -> list[Socket]:
    """The sockets that have one end at a listener of the group."""
    known = {address for context in contexts for address in context.values()}
    return [s for s in sockets if (s[0], s[1]) in known or (s[2], s[3]) in known]


def _address(text: str) -> Address:
    """`0100007F:1F90` as /proc/net/tcp prints it: the address in native 32-bit words, hexadecimal."""
    words, port = text.split(":")
    raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return _plain(socket.inet_ntop(family, raw)), int(port, 16)


def _plain(ip: str) -> str:
    """An IPv4 address that came in IPv6 form, as IPv4."""
    mapped = getattr(ipaddress.ip_address(ip), "ipv4_mapped", None)
    return ip if mapped is None else str(mapped)
