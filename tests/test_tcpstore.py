"""Reading the rendezvous: recorded jobs, and the protocol in pieces."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mirror.capfile import CaptureFileSource
from mirror.flows import Flows
from mirror.tcp import TcpReassembler
from reconstruct.observe.tcpstore import HELLO, Conversation, StoreRecord, StoreWatcher, groups, parse_record


def _watch(path: Path) -> StoreWatcher:
    flows = Flows(1024)
    tcp, watcher, source = TcpReassembler(flows), StoreWatcher(flows), CaptureFileSource([path])
    while (block := source.read(0.0)) is not None:
        watcher.feed(tcp.feed(block, int(block.ts[-1])))
        source.release(block)
    watcher.feed(tcp.flush(1 << 62))
    source.close()
    return watcher


@pytest.mark.parametrize(
    ("name", "group", "listeners"),
    [
        ("nano", "/0", {0: ("10.77.0.1", 46161), 1: ("10.77.0.2", 45679), 2: ("10.77.0.3", 41211),
                        3: ("10.77.0.4", 37827)}),
        ("scalar3", "/0", {0: ("10.77.0.1", 36061), 1: ("10.77.0.2", 39851), 2: ("10.77.0.3", 33209)}),
        ("torchrun_2x2", "/default_pg/0", {0: ("10.77.0.1", 40147), 1: ("10.77.0.1", 44029),
                                           2: ("10.77.0.2", 40039), 3: ("10.77.0.2", 35615)}),
    ],
)
def test_recorded_jobs(shared: Path, name: str, group: str, listeners: dict[int, tuple[str, int]]) -> None:
    watcher = _watch(shared / "captures" / "gloo" / f"{name}.pcap")
    (found,) = groups(watcher.records)
    assert (found.name, found.world_size, found.contexts) == (group, len(listeners), [listeners])


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _record(port: int, world: int, ip: bytes = bytes((10, 1, 2, 3)), family: int = 2) -> bytes:
    address = struct.pack("<H", family) + struct.pack(">H", port)
    address += ip if family == 2 else bytes(4) + ip
    return _text(b"host") + struct.pack("<Q", 136) + address.ljust(128, b"\xaa") + struct.pack("<q", -1) + b"".join(
        struct.pack("<q", i) for i in range(world)
    )


KEY = b"/0//cpu//0/1"


def test_records() -> None:
    expected = StoreRecord("/0", 0, 1, "10.1.2.3", 4660, 2)
    assert parse_record(KEY, _record(4660, 2)) == expected
    six = parse_record(b"/0//1//cpu//1/2", _record(80, 0, bytes(15) + b"\x01", 10))
    assert six == StoreRecord("/0//1", 1, 2, "::1", 80, None)
    assert parse_record(b"/0//cpu//0/x", _record(1, 2)) is None
    assert parse_record(KEY, _record(1, 2)[:-3]) is None
    assert parse_record(KEY, b"short") is None
    assert parse_record(KEY, _record(1, 2, family=7)) is None
    assert parse_record(KEY, struct.pack("<Q", 1 << 60) + bytes(300)) is None


def _conversation() -> tuple[bytes, bytes, int]:
    """(client's bytes, server's bytes, records they hold)."""
    client = HELLO + b"\x0d" + struct.pack("<I", 77) + b"\x01" + _text(KEY) + _text(_record(5, 2))
    server = struct.pack("<I", 77)
    client += b"\x04" + _text(b"n") + struct.pack("<q", 1)
    server += struct.pack("<q", 1)
    client += b"\x06" + struct.pack("<Q", 2) + _text(b"a") + _text(b"b") + b"\x0c"  # a wait that is cancelled
    server += b"\x01"
    client += b"\x05" + struct.pack("<Q", 1) + _text(b"a")
    server += b"\x00"
    client += b"\x03" + _text(b"/0//cpu//0/0")
    server += _text(_record(6, 2))
    client += b"\x0a" + struct.pack("<Q", 2) + _text(b"x") + _text(b"/1//cpu//0/0")
    server += _text(b"y") + _text(_record(7, 3))
    client += b"\x0b" + struct.pack("<Q", 1) + _text(b"/1//cpu//0/1") + _text(_record(8, 3))
    return client, server, 4


@pytest.mark.parametrize("piece", [1, 3, 17, 10_000])
@pytest.mark.parametrize("server_first", [False, True])
def test_requests_and_replies_in_pieces(piece: int, server_first: bool) -> None:
    client, server, count = _conversation()
    talk = Conversation()
    order = [(server, False), (client, True)] if server_first else [(client, True), (server, False)]
    for data, from_client in order:
        for at in range(0, len(data), piece):
            talk.feed(data[at : at + piece], from_client=from_client)
    assert talk.readable
    assert sorted(r.port for r in talk.records) == [5, 6, 7, 8]
    assert len(talk.records) == count


def test_what_does_not_parse_is_not_guessed() -> None:
    client, _, _ = _conversation()
    for bad in (b"\x63", b"\x01" + struct.pack("<Q", 1 << 50), b"\x06" + struct.pack("<Q", 1 << 21)):
        talk = Conversation()
        talk.feed(HELLO + bad + client, from_client=True)
        assert not talk.readable
        assert talk.records == []
        assert talk.feed(client, from_client=True) == []


def test_groups_need_whole_tables() -> None:
    records = {("/0", 0, r): StoreRecord("/0", 0, r, "10.0.0.1", 10 + r, 3) for r in range(2)}
    assert groups(records) == []
    records["/0", 0, 2] = StoreRecord("/0", 0, 2, "10.0.0.2", 12, 3)
    (group,) = groups(records)
    assert group.contexts == [{0: ("10.0.0.1", 10), 1: ("10.0.0.1", 11), 2: ("10.0.0.2", 12)}]
    records["/0", 1, 0] = StoreRecord("/0", 1, 0, "10.0.0.1", 20, 3)
    assert groups(records) == []
