"""What a training job is: everything that the checkpoint node must know to follow it, as plain data.

The trainer's rank 0 fills a `JobDescription` from live torch objects (`flowcheck.describe`), sends it as
JSON, and the daemon, the store and the restore commands work from it alone; the model's code is never
needed. Nothing here imports torch. Fields are checked on arrival: `DescriptionError` names the one that
does not fit.

Tensor keys, used by every part: `model/<parameter>`, `buffer/<buffer>`, `optimizer/<parameter>/<state
key>`. Raw tensor bytes are in memory order: the bytes of the storage that the tensor covers, whatever its
strides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flowcheck.nccl_record import NcclRecord
from flowcheck.specs import (
    ITEMSIZE,
    MAX_TENSORS,
    BufferSpec,
    GroupSpec,
    OptimizerSpec,
    ParameterSpec,
    TensorSpec,
    check_scheduler,
    read_name,
    read_size,
)
from flowcheck.values import DescriptionError, Reader, decode_value, encode_value, integer, sequence, text

__all__ = [
    "ITEMSIZE",
    "BufferSpec",
    "DdpSpec",
    "DescriptionError",
    "GroupRecord",
    "GroupSpec",
    "JobDescription",
    "NcclRecord",
    "OptimizerSpec",
    "ParameterSpec",
    "TensorSpec",
    "check_run_name",
    "check_scheduler",
    "decode_value",
    "encode_value",
]

VERSION = 2
BACKENDS = ("gloo", "nccl")

MAX_RANKS = 1 << 16
MAX_CONTEXTS = 64
MAX_SOCKETS = 1 << 20

_RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def check_run_name(run: str) -> str:
    """`run` if it can be a folder name: 1 to 64 of A-Z a-z 0-9 . _ - and no leading dot, else
    DescriptionError.
    """
    if not isinstance(run, str) or not _RUN_NAME.fullmatch(run):
        shown = str(run)[:80]
        raise DescriptionError(f"run: {shown!r} is not 1 to 64 of A-Za-z0-9._- without a leading dot")
    return run


@dataclass(slots=True)
class DdpSpec:
    """DistributedDataParallel's settings and layouts; buckets hold DDP parameter indices, bucket 0 first.

    `layout_pending`: a forward pass ran before the attach, so DDP may rebuild its buckets at the next one.
    Then `initial_buckets` is not known to apply to the next step: a layout message, a marker's `rebuilt` or
    the rebuild broadcasts must tell.
    """

    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    bucket_cap_bytes: int
    bucket_cap_default: bool
    ignored: tuple[str, ...]
    comm_hook: str | None
    initial_buckets: tuple[tuple[int, ...], ...]
    rebuilt_buckets: tuple[tuple[int, ...], ...] | None
    bucket_bytes: tuple[int, ...]
    layout_pending: bool = False

    def to_json(self) -> dict[str, Any]:
        rebuilt = self.rebuilt_buckets
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_bytes": self.bucket_cap_bytes,
            "bucket_cap_default": self.bucket_cap_default,
            "ignored": list(self.ignored),
            "comm_hook": self.comm_hook,
            "initial_buckets": [list(bucket) for bucket in self.initial_buckets],
            "rebuilt_buckets": None if rebuilt is None else [list(bucket) for bucket in rebuilt],
            "bucket_bytes": list(self.bucket_bytes),
            "layout_pending": self.layout_pending,
        }

    @classmethod
    def from_json(cls, data: Any, path: str = "ddp") -> DdpSpec:
        reader = Reader(data, path)
        rebuilt = None
        if reader.raw("rebuilt_buckets") is not None:
            rebuilt = tuple(reader.sequence("rebuilt_buckets", MAX_TENSORS, _bucket))
        result = cls(
            find_unused_parameters=reader.boolean("find_unused_parameters"),
            static_graph=reader.boolean("static_graph"),
            gradient_as_bucket_view=reader.boolean("gradient_as_bucket_view"),
            broadcast_buffers=reader.boolean("broadcast_buffers"),
            bucket_cap_bytes=reader.integer("bucket_cap_bytes", 0, 1 << 62),
            bucket_cap_default=reader.boolean("bucket_cap_default"),
            ignored=tuple(reader.sequence("ignored", MAX_TENSORS, read_name)),
            comm_hook=None if reader.raw("comm_hook") is None else reader.text("comm_hook"),
            initial_buckets=tuple(reader.sequence("initial_buckets", MAX_TENSORS, _bucket)),
            rebuilt_buckets=rebuilt,
            bucket_bytes=tuple(reader.sequence("bucket_bytes", MAX_TENSORS, read_size)),
            layout_pending=reader.boolean("layout_pending"),
        )
        reader.done()
        return result


@dataclass(slots=True)
class GroupRecord:
    """DDP's process group on the network.

    `sequence` is c10d's sequence number at attach, the tag of the next collective; `vantage` the name of the
    daemon's vantage group that shows the traffic, None for any. For gloo: `contexts[c][rank]` is the (ip, port)
    that group rank listens on in context c; `sockets` are (rank, local ip, local port, remote ip, remote port),
    the established connections that each rank had with a peer at attach. For NCCL: `nccl`.
    """

    name: str
    world_size: int
    contexts: list[dict[int, tuple[str, int]]]
    sequence: int
    sockets: list[tuple[int, str, int, str, int]] = field(default_factory=list)
    backend: str = "gloo"
    nccl: NcclRecord | None = None
    vantage: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "world_size": self.world_size,
            "contexts": [[[rank, ip, port] for rank, (ip, port) in sorted(c.items())] for c in self.contexts],
            "sequence": self.sequence,
            "sockets": [list(socket) for socket in self.sockets],
            "backend": self.backend,
            "nccl": None if self.nccl is None else self.nccl.to_json(),
            "vantage": self.vantage,
        }

    @classmethod
    def from_json(cls, data: Any, path: str = "group") -> GroupRecord:
        reader = Reader(data, path)
        world_size = reader.integer("world_size", 1, MAX_RANKS)

        def record(item: Any, where: str) -> tuple[int, tuple[str, int]]:
            rank, ip, port = _fields(item, where, 3)
            address = (text(ip, where, 64), integer(port, where, 0, 65535))
            return integer(rank, where, 0, world_size - 1), address

        def socket(item: Any, where: str) -> tuple[int, str, int, str, int]:
            rank, ip, port, peer, peer_port = _fields(item, where, 5)
            return (
                integer(rank, where, 0, world_size - 1),
                text(ip, where, 64),
                integer(port, where, 0, 65535),
                text(peer, where, 64),
                integer(peer_port, where, 0, 65535),
            )

        backend = reader.text("backend", 16)
        if backend not in BACKENDS:
            raise reader.fail("backend", f"{backend!r} is not one of {', '.join(BACKENDS)}")
        nccl = reader.raw("nccl")
        if (nccl is not None) != (backend == "nccl"):
            raise reader.fail("nccl", f"{'given' if nccl is not None else 'missing'} for backend {backend}")
        result = cls(
            name=reader.text("name"),
            world_size=world_size,
            backend=backend,
            nccl=None if nccl is None else NcclRecord.from_json(nccl, f"{path}.nccl", world_size),
            vantage=None if reader.raw("vantage") is None else reader.text("vantage", 64),
            contexts=[
                dict(context)
                for context in reader.sequence(
                    "contexts", MAX_CONTEXTS, lambda item, where: sequence(item, where, MAX_RANKS, record)
                )
            ],
            sequence=reader.integer("sequence", 0, (1 << 63) - 1),
            sockets=reader.sequence("sockets", MAX_SOCKETS, socket),
        )
        reader.done()
        return result


@dataclass(slots=True)
class JobDescription:
    """One attach: the job, its model, optimizer, DDP settings and process group; `step` optimizer steps are
    done.
    """

    run: str
    step: int
    world_size: int
    torch_version: str
    arch: str
    cpu_capability: str
    device: str
    parameters: list[ParameterSpec]
    buffers: list[BufferSpec]
    optimizer: OptimizerSpec
    ddp: DdpSpec
    group: GroupRecord
    scheduler: dict[str, Any] | None = None
    threads: int | None = None
    """torch's intra-op threads in rank 0: they decide bits of large float16 and bfloat16 tensors. None: not known."""
    version: int = VERSION

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """(key, spec) of every tensor that an attach uploads, in order: parameters, buffers, optimizer
        state.
        """
        for parameter in self.parameters:
            yield f"model/{parameter.name}", parameter.spec
        for buffer in self.buffers:
            yield f"buffer/{buffer.name}", buffer.spec
        for name, entry in self.optimizer.state.items():
            for key, spec in entry.items():
                yield f"optimizer/{name}/{key}", spec

    def reduced(self) -> list[ParameterSpec]:
        """The parameters that DDP reduces, in DDP's index order 0..P-1."""
        return sorted((p for p in self.parameters if p.index is not None), key=lambda p: p.index or 0)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready objects; `json.dumps(..., allow_nan=False)` of it always works."""
        return {
            "version": self.version,
            "run": self.run,
            "step": self.step,
            "world_size": self.world_size,
            "torch_version": self.torch_version,
            "arch": self.arch,
            "cpu_capability": self.cpu_capability,
            "device": self.device,
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "buffers": [buffer.to_json() for buffer in self.buffers],
            "optimizer": self.optimizer.to_json(),
            "ddp": self.ddp.to_json(),
            "group": self.group.to_json(),
            "scheduler": encode_value(self.scheduler, "scheduler"),
            "threads": self.threads,
        }

    @classmethod
    def from_json(cls, data: Any, path: str = "description") -> JobDescription:
        """From `to_json`'s objects or their JSON text or bytes; DescriptionError names the field that
        fails.
        """
        if isinstance(data, (str, bytes, bytearray)):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise DescriptionError(f"{path}: not JSON: {error}") from None
        reader = Reader(data, path)
        version = reader.integer("version", 0, 1 << 30)
        if version != VERSION:
            raise reader.fail("version", f"{version} is not supported, this flowcheck reads {VERSION}")
        device = reader.text("device", 16)
        if device not in ("cpu", "cuda"):
            raise reader.fail("device", f"{device!r} is neither cpu nor cuda")
        scheduler = check_scheduler(reader.value("scheduler"), f"{reader.path}.scheduler")
        result = cls(
            version=version,
            run=check_run_name(reader.text("run")),
            step=reader.integer("step", 0, 1 << 62),
            world_size=reader.integer("world_size", 1, MAX_RANKS),
            torch_version=reader.text("torch_version", 128),
            arch=reader.text("arch", 64),
            cpu_capability=reader.text("cpu_capability", 64),
            device=device,
            parameters=reader.sequence("parameters", MAX_TENSORS, ParameterSpec.from_json),
            buffers=reader.sequence("buffers", MAX_TENSORS, BufferSpec.from_json),
            optimizer=OptimizerSpec.from_json(reader.raw("optimizer"), f"{path}.optimizer"),
            ddp=DdpSpec.from_json(reader.raw("ddp"), f"{path}.ddp"),
            group=GroupRecord.from_json(reader.raw("group"), f"{path}.group"),
            scheduler=scheduler,
            threads=None if reader.raw("threads") is None else reader.integer("threads", 1, 1 << 16),
        )
        reader.done()
        check_consistent(result, path)
        return result


def check_consistent(job: JobDescription, path: str = "description") -> None:
    """DescriptionError if names repeat, indices have gaps, or buckets, groups or state name what is not
    there.
    """
    names: set[str] = set()
    entries: list[ParameterSpec | BufferSpec] = [*job.parameters, *job.buffers]
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if name in names:
                raise DescriptionError(f"{path}: the name {name!r:.80} occurs twice")
            names.add(name)
    known = {parameter.name for parameter in job.parameters}
    indices = sorted(p.index for p in job.parameters if p.index is not None)
    if indices != list(range(len(indices))):
        raise DescriptionError(f"{path}.parameters: DDP indices are not 0..{len(indices) - 1}")
    layouts = {"initial_buckets": job.ddp.initial_buckets, "rebuilt_buckets": job.ddp.rebuilt_buckets}
    for label, buckets in layouts.items():
        if buckets is not None and sorted(i for bucket in buckets for i in bucket) != indices:
            raise DescriptionError(f"{path}.ddp.{label}: does not hold every DDP index exactly once")
    owned: set[str] = set()
    for number, group in enumerate(job.optimizer.groups):
        where = f"{path}.optimizer.groups[{number}].parameters"
        for name in group.parameters:
            if name not in known or name in owned:
                raise DescriptionError(f"{where}: {name!r:.80} is unknown or occurs twice")
            owned.add(name)
    for name in job.optimizer.state:
        if name not in owned:
            raise DescriptionError(f"{path}.optimizer.state.{name:.80}: not in any param group")
    if job.group.world_size != job.world_size:
        raise DescriptionError(f"{path}.group.world_size: {job.group.world_size}, not {job.world_size}")


def _bucket(value: Any, path: str) -> tuple[int, ...]:
    return tuple(sequence(value, path, MAX_TENSORS, lambda item, where: integer(item, where, 0, MAX_TENSORS)))


def _fields(value: Any, path: str, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise DescriptionError(f"{path}: expected a list of {count} fields")
    return value
