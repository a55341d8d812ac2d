"""Huawei CloudEngine (Huawei: port mirroring command reference and examples)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

PORT = re.compile(
    r"(?P<kind>(10|25|40|50|100|200|400|800)?ge) ?(?P<number>\d{1,3}/\d{1,3}/\d{1,3}(:\d)?)", re.IGNORECASE
)


class CloudEngine(Vendor):
    name = "cloudengine"
    title = "Huawei CloudEngine"
    pattern = PORT
    examples = "100GE1/0/1, 400ge 1/0/4"
    sessions = range(1, 9)
    words = {"in": "inbound", "out": "outbound", "both": "both"}  # noqa: RUF012
    limits = (
        "observing-port indices are 1-8; several observing ports may watch one port.",
        "make mirrored and observing ports the same link type and bandwidth.",
        "outbound copies may show VLAN-mapped frames.",
        "S series and VRP5 write `port-mirroring to observe-port N both`.",
    )

    def port(self, text: str) -> str:
        super().port(text)
        found = PORT.fullmatch(text)
        assert found is not None
        return f"{found['kind'].lower()} {found['number']}"

    def check(self, request: MirrorRequest) -> None:
        if request.tunnel is not None:
            raise UsageError(
                "cloudengine: no verified syntax for an encapsulated observing port: use --monitor, or a Linux host "
                "behind the monitor port (vendor linux) that forwards"
            )

    def configure(self, request: MirrorRequest) -> list[str]:
        lines = [
            "system-view",
            *self._guard(request.monitor or ""),
            f" observe-port {request.session} interface {request.monitor}",
        ]
        for source in request.sources:
            way = self.words[source.direction]
            lines += [
                f" interface {source.port}",
                f"  port-mirroring observe-port {request.session} {way}",
                "  quit",
            ]
        return [*lines, " commit", " quit", "save"]

    def verify(self, request: MirrorRequest) -> list[str]:
        return [
            "display port-mirroring",
            f"display dcb pfc interface {request.monitor}",
            f"display qos queue statistics interface {request.monitor}",
        ]

    def remove(self, request: MirrorRequest) -> list[str]:
        lines = ["system-view"]
        for source in request.sources:
            way = self.words[source.direction]
            lines += [
                f" interface {source.port}",
                f"  undo port-mirroring observe-port {request.session} {way}",
                "  quit",
            ]
        return [
            *lines,
            f" undo observe-port {request.session}",
            f" interface {request.monitor}",
            *(f"  undo qos queue {queue} wred" for queue in range(8)),
            "  quit",
            " undo drop-profile fc-mirror",
            " commit",
            " quit",
            "save",
        ]

    def _guard(self, monitor: str) -> list[str]:
        return [
            *self.note(GUARD),
            *self.unsure("every queue of the monitor port is lossy and capped."),
            " drop-profile fc-mirror",
            "  color green low-limit 10 high-limit 20 discard-percentage 100",
            "  quit",
            f" interface {monitor}",
            *(f"  qos queue {queue} wred fc-mirror" for queue in range(8)),
            *self.unsure("flow control off on the monitor port."),
            "  undo flow-control",
            "  undo dcb pfc enable",
            "  quit",
        ]
