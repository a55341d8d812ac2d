"""TCP checksums: the sum itself, what is refused for it, and that good frames with wrong ones go on as before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gloo_traffic import Job
from mirrors import Frame, injured
from tcp_frames import FIN, ISN, MS, Wire, acked, block_of, chosen, data, flipped, summed, syn, tcp_frame
from test_loss_report import Watch
from test_redundancy import Gloo, gloo_frames, gloo_job
from tunnel_frames import erspan2, erspan3, gre_ip, vlan, vxlan

from flowcheck.pipeline import Limits, Pipeline
from mirror.block import pack
from mirror.flows import Flows
from mirror.frames import SUM_RIGHT, SUM_WRONG, Segments, parse
from mirror.loss import DAMAGED, Evidence, Why
from mirror.spans import CUT, HOLE, PROVEN, REFUSED
from mirror.tcp import TcpReassembler
from reconstruct.steps import Waits

V6 = {"src": "fd00::1", "dst": "fd00::2"}
BYTES = bytes(random.Random(7).randbytes(4000))
GRACE = 60 * MS


def verdicts(*frames: bytes, wirelen: list[int] | None = None) -> list[int]:
    """What each frame's checksum came to: SUM_RIGHT, SUM_WRONG, or 0 where it was not judged."""
    segments = Segments(check_sums=True)
    n = parse(block_of(frames, wirelen=wirelen), Flows(1 << 12), segments)
    assert n == len(frames)
    return (segments.flags[:n] & (SUM_RIGHT | SUM_WRONG)).tolist()


def part(offset: int, size: int = 100, *, flags: int = 0x10) -> bytes:
    """A segment with bytes of BYTES and a right checksum."""
    return summed(data(offset, BYTES[offset : offset + size], flags=flags))


def told(wire: Wire) -> list[tuple[int, int, int]]:
    """(offset, length, what is known) of the holes, once time has passed."""
    assert wire.expire(GRACE // 2) == []
    wire.now += GRACE // 2
    spans = wire.tcp.expire(wire.now)
    at = np.flatnonzero(spans.kind[: spans.n] == HOLE)
    return list(zip(spans.offset[at].tolist(), spans.length[at].tolist(), spans.why[at, 0].tolist(), strict=True))


def bytes_of(spans: list[tuple[object, ...]], kind: str = "data") -> bytes:
    return b"".join(row[3] for row in spans if row[0] == kind)  # type: ignore[misc]


# The sum


@pytest.mark.parametrize("ends", [{}, V6, {"src": "::ffff:10.0.0.1", "dst": "fd00::2"}])
def test_any_length_at_any_address_against_a_slow_reference(ends: dict[str, str]) -> None:
    """Frames of a block lie behind one another, so every length moves all that follow."""
    chance = random.Random(1)
    sizes = [*range(1, 140), *(chance.randrange(140, 9000) for _ in range(60)), 65_000]
    frames = [summed(tcp_frame(chance.randbytes(size), seq=chance.getrandbits(32), **ends)) for size in sizes]
    # One right checksum in 65,535 equals what an offloaded one would be, and is not judged.
    odd = {i for i, frame in enumerate(frames) if frame == summed(frame, offloaded=True)}
    assert len(odd) < 2
    for i, found in enumerate(verdicts(*frames)):
        assert found == (0 if i in odd else SUM_RIGHT), sizes[i]
    wrong = [flipped(frame, -1 - chance.randrange(8 * size)) for frame, size in zip(frames, sizes, strict=True)]
    for i, found in enumerate(verdicts(*wrong)):
        assert found == (0 if i in odd else SUM_WRONG), sizes[i]


@pytest.mark.parametrize("extreme", [b"\0" * 100, b"\xff" * 100, b"\xff\0" * 50, b"\xff" * 65_001])
def test_sums_that_overflow_or_stay_zero(extreme: bytes) -> None:
    assert verdicts(summed(tcp_frame(extreme)), summed(tcp_frame(extreme, **V6))) == [SUM_RIGHT] * 2


@pytest.mark.parametrize(("size", "ends"), [(1, {}), (33, {}), (64, V6)])
def test_every_single_flipped_bit_is_seen(size: int, ends: dict[str, str]) -> None:
    """Of the addresses, the ports and numbers, the checksum and the payload; not of what says how the frame is read."""
    good = summed(tcp_frame(BYTES[:size], seq=77, ack=99, **ends))
    start = len(good) - size - 20
    judged = [*range(start - (8 if not ends else 32), start + 12), *range(start + 13, len(good))]
    assert verdicts(good) == [SUM_RIGHT]
    bits = [8 * byte + bit for byte in judged for bit in range(8)]
    assert verdicts(*(flipped(good, bit) for bit in bits)) == [SUM_WRONG] * len(bits)


def test_where_there_is_nothing_to_verify() -> None:
    good = summed(tcp_frame(BYTES[:100]))
    options = good[:14] + b"\x46" + good[15:34] + bytes(4) + good[34:]
    options = options[:16] + (144).to_bytes(2, "big") + options[18:]
    ends: tuple[dict[str, str], ...] = ({}, V6)
    offloaded = [summed(tcp_frame(BYTES[:100], **each), offloaded=True) for each in ends]
    assert verdicts(*offloaded, summed(tcp_frame()), options, good[:16] + bytes(2) + good[18:]) == [0] * 5
    assert verdicts(good[:-1], wirelen=[len(good)]) == [0]
    assert verdicts(good + bytes(30)) == [SUM_RIGHT]  # an Ethernet trailer is not summed
    segments = Segments()
    parse(block_of([good]), Flows(64), segments)
    assert segments.flags[0] == 0x10


@pytest.mark.parametrize("wrap", [vxlan, erspan2, erspan3, gre_ip, lambda frame: vlan(frame, 5, 6)])
def test_inside_tunnels_it_is_the_inner_checksum(wrap: object) -> None:
    for ends in ({}, V6):
        good = summed(tcp_frame(BYTES[:333], **ends))
        frames = [wrap(good), wrap(flipped(good, -100))]  # type: ignore[operator]
        assert verdicts(*frames) == [SUM_RIGHT, SUM_WRONG]


# What is refused


def test_a_damaged_segment_is_a_hole_of_known_place_and_cause() -> None:
    wire = Wire()
    wire.feed(syn(), part(0), part(100), flipped(part(200), -5), part(300))
    assert bytes_of(wire.feed(part(400), acked(500))) == b""
    assert told(wire) == [(200, 100, REFUSED | PROVEN)]
    assert Evidence().cause(Why(REFUSED | PROVEN, 0, 0, 0)) == DAMAGED
    counters = wire.tcp.counters()
    assert [counters[f"checksum_{name}"] for name in ("ok", "bad", "unchecked", "refused")] == [4, 1, 0, 1]
    assert wire.tcp.held_bytes == 0


@pytest.mark.parametrize("damaged_first", [True, False])
def test_another_copy_takes_the_place_of_a_damaged_one(damaged_first: bool) -> None:
    wire = Wire()
    pair = [flipped(part(200), -300), part(200)]
    spans = wire.feed(syn(), part(0), part(100), *(pair if damaged_first else pair[::-1]), part(300))
    assert bytes_of(spans) == BYTES[:400] and {row[0] for row in spans} == {"open", "data"}
    assert not told(wire) and wire.tcp.counters()["conflicts"] == 0


def test_nothing_that_a_damaged_segment_says_is_believed() -> None:
    """Its sequence number would move the stream, its acknowledgment close gaps, its flags end it."""
    wire = Wire()
    wire.feed(syn(), part(0, 50), part(50, 50), part(100))
    lying = data(200, BYTES[200:300], flags=0x10 | FIN)
    far = tcp_frame(BYTES[:100], seq=ISN + 1 + 250)
    assert wire.feed(flipped(summed(lying), -1), flipped(summed(far), -1)) == []
    assert bytes_of(wire.feed(part(200), part(300))) == BYTES[200:400]
    assert not told(wire) and wire.flush() == []


def test_the_cause_is_exact_where_damage_and_cuts_meet() -> None:
    """Damaged, cut, both of the same bytes, and plainly lost."""
    wire = Wire()
    cut = part(300)
    wire.feed(syn(), part(0, 100), part(100, 50), part(150, 50))
    frames = [flipped(part(200), -9), cut[:-60], flipped(cut, -1), part(500)]
    sizes = [len(frame) for frame in frames]
    sizes[1] = len(cut)
    wire.take(block_of(frames, wire.now, wirelen=sizes), wire.now)
    wire.feed(acked(600))
    assert told(wire) == [
        (200, 100, REFUSED | PROVEN), (340, 60, CUT | PROVEN), (400, 100, PROVEN)
    ]  # fmt: skip


def test_notes_of_damage_leave_room_for_what_waits() -> None:
    wire = Wire(reorder_bytes=64 << 10)
    wire.feed(syn(), *(part(offset, 50) for offset in [0, 50, 100, 150] * 20))
    wire.feed(*(flipped(part(offset, 50), -1) for offset in range(300, 3900, 100)))
    assert wire.tcp.counters()["checksum_refused"] == 36 and wire.tcp.held_bytes <= 32 << 10
    wire.feed(part(200, 50), part(400))
    assert wire.tcp.counters()["no_room"] == 0
    wire.feed(summed(data(250, BYTES[250:400])), summed(data(500, BYTES[500:4000])))
    assert wire.flush() == [] and wire.tcp.counters()["hole_bytes"] == 0


# What is not


def test_a_source_whose_checksums_are_never_right_is_believed() -> None:
    for frame in (lambda offset: data(offset, BYTES[offset : offset + 100]),
                  lambda offset: summed(data(offset, BYTES[offset : offset + 100]), offloaded=True)):  # fmt: skip
        wire = Wire()
        assert bytes_of(wire.feed(syn(), *(frame(offset) for offset in range(0, 1000, 100)))) == BYTES[:1000]
        assert wire.tcp.counters()["checksum_refused"] == wire.tcp.counters()["checksum_ok"] == 0


def test_what_adapters_merged_goes_on_beside_segments_that_came_alone() -> None:
    """GRO marks what it merged; LRO leaves the first segment's checksum, on more than any segment carries."""
    wire = Wire()
    merged = summed(data(300, BYTES[300:800]), offloaded=True)
    stale = data(800, BYTES[800:1500])
    stale = stale[:50] + part(800)[50:52] + stale[52:]
    got = bytes_of(wire.feed(syn(), part(0), part(100), part(200), merged, stale, stale, part(1500)))
    assert got == BYTES[:1600]
    counters = wire.tcp.counters()
    assert (counters["checksum_unchecked"], counters["checksum_bad"], counters["checksum_refused"]) == (1, 2, 0)
    wire.feed(flipped(part(1600), -1), part(1700), acked(1800))
    assert told(wire) == [(1600, 100, REFUSED | PROVEN)]  # nor is the flow distrusted for them


def test_damage_at_the_start_neither_gains_nor_costs_trust() -> None:
    wire = Wire()
    wire.feed(syn(), *(flipped(part(offset), -1) for offset in range(0, 500, 100)))
    assert wire.tcp.counters()["checksum_refused"] == 0  # nothing is known of this flow's checksums yet
    wire.feed(part(500), part(600), flipped(part(700), -1), part(800), acked(900))
    assert wire.tcp.counters()["checksum_refused"] == 1
    assert told(wire) == [(700, 100, REFUSED | PROVEN)]


def test_the_majority_decides() -> None:
    """Two mirrors, one of them of a host that leaves something else in the field: its copies do no harm, and where they
    are alone they count once they are more."""
    wire = Wire()
    strange = [data(offset, BYTES[offset : offset + 100]) for offset in range(0, 2000, 100)]
    right = [part(offset) for offset in range(0, 2000, 100)]
    wire.feed(syn(), *(frame for both in zip(right[:10], strange[:10], strict=True) for frame in both))
    assert wire.tcp.counters()["checksum_refused"] < 10
    assert bytes_of(wire.feed(*strange[10:])) == BYTES[1000:2000]


def test_trust_ends_with_the_flows_id() -> None:
    """A new connection that takes over the place of another one in a full table."""
    flows = Flows(2)
    wire = Wire(flows)
    wire.feed(syn(), *(part(offset) for offset in range(0, 500, 100)))
    wire.feed(acked(500))
    for number in range(4):
        other = {"src": f"10.1.0.{number}", "sport": 5000 + number}
        wire.feed(tcp_frame(seq=9, flags=2, **other))
        spans = wire.feed(tcp_frame(b"x" * 50, seq=10, **other))
        assert bytes_of(spans) == b"x" * 50, number
    assert flows.evicted >= 4 and wire.tcp.counters()["checksum_refused"] == 0


def test_it_can_be_turned_off() -> None:
    wire = Wire(check_sums=False)
    damaged = flipped(part(200), -5)
    assert bytes_of(wire.feed(syn(), part(0), part(100), damaged)) == BYTES[:200] + damaged[-100:]
    counters = wire.tcp.counters()
    assert (counters["checksum_ok"], counters["checksum_unchecked"]) == (0, 3)


# A whole job


def right_sums(wire: Job) -> list[Frame]:
    return [(ts, summed(frame)) for ts, frame in gloo_frames(wire)]


@pytest.mark.parametrize("window", [0, MS])
@pytest.mark.parametrize("mss", [1448, 1449])
def test_flipped_bits_in_a_gloo_job_are_holes_and_never_values(mss: int, window: int) -> None:
    """As if the mirror had lost these frames; a second mirror makes up for all of them."""
    wire = gloo_job(2, seed=3, mss=mss)
    frames = right_sums(wire)
    warm = len(frames) // 6  # by then every connection has shown full segments
    spec = "corrupt=0.02,seed=1"
    shown = [frames[:warm] + injured(frames[warm:], spec, str(number)) for number in range(2)]
    hit = [{i for i, (mine, theirs) in enumerate(zip(frames, one, strict=True)) if mine != theirs} for one in shown]
    assert min(len(one) for one in hit) > 10 and not hit[0] & hit[1]
    one = Gloo(wire).run([shown[0]], window)
    lost = Gloo(wire).run([[frame for i, frame in enumerate(frames) if i not in hit[0]]], window)
    for tag in wire.truth:
        assert np.array_equal(one.known(tag), lost.known(tag)), f"all-reduce {tag}"
    assert not all(one.known(tag).all() for tag in wire.truth) and one.alarms == 0
    assert one.tcp.counters()["checksum_refused"] == len(hit[0])
    both = Gloo(wire).run(shown, window)
    assert all(both.known(tag).all() for tag in wire.truth) and both.alarms == 0
    assert both.tcp.counters()["hole_bytes"] == 0


def test_without_checksums_that_are_right_the_same_damage_is_not_seen() -> None:
    """What the test above would find if nothing were refused: frames of this kind are as bad as they can be."""
    wire = gloo_job(2, seed=3)
    frames = gloo_frames(wire)
    warm = len(frames) // 6
    one = Gloo(wire).run([frames[:warm] + injured(frames[warm:], "corrupt=0.02,seed=1", "0")], 0)
    with pytest.raises(AssertionError, match="wrong bytes"):
        for tag in wire.truth:
            one.known(tag)


def test_offloaded_and_merged_frames_of_a_job_are_all_taken() -> None:
    wire = gloo_job(3, seed=4)
    frames = [(ts, summed(frame, offloaded=len(frame) > 700)) for ts, frame in gloo_frames(wire)]
    job = Gloo(wire).run([frames], 0)
    assert all(job.known(tag).all() for tag in wire.truth)
    counters = job.tcp.counters()
    assert counters["checksum_refused"] == counters["checksum_bad"] == 0
    assert counters["checksum_ok"] > 10 < counters["checksum_unchecked"]


def test_both_ways_at_once_in_any_order() -> None:
    """Random streams, shuffled a little, damaged and repeated: what comes out is right, and complete if a good copy of
    everything came."""
    for seed in range(30):
        chance = random.Random(seed)
        wire = Wire()
        wire.feed(syn(), part(0, 200))
        at, frames, whole = 200, [], True
        while at < 3000:
            size = chance.randrange(1, 201)
            good = part(at, size)
            copies = [flipped(good, -1 - chance.randrange(8 * size)) for _ in range(chance.choice([0, 0, 1, 2]))]
            if chance.random() < 0.95:
                copies.append(good)
            else:
                whole = False
            chance.shuffle(copies)
            frames += copies
            at += size
        for i in range(0, len(frames) - 4, 3):
            some = frames[i : i + 4]
            chance.shuffle(some)
            frames[i : i + 4] = some
        got = []
        for i in range(0, len(frames), 5):
            got += wire.feed(*frames[i : i + 5], after=MS)
        wire.now += GRACE
        got += wire.read(wire.tcp.flush(wire.now))
        if wire.tcp.counters()["checksum_bad"] != wire.tcp.counters()["checksum_refused"]:
            continue  # so many were damaged that the flow lost its trust
        for kind, _, offset, value in got:
            if kind in ("data", "duplicate"):
                assert value == BYTES[offset : offset + len(value)], seed  # type: ignore[index, operator, arg-type]
        assert not whole or wire.tcp.counters()["hole_bytes"] == 0


def test_the_reassembler_checks_by_itself() -> None:
    """Unless it is told not to; blocks that are chosen from are as good."""
    tcp = TcpReassembler(Flows(16))
    block = block_of([syn(), part(0), part(100), flipped(part(200), -1)])
    assert tcp.feed(chosen(block, [0, 1, 2, 3]), int(block.ts[-1])).n == 3


# What is said of it


def watched(frames: list[Frame]) -> Watch:
    watch = Watch()
    for at in range(0, len(frames), 50):
        part = frames[at : at + 50]
        watch.feed(pack([data for _, data in part], [time for time, _ in part]))
    return watch


def test_status_and_log_name_the_damage_and_the_remedy() -> None:
    frames = right_sums(gloo_job(2, seed=5))
    warm = len(frames) // 6
    damaged = frames[:warm] + injured(frames[warm:], "corrupt=0.02,seed=1", "0")
    hit = sum(a != b for a, b in zip(frames, damaged, strict=True))
    status = watched(damaged).told()
    lost = sum(len(frame) - 54 for (_, frame), other in zip(frames, damaged, strict=True) if (_, frame) != other)
    assert status["bytes"] == {**dict.fromkeys(status["bytes"], 0), DAMAGED: lost} and lost > 10_000
    assert "Frames came damaged" in status["likely"] and "optics" in status["remedy"]
    sums = status["checksums"]["tcp"]
    assert (sums["bad"], sums["refused"], sums["unchecked"]) == (hit, hit, 0) and sums["ok"] > 100
    assert status["checksums"]["icrc"] == dict.fromkeys(sums, 0)


def test_damage_that_another_mirror_made_up_for_is_told_all_the_same() -> None:
    frames = right_sums(gloo_job(2, seed=5))
    at = next(i for i in range(len(frames) // 2, len(frames)) if len(frames[i][1]) > 1000)
    watch = watched([*frames[:at], (frames[at][0], flipped(frames[at][1], -1)), *frames[at:]])
    status = watch.told()
    assert status["total"] == 0 and status["kinds"] == [] and status["likely"] == ""
    (line,) = watch.said
    assert line.startswith("1 frames refused so far, nothing lost by it: Frames came damaged")
    watch.look()
    assert len(watch.said) == 1


def test_a_pipeline_without_checksums_judges_nothing() -> None:
    frames = right_sums(gloo_job(2, seed=5, tags=2))
    pipeline = Pipeline(Limits(256, 1 << 22, 1 << 26), Waits(), checksums=False)
    pipeline.feed(pack([data for _, data in frames], [time for time, _ in frames]), frames[-1][0])
    counters = pipeline.counters()
    assert counters["checksum_ok"] == counters["checksum_bad"] == 0 < counters["checksum_unchecked"]
