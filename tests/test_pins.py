"""Reading the shadow while steps are applied: whole steps, bounded memory, bounded waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from shadow_cases import (
    OPTIMIZERS,
    Job,
    describe,
    fields_of,
    fill_gradients,
    gradients_of,
    raw,
    shadow_of,
    uploads,
    wrong,
)

from reconstruct.digest import digest_of, state_digest
from reconstruct.ranges import Ranges
from reconstruct.shadow import IDLE_STEPS, NothingKnown, PinRevoked, Shadow, ShadowError


def large_job(elements: int = 400_000) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.randn(elements, generator=generator))
    model.b = torch.nn.Parameter(torch.randn(33, generator=generator))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), generator


def test_pinned_step_stays_while_the_job_goes_on() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    single = shadow.memory_bytes
    shadow.apply(*job.train())
    pin, digest, fields = shadow.pin(), shadow.digest(), shadow.groups
    for _ in range(3):
        shadow.apply(*job.train())
        assert shadow.copies == 1
        assert pin.step == 1 and pin.digest() == digest and pin.groups == fields
    assert shadow.step == 4 and shadow.digest() == job.digest() != digest
    assert single < shadow.memory_bytes <= shadow.planned_bytes
    pin.release()
    pin.release()
    for _ in range(IDLE_STEPS):
        shadow.apply(*job.train())
    assert shadow.copies == 0 and shadow.digest() == job.digest()


def test_memory_is_at_most_two_copies_however_many_readers() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer, apply_wait=0.0)
    limit = shadow.planned_bytes
    pins = []
    for _ in range(6):
        pins += [shadow.pin() for _ in range(5)]
        shadow.apply(*job.train())
        assert shadow.memory_bytes <= limit and shadow.copies == 1
    assert [sum(pin.revoked for pin in pins if pin.step == step) for step in range(6)] == [5, 5, 5, 5, 5, 0]
    assert shadow.revoked_pins == 25
    assert shadow.digest() == job.digest()


def test_planned_bytes_is_what_training_needs() -> None:
    for optimizer in OPTIMIZERS:
        job = Job("convolutions", optimizer)
        shadow = shadow_of(job.model, job.optimizer)
        planned = shadow.planned_bytes
        shadow.apply(*job.train())
        with shadow.pin():
            shadow.apply(*job.train())
            assert shadow.memory_bytes == planned == shadow.planned_bytes


def test_slow_reader_is_cut_off_after_the_wait_and_not_before() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer, apply_wait=0.3)
    old = shadow.pin()
    shadow.apply(*job.train())
    new = shadow.pin()
    held = new.digest()
    began = time.monotonic()
    shadow.apply(*job.train())
    assert 0.3 <= time.monotonic() - began < 2.0
    assert old.revoked and not new.revoked
    with pytest.raises(PinRevoked, match="step 0 was read too slowly"):
        old.digest()
    old.release()
    assert new.digest() == held


def test_apply_goes_on_as_soon_as_a_reader_lets_go() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer, apply_wait=60.0)
    old = shadow.pin()
    shadow.apply(*job.train())
    new = shadow.pin()
    timer = threading.Timer(0.2, old.release)
    timer.start()
    began = time.monotonic()
    shadow.apply(*job.train())
    assert 0.1 < time.monotonic() - began < 10.0
    assert not old.revoked and not new.revoked
    timer.join()


def test_reads_under_load_are_whole_and_of_their_step() -> None:
    """Readers of every speed against a job at full speed: each read that is not cut is one step, whole."""
    model, optimizer, generator = large_job()
    shadow = shadow_of(model, optimizer, apply_wait=0.02)
    digests = {0: digest_of(model, optimizer)}
    stop = threading.Event()
    wrong: list[str] = []
    reads = {"whole": 0, "cut": 0}
    steps_read: set[int] = set()
    lock = threading.Lock()

    def read(pause: float) -> None:
        while not stop.is_set():
            with shadow.pin() as pin:
                step, copied, cut = pin.step, {}, False
                for key, (spec, view) in pin.tensors.items():
                    chunk = view.copy()
                    cut = pin.revoked
                    if cut:
                        break
                    copied[key] = (spec, chunk)
                    time.sleep(pause)
            with lock:
                reads["cut" if cut else "whole"] += 1
                if not cut:
                    steps_read.add(step)
                    if state_digest(copied) != digests[step]:
                        wrong.append(f"step {step}")

    readers = [threading.Thread(target=read, args=(pause,)) for pause in (0.0, 0.0005, 0.002, 0.01)]
    step = 0
    end = time.monotonic() + 60
    while time.monotonic() < end and (reads["whole"] < 150 or reads["cut"] < 3 or step < 40):
        step += 1
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        digests[step] = digest_of(model, optimizer)
        shadow.apply(step, gradients, fields_of(optimizer))
        if step == 1:
            for reader in readers:
                reader.start()
        assert shadow.copies <= 1
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert reads["whole"] >= 150 and reads["cut"] >= 3 and len(steps_read) >= 20
    assert shadow.digest() == digests[step]


def test_overwritten_bytes_are_noticed() -> None:
    """Without the check after the copy the reader would take bytes of a later step: the check is needed."""
    model, optimizer, generator = large_job(50_000)
    shadow = shadow_of(model, optimizer, apply_wait=0.0)
    pin = shadow.pin()
    first = pin.tensors["model/a"][1].copy()
    for step in (1, 2):
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        with shadow.pin():
            shadow.apply(step, gradients, fields_of(optimizer))
    assert not np.array_equal(pin.tensors["model/a"][1], first)
    assert pin.revoked
    with pytest.raises(PinRevoked):
        pin.check()


def test_pin_waits_for_a_step_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    inside, go_on = threading.Event(), threading.Event()
    original = shadow._live.optimizer.step

    def slow(*args: Any) -> None:
        inside.set()
        assert go_on.wait(10)
        original(*args)

    monkeypatch.setattr(shadow._live.optimizer, "step", slow)
    applying = threading.Thread(target=shadow.apply, args=job.train())
    applying.start()
    assert inside.wait(10)
    with pytest.raises(ShadowError, match="still being applied"):
        shadow.pin(timeout=0.05)
    threading.Timer(0.1, go_on.set).start()
    with shadow.pin(timeout=10) as pin:
        assert pin.step == 1 and pin.digest() == job.digest()
    applying.join()


# The newest step that is fully known

LOST = {1: Ranges.of([(3, 5)])}
KEY = "model/norm.weight"


def heal(shadow: Shadow, job: Job) -> None:
    """Take over what is lost, as the trainer has it now."""
    parameter = job.model.norm.weight
    state = {key: raw(value) for key, value in job.optimizer.state[parameter].items() if key != "step"}
    shadow.patch(KEY, shadow.unknown.of(KEY), {"model": raw(parameter), **state}, 0)


def test_a_loss_keeps_the_step_before_until_all_is_known_again() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer, apply_wait=0.0)
    shadow.apply(*job.train())
    digest = job.digest()
    for step in range(2, 2 + IDLE_STEPS + 3):
        shadow.apply(*job.train(), LOST if step in (2, 5) else {})
        assert (shadow.step, shadow.known_step, shadow.copies) == (step, 1, 1)
        assert shadow.memory_bytes == shadow.planned_bytes
        assert shadow.digest() is None and shadow.element(KEY, 3) is None and shadow.element(KEY, 2) is not None
        with shadow.pin() as pin, shadow.pin(whole=False) as live:
            assert (pin.step, pin.whole, pin.unknown.elements, pin.digest()) == (1, True, 0, digest)
            assert (live.step, live.whole, list(live.unknown.of(KEY))) == (step, False, [(3, 5)])
            assert live.unknown.oldest == 2
    heal(shadow, job)
    assert shadow.known_step == shadow.step and shadow.digest() == job.digest() and not shadow.unknown
    with shadow.pin() as pin:
        assert pin.step == shadow.step and pin.digest() == job.digest()
    for _ in range(IDLE_STEPS):
        assert shadow.copies == 1
        shadow.apply(*job.train())
    assert shadow.copies == 0 and shadow.digest() == job.digest() and shadow.revoked_pins == 0


def test_known_step_is_kept_for_its_readers_and_the_live_one_is_not() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer, apply_wait=0.2)
    shadow.apply(*job.train())
    known, digest = shadow.pin(), job.digest()
    shadow.apply(*job.train(), LOST)
    live = shadow.pin(whole=False)
    began = time.monotonic()
    shadow.apply(*job.train())
    assert 0.2 <= time.monotonic() - began < 10.0
    assert live.revoked and not known.revoked
    live.release()
    for _ in range(10):
        shadow.apply(*job.train())
    assert not known.revoked and known.digest() == digest and shadow.revoked_pins == 1
    heal(shadow, job)  # a newer step is known: the older one stays while its memory is not needed
    newest, held = shadow.pin(), job.digest()
    assert newest.step == shadow.step and not known.revoked
    began = time.monotonic()
    shadow.apply(*job.train(), LOST)
    assert 0.2 <= time.monotonic() - began < 10.0
    assert known.revoked and not newest.revoked and shadow.known_step == newest.step
    shadow.apply(*job.train())
    assert newest.digest() == held and not newest.revoked
    assert wrong(shadow, uploads(job.model, job.optimizer)) == []


def test_reader_that_lets_go_in_time_is_waited_for() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer, apply_wait=60.0)
    shadow.apply(*job.train(), LOST)
    live = shadow.pin(whole=False)
    timer = threading.Timer(0.2, live.release)
    timer.start()
    began = time.monotonic()
    shadow.apply(*job.train())
    assert 0.1 < time.monotonic() - began < 10.0 and not live.revoked
    timer.join()


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD nesterov"])
def test_without_a_known_step_there_is_none_to_read(optimizer: str) -> None:
    job = Job(optimizer=optimizer)
    for _ in range(2):
        job.train()
    shadow = Shadow(describe(job.model, job.optimizer, 2), known=False, apply_wait=0.0)
    with pytest.raises(NothingKnown, match=r"\d+ elements of step 2 are not known, and no older step is held"):
        shadow.pin()
    live, unknown, uncounted = shadow.pin(whole=False), shadow.unknown, shadow.live.uncounted
    shadow.apply(*job.train())  # nothing is to be kept: the readers have the second set of memory
    assert not live.revoked and live.step == 2 and shadow.known_step is None and shadow.copies == 1
    assert (shadow.unknown, shadow.live.uncounted) == (unknown, uncounted)
    assert bool(uncounted) is (optimizer == "AdamW")
    live.release()
    expected = uploads(job.model, job.optimizer)
    for slot in shadow.live.layout.slots:  # all of it is repaired
        state = {key: f"optimizer/{slot.name}/{key}" for key in shadow.live.state_keys.get(slot.name, ())}
        counter = expected[state.pop("step")].tobytes() if "step" in state else None
        sections = {key: expected[name] for key, name in {"model": f"model/{slot.name}", **state}.items()}
        shadow.patch(f"model/{slot.name}", slot.elements, sections, 0, counter)
    shadow.patch("buffer/mask", shadow.unknown.of("buffer/mask"), {"model": expected["buffer/mask"]}, 0)
    assert shadow.known_step == 3
    with shadow.pin():
        shadow.apply(*job.train())  # into memory that held an unknown step
    assert shadow.known_step == 4 and not shadow.unknown and shadow.digest() == job.digest()
    for _ in range(IDLE_STEPS):
        shadow.apply(*job.train())
    assert shadow.copies == 0 and shadow.memory_bytes <= shadow.planned_bytes


def test_known_step_can_be_read_while_the_next_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train(), LOST)
    inside, go_on = threading.Event(), threading.Event()
    original = shadow._live.optimizer.step

    def slow(*args: Any) -> None:
        inside.set()
        assert go_on.wait(10)
        original(*args)

    monkeypatch.setattr(shadow._live.optimizer, "step", slow)
    applying = threading.Thread(target=shadow.apply, args=job.train())
    applying.start()
    assert inside.wait(10)
    with shadow.pin(timeout=0.0) as pin:
        assert pin.step == 0
    with pytest.raises(ShadowError, match="still being applied"):
        shadow.pin(timeout=0.05, whole=False)
    go_on.set()
    applying.join()


def test_readers_of_elements_that_a_patch_changes_lose_their_pins() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train())
    values = {section: np.zeros(24, np.float32) for section in ("model", "exp_avg", "exp_avg_sq")}
    with shadow.pin() as pin:
        shadow.patch(KEY, Ranges.of([(3, 5)]), values, 0)
        assert pin.revoked and shadow.element(KEY, 4) == bytes(4) and shadow.element(KEY, 5) != bytes(4)


def test_patch_that_does_not_fit_changes_nothing() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train(), LOST)
    before = wrong(shadow, uploads(job.model, job.optimizer)), shadow.unknown
    data = np.zeros(24, np.float32)
    good = {"model": data, "exp_avg": data, "exp_avg_sq": data}
    for ranges, sections, start in (
        ([(3, 5)], {"model": data}, 0),
        ([(3, 5)], {**good, "other": data}, 0),
        ([(3, 5)], good, 4),
        ([(3, 25)], good, 0),
        ([(3, 5)], {**good, "exp_avg": data[:4]}, 0),
    ):
        with pytest.raises(ShadowError, match=KEY):
            shadow.patch(KEY, Ranges.of(ranges), sections, start)
    assert (wrong(shadow, uploads(job.model, job.optimizer)), shadow.unknown) == before
    fresh = Shadow(describe(job.model, job.optimizer, 1), known=False)
    with pytest.raises(ShadowError, match="counter None"):
        fresh.patch(KEY, Ranges.of([(0, 24)]), good, 0)


def test_known_steps_are_whole_under_load_and_losses() -> None:
    """Readers of the newest known step beside losses, repairs and blank steps at full speed."""
    model, optimizer, generator = large_job(120_000)
    shadow = shadow_of(model, optimizer, apply_wait=0.005)
    digests = {0: digest_of(model, optimizer)}
    stop = threading.Event()
    outcomes: list[tuple[int, bool, bool]] = []

    def read(pause: float) -> None:
        while not stop.is_set():
            with shadow.pin() as pin:
                copied = {}
                for key, (spec, view) in pin.tensors.items():
                    copied[key] = (spec, view.copy())
                    time.sleep(pause)
                cut = pin.revoked
                outcomes.append((pin.step, cut, cut or state_digest(copied) == digests[pin.step]))

    readers = [threading.Thread(target=read, args=(pause,)) for pause in (0.0, 0.002, 0.01)]
    for reader in readers:
        reader.start()
    step = 0
    end = time.monotonic() + 60
    while time.monotonic() < end and (len(outcomes) < 150 or step < 60):
        step += 1
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        digests[step] = digest_of(model, optimizer)
        lost = {0: Ranges.of([(step * 100, step * 100 + 50)])} if step % 3 == 0 else {}
        if step % 10 == 0:
            shadow.skip(step, fields_of(optimizer))
        else:
            shadow.apply(step, gradients, fields_of(optimizer), lost)
        if step % 3 == 2:
            for name, parameter in model.named_parameters():
                state = {key: raw(value) for key, value in optimizer.state[parameter].items() if key != "step"}
                key = f"model/{name}"
                shadow.patch(key, shadow.unknown.of(key), {"model": raw(parameter), **state}, 0)
            assert shadow.known_step == step
    stop.set()
    for reader in readers:
        reader.join()
    assert len(outcomes) >= 150 and all(good for _, _, good in outcomes)
    assert len({number for number, cut, _ in outcomes if not cut}) >= 15
