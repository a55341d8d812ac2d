"""The trainer's side of flowcheck: one call after model and optimizer exist, and nothing else in the training loop.

`attach` describes the job to the daemon and uploads the state; from then on rank 0 sends a step marker after every
`optimizer.step()` (`flowcheck.stephook`) and once the rebuilt bucket layout. A job that cannot be followed, or no
daemon, costs one warning and training goes on uncovered, unless `strict=True` asks for an error.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from flowcheck import nccl_facts, peers
from flowcheck.agreement import Agreement
from flowcheck.connection import Connection
from flowcheck.describe import Live, describe, parse_layout
from flowcheck.description import GroupRecord, check_run_name
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.stephook import StepMarker
from flowcheck.supported import Refused, backend_of
from flowcheck.upload import upload

ATTACH_TIMEOUT_S = 10.0
"""How long rank 0 waits for the daemon's first answer; FLOWCHECK_ATTACH_TIMEOUT overrides it."""
COLLECT_S = 300.0
"""How long rank 0 waits for the other ranks to call attach."""
UPLOAD_S = 3600.0
MARKER_QUEUE = 1000
"""Markers held while the daemon cannot be reached; beyond them they are dropped and the daemon notices."""
LINGER_S = 1.0
LAYOUT_POLL_S = 0.1
LAYOUT_TRIES = 20

_handles: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Handle:
    """What `attach` returns, on every rank. Keeping it is optional: the optimizer's hooks keep it alive.

    covered: whether the daemon follows this job; reason: why not; exact and reasons: whether the daemon's steps are
    bit-exact, and why not; run and epoch: where the job's steps are found.
    """

    def __init__(self, outcome: dict[str, Any], step: int) -> None:
        self.covered: bool = outcome["covered"]
        self.reason: str | None = outcome.get("reason")
        self.run: str | None = outcome.get("run")
        self.epoch: int | None = outcome.get("epoch")
        self.exact: bool | None = outcome.get("exact")
        self.reasons: list[str] = outcome.get("reasons", [])
        self._step = step
        self._removers: list[Any] = []
        self._marker: StepMarker | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step if self._marker is None else self._marker.step

    @property
    def dropped(self) -> int:
        """Markers that could not be sent because the daemon was out of reach for long (rank 0)."""
        return 0 if self._marker is None else self._marker.dropped

    def close(self) -> None:
        """Stop sending markers. Waits at most a second for those on the way; safe to call twice."""
        self._step = self.step
        for remover in self._removers:
            remover.remove()
        self._removers.clear()
        self.covered = False
        if self._finalizer is not None:
            self._finalizer()

    def _follow(self, marker: StepMarker, connection: Connection, live: Live, optimizer: Any) -> None:
        """Rank 0: put the hooks in place and start looking for the rebuilt layout."""
        self._marker = marker

        def once(optimizer: Any, args: Any, kwargs: Any) -> None:
            first.remove()
            marker.changed_since_attach(optimizer, args, kwargs)

        first = optimizer.register_step_pre_hook(once)
        self._removers += [
            first,
            optimizer.register_step_post_hook(marker),
            optimizer.register_load_state_dict_post_hook(
                lambda _: marker.report("optimizer.load_state_dict() was called after attach: attach again")
            ),
            live.model.register_load_state_dict_post_hook(
                lambda *_: marker.report("load_state_dict() was called on the model after attach: attach again")
            ),
            live.model.module.register_load_state_dict_post_hook(
                lambda *_: marker.report("load_state_dict() was called on the model after attach: attach again")
            ),
        ]
        layout = None
        if live.ddp.rebuilt_buckets is None:
            layout = _LayoutThread(connection.endpoint, self.run or "", self.epoch or 0, live.model)
            layout.start()
        self._finalizer = weakref.finalize(self, _end, os.getpid(), connection, layout, marker)

    def _count(self, optimizer: Any) -> None:
        """The other ranks: count steps, send nothing."""

        def count(*_: Any) -> None:
            self._step += 1

        self._removers.append(optimizer.register_step_post_hook(count))


def attach(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    step: int = 0,
    scheduler: Any = None,
    endpoint: str | None = None,
    run: str | None = None,
    strict: bool = False,
) -> Handle:
    """Have the checkpoint node follow this job. All ranks call it, between loading a checkpoint and the next step.

    step: optimizer steps already done; scheduler: an LR scheduler, so that steps whose marker is lost can be
    followed too; endpoint: the daemon's, default FLOWCHECK_ENDPOINT; run: a name for the job's steps, default
    FLOWCHECK_RUN or "default". Returns the same outcome on every rank, after the daemon has taken the state.

    A job may attach several times; attaching an optimizer again ends its earlier handle.
    Where the job cannot be followed: one warning on rank 0, or with `strict` an error on every rank: UsageError
    for what flowcheck does not support, FlowcheckError where the daemon is missing or fails.
    """
    with _lock:
        earlier = _handles.pop(optimizer, None) if isinstance(optimizer, torch.optim.Optimizer) else None
    if earlier is not None:
        earlier.close()
    attempt = _Attempt(ddp_model, optimizer, step, scheduler, endpoint, run)
    try:
        handle = attempt.run()
    except BaseException:
        attempt.abandon()
        raise
    if handle.covered:
        with _lock:
            _handles[optimizer] = handle
    elif strict:
        kind = UsageError if attempt.kind == "UsageError" else FlowcheckError
        raise kind(f"attach: {handle.reason}")
    elif attempt.rank == 0:
        warnings.warn(f"flowcheck: {handle.reason}; training goes on uncovered", RuntimeWarning, stacklevel=2)
    return handle


class _Attempt:
    """One call of attach on one rank."""

    def __init__(
        self, model: Any, optimizer: Any, step: int, scheduler: Any, endpoint: str | None, run: str | None
    ) -> None:
        self.rank = _global_rank()
        self.kind = "UsageError"
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._scheduler = scheduler
        self._endpoint = endpoint or os.environ.get("FLOWCHECK_ENDPOINT")
        self._run = run or os.environ.get("FLOWCHECK_RUN") or "default"
        self._connection: Connection | None = None
        self._live: Live | None = None
        self._marker: StepMarker | None = None

    def run(self) -> Handle:
        agreement = self._agreement()
        problem = None
        network: dict[str, Any] = {}
        try:
            check_run_name(self._run)
            if type(self._step) is not int or self._step < 0:
                raise Refused(f"step={self._step!r}: give the number of optimizer steps already done")
            self._live = describe(self._model, self._optimizer)
            network = self._network()
        except Exception as error:
            problem = _failure(error)
        if agreement is None:
            return self._handle({"covered": False, **(problem or _failure(Refused("no process group")))})
        fingerprint = None if self._live is None else self._live.fingerprint()
        agreement.contribute({"problem": problem, "fingerprint": fingerprint, **network})
        if self.rank != 0:
            return self._handle(agreement.outcome(COLLECT_S + UPLOAD_S + 600))
        outcome = {"covered": False, "kind": "FlowcheckError", "reason": "rank 0 was interrupted"}
        try:
            outcome = self._attach(agreement)
        except Exception as error:
            outcome = {"covered": False, **_failure(error)}
        finally:
            agreement.decide(outcome)
        return self._handle(outcome)

    def _agreement(self) -> Agreement | None:
        """None where there is no group to agree with: every rank finds the same reason by itself."""
        if not isinstance(self._model, DistributedDataParallel):
            return None
        group = self._model.process_group
        if group.size() == 1:
            return None
        self.rank = group.rank()
        store = distributed_c10d._world.pg_map[group][1]
        return Agreement(store, distributed_c10d._world.pg_names[group], group.rank(), group.size())

    def _attach(self, agreement: Agreement) -> dict[str, Any]:
        """Rank 0: gather the ranks, then talk to the daemon."""
        contributions = agreement.collect(COLLECT_S)
        for rank, contribution in enumerate(contributions):
            if contribution["problem"] is not None:
                where = "" if rank == 0 else f"rank {rank}: "
                problem = contribution["problem"]
                return {"covered": False, "kind": problem["kind"], "reason": f"{where}{problem['reason']}"}
        assert self._live is not None
        own = self._live.fingerprint()
        for rank, contribution in enumerate(contributions):
            if contribution["fingerprint"] != own:
                raise Refused(f"rank {rank}'s model, param groups or optimizer state differ from rank 0's")
        if not self._endpoint:
            raise FlowcheckError("no endpoint: set FLOWCHECK_ENDPOINT or pass endpoint=")
        from reconstruct.lr import scheduler_state

        scheduler = None if self._scheduler is None else scheduler_state(self._scheduler)
        group = self._group(contributions)
        description = self._live.description(self._run, self._step, group, scheduler)
        self._connection = Connection(self._endpoint, send_queue=MARKER_QUEUE, heartbeat=True)
        self._connection.request("ping", "pong", _attach_timeout())
        ack = upload(self._connection, description, self._live.tensors, UPLOAD_S)
        run, epoch = str(ack["run"]), int(ack["epoch"])
        self._marker = StepMarker(self._connection, run, epoch, self._step, group.sequence, self._live, self._optimizer)
        return {
            "covered": True,
            "run": run,
            "epoch": epoch,
            "exact": bool(ack.get("exact", True)),
            "reasons": [str(reason) for reason in ack.get("reasons", [])],
        }

    def _network(self) -> dict[str, Any]:
        """What this rank alone knows of the process group on the network."""
        group = self._model.process_group
        if backend_of(self._model) == "nccl":
            return {"nccl": nccl_facts.contribution(group.rank(), group.size())}
        return {"sockets": peers.own_sockets()}

    def _group(self, contributions: list[dict[str, Any]]) -> GroupRecord:
        group = self._model.process_group
        record = GroupRecord(
            name=distributed_c10d._world.pg_names[group],
            world_size=group.size(),
            contexts=[],
            sequence=group._get_sequence_number_for_group(),
            backend=backend_of(self._model),
            vantage=os.environ.get("FLOWCHECK_VANTAGE") or None,
        )
        if record.backend == "nccl":
            record.nccl = nccl_facts.record([contribution["nccl"] for contribution in contributions])
            return record
        store = distributed_c10d._world.pg_map[group][1]
        record.contexts = peers.listeners(store, self._model.device_type, group.size())
        record.sockets = [
            (rank, *socket)
            for rank, contribution in enumerate(contributions)
            for socket in peers.among(contribution["sockets"], record.contexts)
        ]
        return record

    def _handle(self, outcome: dict[str, Any]) -> Handle:
        self.kind = outcome.get("kind", "")
        handle = Handle(outcome, self._step)
        if not handle.covered:
            self.abandon()
            return handle
        connection, live, marker = self._connection, self._live, self._marker
        if connection is None or live is None or marker is None:
            handle._count(self._optimizer)
            return handle
        handle._follow(marker, connection, live, self._optimizer)
        self._connection = None
        return handle

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _LayoutThread:
    """Sends the rebuilt bucket layout once DDP has logged it, then ends.

    Until DDP has rebuilt its buckets it reads one attribute every 0.1 s. `_get_ddp_logging_data` is safe beside the
    training thread: it copies a small map under the reducer's mutex, without the GIL (c10d/logger.cpp).
    """

    def __init__(self, endpoint: str, run: str, epoch: int, model: DistributedDataParallel) -> None:
        self._endpoint = endpoint
        self._names = {"run": run, "epoch": epoch}
        self._model = weakref.ref(model)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowcheck-layout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LINGER_S)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(LAYOUT_POLL_S)  # and one last look: a short job may be over by now
            model = self._model()
            if model is None:
                return
            found = parse_layout(model._get_ddp_logging_data()) if model._has_rebuilt_buckets else None
            del model
            if found is not None:
                self._send({"buckets": found[0], "bucket_bytes": found[1]})
                return

    def _send(self, layout: dict[str, Any]) -> None:
        for attempt in range(LAYOUT_TRIES):
            try:
                with Connection(self._endpoint) as connection:
                    connection.request("layout", "layout-ack", 2.0, layout=layout, **self._names)
                return
            except FlowcheckError:  # the wire may show the layout as well, so this is no reason for a warning
                if self._stopped.wait(min(30.0, 0.5 * 2**attempt)):
                    return


def _failure(error: Exception) -> dict[str, Any]:
    """How an error travels in contributions and outcomes."""
    if isinstance(error, FlowcheckError):
        kind = "UsageError" if isinstance(error, UsageError) or error.exit_code == 2 else "FlowcheckError"
        return {"kind": kind, "reason": str(error)}
    return {"kind": "FlowcheckError", "reason": f"attach failed inside: {type(error).__name__}: {error}"}


def _attach_timeout() -> float:
    text = os.environ.get("FLOWCHECK_ATTACH_TIMEOUT")
    try:
        return ATTACH_TIMEOUT_S if text is None else float(text)
    except ValueError:
        raise UsageError(f"FLOWCHECK_ATTACH_TIMEOUT={text!r}: give a number of seconds") from None


def _global_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _end(process: int, connection: Connection, layout: _LayoutThread | None, marker: StepMarker) -> None:
    """Let the last markers leave; runs on close, when the optimizer is gone, or at the interpreter's end."""
    if process != os.getpid():  # a forked child must leave its parent's sockets alone
        return
    if layout is not None:
        layout.stop()
    marker.farewell()
    connection.close(linger=LINGER_S)
