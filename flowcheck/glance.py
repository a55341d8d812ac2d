"""What is stored, for `status` while no job is attached. A disk that hangs holds no status up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from threading import Thread
from typing import Any

from flowcheck.handout import stored_status
from flowcheck.store import Store

WAIT_SECONDS = 0.2
"""How long a status waits for the disk."""


class Glance:
    """Looks at a store on a thread of its own, one look at a time. store: None without `--store`."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._look: Future[dict[str, Any]] | None = None
        self._begun = 0.0
        self._seen: dict[str, Any] = stored_status(None, {})

    def status(self, ahead: Mapping[str, int]) -> dict[str, Any]:
        """`stored_status` as of now, or as of the last look that came to an end while the disk does not answer."""
        if self._store is None:
            return self._seen
        if self._look is None:
            self._look, self._begun = Future(), time.monotonic()
            Thread(target=self._run, args=(self._look, self._store, dict(ahead)), name="glance", daemon=True).start()
        try:
            self._seen = self._look.result(WAIT_SECONDS)
            self._look = None
        except NotYet:
            pass
        except Exception:
            self._look = None
            raise
        return self._seen

    @staticmethod
    def _run(look: Future[dict[str, Any]], store: Store, ahead: Mapping[str, int]) -> None:
        try:
            look.set_result(stored_status(store, ahead))
        except Exception as error:
            look.set_exception(error)

    @property
    def disk(self) -> list[dict[str, Any]]:
        """What a status says of the disk: an entry as of `LineFile.status` while it does not answer."""
        if self._store is None or self._look is None:
            return []
        problem = f"the disk does not answer for {time.monotonic() - self._begun:.0f} s"
        return [{"name": f"the store {self._store.root}", "waiting": 1, "missing": 0, "problem": problem}]
