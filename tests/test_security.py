"""Who may connect: keys in files, CURVE on every tcp socket, rights to read and write, and what hostile peers cost."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from recording import Recording, wait_for
from test_description import job
from test_server import LOOPBACK, begin, chunk, read, snapshot, text_of

from flowcheck import access, answers, client, keys, protocol
from flowcheck import connection as connection_module
from flowcheck import server as server_module
from flowcheck.access import READING, Access
from flowcheck.cli import main
from flowcheck.connection import Connection, Unreachable
from flowcheck.errors import BadConfig, FlowcheckError, NoPermission, UsageError
from flowcheck.protocol import CHUNK, FIELDS, MAX_FRAME
from flowcheck.server import Deadlines, Server

MARKER = {"step": 1}
FROM_DAEMON = {
    "pong", "status-reply", "error", "attach-open", "attach-credit", "attach-ack", "layout-ack", "fetch-open",
    "fetch-data", "repair-ask", "repair-cancel", "groups-ask", "compare-ask", "join-ask", "compare-reply",
}  # fmt: skip
TO_DAEMON = sorted(FIELDS.keys() - FROM_DAEMON)


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


# Key files


def test_what_is_made_is_private_and_never_overwritten(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is there already"):
        keys.generate(folder, {"another": "read", "trainer": "read"})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    keys.generate(folder, {"another": "read"})
    pair = keys.read_server(folder)
    assert before[folder / "server.secret"] == (folder / "server.secret").read_bytes()
    public, who = keys.read_client(folder / "authorized" / "another.public")
    assert who == keys.Client("another", "read")
    os.environ["FLOWCHECK_KEY"] = str(folder / "clients" / "another.secret")
    try:
        mine = keys.client_key()
    finally:
        del os.environ["FLOWCHECK_KEY"]
    assert mine is not None and mine.server == pair.public and mine.pair.public == public
    secrets = [path.read_text() for path in folder.rglob("*.secret")]
    assert len({re.findall(r'secret = "(.*)"', text)[0] for text in secrets}) == len(secrets) == 4
    for path in folder.rglob("*.public"):
        assert "secret" not in path.read_text()


@pytest.mark.parametrize("name", ["", ".hidden", "../out", "a/b", "a\0b", "x" * 65, "a b", "-\n", "ä"])
def test_client_names_that_are_no_file_names(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="client"):
        keys.generate(folder, {name: "read"})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
@pytest.mark.parametrize("which", ["server.secret", "clients/trainer.secret"])
def test_a_secret_that_others_can_read_is_refused(
    folder: Path, which: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / which
    path.chmod(mode)
    monkeypatch.setenv("FLOWCHECK_KEY", str(path))
    with pytest.raises(NoPermission, match=f"mode {mode:04o}, others can read it: chmod 0600") as error:
        keys.read_server(folder) if which == "server.secret" else keys.client_key()
    assert str(path) in str(error.value)
    path.chmod(0o400)
    keys.read_server(folder)
    if which != "server.secret":
        keys.client_key()


@pytest.mark.parametrize("which", ["", "authorized"])
def test_a_folder_that_others_can_change_decides_nothing(folder: Path, which: str) -> None:
    (folder / which).chmod(0o770)
    with pytest.raises(NoPermission, match="mode 0770, others can change it: chmod 0750"):
        Access(folder)
    with pytest.raises(NoPermission, match="others can change it"):
        keys.generate(folder, {"another": "read"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_refused(folder: Path) -> None:
    os.chown(folder / "server.secret", 12345, 12345)
    with pytest.raises(NoPermission, match="belongs to another user"):
        Access(folder)
    os.chown(folder / "server.secret", 0, 0)
    os.chown(folder / "authorized", 12345, 12345)
    with pytest.raises(NoPermission, match="authorized belongs to another user"):
        Access(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "public: expected a key"),
        ("public = 'short'\n", "public: expected a key"),
        ("public = 7\n", "public: expected a string"),
        ("\xff\xfe", "not a key file"),
        ("not toml", "not a key file"),
        ("a = 'x'\n" * 2000, "larger than 4096 bytes"),
    ],
)
def test_key_files_that_are_none(folder: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "server.secret"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadConfig, match=f"server.secret: {said}"):
        Access(folder)
    monkeypatch.setenv("FLOWCHECK_KEY", str(path))
    with pytest.raises(BadConfig, match=said):
        client.status("tcp://127.0.0.1:1")


def test_a_pair_that_is_none_and_files_that_are_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "server.secret"
    other = zmq.curve_keypair()[0].decode()
    path.write_text(re.sub('public = ".*"', f'public = "{other}"', path.read_text()))
    with pytest.raises(BadConfig, match="not the public key of that secret"):
        Access(folder)
    path.unlink()
    with pytest.raises(BadConfig, match="flowcheck keygen"):
        Access(folder)
    path.mkdir()
    with pytest.raises(BadConfig, match=r"server\.secret"):
        Access(folder)
    monkeypatch.setenv("FLOWCHECK_KEY", str(folder / "nowhere"))
    with pytest.raises(BadConfig, match="nowhere: No such file"):
        client.status("tcp://127.0.0.1:1")
    with pytest.raises(BadConfig, match="No such file"):
        Access(folder / "nowhere")


def test_the_daemons_public_key_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "clients" / "reader.secret"
    lines = path.read_text().splitlines()
    server = next(line for line in lines if line.startswith("server")).split('"')[1]
    path.write_text("\n".join(line for line in lines if not line.startswith("server")))
    monkeypatch.setenv("FLOWCHECK_KEY", str(path))
    with pytest.raises(BadConfig, match="FLOWCHECK_SERVER_KEY"):
        keys.client_key()
    public = folder / "server.public"
    public.write_text(f'public = "{server}"\n')
    public.chmod(0o644)  # no secret
    for given in (server, str(public)):
        monkeypatch.setenv("FLOWCHECK_SERVER_KEY", given)
        found = keys.client_key()
        assert found is not None and found.server == server.encode()


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


# Rights


def test_every_message_has_its_right(folder: Path) -> None:
    rights = Access(folder)
    files = {name: folder / "authorized" / f"{name}.public" for name in ("reader", "trainer")}
    public = {name: keys.read_client(path)[0].decode() for name, path in files.items()}
    for kind in TO_DAEMON:
        rights.check(public["trainer"], kind)
        if kind in READING:
            rights.check(public["reader"], kind)
        else:
            with pytest.raises(NoPermission, match=f"{kind}: the key reader may only read"):
                rights.check(public["reader"], kind)
    assert set(TO_DAEMON) >= READING
    assert {"marker", "detach", "layout", *answers.KINDS} <= set(TO_DAEMON) - READING
    assert rights.refused == {"connections": 0, "messages": len(set(TO_DAEMON) - READING)}


def test_a_key_to_read_with_cannot_attach_or_repair(
    service: Recording, server: Server, use: Any, peers: Any
) -> None:
    use("reader")
    peer = peers()
    names = {"run": "r", "epoch": 1}
    text = text_of(job())
    data = {"key": "model/a", "lo": 0, "hi": 1, "step": 1, "sections": [["model", 4]], "counter": None}
    writing: list[list[bytes]] = [
        [protocol.encode("attach-begin", bytes=len(text), digest="0", job="j", late=False)],
        [protocol.encode("attach-text", offset=0), text],
        chunk(1, "model/a", 0, b"1234"),
        [protocol.encode("attach-commit", session=1)],
        [protocol.encode("layout", layout={}, **names)],
        [protocol.encode("agent-hello", run="r", job="j", rank=0, step=1)],
        [protocol.encode("repair-data", ask=1, digest="0", **data, **names), b"1234"],
        [protocol.encode("repair-refused", ask=1, reason="no", **names)],
    ]
    for frames in writing:
        peer.send(*frames)
        assert "the key reader may only read: use one that may write" in refusal(peer)
    peer.send(protocol.encode("marker", marker=MARKER, **names))  # nobody reads an answer to these
    peer.send(protocol.encode("detach", step=3, **names))
    peer.send(protocol.encode("ping"))
    assert peer.receive()[0] == "pong"
    assert not (service.uploads or service.markers or service.layouts or service.detached or service.links)
    control = client.status(server.endpoints[0])["control"]
    assert control["refused_messages"] == len(writing) + 2
    assert control["malformed"] == 0


def test_what_one_key_began_another_cannot_go_on_with(
    service: Recording, server: Server, use: Any, folder: Path
) -> None:
    """Rights are those of a connection's key, whatever name its other end has given itself."""
    use("trainer")
    text = text_of(job())
    first = Peer(server)
    first.socket.disconnect(server.endpoints[0])
    first.socket.set(zmq.ROUTING_ID, b"same name")
    first.socket.connect(server.endpoints[0])
    kind, opened = begin(first, text)
    assert kind == "attach-open"
    first.close()
    use("reader")
    second = Peer(server)
    second.socket.disconnect(server.endpoints[0])
    second.socket.set(zmq.ROUTING_ID, b"same name")
    second.socket.connect(server.endpoints[0])
    key, spec = next((key, spec) for key, spec in job().tensors() if spec.nbytes)
    second.send(*chunk(opened["session"], key, 0, bytes(spec.nbytes)))
    assert "may only read" in refusal(second)
    assert not any(service.uploads[0].tensors[key])
    second.close()


def test_a_revoked_key_is_out_at_once(
    service: Recording, server: Server, use: Any, folder: Path, peers: Any
) -> None:
    service.snapshot = snapshot(CHUNK)
    use("trainer")
    marking, fetching, attaching = peers(), peers(), peers()
    marking.send(protocol.encode("marker", run="r", epoch=1, marker=MARKER))
    fetching.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
    session = fetching.receive()[1]["session"]
    assert begin(attaching, text_of(job()))[0] == "attach-open"
    wait_for(lambda: service.links == [("r", 1, True)])
    remove(folder, "trainer")
    with pytest.raises(NoPermission, match="not authorized there"):
        client.status(server.endpoints[0])
    # What was open is closed without a further message of the key's owner.
    wait_for(lambda: service.readings[0].closed and service.uploads[0].aborted)
    fetching.send(read(session, 0))
    assert "not authorized any more" in refusal(fetching)
    marking.send(protocol.encode("marker", run="r", epoch=1, marker=MARKER))
    wait_for(lambda: service.links[-1] == ("r", 1, False))
    assert len(service.markers) == 1
    use("reader")
    assert client.status(server.endpoints[0])["control"]["refused_messages"] == 2


def test_rights_can_be_lowered_and_raised(
    service: Recording, server: Server, use: Any, folder: Path, peers: Any
) -> None:
    service.snapshot = snapshot(CHUNK)
    use("trainer")
    path = folder / "authorized" / "trainer.public"
    fetching, attaching = peers(), peers()
    fetching.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
    session = fetching.receive()[1]["session"]
    assert begin(attaching, text_of(job()))[0] == "attach-open"
    path.write_text(path.read_text().replace('"write"', '"read"'))
    wait_for(lambda: service.uploads[0].aborted)
    fetching.send(read(session, 0))
    assert fetching.receive()[0] == "fetch-data"  # reading goes on
    attaching.send(protocol.encode("layout", run="r", epoch=1, layout={}))
    assert "may only read" in refusal(attaching)
    path.write_text(path.read_text().replace('"read"', '"write"'))

    def allowed() -> bool:
        attaching.send(protocol.encode("layout", run="r", epoch=1, layout={}))
        return attaching.receive()[0] == "layout-ack"

    wait_for(allowed)


def test_a_new_key_counts_without_a_restart(server: Server, use: Any, folder: Path) -> None:
    keys.generate(folder, {"late": "read"})
    use("late")
    assert client.status(server.endpoints[0])["markers"] == 0


def test_a_damaged_or_writable_file_shuts_out_its_client_alone(
    server: Server, use: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for damage in (lambda path: path.write_text("nonsense"), lambda path: path.chmod(0o666)):
        damage(folder / "authorized" / "trainer.public")
        use("trainer")
        with pytest.raises(NoPermission):
            client.status(server.endpoints[0])
        use("reader")
        assert client.status(server.endpoints[0])["markers"] == 0
    assert "trainer.public: not a key file" in caplog.text
    assert "trainer.public has mode 0666, others can change it" in caplog.text


def test_while_the_folder_is_gone_nobody_is_in_and_then_all_are_again(
    service: Recording, server: Server, use: Any, folder: Path, peers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    use("trainer")
    peer = peers()
    peer.send(protocol.encode("ping"))
    assert peer.receive()[0] == "pong"
    aside = folder.with_name("aside")
    shutil.move(folder / "authorized", aside)

    def refused() -> bool:
        peer.send(protocol.encode("ping"))
        return peer.receive()[0] == "error"

    wait_for(refused)
    with pytest.raises(Unreachable):  # it may come back: the client goes on trying
        client.status(server.endpoints[0], 0.3)
    assert "nobody may connect" in caplog.text
    waiting = Connection(server.endpoints[0])
    waiting.send("ping")
    time.sleep(0.2)
    shutil.move(aside, folder / "authorized")
    assert waiting.receive("pong", timeout=5)[0] == "pong"
    waiting.close()
    wait_for(lambda: not refused())


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


# The command line


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "keys"
    status, out, _ = command("keygen", str(folder), capsys=capsys)
    assert status == 0
    made = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    assert sorted(line.split("  ")[0] for line in out.splitlines()) == made and len(made) == 5
    assert f"flowcheck daemon --keys {folder}" in out and "FLOWCHECK_KEY" in out
    rights = Access(folder)
    names = ("board", "--read-only")
    assert command("keygen", str(folder), "--client", *names, capsys=capsys)[0] == 0
    public, who = keys.read_client(folder / "authorized" / "board.public")
    assert who.rights == "read"
    assert rights.authenticate([b"1.0", b"1", b"", b"here", b"", b"CURVE", zmq.utils.z85.decode(public)])[2] == b"200"
    for arguments, said in (
        (("--client", "board"), "is there already"), (("--client", "a/b"), "client 'a/b'"), ((), "is there already"),
        (("--read-only",), "--client"),
    ):  # fmt: skip
        status, _, err = command("keygen", str(folder), *arguments, capsys=capsys)
        assert status == 2 and said in err and len(err.splitlines()) == 1


def test_options_of_the_daemon_that_do_not_fit_keys(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = ("daemon", "-i", "nowhere0")
    status, _, err = command(*daemon, "--insecure", "--keys", str(folder), capsys=capsys)
    assert status == 2 and "leave out one" in err
    monkeypatch.setenv("FLOWCHECK_KEYS", str(folder))
    status, _, err = command(*daemon, "--insecure", capsys=capsys)
    assert status == 2 and "leave out one" in err
