"""`flowcheck inspect` on recorded NCCL traffic: the collectives of the specification's worked example, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tunnel_frames
from replay import block_of

from flowcheck.errors import UsageError
from flowcheck.inspect.nccl_flows import Connection, Flow, Piece
from flowcheck.inspect.nccl_line import Line
from flowcheck.inspect.nccl_read import Reading, Sizes, read
from flowcheck.inspect.report import Limits, Report, inspect
from flowcheck.inspect.table import WIDTH, table
from mirror.record import PcapRecorder
from reconstruct.nccl.blueprint import Blueprints
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.schedule import ALLGATHER, ALLREDUCE, LL, LL128, RING, SIMPLE, SLOT_BYTES
from reconstruct.nccl.split import Collective

Told = dict[str, Any]
FEW = Limits(flows=1 << 10, reorder=8 << 20)
TEN_AND_TEN = "iter_40000_p2p_iter10_2"
FINAL0, FINAL1 = [0, 12288], [12288, 20000]


def look(path: Path, **options: Any) -> tuple[Report, list[Told]]:
    with inspect([path], limits=FEW, **options) as report:
        return report, [json.loads(line) for line in report.lines()]


def capture(shared: Path, name: str) -> Path:
    return shared / "captures" / "nccl" / f"{name}.pcapng"


def collectives(found: list[Told]) -> list[Told]:
    return [line for line in found if line["type"] == "collective"]


@pytest.fixture(scope="module")
def job(shared: Path) -> tuple[Report, list[Told]]:
    return look(capture(shared, TEN_AND_TEN), dtype="fp32")


def test_every_collective_of_a_job(job: tuple[Report, list[Told]]) -> None:
    found = [line for line in collectives(job[1]) if line["kind"] != "sendrecv"]
    told = {line["ordinal"]: (line["kind"], line["bytes"]) for line in found}
    reduce = ("allreduce", 20000)
    assert told == dict(enumerate([
        ("allgather", 16), ("broadcast", 32), ("broadcast", 20000), reduce, ("broadcast", 8), ("broadcast", 8),
        *[reduce] * 19,
    ]))  # fmt: skip
    assert {(line["library"], line["algorithm"], line["protocol"], line["channel"]) for line in found} == {
        ("nccl", "ring", "ll", 0)}
    for line in found:
        known = line["kind"] == "allreduce"
        assert (line["elements"], line["dtype"]) == ((5000, "float32") if known else (None, None))
        assert known or line["sender_rank"] == 0 or line["kind"] == "allgather"


def test_final_values_are_the_jobs_own(job: tuple[Report, list[Told]]) -> None:
    """After each all-reduce the job sent the chunk that rank 0's messages lack, as plain floats."""
    found = collectives(job[1])
    reduces = [line for line in found if line["kind"] == "allreduce"]
    sends = [line for line in found if line["kind"] == "sendrecv"]
    sent = [(line["sender_rank"], line["ordinal"], line["bytes"]) for line in sends]
    assert sent == [(0, number, 7712) for number in range(20)]
    first = [line for line in reduces if line["sender_rank"] == 0]
    second = [line for line in reduces if line["sender_rank"] == 1]
    assert [[part[:2] for part in line["final"]] for line in first] == [[FINAL0]] * 20
    assert [[part[:2] for part in line["final"]] for line in second] == [[FINAL1]] * 20
    assert [line["final"][0][2] for line in second] == [line["final"][0][2] for line in sends]
    assert len({line["final"][0][2] for line in first}) == 20


def test_the_table_tells_it_at_a_glance(job: tuple[Report, list[Told]]) -> None:
    text = table(job[0])
    for word in ("nccl data", "nccl cts", "nccl set-up", "20 x 20000 B", "20 x 7712 B", "NCCL 2.19, 2 ranks",
                 "at most 20", "25 collectives read from 2 connections"):
        assert word in " ".join(text.split()), text
    assert text.isascii() and max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("version", ["2.19", "2.19.4", None])
def test_a_hint_that_agrees_changes_nothing(shared: Path, version: str | None) -> None:
    found = collectives(look(capture(shared, "allreduce+p2p"), version=version, dtype="fp32")[1])
    reduce = [line for line in found if line["kind"] == "allreduce"]
    assert sorted((line["channel"], line["sender_rank"]) for line in reduce) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    at = 0
    for first, last, _ in sorted(part for line in reduce for part in line["final"]):
        assert first == at
        at = last
    assert at == 20000


@pytest.mark.parametrize("version", ["2.18.6", "2.20.5", "2.28.9"])
def test_a_hint_that_contradicts_is_an_error_that_shows_both(shared: Path, version: str) -> None:
    with pytest.raises(UsageError, match=rf"NCCL {version}, the set-up in the capture is that of 2\.19"):
        look(capture(shared, "allreduce+p2p"), version=version)
    if version != "2.18.6":
        with pytest.raises(UsageError, match=f"NCCL {version}, whose CTS entries have 64 bytes"):
            look(capture(shared, "rdma32"), version=version)


def test_an_unknown_release_claims_nothing(shared: Path) -> None:
    report, found = look(capture(shared, "rdma32"))
    assert not collectives(found)
    assert "NCCL of unknown release: no collective is claimed" in table(report) and "--nccl-version" in table(report)
    # The user knows it. Every packet of these has its own address, immediates come apart.
    found = collectives(look(capture(shared, "rdma32"), version="2.19.4")[1])
    reduce = [line for line in found if line["kind"] == "allreduce"]
    assert {line["bytes"] for line in reduce} == {20000} and len(reduce) == 4


def test_one_direction_claims_nothing_and_says_so(shared: Path) -> None:
    report, found = look(capture(shared, "iter_40000_p2p_iter10"), version="2.19.4")
    assert not collectives(found) and "not the entries that announce them" in table(report)


def test_no_value_from_a_hole(shared: Path) -> None:
    """Rank 1's final chunk lacks 15 packets and its end; the capture ends in rank 0's."""
    found = collectives(look(capture(shared, "iter_80000"))[1])
    assert [(line["kind"], line["bytes"]) for line in found if line["sender_rank"] == 0] == [
        ("allgather", 16), ("broadcast", 32), ("broadcast", 40000), ("allreduce", 40000)]
    zero, one = [line["final"] for line in found if line["kind"] == "allreduce"]
    assert [part[:2] for part in zero] == [[0, 28 * 512]]
    start = 5120 * 4
    assert [part[:2] for part in one] == [[start, start + 21 * 512], [start + 36 * 512, start + 37 * 512]]


@pytest.mark.parametrize("wrapping", ["vlan 0", "erspan2", "erspan3", "vxlan"])
def test_wrapped_captures_give_the_same(shared: Path, tmp_path: Path, wrapping: str) -> None:
    path = capture(shared, "iter_80000")
    frames = [(ts, tunnel_frames.WRAPPINGS[wrapping](data)) for ts, data in tunnel_frames.frames_of(path)]
    recorder = PcapRecorder(tmp_path / "wrapped.pcap")
    recorder.write(block_of(frames))
    recorder.close()
    assert collectives(look(tmp_path / "wrapped.pcap")[1]) == collectives(look(path)[1])


# Made-up connections of two ranks


def pair(lengths: tuple[list[int], list[int]], room: int = SLOT_BYTES[LL],
         bytes_of: dict[int, dict[str, Any]] | None = None) -> Reading:
    """What is read of messages from rank 0 and from rank 1, captured in turn."""
    group = NcclGroup(
        name="two", world_size=2, version="2.19.4", addresses=(("a",), ("b",)), nodes=(0, 1), channels=1,
        rings=((0, 1),), algorithms=(RING,), protocols=(LL, LL128, SIMPLE), tree_pattern=0, search_channels=0,
        chains=(), heads=(), nvls_channels=0,
    )  # fmt: skip
    lines = []
    for edge in edges(group):
        flow = Flow((0, "ab"[edge.sender], "ab"[edge.receiver], 1 + edge.sender))
        number = 0
        for index, length in enumerate(lengths[edge.sender]):
            steps = 2 if room == SLOT_BYTES[SIMPLE] else 1
            flow.pieces.append(piece(index, length, room=room, psn=number, va=index * steps % 8 * room,
                                     **(bytes_of or {}).get(length, {})))
            number += max(1, -(-length // 4096))
        lines.append(Line(edge, Connection([flow], edge.sender, {room}, set()), False, True))
    return read(group, lines, Sizes())


def piece(number: int, length: int, **fields: Any) -> Piece:
    time = 1000 * number
    return Piece(**{"psn": number, "length": length, "va": -1, "rkey": 1, "imm": length, "begin": time, "end": time + 1,
                    "data": None, "known": None, **fields})


@pytest.mark.parametrize(("protocol", "size"), [(LL, 2048), (LL128, None)])
def test_the_announced_room_tells_the_protocol(protocol: int, size: int | None) -> None:
    """LL128 hides up to 1919 bytes of a block. The last messages may be the beginning of an all-reduce."""
    (found,) = pair(([2048, 6144], [2048, 6144]), SLOT_BYTES[protocol]).collectives
    assert (found.kind, found.protocol, found.size) == (ALLGATHER, protocol, size)


def test_what_may_be_cut_off_or_a_trees_sums_is_no_broadcast() -> None:
    whole = pair(([15424, 24576], [24576, 15424]))
    assert [(one.kind, one.size) for one in whole.collectives] == [(ALLREDUCE, 20000)]
    for cut in (([15424], []), ([15424], [24576]), ([], [64])):
        reading = pair(cut)
        assert not reading.collectives and reading.left == len(cut[0]) + len(cut[1])
        assert "of broadcasts or of an all-reduce" in reading.reason or "allow several" in reading.reason


def fitting(**changes: Any) -> bool:
    """Whether messages 0, 1, 2 and 5 of an all-reduce of six, of one packet each, agree with its plan."""
    group = NcclGroup(
        name="four", world_size=4, version="2.19.4", addresses=(("a",), ("b",), ("c",), ("d",)), nodes=(0, 1, 2, 3),
        channels=1, rings=((0, 1, 2, 3),), algorithms=(RING,), protocols=(LL,), tree_pattern=0, search_channels=0,
        chains=(), heads=(), nvls_channels=0,
    )  # fmt: skip
    edge = edges(group)[0]
    blueprint = Blueprints(group).get(Collective(ALLREDUCE, RING, LL, 512, 4))
    assert blueprint is not None
    part = blueprint.part(edge)
    assert part is not None and part.messages == 6
    flow = Flow((0, "a", "b", 1), mtu=4096)
    for number in (0, 1, 2, 5):
        given = {"psn": number, "va": number * 65536, "imm": part.wires[number], "room": 65536}
        given |= changes if number == 5 else {}
        flow.pieces.append(piece(number, given.pop("length", part.wires[number]), **given))
    line = Line(edge, Connection([flow], 0, {65536}, set()), False, True)
    fit = line.fit(part, LL)
    assert fit is None or (fit.whole == (flow.pieces[-1].psn >= 5) and fit.seen >= 3)
    return fit is not None


def test_behind_a_gap_packets_and_slots_must_be_those_of_the_plan() -> None:
    assert fitting()
    assert not fitting(length=999)
    assert not fitting(imm=999)
    assert not fitting(va=4 * 65536)
    assert not fitting(room=614400)


def test_wrong_flags_end_the_reading() -> None:
    zeros = {length: {"data": np.zeros(length, np.uint8), "known": np.ones(length, bool)} for length in (15424, 24576)}
    reading = pair(([15424, 24576], [24576, 15424]), bytes_of=zeros)
    assert not reading.collectives and "a flag is not that of step" in reading.reason


def test_a_write_that_is_not_whole_ends_a_list_with_immediates_apart() -> None:
    flow = Flow((0, "a", "b", 1))
    flow.pieces = [
        piece(0, 1024, imm=None, psn=0), piece(1, 0, psn=1), piece(2, 1024, imm=None, psn=2, complete=False),
        piece(3, 0, psn=3),
    ]  # fmt: skip
    line = Line(Edge(0, 0, 1, True, 0, -1, -1), Connection([flow], 0, set(), set()), False, True)
    assert line.ahead() == (1024,) and line.doubt
