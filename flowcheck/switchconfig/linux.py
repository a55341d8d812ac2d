"""Linux traffic control (iproute2: tc-mirred(8), ip-link(8)): a bridge or a router made of a Linux machine."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor

INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,14}")
"""IFNAMSIZ leaves 15 bytes; other characters are legal in a name but not in a script that is pasted."""


class Linux(Vendor):
    name = "linux"
    title = "Linux tc"
    pattern = INTERFACE
    examples = "eth0, enp1s0f0np0"
    sessions = range(1, 924)
    limits = (
        "ports are those of this machine's bridge; on a trainer's own NIC ingress is what it receives: swap them.",
        "a kernel without cls_matchall says `TC classifier not found`: write `u32 match u32 0 0` for `matchall`.",
        "veth and offloading NICs give copies of up to 64 KiB: switch the monitor port's offloads off.",
        "frames that a NIC's RDMA engine handles itself (hardware RoCE) never reach tc.",
    )
    words = {"in": "ingress", "out": "egress"}  # noqa: RUF012

    def check(self, request: MirrorRequest) -> None:
        if request.tunnel and self._device(request) in {source.port for source in request.sources}:
            raise UsageError(f"linux: {self._device(request)} is the tunnel's own name: mirror other interfaces")

    def configure(self, request: MirrorRequest) -> list[str]:
        device = self._device(request)
        lines = []
        if request.tunnel is not None:
            key = 100 + request.session
            local, remote = request.tunnel.source, request.tunnel.destination
            kind = f"type erspan seq key {key}"
            lines += [
                f"ip link add {device} {kind} local {local} remote {remote} erspan_ver 1",
                f"ip link set {device} up",
                *self.note(
                    "on the checkpoint node (the kernel can take the outer headers off; flowcheck can, too):",
                    f"ip link add {device} {kind} local {remote} remote {local} erspan_ver 1",
                ),
            ]
        lines += ["", *self._guard(request, device), ""]
        for source in request.sources:
            lines.append(f"tc qdisc add dev {source.port} clsact")
            lines += [
                f"tc filter add dev {source.port} {self.words[way]} matchall action mirred egress mirror dev {device}"
                for way in ("in", "out")
                if source.direction in (way, "both")
            ]
        return lines if lines[0] else lines[1:]

    def verify(self, request: MirrorRequest) -> list[str]:
        device = self._device(request)
        return [
            *(
                f"tc -s filter show dev {source.port} {self.words[way]}"
                for source in request.sources
                for way in ("in", "out")
                if source.direction in (way, "both")
            ),
            f"tc -s qdisc show dev {device}",
            *([f"ethtool -a {device}"] if request.monitor else []),
        ]

    def remove(self, request: MirrorRequest) -> list[str]:
        device = self._device(request)
        end = f"tc qdisc del dev {device} root" if request.monitor else f"ip link del {device}"
        return [
            *self.note(
                "clsact takes every filter of the port with it: with others of your own, delete by pref instead"
            ),
            *(f"tc qdisc del dev {source.port} clsact" for source in request.sources),
            end,
        ]

    def _device(self, request: MirrorRequest) -> str:
        return request.monitor or f"erspan{request.session}"

    def _guard(self, request: MirrorRequest, device: str) -> list[str]:
        cap = f"tc qdisc replace dev {device} root pfifo limit 1000"
        if request.monitor is None:
            return [*self.note(GUARD), cap]
        return [
            *self.note(GUARD),
            cap,
            *self.unsure("not every NIC can switch pause frames, and PFC is set by its own tool (dcb, mlnx_qos)."),
            f"ethtool -A {device} autoneg off rx off tx off",
            f"dcb pfc set dev {device} prio-pfc all:off",
            f"ethtool -K {device} tso off gso off gro off lro off",
        ]
