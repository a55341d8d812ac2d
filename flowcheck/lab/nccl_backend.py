"""A process-group backend for the lab's trainers: it stands in for `nccl` and `gloo`, reduces in NCCL's order, and puts
the packets on the training network that NCCL would put there.

`register` is an entry point of torch's own extension loading (group `torch.backends`), which the launcher shows to
every rank's Python; so training scripts run unchanged. All inputs travel over the management network; every rank then
makes the sums, partial and whole, by itself, from the same arrays as the frames. One thread per group works off the
collectives in the order of the calls, as NCCL's stream does.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from flowcheck.lab import nccl_log
from flowcheck.lab.nccl_node import Card, Peers, perform, run
from flowcheck.lab.nccl_setup import SetUp, wanted
from flowcheck.lab.nccl_sockets import SocketCard
from flowcheck.lab.nccl_wire import SENDRECV, Call, Communicator, Event, Work, grouped
from flowcheck.lab.nccl_wire_job import Job
from flowcheck.lab.nccl_wire_split import ALLGATHER, ALLREDUCE, BROADCAST, REDUCESCATTER

ENVIRONMENT = "FLOWCHECK_LAB_NCCL"
"""JSON: the fields of `Job` that the lab chose, the rank's management address and interface."""
NAMES = ("nccl", "gloo")
_c10d: Any = torch._C._distributed_c10d
"""torch's type stubs know only parts of it."""
_OPERATIONS = {
    _c10d.ReduceOp.RedOpType.SUM: "sum",
    _c10d.ReduceOp.RedOpType.AVG: "avg",
    _c10d.ReduceOp.RedOpType.PRODUCT: "product",
    _c10d.ReduceOp.RedOpType.MIN: "min",
    _c10d.ReduceOp.RedOpType.MAX: "max",
}
_SIDE_TAG = 1


def register() -> None:
    """Make torch find this backend under both names. A process outside the lab is left alone."""
    if ENVIRONMENT not in os.environ:
        return
    for name in NAMES:
        dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", "cuda"])
        # torch asks its registered backends only for names that are not among its own.
        setattr(dist.Backend, name.upper(), dist.Backend.UNDEFINED)
    warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl backend")


def _create(options: Any, _: Any) -> LabGroup:
    return LabGroup(
        options.store, options.group_rank, options.group_size, options.timeout, tuple(options.global_ranks_in_group)
    )


class LabGroup(_c10d.ProcessGroup):
    """What NCCL and its process group would do. CPU tensors; `name()` is nccl, as for those who ask what runs."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, members: tuple[int, ...]) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._sequence = 0
        settings = json.loads(os.environ[ENVIRONMENT])
        self._interface, address = settings.pop("interface"), settings.pop("address")
        store = dist.PrefixStore("lab", store)
        if rank == 0:
            store.set("number", str(_root(store).add("flowcheck/lab/communicators", 1) - 1))
        number = int(store.get("number"))
        self._job = Job(size, members=members or tuple(range(size)), number=number, **settings)
        self._comm: Communicator | None = None
        self._store, self._seconds = store, timeout.total_seconds()
        self._set_up: SetUp | None = None
        self._inner = self._network(store, timeout)
        self._peers = Peers(store, rank, address, timeout)
        self._card: Card | SocketCard | None = None
        self._sockets = os.environ.get("NCCL_NET", "").lower() == "socket"
        self._lanes: dict[tuple[str, int], ThreadPoolExecutor] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_off, name="lab-nccl", daemon=True)
        self._thread.start()

    def _network(self, store: Any, timeout: Any) -> Any:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(interface=self._interface)]
        options._timeout = timeout
        return _c10d.ProcessGroupGloo(store, self._rank, self._size, options)

    # -- what torch asks --------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAMES[0]

    def name(self) -> str:
        return NAMES[0]

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _get_backend(self, device: Any) -> LabGroup:
        return self

    def _get_sequence_number_for_group(self) -> int:
        """Collectives so far, as ProcessGroupNCCL counts them; transfers between ranks have a count of their own."""
        return self._sequence

    def shutdown(self) -> None:
        self._calls.put(None)
        self._thread.join()
        for lane in self._lanes.values():
            lane.shutdown()
        if self._card is not None:
            self._card.close()
        self._peers.close()
        if self._set_up is not None:
            self._set_up.close()

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce_coalesced(_one(tensors), opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """What torch's coalescing manager makes of several all-reduces: one group call of NCCL."""
        op = "sum" if opts is None else _operation(opts.reduceOp)
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise NotImplementedError("the lab's NCCL groups all-reduces of one type: make a group of each type")
        return self._issue(lambda: self._allreduce(tensors, op), tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        (tensor,) = _one(tensors)
        root = 0 if opts is None else opts.rootRank
        return self._issue(lambda: self._broadcast(tensor, root), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (tensor,), (found,) = _one(inputs), outputs
        return self._issue(lambda: self._allgather(found, tensor), outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        parts = list(output.view(-1).chunk(self._size))
        return self._issue(lambda: self._allgather(parts, tensor), [output])

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (output,), (parts,) = _one(outputs), inputs
        op = "sum" if opts is None else _operation(opts.reduceOp)
        return self._issue(lambda: self._reduce_scatter(output, torch.cat([p.flatten() for p in parts]), op), outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(tensor.flatten().chunk(self._size))], opts)

    def _reduce_scatter_base(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    def barrier(self, opts: Any = None) -> Any:
        """ProcessGroupNCCL's barrier is an all-reduce of one float."""
        zero = torch.zeros(1)
        return self._issue(lambda: self._allreduce([zero], "sum"), [zero])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        (tensor,) = _one(tensors)
        return self._transfer("send", peer, lambda: self._send(tensor, peer, tag), tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        (tensor,) = _one(tensors)
        return self._transfer("recv", peer, lambda: self._recv(tensor, peer, tag), tensors)

    # -- how they are done ------------------------------------------------------------------------------------------

    def _issue(self, action: Callable[[], None], value: Any) -> Any:
        self._sequence += 1
        future: Future[Any] = Future()
        self._calls.put(lambda: _settle(future, action, value))
        return _c10d._create_work_from_future(future)

    def _transfer(self, way: str, peer: int, action: Callable[[], None], value: Any) -> Any:
        if self._sockets:
            raise NotImplementedError("the lab's NCCL sends nothing from rank to rank over sockets: --transport roce")
        future: Future[Any] = Future()
        lane = self._lanes.setdefault((way, peer), ThreadPoolExecutor(1))
        lane.submit(_settle, future, action, value)
        return _c10d._create_work_from_future(future)

    def _work_off(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _ready(self) -> Communicator:
        """NCCL makes its communicator at the first call, and says so in its log."""
        if self._comm is None:
            self._comm = Communicator(self._job)
            if self._sockets:
                self._card = SocketCard(self._comm, self._rank, self._store, self._seconds)
            else:
                self._card = Card(self._job.ports[self._rank].rail)
            path = nccl_log.debug_file(os.environ)
            if path is not None:
                own = self._comm.of_rank(self._rank)
                lines = nccl_log.log_lines(self._job, self._rank, own, os.environ, self._sockets)
                with path.open("a") as log:
                    log.write("".join(f"{line}\n" for line in lines))
            if wanted(os.environ):
                self._set_up = SetUp(self._comm, self._rank, self._store, self._seconds)
        return self._comm

    def _put(self, comm: Communicator, work: Work, event: Event, mine: bool) -> None:
        assert self._card is not None  # `_ready` has made it
        self._card.put(comm, work, event, mine)

    def _gather(self, tensor: torch.Tensor) -> list[np.ndarray]:
        """Every rank's values, over the management network."""
        own = tensor.detach().contiguous().flatten()
        found = [torch.empty_like(own) for _ in range(self._size)]
        if own.numel():
            self._inner.allgather([found], [own]).wait()
        return [_array(values) for values in found]

    def _perform(self, call: Call) -> Work:
        work = Work(self._job, call, self._rank)
        perform(self._ready(), work, self._rank, self._put, self._peers)
        return work

    def _allreduce(self, tensors: list[torch.Tensor], op: str) -> None:
        """One all-reduce, or the several of a group call."""
        full = [tensor for tensor in tensors if tensor.numel() and self._size > 1]
        calls = [Call(ALLREDUCE, self._gather(tensor), _dtype(tensor), op) for tensor in full]
        for index, work in grouped(self._job, calls, self._rank):
            perform(self._ready(), work, self._rank, self._put, self._peers)
            assert work.result is not None
            _write(full[index], work.result)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if tensor.numel() and self._size > 1:
            options = _c10d.BroadcastOptions()
            options.rootRank = root
            values = tensor.detach().contiguous().flatten()
            self._inner.broadcast([values], options).wait()
            self._perform(Call(BROADCAST, [_array(values)] * self._size, root=root))
            _write(tensor, _array(values))

    def _allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        values = self._gather(tensor)
        if tensor.numel() and self._size > 1:
            self._perform(Call(ALLGATHER, values))
        for output, value in zip(outputs, values, strict=True):
            _write(output, value)

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if output.numel() == 0 or self._size == 1:
            output.detach().copy_(tensor.view(output.shape))
            return
        work = self._perform(Call(REDUCESCATTER, self._gather(tensor), _dtype(tensor), op))
        _write(output, work.block(self._rank))

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        values = tensor.detach().contiguous().flatten()
        self._inner.send([values], peer, 2 * tag).wait()
        self._pass_on(values, self._rank, peer, tag)

    def _recv(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        values = torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._inner.recv([values], peer, 2 * tag).wait()
        self._pass_on(values, peer, self._rank, tag)
        _write(tensor, _array(values))

    def _pass_on(self, values: torch.Tensor, source: int, target: int, tag: int) -> None:
        """The frames of one transfer; both ends keep in step by gloo's own messages."""
        inputs = [_array(values)] * self._size
        work = Work(self._job, Call(SENDRECV, inputs, root=source, target=target))
        token = torch.zeros(1, dtype=torch.uint8)
        comm = self._ready()
        run(
            comm,
            work,
            self._rank,
            self._put,
            lambda peer: self._inner.send([token], peer, 2 * tag + _SIDE_TAG).wait(),
            lambda peer: self._inner.recv([token], peer, 2 * tag + _SIDE_TAG).wait(),
        )


def _settle(future: Future[Any], action: Callable[[], None], value: Any) -> None:
    try:
        action()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(value)


def _root(store: Any) -> Any:
    """The job's own store, without the prefixes of groups."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _one(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) != 1:
        raise NotImplementedError(f"one tensor per call, not {len(tensors)}: a rank of the lab has one device")
    return tensors


def _operation(op: Any) -> str:
    kind = getattr(op, "op", op)  # torch wraps some reductions in an object
    if kind not in _OPERATIONS:
        raise NotImplementedError(f"the lab's NCCL knows no reduction {kind}")
    return _OPERATIONS[kind]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _write(tensor: torch.Tensor, values: np.ndarray) -> None:
    if tensor.dtype == torch.bfloat16:
        source = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    else:
        source = torch.from_numpy(values)
    tensor.detach().copy_(source.view(tensor.shape))
