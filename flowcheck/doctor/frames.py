"""What `flowcheck.doctor` says of the frames: tunnels, tags, truncation, copies, what is missing and why."""

from __future__ import annotations

from collections.abc import Callable

from flowcheck.doctor.finding import OK, PROBLEM, WARNING, Finding
from flowcheck.doctor.nic import Settings
from flowcheck.doctor.seen import Seen, Strange
from flowcheck.observation import size_text

__all__ = ["drops", "judge", "missing", "truncation"]

# Types that every network has and nobody needs here: ARP, LLDP, PTP, EAPOL, slow protocols, flow control, loopback
# tests, and a length in place of a type (spanning tree and the like).
_HARMLESS = {0x0806, 0x88CC, 0x88F7, 0x888E, 0x8809, 0x8808, 0x9000, 0}
_FOREIGN = {
    ("ethertype", 0x8915): "RoCE v1, without IP",
    ("ethertype", 0x8847): "MPLS",
    ("ethertype", 0x88E5): "MACsec",
    ("ethertype", 0x894F): "network service headers",
    ("ethertype", 0x8914): "FCoE",
    ("udp port", 6081): "GENEVE",
    ("udp port", 8472): "VXLAN on port 8472",
    ("udp port", 4790): "VXLAN-GPE",
    ("udp port", 4754): "GRE in UDP",
    ("udp port", 37008): "TZSP",
}
_PLAIN = "mirror with ERSPAN, GRE or VXLAN to UDP port 4789, or to a port: flowcheck switch-config VENDOR ..."
_SHARE = 0.01
_FEW = 10
_COPIED, _ALIKE = 0.005, 0.2
_MERGED = 10_240
_SAMPLED = 0.8
_MOST_LOAD = 0.9
_SEVERAL = 3
_LONG_HOLES = 0.95
_APART = 0.75


def judge(seen: Seen, settings: Settings | None) -> list[Finding]:
    """Findings on the frames of a capture that has some. settings: of the capture interface, where it is known."""
    here = settings.interface if settings is not None else "IFACE"
    checks: tuple[Callable[[Seen, str], list[Finding]], ...] = (
        _wrapping, _strangers, _truncation, drops, _missing, _copies, _merged, _damaged
    )  # fmt: skip
    found = [finding for check in checks for finding in check(seen, here)]
    if settings is not None and settings.speed and seen.seconds > 1:
        load = seen.bytes * 8 / seen.seconds / (settings.speed * 1e6)
        if load > _MOST_LOAD:
            found.append(Finding(
                "load", WARNING, f"The copies fill {load:.0%} of {here}'s {settings.speed / 1000:g} Gbit/s on average: "
                "in bursts the switch drops what does not fit.",
                "mirror fewer directions or to a faster port; flowcheck plan says what a job needs",
            ))  # fmt: skip
    return found


def _wrapping(seen: Seen, here: str) -> list[Finding]:
    found = []
    for kind, frames in seen.encapsulations.items():
        share = f"{frames} of {seen.frames} frames" if frames <= seen.frames else f"{frames} headers"
        if kind in ("vlan", "qinq", "ttag"):
            name = {"vlan": "a VLAN tag", "qinq": "several VLAN tags", "ttag": "Cisco's TTag"}[kind]
            found.append(Finding(kind, OK, f"{share} carry {name}; it is taken off."))
        else:
            found.append(Finding("encapsulation", OK, f"{share} come in a tunnel of kind {kind}; it is taken off."))
    if len(seen.tunnels) > 1 and not seen.declared:
        members = ",".join(seen.tunnels[:4])
        found.append(Finding(
            "tunnels", WARNING, f"Frames come in {len(seen.tunnels)} tunnels, which are kept apart: if they carry the "
            "two directions of one port or two planes of one network, that must be said.",
            f"flowcheck daemon --vantage 'fabric={members}' ...",
        ))  # fmt: skip
    if seen.too_deep:
        found.append(Finding(
            "too-deep", PROBLEM, f"{seen.too_deep} frames lie in more tunnels than are taken off: the session mirrors "
            "its own copies.", "leave the port that the copies leave by out of the mirror's sources",
        ))  # fmt: skip
    if seen.fragments_lost:
        found.append(Finding(
            "fragments", PROBLEM, f"{seen.fragments_lost} fragments of copies could not be put together: the way of "
            "the copies has a smaller MTU than they need.",
            "raise the MTU of every hop to the checkpoint node to 9216, or lower the trainers' by 60",
        ))  # fmt: skip
    return found


def _strangers(seen: Seen, here: str) -> list[Finding]:
    found = []
    ports = [one for one in seen.outermost if one.place == "udp port" and (one.place, one.number) in _FOREIGN]
    least = max(_FEW, _SHARE * seen.frames) if seen.training else 1
    for one in (*seen.strange, *ports):
        if one.frames < least or (one.place.endswith("ethertype") and one.number in _HARMLESS):
            continue
        remedy = _PLAIN
        if (one.place, one.number) == ("ethertype", 0x8915):
            remedy = "use RoCE v2 in the job: NCCL_IB_GID_INDEX of a v2 GID (show_gids lists them)"
        elif (one.place, one.number) == ("ethertype", 0x88E5):
            remedy = "mirror where frames are not encrypted: a port of the leaf, not of a MACsec link"
        found.append(Finding(
            "unknown-encapsulation", PROBLEM,
            f"{one.frames} of {seen.frames} frames are {_name(one)}, which is not read: training traffic may be in "
            "them.",
            remedy,
        ))  # fmt: skip
    return found


def _name(strange: Strange) -> str:
    number = strange.number if strange.place == "udp port" else f"0x{strange.number:04x}"
    known = _FOREIGN.get((strange.place.removeprefix("inner "), strange.number))
    return f"of {strange.place} {number}" + (f" ({known})" if known else "")


def _truncation(seen: Seen, here: str) -> list[Finding]:
    found = truncation(seen, here)
    if not found and seen.training:
        found.append(Finding("truncation", OK, "No frame was cut short."))
    return found


def truncation(seen: Seen, here: str) -> list[Finding]:
    """Frames that were cut short, and by whom. here: the interface's name."""
    found = []
    if seen.cut_by_switch:
        found.append(Finding(
            "truncated-by-switch", PROBLEM,
            f"The switch cut {seen.cut_by_switch} of {seen.frames} frames short: their IP length goes beyond the "
            "frame.",
            "turn truncation off in the mirror session (SONiC truncate_size 0; EOS no monitor session NAME truncate; "
            "NX-OS no mtu; Cumulus no truncate; AWS no --packet-length, and the workers' MTU 54 lower)",
        ))  # fmt: skip
    if seen.cut_by_snaplen:
        remedy = (
            "capture with larger ring blocks: --block-kib 4096" if seen.live
            else "record whole frames: tcpdump -s 0 -w FILE, or flowcheck daemon --observe -i IFACE --record FILE"
        )
        found.append(Finding(
            "truncated-by-capture", PROBLEM,
            f"The capture cut {seen.cut_by_snaplen} of {seen.frames} frames short: it kept {seen.snaplen} bytes at "
            "most.",
            remedy,
        ))  # fmt: skip
    return found


def drops(seen: Seen, here: str) -> list[Finding]:
    """Frames lost on this machine. here: the interface's name."""
    found = []
    if seen.kernel_drops:
        found.append(Finding(
            "kernel-drops", PROBLEM,
            f"The kernel found no room for {seen.kernel_drops} frames: they came faster than they were read.",
            "give the daemon a larger ring (--ring-mib 1024) and cores of its own (taskset)",
        ))  # fmt: skip
    if seen.interface_drops:
        found.append(Finding(
            "interface-drops", PROBLEM, f"{here} dropped {seen.interface_drops} frames before the kernel saw them.",
            f"ethtool -g {here}, then ethtool -G {here} rx with the maximum it shows; ethtool -S {here} says what kind "
            "of drops they are",
        ))  # fmt: skip
    return found


def missing(seen: Seen, here: str) -> Finding:
    """Why frames that were lost before this machine are missing. here: the interface's name."""
    return _full_sized(seen, here) or _lost(seen, here)


def _missing(seen: Seen, here: str) -> list[Finding]:
    if seen.cut_by_switch or seen.cut_by_snaplen:
        return []  # what was cut is missing too: nothing more can be told
    larger = _full_sized(seen, here)
    if larger:
        return [larger]
    found = []
    if seen.tcp_holes or seen.roce_lost:
        found.append(_lost(seen, here))
    elif seen.training:
        found.append(Finding("loss", OK, "No byte is missing."))
    if seen.conflicts:
        found.append(Finding(
            "conflicts", WARNING, f"{seen.conflicts} ranges came in two copies that differ: something changes frames, "
            "or two networks with the same addresses are mirrored as one.",
            "mirror them in tunnels of their own, or one of them only",
        ))  # fmt: skip
    return found


def _full_sized(seen: Seen, here: str) -> Finding | None:
    """Long frames missing while short ones pass."""
    few = seen.roce_full <= (seen.roce_tails + seen.roce_lost) // 50
    if few and seen.roce_tails >= _SEVERAL:
        what = f"{seen.roce_tails} RoCE messages show their last packet and none of those before"
    elif few and seen.roce_lost >= max(_SEVERAL, seen.nccl_messages):
        what = f"{seen.roce_lost} RoCE packets are missing, and none came that fills a path MTU"
    elif (
        seen.tcp_holes >= _SEVERAL
        and seen.tcp_long_holes >= _LONG_HOLES * seen.tcp_holes
        and seen.tcp_hole_bytes >= seen.tcp_bytes
        # Where frames of all sizes are missing, hardly two come without a hole between them.
        and seen.tcp_holes <= _APART * seen.tcp_segments
    ):
        what = (
            f"each of {seen.tcp_holes} holes is longer than the longest segment that passes ({seen.tcp_largest} "
            f"bytes), {size_text(seen.tcp_hole_bytes)} in all"
        )
    else:
        return None
    return Finding(
        "mtu", PROBLEM,
        f"Full-sized frames are missing while small ones pass: {what}; the longest frame here has {seen.longest} "
        "bytes. The way of the copies has too small an MTU.",
        f"ip link set dev {here} mtu 9216, and the same on the monitor port and every hop between (4096-byte RoCE in a "
        "tunnel needs 4300)",
    )  # fmt: skip


def _lost(seen: Seen, here: str) -> Finding:
    parts = []
    if seen.tcp_holes:
        parts.append(f"TCP: {size_text(seen.tcp_hole_bytes)} in {seen.tcp_holes} holes")
    if seen.roce_lost:
        parts.append(f"RoCE: {seen.roce_lost} packets, {size_text(seen.roce_hole_bytes)} of known messages")
    share = max(
        seen.tcp_hole_bytes / max(1, seen.tcp_hole_bytes + seen.tcp_bytes),
        seen.roce_lost / max(1, seen.roce_lost + seen.roce),
    )
    text = "; ".join(parts)
    if share > _SAMPLED:
        return Finding(
            "sampling", PROBLEM,
            f"Only one frame in about {1 / (1 - share):.0f} arrives, small or large ({text}): the session samples, or "
            "the monitor port is far too slow.",
            "turn sampling off in the mirror session (SONiC sample_rate 0; EOS no monitor session NAME sample)",
        )  # fmt: skip
    return Finding(
        "loss", PROBLEM, f"Frames were lost on the way to the mirror: {text}.",
        f"keep the mirrored directions below the monitor port's speed (flowcheck plan), see the drops of the monitor "
        f"port on the switch and here (ethtool -S {here}), give the adapter its largest ring (ethtool -G {here} rx "
        "MAX)",
    )  # fmt: skip


def _copies(seen: Seen, here: str) -> list[Finding]:
    if not seen.counted:
        return []
    certain = seen.copies >= max(3, _COPIED * seen.counted)
    if certain or seen.alike >= max(_FEW, _ALIKE * seen.counted):
        number = seen.copies if certain else seen.alike
        return [Finding(
            "duplicates", WARNING,
            f"{number} of {seen.counted} frames with data came twice, header for header: a packet is mirrored at two "
            "places. It is read once, but fills the monitor port twice.",
            "mirror each packet once: one port's both directions, or only `in` of several ports (flowcheck plan); see "
            "the sources of the session on the switch",
        )]  # fmt: skip
    return []


def _merged(seen: Seen, here: str) -> list[Finding]:
    if seen.longest <= _MERGED:
        return []
    return [Finding(
        "merged-frames", WARNING,
        f"Frames of up to {seen.longest} bytes: an adapter merged segments before they were captured.",
        f"ethtool -K {here} gro off lro off on the machine that captures",
    )]  # fmt: skip


def _damaged(seen: Seen, here: str) -> list[Finding]:
    found = [Finding("source", WARNING, f"{problem}.", "see what it says") for problem in seen.problems]
    if seen.unreadable > _SHARE * seen.frames:
        found.append(Finding(
            "damaged", WARNING, f"{seen.unreadable} of {seen.frames} frames are damaged, are fragments, or have a link "
            "type that is not known.", "capture Ethernet frames of the training network",
        ))  # fmt: skip
    return found
