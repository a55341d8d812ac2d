"""The control server over real sockets: fetches whole and checked, uploads gapless, hostile peers harmless."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zmq
from recording import Reading, Recording, random_bytes, wait_for
from test_description import job

from flowcheck import client, protocol
from flowcheck import server as server_module
from flowcheck.connection import Connection, Unreachable
from flowcheck.description import BufferSpec, JobDescription, TensorSpec
from flowcheck.errors import FlowcheckError, NothingRestorable, Revoked, UsageError
from flowcheck.protocol import CHUNK, WINDOW
from flowcheck.server import Deadlines, Server
from flowcheck.sessions import digest
from flowcheck.snapshot import Snapshot

LOOPBACK = "tcp://127.0.0.1:0"


def snapshot(nbytes: int = 3 * CHUNK + 17) -> Snapshot:
    description = job()
    big = TensorSpec("uint8", (nbytes,), (1,))
    description.buffers = [BufferSpec("big", big, True), BufferSpec("none", TensorSpec("int8", (0,), (1,)), False)]
    tensors = {key: (spec, random_bytes(spec.nbytes, i)) for i, (key, spec) in enumerate(description.tensors())}
    groups = [{**description.optimizer.groups[0].fields, "lr": 0.1 + 0.2, "betas": (0.9, float("nan"))}]
    return Snapshot(description, "run-1", 3, 42, True, False, ["other cpu"], ["big"], groups, tensors)


@pytest.fixture
def service() -> Recording:
    return Recording()


@pytest.fixture
def server(service: Recording) -> Iterator[Server]:
    with Server(service, [LOOPBACK]) as running:
        yield running


class Raw:
    """A peer that sends whatever it likes."""

    def __init__(self, server: Server) -> None:
        self.context = zmq.Context(1)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.connect(server.endpoints[0])

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout: float = 5.0) -> tuple[str, dict[str, Any]]:
        assert self.socket.poll(int(timeout * 1000)), "the server did not answer"
        frames = self.socket.recv_multipart()
        header = json.loads(frames[0])
        return header["type"], header

    def silent(self, seconds: float = 0.3) -> bool:
        return not self.socket.poll(int(seconds * 1000))

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def raw(server: Server) -> Iterator[Raw]:
    peer = Raw(server)
    yield peer
    peer.close()


def test_a_fetched_step_is_the_served_one(service: Recording, server: Server) -> None:
    served = service.snapshot = snapshot()
    seen: list[tuple[int, int]] = []
    got = client.fetch(server.endpoints[0], "run-1", 42, progress=lambda done, total: seen.append((done, total)))
    assert got.description == served.description
    for name in ("run", "epoch", "step", "confirmed", "exact", "reasons", "not_covered"):
        assert getattr(got, name) == getattr(served, name)
    assert str(got.groups) == str(served.groups)  # NaN included, tuples included
    assert list(got.tensors) == list(served.tensors)
    for key, (spec, data) in served.tensors.items():
        assert got.tensors[key][0] == spec
        assert np.array_equal(got.tensors[key][1], data), key
    assert seen[-1] == (served.nbytes, served.nbytes)
    assert seen == sorted(seen)
    wait_for(lambda: service.readings[0].closed)


def test_latest_and_missing_steps(service: Recording, server: Server) -> None:
    with pytest.raises(NothingRestorable, match="not held"):
        client.fetch(server.endpoints[0])
    service.snapshot = snapshot(10)
    assert client.fetch(server.endpoints[0]).step == 42
    with pytest.raises(NothingRestorable, match="step 7 is not held"):
        client.fetch(server.endpoints[0], step=7)
    with pytest.raises(UsageError):
        client.fetch(server.endpoints[0], step="newest")  # type: ignore[arg-type]


def test_a_chunk_damaged_on_the_way_is_noticed(
    service: Recording, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.snapshot = snapshot(100)
    monkeypatch.setattr("flowcheck.fetching.digest", lambda data: digest(bytes(data) + b"x"))
    with pytest.raises(FlowcheckError, match="damaged on the way"):
        client.fetch(server.endpoints[0])


@pytest.mark.parametrize(("step", "asked"), [(42, 1), ("latest", client.TRIES)])
def test_a_revoked_step_ends_the_fetch_with_its_reason(
    service: Recording, server: Server, step: int | Literal["latest"], asked: int
) -> None:
    service.snapshot = snapshot()

    def revoke(done: int, total: int) -> None:
        service.revoked = True

    with pytest.raises(Revoked, match="the step was needed: ask again"):
        client.fetch(server.endpoints[0], step=step, progress=revoke)
    assert wait_for(lambda: len(service.readings) == asked and all(reading.closed for reading in service.readings))


def test_the_latest_step_is_asked_for_anew_when_training_overtakes_the_reading(
    service: Recording, server: Server
) -> None:
    service.snapshot = snapshot()

    def overtake(done: int, total: int) -> None:
        service.revoked = len(service.readings) < 3
        if service.snapshot is not None:
            service.snapshot.step += 1

    def open_() -> None:
        service.revoked = False

    service.before_open = open_
    assert client.fetch(server.endpoints[0], progress=overtake).step > 43
    assert len(service.readings) == 3


def test_status_and_ping(service: Recording, server: Server) -> None:
    assert client.status(server.endpoints[0])["markers"] == 0
    with Connection(server.endpoints[0]) as connection:
        assert "version" in connection.request("ping", "pong", 5)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "ipc:///nonexistent/flowcheck.sock"])
def test_no_daemon_is_one_line_within_the_deadline(endpoint: str) -> None:
    started = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        client.status(endpoint, timeout=0.3)
    assert time.monotonic() - started < 3
    assert endpoint in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        client.status("127.0.0.1:9", timeout=0.3)


def test_many_clients_are_served_in_turn(service: Recording, server: Server) -> None:
    service.snapshot = snapshot(8 * CHUNK)
    order: list[int] = []

    def fetch(number: int) -> None:
        client.fetch(server.endpoints[0], progress=lambda done, total: order.append(number))

    threads = [threading.Thread(target=fetch, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    counts = [order.count(i) for i in range(3)]
    assert len(set(counts)) == 1
    # While all three read, none gets far ahead: after two thirds of the traffic each has had a good part.
    early = order[: 2 * len(order) // 3]
    assert min(early.count(i) for i in range(3)) >= counts[0] // 4


def test_a_client_that_does_not_read_is_cut_and_blocks_nobody(service: Recording) -> None:
    service.snapshot = snapshot(16 * CHUNK)
    with Server(service, [LOOPBACK], deadlines=Deadlines(fetch_idle=1.0)) as server:
        slow = Raw(server)
        slow.socket.set(zmq.RCVHWM, 1)
        slow.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
        kind, opened = slow.receive()
        assert kind == "fetch-open"
        for request in range(WINDOW):
            slow.send(read(opened["session"], request))
        started = time.monotonic()
        assert client.fetch(server.endpoints[0]).step == 42
        assert client.status(server.endpoints[0], timeout=1.0)
        wait_for(lambda: service.readings[0].closed, 10)
        assert time.monotonic() - started < 9
        assert server.counters["cut"] == 1
        slow.close()


def test_a_fetch_has_a_total_deadline(service: Recording) -> None:
    service.snapshot = snapshot(CHUNK)
    with Server(service, [LOOPBACK], deadlines=Deadlines(fetch_total=0.5)) as server:
        peer = Raw(server)
        peer.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
        session = peer.receive()[1]["session"]
        for request in range(40):
            peer.send(read(session, request))
            kind, answer = peer.receive()
            if kind == "error":
                assert "cut: it took more than 0.5 s" in answer["message"]
                break
            time.sleep(0.05)
        else:
            pytest.fail("never cut")
        peer.close()


def read(session: int, request: int, **changes: Any) -> bytes:
    fields = {"key": "buffer/big", "offset": 0, "length": CHUNK, **changes}
    return protocol.encode("fetch-read", session=session, request=request, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 1},
        {"offset": (1 << 62) - 1},
        {"key": "buffer/gone"},
        {"key": "../../etc/passwd"},
        {"length": CHUNK + 1},
        {"length": 0},
        {"length": -1},
        {"offset": -1},
    ],
)
def test_reads_outside_of_tensors_are_refused(
    changes: dict[str, Any], service: Recording, server: Server, raw: Raw
) -> None:
    service.snapshot = snapshot(CHUNK)
    raw.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
    session = raw.receive()[1]["session"]
    raw.send(read(session, 0, **changes))
    assert raw.receive()[0] == "error"
    assert client.fetch(server.endpoints[0]).step == 42


def test_asking_beyond_the_window_is_refused(service: Recording, server: Server, raw: Raw) -> None:
    service.snapshot = snapshot(CHUNK)
    raw.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
    session = raw.receive()[1]["session"]
    for request in range(20 * WINDOW):
        raw.send(read(session, request))
    kinds = [raw.receive()[0] for _ in range(WINDOW + 1)]
    while not raw.silent():
        kinds.append(raw.receive()[0])
    assert "error" in kinds
    assert service.readings[0].closed


def test_a_bug_in_the_service_is_an_error_for_one_client(service: Recording, server: Server) -> None:
    service.snapshot = snapshot(10)
    service.snapshot.tensors["buffer/broken"] = (TensorSpec("uint8", (1,), (1,)), np.zeros(1, np.uint8))
    with pytest.raises(FlowcheckError, match="a bug in the service"):
        client.fetch(server.endpoints[0])
    assert client.status(server.endpoints[0])


def test_a_slow_open_does_not_hold_markers_up(service: Recording, server: Server, raw: Raw) -> None:
    service.snapshot = snapshot(10)
    opening = threading.Event()
    release = threading.Event()

    def slow() -> None:
        opening.set()
        release.wait(10)

    service.before_open = slow
    thread = threading.Thread(target=lambda: client.fetch(server.endpoints[0]))
    thread.start()
    assert opening.wait(5)
    raw.send(protocol.encode("marker", run="r", epoch=1, marker={"step": 1}))
    wait_for(lambda: service.markers == [("r", 1, {"step": 1})], 2)
    release.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_read_that_hangs_holds_up_neither_others_nor_the_end(
    service: Recording, server: Server, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a stored step does on a disk that does not answer."""
    monkeypatch.setattr(server_module, "CLOSE_S", 0.2)
    service.snapshot = snapshot(CHUNK)
    begun, gate, reads = threading.Event(), threading.Event(), Reading.read

    def hang(*args: Any) -> memoryview:
        begun.set()
        gate.wait(20)
        return reads(*args)

    raw.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
    session = raw.receive()[1]["session"]
    monkeypatch.setattr(Reading, "read", hang)
    raw.send(read(session, 0))
    assert begun.wait(5)
    monkeypatch.setattr(Reading, "read", reads)
    assert client.fetch(server.endpoints[0]).step == 42
    assert client.status(server.endpoints[0], timeout=1)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 3
    assert not service.readings[0].closed, "its memory is being read"
    gate.set()
    wait_for(lambda: service.readings[0].closed)


# Uploads


def text_of(description: JobDescription) -> bytes:
    return json.dumps(description.to_json()).encode()


def begin(peer: Raw, text: bytes, checksum: str | None = None, late: bool = False) -> tuple[str, dict[str, Any]]:
    peer.send(protocol.encode("attach-begin", bytes=len(text), digest=checksum or digest(text), job="j", late=late))
    for offset in range(0, len(text), 1000):
        peer.send(protocol.encode("attach-text", offset=offset), text[offset : offset + 1000])
    return peer.receive()


def chunk(session: int, key: str, offset: int, data: bytes, checksum: str | None = None) -> list[bytes]:
    fields = {"session": session, "key": key, "offset": offset, "digest": checksum or digest(data)}
    return [protocol.encode("attach-chunk", **fields), data]


def test_an_upload_arrives_whole(service: Recording, server: Server, raw: Raw) -> None:
    description = job()
    kind, opened = begin(raw, text_of(description))
    assert (kind, opened["run"]) == ("attach-open", "run-1")
    sent = {key: random_bytes(spec.nbytes, 7).tobytes() for key, spec in description.tensors()}
    for key, data in sent.items():
        half = len(data) // 2
        for offset, part in ((0, data[:half]), (half, data[half:])):
            if part:
                raw.send(*chunk(opened["session"], key, offset, part))
                assert raw.receive()[1]["bytes"] == len(part)
    raw.send(protocol.encode("attach-commit", session=opened["session"]))
    kind, answer = raw.receive()
    assert kind == "attach-ack"
    assert answer["ack"] == {"run": "run-1", "epoch": 1, "exact": True, "reasons": []}
    assert {key: bytes(data) for key, data in service.of("run-1").tensors.items()} == sent
    assert service.of("run-1").description == description


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (lambda s: chunk(s, "model/conv.weight", 4, b"1234"), "expected 'model/conv.weight' at 0"),
        (lambda s: chunk(s, "model/conv.bias", 0, b"12"), "expected 'model/conv.weight'"),
        (lambda s: chunk(s, "model/conv.weight", 0, b"x" * 193), "193 bytes"),
        (lambda s: chunk(s, "model/conv.weight", 0, b""), "0 bytes"),
        (lambda s: chunk(s, "model/conv.weight", 0, b"1234", "0" * 16), "checksum"),
        (lambda s: chunk(s + 1, "model/conv.weight", 0, b"1234"), "no attach is open"),
        (lambda s: [protocol.encode("attach-commit", session=s)], "5 tensors are missing"),
        (lambda s: [protocol.encode("attach-text", offset=0), b"{"], "out of order"),
    ],
)
def test_an_upload_out_of_place_ends_the_attach(
    frames: Any, reason: str, service: Recording, server: Server, raw: Raw
) -> None:
    _, opened = begin(raw, text_of(job()))
    raw.send(*frames(opened["session"]))
    kind, answer = raw.receive()
    assert kind == "error"
    assert reason in answer["message"]
    assert wait_for(lambda: service.uploads[0].aborted)
    assert not service.committed


def test_a_bad_description_is_refused_by_field(service: Recording, server: Server, raw: Raw) -> None:
    data = job().to_json()
    data["parameters"][0]["spec"]["dtype"] = "float33"
    assert "parameters[0].spec.dtype" in begin(raw, json.dumps(data).encode())[1]["message"]
    assert "checksum" in begin(raw, text_of(job()), "0" * 16)[1]["message"]
    assert "not JSON" in begin(raw, b"{" * 5000)[1]["message"]
    refused = job()
    refused.run = "refuse-me"
    kind, answer = begin(raw, text_of(refused))
    assert (kind, answer["kind"]) == ("error", "UsageError")
    assert not service.uploads


def test_a_failed_commit_is_told_and_aborted(service: Recording, server: Server, raw: Raw) -> None:
    description = job()
    description.run = "fail-commit"
    session = begin(raw, text_of(description))[1]["session"]
    for key, spec in description.tensors():
        raw.send(*chunk(session, key, 0, bytes(spec.nbytes)))
        raw.receive()
    raw.send(protocol.encode("attach-commit", session=session))
    assert "the disk is full" in raw.receive()[1]["message"]
    assert service.uploads[0].aborted


def test_an_upload_without_progress_is_given_up(service: Recording) -> None:
    with Server(service, [LOOPBACK], deadlines=Deadlines(attach_idle=0.2)) as server:
        peer = Raw(server)
        begin(peer, text_of(job()))
        kind, answer = peer.receive()
        assert kind == "error"
        assert "the attach was cut" in answer["message"]
        assert service.uploads[0].aborted
        peer.close()


# Hostile peers

HOSTILE: list[list[bytes]] = [
    [b""],
    [b"{"],
    [b"\xff" * 100],
    [b"[" * 100_000],
    [b"null"],
    [b"1"],
    [b"{}"],
    [b'{"v":1}'],
    [b'{"v":2,"type":"ping"}'],
    [b'{"v":1,"type":"nonsense"}'],
    [b'{"v":1,"type":["ping"]}'],
    [b'{"v":1,"type":"ping","more":1}'],
    [b'{"v":1,"type":"ping"}', b"data"],
    [b'{"v":1,"type":"ping"}', b"", b""],
    [b'{"v":1,"type":"pong","version":"x"}'],
    [b'{"v":1,"type":"attach-ack","session":1,"ack":{}}'],
    [b'{"v":1,"type":"marker","run":"r","epoch":-1,"marker":{}}'],
    [b'{"v":1,"type":"marker","run":"r","epoch":1,"marker":[]}'],
    [b'{"v":1,"type":"attach-begin","bytes":1e300,"digest":"0"}'],
    [b'{"v":1,"type":"attach-begin","bytes":99999999999999999999,"digest":"0"}'],
    [b'{"v":1,"type":"attach-text","offset":0}', b"{}"],
    [b'{"v":1,"type":"attach-chunk","session":1,"key":"k","offset":0,"digest":"0"}', b"x"],
    [b'{"v":1,"type":"fetch-read","session":1,"request":0,"key":"k","offset":0,"length":1}'],
    [b'{"v":1,"type":"fetch-begin","run":1,"step":"latest"}'],
    [b'{"v":1,"type":"fetch-begin","run":null,"step":"newest"}'],
    [b'{"v":1,"type":"status","pad":"' + b"x" * (protocol.MAX_HEADER + 1) + b'"}'],
]


def test_malformed_messages_cost_a_counter(service: Recording, server: Server, raw: Raw) -> None:
    number = 0
    for frames in HOSTILE:
        raw.send(*frames)
        number += b'"fetch-read"' not in frames[0]  # well said, by one who was cut
        if b'"marker"' not in frames[0] or b'"epoch":1' not in frames[0]:
            kind, answer = raw.receive()
            assert kind == "error", frames
            assert answer["message"]
        wait_for(lambda number=number: server.counters["malformed"] == number)
    assert client.status(server.endpoints[0])["markers"] == 0


def test_a_frame_beyond_the_limit_cuts_the_connection_only(service: Recording, server: Server, raw: Raw) -> None:
    raw.send(b"x" * (protocol.MAX_FRAME + 1))
    assert raw.silent()
    raw.send(b'{"v":1,"type":"ping"}', b"x" * (protocol.MAX_FRAME + 1))
    assert raw.silent()
    assert server.counters["messages"] == 0
    assert client.status(server.endpoints[0])


def test_noise_on_the_socket_is_survived(service: Recording, server: Server) -> None:
    host, port = server.endpoints[0].removeprefix("tcp://").split(":")
    greeting = b"\xff" + struct.pack(">Q", 1) + b"\x7f" + b"\x03\x00NULL" + bytes(48)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), os.urandom(5000), greeting + b"\x02" + b"\xff" * 8):
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(noise)
    assert client.status(server.endpoints[0])


def test_markers_get_no_reply_and_come_in_order(service: Recording, server: Server, raw: Raw) -> None:
    for step in range(500):
        raw.send(protocol.encode("marker", run="r", epoch=2, marker={"step": step}))
    wait_for(lambda: len(service.markers) == 500)
    assert [marker["step"] for _, _, marker in service.markers] == list(range(500))
    assert raw.silent(0.1)


def test_layout_is_passed_on(service: Recording, server: Server, raw: Raw) -> None:
    layout = {"buckets": [[1, 0]], "bucket_bytes": [20]}
    raw.send(protocol.encode("layout", run="r", epoch=1, layout=layout))
    assert raw.receive()[0] == "layout-ack"
    assert service.layouts == [("r", 1, layout)]
    assert protocol.check_layout(layout) == {"buckets": ((1, 0),), "bucket_bytes": (20,)}
    for field, value in (("buckets", [[-1]]), ("buckets", [0]), ("bucket_bytes", ["x"]), ("bucket_bytes", [])):
        with pytest.raises(FlowcheckError, match=f"layout.{field}"):
            protocol.check_layout({**layout, field: value})


# Endpoints


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:70000", "udp://127.0.0.1:1", "ipc://"],
)
def test_endpoints_that_are_none(endpoint: str, service: Recording) -> None:
    with pytest.raises(UsageError, match="endpoint"):
        Server(service, [endpoint])


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "eth0", "192.0.2.1", "[::]", "example.org"])
def test_addresses_beyond_loopback_need_insecure(host: str, service: Recording) -> None:
    with pytest.raises(UsageError, match="insecure"):
        Server(service, [f"tcp://{host}:0"])


def test_insecure_opens_every_address(service: Recording) -> None:
    with Server(service, ["tcp://0.0.0.0:0"], insecure=True) as server:
        port = server.endpoints[0].rpartition(":")[2]
        assert client.status(f"tcp://127.0.0.1:{port}")["markers"] == 0


def test_several_endpoints_and_a_private_ipc_socket(service: Recording, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with Server(service, [LOOPBACK, f"ipc://{path}", "tcp://[::1]:0"]) as server:
        assert len(server.endpoints) == 3
        for endpoint in server.endpoints:
            assert not endpoint.endswith(":0")
            assert client.status(endpoint)["markers"] == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(FlowcheckError, match="another daemon"):
            Server(service, [f"ipc://{path}"])
        with pytest.raises(FlowcheckError, match="in use"):
            Server(service, [server.endpoints[0]])
        assert client.status(f"ipc://{path}")["markers"] == 0
    path.unlink(missing_ok=True)
    path.touch()
    with pytest.raises(UsageError, match="a file is there"):
        Server(service, [f"ipc://{path}"])
    with pytest.raises(UsageError, match="longer than"):
        Server(service, ["ipc:///" + "x" * 120])


def test_a_dead_daemons_socket_is_taken_over(service: Recording, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(path))
    leftover.close()
    with Server(service, [f"ipc://{path}"]) as server:
        assert client.status(server.endpoints[0])["markers"] == 0


def test_closing_ends_every_session(service: Recording) -> None:
    service.snapshot = snapshot(CHUNK)
    server = Server(service, [LOOPBACK]).start()
    peer, other = Raw(server), Raw(server)
    peer.send(protocol.encode("fetch-begin", run=None, step="latest", allow_unknown=False))
    peer.receive()
    begin(other, text_of(job()))
    server.close()
    server.close()
    assert service.readings[0].closed
    assert service.uploads[0].aborted
    peer.close()
    other.close()
    Server(service, [LOOPBACK]).close()  # one that never started
