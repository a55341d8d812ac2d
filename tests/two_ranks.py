"""A real two-rank job as two processes of a scenario script (attach_job.py, agent_job.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    """A tcp port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(
    script: str,
    folder: Path,
    endpoint: str,
    scenarios: Sequence[str],
    environment: dict[str, str],
    meanwhile: Callable[[], None],
) -> list[dict[str, Any]]:
    """Both ranks to their end, `meanwhile` again and again until then; what each wrote to its JSON file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **environment}
    ranks = []
    try:
        command = [str(free_port()), endpoint, str(folder), *scenarios]
        for rank in range(2):
            with (folder / f"stderr{rank}").open("w") as errors:
                argv = [sys.executable, str(HERE / script), str(rank), "2", *command]
                ranks.append(subprocess.Popen(argv, env=environment, stderr=errors))
        deadline = time.monotonic() + 200
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.02)
        said = "\n".join((folder / f"stderr{rank}").read_text() for rank in range(2))
        assert [rank.poll() for rank in ranks] == [0, 0], said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
