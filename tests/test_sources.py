"""Capture files as a source, against known truth and after damage; recording and reading again."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing_disk import failing_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import FlowcheckError, UsageError
from mirror.block import Block, Source, pack
from mirror.capfile import CaptureFileSource
from mirror.record import SNAPLEN, PcapRecorder

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Frame:
    ts: int
    data: bytes
    wirelen: int
    linktype: int = 1
    vantage: int = 0


def frames_of(block: Block) -> list[Frame]:
    """The frames of a block as bytes, each checked to lie inside the base buffer."""
    n = len(block)
    for column in (block.offset, block.caplen, block.wirelen, block.ts, block.vlan):
        assert column.dtype == np.int64
        assert column.shape == (n,)
    assert block.base.dtype == np.uint8
    assert (block.offset >= 0).all()
    assert (block.caplen >= 0).all()
    assert (block.offset + block.caplen <= block.base.size).all()
    assert (block.caplen <= block.wirelen).all()
    return [
        Frame(int(t), block.base[o : o + c].tobytes(), int(w), block.linktype, block.vantage)
        for o, c, w, t in zip(block.offset, block.caplen, block.wirelen, block.ts, strict=True)
    ]


def read_blocks(source: Source) -> list[list[Frame]]:
    blocks = []
    while (block := source.read(0)) is not None:
        blocks.append(frames_of(block))
        source.release(block)
    assert source.finished
    frames = [frame for block in blocks for frame in block]
    counters = source.counters()
    assert (counters.packets, counters.bytes) == (len(frames), sum(frame.wirelen for frame in frames))
    return blocks


def read_files(paths: list[Path], **options: Any) -> tuple[list[Frame], list[str]]:
    source = CaptureFileSource(paths, **options)
    frames = [frame for block in read_blocks(source) for frame in block]
    problems = list(source.problems)
    source.close()
    assert source.finished
    assert source.read(0) is None
    return frames, problems


def pcap_bytes(frames: list[Frame], *, order: str = "<", nano: bool = True, linktype: int = 1) -> bytes:
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    out = [struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 65535, linktype)]
    for frame in frames:
        second, rest = divmod(frame.ts, 10**9)
        fraction = rest if nano else rest // 1000
        out.append(struct.pack(order + "IIII", second, fraction, len(frame.data), frame.wirelen) + frame.data)
    return b"".join(out)


def pcapng_block(order: str, kind: int, body: bytes) -> bytes:
    body += b"\0" * (-len(body) % 4)
    length = struct.pack(order + "I", 12 + len(body))
    return struct.pack(order + "I", kind) + length + body + length


def section(order: str) -> bytes:
    return pcapng_block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))


def interface(order: str, linktype: int, *options: tuple[int, bytes], snaplen: int = 0) -> bytes:
    body = struct.pack(order + "HHI", linktype, 0, snaplen)
    for code, value in options:
        body += struct.pack(order + "HH", code, len(value)) + value + b"\0" * (-len(value) % 4)
    return pcapng_block(order, 1, body)


def enhanced(order: str, index: int, units: int, data: bytes, wirelen: int) -> bytes:
    header = struct.pack(order + "IIIII", index, units >> 32, units & 0xFFFFFFFF, len(data), wirelen)
    return pcapng_block(order, 6, header + data + b"\0" * (-len(data) % 4) + struct.pack(order + "HH", 0, 0))


def some_frames(count: int, *, start: int = 1_700_000_000 * 10**9, step: int = 1001) -> list[Frame]:
    return [
        Frame(start + i * step, bytes([i & 0xFF]) * (20 + i % 41), 20 + i % 41 + i % 3) for i in range(count)
    ]


# ---- recorded captures ----


def test_every_recorded_capture_agrees_with_tshark(shared: Path) -> None:
    expected = json.loads((shared / "captures" / "EXPECTED.json").read_text())
    assert len(expected) > 25
    for name, truth in expected.items():
        frames, problems = read_files([shared / "captures" / name])
        assert not problems, name
        assert len(frames) == truth["packets"], name
        assert max(frame.wirelen for frame in frames) == truth["max_len"], name
        assert sum(len(frame.data) < frame.wirelen for frame in frames) == truth["truncated"], name


def test_bytes_times_and_lengths_agree_with_scapy(shared: Path) -> None:
    from scapy.utils import RawPcapNgReader, RawPcapReader

    compared = 0
    for folder in ("files", "tunnels", "gloo", "nccl"):
        for path in sorted((shared / "captures" / folder).glob("*.pcap*")):
            frames, _ = read_files([path])
            with RawPcapReader(str(path)) as reader:
                if isinstance(reader, RawPcapNgReader):
                    truth = [
                        (((m.tshigh << 32) + m.tslow) * 10**9 // m.tsresol, data, m.wirelen, m.linktype)
                        for data, m in reader
                    ]
                else:
                    unit = 1 if reader.nano else 1000
                    truth = [
                        (m.sec * 10**9 + m.usec * unit, data, m.wirelen, reader.linktype)
                        for data, m in reader
                    ]
            assert [(f.ts, f.data, f.wirelen, f.linktype) for f in frames] == truth, path
            compared += len(truth)
    assert compared > 5000


def test_nanoseconds_of_a_big_endian_file(shared: Path) -> None:
    frames, _ = read_files([shared / "captures/files/pcap_nanosec_bigendian_pcapplusplus.pcap"])
    assert any(frame.ts % 1000 for frame in frames)
    assert 10**18 < frames[0].ts < 2 * 10**18


def test_link_types_of_one_file_come_in_different_blocks(shared: Path) -> None:
    path = shared / "captures/files/pcapng_many_interfaces_pcapplusplus.pcapng"
    blocks = read_blocks(CaptureFileSource([path]))
    assert len(blocks) == 3
    assert {frame.linktype for block in blocks for frame in block} == {0, 1}
    for block in blocks:
        assert len({frame.linktype for frame in block}) == 1


# ---- formats, written here ----


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nano", [False, True])
def test_pcap_of_each_byte_order_and_precision(tmp_path: Path, order: str, nano: bool) -> None:
    frames = some_frames(50)
    path = tmp_path / "a.pcap"
    path.write_bytes(pcap_bytes(frames, order=order, nano=nano))
    got, problems = read_files([path])
    assert not problems
    if not nano:
        frames = [Frame(f.ts // 1000 * 1000, f.data, f.wirelen) for f in frames]
    assert got == frames


def test_link_type_field_with_frame_check_sequence_bits_and_synonyms(tmp_path: Path) -> None:
    for field, linktype in ((0x54000001, 1), (12, 101), (228, 101), (108, 0), (113, 113), (276, 276)):
        path = tmp_path / "a.pcap"
        path.write_bytes(pcap_bytes(some_frames(1), linktype=field))
        assert read_files([path])[0][0].linktype == linktype


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng_sections_interfaces_and_packet_blocks(tmp_path: Path, order: str) -> None:
    other = ">" if order == "<" else "<"
    second = 1_700_000_000
    offset = struct.pack(order + "q", second)
    parts = [
        section(order),
        interface(order, 1),  # microseconds when it does not say
        interface(order, 101, (2, b"eth0"), (9, b"\x09")),
        interface(order, 1, (9, b"\x94"), (14, offset)),  # 2**-20 s, counted from an offset
        interface(order, 1, (9, b"\xbe")),  # 2**-62 s: beyond what 64 bits can hold of a date
        interface(order, 1, (9, b"\x0c"), (14, offset)),  # picoseconds
        pcapng_block(order, 0x0BAD, b"unknown block"),
        enhanced(order, 0, second * 10**6 + 7, b"a" * 5, 9),
        enhanced(order, 1, second * 10**9 + 7, b"b" * 6, 6),
        enhanced(order, 2, 3 << 19, b"c" * 7, 7),
        enhanced(order, 3, 1 << 61, b"d", 1),
        enhanced(order, 4, 1234567, b"e", 1),
        pcapng_block(order, 2, struct.pack(order + "HHIIII", 1, 0xFFFF, 0, 99, 2, 4) + b"ff"),  # obsolete
        section(other),
        interface(other, 1, snaplen=5),
        enhanced(other, 0, second * 10**6, b"g" * 4, 4),
        pcapng_block(other, 3, struct.pack(other + "I", 900) + b"h" * 5),  # simple: cut at the snap length
        pcapng_block(other, 3, struct.pack(other + "I", 3) + b"iii"),
    ]
    path = tmp_path / "a.pcapng"
    path.write_bytes(b"".join(parts))
    frames, problems = read_files([path])
    assert not problems
    ns = second * 10**9
    assert frames == [
        Frame(ns + 7000, b"aaaaa", 9),
        Frame(ns + 7, b"bbbbbb", 6, 101),
        Frame(ns + 1_500_000_000, b"ccccccc", 7),
        Frame(500_000_000, b"d", 1),
        Frame(ns + 1234, b"e", 1),
        Frame(99, b"ff", 4, 101),
        Frame(ns, b"gggg", 4),
        Frame(ns, b"hhhhh", 900),
        Frame(ns, b"iii", 3),
    ]


def test_damage_is_named_by_file_and_byte_and_ends_only_that_file(tmp_path: Path) -> None:
    frames = some_frames(10)
    whole, cut, bad = tmp_path / "whole.pcap", tmp_path / "cut.pcap", tmp_path / "bad.pcap"
    data = pcap_bytes(frames)
    last = len(data) - 16 - len(frames[-1].data)
    whole.write_bytes(data)
    cut.write_bytes(data[:-1])
    bad.write_bytes(data[:last] + struct.pack("<IIII", 0, 0, 1 << 31, 5) + b"x" * 40)
    got, problems = read_files([whole, cut, bad])
    assert len(got) == 28
    assert problems == [
        f"{cut}: the record at byte {last} runs past the end of the file: stopped after 9 frames",
        f"{bad}: the record at byte {last} has an impossible length: stopped after 9 frames",
    ]


def test_damage_in_pcapng_is_named(tmp_path: Path) -> None:
    head = section("<") + interface("<", 1)
    good = enhanced("<", 0, 5, b"abcd", 4)
    trailer = bytearray(good)
    trailer[-4] ^= 4
    cases = {
        "has two lengths that differ": bytes(trailer),
        "names an interface that the file does not describe": enhanced("<", 1, 5, b"abcd", 4),
        "has an impossible time": enhanced("<", 0, 1 << 63, b"abcd", 4),
        "has an impossible length": struct.pack("<III", 6, 13, 0),
        "runs past the end of the file": good[:-4],
        "has no byte order mark": pcapng_block("<", 0x0A0D0D0A, b"\0" * 16),
        "is of version 9": pcapng_block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 9, 0, -1)),
        "resolution or offset": interface("<", 1, (9, b"\x7f")),
        "option longer than itself": pcapng_block("<", 1, struct.pack("<HHIHH", 1, 0, 0, 2, 5000)),
    }
    for text, block in cases.items():
        path = tmp_path / "a.pcapng"
        path.write_bytes(head + good + block)
        frames, problems = read_files([path])
        assert frames == [Frame(5000, b"abcd", 4)], text
        assert len(problems) == 1
        assert text in problems[0]
        assert f"{path}: " in problems[0]
        assert f"at byte {len(head + good)} " in problems[0]


def test_what_is_no_capture_file_is_refused_by_name(tmp_path: Path) -> None:
    def refused(content: bytes | None, text: str) -> None:
        path = tmp_path / "x.pcap"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(FlowcheckError) as caught:
            CaptureFileSource([path])
        assert str(path) in str(caught.value)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)

    refused(None, "No such file")
    refused(b"", "is empty")
    refused(b"hello, this is text", "is no capture file")
    refused(b"\xd4\xc3", "is no capture file")
    refused(gzip.compress(pcap_bytes(some_frames(3))), "compressed with gzip: decompress it first")
    refused(b"\x28\xb5\x2f\xfd0000", "compressed with zstd")
    refused(pcap_bytes([])[:20], "ends inside its own header")
    refused(b"\xd4\xc3\xb2\xa1\x07" + b"\0" * 30, "version 7")
    with pytest.raises(FlowcheckError, match="not a regular file"):
        CaptureFileSource([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FlowcheckError, match="not a regular file"):
        CaptureFileSource([tmp_path / "pipe"])
    with pytest.raises(UsageError):
        CaptureFileSource([])


def test_a_file_that_shrinks_while_it_is_read_stops_and_does_not_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    frames = some_frames(100_000)
    path.write_bytes(pcap_bytes(frames))
    source = CaptureFileSource([path])
    block = source.read(0)
    assert block is not None
    os.truncate(path, 3_000_000)
    got = frames_of(block)
    while (block := source.read(0)) is not None:
        got += frames_of(block)
    assert source.finished
    assert 30_000 < len(got) < 60_000 and got == frames[: len(got)]
    (problem,) = source.problems
    assert problem == (
        f"{path}: it became shorter while it was read and ends at byte 3000000 now: stopped after {len(got)} frames"
    )


def test_a_disk_that_fails_ends_the_file_with_its_name_and_byte_and_not_the_process(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    frames = [Frame(i, bytes([i & 0xFF]) * 1000, 1000) for i in range(12_000)]
    healthy = tmp_path / "healthy.pcap"
    healthy.write_bytes(pcap_bytes(frames[:50]))
    with failing_disk(tmp_path_factory.mktemp("failing"), 32) as disk:
        if isinstance(disk, str):
            pytest.skip(disk)
        path = disk.path / "a.pcap"
        path.write_bytes(pcap_bytes(frames))
        os.sync()
        source = CaptureFileSource([path, healthy])
        block = source.read(0)
        assert block is not None
        first = frames_of(block)
        disk.forget()
        disk("eio-read")
        with pytest.raises(FlowcheckError, match=f"cannot read {path}: byte 0 cannot be read, .*Input/output error"):
            CaptureFileSource([path])
        got = [*first, *(frame for block in read_on(source) for frame in frames_of(block))]
        disk("ok")
    (problem,) = source.problems
    match = re.fullmatch(
        rf"{path}: byte (\d+) cannot be read, check its disk: Input/output error: stopped after (\d+) frames", problem
    )
    assert match is not None, problem
    byte, count = map(int, match.groups())
    # All that was read before it, the other file whole, and nothing else.
    assert 1_000 < count < 12_000 and 0 <= byte - (24 + 1016 * count) < 1016
    assert sorted(got, key=lambda frame: frame.ts) == sorted([*frames[:count], *frames[:50]], key=lambda f: f.ts)


def read_on(source: Source) -> Iterator[Block]:
    while (block := source.read(0)) is not None:
        yield block


@pytest.mark.parametrize("kind", ["whole", "cut", "trailer", "packet", "section"])
def test_a_pcapng_block_larger_than_any_frame_is_passed_over_unread(kind: str, tmp_path: Path) -> None:
    """4 GiB less 4 bytes, most of them a hole of the file."""
    total = (1 << 32) - 4
    head = section("<") + interface("<", 1) + enhanced("<", 0, 5, b"abcd", 4)
    number = {"packet": 6, "section": 0x0A0D0D0A}.get(kind, 0x0BAD)
    with open(tmp_path / "a.pcapng", "wb") as file:
        file.write(head + struct.pack("<II", number, total))
        if kind == "section":
            file.write(struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1))
        file.seek(len(head) + total - 4)
        file.write(struct.pack("<I", total - 4 * (kind == "trailer")))
        if kind != "cut":
            file.write(enhanced("<", 0, 6, b"efgh", 4))
        else:
            file.truncate(len(head) + total - 4)
    before = anonymous()
    frames, problems = read_files([tmp_path / "a.pcapng"])
    assert anonymous() - before < 64 << 20
    first, second = Frame(5000, b"abcd", 4), Frame(6000, b"efgh", 4)
    place = "section header" if kind == "section" else "record"
    said = {
        "cut": "runs past the end of the file", "trailer": "has two lengths that differ",
        "packet": "has an impossible length", "section": "has an impossible length",
    }  # fmt: skip
    if kind == "whole":
        assert (frames, problems) == ([first, second], [])
    else:
        assert frames == [first]
        assert f"the {place} at byte {len(head)} {said[kind]}" in problems[0]


def test_frames_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    """The largest ones that are believed, at every place relative to the portions; of many files, which share them."""
    frames = [Frame(i, bytes([i]) * size, size) for i, size in enumerate([3, 16 << 20, 5 << 20, 7, (16 << 20) - 9])]
    plain, blocks = tmp_path / "a.pcap", tmp_path / "a.pcapng"
    plain.write_bytes(pcap_bytes(frames))
    assert read_files([plain]) == (frames, [])
    blocks.write_bytes(
        section("<") + interface("<", 1, (9, b"\x09"))
        + b"".join(enhanced("<", 0, frame.ts, frame.data, frame.wirelen) for frame in frames)
    )  # fmt: skip
    assert read_files([blocks]) == (frames, [])


def corrupt(data: bytes, edits: list[tuple[int, int]], length: int) -> tuple[bytes, int]:
    """Bytes with edits and cut to length, and the first offset at which they differ from the original."""
    out = bytearray(data)
    for at, value in edits:
        out[at % len(out)] = value
    out = out[: len(data) - length % len(data)] if length else out
    differs = next((i for i, (a, b) in enumerate(zip(out, data, strict=False)) if a != b), len(out))
    return bytes(out), differs


def _small_pcapng() -> bytes:
    frames = some_frames(12)
    parts = [section("<"), interface("<", 1, (9, b"\x09"))]
    parts += [enhanced("<", 0, frame.ts, frame.data, frame.wirelen) for frame in frames]
    return b"".join([*parts, section(">"), interface(">", 1), enhanced(">", 0, 1 << 50, b"last", 4)])


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["pcap", "pcapng"]),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
    length=st.one_of(st.just(0), st.integers(0, 10**6)),
)
def test_corrupted_files_never_crash_and_keep_what_lies_before(
    kind: str, edits: list[tuple[int, int]], length: int
) -> None:
    whole = pcap_bytes(some_frames(12)) if kind == "pcap" else _small_pcapng()
    data, differs = corrupt(whole, edits, length)
    with tempfile.TemporaryDirectory() as folder:
        good, bad = Path(folder, "good"), Path(folder, "bad")
        good.write_bytes(whole)
        bad.write_bytes(data)
        truth, problems = read_files([good])
        assert not problems
        try:
            frames, problems = read_files([bad])
        except FlowcheckError as error:
            assert "\n" not in str(error)
            assert differs < 24 or len(data) < 24
            return
    # Every frame takes its bytes and at least its header from the file: no frame is made up or read twice.
    assert sum(len(frame.data) + 16 for frame in frames) <= len(data) + 12
    assert len(problems) <= 1
    # Records that end before the first damaged byte are unharmed, unless the damage is in the file's header.
    if differs >= (24 if kind == "pcap" else 64):
        position, intact = (24, 16) if kind == "pcap" else (28 + 32, 36)
        for i, frame in enumerate(truth):
            position += intact + len(frame.data) + (-len(frame.data) % 4 if kind == "pcapng" else 0)
            if position > differs or frame.data == b"last":
                break
            assert frames[i] == frame


# ---- several files ----


@settings(max_examples=50, deadline=None)
@given(
    owners=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=200),
    vantages=st.sampled_from([[0, 0, 0], [0, 1, 1], [4, 5, 6]]),
)
def test_files_are_merged_by_time(owners: list[tuple[int, int]], vantages: list[int]) -> None:
    files: list[list[Frame]] = [[], [], []]
    ts = 10**18
    for i, (owner, step) in enumerate(owners):
        ts += step  # equal times included: they keep the order of the files
        files[owner].append(Frame(ts, i.to_bytes(4, "big"), 4, 1, vantages[owner]))
    # Python's sort is stable, so equal times stay in the order of the files.
    truth = sorted([frame for frames in files for frame in frames], key=lambda frame: frame.ts)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(i)) for i in range(3)]
        for path, frames in zip(paths, files, strict=True):
            path.write_bytes(pcap_bytes(frames))
        blocks = read_blocks(CaptureFileSource(paths, vantage=vantages))
    assert [frame for block in blocks for frame in block] == truth
    for block in blocks:
        assert len({frame.vantage for frame in block}) == 1


def test_a_merge_larger_than_the_lookahead_stays_in_order_and_in_few_blocks(tmp_path: Path) -> None:
    every = some_frames(60000, step=7)
    shares = [every[i::3] for i in range(3)]  # fully interleaved
    paths = [tmp_path / str(i) for i in range(3)]
    for path, frames in zip(paths, shares, strict=True):
        path.write_bytes(pcap_bytes(frames, order=">"))
    blocks = read_blocks(CaptureFileSource(paths))
    assert [frame for block in blocks for frame in block] == every
    # Python runs per block: interleaving must not make blocks of single frames.
    assert len(blocks) <= 20


def test_python_calls_per_frame_of_reading_and_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(pcap_bytes(some_frames(40000)))

    def work() -> None:
        source = CaptureFileSource([path])
        with PcapRecorder(tmp_path / "b.pcap") as recorder:
            while (block := source.read(0)) is not None:
                recorder.write(block)
                source.release(block)

    work()  # compiled now
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    assert (tmp_path / "b.pcap").stat().st_size == path.stat().st_size
    assert calls < 40000 / 1000 * 20, f"{calls} Python calls for 40,000 frames"


def test_blocks_stay_valid_after_close(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(pcap_bytes(some_frames(5)))
    source = CaptureFileSource([path])
    block = source.read(0)
    assert block is not None
    source.close()
    assert frames_of(block) == some_frames(5)


def anonymous() -> int:
    """Bytes of memory that this process holds and that are no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def test_memory_behind_the_blocks_in_use_is_given_back(tmp_path: Path) -> None:
    """It stays bounded while a file of 300 MiB is read, and a block that is held stays whole."""
    path = tmp_path / "big.pcap"
    body = bytes(range(256)) * 256
    with open(path, "wb") as file:
        file.write(pcap_bytes([]))
        for i in range(4800):
            file.write(struct.pack("<IIII", i, 0, len(body), len(body)) + body)

    def right(block: Block) -> bool:
        spans = zip(block.offset.tolist(), block.caplen.tolist(), strict=True)
        return all(block.base[o : o + c].tobytes() == body for o, c in spans)

    source = CaptureFileSource([path])
    before = anonymous()
    most = frames = 0
    held: list[Block] = []
    for number, block in enumerate(read_on(source)):
        assert right(block)
        frames += len(block)
        most = max(most, anonymous() - before)
        if 10 <= number < 20:
            held.append(block)
        else:
            source.release(block)
        if number == 30:
            assert all(right(one) for one in held)
            for one in reversed(held):  # in any order
                source.release(one)
    assert frames == 4800
    assert 1 << 20 < most < 64 << 20
    assert anonymous() - before < 16 << 20
    path.unlink()


# ---- recording ----


def block_of(
    frames: list[bytes], *, vlan: list[int] | None = None, ts: int = 10**18, linktype: int = 1
) -> Block:
    block = pack(frames, [ts + 999_999_999 * at for at in range(len(frames))])
    tags = np.array(vlan if vlan is not None else [-1] * len(frames), np.int64)
    return replace(block, wirelen=block.caplen + 4 * (tags >= 0), vlan=tags, linktype=linktype)


def test_recorded_captures_read_back_equal(shared: Path, tmp_path: Path) -> None:
    for name in ("tcp/bigtcp_ipv4_80k_len0_tcpdump.pcap", "tcp/tcp_truncated_snaplen_1MB_zeek.pcap",
                 "tcp/tcp_ooo_1.7MB_suricata.pcap", "files/tso_iplen0_http_zeek_krb.pcapng",
                 "roce/c4b_loss_after_tap_1024.pcap"):  # fmt: skip
        path = shared / "captures" / name
        with PcapRecorder(tmp_path / "again.pcap") as recorder:
            source = CaptureFileSource([path])
            while (block := source.read(0)) is not None:
                recorder.write(block)
        assert read_files([tmp_path / "again.pcap"]) == read_files([path])
        assert recorder.frames == len(read_files([path])[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=200), st.one_of(st.just(-1), st.integers(0, 2**32 - 1)))))
def test_moved_tags_are_put_back(frames: list[tuple[bytes, int]]) -> None:
    block = block_of([data for data, _ in frames], vlan=[tag for _, tag in frames])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.pcap")
        with PcapRecorder(path) as recorder:
            recorder.write(block)
        got, problems = read_files([path])
    assert not problems
    for i, (data, tag) in enumerate(frames):
        if tag >= 0 and len(data) >= 12:
            data = data[:12] + tag.to_bytes(4, "big") + data[12:]
        assert got[i].data == data
        assert got[i].wirelen == block.wirelen[i]
        assert got[i].ts == block.ts[i]


def test_recording_more_than_the_buffer_and_longer_than_the_snap_length(tmp_path: Path) -> None:
    frames = [os.urandom(length) for length in [65549] * 150 + [SNAPLEN, SNAPLEN + 1, 600_000]]
    tags = [-1] * 150 + [-1, -1, 0x81000005]
    with PcapRecorder(tmp_path / "a.pcap") as recorder:
        recorder.write(block_of(frames, vlan=tags))
    got, problems = read_files([tmp_path / "a.pcap"])
    assert not problems
    assert [f.data for f in got[:151]] == frames[:151]
    assert got[151].data == frames[151][:SNAPLEN]
    assert got[151].wirelen == SNAPLEN + 1
    assert got[152].data == (frames[152][:12] + b"\x81\x00\x00\x05" + frames[152][12:])[:SNAPLEN]
    assert got[152].wirelen == 600_004


def test_recorder_errors_and_empty_recording(tmp_path: Path) -> None:
    with pytest.raises(FlowcheckError, match="cannot write"):
        PcapRecorder(tmp_path / "no" / "a.pcap")
    recorder = PcapRecorder("/dev/full")
    recorder.write(block_of([b"x" * 20]))
    with pytest.raises(FlowcheckError, match="No space left"):
        recorder.close()
    recorder.close()
    with PcapRecorder(tmp_path / "a.pcap") as recorder:
        recorder.write(block_of([b"x" * 20], linktype=101))
        with pytest.raises(FlowcheckError, match="link type 101"):
            recorder.write(block_of([b"x" * 20]))
    assert [frame.linktype for frame in read_files([tmp_path / "a.pcap"])[0]] == [101]
    PcapRecorder(tmp_path / "empty.pcap").close()
    assert read_files([tmp_path / "empty.pcap"]) == ([], [])
