"""What all vendors have in common: names checked, limits as comments, the parts of a script in order."""

from __future__ import annotations

import re
import textwrap
from typing import ClassVar

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest, Source, merged

WIDTH = 110
GUARD = (
    "Copies may be lost, training may not be slowed: on the way to the checkpoint node no queue is lossless and no "
    "pause frame is honoured or sent, so that a slow node can only lose copies."
)
"""Why flow control goes off before the first copy leaves; every script says it once."""
AFTERWARDS = (
    "Flow control and queues of the monitor port stay as they are now: set them back before that port carries training."
)


class Vendor:
    """One vendor's syntax. Subclasses give names, limits and three lists of lines."""

    name: ClassVar[str]
    title: ClassVar[str]
    comment: ClassVar[str] = "#"
    pattern: ClassVar[re.Pattern[str]]
    examples: ClassVar[str]
    limits: ClassVar[tuple[str, ...]]
    sessions: ClassVar[range] = range(1, 1000)
    words: ClassVar[dict[str, str]] = {"in": "rx", "out": "tx", "both": "both"}
    tunnel_needs_port: ClassVar[bool] = False
    has_queues: ClassVar[bool] = True

    def port(self, text: str) -> str:
        """The port's name as this vendor's commands write it. Raises UsageError."""
        if not self.pattern.fullmatch(text):
            raise UsageError(
                f"{self.name}: {text!r} is no port name here (such as {self.examples}); directions are :in, :out, :both"
            )
        return text

    def check(self, request: MirrorRequest) -> None:
        """Raise UsageError for what this vendor cannot do. Names are canonical here."""

    def configure(self, request: MirrorRequest) -> list[str]:
        raise NotImplementedError

    def verify(self, request: MirrorRequest) -> list[str]:
        raise NotImplementedError

    def remove(self, request: MirrorRequest) -> list[str]:
        raise NotImplementedError

    def note(self, *sentences: str) -> list[str]:
        """Comment lines."""
        first = f"{self.comment} "
        wrapped = (
            textwrap.wrap(s, WIDTH, initial_indent=first, subsequent_indent=first + "  ", break_on_hyphens=False)
            for s in sentences
        )
        return [line for lines in wrapped for line in lines]

    def unsure(self, what: str) -> list[str]:
        """The comment before commands that differ between releases."""
        return self.note(f"check on your release: {what}")

    def prepare(self, request: MirrorRequest) -> MirrorRequest:
        """The request with canonical port names. Raises UsageError where it cannot be done."""
        if not request.sources:
            raise UsageError("nothing to mirror: give --source PORT[:in|out|both], once per port")
        if request.monitor is None and request.tunnel is None:
            raise UsageError("copies need a way out: give --monitor PORT or --erspan SRC_IP DST_IP")
        if request.session not in self.sessions:
            first, last = self.sessions[0], self.sessions[-1]
            raise UsageError(f"{self.name}: --session {request.session} is out of range: it has {first}-{last}")
        sources = merged(Source(self.port(source.port), source.direction) for source in request.sources)
        monitor = None if request.monitor is None else self.port(request.monitor)
        if monitor in {source.port for source in sources}:
            raise UsageError(f"{monitor} is both a source and the monitor port: copies would be copied again")
        if request.tunnel is not None and (monitor is not None) != self.tunnel_needs_port:
            raise UsageError(
                f"{self.name}: encapsulated copies leave by a port of their own here: add --monitor PORT to --erspan"
                if self.tunnel_needs_port
                else "give --monitor or --erspan, not both: copies go one way"
            )
        prepared = MirrorRequest(sources, monitor, request.tunnel, request.session)
        self.check(prepared)
        return prepared

    def script(self, request: MirrorRequest, remove: bool = False) -> str:
        """The whole text for `request`: configuration, limits, guard and checks, or with `remove` its end.

        Raises UsageError, one line, for what this vendor cannot do.
        """
        request = self.prepare(request)
        target = request.monitor if request.tunnel is None else f"{request.tunnel.destination} (encapsulated)"
        sources = ", ".join(f"{source.port} {source.direction}" for source in request.sources)
        lines = self.note(f"{self.title}: {'end the mirror of' if remove else 'mirror'} {sources} -> {target}")
        if remove:
            after = self.note(AFTERWARDS) if request.monitor and self.has_queues else []
            return "\n".join([*lines, *self.remove(request), *after]) + "\n"
        lines += self.note("in: what the host behind the port sends; out: what it receives", *self._limits(request))
        parts = [lines, self.configure(request), self.note("verify") + self.verify(request)]
        return "\n\n".join("\n".join(part) for part in parts) + "\n"

    def _limits(self, request: MirrorRequest) -> list[str]:
        count = request.directions
        load = (
            f"limit: {count} mirrored direction{'s' if count > 1 else ''} can bring up to {count} x the line rate of a "
            "source; copies beyond the speed of the way out are dropped. Mirror the fewest directions that show all "
            "chunks."
        )
        mtu = [
            "limit: the outer headers make frames longer; the whole path needs the MTU for them (4096-byte RoCE: at "
            "least 4300), else every full-sized copy is dropped."
        ]
        return [load, *(mtu if request.tunnel else []), *(f"limit: {text}" for text in self.limits)]
