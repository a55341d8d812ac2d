"""After the daemon's warm-up nothing is compiled any more: a ring fills while a compiler runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from numba.core.registry import CPUDispatcher
from nccl_job import trained
from synthetic_job import Follower, trained as gloo_trained
from test_nccl_steps import pinned
from flowcheck.pipeline import Limits, Pipeline
from mirror.internal import _Inner
from reconstruct.steps import Waits

def signatures():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("mirror", "reconstruct", "flowcheck"):
            for held in vars(module).values():
                kernel = held._kernel if isinstance(held, _Inner) else held
                if isinstance(kernel, CPUDispatcher):
                    function = kernel.py_func
                    found[f"{function.__module__}.{function.__name__}"] = len(kernel.signatures)
    return found

Pipeline(Limits(flows=64, reorder=1 << 20, landings=1 << 20), Waits()).warm_up()
before = signatures()
assert len(before) > 100 and sum(before.values()) > 5
jobs = [
    trained(3, **pinned("ring", "ll", "4, 2 channels")),
    trained(3, **pinned("tree", "ll128", version="2.28.9")),
    trained(3, **pinned("ring", "simple")),
    trained(3, **pinned("ring", "simple", sockets=2)),
    trained(3, world=3, nccl={"version": "2.28.9"}, told={}),
    gloo_trained(3),
]
for job in jobs:
    Follower(job).run().check(3)
after = signatures()
print([name for name, count in after.items() if before.get(name, 0) != count])
"""


def test_nothing_is_compiled_after_the_warm_up() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", done.stdout
