"""The plan: three published clusters, every figure against hand arithmetic, every reason not to deploy."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.cli import Commands
from flowcheck.plan import CAPTURE_RATE, FRAMING, RING_BYTES, Plan, choose_links, plan
from flowcheck.plan_cluster import Cluster
from flowcheck.plan_command import as_dict, plan_command
from flowcheck.plan_savings import savings

# The example of the README: 512 GPUs, sharded inside the node, replicated across 64 nodes.
HYBRID = {
    "params": 7e9, "dtype": "bf16", "reduce_dtype": "fp32", "optimizer": "adamw", "nodes": 64, "gpus_per_node": 8,
    "tp": 1, "pp": 1, "shard": 8, "replicate": 64, "rails": 8, "link": 400e9, "monitor": 400e9, "mirror_sessions": 4,
    "step_seconds": 5.0, "nodes_per_leaf": 64,
}  # fmt: skip


def planned(**changed: object) -> Plan:
    asked = {**HYBRID, **changed}
    if "nodes_per_leaf" not in changed:
        asked["nodes_per_leaf"] = asked["nodes"]
    return plan(Cluster(**asked))  # type: ignore[arg-type]


def run(text: str) -> Result:
    group = Commands("flowcheck", commands={"plan": plan_command})
    return CliRunner().invoke(group, ["plan", *text.split()])


# Published clusters


def test_resnet50_in_an_hour_is_deployable_with_one_mirrored_port() -> None:
    """Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (arXiv 1706.02677): ResNet-50 (25.6 M
    parameters, fp32, SGD with momentum), 256 GPUs in 32 servers of 8, one 50 Gbit/s Ethernet port each, 90 epochs of
    1.28 M images in batches of 8192 in an hour: 14,063 steps, 0.256 s each. Plain data parallelism.
    """
    done = run(
        "--params 25.6e6 --dtype fp32 --reduce-dtype fp32 --optimizer momentum --nodes 32 --replicate 256 --link 50g "
        "--monitor-speed 100g --step-seconds 0.256 --json"
    )
    assert done.exit_code == 0
    made = json.loads(done.output)
    assert made["deployable"] and made["reasons"] == []
    assert made["links"] == [{"node": 1, "rails": [0], "direction": "both", "stage": 0, "block": 0, "pod": 0}]
    value = {key: figure["value"] for key, figure in made["figures"].items()}
    assert value["state_bytes"] == 25.6e6 * (4 + 4)
    assert value["rail_bytes"] == pytest.approx(25.6e6 * 4 * 2 * 255 / 256 * 1.088, rel=1e-3)
    assert value["direction_mean"] == pytest.approx(6.94e9, rel=1e-2)
    assert (value["monitor_ports"], value["sessions_per_leaf"], value["checkpoint_nodes"]) == (1, 1, 1)
    assert value["monitor_peak"] == 100e9


def test_llama2_7b_hybrid_sharded_is_deployable_over_four_rails() -> None:
    """IBM and PyTorch, "Maximizing training throughput using PyTorch FSDP" (research.ibm.com/blog/pytorch-fsdp) and
    github.com/foundation-model-stack/fms-fsdp: Llama 2 7B, 128 A100 in 16 nodes, hybrid sharding (8 inside the node,
    16 replicas), fp32 parameters with bf16 gradients, batch 2 x 4096 tokens a GPU at 3760 tokens/s: 2.18 s a step. The
    nodes' 400 Gbit/s of Ethernet are taken as four 100 Gbit/s ports.
    """
    made = planned(
        params=6.74e9, dtype="fp32", reduce_dtype="bf16", nodes=16, replicate=16, rails=4, link=100e9, monitor=100e9,
        step_seconds=2 * 4096 / 3760,
    )  # fmt: skip
    assert made.deployable, made.reasons
    assert [(link.node, link.direction) for link in made.links] == [(1, "out"), (2, "out")]
    assert made.value("state_bytes") == 6.74e9 * (4 + 2 * 4)
    assert made.value("rail_bytes") == pytest.approx(6.74e9 * 2 * 2 * 15 / 16 / 4 * FRAMING)
    assert made.value("direction_mean") < 0.3 * 100e9
    assert (made.value("monitor_ports"), made.value("sessions_per_leaf")) == (8, 2)
    assert made.value("checkpoint_nodes") == 4
    assert any("DistributedDataParallel only" in note for note in made.notes)


def test_llama3_405b_is_not_deployable() -> None:
    """Meta, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 4: 405 B parameters on 16,384 H100 over RoCE, a
    400 Gbit/s link per GPU, TP 8, PP 16, FSDP over the 128 data-parallel ranks: gradients are reduce-scattered.
    """
    done = run(
        "--params 405e9 --nodes 2048 --tp 8 --pp 16 --shard 128 --replicate 1 --rails 8 --link 400g --step-seconds 6.6"
    )
    assert done.exit_code == 1
    first = done.output.splitlines()[0]
    assert first.startswith("NOT DEPLOYABLE: gradients are sharded over all 128") and "reduce-scatter" in first


# Figures


def test_figures_of_the_example() -> None:
    made = planned()
    assert made.deployable
    share = 7e9 / 8
    assert made.value("state_bytes") == 7e9 * (2 + 4 + 2 * 4)
    assert made.value("reduce_groups") == 8
    assert made.value("rail_bytes") == pytest.approx(share * 4 * 2 * 63 / 64 * FRAMING)
    assert pytest.approx(16 / 15 * (4096 + 82) / 4096) == FRAMING
    assert made.value("direction_mean") == pytest.approx(made.value("rail_bytes") * 8 / 5)
    assert made.value("direction_peak") == 400e9
    assert made.value("source_ports") == 2 * 8
    assert made.value("sources_per_leaf") == made.value("sessions_per_leaf") == 2
    assert made.value("checkpoint_nodes") == 8
    ring = made.value("rail_bytes") * (1 - CAPTURE_RATE / 400e9)
    assert made.value("ring_bytes") == pytest.approx(ring)
    assert made.value("node_memory") == pytest.approx(2 * share * 14 + 2 * share * 4 + 2 * ring)
    assert made.value("node_disk") == 4 * share * 14
    assert made.value("restore_seconds") == pytest.approx(share * 14 * 8 / 100e9)
    assert made.value("restore_disk_seconds") == pytest.approx(share * 14 / 2e9)


def test_every_figure_says_how_it_was_computed() -> None:
    for made in (planned(), planned(monitor=800e9), planned(tp=8, pp=4, shard=2, replicate=8, nodes_per_leaf=8)):
        assert made.figures and all(len(figure.how) >= 5 for figure in made.figures)
        assert len({figure.key for figure in made.figures}) == len(made.figures)
        assert all(math.isfinite(f.value) and f.value > 0 for f in made.figures if f.key != "break_even_mtbf")


def test_a_fast_monitor_port_takes_both_directions_of_one_node() -> None:
    made = planned(monitor=800e9)
    assert [(link.node, link.direction) for link in made.links] == [(1, "both")]
    assert (made.value("source_ports"), made.value("monitor_ports"), made.value("monitor_peak")) == (8, 8, 800e9)
    assert made.value("monitor_mean") == pytest.approx(2 * made.value("direction_mean"))


def test_plain_data_parallelism_spreads_one_group_over_all_rails() -> None:
    made = planned(params=1e9, shard=1, replicate=512)
    assert made.value("reduce_groups") == 1
    assert made.value("rail_bytes") == pytest.approx(1e9 * 4 * 2 * 511 / 512 / 8 * FRAMING)


def test_replicas_larger_than_a_node_carry_sharding_traffic_too() -> None:
    made = planned(shard=32, replicate=16)
    assert made.cluster.blocks == 4 and len(made.links) == 4 * 2
    assert made.value("shard_bytes") == pytest.approx(7e9 * (2 * 2 + 4) * 31 / 32 / 8 * FRAMING)
    total = made.value("rail_bytes") + made.value("shard_bytes")
    assert made.value("direction_mean") == pytest.approx(total * 8 / 5)
    assert "shard_bytes" not in {figure.key for figure in planned().figures}


def test_small_jobs_keep_the_default_ring() -> None:
    assert planned(params=1e6).value("ring_bytes") == RING_BYTES


# What does not fit

IMPOSSIBLE = {
    "no data parallelism": {"nodes": 1, "tp": 8, "shard": 1, "replicate": 1},
    "all GPUs are in one node": {"nodes": 1, "replicate": 1},
    "reduce-scatter": {"shard": 512, "replicate": 1},
    "stays on NVLink": {"tp": 1, "pp": 64, "shard": 1, "replicate": 8},
    "slower than one direction": {"monitor": 200e9},
    "inputs contradict": {"step_seconds": 0.1},
    "8 mirror sessions are needed on one leaf, it has 4": {"pp": 4, "replicate": 16},
    "give it 2 ports": {"monitor_ports": 1},
    "give it more": {"node_memory": 20 * 2**30},
    "more cores": {"node_cores": 2, "params": 40e9},
    "on average": {"step_seconds": 0.5, "params": 6e9},
    "a capture ring holds 64 GiB at most": {"params": 200e9, "step_seconds": 60.0},
}


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_not_deployable_says_why(said: str) -> None:
    made = planned(**IMPOSSIBLE[said])
    assert not made.deployable
    assert any(said in reason for reason in made.reasons), made.reasons
    assert all("\n" not in reason for reason in made.reasons)


def test_sessions_fit_when_stages_lie_on_different_leaves() -> None:
    made = planned(pp=4, replicate=16, nodes_per_leaf=16)
    assert made.deployable
    assert made.value("sessions_per_leaf") == 2
    assert {link.pod for link in made.links} == {0, 1, 2, 3}


CONTRADICTIONS = {
    "--replicate 63": "must be equal",
    "--nodes 63": "must be equal",
    "--tp 3 --shard 1 --nodes 3 --replicate 8": "neither fill nor divide",
    "--tp 2 --shard 1 --nodes 3 --pp 2 --replicate 6": "pipeline stages would share nodes",
    "--rails 3": "cannot be shared evenly",
    "--link fast": "400g",
    "--link 0g": "400g",
    "--dtype fp8": "fp8",
    "--step-seconds 0": "step-seconds",
}


@pytest.mark.parametrize("options", CONTRADICTIONS)
def test_contradictions_are_usage_errors(options: str) -> None:
    done = run(f"--params 7e9 --nodes 64 --shard 8 --replicate 64 --rails 8 --step-seconds 5 {options}")
    assert done.exit_code == 2, done.output
    assert CONTRADICTIONS[options] in done.stderr and "Traceback" not in done.stderr


# Links


@settings(deadline=None, max_examples=60)
@given(
    ring=st.integers(2, 40),
    blocks=st.integers(1, 3),
    stages=st.integers(1, 4),
    leaf=st.integers(1, 50),
    both=st.booleans(),
)
def test_links_show_every_byte_of_every_part(ring: int, blocks: int, stages: int, leaf: int, both: bool) -> None:
    cluster = Cluster(
        **{
            **HYBRID, "nodes": stages * blocks * ring, "pp": stages, "shard": 8 * blocks, "replicate": ring,
            "nodes_per_leaf": leaf,
        }  # type: ignore[arg-type]
    )  # fmt: skip
    links = choose_links(cluster, both)
    for stage in range(stages):
        for block in range(blocks):
            # By the rank order: rank = s + shard * (r + replicate * p), node = rank // 8.
            part = [(8 * block + 8 * blocks * (r + ring * stage)) // 8 for r in range(ring)]
            nodes = [link.node for link in links if (link.stage, link.block) == (stage, block)]
            assert set(nodes) <= set(part) and len(set(nodes)) == len(nodes) == (1 if both else 2)
            roots = {part[0], part[-1] if ring % 2 == 0 else part[1]}
            assert ring == 2 or set(nodes) - roots, "no node that receives every byte of both trees"
    assert all(link.pod == link.node // leaf for link in links)


# Savings


def test_break_even_is_where_both_losses_are_equal() -> None:
    asked = {"state": 98e9, "shards": 8, "gpus": 512, "step": 5.0, "storage_rate": 10e9, "hardware": 0.0125}
    found = savings(**asked, mtbf=None)  # type: ignore[arg-type]
    assert found.stall == 98e9 / 8 / 20e9 and found.write == 9.8
    assert found.mtbf == pytest.approx(54 * 86400 * 16384 / 419 / 512)
    at = savings(**asked, mtbf=found.break_even)  # type: ignore[arg-type]
    assert at.checkpoints == pytest.approx(at.flowcheck, rel=1e-6)
    interval = max(math.sqrt(2 * found.stall * found.break_even), found.write)
    lost = found.stall / interval + (interval / 2 + found.write) / found.break_even
    assert at.checkpoints == pytest.approx(lost)
    assert (
        savings(**asked, mtbf=found.break_even / 2).flowcheck < savings(**asked, mtbf=found.break_even / 2).checkpoints
    )  # type: ignore[arg-type]
    assert (
        savings(**asked, mtbf=found.break_even * 2).flowcheck > savings(**asked, mtbf=found.break_even * 2).checkpoints
    )  # type: ignore[arg-type]


def test_break_even_at_its_ends() -> None:
    free = savings(state=98e9, shards=8, gpus=512, step=5.0, storage_rate=10e9, hardware=0.0, mtbf=3600.0)
    assert math.isinf(free.break_even) and free.flowcheck == pytest.approx(5 / 3600)
    never = savings(state=98e9, shards=8, gpus=512, step=5.0, storage_rate=10e9, hardware=2.0, mtbf=3600.0)
    assert never.break_even == 0
    assert as_dict(planned(node_cost=0.0))["figures"]["break_even_mtbf"]["value"] is None


# The command


def test_text_names_links_figures_and_how() -> None:
    done = run(
        "--params 7e9 --dtype bf16 --reduce-dtype fp32 --optimizer adamw --nodes 64 --gpus-per-node 8 --tp 1 --pp 1 "
        "--shard 8 --replicate 64 --rails 8 --link 400g --monitor-speed 400g --mirror-sessions 4 --step-seconds 5"
    )
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "DEPLOYABLE"
    assert "  nodes 1 and 2: rails 0-7, out" in lines
    labels = [
        number
        for number, line in enumerate(lines)
        if line.startswith("  ") and lines[number + 1 :][:1] and lines[number + 1].startswith("      = ")
    ]
    assert len(labels) == len(planned().figures)
    assert "12 Gbit/s" in done.output and "91.3 GiB" in done.output
    assert max(len(line) for line in lines) <= 120


def test_a_plan_that_does_not_fit_still_shows_its_figures() -> None:
    done = run("--params 7e9 --nodes 64 --shard 8 --rails 8 --monitor-speed 200g --step-seconds 5")
    assert done.exit_code == 1
    assert done.output.startswith("NOT DEPLOYABLE: a monitor port of 200 Gbit/s")
    assert "mean load of a mirrored direction" in done.output


def test_replicate_defaults_to_what_fills_the_gpus_and_mtbf_is_taken() -> None:
    done = run("--params 7e9 --nodes 64 --shard 8 --rails 8 --step-seconds 5 --mtbf-hours 2 --json")
    made = json.loads(done.output)
    assert "64 ranks" in made["figures"]["reduce_groups"]["how"]
    assert made["figures"]["mtbf_seconds"] == {"value": 7200.0, "unit": "s", "how": "given"}
