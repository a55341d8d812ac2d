"""The lab's networks: addresses, and the links, bridges and port mirroring that the kernel is asked for.

Every node has `train0` (and `train1`, .. for more rails) on the switch and `mgmt0` on a second bridge that is never
mirrored. The checkpoint node has `mgmt0` and `mon0`, where the copies of the mirrored switch ports arrive.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcheck.errors import FlowcheckError
from flowcheck.lab import addresses
from flowcheck.lab.addresses import Port, training_interface, training_mac
from flowcheck.lab.config import ROCE, SOCKET, TCP, LabConfig
from flowcheck.lab.namespaces import enter_network

if TYPE_CHECKING:
    from pyroute2 import IPRoute

TRAINING, MANAGEMENT, MONITOR = training_interface(0), "mgmt0", "mon0"
MASTER_PORT = 29500
DAEMON_PORT = 7700
# The checkpoint node's place in the management network, behind all nodes that a lab may have.
_CHECKPOINT_NODE = 253
_SWITCH, _MANAGEMENT_SWITCH, _MIRROR = "switch", "mgmt-switch", "mirror"
# Copies may carry VLAN tags on top of a full frame.
_MIRROR_HEADROOM = 64

_ETH_P_ALL = 3
# Parents of clsact's two hooks (linux/pkt_sched.h: TC_H_CLSACT with TC_H_MIN_INGRESS, TC_H_MIN_EGRESS).
# What a node sends comes into the switch port; what it receives goes out of it.
_HOOKS = {"in": 0xFFFFFFF2, "out": 0xFFFFFFF3}
_ADDR_GEN_NONE = 1
_IFA_F_NODAD = 0x02
_NUD_NOARP, _NTF_MASTER = 0x40, 0x04

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCETHTOOL = 0x8913, 0x8914, 0x8946
_IFF_UP = 1
_ETHTOOL_STXCSUM, _ETHTOOL_STSO, _ETHTOOL_SGSO = 0x17, 0x1F, 0x24


def training_address(config: LabConfig, node: int) -> str:
    """Of the node's first interface."""
    return addresses.training_address(Port(node, 0), config.ipv6)


def management_address(node: int) -> str:
    return f"10.78.0.{node + 1}"


def master_address(config: LabConfig) -> str:
    """The address of rank 0's node on the network that was chosen for the rendezvous."""
    return training_address(config, 0) if config.rendezvous == "training" else management_address(0)


def daemon_endpoint() -> str:
    """Where trainers reach the daemon: on the management network."""
    return f"tcp://{management_address(_CHECKPOINT_NODE)}:{DAEMON_PORT}"


def hosts(config: LabConfig) -> str:
    """Lines for /etc/hosts.

    Without names the c10d store asks a DNS server that the lab cannot reach, and warns. It looks for IPv4
    addresses in their IPv6 form, so each has a second line with a name of its own.
    """
    names = {management_address(_CHECKPOINT_NODE): "checkpoint"}
    for port in config.ports:
        name = f"node{port.node}" + (f"-rail{port.rail}" if port.rail else "")
        names[addresses.training_address(port, config.ipv6)] = name
        names[management_address(port.node)] = f"node{port.node}-mgmt"
    mapped = {f"::ffff:{address}": f"{name}.lab" for address, name in names.items() if ":" not in address}
    return "".join(f"{address} {name}\n" for address, name in {**names, **mapped}.items())


def build(config: LabConfig, switch: int, checkpoint: int, nodes: Sequence[int]) -> None:
    """Make all links. Arguments are descriptors of network namespaces; the caller ends in one of them.

    Raises FlowcheckError that names the step the kernel refused.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    step = "the bridges"
    try:
        enter_network(switch)
        _quiet_ipv6(disable=True)
        with IPRoute() as route:
            _bridge(route, _SWITCH, config.interface_mtu)
            _bridge(route, _MANAGEMENT_SWITCH, 1500)
            step = "the links"
            for node, namespace in enumerate(nodes):
                _in_namespace(namespace, switch, lambda: _quiet_ipv6(disable=not config.ipv6))
                for port in (port for port in config.ports if port.node == node):
                    far = training_interface(port.rail)
                    _cable(route, _port_name(port), far, namespace, config.interface_mtu, _SWITCH)
                    if config.transport == ROCE:
                        _know(route, port)
                _cable(route, management_port(node), MANAGEMENT, namespace, 1500, _MANAGEMENT_SWITCH)
            _in_namespace(checkpoint, switch, lambda: _quiet_ipv6(disable=True))
            _cable(route, "mgmt-check", MANAGEMENT, checkpoint, 1500, _MANAGEMENT_SWITCH)
            _cable(route, _MIRROR, MONITOR, checkpoint, min(config.interface_mtu + _MIRROR_HEADROOM, 65535), None)
            if not config.monitor_offload:
                step = "the monitor port's offloads"
                offloads_off(_MIRROR)
            step = "the port mirroring (kernel modules sch_ingress, cls_u32, act_mirred)"
            _mirror(route, config)
        step = "the addresses"
        for node, namespace in enumerate(nodes):
            enter_network(namespace)
            with IPRoute() as route:
                _up(route, "lo")
                for port in (port for port in config.ports if port.node == node):
                    _address(route, training_interface(port.rail), addresses.training_address(port, config.ipv6))
                _address(route, MANAGEMENT, management_address(node))
        enter_network(checkpoint)
        with IPRoute() as route:
            _up(route, "lo")
            _up(route, MONITOR)
            _address(route, MANAGEMENT, management_address(_CHECKPOINT_NODE))
    except (NetlinkError, OSError) as error:
        message = error.args[-1] if error.args else error
        raise FlowcheckError(
            f"the kernel refused {step}: {message}; load its modules or use another"
        ) from error


def _port_name(port: Port) -> str:
    """The name of a switch port in the training bridge."""
    return f"port{port.node}" + (f"-{port.rail}" if port.rail else "")


def management_port(node: int) -> str:
    """The name of a node's port in the management bridge."""
    return f"mgmt-port{node}"


def _in_namespace(namespace: int, back: int, action: Any) -> None:
    enter_network(namespace)
    try:
        action()
    finally:
        enter_network(back)


def _quiet_ipv6(disable: bool) -> None:
    """Keep new interfaces quiet: no IPv6, or no link-local address, router search and address check."""
    settings = {"addr_gen_mode": _ADDR_GEN_NONE, "router_solicitations": 0, "accept_dad": 0}
    if disable:
        settings = {"disable_ipv6": 1}
    for name, value in settings.items():
        # Absent without IPv6 in the kernel, read-only in some containers: a few more frames, no harm.
        with suppress(OSError):
            Path("/proc/sys/net/ipv6/conf/default", name).write_text(str(value))


def _index(route: IPRoute, name: str) -> int:
    return int(route.link_lookup(ifname=name)[0])


def _up(route: IPRoute, name: str) -> None:
    route.link("set", index=_index(route, name), state="up")


def _bridge(route: IPRoute, name: str, mtu: int) -> None:
    route.link("add", ifname=name, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
    route.link("set", index=_index(route, name), mtu=mtu, state="up")


def _cable(route: IPRoute, near: str, far: str, namespace: int, mtu: int, bridge: str | None) -> None:
    """A veth pair from this namespace (`near`, a port of `bridge`) to `far` in the other namespace."""
    peer = {"ifname": far, "mtu": mtu, "net_ns_fd": namespace}
    route.link("add", ifname=near, kind="veth", mtu=mtu, peer=peer)
    settings: dict[str, Any] = {"state": "up"}
    if bridge is not None:
        settings["master"] = _index(route, bridge)
    route.link("set", index=_index(route, near), **settings)


def _know(route: IPRoute, port: Port) -> None:
    """Tell the switch where made frames go: it must not send them everywhere until it has learned it.

    Their address is not that of the interface, so the node's own stack does not answer them.
    """
    mac = ":".join(f"{byte:02x}" for byte in training_mac(port))
    index = _index(route, _port_name(port))
    route.fdb("add", ifindex=index, lladdr=mac, state=_NUD_NOARP, flags=_NTF_MASTER)


def _address(route: IPRoute, name: str, address: str) -> None:
    index = _index(route, name)
    if ":" in address:
        route.addr("add", index=index, address=address, prefixlen=64, flags=_IFA_F_NODAD)
    else:
        route.addr("add", index=index, address=address, prefixlen=24)
    route.link("set", index=index, state="up")


def _mirror(route: IPRoute, config: LabConfig) -> None:
    monitor = _index(route, _MIRROR)
    ports = config.mirrored_ports()
    for port in sorted({port for port, _ in ports}):
        route.tc("add", "clsact", _index(route, _port_name(port)))
    copy = {"kind": "mirred", "direction": "egress", "action": "mirror", "ifindex": monitor}
    for port, direction in ports:
        route.tc(
            "add-filter",
            "u32",
            _index(route, _port_name(port)),
            parent=_HOOKS[direction],
            protocol=_ETH_P_ALL,
            prio=1,
            target=0,  # pyroute2 asks for a class although an action needs none
            keys=["0x0/0x0+0"],
            action=[copy],
        )


def set_link(name: str, up: bool) -> None:
    """Bring an interface of the calling thread's network namespace up or down. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", name.encode(), 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", name.encode(), flags))


def offloads_off(name: str) -> None:
    """Make an interface send frames of at most its MTU, with right checksums. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_ETHTOOL_STSO, _ETHTOOL_SGSO, _ETHTOOL_STXCSUM):
            value = array("I", [command, 0])
            request = struct.pack("16sP16x", name.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def trainer_environment(config: LabConfig, rank: int) -> dict[str, str]:
    """What a trainer finds in its environment, as under torchrun, plus where flowcheck's daemon is."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(config.ranks),
        "LOCAL_RANK": str(rank % config.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(config.local_world_size(rank)),
        "MASTER_ADDR": master_address(config),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": TRAINING,
        "FLOWCHECK_ENDPOINT": daemon_endpoint(),
        "OMP_NUM_THREADS": "1",
        # A killed rank must not take its last lines with it.
        "PYTHONUNBUFFERED": "1",
        **(nccl_environment(config, rank) if config.transport != TCP else {}),
        **config.env,
    }


def nccl_environment(config: LabConfig, rank: int) -> dict[str, str]:
    """What a job with NCCL pinned like this lab has in its environment, and what the lab's backend needs to know."""
    settings = {
        **config.nccl(),
        "interface": MANAGEMENT,
        "address": management_address(config.node_of(rank)),
    }
    found = {
        "FLOWCHECK_LAB_NCCL": json.dumps(settings),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET,ENV",
        "NCCL_SOCKET_IFNAME": MANAGEMENT,
        "NCCL_IB_HCA": ",".join(f"mlx5_{rail}" for rail in range(config.rails)),
        **({"NCCL_NET": "Socket"} if config.transport == SOCKET else {}),
        "NCCL_MIN_NCHANNELS": str(config.channels),
        "NCCL_MAX_NCHANNELS": str(config.channels),
    }
    if config.algorithm is not None:
        name = {"ring": "Ring", "tree": "Tree", "nvlstree": "NVLSTree"}[config.algorithm]
        # A bare name forbids broadcasts since 2.24 unless it is the ring's.
        per_function = config.job().release >= (2, 24) and name != "Ring"
        found["NCCL_ALGO"] = f"allreduce:{name.lower()}" if per_function else name
    if config.algorithm == "nvlstree":
        found["NCCL_NVLS_NCHANNELS"] = str(config.channels)
    if config.protocol is not None:
        found["NCCL_PROTO"] = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}[config.protocol]
    return found


def build_in_child(config: LabConfig, switch: int, checkpoint: int, nodes: Sequence[int]) -> None:
    """`build` in a child process, so that the caller stays single-threaded and in its own namespace.

    Raises FlowcheckError with the child's message.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        message = b""
        try:
            build(config, switch, checkpoint, nodes)
        except BaseException as error:
            message = str(error).encode() or repr(error).encode()
        finally:
            os.write(write, message[:4000])
            os._exit(1 if message else 0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        message = stream.read()
    _, status = os.waitpid(child, 0)
    if message or status:
        raise FlowcheckError(message.decode(errors="replace") or "the process that builds them was killed")
