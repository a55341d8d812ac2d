"""The agents in a real two-rank job: what they give, byte for byte, and how daemons come, go and join.

The daemon's place is taken by `Recording` behind the real control server; agent_job.py is the trainers' script.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
import xxhash
from recording import Agent, Piece, Recording, Refusal, wait_for
from test_attach import memory_bytes

from flowcheck.server import Server
from reconstruct.markers import parse_marker

Answer = Piece | Refusal


@dataclass
class Daemon:
    """A control server and what it was told."""

    address: str
    service: Recording = field(default_factory=Recording)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1 << 20)))
    asked: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = Server(self.service, [self.address]).start()
        self.service.tell = self.server.tell

    def agent(self, run: str, rank: int) -> Agent:
        found: Agent = wait_for(lambda: self.service.agent_of(run, rank), 60)
        return found

    def ask(self, run: str, rank: int, *parts: tuple[str, int, int], **changes: Any) -> list[Answer]:
        """Ask the agent of a rank for parts; its answers, in the order of the parts."""
        agent = self.agent(run, rank)
        numbers = [next(self.numbers) for _ in parts]
        self.asked.update(zip(numbers, parts, strict=True))
        asks = [[number, *part] for number, part in zip(numbers, parts, strict=True)]
        fields = {"run": run, "epoch": agent.epoch, "parts": asks, "percent": 10, "step_bytes": 1 << 20, **changes}
        self.server.tell(agent.peer, "repair-ask", **fields)
        found: list[Answer] = wait_for(lambda: self.answers(numbers), 60)
        return found

    def answers(self, numbers: list[int]) -> list[Answer] | None:
        pieces = {piece.number: piece for piece in self.service.pieces if piece.number in numbers}
        refusals = {r.number: r for r in self.service.refusals if r.number in numbers}
        found: dict[int, Answer] = {**refusals, **pieces}
        assert len(found) == len(pieces) + len(refusals)
        return [found[number] for number in numbers] if len(found) == len(numbers) else None


@dataclass
class Run:
    first: Daemon
    second: Daemon
    again: Daemon
    later: Daemon
    ranks: list[dict[str, Any]]
    folder: Path
    notes: dict[str, Any]

    def states(self, name: str, rank: int) -> dict[int, dict[str, torch.Tensor]]:
        found: dict[int, dict[str, torch.Tensor]] = torch.load(self.folder / f"{name}-{rank}.pt", weights_only=True)
        return found


TIED = (
    ("model/conv.weight", 48), ("model/conv.bias", 4), ("model/norm.weight", 4), ("model/norm.bias", 4),
    ("model/embed.weight", 28), ("model/frozen.weight", 16),
)  # fmt: skip
BUFFERS = (("buffer/norm.running_mean", 4), ("buffer/norm.num_batches_tracked", 1), ("buffer/mask", 15))


def drive(first: Daemon, second: Daemon, folder: Path, notes: dict[str, Any]) -> None:
    """Play the daemons' part through all scenarios."""
    # repair
    every = [part for key, numel in TIED for part in ((key, 0, numel), (key, 1, numel - 1), (key, numel - 1, numel))]
    notes["every"] = [first.ask("repair", rank, *every) for rank in (0, 1)]
    notes["buffers"] = [first.ask("repair", rank, *((key, 0, n) for key, n in BUFFERS)) for rank in (0, 1)]
    bad = [
        ("model/gone", 0, 1), ("../../etc/passwd", 0, 1), ("optimizer/conv.weight/exp_avg", 0, 1),
        ("model/head.weight", 0, 1), ("model/conv.bias", 0, 5), ("model/conv.bias", 2, 2), ("model/conv.bias", 3, 1),
        ("model/conv.bias", 0, 1 << 61), ("buffer/empty", 0, 1), ("", 0, 1),
    ]  # fmt: skip
    notes["absurd"] = first.ask("repair", 0, *bad)
    # None of these is for this agent: nothing comes of them, and it stays.
    agent = first.agent("repair", 1)
    elsewhere = {"parts": [[1 << 30, "model/conv.bias", 0, 4]], "percent": 10, "step_bytes": 1 << 20, "epoch": 1}
    first.server.tell(agent.peer, "repair-ask", run="other", **elsewhere)
    first.server.tell(agent.peer, "repair-ask", **{**elsewhere, "run": "repair", "percent": 11})
    first.server.tell(agent.peer, "repair-ask", **{**elsewhere, "run": "repair", "parts": [[0, "x", 0, 1]] * 257})
    first.server.tell(agent.peer, "groups-ask", run="repair", epoch=1)
    first.server.tell(agent.peer, "join-ask", run="repair")
    first.server.tell(agent.peer, "pong", version="")
    notes["after"] = first.ask("repair", 1, ("model/conv.bias", 0, 4))
    for rank in (0, 1):
        first.server.tell(first.agent("repair", rank).peer, "compare-ask", run="repair", epoch=1, ask=7)
    wait_for(lambda: len(first.service.compared) == 2, 60)
    seen = len(first.service.markers)
    first.server.tell(first.agent("repair", 0).peer, "groups-ask", run="repair", epoch=1)
    wait_for(lambda: any(marker["groups"] for _, _, marker in first.service.markers[seen:]), 60)
    (folder / "other-strides").touch()
    wait_for(lambda: isinstance(first.ask("repair", 0, ("model/conv.weight", 0, 48))[0], Refusal), 60)
    notes["other"] = first.ask("repair", 0, ("model/conv.weight", 0, 48), ("model/embed.weight", 0, 28))
    wait_for(lambda: compared_again(first), 60)
    (folder / "repair").touch()
    # plain
    notes["plain"] = first.ask("plain", 1, ("model/0.weight", 5, 48))
    (folder / "plain").touch()
    # joined: the second daemon, then the first one again
    unknown = wait_for(lambda: [a for a in list(second.service.agents.values()) if a.rank == 0], 60)[0]
    notes["stranger"] = unknown
    second.server.tell(unknown.peer, "join-ask", run="joined")
    second.agent("joined", 1)
    wait_for(lambda: len(second.service.markers) > 20, 60)
    notes["second"] = [second.ask("joined", rank, ("model/2.weight", 0, 24)) for rank in (0, 1)]
    first.server.close()
    first.server.close()
    notes["again"] = again = Daemon(first.server.endpoints[0])
    orphan = wait_for(lambda: [a for a in list(again.service.agents.values()) if a.rank == 0], 60)[0]
    notes["orphan"] = orphan
    again.server.tell(orphan.peer, "join-ask", run="joined")
    again.agent("joined", 1)
    wait_for(lambda: len(again.service.markers_of("joined")) > 20, 60)
    notes["rejoined"] = [again.ask("joined", rank, ("model/2.weight", 0, 24)) for rank in (0, 1)]
    (folder / "joined").touch()
    # unreachable
    wait_for((folder / "warned").exists, 60)
    notes["later"] = later = Daemon(notes["nowhere"])
    early = wait_for(lambda: [a for a in list(later.service.agents.values()) if a.rank == 0], 60)[0]
    later.server.tell(early.peer, "join-ask", run="unreachable")
    notes["reached"] = later.ask("unreachable", 1, ("model/0.weight", 0, 48))
    wait_for(lambda: later.service.markers, 60)
    (folder / "unreachable").touch()


def compared_again(daemon: Daemon) -> bool:
    """Ask until the trainer has rested from the comparison before."""
    number = next(daemon.numbers)
    daemon.server.tell(daemon.agent("repair", 0).peer, "compare-ask", run="repair", epoch=1, ask=number)
    service = daemon.service
    wait_for(lambda: len(service.compared) == 3 or any(r.number == number for r in service.refusals), 60)
    return len(service.compared) == 3


@contextmanager
def played(*args: Any) -> Iterator[Callable[[], None]]:
    """`drive` on a thread; what is yielded raises its failure."""
    failed: list[BaseException] = []

    def play() -> None:
        try:
            drive(*args)
        except BaseException as error:
            failed.append(error)

    def check() -> None:
        if failed:
            raise failed[0]

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    yield check
    thread.join(30)
    check()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("agents")
    first, second = (Daemon("tcp://127.0.0.1:0") for _ in range(2))
    nowhere = f"tcp://127.0.0.1:{two_ranks.free_port()}"
    notes: dict[str, Any] = {"nowhere": nowhere}
    endpoint = "+".join([first.server.endpoints[0], second.server.endpoints[0], nowhere])
    scenarios = ("repair", "plain", "joined", "unreachable")
    try:
        with played(first, second, folder, notes) as check:
            ranks = two_ranks.run("agent_job.py", folder, endpoint, scenarios, {"GLOO_SOCKET_IFNAME": "lo"}, check)
        yield Run(first, second, notes["again"], notes["later"], ranks, folder, notes)
    finally:
        for daemon in (first, second, *(d for d in notes.values() if isinstance(d, Daemon))):
            daemon.server.close()


def sections_of(state: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    """What belongs to a part's key, by section."""
    kind, _, name = key.partition("/")
    if kind == "buffer":
        return {"buffer": state[key]}
    prefix = f"optimizer/{name}/"
    return {"model": state[key], **{k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}}


def check_piece(answer: Answer, states: dict[int, dict[str, torch.Tensor]], asked: tuple[str, int, int]) -> Piece:
    """A piece must be exactly the elements that were asked for, as they were after its step."""
    assert isinstance(answer, Piece), answer
    key, lo, hi = asked
    assert (answer.key, answer.lo, answer.hi) == asked
    expected = sections_of(states[answer.step], key)
    counter = expected.pop("step", None)
    assert next(iter(answer.sections)) == ("buffer" if key.startswith("buffer/") else "model")
    assert set(answer.sections) == set(expected)
    for name, tensor in expected.items():
        whole, size = memory_bytes(tensor), tensor.element_size()
        assert bytes(answer.sections[name]) == whole[lo * size : hi * size], (key, name)
    assert answer.counter == (None if counter is None else memory_bytes(counter))
    return answer


def test_pieces_are_the_state_after_their_step(run: Run) -> None:
    kinds = set()
    for rank, answers in enumerate(run.notes["every"]):
        states = run.states("repair", rank)
        asked = [run.first.asked[answer.number] for answer in answers]
        for answer, part in zip(answers, asked, strict=True):
            if rank == 1 and part[0] == "model/frozen.weight":
                assert isinstance(answer, Refusal) and "ask rank 0" in answer.reason
                continue
            kinds.add(tuple(check_piece(answer, states, part).sections))
    assert kinds == {("model", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("model",)}


def test_buffers_come_from_rank_0(run: Run) -> None:
    states = run.states("repair", 0)
    for answer in run.notes["buffers"][0]:
        check_piece(answer, states, run.first.asked[answer.number])
    assert all(isinstance(answer, Refusal) and "ask rank 0" in answer.reason for answer in run.notes["buffers"][1])


def test_replaced_state_is_looked_up_at_every_step(run: Run) -> None:
    """The scenario replaces all state tensors at every seventh step; stale ones would have stayed behind."""
    pieces = [piece for piece in run.first.service.pieces if piece.run == "repair"]
    assert max(piece.step for piece in pieces) > 14
    states = {rank: run.states("repair", rank) for rank in (0, 1)}
    for piece in pieces:
        check_piece(piece, states[piece.rank], run.first.asked[piece.number])


def test_state_in_another_order_is_refused_and_only_that(run: Run) -> None:
    refused, given = run.notes["other"]
    assert isinstance(refused, Refusal)
    assert "exp_avg of conv.weight" in refused.reason and "do not lie in one order" in refused.reason
    check_piece(given, run.states("repair", 0), run.first.asked[given.number])


def test_a_parameter_without_state_is_its_values_alone(run: Run) -> None:
    (answer,) = run.notes["plain"]
    piece = check_piece(answer, run.states("plain", 1), run.first.asked[answer.number])
    assert (list(piece.sections), piece.counter) == (["model"], None)


def test_absurd_asks_are_refused_or_counted(run: Run) -> None:
    reasons = [answer.reason for answer in run.notes["absurd"]]
    assert ["no parameter or buffer" in reason for reason in reasons] == [*[True] * 4, *[False] * 5, True]
    assert all("elements, no range" in reason for reason in reasons[4:9])
    assert isinstance(run.notes["after"][0], Piece)
    (counters,) = run.ranks[1]["repair"]["counters"].values()
    assert counters["absurd"] == 6
    assert (counters["dropped"], counters["sent"] > 20) == (0, True)
    assert 1 << 30 not in {piece.number for piece in run.first.service.pieces}


def test_checksums_of_everything_at_one_step(run: Run) -> None:
    compared = {rank: (step, found) for rank, step, found in run.first.service.compared[:2]}
    assert set(compared) == {0, 1}
    for rank, (step, found) in compared.items():
        state = {k: v for k, v in run.states("repair", rank)[step].items() if not k.startswith("buffer/")}
        assert found == {key: xxhash.xxh3_128_hexdigest(memory_bytes(tensor)) for key, tensor in state.items()}
    rank, step, found = run.first.service.compared[2]
    assert [key for key, value in found.items() if value is None] == ["optimizer/conv.weight/exp_avg"]


def test_the_fields_are_repeated_when_asked_for(run: Run) -> None:
    """In the next marker and in no other: they do not change in this scenario."""
    markers = [parse_marker(marker) for marker in run.first.service.markers_of("repair")]
    (carrying,) = [marker for marker in markers if marker.groups is not None]
    assert carrying.version == 0
    assert dict(carrying.groups[0])["lr"] == 0.01


# Daemons that come later


def check_join(daemon: Daemon, run: Run, name: str) -> Any:
    """A late attach is as an attach between two steps would have been; markers go on from there without a gap."""
    upload = daemon.service.of(name)
    description = upload.description
    assert upload.late
    assert not any(any(data) for data in upload.tensors.values())
    # What an earlier epoch's connection still held lies before the description: nobody can take it for the new one's.
    steps = [marker["step"] for marker in daemon.service.markers_of(name) if marker["step"] > description.step]
    assert steps == list(range(description.step + 1, steps[-1] + 1))
    assert daemon.service.layouts == []
    return description


@pytest.mark.parametrize("which", ["second", "again"])
def test_a_daemon_that_joins_late(run: Run, which: str) -> None:
    daemon = getattr(run, which)
    description = check_join(daemon, run, "joined")
    facts = {int(step): fact for step, fact in run.ranks[0]["joined"]["facts"].items()}
    now, rate = facts[description.step], facts[description.step + 1]["rate"]
    assert description.group.sequence == now["sequence"]
    assert description.optimizer.groups[0].fields["lr"] == rate
    assert description.scheduler is not None
    assert description.scheduler["state"]["last_epoch"] == now["epoch"]
    rebuilt = tuple(int(i) for i in run.ranks[0]["joined"]["rebuilt"].split())
    assert (description.ddp.rebuilt_buckets, description.ddp.layout_pending) == ((rebuilt,), False)
    assert set(description.optimizer.state["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    fields, version = [dict(group.fields) for group in description.optimizer.groups], 0
    for marker in map(parse_marker, daemon.service.markers_of("joined")):
        if marker.step <= description.step:
            continue
        if marker.groups is not None:
            fields, version = [dict(group) for group in marker.groups], version + 1
        assert (marker.version, marker.problem) == (version, None)
        assert fields[0]["lr"] == facts[marker.step]["rate"]
        assert marker.sequence == facts[marker.step]["sequence"]


def test_the_agents_of_every_rank_find_the_epoch_of_a_late_daemon(run: Run) -> None:
    assert run.notes["stranger"].epoch is None  # whatever epoch another daemon has given
    assert run.notes["orphan"].epoch is None
    for daemon, name in ((run.second, "second"), (run.again, "rejoined")):
        for rank, (answer,) in enumerate(run.notes[name]):
            check_piece(answer, run.states("joined", rank), daemon.asked[answer.number])


def test_the_training_never_waits_for_them(run: Run) -> None:
    for rank in run.ranks:
        assert rank["joined"]["slowest"] < 0.5
        assert rank["joined"]["dropped"] == 0


def test_a_daemon_that_comes_up_after_the_attach(run: Run) -> None:
    for number, rank in enumerate(run.ranks):
        seen = rank["unreachable"]
        assert "no answer from" in seen["reason"]
        assert len(seen["warnings"]) == (1 if number == 0 else 0)
        assert seen["hooks"] == 0
    description = check_join(run.later, run, "unreachable")
    assert description.step >= 1
    assert set(description.optimizer.state["0.weight"]) == {"momentum_buffer"}
    (answer,) = run.notes["reached"]
    check_piece(answer, run.states("unreachable", 1), run.later.asked[answer.number])


def test_agents_leave(run: Run) -> None:
    wait_for(lambda: not any(daemon.service.agents for daemon in (run.second, run.again, run.later)))
    assert len(run.later.service.gone) >= 2
