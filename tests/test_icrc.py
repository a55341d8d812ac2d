"""The invariant CRC of RoCE: the CRC itself on every path, what is refused for it, and why bytes are missing then."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mirrors import injured
from roce_frames import MIDDLE, ONLY, Sender, Wire, ack, roce_frame
from tcp_frames import MS, flipped
from test_redundancy import Nccl
from tunnel_frames import erspan2, vxlan

from mirror.loss import DAMAGED, Evidence, Why
from mirror.roce import QueuePairs
from mirror.spans import HOLE, REFUSED

DATA = random.Random(3).randbytes(8000)
V6 = {"src": "fd00::1", "dst": "fd00::2"}

PATHS = """
import sys
from llvmlite import binding
features = binding.get_host_cpu_features()
for name in sys.argv[1:]:
    features[name] = False
binding.get_host_cpu_features = lambda: features
import random, zlib
import numpy as np
from numba import njit
from mirror import crc32
from mirror.memory import address_of
crc = njit(lambda state, address, count: crc32.crc_bytes(state, address, count))
memory = np.frombuffer(random.Random(1).randbytes(70_000), np.uint8)
for count in [*range(700), 1024, 4095, 4096, 65_000]:
    for at in (0, 1, 6, 7):
        state = zlib.crc32(bytes(range(count % 9)))
        expected = zlib.crc32(memory[at : at + count].tobytes(), state)
        assert crc(state ^ crc32.ONES, address_of(memory) + at, count) ^ crc32.ONES == expected, (count, at)
print(crc32._LANES, crc32._VECTORS)
"""


@pytest.mark.parametrize(("lacking", "path"), [((), None), (("vpclmulqdq",), "1 4"), (("vpclmulqdq", "pclmul"), "0 0")])
def test_the_crc_of_any_length_on_every_kind_of_processor(
    lacking: tuple[str, ...], path: str | None, tmp_path: Path
) -> None:
    """As this one is, and as if it lacked the wide and all carry-less multiplication; numba's memory of compiled code
    would not tell these apart."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PATHS, *lacking], capture_output=True, text=True, env=environment,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    if path is not None and not (path == "1 4" and done.stdout.strip() == "0 0"):  # of another make
        assert done.stdout.strip() == path


def counts(*frames: bytes) -> list[int]:
    """[ok, bad, unchecked, refused] of packets that come one after the other."""
    wire = Wire(QueuePairs(1 << 12))
    wire.feed(*frames)
    counters = wire.roce.counters()
    return [counters[f"icrc_{name}"] for name in ("ok", "bad", "unchecked", "refused")]


@pytest.mark.parametrize("ends", [{}, V6])
def test_every_size_and_every_flipped_bit(ends: dict[str, str]) -> None:
    sizes = [*range(1, 300), 1024, 4096]
    frames = [roce_frame(ONLY, i, DATA[:size], size=size, **ends) for i, size in enumerate(sizes)]  # type: ignore[arg-type]
    assert counts(*frames) == [len(sizes), 0, 0, 0]
    good = roce_frame(ONLY, 5, DATA[:70], size=70, **ends)  # type: ignore[arg-type]
    payload = 14 + (20 if not ends else 40) + 8 + 12 + 16
    wrong = [flipped(good, bit) for bit in range(8 * payload, 8 * len(good))]
    assert counts(*wrong) == [0, len(wrong), 0, 0]
    # What a router changes is not covered: service, time to live, checksum; class, label, hop limit.
    routed = [15, 22, 24, 25, 40, 41, 46] if not ends else [15, 16, 17, 21, 60, 61, 66]
    assert counts(*(flipped(good, 8 * byte + 1) for byte in routed)) == [len(routed), 0, 0, 0]


def burst(*damaged: int, mtu: int = 1024, ends: dict[str, object] | None = None) -> list[bytes]:
    """Two writes of 8,000 bytes; of the second one the packets with these numbers have a flipped bit."""
    sender = Sender(mtu, ends=ends or {})
    frames = [packet.frame for _ in range(2) for packet in sender.write(DATA)]
    half = len(frames) // 2
    return [flipped(frame, -100) if i - half in damaged else frame for i, frame in enumerate(frames)]


@pytest.mark.parametrize("ends", [{}, V6])
@pytest.mark.parametrize("number", range(8))
def test_a_damaged_packet_is_a_hole_of_known_place_and_cause(number: int, ends: dict[str, object]) -> None:
    """The first one takes with it how long the message is, until the last one has come; the rest is in its place."""
    wire = Wire()
    wire.feed(*burst(number, ends=ends))
    if not ends:
        wire.feed(ack(15))
    wire.now += 60 * MS
    spans = wire.roce.flush(wire.now)
    at = np.flatnonzero(spans.kind[: spans.n] == HOLE)
    assert len(at) == 1 and int(spans.why[at[0], 0]) & REFUSED
    assert Evidence().cause(Why(int(spans.why[at[0], 0]), 0, 0, 0)) == DAMAGED
    if number:
        assert (int(spans.offset[at[0]]), int(spans.length[at[0]])) == (1024 * number, min(1024, 8000 - 1024 * number))
    else:
        assert (int(spans.message[at[0]]), int(spans.length[at[0]])) == (-1, 1)
    assert wire.roce.counters()["icrc_refused"] == 1 and wire.roce.icrc[0].tolist() == [15, 1]


@pytest.mark.parametrize("number", [0, 3, 7])
@pytest.mark.parametrize("before", [True, False])
def test_another_copy_takes_the_place_of_a_damaged_one(number: int, before: bool) -> None:
    wire, frames, good = Wire(), burst(number), burst()
    at = 8 + number
    pair = [frames[at], good[at]] if before else [good[at], frames[at]]
    wire.feed(*frames[:at], *pair, *frames[at + 1 :])
    wire.flush()
    assert [message.complete and message.data == DATA for message in wire.recorder.messages] == [True, True]
    counters = wire.roce.counters()
    assert counters["icrc_refused"] == 1 and counters["holes"] == counters["conflicts"] == counters["lost_packets"] == 0


def test_a_retry_much_later_fills_what_was_refused() -> None:
    wire, frames = Wire(), burst(2, 3, 4)
    wire.feed(*frames)
    wire.feed(ack(9), after=MS)
    wire.feed(*burst()[10:], after=MS)
    wire.flush()
    assert [message.complete and message.data == DATA for message in wire.recorder.messages] == [True, True]
    assert wire.roce.counters()["holes"] == 0


def test_a_damaged_number_moves_nothing() -> None:
    """Numbers, addresses and lengths of a packet that is refused: the flow goes on as if it had not come."""
    header = 14 + 20 + 8
    for byte in (header, header + 1, header + 9, header + 10, header + 11, *range(header + 12, header + 28)):
        for bit in range(8):
            frames = burst()
            wire = Wire()
            wire.feed(*frames[:8], flipped(frames[8], 8 * byte + bit), *frames[8:])
            wire.flush()
            assert [message.complete and message.data == DATA for message in wire.recorder.messages] == [True, True]


def test_notes_of_damage_are_bounded() -> None:
    wire = Wire(gaps=256)
    sender = Sender(1024)
    frames = [packet.frame for packet in sender.write(DATA * 200)]
    wire.feed(*frames[:1000])
    wire.feed(*(flipped(frame, -100) if i % 3 else frame for i, frame in enumerate(frames[1000:])))
    wire.flush()
    assert wire.roce.counters()["icrc_refused"] > 300


def test_sources_that_write_none_are_believed_and_those_that_stop_are_not_at_once() -> None:
    wire = Wire()
    none = [frame[:-4] + bytes(4) for frame in burst()]
    wire.feed(*none)
    wire.flush()
    assert [message.data for message in wire.recorder.messages] == [DATA, DATA]
    assert wire.roce.counters()["icrc_refused"] == 0


@pytest.mark.parametrize("wrap", [vxlan, erspan2])
def test_inside_tunnels_it_is_the_inner_packets(wrap: object) -> None:
    wire = Wire()
    wire.feed(*(wrap(frame) for frame in burst(4)))  # type: ignore[operator]
    counters = wire.roce.counters()
    assert (counters["icrc_ok"], counters["icrc_refused"]) == (15, 1)


def test_it_can_be_turned_off() -> None:
    wire = Wire(check_icrc=False)
    wire.feed(*burst(3))
    wire.flush()
    assert all(message.complete for message in wire.recorder.messages)
    assert wire.recorder.messages[1].data != DATA and wire.roce.counters()["icrc_bad"] == 0


def test_a_packet_without_all_of_its_crc_is_not_judged_by_it() -> None:
    wire, frames = Wire(), burst()
    short = frames[10][:-2]
    wire.feed(*frames[:10], short, *frames[11:], wirelen=[len(frame) for frame in frames])
    wire.flush()
    assert wire.recorder.messages[1].data == DATA and wire.roce.counters()["icrc_unchecked"] == 1
    assert short[43:44] and frames[10][42] == MIDDLE


@pytest.mark.parametrize(("algorithm", "protocol"), [("ring", "simple"), ("ring", "ll128"), ("tree", "ll")])
def test_flipped_bits_in_an_nccl_job_are_holes_and_never_values(algorithm: str, protocol: str) -> None:
    """As if the mirror had lost these packets; a second mirror makes up for all of them."""
    traffic = Nccl(algorithm, protocol)
    warm = len(traffic.frames) // 6
    spec = "corrupt=0.02,seed=2"
    shown = [traffic.frames[:warm] + injured(traffic.frames[warm:], spec, str(number)) for number in range(2)]
    hit = [{i for i, (a, b) in enumerate(zip(traffic.frames, one, strict=True)) if a != b} for one in shown]
    assert min(map(len, hit)) > 3
    one = traffic.run([shown[0]], 0)
    lost = traffic.run([[frame for i, frame in enumerate(traffic.frames) if i not in hit[0]]], 0)
    assert one.roce.counters()["icrc_refused"] == len(hit[0])
    for tag in range(5):
        assert np.array_equal(traffic.known(one, tag), traffic.known(lost, tag)), f"all-reduce {tag}"
    assert not one.conflicts
    both = traffic.run(shown, 0)
    assert not both.conflicts and not hit[0] & hit[1]
    assert all(traffic.known(both, tag).all() for tag in range(5))
