"""What `--observe` has seen, for people: a compact table, or one line while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST = 8
_UNKNOWN_RANKS = (
    "mirror the rendezvous too (both directions of a port that talks to MASTER_ADDR:MASTER_PORT, from before the job "
    "starts), or attach the job, which tells the daemon who is who"
)


def size_text(count: int) -> str:
    """Bytes, short: 999 B, 1.5 kB, 2.0 MB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def line(report: Mapping[str, Any]) -> str:
    """One line: enough to see that something comes and whether it is all there."""
    parts = []
    for group in report["groups"]:
        if group["live"]:
            number = sum(kind["collectives"] for kind in group["kinds"].values())
            parts.append(f"{group['name']}: {number} collectives, coverage {_percent(group['coverage'])}")
    if report["streams"]["strangers"]:
        parts.append(f"{report['streams']['strangers']} gloo streams of unknown ranks")
    parts.append(f"{report['packets']} packets, {report['drops']} dropped, {_missing(report['loss'])}")
    return "; ".join(parts)


def table(report: Mapping[str, Any]) -> str:
    """Everything, a few lines per group; each line that reports a fault says what to do."""
    lines: list[str] = []
    for group in report["groups"]:
        lines += _group(group)
    for group in report["incomplete_groups"]:
        lines += _incomplete(group)
    lines += _strangers(report)
    streams = report["streams"]
    if streams["tls"]:
        lines.append(
            f"{streams['tls']} streams are gloo inside TLS and cannot be read: "
            "start the trainers without GLOO_DEVICE_TRANSPORT=TCP_TLS"
        )
    if not report["groups"] and not streams["strangers"]:
        lines.append("no gloo traffic seen: check that the port is mirrored and that the job uses gloo over TCP")
    lines += _rest(report)
    return "\n".join(lines)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _missing(loss: Mapping[str, int]) -> str:
    if not loss["holes"]:
        return "no byte missing"
    return f"{size_text(loss['hole_bytes'])} missing in {loss['holes']} holes"


def _group(group: Mapping[str, Any]) -> Iterator[str]:
    contexts = "" if group["contexts"] == 1 else f", {group['contexts']} contexts"
    over = "" if group["live"] else ", replaced by a later one"
    yield f"group {group['name']}: {group['world_size']} ranks{contexts}{over}"
    yield f"  coverage: {_coverage(group)}"
    yield from _links(group["links"])
    if group["kinds"]:
        yield f"  {'collective':<16}{'number':>8}{'tags':>16}{'messages':>10}{'payload':>11}{'of it lost':>12}"
    for name, kind in group["kinds"].items():
        tags = f"{kind['first_tag']}..{kind['last_tag']}"
        counts = ("-", "-", "-")
        if kind["messages"] is not None:
            counts = (str(kind["messages"]), size_text(kind["payload_bytes"]), size_text(kind["missing_bytes"]))
        yield f"  {name:<16}{kind['collectives']:>8}{tags:>16}{counts[0]:>10}{counts[1]:>11}{counts[2]:>12}"
    reduced = group["allreduces"]
    if reduced["sizes"]:
        yield "  all-reduce sizes: " + _some([f"{n} x {size} B" for size, n in reduced["sizes"]])
    if reduced["without_size"]:
        yield (
            f"  {reduced['without_size']} all-reduces of unknown size: no link showed all of their messages, "
            "or the links contradict each other"
        )


def _coverage(group: Mapping[str, Any]) -> str:
    text = f"the links seen can show {_percent(group['coverage'])} of an all-reduce"
    if group["shown"] is not None:
        reduced = group["allreduces"]
        sized = reduced["finished"] - reduced["without_size"]
        text += f", captured are {_percent(group['shown'])} of the final values of {sized}"
    if group["coverage"] == 0:
        return text + ": mirror a port of one of its ranks, both directions"
    if group["coverage"] < 1:
        return text + ": mirror the port's other direction too, or another rank's port"
    return text


def _links(links: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for ring, title in ((True, "ring links"), (False, "other links")):
        chosen = [link for link in links if link["ring"] == ring]
        if chosen:
            names = [f"{_ranks(link)} {size_text(link['bytes'])}" for link in chosen]
            yield f"  {title}: {_some(names)}"
    faulty = [link for link in links if link["hole_bytes"] or link["lost"] or link["reason"]]
    for link in sorted(faulty, key=lambda link: (link["lost"], link["hole_bytes"]), reverse=True)[:_MOST]:
        lost = f", messages lost of {link['lost']} collectives" if link["lost"] else ""
        reason = f" ({link['reason']})" if link["reason"] else ""
        yield f"  {_ranks(link)}: {size_text(link['hole_bytes'])} never captured{lost}{reason}"
    if len(faulty) > _MOST:
        yield f"  {len(faulty) - _MOST} more links with losses"


def _ranks(link: Mapping[str, Any]) -> str:
    sender, receiver = ("?" if rank < 0 else str(rank) for rank in (link["sender"], link["receiver"]))
    return f"{sender}->{receiver}"


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST
    return ", ".join(texts[:_MOST]) + (f", {more} more" if more > 0 else "")


def _incomplete(group: Mapping[str, Any]) -> Iterator[str]:
    of = "an unknown number of" if group["world_size"] is None else str(group["world_size"])
    known = ", ".join(str(rank) for rank in group["known"][:_MOST])
    yield f"group {group['name']}: of {of} ranks only the listeners of {known} were seen: {_UNKNOWN_RANKS}"


def _strangers(report: Mapping[str, Any]) -> Iterator[str]:
    number = report["streams"]["strangers"]
    if not number:
        return
    yield f"{number} streams look like gloo but belong to no known group, so their ranks are unknown: {_UNKNOWN_RANKS}"
    for stream in report["strangers"][:_MOST]:
        facts = [f"{stream['messages']} messages"] if stream["messages"] else []
        if stream["hello"] is not None:
            facts.append(f"its sender is rank {stream['hello']}")
        if stream["max_tag"] >= 0:
            facts.append(f"tags up to {stream['max_tag']}")
        if stream["joined"]:
            facts.append("seen from the middle")
        yield f"  {stream['source']} -> {stream['destination']}: {', '.join(facts) or 'idle'}"


def _rest(report: Mapping[str, Any]) -> Iterator[str]:
    streams, frames, loss = report["streams"], report["frames"], report["loss"]
    not_tcp = frames["other_ip"] + frames["non_ip"]
    if streams["other"] or not_tcp:
        roce = "; NCCL over RoCE is UDP: see `flowcheck inspect`" if frames["other_ip"] > frames["tcp"] else ""
        yield (
            f"not gloo: {streams['other']} TCP streams with {size_text(streams['other_bytes'])}, "
            f"{not_tcp} frames that are not TCP{roce}"
        )
    borders = f", {loss['framing_lost']} times with the start of a message" if loss["framing_lost"] else ""
    yield f"loss: {_missing(loss)}{borders}"
    if loss["truncated_frames"]:
        yield f"  {loss['truncated_frames']} frames were cut short by the capture: raise its snapshot length"
    if loss["conflicting_copies"]:
        yield f"  {loss['conflicting_copies']} ranges of which two different copies were captured"
    if frames["damaged"]:
        yield f"  {frames['damaged']} frames are damaged or fragmented and were left out"
    if frames["unknown_linktype"]:
        yield f"  {frames['unknown_linktype']} frames have a link type that is not known here: capture Ethernet frames"
    if frames["flow_table_full"]:
        yield f"  {frames['flow_table_full']} frames found no room in the flow table: mirror fewer hosts"
    for source in report["sources"]:
        lost = source["drops"] + source["interface_drops"]
        advice = ": give --ring-mib more" if source["drops"] else ""
        yield (
            f"{source['name']}: {source['packets']} packets, {size_text(source['bytes'])}, "
            f"{lost} dropped by kernel or interface{advice}"
        )
        yield from (f"  {problem}" for problem in source["problems"])
        for name, spec in source["faults"].get("specs", {}).items():
            yield f"  FAULTS ARE INJECTED into {name}: {spec}: this is a rehearsal"
    yield from report["problems"]
