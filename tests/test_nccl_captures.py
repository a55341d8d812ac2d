"""Real captures of NCCL 2.19 against the schedule and the payload formats: every message is where they say.

The frames are read by tests/nccl_frames.py, not by the transport, so that only schedules and formats are tested here.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from nccl_frames import Flow, Message, messages, packets, tcp_streams
from nccl_plans import Sent, in_order, shown, unknown

from mirror.memory import address_of
from reconstruct.nccl import payload, schedule
from reconstruct.nccl.plan import plan
from reconstruct.nccl.schedule import ALLGATHER, ALLREDUCE, BROADCAST, LL, RING, SIMPLE
from reconstruct.nccl.split import Collective, Communicator
from reconstruct.nccl.versions import traits

RANK0, RANK1 = "fe80::e42:a1ff:fe9f:58f8", "fe80::ac0:ebff:fe8c:282d"
FLOATS = 5000
REBUILD = [Collective(BROADCAST, RING, LL, 2, 4), Collective(BROADCAST, RING, LL, 1, 4)]


def _start(floats: int) -> list[Collective]:
    """What DDP does first: parameter count, shapes (one parameter: sizes and strides), the parameters."""
    return [
        Collective(ALLGATHER, RING, LL, 1, 8),
        Collective(BROADCAST, RING, LL, 8, 4),
        Collective(BROADCAST, RING, LL, floats, 4),
    ]


def _planned(calls: list[Collective], position: int, channels: int = 1, version: str = "2.19.4") -> list[list[Sent]]:
    """The messages of each channel."""
    comm = Communicator(traits(version), 2, channels, 2)
    rows: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(channels)]
    for call in calls:
        (planned,) = plan(comm, [call])
        for channel, row in zip(planned.channels, planned.rows, strict=True):
            rows[channel].append((row, position))
    return [in_order(one) for one in rows]


def _length(one: Sent) -> int:
    return int(schedule.place(one.row, one.position, one.index)[5])


def _matches(line: list[Sent], sent: list[Message]) -> bool:
    """Whether the sizes of all messages are the planned ones."""
    return [schedule.wire_bytes(LL, _length(one), one.step) for one in line] == [len(m.data) for m in sent]


def _place(line: list[Sent], sent: list[Message], finals: dict[int, np.ndarray], sizes: dict[int, int]) -> None:
    """Decode all messages of a connection; final values go into `finals`, by collective.

    Checks of each: size, immediate, slot, flags; of final values that have been seen: equality.
    """
    base = sent[0].va
    for one, message in zip(line, sent, strict=True):
        assert message.whole and message.immediate is not None
        _, _, _, _, offset, length, final = schedule.place(one.row, one.position, one.index)
        assert len(message.data) == schedule.wire_bytes(LL, length, one.step)
        assert len(message.data) == struct.unpack("<I", message.immediate)[0]
        assert message.va - base == one.step % schedule.STEPS * schedule.SLOT_BYTES[LL]
        wire = np.frombuffer(bytes(message.data), np.uint8).copy()
        mark = payload.flag(LL, one.step)
        if length:
            assert payload.formats(address_of(wire), wire.size, False) & 1 << LL
            assert payload.read_flag(LL, address_of(wire)) == mark
        out = np.zeros(length, np.uint8)
        assert payload.decode(LL, address_of(wire), 0, wire.size, address_of(out), length, mark) == wire.size
        if final:
            tensor = finals.setdefault(one.at, np.zeros(sizes[one.at], np.uint8))
            tensor[offset : offset + length] = out


def _flow(source: str, qp: int, flows: dict[Flow, list[Message]]) -> list[Message]:
    (found,) = [sent for flow, sent in flows.items() if flow[0] == source and flow[2] == qp]
    return found


@pytest.fixture(scope="module")
def job(shared: Path) -> dict[Flow, list[Message]]:
    """Ten and ten iterations of DDP on 5000 floats, two ranks, one channel, both directions."""
    return messages(shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng")


def test_both_directions_rebuild_every_all_reduce(job: dict[Flow, list[Message]]) -> None:
    reduce = Collective(ALLREDUCE, RING, LL, FLOATS, 4)
    calls = [*_start(FLOATS), reduce, *REBUILD, *[reduce] * 19]
    reduces = [3, *range(6, 25)]
    sizes = {at: call.count * call.itemsize for at, call in enumerate(calls)}
    sizes[0] = 8
    out0, out1 = _flow(RANK0, 0x453, job), _flow(RANK1, 0x12E3, job)
    assert [len(m.data) for m in out0[:5]] == [16, 64, 40000, 15424, 24576] and len(out0) == 45
    assert [len(m.data) for m in out1[:5]] == [16, 24576, 15424, 24576, 15424] and len(out1) == 41
    finals: dict[int, np.ndarray] = {}
    kept: dict[int, np.ndarray] = {}
    (line0,), (line1,) = _planned(calls, 0), _planned(calls, 1)
    _place(line0, out0, finals, sizes)
    _place(line1, out1, kept, sizes)
    # Each direction shows its chunk: 0..3072 from rank 0, 3072..5000 from rank 1; together the whole tensor.
    sends = _flow(RANK0, 0x456, job)
    assert len(sends) == len(reduces) == 20
    for at, send in zip(reduces, sends, strict=True):
        assert finals[at][4 * 3072 :].max() == 0 and kept[at][: 4 * 3072].max() == 0
        whole = finals[at] | kept[at]
        # The job itself sent what the first direction lacks, as plain floats: the same bits.
        assert len(send.data) == 7712 and send.whole
        assert whole[4 * 3072 :].tobytes() == bytes(send.data)
        values = whole.view(np.float32)
        assert np.isfinite(values).all() and np.unique(values).size > 1000
    assert len({bytes(finals[at]) for at in reduces}) == 20
    # Parameters, shapes and DDP's rebuilt layout are on the wire, too.
    assert finals[1].view(np.int64)[:2].tolist() == [1, FLOATS]
    assert np.isfinite(finals[2].view(np.float32)).all() and finals[2].view(np.float32).std() > 0
    assert finals[4].view(np.int32).tolist() == [0, 1] and finals[5].view(np.int32).tolist() == [1]
    assert finals[0].view(np.int64).tolist() == kept[0].view(np.int64).tolist() == [1]


def test_one_partial_sum_is_not_the_final_value(job: dict[Flow, list[Message]]) -> None:
    partial, final = (_flow(RANK0, 0x453, job)[3].data, _flow(RANK1, 0x12E3, job)[2].data)
    assert len(partial) == len(final)
    a, b = (np.frombuffer(bytes(data), np.uint32).reshape(-1, 4)[:, ::2] for data in (partial, final))
    assert (a != b).mean() > 0.99


@pytest.mark.parametrize("version", ["2.20.5", "2.22.3", "2.26.2", "2.30.7"])
def test_another_release_contradicts_the_sizes(job: dict[Flow, list[Message]], version: str) -> None:
    reduce = Collective(ALLREDUCE, RING, LL, FLOATS, 4)
    calls = [*_start(FLOATS), reduce, *REBUILD, *[reduce] * 19]
    sent = _flow(RANK0, 0x453, job)
    (right,), (line,) = _planned(calls, 0), _planned(calls, 0, 1, version)
    assert _matches(right, sent)
    # 2.20 cuts this call as 2.19 does; later releases do not.
    assert _matches(line, sent) == (version == "2.20.5")


def test_cts_entries_announce_every_message(job: dict[Flow, list[Message]]) -> None:
    form = traits("2.19.4").cts
    data = [m for flow, sent in job.items() for m in sent if m.immediate is not None and flow[2] in (0x453, 0x12E3)]
    entries: dict[tuple[int, int], list[int]] = {}
    for (source, _, qp), sent in job.items():
        if qp not in (0x452, 0x12E2):
            continue
        first = sent[0].va
        for number, message in enumerate(sent):
            entry = bytes(message.data)
            assert len(entry) == form.entry and message.immediate is None
            assert message.va - first == number % form.slots * form.pitch
            address, = struct.unpack_from("<Q", entry, form.address)
            rkey, = struct.unpack_from("<I", entry, form.rkeys)
            index, = struct.unpack_from("<Q", entry, form.index)
            assert index == number + 1
            assert struct.unpack_from("<I", entry, form.size)[0] == schedule.SLOT_BYTES[LL]
            assert struct.unpack_from("<I", entry, form.requests)[0] == 1
            # Written by the receiver into the sender's memory: the tag is the sender's rank.
            assert struct.unpack_from("<I", entry, form.tag)[0] == (0 if source == RANK1 else 1)
            entries.setdefault((address, rkey), []).append(index)
    for at, message in enumerate(data):
        assert (message.va, message.rkey) in entries, at
    for key, indices in entries.items():
        used = [m for m in data if (m.va, m.rkey) == key]
        assert len(used) in (len(indices), len(indices) - 1)  # the last may be announced and not sent yet


def test_connection_blocks_name_the_queue_pairs(shared: Path, job: dict[Flow, list[Message]]) -> None:
    block = traits("2.19.4").block
    assert block is not None
    streams = tcp_streams(shared / "captures" / "nccl" / "iter_40000_p2p_iter10_2.pcapng")
    hello = struct.pack("<QI", 0x564AB9F2FC4B9D6C, 4)
    flows = {flow[2]: sent for flow, sent in job.items()}
    data_qps = set()
    for ends, stream in streams.items():
        if not stream.startswith(hello):
            continue
        # Hello, the sender's block, "ready"; the other way the receiver's block.
        assert len(stream) == len(hello) + block.size + 4 and stream[-4:] == struct.pack("<I", 1)
        sender, receiver = stream[len(hello) : -4], streams[ends[2:] + ends[:2]]
        assert len(receiver) == block.size
        qps = [struct.unpack_from("<I", one, block.qpn)[0] for one in (sender, receiver)]
        if qps[0] in flows:
            first = flows[qps[0]][0]  # the first CTS entry goes to the array that the sender named
            assert struct.unpack_from("<Q", sender, block.fifo_address)[0] == first.va
            assert struct.unpack_from("<I", sender, block.fifo_rkey)[0] == first.rkey
            assert first.immediate is None and len(first.data) == traits("2.19.4").cts.entry
        if qps[1] in flows:
            assert flows[qps[1]][0].immediate is not None
            data_qps.add(qps[1])
        assert sender[block.gid : block.gid + 2] == receiver[block.gid : block.gid + 2] == b"\xfe\x80"
    assert data_qps == {0x453, 0x12E3, 0x456}


@pytest.mark.parametrize(
    ("name", "rank0", "rank1"),
    [
        ("allreduce+p2p", (2102, 2104), (1821, 1824)),
        ("allreduce+partial_p2p_new", (2248, 2250), (2029, 2032)),
        ("rdma32", (907, 910), (713, 718)),  # adaptive routing: per-packet addresses, immediates apart
    ],
)
def test_two_of_four_channels_as_the_schedule_says(
    shared: Path, name: str, rank0: tuple[int, int], rank1: tuple[int, int]
) -> None:
    flows = messages(shared / "captures" / "nccl" / f"{name}.pcapng")
    call = Collective(ALLREDUCE, RING, LL, FLOATS, 4)
    (planned,) = plan(Communicator(traits("2.19.4"), 2, 4, 2), [call])
    assert planned.channels == (0, 1)  # 20,000 bytes are worth two channels
    other = "fe80::ac0:ebff:fe8c:282c"
    sent = {(0, c): _flow(RANK0, rank0[c], flows) for c in (0, 1)}
    sent |= {(1, c): _flow(other, rank1[c], flows) for c in (0, 1)}
    assert [[len(m.data) for m in sent[0, c]] for c in (0, 1)] == [[7232, 16384], [0, 16384]]
    assert [[len(m.data) for m in sent[1, c]] for c in (0, 1)] == [[16384, 7232], [16384, 0]]
    tensor: dict[int, np.ndarray] = {}
    lines = {position: _planned([call], position, 4) for position in (0, 1)}
    spans = []
    for (position, channel), list_ in sent.items():
        _place(lines[position][channel], list_, tensor, {0: 20000})
        spans.append(shown(planned.rows[channel], position))
    merged = np.concatenate(spans)
    merged = merged[np.argsort(merged[:, 0])]
    assert merged[0, 0] == 0 and merged[-1, 1] == 20000 and (merged[1:, 0] == merged[:-1, 1]).all()
    # Both ranks gave 0..9 again and again: every element, and its place, is known.
    assert (tensor[0].view(np.int32) == 2 * (np.arange(FLOATS) % 10)).all()


def test_a_hole_has_its_place_and_gives_no_value(shared: Path) -> None:
    path = shared / "captures" / "nccl" / "iter_80000.pcapng"
    psns = sorted({psn for _, flow, opcode, psn, _ in packets(path) if flow[2] == 0xC99 and 6 <= opcode <= 11})
    assert sorted(set(range(psns[-1] + 1)) - set(psns)) == list(range(62, 77))
    sent = _flow(RANK1, 0xC99, messages(path))
    calls = [*_start(10_000), Collective(ALLREDUCE, RING, LL, 10_000, 4)]
    (line,) = _planned(calls, 1)
    _, _, _, _, offset, length, final = schedule.place(line[2].row, 1, line[2].index)
    assert (line[2].at, final, offset, length) == (3, True, 5120 * 4, 4880 * 4) and not sent[2].whole
    held = {
        (psn - sent[2].first_psn) * 1024: rest[16:] if opcode in (6, 10) else rest[4:] if opcode == 9 else rest
        for _, flow, opcode, psn, rest in packets(path)
        if flow[2] == 0xC99 and 6 <= opcode <= 11 and psn >= sent[2].first_psn
    }
    out = np.full(length, 0xA5, np.uint8)
    known = np.zeros(length, bool)
    total = schedule.wire_bytes(LL, length, 2)
    assert total == 39040
    for begin, part in held.items():
        end = begin + len(part)
        wire = np.frombuffer(part, np.uint8).copy()
        assert payload.inner(LL, begin, end) == (begin, end)
        accepted = payload.decode(LL, address_of(wire), begin, end, address_of(out), length, payload.flag(LL, 2))
        assert accepted == len(part)
        known[unknown(LL, begin, end, length)] = True
    lost = unknown(LL, (62 - sent[2].first_psn) * 1024, (77 - sent[2].first_psn) * 1024, length)
    assert not known[lost].any() and (out[lost] == 0xA5).all() and lost.stop - lost.start == 15 * 512
    assert known[: lost.start].all() and known[lost.stop : max(held) // 2].all()


def test_larger_tensor_and_a_broadcast_of_two_chunks(shared: Path) -> None:
    sent = _flow(RANK0, 1300, messages(shared / "captures" / "nccl" / "iter_80000.pcapng"))
    (line,) = _planned([*_start(10_000), Collective(ALLREDUCE, RING, LL, 10_000, 4)], 0)
    lengths = [schedule.wire_bytes(LL, _length(one), one.step) for one in line]
    assert lengths == [16, 64, 65536, 14464, 39040, 40960]
    assert [len(m.data) for m in sent[:5]] == lengths[:5]
    assert len(sent[5].data) < 40960 and sent[5].immediate is None  # the capture ends inside the last message


def test_simple_of_send_and_receive_is_plain(job: dict[Flow, list[Message]]) -> None:
    data = np.frombuffer(bytes(_flow(RANK0, 0x456, job)[0].data), np.uint8).copy()
    out = np.zeros(data.size, np.uint8)
    assert payload.decode(SIMPLE, address_of(data), 0, data.size, address_of(out), data.size, 0) == data.size
    assert (out == data).all() and payload.formats(address_of(data), data.size, False) == 1 << SIMPLE
    assert data.size < schedule.P2P_SLOT
