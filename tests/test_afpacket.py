"""Live AF_PACKET capture on a veth pair in a namespace, and the ring's walk on blocks made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowcheck.errors import UsageError
from mirror.afpacket import AfPacketSource, ring_block_walk
from mirror.capfile import CaptureFileSource

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process in its own network namespace (and user namespace if need be) goes through every live
    case."""
    folder = tmp_path_factory.mktemp("live")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "afpacket_live.py"), str(folder / "live.pcap")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    if "refused" in result:
        pytest.skip(f"this machine allows no network namespaces: {result['refused']}")
    result["file"] = folder / "live.pcap"
    return result


def test_live_frames_are_those_sent(live: dict[str, Any]) -> None:
    assert live["promiscuous"] == 1
    assert (live["vantage"], live["linktype"], live["times_near_now"]) == (3, 1, True)
    again = []
    for data, wirelen, vlan in live["live"]:
        if vlan >= 0:
            data = data[:24] + f"{vlan:08x}" + data[24:]
        assert wirelen == len(data) // 2
        again.append(data)
    # Also shows that frames sent by this end are left out.
    assert again == live["sent"]
    assert [vlan for _, _, vlan in live["live"]] == [
        -1, -1, 0x81002005, 0x81006000, 0x88A80007, -1, -1, 0x81000FFE,
    ]  # fmt: skip
    assert max(wirelen for _, wirelen, _ in live["live"]) == 65549
    assert live["counters"] == [len(live["sent"]), sum(len(frame) // 2 for frame in live["sent"]), 0]


def test_recording_of_a_live_capture_equals_what_was_on_the_wire(live: dict[str, Any]) -> None:
    source = CaptureFileSource([live["file"]])
    frames = []
    while (block := source.read(0)) is not None:
        assert (block.wirelen == block.caplen).all()
        frames += [
            block.base[o : o + c].tobytes().hex() for o, c in zip(block.offset, block.caplen, strict=True)
        ]
    assert not source.problems
    assert frames == live["sent"]


def test_a_quiet_read_returns_at_its_timeout(live: dict[str, Any]) -> None:
    assert live["quiet_read"]
    assert 0.19 < live["quiet_seconds"] < 1.0


def test_an_interface_that_goes_down_or_away_is_told_and_followed(live: dict[str, Any]) -> None:
    assert live["down"] == ["right went down: no frames until it is up again"]
    assert live["after_up"] == 1
    assert [frame[2] for frame in live["after_anew"]] == [0x81002005]
    assert live["problems"][-1] == "right was removed and is back: capturing on the new one"
    assert live["closed"] == [True, True, 2 + len(live["sent"])]
    assert live["promiscuous_after"] == 0


def test_frames_that_found_no_room_are_counted(live: dict[str, Any]) -> None:
    tiny = live["tiny"]
    assert 0 < tiny["packets"] < 1000
    assert tiny["packets"] + tiny["drops"] == 1000
    assert tiny["freezes"] > 0
    assert tiny["numbers"] == list(range(tiny["packets"])), "the first ones are kept, in order"
    assert live["tiny_after"] == 20
    assert live["tiny_drops_after"] == tiny["drops"], "cumulative although reading resets the kernel's figure"


def test_held_blocks_keep_their_frames(live: dict[str, Any]) -> None:
    assert live["held"] == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert live["distinct"] == 4
    assert live["full"]
    assert live["full_cpu"] < 0.5, "waiting for a held block must not spin"
    assert "released before" in live["twice"]
    assert live["order_after"] == [8, 9, 10, 11]
    assert live["late"] == [[burst, i] for burst in range(3) for i in range(13)] and live["late_drops"] == 0
    assert len(live["late_sizes"]) <= 13, live["late_sizes"]  # 5, 5, 3; 5, 2, 5, 1; 5, 5, 3 if each came to one block
    assert live["order_drops"] == 4
    assert live["after_close"]


def test_loopback_shows_each_frame_once(live: dict[str, Any]) -> None:
    assert live["loopback"] == 1


def test_live_errors_say_what_to_do(live: dict[str, Any]) -> None:
    assert "no interface nosuch0" in live["missing"]
    for name in ("lo", "left", "right"):
        assert name in live["missing"]
    message, status = live["permission"]
    assert status == 77
    assert "CAP_NET_RAW" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64 << 10},
        {"block_size": (1 << 20) + 1},
        {"blocks": 1},
        {"retire_ms": 0},
        {"blocks": 1 << 20},
    ],
)
def test_impossible_rings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        AfPacketSource("lo", **options)


# ---- the ring's walk on a hand-made block ----


def ring_block(change: Callable[[np.ndarray], None]) -> tuple[int, int, int]:
    words = np.zeros(1024, np.uint32)
    words[2:5] = 1, 2, 48
    for at in (48, 448):
        words[at // 4 : at // 4 + 6] = 400, 1, 2, 100, 100, 0
        words.view(np.uint16)[at // 2 + 12] = 82
    change(words)
    count, total, cut = ring_block_walk(words, words.view(np.uint16), np.empty((5, 2), np.int64))
    return int(count), int(total), int(cut)


def test_ring_walk_stays_inside_the_block_and_tells_of_cut_frames() -> None:
    def last_length(words: np.ndarray) -> None:
        words[448 // 4 + 3 : 448 // 4 + 5] = 5000

    def next_offset(words: np.ndarray) -> None:
        words[48 // 4] = 1 << 31

    def cut(words: np.ndarray) -> None:
        words[448 // 4 + 4] = 70000

    assert ring_block(lambda words: None) == (2, 200, 0)
    assert ring_block(last_length) == (1, 100, 0)
    assert ring_block(next_offset) == (1, 100, 0)
    assert ring_block(cut) == (2, 70100, 70000)
