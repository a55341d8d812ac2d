"""`flowcheck doctor`: look at a mirror for some seconds, or at a recording, and say what to change."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowcheck.errors import UsageError

if TYPE_CHECKING:
    from flowcheck.doctor.exam import Examination
    from mirror.block import Source
    from reconstruct.nccl.group import NcclGroup

_RING_DELAY = 50_000_000
_EXPIRE_EVERY = 10_000_000
_QUIET_SECONDS = 0.3
_DRAIN_SECONDS = 5.0


@click.command("doctor")
@click.option("-i", "--interface", metavar="IFACE", help="Capture from this mirror port.")
@click.option(
    "-r", "--read", "files", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="Read recorded frames (pcap, pcapng) instead; several are merged by time.",
)  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="S",
              help="How long to capture: at least one step of the job.")
@click.option("--vantage", multiple=True, metavar="NAME=MEMBER,...",
              help="Interfaces and tunnels that see the same fabric, as for the daemon.")
@click.option("--job", type=click.Path(path_type=Path), metavar="FILE",
              help="Job file: whose rings and trees these are (NCCL), to say which chunks pass.")
@click.option("--ring-mib", type=click.IntRange(4, 65536), default=256, show_default=True, help="Capture ring size.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor_command(
    interface: str | None,
    files: tuple[Path, ...],
    seconds: float,
    vantage: tuple[str, ...],
    job: Path | None,
    ring_mib: int,
    as_json: bool,
) -> int:
    """Whether a mirror delivers what is needed, and what to change.

    Run it while the job trains. Exit status 0: healthy. 1: something must be changed. 2: the options contradict each
    other.
    """
    if (interface is None) == (not files):
        raise UsageError("give either -i IFACE to capture or -r FILE to read a recording")
    from flowcheck.doctor import finding as report
    from flowcheck.doctor import nic
    from flowcheck.doctor.diagnose import diagnose
    from flowcheck.doctor.exam import Examination
    from flowcheck.vantages import Vantages
    from mirror.afpacket import AfPacketSource
    from mirror.capfile import CaptureFileSource

    name = interface or ", ".join(map(str, files))
    names = [name] if interface else [str(file) for file in files]
    own, other = (Vantages(vantage, names).table for _ in range(2))
    exam = Examination(vantages=(own, other), group=None if job is None else _communicator(job))
    settings: nic.Settings | None = None
    source: Source
    if interface is None:
        source = CaptureFileSource(list(files))
        now = _read(exam, source)
    else:
        exam.warm_up()
        source = AfPacketSource(interface, blocks=max(2, ring_mib), vantage=own.of_interface(interface))
        now = _capture(exam, source, seconds)
        settings = nic.read(interface)
    exam.flush(now)
    seen = exam.seen(name, live=interface is not None, counters=source.counters(), problems=source.problems)
    source.close()
    findings = diagnose(seen, settings)
    if as_json:
        figures: dict[str, Any] = {**asdict(seen), "interface": None if settings is None else asdict(settings)}
        click.echo(json.dumps(report.as_dict(name, findings, figures)))
    else:
        click.echo(report.as_text(name, findings))
    return 0 if report.healthy(findings) else 1


def _communicator(job: Path) -> NcclGroup | None:
    """The job's NCCL communicator; None for another library's, or where the file does not tell its rings."""
    from flowcheck import jobfile
    from flowcheck.groups import nccl_group

    record = jobfile.describe(job).group
    return nccl_group(record.name, record) if record.nccl is not None and record.nccl.rings else None


def _read(exam: Examination, source: Source) -> int:
    """The whole recording; the time of its last frame."""
    now = 0
    while not source.finished:
        now = max(now, _round(exam, source, 0))
    return now


def _capture(exam: Examination, source: Source, seconds: float) -> int:
    """`seconds` of capture, and what the ring still holds then; the time up to which all was read."""
    start = time.monotonic()
    now = expired = 0
    quiet = start + seconds + _QUIET_SECONDS
    while (at := time.monotonic()) < min(quiet, start + seconds + _DRAIN_SECONDS):
        asked = time.time_ns()
        last = _round(exam, source, 0.05)
        if last:
            now = max(now, last)
            if at > start + seconds:
                quiet = at + _QUIET_SECONDS
            continue
        now = max(now, asked - _RING_DELAY)
        if now - expired > _EXPIRE_EVERY:
            exam.expire(now)
            expired = now
    return now


def _round(exam: Examination, source: Source, timeout: float) -> int:
    """Read one block; the time of its last frame, 0 if there was none."""
    block = source.read(timeout)
    if block is None:
        return 0
    try:
        last = int(block.ts.max())
        exam.feed(block, last)
        return last
    finally:
        source.release(block)
