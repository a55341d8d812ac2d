"""Whether and how a cluster's training can be followed: links to mirror, loads, checkpoint nodes, and what it saves.

Pure arithmetic over one `Cluster`; docs/planning.md derives the formulas and gives their sources. Every figure carries
the sentence that says how it was computed. Sizes are in bytes, speeds in bit/s, times in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from flowcheck.plan_cluster import ITEMSIZE, SLOTS, Cluster
from flowcheck.plan_savings import Savings, savings

PROTOCOL = 16 / 15
"""LL128 sends 128 bytes for 120 of payload; Simple sends none extra, LL (double) only serves small buckets."""
MTU = 4096
HEADERS = 14 + 20 + 8 + 12 + 4 + 4 + 20
"""Ethernet, IPv4, UDP, BTH, ICRC, FCS, preamble and gap, in bytes on the wire per RoCE packet."""
FRAMING = PROTOCOL * (MTU + HEADERS) / MTU

RING_BYTES = 256 << 20
"""The daemon's default capture ring, one per monitor port."""
CAPTURE_RATE = 90e9
"""bit/s that one core takes out of the capture ring, measured."""
MEASURED_CAPTURE = 28e9
"""bit/s up to which the whole path, kernel included, was measured."""
RING_LIMIT = 64 << 30
"""The largest ring that the daemon takes."""
CORE_RATE = 0.26e9
"""Parameters a second and core of AdamW: half of what two cores reached each, as more were not measured."""
MEMORY_RATE = 200e9 / 28
"""Where memory ends that: 200 GB/s, and AdamW in fp32 reads 16 and writes 12 bytes a parameter."""
APPLY_SHARE = 0.5
"""Part of a step that applying it may take; the rest is for capture and writing."""
DISK_RATE = 2e9
KEPT_SNAPSHOTS = 4
"""The store keeps 3 and writes one more beside them."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the plan. `unit`: count, bytes, bit/s, s, share."""

    key: str
    label: str
    value: float
    unit: str
    how: str


@dataclass(frozen=True, slots=True)
class Link:
    """The ports of one node that are mirrored, all its rails. `direction` as the switch sees it: out is to the node."""

    node: int
    direction: str
    stage: int
    block: int
    pod: int


@dataclass(slots=True)
class Plan:
    """The answer. `reasons` is empty exactly when it is deployable."""

    cluster: Cluster
    figures: list[Figure] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def deployable(self) -> bool:
        return not self.reasons

    def value(self, key: str) -> float:
        return next(figure.value for figure in self.figures if figure.key == key)

    def add(self, key: str, label: str, value: float, unit: str, how: str) -> None:
        self.figures.append(Figure(key, label, value, unit, how))


def counted(number: int, thing: str) -> str:
    """`1 rail`, `8 rails`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def plan(cluster: Cluster) -> Plan:
    """The plan for `cluster`. Never raises: what does not fit is in `reasons`."""
    made = Plan(cluster)
    state = cluster.params * cluster.state_bytes_per_param
    made.add(
        "state_bytes", "state of one step", state, "bytes",
        f"{cluster.params:.4g} parameters x {cluster.state_bytes_per_param} B: "
        f"{ITEMSIZE[cluster.dtype]} {cluster.dtype}"
        + (" + 4 fp32 master copy" if ITEMSIZE[cluster.dtype] < 4 else "")
        + f" + {SLOTS[cluster.optimizer]} x 4 {cluster.optimizer}",
    )  # fmt: skip
    unseen = _never_on_a_wire(cluster)
    if unseen:
        made.reasons.append(unseen)
        return made
    _traffic(made)
    both = _mirror(made)
    nodes = _checkpoint_nodes(made, state, both)
    _add_savings(made, savings(
        state=state, shards=cluster.tp * cluster.pp * cluster.shard, gpus=cluster.gpus, step=cluster.step_seconds,
        storage_rate=cluster.storage_rate, hardware=nodes * cluster.node_cost / cluster.nodes,
        mtbf=cluster.mtbf_seconds,
    ))  # fmt: skip
    _limits_of_this_release(made, nodes)
    return made


def _never_on_a_wire(cluster: Cluster) -> str:
    """Why no finished gradient crosses a link, or nothing."""
    if cluster.replicate == 1 and cluster.shard == 1:
        return "there is no data parallelism (shard 1, replicate 1): no gradient is reduced between ranks"
    if cluster.nodes == 1:
        return "all GPUs are in one node: gradients travel over NVLink, no switch port carries them"
    if cluster.replicate == 1:
        return (
            f"gradients are sharded over all {cluster.shard} data-parallel ranks (replicate 1): reduce-scatter makes "
            "each last addition in the receiver, so no finished gradient is on a wire; shard inside the node and "
            "replicate across nodes (hybrid sharding), or keep ordinary checkpoints"
        )
    if cluster.ring_nodes <= 1:
        return (
            f"the {cluster.replicate} replicas of each part sit in one node: their all-reduce stays on NVLink; put "
            "replicas on different nodes and shards inside"
        )
    return ""


def _traffic(made: Plan) -> None:
    c = made.cluster
    share, n = c.params / (c.tp * c.pp * c.shard), c.replicate
    groups = min(c.gpus_per_node, c.tp * c.shard)
    made.add(
        "reduce_groups", "reduce groups", c.tp * c.pp * c.shard, "count",
        f"tp x pp x shard; each is an all-reduce over {n} ranks, {c.members} on each of {c.ring_nodes} nodes",
    )  # fmt: skip
    item = ITEMSIZE[c.reduce_dtype]
    gradients = groups * share * item * 2 * (n - 1) / n / c.rails * FRAMING
    made.add(
        "rail_bytes", "gradients per rail, direction and step", gradients, "bytes",
        f"{counted(groups, 'group')} on a node x {share:.4g} parameters x {item} B x 2({n}-1)/{n} / "
        f"{counted(c.rails, 'rail')} (ring); "
        f"x {FRAMING:.3f} for LL128 and RoCE headers at MTU {MTU}",
    )  # fmt: skip
    other = 0.0
    if c.blocks > 1 and c.shard > 1:
        gathered = min(c.tp, c.gpus_per_node) * c.params / (c.tp * c.pp)
        weight = 2 * ITEMSIZE[c.dtype] + item
        other = gathered * weight * (c.shard - 1) / c.shard / c.rails * FRAMING
        made.add(
            "shard_bytes", "sharding traffic on the same ports", other, "bytes",
            f"a replica spans {c.blocks} nodes: two all-gathers in {c.dtype} and a reduce-scatter in {c.reduce_dtype} "
            f"per step of {gathered:.4g} parameters x ({c.shard}-1)/{c.shard} / {counted(c.rails, 'rail')}, "
            "one micro-batch",
        )  # fmt: skip
    mean = (gradients + other) * 8 / c.step_seconds
    made.add(
        "direction_mean", "mean load of a mirrored direction", mean, "bit/s",
        f"those bytes x 8 / {c.step_seconds:g} s" + ("; pipeline sends come on top" if c.pp > 1 else ""),
    )  # fmt: skip
    made.add(
        "direction_peak", "peak load of a mirrored direction", c.link, "bit/s",
        "the link's own speed: an all-reduce sends at line rate while it lasts",
    )  # fmt: skip
    if mean > c.link:
        made.reasons.append(
            f"a step's traffic needs {(gradients + other) * 8 / c.link:.3g} s of a link, but a step takes "
            f"{c.step_seconds:g} s: the inputs contradict each other"
        )


def _mirror(made: Plan) -> bool:
    """Choose links and count monitor ports; whether one port takes both directions of a link."""
    c = made.cluster
    per_port = int(c.monitor // c.link)
    if per_port < 1:
        made.reasons.append(
            f"a monitor port of {c.monitor / 1e9:g} Gbit/s is slower than one direction of a {c.link / 1e9:g} Gbit/s "
            "link: bursts would be dropped; give monitor ports at least the link's speed"
        )
    both = per_port >= 2
    made.links = choose_links(c, both)
    ports = Counter(link.pod for link in made.links)
    capacity = max(1, per_port // 2)
    monitors = {pod: math.ceil(count / capacity) if both else count for pod, count in ports.items()}
    worst = max(ports, key=lambda pod: (monitors[pod], ports[pod]))
    way = "both directions of one node" if both else "the out direction (switch to node) of two nodes"
    made.add(
        "source_ports", "mirrored ports", len(made.links) * c.rails, "count",
        f"{counted(c.rails, 'rail')} x {way} x {counted(c.slices, 'part')} of the model "
        f"({counted(c.pp, 'stage')} x {counted(c.blocks, 'node')} of a replica): any "
        "two edges of a ring, or one node's incoming tree links, show every final byte",
    )  # fmt: skip
    made.add(
        "sources_per_leaf", "mirrored ports on the busiest leaf", ports[worst], "count",
        f"a leaf per rail and per {c.nodes_per_leaf} nodes; pod {worst} holds {ports[worst]} of the mirrored nodes",
    )  # fmt: skip
    made.add(
        "sessions_per_leaf", "mirror sessions on that leaf", monitors[worst], "count",
        f"one per monitor port; a port of {c.monitor / 1e9:g} Gbit/s holds the {c.link / 1e9:g} Gbit/s of "
        f"{counted(per_port, 'direction')}. Vendors with one direction per session need two for both",
    )  # fmt: skip
    made.add(
        "monitor_ports", "monitor ports", sum(monitors.values()) * c.rails, "count",
        f"over {counted(len(ports), 'pod')} x {counted(c.rails, 'rail')}",
    )  # fmt: skip
    loaded = 2 * min(capacity, ports[worst]) if both else 1
    on_port = counted(loaded, "direction")
    made.add(
        "monitor_mean", "mean load of the busiest monitor port", loaded * made.value("direction_mean"), "bit/s",
        f"{on_port} x the mean load of one",
    )  # fmt: skip
    made.add(
        "monitor_peak", "peak load of the busiest monitor port", loaded * c.link, "bit/s",
        f"{on_port} x the link's speed",
    )  # fmt: skip
    mean, peak = made.value("monitor_mean"), made.value("monitor_peak")
    ring = max(float(RING_BYTES), mean * c.step_seconds / 8 * (1 - CAPTURE_RATE / peak))
    made.add(
        "ring_bytes", "capture ring per monitor port (--ring-mib)", ring, "bytes",
        f"the larger of {RING_BYTES >> 20} MiB and what is left of a step's bytes when all come at the peak and a "
        f"core takes {CAPTURE_RATE / 1e9:g} Gbit/s out",
    )  # fmt: skip
    if ring > RING_LIMIT:
        made.reasons.append(
            f"a monitor port may bring {ring / 2**30:.0f} GiB faster than they are read, a capture ring holds "
            f"{RING_LIMIT >> 30} GiB at most: mirror fewer directions per monitor port"
        )
    if mean > CAPTURE_RATE:
        made.reasons.append(
            f"a monitor port brings {mean / 1e9:.0f} Gbit/s on average, one core takes {CAPTURE_RATE / 1e9:g} Gbit/s "
            "out of its ring: mirror fewer directions per monitor port (slower ports, more of them)"
        )
    if monitors[worst] > c.mirror_sessions:
        made.reasons.append(
            f"{monitors[worst]} mirror sessions are needed on one leaf, it has {c.mirror_sessions}: faster monitor "
            f"ports ({2 * c.link / 1e9:g} Gbit/s halve it) or more, smaller leaves"
        )
    if not both and c.monitor_ports < 2:
        made.reasons.append(
            "the two halves of a ring come from two monitor ports and must reach one checkpoint node: give it 2 ports"
        )
    return both


def choose_links(cluster: Cluster, both: bool) -> list[Link]:
    """One node per part of the model (both directions) or two (out), spread over pods, tree roots avoided.

    In a group of N nodes the roots of NCCL's two trees are 0 and N-1 (N even) or 0 and 1 (N odd): any other node
    receives every final byte. With N = 2 both nodes are roots and the two edges together show everything.
    """
    wanted, load = (1 if both else 2), Counter[int]()
    found = []
    for part in range(cluster.slices):
        stage, block = divmod(part, cluster.blocks)
        first = stage * cluster.ring_nodes * cluster.blocks + block
        roots = (0, cluster.ring_nodes - 1) if cluster.ring_nodes % 2 == 0 else (0, 1)
        order = sorted(range(cluster.ring_nodes), key=lambda index: (index in roots, index))
        best = order[: max(wanted, cluster.ring_nodes - 2)]
        pods: dict[int, list[int]] = {}
        for index in best:
            node = first + index * cluster.blocks
            pods.setdefault(node // cluster.nodes_per_leaf, []).append(node)
        # Two halves end at one checkpoint node: from one pod the cables are short.
        whole = [pod for pod, nodes in pods.items() if len(nodes) >= wanted]
        if whole:
            chosen = pods[min(whole, key=lambda pod: (load[pod], pod))][:wanted]
        else:
            chosen = [pods[pod][0] for pod in sorted(pods, key=lambda pod: (load[pod], pod))[:wanted]]
        for node in chosen:
            pod = node // cluster.nodes_per_leaf
            load[pod] += 1
            found.append(Link(node, "both" if both else "out", stage, block, pod))
    return found


def _checkpoint_nodes(made: Plan, state: float, both: bool) -> int:
    c = made.cluster
    units = c.slices * c.rails
    params, item = c.params / units, ITEMSIZE[c.reduce_dtype]
    memory = 2 * state / units + 2 * params * item
    rings = c.monitor_ports * made.value("ring_bytes")
    room = c.node_memory - rings
    rate = min(max(1, c.node_cores - c.monitor_ports) * CORE_RATE, MEMORY_RATE)
    by_memory, by_rate = max(0, int(room // memory)), int(rate * c.step_seconds * APPLY_SHARE // params)
    if by_memory < 1:
        made.reasons.append(
            f"one rail's part needs {memory / 2**30:.0f} GiB of memory, a checkpoint node has {room / 2**30:.0f} GiB "
            "free beside its capture rings: give it more"
        )
    if by_rate < 1:
        made.reasons.append(
            f"one rail's part is {params:.3g} parameters: applying a step takes {params / rate:.2f} s, more than "
            f"{APPLY_SHARE:.0%} of a step of {c.step_seconds:g} s: give checkpoint nodes more cores"
        )
    ports = math.ceil(made.value("monitor_ports") / c.monitor_ports) if both else 0
    if not both:
        ports = math.ceil(units / max(1, c.monitor_ports // 2))
    needs = {
        "ports": ports,
        "memory": math.ceil(units / max(1, by_memory)),
        "optimizer speed": math.ceil(units / max(1, by_rate)),
    }
    cause = max(needs, key=lambda key: needs[key])
    nodes = needs[cause]
    held = math.ceil(units / nodes)
    made.add(
        "checkpoint_nodes", "checkpoint nodes", nodes, "count",
        f"decided by {cause}: {counted(units, 'part')} (rail x model part) ask for "
        + ", ".join(f"{count} by {key}" for key, count in needs.items()) + f"; {c.monitor_ports} ports per node",
    )  # fmt: skip
    made.add(
        "node_memory", "memory per checkpoint node", held * memory + rings, "bytes",
        f"{counted(held, 'part')} x (two copies of the state + two steps of {c.reduce_dtype} gradients) + "
        f"{counted(c.monitor_ports, 'capture ring')}",
    )  # fmt: skip
    share = held * state / units
    made.add(
        "node_disk", "disk per checkpoint node", KEPT_SNAPSHOTS * share, "bytes",
        f"{KEPT_SNAPSHOTS} snapshots (3 kept, 1 being written) x {held}/{units} of the state",
    )  # fmt: skip
    made.add(
        "apply_seconds", "time to apply a step", held * params / rate, "s",
        f"{held} x {params:.4g} parameters / {rate:.2e} a second: {c.node_cores} cores - {c.monitor_ports} that "
        f"capture, x {CORE_RATE:.2e}, at most {MEMORY_RATE:.1e} (AdamW)",
    )  # fmt: skip
    made.add(
        "persist_seconds", "time to write a snapshot", share / DISK_RATE, "s",
        f"a node's part / {DISK_RATE / 1e9:g} GB/s, all nodes at once",
    )  # fmt: skip
    made.add(
        "restore_seconds", "restore from memory", share * 8 / c.restore_link, "s",
        f"a node's part / its {c.restore_link / 1e9:g} Gbit/s service link, all nodes at once; one replica loads, the "
        "job spreads it",
    )  # fmt: skip
    made.add(
        "restore_disk_seconds", "restore from disk", share * max(8 / c.restore_link, 1 / DISK_RATE), "s",
        f"the same, read at {DISK_RATE / 1e9:g} GB/s",
    )  # fmt: skip
    return nodes


def _add_savings(made: Plan, result: Savings) -> None:
    for key, label, value, unit, how in result.rows():
        made.add(key, label, value, unit, how)


def _limits_of_this_release(made: Plan, nodes: int) -> None:
    c = made.cluster
    if c.tp * c.pp * c.shard > 1:
        made.notes.append(
            "this release follows DistributedDataParallel only: tp, pp and shard above 1 are planned, not followed yet"
        )
    if nodes > 1:
        made.notes.append(
            f"this release keeps a job's state on one checkpoint node: a split over {nodes} is planned, not done yet"
        )
    if c.pp > 1:
        made.notes.append("pipeline sends share the mirrored ports: they are in the peak, not in the mean")
    if made.links[0].direction == "out":
        made.notes.append(
            "out copies are taken on egress: on ASICs that copy at ingress or drop egress copies, in of the same nodes "
            "shows rings completely, but not trees: then pin NCCL_ALGO=Ring"
        )
    if made.value("monitor_peak") > MEASURED_CAPTURE:
        made.notes.append(
            f"capture was measured up to {MEASURED_CAPTURE / 1e9:g} Gbit/s a port, the ring's reader alone up to "
            f"{CAPTURE_RATE / 1e9:g}: whether NIC and kernel keep up with bursts shows only on the real link: "
            "`flowcheck daemon --observe`"
        )
    made.notes.append(
        "Ethernet (RoCE or TCP) is assumed: InfiniBand, EFA, SHARP and NVLS across nodes cannot be read from a mirror"
    )
