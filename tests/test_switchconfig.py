"""Mirror configurations: documented syntax, every limit, every refusal, and the whole text as golden files.

FLOWCHECK_WRITE_GOLDEN=1 writes the golden files anew; read the difference before keeping it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowcheck.cli import Commands
from flowcheck.errors import UsageError
from flowcheck.switchconfig import VENDORS
from flowcheck.switchconfig.command import switch_config_command
from flowcheck.switchconfig.request import Source, merged

GOLDEN = Path(__file__).parent / "golden" / "switchconfig"
ERSPAN = "--erspan 10.9.0.1 10.9.0.2"
ENI = [f"eni-0123456789abcdef{digit}" for digit in range(3)]

CASES = {
    "sonic": "--source Ethernet0 --source Ethernet4:both --monitor Ethernet48",
    "sonic-erspan": f"--source Ethernet0:in --source PortChannel001:out --source Ethernet8 {ERSPAN}",
    "cumulus": "--source swp1 --source swp2s0:in --monitor swp32",
    "cumulus-erspan": f"--source swp1:out {ERSPAN} --session 7",
    "eos": "--source Ethernet1 --source Et2 --source ethernet3/1:out --monitor Ethernet48",
    "eos-erspan": f"--source Ethernet1:in {ERSPAN}",
    "nxos": "--source Ethernet1/1 --source eth1/2:in --source vlan10:in --monitor Ethernet1/3",
    "nxos-erspan": f"--source Ethernet1/1 {ERSPAN} --session 2",
    "comware": "--source XGE1/0/1 --source Ten-GigabitEthernet1/0/2 --source XGE1/0/4:in --monitor XGE1/0/3",
    "comware-erspan": f"--source XGE1/0/5:in --monitor XGE1/0/6 {ERSPAN} --session 2",
    "junos": "--source et-0/0/4 --source et-0/0/5:1:in --monitor et-0/0/9",
    "junos-erspan": f"--source et-0/0/4:out {ERSPAN}",
    "cloudengine": "--source 100GE1/0/1 --source 100ge1/0/2:in --monitor 100GE1/0/4",
    "linux": "--source eth0 --source eth1:in --monitor mon0",
    "linux-erspan": f"--source eth0:out {ERSPAN}",
    "ovs": "--source eth0 --source eth1:out --monitor mon0",
    "ovs-erspan": f"--source eth0 {ERSPAN}",
    "aws": f"--source {ENI[0]} --source {ENI[1]}:in --monitor {ENI[2]}",
}

# What the vendors document, line by line; written by hand, not taken from the output.
DOCUMENTED = {
    "sonic": [
        "sudo config mirror_session span add fc1 Ethernet48 Ethernet0,Ethernet4 both",
        "show mirror_session",
    ],
    "sonic-erspan": [
        "sudo config mirror_session erspan add fc1 10.9.0.1 10.9.0.2 8 64 0x88be 0 Ethernet8 both",
        "sudo config mirror_session erspan add fc2 10.9.0.1 10.9.0.2 8 64 0x88be 0 Ethernet0 rx",
        "sudo config mirror_session erspan add fc3 10.9.0.1 10.9.0.2 8 64 0x88be 0 PortChannel001 tx",
    ],
    "cumulus": [
        "nv set system port-mirror session 1 span direction ingress",
        "nv set system port-mirror session 1 span source-port swp1",
        "nv set system port-mirror session 1 span source-port swp2s0",
        "nv set system port-mirror session 1 span destination swp32",
        "nv set system port-mirror session 2 span direction egress",
        "nv set system port-mirror session 2 span source-port swp1",
        "nv set system port-mirror session 2 span destination swp32",
        "nv config apply",
    ],
    "cumulus-erspan": [
        "nv set system port-mirror session 7 erspan direction egress",
        "nv set system port-mirror session 7 erspan source-port swp1",
        "nv set system port-mirror session 7 erspan destination source-ip 10.9.0.1",
        "nv set system port-mirror session 7 erspan destination dest-ip 10.9.0.2",
    ],
    "eos": [
        "monitor session fc1 source Ethernet1, Ethernet2 both",
        "monitor session fc1 source Ethernet3/1 tx",
        "monitor session fc1 destination Ethernet48",
        "show monitor session fc1",
    ],
    "eos-erspan": [
        "monitor session fc1 source Ethernet1 rx",
        "monitor session fc1 destination tunnel mode gre source 10.9.0.1 destination 10.9.0.2",
    ],
    "nxos": [
        "interface ethernet 1/3",
        "  switchport",
        "  switchport monitor",
        "  no shutdown",
        "monitor session 1",
        "  source interface ethernet 1/1 both",
        "  source interface ethernet 1/2 rx",
        "  source vlan 10 rx",
        "  destination interface ethernet 1/3",
        "  no shut",
    ],
    "nxos-erspan": [
        "monitor erspan origin ip-address 10.9.0.1 global",
        "monitor session 2 type erspan-source",
        "  erspan-id 102",
        "  vrf default",
        "  destination ip 10.9.0.2",
        "  source interface ethernet 1/1 both",
        "  no shut",
    ],
    "comware": [
        "system-view",
        " interface ten-gigabitethernet 1/0/3",
        "  undo stp enable",
        " mirroring-group 1 local",
        " mirroring-group 1 mirroring-port ten-gigabitethernet 1/0/1 ten-gigabitethernet 1/0/2 both",
        " mirroring-group 1 mirroring-port ten-gigabitethernet 1/0/4 inbound",
        " mirroring-group 1 monitor-port ten-gigabitethernet 1/0/3",
    ],
    "comware-erspan": [
        " mirroring-group 2 local",
        " mirroring-group 2 mirroring-port ten-gigabitethernet 1/0/5 inbound",
        " mirroring-group 2 monitor-port ten-gigabitethernet 1/0/6 destination-ip 10.9.0.2 source-ip 10.9.0.1",
    ],
    "junos": [
        "set forwarding-options analyzer fc1 input ingress interface et-0/0/4.0",
        "set forwarding-options analyzer fc1 input ingress interface et-0/0/5:1.0",
        "set forwarding-options analyzer fc1 input egress interface et-0/0/4.0",
        "set forwarding-options analyzer fc1 output interface et-0/0/9.0",
        "set interfaces et-0/0/9 unit 0 family ethernet-switching",
        "show forwarding-options analyzer fc1",
    ],
    "junos-erspan": [
        "set forwarding-options analyzer fc1 input egress interface et-0/0/4.0",
        "set forwarding-options analyzer fc1 output ip-address 10.9.0.2",
    ],
    "cloudengine": [
        " observe-port 1 interface 100ge 1/0/4",
        " interface 100ge 1/0/1",
        "  port-mirroring observe-port 1 both",
        "  quit",
        " interface 100ge 1/0/2",
        "  port-mirroring observe-port 1 inbound",
        " commit",
        "display port-mirroring",
    ],
    "linux": [
        "tc qdisc add dev eth0 clsact",
        "tc filter add dev eth0 ingress matchall action mirred egress mirror dev mon0",
        "tc filter add dev eth0 egress matchall action mirred egress mirror dev mon0",
        "tc qdisc add dev eth1 clsact",
        "tc filter add dev eth1 ingress matchall action mirred egress mirror dev mon0",
    ],
    "linux-erspan": [
        "ip link add erspan1 type erspan seq key 101 local 10.9.0.1 remote 10.9.0.2 erspan_ver 1",
        "# ip link add erspan1 type erspan seq key 101 local 10.9.0.2 remote 10.9.0.1 erspan_ver 1",
        "tc filter add dev eth0 egress matchall action mirred egress mirror dev erspan1",
    ],
    "ovs": [
        "  -- --id=@m create Mirror name=fc1 select-src-port=@s0 select-dst-port=@s0,@s1 output-port=@o",
    ],
    "ovs-erspan": [
        "  -- --id=@m create Mirror name=fc1 select-src-port=@s0 select-dst-port=@s0 output-port=@o",
    ],
    "aws": [
        '  --source-cidr-block "$TRAINERS" --destination-cidr-block "$TRAINERS"',
        "  --session-number 1 --virtual-network-id 1001",
    ],
}  # fmt: skip

LIMITS = {
    "sonic": ["one session", "truncate_size", "0x8949"],
    "cumulus": ["0-7", "both takes two sessions", "eth0 cannot", "IPv4 only", "not guaranteed", "deplete", "4-4088"],
    "eos": ["depends on the platform", "truncate", "sample", "rate-limit", "encapsulation gre payload"],
    "nxos": ["1-32", "no shut", "Dst in wrong mode", "ingress only", "`mtu`", "0x8988", "scalability guide"],
    "comware": ["one monitor port", "only one group", "1-15", "inbound copies only", "VLAN tag", "twice", "reflector"],
    "junos": ["16 ingress and 8 egress", "8 per output", "whole physical port", "IPv4", "no ECMP", "delete", "silent"],
    "cloudengine": ["1-8", "same link type", "VLAN-mapped", "to observe-port"],
    "linux": ["swap", "u32 match u32 0 0", "64 KiB", "hardware RoCE"],
    "ovs": ["one bridge", "output-vlan", "no snaplen", "filter"],
    "aws": ["TCP jobs only", "3 sessions", "10 rules", "10 or 100", "truncated", "8500", "4789"],
}

REFUSED = {
    # every vendor
    "sonic --monitor Ethernet4": "nothing to mirror",
    "eos --source Ethernet1": "copies need a way out",
    f"eos --source Ethernet1 --monitor Ethernet2 {ERSPAN}": "not both",
    "nxos --source Eth1/1 --monitor ethernet1/1": "both a source and the monitor port",
    "eos --source Ethernet1 --erspan 10.9.0.1 nowhere": "nowhere: not an IP address",
    "eos --source Ethernet1 --erspan 2001:db8::1 2001:db8::2": "IPv4 only",
    "eos --source Ethernet1 --erspan 10.9.0.1 224.0.0.1": "not the address of a host",
    "eos --source Ethernet1 --erspan 10.9.0.1 10.9.0.1": "twice",
    "sonic --source Ethernet0:sideways --monitor Ethernet4": "directions are :in, :out, :both",
    # names
    "sonic --source swp1 --monitor Ethernet4": "no port name here",
    "cumulus --source Ethernet1 --monitor swp2": "no port name here",
    "eos --source swp1 --monitor Ethernet4": "no port name here",
    "eos --source Port-Channel5/1 --monitor Ethernet4": "no port name here",
    "nxos --source Ethernet1 --monitor Ethernet1/4": "no port name here",
    "nxos --source port-channel1/1 --monitor Ethernet1/4": "no port name here",
    "comware --source Ethernet1 --monitor XGE1/0/3": "no port name here",
    "comware --source XGE7 --monitor XGE1/0/3": "no port name here",
    "junos --source et-0/0 --monitor et-0/0/9": "no port name here",
    "cloudengine --source XGE1/0/1 --monitor 100GE1/0/4": "no port name here",
    "linux --source eth0;reboot --monitor mon0": "no port name here",
    "linux --source interface-too-long --monitor mon0": "no port name here",
    "ovs --source $(id) --monitor mon0": "no port name here",
    # what a vendor cannot do
    "sonic --source Ethernet0 --monitor PortChannel1": "cannot be a monitor port",
    "sonic --source Ethernet0:in --source Ethernet4 --monitor Ethernet8": "one direction",
    "cumulus --source swp1 --monitor eth0": "eth0 cannot be a mirror's destination",
    "cumulus --source eth0 --monitor swp1": "no switch port",
    "cumulus --source swp1 --monitor swp2 --session 8": "0-7",
    "cumulus --source swp1 --monitor swp2 --session 7": "ids end at 7",
    "eos --source Ethernet1 --monitor Port-Channel2": "spread copies",
    "nxos --source Ethernet1/1 --monitor port-channel2": "cannot be the monitor port",
    "nxos --source vlan10 --monitor Ethernet1/2": "ingress only",
    "nxos --source Ethernet1/1 --monitor Ethernet1/2 --session 33": "1-32",
    "comware --source Bridge-Aggregation1 --monitor XGE1/0/3": "aggregate",
    "comware --source XGE1/0/1 --monitor BAGG1": "aggregate",
    "comware --source XGE1/0/1 --monitor XGE1/0/3 --session 16": "1-15",
    f"comware --source XGE1/0/1:in {ERSPAN}": "add --monitor",
    f"comware --source XGE1/0/1 --monitor XGE1/0/6 {ERSPAN}": "inbound frames only",
    f"comware --source XGE1/0/1:out --monitor XGE1/0/6 {ERSPAN}": "inbound frames only",
    "junos --source et-0/0/1 --monitor ae0": "spread copies",
    "junos --source et-0/0/1.0 --source et-0/0/1.7 --monitor et-0/0/9": "whole physical port",
    "junos --source et-0/0/9.1 --monitor et-0/0/9": "whole physical port",
    "junos " + " ".join(f"--source et-0/0/{n}" for n in range(9)) + " --monitor et-0/0/9": "8 egress",
    "junos " + " ".join(f"--source et-0/0/{n}:in" for n in range(17)) + " --monitor et-0/0/19": "16 ingress",
    f"cloudengine --source 100GE1/0/1 {ERSPAN}": "no verified syntax",
    "cloudengine --source 100GE1/0/1 --monitor 100GE1/0/4 --session 9": "1-8",
    f"linux --source erspan1 {ERSPAN}": "own name",
    "aws --source Ethernet0 --monitor eni-01234567": "no switch ports",
    f"aws --source eni-01234567 {ERSPAN}": "VXLAN",
    "aws " + " ".join(f"--source eni-{n:08x}" for n in range(101)) + " --monitor eni-0123abcd": "100 at most",
}


def run(*arguments: str) -> Result:
    group = Commands("flowcheck", commands={"switch-config": switch_config_command})
    return CliRunner().invoke(group, ["switch-config", *arguments])


def output(case: str, *more: str) -> str:
    done = run(case.partition("-")[0], *CASES[case].split(), *more)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("case", CASES)
def test_whole_text(case: str) -> None:
    text = output(case) + "\n--remove\n\n" + output(case, "--remove")
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("FLOWCHECK_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("case", CASES)
def test_documented_lines_are_there_in_order(case: str) -> None:
    lines = iter(output(case).splitlines())
    for line in DOCUMENTED[case]:
        assert line in lines, f"{line!r} is missing or out of order"


@pytest.mark.parametrize("vendor", VENDORS)
def test_limits_are_comments(vendor: str) -> None:
    comment = VENDORS[vendor].comment
    comments = [line for line in output(vendor).splitlines() if line.startswith(comment)]
    text = " ".join(line.removeprefix(comment).strip() for line in comments)
    assert LIMITS.keys() == VENDORS.keys()
    for limit in ["x the line rate", *LIMITS[vendor]]:
        assert limit in text, f"{limit!r} is not said"


@pytest.mark.parametrize("arguments", REFUSED)
def test_refusals_say_why_in_one_line(arguments: str) -> None:
    done = run(*arguments.split())
    assert done.exit_code == UsageError.exit_code
    assert REFUSED[arguments] in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_unknown_vendor_is_a_usage_error() -> None:
    assert run("acme", "--source", "1").exit_code == 2


MONITORED = [case for case in CASES if "--monitor" in CASES[case] and case != "aws"]
FLOW_CONTROL_OFF = {
    "sonic": r"pfc priority Ethernet48 3 off[\s\S]*pfc priority Ethernet48 4 off",
    "cumulus": r"nv unset interface swp32 qos pfc\nnv unset interface swp32 qos link-pause",
    "eos": r"interface Ethernet48\n +flowcontrol send off\n +flowcontrol receive off\n +no priority-flow-control",
    "nxos": r"priority-flow-control mode off\n +flowcontrol send off\n +flowcontrol receive off",
    "comware": r"undo flow-control\n +undo priority-flow-control",
    "junos": r"et-0/0/9 congestion-notification-profile\nset interfaces et-0/0/9 ether-options no-flow-control",
    "cloudengine": r"undo flow-control\n +undo dcb pfc enable",
    "linux": r"ethtool -A mon0 autoneg off rx off tx off\ndcb pfc set dev mon0 prio-pfc all:off",
    "ovs": r"ethtool -A mon0 autoneg off rx off tx off\ndcb pfc set dev mon0 prio-pfc all:off",
}
CAPPED = {
    "sonic": "buffer queue set Ethernet48 0-7 fc_mirror",
    "cumulus": "qos egress-shaper",
    "eos": "random-detect drop",
    "nxos": "service-policy type queuing output fc-mirror",
    "comware": "qos wred apply fc-mirror",
    "junos": "buffer-size percent 5",
    "cloudengine": "qos queue 7 wred fc-mirror",
    "linux": "root pfifo limit 1000",
    "ovs": "root pfifo limit 1000",
}
FIRST_COPY = {
    "sonic": "mirror_session span add",
    "cumulus": "nv config apply",
    "eos": "monitor session fc1 source",
    "nxos": "destination interface",
    "comware": "mirroring-group 1 mirroring-port",
    "junos": "commit and-quit",
    "cloudengine": "observe-port 1 interface",
    "linux": "tc filter add",
    "ovs": "create Mirror",
}


@pytest.mark.parametrize("case", MONITORED)
def test_monitor_port_cannot_push_back_from_the_first_copy_on(case: str) -> None:
    vendor, text = case.partition("-")[0], output(case)
    off = re.search(FLOW_CONTROL_OFF[vendor], text)
    assert off is not None
    first = "mirroring-group 2 mirroring-port" if case == "comware-erspan" else FIRST_COPY[vendor]
    assert off.end() < text.index(first)
    assert text.index(CAPPED[vendor]) < text.index(first)
    assert text[: off.start()].count("check on your release") >= 1
    assert "no queue is lossless" in text


@pytest.mark.parametrize("case", [case for case in CASES if "--erspan" in CASES[case]])
def test_encapsulation_warns_of_the_mtu(case: str) -> None:
    assert "at least 4300" in " ".join(line.lstrip("#! ") for line in output(case).splitlines())


def test_remove_ends_the_same_sessions() -> None:
    assert "nv unset system port-mirror session 1\nnv unset system port-mirror session 2\n" in output(
        "cumulus", "--remove"
    )
    for session in ("fc1", "fc2", "fc3"):
        assert f"config mirror_session remove {session}\n" in output("sonic-erspan", "--remove")
    assert "no monitor session 2\n" in output("nxos-erspan", "--remove")
    assert " undo mirroring-group 2\n" in output("comware-erspan", "--remove")
    assert "set them back" in output("comware", "--remove")


def test_sources_named_twice_become_one() -> None:
    assert merged([Source("a", "in"), Source("b", "out"), Source("a", "out"), Source("b", "out")]) == (
        Source("a", "both"),
        Source("b", "out"),
    )
    assert (
        "fc1 Ethernet8 Ethernet0 both"
        in run("sonic", "--source", "Ethernet0:in", "--source", "Ethernet0:out", "--monitor", "Ethernet8").output
    )


@pytest.mark.parametrize("case", ["sonic", "cumulus", "linux", "linux-erspan", "ovs", "ovs-erspan", "aws"])
def test_shell_scripts_parse(case: str) -> None:
    for text in (output(case), output(case, "--remove")):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
