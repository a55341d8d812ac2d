"""What `flowcheck doctor` reads of the capture interface, what it says of it, and the command on a live one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowcheck.doctor.diagnose import diagnose
from flowcheck.doctor.finding import OK, PROBLEM, WARNING, Finding, as_text, healthy
from flowcheck.doctor.nic import Pause, Settings, judge, parse_features, parse_pause, parse_speed, read
from flowcheck.doctor.seen import Link, Ring, Seen

ROOT = Path(__file__).resolve().parent.parent
GOOD = Settings("eth7", up=True, carrier=True, promiscuous=True, mtu=9216, speed=100_000,
                pause=Pause(False, False, False), gro=False, lro=False, vlan_stripping=False)


def said(settings: Settings) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge(settings)}


def wrong(settings: Settings) -> dict[str, str]:
    return {name: finding.severity for name, finding in said(settings).items() if finding.severity != OK}


def test_good_settings_are_good() -> None:
    told = said(GOOD)
    assert wrong(GOOD) == {}
    assert told["link"].sentence == "eth7 is up at 100 Gbit/s."
    assert "sends no pause frames" in told["pause"].sentence
    assert told["priority-pause"].remedy.startswith("check by hand: dcb pfc show dev eth7 (")
    assert "priority-pause" not in said(replace(GOOD, pause=None))


def test_pause_frames_that_it_sends_are_a_problem() -> None:
    on = replace(GOOD, pause=Pause(True, True, True))
    assert wrong(on) == {"pause": PROBLEM}
    assert "eth7 sends pause frames" in said(on)["pause"].sentence
    assert said(on)["pause"].remedy.startswith("ethtool -A eth7 autoneg off rx off tx off")
    assert not healthy(diagnose(Seen("eth7", True, frames=1), on))
    assert wrong(replace(GOOD, pause=Pause(False, True, False))) == {"pause": WARNING}


@pytest.mark.parametrize(("gro", "lro", "remedy"), [
    (True, False, "ethtool -K eth7 gro off"), (False, True, "ethtool -K eth7 lro off"),
    (True, True, "ethtool -K eth7 gro off lro off"),
])  # fmt: skip
def test_merging_of_segments(gro: bool, lro: bool, remedy: str) -> None:
    merging = replace(GOOD, gro=gro, lro=lro)
    assert wrong(merging) == {"merging": WARNING}
    assert said(merging)["merging"].remedy == remedy
    assert ("(GRO and LRO)" in said(merging)["merging"].sentence) == (gro and lro)


def test_stripped_tags_are_read_all_the_same() -> None:
    assert wrong(replace(GOOD, vlan_stripping=True)) == {}
    assert "takes VLAN tags out of frames" in said(replace(GOOD, vlan_stripping=True))["vlan-stripping"].sentence


def test_state_of_the_link() -> None:
    assert said(replace(GOOD, up=False))["link"].remedy == "ip link set dev eth7 up"
    assert "has no link" in said(replace(GOOD, carrier=False))["link"].sentence
    assert wrong(replace(GOOD, carrier=False)) == {"link": PROBLEM}
    assert said(replace(GOOD, promiscuous=False))["promiscuous"].remedy == "ip link set dev eth7 promisc on"
    assert wrong(replace(GOOD, mtu=1500)) == {"interface-mtu": WARNING}
    assert wrong(replace(GOOD, mtu=4300)) == {}


def test_what_cannot_be_read_is_said() -> None:
    blind = replace(GOOD, pause=None, unread={"pause": errno.EOPNOTSUPP})
    assert wrong(blind) == {} and "does not tell its pause" in said(blind)["unread-pause"].sentence
    blind = replace(GOOD, pause=None, unread={"pause": errno.EPERM})
    assert wrong(blind) == {"unread-pause": WARNING} and said(blind)["unread-pause"].remedy == "ethtool -a eth7"


def test_a_full_monitor_port_is_told() -> None:
    ring = Ring("gloo", "g", (Link("a", "b", 0), Link("b", "a", 1)), 2)
    seen = Seen("eth7", True, seconds=10, frames=10**6, bytes=120 * 10**9, rings=(ring,))
    assert {one.name for one in diagnose(seen, GOOD) if one.severity != OK} == {"load"}
    assert "fill 96% of eth7's 100 Gbit/s" in as_text("eth7", diagnose(seen, GOOD))
    assert "load" not in {one.name for one in diagnose(replace(seen, bytes=50 * 10**9), GOOD)}


def test_an_rdma_adapter_may_keep_the_packets() -> None:
    silent = Seen("eth7", True, frames=5)
    told = {one.name: one for one in diagnose(silent, replace(GOOD, rdma=True))}
    assert "ROCE_CONTROL=1" in told["wrong-interface"].remedy
    told = {one.name: one for one in diagnose(silent, GOOD)}
    assert "ROCE_CONTROL" not in told["wrong-interface"].remedy


# The kernel's structures


def words(*values: int) -> array[int]:
    return array("I", values)


def test_structures_of_the_kernel() -> None:
    assert parse_pause(words(0x12, 1, 0, 1)) == Pause(True, False, True)
    assert parse_pause(words(0x12, 0, 1, 0)) == Pause(False, True, False)
    assert parse_features(words(0x25, 1 << 15)) == (True, False)
    assert parse_features(words(0x25, 1 << 8)) == (False, True)
    assert parse_features(words(0x25, 1 << 7 | 1 << 14)) == (False, False)
    speed = bytearray(44)
    speed[12:14] = (400_000 & 0xFFFF).to_bytes(2, sys.byteorder)
    speed[28:30] = (400_000 >> 16).to_bytes(2, sys.byteorder)
    assert parse_speed(array("I", bytes(speed))) == 400_000
    speed[28:30] = b"\0\0"
    speed[12:14] = (25_000).to_bytes(2, sys.byteorder)
    assert parse_speed(array("I", bytes(speed))) == 25_000
    speed[12:14] = speed[28:30] = b"\xff\xff"
    assert parse_speed(array("I", bytes(speed))) is None


def test_an_interface_that_does_not_exist() -> None:
    settings = read("nosuch0")
    assert settings.up is settings.mtu is settings.pause is None
    assert set(settings.unread) == {"pause", "gro", "flags", "link"}


# Live


@pytest.fixture(scope="module")
def live(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "doctor_live.py"), str(shared / "captures/gloo/nano.pcap"),
         str(tmp_path_factory.mktemp("doctor"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=280, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    if "refused" in result:
        pytest.skip(f"this machine allows no network namespaces: {result['refused']}")
    return result


def told(run: dict[str, Any], severity: str) -> set[str]:
    return {one["name"] for one in run["report"]["findings"] if one["severity"] == severity}


def test_a_live_mirror_is_healthy(live: dict[str, Any]) -> None:
    run = live["healthy"]
    assert run["code"] == 0 and run["report"]["healthy"], run
    assert told(run, PROBLEM) == told(run, WARNING) == set()
    assert {"traffic", "ranks", "chunks", "loss", "link", "merging", "unread-pause"} <= told(run, OK)
    figures = run["report"]["figures"]
    assert figures["frames"] == live["frames"] and figures["live"] and figures["kernel_drops"] == 0
    interface = figures["interface"]
    assert (interface["up"], interface["carrier"], interface["promiscuous"]) == (True, True, True)
    assert (interface["mtu"], interface["gro"], interface["pause"]) == (9216, False, None)
    assert "Traceback" not in run["error"]


def test_a_live_mirror_of_one_direction(live: dict[str, Any]) -> None:
    run = live["one way"]
    assert run["code"] == 1
    assert "one-direction" in told(run, PROBLEM)
    assert told(run, WARNING) == {"merging", "interface-mtu"}


def test_a_live_interface_without_frames_or_cable(live: dict[str, Any]) -> None:
    assert live["silent"]["code"] == 1 and told(live["silent"], PROBLEM) == {"no-frames"}
    assert told(live["unplugged"], PROBLEM) == {"no-frames", "link"}
