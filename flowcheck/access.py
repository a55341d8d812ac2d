"""Who may connect to the control server, and what for: the authorized clients of a folder of keys.

libzmq asks about every key that a peer proves to have (ZAP, rfc.zeromq.org/spec/27); the answer carries the key, and
libzmq hands it out with every message of that connection (`User-Id`). So rights are looked up for each message, and a
file that is removed, added or changed counts from the next look at the folder on, for connections that stand too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from zmq.utils import z85

from flowcheck import keys
from flowcheck.errors import FlowcheckError, NoPermission
from flowcheck.keys import Client

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
LOOK_S = 1.0
"""How often the folder is looked at."""
TELL_S = 60.0
"""Refusals are told at most so often: who is shut out must not fill a log."""
MAX_CLIENTS = 4096

READING = frozenset({"ping", "status", "fetch-begin", "fetch-read", "fetch-end", "compare"})
"""The messages for which the right to read is enough. Every other one needs the right to write."""


class Access:
    """The keys of one daemon. Raises BadConfig or NoPermission for a folder that cannot be used.

    `pair`: the daemon's own. `refused`: connections of keys that are not known here, and messages for which a key has
    no right; `last`: whose was the last of each.
    """

    def __init__(self, folder: Path) -> None:
        self.pair = keys.read_server(folder)
        self.refused = {"connections": 0, "messages": 0}
        self.last = {"connections": "", "messages": ""}
        self._folder = folder / keys.AUTHORIZED
        self._clients: dict[bytes, Client] = {}
        self._seen: Sequence[object] | None = None
        self._unreadable: FlowcheckError | None = None
        self._changed = False
        self._untold, self._newest = 0, ""
        self._looked = self._told = time.monotonic() - TELL_S
        self._look()
        if self._unreadable is not None:
            raise self._unreadable

    def refresh(self) -> bool:
        """Look at the folder, at most once in `LOOK_S`; whether anybody's rights have changed since the last call."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
            self._tell(now)
        changed, self._changed = self._changed, False
        return changed

    def _look(self) -> None:
        try:
            seen = keys.list_clients(self._folder)
        except FlowcheckError as error:
            if self._unreadable is None:
                log.error("nobody may connect: %s", error)
            self._replace({}, None, error)
            return
        if seen != self._seen:
            self._replace(self._read(seen), seen, None)

    def _read(self, seen: Sequence[tuple[str, ...]]) -> dict[bytes, Client]:
        clients: dict[bytes, Client] = {}
        for name, *_ in seen[:MAX_CLIENTS]:
            try:
                public, client = keys.read_client(self._folder / name)
            except FlowcheckError as error:
                log.warning("not authorized: %s", error)
                continue
            if public not in clients or client.rights == keys.WRITE:  # one key in two files has the rights of both
                clients[public] = client
        return clients

    def _replace(
        self, clients: dict[bytes, Client], seen: Sequence[object] | None, unreadable: FlowcheckError | None
    ) -> None:
        self._changed = self._changed or clients != self._clients
        self._clients, self._seen, self._unreadable = clients, seen, unreadable

    def authenticate(self, request: Sequence[bytes]) -> list[bytes]:
        """The answer to one request of ZAP, from the folder as it is now."""
        version, number, _, address, _, mechanism, *credentials = request
        status, text, user = b"400", b"this key is not authorized", b""
        if mechanism == b"CURVE" and len(credentials) == 1:
            key = z85.encode(credentials[0])
            self._look()
            if key in self._clients:
                status, text, user = b"200", b"OK", key
            elif self._unreadable is not None:  # a temporary failure: the client tries again by itself
                status, text = b"300", b"it is not known now who may connect"
            if not user:
                self._refuse("connections", f"the key {key.decode()} from {address.decode(errors='replace')}")
        return [version, number, status, text, user, b""]

    def may(self, user: str, kind: str) -> bool:
        """Whether the owner of the key `user` may send a message of this type."""
        client = self._clients.get(user.encode())
        return client is not None and (client.rights == keys.WRITE or kind in READING)

    def check(self, user: str, kind: str) -> None:
        """NoPermission unless `may`; counted."""
        if self.may(user, kind):
            return
        client = self._clients.get(user.encode())
        self._refuse("messages", f"{kind} from the key {user if client is None else client.name}")
        if client is None:
            raise NoPermission("this key is not authorized any more: ask the daemon's owner for another")
        raise NoPermission(f"{kind}: the key {client.name} may only read: use one that may write")

    def _refuse(self, what: str, last: str) -> None:
        self.refused[what] += 1
        self._untold += 1
        self.last[what] = self._newest = last

    def _tell(self, now: float) -> None:
        if self._untold and now - self._told >= TELL_S:
            log.warning("refused %d times, last: %s", self._untold, self._newest)
            self._told, self._untold = now, 0
