"""A control server that asks for keys: what its tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from recording import Recording
from test_server import LOOPBACK

from flowcheck import access, keys, protocol
from flowcheck import server as server_module
from flowcheck.access import Access
from flowcheck.server import Server

MARKER = {"step": 1}
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a daemon, of a trainer who may write and of a reader who may not."""
    made = tmp_path / "keys"
    keys.generate(made, {"trainer": "write", "reader": "read"})
    return made


@pytest.fixture
def service() -> Recording:
    return Recording()


@pytest.fixture
def server(service: Recording, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(access, "LOOK_S", 0.05)
    monkeypatch.setattr(server_module, "HANDSHAKE_MS", 1000)
    with Server(service, [LOOPBACK], access=Access(folder)) as running:
        yield running


@pytest.fixture
def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process the client of that name."""
    return lambda name: monkeypatch.setenv("FLOWCHECK_KEY", str(folder / "clients" / f"{name}.secret"))


class Peer:
    """A client with the key of this process that sends whatever it likes."""

    def __init__(self, server: Server, key: keys.ClientKey | None = None) -> None:
        self.context = zmq.Context(1)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        key = key or keys.client_key()
        if key is not None:
            self.socket.set(zmq.CURVE_PUBLICKEY, key.pair.public)
            self.socket.set(zmq.CURVE_SECRETKEY, key.pair.secret)
            self.socket.set(zmq.CURVE_SERVERKEY, key.server)
        self.socket.connect(server.endpoints[0])

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout: float = 5.0) -> tuple[str, dict[str, Any]]:
        assert self.socket.poll(int(timeout * 1000)), "the server did not answer"
        kind, fields, _ = protocol.split(self.socket.recv_multipart())
        return kind, fields

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def peers(server: Server) -> Iterator[Any]:
    opened: list[Peer] = []

    def connect() -> Peer:
        opened.append(Peer(server))
        return opened[-1]

    yield connect
    for peer in opened:
        peer.close()


def remove(folder: Path, name: str) -> None:
    (folder / "authorized" / f"{name}.public").unlink()


def refusal(peer: Peer) -> str:
    """The message of the next answer, an error of a lack of rights."""
    kind, fields = peer.receive()
    assert (kind, fields.get("kind")) == ("error", "NoPermission"), fields
    return str(fields["message"])
