"""Arista EOS (port mirroring as in AVD's generated configurations and Arista's introduction to port mirroring)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

PORT = re.compile(r"(?P<kind>et|ethernet|po|port-channel) ?(?P<number>\d{1,4}(/\d{1,3}){0,2})", re.IGNORECASE)
CAP = "random-detect drop minimum-threshold 256 kbytes maximum-threshold 512 kbytes drop-probability 100"


class Eos(Vendor):
    name = "eos"
    title = "Arista EOS"
    comment = "!"
    pattern = PORT
    examples = "Ethernet1, Ethernet3/1, Port-Channel5"
    limits = (
        "the number of sessions depends on the platform (one Arista article: up to 14 for mirror-to-CPU).",
        "no truncate, no header remove size, no sample, no rate-limit in the session: each loses bytes or frames.",
        "the tunnel is plain GRE on many platforms; where `encapsulation gre payload` is offered, the full packet.",
    )

    def port(self, text: str) -> str:
        super().port(text)
        found = PORT.fullmatch(text)
        assert found is not None
        bundle = found["kind"].lower().startswith("p")
        if bundle and "/" in found["number"]:
            raise UsageError(f"eos: {text!r} is no port name here (such as {self.examples})")
        return ("Port-Channel" if bundle else "Ethernet") + found["number"]

    def check(self, request: MirrorRequest) -> None:
        if request.monitor and not request.monitor.startswith("Ethernet"):
            raise UsageError(f"eos: {request.monitor} as the monitor port would spread copies: give one Ethernet port")

    def configure(self, request: MirrorRequest) -> list[str]:
        session = f"monitor session fc{request.session}"
        lines = ["configure", *self._guard(request), "!"]
        for way, ports in request.by_direction():
            lines.append(f"{session} source {', '.join(ports)} {self.words[way]}")
        if request.tunnel is None:
            lines.append(f"{session} destination {request.monitor}")
        else:
            outer = f"source {request.tunnel.source} destination {request.tunnel.destination}"
            lines.append(f"{session} destination tunnel mode gre {outer}")
        return [*lines, "end", "write memory"]

    def verify(self, request: MirrorRequest) -> list[str]:
        port = [
            f"show priority-flow-control interfaces {request.monitor} counters",
            f"show interfaces {request.monitor} counters queue drops",
        ]
        return [f"show monitor session fc{request.session}", *(port if request.monitor else [])]

    def remove(self, request: MirrorRequest) -> list[str]:
        return ["configure", f"no monitor session fc{request.session}", "end", "write memory"]

    def _guard(self, request: MirrorRequest) -> list[str]:
        if request.monitor is None:
            return [
                *self.note(GUARD),
                *self.unsure(
                    "give the tunnel a DSCP that is lossy on every hop (8, not the RoCE class) where the platform "
                    "offers it; some platforms tunnel received frames only: then write :in for every source."
                ),
            ]
        return [
            *self.note(GUARD),
            *self.unsure("flow control off on the monitor port."),
            f"interface {request.monitor}",
            "   flowcontrol send off",
            "   flowcontrol receive off",
            "   no priority-flow-control",
            *self.unsure("the queues of the copies capped (uc-tx-queue on some platforms; copies keep their class)."),
            *(line for queue in (0, 3) for line in (f"   tx-queue {queue}", f"      {CAP}")),
        ]
