"""Who may connect: CURVE on every tcp socket, and what hostile peers cost."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from recording import Recording, wait_for
from secured import MARKER, Peer, folder, peers, remove, server, service, use
from test_description import job
from test_server import LOOPBACK, begin, read, snapshot, text_of

from flowcheck import client, protocol
from flowcheck import connection as connection_module
from flowcheck import server as server_module
from flowcheck.access import Access
from flowcheck.connection import Connection, Unreachable
from flowcheck.errors import FlowcheckError, NoPermission
from flowcheck.protocol import CHUNK, MAX_FRAME
from flowcheck.server import Deadlines, Server

__all__ = ["folder", "peers", "server", "service", "use"]


# Connections


def test_whoever_has_a_key_is_served(service: Recording, server: Server, use: Any) -> None:
    service.snapshot = snapshot(2 * CHUNK)
    for name in ("reader", "trainer"):
        use(name)
        assert client.status(server.endpoints[0])["markers"] == 0
        assert client.fetch(server.endpoints[0]).step == 42


def test_without_a_key_nothing_is_said_and_the_client_says_why(server: Server) -> None:
    started = time.monotonic()
    with pytest.raises(NoPermission, match="asks for a key: set FLOWCHECK_KEY"):
        client.status(server.endpoints[0], 10)
    assert time.monotonic() - started < 5, "there is nothing to wait for"
    wait_for(lambda: server.counters["bad_handshakes"] > 0)
    assert server.counters["messages"] == 0


def test_a_key_that_is_not_known_here(server: Server, folder: Path, use: Any) -> None:
    use("trainer")
    remove(folder, "trainer")
    started = time.monotonic()
    with pytest.raises(NoPermission, match="not authorized there"):
        client.status(server.endpoints[0], 10)
    assert time.monotonic() - started < 5
    use("reader")
    control = client.status(server.endpoints[0])["control"]
    assert control["refused_connections"] == 1 and control["refused_messages"] == 0


def test_a_daemon_with_another_key_gets_nothing(server: Server, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use("trainer")
    monkeypatch.setenv("FLOWCHECK_SERVER_KEY", zmq.curve_keypair()[0].decode())
    with pytest.raises(Unreachable, match="whether its key is the one in FLOWCHECK_KEY's file"):
        client.status(server.endpoints[0], 0.5)
    assert server.counters["messages"] == 0
    assert server.counters["bad_handshakes"] > 0


def test_a_daemon_without_keys_says_so(service: Recording, use: Any) -> None:
    use("trainer")
    with Server(service, [LOOPBACK]) as open_, pytest.raises(NoPermission, match="started without keys"):
        client.status(open_.endpoints[0], 10)


def test_a_trainer_comes_back_once_the_daemons_keys_are_put_right(
    service: Recording, folder: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal ends what libzmq does by itself; nobody is there to start the trainer's connection anew."""
    monkeypatch.setattr(connection_module, "AGAIN_S", 0.05)
    use("trainer")
    first = Server(service, [LOOPBACK], access=Access(folder)).start()
    endpoint = first.endpoints[0]
    with Connection(endpoint, send_queue=10) as line:

        def marker_arrives() -> bool:
            before = len(service.markers)
            line.post(protocol.encode("marker", run="r", epoch=1, marker=MARKER))
            time.sleep(0.02)
            return len(service.markers) > before

        wait_for(marker_arrives)
        first.close()
        file = folder / "authorized" / "trainer.public"
        file.rename(folder / "aside")
        access_ = Access(folder)
        with Server(service, [endpoint], access=access_):
            wait_for(lambda: (line.post(b"{}"), access_.refused["connections"] >= 2)[1])
            (folder / "aside").rename(file)
            wait_for(marker_arrives)


def test_unix_sockets_need_no_key_and_tcp_beside_them_does(
    service: Recording, folder: Path, tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "socket"
    # Any address may be listened on with keys. The order of the endpoints does not matter.
    for addresses in ([f"ipc://{path}", "tcp://0.0.0.0:0"], ["tcp://0.0.0.0:0", f"ipc://{path}"]):
        with Server(service, addresses, access=Access(folder)) as server:
            unix, tcp = sorted(server.endpoints)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            tcp = tcp.replace("0.0.0.0", "127.0.0.1")
            monkeypatch.delenv("FLOWCHECK_KEY", raising=False)
            with Connection(unix) as connection:
                connection.request("layout", "layout-ack", 5, run="r", epoch=1, layout={})
            with pytest.raises(FlowcheckError, match="FLOWCHECK_KEY"):
                client.status(tcp, 5)
            use("reader")
            assert client.status(unix)["markers"] == 0
            assert client.status(tcp)["markers"] == 0
    assert len(service.layouts) == 2


@pytest.mark.parametrize("how", ["silent", "missing"])
def test_nobody_comes_in_when_nobody_answers_for_keys(
    how: str, service: Recording, folder: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("trainer")
    if how == "silent":
        monkeypatch.setattr(server_module.Server, "_authenticate", lambda self: None)
    else:
        monkeypatch.setattr(server_module, "ZAP_ENDPOINT", "inproc://elsewhere")
    with Server(service, [LOOPBACK], access=Access(folder)) as server, pytest.raises(Unreachable):
        client.status(server.endpoints[0], 0.5)


# Hostile and slow peers


def test_oversize_messages_end_their_connection_only(service: Recording, server: Server, use: Any, peers: Any) -> None:
    use("trainer")
    big, other = peers(), peers()
    for size in (MAX_FRAME, 4 * MAX_FRAME):
        big.send(protocol.encode("attach-text", offset=0), bytes(size))
    big.send(bytes(protocol.MAX_HEADER + 1))
    big.send(protocol.encode("ping"))
    wait_for(lambda: big.receive()[0] == "pong")  # all before it has been taken, or dropped
    other.send(protocol.encode("ping"))
    assert other.receive()[0] == "pong"
    control = client.status(server.endpoints[0])["control"]
    # Two pings, the status, and at most the large header, which is no message either; no oversize one got so far.
    assert control["messages"] - control["malformed"] == 3 and control["malformed"] <= 1


def test_bytes_that_are_no_greeting_and_peers_that_say_nothing(
    service: Recording, folder: Path, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_MS", 300)
    use("reader")
    with Server(service, [LOOPBACK], access=Access(folder)) as server:
        host, _, port = server.endpoints[0].removeprefix("tcp://").rpartition(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        null = greeting.replace(b"CURVE", b"NULL\0")
        said = [
            b"", b"\xff", greeting[:11], greeting, greeting + b"\x04\xc8\x05HELLO" + bytes(194),
            greeting + b"\x06" + (1 << 40).to_bytes(8, "big"), null + b"\x04\x29\x05READY" + bytes(34),
            b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), bytes(4096),
        ]  # fmt: skip
        sockets = [socket.create_connection((host, int(port))) for _ in said]
        for sock, data in zip(sockets, said, strict=True):
            sock.settimeout(5)
            sock.sendall(data)
        assert client.status(server.endpoints[0], 2)["markers"] == 0
        for sock, data in zip(sockets, said, strict=True):
            try:
                while sock.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            except TimeoutError:
                pytest.fail(f"a peer that said {data[:20]!r} is still connected")
            sock.close()
        # One status, by one who has a key: nothing else got as far as a message.
        assert client.status(server.endpoints[0])["control"]["messages"] == 2


def test_a_slow_reader_is_cut_and_blocks_nobody(service: Recording, folder: Path, use: Any) -> None:
    service.snapshot = snapshot(8 * CHUNK)
    use("reader")
    with Server(service, [LOOPBACK], access=Access(folder), deadlines=Deadlines(fetch_idle=0.3)) as server:
        slow = Peer(server)
        slow.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
        session = slow.receive()[1]["session"]
        for request in range(protocol.WINDOW):
            slow.send(read(session, request))
        assert client.fetch(server.endpoints[0]).step == 42
        wait_for(lambda: service.readings[0].closed)
        assert server.counters["cut"] == 1
        slow.close()


@pytest.mark.parametrize("run", ["..", "../../etc", "/etc/passwd", ".hidden", "a/b", "a\\..\\b", "a\0b", "", "x" * 65])
def test_paths_in_place_of_run_names(service: Recording, server: Server, use: Any, peers: Any, run: str) -> None:
    use("trainer")
    peer = peers()
    description = job()
    description.run = run
    kind, answer = begin(peer, text_of(description))
    assert kind == "error" and "run" in answer["message"]
    assert not service.uploads
