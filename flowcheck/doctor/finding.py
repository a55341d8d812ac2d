"""One finding of `flowcheck.doctor`, and all of them as text and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["OK", "PROBLEM", "WARNING", "Finding", "as_dict", "as_text", "healthy"]

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_ORDER = (PROBLEM, WARNING, OK)
_WIDTH = 118


@dataclass(frozen=True, slots=True)
class Finding:
    """name: for scripts; severity: OK, WARNING (works, could be better) or PROBLEM (must be changed); sentence: what is
    so; remedy: what to do or type, empty where nothing is to be done."""

    name: str
    severity: str
    sentence: str
    remedy: str = ""


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing must be changed."""
    return all(finding.severity != PROBLEM for finding in findings)


def as_dict(source: str, findings: Sequence[Finding], figures: dict[str, Any]) -> dict[str, Any]:
    """For scripts. figures: what was counted, by name."""
    return {
        "source": source,
        "healthy": healthy(findings),
        "findings": [asdict(finding) for finding in findings],
        "figures": figures,
    }


def as_text(source: str, findings: Sequence[Finding]) -> str:
    """For people: what must be changed first."""
    count = {severity: sum(finding.severity == severity for finding in findings) for severity in _ORDER}
    if healthy(findings):
        lines = [f"HEALTHY: {source}" + (f" ({_some(count[WARNING], 'warning')})" if count[WARNING] else "")]
    else:
        lines = [f"NOT HEALTHY: {source}: {_some(count[PROBLEM], 'problem')}, {_some(count[WARNING], 'warning')}"]
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.severity)):
        head = f"{finding.severity:<8} {finding.name}: "
        lines += textwrap.wrap(head + finding.sentence, _WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)
        if finding.remedy:
            lines += textwrap.wrap("do: " + finding.remedy, _WIDTH, initial_indent=" " * 9,
                                   subsequent_indent=" " * 13, break_on_hyphens=False)
    return "\n".join(lines)


def _some(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
