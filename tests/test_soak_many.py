"""Five hundred seeded runs over fault kinds, rates, mirrors, libraries and schedules, and how often a job is known."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from nccl_job import NcclJob
from soak import Outcome, Soak, Training, ports
from synthetic_job import SyntheticJob
from test_nccl_steps import pinned

from mirror.faults import KINDS, Faults

pytestmark = pytest.mark.slow

SIZES = (900, 700, 1500)
LIBRARIES = ("gloo", "ring-simple", "ring-ll", "ring-ll128", "tree-simple", "tree-ll", "tree-ll128")
DAMAGES = ("corrupt", "mixed")
RUNS, PER_TEST = 560, 10
STEPS = 12


def job_over(library: str, seed: int, world: int, sizes: tuple[int, ...] = SIZES) -> SyntheticJob:
    if library == "gloo":
        links = [(a, b) for a in range(world) for b in range(world) if a != b]
        return SyntheticJob(world, mirror=links, seed=seed, sizes=sizes)
    algorithm, protocol = library.split("-")
    shape = "2" if world == 2 else "4, 2 channels"
    return NcclJob(seed=seed, sizes=sizes, **pinned(algorithm, protocol, shape))


def faults_of(kind: str, rate: float, seed: int) -> Faults:
    """kind: of the fault, or "mixed" for all of them."""
    each = dict.fromkeys([kind] if kind != "mixed" else KINDS, rate if kind != "mixed" else rate / 4)
    if "burst" in each:
        each["burst"] /= 8
    return Faults(
        **each, burst_frames=8, reorder_distance=5, truncate_bytes=90, delay_ms=3, seed=seed,
    )  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """What one seed stands for. healed: how the state becomes known again: by "repair", or by the last of the mirrors,
    which meets no fault ("mirror")."""

    seed: int
    library: str
    kind: str
    rate: float
    mirrors: int
    healed: str
    world: int
    pause: int  # ms
    optimizer: str

    @classmethod
    def of(cls, seed: int) -> Mixture:
        rng = random.Random(seed)
        mirrors, kind = rng.choice([1, 1, 2, 3]), rng.choice([*KINDS, "mixed"])
        # Where copies differ nobody knows which is right: another mirror does not heal damage.
        repaired = mirrors == 1 or kind in DAMAGES
        return cls(
            seed,
            LIBRARIES[seed % len(LIBRARIES)],
            kind,
            10 ** rng.uniform(-5, math.log10(0.2)),
            mirrors,
            "repair" if repaired else rng.choice(["repair", "mirror"]),
            rng.choice([2, 3]),
            rng.choice([0, 40, 300]),
            rng.choice(["SGD", "Adam", "AdamW"]),
        )

    @property
    def damages(self) -> bool:
        return self.kind in DAMAGES

    def run(self) -> Outcome:
        job = job_over(self.library, self.seed, self.world)
        training = Training(job, self.optimizer)
        for _ in range(STEPS):
            training.step(self.pause)

        faults = [faults_of(self.kind, self.rate, self.seed + 1000 * n) for n in range(self.mirrors)]
        if self.healed == "mirror":
            faults[-1] = Faults()
        shown = [ports(job, ((1 + n) % self.world, "both")) for n in range(self.mirrors)]
        return Soak(
            training, shown, faults, seed=self.seed, repair=self.healed == "repair", scrub=self.damages,
            damaged=self.damages,
        ).run()  # fmt: skip


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], list[Outcome]]]:
    """Outcomes by library and kind of fault; printed at the end."""
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    yield found
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    form = "{:12} {:10} {:>5} {:>9} {:>8} {:>9} {:>14} {:>12} {:>6}"
    head = "library", "fault", "runs", "frames", "hit", "unknown", "steps to mend", "asked bytes", "wrong"
    lines = [form.format(*head)]
    for (library, kind), outcomes in sorted(found.items()):
        mending = sorted(steps for outcome in outcomes for steps in outcome.mending)
        lines.append(form.format(
            library, kind, len(outcomes), sum(o.frames for o in outcomes), sum(o.hit for o in outcomes),
            max(o.worst for o in outcomes), f"{mending[len(mending) // 2]} ({mending[-1]})" if mending else "-",
            sum(o.asked for o in outcomes), sum(o.ever_wrong > 0 for o in outcomes),
        ))  # fmt: skip
    lines.append(f"{sum(map(len, found.values()))} runs; unknown: elements at worst; steps to mend: median (most); "
                 "wrong: runs in which a damaged frame alone gave a value, until the scrub found it")  # fmt: skip
    reporter.write_line("\n" + "\n".join(lines))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, RUNS, PER_TEST))
def test_what_is_called_known_is_the_trainers(
    first: int, table: dict[tuple[str, str], list[Outcome]]
) -> None:
    """Checked after every change of the state. In the end everything is known and right: by repair, by another mirror,
    or, where one damaged frame alone gave a value, by the scrub, which raises an alarm, or as a repair came first."""
    for seed in range(first, first + PER_TEST):
        mixture = Mixture.of(seed)
        try:
            outcome = mixture.run()
        except AssertionError as error:
            raise AssertionError(f"{mixture}: {error}") from error
        table[mixture.library, mixture.kind].append(outcome)
        assert outcome.frozen is None, (mixture, outcome)
        assert outcome.missing == 0 and outcome.wrong == 0, (mixture, outcome)
        assert len(outcome.behind) == STEPS, (mixture, outcome)
        assert not outcome.ever_wrong or outcome.alarms or outcome.worst, (mixture, outcome)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rate", "least"), [(1e-5, 0.999), (1e-4, 0.99), (1e-3, 0.95)])
@pytest.mark.parametrize("library", ["gloo", "ring-simple", "tree-ll128"])
def test_availability(library: str, rate: float, least: float, request: pytest.FixtureRequest) -> None:
    """One port mirrored both ways, with repair: at a random moment of (almost) any step a failure costs one step."""
    lags: Counter[int] = Counter()
    frames = hit = 0
    for seed in range(4):
        training = Training(job_over(library, seed, 3, (9000, 7000, 15000)), ("SGD", "AdamW")[seed % 2])
        for _ in range(125):
            training.step(300)
        outcome = Soak(training, [ports(training.job, (1, "both"))], [Faults(drop=rate, seed=seed)], seed=seed).run()
        lags.update(outcome.lags)
        frames, hit = frames + outcome.frames, hit + outcome.hit
    share = sum(count for lag, count in lags.items() if lag <= 1) / lags.total()
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        steps = ", ".join(f"{lag}: {lags[lag]}" for lag in sorted(lags))
        reporter.write_line(f"\n{library}, loss {rate:g} ({hit} of {frames} frames): {share:.2%} ({steps})")
    assert share >= least
