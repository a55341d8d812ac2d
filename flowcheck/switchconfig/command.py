"""`flowcheck switch-config`: print the mirror configuration of a switch."""

from __future__ import annotations

import click

from flowcheck.switchconfig import VENDORS, MirrorRequest, Source, Tunnel


@click.command("switch-config")
@click.argument("vendor", type=click.Choice(list(VENDORS)), metavar="VENDOR")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="PORT[:in|out|both]",
    help="Mirror this port: in = what its host sends, out = what it receives. Repeatable.",
)
@click.option("--monitor", metavar="PORT", help="The checkpoint node is at this port.")
@click.option("--erspan", nargs=2, metavar="SRC_IP DST_IP", help="Send copies encapsulated: switch, checkpoint node.")
@click.option("--session", default=1, show_default=True, metavar="N", help="Session, group or name number.")
@click.option("--remove", is_flag=True, help="Print the commands that end this mirror.")
def switch_config_command(
    vendor: str,
    sources: tuple[str, ...],
    monitor: str | None,
    erspan: tuple[str, str] | None,
    session: int,
    remove: bool,
) -> None:
    """Print the configuration that copies ports of a VENDOR's switch to a checkpoint node.

    VENDOR: sonic, cumulus, eos, nxos, comware, junos, cloudengine, linux, ovs or aws. The limits that the vendor
    documents come as comments. Lines after "check on your release" differ between releases; the rest is documented
    syntax. Nothing is sent to a switch.
    """
    request = MirrorRequest(
        tuple(Source.parse(text) for text in sources),
        monitor,
        Tunnel.parse(*erspan) if erspan else None,
        session,
    )
    click.echo(VENDORS[vendor].script(request, remove), nl=False)
