"""A pipeline that nobody holds is gone at once: its memory does not wait for the collector of cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from nccl_job import trained as nccl_trained
from synthetic_job import Follower, SyntheticJob, trained
from test_nccl_steps import pinned

from flowcheck.pipeline import Limits, Pipeline
from reconstruct.steps import Waits


def parts(pipeline: Pipeline) -> dict[str, weakref.ref[object]]:
    held = pipeline, pipeline.tcp, pipeline.gloo, pipeline.roce, pipeline.nccl, pipeline.nccl_tcp, pipeline.sockets
    return {type(one).__name__ + str(at): weakref.ref(one) for at, one in enumerate(held)}


def left(found: dict[str, weakref.ref[object]]) -> list[str]:
    return [name for name, one in found.items() if one() is not None]


@pytest.fixture(autouse=True)
def no_collector() -> object:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_one_without_jobs() -> None:
    pipeline = Pipeline(Limits(64, 1 << 20, 1 << 26), Waits())
    found = parts(pipeline)
    assert len(left(found)) == 7
    del pipeline
    assert left(found) == []


JOBS: dict[str, Callable[[], SyntheticJob]] = {
    "gloo": lambda: trained(3),
    "roce": lambda: nccl_trained(3, **pinned("ring", "ll")),
    "socket": lambda: nccl_trained(3, **pinned("ring", "simple", sockets=2)),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("removed", [False, True])
def test_one_that_has_followed_a_job(name: str, removed: bool) -> None:
    follower = Follower(JOBS[name]()).run()
    follower.check(3)
    found = parts(follower.pipeline)
    if removed:
        follower.pipeline.remove_job("job")
    del follower
    assert left(found) == []
