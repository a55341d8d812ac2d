"""Whether kernels have yet to be compiled, which a user waits for once after an installation or a change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mirror.kernel_cache import VARIABLE


def announce(report: Callable[[str], None]) -> None:
    """Say so, if nothing compiled is there."""
    folder = os.environ.get(VARIABLE)
    if folder is not None and next(Path(folder).rglob("*.nbi"), None) is None:
        report("compiles its kernels, once for this version: this takes a minute or two")
