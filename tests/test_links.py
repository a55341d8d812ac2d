"""Whether a trainer can still reach the daemon: only when it cannot may a step without its marker be one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recording import Recording, wait_for

from flowcheck import protocol
from flowcheck.connection import Connection
from flowcheck.server import Server

MARKER = {"step": 1, "sequence": 2, "version": 0, "groups": None, "canaries": [], "problem": None}

TRAINER = """
import sys, time
from flowcheck import connection, protocol
connection.HEARTBEAT_MS, connection.HEARTBEAT_TTL_MS = 100, 500
line = connection.Connection(sys.argv[1], heartbeat=True)
line.post(protocol.encode("marker", run="job", epoch=3, marker={marker}))
time.sleep(60)
"""


def marker(run: str, epoch: int) -> bytes:
    return protocol.encode("marker", run=run, epoch=epoch, marker=MARKER)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_link_stands_from_the_first_marker_to_the_end_of_its_connection(tmp_path: Path, scheme: str) -> None:
    service = Recording()
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/socket"
    with Server(service, [address]) as server:
        one, other = Connection(server.endpoints[0], send_queue=1000), Connection(server.endpoints[0])
        # On a unix socket libzmq drops what a closed peer had sent beyond the queue's limit.
        count = 500 if scheme == "tcp" else 8
        for _ in range(count):
            assert one.post(marker("job", 1))
        other.post(marker("other", 1))
        wait_for(lambda: len(service.links) == 2)
        assert sorted(service.links) == [("job", 1, True), ("other", 1, True)]
        one.close(linger=20)
        wait_for(lambda: ("job", 1, False) in service.links)
        assert len(service.markers_of("job")) == count  # what it had sent was taken first
        again = Connection(server.endpoints[0])
        again.post(marker("job", 1))
        wait_for(lambda: service.links[-1] == ("job", 1, True))
        again.close()
        other.close()


def test_a_trainer_that_is_out_of_reach_is_noticed(tmp_path: Path) -> None:
    service = Recording()
    root = Path(__file__).resolve().parent.parent
    with Server(service, ["tcp://127.0.0.1:0"]) as server:
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER.replace("{marker}", repr(MARKER)), server.endpoints[0]], cwd=root
        )
        try:
            wait_for(lambda: service.links == [("job", 3, True)], 30)
            time.sleep(0.5)  # until its first heartbeat
            os.kill(trainer.pid, signal.SIGSTOP)  # no FIN, no answer: like a link that is down
            wait_for(lambda: service.links[-1] == ("job", 3, False), 20)
        finally:
            trainer.kill()
            trainer.wait()
