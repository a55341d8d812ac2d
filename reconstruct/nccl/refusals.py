"""What of NCCL cannot be read from the wire: why, which setting makes the job readable, and what that may cost.

One table for everything that speaks to people about it: `attach`, the daemon, `inspect` and `doctor`. Settings and log
lines that show a reason are told here, packets that do by `reconstruct.nccl.unreadable`; the others are known from the
description, or from what is missing. No numba and no torch: the trainers import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["LOG_HOW", "NAMES", "REFUSALS", "Refusal", "from_choice", "from_log", "from_network", "from_settings"]

LOG_HOW = (
    "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET,ENV NCCL_DEBUG_FILE=nccl.%h.%p.log in the environment of every "
    "rank"
)
"""The settings by which NCCL's log tells rings, trees and channels."""


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
        "rings", "rings and channels that are not known",
        "no lines about rings in NCCL's log, and no set-up traffic of the job (TCP) before it attached",
        "the same messages carry other elements on another ring",
        f"{LOG_HOW}; or mirror the network of NCCL_SOCKET_IFNAME too, from before the job starts",
        "a few kilobytes of log per rank, once",
    ),
    Refusal(
        "trees", "trees that are not known",
        "no `Trees` lines of all ranks in NCCL's log, and no set-up traffic that shows them",
        "which rank sends sums up and which sends final values down follows from the tree",
        f"{LOG_HOW}; or NCCL_ALGO=allreduce:ring (before 2.24: Ring)",
        "a few kilobytes of log per rank, once; or slower small all-reduces without trees",
    ),
    Refusal(
        "nvls-channels", "NVLSTree whose number of channels is not known",
        "NVLS heads in the set-up traffic, and no NCCL log",
        "chunks follow from the number of NVLS channels, which is in NCCL's log alone",
        f"{LOG_HOW}; or NCCL_NVLS_ENABLE=0",
        "a few kilobytes of log per rank, once; or all-reduces that the GPUs add up",
    ),
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
        "no TLS (for gloo: without GLOO_DEVICE_TRANSPORT=TCP_TLS) and no encrypting tunnel on the training network",
        "that network then has to be trusted",
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
        "networks", "NCCL over RDMA and over TCP at once", "NET/IB and NET/Socket in the logs of one job's ranks",
        "which connection is of which kind is not known",
        "one of them on all nodes (NCCL_NET=IB or NCCL_NET=Socket)", "none, or the speed of TCP",
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
        "no NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE, NCCL_NTHREADS, NCCL_LL128_NTHREADS, "
        "NCCL_NVLS_CHUNKSIZE, NCCL_NVLSTREE_MAX_CHUNKSIZE", "the tuning that they were set for",
    ),
)  # fmt: skip

REFUSALS: dict[str, Refusal] = {refusal.name: refusal for refusal in _TABLE}
"""By name."""

def _not(*usual: str) -> Callable[[str], bool]:
    return lambda value: value.lower() not in ("", *usual)


_SETTINGS = (
    ("NCCL_COLLNET_ENABLE", _not("0"), "collnet"),
    ("NCCL_NET", _not("ib", "socket"), "net-plugin"),
    ("NCCL_NET_PLUGIN", _not("none"), "net-plugin"),
    ("NCCL_TUNER_PLUGIN", _not("none"), "tuner"),
    ("NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", _not("0"), "receiver-matching"),
    ("NCCL_IB_OOO_RQ", _not("0"), "receiver-matching"),
    ("NCCL_BUFFSIZE", _not("4194304"), "buffer-sizes"),
    ("NCCL_LL_BUFFSIZE", _not("524288"), "buffer-sizes"),
    ("NCCL_LL128_BUFFSIZE", _not("4915200"), "buffer-sizes"),
    ("NCCL_NTHREADS", _not("512"), "buffer-sizes"),
    ("NCCL_LL128_NTHREADS", _not("640"), "buffer-sizes"),
    ("NCCL_NVLS_CHUNKSIZE", _not(), "buffer-sizes"),
    ("NCCL_NVLSTREE_MAX_CHUNKSIZE", _not(), "buffer-sizes"),
)
NAMES = tuple(dict.fromkeys(name for name, _, _ in _SETTINGS))
"""The settings that can make a job unreadable."""
_OF_NETWORK = {"NCCL_NET", "NCCL_NET_PLUGIN"}


def from_settings(settings: Mapping[str, str], networks: frozenset[str] = frozenset()) -> list[tuple[str, Refusal]]:
    """(setting as given, refusal) for every NCCL_* setting of a job that makes it unreadable.

    networks: what the log shows that connections run over; settings that choose one then say nothing more.
    """
    return [
        (f"{name}={settings[name]}", REFUSALS[refusal])
        for name, unreadable, refusal in _SETTINGS
        if name in settings and unreadable(settings[name].strip()) and not (networks and name in _OF_NETWORK)
    ]


_CHOICES = {"collnetdirect": "collnet", "collnetchain": "collnet", "nvls": "nvls", "pat": "pat"}


def from_choice(algorithm: str) -> Refusal | None:
    """Why an algorithm that NCCL_ALGO names (lower case) cannot be read; None: it can, or NCCL has none such."""
    return REFUSALS[_CHOICES[algorithm]] if algorithm in _CHOICES else None


def from_network(name: str) -> Refusal | None:
    """Why what runs over a network (as in `via NET/<name>/0` in NCCL's log) cannot be read; None: it can."""
    if name in ("IB", "Socket"):
        return None
    return REFUSALS["efa" if re.fullmatch(r"OFI|AWS Libfabric|Libfabric", name) else "net-plugin"]


_ADAPTERS = re.compile(r"NET/IB ?: Using (.*)")
_TUNER = re.compile(r"TUNER/Plugin: (Using|Loaded|Plugin name)")


def from_log(line: str) -> Refusal | None:
    """What a line of NCCL's own log (NCCL_DEBUG=INFO) says of the whole job that cannot be read; None: nothing."""
    adapters = _ADAPTERS.search(line)
    if adapters is not None and "/IB" in adapters[1] and "/RoCE" not in adapters[1]:
        return REFUSALS["infiniband"]
    return REFUSALS["tuner"] if _TUNER.search(line) else None
