"""DDP's rebuilt bucket layout, sent to a daemon once DDP has logged it: some time after the second forward pass."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from flowcheck.connection import Connection
from flowcheck.describe import Buckets, parse_layout
from flowcheck.errors import FlowcheckError

POLL_S = 0.1
TRIES = 20


def logged_layout(model: DistributedDataParallel) -> tuple[Buckets, tuple[int, ...]] | None:
    """The rebuilt layout (buckets, bytes of each), None while DDP has not logged it. For any thread:
    `_get_ddp_logging_data` copies a small map under the reducer's mutex, without the GIL (c10d/logger.cpp)."""
    return parse_layout(model._get_ddp_logging_data()) if model._has_rebuilt_buckets else None


class LayoutThread:
    """Sends the rebuilt bucket layout once DDP has logged it, then ends.

    Until DDP has rebuilt its buckets it reads one attribute every 0.1 s.
    """

    def __init__(self, endpoint: str, run: str, epoch: int, model: DistributedDataParallel) -> None:
        self._endpoint = endpoint
        self._names = {"run": run, "epoch": epoch}
        self._model = weakref.ref(model)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowcheck-layout", daemon=True)

    def start(self) -> LayoutThread:
        self._thread.start()
        return self

    def stop(self, timeout: float) -> None:
        """Have it look once more and end; waits at most `timeout` seconds for that."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(POLL_S)  # and one last look: a short job may be over by now
            model = self._model()
            if model is None:
                return
            found = logged_layout(model)
            del model
            if found is not None:
                self._send({"buckets": found[0], "bucket_bytes": found[1]})
                return

    def _send(self, layout: dict[str, Any]) -> None:
        for attempt in range(TRIES):
            try:
                with Connection(self._endpoint) as connection:
                    connection.request("layout", "layout-ack", 2.0, layout=layout, **self._names)
                return
            except FlowcheckError:  # the wire may show the layout as well, so this is no reason for a warning
                if self._stopped.wait(min(30.0, 0.5 * 2**attempt)):
                    return
