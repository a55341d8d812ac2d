"""Reading the shadow while steps are applied: whole steps, bounded memory, bounded waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from shadow_cases import OPTIMIZERS, Job, fields_of, fill_gradients, gradients_of, shadow_of

from reconstruct.digest import digest_of, state_digest
from reconstruct.shadow import IDLE_STEPS, PinRevoked, ShadowError


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
