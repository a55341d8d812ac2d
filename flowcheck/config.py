"""The daemon's options, and `--config FILE.toml`: defaults for them under their own names.

    interface = ["mon0"]
    store = "/var/lib/flowcheck"
    every-steps = 50
    vantage = ["fabric=mon0,mon1"]

An option given on the command line wins.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from flowcheck.errors import BadConfig, UsageError

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """The options of `flowcheck daemon`, under their own names."""

    interfaces: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    job: Path | None = None
    listen: tuple[str, ...] = ()
    store: Path | None = None
    store_gib: float | None = None
    store_remote: str | None = None
    journal: Path | None = None
    record: Path | None = None
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    observe: bool = False
    ring_mib: int = 256
    block_kib: int = 256
    landing_gib: float = 8.0
    vantage: tuple[str, ...] = ()
    vxlan_port: tuple[int, ...] = (4789,)
    nccl_version: str | None = None
    checksums: bool = True
    fault: tuple[str, ...] = ()
    repair_percent: float = 1.0
    repair_mib: int = 64
    scrub: float = 0.1
    compare_every: int | None = None
    checkpoint_root: tuple[Path, ...] = ()
    threads: int | None = None
    keys: Path | None = None
    insecure: bool = False
    user: str | None = None

    def __post_init__(self) -> None:
        if self.keys is not None and self.insecure:
            raise UsageError("--insecure lets everyone in, --keys only those who have one: leave out one of them")
        if bool(self.interfaces) == bool(self.files):
            raise UsageError("give either -i IFACE to capture or -r FILE to read a recording")
        for option, value in (("--store-gib", self.store_gib), ("--store-remote", self.store_remote)):
            if value is not None and self.store is None:
                raise UsageError(f"{option} needs --store DIR: snapshots are written there first")
        if self.observe and self.job is not None:
            raise UsageError("--observe follows no job: leave out --job")
        if self.files and not self.observe and self.job is None:
            raise UsageError("-r needs --job FILE (the job that was recorded) or --observe")
        if self.interfaces and self.job is not None:
            raise UsageError("--job goes with -r: a live job attaches by itself")
        if self.observe and not self.checksums:
            raise UsageError("--observe always verifies checksums: leave out --no-checksums")
        if self.observe and self.nccl_version is not None:
            raise UsageError("--nccl-version is for a job that attaches: leave out --observe")
        if self.nccl_version is not None and not _VERSION.fullmatch(self.nccl_version.strip()):
            raise UsageError(f"--nccl-version {self.nccl_version}: give a release, as in 2.19.4 or 2.19")


def _check_kind(parameter: click.Option, value: Any) -> None:
    """click reads 5.5 as 5 and true as 1: right for words of a command line, not for values that have a kind."""
    if isinstance(value, bool) != parameter.is_flag or isinstance(value, dict):
        due = "true or false" if parameter.is_flag else "another kind of value"
        raise ValueError(f"{str(value).lower()} does not fit, {due} does")
    if isinstance(parameter.type, click.types.IntParamType) and isinstance(value, float):
        raise ValueError(f"{value} is not a whole number")


def load_config(path: Path, ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with what the file sets and the command line does not.

    Raises BadConfig naming the file and the field: unreadable, not TOML, an unknown name, a value that does not fit.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not TOML: {error}") from error
    known: dict[str, click.Option] = {
        name.lstrip("-"): parameter
        for parameter in ctx.command.params
        for name in parameter.opts
        if isinstance(parameter, click.Option) and name.startswith("--") and parameter.name != "config"
    }
    merged = dict(options)
    for name, value in values.items():
        if name not in known:
            raise BadConfig(f"{path}: {name}: unknown option; known are {', '.join(sorted(known))}")
        parameter = known[name]
        assert parameter.name is not None
        if ctx.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT:
            continue
        if parameter.multiple and not isinstance(value, list):
            value = [value]  # interface = "mon0"
        try:
            _check_kind(parameter, value)
            merged[parameter.name] = parameter.type_cast_value(ctx, value)
        except (click.BadParameter, TypeError, ValueError) as error:
            raise BadConfig(f"{path}: {name}: {error}") from error
    return merged
