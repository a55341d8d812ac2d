"""The lab: real namespaces, mirroring and processes; a small capture program stands in for the daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner
from ordinary_user import RUN_AS_USER, as_ordinary_user

from flowcheck.errors import FlowcheckError, NoPermission, UsageError
from flowcheck.lab import Lab, LabConfig, Mirror, run
from flowcheck.lab.command import lab_command
from flowcheck.lab.config import check_command
from flowcheck.lab.output import LinePrefixer
from flowcheck.lab.supervisor import from_json, to_json

ROOT = Path(__file__).resolve().parent.parent

# Captures every frame of the monitor port and every datagram that reaches the checkpoint node over the
# management network; keeps {payload: count} of test datagrams, sizes and its command line in --store/seen.json.
CAPTURE = """
import argparse, collections, json, os, select, signal, socket, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("-i"); parser.add_argument("--listen", action="append"); parser.add_argument("--store")
known, rest = parser.parse_known_args()
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)); frames.bind((known.i, 0))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); datagrams.bind(("0.0.0.0", 7))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("listening", known.listen[0], flush=True)
seen = collections.Counter(); direct = collections.Counter(); sizes = collections.Counter(); tcp = 0

def save():
    report = {"seen": seen, "direct": direct, "largest": max(sizes, default=0), "frames": sum(sizes.values()),
              "tcp": tcp, "argv": sys.argv[1:], "cpus": sorted(os.sched_getaffinity(0))}
    with open(known.store + "/seen.new", "w") as out:
        json.dump(report, out)
    os.rename(known.store + "/seen.new", known.store + "/seen.json")

saved = 0.0
while True:
    ready, _, _ = select.select([frames, datagrams], [], [], 0.1)
    if time.monotonic() - saved > 0.1 or not ready:
        save()
        saved = time.monotonic()
    if stop and not ready:
        break
    if frames in ready:
        data = frames.recv(1 << 18)
        sizes[len(data)] += 1
        at = data.find(b"<from ")
        if at >= 0 and data.find(b"> end") > 0:
            seen[data[at : data.find(b"> end")].decode()] += 1
        tcp += len(data) if len(data) > 1000 else 0
    if datagrams in ready:
        direct[datagrams.recv(2000).decode()] += 1
print("final snapshot written", flush=True)
"""

# Every rank tells every other one who it is, over both networks; rank 0 also sends 2 MB over TCP to the last rank.
# In small pieces: the capture program has no ring.
TALK = """
import os, socket, sys, time
from flowcheck.lab import topology
from flowcheck.lab.supervisor import from_json
import json
config = from_json(json.loads(os.environ["LAB_CONFIG"]))
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
family = socket.AF_INET6 if config.ipv6 else socket.AF_INET
address = lambda r: topology.training_address(config, config.node_of(r))
inbox = socket.socket(family, socket.SOCK_DGRAM); inbox.bind((address(rank), 1000 + rank))
got = set()
out = socket.socket(family, socket.SOCK_DGRAM)
aside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server = socket.create_server((address(rank), 2000 + rank), family=family)
time.sleep(0.2)
while len(got) < world - 1:
    for other in range(world):
        if other != rank:
            out.sendto(b"<from %d to %d> end" % (rank, other), (address(other), 1000 + other))
            there = topology.management_address(config.node_of(other))
            aside.sendto(b"<from %d aside %d> end" % (rank, other), (there, 9))
    inbox.settimeout(0.1)
    try:
        while len(got) < world - 1:
            got.add(inbox.recv(100))
    except TimeoutError:
        pass
aside.sendto(b"%d" % rank, ("checkpoint", 7))
if rank == 0:
    for attempt in range(100):
        try:
            bulk = socket.create_connection((address(world - 1), 2000 + world - 1), timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    for piece in range(50):
        bulk.sendall(bytes(40_000)); time.sleep(0.002)
    bulk.close()
if rank == world - 1:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "GLOO_SOCKET_IFNAME", "FLOWCHECK_ENDPOINT", "FLOWCHECK_KEY", "OMP_NUM_THREADS", "MINE"]
print(json.dumps({**{n: os.environ.get(n) for n in names}, "argv": sys.argv[1:], "cwd": os.getcwd(),
                  "cpus": sorted(os.sched_getaffinity(0))}))
"""

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(600, 500))
for step in range(2):
    model(torch.full((4, 600), float(dist.get_rank() + step))).sum().backward()
total = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(total)
assert total[7] == sum(range(1, dist.get_world_size() + 1)), total
print("reduced", os.getuid(), flush=True)
dist.destroy_process_group()
os._exit(0)  # torch's own threads sometimes abort the interpreter's end
"""


@pytest.fixture
def folder(tmp_path: Path, allowed: None) -> Path:
    (tmp_path / "capture.py").write_text(CAPTURE)
    (tmp_path / "store").mkdir()
    return tmp_path


def config_for(folder: Path, script: str, **fields: object) -> LabConfig:
    """A lab that runs `script`, with the capture program as its daemon."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    config = LabConfig(
        command=(str(folder / "script.py"), "--flag", "a b"),
        daemon=(sys.executable, str(folder / "capture.py")),
        store=str(folder / "store"),
    )
    config = replace(config, **fields)
    return replace(config, env={"LAB_CONFIG": json.dumps(to_json(config)), **config.env})


def seen(folder: Path) -> dict:
    return json.loads((folder / "store" / "seen.json").read_text())


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def messages(ports: set[tuple[int, str]], ranks: int, per_node: int) -> set[str]:
    """The test messages that mirrors of these (node, direction) must show."""
    shown = set()
    for sender in range(ranks):
        for receiver in range(ranks):
            source, target = sender // per_node, receiver // per_node
            if source != target and ((source, "in") in ports or (target, "out") in ports):
                shown.add(f"<from {sender} to {receiver}")
    return shown


CASES = {
    "default": (3, 1, None, {(1, "in"), (1, "out")}, {}),
    "one way": (3, 1, [(2, "in")], {(2, "in")}, {"monitor_offload": False}),
    "other way, jumbo": (3, 1, [(2, "out")], {(2, "out")}, {"mtu": 9000, "monitor_offload": False}),
    "two links, management": (
        4,
        1,
        [(2, "in"), (3, "in")],
        {(2, "in"), (3, "in")},
        {"rendezvous": "management"},
    ),
    "none": (2, 1, [], set(), {}),
    "ipv6": (2, 1, [(1, "both"), (1, "in")], {(1, "in"), (1, "out")}, {"ipv6": True}),
    "two a node": (5, 2, [(3, "in"), (2, "in")], {(1, "in")}, {}),
}


# The others are for `make test-all`.
FEW = ("default", "two a node")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_switch_mirrors_exactly_the_named_ports(name: str, folder: Path, capfd, monkeypatch) -> None:
    ranks, per_node, mirrors, ports, more = CASES[name]
    chosen = None if mirrors is None else tuple(Mirror(*mirror) for mirror in mirrors)
    cpu = min(os.sched_getaffinity(0))
    config = config_for(
        folder,
        TALK,
        ranks=ranks,
        ranks_per_node=per_node,
        mirrors=chosen,
        trainer_cpus=(cpu,),
        daemon_cpus=(cpu,),
        journal="steps.jsonl",
        faults=("drop=0.1", "seed=2"),
        **more,
    )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MINE", "kept")
    assert run(config) == 0
    report = seen(folder)
    assert set(report["seen"]) == messages(ports, ranks, per_node)
    assert all(not key.startswith("<from") or "aside" not in key for key in report["seen"])
    assert set(report["direct"]) == {str(rank) for rank in range(ranks)}, (
        "the management network reaches the daemon"
    )

    # Rank 0 sent 2 MB to the last rank: whole where its way is mirrored, in the frames asked for.
    if (0, "in") in ports or ((ranks - 1) // per_node, "out") in ports:
        assert report["tcp"] > 2_000_000
        if config.monitor_offload:
            assert report["largest"] > 20_000
        else:
            assert report["largest"] == config.mtu + 14
    else:
        assert report["tcp"] < 500_000
    if not ports:
        assert report["frames"] == 0

    output = capfd.readouterr()
    assert output.out.startswith("listening ipc:///")
    assert "[daemon] final snapshot written\n" in output.out
    lines = [line.partition("] ") for line in output.out.splitlines() if line.startswith("[rank ")]
    assert sorted(head for head, _, _ in lines) == [f"[rank {rank}" for rank in range(ranks)]
    for head, _, text in lines:
        rank, found = int(head.split()[1]), json.loads(text)
        assert found.pop("cpus") == [cpu]
        assert found == {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(min(per_node, ranks - rank // per_node * per_node)),
            "MASTER_ADDR": "10.78.0.1" if "rendezvous" in more else "fd77::1" if config.ipv6 else "10.77.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "train0",
            "FLOWCHECK_ENDPOINT": "tcp://10.78.0.254:7700",
            "FLOWCHECK_KEY": f"{report['argv'][3]}/clients/trainer.secret",
            "OMP_NUM_THREADS": "1",
            "MINE": "kept",
            "argv": ["--flag", "a b"],
            "cwd": str(folder),
        }
    listening = output.out.splitlines()[0].split()[1]
    keys = report["argv"][3]
    expected = ["-i", "mon0", "--keys", keys, "--listen", listening, "--listen", "tcp://10.78.0.254:7700"]
    assert report["argv"] == [*expected, "--store", str(folder / "store"), "--journal", "steps.jsonl",
                              "--fault", "drop=0.1", "--fault", "seed=2"]  # fmt: skip
    assert report["cpus"] == [cpu]
    assert not Path(listening.removeprefix("ipc://")).parent.exists(), "the private folder must be gone"


def test_a_real_gloo_job_trains_and_is_captured(folder: Path, capfd) -> None:
    config = config_for(folder, TRAIN, ranks=4, ranks_per_node=2, ipv6=True)
    assert run(config) == 0
    output = capfd.readouterr()
    assert output.out.count("reduced") == 4
    assert "cannot be retrieved" not in output.err, "the c10d store must find names for its clients"
    # Two reductions of 1.2 MB over a ring of four in which two links cross the switch.
    assert seen(folder)["tcp"] > 2_000_000


def test_an_ordinary_user_needs_no_rights(folder: Path) -> None:
    config = config_for(folder, TRAIN, ranks=2)
    done = as_ordinary_user(RUN_AS_USER, json.dumps(to_json(config)), folder=folder)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reduced 0") == 2, "the script is root of its own user namespace"
    assert seen(folder)["tcp"] > 1_000_000


@pytest.mark.slow
def test_where_namespaces_are_forbidden_the_lab_says_what_to_do(folder: Path) -> None:
    # A user namespace that may have no network namespaces: the kernel refuses as on a locked-down host.
    limit = """
import os
from pathlib import Path
from flowcheck.lab import namespaces
uid, gid = os.getuid(), os.getgid()
namespaces.unshare(namespaces.CLONE_NEWUSER)
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    Path("/proc/self", name).write_text(text)
Path("/proc/sys/user/max_net_namespaces").write_text("0")
"""
    config = config_for(folder, TRAIN)
    done = as_ordinary_user(limit + RUN_AS_USER, json.dumps(to_json(config)), folder=folder)
    if "PermissionError" in done.stderr:
        pytest.skip("this system has no user namespaces to limit")
    assert done.returncode == 77, done.stderr
    assert "sysctl user.max_net_namespaces=10000" in done.stderr
    assert len(done.stderr.splitlines()) == 1


EXITS = """
import os, signal, sys, time
rank = os.environ["RANK"]
if rank == "1":
    time.sleep(0.3)
    if sys.argv[1] == "status":
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
if rank == "2":
    signal.signal(signal.SIGTERM, lambda *_: (print("asked to end"), sys.exit(5)))
print("partial line", end="")
sys.stdout.flush()
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "status"), [
    ("status", 3),
    pytest.param("SIGKILL", 137, marks=pytest.mark.slow),
    pytest.param("SIGSEGV", 139, marks=pytest.mark.slow),
])
def test_exit_status_is_that_of_the_first_rank_to_fail(how: str, status: int, folder: Path, capfd) -> None:
    config = config_for(folder, EXITS, ranks=3, grace=0.5)
    config = replace(config, command=(config.command[0], how))
    begin = time.monotonic()
    assert run(config) == status
    assert time.monotonic() - begin < 6, "the others end after the grace"
    output = capfd.readouterr()
    assert f"[lab] rank 1 ended with status {status}; the others have 0.5 s\n" in output.err
    assert "[rank 2] partial lineasked to end\n" in output.out
    assert "[rank 0] partial line\n" in output.out
    assert "[daemon] final snapshot written\n" in output.out


def test_a_rank_that_ignores_the_request_to_end_is_killed_with_its_children(
    folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr("flowcheck.lab.launcher.TERMINATE", 0.5)
    script = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "1":
        sys.exit(9)
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])
    """
    config = config_for(folder, script, grace=0.3, daemon=(), env={"LAB_MARK": str(folder)})
    with Lab(config) as lab:
        assert lab.endpoint is None
        lab.train()
        assert until(lambda: len(marked(folder)) > 1)
        assert lab.wait(20) == 9
        assert lab.statuses == {0: 137, 1: 9}
        assert until(lambda: not marked(folder))


def marked(folder: Path) -> set[int]:
    """Processes anywhere on this machine that carry the test's mark in their environment."""
    mark = f"LAB_MARK={folder}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def links(kind: str) -> set[str]:
    """The namespaces of one kind that any process on this machine is in."""
    found = set()
    for path in Path("/proc").glob(f"[0-9]*/ns/{kind}"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


RUN = """
import json, sys
from flowcheck.lab import run
from flowcheck.lab.supervisor import from_json
sys.exit(run(from_json(json.loads(sys.argv[1]))))
"""


@contextmanager
def outside(folder: Path, config: LabConfig) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A lab whose outermost process is not this one, and its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(to_json(config))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LAB_MARK": str(folder)},
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            yield process, process.stdout
    finally:
        process.kill()
        process.wait()


SLEEP = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()  # a stray that left its parent's session
os.write(1, b"asleep\\n")
time.sleep(600)
"""


def test_kill_9_leaves_no_process_no_namespace_no_mount_no_file(folder: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    with outside(folder, config_for(folder, SLEEP, ranks=2)) as (process, output):
        private = Path(output.readline().split()[1].removeprefix("ipc://")).parent
        assert private.is_dir()
        assert until(lambda: (folder / "store" / "seen.json").exists())
        for _ in range(4):
            assert "asleep" in output.readline()
        inside = marked(folder)
        # The outermost process, guard, process 1, capture, two ranks and their strays.
        assert len(inside) == 8
        own = {
            kind: {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in inside} for kind in ("net", "mnt", "pid")
        }
        here = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in own}
        assert len(own["net"]) == 5 and len(own["mnt"]) == 2 and len(own["pid"]) == 2
        process.kill()
        process.wait()
        assert until(lambda: not marked(folder), 5)
    for kind, names in own.items():
        assert links(kind) & (names - {here[kind]}) == set()
    assert until(lambda: not private.exists(), 5)
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)
])
def test_a_signal_ends_the_lab_in_order(number: int, status: int, folder: Path) -> None:
    with outside(folder, config_for(folder, SLEEP, ranks=2)) as (process, output):
        assert any("asleep" in line for line in output)
        process.send_signal(number)
        assert "[daemon] final snapshot written" in output.read()
        assert process.wait(30) == status
        assert not marked(folder)


BEACON = """
import os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for count in range(3000):
    link.sendto(b"%d" % rank, ("checkpoint", 7))
    link.sendto(b"<from %d to %d> end" % (rank, 1 - rank), (f"10.77.0.{2 - rank}", 9))
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_management_goes_down_while_training_goes_on(folder: Path) -> None:
    with Lab(config_for(folder, BEACON)) as lab:
        store = folder / "store" / "seen.json"
        lab.train()
        assert until(lambda: store.exists() and set(seen(folder)["direct"]) == {"0", "1"})
        lab.set_management(False)
        time.sleep(0.5)
        before = seen(folder)
        time.sleep(0.7)
        after = seen(folder)
        assert after["direct"] == before["direct"]
        assert min(after["seen"][key] - before["seen"][key] for key in ("<from 0 to 1", "<from 1 to 0")) > 5
        lab.set_management(True)
        assert until(lambda: min(seen(folder)["direct"][key] - after["direct"][key] for key in "01") > 5)
        lab.kill()
        assert lab.wait(10) == 137
        assert lab.statuses == {0: 137, 1: 137}
        assert lab.finish() == 0


def test_ranks_and_daemon_can_be_killed_and_started_again(folder: Path) -> None:
    with Lab(config_for(folder, BEACON)) as lab:
        endpoint = lab.endpoint
        lab.train()
        with pytest.raises(TimeoutError):
            lab.wait(0.3)
        with pytest.raises(FlowcheckError, match="still run"):
            lab.train()
        lab.kill(1)
        assert until(lambda: lab_lost(lab, 1))
        lab.kill(0, number=signal.SIGTERM)
        assert lab.wait(10) == 137
        assert lab.statuses == {0: 143, 1: 137}
        assert lab.kill_daemon() == 137
        (folder / "store" / "seen.json").unlink()
        lab.start_daemon("--again")
        assert lab.endpoint == endpoint
        (folder / "second.py").write_text("import os; print(os.environ['EXTRA'])")
        lab.train([str(folder / "second.py")], {"EXTRA": "1"})
        assert lab.wait(20) == 0
        assert lab.statuses == {0: 0, 1: 0}
        assert lab.finish() == 0
        assert seen(folder)["argv"][-1] == "--again"
    with pytest.raises(FlowcheckError, match="has ended"):
        lab.train()


def lab_lost(lab: Lab, rank: int) -> bool:
    try:
        lab.wait(0.05)
    except TimeoutError:
        return rank in lab.statuses
    return True


def test_a_daemon_that_dies_is_reported_and_training_goes_on(folder: Path, capfd) -> None:
    (folder / "dies.py").write_text(
        "import sys, time\nprint('listening', sys.argv[5], flush=True)\ntime.sleep(0.3)\nsys.exit(4)\n"
    )
    script = "import time; time.sleep(1.5); print('trained')"
    config = config_for(folder, script, daemon=(sys.executable, str(folder / "dies.py")))
    assert run(config) == 1
    output = capfd.readouterr()
    assert output.out.count("trained") == 2
    assert "[lab] the daemon ended with status 4: training goes on uncovered\n" in output.err


@pytest.mark.parametrize(("status", "kind"), [
    (5, FlowcheckError), pytest.param(77, NoPermission, marks=pytest.mark.slow)
])
def test_a_daemon_that_does_not_start_fails_the_lab(status: int, kind: type, folder: Path, capfd) -> None:
    (folder / "fails.py").write_text(
        f"import sys; print('no such port', file=sys.stderr); sys.exit({status})"
    )
    config = config_for(folder, "print('trained')", daemon=(sys.executable, str(folder / "fails.py")))
    with pytest.raises(
        FlowcheckError, match=f"the daemon ended with status {status} before it listened"
    ) as caught:
        run(config)
    assert type(caught.value) is kind
    output = capfd.readouterr()
    assert "[daemon] no such port\n" in output.err
    assert "trained" not in output.out


@pytest.mark.slow
def test_a_daemon_that_never_listens_or_never_ends_meets_its_deadline(folder: Path) -> None:
    (folder / "mute.py").write_text("import time; time.sleep(600)")
    silent = config_for(folder, TALK, daemon=(sys.executable, str(folder / "mute.py")), daemon_start=0.5)
    with pytest.raises(FlowcheckError, match="did not listen within"):
        run(silent)
    (folder / "deaf.py").write_text(
        "import signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "print('listening', sys.argv[5], flush=True)\ntime.sleep(600)\n"
    )
    deaf = config_for(folder, "", daemon=(sys.executable, str(folder / "deaf.py")), daemon_stop=0.5)
    with pytest.raises(FlowcheckError, match="did not end within"):
        run(deaf)


@pytest.mark.slow
def test_a_caller_supplied_endpoint_is_used_and_too_long_ones_are_refused(folder: Path, capfd) -> None:
    config = config_for(folder, "", listen=f"ipc://{folder}/here")
    assert run(config) == 0
    assert capfd.readouterr().out.startswith(f"listening ipc://{folder}/here\n")
    with pytest.raises(UsageError, match="outside the lab"):
        LabConfig(listen="tcp://127.0.0.1:5000")
    with pytest.raises(UsageError, match="choose a shorter"):
        LabConfig(listen="ipc:///tmp/" + "x" * 110)


def test_the_command_line_becomes_a_config(folder: Path, monkeypatch) -> None:
    taken: list[LabConfig] = []

    def keep(config: LabConfig) -> int:
        taken.append(config)
        return 5

    monkeypatch.setattr("flowcheck.lab.launcher.run", keep)
    arguments = (
        "--ranks 4 --ranks-per-node 2 --mirror 0:in --mirror 3:out --mtu 9000 --rendezvous management --ipv6"
    )
    more = ["--no-monitor-offload", "--store", "s", "--listen", "ipc://e", "--journal", "j", "--record", "r",
            "--fault", "drop=0.1", "--fault", "burst=0.1:3"]  # fmt: skip
    done = CliRunner().invoke(
        lab_command, [*arguments.split(), *more, "--", "-m", "package.train", "--ranks", "9"]
    )
    assert done.exit_code == 5, done.output
    assert taken == [
        LabConfig(
            command=("-m", "package.train", "--ranks", "9"),
            ranks=4,
            ranks_per_node=2,
            mirrors=(Mirror(0, "in"), Mirror(3, "out")),
            mtu=9000,
            rendezvous="management",
            ipv6=True,
            monitor_offload=False,
            store="s",
            listen="ipc://e",
            journal="j",
            record="r",
            faults=("drop=0.1", "burst=0.1:3"),
        )
    ]
    assert from_json(json.loads(json.dumps(to_json(taken[0])))) == taken[0]
    CliRunner().invoke(lab_command, ["--mirror", "none", "--", "train.py"])
    CliRunner().invoke(lab_command, ["train.py", "--mtu", "1"])
    assert taken[1] == LabConfig(command=("train.py",), mirrors=())
    assert taken[2] == LabConfig(command=("train.py", "--mtu", "1"))


@pytest.mark.parametrize("text", ["1", "1:", ":in", "-1:in", "a:in", "1:up", "1:in:out", "none"])
def test_unreadable_mirrors_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="write RANK:in"):
        Mirror.parse(text)


def test_impossible_labs_are_refused(tmp_path: Path, monkeypatch) -> None:
    for fields, message in (
        ({"ranks": 0}, "at least one rank"),
        ({"ranks_per_node": 0}, "at least one rank"),
        ({"ranks": 201}, "raise --ranks-per-node"),
        ({"mtu": 575}, "choose 576 to 65535"),
        ({"mtu": 1279, "ipv6": True}, "choose 1280 to 65535"),
        ({"mtu": 65536}, "choose 576 to 65535"),
        ({"rendezvous": "moon"}, "training or management"),
        ({"mirrors": (Mirror(2, "in"),)}, "ranks are 0 to 1"),
    ):
        with pytest.raises(UsageError, match=message):
            LabConfig(**fields)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    check_command(("train.py", "-x"))
    check_command(("-m", "package"))
    for command in ((), ("-m",), ("absent.py",), ("-c", "pass")):
        with pytest.raises(UsageError):
            check_command(command)


def test_output_comes_as_whole_named_lines(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out:
        prefixer = LinePrefixer("rank 3", out.fileno())
        for piece in (b"one\ntw", b"o\r", b"\n 10%\r 20%\r", b"\n", b"\n", b"end"):
            prefixer.feed(piece)
        prefixer.close()
        expected = ["one", "two", " 10%", " 20%", "", "end"]
        text = (tmp_path / "out").read_text()
        assert text == "".join(f"[rank 3] {line}\n" for line in expected)
        prefixer.feed(b"x" * 150_000)
        prefixer.close()
        lines = (tmp_path / "out").read_bytes()[len(text) :].splitlines()
        assert [len(line.removeprefix(b"[rank 3] ")) for line in lines] == [65536, 65536, 150_000 - 2 * 65536]


def test_a_reader_that_went_away_does_not_stop_the_lab() -> None:
    read, write = os.pipe()
    os.close(read)
    prefixer = LinePrefixer("rank 0", write)
    prefixer.feed(b"nobody reads this\n")
    os.close(write)
    prefixer.feed(b"nor this\n")
