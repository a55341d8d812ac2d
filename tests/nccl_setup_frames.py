"""The set-up traffic of a made-up communicator, from the lab's generator, as streams and as frames of a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tcp_frames import FIN, SYN, tcp_frame

from flowcheck.lab.nccl_wire import Communicator
from flowcheck.lab.nccl_wire_link import Connection
from flowcheck.lab.nccl_wire_setup import Endpoint, Listeners, Stream, bootstrap, wiring
from reconstruct.nccl.bootstrap import SetUpStream

BEFORE = 1_699_999_990_000_000_000
"""When set-up frames begin, ns: before those of `nccl_job.NcclWire`."""


def streams(
    comm: Communicator, magic: int = 0xABCDEF, network: str = "192.168.0.",
    accepts: Callable[[Connection], Endpoint] | None = None,
) -> list[Stream]:  # fmt: skip
    """All connections of a communicator's set-up; rank r has address <network>r+1. accepts: where connections between
    nodes are accepted."""
    job = comm.job
    host = [f"{network}{rank + 1}" for rank in range(job.ranks)]
    listeners = {
        rank: Listeners((host[rank], 5000 + rank), (host[rank], 5500 + rank), (host[rank], 6000 + 2 * rank))
        for rank in range(job.ranks)
    }
    every = {one.ordinal: one for rank in range(job.ranks) for one in comm.of_rank(rank)}
    return [
        *bootstrap(job, magic, (host[0], 4999), listeners),
        *wiring(
            job, magic, every.values(), listeners,
            accepts or (lambda one: (host[one.receiver], 20000 + one.ordinal)),
        ),
    ]


def parsed(made: list[Stream], network: str = "192.168.0.") -> list[SetUpStream]:
    """The streams as the watcher keeps them."""
    return [
        SetUpStream((f"{network}{one.client + 1}", 40000 + at), one.to, bytearray(one.there), bytearray(one.back))
        for at, one in enumerate(made)
    ]


@dataclass
class Wire:
    """Frames of TCP connections, one after another."""

    network: str = "192.168.0."
    start: int = BEFORE
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    _port: int = 40000

    def stream(self, one: Stream) -> Wire:
        """A connection; one that is not kept is closed by both ends."""
        self._port += 1
        client: Endpoint = (f"{self.network}{one.client + 1}", self._port)
        ends = {"src": client[0], "dst": one.to[0], "sport": client[1], "dport": one.to[1]}
        turned = {"src": one.to[0], "dst": client[0], "sport": one.to[1], "dport": client[1]}
        self._put(tcp_frame(flags=SYN, seq=99, **ends), tcp_frame(flags=SYN | 16, seq=499, ack=100, **turned))
        cut = len(one.there) - one.tail
        for data, way, seq in (
            (one.there[:cut], ends, 100), (one.back, turned, 500), (one.there[cut:], ends, 100 + cut),
        ):  # fmt: skip
            self._put(*(tcp_frame(data[at : at + 1400], seq=seq + at, **way) for at in range(0, len(data), 1400)))
        if not one.kept:
            self.close(one, client)
        return self

    def close(self, one: Stream, client: Endpoint) -> None:
        ends = {"src": client[0], "dst": one.to[0], "sport": client[1], "dport": one.to[1]}
        turned = {"src": one.to[0], "dst": client[0], "sport": one.to[1], "dport": client[1]}
        self._put(tcp_frame(flags=FIN | 16, seq=100 + len(one.there), **ends))
        self._put(tcp_frame(flags=FIN | 16, seq=500 + len(one.back), **turned))

    def all(self, made: list[Stream]) -> Wire:
        for one in made:
            self.stream(one)
        return self

    def _put(self, *frames: bytes) -> None:
        self.frames += [(self.start + 1000 * (len(self.frames) + at), frame) for at, frame in enumerate(frames)]
