"""The command line. Every error is one line on stderr and an exit status (`flowcheck.errors`); never a traceback.

Commands import what they need when they run: `status` and `verify` work without torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from flowcheck.config import DaemonConfig, load_config
from flowcheck.doctor.command import doctor_command
from flowcheck.errors import FlowcheckError, UsageError
from flowcheck.inspect.command import inspect_command
from flowcheck.lab.command import lab_command
from flowcheck.plan_command import plan_command
from flowcheck.switchconfig.command import switch_config_command


class Commands(click.Group):
    """A click group that ends in one line and an exit status, whatever goes wrong."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> NoReturn:
        try:
            status = super().main(args, *rest, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            where = f" ({context.command_path} --help shows how)" if context is not None else ""
            message = " ".join(error.format_message().split()).rstrip(".")
            click.echo(f"flowcheck: {message}{where}", err=True)
            sys.exit(error.exit_code)
        except FlowcheckError as error:
            click.echo(f"flowcheck: {error}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("flowcheck: interrupted", err=True)
            sys.exit(130)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as error:
            if os.environ.get("FLOWCHECK_DEBUG"):
                raise
            click.echo(
                f"flowcheck: unexpected {type(error).__name__}: {error} (FLOWCHECK_DEBUG=1 shows where: report it)",
                err=True,
            )
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flowcheck")
def main() -> None:
    """Checkpoints of large training runs from mirrored all-reduce traffic, at no cost to the trainers."""


@main.command()
@click.option("-i", "--interface", "interfaces", multiple=True, metavar="IFACE", help="Capture from this mirror port.")
@click.option(
    "-r", "--read", "files", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="Read recorded frames (pcap, pcapng) instead; several are merged by time.",
)
@click.option("--job", type=click.Path(path_type=Path), metavar="FILE", help="Job file, with -r: whose traffic it is.")
@click.option("--listen", multiple=True, metavar="ENDPOINT", help="tcp://HOST:PORT or ipc://PATH; port 0 picks one.")
@click.option("--store", type=click.Path(path_type=Path), metavar="DIR", help="Keep snapshots here.")
@click.option("--journal", type=click.Path(path_type=Path), metavar="FILE", help="One JSON line per step.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Write all frames to this pcap file.")
@click.option("--every-steps", type=click.IntRange(min=1), metavar="K", help="Persist a snapshot every K steps.")
@click.option("--every-seconds", type=click.FloatRange(min=0.1), metavar="S", help="Persist one every S seconds.")
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Snapshots kept per epoch.")
@click.option("--observe", is_flag=True, help="No job: decode and report collectives, coverage and loss.")
@click.option("--ring-mib", type=click.IntRange(4, 65536), default=256, show_default=True, help="Capture ring size.")
@click.option("--block-kib", type=click.IntRange(128, 65536), default=256, show_default=True, help="Ring block size.")
@click.option(
    "--landing-gib", type=click.FloatRange(min=0.001), default=8.0, show_default=True,
    help="Memory for gradients in flight.",
)
@click.option(
    "--vantage", multiple=True, metavar="NAME=MEMBER,...",
    help="Interfaces and tunnels ([KIND ]SOURCE>DESTINATION[#ID], * for any) that see the same fabric. "
    "[default: all interfaces; every tunnel for itself]",
)
@click.option(
    "--vxlan-port", type=click.IntRange(1, 65535), multiple=True, default=(4789,), show_default=True, metavar="PORT",
    help="UDP port of VXLAN tunnels.",
)
@click.option("--nccl-version", metavar="V", help="NCCL's release, for jobs that do not tell it.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the optimizer [default: half of the cores].")
@click.option("--insecure", is_flag=True, help="Allow addresses other than loopback without keys.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE.toml", help="Defaults for these options.")
@click.pass_context
def daemon(ctx: click.Context, config: Path | None, **options: Any) -> int:
    """Capture mirrored traffic and keep the model of the latest step."""
    if config is not None:
        options = load_config(config, ctx, options)
    checked = DaemonConfig(**options)
    from flowcheck.daemon import run

    return run(checked)


@main.command()
@click.argument("endpoint")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--watch", is_flag=True, help="Every second until interrupted.")
@click.option("--timeout", type=float, default=5.0, show_default=True, help="Seconds to wait for an answer.")
def status(endpoint: str, as_json: bool, watch: bool, timeout: float) -> None:
    """What the daemon at ENDPOINT holds and how far it is behind the job."""
    from flowcheck.client import status as ask
    from flowcheck.report import status_text

    while True:
        answer = ask(endpoint, timeout)
        click.echo(json.dumps(answer) if as_json else status_text(answer))
        if not watch:
            return
        time.sleep(1)


@main.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="PATH", help="File, or folder (dcp).")
@click.option("--format", "form", type=click.Choice(["torch", "dcp"]), default="torch", show_default=True)
@click.option("--step", default="latest", show_default=True, metavar="latest|N")
@click.option("--run", metavar="R", help="Which run, where SOURCE holds several.")
def restore(source: str, out: Path, form: str, step: str, run: str | None) -> None:
    """Write the state of a step, from a daemon's endpoint or a store folder SOURCE, for the training script to load."""
    from flowcheck.restore import restore as write

    if step != "latest" and not step.isdecimal():
        raise UsageError(f"--step {step}: give latest or a step number")
    snapshot = write(source, out, form, "latest" if step == "latest" else int(step), run)
    kind = "" if snapshot.confirmed else ", not confirmed by the trainer"
    click.echo(f"restored step {snapshot.step} of run {snapshot.run} (epoch {snapshot.epoch}{kind}) to {out}")
    for note in snapshot.notes:
        click.echo(f"note: {note}", err=True)
    for reason in snapshot.reasons:
        click.echo(f"not bit-exact: {reason}")
    if snapshot.not_covered:
        click.echo(f"not covered (values of an earlier step): buffers {', '.join(snapshot.not_covered)}")


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
def verify(path: Path) -> None:
    """Check every file and checksum of a store, a run or one step."""
    from flowcheck.verify import verify as check

    report = check(path)
    for problem in report.problems:
        click.echo(problem, err=True)
    click.echo(report.summary())
    report.require()


@main.command()
@click.option("--steps", type=click.IntRange(min=8), default=40, show_default=True, help="Optimizer steps altogether.")
@click.option("--seed", type=int, help="Choose the step of the kill [default: random].")
def demo(steps: int, seed: int | None) -> int:
    """Train, kill, restore, resume and compare: four ranks on this machine, real mirroring, about a minute."""
    from flowcheck.demo import run

    return run(steps, seed)


main.add_command(lab_command, "lab")
main.add_command(inspect_command, "inspect")
main.add_command(doctor_command, "doctor")
main.add_command(switch_config_command, "switch-config")
main.add_command(plan_command, "plan")
