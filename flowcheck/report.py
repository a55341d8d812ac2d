"""`flowcheck status` for people: the few lines that tell whether the next failure would cost anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def status_text(status: Mapping[str, Any]) -> str:
    """A short text from the daemon's status. Unknown values show as a dash."""
    lines = []
    for job in status["jobs"] or [status]:
        if job["run"] is None:
            lines.append("no job is attached and the store holds no step")
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
        lines += [f"  not bit-exact: {reason}" for reason in job["reasons"]]
        lag = "-" if job["lag_ms"] is None else f"{job['lag_ms']:.1f} ms"
        lines.append(
            f"  coverage {100 * job['coverage']:.1f} %, lag {lag}, holes {job['holes']} B, "
            f"memory {job['memory_bytes'] / 1e6:.1f} MB"
        )
    lines.append(f"captured {status['packets']} packets, {status['bytes'] / 1e6:.1f} MB, {status['drops']} dropped")
    if status["failure"]:
        lines.append(f"capture failed: {status['failure']}")
    return "\n".join(lines)
