"""The description: exact round trips, and errors that name the field."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.description import (
    BufferSpec,
    DdpSpec,
    DescriptionError,
    GroupRecord,
    GroupSpec,
    JobDescription,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
    check_run_name,
    decode_value,
    encode_value,
)


def job() -> JobDescription:
    weight = TensorSpec("float32", (4, 3, 2, 2), (12, 1, 6, 3))  # channels-last
    bias = TensorSpec("bfloat16", (4,), (1,))
    scalar = TensorSpec("float32", (), ())
    return JobDescription(
        run="run-1",
        step=7,
        world_size=2,
        torch_version="2.13.0",
        arch="x86_64",
        cpu_capability="AVX2",
        device="cpu",
        parameters=[ParameterSpec("conv.weight", weight, 0, ("tied",)), ParameterSpec("conv.bias", bias, 1)],
        buffers=[BufferSpec("norm.count", TensorSpec("int64", (), ()), True)],
        optimizer=OptimizerSpec(
            "AdamW",
            [GroupSpec(("conv.weight", "conv.bias"), {"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None})],
            {"conv.weight": {"step": scalar, "exp_avg": weight}},
        ),
        ddp=DdpSpec(False, False, True, True, 26214400, True, (), None, ((1,), (0,)), None, (8, 192)),
        group=GroupRecord(
            "0", 2, [{0: ("10.0.0.1", 4000), 1: ("fd00::2", 4001)}], 5, [(0, "10.0.0.1", 4000, "10.0.0.2", 9)]
        ),
        scheduler={"class": "MultiStepLR", "state": {"milestones": {3: 1}, "factor": float("inf")}},
    )


def test_round_trip_through_text_is_exact() -> None:
    original = job()
    text = json.dumps(original.to_json(), allow_nan=False)
    assert JobDescription.from_json(text) == original
    assert JobDescription.from_json(text.encode()) == original
    copy = JobDescription.from_json(json.loads(text))
    assert copy == original
    assert isinstance(copy.optimizer.groups[0].fields["betas"], tuple)
    assert copy.scheduler is not None and copy.scheduler["state"]["milestones"] == {3: 1}


whole = st.integers(-(1 << 63), (1 << 63) - 1)
plain = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | whole | st.booleans(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and, for floats, in every bit (any NaN equals any NaN)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        if math.isnan(one):
            return math.isnan(other)
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    return bool(one == other)


@given(plain)
def test_values_keep_type_and_bits(value: Any) -> None:
    text = json.dumps(encode_value(value), allow_nan=False)
    assert same(decode_value(json.loads(text)), value)


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}, 1j])
def test_values_without_a_form_are_refused(value: Any) -> None:
    with pytest.raises(DescriptionError, match=r"^lr\[1\]"):
        encode_value([1, value], "lr")


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_deep_values_are_refused_both_ways() -> None:
    with pytest.raises(DescriptionError, match="nested deeper"):
        encode_value(deep(50))
    with pytest.raises(DescriptionError, match="nested deeper"):
        decode_value(deep(50))


DROP = object()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("version", 3, "description.version"),
        ("run", "../etc", "run"),
        ("run", ".hidden", "run"),
        ("run", "a" * 65, "run"),
        ("step", -1, "description.step"),
        ("step", True, "description.step"),
        ("step", 1.5, "description.step"),
        ("step", DROP, "description.step: missing"),
        ("device", "tpu", "description.device"),
        ("extra", 1, "description.extra: unknown"),
        ("parameters", {}, "description.parameters"),
        ("parameters.0.index", 1, "DDP indices"),
        ("parameters.1.name", "conv.weight", "occurs twice"),
        ("parameters.1.name", "tied", "occurs twice"),
        ("parameters.0.name", "n" * 2000, "description.parameters[0].name"),
        ("parameters.0.spec.dtype", "float33", "description.parameters[0].spec.dtype"),
        ("parameters.0.spec.shape", [4, 3, 2, 1 << 60], "description.parameters[0].spec.shape"),
        ("parameters.0.spec.shape", [4, 3, 2, -2], "description.parameters[0].spec.shape[3]"),
        ("parameters.0.spec.stride", [12, 1, 6], "description.parameters[0].spec.stride"),
        ("parameters.0.spec.stride", [12, 1, 6, 4], "description.parameters[0].spec.stride"),
        ("buffers.0.persistent", 1, "description.buffers[0].persistent"),
        ("optimizer.name", "Muon", "description.optimizer.name"),
        ("optimizer.groups.0.parameters", ["conv.weight", "gone"], "description.optimizer.groups[0].parameters"),
        ("optimizer.groups.0.fields", [1], "description.optimizer.groups[0].fields"),
        ("optimizer.groups.0.fields.betas", {"__tuple__": 1}, "fields.betas"),
        ("optimizer.state.gone", {}, "description.optimizer.state.gone"),
        ("optimizer.state.conv.weight", [], "description.optimizer.state.conv.weight"),
        ("ddp.initial_buckets", [[0]], "description.ddp.initial_buckets"),
        ("ddp.initial_buckets", [[0], [0, 1]], "description.ddp.initial_buckets"),
        ("ddp.rebuilt_buckets", [[0, "1"]], "description.ddp.rebuilt_buckets[0][1]"),
        ("group.world_size", 3, "description.group.world_size"),
        ("group.contexts", [[[2, "10.0.0.1", 1]]], "description.group.contexts[0][0]"),
        ("group.contexts", [[[0, "10.0.0.1", 70000]]], "description.group.contexts[0][0]"),
        ("group.sockets", [[0, "10.0.0.1"]], "description.group.sockets[0]"),
        ("scheduler", {"class": "x"}, "description.scheduler"),
    ],
)
def test_errors_name_the_field(path: str, value: Any, field: str) -> None:
    data = json.loads(json.dumps(job().to_json()))
    parts = path.split(".", 2 if path.startswith("optimizer.state") else -1)
    target = data
    for part in parts[:-1]:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if value is DROP:
        del target[parts[-1]]
    else:
        target[parts[-1]] = value
    with pytest.raises(DescriptionError) as caught:
        JobDescription.from_json(data)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"', "[" * 100_000, b"\xff\xfe"])
def test_text_that_is_no_description_is_refused(text: str | bytes) -> None:
    with pytest.raises(DescriptionError, match=r"^description"):
        JobDescription.from_json(text)


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((3, 3), (1, 1), False),
        ((1, 3), (77, 1), True),  # the stride of a dimension of one element says nothing
        ((), (), True),
        ((0, 5), (9, 9), True),
        ((4, 3, 2, 2), (12, 1, 6, 3), True),
    ],
)
def test_dense(shape: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert TensorSpec("float32", shape, stride).dense is dense


def test_tensors_come_in_upload_order_and_reduced_in_ddp_order() -> None:
    description = job()
    assert [key for key, _ in description.tensors()] == [
        "model/conv.weight",
        "model/conv.bias",
        "buffer/norm.count",
        "optimizer/conv.weight/step",
        "optimizer/conv.weight/exp_avg",
    ]
    description.parameters[0].index, description.parameters[1].index = 1, 0
    assert [parameter.name for parameter in description.reduced()] == ["conv.bias", "conv.weight"]


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "x" * 64, "_", "-"])
def test_run_names(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a b", "a\n", "x" * 65, "é", None, 3])
def test_run_names_that_are_no_folder_names(name: Any) -> None:
    with pytest.raises(DescriptionError):
        check_run_name(name)


def test_light_modules_import_neither_torch_nor_numba() -> None:
    code = (
        "import sys, flowcheck, flowcheck.description, flowcheck.client, flowcheck.server;"
        "flowcheck.__version__; flowcheck.load;"
        "print([name for name in ('torch', 'numba', 'scapy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
