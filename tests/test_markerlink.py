"""One daemon's markers: held while it joins, in order, within bounds, and never under a wrong epoch."""

from __future__ import annotations

import json
from typing import Any

from flowcheck.markerlink import FLUSH, MARKER_QUEUE, MarkerLink


class Wire:
    """Stands in for `Connection`; `room`: how many messages it takes."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.sent: list[dict[str, Any]] = []
        self.room = room
        self.closed = False

    def post(self, frame: bytes) -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(json.loads(frame))
        return True

    def close(self, linger: float = 0.0) -> None:
        self.closed = True

    @property
    def markers(self) -> list[tuple[int, int, int]]:
        """(epoch, step, version) each."""
        found = [message for message in self.sent if message["type"] == "marker"]
        return [(m["epoch"], m["marker"]["step"], m["marker"]["version"]) for m in found]


def post(link: MarkerLink, *steps: int, version: int = 0, groups: str | None = None) -> None:
    for step in steps:
        link.post(f'{step},"sequence":9,"version":', version, groups, "}}")


def following(wire: Wire, epoch: int = 1) -> MarkerLink:
    link = MarkerLink("tcp://x")
    link.follow(wire, "r", epoch)  # type: ignore[arg-type]
    return link


def test_markers_wait_for_the_epoch_of_the_daemon_that_joins() -> None:
    old, new = Wire(), Wire()
    link = following(old)
    post(link, 1, 2)
    assert link.hold(5) is old  # described after step 2, with five changes of the fields before
    post(link, 3, 4, version=5)
    assert (old.markers, link.open) == ([(1, 1, 0), (1, 2, 0)], True)
    link.settle((new, "r", 7))  # type: ignore[arg-type]
    post(link, 5, version=6)
    assert new.markers == [(7, 3, 0), (7, 4, 0), (7, 5, 1)]
    post(link, 6, version=6)
    assert new.markers[-1] == (7, 6, 1)
    assert len(old.sent) == 2


def test_a_long_join_costs_no_step_much() -> None:
    new = Wire()
    link = MarkerLink("tcp://x")
    link.hold(0)
    post(link, *range(100))
    link.settle((new, "r", 1))  # type: ignore[arg-type]
    sent = []
    for step in range(100, 110):
        before = len(new.sent)
        post(link, step)
        sent.append(len(new.sent) - before)
    assert sent[:6] == [FLUSH] * 6
    assert [step for _, step, _ in new.markers] == list(range(110))


def test_what_is_held_has_an_end_and_the_fields_come_again() -> None:
    link = MarkerLink("tcp://x")
    link.hold(0)
    post(link, 0, version=1, groups="[]")
    assert not link.unsent
    post(link, *range(1, MARKER_QUEUE + 5), version=1)
    assert (link.dropped, link.unsent) == (5, True)


def test_a_join_that_fails_leaves_nothing() -> None:
    old = Wire()
    link = following(old)
    link.hold(0)
    post(link, 1)
    link.settle(None)
    post(link, 2)
    assert not link.open
    new = Wire()
    link.hold(0)
    link.settle((new, "r", 2))  # type: ignore[arg-type]
    post(link, 3)
    assert (new.markers, old.markers) == ([(2, 3, 0)], [])


def test_a_marker_that_finds_no_room_is_counted_and_the_fields_come_again() -> None:
    wire = Wire(room=1)
    link = following(wire)
    link.unsent = True
    post(link, 1)
    post(link, 2, groups="[]")
    assert (link.dropped, link.unsent) == (1, True)
    wire.room = 9
    post(link, 3, groups="[]")
    assert (link.dropped, link.unsent) == (1, False)


def test_the_end_is_told_under_the_newest_epoch() -> None:
    new = Wire()
    link = MarkerLink("tcp://x")
    link.hold(0)
    post(link, *range(1, 40))
    link.settle((new, "r", 3))  # type: ignore[arg-type]
    link.close(39, linger=0.1)
    assert [step for _, step, _ in new.markers] == list(range(1, 40))
    assert {key: new.sent[-1][key] for key in ("type", "epoch", "step")} == {"type": "detach", "epoch": 3, "step": 39}
    assert new.closed
