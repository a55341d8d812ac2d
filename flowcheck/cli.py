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
from typing import Any, Literal, NoReturn

import click

from flowcheck.config import DaemonConfig, load_config
from flowcheck.doctor.command import doctor_command
from flowcheck.errors import FlowcheckError, UsageError, VerificationFailed
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
@click.option("--store-gib", type=click.FloatRange(min=0.001), metavar="G", help="Most that the store may take.")
@click.option("--store-remote", metavar="URL", help="Copy snapshots there too: s3://, gs://, file:// ... (fsspec).")
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
@click.option(
    "--checksums/--no-checksums", default=True, show_default=True,
    help="Verify the TCP checksums and RoCE CRCs of mirrored frames; takes a quarter of the decoder's time more.",
)
@click.option(
    "--fault", multiple=True, metavar="[NAME:]SPEC",
    help="Rehearse: injure the frames of all sources, or of one; drop=0.001,seed=7 (docs/faults.md).",
)
@click.option(
    "--repair-percent", type=click.FloatRange(0, 10, min_open=True), default=1.0, show_default=True, metavar="P",
    help="Share of a trainer's step that may go into repair of what is unknown here.",
)
@click.option(
    "--repair-mib", type=click.IntRange(1, 256), default=64, show_default=True, metavar="N",
    help="Most that a trainer copies for it at the end of a step.",
)
@click.option(
    "--scrub", type=click.FloatRange(0, 10), default=0.1, show_default=True, metavar="P",
    help="Share of a trainer's step for comparing all that is known with it, bit by bit; 0: never.",
)
@click.option(
    "--compare-every", type=click.IntRange(min=1), metavar="K", help="Compare checksums with a trainer every K steps."
)
@click.option(
    "--checkpoint-root", type=click.Path(path_type=Path), multiple=True, metavar="DIR",
    help="Checkpoints below this folder may be read instead of uploaded (attach(checkpoint=PATH)).",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the optimizer [default: half of the cores].")
@click.option(
    "--keys", type=click.Path(path_type=Path), envvar="FLOWCHECK_KEYS", metavar="DIR",
    help="Let only clients with keys in, over tcp (flowcheck keygen DIR; $FLOWCHECK_KEYS).",
)
@click.option("--insecure", is_flag=True, help="Allow addresses other than loopback without keys.")
@click.option("--user", metavar="NAME|UID[:GID]", help="Become this user once the capture and all files are open.")
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
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--client", "clients", multiple=True, metavar="NAME", help="Make a key for this client.")
@click.option("--read-only", is_flag=True, help="These clients may ask and restore, but not attach or repair.")
def keygen(folder: Path, clients: tuple[str, ...], read_only: bool) -> None:
    """Make keys in DIR: the daemon's, if there is none yet, and one per client.

    Without --client, for a new DIR: "trainer", who may attach, and "reader", who may only ask and restore.
    """
    from flowcheck import keys

    if read_only and not clients:
        raise UsageError("--read-only needs --client NAME")
    rights = keys.READ if read_only else keys.WRITE
    wanted = dict.fromkeys(clients, rights) or {"trainer": keys.WRITE, "reader": keys.READ}
    for path in keys.generate(folder, wanted):
        click.echo(f"{path}  {keys.purpose(path)}")


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
@click.option("--allow-unknown", is_flag=True, help="Take the live step even if elements of it are unknown.")
def restore(source: str, out: Path, form: str, step: str, run: str | None, allow_unknown: bool) -> None:
    """Write the state of a step for the training script to load.

    SOURCE: a daemon's endpoint, a store's folder, or its fsspec URL.
    """
    from flowcheck.report import places
    from flowcheck.restore import restore as write

    snapshot = write(source, out, form, _step(step), run, allow_unknown)
    kind = "" if snapshot.confirmed else ", not confirmed by the trainer"
    click.echo(f"restored step {snapshot.step} of run {snapshot.run} (epoch {snapshot.epoch}{kind}) to {out}")
    click.echo(f"go on with step {snapshot.step + 1}, after the batches of the first {snapshot.step} optimizer steps")
    for note in snapshot.notes:
        click.echo(f"note: {note}", err=True)
    if snapshot.unknown:
        click.echo(f"NOT KNOWN: {snapshot.unknown.elements} elements, {'; '.join(places(snapshot.unknown))}", err=True)
    for reason in snapshot.reasons:
        click.echo(f"not bit-exact: {reason}")
    if snapshot.not_covered:
        click.echo(f"not covered (values of an earlier step): buffers {', '.join(snapshot.not_covered)}")


def _step(text: str) -> int | Literal["latest"]:
    if text == "latest":
        return "latest"
    if not text.isdecimal():
        raise UsageError(f"--step {text}: give latest or a step number")
    return int(text)


@main.command()
@click.argument("source")
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option("--run", metavar="R", help="Which run, where SOURCE holds several.")
@click.option("--step", metavar="latest|N", help="Of SOURCE, with CHECKPOINT [default: the checkpoint's own].")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait for the trainers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare(
    source: str, checkpoint: Path | None, run: str | None, step: str | None, timeout: float, as_json: bool
) -> int:
    """Compare bit by bit: the daemon at SOURCE with the trainers it follows, after the same step; or a step from a
    daemon or store SOURCE with a CHECKPOINT, a file of torch.save or a folder of torch.distributed.checkpoint.

    Exit status 0: equal; 4: different.
    """
    from flowcheck import compare as comparison

    if checkpoint is None:
        if step is not None:
            raise UsageError("--step goes with a CHECKPOINT: a trainer can only be compared at its next step")
        report = comparison.against_trainer(source, run, timeout)
    else:
        report = comparison.against_file(source, checkpoint, run, None if step is None else _step(step))
    lines = comparison.lines(report, source, "the trainers" if checkpoint is None else str(checkpoint))
    for line in [json.dumps(report)] if as_json else lines:
        click.echo(line)
    return VerificationFailed.exit_code if report["differing"] or report["more"] else 0


@main.command()
@click.argument("path")
def verify(path: str) -> None:
    """Check every file and checksum of a store, a run or one step, in a folder or at an fsspec URL."""
    from flowcheck.remote import connect, is_remote
    from flowcheck.verify import verify as check

    report = check(connect(path) if is_remote(path) else Path(path))
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
