"""The journal: one JSON line per applied step, for people, tests and dashboards."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from flowcheck.errors import FlowcheckError


class Journal:
    """Appends lines {run, epoch, step, confirmed, lag_ms, bytes, holes, digest} to a file.

    Every line is handed to the kernel whole, at once. A line that cannot be written (disk full) is left out, without a
    trace in the file, and said in `problem`; the daemon goes on: following the job matters more than its journal.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise FlowcheckError(f"cannot write the journal {path}: {error.strerror}") from error
        self.path = path
        self.missing = 0  # lines left out
        self.problem: str | None = None

    def write(self, **fields: Any) -> bool:
        """Append one line; False if it had to be left out."""
        line = json.dumps(fields).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written == len(line):
                return True
            reason = "no space left"
            with contextlib.suppress(OSError):  # a pipe keeps what it got
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
        except OSError as error:
            reason = str(error.strerror)
        self.missing += 1
        self.problem = f"the journal {self.path} lacks {self.missing} lines: {reason}"
        return False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
