"""NVIDIA Cumulus Linux with NVUE (docs.nvidia.com: SPAN and ERSPAN; NVUE reference: Port Mirror)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor


class Cumulus(Vendor):
    name = "cumulus"
    title = "Cumulus Linux (NVUE)"
    pattern = re.compile(r"(swp\d{1,3}(s\d)?|eth\d)")
    examples = "swp1, swp1s0"
    sessions = range(8)
    limits = (
        "session ids are 0-7; a session has one direction, so both takes two sessions.",
        "eth0 cannot be a destination; ERSPAN is IPv4 only.",
        "mirrored traffic is not guaranteed: a congested monitor port discards copies.",
        "oversubscription may deplete the data plane's buffers: keep the sum of the sources below the monitor port.",
        "leave truncate unset (it cuts frames to 4-4088 bytes).",
    )
    words = {"in": "ingress", "out": "egress"}  # noqa: RUF012

    def check(self, request: MirrorRequest) -> None:
        if request.monitor and request.monitor.startswith("eth"):
            raise UsageError(f"cumulus: {request.monitor} cannot be a mirror's destination: give a switch port (swp2)")
        for source in request.sources:
            if source.port.startswith("eth"):
                raise UsageError(f"cumulus: {source.port} is no switch port: mirror swp ports")
        last = self._sessions(request)[-1][0]
        if last not in self.sessions:
            raise UsageError(
                f"cumulus: both directions take two sessions and ids end at 7: --session {request.session} is too high"
            )

    def configure(self, request: MirrorRequest) -> list[str]:
        lines = [*self._guard(request), ""]
        for number, way, ports in self._sessions(request):
            kind = "span" if request.tunnel is None else "erspan"
            prefix = f"nv set system port-mirror session {number} {kind}"
            lines += [f"{prefix} direction {way}", *(f"{prefix} source-port {port}" for port in ports)]
            if request.tunnel is None:
                lines.append(f"{prefix} destination {request.monitor}")
            else:
                lines += [
                    f"{prefix} destination source-ip {request.tunnel.source}",
                    f"{prefix} destination dest-ip {request.tunnel.destination}",
                ]
        return [*lines, "nv config apply", "nv config save"]

    def verify(self, request: MirrorRequest) -> list[str]:
        port = [f"nv show interface {request.monitor} qos", f"nv show interface {request.monitor} qos buffer"]
        return ["nv show system port-mirror session -o json", *(port if request.monitor else [])]

    def remove(self, request: MirrorRequest) -> list[str]:
        lines = [f"nv unset system port-mirror session {number}" for number, _, _ in self._sessions(request)]
        if request.monitor:
            lines.append(f"nv unset interface {request.monitor} qos egress-shaper")
        return [*lines, "nv config apply", "nv config save"]

    def _sessions(self, request: MirrorRequest) -> list[tuple[int, str, list[str]]]:
        used = [(way, request.ports(way, "both")) for way in ("in", "out")]
        found = [(self.words[way], ports) for way, ports in used if ports]
        return [(request.session + number, way, ports) for number, (way, ports) in enumerate(found)]

    def _guard(self, request: MirrorRequest) -> list[str]:
        if request.monitor is None:
            return [
                *self.note(GUARD),
                *self.unsure("the outer packets must travel in a lossy class on every hop (not the RoCE class)."),
            ]
        return [
            *self.note(GUARD),
            *self.unsure(
                f"`nv set qos roce` makes every port lossless: afterwards {request.monitor} must show no pfc and no "
                "link-pause; where the default still adds them, bind a pfc profile that has no switch-priority."
            ),
            f"nv unset interface {request.monitor} qos pfc",
            f"nv unset interface {request.monitor} qos link-pause",
            *self.unsure(
                "copies have no queue of their own: cap the traffic class that they leave in (0 unless remarked) with "
                "an egress shaper below the port's speed; RATE is in kbit/s."
            ),
            *self.note(
                "nv set qos egress-shaper fc-mirror traffic-class 0 max-rate RATE",
                f"nv set interface {request.monitor} qos egress-shaper profile fc-mirror",
            ),
        ]
