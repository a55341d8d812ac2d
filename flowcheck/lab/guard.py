"""The process between the caller and the lab: makes the namespaces, ends everything when the caller is gone.

Run as `python -m flowcheck.lab.guard SOCKET CALLER FOLDER`: SOCKET is the inherited descriptor of the control
socket, CALLER the process id of the caller, FOLDER a private temporary folder that goes when the lab goes.
The guard stays outside the PID namespace; its child is process 1 in there, and with that one the kernel ends
every other process.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress

from flowcheck.errors import FlowcheckError
from flowcheck.lab import namespaces
from flowcheck.lab.supervisor import supervise


def main(control_fd: int, caller: int, folder: str) -> int:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        # A caller that forked has given its end of the socket to its children too: watch the process as well.
        try:
            watched = [os.pidfd_open(caller)]
        except ProcessLookupError:
            return 1
        try:
            namespaces.isolate()
        except FlowcheckError as error:
            _report(control, error.exit_code, str(error))
            return error.exit_code
        first = os.fork()
        if first == 0:
            os.close(watched[0])
            os._exit(_first_process(control, folder))
        watched.append(os.pidfd_open(first))
        _wait(control, watched)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_process(control: socket.socket, folder: str) -> int:
    try:
        namespaces.die_with_parent(signal.SIGKILL)
        namespaces.mount_proc()
        return supervise(control, folder)
    except (BrokenPipeError, ConnectionResetError):
        return 1
    except Exception as error:
        _report(control, 1, f"the lab's first process failed: {error!r}")
        return 1


def _report(control: socket.socket, code: int, message: str) -> None:
    with suppress(OSError):
        control.sendall(json.dumps({"event": "failed", "code": code, "message": message}).encode() + b"\n")


def _wait(control: socket.socket, watched: list[int]) -> None:
    """Until the caller closed its end of the socket or ended, or the lab ended by itself."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    poll.poll()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
