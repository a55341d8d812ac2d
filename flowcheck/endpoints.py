"""Where the control server listens: tcp://HOST:PORT and ipc://PATH, checked before ZeroMQ sees them.

Anyone who reaches an endpoint without keys can read the model and replace a run, so an address beyond loopback needs
keys (`--keys`) or an explicit `--insecure`, and an ipc socket is for its owner alone.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import zmq

from flowcheck.errors import FlowcheckError, NoPermission, UsageError
from flowcheck.keys import Pair

ZAP_DOMAIN = "flowcheck"
MAX_IPC_PATH = 107  # sun_path of unix(7), without the final zero byte


def check(endpoint: str, open_to_all: bool) -> None:
    """UsageError if `endpoint` cannot be listened on as given. open_to_all: addresses beyond loopback may be, too."""
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
    if not open_to_all and not _loopback(host):
        raise UsageError(
            f"endpoint {endpoint!r} is open to other machines: give --keys DIR (flowcheck keygen DIR makes them), "
            "listen on 127.0.0.1 or ipc://, or give --insecure where everyone may read and replace the model"
        )


def bind_all(router: zmq.Socket, endpoints: Sequence[str], pair: Pair | None) -> list[str]:
    """Bind checked endpoints and return them with their real ports; with a key pair, tcp is for those who have keys.

    Raises FlowcheckError or NoPermission.
    """
    bound = {endpoint: _bind(router, endpoint) for endpoint in endpoints if endpoint.startswith("ipc://")}
    if pair is not None:  # from here on: sockets bound earlier stay as they are
        router.set(zmq.CURVE_SECRETKEY, pair.secret)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in while nobody answers for them
    return [bound[endpoint] if endpoint in bound else _bind(router, endpoint) for endpoint in endpoints]


def _bind(router: zmq.Socket, endpoint: str) -> str:
    if endpoint.startswith("ipc://"):
        _refuse_live(Path(endpoint[6:]))
    router.set(zmq.IPV6, int("[" in endpoint))  # else 127.0.0.1 comes back as ::ffff:127.0.0.1
    umask = os.umask(0o177)  # an ipc socket is made for its owner alone, not changed to that later
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise NoPermission(f"cannot listen on {endpoint}: no permission") from None
        if error.errno == errno.EADDRINUSE:
            raise FlowcheckError(f"cannot listen on {endpoint}: already in use, choose another") from None
        raise FlowcheckError(f"cannot listen on {endpoint}: {os.strerror(error.errno or 0)}") from None
    finally:
        os.umask(umask)
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
