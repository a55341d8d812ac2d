"""What flowcheck costs the trainers: iteration times of a real DDP job with it, without it, and with other checkpoints.

    python benchmarks/overhead.py [--quick] [--json]

Two labs stand side by side, one with a mirrored port and a daemon, one with neither, and take turns: only one trains
at a time, in blocks of iterations whose order rotates, so that drift of the machine meets all modes alike. Trainers and
daemon keep to different cores. docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import zmq
from asker import ASKS, Asker
from measure import load, machine, options, percentile, spread, table, tail

from flowcheck.errors import FlowcheckError
from flowcheck.lab import Lab, LabConfig, Mirror

SCRIPT = Path(__file__).with_name("switching_job.py")
RANKS = 2
PLAIN, WATCHED = "plain", "watched"
# Mode -> the lab it runs in and what the script is asked for. "bare again" is the same as "bare": their ratio is noise.
MODES = {
    "bare": (PLAIN, "bare"),
    "flowcheck": (WATCHED, "flowcheck"),
    "bare again": (PLAIN, "bare"),
    "hook only": (PLAIN, "hook only"),
    "mirror only": (WATCHED, "bare"),
    "agent idle": (PLAIN, "agent-idle"),
    "repair at 1 %": (PLAIN, "repair"),
    "scrub at 0.1 %": (PLAIN, "scrub"),
    "torch.save": (PLAIN, "torch.save"),
    "async_save": (PLAIN, "async_save"),
}
DEADLINE = 300.0
HOOK_CALLS = 500

Timed = tuple[float, float]  # seconds: wall clock, CPU of the thread


class Site:
    """One lab with its trainers waiting for blocks to train."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self._asked = 0

    def ask(self, mode: str, warm: int = 0, steps: int = 0) -> None:
        note = self.folder / "ask"
        note.write_text(json.dumps({"mode": mode, "warm": warm, "steps": steps}))
        os.replace(note, self.folder / f"ask-{self._asked}.json")
        self._asked += 1

    def block(self, mode: str, warm: int, steps: int) -> dict[str, Any]:
        """Have a block trained; the script's answer. Raises FlowcheckError when a rank ends or takes too long."""
        self.ask(mode, warm, steps)
        answer = self.folder / f"answer-{self._asked - 1}.json"
        deadline = time.monotonic() + DEADLINE
        while not answer.exists():
            with suppress(TimeoutError):
                status = self.lab.wait(0.1)
                raise FlowcheckError(f"the trainers ended with status {status}")
            if time.monotonic() > deadline:
                raise FlowcheckError(f"no block within {DEADLINE:.0f} s")
        return json.loads(answer.read_text())


def open_site(stack: ExitStack, folder: Path, name: str, cores: list[int], size: tuple[int, int, int]) -> Site:
    """A lab: the last of the cores is the daemon's, the others are the trainers'."""
    folder = folder / name
    folder.mkdir()
    watched = name == WATCHED
    config = LabConfig(
        command=(str(SCRIPT), str(folder), *map(str, size)),
        ranks=RANKS,
        mirrors=(Mirror(1, "both"),) if watched else (),
        journal=str(folder / "journal.jsonl") if watched else None,
        daemon=None if watched else (),
        trainer_cpus=tuple(cores[:-1]),
        daemon_cpus=(cores[-1],),
    )
    output = stack.enter_context((folder / "output").open("wb"))
    lab = stack.enter_context(Lab(config, stdout=output.fileno(), stderr=output.fileno()))
    lab.train()
    return Site(lab, folder)


def proven(site: Site, blocks: list[dict[str, Any]]) -> str | None:
    """What the daemon did not follow of the flowcheck blocks; None if it has every step, their last ones to the bit."""
    lines = [json.loads(line) for line in (site.folder / "journal.jsonl").read_text().splitlines()]
    for epoch, block in enumerate(blocks, 1):
        mine = {line["step"]: line for line in lines if line["epoch"] == epoch}
        missing = [step for step in range(block["first"], block["step"] + 1) if step not in mine]
        if missing:
            return f"steps {missing[0]}..{missing[-1]} of {block['first']}..{block['step']} were not followed"
        if mine[block["step"]]["digest"] != block["digest"]:
            return f"step {block['step']} differs from the trainer's"
    return None


def run(folder: Path, rounds: int, warm: int, steps: int, size: tuple[int, int, int]) -> dict[str, Any]:
    """Train all blocks. Seconds: {"rounds": per round {mode: times}, "cpu": the same of the CPU that all trainers used
    per iteration, "hook" and "hook_alone": (wall, CPU) per call}; "given": pieces and bytes by the agents, per mode."""
    results: list[dict[str, list[float]]] = []
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    hook: list[Timed] = []
    attached: list[dict[str, Any]] = []
    names = list(MODES)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        # Everything but the trainers, this process included, keeps off the trainers' cores.
        os.sched_setaffinity(0, cores[-1:])
        stack.callback(os.sched_setaffinity, 0, cores)
        # Takes the markers of "hook only". They wait in its queue, which costs nobody anything.
        sink = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.ROUTER))
        sink.set(zmq.RCVHWM, 0)
        sink.set(zmq.LINGER, 0)
        sink.bind(f"ipc://{folder / 'sink'}")
        asker = Asker(f"ipc://{folder / 'asker'}")
        stack.enter_context(asker.server)
        sites = {name: open_site(stack, folder, name, cores, size) for name in (PLAIN, WATCHED)}
        done = dict.fromkeys(sites, 0)
        # A first, untimed turn: DDP's rebuilt buckets, allocators, files that exist already.
        for number in range(-1, rounds):
            times = {}
            order = names[number % len(names) :] + names[: number % len(names)]
            for mode in order:
                where, asked = MODES[mode]
                answer = sites[where].block(asked, warm, steps if number >= 0 else 2)
                times[mode] = answer["times"]
                if number >= 0:
                    cpu[mode].append(answer["cpu"])
                if asked == "flowcheck":
                    attached.append({**answer, "first": done[where] + 1})
                    hook += answer["hook"] if number >= 0 else []
                done[where] = answer["step"]
            if number >= 0:
                results.append(times)
        alone = sites[PLAIN].block("hook", 0, HOOK_CALLS)["hook"]
        for site in sites.values():
            site.ask("stop")
            site.lab.wait(60)
            site.lab.finish()
        problem = proven(sites[WATCHED], attached)
    if problem is not None:
        raise FlowcheckError(f"the daemon did not keep up, these figures would mean nothing: {problem}")
    given = {run: asker.given[run] for run, percent in ASKS.items() if percent}
    return {"rounds": results, "cpu": cpu, "hook": hook, "hook_alone": alone[HOOK_CALLS // 10 :], "given": given}


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Per mode: all times, and per round the ratio of medians to that round's bare iterations."""
    found = {}
    for mode in MODES:
        ratios, late = [], []
        for times in rounds:
            bare = times["bare"] if mode == "bare again" else times["bare"] + times["bare again"]
            ratios.append(statistics.median(times[mode]) / statistics.median(bare))
            late.append(percentile(times[mode], 95) / percentile(bare, 95))
        found[mode] = {"times": [t for times in rounds for t in times[mode]], "ratios": ratios, "late_ratios": late}
    return found


def microseconds(calls: list[Timed]) -> str:
    wall, cpu = ([call[i] * 1e6 for call in calls] for i in (0, 1))
    return (
        f"{statistics.median(wall):.0f} us (p95 {percentile(wall, 95):.0f}), of CPU {statistics.median(cpu):.0f} us "
        f"(p95 {percentile(cpu, 95):.0f}), {len(calls)} calls"
    )


def report(
    rounds: list[dict[str, list[float]]],
    cpu: dict[str, list[float]],
    hook: list[Timed],
    hook_alone: list[Timed],
    given: dict[str, tuple[int, int]],
) -> str:
    modes = summary(rounds)
    rows = [
        [
            mode, str(len(found["times"])), f"{statistics.median(found['times']) * 1e3:.1f}",
            f"{percentile(found['times'], 95) * 1e3:.1f}",
            "" if mode == "bare" else spread(found["ratios"]), "" if mode == "bare" else spread(found["late_ratios"]),
            f"{statistics.median(cpu[mode]) * 1e3:.1f}",
        ]
        for mode, found in modes.items()
    ]  # fmt: skip
    head = ["mode", "iterations", "median ms", "p95 ms", "median / bare median", "p95 / bare p95", "CPU ms"]
    return (
        f"Iteration times of rank 0; ratios per round, median (least to greatest of {len(rounds)} rounds);\n"
        "CPU: what all trainers' processes used per iteration, median of the rounds\n"
        f"{table(head, rows)}\n\n"
        f"The step marker's hook inside these iterations: median {microseconds(hook)}\n"
        f"The same hook on an idle core, every 2 ms:       median {microseconds(hook_alone)}\n"
        "Given by the agents, untimed iterations included: "
        + "; ".join(f"{run} {pieces} pieces, {nbytes / 2**20:.0f} MiB" for run, (pieces, nbytes) in given.items())
    )


def main() -> None:
    parser = options(__doc__, "a small model, one round of few iterations")
    parser.add_argument("--rounds", type=int, help="rounds of blocks [default: 8, quick 1]")
    args = parser.parse_args()
    # So that a terminated benchmark takes its labs and its temporary files with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rounds = args.rounds or (1 if args.quick else 8)
    warm, steps, size = (1, 3, (64, 2, 4)) if args.quick else (3, 15, (1024, 4, 64))
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("overhead.py: trainers and daemon need a core each: give it two or more")
    here, busy = machine(), load()
    try:
        with tempfile.TemporaryDirectory(prefix="flowcheck-overhead-") as name:
            try:
                found = run(Path(name), rounds, warm, steps, size)
            except FlowcheckError:
                for output in sorted(Path(name).glob("*/output")):
                    print(f"{output.parent.name} lab:\n{tail(output)}", file=sys.stderr)
                raise
    except FlowcheckError as error:
        sys.exit(f"overhead.py: {error}")
    if args.json:
        print(json.dumps({"machine": here, "load": busy, **found, "modes": summary(found["rounds"])}))
    else:
        print(f"{here}\nload before: {busy:.1f}; {RANKS} trainers\n\n{report(**found)}")


if __name__ == "__main__":
    main()
