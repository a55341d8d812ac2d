"""Recorded jobs, replayed with frames lost, disordered, repeated, cut and damaged: right, or said not to be known."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import Frame, Recording, Result, replay

from flowcheck.cli import main
from flowcheck.client import snapshot, status
from flowcheck.store import Store
from flowcheck.trainer_log import TrainerLog
from flowcheck.verify import verify
from reconstruct.digest import state_digest

ROOT = Path(__file__).resolve().parent.parent
STEPS = list(range(1, 7))
BUCKETS = 4
few = settings(max_examples=12, deadline=None)


@pytest.fixture(scope="module")
def lossless(recorded_job: Recording) -> Result:
    return replay(recorded_job)


@pytest.fixture(scope="module")
def lossless_pair(recorded_pair: Recording) -> Result:
    return replay(recorded_pair)


def check_right(result: Result, truth: Result) -> None:
    """Every byte placed anywhere is right, every step was handed out, and what is known of it is right."""
    assert list(result.gradients) == STEPS and result.lost is None
    assert list(result.digests) == STEPS[: len(result.digests)]
    for step, digest in result.digests.items():
        assert digest == truth.digests[step]
        assert result.gradients[step] == truth.gradients[step]
    for step, gradients in result.gradients.items():
        assert bool(gradients) != (step in result.blank)
        for index, gradient in gradients.items():
            wanted = np.frombuffer(truth.gradients[step][index], np.uint32).copy()
            for low, high in result.part.get(step, {}).get(index, ()):
                wanted[low:high] = 0
            assert wanted.tobytes() == gradient, f"step {step}"
    for tag, (mask, data) in result.partly.items():
        expected = np.frombuffer(truth.landed[tag], np.uint8)
        assert expected.size == data.size and np.array_equal(expected[mask], data[mask]), f"all-reduce {tag}"
    assert len(result.digests) == len(STEPS) or result.part or result.blank


@pytest.mark.parametrize("per_block", [1, 7, 64, 100_000])
def test_a_replay_gives_the_trainers_states(recorded_job: Recording, per_block: int) -> None:
    result = replay(recorded_job, per_block=per_block)
    assert result.digests == recorded_job.truth and list(result.digests) == STEPS
    assert result.confirmed == set(STEPS) and result.lost is None


def test_a_replay_of_two_ranks_gives_the_trainers_states(recorded_pair: Recording, lossless_pair: Result) -> None:
    assert lossless_pair.digests == recorded_pair.truth and list(lossless_pair.digests) == STEPS


def test_one_direction_of_a_port_shows_three_quarters(recorded_job: Recording, lossless: Result) -> None:
    sent_by_the_rank = [frame for frame in recorded_job.frames if frame[1][26:30] == bytes((10, 77, 0, 2))]
    assert 0 < len(sent_by_the_rank) < len(recorded_job.frames)
    result = replay(recorded_job, lambda _: sent_by_the_rank)
    check_right(result, lossless)
    assert result.digests == {} and sorted({*result.part, *result.blank}) == STEPS and len(result.part) > 3
    assert result.tracker is not None and result.tracker.coverage == pytest.approx(0.75, abs=0.02)


def test_a_replay_without_markers_is_unconfirmed(recorded_job: Recording) -> None:
    said = recorded_job.said
    result = replay(recorded_job, said=TrainerLog(said.attached, []))
    # Nobody knows the learning rate of a step without its marker but by the scheduler, which is described.
    assert result.digests == recorded_job.truth and result.confirmed == set()


def check_losses(recording: Recording, truth: Result) -> None:
    @few
    @given(rate=st.floats(0.001, 0.05), seed=st.integers(0, 1 << 32))
    def check(rate: float, seed: int) -> None:
        rng = random.Random(seed)
        check_right(replay(recording, lambda frames: [f for f in frames if rng.random() >= rate]), truth)

    check()


def test_loss_never_gives_a_wrong_value(recorded_job: Recording, lossless: Result) -> None:
    check_losses(recorded_job, lossless)


def test_loss_of_two_ranks_never_gives_a_wrong_value(recorded_pair: Recording, lossless_pair: Result) -> None:
    check_losses(recorded_pair, lossless_pair)


def moment(lossless: Result, step: int) -> int:
    """When the last byte of a step's gradient was captured. A marker may come later, while the next step is sent."""
    behind = STEPS[-1] - step
    tags = sorted(lossless.landed)[-BUCKETS * (behind + 1) :][:BUCKETS]
    return max(lossless.times[tag] for tag in tags)


@pytest.mark.parametrize("part", [0.05, 0.3, 1.0])
def test_after_loss_in_one_step_later_ones_are_whole_again(
    recorded_job: Recording, lossless: Result, part: float
) -> None:
    """Loss in step 3 alone, up to all of its frames: it is lost or repaired, and positions recover for the rest."""
    low, high = moment(lossless, 2), moment(lossless, 3)
    rng = random.Random(5)
    result = replay(
        recorded_job, lambda frames: [f for f in frames if not low < f[0] < high or rng.random() >= part]
    )
    check_right(result, lossless)
    # Links are not in step: acknowledgments of step 2 and the first frames of step 4 may be among those that are lost.
    assert {*result.part, *result.blank} <= {2, 3, 4}, repr(result)
    assert list(result.digests)[:1] == [1]
    last = sorted(lossless.landed)[-2 * BUCKETS :]  # of the last two steps
    assert {tag: result.landed.get(tag) for tag in last} == {tag: lossless.landed[tag] for tag in last}


def shuffled(frames: list[Frame], rng: random.Random, window: int) -> list[Frame]:
    """Frames disordered among neighbours, never by more than 5 ms; the times stay in order as a tap gives them."""
    order = list(range(len(frames)))
    for start in range(0, len(frames), window):
        part = [i for i in order[start : start + window] if frames[i][0] - frames[start][0] < 5_000_000]
        mixed = part.copy()
        rng.shuffle(mixed)
        order[start : start + len(part)] = mixed
    return [(frames[at][0], frames[i][1]) for at, i in enumerate(order)]


def cut(frame: Frame, at: int) -> list[Frame]:
    """A TCP segment (Ethernet, IPv4 without options) as two, as if the sender had cut it at payload byte `at`."""
    ts, data = frame
    head = 14 + 20 + 4 * (data[46] >> 4) if data[12:14] == b"\x08\x00" and data[23] == 6 else len(data)
    size = struct.unpack(">H", data[16:18])[0] if len(data) > head else 0
    payload = data[head : 14 + size] if size else data[head:]
    if len(payload) < 2 or data[47] & 0x07:
        return [frame]
    at = 1 + at % (len(payload) - 1)
    sequence = struct.unpack(">I", data[38:42])[0]

    def segment(seq: int, body: bytes) -> bytes:
        ip = data[14:16] + struct.pack(">H", head - 14 + len(body)) + data[18:34]
        return data[:14] + ip + data[34:38] + struct.pack(">I", seq & 0xFFFFFFFF) + data[42:head] + body

    return [(ts, segment(sequence, payload[:at])), (ts, segment(sequence + at, payload[at:]))]


def test_disorder_repetition_and_cuts_change_nothing(recorded_job: Recording) -> None:
    @few
    @given(
        window=st.integers(1, 12), repeated=st.floats(0, 0.2), split=st.floats(0, 0.3), seed=st.integers(0, 1 << 32)
    )
    def check(window: int, repeated: float, split: float, seed: int) -> None:
        rng = random.Random(seed)

        def change(frames: list[Frame]) -> list[Frame]:
            pieces = [p for f in frames for p in (cut(f, rng.randrange(1 << 16)) if rng.random() < split else [f])]
            more = [copy for f in pieces for copy in ([f, f] if rng.random() < repeated else [f])]
            return shuffled(more, rng, window)

        result = replay(recorded_job, change)
        assert result.digests == recorded_job.truth and result.lost is None

    check()


def holders(recording: Recording, needle: bytes) -> list[tuple[int, int]]:
    """(frame, offset) of every frame that carries these bytes."""
    return [(i, at) for i, (_, data) in enumerate(recording.frames) if (at := data.find(needle)) >= 0]


def flipped(recording: Recording, frame: int, at: int) -> list[Frame]:
    frames = list(recording.frames)
    ts, data = frames[frame]
    frames[frame] = (ts, data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    return frames


def final_bytes(recording: Recording, result: Result, step: int, copies: int) -> tuple[int, int]:
    """A place in a frame that carries a final value of the step, seen `copies` times altogether."""
    for gradient in result.gradients[step].values():
        for at in range(0, len(gradient) - 64, 4096):
            found = holders(recording, gradient[at : at + 64])
            if len(found) == copies:
                return found[-1][0], found[-1][1] + 30
    raise AssertionError(f"no value of step {step} is carried {copies} times")


def test_a_flipped_byte_that_is_seen_once_makes_the_comparison_fail(
    recorded_pair: Recording, lossless_pair: Result
) -> None:
    frame, at = final_bytes(recorded_pair, lossless_pair, 4, copies=1)
    result = replay(recorded_pair, lambda _: flipped(recorded_pair, frame, at))
    assert [result.digests[s] == recorded_pair.truth[s] for s in (1, 2, 3)] == [True] * 3
    assert result.digests.get(4) != recorded_pair.truth[4]


def test_a_flipped_byte_that_is_seen_twice_is_lost(recorded_job: Recording, lossless: Result) -> None:
    frame, at = final_bytes(recorded_job, lossless, 4, copies=2)
    result = replay(recorded_job, lambda _: flipped(recorded_job, frame, at))
    check_right(result, lossless)
    assert result.digests == {s: recorded_job.truth[s] for s in (1, 2, 3)}
    assert list(result.part) == [4] and [part.total for part in result.part[4].values()] == [1]
    assert any("two copies" in notice for notice in result.notices)


# By the command line


def daemon(*options: str) -> list[str]:
    return [sys.executable, "-m", "flowcheck", "daemon", *options]


def capture_of(recording: Recording) -> str:
    return str(recording.job.parents[3] / "capture.pcap")


def test_the_command_replays_a_recording_and_stores_its_last_step(recorded_job: Recording, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    done = subprocess.run(
        daemon("-r", capture_of(recorded_job), "--job", str(recorded_job.job), "--journal", str(journal),
               "--store", str(tmp_path / "store"), "--every-steps", "2", "--keep", "2"),
        capture_output=True, text=True, timeout=200, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "", done
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {line["step"]: line["digest"] for line in lines} == recorded_job.truth
    whole = [json.loads(line) for line in (recorded_job.job.parents[3] / "journal.jsonl").read_text().splitlines()]
    live = [line for line in whole if line["run"] == "gpt"]
    same = ("run", "step", "confirmed", "bytes", "holes", "digest")
    assert [[line[k] for k in same] for line in lines] == [[line[k] for k in same] for line in live]
    fields = {"run", "epoch", "step", "confirmed", "lag_ms", "bytes", "holes", "unknown", "known_step", "digest"}
    assert set(lines[0]) == fields
    store = Store(tmp_path / "store")
    assert store.steps("gpt", 1)[-1] == 6 and len(store.steps("gpt", 1)) == 2
    assert verify(tmp_path / "store").problems == []
    assert state_digest(store.load().tensors) == recorded_job.truth[6]


def test_the_command_keeps_serving_a_replay_with_listen(recorded_job: Recording, tmp_path: Path) -> None:
    process = subprocess.Popen(
        daemon("-r", capture_of(recorded_job), "--job", str(recorded_job.job), "--listen", f"ipc://{tmp_path}/d"),
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == f"listening ipc://{tmp_path}/d\n"
        for _ in range(600):
            answer = status(f"ipc://{tmp_path}/d", 60)
            if answer["step"] == 6:
                break
        wanted = {"run", "epoch", "step", "confirmed", "exact", "coverage", "lag_ms", "packets", "bytes", "drops"}
        assert wanted | {"holes", "memory_bytes"} <= set(answer)
        assert (answer["run"], answer["epoch"], answer["step"], answer["confirmed"]) == ("gpt", 1, 6, True)
        assert answer["exact"] and answer["coverage"] == 1.0 and answer["frozen"] is None
        assert answer["packets"] == len(recorded_job.frames) and answer["drops"] == answer["holes"] == 0
        state = snapshot(f"ipc://{tmp_path}/d")
        assert state_digest(state.tensors) == recorded_job.truth[6] and state.notes == []
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_replay_of_nothing_says_what_is_missing(
    recorded_job: Recording, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["daemon", "-r", str(tmp_path / "none.pcap"), "--job", str(recorded_job.job)])
    error = capfd.readouterr().err
    assert end.value.code == 1 and "none.pcap" in error and "Traceback" not in error, error
    done = subprocess.run(
        daemon("-r", capture_of(recorded_job), "--job", str(tmp_path / "none.job")),
        capture_output=True, text=True, timeout=100, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 78 and "none.job" in done.stderr and "Traceback" not in done.stderr, done
