"""The journal: one JSON line per applied step, for people, tests and dashboards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowcheck.errors import FlowcheckError


class Journal:
    """Appends lines {run, epoch, step, confirmed, lag_ms, bytes, holes, digest} to a file.

    A line is written whole and flushed at once. A write that fails (disk full) is reported once through `problem`
    and the daemon goes on: following the job matters more than its journal.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise FlowcheckError(f"cannot write the journal {path}: {error.strerror}") from error
        self.problem: str | None = None

    def write(self, **fields: Any) -> None:
        try:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()
        except OSError as error:
            self.problem = f"the journal lacks lines: {error.strerror}"

    def close(self) -> None:
        self._file.close()
