"""A job over RoCE in the lab whose ranks write no NCCL log, and whose set-up passes no mirror: refused.

Those whose set-up passes the mirror are among the jobs of test_end_to_end_roce.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flowcheck.lab import Lab, LabConfig

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


def test_without_log_and_set_up_the_job_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The set-up passes another network: nothing is guessed, and the trainers are told what to change."""
    script = tmp_path / "attach.py"
    script.write_text(ATTACH)
    config = LabConfig(
        command=(str(script),), transport="roce", ranks=2, env={"NCCL_DEBUG": "WARN"}, algorithm="ring", protocol="ll",
        nccl_version="2.19.4", daemon_args=("--nccl-version", "2.19.4"),
    )  # fmt: skip
    with Lab(config) as lab:
        lab.train()
        assert lab.wait(120) == 0
        lab.finish()
    said = capfd.readouterr()
    assert "not covered: the job cannot be followed: rings and channels that are not known" in said.out + said.err
    assert "NCCL_SOCKET_IFNAME" in said.out + said.err
