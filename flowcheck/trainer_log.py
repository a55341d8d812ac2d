"""What a job's trainers told the daemon, beside its job file: with a capture, all that a replay needs.

One JSON object a line, each with the `time` of its arrival (ns since the epoch):

    {"time", "attached": true}         the attach was acknowledged after this moment
    {"time", "layout": {...}}          the rebuilt bucket layout as DDP reports it, see `flowcheck.protocol`
    {"time", "link": true | false}     the connection on which markers come stands again, or is gone
    {"time", "last": step}             the trainers' handle was closed after this step
    {"time", "step", ...}              a step marker, see `reconstruct.markers`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowcheck import jobfile
from flowcheck.description import DescriptionError
from flowcheck.errors import BadConfig
from flowcheck.protocol import check_layout
from flowcheck.values import integer
from reconstruct.markers import MAX_STEP, parse_marker
from reconstruct.steps import StepTracker

Word = Callable[[StepTracker], None]


@dataclass(slots=True)
class TrainerLog:
    """attached: when the job attached, None if the file does not say; words: what to tell a tracker at which time."""

    attached: int | None = None
    words: list[tuple[int, Word]] = field(default_factory=list)


def read(path: Path) -> TrainerLog:
    """The log beside a job file; an empty one if there is none. BadConfig names file and line of what does not fit."""
    log = TrainerLog()
    for number, record in enumerate(jobfile.read_markers(path), 1):
        time = record.pop("time", None)
        if type(time) is not int:
            raise BadConfig(f"{path}:{number}: a line without its time of arrival")
        if "attached" in record:
            log.attached = time
            continue
        try:
            log.words.append((time, _word(record, time)))
        except DescriptionError as error:
            raise BadConfig(f"{path}:{number}: {error}") from None
    return log


def _word(record: Mapping[str, Any], time: int) -> Word:
    if "layout" in record:
        layout = check_layout(record["layout"])
        return lambda tracker: tracker.reported_layout(layout["buckets"], layout["bucket_bytes"])
    if "link" in record:
        alive = record["link"] is True
        return lambda tracker: tracker.linked(alive)
    if "last" in record:
        last = integer(record["last"], "last", 0, MAX_STEP)
        return lambda tracker: tracker.ends(last)
    marker = parse_marker(record)
    return lambda tracker: tracker.marker(marker, time)
