"""The trainer's side of flowcheck: one call after model and optimizer exist, and nothing else in the training loop.

`attach` describes the job to the daemon and uploads the state; from then on rank 0 sends a step marker after every
`optimizer.step()` (`flowcheck.stephook`) and once the rebuilt bucket layout, and an agent in every rank answers what
the daemon asks (`flowcheck.agent`). A job that cannot be followed, or no daemon, costs one warning and training goes on
uncovered, unless `strict=True` asks for an error; a daemon that comes up later joins then.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from flowcheck import nccl_facts, peers
from flowcheck.agent import Agent
from flowcheck.agreement import Agreement
from flowcheck.connection import Connection, Unreachable
from flowcheck.describe import Live, describe
from flowcheck.description import GroupRecord, check_run_name
from flowcheck.desk import Desk
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.latejoin import LateJoin
from flowcheck.livestate import LiveState
from flowcheck.markerlink import MARKER_QUEUE, MarkerLink
from flowcheck.protocol import MAX_PATH
from flowcheck.stephook import StepCounter, StepMarker
from flowcheck.supported import Refused, backend_of
from flowcheck.upload import upload

ATTACH_TIMEOUT_S = 10.0
"""How long rank 0 waits for the daemon's first answer; FLOWCHECK_ATTACH_TIMEOUT overrides it."""
COLLECT_S = 300.0
"""How long rank 0 waits for the other ranks to call attach."""
UPLOAD_S = 3600.0
LINGER_S = 1.0
REPAIR_S = 2.0
"""How long `Handle.close` waits by default for a daemon to fetch what it lacks of the last step."""
GIVE_EVERY_S = 0.005
MAX_ENDPOINTS = 8

_handles: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Handle:
    """What `attach` returns, on every rank. Keeping it is optional: the optimizer's hooks keep it alive.

    The outcome of the attach itself, whatever daemon joins later: covered: whether the daemon follows this job; reason:
    why not; exact and reasons: whether the daemon's steps are bit-exact, and why not; run and epoch: where the job's
    steps are found; unseen: what to do if no rank sits behind a mirrored port, None unless that is certain already.
    """

    def __init__(self, outcome: dict[str, Any], step: int) -> None:
        self.covered: bool = outcome["covered"]
        self.reason: str | None = outcome.get("reason")
        self.run: str | None = outcome.get("run")
        self.epoch: int | None = outcome.get("epoch")
        self.exact: bool | None = outcome.get("exact")
        self.reasons: list[str] = outcome.get("reasons", [])
        self.unseen: str | None = outcome.get("unseen")
        self._step = self._first = step
        self._removers: list[Any] = []
        self._hook: StepMarker | StepCounter | None = None
        self._agents: list[Agent] = []
        self._optimizer: weakref.ref[Any] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step if self._hook is None else self._hook.step

    @property
    def dropped(self) -> int:
        """Markers that could not be sent because the daemon was out of reach for long (rank 0)."""
        return self._hook.dropped if isinstance(self._hook, StepMarker) else 0

    @property
    def repair(self) -> dict[str, dict[str, int]]:
        """What this rank was asked for and gave, by daemon's endpoint: see `flowcheck.agent.AgentCounters`."""
        return {agent.endpoint: asdict(agent.counters) for agent in self._agents}

    def close(self, wait: float = REPAIR_S) -> None:
        """Training is over, or goes on without the daemon: stop sending markers. Safe to call twice.

        Call it after the last step, on the thread that made it, before anything else changes parameters or optimizer
        state: a daemon that lacks elements of that step gets them from rank 0 now. That takes `wait` seconds at most,
        and milliseconds where nothing is lacking or the daemon is gone; on other ranks, other threads and where the
        state is seen to be changed, no time at all. Messages on the way get a second more.
        """
        self._step = self.step
        for remover in self._removers:
            remover.remove()
        self._removers.clear()
        self.covered = False
        if self._finalizer is not None and self._finalizer.alive and wait > 0:
            self._give_last(wait)
        if self._finalizer is not None:
            self._finalizer()

    def _give_last(self, wait: float) -> None:
        """Rank 0: answer what the daemons ask for after the last step, until they have all of it."""
        hook, optimizer = self._hook, None if self._optimizer is None else self._optimizer()
        if not isinstance(hook, StepMarker) or optimizer is None or hook.step == self._first:
            return
        waiting = [agent for agent, follows in zip(self._agents, hook.ended(), strict=True) if follows]
        turns = {agent: agent.turns for agent in waiting}
        deadline = time.monotonic() + wait
        while True:
            hook.give_all(optimizer)
            waiting = [
                agent
                for agent in waiting
                if agent.look() and agent.done != hook.step and (agent.reachable or agent.turns == turns[agent])
            ]
            if not waiting or time.monotonic() > deadline:
                return
            time.sleep(GIVE_EVERY_S)

    def _follow(self, hook: StepMarker | StepCounter, agents: list[Agent], optimizer: Any, model: Any) -> None:
        """Put the hooks in place and start the agents. model: the live DDP model."""
        self._hook, self._agents, self._optimizer = hook, agents, weakref.ref(optimizer)
        self._removers.append(optimizer.register_step_post_hook(hook))
        self._removers.append(optimizer.register_step_pre_hook(hook.before))
        if isinstance(hook, StepMarker):
            self._watch(hook, optimizer, model)
        for agent in agents:
            agent.start()
        self._finalizer = weakref.finalize(self, _end, os.getpid(), agents, hook)

    def _watch(self, marker: StepMarker, optimizer: Any, model: Any) -> None:
        """Rank 0: notice what ends the following of the job."""

        def once(optimizer: Any, args: Any, kwargs: Any) -> None:
            first.remove()
            marker.changed_since_attach(optimizer, args, kwargs)

        def loaded(*_: Any) -> None:
            marker.report("load_state_dict() was called on the model after attach: attach again")

        first = optimizer.register_step_pre_hook(once)
        self._removers += [
            first,
            optimizer.register_load_state_dict_post_hook(
                lambda _: marker.report("optimizer.load_state_dict() was called after attach: attach again")
            ),
            model.register_load_state_dict_post_hook(loaded),
            model.module.register_load_state_dict_post_hook(loaded),
        ]


def attach(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    step: int = 0,
    scheduler: Any = None,
    endpoint: str | None = None,
    run: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Handle:
    """Have the checkpoint node follow this job. All ranks call it, between loading a checkpoint and the next step.

    step: optimizer steps already done; scheduler: an LR scheduler, so that steps whose marker is lost can be
    followed too; endpoint: the daemon's, default FLOWCHECK_ENDPOINT; further ones after commas, of other checkpoint
    nodes, join while training runs; run: a name for the job's steps, default FLOWCHECK_RUN or "default"; checkpoint:
    where the job has just loaded this state from, an absolute path as the first daemon sees it: a file of torch.save
    with {"model": ..., "optimizer": ...}, a folder of torch.distributed.checkpoint or a step of flowcheck's store.
    Tensors that the daemon finds there with the job's checksums are not uploaded (docs/store.md). Returns the same
    outcome on every rank, after the first daemon has taken the state.

    A job may attach several times; attaching an optimizer again ends its earlier handle.
    Where the job cannot be followed: one warning on rank 0, or with `strict` an error on every rank: UsageError
    for what flowcheck does not support, FlowcheckError where the daemon is missing or fails. Without `strict`, a daemon
    that cannot be reached now may join later.
    """
    with _lock:
        earlier = _handles.pop(optimizer, None) if isinstance(optimizer, torch.optim.Optimizer) else None
    if earlier is not None:
        earlier.close(wait=0)  # a checkpoint may have been loaded since its last step
    attempt = _Attempt(ddp_model, optimizer, step, scheduler, endpoint, run, checkpoint, strict)
    try:
        handle = attempt.run()
    except BaseException:
        attempt.abandon()
        raise
    if handle._hook is not None:
        with _lock:
            _handles[optimizer] = handle
    if handle.covered:
        if handle.unseen is not None and attempt.rank == 0:
            warnings.warn(f"flowcheck: {handle.unseen}", RuntimeWarning, stacklevel=2)
        return handle
    if strict:
        kind = UsageError if attempt.kind == "UsageError" else FlowcheckError
        raise kind(f"attach: {handle.reason}")
    if attempt.rank == 0:
        warnings.warn(f"flowcheck: {handle.reason}; training goes on uncovered", RuntimeWarning, stacklevel=2)
    return handle


class _Attempt:
    """One call of attach on one rank."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        step: int,
        scheduler: Any,
        endpoint: str | None,
        run: str | None,
        checkpoint: str | os.PathLike[str] | None,
        strict: bool,
    ) -> None:
        self.rank = _global_rank()
        self.kind = "UsageError"
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._scheduler = scheduler
        self._endpoint = endpoint or os.environ.get("FLOWCHECK_ENDPOINT")
        self._run = run or os.environ.get("FLOWCHECK_RUN") or "default"
        self._checkpoint = None if checkpoint is None else os.fspath(checkpoint)
        self._strict = strict
        self._connection: Connection | None = None
        self._live: Live | None = None
        self._group: GroupRecord | None = None  # rank 0's

    def run(self) -> Handle:
        agreement = self._agreement()
        problem = None
        network: dict[str, Any] = {}
        try:
            check_run_name(self._run)
            if type(self._step) is not int or self._step < 0:
                raise Refused(f"step={self._step!r}: give the number of optimizer steps already done")
            if self._checkpoint is not None and not 0 < len(self._checkpoint) <= MAX_PATH:
                raise Refused(f"checkpoint={self._checkpoint[:100]!r}: give a path of at most {MAX_PATH} characters")
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
        endpoints = _endpoints(self._endpoint)
        from reconstruct.lr import scheduler_state

        scheduler = None if self._scheduler is None else scheduler_state(self._scheduler)
        self._group = self._record(contributions)
        description = self._live.description(self._run, self._step, self._group, scheduler)
        self._connection = Connection(endpoints[0], send_queue=MARKER_QUEUE, heartbeat=True)
        agents: dict[str, Any] = {"run": self._run, "job": secrets.token_hex(8), "endpoints": endpoints}
        try:
            self._connection.request("ping", "pong", _attach_timeout())
            ack = upload(self._connection, description, agents["job"], self._live.tensors, UPLOAD_S, self._checkpoint)
        except Unreachable as error:
            if self._strict:
                raise
            return {"covered": False, **_failure(error), "agents": agents}
        return {
            "covered": True,
            "run": str(ack["run"]),
            "epoch": int(ack["epoch"]),
            "exact": bool(ack.get("exact", True)),
            "reasons": [str(reason) for reason in ack.get("reasons", [])],
            "unseen": _unseen(ack),
            "agents": agents,
        }

    def _network(self) -> dict[str, Any]:
        """What this rank alone knows of the process group on the network."""
        group = self._model.process_group
        if backend_of(self._model) == "nccl":
            return {"nccl": nccl_facts.contribution(group.rank(), group.size())}
        return {"sockets": peers.own_sockets()}

    def _record(self, contributions: list[dict[str, Any]]) -> GroupRecord:
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
        names = outcome.get("agents")
        if names is None or self._live is None:
            self.abandon()
            return handle
        desk = Desk(LiveState(self._live, self._model.process_group.rank()))
        hook: StepMarker | StepCounter
        if self._group is None:
            hook = StepCounter(self._step, desk)
            late: list[LateJoin | None] = [None] * len(names["endpoints"])
        else:
            hook, late = self._markers(handle, names, desk, self._group, self._live)
        agents = [
            Agent(endpoint, names["run"], names["job"], self.rank, desk, lambda: hook.step, joins)
            for endpoint, joins in zip(names["endpoints"], late, strict=True)
        ]
        handle._follow(hook, agents, self._optimizer, self._model)
        self._live.tensors.clear()  # the optimizer may replace its own
        return handle

    def _markers(
        self, handle: Handle, names: dict[str, Any], desk: Desk, group: GroupRecord, live: Live
    ) -> tuple[StepMarker, list[LateJoin | None]]:
        """Rank 0: the hook that sends markers to every daemon, the first of which may follow the job already."""
        links = [MarkerLink(endpoint) for endpoint in names["endpoints"]]
        marker = StepMarker(
            links, self._step, group.sequence, live, self._optimizer, desk, uploaded=handle.covered
        )
        run, job = names["run"], names["job"]
        late = [LateJoin(link, marker, desk, live, group, self._scheduler, run, job) for link in links]
        if handle.covered and self._connection is not None:
            links[0].follow(self._connection, handle.run or "", handle.epoch or 0)
            self._connection = None
            if live.ddp.rebuilt_buckets is None:
                late[0].watch_layout(handle.run or "", handle.epoch or 0)
        self.abandon()
        return marker, [*late]

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _unseen(ack: dict[str, Any]) -> str | None:
    """What to do where the daemon has watched since before this process began and has seen nothing of its traffic."""
    unseen = ack.get("unseen")
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return str(unseen["text"]) if unseen is not None and age < unseen["watched"] else None


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


def _endpoints(text: str | None) -> list[str]:
    """The daemons' endpoints. FlowcheckError if there is none, UsageError for more than can be of use."""
    found = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not found:
        raise FlowcheckError("no endpoint: set FLOWCHECK_ENDPOINT or pass endpoint=")
    if len(found) > MAX_ENDPOINTS or len(set(found)) < len(found):
        raise UsageError(f"endpoint {text!r:.200}: give at most {MAX_ENDPOINTS} different ones")
    for endpoint in found[1:]:
        Connection(endpoint).close()  # one that cannot be used is better said now
    return found


def _end(process: int, agents: Sequence[Agent], hook: StepMarker | StepCounter) -> None:
    """Let the last markers leave; runs on close, when the optimizer is gone, or at the interpreter's end."""
    if process != os.getpid():  # a forked child must leave its parent's sockets alone
        return
    deadline = time.monotonic() + LINGER_S
    for agent in agents:
        agent.halt()
    for agent in agents:
        agent.join(max(0.0, deadline - time.monotonic()))
    if isinstance(hook, StepMarker):
        hook.farewell(linger=LINGER_S)
