"""Real jobs in the lab with both ends of their link mirrored, so every frame twice, and faults on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from end_to_end import CASES, Outcome, mirrors

from flowcheck.client import status
from flowcheck.lab import Lab, LabConfig

NETWORKS: dict[str, dict[str, Any]] = {
    "gloo": {},
    "roce": {"transport": "roce", "algorithm": "ring", "protocol": "simple"},
    "sockets": {"transport": "socket", "algorithm": "ring", "protocol": "simple", "nccl_version": "2.26.2"},
}


def train(folder: Path, network: str, fault: str) -> tuple[Outcome, dict[str, Any]]:
    """Two ranks; what they and the journal say, and the daemon's last status. What is claimed as known is right."""
    config = LabConfig(
        command=(CASES, str(folder), "gpt"),
        mirrors=mirrors("0:both", "1:both"),
        journal=str(folder / "journal.jsonl"),
        faults=(fault,),
        **NETWORKS[network],
    )
    with Lab(config) as lab:
        lab.train()
        assert lab.wait(240) == 0
        assert lab.endpoint is not None
        answer = status(lab.endpoint, 20)
        lab.finish()
    outcome = Outcome(folder)
    assert [line["step"] for line in outcome.journal] == list(range(1, 7))
    for line in outcome.journal:
        if line["unknown"] == 0:
            assert set(outcome.truth["gpt", line["step"]].values()) == {line["digest"]}
        else:
            assert line["digest"] is None
    return outcome, answer


@pytest.mark.parametrize(
    "network", ["gloo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("roce", "sockets"))]
)
def test_what_one_of_two_copies_lost_costs_nothing(network: str, tmp_path: Path, allowed: None) -> None:
    outcome, answer = train(tmp_path, network, "drop=0.01,seed=3")
    (source,) = answer["sources"]
    assert source["faults"]["specs"] == {"mon0#0": "drop=0.01,seed=3"}
    assert source["faults"]["hit"]["drop"][0] > 3
    assert answer["capture"]["conflicts"] == answer["capture"]["roce_conflicts"] == 0
    lost_twice = answer["capture"]["hole_bytes"] + answer["capture"]["roce_hole_bytes"]  # one frame of 10,000
    if not lost_twice:
        assert all(line["unknown"] == 0 for line in outcome.journal)


def test_damaged_copies_are_an_alarm_and_no_wrong_value(
    tmp_path: Path, allowed: None, capfd: pytest.CaptureFixture[str]
) -> None:
    _, answer = train(tmp_path, "gloo", "corrupt=0.05,seed=3")
    assert answer["sources"][0]["faults"]["hit"]["corrupt"][0] > 10
    assert answer["capture"]["conflicts"] > 0
    said = capfd.readouterr().err
    assert "FAULTS ARE INJECTED into mon0: corrupt=0.05,seed=3" in said
    assert "two copies of" in said
