"""Process groups from the rendezvous alone: which are complete, which are not, which were replaced.

`observe.tcpstore` reads single records. Here they are kept apart by store (two jobs behind one mirror both call
their group `/default_pg/0`) and by attempt (a job that starts again at the same store registers the same ranks with
other listeners), so a table never mixes ranks of two meshes. And by vantage group: two tenants may have the same
addresses, so a group is looked for only where its rendezvous was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mirror.flows import Flows
from mirror.spans import Spans
from mirror.vantage import Vantage
from reconstruct.gloo.events import Group
from reconstruct.observe.tcpstore import StoreRecord, StoreWatcher, groups

__all__ = ["Incomplete", "Rendezvous", "Table"]

_MOST_TABLES = 1024


class _StoreByServer(StoreWatcher):
    """Puts the store's address before the group's name, as in `10.0.0.1:29500/default_pg/0`, and before that the number
    and name of its vantage group, if it is not that of all interfaces."""

    def __init__(self, flows: Flows, vantage: Vantage) -> None:
        super().__init__(flows)
        self._vantage = vantage

    def _take(self, flow: int, kind: int, offset: int, address: int, length: int) -> list[StoreRecord]:
        found = super()._take(flow, kind, offset, address, length)
        if not found:
            return found
        client = flow if flow in self._conversations else int(self._flows.peer[flow])
        host, port = self._flows.endpoint_dst(client)
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        seen = self._flows.vantage(client)
        where = f"[{seen}: {self._vantage.name(seen)}] " if seen else ""
        return [replace(record, group=where + server + record.group, vantage=seen) for record in found]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A group of which some ranks' records were never seen. world_size: None where no record tells it."""

    name: str
    world_size: int | None
    known: tuple[int, ...]


@dataclass(slots=True)
class Table:
    """The records of one attempt of one group. group: set once every rank of every context seen is known."""

    name: str
    records: dict[tuple[str, int, int], StoreRecord] = field(default_factory=dict)
    group: Group | None = None


class Rendezvous:
    """Watches all flows for rendezvous traffic; `learn` takes spans and returns what they changed."""

    def __init__(self, flows: Flows, vantage: Vantage) -> None:
        self._watcher = _StoreByServer(flows, vantage)
        self._tables: dict[str, Table] = {}  # by store and group: the newest attempt
        self._attempts: dict[str, int] = {}

    def learn(self, spans: Spans) -> tuple[list[str], list[Group]]:
        """(names of groups that a new attempt has ended, groups that are now complete or have grown a context)."""
        ended: list[str] = []
        changed: dict[str, Group] = {}
        for record in self._watcher.feed(spans):
            over, group = self._add(record)
            if over is not None:
                ended.append(over)
                changed.pop(over, None)
            if group is not None:
                changed[group.name] = group
        self._watcher.records.clear()
        return ended, list(changed.values())

    @property
    def incomplete(self) -> list[Incomplete]:
        """Groups whose connections cannot be recognised, because records are missing."""
        result = []
        for table in self._tables.values():
            if table.group is None:
                sizes = {r.world_size for r in table.records.values() if r.world_size is not None}
                known = tuple(sorted({rank for _, _, rank in table.records}))
                result.append(Incomplete(table.name, min(sizes) if len(sizes) == 1 else None, known))
        return result

    def _add(self, record: StoreRecord) -> tuple[str | None, Group | None]:
        table = self._tables.get(record.group)
        if table is None:
            if len(self._tables) >= _MOST_TABLES:
                oldest = next(iter(self._tables))
                del self._tables[oldest]
                self._attempts.pop(oldest, None)
            table = self._tables[record.group] = Table(record.group)
        ended = None
        before = table.records.get((table.name, record.context, record.rank))
        if before is not None and (before.ip, before.port) != (record.ip, record.port):
            ended = table.name if table.group is not None else None
            attempt = self._attempts[record.group] = self._attempts.get(record.group, 1) + 1
            table = self._tables[record.group] = Table(f"{record.group} attempt {attempt}")
        elif before is not None and (before.world_size is not None or record.world_size is None):
            return None, None
        table.records[table.name, record.context, record.rank] = replace(record, group=table.name)
        complete = groups(table.records)
        if not complete or (table.group is not None and complete[0].contexts == table.group.contexts):
            return ended, None
        table.group = complete[0]
        return ended, table.group
