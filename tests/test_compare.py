"""`flowcheck compare`: a step against a checkpoint file, tensor by tensor; exit status 0 equal, 4 different."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from shadow_cases import Job as Training
from shadow_cases import describe, fields_of, spec_of, uploads
from torch.distributed import checkpoint

from flowcheck import formats
from flowcheck.cli import main
from flowcheck.snapshot import Snapshot
from flowcheck.store import Store


@pytest.fixture
def trained() -> Training:
    training = Training("convolutions")
    for _ in range(3):
        training.train()
    return training


def snapshot_of(training: Training) -> Snapshot:
    model, optimizer = training.model, training.optimizer
    live = {f"model/{name}": p for name, p in model.named_parameters()}
    live |= {f"buffer/{name}": b for name, b in model.named_buffers()}
    live |= {
        f"optimizer/{name}/{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    tensors = {key: (spec_of(live[key]), data) for key, data in uploads(model, optimizer).items()}
    description = describe(model, optimizer, 3)
    return Snapshot(description, "test", 1, 3, True, True, groups=fields_of(optimizer), tensors=tensors)


@pytest.fixture
def store(trained: Training, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    with Store(folder) as writer:
        writer.open_epoch("test")
        writer.save(snapshot_of(trained))
    return folder


Compare = Callable[..., tuple[int, str]]


@pytest.fixture
def compare(store: Path) -> Compare:
    def run(*arguments: Any) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["compare", str(store), *map(str, arguments)])
        return done.exit_code, done.output

    return run


def save(training: Training, path: Path, **more: Any) -> Path:
    """As a training script saves it."""
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), **more}, path)
    return path


def test_a_checkpoint_of_the_training_script(trained: Training, compare: Compare, tmp_path: Path) -> None:
    code, said = compare(save(trained, tmp_path / "saved.pt", step=3))
    tensors = len(trained.model.state_dict()) + sum(map(len, trained.optimizer.state.values()))
    assert code == 0 and f"step 3, {tensors} tensors" in said and "equal to the bit" in said


def test_what_differs_is_listed_with_its_distance(trained: Training, compare: Compare, tmp_path: Path) -> None:
    parameter = trained.model.head.weight
    with torch.no_grad():
        one = parameter.view(torch.int16)[2, 3]
        parameter.view(torch.int16)[2, 3] = one + 5
    trained.optimizer.state[trained.model.stem[0].bias]["exp_avg"][:2] *= 2
    code, said = compare(save(trained, tmp_path / "saved.pt"))
    assert code == 4
    assert "model/head.weight: 1 elements differ, by 5 ulp" in said
    assert "optimizer/stem.0.bias/exp_avg: 2 elements differ" in said and "0.5 relative" in said
    assert "2 tensors differ" in said
    code, said = compare(tmp_path / "saved.pt", "--json")
    report = json.loads(said)
    assert code == 4 and [entry["elements"] for entry in report["differing"]] == [1, 2]


def test_tensors_that_only_one_side_has_or_of_another_shape(
    trained: Training, compare: Compare, tmp_path: Path
) -> None:
    content = {"model": dict(trained.model.state_dict()), "optimizer": trained.optimizer.state_dict()}
    del content["model"]["stem.0.weight"]
    content["model"]["head.bias"] = torch.zeros(7)
    content["model"]["extra"] = torch.zeros(1)
    torch.save(content, tmp_path / "saved.pt")
    code, said = compare(tmp_path / "saved.pt")
    assert code == 4
    assert "model/stem.0.weight: only the step has it" in said and "model/extra: only the checkpoint has it" in said
    assert "model/head.bias: torch.bfloat16 (5,) and torch.float32 (7,)" in said


def test_what_restore_writes(trained: Training, store: Path, compare: Compare, tmp_path: Path) -> None:
    state = Store(store).load("test")
    formats.write_torch(state, tmp_path / "restored.pt")
    formats.write_dcp(state, tmp_path / "dcp")
    for path in (tmp_path / "restored.pt", tmp_path / "dcp"):
        code, said = compare(path)
        assert code == 0, said
    broken = formats.to_dcp(state)
    broken["model"]["head.bias"][1] += 1
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        checkpoint.save(broken, checkpoint_id=tmp_path / "other", no_dist=True)
    code, said = compare(tmp_path / "other")
    assert code == 4 and "model.head.bias: 1 elements differ" in said


@pytest.mark.parametrize(("arguments", "code", "text"), [
    (["missing.pt"], 3, "no such file"), ([__file__], 2, "no checkpoint that torch.load reads"),
    (["saved.pt", "--step", "9"], 3, "no step 9"), (["saved.pt", "--step", "x"], 2, "latest or a step number"),
    (["empty"], 2, "no checkpoint of torch.distributed"), (["--step", "3"], 2, "--step goes with a CHECKPOINT"),
    (["bare.pt"], 2, "no entry 'model'"),
])  # fmt: skip
def test_what_cannot_be_compared_is_said(
    trained: Training, compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    code: int, text: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save(trained, tmp_path / "saved.pt")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "bare.pt")
    (tmp_path / "empty").mkdir()
    assert compare(*arguments)[0] == code and text in compare(*arguments)[1]
