"""Files of lines that are appended by a thread of their own: who says a line never waits for the disk.

Every line is handed to the kernel whole, at once. A line that the disk does not take is left out without a trace in
the file, and the next one is tried; on a disk that hangs a bounded number of lines waits and others are left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_LINE = 16 << 20
MOST_LINES = 8192
MOST_BYTES = 2 * MAX_LINE
"""Lines that wait for the disk, and their bytes; beyond them new ones are left out."""
STALL_SECONDS = 5.0
"""A disk that takes a line for so long is said not to answer, and is waited for no longer at the end."""
PATIENCE_SECONDS = 60.0
"""How long a patient one waits for room."""


class LineFile:
    """One file of lines. `write` and `finish` never wait; errors of the disk go to `report`, one line for people when
    lines begin to be missing and one when they come through again.

    name: such as "the journal"; patient: `write` waits for room instead (for recordings, which wait too).
    """

    def __init__(self, path: Path, name: str, report: Callable[[str], None], *, patient: bool = False) -> None:
        self.path = path
        self.missing = 0  # lines left out altogether
        self._name = f"{name} {path}"
        self._report = report
        self._patient = patient
        self._file = -1
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()  # the first of them is under way
        self._bytes = 0
        self._gap = 0  # lines left out since the last one that was written
        self._reason = ""
        self._since: float | None = None  # when the line that is under way was begun
        self._ending = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Open the file now; otherwise the first line does. Raises OSError."""
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, line: bytes) -> None:
        """Append a line, which ends in a line feed, as soon as the disk takes it."""
        with self._changed:
            if self._ending:
                return
            if self._patient:
                self._changed.wait_for(self._room, PATIENCE_SECONDS)
            if not self._room():
                return self._leave_out("the disk does not answer")
            self._waiting.append(line)
            self._bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _room(self) -> bool:
        return len(self._waiting) < MOST_LINES and self._bytes < MOST_BYTES

    def status(self) -> dict[str, Any]:
        """{"name", "waiting": lines, "missing": lines left out so far, "problem": None or what is wrong now}."""
        with self._changed:
            stalled = 0.0 if self._since is None else time.monotonic() - self._since
            problem = None
            if stalled > STALL_SECONDS:
                problem = f"the disk does not answer for {stalled:.0f} s"
            elif self._gap:
                problem = self._reason
            return {"name": self._name, "waiting": len(self._waiting), "missing": self.missing, "problem": problem}

    def finish(self) -> None:
        """No line follows: the file is closed once those that wait are written."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            if self._thread is None:
                self._close()

    def close(self) -> None:
        """Finish, and wait for the disk as long as it moves."""
        self.finish()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.05)
            since = self._since
            if since is not None and time.monotonic() - since > STALL_SECONDS:
                with self._changed:
                    self._report(f"{self._name}: {len(self._waiting)} lines are given up, the disk does not answer")
                return

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return self._close()
                line, self._since = self._waiting[0], time.monotonic()
            reason = None
            try:
                self._append(line)
            except OSError as error:
                reason = error.strerror or str(error)
            with self._changed:
                self._since = None
                self._waiting.popleft()
                self._bytes -= len(line)
                self._changed.notify_all()
                if reason is not None:
                    self._leave_out(reason)
                elif self._gap and not self._waiting:
                    self._report(f"{self._name}: lines are written again, {self._gap} are missing")
                    self._gap = 0

    def _leave_out(self, reason: str) -> None:
        self.missing += 1
        self._gap += 1
        self._reason = reason
        if self._gap == 1:
            self._report(f"{self._name}: lines are missing in it from now on: {reason}")

    def _append(self, line: bytes) -> None:
        if self._file < 0:
            self.open()
        size = os.fstat(self._file).st_size  # 0 of a pipe or a device
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # what was torn must not tear the next line too
            os.ftruncate(self._file, self._end_of_lines(size))
        written = os.write(self._file, line)
        if written != len(line):
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _end_of_lines(self, size: int) -> int:
        start = max(0, size - MAX_LINE)
        return start + os.pread(self._file, size - start, start).rfind(b"\n") + 1

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
