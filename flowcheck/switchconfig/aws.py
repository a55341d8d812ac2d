"""AWS VPC Traffic Mirroring (docs.aws.amazon.com/vpc/latest/mirroring: limitations, quotas, targets)."""

from __future__ import annotations

import re

from flowcheck.errors import UsageError
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import Vendor

MAX_SOURCES = 100
GROUP = "traffic-mirror"


class Aws(Vendor):
    name = "aws"
    title = "AWS VPC Traffic Mirroring"
    has_queues = False
    pattern = re.compile(r"eni-([0-9a-f]{8}|[0-9a-f]{17})")
    examples = "eni-0123456789abcdef0"
    sessions = range(1, 32767)
    words = {"in": "egress", "out": "ingress"}  # noqa: RUF012
    limits = (
        "TCP jobs only (gloo, NCCL over sockets): whether EFA traffic is mirrored is not documented.",
        "3 sessions per source interface, 10 rules per filter, 10 or 100 sources per target interface by its size.",
        "a copy that exceeds the target's MTU is truncated: set the trainers' MTU lower than the target's by the VXLAN "
        "headers (54 bytes IPv4, 74 IPv6) or more.",
        "a load balancer as the target may reorder and defaults to 8500 bytes: give the checkpoint node's interface.",
        "copies arrive in VXLAN, UDP port 4789: the target's security group must admit it.",
    )

    def port(self, text: str) -> str:
        if not self.pattern.fullmatch(text):
            raise UsageError(f"aws: {text!r}: a VPC has no switch ports, give interface ids such as {self.examples}")
        return text

    def check(self, request: MirrorRequest) -> None:
        if request.tunnel is not None:
            raise UsageError("aws: copies always travel in VXLAN to an interface: give --monitor eni-..., not --erspan")
        if len(request.sources) > MAX_SOURCES:
            raise UsageError(
                f"aws: {len(request.sources)} sources, one target takes {MAX_SOURCES} at most: use several targets"
            )

    def configure(self, request: MirrorRequest) -> list[str]:
        mark = f"--description {self._mark(request)}"
        lines = [
            "TRAINERS=10.0.0.0/16",
            *self.note("that is the trainers' network: change it. One filter per set of directions."),
            *self._create("TARGET", f"{GROUP}-target {mark} --network-interface-id {request.monitor}", "Target"),
        ]
        for way, ports in request.by_direction():
            lines += self._create("FILTER", f"{GROUP}-filter {mark}", "Filter")
            for word in [self.words[one] for one in ("in", "out") if way in (one, "both")]:
                lines += [
                    f'aws ec2 create-{GROUP}-filter-rule --{GROUP}-filter-id "$FILTER" --traffic-direction {word} \\',
                    "  --rule-number 100 --rule-action accept --protocol 6 \\",
                    '  --source-cidr-block "$TRAINERS" --destination-cidr-block "$TRAINERS"',
                ]
            for port in ports:
                lines += [
                    f"aws ec2 create-{GROUP}-session {mark} --network-interface-id {port} \\",
                    f'  --{GROUP}-target-id "$TARGET" --{GROUP}-filter-id "$FILTER" \\',
                    f"  --session-number {request.session} --virtual-network-id {1000 + request.session}",
                ]
        return [
            *lines,
            *self.note("no --packet-length: it truncates"),
            *self.unsure(
                "there are no queues or pause frames to set: in congestion production traffic goes before mirrored "
                "traffic, so a slow checkpoint node loses copies and never slows training."
            ),
        ]

    def verify(self, request: MirrorRequest) -> list[str]:
        return [f"aws ec2 describe-{GROUP}-sessions --filters Name=description,Values={self._mark(request)}"]

    def remove(self, request: MirrorRequest) -> list[str]:
        lines = []
        for kind in ("Session", "Filter", "Target"):
            item = f"{GROUP}-{kind.lower()}"
            lines += [
                f"aws ec2 describe-{item}s --filters Name=description,Values={self._mark(request)} \\",
                f"  --query 'TrafficMirror{kind}s[].TrafficMirror{kind}Id' --output text | tr '\\t' '\\n' \\",
                f"  | xargs -r -n 1 aws ec2 delete-{item} --{item}-id",
            ]
        return lines

    def _mark(self, request: MirrorRequest) -> str:
        return f"flowcheck-{request.session}"

    def _create(self, variable: str, command: str, kind: str) -> list[str]:
        query = f"TrafficMirror{kind}.TrafficMirror{kind}Id"
        return [f"{variable}=$(aws ec2 create-{command} --query {query} --output text)"]
