"""Synthetic gloo traffic: whole ring all-reduces on the wire, from formulas written down here and nowhere else.

`Job` builds the byte streams of a mesh of N ranks, in the order in which a real job sends them (announcements before
payloads, two collectives at a time), and cuts them into TCP frames as a switch mirrors them. It keeps the truth.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass, field, replace

import numpy as np
from tcp_frames import tcp_frame

from mirror.block import Block, pack
from mirror.flows import Flows
from mirror.memory import address_of
from mirror.spans import Spans
from mirror.tcp import TcpReassembler
from reconstruct.decoder import AllReduce, Event, FlowClosed, Reduced
from reconstruct.gloo import state as g
from reconstruct.gloo.decoder import GlooDecoder
from reconstruct.gloo.events import Group

ALLREDUCE = 4
Link = tuple[int, int]


def preamble(opcode: int, kind: int, tag: int, length: int) -> bytes:
    slot = kind << 56 | tag << 24 if kind else tag
    return struct.pack("<6Q", 48 + (length if opcode == 1 else 0), opcode, slot, 0, length, 0)


def segments(size: int, itemsize: int, world: int) -> tuple[list[tuple[int, int]], int]:
    """[(offset, length)] of all segments, empty ones included, and the segments per rank."""
    most = itemsize * max(1, (1 << 20) // itemsize)
    count = max(math.ceil(size / most), 2 * world)
    while count % world:
        count += 1
    length = math.ceil(size / count)
    while length % itemsize:
        length += 1
    return [(j * length, max(0, min(length, size - j * length))) for j in range(count)], count // world


def ring_messages(size: int, itemsize: int, world: int, rank: int) -> list[tuple[int, int, bool]]:
    """(offset, length, final) of every message that `rank` sends, by walking chunk after chunk."""
    parts, each = segments(size, itemsize, world)
    result = []
    for final, first in ((False, rank + 1), (True, rank)):
        for step in range(world - 1):
            chunk = (first + step) % world
            result += [(offset, n, final) for offset, n in parts[chunk * each : (chunk + 1) * each] if n]
    return result


@dataclass(slots=True)
class Frame:
    """One TCP segment as mirrored."""

    ts: int
    link: Link
    sequence: int
    ack: int
    flags: int
    payload: bytes


@dataclass(slots=True)
class Job:
    """A process group of `world` ranks; `mirrored` are the links whose frames are captured."""

    world: int
    mirrored: list[Link]
    seed: int = 0
    mss: int = 1448
    gap_ns: int = 100_000
    base_port: int = 40000
    frames: list[Frame] = field(default_factory=list)
    truth: dict[int, tuple[np.ndarray, int]] = field(default_factory=dict)  # tag -> (bytes, item size)
    starts: dict[Link, list[tuple[int, int, int]]] = field(default_factory=dict)  # link -> (offset, opcode, slot)
    _now: int = 1_700_000_000_000_000_000
    _sent: dict[Link, int] = field(default_factory=dict)
    _length: dict[Link, int] = field(default_factory=dict)
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    # Addresses: rank r is 10.0.0.(r+1); its listener has base_port + r; the higher address connects.

    def ends(self, link: Link) -> tuple[int, int]:
        """(source port, destination port) of a link."""
        a, b = link
        return (50000 + a * 100 + b, self.base_port + b) if a > b else (self.base_port + a, 50000 + b * 100 + a)

    def group(self, name: str = "g") -> Group:
        listeners = {r: (f"10.0.0.{r + 1}", self.base_port + r) for r in range(self.world)}
        return Group(name, self.world, [listeners])

    def connect(self) -> None:
        for a in range(self.world):
            for b in range(a):
                self._flags((a, b), 0x02)
                self._flags((b, a), 0x12)
                self.send((a, b), struct.pack("<q", a))

    def close(self) -> None:
        for link in list(self._sent):
            self._flags(link, 0x11)

    def send(self, link: Link, data: bytes, *, cut: int = 0) -> None:
        """`data` as one write, in segments of at most `mss` bytes (or `cut`)."""
        step = cut or self.mss
        for at in range(0, len(data), step):
            self._frame(link, 0x10, data[at : at + step])

    def _start(self, link: Link, head: bytes) -> None:
        opcode, slot = struct.unpack("<QQ", head[8:24])
        self.starts.setdefault(link, []).append((self._length.get(link, 0), opcode, slot))

    def _flags(self, link: Link, flags: int) -> None:
        self._frame(link, flags, b"")

    def _frame(self, link: Link, flags: int, payload: bytes) -> None:
        sequence = self._sent.get(link, 1000 * (link[0] + 1))
        self._now += self.gap_ns
        if link in self.mirrored:
            ack = self._sent.get((link[1], link[0]), 0)
            self.frames.append(Frame(self._now, link, sequence, ack, flags, payload))
        self._length[link] = self._length.get(link, 0) + len(payload)
        self._sent[link] = (sequence + len(payload) + (1 if flags & 0x03 else 0)) & 0xFFFFFFFF

    def allreduce(self, sizes: dict[int, tuple[int, int]], *, values: dict[int, np.ndarray] | None = None) -> None:
        """All-reduces under way together: tag -> (bytes, item size); their messages are interleaved."""
        queues = self.queues(sizes, values=values)
        while queues:
            queue = self._random.choice(queues)
            link, tag, body = queue.pop(0)
            self.message(link, ALLREDUCE, tag, body)
            if not queue:
                queues.remove(queue)

    def queues(
        self, sizes: dict[int, tuple[int, int]], *, values: dict[int, np.ndarray] | None = None
    ) -> list[list[tuple[Link, int, bytes]]]:
        """The messages of all-reduces, (link, tag, payload), one list per tag and link."""
        queues: list[list[tuple[Link, int, bytes]]] = []
        for tag, (size, itemsize) in sizes.items():
            made = np.frombuffer(self._random.randbytes(size), np.uint8)
            final = made if values is None or tag not in values else values[tag]
            self.truth[tag] = (final, itemsize)
            whole = final.tobytes()
            for rank in range(self.world):
                link = (rank, (rank - 1) % self.world)
                if link not in self.mirrored and (link[1], link[0]) not in self.mirrored:
                    continue
                queue = []
                for offset, length, last in ring_messages(size, itemsize, self.world, rank):
                    body = whole[offset : offset + length] if last else self._random.randbytes(length)
                    queue.append((link, tag, body))
                queues.append(queue)
        return queues

    def message(self, link: Link, kind: int, tag: int, body: bytes) -> None:
        """One payload with its two announcements."""
        back = (link[1], link[0])
        notices = [(link, preamble(2, kind, tag, len(body))), (back, preamble(3, kind, tag, len(body)))]
        self._random.shuffle(notices)
        for where, data in notices:
            self._start(where, data)
            self.send(where, data)
        head = preamble(1, kind, tag, len(body))
        self._start(link, head)
        if self._random.random() < 0.5:
            self.send(link, head)
            self.send(link, body)
        else:
            self.send(link, head + body)

    def block(self, frames: list[Frame]) -> Block:
        """Frames as a captured block."""
        made = []
        for frame in frames:
            (a, b), (source, destination) = frame.link, self.ends(frame.link)
            made.append(tcp_frame(
                frame.payload, seq=frame.sequence, ack=frame.ack, flags=frame.flags, src=f"10.0.0.{a + 1}",
                dst=f"10.0.0.{b + 1}", sport=source, dport=destination,
            ))  # fmt: skip
        return pack(made, [frame.ts for frame in frames])


class Follower:
    """A whole decoding chain that plans every all-reduce of a job from its truth."""

    def __init__(self, job: Job, *, group: bool = True, budget: int = 1 << 30, **options: int) -> None:
        self.job = job
        self.flows = Flows(256)
        self.tcp = TcpReassembler(self.flows, **options)
        self.decoder = GlooDecoder(self.flows, budget_bytes=budget)
        self.decoder.planner = lambda request: AllReduce(len(job.truth[request.tag][0]), job.truth[request.tag][1])
        if group:
            self.decoder.add_group(job.group())
        self.events: list[Event] = []

    def feed(self, frames: list[Frame], per_block: int = 64) -> None:
        for i in range(0, len(frames), per_block):
            block = self.job.block(frames[i : i + per_block])
            now = int(block.ts.max())
            self.take(self.tcp.feed(block, now), now)

    def finish(self) -> None:
        self.take(self.tcp.flush(1 << 62), 1 << 62)

    def take(self, spans: Spans, now: int) -> None:
        self.events += self.decoder.feed(spans, now)

    def placed(self, tag: int) -> np.ndarray | None:
        """bool[size]: which bytes of a tag are placed."""
        landing = self.decoder.landing("g", tag)
        if landing is None:
            return None
        mask = np.ones(landing.size, bool)
        for offset, length in landing.holes():
            mask[offset : offset + length] = False
        return mask

    def check(self) -> dict[int, float]:
        """Every placed byte is right and nothing incomplete is called complete; tag -> part placed."""
        parts = {}
        for tag, (truth, _) in self.job.truth.items():
            landing, mask = self.decoder.landing("g", tag), self.placed(tag)
            if landing is None or mask is None:
                parts[tag] = 0.0
                continue
            assert not landing.poisoned, f"tag {tag} is poisoned: {landing.conflicts}"
            assert landing.covered == mask.sum()
            assert landing.complete == bool(mask.all())
            assert np.array_equal(landing.data[mask], truth[mask]), f"tag {tag}: wrong bytes placed"
            parts[tag] = float(mask.mean())
        return parts


def port(world: int, rank: int) -> list[Link]:
    """Both directions of one rank's port."""
    return [(rank, o) for o in range(world) if o != rank] + [(o, rank) for o in range(world) if o != rank]


def no_dangling_addresses(decoder: GlooDecoder) -> None:
    """Every address that the kernel may write to or read from belongs to memory that is still held."""
    held, state = decoder._held, decoder._lanes.state
    landings = {landing.address for landing in held.budget._landings.values()}
    raw = {address_of(m.data) for links in held.raw.values() for link in links.values() for m in link.messages
           if m.data is not None}
    raw |= {address_of(m.data) for m in held.filling.values() if m.data is not None}
    for lane in np.flatnonzero(state.lanes[:, g.FLOW] >= 0):
        row, entries, recent = state.lanes[lane], state.entries[lane], state.recent[lane]
        used = entries[np.isin(entries[:, g.PLAN], (g.REDUCE, g.DONE)) & (entries[:, g.SLOT] >= 0)]
        assert {int(a) for a in used[:, g.META]} <= landings
        assert {int(a) for a in recent[recent[:, g.R_KIND] == g.TO_LANDING, g.R_ADDRESS]} <= landings
        assert {int(a) for a in recent[recent[:, g.R_KIND] == g.TO_MEMORY, g.R_ADDRESS]} <= raw
        if row[g.MODE] == g.PAYLOAD and row[g.DEST_KIND] != g.NOWHERE:
            assert int(row[g.DEST]) in (landings if row[g.DEST_KIND] == g.TO_LANDING else raw)
    sizes = sum(x.size for x in held.budget._landings.values())
    sizes += sum(m.length for links in held.raw.values() for link in links.values() for m in link.messages
                 if m.data is not None) + sum(m.length for m in held.filling.values() if m.data is not None)
    assert held.budget.used == sizes


def all_complete(follower: Follower) -> None:
    """Every all-reduce of the job is complete, once, and nothing else was reported."""
    assert set(follower.check().values()) == {1.0}
    assert sorted(e.tag for e in follower.events if isinstance(e, Reduced)) == sorted(follower.job.truth)
    assert all(isinstance(e, Reduced | FlowClosed) for e in follower.events)


def lossy(job: Job, drop: list[bool], **options: int) -> Follower:
    follower = Follower(job, **options)
    follower.feed([f for f, gone in zip(job.frames, drop, strict=True) if not gone])
    follower.finish()
    return follower


def disordered(frames: list[Frame], rng: random.Random) -> list[Frame]:
    """Frames shuffled in a window, some twice, some cut in two; only data frames, the rest keep their places."""
    result: list[tuple[float, Frame]] = []
    for i, frame in enumerate(frames):
        parts = [frame]
        if len(frame.payload) > 1 and rng.random() < 0.1:
            at = rng.randrange(1, len(frame.payload))
            parts = [
                replace(frame, payload=frame.payload[:at]),
                replace(frame, payload=frame.payload[at:], sequence=(frame.sequence + at) & 0xFFFFFFFF),
            ]
        if frame.payload and rng.random() < 0.1:
            parts.append(rng.choice(parts))
        result += [(i + (rng.uniform(0, 6) if frame.payload else 0), part) for part in parts]
    return [frame for _, frame in sorted(result, key=lambda pair: pair[0])]
