"""The tiled optimizer against torch's own, un-tiled: every bit of parameters and state, after every step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from shadow_cases import describe, differences, fields_of, fill_gradients, gradients_of, raw, shadow_of

from reconstruct.arena import GRAIN, TILE, ShadowError, tile_ranges
from reconstruct.exactness import exactness
from reconstruct.shadow import Shadow

SGD: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]
ADAM: list[dict[str, Any]] = [
    {"lr": 1e-3},
    {"lr": 1e-3, "weight_decay": 0.02, "amsgrad": True},
    {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "maximize": True},
]
CONFIGURATIONS = [
    *(("SGD", options) for options in SGD),
    *(("Adam", options) for options in ADAM),
    *(("AdamW", options) for options in ADAM),
]
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Shapes(torch.nn.Module):
    """Every kind of memory that a parameter may have; sizes that are no multiple of any vector length."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator, large: int = 300_044) -> None:
        super().__init__()

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        last = torch.channels_last
        self.large = torch.nn.Parameter(make(large))
        self.matrix = torch.nn.Parameter(make(257, 131).t())
        self.conv = torch.nn.Parameter(make(24, 5, 3, 3).to(memory_format=last))
        self.depthwise = torch.nn.Parameter(make(9, 1, 3, 3).to(memory_format=last))
        self.scalar = torch.nn.Parameter(make())
        self.empty = torch.nn.Parameter(make(0, 3))
        self.small = torch.nn.Parameter(make(7))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One intra-op thread unless a test says otherwise: it is the trainers' count under torchrun."""
    with threads(1):
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def example(dtype: torch.dtype, large: int = 300_044) -> tuple[Shapes, list[list[torch.Tensor]]]:
    """A model and the gradients of four steps; made once, they are dearer than the steps."""
    generator = torch.Generator().manual_seed(7)
    model = Shapes(dtype, generator, large)
    gradients = []
    for _ in range(4):
        fill_gradients(model, generator)
        gradients.append([p.grad for p in model.parameters()])
    model.zero_grad()
    return model, gradients


def run(
    name: str, options: dict[str, Any], dtype: torch.dtype, *, trainer_threads: int = 1, own_threads: int = 1
) -> Iterator[list[str]]:
    """Train and shadow side by side; yields the keys that differ after each step."""
    template, steps = example(dtype)
    model = copy.deepcopy(template)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    shadow = shadow_of(model, optimizer, threads=trainer_threads)
    for step, given in enumerate(steps, 1):
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient.clone()
        gradients = gradients_of(model)
        with threads(trainer_threads):
            optimizer.step()
        with threads(own_threads):
            shadow.apply(step, gradients, fields_of(optimizer))
        yield differences(shadow, model, optimizer)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name, options", CONFIGURATIONS, ids=lambda value: str(value)[:60])
def test_tiles_have_the_bits_of_whole_tensors(name: str, options: dict[str, Any], implementation: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        if implementation == "fused" and name == "SGD" and dtype.itemsize == 2:
            continue  # see test_fused_low_precision_sgd_is_not_called_exact
        for different in run(name, {**options, **IMPLEMENTATIONS[implementation]}, dtype):
            assert different == [], dtype


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
@pytest.mark.parametrize("name, options", [("SGD", SGD[2]), ("Adam", ADAM[1])], ids=["SGD", "Adam"])
def test_trainer_threads(name: str, options: dict[str, Any], implementation: str, count: int) -> None:
    options = {**options, **IMPLEMENTATIONS[implementation]}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if implementation == "fused" and name == "SGD" and dtype.itemsize == 2:
            continue
        for different in run(name, options, dtype, trainer_threads=count, own_threads=5 - count):
            assert different == [], dtype


@pytest.mark.parametrize("name, options", [("SGD", SGD[2]), ("AdamW", ADAM[1])], ids=["SGD", "AdamW"])
def test_resumed_state_of_tensors_with_several_tiles(name: str, options: dict[str, Any]) -> None:
    """Every tile of a resumed parameter must know the counter and its part of the moments."""
    generator = torch.Generator().manual_seed(9)
    model = Shapes(torch.float32, generator)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    for step in range(1, 6):
        if step == 4:
            shadow = shadow_of(model, optimizer, 3)
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        if step >= 4:
            shadow.apply(step, gradients, fields_of(optimizer))
            assert differences(shadow, model, optimizer) == []


def test_trainer_threads_matter_in_low_precision() -> None:
    """What the description's `threads` is for: without it a trainer with two threads has other bits."""
    generator = torch.Generator().manual_seed(7)
    model = Shapes(torch.bfloat16, generator)
    optimizer = torch.optim.SGD(model.parameters(), **SGD[2])
    shadow = shadow_of(model, optimizer, threads=1)
    for step in range(1, 9):
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        with threads(2):
            optimizer.step()
        shadow.apply(step, gradients, fields_of(optimizer))
    different = differences(shadow, model, optimizer)
    assert different and {key.split("/")[1] for key in different} <= {"large", "matrix"}


def test_comparison_notices_a_wrong_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that end anywhere give other bits in low precision: the comparison above can fail."""
    monkeypatch.setattr("reconstruct.arena.GRAIN", 1001)
    assert any("model/large" in different for different in run("SGD", SGD[2], torch.bfloat16))


@pytest.mark.parametrize("name, options", [("SGD", SGD[3]), ("AdamW", ADAM[0])], ids=["SGD", "AdamW"])
def test_mixed_dtypes_in_one_group(name: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.ModuleList([Shapes(torch.float32, generator), Shapes(torch.bfloat16, generator)])
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    shadow = shadow_of(model, optimizer)
    for step in (1, 2, 3):
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        shadow.apply(step, gradients, fields_of(optimizer))
        assert differences(shadow, model, optimizer) == []


def test_gradients_are_only_read_and_need_element_alignment_only() -> None:
    """foreach SGD with nesterov writes to .grad; the landing that the gradient lies in must not change."""
    template, steps = example(torch.float32, 5003)
    for name, options in CONFIGURATIONS:
        for extra in IMPLEMENTATIONS.values():
            model = copy.deepcopy(template)
            optimizer = getattr(torch.optim, name)(model.parameters(), **options, **extra)
            shadow = shadow_of(model, optimizer)
            for step, given in enumerate(steps[:2], 1):
                landings = {}
                for index, (parameter, gradient) in enumerate(zip(model.parameters(), given, strict=True)):
                    parameter.grad = gradient.clone()
                    memory = np.zeros(gradient.nbytes + 4, np.uint8)
                    memory[4:] = raw(gradient)
                    landings[index] = memory
                before = {index: memory.copy() for index, memory in landings.items()}
                optimizer.step()
                views = {index: memory[4:].view(np.float32) for index, memory in landings.items()}
                shadow.apply(step, views, fields_of(optimizer))
                assert differences(shadow, model, optimizer) == []
                assert all(np.array_equal(landings[i], before[i]) for i in landings)


def test_read_only_gradients() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = shadow_of(model, optimizer)
    fill_gradients(model, torch.Generator().manual_seed(1))
    gradients = gradients_of(model)
    for data in gradients.values():
        data.setflags(write=False)
    optimizer.step()
    shadow.apply(1, gradients, fields_of(optimizer))
    assert differences(shadow, model, optimizer) == []


def test_parameters_without_gradient_get_no_state() -> None:
    """grad None: no decay, no moments, no counter; the counter of each parameter is its own."""
    generator = torch.Generator().manual_seed(2)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shadow = shadow_of(model, optimizer)
    for step in range(1, 7):
        fill_gradients(model, generator)
        model[2].weight.grad = model[2].bias.grad = None
        if step % 2:
            model[1].weight.grad = None
        gradients = gradients_of(model)
        optimizer.step()
        shadow.apply(step, gradients, fields_of(optimizer))
        assert differences(shadow, model, optimizer) == []
        with shadow.pin() as pin:
            assert not any(key.startswith("optimizer/2.") for key in pin.tensors)
            assert ("optimizer/1.weight/step" in pin.tensors) == (step > 1)
    with shadow.pin() as pin:
        spec, counter = pin.tensors["optimizer/1.weight/step"]
        assert (spec.dtype, spec.shape, counter.view(np.float32).tolist()) == ("float32", (), [3.0])


def test_hyper_parameters_change_between_steps() -> None:
    """Several groups; momentum from zero to not zero (the buffer appears late) and back, lr, decay."""
    generator = torch.Generator().manual_seed(4)
    changes: list[dict[str, Any]] = [
        {"lr": 0.3},
        {"momentum": 0.9},
        {"weight_decay": 0.1, "dampening": 0.2},
        {"momentum": 0.0},
        {"momentum": 0.5, "maximize": True},
    ]
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    shadow = shadow_of(model, optimizer)
    for step, change in enumerate([{}, *changes], 1):
        optimizer.param_groups[step % 2].update(change)
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        shadow.apply(step, gradients, fields_of(optimizer))
        assert differences(shadow, model, optimizer) == []
        assert shadow.groups == fields_of(optimizer)


def test_group_order_is_by_name_not_by_position() -> None:
    """Two parameters of one shape, swapped in the second group: each keeps its own state."""
    generator = torch.Generator().manual_seed(6)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(3)])
    a, b, c = (layer.weight for layer in model)
    optimizer = torch.optim.Adam([{"params": [a]}, {"params": [c, b], "lr": 0.5}], lr=0.01)
    shadow = shadow_of(model, optimizer)
    for step in range(1, 4):
        fill_gradients(model, generator)
        gradients = gradients_of(model)
        optimizer.step()
        shadow.apply(step, gradients, fields_of(optimizer))
        assert differences(shadow, model, optimizer) == []


def test_tile_ranges() -> None:
    assert tile_ranges(0, "float32", False, 1) == ((0, 0),)
    assert tile_ranges(TILE + 1, "float32", False, 8) == ((0, TILE), (TILE, TILE + 1))
    assert tile_ranges(GRAIN + 1, "bfloat16", False, 1) == ((0, GRAIN), (GRAIN, GRAIN + 1))
    assert tile_ranges(GRAIN + 1, "bfloat16", False, 8) == ((0, 16385), (16385, GRAIN + 1))
    for numel in (1, GRAIN, 3 * GRAIN + 5, 10 * TILE + 1):
        for dtype in ("float32", "float16"):
            for count in (1, 2, 7):
                ranges = tile_ranges(numel, dtype, False, count)
                assert [r[0] for r in ranges[1:]] == [r[1] for r in ranges[:-1]]
                assert (ranges[0][0], ranges[-1][1]) == (0, numel)


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("torch_version", "2.4.0", "torch differs"),
        ("arch", "riscv64", "architecture differs"),
        ("cpu_capability", "DEFAULT", "DEFAULT kernels"),
        ("device", "cuda", "runs on cuda"),
    ],
)
def test_exactness_says_what_differs(field: str, value: str, reason: str) -> None:
    model = torch.nn.Linear(3, 2)
    description = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert exactness(description) == (True, [])
    setattr(description, field, value)
    exact, reasons = exactness(description)
    assert not exact
    assert len(reasons) == 1 and reason in reasons[0]


def test_avx2_and_avx512_count_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    description = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    description.cpu_capability = "AVX2"
    assert exactness(description) == (True, [])


def test_fused_low_precision_sgd_is_not_called_exact() -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    for options, fits in (({"fused": True}, False), ({"foreach": True}, True)):
        exact, reasons = exactness(
            describe(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options))
        )
        assert exact is fits
        assert fits or "undefined values for 2" in reasons[0]


def test_thread_count_of_low_precision_must_be_known() -> None:
    model = torch.nn.Linear(GRAIN + 1, 1, bias=False).to(torch.float16)
    description = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    description.threads = 1
    assert exactness(description) == (True, [])
    description.threads = None
    exact, reasons = exactness(description)
    assert not exact and "thread count" in reasons[0]


def test_step_of_a_job_on_cuda_runs_here() -> None:
    """torch's default on CUDA is foreach, and capturable has no CPU form; the step is made all the same."""
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    description = describe(model, optimizer)
    description.device = "cuda"
    fields = [{**group, "capturable": True} for group in fields_of(optimizer)]
    shadow = Shadow(description)
    for name, p in model.named_parameters():
        shadow.load(f"model/{name}", 0, raw(p))
    fill_gradients(model, torch.Generator().manual_seed(1))
    gradients = gradients_of(model)
    optimizer.step()
    shadow.apply(1, gradients, fields)
    assert differences(shadow, model, optimizer) == []
    assert shadow.groups == fields


def test_unsupported_parameters_are_refused_by_name() -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ShadowError, match="parameter weight: optimizing complex64"):
        Shadow(describe(model, optimizer))
