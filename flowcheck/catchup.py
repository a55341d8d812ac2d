"""What a URL's copy of a store lacks when a daemon starts: steps of an earlier life, and removals that were not done.

What an uploader has to do is in memory only; a daemon that ends while the remote is slow or away leaves it undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flowcheck import stepfolder
from flowcheck.durable import replace_file
from flowcheck.manifest import MANIFEST, Manifest
from flowcheck.remote import RemotePath
from flowcheck.store import Store
from flowcheck.storereader import StoreReader
from flowcheck.tensorfile import DamagedFile

CLAIMED = ".uploaded"
"""Lies in the local folder of an epoch whose remote folder this store has made."""
WRONG = ".wrong-at-the-url"
"""Lies there while steps have to be removed from the URL; the number of the first of them is in it."""
MOST_STEPS = 256

Place = tuple[str, int, int]
"""Run, epoch, step."""


@dataclass(slots=True)
class Lacking:
    """`steps`: that the URL lacks, or has with another manifest, the one written last first. `wrong`: (run, epoch) ->
    the first step that has to go. `there`: the newest step that both have."""

    steps: list[Place] = field(default_factory=list)
    wrong: dict[tuple[str, int], int] = field(default_factory=dict)
    there: Place | None = None


def lacking(store: Store, remote: StoreReader[RemotePath], keep: int) -> Lacking:
    """Compares the last `keep` whole steps of every run with what is at the URL. Raises what a remote raises.

    Epochs that another store made at the URL and runs that another process writes are left alone, and at most 256 steps
    are named.
    """
    found = Lacking()
    written: dict[Place, int] = {}
    shared: dict[Place, int] = {}
    for run in store.runs():
        if not store.may_write(run):
            continue
        others = foreign(store, run, remote.epochs(run))
        for epoch in store.epochs(run):
            with contextlib.suppress(OSError, ValueError):
                found.wrong[run, epoch] = int((store.epoch_folder(run, epoch) / WRONG).read_text())
        for epoch, step in _last(store, run, keep):
            if epoch <= others and not (store.epoch_folder(run, epoch) / CLAIMED).exists():
                continue
            if step >= found.wrong.get((run, epoch), step + 1):
                continue
            try:
                manifest = Manifest.read(store.step_folder(run, epoch, step) / MANIFEST)
            except DamagedFile:
                continue  # it has just gone
            same = _same(store.step_folder(run, epoch, step), remote.step_folder(run, epoch, step))
            (shared if same else written)[run, epoch, step] = manifest.written_ns
    found.steps = sorted(written, key=lambda place: -written[place])[:MOST_STEPS]
    found.there = max(shared, key=lambda place: shared[place], default=None)
    return found


def foreign(store: Store, run: str, there: Iterable[int]) -> int:
    """The newest of the epochs at the URL that this store did not make, 0 if there is none. An epoch of its own that is
    no longer on this disk counts as another's."""
    return max((n for n in there if not (store.epoch_folder(run, n) / CLAIMED).exists()), default=0)


def _last(store: Store, run: str, keep: int) -> Iterator[tuple[int, int]]:
    """(epoch, step) of the last `keep` whole steps of a run, newest first."""
    count = 0
    for epoch in reversed(store.epochs(run)):
        for step in reversed(store.steps(run, epoch)):
            if count == keep:
                return
            if stepfolder.is_whole(store.step_folder(run, epoch, step)):
                count += 1
                yield epoch, step


def _same(local: Path, remote: RemotePath) -> bool:
    """Whether both folders have the same manifest."""
    there = remote / MANIFEST
    if not there.exists():
        return False
    text = (local / MANIFEST).read_bytes()
    return there.read_at(0, len(text) + 1) == text


def note_wrong(folder: Path, first: int) -> None:
    """Remember, in an epoch's local folder, that steps from `first` on have to go from the URL."""
    with contextlib.suppress(OSError):  # a disk that fails: then a daemon that ends before it is done forgets it
        replace_file(folder / WRONG, b"%d" % first)


def forget_wrong(folder: Path) -> None:
    """They are gone."""
    with contextlib.suppress(OSError):
        (folder / WRONG).unlink(missing_ok=True)
