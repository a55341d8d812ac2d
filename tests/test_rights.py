"""Rights of keys to read and write: looked up for every message, taken away at once, and who lacks one is said."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from recording import Recording, wait_for
from secured import MARKER, Peer, folder, peers, refusal, remove, server, service, use
from test_daemon import Node, node
from test_description import job
from test_desk import Clock, State
from test_server import LOOPBACK, begin, chunk, read, snapshot, text_of

from flowcheck import agent as agent_module
from flowcheck import answers, client, keys, protocol
from flowcheck import connection as connection_module
from flowcheck.access import READING, Access
from flowcheck.agent import Agent
from flowcheck.connection import Connection, Unreachable
from flowcheck.desk import Desk
from flowcheck.errors import NoPermission
from flowcheck.protocol import CHUNK, FIELDS
from flowcheck.report import status_text
from flowcheck.server import Server

__all__ = ["folder", "node", "peers", "server", "service", "use"]

FROM_DAEMON = {
    "pong", "status-reply", "error", "attach-open", "attach-credit", "attach-ack", "layout-ack", "fetch-open",
    "fetch-data", "repair-ask", "repair-cancel", "groups-ask", "compare-ask", "join-ask", "compare-reply",
    "attach-missing", "notice", "repair-done",
}  # fmt: skip
TO_DAEMON = sorted(FIELDS.keys() - FROM_DAEMON)


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


# What is said of refusals


class Rank:
    """An agent of its own, without a job; it reads the key of this process when it connects."""

    def __init__(self, endpoint: str) -> None:
        self.agent = Agent(endpoint, "run-1", "j", 2, Desk(State(Clock())), lambda: 5).start()  # type: ignore[arg-type]

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.halt()
        self.agent.join(5)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "flowcheck.agent"]


def test_a_rank_whose_key_may_only_read_says_so_once_and_the_operator_sees_it(
    node: Callable[..., Node], folder: Path, use: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "HELLO_S", 0.02)
    access = Access(folder)
    with Server(node().jobs, [LOOPBACK], access=access) as server:
        use("trainer")
        with Rank(server.endpoints[0]):
            wait_for(lambda: server.counters["messages"] > 3)
        assert "REFUSED" not in status_text(client.status(server.endpoints[0]))
        use("reader")
        with Rank(server.endpoints[0]) as rank:
            wait_for(lambda: rank.agent.counters.absurd > 3)
        assert warned(caplog) == [
            f"flowcheck: the daemon at {server.endpoints[0]} does not let rank 2 repair anything: agent-hello: the key "
            "reader may only read: use one that may write (FLOWCHECK_KEY names the key's file)"
        ]
        count = access.refused["messages"]
        (line,) = [said for said in text(server) if "REFUSED" in said]
    assert count > 3 and line == (
        f"REFUSED: {count} messages without the right to them, last: agent-hello from the key reader: give that "
        'client a key that may write, or write rights = "write" into its file in authorized/'
    )


def text(server: Server) -> list[str]:
    """What `flowcheck status` prints."""
    return status_text(client.status(server.endpoints[0])).splitlines()


def test_a_rank_without_a_key_or_with_one_that_is_not_known_says_so(
    node: Callable[..., Node], folder: Path, use: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "HELLO_S", 0.02)
    monkeypatch.setattr(connection_module, "AGAIN_S", 0.05)
    remove(folder, "trainer")
    with Server(node().jobs, [LOOPBACK], access=Access(folder)) as server:
        for name, reason in (("", "it asks for a key: set FLOWCHECK_KEY to a client's file"),
                             ("trainer", "this key is not authorized there: put its public file")):  # fmt: skip
            caplog.clear()
            if name:
                use(name)
            with Rank(server.endpoints[0]):
                wait_for(lambda: warned(caplog))
                time.sleep(0.2)
            (line,) = warned(caplog)
            assert f"does not let rank 2 repair anything: no connection to the daemon at {server.endpoints[0]}" in line
            assert reason in line
        trainer = keys.client_key()
        use("reader")
        with Connection(server.endpoints[0]) as connection:
            connection.post(b"nonsense")
            wait_for(lambda: server.counters["malformed"])
        said = text(server)
    assert trainer is not None
    key = trainer.pair.public.decode()
    keyless = re.compile(r"REFUSED: \d+ connections without a key or with another daemon's: point FLOWCHECK_KEY ")
    assert any(map(keyless.match, said))
    assert any(f"connections of keys that are not authorized, last: the key {key} from 127.0.0.1: " in o for o in said)
    assert any(one.startswith("REFUSED: 1 messages that are none or do not fit: run flowcheck ") for one in said)
