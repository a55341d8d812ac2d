"""A training script whose processes train many small jobs one after another, as if each had been started by itself: a
process group, settings of NCCL, a log of NCCL and a run name of its own. Neighbours with equal fields share the group
and its log, as the cases of one cases.py do.

Usage: many.py OUT JOBS. JOBS: JSON, [[run name, case of cases.py, {fields of LabConfig}], ..]. Notes as cases.py does;
a job that ends with an error ends the script, the jobs after it stay without notes.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import cases
import torch.distributed as dist

from flowcheck.lab import LabConfig
from flowcheck.lab.topology import nccl_environment


def settle(config: LabConfig, rank: int, log: str) -> None:
    """The environment in which a job of this lab would have been started, for the group that is made next."""
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        del os.environ[name]
    os.environ.update({**nccl_environment(config, rank), **config.env})
    os.environ["NCCL_DEBUG_FILE"] = log


def main() -> None:
    out = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*master, world, rank == 0)
    gc.freeze()  # what torch's import made stays: looking through it again and again costs a tenth of the time
    with cases.noting(out) as shout:
        jobs = json.loads(Path(sys.argv[2]).read_text())
        for fields, sharing in itertools.groupby(jobs, key=lambda job: job[2]):
            together = list(sharing)
            first = together[0][0]
            settle(LabConfig(**fields), rank, f"{out}/{first}.%h.%p.log")
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(first, store),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=120),
            )
            for run, case, _ in together:
                cases.run(case, shout, run)
            cases.leave()


if __name__ == "__main__":
    main()
