"""Seeding: state that an attach names instead of sending it, read from a checkpoint, proven by the trainer's checksums.

Rank 0 tells a path and the checksum of every tensor that it holds. A thread of its own reads the checkpoint; a tensor
whose bytes have the trainer's checksum is loaded into the shadow, all others are still to be uploaded. A disk may be
slow or hang: when the time is over the thread is left to itself, and nothing that it reads from then on is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import xxhash

from flowcheck.checkpoints import Checkpoint, Roots, opened
from flowcheck.description import JobDescription
from flowcheck.durable import Aborted, Meter
from flowcheck.protocol import SUM_BYTES, checkpoint_seconds
from flowcheck.service import Seeded
from flowcheck.tensorfile import CHUNK

__all__ = ["Seeding"]

Load = Callable[[str, int, np.ndarray], None]
"""Takes bytes of a tensor by key, at an offset: `reconstruct.shadow.Shadow.load`."""


class Seeding:
    """Reads one checkpoint for one attach; `found` comes true when that is over, one way or another.

    checksums: of every tensor in the description's order, `SUM_BYTES` each; turn: held while a checkpoint is read, one
    at a time per daemon; report: called with one line for a person.
    """

    def __init__(
        self,
        path: str,
        checksums: bytes,
        description: JobDescription,
        load: Load,
        roots: Roots,
        turn: threading.Lock,
        report: Callable[[str], None],
    ) -> None:
        self.found: Future[Seeded] = Future()
        self._path = Path(path)
        self._tensors = list(description.tensors())
        self._sums = [checksums[at : at + SUM_BYTES] for at in range(0, len(checksums), SUM_BYTES)]
        self._description = description
        self._load = load
        self._roots = roots
        self._turn = turn
        self._report = report
        self._missing = [True] * len(self._tensors)
        self._over = False
        self._lock = threading.Lock()  # nothing is loaded once `_over` is true

    def start(self) -> Seeding:
        if not self._turn.acquire(blocking=False):
            self.stop("another checkpoint is being read here, or its disk hangs")
            return self
        limit = checkpoint_seconds(sum(spec.nbytes for _, spec in self._tensors))
        timer = threading.Timer(limit, self.stop, (f"it could not be read within {limit:.0f} s",))
        timer.daemon = True
        threading.Thread(target=self._read, args=(timer,), name="flowcheck-checkpoint", daemon=True).start()
        timer.start()
        return self

    def stop(self, problem: str) -> None:
        """Take nothing more. From any thread; a second call does nothing."""
        self._end(problem)

    def _read(self, timer: threading.Timer) -> None:
        problem = None
        try:
            with opened(self._path, self._roots, self._description) as checkpoint:
                problem = self._take_all(checkpoint)
        except Exception as error:  # whatever a file may lead to, the upload goes on
            problem = str(error) or type(error).__name__
        finally:
            self._turn.release()
            timer.cancel()
            self._end(problem)

    def _take_all(self, checkpoint: Checkpoint) -> str | None:
        """Load what fits; what does not, for a person."""
        meter = Meter(sum(spec.nbytes for _, spec in self._tensors), should_stop=lambda: self._over)
        differing, absent = [], []
        for number, (key, spec) in enumerate(self._tensors):
            meter.advance(0)
            data = checkpoint.load(key, spec, meter)
            if data is None:
                absent.append(key)
            elif _checksum(data) != self._sums[number]:
                differing.append(key)
            else:
                self._take(number, key, data)
        parts = [("differ", differing), ("are not there with this dtype and shape", absent)]
        return "; ".join(f"{len(keys)} tensors {how}, the first is {keys[0]}" for how, keys in parts if keys) or None

    def _take(self, number: int, key: str, data: np.ndarray) -> None:
        for start in range(0, data.nbytes, CHUNK):
            with self._lock:
                if self._over:
                    raise Aborted("the attach went on without the checkpoint")
                self._load(key, start, data[start : start + CHUNK])
        with self._lock:
            self._missing[number] = False

    def _end(self, problem: str | None) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            pairs = zip(self._tensors, self._missing, strict=True)
            taken = [spec.nbytes for (_, spec), missing in pairs if not missing]
            told = f"{len(taken)} of {len(self._tensors)} tensors, {sum(taken)} bytes, are taken from {self._path}"
            self._report(told if problem is None else f"{told}: {problem}; the trainer uploads the others")
            self.found.set_result(Seeded(self._missing, problem))


def _checksum(data: np.ndarray) -> bytes:
    """xxh3_128 as the trainer takes it; in pieces, as other threads wait meanwhile."""
    whole = xxhash.xxh3_128()
    for start in range(0, data.nbytes, CHUNK):
        whole.update(data[start : start + CHUNK].data)
    return whole.digest()
