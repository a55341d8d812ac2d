"""Slices and checksums of live tensors, without a job: copies stay while training goes on, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from test_attach import memory_bytes
from torch import nn

from flowcheck.describe import Live
from flowcheck.livestate import LiveState, Unreadable
from flowcheck.protocol import CHUNK
from flowcheck.specs import BufferSpec, ParameterSpec, TensorSpec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 5).t())
        self.b = nn.Parameter(torch.randn(4, 1, 3).bfloat16())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
        self.register_buffer("count", torch.tensor(7))


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def live_state(net: nn.Module, rank: int = 0) -> LiveState:
    parameters = [ParameterSpec(name, spec(p), i) for i, (name, p) in enumerate(net.named_parameters())]
    buffers = [BufferSpec(name, spec(b.contiguous()), True) for name, b in net.named_buffers()]
    live: Any = SimpleNamespace(
        model=SimpleNamespace(module=net),
        parameters=list(net.parameters()),
        parameter_specs=parameters,
        buffer_specs=buffers,
    )
    stands_for: Live = live
    return LiveState(stands_for, rank)


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step(net, optimizer)
    return optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("key", "lo", "hi"), [("a", 0, 30), ("a", 7, 8), ("b", 3, 12)])
def test_a_copy_stays_what_it_was_while_training_goes_on(key: str, lo: int, hi: int) -> None:
    net = Net()
    optimizer = stepped(net)
    parameter = dict(net.named_parameters())[key]
    slices = live_state(net).slices(optimizer, f"model/{key}", lo, hi)
    size = parameter.element_size()
    tensors = [parameter, *(value for name, value in optimizer.state[parameter].items() if name != "step")]
    expected = b"".join(memory_bytes(tensor)[lo * size : hi * size] for tensor in tensors)
    data, counter = slices.copy()
    step(net, optimizer)
    assert data.numpy().tobytes() == expected
    assert counter is not None and counter.item() == 1.0
    assert optimizer.state[parameter]["step"].item() == 2.0
    assert [name for name, _ in slices.sections] == ["model", "exp_avg", "exp_avg_sq"]


def test_a_copy_of_values_alone_stays_too() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data, counter = live_state(net).slices(optimizer, "model/a", 0, 30).copy()
    expected = memory_bytes(net.a)
    step(net, optimizer)
    assert (data.numpy().tobytes(), counter) == (expected, None)
    assert memory_bytes(net.a) != expected


def test_buffers_are_looked_up_in_the_module() -> None:
    net = Net()
    state = live_state(net)
    net.count = torch.tensor(8)
    net.mask = torch.full((1, 4), 2.0).expand(3, 4)
    assert state.slices(None, "buffer/count", 0, 1).copy()[0].numpy().tobytes() == (8).to_bytes(8, "little")
    assert state.slices(None, "buffer/mask", 5, 7).copy()[0].view(torch.float32).tolist() == [2.0, 2.0]
    net.count = torch.tensor(8.0)
    with pytest.raises(Unreadable, match=r"buffer/count is float32 .* it was int64"):
        state.slices(None, "buffer/count", 0, 1)
    del net.count
    with pytest.raises(Unreadable, match="count is no longer there"):
        state.slices(None, "buffer/count", 0, 1)


def test_what_has_changed_since_the_attach_is_refused() -> None:
    net = Net()
    optimizer = stepped(net)
    state = live_state(net)
    net.a.data = net.a.data.contiguous()
    with pytest.raises(Unreadable, match="model/a is float32"):
        state.slices(optimizer, "model/a", 0, 1)
    assert state.checksums(optimizer)["model/a"] is None
    optimizer.state[net.b]["exp_avg"] = 3  # type: ignore[assignment]
    with pytest.raises(Unreadable, match="exp_avg as int"):
        state.slices(optimizer, "model/b", 0, 1)


def test_strides_of_dimensions_of_size_one_say_nothing() -> None:
    net = Net()
    optimizer = stepped(net)
    held = optimizer.state[net.b]["exp_avg"]
    optimizer.state[net.b]["exp_avg"] = held.as_strided(held.shape, (3, 77, 1))
    assert live_state(net).slices(optimizer, "model/b", 0, 12).nbytes == 3 * 24
    optimizer.state[net.b]["exp_avg"] = held.as_strided(held.shape, (1, 1, 4))
    with pytest.raises(Unreadable, match="exp_avg of b"):
        live_state(net).slices(optimizer, "model/b", 0, 12)


def test_a_part_is_at_most_one_message() -> None:
    net = nn.Linear(CHUNK // 4, 1, bias=False)
    state = live_state(net)
    assert state.refusal("model/weight", 0, CHUNK // 4) is None
    larger = live_state(nn.Linear(CHUNK // 4 + 1, 1)).refusal("model/weight", 0, CHUNK // 4 + 1)
    assert f"at most {CHUNK} are given at a time" in (larger or "")
    optimizer = stepped(net)
    assert state.slices(optimizer, "model/weight", 0, CHUNK // 12).nbytes <= CHUNK
    with pytest.raises(Unreadable, match="with its state is more than"):
        state.slices(optimizer, "model/weight", 0, CHUNK // 12 + 1)


def test_a_parameter_without_elements_has_its_counter() -> None:
    net = Net()
    optimizer = stepped(net)
    state = live_state(net)
    assert state.refusal("model/none", 0, 0) is None
    data, counter = state.slices(optimizer, "model/none", 0, 0).copy()
    assert data.numel() == 0
    assert counter is not None and counter.item() == 1.0
    assert "no range 0 to 0" in (state.refusal("model/a", 0, 0) or "")


def test_checksums_are_of_the_bytes_in_memory_order() -> None:
    net = Net()
    optimizer = stepped(net)
    found = live_state(net).checksums(optimizer)
    names = {"a": net.a, "b": net.b, "none": net.none}
    expected = {f"model/{name}": parameter for name, parameter in names.items()}
    for name, parameter in names.items():
        expected |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    assert found == {key: xxhash.xxh3_128_hexdigest(memory_bytes(tensor)) for key, tensor in expected.items()}
