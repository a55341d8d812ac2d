"""What an inspection found, for a network engineer: who talks, what runs, what is missing and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowcheck.inspect.report import PairSeen, Reduced, Report
from flowcheck.inspect.streams import StreamSeen
from flowcheck.observation import size_text
from mirror.memory import address_of
from reconstruct.gloo.framing import PREAMBLE_BYTES, valid

__all__ = ["WIDTH", "table"]

WIDTH = 120
_MOST_TALKERS = 16
_MOST_COLLECTIVES = 24
_MOST_SIZES = 3
_HELLO = 8
_STORE = bytes((0, 0xCE, 0xF7, 0x85, 0x3C))
_NCCL = bytes.fromhex("6c9d4bfcf2b94a56")
_COLLECTIVE_COLUMNS = (
    "LIBRARY", "COLLECTIVE", "ALGORITHM", "PROTOCOL", "CHANNELS", "SENDERS", "NUMBER", "ORDINALS", "SIZES",
)
_FOREIGN = {"cnp": "congestion notifications", "ud": "datagrams (QP 1, management)", "uc": "of unreliable connections",
            "other": "others"}
_HARMLESS = {0x0000, 0x0806, 0x8808, 0x8809, 0x88CC}
"""Ethertypes that carry no training traffic: none (a length), ARP, flow control, LACP, LLDP."""
_NCCL_TYPES = {3: "nccl sockets", 4: "nccl set-up"}


@dataclass(slots=True)
class _Talk:
    """What one host sends to another, of one kind."""

    connections: int = 0
    bytes: int = 0
    missing: int = 0
    lost: int = 0


def table(report: Report) -> str:
    """The whole report, no line longer than WIDTH characters."""
    lines = [*_head(report), *_talkers(report), *_collectives(report), *_missing(report)]
    return "\n".join(piece for line in lines for piece in _wrapped(line))


def _wrapped(line: str) -> Iterator[str]:
    """The line, cut between words where it is too long, indented below its own beginning."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    while len(line) > WIDTH:
        cut = line.rfind(" ", len(indent), WIDTH + 1)
        if cut < 0:
            cut = WIDTH
        yield line[:cut].rstrip()
        line = indent + line[cut:].lstrip()
    yield line


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


# Head


def _head(report: Report) -> Iterator[str]:
    names = ", ".join(report.files[:3]) + (f" and {len(report.files) - 3} more" if len(report.files) > 3 else "")
    counters = report.counters
    yield f"{names}: {_count(counters.packets, 'packet')}, {size_text(counters.bytes)}, {report.seconds:.3f} s"
    kinds = report.summary["encapsulations"]
    if kinds:
        yield "taken off: " + ", ".join(f"{name} ({_count(number, 'frame')})" for name, number in kinds.items())
    tcp, roce = report.tcp["tcp"], report.roce["packets"]
    other = report.counters.packets - tcp - roce
    yield f"read: {_count(tcp, 'TCP segment')}, {_count(roce, 'RoCE packet')}, {_count(max(other, 0), 'other frame')}"


# Talkers


def _kind(stream: StreamSeen) -> str:
    """What a stream says it is by its first bytes."""
    head = stream.head
    if head[:8] == _NCCL and len(head) >= 12:
        return _NCCL_TYPES.get(int.from_bytes(head[8:12], "little"), "nccl")
    if head[:5] == _STORE:
        return "tcpstore"
    for start in (0, _HELLO):
        if head[start : start + 2] == b"\x16\x03":
            return "tls" if start == 0 else "gloo in tls"
        if len(head) >= start + PREAMBLE_BYTES and valid(address_of(np.frombuffer(head[start:], np.uint8)), True):
            return "gloo"
    return ""


def _pair_kind(pair: PairSeen) -> str:
    if pair.messages and pair.sized == pair.messages:
        return "nccl data"
    if pair.messages and pair.entries == pair.messages:
        return "nccl cts"
    return "roce"


def _host(end: str) -> str:
    return end.rpartition(":")[0].strip("[]")


def _talkers(report: Report) -> Iterator[str]:
    kinds = {(s.source, s.destination, s.tunnel): kind for s in report.streams if (kind := _kind(s))}
    talks: dict[tuple[str, str, str, str], _Talk] = {}
    for stream in report.streams:
        ends = stream.source, stream.destination
        kind = kinds.get((*ends, stream.tunnel)) or kinds.get((*ends[::-1], stream.tunnel)) or "tcp"
        talk = talks.setdefault((_host(ends[0]), _host(ends[1]), stream.tunnel or "", kind), _Talk())
        talk.connections += 1
        talk.bytes += stream.present
        talk.missing += stream.hole_bytes
    for pair in report.pairs:
        key = pair.source, pair.destination, pair.tunnel or "", _pair_kind(pair)
        talk = talks.setdefault(key, _Talk())
        talk.connections += 1
        talk.bytes += pair.bytes
        talk.missing += pair.hole_bytes
        talk.lost += pair.lost
    if not talks:
        yield "nobody talks: no TCP and no RoCE in this capture"
        return
    rows = sorted(talks.items(), key=lambda row: (-row[1].bytes, row[0]))
    rows = [row for row in rows if row[1].bytes or row[1].missing or row[1].lost]
    shown = rows[:_MOST_TALKERS]
    tunnels = any(key[2] for key, _ in shown)
    cells = [("FROM", "TO", "WHAT", "FLOWS", "BYTES", "MISSING", "TUNNEL" if tunnels else "")]
    cells += [
        (key[0], key[1], key[3], str(talk.connections), size_text(talk.bytes), _lack(talk), key[2])
        for key, talk in shown
    ]
    yield ""
    yield from _columns(cells, right=(3, 4))
    more = len(rows) - len(shown)
    if more:
        rest = sum(talk.bytes for _, talk in rows[_MOST_TALKERS:])
        yield f"{more} more with {size_text(rest)}"
    if report.more_streams:
        yield f"{report.more_streams} more streams were only hashed"


def _lack(talk: _Talk) -> str:
    parts = [size_text(talk.missing)] if talk.missing else []
    if talk.lost:
        parts.append(_count(talk.lost, "packet"))
    return " + ".join(parts) or "-"


def _columns(cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    for row in cells:
        texts = [text.rjust(width) if at in right else text.ljust(width)
                 for at, (text, width) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(texts).rstrip()


# Collectives


def _collectives(report: Report) -> Iterator[str]:
    found = sorted(report.collectives, key=lambda seen: (seen.library, seen.group, seen.first, seen.kind))
    if found:
        cells = [_COLLECTIVE_COLUMNS]
        cells += [
            (
                seen.library, seen.kind, seen.algorithm or "-", seen.protocol or "-", _ranges(seen.channels),
                _ranges(seen.senders), str(seen.number), f"{seen.first}..{seen.last}", _sizes(seen),
            )
            for seen in found[:_MOST_COLLECTIVES]
        ]  # fmt: skip
        yield ""
        header, *rows = _columns(cells, right=(6,))
        yield header
        group = ""
        for seen, row in zip(found, rows, strict=False):
            if seen.group != group:
                group = seen.group
                yield f"group {group}:"
            yield row
        if len(found) > _MOST_COLLECTIVES:
            yield f"{len(found) - _MOST_COLLECTIVES} more kinds"
        yield from _steps(report)
    if report.statements:
        yield ""
        yield from report.statements


def _ranges(numbers: set[int]) -> str:
    """0-3,7"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) or "-"


def _sizes(seen: Reduced) -> str:
    most = seen.sizes.most_common()
    parts = [f"{number} x {size} B" for size, number in most[:_MOST_SIZES]]
    if len(most) > _MOST_SIZES:
        parts.append(f"{len(most) - _MOST_SIZES} more")
    if seen.unsized:
        parts.append(f"{seen.unsized} unknown")
    return ", ".join(parts)


def _steps(report: Report) -> Iterator[str]:
    """How many optimizer steps that can be: in each, every bucket is reduced once."""
    by_group: dict[tuple[str, str], int] = {}
    sizes: dict[tuple[str, str], int] = {}
    for seen in report.collectives:
        if seen.kind == "allreduce" and seen.sizes:
            size, number = seen.sizes.most_common(1)[0]
            key = seen.library, seen.group
            if number > by_group.get(key, 0):
                by_group[key], sizes[key] = number, size
    for (library, group), number in sorted(by_group.items()):
        whose = f"{library} group {group}" if group else library
        if report.buckets:
            total = sum(seen.number for seen in report.collectives
                        if seen.kind == "allreduce" and (seen.library, seen.group) == (library, group))
            yield f"steps: {whose}: {_count(total, 'all-reduce')}, {report.buckets} a step by the job file"
        else:
            yield (f"steps: {whose}: at most {number}: the most frequent all-reduce, of {sizes[library, group]} B, "
                   f"came {_count(number, 'time')}")


# What is missing


def _missing(report: Report) -> Iterator[str]:
    lines = [*_loss(report), *_views(report), *_unread(report), *report.refusals, *report.problems, *report.notes]
    yield ""
    if not lines:
        yield "nothing is missing"
        return
    yield "missing, and why:"
    for line in lines:
        yield f"  {line}"


def _loss(report: Report) -> Iterator[str]:
    tcp, roce = report.tcp, report.roce
    holes = sum(stream.hole_bytes for stream in report.streams)
    snapped, switch = tcp["cut_by_snaplen"], tcp["cut_by_switch"]
    if snapped:
        yield f"{_count(snapped, 'frame')} cut short by the capture's snapshot length: capture whole frames (-s 0)"
    if switch:
        yield f"{_count(switch, 'frame')} cut short by the switch: turn truncation off in its mirror session"
    if holes:
        why = "most of it cut off" if tcp["truncated"] else "packets lost before or in the capture"
        yield f"TCP: {size_text(holes)} of streams were never captured: {why}"
    if tcp["holes"] and report.gloo["loss"]["framing_lost"]:
        yield (f"gloo: {_count(report.gloo['loss']['framing_lost'], 'time')} a hole swallowed the start of a message: "
               "what was under way then has no certain place")
    conflicts = sum(stream.conflict_bytes for stream in report.streams)
    if conflicts:
        yield f"TCP: of {_count(conflicts, 'byte')} two different copies were captured; which one is right is not known"
    incomplete = sum(pair.incomplete for pair in report.pairs)
    if incomplete or roce["lost_packets"]:
        missing = size_text(sum(pair.hole_bytes for pair in report.pairs))
        yield (f"RoCE: {_count(incomplete, 'message')} not whole, {missing} of them missing; "
               f"{_count(sum(pair.lost for pair in report.pairs), 'packet')} of unknown messages: packets lost on the "
               "mirror's way (a retry would have filled the hole), or the capture ends there")
    if roce["icrc_bad"]:
        yield (f"RoCE: {_count(roce['icrc_bad'], 'packet')} with a wrong invariant CRC, {roce['icrc_refused']} of them "
               "left out: damaged, or changed by the device that copied them")
    if roce["foreign"]:
        parts = [f"{roce[f'foreign_{key}']} {name}" for key, name in _FOREIGN.items() if roce[f"foreign_{key}"]]
        yield f"port 4791: left out, of no reliable connection: {', '.join(parts)}"


def _views(report: Report) -> Iterator[str]:
    """Directions and ranks that the mirror does not show."""
    ends = {(stream.source, stream.destination, stream.tunnel): stream.length for stream in report.streams}
    alone = sum(length > 0 and (b, a, tunnel) not in ends for (a, b, tunnel), length in ends.items())
    silent = sum(pair.unanswered for pair in report.pairs if pair.messages)
    if alone:
        yield (f"TCP: {_count(alone, 'connection')} seen in one direction only: mirror both directions of the port; if "
               "each has a tunnel of its own, declare the tunnels as one vantage group")
    if silent:
        yield (f"RoCE: {_count(silent, 'queue pair')} without visible acknowledgments: mirror the port's other "
               "direction too")
    for group in report.gloo["groups"]:
        if group["coverage"] < 1:
            yield (f"gloo group {group['name']}: its links seen show {100 * group['coverage']:.1f} % of an all-reduce: "
                   "mirror one rank's port in both directions")
    for group in report.gloo["incomplete_groups"]:
        of = "?" if group["world_size"] is None else group["world_size"]
        yield (f"gloo group {group['name']}: only {len(group['known'])} of {of} ranks are known: mirror the rendezvous "
               "too, or give --job FILE")
    strangers = report.gloo["streams"]["strangers"]
    if strangers:
        yield (f"gloo: {_count(strangers, 'stream')} of unknown ranks, so no collective of theirs is told: mirror the "
               "rendezvous too (MASTER_ADDR:MASTER_PORT, from before the job starts), or give --job FILE")
    if report.gloo["streams"]["tls"]:
        yield (f"gloo: {_count(report.gloo['streams']['tls'], 'stream')} inside TLS: start the trainers without "
               "GLOO_DEVICE_TRANSPORT=TCP_TLS")


def _unread(report: Report) -> Iterator[str]:
    tcp = report.tcp
    damaged = tcp["malformed"] + tcp["cut_header"] + tcp["fragments"]
    if damaged:
        yield f"{_count(damaged, 'frame')} damaged or fragmented and left out"
    if tcp["unknown_linktype"]:
        yield f"{_count(tcp['unknown_linktype'], 'frame')} of a link type that is not known: capture Ethernet frames"
    if tcp["too_deep"] or tcp["unknown_tunnel"]:
        yield f"{_count(tcp['too_deep'] + tcp['unknown_tunnel'], 'frame')} in tunnels that are not read"
    if tcp["flow_table_full"] or report.roce["flow_table_full"]:
        number = tcp["flow_table_full"] + report.roce["flow_table_full"]
        yield f"{_count(number, 'frame')} found no room in the flow tables: inspect a shorter capture"
    unknown = [row for row in report.unknown if row[1] not in _HARMLESS or row[0] == "gre protocol"]
    if unknown:
        yield "not read, most frequent first: " + ", ".join(
            f"{place} 0x{code:04x} ({_count(number, 'frame')})" for place, code, number in unknown)
