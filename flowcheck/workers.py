"""Threads for calls that may take long. Unlike those of an executor they never keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from flowcheck.errors import FlowcheckError


class Workers:
    """Runs calls in the order in which they come, on at most `most` threads, which are started as they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._closed = False

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """The future result of `call()`, or what it raises."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                future.set_exception(FlowcheckError("the daemon ends"))
                return future
            self._calls.append((future, call))
            if len(self._calls) > self._free and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._free += 1
                self._changed.wait_for(lambda: self._calls or self._closed)
                self._free -= 1
                if not self._calls:
                    return
                future, call = self._calls.popleft()
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def close(self, patience: float) -> None:
        """Begin no further call; wait at most `patience` seconds for those that are under way."""
        with self._changed:
            self._closed = True
            given_up = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
        for future, _ in given_up:
            future.set_exception(FlowcheckError("the daemon ends"))
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
