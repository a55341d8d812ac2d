"""One frame of a capture, dissected by scapy; nothing else of flowcheck uses it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flowcheck.errors import UsageError
from flowcheck.inspect.report import open_files

__all__ = ["dissect"]


def dissect(files: Sequence[Path], number: int) -> str:
    """Frame `number`, counted from 1 over all files by time, layer by layer.

    Raises UsageError for a file that cannot be read and for a frame that is not there.
    """
    source = open_files(files)
    before = 0
    try:
        while (block := source.read()) is not None:
            if number <= before + len(block.ts):
                at = number - before - 1
                offset, size = int(block.offset[at]), int(block.caplen[at])
                data = block.base[offset : offset + size].tobytes()
                time = int(block.ts[at])
                when = datetime.fromtimestamp(time // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S")
                there = f"{size} of {int(block.wirelen[at])} bytes captured"
                return f"frame {number}: {when}.{time % 10**9:09d} UTC, {there}\n{_layers(data, block.linktype)}"
            before += len(block.ts)
            source.release(block)
    finally:
        source.close()
    raise UsageError(f"--frame {number}: there are {before} frames in {source.name}")


def _layers(data: bytes, linktype: int) -> str:
    # scapy warns about routes and interfaces of this machine when it is imported; a file needs neither.
    logging.getLogger("scapy.runtime").setLevel(logging.ERROR)
    from scapy.config import conf
    from scapy.contrib import erspan, roce  # noqa: F401
    from scapy.layers.inet import IP
    from scapy.layers.inet6 import IPv6
    from scapy.layers.l2 import CookedLinux, Ether, Loopback
    from scapy.layers.vxlan import VXLAN  # noqa: F401

    conf.verb = 0
    bare = IPv6 if data[:1] >= b"\x60" else IP
    layer = {0: Loopback, 1: Ether, 101: bare, 113: CookedLinux}.get(linktype)
    if layer is None:
        raise UsageError(f"--frame: link type {linktype} is not dissected: capture Ethernet frames")
    return str(layer(data).show(dump=True)).rstrip()
