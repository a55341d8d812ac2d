"""Set-up traffic that claims much and shows little: bounded by what came, not by what it says."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from tcp_frames import ACK, SYN, block_of, tcp_frame

from mirror.flows import Flows
from mirror.tcp import TcpReassembler
from reconstruct.nccl import bootstrap, setup_watch
from reconstruct.nccl.bootstrap import SetUpStream, read_setup
from reconstruct.nccl.heads import BOOTSTRAP
from reconstruct.nccl.streams import NcclStreams

ONE, TWO = ("10.0.0.1", 5001), ("10.0.0.2", 5002)


def hello(magic: int) -> bytes:
    return struct.pack("<QI", magic, BOOTSTRAP)


def message(data: bytes) -> bytes:
    return struct.pack("<i", len(data)) + data


def claim(rank: int, world: int) -> bytes:
    """A rank's first message to the root."""
    return message(struct.pack("<ii", rank, world) + bytes(56))


def test_many_communicators_that_claim_many_ranks_take_little_memory() -> None:
    streams = [SetUpStream(ONE, TWO, bytearray(hello(magic) + claim(0, 65_536))) for magic in range(1, 2001)]
    honest = SetUpStream(ONE, TWO, bytearray(hello(5000) + claim(1, 2)))
    setup = read_setup([*streams, honest])
    assert sum(len(member.addresses) for member in setup.communicators) <= bootstrap._MOST_CLAIMED
    assert [member.world_size for member in setup.communicators if member.magic == 5000] in ([2], [])
    assert [member.world_size for member in read_setup([honest, *streams[:3]]).communicators] == [2, *[65_536] * 3]


def test_messages_of_one_byte_are_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_MOST_MESSAGES", 1000)
    read = []
    messages = bootstrap._messages

    def counted(stream: bytes | bytearray, most: int) -> list[bytes] | None:
        found = messages(stream, most)
        read.append(len(found or ()))
        return found

    monkeypatch.setattr(bootstrap, "_messages", counted)
    small = bytearray(hello(7) + message(b"x") * 5000)
    read_setup([SetUpStream(ONE, TWO, bytearray(small), bytearray(small)) for _ in range(20)])
    assert 500 <= sum(read) <= 1000


def test_connections_that_are_pushed_out_are_forgotten_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than are kept: the oldest go, with all that is known of their flows."""
    monkeypatch.setattr(setup_watch, "_MOST_STREAMS", 16)
    flows = Flows(4096)
    tcp, streams = TcpReassembler(flows), NcclStreams(flows, 0)
    greeting, answer = hello(9) + claim(0, 4), message(b"answer")
    at = 0
    for number in range(200):
        port = 20_000 + number
        frames = [
            tcp_frame(b"", seq=0, flags=SYN, src=ONE[0], dst=TWO[0], sport=port, dport=TWO[1]),
            tcp_frame(b"", seq=0, ack=1, flags=SYN | ACK, src=TWO[0], dst=ONE[0], sport=TWO[1], dport=port),
            tcp_frame(greeting, seq=1, ack=1, src=ONE[0], dst=TWO[0], sport=port, dport=TWO[1]),
            tcp_frame(answer, seq=1, ack=1 + len(greeting), src=TWO[0], dst=ONE[0], sport=TWO[1], dport=port),
        ]
        streams.feed(tcp.feed(block_of(frames, [at + k for k in range(4)]), at + 4))
        at += 10
    watcher = streams.setups
    assert len(watcher._kept) == 16 and watcher.dropped == 184
    assert watcher._numbers.keys() == watcher._kept.keys()
    assert sorted(number for numbers in watcher._numbers.values() for number in numbers) == sorted(watcher._ways)
    assert np.count_nonzero(watcher._heads.marks) <= len(watcher._ways)
    assert watcher.bytes == sum(len(one.forward) + len(one.backward) for one in watcher._kept.values())
