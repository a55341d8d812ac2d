"""A made-up job over NCCL through the whole pipeline: the trainers' own gradients, or it is said what is not known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from nccl_job import Frame, NcclJob, trained
from synthetic_job import Follower, right

from flowcheck.errors import UsageError
from flowcheck.lab.addresses import Port
from flowcheck.pipeline import Limits, Pipeline
from flowcheck.vantages import Vantages
from reconstruct.lr import Predictor
from reconstruct.steps import StepReady, Waits

SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "4, 2 channels": (4, {"channels": 2}),
    "2 nodes of 2, 4 channels, 2 rails": (4, {"gpus_per_node": 2, "channels": 4, "rails": 2}),
}


def pinned(algorithm: str, protocol: str, shape: str = "2", **options: Any) -> dict[str, Any]:
    """Options of a job whose NCCL_ALGO and NCCL_PROTO are set."""
    world, nccl = SHAPES[shape]
    told = {"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol}
    version = options.pop("version", "2.19.4")
    made = {"algorithm": algorithm, "protocol": protocol, "version": version, **nccl}
    return {"world": world, "nccl": made, "told": told, **options}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("protocol", ["ll", "simple"])
def test_every_step_over_rings_has_the_trainers_gradients(shape: str, protocol: str) -> None:
    """The rebuilt layout comes from the broadcasts on the wire."""
    follower = Follower(trained(4, **pinned("ring", protocol, shape))).run()
    follower.check(4)
    assert follower.lost is None and follower.tracker.coverage == 1.0
    assert all(step.confirmed for step in follower.steps.values())
    assert follower.pipeline.counters()["nccl_collectives"] == 9


@pytest.mark.parametrize("protocol", ["ll", "simple"])
def test_every_step_over_trees_has_the_trainers_gradients(protocol: str) -> None:
    Follower(trained(4, **pinned("tree", protocol))).run().check(4)


@pytest.mark.parametrize("version", ["2.18.6", "2.21.5", "2.23.4", "2.28.9", "2.30.7"])
def test_releases(version: str) -> None:
    Follower(trained(3, **pinned("ring", "simple", version=version))).run().check(3)


@pytest.mark.parametrize(
    ("mirrored", "steps"),
    [
        ([(Port(1, 0), "in"), (Port(1, 0), "out")], 4),
        ([(Port(0, 0), "in"), (Port(2, 0), "in")], 4),
        ([(Port(1, 0), "in")], 4),  # the chunk that it lacks is empty in small buckets
        ([(Port(3, 0), "in")], 0),
        ([], 0),
    ],
)
def test_two_edges_of_a_ring_show_every_step_and_one_shows_none(mirrored: list[tuple[Port, str]], steps: int) -> None:
    job = trained(4, **pinned("ring", "ll", "4, 2 channels", mirrored=mirrored, rebuilt_at_attach=True))
    follower = Follower(job).run()
    follower.verify()
    assert follower.story.count(".") == steps and len(follower.story) == 4


@pytest.mark.parametrize("protocol", ["ll", "simple"])
@pytest.mark.parametrize("seed", range(4))
def test_lost_frames_never_give_a_wrong_gradient(protocol: str, seed: int) -> None:
    job = trained(5, **pinned("ring", protocol, mirrored=[(Port(1, 0), "in"), (Port(1, 0), "out")]))
    rng = random.Random(seed)
    frames: list[Frame] = list(job.wire.frames)  # type: ignore[assignment]
    kept = [frame for frame in frames if rng.random() > 0.02]
    follower = Follower(job).run(kept)  # type: ignore[arg-type]
    follower.verify()
    assert len(follower.story) == 5 and follower.lost is None


def test_of_a_bucket_whose_data_was_lost_nothing_else_is_lost() -> None:
    """One of the bucket's two messages is its sum, the other a partial one; without both nobody knows what it was."""
    stories = []
    for victims in ([0], [1], [0, 1]):
        job = NcclJob(**pinned("ring", "simple"))
        job.attach()
        job.usual_step()
        job.usual_step()
        before = len(job.wire.frames)
        job.reduction()
        sizes = {at: len(job.wire.frames[at].data) for at in range(before, len(job.wire.frames))}  # type: ignore[attr-defined]
        largest = sorted(sorted(sizes, key=lambda at: sizes[at])[-2:])
        for victim in reversed(victims):
            del job.wire.frames[largest[victim]]
        job.optimizer_step()
        job.usual_step()
        follower = Follower(job).run()
        follower.verify()
        stories.append(follower.story)
        assert {bucket for bucket, _, _ in follower.steps[3].holes} <= {0}
    assert sorted(stories[:2]) == ["..-.", "...."] and stories[2][:3] == "..x"


def test_packets_sprayed_over_two_planes_of_a_vantage_group() -> None:
    job = trained(4, **pinned("ring", "simple", "4, 2 channels"))
    frames: list[Frame] = list(job.wire.frames)  # type: ignore[assignment]
    for texts, declared in ((("fabric=mon0,mon1",), True), (("x=mon0", "y=mon1"), False)):
        vantages = Vantages(texts, ("mon0", "mon1"))
        pipeline = Pipeline(Limits(256, 1 << 20, 1 << 26), Waits(), vantages)
        tracker = pipeline.add_job("job", job.description, Predictor(job.description), job.attached)
        words, claimed, now = sorted(job.words, key=lambda word: word[0]), [], 0
        for number, frame in enumerate(frames):
            while words and words[0][0] <= frame.ts:
                now, word = words.pop(0)
                word(tracker)
            now = max(now, frame.ts)
            block = job.wire.block([frame])  # type: ignore[list-item]
            block.vantage = vantages.of_source(f"mon{number % 2}")
            pipeline.feed(block, now)
            claimed += [event for _, event in pipeline.poll(now) if isinstance(event, StepReady)]
        for now, word in words:  # noqa: B007
            word(tracker)
        pipeline.flush(now)
        claimed += [event for _, event in pipeline.poll(now, True) if isinstance(event, StepReady)]
        assert [event.step for event in claimed] == [1, 2, 3, 4]
        assert declared == all(not event.lost and not event.blank for event in claimed)
        for event in claimed:
            assert right(event, {i: g.tobytes() for i, g in event.gradients.items()}, job.truth[event.step])


def test_the_daemons_version_where_the_description_has_none() -> None:
    job = trained(3, **pinned("ring", "ll"))
    facts = job.description.group.nccl
    assert facts is not None
    pipeline = Pipeline(Limits(64, 1 << 20, 1 << 26), Waits(), nccl_version="2.20.5")
    with pytest.raises(UsageError, match=r"2\.19\.4\+cuda12\.4, --nccl-version says 2\.20\.5"):
        pipeline.check(job.description)
    with pytest.raises(UsageError, match="2\\.20\\.5"):
        pipeline.add_job("job", job.description, Predictor(job.description))


def test_a_job_that_is_removed_is_forgotten() -> None:
    follower = Follower(trained(3, **pinned("ring", "simple")))
    follower.run(final=False)
    follower.pipeline.remove_job("job")
    assert follower.pipeline.counters()["nccl_flows"] == 0
    follower.pipeline.feed(follower.job.wire.block(follower.job.wire.frames[:50]), 1 << 62)
    assert follower.pipeline.poll(1 << 62) == []


def test_nothing_of_roce_is_done_where_no_packet_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    from synthetic_job import trained as gloo_trained

    job = gloo_trained(2)
    follower = Follower(job)
    for name in ("take", "expire", "flush"):
        monkeypatch.setattr(follower.pipeline.roce, name, None)
    follower.run().check(2)
