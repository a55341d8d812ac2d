"""Jobs over NCCL's TCP sockets in the lab: real connections, mirrored by the kernel, followed bit for bit.

Those of `make test` are among the jobs of test_end_to_end_roce.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from end_to_end import train

# cases, algorithm, protocol, release, ranks, channels, NCCL_SOCKET_NTHREADS
LONGER = [
    (("gpt",), algorithm, protocol, version, ranks, channels, threads)
    for algorithm, protocol in (("ring", "ll"), ("ring", "ll128"), ("tree", "ll"), ("tree", "simple"))
    for version, ranks, channels, threads in (("2.18.6", 2, 1, 0), ("2.30.7", 4, 2, 4))
]


@pytest.mark.slow
@pytest.mark.parametrize("job", LONGER, ids=lambda job: "-".join(map(str, job[1:])))
def test_a_job_over_sockets_is_followed_bit_for_bit(job: tuple[Any, ...], tmp_path: Path) -> None:
    cases, algorithm, protocol, version, ranks, channels, threads = job
    outcome = train(
        tmp_path, cases, transport="socket", ranks=ranks, channels=channels, nccl_version=version,
        algorithm=algorithm, protocol=protocol, env={"NCCL_SOCKET_NTHREADS": str(threads)},
    )  # fmt: skip
    outcome.check(cases)
    for case in cases:
        assert outcome.statuses[case]["exact"], case
