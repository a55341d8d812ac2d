"""What went wrong with stored checkpoints elsewhere: a set that is not whole, and states of different steps mixed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stored_states import of_torch, same, small
from torch import nn

import flowcheck
from flowcheck.cli import main
from flowcheck.errors import NothingRestorable, VerificationFailed
from flowcheck.store import Store
from flowcheck.verify import verify

SAMPLES, BATCH, MICRO = 48, 2, 3  # samples of a pass, of a micro-batch, micro-batches of a step


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


# a set that is not whole


@pytest.mark.parametrize("lost", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_step_that_lacks_a_part_is_none_and_the_one_before_it_loads(store: Store, lost: str) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    (store.step_folder("run", epoch, 2) / lost).unlink()
    lines: list[str] = []
    same(store.load("run", skipped=lines.append), small(1))
    assert len(lines) == 1 and lost in lines[0]


def test_without_the_name_of_the_newest_step_training_does_not_start_from_nothing(store: Store) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    (store.run_folder("run") / "latest").unlink()
    assert flowcheck.load(str(store.root))["step"] == 2


def test_a_copy_that_was_cut_short_is_no_store_of_less(store: Store, tmp_path: Path) -> None:
    """`cp` or `rsync` of a store that ended early: whatever came over in whole loads, the rest is named."""
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    files = sorted(path for path in store.root.rglob("*") if path.is_file() and path.name != ".lock")
    total = sum(path.stat().st_size for path in files)
    for part in range(0, 20):
        copy = tmp_path / "copy"
        left = total * part // 20
        for path in files:
            target = copy / path.relative_to(store.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            if left > 0:
                target.write_bytes(data[:left])
            left -= len(data)
        try:
            state = flowcheck.client.snapshot(str(copy))
        except NothingRestorable:
            assert part < 11
        else:
            same(state, small(state.step))
        shutil.rmtree(copy)


def test_a_step_asked_for_by_number_is_never_another_one(store: Store) -> None:
    epoch = store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step, epoch=epoch))
    os.truncate(store.step_folder("run", epoch, 2) / "model.safetensors", 50)
    with pytest.raises(VerificationFailed):
        store.load("run", 2)


# states of different steps


class Training:
    """A job that notes which samples it saw: accumulation, shuffling by pass, a schedule; its step says all."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.seen: list[int] = []
        data = torch.Generator().manual_seed(5)
        self.samples = torch.randn(SAMPLES, 4, generator=data)
        self.targets = torch.randn(SAMPLES, 1, generator=data)

    def batch(self, number: int) -> list[int]:
        """The samples of micro-batch `number`, counted from the first of the training."""
        per_pass = SAMPLES // BATCH
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(100 + number // per_pass)).tolist()
        at = number % per_pass * BATCH
        return order[at : at + BATCH]

    def run(self, first: int, last: int, dies_in: int | None = None) -> None:
        """Steps first..last; `dies_in`: the step in whose middle it ends, samples seen and nothing updated."""
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            for micro in range(MICRO):
                chosen = self.batch((step - 1) * MICRO + micro)
                self.seen += chosen
                loss = nn.functional.mse_loss(self.model(self.samples[chosen]), self.targets[chosen]) / MICRO
                loss.backward()
                if step == dies_in and micro == 1:
                    return
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 / step
            self.optimizer.step()


def samples_of(steps: range) -> list[int]:
    training = Training()
    return [s for step in steps for micro in range(MICRO) for s in training.batch((step - 1) * MICRO + micro)]


@pytest.mark.parametrize("damaged", [False, True])
def test_the_samples_go_on_where_the_restored_step_ends(
    store: Store, damaged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Crash in the middle of step 11, in the second pass over the data; where step 10 is damaged too, go on from 9."""
    whole = Training()
    whole.run(1, 16)

    job = Training()
    epoch = store.open_epoch("run")
    for step in range(1, 11):
        job.run(step, step)
        store.save(of_torch(job.model, job.optimizer, step, epoch=epoch), keep=3)
    job.run(11, 16, dies_in=11)
    if damaged:
        os.truncate(store.step_folder("run", epoch, 10) / "optimizer.safetensors", 100)
    step = 9 if damaged else 10

    with pytest.raises(SystemExit) as ended:
        main(["restore", str(store.root), "--out", str(tmp_path / "resume.pt")])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert f"go on with step {step + 1}, after the batches of the first {step} optimizer steps" in said.out
    assert ("passed over" in said.err) == damaged
    state = torch.load(tmp_path / "resume.pt")
    assert state["step"] == step
    counters = {float(entry["step"]) for entry in state["optimizer"]["state"].values()}
    assert counters == {float(step)}  # model, optimizer and label are of one step
    assert {group["lr"] for group in state["optimizer"]["param_groups"]} == {0.01 / step}

    resumed = Training(seed=9)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.run(state["step"] + 1, 16)
    done = len(samples_of(range(1, step + 1)))
    assert whole.seen[:done] + resumed.seen == whole.seen  # nothing twice, nothing left out
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        for key, value in whole.optimizer.state[p].items():
            assert torch.equal(value, resumed.optimizer.state[q][key]), key


def test_files_of_two_steps_never_make_one(store: Store) -> None:
    """Somebody copies the optimizer of one step beside the model of another: sizes fit, the checksums do not."""
    epoch = store.open_epoch("run")
    for step in (1, 2, 3):
        store.save(small(step, epoch=epoch))
    newest = store.step_folder("run", epoch, 3)
    shutil.copy(store.step_folder("run", epoch, 2) / "optimizer.safetensors", newest)
    assert any("optimizer.safetensors" in problem for problem in verify(newest).problems)
    lines: list[str] = []
    assert store.load("run", skipped=lines.append).step == 2 and "optimizer.safetensors" in lines[0]
    shutil.copy(store.step_folder("run", epoch, 2) / "manifest.json", newest)
    assert store.load("run").step == 2
