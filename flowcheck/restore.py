"""`flowcheck restore`: a whole step from a daemon or a store, written in the form that the training script loads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from flowcheck.errors import NothingRestorable
from flowcheck.snapshot import Snapshot

Progress = Callable[[int, int], None]
Step = int | Literal["latest"]


def restore(
    source: str, out: Path, form: str, step: Step, run: str | None, allow_unknown: bool = False
) -> Snapshot:
    """Read step `step` (a number or "latest"), write it to `out` and return it; progress bars on a terminal.

    form: "torch" (one file for torch.load) or "dcp" (a folder for torch.distributed.checkpoint). allow_unknown: take
    the live step of a daemon even if elements of it are unknown; the output and its manifest name them.

    Raises NothingRestorable, VerificationFailed, UsageError (an `out` that is something else) or FlowcheckError.
    """
    from flowcheck import formats

    with _Bar("reading") as bar:
        state = read(source, step, run, bar.update, allow_unknown)
    writer = formats.write_dcp if form == "dcp" else formats.write_torch
    with _Bar("writing") as bar:
        writer(state, out, bar.update)
    return state


def read(
    source: str, step: Step, run: str | None, progress: Progress | None = None, allow_unknown: bool = False
) -> Snapshot:
    """The whole step from a daemon's endpoint, a store folder or its URL. Raises what `restore` does."""
    from flowcheck import client

    if "://" not in source and not Path(source).is_dir():
        raise NothingRestorable(f"{source}: no such folder; give a store folder or an endpoint (tcp://, ipc://)")
    return client.snapshot(source, run, step, progress=progress, allow_unknown=allow_unknown)


class _Bar:
    """A progress bar that appears with the first bytes, and only where a person looks."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes."""
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr)
        self._bar.update(done - self._done)
        self._done = done

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.render_finish()
