"""A reader that is stopped for 200 ms under load, run by test_loss_report.py in a process of its own: what it says was
lost, as JSON. One TCP stream of equal segments comes over a veth pair; what is missing of it is known to the byte."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
    print(json.dumps({"refused": os.strerror(ctypes.get_errno())}))
    sys.exit()

# Only now: numba and others start threads, and a process with threads cannot enter a user namespace.
from pyroute2 import IPRoute  # noqa: E402
from tcp_frames import BACK, ISN, data, syn, tcp_frame  # noqa: E402

PAYLOAD, SEGMENTS, STOPPED, PAUSE = 1000, 60_000, 0.2, 15e-6
FULL = 8000  # segments that the ring cannot hold

ip = IPRoute()
ip.link("add", ifname="left", kind="veth", peer="right")
for name in ("left", "right"):
    with open(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "w") as file:
        file.write("1")
    ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up", mtu=65535)

reading, ready = os.pipe()
child = os.fork()
if child == 0:  # the trainers: they know nothing of the reader
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.bind(("left", 3))
    os.read(reading, 1)
    sock.send(syn())
    sock.send(tcp_frame(seq=5000, ack=ISN + 1, flags=0x12, **BACK))
    until, enough, stopped = 0.0, 0, False
    for number in range(SEGMENTS):
        sock.send(data(number * PAYLOAD, bytes(PAYLOAD)))
        if number == SEGMENTS // 4:
            os.kill(os.getppid(), signal.SIGSTOP)
            until, enough, stopped = time.monotonic() + STOPPED, number + FULL, True
        if stopped and number > enough and time.monotonic() > until:
            os.kill(os.getppid(), signal.SIGCONT)
            stopped = False
        pause = time.perf_counter() + PAUSE
        while time.perf_counter() < pause:
            pass
    if stopped:
        os.kill(os.getppid(), signal.SIGCONT)
    time.sleep(0.1)
    sock.send(data(SEGMENTS * PAYLOAD, bytes(PAYLOAD)))  # what is missing before it is known
    os._exit(0)

from flowcheck.capture import CaptureThread  # noqa: E402
from flowcheck.pipeline import Limits, Pipeline  # noqa: E402
from mirror import drops  # noqa: E402
from mirror.afpacket import AfPacketSource  # noqa: E402
from reconstruct.steps import Waits  # noqa: E402

pipeline = Pipeline(Limits(64, 1 << 26, 1 << 20), Waits())
pipeline.warm_up()
source = AfPacketSource("right", block_size=128 << 10, blocks=32)
said: list[str] = []
thread = CaptureThread(pipeline, [source], lambda key, event: None, live=True, report=said.append)
thread.start()
os.write(ready, b"x")
os.waitpid(child, 0)
time.sleep(0.2)
thread.stop()
thread.join()
counters = source.counters()
source.close()

# What the interface says that it dropped is told with the next block, once.
source = AfPacketSource("right")
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
sock.bind(("left", 3))
nic = []
for dropped in (0, 0, 5, 5):
    drops.interface_drops = lambda name, count=dropped: count
    time.sleep(0.06)
    before = time.time_ns()
    sock.send(data(0, bytes(100)))
    block = source.read(1.0)
    nic.append([[loss.cause, loss.start < before < loss.end] for loss in block.losses])
    source.release(block)
source.close()
print(json.dumps({
    "nic": nic,
    "failure": None if thread.failure is None else repr(thread.failure), "status": thread.loss.status, "said": said,
    "drops": counters.drops, "packets": counters.packets, "hole_bytes": pipeline.tcp.counters()["hole_bytes"],
    "sent": SEGMENTS + 3, "payload": PAYLOAD,
}))  # fmt: skip
