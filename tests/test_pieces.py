"""A trainer's piece of the state: where it may be cut, and its way forward beside torch's own, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repair_cases import DTYPES, training
from shadow_cases import fields_of, fill_gradients, gradients_of, raw, shadow_of
from test_optimizer import ADAM, CONFIGURATIONS, IMPLEMENTATIONS, SGD, Shapes, threads

from reconstruct import arena
from reconstruct.arena import GRAIN, VECTOR, tile_ranges, widened
from reconstruct.pieces import Forward, Piece
from reconstruct.ranges import NOTHING


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


# Cuts


@settings(deadline=None)  # the machine may be busy
@given(
    numel=st.integers(1, 3 * GRAIN),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    fused=st.booleans(),
    count=st.integers(1, 4),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_cuts_lie_where_a_vector_loop_begins(
    numel: int, dtype: str, fused: bool, count: int, ends: tuple[float, float]
) -> None:
    tiles = tile_ranges(numel, dtype, fused, count)
    lo, hi = sorted(int(end * numel) for end in ends)
    if lo == hi:
        assert widened(tiles, lo, hi) == (lo, hi)
        return
    low, high = widened(tiles, lo, hi)
    allowed = {numel, *(place for a, b in tiles for place in range(a, b, VECTOR))}
    assert {low, high} <= allowed and low <= lo < hi <= high
    assert not allowed & {*range(low + 1, lo + 1), *range(hi, high)}  # and no wider than it must be
    assert widened(tiles, low, high) == (low, high)


def test_what_no_optimizer_processes_is_cut_anywhere() -> None:
    assert widened((), 3, 7) == (3, 7)


# The way forward


def forward(
    name: str, options: dict[str, Any], dtype: torch.dtype, cuts: Any, *, trainer_threads: int = 1, steps: int = 4
) -> list[str]:
    """Train; bring pieces as of step 1 forward to the end; which of them differ from the trainer's state there."""
    generator = torch.Generator().manual_seed(7)
    model = Shapes(dtype, generator, large=2 * GRAIN + 1044)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    shadow = shadow_of(model, optimizer, threads=trainer_threads)
    pieces: list[tuple[Piece, str, int, int]] = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] *= 0.9
        fill_gradients(model, generator)
        gradients, fields = gradients_of(model), fields_of(optimizer)
        with threads(trainer_threads):
            optimizer.step()
        for piece, key, lo, hi in pieces:
            slot = shadow.live.layout.by_name[key]
            assert slot.index is not None
            data = gradients[slot.index]
            assert data is not None
            size = slot.spec.itemsize
            piece.forward(Forward(data[lo * size : hi * size].copy(), fields[0], NOTHING))
        if step == 1:
            for slot in shadow.live.layout.slots:
                for lo, hi in cuts(slot):
                    sections, counter = taken(model, optimizer, slot.name, lo, hi)
                    pieces.append((Piece(slot, lo, hi, 1, sections, counter, name, "cpu"), slot.name, lo, hi))
    different = []
    for piece, key, lo, hi in pieces:
        sections, counter = taken(model, optimizer, key, lo, hi)
        assert piece.step == steps and piece.keys == (("step",) if counter else ()) + tuple(sections)[1:]
        held = {section: data.tobytes() for section, data in piece.sections().items()}
        if held != sections or piece.counter != counter:
            different.append(f"{key}[{lo}:{hi}]")
    return different


def taken(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str, lo: int, hi: int
) -> tuple[dict[str, bytes], bytes | None]:
    parameter = dict(model.named_parameters())[name]
    state = {k: v for k, v in optimizer.state.get(parameter, {}).items() if v is not None}
    counter = raw(state.pop("step")).tobytes() if "step" in state else None
    size = parameter.element_size()
    return {k: raw(v)[lo * size : hi * size].tobytes() for k, v in {"model": parameter, **state}.items()}, counter


def allowed_cuts(slot: arena.Slot) -> list[tuple[int, int]]:
    """Parts at both ends, across tiles, as small as can be, and all of it."""
    numel = slot.spec.numel
    wanted = [(0, numel), (0, 1), (numel - 1, numel), (numel // 3, numel // 3 + 1), (numel // 5, 4 * numel // 5)]
    wanted += [(tile - 100, tile + 100) for tile, _ in slot.tiles[1:]]
    return sorted({widened(slot.tiles, max(0, lo), min(numel, hi)) for lo, hi in wanted if lo < hi or not numel})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name, options", CONFIGURATIONS, ids=lambda value: str(value)[:60])
def test_pieces_go_on_with_the_bits_of_whole_tensors(name: str, options: dict[str, Any], implementation: str) -> None:
    for dtype in DTYPES:
        if implementation == "fused" and name == "SGD" and dtype.itemsize == 2:
            continue  # see test_fused_low_precision_sgd_is_not_called_exact
        assert forward(name, {**options, **IMPLEMENTATIONS[implementation]}, dtype, allowed_cuts) == [], dtype


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("implementation", ["single", "foreach", "fused"])
@pytest.mark.parametrize("name, options", [("SGD", SGD[2]), ("Adam", ADAM[1])], ids=["SGD", "Adam"])
def test_pieces_of_trainers_with_several_threads(
    name: str, options: dict[str, Any], implementation: str, count: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if implementation == "fused" and name == "SGD" and dtype.itemsize == 2:
            continue
        options = {**options, **IMPLEMENTATIONS[implementation]}
        assert forward(name, options, dtype, allowed_cuts, trainer_threads=count) == [], dtype


def test_cuts_matter_in_low_precision() -> None:
    """A part that begins anywhere rounds otherwise: the comparison above can fail."""

    def anywhere(slot: arena.Slot) -> list[tuple[int, int]]:
        return [(17, 20_001)] if slot.name == "large" else []

    assert forward("SGD", SGD[2], torch.bfloat16, anywhere, steps=9) == ["large[17:20001]"]


def test_time_to_bring_a_large_piece_forward(capsys: pytest.CaptureFixture[str]) -> None:
    """A part of 4 MiB over ten steps, the largest that there is."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(500_000))
    loop = training("AdamW", {"lr": 1e-3}, model=model, steps=1)
    loop.attach(most_bytes=1 << 26)
    loop.repair.want(["model/weight"])
    part = loop.repair.ask(1 << 24)[0]
    piece = loop.piece(part)
    for _ in range(10):
        loop.train()
        loop.apply()
    began = time.perf_counter()
    loop.answer(piece)
    seconds = time.perf_counter() - began
    with capsys.disabled():
        print(f" {part.nbytes / 2**20:.1f} MiB, 10 steps forward: {seconds * 1e3:.0f} ms ", end="")
    assert loop.repair.compared == part.hi - part.lo and loop.findings == [] and part.nbytes > 4e6
    assert seconds < 10
