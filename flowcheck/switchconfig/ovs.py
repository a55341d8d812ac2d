"""Open vSwitch (ovs-vsctl(8), vswitchd's database schema)."""

from __future__ import annotations

from flowcheck.switchconfig.linux import INTERFACE
from flowcheck.switchconfig.request import MirrorRequest
from flowcheck.switchconfig.vendor import GUARD, Vendor


class Ovs(Vendor):
    name = "ovs"
    title = "Open vSwitch"
    pattern = INTERFACE
    examples = "eth0, vnet3"
    sessions = range(1, 924)
    limits = (
        "all ports belong to one bridge, that of the first source.",
        "output-port keeps VLAN tags; output-vlan (RSPAN) rewrites them and is not used.",
        "no snaplen (it truncates), no filter column (it selects flows).",
        "the output port carries copies only: it is taken out of normal switching.",
    )

    def configure(self, request: MirrorRequest) -> list[str]:
        name, port = self._name(request), self._output(request)
        lines = [f"BRIDGE=$(ovs-vsctl port-to-br {request.sources[0].port})"]
        if request.tunnel is not None:
            options = {
                "remote_ip": request.tunnel.destination,
                "local_ip": request.tunnel.source,
                "key": 100 + request.session,
                "erspan_ver": 1,
                "erspan_idx": request.session,
            }
            given = " ".join(f"options:{key}={value}" for key, value in options.items())
            lines.append(f'ovs-vsctl add-port "$BRIDGE" {port} -- set Interface {port} type=erspan {given}')
        ports = [source.port for source in request.sources]
        gets = " ".join(f"-- --id=@s{number} get Port {source}" for number, source in enumerate(ports))
        columns = [f"name={name}"]
        for column, ways in (("select-src-port", ("in", "both")), ("select-dst-port", ("out", "both"))):
            chosen = ",".join(f"@s{ports.index(one)}" for one in request.ports(*ways))
            if chosen:
                columns.append(f"{column}={chosen}")
        return [
            *lines,
            "",
            *self._guard(request),
            "",
            f'ovs-vsctl -- add Bridge "$BRIDGE" mirrors @m {gets} -- --id=@o get Port {port} \\',
            f"  -- --id=@m create Mirror {' '.join(columns)} output-port=@o",
        ]

    def verify(self, request: MirrorRequest) -> list[str]:
        port = [f"tc -s qdisc show dev {request.monitor}"] if request.monitor else []
        return [f"ovs-vsctl list Mirror {self._name(request)}", *port]

    def remove(self, request: MirrorRequest) -> list[str]:
        lines = [
            f"BRIDGE=$(ovs-vsctl port-to-br {request.sources[0].port})",
            f'ovs-vsctl -- --id=@m get Mirror {self._name(request)} -- remove Bridge "$BRIDGE" mirrors @m',
        ]
        if request.tunnel is not None:
            return [*lines, f'ovs-vsctl del-port "$BRIDGE" {self._output(request)}']
        return [*lines, f"tc qdisc del dev {request.monitor} root"]

    def _guard(self, request: MirrorRequest) -> list[str]:
        if request.monitor is None:
            return [*self.note(GUARD), *self.unsure("the outer packets must travel in a lossy class on every hop.")]
        return [
            *self.note(GUARD),
            f"tc qdisc replace dev {request.monitor} root pfifo limit 1000",
            *self.unsure("not every NIC can switch pause frames, and PFC is set by its own tool (dcb, mlnx_qos)."),
            f"ethtool -A {request.monitor} autoneg off rx off tx off",
            f"dcb pfc set dev {request.monitor} prio-pfc all:off",
        ]

    def _name(self, request: MirrorRequest) -> str:
        return f"fc{request.session}"

    def _output(self, request: MirrorRequest) -> str:
        return request.monitor or f"fcerspan{request.session}"
