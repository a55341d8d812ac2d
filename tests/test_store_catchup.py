"""A daemon that starts brings to the URL what an earlier one could not, newest first, and takes away what was wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_states import flip, same, small
from synthetic_job import SyntheticJob
from test_daemon import Node, node, wait_for
from test_store_remote import Cloud, Copy, copies, quick, store

from flowcheck import catchup
from flowcheck.client import snapshot
from flowcheck.remote import connect
from flowcheck.store import Store
from flowcheck.storereader import open_store
from flowcheck.verify import verify

__all__ = ["copies", "node", "quick", "store"]


def away(operation: str, path: str) -> None:
    raise OSError("Could not connect to the endpoint URL")


def manifests() -> list[str]:
    """The steps whose manifests came to the URL, and `latest`, in order."""
    names = [path.partition("/store/run/")[2] for operation, path in Cloud.told if operation == "mv"]
    return [name.removesuffix("/manifest.json") for name in names]


def left(copy: Copy) -> None:
    """The daemon ends while the remote is away."""
    copy.until(lambda: copy.thread.status()["problem"])
    copy.thread.finish()
    Cloud.broken = None
    Cloud.told.clear()


def test_what_waited_is_uploaded_after_a_restart_newest_first_and_the_pointer_never_goes_back(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies()
    store.open_epoch("run")
    copy.save(1, keep=3)
    copy.idle()
    Cloud.broken = away
    for step in range(2, 7):
        copy.save(step, keep=3)
    left(copy)
    again = copies()
    again.until(lambda: again.steps() == [4, 5, 6])
    again.idle()
    assert manifests() == ["e1/step-6", "latest", "e1/step-5", "e1/step-4"] and again.latest() == (1, 6)
    assert again.said == [] and verify(connect(again.url)).problems == []
    for step in (4, 5, 6):
        same(snapshot(again.url, "run", step), small(step))
    assert again.thread.status()["step"] == 6
    Cloud.told.clear()
    third = copies()
    third.until(lambda: third.thread.status()["step"] == 6)
    third.idle()
    assert not any(operation in ("write", "mv", "rm") for operation, _ in Cloud.told), "all is there"


def test_a_new_step_goes_before_what_is_left_of_earlier_ones(store: Store, copies: Callable[..., Copy]) -> None:
    first = store.open_epoch("run")
    for step in (1, 2, 3):
        store.save(small(step, epoch=first))
    epoch = store.open_epoch("run")
    offered = []

    def job_attaches(operation: str, path: str) -> None:
        if operation == "write" and "step-3" in path and not offered:
            offered.append(path)
            copy.save(4, epoch)

    Cloud.broken = job_attaches
    copy = copies(keep=3)
    copy.until(lambda: copy.steps(1) == [1, 2, 3])
    copy.idle()
    assert manifests() == ["e1/step-3", "latest", "e2/step-4", "latest", "e1/step-2", "e1/step-1"]
    assert copy.latest() == (2, 4)


def test_a_step_that_is_no_longer_kept_is_not_uploaded(store: Store, copies: Callable[..., Copy]) -> None:
    store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step))

    def job_goes_on(operation: str, path: str) -> None:
        if operation == "write" and "step-2" in path:
            Cloud.broken = None
            for step in (3, 4):
                copy.thread.offer("run", 1, step)
                store.save(small(step))

    Cloud.broken = job_goes_on
    copy = copies(keep=2)
    copy.until(lambda: 4 in copy.steps())
    copy.idle()
    assert copy.steps() == [2, 4] and "e1/step-1" not in manifests()


def test_it_is_bounded_over_epochs_and_a_remote_that_fails_again_is_tried_again(
    store: Store, copies: Callable[..., Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    for epoch in range(1, 5):
        assert store.open_epoch("run") == epoch
        store.save(small(epoch, epoch=epoch))
    Cloud.broken = away
    copy = copies(keep=2)
    copy.until(lambda: copy.thread.status()["problem"])
    Cloud.broken = None
    copy.until(lambda: copy.steps(3) == [3])
    copy.idle()
    assert [copy.steps(epoch) for epoch in range(1, 5)] == [[], [], [3], [4]]
    monkeypatch.setattr(catchup, "MOST_STEPS", 1)
    other = copies("cloud://bucket/other/store", keep=2)
    other.until(lambda: other.steps(4) == [4])
    other.idle()
    assert other.steps(3) == []


def test_a_damaged_step_is_passed_over_and_the_next_one_is_uploaded(
    store: Store, copies: Callable[..., Copy]
) -> None:
    store.open_epoch("run")
    for step in (1, 2):
        store.save(small(step))
    model = store.step_folder("run", 1, 2) / "model.safetensors"
    flip(model, -3)
    copy = copies()
    copy.until(lambda: copy.steps() == [1])
    copy.idle()
    assert copy.said == [f"{copy.url}: {model} differs from its checksum; step 2 is not uploaded"]
    assert copy.latest() == (1, 1)


def test_wrong_steps_go_from_the_url_after_a_restart(store: Store, copies: Callable[..., Copy]) -> None:
    copy = copies()
    store.open_epoch("run")
    for step in (1, 2, 3):
        copy.save(step)
        copy.idle()
    Cloud.broken = away
    for first in (3, 2):
        copy.thread.withdraw("run", 1, first)
        store.withdraw("run", 1, first)
    left(copy)
    assert copy.steps() == [1, 2, 3]
    again = copies()
    again.until(lambda: again.steps() == [1])
    again.idle()
    assert again.latest() == (1, 1)
    again.save(2)  # a right one this time
    again.idle()
    assert copies().thread.status()["waiting"] == [] and again.steps() == [1, 2]
    assert not (store.epoch_folder("run", 1) / catchup.WRONG).exists()


def test_doubts_reach_the_url_after_a_restart_without_the_tensors_again(
    store: Store, copies: Callable[..., Copy]
) -> None:
    copy = copies()
    store.open_epoch("run")
    for step in (1, 2):
        copy.save(step)
        copy.idle()
    Cloud.broken = away
    copy.thread.doubt("run", 1, 1, "the trainer says otherwise")
    path = store.step_folder("run", 1, 2) / "manifest.json"
    path.write_bytes(catchup.Manifest.read(path).doubted("the trainer says otherwise"))
    left(copy)
    again = copies()
    again.until(lambda: snapshot(again.url, "run", 2).reasons[-1] == "may be wrong: the trainer says otherwise")
    again.idle()
    assert not [path for operation, path in Cloud.told if operation == "write" and "safetensors" in path]


def test_what_others_write_is_left_alone(store: Store, copies: Callable[..., Copy], tmp_path: Path) -> None:
    with Store(tmp_path / "another") as second:
        second.open_epoch("run")
        other = copies(store=second)
        other.save(7)
        other.idle()
    store.open_epoch("run")
    store.save(small(1))  # epoch 1 at the URL is the other store's
    store.open_epoch("mine")
    store.save(small(2, run="mine"))
    Cloud.told.clear()
    with Store(store.root) as reader:  # another process, whose daemon has both runs in hand
        copy = copies(store=reader)
        copy.until(lambda: copy.thread._known)
        copy.idle()
        copy.thread.finish()
        assert not any(operation in ("write", "mv", "rm") for operation, _ in Cloud.told)
    store.close()
    copy = copies()
    copy.until(lambda: copy.steps(run="mine") == [2])
    copy.idle()
    assert copy.steps() == [7] and copy.said == []


def test_a_daemon_that_starts_catches_up(node: Callable[..., Node], tmp_path: Path) -> None:
    before = node(store=tmp_path / "store", every_steps=1, keep=2)
    job = SyntheticJob()
    held = before.attach(job)
    for step in (1, 2):
        before.step(job, held)
        wait_for(lambda n=step: held.persisted == n)
    before.finish()
    assert before.daemon._store is not None
    before.daemon._store.close()  # as the end of its process does
    url = f"file://{tmp_path}/mounted"
    after = node(store=tmp_path / "store", store_remote=url, keep=2)
    wait_for(lambda: open_store(url).steps("made-up", 1) == [1, 2] and after.jobs.status()["remote"]["waiting"] == [])
    time.sleep(0.05)
    assert after.jobs.status()["remote"]["step"] == 2 and verify(connect(url)).problems == []
