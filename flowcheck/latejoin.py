"""A daemon joins a job that is training already: rank 0 describes the job as of the end of a step, without its tensors.

For a daemon that was started again, came up after the attach, or is a second checkpoint node. It asks (`join-ask`); the
optimizer's hooks take down what only holds at that moment, which is small, and a thread does the rest while the markers
of the following steps are held (`flowcheck.markerlink`). What the daemon lacks it pulls by repair.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flowcheck.connection import Connection
from flowcheck.describe import Live, group_fields, state_specs
from flowcheck.description import GroupRecord, GroupSpec, JobDescription, OptimizerSpec
from flowcheck.desk import Desk
from flowcheck.errors import FlowcheckError
from flowcheck.layout import POLL_S, LayoutThread, logged_layout
from flowcheck.markerlink import MARKER_QUEUE, MarkerLink
from flowcheck.stephook import StepMarker
from flowcheck.upload import join

PAUSE_S = 5.0
"""After a join that failed, for so long no other is begun."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What holds between step `step` and the next: the collective that comes next (`sequence`), whether DDP has rebuilt
    its buckets, the fields of the param groups and the scheduler before the next step, the state tensors there are."""

    step: int
    sequence: int
    rebuilt: bool
    fields: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    scheduler: dict[str, Any] | None


class LateJoin:
    """Joins of one daemon. live: as described at attach; group: the process group on the network, then.

    wake: called on the training thread once a moment was taken: `advance` is due.
    """

    def __init__(
        self,
        link: MarkerLink,
        marker: StepMarker,
        desk: Desk,
        live: Live,
        group: GroupRecord,
        scheduler: Any,
        run: str,
        job: str,
    ) -> None:
        self.reason = ""
        """Why the last join failed."""
        self.wake: Callable[[], None] = lambda: None
        self._link = link
        self._marker = marker
        self._desk = desk
        self._live = dataclasses.replace(live, tensors={})  # those of the attach may be others by now
        self._group = group
        # Weakly: a scheduler holds the optimizer, whose end ends all of this.
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._run, self._job = run, job
        self._joining = False
        self._paused_until = 0.0
        self._moment: tuple[Moment, Connection | None] | None = None
        self._layout: LayoutThread | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    # The agent's thread

    def ask(self) -> bool:
        """The daemon wants to join; whether that is begun now."""
        if self._joining or time.monotonic() < self._paused_until:
            return False
        self._joining = self._desk.later(self._note)
        return self._joining

    def repeat_groups(self) -> None:
        """The daemon lacks the param groups' fields: the next marker carries them."""
        self._desk.later(lambda _: setattr(self._link, "unsent", True))

    def advance(self) -> None:
        """Start the conversation once the moment was taken."""
        taken, self._moment = self._moment, None
        if taken is not None:
            self._thread = threading.Thread(target=self._converse, args=taken, name="flowcheck-join", daemon=True)
            self._thread.start()

    def watch_layout(self, run: str, epoch: int) -> None:
        """Send the rebuilt layout when there is one."""
        self._layout = LayoutThread(self._link.endpoint, run, epoch, self._live.model).start()

    def stop(self, timeout: float) -> None:
        """End what is under way; waits at most `timeout` seconds for the layout to leave."""
        self._stopped.set()
        if self._layout is not None:
            self._layout.stop(timeout)

    # The training thread

    def _note(self, optimizer: Any) -> None:
        """After a step: note its number and what comes next on the wire. The rest is read before the next step, when
        the scheduler has been stepped too."""
        step, sequence = self._marker.step, self._marker.sequence
        rebuilt = bool(self._live.model._has_rebuilt_buckets)

        def before_next(optimizer: Any, args: Any, kwargs: Any) -> None:
            remover.remove()
            if bool(self._live.model._has_rebuilt_buckets) != rebuilt and self._desk.later(self._note):
                return  # what was noted is of another layout
            try:
                moment = self._take(optimizer, step, sequence, rebuilt)
            except Exception as error:
                self._fail(error)
                return
            self._moment = moment, self._link.hold(self._marker.version)
            self.wake()

        remover = optimizer.register_step_pre_hook(before_next)

    def _take(self, optimizer: Any, step: int, sequence: int, rebuilt: bool) -> Moment:
        from reconstruct.lr import scheduler_state

        specs = self._live.parameter_specs
        scheduler = None if self._scheduler is None else self._scheduler()
        return Moment(
            step,
            sequence,
            rebuilt,
            [group_fields(group, f"param group {i}") for i, group in enumerate(optimizer.param_groups)],
            {
                spec.name: dict(optimizer.state.get(parameter, {}))
                for spec, parameter in zip(specs, self._live.parameters, strict=True)
            },
            None if scheduler is None else scheduler_state(scheduler),
        )

    # The thread of one join

    def _converse(self, moment: Moment, old: Connection | None) -> None:
        connection = None
        try:
            if old is not None:
                old.close()
            description = self._describe(moment)
            connection = Connection(self._link.endpoint, send_queue=MARKER_QUEUE, heartbeat=True)
            ack = join(connection, description, self._job)
            run, epoch = str(ack["run"]), int(ack["epoch"])
            if self._stopped.is_set():
                raise FlowcheckError("the job's handle was closed")
            if description.ddp.rebuilt_buckets is None:
                self.watch_layout(run, epoch)
            self._link.settle((connection, run, epoch))
        except Exception as error:
            if connection is not None:
                connection.close()
            self._link.settle(None)
            self._fail(error)
        else:
            self._joining = False

    def _fail(self, error: Exception) -> None:
        self.reason = f"{type(error).__name__}: {error}"
        self._paused_until = time.monotonic() + PAUSE_S
        self._joining = False

    def _describe(self, moment: Moment) -> JobDescription:
        live = self._live
        layout = logged_layout(live.model) if moment.rebuilt else None
        while moment.rebuilt and layout is None:
            if self._stopped.wait(POLL_S):
                raise FlowcheckError("the job's handle was closed")
            layout = logged_layout(live.model)
        ddp = dataclasses.replace(live.ddp, layout_pending=not moment.rebuilt and bool(live.model._lazy_init_ran))
        if layout is not None:
            ddp = dataclasses.replace(ddp, rebuilt_buckets=layout[0], bucket_bytes=layout[1])
        tensors: dict[str, torch.Tensor] = {}
        optimizer = OptimizerSpec(
            live.optimizer.name,
            [
                GroupSpec(group.parameters, fields)
                for group, fields in zip(live.optimizer.groups, moment.fields, strict=True)
            ],
            state_specs(moment.state, tensors),
        )
        now = dataclasses.replace(live, ddp=ddp, optimizer=optimizer)
        group = dataclasses.replace(self._group, sequence=moment.sequence)
        return now.description(self._run, moment.step, group, moment.scheduler)
