from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from stored_states import of_torch, small
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import flowcheck
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.formats import to_dcp, to_torch, write_dcp, write_torch
from flowcheck.store import Store
from flowcheck.uploader import Uploader
from flowcheck.verify import verify

ROOT = Path(__file__).resolve().parent.parent

# torch says so in every load of a single process
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Tied embedding and head, two Linears of one shape, channels-last conv, batch norm, frozen and mixed dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.conv = nn.Conv2d(3, 6, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.brain = nn.Parameter(torch.randn(6).bfloat16())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(self.embed(tokens)))) * self.scale + self.frozen
        x = x + self.norm(self.conv(image)).mean((2, 3)) * self.wide.float() * self.brain.float() * self.mask
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 11, (8,), generator=source)
    return tokens, torch.randn(8, 3, 4, 4, generator=source), torch.randint(0, 11, (8,), generator=source)


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens, image, target = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens, image), target).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + step)
        optimizer.step()


def make_optimizer(kind: str, model: Net) -> torch.optim.Optimizer:
    """Two groups, in another order than named_parameters; the second has both same-shaped Linears, swapped."""
    swapped = [model.second.weight, model.first.weight]
    rest = [p for p in reversed(list(model.parameters())) if p.requires_grad and not any(p is q for q in swapped)]
    groups = [
        {"params": rest, "lr": 0.01, "initial_lr": 0.01},
        {"params": swapped, "lr": 0.03, "initial_lr": 0.03, "weight_decay": 0.1},
    ]
    optimizer = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(groups, betas=(0.8, 0.95), amsgrad=True),
        "adamw": lambda: torch.optim.AdamW(groups),
        "adamw_named": lambda: torch.optim.AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad]),
    }[kind]()
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def job(kind: str, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = make_optimizer(kind, model)
    train(model, optimizer, range(steps))
    return model, optimizer


def equal(a: object, b: object, where: str = "") -> None:
    """Assert equality of nested values: types, keys in any order, tensors by dtype, shape, stride and bits."""
    assert type(a) is type(b), (where, type(a), type(b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), where
        assert bits(a) == bits(b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            equal(x, y, f"{where}[{n}]")
    else:
        assert a == b, where


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


OPTIMIZERS = ["sgd", "momentum", "adam", "adamw", "adamw_named"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_torch_file_is_what_the_trainer_itself_would_have_saved(kind: str, tmp_path: Path) -> None:
    model, optimizer = job(kind, 4)
    write_torch(of_torch(model, optimizer, 4), tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    equal(loaded["model"], dict(model.state_dict()))
    equal(loaded["optimizer"], optimizer.state_dict())
    assert (loaded["step"], loaded["epoch"], loaded["run"], loaded["not_covered"]) == (4, 1, "run", [])
    assert loaded["confirmed"] is True and loaded["exact"] is True
    tied = loaded["model"]["head.weight"], loaded["model"]["embed.weight"]
    assert tied[0].untyped_storage().data_ptr() == tied[1].untyped_storage().data_ptr()
    assert loaded["model"]["conv.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("through", ["file", "store", "url", "dcp"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_from_what_was_restored(kind: str, through: str, tmp_path: Path) -> None:
    model, optimizer = job(kind, 5)
    snapshot = of_torch(model, optimizer, 5)
    train(model, optimizer, range(5, 10))  # the uninterrupted run

    fresh = Net(seed=77)
    resumed = make_optimizer(kind, fresh)
    if through == "dcp":
        write_dcp(snapshot, tmp_path / "out")
        load_dcp(fresh, resumed, tmp_path / "out")
    else:
        if through in ("store", "url"):
            url = f"file://{tmp_path}/mounted"
            with Store(tmp_path / "store") as store:
                assert store.open_epoch("run") == 1
                store.save(snapshot)
                uploader = Uploader(store, url, keep=1, report=pytest.fail)
                uploader.start()
                uploader.offer("run", 1, 5)
                uploader.finish()
            state = flowcheck.load(url if through == "url" else str(tmp_path / "store"))
        else:
            write_torch(snapshot, tmp_path / "out.pt")
            state = torch.load(tmp_path / "out.pt", weights_only=True)
        fresh.load_state_dict(state["model"], strict=True)
        resumed.load_state_dict(state["optimizer"])
    assert fresh.head.weight is fresh.embed.weight
    train(fresh, resumed, range(5, 10))
    for (name, a), (_, b) in zip(model.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert bits(a) == bits(b), name
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert bits(value) == bits(resumed.state[q][key]), key


def load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """What a training script does: ask for its own names, load into them, set them."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": -1}
    checkpoint.load(state, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def test_moments_stay_with_their_names_when_shapes_cannot_tell(tmp_path: Path) -> None:
    model, optimizer = job("adamw", 3)
    state = to_torch(of_torch(model, optimizer, 3))
    numbers = state["optimizer"]["param_groups"][1]["params"]
    for number, parameter in zip(numbers, (model.second.weight, model.first.weight), strict=True):
        assert bits(state["optimizer"]["state"][number]["exp_avg"]) == bits(optimizer.state[parameter]["exp_avg"])
    moments = to_dcp(of_torch(model, optimizer, 3))["optimizer"]["state"]
    assert bits(moments["first.weight"]["exp_avg"]) == bits(optimizer.state[model.first.weight]["exp_avg"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_0_restores_into_a_fresh_job(kind: str, tmp_path: Path) -> None:
    model, optimizer = job(kind, 0)
    snapshot = of_torch(model, optimizer, 0)
    write_torch(snapshot, tmp_path / "out.pt")
    equal(torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"], optimizer.state_dict())
    write_dcp(snapshot, tmp_path / "out")
    fresh = Net(seed=77)
    resumed = make_optimizer(kind, fresh)
    assert load_dcp(fresh, resumed, tmp_path / "out") == 0
    train(model, optimizer, range(3))
    train(fresh, resumed, range(3))
    for (name, a), (_, b) in zip(model.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert bits(a) == bits(b), name


def test_where_zeros_are_no_fresh_state_loading_says_so(tmp_path: Path) -> None:
    """SGD with dampening: its first step copies the gradient, a buffer of zeros would shrink it."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    write_dcp(of_torch(*make(), 0), tmp_path / "out")
    with pytest.raises(CheckpointException, match=r"Missing key .*momentum_buffer"):
        load_dcp(*make(), tmp_path / "out")


def test_parameters_without_state_and_empty_groups_survive(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (list(layer.parameters()) for layer in model)
    groups = [{"params": first}, {"params": [], "lr": 0.5}, {"params": second}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model[0](torch.ones(1, 2)).sum().backward()  # the second layer never gets a gradient
    optimizer.step()
    write_torch(of_torch(model, optimizer, 1), tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    equal(state, optimizer.state_dict())
    assert set(state["state"]) == {0, 1} and [len(g["params"]) for g in state["param_groups"]] == [2, 0, 2]


def test_the_copy_is_the_callers_own(tmp_path: Path) -> None:
    model, optimizer = job("adamw", 1)
    snapshot = of_torch(model, optimizer, 1)
    before = {key: data.copy() for key, (_, data) in snapshot.tensors.items()}
    state = to_torch(snapshot)
    for tensor in state["model"].values():
        tensor.zero_()
    assert all((snapshot.tensors[key][1] == data).all() for key, data in before.items())


def test_the_stored_folder_loads_with_safetensors_for_torch(tmp_path: Path) -> None:
    model, optimizer = job("adamw", 3)
    with Store(tmp_path) as store:
        store.open_epoch("run")
        folder = store.save(of_torch(model, optimizer, 3))
    flat = safetensors.torch.load_file(folder / "model.safetensors")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert flat.keys() == expected.keys()
    for name, tensor in expected.items():
        assert flat[name].dtype == tensor.dtype and bits(flat[name]) == bits(tensor), name
    moments = safetensors.torch.load_file(folder / "optimizer.safetensors")
    assert bits(moments["optimizer.state.first.weight.exp_avg"]) == bits(optimizer.state[model.first.weight]["exp_avg"])
    fresh = Net(seed=5)
    missing, unexpected = safetensors.torch.load_model(fresh, folder / "model.safetensors")
    assert not missing and not unexpected and bits(fresh.head.weight) == bits(model.embed.weight)


def test_the_dcp_folder_has_the_names_of_get_state_dict(tmp_path: Path) -> None:
    model, optimizer = job("adamw", 2)
    write_dcp(of_torch(model, optimizer, 2), tmp_path / "out")
    names = checkpoint.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {"model.embed.weight", "model.head.weight", "model.norm.running_mean", "model.frozen", "step"} <= set(names)
    assert {"optimizer.state.first.weight.exp_avg", "optimizer.param_groups.1.lr"} <= set(names)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "flat.pt")
    assert torch.load(tmp_path / "flat.pt", weights_only=True)["step"] == 2


def test_all_dtypes_and_strides_pass(tmp_path: Path) -> None:
    snapshot = small(3)
    write_torch(snapshot, tmp_path / "out.pt")
    model = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    for key, (spec, data) in snapshot.tensors.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer" or name == "mask":
            continue
        tensor = model[name]
        assert (str(tensor.dtype), tensor.shape, tensor.stride()) == (f"torch.{spec.dtype}", spec.shape, spec.stride)
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        assert flat.numpy().tobytes() == data.tobytes(), key


# the output's life


@pytest.mark.parametrize(("write", "name"), [(write_torch, "out.pt"), (write_dcp, "out")])
def test_an_output_is_replaced_only_by_the_same_kind_of_output(write, name: str, tmp_path: Path) -> None:
    model, optimizer = job("adamw", 1)
    out = tmp_path / "deep" / "er" / name
    seen: list[tuple[int, int]] = []
    write(of_torch(model, optimizer, 1), out, lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]
    assert not verify(out).problems
    train(model, optimizer, range(1, 2))
    write(of_torch(model, optimizer, 2), out)
    assert not verify(out).problems
    other = write_dcp if write is write_torch else write_torch
    with pytest.raises(UsageError, match="exists and is not an earlier output"):
        other(of_torch(model, optimizer, 2), out)
    foreign = tmp_path / "precious"
    foreign.write_text("do not touch")
    with pytest.raises(UsageError):
        write(of_torch(model, optimizer, 2), foreign)
    assert foreign.read_text() == "do not touch"
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(("write", "name"), [(write_torch, "out.pt"), (write_dcp, "out")])
def test_a_damaged_output_is_named_by_verify(write, name: str, tmp_path: Path) -> None:
    model, optimizer = job("adamw", 1)
    out = tmp_path / name
    write(of_torch(model, optimizer, 1), out)
    victim = out if out.is_file() else out / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert verify(out).problems == [f"{victim}: differs from its checksum"]
    victim.unlink()
    if out.is_dir():
        assert verify(out).problems == [f"{victim}: missing"]


def test_a_replacement_that_fails_leaves_the_earlier_output(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a child process: the write fails with a real EFBIG in the middle."""
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import resource
from stored_states import plain
from flowcheck.errors import FlowcheckError
from flowcheck.formats import write_dcp, write_torch
from flowcheck.verify import verify
for write, name in ((write_torch, "out.pt"), (write_dcp, "out")):
    out = Path({str(tmp_path)!r}) / name
    write(plain(1, 1 << 20), out)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
    try:
        write(plain(2, 16 << 20), out)
    except FlowcheckError as error:
        print(error)
    else:
        raise SystemExit("not noticed")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not verify(out).problems
    assert not list(Path({str(tmp_path)!r}).rglob(".tmp-*"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large") == 2, done.stdout
    assert torch.load(tmp_path / "out.pt", weights_only=True)["step"] == 1


def test_a_killed_restore_is_swept_by_the_next_one(tmp_path: Path) -> None:
    dead = tmp_path / ".tmp-out.pt-999999-0"
    dead.write_bytes(b"half")
    other = tmp_path / ".tmp-other.pt-999999-0"
    other.write_bytes(b"of another output")
    write_torch(small(1), tmp_path / "out.pt")
    assert not dead.exists() and other.exists()


def test_a_state_of_no_group_is_refused() -> None:
    snapshot = small(1)
    snapshot.tensors["optimizer/ghost/exp_avg"] = snapshot.tensors["model/half"]
    with pytest.raises(FlowcheckError, match="ghost"):
        to_torch(snapshot)
    snapshot = small(1)
    snapshot.groups = []
    with pytest.raises(FlowcheckError, match="0 param groups, the job has 1"):
        to_torch(snapshot)


# another world size, sharded by FSDP2


class Tied(nn.Module):
    """Uneven shapes, so that shards of 2 and 3 ranks differ; tied embedding and head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(self.norm(x))


def tied_job(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied(seed)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decay}], lr=0.02)


def load_in_turn(rank: int, ports: dict[int, int], folder: str, expected: str) -> None:
    """One process of every world: world size -> port."""
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    for world, port in ports.items():
        if rank < world:
            load_sharded(rank, world, port, folder, expected)
    os._exit(0)  # torch's own threads sometimes abort the interpreter's end


def load_sharded(rank: int, world: int, port: int, folder: str, expected: str) -> None:
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model, _ = tied_job(seed=rank)
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decay}], lr=0.5)
    assert load_dcp(model, optimizer, Path(folder)) == 3

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    truth = torch.load(expected, weights_only=True)
    state, optimizer_state = get_state_dict(model, optimizer)
    assert state.keys() == truth["model"].keys()
    assert any(isinstance(tensor, DTensor) for tensor in state.values())
    for name, tensor in state.items():
        assert bits(whole(tensor)) == bits(truth["model"][name]), name
    assert optimizer_state["state"].keys() == truth["optimizer"]["state"].keys()
    for name, entry in optimizer_state["state"].items():
        for key, value in entry.items():
            assert bits(whole(value)) == bits(truth["optimizer"]["state"][name][key]), (name, key)
    for mine, theirs in zip(optimizer_state["param_groups"], truth["optimizer"]["param_groups"], strict=True):
        assert mine["params"] == theirs["params"] and mine["weight_decay"] == theirs["weight_decay"]
        assert mine["lr"] == theirs["lr"] == 0.02 and tuple(mine["betas"]) == theirs["betas"]
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_fsdp2_on_other_world_sizes_loads_every_bit(tmp_path: Path) -> None:
    model, optimizer = tied_job(seed=9)
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(0, 13, (16,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
    snapshot = of_torch(model, optimizer, 3)
    write_dcp(snapshot, tmp_path / "out")
    truth = {"model": dict(model.state_dict()), "optimizer": copy.deepcopy(to_dcp(snapshot)["optimizer"])}
    torch.save(truth, tmp_path / "truth.pt")
    ports = {world: free_port() for world in (3, 2)}
    torch.multiprocessing.spawn(load_in_turn, (ports, str(tmp_path / "out"), str(tmp_path / "truth.pt")), nprocs=3)
