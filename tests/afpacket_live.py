"""Live capture on a veth pair, run by test_afpacket.py in a process of its own: what happened, as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
    print(json.dumps({"refused": os.strerror(ctypes.get_errno())}))
    sys.exit()

# Only now: numba and others start threads, and a process with threads cannot enter a user namespace.
from pyroute2 import IPRoute  # noqa: E402

from flowcheck.errors import FlowcheckError, NoPermission  # noqa: E402
from mirror.afpacket import AfPacketSource  # noqa: E402
from mirror.record import PcapRecorder  # noqa: E402

ip = IPRoute()
out = {}


def index(name):
    return ip.link_lookup(ifname=name)[0]


def cable():
    """A fresh veth pair `left` - `right`, quiet (no IPv6 of its own) and with the largest MTU."""
    ip.link("add", ifname="left", kind="veth", peer="right")
    for name in ("left", "right"):
        with open(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "w") as file:
            file.write("1")
        ip.link("set", index=index(name), state="up", mtu=65535)


def sender(name):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.bind((name, 3))
    return sock


def collect(source, packets, seconds=3.0):
    frames = []
    end = time.monotonic() + seconds
    while len(frames) < packets and time.monotonic() < end:
        block = source.read(0.05)
        if block is not None:
            for o, c, w, v in zip(block.offset, block.caplen, block.wirelen, block.vlan, strict=True):
                frames.append([block.base[o : o + c].tobytes().hex(), int(w), int(v)])
            source.release(block)
    return frames


cable()
tx = sender("left")
macs = bytes.fromhex("02aabbccdd01") + bytes.fromhex("02aabbccdd02")
ipv4, ipv6 = b"\x08\x00" + bytes(range(46)), b"\x86\xdd" + bytes(range(60))
sent = [
    macs + ipv4,
    macs + ipv6,
    macs + b"\x81\x00\x20\x05" + ipv4,
    macs + b"\x81\x00\x60\x00" + ipv6,
    macs + b"\x88\xa8\x00\x07" + b"\x81\x00\x00\x09" + ipv4,
    macs + b"\x08\x00" + bytes(9000),
    macs + b"\x08\x00" + os.urandom(65535),
    macs + b"\x81\x00\x0f\xfe\x86\xdd" + os.urandom(65000),
]

# 1: what arrives is what was sent, tags included; what this end sends is left out; a recording agrees.
source = AfPacketSource("right", vantage=3)
out["promiscuous"] = ip.get_links(index("right"))[0].get_attr("IFLA_PROMISCUITY")
sender("right").send(macs + b"\x08\x00outgoing" + bytes(60))
before = time.time_ns()
for frame in sent:
    tx.send(frame)
live, recorder = [], PcapRecorder(sys.argv[1])
end = time.monotonic() + 3
while len(live) < len(sent) and time.monotonic() < end:
    block = source.read(0.05)
    if block is not None:
        out["vantage"], out["linktype"] = block.vantage, block.linktype
        near = (abs(block.ts - before) < 3e9).all() and (block.ts[1:] >= block.ts[:-1]).all()
        out["times_near_now"] = bool(near)
        for o, c, w, v in zip(block.offset, block.caplen, block.wirelen, block.vlan, strict=True):
            live.append([block.base[o : o + c].tobytes().hex(), int(w), int(v)])
        recorder.write(block)
        source.release(block)
recorder.close()
out["sent"], out["live"] = [frame.hex() for frame in sent], live
start = time.monotonic()
out["quiet_read"] = source.read(0.2) is None
out["quiet_seconds"] = time.monotonic() - start
counters = source.counters()
out["counters"] = [counters.packets, counters.bytes, counters.drops]

# 2: down, up, removed and made anew: told, and reading goes on.
ip.link("set", index=index("right"), state="down")
source.read(0.1)
out["down"] = list(source.problems)
ip.link("set", index=index("right"), state="up")
end = time.monotonic() + 3
while not ip.get_links(index("left"))[0]["flags"] & 0x10000 and time.monotonic() < end:
    time.sleep(0.01)
tx.send(sent[0])
out["after_up"] = len(collect(source, 1))
ip.link("del", index=index("right"))
source.read(0.1)
cable()
source.read(0.3)
tx = sender("left")
tx.send(sent[2])
out["after_anew"] = collect(source, 1)
out["problems"] = list(source.problems)
source.close()
source.close()
out["closed"] = [source.read(0) is None, source.finished, source.counters().packets]
out["promiscuous_after"] = ip.get_links(index("right"))[0].get_attr("IFLA_PROMISCUITY")

# 3: a tiny ring that nobody reads: every frame is either delivered or counted as dropped.
source = AfPacketSource("right", block_size=128 << 10, blocks=2)
for i in range(1000):
    tx.send(macs + b"\x08\x00" + i.to_bytes(4, "big") + bytes(996))
numbers = [int.from_bytes(bytes.fromhex(frame[0])[14:18], "big") for frame in collect(source, 1000, 0.3)]
counters = source.counters()
figures = {"packets": counters.packets, "drops": counters.drops, "freezes": counters.freezes}
out["tiny"] = {"numbers": numbers, **figures}
for _ in range(20):
    tx.send(macs + b"\x08\x00again" + bytes(60))
out["tiny_after"] = len(collect(source, 20))
out["tiny_drops_after"] = source.counters().drops
source.close()

# 4: blocks held by the consumer keep their bytes, are not handed out twice and may come back in any order.
source = AfPacketSource("right", block_size=128 << 10, blocks=4)
held = []
for i in range(4):
    tx.send(macs + b"\x08\x00" + bytes([i]) * 1000)
    held.append(source.read(1.0))
for i in range(4, 8):
    tx.send(macs + b"\x08\x00" + bytes([i]) * 1000)
cpu, start = time.process_time(), time.monotonic()
out["full"] = source.read(0.3) is None
out["full_cpu"] = (time.process_time() - cpu) / (time.monotonic() - start)
out["held"] = [[len(block), int(block.base[block.offset[0] + 14])] for block in held]
out["distinct"] = len({block.base.ctypes.data for block in held})
for i in (2, 0, 3, 1):
    source.release(held[i])
try:
    source.release(held[0])
except ValueError as error:
    out["twice"] = str(error)
time.sleep(0.05)
for i in range(8, 12):
    tx.send(macs + b"\x08\x00" + bytes([i]) * 1000)
out["order_after"] = [int(frame[0][28:30], 16) for frame in collect(source, 4)]
out["order_drops"] = source.counters().drops
last = macs + b"\x08\x00" + b"kept" * 20
tx.send(last)
block = source.read(1.0)
source.close()
source.release(block)
for _ in range(50):
    tx.send(macs + b"\x08\x00" + b"late" * 16_000)
out["after_close"] = block.base[block.offset[0] : block.offset[0] + block.caplen[0]].tobytes() == last

# 5: a reader that comes late gets all blocks that are ready as one, up to a quarter of the ring, past its end too.
source = AfPacketSource("right", block_size=128 << 10, blocks=20)
out["late"], sizes = [], []
for burst in range(3):
    for i in range(13):
        tx.send(macs + b"\x08\x00" + bytes([burst, i]) * 500)
        time.sleep(0.02)
    while (block := source.read(0.05)) is not None:
        sizes.append(len(block))
        out["late"] += [block.base[o + 14 : o + 16].tolist() for o in block.offset]
        source.release(block)
out["late_sizes"], out["late_drops"] = sizes, source.counters().drops
source.close()

# 6: loopback shows each frame once; without the capability the reason is told.
ip.link("set", index=index("lo"), state="up")
source = AfPacketSource("lo")
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
udp.sendto(b"once", udp.getsockname())
out["loopback"] = sum("6f6e6365" in frame[0] for frame in collect(source, 9, 0.3))
source.close()
try:
    AfPacketSource("nosuch0")
except FlowcheckError as error:
    out["missing"] = str(error)
header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
assert libc.capset(header, nothing) == 0
try:
    AfPacketSource("lo")
except NoPermission as error:
    out["permission"] = [str(error), error.exit_code]
print(json.dumps(out))
