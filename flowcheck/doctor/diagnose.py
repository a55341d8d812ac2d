"""`flowcheck doctor`: whether a mirror delivers what is needed, and what to change. Figures in, findings out.

    frames -> flowcheck.doctor.exam -> Seen     \\
    kernel -> flowcheck.doctor.nic  -> Settings -> diagnose -> findings -> text, JSON

Every sentence that can be said is in this module (what passes), `flowcheck.doctor.frames` (how the frames arrive) or
`flowcheck.doctor.nic` (the capture interface); docs/doctor.md lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from flowcheck.doctor import nic
from flowcheck.doctor.finding import OK, PROBLEM, WARNING, Finding
from flowcheck.doctor.frames import judge as judge_frames
from flowcheck.doctor.nccl_chunks import Coverage
from flowcheck.doctor.nic import Settings
from flowcheck.doctor.seen import Link, Ring, Seen, Strange
from flowcheck.observation import size_text
from reconstruct.nccl.refusals import REFUSALS

__all__ = ["diagnose"]

_MIRROR = "flowcheck switch-config VENDOR --source PORT:both --monitor PORT"
_MOST = 8
_SHARE_CUT = 0.5
_KNOWN = {
    ("ethertype", 0x0806): "ARP", ("ethertype", 0x88CC): "LLDP", ("ethertype", 0x88F7): "PTP",
    ("ethertype", 0x8809): "LACP", ("ethertype", 0): "spanning tree and the like", ("udp port", 319): "PTP",
    ("udp port", 320): "PTP", ("udp port", 53): "DNS", ("udp port", 5353): "mDNS", ("tcp port", 22): "SSH",
    ("tcp port", 80): "HTTP", ("tcp port", 443): "HTTPS", ("tcp port", 445): "SMB", ("tcp port", 2049): "NFS",
    ("ip protocol", 1): "ICMP", ("ip protocol", 58): "ICMPv6", ("ip protocol", 47): "GRE",
    ("udp port", 4791): "RoCE", ("udp port", 4789): "VXLAN", ("tcp port", 29500): "torch's rendezvous",
}  # fmt: skip


def diagnose(seen: Seen, settings: Settings | None = None) -> list[Finding]:
    """All findings, the most telling first. settings: of the capture interface, None for a file."""
    found: list[Finding] = [] if settings is None else nic.judge(settings)
    if not seen.frames:
        return [*found, _silence(seen)]
    frames = judge_frames(seen, settings)
    blind = any(finding.name == "mtu" and finding.severity == PROBLEM for finding in frames)
    cut = seen.cut_by_switch + seen.cut_by_snaplen > _SHARE_CUT * seen.frames
    return [*_traffic(seen, settings, cut), *_rings(seen, blind), *frames, *found]


def _silence(seen: Seen) -> Finding:
    if not seen.live:
        return Finding("no-frames", PROBLEM, f"{seen.source} holds no frame.", "record again while the job trains")
    return Finding(
        "no-frames", PROBLEM, f"No frame arrived on {seen.source}.",
        f"check that the monitor port's cable ends here (ip -br link), that the mirror session is on ({_MIRROR} ends "
        "with the commands that show it), and that the job trains",
    )  # fmt: skip


# What passes


def _traffic(seen: Seen, settings: Settings | None, cut: bool) -> list[Finding]:
    rate = f", {size_text(int(seen.bytes / seen.seconds))} a second" if seen.seconds > 0.1 else ""
    size = f"{seen.frames} frames, {size_text(seen.bytes)} in {seen.seconds:.3g} s{rate}"
    if seen.training:
        found = [Finding("traffic", OK, f"Training traffic: {', '.join(_libraries(seen))}; {size} in all.")]
    elif cut:
        found = [Finding(
            "traffic", WARNING, f"What is in the frames cannot be told, most of them are cut: {size}.",
            "mend the truncation first, then run doctor again",
        )]  # fmt: skip
    else:
        found = [_wrong(seen, settings, size)]
    refused = []
    if seen.tls:
        refused.append((f"{seen.tls} streams begin with a TLS handshake where gloo's messages should be", "tls"))
    if seen.strange_rooms:
        refused.append((f"CTS entries announce rooms of {_some(map(str, seen.strange_rooms))} bytes", "buffer-sizes"))
    for told, name in refused:
        reason = REFUSALS[name]
        found.append(Finding(
            name, PROBLEM, f"{told}: {reason.title} cannot be read, {reason.why}.",
            f"{reason.remedy}; the cost: {reason.cost}",
        ))  # fmt: skip
    return found


def _libraries(seen: Seen) -> list[str]:
    words = []
    rings = Counter(ring.library for ring in seen.rings)
    if rings["gloo"] or seen.groups:
        words.append("gloo over TCP")
    if rings["nccl"] or seen.other_links:
        words.append("NCCL over RoCE")
    if seen.nccl_sockets:
        words.append("NCCL over TCP sockets")
    return words or ["gloo inside TLS"]


def _wrong(seen: Seen, settings: Settings | None, size: str) -> Finding:
    instead = _some([_named(one) for one in seen.outermost])
    if seen.tunnels:
        instead += f", with {seen.tcp} TCP segments and {seen.roce} RoCE packets in tunnels"
    if seen.roce:
        return Finding(
            "no-collectives", PROBLEM,
            f"RoCE passes, but no message of NCCL: of {seen.roce} packets {seen.roce_acks} are acknowledgments "
            f"({size}).",
            "mirror the direction that carries the data as well, with the MTU that full-sized packets need, and run "
            f"this while the job trains: {_MIRROR}",
        )  # fmt: skip
    rdma = ""
    if settings is not None and settings.rdma:
        rdma = (
            f"; {settings.interface} does RDMA itself and may keep RoCE packets: mlxconfig -d DEVICE set ROCE_CONTROL=1"
        )
    return Finding(
        "wrong-interface", PROBLEM,
        f"No training traffic on {seen.source}: what comes instead is {instead} ({size}).",
        "capture where the monitor port's cable ends (ip -br link lists the interfaces), mirror a port of the training "
        f"network ({_MIRROR}), and run this while the job trains{rdma}",
    )  # fmt: skip


def _named(strange: Strange) -> str:
    name = _KNOWN.get((strange.place, strange.number))
    number = f"0x{strange.number:04x}" if strange.place.endswith(("ethertype", "gre protocol")) else str(strange.number)
    return f"{strange.frames} x {name or strange.place + ' ' + number}"


# Enough links for every chunk


def _rings(seen: Seen, blind: bool) -> list[Finding]:
    found = []
    for ring in seen.rings:
        found.append(Finding("ranks", OK, _who(ring)))
        if blind and not ring.carrying:
            found.append(Finding(
                "chunks", WARNING, f"{_title(ring)}: whether every chunk passes cannot be told while full-sized frames "
                "are missing.", "mend the MTU first, then run doctor again",
            ))  # fmt: skip
            continue
        if not ring.links and any(other.carrying for other in seen.rings):
            found.append(Finding(
                "chunks", WARNING, f"{_title(ring)}: none of its links passes here, other groups' do.",
                f"if its all-reduces carry gradients, mirror a port of one of its ranks too: {_MIRROR}",
            ))  # fmt: skip
            continue
        hosts = {end for link in ring.links for end in (link.sender, link.receiver)}
        known = [one for one in seen.coverage if hosts <= set(one.hosts)]
        if known and ring.library == "nccl":
            found += [_covered(one) for one in known]
            found += _one_way(ring) if any(one.never for one in known) else []
            continue
        found += _chunks(ring)
        found += _one_way(ring)
    if seen.unplaced:
        found.append(Finding(
            "unplaced", OK,
            "Rings and trees of an NCCL communicator are known, but fewer or more connections passed than it has, so "
            "which of its channels they are cannot be told.",
            "run this longer, while large all-reduces use every channel",
        ))  # fmt: skip
    if seen.unknown_ranks:
        found.append(Finding(
            "unknown-ranks", OK,
            "Ranks of gloo streams are not known here, for their rendezvous was not seen; an attached job tells them.",
        ))  # fmt: skip
    found += [
        Finding("half-rendezvous", OK, f"Of group {name} only a part of the rendezvous was seen; an attached job tells "
                "the rest.")
        for name in seen.half_rendezvous
    ]  # fmt: skip
    return found


def _title(ring: Ring) -> str:
    return f"gloo group {ring.name}" if ring.library == "gloo" and ring.ranks else f"{ring.library} {ring.name}"


def _who(ring: Ring) -> str:
    ranks = f", {ring.ranks} ranks" if ring.ranks else ""
    return f"{_title(ring)}{ranks}: ring links {_links(ring.links) or 'none'}."


def _links(links: Sequence[Link]) -> str:
    """Equal ones once, with their number and the senders' ranks."""
    counted: dict[tuple[str, str, bool], list[Link]] = {}
    for link in links:
        counted.setdefault((link.sender, link.receiver, link.silent), []).append(link)
    texts = []
    for (sender, receiver, silent), same in counted.items():
        ranks = sorted({link.rank for link in same if link.rank >= 0 and not sender.startswith("rank ")})
        notes = [f"{len(same)} connections"] if len(same) > 1 else []
        notes += [f"from rank {_some(list(map(str, ranks)))}"] if ranks else []
        notes += ["announced, no data"] if silent else []
        texts.append(f"{sender} -> {receiver}" + (f" ({', '.join(notes)})" if notes else ""))
    return _some(texts)


def _some(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = len(listed) - _MOST
    return ", ".join(listed[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _list(word: str, numbers: Sequence[int]) -> str:
    return f"{word}{'' if len(numbers) == 1 else 's'} {_some(map(str, numbers))}"


def _chunks(ring: Ring) -> list[Finding]:
    counts = ring.chunks
    by_count = [[c for c, n in enumerate(counts) if n == times] for times in (0, 1)]
    more = [chunk for chunk, number in enumerate(counts) if number > 1]
    never, once = by_count
    told = [f"{_list('chunk', part)} {word}" for part, word in
            ((never, "never"), (once, "once"), (more, "more than once")) if part]  # fmt: skip
    if counts:
        text = f"{_title(ring)}: of the {ring.ranks} chunks of an all-reduce, {'; '.join(told)}."
    elif ring.whole:
        text = f"{_title(ring)}: as many links one way as the other, so every chunk of a ring passes at least once."
    else:
        text = f"{_title(ring)}: not two links of every ring: one chunk of each loop never passes."
    if ring.whole:
        alone = " What passes once cannot be had again when its frame is lost." if once else ""
        return [Finding("chunks", OK, text + alone)]
    if ring.library == "nccl" and ring.tree_like and ring.carrying:
        return [Finding(
            "chunks", WARNING,
            f"{_title(ring)}: one direction of what looks like a tree. That is enough at a node that is the root of "
            "neither tree, if what it receives is mirrored; of a ring one chunk of each loop would never pass.",
            f"flowcheck plan says which nodes will do; both directions always do: {_MIRROR}",
        )]  # fmt: skip
    return [Finding(
        "chunks", PROBLEM, text,
        f"mirror both directions of one port of the ring, or one direction of two: {_MIRROR}; flowcheck plan says "
        "which",
    )]  # fmt: skip


def _covered(one: Coverage) -> Finding:
    """What passes of an NCCL communicator whose rings and trees are known."""
    where = f"NCCL {one.algorithm} between {_some(one.hosts)}, {_list('channel', one.channels)}"
    if one.algorithm == "tree":
        often = "once" if one.once else "more than once"
        told = f"{'no' if one.never else 'every'} slice of the final values passes{'' if one.never else ' ' + often}"
    else:
        word = "chunk" if one.algorithm == "ring" else "head"
        more = [part for part in range(one.parts) if part not in (*one.never, *one.once)]
        told = f"of the {one.parts} {word}s of an all-reduce, " + "; ".join(
            f"{_list(word, part)} {often}"
            for part, often in ((one.never, "never"), (one.once, "once"), (more, "more than once")) if part
        )  # fmt: skip
    if not one.never:
        alone = " What passes once cannot be had again when its frame is lost." if one.once else ""
        return Finding("chunks", OK, f"{where}: {told}.{alone}")
    remedy = {
        "ring": "mirror both directions of one port of the ring, or one direction of two",
        "tree": "mirror what comes into a node that is the root of neither tree, or both directions of a port",
    }.get(one.algorithm, "mirror the port of every head's rail, at a node that is the root of neither tree")
    up = " What passes are sums on their way up, which are not final." if one.algorithm == "tree" else ""
    return Finding("chunks", PROBLEM, f"{where}: {told}.{up}", f"{remedy}: {_MIRROR}; flowcheck plan says which")


def _one_way(ring: Ring) -> list[Finding]:
    """Data one way between the hosts of a ring that is not whole."""
    if ring.whole or (ring.library == "nccl" and ring.tree_like):
        return []
    ways = sorted({(link.sender, link.receiver) for link in ring.carrying})
    if not ways or any((receiver, sender) in ways for sender, receiver in ways):
        return []
    text = "; ".join(f"{sender} sends to {receiver}" for sender, receiver in ways[:_MOST])
    silent = sorted({(link.sender, link.receiver) for link in ring.links if link.silent})
    lacking = f": data from {silent[0][0]} to {silent[0][1]} are announced and never come" if silent else ""
    return [Finding(
        "one-direction", PROBLEM,
        f"Only one direction passes: {text}. What goes the other way is not mirrored{lacking}.",
        f"mirror the other direction of that port too: {_MIRROR}",
    )]  # fmt: skip
