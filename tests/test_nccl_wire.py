"""The lab's NCCL traffic: against recorded jobs, the decoder's own arithmetic, and a second run of NCCL's loops."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import nccl_frames
import numpy as np
import pytest
from nccl_plans import room
from tcp_frames import block_of

from flowcheck.errors import UsageError
from flowcheck.lab.addresses import Port, training_address
from flowcheck.lab.nccl_wire import Call, Communicator, Work, frames_of, mirrored
from flowcheck.lab.nccl_wire_frames import Path as Way
from flowcheck.lab.nccl_wire_frames import packet, write
from flowcheck.lab.nccl_wire_job import ALGORITHMS, PROTOCOLS, Job, node_parents
from flowcheck.lab.nccl_wire_lanes import connections, layout
from flowcheck.lab.nccl_wire_payload import combiner, encode
from flowcheck.lab.nccl_wire_split import Cut, shares
from mirror.memory import address_of
from mirror.messages import Message, MessageRecorder
from mirror.roce import QueuePairs, RoceReassembler
from reconstruct.nccl import payload as nccl_payload
from reconstruct.nccl import schedule
from reconstruct.nccl.plan import plan
from reconstruct.nccl.split import Collective
from reconstruct.nccl.split import Communicator as Planner
from reconstruct.nccl.versions import traits

NUMBER = {"ll": schedule.LL, "ll128": schedule.LL128, "simple": schedule.SIMPLE}
KIND = {"allreduce": schedule.ALLREDUCE, "broadcast": schedule.BROADCAST, "allgather": schedule.ALLGATHER}
ALGORITHM = {"ring": schedule.RING, "tree": schedule.TREE, "nvlstree": schedule.NVLSTREE}
VERSIONS = ("2.18.6", "2.19.4", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.26.2", "2.28.9", "2.29.2", "2.30.7")
START = 1_700_000_000_000_000_000


def inputs(ranks: int, count: int, seed: int = 1) -> list[np.ndarray]:
    """Values of very different sizes, so that every order of addition gives another sum."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32) for _ in range(ranks)]


class Seen:
    """What a reassembler makes of frames: messages per (source, destination, queue pair), in PSN order."""

    def __init__(self, made: Sequence[tuple[int, object, bytes]]) -> None:
        self.roce = RoceReassembler(QueuePairs(4096), check_icrc=True)
        recorder = MessageRecorder(self.roce)
        for at in range(0, len(made), 2000):
            part = made[at : at + 2000]
            block = block_of([frame for _, _, frame in part], [time for time, _, _ in part])
            recorder.feed(self.roce.feed(block, part[-1][0]))
        recorder.feed(self.roce.flush(made[-1][0]))
        self.flows: dict[tuple[str, str, int], list[Message]] = defaultdict(list)
        for message in recorder.messages:
            assert message.complete, "every packet was there"
            self.flows[message.source, message.destination, message.queue_pair].append(message)
        for found in self.flows.values():
            found.sort(key=lambda message: message.first_psn)

    def data(self) -> dict[tuple[str, str, int], list[Message]]:
        return {flow: found for flow, found in self.flows.items() if found[0].imm is not None}


def decoded(protocol: str, message: Message, length: int, step: int) -> np.ndarray:
    """float32 values of one message, through the decoder's payload formats, which check the flags."""
    wire = np.frombuffer(message.data, np.uint8).copy()
    out = np.zeros(max(length, 1), np.uint8)
    number = NUMBER[protocol]
    flag = nccl_payload.flag(number, step)
    whole = nccl_payload.decode(number, address_of(wire), 0, wire.size, address_of(out), length, flag)
    assert whole == wire.size
    return out[:length].view(np.float32)


# Offset of the sender's rank and of the number in an announcement, by release.
_ENTRY = (((2, 20), 32, 20, 24), ((2, 24), 64, 24, 32), ((2, 30), 64, 36, 40), ((3,), 64, 52, 56))


def by_lane(seen: Seen, job: Job, work: Work) -> dict[tuple[int, int, int], list[Message]]:
    """The data messages of every lane that crosses the network: queue pairs rise in the order of the connections.

    Checks each against the announcement of its slot, which goes the other way.
    """
    address = [training_address(port, job.ipv6) for port in job.ports]
    used = {(lane.channel, lane.sender, lane.receiver) for lane in work.layout.lanes}
    found: dict[tuple[int, int, int], list[Message]] = {}
    for source, target in {(address[s], address[r]) for _, s, r in used}:
        keys = [k for k in connections(job) if k in used and (address[k[1]], address[k[2]]) == (source, target)]
        for announces, table in ((False, found), (True, entries := {})):
            flows = [f for (a, b, _), f in sorted(seen.flows.items())
                     if (a, b) == ((target, source) if announces else (source, target))
                     and (f[0].imm is None) == announces]
            assert len(flows) == len(keys)
            table.update(zip(keys, flows, strict=True))
        _, size, tag, number = next(row for row in _ENTRY if job.release < row[0])
        for key in keys:
            assert len(found[key]) == len(entries[key])
            for index, (message, entry) in enumerate(zip(found[key], entries[key], strict=True)):
                assert len(entry.data) == size
                assert struct.unpack_from("<I", entry.data, tag)[0] == key[1]
                assert struct.unpack_from("<Q", entry.data, number)[0] == index + 1
                assert struct.unpack_from("<Q", entry.data)[0] == message.va
                assert message.imm is not None
                imm = message.imm.to_bytes(4, "big" if job.release >= (2, 29) else "little")
                assert int.from_bytes(imm, "big") == len(message.data)
    return found


# -- against what real jobs sent -----------------------------------------------------------------------------------


def _write_pcap(path: Path, made: Sequence[tuple[int, object, bytes]]) -> Path:
    parts = [struct.pack("<IHHIIII", 0xA1B23C4D, 2, 4, 0, 0, 1 << 18, 1)]
    parts += [struct.pack("<IIII", t // 10**9, t % 10**9, len(f), len(f)) + f for t, _, f in made]
    path.write_bytes(b"".join(parts))
    return path


def _ddp_job(floats: int, rounds: int) -> list[Call]:
    """DDP with one parameter: count, shape, parameters; an all-reduce; rebuilt buckets; the other all-reduces."""
    reduce = [Call("allreduce", inputs(2, floats, seed)) for seed in range(rounds)]
    start = [
        Call("allgather", [np.array([1])] * 2),
        Call("broadcast", [np.array([1, floats, 1, 1])] * 2),
        Call("broadcast", inputs(2, floats)),
    ]
    rebuilt = [Call("broadcast", [np.array([0, 1], np.int32)] * 2), Call("broadcast", [np.array([1], np.int32)] * 2)]
    return [*start, reduce[0], *rebuilt, *reduce[1:]]


def test_a_recorded_job_is_made_again_message_for_message(shared: Path, tmp_path: Path) -> None:
    recorded = nccl_frames.messages(shared / "captures/nccl/iter_40000_p2p_iter10_2.pcapng")
    made = frames_of(Job(2, version="2.19.4"), _ddp_job(5000, 20))
    ours = nccl_frames.messages(_write_pcap(tmp_path / "made.pcap", made))

    def shape(found: list[nccl_frames.Message]) -> list[tuple[int, int, bytes | None]]:
        return [(m.va - found[0].va, len(m.data), m.immediate) for m in found]

    for count in (45, 41):  # rank 0 sends the broadcasts as well
        (theirs, entries), (mine, own) = _connection(recorded, count), _connection(ours, count)
        assert shape(mine) == shape(theirs)
        assert len({m.rkey for m in mine}) == 1 == len({m.rkey for m in theirs})
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            flags = [np.frombuffer(bytes(m.data), "<u4").reshape(-1, 4)[:, 1::2] for m in (a, b)]
            assert (flags[0] == number + 1).all() and (flags[0] == flags[1]).all()
        # Announcements: the same entries but for addresses and keys.
        for a, b in zip(own, entries, strict=False):
            assert a.data[8:12] == b.data[8:12] and a.data[16:] == b.data[16:]
            assert a.va - own[0].va == b.va - entries[0].va


def _connection(
    flows: dict[nccl_frames.Flow, list[nccl_frames.Message]], count: int
) -> tuple[list[nccl_frames.Message], list[nccl_frames.Message]]:
    """The `count` data messages of one connection, and the entries that announce them."""
    ((source, target, _), sent), = [(flow, f) for flow, f in flows.items() if len(f) == count and f[0].immediate]
    address = sent[0].va.to_bytes(8, "little")
    (entries,) = [f for flow, f in flows.items() if flow[:2] == (target, source) and f[0].immediate is None
                  and f[0].data[:8] == address]
    return sent, entries


def test_recorded_payloads_are_encoded_to_the_same_bytes(shared: Path) -> None:
    for found in nccl_frames.messages(shared / "captures/nccl/iter_80000.pcapng").values():
        if found[0].immediate is None:
            continue
        for number, message in enumerate(found[:40]):
            if not message.whole:
                break
            wire = np.frombuffer(bytes(message.data), np.uint8)
            data = wire.view("<u4").reshape(-1, 4)[:, ::2].copy().view(np.uint8).reshape(-1)
            assert (encode("ll", data, number) == wire).all()


def test_recorded_packets_are_made_again_with_the_same_crc(shared: Path) -> None:
    """A packet put together from a recorded one's fields ends with the CRC that the card computed."""
    checked = 0
    for _, frame in nccl_frames.frames(shared / "captures/roce/c1_clean_v4_1024.pcap"):
        if frame[12:14] != b"\x08\x00" or frame[42] not in (7, 9, 10, 11) or frame[43] & 0x30:
            continue
        path = _Recorded(frame)
        psn, request = int.from_bytes(frame[51:54], "big"), bool(frame[50] & 0x80)
        made = packet(path, frame[42], int.from_bytes(frame[47:50], "big"), psn, 0, frame[54:-4], request=request)
        if made[42:54] == frame[42:54]:  # no solicited event, no congestion bits
            assert made[-4:] == frame[-4:]
            checked += 1
    assert checked > 100


class _Recorded:
    """Stands for the path of a recorded IPv4 packet."""

    def __init__(self, frame: bytes) -> None:
        self.ethernet, self._ip = frame[:14], frame[14:34]
        self.udp_source = int.from_bytes(frame[34:36], "big")

    def ip(self, udp_length: int, ident: int) -> tuple[bytes, bytes]:
        ip = self._ip
        assert int.from_bytes(ip[2:4], "big") == 20 + udp_length
        return ip, ip[:1] + b"\xff" + ip[2:8] + b"\xff" + ip[9:10] + b"\xff\xff" + ip[12:]


# -- against the specification's examples --------------------------------------------------------------------------


def _lane(
    job: Job, cut: Cut, sender: int, channel: int = 0, receiver: int | None = None
) -> list[tuple[int, int, bool]]:
    lanes = [x for x in layout(job, cut).lanes if x.sender == sender and x.channel == channel]
    (lane,) = [x for x in lanes if receiver is None or x.receiver == receiver]
    return [(piece.first, piece.length, piece.final) for piece in lane.pieces]


@pytest.mark.parametrize(("version", "rounded"), [("2.30.7", 250000), ("2.19.4", 250880)])
def test_a_million_floats_over_a_simple_ring(version: str, rounded: int) -> None:
    job = Job(4, version=version, algorithm="ring", protocol="simple")
    sent = _lane(job, Cut("allreduce", "ring", "simple", 1_000_000, 4), 2)
    assert len(sent) == 12
    chunk = [(c * rounded, min(rounded, 1_000_000 - c * rounded)) for c in range(4)]
    for s, c in enumerate((1, 0, 3, 2, 1, 0)):
        (first, one, final), (second, two, _) = sent[2 * s : 2 * s + 2]
        assert (first, one + two, final) == (*chunk[c], s >= 3) and second == first + one
        if version == "2.30.7":
            assert (one * 4, two * 4) == (500032, 499968)
        else:
            assert one * 4 == (494720 if c == 3 else 501760) or two == one


def test_few_bytes_use_fewer_threads() -> None:
    """7000 bytes are below 512 and at least 256 times 8 x 2: chunks are multiples of 256 x 8 bytes."""
    cut = Cut("allreduce", "ring", "ll", 1750, 4)
    assert shares(Job(2, version="2.19.4"), cut) == [(0, [[(0, 1024), (1024, 726)]])]


def test_fat_trees_of_the_specification() -> None:
    floats = 6_553_600
    for version, protocol, first, wire in (
        ("2.19.4", "simple", [(131072 * k + 16384 * 3, 16384) for k in range(50)], None),
        ("2.30.7", "simple", [(819200 * 3 + 131072 * k, 131072 if k < 6 else 32768) for k in range(7)], None),
        ("2.22.3", "ll128", [(819200 * 3 + 17760 * k, 17760 if k < 46 else 2240) for k in range(47)], 75776),
        ("2.20.5", "ll128", [(820800 * 3 + 18000 * k, 18000 if k < 45 else 10800) for k in range(46)], 77824),
    ):
        job = Job(32, 8, version, "tree", protocol, 8, 8)
        cut = Cut("allreduce", "tree", protocol, floats, 4)
        (loops,) = [loops for channel, loops in shares(job, cut) if channel == 3]
        assert [chunks[0] for chunks in loops] == first
        if wire:
            assert encode("ll128", np.zeros(first[0][1] * 4, np.uint8), 0).size == wire
    cut = Cut("allreduce", "tree", "ll128", floats, 4)
    last = {c: loops[-1][0][1] for c, loops in shares(Job(32, 8, "2.19.4", "tree", "ll128", 8, 8), cut)}
    assert last == {0: 18000, 1: 18000, 2: 18000, 3: 18000, 4: 1600, 5: 0, 6: 0, 7: 0}


def test_small_trees_of_the_specification() -> None:
    for version, one in (("2.19.4", 3072), ("2.22.3", 2500), ("2.23.4", 4096), ("2.26.2", 2560), ("2.30.7", 3072)):
        job = Job(3, version=version, algorithm="tree", protocol="ll", channels=2)
        cut = Cut("allreduce", "tree", "ll", 5000, 4)
        assert _lane(job, cut, 0, 0, 2) == [(0, one, True)] == _lane(job, cut, 2, 0, 1)
        assert _lane(job, cut, 1, 1, 0) == [(one, 5000 - one, True)] == _lane(job, cut, 0, 1, 2)
        assert _lane(job, cut, 1, 0, 2) == [(0, one, False)]


def test_trees_are_those_of_the_specification() -> None:
    table = {
        2: ((-1, 0), (1, -1)),
        3: ((-1, 2, 0), (1, -1, 0)),
        4: ((-1, 2, 0, 2), (1, 3, 1, -1)),
        5: ((-1, 2, 4, 2, 0), (1, -1, 3, 0, 3)),
        8: ((-1, 2, 4, 2, 0, 6, 4, 6), (1, 3, 1, 7, 5, 3, 5, -1)),
    }
    for nodes, both in table.items():
        assert (node_parents(nodes, 0), node_parents(nodes, 1)) == both
    # Two shapes of node, 4 nodes of 8: channel 3's tree between ranks 3, 11, 19 and 27.
    for pattern, parent in ((3, 19), (1, 20)):
        below = Job(32, 8, algorithm="tree", channels=16, rails=8, pattern=pattern).tree(3)[1]
        assert 19 in below[3] and 11 in below[parent] and 27 in below[19]


def test_nvls_trees_of_the_specification() -> None:
    cut = Cut("allreduce", "nvlstree", "simple", 6_553_600, 4)
    for version, first in (("2.19.4", [131072, 2228224]), ("2.30.7", [409600, 540672])):
        job = Job(32, 8, version, "nvlstree", channels=16, rails=8)
        (loops,) = [loops for channel, loops in shares(job, cut) if channel == 1]
        assert [chunks[0] for chunks in loops[:2]] == [(at, 16384) for at in first] and len(loops) == 4
    assert loops[-1][0][1] == 2048


# -- against the decoder's own arithmetic --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_decoder_and_generator_cut_alike(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        per_node, nodes = rng.choice([1, 1, 2, 4, 8]), rng.choice([2, 3, 4, 5, 8])
        kind = rng.choice(["allreduce", "allreduce", "broadcast", "allgather"])
        algorithm = rng.choice(ALGORITHMS) if kind == "allreduce" else "ring"
        protocol = "simple" if algorithm == "nvlstree" else rng.choice(PROTOCOLS)
        channels, itemsize = rng.choice([1, 2, 3, 4, 8, 16]), rng.choice([2, 4, 8]) if kind == "allreduce" else 1
        count = rng.choice([1, rng.randint(2, 5000), rng.randint(5001, 300_000), rng.randint(300_001, 2_000_000)])
        rails = rng.choice([r for r in (1, 2, 4, 8) if r <= per_node])
        job = Job(nodes * per_node, per_node, rng.choice(VERSIONS), algorithm, protocol, channels, rails)
        comm = Planner(traits(job.version), job.ranks, channels, nodes, nvls_channels=channels, heads=job.heads)
        call = Collective(KIND[kind], ALGORITHM[algorithm], NUMBER[protocol], count, itemsize)
        plans = [plan(comm, [call], head)[0] for head in range(job.heads if algorithm == "nvlstree" else 1)]
        rows = [dict(zip(planned.channels, planned.rows, strict=True)) for planned in plans]
        made = layout(job, Cut(kind, algorithm, protocol, count, itemsize))
        assert {lane.channel for lane in made.lanes} == set(rows[0]), job
        for lane in made.lanes:
            row, ring = rows[lane.head][lane.channel], job.ring(lane.channel)
            up = schedule.UP if lane.up else schedule.DOWN
            position = ring.index(lane.sender) if algorithm == "ring" else up
            theirs = [tuple(place[-3:]) for place in schedule.places(row, position).tolist()]
            if kind == "allgather":  # theirs count from the block's start
                blocks = [ring[place[3]] * count for place in schedule.places(row, position).tolist()]
                theirs = [(o + b, n, f) for (o, n, f), b in zip(theirs, blocks, strict=True)]
            ours = [(p.first * itemsize, p.length * itemsize, p.final) for p in lane.pieces]
            assert [o[1:] for o in ours] == [t[1:] for t in theirs], job
            assert [o for o in ours if o[1]] == [t for t in theirs if t[1]], job
            assert len(ours) == 0 or made.room == room(row) or protocol != "simple"


# -- the frames, through the transport -----------------------------------------------------------------------------

JOBS = [
    Job(3, version="2.19.4", algorithm="ring", protocol="ll", channels=2),
    Job(4, version="2.28.9", algorithm="ring", protocol="ll128", mtu=4096),
    Job(4, version="2.30.7", algorithm="ring", protocol="simple", channels=3, ipv6=True),
    Job(5, version="2.20.5", algorithm="tree", protocol="ll128", channels=2, mtu=4096),
    Job(6, 2, "2.22.3", "tree", "simple", 4, 2),
    Job(8, 2, "2.26.2", "nvlstree", None, 2, 2, mtu=4096),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.version}-{job.algorithm}-{job.protocol}-{job.ranks}")
def test_messages_on_the_wire_are_what_ncclls_loops_would_send(job: Job) -> None:
    """Every rank is run once more on nothing but what arrives: the messages it must send are those that it sent."""
    x = inputs(job.ranks, 30_011)
    call = Call("allreduce", x)
    seen = Seen(frames_of(job, [call]))
    right, wrong = seen.roce.icrc[: seen.roce.flows.count].sum(axis=0)
    assert right > 0 and wrong == 0
    work = Work(job, call)
    sent = by_lane(seen, job, work)
    values = {}
    for lane in work.layout.lanes:
        key = (lane.channel, lane.sender, lane.receiver)
        if job.hosts[lane.sender] == job.hosts[lane.receiver]:
            continue
        assert len(sent[key]) == len(lane.pieces)
        for index, (piece, message) in enumerate(zip(lane.pieces, sent[key], strict=True)):
            step = index * work.layout.steps
            values[key, index] = decoded(work.protocol, message, piece.length * 4, step)
    if job.ranks == job.nodes:
        (_check_ring if job.algorithm == "ring" else _check_tree)(work, x, values)
    for lane in work.layout.lanes:
        for index, piece in enumerate(lane.pieces):
            found = values.get(((lane.channel, lane.sender, lane.receiver), index))
            if found is not None and piece.final:
                assert work.result is not None
                assert (found == work.result[piece.first : piece.first + piece.length]).all()
    exact = np.sum([a.astype(np.float64) for a in x], axis=0)
    assert work.result is not None and np.allclose(work.result, exact, rtol=1e-3, atol=0.1)


Values = dict[tuple[tuple[int, int, int], int], np.ndarray]


def _check_ring(work: Work, x: list[np.ndarray], values: Values) -> None:
    """A rank sends its own part first, then what came from its neighbour with its own added, then passes results on."""
    n = len(x)
    slices = work.layout.steps
    lanes = {(lane.channel, lane.receiver): lane for lane in work.layout.lanes}
    for lane in work.layout.lanes:
        before = lanes[lane.channel, lane.sender]
        for index, piece in enumerate(lane.pieces):
            own = x[lane.sender][piece.first : piece.first + piece.length]
            s = index // slices % (2 * (n - 1))
            sent = values[(lane.channel, lane.sender, lane.receiver), index]
            if s == 0:
                assert (sent == own).all()
                continue
            came = values[(before.channel, before.sender, before.receiver), index - slices]
            assert (sent == (came + own if s < n else came)).all()


def _check_tree(work: Work, x: list[np.ndarray], values: Values) -> None:
    ups: dict[tuple[int, int], list] = defaultdict(list)
    for lane in work.layout.lanes:
        if lane.up:
            ups[lane.channel, lane.receiver].append(lane)
    for lane in work.layout.lanes:
        for index, piece in enumerate(lane.pieces):
            total = x[lane.sender][piece.first : piece.first + piece.length]
            for below in ups[lane.channel, lane.sender]:
                total = total + values[(lane.channel, below.sender, below.receiver), index]
            sent = values[(lane.channel, lane.sender, lane.receiver), index]
            rising = [up.sender for up in work.layout.lanes if up.channel == lane.channel and up.up]
            is_root = lane.sender not in rising
            if lane.up or is_root:
                assert (sent == total).all()


def test_every_message_is_announced_before_it_is_sent_and_acknowledged_after() -> None:
    """Also on other links: a sum leaves only after everything in it has come."""
    for job in JOBS[:5]:
        call = Call("allreduce", inputs(job.ranks, 30_011))
        comm, work = Communicator(job), Work(job, call)
        arrived: dict[tuple[int, int, int], int] = defaultdict(int)
        granted: dict[tuple[int, int, int], int] = defaultdict(int)
        for event in comm.events(work):
            comm.made(work, event, False)
            key = (event.lane.channel, event.lane.sender, event.lane.receiver)
            if event.kind == "grant":
                granted[key] += 1
                assert granted[key] - arrived[key] <= 8 // work.layout.steps
            elif event.kind == "taken":
                arrived[key] += 1
            else:
                assert event.index < granted[key]
                for other in work.layout.lanes:
                    if other.channel != event.lane.channel or other.receiver != event.lane.sender:
                        continue
                    if job.algorithm == "ring":
                        needed = event.index + 1 - work.layout.steps * (event.lane.pieces[event.index].stage > 1)
                        assert arrived[other.channel, other.sender, other.receiver] >= needed - work.layout.steps
                    elif other.up or not event.lane.up:
                        assert arrived[other.channel, other.sender, other.receiver] > event.index or (
                            event.lane.up and other.receiver == event.lane.receiver)
        assert all(count == len(lane.pieces) for lane in work.layout.lanes
                   for count in [arrived[lane.channel, lane.sender, lane.receiver]])


def test_collectives_go_on_where_the_last_one_ended() -> None:
    """Steps, announcements and sequence numbers run through; Simple rings begin at a multiple of four slots."""
    job = Job(2, algorithm="ring", protocol=None)
    comm = Communicator(job)
    small, large = inputs(2, 1000), inputs(2, 400_000)
    calls = [Call("broadcast", small), Call("allreduce", small), Call("allreduce", large), Call("allreduce", small)]
    first = frames_of(job, calls[:2], communicator=comm)
    seen = Seen([*first, *frames_of(job, calls[2:], start=first[-1][0], communicator=comm)])
    (sent,) = [found for found in seen.flows.values() if found[0].imm is not None and len(found) == 9]
    assert [m.va - sent[0].va for m in sent[:3]] == [0, 65536, 131072]
    assert [m.va - sent[0].va - 0x530000 for m in sent[3:7]] == [4 * 0x80000, 6 * 0x80000, 0, 2 * 0x80000]
    assert [m.va - sent[0].va for m in sent[7:]] == [4 * 65536, 5 * 65536]
    flags = [struct.unpack_from("<I", m.data, 4)[0] for m in (*sent[:3], *sent[7:])]
    assert flags == [1, 2, 3, 13, 14]
    psn = 0
    for message in sent:
        assert message.first_psn & 0xFFFFFF == psn
        psn += max(1, -(-len(message.data) // 1024))


def test_several_queue_pairs_share_a_message_or_take_turns() -> None:
    x = inputs(2, 5000)
    cut = Seen(frames_of(Job(2, qps=4, version="2.19.4", protocol="ll"), [Call("allreduce", x)])).data()
    sizes = sorted(tuple(len(m.data) for m in found) for (_, target, _), found in cut.items() if target.endswith("2"))
    assert sizes == sorted([(3968, 6144), (3968, 6144), (3968, 6144), (3520, 6144)])
    base = min(m.va for f in cut.values() for m in f)
    assert {m.va - base for f in cut.values() for m in f if len(m.data) < 4000} >= {0, 3968, 7936, 11904}
    turns = Seen(frames_of(Job(2, qps=2, version="2.20.5", protocol="ll"), [Call("allreduce", x)])).data()
    assert sorted(len(found) for found in turns.values()) == [1, 1, 1, 1]


def test_empty_chunks_are_sent_as_empty_messages() -> None:
    """Two channels of 5000 numbers in 2.19: one chunk of channel 1 is empty, as recorded."""
    job = Job(2, channels=4, protocol="ll", algorithm="ring")
    seen = Seen(frames_of(job, [Call("allreduce", inputs(2, 5000))]))
    sizes = sorted(tuple(len(m.data) for m in found) for found in seen.data().values())
    assert sizes == sorted([(7232, 16384), (0, 16384), (16384, 7232), (16384, 0)])


def test_a_transfer_goes_in_pieces_over_a_connection_of_its_own() -> None:
    job = Job(3)
    values = inputs(3, 70_000)
    seen = Seen(frames_of(job, [Call("allreduce", values), Call("sendrecv", values, root=2, target=0)]))
    (sent,) = [found for found in seen.flows.values() if len(found) == 3 and found[0].imm is not None
               and [len(m.data) for m in found] == [131072, 131072, 280_000 - 262144]]
    assert b"".join(m.data for m in sent) == values[2].tobytes()


def test_copies_carry_the_inputs() -> None:
    job = Job(3, protocol="simple", version="2.24.3")
    blocks = [np.arange(50_000) + 1_000_000 * rank for rank in range(3)]
    seen = Seen(frames_of(job, [Call("allgather", blocks), Call("broadcast", blocks, root=1)]))
    data = {flow: b"".join(m.data for m in found) for flow, found in seen.data().items()}
    for (source, _, _), sent in data.items():
        rank = int(source.rsplit(".", 1)[1]) - 1
        gathered = blocks[rank].tobytes() + blocks[(rank - 1) % 3].tobytes()
        passed = blocks[1].tobytes() if rank != 0 else b""  # rank 0 is before the root
        assert sent == gathered + passed


def test_a_mirror_shows_what_its_port_sends_and_gets() -> None:
    job = Job(4, 2, rails=2, channels=4)
    made = frames_of(job, [Call("allreduce", inputs(4, 60_000))])
    port = Port(1, 1)
    shown = mirrored(made, [(port, "in")])
    assert shown and all(source == port for _, (source, _), _ in shown)
    assert {f[6:12] for _, _, f in shown} == {bytes((2, 0x77, 0, 1, 0, 1))}
    both = mirrored(made, [(port, "in"), (port, "out"), (Port(1, 0), "in"), (Port(1, 0), "out")])
    assert len(both) == len(made), "two nodes: one of them sees everything"


def test_middle_packets_are_those_made_one_by_one() -> None:
    data = np.random.default_rng(2).integers(0, 256, 5 * 1024 + 17, np.uint8)
    for ipv6 in (False, True):
        way = Way(Port(0, 0), Port(1, 0), ipv6, 50000)
        frames = write(way, 0x123, 0xFFFFFE, 0xFFFE, 1 << 40, 9, data, b"abcd", 1024)
        assert len(frames) == 6
        for index in range(1, 5):
            psn, ident = (0xFFFFFE + index) & 0xFFFFFF, (0xFFFE + index) & 0xFFFF
            part = data[1024 * index : 1024 * (index + 1)].tobytes()
            assert bytes(frames[index]) == packet(way, 7, 0x123, psn, ident, part, request=False)


def test_sixteen_bit_sums_round_at_every_addition() -> None:
    import torch

    rng = np.random.default_rng(5)
    values = [rng.standard_normal(4000).astype(np.float32) * 3 for _ in range(5)]
    for dtype, kind in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        tensors = [torch.from_numpy(v).to(kind) for v in values]
        arrays = [t.view(torch.int16).numpy().view(np.uint16 if dtype == "bfloat16" else np.float16) for t in tensors]
        job = Job(5, protocol="ll", algorithm="ring")
        result = Work(job, Call("allreduce", arrays, dtype)).result
        assert result is not None
        expected = torch.empty(4000, dtype=kind)
        # The first chunk starts at rank 1 and ends at rank 0; every other one is moved on by one.
        for _, c, (first, length) in Work(job, Call("allreduce", arrays, dtype)).layout.results:
            part = slice(first, first + length)
            total = tensors[(c + 1) % 5][part]
            for k in range(2, 6):
                total = total + tensors[(c + k) % 5][part]
            expected[part] = total
        assert (result.view(np.int16) == expected.view(torch.int16).numpy()).all()
    nan = np.array([0x7FC0, 0x3F80], np.uint16)
    assert combiner("bfloat16", "sum")(nan, nan)[0] == 0x7FFF, "the GPU's NaN"


def test_an_average_scales_each_part_before_it_is_added() -> None:
    x = inputs(3, 500)
    job = Job(3, protocol="ll", algorithm="tree")
    third = np.float32(1 / 3)
    # Tree 0 of three nodes: 0 above 2 above 1.
    result = Work(job, Call("allreduce", x, op="avg")).result
    assert result is not None and (result == x[0] * third + (x[2] * third + x[1] * third)).all()
    whole = [np.array([7, -7]), np.array([1, 0]), np.array([2, 0])]
    divided = Work(job, Call("allreduce", whole, "int64", "avg")).result
    assert divided is not None and divided.tolist() == [3, -2]


def test_what_is_not_possible_is_refused() -> None:
    for fields, message in (
        ({"version": "2.17.1"}, "2.18 to 2.30"),
        ({"version": "2.19"}, "three numbers"),
        ({"channels": 0}, "1 to 32"),
        ({"rails": 2}, "1 GPUs"),
        ({"algorithm": "nvlstree", "protocol": "ll"}, "choose --protocol simple"),
        ({"members": (0, 0)}, "different members"),
    ):
        with pytest.raises(UsageError, match=message):
            Job(2, **fields)
