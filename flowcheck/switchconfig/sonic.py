"""SONiC (sonic-utilities, doc/Command-Reference.md)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

LOSSLESS = (3, 4)
"""Priorities that SONiC's default RoCE configuration makes lossless."""


class Sonic(Vendor):
    name = "sonic"
    title = "SONiC"
    pattern = re.compile(r"(Ethernet|PortChannel)\d{1,4}")
    examples = "Ethernet4, PortChannel001"
    limits = (
        "a session has one direction, and a monitor port belongs to one session.",
        "truncation and sampling (truncate_size, sample_rate) are attributes of a session: leave both off (0).",
        "the GRE type is 0x88be, on Mellanox 0x8949; flowcheck reads both.",
    )

    def check(self, request: MirrorRequest) -> None:
        if request.monitor and not request.monitor.startswith("Ethernet"):
            raise UsageError(f"sonic: {request.monitor} cannot be a monitor port: give a physical port (Ethernet4)")
        if request.tunnel is None and len(request.by_direction()) > 1:
            raise UsageError(
                "sonic: a monitor port takes one session and a session one direction: give every --source the same "
                "direction (both shows a superset), or use --erspan"
            )

    def configure(self, request: MirrorRequest) -> list[str]:
        return [*self._guard(request), "", *self._sessions(request), "sudo config save -y"]

    def verify(self, request: MirrorRequest) -> list[str]:
        port = [f"show pfc counters | grep -w {request.monitor}", f"show queue counters {request.monitor}"]
        return ["show mirror_session", *(port if request.monitor else [])]

    def remove(self, request: MirrorRequest) -> list[str]:
        sessions = [f"sudo config mirror_session remove {name}" for name, _, _ in self._named(request)]
        return [*sessions, "sudo config save -y"]

    def _named(self, request: MirrorRequest) -> list[tuple[str, str, str]]:
        return [
            (f"fc{request.session + number}", ",".join(ports), self.words[way])
            for number, (way, ports) in enumerate(request.by_direction())
        ]

    def _sessions(self, request: MirrorRequest) -> list[str]:
        if request.tunnel is None:
            return [
                f"sudo config mirror_session span add {name} {request.monitor} {ports} {way}"
                for name, ports, way in self._named(request)
            ]
        outer = f"{request.tunnel.source} {request.tunnel.destination} 8 64 0x88be 0"
        return [
            *self.note(
                "DSCP 8, TTL 64, GRE type, queue 0: the copies travel in a lossy class. On Mellanox write 0x8949."
            ),
            *(
                f"sudo config mirror_session erspan add {name} {outer} {ports} {way}"
                for name, ports, way in self._named(request)
            ),
        ]

    def _guard(self, request: MirrorRequest) -> list[str]:
        lines = self.note(GUARD)
        if request.monitor is None:
            return [
                *lines,
                *self.unsure(
                    "DSCP 8 must map to a lossy queue on every hop (DSCP_TO_TC_MAP and TC_TO_QUEUE_MAP in config_db); "
                    "never to 3 or 4, the usual lossless ones."
                ),
            ]
        return [
            *lines,
            *self.unsure("flow control off on the monitor port; name every priority that is lossless on this switch."),
            *(f"sudo config interface pfc priority {request.monitor} {number} off" for number in LOSSLESS),
            *self.unsure(
                "its queues lossy and capped at 1/8 of the free shared buffer (alpha = 2^-3); profile commands need "
                "the dynamic buffer model, elsewhere set BUFFER_QUEUE in config_db."
            ),
            "sudo config buffer profile add fc_mirror --size 0 --dynamic_th -3 --pool egress_lossy_pool",
            f"sudo config interface buffer queue set {request.monitor} 0-7 fc_mirror",
        ]
