"""One outcome for all ranks, agreed through the process group's own store.

A collective would take a tag on the group that is about to be followed, need its device, and hang for the group's
whole timeout when one rank never comes. The store has none of that: every rank leaves its contribution under a key,
rank 0 collects them, decides, and leaves the outcome; every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from flowcheck.errors import FlowcheckError

_rounds: dict[str, int] = {}
"""Attaches so far per group name: the same on every rank, as every rank calls attach."""


class Agreement:
    """One attach on one group. `rank` and `world_size` are the group's."""

    def __init__(self, store: Any, group: str, rank: int, world_size: int) -> None:
        number = _rounds.get(group, 0)
        _rounds[group] = number + 1
        self._store = store
        self._prefix = f"flowcheck/{number}/"
        self._rank = rank
        self._world_size = world_size

    def contribute(self, contribution: dict[str, Any]) -> None:
        """Leave what this rank has to say, JSON-ready."""
        self._store.set(f"{self._prefix}{self._rank}", json.dumps(contribution))

    def collect(self, timeout: float) -> list[dict[str, Any]]:
        """Rank 0: every rank's contribution, by rank. FlowcheckError names the ranks that did not come in time."""
        keys = [f"{self._prefix}{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + timeout
        missing = [key for key in keys if not self._wait(key, deadline)]
        if missing:
            ranks = ", ".join(key.rpartition("/")[2] for key in missing[:8])
            raise FlowcheckError(f"rank {ranks} did not call attach within {timeout:g} s: every rank must")
        found = []
        for key in keys:
            found.append(json.loads(self._store.get(key)))
            with contextlib.suppress(Exception):  # FileStore and others cannot delete
                self._store.delete_key(key)
        return found

    def decide(self, outcome: dict[str, Any]) -> None:
        """Rank 0: leave the outcome."""
        self._store.set(f"{self._prefix}outcome", json.dumps(outcome))

    def outcome(self, timeout: float) -> dict[str, Any]:
        """The other ranks: rank 0's outcome. FlowcheckError if it does not come in time."""
        key = f"{self._prefix}outcome"
        if not self._wait(key, time.monotonic() + timeout):
            raise FlowcheckError(f"rank 0 did not finish its attach within {timeout:g} s")
        result: dict[str, Any] = json.loads(self._store.get(key))
        return result

    def _wait(self, key: str, deadline: float) -> bool:
        """Asks again and again instead of `store.wait`: that one cannot be interrupted from the keyboard."""
        pause = 0.002
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return True
