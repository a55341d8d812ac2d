"""The RoCE benchmark runs, measures what it claims to, and refuses traffic that lacks frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowcheck.errors import FlowcheckError

pytestmark = pytest.mark.slow  # compiles the whole way for RoCE

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import roce  # noqa: E402
import roce_traffic  # noqa: E402


def test_every_protocol_is_measured_over_its_whole_payload() -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "benchmarks" / "roce.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    results = [roce.Measured(**result) for result in json.loads(done.stdout)["results"]]
    names = ("LL", "LL128", "Simple")
    assert [(r.protocol, r.mtu) for r in results] == [(name, mtu) for name in names for mtu in (1024, 4096)]
    # Of four ranks' all-reduce each of two links carries 6/4 of the tensor.
    data = roce_traffic.TIMED * 2 * 1.5 * 4 * roce.QUICK_FLOATS
    for r in results:
        assert r.payload / data == pytest.approx({"LL": 2, "LL128": 1024 / 960, "Simple": 1}[r.protocol], rel=0.01)
        assert 0.99 < r.payload / r.packets / r.mtu <= 1
        assert r.frames > r.packets
        for times in (r.values, r.decoder, r.memcpy, r.copy_packets, r.transport, r.parse):
            assert len(times) == 3 and min(times) > 0
        # Half of the payload are partial sums, which are stepped over.
        assert r.placed / r.payload == pytest.approx(0.5, rel=0.01)
    text = roce.report(results)
    assert "LL128 4096" in text and "Simple 1024" in text


def test_traffic_that_lacks_a_frame_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = roce_traffic.make("Simple", 4096, roce.QUICK_FLOATS)
    block = whole.timed[0]
    for name in ("offset", "caplen", "wirelen", "ts", "vlan"):
        column = getattr(block, name)
        setattr(block, name, column[[i for i in range(len(column)) if i != len(column) // 2]])
    monkeypatch.setattr(roce, "make", lambda *_: whole)
    with pytest.raises(FlowcheckError, match="lacks packets"):
        roce.measure("Simple", 4096, roce.QUICK_FLOATS, 1)
