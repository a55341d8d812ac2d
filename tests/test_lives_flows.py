"""A job that begins again finds connections of its earlier life at its own listeners' ports: they are not its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gloo_traffic import Follower, Frame, Job, Link, port

WORLD = 3
EARLIER, LATER = 41, 7  # all-reduces of the two lives
SIZE = (4 * 600, 4)


class Again(Job):
    """The same listeners, other ports at the other ends."""

    def ends(self, link: Link) -> tuple[int, int]:
        source, target = super().ends(link)
        return (source + 1000, target) if link[0] > link[1] else (source, target + 1000)


def trained(job: Job, tags: int) -> list[Frame]:
    job.connect()
    for tag in range(tags):
        job.allreduce({tag: SIZE})
    return job.frames


@pytest.mark.parametrize("named", [True, False], ids=["connections are named", "listeners alone"])
def test_flows_of_an_earlier_life_at_the_same_listeners(named: bool) -> None:
    """It was killed: nothing ended its flows. What they carried last tells nothing of the collectives of the new life;
    where the ranks did not name their connections, all that a listener has counts."""
    mirrored = port(WORLD, 1)
    earlier = Job(WORLD, mirrored)
    follower = Follower(earlier)
    follower.feed(trained(earlier, EARLIER))
    assert follower.decoder.max_tag("g") == EARLIER - 1
    follower.decoder.remove_group("g")

    later = Again(WORLD, mirrored, seed=1)
    frames = trained(later, LATER)
    met = next(i for i, frame in enumerate(frames) if frame.payload and len(frame.payload) > 8)
    follower.job = later
    follower.feed(frames[:met])
    group = later.group()
    sockets = {
        (f"10.0.0.{a + 1}", later.ends((a, b))[0], f"10.0.0.{b + 1}", later.ends((a, b))[1]): (a, b)
        for a in range(WORLD)
        for b in range(WORLD)
        if a != b
    }
    follower.decoder.add_group(replace(group, sockets=sockets) if named else group)
    assert follower.decoder.max_tag("g") == (-1 if named else EARLIER - 1)
    follower.feed(frames[met:])
    assert follower.decoder.max_tag("g") == (LATER - 1 if named else EARLIER - 1)
    if named:
        assert set(follower.check().values()) == {1.0}
        assert len(follower.decoder._lanes.of_group(1)) == len(mirrored)
