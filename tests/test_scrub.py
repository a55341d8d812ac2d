"""The scrub: the whole state compared with the trainer's in turn; differences, doubts, readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from repair_cases import VECTOR_INDEX, Training, ask_one, attached, go, lossy
from shadow_cases import raw, wrong
from test_optimizer import threads

from reconstruct.ranges import Ranges
from reconstruct.repair import Difference
from reconstruct.shadow import PinRevoked


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def scrub(loop: Training, nbytes: int = 1 << 24) -> list[Any]:
    """Once around the state; what was found."""
    found: list[Any] = []
    rounds = loop.repair.scrubbed
    while loop.repair.scrubbed == rounds:
        for part in loop.repair.ask(nbytes):
            found += loop.repair.arrived(*loop.piece(part))
    return found


@pytest.mark.parametrize("nbytes", [2000, 1 << 24])
def test_scrub_goes_through_the_whole_state(nbytes: int) -> None:
    loop = attached()
    elements = sum(slot.spec.numel for slot in loop.shadow.live.layout.slots) + 25 + 9
    for round_ in (1, 2):
        before = loop.repair.asked
        assert scrub(loop, nbytes) == []
        assert loop.repair.compared >= round_ * elements and loop.repair.scrubbed == round_
        assert (loop.repair.asked - before > 20) is (nbytes == 2000)
        go(loop)
    assert loop.repair.differences == loop.repair.repaired == 0
    assert loop.repair.bytes >= 2 * sum(d.nbytes for k, d in loop.states[2].items() if not k.endswith("/step"))


def test_scrub_finds_what_differs_and_takes_the_trainers_bytes() -> None:
    loop = attached()
    live = loop.shadow.live
    live.places("model/vector")["exp_avg"][[5, 7, 1000]] ^= 1
    live.places("model/frozen")["model"].view(np.float32)[3] += 2.0
    live.places("model/brain")["model"].view(np.uint16)[1300] = 0x7FC0  # NaN
    with loop.shadow.pin() as pin:
        found = scrub(loop)
        assert pin.revoked
        with pytest.raises(PinRevoked):
            pin.check()
    assert loop.shadow.known_step == 2  # and not since another step than before
    assert all(isinstance(one, Difference) and one.alarm and one.step == 2 for one in found)
    by_key = {one.key: one for one in found}
    one = by_key["model/vector"]
    assert (one.section, one.lo, one.hi, one.elements, one.ulps) == ("exp_avg", 5, 1001, 3, 1)
    assert one.largest < 1e-6 and 0 < one.relative < 1e-6
    assert one.text.startswith("vector (exp_avg)[5:1001] differs from the trainer's at step 2: 3 elements")
    assert by_key["model/frozen"].largest == pytest.approx(2.0) and by_key["model/frozen"].hi == 4
    assert by_key["model/brain"].largest == np.inf and by_key["model/brain"].section == "model"
    assert len(found) == 3 and loop.repair.differences == 5
    assert loop.wrong() == [] and loop.shadow.known_step == 2
    assert scrub(loop) == []
    go(loop)


def test_difference_casts_doubt_on_the_known_step_that_is_kept() -> None:
    """The value may have been wrong there already: it is not handed out any more."""
    loop = attached()
    loop.shadow.live.places("model/vector")["model"][17] ^= 1 << 20
    loop.train(lost={1: Ranges.of([(3, 4)])})
    loop.apply()
    assert loop.shadow.known_step == 2
    with loop.shadow.pin() as pin:
        loop.repair.want(["model/vector"])
        part = loop.repair.ask(1 << 24, scrub=False)[0]
        loop.answer(loop.piece(part))
        assert pin.revoked and loop.shadow.known_step is None
    assert len(loop.findings) > 0 and loop.wrong() == []
    loop.answer(loop.piece(ask_one(loop)) if not loop.repair.outstanding else loop.piece(loop.repair.outstanding[0]))
    assert loop.shadow.known_step == 3 and loop.wrong() == []


def test_scrub_brings_forward_and_compares_there() -> None:
    loop = attached()
    pieces = [loop.piece(part) for part in loop.repair.ask(1 << 24)]
    loop.shadow.live.places("model/vector")["model"][17] ^= 1 << 20
    for lost in ({}, {VECTOR_INDEX: Ranges.of([(0, 10)])}, {}):
        loop.train(lost=lost)
        loop.apply()
    for piece in pieces:
        loop.answer(piece)
    found = [one for one in loop.findings if isinstance(one, Difference)]
    assert len(found) == len(loop.findings) and {one.section for one in found} == {"model"}
    assert (found[0].lo, found[0].hi, found[0].step) == (17, 18, 5)
    assert loop.wrong() == [] and loop.shadow.unknown.of("model/vector") == Ranges.of([(0, 10)])


def test_scrub_of_buffers_is_no_alarm() -> None:
    """Forward passes change them; their newest values are taken."""
    loop = attached()
    loop.model.turns += 1
    assert scrub(loop) == [] and loop.repair.differences == 9
    with loop.shadow.pin() as pin:
        assert pin.tensors["buffer/turns"][1].tobytes() == raw(loop.model.turns).tobytes()


def test_refresh_of_buffers_disturbs_no_reader() -> None:
    loop = attached()
    loop.model.turns += 1
    loop.repair.want(["buffer/turns"])
    (part,) = loop.repair.ask(1 << 24, scrub=False)
    with loop.shadow.pin() as pin:
        loop.answer(loop.piece(part))
        assert not pin.revoked and loop.repair.outstanding == [part]
        go(loop)
        assert not pin.revoked and loop.repair.outstanding == [] and loop.findings == []
    assert loop.repair.differences == 9 and not loop.repair.wanting


def test_jobs_that_are_not_exact_are_refreshed_without_alarm() -> None:
    """Kernels of another kind round otherwise. Readers keep what they hold: the refresh waits for the next step."""
    loop = attached(torch_version="1.0")
    live = loop.shadow.live
    live.places("model/vector")["model"][3] ^= 1
    live.places("model/matrix")["model"][3] ^= 1
    with loop.shadow.pin() as pin:
        parts = {part.key: part for part in loop.repair.ask(1 << 24)}
        held = loop.repair.outstanding
        for part in parts.values():
            loop.answer(loop.piece(part))
        assert not pin.revoked and loop.findings == []
        assert {part.key for part in loop.repair.outstanding} == {"model/vector", "model/matrix"} and len(held) > 2
        loop.train(without=(1,))
        loop.apply()
        assert not pin.revoked and loop.repair.outstanding == []
    assert [one.alarm for one in loop.findings if isinstance(one, Difference)] == [False] * len(loop.findings)
    assert {one.key for one in loop.findings} == {"model/vector", "model/matrix"} and loop.wrong() == []


def test_refresh_that_waits_for_readers_through_a_blank_step() -> None:
    loop = attached(torch_version="1.0")
    loop.shadow.live.places("model/vector")["model"][3] ^= 1
    with loop.shadow.pin():
        for part in loop.repair.ask(1 << 24):
            loop.answer(loop.piece(part))
        loop.train(blank="nothing was seen")
        loop.apply()
    assert loop.findings == [] and loop.repair.outstanding == []
    assert wrong(loop.shadow, loop.states[3]) == [] and loop.shadow.live.uncounted == frozenset()


def test_repair_of_unknown_elements_leaves_readers_alone() -> None:
    loop = lossy("AdamW")
    with loop.shadow.pin(whole=False) as live, loop.shadow.pin() as known:
        loop.answer(loop.piece(ask_one(loop)))
        assert not live.revoked and not known.revoked
        assert live.unknown.elements == 31 and not live.whole
        assert known.step == 2 and known.digest()
        with loop.shadow.pin() as newest:
            assert newest.step == 3
