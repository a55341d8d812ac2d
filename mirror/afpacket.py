"""Live capture: an AF_PACKET socket with a TPACKET_V3 ring, mapped into memory and walked by a kernel.

The kernel fills ring blocks of many frames and hands each over as a whole; one call of a compiled kernel
turns it into the arrays of a `Block`, whose base is the ring block itself: no frame is copied and no Python
runs per frame. Layouts are those of linux/if_packet.h (struct tpacket_block_desc, struct tpacket3_hdr).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from flowcheck.errors import FlowcheckError, NoPermission, UsageError
from mirror.block import Block, Loss, SourceCounters
from mirror.drops import InterfaceDrops, RingDrops

# From linux/if_packet.h, if_ether.h, if_arp.h and sockios.h; the socket module lacks most of them.
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP = 1
PACKET_DROP_MEMBERSHIP = 2
PACKET_RX_RING = 5
PACKET_STATISTICS = 6
PACKET_VERSION = 10
PACKET_IGNORE_OUTGOING = 23
PACKET_MR_PROMISC = 1
TPACKET_V3 = 2
ETH_P_ALL = 3
SIOCGIFMTU = 0x8921
# Device types (ARPHRD_*) -> link type: Ethernet and loopback carry Ethernet headers, tunnels bare IP packets.
LINKTYPES = {1: 1, 772: 1, 65534: 101, 768: 101, 769: 101, 776: 101}

_USER = 1  # TP_STATUS_USER: the block is ours
_LOSING = 1 << 2  # frames found no room since the statistics were read last
_VLAN_VALID = 1 << 4
_VLAN_TPID_VALID = 1 << 6
_HEADER = 48  # sizeof(struct tpacket3_hdr)
_RING_FRAME = 4096  # V3 ignores it but checks that it divides the block
# A monitor port delivers superpackets (TSO, GRO) of 64 KiB whatever its MTU says.
SMALLEST_BLOCK = 128 << 10
LARGEST_BLOCK = 1 << 30
_HEADROOM = 1024
_REBIND_EVERY = 0.1
_RUN_BYTES = 4 << 20  # of the ring that one `Block` covers at most


@intrinsic
def _fence(typingctx: Any) -> Any:
    """A full barrier: frames are read after their block's status, which is given back after the last read."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(cache=True, nogil=True)
def ring_block_count(words: np.ndarray) -> int:
    """Frames in the ring block whose header starts at words[0] (uint32), or -1 while the kernel owns it."""
    if words[2] & _USER == 0:
        return -1
    _fence()  # type: ignore[call-arg]
    return np.int64(words[3])


@njit(cache=True, nogil=True)
def ring_block_return(words: np.ndarray) -> None:
    """Hand the ring block back to the kernel."""
    _fence()  # type: ignore[call-arg]
    words[2] = 0


@njit(cache=True, nogil=True)
def ring_block_walk(words: np.ndarray, halves: np.ndarray, table: np.ndarray) -> tuple[int, int, int]:
    """Fill `table` int64[5, n] (rows: offset, caplen, wirelen, ts, vlan) from one ring block.

    `words` and `halves` are the ring block as uint32 and uint16. Returns (frames, bytes on the wire, size
    of the largest frame that the ring had to cut or 0).
    """
    size = words.size * 4
    position: Any = np.int64(words[4])
    total = 0
    cut = 0
    for i in range(table.shape[1]):
        if position < 0 or position + _HEADER > size:
            return i, total, cut
        w = position >> 2
        caplen = np.int64(words[w + 3])
        wirelen: Any = np.int64(words[w + 4])
        status = words[w + 5]
        offset = position + np.int64(halves[(position >> 1) + 12])
        if offset + caplen > size:
            return i, total, cut
        if caplen < wirelen and wirelen > cut:
            cut = wirelen
        vlan = np.int64(-1)
        if status & _VLAN_VALID:
            tpid = np.int64(0x8100)
            if status & _VLAN_TPID_VALID:
                tpid = np.int64(halves[(position >> 1) + 18])
            vlan = tpid << 16 | np.int64(words[w + 8] & 0xFFFF)
            wirelen += 4
        table[0, i] = offset
        table[1, i] = caplen
        table[2, i] = wirelen
        table[3, i] = np.int64(words[w + 1]) * 1_000_000_000 + np.int64(words[w + 2])
        table[4, i] = vlan
        total += wirelen
        position += np.int64(words[w])
    return table.shape[1], total, cut


def warm_up() -> None:
    """Compile or load the kernels: before a ring is opened, else it overflows meanwhile."""
    base = np.zeros(4096, np.uint8)
    words, halves = base.view(np.uint32), base.view(np.uint16)
    ring_block_count(words)
    ring_block_return(words)
    ring_block_walk(words, halves, np.empty((5, 0), np.int64))


class AfPacketSource:
    """Frames that arrive at one interface, promiscuously; frames that this host sends are left out.

    `block_size` bytes (a multiple of the page size, at least 128 KiB) times `blocks` is the ring; a block
    is handed over when it is full or `retire_ms` after its first frame. So at a trickle of frames the ring
    bridges `blocks` times `retire_ms` of a reader that does not come to read, however many bytes it has.
    What is read is all blocks that are ready, up to 4 MiB and a quarter of the ring, as one: a reader that
    is late gets more at once. They may be held and released in any order and by another thread than the
    reader's; the kernel waits at a block that is held and counts the frames that find no room in `drops`.
    The VLAN tag that the kernel moves out of a frame is in `Block.vlan`.

    Where frames were lost on the way is in `Block.losses`. Those that found no room in the ring were lost between the
    last frame of one ring block and the first one of the next, and the kernel marks the latter; the interface's drop
    counters are looked at 20 times a second.

    When the interface goes down or disappears that is written to `problems` (the newest 64) and reading
    goes on once it is back.

    Raises UsageError for sizes that cannot work, NoPermission without CAP_NET_RAW, FlowcheckError for an
    unknown interface, one that carries neither Ethernet nor IP, or a ring that the kernel cannot allocate.
    """

    def __init__(
        self,
        interface: str,
        *,
        block_size: int = 256 << 10,
        blocks: int = 256,
        retire_ms: int = 4,
        vantage: int = 0,
    ) -> None:
        page = mmap.PAGESIZE
        if block_size < SMALLEST_BLOCK or block_size % page or block_size > LARGEST_BLOCK:
            raise UsageError(
                f"ring block size {block_size}: must be a multiple of {page}"
                f" from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
            )
        if not 2 <= blocks <= 1 << 16:
            raise UsageError(f"{blocks} ring blocks: must be 2 to {1 << 16}")
        if not 1 <= retire_ms <= 1000:
            raise UsageError(f"ring retire time {retire_ms} ms: must be 1 to 1000")
        self.name = interface
        self.problems: deque[str] = deque(maxlen=64)
        self._vantage = vantage
        self._held: dict[Block, list[int]] = {}
        self._held_slots: set[int] = set()
        self._next = 0
        self._packets = 0
        self._bytes = 0
        self._drops = 0
        self._freezes = 0
        self._cut_reported = 0
        self._closed = False
        self._statistics = threading.Lock()
        self._losses: list[Loss] = []
        self._ring = RingDrops()
        self._was_down = False
        self._index = _interface_index(interface)
        warm_up()
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError:
            raise NoPermission(
                f"no permission to capture on {interface}: run as root or grant CAP_NET_RAW to this process"
            ) from None
        try:
            self._open(block_size, blocks, retire_ms)
        except OSError as error:
            self._socket.close()
            size = block_size * blocks >> 20
            if error.errno == errno.ENOMEM:
                raise FlowcheckError(
                    f"no memory for a capture ring of {size} MiB on {interface}: use fewer or smaller blocks"
                ) from None
            raise FlowcheckError(
                f"cannot set up a capture ring of {size} MiB on {interface}: {os.strerror(error.errno or 0)}"
            ) from None
        except BaseException:
            self._socket.close()
            raise

    def _open(self, block_size: int, blocks: int, retire_ms: int) -> None:
        sock = self._socket
        answer = fcntl.ioctl(sock, SIOCGIFMTU, struct.pack("16s16x", self.name.encode()))
        mtu = struct.unpack("16xi12x", answer)[0]
        if mtu + _HEADROOM > block_size:
            raise UsageError(
                f"ring block size {block_size} cannot hold one frame of {self.name} (MTU {mtu}): raise it"
            )
        self._interface = InterfaceDrops(self.name)
        sock.setsockopt(SOL_PACKET, PACKET_VERSION, TPACKET_V3)
        sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        frames = block_size // _RING_FRAME * blocks
        ring = struct.pack("7I", block_size, blocks, _RING_FRAME, frames, retire_ms, 0, 0)
        sock.setsockopt(SOL_PACKET, PACKET_RX_RING, ring)
        # Shared and writable, mmap's defaults: the status of a block is written to give it back.
        self._map = mmap.mmap(sock.fileno(), block_size * blocks)
        self._whole = np.frombuffer(self._map, np.uint8)
        self._size = block_size
        bases = [self._whole[i * block_size : (i + 1) * block_size] for i in range(blocks)]
        self._words = [base.view(np.uint32) for base in bases]
        self._halves = [base.view(np.uint16) for base in bases]
        self._most = max(1, min(_RUN_BYTES // block_size, blocks // 4))
        self._bind()
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def _bind(self) -> None:
        """Start to receive: only with the ring in place, so that no frame goes to the socket's own queue."""
        self._socket.bind((self.name, ETH_P_ALL))
        kind = self._socket.getsockname()[3]
        if kind not in LINKTYPES:
            raise FlowcheckError(
                f"{self.name} carries neither Ethernet nor IP (device type {kind}): use another interface"
            )
        self._linktype = LINKTYPES[kind]
        self._socket.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, self._promiscuous())

    def _promiscuous(self) -> bytes:
        """A struct packet_mreq."""
        return struct.pack("iHH8s", self._index, PACKET_MR_PROMISC, 0, b"")

    def read(self, timeout: float) -> Block | None:
        """The next ring blocks, or None when the kernel hands none over within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        readable = False
        while not self._closed:
            block = self._take()
            if block is not None:
                return block
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            if readable:
                # The kernel calls the socket readable as long as the block before the one it fills is not
                # given back; while the consumer holds that one only the clock can be waited for.
                time.sleep(min(remaining, 0.001))
            readable = self._wait(remaining)
        return None

    def _take(self) -> Block | None:
        """The blocks that are ready and lie behind one another, as one."""
        slots: list[int] = []
        tables: list[np.ndarray] = []
        while len(slots) < self._most:
            slot = self._next
            if slot in self._held_slots or (slots and slot < slots[0]):
                break
            count = ring_block_count(self._words[slot])
            if count < 0:
                break
            self._next = (slot + 1) % len(self._words)
            losing = bool(self._words[slot][2] & _LOSING)
            table = self._walk(slot, count)
            if not table.shape[1]:
                ring_block_return(self._words[slot])
                continue
            if losing:
                self.counters()  # else all blocks that follow are marked, too
            self._losses += self._ring.block(losing, int(table[3, 0]), int(table[3, -1]))
            if slots:
                table[0] += (slot - slots[0]) * self._size
            slots.append(slot)
            tables.append(table)
        if not slots:
            return None
        table = tables[0] if len(tables) == 1 else np.concatenate(tables, 1)
        self._packets += table.shape[1]
        offset, caplen, wirelen, ts, vlan = table
        memory = self._whole[slots[0] * self._size : (slots[-1] + 1) * self._size]
        if self._interface.due:
            with self._statistics:
                self._losses += self._interface.look()
        losses, self._losses = tuple(self._losses), []
        block = Block(memory, offset, caplen, wirelen, ts, vlan, self._vantage, self._linktype, losses)
        self._held[block] = slots
        self._held_slots.update(slots)
        return block

    def _walk(self, slot: int, count: int) -> np.ndarray:
        """Where the frames of a ring block are (`ring_block_walk`)."""
        words = self._words[slot]
        table = np.empty((5, min(count, words.size * 4 // _HEADER)), np.int64)
        frames, total, cut = ring_block_walk(words, self._halves[slot], table)
        if cut > self._cut_reported:
            self._cut_reported = cut
            self.problems.append(
                f"{self.name}: a frame of {cut} bytes was cut to fit a ring block: raise the block size"
            )
        if frames < count:
            self.problems.append(f"{self.name}: {count - frames} frames of a ring block lie outside it")
        self._bytes += total
        return table[:, :frames]

    def _wait(self, remaining: float) -> bool:
        """Wait for the kernel; returns whether it says that there is something to read."""
        if self._was_down:
            remaining = min(remaining, _REBIND_EVERY)
        events = self._poll.poll(remaining * 1000)
        if events and events[0][1] & select.POLLERR:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == errno.ENETDOWN:
                self.problems.append(f"{self.name} went down: no frames until it is up again")
            elif code:
                self.problems.append(f"{self.name}: {os.strerror(code)}")
            self._was_down = True
        if self._was_down:
            self._look_again()
        return bool(events)

    def _look_again(self) -> None:
        """After the interface was down: if it was removed and made anew (driver reset), bind to that."""
        try:
            index = socket.if_nametoindex(self.name)
        except OSError:
            return
        if index != self._index:
            self._index = index
            try:
                self._bind()
            except OSError:
                self._index = 0
                return
            self.problems.append(f"{self.name} was removed and is back: capturing on the new one")
        self._was_down = False

    def release(self, block: Block) -> None:
        """Give a block back to the kernel. Raises ValueError for a block that is not held."""
        if self._closed:
            return
        slots = self._held.pop(block, None)
        if slots is None:
            raise ValueError(f"{self.name}: this block was released before or is another source's")
        # Status first: a reader in another thread must not find the slot free and the old frames still in it.
        for slot in slots:
            ring_block_return(self._words[slot])
            self._held_slots.remove(slot)

    @property
    def finished(self) -> bool:
        return self._closed

    def counters(self) -> SourceCounters:
        """Cumulative counters; may be called from any thread."""
        with self._statistics:
            if not self._closed:
                # Reading resets them; the first figure counts dropped frames too.
                answer = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 12)
                _, drops, freezes = struct.unpack("3I", answer)
                self._drops += drops
                self._freezes += freezes
                self._ring.read(drops)
                self._interface.count()
            return SourceCounters(self._packets, self._bytes, self._drops, self._freezes, self._interface.lost)

    def close(self) -> None:
        """Stop capturing. The ring's memory goes when the last block that is still referenced goes."""
        if self._closed:
            return
        self.counters()
        with self._statistics:
            self._closed = True
            # A block that is still referenced keeps the mapping, and so the socket, alive in the kernel: stop
            # it from receiving (protocol 0) first. Where the interface is gone there is nothing to stop.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(SOL_PACKET, PACKET_DROP_MEMBERSHIP, self._promiscuous())
                self._socket.bind((self.name, 0))
            self._socket.close()
        self._held.clear()
        self._held_slots.clear()
        self._words, self._halves = [], []
        del self._whole, self._map


def _interface_index(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        names = ", ".join(name for _, name in socket.if_nameindex()) or "none"
        raise FlowcheckError(f"no interface {interface}: choose one of {names}") from None
