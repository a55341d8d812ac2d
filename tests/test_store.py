from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from stored_states import flip, pattern, plain, same, small, unfinished

from flowcheck import tensorfile
from flowcheck.description import DescriptionError, TensorSpec
from flowcheck.errors import FlowcheckError, NothingRestorable, UsageError, VerificationFailed
from flowcheck.store import Store, read_latest
from flowcheck.verify import verify

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store") as opened:
        yield opened


def filled(store: Store, steps: list[int], run: str = "run", **options) -> int:
    epoch = store.open_epoch(run)
    for step in steps:
        store.save(small(step, run=run, epoch=epoch), **options)
    return epoch


# what is written


def test_a_saved_step_comes_back_in_every_field_and_byte(store: Store) -> None:
    filled(store, [7])
    loaded = store.load("run", 7)
    same(loaded, small(7))
    assert isinstance(loaded.groups[0]["betas"], tuple)
    assert "buffer/mask" not in loaded.tensors  # not persistent: no part of a state_dict


def test_the_files_load_with_plain_safetensors(store: Store) -> None:
    filled(store, [7])
    folder = store.step_folder("run", 1, 7)
    state = small(7)
    # numpy has no bfloat16: its reader is given the file of the optimizer state without it
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert names == {
            "wte.weight", "conv.weight", "half", "brain", "wide", "scale", "empty", "frozen",
            "bn.running_mean", "bn.num_batches_tracked",
        }  # fmt: skip
        assert file.metadata()["head.weight"] == "wte.weight"  # as safetensors' own load_model expects it
        conv = file.get_tensor("conv.weight")
        scale = file.get_tensor("scale")
    spec, raw = state.tensors["model/conv.weight"]
    expected = np.lib.stride_tricks.as_strided(raw.view(np.float32), spec.shape, [4 * s for s in spec.stride])
    assert conv.tobytes() == expected.tobytes() and conv.shape == spec.shape
    assert scale.shape == () and scale.tobytes() == state.tensors["model/scale"][1].tobytes()
    with safetensors.safe_open(folder / "optimizer.safetensors", "np") as file:
        assert "optimizer.state.wte.weight.exp_avg" in file.keys()  # noqa: SIM118
        moment = file.get_tensor("optimizer.state.half.exp_avg_sq")
    assert moment.tobytes() == state.tensors["optimizer/half/exp_avg_sq"][1].tobytes()


def test_a_stateless_optimizer_still_gives_a_loadable_file(store: Store) -> None:
    epoch = store.open_epoch("run")
    folder = store.save(plain(3, 4096, epoch=epoch))
    assert safetensors.numpy.load_file(folder / "optimizer.safetensors") == {}
    same(store.load(), plain(3, 4096))


def test_the_manifest_names_what_a_reader_needs(store: Store) -> None:
    filled(store, [7])
    manifest = json.loads((store.step_folder("run", 1, 7) / "manifest.json").read_text())
    assert (manifest["run"], manifest["epoch"], manifest["step"]) == ("run", 1, 7)
    assert manifest["confirmed"] is False and manifest["exact"] is False and len(manifest["reasons"]) == 1
    assert manifest["not_covered"] == ["bn.running_mean"]
    assert manifest["aliases"] == {"head.weight": "wte.weight"}
    record = manifest["tensors"]["model/conv.weight"]
    assert record["file"] == "model.safetensors" and record["stride"] == [24, 1, 6, 3]
    stored = (store.step_folder("run", 1, 7) / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"]["size"] == len(stored)


@pytest.mark.parametrize("chunk", [64, 1 << 10, 8 << 20])
def test_any_stride_survives_any_chunk_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "CHUNK", chunk)
    for spec in (
        TensorSpec("float32", (5, 3, 4, 2), (24, 1, 6, 3)),
        TensorSpec("float16", (40, 30), (1, 40)),
        TensorSpec("float64", (3, 5, 7), (5, 1, 15)),
        TensorSpec("bool", (1, 9, 1), (77, 1, 5)),
        TensorSpec("complex64", (6, 2), (1, 6)),
    ):
        data = pattern(spec, 1, 2)
        chunks = list(tensorfile.row_major_chunks(spec, data))
        assert all(len(piece) <= chunk for piece in chunks)
        turned = np.frombuffer(b"".join(chunks), np.uint8)
        words = np.dtype(f"u{spec.itemsize}")
        expected = np.lib.stride_tricks.as_strided(
            data.view(words), spec.shape, [spec.itemsize * s for s in spec.stride]
        )
        assert turned.tobytes() == expected.tobytes()
        assert tensorfile.to_memory_order(spec, turned).tobytes() == data.tobytes()


def test_a_snapshot_that_is_not_whole_is_refused_and_leaves_nothing(store: Store) -> None:
    epoch = store.open_epoch("run")
    for key in ("model/frozen", "buffer/bn.running_mean"):
        state = small(1, epoch=epoch)
        del state.tensors[key]
        with pytest.raises(FlowcheckError, match=key):
            store.save(state)
    assert store.steps("run", epoch) == [] and unfinished(store.root) == []


# epochs, latest, retention


def test_each_attach_gets_its_own_epoch_and_no_timeline_touches_another(store: Store) -> None:
    assert filled(store, [100, 200, 300], keep=2) == 1
    assert filled(store, [50, 60, 70], keep=2) == 2
    assert store.steps("run", 1) == [200, 300] and store.steps("run", 2) == [60, 70]
    found = store.newest("run")
    assert (found.epoch, found.step) == (2, 70)
    assert read_latest(store.run_folder("run") / "latest") == (2, 70)
    assert store.find("run", 300).epoch == 1
    same(store.load("run", 300), small(300))


def test_of_two_timelines_with_the_same_step_the_newer_is_taken(store: Store) -> None:
    filled(store, [10])
    filled(store, [10])
    assert store.find("run", 10).epoch == 2
    assert store.find("run", 10, epoch=1).epoch == 1


def test_retention_keeps_the_last_steps_and_latest_never_dangles(store: Store) -> None:
    epoch = store.open_epoch("run")
    for step in range(8):
        store.save(small(step, epoch=epoch), keep=3)
        named = read_latest(store.run_folder("run") / "latest")
        assert named == (epoch, step) and store.step_folder("run", *named).is_dir()
    assert store.steps("run", epoch) == [5, 6, 7] and unfinished(store.root) == []


def test_retention_does_not_count_a_damaged_step_as_one_to_fall_back_on(store: Store) -> None:
    epoch = filled(store, [1, 2, 3])
    (store.step_folder("run", epoch, 3) / "model.safetensors").unlink()
    store.save(small(4, epoch=epoch), keep=2)
    assert store.steps("run", epoch) == [2, 3, 4]  # 2 and 4 are the last two whole ones
    store.save(small(5, epoch=epoch), keep=2)
    assert store.steps("run", epoch) == [4, 5]


def test_a_step_saved_again_stays_and_a_damaged_one_is_replaced(store: Store) -> None:
    epoch = filled(store, [1])
    folder = store.step_folder("run", epoch, 1)
    before = (folder / "manifest.json").stat().st_ino
    released = []
    store.save(small(1, epoch=epoch), copied=lambda: released.append(1))
    assert (folder / "manifest.json").stat().st_ino == before and released == [1]
    os.truncate(folder / "optimizer.safetensors", 100)
    store.save(small(1, epoch=epoch))
    same(store.load("run", 1), small(1))
    assert unfinished(store.root) == []


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", ".hidden", "a\0b", "x" * 65, "a\n"])
def test_a_run_name_that_is_a_path_is_refused(store: Store, name: str) -> None:
    with pytest.raises(DescriptionError):
        store.open_epoch(name)
    with pytest.raises(DescriptionError):
        store.load(name)
    with pytest.raises(DescriptionError):
        store.save(small(1, run=name))
    assert not store.root.exists()


def test_one_writer_a_run_and_any_number_of_readers(store: Store) -> None:
    filled(store, [1])
    with Store(store.root) as other:
        with pytest.raises(FlowcheckError, match="another flowcheck writes run run"):
            other.open_epoch("run")
        assert other.newest().step == 1
        assert other.open_epoch("second") == 1  # runs are locked one by one
    store.close()
    with Store(store.root) as other:
        assert other.open_epoch("run") == 2


def test_readers_get_whole_steps_while_the_writer_removes_old_ones(store: Store) -> None:
    epoch = filled(store, [0])
    done = threading.Event()
    seen: list[list[int]] = [[], []]
    failures: list[BaseException] = []

    def read(steps: list[int]) -> None:
        try:
            while not done.is_set():
                state = Store(store.root).load("run")
                same(state, small(state.step))
                steps.append(state.step)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(steps,)) for steps in seen]
    for reader in readers:
        reader.start()
    step = 0
    while step < 500 and not failures and (step < 20 or min(len(set(steps)) for steps in seen) < 5):
        step += 1
        store.save(small(step, epoch=epoch), keep=1)
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []
    for steps in seen:
        assert steps == sorted(steps) and len(set(steps)) >= 5


def test_what_a_dead_writer_left_is_swept_when_the_next_one_opens(store: Store) -> None:
    epoch = filled(store, [1])
    store.close()
    leftover = store.epoch_folder("run", epoch) / ".tmp-step-2-999999-0"
    shutil.copytree(store.step_folder("run", epoch, 1), leftover)
    (store.run_folder("run") / ".tmp-latest-999999-1").write_text("e9")
    assert store.newest().step == 1  # a reader neither takes it nor removes it
    assert leftover.exists()
    store.open_epoch("run")
    assert unfinished(store.root) == []


def test_without_a_run_the_one_written_last_is_taken(store: Store) -> None:
    filled(store, [500], run="older")
    filled(store, [3], run="newer")
    assert store.newest().run == "newer" and store.load().step == 3
    assert store.newest("older").step == 500


def test_nothing_restorable_says_what_is_there(store: Store) -> None:
    with pytest.raises(NothingRestorable, match="holds no whole flowcheck snapshot"):
        store.load()
    filled(store, [3, 4])
    with pytest.raises(NothingRestorable, match=r"run other holds .* runs there: run"):
        store.load("other")
    with pytest.raises(NothingRestorable, match="no step 9; stored are 2 steps, 3 to 4"):
        store.load("run", 9)


# walking back and verify


def damage_truncate(folder: Path) -> str:
    os.truncate(folder / "model.safetensors", 200)
    return "model.safetensors"


def damage_missing(folder: Path) -> str:
    (folder / "optimizer.safetensors").unlink()
    return "optimizer.safetensors"


def damage_no_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json"


def damage_manifest_digit(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"eps": 1e-08', '"eps": 1e-07', 1))
    return "manifest.json"


def damage_moved(folder: Path) -> str:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-1"), folder)
    return "step-3"


CHEAP = [damage_truncate, damage_missing, damage_no_manifest, damage_manifest_digit, damage_moved]


@pytest.mark.parametrize("damage", CHEAP)
def test_a_damaged_newest_step_is_named_and_the_one_before_it_taken(store: Store, damage) -> None:
    epoch = filled(store, [1, 2, 3])
    name = damage(store.step_folder("run", epoch, 3))
    found = store.newest("run")
    assert found.step == 2 and len(found.skipped) == 1 and name in found.skipped[0]
    lines: list[str] = []
    same(store.load(skipped=lines.append), small(2))
    assert len(lines) == 1 and name in lines[0]
    with pytest.raises(VerificationFailed, match=name):
        store.load("run", 3)


def test_a_flipped_bit_is_named_by_verify_and_passed_over_by_load(store: Store) -> None:
    epoch = filled(store, [1, 2])
    model = store.step_folder("run", epoch, 2) / "model.safetensors"
    entry = tensorfile.read_header(model).entries["frozen"]
    flip(model, entry.start)
    assert store.newest().step == 2  # sizes fit: only the checksum can tell
    report = verify(store.root)
    assert report.problems == [f"{model}: tensor frozen differs from its checksum"]
    with pytest.raises(VerificationFailed) as failure:
        report.require()
    assert failure.value.exit_code == 4
    lines: list[str] = []
    assert store.load(skipped=lines.append).step == 1
    assert "tensor frozen differs" in lines[0]
    with pytest.raises(VerificationFailed, match="tensor frozen differs"):
        store.load("run", 2)


def test_a_flip_anywhere_in_a_step_is_found(store: Store) -> None:
    """Every byte counts: header, padding, tensors, manifest; a flip that verify misses would fail here."""
    epoch = filled(store, [1])
    folder = store.step_folder("run", epoch, 1)
    chance = random.Random(5)
    for name in ("model.safetensors", "optimizer.safetensors", "manifest.json"):
        original = (folder / name).read_bytes()
        last = len(original) - (2 if name == "manifest.json" else 1)  # but not the line end after the JSON
        for offset in [0, 7, 8, last, *(chance.randrange(last) for _ in range(40))]:
            flip(folder / name, offset)
            if name != "manifest.json" or json.loads(original) != _json_or_none(folder / name):
                assert verify(folder).problems, (name, offset)
            (folder / name).write_bytes(original)
    assert not verify(folder).problems


def _json_or_none(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_verify_takes_a_step_an_epoch_a_run_or_the_store(store: Store) -> None:
    epoch = filled(store, [1, 2])
    filled(store, [1])
    filled(store, [5], run="other")
    for path, count in (
        (store.root, 4),
        (store.run_folder("run"), 3),
        (store.epoch_folder("run", epoch), 2),
        (store.step_folder("run", epoch, 1), 1),
    ):
        report = verify(path)
        assert len(report.checked) == count and not report.problems and report.nbytes > 0
    seen: list[tuple[int, int]] = []
    verify(store.root, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == verify(store.root).nbytes
    with pytest.raises(UsageError):
        verify(store.root / "nowhere")
    (empty := store.root.with_name("empty")).mkdir()
    with pytest.raises(NothingRestorable):
        verify(empty)
    (store.run_folder("other") / "latest").write_text("e1/step-77\n")
    assert verify(store.root).problems == [f"{store.run_folder('other') / 'latest'}: does not name a stored step"]


@pytest.mark.parametrize("damage", CHEAP[:4])
def test_verify_names_the_damaged_file(store: Store, damage) -> None:
    epoch = filled(store, [1, 2])
    name = damage(store.step_folder("run", epoch, 2))
    problems = verify(store.root).problems
    assert len(problems) == 1 and name in problems[0] and "step-2" in problems[0]


def test_neither_reading_nor_verifying_imports_torch(store: Store) -> None:
    filled(store, [1])
    script = (
        "import sys; from pathlib import Path; from flowcheck.store import Store; from flowcheck.verify import verify\n"
        f"root = Path({str(store.root)!r}); Store(root).load(); assert not verify(root).problems\n"
        "assert not {'torch', 'numba'} & set(sys.modules), 'torch or numba was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
