"""An attach that names the checkpoint it was started from: what is there with the trainer's checksums is not uploaded.

A real server and real jobs take the attach of a real model; what was read counts only where the state that is held
afterwards is the trainer's, bit for bit.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shadow_cases
import torch
from repair_node import Node
from shadow_cases import describe, uploads

from flowcheck import client, inertpickle, seeding, stepfolder
from flowcheck.checkpoints import Roots
from flowcheck.connection import Connection
from flowcheck.durable import Meter
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.formats import write_dcp, write_torch
from flowcheck.job import Job
from flowcheck.protocol import SUM_BYTES
from flowcheck.server import Server
from flowcheck.sessions import Upload, digest
from flowcheck.tensorfile import RawFile
from flowcheck.upload import join, upload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOOPBACK = "tcp://127.0.0.1:0"
NAME = "convolutions"
"""Channels-last parameters and state, bfloat16, buffers."""


class Wire(Connection):
    """Counts what it sends of tensors."""

    sent = 0

    def send(self, kind: str, data: Any = None, timeout: float = 10.0, **fields: Any) -> None:
        self.sent += len(data) if kind == "attach-chunk" else 0
        super().send(kind, data, timeout, **fields)


class Trainer(Node):
    """Attaches over a real server and names `checkpoint`; `sent`: bytes of tensors that it uploaded."""

    def __init__(self, checkpoint: Path | None, roots: Roots | None, **options: Any) -> None:
        self.checkpoint = checkpoint
        self.sent = 0
        options = {"model": NAME, "before": 3, **options}
        super().__init__(roots=roots, **options)

    def attach(self, late: bool) -> Job:
        self.server = Server(self.jobs, [LOOPBACK]).start()
        training = self.training
        description = describe(training.model, training.optimizer, training.done)
        tensors = tensors_of(training.model, training.optimizer)
        with Wire(self.server.endpoints[0]) as wire:
            started = time.perf_counter()
            if late:
                ack = join(wire, description, "token")
            else:
                named = None if self.checkpoint is None else str(self.checkpoint)
                ack = upload(wire, description, "token", tensors, 60.0, named)
            self.seconds = time.perf_counter() - started
            self.sent = wire.sent
        return self.jobs.jobs[f"{ack['run']}/e{ack['epoch']}"]

    @property
    def total(self) -> int:
        return sum(data.nbytes for data in uploads(self.training.model, self.training.optimizer).values())

    def check(self) -> None:
        """What is held is the trainer's, buffers too."""
        expected = uploads(self.training.model, self.training.optimizer)
        with self.job.shadow.pin() as pin:
            assert pin.tensors.keys() == expected.keys()
            for key, (_, data) in pin.tensors.items():
                assert np.array_equal(data, expected[key]), key

    def finish(self) -> None:
        self.server.close()
        super().finish()


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Live tensors under their keys, in the order of the description."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    found |= {f"buffer/{name}": b for name, b in model.named_buffers()}
    for p, state in optimizer.state.items():
        found |= {f"optimizer/{names[id(p)]}/{key}": value for key, value in state.items()}
    return {key: found[key] for key, _ in describe(model, optimizer).tensors()}


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(*args: Any, **options: Any) -> Trainer:
        made.append(Trainer(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


@pytest.fixture
def first(trainer: Callable[..., Trainer]) -> Trainer:
    """The job before it was started again: its state is that of all others."""
    return trainer(None, None)


def write(form: str, job: Trainer, root: Path) -> Path:
    """The job's state as a checkpoint of this form below `root`."""
    path = root / "step_3"
    model, optimizer = job.training.model, job.training.optimizer
    with job.job.shadow.pin() as pin:
        snapshot = job.job.snapshot(pin)
        if form == "restored":
            write_torch(snapshot, path)
        elif form == "restored dcp":
            write_dcp(snapshot, path)
        elif form == "step folder":
            stepfolder.write(snapshot, path, Meter(snapshot.nbytes))
    if form == "torch.save":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path)
    elif form == "wrapped":
        wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
        held = {"model_state_dict": wrapped, "optimizer_state_dict": optimizer.state_dict(), "more": Path("x")}
        torch.save(held, path)
    elif form == "model alone":
        torch.save(model.state_dict(), path)
    return path


FORMS = ("restored", "restored dcp", "step folder", "torch.save", "wrapped")


@pytest.mark.parametrize("form", FORMS)
def test_what_is_in_the_checkpoint_is_not_uploaded(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, form: str
) -> None:
    path = write(form, first, tmp_path)
    again = trainer(path, Roots([tmp_path]))
    assert first.sent == first.total and again.sent == 0
    again.check()
    assert any(f"bytes, are taken from {path}" in line for line in again.lines), again.lines
    again.step()
    assert again.digest() == again.digests[4]


def test_a_model_without_its_optimizer_is_half_of_it(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path
) -> None:
    again = trainer(write("model alone", first, tmp_path), Roots([tmp_path]))
    state = sum(tensor.nbytes for key, tensor in tensors_of(again.training.model, again.training.optimizer).items()
                if key.startswith("optimizer/"))  # fmt: skip
    assert again.sent == state
    again.check()
    assert any("are not there" in line and "the trainer uploads the others" in line for line in again.lines)


def test_a_tensor_that_differs_is_uploaded_alone(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write("torch.save", first, tmp_path)
    content = torch.load(path, weights_only=True)
    content["model"]["head.weight"][2, 3] += 1
    changed = content["model"]["head.weight"]
    torch.save(content, path)
    again = trainer(path, Roots([tmp_path]))
    assert again.sent == changed.nbytes
    again.check()
    assert any("1 tensors differ, the first is model/head.weight" in line for line in again.lines)
    assert "1 of" in caplog.text and "model/head.weight" in caplog.text


@pytest.mark.parametrize("how", ["dtype", "shape", "strides"])
def test_another_dtype_or_shape_is_no_such_tensor(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, how: str
) -> None:
    path = write("torch.save", first, tmp_path)
    content = torch.load(path, weights_only=True)
    name = "stem.0.weight"
    tensor = content["model"][name]
    changes = {"dtype": tensor.double(), "shape": tensor[:-1].clone(), "strides": tensor.contiguous()}
    content["model"][name] = changes[how]
    torch.save(content, path)
    again = trainer(path, Roots([tmp_path]))
    assert again.sent == (0 if how == "strides" else tensor.nbytes)  # the same values in another order in memory
    again.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_torn_checkpoint_costs_the_upload(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, form: str
) -> None:
    path = write(form, first, tmp_path)
    files = [*path.glob("*.safetensors"), *path.glob("*.distcp")] if path.is_dir() else [path]
    torn = max(files, key=lambda file: file.stat().st_size)
    os.truncate(torn, torn.stat().st_size // 2)
    again = trainer(path, Roots([tmp_path]))
    assert 0 < again.sent <= again.total
    again.check()
    assert any("the trainer uploads the others" in line for line in again.lines)


def test_a_flipped_bit_anywhere_is_never_taken(trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path) -> None:
    path = write("torch.save", first, tmp_path)
    whole = bytearray(path.read_bytes())
    random = np.random.default_rng(3)
    for number, at in enumerate(random.integers(0, len(whole), 8)):
        torn = bytearray(whole)
        torn[at] ^= 1 << random.integers(0, 8)
        (tmp_path / f"{number}.pt").write_bytes(torn)
        again = trainer(tmp_path / f"{number}.pt", Roots([tmp_path]))
        again.check()


class Runs:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("form", ["torch.save", "restored dcp"])
def test_nothing_in_a_checkpoint_is_run(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, form: str
) -> None:
    path, mark = write(form, first, tmp_path), tmp_path / "ran"
    if form == "torch.save":
        model, optimizer = first.training.model, first.training.optimizer
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": Runs(mark)}
        torch.save(held, path)
    else:
        (path / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    again = trainer(path, Roots([tmp_path]))
    again.check()
    assert again.sent == (0 if form == "torch.save" else again.total)
    assert not mark.exists()
    with pytest.raises(Exception, match=r"[Ww]eights|mkdir"):  # the object would have run, had it been unpickled
        torch.load(path if form == "torch.save" else path / ".metadata", weights_only=True)


BOMBS = {
    "deep": b"\x80\x02" + b")\x85" * 300_000 + b".",
    "deep key": b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s.",
    "huge memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "no end": b"\x80\x02}",
    "empty stack": b"\x80\x020000.",
    "calls a text": b"\x80\x02X\x01\x00\x00\x00x)R.",
    "old instructions": b"cos\nsystem\n(S'true'\ntR.",
    "huge text": b"\x80\x02X\xff\xff\xff\x7fx.",
    "cyclic": b"\x80\x02}q\x00K\x01h\x00s.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_pickle_costs_the_upload(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "hostile.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", BOMBS[name])
    again = trainer(path, Roots([tmp_path]))
    assert again.sent == again.total
    again.check()


@pytest.mark.parametrize("form", ["torch.save", "restored dcp"])
def test_an_injured_pickle_is_read_or_refused(first: Trainer, tmp_path: Path, form: str) -> None:
    path, chance = write(form, first, tmp_path), np.random.default_rng(1)
    if form == "torch.save":
        with zipfile.ZipFile(path) as archive:
            whole = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    else:
        whole = (path / ".metadata").read_bytes()
    inertpickle.read(whole)
    refused = 0
    for _ in range(200):
        torn = bytearray(whole)
        for at in chance.integers(0, len(torn), chance.integers(1, 6)):
            torn[at] = chance.integers(0, 256)
        started = time.monotonic()
        try:
            inertpickle.read(bytes(torn[: chance.integers(len(torn) // 2, len(torn) + 1)]))
        except inertpickle.NotRead:
            refused += 1
        assert time.monotonic() - started < 5
    assert refused > 100


def test_sizes_are_bounded(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "compressed.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}" + b"N0" * 1000 + b".")
    again = trainer(path, Roots([tmp_path]))
    assert again.sent == again.total and any("is compressed" in line for line in again.lines)
    monkeypatch.setattr("flowcheck.checkpoints.PICKLE_BYTES", -(10**6))
    for form in ("torch.save", "restored dcp"):
        (tmp_path / form).mkdir()
        again = trainer(write(form, first, tmp_path / form), Roots([tmp_path]))
        assert again.sent == again.total and any("are read" in line for line in again.lines), again.lines


def test_only_below_the_roots(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "allowed", tmp_path / "elsewhere"
    inside.mkdir()
    outside.mkdir()
    real = write("torch.save", first, outside)
    stored = write("step folder", first, tmp_path)
    (inside / "link").symlink_to(real)
    (inside / "folder").mkdir()
    for file in stored.iterdir():
        (inside / "folder" / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for path in (
        real, inside / "link", inside / ".." / "elsewhere" / "step_3", inside / "folder", Path("allowed/step_3"),
        tmp_path / "allowed-not" / "x", Path("/etc/shadow"),
    ):  # fmt: skip
        again = trainer(path, Roots([inside]))
        assert again.sent == again.total, path
        assert any("does not lie below a folder of --checkpoint-root" in line for line in again.lines), again.lines
    again = trainer(real, None)
    assert again.sent == again.total and any("reads no checkpoints" in line for line in again.lines)
    shutil.copy(real, inside / "copy")
    (tmp_path / "by-another-name").symlink_to(inside)
    again = trainer(tmp_path / "by-another-name" / "copy", Roots([inside]))
    assert again.sent == 0
    again.check()


def test_a_folder_that_is_exchanged_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "file").write_text("inside")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("outside")
    roots = Roots([tmp_path / "root"])
    resolve = roots.resolve

    def exchange(path: Path) -> Path:
        real = resolve(path)
        (tmp_path / "root" / "a").rename(tmp_path / "root" / "b")
        (tmp_path / "root" / "a").symlink_to(tmp_path / "secret")
        return real

    monkeypatch.setattr(roots, "resolve", exchange)
    with pytest.raises(UsageError, match="changed while it was opened"):
        roots.file(tmp_path / "root" / "a" / "file")


@pytest.mark.parametrize("what", ["absent", "empty folder", "pipe", "text", "nothing in it"])
def test_what_is_no_checkpoint(trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, what: str) -> None:
    path = tmp_path / "there"
    if what == "empty folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "text":
        path.write_text("torch" * 1000)
    elif what == "nothing in it":
        torch.save([1, 2], path)
    again = trainer(path, Roots([tmp_path]))
    assert again.sent == again.total
    again.check()


def test_a_disk_that_hangs_costs_the_upload_and_stops_nobody(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("torch.save", first, tmp_path)
    answer, reads = threading.Event(), []
    fill = RawFile.fill

    def hangs(self: RawFile, start: int, target: memoryview) -> None:
        reads.append(start)
        if len(reads) > 12:  # in the middle of the tensors
            answer.wait(60)
        fill(self, start, target)

    monkeypatch.setattr(RawFile, "fill", hangs)
    monkeypatch.setattr(seeding, "checkpoint_seconds", lambda nbytes: 0.3)
    hung = trainer(path, Roots([tmp_path]))
    assert 0 < hung.sent < hung.total and 0.2 < hung.seconds < 10
    hung.check()
    assert any("could not be read within" in line for line in hung.lines)
    assert client.status(hung.server.endpoints[0], 5.0)["step"] == 3
    hung.step()
    hung.job = hung.attach(False)  # the trainers attach again while the disk still hangs
    assert hung.sent == hung.total
    assert any("another checkpoint is being read here" in line for line in hung.lines)
    hung.check()
    answer.set()
    deadline = time.monotonic() + 10
    while not hung.jobs._reading.acquire(blocking=False):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hung.jobs._reading.release()
    hung.check()  # what came too late was not taken


def test_other_clients_are_served_while_a_checkpoint_is_read(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("torch.save", first, tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    load = RawFile.load

    def waits(self: RawFile, *args: Any) -> Any:
        reading.set()
        assert go_on.wait(30)
        return load(self, *args)

    monkeypatch.setattr(RawFile, "load", waits)
    attached = threading.Thread(target=lambda: setattr(first, "job", first.attach(False)), daemon=True)
    first.checkpoint, first.jobs._roots = path, Roots([tmp_path])
    endpoint = first.server.endpoints[0]
    attached.start()
    assert reading.wait(30)
    assert client.status(endpoint, 5.0)["step"] == 3
    assert client.snapshot(endpoint).step == 3  # what takes long in the service has a thread of its own
    go_on.set()
    attached.join(30)
    assert not attached.is_alive() and first.sent == 0
    first.check()


def test_a_daemon_that_was_started_again_reads_it_again(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path
) -> None:
    path = write("restored", first, tmp_path)
    for _ in range(2):  # each with jobs and server of its own
        again = trainer(path, Roots([tmp_path]))
        assert again.sent == 0
        again.step()
        assert again.digest() == again.digests[4]


def test_a_daemon_that_joins_late_takes_the_trainers_state_not_the_checkpoints(
    trainer: Callable[..., Trainer], first: Trainer, tmp_path: Path
) -> None:
    path = write("torch.save", first, tmp_path)
    late = trainer(path, Roots([tmp_path]), late=True, before=5)
    assert late.job.shadow.known_step is None and not any("taken from" in line for line in late.lines)
    late.step()
    late.step()
    assert late.digest() == late.digests[7]


def session(late: bool = False) -> Upload:
    """An upload whose description has arrived."""
    training = shadow_cases.Job()
    text = json.dumps(describe(training.model, training.optimizer).to_json()).encode()
    made = Upload(1, 0.0, bytes=len(text), digest=digest(text), job="j", late=late)
    made.text(0, text, 0.0)
    made.session = object()  # type: ignore[assignment]
    return made


def test_checksums_out_of_place_end_the_attach() -> None:
    for offset, data in ((SUM_BYTES, b"x" * SUM_BYTES), (0, b""), (0, b"x" * SUM_BYTES * 1000)):
        with pytest.raises(FlowcheckError, match="out of order"):
            session().checksums(offset, data, 0.0)
    with pytest.raises(FlowcheckError, match="out of order"):
        session(late=True).checksums(0, b"x" * SUM_BYTES, 0.0)
    one = session()
    count = len(one._tensors)
    assert one.checksums(0, b"x" * SUM_BYTES, 0.0) is None
    assert one.checksums(SUM_BYTES, b"x" * SUM_BYTES * (count - 1), 0.0) == b"x" * SUM_BYTES * count
    with pytest.raises(FlowcheckError, match="no upload is open"):
        one.ready()
    with pytest.raises(FlowcheckError, match="is not expected now"):
        one.chunk(one._tensors[0][0], 0, "", b"1234", 0.0)
    with pytest.raises(FlowcheckError, match="out of order"):
        one.checksums(0, b"x" * SUM_BYTES, 0.0)


class Large(torch.nn.Module):
    """With AdamW's state 192 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(4096, 4096), torch.nn.Linear(8, 8)

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        return self.one(torch.randn(1, 4096, generator=generator)).square().mean() + self.two(torch.ones(8)).mean()


@pytest.mark.slow
def test_what_it_saves(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints bytes and seconds of an attach, uploaded over loopback and from a checkpoint in the page cache."""
    monkeypatch.setitem(shadow_cases.MODELS, "large", Large)
    uploaded = trainer(None, None, model="large", before=1)
    for form in ("torch.save", "restored dcp", "step folder"):
        (tmp_path / form).mkdir()
        path = write(form, uploaded, tmp_path / form)
        seeded = trainer(path, Roots([tmp_path]), model="large", before=1)
        assert seeded.sent == 0
        with capsys.disabled():
            print(f"\n{form}: 0 of {uploaded.sent} bytes sent, {seeded.seconds:.2f} s, not {uploaded.seconds:.2f} s")
