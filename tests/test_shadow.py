"""The shadow beside real training loops: bits at every step, whole uploads, steps that must be refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from shadow_cases import MODELS, OPTIMIZERS, Job, describe, differences, raw, shadow_of, uploads

from flowcheck.description import JobDescription, TensorSpec
from reconstruct.shadow import Shadow, ShadowError
from reconstruct.upload import merged


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


def test_element() -> None:
    job = Job("convolutions")
    shadow = shadow_of(job.model, job.optimizer)
    shadow.apply(*job.train())
    for name, size in (("stem.0.weight", 4), ("head.weight", 2)):
        data = raw(dict(job.model.named_parameters())[name]).tobytes()
        assert shadow.element(f"model/{name}", 5) == data[5 * size : 6 * size]
