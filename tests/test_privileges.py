"""Giving up root: what was opened before works afterwards, and there is no way back."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ordinary_user import as_root_among_readable_files

from flowcheck.errors import NoPermission, UsageError
from flowcheck.privileges import Account, account, acting_as, drop, hand_over, make_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to give up")
NOBODY = Account(65534, 65534, (65534,), "65534:65534")


@needs_root
@pytest.mark.parametrize(
    ("text", "uid", "gid"), [("65534:65534", 65534, 65534), ("12345:54321", 12345, 54321), ("nobody:7", 65534, 7)]
)
def test_accounts(text: str, uid: int, gid: int) -> None:
    found = account(text)
    assert (found.uid, found.gid, found.groups) == (uid, gid, (gid,))


@needs_root
def test_a_users_own_groups_are_kept() -> None:
    user = next(user for user in pwd.getpwall() if user.pw_uid and user.pw_gid)
    groups = {group.gr_gid for group in grp.getgrall() if user.pw_name in group.gr_mem} | {user.pw_gid}
    for text in (user.pw_name, str(user.pw_uid)):
        found = account(text)
        assert (found.uid, found.gid, set(found.groups)) == (user.pw_uid, user.pw_gid, groups)


@pytest.mark.parametrize(
    "text",
    ["", "root", "0", "0:5", "nosuchuser", "nosuchuser:5", "123456", "5:0", "5:nosuchgroup", "5:", ":5", "-1:5", "5:-1",
     "4294967295:5", "5:4294967295", "99999999999999999999:5", "5:99999999999999999999"],
)  # fmt: skip
def test_accounts_that_are_none_or_root(text: str) -> None:
    with pytest.raises(UsageError, match="--user"):
        account(text)


def test_only_root_can_become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoPermission, match="only root can become another user"):
        account("12345:12345")


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder of root's that everybody may pass through."""
    with TemporaryDirectory(prefix="flowcheck-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@needs_root
def test_files_made_for_an_account_are_its_own(reachable: Path) -> None:
    theirs, mine = reachable / "theirs", reachable / "mine"
    mine.write_text("root's")
    mine.chmod(0o600)
    make_folder(theirs / "deep" / "store", NOBODY)
    for path in (theirs, theirs / "deep", theirs / "deep" / "store"):
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65534, 0o700)
    with acting_as(NOBODY):
        (theirs / "file").write_text("x")
        with pytest.raises(PermissionError):
            mine.read_text()
        with pytest.raises(PermissionError):
            (reachable / "another").write_text("x")
    assert (theirs / "file").stat().st_uid == 65534
    assert mine.read_text() == "root's" and os.geteuid() == 0
    make_folder(theirs / "deep" / "store", NOBODY)  # that is there
    with pytest.raises(NoPermission, match="may not write to"):
        make_folder(reachable, NOBODY)
    # A link in place of a file that is handed over gets the account nothing.
    (theirs / "link").symlink_to(mine)
    hand_over(theirs / "link", NOBODY)
    assert mine.stat().st_uid == 0


def test_without_an_account_nothing_happens(tmp_path: Path) -> None:
    with acting_as(None):
        assert os.geteuid() == os.getuid()
    drop(None)
    make_folder(tmp_path / "store", None)
    assert not (tmp_path / "store").exists(), "the store makes its folder by itself"


DROP = """
import json, os, socket, sys, threading, time
from pathlib import Path
from flowcheck import privileges
from flowcheck.errors import FlowcheckError
from mirror.afpacket import AfPacketSource
store = Path(sys.argv[1]) / "new" / "store"
os.setgroups([0, 4, 5])
who = privileges.account("65534:65534")
source = AfPacketSource("lo")
privileges.make_folder(store, who)
stop = threading.Event()
threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
privileges.drop(who)
(store / "step").write_text("x")
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
seen = 0
deadline = time.monotonic() + 10
while not seen and time.monotonic() < deadline:
    sock.sendto(b"over the mirror", ("127.0.0.1", 9))
    block = source.read(0.1)
    if block is not None:
        seen += sum(b"over the mirror" in bytes(block.base[o : o + c]) for o, c in zip(block.offset, block.caplen))
        source.release(block)
drops = source.counters().drops
refused = []
for what in ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)", "os.setuid(0)", "os.setresuid(-1, 0, -1)",
             "os.setgroups([])", "os.chroot('/')", "os.mkdir('/new')"):
    try:
        eval(what)
    except PermissionError:
        refused.append(what)
status = [line.split() for line in open("/proc/self/status") if line.startswith(("NoNew", "Cap", "Uid"))]
rights = {name: values for name, *values in status}
stop.set()
source.close()
print(json.dumps({"seen": seen, "refused": len(refused), "rights": rights, "owner": (store / "step").stat().st_uid}))
"""


@needs_root
def test_rings_and_folders_opened_before_serve_on_and_nothing_else_does(tmp_path: Path) -> None:
    done = as_root_among_readable_files(DROP, str(tmp_path), folder=tmp_path)
    if "no permission to capture" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["seen"] > 0
    assert found["refused"] == 6, "all of what root could do"
    assert found["owner"] == 65534
    assert found["rights"]["Uid:"] == ["65534"] * 4 and found["rights"]["NoNewPrivs:"] == ["1"]
    assert all(int(found["rights"][f"Cap{kind}:"][0], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Amb"))


LEFT = """
import ctypes, os, sys, threading
from flowcheck import privileges
from flowcheck.errors import FlowcheckError
libc = ctypes.CDLL(None, use_errno=True)
how = sys.argv[1]
who = privileges.account("65534:65534")
if how == "capabilities":  # PR_SET_SECUREBITS: SECBIT_NO_SETUID_FIXUP: a change of user leaves the capabilities
    assert libc.prctl(28, 1 << 2, 0, 0, 0) == 0
elif how == "thread":  # a thread that went its own way, by the bare system call setresuid
    ready, stop = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (ready.set(), stop.wait(), None), daemon=True).start()
    ready.wait()
    os.setresuid = lambda *ids: libc.syscall(117, *ids) and None
elif how == "saved":
    os.setresuid = lambda r, e, s: os.seteuid(e)
elif how == "again":
    os.setuid = lambda uid: None
try:
    privileges.drop(who)
except FlowcheckError as error:
    print(error)
"""


@needs_root
@pytest.mark.parametrize(
    ("how", "said"),
    [("capabilities", "'CapEff'"), ("thread", "is not user"), ("saved", "is not user"), ("again", "can become root")],
)
def test_what_is_left_of_root_is_found(how: str, said: str, tmp_path: Path) -> None:
    if how == "thread" and os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is that of x86-64")
    done = as_root_among_readable_files(LEFT, how, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and "not going on" in done.stdout, done.stdout


@needs_root
def test_an_installation_that_the_account_cannot_read(tmp_path: Path) -> None:
    code = "import sys; from flowcheck import privileges; sys.prefix = sys.argv[1]\n" + LEFT
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    done = as_root_among_readable_files(code, str(hidden), folder=tmp_path)
    assert f"cannot read {hidden}: install flowcheck where" in done.stdout, done.stderr


DAEMON = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from synthetic_job import SyntheticJob
from flowcheck import client, keys
from flowcheck.connection import Connection
from flowcheck.errors import NoPermission
from flowcheck.upload import upload

folder = Path(sys.argv[1])
keys.generate(folder / "keys", {"trainer": "write"})
for path in [folder, *folder.rglob("*")]:
    os.chown(path, 65534, 65534)
os.environ["FLOWCHECK_KEY"] = str(folder / "trainer.secret")
(folder / "keys" / "clients" / "trainer.secret").rename(folder / "trainer.secret")
os.chown(folder / "trainer.secret", 0, 0)
options = ["--keys", folder / "keys", "--store", folder / "store", "--journal", folder / "journal",
           "--record", folder / "record", "--listen", f"ipc://{folder}/socket", "--listen", "tcp://127.0.0.1:0"]
daemon = subprocess.Popen(
    [sys.executable, "-m", "flowcheck", "daemon", "-i", "lo", "--user", "65534:65534", *options],
    stdout=subprocess.PIPE, text=True,
)
try:
    unix, tcp = (daemon.stdout.readline().split()[1] for _ in range(2))
    out = {}
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        out[task.name] = [line.split()[1:] for line in lines if line.startswith(("Uid", "CapPrm"))]
    print(json.dumps(list(out.values())))
    job = SyntheticJob()
    job.attach()
    tensors = {key: torch.zeros(spec.shape) for key, spec in job.description.tensors()}
    with Connection(tcp) as connection:
        upload(connection, job.description, "job", tensors, 60)
    print(client.status(tcp, 10)["packets"])
    print(client.status(unix, 10)["control"]["refused_connections"])
    (folder / "keys" / "authorized" / "trainer.public").unlink()
    try:
        client.status(tcp, 10)
    except NoPermission as error:
        print(error)
finally:
    daemon.send_signal(signal.SIGTERM)
    print(daemon.wait(60))
made = [path for name in ("store", "journal", "record") for path in (folder / name, *(folder / name).rglob("*"))]
print(json.dumps([[str(path), path.stat().st_uid, path.stat().st_mode & 0o777, path.is_dir()] for path in made]))
"""


@needs_root
@pytest.mark.slow
def test_a_daemon_that_gave_up_root_still_does_its_work(tmp_path: Path) -> None:
    """It reads the ring, looks at the folder of keys and writes the store, and its files are its user's alone."""
    tests = str(Path(__file__).parent)
    done = as_root_among_readable_files(DAEMON, str(tmp_path), tests, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    threads, packets, refused, shut_out, status, made = done.stdout.splitlines()
    assert len(json.loads(threads)) > 4
    assert all(found == [["65534"] * 4, ["0" * 16]] for found in json.loads(threads))
    assert int(packets) > 10, "loopback carries the test's own messages"
    assert int(refused) == 0
    assert "not authorized" in shut_out
    assert status == "0", done.stderr
    files = json.loads(made)
    assert {Path(path).name for path, *_ in files} >= {"store", "journal", "record", "job.safetensors"}
    for path, uid, mode, is_folder in files:
        assert (uid, mode) == (65534, 0o700 if is_folder else 0o600), path
