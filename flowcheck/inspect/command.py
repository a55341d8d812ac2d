"""`flowcheck inspect`: what is in a capture."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("inspect")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="JSON Lines: summary, streams, messages, collectives.")
@click.option("--job", type=click.Path(path_type=Path), metavar="FILE", help="Job file: whose traffic it is.")
@click.option("--dtype", metavar="T", help="Elements of all-reduces: fp32, fp16, bf16, ...")
@click.option("--nccl-version", "version", metavar="V", help="NCCL's release, as in 2.19.4, where the capture does not "
              "tell it.")
@click.option("--frame", type=click.IntRange(min=1), metavar="N", help="Only dissect frame N (from 1) with scapy.")
def inspect_command(
    files: tuple[Path, ...], as_json: bool, job: Path | None, dtype: str | None, version: str | None, frame: int | None
) -> None:
    """Say what is in captures: who talks, which library, algorithm and protocol, what is missing and why.

    Several FILEs (pcap, pcapng) are merged by time. Without --json: a table.
    """
    if frame is not None:
        from flowcheck.inspect.frame import dissect

        click.echo(dissect(files, frame))
        return
    from flowcheck.inspect.report import inspect
    from flowcheck.inspect.table import table

    with inspect(files, job=job, dtype=dtype, version=version) as report:
        if not as_json:
            click.echo(table(report))
            return
        for line in report.lines():
            click.echo(line)
        for note in [*report.refusals, *report.problems, *report.notes]:
            click.echo(f"flowcheck: note: {note}", err=True)
