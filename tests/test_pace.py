"""How long applying a step waits for readers: one step of the job, as the wire shows it, within bounds."""

from __future__ import annotations

import pytest

from flowcheck.pace import LEAST, MOST, Pace

MS = 1_000_000


@pytest.mark.parametrize(
    ("times", "wait"),
    [
        ([], MOST),
        ([7], MOST),  # nothing measured yet
        ([0, 200, 400, 600], 0.2),
        ([0, 1, 2, 3], LEAST),
        ([0, 9000, 18000], MOST),
        ([0, 200, 400, 60_400, 60_600, 60_800], 0.2),  # an evaluation between two steps
        ([0, 200, 200, 100], 0.2),  # times that do not rise say nothing
    ],
)
def test_the_wait_is_the_usual_step(times: list[int], wait: float) -> None:
    pace = Pace()
    for time in times:
        pace.step(time * MS)
    assert pace.wait == pytest.approx(wait)


def test_a_job_that_slows_down_is_followed() -> None:
    pace = Pace()
    for number in range(100):
        pace.step(100 * MS * number)
    for number in range(20):
        pace.step((10_000 + 500 * number) * MS)
    assert pace.wait == pytest.approx(0.5)
