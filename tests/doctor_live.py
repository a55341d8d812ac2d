"""`flowcheck doctor -i` on a veth pair, run by test_doctor_nic.py in a process of its own: what it said, as JSON."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import time
from array import array
from pathlib import Path

from observe_live import frames_of

SET_GRO = 0x2C


class Doctor:
    """The command, in a fork of this process: modules and kernels are loaded once for all of them."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        from flowcheck.cli import main as command

        self._said = folder / "out", folder / "error"
        self._status: int | None = None
        self._process = os.fork()
        if self._process == 0:
            status: object = 99
            try:
                for number, path in enumerate(self._said, 1):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                command(arguments)
            except SystemExit as end:
                status = end.code
            finally:
                sys.stdout.flush()
                os._exit(status if isinstance(status, int) else 98)

    def over(self, flags: int = os.WNOHANG) -> bool:
        if self._status is None:
            done, status = os.waitpid(self._process, flags)
            self._status = os.waitstatus_to_exitcode(status) if done else None
        return self._status is not None

    def result(self) -> dict[str, object]:
        self.over(0)
        out, error = (path.read_text() for path in self._said)
        return {"code": self._status, "error": error, "report": json.loads(out or "null")}


def main(capture: Path, folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000) and libc.unshare(0x50000000):  # CLONE_NEWNET, and with a user namespace
        print(json.dumps({"refused": os.strerror(ctypes.get_errno())}))
        return
    from pyroute2 import IPRoute

    route = IPRoute()
    route.link("add", ifname="left", kind="veth", peer="right")
    ports = {name: route.link_lookup(ifname=name)[0] for name in ("left", "right")}
    for name, index in ports.items():
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
        route.link("set", index=index, state="up", mtu=9216)

    def promiscuous() -> bool:
        return bool(route.get_links(ports["right"])[0].get_attr("IFLA_PROMISCUITY"))

    def gro(on: int) -> None:
        value = array("I", [SET_GRO, on])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, 0x8946, struct.pack("16sP16x", b"right", value.buffer_info()[0]))

    def doctor(seconds: float, frames: list[tuple[int, bytes]]) -> dict[str, object]:
        process = Doctor(folder, ["doctor", "-i", "right", "--seconds", str(seconds), "--json"])
        deadline = time.monotonic() + 120
        while not promiscuous() and not process.over() and time.monotonic() < deadline:
            time.sleep(0.01)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
            sock.bind(("left", 3))
            for _, data in frames:
                sock.send(data)
        return process.result()

    from flowcheck.doctor.exam import Examination
    from mirror.afpacket import warm_up

    Examination().warm_up()
    warm_up()
    frames = frames_of(capture)
    gro(0)
    result = {"frames": len(frames), "healthy": doctor(1.5, frames)}
    gro(1)
    route.link("set", index=ports["right"], mtu=1500)
    result["one way"] = doctor(1.0, [frame for frame in frames if frame[1][26:30] != bytes((10, 77, 0, 2))])
    result["silent"] = doctor(0.3, [])
    route.link("set", index=ports["left"], state="down")
    result["unplugged"] = doctor(0.3, [])
    print(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
