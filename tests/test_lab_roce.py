"""The lab over RoCE: real trainers on its NCCL backend, through the kernel's mirroring, read back by the transport."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tcp_frames import block_of

from flowcheck.errors import UsageError
from flowcheck.lab import LabConfig, Mirror, run
from flowcheck.lab.addresses import Port
from flowcheck.lab.command import lab_command
from flowcheck.lab.nccl_log import debug_file, log_lines
from flowcheck.lab.nccl_wire import Call, Communicator, frames_of, mirrored
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.supervisor import from_json, to_json
from flowcheck.lab.topology import trainer_environment
from mirror.capfile import CaptureFileSource
from mirror.messages import MessageRecorder
from mirror.roce import QueuePairs, RoceReassembler

# Records every frame of the monitor port to --store/mirrored.pcap.
CAPTURE = """
import argparse, signal
from mirror.afpacket import AfPacketSource
from mirror.record import PcapRecorder
parser = argparse.ArgumentParser()
parser.add_argument("-i"); parser.add_argument("--listen", action="append"); parser.add_argument("--store")
known, _ = parser.parse_known_args()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
source, recorder = AfPacketSource(known.i), PcapRecorder(known.store + "/mirrored.pcap")
print("listening", known.listen[0], flush=True)
while True:
    block = source.read(0.2)
    if block is not None:
        recorder.write(block)
        source.release(block)
    elif stop:
        break
recorder.close()
assert source.counters().drops == 0
"""

# Collectives with values that the test can make again; each rank prints what it got.
COLLECTIVES = """
import hashlib, json, os, sys
import numpy as np
import torch
import torch.distributed as dist
dist.init_process_group(*sys.argv[1:])
rank, world = dist.get_rank(), dist.get_world_size()

def values(seed, count, member):
    return torch.from_numpy(np.random.default_rng([seed, member]).standard_normal(count).astype(np.float32))

digests = []
def note(tensor):
    digests.append(hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())

first = values(1, 50_021, rank)
dist.all_reduce(first)
note(first)
half = values(2, 3000, rank).bfloat16()
work = dist.all_reduce(half, op=dist.ReduceOp.AVG, async_op=True)
work.wait()
note(half)
shared = values(3, 4000, 1)
if rank != 1:
    shared.zero_()
dist.broadcast(shared, 1)
note(shared)
parts = [torch.empty(700) for _ in range(world)]
dist.all_gather(parts, values(4, 700, rank))
note(torch.cat(parts))
own = torch.empty(64)
dist.reduce_scatter_single(own, values(5, 64 * world, rank))
largest = values(6, 10, rank)
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
note(largest)
dist.barrier()
if rank == 0:
    dist.send(values(7, 40_000, 0), world - 1)
elif rank == world - 1:
    got = torch.empty(40_000)
    dist.recv(got, 0)
    assert (got == values(7, 40_000, 0)).all()
count = dist.group.WORLD._get_sequence_number_for_group()
second = dist.new_group([0, world - 1])
if rank in (0, world - 1):
    pair = values(8, 900, rank)
    dist.all_reduce(pair, group=second)
    assert torch.allclose(pair, values(8, 900, 0) + values(8, 900, world - 1))
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert [found["rank"] for found in objects] == list(range(world))
total = sum(values(5, 64 * world, member).double() for member in range(world))[64 * rank : 64 * rank + 64]
assert torch.allclose(own.double(), total, atol=1e-5)
name = dist.group.WORLD._get_backend(torch.device("cpu")).name()
print(json.dumps({"digests": digests, "sequence": count, "name": name}), flush=True)
"""

# Goes on behind COLLECTIVES: a small model.
DDP = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(1)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Tanh(), torch.nn.Linear(300, 50)), bucket_cap_mb=0.05)
log = open(os.environ["NCCL_DEBUG_FILE"].replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))).read()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
digests, losses = [], []
for step in range(4):
    optimizer.zero_grad()
    torch.manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(8, 100)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
    digests.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
print(json.dumps({"trained": digests, "falls": losses[-1] < losses[0], "log": log}), flush=True)
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path, allowed: None) -> Path:
    (tmp_path / "capture.py").write_text(CAPTURE)
    (tmp_path / "collectives.py").write_text(COLLECTIVES + END)
    (tmp_path / "ddp.py").write_text(COLLECTIVES + DDP + END)
    (tmp_path / "store").mkdir()
    return tmp_path


def trained(folder: Path, script: str, capfd: pytest.CaptureFixture[str], **fields: object) -> list[dict]:
    """Run a script in a lab with the capture program as daemon; what each rank printed."""
    config = LabConfig(
        command=(str(folder / script),), daemon=(sys.executable, str(folder / "capture.py")),
        store=str(folder / "store"), transport="roce")
    assert run(replace(config, **fields)) == 0, capfd.readouterr().err
    lines = re.findall(r"^\[rank \d+\] (\{.*)$", capfd.readouterr().out, re.M)
    return [json.loads(line) for line in lines]


Kept = dict[tuple[str, str, int], list[tuple[int, int | None, bytes]]]


def messages(made: list[tuple[int, object, bytes]] | Path) -> Kept:
    """(source, destination, queue pair) -> (address, immediate, bytes) of every message; all must be whole."""
    roce = RoceReassembler(QueuePairs(4096), check_icrc=True)
    recorder = MessageRecorder(roce)
    now = 0
    if isinstance(made, Path):
        source = CaptureFileSource([made])
        while (block := source.read(0.0)) is not None:
            now = int(block.ts[-1])
            recorder.feed(roce.feed(block, now))
            source.release(block)
        source.close()
    else:
        now = made[-1][0]
        recorder.feed(roce.feed(block_of([frame for *_, frame in made], [time for time, *_ in made]), now))
    recorder.feed(roce.flush(now))
    assert not recorder.lost and roce.icrc[: roce.flows.count, 1].sum() == 0
    found: Kept = defaultdict(list)
    for message in sorted(recorder.messages, key=lambda message: message.first_psn):
        assert message.complete and message.va is not None
        found[message.source, message.destination, message.queue_pair].append((message.va, message.imm, message.data))
    return found


def values(seed: int, count: int, member: int) -> np.ndarray:
    return np.random.default_rng([seed, member]).standard_normal(count).astype(np.float32)


def expected(job: Job) -> list[tuple[int, object, bytes]]:
    """The frames of COLLECTIVES' first communicator up to its barrier, made without a network."""
    import torch

    def of(seed: int, count: int) -> list[np.ndarray]:
        return [values(seed, count, member) for member in range(job.ranks)]

    halves = [torch.from_numpy(v).bfloat16().view(torch.int16).numpy().view(np.uint16) for v in of(2, 3000)]
    return frames_of(job, [
        Call("allreduce", of(1, 50_021)),
        Call("allreduce", halves, "bfloat16", "avg"),
        Call("broadcast", [values(3, 4000, 1)] * job.ranks, root=1),
        Call("allgather", of(4, 700)),
        Call("reducescatter", of(5, 64 * job.ranks)),
        Call("allreduce", of(6, 10), op="max"),
        Call("allreduce", [np.zeros(1, np.float32)] * job.ranks),
        Call("sendrecv", of(7, 40_000), root=0, target=job.ranks - 1),
    ])


CASES = {
    "ring, two ranks": ({"ranks": 2, "nccl_version": "2.19.4", "protocol": "ll"}, None),
    "simple ring over IPv6, one way": (
        {"ranks": 3, "algorithm": "ring", "protocol": "simple", "ipv6": True, "nccl_version": "2.20.5",
         "mirrors": (Mirror(2, "out"),)}, {(Port(2, 0), "out")}),
    "tree, two rails": (
        {"ranks": 4, "ranks_per_node": 2, "rails": 2, "algorithm": "tree", "protocol": "ll128", "channels": 2,
         "mtu": 4096, "mirrors": (Mirror(3, "both"),)}, {(Port(1, 1), "in"), (Port(1, 1), "out")}),
    "nvlstree": (
        {"ranks": 4, "ranks_per_node": 2, "rails": 2, "algorithm": "nvlstree", "channels": 2, "mtu": 4096}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mirror_shows_what_nccl_would_send(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fields, ports = CASES[name]
    script = "ddp.py" if name == "nvlstree" else "collectives.py"
    command = (str(folder / script), *(["nccl"] if fields["ranks"] == 3 else []))
    lines = trained(folder, script, capfd, command=command, **fields)
    said = [line for line in lines if "digests" in line]
    config = LabConfig(transport="roce", **fields)
    assert len(said) == config.ranks
    if script == "ddp.py":
        _check_ddp([line for line in lines if "trained" in line], config.ranks)
    assert len({tuple(one["digests"]) for one in said}) == 1, "all ranks hold the same bits"
    assert all(one["sequence"] == 7 and one["name"] == "nccl" for one in said)

    wanted = set(config.mirrored_ports())
    assert ports is None or wanted == ports
    seen = messages(folder / "store" / "mirrored.pcap")
    made = mirrored(expected(config.job()), wanted)
    shown = messages(made)
    assert shown
    for flow, sent in shown.items():
        assert seen[flow][: len(sent)] == sent, flow
    # The second communicator's queue pairs are others; ranks 0 and N-1 have one connection each way.
    others = {flow for flow in seen if flow[2] >= 0x1200}
    assert set(shown) <= set(seen) - others
    if ports is None:
        assert len(others) == 4
        _check_order(folder / "store" / "mirrored.pcap")


def _check_ddp(said: list[dict], ranks: int) -> None:
    """A model trains alike on all ranks, and the log tells the rings."""
    assert len(said) == ranks
    assert len({tuple(one["trained"]) for one in said}) == 1 and all(one["falls"] for one in said)
    log = next(one["log"] for one in said if "NCCL version" in one["log"])
    assert "NCCL version 2.28.9" in log and "Channel 01/02 :" in log and "[send] via NET/IB/0" in log


def _check_order(path: Path) -> None:
    """Announcements come before data, acknowledgements after. IPv4, both directions of a node."""
    free: dict[tuple[bytes, int], int] = defaultdict(int)  # by receiver and address
    sent: dict[bytes, int] = defaultdict(int)              # by sender: messages that ask for an acknowledgement
    for frame in _frames(path):
        opcode, source, target = frame[42], frame[26:30], frame[30:34]
        if opcode == 10:
            free[source, int.from_bytes(frame[70:78], "little")] += 1
        elif opcode in (6, 11):
            slot = target, int.from_bytes(frame[54:62], "big")
            assert free[slot] > 0, "data into a slot that was not announced"
            free[slot] -= 1
        if frame[50] & 0x80:
            assert opcode in (9, 10, 11)
            sent[source] += 1
        elif opcode == 17:
            sent[target] -= 1
            assert sent[target] >= 0, "an acknowledgement of nothing"
    assert set(free.values()) == {0} == set(sent.values())


def _frames(path: Path) -> Iterator[bytes]:
    source = CaptureFileSource([path])
    while (block := source.read(0.0)) is not None:
        for at, size in zip(block.offset.tolist(), block.caplen.tolist(), strict=True):
            frame = block.base[at : at + size].tobytes()
            if frame[12:14] == b"\x08\x00" and frame[23] == 17 and frame[36:38] == (4791).to_bytes(2, "big"):
                yield frame
        source.release(block)
    source.close()


def test_the_log_says_where_everything_is() -> None:
    job = Job(8, 4, "2.22.3", "nvlstree", channels=4, rails=2, mtu=4096)
    comm = Communicator(job)
    environment = {"NCCL_ALGO": "allreduce:nvlstree", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/x/%h.%p"}
    assert str(debug_file(environment)).startswith("/x/") and "%" not in str(debug_file(environment))
    assert debug_file({**environment, "NCCL_DEBUG": "WARN"}) is None
    logs = [list(log_lines(job, rank, comm.of_rank(rank), environment)) for rank in range(8)]
    assert logs[0][0] == "NCCL version 2.22.3+cuda12.4"
    text = ["\n".join(lines) for lines in logs]
    assert "NCCL_ALGO set by environment to allreduce:nvlstree" in text[0]
    # Two search channels: the second starts at local rank 1; channels 2 and 3 are their copies.
    rings = re.findall(r"Channel (\d+)/04 :((?: +\d+)+)", text[0])
    assert [(c, r.split()) for c, r in rings] == [
        ("00", list("01234567")), ("01", list("05674123")), ("02", list("01234567")), ("03", list("05674123"))]
    assert "Ring 00 : 7 -> 0 -> 1" in text[0] and "Ring 01 : 3 -> 0 -> 5" in text[0]
    assert "NVLS Head  0:  0  4" in text[3] and "NVLS Head  1:  1  5" in text[3]
    trees = dict(re.findall(r"\[(\d)\] (\S+)", re.search(r"Trees (.*)", text[0])[1]))
    # Node 1 hangs below rank 0 in tree 0 of channel 0, and is above it in channel 2's tree 1.
    assert trees["0"] == "1/4/-1->0->-1" and trees["2"] == "1/-1/-1->0->4"
    sends = {re.sub(r".*Channel (\d+)/0 : (\d+)\[\d\] -> (\d+)\[\d\] \[send\] via NET/IB/(\d)$", r"\1 \2 \3 \4", line)
             for lines in logs for line in lines if "[send] via NET" in line}
    assert {"00 3 4 1", "00 7 0 1", "00 0 4 0", "02 4 0 0"} <= sends
    assert len(sends) == sum(len(comm.of_rank(rank)) for rank in range(8)) // 2
    for rank in (0, 5):
        numbers = [int(n) for n in re.findall(r"Dev \d Port 1 qpn (\d+) mtu 5 GID 3", text[rank])]
        assert len(numbers) == len(set(numbers)) == len(comm.of_rank(rank))
    assert "GID 3 (0/2014D0AFFFF0000)" in text[5], "::ffff:10.77.1.2, two words read as they lie in memory"


def test_the_environment_is_that_of_a_pinned_job() -> None:
    config = LabConfig(ranks=4, ranks_per_node=2, transport="roce", algorithm="tree", protocol="ll", channels=2)
    found = trainer_environment(config, 2)
    assert found["NCCL_ALGO"] == "allreduce:tree" and found["NCCL_PROTO"] == "LL"
    assert found["NCCL_MIN_NCHANNELS"] == found["NCCL_MAX_NCHANNELS"] == "2"
    assert json.loads(found["FLOWCHECK_LAB_NCCL"])["address"] == "10.78.0.2"
    assert trainer_environment(replace(config, nccl_version="2.20.5"), 0)["NCCL_ALGO"] == "Tree"
    free = trainer_environment(LabConfig(transport="roce"), 0)
    assert "NCCL_ALGO" not in free and "NCCL_PROTO" not in free
    assert not any(name.startswith("NCCL") for name in trainer_environment(LabConfig(), 0))


def test_the_command_line_becomes_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[LabConfig] = []
    monkeypatch.setattr("flowcheck.lab.launcher.run", lambda config: taken.append(config) or 0)
    text = ("--transport roce --ranks 8 --gpus-per-node 4 --rails 2 --nccl-version 2.22.3 --algorithm tree "
            "--protocol ll128 --channels 4 --mtu 4096 train.py")
    assert CliRunner().invoke(lab_command, text.split()).exit_code == 0
    assert taken == [LabConfig(
        command=("train.py",), ranks=8, ranks_per_node=4, transport="roce", rails=2, nccl_version="2.22.3",
        algorithm="tree", protocol="ll128", channels=4, mtu=4096)]
    assert from_json(json.loads(json.dumps(to_json(taken[0])))) == taken[0]
    assert taken[0].mirrored_ports() == [(Port(0, rail), way) for rail in (0, 1) for way in ("in", "out")]
    assert taken[0].port_of(7) == Port(1, 1)
    assert LabConfig(transport="roce").mtu == 1024 and LabConfig(transport="roce").interface_mtu == 1500
    assert taken[0].interface_mtu >= 4096 + 40 + 8 + 12 + 16 + 4 + 4


def test_impossible_labs_are_refused() -> None:
    for fields, message in (
        ({"transport": "ib"}, "tcp, roce or socket"),
        ({"transport": "roce", "mtu": 1500}, "1024 or 4096"),
        ({"transport": "roce", "algorithm": "pat"}, "ring, tree, nvlstree"),
        ({"transport": "roce", "protocol": "ll64"}, "ll, ll128, simple"),
        ({"transport": "roce", "nccl_version": "2.31.1"}, "2.18 to 2.30"),
        ({"transport": "roce", "rails": 2}, "1 GPUs"),
        ({"transport": "roce", "algorithm": "nvlstree", "protocol": "ll"}, "NVLSTree knows no ll"),
        ({"rails": 2, "ranks_per_node": 2}, "--transport roce"),
    ):
        with pytest.raises(UsageError, match=message):
            LabConfig(**fields)
