"""`flowcheck lab`: try a script, the mirroring and the daemon before anything touches a real switch."""

from __future__ import annotations

import click

from flowcheck.lab.config import TCP, TRANSPORTS, LabConfig, Mirror
from flowcheck.lab.nccl_wire_job import ALGORITHMS, PROTOCOLS


@click.command("lab", context_settings={"allow_interspersed_args": False})
@click.option("--ranks", default=2, show_default=True, help="World size.")
@click.option(
    "--gpus-per-node",
    "--ranks-per-node",
    "ranks_per_node",
    default=1,
    show_default=True,
    help="Ranks that share a node and its ports.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default=TCP,
    show_default=True,
    help="tcp: gloo as it is. roce, socket: reduce and send as NCCL does, over RoCEv2 or its own TCP sockets.",
)
@click.option("--nccl-version", default="2.28.9", show_default=True, help="NCCL: release, 2.18 to 2.30.")
@click.option("--algorithm", type=click.Choice(ALGORITHMS), help="NCCL: of all-reduces.  [default: by size]")
@click.option("--protocol", type=click.Choice(PROTOCOLS), help="NCCL: how data lie in messages.  [default: by size]")
@click.option("--channels", default=1, show_default=True, help="NCCL: rings, and trees, side by side.")
@click.option("--rails", default=1, show_default=True, help="NCCL: network interfaces per node, shared by its ranks.")
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="RANK:in|out|both",
    help="Mirror this rank's switch port: in = what it sends. Repeatable; none: no mirror.  "
    "[default: all ports of rank 1's node]",
)
@click.option(
    "--mtu",
    default=0,
    help="MTU of the training network, or RDMA path MTU (1024, 4096).  [default: 1500, roce: 1024]",
)
@click.option(
    "--rendezvous",
    type=click.Choice(["training", "management"]),
    default="training",
    show_default=True,
    help="Network that MASTER_ADDR lies on; the management network is never mirrored.",
)
@click.option("--ipv6", is_flag=True, help="IPv6 alone on the training network.")
@click.option(
    "--monitor-offload/--no-monitor-offload",
    default=True,
    show_default=True,
    help="Copies as large as the trainers' kernel makes them (up to 64 KiB), or cut to the MTU as on a wire.",
)
@click.option("--store", type=click.Path(file_okay=False), help="Folder for the daemon's snapshots.")
@click.option(
    "--listen", metavar="ipc://PATH", help="Where this host reaches the daemon.  [default: private]"
)
@click.option("--journal", type=click.Path(dir_okay=False), help="File for the daemon's line per step.")
@click.option("--record", type=click.Path(dir_okay=False), help="Record mirrored frames to this pcap file.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="SPEC",
    help="Rehearse: injure the mirrored frames; drop=0.001,seed=7 (docs/faults.md).",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT.py|-m MODULE [ARGS...]")
@click.pass_context
def lab_command(
    context: click.Context,
    ranks: int,
    ranks_per_node: int,
    transport: str,
    nccl_version: str,
    algorithm: str | None,
    protocol: str | None,
    channels: int,
    rails: int,
    mirrors: tuple[str, ...],
    mtu: int,
    rendezvous: str,
    ipv6: bool,
    monitor_offload: bool,
    store: str | None,
    listen: str | None,
    journal: str | None,
    record: str | None,
    faults: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    """Run a training script on a virtual cluster, with its traffic mirrored to flowcheck's daemon.

    Every rank runs in a node of its own, or several in one; a switch (a Linux bridge) joins them, whose ports the
    kernel mirrors. Works as root and as an ordinary user, needs no system package and leaves nothing behind.

    Exit status: 0 if all ranks are 0, else that of the first rank to fail (128 + signal); 1 or 77 if the lab
    itself failed.
    """
    # Only here, so that the other commands do not pay for it.
    from flowcheck.lab.launcher import run
    from flowcheck.lab.topology import MONITOR
    from mirror.faults import faults_of

    faults_of(faults, (MONITOR,))
    chosen: tuple[Mirror, ...] | None = None
    if mirrors:
        chosen = () if mirrors == ("none",) else tuple(Mirror.parse(text) for text in mirrors)
    config = LabConfig(
        command=command,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        transport=transport,
        nccl_version=nccl_version,
        algorithm=algorithm,
        protocol=protocol,
        channels=channels,
        rails=rails,
        mirrors=chosen,
        mtu=mtu,
        rendezvous=rendezvous,
        ipv6=ipv6,
        monitor_offload=monitor_offload,
        store=store,
        listen=listen,
        journal=journal,
        record=record,
        faults=faults,
    )
    context.exit(run(config))
