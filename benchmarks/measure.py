"""What the benchmarks need: the machine in words, statistics of repeated timings, tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> str:
    """One line on the machine and the versions that the figures depend on."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "CPU")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numba", "numpy"))
    system = f"Linux {platform.release()}, Python {platform.python_version()}, {versions}"
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; {system}"


def load() -> float:
    """Processes that wanted a core in the last minute: above 0 before a benchmark means noise."""
    return os.getloadavg()[0]


def options(purpose: str | None, quick: str) -> argparse.ArgumentParser:
    """A benchmark's command line: what every one of them takes. purpose: its docstring; quick: what --quick means."""
    parser = argparse.ArgumentParser(description=(purpose or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    return parser


def show(as_json: bool, here: str, busy: float, results: list[Any], text: str) -> None:
    """Print results (dataclasses) of a run on machine `here`, or their tables `text`. busy: the load before."""
    if as_json:
        print(json.dumps({"machine": here, "load": busy, "results": [asdict(r) for r in results]}))
    else:
        print(f"{here}\nload before: {busy:.1f}\n\n{text}")


def tail(path: Path, lines: int = 15) -> str:
    """The end of a lab's output, to go with an error."""
    return "".join(f"  {line}\n" for line in path.read_text(errors="replace").splitlines()[-lines:])


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> str:
    """Median, and in brackets the least and the greatest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text; first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
