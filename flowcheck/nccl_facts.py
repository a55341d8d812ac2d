"""What the trainers know of their NCCL communicator, as facts for the checkpoint node.

Every rank contributes what it can see alone (`contribution`): its node, the addresses of the node's RDMA interfaces,
NCCL's version and settings, and what its NCCL log says. Rank 0 puts them together (`record`), and refuses by name what
could not be read from the wire, with what to change. Rings and trees that no log tells are left out: the daemon may
have seen the set-up traffic that tells them.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flowcheck.nccl_log import Communicator, Log, parse, ring_of
from flowcheck.nccl_record import MAX_ADDRESSES, NcclRecord
from flowcheck.supported import Refused
from reconstruct.nccl.refusals import NAMES, REFUSALS, from_choice, from_settings
from reconstruct.nccl.versions import UnknownVersion, traits
from reconstruct.nccl.versions import parse as parse_version

__all__ = ["contribution", "rdma_addresses", "record"]

TREE, RING, NVLSTREE = 0, 1, 5  # NCCL's own numbers, as in reconstruct.nccl.schedule
ALGORITHMS = {"tree": TREE, "ring": RING, "nvlstree": NVLSTREE}
PROTOCOLS = {"ll": 0, "ll128": 1, "simple": 2}
SETTINGS = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_IB_DISABLE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS",
    "NCCL_IB_MERGE_NICS", "NCCL_NET_MERGE_LEVEL", *NAMES,
)  # fmt: skip
"""Variables that decide what is on the wire; all ranks must agree on them."""
MOST_LOG_BYTES = 64 << 20
SYSFS = Path("/sys/class/infiniband")


def contribution(rank: int, world_size: int) -> dict[str, Any]:
    """This rank's part, JSON-ready.

    Raises Refused for an InfiniBand link layer and a log that shows another network than NCCL's own over RDMA.
    """
    log = _own_log()
    for seen, refusal in log.refused():
        raise Refused(f"{seen}: {refusal}")
    settings = {name: value for name, value in log.settings.items() if name in SETTINGS}
    settings |= {name: os.environ[name].strip() for name in SETTINGS if name in os.environ}
    return {
        "node": _node(),
        "addresses": interface_addresses() if _over_sockets(settings, log.networks) else rdma_addresses(),
        "version": log.version or _torch_version(),
        "settings": settings,
        "networks": sorted(log.networks),
        "communicators": [one.to_json() for one in log.of_group(rank, world_size)],
    }


def _own_log() -> Log:
    """What this process's NCCL has written to its log so far; empty without one."""
    template = os.environ.get("NCCL_DEBUG_FILE")
    if not template:
        return Log()
    host = socket.gethostname().partition(".")[0]
    path = Path(template.replace("%%", "\0").replace("%h", host).replace("%p", str(os.getpid())).replace("\0", "%"))
    try:
        with path.open("rb") as file:
            return parse(file.read(MOST_LOG_BYTES).decode("utf-8", "replace").splitlines())
    except OSError:
        return Log()


def _torch_version() -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
    except (AttributeError, RuntimeError, TypeError):  # a build of torch without NCCL
        return None


def _node() -> str:
    """What ranks of one node have in common, and no ranks of two nodes."""
    told = os.environ.get("NCCL_HOSTID")
    if told:
        return told
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def rdma_addresses(sysfs: Path = SYSFS) -> list[str]:
    """Addresses (GIDs) of this node's RDMA ports, or where it has none, those of its interfaces but loopback.

    Raises Refused for ports with an InfiniBand link layer.
    """
    found: list[str] = []
    ports = sorted(sysfs.glob("*/ports/*"))
    layers = {port: _text(port / "link_layer") for port in ports}
    if ports and all(layer == "InfiniBand" for layer in layers.values()):
        raise Refused(f"all RDMA ports of this node have {REFUSALS['infiniband']}")
    for port in ports:
        if layers[port] == "InfiniBand":
            continue
        for gid in sorted(port.glob("gids/*")):
            with contextlib.suppress(ValueError):
                address = ipaddress.IPv6Address(_text(gid))
                if int(address) and str(address) not in found:
                    found.append(str(address.ipv4_mapped or address))
    return list(dict.fromkeys(found))[:MAX_ADDRESSES] if found else interface_addresses()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def interface_addresses() -> list[str]:
    """IPv4 and IPv6 addresses of all interfaces that are up, loopback left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # down, or without an IPv4 address
                (flags,) = struct.unpack("=H", fcntl.ioctl(probe, 0x8913, request)[16:18])  # SIOCGIFFLAGS
                if flags & 1 and not flags & 8:  # IFF_UP, IFF_LOOPBACK
                    found.append(socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24]))  # SIOCGIFADDR
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        address, _, _, _, _, name = line.split()
        if name != "lo":
            found.append(str(ipaddress.IPv6Address(int(address, 16))))
    return found[:MAX_ADDRESSES]


def record(contributions: Sequence[Mapping[str, Any]]) -> NcclRecord:
    """The communicator's facts from every rank's contribution, by rank. Raises Refused with what to change."""
    version, settings = _agreed(contributions)
    nodes = _nodes(contributions)
    if max(nodes) == 0:
        raise Refused("all ranks are on one node: NCCL sends no gradients over the network")
    addresses = _addresses(contributions, nodes)
    protocols = _chosen(settings, "NCCL_PROTO", PROTOCOLS)
    members = _members(contributions)
    channels, rings = _rings(members)
    heads, nvls_channels = _heads(members, nodes)
    # Without a log nobody can say yet that there is no NVLSTree.
    nvls = bool(heads) or (not members and settings.get("NCCL_NVLS_ENABLE", "") != "0")
    algorithms = _chosen(settings, "NCCL_ALGO", {k: v for k, v in ALGORITHMS.items() if nvls or v != NVLSTREE})
    pattern, search, chains = _trees(members, nodes, algorithms)
    sockets = _over_sockets(settings, [name for one in contributions for name in one["networks"]])
    return NcclRecord(
        version=version,
        addresses=addresses,
        nodes=nodes,
        channels=channels,
        rings=rings,
        algorithms=algorithms,
        protocols=protocols,
        tree_pattern=pattern,
        search_channels=search,
        chains=chains,
        heads=heads if NVLSTREE in algorithms else (),
        nvls_channels=nvls_channels if NVLSTREE in algorithms else 0,
        qps=1 if sockets else _number(settings, "NCCL_IB_QPS_PER_CONNECTION", 1, range(1, 129)),
        sockets=sockets,
        split=_flag(settings, "NCCL_IB_SPLIT_DATA_ON_QPS"),
    )


def _agreed(contributions: Sequence[Mapping[str, Any]]) -> tuple[str | None, dict[str, str]]:
    """(version, settings), the same on all ranks and readable."""
    told = [one["version"] for one in contributions if one["version"] is not None]
    version = str(told[0]) if told else None
    settings = dict(contributions[0]["settings"])
    for rank, one in enumerate(contributions):
        if one["version"] is not None and parse_version(one["version"]) != parse_version(str(version)):
            raise Refused(f"rank {rank} has NCCL {one['version']}, another one {version}: use one release")
        for name in SETTINGS:
            mine, first = one["settings"].get(name), settings.get(name)
            if mine != first:
                raise Refused(f"{name} is {mine} on rank {rank} and {first} on rank 0: set it alike everywhere")
    if version is not None:
        try:
            traits(version)
        except UnknownVersion as error:
            raise Refused(str(error)) from None
    networks = frozenset(name for one in contributions for name in one["networks"])
    if networks == {"IB", "Socket"}:
        raise Refused(str(REFUSALS["networks"]))
    for given, refusal in from_settings(settings, networks):
        raise Refused(f"{given}: {refusal}")
    return version, settings


def _over_sockets(settings: Mapping[str, str], networks: Collection[str]) -> bool:
    """Whether NCCL's connections are TCP's (NET/Socket): by its log if there is one, else by the settings."""
    if networks:
        return set(networks) == {"Socket"}
    return settings.get("NCCL_NET", "").lower() == "socket" or settings.get("NCCL_IB_DISABLE", "0") not in ("", "0")


def _number(settings: Mapping[str, str], name: str, usual: int, allowed: Sequence[int] | None) -> int:
    text = settings.get(name, "")
    if not text:
        return usual
    try:
        value = int(text)
    except ValueError:
        raise Refused(f"{name}={text}: no number") from None
    if allowed is not None and value not in allowed:
        raise Refused(f"{name}={text} is not followed: unset it")
    return value


def _flag(settings: Mapping[str, str], name: str) -> bool | None:
    return None if not settings.get(name) else bool(_number(settings, name, 0, None))


def _nodes(contributions: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Node of each rank; nodes count in the order of their lowest rank."""
    order: dict[str, int] = {}
    return tuple(order.setdefault(str(one["node"]), len(order)) for one in contributions)


def _addresses(contributions: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Every rank's node's addresses, without those that several nodes have (bridges of containers, for one)."""
    of_node: dict[int, dict[str, None]] = {}
    for node, one in zip(nodes, contributions, strict=True):
        of_node.setdefault(node, {}).update(dict.fromkeys(one["addresses"]))
    counts: dict[str, int] = {}
    for known in of_node.values():
        for address in known:
            counts[address] = counts.get(address, 0) + 1
    for node, known in of_node.items():
        of_node[node] = {address: None for address in known if counts[address] == 1}
        if not of_node[node]:
            ranks = ", ".join(str(rank) for rank, at in enumerate(nodes) if at == node)
            raise Refused(f"ranks {ranks} have no network address of their own: give their RDMA interfaces addresses")
    return tuple(tuple(of_node[node]) for node in nodes)


def _members(contributions: Sequence[Mapping[str, Any]]) -> list[Communicator]:
    """The group's communicator in every rank's log; [] where the ranks have no log that tells it."""
    found: list[Communicator] = []
    for rank, one in enumerate(contributions):
        known = [Communicator.from_json(data) for data in one["communicators"]]
        if not known:
            if found:
                raise Refused(f"NCCL's log tells the rings of rank {rank - 1} and not those of rank {rank}: "
                              f"{REFUSALS['rings']}")
            continue
        if len(found) < rank:
            raise Refused(f"NCCL's log tells the rings of rank {rank} and not those of rank 0: {REFUSALS['rings']}")
        if any(_shape(other) != _shape(known[0]) for other in known):
            raise Refused(
                f"rank {rank} has several communicators of this size with different rings: the log does not tell which "
                "is DDP's; give the groups different sizes, or pin NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS"
            )
        found.append(known[0])
    return found


def _rings(members: Sequence[Communicator]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """(number of channels, the ring of each); (0, ()) where there is no log."""
    channels = max((one.channels or len(one.neighbours) for one in members), default=0)
    try:
        rings = [ring_of(channel, list(members)) for channel in range(channels)]
    except ValueError as error:
        raise Refused(f"NCCL's log contradicts itself: {error}") from None
    if members and (not channels or None in rings):
        raise Refused(f"NCCL's log does not tell the order of all rings: {REFUSALS['rings']}")
    return channels, tuple(ring for ring in rings if ring is not None)


def _shape(one: Communicator) -> tuple[Any, ...]:
    return one.channels, one.neighbours, one.trees, one.heads, one.nvls_channels


def _heads(members: Sequence[Communicator], nodes: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """(by node, the rank of each head; NVLS channels); ((), 0) where there is no NVLS."""
    told = next((one for one in members if one.heads), None)
    if told is None:
        return (), 0
    count = max(nodes) + 1
    lists = [told.heads.get(head, ()) for head in range(len(told.heads))]
    if not told.nvls_channels or any(len(ranks) < count for ranks in lists):
        raise Refused(f"NCCL's log does not tell the NVLS heads of all nodes: {REFUSALS['nvls-channels']}")
    return tuple(tuple(ranks[node] for ranks in lists) for node in range(count)), told.nvls_channels


def _chosen(settings: Mapping[str, str], name: str, readable: Mapping[str, int]) -> tuple[int, ...]:
    """What a list such as `Ring,Tree`, `^LL128` or `allreduce:tree;broadcast:ring` leaves to an all-reduce.

    The last part that speaks of all-reduces counts, or of everything.
    """
    listed = ""
    for part in settings.get(name, "").lower().split(";"):
        function, colon, given = part.strip().rpartition(":")
        if given and (not colon or function.strip() == "allreduce"):
            listed = given.strip()
    if not listed:
        return tuple(sorted(readable.values()))
    names = [one.strip() for one in listed.lstrip("^").split(",") if one.strip()]
    if listed.startswith("^"):
        chosen = [number for one, number in readable.items() if one not in names]
    else:
        for one in names:
            refusal = from_choice(one)
            if refusal is not None:
                raise Refused(f"{name}={settings[name]}: {refusal}")
        chosen = [readable[one] for one in names if one in readable]
    if not chosen:
        raise Refused(f"{name}={settings[name]} leaves nothing that can be read: use {', '.join(readable)}")
    return tuple(sorted(chosen))


def _trees(
    members: Sequence[Communicator], nodes: Sequence[int], algorithms: Sequence[int]
) -> tuple[int, int, tuple[tuple[tuple[int, ...], ...], ...]]:
    """(pattern, search channels, chains) where trees may be used."""
    if TREE not in algorithms or not members:
        return 0, 0, ()
    from flowcheck.nccl_trees import tree_facts  # numba comes with it

    try:
        facts = tree_facts(members, nodes)
    except ValueError as error:
        raise Refused(f"the trees of NCCL's log are not understood: {error}; use NCCL_ALGO=Ring") from None
    if facts is None:
        raise Refused(f"NCCL's log does not tell the trees of all ranks: {REFUSALS['trees']}")
    return facts
