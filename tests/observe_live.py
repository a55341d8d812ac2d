"""`daemon --observe` on a live interface, run by test_observe.py in a process of its own: what happened, as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def frames_of(capture: Path) -> list[tuple[int, bytes]]:
    """(time, frame) of every frame of a capture file."""
    from mirror.capfile import CaptureFileSource

    frames = []
    source = CaptureFileSource([capture])
    while not source.finished:
        block = source.read(0)
        if block is None:
            continue
        for at, size, ts in zip(block.offset.tolist(), block.caplen.tolist(), block.ts.tolist(), strict=True):
            frames.append((ts, block.base[at : at + size].tobytes()))
        source.release(block)
    source.close()
    return frames


def main(capture: Path, folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000) and libc.unshare(0x50000000):  # CLONE_NEWNET, and with a user namespace
        print(json.dumps({"refused": os.strerror(ctypes.get_errno())}))
        return
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("add", ifname="left", kind="veth", peer="right")
        for name in ("left", "right"):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
            ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up", mtu=65535)
    endpoint = f"ipc://{folder}/s"
    flowcheck = [sys.executable, "-m", "flowcheck"]
    daemon = subprocess.Popen(
        [*flowcheck, "daemon", "--observe", "-i", "right", "--listen", endpoint],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert daemon.stdout is not None
    result = {"first": daemon.stdout.readline()}
    frames = frames_of(capture)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind(("left", 3))
        for _, data in frames:
            sock.send(data)

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*flowcheck, *arguments], capture_output=True, text=True, timeout=60, check=False)

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        result["status"] = json.loads(ask("status", endpoint, "--json").stdout)
        if result["status"]["packets"] >= len(frames) and result["status"]["coverage"] == 1:
            break
    result["text"] = ask("status", endpoint).stdout
    result["restore"] = ask("restore", endpoint, "--out", str(folder / "x.pt")).stderr
    daemon.send_signal(signal.SIGTERM)
    result["table"], result["stderr"] = daemon.communicate(timeout=60)
    result["code"] = daemon.returncode
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
