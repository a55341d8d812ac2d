"""Cisco NX-OS (Cisco: Configuring SPAN, Configuring ERSPAN)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

PORT = re.compile(
    r"(?P<kind>eth|ethernet|po|port-channel) ?(?P<number>\d{1,4}(/\d{1,3}){0,2})|vlan ?(?P<vlan>\d{1,4})", re.IGNORECASE
)


class Nxos(Vendor):
    name = "nxos"
    title = "Cisco NX-OS"
    comment = "!"
    pattern = PORT
    examples = "Ethernet1/1, port-channel5, vlan100"
    sessions = range(1, 33)
    limits = (
        "session ids are 1-32; how many can be active and oversubscribed: the release's scalability guide.",
        "a session is down until `no shut`; without `switchport monitor` it is down (Dst in wrong mode).",
        "VLAN sources are copied on ingress only.",
        "do not set `mtu` in the session: it truncates the copies.",
        "in a fabric, egress copies carry a Cisco TTag (ethertype 0x8988) before IP; flowcheck skips it.",
    )

    def port(self, text: str) -> str:
        super().port(text)
        found = PORT.fullmatch(text)
        assert found is not None
        if found["vlan"]:
            return f"vlan {found['vlan']}"
        bundle = found["kind"].lower().startswith("p")
        if bundle == ("/" in found["number"]):
            raise UsageError(f"nxos: {text!r} is no port name here (such as {self.examples})")
        return f"{'port-channel' if bundle else 'ethernet'} {found['number']}"

    def check(self, request: MirrorRequest) -> None:
        if request.monitor and not request.monitor.startswith("ethernet"):
            raise UsageError(f"nxos: {request.monitor} cannot be the monitor port here: give one Ethernet port")
        for source in request.sources:
            if source.port.startswith("vlan") and source.direction != "in":
                raise UsageError(f"nxos: VLAN sources are ingress only: write {source.port.replace(' ', '')}:in")

    def configure(self, request: MirrorRequest) -> list[str]:
        lines = ["configure terminal"]
        if request.tunnel is None:
            lines += [
                f"interface {request.monitor}",
                "  switchport",
                "  switchport monitor",
                *self._guard_port(request.monitor or ""),
                "  no shutdown",
                f"monitor session {request.session}",
                *self._sources(request),
                f"  destination interface {request.monitor}",
                "  no shut",
            ]
        else:
            lines += [
                *self.note("one origin address for the whole switch; `header-type 3` in the session selects type III"),
                f"monitor erspan origin ip-address {request.tunnel.source} global",
                f"monitor session {request.session} type erspan-source",
                f"  erspan-id {100 + request.session}",
                "  vrf default",
                f"  destination ip {request.tunnel.destination}",
                *self.note(GUARD),
                *self.unsure("DSCP 8 must be lossy on every hop (not the RoCE class)."),
                "  ip dscp 8",
                *self._sources(request),
                "  no shut",
            ]
        return [*lines, "end", "copy running-config startup-config"]

    def verify(self, request: MirrorRequest) -> list[str]:
        port = [
            f"show interface {request.monitor} priority-flow-control",
            f"show queuing interface {request.monitor}",
        ]
        return [f"show monitor session {request.session}", *(port if request.monitor else [])]

    def remove(self, request: MirrorRequest) -> list[str]:
        lines = ["configure terminal", f"no monitor session {request.session}"]
        if request.monitor:
            lines += [
                f"interface {request.monitor}",
                "  no service-policy type queuing output fc-mirror",
                "  no switchport monitor",
                "no policy-map type queuing fc-mirror",
            ]
        else:
            lines += self.note("`no monitor erspan origin ip-address` too, when no other ERSPAN session is left")
        return [*lines, "end", "copy running-config startup-config"]

    def _sources(self, request: MirrorRequest) -> list[str]:
        return [
            f"  source {'' if port.startswith('vlan') else 'interface '}{port} {self.words[way]}"
            for port, way in ((source.port, source.direction) for source in request.sources)
        ]

    def _guard_port(self, monitor: str) -> list[str]:
        return [
            *self.note(GUARD),
            *self.unsure("flow control off on the monitor port."),
            "  priority-flow-control mode off",
            "  flowcontrol send off",
            "  flowcontrol receive off",
            *self.unsure("the queue of the copies capped (dynamic threshold far below the default)."),
            "policy-map type queuing fc-mirror",
            "  class type queuing c-out-8q-q-default",
            "    queue-limit dynamic 2",
            f"interface {monitor}",
            "  service-policy type queuing output fc-mirror",
        ]
