"""LL, LL128 and Simple: encoders written the way the GPU's lanes work, decoded by the kernels under test."""

from __future__ import annotations

import numpy as np
import pytest
from nccl_plans import unknown

from mirror.memory import address_of
from reconstruct.nccl import payload
from reconstruct.nccl.schedule import LL, LL128, SIMPLE, wire_bytes


def encode(protocol: int, data: np.ndarray, step: int, rng: np.random.Generator) -> np.ndarray:
    """The wire bytes of a message; what lies behind the data's end is random, as on the wire."""
    size = wire_bytes(protocol, data.size, step)
    if protocol == SIMPLE:
        return data.copy()
    if protocol == LL:
        padded = rng.integers(0, 256, size // 2, np.uint8)
        padded[: data.size] = data
        words = padded.view(np.uint32).reshape(-1, 2)
        mark = np.full(len(words), (step + 1) % 2**32, np.uint32)
        return np.stack([words[:, 0], mark, words[:, 1], mark], axis=1).reshape(-1).view(np.uint8)
    groups = size // 2048
    padded = rng.integers(0, 256, groups * 1920, np.uint8)
    padded[: data.size] = data
    words = padded.view(np.uint64).reshape(groups, 240)
    wire = np.zeros((groups, 256), np.uint64)
    for group in range(groups):
        for lane in range(32):
            keeper = lane % 8 == 7  # this lane gives its second word of every pair for the flag
            held = np.zeros(8, np.uint64)
            for g in range(4):
                if not keeper or g % 2 == 0:
                    pair = g * 32 - 4 * (g // 2) + lane - (g % 2) * (lane // 8)
                    held[2 * g : 2 * g + 2] = words[group, 2 * pair : 2 * pair + 2]
            for g in (1, 3):
                if keeper:
                    held[2 * g] = held[2 * g - 1]
            for g in range(4):
                at = 2 * lane + 64 * g
                wire[group, at] = held[2 * g]
                wire[group, at + 1] = step + 1 if keeper else held[2 * g + 1]
    return wire.reshape(-1).view(np.uint8)


def _decode(
    protocol: int, wire: np.ndarray, begin: int, end: int, out: np.ndarray, length: int, step: int, shift: int = 0
) -> int:
    """Decode into `out` from a copy of the part at an address that is odd if `shift` is."""
    held = np.empty(end - begin + shift + 8, np.uint8)
    held[shift : shift + end - begin] = wire[begin:end]
    mark = payload.flag(protocol, step)
    return payload.decode(protocol, address_of(held) + shift, begin, end, address_of(out), length, mark)


LENGTHS = [1, 2, 4, 7, 8, 9, 15, 16, 119, 120, 121, 127, 128, 500, 511, 512, 513, 624, 959, 960, 961, 1079, 1080, 1919,
           1920, 1921, 2880, 7712, 12288, 20000]


@pytest.mark.parametrize("protocol", [LL, LL128, SIMPLE])
def test_every_length_comes_back_and_nothing_else_is_written(protocol: int) -> None:
    rng = np.random.default_rng(1)
    for length in LENGTHS:
        data = rng.integers(0, 256, length, np.uint8)
        step = int(rng.integers(0, 1 << 40))
        wire = encode(protocol, data, step, rng)
        assert wire.size == wire_bytes(protocol, length, step)
        out = np.full(length + 4096, 0xA5, np.uint8)
        assert _decode(protocol, wire, 0, wire.size, out, length, step, shift=length % 3) == wire.size
        assert (out[:length] == data).all(), length
        assert (out[length:] == 0xA5).all(), length


@pytest.mark.parametrize("protocol", [LL, LL128, SIMPLE])
@pytest.mark.parametrize("mtu", [256, 1024, 4096])
def test_packets_in_any_order_and_holes(protocol: int, mtu: int) -> None:
    rng = np.random.default_rng(mtu)
    for length in (5, 4000, 40001):
        data = rng.integers(0, 256, length, np.uint8)
        wire = encode(protocol, data, 77, rng)
        out = np.zeros(length, np.uint8)
        known = np.zeros(length, bool)
        begins = rng.permutation(np.arange(0, wire.size, mtu))
        lost = set(begins[: len(begins) // 4].tolist())
        gaps = np.zeros(length, bool)
        for begin in begins.tolist():
            end = min(begin + mtu, wire.size)
            if begin in lost:
                gaps[unknown(protocol, begin, end, length)] = True
                continue
            first, last = payload.inner(protocol, begin, end)
            if first < last:
                assert _decode(protocol, wire[: last], first, last, out, length, 77) == last - first
                known[unknown(protocol, first, last, length)] = True
        assert (out[known] == data[known]).all()
        if mtu >= payload.UNIT_WIRE[protocol]:  # every packet is whole units: what is not lost is known
            assert (known == ~gaps).all()
        else:
            assert not (known & gaps).any()


@pytest.mark.parametrize("protocol", [LL, LL128])
def test_a_wrong_flag_stops_and_is_not_written(protocol: int) -> None:
    rng = np.random.default_rng(4)
    data = rng.integers(0, 256, 20000, np.uint8)
    wire = encode(protocol, data, 9, rng)
    unit, holds = payload.UNIT_WIRE[protocol], payload.UNIT_DATA[protocol]
    flags = [4, 12] if protocol == LL else [128 * line + 120 for line in range(8)]
    for number in (0, 1, 5, 63, 64, 200, wire.size // unit - 1):
        if number >= wire.size // unit:
            continue
        at = number * unit + flags[number % len(flags)] + number % 4
        bad = wire.copy()
        bad[at] ^= 0x10
        out = np.full(data.size, 0x5A, np.uint8)
        assert _decode(protocol, bad, 0, bad.size, out, data.size, 9) == number * unit
        proven = min(number * holds, data.size)
        assert (out[:proven] == data[:proven]).all()
        assert (out[proven:] == 0x5A).all()
    out = np.full(data.size, 0x5A, np.uint8)
    assert _decode(protocol, wire, 0, wire.size, out, data.size, 10) == 0
    assert (out == 0x5A).all()


@pytest.mark.parametrize("protocol", [LL, LL128])
def test_flags_beyond_the_data_are_checked_too(protocol: int) -> None:
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, 4, np.uint8)
    wire = encode(protocol, data, 3, rng)
    if protocol == LL:
        wire = np.concatenate([wire, np.array([0, 5, 0, 5], np.uint32).view(np.uint8)])
    else:
        wire[2040] ^= 1
    out = np.zeros(4, np.uint8)
    assert _decode(protocol, wire, 0, wire.size, out, 4, 3) == payload.UNIT_WIRE[protocol]
    assert (out == data).all()


def test_formats_by_content() -> None:
    rng = np.random.default_rng(6)
    for protocol, length in ((LL, 16384), (LL, 12), (LL128, 4000), (SIMPLE, 4096), (SIMPLE, 100)):
        wire = encode(protocol, rng.integers(0, 256, length, np.uint8), 40, rng)
        expected = {LL: 0b101, LL128: 0b110, SIMPLE: 0b100}[protocol]
        assert payload.formats(address_of(wire), wire.size, False) == expected
        if protocol != SIMPLE:
            assert payload.read_flag(protocol, address_of(wire)) == 41
    # A piece of a message that is cut over queue pairs ends at any line of LL128.
    wire = encode(LL128, rng.integers(0, 256, 4000, np.uint8), 40, rng)
    assert payload.formats(address_of(wire), 384, True) == 0b110
    assert payload.formats(address_of(wire), 384, False) == 0b100
    zeros = np.zeros(4096, np.uint8)
    assert payload.formats(address_of(zeros), 4096, False) == 0b100  # no flag is 0
    assert payload.formats(address_of(zeros), 0, False) == 0b111


def test_inner_ranges() -> None:
    assert payload.inner(LL128, 1, 4096) == (1024, 4096)
    assert payload.inner(LL128, 9000, 10240) == (9216, 10240)
    assert payload.inner(LL128, 1, 1025) == payload.inner(LL128, 1, 1024) == (1024, 1024)
    assert payload.inner(LL, 16, 17) == (16, 16) and payload.inner(SIMPLE, 3, 5) == (3, 5)


def test_each_line_of_ll128_has_its_place() -> None:
    """A unit of 1024 wire bytes, line by line, is the same as the whole unit."""
    rng = np.random.default_rng(8)
    data = rng.integers(0, 256, 1920, np.uint8)
    wire = encode(LL128, data, 5, rng)
    out = np.zeros(1920, np.uint8)
    written = np.zeros(1920, np.int64)
    for line in range(16):
        unit, at = line // 8 * 960, 128 * line
        first, count, second, rest = payload.line_places(line % 8)
        for place, size, source in ((first, count, at), (second, rest, at + count)):
            out[unit + place : unit + place + size] = wire[source : source + size]
            written[unit + place : unit + place + size] += 1
    assert (out == data).all() and (written == 1).all()
