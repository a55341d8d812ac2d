"""`flowcheck status` for people: the few lines that tell whether the next failure would cost anything."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from flowcheck.observation import size_text
from reconstruct.unknown import Unknown

MOST_PLACES = 8


def status_text(status: Mapping[str, Any]) -> str:
    """A short text from the daemon's status. Unknown values show as a dash."""
    lines = []
    for job in status["jobs"] or [status]:
        if job["run"] is None:
            unread = any(disk["problem"] for disk in status.get("disks", ()))
            lines.append("no job is attached" + ("" if unread else " and the store holds no step"))
            continue
        behind = (job["job_step"] or 0) - job["step"]
        marks = ["confirmed" if job["confirmed"] else "not confirmed"] if job["confirmed"] is not None else []
        if job["exact"] is not None:
            marks.append("bit-exact" if job["exact"] else "not bit-exact")
        lines.append(
            f"run {job['run']} epoch {job['epoch']}: step {job['step']}"
            + (f", {behind} behind the job" if behind > 0 else "")
            + (f" ({', '.join(marks)})" if marks else "")
        )
        if job["frozen"]:
            lines.append(f"  {job['frozen']}")
        if job["unseen"]:
            lines.append(f"  {job['unseen']}")
        lines += _unknown(job)
        lines += [f"  not bit-exact: {reason}" for reason in job["reasons"]]
        if job.get("unstored_since") is not None:
            newest = "nothing" if job["persisted"] is None else f"step {job['persisted']}"
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["unstored_since"]))
            lines.append(f"  nothing was stored since {since}, {newest} is: {job['unstored_reason']}")
        lag = "-" if job["lag_ms"] is None else f"{job['lag_ms']:.1f} ms"
        lines.append(
            f"  coverage {100 * job['coverage']:.1f} %, lag {lag}, holes {job['holes']} B, "
            f"memory {job['memory_bytes'] / 1e6:.1f} MB"
        )
    lines.append(f"captured {status['packets']} packets, {status['bytes'] / 1e6:.1f} MB, {status['drops']} dropped")
    loss = status.get("loss")  # empty at first; a daemon that only observes has a report of its own
    if loss and loss["likely"]:
        sums = ", ".join(f"{cause} {size_text(count)}" for cause, count in loss["bytes"].items() if count)
        lines.append(f"lost: {sums}. {loss['likely']}")
        lines.append(f"  do: {loss['remedy']}")
    if loss:
        refused = {name: counts["refused"] for name, counts in loss["checksums"].items() if counts["refused"]}
        if refused:
            counts = " and ".join(f"{count} by {name.upper()}" for name, count in refused.items())
            lines.append(f"refused as damaged: frames with a wrong checksum, {counts}; the log says what to do")
    for source in status["sources"]:
        for name, spec in source["faults"].get("specs", {}).items():
            lines.append(f"FAULTS ARE INJECTED into {name}: {spec}: this is a rehearsal")
    for disk in status.get("disks", ()):
        if disk["problem"] is not None or disk["missing"]:
            lines.append(_disk(disk))
    remote = status.get("remote")
    if remote is not None:
        there = "nothing" if remote["step"] is None else f"run {remote['run']} step {remote['step']}"
        behind = "" if remote["problem"] is None else f"; not brought up to date: {remote['problem']}"
        lines.append(f"{remote['url']}: {there}{behind}")
    lines += _refused(status.get("control", {}), status["version"])
    if status["failure"]:
        lines.append(f"capture failed: {status['failure']}")
    return "\n".join(lines)


def _disk(disk: Mapping[str, Any]) -> str:
    """A file that the daemon writes behind, which lacks lines or does not move."""
    said = [] if disk["problem"] is None else [disk["problem"]]
    if disk["missing"]:
        said.append(f"{disk['missing']} lines are missing")
    return f"{disk['name']}: {', '.join(said)}: check the disk"


def _refused(control: Mapping[str, Any], version: str) -> list[str]:
    """Who wanted something of the daemon since its start and did not get it, and what to do."""
    last = {"connections": "-", "messages": "-", **control.get("last_refused", {})}
    texts = {
        "refused_connections": "connections of keys that are not authorized, last: {connections}: put the client's "
        "public key into the daemon's authorized/",
        "refused_messages": "messages without the right to them, last: {messages}: give that client a key that may "
        "write, or write rights = \"write\" into its file in authorized/",
        "bad_handshakes": "connections without a key or with another daemon's: point FLOWCHECK_KEY there to a client's "
        "file of this daemon",
        "malformed": "messages that are none or do not fit: run flowcheck {version} there too, and let only the job's "
        "network reach the port",
    }
    return [
        f"REFUSED: {control[name]} {text.format(**last, version=version)}"
        for name, text in texts.items()
        if control.get(name)
    ]


def _unknown(job: Mapping[str, Any]) -> list[str]:
    """What of a job's live step is not known, and what was repaired and compared."""
    lines = []
    unknown, repair, compared = job["unknown"], job["repair"], job["compared"]
    if unknown["elements"]:
        known = "no step is fully known" if job["known_step"] is None else f"step {job['known_step']} is fully known"
        lines.append(f"  {unknown['elements']} elements are unknown since step {unknown['since']}; {known}")
        lines += [f"    {place}" for place in unknown["where"]]
    if repair is not None and repair["asked"]:
        lines.append(
            f"  {job['agents']} ranks answer: {repair['repaired']} elements repaired, {repair['compared']} compared, "
            f"{repair['bytes'] / 1e6:.1f} MB asked for"
            + (f"; {repair['differences']} DIFFERED" if repair["differences"] else "")
            + (f"; refused: {repair['refusal']}" if repair["refusal"] and unknown["elements"] else "")
        )
    elif repair is not None and not job["agents"]:
        lines.append("  no rank answers: nothing can be repaired")
    if compared is not None and compared["problem"] is None:
        differing = len(compared["differing"]) + compared["more"]
        verdict = f"{differing} TENSORS DIFFER" if differing else "equal to the bit"
        lines.append(f"  compared with rank {compared['rank']} at step {compared['step']}: {verdict}")
    return lines


def places(unknown: Unknown, most: int = MOST_PLACES) -> list[str]:
    """The first unknown ranges as texts, such as "layer.weight[128:490] since step 7"."""
    texts = (
        f"{key.partition('/')[2]}[{lo}:{hi}] since step {since}"
        for key, ranges in unknown.items()
        for lo, hi, since in ranges
    )
    return list(itertools.islice(texts, most))
