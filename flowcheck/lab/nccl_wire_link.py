"""One NCCL network connection: queue pairs, announcements of free slots, messages into them, acknowledgements.

Both ends keep the same object and go through the same events, so each knows every number of the other side and makes
the frames of its own. Own reading of NCCL's source (src/transport/net_ib*); shares nothing with `mirror`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import numpy as np

from flowcheck.lab import nccl_wire_frames as frames
from flowcheck.lab.nccl_wire_frames import Frame, Path
from flowcheck.lab.nccl_wire_job import LL, LL128, SIMPLE, Job

P2P = "p2p"
P2P_BYTES = 131072
_P2P_SLOTS = 16
_STEP_BYTES = {LL: 65536, LL128: 614400, SIMPLE: 524288}
_REGION = {LL: 0, LL128: 0x80000, SIMPLE: 0x530000, P2P: 0}
_CONNECTION_BYTES = 0xA00000
_FIFO_BYTES = 0x40000
_PSN = 1 << 24


def wire_bytes(protocol: str, size: int, step: int) -> int:
    """Bytes on the wire of a message that carries `size` bytes of data."""
    if protocol == LL:
        return 65536 if step & 0x7FFFFFF8 == 0x7FFFFFF8 else -(-size // 8) * 16
    return -(-size // 1920) * 2048 if protocol == LL128 else size


@dataclass(slots=True)
class _Flow:
    """What goes to one queue pair: its number, the next PSN, and how many messages it has taken in."""

    path: Path
    qp: int
    psn: int = 0
    ident: int = 0
    done: int = 0


@dataclass(slots=True)
class Connection:
    """One direction between two ranks on one channel. `ordinal` keeps its memory apart from others'."""

    job: Job
    channel: int
    sender: int
    receiver: int
    ordinal: int
    forward: list[_Flow]
    """To the receiver's queue pairs: data, and what acknowledges announcements."""
    backward: list[_Flow]
    """To the sender's queue pairs: announcements, and what acknowledges data."""
    step: int = 0
    """Slots used so far, by all protocols."""
    granted: int = 0
    sent: int = 0
    _last: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def _memory(self) -> int:
        return self.job.number << 36 | self.ordinal * _CONNECTION_BYTES

    def begin(self, align: int, slots: int) -> int:
        """A collective of `slots` slots; returns the number of its first one."""
        base = -(-self.step // align) * align
        self.step = base + slots
        return base

    def _address(self, protocol: str, step: int) -> int:
        base = 0x7F0000000000 + self._memory + _REGION[protocol]
        if protocol == P2P:
            return base + P2P_BYTES * (_P2P_SLOTS * self.channel + step % _P2P_SLOTS)
        return base + step % 8 * _STEP_BYTES[protocol]

    def _rkey(self, region: int) -> int:
        return 0x20000 + (self.job.number << 14 | self.ordinal) * 8 + region & 0xFFFFFFFF

    def _buffer_rkey(self, protocol: str) -> int:
        return self._rkey(1 + (LL, LL128, SIMPLE, P2P).index(protocol))

    @property
    def fifo(self) -> tuple[int, int]:
        """(address, rkey) of the array of announcements in the sender's memory."""
        return 0x560000000000 + (self.job.number << 32) + self.ordinal * _FIFO_BYTES, self._rkey(0)

    def grant(self, protocol: str, step: int, room: int, make: bool) -> list[Frame]:
        """The receiver announces the slot of `step`; frames only if `make`."""
        flow, number = self.backward[0], self.granted
        self.granted += 1
        psn, ident = flow.psn, flow.ident
        flow.psn, flow.ident = (flow.psn + 1) % _PSN, flow.ident + 1
        if not make:
            return []
        room = {LL: 65536, LL128: 614400, P2P: P2P_BYTES}.get(protocol, room)
        address, rkey = self._address(protocol, step), self._buffer_rkey(protocol)
        release, index = self.job.release, number + 1
        if release < (2, 20):
            entry = struct.pack("<QIIIIQ", address, room, rkey, 1, self.sender, index)
        elif release < (2, 24):
            entry = struct.pack("<QIIIII4xQ24x", address, room, rkey, rkey, 1, self.sender, index)
        elif release < (2, 30):
            entry = struct.pack("<QQ4IIIQ16x", address, room, *[rkey] * 4, 1, self.sender, index)
        else:
            entry = struct.pack("<QQ8IIIQ", address, room, *[rkey] * 8, 1, self.sender, index)
        slots = 64 if release < (2, 19) else 256
        fifo, key = self.fifo
        place = fifo + number % slots * 8 * len(entry)
        data = np.frombuffer(entry, np.uint8)
        return frames.write(flow.path, flow.qp, psn, ident, place, key, data, None, self.job.mtu)

    def acknowledge_grant(self) -> Frame:
        """The sender acknowledges the announcement of the message that it sends next."""
        flow = self.forward[0]
        flow.ident += 1
        return frames.acknowledge(flow.path, flow.qp, self.sent % _PSN, flow.ident, self.sent + 1)

    def send(self, protocol: str, step: int, size: int, payload: np.ndarray | None) -> list[Frame]:
        """A message of `size` wire bytes into the slot of `step`; frames only if there is a payload."""
        job, number = self.job, self.sent
        self.sent += 1
        split = job.release < (2, 20) if job.split is None else job.split
        lanes = job.qps if split else 1
        piece = math.ceil(math.ceil(size / lanes) / 128) * 128 if lanes > 1 else size
        address, rkey = self._address(protocol, step), self._buffer_rkey(protocol)
        immediate = struct.pack("<I" if job.release < (2, 29) else ">I", size)
        made: list[Frame] = []
        self._last = []
        for lane in range(lanes):
            index = (number * lanes + lane) % job.qps
            flow = self.forward[index]
            first = min(lane * piece, size)
            length = min(piece, size - first)
            count = max(1, -(-length // job.mtu))
            if payload is not None:
                part = payload[first : first + length]
                place = address + lane * piece
                made += frames.write(
                    flow.path, flow.qp, flow.psn, flow.ident, place, rkey, part, immediate, job.mtu
                )
            flow.psn, flow.ident, flow.done = (flow.psn + count) % _PSN, flow.ident + count, flow.done + 1
            self._last.append((index, flow.psn - 1 & _PSN - 1, flow.done))
        return made

    def acknowledge_send(self) -> list[Frame]:
        """The receiver acknowledges the message that came last."""
        made: list[Frame] = []
        for index, psn, done in self._last:
            flow = self.backward[index]
            flow.ident += 1
            made.append(frames.acknowledge(flow.path, flow.qp, psn, flow.ident, done))
        return made


class QueuePairs:
    """Hands out the queue pair numbers of each host, rising in the order of the connections."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next: dict[int, int] = {}
        self._ordinal = 0

    def connect(self, channel: int, sender: int, receiver: int) -> Connection:
        job = self._job
        numbers = {rank: [self._number(job.hosts[rank]) for _ in range(job.qps)] for rank in (sender, receiver)}

        def flows(source: int, target: int) -> list[_Flow]:
            paths = [(qp, 0xC000 + (qp * 37 + source) % 0x4000) for qp in numbers[target]]
            return [_Flow(Path(job.ports[source], job.ports[target], job.ipv6, port), qp) for qp, port in paths]

        self._ordinal += 1
        there, back = flows(sender, receiver), flows(receiver, sender)
        return Connection(job, channel, sender, receiver, self._ordinal, there, back)

    def _number(self, host: int) -> int:
        number = self._next.get(host, 0x200 + (self._job.number << 12))
        self._next[host] = number + 1
        return number & 0xFFFFFF
