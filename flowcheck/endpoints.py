"""Where the control server listens: tcp://HOST:PORT and ipc://PATH, checked before ZeroMQ sees them.

Anyone who reaches an endpoint can read the model and replace a run, so an address beyond loopback has to be
asked for (`--insecure`) until keys exist, and an ipc socket is for its owner alone.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path

import zmq

from flowcheck.errors import BadConfig, FlowcheckError, NoPermission, UsageError

MAX_IPC_PATH = 107  # sun_path of unix(7), without the final zero byte


def check(endpoint: str, insecure: bool) -> None:
    """UsageError if `endpoint` cannot be listened on as given."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not rest:
        raise UsageError(f"endpoint {endpoint!r}: use tcp://HOST:PORT or ipc://PATH")
    if scheme == "ipc":
        if len(os.fsencode(rest)) > MAX_IPC_PATH:
            raise UsageError(f"endpoint {endpoint!r}: the path is longer than {MAX_IPC_PATH} bytes")
        return
    host, _, port = rest.rpartition(":")
    if not host or not (port.isdecimal() and int(port) < 65536):
        raise UsageError(f"endpoint {endpoint!r}: use tcp://HOST:PORT with a port from 0 to 65535")
    if not insecure and not _loopback(host):
        raise UsageError(
            f"endpoint {endpoint!r} is open to other machines without keys: listen on 127.0.0.1 or ipc://, "
            "or give --insecure where everyone on the network may read and replace the model"
        )


def check_keys(keys: str | None) -> None:
    """BadConfig if key files are asked for: better no start than one without the asked protection."""
    keys = keys or os.environ.get("FLOWCHECK_KEYS")
    if keys:
        raise BadConfig(
            f"key files ({keys}) are not supported yet: unset FLOWCHECK_KEYS and listen on loopback or ipc"
        )


def bind(router: zmq.Socket, endpoint: str) -> str:
    """Bind a checked endpoint and return it with its real port. FlowcheckError if the address is taken."""
    if endpoint.startswith("ipc://"):
        _refuse_live(Path(endpoint[6:]))
    router.set(zmq.IPV6, int("[" in endpoint))  # else 127.0.0.1 comes back as ::ffff:127.0.0.1
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise NoPermission(f"cannot listen on {endpoint}: no permission") from None
        if error.errno == errno.EADDRINUSE:
            raise FlowcheckError(f"cannot listen on {endpoint}: already in use, choose another") from None
        raise FlowcheckError(f"cannot listen on {endpoint}: {os.strerror(error.errno or 0)}") from None
    if endpoint.startswith("ipc://"):
        os.chmod(endpoint[6:], 0o600)
    return bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()  # type: ignore[arg-type]


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _refuse_live(path: Path) -> None:
    """ZeroMQ takes an ipc path over from a daemon that still listens on it; a dead one's leftover may go."""
    if not path.exists():
        return
    if not path.is_socket():
        raise UsageError(f"cannot listen on ipc://{path}: a file is there, choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise FlowcheckError(f"cannot listen on ipc://{path}: another daemon does, choose another path")
