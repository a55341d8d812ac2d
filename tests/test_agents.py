"""Agents and the control server, without a job: who counts as an agent, what is taken from one, who is told what."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq
from recording import Recording, wait_for
from test_description import job
from test_desk import Clock, State
from test_server import LOOPBACK, Raw, begin, text_of

from flowcheck import agent as agent_module
from flowcheck import client, hellos, protocol
from flowcheck.agent import Agent
from flowcheck.desk import Ask, Desk, Piece
from flowcheck.hellos import Hellos
from flowcheck.protocol import CHUNK, WINDOW
from flowcheck.server import MAX_TOLD, Server
from flowcheck.sessions import digest

RUN = "run-1"


@pytest.fixture
def service() -> Recording:
    return Recording()


@pytest.fixture
def server(service: Recording) -> Iterator[Server]:
    with Server(service, [LOOPBACK]) as running:
        yield running


@pytest.fixture
def raw(server: Server) -> Iterator[Raw]:
    peer = Raw(server)
    yield peer
    peer.close()


def hello(peer: Raw, rank: int = 0, token: str = "j", step: int = 5) -> None:
    peer.send(protocol.encode("agent-hello", run=RUN, job=token, rank=rank, step=step))


def attached(peer: Raw, late: bool = True) -> dict[str, Any]:
    """Attach the job of token "j"; the ack."""
    opened = begin(peer, text_of(job()), late=late)[1]
    peer.send(protocol.encode("attach-commit", session=opened["session"]))
    kind, answer = peer.receive()
    assert kind == "attach-ack", answer
    ack: dict[str, Any] = answer["ack"]
    return ack


def data(content: bytes = b"abcdefgh", **changes: Any) -> list[bytes]:
    fields = {
        "run": RUN, "epoch": 1, "ask": 7, "key": "model/conv.bias", "lo": 0, "hi": 1, "step": 9,
        "sections": [["model", 4], ["exp_avg", 4]], "counter": "00000041", "digest": digest(content), **changes,
    }  # fmt: skip
    return [protocol.encode("repair-data", **fields), content]


# Who is an agent


def test_an_agent_belongs_to_the_job_whose_token_it_says(service: Recording, server: Server, raw: Raw) -> None:
    """The epoch that an agent is of is known by an attach of the same processes alone: a run's name proves nothing."""
    forgotten = Raw(server)
    hello(raw, rank=1)
    hello(forgotten, token="older")
    wait_for(lambda: len(service.agents) == 2)
    assert {agent.epoch for agent in service.agents.values()} == {None}
    assert attached(raw)["epoch"] == 1
    (mine,) = wait_for(lambda: [agent for agent in service.agents.values() if agent.epoch == 1])
    assert (mine.run, mine.rank, mine.step) == (RUN, 1, 5)
    hello(forgotten, token="older", step=6)
    wait_for(lambda: any(agent.step == 6 for agent in service.agents.values()))
    assert [agent.epoch for agent in service.agents.values() if agent.rank == 0] == [None]
    forgotten.send(*data())
    wait_for(lambda: server.counters["malformed"] == 1)
    forgotten.close()
    assert not service.pieces


def test_a_late_attach_sends_nothing_but_its_description(service: Recording, server: Server, raw: Raw) -> None:
    attached(raw, late=True)
    assert service.of(RUN).late
    other = Raw(server)
    session = begin(other, text_of(job()), late=True)[1]["session"]
    other.send(
        protocol.encode("attach-chunk", session=session, key="model/conv.weight", offset=0, digest=digest(b"x" * 8)),
        b"x" * 8,
    )
    assert "not expected" in other.receive()[1]["message"]
    other.close()


def test_an_agent_is_gone_with_its_connection(service: Recording, server: Server, raw: Raw) -> None:
    peer = Raw(server)
    hello(peer, rank=3)
    hello(raw, rank=4)
    wait_for(lambda: len(service.agents) == 2)
    peer.close()
    wait_for(lambda: len(service.gone) == 1)
    assert [agent.rank for agent in service.agents.values()] == [4]


def test_an_agent_that_says_nothing_is_gone(
    service: Recording, server: Server, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hellos, "SILENT_S", 0.2)
    hello(raw)
    wait_for(lambda: service.agents)
    wait_for(lambda: len(service.gone) == 1)
    hello(raw, step=6)  # only slow
    wait_for(lambda: service.agents)


def test_what_is_remembered_of_agents_and_jobs_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hellos, "MAX_AGENTS", 3)
    monkeypatch.setattr(hellos, "MAX_JOBS", 3)
    known = Hellos()
    fields = {"run": RUN, "job": "0", "rank": 0, "step": 0}
    for number in range(3):
        known.hello(bytes([number]), -1, fields, 0.0)
    with pytest.raises(hellos.FlowcheckError, match="3 agents are known"):
        known.hello(b"\x03", -1, fields, 0.0)
    for number in range(5):
        known.attached(RUN, str(number), number)
    epochs = [known.hello(b"\x00", -1, {**fields, "job": str(number)}, 0.0).epoch for number in range(5)]
    assert epochs == [None, None, 2, 3, 4]


# What is taken from one


def test_a_piece_is_passed_on_by_sections(service: Recording, server: Server, raw: Raw) -> None:
    hello(raw)
    attached(raw)
    raw.send(*data())
    (piece,) = wait_for(lambda: service.pieces)
    assert {name: bytes(part) for name, part in piece.sections.items()} == {"model": b"abcd", "exp_avg": b"efgh"}
    assert (piece.number, piece.key, piece.lo, piece.hi, piece.step) == (7, "model/conv.bias", 0, 1, 9)
    assert piece.counter == b"\0\0\0\x41"
    raw.send(protocol.encode("repair-refused", run=RUN, epoch=1, ask=8, reason="because"))
    wait_for(lambda: [tuple(refusal) for refusal in service.refusals] == [(0, 8, "because")])


@pytest.mark.parametrize(
    "message",
    [
        data(digest="0" * 16),
        data(epoch=2),
        data(run="run-2"),
        data(sections=[["model", 4]]),
        data(sections=[["model", 4], ["exp_avg", 5]]),
        data(sections=[["model", 4], ["model", 4]]),
        data(sections=[["model", -4], ["exp_avg", 12]]),
        data(sections=[["model", 4, 0], ["exp_avg", 4]]),
        data(sections=[["model", CHUNK + 1]]),
        data(sections=[["x", 0]] * 17),
        data(sections={"model": 8}),
        data(counter="xyz"),
        data(counter="00" * 17),
        data(lo=-1),
        data(step=1.5),
        data(key="k" * 5000),
        data()[:1],
        [protocol.encode("repair-refused", run=RUN, epoch=1, ask=8, reason="r" * 1025)],
        [protocol.encode("agent-hello", run=RUN, job="j" * 33, rank=0, step=0)],
        [protocol.encode("agent-hello", run=RUN, job="j", rank=1 << 16, step=0)],
        [protocol.encode("agent-hello", run=RUN, job="j", rank=0, step=-1)],
    ],
)
def test_what_does_not_fit_is_counted(service: Recording, server: Server, raw: Raw, message: list[bytes]) -> None:
    hello(raw)
    attached(raw)
    raw.send(*message)
    wait_for(lambda: server.counters["malformed"] == 1)
    assert (service.pieces, service.refusals) == ([], [])
    raw.send(*data())
    wait_for(lambda: len(service.pieces) == 1)


def compare(text: bytes, offset: int, part: bytes, /, **changes: Any) -> list[bytes]:
    fields = {"run": RUN, "epoch": 1, "ask": 4, "step": 9, "offset": offset, "bytes": len(text), "digest": digest(text)}
    return [protocol.encode("compare-data", **{**fields, **changes}), part]


def test_checksums_come_in_chunks(service: Recording, server: Server, raw: Raw) -> None:
    hello(raw)
    attached(raw)
    sums = {"model/a": "0" * 32, "optimizer/a/exp_avg": None}
    text = json.dumps(sums).encode()
    for offset in range(0, len(text), 10):
        raw.send(*compare(text, offset, text[offset : offset + 10]))
    wait_for(lambda: service.compared == [(0, 9, sums)])


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (b"{}", {"bytes": 17 << 20}),
        (b"{}", {"offset": 1}),
        (b"{}", {"bytes": 1}),
        (b"{} ", {"digest": "0" * 16}),
        (b"[]", {}),
        (b"{{", {}),
        (b"[" * 100_000, {}),
        (b'{"a":"short"}', {}),
        (b'{"a":1}', {}),
        (b'{"a":{}}', {}),
    ],
)
def test_checksums_that_are_none(
    service: Recording, server: Server, raw: Raw, text: bytes, changes: dict[str, Any]
) -> None:
    hello(raw)
    attached(raw)
    raw.send(*compare(text, 0, text, **changes))
    wait_for(lambda: server.counters["malformed"] == 1)
    assert service.compared == []


# Telling an agent


def test_agents_are_told_in_order_and_from_any_thread(service: Recording, server: Server, raw: Raw) -> None:
    hello(raw)
    (peer,) = wait_for(lambda: list(service.agents))

    def tell(first: int) -> None:
        for number in range(first, first + 5):
            server.tell(peer, "compare-ask", run=RUN, epoch=1, ask=number)

    threads = [threading.Thread(target=tell, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    heard = [raw.receive()[1]["ask"] for _ in range(15)]
    for thread in threads:
        thread.join()
    assert sorted(heard) == [100 * i + k for i in range(3) for k in range(5)]
    assert all([n for n in heard if n // 100 == i] == list(range(100 * i, 100 * i + 5)) for i in range(3))


def test_a_peer_that_is_not_there_or_does_not_read_costs_a_counter(
    service: Recording, server: Server, raw: Raw
) -> None:
    server.tell(b"nobody", "join-ask", run=RUN)
    raw.socket.set(zmq.RCVHWM, 1)
    hello(raw)
    (peer,) = wait_for(lambda: list(service.agents))
    started = time.monotonic()
    for number in range(3 * MAX_TOLD):
        server.tell(peer, "repair-cancel", numbers=[number] * 200)
    assert time.monotonic() - started < 10
    wait_for(lambda: server.counters["unsent"] > 0)
    assert client.status(server.endpoints[0])["markers"] == 0
    server.close()
    server.tell(peer, "join-ask", run=RUN)  # when all is over


# The agent against daemons that are not as they should be


class Alone:
    """An agent without a job."""

    def __init__(self, endpoint: str) -> None:
        self.desk = Desk(State(Clock()))  # type: ignore[arg-type]
        self.agent = Agent(endpoint, RUN, "j", 2, self.desk, lambda: 5).start()

    def deliver(self, nbytes: int) -> None:
        ask = Ask(self.agent, 1, 7, "model/conv.bias", 0, 1, 1.0, 1 << 20)
        self.agent.deliver(Piece(ask, 9, [("model", nbytes)], torch.ones(nbytes, dtype=torch.uint8), None))

    def close(self) -> None:
        self.agent.halt()
        self.agent.join(5)


@pytest.fixture
def alone(request: pytest.FixtureRequest, server: Server) -> Iterator[Alone]:
    made = Alone(server.endpoints[0])
    yield made
    made.close()


def test_an_agent_finds_a_daemon_that_was_started_again(service: Recording, server: Server, alone: Alone) -> None:
    wait_for(lambda: [agent.rank for agent in service.agents.values()] == [2])
    server.close()
    alone.deliver(100)
    again = Recording()
    with Server(again, server.endpoints) as second:
        wait_for(lambda: [agent.rank for agent in again.agents.values()] == [2], 20)
        assert second.counters["malformed"] <= 1  # the piece was for the one before
    assert not again.pieces


def test_a_daemon_that_never_reads_costs_no_memory_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "STUCK_S", 0.3)
    monkeypatch.setattr(agent_module, "HELLO_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts in the kernel, says nothing
        alone = Alone(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        try:
            started = time.perf_counter()
            for _ in range(40):  # the desk would have stopped after eight
                alone.deliver(CHUNK)
            assert time.perf_counter() - started < 20
            wait_for(lambda: alone.agent.unsent == 0, 20)
            assert 40 - alone.agent.counters.dropped <= WINDOW + 2  # that is all that libzmq holds
        finally:
            started = time.perf_counter()
            alone.close()
            assert time.perf_counter() - started < 20


def test_hostile_asks_are_counted_and_nothing_grows(service: Recording, server: Server, alone: Alone) -> None:
    (peer,) = wait_for(lambda: list(service.agents))

    def hostile(count: int, changes: dict[str, Any]) -> bool:
        """Whether so many were counted. Said again where the server had no room for it."""
        unsent = server.counters["unsent"]
        server.tell(peer, "repair-ask", **{**ask, "parts": [], **changes})
        return bool(wait_for(lambda: alone.agent.counters.absurd == count or server.counters["unsent"] > unsent)) and (
            alone.agent.counters.absurd == count
        )

    ask = {"run": RUN, "epoch": 1, "percent": 1, "step_bytes": 1}
    for number in range(40):
        parts = [[256 * number + i, "1", 0, 1] for i in range(256)]
        server.tell(peer, "repair-ask", **ask, parts=parts)
    wait_for(lambda: alone.agent.counters.asked >= 2048)
    assert len(alone.desk._parts) <= 1024
    bad: list[dict[str, Any]] = [
        {"percent": 0}, {"percent": 10.5}, {"percent": True}, {"percent": "1"}, {"step_bytes": 0},
        {"step_bytes": 1 << 40}, {"parts": [[1, "k", 0]]}, {"parts": [[1, 2, 3, 4]]}, {"parts": [[-1, "k", 0, 1]]},
        {"parts": None}, {"run": "other"},
    ]  # fmt: skip
    for count, changes in enumerate(bad, 1):
        wait_for(lambda count=count, changes=changes: hostile(count, changes))
    server.tell(peer, "repair-cancel", numbers=list(range(200)))
    wait_for(lambda: not any(part.number < 200 for part in list(alone.desk._parts)))
