"""Jobs over RoCE in the lab whose ranks write no NCCL log: followed by the set-up traffic that the mirror showed.

The trainers' stand-in for NCCL opens real TCP connections over the mirrored network, as NCCL_SOCKET_IFNAME says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from end_to_end import train

from flowcheck.lab import Lab, LabConfig

NO_LOG = {"NCCL_DEBUG": "WARN"}
OVER_TRAINING = {**NO_LOG, "NCCL_SOCKET_IFNAME": "train0"}
RING: dict[str, Any] = {"algorithm": "ring", "protocol": "ll", "nccl_version": "2.19.4"}
TREE: dict[str, Any] = {"algorithm": "tree", "protocol": "simple", "nccl_version": "2.22.3", "ranks_per_node": 2}

ATTACH = """
import flowcheck, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(20, 20))
handle = flowcheck.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
print("covered" if handle.covered else f"not covered: {handle.reason}", flush=True)
handle.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nccl", [RING, TREE], ids=["ring", "tree"])
def test_a_job_without_a_log_is_followed_bit_for_bit(nccl: dict[str, Any], tmp_path: Path) -> None:
    outcome = train(tmp_path, ("sgd", "gpt"), transport="roce", ranks=4, channels=2, env=OVER_TRAINING, **nccl)
    outcome.check(("sgd", "gpt"))


def test_without_log_and_set_up_the_job_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The set-up passes another network: nothing is guessed, and the trainers are told what to change."""
    script = tmp_path / "attach.py"
    script.write_text(ATTACH)
    config = LabConfig(
        command=(str(script),), transport="roce", ranks=2, env=NO_LOG, daemon_args=("--nccl-version", "2.19.4"), **RING
    )
    with Lab(config) as lab:
        lab.train()
        assert lab.wait(120) == 0
        lab.finish()
    said = capfd.readouterr()
    assert "not covered: the job cannot be followed: rings and channels that are not known" in said.out + said.err
    assert "NCCL_SOCKET_IFNAME" in said.out + said.err
