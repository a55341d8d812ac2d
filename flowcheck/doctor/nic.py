"""Settings of the capture interface that decide what a mirror delivers, and what is wrong with them.

Read only, with netlink and ethtool's ioctls (linux/ethtool.h); nothing is changed. What cannot be read is said.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flowcheck.doctor.finding import OK, PROBLEM, WARNING, Finding

__all__ = ["Pause", "Settings", "judge", "parse_features", "parse_pause", "parse_speed", "read"]

_SIOCETHTOOL = 0x8946
_GSET, _GPAUSEPARAM, _GFLAGS, _GGRO = 0x01, 0x12, 0x25, 0x2B
_FLAG_RXVLAN, _FLAG_LRO = 1 << 8, 1 << 15
_UNKNOWN_SPEEDS = (0, 0xFFFF, 0xFFFFFFFF)
_IFF_UP, _IFF_LOWER_UP = 0x1, 0x10000
_NEEDED_MTU = 4300
"""A RoCE packet of 4096 bytes with its headers, in a mirror's outer headers."""
_NAMES = {"pause": "ethtool -a", "gro": "ethtool -k", "flags": "ethtool -k", "link": "ip -d link show"}


@dataclass(frozen=True, slots=True)
class Pause:
    """Link-level flow control (IEEE 802.3 annex 31B)."""

    autoneg: bool
    rx: bool
    """Whether pause frames that arrive are obeyed."""
    tx: bool
    """Whether the adapter sends pause frames when it cannot keep up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an interface says of itself; None: not known, see `unread`."""

    interface: str
    up: bool | None = None
    carrier: bool | None = None
    promiscuous: bool | None = None
    mtu: int | None = None
    speed: int | None = None
    """Mbit/s."""
    pause: Pause | None = None
    gro: bool | None = None
    lro: bool | None = None
    vlan_stripping: bool | None = None
    rdma: bool = False
    """Whether the adapter does RDMA itself, and so may keep RoCE packets."""
    unread: dict[str, int] = field(default_factory=dict)
    """What could not be read, with errno."""


def parse_pause(words: array[int]) -> Pause:
    """struct ethtool_pauseparam: command, autoneg, rx, tx."""
    return Pause(bool(words[1]), bool(words[2]), bool(words[3]))


def parse_features(words: array[int]) -> tuple[bool, bool]:
    """struct ethtool_value of ETHTOOL_GFLAGS: (LRO, VLAN stripping)."""
    return bool(words[1] & _FLAG_LRO), bool(words[1] & _FLAG_RXVLAN)


def parse_speed(words: array[int]) -> int | None:
    """struct ethtool_cmd: Mbit/s, in a half word at byte 12 and another at byte 28; None while there is no link."""
    low, high = struct.unpack_from("=H14xH", words.tobytes(), 12)
    speed = high << 16 | low
    return None if speed in _UNKNOWN_SPEEDS or low == high == 0xFFFF else speed


def read(interface: str) -> Settings:
    """Ask the kernel. What it does not tell is in `unread`."""
    unread: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def ask(name: str, command: int, words: int) -> array[int] | None:
            value = array("I", [command] + [0] * (words - 1))
            try:
                fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), value.buffer_info()[0]))
            except OSError as error:
                unread[name] = error.errno or errno.EIO
                return None
            return value

        pause, gro, flags = ask("pause", _GPAUSEPARAM, 4), ask("gro", _GGRO, 2), ask("flags", _GFLAGS, 2)
        speed = ask("speed", _GSET, 11)
    unread.pop("speed", None)  # many virtual interfaces have none
    lro, stripping = (None, None) if flags is None else parse_features(flags)
    up = carrier = promiscuous = mtu = None
    try:
        up, carrier, promiscuous, mtu = _link(interface)
    except OSError as error:
        unread["link"] = error.errno or errno.EIO
    return Settings(
        interface, up, carrier, promiscuous, mtu, None if speed is None else parse_speed(speed),
        None if pause is None else parse_pause(pause), None if gro is None else bool(gro[1]), lro, stripping,
        Path(f"/sys/class/net/{interface}/device/infiniband").is_dir(), unread,
    )  # fmt: skip


def _link(interface: str) -> tuple[bool, bool, bool, int]:
    """(up, carrier, promiscuous, MTU). By netlink: the flags of the older ioctl do not show a capture's promiscuity."""
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as route:
            (link,) = route.link("get", ifname=interface)
    except NetlinkError as error:
        raise OSError(error.code, str(error)) from error
    flags = link["flags"]
    promiscuity, mtu = link.get_attr("IFLA_PROMISCUITY"), link.get_attr("IFLA_MTU")
    return bool(flags & _IFF_UP), bool(flags & _IFF_LOWER_UP), bool(promiscuity), int(mtu)


def judge(settings: Settings) -> list[Finding]:
    """What is right and wrong with the settings, as they stood while capturing."""
    checks: tuple[Callable[[Settings], list[Finding]], ...] = (_state, _pause, _priority, _merging, _tags, _unread)
    return [finding for check in checks for finding in check(settings)]


def _state(settings: Settings) -> list[Finding]:
    name = settings.interface
    found = []
    if settings.up is False:
        found.append(Finding("link", PROBLEM, f"{name} is down.", f"ip link set dev {name} up"))
    elif settings.carrier is False:
        found.append(Finding(
            "link", PROBLEM, f"{name} has no link: nothing is connected, or the other side is off.",
            f"check the cable and the switch port, then: ip link show dev {name}",
        ))  # fmt: skip
    elif settings.up:
        speed = "" if settings.speed is None else f" at {settings.speed / 1000:g} Gbit/s"
        found.append(Finding("link", OK, f"{name} is up{speed}."))
    if settings.promiscuous is False:
        found.append(Finding(
            "promiscuous", PROBLEM, f"{name} is not promiscuous: it drops frames that are for other machines.",
            f"ip link set dev {name} promisc on",
        ))  # fmt: skip
    if settings.mtu is not None and settings.mtu < _NEEDED_MTU:
        found.append(Finding(
            "interface-mtu", WARNING,
            f"{name} has MTU {settings.mtu}: many adapters drop longer frames, and a mirrored RoCE packet of 4096 "
            f"bytes needs {_NEEDED_MTU}.",
            f"ip link set dev {name} mtu 9216",
        ))  # fmt: skip
    return found


def _pause(settings: Settings) -> list[Finding]:
    name, pause = settings.interface, settings.pause
    if pause is None:
        return []
    remedy = f"ethtool -A {name} autoneg off rx off tx off"
    if pause.tx:
        return [Finding(
            "pause", PROBLEM,
            f"{name} sends pause frames when it cannot keep up: a slow checkpoint node can hold up the switch, and "
            "with it training.",
            remedy + " (and flow control off on the monitor port: flowcheck switch-config prints how)",
        )]  # fmt: skip
    if pause.rx:
        return [Finding("pause", WARNING, f"{name} obeys pause frames; a port that only receives has no use for it.",
                        remedy)]
    return [Finding("pause", OK, f"{name} sends no pause frames.")]


def _priority(settings: Settings) -> list[Finding]:
    """Priority flow control (IEEE 802.1Qbb) is set apart from pause frames, and the ioctls do not tell it."""
    name = settings.interface
    if settings.pause is None:
        return []
    return [Finding(
        "priority-pause", OK,
        f"Whether {name} sends priority pause frames (PFC) is not read here; it has to be off for every priority.",
        f"check by hand: dcb pfc show dev {name} (to turn it off: dcb pfc set dev {name} prio-pfc all:off)",
    )]  # fmt: skip


def _merging(settings: Settings) -> list[Finding]:
    on = [word for word, value in (("gro", settings.gro), ("lro", settings.lro)) if value]
    if on:
        names = " and ".join(word.upper() for word in on)
        return [Finding(
            "merging", WARNING,
            f"{settings.interface} merges TCP segments before they are captured ({names}): what was one frame on the "
            "wire cannot be told any more, and losses inside it are hidden.",
            f"ethtool -K {settings.interface} {' '.join(word + ' off' for word in on)}",
        )]  # fmt: skip
    if settings.gro is False:
        return [Finding("merging", OK, f"{settings.interface} does not merge segments.")]
    return []


def _tags(settings: Settings) -> list[Finding]:
    if not settings.vlan_stripping:
        return []
    return [Finding(
        "vlan-stripping", OK,
        f"{settings.interface} takes VLAN tags out of frames; flowcheck reads them from beside the frame. Other tools "
        f"may lose them (ethtool -K {settings.interface} rxvlan off leaves them in).",
    )]  # fmt: skip


def _unread(settings: Settings) -> list[Finding]:
    found = []
    for what, code in settings.unread.items():
        absent = code in (errno.EOPNOTSUPP, errno.ENODEV)
        found.append(Finding(
            f"unread-{what}", OK if absent else WARNING,
            f"{settings.interface} does not tell its {'settings' if what in ('link', 'flags') else what} "
            f"({os.strerror(code)})" + ("; virtual interfaces have none." if absent else "."),
            "" if absent else f"{_NAMES[what]} {settings.interface}",
        ))  # fmt: skip
    return found
