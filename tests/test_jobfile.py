from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from stored_states import flip, row_major, small

from flowcheck import jobfile
from flowcheck.durable import Aborted
from flowcheck.errors import BadConfig
from flowcheck.store import Store
from flowcheck.verify import verify


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store") as opened:
        yield opened


def test_a_job_file_gives_back_description_and_memory_order(store: Store) -> None:
    epoch = store.open_epoch("run")
    state = small(0)
    tensors = {key: state.tensors[key] for key, _ in state.description.tensors()}
    path = store.job_file("run", epoch)
    jobfile.write(path, state.description, tensors)
    description, read = jobfile.read(path)
    assert description == state.description and read.keys() == tensors.keys()
    for key, (spec, data) in read.items():
        assert spec == tensors[key][0] and data.tobytes() == tensors[key][1].tobytes(), key
    raw = safetensors.numpy.load_file(path)  # one plain safetensors file
    assert raw["model/conv.weight"].tobytes() == tensors["model/conv.weight"][1].tobytes()
    assert not verify(path).problems and not verify(store.root).problems


def test_the_state_at_attach_is_restorable_before_any_step_is_stored(store: Store) -> None:
    store.open_epoch("run")
    store.save(small(500))
    epoch = store.open_epoch("run")
    state = small(20, first=20, epoch=epoch)
    tensors = {key: state.tensors[key] for key, _ in state.description.tensors()}
    jobfile.write(store.job_file("run", epoch), state.description, tensors)
    loaded = store.load("run")
    assert (loaded.epoch, loaded.step, loaded.exact) == (2, 20, True)  # not step 500 of the older timeline
    assert loaded.groups == [group.fields for group in state.description.optimizer.groups]
    assert store.find("run", 20).epoch == 2 and store.find("run", 500).epoch == 1
    store.save(small(21, first=20, epoch=epoch))
    assert store.newest("run").step == 21


def test_a_damaged_job_file_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    state = small(0)
    tensors = {key: state.tensors[key] for key, _ in state.description.tensors()}
    path = tmp_path / "job.safetensors"
    jobfile.write(path, state.description, tensors)
    original = path.read_bytes()
    chance = random.Random(3)
    for offset in [0, 9, len(original) - 1, *(chance.randrange(len(original)) for _ in range(60))]:
        flip(path, offset)
        with pytest.raises(BadConfig, match=path.name):
            jobfile.read(path)
        path.write_bytes(original)
    path.write_bytes(original.replace(b"1e-08", b"1e-07", 1))  # still JSON, still of the right size
    with pytest.raises(BadConfig, match="description is damaged"):
        jobfile.read(path)
    path.write_bytes(original[:-5])
    with pytest.raises(BadConfig, match=r"its header says"):
        jobfile.read(path)
    with pytest.raises(BadConfig, match="missing"):
        jobfile.read(tmp_path / "nowhere.safetensors")
    safetensors.numpy.save_file({"a": np.zeros(3)}, path)
    with pytest.raises(BadConfig, match="not a job file"):
        jobfile.read(path)


def test_a_job_file_takes_exactly_the_described_tensors(tmp_path: Path) -> None:
    state = small(0)
    tensors = {key: state.tensors[key] for key, _ in state.description.tensors()}
    path = tmp_path / "job.safetensors"
    for change, message in (
        ({"model/more": (row_major("float32", 1), np.zeros(4, np.uint8))}, "model/more is not in the description"),
        ({"model/frozen": (row_major("float32", 5), np.zeros(20, np.uint8))}, "model/frozen differs"),
    ):
        with pytest.raises(BadConfig, match=message):
            jobfile.write(path, state.description, tensors | change)
    with pytest.raises(BadConfig, match="model/frozen is missing"):
        jobfile.write(path, state.description, {k: v for k, v in tensors.items() if k != "model/frozen"})
    with pytest.raises(Aborted):
        jobfile.write(path, state.description, tensors, should_stop=lambda: True)
    assert list(tmp_path.iterdir()) == []


def test_markers_are_kept_in_order_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "markers.jsonl"
    assert jobfile.read_markers(path) == []
    markers = [{"step": n, "seq": 3 * n, "changed": [{"lr": 0.1 / n}, None]} for n in range(1, 50)]
    log = jobfile.MarkerLog(path, pytest.fail)
    for marker in markers:
        log.append(marker)
    log.close()
    assert jobfile.read_markers(path) == markers
    with open(path, "ab") as file:
        file.write(b'{"step": 50, "se')
    assert jobfile.read_markers(path) == markers
    lines = path.read_bytes().split(b"\n")
    lines[6] = b"{broken"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadConfig, match=r"markers.jsonl:7: not a JSON line"):
        jobfile.read_markers(path)
