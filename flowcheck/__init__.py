"""Checkpoints of large training runs from mirrored all-reduce traffic, at no cost to the trainers.

In a trainer: `flowcheck.attach(ddp_model, optimizer)`. To get a state back: `flowcheck.load(source)` or the
command `flowcheck restore`. Importing this package imports neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowcheck.client import load as load
    from flowcheck.trainer import attach as attach

__version__ = "0.1.0"

__all__ = ["__version__", "attach", "digest", "load"]

_HOMES = {"attach": "flowcheck.trainer", "digest": "reconstruct.digest", "load": "flowcheck.client"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flowcheck' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
