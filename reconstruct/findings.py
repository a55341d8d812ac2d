"""What a repair finds out about a state beside repairing it: plain data for the log, `status` and the journal."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Difference", "Finding", "Misfit"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Known elements that a trainer has other bytes for, after the same step. Its bytes were taken over.

    key: `model/<parameter>` or `buffer/<name>`; section: "model", or the optimizer state key; elements: how many
    differ, the first is `lo`, the last `hi - 1`; largest: the largest absolute difference (inf where one side is not
    finite); relative: the largest difference relative to the trainer's value; ulps: the largest distance counted in
    values of the dtype that lie between. alarm: whether the job is exact, so that something is wrong on one side;
    elsewhere kernels are known to round differently.
    """

    key: str
    section: str
    step: int
    lo: int
    hi: int
    elements: int
    largest: float
    relative: float
    ulps: int
    alarm: bool

    @property
    def text(self) -> str:
        where = self.key.partition("/")[2] + ("" if self.section == "model" else f" ({self.section})")
        return (
            f"{where}[{self.lo}:{self.hi}] differs from the trainer's at step {self.step}: {self.elements} elements, "
            f"by {self.largest:.3g} at most ({self.relative:.3g} relative, {self.ulps} ulp); its bytes were taken over"
        )


@dataclass(frozen=True, slots=True)
class Misfit:
    """A piece that does not fit what is known of the job. Nothing of it was taken unless `reason` says so."""

    key: str
    step: int
    reason: str

    @property
    def text(self) -> str:
        return f"{self.key.partition('/')[2]}: a trainer's piece of step {self.step} {self.reason}"


Finding = Difference | Misfit
