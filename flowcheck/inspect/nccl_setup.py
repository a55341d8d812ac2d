"""What NCCL's set-up traffic tells of the connections of a capture: release, communicators, which queue pair is what.

Where the set-up was not captured, the connections of a job's communicator are found by trying: queue pairs of two
ranks rise in the order of their channels, and the lengths of messages tell the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, permutations, product

from flowcheck.errors import UsageError
from flowcheck.inspect.nccl_flows import Connection, Flow
from flowcheck.inspect.nccl_sockets import SocketSeen
from reconstruct.nccl.bootstrap import Endpoint, Member, NetConnection
from reconstruct.nccl.group import Edge, NcclGroup, edges
from reconstruct.nccl.setup import named
from reconstruct.nccl.versions import Version, traits

__all__ = ["assignments", "bind", "cut_alike", "with_sockets"]

_MOST_ASSIGNMENTS = 48


def cut_alike(versions: Sequence[Version], nvls: bool) -> bool:
    """Whether all of them cut collectives into messages alike; those over NVLSTree only where `nvls` says so."""
    facts = set()
    for version in versions:
        of = traits(version)
        chunks = (of.nvls_chunk, of.nvls_chunk_4) if nvls else ()
        facts.add((of.scheme, of.minimum_traffic, of.cell_rule, of.ll_traffic, *chunks))
    return len(facts) == 1


# Connections


def bind(group: NcclGroup, member: Member, found: Sequence[Connection]) -> dict[Edge, Connection]:
    """The connections of a communicator, by the queue pairs that its set-up named.

    Raises UsageError where the set-up and the entries on the wire name different senders.
    """
    known = named(group, member)
    result = {}
    for edge, told in known.items():
        for seen in found:
            same = told.receiver_qps[0] in seen.pairs and bool(told.sender_qps) != seen.over_tcp
            if same and seen.ends == (told.sender_gid, told.receiver_gid):
                if seen.sender_rank not in (-1, edge.sender):
                    raise UsageError(
                        f"queue pair 0x{told.receiver_qps[0]:x}: the set-up in the capture says that rank "
                        f"{edge.sender} sends to it, the CTS entries say rank {seen.sender_rank}: the capture mixes "
                        "several jobs; inspect them one by one"
                    )
                result[edge] = seen
    shown = {one.ends for one in result.values()}
    for edge, told in known.items():
        hosts = told.sender_gid, told.receiver_gid
        if edge not in result and hosts in shown:
            result[edge] = _idle(edge, hosts, told.receiver_qps)
    return result


def _idle(edge: Edge, ends: tuple[str, str], pairs: Sequence[int] = (0,)) -> Connection:
    """A connection that carries nothing, between ports of which everything is mirrored."""
    return Connection([Flow((0, *ends, pair)) for pair in pairs], edge.sender, set(), set())


def with_sockets(member: Member, found: Sequence[SocketSeen]) -> Member:
    """The communicator with its NET/Socket connections, by where they were accepted: as those of NET/IB, with the
    number of the connection for the queue pair."""
    listeners = {one.end: one for one in member.listeners}
    made: dict[tuple[Endpoint, int], list[SocketSeen]] = {}
    for seen in found:
        made.setdefault((seen.made.listener, seen.made.vantage), []).append(seen)
    connections = list(member.connections)
    for (end, _), (seen, *others) in made.items():
        told = listeners.get(end)
        if told is not None and seen.framed and not others:  # several: the port was used again, whose is it?
            connections.append(NetConnection(
                (), end, (), (seen.made.order,), seen.made.source, end[0], 0, 0, told.kind, told.channel, told.sender,
                told.receiver,
            ))  # fmt: skip
    return replace(member, connections=tuple(connections))


def assignments(group: NcclGroup, found: Sequence[Connection]) -> Iterator[dict[Edge, Connection]]:
    """Ways in which connections can be the communicator's: senders by their entries (over TCP by their addresses),
    receivers by their addresses, channels rising with queue pairs. What is between other addresses belongs to none.
    There is no way where it is not known in which order connections were made."""
    home: dict[str, set[int]] = {}  # the ranks that were seen sending from an address
    links: dict[tuple[tuple[int, ...], str], list[Connection]] = {}
    for one in sorted(found, key=lambda one: one.pairs):
        senders = _senders(group, one)
        if senders:
            home.setdefault(one.ends[0], set()).update(senders)
            links.setdefault((senders, one.ends[1]), []).append(one)
    candidates = {}
    for senders, address in links:
        own = [edge for edge in edges(group) if edge.sender in senders and address in group.addresses[edge.receiver]]
        # A rank uses the same adapter both ways, so who sends from an address receives there.
        candidates[senders, address] = [edge for edge in own if edge.receiver in home.get(address, ())] or own
    if any(len(own) > 1 and not all(one.data[0].ordered for one in links[link]) for link, own in candidates.items()):
        return
    exact = [
        {link: [edge for edge in own if any(role(edge) for role in roles)] for link, own in candidates.items()}
        for roles in _USED
    ]
    exact = [chosen for chosen in exact if all(len(chosen[link]) == len(seen) for link, seen in links.items())]
    told: set[frozenset[tuple[Edge, int]]] = set()
    for chosen in exact or [candidates]:
        choices = [
            [list(zip(way, seen, strict=True)) for way in islice(_orders(chosen[link], len(seen)), _MOST_ASSIGNMENTS)]
            for link, seen in links.items() if 0 < len(seen) <= len(chosen[link])
        ]  # fmt: skip
        for way in islice(product(*choices), _MOST_ASSIGNMENTS):
            bound = dict(chain.from_iterable(way))
            key = frozenset((edge, id(one)) for edge, one in bound.items())
            if key not in told and len(bound) == sum(map(len, way)):
                told.add(key)
                yield _with_idle(group, bound)


def _senders(group: NcclGroup, one: Connection) -> tuple[int, ...]:
    """The ranks that can be a connection's sender."""
    ranks = range(group.world_size) if one.sender_rank < 0 else (one.sender_rank,)
    return tuple(rank for rank in ranks if rank < group.world_size and one.ends[0] in group.addresses[rank])


_USED: tuple[tuple[Callable[[Edge], bool], ...], ...] = (
    (lambda edge: edge.ring,), (lambda edge: edge.tree >= 0,), (lambda edge: edge.nvls >= 0,),
    (lambda edge: edge.ring, lambda edge: edge.tree >= 0), (lambda edge: edge.ring, lambda edge: edge.nvls >= 0),
    (lambda edge: True,),
)  # fmt: skip
"""Algorithms that a job may have used until then: if on every link as many connections were seen as one of these sets
has, they are these, in their order."""


def _with_idle(group: NcclGroup, bound: dict[Edge, Connection]) -> dict[Edge, Connection]:
    shown = {one.ends for one in bound.values()}
    for edge in edges(group):
        own, far = group.addresses[edge.sender], group.addresses[edge.receiver]
        if edge not in bound and len(own) == len(far) == 1 and (own[0], far[0]) in shown and not group.sockets:
            bound[edge] = _idle(edge, (own[0], far[0]))
    return bound


def _orders(candidates: Sequence[Edge], number: int) -> Iterator[tuple[Edge, ...]]:
    """Ways to choose `number` connections in the order in which they can have been made: between two ranks by rising
    channel, or the ring's first and then those that only trees use."""
    told: set[tuple[Edge, ...]] = set()
    for key in (lambda edge: (False, edge.channel), lambda edge: (not edge.ring, edge.channel)):
        ordered = sorted(candidates, key=key)
        if len({(edge.sender, edge.receiver) for edge in candidates}) == 1:
            ways: Iterator[tuple[Edge, ...]] = combinations(ordered, number)
        else:
            ways = (
                way for way in permutations(ordered, number)
                if all(
                    ordered.index(a) < ordered.index(b)
                    for a, b in combinations(way, 2) if (a.sender, a.receiver) == (b.sender, b.receiver)
                )
            )  # fmt: skip
        for way in ways:
            if way not in told:
                told.add(way)
                yield way
