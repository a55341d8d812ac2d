"""What is unknown is asked of the trainers' agents, becomes known bit for bit, and is never handed out before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from repair_node import Node, checksums, wait_for
from shadow_cases import uploads

from flowcheck.errors import NothingRestorable
from flowcheck.report import status_text
from flowcheck.resync import Budget
from reconstruct.digest import state_digest

LOST = {0: [(3, 40)], 3: [(0, 24)]}


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*args: Any, **options: Any) -> Node:
        made.append(Node(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW foreach amsgrad", "Adam fused", "SGD nesterov"])
@pytest.mark.parametrize("model", ["language model", "convolutions"])
def test_lost_elements_become_known_again_while_training_runs(
    node: Callable[..., Node], model: str, optimizer: str
) -> None:
    here = node(model=model, optimizer=optimizer, before=2)
    here.step()
    assert here.digest() == here.digests[3]
    here.step(lost={0: [(3, 40)]}, answers=False)
    assert here.job.shadow.unknown.elements == 37 and here.job.shadow.known_step == 3
    assert here.digest() is None
    here.step(lost={1: [(0, 3)]})
    for _ in range(3):
        here.step()
    assert not here.job.shadow.unknown and here.job.shadow.known_step == 8
    assert here.digest() == here.digests[8]
    status = here.job.status()
    assert status["unknown"] == {"elements": 0, "since": None, "where": []} and status["agents"] == 2
    assert status["repair"]["repaired"] >= 40 and status["repair"]["differences"] == 0
    assert any("37 elements are unknown since step 4" in line for line in here.lines)


def test_a_step_of_which_nothing_is_known_is_fetched_piece_by_piece(node: Callable[..., Node]) -> None:
    here = node(before=1, budget=Budget(step_bytes=1 << 10, scrub_percent=0.0))
    here.step(blank="its marker was lost", answers=False)
    lost = here.job.shadow.unknown.elements
    assert lost == sum(p.numel() for p in here.training_parameters)
    assert here.job.shadow.known_step == 1
    left = [lost]
    while left[-1]:
        ready = here.train()
        for rank in here.ranks:
            rank.answer(1)  # one part a step
        here.apply.step(here.job, ready)
        here.settle()
        left.append(here.job.shadow.unknown.elements)
        assert len(left) < 100
    assert len(left) > 3 and left == sorted(left, reverse=True)
    assert here.digest() == here.digests[here.job.step]
    assert all(fields["step_bytes"] == 1 << 10 for _, fields in here.ranks[0].told)
    assert any("its marker was lost" in line for line in here.lines)


def test_late_join(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(tmp_path, late=True, before=5)
    assert here.job.shadow.known_step is None and here.job.status()["known_step"] is None
    with pytest.raises(NothingRestorable):
        here.jobs.open(None, None)
    here.step()
    here.step()
    assert here.digest() == here.digests[7]
    store = here.store
    assert store is not None
    wait_for(lambda: here.job.persisted)
    held = store.load("test")
    assert state_digest(held.tensors) == here.digests[held.step]
    assert "joined late at step 5" in here.lines[0]


def test_what_is_handed_out_is_fully_known_or_says_what_is_not(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(tmp_path, before=1, every_steps=1)
    here.step()
    here.step(lost=LOST, answers=False)
    here.step(answers=False)
    fetch = here.jobs.open(None, None)
    assert fetch.header["step"] == 2 and fetch.header["unknown"] == {}
    assert any("step 4 is not fully known: 61 elements since step 3" in note for note in fetch.header["notes"])
    fetch.close()
    with pytest.raises(NothingRestorable, match="--allow-unknown"):
        here.jobs.open(None, 4)
    with pytest.raises(NothingRestorable, match="no step 3"):
        here.jobs.open(None, 3)
    for step in (None, 4):
        fetch = here.jobs.open(None, step, True)
        assert fetch.header["step"] == 4
        assert {key: sum(hi - lo for lo, hi, _ in rows) for key, rows in fetch.header["unknown"].items()} == {
            "model/embedding.weight": 37, "model/hidden.weight": 24,
        }  # fmt: skip
        fetch.close()
    assert here.jobs.open(None, 2, True).header["unknown"] == {}
    store = here.store
    assert store is not None
    wait_for(lambda: store.steps("test", 1) == [1, 2])
    text = status_text(here.jobs.status())
    assert "61 elements are unknown since step 3; step 2 is fully known" in text
    assert "embedding.weight[3:40] since step 3" in text
    here.step()
    assert here.jobs.open(None, None).header["step"] == 5


def test_work_is_shared_and_goes_on_without_those_that_do_not_answer(node: Callable[..., Node]) -> None:
    here = node(ranks=3, budget=Budget(step_bytes=1 << 10, scrub_percent=0.0))
    here.step(blank="nothing was seen", answers=False)
    assert all(rank.parts for rank in here.ranks)
    silent, gone, good = here.ranks
    silent.silent = True
    here.jobs.agent_gone(gone.peer)
    gone.parts.clear()
    here.settle()
    for _ in range(100):
        ready = here.train()
        good.answer()
        here.apply.step(here.job, ready)
        here.tick()
        if here.job.shadow.unknown.elements == sum(hi - lo for _, _, lo, hi in silent.parts):
            break
    else:
        pytest.fail("what the agent that is gone owed was asked of nobody else")
    assert here.job.shadow.unknown and not gone.parts
    owed = list(silent.parts)
    here.tick(11)
    assert silent.parts == [] and [n for kind, f in silent.told if kind == "repair-cancel" for n in f["numbers"]]
    assert {part[1:] for part in owed} <= {part[1:] for part in good.parts}
    here.step()
    assert here.digest() == here.digests[here.job.step]


def test_a_part_that_is_refused_is_asked_again(node: Callable[..., Node]) -> None:
    here = node(ranks=1, budget=Budget(scrub_percent=0.0))
    here.step(lost=LOST, answers=False)
    (rank,) = here.ranks
    asked, rank.parts = rank.parts, []
    for number, *_ in asked:
        here.jobs.repair_refused(rank.peer, "test", 1, number, "not now")
        here.jobs.repair_refused(b"somebody else", "test", 1, number, "nonsense")
    here.settle()
    assert not rank.parts  # not at once: it would only be refused again
    here.tick(1.1)
    assert {part[1:] for part in rank.parts} == {part[1:] for part in asked}
    assert not {part[0] for part in rank.parts} & {part[0] for part in asked}
    here.step()
    assert here.digest() == here.digests[2]


def test_what_one_rank_refuses_is_asked_of_another_at_once(node: Callable[..., Node]) -> None:
    here = node(ranks=2, budget=Budget(scrub_percent=0.0))
    here.step(lost=LOST, answers=False)
    refusing = next(rank for rank in here.ranks if rank.parts)
    (other,) = (rank for rank in here.ranks if rank is not refusing)
    asked, refusing.parts = refusing.parts, []
    for number, *_ in asked:
        here.jobs.repair_refused(refusing.peer, "test", 1, number, "not now")
    here.settle()
    assert {part[1:] for part in asked} <= {part[1:] for part in other.parts} and not refusing.parts
    here.step()
    assert here.digest() == here.digests[2]


def test_what_was_not_asked_for_is_dropped(node: Callable[..., Node]) -> None:
    here = node()
    here.step(lost=LOST, answers=False)
    (first, other) = here.ranks
    number, key, lo, hi = next(part for part in first.parts if part[1] == "model/hidden.weight")
    bad = {name: memoryview(bytes(4 * (hi - lo))) for name in ("model", "exp_avg", "exp_avg_sq")}
    for peer, ask, named, low in ((other.peer, number, key, lo), (first.peer, number + 99, key, lo)):
        here.jobs.repair_data(peer, "test", 1, ask, named, low, hi, 1, bad, b"\0\0\x80\x3f")
    here.settle()
    assert here.job.shadow.unknown.elements == 61
    here.jobs.repair_data(first.peer, "test", 1, number, "model/norm.weight", lo, hi, 1, bad, b"\0\0\x80\x3f")
    here.settle()
    assert here.job.shadow.unknown.elements == 61
    here.tick()
    here.tick(11)  # that part counts as not answered
    here.step()
    assert here.digest() == here.digests[2]


def test_the_scrub_finds_what_went_wrong_and_mends_it(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(tmp_path, every_steps=1, budget=Budget(scrub_percent=0.2))
    here.step()
    wait_for(lambda: here.job.persisted == 1)
    assert {fields["percent"] for rank in here.ranks for kind, fields in rank.told} == {0.2}
    here.job.shadow.live.places("model/hidden.bias")["model"][5] += 1
    for _ in range(8):
        here.step()
        if here.job.status()["repair"]["differences"]:
            break
    assert here.digest() == here.digests[here.job.step]
    (line,) = [line for line in here.lines if "ALARM" in line]
    assert "hidden.bias[5:6] differs from the trainer's" in line
    assert here.persister is not None
    wait_for(lambda: not here.jobs.open(None, 1).header["exact"])
    assert "1 DIFFERED" in status_text(here.jobs.status())


def test_without_scrub_nothing_is_asked_of_a_trainer(node: Callable[..., Node]) -> None:
    here = node(budget=Budget(scrub_percent=0.0))
    for _ in range(3):
        here.step()
        here.tick()
    assert [rank.told for rank in here.ranks] == [[], []]
    assert "no rank answers" not in status_text(here.jobs.status())


def test_trainers_that_are_not_followed_are_asked_to_describe_their_job(node: Callable[..., Node]) -> None:
    here = node()
    first, other = here.ranks
    told = len(first.told)
    here.jobs.agent(other.peer, "test", None, 0, 3)  # another job of that name: the one that is followed lives
    here.jobs.agent(other.peer, "new", None, 1, 3)  # only rank 0 can
    assert not [kind for rank in here.ranks for kind, _ in rank.told if kind == "join-ask"]
    here.jobs.agent(first.peer, "new", None, 0, 3)
    here.jobs.agent(first.peer, "new", None, 0, 4)
    assert first.told[told:].count(("join-ask", {"run": "new"})) == 1
    for rank in here.ranks:
        here.jobs.agent_gone(rank.peer)
    here.jobs.agent(other.peer, "test", None, 0, 3)
    assert other.told[-1] == ("join-ask", {"run": "test"})


def test_param_groups_that_a_lost_marker_told_are_asked_of_rank_0(node: Callable[..., Node]) -> None:
    here = node(budget=Budget(scrub_percent=0.0))
    here.wire.tracker.needs_groups = True
    here.tick(2)
    here.tick(2.5)
    assert [rank.told for rank in here.ranks] == [[("groups-ask", {"run": "test", "epoch": 1})], []]


def compared(here: Node, number: int) -> dict[str, Any]:
    def ended() -> Any:
        here.settle()
        return here.jobs.compare(None, number)["report"]

    return dict(wait_for(ended))


def test_compare_with_the_trainers(node: Callable[..., Node]) -> None:
    here = node(budget=Budget(scrub_percent=0.0), before=1)
    number = here.jobs.compare("test", None)["number"]
    here.settle()
    assert here.jobs.compare(None, number)["report"] is None
    here.step()
    report = compared(here, number)
    tensors = 4 * len(here.training_parameters) + 1  # and the frozen one
    assert (report["step"], report["tensors"], report["differing"], report["problem"]) == (2, tensors, [], None)

    here.job.shadow.live.places("model/hidden.bias")["exp_avg"][5] ^= 1 << 22
    number = here.jobs.compare("test", None)["number"]
    here.settle()
    for _ in range(3):
        here.step()
        here.tick()
    report = compared(here, number)
    differing = {entry["tensor"]: entry for entry in report["differing"]}
    assert set(differing) == {"optimizer/hidden.bias/exp_avg", "model/hidden.bias"}  # a step was made with it
    assert differing["optimizer/hidden.bias/exp_avg"]["elements"] == 1
    assert differing["optimizer/hidden.bias/exp_avg"]["ulps"] > 0
    assert any("ALARM" in line for line in here.lines)
    assert here.digest() == here.digests[here.job.step]  # the trainer's bytes were taken


def test_a_trainer_that_answers_late_is_compared_at_its_own_step(node: Callable[..., Node]) -> None:
    here = node(ranks=1, budget=Budget(scrub_percent=0.0))
    number = here.jobs.compare("test", None)["number"]
    here.settle()
    here.step(answers=False)
    sums = checksums(uploads(here.training.model, here.training.optimizer))
    here.step(answers=False)
    here.jobs.compare_data(here.ranks[0].peer, "test", 1, number, 1, {**sums, "model/norm.bias": "0" * 32})
    here.tick()
    here.step()
    report = compared(here, number)
    assert report["step"] == 1 and [entry["tensor"] for entry in report["differing"]] == ["model/norm.bias"]


def test_compare_leaves_out_what_is_unknown_and_says_so(node: Callable[..., Node]) -> None:
    here = node(budget=Budget(scrub_percent=0.0))
    here.step(lost=LOST, answers=False)
    for rank in here.ranks:
        rank.parts.clear()
    number = here.jobs.compare("test", None)["number"]
    here.settle()
    here.step()
    report = compared(here, number)
    assert report["unknown"] == ["embedding.weight", "hidden.weight"] and report["differing"] == []


def test_every_k_steps(node: Callable[..., Node]) -> None:
    here = node(budget=Budget(scrub_percent=0.0, compare_every=3))
    for _ in range(8):
        here.step()
    assert here.job.status()["compared"]["step"] == 7
    assert sum(kind == "compare-ask" for rank in here.ranks for kind, _ in rank.told) == 2
    assert "compared with rank 0 at step 7: equal to the bit" in status_text(here.jobs.status())


def test_compare_when_no_rank_answers(node: Callable[..., Node]) -> None:
    here = node(ranks=1)
    here.ranks[0].silent = True
    number = here.jobs.compare(None, None)["number"]
    here.settle()
    here.tick(61)
    assert "rank 0 did not answer within 60 s" in compared(here, number)["problem"]
    here.jobs.agent_gone(here.ranks[0].peer)
    number = here.jobs.compare(None, None)["number"]
    assert "no rank answers" in compared(here, number)["problem"]


def test_the_scrub_makes_room_for_what_is_unknown(node: Callable[..., Node]) -> None:
    here = node(ranks=1)
    here.step(answers=False)
    (rank,) = here.ranks
    scrubbed = list(rank.parts)
    assert scrubbed
    here.step(lost=LOST, answers=False)
    assert not set(scrubbed) & set(rank.parts)
    assert {key for _, key, _, _ in rank.parts} == {"model/embedding.weight", "model/hidden.weight"}
    for _ in range(3):
        here.step()
    assert here.digest() == here.digests[here.job.step] and here.job.status()["repair"]["compared"] > 1000


def test_what_may_differ_between_ranks_is_asked_of_rank_0_alone(node: Callable[..., Node]) -> None:
    here = node(late=True, before=1, budget=Budget(scrub_percent=0.0))
    first, other = here.ranks
    own = {"model/position", "buffer/mask"}
    here.tick()
    assert own <= {part[1] for part in first.parts}
    here.jobs.agent_gone(first.peer)
    here.settle()
    for _ in range(3):
        here.step()
        here.tick()
        here.tick(11)
    assert other.parts == [] and own == {key for key, _ in here.job.shadow.unknown.items()}
    here.hello()
    here.tick(200)
    here.tick(400)
    here.step()
    assert here.digest() == here.digests[here.job.step]
