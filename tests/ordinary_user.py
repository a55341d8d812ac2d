"""Running code as a user without rights, whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

READABLE = """
# Stay root, but where an ordinary user can read what this test needs, although it may lie below a closed folder.
import ctypes, os, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
count = int(sys.argv[1]); needed, command = sys.argv[2 : 2 + count], sys.argv[2 + count :]
call("unshare", 0x20000)
call("mount", b"none", b"/", None, ctypes.c_ulong(0x44000), None)
closed = {}
for path in needed:
    parts = path.split("/")
    for depth in range(2, len(parts) + 1):
        top = "/".join(parts[:depth])
        if not os.stat(top).st_mode & stat.S_IXOTH:
            closed.setdefault(top, []).append((path, os.open(path, os.O_PATH)))
            break
for top, paths in closed.items():
    call("mount", b"tmpfs", top.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=755")
    for path, descriptor in paths:
        os.makedirs(path, exist_ok=True)
        source = f"/proc/self/fd/{descriptor}".encode()
        call("mount", source, path.encode(), None, ctypes.c_ulong(0x5000), None)
"""
BECOME = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
RUN = "os.execv(command[0], command)\n"


def as_ordinary_user(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as a user without rights, who may write only to `folder`."""
    command = [sys.executable, "-c", code, *arguments]
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, 65534, 65534)
        command = _where_all_is_readable(READABLE + BECOME + RUN, command, folder)
    env = {
        "HOME": str(folder),
        "NUMBA_CACHE_DIR": "",
        "XDG_CACHE_HOME": "",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return _run(command, env)


def as_root_among_readable_files(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as root, where any user that it becomes can read flowcheck and get into `folder`."""
    kernels = Path(os.environ.get("NUMBA_CACHE_DIR") or folder)
    kernels.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)
    command = [sys.executable, "-c", code, *arguments]
    return _run(_where_all_is_readable(READABLE + RUN, command, folder, kernels), {})


def _where_all_is_readable(code: str, command: list[str], *folders: Path) -> list[str]:
    needed = [str(ROOT), sys.prefix, sys.base_prefix, *map(str, folders)]
    return [sys.executable, "-c", code, str(len(needed)), *needed, *command]


def _run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False, cwd="/")


RUN_AS_USER = """
import json, os, sys
from flowcheck.errors import FlowcheckError
from flowcheck.lab import run
from flowcheck.lab.supervisor import from_json
assert os.getuid() != 0
try:
    sys.exit(run(from_json(json.loads(sys.argv[1]))))
except FlowcheckError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
