"""Output of many processes on one terminal: whole lines, each with the name of who wrote it."""

from __future__ import annotations

import os

# A longer line is cut here, so that a process that never ends a line cannot fill the memory.
MAX_LINE = 64 * 1024


class LinePrefixer:
    """Takes raw output in pieces and writes `[name] line` to a descriptor.

    A carriage return ends a line too: progress bars of several ranks cannot share one line of the screen.
    A reader that went away is not an error; the output is dropped from then on.
    """

    def __init__(self, name: str, out: int) -> None:
        self._prefix = f"[{name}] ".encode()
        self._out = out
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> None:
        if not data:
            return
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]  # the other half of a line end that came in two pieces
        self._after_return = data.endswith(b"\r")
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        self._write(lines)

    def close(self) -> None:
        """Write what is left of a last line without an end."""
        if self._rest:
            self._write([self._rest])
        self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if not lines or self._out < 0:
            return
        data = b"".join(self._prefix + line + b"\n" for line in lines)
        try:
            write_all(self._out, data)
        except OSError:
            self._out = -1


def write_all(out: int, data: bytes) -> None:
    """Write all of `data` to a descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]
