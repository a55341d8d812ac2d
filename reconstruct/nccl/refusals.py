"""What of NCCL cannot be read from the wire: why, which setting makes the job readable, and what that may cost.

One table for everything that speaks to people about it. Where packets themselves show the reason there is a function
that says so; the others are known from settings, from the description, or from what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from reconstruct.nccl.schedule import LL, LL128, SIMPLE, SLOT_BYTES

__all__ = [
    "REFUSALS", "Refusal", "from_log", "from_settings", "infiniband_frame", "reduce_scatter", "tls_record",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that is not read."""

    name: str
    title: str
    seen: str
    """What shows it, as a sentence."""
    why: str
    remedy: str
    """What to set or change."""
    cost: str
    """What that may cost the job."""

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.title}: {self.why}. Use {self.remedy}; the cost: {self.cost}."


_TABLE = (
    Refusal(
        "reduce-scatter", "reduce-scatter (FSDP, ZeRO 2 and 3, distributed optimizers)",
        "ring messages in which every chunk passes once and no final value comes back",
        "the last addition happens in the receiver, so reduced gradients never travel",
        "sharding off, or HSDP/ZeRO-1 with an all-reduce between replicas",
        "each GPU then holds the gradients and, with ZeRO-1, the parameters of its replica",
    ),
    Refusal(
        "nvls", "NVLS across nodes", "all-reduces in the description or log, but no messages between the nodes",
        "sums are made inside the NVLink switches and return in a form that is not on the Ethernet",
        "NCCL_NVLS_ENABLE=0", "all-reduces are then added up by the GPUs, which is slower where NVLS was chosen",
    ),
    Refusal(
        "collnet", "CollNet and SHARP", "an all-reduce whose partial sums leave every node and none comes back",
        "the sums come from InfiniBand switches, in a format of theirs",
        "NCCL_COLLNET_ENABLE=0", "each all-reduce then crosses the network twice instead of once",
    ),
    Refusal(
        "pat", "PAT", "all-gathers and reduce-scatters that fit no ring, with one GPU per node, NCCL 2.23 and newer",
        "its schedule is not known here, and a reduce-scatter shows no final values",
        'NCCL_ALGO="allgather:ring;reducescatter:ring" (or NCCL_PAT_ENABLE=0)',
        "small all-gathers over many nodes take longer",
    ),
    Refusal(
        "tls", "encrypted connections", "TLS handshakes on the connections of the job",
        "the bytes are encrypted before they reach the network",
        "no TLS and no encrypting tunnel on the training network", "that network then has to be trusted",
    ),
    Refusal(
        "infiniband", "InfiniBand link layer", "frames that begin with an InfiniBand local route header",
        "an InfiniBand switch has no port mirror that an Ethernet interface can take",
        "RoCE (NCCL_IB_HCA naming Ethernet ports)", "other ports or another fabric",
    ),
    Refusal(
        "efa", "EFA", "NET/OFI or NET/AWS Libfabric in NCCL's log, and no RoCE between the nodes",
        "its packets come in any order over many paths in a form that is not public, and no port can be mirrored",
        "NCCL_NET=Socket", "a small part of the bandwidth is left: for tests only",
    ),
    Refusal(
        "registered-buffers", "registered user buffers",
        "RDMA WRITEs to addresses that are no slots of a connection's buffer",
        "messages then go straight into user memory and are not cut by the schedule that is known",
        "NCCL_LOCAL_REGISTER=0 NCCL_GRAPH_REGISTER=0 NCCL_WIN_ENABLE=0",
        "one more copy inside the GPU for all-gathers, broadcasts and CUDA graphs",
    ),
    Refusal(
        "net-plugin", "another network plugin",
        "RDMA messages without \"clear to send\" entries, or NET/<other name> in the log",
        "a plugin has message formats of its own",
        "NCCL_NET_PLUGIN=none (and NCCL_NET=IB)", "what the plugin was there for: SHARP, or a provider's transport",
    ),
    Refusal(
        "adaptive-routing", "adaptive routing of unknown kind",
        "packets out of order that do not carry addresses of their own",
        "which address a packet's bytes have is then told only after its message is complete",
        "NCCL_IB_ADAPTIVE_ROUTING=0, and adaptive routing off for this traffic class on the switches",
        "a less even load of the links between switches",
    ),
    Refusal(
        "receiver-matching", "request numbers in the immediates",
        "immediates that count up instead of giving sizes, NCCL 2.29.7 and newer",
        "the size of a message is then not told, and ports may change under way",
        "NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME=0 NCCL_IB_OOO_RQ=0, and no port failover",
        "no failover between ports of a card",
    ),
    Refusal(
        "unknown-version", "an NCCL release that is not known",
        "a version outside 2.18 to 2.30, or messages that fit none",
        "schedules and formats change between releases, and a guess would place values wrongly",
        "one of the known releases of NCCL, or use a newer flowcheck",
        "what the other release changed",
    ),
    Refusal(
        "tuner", "a tuner plugin",
        "NCCL_TUNER_PLUGIN or a provider's tuner in the log; sizes that fit no number of channels",
        "it chooses channels and chunk sizes that follow from no argument of the call",
        "NCCL_TUNER_PLUGIN=none", "the provider's tuning, for sizes where it differs from NCCL's own choice",
    ),
    Refusal(
        "buffer-sizes", "other buffer sizes",
        "\"clear to send\" entries with sizes other than 65536, 614400, 524288, 1048576 and 131072",
        "chunks follow from the size of the buffers",
        "no NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE, NCCL_NTHREADS", "the tuning that they were set for",
    ),
)  # fmt: skip

REFUSALS: dict[str, Refusal] = {refusal.name: refusal for refusal in _TABLE}
"""By name."""

_SETTINGS = (
    ("NCCL_COLLNET_ENABLE", lambda value: value == "1", "collnet"),
    ("NCCL_NET_PLUGIN", lambda value: value not in ("", "none"), "net-plugin"),
    ("NCCL_TUNER_PLUGIN", lambda value: value not in ("", "none"), "tuner"),
    ("NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", lambda value: value == "1", "receiver-matching"),
    ("NCCL_IB_OOO_RQ", lambda value: value == "1", "receiver-matching"),
    ("NCCL_LOCAL_REGISTER", lambda value: value not in ("", "0"), "registered-buffers"),
    ("NCCL_GRAPH_REGISTER", lambda value: value not in ("", "0"), "registered-buffers"),
    ("NCCL_BUFFSIZE", lambda value: value not in ("", "4194304"), "buffer-sizes"),
    ("NCCL_LL_BUFFSIZE", lambda value: value not in ("", "524288"), "buffer-sizes"),
    ("NCCL_LL128_BUFFSIZE", lambda value: value not in ("", "4915200"), "buffer-sizes"),
    ("NCCL_NTHREADS", lambda value: value != "", "buffer-sizes"),
    ("NCCL_NET", lambda value: value.lower() not in ("", "ib", "socket"), "net-plugin"),
)


def from_settings(settings: dict[str, str]) -> list[tuple[str, Refusal]]:
    """(setting as given, refusal) for every NCCL_* setting of a job that makes it unreadable."""
    return [
        (f"{name}={settings[name]}", REFUSALS[refusal])
        for name, unreadable, refusal in _SETTINGS
        if name in settings and unreadable(settings[name].strip())
    ]


_LOG = (
    (re.compile(r"NET/IB ?: Using .*:\d+/IB\b"), "infiniband"),
    (re.compile(r"NET/(OFI|AWS Libfabric|Libfabric)\b"), "efa"),
    (re.compile(r"Using network (?!IB\b|Socket\b|AWS Libfabric|OFI|Libfabric)\w+"), "net-plugin"),
    (re.compile(r"TUNER/Plugin: (Using|Loaded|Plugin name)"), "tuner"),
)


def from_log(line: str) -> Refusal | None:
    """What a line of NCCL's own log (NCCL_DEBUG=INFO) says that cannot be read; None: nothing."""
    return next((REFUSALS[name] for pattern, name in _LOG if pattern.search(line)), None)


# ------------------------------------------------------------------------------------------------- by packets


def infiniband_frame(frame: bytes) -> bool:
    """Whether a captured frame is InfiniBand's own (an LRH with a BTH or GRH behind it) and not Ethernet.

    LRH: bits 0-3 virtual lane, 4-7 version 0, ..., 14-15 next header (2: BTH, 3: GRH with IPv6), then the destination
    LID, 5 zero bits and 11 bits of length in words, the source LID. The length has to be that of the frame.
    """
    if len(frame) < 8 + 12 + 6:
        return False
    following = frame[1] & 3
    words = int.from_bytes(frame[4:6], "big")
    if frame[0] & 15 or following < 2 or frame[1] & 12 or words >> 11 or len(frame) - 4 * words not in (0, 2):
        return False
    return following == 2 or frame[8] >> 4 == 6


def tls_record(data: bytes) -> bool:
    """Whether a TCP stream begins with a TLS handshake (record type 22, version 3.0 to 3.4, a hello)."""
    return (
        len(data) >= 6 and data[0] == 22 and data[1] == 3 and data[2] <= 4
        and 0 < int.from_bytes(data[3:5], "big") <= 1 << 14 and data[5] in (1, 2)
    )  # fmt: skip


def reduce_scatter(ranks: int, protocol: int, lengths: Sequence[int] | np.ndarray, step: int = 0) -> bool:
    """Whether whole wire lengths of a ring connection's messages look like reduce-scatters and not like all-reduces.

    A loop of a reduce-scatter is ranks - 1 chunks of one length, and nothing comes back; in an all-reduce of several
    loops there are 2 (ranks - 1), and the last loop's chunk lengths differ by what is left. So: at least two loops,
    all but the last of equal full chunks, the last of equal shorter ones, and a number of messages that is no multiple
    of an all-reduce's. With two ranks both are alike, and nothing is said. An all-gather has the same lengths: values
    tell them apart, lengths do not, so this is a hint for people and no proof.
    """
    slices = 2 if protocol == SIMPLE else 1
    per = (ranks - 1) * slices
    array = np.asarray(lengths, np.int64)
    full = {LL: SLOT_BYTES[LL], LL128: SLOT_BYTES[LL128], SIMPLE: 2 * SLOT_BYTES[SIMPLE]}[protocol]
    if ranks < 3 or array.size < 2 * per or array.size % per or array.size // per % 2 == 0:
        return False
    return bool(_loops_alike(array, per, slices, full))


@njit(cache=True)
def _loops_alike(lengths: np.ndarray, per: int, slices: int, full: int) -> bool:
    """Every loop has chunks of one length; all but the last are full, the last is not."""
    loops = lengths.size // per
    for loop in range(loops):
        for at in range(per):
            one = lengths[loop * per + at]
            if one != lengths[loop * per + at % slices] or (one == full) != (loop < loops - 1):
                return False
    return True
