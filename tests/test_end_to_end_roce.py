"""Jobs over NCCL in the lab: what it would send, mirrored by the kernel, followed bit for bit.

`make test` runs a selection in which each algorithm, protocol, kind of release, shape and channel count occurs, over
RoCE and over sockets; `make test-all` the whole matrix over RoCE.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from end_to_end import STEPS, Job, train, train_many

PROTOCOLS = {"ring": ("ll", "ll128", "simple"), "tree": ("ll", "ll128", "simple"), "nvlstree": ("simple",)}
VERSIONS = ("2.18.6", "2.19.4", "2.20.5", "2.22.3", "2.23.4", "2.26.2", "2.28.9", "2.30.7")
SHAPES = ((2, 1), (4, 1), (8, 1), (8, 4))  # nodes, GPUs a node

AROUND = ("accumulate", "accumulate_nosync", "same_size", "skipped")
NO_LOG = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "train0"}
"""The set-up traffic, which passes the mirror with these, is all that tells the rings."""


def settings(algorithm: str | None, protocol: str | None, version: str, nodes: int, gpus: int, channels: int,
             rails: int, mtu: int, **more: Any) -> dict[str, Any]:  # fmt: skip
    """The lab of a job, as fields of LabConfig."""
    return {
        "transport": "roce", "ranks": nodes * gpus, "ranks_per_node": gpus, "algorithm": algorithm,
        "protocol": protocol, "nccl_version": version, "channels": channels, "rails": rails, "mtu": mtu, **more,
    }  # fmt: skip


def sockets(algorithm: str, protocol: str, version: str, nodes: int, channels: int, threads: int) -> dict[str, Any]:
    return settings(algorithm, protocol, version, nodes, 1, channels, 1, 0, transport="socket",
                    env={"NCCL_SOCKET_NTHREADS": str(threads)})  # fmt: skip


# What `make test` runs: each line is a process group and the cases that it trains; each shape is one launch.
SELECTION: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "2 nodes": [
        (("sgd", "gpt"), sockets("ring", "simple", "2.26.2", 2, 2, 0)),
        (("sgd", "gpt"), settings("ring", "simple", "2.28.9", 2, 1, 1, 1, 1024)),
        (("sgd", "gpt"), settings(None, None, "2.28.9", 2, 1, 2, 1, 4096)),
        (AROUND, settings("ring", "simple", "2.18.6", 2, 1, 2, 1, 4096)),
    ],
    "3 nodes": [
        (("adam", "static"), settings("tree", "simple", "2.30.7", 3, 1, 4, 1, 1024)),
        (("adam", "mixed"), sockets("tree", "ll", "2.28.9", 3, 1, 2)),
    ],
    "4 nodes": [
        (("adam", "mixed"), settings("ring", "ll", "2.19.4", 4, 1, 2, 1, 1024)),
        (("sgd", "gpt"), settings("tree", "ll128", "2.22.3", 4, 1, 2, 1, 4096)),
        (("sgd", "gpt"), settings("ring", "ll", "2.19.4", 4, 1, 2, 1, 1024, env=NO_LOG)),
    ],
    "2 nodes of 2": [
        (("sgd", "gpt"), settings("nvlstree", "simple", "2.26.2", 2, 2, 2, 2, 4096)),
        (("sgd", "gpt"), settings("tree", "simple", "2.22.3", 2, 2, 2, 1, 1024, env=NO_LOG)),
    ],
}


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.slow) if shape == "4 nodes" else shape for shape in SELECTION]
)
def test_jobs_over_nccl_are_followed_bit_for_bit(shape: str, tmp_path: Path) -> None:
    """Over RoCE and over sockets, with NCCL's log and without: a problem's first word is its job."""
    jobs = [
        (f"{case}-{number}", case, fields) for number, (cases, fields) in enumerate(SELECTION[shape]) for case in cases
    ]
    largest = max((fields for *_, fields in jobs), key=lambda fields: fields["rails"])
    problems = train_many(
        tmp_path, jobs, steps=STEPS, transport="roce", ranks=largest["ranks"],
        ranks_per_node=largest["ranks_per_node"], rails=largest["rails"], mtu=4096,
    )  # fmt: skip
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_group_calls_around_the_buckets_are_followed_right_or_not_claimed(tmp_path: Path) -> None:
    outcome = train(
        tmp_path, ("sgd", "coalesced"), until_told=True, transport="roce", ranks=2, channels=2, mtu=4096,
        nccl_version="2.28.9", algorithm="ring", protocol="simple",
    )  # fmt: skip
    outcome.check(("sgd",))
    assert outcome.steps("coalesced") in (list(range(1, n + 1)) for n in range(STEPS + 1))
    assert outcome.steps("coalesced")[-1:] == [STEPS] or outcome.statuses["coalesced"]["frozen"] is not None


def chunks() -> dict[tuple[int, int, str, str], list[Job]]:
    """By nodes, GPUs a node, algorithm and protocol: a job per release and kind of release."""
    found: dict[tuple[int, int, str, str], list[Job]] = {}
    for (nodes, gpus), (algorithm, protocols) in itertools.product(SHAPES, PROTOCOLS.items()):
        for protocol, version in itertools.product(protocols, VERSIONS):
            for channels, mtu in ((1, 1024), (4, 4096)):
                case = "gpt_short" if gpus > 1 else "wide" if (nodes, channels) == (2, 1) else "gpt_tall"
                found.setdefault((nodes, gpus, algorithm, protocol), []).append(
                    many(case, algorithm, protocol, version, nodes, gpus, channels, min(gpus, 2), mtu)
                )
    found[4, 2, "ring", "ll128"] = [many("gpt", "ring", "ll128", "2.23.4", 4, 2, 2, 2, 4096)]
    found[2, 2, "tree", "ll"] = [many("gpt", "tree", "ll", "2.20.5", 2, 2, 2, 1, 4096)]
    return found


def many(case: str, algorithm: str, protocol: str, version: str, nodes: int, gpus: int, channels: int, rails: int,
         mtu: int) -> Job:  # fmt: skip
    fields = settings(algorithm, protocol, version, nodes, gpus, channels, rails, mtu)
    return f"{case}-{version}-{channels}", case, fields


CHUNKS = chunks()
LARGE = 16
"""Ranks from which on jobs are short: each of them trains on the same two cores."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: "-".join(map(str, chunk)))
def test_the_whole_matrix(chunk: tuple[int, int, str, str], tmp_path: Path) -> None:
    jobs = CHUNKS[chunk]
    nodes, gpus = chunk[:2]
    rails = max(fields["rails"] for _, _, fields in jobs)
    problems = train_many(
        tmp_path, jobs, steps=4 if nodes * gpus >= LARGE else STEPS, transport="roce", ranks=nodes * gpus,
        ranks_per_node=gpus, rails=rails, mtu=4096, daemon_args=("--ring-mib", "512"),
    )  # fmt: skip
    assert not problems, "\n".join(problems)
