"""The trainer's side in a real two-rank gloo job against a real control server.

One job runs every scenario of attach_job.py, over two gloo contexts; the tests look at what the ranks saw and at what
the server's service was given. A second job runs with gloo's lazy connections.
"""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_ranks
from recording import Recording, wait_for

from flowcheck import peers
from flowcheck.description import TensorSpec
from flowcheck.errors import FlowcheckError
from flowcheck.protocol import CHUNK
from flowcheck.server import Server
from reconstruct.markers import parse_marker

SCENARIOS = (
    "described",
    "mixed",
    "seeded",
    "markers",
    "pending",
    "accumulation",
    "again",
    "problems",
    "closing",
    "unreachable",
    "cost",
    "refusals",
    "no_daemon_later",
)


@dataclass
class Job:
    service: Recording
    ranks: list[dict[str, Any]]
    folder: Path

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return loaded


def run_job(folder: Path, scenarios: tuple[str, ...], environment: dict[str, str]) -> Job:
    """Both ranks to their end; the server is closed when the run `stop-me` has attached."""
    service = Recording(folder)
    server = Server(service, ["tcp://127.0.0.1:0"]).start()
    service.tell = server.tell
    service.at_end = {run: [] for run in ("closing-silent", "closing-changed", "closing-elsewhere")}
    service.at_end["closing-asked"] = [(1, "model/0.weight", 0, 48), (2, "model/2.bias", 1, 3)]

    def meanwhile() -> None:
        if any(upload.description.run == "stop-me" for upload in service.committed):
            time.sleep(0.05)  # the ack is on its way
            server.close()
            (folder / "stopped").touch()

    try:
        results = two_ranks.run("attach_job.py", folder, server.endpoints[0], scenarios, environment, meanwhile)
        time.sleep(0.1)  # what the last rank sent is in the server's queue
    finally:
        server.close()
    return Job(service, results, folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("job"), SCENARIOS, {"GLOO_SOCKET_IFNAME": "lo,lo"})


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> Job:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1"}
    return run_job(tmp_path_factory.mktemp("lazy"), ("described", "left_open"), environment)


def memory_bytes(tensor: torch.Tensor) -> bytes:
    """A dense tensor's bytes in the order of its memory, by sorting dimensions (not as the uploader does it)."""
    order = sorted(range(tensor.dim()), key=lambda i: -tensor.stride(i))
    flat = tensor.permute(order).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("name", ["described", "mixed"])
def test_uploaded_bytes_are_the_tensors_memory(job: Job, name: str) -> None:
    upload = job.service.of(name)
    expected = job.tensors(name)
    specs = dict(upload.description.tensors())
    assert set(specs) == set(expected) == set(upload.tensors)
    for key, tensor in expected.items():
        spec = specs[key]
        assert (spec.dtype, spec.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), key
        if key != "buffer/mask":
            assert spec.stride == tuple(tensor.stride()), key
        assert bytes(upload.tensors[key]) == memory_bytes(tensor), key
    assert upload.largest <= CHUNK


@pytest.mark.parametrize("run", ["seeded-file", "seeded-sharded"])
def test_what_a_checkpoint_holds_is_not_uploaded(job: Job, run: str) -> None:
    upload, expected = job.service.of(run), job.tensors("seeded")
    assert {key: bytes(data) for key, data in upload.tensors.items()} == {
        key: memory_bytes(tensor) for key, tensor in expected.items()
    }
    assert upload.uploaded == {"buffer/mask"}  # it is not persistent, so no checkpoint has it
    assert any(f"{len(expected) - 1} of {len(expected)} tensors" in line for line in job.service.lines)


def test_closing_gives_what_is_asked_for_after_the_last_step(job: Job) -> None:
    """However little of the trainer's time the daemon may use: there are no steps any more."""
    expected = job.tensors("closing-asked")
    pieces = [piece for piece in job.service.pieces if piece.run == "closing-asked"]
    assert [(piece.number, piece.rank, piece.step) for piece in pieces] == [(1, 0, 3), (2, 0, 3)]
    weight, bias = (bytes(piece.sections["model"]) for piece in pieces)
    assert weight == memory_bytes(expected["model/0.weight"])
    assert bias == memory_bytes(expected["model/2.bias"])[4:12]
    assert bytes(pieces[0].sections["momentum_buffer"]) == memory_bytes(expected["optimizer/0.weight/momentum_buffer"])


def test_closing_waits_for_a_daemon_that_lacks_something_and_for_nothing_else(job: Job) -> None:
    """`wait` was a second."""
    first, second = (rank["closing"] for rank in job.ranks)
    assert max(second.values()) < 0.5, second
    assert max(first.pop("closing-answered"), first.pop("closing-asked"), first.pop("closing-still")) < 0.5
    assert 1.0 <= first.pop("closing-silent") < 2.0
    assert first.keys() == {"closing-changed", "closing-elsewhere", "closing-no-wait"} and max(first.values()) < 0.5
    told = {(run, step) for run, _, step in job.service.detached if run.startswith("closing")}
    assert len(told) == 7 and {step for _, step in told} == {3, 0}


def test_the_scenarios_hold_what_they_claim_to_test(job: Job) -> None:
    specs = dict(job.service.of("described").description.tensors())
    assert specs["model/conv.weight"].stride == (12, 1, 6, 3)
    assert specs["optimizer/conv.weight/exp_avg"].stride == (12, 1, 6, 3)
    assert specs["optimizer/conv.weight/step"] == TensorSpec("float32", (), ())
    assert specs["buffer/norm.num_batches_tracked"] == TensorSpec("int64", (), ())
    mixed = dict(job.service.of("mixed").description.tensors())
    assert [spec.dtype for spec in mixed.values()] == ["float64", "bfloat16", "float16"]
    assert mixed["model/b"].stride == (1, 9)


def test_the_description_is_the_jobs(job: Job) -> None:
    description, seen = job.service.of("described").description, job.ranks[0]["described"]
    assert (description.run, description.step, description.world_size) == ("described", 4, 2)
    assert (description.torch_version, description.cpu_capability) == (seen["version"], seen["cpu"])
    assert description.device == "cpu"
    parameters = {p.name: p for p in description.parameters}
    assert list(parameters) == [
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "embed.weight",
        "frozen.weight",
    ]
    assert parameters["embed.weight"].aliases == ("head.weight",)
    assert [p.index for p in description.parameters] == [0, 1, 2, 3, 4, None]
    buffers = {b.name: b.persistent for b in description.buffers}
    persistent = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "empty")
    assert buffers == {"mask": False, **dict.fromkeys(persistent, True)}
    optimizer = description.optimizer
    assert optimizer.name == "AdamW"
    assert [group.parameters for group in optimizer.groups] == [
        ("conv.weight", "conv.bias", "embed.weight", "frozen.weight"),
        ("norm.weight", "norm.bias"),
    ]
    first, second = (group.fields for group in optimizer.groups)
    assert (first["lr"], first["betas"], first["amsgrad"], first["initial_lr"]) == (
        seen["lr"],
        (0.9, 0.999),
        True,
        0.01,
    )
    assert (first["weight_decay"], second["weight_decay"]) == (0.01, 0.0)
    assert set(optimizer.state) == set(parameters) - {"frozen.weight"}
    assert list(optimizer.state["norm.bias"]) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    ddp = description.ddp
    assert (ddp.find_unused_parameters, ddp.static_graph, ddp.gradient_as_bucket_view) == (False, False, True)
    assert (ddp.broadcast_buffers, ddp.bucket_cap_bytes, ddp.bucket_cap_default) == (True, 25 << 20, True)
    assert (ddp.ignored, ddp.comm_hook, ddp.layout_pending) == (("mask",), None, False)
    assert ddp.initial_buckets == ((0, 1, 2, 3, 4),)
    assert ddp.rebuilt_buckets == (tuple(int(i) for i in seen["rebuilt"].split()),)
    assert ddp.bucket_bytes == (int(seen["sizes"]),)
    assert description.scheduler is not None
    assert description.scheduler["class"] == "CosineAnnealingLR"


def test_attaching_takes_no_collective(job: Job) -> None:
    """The sequence number in the description is still the next tag after attach returned."""
    seen = [rank["described"]["sequence"] for rank in job.ranks]
    assert job.service.of("described").description.group.sequence == seen[0] == seen[1]


def test_the_first_layout_is_ddps_own(job: Job) -> None:
    ddp = job.service.of("mixed").description.ddp
    assert ddp.initial_buckets == tuple(tuple(bucket) for bucket in job.ranks[0]["mixed"]["buckets"])
    assert len(ddp.initial_buckets) == 3
    assert ddp.rebuilt_buckets is None
    assert not ddp.layout_pending


def test_every_rank_gets_the_same_handle(job: Job) -> None:
    for rank in job.ranks:
        assert rank["described"]["handle"] == [True, "described", 1, True, 4]


def check_group(description: Any, contexts: int, connected: bool) -> None:
    group = description.group
    assert len(group.contexts) == contexts
    addresses = [address for context in group.contexts for address in context.values()]
    assert [set(context) for context in group.contexts] == [{0, 1}] * contexts
    assert len(set(addresses)) == 2 * contexts
    assert all(ip == "127.0.0.1" and port > 1023 for ip, port in addresses)
    assert len(group.sockets) == (2 * contexts if connected else 0)
    ends = {tuple(entry) for entry in group.sockets}
    for rank, ip, port, peer, peer_port in ends:
        # The other rank has the same connection from its side, and one end is the right rank's listener.
        assert (1 - rank, peer, peer_port, ip, port) in ends
        listening = [r for c in group.contexts for r, a in c.items() if a in ((ip, port), (peer, peer_port))]
        assert len(listening) == 1
        own = (ip, port) in [context[rank] for context in group.contexts]
        assert own == (listening[0] == rank)


def test_who_is_who_over_two_contexts(job: Job) -> None:
    check_group(job.service.of("described").description, contexts=2, connected=True)


def test_who_is_who_with_lazy_connections(lazy: Job) -> None:
    """Records without pair identifiers; four steps have connected the only pair."""
    check_group(lazy.service.of("described").description, contexts=1, connected=True)
    assert lazy.service.of("described").description.ddp.rebuilt_buckets is not None


@pytest.mark.parametrize(
    ("data", "address"),
    [
        (b"\x02\x00\x1f\x90\x0a\x00\x00\x02", ("10.0.0.2", 8080)),
        (b"\x0a\x00\x1f\x90" + bytes(4) + bytes.fromhex("fd00" + "00" * 13 + "07"), ("fd00::7", 8080)),
        (b"\x0a\x00\x1f\x90" + bytes(4) + bytes(10) + b"\xff\xff\x0a\x00\x00\x02", ("10.0.0.2", 8080)),
    ],
)
def test_address_records(data: bytes, address: tuple[str, int]) -> None:
    record = b"\x04" + bytes(7) + b"host" + b"\x88" + bytes(7) + data.ljust(128, b"\xee") + b"\xff" * 8
    assert peers.parse_record(record) == address
    assert peers.parse_record(record + bytes(16)) == address
    for cut in (0, 7, 12, 20):
        with pytest.raises(FlowcheckError, match="not gloo's"):
            peers.parse_record(record[:cut])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_own_sockets(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server, socket.socket(family) as peer:
        peer.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            ends = (*peer.getsockname()[:2], *peer.getpeername()[:2])
            found = peers.own_sockets()
            assert ends in found
            assert (*ends[2:], *ends[:2]) in found
            assert peers.among(found, [{0: (ends[2], ends[3])}]) == sorted(
                [ends, (*ends[2:], *ends[:2])], key=found.index
            )
            assert peers.among(found, [{0: (ends[2], 1)}]) == []


# Markers


def test_every_marker_says_what_the_trainer_had(job: Job) -> None:
    steps = job.ranks[0]["markers"]["steps"]
    description = job.service.of("markers").description
    markers = [parse_marker(marker) for marker in job.service.markers_of("markers")]
    assert [marker.step for marker in markers] == list(range(1, 13))
    assert [step["handle"] for step in steps] == list(range(1, 13))
    assert [rank["markers"]["steps"][-1]["handle"] for rank in job.ranks] == [12, 12]
    sequences = [description.group.sequence, *(marker.sequence for marker in markers)]
    assert sequences[1:] == [step["sequence"] for step in steps]
    assert np.diff(sequences).tolist() == [1, 3, *[1] * 10]  # the second forward rebuilds: two broadcasts
    for marker, step in zip(markers, steps, strict=True):
        assert marker.problem is None
        for canary in marker.canaries:
            start = 4 * canary.element
            values = bytes.fromhex(step["values"][canary.parameter])
            gradients = bytes.fromhex(step["gradients"][canary.parameter])
            assert canary.value == values[start : start + 4]
            assert canary.gradient == gradients[start : start + 4]


def test_canaries_rotate_and_grow_when_the_collectives_change(job: Job) -> None:
    markers = [parse_marker(marker) for marker in job.service.markers_of("markers")]
    counts = [len(marker.canaries) for marker in markers]
    assert counts == [4, 4, 4, *[2] * 9]  # at most one per parameter, and this model has four
    for marker in markers:
        assert len({canary.parameter for canary in marker.canaries}) == len(marker.canaries)
    seen = {(canary.parameter, canary.element) for marker in markers[3:] for canary in marker.canaries}
    assert len(seen) > 12
    assert {parameter for parameter, _ in seen} == {0, 1, 2, 3}
    nonzero = sum(any(c.gradient or b"") for marker in markers for c in marker.canaries)
    assert nonzero > 20


def test_hyper_parameters_travel_when_they_change(job: Job) -> None:
    steps = job.ranks[0]["markers"]["steps"]
    fields = [group.fields for group in job.service.of("markers").description.optimizer.groups]
    version = 0
    with_groups = []
    for marker, step in zip(job.service.markers_of("markers"), steps, strict=True):
        parsed = parse_marker(marker)
        if parsed.groups is not None:
            fields, version = [dict(group) for group in parsed.groups], version + 1
            with_groups.append(parsed.step)
        assert parsed.version == version
        assert [group["lr"] for group in fields] == step["lr"]
        assert [group["momentum"] for group in fields] == [0, 0.5 if parsed.step > 6 else 0]
        assert set(fields[0]) == {*job.service.of("markers").description.optimizer.groups[0].fields}
    assert with_groups == [4, 7, 10]


def test_the_rebuilt_layout_is_sent_once(job: Job) -> None:
    layouts = [layout for run, epoch, layout in job.service.layouts if (run, epoch) == ("markers", 1)]
    rebuilt = job.ranks[0]["markers"]["rebuilt"]
    assert layouts == [{"buckets": [[int(i) for i in rebuilt.split()]], "bucket_bytes": [332]}]


def test_a_layout_that_is_not_decided_is_said_so(job: Job) -> None:
    first, second = (job.service.of(run).description.ddp for run in ("pending-1", "pending-2"))
    assert (first.layout_pending, first.rebuilt_buckets) == (True, None)
    seen = job.ranks[0]["pending"]
    assert seen["logged"] == 0  # DDP has rebuilt but not yet logged it: read from the buckets themselves
    assert second.rebuilt_buckets == (tuple(int(i) for i in seen["rebuilt"].split()),)
    assert (second.layout_pending, second.bucket_bytes) == (False, (332,))


def test_accumulation_and_skipped_steps_show_in_sequence_and_canaries(job: Job) -> None:
    markers = [parse_marker(marker) for marker in job.service.markers_of("accumulation")]
    sequences = job.ranks[0]["accumulation"]["sequences"]
    assert [marker.sequence for marker in markers] == sequences
    assert [marker.step for marker in markers] == list(range(1, 10))
    deltas = np.diff([job.service.of("accumulation").description.group.sequence, *sequences]).tolist()
    assert deltas == [1, 3, 1, 1, 2, 1, 1, 2, 1]
    unusual = [True, *(one != other for one, other in itertools.pairwise(deltas))]
    assert [len(marker.canaries) for marker in markers] == [4 if many else 2 for many in unusual]


def test_several_attaches(job: Job) -> None:
    for rank in job.ranks:
        seen = rank["again"]
        assert seen["epochs"] == [1, 2, 1]
        assert seen["covered"] == [False, True, True]  # the first was closed by the second
        assert seen["steps"] == [1, 2]
        assert (seen["hooks"], seen["left"]) == (1, 0)
    assert [len(job.service.markers_of("again", epoch)) for epoch in (1, 2)] == [1, 1]
    assert job.service.markers_of("again", 2)[0]["step"] == 2
    assert len(job.service.markers_of("other")) == 0


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ("parameter-changed", "changed between attach and the first step: 2.bias"),
        ("group-added", "param groups were added"),
        ("optimizer-loaded", "optimizer.load_state_dict() was called"),
        ("model-loaded", "load_state_dict() was called on the model"),
        ("hook-registered", "communication hook was registered"),
        ("gradient-skipped", "had no gradient"),
        ("tensor-lr", "param group 0.lr: a Tensor"),
    ],
)
def test_what_cannot_be_followed_after_attach_is_said(job: Job, run: str, problem: str) -> None:
    markers = [parse_marker(marker) for marker in job.service.markers_of(run)]
    assert markers[-1].problem is not None
    assert problem in markers[-1].problem
    if run != "parameter-changed":
        assert [marker.problem for marker in markers[:-1]] == [None]


@pytest.mark.parametrize("run", ["left-early", "left-late"])
def test_markers_of_a_handle_that_nobody_closes_arrive(lazy: Job, run: str) -> None:
    assert [marker["step"] for marker in lazy.service.markers_of(run)] == list(range(1, 21))


# Refusals and deadlines

REFUSALS = {
    "not DDP": "the model is a Sequential, not DistributedDataParallel",
    "world size 1": "world size 1",
    "find_unused_parameters": "find_unused_parameters",
    "comm hook": "communication hook fp16_compress_hook",
    "builtin hook": "communication hook",
    "sparse": "sparse gradients",
    "optimizer outside DDP": "param group 0 holds a parameter (3,) that is not part of the DDP model",
    "DDP outside optimizer": "2.bias is reduced by DDP but in no param group",
    "frozen after DDP": "set requires_grad before DDP is built",
    "ignored by DDP": "0.weight is optimized but DDP does not reduce",
    "shared memory": "2.bias and 2.weight share memory",
    "other optimizer": "RMSprop is not supported",
    "subclass": "Mine is not supported",
    "no optimizer": "NoneType is not supported",
    "tensor lr": "has a tensor as lr",
    "capturable": "capturable=True",
    "differentiable": "differentiable=True",
    "foreign state": "keeps extra (int) for 0.weight",
    "extra state": "_extra_state",
    "complex": "dtype complex64",
    "mixed precision": "mixed_precision",
    "run name": "run: '../x'",
    "negative step": "step=-1",
    "no endpoint": "set FLOWCHECK_ENDPOINT",
    "bad endpoint": "use tcp://HOST:PORT",
    "refused by the daemon": "this run is refused: choose another name",
    "failed commit": "the disk is full",
    "rank 1 differs": "rank 1's model, param groups or optimizer state differ",
    "rank 1 refuses": "rank 1: param group 0 has differentiable=True",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_name_on_every_rank(job: Job, case: str) -> None:
    for rank, seen in enumerate(job.ranks):
        strict, soft = seen["refusals"][case]
        assert REFUSALS[case] in strict["error"]
        assert "\n" not in strict["error"]
        assert REFUSALS[case] in soft["reason"]
        assert len(soft["warnings"]) == (1 if rank == 0 else 0)
        if rank == 0:
            assert "training goes on uncovered" in soft["warnings"][0]
    assert job.ranks[0]["refusals"][case][0] == pytest.approx(
        {**job.ranks[1]["refusals"][case][0], "seconds": job.ranks[0]["refusals"][case][0]["seconds"]}
    )
    assert not [upload for upload in job.service.committed if upload.description.run == "refusals"]


def test_join_is_refused(job: Job) -> None:
    for rank in job.ranks:
        assert "join() is active" in rank["refusals"]["join"][0]["error"]


def test_no_daemon_costs_one_warning_or_an_error_on_every_rank(job: Job) -> None:
    for number, rank in enumerate(job.ranks):
        seen = rank["unreachable"]
        assert len(seen["soft"]["warnings"]) == (1 if number == 0 else 0)
        assert "no answer from tcp://127.0.0.1:9 within 0.4 s" in seen["soft"]["reason"]
        assert "no answer from tcp://127.0.0.1:9" in seen["strict"]["error"]
        assert seen["soft"]["seconds"] < 3
        assert "FLOWCHECK_ATTACH_TIMEOUT='soon'" in seen["wrong"]["error"]
        assert seen["hooks"] == 0


def test_a_lost_daemon_stops_nothing(job: Job) -> None:
    seen = job.ranks[0]["no_daemon_later"]
    assert 0 < seen["dropped"] < 1500
    assert seen["slowest"] < 0.2
    assert seen["close"] < 3
    assert seen["step"] == 1500


def test_the_hook_is_cheap(job: Job, record_property: Any) -> None:
    seen = job.ranks[0]["cost"]
    record_property("marker_us", {kind: seen[kind] * 1e6 for kind in ("usual", "scheduled")})
    assert seen["parameters"] == 100
    assert seen["usual"] < 200e-6  # about 15 us on an idle core; this machine may be busy
    assert seen["scheduled"] < 300e-6


def test_markers_all_arrived(job: Job) -> None:
    assert job.ranks[0]["markers"]["dropped"] == 0
    wait_for(lambda: len(job.service.markers_of("markers")) == 12)
