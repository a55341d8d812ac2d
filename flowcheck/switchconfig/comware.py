"""H3C Comware 7 (H3C: port mirroring and PFC configuration guides)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

KINDS = {
    "ge": "gigabitethernet",
    "xge": "ten-gigabitethernet",
    "wge": "twenty-fivegige",
    "fge": "fortygige",
    "hge": "hundredgige",
    "thge": "twohundredgige",
    "fhge": "fourhundredgige",
    "bagg": "bridge-aggregation",
}
PORT = re.compile(
    rf"(?P<kind>{'|'.join([*KINDS, *KINDS.values()])}) ?(?P<number>\d{{1,3}}(/\d{{1,3}}){{0,3}}(:\d)?)", re.IGNORECASE
)
QUEUES = range(8)


class Comware(Vendor):
    name = "comware"
    title = "H3C Comware 7"
    pattern = PORT
    examples = "HundredGigE1/0/1, ten-gigabitethernet 1/0/1"
    sessions = range(1, 16)
    words = {"in": "inbound", "out": "outbound", "both": "both"}  # noqa: RUF012
    tunnel_needs_port = True
    limits = (
        "one monitor port per local group, and a port is the source of only one group; aggregates: mirror the members.",
        "group ids are 1-15 on S12500X-AF.",
        "encapsulated mirrors (GRE 0x88be) take inbound copies only on the documented series.",
        "an inbound copy keeps its VLAN tag, an outbound copy carries the tag of the egress interface.",
        "two source ports that carry the same packet give it twice; flowcheck compares and drops the second.",
        "never make the monitor port an RSPAN reflector port: that wipes its configuration.",
    )

    def port(self, text: str) -> str:
        super().port(text)
        found = PORT.fullmatch(text)
        assert found is not None
        kind = found["kind"].lower()
        kind = KINDS.get(kind, kind)
        if kind == "bridge-aggregation":
            raise UsageError(f"comware: {text} is an aggregate, which no group can hold: give its member ports")
        if "/" not in found["number"]:
            raise UsageError(f"comware: {text!r} is no port name here (such as {self.examples})")
        return f"{kind} {found['number']}"

    def check(self, request: MirrorRequest) -> None:
        if request.tunnel is not None and request.ports("out", "both"):
            raise UsageError(
                "comware: encapsulated mirrors copy inbound frames only: write PORT:in, and take the other half from a "
                "second node's PORT:in"
            )

    def configure(self, request: MirrorRequest) -> list[str]:
        group = f" mirroring-group {request.session}"
        outer = ""
        if request.tunnel is not None:
            outer = f" destination-ip {request.tunnel.destination} source-ip {request.tunnel.source}"
        return [
            "system-view",
            *self._guard(request),
            f"{group} local",
            *(f"{group} mirroring-port {' '.join(ports)} {self.words[way]}" for way, ports in request.by_direction()),
            f"{group} monitor-port {request.monitor}{outer}",
            " quit",
            "save force",
        ]

    def verify(self, request: MirrorRequest) -> list[str]:
        return [
            f"display mirroring-group {request.session}",
            f"display priority-flow-control interface {request.monitor}",
            f"display qos queue-statistics interface {request.monitor} outbound",
        ]

    def remove(self, request: MirrorRequest) -> list[str]:
        plain = ["  stp enable"] if request.tunnel is None else []
        return [
            "system-view",
            f" undo mirroring-group {request.session}",
            f" interface {request.monitor}",
            "  undo qos wred apply",
            *plain,
            "  quit",
            " undo qos wred queue table fc-mirror",
            " quit",
            "save force",
        ]

    def _guard(self, request: MirrorRequest) -> list[str]:
        stp = ["  undo stp enable"]
        if request.tunnel is not None:
            stp = self.note("this port must carry copies only: its queues become lossy")
        return [
            *self.note(GUARD),
            *self.unsure("every queue of the monitor port is lossy and capped: full drop at 512 cells."),
            " qos wred queue table fc-mirror",
            *(f"  queue {queue} drop-level 0 low-limit 256 high-limit 512 discard-probability 100" for queue in QUEUES),
            "  quit",
            f" interface {request.monitor}",
            *stp,
            "  qos wred apply fc-mirror",
            *self.unsure("flow control off on the monitor port."),
            "  undo flow-control",
            "  undo priority-flow-control",
            "  quit",
        ]
