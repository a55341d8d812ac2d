"""What following a job saves against asynchronous checkpoints, and the failure rate at which it pays.

Both sides lose the same restart time, which is left out. docs/planning.md derives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SNAPSHOT_RATE = 20e9
"""Bytes a second from GPU to host memory that a training rank reaches while it is stalled for its snapshot."""
GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16384 GPUs."""
LONGEST = 1e12
"""No failure rate below one in 30000 years is told apart from none."""


@dataclass(frozen=True, slots=True)
class Savings:
    """Lost shares of the cluster's time with checkpoints and with flowcheck. Times in seconds.

    `break_even`: mean time between failures below which flowcheck loses less; inf: always; 0: never.
    """

    stall: float
    write: float
    interval: float
    mtbf: float
    hardware: float
    checkpoints: float
    flowcheck: float
    break_even: float
    mtbf_how: str

    def rows(self) -> Iterator[tuple[str, str, float, str, str]]:
        """(key, label, value, unit, how)."""
        yield "mtbf_seconds", "mean time between failures", self.mtbf, "s", self.mtbf_how
        yield (
            "checkpoint_interval", "best interval of async checkpoints", self.interval, "s",
            f"the larger of sqrt(2 x {self.stall:.3g} s stall x MTBF) (Young) and {self.write:.3g} s to write one; the "
            f"stall is a GPU's part / {SNAPSHOT_RATE / 1e9:g} GB/s",
        )  # fmt: skip
        yield (
            "checkpoint_loss", "time lost with async checkpoints", self.checkpoints, "share",
            "stall / interval + (interval / 2 + write) / MTBF: a failure loses half an interval and what was not yet "
            "written",
        )  # fmt: skip
        yield (
            "flowcheck_loss", "time lost with flowcheck", self.flowcheck, "share",
            f"one step / MTBF + {self.hardware:.3%} for the checkpoint nodes' price in GPU nodes",
        )  # fmt: skip
        how = "failures that come more often than this make flowcheck the cheaper one (where both losses are equal)"
        if math.isinf(self.break_even):
            how = "the checkpoint nodes cost nothing and a lost step less than a lost interval: at every failure rate"
        elif not self.break_even:
            how = "at no failure rate: the checkpoint nodes cost more than async checkpoints lose"
        yield "break_even_mtbf", "break-even time between failures", self.break_even, "s", how


def savings(
    *, state: float, shards: int, gpus: int, step: float, storage_rate: float, hardware: float, mtbf: float | None
) -> Savings:
    """Compare at `mtbf` (None: estimated from the number of GPUs) and find the break-even.

    state: bytes of a step; shards: GPUs that hold different parts of it; step: s; storage_rate: bytes/s of the shared
    storage; hardware: checkpoint nodes' price as a share of the cluster's.
    """
    stall, write = state / shards / SNAPSHOT_RATE, state / storage_rate
    how = "given"
    if mtbf is None:
        mtbf = GPU_HOURS_PER_FAILURE * 3600 / gpus
        how = (
            f"{GPU_HOURS_PER_FAILURE:.0f} GPU hours per failure (Llama 3 405B) / {gpus} GPUs; --mtbf-hours gives yours"
        )

    def interval(between: float) -> float:
        return max(math.sqrt(2 * stall * between), write)

    def checkpoints(between: float) -> float:
        every = interval(between)
        return min(1.0, stall / every + (every / 2 + write) / between)

    def flowcheck(between: float) -> float:
        return min(1.0, hardware + step / between)

    def gain(between: float) -> float:
        return checkpoints(between) - flowcheck(between)

    return Savings(
        stall, write, interval(mtbf), mtbf, hardware, checkpoints(mtbf), flowcheck(mtbf),
        _largest_root(gain, max(step, 1.0)), how,
    )  # fmt: skip


def _largest_root(gain: Callable[[float], float], shortest: float) -> float:
    """The largest time where `gain` turns from positive to negative; inf where it never does, 0 where it never was."""
    if gain(LONGEST) > 0:
        return math.inf
    upper = LONGEST
    while upper > shortest:
        lower = upper / 1.1
        if gain(lower) > 0:
            for _ in range(60):
                middle = math.sqrt(lower * upper)
                lower, upper = (middle, upper) if gain(middle) > 0 else (lower, middle)
            return lower
        upper = lower
    return 0.0
