"""What differs on the wire between NCCL releases: schedule, channel split, CTS entries, immediates, set-up blocks.

Releases 2.18 to 2.30 are known. For any other nothing is assumed: `traits` raises `UnknownVersion`, and so it does for
a release whose form nobody has looked at. docs/nccl.md says what each field means and where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowcheck.errors import FlowcheckError

__all__ = [
    "CTS_FORMS", "ConnectionBlock", "CtsForm", "GraphInfo", "Traits", "UnknownVersion", "Version", "block_versions",
    "parse", "traits",
]

Version = tuple[int, int, int]
_OLDEST, _NEWEST = (2, 18), (2, 30)


class UnknownVersion(FlowcheckError):
    """A release of NCCL whose wire format is not known here: nothing of its traffic may be claimed."""


@dataclass(frozen=True, slots=True)
class CtsForm:
    """One "clear to send" entry: byte offsets of its fields, all little endian. Ends are exclusive."""

    entry: int
    """Bytes of an entry; an entry is written alone or as the first of several of one slot."""
    pitch: int
    """Bytes from one slot of the array to the next (eight entries)."""
    slots: int
    """The k-th message's entry lies in slot k mod `slots`."""
    address: int
    size: int
    size_bytes: int
    rkeys: int
    rkey_count: int
    requests: int
    tag: int
    index: int
    """u64: number of the message on the connection, from 1."""


@dataclass(frozen=True, slots=True)
class ConnectionBlock:
    """The block that each end of a NET/IB connection sends over TCP. Offsets in bytes, integers little endian."""

    size: int
    qpn: int
    qpn_pitch: int
    """QP number j is a u32 at qpn + j * qpn_pitch; entries beyond the number of QPs are uninitialised."""
    device: int
    device_pitch: int
    """GID, MTU and rkey of device d lie at their offset + d * device_pitch (0: there is one device)."""
    devices: int
    gid: int
    mtu: int
    fifo_rkey: int
    fifo_address: int


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """A rank's record in the bootstrap's graph all-gather: byte offsets of int32 values."""

    size: int
    channels: int
    """Length of each array below."""
    tree_pattern: int
    tree_channels: int
    ring_channels: int
    ring_receive: int
    """ringRecv[], followed by ringSend[], ringPrev[], ringNext[]."""
    tree_parent: int
    tree_child0: int
    tree_child1: int
    heads: int
    head_count: int
    """-1: not in the record."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Everything that depends on the release."""

    version: Version
    scheme: str
    """"A": channels interleaved in common loops; "B": contiguous parts; "C": parts made of cells."""
    minimum_traffic: int
    """Scheme C: no channel gets less traffic than that, bytes; 0 else."""
    cell_rule: str
    """Scheme C: "2.22" (16-byte cells, first share rounded down), "2.23" or "2.29" (the budget rounded up to 16)."""
    ll_traffic: int
    """Scheme C: LL's bytes count so many times in the channel split."""
    nvls_chunk: int
    """NVLSTree: largest chunk, bytes."""
    nvls_chunk_4: int
    """The same with four or more nodes."""
    cts: CtsForm
    immediate_big_endian: bool
    immediate_may_be_id: bool
    """Whether a setting exists by which the immediate is a request number and not the size."""
    split_over_qps: bool
    """Default of NCCL_IB_SPLIT_DATA_ON_QPS."""
    block: ConnectionBlock | None
    """None: not known for this release."""
    graph: GraphInfo
    socket_inline: int
    """NET/Socket: a message of at most so many bytes follows its header at once; 0: no such rule."""



CTS_FORMS = {
    "2.18": CtsForm(32, 256, 64, 0, 8, 4, 12, 1, 16, 20, 24),
    "2.19": CtsForm(32, 256, 256, 0, 8, 4, 12, 1, 16, 20, 24),
    "2.20": CtsForm(64, 512, 256, 0, 8, 4, 12, 2, 20, 24, 32),
    "2.24": CtsForm(64, 512, 256, 0, 8, 8, 16, 4, 32, 36, 40),
    "2.30": CtsForm(64, 512, 256, 0, 8, 8, 16, 8, 48, 52, 56),
}
"""By the first release that has it."""


def _block(size: int, devices: int, fifo_address: int, base: int = 3072) -> ConnectionBlock:
    return ConnectionBlock(size, 0, 24, base, 56, devices, base + 16, base + 8, base + 32, fifo_address)


_BLOCKS: dict[tuple[Version, Version], ConnectionBlock] = {
    ((2, 18, 0), (2, 18, 99)): ConnectionBlock(552, 8, 4, 0, 0, 1, 520, 536, 540, 544),
    ((2, 19, 0), (2, 19, 99)): ConnectionBlock(2600, 8, 4, 0, 0, 1, 2568, 2584, 2588, 2592),
    ((2, 20, 0), (2, 23, 99)): _block(3336, 2, 3320),
    ((2, 24, 0), (2, 25, 99)): _block(3576, 4, 3560),
    ((2, 26, 0), (2, 26, 99)): _block(3584, 4, 3560),
    ((2, 27, 0), (2, 29, 2)): _block(3648, 4, 3624),
    ((2, 30, 0), (2, 30, 99)): _block(4576, 8, 4552, 3456),
}


def _graph(size: int, channels: int, ring: int, tree: int, head_count: int) -> GraphInfo:
    step = 4 * channels
    return GraphInfo(
        size, channels, 0, 4, ring, tree - 4 * step, tree, tree + step, tree + 2 * step, tree + 3 * step, head_count
    )


_GRAPHS: dict[Version, GraphInfo] = {  # from this release on
    (2, 18, 0): _graph(1192, 32, 32, 680, -1),
    (2, 20, 0): _graph(1196, 32, 32, 680, 1192),
    (2, 21, 0): _graph(1220, 32, 36, 704, 1216),
    (2, 22, 0): _graph(1228, 32, 36, 704, 1216),
    (2, 23, 0): _graph(1260, 32, 36, 736, 1248),
    (2, 25, 0): _graph(2284, 64, 36, 1248, 2272),
    (2, 27, 0): _graph(2288, 64, 36, 1248, 2272),
    (2, 28, 0): _graph(2292, 64, 36, 1252, 2276),
    (2, 29, 7): _graph(2300, 64, 36, 1252, 2276),
    (2, 30, 0): _graph(2320, 64, 36, 1252, 2276),
}


def parse(text: str | int | tuple[int, ...]) -> Version:
    """(major, minor, patch) of "2.19.4", "2.30.7+cuda12.9", NCCL's own number 21904, or a tuple.

    Raises UnknownVersion for what is no version, and for one without a patch where patches differ (2.29).
    """
    try:
        if isinstance(text, tuple):
            numbers = [int(part) for part in text]
        elif isinstance(text, int) or text.isdigit():
            code = int(text)
            numbers = [code // 10000, code // 100 % 100, code % 100]
        else:
            plain = text.strip().lower().removeprefix("v").split("+")[0].split("-")[0]
            numbers = [int(part) for part in plain.split(".")]
    except ValueError:
        numbers = []
    if len(numbers) == 2 and tuple(numbers) != (2, 29):
        numbers.append(0)
    if len(numbers) != 3 or min(numbers) < 0:
        raise UnknownVersion(f"NCCL version {text!r}: give it in full, as in 2.29.7")
    return numbers[0], numbers[1], numbers[2]


def traits(version: str | int | tuple[int, ...]) -> Traits:
    """What is known of a release; raises UnknownVersion when that is nothing."""
    v = parse(version)
    name = ".".join(map(str, v))
    if not _OLDEST <= v[:2] <= _NEWEST or (2, 29, 0) <= v < (2, 29, 2):
        raise UnknownVersion(
            f"NCCL {name} is not known: this flowcheck reads 2.18 to 2.28, 2.29.2 and later, and 2.30; "
            "use one of those, or a newer flowcheck"
        )
    cell_rule, minimum = "", 0
    if v >= (2, 29, 2):
        cell_rule, minimum = "2.29", 32768
    elif v >= (2, 23):
        cell_rule, minimum = "2.23", 16384
    elif v >= (2, 22):
        cell_rule, minimum = "2.22", 512
    nvls = 524288 if v < (2, 21) else 131072
    return Traits(
        version=v,
        scheme="A" if v < (2, 20) else "B" if v < (2, 22) else "C",
        minimum_traffic=minimum,
        cell_rule=cell_rule,
        ll_traffic=4 if v >= (2, 26) else 1,
        nvls_chunk=nvls,
        nvls_chunk_4=nvls if v < (2, 19) else 65536,
        cts=_cts(v),
        immediate_big_endian=v >= (2, 29, 2),
        immediate_may_be_id=v >= (2, 29, 7),
        split_over_qps=v < (2, 20),
        block=next((block for (low, high), block in _BLOCKS.items() if low <= v <= high), None),
        graph=_GRAPHS[max(first for first in _GRAPHS if first <= v)],
        socket_inline=128 if v >= (2, 27) else 0,
    )


def _cts(v: Version) -> CtsForm:
    for name, form in reversed(CTS_FORMS.items()):
        major, minor = map(int, name.split("."))
        if v >= (major, minor):
            return form
    raise AssertionError("versions are checked before")


def block_versions(size: int) -> list[tuple[Version, Version]]:
    """(first, last) of the releases whose connection block has `size` bytes; patch 99 stands for any."""
    return [span for span, block in _BLOCKS.items() if block.size == size]
