"""`flowcheck plan`: read the question, print the plan."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import click

from flowcheck.plan import Figure, Link, Plan, plan
from flowcheck.plan_cluster import ITEMSIZE, SLOTS, Cluster

COUNT = click.IntRange(min=1)
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Speed(click.ParamType):
    """`400g`, `1.6t`: bit/s."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(g|t)", str(value).lower())
        if not found or not float(found[1]):
            self.fail(f"{value}: write a speed such as 400g (Gbit/s)", param, ctx)
        return float(found[1]) * (1e9 if found[2] == "g" else 1e12)


@click.command("plan")
@click.option("--params", required=True, type=click.FloatRange(min=1), metavar="N", help="Parameters, such as 7e9.")
@click.option("--dtype", type=click.Choice(list(ITEMSIZE)), default="bf16", show_default=True, help="Parameters.")
@click.option(
    "--reduce-dtype",
    type=click.Choice(list(ITEMSIZE)),
    default="fp32",
    show_default=True,
    help="Gradients on the wire.",
)
@click.option("--optimizer", type=click.Choice(list(SLOTS)), default="adamw", show_default=True)
@click.option("--nodes", required=True, type=COUNT, metavar="N", help="GPU nodes.")
@click.option("--gpus-per-node", type=COUNT, default=8, show_default=True)
@click.option("--tp", type=COUNT, default=1, show_default=True, help="Tensor-parallel ranks (innermost).")
@click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline stages (outermost).")
@click.option("--shard", type=COUNT, default=1, show_default=True, help="Ranks that share one copy (FSDP).")
@click.option("--replicate", type=COUNT, metavar="N", help="Copies that all-reduce.  [default: what fills the GPUs]")
@click.option("--rails", type=COUNT, default=1, show_default=True, help="Training NICs per node, each with a leaf.")
@click.option("--link", type=Speed(), default="400g", show_default=True, help="Speed of a training NIC.")
@click.option("--monitor-speed", type=Speed(), default="400g", show_default=True, help="Speed of a monitor port.")
@click.option("--mirror-sessions", type=COUNT, default=4, show_default=True, help="Sessions that a leaf has.")
@click.option("--step-seconds", required=True, type=click.FloatRange(min=0.001), metavar="S", help="Of one step.")
@click.option("--nodes-per-leaf", type=COUNT, metavar="N", help="Nodes on one leaf of a rail.  [default: all]")
@click.option("--monitor-ports", type=COUNT, default=2, show_default=True, help="Ports of a checkpoint node.")
@click.option("--node-memory", type=COUNT, default=1024, show_default=True, metavar="GIB", help="Of a checkpoint node.")
@click.option("--node-cores", type=COUNT, default=32, show_default=True, help="Of a checkpoint node.")
@click.option("--restore-link", type=Speed(), default="100g", show_default=True, help="Service link of that node.")
@click.option(
    "--storage-rate",
    type=click.FloatRange(min=0.001),
    default=10.0,
    show_default=True,
    metavar="GB/S",
    help="Shared storage that async checkpoints go to.",
)
@click.option(
    "--node-cost",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Price of a checkpoint node in GPU nodes.",
)
@click.option(
    "--mtbf-hours",
    type=click.FloatRange(min=0.01),
    metavar="H",
    help="Time between failures.  [default: estimated]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan_command(as_json: bool, **asked: Any) -> int:
    """Which links to mirror, what it loads, and what it saves; every figure says how it was computed.

    Exit status 0: deployable. 1: NOT DEPLOYABLE, with the reasons. 2: the options contradict each other.
    """
    made = plan(_cluster(**asked))
    click.echo(json.dumps(as_dict(made)) if as_json else as_text(made))
    return 0 if made.deployable else 1


def _cluster(
    *, replicate: int | None, monitor_speed: float, nodes_per_leaf: int | None, node_memory: int, storage_rate: float,
    mtbf_hours: float | None, **same: Any,
) -> Cluster:  # fmt: skip
    gpus = same["nodes"] * same["gpus_per_node"]
    return Cluster(
        replicate=replicate or max(1, gpus // (same["tp"] * same["pp"] * same["shard"])),
        monitor=monitor_speed,
        nodes_per_leaf=nodes_per_leaf or same["nodes"],
        node_memory=node_memory * 2.0**30,
        storage_rate=storage_rate * 1e9,
        mtbf_seconds=None if mtbf_hours is None else mtbf_hours * 3600,
        **same,
    )


def as_dict(made: Plan) -> dict[str, Any]:
    """The plan for scripts. A break-even that is infinite is null."""
    rails = list(range(made.cluster.rails))
    return {
        "deployable": made.deployable,
        "reasons": made.reasons,
        "notes": made.notes,
        "figures": {
            figure.key: {
                "value": None if math.isinf(figure.value) else figure.value, "unit": figure.unit, "how": figure.how
            }
            for figure in made.figures
        },
        "links": [
            {
                "node": link.node, "rails": rails, "direction": link.direction,
                "stage": link.stage, "block": link.block, "pod": link.pod,
            }
            for link in made.links
        ],
    }  # fmt: skip


def as_text(made: Plan) -> str:
    """The plan for people."""
    lines = ["DEPLOYABLE"] if made.deployable else [f"NOT DEPLOYABLE: {reason}" for reason in made.reasons]
    if made.links:
        lines += ["", "Mirror (out: switch to node, in: node to switch; nodes counted in rank order from 0)"]
        lines += _link_lines(made.links, made.cluster)
    lines += ["", "Figures"]
    width = max(len(figure.label) for figure in made.figures)
    for figure in made.figures:
        lines.append(f"  {figure.label:<{width}}  {shown(figure)}")
        lines += textwrap.wrap(figure.how, 112, initial_indent="      = ", subsequent_indent="        ")
    if made.notes:
        lines += ["", "Notes"]
        for note in made.notes:
            lines += textwrap.wrap(note, 116, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def _link_lines(links: Iterable[Link], cluster: Cluster) -> list[str]:
    parts: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        parts.setdefault((link.stage, link.block), []).append(link)
    rails = "the port" if cluster.rails == 1 else f"rails 0-{cluster.rails - 1}"
    lines = []
    for (stage, block), chosen in parts.items():
        nodes = " and ".join(str(link.node) for link in chosen)
        where = f"  node{'s' if len(chosen) > 1 else ''} {nodes}: {rails}, {chosen[0].direction}"
        part = [f"stage {stage}"] * (cluster.pp > 1) + [f"block {block}"] * (cluster.blocks > 1)
        lines.append(where + (f"  ({', '.join(part)})" if part else ""))
    return lines


def shown(figure: Figure) -> str:
    """A figure's value with its unit."""
    value = figure.value
    if figure.unit == "count":
        return f"{value:,.0f}"
    if figure.unit == "bytes":
        power = min(int(math.log(max(value, 1), 1024)), len(BINARY) - 1)
        scaled = value / 1024**power
        return f"{scaled:.0f} {BINARY[power]}" if scaled >= 100 else f"{scaled:.3g} {BINARY[power]}"
    if figure.unit == "bit/s":
        return f"{value / 1e9:.3g} Gbit/s"
    if figure.unit == "share":
        return f"{value:.3%}"
    if math.isinf(value):
        return "any"
    if not value:
        return "none"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (120.0, "min"), (1.0, "s")):
        if value >= size:
            return f"{value / (60.0 if unit == 'min' else size):.3g} {unit}"
    return f"{value * 1000:.3g} ms"
