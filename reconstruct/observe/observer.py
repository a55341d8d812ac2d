"""Looking without a job: which groups, links and collectives a mirror shows, and what it loses.

    spans -> Rendezvous -> groups known from their own traffic
          -> WatchedDecoder -> messages -> Collective -> sizes, coverage, loss
          -> per stream: bytes, holes, what it was taken for

Sans-IO: blocks and a clock in, `report` and `finished` out. Python runs per connection, per message and per
collective, never per packet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numba import njit

from mirror.block import Block, pack
from mirror.flows import Flows
from mirror.spans import CLOSE, DATA, HOLE, OPEN, Spans
from mirror.tcp import TcpReassembler
from mirror.vantage import Vantage
from reconstruct.decoder import IGNORE, LENGTHS, LinkLost, Plan, Request
from reconstruct.gloo import schedule
from reconstruct.gloo.events import Group
from reconstruct.gloo.framing import PREAMBLE_BYTES, search
from reconstruct.gloo.watch import GLOO, OTHER, RENDEZVOUS, TLS, UNKNOWN, GlooFlow, WatchedDecoder
from reconstruct.observe.collective import Link
from reconstruct.observe.group import Finished, LinkSeen, ObservedGroup
from reconstruct.observe.rendezvous import Rendezvous

__all__ = ["Finished", "Observer"]

_LOOK_BYTES = 4 << 20
"""How far into a stream joined in the middle gloo's preambles are looked for."""
_ENOUGH = 2
_MOST_STRANGERS = 64
_MOST_GROUPS = 256


@dataclass(frozen=True, slots=True)
class Stranger:
    """A gloo stream of no known group. joined: from the middle."""

    source: str
    destination: str
    hello: int | None
    messages: int
    max_tag: int
    joined: bool


@dataclass(slots=True)
class _Stream:
    """A stream that is or looks like gloo's."""

    source: str
    destination: str
    tls: bool
    joined: bool


@njit(cache=True, nogil=True)
def _look(n: int, flow: np.ndarray, kind: np.ndarray, addr: np.ndarray, length: np.ndarray, status: np.ndarray,
          budget: np.ndarray, hits: np.ndarray) -> None:
    """Count preambles in spans of flows that were joined in the middle, `budget` bytes of each at most."""
    for i in range(n):
        f = flow[i]
        if kind[i] != DATA or budget[f] <= 0 or status[f] != OTHER:
            continue
        budget[f] -= length[i]
        at = np.int64(0)
        while hits[f] < _ENOUGH:
            found = search(addr[i] + at, length[i] - at)
            if found < 0:
                break
            hits[f] += 1
            at += found + PREAMBLE_BYTES


def _cut(spans: Spans, first: int, last: int) -> Spans:
    """Spans first..last-1, as views."""
    part = slice(first, last)
    return Spans(
        spans.flow[part], spans.kind[part], spans.offset[part], spans.addr[part], spans.length[part], spans.ts[part],
        spans.why[part], last - first,
    )  # fmt: skip


class Observer:
    """Watches frames. flows: most directions of connections known at once; reorder_bytes, vantage: see
    `TcpReassembler`."""

    def __init__(self, flows: int = 1 << 16, reorder_bytes: int = 64 << 20, vantage: Vantage | None = None) -> None:
        self.flows = Flows(flows)
        self.groups: dict[str, ObservedGroup] = {}
        self.finished: list[Finished] = []
        self.problems: deque[str] = deque(maxlen=8)
        self._tcp = TcpReassembler(self.flows, reorder_bytes=reorder_bytes, vantage=vantage)
        self._rendezvous = Rendezvous(self.flows, self._tcp.segments.vantage)
        self._decoder = WatchedDecoder(self.flows)
        self._decoder.planner = self._plan
        self._data = np.zeros(flows, np.int64)
        self._holes = np.zeros(flows, np.int64)
        self._met = np.zeros(flows, bool)
        self._budget = np.zeros(flows, np.int64)
        self._hits = np.zeros(flows, np.int8)
        self._streams: dict[int, _Stream] = {}
        self._strangers: list[Stranger] = []
        self._ended = {"strangers": 0, "tls": 0, "rendezvous": 0, "other": 0, "other_bytes": 0}

    # Feeding

    def feed(self, block: Block, now: int) -> None:
        """Take one block of frames; it may be released when this returns."""
        self._take(self._tcp.feed(block, now), now)

    def expire(self, now: int) -> None:
        """Let gaps that will not be filled any more become holes."""
        self._take(self._tcp.expire(now), now)

    def flush(self, now: int) -> None:
        """The input has ended: every gap is a hole, every collective as it is."""
        self._take(self._tcp.flush(now), now)
        for view in self.groups.values():
            self.finished += view.close_all()

    def take_finished(self) -> list[Finished]:
        """Collectives that are over since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def warm_up(self) -> None:
        """Compile every kernel before the first frame arrives."""
        nothing = np.zeros(0, np.int64)
        other = Observer(64, 1 << 20)
        other.feed(pack([], 0), 0)
        other.flush(0)
        other._watch(_cut(other._tcp.expire(0), 0, 0), 0)
        schedule.infer_size(nothing, 4, 2, 0)

    def _take(self, spans: Spans, now: int) -> None:
        """What a stream was is asked at its end, before the decoder learns of that: so batches are cut there."""
        kind = spans.kind[: spans.n]
        at = 0
        for cut in np.flatnonzero((kind == OPEN) | (kind == CLOSE)).tolist():
            if cut > at:
                self._watch(_cut(spans, at, cut), now)
                at = cut
            self._stream_over(int(spans.flow[cut]))
            if kind[cut] == OPEN and spans.length[cut] == 0:
                self._budget[spans.flow[cut]] = _LOOK_BYTES
        if spans.n > at:
            self._watch(_cut(spans, at, spans.n), now)

    def _watch(self, spans: Spans, now: int) -> None:
        ended, complete = self._rendezvous.learn(spans)
        for name in ended:
            self._end_group(name)
        for group in complete:
            self.add_group(group)
        for event in self._decoder.feed(spans, now):
            if isinstance(event, LinkLost) and event.group in self.groups:
                self.groups[event.group].lost(event)
        for message in self._decoder.messages():
            self.groups[message.group].add(message)
        for view in self.groups.values():
            self.finished += view.close_passed()
        flow, kind, length = spans.flow, spans.kind, spans.length
        np.add.at(self._data, flow[kind == DATA], length[kind == DATA])
        np.add.at(self._holes, flow[kind == HOLE], length[kind == HOLE])
        status = self._decoder.status
        if self._budget.any():
            _look(spans.n, flow, kind, spans.addr, length, status, self._budget, self._hits)
        states = status[flow]
        new = ((states == GLOO) | (states == TLS) | (self._hits[flow] >= _ENOUGH)) & ~self._met[flow]
        for number in set(flow[new].tolist()):
            self._met[number] = True
            joined = int(self._hits[number]) >= _ENOUGH
            source, destination = (_text(end(number)) for end in (self.flows.endpoint_src, self.flows.endpoint_dst))
            self._streams[number] = _Stream(source, destination, status[number] == TLS, joined)

    def _plan(self, request: Request) -> Plan:
        view = self.groups.get(request.group)
        if view is None:
            return IGNORE
        if request.kind == 0:
            # Point to point: slots are the user's, any number of them, so following them could crowd out collectives.
            view.point_to_point(request)
            return IGNORE
        view.begin(request)
        # The decoder remembers a bounded number of collectives per link: give it back those that are over.
        below = view.retire_below()
        if below is not None:
            self._decoder.retire(request.group, below)
        return LENGTHS

    # Groups and streams

    def add_group(self, group: Group) -> None:
        """Follow a group, or one that is followed already with one more context. Those of a rendezvous on the wire are
        added without this."""
        known = self.groups.get(group.name)
        taken = {end for context in group.contexts for end in context.values()}
        for name, view in list(self.groups.items()):
            if view is known and view.live:
                self._decoder.remove_group(name)
            elif (
                view.live
                and view.group.vantage == group.vantage
                and any(end in taken for context in view.group.contexts for end in context.values())
            ):
                self._end_group(name)  # an earlier job: its listeners' ports are used again
        try:
            self._decoder.add_group(group)
        except ValueError as error:
            self.problems.append(f"cannot follow a group: {error}")
            if known is not None:
                known.live = False
            return
        if known is not None:
            known.group, known.live = group, True
            return
        over = [name for name, view in self.groups.items() if not view.live]
        if over and len(self.groups) >= _MOST_GROUPS:
            del self.groups[over[0]]
        self.groups[group.name] = ObservedGroup(group)

    def _end_group(self, name: str) -> None:
        view = self.groups.get(name)
        if view is None or not view.live:
            return
        for flow in list(self._streams):
            facts = self._decoder.gloo_flow(flow)
            if facts is not None and facts.group == name:
                self._account(view.links, flow, facts)
                self._data[flow] = self._holes[flow] = 0
                del self._streams[flow]
        view.coverage = self._decoder.coverage(name)
        self._decoder.remove_group(name)
        view.live = False
        self.finished += view.close_all()

    def _account(self, links: dict[Link, LinkSeen], flow: int, facts: GlooFlow) -> None:
        seen = links.setdefault((facts.sender, facts.receiver), LinkSeen())
        seen.bytes += int(self._data[flow])
        seen.hole_bytes += int(self._holes[flow])

    def _stranger(self, flow: int, stream: _Stream) -> Stranger:
        facts = self._decoder.gloo_flow(flow)
        if facts is None:
            return Stranger(stream.source, stream.destination, None, 0, -1, stream.joined)
        return Stranger(
            stream.source, stream.destination, facts.hello, facts.messages, facts.max_tag, stream.joined
        )  # fmt: skip

    def _is_stranger(self, flow: int, stream: _Stream) -> bool:
        """Not one that was taken for gloo at first and then was no gloo after all."""
        return not stream.tls and (stream.joined or self._decoder.status[flow] == GLOO)

    def _stream_over(self, flow: int) -> None:
        """The flow's stream ends, or another begins under its number."""
        stream = self._streams.pop(flow, None)
        facts = self._decoder.gloo_flow(flow)
        view = self.groups.get(facts.group) if facts is not None and facts.group is not None else None
        if view is not None and facts is not None:
            self._account(view.links, flow, facts)
        elif stream is not None and stream.tls:
            self._ended["tls"] += 1
        elif stream is not None and self._is_stranger(flow, stream):
            self._ended["strangers"] += 1
            if len(self._strangers) < _MOST_STRANGERS:
                self._strangers.append(self._stranger(flow, stream))
        elif self._data[flow]:
            kind = "rendezvous" if self._decoder.status[flow] in RENDEZVOUS else "other"
            self._ended[kind] += 1
            if kind == "other":
                self._ended["other_bytes"] += int(self._data[flow])
        self._data[flow] = self._holes[flow] = self._budget[flow] = self._hits[flow] = 0
        self._met[flow] = False

    # Report

    def report(self) -> dict[str, Any]:
        """Everything seen since the start, JSON-ready; `flowcheck.observation` shows it to people."""
        links = {name: {link: replace(seen) for link, seen in v.links.items()} for name, v in self.groups.items()}
        counts = dict(self._ended)
        strangers = list(self._strangers)
        for flow, stream in self._streams.items():
            facts = self._decoder.gloo_flow(flow)
            if facts is not None and facts.group is not None:
                self._account(links[facts.group], flow, facts)
            elif stream.tls:
                counts["tls"] += 1
            elif self._is_stranger(flow, stream):
                counts["strangers"] += 1
                strangers.append(self._stranger(flow, stream))
        status, active = self._decoder.status, self._data > 0
        active[list(self._streams)] = False
        counts["rendezvous"] += int((np.isin(status, RENDEZVOUS) & active).sum())
        other = np.isin(status, (OTHER, *UNKNOWN)) & active
        counts["other"] += int(other.sum())
        counts["other_bytes"] += int(self._data[other].sum())
        decoder, transport = self._decoder.counters, self._tcp.counters()
        return {
            "groups": [
                view.report(self._decoder.coverage(name) if view.live else view.coverage, links[name])
                for name, view in self.groups.items()
            ],
            "incomplete_groups": [asdict(group) for group in self._rendezvous.incomplete],
            "strangers": [asdict(stranger) for stranger in strangers[:_MOST_STRANGERS]],
            "streams": {**counts, "tls": counts["tls"] + decoder["tls"]},
            "loss": {
                "hole_bytes": transport["hole_bytes"],
                "holes": transport["holes"],
                "truncated_frames": transport["truncated"],
                "framing_lost": decoder["framing_lost"],
                "framing_found": decoder["resynced"],
                "conflicting_copies": transport["conflicts"],
            },
            "frames": {
                "all": transport["frames"],
                "tcp": transport["tcp"],
                "other_ip": transport["other_ip"],
                "non_ip": transport["non_ip"],
                "damaged": transport["malformed"] + transport["cut_header"] + transport["fragments"],
                "unknown_linktype": transport["unknown_linktype"],
                "flow_table_full": transport["flow_table_full"],
            },
            "problems": list(self.problems),
        }


def _text(end: tuple[str, int]) -> str:
    host, port = end
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
