"""The shadow beside real training loops: bits at every step, whole reads under load, bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from shadow_cases import (
    describe,
    differences,
    fields_of,
    fill_gradients,
    gradients_of,
    raw,
    shadow_of,
    uploads,
)

import flowcheck
from flowcheck.description import JobDescription, TensorSpec
from reconstruct.digest import digest_of, state_digest
from reconstruct.shadow import IDLE_STEPS, PinRevoked, Shadow, ShadowError
from reconstruct.upload import merged


class TinyLanguageModel(torch.nn.Module):
    """Tied embeddings, a frozen parameter, LayerNorm, a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24)
        self.position = torch.nn.Parameter(torch.randn(8, 24), requires_grad=False)
        self.norm = torch.nn.LayerNorm(24)
        self.hidden = torch.nn.Linear(24, 24)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mask @ (self.embedding(tokens) + self.position)
        return self.head(torch.tanh(self.hidden(self.norm(x))))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, 50, (4, 8), generator=generator)
        return torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


class ConvNet(torch.nn.Module):
    """Channels-last convolutions, one of them depthwise, BatchNorm, and a part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 8, 3, groups=8)
        ).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(8, 5).to(torch.bfloat16)

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        images = torch.randn(4, 3, 9, 9, generator=generator).to(memory_format=torch.channels_last)
        return self.head(self.stem(images).mean((2, 3)).to(torch.bfloat16)).float().square().mean()


MODELS = {"language model": TinyLanguageModel, "convolutions": ConvNet}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 3e-3}),
    "AdamW foreach amsgrad": ("AdamW", {"lr": 3e-3, "foreach": True, "amsgrad": True}),
    "Adam fused": ("Adam", {"lr": 3e-3, "fused": True, "weight_decay": 0.01}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


class Job:
    """A training loop whose gradients and hyper-parameters go to a shadow, as they would from the wire."""

    def __init__(self, model: str = "language model", optimizer: str = "AdamW", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.model = MODELS[model]()
        name, options = OPTIMIZERS[optimizer]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}]
        self.optimizer = getattr(torch.optim, name)(groups, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.done = 0

    def train(self) -> tuple[int, dict[int, np.ndarray | None], list[dict[str, Any]]]:
        """One step; what the shadow must be told about it."""
        self.optimizer.zero_grad()
        self.model.loss(self.generator).backward()
        gradients, fields = gradients_of(self.model), fields_of(self.optimizer)
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        return self.done, gradients, fields

    def digest(self) -> str:
        return digest_of(self.model, self.optimizer)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """bfloat16 bits depend on the trainer's thread count; these trainers have one, as under torchrun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_step_has_the_trainers_bits(model: str, optimizer: str) -> None:
    job = Job(model, optimizer)
    shadow = shadow_of(job.model, job.optimizer)
    assert shadow.step == 0 and shadow.digest() == job.digest()
    for _ in range(12):
        before = shadow.digest()
        shadow.apply(*job.train())
        assert differences(shadow, job.model, job.optimizer) == []
        assert shadow.digest() == job.digest() != before
    assert shadow.step == 12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_job_continues_from_its_own_counters(optimizer: str) -> None:
    """The attach comes at step 30 with 7 optimizer steps done: the counter is the state's, not the job's."""
    job = Job(optimizer=optimizer)
    for _ in range(7):
        job.train()
    job.done = 30
    shadow = shadow_of(job.model, job.optimizer, step=30)
    assert shadow.digest() == job.digest()
    for _ in range(3):
        shadow.apply(*job.train())
        assert differences(shadow, job.model, job.optimizer) == []
    assert shadow.step == 33
    with shadow.pin() as pin:
        counters = {k: v[1].view(np.float32)[0] for k, v in pin.tensors.items() if k.endswith("/step")}
        assert set(counters.values()) <= {10.0}


def test_state_in_other_strides_than_its_parameter() -> None:
    """An optimizer that loaded a checkpoint keeps that checkpoint's strides; values must not be mixed up."""
    job = Job("convolutions")
    for _ in range(2):
        job.train()
    for state in job.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].contiguous()
    shadow = shadow_of(job.model, job.optimizer, step=2)
    assert shadow.digest() == job.digest()
    for _ in range(2):
        shadow.apply(*job.train())
        assert shadow.digest() == job.digest()


def test_counter_in_float64() -> None:
    """torch makes float64 counters when that is the default dtype; a resumed job brings them along."""
    job = Job()
    job.train()
    for state in job.optimizer.state.values():
        state["step"] = state["step"].double()
    shadow = shadow_of(job.model, job.optimizer, step=1)
    shadow.apply(*job.train())
    assert differences(shadow, job.model, job.optimizer) == []


def test_tied_names_are_one_tensor() -> None:
    job = Job()
    description = describe(job.model, job.optimizer)
    assert {p.name: p.aliases for p in description.parameters}["embedding.weight"] == ("head.weight",)
    shadow = shadow_of(job.model, job.optimizer)
    with shadow.pin() as pin:
        assert "model/embedding.weight" in pin.tensors and "model/head.weight" not in pin.tensors


# Upload


def test_upload_in_any_order_is_complete_only_with_the_last_byte() -> None:
    job = Job()
    job.train()
    shadow = Shadow(describe(job.model, job.optimizer, 1))
    parts = [
        (key, offset, data[offset : offset + 97].tobytes())
        for key, data in uploads(job.model, job.optimizer).items()
        for offset in range(0, len(data), 97)
    ]
    order = np.random.default_rng(1).permutation(len(parts))
    assert set(shadow.missing()) == set(uploads(job.model, job.optimizer))
    for i in order[:-1]:
        shadow.load(*parts[i])
        shadow.load(*parts[i])  # sent again, equal bytes
        assert not shadow.ready
    last = parts[order[-1]]
    assert shadow.missing() == [last[0]]
    with pytest.raises(ShadowError, match="1 tensors of the attach are not complete"):
        shadow.pin()
    with pytest.raises(ShadowError, match="not complete"):
        shadow.apply(2, {}, [])
    shadow.load(last[0], last[1], last[2][:-1])
    assert not shadow.ready
    shadow.load(last[0], last[1] + len(last[2]) - 1, last[2][-1:])
    assert shadow.ready and shadow.missing() == []
    assert differences(shadow, job.model, job.optimizer) == []
    with pytest.raises(ShadowError, match="complete, attach again"):
        shadow.load(*last)


def test_upload_refuses_what_does_not_fit() -> None:
    job = Job()
    shadow = Shadow(describe(job.model, job.optimizer))
    with pytest.raises(ShadowError, match="model/none: the description has no such tensor"):
        shadow.load("model/none", 0, b"x")
    size = 24 * 4
    for offset, count in ((-1, 4), (size - 3, 4), (size + 1, 0), (0, size + 1)):
        with pytest.raises(ShadowError, match=rf"norm.bias: bytes {offset}\.\."):
            shadow.load("model/norm.bias", offset, bytes(count))
    shadow.load("model/norm.bias", 8, bytes(16))
    with pytest.raises(ShadowError, match=r"norm.bias: bytes 8\.\.24 came twice and differ"):
        shadow.load("model/norm.bias", 0, b"\1" * size)


def test_ranges_merge() -> None:
    ranges: list[tuple[int, int]] = []
    for lo, hi in ((10, 20), (30, 40), (0, 5), (20, 25), (5, 5), (50, 60), (24, 31)):
        ranges = merged(ranges, lo, hi)
    assert ranges == [(0, 5), (10, 40), (50, 60)]
    assert merged(ranges, 0, 60) == [(0, 60)]


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    job = Job()
    job.train()

    def broken(key: str, spec: TensorSpec | None) -> JobDescription:
        description = describe(job.model, job.optimizer, 1)
        entry = description.optimizer.state["norm.weight"]
        if spec is None:
            del entry[key]
        else:
            entry[key] = spec
        return description

    for key, spec in (
        ("exp_avg", None),
        ("exp_avg", TensorSpec("float32", (23,), (1,))),
        ("exp_avg_sq", TensorSpec("bfloat16", (24,), (1,))),
        ("step", TensorSpec("int64", (), ())),
        ("momentum_buffer", TensorSpec("float32", (24,), (1,))),
    ):
        with pytest.raises(ShadowError, match=r"norm\.weight"):
            Shadow(broken(key, spec))


# What a step is refused for


def test_steps_that_do_not_fit_change_nothing() -> None:
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    before = shadow.digest()
    _, gradients, fields = job.train()
    short = {**gradients, 0: gradients[0][:-1]}
    shifted = np.zeros(gradients[0].nbytes + 1, np.uint8)[1:]
    for step, given, groups, reason in (
        (2, gradients, fields, "step 2 cannot follow step 0"),
        (1, {k: v for k, v in gradients.items() if k != 2}, fields, "no gradient for parameter norm.bias"),
        (1, short, fields, "gradient of embedding.weight: not 4800"),
        (1, {**gradients, 0: shifted}, fields, "embedding.weight: not aligned"),
        (1, gradients, fields[:1], "1 param groups instead of 2"),
        (1, gradients, [{k: v for k, v in f.items() if k != "lr"} for f in fields], "group 0 lacks lr"),
        (1, gradients, [{**f, "fused": True} for f in fields], "changed its implementation"),
    ):
        with pytest.raises(ShadowError, match=reason):
            shadow.apply(step, given, groups)
        assert shadow.step == 0 and shadow.digest() == before
    shadow.apply(1, gradients, fields)
    assert shadow.digest() == job.digest()


def test_failure_in_the_middle_of_a_step_is_never_readable() -> None:
    """torch meets a bad field only when it reaches the group: the first group is at the new step by then."""
    job = Job()
    shadow = shadow_of(job.model, job.optimizer)
    before = shadow.digest()
    step, gradients, fields = job.train()
    bad = [fields[0], {**fields[1], "betas": "no"}]  # two values, no numbers
    pin = shadow.pin()
    with pytest.raises(TypeError):
        shadow.apply(step, gradients, bad)  # out of place: the pinned and live step is unharmed
    assert pin.digest() == before and shadow.copies == 0
    shadow.apply(step, gradients, fields)
    assert shadow.digest() == job.digest() and pin.digest() == before
    pin.release()
    step, gradients, fields = job.train()
    with pytest.raises(TypeError):
        shadow.apply(step, gradients, [fields[0], {**fields[1], "betas": "no"}])
    assert not shadow.ready
    with pytest.raises(ShadowError, match="step 2 failed half way"):
        shadow.pin()
    with pytest.raises(ShadowError, match="step 2 failed half way"):
        shadow.apply(step, gradients, fields)


# Pins


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


def test_element() -> None:
    job = Job("convolutions")
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train())
    for name, size in (("stem.0.weight", 4), ("head.weight", 2)):
        data = raw(dict(job.model.named_parameters())[name]).tobytes()
        assert shadow.element(f"model/{name}", 5) == data[5 * size : 6 * size]


# Digest


def test_digest_sees_every_bit_and_nothing_else() -> None:
    job = Job("convolutions")
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train())
    reference = job.digest()
    assert flowcheck.digest(job.model, job.optimizer) == reference == shadow.digest()
    with shadow.pin() as pin:
        for key, (_, view) in pin.tensors.items():
            for byte, bit in ((0, 1), (len(view) - 1, 128)):
                view[byte] ^= bit
                assert (shadow.digest() == reference) is key.startswith("buffer/"), key
                view[byte] ^= bit
    assert shadow.digest() == reference
    shuffled = dict(reversed(list(pin.tensors.items())))
    assert state_digest(shuffled) == reference


def test_digest_names_what_bytes_alone_do_not() -> None:
    data = bytes(range(24))
    base = state_digest({"model/a": (TensorSpec("float32", (2, 3), (3, 1)), data)})
    for key, spec in (
        ("model/b", TensorSpec("float32", (2, 3), (3, 1))),
        ("model/a", TensorSpec("int32", (2, 3), (3, 1))),
        ("model/a", TensorSpec("float32", (3, 2), (2, 1))),
        ("model/a", TensorSpec("float32", (2, 3), (1, 2))),
        ("optimizer/a/exp_avg", TensorSpec("float32", (2, 3), (3, 1))),
    ):
        assert state_digest({key: (spec, data)}) != base
    one, other = TensorSpec("float32", (1, 6), (6, 1)), TensorSpec("float32", (1, 6), (1, 1))
    assert state_digest({"model/a": (one, data)}) == state_digest({"model/a": (other, data)})


def test_digest_of_refuses_what_it_cannot_name() -> None:
    model = torch.nn.Linear(3, 2)
    stranger = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *stranger.parameters()])
    fill_gradients(stranger, torch.Generator().manual_seed(0))
    optimizer.step()
    with pytest.raises(ValueError, match="not in the model"):
        digest_of(model, optimizer)
    gaps = torch.nn.Module()
    gaps.weight = torch.nn.Parameter(torch.zeros(4, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"weight: strides \(6, 2\) leave gaps"):
        digest_of(gaps, torch.optim.SGD(gaps.parameters(), lr=0.1))
