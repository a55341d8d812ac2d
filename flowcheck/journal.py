"""The journal: one JSON line per applied step, for people, tests and dashboards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowcheck.errors import FlowcheckError
from flowcheck.linefile import LineFile


class Journal(LineFile):
    """A file of lines such as {run, epoch, step, confirmed, lag_ms, bytes, holes, digest}.

    Following the job matters more than its journal: see `LineFile` for what happens when the disk does not take them.
    Raises FlowcheckError if it cannot be opened.
    """

    def __init__(self, path: Path, report: Callable[[str], None], *, patient: bool = False) -> None:
        super().__init__(path, "the journal", report, patient=patient)
        try:
            self.open()
        except OSError as error:
            raise FlowcheckError(f"cannot write the journal {path}: {error.strerror}") from error

    def say(self, **fields: Any) -> None:
        """Append one line."""
        self.write(json.dumps(fields).encode() + b"\n")
