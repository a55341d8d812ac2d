"""Juniper Junos (Juniper: port mirroring and analyzers, ACX7000 and QFX)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

PORT = re.compile(r"(?P<port>(ge|xe|et)-\d{1,2}/\d{1,2}/\d{1,3}(:\d)?|ae\d{1,4})(\.(?P<unit>\d{1,5}))?")
MAX_INGRESS, MAX_EGRESS = 16, 8


class Junos(Vendor):
    name = "junos"
    title = "Juniper Junos"
    pattern = PORT
    examples = "et-0/0/4, et-0/0/4:0.0"
    limits = (
        f"ACX7000: {MAX_INGRESS} ingress and {MAX_EGRESS} egress instances, {MAX_EGRESS} per output port.",
        "the whole physical port is mirrored, whatever the unit.",
        "tunnelled: IPv4 destination only, no ECMP towards it; when the route moves, apply the analyzer again.",
        "to change an analyzer: delete, commit, add again.",
        "oversubscription is silent: nothing on the switch counts lost copies, `flowcheck daemon --observe` shows "
        "what is missing.",
    )

    def port(self, text: str) -> str:
        super().port(text)
        found = PORT.fullmatch(text)
        assert found is not None
        return f"{found['port']}.{found['unit'] or 0}"

    def check(self, request: MirrorRequest) -> None:
        if request.monitor and request.monitor.startswith("ae"):
            raise UsageError(f"junos: {request.monitor} as the output would spread copies: give one physical port")
        ports = [source.port.partition(".")[0] for source in request.sources]
        for port in ports:
            if ports.count(port) > 1 or (request.monitor and port == request.monitor.partition(".")[0]):
                raise UsageError(f"junos: two units of {port}: the whole physical port is mirrored, name it once")
        for way, allowed in (("in", MAX_INGRESS), ("out", MAX_EGRESS)):
            count = len(request.ports(way, "both"))
            if count > allowed:
                word = "ingress" if way == "in" else "egress"
                raise UsageError(f"junos: {count} {word} sources, ACX7000 has {allowed} {word} instances: mirror fewer")

    def configure(self, request: MirrorRequest) -> list[str]:
        analyzer = f"set forwarding-options analyzer fc{request.session}"
        lines = ["configure"]
        for word, ways in (("ingress", ("in", "both")), ("egress", ("out", "both"))):
            lines += [f"{analyzer} input {word} interface {port}" for port in request.ports(*ways)]
        if request.tunnel is not None:
            lines += [
                f"{analyzer} output ip-address {request.tunnel.destination}",
                *self.note(
                    f"the switch chooses the outer source address itself: {request.tunnel.source} is not set here",
                    GUARD,
                ),
                *self.unsure("the outer packets must travel in a lossy forwarding class on every hop."),
            ]
        else:
            lines += [f"{analyzer} output interface {request.monitor}", *self._guard(request.monitor or "")]
        return [*lines, "commit and-quit"]

    def verify(self, request: MirrorRequest) -> list[str]:
        lines = [f"show forwarding-options analyzer fc{request.session}"]
        if request.monitor:
            port = request.monitor.partition(".")[0]
            lines += [f"show interfaces {port} extensive | match pause", f"show interfaces queue {port}"]
        return lines

    def remove(self, request: MirrorRequest) -> list[str]:
        lines = ["configure", f"delete forwarding-options analyzer fc{request.session}"]
        if request.monitor:
            port = request.monitor.partition(".")[0]
            lines += [
                f"delete class-of-service interfaces {port} scheduler-map",
                "delete class-of-service scheduler-maps fc-mirror",
                "delete class-of-service schedulers fc-mirror",
            ]
        return [*lines, "commit and-quit"]

    def _guard(self, monitor: str) -> list[str]:
        port, _, unit = monitor.partition(".")
        return [
            *self.note("QFX ELS: the output port must be family ethernet-switching"),
            f"set interfaces {port} unit {unit} family ethernet-switching",
            *self.note(GUARD),
            *self.unsure("flow control off on the monitor port (the delete warns where there is nothing to delete)."),
            f"delete class-of-service interfaces {port} congestion-notification-profile",
            f"set interfaces {port} ether-options no-flow-control",
            *self.unsure("its buffer capped at 5 % of the port's."),
            "set class-of-service schedulers fc-mirror buffer-size percent 5",
            "set class-of-service scheduler-maps fc-mirror forwarding-class best-effort scheduler fc-mirror",
            f"set class-of-service interfaces {port} scheduler-map fc-mirror",
        ]
