"""Messages, descriptions, markers, manifests, job files: whatever is wrong in them is said by name, and nothing else
happens."""

from __future__ import annotations

import json
import math
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  (takes seconds, which no test below must count)
from fuzzing import HOSTILE, injured, places, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_states import small

from flowcheck import jobfile, protocol, stepfolder, trainer_log
from flowcheck.client import _snapshot
from flowcheck.description import JobDescription
from flowcheck.errors import BadConfig, FlowcheckError, VerificationFailed
from flowcheck.manifest import Manifest, OutputManifest, seal
from flowcheck.protocol import FIELDS, check_layout, decode, encode, split
from flowcheck.service import snapshot_header
from flowcheck.store import Store
from flowcheck.tensorfile import DamagedFile, read_header
from flowcheck.values import DescriptionError, decode_value, encode_value
from flowcheck.verify import verify
from reconstruct.lr import Predictor
from reconstruct.markers import parse_marker
from reconstruct.shadow import Shadow
from reconstruct.unknown import Unknown

ROUNDS = 400
SLOW = 8_000

CORPUS = Path(__file__).with_name("fuzz_corpus")

MARKER = {
    "step": 7, "sequence": 12, "version": 1, "groups": [{"lr": 0.1, "betas": {"__tuple__": [0.9, 0.95]}}],
    "canaries": [[0, 3, "00000000", None], [1, 0, None, "3f800000"]], "problem": None, "rebuilt": True,
}  # fmt: skip
LAYOUT = {"buckets": [[0, 1], [2]], "bucket_bytes": [100, 8]}
SCHEDULER = {
    "class": "SequentialLR",
    "state": {
        "last_epoch": 3, "_milestones": [2], "_schedulers": [
            {"class": "LinearLR", "state": {
                "start_factor": 0.1, "end_factor": 1.0, "total_iters": 2, "base_lrs": [0.1], "last_epoch": 2,
                "_step_count": 3, "_last_lr": [0.1],
            }},
            {"class": "CosineAnnealingLR", "state": {
                "T_max": 10, "eta_min": 0.0, "base_lrs": [0.1], "last_epoch": 1, "_step_count": 2, "_last_lr": [0.1],
            }},
        ],
    },
}  # fmt: skip


def described() -> dict[str, Any]:
    """A job's description in JSON, with state and a scheduler."""
    description = small(3).description
    description.scheduler = SCHEDULER
    parameter = description.parameters[0]
    description.optimizer.state = {
        parameter.name: {
            "step": small(3).tensors["optimizer/wte.weight/step"][0],
            "exp_avg": parameter.spec,
            "exp_avg_sq": parameter.spec,
        }
    }
    result: dict[str, Any] = json.loads(json.dumps(description.to_json()))
    return result


def rounds(slow: bool) -> range:
    return range(SLOW if slow else ROUNDS)


both = pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])


def harmless(act: Callable[[], Any], *allowed: type[Exception]) -> Any:
    """The result of `act`, or the error that it may end with; a second and 64 MiB are what it may take."""
    begun = time.monotonic()
    try:
        result = act()
    except allowed as error:
        result = error
        assert str(error) and len(str(error)) < 3000 and "\n" not in str(error), error
    assert time.monotonic() - begun < 5
    return result


# the control protocol


def messages() -> Iterator[dict[str, Any]]:
    known: dict[str, Any] = {
        "version": "1", "status": {}, "kind": "FlowcheckError", "message": "no", "digest": "0" * 32, "run": "r",
        "epoch": 1, "step": 3, "marker": MARKER, "layout": LAYOUT, "ack": {}, "key": "model/x", "session": 1,
        "sections": [["model", 8]], "counter": "00", "parts": [[1, "model/x", 0, 8]], "percent": 1.0, "numbers": [1],
        "job": "0" * 32, "late": False, "allow_unknown": False, "report": None, "reason": "busy",
        "path": "/x", "problem": None, "text": "no",
    }  # fmt: skip
    for kind, fields in FIELDS.items():
        yield {"v": protocol.VERSION, "type": kind, **{name: known.get(name, 2) for name in fields}}


def test_every_kind_of_message_decodes() -> None:
    for message in messages():
        kind, fields = decode(json.dumps(message).encode())
        assert kind == message["type"] and set(fields) == set(FIELDS[kind])


@both
def test_an_injured_message_is_refused_or_is_another_valid_one(slow: bool) -> None:
    chance = random.Random(1)
    valid = list(messages())
    for _ in rounds(slow):
        message = injured(chance.choice(valid), chance)
        frame = json.dumps(message).encode()
        answer = harmless(lambda frame=frame: decode(frame), DescriptionError)
        if not isinstance(answer, DescriptionError):
            assert answer[0] in FIELDS


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(st.binary(max_size=300), st.sampled_from([encode("ping"), encode("status")])), max_size=4))
def test_any_frames(frames: list[bytes]) -> None:
    harmless(lambda: split(list(frames)), DescriptionError)


def test_a_field_of_every_message_that_does_not_fit_is_named() -> None:
    for message in messages():
        for name in FIELDS[message["type"]]:
            for value in ([1, {}, "x"], {"a": [1]}, -7, "x" * 70_000):
                frame = json.dumps({**message, name: value}).encode()
                answer = harmless(lambda frame=frame: decode(frame), DescriptionError)
                if isinstance(answer, DescriptionError):
                    assert str(answer).startswith(f"{message['type']}.{name}"), (answer, value)


def test_what_is_no_message() -> None:
    for frame in (
        b"", b"\0", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 100_000, b'{"v":1}', b'{"v":1,"type":[]}',
        b'{"v":1e999,"type":"ping"}', b'{"v":1,"type":"ping","type":"nothing"}', b'{"v":' + b"1" * 10_000 + b"}",
    ):  # fmt: skip
        assert isinstance(harmless(lambda frame=frame: decode(frame), DescriptionError), DescriptionError)
    assert decode(b'{"v":1,"type":"ping"}')[0] == "ping"


def test_an_error_message_names_no_other_class() -> None:
    for kind in ("annotations", "__builtins__", "FlowcheckError", "NothingRestorable", "__class__", "os", "Exception"):
        with pytest.raises(FlowcheckError):
            protocol.raise_error({"kind": kind, "message": "no"})


@both
def test_injured_markers_and_layouts(slow: bool) -> None:
    chance = random.Random(2)
    for _ in rounds(slow):
        marker = json.loads(json.dumps(injured(MARKER, chance)))
        harmless(lambda marker=marker: parse_marker(marker), DescriptionError)
        layout = json.loads(json.dumps(injured(LAYOUT, chance)))
        if isinstance(layout, dict):
            harmless(lambda layout=layout: check_layout(layout), DescriptionError)


@both
def test_injured_lists_of_unknown_ranges(slow: bool) -> None:
    chance = random.Random(3)
    unknown = {"model/a": [[0, 5, 1], [7, 9, 2]], "buffer/b": [[3, 4, 0]]}
    assert Unknown.from_json(unknown).elements == 8
    for _ in rounds(slow):
        data = json.loads(json.dumps(injured(unknown, chance)))
        answer = harmless(lambda data=data: Unknown.from_json(data), DescriptionError)
        if isinstance(answer, Unknown):
            assert answer.elements >= 0 and Unknown.from_json(answer.to_json()) == answer


# descriptions


def test_the_whole_description_is_valid() -> None:
    JobDescription.from_json(described())


def test_every_field_of_a_description_that_does_not_fit_is_named() -> None:
    """Each place in turn holds an object of nothing known: the refusal names that place or one that holds it."""
    whole = described()
    free = ("fields", "state")  # values of the user's own, within limits
    for path in places(whole):
        if not path or any(part in free for part in path):
            continue
        data = put(whole, path, {"nothing": "known"})
        answer = harmless(lambda data=data: JobDescription.from_json(data), DescriptionError)
        assert isinstance(answer, DescriptionError), path
        named = str(answer).split(":")[0]
        assert any(str(part) in named for part in path if isinstance(part, str)), (path, answer)


@both
def test_an_injured_description_is_refused_by_field_or_can_be_followed_without_harm(slow: bool) -> None:
    chance = random.Random(4)
    whole = described()
    Shadow(JobDescription.from_json(whole))  # the first takes seconds of imports
    accepted = 0
    for _ in rounds(slow):
        data = injured(whole, chance)
        text = json.dumps(data)
        answer = harmless(lambda text=text: JobDescription.from_json(text), DescriptionError)
        if isinstance(answer, DescriptionError):
            continue
        accepted += 1
        assert JobDescription.from_json(json.dumps(answer.to_json())).to_json() == answer.to_json()
        predictor = harmless(lambda answer=answer: Predictor(answer), FlowcheckError)
        if isinstance(predictor, Predictor):
            harmless(lambda predictor=predictor, step=answer.step: predictor.fields(step + 5), FlowcheckError)
            harmless(lambda predictor=predictor, step=answer.step: predictor.scheduler(step + 5), FlowcheckError)
        if sum(spec.nbytes for _, spec in answer.tensors()) < 1 << 20:
            harmless(lambda answer=answer: Shadow(answer), FlowcheckError)
    assert accepted > ROUNDS // 50


@pytest.mark.parametrize(
    "name",
    ["LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau", "LRScheduler", "Optimizer", "warnings", "__builtins__", "os",
     "Callable", "EPOCH_DEPRECATION_WARNING", "", "steplr", 7, None, ["StepLR"]],
)  # fmt: skip
def test_a_scheduler_is_one_of_a_list_or_refused_by_name(name: Any) -> None:
    whole = described()
    for path in (("scheduler", "class"), ("scheduler", "state", "_schedulers", 0, "class")):
        data = put(whole, path, name)
        with pytest.raises(DescriptionError, match=r"description\.scheduler.*class"):
            JobDescription.from_json(json.dumps(data))


def test_schedulers_do_not_nest_for_ever() -> None:
    whole = described()
    deep: Any = {"class": "StepLR", "state": {}}
    for _ in range(6):
        deep = {"class": "ChainedScheduler", "state": {"_schedulers": [deep]}}
    with pytest.raises(DescriptionError, match=r"description\.scheduler"):
        JobDescription.from_json(json.dumps({**whole, "scheduler": deep}))


@pytest.mark.parametrize("name", ["LBFGS", "Optimizer", "adamw", "lr_scheduler", "swa_utils", "__doc__", "", "SGD\0"])
def test_an_optimizer_is_one_of_a_list_or_refused_by_name(name: str) -> None:
    with pytest.raises(DescriptionError, match=r"description\.optimizer\.name"):
        JobDescription.from_json(json.dumps(put(described(), ("optimizer", "name"), name)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", "0.1"), ("lr", None), ("lr", {"__float__": "nan"}), ("lr", -1.0), ("lr", [1]), ("lr", True),
        ("eps", "x"), ("betas", 0.9), ("betas", [0.9]), ("betas", [0.9, "x"]), ("weight_decay", {"a": 1}),
        ("maximize", "no"),
        ("foreach", 3), ("amsgrad", 2.0), ("capturable", "yes"), ("momentum", [0.1]), ("nesterov", "x"), ("lr", 10**30),
    ],
)  # fmt: skip
def test_a_param_group_field_that_no_optimizer_takes_is_named(field: str, value: Any) -> None:
    data = put(described(), ("optimizer", "groups", 0, "fields", field), value)
    with pytest.raises(DescriptionError, match=rf"description\.optimizer\.groups\[0\]\.fields\.{field}"):
        JobDescription.from_json(json.dumps(data))


@both
def test_values_come_back_or_are_refused(slow: bool) -> None:
    chance = random.Random(5)
    tree = {"a": [1, 2.5, None, {"b": (1, "x")}], "c": {1: 2}, "d": math.inf}
    coded = encode_value(tree)
    assert decode_value(coded) == tree
    for _ in rounds(slow):
        data = injured(coded, chance)
        answer = harmless(lambda data=data: [decode_value(data)], DescriptionError)
        if isinstance(answer, list):
            harmless(lambda answer=answer: encode_value(answer[0]), DescriptionError)


def test_numbers_stay_within_64_bits() -> None:
    """Python's grow without end: a schedule of products of them would take all memory and time."""
    for number in (2**64, -(2**63) - 1, 10**400):
        with pytest.raises(DescriptionError, match=r"value\.gamma: .* does not fit in 64 bits"):
            decode_value({"gamma": number})
    assert decode_value({"gamma": 2**63 - 1}) == {"gamma": 2**63 - 1}


# what comes from a daemon


@both
def test_an_injured_header_of_a_fetch(slow: bool) -> None:
    chance = random.Random(6)
    header = json.loads(json.dumps(snapshot_header(small(3))))
    assert _snapshot(json.dumps(header).encode()).step == 3
    for _ in rounds(slow):
        text = json.dumps(injured(header, chance)).encode()
        harmless(lambda text=text: _snapshot(text), FlowcheckError)


def test_a_step_that_no_memory_holds_is_said() -> None:
    header = json.loads(json.dumps(snapshot_header(small(3))))
    huge = {"dtype": "float32", "shape": [1 << 42], "stride": [1]}
    header["tensors"] = [[f"model/{n}", huge] for n in range(1000)]
    with pytest.raises(FlowcheckError, match=r"the step takes \d+ MiB, more memory than this machine gives"):
        _snapshot(json.dumps(header).encode())


# files


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


def resealed(path: Path, chance: random.Random) -> None:
    """A manifest with one thing wrong and a checksum that fits: somebody made it."""
    body = json.loads(path.read_bytes())
    body.pop("xxh3_128")
    injury = injured(body, chance)
    try:
        path.write_bytes(seal(injury))
    except (ValueError, TypeError):
        path.write_text(json.dumps(injury))


@both
def test_a_forged_manifest_is_refused_or_reads_as_whole(slow: bool, store: Store, tmp_path: Path) -> None:
    chance = random.Random(7)
    store.save(small(1, epoch=store.open_epoch("run")))
    folder = store.step_folder("run", 1, 1)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for _ in range(len(rounds(slow)) // 8):
        resealed(path, chance)
        answer = harmless(lambda: stepfolder.read(folder), VerificationFailed)
        if not isinstance(answer, VerificationFailed):
            harmless(lambda answer=answer: stepfolder.check_whole(answer), FlowcheckError)
        harmless(lambda: verify(folder), FlowcheckError)
        harmless(lambda: store.newest("run"), FlowcheckError)
        path.write_bytes(whole)
    output = tmp_path / "out.flowcheck.json"
    said = OutputManifest("torch", "run", 1, 1, True, True).encode()
    for _ in range(len(rounds(slow)) // 8):
        output.write_bytes(said)
        resealed(output, chance)
        harmless(lambda: OutputManifest.read(output), DamagedFile)


def test_a_manifest_sends_no_reader_out_of_its_folder(store: Store) -> None:
    store.save(small(1, epoch=store.open_epoch("run")))
    path = store.step_folder("run", 1, 1) / "manifest.json"
    whole = json.loads(path.read_bytes())
    whole.pop("xxh3_128")
    for name in ("../../../../etc/passwd", "/etc/passwd", "a/b", "..", ".", "", "a\0b"):
        path.write_bytes(seal({**whole, "files": {name: {"size": 1, "xxh3_128": "0" * 32}}}))
        with pytest.raises(DamagedFile, match="not a plain file name"):
            Manifest.read(path)


@both
def test_an_injured_job_file(slow: bool, tmp_path: Path) -> None:
    chance = random.Random(8)
    state = small(0)
    tensors = {key: state.tensors[key] for key, _ in state.description.tensors()}
    path = tmp_path / "job.safetensors"
    jobfile.write(path, state.description, tensors)
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    header = json.loads(whole[8 : 8 + length])
    for number in range(len(rounds(slow)) // 8):
        if number % 2:
            data = bytearray(whole)
            for _ in range(chance.randrange(1, 8)):
                data[chance.randrange(len(data) if chance.random() < 0.3 else 8 + length)] = chance.randrange(256)
        else:
            changed = injured(header, chance)
            metadata = changed.get("__metadata__") if isinstance(changed, dict) else None
            if isinstance(metadata, dict) and chance.random() < 0.8:  # a checksum that fits
                if isinstance(metadata.get("flowcheck"), str):
                    told = injured(json.loads(header["__metadata__"]["flowcheck"]), chance)
                    metadata["flowcheck"] = json.dumps(told)
                if all(isinstance(metadata.get(name), str) for name in ("flowcheck", "tensors")):
                    metadata["xxh3_128"] = jobfile._seal(metadata)
            text = json.dumps(changed).encode()
            data = bytearray(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        path.write_bytes(data)
        harmless(lambda: jobfile.read(path), BadConfig)
        harmless(lambda: jobfile.damage(path))
        harmless(lambda: read_header(path), DamagedFile)


@both
def test_injured_markers_files(slow: bool, tmp_path: Path) -> None:
    chance = random.Random(9)
    path = tmp_path / "markers.jsonl"
    lines: list[Any] = [
        {"time": 1, "attached": True}, {"time": 2, "layout": LAYOUT}, {"time": 3, "link": True}, {"time": 4, "last": 9},
        {"time": 5, **MARKER},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(trainer_log.read(path).words) == 4
    for number in range(len(rounds(slow)) // 8):
        changed = injured(lines, chance)
        said = changed if isinstance(changed, list) else [changed]
        text = "".join(json.dumps(line) + "\n" for line in said) if number % 2 else ""
        data = bytearray(text.encode() or path.read_bytes())
        for _ in range(chance.randrange(0, 4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        harmless(lambda: trainer_log.read(path), BadConfig)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_bytes_as_a_safetensors_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for content in (data, struct.pack("<Q", len(data)) + data, struct.pack("<Q", max(0, len(data) - 3)) + data):
        path.write_bytes(content)
        harmless(lambda: read_header(path), DamagedFile)


def test_the_corpus_of_what_was_found() -> None:
    """Inputs that broke something once, each by the name of what reads it."""
    readers: dict[str, Callable[[bytes], Any]] = {
        "description": JobDescription.from_json,
        "message": decode,
        "marker": lambda data: parse_marker(json.loads(data)),
        "value": lambda data: decode_value(json.loads(data)),
        "fetch": _snapshot,
    }
    found = sorted(CORPUS.glob("*.json"))
    assert found
    for path in found:
        harmless(lambda path=path: readers[path.name.split("-")[0]](path.read_bytes()), FlowcheckError)


def test_hostile_values_are_what_they_are_called() -> None:
    assert len(HOSTILE) > 20
